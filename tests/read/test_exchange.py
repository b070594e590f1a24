"""`Exchange`: what one rank has fetched reaches the tensors of all others, on whatever hosts."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import pickle
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from dcp_objstore.distributed import failures
from dcp_objstore.errors import CheckpointCorruptError, RankFailedError
from dcp_objstore.read import plan as load_plan, tensor_read
from dcp_objstore.read.item_read import ItemRead
from dcp_objstore.read.items import ItemLocation
from dcp_objstore.read.peers import exchange, meeting, plan as exchange_plan, shared_memory
from dcp_objstore.read.peers.exchange import Exchange, PeerFailedError, Share
from dcp_objstore.read.peers.meeting import Offer, group_digest, share_out
from dcp_objstore.read.peers.plan import ExchangePlan, Segment, SharedRequest
from dcp_objstore.read.peers.shared_memory import SharedMemoryAddress
from dcp_objstore.read.plan import PlannedLoad, plan_load
from dcp_objstore.read.tensor_read import consume
from dcp_objstore.transfer.digests import block_digest
from dcp_objstore.transfer.progress import Progress
from dcp_objstore.transfer.ranges import RangeRequest, Span
from dcp_objstore.transfer.workers import DaemonPool
from tests.support.rank_threads import RankGroup, RankThreads
from tests.support.states import same_bits, seeded

BLOCK = 64  # bytes, in place of 4 MiB
FRAMING = 24  # bytes between two items of an object
SHAPES = {"wide": (5, 24), "tall": (40, 3), "row": (9,), "bytes": (70,), "one": ()}
Part = tuple[str, tuple[int, ...], tuple[int, ...]]  # key, offsets, sizes


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, names in (
        (tensor_read, ("BLOCK_SIZE_BYTES", "DEFAULT_GAP_BYTES")),
        (load_plan, ("BLOCK_SIZE_BYTES",)),
        (meeting, ("BLOCK_SIZE_BYTES", "DEFAULT_GAP_BYTES")),
        (exchange_plan, ("DEFAULT_GAP_BYTES",)),
    ):
        for name in names:
            monkeypatch.setattr(module, name, BLOCK if name.startswith("BLOCK") else FRAMING)
    monkeypatch.setattr(failures, "has_gone", lambda _: False)
    monkeypatch.setattr(
        exchange_plan.plan_exchange, "__kwdefaults__", {"copies": (), "gap_bytes": 24}
    )


class Checkpoint:
    """Tensors and a value in two objects, in blocks of 64 bytes; as `plan_load` asks for it."""

    index = None

    def __init__(self) -> None:
        self.tensors = {
            key: seeded(key, shape, torch.uint8 if key == "bytes" else torch.float32)
            for key, shape in SHAPES.items()
        }
        bodies = {key: tensor.numpy().tobytes() for key, tensor in self.tensors.items()}
        self.values = {"value": pickle.dumps("v" * 100)}
        self.objects = [bytearray(FRAMING), bytearray(5 * FRAMING)]
        self.locations: dict[str, ItemLocation] = {}
        for number, (key, body) in enumerate({**bodies, **self.values}.items()):
            into, tensor = self.objects[number % 2], self.tensors.get(key)
            self.locations[key] = ItemLocation(
                number % 2,
                len(into),
                len(body),
                None if tensor is None else tuple(tensor.shape),
                None if tensor is None else str(tensor.dtype).removeprefix("torch."),
                b"".join(block_digest(body[at : at + BLOCK]) for at in range(0, len(body), BLOCK)),
            )
            into += body + bytes(FRAMING)

    def item(self, key: str, _offset: object, _number: object) -> ItemLocation:
        return self.locations[key]


CHECKPOINT = Checkpoint()


def whole(key: str) -> Part:
    return key, (0,) * len(SHAPES[key]), SHAPES[key]


def cut(key: str, dim: int, rank: int, count: int) -> Part:
    """The part of a rank, of which there are so many, along a dimension."""
    _, offsets, sizes = whole(key)
    low, high = (SHAPES[key][dim] * n // count for n in (rank, rank + 1))
    return (
        key,
        (*offsets[:dim], low, *offsets[dim + 1 :]),
        (*sizes[:dim], high - low, *sizes[dim + 1 :]),
    )


ALL = [whole(key) for key in SHAPES]
# What each of three ranks asks for.
LAYOUTS: dict[str, Callable[[int], list[Part]]] = {
    "replicas": lambda _: ALL,
    "rows": lambda rank: [cut("tall", 0, rank, 3), cut("bytes", 0, rank, 3), whole("one")],
    "columns": lambda rank: [cut("wide", 1, rank, 3), cut("tall", 1, rank, 3), whole("row")],
    "pieces": lambda rank: [
        *(cut("tall", 0, n, 12) for n in range(rank, 12, 3)),
        *(cut("wide", 1, n, 6) for n in (rank, rank + 3)),
        cut("row", 0, rank, 9),
        cut("row", 0, 8 - rank, 9),
    ],
    "others": lambda rank: [ALL, [cut("wide", 1, 0, 2), cut("tall", 0, 2, 4)], []][rank],
}


@dataclass
class Loaded:
    """What a rank has done.

    Attributes:
        fetched: number of the object, start and end of each request, in order.
        slots: addresses of the memory that the requests were given.
        received_bytes: as the exchange says.
    """

    fetched: list[tuple[int, int, int]] = field(default_factory=list)
    slots: list[range] = field(default_factory=list)
    received_bytes: int = 0


class Rank:
    """One rank of a load: its reads, and where they put what arrives."""

    def __init__(self, parts: Sequence[Part]) -> None:
        items = [_tensor_item(*part) for part in parts]
        items += [_value_item(key) for key in CHECKPOINT.values if parts]
        self.planned = plan_load(CHECKPOINT, items, verify=True, whole_blocks=True)  # type: ignore[arg-type]
        self.filled = [
            torch.zeros(sizes, dtype=CHECKPOINT.tensors[key].dtype) for key, _, sizes in parts
        ]
        self.expected = [
            CHECKPOINT.tensors[key][
                tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))
            ]
            for key, offsets, sizes in parts
        ]
        self.values: list[bytes] = []
        self.accepted: list[tuple[int, int, int]] = []
        for read, tensor in zip(self.planned.reads, [*self.filled, None], strict=False):
            read.accept = partial(self._accept, read, read.accept)  # type: ignore[method-assign]
            if isinstance(read, ItemRead):
                read.bind(lambda _: None, lambda read: self.values.append(read.take().getvalue()))
            else:
                assert tensor is not None
                read.bind(tensor)

    def _accept(
        self, read: Any, accept: Callable[[int, Any], None], position: int, body: Any
    ) -> None:
        end = position + len(body)
        twice = [a for a in self.accepted if a[0] == id(read) and a[1] < end and position < a[2]]
        assert not twice, "a read that counts its bytes would be complete too soon"
        self.accepted.append((id(read), position, end))
        accept(position, body)

    def offer(self, rank: int, count: int, budget_bytes: int = 16 * BLOCK) -> Offer:
        needs, selections = exchange.needs_of(self.planned.reads, self.planned.spans)
        return Offer(
            *("url", "commit", rank, group_digest(range(count)), needs, selections),
            memory_budget_bytes=budget_bytes,
            request_size_bytes=2 * BLOCK,
        )

    def assert_filled(self) -> None:
        for tensor, expected in zip(self.filled, self.expected, strict=True):
            assert same_bits(tensor, expected)
        if self.filled:
            assert self.values == list(CHECKPOINT.values.values())


def _tensor_item(key: str, offsets: Sequence[int], sizes: Sequence[int]) -> ReadItem:
    zeros = torch.Size([0] * len(sizes))
    place = MetadataIndex(key, offsets)
    return ReadItem(
        LoadItemType.TENSOR,
        *(place, zeros, MetadataIndex(key, zeros), torch.Size(offsets), torch.Size(sizes)),
    )


def _value_item(key: str) -> ReadItem:
    place, empty = MetadataIndex(key), torch.Size([0])
    return ReadItem(LoadItemType.BYTE_IO, place, empty, place, empty, empty)


def body_of(number: int, start: int, end: int) -> bytes:
    return bytes(CHECKPOINT.objects[number][start:end])


Hook = Callable[[int, str], None]


def load(job: Rank, share: Share, group: Any, ahead_bytes: int, hook: Hook) -> Loaded:
    """Load as `run_load` does, in one thread; what has a slot is fetched, the last first."""
    loaded, progress = Loaded(), Progress(60)
    with Exchange(share, group, "url") as exchanging:
        hook(group.rank, "before")
        exchanging.prepare(job.planned, ahead_bytes)
        hook(group.rank, "prepared")
        for span in exchanging.alone():
            loaded.fetched.append((span.object_number, span.start, span.end))
            for read in span.tag.reads:
                read.accept(span.tag.position, body_of(*loaded.fetched[-1]))
        exchanging.advance()
        waiting = deque(exchanging.requests)
        while waiting:
            admitted = []
            while waiting and exchanging.may_begin(waiting[0]):
                assert not any(exchanging.may_begin(later) for later in list(waiting)[1:])
                slot = exchanging.admit(waiting[0], progress)
                assert slot is not None
                at = np.frombuffer(slot, np.uint8).ctypes.data
                loaded.slots.append(range(at, at + slot.nbytes))
                admitted.append((waiting.popleft(), slot))
            assert admitted, "its slots are free once others have what was in them"
            for request, slot in reversed(admitted):
                loaded.fetched.append((request.object_number, request.start, request.end))
                slot[:] = body_of(*loaded.fetched[-1])
                consume(request, slot)
                if request is exchanging.requests[-1]:
                    hook(group.rank, "last")
                exchanging.keep(request, progress)
                exchanging.advance()
        exchanging.advance()
        assert exchanging.is_done
        hook(group.rank, "done")
    loaded.received_bytes = exchanging.received_bytes
    return loaded


def replicas() -> list[Rank]:
    return [Rank(ALL) for _ in range(3)]


def shares_of(jobs: Sequence[Rank]) -> Sequence[Share | None]:
    return share_out([job.offer(rank, len(jobs)) for rank, job in enumerate(jobs)])


def run(
    monkeypatch: pytest.MonkeyPatch,
    jobs: Sequence[Rank],
    hosts: Sequence[int] = (0, 0, 0),
    *,
    shares: Sequence[Share | None] = (),
    ahead_bytes: int = 0,
    hook: Hook = lambda *_: None,
    ranks: RankThreads | None = None,
) -> tuple[RankThreads, list[Any]]:
    """Load on ranks that can read each other's slots only on the same host; how each ended."""
    ranks, shares = ranks or RankThreads(len(jobs)), shares or shares_of(jobs)
    really = ranks.all_gather_object

    def gather(values: list[Any], value: Any, *, group: RankGroup) -> None:
        really(values, value, group=group)
        for rank, address in enumerate(values):
            if hasattr(address, "slot_bytes") and hosts[rank] != hosts[group.rank]:
                memory = dataclasses.replace(address.memory, boot_id="another host")
                values[rank] = address._replace(memory=memory)

    def call(rank: int, group: Any) -> Loaded:
        share = shares[rank]
        assert share is not None
        return load(jobs[rank], share, group, ahead_bytes, hook)

    monkeypatch.setattr(ranks, "all_gather_object", gather)
    monkeypatch.setattr(exchange, "dist", ranks)
    return ranks, ranks.run(call)


