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
from concurrent.futures import ThreadPoolExecutor
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
        exchange_plan.plan_exchange, "__kwdefaults__", {"held": (), "gap_bytes": 24}
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
        received_bytes, memory_bytes: as the exchange says.
    """

    fetched: list[tuple[int, int, int]] = field(default_factory=list)
    received_bytes: int = 0
    memory_bytes: int = 0


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


def load(rank: Rank, share: Share, group: Any, ahead_bytes: int = 0) -> Loaded:
    """Load as `run_load` does, in one thread; what has a slot is fetched, the last first."""
    loaded, progress = Loaded(), Progress(60)
    with Exchange(share, group, "url") as exchanging:
        exchanging.prepare(rank.planned, ahead_bytes)
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
                admitted.append((waiting.popleft(), slot))
            assert admitted, "its slots are free once others have what was in them"
            for request, slot in reversed(admitted):
                loaded.fetched.append((request.object_number, request.start, request.end))
                slot[:] = body_of(*loaded.fetched[-1])
                consume(request, slot)
                exchanging.keep(request, progress)
                exchanging.advance()
        exchanging.advance()
        assert exchanging.done
    loaded.received_bytes = exchanging.received_bytes
    loaded.memory_bytes = exchanging.memory_bytes
    return loaded


def body_of(number: int, start: int, end: int) -> bytes:
    return bytes(CHECKPOINT.objects[number][start:end])


def as_on_hosts(monkeypatch: pytest.MonkeyPatch, ranks: RankThreads, hosts: Sequence[int]) -> None:
    """Ranks can read each other's slots only on the same host."""
    really = ranks.all_gather_object

    def gather(values: list[Any], value: Any, *, group: RankGroup) -> None:
        really(values, value, group=group)
        for rank, address in enumerate(values):
            if isinstance(address, exchange._SlotsAddress) and hosts[rank] != hosts[group.rank]:
                memory = dataclasses.replace(address.memory, boot_id="another host")
                values[rank] = address._replace(memory=memory)

    monkeypatch.setattr(ranks, "all_gather_object", gather)
    monkeypatch.setattr(exchange, "dist", ranks)


def run(
    monkeypatch: pytest.MonkeyPatch,
    jobs: Sequence[Rank],
    shares: Sequence[Share | None],
    hosts: Sequence[int],
    ahead_bytes: int = 0,
) -> tuple[RankThreads, list[Loaded]]:
    ranks = RankThreads(len(jobs))
    as_on_hosts(monkeypatch, ranks, hosts)

    def call(rank: int, group: Any) -> Loaded:
        share = shares[rank]
        assert share is not None
        return load(jobs[rank], share, group, ahead_bytes)

    outcomes = ranks.run(call)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    assert ranks.deserted == []
    return ranks, outcomes


@pytest.mark.parametrize("hosts", [(0, 0, 0), (0, 1, 2), (0, 1, 0)], ids=str)
@pytest.mark.parametrize("ahead_bytes", [0, 20 * BLOCK])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_byte_is_fetched_by_one_rank_and_reaches_all_that_need_it(
    monkeypatch, layout, hosts, ahead_bytes
):
    jobs = [Rank(LAYOUTS[layout](rank)) for rank in range(3)]
    shares = share_out([job.offer(rank, 3) for rank, job in enumerate(jobs)])
    ranks, outcomes = run(monkeypatch, jobs, shares, hosts, ahead_bytes)
    for job in jobs:
        job.assert_filled()
    fetched = sorted(place for outcome in outcomes for place in outcome.fetched)
    assert all(a[0] < b[0] or a[2] <= b[1] for a, b in itertools.pairwise(fetched)), "once"
    for rank, (share, outcome) in enumerate(zip(shares, outcomes, strict=True)):
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
        assert outcome.received_bytes == sum(map(sum, incoming.values()))
        for sender, sizes in incoming.items():
            sent = [len(body) for body in ranks.sent.get((sender, rank), [])]
            assert sent == (sizes if hosts[sender] != hosts[rank] else []), "what it needs, no more"


