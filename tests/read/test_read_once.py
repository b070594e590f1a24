"""Ranks that load together: the store sends each byte once, and a failure is everybody's."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import signal
import time
from collections.abc import Iterator, Mapping
from itertools import pairwise, product
from pathlib import Path
from typing import Any
from weakref import finalize, ref

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard as ShardedShard, ShardedTensor
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
from dcp_objstore.read.peers.meeting import Offer, all_arrived, group_digest, open_once, share_out
from dcp_objstore.read.peers.plan import NEED
from dcp_objstore.threads import in_main_thread
from tests.support.campaign import cases
from tests.support.checkpoints import cause, causes
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
) -> dos.reports.LoadReport:
    placements = None if dim is None else [Replicate() if dim < 0 else Shard(dim)]
    state = blank(placements)
    report = dos.load(state, url, storage_options=options, progress=False, **settings)
    assert_loaded(state)
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
MANY_ROUNDS = [(dim, True, SMALL) for dim in (None, 1)]


@pytest.mark.parametrize(
    ("dim", "verify", "config"),
    cases(
        product(LAYOUTS, [True, False], [TransferConfig(), SMALL]),
        default=[*MANY_ROUNDS, (-1, True, TransferConfig()), (0, False, TransferConfig())],
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


def test_without_read_once_every_rank_fetches_what_it_needs(sink, saved):
    settings = {"read_once": False}
    reports = run_ranks(3, load_with, saved, sink.storage_options, None, settings)
    assert sum(report.total_bytes for report in reports) >= 3 * PAYLOAD_BYTES
    assert {report.received_bytes for report in reports} == {0}


def load_with_dcp(rank: int, world: int, url: str, options: Options, told: bool) -> list[int]:
    """Ranks 1 and 2 of three load by themselves, with or without their group as an argument."""
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
def test_a_reader_that_was_not_told_of_a_subgroup_loads_without_sharing(sink, saved, told):
    found = run_ranks(3, load_with_dcp, saved, sink.storage_options, told)
    fetched, received = (sum(column) for column in zip(*found, strict=True))
    if told:
        assert fetched < 1.05 * PAYLOAD_BYTES < 1.1 * received
    else:
        assert fetched >= 2 * PAYLOAD_BYTES
        assert received == 0


@contextlib.contextmanager
def as_on_hosts(rank: int, folder: str, hosts: int) -> Iterator[None]:
    """As if the ranks were on so many hosts, in turn; neighbours then have no memory in common."""
    boot_id = Path(folder) / f"host-{rank % hosts}"
    boot_id.write_text(f"host {rank % hosts}")
    kept, shared_memory._BOOT_ID = shared_memory._BOOT_ID, boot_id
    try:
        yield
    finally:
        shared_memory._BOOT_ID = kept


def load_across_hosts(
    rank: int, world: int, url: str, options: Options, dim: int | None, folder: str, hosts: int
) -> dos.reports.LoadReport:
    with as_on_hosts(rank, folder, hosts):
        return load(rank, world, url, options, dim, config=SMALL)


def pieces(rank: int, world: int) -> tuple[ShardedTensor, torch.Tensor]:
    """Rows of the tall tensor, of which each rank has several pieces in a block; and their values.

    As torchrec has them.
    """
    rows, columns = SHAPES["tall"]
    cuts = [0, 100, 400, 700, 1400, 2500, rows]
    full = seeded("tall", SHAPES["tall"])
    own = [(low, high) for low, high in pairwise(cuts) if cuts.index(low) % world == rank]
    shards = [
        ShardedShard(
            torch.zeros(high - low, columns),
            ShardMetadata([low, 0], [high - low, columns], f"rank:{rank}/cpu"),
        )
        for low, high in own
    ]
    made = ShardedTensor._init_from_local_shards(shards, rows, columns)
    return made, torch.cat([full[low:high] for low, high in own])


def load_pieces(rank: int, world: int, url: str, options: Options, folder: str, hosts: int) -> None:
    with as_on_hosts(rank, folder, hosts):
        value, expected = pieces(rank, world)
        dos.load({"tall": value}, url, storage_options=options, progress=False)
        found = torch.cat([shard.tensor for shard in value.local_shards()])
        assert same_bits(found, expected)


def test_a_rank_may_have_several_parts_of_a_block(sink, saved, tmp_path):
    run_ranks(2, load_pieces, saved, sink.storage_options, str(tmp_path), 2)


def load_tied(
    rank: int, world: int, url: str, options: Options, folder: str, hosts: int, dim: int
) -> None:
    with as_on_hosts(rank, folder, hosts):
        mesh = init_device_mesh("cpu", (world,))
        tied = distribute_tensor(torch.zeros(SHAPES["wide"]), mesh, [Shard(dim)])
        state = {"tied": tied, "wide": tied}
        dos.load(state, url, storage_options=options, progress=False, config=SMALL)
        like = distribute_tensor(seeded("wide", SHAPES["wide"]), mesh, [Shard(dim)])
        assert same_bits(tied.to_local(), like.to_local())


@pytest.mark.parametrize(("dim", "hosts"), cases(product([0, 1], [1, 2]), default=[(0, 1), (1, 2)]))
def test_tied_tensors_of_ranks_are_filled_by_the_last_key(sink, tmp_path, dim, hosts):
    url, options = f"s3://bucket/tied-{dim}-{hosts}", sink.storage_options
    saved = {"wide": seeded("wide", SHAPES["wide"]), "tied": torch.ones(SHAPES["wide"])}
    dos.save(saved, url, storage_options=options, progress=False)
    run_ranks(3, load_tied, url, options, str(tmp_path), hosts, dim)


@pytest.mark.parametrize(
    ("dim", "hosts"), cases(product([None, 0, 1], [2, 4]), default=[(None, 4), (1, 2)])
)
def test_ranks_on_several_hosts_send_each_other_what_they_want(sink, saved, tmp_path, dim, hosts):
    arguments = (saved, sink.storage_options, dim, str(tmp_path), hosts)
    reports = run_ranks(4, load_across_hosts, *arguments)
    fetched_bytes = sum(report.total_bytes for report in reports)
    received_bytes = sum(report.received_bytes for report in reports)
    assert PAYLOAD_BYTES <= fetched_bytes <= 1.05 * PAYLOAD_BYTES
    if dim is None:
        assert received_bytes >= 3 * PAYLOAD_BYTES


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
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(CheckpointNotFoundError):
            open_once(fail, alone, "memory://url")
        assert gone
    finally:
        gc.enable()


def load_small(rank: int, world: int, url: str, options: Options) -> None:
    load(rank, world, url, options, None, config=SMALL)


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
            plan.items = [item for item in plan.items if item.dest_index.fqn != "wide"]
        return plan


def out_of_memory(*_: object) -> Any:
    raise OSError(errno.ENOMEM, "Cannot allocate memory")


def load_failing(rank: int, world: int, url: str, options: Options, how: str) -> float:
    started = time.monotonic()
    how = how if rank == 1 else "not"
    heard = Heard()
    reader = dos.ObjectStoreReader(
        url, storage_options=options, config=SMALL, process_group=dist.group.WORLD, on_event=heard
    )
    try:
        dcp.load(blank(None), planner=Failing(how), storage_reader=reader)
    except BaseException:
        # Well below the group's time-out, for which they would wait if nobody told them.
        assert time.monotonic() - started < 100
        if rank != 1:
            assert [one.failed_rank for one in of(Failed, heard)] == [1]
        raise
    return time.monotonic() - started


@pytest.mark.parametrize(
    ("how", "kind", "text"),
    [
        pytest.param(
            *("resolve", RankFailedError, "no such tensor here"), marks=pytest.mark.campaign
        ),
        ("late", UnsupportedError, "cannot take the value"),
        ("interrupt", KeyboardInterrupt, ""),
        ("fewer", UnsupportedError, "read_once=False"),
    ],
)
def test_a_rank_that_fails_fails_all_and_none_waits_for_it(sink, saved, how, kind, text):
    url, options = saved, sink.storage_options
    outcomes = try_ranks(3, load_failing, url, options, how)
    for outcome in outcomes:
        assert set(outcome.error.failures) == {1}  # no other has failed
        error, _ = outcome.error.failures[1]
        assert type(error) is kind, outcome
        assert text in str(error)
    # The ranks are in step again: the next load works.
    run_ranks(3, load_small, url, options)


def kept_by_a_failed_load(rank: int, world: int, url: str, options: Options) -> int:
    """How many tensors are in memory after a load that fails while ranks find others' slots."""
    kept = 0
    for _ in range(2):  # the first one may import modules, which leave garbage
        state = blank(None)
        tensors = [ref(value) for value in state.values() if isinstance(value, torch.Tensor)]
        gc.collect()
        gc.disable()
        try:
            with pytest.MonkeyPatch.context() as patch:
                if rank == 1:
                    patch.setattr(exchange, "attach", out_of_memory)
                with contextlib.suppress(RankFailedError):  # pytest.raises keeps the error
                    dos.load(state, url, storage_options=options, progress=False, config=SMALL)
                    pytest.fail("it was loaded")
            del state
            for _ in range(100):  # workers end a moment later
                kept = sum(tensor() is not None for tensor in tensors)
                time.sleep(0.05 if kept else 0)
        finally:
            gc.enable()
    return kept


