"""`ObjectStore` over a local or shared file system, for `file://`.

obstore's own local store has no conditional update and does not sync. This one guarantees, on a
POSIX file system:
- An object appears whole or not at all: it is written under a temporary name, synced, then renamed.
- `IfAbsent` is `link`, which fails if the name exists, also between machines on NFS.
- Every change of an existing object (rename, conditional or not, and delete) happens under an
  exclusive `flock` of its folder, so compare-and-swap is atomic between threads and processes.
- A version is (mtime in ns, inode, size). The mtime is set from the clock in full nanoseconds, so
  rewriting equal content gives another version.
- A process that is killed leaves a temporary object at most, which `list` never shows and a sweep
  removes (`LocalUploads`). Its lock goes with it.

On a shared file system all of that is as good as its rename, link and locks. NFS keeps them (Linux
sends `flock` to the server as a lock of the whole file) unless it is mounted with `nolock` or
`local_lock=flock`: then a lock keeps out only writers on the same machine, and updates by jobs on
different machines may both succeed; creating (a commit of a new step) stays safe. If a server keeps
times in less than nanoseconds, the version that `put` returned looks changed: an update then fails
instead of succeeding twice. FUSE mounts of buckets keep none of it: use the bucket's URL.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from typing_extensions import Buffer

from dcp_objstore import errors
from dcp_objstore.config import TransferConfig
from dcp_objstore.contexts import contextmanager
from dcp_objstore.forking import close_here, open_here
from dcp_objstore.observe.report import size_text
from dcp_objstore.stores.base import BaseStore, WatchedBuffers, cut_range
from dcp_objstore.stores.errors import kind_of_builtin, of_os
from dcp_objstore.stores.protocol import (
    Capabilities,
    CopySource,
    IfAbsent,
    ObjectMeta,
    Precondition,
    UnfinishedUpload,
    Version,
)
from dcp_objstore.stores.ranges import REPLACED, Answer, RangeSource
from dcp_objstore.stores.retries import RetryPolicy, Tries, small_policy
from dcp_objstore.stores.urls import StoreUrl, check_key, parse_url

# Names that begin so are temporary objects or locks, and never shown as objects.
_OUR_PREFIX = ".dcp-objstore."
_LOCK_NAME = f"{_OUR_PREFIX}lock"
# The names of temporary objects begin with this; random digits and the object's name follow.
TEMPORARY = f"{_OUR_PREFIX}tmp."
_NAME_BYTES = 255

# The errors of a copy between two file systems, or on one that has no such call.
_NO_COPY = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)

# The errors of a link on a file system that has none.
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)

# For the lock of a folder, which is held for milliseconds.
LOCK_POLICY = RetryPolicy(None, 5.0, first_pause_seconds=0.001, longest_pause_seconds=0.25)

# The errors if there is an object where a folder would have to be.
_IN_THE_WAY = (errno.ENOTDIR, errno.EEXIST)


class LocalStore(BaseStore[Path]):
    """A store rooted at one folder, which is made by the first write.

    Args:
        url: the root.
        config: its time-outs bound the wait for a folder's lock.
    """

    def __init__(self, url: StoreUrl, config: TransferConfig) -> None:
        super().__init__(url)
        self._root = Path(url.prefix)
        patience_seconds = small_policy(config).patience_seconds
        self._patience = replace(LOCK_POLICY, patience_seconds=patience_seconds)

    @property
    def capabilities(self) -> Capabilities:
        """Claim everything but parallel parts: a stream is written in order."""
        return Capabilities(multipart=False, copies=hasattr(os, "copy_file_range"))

    def _range_source(self, place: Path) -> FileSource:
        return FileSource(place)

    def _place(self, key: str | None) -> Path:
        """Return the path of an object, or without a key that of the root."""
        if key is None:
            return self._root
        path = self._root / check_key(key)
        if any(part.startswith(_OUR_PREFIX) for part in key.split("/")):
            raise errors.InputError(
                f"keys may not have segments starting with {_OUR_PREFIX!r}: {key!r}"
            )
        return path

    def _translate(self, error: Exception) -> errors.DcpObjstoreError:
        """Return the error of this library for an error of the file system."""
        if not isinstance(error, OSError):
            return kind_of_builtin(error)(f"{type(error).__name__}: {error}")
        if error.errno in _IN_THE_WAY:
            path = Path(error.filename or self._root)
            # Of the path and what is above it, the first that exists is the one in the way.
            file = next((place for place in (path, *path.parents) if place.exists()), path)
            what = f"{str(file)!r} is a file, where a folder is needed"
            return errors.InputError(what, advice="choose another URL, or move the file away")
        translated = of_os(error)
        if isinstance(translated, errors.StoreFullError):
            with suppress(OSError):  # the error is raised even if the free room is not known
                translated.message += f"; {size_text(_free_bytes(self._root))} are free there now"
        return translated

    def _put(
        self,
        place: Path,
        buffers: Sequence[Buffer],
        precondition: Precondition | None,
        *,
        retry: bool,  # noqa: ARG002  there is nothing to retry
    ) -> Version:
        return self._write(place, partial(_write_buffers, iter(buffers)), precondition)

    def _put_stream(
        self,
        place: Path,
        source: WatchedBuffers,
        part_size_bytes: int,  # noqa: ARG002  there are no parts
        max_concurrency: int,  # noqa: ARG002  buffers are written one after the other
    ) -> Version:
        return self._write(place, partial(_write_buffers, source), None)

    def _copy(
        self,
        place: Path,
        sources: Sequence[CopySource],
        part_size_bytes: int,
        max_concurrency: int,  # noqa: ARG002  parts are copied one after the other
        moved: Callable[[int], None],
    ) -> Version:
        """Have the kernel copy. A file system with reflinks shares the blocks instead."""

        def write(fd: int) -> None:
            for source in sources:
                url = parse_url(source.url)
                if url.scheme != "file":
                    raise errors.UnsupportedError(f"{source.url} is not on this store")
                with _opened(Path(url.prefix)) as (from_fd, _):
                    for start, end in cut_range(source.start, source.end, part_size_bytes):
                        _copy_range(from_fd, fd, start, end)
                        moved(end - start)
                    # Compared after the copy, so that a change during the copy is seen, too.
                    if _version(os.fstat(from_fd)) != source.version:
                        raise errors.PreconditionFailedError(f"{source.url} was changed meanwhile")

        return self._write(place, write, None)

    def _get(self, place: Path, max_size_bytes: int) -> tuple[bytes, ObjectMeta]:
        with _opened(place) as (fd, status):
            meta = self._check_size(_meta(self._key(place), status), max_size_bytes)
            with open(fd, "rb", closefd=False) as file:
                return file.read(meta.size_bytes), meta

    def _head(self, place: Path) -> ObjectMeta:
        with _opened(place) as (_, status):
            return _meta(self._key(place), status)

    def _key(self, place: Path) -> str:
        return place.relative_to(self._root).as_posix()

    def _delete(self, place: Path) -> None:
        with suppress(NotADirectoryError), locked(place.parent, self._patience):
            if not place.is_dir():  # the prefix of other keys, and no object
                place.unlink()
                _sync_folder(place.parent)

    def remove_lock(self) -> None:
        """Remove the lock file of the folder, which no other program has to see."""
        with suppress(FileNotFoundError), locked(self._root, self._patience):
            (self._root / _LOCK_NAME).unlink()

    def _write(
        self, path: Path, write: Callable[[int], None], precondition: Precondition | None
    ) -> Version:
        """Write a temporary file, then put it in its place if the precondition holds."""
        _make_folder(path.parent)
        temporary = path.parent / temporary_name(path.name)
        try:
            status = _write_synced(temporary, write)
            if isinstance(precondition, IfAbsent):
                self._link(temporary, path)
            else:
                with locked(path.parent, self._patience):
                    if precondition is not None:
                        _check_version(path, precondition.version)
                    temporary.replace(path)
            _sync_folder(path.parent)
        except (IsADirectoryError, errors.PreconditionFailedError) as error:
            # The object's name may be that of a folder. A rename says so (`IsADirectoryError`); a
            # link says only that the name exists, which `_link` takes for another object.
            if not path.is_dir():
                raise
            what = f"{str(path)!r} is a folder, where a file is needed"
            advice = "choose another URL, or move the folder away"
            raise errors.InputError(what, advice=advice) from error
        finally:
            temporary.unlink(missing_ok=True)  # after a rename it is gone
        return _version(status)  # the object is the file that was written, under another name

    def _link(self, temporary: Path, path: Path) -> None:
        """Put a temporary file in its place if there is no file yet."""
        is_there = "there is such an object already"
        try:
            os.link(temporary, path)
        except FileExistsError as error:
            raise errors.PreconditionFailedError(is_there) from error
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            # Without links, the lock is all that keeps two creators of the object apart.
            with locked(path.parent, self._patience):
                if path.exists():
                    raise errors.PreconditionFailedError(is_there) from None
                temporary.replace(path)

    def _leads_up(self, key: str) -> bool:
        """Whether a link leads to a folder that it is in: a listing would never end."""
        path = self._root / key
        return path.resolve() in (above.resolve() for above in path.parents)

    def _list(self, folder: str) -> Iterator[ObjectMeta]:
        """List in the order of the keys' segments."""
        with self._errors(None):
            entries = _entries(self._root / folder)
        for entry in entries:
            key = f"{folder}/{entry.name}" if folder else entry.name
            meta: ObjectMeta | None = None  # stays None for a folder, or a socket, for example
            with self._errors(None):
                try:
                    is_folder = entry.is_dir()
                    status = entry.stat()
                except OSError as error:
                    if error.errno in (errno.ENOENT, errno.ELOOP):
                        continue  # deleted since the folder was read, or a link to itself
                    raise
                # A link to a folder above would be followed for ever.
                if is_folder and entry.is_symlink() and self._leads_up(key):
                    continue
                meta = _meta(key, status) if stat.S_ISREG(status.st_mode) else None
            if is_folder:
                yield from self._list(key)
            elif meta is not None:
                yield meta


