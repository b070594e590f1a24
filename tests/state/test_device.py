"""Device memory: what passes through the ring arrives unchanged, within the ring, and ends."""

from __future__ import annotations

import itertools
import secrets
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, strategies as st
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import ReadItem

import dcp_objstore as dos
from benchmarks.sink import Sink
from dcp_objstore.config import MIB, PINNED_MOST
from dcp_objstore.errors import (
    RankFailedError,
    TransferStalledError,
)
from dcp_objstore.state import device
from dcp_objstore.state.device import (
    Inbound,
    Outbound,
    lane_of,
    lanes_into,
    pinned_memory,
    plan_ring,
)
from dcp_objstore.stores import StoreSpec
from dcp_objstore.stores.wrappers import WrappedStore
from dcp_objstore.transfer.parts import plan_parts
from dcp_objstore.transfer.progress import Progress
from dcp_objstore.transfer.ranges import RangeRequest
from tests.support.campaign import cases
from tests.support.checkpoints import memory_url
from tests.support.lanes import LateLane, use_lane
from tests.support.states import ALL_DTYPES, same_bits, seeded

PART = 5 * MIB
CONFIG = dos.TransferConfig(
    part_size_bytes=PART,
    upload_concurrency=2,
    request_size_bytes=4 * MIB,
    memory_budget_bytes=32 * MIB,
)


def big_state() -> dict[str, torch.Tensor]:
    """Tensors of many slices and of less than one, that begin anywhere in a part."""
    sizes = {"big": 4_500_001, "mid": 1_300_007, "small": 100, "more": 2_500_003}
    return {key: seeded(key, (count,)) for key, count in sizes.items()}


def blank(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: torch.zeros_like(tensor) for key, tensor in state.items()}


def assert_same(loaded: dict[str, torch.Tensor], state: dict[str, torch.Tensor]) -> None:
    assert [key for key in state if not same_bits(loaded[key], state[key])] == []


def never_stopped() -> None:
    pass


@pytest.fixture
def lane(monkeypatch: pytest.MonkeyPatch) -> LateLane:
    late = LateLane()
    use_lane(monkeypatch, lambda: late)
    return late


def test_work_that_other_threads_would_not_wait_for_is_waited_for(monkeypatch):
    """On the second GPU, the program works on a stream of its own."""
    waited = []

    def stream(name):
        return SimpleNamespace(synchronize=lambda: waited.append(name))

    default = [stream("the default of 0"), stream("the default of 1")]
    current = [default[0], stream("a stream of 1")]
    cuda = SimpleNamespace(
        is_initialized=lambda: True,
        is_available=lambda: True,
        device_count=lambda: 2,
        current_stream=current.__getitem__,
        default_stream=default.__getitem__,
    )
    there = [True]
    other = SimpleNamespace(
        is_available=lambda: there[0], current_stream=lambda: stream("another accelerator's")
    )
    monkeypatch.setattr(torch, "cuda", cuda)
    monkeypatch.setattr(torch, "accelerator", other)
    device.wait_for_streams()
    assert waited == ["a stream of 1"]
    cuda.is_initialized = lambda: False  # a query would initialize it
    device.wait_for_streams()
    assert waited.pop() == "a stream of 1"
    cuda.is_available = lambda: False
    device.wait_for_streams()
    assert waited == ["another accelerator's"]
    there[0] = False
    device.wait_for_streams()
    assert len(waited) == 1


class Cuda:
    """`torch.cuda` as far as a lane needs it: it knows where it is, and notes what is done."""

    def __init__(self) -> None:
        self.at: list[object] = []
        self.done: list[tuple[object, ...]] = []

    @contextmanager
    def _at(self, place: object) -> Iterator[None]:
        self.at.append(place)
        yield
        self.at.pop()

    device = stream = _at

    def current_stream(self, place: torch.device) -> str:
        return f"this thread's of {place}"

    def Stream(self, place: torch.device) -> SimpleNamespace:  # noqa: N802
        stream = SimpleNamespace(place=place)
        stream.wait_stream = lambda other: self.done.append(("wait", stream, other))
        stream.synchronize = lambda: self.done.append(("synchronize", stream))
        return stream

    def Event(self, *, blocking: bool) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(record=lambda stream: self.done.append(("event", stream, blocking)))


