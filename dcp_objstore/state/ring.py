"""`Ring`: a bounded number of host buffers between a device and the network.

A slot is in one place at a time: idle, with the code that acquired it, or with the transport that
sends it. The slot keeps tickets for the copies that the device was asked to make from or to it, and
is not written to again before those are complete. The ring works with any device, and any thread
may drop a buffer.
"""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable
from typing import Protocol

import torch

from dcp_objstore.state.memory import lend
from dcp_objstore.threads import STEP_SECONDS, take
from dcp_objstore.transfer.memory import ByteArray


class Ticket(Protocol):
    """A ticket for copies that were queued on a device."""

    def query(self) -> bool:
        """Whether the copies are complete."""

    def synchronize(self) -> None:
        """Wait until the copies are complete."""


class Lane(Protocol):
    """A queue of copies on a device, separate from other work on the device."""

    def allocate(self, size_bytes: int) -> torch.Tensor:
        """Allocate host memory that the device copies from and to, as uint8."""

    def follow(self) -> None:
        """Make later copies wait for what this thread has queued on the device so far."""

    def queue(self, work: Callable[[], object]) -> Ticket:
        """Call `work`, which queues copies here with `non_blocking=True`; return a ticket."""

    def finish(self) -> None:
        """Wait until all queued copies are complete."""


class Slot:
    """One buffer of a ring.

    Attributes:
        tickets: tickets for the copies that were queued from or to the slot.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.array: ByteArray = memory.numpy()
        self.tickets: list[Ticket] = []

    def has_copied(self) -> bool:
        """Whether all copies from and to the slot are complete."""
        return all(ticket.query() for ticket in self.tickets)

    def wait_for_copies(self) -> None:
        """Wait until all copies from and to the slot are complete."""
        for ticket in self.tickets:
            ticket.synchronize()
        self.tickets.clear()

    def view_of(self, payload: ByteArray) -> torch.Tensor | None:
        """Return these bytes as a view of `memory`; None if they do not lie in this slot."""
        offset = int(payload.ctypes.data - self.array.ctypes.data)
        if offset < 0 or offset + payload.nbytes > self.array.nbytes:
            return None
        return self.memory[offset : offset + payload.nbytes]


class Ring:
    """A ring of `count` slots of `slot_bytes` each, allocated when first needed. Thread-safe.

    Only `acquire` waits for other threads; the other methods wait for the device at most.

    Args:
        count: largest number of slots; if 0, there is never a slot.
        allocate: callable that allocates host memory, such as `Lane.allocate`.
    """

    def __init__(
        self, count: int, slot_bytes: int, allocate: Callable[[int], torch.Tensor]
    ) -> None:
        self.count = count
        self.slot_bytes = slot_bytes
        self._allocate = allocate
        # A slot returns where its buffer dies: in any thread, even during a call of this queue.
        # Only SimpleQueue is reentrant.
        self._idle: queue.SimpleQueue[Slot] = queue.SimpleQueue()
        self._unmade = threading.Semaphore(count)  # counts the slots that can still be allocated

    def try_acquire(self) -> Slot | None:
        """Return a slot to write to, or None if all slots are in use."""
        try:
            slot = self._idle.get_nowait()
        except queue.Empty:
            return self._make()
        if not slot.has_copied():  # a new slot costs less than to wait for the device
            another = self._make()
            if another is not None:
                self._idle.put(slot)
                return another
        slot.wait_for_copies()
        return slot

    def acquire(self, check_stopped: Callable[[], None]) -> Slot:
        """Wait for a slot to write to, and return it.

        Args:
            check_stopped: callable that raises if the wait must end; called while waiting.
        """
        slot = self.try_acquire()
        if slot is None:  # all are in use, so one will come back
            check_stopped()
            slot = take(self._idle, check=check_stopped, step_seconds=STEP_SECONDS)
            slot.wait_for_copies()
        return slot

    def release(self, slot: Slot) -> None:
        """Return a slot to the ring; it is reused when its tickets are complete."""
        self._idle.put(slot)

    def lend(self, slot: Slot) -> ByteArray:
        """Return the bytes of a slot, which returns to the ring when no view of them is left."""
        return lend(slot.array, functools.partial(self._idle.put, slot))

    def _make(self) -> Slot | None:
        """Allocate one more slot; None if all slots of the ring were allocated."""
        if not self._unmade.acquire(blocking=False):
            return None
        try:
            return Slot(self._allocate(self.slot_bytes))
        except BaseException:
            self._unmade.release()
            raise
