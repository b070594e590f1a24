"""Slabs: parts of tensors that are contiguous in the whole tensor, read in order and ahead.

A file holds each tensor front to back, and a checkpoint holds it in the boxes that its ranks had.
So conversions and comparisons go through all tensors in slabs, a few at a time, whatever their
size is.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from dcp_objstore.config import MIB
from dcp_objstore.state.geometry import Box
from dcp_objstore.transfer.digests import BLOCK_SIZE_BYTES
from dcp_objstore.transfer.workers import DaemonPool
from dcp_objstore.waiting import result_of

if TYPE_CHECKING:
    import torch

# Bytes that are read at once. Two windows are read and a third one is written at the same time.
WINDOW_BYTES = 64 * MIB
_READ_AT_ONCE = 2


class Slab(NamedTuple):
    """A part of a tensor whose elements follow one another in the whole tensor."""

    key: str
    box: Box
    size_bytes: int


def cut(
    key: str, shape: Sequence[int], dtype: torch.dtype, starts: Sequence[int] = ()
) -> Iterator[Slab]:
    """Cut a tensor into slabs of at most a window, front to back.

    Args:
        key: key of the tensor.
        shape: shape of the whole tensor.
        dtype: its dtype.
        starts: first rows of the stored chunks, ascending. Slabs begin there or a whole number of
            digest blocks further on, if that is possible, so that few blocks are read twice.
    """
    size_bytes = math.prod(shape) * dtype.itemsize
    if not size_bytes:
        return
    if size_bytes <= WINDOW_BYTES:
        yield Slab(key, Box((0,) * len(shape), tuple(shape)), size_bytes)
        return
    row_bytes = size_bytes // shape[0]
    if row_bytes > WINDOW_BYTES:
        for row in range(shape[0]):
            for _, box, part_bytes in cut(key, shape[1:], dtype):
                yield Slab(key, Box((row, *box.offsets), (1, *box.sizes)), part_bytes)
        return
    rest = tuple(shape[1:])
    aligned = BLOCK_SIZE_BYTES // math.gcd(BLOCK_SIZE_BYTES, row_bytes)
    begin, rows = 0, WINDOW_BYTES // row_bytes
    while begin < shape[0]:
        end = min(shape[0], begin + rows)
        if end < shape[0]:
            before = starts[at - 1] if (at := bisect_right(starts, end)) else 0
            best = before + (end - before) // aligned * aligned
            end = best if best > begin else end
        box = Box((begin, *(0 for _ in rest)), (end - begin, *rest))
        yield Slab(key, box, (end - begin) * row_bytes)
        begin = end


def read_ahead(
    slabs: Iterable[Slab], read: Callable[[Sequence[Slab]], list[torch.Tensor]]
) -> Generator[torch.Tensor, None, None]:
    """Yield the tensor of each slab, in their order, while the next windows are read.

    Args:
        slabs: what to read.
        read: called in a thread with the slabs of a window, each of another tensor; returns new
            memory for each.
    """
    windows = _windows(slabs)
    with DaemonPool(_READ_AT_ONCE, "slabs") as pool:
        under_way = deque(pool.submit(read, window) for window in islice(windows, _READ_AT_ONCE))
        while under_way:
            tensors = result_of(under_way.popleft())
            tensors.reverse()
            under_way.extend(pool.submit(read, window) for window in islice(windows, 1))
            while tensors:
                yield tensors.pop()


def _windows(slabs: Iterable[Slab]) -> Iterator[list[Slab]]:
    window: list[Slab] = []
    size_bytes = 0
    for slab in slabs:
        size_bytes += slab.size_bytes
        if window and (size_bytes > WINDOW_BYTES or window[-1].key == slab.key):
            yield window
            window, size_bytes = [], slab.size_bytes
        window.append(slab)
    if window:
        yield window