@pytest.fixture
def cuda_here(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cuda]:
    made = Cuda()
    monkeypatch.setattr(torch, "cuda", made)
    device._stream.cache_clear()
    yield made
    device._stream.cache_clear()


def test_copies_of_a_gpu_have_one_stream_a_direction_behind_that_of_the_thread(cuda_here):
    """For the whole process: the allocator keeps memory for each stream."""
    gpu, other = torch.device("cuda", 1), torch.device("cuda", 0)
    lanes = lanes_into([torch.device("cpu"), gpu, torch.device("meta")])
    assert list(lanes) == [gpu], "only devices with a lane"
    (_, inward, _) = cuda_here.done.pop()
    lane = lane_of(gpu, "out")
    (_, stream, _) = cuda_here.done[0]
    behind = ("wait", stream, "this thread's of cuda:1")
    assert (stream.place, cuda_here.done) == (gpu, [behind])

    def work() -> None:
        # The device as well: at its end a stream would make the default one the current.
        assert cuda_here.at == [gpu, stream]
        cuda_here.done.append(("copy",))

    ticket = lane.queue(work)
    assert cuda_here.done[1:] == [("copy",), ("event", stream, True)]
    assert ticket.record
    lane.follow()
    lane.finish()
    assert cuda_here.done[3:] == [behind, ("synchronize", stream)]
    assert not cuda_here.at
    cuda_here.done.clear()
    for place, direction in product((gpu, other), ("in", "out")):
        lane_of(place, direction)
    streams = [one for _, one, _ in cuda_here.done]
    assert streams[:2] == [inward, stream]
    assert [one.place for one in streams] == [gpu, gpu, other, other]
    assert streams[2] is not streams[3]


def test_pinned_memory_is_made_for_the_gpu_that_copies_from_it(cuda_here, monkeypatch):
    asked: list[tuple[object, ...]] = []
    monkeypatch.setattr(
        torch, "empty", lambda size, **how: asked.append((size, how, *cuda_here.at))
    )
    gpu = torch.device("cuda", 1)
    lane_of(gpu, "in").allocate(8)
    assert asked == [(8, {"dtype": torch.uint8, "device": "cpu", "pin_memory": True}, gpu)]


@pytest.mark.parametrize(
    ("largest", "concurrency", "budget", "planned"),
    [
        (8, 4, 23, (0, 8, 23)),
        (8, 4, 24, (1, 8, 16)),
        (7, 4, 24, (1, 8, 16)),
        (9, 4, 48, (1, 16, 32)),
        (8, 4, 4 * 8, (2, 8, 16)),
        (8, 4, 6 * 8, (3, 8, 16)),
        (8, 4, 7 * 8, (3, 8, 32)),
        (8, 4, 8 * 8, (4, 8, 32)),
        (8, 1, 100 * 8, (3, 8, 16)),
        (8, 4, 100 * 8, (6, 8, 64)),
        (1, 4, 3, (1, 1, 2)),
        (0, 4, 3, (1, 1, 2)),
    ],
)
def test_a_body_counts_twice_and_its_slot_once(largest, concurrency, budget, planned):
    assert plan_ring(largest, concurrency, budget) == planned


