"""Ranks that load together: the store sends each byte once, and a failure is everybody's."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import Mock
from weakref import finalize, ref

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
    CheckpointNotFoundError,
    ConfigError,
    RankFailedError,
    UnsupportedError,
)
from dcp_objstore.observe.events import Failed
from dcp_objstore.read import reader as reader_module
from dcp_objstore.read.peers import exchange, shared_memory
from dcp_objstore.read.peers.meeting import open_once
from tests.support.campaign import cases
from tests.support.checkpoints import without_collector
from tests.support.listening import Heard, of
from tests.support.ranks import run_ranks, try_ranks
from tests.support.states import same_bits, seeded

Options = Mapping[str, object]
# Rounds of at most one block each, so that there are many.
SMALL = TransferConfig(memory_budget_bytes=8 * MIB, request_size_bytes=4 * MIB)
SHAPES = {"wide": (512, 3000), "tall": (2500, 700), "norm": (999,), "scale": ()}
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


def full_state(step: int) -> dict[str, torch.Tensor]:
    return {key: seeded(f"{key} {step}", shape) for key, shape in SHAPES.items()}


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


def assert_loaded(state: Mapping[str, Any], step: int = 7) -> None:
    assert state["step"] == step
    for key, saved in full_state(step).items():
        value = state[key]
        if isinstance(value, DTensor):
            like = distribute_tensor(saved, value.device_mesh, value.placements)
            assert same_bits(value.to_local(), like.to_local()), key
        else:
            assert same_bits(value, saved), key


def save_sharded(
    rank: int, world: int, url: str, options: Options, step: int = 7, local: str | None = None
) -> None:
    mesh = init_device_mesh("cpu", (world,))
    state = {
        key: distribute_tensor(value, mesh, [Shard(0)]) if value.ndim == 2 else value
        for key, value in full_state(step).items()
    }
    dos.save({**state, "step": step}, url, storage_options=options, local=local, progress=False)


def load(
    rank: int,
    world: int,
    url: str,
    options: Options,
    dim: int | None,
    step: int = 7,
    **settings: Any,
) -> dos.reports.LoadReport:
    placements = None if dim is None else [Replicate() if dim < 0 else Shard(dim)]
    state = blank(placements)
    report = dos.load(state, url, storage_options=options, progress=False, **settings)
    assert_loaded(state, step)
    return report


def load_stage(rank: int, world: int, url: str, options: Options) -> list[float]:
    """Load this rank's layer under a name that all ranks give theirs, as pipeline stages do."""
    state = {"stage": {"w": torch.zeros(4)}}
    rules = [(rf"^layers\.{rank}\.", "stage.")]
    dos.load(state, url, storage_options=options, rename=rules, progress=False)
    return state["stage"]["w"].tolist()


def test_each_rank_renames_by_its_own_rules(sink):
    url = "s3://bucket/stages"
    state = {"layers": {str(rank): {"w": torch.full((4,), 10.0 + rank)} for rank in range(3)}}
    dos.save(state, url, storage_options=sink.storage_options, progress=False)
    found = run_ranks(3, load_stage, url, sink.storage_options)
    assert found == [[10.0] * 4, [11.0] * 4, [12.0] * 4]


def counted(sink: Sink) -> tuple[int, int]:
    """GETs and bytes sent since the last time."""
    stats = sink.stats()
    fetch_stats(sink.endpoint_url, reset=True)
    return stats["requests"].get("GET", 0), stats["sent_bytes"]


# The dimension that is sharded; None: plain replicas, -1: DTensor replicas, 0: as it was saved.
LAYOUTS = (None, -1, 0, 1)


@pytest.mark.parametrize(
    ("dim", "verify", "config"),
    cases(
        product(LAYOUTS, [True, False], [TransferConfig(), SMALL]),
        default=[(1, True, SMALL), (-1, True, TransferConfig())],
    ),
)
def test_the_store_sends_each_byte_once_whatever_the_number_of_ranks(
    sink, saved, dim, verify, config
):
    counted(sink)
    settings = {"verify": verify, "config": config}
    reports = run_ranks(5, load_with, saved, sink.storage_options, dim, settings)
    gets, sent_bytes = counted(sink)
    fetched_bytes = sum(report.total_bytes for report in reports)
    # Marker and index once, and the data.
    assert gets == 2 + sum(report.requests for report in reports)
    assert PAYLOAD_BYTES <= fetched_bytes <= 1.05 * PAYLOAD_BYTES
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
) -> dos.reports.LoadReport:
    return load(rank, world, url, options, dim, **settings)


def load_with_dcp(rank: int, world: int, url: str, options: Options) -> list[int]:
    """Ranks 1 and 2 of three load by themselves."""
    group = dist.new_group([1, 2])
    if rank == 0:
        return [0, 0]
    reader = dos.ObjectStoreReader(url, storage_options=options, process_group=group)
    state = blank(None)
    dcp.load(state, storage_reader=reader, process_group=group)
    assert_loaded(state)
    assert reader.last_load is not None
    return [reader.last_load.total_bytes, reader.last_load.received_bytes]


