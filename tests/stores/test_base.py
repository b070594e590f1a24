"""What an error that leaves a store holds on to, and what it leaves alone."""

from __future__ import annotations

import gc
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dcp_objstore.config import TransferConfig
from dcp_objstore.errors import (
    CorruptDataError,
    CredentialsError,
    InputError,
    ObjectNotFoundError,
    PermissionDeniedError,
    StoreUnavailableError,
    UnsupportedError,
)
from dcp_objstore.stores import ObjectStore, open_store
from dcp_objstore.stores.base import as_buffers, cut_parts, cut_range
from dcp_objstore.stores.local import LocalStore
from dcp_objstore.stores.protocol import (
    LEFTOVER_ADVICE,
    Capabilities,
    CopySource,
    ObjectMeta,
    RangeReading,
    Version,
)
from dcp_objstore.stores.ranges import read_range
from dcp_objstore.threads import spawn

PART_BYTES = 5 << 20


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return open_store(f"file://{tmp_path}")


@pytest.mark.parametrize("transport", ["native", "boto3"])
def test_the_buffer_of_a_request_that_failed_dies_with_the_error(transport):
    options = {
        "key": "a",
        "secret": "b",
        "endpoint_url": "http://127.0.0.1:1",
        "transport": transport,
    }
    store = open_store("s3://bucket/run", options, TransferConfig(max_retries=0))
    body = np.zeros(PART_BYTES, dtype=np.uint8)
    alive = weakref.ref(body)
    gc.collect()
    gc.disable()
    try:
        try:
            store.put("k", body)
        except StoreUnavailableError:
            del body
        assert alive() is None
    finally:
        gc.enable()


def test_what_is_left_of_an_upload_is_said_after_the_advice_of_its_error(store, monkeypatch):
    def expire(_self, _place, source, *_):
        assert list(source) == [b"x"]  # its end is no error that hides this one
        source.left_parts = True
        raise expired

    expired = CredentialsError("expired", advice="log in again")
    monkeypatch.setattr(LocalStore, "_put_stream", expire)
    for _ in range(2):  # what stops a transfer may pass through several uploads
        with pytest.raises(CredentialsError) as caught:
            store.put_stream("k", iter([b"x"]), part_size_bytes=PART_BYTES, max_concurrency=1)
        assert caught.value.advice == f"log in again; {LEFTOVER_ADVICE}"


def test_errors_that_were_raised_in_a_circle_are_raised_like_others(store):
    def buffers() -> Iterator[bytes]:
        first, second = OSError("first"), KeyError("second")
        try:
            try:
                raise first
            except OSError as error:
                raise second from error
        except KeyError:
            raise first  # noqa: B904  its context is `second`, whose cause it is
        yield b""

    raised: list[BaseException] = []

    def put() -> None:
        try:
            store.put_stream("k", buffers(), part_size_bytes=PART_BYTES, max_concurrency=1)
        except OSError as error:
            raised.append(error)

    thread = threading.Thread(target=put, daemon=True)
    thread.start()
    thread.join(10)
    assert [str(error) for error in raised] == ["first"]


def test_an_error_leaves_alone_the_frames_of_what_its_caller_was_handling(store):
    kept: list[KeyError] = []

    def steps() -> Iterator[int]:
        try:
            raise KeyError("first")
        except KeyError as error:
            kept.append(error)
        yield 1
        yield 2

    waiting = steps()
    assert next(waiting) == 1
    try:
        raise kept[0]
    except KeyError:
        with pytest.raises(ObjectNotFoundError):
            store.head("absent")
    assert list(waiting) == [2]


@pytest.mark.parametrize("scheme", ["memory", "file"])
def test_a_range_that_was_read_leaves_no_reference_cycle(scheme, tmp_path):
    store = open_store(f"{scheme}://{'bucket/run' if scheme == 'memory' else tmp_path}")
    store.put("k", b"body")
    read_range(store, "k", 0, 4)
    gc.collect()
    gc.disable()
    try:
        for _ in range(10):
            assert read_range(store, "k", 0, 4) == b"body"
        assert gc.collect() == 0
    finally:
        gc.enable()


VERBS: dict[str, Callable[[ObjectStore], object]] = {
    "_put": lambda store: store.put("k", b"x"),
    "_get": lambda store: store.get("k", max_size_bytes=9),
    "_head": lambda store: store.head("k"),
    "_list": lambda store: list(store.list()),
    "_range_source": lambda store: read_range(store, "k", 0, 1),
    "_delete": lambda store: store.delete("k"),
}


@pytest.mark.parametrize("inner", VERBS)
def test_a_request_of_the_main_thread_is_sent_from_another(store, inner, monkeypatch):
    store.put("k", b"x")
    really, senders = getattr(LocalStore, inner), list[threading.Thread]()

    def send(*args: Any, **settings: Any) -> Any:
        senders.append(threading.current_thread())
        return really(*args, **settings)

    monkeypatch.setattr(LocalStore, inner, send)
    spawn(lambda: VERBS[inner](store), "other").join()
    assert [sender.name for sender in senders] == ["dcp_objstore-other"] * len(senders)
    VERBS[inner](store)
    assert threading.main_thread() not in senders
    assert len(set(senders)) > 1


