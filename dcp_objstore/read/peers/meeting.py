"""How ranks come to load together: one opens, each offers its needs, the coordinator shares out,
and all turn up; or each loads by itself.

Offers and shares travel as `storage_data` of DCP's plans, which are gathered and scattered anyway.
"""

from __future__ import annotations

import contextlib
import datetime
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.distributed as dist

from dcp_objstore.distributed.failures import typed_failures
from dcp_objstore.distributed.groups import current_rank
from dcp_objstore.errors import DcpObjstoreError
from dcp_objstore.observe.report import logger
from dcp_objstore.read.peers.exchange import Share, needs_of
from dcp_objstore.read.peers.plan import plan_sharing
from dcp_objstore.transfer.digests import BLOCK_SIZE_BYTES
from dcp_objstore.transfer.workers import wait_for

if TYPE_CHECKING:
    from dcp_objstore.config import TransferConfig
    from dcp_objstore.read.peers.plan import Needs, Sharing
    from dcp_objstore.read.session import PlannedLoad
    from dcp_objstore.read.stored_checkpoint import Source
    from dcp_objstore.state.geometry import Selection

# Of what all ranks would fetch otherwise; see `_worthwhile`.
_LEAST_SAVED = 0.03
# Between a plan's arrival and the reading there is nothing that takes time, unless a planner's
# `finish_plan` makes it so.
_PATIENCE_SECONDS = 30.0
_TOGETHER = "together"
_POLL_SECONDS = 0.25  # Ctrl-C ends the waiting between two


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
    meeting = str(uuid.uuid4())
    shares: list[Share | None] = []
    for number, sharing in enumerate(sharings):
        selections = {
            (rank, segment.read): (offers[rank].selections or {})[segment.read]
            for request in sharing.fetched_by(number)
            for rank, segments in request.messages.items()
            for segment in segments
            if segment.packed_bytes
        }
        shares.append(Share(sharing, selections, meeting))
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


def all_come(meeting: str, count: int, config: TransferConfig, url: str) -> bool:
    """Whether all ranks have come to load together; the same answer on every rank that asks.

    A rank whose planner raised in `finish_plan` goes past the reading, to DCP's next collective,
    and until then tells nobody. So a rank that has waited for 30 s (or
    `config.peer_timeout_seconds`, if that is less) decides for all that each loads by itself; they
    then meet in that collective. A rank that was only slow finds it decided and loads by itself
    too: nobody fails for being late.

    Args:
        meeting: see `Share`.
        count: of the ranks.

    Raises:
        RankFailedError: the process that keeps the process group's store has died.
    """
    rank = current_rank()
    decided = f"dcp_objstore/{meeting}/decided"
    patience_seconds = min(_PATIENCE_SECONDS, config.peer_timeout_seconds)
    deadline = time.monotonic() + patience_seconds
    with typed_failures(url, None):
        store = dist.distributed_c10d._get_default_store()
        if store.add(f"dcp_objstore/{meeting}/came", 1) == count:
            return bytes(store.compare_set(decided, "", _TOGETHER)) == _TOGETHER.encode()
        while (left := deadline - time.monotonic()) > 0:
            slice_ = datetime.timedelta(seconds=max(0.001, min(left, _POLL_SECONDS)))
            with contextlib.suppress(dist.DistStoreError):  # not decided yet
                store.wait([decided], slice_)
                break
        found = bytes(store.compare_set(decided, "", f"rank {rank}")).decode()
    if found == f"rank {rank}":
        logger.warning(
            "%s: not every rank has come to read within %.0f s (a planner's finish_plan has failed"
            " there or is slow), so each loads by itself",
            url,
            patience_seconds,
        )
    return found == _TOGETHER
