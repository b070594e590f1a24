"""How ranks come to load together: one opens, each offers its needs, the coordinator shares out,
and all turn up; or each loads by itself.

Offers and shares travel as `storage_data` of DCP's plans, which are gathered and scattered anyway.
"""

from __future__ import annotations

import datetime
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.distributed as dist

from dcp_objstore import torch_private
from dcp_objstore.distributed.failures import typed_failures
from dcp_objstore.distributed.groups import current_rank
from dcp_objstore.distributed.plugin import typed
from dcp_objstore.errors import ConfigError, DcpObjstoreError
from dcp_objstore.observe.report import logger
from dcp_objstore.read.peers.exchange import Share, needs_of
from dcp_objstore.read.peers.plan import plan_sharing
from dcp_objstore.transfer.digests import BLOCK_SIZE_BYTES
from dcp_objstore.transfer.workers import wait_for
from dcp_objstore.waiting import STEP_SECONDS, wait_in_steps

if TYPE_CHECKING:
    from dcp_objstore.config import TransferConfig
    from dcp_objstore.read.peers.plan import Needs, Sharing
    from dcp_objstore.read.session import PlannedLoad
    from dcp_objstore.read.stored_checkpoint import Source
    from dcp_objstore.state.geometry import Selection

# Of what all ranks would fetch otherwise; see `_worthwhile`.
_LEAST_SAVED = 0.03
# Between a plan's arrival and the reading there is nothing that takes time, unless a planner's
# `finish_plan` makes it so. With many ranks the plans themselves arrive over some seconds, so it is
# the time in which no further rank has come.
_PATIENCE_SECONDS = 5.0
_TOGETHER = "together"


@dataclass(frozen=True, slots=True)
class Offer:
    """What a rank tells the coordinator with its plan.

    Attributes:
        url, commit_id: the checkpoint that it has opened.
        rank: its global rank.
        group_ranks: global ranks of the group in which it would exchange blocks; None if it is to
            load by itself.
        needs, selections: see `needs_of`.
        verify: whether it verifies what it fetches.
        memory_budget_bytes, request_size_bytes: its settings.
    """

    url: str | None
    commit_id: str | None
    rank: int | None = None
    group_ranks: tuple[int, ...] | None = None
    needs: Needs | None = None
    selections: dict[int, Selection] | None = None
    verify: bool = True
    memory_budget_bytes: int = 0
    request_size_bytes: int = 0


def make_offer(
    url: str | None,
    source: Source | None,
    planned: PlannedLoad | None,
    group_ranks: tuple[int, ...] | None,
    config: TransferConfig,
    *,
    verify: bool,
) -> Offer:
    """This rank's offer; `group_ranks` and `planned` are None for a rank that loads by itself."""
    commit_id = None if source is None else source.commit_id
    if planned is None or group_ranks is None:
        return Offer(url, commit_id, current_rank())
    needs, selections = needs_of(planned.reads, planned.spans)
    return Offer(
        url,
        commit_id,
        current_rank(),
        group_ranks,
        needs,
        selections,
        verify,
        config.memory_budget_bytes,
        config.request_size_bytes,
    )


def share_out(offers: Sequence[Offer]) -> list[Share | None]:
    """Each rank's share of what they load together; None for all where there is nothing to it.

    Nothing is shared unless all ranks that load want to, and are the very ranks of the group in
    which they would do it: the plan may be one of fewer ranks than this reader was told of. The
    smallest memory budget and request size of all ranks hold.

    Raises:
        ConfigError: some ranks verify and others do not: those would get unverified bytes.
    """
    nobody: list[Share | None] = [None] * len(offers)
    ranks = tuple(offer.rank for offer in offers)
    if len(offers) < 2 or any(offer.group_ranks != ranks for offer in offers):
        return nobody
    for offer in offers:
        if offer.verify != offers[0].verify:
            word = {True: "strict", False: "off"}
            raise ConfigError(
                f"every rank must pass the same verify=, but rank {ranks[0]} has"
                f' "{word[offers[0].verify]}" and rank {offer.rank} "{word[offer.verify]}": with'
                " read_once=True ranks hand each other what they fetch"
            )
    needs = [offer.needs for offer in offers if offer.needs is not None]
    quarter = min(offer.memory_budget_bytes for offer in offers) // 4
    request_size_bytes = min(offer.request_size_bytes for offer in offers)
    sharings = plan_sharing(
        needs,
        request_size_bytes=min(request_size_bytes, max(BLOCK_SIZE_BYTES, quarter // 2)),
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

    def broadcast() -> None:
        with typed_failures(url, group):
            dist.broadcast_object_list(found, group=group, group_src=0)

    if dist.get_rank(group) == 0:
        try:
            found = [open_it()]
        except BaseException as error:
            found = [typed(error, current_rank(), url)]
            if not isinstance(error, Exception):  # Ctrl-C stays what it is here
                wait_for(broadcast)
                raise
    wait_for(broadcast)
    source = found[0]
    if isinstance(source, DcpObjstoreError):
        raise source
    assert source is not None
    return source


def all_come(meeting: str, count: int, config: TransferConfig, url: str) -> bool:
    """Whether all ranks have come to load together; the same answer on every rank that asks.

    A rank whose planner raised in `finish_plan` goes past the reading, to DCP's next collective,
    and until then tells nobody. So a rank that has waited for 5 s (or
    `config.peer_timeout_seconds`, if that is less) in which no other has come decides for all that
    each loads by itself; they then meet in that collective. A rank that was only slow finds it
    decided and loads by itself too: nobody fails for being late.

    Args:
        meeting: see `Share`.
        count: of the ranks.

    Raises:
        RankFailedError: the process that keeps the process group's store has died.
    """
    rank = current_rank()
    arrivals = f"dcp_objstore/{meeting}/came"
    decided = f"dcp_objstore/{meeting}/decided"
    patience_seconds = min(_PATIENCE_SECONDS, config.peer_timeout_seconds)
    with typed_failures(url, None):
        store = torch_private.default_store()
        came = store.add(arrivals, 1)
        if came == count:
            return bytes(store.compare_set(decided, "", _TOGETHER)) == _TOGETHER.encode()
        while not _is_set(store, decided, patience_seconds):
            before, came = came, store.add(arrivals, 0)
            if came == before:
                break
        found = bytes(store.compare_set(decided, "", f"rank {rank}")).decode()
    if found == f"rank {rank}":
        logger.warning(
            "%s: %d of %d ranks have come to read, and for %.0f s no other (a planner's finish_plan"
            " has failed there or is slow), so each loads by itself",
            url,
            came,
            count,
            patience_seconds,
        )
    return found == _TOGETHER


def _is_set(store: dist.Store, key: str, timeout_seconds: float) -> bool:  # type: ignore[name-defined]  # torch exports it
    """Whether a key is set before the time is over."""

    def wait(seconds: float | None) -> bool:
        assert seconds is not None
        try:
            store.wait([key], datetime.timedelta(seconds=max(0.001, seconds)))
        except dist.DistStoreError:  # not yet
            return False
        return True

    # In steps in any thread: nobody else can use the store's connection meanwhile.
    return wait_in_steps(wait, timeout_seconds, step_seconds=STEP_SECONDS)
