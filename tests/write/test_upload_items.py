"""What a rank uploads: in which order, in which objects, and what is said of it before."""

from __future__ import annotations

import logging
import threading
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan

import dcp_objstore as dos
from dcp_objstore.config import AUTO_MOST, MIB
from dcp_objstore.errors import StoreFullError
from dcp_objstore.observe.events import Hashed, Planned
from dcp_objstore.transfer.digests import block_digests
from dcp_objstore.write import upload_items as uploading
from dcp_objstore.write.layout import ChangedSlice, SizedItem
from tests.support.checkpoints import memory_url
from tests.support.wrapped_stores import refusing


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
    ("whole_only", "mib", "copied", "groups"),
    [
        (True, 5, (), ["bd", "ac"]),
        (False, 5, (), ["abcd"]),
        (True, 4, (), ["abcd"]),
        (True, 4, "a", ["bcd"]),
        (True, 9, "a", ["bd", "c"]),
        (True, 9, "abcd", []),
        (True, 9, "bd", ["ac"]),
    ],
)
def test_what_has_not_changed_is_kept_apart_if_it_is_enough_for_a_copy(
    whole_only, mib, copied, groups
):
    """Where whole objects are copied: the next save then finds one."""
    sizes = {"a": 0, "b": 9 * MIB, "c": mib * MIB, "d": 1}
    items: Any = [SizedItem(SimpleNamespace(index=name), size) for name, size in sizes.items()]  # type: ignore[arg-type]
    unchanged: Any = SimpleNamespace(items={"a", "c"}, whole_only=whole_only)
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


FULL = refusing(".distcp", StoreFullError("no room is left"))


def test_a_store_that_is_full_is_told_of_with_what_the_rank_saves(through):
    through(FULL)
    state = {"a": torch.zeros(MIB // 4), "b": torch.zeros(MIB // 2)}
    with pytest.raises(StoreFullError, match=r"no room is left; this rank saves 3\.00 MiB"):
        dos.save(state, memory_url(), progress=False)


@pytest.mark.parametrize(
    ("mib_each", "count", "part_mib", "is_copied", "most"),
    [
        (1, 16, 5, False, AUTO_MOST),
        (1, 17, 5, False, 3),
        (1, 17, 16, False, 2),
        (2, 9, 5, False, AUTO_MOST),
        (2, 9, 5, True, 3),  # as where a planner converts a file
    ],
)
def test_parts_of_copied_tensors_are_bounded_in_bytes_and_others_are_not(
    mib_each, count, part_mib, is_copied, most, monkeypatch
):
    """Copies may take 16 MiB here: 3 parts of 5 MiB. One part is filled as another is sent."""
    monkeypatch.setattr(uploading, "COPIED_MOST_BYTES", 16 * MIB)
    monkeypatch.setattr(uploading.AgreeingSavePlanner, "is_copied", is_copied)
    upload = Mock(wraps=uploading.upload_object)
    monkeypatch.setattr(uploading, "upload_object", upload)
    state = {f"{n}": torch.zeros(mib_each * MIB // 4) for n in range(count)}
    url, config = memory_url(), dos.TransferConfig(part_size_bytes=part_mib * MIB)
    dos.save(state, url, config=config, progress=False)
    if not is_copied:  # by another planner
        writer = dos.ObjectStoreWriter(f"{url}-2", config=config, progress=False)
        dcp.save(state, storage_writer=writer, no_dist=True)
    assert {call.kwargs["most"] for call in upload.call_args_list} == {most}


@pytest.mark.parametrize(
    ("concurrency", "near", "most_mib", "part_mib"),
    [
        ("auto", True, 1000, 14),
        (4, True, 1000, 14),
        (4, False, 1000, 14),
        ("auto", False, 1000, 5),
        # The largest item has an object of its own, however small objects should be.
        ("auto", True, 5, 8),
    ],
)
def test_parts_grow_where_a_few_connections_are_enough_and_for_the_largest_item(
    concurrency, near, most_mib, part_mib, monkeypatch
):
    window = SimpleNamespace(is_near=near)
    monkeypatch.setattr(uploading, "limiter_of", lambda store: SimpleNamespace(window=window))
    config = dos.TransferConfig(
        part_size_bytes=5 * MIB,
        upload_concurrency=concurrency,
        max_object_size_bytes=most_mib * MIB,
    )
    state = {f"{n}": torch.zeros(1).expand(n * MIB) for n in (64, 48)}
    items = create_default_local_save_plan(state, True).items
    store: Any = SimpleNamespace()
    assert uploading._plan_parts(items, store, config).part_size_bytes == part_mib * MIB


def test_what_changed_and_is_whole_all_the_same_is_told_once_a_tensor(caplog):
    store = dos.stores.open_store(memory_url())
    body = bytes(range(200))
    store.put("data", [body])

    def change(key: str, start: int, end: int) -> ChangedSlice:
        digests: Any = SimpleNamespace(result=lambda: block_digests(body[start:end]))
        return ChangedSlice(key, start, end - start, digests)

    check: Any = partial(uploading._check_changed, store, "data")
    with caplog.at_level(logging.WARNING, logger="dcp_objstore"):
        check([])
        assert caplog.text == ""
        changed = [change("b", 0, 10), change("a", 10, 100), change("b", 100, 200)]
        check(changed)
    assert "b, a changed while it was being saved" in caplog.text
    wrong = ChangedSlice("c", 0, 100, changed[0].digests)
    with pytest.raises(dos.errors.InputError, match="changed") as caught:
        check([*changed, wrong])
    assert caught.value.key == "c"


def test_a_save_that_fails_leaves_no_thread_that_hashes(through):
    through(FULL)
    before = set(threading.enumerate())
    with pytest.raises(StoreFullError):
        dos.save({"t": torch.zeros(3)}, memory_url(), progress=False)
    for thread in set(threading.enumerate()) - before:
        if thread.name.startswith("hash"):
            thread.join(30)
            assert not thread.is_alive()
