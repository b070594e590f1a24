"""`ObjectStore` over any filesystem of fsspec; `s3.s3fs` is the one over s3fs.

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
        self._fs = filesystems.read
        self._root: str = self._fs._strip_protocol(str(url)).rstrip("/")
        kind = type(self._fs)
        is_local = is_of(kind, "fsspec.LocalFileSystem")
        # Whether an object appears under its name only when its file is closed.
        self._writes_whole = is_of(kind, *_OBJECT_STORES)
        # Whether it is known how the filesystem writes, and that its times are right.
        self._is_known = is_local or self._writes_whole
        # Whether an object can be created on the condition that there is none: by a hard link, or
        # by gcsfs's `ifGenerationMatch=0`.
        self._creates = is_local or is_of(kind, _GCSFS)
        # Whether it has a rename of its own: the `mv` of fsspec's base class copies and removes.
        self._renames = kind.mv is not AbstractFileSystem.mv

    @property
    def capabilities(self) -> Capabilities:
        """Conditional creates are claimed if the filesystem has an atomic one, updates never.

        For an unknown filesystem nothing is claimed that depends on how it writes.
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
        """Write an object; return an empty version, as no write here can be conditioned on one.

        Raises:
            UnsupportedError: the filesystem has no such conditional write.
        """
        creates = isinstance(precondition, IfAbsent)
        if precondition is not None and not (creates and self._creates):
            how = "create" if creates else "replace"
            raise UnsupportedError(
                f"{type(self._fs).__name__} cannot {how} an object conditionally"
            )
        body = b"".join(buffers)
        if creates and self._writes_whole:  # this is gcsfs; its `create` fails if there is one
            self._fs.pipe_file(place, body, mode="create")
        else:
            # The part is larger than the body, because filesystems of object stores send a body
            # that does not fill a part in a single PUT.
            self._write(place, [body], len(body) + 1, creates=creates)
        return Version()

    def _put_stream(
        self,
        place: str,
        source: WatchedBuffers,
        part_size_bytes: int,
        max_concurrency: int,  # noqa: ARG002  in order
    ) -> Version:
        """Copy the bytes once, into parts that are sent one after the other."""
        self._write(place, map(b"".join, cut_parts(source, part_size_bytes)), part_size_bytes)
        return Version()

    def _get(self, place: str, max_size_bytes: int) -> tuple[bytes, ObjectMeta]:
        """Ask for the metadata before and after the body, until both are of one state."""
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

    def _write(
        self, path: str, parts: Iterable[bytes], part_size_bytes: int, *, creates: bool = False
    ) -> None:
        """Write an object so that it is not visible before it is whole, as far as possible.

        Args:
            path: the path of the object.
            parts: its bytes.
            part_size_bytes: the size of each part but the last.
            creates: whether it is an error if there is an object already. False for object stores.
        """
        if self._writes_whole:
            self._write_file(path, parts, part_size_bytes)
            return
        parent = path.rpartition("/")[0]
        self._fs.makedirs(parent, exist_ok=True)
        temporary = f"{parent}/{_OURS}{secrets.token_hex(8)}.tmp"
        try:
            self._write_file(temporary, parts, part_size_bytes)
            self._move(temporary, path, creates=creates)
        except BaseException:
            with suppress(FileNotFoundError):
                self._fs.rm_file(temporary)
            raise

    def _move(self, temporary: str, path: str, *, creates: bool) -> None:
        """Put a temporary object in its place; with `creates`, only if there is none yet."""
        if creates:
            self._fs.link(temporary, path)  # fails if there is one
        elif self._renames:
            if self._fs.isdir(path):  # some filesystems would move the object into the folder
                raise IsADirectoryError("it is the prefix of other keys")
            self._fs.mv(temporary, path)
            if self._fs.exists(temporary):  # WebHDFS raises nothing if it could not rename
                raise UnsupportedError(f"{type(self._fs).__name__} cannot replace an object")
            return
        else:
            self._fs.cp_file(temporary, path)
        # A link or a copy leaves the temporary object; a rename has returned above.
        self._fs.rm_file(temporary)

    def _write_file(self, path: str, parts: Iterable[bytes], part_size_bytes: int) -> None:
        """Write an object under its path. After an error, its upload is not completed."""
        file = self._fs.open(path, "wb", block_size=part_size_bytes)
        try:
            for part in parts:
                file.write(part)
            file.close()
        except BaseException:
            # Closing a file would complete its upload, unless it counts as closed already. A local
            # file refuses `discard`, so it is closed in earnest.
            with suppress(Exception):
                file.discard()
                file.closed = True
            with suppress(Exception):
                file.close()
            raise

    def _meta(self, place: str, info: Mapping[str, Any]) -> ObjectMeta:
        """Return the metadata in what a filesystem says of an object."""
        # The times of an unknown filesystem are not trusted. Its objects get the present time, so
        # that none of them ever looks old.
        modified = _modified(info) if self._is_known else None
        size_bytes = int(info.get("size") or 0)
        # Some filesystems give paths with a slash at the front, others without.
        key = place.lstrip("/").removeprefix(f"{self._root}/".lstrip("/"))
        return ObjectMeta(key, size_bytes, _version(info), modified or datetime.now(UTC))

    def _info(self, place: str) -> Mapping[str, Any]:
        """Return what a filesystem says of an object; raise if there is none, or only a folder."""
        self._fs.invalidate_cache()
        info: Mapping[str, Any] = self._fs.info(place)
        if info.get("type", "file") != "file":
            raise ObjectNotFoundError("there is no such object")
        return info

    def _find(self, folder: str) -> Mapping[str, Mapping[str, Any]]:
        """Return what a filesystem says of each object below a folder, by their paths."""
        self._fs.invalidate_cache()
        infos: Mapping[str, Mapping[str, Any]] = {}
        with suppress(FileNotFoundError, NotADirectoryError):
            infos = self._fs.find(folder, detail=True)
        # gcsfs lists a bucket that does not exist as an empty one; other filesystems refuse.
        if not infos and is_of(type(self._fs), _GCSFS):
            self._check_bucket()
        return infos

    def _check_bucket(self) -> None:
        """Raise BucketNotFoundError if there is no such bucket. Only for gcsfs."""
        bucket = self._root.partition("/")[0]
        try:
            self._fs.call("GET", "b/{}/o", bucket, maxResults=1)
        except FileNotFoundError as error:
            raise BucketNotFoundError(f"the bucket {bucket} does not exist") from error

    def _list(self, folder: str) -> Iterator[ObjectMeta]:
        """Yield the objects below a folder; the whole listing is in memory."""
        root = f"{self._root}/{folder}" if folder else self._root
        with self._errors(None):
            infos = self._find(root)
        below = f"{root}/".lstrip("/")
        for name, info in infos.items():
            path = name.lstrip("/")
            # Objects that are being written have a name that begins with `_OURS`.
            is_object = path.startswith(below) and info.get("type", "file") == "file"
            if is_object and not path.rpartition("/")[2].startswith(_OURS):
                yield self._meta(path, info)


def _version(info: Mapping[str, Any]) -> Version:
    """Return all that distinguishes one state of an object from another.

    A GCS generation is enough. Otherwise whatever of tags, size and time a filesystem gives.
    """
    if info.get("generation") is not None:  # GCS
        return Version(None, str(info["generation"]))
    tags = [*(info.get(name) for name in _TAGS), _modified(info)]
    return Version("-".join(str(tag) for tag in tags if tag is not None))


def _modified(info: Mapping[str, Any]) -> datetime | None:
    """Return when an object was written; None if that is unknown.

    Filesystems give a `datetime`, with or without a time zone, seconds since 1970, or ISO 8601.
    """
    value = next((info[name] for name in _TIMES if info.get(name) is not None), None)
    if isinstance(value, str):
        value = datetime.fromisoformat(value)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        value = datetime.fromtimestamp(value, tz=UTC)
    if not isinstance(value, datetime):
        return None
    return value if value.tzinfo else value.replace(tzinfo=UTC)
