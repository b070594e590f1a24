"""Streams: whole objects out of any pieces, parts as promised, and nothing left when one breaks."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from dcp_objstore.errors import ObjectNotFoundError
from tests.contract.common import (
    PART,
    Endpoint,
    ExpectedError,
    keys,
    put_broken,
    random_bytes,
    read,
)
from tests.support.campaign import cases
from tests.support.guarantees import guarantee


class StreamsContract(Endpoint):
    @guarantee("parallel parts")
    @pytest.mark.parametrize(
        "size",
        cases(
            [0, 1, PART - 1, PART, PART + 1, 2 * PART + 12_345],
            default=[0, PART, 2 * PART + 12_345],
        ),
    )
    def test_a_stream_becomes_one_object(self, store, capabilities, side_door, size):
        data = random_bytes(size)
        # Slices that divide neither the data nor the parts evenly.
        step = 1_234_567
        slices = (data[at : at + step] for at in range(0, size, step))
        version = store.put_stream("k", slices, part_size_bytes=PART, max_concurrency=3)
        meta = store.head("k")
        assert meta.size_bytes == size
        if capabilities.conditional_update:
            assert meta.version == version
        assert read(store, "k") == data.tobytes()
        assert side_door.sizes() == {"k": size}
        assert side_door.leavings() == []

    @guarantee("equal parts")
    def test_all_parts_but_the_last_have_the_same_size(self, measured, capabilities):
        store, side_door = measured
        sizes = [1, PART - 7, PART, 17, 0, 11]
        data = [random_bytes(size) for size in sizes]
        store.put_stream("k", iter(data), part_size_bytes=PART, max_concurrency=2)
        assert read(store, "k") == b"".join(piece.tobytes() for piece in data)
        parts = side_door.part_sizes("k")
        if capabilities.multipart:
            assert parts is not None, "there are parts, and nobody tells their sizes"
            assert sum(parts) == sum(sizes)
            assert parts[:-1] == [PART] * (sum(sizes) // PART)
        else:
            assert parts is None, "a store with parts does not say so"

    @guarantee("clean abort")
    def test_an_error_in_the_iterator_comes_through_and_leaves_nothing(
        self, store, capabilities, side_door
    ):
        error = ExpectedError("the caller's own")
        cause = ValueError("why")
        error.__cause__ = cause
        put_broken(store, "k", [bytes(PART)] * 3, error)
        assert error.__cause__ is cause
        assert error.__context__ is None
        if capabilities.atomic_put:
            assert keys(store) == []
            assert side_door.sizes() == {}
            with pytest.raises(ObjectNotFoundError):
                store.head("k")
        if capabilities.clean_abort:
            assert side_door.leavings() == []

    @guarantee("clean abort")
    def test_an_error_that_looks_like_the_stores_comes_through_too(
        self, store, capabilities, side_door
    ):
        for error in FileNotFoundError("theirs"), KeyboardInterrupt(), ObjectNotFoundError("ours"):
            for pieces in ([], [b"x"]):
                put_broken(store, "k", pieces, error)
        if capabilities.atomic_put:
            assert side_door.sizes() == {}
        if capabilities.clean_abort:
            assert side_door.leavings() == []

    @guarantee("whole or not")
    def test_an_aborted_stream_leaves_the_old_object(self, store, capabilities, side_door):
        store.put("k", b"old")
        put_broken(store, "k", [b"new", bytes(PART)], ExpectedError())
        if capabilities.atomic_put:
            assert read(store, "k") == side_door.read("k") == b"old"

    @guarantee("whole or not")
    def test_an_object_is_not_seen_before_its_stream_is_whole(self, store, capabilities, side_door):
        seen: list[list[str]] = []

        def watched() -> Iterator[bytes]:
            for _ in range(2):
                yield bytes(PART)
                # In another thread: a transport may be in the middle of something in this one.
                seen.append(pool.submit(keys, store).result())
                seen.append(pool.submit(lambda: list(side_door.sizes())).result())

        with ThreadPoolExecutor(1) as pool:
            store.put_stream("k", watched(), part_size_bytes=PART, max_concurrency=1)
        if capabilities.atomic_put:
            assert seen == [[]] * 4
        assert side_door.sizes() == {"k": 2 * PART}

    @guarantee("bounded memory")
    def test_buffers_are_let_go_while_the_stream_goes_on(self, store, capabilities):
        total, concurrency = 6, 2
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
        if capabilities.multipart:
            assert peak >= concurrency, "one part at a time"
        assert store.head("k").size_bytes == total * PART
