"""The folders of copies on this node: what is in them, who uses them, what is removed, what fits.

    <folder>/dcp-objstore-<uid>/       0700 and this user's; otherwise it is not used
      <digest of the run's URL>/
        =url                           the run's URL, for people
        =used <process>                a process that uses the run, and by its time: since when
        <checkpoint, quoted>/          as the folder of a `LocalStore`:
          <key>                        a copy, renamed to this when it is whole
          .dcp-objstore.tmp.*          one that is being written, which its writer has locked

A copy is the object itself. A key is never written twice, and the index has a digest of each block,
so a copy is right wherever its blocks verify. Nothing here is a format, and nothing needs fsync:
after a crash of the process the page cache is whole, after one of the machine the digests decide.

Between saves and loads a process holds nothing: no lock and no open file. What a save may write
over follows from the times of the files: all copies of the run's steps but the newest one's, which
is the step that was saved or loaded last. Writing over takes less than half the processor time of
new files.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import chain, product
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

from dcp_objstore.config import Local
from dcp_objstore.contexts import contextmanager
from dcp_objstore.errors import InputError, StoreUnavailableError
from dcp_objstore.forking import PerProcess, close_here, open_here
from dcp_objstore.stores.local import LOCK_POLICY, TEMPORARY, locked, try_lock

URL, USED, STORE_ROOT = "=url", "=used ", "=root"  # a quoted name has no "="
# A run that nobody has saved or loaded for this long is removed. It is removed earlier if its room
# is needed and its processes have ended.
ABANDONED_AFTER_SECONDS = 24 * 3600.0
# The folders of the runs that this process has used, and whether it has saved there.
runs_here: PerProcess[dict[Path, bool]] = PerProcess(dict)

# This part of the memory below each limit is left to the job itself.
_LEFT_TO_THE_JOB = 0.1
_OWN_CGROUPS = Path("/proc/self/cgroup")
_MOUNTED, _ROOTS = Path("/sys/fs/cgroup"), ("", "unified", "memory")
# What is raised where a system says nothing of its memory, or says it in another form.
_UNSAID = (OSError, ValueError, KeyError, IndexError)
# The limit and what is used, in versions 2 and 1 of cgroups.
_FILES = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))


class LocalError(Exception):
    """Why a folder, or a file in it, is not used. It never leaves this room."""


class File(NamedTuple):
    """A regular file of this user that has one name."""

    path: Path
    status: os.stat_result

    @property
    def is_temporary(self) -> bool:
        """Whether it is not a copy, or not yet."""
        return self.path.name.startswith(TEMPORARY)

    @property
    def is_being_written(self) -> bool:
        """Whether a save writes to this temporary file, and so has its lock.

        The caller holds the lock of the user's folder, because a file that was just made there is
        locked a moment later.
        """
        with contextlib.suppress(FileNotFoundError):  # it was removed meanwhile
            file = open_here(self.path, os.O_RDWR)
            try:
                return not try_lock(file)
            finally:
                close_here(file)
        return False


def home_of(folder: str, *, make: bool = False) -> Path:
    """Return this user's folder in `folder`. It need not exist, unless `make` is True.

    Raises:
        LocalError, OSError: it cannot be used, or there is no such `folder`.
    """
    os.stat(f"{folder}/.")  # noqa: PTH116 - `Path` drops the dot, which only a folder has
    home = Path(folder, f"dcp-objstore-{os.geteuid()}")
    if make:
        home.mkdir(0o700, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        status = home.lstat()
        is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
        if not is_own or status.st_mode & 0o077:
            raise LocalError(f"{home} must be a folder that only this user may use, and no link")
    return home


def folders_in(folder: Path) -> list[Path]:
    """Return the folders of a user's runs, or those of a run's checkpoints."""
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        return [Path(entry) for entry in entries if entry.is_dir(follow_symlinks=False)]
    return []


def files_in(folder: Path) -> list[File]:
    """Return the copies in a folder, what is being written there and what is left over."""
    files = []
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            status = entry.stat(follow_symlinks=False)
            # A save may write over these files, so no other user's file and no hard link counts.
            is_own = status.st_uid == os.geteuid() and status.st_nlink == 1
            if stat.S_ISREG(status.st_mode) and is_own:
                files.append(File(Path(entry), status))
    return files


def remove(paths: Iterable[Path]) -> None:
    """Remove files, if they are still there, and their folders if they are empty then."""
    for path in paths:
        with contextlib.suppress(OSError):
            path.unlink()
            path.parent.rmdir()


def note_use(run: Path, *, saves: bool) -> None:
    """Note that this process uses a run now, for other processes and for the next save here."""
    runs_here.here[run] = saves or runs_here.here.get(run, False)
    (run / f"{USED}{pid_namespace()} {os.getpid()}").touch()


def used_at(run: Path) -> float:
    """Return when a process last saved or loaded a checkpoint of a run; 0 if no process did."""
    return max((path.stat().st_mtime for path in run.glob(f"{USED}*")), default=0.0)


def is_used(run: Path, *, unknown: bool) -> bool:
    """Whether a process that has used a run is alive.

    Args:
        unknown: the answer for a process that cannot be seen: it may be in another container.
    """
    for path in run.glob(f"{USED}*"):  # such as "=used <boot> <namespace> <pid>"
        marked_namespace, _, pid = path.name.rpartition(" ")
        can_be_seen = marked_namespace == USED + pid_namespace()
        is_alive = Path("/proc", pid).exists() if can_be_seen else unknown
        if is_alive:
            return True
    return False


def pid_namespace() -> str:
    """Return in what the number of a process is unique: this boot and this namespace.

    Where the system does not name them, it is this process alone.
    """
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"  # noqa: PTH115 - no path
    return f"{os.uname().nodename} {os.getpid()}"


def remove_unused(home: Path, keep: Path, *, needed: bool = False) -> bool:
    """Remove one run that may go, the one that was used longest ago; return whether there was one.

    Args:
        home: the user's folder.
        keep: the folder of a run that stays.
        needed: whether its room is needed. Then a run may go if its processes have ended, or if
            this process has used it and now saves to another one. Otherwise only a run may go that
            was not used for a day.
    """
    for run in sorted(folders_in(home), key=used_at):
        is_old = time.time() - used_at(run) > ABANDONED_AFTER_SECONDS
        is_given_up = needed and (run in runs_here.here or not is_used(run, unknown=True))
        may_go = run != keep and (is_old or is_given_up)
        if may_go and remove_run(home, run):
            return True
    return False


def remove_run(home: Path, run: Path) -> bool:
    """Remove the folder of a run, unless a save writes to it; return whether it is gone."""
    with locked(home, LOCK_POLICY):
        files = [file for folder in folders_in(run) for file in files_in(folder)]
        if any(file.is_temporary and file.is_being_written for file in files):
            return False
    shutil.rmtree(run, ignore_errors=True)
    return not run.exists()


# --- the room for copies, on a file system and in memory


def room_bytes(home: Path, max_bytes: int | None) -> int:
    """Return the number of bytes that may still be written.

    Args:
        home: the user's folder; it need not exist.
        max_bytes: the most that everything below `home` may take. None: all that is free, but a
            tenth of the file system.
    """
    system = os.statvfs(home.parent)
    taken_bytes, full_bytes = sizes_of(home)
    # A file that is being written has its full size from the beginning, and takes blocks as it is
    # written. These bytes are still to come.
    coming_bytes = full_bytes - taken_bytes
    free_bytes = system.f_bavail * system.f_frsize - coming_bytes
    if max_bytes is None:
        room = free_bytes - system.f_blocks * system.f_frsize // 10
    else:
        room = min(free_bytes, max_bytes - full_bytes)
    if _file_system_of(home.parent.stat().st_dev) == "tmpfs":
        # The copies are in memory, which they take from the job. (Of other file systems in memory,
        # ramfs says that it has no room, and hugetlbfs takes no writes.)
        room = min([room, *(free - coming_bytes for free in free_memory_bytes())])
    return room


def sizes_of(folder: Path) -> tuple[int, int]:
    """Return the bytes that the files below a folder take now, and those once all is written."""
    taken_bytes = full_bytes = 0
    for directory, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):  # removed meanwhile
                status = os.lstat(f"{directory}/{name}")
                if stat.S_ISREG(status.st_mode):
                    taken_bytes += status.st_blocks * 512
                    full_bytes += max(status.st_blocks * 512, status.st_size)
    return taken_bytes, full_bytes


def _file_system_of(device: int) -> str | None:
    """Return the type of a device's file system, such as "tmpfs"; None where nothing says it."""
    number = f"{os.major(device)}:{os.minor(device)}"
    with contextlib.suppress(*_UNSAID):
        for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
            # Such as "36 35 98:0 / /mnt rw,noatime shared:1 - ext3 /dev/root rw".
            if line.split()[2] == number:
                return line.partition(" - ")[2].split()[0]
    return None


