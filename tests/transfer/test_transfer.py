"""Transfer: what is planned fits the stores' limits, what is moved arrives, what fails, ends."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import secrets
import select
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import example, given, strategies as st
from msgspec.structs import replace

from dcp_objstore.config import AUTO_MOST, MIB, PINNED_MOST, TransferConfig
from dcp_objstore.errors import (
    ConfigError,
    CorruptDataError,
    InputError,
    PermissionDeniedError,
    StoreUnavailableError,
    TransferStalledError,
    UnsupportedError,
    UploadLostError,
)
from dcp_objstore.observe.events import ObjectUploaded, PartUploaded, RangeRead, Retried
from dcp_objstore.stores import open_store
from dcp_objstore.stores.admission.limiter import limiter_of
from dcp_objstore.stores.admission.window import Window
from dcp_objstore.stores.protocol import ObjectMeta, ObjectStore, RangeBody, RangeReading, Version
from dcp_objstore.stores.ranges import FetchedSource, Range
from dcp_objstore.stores.wrappers import WrappedStore
from dcp_objstore.threads import spawn, wait_for, wait_until
from dcp_objstore.transfer.digests import BLOCK_SIZE_BYTES
from dcp_objstore.transfer.download import (
    _depth,
    _Gate,
    _Shared,
    fetch_ranges,
    largest_piece,
    worker_count,
)
from dcp_objstore.transfer.memory import new_memory
from dcp_objstore.transfer.parts import MAX_PARTS, PartPlan, check_item_size, part_count, plan_parts
from dcp_objstore.transfer.progress import Progress, Silence
from dcp_objstore.transfer.ranges import RangeRequest, Span, cut, grown_request_size, plan_requests
from dcp_objstore.transfer.stragglers import Stragglers
from dcp_objstore.transfer.upload import _Tracked, run_watched, upload_object
from dcp_objstore.transfer.workers import concurrently
from tests.support.listening import heard_channel, of
from tests.support.wrapped_stores import ChangingStore, RecordingStore

if TYPE_CHECKING:
    from typing_extensions import Buffer

PART = 5 * MIB


TIB = 1024 * 1024 * MIB
LEAST = st.integers(5 * MIB, 64 * MIB) | st.integers(5 * MIB, 5 * 1024 * MIB)


@example(6 * TIB, 5 * MIB, 5 * MIB, 5 * TIB - MIB)
@given(st.integers(0, 2**52), LEAST, st.integers(5 * MIB, 5 * TIB), st.integers(0, 5 * TIB - MIB))
def test_no_plan_exceeds_10000_parts_or_the_limits_of_a_part(total_bytes, least, limit, largest):
    largest = min(largest, total_bytes)
    plan = plan_parts(total_bytes, least, max_object_size_bytes=limit, largest_item_bytes=largest)
    assert least <= plan.part_size_bytes <= 5 * 1024 * MIB
    assert plan.max_object_size_bytes <= limit
    # The limit is kept to as far as one object can have so much at all.
    assert plan.max_object_size_bytes >= min(total_bytes, limit)
    assert plan.slice_size_bytes % BLOCK_SIZE_BYTES == 0
    assert 0 < plan.slice_size_bytes <= plan.part_size_bytes
    # Any object of the plan, and one with the largest item alone, its framing included.
    for size in (plan.max_object_size_bytes, largest + MIB, min(total_bytes, limit)):
        assert part_count(size, plan.part_size_bytes) <= MAX_PARTS


def test_parts_of_the_default_limit_stay_small_and_those_of_5_tib_are_as_documented():
    """The figures in the docstring of `TransferConfig`."""
    config = TransferConfig()
    usual = plan_parts(
        100 * TIB, config.part_size_bytes, max_object_size_bytes=config.max_object_size_bytes
    )
    assert usual.part_size_bytes == 32 * MIB
    assert usual.max_object_size_bytes == 256 * 1024 * MIB
    assert plan_parts(281 * 1024 * MIB, 16 * MIB).part_size_bytes == 32 * MIB
    assert plan_parts(282 * 1024 * MIB, 16 * MIB).part_size_bytes > 32 * MIB
    largest = plan_parts(5 * TIB, 16 * MIB).part_size_bytes
    assert largest == 583 * MIB
    assert round((PINNED_MOST + 2) * largest / 1024**3, 1) == 5.7


def test_an_item_above_5_tib_is_refused_and_the_limit_of_objects_is_bounded():
    check_item_size(5 * TIB - MIB)
    with pytest.raises(UnsupportedError, match="more ranks"):
        check_item_size(5 * TIB)
    with pytest.raises(ConfigError, match="5 TiB"):
        TransferConfig(max_object_size_bytes=5 * TIB + 1)
    with pytest.raises(ConfigError, match="max_object_size_bytes"):
        TransferConfig(max_object_size_bytes=5 * MIB - 1)


def test_large_payloads_go_in_larger_parts_while_there_are_still_many():
    assert plan_parts(100 * MIB, 16 * MIB).part_size_bytes == 16 * MIB
    assert plan_parts(1024 * MIB, 16 * MIB).part_size_bytes == 32 * MIB
    assert plan_parts(100 * 1024 * MIB, 16 * MIB).part_size_bytes == 32 * MIB
    assert plan_parts(100 * 1024 * MIB, 64 * MIB).part_size_bytes == 64 * MIB
    # At the limits: 32 and, of a far store, 256 parts, and 9,000 of the largest.
    for parts, is_near in ((32, True), (256, False)):
        for more, mib in ((0, 20), (1, 21)):
            plan = plan_parts(parts * 20 * MIB + parts * more, 16 * MIB, is_near=is_near)
            assert plan.part_size_bytes == mib * MIB
    for more, mib in ((0, 64), (1, 65)):
        assert plan_parts(9000 * 64 * MIB + more, 16 * MIB).part_size_bytes == mib * MIB
    slices = [plan_parts(MIB, least * MIB).slice_size_bytes for least in (5, 16, 32, 33, 64)]
    assert slices == [4 * MIB, 16 * MIB, 32 * MIB, 32 * MIB, 32 * MIB]
    assert plan_parts(10 * 1024 * 1024 * MIB, 16 * MIB).part_size_bytes > 500 * MIB
    far = [plan_parts(gib * 1024 * MIB, 16 * MIB, is_near=False) for gib in (1, 2, 4, 100)]
    assert [plan.part_size_bytes // MIB for plan in far] == [16, 16, 16, 32]


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


@pytest.mark.parametrize(
    ("total", "least", "size"),
    [
        (0, 8, 8),
        (256, 8, 8),
        (512, 8, 16),
        (1024, 8, 32),
        (2**20, 8, 32),
        (1024, 64, 64),
        (330, 8, 10),
        (320, 8, 10),
        (319, 8, 9),
        (288, 8, 9),
        (287, 8, 8),
    ],
)
def test_requests_grow_with_what_is_loaded(total, least, size):
    assert grown_request_size(total * MIB, least * MIB) == size * MIB
    if size < 16:  # a far store needs 4 times as much
        far = grown_request_size(4 * total * MIB, least * MIB, is_near=False)
        assert far == size * MIB
    assert grown_request_size(10**15, MIB, is_near=False) == 16 * MIB


def test_a_piece_has_as_many_spans_as_fit_into_it():
    spans = [Span(0, at, at + 4, None) for at in range(100, 132, 4)]
    (request,) = plan_requests(spans, request_size_bytes=100)
    places = [(piece.start, piece.end) for piece in cut(request, 8)]
    assert places == [(100, 108), (108, 116), (116, 124), (124, 132)]
    whole = RangeRequest[None](0, 100, 132)
    assert cut(whole, 8) == [whole]


@pytest.mark.parametrize("gib", [1, 2, 4, 64])
def test_a_load_of_a_far_store_may_have_64_requests_in_flight(gib):
    settings, total_bytes = TransferConfig(), gib * 1024 * MIB
    size = grown_request_size(total_bytes, settings.request_size_bytes, is_near=False)
    assert total_bytes >= 2 * AUTO_MOST * size
    known = Window(bytes_per_second={"open_range": 1e9})
    assert known.allowed(size, settings.request_timeout_seconds, "open_range") == AUTO_MOST
    spans = [
        Span(0, at, at + BLOCK_SIZE_BYTES, None) for at in range(0, total_bytes, BLOCK_SIZE_BYTES)
    ]
    requests = plan_requests(spans, request_size_bytes=size)
    reading = RangeReading(ahead=True, memory_bytes=4 * MIB)
    piece_bytes = largest_piece(requests)
    workers = worker_count(AUTO_MOST, piece_bytes, settings.memory_budget_bytes, reading, depth=8)
    assert 8 * workers == AUTO_MOST


class _InTurn(WrappedStore):
    """Its ranges can be sent ahead; it notes when each is opened and read."""

    range_reading = RangeReading(ahead=True)

    def __init__(self, inner: ObjectStore) -> None:
        super().__init__(inner)
        self.seen: list[tuple[str, int]] = []

    def open_range(self, key: str, start: int, end: int) -> RangeBody:
        self.seen.append(("open", start))
        body = super().open_range(key, start, end)
        fill = body.readinto

        def readinto(into: memoryview) -> None:
            self.seen.append(("read", start))
            fill(into)

        body.readinto = readinto  # type: ignore[method-assign]
        return body


@pytest.mark.parametrize(
    ("cores", "takes_gil", "depths"),
    [
        (1, False, (8, 8, 2)),
        (2, False, (4, 8, 2)),
        (3, False, (2, 8, 2)),
        (4, False, (2, 8, 2)),
        (64, False, (2, 8, 2)),
        (1, True, (8, 8, 2)),
        (2, True, (8, 8, 2)),
        (4, True, (4, 8, 2)),
        (6, True, (2, 8, 2)),
        (64, True, (2, 8, 2)),
    ],
)
def test_a_worker_has_few_requests_under_way_if_each_worker_has_a_processor(
    cores, takes_gil, depths, monkeypatch
):
    monkeypatch.setattr("dcp_objstore.transfer.download.processors", lambda: cores)
    ahead = RangeReading(ahead=True, takes_gil=takes_gil)
    assert tuple(_depth(concurrency, ahead) for concurrency in (8, 64, 1)) == depths
    assert _depth(64, RangeReading(takes_gil=takes_gil)) == 1


@pytest.mark.parametrize("local", [(), (1,)])
def test_a_worker_reads_its_requests_in_turn_a_piece_at_a_time(local, monkeypatch):
    monkeypatch.setattr("dcp_objstore.transfer.download.processors", lambda: 2)
    monkeypatch.setattr("dcp_objstore.transfer.download.worker_count", lambda *_, **__: 1)
    monkeypatch.setattr("dcp_objstore.transfer.download.BLOCK_SIZE_BYTES", 4)
    made = Mock(wraps=new_memory)
    monkeypatch.setattr("dcp_objstore.transfer.download.new_memory", made)
    data = bytes(range(64))
    store = _InTurn(open_store(f"memory://{secrets.token_hex(6)}"))
    store.put("x", [data])
    requests = [
        RangeRequest(
            number := int(at == 8), at, at + 8, [Span(number, n, n + 4, None) for n in (at, at + 4)]
        )
        for at in range(0, len(data), 8)
    ]
    came = bytearray(len(data))

    def consume(piece: RangeRequest[None], body: Buffer) -> None:
        came[piece.start : piece.end] = body

    config = TransferConfig(download_concurrency=8)
    fetched = fetch_ranges(store, ["x", "x"], requests, consume, config, Progress(60), local=local)
    with contextlib.closing(fetched) as arriving:
        assert [request for request in arriving if request is not None] == requests
    assert came == data
    made.assert_called_once_with(4)  # it is kept from piece to piece
    starts = [request.start for request in requests]
    turns = [(what, start) for what in ("open", "read") for start in starts[:4]]
    assert store.seen[: len(turns)] == turns
    assert store.seen.count(("open", starts[-1])) == 1


def test_a_worker_that_has_nothing_under_way_waits_for_memory():
    store = _InTurn(open_store(f"memory://{secrets.token_hex(6)}"))
    store.put("x", [bytes(40)])
    fetched = fetch_ranges(
        store,
        ["x"],
        requests_of(40, 4),
        lambda *_: None,
        TransferConfig(download_concurrency=1),
        Progress(5),
        admit=lambda *_: None,
        may_begin=lambda _: False,
    )
    assert len(list(fetched)) == 10
    assert [what for what, _ in store.seen] == ["open", "read"] * 10


@pytest.mark.parametrize("slots", [1, 2, 5])
def test_what_must_wait_for_memory_is_begun_when_nothing_before_it_is_unread(slots, monkeypatch):
    """Otherwise a thread would wait for memory that only it can free."""
    monkeypatch.setattr("dcp_objstore.transfer.download.processors", lambda: 1)
    monkeypatch.setattr("dcp_objstore.transfer.download.worker_count", lambda *_, **__: 1)
    store = _InTurn(open_store(f"memory://{secrets.token_hex(6)}"))
    store.put("x", [bytes(range(40))])
    requests = [RangeRequest(0, at, at + 4, [Span(0, at, at + 4, None)]) for at in range(0, 40, 4)]
    in_slots = requests[:7]
    free, filled = [memoryview(bytearray(4)) for _ in range(slots)], {}

    def admit(request: RangeRequest[None], progress: Progress) -> memoryview | None:
        if request not in in_slots:
            return None
        assert free, "it waits for ever"
        filled[request.start] = free.pop()
        return filled[request.start]

    def consume(request: RangeRequest[None], body: Buffer) -> None:
        assert bytes(body) == bytes(range(request.start, request.end))
        if request in in_slots:
            free.append(filled.pop(request.start))

    fetched = fetch_ranges(
        store,
        ["x"],
        requests,
        consume,
        TransferConfig(download_concurrency=8),
        Progress(60),
        admit=admit,
        may_begin=lambda request: request not in in_slots or bool(free),
    )
    assert len([request for request in fetched if request is not None]) == len(requests)
    opened = list(itertools.takewhile(lambda seen: seen[0] == "open", store.seen))
    assert len(opened) == slots


def test_what_one_thread_has_under_way_never_shares_a_row_of_the_trace(monkeypatch):
    monkeypatch.setattr("dcp_objstore.transfer.download.worker_count", lambda *_, **__: 1)
    store = _InTurn(open_store(f"memory://{secrets.token_hex(6)}"))
    store.put("x", [bytes(48 * MIB)])
    ends = [0, 24 * MIB, *range(28 * MIB, 49 * MIB, 4 * MIB)]  # the first one takes six turns
    requests = [
        RangeRequest(
            0, start, end, [Span(0, at, at + 4 * MIB, None) for at in range(start, end, 4 * MIB)]
        )
        for start, end in pairwise(ends)
    ]
    channel, heard = heard_channel()
    progress = Progress(60, channel)
    config = TransferConfig(download_concurrency=8)
    for _ in fetch_ranges(store, ["x"], requests, lambda *_: None, config, progress):
        pass
    channel.flush()
    rows: dict[int, list[tuple[int, int]]] = {}
    for read in of(RangeRead, heard):
        rows.setdefault(read.worker, []).append((read.start_ns, read.end_ns))
    assert len(rows) > 1
    told = [(read.offset, read.offset + read.size_bytes) for read in of(RangeRead, heard)]
    assert sorted(told) == list(pairwise(ends))
    assert progress.moved_bytes == 48 * MIB
    for times in rows.values():
        assert all(earlier[1] <= later[0] for earlier, later in pairwise(sorted(times)))


def test_a_budget_holds_a_piece_and_what_the_store_takes_of_each_worker():
    fetched, streamed = RangeReading(memory_bytes=16 * MIB), RangeReading(memory_bytes=4 * MIB)
    assert worker_count(8, 4 * MIB, 128 * MIB, fetched) == 6
    assert worker_count(8, 4 * MIB, 128 * MIB, streamed) == 8
    assert worker_count(8, 4 * MIB, 40 * MIB, streamed) == 5
    assert worker_count(8, 4 * MIB, 8 * MIB, fetched) == 1
    assert worker_count(8, 4 * MIB, 128 * MIB, streamed, depth=2) == 4
    assert worker_count(3, 4 * MIB, 128 * MIB, streamed, depth=2) == 2
    assert worker_count(8, 32 * MIB, 128 * MIB, streamed) == 3


def test_the_largest_piece_is_a_block_or_a_larger_span_with_the_gap_before_it():
    def requests(*spans: tuple[int, int]) -> list[RangeRequest[None]]:
        whole = [Span(0, start, end, None) for start, end in spans]
        return [*plan_requests(whole, request_size_bytes=64 * MIB)]

    blocks = [(at, at + 4 * MIB) for at in range(0, 32 * MIB, 4 * MIB)]
    assert largest_piece(requests(*blocks)) == 4 * MIB
    assert largest_piece(requests((0, 7 * MIB), (7 * MIB + 9, 8 * MIB))) == 7 * MIB
    assert largest_piece(requests((0, 1), (9, 9 + 4 * MIB))) == 4 * MIB + 8
    assert largest_piece([]) == 0


def config(**settings) -> TransferConfig:
    return TransferConfig(**{"part_size_bytes": PART, **settings})


def plan() -> PartPlan:
    return plan_parts(0, PART)


def random_bytes(size_bytes: int) -> np.ndarray:
    return np.random.default_rng(size_bytes).integers(0, 256, size_bytes, dtype=np.uint8)


@pytest.mark.parametrize("size_bytes", [0, 1, PART - 1, PART, PART + 1, 3 * PART, 3 * PART + 7])
def test_an_upload_of_any_size_arrives_whole_and_reports_its_parts(size_bytes, tmp_path):
    store = RecordingStore(open_store(f"file://{tmp_path}"))
    body = random_bytes(size_bytes)
    pieces = (body[n : n + 2 * MIB] for n in range(0, size_bytes, 2 * MIB))
    channel, heard = heard_channel()
    progress = Progress(60, channel)
    done = upload_object(store, "o", pieces, plan(), config(), progress)
    channel.flush()
    assert store.get("o", max_size_bytes=100 * MIB)[0] == body.tobytes()
    assert done.size_bytes == size_bytes
    assert done.parts == part_count(size_bytes, PART)
    assert progress.moved_bytes == size_bytes
    told = of(PartUploaded, heard)
    assert [part.part for part in told] == list(range(done.parts if size_bytes else 0))
    full, rest = divmod(size_bytes, PART)
    assert [part.size_bytes for part in told] == [PART] * full + [rest] * bool(rest)
    (whole,) = of(ObjectUploaded, heard)
    assert (whole.object_key, whole.size_bytes, whole.parts) == ("o", size_bytes, done.parts)
    verbs = [request.verb for request in store.requests if request.verb.startswith("put")]
    assert verbs == (["put"] if size_bytes <= PART else ["put_stream"])


@pytest.mark.parametrize("is_own", [True, False])
@pytest.mark.parametrize("left", ["all", "another", "nothing", "no answer"])
def test_a_lost_upload_is_believed_only_if_its_object_is_not_there(is_own, left):
    """Its end took effect, the answer was lost, and a later try heard that it is gone."""

    class LosesTheAnswer(WrappedStore):
        def put_stream(self, key: str, buffers: Any, **settings: int) -> Version:
            body = b"".join(buffers)
            if left != "nothing":
                self.inner.put(key, body[left == "another" :])
            raise UploadLostError("no such upload")

        def head(self, key: str) -> ObjectMeta:
            if left == "no answer":
                raise PermissionDeniedError("no")
            return self.inner.head(key)

    inner = open_store(f"memory://{secrets.token_hex(6)}")
    store, pieces = LosesTheAnswer(inner), np.split(np.zeros(3 * PART, np.uint8), 6)
    upload = partial(upload_object, store, "o", pieces, plan(), config(), Progress(60))
    if is_own and left == "all":
        done = upload(is_own=True)
        assert (done.size_bytes, done.version) == (3 * PART, inner.head("o").version)
    else:
        with pytest.raises(UploadLostError):
            upload(is_own=is_own)


class Stub:
    """What a transfer asks of any store."""

    endpoint_url = None
    reports_throttling = ()
    range_reading = RangeReading()

    def open_range(self, key, start, end):
        return Range(FetchedSource(self.fetch), start, end, contextlib.nullcontext)


class Stuck(Stub):
    url = "stub://stuck"

    """A store whose transfers do not end before they are let go; a real server cannot be told
    to accept a connection and then hold still at will in-process."""

    def __init__(self) -> None:
        self.let_go = threading.Event()
        self.ended = threading.Event()

    def put_stream(self, key, buffers, *, part_size_bytes, max_concurrency):
        try:
            held = [next(buffers), next(buffers)]
            assert limiter_of(self).in_flight
            self.let_go.wait(30)
            del held
            for _ in buffers:
                pass
        finally:
            self.ended.set()

    put = None


def elsewhere(function, *args):
    """In a thread as an async save has it, where no Ctrl-C can come."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *args).result()


