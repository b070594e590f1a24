"""What an error that leaves a store holds on to, over a store of files."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from dcp_objstore.errors import ObjectNotFoundError
from dcp_objstore.stores import ObjectStore, open_store

PART_BYTES = 5 << 20


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return open_store(f"file://{tmp_path}")


def test_an_error_holds_no_buffer_of_the_stream_that_met_it(store: ObjectStore) -> None:
    died: list[weakref.ref[object]] = []

    def buffers() -> Iterator[np.ndarray]:
        body = np.zeros(PART_BYTES, dtype=np.uint8)
        died.append(weakref.ref(body))
        yield body
        del body
        failed = OSError("no")
        raise failed  # a circle: the error, its frame, the error

    gc.disable()
    try:
        with pytest.raises(OSError, match="no"):
            store.put_stream("k", buffers(), part_size_bytes=PART_BYTES, max_concurrency=1)
        assert [one() for one in died] == [None]
    finally:
        gc.enable()


def test_errors_that_were_raised_in_a_circle_are_raised_like_others(store: ObjectStore) -> None:
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


def test_an_error_leaves_alone_the_frames_of_what_its_caller_was_handling(
    store: ObjectStore,
) -> None:
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
