"""Uploads: what is sent arrives whole, what counts is there, what fails gives back its places."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from dcp_objstore.config import AUTO_MOST, MIB, TransferConfig
from dcp_objstore.errors import (
    PermissionDeniedError,
    TransferStalledError,
    UnsupportedError,
    UploadLostError,
)
from dcp_objstore.observe.events import ObjectUploaded, PartUploaded, Retried
from dcp_objstore.stores.admission.limiter import limiter_of
from dcp_objstore.stores.admission.window import Window
from dcp_objstore.stores.protocol import ObjectMeta, ObjectStore, Version
from dcp_objstore.stores.wrappers import WrappedStore
from dcp_objstore.transfer.parts import PartPlan, part_count, plan_parts
from dcp_objstore.transfer.progress import Progress
from dcp_objstore.transfer.upload import Uploaded, upload_object
from tests.support.listening import Heard, heard_channel, of
from tests.support.stub_stores import Stub, memory_store
from tests.support.wrapped_stores import RecordingStore

PART = 10  # in this file
PLAN = PartPlan(PART, PART, 1000, 1)
BODY = np.random.default_rng(7).integers(0, 256, 100, dtype=np.uint8)


def pieces_of(size_bytes: int, step: int = 4) -> list[np.ndarray]:
    return [BODY[at : min(size_bytes, at + step)] for at in range(0, size_bytes, step)]


def upload(
    store: Any,
    pieces: Any,
    progress: Progress | None = None,
    plan: PartPlan = PLAN,
    settings: dict[str, Any] | None = None,
    **how: Any,
) -> Uploaded:
    config = TransferConfig(**(settings or {}))
    return upload_object(store, "o", pieces, plan, config, progress or Progress(60), **how)


class Transport(Stub):
    """A store whose transport does what a test plays with the buffers."""

    def __init__(self, play: Callable[[Iterator[np.ndarray]], object]) -> None:
        super().__init__()
        self.play = play

    def put(self, key: str, buffers: Sequence[np.ndarray]) -> Version:
        return self.put_stream(key, iter(buffers))

    def put_stream(self, key: str, buffers: Iterator[np.ndarray], **_: int) -> Version:
        self.play(buffers)
        return Version("version")


def heard_parts(play: Callable[[Any], object], pieces: Any, **how: Any) -> tuple[Heard, Progress]:
    """Upload with two parts under way; return what was told."""
    channel, heard = heard_channel()
    progress = Progress(60, channel)
    try:
        upload(Transport(play), pieces, progress, most=2, **how)
    finally:
        channel.flush()
    return heard, progress


# --- what arrives


@pytest.mark.parametrize("size_bytes", [0, 1, PART - 1, PART, PART + 1, 3 * PART, 3 * PART + 7])
def test_an_upload_of_any_size_arrives_whole_and_reports_its_parts(size_bytes):
    store = RecordingStore(memory_store())
    channel, heard = heard_channel()
    progress = Progress(60, channel)
    done = upload(store, iter(pieces_of(size_bytes)), progress)
    channel.flush()
    assert store.get("o", max_size_bytes=100)[0] == BODY[:size_bytes].tobytes()
    assert (done.size_bytes, done.parts) == (size_bytes, part_count(size_bytes, PART))
    assert progress.moved_bytes == size_bytes
    full, rest = divmod(size_bytes, PART)
    sizes = [PART] * full + [rest] * bool(rest)
    told = [(part.part, part.size_bytes, part.object_key) for part in of(PartUploaded, heard)]
    assert told == [(number, size, "o") for number, size in enumerate(sizes)]
    (whole,) = of(ObjectUploaded, heard)
    assert (whole.object_key, whole.size_bytes, whole.parts) == ("o", size_bytes, done.parts)
    verbs = [request.verb for request in store.requests if request.verb.startswith("put")]
    assert verbs == (["put"] if size_bytes <= PART else ["put_stream"])


def test_an_object_of_more_parts_than_allowed_is_refused_before_they_are_sent(monkeypatch):
    monkeypatch.setattr("dcp_objstore.transfer.upload.MAX_PARTS", 2)
    store = memory_store()
    upload(store, pieces_of(2 * PART))
    with pytest.raises(UnsupportedError, match="part_size_bytes"):
        upload_object(
            store, "larger", pieces_of(2 * PART + 1), PLAN, TransferConfig(), Progress(60)
        )
    assert [meta.key for meta in store.list()] == ["o"]


@pytest.mark.parametrize("own", [{"is_own": True}, {}])
@pytest.mark.parametrize("left", ["all", "another", "nothing", "no answer"])
def test_a_lost_upload_is_believed_only_if_its_object_is_not_there(own, left):
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

    inner = memory_store()
    send = partial(upload, LosesTheAnswer(inner), pieces_of(3 * PART), **own)
    if own and left == "all":
        done = send()
        assert (done.size_bytes, done.version) == (3 * PART, inner.head("o").version)
    else:
        with pytest.raises(UploadLostError):
            send()


class LosesUploads(WrappedStore):
    """Loses so many uploads when it has asked for so many buffers: of the second, for half."""

    def __init__(self, inner: ObjectStore, times: int, after: int = 1) -> None:
        super().__init__(inner)
        self.times, self.after, self.streams = times, after, 0

    def put_stream(self, key: str, buffers: Any, **settings: int) -> Version:
        self.streams += 1
        if self.streams > self.times:
            return self.inner.put_stream(key, buffers, **settings)
        for _ in range(self.after // self.streams):
            next(buffers)
        raise UploadLostError("RequestTimeout")


def test_an_upload_that_is_lost_is_begun_again_and_no_part_is_counted_twice():
    inner = memory_store()
    store = LosesUploads(inner, times=2, after=13)
    channel, heard = heard_channel()
    progress = Progress(60, channel)
    with channel.current():
        upload(store, pieces_of(7 * PART, 5), progress, most=2)
    channel.flush()
    assert inner.get("o", max_size_bytes=100)[0] == BODY[: 7 * PART].tobytes()
    assert store.streams == 3
    assert [part.part for part in of(PartUploaded, heard)] == [*range(7)]
    assert progress.moved_bytes == 7 * PART
    assert [(one.attempt, one.object_key) for one in of(Retried, heard)] == [(2, "o"), (3, "o")]


@pytest.mark.parametrize(
    ("why", "max_retries", "streams"),
    [("", 10, 3), ("", 1, 2), ("", 0, 1), ("an iterator", 10, 1), ("no budget", 10, 1)],
)
def test_an_upload_that_is_lost_is_begun_three_times_at_most(why, max_retries, streams):
    store = LosesUploads(memory_store(), times=9)
    pieces = pieces_of(3 * PART)
    while why == "no budget" and limiter_of(store).spend_retry():
        pass
    with pytest.raises(UploadLostError):
        upload(
            store,
            iter(pieces) if why == "an iterator" else pieces,
            settings={"max_retries": max_retries},
        )
    assert store.streams == streams
    assert not list(store.list())


# --- how it ends


class Stuck(Stub):
    """Its transfer does not end before it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.let_go, self.ended = threading.Event(), threading.Event()

    def put_stream(self, key: str, buffers: Iterator[np.ndarray], **_: int) -> None:
        try:
            held = [next(buffers), next(buffers)]
            assert limiter_of(self).in_flight
            self.let_go.wait(30)
            del held
            for _piece in buffers:
                pass
        finally:
            self.ended.set()


