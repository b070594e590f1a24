"""`run_load`: how much is asked for at a time, what a failed GET means, and what a load reports."""

from __future__ import annotations

import dataclasses
import io
import itertools
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

import dcp_objstore as dos
from dcp_objstore.config import MIB
from dcp_objstore.errors import (
    CheckpointCorruptError,
    CheckpointGoneError,
    CorruptDataError,
    ObjectNotFoundError,
    PreconditionFailedError,
    StateMismatchError,
    StoreUnavailableError,
)
from dcp_objstore.observe.dispatch import Channel
from dcp_objstore.observe.report import LoadReport
from dcp_objstore.read import session
from dcp_objstore.read.peers import exchange, meeting, shared_memory
from dcp_objstore.read.peers.exchange import Exchange
from dcp_objstore.read.peers.meeting import make_offer, share_out
from dcp_objstore.read.plan import PlannedLoad, plan_load
from dcp_objstore.read.session import run_load
from dcp_objstore.read.stored_checkpoint import StoredCheckpoint, open_rooted
from dcp_objstore.read.tensor_read import Block
from dcp_objstore.state.device import Inbound
from dcp_objstore.stores import ObjectStore, StoreSpec
from dcp_objstore.stores.protocol import RangeReading
from dcp_objstore.stores.wrappers import WrappedStore
from dcp_objstore.transfer.ranges import RangeRequest, Span
from tests.support.checkpoints import memory_url
from tests.support.lanes import LateLane, use_lane
from tests.support.rank_threads import RankThreads

CPU = torch.device("cpu")
CONFIG = dos.TransferConfig()


def item(key: str, sizes: tuple[int, ...], kind: LoadItemType = LoadItemType.TENSOR) -> ReadItem:
    zeros = torch.Size([0] * len(sizes))
    place = MetadataIndex(key, None if kind is LoadItemType.BYTE_IO else zeros, 0)
    return ReadItem(kind, place, zeros, place, zeros, torch.Size(sizes))


def opened(state: dict[str, Any]) -> tuple[ObjectStore, StoredCheckpoint]:
    dos.save(state, url := memory_url(), progress=False)
    store = StoreSpec(url).open()
    return store, open_rooted(store)


# --- how much at a time ---------------------------------------------------------------------------


def test_requests_grow_with_what_is_loaded_as_the_window_or_the_setting_allows(monkeypatch):
    """Where they are sent ahead, and not into slots of the ring of a device."""
    ahead, window = RangeReading(ahead=True), SimpleNamespace(is_near=False)
    store: Any = SimpleNamespace(range_reading=ahead)
    monkeypatch.setattr(session, "limiter_of", lambda _: SimpleNamespace(window=window))
    fixed, large = (
        dataclasses.replace(CONFIG, **changed)
        for changed in ({"download_concurrency": 4}, {"request_size_bytes": 40 * MIB})
    )
    gib: Any = [Span(n, 1000, 1000 + 1024 * MIB, None) for n in range(2)]
    usual, meta = CONFIG.request_size_bytes, torch.device("meta")
    for config, is_near, reading, spans, devices, size_bytes in (
        (CONFIG, False, ahead, gib, {CPU}, 16 * MIB),
        (CONFIG, True, ahead, gib, {CPU}, 32 * MIB),
        (fixed, False, ahead, gib, {CPU}, 32 * MIB),
        (large, True, ahead, gib, {CPU}, 40 * MIB),
        (CONFIG, True, ahead, gib[:0], {CPU}, usual),
        (CONFIG, True, RangeReading(), gib, {CPU}, usual),
        (CONFIG, True, ahead, gib, {CPU, meta}, usual),
    ):
        window.is_near, store.range_reading = is_near, reading
        assert session._request_size(store, spans, devices, config) == size_bytes


def test_streams_are_settled_if_any_destination_is_on_a_device(monkeypatch):
    store, checkpoint = opened({"t": torch.arange(5.0), "u": torch.arange(5.0)})
    settled = Mock()
    monkeypatch.setattr(session, "wait_for_streams", settled)
    monkeypatch.setattr(session, "lanes_into", lambda _: {})
    monkeypatch.setattr(session, "check_destination", Mock())
    for device, often in (("cpu", 0), ("meta", 1)):
        planned = plan_load(checkpoint, [item("t", (5,)), item("u", (5,))], verify=True)
        load(store, planned, [torch.zeros(5), torch.zeros(5, device=device)])
        assert settled.call_count == often


