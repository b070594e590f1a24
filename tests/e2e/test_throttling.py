"""A store that answers SlowDown above a rate, or a slow line: saves and loads slow down with it.

The server has a bucket of tokens, and answers 503 or 429 when it is empty.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch

import dcp_objstore as dos
from dcp_objstore.errors import StoreUnavailableError
from dcp_objstore.observe.events import Retried
from dcp_objstore.stores import open_store
from dcp_objstore.stores.admission.limiter import Limiter, limiter_of
from dcp_objstore.stores.retries import RetryPolicy
from tests.support.campaign import cases
from tests.support.listening import Heard, of
from tests.support.proxy import Asked, Fault, NetworkProxy, SlowDown
from tests.support.slow_sink import SlowSink

MIB = 1024 * 1024
PART_BYTES = 5 * MIB
CONFIG = dos.TransferConfig(part_size_bytes=PART_BYTES, request_size_bytes=4 * MIB)
# How many transfers there may be, for each that a store without a limit would be asked for.
MOST = 1.3


@pytest.fixture(autouse=True)
def short_pauses() -> None:
    """Not here: how soon a retry comes is a part of how a client slows down."""


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a store says so for ever, how long the pauses are shows nothing."""
    monkeypatch.setattr(RetryPolicy, "pause_seconds", lambda *_: 0.02)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dcp_objstore.transfer.parts._GROWN_PART_SIZE_BYTES", PART_BYTES)


@pytest.fixture
def sink() -> Iterator[SlowSink]:
    with SlowSink() as sink:
        yield sink


def is_transfer(asked: Asked) -> bool:
    """Parts, and ranges of data."""
    return "partNumber=" in asked.query or (
        asked.method == "GET" and asked.name.endswith(".distcp")
    )


class Busy(SlowDown):
    """Refuses the first transfer, too: a slow machine may never ask too often."""

    def __call__(self, asked: Asked) -> Fault | None:
        if not self.refused and is_transfer(asked):
            return self.refuse(asked)
        return super().__call__(asked)


def save(
    size_bytes: int, url: str, at: SlowSink | NetworkProxy, config: dos.TransferConfig = CONFIG
) -> None:
    state = {"zeros": torch.zeros(size_bytes, dtype=torch.uint8)}
    dos.save(state, url, storage_options=at.storage_options, config=config, progress=False)


def transfers_of(sink: SlowSink, call: Callable[[], object]) -> int:
    before = len(sink.asked)
    call()
    return sum(map(is_transfer, sink.asked[before:]))


def limiter_at(url: str, at: SlowSink | NetworkProxy) -> Limiter:
    return limiter_of(open_store(url, at.storage_options))


# The more are answered before the first refusal, the higher is the rate at which it goes on.
@pytest.mark.parametrize(
    ("parts", "burst", "status"),
    cases([(48, 24, 503), (96, 4, 503), (96, 4, 429)], default=[(48, 24, 503)]),
)
def test_a_throttled_save_ends_well_with_few_more_requests(sink, parts, burst, status):
    save(PART_BYTES, "s3://bucket/step-1", sink)  # the store is tried out once
    sink.plan = slow = Busy(40, burst, status)
    # Zeros that are never written take no memory.
    count = transfers_of(sink, lambda: save(parts * PART_BYTES, "s3://bucket/step-2", sink))
    print(f"{count} parts sent instead of {parts + 1}, {len(slow.refused)} refused with {status}")
    assert slow.refused
    assert count <= MOST * (parts + 1)  # the last is what framing adds
    assert limiter_at("s3://bucket", sink).window.is_throttled
    assert limiter_at("s3://bucket", sink).in_flight == 0
    assert len(dos.steps("s3://bucket", storage_options=sink.storage_options)) == 2


