"""Ranks that load together: the store sends each byte once, and a failure is everybody's."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

import dcp_objstore as dos
from benchmarks.sink import Sink, fetch_stats
from dcp_objstore.config import MIB, TransferConfig
from dcp_objstore.errors import (
    CheckpointCorruptError,
    CheckpointGoneError,
    RankFailedError,
    UnsupportedError,
)
from tests.support.checkpoints import cause, causes
from tests.support.ranks import run_ranks, try_ranks
from tests.support.servers import Bucket
from tests.support.states import same_bits, seeded

Options = Mapping[str, object]
# Rounds of at most one block each, so that there are many.
SMALL = TransferConfig(memory_budget_bytes=8 * MIB, request_size_bytes=4 * MIB)
SHAPES = {"wide": (1024, 3000), "tall": (5000, 700), "norm": (999,), "scale": ()}
PAYLOAD_BYTES = 4 * sum(torch.Size(shape).numel() for shape in SHAPES.values())


@pytest.fixture(scope="module")
def sink() -> Iterator[Sink]:
    with Sink(keep=True) as running:
        yield running


@pytest.fixture(scope="module")
def saved(sink: Sink) -> str:
    """The URL of a checkpoint that four ranks have saved."""
    run_ranks(4, save_sharded, "s3://bucket/once", sink.storage_options)
    return "s3://bucket/once"


def full_state() -> dict[str, torch.Tensor]:
    return {key: seeded(key, shape) for key, shape in SHAPES.items()}


def blank(placements: list[Placement] | None) -> dict[str, Any]:
    """Everything zero; tensors of two dimensions spread as `placements` say, others replicated."""
    state: dict[str, Any] = {"step": 0}
    mesh = None if placements is None else init_device_mesh("cpu", (dist.get_world_size(),))
    for key, shape in SHAPES.items():
        tensor = torch.zeros(shape)
        if mesh is not None and len(shape) == 2:
            state[key] = distribute_tensor(tensor, mesh, placements)
        else:
            state[key] = tensor
    return state


def assert_loaded(state: Mapping[str, Any]) -> None:
    assert state["step"] == 7
    for key, saved in full_state().items():
        value = state[key]
        if isinstance(value, DTensor):
            like = distribute_tensor(saved, value.device_mesh, value.placements)
            assert same_bits(value.to_local(), like.to_local()), key
        else:
            assert same_bits(value, saved), key


def save_sharded(rank: int, world: int, url: str, options: Options) -> None:
    mesh = init_device_mesh("cpu", (world,))
    state = {
        key: distribute_tensor(value, mesh, [Shard(0)]) if value.ndim == 2 else value
        for key, value in full_state().items()
    }
    dos.save({**state, "step": 7}, url, storage_options=options, progress=False)


def load(
    rank: int, world: int, url: str, options: Options, dim: int | None, **settings: Any
) -> dos.LoadReport:
    placements = None if dim is None else [Replicate() if dim < 0 else Shard(dim)]
    state = blank(placements)
    report = dos.load(state, url, storage_options=options, progress=False, **settings)
    assert_loaded(state)
    return report


def counted(sink: Sink) -> tuple[int, int]:
    """GETs and bytes sent since the last time."""
    stats = sink.stats()
    fetch_stats(sink.endpoint_url, reset=True)
    return stats["requests"].get("GET", 0), stats["sent_bytes"]


@pytest.mark.parametrize("config", [TransferConfig(), SMALL], ids=["one round", "many rounds"])
@pytest.mark.parametrize("verify", ["strict", "off"])
@pytest.mark.parametrize(
    ("dim", "most"),
    [
        pytest.param(None, 1.05, id="plain replicas"),
        pytest.param(-1, 1.05, id="DTensor replicas"),
        pytest.param(0, 1.05, id="same layout"),
        pytest.param(1, 1.05, id="other layout"),
    ],
)
def test_the_store_sends_each_byte_once_whatever_the_number_of_ranks(
    sink: Sink, saved: str, dim: int | None, most: float, verify: str, config: TransferConfig
) -> None:
    counted(sink)
    settings = {"verify": verify, "config": config}
    reports = run_ranks(5, load_with, saved, sink.storage_options, dim, settings)
    gets, sent_bytes = counted(sink)
    fetched_bytes = sum(report.total_bytes for report in reports)
    # Marker and index once, and the data.
    assert gets == 2 + sum(report.requests for report in reports)
    assert PAYLOAD_BYTES <= fetched_bytes <= most * PAYLOAD_BYTES
    assert fetched_bytes < sent_bytes < fetched_bytes + 64 * 1024
    received_bytes = sum(report.received_bytes for report in reports)
    if dim is None or dim < 0:
        assert received_bytes >= 4 * PAYLOAD_BYTES
        # Spread evenly, as far as whole requests go.
        largest = max(report.total_bytes for report in reports)
        assert largest - fetched_bytes / 5 <= 8 * MIB
    if dim == 1:
        # What a rank does not want of a block is not sent to it (nor what is fetched by it).
        assert 0.5 * PAYLOAD_BYTES < received_bytes < PAYLOAD_BYTES


def load_with(
    rank: int, world: int, url: str, options: Options, dim: int | None, settings: dict[str, Any]
) -> dos.LoadReport:
    return load(rank, world, url, options, dim, **settings)


def test_without_read_once_every_rank_fetches_what_it_needs(sink: Sink, saved: str) -> None:
    settings = {"read_once": False}
    reports = run_ranks(3, load_with, saved, sink.storage_options, None, settings)
    assert sum(report.total_bytes for report in reports) >= 3 * PAYLOAD_BYTES
    assert {report.received_bytes for report in reports} == {0}


def load_with_dcp(rank: int, world: int, url: str, options: Options, told: bool) -> list[int]:
    """Ranks 1 and 2 of three load by themselves, told of their group or not."""
    group = dist.new_group([1, 2])
    if rank == 0:
        return [0, 0]
    reader = dos.ObjectStoreReader(
        url, storage_options=options, process_group=group if told else None
    )
    state = blank(None)
    dcp.load(state, storage_reader=reader, process_group=group)
    assert_loaded(state)
    assert reader.last_load is not None
    return [reader.last_load.total_bytes, reader.last_load.received_bytes]


@pytest.mark.parametrize("told", [True, False])
def test_a_reader_that_was_not_told_of_a_subgroup_loads_without_sharing(
    sink: Sink, saved: str, told: bool
) -> None:
    found = run_ranks(3, load_with_dcp, saved, sink.storage_options, told)
    fetched, received = (sum(column) for column in zip(*found, strict=True))
    if told:
        assert fetched < 1.05 * PAYLOAD_BYTES < 1.1 * received
    else:
        assert fetched >= 2 * PAYLOAD_BYTES
        assert received == 0


def load_across_hosts(
    rank: int, world: int, url: str, options: Options, dim: int | None, folder: str, hosts: int
) -> dos.LoadReport:
    """As if the ranks were on so many hosts, in turn; neighbours then have no memory in common."""
    from dcp_objstore.read.peers import shared_memory as slots

    boot_id = Path(folder) / f"host-{rank % hosts}"
    boot_id.write_text(f"host {rank % hosts}")
    kept, slots._BOOT_ID = slots._BOOT_ID, boot_id
    try:
        return load(rank, world, url, options, dim, config=SMALL)
    finally:
        slots._BOOT_ID = kept


@pytest.mark.parametrize("hosts", [2, 4])
@pytest.mark.parametrize("dim", [None, 0, 1])
def test_ranks_on_several_hosts_send_each_other_what_they_want(
    sink: Sink, saved: str, tmp_path: Path, dim: int | None, hosts: int
) -> None:
    arguments = (saved, sink.storage_options, dim, str(tmp_path), hosts)
    reports = run_ranks(4, load_across_hosts, *arguments)
    fetched_bytes = sum(report.total_bytes for report in reports)
    received_bytes = sum(report.received_bytes for report in reports)
    assert PAYLOAD_BYTES <= fetched_bytes <= 1.05 * PAYLOAD_BYTES
    if dim is None:
        assert received_bytes >= 3 * PAYLOAD_BYTES


# Failures: on one rank alone, in the midst of many rounds.


def load_small(rank: int, world: int, url: str, options: Options) -> None:
    load(rank, world, url, options, None, config=SMALL)


@pytest.mark.backends("seaweed")
def test_a_damaged_block_that_one_rank_fetches_fails_all_with_the_same_error(
    bucket: Bucket,
) -> None:
    url, options = bucket.at("step-1"), bucket.storage_options
    run_ranks(2, save_sharded, url, options)
    payload = seeded("tall", SHAPES["tall"])[4000:4001].numpy().tobytes()
    for key in bucket.keys("step-1"):
        if key.endswith(".distcp"):
            at = bucket.get(f"step-1/{key}").find(payload)
            if at >= 0:
                damaged = key
                bucket.flip_byte(f"step-1/{key}", at + 9)
    outcomes = try_ranks(4, load_small, url, options)
    errors = [outcome.error for outcome in outcomes]
    assert {type(error) for error in errors} == {CheckpointCorruptError}
    assert len({str(error) for error in errors}) == 1
    assert (errors[0].key, errors[0].object_key) == ("tall", damaged)
    assert "block 0" in str(errors[0]) or "block 1" in str(errors[0])


@pytest.mark.backends("seaweed")
def test_an_object_that_is_deleted_while_loading_fails_all_ranks_by_its_name(
    bucket: Bucket,
) -> None:
    url, options = bucket.at("step-1"), bucket.storage_options
    run_ranks(2, save_sharded, url, options)
    (victim,) = [key for key in bucket.keys("step-1") if key.startswith("__1_")]
    bucket.delete(f"step-1/{victim}")
    errors = [outcome.error for outcome in try_ranks(3, load_small, url, options)]
    assert {type(error) for error in errors} == {CheckpointCorruptError}
    assert {error.object_key for error in errors} == {victim}


def load_replaced(rank: int, world: int, url: str, options: Options) -> None:
    """Rank 0 replaces the checkpoint when all have opened it; the old objects are swept."""
    state = blank(None)
    reader = dos.ObjectStoreReader(url, storage_options=options, config=SMALL)
    dcp.load(state, planner=Replacing(url, options), storage_reader=reader)


class Replacing(DefaultLoadPlanner):
    def __init__(self, url: str, options: Options) -> None:
        super().__init__()
        self.url, self.options = url, options

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        from dcp_objstore.stores import open_store

        store = open_store(self.url, self.options)
        old = [meta.key for meta in store.list("") if meta.key.endswith(".distcp")]
        state = {"w": torch.ones(3)}
        writer = dos.ObjectStoreWriter(self.url, storage_options=self.options, overwrite=True)
        dcp.save(state, storage_writer=writer, no_dist=True)
        for key in old:
            store.delete(key)
        return super().create_global_plan(global_plan)


@pytest.mark.backends("seaweed")
def test_a_checkpoint_that_is_replaced_while_loading_is_gone_for_all_ranks(bucket: Bucket) -> None:
    url, options = bucket.at("step-1"), bucket.storage_options
    run_ranks(2, save_sharded, url, options)
    for outcome in try_ranks(3, load_replaced, url, options):
        assert isinstance(cause(outcome.error), CheckpointGoneError), outcome


class Failing(DefaultLoadPlanner):
    """On one rank, fails in what comes before the first byte, or in what follows some."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        if self.how == "resolve":
            raise ValueError("no such tensor here")
        if self.how == "interrupt":
            raise KeyboardInterrupt
        return super().resolve_tensor(read_item)

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "late":
            raise ValueError("cannot take the value")
        super().load_bytes(read_item, value)

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        plan = super().finish_plan(new_plan)
        if self.how == "fewer":
            plan.items = plan.items[1:]
        return plan


