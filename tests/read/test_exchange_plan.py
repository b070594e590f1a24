"""`read.peers.plan`: every shared block is fetched once, and every rank gets what it wants."""

from __future__ import annotations

import threading
from collections.abc import Container
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import given, settings, strategies as st

from dcp_objstore.read.peers.exchange import Exchange
from dcp_objstore.read.peers.plan import NEED, Held, Needs, Segment, SharedRequest, plan_exchange
from dcp_objstore.transfer.progress import Progress
from dcp_objstore.transfer.ranges import RangeRequest

_BLOCK = 64


def _needs(rows: list[tuple[int, int, int, int, int, int, int]]) -> Needs:
    return np.array(rows, dtype=NEED)


@st.composite
def _row(draw: st.DrawFn) -> tuple[int, int, int, int, int, int, int]:
    """A need of a 64-byte block: all of it, a stretch, or pieces of it."""
    number, block = draw(st.integers(0, 2)), draw(st.integers(0, 9))
    start, end = block * _BLOCK, (block + 1) * _BLOCK
    low = draw(st.integers(start, end - 1))
    high = draw(st.integers(low + 1, end))
    if draw(st.booleans()):
        return (number, start, end, low, high, 0, -1)
    return (
        number,
        start,
        end,
        low,
        high,
        draw(st.integers(1, high - low)),
        draw(st.integers(0, 3)),
    )


_jobs = st.lists(st.lists(_row(), max_size=12).map(_needs), min_size=1, max_size=5)


@given(_jobs, st.integers(1, 400), st.integers(1, 1000), st.sampled_from([0, 64, 1000]))
@settings(max_examples=80, deadline=None)
def test_shared_blocks_are_fetched_once_and_reach_every_rank_that_needs_them(
    needs: list[Needs], request_size_bytes: int, round_size_bytes: int, gap_bytes: int
) -> None:
    plans = plan_exchange(
        needs,
        request_size_bytes=request_size_bytes,
        round_size_bytes=round_size_bytes,
        gap_bytes=gap_bytes,
    )
    wanted: dict[tuple[int, int, int], set[int]] = {}
    for rank, rows in enumerate(needs):
        for row in rows.tolist():
            wanted.setdefault(row[:3], set()).add(rank)
    shared = {block: ranks for block, ranks in wanted.items() if len(ranks) > 1}

    assert len({len(plan.rounds) for plan in plans}) == 1
    if not shared:
        assert plans[0].rounds == []
    fetched: list[tuple[int, int, int]] = []
    for rank, plan in enumerate(plans):
        for request in plan.fetched_by(rank):
            blocks = [(request.object_number, *block) for block in request.blocks]
            fetched += blocks
            for block in blocks:
                assert request.start <= block[1] < block[2] <= request.end
                # The fetcher verifies with its own digests, so it must need all of them.
                assert shared[block] == {rank, *request.messages}
            if len(blocks) > 1:
                assert request.end - request.start <= request_size_bytes
    assert sorted(fetched) == sorted(shared)

    for rank, plan in enumerate(plans):
        for number, requests in enumerate(plan.rounds):
            for request in requests:
                if request.fetcher == rank:
                    continue
                # Both ends must have the same idea of the message, in the same round.
                (sent,) = (
                    r
                    for r in plans[request.fetcher].rounds[number]
                    if (r.object_number, r.start) == (request.object_number, request.start)
                )
                assert sent.messages[rank] == request.messages[rank]
        _check_all_arrives(rank, needs[rank], plan.rounds, shared)


def _check_all_arrives(
    rank: int,
    rows: Needs,
    rounds: list[list[SharedRequest]],
    shared: Container[tuple[int, int, int]],
) -> None:
    own = {
        (request.object_number, *block)
        for requests in rounds
        for request in requests
        if request.fetcher == rank
        for block in request.blocks
    }
    segments = [
        (request.object_number, segment)
        for requests in rounds
        for request in requests
        if request.fetcher != rank
        for segment in request.messages[rank]
    ]
    for number, start, end, low, high, packed_bytes, read in rows.tolist():
        if (number, start, end) not in shared or (number, start, end) in own:
            continue
        if packed_bytes:
            assert any(
                of == number
                and (s.start, s.end, s.packed_bytes, s.read) == (start, end, packed_bytes, read)
                for of, s in segments
            )
        else:
            assert any(
                of == number and not s.packed_bytes and s.start <= low and high <= s.end
                for of, s in segments
            )


_NODES = [b"node 0", b"node 1", b"node 2"]
_holdings = st.tuples(
    st.lists(st.sampled_from([*_NODES, None]), min_size=5, max_size=5),  # of each rank
    st.fixed_dictionaries({node: st.frozensets(st.integers(0, 2)) for node in _NODES}),
)


