"""`Slots`: memory of one process that other processes on the same host can read.

Handing a byte to a neighbour over loopback costs two copies through the kernel and their calls;
from shared memory it costs the one copy to where it is wanted. The memory has no name and no file
(Linux: memfd_create(2)), so nothing is left behind by a process that is killed, and the size of
/dev/shm does not matter. Where it cannot be shared, it is memory like any other.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
from dataclasses import dataclass
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # random(4): of this run of this host's kernel
_FLAGS = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)


@dataclass(frozen=True, slots=True)
class SlotsAddress:
    """Where another process finds the memory.

    Attributes:
        boot_id: of the host.
        process_id, descriptor: whose file descriptor leads to it.
        device, inode: of what must be found there, so that a process of another container that
            has the same number is not taken for it.
        size_bytes: of all slots.
    """

    boot_id: str
    process_id: int
    descriptor: int
    device: int
    inode: int
    size_bytes: int


class Slots:
    """`count` pieces of memory of `slot_bytes` each.

    Attributes:
        address: for other processes; None where the memory cannot be shared.
    """

    def __init__(self, count: int, slot_bytes: int) -> None:
        self._slot_bytes = slot_bytes
        self.size_bytes = count * slot_bytes
        self.address: SlotsAddress | None = None
        self._descriptor: int | None = None
        self._memory = memoryview(bytearray(0))
        if not self.size_bytes:
            return
        if sys.platform == "linux":
            with contextlib.suppress(OSError):
                self._memory = self._shared()
                return
        self._memory = memoryview(mmap.mmap(-1, self.size_bytes))

    def _shared(self) -> memoryview:
        boot_id = _BOOT_ID.read_text().strip()
        self._descriptor = os.memfd_create("dcp_objstore-slots", os.MFD_CLOEXEC)
        os.ftruncate(self._descriptor, self.size_bytes)
        status = os.fstat(self._descriptor)
        self.address = SlotsAddress(
            boot_id, os.getpid(), self._descriptor, status.st_dev, status.st_ino, self.size_bytes
        )
        return memoryview(mmap.mmap(self._descriptor, self.size_bytes, flags=_FLAGS))

    def close_door(self) -> None:
        """Nobody can attach any more; who has goes on reading."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __del__(self) -> None:
        self.close_door()

    def __getitem__(self, number: int) -> memoryview:
        """Slot `number`, writable."""
        return self._memory[number * self._slot_bytes : (number + 1) * self._slot_bytes]


def attach(address: SlotsAddress) -> memoryview | None:
    """All slots of another process, to read; None if it is on another host or out of reach."""
    try:
        if _BOOT_ID.read_text().strip() != address.boot_id:
            return None
        place = f"/proc/{address.process_id}/fd/{address.descriptor}"
        descriptor = os.open(place, os.O_RDONLY | os.O_CLOEXEC)
        try:
            status = os.fstat(descriptor)
            if (status.st_dev, status.st_ino) != (address.device, address.inode):
                return None
            return memoryview(
                mmap.mmap(descriptor, address.size_bytes, flags=_FLAGS, prot=mmap.PROT_READ)
            )
        finally:
            os.close(descriptor)
    except OSError:
        return None
