"""`ObjectStore` over any filesystem of fsspec; `fsspec.s3` is the one over s3fs.

Where an object would be visible while it is being written, it is written under another name in the
same folder, which listings leave out, and then moved: by the filesystem's own rename if it has one,
otherwise by copying and removing, which is only as atomic as that copy.

fsspec's filesystems have no conditional update. They read body and metadata by separate requests,
so `get` compares the metadata before and after.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from typing import Any

from typing_extensions import Buffer

from dcp_objstore.errors import (
    BucketNotFoundError,
    DcpObjstoreError,
    ObjectNotFoundError,
    StoreUnavailableError,
    UnsupportedError,
)
from dcp_objstore.stores.base import BaseStore, WatchedBuffers, cut_parts
from dcp_objstore.stores.errors import is_of
from dcp_objstore.stores.fsspec.filesystems import Filesystems, judge_fsspec
from dcp_objstore.stores.protocol import (
    Capabilities,
    IfAbsent,
    ObjectMeta,
    Precondition,
    Version,
)
from dcp_objstore.stores.ranges import FETCHED_READING, FetchedSource
from dcp_objstore.stores.retries import guard_fork
from dcp_objstore.stores.urls import StoreUrl, check_key

_OURS = ".dcp-objstore."  # names that start so are being written, and are not objects
_GET_TRIES = 5
# The libraries in which an object appears when its file is closed, or never.
_GCSFS = "gcsfs"
_OBJECT_STORES = ("adlfs", _GCSFS, "ocifs", "ossfs", "tosfs")
# The names that filesystems give to what identifies a state, and to the time of the write.
_TAGS = ("ETag", "etag", "e_tag", "content_hash", "sha", "ino", "size")
_TIMES = ("LastModified", "mtime", "last_modified", "modified", "updated", "created")


class FsspecStore(BaseStore[str]):
    """A store rooted at one URL, over the blocking calls of a filesystem.

    Retries are the filesystem's own, also of a `put` with `retry=False`. They cannot be seen from
    here, so throttling is judged by how long requests take.
    """

    range_reading = FETCHED_READING

    def __init__(self, url: StoreUrl, filesystems: Filesystems) -> None:
        from fsspec import AbstractFileSystem

        super().__init__(url, filesystems.endpoint_url)
        self._filesystems = filesystems
        self._fs = filesystems.read
        self._root: str = self._fs._strip_protocol(str(url)).rstrip("/")
        kind = type(self._fs)
        self._is_local = is_of(kind, "fsspec.LocalFileSystem")
        self._writes_whole = is_of(kind, *_OBJECT_STORES)
        self._is_known = self._is_local or self._writes_whole
        # gcsfs creates an object on the condition `ifGenerationMatch=0`.
        self._creates = self._is_local or is_of(kind, _GCSFS)
        self._renames = kind.mv is not AbstractFileSystem.mv

    @property
    def capabilities(self) -> Capabilities:
        """Streams go in order. A create where the filesystem has an atomic one; no update.

        Of a filesystem that we do not know, nothing that we could not see to is claimed.
        """
        return Capabilities(
            conditional_create=self._creates,
            conditional_update=False,
            multipart=False,
            clean_abort=self._is_known,
            atomic_put=self._is_known,
            modified_times=self._is_known,
            copies=False,
        )

    def _range_source(self, place: str) -> FetchedSource:
        return FetchedSource(partial(self._fetch, place), lambda: _version(self._info(place)))

    def _place(self, key: str | None) -> str:
        guard_fork()
        return self._root if key is None else f"{self._root}/{check_key(key)}"

    def _translate(self, error: Exception) -> DcpObjstoreError:
        return judge_fsspec(error).error

    def _put(
        self,
        place: str,
        buffers: Sequence[Buffer],
        precondition: Precondition | None,
        *,
        retry: bool,  # noqa: ARG002  retries are the filesystem's own
    ) -> Version:
        """Return an empty version: nothing here is conditioned on one."""
        absent = isinstance(precondition, IfAbsent)
        if precondition is not None and not (absent and self._creates):
            how = "create" if absent else "replace"
            raise UnsupportedError(
                f"{type(self._fs).__name__} cannot {how} an object conditionally"
            )
        body = b"".join(buffers)
        if absent and self._writes_whole:
            self._fs.pipe_file(place, body, mode="create")
        else:
            # An object store makes a single PUT of a body that does not fill a part.
            self._fill(place, [body], len(body) + 1, absent=absent)
        return Version()

    def _put_stream(
        self,
        place: str,
        source: WatchedBuffers,
        part_size_bytes: int,
        max_concurrency: int,  # noqa: ARG002  in order
    ) -> Version:
        """Bytes are copied once, into the part being built."""
        self._fill(place, map(b"".join, cut_parts(source, part_size_bytes)), part_size_bytes)
        return Version()

    def _get(self, place: str, max_size_bytes: int) -> tuple[bytes, ObjectMeta]:
        """Metadata are asked for before and after the body."""
        before = self._info(place)
        for _ in range(_GET_TRIES):
            meta = self._check_size(self._meta(place, before), max_size_bytes)
            body: bytes = self._fs.cat_file(place)
            after = self._info(place)
            if _version(before) == _version(after):
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

    def _fill(
        self, path: str, parts: Iterable[bytes], part_size_bytes: int, *, absent: bool = False
    ) -> None:
        """Write an object, which is not visible before it is whole if that can be."""
        if self._writes_whole:
            self._write_file(path, parts, part_size_bytes)
            return
        parent = path.rpartition("/")[0]
        self._fs.makedirs(parent, exist_ok=True)
        temporary = f"{parent}/{_OURS}{secrets.token_hex(8)}.tmp"
        try:
            self._write_file(temporary, parts, part_size_bytes)
            self._move(temporary, path, absent=absent)
        except BaseException:
            with suppress(FileNotFoundError):
                self._fs.rm_file(temporary)
            raise

    def _move(self, temporary: str, path: str, *, absent: bool) -> None:
        """Put a temporary object in its place; with `absent`, only if there is none yet."""
        if absent:
            self._fs.link(temporary, path)
        elif self._renames:
            if self._fs.isdir(path):  # some would move into it
                raise IsADirectoryError("it is the prefix of other keys")
            self._fs.mv(temporary, path)
            if self._fs.exists(temporary):
                raise UnsupportedError(f"{type(self._fs).__name__} cannot replace an object")
            return
        else:
            self._fs.cp_file(temporary, path)
        self._fs.rm_file(temporary)

    def _write_file(self, path: str, parts: Iterable[bytes], part_size_bytes: int) -> None:
        """Write an object; after an error, see that closing the file does not complete it."""
        file = self._fs.open(path, "wb", block_size=part_size_bytes)
        try:
            for part in parts:
                file.write(part)
            file.close()
        except BaseException:
            with suppress(Exception):
                file.discard()
                file.closed = True  # so that closing it does not complete an upload
            with suppress(Exception):
                file.close()
            raise

    def _meta(self, place: str, info: Mapping[str, Any]) -> ObjectMeta:
        # Times of an unknown filesystem are not trusted: nothing there ever looks old.
        modified = _modified(info) if self._is_known else None
        size_bytes = int(info.get("size") or 0)
        modified = modified or datetime.now(UTC)
        key = place.lstrip("/").removeprefix(f"{self._root}/".lstrip("/"))
        return ObjectMeta(key, size_bytes, _version(info), modified)

    def _info(self, place: str) -> Mapping[str, Any]:
        self._fs.invalidate_cache()
        info: Mapping[str, Any] = self._fs.info(place)
        if info.get("type", "file") != "file":
            raise ObjectNotFoundError("there is no such object")
        return info

    def _find(self, folder: str) -> Mapping[str, Mapping[str, Any]]:
        self._fs.invalidate_cache()
        infos: Mapping[str, Mapping[str, Any]] = {}
        with suppress(FileNotFoundError, NotADirectoryError):
            infos = self._fs.find(folder, detail=True)
        if not infos and is_of(type(self._fs), _GCSFS):
            self._check_bucket()
        return infos

    def _check_bucket(self) -> None:
        """Raise BucketNotFoundError if there is none: gcsfs lists it as if it were empty."""
        bucket = self._root.partition("/")[0]
        try:
            self._fs.call("GET", "b/{}/o", bucket, maxResults=1)
        except FileNotFoundError as error:
            raise BucketNotFoundError(f"the bucket {bucket} does not exist") from error

    def _list(self, folder: str) -> Iterator[ObjectMeta]:
        """The whole listing is in memory."""
        root = f"{self._root}/{folder}" if folder else self._root
        with self._errors(None):
            infos = self._find(root)
        below = f"{root}/".lstrip("/")
        for name, info in infos.items():
            path = name.lstrip("/")
            is_object = path.startswith(below) and info.get("type", "file") == "file"
            if is_object and not path.rpartition("/")[2].startswith(_OURS):
                yield self._meta(path, info)


def _version(info: Mapping[str, Any]) -> Version:
    """Return all that distinguishes one state of an object from another."""
    if info.get("generation") is not None:  # GCS
        return Version(None, str(info["generation"]))
    tags = [*(info.get(name) for name in _TAGS), _modified(info)]
    return Version("-".join(str(tag) for tag in tags if tag is not None))


def _modified(info: Mapping[str, Any]) -> datetime | None:
    """Return when it was written; None if that is unknown."""
    value = next((info[name] for name in _TIMES if info.get(name) is not None), None)
    if isinstance(value, str):
        value = datetime.fromisoformat(value)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        value = datetime.fromtimestamp(value, tz=UTC)
    if not isinstance(value, datetime):
        return None
    return value if value.tzinfo else value.replace(tzinfo=UTC)
