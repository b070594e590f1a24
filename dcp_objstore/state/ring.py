"""`Ring`: a bounded number of host buffers, on the way between a device and the network.

A slot is in one place at a time: idle, with whoever acquired it, or with the transport that is
sending it. What the device has been asked to copy out of it or into it is noted with it, as
tickets, and it is not written to again before those are complete. Which device, and which thread
drops a buffer, makes no difference here.
"""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import torch

from dcp_objstore.state.memory import byte_memory, lend
from dcp_objstore.waiting import STEP_SECONDS, take

if TYPE_CHECKING:
    from dcp_objstore.transfer.upload import ByteArray


class Ticket(Protocol):
    """Stands for copies that were queued on a device."""

    def query(self) -> bool:
        """Whether they are complete."""
        ...

    def synchronize(self) -> None:
        """Wait until they are."""
        ...


class Lane(Protocol):
    """A device's queue of copies, beside whatever else runs on the device."""

    def allocate(self, size_bytes: int) -> torch.Tensor:
        """Host memory that the device copies from and to, as uint8."""
        ...

    def follow(self) -> None:
        """What is queued from here on waits for what this thread has queued on the device."""
        ...

    def queue(self, work: Callable[[], object]) -> Ticket:
        """Call `work`, whose copies (with `non_blocking=True`) go to this queue."""
        ...

    def finish(self) -> None:
        """Wait until all that was queued is complete."""
        ...


class Slot:
    """One buffer of a ring.

    Attributes:
        memory: its bytes, as a tensor.
        array: the same bytes.
        tickets: of the copies that were queued from or to it.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        array = byte_memory(memory)
        assert array is not None
        self.memory = memory
        self.array = array
        self.tickets: list[Ticket] = []

    def is_settled(self) -> bool:
        """Whether all copies are complete."""
        return all(ticket.query() for ticket in self.tickets)

    def settle(self) -> None:
        """Wait for all copies."""
        for ticket in self.tickets:
            ticket.synchronize()
        self.tickets.clear()

    def holds(self, part: ByteArray) -> bool:
        """Whether these bytes lie in this slot."""
        offset = self.offset_of(part)
        return offset >= 0 and offset + part.nbytes <= self.array.nbytes

    def offset_of(self, part: ByteArray) -> int:
        """Where in this slot they lie."""
        return int(part.ctypes.data - self.array.ctypes.data)


class Ring:
    """`count` slots of `slot_bytes` each, allocated as they are first needed.

    Safe to use from many threads. None of its methods waits for another than the device, but
    `acquire`.

    Args:
        count: may be 0; then there never is a slot.
        allocate: see `Lane.allocate`.
    """

    def __init__(
        self, count: int, slot_bytes: int, allocate: Callable[[int], torch.Tensor]
    ) -> None:
        self.count = count
        self.slot_bytes = slot_bytes
        self._allocate = allocate
        # Slots come back from wherever a buffer dies: in any thread, also in the midst of a call
        # of this queue. SimpleQueue alone is made for that.
        self._idle: queue.SimpleQueue[Slot] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._made = 0

    @property
    def made(self) -> int:
        """How many slots have been allocated."""
        return self._made

    def try_acquire(self) -> Slot | None:
        """A slot to write to, or None if all are with somebody."""
        try:
            slot = self._idle.get_nowait()
        except queue.Empty:
            return self._make()
        if not slot.is_settled():
            made = self._make()
            if made is not None:
                self._idle.put(slot)
                return made
            slot.settle()
        slot.tickets.clear()
        return slot

    def acquire(self, check_stopped: Callable[[], None]) -> Slot:
        """A slot to write to; waits for one.

        Args:
            check_stopped: called while waiting; raises when that is to end.
        """
        slot = self.try_acquire()
        if slot is None:
            check_stopped()
            slot = take(self._idle, look=check_stopped, step_seconds=STEP_SECONDS)
            slot.settle()
        return slot

    def release(self, slot: Slot) -> None:
        """Give a slot back; its tickets say when it can be used again."""
        self._idle.put(slot)

    def lend(self, slot: Slot) -> ByteArray:
        """The bytes of a slot, which comes back when no view of them is left."""
        return lend(slot.array, functools.partial(self._idle.put, slot))

    def _make(self) -> Slot | None:
        with self._lock:
            if self._made >= self.count:
                return None
            self._made += 1
        try:
            return Slot(self._allocate(self.slot_bytes))
        except BaseException:
            with self._lock:
                self._made -= 1
            raise
