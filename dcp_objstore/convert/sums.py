"""Weighted sums of the tensors of several checkpoints, slab after slab, in one read of all of them.

The inputs are read as one store, by a call of `fetch_ranges` for many windows of slabs, so that the
requests of each window are under way while the window before it is uploaded. A block is verified in
the memory that it arrived in and added from there; no tensor of an input is ever put together.

Floating-point sums depend on their order. So each slab is at one input at a time: blocks of that
input are added when they arrive, in any order, for they have no element in common; blocks of later
inputs wait in their memory.

That memory is a fixed number of slots. Requests get them strictly in the order of the plan: window
after window, and in each the inputs in their order. So what waits only ever waits for requests that
have a slot already, and reading cannot come to a standstill, however few slots there are.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import replace
from itertools import accumulate, chain
from typing import NamedTuple

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem
from typing_extensions import Buffer

from dcp_objstore.config import MIB, TransferConfig
from dcp_objstore.errors import CheckpointCorruptError, DcpObjstoreError
from dcp_objstore.inspect.slabs import Slab, in_windows
from dcp_objstore.read.geometry import Box, Copy, narrow
from dcp_objstore.read.items import ItemLocation, SavedTensor
from dcp_objstore.read.session import explained
from dcp_objstore.read.stored_checkpoint import StoredCheckpoint
from dcp_objstore.read.tensor_read import Block, TensorRead, consume, location_of, plan_spans
from dcp_objstore.state.memory import lend
from dcp_objstore.stores import ObjectStore, StoreSpec
from dcp_objstore.stores.protocol import RangeBody, RangeReading
from dcp_objstore.stores.wrappers import WrappedStore
from dcp_objstore.threads import STEP_SECONDS, WATCH_SECONDS, result_of, run_in_thread
from dcp_objstore.transfer.download import fetch_ranges
from dcp_objstore.transfer.memory import ByteArray, new_memory
from dcp_objstore.transfer.progress import Progress
from dcp_objstore.transfer.ranges import RangeRequest, plan_requests

# Sums that are under way at the same time, in bytes of their dtype: a slab, and a window of slabs.
SUM_BYTES = 32 * MIB
# Windows that may be read beyond the one that is being uploaded.
_WINDOWS_AHEAD = 2
# Reads of so many bytes are planned together. Between two of them, no request is under way.
_PLANNED_BYTES = 8 << 30
# Elements that are added together stay in the processor's cache; where torch converts them, they
# are few enough for it not to start a team of threads in each worker.
_ELEMENTS, _CONVERTED_ELEMENTS = 65536, 32768


class Input(NamedTuple):
    """A checkpoint that is part of a sum, opened, and its weight."""

    spec: StoreSpec
    stored: StoredCheckpoint
    weight: float

    def tensor(self, key: str) -> SavedTensor:
        """Return a tensor of the input, which has it."""
        saved = self.stored.items.tensor(key)
        assert saved is not None
        return saved


class SummedSlab(NamedTuple):
    """A slab of the result, and the dtypes in which it is summed up and stored."""

    slab: Slab
    sum_dtype: torch.dtype
    stored_dtype: torch.dtype

    @property
    def sum_bytes(self) -> int:
        """The size of the sum in `sum_dtype`."""
        return math.prod(self.slab.box.sizes) * self.sum_dtype.itemsize


def weighted_sums(
    inputs: Sequence[Input],
    slabs: Sequence[SummedSlab],
    config: TransferConfig,
    check: Callable[[], object],
) -> Generator[torch.Tensor, None, None]:
    """Yield `weight[0] * input[0] + weight[1] * input[1] + ...` of each slab, in their order.

    Each product and each sum is rounded to the dtype of the sum, in the order of the inputs.

    Args:
        inputs: the checkpoints, and their weights.
        slabs: what to sum up.
        config: sizes, concurrency, time-outs, and the memory budget for what arrives.
        check: a function that is called from time to time while this waits; what it raises ends
            the wait.

    Raises:
        CheckpointCorruptError: an input is damaged, or lacks elements; the error names the key.
        CheckpointGoneError: an input was deleted or replaced during the call.
        DcpObjstoreError: any error of the store.
    """
    sums = (_Sum(slab, len(inputs)) for slab in slabs)
    windows = list(in_windows(sums, SUM_BYTES, lambda one_sum: one_sum.summed.sum_bytes))
    progress = Progress(config.stall_timeout_seconds)
    slots = _Slots(config)

    def read() -> None:
        try:
            _read(inputs, windows, slots, config, progress)
        except BaseException as error:  # noqa: BLE001 - raised where the sums are taken
            for one_sum in chain.from_iterable(windows):
                if not one_sum.ended.done():
                    one_sum.ended.set_exception(error)

    run_in_thread(read, "sums")
    try:
        for number, window in enumerate(windows):
            slots.allow(number + _WINDOWS_AHEAD)  # the number of the last window that is read now
            for one_sum in window:
                yield one_sum.take(check)
    finally:
        # If this generator is closed early, the thread still reads; this ends it.
        progress.stop(GeneratorExit())


class _ArrivedBlock(NamedTuple):
    """A verified block: its term, its position in the payload of the term's chunk, its bytes."""

    term: _Term
    position: int
    body: Buffer


