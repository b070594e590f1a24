"""Which elements of a destination box lie in a linear stretch of a stored chunk: pure arithmetic.

A chunk is stored row-major. It is read in stretches (digest blocks), which begin and end anywhere
in a row. Every stretch of a row-major array is a union of at most `2 * ndim - 1` boxes: the rest
of a row, whole rows, the start of a row, and so on inwards. Cutting each of these with the box
that is wanted gives copies between ordinary strided views, with no element touched twice.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass


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


def covering_stretch(shape: tuple[int, ...], wanted: Box) -> tuple[int, int]:
    """The smallest linear stretch `[start, end)` of the chunk that holds all of `wanted`."""
    if 0 in wanted.sizes:
        return 0, 0
    start = end = 0
    for extent, offset, size in zip(shape, wanted.offsets, wanted.sizes, strict=True):
        start = start * extent + offset
        end = end * extent + offset + size - 1
    return start, end + 1


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
