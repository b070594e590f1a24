"""What a rank uploads: in which order, in which objects, and what is said of it before."""

from __future__ import annotations

import logging
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan

import dcp_objstore as dos
from dcp_objstore.config import AUTO_MOST, MIB
from dcp_objstore.errors import StoreFullError
from dcp_objstore.observe.events import Hashed, Planned
from dcp_objstore.stores.wrappers import WrappedStore
from dcp_objstore.transfer.digests import block_digests
from dcp_objstore.write import upload_items as uploading
from dcp_objstore.write.layout import ChangedSlice, SizedItem
from tests.support.checkpoints import memory_url
from tests.support.wrapped_stores import RecordingStore, Request


def test_values_come_first_then_small_tensors_then_large_ones_as_they_were_planned():
    kib = 1024
    state: dict[str, Any] = {
        "large": torch.empty(256 * kib + 1, dtype=torch.uint8),
        "small": torch.empty(256 * kib, dtype=torch.uint8),
        "value": 5,
        "empty": torch.empty(0),
        "last": torch.empty(2 * MIB, dtype=torch.uint8),
        "text": "x",
    }
    items = create_default_local_save_plan(state, True).items
    order = uploading.upload_order(items)
    assert [one.item.index.fqn for one in order] == [
        *("value", "text", "small", "empty", "large", "last")
    ]
    assert [one.size_bytes for one in order] == [0, 0, 256 * kib, 0, 256 * kib + 1, 2 * MIB]
    same = {item.index for item in items if item.index.fqn in ("text", "empty", "last")}
    order = uploading.upload_order(items, same)
    assert [one.item.index.fqn for one in order] == [
        *("text", "value", "empty", "small", "last", "large")
    ]


@pytest.mark.parametrize(
    ("mib", "copied", "groups"),
    [
        (5, (), ["bd", "ac"]),
        (4, (), ["abcd"]),
        (4, "a", ["bcd"]),
        (9, "a", ["bd", "c"]),
        (9, "abcd", []),
        (9, "bd", ["ac"]),
    ],
)
def test_what_has_not_changed_is_kept_apart_if_it_is_enough_for_a_copy(mib, copied, groups):
    """Where whole objects are copied: the next save then finds one."""
    sizes = {"a": 0, "b": 9 * MIB, "c": mib * MIB, "d": 1}
    items: Any = [SizedItem(SimpleNamespace(index=name), size) for name, size in sizes.items()]  # type: ignore[arg-type]
    unchanged: Any = SimpleNamespace(items={"a", "c"}, whole_only=True)
    found = uploading._groups(items, unchanged, copied)
    made = ["".join(one.item.index for one in group) for group in found]  # type: ignore[misc]
    assert [group for group in made if group] == groups