def all_loaded(ranks: RankThreads, outcomes: Sequence[Any]) -> Sequence[Loaded]:
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    assert ranks.deserted == []
    return outcomes


@pytest.mark.parametrize("hosts", [(0, 0, 0), (0, 1, 2), (0, 1, 0)], ids=str)
@pytest.mark.parametrize("ahead_bytes", [0, 20 * BLOCK])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_byte_is_fetched_by_one_rank_and_reaches_all_that_need_it(
    monkeypatch, layout, hosts, ahead_bytes
):
    jobs = [Rank(LAYOUTS[layout](rank)) for rank in range(3)]
    shares = shares_of(jobs)
    before = {*threading.enumerate()}
    ranks, outcomes = run(monkeypatch, jobs, hosts, shares=shares, ahead_bytes=ahead_bytes)
    for thread in {*threading.enumerate()} - before:
        thread.join(30)
        assert not thread.is_alive(), thread.name
    for job in jobs:
        job.assert_filled()
    loads = all_loaded(ranks, outcomes)
    fetched = sorted(place for load in loads for place in load.fetched)
    assert all(a[0] < b[0] or a[2] <= b[1] for a, b in itertools.pairwise(fetched)), "once"
    for rank, (share, loaded) in enumerate(zip(shares, loads, strict=True)):
        assert share is not None
        incoming = {
            sender: [
                sum(segment.length_bytes for segment in request.messages[rank])
                for requests in share.plan.rounds
                for request in requests
                if request.fetcher == sender
            ]
            for sender in {0, 1, 2} - {rank}
        }
        assert loaded.received_bytes == sum(map(sum, incoming.values()))
        for sender, sizes in incoming.items():
            sent = [len(body) for body in ranks.sent.get((sender, rank), [])]
            assert sent == (sizes if hosts[sender] != hosts[rank] else []), "what it needs, no more"


