"""`ObjectStore` over any filesystem of fsspec but s3fs, which has its own in `fsspec.s3`.

`fsspec.kinds` says how a kind of filesystem is written. Where an object would be visible while it
is being written, it is written under another name in the same folder, which listings leave out, and
then moved: by the filesystem's own rename if it has one, otherwise by copying and removing, which
is only as atomic as that copy.

fsspec's filesystems have no conditional update. They read body and metadata by separate requests,
so `get` compares the metadata before and after.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from dcp_objstore.errors import (
    BucketNotFoundError,
    DcpObjstoreError,
    ObjectNotFoundError,
    PreconditionFailedError,
    StoreUnavailableError,
    UnsupportedError,
)
from dcp_objstore.forking import PerProcess
from dcp_objstore.stores.answers import check_fits
from dcp_objstore.stores.base import BaseStore
from dcp_objstore.stores.buffers import WatchedBuffers, cut_parts
from dcp_objstore.stores.fsspec.errors import status_and_code
from dcp_objstore.stores.fsspec.filesystems import Filesystems
from dcp_objstore.stores.fsspec.info import modified_of, state_of, version_of
from dcp_objstore.stores.fsspec.kinds import UNKNOWN, ways_of
from dcp_objstore.stores.protocol import (
    Capabilities,
    IfAbsent,
    ObjectMeta,
    Precondition,
    RangeReading,
    Version,
)
from dcp_objstore.stores.ranges import FETCHED_READING, FetchedSource
from dcp_objstore.stores.urls import StoreUrl, check_key, check_prefix

if TYPE_CHECKING:
    from typing_extensions import Buffer

_OURS = ".dcp-objstore."  # names that start so are being written, and are no objects
_GET_TRIES = 5
# fsspec's memory filesystem has no lock of its own; writers of this process take this one.
_memory_lock = PerProcess(threading.RLock)


class FsspecStore(BaseStore[str]):
    """A store rooted at one URL, over the blocking calls of a filesystem.

    Retries are the filesystem's own, also of a `put` with `retry=False`. They cannot be seen from
    here, so throttling is judged by how long requests take.
    """

    def __init__(self, url: StoreUrl, filesystems: Filesystems) -> None:
        super().__init__(url, filesystems.endpoint_url)
        self._filesystems = filesystems
        self._fs = filesystems.read
        self._ways = ways_of(self._fs)
        self._root: str = self._fs._strip_protocol(str(url)).rstrip("/")
        self._made: set[str] = set()  # parents that were made
        self._seen = False  # whether the bucket has been seen

    @property
    def capabilities(self) -> Capabilities:
        """Streams go in order. A create where the filesystem has an atomic one; no update.

        Of a filesystem that we do not know, nothing that we could not see to is claimed.
        """
        known = self._ways is not UNKNOWN
        return Capabilities(
            conditional_create=self._ways.create is not None,
            conditional_update=False,
            multipart=False,
            clean_abort=known,
            atomic_put=known,
            modified_times=known,
        )

    @property
    def range_reading(self) -> RangeReading:
        """See `ObjectStore.range_reading`."""
        return FETCHED_READING

    def _range_source(self, place: str) -> FetchedSource:
        return FetchedSource(partial(self._fetch, place))

    def list(self, prefix: str = "") -> Iterator[ObjectMeta]:
        """See `ObjectStore.list`; all of it is in memory at once."""
        folder = check_prefix(prefix)
        return self._listing(f"{self._root}/{folder}" if folder else self._root)

    # How the filesystem is used; gcsfs has other ways.

    def _place(self, key: str | None) -> str:
        self._filesystems.check_process()
        return self._root if key is None else f"{self._root}/{check_key(key)}"

    def _translate(self, error: Exception) -> DcpObjstoreError:
        found = self._filesystems.translate(error)
        if type(found) is ObjectNotFoundError and self._bucket_is_missing(error):
            return BucketNotFoundError(f"the bucket does not exist: {found.message}")
        return found

    def _put(
        self,
        place: str,
        buffers: Sequence[Buffer],
        precondition: Precondition | None,
        *,
        retry: bool,  # noqa: ARG002  retries are the filesystem's own
    ) -> Version:
        body = b"".join(buffers)
        if precondition is None:
            self._write(place, body)
        elif isinstance(precondition, IfAbsent):
            self._create(place, body)
        else:
            name = type(self._fs).__name__
            raise UnsupportedError(f"{name} cannot replace an object conditionally")
        return version_of(self._info(place))

    def _put_stream(
        self,
        place: str,
        source: WatchedBuffers,
        part_size_bytes: int,
        max_concurrency: int,  # noqa: ARG002  in order
    ) -> Version:
        """Bytes are copied once, into the part being built."""
        parts = map(b"".join, cut_parts(source, part_size_bytes))
        first = next(parts, b"")
        if len(first) < part_size_bytes:
            self._write(place, first)
        elif self._ways.whole and self._ways.create != "lock":
            self._fill(place, first, parts, part_size_bytes)
        else:
            with self._beside(place) as temporary:
                self._fill(temporary, first, parts, part_size_bytes)
                self._move(temporary, place)
        return version_of(self._info(place))

    def _get(self, place: str, max_size_bytes: int) -> tuple[bytes, ObjectMeta]:
        """Metadata are asked for before and after the body."""
        before = self._info(place)
        for _ in range(_GET_TRIES):
            meta = self._meta(place, before)
            check_fits(meta.size_bytes, max_size_bytes)
            body = bytes(self._fs.cat_file(place))
            after = self._info(place)
            if state_of(before) == state_of(after):
                return body, meta
            before = after
        raise StoreUnavailableError(f"the object changed during each of {_GET_TRIES} reads")

    def _fetch(self, place: str, start: int, end: int) -> bytes:
        body: bytes = self._fs.cat_file(place, start=start, end=end)
        return body

    def _head(self, place: str) -> ObjectMeta:
        return self._meta(place, self._info(place))

    def _delete(self, place: str) -> None:
        with suppress(IsADirectoryError):  # the prefix of other keys, and no object
            self._fs.rm_file(place)

    def _write(self, path: str, body: bytes) -> None:
        if self._ways.create == "lock":
            with _memory_lock.here:
                self._fs.pipe_file(path, body)
        elif self._ways.whole:
            self._fs.pipe_file(path, body)
        else:
            with self._beside(path) as temporary:
                self._fs.pipe_file(temporary, body)
                self._move(temporary, path)

    def _create(self, path: str, body: bytes) -> None:
        if self._ways.create == "link":
            with self._beside(path) as temporary:
                self._fs.pipe_file(temporary, body)
                self._fs.link(temporary, path)
                self._fs.rm_file(temporary)
        elif self._ways.create == "lock":
            with _memory_lock.here:
                if self._fs.exists(path):
                    raise PreconditionFailedError("there is such an object already")
                self._fs.pipe_file(path, body)
        else:
            name = type(self._fs).__name__
            raise UnsupportedError(f"{name} has no create that is known to be atomic")

    def _fill(self, path: str, first: bytes, parts: Iterator[bytes], part_size_bytes: int) -> None:
        file = self._fs.open(path, "wb", block_size=part_size_bytes)
        try:
            file.write(first)
            for part in parts:
                file.write(part)
            file.close()
        except BaseException:
            self._discard(file)
            raise

    def _discard(self, file: Any) -> None:
        """Abort what was being written, so that closing it does not complete it."""
        try:
            if self._ways.whole and self._ways.create != "lock":
                if getattr(file, "offset", None) is not None:
                    file.discard()
            else:
                file.close()
        finally:
            with suppress(AttributeError):
                file.closed = True

    def _meta(self, place: str, info: Mapping[str, Any]) -> ObjectMeta:
        # Of a filesystem that we do not know, no time is trusted: nothing there ever looks old.
        modified = datetime.now(UTC) if self._ways is UNKNOWN else modified_of(info)
        return ObjectMeta(
            self._relative(place), int(info.get("size") or 0), version_of(info), modified
        )

    def _relative(self, path: str) -> str:
        """The key of a path, relative to the root."""
        return path.lstrip("/").removeprefix(f"{self._root}/".lstrip("/"))

    def _info(self, path: str) -> Mapping[str, Any]:
        self._fs.invalidate_cache()
        found: Mapping[str, Any] = self._fs.info(path)
        if found.get("type", "file") != "file":
            raise ObjectNotFoundError("there is no such object")
        return found

    def _listing(self, folder: str) -> Iterator[ObjectMeta]:
        with self._errors(None):
            self._fs.invalidate_cache()
            try:
                found: Mapping[str, Mapping[str, Any]] = self._fs.find(folder, detail=True)
            except (FileNotFoundError, NotADirectoryError) as error:
                if self._bucket_is_missing(error):
                    raise
                found = {}
        below = f"{folder}/".lstrip("/")
        for name, info in found.items():
            path = name.lstrip("/")
            if not path.startswith(below) or info.get("type", "file") != "file":
                continue
            if not path.rpartition("/")[2].startswith(_OURS):
                yield self._meta(path, info)

    @contextmanager
    def _beside(self, path: str) -> Iterator[str]:
        """A name to write under, whose object is removed if that fails."""
        parent, _, _ = path.rpartition("/")
        if parent not in self._made:
            self._fs.makedirs(parent, exist_ok=True)
            self._made.add(parent)
        temporary = f"{parent}/{_OURS}{secrets.token_hex(8)}.tmp"
        try:
            yield temporary
        except BaseException:
            with suppress(FileNotFoundError):
                self._fs.rm_file(temporary)
            raise

    def _move(self, temporary: str, path: str) -> None:
        from fsspec import AbstractFileSystem

        if self._ways.create == "lock":
            with _memory_lock.here:
                self._fs.cp_file(temporary, path)
        elif type(self._fs).mv is not AbstractFileSystem.mv:
            self._fs.mv(temporary, path)
            return
        else:
            self._fs.cp_file(temporary, path)
        self._fs.rm_file(temporary)

    def _bucket_is_missing(self, error: BaseException) -> bool:
        """Whether a 404 means the bucket. Asked once, unless the answer itself says it."""
        code = status_and_code(error)[1]
        if code is not None or not self._ways.buckets or self._seen:
            return code == "NoSuchBucket"
        try:
            self._fs.info(self._root.partition("/")[0])
        except FileNotFoundError:
            return True
        except Exception as other:  # noqa: BLE001  not allowed to ask: no news
            del other
        self._seen = True
        return False
