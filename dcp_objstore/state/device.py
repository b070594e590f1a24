"""Between the memory of a GPU and the network, through a ring of pinned host buffers.

`Outbound` is a save's way: slices of a tensor are copied into slots on a stream of their own, and
a slot is handed to the transport when its copy is complete; so copies overlap uploads, and the
ring is all the host memory that it takes. `Inbound` is a load's: ranges are fetched into slots and
verified there, then queued for the device, and the slot is used again when the copy is complete.

Which devices go this way is `lane_of`'s to say; the others are copied to and from synchronously.
Ordering, for CUDA: copies out of a tensor begin after what the calling thread had queued, and are
complete before the save returns; copies into a tensor likewise, and a load waits for them on the
host before it returns or raises, so that any stream may use the tensors and the allocator may have
their memory.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Literal, TypeVar

import numpy as np
import torch

from dcp_objstore.config import MIB
from dcp_objstore.state.ring import Lane, Ring, Slot, Ticket
from dcp_objstore.state.tensor_frame import ALIGNMENT_BYTES
from dcp_objstore.transfer.digests import BLOCK_SIZE_BYTES
from dcp_objstore.transfer.ranges import RangeRequest

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Buffer

    from dcp_objstore.config import TransferConfig
    from dcp_objstore.transfer.parts import PartPlan
    from dcp_objstore.transfer.progress import Progress
    from dcp_objstore.transfer.upload import ByteArray

T = TypeVar("T")
Direction = Literal["in", "out"]

logger = logging.getLogger("dcp_objstore")

# Of a save: the largest slice.
SLOT_BYTES = 16 * MIB
# Copies from the device that are under way while one slice is handed over: one to copy, one more
# so that the device has no gap.
_AHEAD = 2


class CudaLane:
    """A stream of one GPU for copies in one direction, behind what this thread has queued there.

    The stream is made once in a process for each GPU and direction: the allocator keeps memory per
    stream, so a new one for each load would hold on to more and more of it.
    """

    def __init__(self, device: torch.device, direction: Direction) -> None:
        self._device = device
        self._stream = _stream(device, direction)
        self.follow()

    def allocate(self, size_bytes: int) -> torch.Tensor:
        """Pinned memory, which torch keeps for the next save or load; see `Lane`.

        Where the host gives none, ordinary memory: copies are slower then, and right all the same.
        """
        with torch.cuda.device(self._device):
            return pinned_memory(size_bytes)

    def follow(self) -> None:
        """See `Lane`."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def queue(self, work: Callable[[], object]) -> Ticket:
        """See `Lane`."""
        # The device first: a thread of ours begins with GPU 0 as its own, and a stream's context
        # alone would go back to that one by taking it into use, half a GiB of it for every rank.
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            work()
            # Blocking: a thread that waits for it sleeps, instead of holding a processor.
            event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            event.record(self._stream)
        return event

    def finish(self) -> None:
        """See `Lane`."""
        self._stream.synchronize()


@functools.cache
def _stream(device: torch.device, direction: Direction) -> torch.cuda.Stream:
    del direction  # only part of the key
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


_warned = threading.Event()


