"""What every `ObjectStore` guarantees, as tests over a `store` fixture.

A module that has a store to check subclasses `StoreContract` and provides the fixture `store`:
an empty store that nobody else uses.
"""

from __future__ import annotations

import gc
import hashlib
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from dcp_objstore.errors import (
    CorruptDataError,
    InputError,
    InvalidUrlError,
    ObjectNotFoundError,
    PreconditionFailedError,
)
from dcp_objstore.stores import IfAbsent, IfVersion, ObjectStore, Version

MIB = 1024 * 1024
PART = 5 * MIB
MAX = 64 * MIB

# Each of these means something in a URL, a shell, an XML listing or a signature.
AWKWARD_KEYS = [
    "a b/c d",
    "hash#tag",
    "question?mark=1&x=2",
    "percent%20not-decoded%",
    "plus+sign",
    "ünï/日本語/🎒",
    "quote'\"",
    "brackets[]{}()",
    "tilde~/star*",
    "colon:semi;comma,at@dollar$",
    "a=b&c=d",
    "less<more>",
    ".hidden/..twodots",
    "step-1000/__0_0.0123456789abcdef.distcp",
]


class ExpectedError(Exception):
    """Raised by test iterators; must come through unchanged."""


def read(store: ObjectStore, key: str) -> bytes:
    return store.get(key, max_size_bytes=MAX)[0]


def keys(store: ObjectStore, prefix: str = "") -> list[str]:
    return sorted(meta.key for meta in store.list(prefix))


def race(count: int, attempt: Callable[[int], Version]) -> list[int]:
    """Run `attempt` in `count` threads at once; the numbers of those that did not lose."""
    barrier = threading.Barrier(count)

    def one(number: int) -> bool:
        barrier.wait()
        try:
            attempt(number)
        except PreconditionFailedError:
            return False
        return True

    with ThreadPoolExecutor(count) as pool:
        won = list(pool.map(one, range(count)))
    return [number for number, ok in enumerate(won) if ok]