@pytest.mark.parametrize(
    ("sizes_mib", "concurrency", "slots"),
    [([4, 3], 8, 4), ([4, 4, 4], 2, 4), ([], 8, 3), ([4] * 9, 8, 10)],
)
def test_the_ring_has_slots_for_the_largest_request_and_no_more_than_there_are(
    monkeypatch, sizes_mib, concurrency, slots
):
    lane, made = LateLane(), Mock(return_value="inbound")
    monkeypatch.setattr(session, "lanes_into", lambda _: {CPU: lane})
    monkeypatch.setattr(session, "Inbound", made)
    requests: Any = [RangeRequest(0, MIB, MIB + size * MIB) for size in sizes_mib]
    config = dos.TransferConfig(download_concurrency=concurrency)
    found = session._open_inbound([], {CPU}, requests, config=config, budget_bytes=256 * MIB)
    largest_bytes = max(sizes_mib, default=0) * MIB or 1
    assert found == ("inbound", 2 * (slots - 2) * largest_bytes)
    made.assert_called_once_with({CPU: lane}, slots, largest_bytes)


# --- what a failed GET means ----------------------------------------------------------------------

AT = {"rank": 3, "object_key": "data", "url": "memory://url"}


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (PreconditionFailedError("changed", **AT), CheckpointGoneError, "another writer replaced"),
        (CorruptDataError("too short", **AT), CheckpointCorruptError, "too short"),
        (StoreUnavailableError("down", **AT), StoreUnavailableError, "down"),
        (ObjectNotFoundError("none", **AT), CheckpointCorruptError, "is missing"),
    ],
)
def test_the_error_of_a_get_says_what_it_means_and_what_was_read(error, kind, text):
    block = 4 * MIB
    spans = [
        Span(0, 100, 200, Block("first", 2 * block, None)),
        Span(0, 200, 300, Block("middle", 0, None)),
        Span(0, 300, 400, Block("last", block, None)),
    ]
    checkpoint: Any = SimpleNamespace(explain=StoredCheckpoint((), None).explain)  # type: ignore[arg-type]
    explained = session.explained(checkpoint, None, RangeRequest(0, 50, 450, spans), error)  # type: ignore[arg-type]
    assert type(explained) is kind
    assert text in explained.message
    assert "[50, 450) of the object, block 2 of first to block 1 of last)" in explained.message
    assert (explained.key, explained.object_key) == ("first", "data")
    if kind is not CheckpointCorruptError or text == "too short":
        assert (explained.rank, explained.url) == (3, "memory://url")
    alone = CorruptDataError("too short", key="named")
    explained = session.explained(checkpoint, None, RangeRequest(0, 50, 450, spans[:1]), alone)  # type: ignore[arg-type]
    assert "of the object, block 2 of first)" in explained.message
    assert explained.key == "named"


# --- what a load does and reports -----------------------------------------------------------------


class Copies:
    """Copies on this node, of which one gives some bytes."""

    numbers = frozenset({0})
    node = b"node"

    def __init__(self) -> None:
        self.kept = 0

    def before(self, store: ObjectStore) -> Any:
        first: Any = WrappedStore(store)
        first.local_bytes = 7
        return first

    def keep(self) -> None:
        self.kept += 1


def load(
    store: ObjectStore, planned: PlannedLoad, destinations: list[Any], **settings: Any
) -> LoadReport:
    channel = Channel("load", store.url)
    settings = {"config": CONFIG, "trust_pickle": False, "channel": channel, **settings}
    return run_load(store, planned, destinations, settings.pop("config"), **settings)


def test_copies_are_kept_and_counted_if_a_load_has_used_them():
    store, checkpoint = opened({"t": torch.arange(5.0)})
    for copies in (Copies(), None):
        planned = plan_load(checkpoint, [item("t", (5,))], verify=True)
        tensor = torch.zeros(5)
        used: Any = copies
        report = load(store, planned, [tensor], copies=used)
        assert tensor.tolist() == [0, 1, 2, 3, 4]
        assert report.local_bytes == (7 if copies else 0)
        if copies:
            assert copies.kept == 1
    planned = plan_load(checkpoint, [item("t", (5,))], verify=True)
    with pytest.raises(StateMismatchError):
        load(store, planned, [torch.zeros(6)], copies=used)


def test_retries_are_reported_where_the_store_tells_them():
    store, checkpoint = opened({"t": torch.arange(5.0)})
    for told, retries in (({"open_range"}, 0), ({"put"}, None)):

        class Telling(WrappedStore):
            reports_throttling = told

        planned = plan_load(checkpoint, [item("t", (5,))], verify=True)
        assert load(Telling(store), planned, [torch.zeros(5)]).retries == retries


def test_all_destinations_of_another_dtype_are_named_where_that_is_an_error():
    store, checkpoint = opened({"a": torch.ones(2), "b": torch.ones(2), "c": torch.ones(2), "v": 3})
    items = [item("v", (0,), LoadItemType.BYTE_IO), *(item(key, (2,)) for key in "abc")]
    planned = plan_load(checkpoint, items, verify=True)
    halves = [torch.zeros(2, dtype=torch.float16) for _ in range(2)]
    destinations = [lambda _: None, halves[0], torch.zeros(2), halves[1]]
    with pytest.raises(StateMismatchError, match="in 2 keys") as caught:
        load(store, planned, destinations, on_dtype="error")
    assert "\n  a: saved as float32" in str(caught.value)
    assert "\n  c: saved as float32" in str(caught.value)
    assert not any(half.any() for half in halves)
    with pytest.warns(UserWarning, match="a: saved as float32") as warned:
        load(store, plan_load(checkpoint, items, verify=True), destinations)
    assert len(warned) == 1
    assert all(half.all() for half in halves)


