"""The probe sees what a store really does, and a save that cannot be fenced is refused."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from dcp_objstore.checkpoint import names, probe as probes
from dcp_objstore.errors import (
    BucketNotFoundError,
    DcpObjstoreError,
    ObjectNotFoundError,
    PermissionDeniedError,
    PreconditionFailedError,
    StoreUnavailableError,
    UnsupportedError,
)
from dcp_objstore.stores import open_store
from dcp_objstore.stores.protocol import Capabilities, IfAbsent, IfVersion, Precondition
from tests.support.memory_store import LOST, UNANSWERED, Fate, MemoryStore, Put, TickingClock

URL = "s3://bucket/run/step-1"


@pytest.fixture(autouse=True)
def nothing_known() -> Iterator[None]:
    probes.forget()
    yield
    probes.forget()


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore(URL)


def is_quoted(condition: Precondition | None) -> bool:
    return isinstance(condition, IfVersion) and not condition.bare


def weak(
    *ignored: type[Precondition],
    refuses: Callable[[Precondition | None], bool] = lambda _: False,
    error: DcpObjstoreError = PreconditionFailedError("412"),  # noqa: B008
) -> MemoryStore:
    """A store that ignores some conditions, or refuses PUTs by theirs."""
    store = MemoryStore(URL)
    store.ignores = ignored
    store.on_put = lambda put: error if refuses(put.precondition) else None
    return store


def careless() -> MemoryStore:
    return weak(IfAbsent, IfVersion)


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


def test_good_store_is_seen_as_such_with_a_handful_of_requests(store):
    assert probes.probe(store) == Capabilities(True, True, True, copies=False)
    key = store.puts[0].key
    assert names.is_probe_key(key)
    assert store.requests == [
        *([("put", key)] * 2 + [("get", key)] + [("put", key)] * 2),
        *([("put", f"{key}-race")] * 4 + [("delete", key), ("delete", f"{key}-race")]),
    ]
    first = IfVersion(MemoryStore().put(key, b"1"))
    conditions = [put.precondition for put in store.puts]
    assert conditions == [IfAbsent(), IfAbsent(), first, first, *[IfAbsent()] * 4]
    assert store.objects == {}
    assert not any(put.retry for put in store.puts)


@pytest.mark.parametrize(
    ("make", "create"),
    [
        (careless, False),
        (lambda: weak(IfVersion), True),
        (racy, False),
        (lambda: weak(refuses=bool, error=UnsupportedError("501")), False),
        (lambda: weak(refuses=lambda condition: isinstance(condition, IfVersion)), True),
        (lambda: weak(IfVersion, refuses=is_quoted), True),  # takes a bare tag for no condition
    ],
)
def test_a_store_that_does_less_than_it_says_is_found_out(make, create):
    store = make()
    found = probes.probe(store)
    assert (found.conditional_create, found.conditional_update) == (create, False)
    assert store.objects == {}


@pytest.mark.parametrize(("claims", "requests"), [((True, False, False), 8), ((False,) * 3, 0)])
def test_what_the_adapter_disclaims_is_not_tried(store, claims, requests):
    store.capabilities = Capabilities(*claims, copies=False)
    assert probes.probe(store) == Capabilities(*claims, copies=False)
    assert not [put for put in store.puts if isinstance(put.precondition, IfVersion)]
    assert len(store.requests) == requests


def test_store_that_compares_tags_without_quotes_is_asked_so():
    store = weak(refuses=is_quoted)
    probes.require_rewrites(store, "nothing can be deleted")
    sent = [put.precondition for put in store.puts]
    probed = [condition.bare for condition in sent if isinstance(condition, IfVersion)]
    assert probed == [False, True, True], "the last one, with a stale version, was refused"
    assert len(store.requests) == 13
    version = store.put("k", b"1")
    store.put("k", b"2", precondition=probes.if_version(store, version))
    with pytest.raises(PreconditionFailedError):
        store.put("k", b"3", precondition=probes.if_version(store, version))
    probes.forget()
    assert probes.if_version(store, version) == IfVersion(version), "quoted until it is probed"


@pytest.mark.parametrize("refused", [(3, 4), (4,)])
def test_404_refuses_an_update_but_shows_no_bucket_to_a_create(store, refused):
    """All updates, however their ETag is written, or the one that is to be refused."""

    def on_put(put: Put) -> BaseException | None:
        is_met = put.number in refused and not put.key.endswith("-race")
        return ObjectNotFoundError("404") if is_met else None

    store.on_put = on_put
    assert probes.probe(store) == Capabilities(True, refused == (4,), True, copies=False)
    store.on_put = lambda put: ObjectNotFoundError("404")
    with pytest.raises(ObjectNotFoundError):
        probes.probe(store)


def test_no_racer_starts_before_all_are_there(store, monkeypatch):
    arrived = threading.Semaphore(0)

    class Barrier(threading.Barrier):
        def wait(self, timeout: float | None = None) -> int:
            arrived.release()
            return super().wait(timeout)

    def last_one_later(*calls: Callable[[], bool]) -> list[bool]:
        with ThreadPoolExecutor() as pool:
            others = [pool.submit(call) for call in calls[1:]]
            assert all(arrived.acquire(timeout=60) for _ in others)
            assert not [put for put in store.puts if put.key.endswith("-race")]
            return [calls[0](), *(other.result() for other in others)]

    monkeypatch.setattr(threading, "Barrier", Barrier)
    monkeypatch.setattr(probes, "concurrently", last_one_later)
    assert probes.probe(store).conditional_create


@pytest.mark.parametrize("answer", [LOST, PreconditionFailedError("412")])
@pytest.mark.parametrize("winners", [0, 1, 2])
def test_a_race_with_two_winners_and_no_other_tells_against_a_store(store, winners, answer):
    def on_put(put: Put) -> Fate | BaseException | None:
        if not put.key.endswith("-race"):
            return None
        store.ignores = (IfAbsent,)
        return None if put.number <= winners else answer

    store.on_put = on_put
    holds = winners < 2
    assert probes.probe(store) == Capabilities(holds, holds, True, copies=False)


@pytest.mark.parametrize(
    ("fate", "meant", "keys"),
    [
        (LOST, IfAbsent, 3),  # under another name: an unanswered create may still land
        (UNANSWERED, IfVersion, 2),  # it is refused the second time, and the object is as sent
    ],
)
def test_a_put_without_an_answer_is_tried_again(store, fate, meant, keys):
    fates = [fate]

    def on_put(put: Put) -> Fate | None:
        return fates.pop() if fates and isinstance(put.precondition, meant) else None

    store.on_put = on_put
    assert probes.probe(store, clock=TickingClock()) == Capabilities(True, True, True, copies=False)
    assert not fates
    assert len({put.key for put in store.puts}) == keys, "and the race's"
    assert store.objects == {}


@pytest.mark.parametrize("number", [2, 3])
def test_a_put_without_an_answer_or_an_effect_is_told_from_one_that_was_accepted(store, number):
    """It is sent again and refused; the object, which is still the first, shows that none was."""
    answers = [PreconditionFailedError("412"), LOST]
    store.on_put = lambda put: answers.pop() if answers and put.number >= number else None
    found = probes.probe(store, clock=TickingClock())
    # An update that is refused is tried with the other form of an ETag.
    assert found == Capabilities(True, True, True, copies=False, quoted_e_tags=number == 2)


@pytest.mark.parametrize(("number", "deadline"), [(1, 60), (2, 5), (3, 5), (4, 5)])
def test_store_that_stops_answering_is_unavailable(store, number, deadline):
    clock = TickingClock(deadline)
    store.on_put = lambda put: LOST if put.number >= number else None
    with pytest.raises(StoreUnavailableError):
        probes.require_fencing(store, replaces=False, allow_unfenced=True, clock=clock)
    assert min(deadline, 30) - 1 < clock.now < min(deadline, 30) + 10
    assert store.objects == {}


def test_writer_that_may_not_delete_leaves_only_a_debug_line(store, caplog):
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


def test_store_without_conditions_is_refused_unless_allowed(caplog):
    store = careless()
    with pytest.raises(UnsupportedError, match="allow_unfenced") as caught:
        probes.require_fencing(store, replaces=False, allow_unfenced=False)
    assert caught.value.url == URL
    assert not caplog.records
    found = probes.require_fencing(store, replaces=True, allow_unfenced=True)
    assert not found.conditional_create
    assert "second writer" in caplog.text


@pytest.mark.parametrize(
    ("ignored", "lacks"), [([IfVersion], "replace"), ([IfAbsent, IfVersion], "create or replace")]
)
def test_what_would_be_replaced_is_refused_where_that_cannot_be_fenced(store, ignored, lacks):
    probes.require_rewrites(store, "nothing can be swept")
    probes.forget()
    store = weak(*ignored)
    with pytest.raises(UnsupportedError, match=f"be swept .* cannot {lacks}") as caught:
        probes.require_rewrites(store, "nothing can be swept")
    assert caught.value.url == URL
    assert not probes.can_rewrite(store)
    found = probes.require_fencing(store, replaces=False, allow_unfenced=True)
    assert found == Capabilities(lacks == "replace", False, True, copies=False)
    if found.conditional_create:
        with pytest.raises(UnsupportedError, match="another URL") as caught:
            probes.require_fencing(store, replaces=True, allow_unfenced=True)
        assert caught.value.url == URL


def test_bucket_is_probed_once_per_process_and_claim_unless_it_refused(store):
    for kind in (PermissionDeniedError, BucketNotFoundError):
        store.on_put = lambda put, kind=kind: kind("no")
        with pytest.raises(kind):
            probes.require_fencing(store, replaces=False, allow_unfenced=True)
    store.on_put = None
    del store.requests[:]
    modest = MemoryStore(URL)
    modest.capabilities = Capabilities(conditional_update=False, copies=False)
    assert not probes.can_rewrite(modest)
    for _ in range(3):
        probes.require_fencing(store, replaces=True, allow_unfenced=False)
    again = MemoryStore("s3://bucket/run/step-2")
    probes.require_fencing(again, replaces=False, allow_unfenced=False)
    assert len(store.requests) == 11
    assert again.requests == []


def test_buckets_are_told_apart():
    def of(url: str, endpoint_url: str | None = None) -> object:
        store = MemoryStore(url)
        store.endpoint_url = endpoint_url
        return probes.bucket_of(store)

    assert of("s3://b/x") == of("s3://b") == of("s3://b/y/z") == ("s3", "", "b")
    assert of("s3://b/x", "http://h:1") == ("s3", "http://h:1", "b")
    assert of("file:///tmp/a") == ("file", "", "/tmp/a")
    assert of("memory://b/x") == ("memory", "", "b/x")


@pytest.mark.backends("seaweed", "moto", "gcs", "azure")
def test_what_real_stores_claim_is_so_and_nothing_of_the_probe_stays(bucket):
    real = open_store(bucket.at("run/step-1"), bucket.storage_options)
    assert probes.probe(real) == real.capabilities
    assert bucket.keys() == []
