"""`trainable`: a checkpoint has what trains, and goes back into a model that has the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import dcp_objstore as dos
from dcp_objstore.errors import CheckpointNotFoundError, ConfigError, StateMismatchError
from dcp_objstore.state.trainable import Trainable
from tests.support.campaign import cases
from tests.support.checkpoints import Options, memory_url
from tests.support.ranks import run_ranks

TRAINED = {"adapter.weight", "adapter.bias"}
BUFFERS = {f"norm.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")}


class Net(nn.Module):
    """A frozen base with running statistics and tied weights, and an adapter."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.base = nn.Linear(6, 6)
        self.tied = nn.Linear(6, 6)
        self.tied.weight = self.base.weight
        self.norm = nn.BatchNorm1d(6)
        self.adapter = nn.Linear(6, 6)
        self.requires_grad_(False)
        self.adapter.requires_grad_(True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        base = self.norm(self.tied(self.base(x)))
        return base + self.adapter(x)


def with_optimizer(model: nn.Module) -> dict[str, Any]:
    """The optimizer holds frozen parameters, too."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return {"model": dos.trainable(model), "optimizer": optimizer}


def train(state: dict[str, Any], steps: int) -> list[float]:
    model, optimizer = state["model"].module, state["optimizer"]
    losses = []
    for _ in range(steps):
        loss = model(torch.arange(30.0).view(5, 6)).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def model_keys(url: str, **options: Any) -> set[str]:
    keys = dos.open(url, **options)
    return {key.removeprefix("model.") for key in keys if key.startswith("model.")}


def test_only_what_trains_is_saved_and_training_goes_on_from_it():
    url, before = memory_url(), with_optimizer(Net())
    train(before, 3)
    dos.save(before, url)
    saved = dos.open(url)
    assert model_keys(url) == TRAINED | BUFFERS
    states = [key for key in saved if key.startswith("optimizer.state.")]
    assert {key.rsplit(".", 1)[0] for key in states} == {f"optimizer.state.{n}" for n in TRAINED}
    left_out = {"tensors": 6, "elements": 2 * (36 + 6) + 2 * 6}
    assert saved.user_metadata == {"left_out": {"model": left_out}}
    after = with_optimizer(Net())
    with torch.no_grad():
        after["model"].module.adapter.weight.zero_()
    report = dos.load(after, url)
    assert (report.missing, report.unexpected) == ((), ())
    assert train(after, 3) == train(before, 3)


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({}, {"adapter.weight", "adapter.weight.scale", "norm.running_mean", "extra"}),
        ({"buffers": False}, {"adapter.weight", "adapter.weight.scale"}),
        (
            {"buffers": False, "frozen": ("base.weight", "extra")},
            {"adapter.weight", "adapter.weight.scale", "base.weight", "extra"},
        ),
    ],
)
def test_an_entry_belongs_to_the_part_as_its_parameter_does(settings, part):
    names = ["adapter.weight", "adapter.weight.scale", "base.weight", "base.weight.scale"]
    entries = {name: name.upper() for name in (*names, "norm.running_mean", "norm.bias", "extra")}
    kept = Trainable(Net(), **settings).part_of(entries)
    assert kept == {name: name.upper() for name in part}


def test_a_module_in_which_all_trains_is_saved_whole_and_loads_as_such():
    url, model = memory_url(), Net()
    dos.save({"model": dos.trainable(model.requires_grad_(True))}, url)
    assert model_keys(url) == set(model.state_dict())
    assert dos.open(url).user_metadata == {}
    dos.load({"model": model}, url)


def test_nothing_of_a_module_in_which_nothing_trains_is_saved(caplog):
    url, model = memory_url(), nn.Linear(2, 2).requires_grad_(False)
    dos.save({"model": dos.trainable(model)}, url)
    assert "nothing is saved" in caplog.text
    assert not dos.open(url)
    assert dos.open(url).user_metadata == {"left_out": {"model": {"tensors": 2, "elements": 6}}}
    dos.load({"model": dos.trainable(model)}, url)


def test_the_state_of_a_frozen_parameter_goes_and_comes_back_with_it():
    state = with_optimizer(model := Net())
    train(state, 1)
    model.adapter.bias.requires_grad_(False)
    dos.save(state, frozen := memory_url())
    assert not [key for key in dos.open(frozen) if "adapter.bias" in key]
    dos.load(state, frozen)  # into the optimizer that still has the state
    model.adapter.bias.requires_grad_(True)
    train(state, 1)
    dos.save(state, thawed := memory_url())
    assert {"model.adapter.bias", "optimizer.state.adapter.bias.exp_avg"} <= {*dos.open(thawed)}


def freeze(name: str) -> Callable[[Net], dict[str, Any]]:
    def change(model: Net) -> dict[str, Any]:
        model.get_parameter(name).requires_grad_(False)
        return {"model": dos.trainable(model)}

    return change


def thaw(model: Net) -> dict[str, Any]:
    return {"model": dos.trainable(model.requires_grad_(True))}


def without_adapter(model: Net) -> dict[str, Any]:
    del model.adapter
    return {"model": dos.trainable(model)}


@pytest.mark.parametrize(
    ("change", "key", "advice"),
    [
        (lambda model: {"model": model}, "model.base.weight", "dos.trainable"),
        (lambda model: {"model": model.state_dict()}, "model.base.weight", "dos.trainable"),
        (thaw, "model.base.weight", "same parameters"),
        (freeze("adapter.bias"), "model.adapter.bias", "frozen now"),
        (without_adapter, "model.adapter.weight", "not in the module"),
    ],
)
def test_a_load_wants_the_set_that_was_saved(change, key, advice):
    dos.save({"model": dos.trainable(Net(1))}, url := memory_url())
    state = change(model := Net(2))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(StateMismatchError, match=key) as raised:
        dos.load(state, url)
    assert advice in str(raised.value)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    dos.load(state, url, strict=False)


def test_of_a_whole_checkpoint_a_part_is_loaded_only_without_strict(caplog):
    dos.save({"model": (saved := Net(1))}, url := memory_url())
    state = {"model": dos.trainable(model := Net(2))}
    with pytest.raises(StateMismatchError, match="base"):
        dos.load(state, url)
    report = dos.load(state, url, strict=False)
    assert "model.base.weight" in report.unexpected
    assert "smaller" not in caplog.text
    assert torch.equal(model.adapter.weight, saved.adapter.weight)
    assert not torch.equal(model.base.weight, saved.base.weight)


def test_what_is_no_module_or_stands_in_a_tuple_is_refused():
    with pytest.raises(ConfigError, match="OrderedDict"):
        dos.trainable(Net().state_dict())  # type: ignore[arg-type]
    with pytest.raises(StateMismatchError, match="tuple"):
        dos.save({"models": (dos.trainable(Net()),)}, memory_url())


@pytest.mark.parametrize("save", [dos.save, lambda *at, **how: dos.async_save(*at, **how).result()])
@pytest.mark.parametrize("note", [{}, {"a": "x" * (32 * 1024 - 20)}])
def test_what_the_marker_has_no_room_to_note_is_refused_before_anything_is_sent(
    requests, save, note
):
    count = 1 if note else 800
    state = {f"adapter_{n:04}": dos.trainable(nn.Linear(1, 1)) for n in range(count)}
    for part in state.values():
        part.module.bias.requires_grad_(False)
    url = memory_url()
    requests.clear()
    with pytest.raises(ConfigError, match=rf"the {count} dos.trainable"):
        save(state, url, user_metadata=note, progress=False)
    assert requests == []
    if note:
        save(state, url, user_metadata={"a": note["a"][:-100]}, progress=False)


def test_torchs_own_save_refuses_it_and_commits_nothing():
    writer = dos.ObjectStoreWriter(url := memory_url())
    with pytest.raises(CheckpointException, match="torch's own"):
        dcp.save({"model": dos.trainable(Net())}, storage_writer=writer)
    with pytest.raises(CheckpointNotFoundError):
        dos.open(url)


def test_values_of_the_user_under_the_same_name_stay():
    dos.save({"model": dos.trainable(Net())}, url := memory_url(), user_metadata={"left_out": [1]})
    assert dos.open(url).user_metadata == {"left_out": [1]}
    with pytest.raises(StateMismatchError):
        dos.load({"model": Net()}, url)


# --- ranks


def spread(kind: str) -> nn.Module:
    model: nn.Module = Net()
    model.norm = nn.Identity()  # each rank of DDP would have its own statistics
    if kind == "fsdp2":
        fully_shard(model.adapter)
        fully_shard(model)
    elif kind == "ddp":
        model = DistributedDataParallel(model)
    elif kind == "fsdp1":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        settings = {"device_id": torch.device("cpu"), "device_mesh": mesh}
        model = FullyShardedDataParallel(model, use_orig_params=True, **settings)
    elif kind == "compiled":
        model = torch.compile(model, backend="eager")  # type: ignore[assignment]
    return model


def whole(model: nn.Module) -> dict[str, Any]:
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))


def train_in_a_run(rank: int, world: int, kind: str, url: str, options: Options) -> dict[str, Any]:
    """Save two steps in the background, the second on the base of the first."""
    state = with_optimizer(spread(kind))
    with dos.CheckpointManager(url, save_every=2, base="latest", storage_options=options) as run:
        for step in range(1, 5):
            train(state, 1)
            run.step(step, state)
    return whole(state["model"].module)


def resume(rank: int, world: int, kind: str, url: str, options: Options) -> dict[str, Any]:
    model = spread(kind)
    for parameter in model.parameters():
        if parameter.requires_grad:
            nn.init.zeros_(parameter)
    state = with_optimizer(model)
    with dos.CheckpointManager(url, storage_options=options, save_last=False) as run:
        assert run.load(state) == 4
    assert all(value["step"] == 4 for value in state["optimizer"].state.values())
    return whole(model)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("saves", "loads"),
    cases(
        [
            *((("fsdp2", 4), to) for to in (("fsdp2", 2), ("fsdp1", 2), ("ddp", 2), ("plain", 1))),
            *((kind, ("ddp", 2)) for kind in (("ddp", 2), ("fsdp1", 2), ("compiled", 1))),
        ],
        default=[(("fsdp2", 4), ("fsdp1", 2))],
    ),
)
def test_ranks_save_and_load_what_trains_in_any_layout(bucket, saves, loads):
    options = bucket.storage_options
    kind, world = saves
    trained = run_ranks(world, train_in_a_run, kind, bucket.url, options)[0]
    assert model_keys(bucket.at("step-4"), storage_options=options) == TRAINED
    (step,) = [
        step for step in dos.steps(bucket.url, storage_options=options) if step.name == "step-4"
    ]
    assert step.user_metadata["left_out"] == {"model": {"tensors": 4, "elements": 2 * (36 + 6)}}
    kind, world = loads
    for loaded in run_ranks(world, resume, kind, bucket.url, options):
        assert all(torch.equal(loaded[name], value) for name, value in trained.items())
    assert bucket.uploads() == []


def load_a_stage(rank: int, world: int, url: str, names: list[str]) -> set[str]:
    """Each rank has one layer, as a stage of a pipeline has."""
    stage = nn.ModuleDict({names[rank]: nn.Linear(2, 2)})
    try:
        dos.load({"model": dos.trainable(stage)}, url)
    except StateMismatchError as error:
        return {line.strip() for line in str(error).splitlines()[1:]}
    return set()


def test_stages_of_a_pipeline_ask_together_for_all_that_was_saved(tmp_path):
    url = (tmp_path / "step-1").as_uri()
    layers = nn.ModuleDict({name: nn.Linear(2, 2) for name in "abc"})
    layers.add_module("base", nn.Linear(2, 2).requires_grad_(False))
    dos.save({"model": dos.trainable(layers)}, url)
    for found in run_ranks(3, load_a_stage, url, ["a", "b", "c"]):
        assert not found
    for found in run_ranks(2, load_a_stage, url, ["a", "b"]):
        assert "model.c.weight" in found
        assert "model.a.weight" not in found
