"""Plan a load: which bytes a rank needs, from the index alone."""

from __future__ import annotations

import bisect
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from torch.distributed.checkpoint.planner import ReadItem

from dcp_objstore.read.item_read import ItemRead
from dcp_objstore.read.tensor_read import Block, BlockRange, TensorRead, location_of, plan_spans
from dcp_objstore.transfer.digests import BLOCK_SIZE_BYTES, DIGEST_SIZE_BYTES
from dcp_objstore.transfer.ranges import Span

if TYPE_CHECKING:
    from dcp_objstore.read.stored_checkpoint import StoredCheckpoint


@dataclass(frozen=True, slots=True)
class PlannedLoad:
    """The reads of a rank.

    Attributes:
        reads: one read for each item of the plan, in the same order.
        spans: the pieces of objects that the reads need.
    """

    checkpoint: StoredCheckpoint
    reads: Sequence[TensorRead | ItemRead]
    spans: Sequence[Span[Block]]


def plan_load(
    checkpoint: StoredCheckpoint,
    items: Sequence[ReadItem],
    *,
    verify: bool,
    whole_blocks: bool = False,
) -> PlannedLoad:
    """Determine what must be read for a plan, without looking at its tensors.

    Args:
        whole_blocks: whether to read whole digest blocks, which other ranks may need as well.

    Raises:
        CheckpointCorruptError: the checkpoint does not say where an item lies.
        StateMismatchError: the checkpoint does not have what an item asks for.
    """
    reads: list[TensorRead | ItemRead] = []
    for item in items:
        location = location_of(checkpoint, item)
        if location.dtype is not None:
            reads.append(TensorRead(item, location))
        else:  # a value, or what torch has to decode
            is_verified = verify and location.digests is not None
            reads.append(ItemRead(item, location, is_verified=is_verified))
    spans = plan_spans(reads, verify=verify, whole_blocks=whole_blocks)
    return PlannedLoad(checkpoint, reads, spans)


def blocks_at(
    checkpoint: StoredCheckpoint, ranges: Collection[BlockRange]
) -> dict[BlockRange, Span[Block]]:
    """Return digest blocks that this rank reads only for other ranks: no read of its own has them.

    Args:
        checkpoint: a checkpoint with an index.
        ranges: where the blocks lie.
    """
    if not ranges:
        return {}
    index = checkpoint.index
    assert index is not None
    columns, spans = index.columns, {}
    payload_starts = columns.offset + columns.lead
    keys, first_rows = list(index.keys), [index.rows(key).start for key in index.keys]
    # `rows` are the rows of the index with a payload, ordered by object and by where the payload
    # begins. Payloads do not overlap, so a block is part of the last one that begins at or before
    # the start of the block.
    rows = np.flatnonzero(columns.payload_length)
    rows = rows[np.lexsort((payload_starts[rows], columns.object_number[rows]))]
    numbers, starts = columns.object_number[rows], payload_starts[rows]
    for number, start, end in ranges:
        first, after = np.searchsorted(numbers, number), np.searchsorted(numbers, number, "right")
        row = int(rows[first + np.searchsorted(starts[first:after], start, "right") - 1])
        item = index.item(row)
        position = start - item.payload_offset
        digest_start = position // BLOCK_SIZE_BYTES * DIGEST_SIZE_BYTES
        digest = item.digests[digest_start : digest_start + DIGEST_SIZE_BYTES]
        # The rows of each key follow one another, and the keys are in the order of their rows.
        key = keys[bisect.bisect_right(first_rows, row) - 1]
        spans[number, start, end] = Span(number, start, end, Block(key, position, digest))
    return spans
