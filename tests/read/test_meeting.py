"""Ranks agree on what they load together: who offers what, and who has come."""

from __future__ import annotations

import datetime
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from dcp_objstore.config import MIB, TransferConfig
from dcp_objstore.errors import ConfigError, RankFailedError
from dcp_objstore.read.items import ItemLocation
from dcp_objstore.read.peers import meeting
from dcp_objstore.read.peers.meeting import Offer, all_arrived, group_digest, make_offer, share_out
from dcp_objstore.read.peers.plan import NEED, NodeCopies
from dcp_objstore.read.plan import PlannedLoad
from dcp_objstore.read.tensor_read import Block, TensorRead
from dcp_objstore.transfer.ranges import Span


def offer(rank: int, rows: Sequence[tuple[int, ...]], count: int = 2, **settings: Any) -> Offer:
    settings = {
        "group": group_digest(range(count)),
        "selections": {},
        "memory_budget_bytes": 64 * MIB,
        "request_size_bytes": 8 * MIB,
        **settings,
    }
    return Offer("url", "commit", rank, needs=np.array(rows, dtype=NEED), **settings)


def whole(number: int, size_bytes: int = MIB, start: int = 0) -> tuple[int, ...]:
    return number, start, start + size_bytes, start, start + size_bytes, 0, -1


# --- offers ---------------------------------------------------------------------------------------


def planned() -> PlannedLoad:
    place, zeros = MetadataIndex("t", (0, 0)), torch.Size([0, 0])
    item = ReadItem(LoadItemType.TENSOR, place, zeros, place, zeros, torch.Size([2, 1]))
    read = TensorRead(item, ItemLocation(3, 0, 80, (2, 40), "uint8", None))
    checkpoint: Any = None
    return PlannedLoad(checkpoint, [read], [Span(3, 0, 80, Block("t", 0, None, [read]))])


def test_an_offer_says_what_a_rank_needs_and_which_checkpoint_it_has_opened(monkeypatch):
    monkeypatch.setattr(meeting, "current_rank", lambda: 5)
    ours: Any = SimpleNamespace(commit_id="commit", fingerprint=None)
    foreign: Any = SimpleNamespace(commit_id=None, fingerprint="state")
    load, config = (
        planned(),
        TransferConfig(memory_budget_bytes=9 * MIB, request_size_bytes=5 * MIB),
    )

    def make(*args: Any, **settings: Any) -> Offer:
        settings = {"group_ranks": (4, 5), "config": config, "verify": False, **settings}
        return make_offer("url", *args, **settings)

    made = make(ours, load)
    assert (made.url, made.commit_id, made.rank) == ("url", "commit", 5)
    assert made.group == group_digest([4, 5]) != group_digest([5, 4])
    assert made.needs is not None and made.needs.tolist() == [(3, 0, 80, 0, 41, 2, 0)]
    assert made.selections == {0: load.reads[0].selection}
    assert made.verify is False
    assert (made.memory_budget_bytes, made.request_size_bytes) == (9 * MIB, 5 * MIB)
    assert made.copies is None
    assert make(foreign, load).commit_id == "state"
    assert make(ours, load, verify=True).verify is True
    copies: Any = SimpleNamespace(node=b"node", numbers=frozenset({3}))
    assert make(ours, load, copies=copies).copies == NodeCopies(b"node", frozenset({3}))
    # Alone: the coordinator still compares what the ranks have opened.
    assert make(ours, load, group_ranks=None) == Offer("url", "commit", 5)
    assert make(ours, None) == Offer("url", "commit", 5)
    assert make(None, None) == Offer("url", None, 5)


# --- shares ---------------------------------------------------------------------------------------


def test_a_single_rank_shares_nothing():
    assert share_out([]) == []
    assert share_out([offer(0, [whole(0)], 1)]) == [None]


def test_ranks_share_only_in_exactly_their_group_in_its_order():
    rows = [whole(0)]
    assert all(share_out([offer(0, rows), offer(1, rows)]))
    assert share_out([offer(1, rows), offer(0, rows)]) == [None, None]
    assert share_out([offer(0, rows, 3), offer(1, rows, 3)]) == [None, None]
    for other in (None, group_digest([0])):
        assert share_out([offer(0, rows, group=other), offer(1, rows)]) == [None, None]
        assert share_out([offer(0, rows), offer(1, rows, group=other)]) == [None, None]


def test_who_verifies_differently_is_named():
    offers = [offer(n, [whole(0)], 3, verify=n < 2) for n in range(3)]
    with pytest.raises(ConfigError, match="rank 0 has True and rank 2 False"):
        share_out(offers)


def test_all_shares_have_the_name_of_their_load_and_no_other_load_has_it():
    meetings = []
    for _ in range(2):
        shares = share_out([offer(n, [whole(0)]) for n in range(2)])
        (name,) = {share.meeting for share in shares if share is not None}
        meetings.append(name)
    assert meetings[0] != meetings[1]


