"""The room for copies on a file system, and in memory."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from itertools import product
from pathlib import Path

_IN_MEMORY = {"tmpfs", "ramfs", "hugetlbfs"}
# This part of the memory below each limit is left to the job itself.
_LEFT_TO_THE_JOB = 0.1
_OWN_CGROUPS = Path("/proc/self/cgroup")
_MOUNTED, _ROOTS = Path("/sys/fs/cgroup"), ("", "unified", "memory")
# The limit and what is used, in versions 2 and 1 of cgroups.
_FILES = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))


def room_bytes(home: Path, max_bytes: int | None) -> int:
    """Return the number of bytes that may still be written.

    Args:
        home: the user's folder; it need not exist.
        max_bytes: the most that everything below `home` may take. None: all that is free, but a
            tenth of the file system.
    """
    system = os.statvfs(home.parent)
    taken_bytes, used = sizes_of(home)
    # Files that are being written have their size before their blocks.
    coming_bytes = used - taken_bytes
    free_bytes = system.f_bavail * system.f_frsize - coming_bytes
    unbound = free_bytes - system.f_blocks * system.f_frsize // 10
    room = unbound if max_bytes is None else min(free_bytes, max_bytes - used)
    if _file_system_of(home.parent.stat().st_dev) in _IN_MEMORY:
        room = min([room, *(free - coming_bytes for free in free_memory_bytes())])
    return room


def sizes_of(folder: Path) -> tuple[int, int]:
    """Return what the files below a folder take now, and what they do when they are full."""
    taken = used = 0
    for at, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                status = os.lstat(f"{at}/{name}")
                if stat.S_ISREG(status.st_mode):
                    taken += status.st_blocks * 512
                    used += max(status.st_blocks * 512, status.st_size)
    return taken, used


def _file_system_of(device: int) -> str | None:
    """Return the type of a device's file system, such as "tmpfs"; None where nothing says it."""
    place = f"{os.major(device)}:{os.minor(device)}"
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
            if line.split()[2] == place:
                return line.partition(" - ")[2].split()[0]
    return None


def free_memory_bytes() -> list[int]:
    """Return what is left of this machine's memory and below its cgroups' limits, less a tenth.

    Files in memory count against all of them. The page cache does not: the kernel gives that back.
    What the system does not say is left out.
    """
    free = []
    with contextlib.suppress(OSError, ValueError, KeyError):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        memory = {line.split()[0]: int(line.split()[1]) * 1024 for line in lines}
        free.append(memory["MemAvailable:"] - int(memory["MemTotal:"] * _LEFT_TO_THE_JOB))
    for group, (limit, used) in product(_cgroups(), _FILES):
        with contextlib.suppress(OSError, ValueError, KeyError):
            most = int((group / limit).read_text(encoding="ascii"))
            lines = (group / "memory.stat").read_text(encoding="ascii").splitlines()
            counts = {line.split()[0]: int(line.split()[1]) for line in lines}
            kinds = ("inactive_file", "active_file")
            # In version 1 only what begins with `total_` counts the groups below, too.
            cached = sum(counts.get(f"total_{kind}", counts[kind]) for kind in kinds)
            held = int((group / used).read_text(encoding="ascii")) - cached
            free.append(most - held - int(most * _LEFT_TO_THE_JOB))
    return free


def _cgroups() -> Iterator[Path]:
    """Yield where the memory cgroups of this process may be, from its own up: each limit counts.

    In a container only the host may know its name. Then it is what is mounted.
    """
    with contextlib.suppress(OSError):
        for line in _OWN_CGROUPS.read_text(encoding="utf-8").splitlines():
            _, kinds, own = line.split(":", 2)
            if not kinds or "memory" in kinds.split(","):
                for group, root in product((Path(own), *Path(own).parents), _ROOTS):
                    yield _MOUNTED / root / str(group).lstrip("/")
