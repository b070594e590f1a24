"""A store that answers SlowDown above a rate: saves and loads slow down with it, and end well.

The server has a bucket of tokens, and answers 503 or 429 when it is empty.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

import dcp_objstore as dos
from dcp_objstore.errors import StoreUnavailableError
from dcp_objstore.stores import open_store
from dcp_objstore.stores.admission.limiter import Limiter, limiter_of
from dcp_objstore.stores.retries import RetryPolicy
from tests.support.campaign import cases
from tests.support.proxy import Asked, Fault, NetworkProxy, SlowDown
from tests.support.slow_sink import SlowSink

MIB = 1024 * 1024
PART_BYTES = 5 * MIB
CONFIG = dos.TransferConfig(part_size_bytes=PART_BYTES, request_size_bytes=4 * MIB)
# What the requests may be, of those without a fault.
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


def requests_of_save(sink: SlowSink, url: str, parts: int) -> int:
    before = len(sink.asked)
    save(parts * PART_BYTES, url, sink)  # zeros that are never written take no memory
    return len(sink.asked) - before


def limiter_at(url: str, at: SlowSink | NetworkProxy) -> Limiter:
    return limiter_of(open_store(url, at.storage_options))


@pytest.mark.parametrize(
    ("parts", "status"), cases([(64, 503), (96, 503), (96, 429)], default=[(64, 503)])
)
def test_a_throttled_save_ends_well_with_few_more_requests(sink, parts, status):
    save(PART_BYTES, "s3://bucket/first", sink)  # the store is tried out once
    usual = requests_of_save(sink, "s3://bucket/step-1", parts)
    sink.plan = slow = Busy(20, 4, status)
    count = requests_of_save(sink, "s3://bucket/step-2", parts)
    print(f"{count} requests instead of {usual}, {len(slow.refused)} refused with {status}")
    assert slow.refused
    assert count <= MOST * usual
    assert limiter_at("s3://bucket", sink).window.is_throttled
    assert limiter_at("s3://bucket", sink).in_flight == 0
    assert len(dos.steps("s3://bucket", storage_options=sink.storage_options)) == 3


@pytest.mark.parametrize("status", [pytest.param(503, marks=pytest.mark.campaign), 429])
def test_a_throttled_load_ends_well_with_few_more_requests(status):
    saved = torch.randint(0, 256, (128 * MIB,), dtype=torch.uint8)
    counts: list[int | None] = []
    heard: list[dos.observe.events.AnyEvent] = []
    with SlowSink(keep=True) as sink:

        def load() -> int:
            before, found = len(sink.asked), {"a": torch.zeros_like(saved)}
            report = dos.load(
                found,
                "s3://bucket/step-1",
                storage_options=sink.storage_options,
                config=CONFIG,
                progress=False,
                on_event=heard.append,
            )
            assert torch.equal(found["a"], saved)
            counts.append(report.retries)
            return len(sink.asked) - before

        dos.save(
            {"a": saved}, "s3://bucket/step-1", storage_options=sink.storage_options, progress=False
        )
        usual = load()
        sink.plan = slow = Busy(20, 4, status)
        count = load()
    print(f"{count} requests instead of {usual}, {len(slow.refused)} refused with {status}")
    assert slow.refused
    assert count <= MOST * usual
    # Those are ours, so every one is known.
    told = [event for event in heard if isinstance(event, dos.observe.events.Retried)]
    assert len(told) == len(slow.refused)
    assert counts == [0, len(told)]
    assert {event.what for event in told} == {"request"}


@pytest.mark.campaign
def test_two_saves_at_once_slow_down_together(sink):
    save(PART_BYTES, "s3://bucket/first", sink)
    usual = 2 * requests_of_save(sink, "s3://bucket/step-1", 96)
    sink.plan = slow = Busy(30, 4)
    before = len(sink.asked)
    threads = [
        threading.Thread(target=save, args=(96 * PART_BYTES, f"s3://bucket/step-{n}", sink))
        for n in (2, 3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    count = len(sink.asked) - before
    print(f"{count} requests instead of {usual}, {len(slow.refused)} refused")
    assert slow.refused
    assert count <= MOST * usual
    assert len(dos.steps("s3://bucket", storage_options=sink.storage_options)) == 4


@pytest.mark.usefixtures("hurried")
@pytest.mark.backends("seaweed")
def test_a_store_that_says_slow_down_for_ever_fails_the_save_soon_and_says_so(bucket):
    """After its retries, and nothing but its beacon is left where the store lets us abort."""
    url = bucket.at("step-1")
    config = dos.TransferConfig(part_size_bytes=PART_BYTES, max_retries=2)
    with NetworkProxy(bucket.storage_options) as proxy:
        proxy.plan = slow = SlowDown(0, 2, meant=is_transfer)
        with pytest.raises(StoreUnavailableError, match="after all retries: 503"):
            save(8 * PART_BYTES, url, proxy, config)
        assert limiter_at(url, proxy).in_flight == 0
    assert len(slow.refused) <= 8 * 3
    assert [key for key in bucket.keys("step-1") if not key.startswith(".save-")] == []
    assert bucket.uploads() == []


@pytest.mark.usefixtures("hurried")
@pytest.mark.backends("seaweed")
def test_endless_slow_down_answers_fail_the_load_within_the_shared_budget(bucket, monkeypatch):
    monkeypatch.setattr("dcp_objstore.stores.admission.limiter.RETRY_BUDGET", 6.0)
    url = bucket.at("step-1")
    with NetworkProxy(bucket.storage_options) as proxy:
        save(8 * PART_BYTES, url, proxy)
        proxy.plan = slow = SlowDown(0, 0, meant=is_transfer)
        found = {"zeros": torch.ones(8 * PART_BYTES, dtype=torch.uint8)}
        options = proxy.storage_options
        with pytest.raises(StoreUnavailableError, match=r"503.*used up"):
            dos.load(found, url, storage_options=options, config=CONFIG, progress=False)
    # The workers' first tries, and the budget.
    assert len(slow.refused) <= 8 + 6
