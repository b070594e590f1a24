"""What one load does with destinations, items that only torch can take apart, and threads."""

from __future__ import annotations

import contextlib
import io
import pickle
import threading
import time
import tracemalloc
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
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
from dcp_objstore.errors import CheckpointCorruptError, StateMismatchError, TransferStalledError
from dcp_objstore.read import item_read as gather, reader as reading, session, stored_checkpoint
from dcp_objstore.read.item_read import CompletionQueue, ItemRead
from dcp_objstore.read.items import ItemLocation, StockItems
from dcp_objstore.read.plan import PlannedLoad
from dcp_objstore.read.stored_checkpoint import StoredCheckpoint
from dcp_objstore.transfer.progress import Progress
from tests.support.checkpoints import memory_url, saved_by, without_collector
from tests.support.meeting_number import MeetingNumber
from tests.support.states import same_bits, seeded

MIB = 1024 * 1024
# As small as they may be: one request of 4 MiB at a time.
SMALL = dos.TransferConfig(request_size_bytes=4 * MIB, memory_budget_bytes=8 * MIB)


def load(state: dict[str, Any], url: str, **settings: Any) -> None:
    planner = settings.pop("planner", None)
    reader = dos.ObjectStoreReader(url, **settings)
    dcp.load(state, storage_reader=reader, planner=planner, no_dist=True)


class HookedPlanner(DefaultLoadPlanner):
    """Calls one function before it takes each value, and another when it has been set up."""

    def __init__(
        self,
        on_value: Callable[[int], object] = lambda _: None,
        on_set_up: Callable[[], object] = lambda: None,
    ) -> None:
        super().__init__()
        self._on_value, self._on_set_up = on_value, on_set_up

    def set_up_planner(self, *args: Any, **settings: Any) -> None:
        super().set_up_planner(*args, **settings)
        self._on_set_up()

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self._on_value(value.getbuffer().nbytes)
        super().load_bytes(read_item, value)


# --- destinations ---


@pytest.mark.parametrize("writer", ["ours", "stock"])
def test_destinations_of_every_kind_hold_what_was_saved_and_stay_what_they_were(tmp_path, writer):
    """FSDP frees and allocates its parameters by resizing their storage."""
    state = {
        "conj": torch.zeros(6, 5, dtype=torch.complex64).conj(),
        "conj-strided": torch.zeros(5, 6, dtype=torch.complex64).t().conj(),
        "neg": torch._neg_view(torch.zeros(6, 5)),
        "neg-strided": torch.zeros(5, 6, dtype=torch.complex64).t().conj().imag,
        "leaf": torch.zeros(1000, requires_grad=True),
    }
    saved = {key: seeded(key, value.shape, value.dtype) for key, value in state.items()}
    url = saved_by(writer, tmp_path, saved)
    versions = {key: value._version for key, value in state.items()}
    load(dict(state), url)
    for key, value in state.items():
        assert torch.equal(value.nan_to_num(), saved[key].nan_to_num()), key
        assert value._version > versions[key], "autograd is told"
    storage = state["leaf"].untyped_storage()  # if NumPy has its memory, it cannot be resized
    storage.resize_(0)
    storage.resize_(4000)


def matrix() -> torch.Tensor:
    return torch.zeros(6, 8)