def test_a_rank_that_fails_while_others_fetch_leaves_no_tensor_in_memory(sink, saved):
    assert run_ranks(3, kept_by_a_failed_load, saved, sink.storage_options) == [0, 0, 0]


def load_interrupted(rank: int, world: int, url: str, options: Options, number: int) -> int:
    """Ctrl-C on rank 1 while it waits for others to do something together, the n-th such time.

    Returns how often a rank waited.
    """
    started = time.monotonic()
    really, waited = exchange.result_of, 0

    def wait(future: Any, **settings: Any) -> Any:
        nonlocal waited
        waited += in_main_thread()
        if in_main_thread() and (rank, waited) == (1, number):
            raise KeyboardInterrupt
        return really(future, **settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "result_of", wait)
        try:
            load_small(rank, world, url, options)
        finally:
            assert time.monotonic() - started < 100
    return waited


def test_ctrl_c_while_ranks_wait_for_each_other_ends_all_of_them(sink, saved):
    arguments = (saved, sink.storage_options)
    often, *_ = run_ranks(2, load_interrupted, *arguments, 0)
    assert often > 3
    for number in (1, 2, often):  # the first round, another, the last one
        outcomes = try_ranks(2, load_interrupted, *arguments, number)
        assert isinstance(outcomes[1].error, KeyboardInterrupt), outcomes[1]
        assert type(outcomes[0].error) is RankFailedError, outcomes[0]
        assert "KeyboardInterrupt" in str(outcomes[0].error)