@given(st.integers(1, 64 * MIB), st.integers(1, 64), st.integers(8 * MIB, 2048 * MIB))
def test_the_ring_and_the_bodies_in_flight_are_within_the_budget(largest, concurrency, budget):
    slots, slot_bytes, rest = plan_ring(largest, concurrency, budget)
    assert slot_bytes >= largest
    if not slots:
        assert rest == budget
        assert budget < 3 * slot_bytes
        return
    assert rest >= 2 * largest  # of one request at least
    assert slots * slot_bytes + rest <= budget
    workers = min(concurrency, rest // (2 * largest))
    assert workers >= 1
    # One to fetch into for each, unless smaller bodies than a slot let more of them fetch.
    assert slots >= min(workers, rest // (2 * slot_bytes))


def test_where_no_pinned_memory_can_be_had_ordinary_memory_is_used_with_one_warning(
    caplog, monkeypatch
):
    real_empty = torch.empty

    def empty(*sizes: Any, pin_memory: bool = False, **settings: Any) -> torch.Tensor:
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory\nmore lines")
        return real_empty(*sizes, **settings)

    with torch.device("meta"):
        torch.ones(())  # makes torch note which functions make tensors: its own, not this one
    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(device, "_has_warned", threading.Event())
    with torch.device("meta"):
        made = [pinned_memory(MIB) for _ in range(3)]
    assert [(memory.nbytes, memory.device.type) for memory in made] == [(MIB, "cpu")] * 3
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "out of memory" in warning
    assert "memory_budget_bytes" in warning
    assert "more lines" not in warning


# --- saving ---


class GatheringStore(WrappedStore):
    """As a transport does: keeps the buffers of so many parts, and looks at each as it drops it."""

    def __init__(self, inner: Any, parts: int) -> None:
        super().__init__(inner)
        self._parts = parts

    def put_stream(self, key: str, buffers: Iterator[Any], **settings: Any) -> Any:
        return self.inner.put_stream(key, self._late(buffers, **settings), **settings)

    def _late(self, buffers: Iterator[Any], part_size_bytes: int, **_: Any) -> Iterator[bytes]:
        held: deque[Any] = deque()
        held_bytes = 0
        for buffer in buffers:
            held.append(buffer)
            held_bytes += buffer.nbytes
            del buffer
            while held_bytes - held[0].nbytes >= self._parts * part_size_bytes:
                held_bytes -= held[0].nbytes
                yield bytes(held.popleft())
        while held:
            yield bytes(held.popleft())


@pytest.mark.parametrize("seed", cases(range(3), default=[0]))
def test_a_save_through_the_ring_stores_what_a_save_without_it_does(seed, monkeypatch, through):
    state, plain, url = big_state(), memory_url(), memory_url()
    dos.save(state, plain, config=CONFIG)
    lane = LateLane(seed)
    with monkeypatch.context() as patched:
        use_lane(patched, lambda: lane)
        through(lambda store: GatheringStore(store, parts=3))
        dos.save(state, url, config=CONFIG)
    assert lane.copied == sum(-(-t.nbytes // (4 * MIB)) for t in state.values() if t.nbytes > 400)
    assert not lane.queued
    stores = [StoreSpec(place).open() for place in (plain, url)]
    bodies = [
        store.get(meta.key, max_size_bytes=2**30)[0]
        for store in stores
        for meta in store.list()
        if meta.key.endswith(".distcp")
    ]
    assert len(bodies) == 2
    assert bodies[0] == bodies[1]
    assert dos.open(url).verify(deep=True).ok


@pytest.mark.parametrize("count_bytes", [70_000, 4 * MIB + 4])
def test_many_tensors_smaller_than_a_slot_make_up_a_part_without_a_wait_for_ever(
    count_bytes, lane, through
):
    state = {
        f"t{n}": torch.full((count_bytes // 4,), float(n)) for n in range(100 * MIB // count_bytes)
    }
    through(lambda store: GatheringStore(store, parts=1))
    config = dos.TransferConfig(
        part_size_bytes=16 * MIB, upload_concurrency=1, stall_timeout_seconds=90
    )
    url = memory_url()
    dos.save(state, url, config=config)
    assert sum(lane.allocated) <= 80 * MIB
    assert dos.open(url).verify().ok


@pytest.mark.parametrize(
    ("sizes", "wanted", "slots"),
    [
        ((12, 16), [12, 4, 12], 2),
        ((12, 12, 8), [12, 4, 8, 8], 2),
        ((13, 5), [13, 5], 2),
        ((13, 3), [13, 3], 1),
    ],
)
def test_a_slot_is_filled_up_to_its_last_whole_block(lane, sizes, wanted, slots):
    """Otherwise a part could lie in more slots than there are."""
    config = dos.TransferConfig(part_size_bytes=16 * MIB, upload_concurrency=8)
    out = Outbound(plan_parts(0, 16 * MIB), config, never_stopped)
    tensors = [torch.zeros(size * MIB, dtype=torch.uint8) for size in sizes]
    held = [piece for tensor in tensors for piece in out.slices(tensor)]
    assert [piece.nbytes // MIB for piece in held] == wanted
    assert len(lane.allocated) == slots


def test_slices_follow_what_makes_their_tensor_and_lie_aligned_in_one_slot(monkeypatch):
    made: list[LateLane] = []
    calls: list[str] = []

    class NotingLane(LateLane):
        def follow(self) -> None:
            calls.append("follow")

        def queue(self, work: Any) -> Any:
            calls.append("copy")
            assert work.keywords == {"non_blocking": True}
            return super().queue(work)

    def make() -> LateLane:
        made.append(NotingLane())
        return made[-1]

    use_lane(monkeypatch, make)
    outbound = Outbound(plan_parts(0, PART), CONFIG, never_stopped)
    sizes = [1, 63, 64, 65, 100, 7]
    held = [
        piece
        for value, size in enumerate(sizes)
        for piece in outbound.slices(torch.full((size,), value, dtype=torch.uint8))
    ]
    (lane,) = made
    assert calls == ["follow", "copy"] * len(sizes)
    assert len(lane.allocated) == 1
    starts = [piece.ctypes.data - lane.starts[0] for piece in held]
    assert starts == [0, 64, 128, 192, 320, 448]
    assert [set(piece.tolist()) for piece in held] == [{value} for value in range(len(sizes))]
    assert outbound.slices(torch.empty(2, device="meta")) is None


@pytest.mark.parametrize(
    ("part_mib", "concurrency", "slots"),
    [(5, 1, 5), (16, 2, 5), (16, 3, 5), (16, 4, 6), (24, 4, 9), (16, None, PINNED_MOST + 2)],
)
def test_a_save_has_slots_for_the_parts_in_flight_and_two_more(part_mib, concurrency, slots):
    config = dos.TransferConfig(
        part_size_bytes=part_mib * MIB,
        **({} if concurrency is None else {"upload_concurrency": concurrency}),
    )
    plan = plan_parts(0, part_mib * MIB)
    assert Outbound(plan, config, never_stopped).slots == slots


def test_a_slice_is_as_long_as_the_plan_has_it_and_a_slot_at_most(lane):
    for part_mib, longest_mib in ((5, 4), (8, 8), (512, 16)):
        outbound = Outbound(plan_parts(0, part_mib * MIB), CONFIG, never_stopped)
        sizes = [piece.nbytes for piece in outbound.slices(torch.ones(20 * MIB, dtype=torch.uint8))]
        assert max(sizes) == longest_mib * MIB
        assert sum(sizes) == 20 * MIB


@pytest.fixture(scope="module")
def sink() -> Iterator[Sink]:
    with Sink(keep=True) as running:
        yield running


@pytest.mark.parametrize("part_mib", cases([5, 16, 24], default=[16]))
def test_a_server_is_sent_more_than_the_ring_holds_and_sends_it_back(part_mib, sink, lane):
    """With the real transport, which takes what it can get before it frees anything."""
    state = {f"t{n}": seeded(f"t{n}", (n * 400_003,)) for n in range(1, 12)}
    config = dos.TransferConfig(
        part_size_bytes=part_mib * MIB, upload_concurrency=1, stall_timeout_seconds=90
    )
    assert sum(tensor.nbytes for tensor in state.values()) > 96 * MIB
    url = f"s3://bucket/{secrets.token_hex(4)}"
    dos.save(state, url, storage_options=sink.storage_options, config=config)
    assert len(lane.allocated) <= 5
    loaded = blank(state)
    dos.load(loaded, url, storage_options=sink.storage_options)
    assert_same(loaded, state)


@given(st.integers(5 * MIB, 200 * MIB), st.integers(1, 16), st.integers(0, 2**40))
def test_the_ring_of_a_save_has_room_for_a_part_wherever_that_begins_in_a_slot(
    part, parts, payload
):
    plan = plan_parts(payload, part)
    config = dos.TransferConfig(part_size_bytes=part, upload_concurrency=parts)
    slots = Outbound(plan, config, never_stopped).slots
    # What an upload takes before it sends anything: more than a part by at most a slice. The slots
    # in the middle of it hold all but a block at least.
    gathered = plan.part_size_bytes + min(plan.slice_size_bytes, device.SLOT_BYTES)
    assert slots >= 2 + (gathered - 1) // (device.SLOT_BYTES - 4 * MIB)
    assert slots * device.SLOT_BYTES <= max((parts + 2) * plan.part_size_bytes, 80 * MIB)


def test_a_transport_that_never_lets_go_ends_in_a_stall_not_in_a_hang(lane, through):
    class KeepingStore(WrappedStore):
        def put_stream(self, key: str, buffers: Iterator[Any], **settings: Any) -> Any:
            return self.inner.put_stream(key, iter(list(buffers)), **settings)

    through(KeepingStore)
    state = {"t": torch.ones(25 * MIB)}
    config = dos.TransferConfig(
        part_size_bytes=PART, upload_concurrency=1, stall_timeout_seconds=0.1
    )
    url = memory_url()
    with pytest.raises(TransferStalledError):
        dos.save(state, url, config=config)
    assert [meta.key[:6] for meta in StoreSpec(url).open().list()] == [".save-"]


def test_a_failed_copy_from_the_device_fails_the_save_and_leaves_nothing(monkeypatch):
    lane = LateLane(fail_at=4)
    use_lane(monkeypatch, lambda: lane)
    url = memory_url()
    with pytest.raises(RankFailedError, match="the device is lost") as caught:
        dos.save(big_state(), url, config=CONFIG)
    assert caught.value.key == "big"
    assert list(StoreSpec(url).open().list()) == []


def test_a_save_that_is_given_up_waits_for_the_copies_out_of_the_tensor(lane):
    out = Outbound(plan_parts(0, PART), CONFIG, never_stopped)
    slices = out.slices(torch.ones(20 * MIB, dtype=torch.uint8))
    assert slices is not None
    first = next(slices)
    assert first.all()
    lane_ahead = len(lane.queued)
    assert lane_ahead
    slices.close()
    assert not lane.queued


def test_one_slot_is_enough_for_who_lets_go_of_each_slice(lane):
    def stop() -> None:
        raise AssertionError("it waits for a slot that nobody has")

    out = Outbound(plan_parts(0, PART), CONFIG, stop)
    out.slots = 1
    for value in (1, 2):
        tensor = torch.full((30 * MIB,), value, dtype=torch.uint8)
        seen = 0
        for piece in out.slices(tensor):
            assert np.all(piece == value)
            seen += piece.nbytes
            del piece
        assert seen == tensor.nbytes
    assert len(lane.allocated) == 1


# --- loading ---


def load(state: dict[str, Any], url: str, **settings: Any) -> None:
    reader = dos.ObjectStoreReader(url, config=settings.pop("config", CONFIG), **settings)
    dcp.load(state, storage_reader=reader, no_dist=True)


@pytest.fixture(scope="module")
def saved() -> str:
    url = memory_url()
    dos.save(big_state(), url)
    return url


@pytest.mark.parametrize(
    ("seed", "budget_mib"),
    cases(product(range(3), [8, 12, 32, 128]), default=[(0, 8), (1, 12), (2, 32)]),
)
def test_a_load_through_the_ring_is_exact_when_it_returns(seed, budget_mib, saved, monkeypatch):
    lane = LateLane(seed)
    use_lane(monkeypatch, lambda: lane)
    loaded = blank(big_state())
    before = {key: tensor._version for key, tensor in loaded.items()}
    budget = budget_mib * MIB
    config = dos.TransferConfig(request_size_bytes=4 * MIB, memory_budget_bytes=budget)
    load(loaded, saved, config=config)
    assert_same(loaded, big_state())
    assert all(tensor._version > before[key] for key, tensor in loaded.items()), "for autograd"
    assert lane.copied
    assert sum(lane.allocated) <= budget
    assert bool(lane.allocated) == (budget_mib > 8)  # where a ring does not fit there is none


def test_a_body_goes_to_the_device_from_the_slot_that_was_acquired_for_it(saved, monkeypatch):
    """There is but one, so that none is left to be copied into on the way."""
    taken: list[int] = []

    class NotingLane(LateLane):
        def queue(self, work: Any) -> Any:
            taken.append(work.args[-1].data_ptr())
            return super().queue(work)

    lane = NotingLane()
    use_lane(monkeypatch, lambda: lane)
    loaded = blank(big_state())
    config = dos.TransferConfig(request_size_bytes=4 * MIB, memory_budget_bytes=12 * MIB)
    load(loaded, saved, config=config)
    assert_same(loaded, big_state())
    assert lane.allocated == [4 * MIB]
    assert taken
    assert all(0 <= at - lane.starts[0] < 4 * MIB for at in taken)


def destinations(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    wide = torch.zeros(600, 501, dtype=dtype)
    with torch.inference_mode():
        inference = torch.zeros(600, 500, dtype=dtype)
    return {
        "whole": torch.zeros(600, 500, dtype=dtype),
        "rows": wide[:, 1:],
        "turned": torch.zeros(500, 600, dtype=dtype).t(),
        "inference": inference,
        "scalar": torch.zeros((), dtype=dtype),
        "one of a column": wide[:1, 0],
        "parameter": torch.nn.Parameter(torch.zeros(600, 500, dtype=dtype), requires_grad=False),
    }


_SIZES = (torch.bool, torch.bfloat16, torch.float64, torch.complex128)


@pytest.mark.parametrize("dtype", cases([*ALL_DTYPES, "converted"], default=[*_SIZES, "converted"]))
def test_every_dtype_and_layout_of_destination_is_filled(dtype, lane):
    stored, wanted = (torch.float32, torch.bfloat16) if dtype == "converted" else (dtype, dtype)
    sizes = {key: tuple(tensor.shape) for key, tensor in destinations(wanted).items()}
    state = {key: seeded(key, size, stored) for key, size in sizes.items()}
    url = memory_url()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(device, "lane_of", lambda *_: None)
        dos.save(state, url)
    loaded = destinations(wanted)
    with pytest.warns(UserWarning) if dtype == "converted" else pytest.MonkeyPatch.context():
        load(dict(loaded), url)
    assert lane.copied >= len(sizes)
    if dtype == "converted":
        for key, tensor in state.items():
            converted = tensor.to(wanted)
            same = (converted == loaded[key]) | (converted.isnan() & loaded[key].isnan())
            assert same.all(), key
    else:
        assert_same(loaded, state)


def test_a_request_is_fetched_into_its_part_of_a_slot_which_comes_back_after_it():
    place = torch.device("cpu")
    lane = LateLane()
    first, second = RangeRequest(0, 100, 108), RangeRequest(0, 200, 204)
    with Inbound({place: lane}, 1, 8) as inbound:
        for request, size in ((first, 8), (second, 4), (first, 8)):
            admitted = inbound.admit(request, Progress(60))
            assert admitted is not None
            assert admitted.nbytes == size
            with inbound.taking(request):
                pass
        with inbound.taking(first):  # one that was not admitted passes
            inbound.send(place, b"12345678", lambda _: None)
    assert lane.allocated == [8]
    assert Inbound({place: lane}, 0, 8).admit(first, Progress(60)) is None


@pytest.mark.parametrize(
    ("size", "slots", "held"), [(8, 1, False), (8, 1, True), (8, 0, False), (9, 1, False)]
)
def test_bytes_that_arrive_elsewhere_go_through_a_free_slot_or_at_once(size, slots, held):
    """A slot is never waited for: somebody who fetches into it may wait for this thread."""
    place, got = torch.device("cpu"), torch.zeros(size, dtype=torch.uint8)
    lane, block = LateLane(), bytearray(range(1, size + 1))
    late = size == 8 and slots == 1 and not held
    with Inbound({place: lane}, slots, 8) as inbound:
        taken = [inbound.admit(RangeRequest(0, 0, 8), Progress(60)) for _ in range(held)]
        inbound.send(place, block, got.copy_)
        block[:] = bytes(size)
        assert lane.allocated == ([8] if late or held else [])
        assert bool(got.any()) is not late
    assert got.tolist() == list(range(1, size + 1))
    del taken


def test_after_an_error_nothing_is_sent_from_the_memory_that_was_admitted():
    """The body is fetched and consumed once more, wherever it arrives then."""
    request = RangeRequest(0, 0, 8)
    sent = []
    with Inbound({torch.device("cpu"): LateLane()}, 2, 8192) as inbound:
        admitted = inbound.admit(request, Progress(60))
        assert admitted is not None
        with pytest.raises(ZeroDivisionError), inbound.taking(request):
            raise ZeroDivisionError
        inbound.send(torch.device("cpu"), admitted[:8], sent.append)
        with inbound.taking(request):  # it was kept
            inbound.send(torch.device("cpu"), admitted[:8], sent.append)
            inbound.send(torch.device("cpu"), bytes(8), sent.append)
    address = np.frombuffer(admitted, np.uint8).ctypes.data
    assert [part.data_ptr() == address for part in sent] == [False, True, False]


class InterruptingPlanner(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        raise KeyboardInterrupt


def test_a_load_that_is_interrupted_leaves_nothing_queued_and_writes_no_more(lane):
    url = memory_url()
    state = {"a-value": "text", **big_state()}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(device, "lane_of", lambda *_: None)
        dos.save(state, url)
    loaded = {"a-value": "", **blank(big_state())}
    reader = dos.ObjectStoreReader(url, config=CONFIG)
    with pytest.raises(BaseException) as caught:
        dcp.load(loaded, storage_reader=reader, planner=InterruptingPlanner(), no_dist=True)
    assert "KeyboardInterrupt" in repr(caught.getrepr())
    assert lane.finished == 1
    assert not lane.queued


def test_a_failed_copy_to_the_device_fails_the_load_and_ends_all_others(saved, monkeypatch):
    lane = LateLane(fail_at=4)
    use_lane(monkeypatch, lambda: lane)
    with pytest.raises(RankFailedError, match="the device is lost"):
        dos.load(blank(big_state()), saved, config=CONFIG)
    assert lane.finished == 1
    assert not lane.queued


def test_an_error_at_the_end_of_the_copies_is_raised_unless_the_load_failed(saved):
    class LostLane(LateLane):
        def finish(self) -> None:
            super().finish()
            raise RuntimeError("lost at the end")

    lanes = {torch.device("cpu"): LostLane(), torch.device("meta"): LateLane()}
    with pytest.raises(RuntimeError, match="lost at the end"), Inbound(lanes, 0, 8):
        pass
    assert [lane.finished for lane in lanes.values()] == [1, 1]
    with pytest.raises(ValueError, match="first"), Inbound(lanes, 0, 8):
        raise ValueError("first")


@pytest.mark.parametrize(
    ("made_in", "calls_in"),
    cases(itertools.product((False, True), repeat=2), default=[(False, True), (True, False)]),
)
def test_saves_and_loads_of_a_device_work_in_inference_mode_and_out_of_it(
    made_in, calls_in, monkeypatch
):
    """Copies are queued by threads of their own, which are in no mode."""
    use_lane(monkeypatch, LateLane)
    with torch.inference_mode(made_in):
        state = {key: seeded(key, (9, MIB // 4)) for key in ("a", "b")}
        turned = {key: torch.zeros(MIB // 4, 9).t() for key in state}
    for save in (dos.save, lambda *of: dos.async_save(*of).result()):
        url = memory_url()
        with torch.inference_mode(made_in):
            loaded = blank(state)
        with torch.inference_mode(calls_in):
            save(state, url)
            dos.load(loaded, url)
            dos.load(turned, url)
        assert_same(loaded, state)
        assert_same({key: tensor.contiguous() for key, tensor in turned.items()}, state)


# --- on a GPU ---

gpu = pytest.mark.gpu


@pytest.fixture
def cuda() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU: torch.cuda.is_available() is False")
    return torch.device("cuda", torch.cuda.current_device())


@gpu
@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_gpu_destinations_of_every_dtype_and_layout_are_filled(dtype, cuda):
    shapes = {key: tuple(tensor.shape) for key, tensor in destinations(dtype).items()}
    del shapes["inference"], shapes["parameter"]
    state = {key: seeded(key, shape, dtype) for key, shape in shapes.items()}
    url = memory_url()
    dos.save(state, url)
    loaded = {
        "whole": torch.zeros(600, 500, dtype=dtype, device=cuda),
        "rows": torch.zeros(600, 501, dtype=dtype, device=cuda)[:, 1:],
        "turned": torch.zeros(500, 600, dtype=dtype, device=cuda).t(),
        "scalar": torch.zeros((), dtype=dtype, device=cuda),
        "one of a column": torch.zeros(600, 501, dtype=dtype, device=cuda)[:1, 0],
    }
    load(dict(loaded), url)
    assert_same({key: t.cpu() for key, t in loaded.items()}, state)
    read = dos.open(url).read(device=cuda)
    assert_same({key: t.cpu() for key, t in read.items()}, state)


@gpu
@pytest.mark.parametrize("own_stream", [False, True])
def test_gpu_work_that_is_queued_before_a_save_or_load_is_done_before_it(own_stream, cuda):
    """A long kernel is queued, then what makes the values; nobody waits for them."""
    stream = torch.cuda.Stream(cuda) if own_stream else torch.cuda.current_stream(cuda)
    url = memory_url()
    with torch.cuda.stream(stream):
        tensor = torch.zeros(16 * MIB, device=cuda)
        torch.cuda._sleep(200_000_000)
        tensor.fill_(3.0)
        dos.save({"t": tensor}, url, config=CONFIG)
        loaded = torch.zeros_like(tensor)
        torch.cuda._sleep(200_000_000)
        loaded.fill_(1.0)
        dos.load({"t": loaded}, url, config=CONFIG)
    # On another stream, which waits for none: what was loaded is there.
    with torch.cuda.stream(torch.cuda.Stream(cuda)):
        assert bool((loaded == 3.0).all())


@gpu
def test_gpu_slots_are_pinned_and_within_the_bounds(cuda, monkeypatch):
    made: list[torch.Tensor] = []
    real_allocate = device.CudaLane.allocate

    def allocate(self: device.CudaLane, size_bytes: int) -> torch.Tensor:
        made.append(real_allocate(self, size_bytes))
        return made[-1]

    monkeypatch.setattr(device.CudaLane, "allocate", allocate)
    state = {f"t{n}": torch.ones(4 * MIB, device=cuda) for n in range(16)}
    url = memory_url()
    dos.save(state, url, config=CONFIG)
    assert made
    assert all(tensor.is_pinned() for tensor in made)
    assert sum(t.nbytes for t in made) <= (CONFIG.upload_concurrency + 2) * 8 * MIB
    made.clear()
    dos.load(state, url, config=CONFIG)
    assert made
    assert sum(t.nbytes for t in made) <= CONFIG.memory_budget_bytes


@gpu
def test_a_save_of_cpu_tensors_does_not_take_the_gpu_into_use(cuda):
    code = (
        "import torch, dcp_objstore as dos;"
        "state = {'t': torch.ones(100_000)};"
        "dos.save(state, 'memory://cpu/only'); dos.load(state, 'memory://cpu/only');"
        "assert not torch.cuda.is_initialized()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@gpu
def test_gpu_memory_is_not_held_by_loads_one_after_another(cuda):
    state = {"t": torch.ones(40 * MIB, device=cuda, dtype=torch.uint8).view(4 * MIB, 10)}
    url = memory_url()
    dos.save(state, url, config=CONFIG)
    held = []
    for _ in range(40):
        loaded = torch.zeros(10, 4 * MIB, device=cuda, dtype=torch.uint8).t()
        load({"t": loaded}, url)
        del loaded
        held.append(torch.cuda.memory_reserved(cuda))
    assert held[-1] == held[2]