def test_whole_stretches_are_sent_from_their_slots_and_kept_for_one_round(
    monkeypatch,
):
    sent: dict[int, list[Any]] = {0: [], 1: [], 2: []}
    places: list[int] = []
    kept: dict[int, int] = {}

    def isend(self: RankThreads, message: torch.Tensor, **settings: Any) -> Any:
        sent[settings["group"].rank].append(weakref.ref(message))
        places.append(message.data_ptr())
        return really(self, message, **settings)

    def count(rank: int, at: str) -> None:
        if at == "done":
            kept[rank] = sum(message() is not None for message in sent[rank])

    really = RankThreads.isend
    monkeypatch.setattr(RankThreads, "isend", isend)
    loads = all_loaded(*run(monkeypatch, replicas(), (0, 1, 2), hook=count))
    slots = [slot for load in loads for slot in load.slots]
    assert len(places) > 20
    assert all(any(place in slot for slot in slots) for place in places), "without a copy"
    assert sum(kept.values()) <= 4, "of the last round"


def test_what_another_key_fills_is_left_alone(monkeypatch):
    """The reads are taken out of the spans after the ranks have planned who fetches what."""
    for hosts in ((0, 0, 0), (0, 1, 2)):
        twice = [Rank([*_part, *_part]) for _part in map(LAYOUTS["columns"], range(3))]
        shares = shares_of(twice)
        for job in twice:
            covered = job.planned.reads[: len(job.filled) // 2]
            for span in job.planned.spans:
                span.tag.reads[:] = [read for read in span.tag.reads if read not in covered]
        all_loaded(*run(monkeypatch, twice, hosts, shares=shares))
        for job in twice:
            half = len(job.filled) // 2
            assert not any(tensor.any() for tensor in job.filled[:half])
            job.filled[:half] = job.filled[half:]
            job.assert_filled()


# --- memory ---------------------------------------------------------------------------------------


def request_of(
    fetcher: int, sequence: int, size_bytes: int = BLOCK, **messages: tuple[Segment, ...]
) -> SharedRequest:
    """Bytes of object 0 that follow those of the request before it."""
    start = sequence * BLOCK
    to = {int(rank.removeprefix("to")): message for rank, message in messages.items()}
    return SharedRequest(0, start, start + size_bytes, fetcher, sequence, (), to)


def prepared(plan: ExchangePlan, group: Any, ahead_bytes: int = 0) -> Exchange:
    """The exchange of one rank; whether others are there or not."""
    share, nothing = Share(plan, {}, "meeting"), PlannedLoad(CHECKPOINT, [], [])  # type: ignore[arg-type]
    exchanging = Exchange(share, group, "url")
    exchanging.prepare(nothing, ahead_bytes)
    return exchanging


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> Iterator[RankThreads]:
    ranks = RankThreads(2)
    monkeypatch.setattr(exchange, "dist", ranks)
    yield ranks
    ranks.end(0, 1)


@pytest.fixture
def one(two: RankThreads) -> RankGroup:
    """The group of the first of two ranks, of which the other one does nothing."""
    return RankGroup(two, 0)


def test_there_are_slots_for_two_rounds_or_for_what_may_be_fetched_ahead(one):
    """The next round is fetched while others still read what was fetched for this one."""
    for of_rounds, ahead_bytes, slots in (
        *(([1], 0, 1), ([1, 1, 1, 1], 0, 2), ([3, 1, 1], 0, 4), ([1, 0, 2, 3, 1], 0, 5)),
        *(([1, 1, 1, 1], 4 * BLOCK - 1, 3), ([1, 1, 1, 1], 9 * BLOCK, 4)),
    ):
        numbers = itertools.count()
        rounds = [
            [
                request_of(1, 0, BLOCK, to0=()),
                *(request_of(0, next(numbers), to1=()) for _ in range(count)),
            ]
            for count in of_rounds
        ]
        assert prepared(ExchangePlan(rounds), one, ahead_bytes).memory_bytes == slots * BLOCK


def test_there_is_memory_for_what_the_largest_round_brings(one):
    whole, packed = Segment(0, 40), Segment(40, 64, packed_bytes=5, read=0)
    rounds = [
        [request_of(1, 0, to0=(whole, packed)), request_of(1, 1, to0=(packed,))],
        [request_of(0, 0, to1=(whole,)), request_of(1, 2, to0=(whole,))],
        [],
    ]
    assert prepared(ExchangePlan(rounds), one).memory_bytes == BLOCK + 40 + 5 + 5
    assert prepared(ExchangePlan(rounds[:1]), one).memory_bytes == 40 + 5 + 5
    assert prepared(ExchangePlan([]), one).memory_bytes == 0


def test_slots_are_as_large_as_the_largest_request_wherever_that_begins(one):
    sizes = [BLOCK, 2 * BLOCK, 1]
    rounds = [[request_of(0, n, size, to1=()) for n, size in enumerate(sizes)]]
    exchanging = prepared(ExchangePlan(rounds), one)
    assert exchanging.memory_bytes == len(sizes) * 2 * BLOCK
    slots = [exchanging.admit(request, Progress(60)) for request in exchanging.requests]
    assert [slot.nbytes for slot in slots if slot is not None] == sizes


def test_nobody_finds_the_slots_once_the_ranks_have_found_them(monkeypatch):
    addresses: list[SharedMemoryAddress] = []

    def attach(address: SharedMemoryAddress) -> memoryview | None:
        addresses.append(address)
        return really(address)

    really = shared_memory.attach
    monkeypatch.setattr(exchange, "attach", attach)
    all_loaded(*run(monkeypatch, replicas()))
    assert len(addresses) == 6
    assert not any(really(address) for address in addresses)


def test_a_slot_is_free_when_all_ranks_are_in_the_next_round(two):
    """Until then, one of them may still read it."""
    plan = ExchangePlan([[request_of(0, n, to1=())] for n in range(3)])

    def call(rank: int, group: Any) -> list[bool]:
        exchanging, can_begin = prepared(plan, group), []
        exchanging.advance()
        for request in exchanging.requests:
            can_begin.append(exchanging.may_begin(exchanging.requests[2]))
            assert exchanging.admit(request, Progress(60)) is not None
            exchanging.keep(request, Progress(60))
            can_begin.append(exchanging.may_begin(exchanging.requests[2]))
            exchanging.advance()
        assert exchanging.is_done
        return can_begin

    first, _ = two.run(call)
    assert first == [False, False, False, False, True, False]


# --- one rank's part ------------------------------------------------------------------------------


def test_what_is_not_shared_waits_for_nothing(one):
    exchanging, own = prepared(ExchangePlan([]), one), RangeRequest[Any](0, 0, 4)
    assert exchanging.may_begin(own)
    assert exchanging.admit(own, Progress(60)) is None
    exchanging.keep(own, Progress(60))


def test_a_worker_gets_a_slot_as_soon_as_it_is_its_turn_and_one_is_free(monkeypatch, two):
    """Though it looks only now and then whether the transfer was stopped."""
    monkeypatch.setattr(exchange, "STEP_SECONDS", 600.0)
    plan, progress = ExchangePlan([[request_of(0, n, to1=())] for n in range(3)]), Progress(60)

    def call(rank: int, group: Any) -> None:
        exchanging = prepared(plan, group)
        if rank:
            return exchanging.advance()
        asked, really = threading.Event(), exchanging.may_begin

        def may_begin(request: RangeRequest[Any]) -> bool:
            found = really(request)
            if not found:
                asked.set()  # and then it waits, and gives the lock away
            return found

        exchanging.may_begin = may_begin  # type: ignore[method-assign]
        first, second, third = exchanging.requests
        with DaemonPool(1, "worker") as pool:
            waiting = pool.submit(exchanging.admit, second, progress)
            assert asked.wait(30)
            assert exchanging.admit(first, progress) is not None
            assert waiting.result(30) is not None
            asked.clear()
            waiting = pool.submit(exchanging.admit, third, progress)
            assert asked.wait(30)
            for request in (first, second):
                exchanging.keep(request, progress)
            exchanging.advance()
            assert waiting.result(30) is not None
            exchanging.keep(third, progress)
            return exchanging.advance()

    assert two.run(call) == [None, None]


@pytest.mark.parametrize("for_what", ["a slot", "who reads it"])
def test_a_worker_that_waits_for_others_ends_with_the_transfer(two, for_what):
    """They may never come: one of them may have failed."""
    progress, stopped = Progress(60), threading.Event()

    def wait(rank: int, group: Any) -> None:
        if rank:
            assert stopped.wait(30)
            return
        exchanging = prepared(ExchangePlan([[request_of(0, n, to1=())] for n in range(3)]), group)
        threading.Timer(0.01, progress.stop, [ZeroDivisionError()]).start()
        try:
            for request in exchanging.requests:
                exchanging.admit(request, progress)
                if for_what == "who reads it":
                    exchanging.keep(request, progress)
        finally:
            stopped.set()

    outcome, _ = two.run(wait)
    assert isinstance(outcome, ZeroDivisionError)


def test_parts_of_a_stretch_are_packed_if_they_are_three_quarters_of_it_or_less():
    """Of two rows of 40 bytes; between the parts lies what is not needed."""
    location = ItemLocation(3, 1000, 80, (2, 40), "uint8", None)
    others = tensor_read.TensorRead(_tensor_item("u", (0, 0), (2, 40)), location)
    for columns, is_packed in ((1, True), (24, True), (25, False), (40, False)):
        read = tensor_read.TensorRead(_tensor_item("t", (0, 0), (2, columns)), location)
        span = Span(3, 1000, 1080, tensor_read.Block("t", 0, None, [others, read]))
        needs, selections = exchange.needs_of([others, read], [span])
        whole, own = needs.tolist()
        assert whole == (3, 1000, 1080, 1000, 1080, 0, -1)
        packed = (2 * columns, 1) if is_packed else (0, -1)
        assert own == (3, 1000, 1080, 1000, 1000 + 40 + columns, *packed)
        assert selections == ({1: read.selection} if is_packed else {})


# --- failures -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "failing"),
    [
        *itertools.product(["before", "prepared"], [{0}, {2}, {1, 2}, {0, 1, 2}]),
        *(("last", {rank}) for rank in range(3)),
    ],
    ids=str,
)
def test_a_rank_that_fails_is_named_by_all_others_and_nobody_waits(monkeypatch, where, failing):
    def fail(rank: int, at: str) -> None:
        if rank in failing and at == where:
            raise CheckpointCorruptError(f"of rank {rank}") if rank else ZeroDivisionError("own")

    ranks, outcomes = run(monkeypatch, replicas(), (0, 1, 1), hook=fail)
    assert ranks.deserted == []
    for rank, outcome in enumerate(outcomes):
        if rank in failing:
            assert isinstance(outcome, CheckpointCorruptError if rank else ZeroDivisionError)
            continue
        assert isinstance(outcome, PeerFailedError)
        first = min(failing)
        assert type(outcome.cause) is (CheckpointCorruptError if first else RankFailedError)
        assert outcome.cause.url == "url"
        assert (f"of rank {first}" if first else "ZeroDivisionError: own") in str(outcome)


