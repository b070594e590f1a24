"""`RunFolder`: the folder of one run on this node, which holds copies of its data objects.

    <folder>/dcp-objstore-<uid>/      0700 and this user's; otherwise it is not used
      <digest of the run's URL>/
        url                           the run's URL, for people
        lock                          flock: shared by the processes of a job, exclusive to remove
        objects/<key, quoted>         a copy: 0600, renamed to this when it is whole
        objects/tmp.<random>          one that is being written, which its writer has locked

A copy is the object itself. A key is never written twice, and the index has a digest of each block,
so a copy is right wherever its blocks verify. Nothing here is a format, and nothing needs fsync:
after a crash of the process the page cache is whole, after one of the machine the digests decide.

Files are only ever written with `pwrite` and read with `preadv`: a full disk or a dead one is an
error then, where mapped memory would be a signal.

What is not needed any more is written over, which costs less than new files. A save keeps the
copies of the save before, or of what was loaded, until it has written all of its own. So there are
two states of a job at most, and a crash at any moment leaves the newest committed one.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
import stat
import threading
import time
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import quote, unquote

import xxhash

from dcp_objstore.contexts import contextmanager
from dcp_objstore.forking import PerProcess
from dcp_objstore.local.room import room_bytes
from dcp_objstore.observe.report import size_text

if TYPE_CHECKING:
    from dcp_objstore.local.settings import Local

_BEING_WRITTEN = "tmp."
REMOVED = "removed."  # what is being removed, or was when its process was killed
_OPEN = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # a FIFO would be waited for
READ, FOLDER = os.O_RDONLY | _OPEN, os.O_DIRECTORY | _OPEN
_PATIENCE_SECONDS = 5.0
# A folder that no process uses is removed after so long, or when its room is needed.
ABANDONED_AFTER_SECONDS = 24 * 3600.0
# The files of earlier processes are older than this one. Taken when the module is imported, which
# is before the first save: its ranks meet before any of them writes.
_began: PerProcess[float] = PerProcess(time.time)


class LocalError(Exception):
    """Why a folder, or a file in it, is not used. It never leaves this room."""


class CopyFile:
    """A copy that is open for reading. It is closed when nothing refers to it any more.

    Attributes:
        descriptor: its file descriptor.
        size_bytes: its size.
    """

    def __init__(self, descriptor: int, size_bytes: int) -> None:
        self.descriptor = descriptor
        self.size_bytes = size_bytes

    def __del__(self) -> None:
        os.close(self.descriptor)


class Spare(NamedTuple):
    """A file that may be written over."""

    name: str
    size_bytes: int


class RunFolder:
    """The folder of one run. Safe to use from many threads.

    Args:
        local: where copies may be kept.
        run_url: URL of the run, with the endpoint if it has one.

    Raises:
        LocalError, OSError: the folder cannot be used.

    Attributes:
        needed: the names of the copies that are not written over.
        has_saved: whether a save of this process has written all of its copies.
    """

    def __init__(self, local: Local, run_url: str) -> None:
        self._local = local
        self._lock = threading.Lock()
        name = xxhash.xxh3_128_hexdigest(run_url.encode())
        with contextlib.ExitStack() as stack:
            with opened(local.folder, os.O_DIRECTORY | os.O_CLOEXEC) as base:
                self._home = _open_own(base, home_name(), local.folder)
            stack.callback(os.close, self._home)
            run, in_use = _join(self._home, name)
            stack.callback(os.close, run)
            stack.callback(os.close, in_use)
            self._objects = _open_own(run, "objects", name)
            stack.callback(os.close, self._objects)
            with contextlib.suppress(FileExistsError):
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _OPEN
                with opened("url", flags, run) as file:
                    os.write(file, run_url.encode())
            remove_abandoned(self._home)
            self._opened = stack.pop_all()
        self._written: set[str] = set()  # by this process
        self.needed: frozenset[str] = frozenset()
        self.has_saved = False

    def __del__(self) -> None:
        if hasattr(self, "_opened"):
            self._opened.close()

    @property
    def identity(self) -> bytes:
        """What is the same for all processes that see this folder, and for no others."""
        found = os.fstat(self._objects)
        return repr((_boot_id(), found.st_dev, found.st_ino)).encode()

    def need(self, keys: Iterable[str]) -> None:
        """Keep the copies of these objects, and of no others, until another state is whole here."""
        self.needed = frozenset(map(file_name, keys))

    def spares(self) -> list[Spare]:
        """Return the files that a save may write over."""
        spares = []
        with self._alone():
            for name, status in files_in(self._objects):
                if name.startswith(_BEING_WRITTEN):
                    is_spare = not is_being_written(self._objects, name)
                else:
                    is_old = name in self._written or status.st_mtime < _began.here
                    is_spare = is_old and name not in self.needed
                if is_spare:
                    spares.append(Spare(name, status.st_size))
        return spares

    def create(self, spares: list[Spare], size_bytes: int) -> tuple[int, str]:
        """Return a file to write, with room for so many bytes: its descriptor and present name.

        Args:
            spares: the files to write over. The one that is used is taken out; all are, and are
                removed, if there is no room otherwise.

        Raises:
            LocalError, OSError: there is no room, or no file can be made.
        """
        name = f"{_BEING_WRITTEN}{secrets.token_hex(8)}"
        with self._alone():
            file = self._take_over(spares, size_bytes, name)
            if file is None:
                flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | _OPEN
                file = os.open(name, flags, 0o600, dir_fd=self._objects)
            with self._or_drop(file, name):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with self._or_drop(file, name):
            self.reserve(file, size_bytes, spares)
        return file, name

    def reserve(self, file: int, size_bytes: int, spares: list[Spare]) -> None:
        """Set room aside for so many bytes of a file.

        Args:
            spares: files that are removed if there is no room otherwise.

        Raises:
            LocalError, OSError: there is no room.
        """
        with self._alone():
            present_bytes = os.fstat(file).st_size
            if size_bytes <= present_bytes:
                return
            self._make_room(size_bytes - present_bytes, spares)
            os.ftruncate(file, size_bytes)  # others count it from now on
        # A tmpfs needs a second for each GiB of it: others can have theirs meanwhile.
        _reserve(file, size_bytes)

    def _take_over(self, spares: list[Spare], size_bytes: int, name: str) -> int | None:
        """Take the spare file that fits best; None if there is none."""
        while spares:
            best = min(spares, key=lambda spare: abs(spare.size_bytes - size_bytes))
            spares.remove(best)
            with contextlib.suppress(OSError):  # another rank has taken it
                os.rename(best.name, name, src_dir_fd=self._objects, dst_dir_fd=self._objects)
                file = os.open(name, os.O_RDWR | _OPEN, dir_fd=self._objects)
                if is_own_file(os.fstat(file)):
                    self._written.discard(best.name)
                    return file
                self.drop(file, name)
        return None

    def _make_room(self, size_bytes: int, spares: list[Spare]) -> None:
        while size_bytes > (room := room_bytes(self._objects, self._local.max_bytes, self._home)):
            if spares:
                self.remove(spares)
                spares.clear()
            elif not remove_abandoned(self._home, after_seconds=0.0, most=1):
                raise LocalError(
                    f"{size_text(size_bytes)} are needed and there is room for"
                    f" {size_text(max(0, room))}: a node takes two states of its ranks"
                )

    def finish(self, file: int, name: str, key: str, size_bytes: int) -> None:
        """Make a file that was written the copy of an object, and close it."""
        with self._or_drop(file, name):
            os.ftruncate(file, size_bytes)
            final = file_name(key)
            os.rename(name, final, src_dir_fd=self._objects, dst_dir_fd=self._objects)
            self._written.add(final)
        os.close(file)

    @contextmanager
    def _or_drop(self, file: int, name: str) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.drop(file, name)
            raise

    def drop(self, file: int, name: str) -> None:
        """Remove a file that was being written."""
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=self._objects)
        os.close(file)

    def remove(self, spares: Iterable[Spare]) -> None:
        """Remove spare files."""
        for spare in spares:
            with contextlib.suppress(OSError):
                os.unlink(spare.name, dir_fd=self._objects)
            self._written.discard(spare.name)

    def open_copies(self, keys: Collection[str]) -> dict[str, CopyFile]:
        """Open the copies of these objects that are here, by their keys."""
        copies: dict[str, CopyFile] = {}
        here = {name for name, _ in files_in(self._objects)}
        for key in keys:
            if (name := file_name(key)) not in here:
                continue
            with contextlib.suppress(OSError):
                file = os.open(name, READ, dir_fd=self._objects)
                status = os.fstat(file)
                if is_own_file(status):
                    copies[key] = CopyFile(file, status.st_size)
                else:
                    os.close(file)
        return copies

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Let no other process or thread take files or room meanwhile."""
        with self._lock:
            lock_file(self._objects, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self._objects, fcntl.LOCK_UN)


