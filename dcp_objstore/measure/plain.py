"""Plain requests: what the network and the store give to a loop without format or digests."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dcp_objstore.checkpoint.names import data_key, new_nonce
from dcp_objstore.transfer.workers import DaemonPool

if TYPE_CHECKING:
    from dcp_objstore.doctor.scratch import Stop
    from dcp_objstore.stores.protocol import ObjectMeta, ObjectStore
    from dcp_objstore.transfer.upload import ByteArray


@dataclass(frozen=True)
class PlainRequest:
    """The PUT of an object, or the GET of a range of one.

    Attributes:
        key: key of the object.
        start: where the range begins.
        memory: the bytes to put, or where to read the range to.
    """

    key: str
    start: int
    memory: ByteArray


def plan_puts(memory: ByteArray, size_bytes: int) -> Sequence[PlainRequest]:
    """Cut memory into objects.

    They are named as data objects are, so `gc` knows as garbage what a crash may leave.
    """
    nonce = new_nonce()
    return [
        PlainRequest(data_key(0, number, nonce), 0, memory[start : start + size_bytes])
        for number, start in enumerate(range(0, len(memory), size_bytes))
    ]


def plan_gets(
    objects: Iterable[ObjectMeta], memory: ByteArray, size_bytes: int
) -> Sequence[PlainRequest]:
    """Cut objects into ranges, one after the other in memory. Framing that does not fit overlaps.

    Args:
        objects: the objects to read.
        memory: about as large as all of them.
        size_bytes: of one request.
    """
    requests: list[PlainRequest] = []
    at = 0
    for meta in objects:
        for start in range(0, meta.size_bytes, size_bytes):
            length = min(size_bytes, meta.size_bytes - start, len(memory))
            at = min(at, len(memory) - length)
            requests.append(PlainRequest(meta.key, start, memory[at : at + length]))
            at += length
    return requests


def put(store: ObjectStore, request: PlainRequest) -> None:
    """Put an object."""
    store.put(request.key, request.memory)


def get(store: ObjectStore, request: PlainRequest) -> None:
    """Read a range."""
    start, end = request.start, request.start + len(request.memory)
    with store.open_range(request.key, start, end) as body:
        body.readinto(memoryview(request.memory))


def send_all(
    do: Callable[[ObjectStore, PlainRequest], None],
    store: ObjectStore,
    requests: Sequence[PlainRequest],
    connections: int,
    stop: Stop,
) -> None:
    """Send requests, several at once. When this returns or raises, none of them is under way.

    Args:
        do: `put` or `get`.
        store: where to send them.
        requests: what to send.
        connections: the largest number in flight.
        stop: ends the loop between two requests.
    """
    if connections == 1:
        for request in requests:
            stop.check()
            do(store, request)
        return
    failed = threading.Event()

    def one(request: PlainRequest) -> None:
        stop.check()
        if failed.is_set():
            return
        try:
            do(store, request)
        except BaseException:
            failed.set()
            raise

    with DaemonPool(min(connections, len(requests)), "plain") as pool:
        sent = [pool.submit(one, request) for request in requests]
    wait(sent)
    for future in sent:
        future.result()