def test_without_shared_memory_whole_stretches_are_sent_without_a_copy(monkeypatch, tmp_path):
    monkeypatch.setattr(shared_memory, "_BOOT_ID", tmp_path / "absent")
    messages: list[int] = []
    slots: list[tuple[int, int]] = []

    def isend(self: RankThreads, message: torch.Tensor, **settings: Any) -> Any:
        messages.append(message.data_ptr())
        return send(self, message, **settings)

    def slot_of(self: Exchange, planned: SharedRequest) -> memoryview:
        found = slot(self, planned)
        at = np.frombuffer(found, np.uint8).ctypes.data
        slots.append((at, at + found.nbytes))
        return found

    send, slot = RankThreads.isend, Exchange._slot_of
    monkeypatch.setattr(RankThreads, "isend", isend)
    monkeypatch.setattr(Exchange, "_slot_of", slot_of)
    jobs = [Rank(ALL) for _ in range(3)]
    shares = share_out([job.offer(rank, 3) for rank, job in enumerate(jobs)])
    run(monkeypatch, jobs, shares, (0, 0, 0))
    for job in jobs:
        job.assert_filled()
    assert len(messages) > 20
    assert all(any(low <= at < high for low, high in slots) for at in messages)


def test_what_another_key_fills_is_left_alone(monkeypatch):
    """The reads are taken out of the spans after the ranks have planned who fetches what."""
    for hosts in ((0, 0, 0), (0, 1, 2)):
        twice = [Rank([*_part, *_part]) for _part in map(LAYOUTS["columns"], range(3))]
        offers = [job.offer(rank, 3) for rank, job in enumerate(twice)]
        for job in twice:
            covered = job.planned.reads[: len(job.filled) // 2]
            for span in job.planned.spans:
                span.tag.reads[:] = [read for read in span.tag.reads if read not in covered]
        run(monkeypatch, twice, share_out(offers), hosts)
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


@pytest.mark.parametrize(
    ("of_rounds", "ahead_bytes", "slots"),
    [
        ([1], 0, 1),
        ([1, 1, 1, 1], 0, 2),
        ([3, 1, 1], 0, 4),
        ([1, 0, 2, 3, 1], 0, 5),
        ([0, 0, 2, 0], 0, 2),
        ([1, 1, 1, 1], 3 * BLOCK, 3),
        ([1, 1, 1, 1], 4 * BLOCK - 1, 3),
        ([1, 1, 1, 1], 9 * BLOCK, 4),
    ],
)
def test_there_are_slots_for_two_rounds_or_for_what_may_be_fetched_ahead(
    one, of_rounds, ahead_bytes, slots
):
    """The next round is fetched while others still read what was fetched for this one."""
    numbers = itertools.count()
    rounds = [
        [request_of(1, 0, BLOCK), *(request_of(0, next(numbers)) for _ in range(count))]
        for count in of_rounds
    ]
    for request in itertools.chain(*rounds):
        request.messages[1 - request.fetcher] = ()
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
    mapped: list[memoryview] = []

    def attach(address: SharedMemoryAddress) -> memoryview | None:
        addresses.append(address)
        memory = really(address)
        assert memory is not None
        mapped.append(memory)
        return memory

    really = shared_memory.attach
    monkeypatch.setattr(exchange, "attach", attach)
    _, outcomes = load_all(monkeypatch, "replicas")
    assert outcomes == [None] * 3
    assert len(addresses) == len(mapped) == 6
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
        assert exchanging.done
        return can_begin

    first, _ = two.run(call)
    assert first == [False, False, False, False, True, False]


def test_messages_are_kept_no_longer_than_their_round(monkeypatch):
    sent: dict[int, list[Any]] = {0: [], 1: [], 2: []}
    kept: dict[int, int] = {}

    def isend(self: RankThreads, message: torch.Tensor, **settings: Any) -> Any:
        sent[settings["group"].rank].append(weakref.ref(message))
        return really(self, message, **settings)

    def count(rank: int, exchanging: Exchange, at: str) -> None:
        if at == "done":
            kept[rank] = sum(message() is not None for message in sent[rank])

    really = RankThreads.isend
    monkeypatch.setattr(RankThreads, "isend", isend)
    load_all(monkeypatch, "replicas", (0, 1, 2), count)
    assert sum(map(len, sent.values())) > 12
    assert sum(kept.values()) <= 4, "of the last round"


# --- one rank's part ------------------------------------------------------------------------------


def test_what_is_not_shared_waits_for_nothing(one):
    exchanging, own = prepared(ExchangePlan([]), one), RangeRequest[Any](0, 0, 4)
    assert exchanging.may_begin(own)
    assert exchanging.admit(own, Progress(60)) is None
    exchanging.keep(own, Progress(60))


def test_a_worker_gets_a_slot_as_soon_as_it_is_its_turn(monkeypatch, one):
    """Though it looks only now and then whether the transfer was stopped."""
    monkeypatch.setattr(exchange, "STEP_SECONDS", 600.0)
    rounds = [[request_of(0, n, to1=())] for n in range(3)]
    exchanging, progress = prepared(ExchangePlan(rounds), one), Progress(60)
    first, second, third = exchanging.requests
    asked, really = threading.Event(), exchanging.may_begin

    def may_begin(request: RangeRequest[Any]) -> bool:
        found = really(request)
        if not found:
            asked.set()  # and then it waits, and gives the lock away
        return found

    monkeypatch.setattr(exchanging, "may_begin", may_begin)
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(exchanging.admit, second, progress)
        assert asked.wait(30)
        assert exchanging.admit(first, progress) is not None
        slot = waiting.result(30)
        assert slot is not None and slot.nbytes == BLOCK
        asked.clear()
        waiting = pool.submit(exchanging.admit, third, progress)
        assert asked.wait(30)
        exchanging._round = 1
        exchanging._outbox[0] = {}
        exchanging._free_slots()
        assert waiting.result(30) is not None


def test_a_worker_that_waits_for_a_slot_ends_with_the_transfer(one):
    """No other rank may ever free one: it may have failed."""
    exchanging = prepared(ExchangePlan([[request_of(0, n, to1=())] for n in range(3)]), one)
    progress = Progress(60)
    for request in exchanging.requests[:2]:
        exchanging.admit(request, progress)
    with ThreadPoolExecutor(1) as pool:
        admitted = pool.submit(exchanging.admit, exchanging.requests[2], progress)
        progress.stop(ZeroDivisionError())
        try:
            assert isinstance(admitted.exception(30), ZeroDivisionError)
        finally:
            exchanging._freed = 1


def test_a_worker_that_waits_to_know_who_reads_its_slots_ends_with_the_transfer(two):
    progress = Progress(60)
    stopped = threading.Event()

    def wait(rank: int, group: Any) -> None:
        if rank:
            assert stopped.wait(30)
            return
        exchanging = prepared(ExchangePlan([[request_of(0, 0, to1=())]]), group)
        (request,) = exchanging.requests
        exchanging.admit(request, progress)
        threading.Timer(0.01, progress.stop, [ZeroDivisionError()]).start()
        try:
            exchanging.keep(request, progress)
        finally:
            stopped.set()

    outcome, _ = two.run(wait)
    assert isinstance(outcome, ZeroDivisionError)


@pytest.mark.parametrize(
    ("columns", "is_packed"), [(1, True), (24, True), (25, False), (39, False), (40, False)]
)
def test_parts_of_a_stretch_are_packed_if_they_are_three_quarters_of_it_or_less(columns, is_packed):
    """Of two rows of 40 bytes; between the parts lies what is not needed."""
    item = _tensor_item("t", (0, 0), (2, columns))
    location = ItemLocation(3, 1000, 80, (2, 40), "uint8", None)
    read = tensor_read.TensorRead(item, location)
    others = tensor_read.TensorRead(_tensor_item("u", (0, 0), (2, 40)), location)
    span = Span(3, 1000, 1080, tensor_read.Block("t", 0, None, [others, read]))
    needs, selections = exchange.needs_of([others, read], [span])
    whole, own = needs.tolist()
    assert whole == (3, 1000, 1080, 1000, 1080, 0, -1)
    high = 1000 + 40 + columns
    assert own == (3, 1000, 1080, 1000, high, *((2 * columns, 1) if is_packed else (0, -1)))
    assert selections == ({1: read.selection} if is_packed else {})


# --- failures -------------------------------------------------------------------------------------


def load_all(
    monkeypatch: pytest.MonkeyPatch,
    layout: str,
    hosts: Sequence[int] = (0, 0, 0),
    hook: Callable[[int, Exchange, str], None] = lambda *_: None,
    ranks: RankThreads | None = None,
) -> tuple[RankThreads, list[Any]]:
    """Load on three ranks. `hook` is called with a rank, and where in the load it is."""
    ranks = ranks or RankThreads(3)
    jobs = [Rank(LAYOUTS[layout](rank)) for rank in range(3)]
    shares = share_out([job.offer(rank, 3) for rank, job in enumerate(jobs)])
    as_on_hosts(monkeypatch, ranks, hosts)

    def call(rank: int, group: Any) -> None:
        share, progress = shares[rank], Progress(60)
        assert share is not None
        with Exchange(share, group, "url") as exchanging:
            hook(rank, exchanging, "before")
            exchanging.prepare(jobs[rank].planned, 0)
            hook(rank, exchanging, "prepared")
            for request in exchanging.requests:
                while not exchanging.may_begin(request):
                    exchanging.advance()
                slot = exchanging.admit(request, progress)
                assert slot is not None
                slot[:] = body_of(request.object_number, request.start, request.end)
                consume(request, slot)
                if request is exchanging.requests[-1]:
                    hook(rank, exchanging, "last")
                exchanging.keep(request, progress)
                exchanging.advance()
            exchanging.advance()
            hook(rank, exchanging, "done")

    return ranks, ranks.run(call)


@pytest.mark.parametrize(
    ("where", "failing"),
    [
        *itertools.product(["before", "prepared"], [{0}, {2}, {1, 2}, {0, 1, 2}]),
        *(("last", {rank}) for rank in range(3)),
    ],
    ids=str,
)
def test_a_rank_that_fails_is_named_by_all_others_and_nobody_waits(monkeypatch, where, failing):
    def fail(rank: int, _: Exchange, at: str) -> None:
        if rank in failing and at == where:
            raise CheckpointCorruptError(f"of rank {rank}") if rank else ZeroDivisionError("own")

    ranks, outcomes = load_all(monkeypatch, "replicas", (0, 1, 1), fail)
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
    def fail(rank: int, _: Exchange, at: str) -> None:
        if rank == 1 and at == "done":
            raise ZeroDivisionError

    ranks, outcomes = load_all(monkeypatch, "columns", (0, 1, 1), fail)
    assert ranks.deserted == []
    assert outcomes[0] is outcomes[2] is None
    assert isinstance(outcomes[1], ZeroDivisionError)


def test_a_rank_that_cannot_read_the_slots_of_others_fails_all(monkeypatch):
    def attach(address: Any) -> Any:
        if ranks.calling.rank == 1:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return really(address)

    really, ranks = shared_memory.attach, RankThreads(3)
    monkeypatch.setattr(exchange, "attach", attach)
    _, outcomes = load_all(monkeypatch, "replicas", ranks=ranks)
    assert ranks.deserted == []
    for rank, outcome in enumerate(outcomes):
        assert isinstance(outcome, OSError if rank == 1 else PeerFailedError)
        assert "Cannot allocate memory" in str(outcome)


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
    ranks, outcomes = load_all(monkeypatch, "replicas", (0, 1, 2))
    assert all(isinstance(outcome, RankFailedError) for outcome in outcomes), outcomes
    assert 1 not in {rank for rank, _ in ranks.deserted}
