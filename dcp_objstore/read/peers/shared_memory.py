"""`SharedMemory`: memory of one process that other processes on the same host can read.

Sending a byte to another process over loopback costs two copies through the kernel and their calls;
reading it from shared memory costs only the copy to its destination. The memory has no name and no
file (Linux: memfd_create(2)), so a process that is killed leaves nothing behind, and the size of
/dev/shm does not matter. Where memory cannot be shared, ordinary memory is used.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
from dataclasses import dataclass
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # random(4): differs at each boot of each host
_FLAGS = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)


@dataclass(frozen=True, slots=True)
class SharedMemoryAddress:
    """The address under which another process finds the memory.

    The device and inode must match what is found there, because a process of another container may
    have the same number.
    """

    boot_id: str
    process_id: int
    descriptor: int
    device: int
    inode: int
    size_bytes: int


class SharedMemory:
    """Memory of `count` slots of `slot_bytes` each.

    Attributes:
        address: the address for other processes; None if the memory cannot be shared.
    """

    def __init__(self, count: int, slot_bytes: int) -> None:
        self._slot_bytes = slot_bytes
        self.size_bytes = count * slot_bytes
        self.address: SharedMemoryAddress | None = None
        self._descriptor: int | None = None
        self._memory = memoryview(bytearray(0))
        if not self.size_bytes:
            return
        if sys.platform == "linux":
            # If the system does not allow shared memory, ordinary memory is used.
            with contextlib.suppress(OSError):
                self._memory = self._map_shared()
                return
        self._memory = memoryview(mmap.mmap(-1, self.size_bytes))

    def _map_shared(self) -> memoryview:
        """Map memory that other processes of this machine can map by `address`."""
        boot_id = _BOOT_ID.read_text().strip()
        self._descriptor = os.memfd_create("dcp_objstore-slots", os.MFD_CLOEXEC)
        os.ftruncate(self._descriptor, self.size_bytes)
        memory = mmap.mmap(self._descriptor, self.size_bytes, flags=_FLAGS)
        status = os.fstat(self._descriptor)
        # Only now, because others would read zeros in what this process does not use. `attach` uses
        # the device and the inode to know that it has opened this memory.
        self.address = SharedMemoryAddress(
            boot_id,
            process_id=os.getpid(),
            descriptor=self._descriptor,
            device=status.st_dev,
            inode=status.st_ino,
            size_bytes=self.size_bytes,
        )
        return memoryview(memory)

    def close_descriptor(self) -> None:
        """Close the descriptor. Existing mappings stay valid; new ones fail."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __del__(self) -> None:
        self.close_descriptor()

    def __getitem__(self, number: int) -> memoryview:
        """Return slot `number`, writable."""
        return self._memory[number * self._slot_bytes : (number + 1) * self._slot_bytes]


def attach(address: SharedMemoryAddress) -> memoryview | None:
    """Map all slots of another process to read; None if it is on another host or inaccessible."""
    try:
        if _BOOT_ID.read_text().strip() != address.boot_id:
            return None
        path = f"/proc/{address.process_id}/fd/{address.descriptor}"
        descriptor = os.open(path, os.O_RDONLY)
        try:
            status = os.fstat(descriptor)
            # In another container, the same process and descriptor numbers may be of another file.
            if (status.st_dev, status.st_ino) != (address.device, address.inode):
                return None
            return memoryview(
                mmap.mmap(descriptor, address.size_bytes, flags=_FLAGS, prot=mmap.PROT_READ)
            )
        finally:
            os.close(descriptor)
    except OSError:
        return None
