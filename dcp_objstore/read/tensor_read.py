"""From DCP's read items to verified blocks, and from blocks to the destinations' own memory.

`plan_spans` decides which digest blocks of which items are needed, and for which reads; it looks at
the checkpoint's index only. An arrived block is verified once and then passed to every read that
needs part of it:

- `TensorRead` copies elements directly into the destination tensor;
- `item_read.ItemRead` collects an item that only torch can decode (pickled values, foreign blobs).
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from dcp_objstore import torch_private
from dcp_objstore.errors import (
    CheckpointCorruptError,
    StateMismatchError,
    UnsupportedError,
    printable,
)
from dcp_objstore.observe.report import warn
from dcp_objstore.read.geometry import Box, Copy, Selection, collapse, fits, narrow
from dcp_objstore.state.memory import (
    byte_memory,
    check_takes_values,
    copy_elements,
    count_write,
    device_bytes,
    is_quantized,
)
from dcp_objstore.state.stored import constant_name
from dcp_objstore.torch_private import is_wrapper, parts
from dcp_objstore.transfer.digests import BLOCK_SIZE_BYTES, DIGEST_SIZE_BYTES, block_digest
from dcp_objstore.transfer.ranges import DEFAULT_GAP_BYTES, RangeRequest, Span

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from dcp_objstore.read.item_read import ItemRead
    from dcp_objstore.read.items import ItemLocation
    from dcp_objstore.read.stored_checkpoint import StoredCheckpoint
    from dcp_objstore.state.device import Inbound
    from dcp_objstore.transfer.memory import ByteArray

# A read takes one stored item's payload. It can be planned before it has a destination.
Read: TypeAlias = "TensorRead | ItemRead"


class TensorRead:
    """A read of raw elements of a stored chunk into a destination tensor.

    Args:
        location: the place of the chunk, which must hold raw elements.

    Attributes:
        selection: the part of the chunk that the read needs.
        inbound: the path to the destination's device; None for one in host memory.

    Raises:
        StateMismatchError: the chunk does not contain the elements to read.
    """

    def __init__(self, item: ReadItem, location: ItemLocation) -> None:
        self.item = item
        self.location = location
        assert location.dtype is not None and location.sizes is not None
        self._dtype: torch.dtype = getattr(torch, location.dtype)
        wanted = Box(tuple(item.storage_offsets), tuple(item.lengths))
        if not fits(wanted, location.sizes):
            raise StateMismatchError(
                f"elements {wanted} are requested from a chunk of shape {location.sizes}",
                key=item.dest_index.fqn,
            )
        self.selection = Selection(*collapse(location.sizes, wanted), self._dtype.itemsize)
        # The memory of the destination, in host memory or on a device, if payload bytes are copied
        # there as they are. Both are None if the elements lie in separate runs, or are converted.
        self._memory: ByteArray | None = None
        self._device_bytes: torch.Tensor | None = None
        self.inbound: Inbound | None = None
        # If the destination is a wrapper, `finish` fills it from a plain tensor.
        self._wrapper: torch.Tensor | None = None

    def bind(self, destination: torch.Tensor) -> None:
        """Set the destination, before any block arrives.

        Args:
            destination: a detached tensor that `check_destination` accepts; it is written in
                place.

        Raises:
            StateMismatchError: torch cannot convert between the stored and the destination's dtype,
                or the class of a wrapper does not take plain elements.
        """
        dtypes = {self._dtype, destination.dtype}
        # torch quantizes only float32, and converts nothing from or to a packed float4.
        cannot_quantize = any(map(is_quantized, dtypes)) and self._dtype != torch.float32
        cannot_unpack = torch.float4_e2m1fn_x2 in dtypes and len(dtypes) > 1
        if cannot_quantize or cannot_unpack:
            raise StateMismatchError(
                f"saved as {self.location.dtype}, which cannot be loaded into a"
                f" {constant_name(destination.dtype)} tensor",
                key=self.item.dest_index.fqn,
            )
        if is_wrapper(destination):  # its class copies into it when all elements have arrived
            try:
                check_takes_values(destination)
            except StateMismatchError as error:
                raise error.at(key=self.item.dest_index.fqn) from None
            self._wrapper = destination
            destination = torch.empty(
                destination.shape, dtype=destination.dtype, device=destination.device
            )
        # `_view` has the shape of the wanted box of the selection.
        self._destination = self._view = destination
        if destination.is_contiguous():
            self._view = destination.view(self.selection.wanted.sizes)
        else:  # its dimensions cannot be merged, so the selection must keep them apart, too
            assert self.location.sizes is not None
            wanted = Box(tuple(self.item.storage_offsets), tuple(self.item.lengths))
            self.selection = Selection(self.location.sizes, wanted, self._dtype.itemsize)
        # One run of the payload is wanted, in the same dtype.
        if len(self.selection.shape) == 1 and self._view.dtype == self._dtype:
            self._memory = byte_memory(self._view)

    def memory_at(self, position: int, size_bytes: int) -> memoryview | None:
        """Return the destination's memory for payload bytes that can be received there.

        The result is None if the bytes have to be cut or converted, if they go to a device, or if
        not all of them are for this destination.

        Args:
            position: the place of the first byte in the payload.
        """
        if self._memory is None:
            return None
        # Where the bytes begin in the destination.
        low = position - self.selection.wanted.offsets[0] * self._dtype.itemsize
        if low < 0 or low + size_bytes > self._memory.nbytes:
            return None
        return memoryview(self._memory[low : low + size_bytes])

    def send_through(self, inbound: Inbound) -> None:
        """Fill the bound tensor through the ring of its device, if `inbound` has a lane for it."""
        if not inbound.takes(self._destination.device):
            return
        self.inbound, self._memory = inbound, None  # bytes no longer go there directly
        if len(self.selection.shape) == 1 and self._view.dtype == self._dtype:
            self._device_bytes = device_bytes(self._view)

    def _fill_boxes(self, copies: Iterable[Copy], elements: torch.Tensor) -> None:
        """Copy boxes out of a block's elements into the destination."""
        for copy in copies:
            source = elements[copy.start : copy.start + math.prod(copy.source_shape)]
            source = narrow(source.view(copy.source_shape), copy.source)
            narrow(self._view, copy.destination).copy_(source)

    def accept(self, position: int, block: Buffer) -> None:
        """Copy the needed elements of the payload bytes at `position`. Thread-safe."""
        arrived = np.frombuffer(block, dtype=np.uint8)
        if self._memory is not None:
            # Where the destination begins, counted from the start of the block; it may be before.
            first = self.selection.wanted.offsets[0] * self._dtype.itemsize - position
            low, high = max(0, first), min(arrived.nbytes, first + self._memory.nbytes)
            self._memory[low - first : high - first] = arrived[low:high]
        elif self.inbound is not None:
            work = functools.partial(self._send, position)
            self.inbound.send(self._view.device, block, work)
        else:
            copies = self.selection.copies(position, position + arrived.nbytes)
            # torch writes to an inference tensor in inference mode only.
            with torch.inference_mode(self._view.is_inference()), torch.no_grad():
                self._fill_boxes(copies, self._elements(arrived))

    def accept_packed(self, position: int, size_bytes: int, packed: Buffer) -> None:
        """Copy packed elements of the `size_bytes` payload bytes at `position`. Thread-safe."""
        copies = self.selection.copies(position, position + size_bytes)
        if self.inbound is not None:

            def unpack(arrived: torch.Tensor) -> None:
                self._unpack(copies, self._staged(arrived))

            self.inbound.send(self._view.device, packed, unpack)
            return
        self._unpack(copies, self._elements(np.frombuffer(packed, dtype=np.uint8)))

    def _unpack(self, copies: Iterable[Copy], elements: torch.Tensor) -> None:
        """Copy boxes that lie one after the other in `elements` into the destination."""
        position = 0
        # torch writes to an inference tensor in inference mode only.
        with torch.inference_mode(self._view.is_inference()), torch.no_grad():
            for copy in copies:
                count = math.prod(copy.source.sizes)
                source = elements[position : position + count].view(copy.source.sizes)
                narrow(self._view, copy.destination).copy_(source)
                position += count

    def _send(self, position: int, arrived: torch.Tensor) -> None:
        """Queue the copies of a block in host memory to the device.

        If the destination takes separate runs of elements, or has another dtype, the block is sent
        as it is, and cut and converted on the device. This takes device memory for one block, which
        the lane's stream reuses for the next block, and no host memory.
        """
        itemsize = self._dtype.itemsize
        # torch writes to an inference tensor in inference mode only.
        with torch.inference_mode(self._view.is_inference()), torch.no_grad():
            if self._device_bytes is not None:
                # Where the destination begins, counted from the start of the block, as in `accept`.
                first = self.selection.wanted.offsets[0] * itemsize - position
                low, high = max(0, first), min(arrived.numel(), first + self._device_bytes.numel())
                part = arrived[low:high]
                self._device_bytes[low - first : high - first].copy_(part, non_blocking=True)
            else:
                start, end = self.selection.within(position, position + arrived.numel())
                elements = self._staged(arrived[start - position : end - position])
                self._fill_boxes(self.selection.copies(start, end), elements)

    def _staged(self, arrived: torch.Tensor) -> torch.Tensor:
        """Copy elements to device memory, which is aligned for every dtype."""
        staged = torch.empty_like(arrived, device=self._view.device)
        return staged.copy_(arrived, non_blocking=True).view(self._dtype)

    def _elements(self, arrived: ByteArray) -> torch.Tensor:
        """Return bytes in host memory as elements of the stored dtype."""
        if arrived.ctypes.data % self._dtype.itemsize:
            arrived = arrived.copy()  # torch expects elements to be aligned
        return torch.frombuffer(arrived.data, dtype=self._dtype)

    @property
    def needed_bytes(self) -> int:
        """The number of payload bytes that the destination receives."""
        return math.prod(self.selection.wanted.sizes) * self._dtype.itemsize

    def finish(self) -> None:
        """Tell autograd that the destination was written: the bytes may have bypassed torch.

        Copy into a wrapper what has arrived for it.
        """
        count_write(self._destination)
        if self._wrapper is not None:
            copy_elements(self._destination, self._wrapper)


