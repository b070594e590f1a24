"""The simulator of size plans, lays out and counts as a real save and load do."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dcp_objstore as dos
from benchmarks.prices import DEFAULT, Prices
from benchmarks.scale import _requests
from benchmarks.scale_job import coordinate_load, coordinate_save
from benchmarks.scale_state import MODELS, ScaledState
from benchmarks.sink import Sink
from dcp_objstore.checkpoint import index as ix, read
from dcp_objstore.stores import open_store
from tests.support.command_line import printed_by_benchmark
from tests.support.ranks import run_ranks

# Rows that divide, that do not, and fewer than there are ranks; a large tensor among small ones.
_PARAMETERS = (("even", (6, 8)), ("uneven", (7, 3)), ("few", (2,)), ("large", (300, 1000)))


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name, shape in _PARAMETERS:
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))


def _save_under_fsdp2(rank: int, world_size: int, url: str) -> None:
    """Save a model and its AdamW; compare the plans that DCP makes with the simulated ones."""
    net = _Net()
    fully_shard(net, mesh=init_device_mesh("cpu", (world_size,)))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1)
    model, optimizer_state = get_state_dict(net, optimizer)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer_state}
    simulated = ScaledState(_PARAMETERS, world_size)
    planner = DefaultSavePlanner()
    planner.set_up_planner(state, is_coordinator=rank == 0)
    plan = planner.create_local_plan()
    assert plan.items == simulated.save_items(rank)
    assert plan.planner_data == simulated.mappings
    _, metadata = planner.create_global_plan(
        [
            SavePlan(simulated.save_items(other), planner_data=simulated.mappings)
            for other in range(world_size)
        ]
    )
    loader = DefaultLoadPlanner()
    loader.set_up_planner(state, metadata, is_coordinator=rank == 0)
    assert loader.create_local_plan().items == simulated.read_items(rank)
    dos.save(state, url, progress=False)


def _index(url: str) -> ix.Index:
    return ix.decode(read.open_committed(open_store(url))[1])


def test_a_simulated_save_plans_and_commits_what_a_real_one_of_fsdp2_does(tmp_path):
    real, simulated = ((tmp_path / name).as_uri() for name in ("real", "simulated"))
    run_ranks(3, _save_under_fsdp2, real)
    state = ScaledState(_PARAMETERS, 3)
    found = coordinate_save(state, simulated)
    one, other = _index(real), _index(simulated)
    assert one.tensors == other.tensors
    assert one.blobs == other.blobs
    assert one.flatten_mapping == other.flatten_mapping
    assert [entry.size_bytes for entry in one.objects] == [
        entry.size_bytes for entry in other.objects
    ]
    for name in ("object_number", "offset", "lead", "payload_length", "trail", "pickled"):
        assert np.array_equal(getattr(one.columns, name), getattr(other.columns, name)), name
    assert np.array_equal(one.columns.chunk_offsets, other.columns.chunk_offsets)
    assert np.array_equal(one.columns.chunk_sizes, other.columns.chunk_sizes)
    assert len(one.columns.digests) == len(other.columns.digests)
    chunks = sum(tensor.chunk_count for tensor in one.tensors.values())
    assert state.chunks == chunks
    assert found["data_bytes"] == sum(entry.size_bytes for entry in one.objects)
    # Whoever loads finds all step counts and settings with one request.
    small = [*(key for key in one.tensors if key.endswith(".step")), *one.blobs]
    assert len(small) > 10
    assert {one.item(one.rows(key).start).object_number for key in small} == {0}
    assert coordinate_load(state, simulated)["stages"].keys() > {"share_out"}


def test_the_requests_of_a_simulated_save_are_those_of_a_real_one(tmp_path):
    # Three parts of 16 MiB.
    state = ScaledState((("w", (3500, 1024)),), 1)
    nested = {"model": {"w": torch.zeros(3500, 1024)}, "optimizer": {"state": {"w": {}}}}
    moments = {"step": torch.zeros(()), "exp_avg": torch.zeros(3500, 1024)}
    nested["optimizer"]["state"]["w"] = moments | {"exp_avg_sq": torch.zeros(3500, 1024)}
    nested["optimizer"]["param_groups"] = [state.values]
    with Sink() as sink:
        dos.save(nested, "s3://bench/step-1", storage_options=sink.storage_options, progress=False)
        counted = sink.stats()["requests"]
    found = coordinate_save(state, (tmp_path / "checkpoint").as_uri())
    data = {verb: counted.pop(verb) for verb in ("BEGIN", "PART", "COMPLETE")}
    assert data == {"BEGIN": 1, "PART": 3, "COMPLETE": 1}
    assert found["data_puts"] == sum(data.values())
    # The HEAD and the first PUT are under way together. What is answered 404 before anything was
    # put may be a missing bucket: a GET asks again.
    assert counted.pop("GET") - found["requests"].pop("GET") in (0, 1)
    assert found["requests"] == counted


def test_the_models_have_their_sizes():
    for name, billions in (("70b", 70.6), ("405b", 405.9)):
        state = ScaledState.of(name, 8, MODELS[name].tensors)
        assert state.payload_bytes / 12e9 == pytest.approx(billions, abs=0.1)
    more = ScaledState.of("70b", 8, 4000)
    assert len(more.tensors) == 4000
    assert ScaledState.of("70b", 10_000, 2000).chunks < 1500 * 10_000


def test_a_user_replaces_the_prices(tmp_path):
    text = DEFAULT.read_text().replace("0.005", "0.01")
    (tmp_path / "own.toml").write_text(text)
    own, default = Prices.read(tmp_path / "own.toml"), Prices.read(DEFAULT)
    assert own.usd(puts=2_000, gets=10_000) == pytest.approx(0.02 + 0.004)
    assert default.usd(puts=2_000, gets=10_000) == pytest.approx(0.01 + 0.004)
    assert default.seconds(puts=7_000, gets=11_000) == pytest.approx(4)
    (tmp_path / "wrong.toml").write_text("price = 1")
    with pytest.raises(TypeError, match="price"):
        Prices.read(tmp_path / "wrong.toml")


def test_the_requests_of_a_larger_job_are_its_data_and_what_the_coordinator_sends():
    state = ScaledState(_PARAMETERS, 2000)
    own = {"PUT": 12, "GET": 5, "HEAD": 2, "LIST": 1}
    size = {"ranks": 4, "load_requests": {}, "coordinator_requests": own}
    size["save_requests"] = own | {"PUT": 12 + 4 * 71}
    requests = _requests({"sizes": [size], "ranks": 2000}, state, Prices.read(DEFAULT))
    save = next(row for row in requests.rows if row[0] == "save, 2000 ranks")
    assert save[2:5] == ["~2012", "~7", "~3"]


@pytest.mark.campaign  # a dozen processes import torch
def test_the_scale_benchmark_measures_and_extrapolates():
    job = ["--ranks", "9", "--measured-ranks", "4", "--tensors", "80"]
    result = json.loads(printed_by_benchmark("scale", *job, "--json"))
    assert [size["ranks"] for size in result["sizes"]] == [2, 4]
    assert result["chunks"] == ScaledState.of("70b", 9, 80).chunks
    for size in result["sizes"]:
        assert size["stages"].keys() == result["fits"].keys()
        assert size["load_requests"]["GET"] > size["ranks"] * 3
