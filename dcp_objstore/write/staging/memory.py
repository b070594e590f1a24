"""`StagingMemory`: host memory for copies of a state, kept from save to save.

A piece of it is leased. It stays in use as long as anything (a staged tensor, the transport) holds
an array of it, and is reused after that. So bytes that are still being uploaded cannot be
overwritten, however their save may have ended.
"""

from __future__ import annotations

import functools
import gc
import queue
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dcp_objstore.state.device import warn_of_pageable_memory
from dcp_objstore.state.memory import lend
from dcp_objstore.transfer.memory import ByteArray, new_memory

# A slab that was not used in this many consecutive takes is freed. Two, so that a program that
# alternates between two states keeps the memory of both.
_KEPT_TAKES = 2


@dataclass(slots=True)
class _Slab:
    """A piece of memory; `memory` owns it and `array` is a view of it.

    `used_at` is the number of the latest take that has used it.
    """

    memory: torch.Tensor
    array: ByteArray
    pinned: bool
    used_at: int


class StagingMemory:
    """Slabs of host memory that return by themselves when their arrays die. Thread-safe.

    Attributes:
        allocations: the number of slabs allocated so far.
        allocated_bytes: the size of all slabs that are kept or leased.
    """

    def __init__(self) -> None:
        self.allocations = 0
        self.allocated_bytes = 0
        self._lock = threading.Lock()
        self._idle: list[_Slab] = []
        # A slab is put here when its last array dies: in any thread, even in the middle of a call
        # of this queue. Of the queues, only SimpleQueue allows that.
        self._returned: queue.SimpleQueue[_Slab] = queue.SimpleQueue()
        # The number of calls of `take`.
        self._takes = 0

    def take(self, sizes_bytes: Sequence[int], *, pinned: bool) -> list[ByteArray]:
        """Return one array of each size; each is leased until no view of it is left.

        Args:
            sizes_bytes: the sizes of the arrays. The same state should ask for the same sizes each
                time.
            pinned: whether to use pinned memory, which a GPU copies to by itself. If none can be
                pinned, it is ordinary memory.
        """
        if self._would_grow(sizes_bytes, pinned=pinned):
            gc.collect()  # planners of torch 2.9 leave the state of a save in a reference cycle
        with self._lock:
            self._takes += 1
            self._collect()
            idle = [self._idle_slab(size_bytes, pinned=pinned) for size_bytes in sizes_bytes]
            # Before more is allocated, idle slabs go that the latest takes have not used.
            self._free(lambda slab: slab.used_at + _KEPT_TAKES <= self._takes)
            slabs = [
                slab or self._allocate(size_bytes, pinned=pinned)
                for slab, size_bytes in zip(idle, sizes_bytes, strict=True)
            ]
            arrays = []
            for slab in slabs:
                slab.used_at = self._takes
                arrays.append(lend(slab.array, functools.partial(self._returned.put, slab)))
            return arrays

    def _would_grow(self, sizes_bytes: Sequence[int], *, pinned: bool) -> bool:
        """Return whether to take arrays of these sizes allocates memory while some is leased."""
        with self._lock:
            self._collect()
            idle = Counter(slab.array.nbytes for slab in self._idle if slab.pinned == pinned)
            is_leased = self.allocated_bytes > sum(slab.array.nbytes for slab in self._idle)
            return is_leased and bool(Counter(sizes_bytes) - idle)

    def release(self) -> None:
        """Free all memory that is not leased."""
        with self._lock:
            self._collect()
            self._free(lambda _: True)

    def _collect(self) -> None:
        """Put slabs that have returned among the idle ones. The caller holds the lock."""
        while True:
            try:
                self._idle.append(self._returned.get_nowait())
            except queue.Empty:
                return

    def _idle_slab(self, size_bytes: int, *, pinned: bool) -> _Slab | None:
        """Take an idle slab of exactly this size, or return None. The caller holds the lock."""
        for number, slab in enumerate(self._idle):
            if slab.array.nbytes == size_bytes and slab.pinned == pinned:
                return self._idle.pop(number)
        return None

    def _free(self, is_unneeded: Callable[[_Slab], bool]) -> None:
        """Free those idle slabs that are not needed any more. The caller holds the lock."""
        kept = [slab for slab in self._idle if not is_unneeded(slab)]
        self.allocated_bytes -= sum(slab.array.nbytes for slab in self._idle)
        self.allocated_bytes += sum(slab.array.nbytes for slab in kept)
        self._idle = kept

    def _allocate(self, size_bytes: int, *, pinned: bool) -> _Slab:
        """Allocate a slab, which `take` leases at once. The caller holds the lock."""
        array = np.frombuffer(new_memory(size_bytes), dtype=np.uint8)
        memory = torch.from_numpy(array)
        self.allocations += 1
        self.allocated_bytes += size_bytes
        if pinned:
            _pin(memory)
        return _Slab(memory, array, pinned, self._takes)


def _pin(memory: torch.Tensor) -> None:
    """Have CUDA pin existing memory until it is freed; warn once if it cannot.

    `pin_memory=True` is not used, because it rounds up to a power of two, up to twice the state.
    """
    address, size_bytes = memory.data_ptr(), memory.nbytes
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    portable = 1  # for all GPUs of this process
    status = int(runtime.cudaHostRegister(address, size_bytes, portable))
    if status:
        warn_of_pageable_memory(size_bytes, f"cudaHostRegister returned {status}")
        return
    # Not at exit: CUDA may be shut down by then, and pinned memory is freed with the process.
    weakref.finalize(memory, runtime.cudaHostUnregister, address).atexit = False