def test_a_rank_that_fails_after_the_last_round_fails_alone(monkeypatch):
    def fail(rank: int, at: str) -> None:
        if rank == 1 and at == "done":
            raise ZeroDivisionError

    ranks, outcomes = run(monkeypatch, replicas(), (0, 1, 1), hook=fail)
    assert ranks.deserted == []
    assert [type(outcome) for outcome in outcomes] == [Loaded, ZeroDivisionError, Loaded]


@pytest.mark.parametrize("number", [1, 2, 4])
def test_ctrl_c_while_a_rank_waits_for_the_others_ends_all_of_them(monkeypatch, number):
    """The n-th time that the thread of the load waits."""
    of_thread, waited = threading.local(), itertools.count(1)

    def note(rank: int, at: str) -> None:
        of_thread.rank = rank

    def wait(future: Any, **settings: Any) -> Any:
        if not settings and of_thread.rank == 1 and next(waited) == number:
            raise KeyboardInterrupt
        return really(future, **settings)

    really = exchange.result_of
    monkeypatch.setattr(exchange, "result_of", wait)
    ranks, outcomes = run(monkeypatch, replicas(), (0, 1, 0), hook=note)
    assert ranks.deserted == []
    assert [type(one) for one in outcomes] == [PeerFailedError, KeyboardInterrupt, PeerFailedError]
    for other in (outcomes[0], outcomes[2]):
        assert isinstance(other.cause, RankFailedError)
        assert "KeyboardInterrupt" in str(other.cause)