def load_unopened(rank: int, world: int, url: str, options: Options, kind: type) -> None:
    """The rank that opens the checkpoint for all fails otherwise than by one of our errors."""

    def fail(*_: object, **__: object) -> None:
        raise kind("while opening")

    started = time.monotonic()
    try:
        with pytest.MonkeyPatch.context() as patch:
            if rank == 0:
                patch.setattr(reader_module, "open_stored_checkpoint", fail)
            load(rank, world, url, options, None)
    finally:
        assert time.monotonic() - started < 100


@pytest.mark.parametrize("kind", [MemoryError, KeyboardInterrupt])
def test_whatever_fails_where_the_checkpoint_is_opened_for_all_is_raised_on_all(sink, saved, kind):
    first, *others = try_ranks(3, load_unopened, saved, sink.storage_options, kind)
    assert isinstance(first.error, kind if kind is KeyboardInterrupt else RankFailedError), first
    for outcome in others:
        assert type(outcome.error) is RankFailedError, outcome
        assert outcome.error.rank == 0
        assert kind.__name__ in str(outcome.error)
    run_ranks(3, load_small, saved, sink.storage_options)


# Settings that ranks must agree on.


def load_unlike(
    rank: int, world: int, url: str, options: Options, name: str, values: list[Any], told: bool
) -> None:
    state, settings = blank(None), {name: values[rank]}
    try:
        if told:
            dos.load(state, url, storage_options=options, progress=False, **settings)
        else:
            reader = dos.ObjectStoreReader(url, storage_options=options, **settings)
            dcp.load(state, storage_reader=reader)
    finally:
        assert same_bits(state["wide"], torch.zeros(SHAPES["wide"]))


@pytest.mark.parametrize("told", [True, False])
def test_a_rank_that_verifies_gets_nothing_from_one_that_does_not(sink, saved, told):
    arguments = (saved, sink.storage_options, "verify", [False, True], told)
    for outcome in try_ranks(2, load_unlike, *arguments):
        error = outcome.error if told else cause(outcome.error)
        assert isinstance(error, ConfigError), outcome
        assert "verify" in str(error)


def test_ranks_that_differ_in_reading_once_are_refused_without_a_wait(sink, saved):
    arguments = (saved, sink.storage_options, "read_once", [True, False], True)
    for outcome in try_ranks(2, load_unlike, *arguments):
        assert isinstance(outcome.error, ConfigError), outcome
        assert "read_once" in str(outcome.error)


def test_the_smallest_memory_budget_and_request_size_of_the_ranks_hold_for_all():
    size = 4 * MIB
    blocks = [(0, n * size, (n + 1) * size, n * size, (n + 1) * size, 0, -1) for n in range(16)]

    def largest(*configs: TransferConfig) -> tuple[int, int]:
        """Bytes of a request, and of a round."""
        offers = [
            Offer(
                "url",
                "commit",
                rank,
                group_digest([0, 1]),
                np.array(blocks, dtype=NEED),
                {},
                memory_budget_bytes=config.memory_budget_bytes,
                request_size_bytes=config.request_size_bytes,
            )
            for rank, config in enumerate(configs)
        ]
        share = share_out(offers)[0]
        assert share is not None
        rounds = [[r.end - r.start for r in requests] for requests in share.plan.rounds]
        return max(map(max, rounds)), max(map(sum, rounds))

    usual = TransferConfig(memory_budget_bytes=128 * MIB)
    assert largest(usual, usual) == (8 * MIB, 32 * MIB)
    assert largest(TransferConfig(), SMALL) == largest(SMALL, TransferConfig()) == (size, size)


