"""The agreement of ranks to load together.

One rank opens the checkpoint, each rank offers what it needs, the coordinator divides the work, and
all ranks meet before they read. If any of this is not possible, each rank loads by itself. Offers
and shares travel as `storage_data` of DCP's plans, which DCP gathers and scatters anyway.
"""

from __future__ import annotations

import datetime
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.distributed as dist
import xxhash

from dcp_objstore import torch_private
from dcp_objstore.config import TransferConfig
from dcp_objstore.distributed.failures import from_first, typed_failures
from dcp_objstore.distributed.groups import is_first
from dcp_objstore.distributed.plugin import typed
from dcp_objstore.distributed.ranks import current_rank
from dcp_objstore.errors import ConfigError, DcpObjstoreError
from dcp_objstore.observe.report import logger
from dcp_objstore.read.geometry import Selection
from dcp_objstore.read.peers.exchange import Share, needs_of
from dcp_objstore.read.peers.plan import ExchangePlan, Needs, NodeCopies, plan_exchange
from dcp_objstore.read.plan import PlannedLoad
from dcp_objstore.threads import STEP_SECONDS, wait_for, wait_in_steps
from dcp_objstore.transfer.digests import BLOCK_SIZE_BYTES
from dcp_objstore.transfer.ranges import DEFAULT_GAP_BYTES

if TYPE_CHECKING:
    from dcp_objstore.local.copies import LoadCopies
    from dcp_objstore.read.stored_checkpoint import StoredCheckpoint

# The least part of what all ranks would fetch otherwise that must be saved; see `_saves_enough`.
_LEAST_SAVED = 0.03
# Between a plan's arrival and the read nothing takes time, unless a planner's `finish_plan` does.
# With many ranks the plans themselves arrive over some seconds, so what counts is the time in which
# no further rank has arrived.
_PATIENCE_SECONDS = 5.0
_TOGETHER = "together"


@dataclass(frozen=True, slots=True)
class Offer:
    """The offer that a rank sends the coordinator with its plan.

    Attributes:
        commit_id: the commit_id of the checkpoint that the rank has opened; its fingerprint if
            another library wrote it.
        group: `group_digest` of the ranks among which the rank would exchange blocks; None if it
            loads by itself.
        needs: the bytes that the rank needs, as `needs_of` returns them.
        selections: the selections of the rank's packed reads, by the number of the read.
        copies: the objects of which the rank's node has copies; None if it has none.
    """

    url: str | None
    commit_id: str | None
    rank: int | None = None
    group: bytes | None = None
    needs: Needs | None = None
    selections: dict[int, Selection] | None = None
    copies: NodeCopies | None = None
    verify: bool = True
    memory_budget_bytes: int = 0
    request_size_bytes: int = 0


def make_offer(
    url: str | None,
    checkpoint: StoredCheckpoint | None,
    planned: PlannedLoad | None,
    *,
    group_ranks: tuple[int, ...] | None,
    config: TransferConfig,
    verify: bool,
    copies: LoadCopies | None = None,
) -> Offer:
    """Make this rank's offer; `group_ranks` or `planned` is None if the rank loads by itself."""
    # A checkpoint of another library has no commit, but a fingerprint.
    commit_id = None if checkpoint is None else checkpoint.commit_id or checkpoint.fingerprint
    if planned is None or group_ranks is None:
        return Offer(url, commit_id, current_rank())
    needs, selections = needs_of(planned.reads, planned.spans)
    return Offer(
        url,
        commit_id,
        current_rank(),
        group=group_digest(group_ranks),
        needs=needs,
        selections=selections,
        copies=None if copies is None else NodeCopies(copies.node, copies.numbers),
        verify=verify,
        memory_budget_bytes=config.memory_budget_bytes,
        request_size_bytes=config.request_size_bytes,
    )


def group_digest(ranks: Iterable[int | None]) -> bytes:
    """Return what stands for a group in offers: 10,000 lists of 10,000 ranks would take 3 GB."""
    return xxhash.xxh3_128_digest(repr(tuple(ranks)).encode())