def pinned_memory(size_bytes: int) -> torch.Tensor:
    """Pinned memory; ordinary memory, with a warning once in a process, where there is none."""
    try:
        # The device is named, as the program may have set another default.
        return torch.empty(size_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    except RuntimeError as error:  # torch.AcceleratorError and OutOfMemoryError are such
        warn_of_pageable_memory(size_bytes, str(error).partition("\n")[0])
        return torch.empty(size_bytes, dtype=torch.uint8, device="cpu")


def warn_of_pageable_memory(size_bytes: int, reason: str) -> None:
    """Say once in a process that copies will be slower."""
    if not _warned.is_set():
        _warned.set()
        logger.warning(
            "no %d MiB of pinned memory could be had (%s): ordinary memory is used, so copies from"
            " and to the GPU take longer. A smaller TransferConfig.upload_concurrency or"
            " memory_budget_bytes needs less of it",
            size_bytes >> 20,
            reason,
        )


def lane_of(device: torch.device, direction: Direction) -> Lane | None:
    """The lane for copies to ("in") or from ("out") a device; None where there is none."""
    return CudaLane(device, direction) if device.type == "cuda" else None


def settle_streams() -> None:
    """Wait for what the calling thread has queued where other threads' work would not wait for it.

    Threads begin on a device's default stream, so what is queued there they wait for anyway. A
    device that this process has not used is left alone: asking it would take it into use.
    """
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        for number in range(torch.cuda.device_count()):
            stream = torch.cuda.current_stream(number)
            if stream != torch.cuda.default_stream(number):
                stream.synchronize()
    elif torch.accelerator.is_available() and not torch.cuda.is_available():
        torch.accelerator.current_stream().synchronize()


class Outbound:
    """The slices of one save's device tensors, in host memory; used by one thread at a time.

    Slices follow one another in a slot, so that many small ones do not take a slot each: the
    transport gathers a whole part before it sends any of it and lets go.

    Args:
        plan: of the parts. A slice is at most `plan.slice_size_bytes`.
        config: of the parts in flight.
        check_stopped: raises when the save is to end.

    Attributes:
        slots: how many there may be: what the transport has in flight, and two parts beside, one
            that it is gathering and one for slices that are being copied or hashed. At least five:
            a slot is filled but for less than one digest block, so a part lies in at most four of
            them.
    """

    def __init__(
        self, plan: PartPlan, config: TransferConfig, check_stopped: Callable[[], None]
    ) -> None:
        self.slots = max(5, (config.upload_concurrency + 2) * plan.part_size_bytes // SLOT_BYTES)
        self._slice_size_bytes = min(plan.slice_size_bytes, SLOT_BYTES)
        self._check_stopped = check_stopped
        self._lanes: dict[torch.device, Lane | None] = {}
        self._ring: Ring | None = None
        # The slot that is being filled: its memory, all of it lent, and how much of it is taken.
        self._open: tuple[torch.Tensor, ByteArray] | None = None
        self._taken_bytes = 0

    def slices(self, payload: torch.Tensor) -> Iterator[ByteArray] | None:
        """The memory of a contiguous tensor in slices; None if its device has no lane.

        A slice's memory is used again when no view of it is left. Slices are cut between digest
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
        return self._copied(payload, lane)

    def _copied(self, payload: torch.Tensor, lane: Lane) -> Iterator[ByteArray]:
        lane.follow()  # what resolved it may have queued work to do so
        rest = payload.reshape(-1).view(torch.uint8)
        # What is yielded must be held nowhere here, or its slot would not come back.
        ahead: deque[tuple[ByteArray, Ticket]] = deque()
        try:
            while rest.numel() or ahead:
                while rest.numel() and len(ahead) < _AHEAD:
                    size_bytes = self._room_for(rest.numel(), wait=not ahead)
                    if not size_bytes:
                        break
                    ahead.append(self._copy(rest[:size_bytes], lane))
                    rest = rest[size_bytes:]
                ahead[0][1].synchronize()
                yield ahead.popleft()[0]
        finally:
            # Given up: until here the device reads the tensor, which must not go away before.
            for _, ticket in ahead:
                ticket.synchronize()

    def _room_for(self, rest_bytes: int, *, wait: bool) -> int:
        """The size of the next slice, for which there is room in the open slot; 0 for none."""
        wanted_bytes = min(rest_bytes, self._slice_size_bytes)
        free_bytes = SLOT_BYTES - self._taken_bytes
        if self._open is not None:
            if wanted_bytes <= free_bytes:
                return wanted_bytes
            if free_bytes >= BLOCK_SIZE_BYTES:
                return free_bytes // BLOCK_SIZE_BYTES * BLOCK_SIZE_BYTES
            self._open = None
        assert self._ring is not None
        slot = self._ring.acquire(self._check_stopped) if wait else self._ring.try_acquire()
        if slot is None:
            return 0
        self._open, self._taken_bytes = (slot.memory, self._ring.lend(slot)), 0
        return wanted_bytes

    def _copy(self, piece: torch.Tensor, lane: Lane) -> tuple[ByteArray, Ticket]:
        assert self._open is not None
        memory, lent = self._open
        start, end = self._taken_bytes, self._taken_bytes + piece.numel()
        self._taken_bytes = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        copy = functools.partial(memory[start:end].copy_, piece, non_blocking=True)
        return lent[start:end], lane.queue(copy)


class Inbound:
    """The way of one load's bytes to tensors of devices; around the load, as a context manager.

    When it is left, all copies are complete, whatever happened.

    Args:
        lanes: of the devices.
        slots: how many there may be; 0: copies are synchronous.
        slot_bytes: size of the largest body.
    """

    def __init__(self, lanes: dict[torch.device, Lane], slots: int, slot_bytes: int) -> None:
        self._lanes = lanes
        self._ring = Ring(slots, slot_bytes, next(iter(lanes.values())).allocate)
        self._admitted: dict[int, Slot] = {}
        self._of_thread = threading.local()

    def __enter__(self) -> Inbound:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with ExitStack() as stack:  # each of them, whatever another raises
            for lane in self._lanes.values():
                stack.callback(self._finish, lane, failed=error is not None)

    def _finish(self, lane: Lane, *, failed: bool) -> None:
        try:
            lane.finish()
        except Exception as error:
            if not failed:
                raise
            # The load is about to raise what came first, perhaps of the same cause.
            logger.warning("copies to a device failed as well: %s", error)

    def takes(self, device: torch.device) -> bool:
        """Whether tensors of this device are filled by `send`."""
        return device in self._lanes

    def admit(self, request: RangeRequest[T], progress: Progress) -> memoryview | None:
        """Memory to fetch a request into, on its way to a device; in a worker, which may wait."""
        if not self._ring.count:
            return None
        slot = self._ring.acquire(progress.check_stopped)
        self._admitted[id(request)] = slot
        return memoryview(slot.array)[: request.end - request.start]

    @contextmanager
    def taking(self, request: RangeRequest[T], body: Buffer) -> Iterator[Buffer]:
        """Around the taking in of a body: gives it as it lies in the memory that was admitted.

        The memory is used again once its copies are complete; not after an error, which either
        ends the load or has the body fetched and taken in again.
        """
        slot = self._admitted.get(id(request))
        if slot is None:
            yield body
            return
        arrived: ByteArray = np.frombuffer(body, dtype=np.uint8)
        if not slot.holds(arrived):  # the transport had memory of its own
            slot.settle()
            slot.array[: arrived.nbytes] = arrived
            arrived = slot.array[: arrived.nbytes]
        self._of_thread.slot = slot
        try:
            yield arrived.data
        finally:
            self._of_thread.slot = None
        del self._admitted[id(request)]
        self._ring.release(slot)

    def send(
        self, device: torch.device, block: Buffer, work: Callable[[torch.Tensor], None]
    ) -> None:
        """Have `work` copy to a device out of verified bytes; from any thread.

        Args:
            block: need not stay as it is after this returns, unless it lies in admitted memory.
            work: called once, with these bytes as a tensor of host memory.
        """
        lane = self._lanes[device]
        arrived: ByteArray = np.frombuffer(block, dtype=np.uint8)
        slot: Slot | None = getattr(self._of_thread, "slot", None)
        if slot is not None and slot.holds(arrived):
            offset = slot.offset_of(arrived)
            source = slot.memory[offset : offset + arrived.nbytes]
            slot.tickets.append(lane.queue(functools.partial(work, source)))
            return
        # Never waits for a slot: it may be called by the thread that others, with slots, wait for.
        slot = self._ring.try_acquire() if arrived.nbytes <= self._ring.slot_bytes else None
        if slot is None:
            source = torch.frombuffer(arrived.data, dtype=torch.uint8)
            lane.queue(functools.partial(work, source)).synchronize()
            return
        slot.array[: arrived.nbytes] = arrived
        slot.tickets.append(lane.queue(functools.partial(work, slot.memory[: arrived.nbytes])))
        self._ring.release(slot)


def plan_ring(largest_bytes: int, concurrency: int, budget_bytes: int) -> tuple[int, int, int]:
    """How a load's memory is divided between the ring and bodies that are being fetched.

    A body in flight counts its size twice, as everywhere (`transfer.download.worker_count`), and
    its slot once. Where the budget does not allow one such request there is no ring.

    Args:
        largest_bytes: of any request.
        concurrency: requests in flight, at most.
        budget_bytes: for all of it.

    Returns:
        The number of slots, the bytes of each (a power of two, because torch makes pinned memory
        in such sizes), and the budget that is left for fetching.
    """
    slot_bytes = 1 << (max(1, largest_bytes) - 1).bit_length()
    units = budget_bytes // slot_bytes
    if units < 3:
        return 0, slot_bytes, budget_bytes
    workers = min(concurrency, max(1, (units - 1) // 3))
    # Two more than are being fetched into, for those that are being copied from.
    slots = min(units - 2 * workers, workers + 2)
    return slots, slot_bytes, min(2 * workers * slot_bytes, budget_bytes - slots * slot_bytes)


def lanes_into(devices: Iterable[torch.device]) -> dict[torch.device, Lane]:
    """The lanes of those devices that have one. Called by the thread that resolved the tensors."""
    lanes = {device: lane_of(device, "in") for device in devices}
    return {device: lane for device, lane in lanes.items() if lane is not None}
