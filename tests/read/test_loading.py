"""What one load does with destinations, items that only torch can take apart, and threads."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import io
import threading
import tracemalloc
import warnings
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

import dcp_objstore as dos
from dcp_objstore.errors import (
    CheckpointCorruptError,
    DcpObjstoreError,
    StateMismatchError,
    TransferStalledError,
    UnsupportedError,
)
from dcp_objstore.read import item_read as gather, reader as reading, session, stored_checkpoint
from dcp_objstore.read.item_read import CompletionQueue, ItemRead
from dcp_objstore.read.items import ItemLocation, StockItems
from dcp_objstore.read.plan import PlannedLoad
from dcp_objstore.read.stored_checkpoint import StoredCheckpoint, open_rooted
from dcp_objstore.read.tensor_read import plan_spans
from dcp_objstore.stores import StoreSpec
from dcp_objstore.stores.protocol import RangeReading
from dcp_objstore.transfer.progress import Progress
from tests.support.checkpoints import cause, memory_url
from tests.support.meeting_number import MeetingNumber
from tests.support.states import same_bits, seeded
from tests.support.wrapped_stores import Request, WatchedStore

MIB = 1024 * 1024
# As small as they may be: one request of 4 MiB at a time.
SMALL = dos.TransferConfig(request_size_bytes=4 * MIB, memory_budget_bytes=8 * MIB)


def stock_checkpoint(place: Path, state: dict[str, Any]) -> str:
    """The URL of a checkpoint that stock torch wrote."""
    dcp.save(state, storage_writer=FileSystemWriter(place), no_dist=True)
    return f"file://{place}"


def load(state: dict[str, Any], url: str, **settings: Any) -> None:
    planner = settings.pop("planner", None)
    reader = dos.ObjectStoreReader(url, **settings)
    dcp.load(state, storage_reader=reader, planner=planner, no_dist=True)


class CountingStore(WatchedStore):
    """Counts the bytes of the ranges that were fetched, and calls `on_bytes` with their sum."""

    def __init__(self, inner: Any, on_bytes: Callable[[int], None]) -> None:
        super().__init__(inner)
        self.fetched_bytes = 0
        self._on_bytes = on_bytes
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def _around(self, request: Request) -> Iterator[None]:
        yield
        if request.verb == "open_range":
            with self._lock:
                self.fetched_bytes += request.bytes
                self._on_bytes(self.fetched_bytes)


class ValuePlanner(DefaultLoadPlanner):
    """Calls `hook` before it takes each value."""

    def __init__(self, hook: Callable[[int], None]) -> None:
        super().__init__()
        self._hook = hook

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self._hook(value.getbuffer().nbytes)
        super().load_bytes(read_item, value)


# --- destinations ---


def views() -> dict[str, torch.Tensor]:
    """Destinations that say their elements in another way than their memory does."""
    state = {
        "conj": torch.zeros(6, 5, dtype=torch.complex64).conj(),
        "conj-strided": torch.zeros(5, 6, dtype=torch.complex64).t().conj(),
        "neg": torch._neg_view(torch.zeros(6, 5)),
        "neg-strided": torch.zeros(5, 6, dtype=torch.complex64).t().conj().imag,
    }
    assert all(value.is_conj() or value.is_neg() for value in state.values())
    return state


@pytest.mark.parametrize("origin", ["ours", "stock"])
def test_conjugated_and_negated_destinations_hold_what_was_saved(tmp_path, origin):
    state = views()
    saved = {key: seeded(key, value.shape, value.dtype) for key, value in state.items()}
    if origin == "ours":
        url = memory_url()
        dcp.save(dict(saved), storage_writer=dos.ObjectStoreWriter(url), no_dist=True)
    else:
        url = stock_checkpoint(tmp_path / "step-1", dict(saved))
    load(dict(state), url)
    for key, value in state.items():
        assert torch.equal(value.nan_to_num(), saved[key].nan_to_num()), key


@pytest.mark.parametrize("origin", ["ours", "stock"])
def test_loading_leaves_a_tensors_storage_as_resizable_as_it_was(tmp_path, origin):
    """FSDP frees and allocates its parameters by resizing their storage."""
    saved = seeded("t", (1000,))
    url = memory_url()
    if origin == "ours":
        dcp.save({"t": saved}, storage_writer=dos.ObjectStoreWriter(url), no_dist=True)
    else:
        url = stock_checkpoint(tmp_path / "step-1", {"t": saved})
    tensor = torch.zeros(1000)
    load({"t": tensor}, url)
    assert same_bits(tensor.clone(), saved)  # a storage whose memory NumPy has cannot be resized
    tensor.untyped_storage().resize_(0)
    tensor.untyped_storage().resize_(4000)


@pytest.mark.parametrize("origin", ["ours", "stock"])
def test_autograd_is_told_that_a_destination_was_written(tmp_path, origin):
    url = memory_url()
    if origin == "ours":
        dcp.save({"t": torch.ones(9)}, storage_writer=dos.ObjectStoreWriter(url), no_dist=True)
    else:
        url = stock_checkpoint(tmp_path / "step-1", {"t": torch.ones(9)})
    leaf = torch.zeros(9, requires_grad=True)
    before = leaf._version
    load({"t": leaf}, url)
    assert leaf._version > before
    assert leaf.detach().eq(1).all()


def matrix() -> torch.Tensor:
    return torch.zeros(6, 8)


# Tensors that share the memory of one.
SHARED: dict[str, Callable[[torch.Tensor], list[torch.Tensor]]] = {
    "the same": lambda w: [w, w],
    "a parameter": lambda w: [torch.nn.Parameter(w), w],
    "transposed": lambda w: [w, w.t()],
    "another dtype": lambda w: [w.view(torch.int32), w],
    "a part first": lambda w: [w[1:3], w],
    "a part last": lambda w: [w, torch.nn.Parameter(w[1:3])],
    "a column last": lambda w: [w, w[:, 5]],
    "two parts": lambda w: [w[:4], w[2:]],
    "other columns": lambda w: [w[:, :5], w[:, 5:]],
    "some columns in common": lambda w: [w[:, :5], w[:, 3:]],
    "three": lambda w: [w[:4], w[2:], w[3:, 1]],
    "none of an empty one": lambda w: [w, w[:0], w[:2]],
}


@pytest.mark.parametrize("shared", SHARED)
@pytest.mark.parametrize("writer", ["ours", "stock"])
def test_where_keys_share_memory_the_last_one_fills_it_as_with_torch(tmp_path, shared, writer):
    # What is asked for last lies first in the object.
    saved = {
        f"{key}": torch.full(value.shape, key + 1, dtype=value.dtype)
        for key, value in reversed(list(enumerate(SHARED[shared](matrix()))))
    }
    url = tmp_path.as_uri()
    if writer == "ours":
        dcp.save(saved, storage_writer=dos.ObjectStoreWriter(url), no_dist=True)
    else:
        stock_checkpoint(tmp_path, saved)
    memory, expected = matrix(), matrix()
    state = {f"{key}": value for key, value in enumerate(SHARED[shared](expected))}
    dcp.load(state, storage_reader=FileSystemReader(tmp_path), no_dist=True)
    state = {f"{key}": value for key, value in enumerate(SHARED[shared](memory))}
    dos.load(state, url, progress=False)
    assert torch.equal(memory, expected)


def test_tied_tensors_of_many_blocks_are_filled_by_the_last_key():
    size = 5 * MIB
    url, tied = memory_url(), torch.zeros(size)
    dos.save({"head": torch.full((size,), 2.0), "embed": torch.ones(size)}, url, progress=False)
    dos.load({"embed": tied, "head": tied}, url, progress=False)
    assert tied.unique().tolist() == [2.0]


def test_one_warning_names_the_first_tensor_whose_values_may_not_fit():
    url = memory_url()
    dos.save({"a": torch.ones(3), "b": torch.ones(3)}, url)
    with pytest.warns(UserWarning, match="a: saved as float32, converted to float16") as told:
        dos.load({"a": torch.zeros(3).half(), "b": torch.zeros(3).half()}, url)
    assert len([one for one in told if "converted" in str(one.message)]) == 1
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="loading .* converted")
        dos.load({"a": torch.zeros(3).double(), "b": torch.zeros(3)}, url)


def sparse(layout: str) -> torch.Tensor:
    eye = torch.eye(4)
    return {
        "coo": eye.to_sparse,
        "csr": eye.to_sparse_csr,
        "bsr": lambda: eye.to_sparse_bsr((2, 2)),
    }[layout]()


@pytest.mark.filterwarnings("ignore:Sparse .* is in beta state")
@pytest.mark.parametrize("layout", ["coo", "csr", "bsr"])
def test_sparse_tensors_are_refused_by_name_before_anything_is_sent(tmp_path, layout):
    url = f"file://{tmp_path}/step-1"
    state = {"a": torch.zeros(3), "deep": {"s": sparse(layout)}}
    with pytest.raises(CheckpointException) as caught:
        dcp.save(state, storage_writer=dos.ObjectStoreWriter(url), no_dist=True)
    error = cause(caught.value)
    assert not list(tmp_path.rglob("*.distcp"))
    if "do not have strides" in str(error):  # torch 2.15's planner refuses what has none
        return
    assert isinstance(error, UnsupportedError)
    assert (error.key, error.rank, error.url) == ("deep.s", 0, url)
    assert f"sparse_{layout}" in str(error)


@pytest.mark.filterwarnings("ignore:Sparse .* is in beta state")
@pytest.mark.parametrize("layout", ["coo", "csr", "bsr"])
def test_sparse_destinations_are_refused_by_name(layout):
    url = memory_url()
    dcp.save({"s": torch.eye(4)}, storage_writer=dos.ObjectStoreWriter(url), no_dist=True)
    with pytest.raises(CheckpointException) as caught:
        load({"s": sparse(layout)}, url)
    error = cause(caught.value)
    assert isinstance(error, UnsupportedError)
    assert error.key == "s"


def test_destinations_whose_elements_share_memory_are_refused_by_name():
    url = memory_url()
    saved = {"one": torch.ones(1), "two": torch.ones(2)}
    dcp.save(saved, storage_writer=dos.ObjectStoreWriter(url), no_dist=True)
    scalar = torch.zeros(())
    load({"one": scalar.expand(1)}, url)  # with a stride of 0, too: it has nothing to share
    assert scalar == 1
    with pytest.raises(CheckpointException) as caught:
        load({"two": scalar.expand(2)}, url)
    error = cause(caught.value)
    assert isinstance(error, UnsupportedError)
    assert error.key == "two"


def per_tensor(scale: float = 0.1, dtype: torch.dtype = torch.qint8) -> torch.Tensor:
    return torch.quantize_per_tensor(torch.linspace(-1, 1, 6).view(3, 2), scale, 3, dtype)


def per_channel(scale: float = 0.1) -> torch.Tensor:
    scales, zeros = torch.full((3,), scale), torch.zeros(3, dtype=torch.int64)
    return torch.quantize_per_channel(torch.ones(3, 2), scales, zeros, 0, torch.qint8)


QUANTIZED: dict[str, tuple[Callable[[], torch.Tensor], list[Callable[[], torch.Tensor]]]] = {
    "per tensor": (
        per_tensor,
        [lambda: per_tensor(0.5), lambda: per_tensor(dtype=torch.quint8), per_channel],
    ),
    "per channel": (per_channel, [lambda: per_channel(0.5), per_tensor, lambda: torch.ones(3, 2)]),
    "plain integers": (lambda: torch.ones(3, 2, dtype=torch.int8), [per_tensor]),
}


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, that these will go
@pytest.mark.parametrize("kind", QUANTIZED)
@pytest.mark.parametrize("by", ["us", "stock torch"])
def test_a_quantized_tensor_loads_only_into_one_that_is_quantized_alike(tmp_path, kind, by):
    make, others = QUANTIZED[kind]
    saved = make()
    url = stock_checkpoint(tmp_path, {"q": saved}) if by == "stock torch" else memory_url()
    if by == "us":
        dos.save({"q": saved}, url, progress=False)
    buffer = io.BytesIO()
    torch.save(saved, buffer)
    buffer.seek(0)
    alike = torch.load(buffer)
    alike.untyped_storage().fill_(0)
    dos.load({"q": alike}, url, progress=False)
    assert torch.equal(alike, saved)
    for other in others:
        with pytest.raises(StateMismatchError, match="saved as") as caught:
            dos.load({"q": other()}, url, progress=False)
        assert caught.value.key == "q"


# --- items that only torch can take apart ---


def gathered(payload_bytes: int, arrived: Callable[[ItemRead], None]) -> ItemRead:
    """A value's read."""
    place = MetadataIndex("value")
    empty = torch.Size([0])
    item = ReadItem(LoadItemType.BYTE_IO, place, empty, place, empty, empty)
    read = ItemRead(item, ItemLocation(0, 0, payload_bytes, None, None, None))
    read.bind(lambda body: None, arrived)
    return read