@pytest.mark.parametrize("interrupted", [True, False])
def test_an_upload_that_hangs_gives_back_its_places_and_is_told_to_abort(
    interrupted, monkeypatch, caplog
):
    """Its thread may hang for ever: the places must not wait for that."""
    monkeypatch.setattr("dcp_objstore.transfer.upload._ABORT_GRACE_SECONDS", 0.1)
    store: Any = Stuck()
    progress = Progress(600 if interrupted else 0.2)

    def ctrl_c(_: str) -> None:
        raise KeyboardInterrupt

    if interrupted:
        monkeypatch.setattr(progress, "check_stalled", ctrl_c)
    with pytest.raises(KeyboardInterrupt if interrupted else TransferStalledError) as caught:
        upload(store, iter(pieces_of(2 * PART)), progress)
    said = caplog.text if interrupted else str(caught.value)
    assert "incomplete multipart upload may be left" in said
    assert not store.ended.is_set()
    assert limiter_of(store).in_flight == 0
    store.let_go.set()
    assert store.ended.wait(10)


def test_an_upload_that_makes_its_data_is_alive_and_ends_when_it_is_stopped():
    now = 0.0
    progress = Progress(1.0, clock=lambda: now)

    def play(buffers: Iterator[np.ndarray]) -> None:
        nonlocal now
        held = [next(buffers), next(buffers)]  # taken before, to see whether it is one part
        for _ in range(3):
            now += 0.9
            held.append(next(buffers))
            progress.check_stalled("o")
        progress.stop(KeyboardInterrupt())
        next(buffers)

    with pytest.raises(KeyboardInterrupt):
        upload(Transport(play), iter(pieces_of(7 * PART, PART)), progress)


# --- which parts count


