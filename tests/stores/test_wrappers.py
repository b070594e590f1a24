"""The wrappers say what happened, and make happen what a plan says."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable

import pytest

from dcp_objstore.errors import PreconditionFailedError, StoreUnavailableError
from dcp_objstore.stores import IfAbsent, ObjectStore, open_store
from dcp_objstore.stores.ranges import read_range
from dcp_objstore.stores.wrappers import PinnedStore
from tests.contract import keys, read
from tests.support.wrapped_stores import Fault, FaultStore, RecordingStore

PART = 5 * 1024 * 1024


@pytest.fixture
def inner() -> ObjectStore:
    return open_store(f"memory://{secrets.token_hex(4)}")


READS: dict[str, Callable[[ObjectStore], object]] = {
    "get": lambda store: store.get("k", max_size_bytes=9),
    "open_range": lambda store: read_range(store, "k", 0, 1),
    "head": lambda store: store.head("k"),
    "list": lambda store: list(store.list()),
}


def test_every_request_is_recorded_with_its_bytes_and_fails_where_the_plan_says(inner):
    lost = StoreUnavailableError("lost")
    plan: dict[tuple[str, str, int], Fault] = {
        ("put", "before", 1): Fault("before", lost),
        ("put", "after", 1): Fault("after", lost),
        ("put_stream", "after", 1): Fault("after", lost),
        ("head", "k", 1): Fault("before", lost),
    }
    faulty = FaultStore(inner, lambda *request: plan.get(request))
    store = RecordingStore(faulty)
    store.put("k", [b"12", b"3"], precondition=IfAbsent(), retry=False)
    for key in ("before", "after"):
        with pytest.raises(StoreUnavailableError, match="lost"):
            store.put(key, b"x")
    store.put_stream("stream", iter([b"1234", b"5"]), part_size_bytes=PART, max_concurrency=1)
    with pytest.raises(StoreUnavailableError, match="lost"):
        store.put_stream("after", iter([b"yy"]), part_size_bytes=PART, max_concurrency=1)
    with pytest.raises(StoreUnavailableError, match="lost"):
        store.head("k")
    for read_it in READS.values():
        read_it(store)
    store.delete("k")
    assert [(one.verb, one.key, one.bytes) for one in store.requests] == [
        ("put", "k", 3),
        ("put", "before", 1),
        ("put", "after", 1),
        ("put_stream", "stream", 5),
        ("put_stream", "after", 2),
        ("head", "k", 0),
        ("get", "k", 3),
        ("open_range", "k", 1),
        ("head", "k", 0),
        ("list", "", 0),
        ("delete", "k", 0),
    ]
    assert (store.requests[7].start, store.requests[7].end) == (0, 1)
    assert keys(inner) == ["after", "stream"]
    assert read(inner, "after") == b"yy"


def test_whatever_told_the_state_of_an_object_first_no_verb_takes_another(inner):
    for first, then in itertools.product(READS.values(), repeat=2):
        store = PinnedStore(inner, {})
        inner.put("k", b"x")
        first(store)
        then(store)
        inner.put("k", b"y")
        with pytest.raises(PreconditionFailedError):
            then(store)