@dataclass(slots=True)
class Block:
    """A digest block of an item, or part of one, with the reads that need it.

    Attributes:
        key: the key of one of these reads, for errors.
        position: where the block begins in the item's payload.
        digest: the digest to compare it with; None if it is not verified.
    """

    key: str
    position: int
    digest: bytes | None
    reads: list[Read] = field(default_factory=list)


# The number of an object, and where a block begins and ends in it.
BlockRange: TypeAlias = tuple[int, int, int]


def plan_spans(reads: Iterable[Read], *, verify: bool, whole_blocks: bool) -> list[Span[Block]]:
    """Return the blocks that the reads need; a block that several reads need appears once.

    Args:
        verify: return whole blocks, with their digests, of items that have digests.
        whole_blocks: return whole blocks also of items that are not verified, if a read needs
            separate runs of bytes or the item is small. Ranks that need other bytes of such an item
            then share its blocks. (Of a single run of bytes, other ranks need all or nothing.)
            Otherwise return only the runs of needed bytes, with gaps too small to be worth a
            request.
    """
    spans: dict[BlockRange, Span[Block]] = {}
    for read in reads:
        location = read.location
        digests = location.digests if verify else None
        has_separate_runs = read.selection is not None and len(read.selection.shape) > 1
        is_small = location.payload_length <= DEFAULT_GAP_BYTES
        may_be_shared = whole_blocks and (has_separate_runs or is_small)
        for start, end in _pieces(read, whole_blocks=digests is not None or may_be_shared):
            block_range = (
                location.object_number,
                location.payload_offset + start,
                location.payload_offset + end,
            )
            span = spans.get(block_range)
            if span is None:
                first = start // BLOCK_SIZE_BYTES * DIGEST_SIZE_BYTES
                digest = None if digests is None else digests[first : first + DIGEST_SIZE_BYTES]
                block = Block(read.item.dest_index.fqn, start, digest)
                span = spans[block_range] = Span(*block_range, block)
            span.tag.reads.append(read)
    return list(spans.values())


