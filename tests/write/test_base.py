"""Saves with a base: the store copies what has not changed, and nothing depends on the base."""

from __future__ import annotations

import io
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
import xxhash
from torch.distributed.checkpoint.default_planner import (
    DefaultSavePlanner,
    create_default_local_save_plan,
)
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import dcp_objstore as dos
from dcp_objstore.checkpoint.index import Index
from dcp_objstore.checkpoint.names import is_index_key, parse_data_key
from dcp_objstore.config import MIB
from dcp_objstore.errors import ConfigError, InvalidUrlError
from dcp_objstore.observe.events import NotCopied, PartCopied, Planned, Saved
from dcp_objstore.state import tensor_frame
from dcp_objstore.stores import ObjectStore, StoreSpec
from dcp_objstore.stores.protocol import Capabilities, CopySource, Version
from dcp_objstore.stores.wrappers import WrappedStore
from dcp_objstore.transfer.digests import block_digests
from dcp_objstore.transfer.parts import plan_parts
from dcp_objstore.write import api, base as base_module
from dcp_objstore.write.base import Base, Unchanged, _shares, find_unchanged, open_base
from tests.support.checkpoints import assert_nothing_visible, cause, memory_url
from tests.support.lanes import LateLane, use_lane
from tests.support.listening import Heard, of
from tests.support.proxy import Asked, NetworkProxy
from tests.support.ranks import run_ranks
from tests.support.servers import Bucket, Folder
from tests.support.states import same_bits, seeded
from tests.support.wrapped_stores import RecordingStore, Request

