"""Copies that a store makes itself: how they are cut, how many are under way, what fails."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from dcp_objstore.config import MIB, TransferConfig
from dcp_objstore.errors import StoreUnavailableError, TransferStalledError
from dcp_objstore.observe.events import PartCopied
from dcp_objstore.stores.admission.limiter import limiter_of
from dcp_objstore.stores.protocol import CopySource, Version
from dcp_objstore.transfer.copies import LEAST_PART_BYTES, copied_parts, copy_objects
from dcp_objstore.transfer.progress import Progress
from dcp_objstore.transfer.upload import Uploaded
from tests.support.listening import heard_channel, of

TIB = 1024 * 1024 * MIB


def sources(*sizes: int) -> list[CopySource]:
    return [CopySource("s3://b/k", 7, 7 + size, Version("e")) for size in sizes]


class Copying:
    """A store that copies.

    Attributes:
        asked: the part size and the most parts at a time, by key.
    """

    endpoint_url = None

    def __init__(self, do: Callable[[str], object] = lambda key: None) -> None:
        self.url = f"stub://{secrets.token_hex(4)}"
        self.asked: dict[str, tuple[int, int]] = {}
        self.do = do

    def copy(
        self,
        key: str,
        sources: Sequence[CopySource],
        *,
        part_size_bytes: int,
        max_concurrency: int,
        moved: Callable[[int], None],
    ) -> Version:
        self.asked[key] = part_size_bytes, max_concurrency
        self.do(key)
        for source in sources:
            moved(source.end - source.start)
        return Version(key)


def copied(store: Any, objects: Any, progress: Progress | None = None, **settings: Any) -> Any:
    return copy_objects(store, objects, TransferConfig(**settings), progress or Progress(60))


@pytest.mark.parametrize(
    ("sizes", "parts"),
    [
        ([1], [1]),
        ([64 * MIB], [64 * MIB]),
        ([64 * MIB + 2], [32 * MIB + 1] * 2),
        ([1, 128 * MIB, 5], [1, 64 * MIB, 64 * MIB, 5]),
    ],
)
def test_an_object_is_copied_in_parts_of_64_mib(sizes, parts):
    assert copied_parts(sources(*sizes)) == parts
    assert LEAST_PART_BYTES == 5 * MIB, "what S3 takes"


@pytest.mark.parametrize(
    "sizes", [[1], [TIB], [5 * TIB], [TIB] + [1] * 5000, [MIB] * 9_999, [MIB] * 10_000]
)
def test_an_object_of_any_size_is_copied_in_10000_parts_at_most(sizes):
    """More sources than an object may have parts are refused by the store."""
    parts = copied_parts(sources(*sizes))
    assert sum(parts) == sum(sizes)
    assert len(parts) <= 10_000
    store = Copying()
    copied(store, {"o": sources(*sizes)})
    room = max(1, 10_000 - len(sizes))
    assert store.asked["o"][0] == max(64 * MIB, -(-sum(sizes) // room))


@pytest.mark.parametrize(
    ("objects", "concurrency", "threads", "parts_each"),
    [(1, "auto", 1, 16), (2, "auto", 2, 8), (9, "auto", 4, 4), (4, 2, 4, 1), (2, 40, 2, 20)],
)
def test_a_few_objects_are_copied_at_a_time_and_share_the_parts(
    objects, concurrency, threads, parts_each
):
    most, under_way, lock = 0, 0, threading.Lock()
    all_began = threading.Barrier(threads)

    def meet(key: str) -> None:
        nonlocal most, under_way
        with lock:
            under_way += 1
            most = max(most, under_way)
        if int(key) < threads:
            all_began.wait(30)
        with lock:
            under_way -= 1

    store = Copying(meet)
    names = [str(number) for number in range(objects)]
    wanted = {name: sources(int(name) + 1, 1) for name in names}
    found = copied(store, wanted, upload_concurrency=concurrency)
    assert most == threads
    assert {concurrent for _, concurrent in store.asked.values()} == {parts_each}
    assert found == {name: Uploaded(int(name) + 2, Version(name), 2) for name in names}
    assert copied(store, {}) == {}


def test_each_part_counts_as_bytes_that_moved_and_as_a_request_that_was_answered():
    store: Any = Copying()
    while limiter_of(store).spend_retry():
        pass
    channel, heard = heard_channel()
    progress = Progress(60, channel)
    copied(store, {"o": sources(*range(1, 7))}, progress)
    channel.flush()
    assert progress.moved_bytes == 21
    told = [(one.object_key, one.size_bytes) for one in of(PartCopied, heard)]
    assert told == [("o", size) for size in range(1, 7)]
    assert limiter_of(store).spend_retry(), "answers refund retries"


@pytest.mark.parametrize("error", [StoreUnavailableError("planned"), ZeroDivisionError()])
def test_an_object_that_cannot_be_copied_is_told_and_a_defect_is_raised(error):
    def fail(key: str) -> None:
        if key == "bad":
            raise error

    wanted = {"good": sources(1), "bad": sources(1), "last": sources(2)}
    if isinstance(error, ZeroDivisionError):
        with pytest.raises(ZeroDivisionError):
            copied(Copying(fail), wanted)
    else:
        good, last = Uploaded(1, Version("good"), 1), Uploaded(2, Version("last"), 1)
        assert copied(Copying(fail), wanted) == {"good": good, "last": last, "bad": error}


def test_copies_that_stall_are_told_and_those_that_ended_count(monkeypatch):
    monkeypatch.setattr("dcp_objstore.transfer.upload._ABORT_GRACE_SECONDS", 0.05)
    let_go = threading.Event()

    def hang(key: str) -> None:
        if key == "hangs":
            let_go.wait(30)

    progress = Progress(0.2)
    found = copied(Copying(hang), {"good": sources(1), "hangs": sources(2, 3)}, progress)
    assert found["good"] == Uploaded(1, Version("good"), 1)
    assert isinstance(found["hangs"], TransferStalledError)
    let_go.set()
    for thread in threading.enumerate():
        if "-copy-" in thread.name:
            thread.join(30)
    assert progress.moved_bytes == 1, "what is left to itself begins no further part"


def test_nothing_is_copied_once_the_transfer_was_stopped():
    store, progress = Copying(), Progress(60)
    progress.stop(StoreUnavailableError("stopped"))
    found = copied(store, {"o": sources(1)}, progress)
    assert isinstance(found["o"], StoreUnavailableError)
    assert not store.asked