def test_the_fetcher_gets_the_selections_of_what_it_packs_and_no_others():
    a, b, c = (object() for _ in range(3))
    packed = [(0, 0, MIB, 0, MIB, MIB // 4, 7), (0, 0, MIB, 0, MIB, MIB // 8, 8)]
    offers = [
        offer(0, [whole(0), whole(1)], 3, selections={7: c}),
        offer(1, [*packed, whole(1)], 3, selections={7: a, 8: b, 9: c}),
        offer(2, [whole(0), whole(1)], 3),
    ]
    shares = share_out(offers)
    fetched = [
        {request.object_number for request in share.plan.fetched_by(number)}
        for number, share in enumerate(shares)
        if share is not None
    ]
    assert fetched == [{0}, {1}, set()]
    assert [share.selections for share in shares if share] == [{(1, 7): a, (1, 8): b}, {}, {}]


@pytest.mark.parametrize(
    ("budgets_mib", "request_mib", "size_mib"),
    [((64, 64), 8, 8), ((64, 40), 8, 5), ((32, 64), 8, 4), ((8, 8), 8, 4), ((64, 64), 2, 2)],
)
def test_a_request_takes_no_more_than_half_of_a_rounds_memory_but_a_whole_block(
    budgets_mib, request_mib, size_mib
):
    rows = [whole(0, MIB, n * MIB) for n in range(32)]
    shares = share_out(
        [
            offer(
                *(n, rows),
                memory_budget_bytes=budget * MIB,
                request_size_bytes=(request_mib + n) * MIB,  # the smallest counts
            )
            for n, budget in enumerate(budgets_mib)
        ]
    )
    assert shares[0] is not None
    sizes = [r.end - r.start for requests in shares[0].plan.rounds for r in requests]
    assert max(sizes) == size_mib * MIB
    rounds = [sum(r.end - r.start for r in requests) for requests in shares[0].plan.rounds]
    assert max(rounds) <= max(min(budgets_mib) * MIB // 4, size_mib * MIB)
    assert len(rounds) == -(-32 * MIB // max(rounds))


def test_a_copy_of_another_node_is_worth_it_where_too_little_is_shared_otherwise():
    own = [whole(1 + n, 100 * MIB) for n in range(2)]
    a, b = (NodeCopies(node, frozenset({0})) for node in (b"a", b"b"))
    other = NodeCopies(b"a", frozenset({7}))
    for held, together in (
        *(([None, None], False), ([a, None], True), ([None, a], True)),
        *(([other, None], False), ([a, b], False)),
    ):
        offers = [offer(n, [whole(0), own[n]], copies=held[n]) for n in range(2)]
        assert [share is not None for share in share_out(offers)] == [together] * 2, held


@pytest.mark.parametrize(("own_mib", "together"), [(40, True), (42, False)])
def test_ranks_share_what_saves_them_more_than_three_percent_of_all_they_need(own_mib, together):
    """One of three is spared 1 MiB twice, and two requests, each as good as 256 KiB."""
    offers = [offer(n, [whole(0), whole(1 + n, own_mib * MIB // 3 * 2)], 3) for n in range(3)]
    assert [share is not None for share in share_out(offers)] == [together] * 3


# --- who has come ---------------------------------------------------------------------------------


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Any:
    store = dist.HashStore()
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    return store


def arrive(
    monkeypatch: pytest.MonkeyPatch, rank: int, count: int = 3, patience_seconds: float = 60
) -> bool:
    of_thread.rank = rank
    monkeypatch.setattr(meeting, "current_rank", lambda: of_thread.rank)
    config = TransferConfig(peer_timeout_seconds=patience_seconds)
    return all_arrived("meeting", count, config, "url")


of_thread = threading.local()


def test_ranks_that_all_come_load_together(monkeypatch, store, caplog):
    with ThreadPoolExecutor(3) as pool:
        answers = [pool.submit(arrive, monkeypatch, rank) for rank in range(3)]
        assert [answer.result(60) for answer in answers] == [True] * 3
    assert caplog.records == []
    assert store.get("dcp_objstore/meeting/arrivals") == b"3", "each load has its own"


def test_one_rank_decides_for_all_who_come_later_and_says_so(monkeypatch, store, caplog):
    assert not arrive(monkeypatch, 1, patience_seconds=0.01)
    (record,) = caplog.records
    assert "1 of 3 ranks" in record.getMessage()
    assert not arrive(monkeypatch, 0)
    assert not arrive(monkeypatch, 2), "the last one, too"
    assert caplog.records == [record]


class Store:
    """What a `HashStore` is, but nothing comes while it is waited for."""

    def __init__(self, others: int = 0) -> None:
        self.kept, self.others = dist.HashStore(), others
        self.waited: list[float] = []

    def wait(self, keys: list[str], timeout: datetime.timedelta) -> None:
        self.waited.append(timeout.total_seconds())
        raise dist.DistStoreError

    def add(self, key: str, number: int) -> int:
        if not number and self.others:
            self.others -= 1
            if self.kept.add(key, 1) == 3:
                self.kept.set(key.replace("arrivals", "decided"), "together")
        return self.kept.add(key, number)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kept, name)


@pytest.mark.parametrize(
    ("step", "patience", "longest"), [(600.0, 0.25, 0.25), (600.0, 60, 5), (0.002, 0.02, 0.002)]
)
def test_patience_is_five_seconds_or_the_peers_time_out_if_that_is_less(
    monkeypatch, step, patience, longest
):
    """In short steps, between which other threads have the store."""
    store = Store()
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(meeting, "STEP_SECONDS", step)
    with ThreadPoolExecutor(1) as pool:
        assert not pool.submit(arrive, monkeypatch, 0, 3, patience).result(30)
    assert max(store.waited) == pytest.approx(longest, rel=0.2)


@pytest.mark.parametrize("others", [0, 1, 2])
def test_a_rank_waits_for_others_as_long_as_they_keep_coming(others, monkeypatch):
    """One of three: the others come one by one, whenever it has run out of patience."""
    store = Store(others)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    assert arrive(monkeypatch, 0, 3, 0.001) == (others == 2)
    assert store.others == 0


def test_a_store_that_is_gone_is_the_failure_of_a_rank(monkeypatch, store):
    def broken(*_: object) -> Any:
        raise dist.DistNetworkError("Connection reset by peer")

    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", broken)
    with pytest.raises(RankFailedError) as caught:
        arrive(monkeypatch, 0)
    assert caught.value.url == "url"
