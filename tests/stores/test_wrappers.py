"""The wrappers say what happened, and make happen what a plan says."""

from __future__ import annotations

import secrets

import pytest

from dcp_objstore.errors import ObjectNotFoundError, PreconditionFailedError, StoreUnavailableError
from dcp_objstore.stores import IfAbsent, ObjectStore, open_store
from dcp_objstore.stores.ranges import read_range
from dcp_objstore.stores.wrappers import PinnedStore
from tests.contract import keys, read
from tests.support.wrapped_stores import Fault, FaultStore, RecordingStore, Verb

PART = 5 * 1024 * 1024


@pytest.fixture
def inner() -> ObjectStore:
    return open_store(f"memory://{secrets.token_hex(4)}")


def test_every_request_is_recorded_with_its_bytes(inner):
    store = RecordingStore(inner)
    store.put("a", [b"12", b"3"], precondition=IfAbsent(), retry=False)
    store.put_stream("b", iter([b"1234", b"5"]), part_size_bytes=PART, max_concurrency=1)
    store.get("a", max_size_bytes=9)
    read_range(store, "b", 1, 3)
    store.head("a")
    list(store.list())
    store.delete("a")
    with pytest.raises(ObjectNotFoundError):
        store.head("a")
    found = store.requests
    assert [(r.verb, r.key, r.bytes) for r in found] == [
        ("put", "a", 3),
        ("put_stream", "b", 5),
        ("get", "a", 3),
        ("open_range", "b", 2),
        ("head", "a", 0),
        ("list", "", 0),
        ("delete", "a", 0),
        ("head", "a", 0),
    ]
    assert (found[3].start, found[3].end) == (1, 3)


def plan_for(verb: Verb, nth: int, fault: Fault):
    return lambda v, key, n: fault if (v, n) == (verb, nth) else None


def test_a_fault_before_the_effect_leaves_nothing(inner):
    error = StoreUnavailableError("lost")
    store = FaultStore(inner, plan_for("put", 1, Fault("before", error)))
    with pytest.raises(StoreUnavailableError) as caught:
        store.put("k", b"x")
    assert caught.value is error
    assert keys(inner) == []
    store.put("k", b"y")
    assert read(inner, "k") == b"y"


def test_a_fault_after_the_effect_loses_only_the_answer(inner):
    plan = plan_for("put", 2, Fault("after", StoreUnavailableError("lost")))
    store = FaultStore(inner, plan)
    store.put("k", b"first")
    with pytest.raises(StoreUnavailableError):
        store.put("k", b"second")
    assert read(inner, "k") == b"second"


@pytest.mark.parametrize(("when", "left"), [("before", []), ("after", ["k"])])
def test_a_stream_fails_before_or_after(inner, when, left):
    taken: list[int] = []

    def buffers():
        for number in range(5):
            taken.append(number)
            yield bytes(PART)

    fault = Fault(when, StoreUnavailableError("lost"))  # type: ignore[arg-type]
    store = FaultStore(inner, plan_for("put_stream", 1, fault))
    with pytest.raises(StoreUnavailableError, match="lost"):
        store.put_stream("k", buffers(), part_size_bytes=PART, max_concurrency=1)
    assert keys(inner) == left
    assert len(taken) == {"before": 0, "after": 5}[when]


@pytest.mark.parametrize("verb", ["get", "open_range", "head", "list", "delete"])
def test_every_verb_can_fail(inner, verb):
    calls = {
        "get": lambda: store.get("k", max_size_bytes=9),
        "open_range": lambda: read_range(store, "k", 0, 1),
        "head": lambda: store.head("k"),
        "list": lambda: list(store.list()),
        "delete": lambda: store.delete("k"),
    }
    inner.put("k", b"x")
    store = FaultStore(inner, plan_for(verb, 1, Fault("before", StoreUnavailableError("lost"))))
    with pytest.raises(StoreUnavailableError):
        calls[verb]()
    assert keys(inner) == ["k"]
    calls[verb]()


def test_wrappers_compose(inner):
    error = StoreUnavailableError("lost")
    faulty = FaultStore(inner, plan_for("head", 1, Fault("before", error)))
    store = RecordingStore(faulty)
    with pytest.raises(StoreUnavailableError):
        store.head("k")
    assert [one.verb for one in store.requests] == ["head"]
    assert store.url == inner.url
    assert store.capabilities == inner.capabilities


@pytest.mark.parametrize("first", ["get", "open_range", "head", "list"])
@pytest.mark.parametrize("then", ["get", "open_range", "head", "list"])
def test_whatever_told_the_state_of_an_object_first_no_verb_takes_another(inner, first, then):
    store = PinnedStore(inner, {})
    calls = {
        "get": lambda: store.get("k", max_size_bytes=9),
        "open_range": lambda: read_range(store, "k", 0, 1),
        "head": lambda: store.head("k"),
        "list": lambda: list(store.list()),
    }
    inner.put("k", b"x")
    for verb in (first, then):
        calls[verb]()
    inner.put("k", b"y")
    with pytest.raises(PreconditionFailedError):
        calls[then]()
