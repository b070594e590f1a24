"""Staging: what is saved in the background is the state of the moment, in memory that is kept."""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Shard

import dcp_objstore as dos
from dcp_objstore import torch_private
from dcp_objstore.state import device
from dcp_objstore.transfer import digests
from dcp_objstore.write import upload_items as uploading
from dcp_objstore.write.staging import memory as pinned, regions, stager, state as staging
from dcp_objstore.write.staging.state import StagedState, Staging, stage
from tests.support.checkpoints import HookPlanner, memory_url
from tests.support.lanes import LateLane, use_lane
from tests.support.meeting_number import MeetingNumber
from tests.support.ranks import run_ranks

MIB = 1 << 20


def addresses(state: StagedState) -> list[int]:
    return [value.data_ptr() for value in state.values()]


def large_and_small() -> dict[str, torch.Tensor]:
    sizes = [5 * MIB, 1, 17, 300_000, 4 * MIB + 1]  # floats: two have a slab of their own
    return {f"t{n}": torch.full((size,), float(n)) for n, size in enumerate(sizes)}


# The copy ---------------------------------------------------------------------------------------


def awkward() -> dict[str, torch.Tensor]:
    matrix = torch.arange(120.0).view(10, 12)
    with torch.inference_mode():
        inference = torch.ones(3)
    return {
        "view": torch.arange(1000, dtype=torch.int16)[333:340],
        "matrix": matrix,
        "transposed": matrix.t(),
        "column": torch.arange(4000.0).view(20, 200)[:, 7],
        "conjugate": torch.randn(4, dtype=torch.complex64).conj(),
        "negative": torch.randn(4, dtype=torch.complex64).conj().imag,
        "expanded": torch.ones(1).expand(5),
        "empty": torch.empty(0, 3, dtype=torch.float64),
        "scalar": torch.tensor(3),
        "inference": inference,
        "bfloat16": torch.ones(3, dtype=torch.bfloat16)[1:],
        "parameter": torch.nn.Parameter(torch.ones(3)),
        "trained": torch.randn(4, dtype=torch.complex64, requires_grad=True).conj(),
        "bool": torch.tensor([True, False, True])[::2],
    }


def test_every_kind_of_tensor_is_copied_as_it_is():
    state = awkward()
    expected = {key: value.detach().clone() for key, value in state.items()}
    staged = stage(state)
    with torch.no_grad():
        for key, value in state.items():
            if key not in ("empty", "expanded", "inference"):
                value.zero_()
    for key, value in expected.items():
        assert torch.equal(staged[key], value), key
        assert staged[key].dtype == value.dtype
        assert not staged[key].requires_grad


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, that these will go
def test_a_quantized_tensor_keeps_its_scale_in_the_copy():
    floats = torch.linspace(-1, 1, 6).view(3, 2)
    scales = torch.tensor([0.1, 0.2, 0.3])
    state: dict[str, Any] = {
        "tensor": torch.quantize_per_tensor(floats, 0.1, 3, torch.qint8),
        "between": [1],
        "channel": torch.quantize_per_channel(floats, scales, torch.ones(3), 0, torch.quint8),
    }
    expected = {key: value.dequantize() for key, value in state.items() if key != "between"}
    staged = stage(state)
    for key, value in expected.items():
        state[key].untyped_storage().fill_(0)
        assert torch.equal(staged[key].dequantize(), value)
    assert staged["between"] == [1]
    url = memory_url()
    dos.async_save(dict(staged), url).result(60)
    dos.load(state, url, progress=False)
    for key, value in expected.items():
        assert torch.equal(state[key].dequantize(), value)


def test_an_empty_view_keeps_no_memory_of_the_state():
    base = torch.ones(1000)
    staged = stage({"none": base[:0]})
    kept = weakref.ref(base.untyped_storage())
    del base
    assert kept() is None
    assert staged["none"].numel() == 0


class Own(torch.Tensor):
    """A subclass, as a collective that is under way has one."""