class LocalUploads:
    """The temporary objects below a folder: what unfinished uploads are on S3.

    An upload is `initiated` at the last write: one that is still growing is young.

    Args:
        root: the folder.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    def below(self, prefix: str) -> LocalUploads:
        """Return the temporary objects of a folder further down; an empty prefix is this one."""
        return LocalUploads(self._root / prefix)

    def list(self) -> Sequence[UnfinishedUpload]:
        """Return the temporary objects: those of saves in progress, and what ended saves left.

        Raises:
            PermissionDeniedError: a folder may not be read.
            StoreUnavailableError: the file system failed.
        """
        uploads = []
        for place in sorted(self._root.rglob(f"{TEMPORARY}*")):
            try:
                status = place.stat()
            except FileNotFoundError:
                continue  # renamed or removed since the folder was read
            except OSError as error:
                raise of_os(error).at(url=f"file://{self._root}") from error
            upload_id = place.relative_to(self._root)
            # The object's name stands behind the random digits, unless both were too long for the
            # name of a file; see `temporary_name`.
            name = place.name.removeprefix(TEMPORARY).partition(".")[2] or place.name
            written = datetime.fromtimestamp(status.st_mtime, tz=UTC)
            key = str(upload_id.parent / name)
            uploads.append(UnfinishedUpload(key, str(upload_id), written, status.st_size))
        return uploads

    def abort(self, upload: UnfinishedUpload) -> None:
        """Remove a temporary object. No error is raised if it is already gone.

        Raises:
            PermissionDeniedError: it may not be removed.
            StoreUnavailableError: the file system failed.
        """
        try:
            (self._root / upload.upload_id).unlink(missing_ok=True)
        except OSError as error:
            raise of_os(error).at(url=f"file://{self._root}") from error


def temporary_name(name: str) -> str:
    """Return a name for an object until it is whole: random, and with its own if both fit."""
    prefix = f"{TEMPORARY}{secrets.token_hex(8)}."
    fits = len(os.fsencode(prefix + name)) <= _NAME_BYTES
    return prefix + name if fits else prefix


def _write_buffers(buffers: Iterator[Buffer], fd: int) -> None:
    """Write buffers to a file, and keep none of them."""
    while True:
        # Not a `for`, whose variable would keep the last buffer while the next one is waited for.
        try:
            view = memoryview(next(buffers))
        except StopIteration:
            return
        written_bytes = 0
        while written_bytes < len(view):
            written_bytes += os.write(fd, view[written_bytes:])
        del view


def _copy_range(from_fd: int, fd: int, start: int, end: int) -> None:
    """Have the file system copy bytes `[start, end)` of a file to the end of another one."""
    while start < end:
        try:
            count = os.copy_file_range(from_fd, fd, end - start, start)
        except OSError as error:
            if error.errno not in _NO_COPY:
                raise
            raise errors.UnsupportedError(
                f"the file system does not copy: {error.strerror}"
            ) from error
        if not count:  # the end of the file
            raise errors.CorruptDataError(f"the object to copy ends at {start}, before {end}")
        start += count


def _write_synced(path: Path, write: Callable[[int], None]) -> os.stat_result:
    """Write a new file and have it on the disk; return its status.

    Its time is set here, because the file system's own may be too coarse to tell two changes apart.
    """
    fd = open_here(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        write(fd)
        now = time.time_ns()
        os.utime(fd, ns=(now, now))
        os.fsync(fd)
        return os.fstat(fd)
    finally:
        close_here(fd)


def _check_version(path: Path, expected: Version) -> None:
    """Raise unless an object is in the expected state. The caller holds the folder's lock."""
    try:
        present = _version(path.stat())
    except FileNotFoundError:
        raise errors.PreconditionFailedError("there is no such object any more") from None
    if present != expected:
        raise errors.PreconditionFailedError("the object was changed by another writer")