NUMBERS = (3 * MIB // 2 // 4,)
# Two runs in one object: the head lies between them.
FROZEN = [f"{name}.{number}" for name in ("a", "z") for number in range(4)]
HASTY = dos.TransferConfig(max_retries=1, retry_timeout_seconds=1)


def state(edition: int = 0) -> dict[str, Any]:
    """12 MiB that never change, and 1.5 MiB and some small values that do."""
    found: dict[str, Any] = {key: seeded(key, NUMBERS) for key in FROZEN}
    found["head"] = seeded(f"head {edition}", NUMBERS)
    found["a.bias"], found["step"] = torch.full((7,), float(edition)), {"edition": edition}
    return dict(sorted(found.items()))


def save(url: str, bucket: Bucket | None = None, edition: int = 0, **settings: Any) -> Any:
    options = None if bucket is None else bucket.storage_options
    settings = {"storage_options": options, "progress": False, **settings}
    return dos.save(settings.pop("state", None) or state(edition), url, **settings)


def assert_holds(url: str, bucket: Bucket | None, want: dict[str, Any] | int) -> None:
    """The checkpoint has these values, and every byte of it is as its index says."""
    options = None if bucket is None else bucket.storage_options
    want = state(want) if isinstance(want, int) else want
    ckpt = dos.open(url, storage_options=options)
    assert ckpt.verify(deep=True, progress=False).ok
    found = ckpt.read(progress=False)
    for key, value in want.items():
        if isinstance(value, torch.Tensor):
            assert same_bits(found[key], value), key
    if "step" in want:
        assert found["step.edition"] == want["step"]["edition"]


def sent(requests: list[Request], verb: str) -> int:
    return sum(one.bytes for one in requests if one.verb == verb)


@pytest.fixture
def local(tmp_path: Path) -> Folder:
    (tmp_path / "run").mkdir()
    return Folder("file", (tmp_path / "run").as_uri(), {})


@pytest.fixture
def proxy(bucket: Bucket) -> Iterator[NetworkProxy]:
    with NetworkProxy(bucket.storage_options) as proxy:
        yield proxy


def is_copy(asked: Asked) -> bool:
    return asked.method == "PUT" and "uploadId=" in asked.query and not asked.size_bytes


# --- what is copied


@pytest.mark.backends("seaweed", "moto")
@pytest.mark.parametrize("place", ["server", "folder"])
def test_what_has_not_changed_is_copied_and_the_rest_uploaded(
    place, bucket, local, requests, tmp_path
):
    bucket = bucket if place == "server" else local
    first = save(bucket.at("step-1"), bucket, base="latest")
    assert (first.copied_bytes, first.uploaded_bytes) == (0, first.total_bytes)
    requests.clear()
    events = Heard()
    report = save(bucket.at("step-2"), bucket, 1, base="latest", on_event=events)
    assert 12 * MIB < report.copied_bytes < 12 * MIB + 64 * 1024
    assert report.uploaded_bytes < 1.5 * MIB + 64 * 1024
    assert sent(requests, "copy") == report.copied_bytes
    assert sent(requests, "put") + sent(requests, "put_stream") < 1.5 * MIB + 128 * 1024
    assert sum(event.size_bytes for event in of(PartCopied, events)) == report.copied_bytes
    (saved,), (planned,) = of(Saved, events), of(Planned, events)
    assert saved.report == report
    assert (planned.objects, planned.requests) == (report.objects, report.parts) == (3, 3)
    assert of(NotCopied, events) == []
    assert bucket.uploads() == []
    for key in bucket.keys("step-1"):
        bucket.delete(f"step-1/{key}")
    assert_holds(bucket.at("step-2"), bucket, 1)
    stock = {"head": torch.empty(NUMBERS), "a.3": torch.empty(NUMBERS)}
    place_ = bucket.download("step-2", tmp_path / "synced")
    dcp.load(stock, storage_reader=dcp.FileSystemReader(place_), no_dist=True)
    assert all(same_bits(stock[key], state(1)[key]) for key in stock)


@pytest.mark.parametrize("change", ["dtype", "shape", "key", "one bit"])
def test_a_tensor_is_the_same_only_with_its_key_dtype_shape_and_every_bit(change, local):
    tensor = seeded("t", (6 * MIB // 4,))
    save(local.at("step-1"), state={"t": tensor})
    changed = {
        "dtype": {"t": tensor.view(torch.int32)},
        "shape": {"t": tensor.reshape(2, -1)},
        "key": {"s": tensor},
        "one bit": {"t": tensor.clone()},
    }[change]
    if change == "one bit":
        changed["t"].view(torch.uint8)[-1] ^= 1
    assert save(local.at("step-2"), state=changed, base="latest").copied_bytes == 0
    assert_holds(local.at("step-2"), None, changed)
    report = save(local.at("step-3"), state=changed, base="latest")
    assert report.uploaded_bytes == 0
    assert_holds(local.at("step-3"), None, changed)


class WholeAlone(WrappedStore):
    """Copies only whole objects, each by itself, as GCS and Azure do."""

    @property
    def capabilities(self) -> Capabilities:
        return replace(self.inner.capabilities, range_copies=False)

    def copy(self, key: str, sources: Sequence[CopySource], **settings: Any) -> Version:
        (source,) = sources
        name = source.url.rpartition("step-")[2].partition("/")[2]
        there = StoreSpec(source.url.removesuffix(f"/{name}")).open()
        assert (source.start, source.end) == (0, there.head(name).size_bytes)
        return super().copy(key, sources, **settings)


def test_a_store_that_copies_whole_objects_gets_what_does_not_change_in_its_own(local, through):
    through(WholeAlone)
    events = Heard()
    copied = [
        save(
            local.at(f"step-{edition}"), None, edition, base="latest", on_event=events
        ).copied_bytes
        for edition in (1, 2, 3)
    ]
    assert of(NotCopied, events) == [], "it was asked for whole objects only"
    assert copied[:2] == [0, 0]
    assert copied[2] > 12 * MIB
    assert_holds(local.at("step-3"), None, 3)


def test_values_and_tensors_that_only_torch_can_decode_are_uploaded(local):
    quantized = torch.quantize_per_tensor(torch.randn(6 * MIB), 0.1, 0, torch.quint8)
    mixed = {"q": quantized, "t": seeded("t", (6 * MIB // 4,)), "v": [1, 2, 3], "e": torch.empty(0)}
    save(local.at("step-1"), state={"b": torch.ones(2), **mixed})
    not_there = {"a": torch.ones(3), "b": torch.ones(3)}  # before what is
    report = save(local.at("step-2"), state={**not_there, **mixed}, base="latest")
    assert 6 * MIB < report.copied_bytes < 7 * MIB
    assert dos.open(local.at("step-2")).verify(deep=True, progress=False).ok
    mixed["q"] = torch.quantize_per_tensor(torch.zeros(6 * MIB), 0.1, 0, torch.quint8)
    dos.load(mixed, local.at("step-2"), progress=False)
    assert torch.equal(mixed["q"].int_repr(), quantized.int_repr())


def test_what_is_too_short_for_a_part_lies_together_for_the_next_save(local):
    names = [f"{number:02}" for number in range(12)]
    first = {name: torch.full(NUMBERS, float(name)) for name in names}
    save(local.at("step-1"), state=first)
    second = {name: one + 1 if int(name) % 2 else one for name, one in first.items()}
    report = save(local.at("step-2"), state=second, base="latest")
    assert report.copied_bytes == 0, "no run has 5 MiB"
    third = {name: one + 1 if int(name) % 2 else one for name, one in second.items()}
    report = save(local.at("step-3"), state=third, base="latest")
    assert 9 * MIB < report.copied_bytes < 10 * MIB
    assert_holds(local.at("step-3"), None, third)


def test_several_runs_in_one_object_are_each_where_the_index_says(local, monkeypatch):
    monkeypatch.setattr(base_module, "_MOST_OBJECTS", 1)
    save(local.at("step-1"))
    events = Heard()
    report = save(local.at("step-2"), None, 1, base="latest", on_event=events)
    assert report.copied_bytes > 12 * MIB
    (planned,) = of(Planned, events)
    assert (planned.objects, planned.requests) == (report.objects, report.parts) == (1 + 1, 2 + 1)
    assert_holds(local.at("step-2"), None, 1)


class EmptyValues(DefaultSavePlanner):
    """Writes values as nothing, and tensors of half their size."""

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:  # noqa: A002
        return io.BytesIO() if write_item.type == WriteItemType.BYTE_IO else object.bfloat16()


def test_an_empty_value_and_a_converted_tensor_in_the_base_do_not_matter(local):
    tensor = seeded("t", (6 * MIB // 2,))
    for step in (1, 2):
        url = local.at(f"step-{step}")
        writer = dos.ObjectStoreWriter(url, base="latest", progress=False)
        values = {"a": [1], "t": tensor}
        dcp.save(values, storage_writer=writer, planner=EmptyValues(), no_dist=True)
    assert writer.last_save is not None
    assert writer.last_save.copied_bytes > 6 * MIB
    loaded = dos.open(local.at("step-2")).read("t", progress=False)
    assert same_bits(loaded["t"], tensor.bfloat16())


def test_a_save_in_the_background_takes_a_base(local):
    save(local.at("step-1"))
    report = dos.async_save(state(1), local.at("step-2"), base="latest").result()
    assert 12 * MIB < report.copied_bytes < 13 * MIB
    assert_holds(local.at("step-2"), None, 1)


# --- what is compared, and how


def compared(
    local: Folder,
    base: dict[str, Any],
    state: dict[str, Any],
    *,
    base_config: dos.TransferConfig | None = None,
    change: Callable[[Index], Index] = lambda index: index,
    **settings: Any,
) -> Unchanged:
    """Compare a state with a base that has been saved of another, and copy nothing."""
    if not local.keys():
        save(local.at("step-1"), state=base, config=base_config)
    opened = open_base("latest", StoreSpec(local.at("step-2")))
    assert opened.index is not None
    return find_unchanged(
        Base(opened.url, change(opened.index)),
        create_default_local_save_plan(state, True).items,
        settings.pop("resolve", lambda item: state[item.index.fqn]),
        part_plan=plan_parts(0, 16 * MIB),
        **{
            "known_digests": {},
            "config": dos.TransferConfig(),
            "digests_of": block_digests,
            "whole_only": False,
            **settings,
        },
    )


def in_objects(unchanged: Unchanged) -> list[list[str]]:
    return [
        [item.item.index.fqn for run in runs for item in run.items] for runs in unchanged.objects
    ]


@pytest.mark.parametrize("at", [0, 4 * MIB, 9 * MIB - 1])
@pytest.mark.parametrize("on_device", [False, True])
def test_a_change_in_any_block_of_a_tensor_is_a_change(local, at, on_device, monkeypatch):
    if on_device:
        use_lane(monkeypatch, LateLane)
    tensor = torch.zeros(9 * MIB, dtype=torch.uint8)
    other = torch.zeros(9 * MIB, dtype=torch.uint8)
    other[at] = 1
    assert in_objects(compared(local, {"t": tensor}, {"t": tensor.clone()})) == [["t"]]
    assert compared(local, {}, {"t": other}).items == set()


def test_small_tensors_are_hashed_at_once_and_large_ones_a_few_at_a_time(local):
    state = {"small": torch.ones(MIB // 4), **{f"{n}": torch.ones(MIB // 4 + 1) for n in range(9)}}
    resolved: list[str] = []
    few, last, hashed = Event(), Event(), []

    def resolve(item: WriteItem) -> torch.Tensor:
        resolved.append(item.index.fqn)
        (few if len(resolved) == 3 else last if len(resolved) == 10 else Event()).set()
        return state[item.index.fqn]

    def digests_of(piece: Any) -> bytes:
        few.wait(30)
        last.wait(0.2 * (not hashed))
        hashed.append((piece.nbytes, len(resolved)))
        return block_digests(piece)

    config = dos.TransferConfig(hash_threads=1)
    unchanged = compared(local, state, state, config=config, resolve=resolve, digests_of=digests_of)
    assert len(unchanged.items) == 10
    assert [size for size, _ in hashed] == [MIB + 4] * 9
    assert 3 <= hashed[0][1] <= 1 + 4, "one that is hashed and a few that wait"


def test_the_ring_of_a_device_is_left_to_the_thread_that_compares(local, monkeypatch):
    use_lane(monkeypatch, LateLane)
    state = {f"{n}": torch.full((5 * MIB // 4,), float(n)) for n in range(3)}
    threads: list[threading.Thread] = []

    def digests_of(piece: Any) -> bytes:
        threads.append(threading.current_thread())
        return block_digests(piece)

    assert len(compared(local, state, state, digests_of=digests_of).items) == 3
    assert threads == [threading.current_thread()] * 6


def test_digests_that_staging_knows_are_not_computed_again(local):
    tensor = torch.ones(5 * MIB // 4)
    right = block_digests(tensor.view(torch.uint8).numpy())

    def never(piece: Any) -> bytes:
        raise AssertionError

    for known, same in ((right, True), (bytes(len(right)), False)):
        unchanged = compared(
            local,
            {"t": tensor},
            {"t": tensor},
            known_digests={(tensor.data_ptr(), tensor.nbytes): known},
            digests_of=never,
        )
        assert bool(unchanged.items) == same


def test_what_a_planner_makes_of_another_dtype_or_size_is_uploaded(local):
    tensor = torch.zeros(6, MIB // 4)
    for made in (tensor.view(torch.int32), tensor[:5], io.BytesIO(bytes(6 * MIB))):
        unchanged = compared(local, {"t": tensor}, {"t": tensor}, resolve=lambda item: made)  # noqa: B023
        assert unchanged.items == set()


def test_a_part_of_another_shape_is_uploaded_though_its_bytes_are_the_same(local):
    def turned(index: Index) -> Index:
        sizes = index.columns.chunk_sizes[::-1]
        return replace(index, columns=index.columns._replace(chunk_sizes=sizes))

    value = {"t": torch.zeros(6, MIB // 4)}
    assert compared(local, value, value, change=turned).items == set()


def test_a_planner_that_fails_says_of_which_tensor_with_a_base_too(local):
    class Failing(DefaultSavePlanner):
        def resolve_data(self, write_item: WriteItem) -> Any:
            if write_item.index.fqn == "b":
                raise ValueError("no b")
            return super().resolve_data(write_item)

    value = {"a": torch.ones(2), "b": torch.ones(2), "c": torch.ones(2)}
    save(local.at("step-1"), state=value)
    writer = dos.ObjectStoreWriter(local.at("step-2"), base="latest", progress=False)
    with pytest.raises(dcp.api.CheckpointException) as caught:
        dcp.save(value, storage_writer=writer, planner=Failing(), no_dist=True)
    error = cause(caught.value)
    assert isinstance(error, dos.errors.UnsupportedError)
    assert error.key == "b"
    assert "no b" in error.message


def test_a_run_of_just_the_least_part_is_copied(local, monkeypatch):
    value = {"t": torch.zeros(6 * MIB // 4)}
    ((run,),) = compared(local, value, value).objects
    for more, copied in ((0, [["t"]]), (1, [])):
        monkeypatch.setattr(base_module, "LEAST_PART_BYTES", run.size_bytes + more)
        assert in_objects(compared(local, value, value)) == copied


def test_a_run_is_cut_before_what_would_exceed_an_object(local):
    names = "abcdef"
    value = {name: torch.zeros(3 * MIB // 4) for name in names}
    (runs,) = compared(local, value, value).objects
    (run,) = runs
    assert run.is_whole
    assert xxhash.xxh3_128(run.framing).digest() == run.source.framing_digest
    most = run.items[5].end - run.items[2].end  # with the padding before each
    config = dos.TransferConfig(max_object_size_bytes=most)
    assert in_objects(compared(local, value, value, config=config)) == [[*"abc"], [*"def"]]
    config = dos.TransferConfig(max_object_size_bytes=most - 1)
    assert in_objects(compared(local, value, value, config=config)) == [[*"abc"], [*"de"]]
    whole = compared(local, value, value, config=config, whole_only=True)
    assert in_objects(whole) == [[*names]]
    assert whole.parts == 1
    assert whole.to_copy == whole.items
    changed = {**value, "f": torch.ones(3 * MIB // 4)}
    whole = compared(local, value, changed, whole_only=True)
    assert (in_objects(whole), len(whole.items)) == ([], 5)


@pytest.mark.parametrize(
    ("sizes", "most", "shares"),
    [
        ([], 9, []),
        ([3, 3, 3], 9, [[3], [3], [3]]),
        ([3] * 18, 9, [[3, 3]] * 2 + [[3]] * 14),
        ([3] * 32, 6, [[3, 3]] * 16),
        ([3] * 32, 5, [[3]] * 32),
        ([3, 4, 2] * 16, 6, [[3], [4, 2]] * 16),
        ([3, 3, 1] * 16, 6, [[3, 3], [1]] * 16),
    ],
)
def test_runs_share_sixteen_objects_or_as_many_as_their_limit_asks_for(sizes, most, shares):
    runs: Any = [SimpleNamespace(size_bytes=size) for size in sizes]
    assert [[run.size_bytes for run in share] for share in _shares(runs, most)] == shares


@pytest.mark.parametrize("has", [{"e_tag": None}, {"framing_digest": bytes(16)}])
def test_an_object_without_an_etag_or_with_other_framing_is_not_copied(has, local):
    def changed(index: Index) -> Index:
        entry, *others = index.objects
        return replace(index, objects=(msgspec.structs.replace(entry, **has), *others))

    value = {name: torch.zeros(3 * MIB // 2) for name in "ab"}
    small = dos.TransferConfig(max_object_size_bytes=6 * MIB, part_size_bytes=5 * MIB)
    unchanged = compared(local, value, value, base_config=small, change=changed)
    assert in_objects(unchanged) == [["b"]]
    assert {index.fqn for index in unchanged.items} == {"a", "b"}
    (refused,) = unchanged.refused
    assert "ETag" in refused.reason
    assert 6 * MIB < refused.size_bytes < 6 * MIB + 10_000


def test_an_object_of_the_base_with_a_hole_is_not_copied_and_takes_no_memory(local):
    value = {name: torch.zeros(3 * MIB // 2) for name in "ab"}

    def with_hole(index: Index) -> Index:
        offset = index.columns.offset.astype("int64")
        offset[1] += 1 << 60
        return replace(index, columns=index.columns._replace(offset=offset))

    unchanged = compared(local, value, value, change=with_hole)
    assert in_objects(unchanged) == []
    assert len(unchanged.items) == 2
    assert len(unchanged.refused) == 1


def test_a_checkpoint_above_which_there_is_nothing_has_no_latest_and_nothing_to_tell(
    local, monkeypatch
):
    monkeypatch.setattr(StoreSpec, "parent", lambda spec: (None, ""))
    events = Heard()
    save(local.at("step-1"), base="latest", on_event=events)
    assert of(NotCopied, events) == []


# --- ranks


def sharded(rank: int, edition: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2,))
    return {
        key: distribute_tensor(value, mesh, [Shard(0)])
        for key, value in state(edition).items()
        if isinstance(value, torch.Tensor)
    }


def train(rank: int, world_size: int, url: str) -> list[Any]:
    counts = {"index": 0, "list": 0}
    really_open = StoreSpec.open

    def counting(spec: StoreSpec) -> ObjectStore:
        recording = RecordingStore(really_open(spec))
        opened.append(recording)
        return recording

    opened: list[RecordingStore] = []
    StoreSpec.open = counting  # type: ignore[method-assign]
    try:
        with dos.CheckpointManager(url, base="latest", claim_run=False, sweep=False) as run:
            reports = [run.save(step, sharded(rank, step)) for step in (0, 1, 2)]
    finally:
        StoreSpec.open = really_open  # type: ignore[method-assign]
    asked = [one for store in opened for one in store.requests if one.verb in ("get", "list")]
    counts["index"] = sum(is_index_key(one.key) for one in asked)
    counts["list"] = sum(one.verb == "list" for one in asked)
    return [*reports, counts]


def test_ranks_decide_alone_by_an_index_that_is_read_once(local):
    (*_, report, counts), (*_, same, others) = run_ranks(2, train, local.url)
    # A rank has 768 KiB of each tensor, which lie together in the second checkpoint.
    assert 12 * MIB < report.copied_bytes < 13 * MIB
    assert report == same
    assert counts["index"] == 2
    # One to find the base and one to see that there are no later steps; then commits alone.
    assert counts["list"] == 2 + 3
    assert others == {"index": 0, "list": 0}
    want = {key: value for key, value in state(2).items() if isinstance(value, torch.Tensor)}
    assert_holds(f"{local.url}/step-2", None, want)


def test_a_base_that_is_named_is_that_of_every_save(local):
    save(local.at("other"))
    events = Heard()
    with dos.CheckpointManager(local.at("run"), base=local.at("other"), on_event=events) as run:
        for step in (1, 2):
            assert run.save(step, state(step)).copied_bytes > 12 * MIB
        local.delete("other/_COMMIT")
        run.save(3, state(3))
    assert [one.base for one in of(NotCopied, events)] == [local.at("other")]


def see_no_end(rank: int, world_size: int, url: str) -> int:
    """Save steps 1 to 3; rank 1 gets an error at the end of step 2."""
    really_save, saves = api.save_planned, 0

    def failing(*args: Any, **settings: Any) -> Any:
        nonlocal saves
        report, saves = really_save(*args, **settings), saves + 1
        if (rank, saves) == (1, 2):
            raise dos.errors.RankFailedError("lost the report")
        return report

    api.save_planned = failing
    try:
        with dos.CheckpointManager(url, base="latest", claim_run=False, sweep=False) as run:
            run.save(1, sharded(rank, 1))
            with suppress(dos.errors.RankFailedError):
                run.save(2, sharded(rank, 2))
            return run.save(3, sharded(rank, 3)).copied_bytes
    finally:
        api.save_planned = really_save


def test_ranks_that_know_of_other_steps_have_one_base(local):
    assert min(run_ranks(2, see_no_end, local.url)) > 12 * MIB
    want = {key: value for key, value in state(3).items() if isinstance(value, torch.Tensor)}
    assert_holds(f"{local.url}/step-3", None, want)


def save_differently(rank: int, world_size: int, url: str) -> None:
    for save in (dos.save, dos.async_save):
        with pytest.raises(ConfigError, match="base"):
            save({"t": torch.ones(3)}, url, base="latest" if rank else None, progress=False)


def test_ranks_with_different_bases_are_refused_together(local):
    run_ranks(2, save_differently, local.at("step-1"))
    assert local.keys() == []


# --- a base that cannot be used


def test_a_base_that_can_never_be_copied_from_is_refused():
    url = memory_url()
    with pytest.raises(ConfigError, match="gs://"):
        dos.save({"t": torch.ones(1)}, url, base="gs://bucket/run/step-1")
    with pytest.raises(InvalidUrlError, match="latest"):
        dos.async_save({"t": torch.ones(1)}, url, base="newest")
    with pytest.raises(ConfigError, match="gs://"):
        dos.CheckpointManager(url, base="gs://bucket/run/step-1")
    with pytest.raises(ConfigError, match="gs://"):
        dos.ObjectStoreWriter(url, base="gs://bucket/run/step-1")


def one_run(edition: int = 0) -> dict[str, Any]:
    """Just enough for a copy, and what changes."""
    return {"t": seeded("t", (6 * MIB // 4,)), "step": {"edition": edition}}


def damaged(local: Folder) -> None:
    (index,) = [key for key in local.keys("base") if is_index_key(key)]
    local.flip_byte(f"base/{index}", 99)


def foreign(local: Folder) -> None:
    for key in local.keys("base"):
        local.delete(f"base/{key}")
    writer = dcp.FileSystemWriter(local.at("base").removeprefix("file://"))
    dcp.save({"t": one_run()["t"]}, storage_writer=writer, no_dist=True)


def data_of(local: Folder) -> str:
    (key,) = [key for key in local.keys("base") if key.endswith(".distcp")]
    return f"base/{key}"


def huge(local: Folder) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("you tried to allocate 1 TiB")

    base_module.tensor_frame = SimpleNamespace(**{**vars(tensor_frame), "frame": fail})


HARMS: dict[str, Callable[[Folder], object]] = {
    "deleted": lambda local: dos.delete(local.at("base")),
    "damaged": damaged,
    "foreign": foreign,
    "swept": lambda local: local.delete(data_of(local)),
    "overwritten": lambda local: local.put(data_of(local), bytes(len(local.get(data_of(local))))),
    "as by a torch with other framing": lambda _: torch.serialization.set_crc32_options(
        not torch.serialization.get_crc32_options()
    ),
    "with a dtype that this torch does not have": lambda _: setattr(
        base_module, "known_dtype", lambda name: None
    ),
    "with tensors larger than this machine's memory": huge,
}


@pytest.mark.parametrize("harm", [*HARMS, "never there"])
def test_whatever_the_base_is_all_is_saved_and_the_reason_told(harm, local, caplog, monkeypatch):
    options = torch.serialization.get_crc32_options()
    for name in ("known_dtype", "tensor_frame"):  # to be put back
        monkeypatch.setattr(base_module, name, getattr(base_module, name))
    url = local.at("base")
    if harm in HARMS:
        save(url, state=one_run())
        save(local.at("other"), state={"n": 1})  # so that the base may be deleted
        HARMS[harm](local)
    events = Heard()
    try:
        with caplog.at_level(logging.WARNING, logger="dcp_objstore"):
            report = save(local.at("step-2"), state=one_run(1), base=url, on_event=events)
    finally:
        torch.serialization.set_crc32_options(options)
    assert (report.copied_bytes, report.uploaded_bytes) == (0, report.total_bytes)
    assert_holds(local.at("step-2"), None, one_run(1))
    (told,) = of(NotCopied, events)
    assert told.base == url
    assert " ".join(told.reason.split()) in " ".join(caplog.text.split())
    was_compared = harm not in ("deleted", "damaged", "foreign", "never there")
    assert (6 * MIB < told.not_copied_bytes < 7 * MIB) == was_compared


def test_a_store_that_does_not_copy_uploads_and_says_so():
    events = Heard()
    url = memory_url()
    save(url)
    report = save(url.replace("step-1", "step-2"), base=url, edition=1, on_event=events)
    assert report.copied_bytes == 0
    assert [one.base for one in of(NotCopied, events)] == [url]
    assert_holds(url.replace("step-1", "step-2"), None, 1)


class Refusing(WrappedStore):
    """Makes no copies under these numbers."""

    numbers: tuple[int, ...] = ()

    def copy(self, key: str, *args: Any, **settings: Any) -> Version:
        if int(key.split(".", maxsplit=1)[0].rsplit("_", maxsplit=1)[-1]) in self.numbers:
            raise dos.errors.PermissionDeniedError("you may not read that")
        return super().copy(key, *args, **settings)


@pytest.mark.parametrize("refused", [0, 1])
def test_what_one_copy_fails_to_bring_is_uploaded_and_the_others_stay(
    local, through, monkeypatch, refused
):
    save(local.at("step-1"))
    monkeypatch.setattr(Refusing, "numbers", (refused,))
    requests: list[Request] = []
    through(lambda store: RecordingStore(Refusing(store), requests))
    events = Heard()
    report = save(local.at("step-2"), None, 1, base="latest", on_event=events)
    (told,) = of(NotCopied, events)
    assert "may not" in told.reason
    assert report.copied_bytes + told.not_copied_bytes > 12 * MIB
    assert 6 * MIB < report.copied_bytes < 7 * MIB
    # Rule 3: the key of a copy that failed, whose answer may only be lost, is not used again.
    written = [
        one.key
        for one in requests
        if one.verb in ("copy", "put", "put_stream") and one.key.endswith(".distcp")
    ]
    names = [parse_data_key(key) for key in written]
    assert sorted((name.rank, name.number) for name in names if name) == [(0, 0), (0, 1), (0, 2)]
    assert_holds(local.at("step-2"), None, 1)


def test_what_copies_fail_to_bring_is_planned_for_the_limit_of_parts(local, through, monkeypatch):
    """Here an object may have 2 parts: 1.5 MiB fit any, and 13.5 do not."""
    save(local.at("step-1"))
    monkeypatch.setattr("dcp_objstore.transfer.parts._PLANNED_PARTS", 2)
    monkeypatch.setattr("dcp_objstore.transfer.upload.MAX_PARTS", 2)
    monkeypatch.setattr(Refusing, "numbers", (0, 1))
    through(Refusing)
    config = dos.TransferConfig(part_size_bytes=5 * MIB)
    report = save(local.at("step-2"), None, 1, base="latest", config=config)
    assert (report.copied_bytes, report.parts) == (0, 2)
    assert_holds(local.at("step-2"), None, 1)


def test_a_tensor_that_changes_after_it_was_compared_has_the_digests_of_what_is_sent(
    local, monkeypatch
):
    tensor = torch.zeros(6 * MIB // 4)
    save(local.at("step-1"), state={"t": tensor})
    tensor[-1] = 1
    really_copy = Unchanged.copy

    def change(self: Unchanged, *args: Any) -> None:
        tensor[1000] = 2  # one value, which no watched word sees
        really_copy(self, *args)

    monkeypatch.setattr(Unchanged, "copy", change)
    save(local.at("step-2"), state={"t": tensor}, base="latest")
    assert tensor[1000] == 2
    assert_holds(local.at("step-2"), None, {"t": tensor})


# --- while the store copies


@pytest.mark.usefixtures("usual_signals")
def test_ctrl_c_during_a_copy_leaves_no_upload_and_nothing_committed(bucket, proxy):
    save(bucket.at("step-1"), bucket)
    held = proxy.hold(is_copy)

    def interrupt() -> None:
        held.wait()
        signal.raise_signal(signal.SIGINT)
        time.sleep(0.2)
        held.release()

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        save(bucket.at("step-2"), bucket, 1, base="latest", storage_options=proxy.storage_options)
    thread.join()
    assert_nothing_visible(bucket, "step-2")
    report = save(bucket.at("step-2"), bucket, 1, base="latest")
    assert report.copied_bytes > 12 * MIB
    assert_holds(bucket.at("step-2"), bucket, 1)