def load_failing(rank: int, world: int, url: str, options: Options, how: str) -> float:
    started = time.monotonic()
    planner = Failing(how if rank == 1 else "not")
    reader = dos.ObjectStoreReader(
        url, storage_options=options, config=SMALL, process_group=dist.group.WORLD
    )
    try:
        dcp.load(blank(None), planner=planner, storage_reader=reader)
    except BaseException:
        # Well below the group's time-out, for which they would wait if nobody told them.
        assert time.monotonic() - started < 30
        raise
    return time.monotonic() - started


@pytest.mark.parametrize(
    ("how", "kind", "text"),
    [
        ("resolve", RankFailedError, "no such tensor here"),
        ("late", RankFailedError, "cannot take the value"),
        ("interrupt", RankFailedError, "KeyboardInterrupt"),
        ("fewer", UnsupportedError, "read_once=False"),
    ],
)
@pytest.mark.backends("seaweed")
def test_a_rank_that_fails_fails_all_and_none_waits_for_it(
    bucket: Bucket, how: str, kind: type[Exception], text: str
) -> None:
    url, options = bucket.at("step-1"), bucket.storage_options
    run_ranks(2, save_sharded, url, options)
    outcomes = try_ranks(3, load_failing, url, options, how)
    for outcome in outcomes:
        # Ctrl-C stays what it is where it was pressed; the others hear of it as an error.
        error = causes(outcome.error)[0] if how == "interrupt" else cause(outcome.error)
        assert type(error) is kind, outcome
        assert error.rank == 1
        assert text in str(error)
    # The ranks are in step again: the next load works.
    run_ranks(3, load_small, url, options)