class StoreContract:
    """The guarantees. Each test leaves the store checked, not only the answer."""

    def test_it_is_an_object_store(self, store: ObjectStore) -> None:
        assert isinstance(store, ObjectStore)

    @pytest.mark.parametrize("size", [0, 1, 100_000])
    def test_what_is_put_is_read_back(self, store: ObjectStore, size: int) -> None:
        data = np.random.default_rng(size).bytes(size)
        version = store.put("k", data)
        body, meta = store.get("k", max_size_bytes=size)
        assert body == data
        assert isinstance(body, bytes)
        assert (meta.key, meta.size_bytes, meta.version) == ("k", size, version)
        assert store.head("k") == meta

    def test_several_buffers_become_one_object(self, store: ObjectStore) -> None:
        store.put("k", [b"one", memoryview(b"-two"), np.frombuffer(b"-three", dtype=np.uint8)])
        assert read(store, "k") == b"one-two-three"
        store.put("k", [])
        assert read(store, "k") == b""

    def test_a_second_put_replaces_the_first(self, store: ObjectStore) -> None:
        store.put("k", b"first, longer")
        store.put("k", b"second")
        assert read(store, "k") == b"second"

    @pytest.mark.parametrize("key", AWKWARD_KEYS)
    def test_awkward_keys_are_kept_as_they_are(self, store: ObjectStore, key: str) -> None:
        store.put(key, b"x")
        assert keys(store) == [key]
        assert store.head(key).key == key
        assert read(store, key) == b"x"
        assert bytes(store.get_range(key, 0, 1)) == b"x"
        store.put_stream(key, iter([b"y"]), part_size_bytes=PART, max_concurrency=2)
        assert read(store, key) == b"y"
        store.delete(key)
        assert keys(store) == []

    @pytest.mark.parametrize("key", ["", "/a", "a/", "a//b", "../a", "a/./b", "a/../b", "a\nb"])
    def test_unusable_keys_are_refused_and_nothing_is_written(
        self, store: ObjectStore, key: str
    ) -> None:
        for call in (
            lambda: store.put(key, b"x"),
            lambda: store.put_stream(key, iter([b"x"]), part_size_bytes=PART, max_concurrency=1),
            lambda: store.get(key, max_size_bytes=1),
            lambda: store.get_range(key, 0, 1),
            lambda: store.head(key),
            lambda: store.delete(key),
        ):
            with pytest.raises(InvalidUrlError):
                call()
        assert keys(store) == []

    def test_absent_objects_are_not_found(self, store: ObjectStore) -> None:
        for call in (
            lambda: store.get("none", max_size_bytes=1),
            lambda: store.get_range("none", 0, 1),
            lambda: store.head("none"),
            lambda: store.head("none/below"),
        ):
            with pytest.raises(ObjectNotFoundError) as caught:
                call()
            assert caught.value.object_key in ("none", "none/below")
            assert caught.value.url == store.url

    def test_a_prefix_of_keys_is_no_object(self, store: ObjectStore) -> None:
        store.put("a/b", b"x")
        with pytest.raises(ObjectNotFoundError):
            store.head("a")
        with pytest.raises(ObjectNotFoundError):
            store.get("a", max_size_bytes=9)
        store.delete("a")
        assert keys(store) == ["a/b"]

    def test_deleting_twice_is_no_error(self, store: ObjectStore) -> None:
        store.put("k", b"x")
        store.put("k2", b"x")
        store.delete("k")
        store.delete("k")
        store.delete("never/was")
        assert keys(store) == ["k2"]

    # Reading

    def test_ranges_give_exactly_their_bytes(self, store: ObjectStore) -> None:
        data = np.random.default_rng(0).bytes(100_000)
        store.put("k", data)
        for start, end in [(0, 1), (0, 100_000), (99_999, 100_000), (1234, 56_789), (7, 7)]:
            assert bytes(store.get_range("k", start, end)) == data[start:end]

    @pytest.mark.parametrize(("start", "end"), [(0, 11), (9, 11), (10, 11), (500, 600)])
    def test_a_range_past_the_end_is_corrupt(
        self, store: ObjectStore, start: int, end: int
    ) -> None:
        store.put("k", b"0123456789")
        with pytest.raises(CorruptDataError):
            store.get_range("k", start, end)

    @pytest.mark.parametrize(("start", "end"), [(-1, 2), (3, 2)])
    def test_a_range_that_is_none_is_refused(
        self, store: ObjectStore, start: int, end: int
    ) -> None:
        store.put("k", b"0123456789")
        with pytest.raises(InputError):
            store.get_range("k", start, end)

    def test_get_refuses_an_object_that_is_too_large(self, store: ObjectStore) -> None:
        store.put("k", b"0123456789")
        with pytest.raises(CorruptDataError, match="10 bytes"):
            store.get("k", max_size_bytes=9)
        assert store.get("k", max_size_bytes=10)[0] == b"0123456789"

    # Listing

    def test_list_gives_keys_relative_to_the_root_and_below_the_prefix(
        self, store: ObjectStore
    ) -> None:
        for key in ["a/1", "a/2", "a/b/3", "ab/4", "c"]:
            store.put(key, key.encode())
        assert keys(store) == ["a/1", "a/2", "a/b/3", "ab/4", "c"]
        assert keys(store, "a/") == ["a/1", "a/2", "a/b/3"]
        assert keys(store, "a/b/") == ["a/b/3"]
        assert keys(store, "none/") == []
        assert keys(store, "c/") == []

    def test_list_tells_what_head_tells(self, store: ObjectStore) -> None:
        store.put("k", b"12345")
        store.put_stream("s", iter([b"123"]), part_size_bytes=PART, max_concurrency=1)
        for meta in store.list():
            head = store.head(meta.key)
            assert (meta.size_bytes, meta.version.e_tag) == (head.size_bytes, head.version.e_tag)
            assert meta.last_modified.tzinfo is not None
            assert abs((meta.last_modified - head.last_modified).total_seconds()) < 1

    @pytest.mark.parametrize("prefix", ["a", "/", "a//", "../", "/a/"])
    def test_list_refuses_a_prefix_that_is_not_whole_segments(
        self, store: ObjectStore, prefix: str
    ) -> None:
        with pytest.raises(InvalidUrlError):
            list(store.list(prefix))

    def test_list_of_an_empty_store_is_empty(self, store: ObjectStore) -> None:
        assert keys(store) == []

    # Preconditions

    def test_create_only_where_nothing_is(self, store: ObjectStore) -> None:
        version = store.put("k", b"first", precondition=IfAbsent())
        for retry in (True, False):
            with pytest.raises(PreconditionFailedError):
                store.put("k", b"second", precondition=IfAbsent(), retry=retry)
        assert store.get("k", max_size_bytes=9)[0] == b"first"
        assert store.head("k").version == version
        store.delete("k")
        store.put("k", b"third", precondition=IfAbsent(), retry=False)
        assert read(store, "k") == b"third"

    def test_update_only_from_the_known_version(self, store: ObjectStore) -> None:
        first = store.put("k", b"1", precondition=IfAbsent())
        second = store.put("k", b"22", precondition=IfVersion(first), retry=False)
        assert first != second
        with pytest.raises(PreconditionFailedError):
            store.put("k", b"333", precondition=IfVersion(first), retry=False)
        assert read(store, "k") == b"22"
        store.put("k", b"4444", precondition=IfVersion(store.head("k").version))
        assert read(store, "k") == b"4444"

    def test_update_of_an_absent_object_fails_its_precondition(self, store: ObjectStore) -> None:
        version = store.put("k", b"1")
        store.delete("k")
        with pytest.raises(PreconditionFailedError):
            store.put("k", b"2", precondition=IfVersion(version))
        assert keys(store) == []

    def test_an_update_with_a_streamed_objects_version(self, store: ObjectStore) -> None:
        version = store.put_stream("k", iter([b"1"]), part_size_bytes=PART, max_concurrency=1)
        store.put("k", b"2", precondition=IfVersion(version))
        with pytest.raises(PreconditionFailedError):
            store.put("k", b"3", precondition=IfVersion(version))
        assert read(store, "k") == b"2"

    def test_sixteen_creators_have_one_winner(self, store: ObjectStore) -> None:
        for round_number in range(5):
            key = f"race-{round_number}"

            def attempt(number: int, key: str = key) -> Version:
                data = b"writer %d" % number
                return store.put(key, data, precondition=IfAbsent(), retry=False)

            winners = race(16, attempt)
            assert len(winners) == 1
            assert read(store, key) == b"writer %d" % winners[0]

    def test_sixteen_updaters_have_one_winner(self, store: ObjectStore) -> None:
        version = store.put("k", b"start")
        for round_number in range(5):

            def attempt(number: int, old: Version = version, nth: int = round_number) -> Version:
                data = b"round %d writer %d" % (nth, number)
                return store.put("k", data, precondition=IfVersion(old), retry=False)

            winners = race(16, attempt)
            assert len(winners) == 1
            assert read(store, "k") == b"round %d writer %d" % (round_number, winners[0])
            version = store.head("k").version

    # Streams

    @pytest.mark.parametrize("size", [0, 1, PART - 1, PART, PART + 1, 3 * PART + 12_345])
    def test_a_stream_becomes_one_object(self, store: ObjectStore, size: int) -> None:
        data = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
        # Slices that divide neither the data nor the parts evenly.
        step = 1_234_567
        slices = (data[at : at + step] for at in range(0, size, step))
        version = store.put_stream("k", slices, part_size_bytes=PART, max_concurrency=3)
        meta = store.head("k")
        assert meta.size_bytes == size
        assert meta.version == version
        assert hashlib.sha256(read(store, "k")).digest() == hashlib.sha256(data).digest()

    def test_an_error_in_the_iterator_comes_through_and_leaves_nothing(
        self, store: ObjectStore
    ) -> None:
        error = ExpectedError("the caller's own")
        cause = ValueError("why")

        def broken() -> Iterator[np.ndarray]:
            for _ in range(3):
                yield np.zeros(PART, dtype=np.uint8)
            raise error from cause

        with pytest.raises(ExpectedError) as caught:
            store.put_stream("k", broken(), part_size_bytes=PART, max_concurrency=2)
        assert caught.value is error
        assert error.__cause__ is cause
        assert error.__context__ is None
        assert keys(store) == []
        with pytest.raises(ObjectNotFoundError):
            store.head("k")

    @pytest.mark.parametrize(
        "error", [FileNotFoundError("theirs"), KeyboardInterrupt(), ObjectNotFoundError("ours")]
    )
    def test_an_error_that_looks_like_the_stores_comes_through_too(
        self, store: ObjectStore, error: BaseException
    ) -> None:
        def broken() -> Iterator[bytes]:
            yield b"x"
            raise error

        with pytest.raises(type(error)) as caught:
            store.put_stream("k", broken(), part_size_bytes=PART, max_concurrency=2)
        assert caught.value is error
        assert keys(store) == []

    def test_an_aborted_stream_leaves_the_old_object(self, store: ObjectStore) -> None:
        store.put("k", b"old")

        def broken() -> Iterator[bytes]:
            yield b"new"
            raise ExpectedError

        with pytest.raises(ExpectedError):
            store.put_stream("k", broken(), part_size_bytes=PART, max_concurrency=2)
        assert read(store, "k") == b"old"

    def test_buffers_are_let_go_while_the_stream_goes_on(self, store: ObjectStore) -> None:
        if not store.capabilities.multipart:
            pytest.skip("keeps or writes a stream in order; checked by its own test")
        total, concurrency = 24, 2
        alive: set[int] = set()
        peak = 0

        def buffers() -> Iterator[np.ndarray]:
            nonlocal peak
            for number in range(total):
                buffer = np.full(PART, number, dtype=np.uint8)
                alive.add(number)
                weakref.finalize(buffer, alive.discard, number)
                peak = max(peak, len(alive))
                yield buffer
                del buffer

        store.put_stream("k", buffers(), part_size_bytes=PART, max_concurrency=concurrency)
        gc.collect()
        assert not alive
        # In flight, the one being built and the one that waits; not the whole object.
        assert peak <= concurrency + 3
        assert store.head("k").size_bytes == total * PART

    def test_memory_may_change_once_put_has_returned(self, store: ObjectStore) -> None:
        data = np.zeros(1000, dtype=np.uint8)
        store.put("k", data)
        store.put("list", [data, data])
        store.put_stream("s", iter([data]), part_size_bytes=PART, max_concurrency=1)
        data[:] = 1
        assert read(store, "k") == read(store, "s") == bytes(1000)
        assert read(store, "list") == bytes(2000)

    def test_buffers_of_another_shape_are_refused(self, store: ObjectStore) -> None:
        for wrong in (
            np.zeros((2, 2), dtype=np.uint8),
            np.zeros(8, dtype=np.uint8)[::2],
            np.zeros(2, dtype=np.float32),
        ):
            with pytest.raises(InputError):
                store.put("k", wrong)
            with pytest.raises(InputError):
                store.put("k", [b"x", wrong])
            with pytest.raises(InputError):
                store.put_stream("k", iter([wrong]), part_size_bytes=PART, max_concurrency=1)
        assert keys(store) == []

    def test_many_threads_share_a_store(self, store: ObjectStore) -> None:
        def work(number: int) -> bool:
            data = b"%d" % number * 1000
            store.put(f"k/{number}", data)
            return bytes(store.get_range(f"k/{number}", 0, len(data))) == data

        with ThreadPoolExecutor(16) as pool:
            assert all(pool.map(work, range(64)))
        assert len(keys(store, "k/")) == 64
