"""Plans of transfers fit the stores' limits and this machine's memory, and lose nothing."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given, strategies as st

from dcp_objstore.config import AUTO_MOST, MIB, PINNED_MOST, TransferConfig
from dcp_objstore.errors import UnsupportedError
from dcp_objstore.stores.admission.window import Window
from dcp_objstore.stores.protocol import RangeReading
from dcp_objstore.transfer.digests import BLOCK_SIZE_BYTES
from dcp_objstore.transfer.download import largest_piece, worker_count
from dcp_objstore.transfer.parts import MAX_PARTS, check_item_size, part_count, plan_parts
from dcp_objstore.transfer.ranges import RangeRequest, Span, cut, grown_request_size, plan_requests

GIB = 1024 * MIB
TIB = 1024 * GIB

# --- parts

LEAST = st.integers(5 * MIB, 64 * MIB) | st.integers(5 * MIB, 5 * GIB)


@example(6 * TIB, 5 * MIB, 5 * MIB, 5 * TIB - MIB)
@given(st.integers(0, 2**52), LEAST, st.integers(5 * MIB, 5 * TIB), st.integers(0, 5 * TIB - MIB))
def test_no_plan_exceeds_10000_parts_or_the_limits_of_a_part(total_bytes, least, limit, largest):
    largest = min(largest, total_bytes)
    plan = plan_parts(total_bytes, least, max_object_size_bytes=limit, largest_item_bytes=largest)
    assert least <= plan.part_size_bytes <= 5 * GIB
    assert plan.max_object_size_bytes <= limit
    # The limit is kept to as far as one object can have so much at all.
    assert plan.max_object_size_bytes >= min(total_bytes, limit)
    assert plan.slice_size_bytes % BLOCK_SIZE_BYTES == 0
    assert 0 < plan.slice_size_bytes <= plan.part_size_bytes
    # Any object of the plan, and one with the largest item alone, its framing included.
    for size in (plan.max_object_size_bytes, largest + MIB, min(total_bytes, limit)):
        assert part_count(size, plan.part_size_bytes) <= MAX_PARTS


def test_parts_grow_with_the_payload_while_there_are_many_as_documented():
    """The docstring of `TransferConfig` has some of these figures."""

    def mib(total_bytes: int, least_mib: int = 16, **how: bool) -> float:
        return plan_parts(total_bytes, least_mib * MIB, **how).part_size_bytes / MIB

    near = {100 * MIB: 16, 640 * MIB: 20, 640 * MIB + 32: 21, GIB: 32, 281 * GIB: 32}
    near |= {282 * GIB: 33, 9000 * 64 * MIB: 64, 9000 * 64 * MIB + 1: 65, 5 * TIB: 583}
    assert {total: mib(total) for total in near} == near
    far = {GIB: 16, 4 * GIB: 16, 5 * GIB: 20, 5 * GIB + 256: 21, 100 * GIB: 32}
    assert {total: mib(total, is_near=False) for total in far} == far
    assert mib(100 * GIB, 64) == 64
    assert round((PINNED_MOST + 2) * 583 / 1024, 1) == 5.7
    config = TransferConfig()
    most = config.max_object_size_bytes
    usual = plan_parts(100 * TIB, config.part_size_bytes, max_object_size_bytes=most)
    assert (usual.part_size_bytes, usual.max_object_size_bytes) == (32 * MIB, 256 * GIB)
    slices = [plan_parts(MIB, least * MIB).slice_size_bytes // MIB for least in (5, 16, 33, 64)]
    assert slices == [4, 16, 32, 32]
    assert plan_parts(0, 5 * MIB).max_object_size_bytes == 10_000 * 5 * MIB


def test_an_item_above_5_tib_is_refused():
    check_item_size(5 * TIB - MIB)
    with pytest.raises(UnsupportedError, match="more ranks"):
        check_item_size(5 * TIB)


# --- ranges

spans = st.builds(
    lambda number, start, size: Span(number, start, start + size, None),
    st.integers(0, 2),
    st.integers(0, 1000),
    st.integers(1, 50),
)


@given(st.lists(spans, max_size=40), st.integers(10, 200), st.integers(0, 30))
def test_every_span_is_covered_by_exactly_one_request_within_the_size(wanted, size, gap):
    requests = plan_requests(wanted, request_size_bytes=size, gap_bytes=gap)
    served = [span for request in requests for span in request.spans]
    assert sorted(map(id, served)) == sorted(map(id, wanted))
    for request in requests:
        assert all(
            span.object_number == request.object_number
            and request.start <= span.start < span.end <= request.end
            for span in request.spans
        )
        assert (
            request.end - request.start <= size
            or len({s.end for s in request.spans}) == 1
            or (request.end - request.start == max(s.end - s.start for s in request.spans))
        )
        # Between its spans a request reads no gap larger than allowed.
        reach = request.start
        for span in sorted(request.spans, key=lambda s: s.start):
            assert span.start - reach <= gap
            reach = max(reach, span.end)
        assert reach == request.end
    places = [(request.object_number, request.start, request.end) for request in requests]
    assert places == sorted(places)
    assert plan_requests(wanted[::-1], request_size_bytes=size, gap_bytes=gap) == requests


def test_neighbours_share_a_request_up_to_its_size_and_across_a_gap_of_256_kib():
    def planned(*ends: tuple[int, int], size: int = MIB) -> list[tuple[int, int]]:
        wanted = [Span(0, start, end, None) for start, end in ends]
        return [(one.start, one.end) for one in plan_requests(wanted, request_size_bytes=size)]

    gap = 256 * 1024
    assert planned((0, 10), (gap + 10, gap + 20)) == [(0, gap + 20)]
    assert planned((0, 10), (gap + 11, gap + 20)) == [(0, 10), (gap + 11, gap + 20)]
    assert planned((5, 10), (10, 20), size=15) == [(5, 20)]
    assert planned((5, 10), (10, 20), size=14) == [(5, 10), (10, 20)]
    # What a larger one has read already is not read again.
    assert planned((0, 100), (10, 20), (20, 30), size=50) == [(0, 100)]


@given(st.lists(spans, max_size=40), st.integers(10, 200), st.integers(1, 60))
def test_a_request_is_cut_between_its_spans_into_pieces_without_gaps(wanted, size, piece_size):
    for request in plan_requests(wanted, request_size_bytes=size, gap_bytes=20):
        pieces = cut(request, piece_size)
        assert (pieces[0].start, pieces[-1].end) == (request.start, request.end)
        assert all(one.end == other.start for one, other in pairwise(pieces))
        assert [span for piece in pieces for span in piece.spans] == request.spans
        for piece in pieces:
            assert all(piece.start <= s.start < s.end <= piece.end for s in piece.spans)
            # Where it could have been cut, it had not become too large yet.
            for n in range(1, len(piece.spans)):
                span = piece.spans[n]
                if span.start >= max(before.end for before in piece.spans[:n]):
                    assert span.end - piece.start <= piece_size


def test_a_piece_has_as_many_spans_as_fit_into_it():
    wanted = [Span(0, at, at + 4, None) for at in range(100, 132, 4)]
    (request,) = plan_requests(wanted, request_size_bytes=100)
    places = [(piece.start, piece.end) for piece in cut(request, 8)]
    assert places == [(100, 108), (108, 116), (116, 124), (124, 132)]
    whole = RangeRequest[None](0, 100, 132)
    assert cut(whole, 8) == [whole]


def test_requests_grow_with_what_is_loaded():
    near = {0: 8, 256: 8, 287: 8, 288: 9, 319: 9, 320: 10, 330: 10, 512: 16, 1024: 32, 2**20: 32}
    assert {mib: grown_request_size(mib * MIB, 8 * MIB) // MIB for mib in near} == near
    assert grown_request_size(1024 * MIB, 64 * MIB) == 64 * MIB
    far = {1024: 8, 1151: 8, 1152: 9, 1280: 10, 2**30: 16}  # a far store needs 4 times as much
    assert {n: grown_request_size(n * MIB, 8 * MIB, is_near=False) // MIB for n in far} == far


@pytest.mark.parametrize("gib", [1, 64])
def test_a_load_of_a_far_store_may_have_64_requests_in_flight(gib):
    config, total_bytes = TransferConfig(), gib * GIB
    size = grown_request_size(total_bytes, config.request_size_bytes, is_near=False)
    assert total_bytes >= 2 * AUTO_MOST * size
    window = Window(bytes_per_second={"open_range": 1e9})
    assert window.allowed(size, config.request_timeout_seconds, "open_range") == AUTO_MOST
    reading = RangeReading(ahead=True, memory_bytes=4 * MIB)
    budget_bytes = config.memory_budget_bytes
    assert 8 * worker_count(AUTO_MOST, BLOCK_SIZE_BYTES, budget_bytes, reading, depth=8) == 64


def test_a_budget_holds_a_piece_and_what_the_store_takes_of_each_worker():
    def fitting(piece: int, budget: int, reading: int, concurrency: int = 8, depth: int = 1) -> int:
        of_store = RangeReading(memory_bytes=reading * MIB)
        return worker_count(concurrency, piece * MIB, budget * MIB, of_store, depth=depth)

    assert [fitting(4, 128, 16), fitting(4, 8, 16)] == [6, 1]
    assert [fitting(4, 128, 4), fitting(4, 40, 4), fitting(32, 128, 4)] == [8, 5, 3]
    assert [fitting(4, 128, 4, depth=2), fitting(4, 128, 4, concurrency=3, depth=2)] == [4, 2]


def test_the_largest_piece_is_a_block_or_a_larger_span_with_the_gap_before_it():
    def largest(*places: tuple[int, int]) -> int:
        wanted = [Span(0, start, end, None) for start, end in places]
        return largest_piece(plan_requests(wanted, request_size_bytes=64 * MIB))

    assert largest(*((at, at + 4 * MIB) for at in range(0, 32 * MIB, 4 * MIB))) == 4 * MIB
    assert largest((0, 7 * MIB), (7 * MIB + 9, 8 * MIB)) == 7 * MIB
    assert largest((0, 1), (9, 9 + 4 * MIB)) == 4 * MIB + 8
    assert largest() == 0