@pytest.mark.backends("seaweed")
def test_a_rank_that_is_killed_while_loading_fails_the_others_at_once(bucket: Bucket) -> None:
    url, options = bucket.at("step-1"), bucket.storage_options
    run_ranks(2, save_sharded, url, options)
    outcomes = try_ranks(3, load_failing, url, options, "kill")
    assert outcomes[1].exit_signal is signal.SIGKILL
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.error is not None and not outcome.timed_out, outcome
    run_ranks(3, load_small, url, options)


class Late(DefaultLoadPlanner):
    """On one rank, does not come to the reading: it fails, or waits until the others have read."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        if self.how == "fails":
            raise ValueError("no plan of mine")
        if self.how == "slow":
            dist.distributed_c10d._get_default_store().wait(["read-0", "read-2"])
        if self.how == "own plan":
            return LoadPlan(new_plan.items)
        return super().finish_plan(new_plan)


def load_late(
    rank: int, world: int, url: str, options: Options, how: str, told: bool
) -> dos.LoadReport:
    reader = dos.ObjectStoreReader(
        url,
        storage_options=options,
        process_group=dist.group.WORLD if told else None,
        config=TransferConfig(peer_timeout_seconds=1),
    )

    class Telling(Late):
        def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
            dist.distributed_c10d._get_default_store().set(f"read-{rank}", "")
            super().commit_tensor(read_item, tensor)

    state = blank(None)
    dcp.load(state, planner=Telling(how if rank == 1 else "not"), storage_reader=reader)
    assert_loaded(state)
    assert reader.last_load is not None
    return reader.last_load


@pytest.mark.parametrize("told", [True, False])
def test_a_planner_that_fails_before_the_reading_fails_all_with_its_error_alone(
    sink: Sink, saved: str, told: bool
) -> None:
    outcomes = try_ranks(3, load_late, saved, sink.storage_options, "fails", told)
    for outcome in outcomes:
        (error,) = causes(outcome.error)
        assert isinstance(error, ValueError), outcome
    run_ranks(3, load_small, saved, sink.storage_options)


@pytest.mark.parametrize("how", ["slow", "own plan"])
def test_ranks_do_not_fail_for_one_that_is_late_or_goes_its_own_way(
    sink: Sink, saved: str, how: str
) -> None:
    reports = run_ranks(3, load_late, saved, sink.storage_options, how, True)
    assert {report.received_bytes for report in reports} == {0}
    assert sum(report.total_bytes for report in reports) >= 3 * PAYLOAD_BYTES
    run_ranks(3, load_small, saved, sink.storage_options)


def load_mostly_own(rank: int, world: int, url: str, options: Options) -> dos.LoadReport:
    """Each rank asks for a tensor of its own, and all for a small one."""
    state = {f"own{rank}": torch.zeros(2 * MIB), "norm": torch.zeros(100)}
    report = dos.load(state, url, storage_options=options, progress=False)
    assert state[f"own{rank}"][-1] == rank + 1
    assert same_bits(state["norm"], torch.ones(100))
    return report


def test_ranks_do_not_wait_for_each_other_to_save_next_to_nothing(sink: Sink) -> None:
    url, options = "s3://bucket/own", sink.storage_options
    state = {f"own{n}": torch.full((2 * MIB,), n + 1.0) for n in range(3)}
    dos.save({**state, "norm": torch.ones(100)}, url, storage_options=options, progress=False)
    reports = run_ranks(3, load_mostly_own, url, options)
    assert {report.received_bytes for report in reports} == {0}
    assert sum(report.total_bytes for report in reports) < 1.05 * 3 * 8 * MIB