def free_memory_bytes() -> list[int]:
    """Return what is left of this machine's memory and below its cgroups' limits, less a tenth.

    Files in memory count against all of them. The page cache does not: the kernel gives that back.
    What the system does not say is left out.
    """
    free = []
    with contextlib.suppress(*_UNSAID):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        memory = {line.split()[0]: int(line.split()[1]) * 1024 for line in lines}
        free.append(memory["MemAvailable:"] - int(memory["MemTotal:"] * _LEFT_TO_THE_JOB))
    for group, (limit_file, usage_file) in product(_cgroups(), _FILES):
        with contextlib.suppress(*_UNSAID):
            limit_bytes = int((group / limit_file).read_text(encoding="ascii"))
            lines = (group / "memory.stat").read_text(encoding="ascii").splitlines()
            counts = {line.split()[0]: int(line.split()[1]) for line in lines}
            kinds = ("inactive_file", "active_file")
            # In version 1 only what begins with `total_` counts the groups below, too.
            cached_bytes = sum(counts.get(f"total_{kind}", counts[kind]) for kind in kinds)
            held_bytes = int((group / usage_file).read_text(encoding="ascii")) - cached_bytes
            free.append(limit_bytes - held_bytes - int(limit_bytes * _LEFT_TO_THE_JOB))
    return free