def home_name() -> str:
    """Return the name of this user's folder."""
    return f"dcp-objstore-{os.geteuid()}"


def file_name(key: str) -> str:
    """Return the name of the copy of an object, whose key is relative to the run."""
    return quote(key, safe="")


def key_of(name: str) -> str | None:
    """Return the key of the object that a file is the copy of; None if it is no copy."""
    return None if name.startswith(_BEING_WRITTEN) else unquote(name)


def is_own_file(status: os.stat_result) -> bool:
    """Whether this is a regular file of this user that has one name alone."""
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and status.st_nlink == 1


def is_being_written(objects: int, name: str) -> bool:
    """Whether a process writes to this file. No other may begin to, meanwhile."""
    try:
        with opened(name, os.O_RDWR | _OPEN, objects) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    return False


def open_home(folder: str) -> int:
    """Open this user's folder in `folder`, with copies of all runs.

    Raises:
        FileNotFoundError: there is none.
        LocalError, OSError: it cannot be used.
    """
    with opened(folder, os.O_DIRECTORY | os.O_CLOEXEC) as base:
        return _open_present(base, home_name(), folder)


def _open_own(at: int, name: str, where: str) -> int:
    """Open a folder that only this user can use; make it if it is not there."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, 0o700, dir_fd=at)
    return _open_present(at, name, where)


def _open_present(at: int, name: str, where: str) -> int:
    try:
        folder = os.open(name, FOLDER, dir_fd=at)
    except NotADirectoryError:
        raise LocalError(f"{name} in {where} is no folder, or a symbolic link") from None
    status = os.fstat(folder)
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        os.close(folder)
        raise LocalError(f"{name} in {where} belongs to another user, or others may use it")
    return folder


@contextmanager
def opened(path: str, flags: int, at: int | None = None) -> Iterator[int]:
    """Open a file or folder, and close it again."""
    descriptor = os.open(path, flags, 0o600, dir_fd=at)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def files_in(folder: int) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the names of the regular files in a folder, and what they are."""
    with os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                status = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(status.st_mode):
                    yield entry.name, status


