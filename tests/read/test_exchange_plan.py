"""`read.peers.plan`: every shared block is fetched once, and every rank gets what it wants."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from dcp_objstore.read.peers import plan as module
from dcp_objstore.read.peers.plan import (
    NEED,
    Needs,
    NodeCopies,
    Segment,
    SharedRequest,
    plan_exchange,
)
from dcp_objstore.transfer.ranges import Span

_BLOCK = 64


def _needs(rows: Sequence[tuple[int, ...]]) -> Needs:
    return np.array(rows, dtype=NEED)


@st.composite
def _row(draw: st.DrawFn) -> tuple[int, ...]:
    """A need of a 64-byte block: all of it, a stretch, or pieces of it."""
    number, block = draw(st.integers(0, 2)), draw(st.integers(0, 9))
    start, end = block * _BLOCK, (block + 1) * _BLOCK
    low = draw(st.integers(start, end - 1))
    high = draw(st.integers(low + 1, end))
    packed = draw(st.tuples(st.integers(1, high - low), st.integers(0, 3)) | st.just((0, -1)))
    return (number, start, end, low, high, *packed)


_jobs = st.lists(st.lists(_row(), max_size=12).map(_needs), min_size=1, max_size=5)


@given(_jobs, st.integers(1, 400), st.integers(1, 1000), st.sampled_from([0, 64, 1000]))
@settings(deadline=None)
def test_shared_blocks_are_fetched_once_and_reach_every_rank_that_needs_them(
    needs, request_size_bytes, round_size_bytes, gap_bytes
):
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
    for of_round in zip(*(plan.rounds for plan in plans), strict=True):
        own = [[r for r in requests if r.fetcher == n] for n, requests in enumerate(of_round)]
        sizes = [r.end - r.start for requests in own for r in requests]
        assert sizes
        assert len(sizes) == 1 or sum(sizes) <= round_size_bytes

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
                assert request.messages == {rank: sent.messages[rank]}
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
@settings(deadline=None)
def test_what_a_node_has_is_read_there_once_for_its_ranks_and_once_for_all_others(
    needs, holdings, request_size_bytes, round_size_bytes
):
    nodes, objects = holdings
    copies = [
        NodeCopies(node, objects[node]) if node is not None and objects[node] else None
        for node in nodes[: len(needs)]
    ]
    plans = plan_exchange(
        needs,
        request_size_bytes=request_size_bytes,
        round_size_bytes=round_size_bytes,
        copies=copies,
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
        holders = {one.node for one in copies if one is not None and place[0] in one.objects}
        found = [copies[rank] for rank in ranks]
        if holders:
            at = [one.node for one in found if one is not None and place[0] in one.objects]
            assert len(at) == len(set(at)) == len(ranks), "only on a node that has it, once on each"
        else:
            assert len(ranks) == 1
    for rank, plan in enumerate(plans):
        shared = {place for one, place in sources if one == rank}
        _check_all_arrives(rank, needs[rank], plan.rounds, shared)


def _requests(needs: Sequence[Needs], **settings: Any) -> list[SharedRequest]:
    settings = {"request_size_bytes": 128, "round_size_bytes": 9999, **settings}
    plans = plan_exchange(needs, **settings)
    return [r for rank, plan in enumerate(plans) for r in plan.fetched_by(rank)]


def _both(*blocks: tuple[int, int], number: int = 0) -> list[tuple[int, ...]]:
    """Rows of blocks that are needed whole."""
    return [(number, start, end, start, end, 0, -1) for start, end in blocks]


@pytest.mark.parametrize(
    ("blocks", "requests"),
    [
        ([(0, 50), (50, 100)], [(0, 100)]),
        ([(0, 50), (60, 100)], [(0, 100)]),
        ([(0, 50), (61, 100)], [(0, 50), (61, 100)]),
        ([(0, 50), (50, 130), (130, 201)], [(0, 130), (130, 201)]),
        ([(0, 90), (10, 20), (95, 105)], [(0, 105)]),
        ([(0, 190), (10, 20), (195, 201)], [(0, 190), (195, 201)]),
        ([(0, 500), (500, 510)], [(0, 500), (500, 510)]),
    ],
)
def test_neighbours_share_a_request_up_to_its_size_and_over_small_gaps(blocks, requests):
    """Of 200 bytes at most; a gap may have 10."""
    needs = [_needs(_both(*blocks))] * 2
    found = sorted(
        (r.start, r.end, r.blocks) for r in _requests(needs, request_size_bytes=200, gap_bytes=10)
    )
    assert [(start, end) for start, end, _ in found] == requests
    assert [block for *_, inside in found for block in inside] == blocks


@pytest.mark.parametrize("other", [(0, 1, 64), (0, 0, 32), (0, 0, 65), (1, 0, 64)])
def test_only_a_block_of_the_same_object_and_bounds_is_shared(other):
    number, start, end = other
    needs = [_needs(_both((0, 64))), _needs(_both((start, end), number=number))]
    assert _requests(needs) == []


@pytest.mark.parametrize(("bound", "rounds"), [(99, [1, 1, 1, 1, 1]), (149, [2, 2, 1]), (250, [5])])
def test_a_round_takes_requests_until_its_bound(bound, rounds):
    needs = [_needs(_both(*((n * 50, n * 50 + 50) for n in range(5))))] * 3
    plans = plan_exchange(needs, request_size_bytes=50, round_size_bytes=bound)
    for plan in plans:
        assert [len(requests) for requests in plan.rounds] == rounds
        assert [r.start for requests in plan.rounds for r in requests] == [0, 50, 100, 150, 200]
    for number, plan in enumerate(plans):
        assert [r.sequence for r in plan.fetched_by(number)] == [
            *range(len(list(plan.fetched_by(number))))
        ]


def test_who_has_least_to_fetch_fetches_next_and_of_equals_the_first():
    shared = _both(*((n * 50, n * 50 + 50) for n in range(6)))
    needs = [
        _needs([*shared, *_both((0, 120), number=1)]),
        _needs(shared),
        _needs([*shared, *_both((0, 60), (60, 120), number=2)]),
    ]
    plans = plan_exchange(needs, request_size_bytes=50, round_size_bytes=9999)
    # They have 120, 0 and 120 bytes to fetch anyway.
    assert [r.fetcher for r in plans[0].rounds[0]] == [1, 1, 1, 0, 2, 1]
    assert plans[1].alone([Span(1, 0, 120, None), Span(0, 50, 100, None)]) == [
        Span(1, 0, 120, None)
    ]


@pytest.mark.parametrize(
    ("wants", "segments"),
    [
        ([(10, 20, 0, -1)], [Segment(10, 20)]),
        ([(10, 20, 0, -1), (15, 18, 0, -1), (30, 40, 0, -1)], [Segment(10, 40)]),
        ([(31, 40, 0, -1), (10, 20, 0, -1)], [Segment(10, 20), Segment(31, 40)]),
        ([(10, 40, 0, -1), (15, 18, 0, -1), (50, 60, 0, -1)], [Segment(10, 60)]),
        ([(10, 60, 5, 3), (12, 13, 0, -1)], [Segment(12, 13), Segment(0, 64, 5, 3)]),
        ([(10, 60, 5, 3), (0, 60, 6, 4)], [Segment(0, 64, 5, 3), Segment(0, 64, 6, 4)]),
    ],
)
def test_a_message_has_what_the_reads_of_a_rank_need(monkeypatch, wants, segments):
    """A gap of up to 10 bytes between two stretches is sent, too."""
    monkeypatch.setattr(module, "DEFAULT_GAP_BYTES", 10)
    needs = [_needs(_both((0, 64))), _needs([(0, 0, 64, *want) for want in wants])]
    plans = plan_exchange(needs, request_size_bytes=64, round_size_bytes=64)
    (request,) = plans[0].fetched_by(0)
    assert sorted(request.messages[1], key=str) == sorted(segments, key=str)
    (received,) = plans[1].rounds[0]
    assert received == request


def test_a_copy_is_read_for_others_on_one_node_and_on_the_same_for_a_whole_object():
    """Which node it is changes with the object, so that the nodes have as much to send."""
    blocks = [(0, 64), (64, 128)]
    of_all = [*_both(*blocks), *_both(*blocks, number=1), *_both(*blocks, number=2)]
    copies = [NodeCopies(b"b", frozenset({0, 1, 2})), NodeCopies(b"a", frozenset({0, 1, 2})), None]
    # Nobody on the nodes needs it: any of them may read it.
    needs = [_needs([]), _needs([]), _needs(of_all)]
    requests = _requests(needs, copies=copies)
    assert sorted((r.object_number, r.fetcher, r.end) for r in requests) == [
        *((0, 1, 128), (1, 0, 128), (2, 1, 128))
    ]
    assert all(list(r.messages) == [2] for r in requests)
    # One on each node does: each reads it, and one of them for the third rank as well.
    needs = [_needs(of_all)] * 3
    plans = plan_exchange(needs, request_size_bytes=128, round_size_bytes=9999, copies=copies)
    requests = [r for n, plan in enumerate(plans) for r in plan.fetched_by(n)]
    assert sorted((r.object_number, r.fetcher) for r in requests) == [(0, 1), (1, 0), (2, 1)]
    assert plans[0].alone([Span(0, 0, 64, None)]) == [Span(0, 0, 64, None)]


def test_a_node_that_reads_it_anyway_reads_it_for_others():
    """Rather than another one that has it, too."""
    copies = [NodeCopies(b"a", frozenset({1})), NodeCopies(b"b", frozenset({1})), None]
    needs = [_needs(_both((0, 64), number=1)), _needs([]), _needs(_both((0, 64), number=1))]
    (request,) = _requests(needs, copies=copies)
    assert (request.fetcher, [*request.messages]) == (0, [2])


def test_without_copies_requests_follow_each_other_as_they_lie_in_the_object():
    """So all ranks have something to fetch in most rounds."""
    blocks = [(n * 50, n * 50 + 50) for n in range(6)]
    needs = [_needs(_both(*blocks[n // 2 :: 2])) for n in range(4)]
    plans = plan_exchange(needs, request_size_bytes=50, round_size_bytes=100)
    for number, first in enumerate([0, 0, 50, 50]):
        starts = [[r.start for r in requests] for requests in plans[number].rounds]
        assert starts == [[first], [first + 100], [first + 200]]


def test_what_a_node_reads_by_itself_counts_as_what_its_rank_fetches():
    copies = [NodeCopies(b"a", frozenset({1})), None, None]
    own = _both((0, 150), number=1)
    shared = _both(*((n * 50, n * 50 + 50) for n in range(4)))
    needs = [_needs([*shared, *own]), _needs(shared), _needs(shared)]
    plans = plan_exchange(needs, request_size_bytes=50, round_size_bytes=9999, copies=copies)
    assert [r.fetcher for r in plans[0].rounds[0]] == [1, 2, 1, 2]
    # Also if another rank gets it from there.
    needs[2] = _needs([*shared, *own])
    plans = plan_exchange(needs, request_size_bytes=200, round_size_bytes=9999, copies=copies)
    fetchers = {r.object_number: r.fetcher for requests in plans[2].rounds for r in requests}
    assert fetchers[1] == 0
