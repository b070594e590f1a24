"""A job that starts again on its nodes reads nothing from the store that a node has.

Each node is a folder. The ranks of one machine pass for ranks of several nodes.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import dcp_objstore as dos
from benchmarks.sink import Sink
from tests.support.campaign import cases
from tests.support.ranks import run_ranks
from tests.support.states import same_bits, seeded

SHAPES = {"wide": (512, 3000), "tall": (2500, 700), "norm": (999,), "scale": ()}


@pytest.fixture(scope="module")
def sink() -> Iterator[Sink]:
    with Sink(keep=True) as running:
        yield running


def _state(step: int, dim: int, *, blank: bool = False) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state: dict[str, Any] = {"step": -1 if blank else step}
    for key, shape in SHAPES.items():
        tensor = torch.zeros(shape) if blank else seeded(f"{key} {step}", shape)
        placement = Shard(dim) if len(shape) == 2 else Replicate()
        state[key] = distribute_tensor(tensor, mesh, [placement])
    return state


def _save(
    rank: int, world: int, run: str, options: Any, folders: Sequence[str | None], steps: int
) -> None:
    del world
    for step in range(1, steps + 1):
        dos.save(
            _state(step, 0),
            f"{run}/step-{step}",
            storage_options=options,
            local=folders[rank],
            progress=False,
        )


def _load(
    rank: int,
    world: int,
    run: str,
    options: Any,
    folders: Sequence[str | None],
    step: int,
    dim: int = 0,
) -> dos.reports.LoadReport:
    del world
    state = _state(step, dim, blank=True)
    report = dos.load(
        state, f"{run}/step-{step}", storage_options=options, local=folders[rank], progress=False
    )
    assert state["step"] == step
    for key, saved in _state(step, dim).items():
        if isinstance(saved, DTensor):
            assert same_bits(state[key].to_local(), saved.to_local()), key
    return report


def _nodes(path: Path, *ranks: int) -> list[str | None]:
    """A folder for each rank; -1 for a rank that has none."""
    for node in {*ranks} - {-1}:
        (path / f"node{node}").mkdir(exist_ok=True)
    return [None if node < 0 else str(path / f"node{node}") for node in ranks]


def _copies(path: Path) -> list[Path]:
    return sorted(path.glob("node*/*/*/step-*/*"))


@pytest.fixture
def saved(sink: Sink, tmp_path: Path) -> str:
    """A run that four ranks on two nodes have saved twice."""
    run = f"s3://bucket/{tmp_path.name}"
    run_ranks(4, _save, run, sink.storage_options, _nodes(tmp_path, 0, 0, 1, 1), 2)
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
def test_nothing_is_fetched_that_a_node_has(sink, tmp_path, saved, nodes, dim):
    assert {copy.parent.name for copy in _copies(tmp_path)} == {"step-1", "step-2"}
    folders = _nodes(tmp_path, *nodes)
    reports = run_ranks(len(nodes), _load, saved, sink.storage_options, folders, 2, dim)
    assert [report.fetched_bytes for report in reports] == [0] * len(nodes)
    assert sum(report.local_bytes for report in reports) > 0


def test_a_lost_node_costs_its_own_bytes_and_no_more(sink, tmp_path, saved):
    of_step = [copy for copy in _copies(tmp_path) if copy.parent.name == "step-2"]
    lost_bytes = sum(copy.stat().st_size for copy in of_step if "node1" in copy.parts)
    shutil.rmtree(tmp_path / "node1")
    folders = _nodes(tmp_path, 0, 0, 1, 1)
    reports = run_ranks(4, _load, saved, sink.storage_options, folders, 2)
    fetched_bytes = sum(report.fetched_bytes for report in reports)
    assert 0 < fetched_bytes <= lost_bytes