def test_a_rank_that_only_receives_fails_all_if_it_cannot_read_the_slots(monkeypatch, two):
    def attach(_: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    def call(_: int, group: Any) -> None:
        with prepared(ExchangePlan([[request_of(0, 0, to1=())]]), group) as exchanging:
            for request in exchanging.requests:
                exchanging.admit(request, Progress(60))
                exchanging.keep(request, Progress(60))
            exchanging.advance()

    monkeypatch.setattr(exchange, "attach", attach)
    first, second = two.run(call)
    assert two.deserted == []
    assert isinstance(first, PeerFailedError)
    assert isinstance(second, OSError)


@pytest.mark.parametrize("call", ["all_gather_object", "all_reduce", "isend", "irecv"])
def test_a_rank_that_loses_the_others_in_a_step_does_not_wait_for_them_in_another(
    monkeypatch, call
):
    """Nor do they: their connections break, too."""

    def broken(self: RankThreads, *args: Any, group: RankGroup, **settings: Any) -> Any:
        if group.rank == 1:
            raise RuntimeError("Connection closed by peer")
        return really(self, *args, group=group, **settings)

    really = getattr(RankThreads, call)
    monkeypatch.setattr(RankThreads, call, broken)
    ranks, outcomes = run(monkeypatch, replicas(), (0, 1, 2))
    assert all(isinstance(outcome, RankFailedError) for outcome in outcomes), outcomes
    assert 1 not in {rank for rank, _ in ranks.deserted}
