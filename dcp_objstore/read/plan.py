"""Plan a load: which bytes a rank needs, from the index alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.distributed.checkpoint.planner import ReadItem

from dcp_objstore.read.item_read import ItemRead
from dcp_objstore.read.tensor_read import Block, TensorRead, is_value, location_of, plan_spans
from dcp_objstore.transfer.ranges import Span

if TYPE_CHECKING:
    from dcp_objstore.read.stored_checkpoint import StoredCheckpoint


@dataclass(frozen=True, slots=True)
class PlannedLoad:
    """What a rank will read.

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
        whole = is_value(item) or location.dtype is None
        reads.append(ItemRead(item, location) if whole else TensorRead(item, location))
    spans = plan_spans(reads, verify=verify, whole_blocks=whole_blocks)
    return PlannedLoad(checkpoint, reads, spans)
