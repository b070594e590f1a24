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
from typing import TYPE_CHECKING, Any

from dcp_objstore.errors import (
    BucketNotFoundError,
    DcpObjstoreError,
    ObjectNotFoundError,
    PermissionDeniedError,
    PreconditionFailedError,
    StoreUnavailableError,
    UnsupportedError,
)
from dcp_objstore.forking import PerProcess
from dcp_objstore.stores.answers import check_fits, check_whole
from dcp_objstore.stores.base import BaseStore
from dcp_objstore.stores.buffers import (
    WatchedBuffers,
    as_buffers,
    check_buffer,
    cut_parts,
)
from dcp_objstore.stores.fsspec.errors import status_and_code, translate_fsspec
from dcp_objstore.stores.fsspec.filesystems import Filesystems
from dcp_objstore.stores.fsspec.info import modified_of, state_of, version_of
from dcp_objstore.stores.fsspec.kinds import UNKNOWN, is_gcsfs, ways_of
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


class FsspecStore(BaseStore):
    """A store rooted at one URL, over the blocking calls of a filesystem."""

    def __init__(self, url: StoreUrl, filesystems: Filesystems) -> None:
        super().__init__(url)
        self._filesystems = filesystems
        self._fs = filesystems.fs
        self._ways = ways_of(self._fs)
        self._root: str = self._fs._strip_protocol(str(url)).rstrip("/")
        self._made: set[str] = set()  # parents that were made
        self._seen = False  # whether the bucket has been seen

    @property
    def endpoint_url(self) -> str | None:
        """The server, or None for the provider's own."""
        return self._filesystems.endpoint_url

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

    def put(
        self,
        key: str,
        data: Buffer | Sequence[Buffer],
        *,
        precondition: Precondition | None = None,
        retry: bool = True,
    ) -> Version:
        """See `ObjectStore.put`. Retries are the filesystem's own, also without `retry`.

        Raises:
            UnsupportedError: the precondition is none that this filesystem has.
        """
        with self._errors(key) as path:
            pieces = as_buffers(data)
            for piece in pieces:
                check_buffer(piece)
            return self._put(path, b"".join(pieces), precondition, retry=retry)

    def put_stream(
        self,
        key: str,
        buffers: Iterator[Buffer],
        *,
        part_size_bytes: int,
        max_concurrency: int,
    ) -> Version:
        """See `ObjectStore.put_stream`. Bytes are copied once, into the part being built."""
        source = WatchedBuffers(buffers, check_buffer)
        try:
            with self._errors(key) as path:
                return self._put_stream(path, source, part_size_bytes, max_concurrency)
        except BaseException:
            if source.error is None:
                raise
        # Outside of the handler, so that the caller's error keeps its own cause and context.
        raise source.error

    def get(self, key: str, *, max_size_bytes: int) -> tuple[bytes, ObjectMeta]:
        """See `ObjectStore.get`. Metadata are asked for before and after the body."""
        with self._errors(key) as path:
            return self._get(key, path, max_size_bytes)

    @property
    def range_reading(self) -> RangeReading:
        """See `ObjectStore.range_reading`."""
        return FETCHED_READING

    def _range_source(self, place: str) -> FetchedSource:
        return FetchedSource(lambda start, end: self._fs.cat_file(place, start=start, end=end))

    def head(self, key: str) -> ObjectMeta:
        """See `ObjectStore.head`."""
        with self._errors(key) as path:
            return self._meta(key, self._info(path))

    def list(self, prefix: str = "") -> Iterator[ObjectMeta]:
        """See `ObjectStore.list`; all of it is in memory at once."""
        folder = check_prefix(prefix)
        return self._listing(f"{self._root}/{folder}" if folder else self._root)

    def delete(self, key: str) -> None:
        """See `ObjectStore.delete`."""
        with self._errors(key) as path:
            try:
                self._fs.rm_file(path)
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
                if self._bucket_is_missing(error):
                    raise
                # Nothing, or the prefix of other keys.

    # How the filesystem is used; gcsfs has other ways.

    def _put(
        self,
        path: str,
        body: bytes,
        precondition: Precondition | None,
        *,
        retry: bool,  # noqa: ARG002
    ) -> Version:
        if precondition is None:
            self._write(path, body)
        elif isinstance(precondition, IfAbsent):
            self._create(path, body)
        else:
            name = type(self._fs).__name__
            raise UnsupportedError(f"{name} cannot replace an object conditionally")
        return version_of(self._info(path))

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

    def _put_stream(
        self,
        path: str,
        source: WatchedBuffers,
        part_size_bytes: int,
        max_concurrency: int,  # noqa: ARG002  in order
    ) -> Version:
        parts = map(b"".join, cut_parts(source, part_size_bytes))
        first = next(parts, b"")
        if len(first) < part_size_bytes:
            self._write(path, first)
        elif self._ways.whole and self._ways.create != "lock":
            self._fill(path, first, parts, part_size_bytes)
        else:
            with self._beside(path) as temporary:
                self._fill(temporary, first, parts, part_size_bytes)
                self._move(temporary, path)
        return version_of(self._info(path))

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

    def _get(self, key: str, path: str, max_size_bytes: int) -> tuple[bytes, ObjectMeta]:
        before = self._info(path)
        for _ in range(_GET_TRIES):
            meta = self._meta(key, before)
            check_fits(meta.size_bytes, max_size_bytes)
            body = bytes(self._fs.cat_file(path))
            after = self._info(path)
            if state_of(before) == state_of(after):
                break
            before = after
        else:
            raise StoreUnavailableError(f"the object changed during each of {_GET_TRIES} reads")
        check_whole(len(body), meta.size_bytes)
        return body, meta

    def _meta(self, key: str, info: Mapping[str, Any]) -> ObjectMeta:
        # Of a filesystem that we do not know, no time is trusted: nothing there ever looks old.
        modified = datetime.now(UTC) if self._ways is UNKNOWN else modified_of(info)
        return ObjectMeta(key, int(info.get("size") or 0), version_of(info), modified)

    def _info(self, path: str) -> Mapping[str, Any]:
        self._forget()
        found: Mapping[str, Any] = self._fs.info(path)
        if found.get("type", "file") != "file":
            raise ObjectNotFoundError("there is no such object")
        return found

    def _listing(self, folder: str) -> Iterator[ObjectMeta]:
        with self._errors(None):
            self._forget()
            try:
                found: Mapping[str, Mapping[str, Any]] = self._fs.find(folder, detail=True)
            except (FileNotFoundError, NotADirectoryError) as error:
                if self._bucket_is_missing(error):
                    raise
                found = {}
        below = f"{folder}/".lstrip("/")
        root = f"{self._root}/".lstrip("/")
        for name, info in found.items():
            path = name.lstrip("/")
            key = path.removeprefix(root)
            if not path.startswith(below) or info.get("type", "file") != "file":
                continue
            if not key.rpartition("/")[2].startswith(_OURS):
                yield self._meta(key, info)

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

    def _forget(self) -> None:
        self._fs.invalidate_cache()

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

    @contextmanager
    def _errors(self, key: str | None) -> Iterator[str]:
        """Check key and process, yield the path of the key, and translate what is raised."""
        path = f"{self._root}/{check_key(key)}" if key is not None else self._root
        with self._located(key, self._translate):
            self._filesystems.prepare()
            yield path

    def _translate(self, error: Exception) -> DcpObjstoreError:
        # gcsfs makes an OSError without an errno of a 403, and of nothing else.
        bare = PermissionDeniedError if is_gcsfs(self._fs) else StoreUnavailableError
        found = translate_fsspec(error, bare)
        if type(found) is ObjectNotFoundError and self._bucket_is_missing(error):
            return BucketNotFoundError(f"the bucket does not exist: {found.message}")
        return found
