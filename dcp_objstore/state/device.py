"""Move bytes between the memory of a GPU and the network, through a ring of pinned host buffers.

`Outbound` is the path of a save. Slices of a tensor are copied into slots on a separate stream, and
a slot is passed to the transport when its copy is complete. So copies overlap uploads, and the ring
is all the host memory needed. `Inbound` is the path of a load. Ranges are fetched into slots and
verified there, then queued for the device, and a slot is reused when its copy is complete.

`lane_of` decides which devices use these paths; the others are copied to and from synchronously.
Ordering on CUDA: copies out of a tensor begin after the work that the calling thread had queued,
and are complete before the save returns. The same holds for copies into a tensor. A load also waits
for them on the host before it returns or raises, so that any stream may use the tensors and the
allocator may reuse their memory.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar

import numpy as np
import torch

from dcp_objstore.config import MIB, PINNED_MOST, TransferConfig, at_most
from dcp_objstore.contexts import contextmanager
from dcp_objstore.observe.report import logger
from dcp_objstore.state.ring import Lane, Ring, Slot, Ticket
from dcp_objstore.state.tensor_frame import ALIGNMENT_BYTES
from dcp_objstore.transfer.digests import BLOCK_SIZE_BYTES
from dcp_objstore.transfer.ranges import RangeRequest

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from dcp_objstore.transfer.memory import ByteArray
    from dcp_objstore.transfer.parts import PartPlan
    from dcp_objstore.transfer.progress import Progress

T = TypeVar("T")
Direction = Literal["in", "out"]


# The size of a save's slots, and its largest slice.
SLOT_BYTES = 16 * MIB
# The number of copies in progress while one slice is passed on: one that runs, and one more so that
# the device is never idle.
_COPIES_AT_ONCE = 2


class CudaLane:
    """A stream of one GPU for copies in one direction, ordered after this thread's work there.

    The stream is made once per process, GPU and direction. The allocator keeps memory per stream,
    so a new stream for each load would keep more and more memory.
    """

    def __init__(self, device: torch.device, direction: Direction) -> None:
        self._device = device
        self._stream = _stream(device, direction)
        self.follow()

    def allocate(self, size_bytes: int) -> torch.Tensor:
        """Allocate pinned memory, which torch keeps for the next save or load.

        If the host has none, use ordinary memory: copies are then slower, but still correct.
        """
        with torch.cuda.device(self._device):
            return pinned_memory(size_bytes)

    def follow(self) -> None:
        """Make later copies wait for what this thread has queued on the device so far."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def queue(self, work: Callable[[], object]) -> Ticket:
        """Call `work`, and return a ticket for the copies that it queues on this stream."""
        # Set the device as well: a new thread starts with GPU 0 as its device. When a stream's
        # context ends, it would switch back to GPU 0 and initialize it, which takes half a GiB
        # there for every rank.
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            work()
            # Blocking: a thread that waits for the event sleeps instead of spinning.
            event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            event.record(self._stream)
        return event

    def finish(self) -> None:
        """Wait until all queued copies are complete."""
        self._stream.synchronize()


