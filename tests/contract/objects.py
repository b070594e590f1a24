"""Objects as a whole: what is put is read, found, replaced and gone, whatever its key."""

from __future__ import annotations

import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import pytest

from dcp_objstore.errors import InvalidUrlError, ObjectNotFoundError, StoreUnavailableError
from dcp_objstore.stores import ObjectStore
from dcp_objstore.stores.ranges import read_range
from tests.contract.common import PART, Endpoint, keys, read
from tests.support.guarantees import guarantee, of_kind

# Each of these means something in a URL, a shell, an XML listing or a signature.
AWKWARD_KEYS = [
    "a b/c d",
    "hash#tag",
    "question?mark=1&x=2",
    "percent%20not-decoded%",
    "plus+sign",
    "ünï/日本語/🎒",
    "quote'\"",
    "<xml>&amp;",
    "colon:semi;comma,at@dollar$",
    "star*[bracket]{brace}~!^`|",
    ".dots/..dots",
    "step-1000/__0_0.0123456789abcdef.distcp",
]
BAD_KEYS = ["", "/a", "a/", "a//b", "../a", "a/./b", "a/../b", "a\nb"]


class ObjectsContract(Endpoint):
    def test_it_lacks_what_it_is_declared_to_lack(self, request, store, capabilities):
        assert isinstance(store, ObjectStore)
        params = request.node.callspec.params if hasattr(request.node, "callspec") else {}
        if of_kind(self.endpoint, params.get("bucket")) is None:
            return  # not in the table
        claims = dataclasses.asdict(capabilities)
        lacking = {name for name, has in claims.items() if not has}
        assert lacking == of_kind(self.lacks, params.get("bucket"))

    @guarantee("read after write")
    def test_what_is_put_is_read_back(self, store, capabilities, side_door):
        for size in (0, 1, 100_000):
            data = np.random.default_rng(size).bytes(size)
            version = store.put("k", data)
            body, meta = store.get("k", max_size_bytes=size)
            assert body == data == side_door.read("k")
            assert isinstance(body, bytes)
            head = store.head("k")
            assert [(one.key, one.size_bytes) for one in (meta, head)] == [("k", size)] * 2
            if capabilities.conditional_update:
                assert meta.version == head.version == version

    @guarantee("read after write")
    def test_every_verb_sees_a_write_and_a_removal_at_once(self, store, side_door):
        writes = (
            side_door.write,
            store.put,
            lambda key, data: store.put_stream(
                key, iter([data]), part_size_bytes=PART, max_concurrency=1
            ),
        )
        for number in range(5):
            data = b"%d" % number * (5 - number)  # a shorter one replaces a longer one
            writes[number % 3]("a/k", data)
            assert read(store, "a/k") == side_door.read("a/k") == data
            assert read_range(store, "a/k", 0, len(data)) == data
            assert store.head("a/k").size_bytes == len(data)
            assert {meta.key: meta.size_bytes for meta in store.list("a/")} == {"a/k": len(data)}
            assert side_door.sizes() == {"a/k": len(data)}
            if number in (2, 4):
                (store.delete if number == 2 else side_door.remove)("a/k")
                assert keys(store, "a/") == keys(store) == []
                with pytest.raises(ObjectNotFoundError):
                    store.get("a/k", max_size_bytes=9)

    def test_several_buffers_become_one_object(self, store):
        store.put("k", [b"one", memoryview(b"-two"), np.frombuffer(b"-three", dtype=np.uint8)])
        assert read(store, "k") == b"one-two-three"
        store.put("k", [])
        assert read(store, "k") == b""

    @guarantee("whole or not")
    def test_a_reader_never_sees_a_mixture_of_two_writes(self, store, capabilities):
        bodies = [b"a" * 300_000, b"b" * 100_000]
        store.put("k", bodies[0])
        done = threading.Event()

        def rewrite() -> None:
            try:
                for number in range(16):
                    store.put("k", bodies[number % 2])
            finally:
                done.set()

        seen = set()
        with ThreadPoolExecutor(1) as pool:
            writing = pool.submit(rewrite)
            while not done.is_set():
                if capabilities.atomic_put:
                    with suppress(StoreUnavailableError):  # it changed during each of some reads
                        seen.add(read(store, "k"))
            writing.result()
        assert seen <= set(bodies)
        assert read(store, "k") == bodies[1]

    @guarantee("any key")
    def test_awkward_keys_are_kept_as_they_are(self, store, side_door):
        for key in AWKWARD_KEYS:
            store.put(key, b"x")
            assert read(store, key) == b"x"
            assert read_range(store, key, 0, 1) == b"x"
            assert store.head(key).key == key
        assert keys(store) == sorted(side_door.sizes()) == sorted(AWKWARD_KEYS)
        for key in AWKWARD_KEYS:
            prefix, slash, _ = key.rpartition("/")
            if slash:
                assert keys(store, f"{prefix}/") == [key]
            store.put_stream(key, iter([b"yy"]), part_size_bytes=PART, max_concurrency=2)
            assert read(store, key) == b"yy"
        assert side_door.sizes() == dict.fromkeys(AWKWARD_KEYS, 2)
        for key in AWKWARD_KEYS:
            store.delete(key)
        assert side_door.sizes() == {}

    @guarantee("any key")
    def test_unusable_keys_are_refused_and_nothing_is_written(self, store, side_door):
        for key in BAD_KEYS:
            for call in (
                lambda key=key: store.put(key, b"x"),
                lambda key=key: store.put_stream(
                    key, iter([b"x"]), part_size_bytes=PART, max_concurrency=1
                ),
                lambda key=key: store.get(key, max_size_bytes=1),
                lambda key=key: read_range(store, key, 0, 1),
                lambda key=key: store.head(key),
                lambda key=key: store.delete(key),
            ):
                with pytest.raises(InvalidUrlError):
                    call()
        assert keys(store) == []
        assert side_door.sizes() == {}

    @guarantee("typed errors")
    def test_absent_objects_are_not_found(self, store):
        for call in (
            lambda: store.get("none", max_size_bytes=1),
            lambda: read_range(store, "none", 0, 1),
            lambda: store.head("none"),
            lambda: store.head("none/below"),
        ):
            with pytest.raises(ObjectNotFoundError) as caught:
                call()
            assert caught.value.object_key in ("none", "none/below")
            assert caught.value.url == store.url

    def test_a_prefix_of_keys_is_no_object(self, store):
        store.put("a/b", b"x")
        with pytest.raises(ObjectNotFoundError):
            store.head("a")
        with pytest.raises(ObjectNotFoundError):
            store.get("a", max_size_bytes=9)
        store.delete("a")
        assert keys(store) == ["a/b"]

    def test_deleting_twice_is_no_error(self, store, side_door):
        store.put("k", b"x")
        store.put("k2", b"x")
        store.delete("k")
        store.delete("k")
        store.delete("never/was")
        assert keys(store) == list(side_door.sizes()) == ["k2"]

    def test_memory_may_change_once_put_has_returned(self, store):
        data = np.zeros(1000, dtype=np.uint8)
        store.put("k", data)
        store.put("list", [data, data])
        store.put_stream("s", iter([data]), part_size_bytes=PART, max_concurrency=1)
        data[:] = 1
        assert read(store, "k") == read(store, "s") == bytes(1000)
        assert read(store, "list") == bytes(2000)

    def test_many_threads_share_a_store(self, store):
        def work(number: int) -> bool:
            data = b"%d" % number * 1000
            store.put(f"k/{number}", data)
            return read_range(store, f"k/{number}", 0, len(data)) == data

        with ThreadPoolExecutor(16) as pool:
            assert all(pool.map(work, range(20)))
        assert len(keys(store, "k/")) == 20
