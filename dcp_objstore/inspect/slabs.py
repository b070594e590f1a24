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
from contextlib import closing
from inspect import GEN_RUNNING, getgeneratorstate
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from dcp_objstore.config import MIB
from dcp_objstore.read.geometry import Box
from dcp_objstore.threads import WATCH_SECONDS, result_of
from dcp_objstore.transfer.digests import BLOCK_SIZE_BYTES
from dcp_objstore.transfer.workers import DaemonPool

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
R = TypeVar("R")

# Bytes that are read as one. While one window is written, the four after it are read.
WINDOW_BYTES = 32 * MIB
_WINDOWS_AHEAD = 4


class Slab(NamedTuple):
    """A part of a tensor whose elements follow one another in the whole tensor."""

    key: str
    box: Box
    size_bytes: int


def cut(
    key: str,
    shape: Sequence[int],
    dtype: torch.dtype,
    starts: Sequence[int] = (),
    *,
    most_bytes: int = WINDOW_BYTES,
) -> Iterator[Slab]:
    """Cut a tensor into slabs, front to back.

    Args:
        key: key of the tensor.
        shape: shape of the whole tensor.
        dtype: its dtype.
        starts: first rows of the stored chunks, ascending. Slabs begin there or a whole number of
            digest blocks further on, if that is possible, so that few blocks are read twice.
        most_bytes: the size of the largest slab.
    """
    size_bytes = math.prod(shape) * dtype.itemsize
    if not size_bytes:  # it has no elements
        return
    if not shape:  # a scalar
        yield Slab(key, Box((), ()), size_bytes)
        return
    extent, *rest = shape
    row_bytes = size_bytes // extent
    if row_bytes > most_bytes:  # each row has to be cut itself
        for row in range(extent):
            for _, box, part_bytes in cut(key, rest, dtype, most_bytes=most_bytes):
                yield Slab(key, Box((row, *box.offsets), (1, *box.sizes)), part_bytes)
        return
    # The fewest rows that are a whole number of digest blocks.
    rows_of_blocks = BLOCK_SIZE_BYTES // math.gcd(BLOCK_SIZE_BYTES, row_bytes)
    begin, most_rows = 0, most_bytes // row_bytes
    while begin < extent:
        end = min(extent, begin + most_rows)
        if end < extent:
            # Move `end` back to where a digest block ends in the chunk that holds it, unless that
            # would leave nothing.
            chunks_before = bisect_right(starts, end)
            chunk_start = starts[chunks_before - 1] if chunks_before else 0
            block_end = end - (end - chunk_start) % rows_of_blocks
            end = block_end if block_end > begin else end
        box = Box((begin, *(0 for _ in rest)), (end - begin, *rest))
        yield Slab(key, box, (end - begin) * row_bytes)
        begin = end


def read_ahead(
    slabs: Iterable[Slab],
    read: Callable[[Sequence[Slab]], list[torch.Tensor]],
    check: Callable[[], object] | None = None,
) -> Generator[torch.Tensor, None, None]:
    """Yield the tensor of each slab, in their order, while the next windows are read.

    Args:
        slabs: the slabs to read.
        read: a function that is called in a thread with the slabs of a window, each of another
            tensor; it returns new memory for each.
        check: as for `ahead`.
    """
    windows = in_windows(
        slabs, WINDOW_BYTES, lambda slab: slab.size_bytes, lambda slab, other: slab.key == other.key
    )
    with closing(ahead(windows, read, _WINDOWS_AHEAD, check)) as arriving:
        for tensors in arriving:
            tensors.reverse()
            while tensors:  # popped, so that this keeps no tensor that it has yielded
                yield tensors.pop()


def stop(reading: Generator[object, None, None]) -> None:
    """Close a generator of `read_ahead`, unless a thread is in it that Ctrl-C has left behind."""
    if getgeneratorstate(reading) != GEN_RUNNING:
        reading.close()


def ahead(
    tasks: Iterable[T],
    do: Callable[[T], R],
    most: int,
    check: Callable[[], object] | None = None,
) -> Generator[R, None, None]:
    """Yield `do(task)` of each task, in their order, while the next ones are done in threads.

    Args:
        tasks: the tasks, in their order.
        do: a function that is called in a thread with each task.
        most: the largest number of tasks that are under way or done and not yielded.
        check: a function that is called from time to time while this waits; what it raises ends
            the wait.
    """
    tasks = iter(tasks)
    with DaemonPool(most, "ahead") as pool:
        under_way = deque(pool.submit(do, task) for task in islice(tasks, most))
        while under_way:
            done = result_of(under_way.popleft(), check=check, step_seconds=check and WATCH_SECONDS)
            under_way.extend(pool.submit(do, task) for task in islice(tasks, 1))
            yield done
            del done  # its memory must not outlive its use while this waits for the next


def in_windows(
    items: Iterable[T],
    most_bytes: int,
    size_of: Callable[[T], int],
    are_apart: Callable[[T, T], bool] = lambda _, __: False,
) -> Iterator[list[T]]:
    """Yield items in lists of at most `most_bytes`, or of a single larger item.

    Args:
        items: the items, in their order.
        most_bytes: the size of the largest list of several items.
        size_of: returns the size of an item.
        are_apart: returns whether an item cannot follow another one in a list.
    """
    window: list[T] = []
    size_bytes = 0
    for item in items:
        size_bytes += size_of(item)
        if window and (size_bytes > most_bytes or are_apart(window[-1], item)):
            yield window
            window, size_bytes = [], size_of(item)
        window.append(item)
    if window:
        yield window