# Tensors that share the memory of one.
SHARED: dict[str, Callable[[torch.Tensor], list[torch.Tensor]]] = {
    "the same": lambda w: [w, w],
    "a parameter": lambda w: [torch.nn.Parameter(w), w],
    "transposed": lambda w: [w, w.t()],
    "another dtype": lambda w: [w.view(torch.int32), w],
    "a part last": lambda w: [w, torch.nn.Parameter(w[1:3])],
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
    url = saved_by(writer, tmp_path, saved)
    memory, expected = matrix(), matrix()
    state = {f"{key}": value for key, value in enumerate(SHARED[shared](expected))}
    dcp.load(state, storage_reader=FileSystemReader(tmp_path), no_dist=True)
    state = {f"{key}": value for key, value in enumerate(SHARED[shared](memory))}
    dos.load(state, url, progress=False)
    assert torch.equal(memory, expected)


def per_tensor(scale: float = 0.1, dtype: torch.dtype = torch.qint8) -> torch.Tensor:
    return torch.quantize_per_tensor(torch.linspace(-1, 1, 6).view(3, 2), scale, 3, dtype)


def per_channel(scale: float = 0.1) -> torch.Tensor:
    scales, zeros = torch.full((3,), scale), torch.zeros(3, dtype=torch.int64)
    return torch.quantize_per_channel(torch.ones(3, 2), scales, zeros, 0, torch.qint8)


QUANTIZED: dict[str, list[Callable[[], torch.Tensor]]] = {
    "per tensor": [
        *(per_tensor, lambda: per_tensor(0.5), lambda: per_tensor(dtype=torch.quint8)),
        per_channel,
    ],
    "per channel": [
        *(per_channel, lambda: per_channel(0.5), per_tensor, lambda: torch.ones(3, 2)),
    ],
}


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, that these will go
@pytest.mark.parametrize("kind", QUANTIZED)
@pytest.mark.parametrize("writer", ["ours", "stock"])
def test_a_quantized_tensor_loads_only_into_one_that_is_quantized_alike(tmp_path, kind, writer):
    make, *others = QUANTIZED[kind]
    url = saved_by(writer, tmp_path, {"q": make()})
    alike = make()
    alike.untyped_storage().fill_(0)
    dos.load({"q": alike}, url, progress=False)
    assert torch.equal(alike, make())
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


def test_a_tensor_that_its_chunks_do_not_make_up_is_not_half_loaded(tmp_path):
    url = saved_by("stock", tmp_path, {"w": torch.arange(8.0), "v": torch.ones(2)})
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    metadata.state_dict_metadata["w"].size = torch.Size([16])
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    state = {"w": torch.full((16,), -1.0)}
    with pytest.raises(CheckpointCorruptError, match="do not make up"):
        dos.load(state, url, progress=False)
    assert state["w"].eq(-1).all()
    dos.load(other := {"v": torch.zeros(2)}, url, progress=False)
    assert other["v"].tolist() == [1, 1]


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


def accepted_at_once(*reads: ItemRead) -> None:
    """Half of each read by each of two threads."""
    with ThreadPoolExecutor(2) as pool:
        for read in reads:
            list(pool.map(read.accept, (0, 4), (b"aaaa", b"bbbb")))


@pytest.mark.parametrize("blocks", ["first", "last"])
def test_a_value_is_whole_whose_blocks_arrive_at_once(monkeypatch, blocks):
    meeting = threading.Barrier(2)

    def make_memory(content: bytes) -> io.BytesIO:
        with contextlib.suppress(threading.BrokenBarrierError):
            meeting.wait(0.1)  # for another thread that makes some, too
        return io.BytesIO(content)

    arrived: list[ItemRead] = []
    read = gathered(8, arrived.append)
    if blocks == "first":
        monkeypatch.setattr(gather, "io", SimpleNamespace(BytesIO=make_memory))
    else:
        read._missing_bytes = MeetingNumber(8)
    accepted_at_once(read)
    assert [one.take().getvalue() for one in arrived] == [b"aaaabbbb"]


def test_values_that_are_complete_at_once_all_count_in_the_queue():
    queue = CompletionQueue(15)
    reads = [gathered(8, queue.add) for _ in range(3)]
    for value in (0, 16):
        queue._waiting_bytes = MeetingNumber(value)
        with ThreadPoolExecutor(2) as pool:
            if not value:
                list(pool.map(lambda read: read.accept(0, bytes(8)), reads[:2]))
                assert queue.is_full
            else:  # one is complete as others are taken
                pool.submit(queue.drain, lambda _: None)
                pool.submit(reads[2].accept, 0, bytes(8))
    queue.drain(lambda _: None)
    assert not queue.is_full
    gathered(15, queue.add).accept(0, bytes(15))
    assert not queue.is_full, "nothing of the others counts any more"


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
    with without_collector():
        del queue, read
        assert gone() is None


def test_an_item_without_bytes_is_complete_at_once():
    arrived: list[ItemRead] = []
    gathered(0, arrived.append)
    assert [read.take().getvalue() for read in arrived] == [b""]


def test_a_stock_tensor_is_in_place_when_it_has_arrived_and_does_not_pile_up():
    saved, stored = seeded("t", (1000,)), io.BytesIO()
    torch.save(saved, stored)
    place, zero = MetadataIndex("t", (0,)), torch.Size([0])
    item = ReadItem(LoadItemType.TENSOR, place, zero, place, zero, torch.Size([1000]))
    body, queue = stored.getvalue(), CompletionQueue(limit_bytes=0)
    read = ItemRead(item, ItemLocation(0, 0, len(body), (1000,), None, None))
    read.bind(tensor := torch.zeros(1000), queue.add)
    read.accept(100, body[100:])
    assert not tensor.any()
    read.accept(0, body[:100])
    assert same_bits(tensor, saved)
    assert not queue.is_full
    queue.drain(partial(ItemRead.finish, trust_pickle=False))


def test_values_that_the_planner_has_not_taken_are_bounded(requests):
    """The planner takes its time with the first: until nothing more is fetched."""
    url, held = memory_url(), list[int]()
    values = {f"v{n:02}": f"{n:02}" * (MIB // 2) for n in range(32)}
    dos.save(dict(values), url, progress=False)

    def take(_: int) -> None:
        fetched_bytes = -1
        while not held:
            before = fetched_bytes
            fetched_bytes = sum(one.bytes for one in [*requests] if one.verb == "open_range")
            if fetched_bytes == before > 0:
                held.append(fetched_bytes)
            time.sleep(0.1)

    state = dict.fromkeys(values, "")
    load(state, url, config=SMALL, planner=HookedPlanner(take))
    assert state == values
    # What may wait, the request that went over that, and the one that waits for room.
    assert held[0] <= SMALL.memory_budget_bytes + 2 * (SMALL.request_size_bytes + MIB)


def test_a_load_whose_values_take_longer_than_the_stall_time_out_goes_on(monkeypatch):
    """Meanwhile nothing can be fetched, because what has arrived waits for its place."""
    said, of_load = list[str](), threading.get_ident()

    class Noted(Progress):
        def alive(self) -> None:
            said.extend(["alive"] * (threading.get_ident() == of_load))
            super().alive()

    url, values = memory_url(), {f"v{n}": f"{n}" * (4 * MIB) for n in range(3)}
    dos.save(dict(values), url, progress=False)
    monkeypatch.setattr(session, "Progress", Noted)
    state = dict.fromkeys(values, "")
    load(state, url, config=SMALL, planner=HookedPlanner(lambda _: said.append("taken")))
    assert state == values
    assert said.count("taken") == 3
    assert said[-1] == "alive", "only once they are taken, a look for a stall begins anew"


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


def test_a_stock_tensor_that_cannot_be_read_is_named_and_not_fetched_again(tmp_path, requests):
    state = {"fine": seeded("fine", (50,)), "hurt": seeded("hurt", (70,))}
    url = saved_by("stock", tmp_path, state)
    (data,) = tmp_path.glob("*.distcp")
    body = data.read_bytes()
    at = body.index(state["hurt"].numpy().tobytes())
    start = body.rindex(b"data.pkl", 0, at)  # the pickle of this item's archive
    data.write_bytes(body[: start + 8] + bytes(100) + body[start + 108 :])
    with pytest.raises(CheckpointCorruptError) as caught:
        dos.load({key: torch.zeros_like(value) for key, value in state.items()}, url)
    assert caught.value.key == "hurt"
    assert [one.verb for one in requests].count("open_range") == 1


# --- one reader, several threads ---


def test_threads_that_share_a_reader_each_load_what_they_asked_for():
    root, reader, meeting = memory_url(), dos.ObjectStoreReader(), threading.Barrier(2)

    def load_step(n: int) -> torch.Tensor:
        tensor = torch.full((100,), -1.0)
        dcp.load(
            {"t": tensor},
            storage_reader=reader,
            checkpoint_id=f"{root}/step-{n}",
            # Between the opening of the checkpoint and the rest, the other thread comes here, too.
            planner=HookedPlanner(on_set_up=partial(meeting.wait, timeout=20)),
            no_dist=True,
        )
        return tensor

    for n in range(2):
        dos.save({"t": torch.full((100,), float(n))}, f"{root}/step-{n}", progress=False)
    with ThreadPoolExecutor(2) as pool:
        for n, tensor in enumerate(pool.map(load_step, range(2))):
            assert tensor.eq(n).all(), f"the load of step {n} got another step's"


def test_what_ranks_hold_in_common_is_part_of_the_memory_budget(monkeypatch):
    """And ranges are asked for ahead, with other ranks those that need not wait for a slot."""
    fetch, run, asked = session.fetch_ranges, session.run_load, []

    def watch(store: Any, keys: Any, requests: Any, *args: Any, **settings: Any) -> Any:
        waits = settings["admit"] is not None, settings["may_begin"] is not None
        asked.append((settings["budget_bytes"], len(requests), *waits))
        return fetch(store, keys, requests, *args, **settings)

    def share(store: Any, planned: PlannedLoad, *args: Any, **settings: Any) -> Any:
        """With an exchange in which no rank takes part, but which has taken some memory."""
        exchange = Mock(memory_bytes=3 * MIB, received_bytes=0, requests=())
        exchange.admit.return_value, exchange.alone.return_value = None, planned.spans
        return run(store, planned, *args, **{**settings, "exchange": exchange})

    monkeypatch.setattr(session, "fetch_ranges", watch)
    url = memory_url()
    dos.save({"t": torch.ones(9 * MIB // 4)}, url)
    for load in (run, share):
        monkeypatch.setattr(reading, "run_load", load)
        state = {"t": torch.zeros(9 * MIB // 4)}
        dos.load(state, url, config=SMALL)
        assert state["t"].eq(1).all()
    assert asked == [(8 * MIB, 3, False, False), (5 * MIB, 3, True, True)]


def test_nothing_more_is_asked_for_when_a_planner_has_failed(monkeypatch):
    """Its error may be kept, with all that it refers to, for as long as the program runs."""
    url, stop = memory_url(), Progress.stop
    values = {f"value{n}": "x" * 5 * MIB for n in range(6)}
    dos.save(values, url)
    stopped: list[BaseException] = []

    def note(progress: Progress, error: BaseException) -> None:
        stopped.append(error)
        stop(progress, error)

    monkeypatch.setattr(Progress, "stop", note)
    planner = HookedPlanner(Mock(side_effect=ZeroDivisionError("the planner's")))
    with pytest.raises(CheckpointException) as caught:  # noqa: F841 - it is kept
        load(dict.fromkeys(values, ""), url, config=SMALL, planner=planner)
    assert len(stopped) == 1


def test_a_failed_load_leaves_the_reader_fit_for_the_next():
    url, tensor = memory_url(), torch.zeros(3)
    reader = dos.ObjectStoreReader(url)
    with pytest.raises(CheckpointException):
        dcp.load({"t": tensor}, storage_reader=reader, no_dist=True)
    assert reader.last_load is None
    dos.save({"t": torch.ones(3)}, url, progress=False)
    dcp.load({"t": tensor}, storage_reader=reader, no_dist=True)
    assert tensor.eq(1).all()
    assert reader.last_load is not None


def test_dcp_is_told_which_checkpoint_ids_are_urls():
    """It chooses what loads a checkpoint by that."""
    ids = ("s3://bucket/step-1", "/scratch/step-1", Path("s3:/bucket/step-1"), None)
    found = [dos.ObjectStoreReader.validate_checkpoint_id(one) for one in ids]  # type: ignore[arg-type]
    assert found == [True, False, False, False]


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


def test_an_object_at_the_very_key_of_the_url_is_said_to_be_no_checkpoint(tmp_path):
    torch.save({"t": torch.ones(3)}, tmp_path / "model.pt")
    size_bytes = (tmp_path / "model.pt").stat().st_size
    for read in (dos.open, lambda url: dos.load({"t": torch.zeros(3)}, url)):
        with pytest.raises(dos.errors.CheckpointNotFoundError, match=r"torch\.load") as caught:
            read(f"{tmp_path.as_uri()}/model.pt")
        assert f"{size_bytes} bytes" in str(caught.value)
        with pytest.raises(dos.errors.CheckpointNotFoundError, match="nothing here"):
            read(f"{tmp_path.as_uri()}/model")
