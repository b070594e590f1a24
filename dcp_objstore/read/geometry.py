"""Find which elements of a wanted box lie in a linear stretch of a stored chunk.

A chunk is stored row-major. It is read in stretches (digest blocks), which begin and end anywhere
in a row. Every stretch of a row-major array is a union of at most `2 * ndim - 1` boxes: the rest of
a row, whole rows, the start of a row, and so on for the inner dimensions. The intersections of
these boxes with the wanted box are copies between ordinary strided views, and touch no element
twice.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dcp_objstore.errors import CheckpointCorruptError, UnsupportedError

if TYPE_CHECKING:
    import torch

    from dcp_objstore.transfer.memory import ByteArray

    _Matrix = np.ndarray[tuple[int, int], np.dtype[Any]]

# The types with which elements are moved, by their size in bytes; their values are not looked at.
_CARRIERS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}

# The most pieces that boxes are cut into, to see whether they fill a shape.
_LEAST_PIECES = 4096
_PIECES_PER_BOX = 64


@dataclass(frozen=True, slots=True)
class Box:
    """A box of `sizes` elements at `offsets`, with one number per dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def ends(self) -> tuple[int, ...]:
        """The sums of offsets and sizes."""
        return tuple(map(operator.add, self.offsets, self.sizes))


def narrow(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """Return the part of a tensor that a box covers."""
    for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        if size != tensor.shape[dim]:
            tensor = tensor.narrow(dim, offset, size)
    return tensor


def fits(wanted: Box, shape: tuple[int, ...]) -> bool:
    """Whether the box lies within a tensor of this shape."""
    return len(shape) == len(wanted.sizes) and all(
        end <= extent for end, extent in zip(wanted.ends, shape, strict=True)
    )


@dataclass(frozen=True, slots=True)
class Copy:
    """One copy out of a stretch.

    Attributes:
        start: number of the source box's first element, counted from the start of the stretch.
        source_shape: shape of the source box, which is contiguous in the stretch.
        source: the wanted part of the source box.
        destination: place of that part within the wanted box, of the same sizes as `source`.
    """

    start: int
    source_shape: tuple[int, ...]
    source: Box
    destination: Box


@dataclass(frozen=True, slots=True)
class Selection:
    """A wanted box of a stored chunk in terms of bytes: arithmetic on it, and packing of its bytes.

    Attributes:
        shape: shape of the chunk, which is stored row-major.
    """

    shape: tuple[int, ...]
    wanted: Box
    itemsize: int

    def runs(self, gap_bytes: int) -> list[tuple[int, int]]:
        """Return the stretches of bytes `[start, end)` that hold the box, in order.

        The gap between two stretches is longer than `gap_bytes`; shorter gaps are part of a
        stretch. (So if `gap_bytes` is one less than a block, every aligned block that a stretch
        touches holds part of the box.)
        """
        runs = _runs(self.shape, self.wanted, gap_bytes // self.itemsize)
        return [(start * self.itemsize, end * self.itemsize) for start, end in runs]

    def copies(self, start: int, end: int) -> list[Copy]:
        """Plan the copies that move the wanted elements in bytes `[start, end)` to their place.

        The bytes must be whole elements.
        """
        copies, wanted = [], self.wanted
        first_element = start // self.itemsize
        for first, box in _boxes(self.shape, first_element, end // self.itemsize):
            low = tuple(map(max, box.offsets, wanted.offsets))
            sizes = tuple(map(operator.sub, map(min, box.ends, wanted.ends), low))
            if any(size <= 0 for size in sizes):
                continue
            copies.append(
                Copy(
                    start=first - first_element,
                    source_shape=box.sizes,
                    source=Box(tuple(map(operator.sub, low, box.offsets)), sizes),
                    destination=Box(tuple(map(operator.sub, low, wanted.offsets)), sizes),
                )
            )
        return copies

    def count_bytes(self, start: int, end: int) -> int:
        """Count the wanted bytes among bytes `[start, end)` of the chunk."""
        return self.itemsize * sum(math.prod(copy.source.sizes) for copy in self.copies(start, end))

    def within(self, start: int, end: int) -> tuple[int, int]:
        """Return the smallest stretch that holds the wanted bytes of `[start, end)`.

        There must be at least one wanted byte.
        """
        copies = self.copies(start, end)
        first = _linear(copies[0].source_shape, copies[0].source.offsets)
        last = _linear(copies[-1].source_shape, tuple(end - 1 for end in copies[-1].source.ends))
        return (
            start + (copies[0].start + first) * self.itemsize,
            start + (copies[-1].start + last + 1) * self.itemsize,
        )

    def pack(self, block: ByteArray, position: int, into: ByteArray) -> None:
        """Copy the wanted bytes of a block into `into`, in the order in which they lie there.

        Args:
            position: offset of the block in the chunk.
            into: array of length `count_bytes(position, position + len(block))`.
        """
        elements: np.ndarray[Any, Any] = block.view(_CARRIERS[self.itemsize])
        packed = into.view(elements.dtype)
        filled = 0
        for copy in self.copies(position, position + block.nbytes):
            count = math.prod(copy.source_shape)
            box = elements[copy.start : copy.start + count].reshape(copy.source_shape)
            cut = box[tuple(map(slice, copy.source.offsets, copy.source.ends))]
            packed[filled : filled + cut.size].reshape(cut.shape)[...] = cut
            filled += cut.size


def _linear(shape: tuple[int, ...], place: tuple[int, ...]) -> int:
    """Return the number of an element in a row-major array."""
    number = 0
    for extent, coordinate in zip(shape, place, strict=True):
        number = number * extent + coordinate
    return number


def collapse(shape: tuple[int, ...], wanted: Box) -> tuple[tuple[int, ...], Box]:
    """Merge trailing dimensions that are wanted in full into the dimension before them.

    Whole rows become one long row, so that row-wise resharding copies in one dimension.
    """
    dims = len(shape)
    while dims > 1 and wanted.sizes[dims - 1] == shape[dims - 1]:
        dims -= 1
    if dims == len(shape):
        return shape, wanted
    inner = math.prod(shape[dims:])
    return (
        (*shape[: dims - 1], shape[dims - 1] * inner),
        Box(
            (*wanted.offsets[: dims - 1], wanted.offsets[dims - 1] * inner),
            (*wanted.sizes[: dims - 1], wanted.sizes[dims - 1] * inner),
        ),
    )


def _runs(shape: tuple[int, ...], wanted: Box, gap: int) -> list[tuple[int, int]]:
    """Return the stretches of `Selection.runs` in elements.

    Args:
        shape: the shape of the tensor.
        wanted: the box of it that is wanted.
        gap: stretches are joined if no more elements than this lie between two of them.
    """
    if 0 in wanted.sizes:
        return []
    if not shape:
        return [(0, 1)]
    first, count = wanted.offsets[0], wanted.sizes[0]
    row = math.prod(shape[1:])  # elements of one row
    inside = _runs(shape[1:], Box(wanted.offsets[1:], wanted.sizes[1:]), gap)
    start, end = inside[0]
    # The gap between two rows, and even more if there are several stretches inside of one.
    if start + row - end > gap:
        return [
            (number * row + low, number * row + high)
            for number in range(first, first + count)
            for low, high in inside
        ]
    return [(first * row + start, (first + count - 1) * row + end)]


def _boxes(shape: tuple[int, ...], start: int, end: int) -> Iterator[tuple[int, Box]]:
    """Yield the boxes that make up stretch `[start, end)`, each with its first element's number."""
    if start >= end:
        return
    if not shape:
        yield start, Box((), ())
        return
    row = math.prod(shape[1:])
    whole = min(end, -(-start // row) * row)  # where the whole rows begin
    rest = max(whole, end // row * row)  # where they end
    yield from _within_row(shape, start, whole)
    # The whole rows, as one box. If there are none, its first size is 0.
    zeros = (0,) * (len(shape) - 1)
    yield whole, Box((whole // row, *zeros), ((rest - whole) // row, *shape[1:]))
    yield from _within_row(shape, rest, end)


def _within_row(shape: tuple[int, ...], start: int, end: int) -> Iterator[tuple[int, Box]]:
    row = math.prod(shape[1:])
    number = start // row
    for first, box in _boxes(shape[1:], start - number * row, end - number * row):
        yield first + number * row, Box((number, *box.offsets), (1, *box.sizes))


def check_filled(
    key: str,
    shape: Sequence[int],
    offsets: Sequence[Sequence[int]] | _Matrix,
    sizes: Sequence[Sequence[int]] | _Matrix,
) -> None:
    """Refuse a tensor, or a box of one, if chunks leave elements of it out.

    Raises:
        CheckpointCorruptError: the chunks do not cover the shape.
        UnsupportedError: it would take too long to check that.
    """
    try:
        if fills(shape, offsets, sizes):
            return
    except UnsupportedError as error:
        raise error.at(key=key) from None
    elements = sum(math.prod(map(int, size)) for size in sizes)
    raise CheckpointCorruptError(
        f"the chunks in the checkpoint do not make up this tensor: they have {elements} of the"
        f" {math.prod(shape)} elements to read, or overlap and leave some out",
        key=key,
    )


def fills(
    shape: Sequence[int],
    offsets: Sequence[Sequence[int]] | _Matrix,
    sizes: Sequence[Sequence[int]] | _Matrix,
) -> bool:
    """Whether boxes within a shape cover all of it. They may overlap.

    Boxes are given by their offsets and sizes, a row each. They are cut into pieces: along each
    dimension where boxes that meet in the dimensions before begin and end. The boxes of a grid, or
    of a tensor that was divided as one long row, hardly have more pieces than there are boxes.

    Raises:
        UnsupportedError: the boxes interlock in far more pieces, which would take too long.
    """
    if 0 in shape:
        return True
    starts, lengths = (
        np.array(numbers, dtype=np.int64).reshape(len(sizes), len(shape))
        for numbers in (offsets, sizes)
    )
    if sum(map(math.prod, lengths.tolist())) < math.prod(shape):
        return False
    covering = (lengths > 0).all(axis=1)
    starts, ends = starts[covering], (starts + lengths)[covering]
    most = _LEAST_PIECES + _PIECES_PER_BOX * len(starts)
    # Pieces that the dimensions so far do not tell apart are a group. All groups, one behind the
    # other, make up a line.
    rows, groups, count = np.arange(len(starts)), np.zeros(len(starts), np.int64), 1
    for dim in map(int, np.flatnonzero(((starts > 0) | (ends < np.array(shape))).any(axis=0))):
        cuts = np.unique(np.concatenate([starts[:, dim], ends[:, dim], [0, shape[dim]]]))
        first = groups * (len(cuts) - 1) + np.searchsorted(cuts, starts[rows, dim])
        after = groups * (len(cuts) - 1) + np.searchsorted(cuts, ends[rows, dim])
        edges = np.unique(np.concatenate([first, after, [0, count * (len(cuts) - 1)]]))
        first, after = np.searchsorted(edges, first), np.searchsorted(edges, after)
        pieces = after - first
        if pieces.sum() > most:
            raise UnsupportedError(
                f"its {len(starts)} chunks interlock in more than {most} pieces, so it cannot be"
                " checked that they make up the tensor; no library divides a tensor so"
            )
        begins = np.repeat(first - np.cumsum(pieces) + pieces, pieces)
        groups, rows = begins + np.arange(len(begins)), np.repeat(rows, pieces)
        count = len(edges) - 1
    return len(np.unique(groups)) == count