@contextmanager
def locked(folder: Path, policy: RetryPolicy) -> Iterator[None]:
    """Hold a folder's lock.

    Args:
        policy: how long to wait for it.

    Raises:
        StoreUnavailableError: another process or thread held the lock all the time.
    """
    tries = Tries(policy)
    while True:
        # Opened anew, because `flock` locks an open file: so threads exclude each other, too.
        fd = open_here(folder / _LOCK_NAME, os.O_RDWR | os.O_CREAT)
        try:
            # Without a link, `remove_lock` has removed the file since it was opened.
            if try_lock(fd) and os.fstat(fd).st_nlink:
                yield
                return
        finally:
            close_here(fd)
        if not tries.pause():
            raise errors.StoreUnavailableError(
                f"another process has held the lock {folder / _LOCK_NAME} for"
                f" {policy.patience_seconds:.0f} s",
                advice="end that process ('fuser -v' with this path names it), or wait for it",
            )


def try_lock(fd: int) -> bool:
    """Take the lock of an open file; return False if it is taken."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class FileSource(RangeSource):
    """Reads ranges of one file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def ask(self, start: int, end: int) -> Answer:  # noqa: ARG002  it is read up to the file's end
        """Open the file, which the answer closes."""
        fd, status = _open(self._path)
        return _LocalAnswer(fd, start, _version(status))