@functools.cache
def _stream(device: torch.device, _direction: Direction) -> torch.cuda.Stream:
    """Return the process's one stream for this device and direction, which is in its key only."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


_has_warned = threading.Event()


def pinned_memory(size_bytes: int) -> torch.Tensor:
    """Allocate pinned memory; if there is none, warn once per process and use ordinary memory."""
    try:
        # The device is explicit, because the program may have set another default.
        return torch.empty(size_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    except RuntimeError as error:  # AcceleratorError and OutOfMemoryError are subclasses
        warn_of_pageable_memory(size_bytes, str(error).partition("\n")[0])
        return torch.empty(size_bytes, dtype=torch.uint8, device="cpu")


def warn_of_pageable_memory(size_bytes: int, reason: str) -> None:
    """Warn once per process that copies will be slower."""
    if not _has_warned.is_set():
        _has_warned.set()
        logger.warning(
            "cannot allocate %d MiB of pinned memory (%s): copies from and to the GPU take longer."
            " A smaller TransferConfig.memory_budget_bytes needs less",
            size_bytes >> 20,
            reason,
        )


def lane_of(device: torch.device, direction: Direction) -> Lane | None:
    """Return the lane for copies to ("in") or from ("out") a device; None if it has no lane."""
    return CudaLane(device, direction) if device.type == "cuda" else None


def wait_for_streams() -> None:
    """Wait for the calling thread's queued work that other threads would not wait for.

    Threads start on a device's default stream, so they wait anyway for what is queued there. A
    device that this process has not used is skipped, because a query would initialize it.
    """
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        for number in range(torch.cuda.device_count()):
            stream = torch.cuda.current_stream(number)
            if stream != torch.cuda.default_stream(number):
                stream.synchronize()
    elif torch.accelerator.is_available() and not torch.cuda.is_available():
        # Such as MPS. (CUDA that is available and not initialized has nothing queued.)
        torch.accelerator.current_stream().synchronize()


class _OpenSlot(NamedTuple):
    """A slot that slices are being copied to: its memory as torch has it, and lent as an array."""

    memory: torch.Tensor
    lent: ByteArray


class _CopiedSlice(NamedTuple):
    """Pinned memory that a slice is copied to, and the ticket of that copy."""

    memory: ByteArray
    ticket: Ticket


class Outbound:
    """Slices of one save's device tensors in host memory; used by one thread at a time.

    Slices follow one another in a slot, so that many small ones do not take a slot each: the
    transport gathers a whole part before it sends any of it and releases the memory.

    Args:
        plan: sizes of the parts. A slice is at most `plan.slice_size_bytes`.
        check_stopped: callable that raises if the save must end.

    Attributes:
        slots: the largest number of slots: enough for the parts that the transport has in flight
            and for two more, one that it is gathering and one for slices that are being copied or
            hashed. At least five: less than one digest block of a slot stays unused, so a part lies
            in at most four slots.
    """

    def __init__(
        self, plan: PartPlan, config: TransferConfig, check_stopped: Callable[[], None]
    ) -> None:
        # The parts in flight, and two more: one that the transport gathers, and one that is being
        # copied or hashed. A part lies in at most four slots.
        parts = at_most(config.upload_concurrency, PINNED_MOST) + 2
        self.slots = max(5, parts * plan.part_size_bytes // SLOT_BYTES)
        self._slice_size_bytes = min(plan.slice_size_bytes, SLOT_BYTES)
        self._check_stopped = check_stopped
        self._lanes: dict[torch.device, Lane | None] = {}
        self._ring: Ring | None = None
        self._open: _OpenSlot | None = None
        self._used_bytes = 0  # of the open slot, rounded up to where the next slice may begin

    def slices(self, payload: torch.Tensor) -> Iterator[ByteArray] | None:
        """Iterate over the memory of a contiguous tensor; None if its device has no lane.

        The memory of a slice is reused when no view of it is left. Slices are cut between digest
        blocks.
        """
        device = payload.device
        if device not in self._lanes:
            self._lanes[device] = lane_of(device, "out")
        lane = self._lanes[device]
        if lane is None:
            return None
        if self._ring is None:
            self._ring = Ring(self.slots, SLOT_BYTES, lane.allocate)
        return self._copied_slices(payload, lane)

    def _copied_slices(self, payload: torch.Tensor, lane: Lane) -> Iterator[ByteArray]:
        """Yield a tensor's bytes in slices, while the device copies the next ones."""
        lane.follow()  # the planner may have queued work that makes the tensor
        rest = payload.reshape(-1).view(torch.uint8)
        # Keep no reference to a yielded slice, or its slot would not come back.
        copies: deque[_CopiedSlice] = deque()
        try:
            while rest.numel() or copies:
                while len(copies) < _COPIES_AT_ONCE:
                    size_bytes = self._room_for(rest.numel(), wait=not copies)
                    if not size_bytes:  # nothing is left, or no slot is free
                        break  # the slots come back when the slices here were yielded and sent
                    copies.append(self._copy(rest[:size_bytes], lane))
                    rest = rest[size_bytes:]
                copies[0].ticket.synchronize()
                yield copies.popleft().memory
        finally:
            # If the caller stops early, copies may be under way: the device still reads the tensor.
            for copy in copies:
                copy.ticket.synchronize()

    def _room_for(self, rest_bytes: int, *, wait: bool) -> int:
        """Return the size of the next slice and make room for it; 0 if no slot is free.

        Args:
            rest_bytes: what is left of the tensor.
            wait: whether to wait until a slot is free.
        """
        wanted_bytes = min(rest_bytes, self._slice_size_bytes)
        free_bytes = SLOT_BYTES - self._used_bytes
        if self._open is not None:
            if wanted_bytes <= free_bytes:
                return wanted_bytes
            if free_bytes >= BLOCK_SIZE_BYTES:  # a shorter slice, cut between digest blocks
                return free_bytes // BLOCK_SIZE_BYTES * BLOCK_SIZE_BYTES
            self._open = None  # the slot returns to the ring once its slices were sent
        assert self._ring is not None
        slot = self._ring.acquire(self._check_stopped) if wait else self._ring.try_acquire()
        if slot is None:
            return 0
        self._open, self._used_bytes = _OpenSlot(slot.memory, self._ring.lend(slot)), 0
        return wanted_bytes

    def _copy(self, source: torch.Tensor, lane: Lane) -> _CopiedSlice:
        """Queue the copy of a slice to the open slot, for which `_room_for` has made room."""
        assert self._open is not None
        memory, lent = self._open
        start, end = self._used_bytes, self._used_bytes + source.numel()
        self._used_bytes = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        copy = functools.partial(memory[start:end].copy_, source, non_blocking=True)
        return _CopiedSlice(lent[start:end], lane.queue(copy))