class Places:
    """Stands for an `AdmissionSlot`, and records which parts began, ended and were answered."""

    most = concurrency = AUTO_MOST

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.ended: list[int] = []
        self.answered: list[tuple[int, int]] = []

    def begin(self, part: int, check: Callable[[], object]) -> None:
        self.begun.append(part)

    def release(self, part: int) -> None:
        self.ended.append(part)

    def end(self, part: int, size_bytes: int, *, answered: bool) -> None:
        assert answered
        self.answered.append((part, size_bytes))

    def close(self) -> None:
        pass


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> Places:
    found = Places()
    monkeypatch.setattr("dcp_objstore.transfer.upload.admission_slot", lambda *_, **__: found)
    return found


def test_an_upload_that_waits_for_its_turn_can_be_stopped(places):
    progress = Progress(60)

    def begin(part: int, check: Callable[[], object]) -> None:
        progress.stop(KeyboardInterrupt())
        check()
        went_on.append(part)

    went_on: list[int] = []
    places.begin = begin
    with pytest.raises(KeyboardInterrupt):
        upload(Transport(list), pieces_of(2 * PART), progress)
    assert not went_on


@pytest.mark.parametrize(
    ("sizes", "cut", "ended"),
    [
        ([10, 10, 10], [10, 10, 10], [[0], [1], [2]]),
        ([4, 6, 10], [4, 6, 10], [[], [0], [1]]),
        ([15, 5], [10, 5, 5], [[0], [], [1]]),
        ([11, 9], [10, 1, 9], [[0], [], [1]]),
        ([35], [10, 10, 10, 5], [[0], [1], [2], [3]]),
        ([8, 30, 1], [8, 2, 10, 10, 8, 1], [[], [0], [1], [2], [], [3]]),
        ([0, 10, 0, 9], [0, 10, 0, 9], [[], [0], [], [1]]),
        ([10, 4, 0, 6, 0], [10, 4, 0, 6, 0], [[0], [], [], [1], []]),
    ],
)
@pytest.mark.parametrize("dropped", ["at once", "in turn", "after the upload"])
def test_buffers_are_cut_at_parts_and_a_part_ends_with_its_last_buffer(
    sizes, cut, ended, dropped, places
):
    """A part that ended too early would let more requests begin than the window allows."""
    body, full, rest = bytearray(), *divmod(sum(sizes), PART)
    held: list[np.ndarray] = []

    def play(buffers: Iterator[np.ndarray]) -> None:
        for size in cut:
            held.append(next(buffers))
            assert held[-1].nbytes == size
            body.extend(held[-1].tobytes())
            if dropped == "at once":
                held.clear()
        assert next(buffers, None) is None
        assert places.begun == [*range(full)]
        for parts in ended if dropped == "in turn" else ():
            places.ended.clear()
            del held[0]
            assert places.ended == parts

    pieces = [np.full(size, number, np.uint8) for number, size in enumerate(sizes)]
    heard, progress = heard_parts(play, pieces)
    assert body == b"".join(piece.tobytes() for piece in pieces)
    told = [(one.part, one.size_bytes) for one in of(PartUploaded, heard)]
    assert told == [*enumerate([PART] * full + [rest] * bool(rest))]
    assert progress.moved_bytes == sum(sizes)


def test_a_part_under_way_has_the_lowest_number_that_is_free():
    def play(buffers: Iterator[np.ndarray]) -> None:
        """Free the second of three parts, take another, and free all of them."""
        held = [next(buffers) for _ in range(3)]
        del held[1]
        held.append(next(buffers))
        assert next(buffers, None) is None

    heard, _ = heard_parts(play, [np.zeros(PART, np.uint8) for _ in range(4)])
    workers = {one.part: one.worker for one in of(PartUploaded, heard)}
    assert workers == {0: 0, 1: 1, 2: 2, 3: 1}
    assert next(iter(workers)) == 1, "the first that ended"


def test_of_the_parts_that_ended_only_those_count_that_later_ones_vouch_for():
    """A transport drops the buffers of a part that failed, too, and of all others that it gives up.

    It asks for more only while at most so many parts are without a good answer.
    """
    channel, heard = heard_channel()
    progress = Progress(60, channel)
    counts: list[int] = []

    def play(buffers: Iterator[np.ndarray]) -> None:
        held = []
        for buffer in buffers:
            held.append(buffer)
            del buffer
            if len(counts) == 5:  # the first two parts of three, in the other order
                del held[2:4]
                del held[:2]
            counts.append(progress.moved_bytes)
        held.clear()
        raise PermissionDeniedError("it gives up")

    pieces = (np.zeros(5, np.uint8) for _ in range(10))
    with pytest.raises(PermissionDeniedError):
        upload(Transport(play), pieces, progress, most=2)
    channel.flush()
    # While the 7th buffer is asked for, 3 parts were handed over, and one of them must be there.
    assert counts == [0, 0, 0, 0, 0, 0, 10, 10, 20, 20]
    assert [part.part for part in of(PartUploaded, heard)] == [1, 0]
    assert progress.moved_bytes == 20