class _Sum:
    """A slab of the result while the inputs are added to it.

    Attributes:
        summed: the slab.
        ended: ends when the result can be taken.
    """

    def __init__(self, summed: SummedSlab, inputs: int) -> None:
        self.summed = summed
        self.ended: Future[None] = Future()
        self._lock = threading.Lock()
        self._total: torch.Tensor | None = None
        # The terms that get their part of `_total` when it is allocated.
        self._expected_terms: list[_Term] = []
        # The number of the input whose blocks are added now.
        self._current = 0
        # By the number of the input: how many of its blocks are still to be added; and the blocks
        # that have arrived before it was the input's turn.
        self._missing = [0] * inputs
        self._early: list[deque[_ArrivedBlock]] = [deque() for _ in range(inputs)]

    def take(self, check: Callable[[], object]) -> torch.Tensor:
        """Wait for the result and return it; nothing here keeps it."""
        result_of(self.ended, check=check, step_seconds=WATCH_SECONDS)
        total, self._total = self._total, None
        assert total is not None
        return total

    def expect(self, term: _Term) -> None:
        """Count a block that will arrive for a term."""
        self._missing[term.number] += 1
        self._expected_terms.append(term)

    def arrived(self, block: _ArrivedBlock) -> None:
        """Add a block of an input, or keep it until all blocks of the inputs before it were added.

        Called by the threads that download, several at a time. The inputs are added in their order,
        so that the rounding does not depend on which block arrives first. The thread that has added
        the last block of an input adds those of the next one that were kept.
        """
        with self._lock:
            if block.term.number > self._current:
                self._early[block.term.number].append(block)
                return
            if self._total is None:
                self._total = _new_tensor(self.summed.slab.box.sizes, self.summed.sum_dtype)
                for term in self._expected_terms:
                    term.bind(narrow(self._total, term.box))
                self._expected_terms.clear()
            current = self._current
        ready = deque([block])
        while ready:
            added = len(ready)
            while ready:
                # No name may keep a block any longer: its memory is a slot.
                ready[0].term.add(ready[0].position, ready[0].body)
                ready.popleft()
            with self._lock:
                self._missing[current] -= added
                if self._missing[current]:
                    return  # another thread adds the rest of this input, and goes on
                # This was the last block of the input. Now those of the next one that were kept.
                self._current = current = current + 1
                if current < len(self._missing):
                    ready, self._early[current] = self._early[current], ready
        if current == len(self._missing):
            self._total = _rounded(self._total, self.summed.stored_dtype)
            self.ended.set_result(None)