def test_tensors_that_are_cut_alike_are_whole_only_with_the_same_shape(monkeypatch):
    def of_size(size: int) -> TensorStorageMetadata:
        chunk = ChunkStorageMetadata(torch.Size([0]), torch.Size([4]))
        properties = TensorProperties(torch.float32)
        return TensorStorageMetadata(properties, torch.Size([size]), [chunk])

    metadata = Metadata({"whole": of_size(4), "alike": of_size(4), "half": of_size(8)})
    checkpoint = StoredCheckpoint((), StockItems(metadata, {}))
    with monkeypatch.context() as patch:
        looks = Mock(return_value=True)
        patch.setattr(stored_checkpoint, "check_filled", looks)
        checkpoint.check_whole(["whole", "alike", "whole"])
        assert looks.call_count == 1, "as a model has thousands of them"
    checkpoint.check_whole(["whole"])
    with pytest.raises(CheckpointCorruptError, match="do not make up") as caught:
        checkpoint.check_whole(["whole", "half"])
    assert caught.value.key == "half"


def test_a_chunk_without_a_place_is_an_error_that_says_which():
    chunk = ChunkStorageMetadata(torch.Size([4]), torch.Size([4]))
    saved = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size([8]), [chunk])
    checkpoint = StoredCheckpoint((), StockItems(Metadata({"t": saved, "v": saved}), {}))
    for key, offset, text in (("t", torch.Size([4]), "offset (4,)"), ("v", None, "offset None")):
        with pytest.raises(CheckpointCorruptError) as caught:
            checkpoint.item(key, offset)
        assert caught.value.key == key
        assert text in caught.value.message