@pytest.mark.backends("seaweed")
def test_a_rank_that_is_killed_while_loading_fails_the_others_at_once(bucket):
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
) -> dos.reports.LoadReport:
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
def test_a_planner_that_fails_before_the_reading_fails_all_with_its_error_alone(sink, saved, told):
    outcomes = try_ranks(3, load_late, saved, sink.storage_options, "fails", told)
    for outcome in outcomes:
        (error,) = causes(outcome.error)
        assert isinstance(error, ValueError), outcome
    run_ranks(3, load_small, saved, sink.storage_options)


@pytest.mark.parametrize("others", [0, 1, 2])
def test_a_rank_waits_for_others_as_long_as_they_keep_coming(others, monkeypatch):
    """One of three: the others come one by one, whenever it has run out of patience."""

    class Store:
        def __init__(self) -> None:
            self.kept = dist.HashStore()
            self.looked = 0

        def add(self, key: str, number: int) -> int:
            if not number:
                self.looked += 1
                if self.looked <= others and self.kept.add(key, 1) == 3:
                    self.kept.set(key.replace("arrivals", "decided"), "together")
            return self.kept.add(key, number)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.kept, name)

    store = Store()
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    config = TransferConfig(peer_timeout_seconds=0.01)
    assert all_arrived("meeting", 3, config, "url") == (others == 2)
    assert store.looked == min(others + 1, 2)


@pytest.mark.parametrize(
    ("shared_bytes", "count", "together"),
    [(MIB, 1, False), (7 * MIB, 1, True), (1, 10, False), (1, 30, True)],
)
def test_ranks_load_together_only_if_that_saves_more_than_three_percent(
    shared_bytes, count, together
):
    """Of bytes, and of requests, each of which costs as much as 256 KiB."""
    offers = []
    for rank in (0, 1):
        of_both = [
            (0, start, start + shared_bytes, start, start + shared_bytes, 0, -1)
            for start in range(0, count * 8 * MIB, 8 * MIB)
        ]
        of_one = (1 + rank, 0, 100 * MIB, 0, 100 * MIB, 0, -1)
        needs = np.array([*of_both, of_one], dtype=NEED)
        offers.append(
            Offer(
                "url",
                "commit",
                rank,
                group_digest([0, 1]),
                needs,
                memory_budget_bytes=128 * MIB,
                request_size_bytes=8 * MIB,
            )
        )
    assert [share is not None for share in share_out(offers)] == [together, together]


@pytest.mark.parametrize("other", [0, 1])
@pytest.mark.parametrize("group", [None, group_digest([0])])
def test_ranks_load_together_only_if_each_of_them_expects_the_others(other, group):
    needs = np.array([(0, 0, 100, 0, 100, 0, -1)], dtype=NEED)
    offers = [
        Offer(
            "url",
            "commit",
            rank,
            group if rank == other else group_digest([0, 1]),
            needs,
            memory_budget_bytes=128 * MIB,
            request_size_bytes=8 * MIB,
        )
        for rank in (0, 1)
    ]
    assert share_out(offers) == [None, None]


@pytest.mark.parametrize("how", ["slow", "own plan"])
def test_ranks_do_not_fail_for_one_that_is_late_or_goes_its_own_way(sink, saved, how):
    reports = run_ranks(3, load_late, saved, sink.storage_options, how, True)
    assert {report.received_bytes for report in reports} == {0}
    assert sum(report.total_bytes for report in reports) >= 3 * PAYLOAD_BYTES
    run_ranks(3, load_small, saved, sink.storage_options)


def load_mostly_own(rank: int, world: int, url: str, options: Options) -> dos.reports.LoadReport:
    """Each rank asks for a tensor of its own, and all for a small one."""
    state = {f"own{rank}": torch.zeros(2 * MIB), "norm": torch.zeros(100)}
    report = dos.load(state, url, storage_options=options, progress=False)
    assert state[f"own{rank}"][-1] == rank + 1
    assert same_bits(state["norm"], torch.ones(100))
    return report


def test_ranks_do_not_wait_for_each_other_to_save_next_to_nothing(sink):
    url, options = "s3://bucket/own", sink.storage_options
    state = {f"own{n}": torch.full((2 * MIB,), n + 1.0) for n in range(3)}
    dos.save({**state, "norm": torch.ones(100)}, url, storage_options=options, progress=False)
    reports = run_ranks(3, load_mostly_own, url, options)
    assert {report.received_bytes for report in reports} == {0}
    assert sum(report.total_bytes for report in reports) < 1.05 * 3 * 8 * MIB