class _Term(TensorRead):
    """A read of a chunk of an input that is added to a slab.

    Args:
        item: the elements, and their place in the slab.
        location: the place of the chunk.
        sum_of_slab: what the chunk is added to.
        number: the number of the input.
        weight: its weight.

    Attributes:
        box: the place in the slab.
        sum_of_slab, number: as given.
    """

    def __init__(
        self, item: ReadItem, location: ItemLocation, sum_of_slab: _Sum, number: int, weight: float
    ) -> None:
        super().__init__(item, location)
        self.box = Box(tuple(item.dest_offsets), tuple(item.lengths))
        self.sum_of_slab = sum_of_slab
        self.number = number
        self._weight = weight

    def accept(self, position: int, block: Buffer) -> None:
        """Override `TensorRead.accept`: the block is added, now or when it is its turn."""
        self.sum_of_slab.arrived(_ArrivedBlock(self, position, block))

    def add(self, position: int, block: Buffer) -> None:
        """Add the needed elements of the payload bytes at `position`. Thread-safe."""
        body = np.frombuffer(block, dtype=np.uint8)
        copies = self.selection.copies(position, position + body.nbytes)
        self._fill_boxes(copies, self._elements(body))

    def _fill_boxes(self, copies: Iterable[Copy], elements: torch.Tensor) -> None:
        """Override `TensorRead._fill_boxes`: add instead of copying."""
        for copy in copies:
            source = elements[copy.start : copy.start + math.prod(copy.source_shape)]
            _add(
                narrow(source.view(copy.source_shape), copy.source),
                self._weight,
                narrow(self._view, copy.destination),
                is_first=self.number == 0,
            )


def _add(source: torch.Tensor, factor: float, total: torch.Tensor, *, is_first: bool) -> None:
    """Do `total += source * factor`; of the first input, `total = source * factor`.

    The product and the sum are rounded to the dtype of the total. It goes in pieces, so that what
    the multiplication writes is in the cache for the addition.
    """
    weight = total.numpy().dtype.type(factor)
    if not source.is_contiguous() or not total.is_contiguous():
        product = source.to(total.dtype).numpy() * weight
        total.numpy()[...] = product if is_first else total.numpy() + product
        return
    source, sums = source.view(-1), total.view(-1).numpy()
    is_converted = source.dtype != total.dtype
    step = _CONVERTED_ELEMENTS if is_converted else _ELEMENTS
    scratch = torch.empty(min(step, len(sums)), dtype=total.dtype, device="cpu")
    for start in range(0, len(sums), step):
        source_piece, sums_piece = source[start : start + step], sums[start : start + step]
        scratch_piece = scratch[: len(source_piece)]
        factors = scratch_piece.copy_(source_piece) if is_converted else source_piece
        product = sums_piece if is_first else scratch_piece.numpy()
        np.multiply(factors.numpy(), weight, out=product)
        if not is_first:
            np.add(sums_piece, product, out=sums_piece)


