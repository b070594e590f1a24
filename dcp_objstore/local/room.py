"""How much room there is for copies on a file system, and in memory."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

IN_MEMORY = {"tmpfs", "ramfs", "hugetlbfs"}
# Of the memory below the limit, so much is left to the job itself.
_LEFT_TO_THE_JOB = 0.1
_CGROUPS = Path("/sys/fs/cgroup")


def room_bytes(folder: int, max_bytes: int | None, home: int | None) -> int:
    """Return the number of bytes that may still be written.

    Args:
        folder: a descriptor of the folder.
        max_bytes: the most that everything below `home` may take. None: all that is free, but a
            tenth of the file system.
        home: a descriptor of the user's folder. None: there is none yet.
    """
    system = os.fstatvfs(folder)
    taken_bytes, used = (0, 0) if home is None else _sizes(home)
    # Files that are being written have their size before their blocks.
    coming_bytes = used - taken_bytes
    free_bytes = system.f_bavail * system.f_frsize - coming_bytes
    if max_bytes is None:
        room = free_bytes - system.f_blocks * system.f_frsize // 10
    else:
        room = min(free_bytes, max_bytes - used)
    mount = mount_of(os.fstat(folder).st_dev)
    if mount is not None and mount.kind in IN_MEMORY:
        room = min([room, *(free - coming_bytes for free in free_memory_bytes())])
    return room


def used_bytes(folder: int) -> int:
    """Return the number of bytes that the files below a folder take on its file system, or will."""
    return _sizes(folder)[1]


def _sizes(folder: int) -> tuple[int, int]:
    """Return what the files below a folder take now, and what they do when they are full."""
    taken = used = 0
    for status in _below(folder):
        taken += status.st_blocks * 512
        used += max(status.st_blocks * 512, status.st_size)
    return taken, used


def _below(folder: int) -> Iterator[os.stat_result]:
    for _, _, names, at in os.fwalk(dir_fd=folder, follow_symlinks=False):
        for name in names:
            with contextlib.suppress(OSError):
                status = os.stat(name, dir_fd=at, follow_symlinks=False)
                if stat.S_ISREG(status.st_mode):
                    yield status


class Mount(NamedTuple):
    """A file system: its type, such as "tmpfs" or "ext4", and its options."""

    kind: str
    options: str


def mount_of(device: int) -> Mount | None:
    """Return the file system with this device number; None where the system does not say."""
    place = f"{os.major(device)}:{os.minor(device)}"
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
            if line.split()[2] == place:
                kind, _, options = line.partition(" - ")[2].split(maxsplit=2)
                return Mount(kind, options)
    return None


def free_memory_bytes() -> list[int]:
    """Return what is left of this machine's memory and below its cgroup's limit, less a tenth each.

    Files in memory count against both. The page cache does not: the kernel gives that back. What
    the system does not say is left out.
    """
    free = []
    with contextlib.suppress(OSError, ValueError, KeyError):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        memory = {line.split()[0]: int(line.split()[1]) * 1024 for line in lines}
        free.append(memory["MemAvailable:"] - int(memory["MemTotal:"] * _LEFT_TO_THE_JOB))
    for limit, used, files in (
        ("memory.max", "memory.current", "memory.stat"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
    ):
        with contextlib.suppress(OSError, ValueError, KeyError):
            most = int((_CGROUPS / limit).read_text(encoding="ascii"))
            statistics = dict(
                line.split() for line in (_CGROUPS / files).read_text(encoding="ascii").splitlines()
            )
            cached = int(statistics["inactive_file"]) + int(statistics["active_file"])
            held = int((_CGROUPS / used).read_text(encoding="ascii")) - cached
            free.append(most - held - int(most * _LEFT_TO_THE_JOB))
    return free
