"""How ranks come to load together: one opens, each offers its needs, the coordinator shares out.

Offers and shares travel as `storage_data` of DCP's plans, which are gathered and scattered anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.distributed as dist

from dcp_objstore.dcp.exchange import Share, needs_of
from dcp_objstore.dcp.failures import typed_failures
from dcp_objstore.dcp.groups import current_rank
from dcp_objstore.errors import DcpObjstoreError
from dcp_objstore.transfer.digests import BLOCK_SIZE_BYTES
from dcp_objstore.transfer.sharing import plan_sharing
from dcp_objstore.transfer.workers import wait_for

if TYPE_CHECKING:
    from dcp_objstore.config import TransferConfig
    from dcp_objstore.dcp.geometry import Selection
    from dcp_objstore.dcp.loading import PlannedLoad
    from dcp_objstore.dcp.source import Source
    from dcp_objstore.transfer.sharing import Needs, Sharing

# Of what all ranks would fetch otherwise; see `_worthwhile`.
_LEAST_SAVED = 0.03


@dataclass(frozen=True, slots=True)
class Offer:
    """What a rank tells the coordinator with its plan.

    Attributes:
        url, commit_id: the checkpoint that it has opened.
        rank: its global rank.
        group_ranks: global ranks of the group in which it would exchange blocks; None if it is to
            load by itself.
        needs, selections: see `needs_of`.
    """

    url: str | None
    commit_id: str | None
    rank: int | None = None
    group_ranks: tuple[int, ...] | None = None
    needs: Needs | None = None
    selections: dict[int, Selection] | None = None


def make_offer(
    url: str | None,
    source: Source | None,
    planned: PlannedLoad | None,
    group_ranks: tuple[int, ...] | None,
) -> Offer:
    """This rank's offer; `group_ranks` and `planned` are None for a rank that loads by itself."""
    commit_id = None if source is None else source.commit_id
    if planned is None or group_ranks is None:
        return Offer(url, commit_id, current_rank())
    needs, selections = needs_of(planned.reads, planned.spans)
    return Offer(url, commit_id, current_rank(), group_ranks, needs, selections)


def share_out(offers: Sequence[Offer], config: TransferConfig) -> list[Share | None]:
    """Each rank's share of what they load together; None for all where there is nothing to it.

    Nothing is shared unless all ranks that load want to, and are the very ranks of the group in
    which they would do it: the plan may be one of fewer ranks than this reader was told of.
    """
    nobody: list[Share | None] = [None] * len(offers)
    ranks = tuple(offer.rank for offer in offers)
    if len(offers) < 2 or any(offer.group_ranks != ranks for offer in offers):
        return nobody
    needs = [offer.needs for offer in offers if offer.needs is not None]
    quarter = config.memory_budget_bytes // 4
    sharings = plan_sharing(
        needs,
        request_size_bytes=min(config.request_size_bytes, max(BLOCK_SIZE_BYTES, quarter // 2)),
        round_size_bytes=quarter,
    )
    if not _worthwhile(sharings, needs):
        return nobody
    shares: list[Share | None] = []
    for number, sharing in enumerate(sharings):
        selections = {
            (rank, segment.read): (offers[rank].selections or {})[segment.read]
            for request in sharing.fetched_by(number)
            for rank, segments in request.messages.items()
            for segment in segments
            if segment.packed_bytes
        }
        shares.append(Share(sharing, selections))
    return shares


def _worthwhile(sharings: Sequence[Sharing], needs: Sequence[Needs]) -> bool:
    """Whether enough is fetched less for ranks to wait for each other.

    A resharded state shares the blocks at the borders of shards, a sharded one its few values:
    some percent, for which every round would cost more than it saves.
    """
    saved_bytes = sum(
        (request.end - request.start) * len(request.messages)
        for number, sharing in enumerate(sharings)
        for request in sharing.fetched_by(number)
    )
    needed_bytes = sum(int((rows["end"] - rows["start"]).sum()) for rows in needs)
    return saved_bytes > _LEAST_SAVED * needed_bytes


def open_once(open_it: Callable[[], Source], group: dist.ProcessGroup, url: str) -> Source:
    """What the group's first rank opens, on all of its ranks. A collective.

    Raises:
        DcpObjstoreError: what it met, on all ranks.
        RankFailedError: a rank has died.
    """
    found: list[Source | DcpObjstoreError | None] = [None]
    if dist.get_rank(group) == 0:
        try:
            found = [open_it()]
        except DcpObjstoreError as error:
            found = [error.at(rank=current_rank(), url=url)]

    def broadcast() -> None:
        with typed_failures(url, group):
            dist.broadcast_object_list(found, group=group, group_src=0)

    wait_for(broadcast)
    source = found[0]
    if isinstance(source, DcpObjstoreError):
        raise source
    assert source is not None
    return source