class Inbound:
    """The path of one load's bytes to device tensors; a context manager around the load.

    When the block is left, all copies are complete, even after an error.

    Args:
        slots: largest number of slots; if 0, copies are synchronous.
        slot_bytes: size of a slot, which must hold the largest body.
    """

    def __init__(self, lanes: dict[torch.device, Lane], slots: int, slot_bytes: int) -> None:
        self._lanes = lanes
        self._ring = Ring(slots, slot_bytes, next(iter(lanes.values())).allocate)
        self._admitted: dict[int, Slot] = {}  # by the id of the request that is fetched into it
        self._of_thread = threading.local()  # `slot`: the one that this thread sends from

    def __enter__(self) -> Inbound:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        with ExitStack() as stack:  # finish each lane, even if another raises
            for lane in self._lanes.values():
                stack.callback(self._finish, lane, failed=error is not None)

    def _finish(self, lane: Lane, *, failed: bool) -> None:
        """Wait for a lane's copies. If the load has failed, log an error in place of raising it."""
        try:
            lane.finish()
        except Exception as error:
            if not failed:
                raise
            # The load is about to raise its first error, which may have the same cause.
            logger.warning("copies to a device failed as well: %s", error)

    def takes(self, device: torch.device) -> bool:
        """Whether tensors of this device are filled by `send`."""
        return device in self._lanes

    def admit(self, request: RangeRequest[T], progress: Progress) -> memoryview | None:
        """Return memory to fetch a request into; None if there is no ring.

        Called in a worker, which may wait here for a slot.
        """
        if not self._ring.count:
            return None
        slot = self._ring.acquire(progress.check_stopped)
        self._admitted[id(request)] = slot
        return memoryview(slot.array)[: request.end - request.start]

    @contextmanager
    def taking(self, request: RangeRequest[T]) -> Iterator[None]:
        """Let the block send from the admitted memory, then release that memory.

        The memory is reused once its copies are complete. It is kept after an error, which either
        ends the load or causes the body to be fetched and consumed again.
        """
        slot = self._admitted.get(id(request))
        if slot is None:  # there is no ring
            yield
            return
        self._of_thread.slot = slot
        try:
            yield
        finally:
            self._of_thread.slot = None
        del self._admitted[id(request)]
        self._ring.release(slot)

    def send(
        self, device: torch.device, payload: Buffer, work: Callable[[torch.Tensor], None]
    ) -> None:
        """Let `work` copy verified bytes to a device. Thread-safe.

        Args:
            device: device to copy to.
            payload: the bytes. They may change after this returns, unless they lie in admitted
                memory.
            work: callable that queues the copies, called once with the bytes as a tensor of host
                memory.
        """
        lane = self._lanes[device]
        array: ByteArray = np.frombuffer(payload, dtype=np.uint8)
        slot: Slot | None = getattr(self._of_thread, "slot", None)
        # There is no view either of bytes that do not lie in the admitted memory.
        source = None if slot is None else slot.view_of(array)
        if slot is not None and source is not None:
            slot.tickets.append(lane.queue(functools.partial(work, source)))
            return
        # Never wait for a slot: the threads that hold all of them may be waiting for this one.
        slot = self._ring.try_acquire() if array.nbytes <= self._ring.slot_bytes else None
        if slot is None:  # all are in use, or too small: copy from `payload` itself, and wait
            source = torch.frombuffer(array.data, dtype=torch.uint8)
            lane.queue(functools.partial(work, source)).synchronize()
            return
        slot.array[: array.nbytes] = array
        slot.tickets.append(lane.queue(functools.partial(work, slot.memory[: array.nbytes])))
        self._ring.release(slot)  # it is not written to before its tickets are complete


class RingPlan(NamedTuple):
    """How a load divides its memory.

    Attributes:
        slots: the number of slots; 0 for no ring.
        slot_bytes: the size of each: a power of two, because torch makes pinned memory in such
            sizes.
        fetch_budget_bytes: the memory that is left for the bodies in flight.
    """

    slots: int
    slot_bytes: int
    fetch_budget_bytes: int


def plan_ring(largest_bytes: int, concurrency: int, budget_bytes: int) -> RingPlan:
    """Divide a load's memory between the ring and the bodies that are being fetched.

    A request in flight takes a slot, and twice as much for its body, of which libraries keep the
    pieces while they collect it. If the budget does not allow one request, there is no ring.

    Args:
        largest_bytes: the size of the largest body.
        concurrency: the largest number of requests in flight.
        budget_bytes: memory for the ring and the bodies together.
    """
    # The power of two that holds the largest body: torch makes pinned memory in such sizes.
    slot_bytes = 1 << (max(1, largest_bytes) - 1).bit_length()
    units = budget_bytes // slot_bytes  # a request takes three of these: its body two, its slot one
    if units < 3:
        return RingPlan(0, slot_bytes, budget_bytes)
    # One unit is left, if there is one, for one more slot: some slots are still being copied from.
    requests = min(concurrency, max(1, (units - 1) // 3))
    # At most two slots more than requests: the rest of the budget would not make a load faster.
    slots = min(units - 2 * requests, requests + 2)
    return RingPlan(slots, slot_bytes, 2 * requests * slot_bytes)


def lanes_into(devices: Iterable[torch.device]) -> dict[torch.device, Lane]:
    """Return the lanes of the devices that have one. Called in the thread that made the tensors."""
    lanes = {device: lane_of(device, "in") for device in devices}
    return {device: lane for device, lane in lanes.items() if lane is not None}