def test_a_value_is_held_once_however_it_arrives():
    size = 8 * MIB
    blocks = [np.full(size // 4, n, dtype=np.uint8) for n in range(4)]
    arrived: list[ItemRead] = []
    tracemalloc.start()
    try:
        read = gathered(size, arrived.append)
        for n in (2, 0, 3, 1):
            assert arrived == []
            read.accept(n * size // 4, blocks[n])
        (whole,) = arrived
        body = whole.take()
        value = body.getvalue()
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 1.1 * size
    assert value == b"".join(block.tobytes() for block in blocks)
    assert body.read(1) == b"\0", "it stands at its beginning"


def test_a_value_is_whole_whose_first_blocks_arrive_at_once(monkeypatch):
    meeting = threading.Barrier(2)

    def make_memory(content: bytes) -> io.BytesIO:
        with contextlib.suppress(threading.BrokenBarrierError):
            meeting.wait(0.2)  # for another thread that makes some, too
        return io.BytesIO(content)

    monkeypatch.setattr(gather, "io", SimpleNamespace(BytesIO=make_memory))
    arrived: list[ItemRead] = []
    read = gathered(8, arrived.append)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(read.accept, (0, 4), (b"aaaa", b"bbbb")))
    assert [one.take().getvalue() for one in arrived] == [b"aaaabbbb"]


def test_a_value_is_complete_whose_last_blocks_arrive_at_once():
    arrived: list[ItemRead] = []
    read = gathered(8, arrived.append)
    read._missing_bytes = MeetingNumber(8)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(read.accept, (0, 4), (b"aaaa", b"bbbb")))
    assert [one.take().getvalue() for one in arrived] == [b"aaaabbbb"]


def test_values_that_are_complete_at_once_all_count_in_the_queue():
    queue = CompletionQueue(15)
    reads = [gathered(8, queue.add) for _ in range(3)]
    queue._waiting_bytes = MeetingNumber(0)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda read: read.accept(0, bytes(8)), reads[:2]))
    assert queue.is_full
    queue._waiting_bytes = MeetingNumber(16)
    with ThreadPoolExecutor(2) as pool:  # one is complete as others are taken
        pool.submit(queue.drain, lambda _: None)
        pool.submit(reads[2].accept, 0, bytes(8))
    queue.drain(lambda _: None)
    assert queue._waiting_bytes == 0