@given(_jobs, _holdings, st.integers(1, 400), st.integers(1, 1000))
@settings(max_examples=80, deadline=None)
def test_what_a_node_has_is_read_there_once_for_its_ranks_and_once_for_all_others(
    needs: list[Needs],
    holdings: tuple[list[bytes | None], dict[bytes, frozenset[int]]],
    request_size_bytes: int,
    round_size_bytes: int,
) -> None:
    nodes, objects = holdings
    held = [
        Held(node, objects[node]) if node is not None and objects[node] else None
        for node in nodes[: len(needs)]
    ]
    plans = plan_exchange(
        needs,
        request_size_bytes=request_size_bytes,
        round_size_bytes=round_size_bytes,
        held=held,
    )
    requests = [one for rank, plan in enumerate(plans) for one in plan.fetched_by(rank)]
    readers: dict[tuple[int, int, int], list[int]] = {}
    sources: dict[tuple[int, tuple[int, int, int]], int] = {}
    for request in requests:
        for block in request.blocks:
            place = (request.object_number, *block)
            readers.setdefault(place, []).append(request.fetcher)
            for rank in (request.fetcher, *request.messages):
                assert (rank, place) not in sources, "it comes from one rank"
                sources[rank, place] = request.fetcher
    wanted = {(rank, row[:3]) for rank, rows in enumerate(needs) for row in rows.tolist()}
    for rank, place in wanted:
        if (rank, place) not in sources:
            readers.setdefault(place, []).append(rank)  # it reads the block itself
    for place, ranks in readers.items():
        holders = {one.node for one in held if one is not None and place[0] in one.objects}
        found = [held[rank] for rank in ranks]
        if holders:
            at = [one.node for one in found if one is not None and place[0] in one.objects]
            assert len(at) == len(set(at)) == len(ranks), "only on a node that has it, once on each"
        else:
            assert len(ranks) == 1
    for rank, plan in enumerate(plans):
        shared = {place for one, place in sources if one == rank}
        _check_all_arrives(rank, needs[rank], plan.rounds, shared)


@given(_jobs)
@settings(max_examples=40, deadline=None)
def test_without_copies_the_plan_is_as_if_there_were_no_nodes(needs: list[Needs]) -> None:
    sizes = {"request_size_bytes": 200, "round_size_bytes": 400}
    plans = plan_exchange(needs, **sizes)
    assert plan_exchange(needs, **sizes, held=[None] * len(needs)) == plans
    assert plan_exchange(needs, **sizes, held=[Held(b"node", frozenset())] * len(needs)) == plans


@given(_jobs, st.integers(64, 1000))
@settings(max_examples=60, deadline=None)
def test_a_round_has_no_more_bytes_than_its_bound(needs: list[Needs], bound: int) -> None:
    plans = plan_exchange(needs, request_size_bytes=128, round_size_bytes=bound)
    for number in range(len(plans[0].rounds)):
        sizes = [
            request.end - request.start
            for rank, plan in enumerate(plans)
            for request in plan.rounds[number]
            if request.fetcher == rank
        ]
        assert sizes
        assert len(sizes) == 1 or sum(sizes) <= bound


def test_replicas_are_fetched_evenly_by_bytes() -> None:
    every_block = _needs([(0, n * 64, n * 64 + 64, n * 64, n * 64 + 64, 0, -1) for n in range(64)])
    plans = plan_exchange([every_block] * 8, request_size_bytes=128, round_size_bytes=1024)
    fetched = [sum(r.end - r.start for r in plan.fetched_by(n)) for n, plan in enumerate(plans)]
    assert fetched == [64 * 64 // 8] * 8


def test_a_rank_with_much_to_fetch_alone_fetches_nothing_for_others() -> None:
    both = [(0, n * 64, n * 64 + 64, n * 64, n * 64 + 64, 0, -1) for n in range(4)]
    alone = [(1, 0, 4096, 0, 4096, 0, -1)]
    plans = plan_exchange(
        [_needs(both + alone), _needs(both)], request_size_bytes=64, round_size_bytes=1024
    )
    assert list(plans[0].fetched_by(0)) == []
    assert len(list(plans[1].fetched_by(1))) == 4


def test_many_small_neighbours_make_one_request_and_one_segment_each() -> None:
    small = _needs(
        [(0, n * 2048, n * 2048 + 1024, n * 2048, n * 2048 + 1024, 0, -1) for n in range(4000)]
    )
    plans = plan_exchange([small] * 4, request_size_bytes=8 << 20, round_size_bytes=8 << 20)
    requests = [r for rank, plan in enumerate(plans) for r in plan.fetched_by(rank)]
    assert len(requests) == 1
    assert all(len(segments) == 1 for segments in requests[0].messages.values())


def test_a_worker_that_waits_for_a_slot_ends_with_the_transfer() -> None:
    """No other rank may ever free one: it may have failed."""
    waiting: Any = Exchange.__new__(Exchange)
    request, planned = RangeRequest(0, 0, 4), SimpleNamespace(sequence=0, start=0, end=4)
    waiting._fetched = {id(request): planned}
    waiting._changed = threading.Condition()
    waiting._admitted, waiting._freed, waiting._slot_bytes = 0, -2, 4
    waiting._slots = SimpleNamespace(size_bytes=8)
    progress = Progress(60)
    with ThreadPoolExecutor(1) as pool:
        admitted = pool.submit(waiting.admit, request, progress)
        progress.stop(ZeroDivisionError())
        try:
            assert isinstance(admitted.exception(30), ZeroDivisionError)
        finally:
            waiting._freed = 0
            with waiting._changed:
                waiting._changed.notify_all()


def test_a_segment_is_as_long_as_what_is_packed_of_it_or_as_its_bytes() -> None:
    assert Segment(64, 96).length_bytes == 32
    assert Segment(64, 128, packed_bytes=10, read=3).length_bytes == 10