@pytest.mark.parametrize(
    ("sizes", "limit", "objects", "requests"),
    [
        ([], 99, 1, 1),
        ([1], 99, 1, 1),
        ([3, 3, 3], 99, 1, 2),
        ([6, 6, 6], 6, 3, 4),
        ([5, 5, 6], 11, 2, 4),
    ],
)
def test_what_is_planned_is_told_before_anything_is_sent(sizes, limit, objects, requests):
    events: list[Any] = []
    config = dos.TransferConfig(part_size_bytes=5 * MIB, max_object_size_bytes=limit * MIB)
    state = {f"{n}": torch.zeros(size * MIB // 4) for n, size in enumerate(sizes)}
    dos.save(
        {**state, "value": 1}, memory_url(), progress=False, config=config, on_event=events.append
    )
    planned = next(event for event in events if isinstance(event, Planned))
    assert (planned.operation, planned.items) == ("save", len(sizes) + 1)
    assert planned.size_bytes == sum(sizes) * MIB
    assert (planned.objects, planned.requests) == (objects, requests)


def test_each_slice_that_is_hashed_is_told_with_its_thread():
    events: list[Any] = []
    state = {"t": torch.zeros(7 * MIB // 4)}
    config = dos.TransferConfig(part_size_bytes=5 * MIB, hash_threads=1)
    dos.save(state, memory_url(), progress=False, config=config, on_event=events.append)
    hashed = [event for event in events if isinstance(event, Hashed)]
    assert [one.size_bytes for one in hashed] == [4 * MIB, 3 * MIB]
    assert {one.worker for one in hashed} == {0}
    assert all(one.seconds >= 0 for one in hashed)


def test_the_queue_of_a_gpu_is_waited_for_before_its_tensors_are_read(monkeypatch):
    steps: list[str] = []
    monkeypatch.setattr(uploading, "wait_for_streams", lambda: steps.append("settled"))
    begin = uploading.Layout.buffers
    monkeypatch.setattr(
        uploading.Layout, "buffers", lambda self: steps.append("read") or begin(self)
    )
    dos.save({"t": torch.ones(3)}, memory_url(), progress=False)
    assert steps == ["settled", "read"]


class Full(WrappedStore):
    """A disk without room."""

    def put(self, key: str, *args: Any, **settings: Any) -> Any:
        if key.endswith(".distcp"):
            raise StoreFullError("no room is left")
        return super().put(key, *args, **settings)


def test_a_store_that_is_full_is_told_of_with_what_the_rank_saves(through):
    through(Full)
    state = {"a": torch.zeros(MIB // 4), "b": torch.zeros(MIB // 2)}
    with pytest.raises(StoreFullError, match=r"no room is left; this rank saves 3\.00 MiB"):
        dos.save(state, memory_url(), progress=False)


def test_objects_are_numbered_in_their_order_and_all_are_reported(through):
    requests: list[Request] = []
    through(lambda store: RecordingStore(store, requests))
    state = {f"{n}": torch.full((6 * MIB // 4,), float(n)) for n in range(3)}
    config = dos.TransferConfig(part_size_bytes=5 * MIB, max_object_size_bytes=6 * MIB)
    report = dos.save(state, url := memory_url(), progress=False, config=config)
    sent = [one.key for one in requests if one.verb.startswith("put") and ".distcp" in one.key]
    assert [key.split(".")[0] for key in dict.fromkeys(sent)] == ["__0_0", "__0_1", "__0_2"]
    assert (report.objects, report.parts) == (3, 6)
    found = dos.read_state_dict(url)
    assert all(torch.equal(found[key], value) for key, value in state.items())


@pytest.mark.parametrize("concurrency", ["auto", 4])
@pytest.mark.parametrize("near", [True, False])
def test_parts_grow_sooner_where_a_few_connections_are_enough(concurrency, near, monkeypatch):
    window = SimpleNamespace(is_near=near)
    monkeypatch.setattr(uploading, "limiter_of", lambda store: SimpleNamespace(window=window))
    config = dos.TransferConfig(part_size_bytes=5 * MIB, upload_concurrency=concurrency)
    items: Any = create_default_local_save_plan(
        {f"{n}": torch.zeros(1).expand(64 * MIB) for n in range(2)}, True
    ).items
    plan = uploading._plan_parts(items, SimpleNamespace(), config)  # type: ignore[arg-type]
    grown = near or concurrency != "auto"
    assert plan.part_size_bytes == (16 * MIB if grown else 5 * MIB)


def test_parts_that_are_the_tensors_own_memory_are_not_bounded(monkeypatch):
    monkeypatch.setattr(uploading, "COPIED_MOST_BYTES", 0)
    given: list[int] = []
    upload = uploading.upload_object

    def noting(*arguments: Any, **settings: Any) -> Any:
        given.append(settings["most"])
        return upload(*arguments, **settings)

    monkeypatch.setattr(uploading, "upload_object", noting)
    state = {"t": torch.zeros(2 * MIB)}
    dos.save(state, memory_url(), progress=False)
    writer = dos.ObjectStoreWriter(memory_url(), progress=False)
    dcp.save(state, storage_writer=writer, no_dist=True)
    assert given == [AUTO_MOST] * 2
    monkeypatch.setattr(uploading.AgreeingSavePlanner, "is_copied", True)
    dos.save(state, memory_url(), progress=False)
    assert given[2:] == [2], "as where a planner converts a file"


def test_parts_are_as_large_as_an_object_of_the_largest_item_needs():
    """It has an object of its own, however small objects should be."""
    config = dos.TransferConfig(part_size_bytes=5 * MIB, max_object_size_bytes=5 * MIB)
    state = {"few": torch.zeros(3), "many": torch.zeros(1).expand(256 * MIB)}
    items = create_default_local_save_plan(state, True).items
    store = dos.stores.open_store(memory_url())
    assert uploading._plan_parts(items, store, config).part_size_bytes == 32 * MIB


def test_what_changed_and_is_whole_all_the_same_is_told_once_a_tensor(caplog):
    store = dos.stores.open_store(memory_url())
    body = bytes(range(200))
    store.put("data", [body])

    def change(key: str, start: int, end: int) -> ChangedSlice:
        digests: Any = SimpleNamespace(result=lambda: block_digests(body[start:end]))
        return ChangedSlice(key, start, end - start, digests)

    with caplog.at_level(logging.WARNING, logger="dcp_objstore"):
        uploading._check_changed(store, "data", [])
        assert caplog.text == ""
        changed = [change("b", 0, 10), change("a", 10, 100), change("b", 100, 200)]
        uploading._check_changed(store, "data", changed)
    assert "b, a changed while it was being saved" in caplog.text
    wrong = ChangedSlice("c", 0, 100, changed[0].digests)
    with pytest.raises(dos.errors.InputError, match="changed") as caught:
        uploading._check_changed(store, "data", [*changed, wrong])
    assert caught.value.key == "c"


def test_a_save_that_fails_leaves_no_thread_that_hashes(through):
    through(Full)
    before = set(threading.enumerate())
    with pytest.raises(StoreFullError):
        dos.save({"t": torch.zeros(3)}, memory_url(), progress=False)
    for thread in set(threading.enumerate()) - before:
        if thread.name.startswith("hash"):
            thread.join(30)
            assert not thread.is_alive()