class _LocalAnswer(Answer):
    """An `Answer` from an open file."""

    def __init__(self, fd: int, start: int, version: Version) -> None:
        self._fd = fd
        self._position = start
        self._version = version

    def version(self) -> Version:
        """Return the state of the file, unless it was written to since it was opened."""
        if _version(os.fstat(self._fd)) != self._version:
            raise errors.PreconditionFailedError(REPLACED)
        return self._version

    def readinto(self, into: memoryview) -> int:
        """Read the next bytes to the front of `into`; return how many."""
        count = os.preadv(self._fd, [into], self._position)
        if not count:
            raise errors.CorruptDataError(f"the object ends at {self._position}")
        self._position += count
        return count

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


def _open(path: Path) -> tuple[int, os.stat_result]:
    """Open an object for reading; the caller closes the descriptor."""
    # O_NONBLOCK: opening a FIFO must not wait; it is refused below.
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except NotADirectoryError as error:  # a file has the name of a folder of the key
        raise errors.ObjectNotFoundError("there is no such object") from error
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise errors.ObjectNotFoundError("there is no such object")
    except BaseException:
        os.close(fd)
        raise
    return fd, status


@contextmanager
def _opened(path: Path) -> Iterator[tuple[int, os.stat_result]]:
    """Open an object for reading; yield its descriptor and status, then close it."""
    fd, status = _open(path)
    try:
        yield fd, status
    finally:
        os.close(fd)


def _free_bytes(folder: Path) -> int:
    """Return the room on a folder's file system; the folder need not exist yet."""
    existing = next(place for place in (folder, *folder.parents) if place.exists())
    return shutil.disk_usage(existing).free


def _make_folder(folder: Path) -> None:
    """Make a folder and those above it, on the disk: a synced object must not vanish with them."""
    if folder.is_dir():
        return
    _make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    _sync_folder(folder.parent)


def _sync_folder(folder: Path) -> None:
    """Have the names in a folder on the disk."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _entries(folder: Path) -> Sequence[os.DirEntry[str]]:
    """Return what is in a folder, in the order of names, without locks and temporary objects.

    What is no folder, or does not exist, has nothing in it.
    """
    try:
        with os.scandir(folder) as listing:
            entries = [entry for entry in listing if not entry.name.startswith(_OUR_PREFIX)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(entries, key=lambda entry: entry.name)


def _version(status: os.stat_result) -> Version:
    return Version(e_tag=f"{status.st_mtime_ns:x}-{status.st_ino:x}-{status.st_size:x}")


def _meta(key: str, status: os.stat_result) -> ObjectMeta:
    modified = datetime.fromtimestamp(status.st_mtime_ns / 1e9, tz=UTC)
    return ObjectMeta(key, status.st_size, _version(status), modified)
