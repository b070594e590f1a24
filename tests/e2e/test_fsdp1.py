"""FSDP1 (`FullyShardedDataParallel`): ranks that have no shard of a parameter load, too."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import dcp_objstore as dos
from tests.support.checkpoints import Options
from tests.support.ranks import run_ranks


def job(sharding: str, steps: int, seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    # Of two ranks with FSDP1, the last one has all of the small layer.
    model: nn.Module = nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 1))
    if sharding == "fsdp1":
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    elif sharding == "fsdp2":
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.ones(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer}


def save_trained(rank: int, world: int, url: str, options: Options) -> None:
    dos.save(job("fsdp1", 3, seed=1), f"{url}/saved", storage_options=options)


def load_and_save(rank: int, world: int, url: str, options: Options) -> None:
    for name, steps in (("fresh", 0), ("stepped", 2)):
        state = job("fsdp1", steps, seed=2)
        dos.load(state, f"{url}/saved", storage_options=options)
        dos.save(state, f"{url}/{name}-{world}", storage_options=options)


@pytest.mark.filterwarnings("ignore")
def test_another_number_of_ranks_loads_into_new_and_used_optimizers(bucket):
    run_ranks(2, save_trained, bucket.url, bucket.storage_options)
    for world in (1, 3):
        run_ranks(world, load_and_save, bucket.url, bucket.storage_options)

    def values(name: str) -> dict[str, Any]:
        return dos.read_state_dict(
            bucket.at(name), nested=False, storage_options=bucket.storage_options
        )

    saved = values("saved")
    for name in [f"{kind}-{world}" for kind in ("fresh", "stepped") for world in (1, 3)]:
        found = values(name)
        assert found.keys() == saved.keys()
        for key, value in saved.items():
            same = torch.equal if isinstance(value, torch.Tensor) else operator.eq
            assert same(value, found[key]), (name, key)


def save_fresh(rank: int, world: int, url: str) -> list[str]:
    """What is wrong after unstepped optimizers were saved and loaded."""
    wrong = []
    for sharding in ("fsdp1", "fsdp2", "none"):
        at, state = f"{url}/{sharding}", job(sharding, 0)
        dos.save(state, at, progress=False)
        if state["optimizer"].state:
            wrong.append(f"{sharding}: the save has made a state")
        loaded = job(sharding, 2)
        dos.load(loaded, at, progress=False)
        if loaded["optimizer"].state:
            wrong.append(f"{sharding}: loaded a state")
        if rank == 0 and any(key.startswith("optimizer.state") for key in dos.open(at)):
            wrong.append(f"{sharding}: stored a state")
    # Only the first rank's replica has stepped. What is stored is its state, whole.
    dos.save(job("none", 2 if rank == 0 else 0), f"{url}/one", progress=False)
    loaded = job("none", 0)
    dos.load(loaded, f"{url}/one", progress=False)
    counts = {float(values["step"]) for values in loaded["optimizer"].state.values()}
    if counts != {2.0} or len(loaded["optimizer"].state) != 4:
        wrong.append(f"one rank has stepped: {counts}")
    return wrong


@pytest.mark.filterwarnings("ignore")
def test_optimizers_before_their_first_step_are_stored_without_a_state(tmp_path):
    assert run_ranks(2, save_fresh, tmp_path.as_uri()) == [[], []]