def here(function, *args):
    return function(*args)


@pytest.mark.parametrize("where", [here, elsewhere])
def test_a_stalled_upload_raises_gives_back_its_places_and_is_told_to_abort(monkeypatch, where):
    """Its thread may hang for ever: the places must not wait for that."""
    monkeypatch.setattr("dcp_objstore.transfer.upload._ABORT_GRACE_SECONDS", 0.2)
    store = Stuck()
    pieces = (random_bytes(4 * MIB) for _ in range(4))
    with pytest.raises(TransferStalledError, match="incomplete multipart upload may be left"):
        where(upload_object, store, "o", pieces, plan(), config(), Progress(0.3))
    assert not store.ended.is_set()
    assert limiter_of(store).in_flight == 0
    store.let_go.set()
    assert store.ended.wait(10)


def test_an_interrupt_ends_a_stalled_upload_at_once(monkeypatch):
    monkeypatch.setattr("dcp_objstore.transfer.upload._ABORT_GRACE_SECONDS", 0.2)
    store = Stuck()
    progress = Progress(600)

    def interrupted(_: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(progress, "check_stalled", interrupted)
    with pytest.raises(KeyboardInterrupt):
        upload_object(
            store, "o", (random_bytes(4 * MIB) for _ in range(4)), plan(), config(), progress
        )
    store.let_go.set()
    assert store.ended.wait(10)


def test_an_upload_that_ends_in_the_instant_it_is_polled_is_no_time_out(monkeypatch):
    class EndsAsItIsPolled(Future):
        """Its first wait runs out just before the result is there."""

        polled = False

        def exception(self, timeout=None):
            if self.polled:
                return super().exception(timeout)
            self.polled = True
            super().exception(10)
            raise TimeoutError

    monkeypatch.setattr("dcp_objstore.transfer.workers.Future", EndsAsItIsPolled)
    assert run_watched(lambda: "done", "upload", Progress(60)) == "done"


def test_an_uploads_own_time_out_is_passed_on():
    def time_out():
        raise TimeoutError("the task's")

    with pytest.raises(TimeoutError, match="the task's"):
        run_watched(time_out, "upload", Progress(60))


def test_a_part_under_way_has_the_lowest_number_that_is_free():
    class Holding(Stub):
        url = "stub://holding"

        """Free the second of three parts, take another, and free all of them."""

        def put_stream(self, key, buffers, **_):
            held = [next(buffers) for _ in range(3)]
            del held[1]
            held.append(next(buffers))
            assert next(buffers, None) is None

    channel, heard = heard_channel()
    pieces = (random_bytes(PART) for _ in range(4))
    upload_object(Holding(), "o", pieces, plan(), config(), Progress(60, channel))
    channel.flush()
    workers = {part.part: part.worker for part in of(PartUploaded, heard)}
    assert workers == {0: 0, 1: 1, 2: 2, 3: 1}
    assert of(PartUploaded, heard)[0].part == 1  # the first that ended


def tracked_in(progress: Progress, pieces: Any, *, slot: Any, part_size_bytes: int = 10) -> Any:
    """The buffers of an object, of which two parts may be under way."""
    silence = Silence(Stub(), "o", progress)
    return _Tracked(pieces, silence, part_size_bytes=part_size_bytes, slot=slot, ahead=2)


def test_an_upload_that_waits_for_its_turn_can_be_stopped():
    progress = Progress(60)

    class Slot:
        def begin(self, part, check=lambda: None):
            progress.stop(KeyboardInterrupt())
            check()

    tracked = tracked_in(progress, [np.zeros(10, np.uint8)], slot=Slot(), part_size_bytes=5)
    with pytest.raises(KeyboardInterrupt):
        next(tracked)


def test_an_object_has_no_more_parts_than_stores_take_however_little_is_planned():
    assert plan_parts(0, 5 * MIB).max_object_size_bytes == 10_000 * 5 * MIB


class Places:
    """Stands for an `AdmissionSlot`, and records which parts began, ended and were answered."""

    def __init__(self):
        self.begun, self.ended, self.answered = [], [], []

    def begin(self, part, check):
        self.begun.append(part)

    def release(self, part):
        self.ended.append(part)

    def end(self, part, size_bytes, *, answered):
        assert answered
        self.answered.append((part, size_bytes))


@pytest.mark.parametrize(
    ("sizes", "begun", "ended"),
    [
        ([10, 10, 10], [0, 1, 2], [[0], [1], [2]]),
        ([4, 6, 10], [0, 1], [[], [0], [1]]),
        ([15, 5], [0, 1], [[0], [], [1]]),
        ([11, 9], [0, 1], [[0], [], [1]]),
        ([35], [0, 1, 2], [[0], [1], [2], [3]]),
        ([0, 10, 0, 9], [0], [[], [0], [], [1]]),
    ],
)
def test_a_part_ends_when_all_of_its_buffers_are_dropped_and_no_other_does(sizes, begun, ended):
    """A part that ended too early would let more requests begin than the window allows."""
    places, progress = Places(), Progress(60)
    pieces = [np.zeros(size, np.uint8) for size in sizes]
    tracked = tracked_in(progress, pieces, slot=places)
    held = list(tracked)
    assert places.begun == begun
    for parts in ended:
        places.ended.clear()
        del held[0]
        assert places.ended == parts
    assert not tracked._under_way
    tracked.end()
    assert progress.moved_bytes == sum(sizes)


@pytest.mark.parametrize(
    ("sizes", "cut", "parts"),
    [
        ([10, 10], [10, 10], [10, 10]),
        ([4, 6, 3], [4, 6, 3], [10, 3]),
        ([15, 5], [10, 5, 5], [10, 10]),
        ([8, 30, 1], [8, 2, 10, 10, 8, 1], [10, 10, 10, 9]),
        ([0, 4, 0, 6, 0], [0, 4, 0, 6, 0], [10]),
        ([], [], []),
    ],
)
@pytest.mark.parametrize("at_once", [True, False])
def test_a_buffer_is_cut_where_a_part_ends_and_every_part_is_reported(sizes, cut, parts, at_once):
    channel, heard = heard_channel()
    pieces = [np.full(size, number, np.uint8) for number, size in enumerate(sizes)]
    progress = Progress(60, channel)
    tracked = tracked_in(progress, iter(pieces), slot=Places())
    held, body = [], bytearray()
    for buffer in tracked:
        held.append(buffer.nbytes if at_once else buffer)
        body += buffer.tobytes()
        del buffer
    sent = held if at_once else [buffer.nbytes for buffer in held]
    assert sent == cut
    assert body == b"".join(piece.tobytes() for piece in pieces)
    tracked.end()
    held.clear()
    channel.flush()
    told = [(one.part, one.size_bytes, one.object_key) for one in of(PartUploaded, heard)]
    assert told == [(number, size, "o") for number, size in enumerate(parts)]
    workers = {one.worker for one in of(PartUploaded, heard)}
    assert len(workers) == (min(1, len(parts)) if at_once else len(parts))


def test_of_the_parts_that_ended_only_those_count_that_later_ones_vouch_for():
    """A transport drops the buffers of a part that failed, too, and of all others that it gives up.

    It asks for more only while at most so many parts are without a good answer.
    """
    channel, heard = heard_channel()
    progress = Progress(60, channel)
    pieces = (np.zeros(5, np.uint8) for _ in range(10))
    tracked = tracked_in(progress, pieces, slot=Places())
    counts, held = [], []
    for buffer in tracked:
        held.append(buffer)
        del buffer
        if len(counts) == 5:  # the first two parts of three, in the other order
            del held[2:4]
            del held[:2]
        counts.append(progress.moved_bytes)
    # While the 7th buffer is asked for, 3 parts were handed over, and one of them must be there.
    assert counts == [0, 0, 0, 0, 0, 0, 10, 10, 20, 20]
    held.clear()  # the transport gives up
    channel.flush()
    assert [part.part for part in of(PartUploaded, heard)] == [1, 0]
    assert progress.moved_bytes == 20


def test_a_part_counts_as_answered_when_more_is_asked_for_and_not_when_it_is_dropped():
    """The window would learn from parts that failed how fast the line is."""
    places = Places()
    tracked = tracked_in(Progress(60), (np.zeros(5, np.uint8) for _ in range(8)), slot=places)
    held = [next(tracked) for _ in range(6)]
    del held[:2]
    assert (places.ended, places.answered) == ([0], [])
    next(tracked)
    assert places.answered == [(0, 10)]
    held.clear()  # the transport gives up, and asks for no more
    assert (sorted(places.ended), places.answered) == ([0, 1, 2], [(0, 10)])


def test_a_failed_upload_has_no_successful_part_and_no_rate():
    class Failing(Stub):
        url = f"stub://{secrets.token_hex(4)}"

        def put_stream(self, key: str, buffers: Any, **_: object) -> Version:
            held = [next(buffers) for _ in range(4)]
            held.clear()
            raise PermissionDeniedError("no")

    limiter = limiter_of(Failing())
    while limiter.spend_retry():
        pass
    pieces = (random_bytes(PART) for _ in range(8))
    with pytest.raises(PermissionDeniedError):
        upload_object(Failing(), "o", pieces, plan(), config(), Progress(60))
    assert limiter.in_flight == 0
    assert limiter.window == Window(round=limiter.window.round)
    assert limiter.window.round.answers == 0
    limiter.refund_retry()
    assert not limiter.spend_retry()


class LosesUploads(WrappedStore):
    """Loses so many uploads when it has asked for so many buffers."""

    def __init__(self, inner: ObjectStore, times: int, after: int) -> None:
        super().__init__(inner)
        self.times, self.after, self.streams = times, after, 0

    def put_stream(self, key: str, buffers: Any, **settings: int) -> Version:
        self.streams += 1
        if self.streams > self.times:
            return self.inner.put_stream(key, buffers, **settings)
        for _ in range(self.after):
            next(buffers)
        raise UploadLostError("RequestTimeout")


def test_an_upload_that_is_lost_is_begun_again_and_no_part_is_counted_twice():
    inner = open_store(f"memory://{secrets.token_hex(6)}")
    store, body = LosesUploads(inner, times=2, after=12), np.arange(3 * PART, dtype=np.uint8)
    channel, heard = heard_channel()
    progress = Progress(60, channel)
    with channel.current():
        upload_object(store, "o", np.split(body, 15), plan(), config(), progress)
    channel.flush()
    assert inner.get("o", max_size_bytes=3 * PART)[0] == body.tobytes()
    assert store.streams == 3
    assert [part.part for part in of(PartUploaded, heard)] == [0, 1, 2]
    assert progress.moved_bytes == 3 * PART
    assert [(one.attempt, one.object_key) for one in of(Retried, heard)] == [(2, "o"), (3, "o")]


@pytest.mark.parametrize(
    ("most", "streams"), [(10, 3), (1, 2), (0, 1)], ids=["default", "one", "none"]
)
def test_an_upload_that_is_lost_is_begun_three_times_at_most(most, streams):
    store = LosesUploads(open_store(f"memory://{secrets.token_hex(6)}"), times=9, after=1)
    pieces = np.split(np.zeros(3 * PART, np.uint8), 6)
    with pytest.raises(UploadLostError):
        upload_object(store, "o", pieces, plan(), config(max_retries=most), Progress(60))
    assert store.streams == streams
    assert not list(store.list())


def test_an_upload_from_an_iterator_or_without_a_budget_is_not_begun_again():
    store = LosesUploads(open_store(f"memory://{secrets.token_hex(6)}"), times=9, after=1)
    pieces = np.split(np.zeros(3 * PART, np.uint8), 6)
    upload = partial(upload_object, store, "o")
    with pytest.raises(UploadLostError):
        upload(iter(pieces), plan(), config(), Progress(60))
    while limiter_of(store).spend_retry():
        pass
    with pytest.raises(UploadLostError):
        upload(pieces, plan(), config(), Progress(60))
    assert store.streams == 2


def test_an_upload_that_makes_its_data_is_alive_and_ends_when_it_is_stopped():
    now = 0.0
    progress = Progress(1.0, clock=lambda: now)
    pieces = (np.zeros(1, np.uint8) for _ in range(9))
    tracked = tracked_in(progress, pieces, slot=Places())
    held = []
    for _ in range(3):
        now += 0.9
        held.append(next(tracked))
        progress.check_stalled("o")
    progress.stop(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        next(tracked)


class Answering(Stub):
    """Notes what an upload asks for, and how many requests are in flight then."""

    def __init__(self):
        self.url = f"stub://{secrets.token_hex(4)}"
        self.asked = []
        self.now = 100.0

    def put(self, key, buffers):
        self.now += 2
        self.asked.append((key, sum(map(len, buffers)), limiter_of(self).in_flight))
        return "version"

    def put_stream(self, key, buffers, **settings):
        self.asked.append((key, sum(map(len, buffers)), settings))
        return "version"


def test_a_put_has_a_place_and_tells_the_window_what_it_moved():
    store = Answering()
    limiter = limiter_of(store)
    limiter._clock = lambda: store.now
    pieces = (random_bytes(4 * MIB) for _ in range(3))
    settings = plan_parts(0, 16 * MIB)
    done = upload_object(store, "o", pieces, settings, config(), Progress(60))
    assert (done.size_bytes, done.version, done.parts) == (12 * MIB, "version", 1)
    assert store.asked == [("o", 12 * MIB, 1)]
    assert limiter.in_flight == 0
    assert len(limiter._done) == 1
    assert limiter.window.bytes_per_second == {"put_stream": 6 * MIB}


@pytest.mark.parametrize(
    ("concurrency", "most", "latency_seconds", "expected"),
    [
        ("auto", AUTO_MOST, 0.03, AUTO_MOST),
        ("auto", 5, 0.03, 5),
        ("auto", AUTO_MOST, 0.0005, 8),
        (12, 5, 0.0005, 12),
    ],
)
def test_store_memory_and_settings_limit_the_parts_in_flight(
    concurrency, most, latency_seconds, expected
):
    store = Answering()
    limiter_of(store).heard(latency_seconds)
    settings = config(upload_concurrency=concurrency)
    pieces = (random_bytes(4 * MIB) for _ in range(3))
    of_many = plan_parts(4 * AUTO_MOST * PART, PART, is_near=False)
    done = upload_object(store, "o", pieces, of_many, settings, Progress(60), most=most)
    assert (done.size_bytes, done.version, done.parts) == (12 * MIB, "version", 3)
    limits = {"part_size_bytes": PART, "max_concurrency": expected}
    assert store.asked == [("o", 12 * MIB, limits)]
    assert len(limiter_of(store)._done) == 2  # the transport says nothing of the last one
    assert limiter_of(store).in_flight == 0


@pytest.mark.parametrize(
    ("mib_per_second", "parts", "expected"),
    [(1000, 10, 64), (1, 10, 18), (1, 36, 18), (1, 80, 40), (1, 256, 64)],
)
def test_few_parts_of_an_upload_over_a_slow_line_are_uncounted_until_its_end(
    mib_per_second, parts, expected
):
    """Over a slow line fewer parts are under way than may be; those beyond them would not count."""
    store = Answering()
    limiter = limiter_of(store)
    lines = {"put_stream": mib_per_second * MIB}
    limiter.window = replace(Window(latency_seconds=0.03), bytes_per_second=lines)
    plan = plan_parts(parts * 16 * MIB, 16 * MIB, is_near=False)
    settings = config(part_size_bytes=16 * MIB)
    upload_object(
        store, "o", (np.zeros(16 * MIB, np.uint8) for _ in range(2)), plan, settings, Progress(60)
    )
    assert store.asked[0][2]["max_concurrency"] == expected


def test_bytes_reported_in_the_midst_of_a_report_are_counted():
    calls: list[float] = []

    def clock() -> float:
        calls.append(time.monotonic())
        if len(calls) == 2:
            progress.moved(2)  # as when a report frees the last reference to a buffer
        return calls[-1]

    progress = Progress(60, clock=clock)
    thread = spawn(lambda: progress.moved(1), "finalizer")
    thread.join(10)
    assert not thread.is_alive()
    assert len(calls) == 3
    assert progress.moved_bytes == 3


def test_an_object_of_more_parts_than_allowed_is_refused_before_they_are_sent(monkeypatch):
    monkeypatch.setattr("dcp_objstore.transfer.upload.MAX_PARTS", 2)
    store = open_store("memory://transfer/parts")
    body = random_bytes(2 * PART)
    upload_object(store, "fits", iter([body]), plan(), config(), Progress(60))
    with pytest.raises(UnsupportedError, match="part_size_bytes"):
        upload_object(store, "o", iter([body, body[:1]]), plan(), config(), Progress(60))
    assert [meta.key for meta in store.list()] == ["fits"]


def fetch(store, requests, consume, settings=None, stall_timeout_seconds=60.0, budget_bytes=None):
    fetched = fetch_ranges(
        store,
        ["o"],
        requests,
        consume,
        settings or config(),
        Progress(stall_timeout_seconds),
        budget_bytes=budget_bytes,
    )
    return list(fetched)


def requests_of(size_bytes: int, step: int) -> list[RangeRequest]:
    return [
        RangeRequest(0, start, min(size_bytes, start + step))
        for start in range(0, size_bytes, step)
    ]


def test_a_download_delivers_every_range_and_never_more_at_once_than_the_budget():
    inner = open_store("memory://transfer/download")
    body = random_bytes(20 * MIB)
    inner.put("o", body)
    held = 0
    most = 0
    lock = threading.Lock()

    class Counting(RecordingStore):
        range_reading = RangeReading(memory_bytes=MIB)

        @contextlib.contextmanager
        def _around(self, request):
            nonlocal held, most
            with lock:
                held += 2 * (request.end - request.start)
                most = max(most, held)
            yield
            time.sleep(0.005)
            with lock:
                held -= 2 * (request.end - request.start)

    arrived = np.zeros_like(body)

    def consume(request, data):
        arrived[request.start : request.end] = np.frombuffer(data, np.uint8)

    settings = config(memory_budget_bytes=8 * MIB, download_concurrency=16)
    wanted = requests_of(body.nbytes, MIB)
    assert len(fetch(Counting(inner), wanted, consume, settings)) == 20
    assert np.array_equal(arrived, body)
    assert 2 * MIB < most <= 8 * MIB


KIB = 1024


class Meeting(RecordingStore):
    """Its first reads of `threads` threads wait for one another.

    Attributes:
        names: the threads that have read.
    """

    range_reading = RangeReading()

    def __init__(self, inner: ObjectStore, threads: int) -> None:
        super().__init__(inner)
        self.names: set[str] = set()
        self.most = threading.Barrier(threads)

    @contextlib.contextmanager
    def _around(self, request):
        name = threading.current_thread().name
        if name not in self.names:
            self.names.add(name)
            self.most.wait(10)
        yield


@pytest.mark.parametrize(
    ("window", "sizes", "local", "settings", "threads"),
    [
        (Window(8.0, 0.0005), [KIB] * 64, (), {}, 8),
        (Window(8.0), [KIB] * 64, (), {}, 8),
        (Window(64.0), [KIB] * 80, (), {}, AUTO_MOST),
        # A thread for each request is enough.
        (Window(8.0), [KIB] * 3, (), {}, 3),
        # The window is as narrow as the largest request makes it: 2 in half a second at 8 MiB/s.
        (Window(8.0), [2 * MIB, *[KIB] * 64], (), {"request_timeout_seconds": 2.0}, 2),
        # Each has two requests under way.
        (Window(8.0), [KIB] * 64, (), {"ahead": True}, 4),
        (Window(7.0), [KIB] * 64, (), {"ahead": True, "download_concurrency": 7}, 4),
        # There is memory for five.
        (Window(64.0), [KIB] * 64, (), {"memory_bytes": 3 * MIB // 2}, 5),
        # As many read copies on this machine as it has processors, however narrow the window is.
        (Window(1.0), [2 * MIB, *[KIB] * 8], (1,), {"processors": 3}, 3),
        (Window(8.0), [MIB, *[KIB] * 8], (0,), {"request_timeout_seconds": 1.0}, 8),
        (Window(64.0), [KIB] * 64, (0, 1), {"processors": 3}, 3),
        (Window(64.0), [KIB] * 2, (0, 1), {"processors": 3}, 2),
        (Window(64.0), [KIB] * 64, (0, 1), {"processors": 3, "download_concurrency": 2}, 2),
        # A copy is there at once: none is asked for ahead.
        (
            Window(64.0),
            [KIB] * 64,
            (0, 1),
            {"processors": 3, "download_concurrency": 4, "ahead": True},
            3,
        ),
    ],
)
def test_as_many_threads_read_as_requests_may_be_in_flight(
    window, sizes, local, settings, threads, monkeypatch
):
    """The first request reads the object 0, all others the object 1."""
    cores = settings.pop("processors", 64)
    monkeypatch.setattr("dcp_objstore.transfer.download.processors", lambda: cores)
    inner = open_store(f"memory://{secrets.token_hex(4)}/o")
    ends = list(itertools.accumulate(sizes))
    for key in ("first", "others"):
        inner.put(key, bytes(ends[-1]))
    limiter_of(inner).window = window
    store = Meeting(inner, threads)
    store.range_reading = RangeReading(
        ahead=settings.pop("ahead", False), memory_bytes=settings.pop("memory_bytes", 0)
    )
    requests = [
        RangeRequest(min(number, 1), end - size, end)
        for number, (size, end) in enumerate(zip(sizes, ends, strict=True))
    ]
    fetched = fetch_ranges(
        store,
        ["first", "others"],
        requests,
        lambda *_: None,
        config(**settings),
        Progress(60),
        local=local,
        budget_bytes=8 * MIB,
    )
    assert len(list(fetched)) == len(requests)
    assert len(store.names) == threads


def test_more_threads_read_when_the_window_has_become_wider(monkeypatch):
    names = []

    def noted(function, name):
        names.append(name)
        return spawn(function, name)

    monkeypatch.setattr("dcp_objstore.transfer.download.spawn", noted)
    store = open_store(f"memory://{secrets.token_hex(4)}/o")
    store.put("o", bytes(100))
    limiter_of(store).window = Window(1.0)
    assert len(fetch(store, requests_of(100, 1), lambda *_: None)) == 100
    assert names == [f"download-{number}" for number in range(8)]


def test_a_worker_is_started_only_while_no_other_thread_starts_one():
    started: list[tuple[int, bool]] = []

    def start(number: int) -> None:
        started.append((number, shared.staffing.locked()))
        shared._workers += 1

    waits = SimpleNamespace(slot=SimpleNamespace(concurrency=2), requests=9)
    shared: Any = SimpleNamespace(
        staffing=threading.Lock(),
        store_waits=waits,
        local_waits=SimpleNamespace(requests=0),
        depth=1,
        most_workers=9,
        tasks=[1],
        start=start,
        _workers=0,
    )
    _Shared.staff(shared)
    assert started == [(0, True), (1, True)]


@pytest.mark.parametrize(
    ("writing", "is_waited_for"),
    [("consumes", True), ("is cancelled", True), ("cannot be cancelled", False)],
)
def test_the_gate_is_closed_once_nobody_writes_who_may_still_do_so(writing, is_waited_for):
    gate, both_inside = _Gate(Progress(60)), threading.Barrier(3)
    leaves = [threading.Event(), threading.Event()]
    asked: list[bool] = []

    class Body:
        def cancel(self, *, at_once: bool) -> bool:
            asked.append(at_once)
            return is_waited_for

    def write(leave: threading.Event) -> None:
        body: Any = None if writing == "consumes" else Body()
        with gate.passed(body):
            both_inside.wait(30)
            leave.wait(30)

    writers = [spawn(partial(write, leave), "writes") for leave in leaves]
    both_inside.wait(30)
    closing = spawn(gate.close, "closes")
    if is_waited_for:
        for leave, writer in zip(leaves, writers, strict=True):
            closing.join(0.05)
            assert closing.is_alive()
            leave.set()
            writer.join(30)
    closing.join(30)
    assert not closing.is_alive()
    assert asked == ([] if writing == "consumes" else [False, False])
    for leave in leaves:
        leave.set()


@pytest.mark.parametrize("local", [(), (0,)])
def test_a_load_tells_the_window_what_the_line_moves_but_not_this_machine(local):
    store = open_store(f"memory://{secrets.token_hex(4)}/o")
    store.put("o", bytes(16 * MIB))
    limiter = limiter_of(store)
    limiter._clock = itertools.count(100.0, 0.01).__next__
    requests = blocks_of(16 * MIB, 4 * MIB)
    settings = config(download_concurrency=1)
    fetched = fetch_ranges(
        store, ["o"], requests, lambda *_: None, settings, Progress(60), local=local
    )
    assert len(list(fetched)) == 4
    assert set(limiter.window.bytes_per_second) == (set() if local else {"open_range"})
    assert bool(limiter._done) is not bool(local)


def test_no_worker_reaches_the_callers_memory_while_the_gate_closes():
    gate, entered = _Gate(Progress(60)), threading.Event()
    entered_meanwhile: list[bool] = []

    def enter() -> None:
        with gate.passed():
            entered.set()

    class Body:
        def cancel(self, *, at_once: bool) -> bool:
            worker.start()
            entered_meanwhile.append(entered.wait(0.1))
            return False

    worker = threading.Thread(target=enter)
    body: Any = Body()
    with gate.passed(body):
        gate.close()
    worker.join(30)
    assert (entered_meanwhile, entered.is_set()) == ([False], True)


def test_each_request_that_has_ended_is_an_occasion_to_look_for_a_slow_one(monkeypatch):
    """Where many end, the calling thread never waits for long."""
    looks = 0
    look = _Shared.look

    def counted(shared):
        nonlocal looks
        looks += 1
        look(shared)

    monkeypatch.setattr(_Shared, "look", counted)
    store = open_store(f"memory://{secrets.token_hex(4)}/o")
    store.put("o", bytes(100))
    fetch(store, requests_of(100, 1), lambda *_: None)
    assert looks >= 100


def test_a_piece_takes_the_time_since_the_one_before_was_read(monkeypatch):
    """Its bytes came meanwhile into a buffer; what it waits for itself says too little."""
    since = []

    @contextlib.contextmanager
    def waiting(stragglers, fetch, size_bytes, since_seconds=None, **given):
        since.append((given["since"], time.monotonic()))
        yield

    monkeypatch.setattr(Stragglers, "waiting", waiting)
    store = open_store(f"memory://{secrets.token_hex(4)}/o")
    store.put("o", bytes(12 * MIB))
    consumed = []
    began_at = time.monotonic()
    fetch(store, blocks_of(12 * MIB, 12 * MIB), lambda *_: consumed.append(time.monotonic()))
    assert began_at <= since[0][0] <= since[0][1]
    for (read_at, _), was_consumed_at, (at, now) in zip(since, consumed, since[1:], strict=False):
        assert read_at <= was_consumed_at <= at <= now


@pytest.mark.parametrize(("local", "most_tries"), [((), 2), ((0,), 3)])
def test_a_damaged_copy_on_this_machine_is_followed_by_two_answers_of_the_store(local, most_tries):
    store = Ahead(open_store(f"memory://{secrets.token_hex(4)}/o"))
    store.put("o", random_bytes(100))
    consumed = 0

    def damaged(request, _):
        nonlocal consumed
        consumed += 1
        assert len(store.open) == 1  # the answer before is closed
        if consumed <= bad:
            raise CorruptDataError(f"damaged {consumed}")

    for bad in (most_tries - 1, most_tries):
        consumed = 0
        channel, heard = heard_channel()
        with (
            channel.current(),
            contextlib.nullcontext()
            if bad < most_tries
            else pytest.raises(CorruptDataError, match=f"damaged {bad}"),
        ):
            requests = requests_of(100, 100)
            settings, progress = config(), Progress(60)
            list(fetch_ranges(store, ["o"], requests, damaged, settings, progress, local=local))
        channel.flush()
        assert consumed == most_tries
        told = of(Retried, heard)
        assert [one.attempt for one in told] == list(range(2, most_tries + 1))
        errors = [f"CorruptDataError: damaged {number}" for number in range(1, most_tries)]
        assert [one.error for one in told] == errors
        assert {(one.what, one.object_key) for one in told} == {("range", "o")}
        assert not store.open


def blocks_of(size_bytes: int, request_size_bytes: int) -> list[RangeRequest]:
    wanted = [
        Span(0, start, min(size_bytes, start + BLOCK_SIZE_BYTES), None)
        for start in range(0, size_bytes, BLOCK_SIZE_BYTES)
    ]
    return plan_requests(wanted, request_size_bytes=request_size_bytes)


def test_a_large_body_that_arrives_piece_by_piece_is_no_stall():
    now = 0.0

    def slow(key, at, came):
        nonlocal now
        now += 0.9
        progress.check_stalled("o")

    progress = Progress(1.0, clock=lambda: now)
    store = ChangingStore(open_store("memory://transfer/slow-pieces"), slow)
    store.put("o", bytes(24 * MIB))
    requests = blocks_of(24 * MIB, 24 * MIB)
    assert len(requests) == 1
    fetched = fetch_ranges(store, ["o"], requests, lambda *_: None, config(), progress)
    assert list(fetched) == requests
    assert now > 3


def test_a_body_is_consumed_block_by_block_in_the_same_memory():
    store = RecordingStore(open_store("memory://transfer/pieces"))
    body = random_bytes(22 * MIB)
    store.put("o", body)
    arrived = np.zeros_like(body)
    largest = 0
    places = set()

    def consume(request, data):
        nonlocal largest
        came = np.frombuffer(data, np.uint8)
        largest = max(largest, came.nbytes)
        places.add(came.ctypes.data)
        arrived[request.start : request.end] = came

    requests = blocks_of(body.nbytes, 12 * MIB)
    assert fetch(store, requests, consume, config(download_concurrency=1)) == requests
    assert np.array_equal(arrived, body)
    assert largest == BLOCK_SIZE_BYTES
    assert len(places) == 1
    assert [r.verb for r in store.requests].count("open_range") == len(requests) == 2


def test_the_memory_of_a_thread_that_reads_goes_back_to_the_system():
    """Of memory from malloc, each thread's arena keeps 4 MiB: 64 MiB of every rank on 2 cores."""
    store = open_store("memory://transfer/memory")
    store.put("o", random_bytes(BLOCK_SIZE_BYTES))
    owners = []
    requests = blocks_of(BLOCK_SIZE_BYTES, BLOCK_SIZE_BYTES)
    fetch(store, requests, lambda _, data: owners.append(type(memoryview(data).obj)))
    assert owners == [mmap.mmap]


@pytest.mark.parametrize("known", [True, False])
def test_memory_is_mapped_also_where_the_system_or_its_kernel_has_no_huge_pages(known, monkeypatch):
    if known:
        monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 9999, raising=False)
    else:
        monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    memory = new_memory(5000)
    memory[4999] = 7
    assert bytes(memory) == bytes(4999) + b"\x07"


class Ahead(RecordingStore):
    """Sends requests ahead, and knows which ranges are open."""

    range_reading = RangeReading(ahead=True)

    def __init__(self, inner):
        super().__init__(inner)
        self.open = set()
        self.most_open = 0

    def open_range(self, key, start, end):
        opened = super().open_range(key, start, end)
        close = opened.close

        def closed():
            self.open.discard(opened)
            close()

        opened.close = closed
        self.open.add(opened)
        self.most_open = max(self.most_open, len(self.open))
        return opened


def test_ranges_are_asked_ahead_by_half_as_many_threads():
    store = Ahead(open_store("memory://transfer/asked"))
    body = random_bytes(24 * MIB)
    store.put("o", body)
    arrived, threads = np.zeros_like(body), set()

    def consume(request, data):
        threads.add(threading.get_ident())
        arrived[request.start : request.end] = np.frombuffer(data, np.uint8)

    requests = blocks_of(body.nbytes, 4 * MIB)
    fetched = fetch(store, requests, consume, config(download_concurrency=2))
    assert sorted(r.start for r in fetched) == [r.start for r in requests]
    assert np.array_equal(arrived, body)
    assert (len(threads), store.most_open) == (1, 2)
    assert not store.open


def test_what_was_asked_ahead_is_let_go_when_a_load_fails():
    store = Ahead(open_store(f"memory://{secrets.token_hex(4)}/o"))
    store.put("o", random_bytes(24 * MIB))

    def fail(request, data):
        raise ZeroDivisionError

    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            fetch(store, blocks_of(24 * MIB, 4 * MIB), fail, config(download_concurrency=2))
        assert not store.open
        assert limiter_of(store).in_flight == 0
        assert not limiter_of(store)._done  # none of them was answered


def test_only_blocks_from_a_damaged_one_on_are_fetched_again():
    store = RecordingStore(open_store("memory://transfer/damaged-piece"))
    body = random_bytes(14 * MIB)
    store.put("o", body)
    seen: list[tuple[int, int, int]] = []

    def second_is_bad(request, data):
        assert bytes(data) == body[request.start : request.end].tobytes()
        seen.append((request.start // MIB, request.end // MIB, len(request.spans)))
        if len(seen) == 2:
            raise CorruptDataError("damaged")

    fetch(store, blocks_of(body.nbytes, 16 * MIB), second_is_bad)
    assert seen == [(0, 4, 1), (4, 8, 1), (4, 8, 1), (8, 12, 1), (12, 14, 1)]
    ranges = [(r.start, r.end) for r in store.requests if r.verb == "open_range"]
    assert ranges == [(0, 14 * MIB), (4 * MIB, 14 * MIB)]


def test_each_damaged_block_of_a_body_is_fetched_once_more_before_it_counts():
    store = RecordingStore(open_store("memory://transfer/damaged-pieces"))
    store.put("o", random_bytes(16 * MIB))
    seen: list[int] = []

    def each_is_bad_once(request, data):
        seen.append(request.start // MIB)
        if seen.count(seen[-1]) == 1:
            raise CorruptDataError("damaged")

    fetch(store, blocks_of(16 * MIB, 16 * MIB), each_is_bad_once)
    assert seen == [0, 0, 4, 4, 8, 8, 12, 12]
    assert [r.start // MIB for r in store.requests if r.verb == "open_range"] == [0, 0, 4, 8, 12]


@pytest.mark.parametrize("where", [here, elsewhere])
def test_a_stalled_download_raises_instead_of_waiting_for_ever(where):
    let_go = threading.Event()

    class Silent(Stub):
        url = "stub://silent"

        def fetch(self, start, end):
            let_go.wait(30)
            return bytes(end - start)

    with pytest.raises(TransferStalledError):
        where(fetch, Silent(), requests_of(10, 5), lambda *_: None, None, 0.3)
    let_go.set()


def test_once_a_download_has_failed_nothing_is_consumed_any_more():
    let_go = threading.Event()
    answered = threading.Event()
    consumed: list[int] = []

    class SecondIsSlow(Stub):
        url = "stub://secondisslow"

        def fetch(self, start, end):
            if start:
                let_go.wait(30)
                answered.set()
            return bytes(end - start)

    def consume(request, _):
        consumed.append(request.start)

    iterator = fetch_ranges(
        SecondIsSlow(), ["o"], requests_of(10, 5), consume, config(), Progress(60)
    )
    with pytest.raises(ValueError, match="the caller's"), contextlib.closing(iterator):
        for _ in iterator:
            raise ValueError("the caller's")
    let_go.set()
    assert answered.wait(10)
    for thread in threading.enumerate():
        if thread.name.startswith("dcp_objstore-download"):
            thread.join(10)
    assert consumed == [0]


def test_a_download_does_not_raise_while_a_worker_still_writes():
    """What was loaded into belongs to the caller again."""
    writing, raised = threading.Event(), threading.Event()
    raised_meanwhile: list[bool] = []

    class TwoAnswers(Stub):
        url = "stub://twoanswers"

        def fetch(self, start, end):
            return bytes(end - start)

    def consume(request, _):
        if request.start:
            assert writing.wait(10)
            raise ZeroDivisionError
        writing.set()
        raised_meanwhile.append(raised.wait(0.3))

    with pytest.raises(ZeroDivisionError):
        fetch(TwoAnswers(), requests_of(10, 5), consume)
    raised.set()
    assert raised_meanwhile == [False]


@pytest.mark.parametrize("ahead", [True, False])
def test_what_needs_no_look_is_received_where_it_belongs_a_block_at_a_time(ahead):
    """But not from a store whose transport could still write there after a failure."""
    store = Ahead(open_store(f"memory://{secrets.token_hex(4)}/o"))
    store.range_reading = RangeReading(ahead=ahead)
    body = random_bytes(22 * MIB)
    store.put("o", body)
    arrived, read, consumed = np.zeros_like(body), [], []
    open_range = store.open_range

    def opened(key, start, end):
        answer = open_range(key, start, end)
        fill = answer.readinto
        answer.readinto = lambda into: (read.append(into), fill(into))
        return answer

    store.open_range = opened

    def in_place(request):
        if not request.start:
            return None
        return memoryview(arrived)[request.start : request.end]

    def consume(request, data):
        consumed.append((request.start // MIB, request.end // MIB))
        arrived[request.start : request.end] = np.frombuffer(data, np.uint8)

    requests = blocks_of(body.nbytes, 8 * MIB)
    fetched = fetch_ranges(
        store, ["o"], requests, consume, config(), Progress(60), in_place=in_place
    )
    assert sorted(r.start for r in fetched) == [r.start for r in requests]
    assert np.array_equal(arrived, body)
    assert max(map(len, read)) == BLOCK_SIZE_BYTES
    first = requests[0].end // MIB
    assert (max(end for _, end in consumed) == first) is ahead
    assert len(consumed) + sum(memory.obj is arrived for memory in read) == len(read)


def test_what_was_admitted_into_memory_is_consumed_there_wherever_it_belongs():
    store = Ahead(open_store(f"memory://{secrets.token_hex(4)}/o"))
    body = random_bytes(10)
    store.put("o", body)
    slots = {start: memoryview(bytearray(5)) for start in (0, 5)}
    consumed = {}
    fetched = fetch_ranges(
        store,
        ["o"],
        requests_of(10, 5),
        lambda request, data: consumed.setdefault(request.start, data) and None,
        config(),
        Progress(60),
        admit=lambda request, _: slots[request.start],
        in_place=lambda _: pytest.fail("it has memory"),
    )
    assert len(list(fetched)) == 2
    assert {start: data.obj for start, data in consumed.items()} == {
        start: slot.obj for start, slot in slots.items()
    }
    assert b"".join(consumed[start] for start in (0, 5)) == body.tobytes()


@pytest.mark.parametrize("comes", ["before", "after", "never"])
def test_nothing_is_received_in_place_any_more_once_a_download_has_failed(comes, monkeypatch):
    """What is under way is ended, and waited for; what begins later does not begin.

    What a silent server keeps busy is not waited for: its bytes would not be written.
    """
    monkeypatch.setattr("dcp_objstore.transfer.download._depth", lambda *_: 1)
    raised = threading.Event()
    written_after: list[bool] = []

    class Body:
        def __init__(self, start):
            self.start, self.cancelled = start, raised if comes == "never" else threading.Event()

        def readinto(self, into):
            if self.start:
                receiving.set()
                assert self.cancelled.wait(10), "it would go on receiving"
                written_after.append(raised.is_set())
                raise InputError("the range is closed")
            if comes != "after":
                assert receiving.wait(10)

        def awaited(self):
            return None

        def cancel(self, *, at_once):
            assert not at_once  # else a transport that cannot be interrupted would ask again
            if comes != "never":
                self.cancelled.set()
            return comes != "never"

        def close(self):
            pass

    class Opens(Stub):
        url = f"stub://{secrets.token_hex(4)}"
        range_reading = RangeReading(ahead=True)

        def open_range(self, key, start, end):
            if start and comes == "after":
                assert raised.wait(10)
            return Body(start)

    receiving = threading.Event()
    memory = memoryview(bytearray(10))
    iterator = fetch_ranges(
        Opens(),
        ["o"],
        requests_of(10, 5),
        lambda *_: pytest.fail("consumed"),
        config(download_concurrency=4),
        Progress(60),
        in_place=lambda request: memory[request.start : request.end],
    )
    with pytest.raises(ValueError, match="the caller's"), contextlib.closing(iterator):
        for _ in iterator:
            raise ValueError("the caller's")
    raised.set()
    for thread in threading.enumerate():
        if thread.name.startswith("dcp_objstore-download"):
            thread.join(10)
    assert written_after == {"before": [False], "after": [], "never": [True]}[comes]


def test_a_worker_reads_the_answer_that_has_begun_and_waits_for_no_other(monkeypatch):
    """A server that serves one request at a time begins the others only once that was read.

    This one serves the last request first. To read another one then is to wait for ever.
    """
    monkeypatch.setattr("dcp_objstore.transfer.download._depth", lambda *_: 3)
    waiting, read = {}, []

    def serve_next():
        if waiting:
            os.write(waiting.pop(max(waiting)), b"x")

    class Body:
        def __init__(self, start):
            self.start, (self.begun, waiting[start]) = start, os.pipe()

        def awaited(self):
            return self.begun

        def readinto(self, into):
            assert select.select([self.begun], [], [], 0)[0], "it would wait for ever"
            into[:] = bytes([self.start]) * len(into)
            read.append(self.start)
            serve_next()

        def close(self):
            pass

    class OneAtATime(Stub):
        url = f"stub://{secrets.token_hex(4)}"
        range_reading = RangeReading(ahead=True)

        def open_range(self, key, start, end):
            body = Body(start)
            if start == 20:
                serve_next()
            return body

    consumed = {}
    fetched = fetch_ranges(
        OneAtATime(),
        ["o"],
        requests_of(30, 10),
        lambda request, data: consumed.setdefault(request.start, bytes(data)) and None,
        config(download_concurrency=3),
        Progress(60),
    )
    assert len(list(fetched)) == 3
    assert read == [20, 10, 0]
    assert consumed == {start: bytes([start]) * 10 for start in (0, 10, 20)}


def test_the_first_error_of_a_download_ends_all_workers():
    calls: list[int] = []

    class Failing(Stub):
        url = "stub://failing"

        def fetch(self, start, end):
            calls.append(start)
            time.sleep(0.01)
            raise StoreUnavailableError("down")

    with pytest.raises(StoreUnavailableError):
        fetch(Failing(), requests_of(10_000, 1), lambda *_: None, config(download_concurrency=8))
    assert len(calls) <= 16


@pytest.mark.parametrize(
    "settings",
    [
        {"part_size_bytes": MIB},
        {"part_size_bytes": 6 * 1024 * MIB},
        {"upload_concurrency": 0},
        {"upload_concurrency": 2.5},
        {"download_concurrency": "many"},
        {"max_retries": True},
        {"stall_timeout_seconds": float("nan")},
        {"memory_budget_bytes": "128MiB"},
    ],
)
def test_settings_out_of_bounds_are_refused_by_name(settings):
    with pytest.raises(ConfigError, match=next(iter(settings))):
        TransferConfig(**settings)


@pytest.mark.parametrize("where", [here, elsewhere])
def test_a_wait_ends_at_its_time_out_or_when_the_event_happens(where):
    assert not where(wait_until, threading.Event(), 0.3)
    happened = threading.Event()
    threading.Timer(0.4, happened.set).start()
    assert where(wait_until, happened)
    assert where(wait_until, happened, 0.0)


def test_a_request_is_made_beside_the_main_thread_and_within_any_other():
    assert wait_for(threading.current_thread) is not threading.main_thread()
    assert elsewhere(lambda: wait_for(threading.current_thread) is threading.current_thread())
    with pytest.raises(CorruptDataError, match="planned"):
        elsewhere(wait_for, broken)


def test_calls_at_once_overlap_and_all_have_ended_before_the_first_error_is_raised():
    both = threading.Barrier(2)
    calls = [lambda: both.wait(60) is None] * 2
    assert concurrently(*calls) == [False, False]
    ended = []

    def late() -> None:
        both.wait(60)
        ended.append("late")
        raise StoreUnavailableError("second")

    def early() -> None:
        both.wait(60)
        raise CorruptDataError("first")

    with pytest.raises(CorruptDataError, match="first"):
        concurrently(early, late)
    assert ended == ["late"]


def test_a_store_that_does_not_answer_is_not_waited_for_twice():
    left, ended = threading.Event(), []

    def silent() -> None:
        raise StoreUnavailableError("no answer in time")

    def hanging() -> None:
        left.wait(60)
        ended.append("hanging")

    try:
        with pytest.raises(StoreUnavailableError):
            concurrently(silent, hanging)
        with pytest.raises(CorruptDataError):
            concurrently(broken, silent, hanging)
        assert not ended
    finally:
        left.set()


def test_an_interrupt_is_raised_before_the_other_calls_have_ended():
    left, ended = threading.Event(), []

    def interrupted() -> None:
        raise KeyboardInterrupt

    def hanging() -> None:
        left.wait(60)
        ended.append("hanging")

    try:
        with pytest.raises(KeyboardInterrupt):
            concurrently(interrupted, hanging)
        assert not ended
    finally:
        left.set()


def broken():
    raise CorruptDataError("planned")


class Failing:
    """A store whose PUTs fail after a while, and whose ranges come."""

    endpoint_url = None
    reports_throttling = ("open_range",)
    range_reading = RangeReading()

    def __init__(self, name):
        self.url = f"stub://{name}"

    def put(self, key, buffers):
        time.sleep(0.05)
        raise StoreUnavailableError("planned")

    def open_range(self, key, start, end):
        return Range(FetchedSource(lambda a, b: bytes(b - a)), start, end, contextlib.nullcontext)


def test_a_put_that_failed_has_moved_nothing():
    store = Failing("failed-put")
    data = np.zeros(MIB, np.uint8)
    with pytest.raises(StoreUnavailableError):
        upload_object(
            store, "k", iter([data]), plan_parts(MIB, PART), TransferConfig(), Progress(60)
        )
    assert limiter_of(store).window.bytes_per_second == {}
    assert limiter_of(store).in_flight == 0


def test_where_no_more_threads_can_be_started_a_load_ends_and_gives_back_its_places(monkeypatch):
    store, held = Failing("no-threads"), threading.Event()

    def few(function, name):
        if name.endswith("2"):
            raise RuntimeError("can't start new thread")
        return spawn(function, name)

    def admit(request, progress):
        """Waits until the load has ended."""
        held.wait(10)

    monkeypatch.setattr("dcp_objstore.transfer.download.spawn", few)
    requests = [RangeRequest(0, 100 * at, 100 * at + 100) for at in range(8)]
    consumed = []
    arriving = fetch_ranges(
        store,
        ["o"],
        requests,
        lambda request, _: consumed.append(request),
        TransferConfig(),
        Progress(60),
        admit=admit,
    )
    with pytest.raises(RuntimeError, match="thread"):
        list(arriving)
    held.set()
    for thread in threading.enumerate():
        if thread.name.startswith("dcp_objstore-download"):
            thread.join(10)
    assert not consumed
    assert limiter_of(store).in_flight == 0