def test_of_keys_that_share_memory_only_those_that_count_are_read_or_copied():
    store, checkpoint = opened({"a": torch.ones(4), "b": torch.ones(4), "c": torch.full((2,), 2.0)})
    memory = torch.zeros(4)
    items = [item("a", (4,)), item("b", (4,)), item("c", (2,))]
    planned = plan_load(checkpoint, items, verify=True)
    a, b, c = planned.reads
    version = memory._version
    # The last of a and b fills all of it; then c, which is copied when all has arrived.
    load(store, planned, [memory, memory.view(4), memory[1:3]])
    assert memory.tolist() == [1, 2, 2, 1]
    assert memory._version > version, "autograd is told"
    needed = [read for span in planned.spans for read in span.tag.reads]
    assert a not in needed
    assert b in needed and c in needed


@pytest.mark.parametrize(
    ("to", "is_one_host"), [("host", False), ("device", True), ("device", False)]
)
def test_ranks_that_load_together_fetch_each_byte_once(monkeypatch, tmp_path, to, is_one_host):
    """What all need, and what each needs alone; a value, and one that has no bytes of its own."""
    state = {"a": torch.arange(300.0), "b": torch.ones(2, 500), "v": "value", "none": torch.ones(0)}
    state |= {f"own{n}": torch.full((100,), n + 1.0) for n in range(2)}
    store, checkpoint = opened(state)
    if to == "device":
        use_lane(monkeypatch, LateLane)
    if not is_one_host:
        monkeypatch.setattr(shared_memory, "_BOOT_ID", tmp_path / "absent")
    keys = [["a", "b", "none", f"own{n}", "v"] for n in range(2)]
    value = item("v", (0,), LoadItemType.BYTE_IO)
    items = [[*(item(k, tuple(state[k].shape)) for k in of[:-1]), value] for of in keys]  # type: ignore[attr-defined]
    loads = [plan_load(checkpoint, of, verify=True, whole_blocks=True) for of in items]
    monkeypatch.setattr(meeting, "current_rank", itertools.count().__next__)
    settings: Any = {"group_ranks": (0, 1), "config": CONFIG, "verify": True}
    shares = share_out([make_offer("url", checkpoint, of, **settings) for of in loads])
    values: list[Any] = [None, None]
    filled = [[torch.zeros_like(state[key]) for key in of_rank[:-1]] for of_rank in keys]  # type: ignore[call-overload]

    def call(rank: int, group: Any) -> LoadReport:
        share = shares[rank]
        assert share is not None

        def take(body: io.BytesIO) -> None:
            values[rank] = torch.load(body, weights_only=True)

        with Exchange(share, group, "url") as exchanging:
            exchanging.prepare(loads[rank], MIB)
            return load(store, loads[rank], [*filled[rank], take], exchange=exchanging)

    ranks = RankThreads(2)
    monkeypatch.setattr(exchange, "dist", ranks)
    reports = ranks.run(call)
    assert all(isinstance(report, LoadReport) for report in reports), reports
    assert ranks.deserted == []
    assert values == ["value"] * 2
    for rank in range(2):
        for key, tensor in zip(keys[rank], filled[rank], strict=False):
            assert torch.equal(tensor, state[key]), key  # type: ignore[arg-type]
    spans = {(s.start, s.end) for planned in loads for s in planned.spans}
    assert sum(report.total_bytes for report in reports) < sum(e - s for s, e in spans) + 4096
    shared = [300 * 4 + 2 * 500 * 4] * 2
    assert sum(report.received_bytes for report in reports) >= sum(shared) // 2
    assert sum(report.requests for report in reports) >= 3


def test_only_what_goes_to_a_device_takes_a_slot_of_its_ring(monkeypatch):
    store, checkpoint = opened({"t": torch.ones(5), "v": "x" * 9 * MIB})
    use_lane(monkeypatch, LateLane)
    admitted: list[set[str]] = []
    admit = Inbound.admit

    def note(self: Inbound, request: RangeRequest[Block], *args: Any) -> Any:
        admitted.append({span.tag.key for span in request.spans})
        return admit(self, request, *args)

    monkeypatch.setattr(Inbound, "admit", note)
    items = [item("t", (5,)), item("v", (0,), LoadItemType.BYTE_IO)]
    tensor, take = torch.zeros(5), Mock()
    planned = plan_load(checkpoint, items, verify=True)
    config = dos.TransferConfig(request_size_bytes=4 * MIB)
    report = load(store, planned, [tensor, take], config=config)
    assert (take.call_count, tensor.sum()) == (1, 5)
    assert report.requests > len(admitted) == 1
    assert admitted[0] == {"t", "v"}
