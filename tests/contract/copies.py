"""Copies: an object out of ranges of others, in the states that were asked for, or nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dcp_objstore.errors import (
    CorruptDataError,
    DcpObjstoreError,
    InputError,
    ObjectNotFoundError,
    PreconditionFailedError,
    UnsupportedError,
)
from dcp_objstore.stores import ObjectStore, Version
from dcp_objstore.stores.protocol import CopySource
from tests.contract.common import MIB, PART, Endpoint, keys, random_bytes, read
from tests.support.guarantees import guarantee

# Of two parts that are not too small for S3.
SIZE = 2 * PART + 12_345
LARGEST = PART + MIB


class CopiesContract(Endpoint):
    @guarantee("copies")
    def test_another_object_becomes_one(self, store, capabilities, side_door):
        if not capabilities.copies:
            return
        data, key = random_bytes(SIZE), "a b/#?é"
        source = CopySource(url_of(store, key), 0, SIZE, put(store, key, data))
        moved: list[int] = []
        store.put("copy", b"something else")
        version = copy(store, source, moved=moved.append)
        assert read(store, "copy") == side_door.read("copy") == data.tobytes()
        assert store.head("copy").version == version
        assert sum(moved) == SIZE
        assert side_door.leavings() == []

    @guarantee("copied ranges")
    def test_ranges_of_other_objects_become_one(self, store, capabilities, side_door):
        data = random_bytes(SIZE)
        sources = [
            CopySource(url_of(store, "a b/#?é"), 1, SIZE, put(store, "a b/#?é", data)),
            CopySource(url_of(store, "small"), 2, 5, store.put("small", b"0123456")),
        ]
        moved: list[int] = []
        if not (capabilities.copies and capabilities.range_copies):
            for some in (sources, sources[:1], sources[1:]):
                with pytest.raises(DcpObjstoreError) as refused:
                    copy(store, *some)
                # A server may lack what its adapter has a request for.
                assert isinstance(refused.value, UnsupportedError) or store.capabilities.copies
            assert "copy" not in side_door.sizes()
            return
        store.put("copy", b"something else")
        version = copy(store, *sources, moved=moved.append)
        assert read(store, "copy") == data[1:].tobytes() + b"234"
        assert store.head("copy").version == version
        assert sum(moved) == SIZE + 2
        parts = side_door.part_sizes("copy")
        assert parts is None or sorted(parts) == sorted(moved)
        assert max(moved) <= LARGEST
        assert side_door.leavings() == []

    @guarantee("copies")
    def test_nothing_is_copied_of_an_object_in_another_state(self, store, capabilities, side_door):
        if not capabilities.copies:
            return
        size = PART + 9
        version = put(store, "from", random_bytes(size))
        store.put("copy", b"old")
        put(store, "from", 255 - random_bytes(size))
        now = store.head("from").version
        url = url_of(store, "from")
        whole, past = CopySource(url, 0, size, now), CopySource(url, 1, size + 1, now)
        ranges = capabilities.range_copies
        for error, sources in (
            (PreconditionFailedError, [CopySource(url, 0, size, version)]),
            (ObjectNotFoundError, [*[whole] * ranges, CopySource(f"{url}-not", 0, 1, now)]),
            ((CorruptDataError, InputError), [past]),
            ((CorruptDataError, InputError), [past, *[whole] * ranges]),
            (InputError, [CopySource(url, 7, 7, now)]),
            (UnsupportedError, [CopySource("memory://elsewhere/from", 0, 1, now)]),
        ):
            with pytest.raises(error):
                copy(store, *sources)
            assert read(store, "copy") == b"old"
            assert keys(store) == ["copy", "from"]
            assert side_door.leavings() == []

    @guarantee("copies")
    @pytest.mark.parametrize("error", [KeyboardInterrupt(), DcpObjstoreError("the caller's own")])
    def test_a_copy_that_is_stopped_leaves_nothing(self, store, capabilities, side_door, error):
        if not capabilities.copies:
            return

        def stop(_: int) -> None:
            raise error

        source = CopySource(url_of(store, "f"), 0, SIZE, put(store, "f", random_bytes(SIZE)))
        with pytest.raises(type(error)) as caught:
            copy(store, source, moved=stop)
        assert caught.value is error
        assert keys(store) == ["f"]
        assert side_door.leavings() == []


def url_of(store: ObjectStore, key: str) -> str:
    return f"{store.url}/{key}"


def put(store: ObjectStore, key: str, data: object) -> Version:
    return store.put_stream(key, iter([data]), part_size_bytes=2 * SIZE, max_concurrency=1)  # type: ignore[list-item]


def copy(
    store: ObjectStore, *sources: CopySource, moved: Callable[[int], object] = lambda _: None
) -> Version:
    return store.copy(
        "copy",
        sources,
        part_size_bytes=LARGEST,
        max_concurrency=2,
        moved=moved,  # type: ignore[arg-type]
    )
