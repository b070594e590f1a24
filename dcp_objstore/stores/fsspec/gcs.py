"""`ObjectStore` over gcsfs, each of whose requests is sent once and sent again from here.

gcsfs's own verbs would send a chunk of an upload without retries, which are switched off, and ask
for a folder of each object's name, too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from email.utils import parsedate_to_datetime
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from dcp_objstore.errors import (
    BucketNotFoundError,
    DcpObjstoreError,
    ObjectNotFoundError,
    StoreUnavailableError,
)
from dcp_objstore.stores.buffers import WatchedBuffers, cut_parts
from dcp_objstore.stores.fsspec.store import FsspecStore
from dcp_objstore.stores.protocol import Capabilities, ObjectMeta, Version

if TYPE_CHECKING:
    from dcp_objstore.stores.fsspec.filesystems import Filesystems
    from dcp_objstore.stores.urls import StoreUrl

T = TypeVar("T")

# All chunks of a resumable upload but the last are multiples of this (docs: "Resumable uploads").
_CHUNK_BYTES = 256 * 1024


class GcsfsStore(FsspecStore):
    """A store rooted at one URL, over gcsfs.

    An object is created conditionally (`ifGenerationMatch=0`), but gcsfs has no call for an update
    against a generation. A large object is one resumable upload, whose parts go one after the
    other.
    """

    def __init__(self, url: StoreUrl, filesystems: Filesystems) -> None:
        super().__init__(url, filesystems)
        self._bucket = url.bucket
        self._seen = False  # whether the bucket has been seen

    @property
    def capabilities(self) -> Capabilities:
        """Streams go in order. A create, and no update."""
        return Capabilities(conditional_update=False, multipart=False, copies=False)

    @property
    def reports_throttling(self) -> Collection[str]:
        """All."""
        return ("put", "put_stream", "get", "open_range", "head", "list", "delete")

    def _send(
        self,
        verb: str,
        place: str,
        request: Callable[[], T],
        size_bytes: int = 0,
        *,
        repeatable: bool = True,
    ) -> T:
        """Send a request, again where that may help."""
        tries = self._filesystems.tries(verb, self._key(place), size_bytes)
        return self._filesystems.run(tries, request, repeatable=repeatable)

    def _translate(self, error: Exception) -> DcpObjstoreError:
        translated = super()._translate(error)
        if type(translated) is not ObjectNotFoundError or self._seen:
            return translated
        # It may mean the bucket: gcsfs drops the body of a 404. The bucket is asked for once.
        try:
            self._fs.call("GET", "b/{}/o", self._bucket, maxResults=1)
        except FileNotFoundError:
            return BucketNotFoundError(f"the bucket does not exist: {translated.message}")
        except Exception as other:  # noqa: BLE001  not allowed to ask: no news
            del other
        self._seen = True
        return translated

    def _write(self, place: str, body: bytes, *, absent: bool, retry: bool) -> None:
        mode = "create" if absent else "overwrite"
        pipe = partial(self._filesystems.write.pipe_file, place, body, mode=mode)
        if retry:
            self._send("put", place, pipe, len(body), repeatable=not absent)
        else:
            pipe()

    def _put_stream(
        self,
        place: str,
        source: WatchedBuffers,
        part_size_bytes: int,
        max_concurrency: int,  # noqa: ARG002  in order
    ) -> Version:
        """Bytes are copied once, into the chunk being built."""
        from fsspec.asyn import sync
        from gcsfs.core import initiate_upload

        size_bytes = part_size_bytes // _CHUNK_BYTES * _CHUNK_BYTES
        chunks = map(b"".join, cut_parts(source, size_bytes))
        chunk = next(chunks, b"")
        if len(chunk) < size_bytes:
            self._write(place, chunk, absent=False, retry=True)
            return Version()
        fs, key = self._filesystems.write, self._key(place)
        begin = partial(sync, fs.loop, initiate_upload, fs, self._bucket, key)
        address: str = self._send("put_stream", place, begin)
        offset = 0
        try:
            while chunk:
                following = next(chunks, b"")
                self._send_chunk(place, address, chunk, offset, last=not following)
                offset, chunk = offset + len(chunk), following
        except BaseException:
            with suppress(Exception):  # an upload that is not completed is gone after a week
                fs.call("DELETE", address)
            raise
        return Version()

    def _send_chunk(
        self, place: str, address: str, chunk: bytes, offset: int, *, last: bool
    ) -> None:
        """Send a chunk. GCS may take the front of it only, and ignores bytes that it has."""
        end, rest = offset + len(chunk), memoryview(chunk)
        while rest:
            start = end - len(rest)
            headers = {
                "Content-Range": f"bytes {start}-{end - 1}/{end if last else '*'}",
                "Content-Type": "application/octet-stream",
            }
            call = self._filesystems.write.call
            send = partial(call, "PUT", address, headers=headers, data=rest)
            answer, _ = self._send("put_stream", place, send, len(rest))
            until = answer.get("Range", "").rpartition("-")[2]
            stored_end = int(until) + 1 if until else end if last else start
            if stored_end <= start:
                raise StoreUnavailableError("the store took nothing of a part of the upload")
            rest = rest[stored_end - start :]

    def _get(self, place: str, max_size_bytes: int) -> tuple[bytes, ObjectMeta]:
        self._fits(self._head(place), max_size_bytes)
        ask = partial(self._fs.call, "GET", self._fs.url(place))
        headers, body = self._send("get", place, ask)
        version = Version(None, headers["X-Goog-Generation"])
        modified = parsedate_to_datetime(headers["Last-Modified"])
        meta = ObjectMeta(self._relative(place), len(body), version, modified)
        return body, self._fits(meta, max_size_bytes)  # it may have been rewritten in between

    def _fetch(self, place: str, start: int, end: int) -> bytes:
        return self._send("open_range", place, partial(super()._fetch, place, start, end))

    def _delete(self, place: str) -> None:
        self._send("delete", place, partial(super()._delete, place))

    def _info(self, place: str) -> Mapping[str, Any]:
        path = ("b/{}/o/{}", self._bucket, self._key(place))
        ask = partial(self._fs.call, "GET", *path, json_out=True)
        info: Mapping[str, Any] = self._send("head", place, ask)
        return info

    def _find(self, folder: str) -> Mapping[str, Mapping[str, Any]]:
        find = partial(self._fs.find, folder, detail=True, update_cache=False)
        return self._send("list", folder, find)

    def _key(self, place: str) -> str:
        return place.removeprefix(f"{self._bucket}/")