def test_a_reader_shares_in_the_group_that_it_was_told_of(sink, saved):
    found = run_ranks(3, load_with_dcp, saved, sink.storage_options)
    fetched, received = (sum(column) for column in zip(*found, strict=True))
    assert fetched < 1.05 * PAYLOAD_BYTES < 1.1 * received


def load_across_hosts(
    rank: int, world: int, url: str, options: Options, folder: str
) -> dos.reports.LoadReport:
    """As if the ranks were on two hosts, in turn; neighbours then have no memory in common."""
    boot_id = Path(folder) / f"host-{rank % 2}"
    boot_id.write_text(f"host {rank % 2}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_memory, "_BOOT_ID", boot_id)
        return load(rank, world, url, options, 1, config=SMALL)


def test_ranks_on_several_hosts_send_each_other_what_they_want(sink, saved, tmp_path):
    reports = run_ranks(3, load_across_hosts, saved, sink.storage_options, str(tmp_path))
    fetched_bytes = sum(report.total_bytes for report in reports)
    assert PAYLOAD_BYTES <= fetched_bytes <= 1.05 * PAYLOAD_BYTES


@pytest.fixture
def alone() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = dist.group.WORLD
    assert group is not None
    yield group
    dist.destroy_process_group()


# Failures: on one rank alone, during many rounds.


def test_an_error_where_the_checkpoint_is_opened_goes_without_the_garbage_collector(alone):
    """Its traceback has what was opened till then."""

    class Opened:
        pass

    def fail() -> Any:
        opened = Opened()
        finalize(opened, gone.append, True)
        raise CheckpointNotFoundError("not there")

    gone: list[bool] = []
    with without_collector():
        with pytest.raises(CheckpointNotFoundError):
            open_once(fail, alone, "memory://url")
        assert gone


def load_small(rank: int, world: int, url: str, options: Options) -> None:
    load(rank, world, url, options, None, config=SMALL)


class Planner(DefaultLoadPlanner):
    """On rank 1, fails before the first byte or after some, or does not come to the reading."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how if dist.get_rank() == 1 else ""

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        if self.how == "no plan":
            raise ValueError("no plan of mine")
        if self.how == "own plan":
            return LoadPlan(new_plan.items)
        plan = super().finish_plan(new_plan)
        if self.how == "fewer":
            plan.items = [item for item in plan.items if item.dest_index.fqn != "wide"]
        return plan

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "late":
            raise ValueError("cannot take the value")
        super().load_bytes(read_item, value)


def load_by_planner(
    rank: int, world: int, url: str, options: Options, how: str
) -> dos.reports.LoadReport | None:
    """Load, and once more, since the ranks are in step again."""
    heard, started = Heard(), time.monotonic()
    is_late = how in ("no plan", "own plan")
    config = dataclasses.replace(SMALL, peer_timeout_seconds=0.5) if is_late else SMALL
    reader = dos.ObjectStoreReader(
        url, storage_options=options, config=config, process_group=dist.group.WORLD, on_event=heard
    )
    state = blank(None)
    try:
        dcp.load(state, planner=Planner(how), storage_reader=reader)
        assert_loaded(state)
    except BaseException:
        # Well below the group's time-out, for which they would wait if nobody told them.
        assert time.monotonic() - started < 100
        if rank != 1 and how != "no plan":
            assert [one.failed_rank for one in of(Failed, heard)] == [1]
        raise
    finally:
        if how != "kill":
            load_small(rank, world, url, options)
    return reader.last_load


@pytest.mark.parametrize(
    ("how", "kind", "text"),
    [
        ("late", UnsupportedError, "cannot take the value"),
        ("fewer", UnsupportedError, "read_once=False"),
        ("no plan", ValueError, "no plan of mine"),
    ],
)
def test_a_rank_that_fails_fails_all_and_none_waits_for_it(sink, saved, how, kind, text):
    for outcome in try_ranks(3, load_by_planner, saved, sink.storage_options, how):
        assert set(outcome.error.failures) == {1}  # no other has failed
        error, _ = outcome.error.failures[1]
        assert type(error) is kind, outcome
        assert text in str(error)


def test_a_rank_that_is_killed_while_loading_fails_the_others_at_once(sink, saved):
    outcomes = try_ranks(3, load_by_planner, saved, sink.storage_options, "kill")
    assert outcomes[1].exit_signal is signal.SIGKILL
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.error is not None and not outcome.timed_out, outcome


def test_ranks_do_not_fail_for_one_that_goes_its_own_way(sink, saved):
    reports = run_ranks(3, load_by_planner, saved, sink.storage_options, "own plan")
    assert {report.received_bytes for report in reports} == {0}
    assert sum(report.total_bytes for report in reports) >= 3 * PAYLOAD_BYTES


def kept_by_a_failed_load(rank: int, world: int, url: str, options: Options) -> int:
    """How many tensors are in memory after a load that fails while ranks find others' slots."""
    kept = 0
    for _ in range(2):  # the first one may import modules, which leave garbage
        state = blank(None)
        tensors = [ref(value) for value in state.values() if isinstance(value, torch.Tensor)]
        with without_collector():
            with pytest.MonkeyPatch.context() as patch:
                if rank == 1:
                    patch.setattr(exchange, "attach", Mock(side_effect=MemoryError))
                with contextlib.suppress(RankFailedError):  # pytest.raises keeps the error
                    dos.load(state, url, storage_options=options, progress=False, config=SMALL)
                    pytest.fail("it was loaded")
            del state
            for _ in range(100):  # workers end a moment later
                kept = sum(tensor() is not None for tensor in tensors)
                time.sleep(0.05 if kept else 0)
    return kept


def test_a_rank_that_fails_while_others_fetch_leaves_no_tensor_in_memory(sink, saved):
    assert run_ranks(3, kept_by_a_failed_load, saved, sink.storage_options) == [0, 0, 0]


def load_unopened(rank: int, world: int, url: str, options: Options) -> None:
    """Ctrl-C on the rank that opens the checkpoint for all."""
    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            interrupted = Mock(side_effect=KeyboardInterrupt)
            patch.setattr(reader_module, "open_stored_checkpoint", interrupted)
        load_small(rank, world, url, options)


def test_ctrl_c_where_the_checkpoint_is_opened_for_all_is_raised_on_all(sink, saved):
    first, *others = try_ranks(3, load_unopened, saved, sink.storage_options)
    assert isinstance(first.error, KeyboardInterrupt), first
    for outcome in others:
        assert type(outcome.error) is RankFailedError, outcome
        assert outcome.error.rank == 0
        assert "KeyboardInterrupt" in str(outcome.error)


# Settings that ranks must agree on.


def load_unlike(rank: int, world: int, url: str, options: Options) -> None:
    state = blank(None)
    try:
        dos.load(state, url, storage_options=options, progress=False, read_once=rank > 0)
    finally:
        assert same_bits(state["wide"], torch.zeros(SHAPES["wide"]))


def test_ranks_that_differ_in_reading_once_are_refused_without_a_wait(sink, saved):
    for outcome in try_ranks(2, load_unlike, saved, sink.storage_options):
        assert isinstance(outcome.error, ConfigError), outcome
        assert "read_once" in str(outcome.error)


# A job that starts again on its nodes reads nothing from the store that a node has. Each node is a
# folder: the ranks of one machine pass for ranks of several nodes.


def save_twice(
    rank: int, world: int, run: str, options: Options, folders: Sequence[str | None]
) -> None:
    for step in (1, 2):
        save_sharded(rank, world, f"{run}/step-{step}", options, step, folders[rank])


def load_on_nodes(
    rank: int, world: int, run: str, options: Options, folders: Sequence[str | None], dim: int
) -> dos.reports.LoadReport:
    return load(rank, world, f"{run}/step-2", options, dim, 2, local=folders[rank])


def nodes_at(path: Path, *ranks: int) -> list[str | None]:
    """A folder for each rank; -1 for a rank that has none."""
    for node in {*ranks} - {-1}:
        (path / f"node{node}").mkdir(exist_ok=True)
    return [None if node < 0 else str(path / f"node{node}") for node in ranks]


@pytest.fixture
def saved_on_nodes(sink: Sink, tmp_path: Path) -> str:
    """A run that four ranks on two nodes have saved twice."""
    run = f"s3://bucket/{tmp_path.name}"
    run_ranks(4, save_twice, run, sink.storage_options, nodes_at(tmp_path, 0, 0, 1, 1))
    return run


@pytest.mark.parametrize(
    ("nodes", "dim"),
    cases(
        [
            ((0, 0, 1, 1), 1),  # cut the other way
            ((1, 0, 0, 1), 0),  # ranks shifted by one
            ((2, 0, 0, 1, 1), 0),  # a new host before the others
            ((0, 1, 0, 1, 0, 1, 0, 1), 0),  # more ranks
            ((0, 0, 1), 0),  # fewer ranks
            ((0, 0, 1, -1), 0),  # a rank without a folder
        ],
        default=[((2, 0, 0, 1, 1), 0)],
    ),
)
def test_nothing_is_fetched_that_a_node_has(sink, tmp_path, saved_on_nodes, nodes, dim):
    folders = nodes_at(tmp_path, *nodes)
    options = sink.storage_options
    reports = run_ranks(len(nodes), load_on_nodes, saved_on_nodes, options, folders, dim)
    assert [report.fetched_bytes for report in reports] == [0] * len(nodes)
    assert sum(report.local_bytes for report in reports) > 0


def test_a_lost_node_costs_its_own_bytes_and_no_more(sink, tmp_path, saved_on_nodes):
    copies = (tmp_path / "node1").glob("*/*/step-2/*")
    lost_bytes = sum(copy.stat().st_size for copy in copies)
    shutil.rmtree(tmp_path / "node1")
    folders = nodes_at(tmp_path, 0, 0, 1, 1)
    reports = run_ranks(4, load_on_nodes, saved_on_nodes, sink.storage_options, folders, 0)
    fetched_bytes = sum(report.fetched_bytes for report in reports)
    assert 0 < fetched_bytes <= lost_bytes