@pytest.mark.parametrize("status", [pytest.param(503, marks=pytest.mark.campaign), 429])
def test_a_throttled_load_ends_well_with_few_more_requests(status):
    saved = torch.arange(16 * MIB)
    found, heard = {"a": torch.zeros_like(saved)}, Heard()
    reports: list[dos.reports.LoadReport] = []
    with SlowSink(keep=True) as sink:
        at = {"storage_options": sink.storage_options, "config": CONFIG, "progress": False}
        dos.save({"a": saved}, "s3://bucket/step-1", **at)
        sink.plan = slow = Busy(20, 12, status)
        load = partial(dos.load, found, "s3://bucket/step-1", on_event=heard, **at)
        count = transfers_of(sink, lambda: reports.append(load()))
    (report,) = reports
    print(f"{count} ranges instead of {report.requests}, {len(slow.refused)} refused with {status}")
    assert torch.equal(found["a"], saved)
    assert slow.refused
    assert count <= MOST * report.requests
    # Those are ours, so every one is known.
    told = of(Retried, heard)
    assert report.retries == len(told) == len(slow.refused)
    assert {event.what for event in told} == {"request"}


@pytest.mark.campaign
def test_two_saves_at_once_slow_down_together(sink):
    save(PART_BYTES, "s3://bucket/step-1", sink)
    sink.plan = slow = Busy(30, 4)

    def save_both() -> None:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda n: save(96 * PART_BYTES, f"s3://bucket/step-{n}", sink), (2, 3)))

    count = transfers_of(sink, save_both)
    print(f"{count} parts sent instead of {2 * 97}, {len(slow.refused)} refused")
    assert slow.refused
    assert count <= MOST * 2 * 97
    assert len(dos.steps("s3://bucket", storage_options=sink.storage_options)) == 3


@pytest.mark.usefixtures("hurried")
@pytest.mark.backends("seaweed")
def test_a_store_that_says_slow_down_for_ever_fails_the_save_soon_and_says_so(bucket):
    """After its retries, and nothing but its beacon is left where the store lets us abort."""
    url = bucket.at("step-1")
    config = dos.TransferConfig(part_size_bytes=PART_BYTES, max_retries=1)
    with NetworkProxy(bucket.storage_options) as proxy:
        proxy.plan = slow = SlowDown(0, 2, meant=is_transfer)
        with pytest.raises(StoreUnavailableError, match="after all retries: 503"):
            save(8 * PART_BYTES, url, proxy, config)
        assert limiter_at(url, proxy).in_flight == 0
    assert len(slow.refused) <= 8 * 2
    assert [key for key in bucket.keys("step-1") if not key.startswith(".save-")] == []
    assert bucket.uploads() == []


@pytest.mark.usefixtures("hurried")
def test_endless_slow_down_answers_fail_the_load_within_the_shared_budget(monkeypatch):
    monkeypatch.setattr("dcp_objstore.stores.admission.limiter.RETRY_BUDGET", 6.0)
    url = "s3://bucket/step-1"
    with SlowSink(keep=True) as sink:
        save(8 * PART_BYTES, url, sink)
        sink.plan = slow = SlowDown(0, 0, meant=is_transfer)
        found = {"zeros": torch.ones(8 * PART_BYTES, dtype=torch.uint8)}
        options = sink.storage_options
        with pytest.raises(StoreUnavailableError, match=r"503.*used up"):
            dos.load(found, url, storage_options=options, config=CONFIG, progress=False)
    # The workers' first tries, and the budget.
    assert len(slow.refused) <= 8 + 6


@pytest.mark.campaign
def test_a_save_over_a_slow_line_sends_each_part_once():
    """It holds no more in flight than it can send: 8 parts at once would take 8 s each."""
    config = dos.TransferConfig(
        part_size_bytes=PART_BYTES, request_timeout_seconds=6.0, max_retries=2
    )
    with SlowSink(bytes_per_second=5 * MIB) as sink:
        count = transfers_of(sink, lambda: save(24 * PART_BYTES, "s3://bucket/s", sink, config))
    assert count == 24 + 1  # the last is what framing adds