def test_a_queue_of_values_is_full_above_its_limit():
    queue = CompletionQueue(16)
    reads = [gathered(size, queue.add) for size in (8, 8, 1)]
    full = []
    for read in reads:
        read.accept(0, bytes(read.location.payload_length))
        full.append(queue.is_full)
    assert full == [False, False, True]
    taken: list[ItemRead] = []
    queue.drain(taken.append)
    assert taken == reads
    assert not queue.is_full


def test_a_queue_that_was_given_up_goes_without_the_garbage_collector():
    """Its values lead to what takes them: a planner, and its state."""
    queue = CompletionQueue(16)
    read = gathered(8, queue.add)
    read.accept(0, bytes(8))
    gone = weakref.ref(queue)
    gc.collect()
    gc.disable()
    try:
        del queue, read
        assert gone() is None
    finally:
        gc.enable()


def test_an_item_without_bytes_is_complete_at_once():
    arrived: list[ItemRead] = []
    gathered(0, arrived.append)
    assert [read.take().getvalue() for read in arrived] == [b""]


def test_stock_tensors_are_placed_as_they_arrive_and_do_not_pile_up(tmp_path, monkeypatch):
    """The calling thread is kept busy with a value until all tensors are in place."""
    tensors = {f"t{n:02}": seeded(f"t{n}", (MIB // 4,)) for n in range(40)}
    url = stock_checkpoint(tmp_path / "step-1", {"step": 3, **tensors})
    placed = threading.Semaphore(0)
    reads: list[ItemRead] = []
    held: list[int] = []
    copy, add, take_in = gather.copy_elements, ItemRead.__init__, ItemRead.accept

    def count_placed(*tensors: torch.Tensor) -> None:
        copy(*tensors)
        placed.release()

    def count_read(self: ItemRead, *args: Any, **settings: Any) -> None:
        add(self, *args, **settings)
        reads.append(self)

    def count_held(self: ItemRead, *args: Any) -> None:
        take_in(self, *args)
        held.append(sum(read.held_bytes() for read in reads))

    monkeypatch.setattr(gather, "copy_elements", count_placed)
    monkeypatch.setattr(ItemRead, "__init__", count_read)
    monkeypatch.setattr(ItemRead, "accept", count_held)
    waited = []

    def wait_for_tensors(_: int) -> None:
        waited.append(all(placed.acquire(timeout=10) for _ in tensors))

    state = {"step": 0, **{key: torch.zeros(MIB // 4) for key in tensors}}
    config = dos.TransferConfig(request_size_bytes=4 * MIB, download_concurrency=3)
    load(state, url, config=config, planner=ValuePlanner(wait_for_tensors))
    assert waited == [True]
    assert all(same_bits(state[key], tensors[key]) for key in tensors)
    # Besides the little value: one that is being put in place, and one half arrived, per worker.
    assert max(held) < 2 * 3 * 1.1 * MIB


def test_values_that_the_planner_has_not_taken_are_bounded(monkeypatch):
    """The planner takes its time with the first: until all is fetched, or fetching has paused."""
    url = memory_url()
    values = {f"v{n:02}": f"{n:02}" * (MIB // 2) for n in range(48)}
    dcp.save(dict(values), storage_writer=dos.ObjectStoreWriter(url), no_dist=True)
    total_bytes = 48 * MIB
    paused = threading.Event()

    def on_bytes(fetched_bytes: int) -> None:
        if fetched_bytes >= total_bytes:
            paused.set()

    stores: list[CountingStore] = []
    real_open, real_wait = StoreSpec.open, CompletionQueue.wait_for_room

    def counted(spec: StoreSpec) -> CountingStore:
        stores.append(CountingStore(real_open(spec), on_bytes))
        return stores[-1]

    class Watched(Progress):
        """Sees that a worker waits: it asks whether to stop before it does."""

        def check_stopped(self) -> None:
            paused.set()

    def wait_for_room(self: CompletionQueue, _: Progress) -> None:
        real_wait(self, Watched(60))

    monkeypatch.setattr(StoreSpec, "open", counted)
    monkeypatch.setattr(CompletionQueue, "wait_for_room", wait_for_room)
    taken_bytes = 0
    held: list[int] = []

    def hook(size_bytes: int) -> None:
        nonlocal taken_bytes
        assert paused.wait(timeout=10)
        held.append(sum(store.fetched_bytes for store in stores) - taken_bytes)
        taken_bytes += size_bytes

    state = dict.fromkeys(values, "")
    load(state, url, config=SMALL, planner=ValuePlanner(hook))
    assert state == values
    # What may wait, the request that went over that, and the one that waits for room.
    assert max(held) <= SMALL.memory_budget_bytes + 2 * (SMALL.request_size_bytes + MIB)


class JumpingClock:
    """A clock that `jump` puts forward. Workers then wait until the load has read it twice.

    So no byte arrives between the jump and the moment at which the load looks for a stall.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.reads_to_wait_for = 0
        self.read = threading.Event()
        self.read.set()
        self._thread = threading.get_ident()

    def jump(self, seconds: float) -> None:
        self.now += seconds
        self.reads_to_wait_for = 2
        self.read.clear()

    def __call__(self) -> float:
        if threading.get_ident() != self._thread:
            self.read.wait(timeout=60)
        elif self.reads_to_wait_for:
            self.reads_to_wait_for -= 1
            if not self.reads_to_wait_for:
                self.read.set()
        return self.now


def test_a_load_whose_values_take_longer_than_the_stall_time_out_goes_on(monkeypatch):
    """Meanwhile nothing can be fetched, because what has arrived waits for its place."""
    url, clock = memory_url(), JumpingClock()
    values = {f"v{n}": f"{n}" * (4 * MIB) for n in range(8)}
    dcp.save(dict(values), storage_writer=dos.ObjectStoreWriter(url), no_dist=True)
    monkeypatch.setattr(session, "Progress", functools.partial(Progress, clock=clock))
    jumps: list[int] = []

    def take_long(size_bytes: int) -> None:
        if not jumps:
            clock.jump(10 * SMALL.stall_timeout_seconds)
            jumps.append(size_bytes)

    state = dict.fromkeys(values, "")
    try:
        load(state, url, config=SMALL, planner=ValuePlanner(take_long))
    finally:
        clock.read.set()
    assert jumps
    assert state == values


def test_a_value_larger_than_the_memory_budget_loads_beside_others():
    """Its last block arrives in one request with the first blocks of the next value."""
    url = memory_url()
    sizes = {"a": 11 * MIB, "b": 6 * MIB, "c": 9 * MIB, "d": 5 * MIB}
    values = {
        key: (torch.full((size,), len(key), dtype=torch.uint8),) for key, size in sizes.items()
    }
    dos.save(values, url, progress=False)
    config = dos.TransferConfig(memory_budget_bytes=8 * MIB, stall_timeout_seconds=90)
    state: dict[str, Any] = dict.fromkeys(values)
    dos.load(state, url, config=config, progress=False)
    assert all(torch.equal(state[key][0], value) for key, (value,) in values.items())


def test_a_worker_that_waits_for_room_ends_with_the_transfer():
    completed = CompletionQueue(limit_bytes=10)
    read = gathered(11, completed.add)
    read.accept(0, bytes(11))
    progress = Progress(60)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(completed.wait_for_room, progress)
        progress.stop(TransferStalledError("stopped"))
        with pytest.raises(TransferStalledError):
            waiting.result(timeout=10)
        finished: list[ItemRead] = []
        completed.drain(finished.append)
        assert finished == [read]
        pool.submit(completed.wait_for_room, Progress(60)).result(timeout=10)


def test_a_stock_tensor_that_cannot_be_read_is_named_and_not_fetched_again(tmp_path, monkeypatch):
    state = {"fine": seeded("fine", (50,)), "hurt": seeded("hurt", (70,))}
    url = stock_checkpoint(tmp_path / "step-1", dict(state))
    (data,) = (tmp_path / "step-1").glob("*.distcp")
    body = data.read_bytes()
    at = body.index(state["hurt"].numpy().tobytes())
    start = body.rindex(b"data.pkl", 0, at)  # the pickle of this item's archive
    data.write_bytes(body[: start + 8] + bytes(100) + body[start + 108 :])
    stores: list[CountingStore] = []
    real_open = StoreSpec.open

    def counted(spec: StoreSpec) -> CountingStore:
        stores.append(CountingStore(real_open(spec), lambda _: None))
        return stores[-1]

    monkeypatch.setattr(StoreSpec, "open", counted)
    with pytest.raises(CheckpointException) as caught:
        load({key: torch.zeros_like(value) for key, value in state.items()}, url)
    error = cause(caught.value)
    assert isinstance(error, CheckpointCorruptError)
    assert error.key == "hurt"
    assert sum(store.fetched_bytes for store in stores) <= len(body)


# --- one reader, several threads ---


class MeetingPlanner(DefaultLoadPlanner):
    """Waits, between the opening of the checkpoint and the rest, until the other has come here."""

    def __init__(self, meeting: threading.Barrier) -> None:
        super().__init__()
        self._meeting = meeting

    def set_up_planner(self, *args: Any, **settings: Any) -> None:
        super().set_up_planner(*args, **settings)
        self._meeting.wait(timeout=20)


def test_threads_that_share_a_reader_each_load_what_they_asked_for():
    root = memory_url()
    for n in range(2):
        writer = dos.ObjectStoreWriter(f"{root}/step-{n}")
        dcp.save({"t": torch.full((100,), float(n))}, storage_writer=writer, no_dist=True)
    reader = dos.ObjectStoreReader()
    meeting = threading.Barrier(2)

    def load_step(n: int) -> torch.Tensor:
        tensor = torch.full((100,), -1.0)
        dcp.load(
            {"t": tensor},
            storage_reader=reader,
            checkpoint_id=f"{root}/step-{n}",
            planner=MeetingPlanner(meeting),
            no_dist=True,
        )
        return tensor

    with ThreadPoolExecutor(2) as pool:
        for n, tensor in enumerate(pool.map(load_step, range(2))):
            assert tensor.eq(n).all(), f"the load of step {n} got another step's"


def test_a_block_of_two_reads_is_fetched_once_and_an_absent_item_is_not_found(tmp_path):
    dos.save({"t": torch.ones(3)}, tmp_path.as_uri())
    opened = open_rooted(StoreSpec(tmp_path.as_uri()).open())
    location = opened.items.find("t", (0,), None)
    assert location is not None
    for key, offset in (("t", (1,)), ("t", None), ("u", (0,)), ("u", None)):
        assert opened.items.find(key, offset, None) is None
    item = SimpleNamespace(dest_index=SimpleNamespace(fqn="t"))
    reads: Any = [SimpleNamespace(location=location, selection=None, item=item) for _ in range(2)]
    (span,) = plan_spans(reads, verify=True, whole_blocks=False)
    assert span.tag.reads == reads


class Shared:
    """An exchange in which no rank takes part, but which has taken some memory."""

    memory_bytes, received_bytes, requests = 3 * MIB, 0, ()

    def __init__(self, planned: PlannedLoad) -> None:
        self.alone = lambda: planned.spans

    def admit(self, *_: object) -> None:
        """None: the worker has memory."""

    keep = advance = admit

    def may_begin(self, _: object) -> bool:
        """Whether it has."""
        return True


def test_what_ranks_hold_in_common_is_part_of_the_memory_budget(monkeypatch):
    fetch, run, planned = session.fetch_ranges, session.run_load, []

    def watch(store: Any, keys: Any, requests: Any, *args: Any, **settings: Any) -> Any:
        planned.append((settings["budget_bytes"], len(requests)))
        return fetch(store, keys, requests, *args, **settings)

    def share(store: Any, planned: PlannedLoad, *args: Any, **settings: Any) -> Any:
        return run(store, planned, *args, **{**settings, "exchange": Shared(planned)})

    monkeypatch.setattr(session, "fetch_ranges", watch)
    url = memory_url()
    dos.save({"t": torch.ones(9 * MIB // 4)}, url)
    for load in (run, share):
        monkeypatch.setattr(reading, "run_load", load)
        state = {"t": torch.zeros(9 * MIB // 4)}
        dos.load(state, url, config=SMALL)
        assert state["t"].eq(1).all()
    assert planned == [(8 * MIB, 3), (5 * MIB, 3)]


def test_a_load_into_host_memory_asks_for_ranges_ahead(monkeypatch):
    """Alone, and with other ranks what need not wait for a slot."""
    fetch, run, given = session.fetch_ranges, session.run_load, []

    def watch(*args: Any, **settings: Any) -> Any:
        given.append((settings["admit"] is not None, settings["may_begin"] is not None))
        return fetch(*args, **settings)

    def share(store: Any, planned: PlannedLoad, *args: Any, **settings: Any) -> Any:
        return run(store, planned, *args, **{**settings, "exchange": Shared(planned)})

    monkeypatch.setattr(session, "fetch_ranges", watch)
    url = memory_url()
    dos.save({"t": torch.ones(3)}, url)
    for load in (run, share):
        monkeypatch.setattr(reading, "run_load", load)
        dos.load({"t": torch.zeros(3)}, url)
    assert given == [(False, False), (True, True)]


def test_streams_are_settled_if_any_destination_is_on_a_device(monkeypatch):
    """And requests do not grow: their bodies take slots of the ring."""
    settled: list[bool] = []
    monkeypatch.setattr(session, "wait_for_streams", lambda: settled.append(True))
    monkeypatch.setattr(session, "lanes_into", lambda _: {})
    monkeypatch.setattr(session, "grown_request_size", lambda *_, **__: 9 * MIB)
    host, device = torch.device("cpu"), torch.device("meta")
    store: Any = SimpleNamespace(range_reading=RangeReading(ahead=True))
    fixed = dataclasses.replace(SMALL, download_concurrency=4)
    for devices, often, size_bytes in (
        ({host}, 0, 9 * MIB),
        ({device}, 1, 4 * MIB),
        ({host, device}, 2, 4 * MIB),
    ):
        assert session._open_inbound([], devices, [], config=SMALL, budget_bytes=7) == (None, 7)
        assert len(settled) == often
        assert session._request_size(store, [], devices, fixed) == size_bytes
    store.range_reading = RangeReading()
    assert session._request_size(store, [], {host}, fixed) == 4 * MIB


def test_a_rank_without_a_group_to_share_in_loads_by_itself(monkeypatch):
    url = memory_url()
    dos.save({"t": torch.ones(3)}, url)
    reader = dos.ObjectStoreReader(url, process_group=object())  # type: ignore[arg-type]

    def refuse(*_: object) -> None:
        raise UnsupportedError("no gloo here")

    monkeypatch.setattr(reading, "current_rank", lambda: 0)
    monkeypatch.setattr(reader, "_group", refuse)
    assert reader.read_metadata().state_dict_metadata.keys() == {"t"}


def test_nothing_more_is_asked_for_when_a_planner_has_failed(monkeypatch):
    """Its error may be kept, with all that it refers to, for as long as the program runs."""
    url = memory_url()
    values = {f"value{n}": "x" * 5 * MIB for n in range(6)}
    dos.save(values, url)
    stopped: list[BaseException] = []
    stop = Progress.stop

    def note(progress: Progress, error: BaseException) -> None:
        stopped.append(error)
        stop(progress, error)

    monkeypatch.setattr(Progress, "stop", note)
    failure = ZeroDivisionError("the planner's")

    def fail(_: int) -> None:
        raise failure

    reader = dos.ObjectStoreReader(url, config=SMALL)
    with pytest.raises(CheckpointException):
        dcp.load(
            dict.fromkeys(values, ""),
            storage_reader=reader,
            planner=ValuePlanner(fail),
            no_dist=True,
        )
    assert len(stopped) == 1


def test_a_failed_load_leaves_the_reader_fit_for_the_next():
    url = memory_url()
    reader = dos.ObjectStoreReader(url)
    with pytest.raises(CheckpointException) as caught:
        dcp.load({"t": torch.zeros(3)}, storage_reader=reader, no_dist=True)
    assert isinstance(cause(caught.value), DcpObjstoreError)
    assert reader.last_load is None
    dcp.save({"t": torch.ones(3)}, storage_writer=dos.ObjectStoreWriter(url), no_dist=True)
    tensor = torch.zeros(3)
    dcp.load({"t": tensor}, storage_reader=reader, no_dist=True)
    assert tensor.eq(1).all()
    assert reader.last_load is not None


def test_writer_and_reader_have_the_ids_that_are_stored_and_planned_with(tmp_path):
    """As torch's own have them."""
    url, planner = memory_url(), DefaultLoadPlanner()
    writer, reader = dos.ObjectStoreWriter(url), dos.ObjectStoreReader(url)
    assert (writer.save_id, reader.load_id) == (None, None)
    dcp.save({"t": torch.ones(3)}, storage_writer=writer, no_dist=True)
    seen = []
    for place in (url, url, stock_checkpoint(tmp_path, {"t": torch.ones(3)})):
        state = {"t": torch.zeros(3)}
        reader = dos.ObjectStoreReader(place)
        dcp.load(state, storage_reader=reader, planner=planner, no_dist=True)
        assert planner.metadata is not None and planner.metadata.storage_meta is not None
        meta = planner.metadata.storage_meta
        assert reader.load_id == meta.load_id is not None
        seen.append((meta.load_id, meta.save_id))
    assert len({load_id for load_id, _ in seen}) == 3
    assert seen[0][1] == seen[1][1] == writer.save_id is not None


@pytest.mark.parametrize("kind", [dos.ObjectStoreWriter, dos.ObjectStoreReader])
def test_dcp_is_told_which_checkpoint_ids_are_urls(kind):
    """It chooses what stores a checkpoint by that."""
    assert kind.validate_checkpoint_id("s3://bucket/step-1") is True
    for other in ("/scratch/step-1", Path("s3:/bucket/step-1"), None):
        assert kind.validate_checkpoint_id(other) is False


def test_a_checkpoint_id_that_contradicts_the_url_is_refused_until_that_url_was_used():
    url, other = memory_url(), memory_url()
    writer, reader = dos.ObjectStoreWriter(url), dos.ObjectStoreReader(f"{url}/")
    for plugin, call in ((writer, dcp.save), (reader, dcp.load)):
        name = "storage_writer" if plugin is writer else "storage_reader"
        state, use = {"t": torch.ones(3)}, {name: plugin, "no_dist": True}
        with pytest.raises(dos.errors.ConfigError, match="leave one of them out") as caught:
            call(state, checkpoint_id=other, **use)  # type: ignore[operator]
        assert url in str(caught.value)
        assert other in str(caught.value)
        # Nothing has happened, and with the URL that it has it works; later ones re-target it.
        for place in (url, other):
            call(state, checkpoint_id=place, **use)  # type: ignore[operator]
    assert set(dos.open(other).keys()) == set(dos.open(url).keys()) == {"t"}


@pytest.mark.parametrize("scheme", ["memory", "file"])
def test_an_object_at_the_very_key_of_the_url_is_said_to_be_no_checkpoint(scheme, tmp_path):
    run = memory_url() if scheme == "memory" else f"file://{tmp_path}"
    body = io.BytesIO()
    torch.save({"t": torch.ones(3)}, body)
    StoreSpec(run).open().put("model.pt", body.getvalue())
    for read in (dos.open, lambda url: dos.load({"t": torch.zeros(3)}, url)):
        with pytest.raises(dos.errors.CheckpointNotFoundError, match=r"torch\.load") as caught:
            read(f"{run}/model.pt")
        assert f"{body.tell()} bytes" in str(caught.value)
        with pytest.raises(dos.errors.CheckpointNotFoundError, match="nothing here"):
            read(f"{run}/model")


def test_a_report_that_is_taken_for_the_state_says_where_the_state_is():
    url = memory_url()
    dos.save({"t": torch.ones(3)}, url)
    report = dos.load({"t": torch.zeros(3)}, url)
    with pytest.raises(TypeError, match=r"state\['t'\] after dcp_objstore\.load"):
        report["t"]
    with pytest.raises(TypeError):
        dict(report)  # type: ignore[call-overload]