def test_a_dtensor_is_copied_with_whatever_it_is_around(world, monkeypatch):
    waited: list[torch.Tensor] = []
    monkeypatch.setattr(torch_private, "waited", lambda tensor: waited.append(tensor) or tensor)
    mesh = init_device_mesh("cpu", (1,))
    plain = DTensor.from_local(torch.ones(3), mesh, [Shard(0)])
    own = DTensor.from_local(torch.ones(3).as_subclass(Own), mesh, [Shard(0)])
    assert type(own._local_tensor) is Own
    staged = stage({"plain": plain, "own": own, "none": Own()})
    for value in (plain, own):
        value._local_tensor.zero_()
    for key, value in (("plain", plain), ("own", own)):
        assert type(staged[key]) is DTensor
        assert staged[key].placements == value.placements
        assert staged[key].to_local().tolist() == [1.0] * 3
    assert any(tensor is own._local_tensor for tensor in waited), (
        "its collective may not have ended"
    )


def test_a_state_of_tensors_and_scalars_is_copied_without_dcp(monkeypatch):
    copied: list[Any] = []
    monkeypatch.setattr(
        torch_private.HostStager, "stage", lambda _, values: copied.append(values) or []
    )
    scalars = {"n": 1, "t": True, "f": 0.5, "c": 1j, "s": "x", "b": b"x", "no": None}
    tensors = {"w": torch.ones(1), "p": nn.Parameter(torch.ones(1))}
    assert stage({**tensors, "more": [scalars]})["more"] == [scalars]
    assert copied == [[]]