def _new_tensor(sizes: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Allocate a tensor; a large one goes back to the system when it dies."""
    size_bytes = math.prod(sizes) * dtype.itemsize
    if size_bytes < MIB:
        return torch.empty(sizes, dtype=dtype, device="cpu")
    return torch.frombuffer(new_memory(size_bytes), dtype=dtype).view(sizes)


def _rounded(total: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the sum in the dtype in which it is stored.

    It goes in pieces that are too small for torch to start a team of threads.
    """
    if total.dtype == dtype:
        return total
    rounded = _new_tensor(total.shape, dtype)
    source, target = total.view(-1), rounded.view(-1)
    for start in range(0, len(source), _CONVERTED_ELEMENTS):
        piece = slice(start, start + _CONVERTED_ELEMENTS)
        target[piece].copy_(source[piece])
    return rounded


class _Slots:
    """Memory for what arrives, which requests get in the order in which they are planned.

    A slot is free again when the last view of its memory has died: a block was added, or given up.
    """

    def __init__(self, config: TransferConfig) -> None:
        # Its lock is re-entrant: a slot's memory may die, and so call `_put_back`, in a thread that
        # holds the lock.
        self._changed = threading.Condition()
        self._size_bytes = config.request_size_bytes
        count = max(1, config.memory_budget_bytes // self._size_bytes)
        # None: a slot whose memory is not allocated yet.
        self._free: list[ByteArray | None] = [None] * count
        # The requests without a slot, in the order in which they get one, each with its window.
        self._waiting: deque[tuple[RangeRequest[Block], int]] = deque()
        self._last_window = 0

    def plan(self, requests: Sequence[RangeRequest[Block]], window: int) -> None:
        """Give these requests of a window their turns, after all that had one before."""
        self._waiting.extend((request, window) for request in requests)

    def allow(self, window: int) -> None:
        """Let requests up to this window begin."""
        with self._changed:
            self._last_window = window
            self._changed.notify_all()

    def may_begin(self, request: RangeRequest[Block]) -> bool:
        """Return whether `admit` would return now."""
        first, window = self._waiting[0]
        return first is request and window <= self._last_window and bool(self._free)

    def admit(self, request: RangeRequest[Block], progress: Progress) -> memoryview:
        """Wait for the request's turn and a slot, and return its memory."""
        with self._changed:
            while not self.may_begin(request):
                progress.check_stopped()
                if self._waiting[0][1] > self._last_window:
                    # The reads wait for the upload, so they have not stalled.
                    progress.alive()
                self._changed.wait(STEP_SECONDS)
            self._waiting.popleft()
            slot = self._free.pop()
            self._changed.notify_all()
        if slot is None:
            slot = np.frombuffer(new_memory(self._size_bytes), np.uint8)
        lent = lend(slot, lambda: self._put_back(slot))
        return memoryview(lent)[: request.end - request.start]

    def _put_back(self, slot: ByteArray) -> None:
        with self._changed:
            self._free.append(slot)
            self._changed.notify_all()


class _Stores(WrappedStore):
    """The objects of all inputs as one store, with keys such as `0/<key>` and `1/<key>`."""

    def __init__(self, stores: Sequence[ObjectStore]) -> None:
        super().__init__(stores[-1])
        self._stores = stores

    @property
    def range_reading(self) -> RangeReading:
        """The reading of an input that does not read ahead, if there is one.

        Of several, that which takes the most memory.
        """
        readings = [store.range_reading for store in self._stores]
        return min(readings, key=lambda reading: (reading.ahead, -reading.memory_bytes))

    def open_range(self, key: str, start: int, end: int) -> RangeBody:
        """Open a range of an object of an input."""
        number, _, own_key = key.partition("/")
        return self._stores[int(number)].open_range(own_key, start, end)


def _read(
    inputs: Sequence[Input],
    windows: Sequence[Sequence[_Sum]],
    slots: _Slots,
    config: TransferConfig,
    progress: Progress,
) -> None:
    """Read all inputs, and add each block to its sum as it arrives. Called in a thread.

    Args:
        inputs: the checkpoints, and their weights.
        windows: the sums of each window, in their order.
        slots: the memory for what arrives.
        config: sizes and concurrency.
        progress: the object that stops the reads.
    """
    stores = [source.stored.open_store(source.spec) for source in inputs]
    keys_of_inputs = [source.stored.object_keys for source in inputs]
    keys = [f"{number}/{key}" for number, own in enumerate(keys_of_inputs) for key in own]
    # The position in `keys` of each input's first object.
    first_objects = [0, *accumulate(map(len, keys_of_inputs))]

    def input_of(request: RangeRequest[Block]) -> int:
        return int(keys[request.object_number].partition("/")[0])

    def take_in(request: RangeRequest[Block], body: Buffer) -> None:
        try:
            consume(request, body)
        except CheckpointCorruptError as error:
            key = keys[request.object_number].partition("/")[2]
            raise error.at(object_key=key, url=stores[input_of(request)].url) from None
        request.spans.clear()  # `requests` would keep the sums in memory through the spans

    def explain(request: RangeRequest[Block], error: DcpObjstoreError) -> DcpObjstoreError:
        number = input_of(request)
        return explained(inputs[number].stored, stores[number], request, error)

    # The number of windows whose requests are planned together; a plan of all might be too large.
    stretch = max(1, _PLANNED_BYTES // (len(inputs) * SUM_BYTES))
    for first in range(0, len(windows), stretch):
        requests: list[RangeRequest[Block]] = []
        for window_number, window in enumerate(windows[first : first + stretch], first):
            for number, source in enumerate(inputs):
                planned = _planned(source, number, window, first_objects[number], config)
                slots.plan(planned, window_number)
                requests += planned
        arriving = fetch_ranges(
            _Stores(stores),
            keys,
            requests,
            take_in,
            config,
            progress,
            admit=slots.admit,
            may_begin=slots.may_begin,
            explain=explain,
        )
        with closing(arriving):
            deque(arriving, maxlen=0)  # go on to the end; `take_in` has got the blocks


def _planned(
    source: Input, number: int, window: Sequence[_Sum], first_object: int, config: TransferConfig
) -> Sequence[RangeRequest[Block]]:
    """Return the requests for what a window needs of an input, which its sums expect from now on.

    Args:
        source: the input.
        number: its number.
        window: the sums.
        first_object: the number of its first object among those of all inputs.
        config: the size of a request.

    Raises:
        CheckpointCorruptError: the chunks of a tensor leave elements out, or overlap.
    """
    terms = []
    for sum_of_slab in window:
        for item in _items(source, sum_of_slab.summed.slab):
            location = location_of(source.stored, item)
            location = replace(location, object_number=location.object_number + first_object)
            terms.append(_Term(item, location, sum_of_slab, number, source.weight))
    spans = plan_spans(terms, verify=True, whole_blocks=False)
    for span in spans:
        for term in span.tag.reads:
            assert isinstance(term, _Term)
            term.sum_of_slab.expect(term)
    return plan_requests(spans, request_size_bytes=config.request_size_bytes)


def _items(source: Input, slab: Slab) -> Iterator[ReadItem]:
    """Yield the parts of an input's chunks that make up a slab.

    Raises:
        CheckpointCorruptError: the chunks of the tensor leave elements out, or overlap.
    """
    saved = source.tensor(slab.key)
    # A row for each chunk. What it has in common with the slab begins at `low`, and is empty unless
    # all lengths are positive.
    offsets, sizes = saved.offsets.astype(np.int64), saved.sizes.astype(np.int64)
    low = np.maximum(offsets, slab.box.offsets)
    lengths = np.minimum(offsets + sizes, slab.box.ends) - low
    rows = np.flatnonzero((lengths > 0).all(axis=1))
    # Volumes are enough: neither our save nor torch's commits chunks that overlap, so no overlap
    # makes up for a gap.
    if lengths[rows].prod(axis=1).sum() != math.prod(slab.box.sizes):
        raise CheckpointCorruptError(
            "the chunks of this tensor overlap, or leave elements of it out",
            key=slab.key,
            url=source.spec.url,
        )
    for row in rows.tolist():
        yield ReadItem(
            type=LoadItemType.TENSOR,
            dest_index=MetadataIndex(slab.key),
            dest_offsets=torch.Size((low[row] - slab.box.offsets).tolist()),
            storage_index=MetadataIndex(slab.key, torch.Size(offsets[row].tolist()), row),
            storage_offsets=torch.Size((low[row] - offsets[row]).tolist()),
            lengths=torch.Size(lengths[row].tolist()),
        )