def lock_file(file: int, kind: int) -> None:
    """Lock a file, and give up after a while: what holds it may be stopped."""
    until = time.monotonic() + _PATIENCE_SECONDS
    while True:
        try:
            return fcntl.flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                raise
            time.sleep(0.005)


def _join(home: int, name: str) -> tuple[int, int]:
    """Open the folder of a run and hold its lock; return both descriptors."""
    until = time.monotonic() + _PATIENCE_SECONDS
    while True:
        with contextlib.ExitStack() as opened:
            run = _open_own(home, name, "its folder")
            opened.callback(os.close, run)
            # Missing: the folder has just been removed, or renamed to be removed.
            with contextlib.suppress(BlockingIOError, FileNotFoundError):
                lock = os.open("lock", os.O_RDWR | os.O_CREAT | _OPEN, 0o600, dir_fd=run)
                opened.callback(os.close, lock)
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
                if os.path.samestat(os.stat(name, dir_fd=home), os.fstat(run)):
                    os.utime(lock)
                    opened.pop_all()
                    return run, lock
        if time.monotonic() > until:
            raise LocalError("another process is removing the run's folder")
        time.sleep(0.01)


def remove_abandoned(
    home: int, *, after_seconds: float = ABANDONED_AFTER_SECONDS, most: int | None = None
) -> int:
    """Remove folders of runs that no process uses, the oldest first; return how many.

    Args:
        home: a descriptor of the user's folder.
        after_seconds: how long ago a process began to use them, or wrote to them.
        most: the largest number to remove. Default: all.
    """
    with os.scandir(home) as entries:
        names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    removed = 0
    for when, name in sorted((used_at(home, name), name) for name in names):
        if removed == most or time.time() - when < after_seconds:
            break
        removed += remove_run(home, name)
    return removed


def used_at(home: int, name: str) -> float:
    """Return when a process last began to use the folder of a run, or wrote to it.

    That is 0 if it was never whole, or is half removed.
    """
    with contextlib.suppress(OSError):
        return max(
            os.stat(f"{name}/{part}", dir_fd=home, follow_symlinks=False).st_mtime
            for part in ("lock", "objects")
        )
    return 0.0


def remove_run(home: int, name: str) -> bool:
    """Remove the folder of a run, unless a process uses it; return whether it is gone."""
    try:
        if name.startswith(REMOVED):  # what began to remove it was killed
            shutil.rmtree(name, dir_fd=home)
            return True
        with (
            opened(name, FOLDER, home) as run,
            # A process that was killed may have made the folder and not the lock.
            opened("lock", os.O_RDWR | os.O_CREAT | _OPEN, run) as lock,
        ):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            gone = f"{REMOVED}{secrets.token_hex(8)}"  # a job that begins now makes its own
            os.rename(name, gone, src_dir_fd=home, dst_dir_fd=home)
            shutil.rmtree(gone, dir_fd=home)
    except OSError:
        return False
    return True


def _reserve(file: int, size_bytes: int) -> None:
    """Have the file system set so many bytes aside, where it can."""
    reserve = getattr(os, "posix_fallocate", None)  # not on macOS
    if reserve is None:
        return
    try:
        reserve(file, 0, size_bytes)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise


def _boot_id() -> str:
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    return os.uname().nodename