def test_a_part_counts_as_answered_when_more_is_asked_for_and_not_when_it_is_dropped(places):
    """The window would learn from parts that failed how fast the line is."""

    def play(buffers: Iterator[np.ndarray]) -> None:
        held = [next(buffers) for _ in range(6)]
        del held[:2]
        assert (places.ended, places.answered) == ([0], [])
        next(buffers)
        assert places.answered == [(0, 10)]
        held.clear()
        raise PermissionDeniedError("it gives up, and asks for no more")

    with pytest.raises(PermissionDeniedError):
        upload(Transport(play), (np.zeros(5, np.uint8) for _ in range(8)), most=2)
    assert (sorted(places.ended), places.answered) == ([0, 1, 2], [(0, 10)])


@pytest.mark.parametrize("size_bytes", [PART, 8 * PART])
def test_a_failed_upload_has_no_successful_part_and_no_rate(size_bytes):
    def fail(buffers: Iterator[np.ndarray]) -> None:
        held = [next(buffers) for _ in range(size_bytes // PART)]
        held.clear()
        raise PermissionDeniedError("no")

    store: Any = Transport(fail)
    limiter = limiter_of(store)
    while limiter.spend_retry():
        pass
    with pytest.raises(PermissionDeniedError):
        upload(store, (np.zeros(PART, np.uint8) for _ in range(size_bytes // PART)))
    assert limiter.in_flight == 0
    assert limiter.window == Window(round=limiter.window.round)
    assert limiter.window.round.answers == 0
    limiter.refund_retry()
    assert not limiter.spend_retry()


# --- what the window and the memory allow


class Answering(Stub):
    """Notes what an upload asks for, and how many requests are in flight then."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[Any] = []

    def put(self, key: str, buffers: Any) -> Version:
        time.sleep(0.03)
        self.asked.append((key, sum(map(len, buffers)), limiter_of(self).in_flight))
        return Version("version")

    def put_stream(self, key: str, buffers: Any, **settings: int) -> Version:
        self.asked.append((key, sum(map(len, buffers)), settings))
        return Version("version")


def test_a_put_has_a_place_and_tells_the_window_what_it_moved():
    store: Any = Answering()
    pieces = (np.zeros(4 * MIB, np.uint8) for _ in range(3))
    done = upload(store, pieces, plan=plan_parts(0, 16 * MIB))
    assert done == Uploaded(12 * MIB, Version("version"), 1)
    assert store.asked == [("o", 12 * MIB, 1)]
    assert limiter_of(store).in_flight == 0
    assert set(limiter_of(store).window.bytes_per_second) == {"put_stream"}


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
    store: Any = Answering()
    limiter_of(store).note_latency(latency_seconds)
    settings = {"upload_concurrency": concurrency}
    plan = PartPlan(PART, PART, 1000, parts=4 * AUTO_MOST)
    done = upload(store, iter(pieces_of(24, 8)), plan=plan, settings=settings, most=most)
    assert done == Uploaded(24, Version("version"), 3)
    limits = {"part_size_bytes": PART, "max_concurrency": expected}
    assert store.asked == [("o", 24, limits)]
    assert limiter_of(store).window.round.answers == 2  # the transport says nothing of the last one
    assert limiter_of(store).in_flight == 0


@pytest.mark.parametrize(
    ("mib_per_second", "parts", "expected"),
    [(1000, 10, 64), (1, 10, 18), (1, 36, 18), (1, 80, 40), (1, 256, 64)],
)
def test_few_parts_of_an_upload_over_a_slow_line_are_uncounted_until_its_end(
    mib_per_second, parts, expected
):
    """Over a slow line fewer parts are under way than may be; those beyond them would not count."""
    store: Any = Answering()
    lines = {"put_stream": mib_per_second * MIB}
    limiter_of(store).window = replace(Window(latency_seconds=0.03), bytes_per_second=lines)
    plan = plan_parts(parts * 16 * MIB, 16 * MIB, is_near=False)
    upload(store, (np.zeros(16 * MIB, np.uint8) for _ in range(2)), plan=plan)
    assert store.asked[0][2]["max_concurrency"] == expected