@pytest.mark.usefixtures("usual_signals")
def test_ctrl_c_leaves_the_request_under_way_and_begins_no_other(store, monkeypatch):
    answer, begun, done = threading.Event(), list[str](), list[str]()

    def slow(_store: LocalStore, place: Path) -> None:
        # A wait here could be interrupted; a request of obstore cannot.
        begun.append(place.name)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        answer.wait(60)
        done.append(place.name)

    monkeypatch.setattr(LocalStore, "_delete", slow)
    with pytest.raises(KeyboardInterrupt):
        for key in ("a", "b", "c"):
            store.delete(key)
    assert (begun, done) == (["a"], [])
    answer.set()


def test_a_listing_of_several_pages_is_whole_and_its_errors_are_raised(store, monkeypatch):
    metas = [ObjectMeta(f"{number:04}", 0, Version(), datetime.now(UTC)) for number in range(1001)]
    monkeypatch.setattr(LocalStore, "_list", lambda _store, _folder: iter(metas))
    assert list(store.list()) == metas

    def broken(_store: LocalStore, _folder: str) -> Iterator[ObjectMeta]:
        yield from metas
        raise StoreUnavailableError("the next page")

    monkeypatch.setattr(LocalStore, "_list", broken)
    with pytest.raises(StoreUnavailableError, match="next page"):
        list(store.list())


@pytest.mark.parametrize(
    ("keys", "repeated"),
    [
        ("abc", None),
        ("cabd", None),  # in an order of its own
        ("aab", "a"),
        ("cacab", "a"),
        ("abcabcabc", "a"),
    ],
)
def test_a_listing_may_have_its_own_order_but_repeats_no_key_for_ever(
    store, monkeypatch, keys, repeated
):
    metas = [ObjectMeta(key, 0, Version(), datetime.now(UTC)) for key in keys]
    folders: list[str] = []
    monkeypatch.setattr(
        LocalStore, "_list", lambda _store, folder: folders.append(folder) or iter(metas)
    )
    if repeated is None:
        assert list(store.list("run/")) == metas
    else:
        with pytest.raises(StoreUnavailableError, match="same page") as caught:
            list(store.list("run/"))
        assert (caught.value.object_key, caught.value.url) == (repeated, store.url)
    assert folders == ["run"]
    monkeypatch.setattr(LocalStore, "_list", lambda _store, folder: folders.append("") or iter(()))
    assert list(store.list()) == []
    assert folders == ["run", "", ""], "a listing of nothing is asked for once more"


def test_the_arguments_and_answers_of_every_adapter_are_checked(store, monkeypatch):
    assert (store.range_reading, store.reports_throttling) == (RangeReading(), ())
    meta = ObjectMeta("k", 3, Version(), datetime.now(UTC))
    for body in (b"12", b"1234"):
        monkeypatch.setattr(LocalStore, "_get", lambda *_, body=body: (body, meta))
        with pytest.raises(CorruptDataError, match="announced 3 bytes and sent"):
            store.get("k", max_size_bytes=9)
    for start, end in ((-1, 1), (2, 1)):
        with pytest.raises(InputError, match="not a range"):
            store.open_range("k", start, end)
    sources = [CopySource("file:///a", start, end, Version()) for start, end in ((0, 1), (2, 2))]
    for wrong in ([], sources, [CopySource("file:///a", -1, 1, Version())]):
        with pytest.raises(InputError, match="not ranges to copy"):
            copy(store, wrong)
    monkeypatch.setattr(LocalStore, "capabilities", Capabilities(copies=False))
    with pytest.raises(UnsupportedError, match="copies nothing by itself"):
        copy(store, sources[:1])


def copy(store: ObjectStore, sources: list[CopySource]) -> None:
    store.copy("k", sources, part_size_bytes=9, max_concurrency=1, moved=lambda _: None)


def test_to_delete_what_is_absent_is_no_error_but_any_other_is(store, monkeypatch):
    raised: list[OSError] = []

    def delete(*_: object) -> None:
        raise raised[-1]

    monkeypatch.setattr(LocalStore, "_delete", delete)
    raised.append(FileNotFoundError("no"))
    store.delete("k")
    raised.append(PermissionError("no"))
    with pytest.raises(PermissionDeniedError) as caught:
        store.delete("k")
    assert (caught.value.object_key, caught.value.url) == ("k", store.url)


def test_ranges_and_streams_are_cut_into_as_few_equal_parts_as_may_be():
    for end, most, parts in (
        (10, 4, [(0, 4), (4, 8), (8, 10)]),
        (10, 5, [(0, 5), (5, 10)]),
        (11, 5, [(0, 4), (4, 8), (8, 11)]),
        (3, 9, [(0, 3)]),
        (2, 1, [(0, 1), (1, 2)]),
        (0, 9, []),
    ):
        assert list(cut_range(0, end, most)) == parts
    assert list(cut_range(7, 12, 4)) == [(7, 10), (10, 12)]
    for sizes, lengths in (
        ((3, 3, 3), [[3, 1], [2, 2], [1]]),
        ((9,), [[4], [4], [1]]),
        ((4, 0, 4), [[4], [4]]),
        ((0,), []),
        ((), []),
    ):
        parts = [
            [len(view) for view in part]
            for part in cut_parts(iter([bytes(size) for size in sizes]), 4)
        ]
        assert parts == lengths, sizes
    assert as_buffers(b"xy") == [b"xy"]
    assert as_buffers([b"x", b"y"]) == [b"x", b"y"]
    assert as_buffers((b"x", b"y")) == (b"x", b"y")
