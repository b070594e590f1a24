"""The probe sees what a store really does, and a save that cannot be fenced is refused."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import pytest

from dcp_objstore.checkpoint import commit as commits, probe as probes
from dcp_objstore.errors import (
    BucketNotFoundError,
    PermissionDeniedError,
    PreconditionFailedError,
    StoreUnavailableError,
    UnsupportedError,
)
from dcp_objstore.stores import open_store
from dcp_objstore.stores.protocol import Capabilities, IfAbsent, IfVersion
from tests.support.memory_store import LOST, UNANSWERED, Fate, MemoryStore, Put, TickingClock
from tests.support.servers import Bucket

URL = "s3://bucket/run/step-1"


@pytest.fixture(autouse=True)
def nothing_known() -> Iterator[None]:
    probes.forget()
    yield
    probes.forget()


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore(URL)


def create_only() -> MemoryStore:
    store = MemoryStore(URL)
    store.ignores = (IfVersion,)
    return store


def careless() -> MemoryStore:
    store = MemoryStore(URL)
    store.ignores = (IfAbsent, IfVersion)
    return store


def racy() -> MemoryStore:
    """Checks, then writes: right in a row, wrong in a race."""
    store = MemoryStore(URL)
    together = threading.Barrier(4)

    def on_put(put: Put) -> None:
        if put.key.endswith("-race"):
            together.wait()
            store.objects.pop(put.key, None)
            together.wait()
            store.ignores = (IfAbsent,)

    store.on_put = on_put
    return store


def test_good_store_is_seen_as_such_with_a_handful_of_requests(store: MemoryStore) -> None:
    assert probes.probe(store) == Capabilities(True, True, True, copies=False)
    assert len(store.requests) == 11
    assert store.objects == {}
    assert not any(put.retry for put in store.puts)
    assert {put.key for put in store.puts if not put.key.startswith(".probe-")} == set()


def test_store_that_ignores_conditions_is_found_out() -> None:
    assert probes.probe(careless()) == Capabilities(False, False, True, copies=False)
    assert probes.probe(create_only()) == Capabilities(True, False, True, copies=False)


def test_store_that_checks_before_it_writes_is_found_out_by_the_race() -> None:
    store = racy()
    assert probes.probe(store) == Capabilities(False, False, True, copies=False)
    assert store.objects == {}


def test_store_that_refuses_conditions_has_none(store: MemoryStore) -> None:
    store.on_put = lambda put: UnsupportedError("501") if put.precondition else None
    assert probes.probe(store) == Capabilities(False, False, True, copies=False)


def test_store_whose_tokens_never_match_cannot_update(store: MemoryStore) -> None:
    def on_put(put: Put) -> BaseException | None:
        return PreconditionFailedError("412") if isinstance(put.precondition, IfVersion) else None

    store.on_put = on_put
    assert probes.probe(store) == Capabilities(True, False, True, copies=False)


def test_what_the_adapter_disclaims_is_not_tried(store: MemoryStore) -> None:
    store.capabilities = Capabilities(conditional_update=False, multipart=False, copies=False)
    assert probes.probe(store) == Capabilities(True, False, False, copies=False)
    assert not [put for put in store.puts if isinstance(put.precondition, IfVersion)]
    store.capabilities = Capabilities(False, False, False, copies=False)
    store.requests.clear()
    assert probes.probe(store) == Capabilities(False, False, False, copies=False)
    assert store.requests == []


def test_lost_answer_is_tried_again_under_another_name(store: MemoryStore) -> None:
    fates = [LOST]
    store.on_put = lambda put: fates.pop() if fates else None
    assert probes.probe(store, clock=TickingClock()) == Capabilities(True, True, True, copies=False)
    assert len({put.key for put in store.puts}) == 3
    assert store.objects == {}


def test_an_update_whose_answer_was_lost_has_taken_effect(store: MemoryStore) -> None:
    """Sent again it is refused; that the object is as sent shows that the first one was not."""
    fates = [UNANSWERED]

    def on_put(put: Put) -> Fate | None:
        return fates.pop() if fates and isinstance(put.precondition, IfVersion) else None

    store.on_put = on_put
    assert probes.probe(store, clock=TickingClock()) == Capabilities(True, True, True, copies=False)
    assert not fates


def test_store_that_never_answers_is_unavailable(store: MemoryStore) -> None:
    clock = TickingClock()
    store.on_put = lambda put: LOST
    with pytest.raises(StoreUnavailableError):
        probes.require_fencing(store, replaces=False, allow_unfenced=True, clock=clock)
    assert 30 <= clock.now < 40


@pytest.mark.parametrize("kind", [PermissionDeniedError, BucketNotFoundError])
def test_refusal_is_passed_on_and_not_remembered(store: MemoryStore, kind: type[Exception]) -> None:
    store.on_put = lambda put: kind("no")
    with pytest.raises(kind):
        probes.require_fencing(store, replaces=False, allow_unfenced=True)
    store.on_put = None
    assert probes.require_fencing(store, replaces=True, allow_unfenced=False).conditional_update


def test_writer_that_may_not_delete_leaves_only_a_debug_line(
    store: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(key: str) -> None:
        raise PermissionDeniedError("no deleting")

    store.on_delete = refuse
    with caplog.at_level(logging.DEBUG, logger="dcp_objstore"):
        assert probes.probe(store).conditional_create
    assert len(store.objects) == 2
    assert all(key.startswith(".probe-") for key in store.objects)
    assert {record.levelno for record in caplog.records} == {logging.DEBUG}
    assert "no deleting" in caplog.text


# --- rule 11


def test_store_without_conditions_is_refused_unless_allowed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = careless()
    with pytest.raises(UnsupportedError, match="allow_unfenced"):
        probes.require_fencing(store, replaces=False, allow_unfenced=False)
    assert not caplog.records
    found = probes.require_fencing(store, replaces=True, allow_unfenced=True)
    assert not found.conditional_create
    assert "second writer" in caplog.text


def test_create_only_store_is_refused_where_something_would_be_replaced() -> None:
    store = create_only()

    probes.require_fencing(store, replaces=False, allow_unfenced=True)
    with pytest.raises(UnsupportedError, match="another URL"):
        probes.require_fencing(store, replaces=True, allow_unfenced=True)


def test_bucket_is_probed_once_per_process(store: MemoryStore) -> None:
    for _ in range(3):
        probes.require_fencing(store, replaces=True, allow_unfenced=False)
    again = MemoryStore("s3://bucket/run/step-2")
    probes.require_fencing(again, replaces=False, allow_unfenced=False)
    assert len(store.requests) == 11
    assert again.requests == []


def test_bucket_of_the_same_name_elsewhere_is_probed_for_itself(store: MemoryStore) -> None:
    probes.require_fencing(store, replaces=False, allow_unfenced=False)
    elsewhere = careless()
    elsewhere.endpoint_url = "http://127.0.0.1:1"
    with pytest.raises(UnsupportedError):
        probes.require_fencing(elsewhere, replaces=False, allow_unfenced=False)
    other_bucket = MemoryStore("s3://bucket2/run/step-1")
    probes.require_fencing(other_bucket, replaces=False, allow_unfenced=False)
    assert other_bucket.requests


def test_buckets_are_told_apart() -> None:
    def of(url: str) -> object:
        return probes.bucket_of(MemoryStore(url))

    assert of("s3://b/x") == of("s3://b") == of("s3://b/y/z") != of("gs://b/x")
    assert of("file:///tmp/a") != of("file:///tmp/b")


def test_probe_does_not_disturb_a_committed_checkpoint(store: MemoryStore) -> None:
    store.put("_COMMIT", b"marker")
    store.put("__0_0.distcp", b"data")
    before = dict(store.objects)
    probes.probe(store)
    assert store.objects == before
    assert commits.MARKER_KEY not in {put.key for put in store.puts[2:]}


@pytest.mark.backends("seaweed", "moto", "gcs", "azure")
def test_what_real_stores_claim_is_so_and_nothing_of_the_probe_stays(bucket: Bucket) -> None:
    real = open_store(bucket.at("run/step-1"), bucket.storage_options)
    assert probes.probe(real) == real.capabilities
    assert bucket.keys() == []
