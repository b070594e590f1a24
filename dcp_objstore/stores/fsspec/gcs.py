"""`ObjectStore` over gcsfs, through its `call`: one request of GCS's JSON API, sent once.

gcsfs's own verbs would send a chunk of an upload or the pages of a listing without retries, which
are switched off, and read body and generation by separate requests.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from email.utils import parsedate_to_datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from dcp_objstore.errors import StoreUnavailableError, UnsupportedError
from dcp_objstore.stores.answers import check_fits
from dcp_objstore.stores.buffers import WatchedBuffers, cut_parts
from dcp_objstore.stores.fsspec.store import FsspecStore
from dcp_objstore.stores.protocol import IfAbsent, ObjectMeta, Precondition, Version

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from dcp_objstore.stores.fsspec.filesystems import Filesystems
    from dcp_objstore.stores.urls import StoreUrl

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

    @property
    def reports_throttling(self) -> Collection[str]:
        """All."""
        return ("put", "put_stream", "get", "open_range", "head", "list", "delete")

    def _put(
        self,
        place: str,
        buffers: Sequence[Buffer],
        precondition: Precondition | None,
        *,
        retry: bool,
    ) -> Version:
        if precondition is not None and not isinstance(precondition, IfAbsent):
            raise UnsupportedError("gcsfs cannot replace an object conditionally")
        body = b"".join(buffers)
        mode = "overwrite" if precondition is None else "create"
        pipe = partial(self._filesystems.write.pipe_file, place, body, mode=mode)
        if retry:
            tries = self._filesystems.tries("put", self._key(place), len(body))
            answer = self._filesystems.run(tries, pipe, repeatable=precondition is None)
        else:
            answer = pipe()
        if isinstance(answer, Mapping):
            return Version(None, str(answer["generation"]))
        return self._head(place).version  # large: it tells the upload's address

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
            return self._put(place, [chunk], None, retry=True)
        fs, key = self._filesystems.write, self._key(place)
        begin = partial(sync, fs.loop, initiate_upload, fs, self._bucket, key)
        address = self._filesystems.run(self._filesystems.tries("put_stream", key), begin)
        if not isinstance(address, str):
            raise UnsupportedError("gcsfs cannot stream to a zonal bucket in chunks")
        offset, answer = 0, b""
        try:
            while chunk:
                following = next(chunks, b"")
                answer = self._send_chunk(key, address, chunk, offset, last=not following)
                offset, chunk = offset + len(chunk), following
        except BaseException:
            with suppress(Exception):  # an upload that is not completed is gone after a week
                fs.call("DELETE", address)
            raise
        if not answer:
            return self._head(place).version
        return Version(None, str(json.loads(answer)["generation"]))

    def _send_chunk(
        self, key: str, address: str, chunk: bytes, offset: int, *, last: bool
    ) -> bytes:
        """Send a chunk; return the body of the answer. GCS ignores bytes that it has already."""
        end, left = offset + len(chunk), memoryview(chunk)
        while True:
            start = end - len(left)
            headers = {
                "Content-Range": f"bytes {start}-{end - 1}/{end if last else '*'}",
                "Content-Type": "application/octet-stream",
            }
            call = self._filesystems.write.call
            send = partial(call, "PUT", address, headers=headers, data=left)
            tries = self._filesystems.tries("put_stream", key, len(left))
            told, body = self._filesystems.run(tries, send)
            until = told.get("Range", "").rpartition("-")[2]
            came = int(until) + 1 if until else end if last else start
            if came >= end:
                return bytes(body)
            if came <= start:
                raise StoreUnavailableError("the store took nothing of a part of the upload")
            left = left[came - end :]

    def _get(self, place: str, max_size_bytes: int) -> tuple[bytes, ObjectMeta]:
        meta = self._head(place)
        check_fits(meta.size_bytes, max_size_bytes)
        headers, body = self._ask("get", place, self._fs.url(place))
        generation = headers["X-Goog-Generation"]
        if meta.version.version != generation:  # rewritten in between; the body's own then
            modified = parsedate_to_datetime(headers["Last-Modified"])
            meta = ObjectMeta(meta.key, len(body), Version(None, generation), modified)
        check_fits(len(body), max_size_bytes)
        return body, meta

    def _fetch(self, place: str, start: int, end: int) -> bytes:
        cat = partial(self._fs.cat_file, place, start=start, end=end)
        tries = self._filesystems.tries("open_range", self._key(place))
        return bytes(self._filesystems.run(tries, cat))

    def _head(self, place: str) -> ObjectMeta:
        found = self._ask("head", place, "b/{}/o/{}", self._bucket, self._key(place), json_out=True)
        return self._described(found)

    def _delete(self, place: str) -> None:
        self._ask("delete", place, "b/{}/o/{}", self._bucket, self._key(place), method="DELETE")

    def _listing(self, folder: str) -> Iterator[ObjectMeta]:
        below = f"{folder}/".removeprefix(f"{self._bucket}/")
        token: dict[str, str] = {}
        while True:
            with self._errors(None):
                page = self._ask(
                    "list", folder, "b/{}/o", self._bucket, prefix=below, json_out=True, **token
                )
            for found in page.get("items", ()):
                yield self._described(found)
            if page.get("nextPageToken") is None:
                return
            token = {"pageToken": page["nextPageToken"]}

    def _ask(self, verb: str, place: str, *path: str, method: str = "GET", **settings: Any) -> Any:
        tries = self._filesystems.tries(verb, self._key(place))
        return self._filesystems.run(tries, partial(self._fs.call, method, *path, **settings))

    def _key(self, place: str) -> str:
        return place.removeprefix(f"{self._bucket}/")

    def _described(self, found: Mapping[str, Any]) -> ObjectMeta:
        """An object's metadata, from its description ("Objects")."""
        key = self._relative(f"{self._bucket}/{found['name']}")
        version = Version(None, str(found["generation"]))
        modified = datetime.fromisoformat(found["updated"])
        return ObjectMeta(key, int(found.get("size", 0)), version, modified)

    def _bucket_is_missing(self, error: BaseException) -> bool:  # noqa: ARG002  it says nothing
        """Whether a 404, of which gcsfs drops the body, means the bucket. Asked once."""
        if self._seen:
            return False
        try:
            self._fs.call("GET", "b/{}/o", self._bucket, maxResults=1)
        except FileNotFoundError:
            return True
        except Exception as other:  # noqa: BLE001  not allowed to ask: no news
            del other
        self._seen = True
        return False