def _pieces(read: Read, *, whole_blocks: bool) -> Iterator[tuple[int, int]]:
    """Yield the pieces of payload `[start, end)` to read, of at most 4 MiB each.

    A read of MiB 5 to 10 of a long payload needs pieces 4 to 8 and 8 to 12, which are whole blocks,
    with `whole_blocks`. Without it, pieces begin where the needed bytes do: 5 to 9 and 9 to 10.
    """
    size = read.location.payload_length
    # With whole blocks, stretches are joined if less than a block lies between them, because no
    # block could be left out there.
    unit, gap = (BLOCK_SIZE_BYTES, BLOCK_SIZE_BYTES - 1) if whole_blocks else (1, DEFAULT_GAP_BYTES)
    stretches = [(0, size)] if read.selection is None else read.selection.runs(gap)
    for low, high in stretches:
        end = min(-(-high // unit) * unit, size)
        for start in range(low // unit * unit, end, BLOCK_SIZE_BYTES):
            yield start, min(start + BLOCK_SIZE_BYTES, end)


def consume(request: RangeRequest[Block], body: Buffer) -> None:
    """Verify every block in the body of a request, then pass each to the reads that need it.

    Raises:
        CheckpointCorruptError: a block does not have the digest that it was saved with. No byte of
            the body has reached a tensor, so the request may be fetched and consumed again.
    """
    view, first = memoryview(body), request.start
    contents = [view[span.start - first : span.end - first] for span in request.spans]
    for span, content in zip(request.spans, contents, strict=True):
        block = span.tag
        if block.digest is not None and block_digest(content) != block.digest:
            raise CheckpointCorruptError(
                f"bytes [{span.start}, {span.end}) of the object, block"
                f" {block.position // BLOCK_SIZE_BYTES} of the item, differ from what was saved:"
                " they were damaged, or the tensor changed while it was being saved",
                advice="load another checkpoint",
                key=block.key,
            )
    # All blocks are verified before any of them reaches a tensor.
    for span, content in zip(request.spans, contents, strict=True):
        for read in span.tag.reads:
            read.accept(span.tag.position, content)


def memory_for(request: RangeRequest[Block]) -> memoryview | None:
    """Return the destination's own memory for a request whose bytes can be received in it.

    This is possible if the bytes are a single stretch of one destination, with no digest to check.
    """
    first, next_start = request.spans[0].tag, request.start
    for span in request.spans:
        block = span.tag
        if span.start != next_start or block.digest is not None or block.reads != first.reads:
            return None
        next_start = span.end
    read = first.reads[0] if len(first.reads) == 1 else None
    if not isinstance(read, TensorRead):
        return None
    return read.memory_at(first.position, request.end - request.start)


def check_destination(item: ReadItem, destination: torch.Tensor) -> None:
    """Refuse a destination that cannot be written in place or has another shape.

    Raises:
        StateMismatchError: the destination does not have the shape that the item asks for.
        UnsupportedError: the destination has no memory, or is not strided.
    """
    key = item.dest_index.fqn
    for why in filter(None, map(_unfillable, parts(destination))):
        raise UnsupportedError(f"the destination {why}", key=key)
    if destination.shape != item.lengths:
        raise StateMismatchError(
            f"{tuple(item.lengths)} elements are requested for a destination of shape"
            f" {tuple(destination.shape)}",
            key=key,
        )


def _unfillable(tensor: torch.Tensor) -> str:
    """Return why a tensor cannot be written in place; an empty text if it can."""
    if tensor.is_meta or torch_private.is_fake(tensor):
        return "is a meta or fake tensor without memory"
    if tensor.layout != torch.strided:
        layout = constant_name(tensor.layout)
        return f"has layout {layout}; only strided tensors can be filled"
    if tensor.numel() and not tensor.data_ptr():
        return "has no memory: it was freed, or its class does not say what it is made of"
    # A stride of 0 in a dimension of several elements: all of them are at the same address.
    if any(
        step == 0 and length > 1 for step, length in zip(tensor.stride(), tensor.shape, strict=True)
    ):
        return "is an expanded tensor, whose elements share memory; clone it first"
    return ""


def is_value(item: ReadItem) -> bool:
    """Whether the item is a pickled value, not a tensor."""
    return item.type == LoadItemType.BYTE_IO


def location_of(checkpoint: StoredCheckpoint, item: ReadItem) -> ItemLocation:
    """Return the location of a read item's bytes.

    Raises:
        StateMismatchError: a tensor is stored where a value is requested, or the reverse.
    """
    stored = item.storage_index
    location = checkpoint.item(stored.fqn, stored.offset, stored.index)
    if (location.sizes is None) != is_value(item):
        have, want = ("a value", "a tensor") if location.sizes is None else ("a tensor", "a value")
        raise StateMismatchError(
            f"the checkpoint has {have} here, the state asks for {want}", key=item.dest_index.fqn
        )
    return location


def warn_if_lossy(item: ReadItem, stored_dtype: str, destination: torch.Tensor) -> bool:
    """Warn if the destination's dtype cannot hold all stored values; return whether it warned."""
    dtype: torch.dtype = getattr(torch, stored_dtype)
    if destination.dtype == dtype or _holds(destination.dtype, dtype):
        return False
    warn(
        f"loading {printable(item.dest_index.fqn)}: saved as {stored_dtype}, converted to"
        f" {str(destination.dtype).removeprefix('torch.')}, which cannot hold every value"
        " (further conversions in this load are not reported)"
    )
    return True


def _holds(dtype: torch.dtype, other: torch.dtype) -> bool:
    """Whether `dtype` can represent every value of `other`."""
    try:
        return torch.promote_types(dtype, other) == dtype
    except RuntimeError:  # torch does not promote float8
        return dtype.is_floating_point and dtype.itemsize > other.itemsize


# torch warns, once per process, that a tensor over a received (read-only) body must not be written
# to. This module only reads from such tensors, so it triggers the warning here, with a filter in
# place. The filter stays, because leaving `warnings.catch_warnings` would undo filters that other
# threads have set in the meantime.
warnings.filterwarnings("ignore", message="The given buffer is not writable")
torch.frombuffer(b"\0", dtype=torch.uint8)