@pytest.mark.parametrize(
    ("mib", "torchs", "threads"),
    [(0, 3, None), (4, 3, None), (5, 1, None), (5, 3, 2), (12, 3, 3), (13, 3, 3), (36, 40, 8)],
)
def test_one_thread_copies_each_4_mib_but_no_more_than_torch_uses_or_eight(
    mib, torchs, threads, monkeypatch
):
    pools: list[int] = []

    class Pool(staging.DaemonPool):
        def __init__(self, threads: int, name: str) -> None:
            pools.append(threads)
            super().__init__(threads, name)

    monkeypatch.setattr(staging, "DaemonPool", Pool)
    monkeypatch.setattr(staging, "_COPY_BYTES", 4 * MIB)
    monkeypatch.setattr(torch, "get_num_threads", lambda: torchs)
    state = {f"{n}": torch.full((MIB,), n, dtype=torch.uint8) for n in range(mib % 4)}
    numbers = torch.arange(mib // 4 * MIB, dtype=torch.int32)
    state["turned"], state["long"] = numbers[:MIB].view(-1, 32).t(), numbers[MIB:].clone()
    staged = stage(state)
    assert pools == ([] if threads is None else [threads])
    assert all(torch.equal(staged[key], value) for key, value in state.items())
    of_long = digests.block_digests(state["long"].view(torch.uint8).numpy())
    assert staged.digests.get((staged["long"].data_ptr(), len(of_long) * MIB // 4), b"") == of_long


def test_memory_for_copies_of_a_gpu_is_pinned_and_they_follow_what_it_has_to_do(
    memory, monkeypatch
):
    pinned_bytes: list[int] = []
    monkeypatch.setattr(pinned, "_pin", lambda tensor: pinned_bytes.append(tensor.nbytes))

    class Lane(LateLane):
        followed: ClassVar[list[int]] = []

        def follow(self) -> None:
            self.followed.append(self._asked)

    lane = Lane()
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    monkeypatch.setattr(device, "lane_of", lambda place, _: lane if place == gpu else None)

    def plan(tensors: list[torch.Tensor]) -> Any:
        """As if those that are copied as elements were of a GPU."""
        places = regions.plan_regions(tensors)
        for region, _ in places.values():
            region.device = gpu if region.storage is None else cpu
        return places

    monkeypatch.setattr(staging, "plan_regions", plan)
    numbers = torch.randn(3000, 8, dtype=torch.complex64)
    state = {"a": numbers.conj(), "b": torch.ones(5), "c": numbers[1:].conj(), "d": torch.zeros(5)}
    begun = Staging(state, memory)
    assert pinned_bytes == [1 << 19]
    assert memory.allocations == 2
    assert lane.followed == [0]
    (ticket,) = lane.queued
    begun.finish()
    assert ticket.done
    assert all(torch.equal(begun.state[key], value) for key, value in state.items())
    assert begun.state.size_bytes == sum(value.nbytes for value in state.values())


def test_what_has_no_memory_keeps_nothing_after_it_from_being_copied():
    without = [
        torch.zeros(0),
        torch.ones(3, device="meta"),
        torch.ones(3).to_sparse(),
        torch.ones(3, dtype=torch.complex64).conj(),
    ]
    for first in without:
        last = torch.ones(3)
        places = regions.plan_regions([first, last])
        assert id(last) in places
    freed = torch.ones(3)
    freed.untyped_storage().resize_(0)
    places = regions.plan_regions([freed, last])
    assert id(last) in places


class Anything:
    def __init__(self) -> None:
        self.tensor, self.names = torch.ones(3), ["a"]


NUMBERS = torch.arange(400, dtype=torch.int32)
SQUARE = NUMBERS.view(20, 20)
BYTES = NUMBERS.view(torch.uint8)


@pytest.mark.parametrize(
    ("tensors", "plan"),
    [
        ([NUMBERS], [(0, 1600, "payload", 0)]),
        ([NUMBERS[3:5]], [(12, 20, "payload", 0)]),
        ([SQUARE.t()], [(0, 1600, "storage", 0)]),
        ([SQUARE[1:3, 2:4]], [(0, 16, "elements", 0)]),
        # Two that touch are one region, from a multiple of 16 bytes of the storage on.
        ([NUMBERS[5:8], NUMBERS[8:10]], [(16, 40, "storage", 4), (16, 40, "storage", 16)]),
        ([NUMBERS[8:10], NUMBERS[5:8]], [(16, 40, "storage", 16), (16, 40, "storage", 4)]),
        ([NUMBERS[5:7], NUMBERS[8:10]], [(20, 28, "payload", 0), (32, 40, "payload", 0)]),
        # The first reaches as far as the third.
        (
            [NUMBERS[0:9], NUMBERS[1:2], NUMBERS[9:10]],
            [(0, 40, "storage", 0), (0, 40, "storage", 4), (0, 40, "storage", 36)],
        ),
        # Up to 16 bytes more than their elements are copied with them: here just those, then more.
        ([NUMBERS[4:12:2], NUMBERS[10:14]], [(16, 56, "storage", 0), (16, 56, "storage", 24)]),
        ([NUMBERS[4:16:2], NUMBERS[14:16]], [(16, 64, "storage", 0), (16, 64, "storage", 40)]),
        ([NUMBERS[4:18:2], NUMBERS[16:18]], [(0, 28, "elements", 0), (0, 8, "elements", 0)]),
        # What is the same twice is counted once, and copied once.
        ([NUMBERS[4:18:2], NUMBERS[4:18:2]], [(0, 28, "elements", 0), (0, 28, "elements", 0)]),
        ([NUMBERS[2:5], NUMBERS[2:5]], [(0, 20, "storage", 8), (0, 20, "storage", 8)]),
        # Bytes from the second on, and numbers from the second on.
        ([BYTES[1:23], NUMBERS[1:5]], [(0, 23, "storage", 1), (0, 23, "storage", 4)]),
        # The same bytes as other numbers.
        (
            [NUMBERS[4:18:2], NUMBERS.view(torch.float32)[4:18:2]],
            [(16, 68, "storage", 0), (16, 68, "storage", 0)],
        ),
    ],
)
def test_what_is_copied_together_and_where_each_tensor_lies_in_it(tensors, plan):
    places = regions.plan_regions(tensors)
    found = []
    for tensor in tensors:
        region, offset = places[id(tensor)]
        kind = "elements" if region.storage is None else "storage"
        found.append((region.start, region.end, "payload" if region.is_payload else kind, offset))
        assert region.size_bytes == region.end - region.start
    assert found == plan
    together = {id(places[id(tensor)][0]) for tensor in tensors}
    assert len(together) == len({of[:3] for of in plan})
    staged = stage({f"{n}": tensor for n, tensor in enumerate(tensors)})
    assert all(torch.equal(staged[f"{n}"], tensor) for n, tensor in enumerate(tensors))


@pytest.mark.parametrize(
    ("sizes", "slabs", "places"),
    [
        ([], None, []),
        ([1], [64 * 1024], [(0, 0)]),
        ([64, 65, 1], [64 * 1024], [(0, 0), (0, 64), (0, 192)]),
        ([64 * 1024], [64 * 1024], [(0, 0)]),
        ([64 * 1024, 1], [128 * 1024], [(0, 0), (0, 64 * 1024)]),
        ([16 * MIB + 1], [16 * MIB + 4096], [(0, 0)]),
        ([5, 20 * MIB, 7], [64 * 1024, 20 * MIB], [(0, 0), (1, 0), (0, 64)]),
        ([16 * MIB] * 4, [64 * MIB], [(0, n * 16 * MIB) for n in range(4)]),
        (
            [16 * MIB] * 4 + [1],
            [64 * MIB, 64 * 1024],
            [*((0, n * 16 * MIB) for n in range(4)), (1, 0)],
        ),
    ],
)
def test_regions_lie_aligned_in_slabs_of_64_mib_and_large_ones_in_their_own(sizes, slabs, places):
    taken: list[tuple[list[int], bool]] = []
    arrays: list[Any] = []

    def take(sizes_bytes: list[int], *, pinned: bool) -> list[Any]:
        taken.append((sizes_bytes, pinned))
        arrays.extend(np.empty(size, np.uint8) for size in sizes_bytes)  # no memory until written
        return arrays

    laid = [regions.Region(torch.device("cpu"), None, 7, 7 + size) for size in sizes]
    memory: Any = SimpleNamespace(take=take)
    regions.lay(laid, memory, pinned=True)
    assert taken == ([] if slabs is None else [(slabs, True)])
    starts = [array.ctypes.data for array in arrays]
    assert [region.address for region in laid] == [starts[n] + offset for n, offset in places]
    for region in laid:
        assert region.array is not None
        assert (region.array.ctypes.data, region.array.nbytes) == (
            region.address,
            region.size_bytes,
        )


@pytest.mark.filterwarnings("error")
def test_values_that_are_no_tensors_are_copied_deeply():
    given = Anything()
    state: dict[str, Any] = {
        "any": given,
        "set": {1, 2},
        "array": np.ones(2),
        "tuple": (torch.ones(2), [1]),
        "ordered": OrderedDict(b=[torch.ones(1)], a=(torch.arange(20).to_sparse().coalesce(),)),
    }
    staged = stage(state)
    given.tensor.zero_()
    given.names.append("b")
    for changed in (state["array"], state["tuple"][0], state["ordered"]["b"][0]):
        changed[:] = 0
    state["ordered"]["a"][0].values().zero_()
    state["set"].clear()
    state["tuple"][1].clear()
    assert staged["any"].tensor.tolist() == [1.0] * 3
    assert not staged["any"].tensor.is_shared()
    assert not staged["any"].tensor.is_pinned()
    assert staged["any"].names == ["a"]
    assert staged["set"] == {1, 2}
    assert staged["array"].tolist() == [1.0, 1.0]
    assert staged["tuple"][0].tolist() == [1.0, 1.0]
    assert staged["tuple"][1] == [1]
    assert type(staged["ordered"]) is OrderedDict
    assert staged["ordered"]["b"][0].tolist() == [1.0]
    assert staged["ordered"]["a"][0].is_sparse
    assert staged["ordered"]["a"][0].to_dense().tolist() == list(range(20))


def hashed_by_the_writer(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of what is hashed during the upload, from here on."""
    sizes: list[int] = []

    def block_digests(piece: Any) -> bytes:
        sizes.append(memoryview(piece).nbytes)
        return digests.block_digests(piece)

    monkeypatch.setattr(uploading, "block_digests", block_digests)
    return sizes


@pytest.mark.parametrize("threads", [1, 3])
def test_digests_made_while_staging_are_those_of_the_copy(threads):
    block = digests.BLOCK_SIZE_BYTES
    sizes = [MIB - 1, MIB, block - 1, block, block + 1, 3 * block, 33 * MIB + 5]
    state: dict[str, Any] = {
        f"{n}": torch.randint(0, 256, (n + 3,), dtype=torch.uint8)[3:] for n in sizes
    }
    state["matrix"] = torch.randn(1024, 1025)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        staged = stage(state)
    finally:
        torch.set_num_threads(before)
    expected = {
        (value.data_ptr(), value.nbytes): digests.block_digests(
            value.view(-1).view(torch.uint8).numpy()
        )
        for value in staged.values()
        if value.nbytes >= MIB
    }
    assert dict(staged.digests) == expected
    assert all(torch.equal(staged[key], value) for key, value in state.items())


def test_what_is_not_uploaded_as_it_was_copied_is_hashed_by_the_writer(monkeypatch):
    matrix = torch.randn(1024, 2048)
    large = torch.randn(4 * MIB)
    state = {
        "transposed": matrix.t(),  # its elements are uploaded in another order than they lie
        "columns": torch.randn(2048, 2048)[:, 5:1029],
        "one": large[: 2 * MIB],  # one region of two tensors
        "other": large[MIB:],
        "negative": torch.view_as_complex(torch.randn(MIB, 2)).conj(),
    }
    assert stage(state).digests == {}
    sizes = hashed_by_the_writer(monkeypatch)
    url = memory_url()
    dos.async_save(state, url).result()
    assert sum(sizes) == sum(value.nbytes for value in state.values())
    assert dos.open(url).verify(deep=True).ok


def test_nothing_that_was_staged_is_hashed_again(monkeypatch):
    state = {"t": torch.randn(5 * MIB), "u": torch.randn(1024, 1024), "small": torch.randn(100_000)}
    sizes = hashed_by_the_writer(monkeypatch)
    url = memory_url()
    dos.async_save(state, url).result()
    assert sizes == []
    loaded = {key: torch.zeros_like(value) for key, value in state.items()}
    dos.load(loaded, url)
    assert all(torch.equal(loaded[key], value) for key, value in state.items())


class Halving(DefaultSavePlanner):
    def resolve_data(self, write_item: Any) -> Any:
        return super().resolve_data(write_item).mul_(0.5)


class HalvingWriter(dos.ObjectStoreWriter):
    def stage(self, state_dict: Any, **settings: Any) -> StagedState:
        staged = super().stage(state_dict, **settings)
        staged["t"].mul_(0.5)
        return staged


@pytest.mark.parametrize("by", ["planner", "writer", "hand"])
def test_digests_hold_for_a_copy_that_somebody_changed_before_it_was_uploaded(by):
    state, url = {"t": torch.ones(2 * MIB)}, memory_url()
    writer = HalvingWriter(url) if by == "writer" else dos.ObjectStoreWriter(url)
    planner = Halving() if by == "planner" else None
    if by == "hand":
        staged = writer.stage(state)
        staged["t"].data.mul_(0.5)
        dcp.save(staged, storage_writer=writer, no_dist=True)
    else:
        dcp.async_save(state, storage_writer=writer, planner=planner).result()  # type: ignore[union-attr]
    loaded = {"t": torch.zeros(2 * MIB)}
    dos.load(loaded, url)  # every block verified
    assert loaded["t"].eq(0.5).all()
    assert state["t"].eq(1).all()


@pytest.mark.parametrize("on_device", [False, True])
def test_a_finished_copy_keeps_no_memory_of_the_state(on_device, memory, monkeypatch):
    """Training may free its tensors while the copy is uploaded."""
    if on_device:
        lane = LateLane()
        use_lane(monkeypatch, lambda: lane)
    tensor = torch.arange(1000.0)
    begun = Staging({"t": tensor}, memory)
    kept = weakref.ref(tensor), weakref.ref(tensor.untyped_storage())
    del tensor
    assert None not in [reference() for reference in kept], "its memory was not copied yet"
    begun.finish()
    assert [reference() for reference in kept] == [None, None]
    assert begun.state["t"][7] == 7


# Memory -----------------------------------------------------------------------------------------


def test_memory_that_somebody_holds_is_not_used_again_and_then_is(memory):
    state = large_and_small()
    first = stage(state)
    first_at = addresses(first)
    held = np.from_dlpack(first["t0"])[:3]  # as the transport holds a slice
    for value in state.values():
        value.fill_(-1.0)
    second = stage(state)
    assert not set(addresses(second)) & set(first_at)
    del first
    third = stage(state)
    assert third["t0"].data_ptr() != first_at[0]
    assert held.tolist() == [0.0, 0.0, 0.0]
    del second, third, held
    made = memory.allocations
    fourth, fifth = stage(state), stage(state)
    assert memory.allocations == made
    assert len(set(addresses(fourth)) | set(addresses(fifth))) == 2 * len(state)


def test_garbage_is_collected_only_if_memory_would_grow_while_some_is_in_use(memory, monkeypatch):
    searched: list[int] = []
    monkeypatch.setattr(pinned.gc, "collect", lambda: searched.append(memory.allocations))
    monkeypatch.setattr(pinned, "_pin", lambda tensor: None)
    first = memory.take([10, 20, 20], pinned=False)
    assert searched == [], "none was in use"
    del first[:2]
    second = memory.take([10, 20], pinned=False)
    assert searched == [], "there is what it asks for"
    assert memory.allocations == 3
    third = memory.take([20], pinned=False)
    assert searched == [3]
    del second
    fourth = memory.take([20], pinned=True)
    assert searched == [3, 4], "none of this kind is there"
    assert memory.allocations == 5
    assert memory.allocated_bytes == 3 * 20, "two takes have not used the others"
    del first, fourth
    memory.release()
    assert memory.allocated_bytes == 20, "what is in use stays"
    del third
    memory.release()
    assert memory.allocated_bytes == 0
    assert memory.take([20], pinned=False)
    assert memory.allocations == 6


def test_two_threads_that_take_memory_at_once_are_kept_apart(memory):
    memory.allocations = MeetingNumber(0)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for taking in [pool.submit(memory.take, [8], pinned=False) for _ in range(2)]:
            assert taking.result(30)
    assert memory.allocations == 2


@pytest.mark.parametrize(
    ("call", "args"), [("take", {"sizes_bytes": [8], "pinned": False}), ("release", {})]
)
def test_what_one_thread_looks_at_no_other_thread_changes(call, args, memory):
    memory.take([8], pinned=False).clear()  # it has returned, and is not among the idle ones yet
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        with memory._lock:
            calling = pool.submit(getattr(memory, call), **args)
            assert not concurrent.futures.wait([calling], 0.1).done
            assert memory._idle == []
        calling.result(30)
    assert memory.allocations == 1


def test_two_states_saved_in_turn_both_have_their_memory(memory):
    states = [{"t": torch.ones(5 * MIB)}, {"t": torch.ones(6 * MIB)}]
    for turn in range(6):
        stage(states[turn % 2])
    assert memory.allocations == 2


def test_saves_by_dcp_share_the_memory_and_keep_the_state_of_the_call(memory):
    state, urls, made = large_and_small(), [memory_url() for _ in range(4)], []
    writers = [dos.ObjectStoreWriter(progress=False) for _ in range(2)] * 2
    for number, (url, writer) in enumerate(zip(urls, writers, strict=True)):
        state["t1"].fill_(float(number))
        assert isinstance(writer, AsyncStager)
        future: Any = dcp.async_save(state, storage_writer=writer, checkpoint_id=url, no_dist=True)
        state["t1"].fill_(-1.0)
        future.result(30)
        assert writer._background is not None
        assert writer._background.wait(30)
        made.append(memory.allocations)
    assert made == made[:1] * 4
    assert [dos.open(url).read("t1")["t1"].item() for url in urls] == [0, 1, 2, 3]


# One save at a time -----------------------------------------------------------------------------


class Held:
    """A planner that stops its save while it uploads."""

    def __init__(self) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()
        self.planner = HookPlanner(lambda item: self.stop())

    def stop(self) -> None:
        self.reached.set()
        assert self.go_on.wait(30)


def begin_held(writer: dos.ObjectStoreWriter, url: str, held: Held) -> Any:
    future = dcp.async_save(
        {"t": torch.ones(1000)},
        storage_writer=writer,
        checkpoint_id=url,
        planner=held.planner,
        no_dist=True,
    )
    assert held.reached.wait(30)
    return future


@contextlib.contextmanager
def impatient() -> Iterator[None]:
    """Nobody waits for a save that may be about to end."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(stager, "_GRACE_SECONDS", 0.01)
        yield


def test_a_second_save_with_a_writer_is_refused_as_asked():
    writer, held = dos.ObjectStoreWriter(progress=False, on_busy="raise"), Held()
    urls = memory_url(), memory_url()
    first = begin_held(writer, urls[0], held)
    state = {"t": torch.zeros(1000)}
    with impatient(), pytest.raises(dos.errors.SaveInProgressError, match="running") as caught:
        dcp.async_save(state, storage_writer=writer, checkpoint_id=urls[1], no_dist=True)
    assert caught.value.url == urls[0], "the writer is still at this one"
    held.go_on.set()
    first.result(30)
    again: Any = dcp.async_save(state, storage_writer=writer, checkpoint_id=urls[1], no_dist=True)
    again.result(30)
    found = [dos.open(url).read("t")["t"].unique().tolist() for url in urls]
    assert found == [[1.0], [0.0]]


@pytest.mark.parametrize("save", [dcp.async_save, dcp.save])
def test_a_second_save_with_a_writer_waits_before_it_copies(save):
    writer, held = dos.ObjectStoreWriter(progress=False), Held()
    state, url, uploads = {"t": torch.zeros(1000)}, memory_url(), threading.Event()
    planner = HookPlanner(lambda item: uploads.set())
    settings: dict[str, Any] = {"storage_writer": writer, "planner": planner, "no_dist": True}
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        first = pool.submit(begin_held, writer, memory_url(), held).result(30)
        second = pool.submit(save, state, checkpoint_id=url, **settings)
        assert not uploads.wait(0.2)
        state["t"].fill_(2.0)
        held.go_on.set()
        first.result(30)
        found = second.result(30)
    if isinstance(found, concurrent.futures.Future):
        found.result(30)
    assert dos.open(url).read("t")["t"].unique().tolist() == [2.0]


@pytest.mark.parametrize("refused", ["url", "before the writer is called"])
@pytest.mark.parametrize("elsewhere", [False, True], ids=["here", "another thread"])
def test_a_save_that_ended_before_it_began_does_not_block_the_next(refused, elsewhere):
    writer = dos.ObjectStoreWriter(progress=False, on_busy="raise")
    state = {"t": torch.ones(3)}

    def save(url: Any) -> Any:
        return dcp.async_save(state, storage_writer=writer, checkpoint_id=url, no_dist=True)

    def save_badly() -> Any:
        with warnings.catch_warnings():
            if refused == "url":
                try:
                    return wait(save(Path("run/step-1")))
                except (
                    dos.errors.InvalidUrlError
                ) as error:  # torch 2.9 looks at it in the foreground
                    refusal: Any = concurrent.futures.Future()
                    refusal.set_exception(error)
                    return refusal
            warnings.simplefilter("error")  # DCP warns that it has no process group
            return wait(save(memory_url()))

    def wait(future: Any) -> Any:
        assert future.exception(30) is not None
        return future

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        failed = pool.submit(save_badly).result() if elsewhere else save_badly()
        if refused == "url":  # an executor of the program's own does not pass for DCP's
            pool.submit(threading.get_ident).result()
        url = memory_url()
        save(url).result(30)
    assert dos.open(url).keys() == {"t"}
    assert failed.exception(0) is not None  # held until here, and with it the copy


def test_saves_of_two_threads_with_one_writer_are_both_committed():
    held, other = Held(), HookPlanner(lambda item: None)
    writer, urls = dos.ObjectStoreWriter(progress=False), [memory_url(), memory_url()]

    def save(number: int, planner: HookPlanner) -> None:
        state = {"t": torch.full((3,), float(number))}
        dcp.save(
            state, storage_writer=writer, checkpoint_id=urls[number], planner=planner, no_dist=True
        )

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        first = pool.submit(save, 0, held.planner)
        try:
            assert held.reached.wait(30)
            save(1, other)
        finally:
            held.go_on.set()
        first.result(30)
    assert [dos.open(url).read("t")["t"].tolist() for url in urls] == [[0.0] * 3, [1.0] * 3]


def test_a_copy_that_went_to_a_child_process_says_nothing_of_the_saves_end():
    writer = dos.ObjectStoreWriter(memory_url(), on_busy="raise")
    sent, go_on = threading.Event(), threading.Event()

    def send(staged: list[StagedState]) -> None:
        ForkingPickler.dumps((writer, staged.pop()))
        sent.set()
        assert go_on.wait(30)  # for the child's answer

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        first = pool.submit(send, [writer.stage({"t": torch.ones(3)})])
        try:
            assert sent.wait(30)
            with impatient(), pytest.raises(dos.errors.SaveInProgressError):
                writer.stage({"t": torch.ones(3)})
        finally:
            go_on.set()
    first.result()
    writer.stage({"t": torch.ones(3)})


@pytest.mark.parametrize("status", [0, 2])
def test_memory_is_pinned_until_it_is_freed_or_it_is_told_that_cuda_does_not(
    status, monkeypatch, caplog
):
    asked: list[Any] = []
    freed: list[int] = []
    runtime = SimpleNamespace(
        cudaHostRegister=lambda *args: asked.append(args) or status, cudaHostUnregister=freed.append
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(device, "_has_warned", threading.Event())
    memory = torch.empty(3 << 20, dtype=torch.uint8)
    address = memory.data_ptr()
    pinned._pin(memory)
    assert asked == [(address, 3 << 20, 1)]
    assert freed == []
    del memory
    assert freed == ([] if status else [address])
    why = "cannot allocate 3 MiB of pinned memory (cudaHostRegister returned 2)"
    assert (why in caplog.text) == bool(status)


def background_save_of_fsdp1(rank: int, _world: int, url: str) -> bool:
    """Save in the background, train on meanwhile, and load into another model."""

    def trained(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = FullyShardedDataParallel(
            nn.Sequential(nn.Linear(8, 9), nn.Linear(9, 4)),
            device_id=torch.device("cpu"),
            use_orig_params=True,
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        train(model, optimizer)
        return model, optimizer

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def whole(model: nn.Module) -> list[torch.Tensor]:
        with FullyShardedDataParallel.summon_full_params(model):
            return [parameter.detach().clone() for parameter in model.parameters()]

    model, optimizer = trained(0)
    before = whole(model)
    handle = dos.async_save({"model": model, "optimizer": optimizer}, url)
    train(model, optimizer)
    handle.result()
    other, its_optimizer = trained(1)
    dos.load({"model": other, "optimizer": its_optimizer}, url)
    return all(map(torch.equal, whole(other), before)) and not all(
        map(torch.equal, whole(model), before)
    )


def test_fsdp1_without_a_mesh_is_saved_in_the_background_as_it_was(tmp_path):
    """Its tensors are ShardedTensors, which torch's own stager refuses."""
    assert run_ranks(2, background_save_of_fsdp1, tmp_path.as_uri()) == [True, True]
