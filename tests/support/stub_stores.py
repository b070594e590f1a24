"""What a transfer asks of any store, played in the test's process; and requests of it."""

from __future__ import annotations

import contextlib
import secrets
import threading
import weakref

import pytest
from typing_extensions import Buffer

from dcp_objstore.stores import ObjectStore, open_store
from dcp_objstore.stores.protocol import RangeReading
from dcp_objstore.stores.ranges import FetchedSource, Range
from dcp_objstore.transfer.ranges import RangeRequest


class Stub:
    """A store of which a test overrides what it plays; its ranges are those of `fetch`."""

    endpoint_url = None
    reports_throttling: tuple[str, ...] = ()
    range_reading = RangeReading()

    def __init__(self) -> None:
        self.url = f"stub://{secrets.token_hex(4)}"

    def fetch(self, start: int, end: int) -> Buffer:
        """Bytes of any object."""
        return bytes(end - start)

    def open_range(self, key: str, start: int, end: int) -> Range:
        """Open a range of any object."""
        return Range(FetchedSource(self.fetch), start, end, contextlib.nullcontext)


def memory_store(body: Buffer | None = None) -> ObjectStore:
    """A new store in memory, with this object at "o"."""
    store = open_store(f"memory://{secrets.token_hex(6)}")
    if body is not None:
        store.put("o", [body])
    return store


def requests_of(size_bytes: int, step: int) -> list[RangeRequest[None]]:
    """Requests for all of an object, of `step` bytes each."""
    return [
        RangeRequest(0, start, min(size_bytes, start + step))
        for start in range(0, size_bytes, step)
    ]


# Threads that tests before have left in a transport that never answers.
_left: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def _downloads() -> set[threading.Thread]:
    threads = threading.enumerate()
    return {one for one in threads if one.name.startswith("dcp_objstore-download")} - {*_left}


@pytest.fixture(autouse=True)
def earlier_downloads() -> None:
    """Do not wait for the threads of other tests; for modules that use `join_downloads`."""
    _left.update(_downloads())


def join_downloads() -> None:
    """Wait until all threads that fetch ranges have ended."""
    for thread in _downloads():
        thread.join(10)
        assert not thread.is_alive()
