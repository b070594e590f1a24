"""Checks of a folder for copies on this node. Their files have no name, so nothing can stay."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dcp_objstore.config import MIB
from dcp_objstore.doctor.checks import (
    Check,
    Finding,
    Verdict,
    failed,
    findings,
    not_applicable,
    not_made,
    ok,
    warning,
)
from dcp_objstore.local.folder import LocalError, home_of
from dcp_objstore.local.room import IN_MEMORY, free_memory_bytes, mount_of, room_bytes, sizes_of
from dcp_objstore.observe.report import size_text

if TYPE_CHECKING:
    from dcp_objstore.config import Local

_SHM_OF_CONTAINERS_BYTES = 64 * MIB
_TESTED_BYTES = 64 * MIB
_PIECE_BYTES = 4 * MIB
_PASSES = 3
_PASS_SECONDS = 2.0
# Times as long as a copy of memory. What is slower than this hardly helps a restart.
_SLOW = 10.0
_ANOTHER = "pass another folder as local="
_HUGE = "`mount -t tmpfs -o huge=always,size=64g tmpfs /mnt/copies`"
# What begins the types of file systems that do not suit, and why.
_UNSUITABLE: Sequence[tuple[tuple[str, ...], Verdict]] = (
    (
        ("hugetlbfs",),
        failed("can only be mapped into memory, not written to", f"mount a tmpfs: {_HUGE}"),
    ),
    (
        ("ramfs",),
        failed("has no size, so its room is not known", f"mount a tmpfs: {_HUGE}"),
    ),
    (
        ("nfs", "cifs", "smb", "lustre", "gpfs", "beegfs", "ceph", "gluster", "fuse", "9p"),
        warning(
            "its files are not on this node, so they are hardly nearer than the bucket",
            "pass a folder on a disk or in the memory of the node as local=",
        ),
    ),
    (
        ("overlay",),
        warning(
            "the container's own files, which are gone when it is",
            "mount a disk of the node there, or an emptyDir of Kubernetes",
        ),
    ),
)


def check_folder(local: Local) -> Iterator[Finding]:
    """Make the checks of a folder for copies, each when its finding is asked for."""
    return findings(_Checks(local.folder).table(), OSError, _failure)


def _failure(_check: Check, error: OSError) -> Verdict:
    """Return the verdict of a check that the operating system has ended."""
    return failed(str(error), f"check the disk and the kernel's log, or {_ANOTHER}")


class _Checks:
    """The checks of a folder, in an order in which each can rely on those before it."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def table(self) -> Sequence[Check]:
        """Return the checks. If the first fails, the others cannot be made."""
        return (
            Check("local folder", "access", self.folder),
            Check("local file system", "request", self.file_system),
            Check("local room", "request", self.room),
            Check("local memory", "request", self.memory),
            Check("local speed", "request", self.speed),
        )

    @property
    def _writable(self) -> Path:
        """The folder in which copies are made: this user's own, once there is one."""
        home = home_of(self._folder)
        return home if home.exists() else Path(self._folder)

    def folder(self) -> Verdict:
        """Look whether the folder is there, and whether this user's folder in it is used."""
        try:
            home = home_of(self._folder)
        except FileNotFoundError:
            advice = f"make it on each node, or mount a disk or a tmpfs there; or {_ANOTHER}"
            return failed("there is no such folder", advice)
        except (LocalError, OSError) as error:
            advice = f"find out who has made it, and remove it or `chmod 700` it; or {_ANOTHER}"
            return failed(str(error), advice)
        if not home.exists():
            return self._without_home()
        _, taken_bytes = sizes_of(home)
        text = f"{home.name} is there, and only this user may use it"
        return ok(f"{text}; copies take {size_text(taken_bytes)}", copies_bytes=taken_bytes)

    def _without_home(self) -> Verdict:
        if not os.access(self._folder, os.W_OK | os.X_OK):
            text = "this user may not write to it, or it is mounted to be read only"
            advice = f"let an administrator `chown` a folder there to this user, or {_ANOTHER}"
            return failed(text, advice)
        return ok("this user may write to it; no copies yet", copies_bytes=0)

    def file_system(self) -> Verdict:
        """Look what kind of file system it is, and how large its pages are."""
        mount = mount_of(Path(self._folder).stat().st_dev)
        if mount is None:
            return not_made("the system does not say which file system this is")
        kind, page_bytes = mount.kind, os.sysconf("SC_PAGE_SIZE")
        huge = next((one for one in mount.options.split(",") if one.startswith("huge=")), None)
        details = {"type": kind, "page_bytes": page_bytes, "huge": huge}
        for kinds, verdict in _UNSUITABLE:
            if kind.startswith(kinds):
                status, text, advice, _ = verdict
                return Verdict(status, f"{kind}: {text}", advice, details)
        if kind != "tmpfs":
            return ok(f"{kind}, pages of {size_text(page_bytes)}", **details)
        text = "tmpfs: files are in memory, and gone after a reboot"
        if huge in (None, "huge=never"):
            text = f"{text}; pages of {size_text(page_bytes)}"
            return Verdict("ok", text, f"huge pages take less processor time: {_HUGE}", details)
        return ok(f"{text}; huge pages ({huge})", **details)

    def room(self) -> Verdict:
        """Compare what is free with what copies may take."""
        system = os.statvfs(self._folder)
        total_bytes = system.f_blocks * system.f_frsize
        free_bytes = system.f_bavail * system.f_frsize
        may_take_bytes = self._room_bytes()
        details = {
            "total_bytes": total_bytes,
            "free_bytes": free_bytes,
            "may_take_bytes": may_take_bytes,
        }
        text = (
            f"{size_text(free_bytes)} of {size_text(total_bytes)} are free. Copies may take"
            f" {size_text(may_take_bytes)}, so a state of this node's ranks may have"
            f" {size_text(may_take_bytes // 2)}: two must fit"
        )
        if self._is_in_memory() and total_bytes <= _SHM_OF_CONTAINERS_BYTES:
            return warning(
                f"{size_text(total_bytes)} in all, as a container has in /dev/shm unless it is"
                f" given more; copies may take {size_text(may_take_bytes)}",
                "`docker run --shm-size=64g`; on Kubernetes mount an emptyDir with medium: Memory"
                " at /dev/shm",
                **details,
            )
        if may_take_bytes < 2 * _PIECE_BYTES:
            advice = f"a tenth stays free; remove files, or {_ANOTHER}"
            return failed(text, advice, **details)
        return ok(text, **details)

    def _room_bytes(self) -> int:
        """Return what copies may take, with those that are there: they are written over."""
        home = home_of(self._folder)
        return max(0, room_bytes(home, None)) + sizes_of(home)[1]

    def _is_in_memory(self) -> bool:
        mount = mount_of(Path(self._folder).stat().st_dev)
        return mount is not None and mount.kind in IN_MEMORY

    def memory(self) -> Verdict:
        """Look how much memory there is below the limits, if files count against them."""
        if not self._is_in_memory():
            return not_applicable("files there are not in memory, but for the page cache")
        free = free_memory_bytes()
        if not free:
            return not_made("the system does not say how much memory is free")
        system = os.statvfs(self._folder)
        room_there, left_bytes = system.f_bavail * system.f_frsize, max(0, min(free))
        details = {"left_bytes": left_bytes}
        text = (
            f"{size_text(left_bytes)} are left of this machine's memory and below its cgroups'"
            " limits, less a tenth; files there count against all of them"
        )
        if left_bytes >= room_there:
            return ok(text, **details)
        advice = (
            "the job and two states of its ranks must fit together: raise the limit (`docker run"
            " --memory`, resources.limits.memory on Kubernetes), or use a disk"
        )
        if left_bytes < 2 * _PIECE_BYTES:
            return failed(text, advice, **details)
        text = f"{text}. {size_text(room_there)} are free there, which is more"
        return warning(text, advice, **details)

    def speed(self) -> Verdict:
        """Compare writing and reading with a plain copy of memory, each the best of some passes."""
        size_bytes = min(_TESTED_BYTES, self._room_bytes() // 4) // _PIECE_BYTES * _PIECE_BYTES
        if not size_bytes:
            return not_made("there is too little room")
        source = memoryview(bytearray(os.urandom(_PIECE_BYTES) * (size_bytes // _PIECE_BYTES)))
        into = memoryview(bytearray(source))
        rates: dict[str, float] = {"copy": 0.0, "write": 0.0, "read": 0.0}
        with tempfile.TemporaryFile(dir=self._writable) as opened:
            file = opened.fileno()

            def copy(at: int, end: int) -> None:
                into[at:end] = source[at:end]

            def write(at: int, end: int) -> None:
                os.pwrite(file, source[at:end], at)

            def read(at: int, end: int) -> None:
                os.preadv(file, [into[at:end]], at)

            for _ in range(_PASSES):
                for name, move in (("copy", copy), ("write", write), ("read", read)):
                    rates[name] = max(rates[name], _rate(move, size_bytes))
        slower = {name: rates["copy"] / rates[name] for name in ("write", "read")}
        cached = "" if self._is_in_memory() else ", both by the page cache"
        text = (
            f"writing takes {slower['write']:.1f} times as long as a copy of memory, reading"
            f" {slower['read']:.1f} times{cached}"
        )
        details: dict[str, object] = {
            f"{name}_bytes_per_second": round(rate) for name, rate in rates.items()
        }
        details |= {f"{name}_to_copy": round(ratio, 2) for name, ratio in slower.items()}
        if max(slower.values()) > _SLOW:
            advice = "try again while the machine is idle; if it stays, use an NVMe disk or a tmpfs"
            return warning(text, advice, **details)
        return ok(text, **details)


def _rate(move: Callable[[int, int], None], size_bytes: int) -> float:
    """Return how many bytes a second were moved, from the start to the end or until time is up."""
    began = time.perf_counter()
    seconds = 0.0
    for at in range(0, size_bytes, _PIECE_BYTES):
        move(at, at + _PIECE_BYTES)
        seconds = time.perf_counter() - began
        if seconds > _PASS_SECONDS:
            size_bytes = at + _PIECE_BYTES
            break
    return size_bytes / max(seconds, 1e-9)
