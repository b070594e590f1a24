"""From DCP's read items to verified blocks, and from blocks to the destinations' own memory.

`plan_spans` decides which digest blocks of which items are needed and by whom. A block that has
arrived is verified once and then handed to every read that wants some of it:

- `TensorRead` copies elements straight into the destination tensor;
- `gather.GatherRead` collects an item that only torch can take apart (pickled values, foreign
  blobs).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from dcp_objstore.dcp.geometry import Box, collapse, covering_stretch, plan_copies
from dcp_objstore.dcp.memory import byte_memory, count_write, fits, narrow
from dcp_objstore.errors import CheckpointCorruptError, StateMismatchError, UnsupportedError
from dcp_objstore.transfer.digests import BLOCK_SIZE_BYTES, DIGEST_SIZE_BYTES, block_digest
from dcp_objstore.transfer.ranges import RangeRequest, Span

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from dcp_objstore.dcp.source import Source, Stored
    from dcp_objstore.transfer.upload import ByteArray


class Read(Protocol):
    """Something that takes payload of one stored item."""

    stored: Stored

    def stretch(self) -> tuple[int, int]:
        """The payload bytes `[start, end)` that hold all it wants."""
        ...

    def wants(self, start: int, end: int) -> bool:
        """Whether it wants any of payload bytes `[start, end)` within its stretch."""
        ...

    def accept(self, position: int, block: Buffer) -> None:
        """Take what it wants of the payload bytes at `position`; from any thread."""
        ...


class TensorRead:
    """Raw elements of a stored chunk into a destination tensor.

    Args:
        item: DCP's read item.
        stored: the chunk, raw.
        destination: what `planner.resolve_tensor` gave; written in place.

    Raises:
        StateMismatchError: its shape is not the one that is to be read.
        UnsupportedError: it cannot be written in place (expanded, meta, fake).
    """

    def __init__(self, item: ReadItem, stored: Stored, destination: torch.Tensor) -> None:
        key = item.dest_index.fqn
        self.stored = stored
        self.destination = check_destination(item, destination)
        assert stored.dtype is not None and stored.sizes is not None
        self._dtype: torch.dtype = getattr(torch, stored.dtype)
        shape = stored.sizes
        wanted = Box(tuple(item.storage_offsets), tuple(item.lengths))
        if not fits(wanted, shape):
            raise StateMismatchError(
                f"elements {wanted} are to be read of a chunk of shape {shape}", key=key
            )
        view = self.destination
        if view.is_contiguous():
            shape, wanted = collapse(shape, wanted)
            view = view.view(wanted.sizes)
        self._shape, self._wanted, self._view = shape, wanted, view
        self._memory: ByteArray | None = None
        if len(shape) == 1 and view.dtype == self._dtype:
            self._memory = byte_memory(view)

    def stretch(self) -> tuple[int, int]:
        """See `Read`."""
        start, end = covering_stretch(self._shape, self._wanted)
        return start * self._dtype.itemsize, end * self._dtype.itemsize

    def wants(self, start: int, end: int) -> bool:
        """See `Read`. Only strided reads leave out blocks inside their stretch."""
        size = self._dtype.itemsize
        return len(self._shape) <= 1 or bool(
            plan_copies(self._shape, self._wanted, start // size, end // size)
        )

    def accept(self, position: int, block: Buffer) -> None:
        """See `Read`."""
        size = self._dtype.itemsize
        if self._memory is not None:
            first = self._wanted.offsets[0] * size - position
            arrived = np.frombuffer(block, dtype=np.uint8)
            low, high = max(0, first), min(arrived.nbytes, first + self._memory.nbytes)
            self._memory[low - first : high - first] = arrived[low:high]
            return
        start = position // size
        arrived_elements = torch.frombuffer(block, dtype=self._dtype)
        end = start + arrived_elements.numel()
        with torch.inference_mode(self._view.is_inference()), torch.no_grad():
            for copy in plan_copies(self._shape, self._wanted, start, end):
                source = arrived_elements[copy.start :]
                source = source[: _count(copy.source_shape)].view(copy.source_shape)
                narrow(self._view, copy.destination).copy_(narrow(source, copy.source))

    @property
    def needed_bytes(self) -> int:
        """Payload bytes that this read is for."""
        return self.destination.numel() * self._dtype.itemsize

    def finish(self) -> None:
        """Tell autograd that the destination was written, where that went past torch."""
        if self._memory is not None:
            count_write(self.destination)


@dataclass(slots=True)
class Block:
    """One digest block of an item: what a span is fetched for."""

    key: str
    position: int
    digest: bytes | None
    reads: list[Read] = field(default_factory=list)


def plan_spans(reads: Iterable[Read], keys: Iterable[str], *, verify: bool) -> list[Span[Block]]:
    """The blocks that the reads need; one that several of them want appears once.

    Args:
        reads: and for each the state-dict key in `keys`.
        verify: read whole digest blocks, so that each can be verified. Otherwise only the bytes
            that are wanted.
    """
    spans: dict[tuple[int, int, int], Span[Block]] = {}
    for read, key in zip(reads, keys, strict=True):
        stored = read.stored
        first, last = read.stretch()
        for number in range(first // BLOCK_SIZE_BYTES, -(-last // BLOCK_SIZE_BYTES)):
            start = number * BLOCK_SIZE_BYTES
            end = min(start + BLOCK_SIZE_BYTES, stored.payload_length)
            low, high = max(start, first), min(end, last)
            if not read.wants(low, high):
                continue
            digest = None
            if not verify or stored.digests is None:
                start, end = low, high
            else:
                at = number * DIGEST_SIZE_BYTES
                digest = stored.digests[at : at + DIGEST_SIZE_BYTES]
            begin = stored.payload_offset + start
            span = spans.get((stored.object_number, begin, end))
            if span is None:
                span = spans[stored.object_number, begin, end] = Span(
                    stored.object_number,
                    begin,
                    stored.payload_offset + end,
                    Block(key, start, digest),
                )
            span.tag.reads.append(read)
    return list(spans.values())


def consume(request: RangeRequest[Block], body: Buffer) -> None:
    """Verify every block in the body of a request, then hand each to the reads that want it.

    Raises:
        CheckpointCorruptError: a block does not have the digest that it was saved with; nothing
            of the body has reached a tensor, so the request may be fetched and consumed again.
    """
    view = memoryview(body)
    parts = [view[s.start - request.start : s.end - request.start] for s in request.spans]
    for span, part in zip(request.spans, parts, strict=True):
        block = span.tag
        if block.digest is not None and block_digest(part) != block.digest:
            raise CheckpointCorruptError(
                f"bytes [{span.start}, {span.end}) of the object, block"
                f" {block.position // BLOCK_SIZE_BYTES} of the item, differ from what was saved;"
                " load another checkpoint",
                key=block.key,
            )
    for span, part in zip(request.spans, parts, strict=True):
        for read in span.tag.reads:
            read.accept(span.tag.position, part)


def check_destination(item: ReadItem, destination: torch.Tensor) -> torch.Tensor:
    """The destination, detached, if it can be written in place and has the right shape.

    Raises:
        StateMismatchError, UnsupportedError: see `TensorRead`.
    """
    key = item.dest_index.fqn
    destination = destination.detach()
    if destination.is_meta or isinstance(destination, FakeTensor):
        raise UnsupportedError("the destination is a meta or fake tensor without memory", key=key)
    if destination.layout != torch.strided:
        raise UnsupportedError(
            f"the destination has layout {str(destination.layout).removeprefix('torch.')}, only"
            " strided tensors can be loaded into",
            key=key,
        )
    if destination.numel() and not destination.data_ptr():
        raise UnsupportedError("the destination's memory was freed", key=key)
    if any(s == 0 and n > 1 for s, n in zip(destination.stride(), destination.shape, strict=True)):
        raise UnsupportedError(
            "the destination is an expanded tensor, whose elements share memory; clone it first",
            key=key,
        )
    if destination.shape != item.lengths:
        raise StateMismatchError(
            f"{tuple(item.lengths)} elements are to be read into a destination of shape"
            f" {tuple(destination.shape)}",
            key=key,
        )
    return destination


def is_value(item: ReadItem) -> bool:
    """Whether the item is a pickled value, not a tensor."""
    return item.type == LoadItemType.BYTE_IO


def stored_of(source: Source, item: ReadItem) -> Stored:
    """Where a read item's bytes lie.

    Raises:
        StateMismatchError: a tensor is stored where a value is wanted, or the reverse.
    """
    stored = source.item(item.storage_index)
    if (stored.sizes is None) != is_value(item):
        have, want = ("a value", "a tensor") if stored.sizes is None else ("a tensor", "a value")
        raise StateMismatchError(
            f"the checkpoint has {have} here, the state asks for {want}", key=item.dest_index.fqn
        )
    return stored


def warn_if_lossy(item: ReadItem, stored_dtype: str, destination: torch.Tensor) -> bool:
    """Warn when the destination's dtype cannot hold all stored values; returns whether it did."""
    dtype: torch.dtype = getattr(torch, stored_dtype)
    if destination.dtype == dtype or _holds(destination.dtype, dtype):
        return False
    warnings.warn(
        f"loading {item.dest_index.fqn}: saved as {stored_dtype}, converted to"
        f" {str(destination.dtype).removeprefix('torch.')}, which cannot hold every value"
        " (further conversions in this load are not reported)",
        stacklevel=2,
    )
    return True


def _holds(dtype: torch.dtype, other: torch.dtype) -> bool:
    """Whether every value of `other` is one of `dtype`."""
    try:
        return torch.promote_types(dtype, other) == dtype
    except (RuntimeError, TypeError):  # torch promotes no float8
        return dtype.is_floating_point and dtype.itemsize > other.itemsize


def _count(shape: tuple[int, ...]) -> int:
    return int(np.prod(shape, dtype=np.int64)) if shape else 1


# torch warns, once in a process, that a tensor over a received (read-only) body must not be
# written to. We only read from it; the warning is spent here, where nobody need see it.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch.frombuffer(b"\0", dtype=torch.uint8)
