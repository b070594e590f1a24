"""Which elements of a wanted box lie in a linear stretch of a stored chunk.

A chunk is stored row-major. It is read in stretches (digest blocks), which begin and end anywhere
in a row. Every stretch of a row-major array is a union of at most `2 * ndim - 1` boxes: the rest
of a row, whole rows, the start of a row, and so on inwards. Cutting each of these with the box
that is wanted gives copies between ordinary strided views, with no element touched twice.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

_ByteArray = np.ndarray[tuple[int], np.dtype[np.uint8]]

# Elements are moved as these, whatever they mean, by their size in bytes.
_CARRIERS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}

_MAX_CELLS = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Box:
    """`sizes` elements at `offsets`, one number per dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Copy:
    """One copy out of a stretch.

    Attributes:
        start: first element of the source box, counted from the start of the stretch.
        source_shape: shape of the source box, which is contiguous in the stretch.
        source: the part of it that is wanted.
        destination: where it goes, relative to the wanted box; same sizes as `source`.
    """

    start: int
    source_shape: tuple[int, ...]
    source: Box
    destination: Box


@dataclass(frozen=True, slots=True)
class Selection:
    """A box that is wanted of a stored chunk, as bytes: pure arithmetic, and the packing of it.

    Attributes:
        shape: of the chunk, row-major.
        wanted: the box, within `shape`.
        itemsize: bytes of one element.
    """

    shape: tuple[int, ...]
    wanted: Box
    itemsize: int

    def runs(self, gap_bytes: int) -> list[tuple[int, int]]:
        """Stretches of bytes `[start, end)` that hold the box, in order.

        What lies between two of them is longer than `gap_bytes`; smaller gaps are part of a
        stretch. (So with a gap of one byte less than a block, every aligned block that a stretch
        touches holds some of the box.)
        """
        shape, wanted = collapse(self.shape, self.wanted)
        runs = _runs(shape, wanted, gap_bytes // self.itemsize)
        return [(start * self.itemsize, end * self.itemsize) for start, end in runs]

    def copies(self, start: int, end: int) -> list[Copy]:
        """`plan_copies` for bytes `[start, end)` of the chunk, which are whole elements."""
        return plan_copies(self.shape, self.wanted, start // self.itemsize, end // self.itemsize)

    def count_bytes(self, start: int, end: int) -> int:
        """How many of bytes `[start, end)` of the chunk are wanted."""
        return self.itemsize * sum(math.prod(copy.source.sizes) for copy in self.copies(start, end))

    def within(self, start: int, end: int) -> tuple[int, int]:
        """The smallest stretch that holds what is wanted of bytes `[start, end)`, not nothing."""
        copies = self.copies(start, end)
        first = _linear(copies[0].source_shape, copies[0].source.offsets)
        box = copies[-1].source
        ends = tuple(offset + size - 1 for offset, size in zip(box.offsets, box.sizes, strict=True))
        last = _linear(copies[-1].source_shape, ends)
        return (
            start + (copies[0].start + first) * self.itemsize,
            start + (copies[-1].start + last + 1) * self.itemsize,
        )

    def pack(self, block: _ByteArray, position: int, into: _ByteArray) -> None:
        """Put what is wanted of the bytes at `position` into `into`, in the order found.

        Args:
            into: of length `count_bytes(position, position + len(block))`.
        """
        elements: np.ndarray[Any, Any] = block.view(_CARRIERS[self.itemsize])
        packed = into.view(elements.dtype)
        filled = 0
        for copy in self.copies(position, position + block.nbytes):
            count = math.prod(copy.source_shape)
            box = elements[copy.start : copy.start + count].reshape(copy.source_shape)
            cut = box[
                tuple(
                    slice(offset, offset + size)
                    for offset, size in zip(copy.source.offsets, copy.source.sizes, strict=True)
                )
            ]
            packed[filled : filled + cut.size].reshape(cut.shape)[...] = cut
            filled += cut.size


def _linear(shape: tuple[int, ...], place: tuple[int, ...]) -> int:
    """The number of an element in a row-major array."""
    number = 0
    for extent, coordinate in zip(shape, place, strict=True):
        number = number * extent + coordinate
    return number


def collapse(shape: tuple[int, ...], wanted: Box) -> tuple[tuple[int, ...], Box]:
    """Merge the trailing dimensions of which everything is wanted into the one before them.

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
    """`Selection.runs` in elements."""
    if 0 in wanted.sizes:
        return []
    if not shape:
        return [(0, 1)]
    first, count = wanted.offsets[0], wanted.sizes[0]
    if len(shape) == 1:
        return [(first, first + count)]
    row = math.prod(shape[1:])
    inside = _runs(shape[1:], Box(wanted.offsets[1:], wanted.sizes[1:]), gap)
    start, end = inside[0][0], inside[-1][1]
    if start + row - end > gap:  # between the last of a row and the first of the next
        return [
            (number * row + low, number * row + high)
            for number in range(first, first + count)
            for low, high in inside
        ]
    if len(inside) == 1:
        return [(first * row + start, (first + count - 1) * row + end)]
    runs: list[tuple[int, int]] = []
    for number in range(first, first + count):
        for low, high in inside:
            if runs and number * row + low - runs[-1][1] <= gap:
                runs[-1] = (runs[-1][0], number * row + high)
            else:
                runs.append((number * row + low, number * row + high))
    return runs


def plan_copies(shape: tuple[int, ...], wanted: Box, start: int, end: int) -> list[Copy]:
    """The copies that bring all elements of `wanted` in stretch `[start, end)` to their place.

    Args:
        shape: sizes of the stored chunk.
        wanted: the box of it that is wanted.
        start, end: the stretch, in elements of the chunk in row-major order.
    """
    copies = []
    for first, box in _boxes(shape, start, end):
        low = [max(a, b) for a, b in zip(box.offsets, wanted.offsets, strict=True)]
        high = [
            min(a + n, b + m)
            for a, n, b, m in zip(box.offsets, box.sizes, wanted.offsets, wanted.sizes, strict=True)
        ]
        sizes = tuple(b - a for a, b in zip(low, high, strict=True))
        if any(size <= 0 for size in sizes):
            continue
        copies.append(
            Copy(
                start=first - start,
                source_shape=box.sizes,
                source=Box(tuple(a - b for a, b in zip(low, box.offsets, strict=True)), sizes),
                destination=Box(
                    tuple(a - b for a, b in zip(low, wanted.offsets, strict=True)), sizes
                ),
            )
        )
    return copies


def _boxes(shape: tuple[int, ...], start: int, end: int) -> Iterator[tuple[int, Box]]:
    """The boxes that make up stretch `[start, end)`, each with its first element's number."""
    if start >= end:
        return
    if len(shape) <= 1:
        yield start, Box((start,), (end - start,)) if shape else Box((), ())
        return
    row = math.prod(shape[1:])
    if start % row:  # the rest of a row that began before the stretch
        yield from _within_row(shape, start, min(end, (start // row + 1) * row))
        start = min(end, (start // row + 1) * row)
    rows = (end - start) // row
    if rows:
        zeros = (0,) * (len(shape) - 1)
        yield start, Box((start // row, *zeros), (rows, *shape[1:]))
        start += rows * row
    if start < end:  # the start of a row that ends after the stretch
        yield from _within_row(shape, start, end)


def _within_row(shape: tuple[int, ...], start: int, end: int) -> Iterator[tuple[int, Box]]:
    row = math.prod(shape[1:])
    number = start // row
    for first, box in _boxes(shape[1:], start - number * row, end - number * row):
        yield first + number * row, Box((number, *box.offsets), (1, *box.sizes))


def fills(
    shape: Sequence[int], offsets: Sequence[Sequence[int]], sizes: Sequence[Sequence[int]]
) -> bool:
    """Whether boxes within a shape, taken together, are all of it. They may overlap.

    Boxes that cut it into more than 16 million cells are only counted: no grid of ranks does that.
    """
    if sum(math.prod(size) for size in sizes) < math.prod(shape):
        return False
    if len(sizes) < 2 or not shape:
        return True
    starts = np.array(offsets, dtype=np.int64)
    ends = starts + np.array(sizes, dtype=np.int64)
    dims = len(shape)
    edges = [
        np.unique(np.concatenate([starts[:, dim], ends[:, dim], [0, shape[dim]]]))
        for dim in range(dims)
    ]
    if math.prod(len(cuts) - 1 for cuts in edges) > _MAX_CELLS:
        return True
    cells = np.zeros([len(cuts) - 1 for cuts in edges], dtype=bool)
    first = [np.searchsorted(cuts, starts[:, dim]) for dim, cuts in enumerate(edges)]
    after = [np.searchsorted(cuts, ends[:, dim]) for dim, cuts in enumerate(edges)]
    if all(np.array_equal(f + 1, a) for f, a in zip(first, after, strict=True)):
        cells[tuple(first)] = True  # a grid, as ranks make it
    else:
        for number in range(len(starts)):
            cells[tuple(slice(f[number], a[number]) for f, a in zip(first, after, strict=True))] = (
                True
            )
    return bool(cells.all())
