"""`RankPlan`: what the ranks of a job would read. It needs torch, which `checkpoint` does not."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from dcp_objstore.inspect.fill import read_items
from dcp_objstore.read.geometry import Box
from dcp_objstore.read.peers.meeting import make_offer, share_out
from dcp_objstore.read.peers.plan import ExchangePlan
from dcp_objstore.read.plan import plan_load
from dcp_objstore.transfer.ranges import plan_requests

if TYPE_CHECKING:
    from dcp_objstore.config import TransferConfig
    from dcp_objstore.read.peers.exchange import Share
    from dcp_objstore.read.plan import PlannedLoad
    from dcp_objstore.read.stored_checkpoint import StoredCheckpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """What one rank of a job would read.

    Attributes:
        rank: the rank.
        items: number of tensor chunks and values that it would read from.
        total_bytes: bytes that it would fetch from the store.
        received_bytes: bytes that other ranks would fetch and send to it.
        requests: number of ranged GETs that it would make.
        objects: number of objects that it would read from.
    """

    rank: int
    items: int
    total_bytes: int
    received_bytes: int
    requests: int
    objects: int


def plan_ranks(
    url: str,
    stored: StoredCheckpoint,
    keys: Sequence[str],
    *,
    ranks: int,
    config: TransferConfig,
    verify: bool,
) -> tuple[RankPlan, ...]:
    """Plan the load of a job whose tensors are all sharded over dimension 0, as FSDP2 does."""
    group = tuple(range(ranks))
    planned, offers = [], []
    for rank in group:
        boxes, values = {}, []
        for key in keys:
            saved = stored.metadata.state_dict_metadata[key]
            if not isinstance(saved, TensorStorageMetadata):
                values.append(key)
            elif (box := _shard(tuple(saved.size), rank, ranks)) is not None:
                boxes[key] = box
        items = read_items(stored, boxes, values)
        planned.append(plan_load(stored, items, verify=verify, whole_blocks=ranks > 1))
        offer = make_offer(
            url, stored, planned[-1], group_ranks=group, config=config, verify=verify
        )
        offers.append(dataclasses.replace(offer, rank=rank))
    shares = share_out(offers)
    return tuple(
        _rank_plan(rank, requests, share, config)
        for rank, requests, share in zip(group, planned, shares, strict=True)
    )


def _shard(shape: tuple[int, ...], rank: int, ranks: int) -> Box | None:
    """Return the rank's part of a tensor, which `torch.chunk` would give it; None if it has none.

    A tensor without dimensions is replicated.
    """
    if not shape:
        return Box((), ())
    extent, *others = shape
    rows = -(-extent // ranks)
    begin, end = min(rank * rows, extent), min((rank + 1) * rows, extent)
    if begin == end:
        return None
    return Box((begin, *(0 for _ in others)), (end - begin, *others))


def _rank_plan(
    rank: int, planned: PlannedLoad, share: Share | None, config: TransferConfig
) -> RankPlan:
    """Return what a rank would read: its share of what is read once, and the rest alone."""
    plan = ExchangePlan() if share is None else share.plan
    received = (r for requests in plan.rounds for r in requests if r.fetcher != rank)
    requests = plan_requests(
        plan.alone(planned.spans), request_size_bytes=config.request_size_bytes
    )
    places = [(r.object_number, r.start, r.end) for r in plan.fetched_by(rank)]
    places += [(r.object_number, r.start, r.end) for r in requests]
    return RankPlan(
        rank=rank,
        items=len(planned.reads),
        total_bytes=sum(end - start for _, start, end in places),
        received_bytes=sum(m.length_bytes for r in received for m in r.messages[rank]),
        requests=len(places),
        objects=len({number for number, _, _ in places}),
    )