def share_out(offers: Sequence[Offer]) -> list[Share | None]:
    """Return each rank's share of what they load together; all None if they share nothing.

    Ranks share only if all that load agree to, and if they are exactly the ranks of the group in
    which they would exchange blocks: fewer ranks may take part in the plan than this reader
    expects. The smallest memory budget and request size of all ranks apply.

    Raises:
        ConfigError: some ranks verify and others do not; those that do would get unverified bytes.
    """
    alone: list[Share | None] = [None] * len(offers)
    ranks = tuple(offer.rank for offer in offers)
    group = group_digest(ranks)
    if len(offers) < 2 or any(offer.group != group for offer in offers):
        return alone
    for offer in offers:
        if offer.verify != offers[0].verify:
            raise ConfigError(
                f"every rank must pass the same verify=, but rank {ranks[0]} has"
                f" {offers[0].verify} and rank {offer.rank} {offer.verify}: with"
                " read_once=True ranks hand each other what they fetch"
            )
    # An offer that names its group has needs. (The condition is for the type checker.)
    needs = [offer.needs for offer in offers if offer.needs is not None]
    # A round takes a quarter of the budget, and a request at most half a round or one block.
    quarter_bytes = min(offer.memory_budget_bytes for offer in offers) // 4
    request_size_bytes = min(offer.request_size_bytes for offer in offers)
    plans = plan_exchange(
        needs,
        request_size_bytes=min(request_size_bytes, max(BLOCK_SIZE_BYTES, quarter_bytes // 2)),
        round_size_bytes=quarter_bytes,
        copies=[offer.copies for offer in offers],
    )
    if not (_saves_enough(plans, needs) or _spares_the_store(plans, offers)):
        return alone
    meeting = str(uuid.uuid4())
    shares: list[Share | None] = []
    for number, plan in enumerate(plans):
        # What this rank needs to pack its messages.
        selections = {
            (rank, segment.read): (offers[rank].selections or {})[segment.read]
            for request in plan.fetched_by(number)
            for rank, segments in request.messages.items()
            for segment in segments
            if segment.packed_bytes
        }
        shares.append(Share(plan, selections, meeting))
    return shares


def _spares_the_store(plans: Sequence[ExchangePlan], offers: Sequence[Offer]) -> bool:
    """Whether a rank gets bytes from another node's copy which it would have to fetch otherwise."""
    copied = [frozenset() if offer.copies is None else offer.copies.objects for offer in offers]
    return any(
        request.object_number in copied[fetcher] and request.object_number not in copied[receiver]
        for fetcher, plan in enumerate(plans)
        for request in plan.fetched_by(fetcher)
        for receiver in request.messages
    )


def _saves_enough(plans: Sequence[ExchangePlan], needs: Sequence[Needs]) -> bool:
    """Whether sharing saves enough bytes to make ranks wait for each other.

    A resharded state shares the blocks at the borders of shards, and a sharded state shares its few
    values. For these few percent every round would cost more than it saves.
    """
    # Each receiver is spared the bytes and a request. A request counts as much as the largest gap
    # that is read in order to spare one.
    saved_bytes = sum(
        (request.end - request.start + DEFAULT_GAP_BYTES) * len(request.messages)
        for number, plan in enumerate(plans)
        for request in plan.fetched_by(number)
    )
    needed_bytes = sum(int((rows["end"] - rows["start"]).sum()) for rows in needs)
    return saved_bytes > _LEAST_SAVED * needed_bytes


def open_once(
    open_it: Callable[[], StoredCheckpoint], group: dist.ProcessGroup | None, url: str
) -> StoredCheckpoint:
    """Open the checkpoint on the group's first rank, and return it on all ranks. A collective.

    Raises:
        DcpObjstoreError: opening failed; all ranks raise the same error.
        RankFailedError: a rank has died.
    """
    outcome: StoredCheckpoint | DcpObjstoreError | None = None
    if is_first(group):
        try:
            outcome = open_it()
        except BaseException as error:
            outcome = typed(error, current_rank(), url)
            # After Ctrl-C the other ranks still wait for `outcome`, which they raise.
            if not isinstance(error, Exception):
                wait_for(from_first, outcome, url, group)
                raise
    outcome = wait_for(from_first, outcome, url, group)
    try:
        if isinstance(outcome, DcpObjstoreError):
            raise outcome
        assert outcome is not None
        return outcome
    finally:
        # A raised error refers to this frame. The frame must not refer to the error, too: the cycle
        # would keep both until the garbage collector runs.
        del outcome


def all_arrived(meeting: str, count: int, config: TransferConfig, url: str) -> bool:
    """Whether all ranks have arrived to load together; the same answer on every rank that asks.

    A rank whose planner raised in `finish_plan` skips the read, goes to DCP's next collective, and
    reports nothing until then. So if a rank has waited for 5 s (or `config.peer_timeout_seconds`,
    if that is less) in which no other rank arrived, it decides for all that each loads by itself;
    they then meet in that collective. A rank that was only slow finds this decision and loads by
    itself too. No rank fails for being late.

    Args:
        meeting: the unique name of the load, from its `Share`.

    Raises:
        RankFailedError: the process that keeps the process group's store has died.
    """
    rank = current_rank()
    arrivals_key = f"dcp_objstore/{meeting}/arrivals"
    decision_key = f"dcp_objstore/{meeting}/decided"
    patience_seconds = min(_PATIENCE_SECONDS, config.peer_timeout_seconds)
    with typed_failures(url, None):
        store = torch_private.default_store()
        arrived = store.add(arrivals_key, 1)
        # `compare_set` sets a key that is not set yet, and returns its value in either case. So the
        # last rank to arrive decides, unless another rank has given up before.
        if arrived == count:
            return bytes(store.compare_set(decision_key, "", _TOGETHER)) == _TOGETHER.encode()
        while not _is_set(store, decision_key, patience_seconds):
            before, arrived = arrived, store.add(arrivals_key, 0)  # reads the counter
            if arrived == before:  # no other rank has arrived in the meantime
                break
        # The first decision counts, whichever rank made it.
        decision = bytes(store.compare_set(decision_key, "", f"rank {rank}")).decode()
    if decision == f"rank {rank}":  # it was this rank that gave up, so it says so
        logger.warning(
            "%s: %d of %d ranks have arrived to read, and no other for %.0f s (a planner's"
            " finish_plan has failed there or is slow), so each rank loads by itself",
            url,
            arrived,
            count,
            patience_seconds,
        )
    return decision == _TOGETHER


def _is_set(store: dist.Store, key: str, timeout_seconds: float) -> bool:  # type: ignore[name-defined]  # torch exports it
    """Wait for a key; return whether it was set before the time-out."""

    def wait(seconds: float | None) -> bool:
        assert seconds is not None
        try:
            store.wait([key], datetime.timedelta(seconds=max(0.001, seconds)))
        except dist.DistStoreError:  # the time-out
            return False
        return True

    # Every thread waits in short steps, because no other thread can use the connection to the
    # store during one.
    return wait_in_steps(wait, timeout_seconds, step_seconds=STEP_SECONDS)
