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


def fits(box: Box, shape: tuple[int, ...]) -> bool:
    """Whether the box lies within a tensor of this shape."""
    return len(shape) == len(box.sizes) and all(
        end <= extent for end, extent in zip(box.ends, shape, strict=True)
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
            # The part of the box that is wanted.
            offsets = tuple(map(max, box.offsets, wanted.offsets))
            sizes = tuple(map(operator.sub, map(min, box.ends, wanted.ends), offsets))
            if any(size <= 0 for size in sizes):
                continue
            copies.append(
                Copy(
                    start=first - first_element,
                    source_shape=box.sizes,
                    source=Box(tuple(map(operator.sub, offsets, box.offsets)), sizes),
                    destination=Box(tuple(map(operator.sub, offsets, wanted.offsets)), sizes),
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
        # The numbers of the first and the last wanted element in their source boxes.
        first = _linear(copies[0].source_shape, copies[0].source.offsets)
        last_place = tuple(after - 1 for after in copies[-1].source.ends)
        last = _linear(copies[-1].source_shape, last_place)
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
        # The elements are moved as numbers of the same size, whatever their dtype is.
        elements: np.ndarray[Any, Any] = block.view(_CARRIERS[self.itemsize])
        packed = into.view(elements.dtype)
        filled = 0  # the number of elements of `packed` that are filled
        for copy in self.copies(position, position + block.nbytes):
            count = math.prod(copy.source_shape)
            box = elements[copy.start : copy.start + count].reshape(copy.source_shape)
            part = box[tuple(map(slice, copy.source.offsets, copy.source.ends))]
            packed[filled : filled + part.size].reshape(part.shape)[...] = part
            filled += part.size


def _linear(shape: tuple[int, ...], place: tuple[int, ...]) -> int:
    """Return the number of an element in a row-major array."""
    number = 0
    for extent, coordinate in zip(shape, place, strict=True):
        number = number * extent + coordinate
    return number


def collapse(shape: tuple[int, ...], wanted: Box) -> tuple[tuple[int, ...], Box]:
    """Return a shape and box whose trailing dimensions, if wanted in full, are merged into one.

    Whole rows become one long row, so that row-wise resharding copies in one dimension: the last 3
    rows of shape (4, 10) are the last 30 elements of shape (40,).
    """
    dims = len(shape)  # the number of dimensions that are left
    while dims > 1 and wanted.sizes[dims - 1] == shape[dims - 1]:
        dims -= 1
    if dims == len(shape):  # there is nothing to merge
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
    if not shape:  # a scalar
        return [(0, 1)]
    first, count = wanted.offsets[0], wanted.sizes[0]
    row_length = math.prod(shape[1:])
    in_row = _runs(shape[1:], Box(wanted.offsets[1:], wanted.sizes[1:]), gap)
    start, end = in_row[0]
    # If the gap between two rows is too large, their stretches are not joined. It is always too
    # large if a row has several stretches: the last one of a row is at least as far from the first
    # one of the next row as two stretches of the same row are from each other.
    if start + row_length - end > gap:
        return [
            (number * row_length + low, number * row_length + high)
            for number in range(first, first + count)
            for low, high in in_row
        ]
    # Each row has one stretch, and all of these are joined.
    return [(first * row_length + start, (first + count - 1) * row_length + end)]


def _boxes(shape: tuple[int, ...], start: int, end: int) -> Iterator[tuple[int, Box]]:
    """Yield the boxes that make up stretch `[start, end)`, each with its first element's number.

    For shape (4, 10), stretch [7, 32) is the last three elements of row 0, rows 1 and 2 as one box,
    which begins at element 10, and the first two elements of row 3, from element 30 on.
    """
    if start >= end:
        return
    if not shape:  # a scalar
        yield start, Box((), ())
        return
    row_length = math.prod(shape[1:])
    rows_start = min(end, -(-start // row_length) * row_length)  # where the whole rows begin
    rows_end = max(rows_start, end // row_length * row_length)
    yield from _within_row(shape, start, rows_start)
    # All whole rows are one box. If there is no whole row, the first size of the box is 0.
    zeros = (0,) * (len(shape) - 1)
    rows = (rows_end - rows_start) // row_length
    yield rows_start, Box((rows_start // row_length, *zeros), (rows, *shape[1:]))
    yield from _within_row(shape, rows_end, end)


def _within_row(shape: tuple[int, ...], start: int, end: int) -> Iterator[tuple[int, Box]]:
    """Yield what `_boxes` does of a stretch that lies in one row, or is empty."""
    row_length = math.prod(shape[1:])
    number = start // row_length
    row_start = number * row_length
    for first, box in _boxes(shape[1:], start - row_start, end - row_start):
        yield row_start + first, Box((number, *box.offsets), (1, *box.sizes))


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

    Each piece lies in a cell: so far as the dimensions were looked at, no box begins or ends within
    a cell. Boxes A, B and C in a shape (2, 4):

        A A B B     Dimension 0 makes two cells. Cell 0 has pieces of A and B, cell 1 of A and C.
        A A C C     Dimension 1 makes two cells of each, with A, B, A and C: none is empty.

    Raises:
        UnsupportedError: the boxes interlock in far more pieces, which would take too long.
    """
    if 0 in shape:
        return True
    starts, extents = (
        np.array(numbers, dtype=np.int64).reshape(len(sizes), len(shape))
        for numbers in (offsets, sizes)
    )
    if sum(map(math.prod, extents.tolist())) < math.prod(shape):  # too few elements
        return False
    has_elements = (extents > 0).all(axis=1)  # boxes without elements cover nothing
    starts, ends = starts[has_elements], (starts + extents)[has_elements]
    most_pieces = _LEAST_PIECES + _PIECES_PER_BOX * len(starts)
    # `boxes` and `cells` have the box and the cell of each piece. At first each box is one piece,
    # and all pieces lie in one cell.
    boxes, cells, cell_count = np.arange(len(starts)), np.zeros(len(starts), np.int64), 1
    # In a dimension that every box fills there is nothing to cut.
    is_divided = ((starts > 0) | (ends < np.array(shape))).any(axis=0)
    for dim in map(int, np.flatnonzero(is_divided)):
        cuts = np.unique(np.concatenate([starts[:, dim], ends[:, dim], [0, shape[dim]]]))
        # The cells lie one after the other on a line, on which each has this width. Each piece is a
        # stretch [first, after) of its cell.
        width = len(cuts) - 1
        first = cells * width + np.searchsorted(cuts, starts[boxes, dim])
        after = cells * width + np.searchsorted(cuts, ends[boxes, dim])
        # A new cell lies between two neighbouring ends of pieces. A stretch that no piece covers is
        # a cell, too.
        edges = np.unique(np.concatenate([first, after, [0, cell_count * width]]))
        first, after = np.searchsorted(edges, first), np.searchsorted(edges, after)
        lengths = after - first  # the number of new cells of each piece
        if lengths.sum() > most_pieces:
            raise UnsupportedError(
                f"its {len(starts)} chunks interlock in more than {most_pieces} pieces, so it"
                " cannot be checked that they make up the tensor; no library divides a tensor so"
            )
        # A piece in the new cells [3, 5) is cut into one in cell 3 and one in cell 4: `cells` has
        # the numbers of all ranges [first, after), one range behind the other.
        cells = np.arange(lengths.sum()) + np.repeat(first - np.cumsum(lengths) + lengths, lengths)
        boxes = np.repeat(boxes, lengths)
        cell_count = len(edges) - 1
    return len(np.unique(cells)) == cell_count  # each cell has a piece