def _cgroups() -> Iterator[Path]:
    """Yield the folders where the memory cgroups of this process may be, from its own one up.

    The limit of each of them counts. In a container, the name of the group may be one that only the
    host knows. Then the root of what is mounted is the container's group, which is yielded as well,
    and the other folders do not exist.
    """
    with contextlib.suppress(OSError):
        for line in _OWN_CGROUPS.read_text(encoding="utf-8").splitlines():
            # "0::/user.slice" in version 2, "4:memory:/user.slice" in version 1.
            _, controllers, name = line.split(":", 2)
            if not controllers or "memory" in controllers.split(","):
                for group, root in product((Path(name), *Path(name).parents), _ROOTS):
                    yield _MOUNTED / root / str(group).lstrip("/")


# --- what is there


class Files(NamedTuple):
    """The number of files, and the space that they take on the file system."""

    number: int
    total_bytes: int


@dataclass(frozen=True, kw_only=True)
class LocalRun:
    """The copies of one run.

    Attributes:
        folder: the name of its folder.
        url: the run's URL; None if its folder does not say.
        endpoint_url: the store's endpoint, if the run has one.
        in_use: whether a process that has used it is alive.
        used_at: when a process last saved or loaded; None if it is half removed.
        steps: the copies of each checkpoint, by its name; "." if the URL is a checkpoint's.
        unfinished: files that a save writes now, or that a killed one has left: the next save
            writes over those.
    """

    folder: str
    url: str | None
    endpoint_url: str | None
    in_use: bool
    used_at: datetime | None
    steps: dict[str, Files]
    unfinished: Files

    @property
    def total(self) -> Files:
        """All of its files together."""
        parts = [*self.steps.values(), self.unfinished]
        return Files(*map(sum, zip(*parts, strict=True)))


def local_runs(local: Local) -> list[LocalRun]:
    """Return the runs of which there are copies, the one that was used last at the end.

    Raises:
        InputError: nothing was ever kept there, or the folder is not used.
    """
    with _existing_home(local) as home:
        return [_local_run(run) for run in sorted(folders_in(home), key=used_at)]


def remove_local_runs(local: Local) -> list[tuple[LocalRun, bool]]:
    """Remove the copies of all runs that no process uses.

    Returns:
        Each run, and whether its copies are gone. If not, a process uses them.

    Raises:
        InputError: as `local_runs`.
    """
    with _existing_home(local) as home:
        # `remove_run` looks again, because a process may have begun to use the run meanwhile.
        return [
            (run, not run.in_use and remove_run(home, home / run.folder))
            for run in local_runs(local)
        ]


@contextmanager
def _existing_home(local: Local) -> Iterator[Path]:
    """Yield the user's folder; turn what goes wrong in the `with` block into an `InputError`."""
    try:
        home = home_of(local.folder)
        if not home.exists():
            raise InputError(
                f"no job of this user has kept copies in {local.folder}: it has no {home.name}"
            )
        yield home
    except (LocalError, OSError, StoreUnavailableError) as error:
        raise InputError(f"{local.folder} is not used: {error}") from error


def _local_run(run: Path) -> LocalRun:
    """Return what a run's folder holds."""
    files = {_checkpoint_name(folder): files_in(folder) for folder in folders_in(run)}
    steps = {name: [file for file in files[name] if not file.is_temporary] for name in files}
    unfinished = [file for file in chain.from_iterable(files.values()) if file.is_temporary]
    # None or one file, with "<url>" or "<url> <endpoint>".
    texts = [path.read_text(encoding="utf-8") for path in run.glob(URL)]
    url, _, endpoint_url = "".join(texts).partition(" ")
    used = used_at(run)
    return LocalRun(
        folder=run.name,
        url=url or None,
        endpoint_url=endpoint_url or None,
        in_use=is_used(run, unknown=False),
        used_at=datetime.fromtimestamp(used, UTC) if used else None,
        steps={name: _totals(copies) for name, copies in steps.items() if copies},
        unfinished=_totals(unfinished),
    )


def _checkpoint_name(folder: Path) -> str:
    return "." if folder.name == STORE_ROOT else unquote(folder.name)


def _totals(files: Sequence[File]) -> Files:
    return Files(len(files), sum(file.status.st_blocks * 512 for file in files))
