"""`Checkpoint.plan`: what a real load reads, said before; and the tree of modules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import dcp_objstore as dos
from dcp_objstore.errors import ConfigError, StateMismatchError
from tests.support.ranks import run_ranks
from tests.support.states import seeded

SHAPES = {"embed.weight": (3001, 700), "head.weight": (700, 1500), "head.bias": (2,)}


def sharded(world: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (world,))
    state: dict[str, Any] = {
        f"model.{key}": distribute_tensor(seeded(key, shape), mesh, [Shard(0)])
        for key, shape in SHAPES.items()
    }
    return {**state, "optim.step": torch.tensor(3.0), "step": 7}


def save(rank: int, world: int, url: str, options: Mapping[str, object]) -> None:
    dos.save(sharded(world), url, storage_options=options, progress=False)


def load(rank: int, world: int, url: str, options: Mapping[str, object]) -> tuple[int, ...]:
    report = dos.load(sharded(world), url, storage_options=options, progress=False)
    return report.total_bytes, report.received_bytes, report.requests, report.objects


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Saved by three ranks, so that the shards of other numbers of ranks cross those."""
    place = (tmp_path_factory.mktemp("run") / "step-1").as_uri()
    run_ranks(3, save, place, {})
    return place


@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_plan_is_what_the_ranks_of_a_job_read(url, world):
    planned = dos.open(url).plan(world)
    assert [one.rank for one in planned] == list(range(world))
    read = run_ranks(world, load, url, {})
    assert [
        (one.total_bytes, one.received_bytes, one.requests, one.objects) for one in planned
    ] == read


def test_a_plan_reads_nothing_and_takes_patterns(url, requests):
    ckpt = dos.open(url)
    every = ckpt.plan(64)
    some = ckpt.plan(64, "model.head.*")
    assert {request.verb for request in requests} == {"get"}
    fetched = [sum(one.total_bytes for one in plan) for plan in (every, some)]
    assert fetched[0] >= 4 * (3001 * 700 + 700 * 1500)
    assert 4 * 700 * 1500 <= fetched[1] < fetched[0]
    for wrong in (0, -1, True, 2.0):
        with pytest.raises(ConfigError, match="ranks"):
            ckpt.plan(wrong)  # type: ignore[arg-type]
    with pytest.raises(StateMismatchError):
        ckpt.plan(2, "nothing")


def test_a_foreign_checkpoint_has_a_plan_and_a_tree(tmp_path):
    state = {"model.w": seeded("w", (10, 4)), "model.a.b": torch.ones(3).half(), "step": 3}
    dcp.save(state, checkpoint_id=tmp_path / "stock")
    ckpt = dos.open((tmp_path / "stock").as_uri())
    assert sum(one.total_bytes for one in ckpt.plan(2)) >= 166
    root = ckpt.modules()
    assert list(root.modules) == ["model"]
    model = root.modules["model"]
    assert (model.name, model.modules["a"].name) == ("model", "model.a")
    assert [entry.key for entry in model.walk()] == ["model.w", "model.a.b"]
    assert model.total_bytes == 166
    assert list(model.bytes_by_dtype().items()) == [("float32", 160), ("float16", 6)]
    assert list(root.entries) == ["step"]
    assert root.bytes_by_dtype()["value"] == ckpt["step"].nbytes
    assert list(ckpt.modules("model.a.*").walk()) == [ckpt["model.a.b"]]
