"""Patched checkouts of other frameworks: their own checkpoint code keeps a step in a bucket.

Each test skips unless `PYTHONPATH` has a checkout with the patch of docs/frameworks/others.md.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import typing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import dcp_objstore as dos
from tests.support.elastic import environment
from tests.support.ranks import run_ranks

pytestmark = [pytest.mark.backends("seaweed"), pytest.mark.timeout(600)]

# What the checkpoint modules import and do not need here: kernels for GPUs, and configurations.
STAND_INS = {
    "prime-rl": ("prime_rl.configs", "prime_rl.trainer.optim"),
    "SkyRL": ("flash_attn",),
}


class Training(NamedTuple):
    """What a framework hands to its checkpoint code."""

    model: Any
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler


class Data:
    """A data loader as torchdata's `StatefulDataLoader`."""

    def __init__(self, batch: int) -> None:
        self.batch = batch

    def state_dict(self) -> dict[str, int]:
        return {"batch": self.batch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.batch = state["batch"]


def trained(seed: int) -> Training:
    torch.manual_seed(seed)
    model = fully_shard(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * seed)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
    for _ in range(seed):
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        scheduler.step()
    return Training(model, optimizer, scheduler)


def tensors(training: Training) -> list[torch.Tensor]:
    moments = [part["exp_avg"] for part in training.optimizer.state.values()]
    return [part.full_tensor() for part in (*training.model.parameters(), *moments)]


def assert_same(loaded: Training, saved: Training) -> None:
    for one, other in zip(tensors(loaded), tensors(saved), strict=True):
        assert torch.equal(one, other)
    assert loaded.scheduler.state_dict() == saved.scheduler.state_dict()


def verl(url: str) -> None:
    from verl.utils.checkpoint.checkpoint_handler import CheckpointHandler
    from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager

    def handler(training: Training, data: Data) -> Any:
        manager = FSDPCheckpointManager(*training)
        engine = SimpleNamespace(
            save_checkpoint=manager.save_checkpoint,
            load_checkpoint=manager.load_checkpoint,
            is_mp_src_rank_with_outputs=lambda: True,
            get_data_parallel_rank=dist.get_rank,
        )
        return CheckpointHandler(engine, data, default_local_dir=url)

    saved, loaded, data = trained(1), trained(2), Data(0)
    for step in (9, 10):
        handler(saved, Data(step + dist.get_rank())).save_checkpoint(step)
    assert handler(loaded, data).load_checkpoint() == 10
    assert data.batch == 10 + dist.get_rank()
    assert_same(loaded, saved)


def prime_rl(url: str) -> None:
    from prime_rl.trainer.ckpt import CheckpointManager, Progress

    config = SimpleNamespace(skip_optimizer=False, keep_last=1, keep_interval=None)
    saved, loaded, data, progress = trained(1), trained(2), Data(0), Progress()
    manager = CheckpointManager(Path(url), config)
    for step in (9, 10):
        at = (saved.scheduler, Progress(step=step), Data(step + dist.get_rank()))
        manager.save(step, saved.model, [saved.optimizer], *at)
    manager.maybe_clean()
    dist.barrier()
    manager = CheckpointManager(Path(url), config)
    assert manager.ckpt_steps == [10]
    manager.load(10, loaded.model, [loaded.optimizer], loaded.scheduler, progress, data)
    assert (progress.step, data.batch) == (10, 10 + dist.get_rank())
    assert_same(loaded, saved)


def skyrl(url: str) -> None:
    from skyrl.backends.skyrl_train.distributed.fsdp_strategy import FSDPStrategy

    strategy = FSDPStrategy(SimpleNamespace(cpu_offload=True))
    saved, loaded, folder = trained(1), trained(2), f"{url}/global_step_10/policy"
    strategy.save_checkpoint(
        saved.model, folder, 0, saved.optimizer, saved.scheduler, client_state={"seen": 7}
    )
    _, states = strategy.load_checkpoint(loaded.model, folder, loaded.optimizer, loaded.scheduler)
    assert states["client_state"] == {"seen": 7}
    assert_same(loaded, saved)


def automodel(url: str) -> None:
    from nemo_automodel.components.checkpoint.config import CheckpointingConfig

    config = CheckpointingConfig(
        checkpoint_dir=url, model_save_format="torch_save", save_consolidated=False
    )
    checkpointer = config.build(dp_rank=dist.get_rank(), tp_rank=0, pp_rank=0)
    saved, loaded, data, step = trained(1), trained(2), Data(0), f"{url}/epoch_0_step_10"
    checkpointer.lifecycle.reserve(step)
    checkpointer.save_model(saved.model, step)
    checkpointer.save_optimizer(saved.optimizer, saved.model, step)
    checkpointer.save_on_dp_ranks(Data(10 + dist.get_rank()), "dataloader", step)
    checkpointer.lifecycle.publish(step, best_val_metric=None, metric_key=None)
    checkpointer.load_model(loaded.model, f"{step}/model")
    checkpointer.load_optimizer(loaded.optimizer, loaded.model, step)
    checkpointer.load_on_dp_ranks(data, "dataloader", step)
    assert data.batch == 10 + dist.get_rank()
    for one, other in zip(tensors(loaded), tensors(saved), strict=True):
        assert torch.equal(one, other)


class Door(NamedTuple):
    """A framework: its package, what it does with a URL, and what is committed then."""

    package: str
    train: Callable[[str], None]
    committed: tuple[str, ...]


DOORS = {
    "verl": Door("verl", verl, ("global_step_9", "global_step_10", "data/step-9", "data/step-10")),
    "prime-rl": Door("prime_rl", prime_rl, ("checkpoints/step_10",)),
    "SkyRL": Door("skyrl", skyrl, ("global_step_10/policy",)),
    "Automodel": Door(
        "nemo_automodel",
        automodel,
        tuple(f"epoch_0_step_10/{part}" for part in ("model", "optim", "dataloader")),
    ),
}


def _stand_in(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    return AnyType(name, (), {"__init__": lambda *_, **__: None, "__call__": lambda *_, **__: None})


class AnyType(type):
    """The type of classes that have any attribute and take any arguments, as decorators do."""

    def __getattr__(cls, name: str) -> type:
        return _stand_in(name)


class StandIn(ModuleType):
    """A module in which each name is such a class."""

    __path__: typing.ClassVar[list[str]] = []
    __version__ = "0.0"

    def __getattr__(self, name: str) -> type:
        return _stand_in(name)


class StandIns:
    """Finds a stand-in for each module that is named, and for those below it."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names

    def find_spec(self, name: str, *_: Any) -> Any:
        is_below = any(name == top or name.startswith(f"{top}.") for top in self.names)
        return ModuleSpec(name, self) if is_below else None  # type: ignore[arg-type]

    def create_module(self, spec: Any) -> ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


@contextmanager
def imports_on_a_cpu(name: str) -> Iterator[None]:
    import typing_extensions

    finder: Any = StandIns(STAND_INS.get(name, ()))
    with (
        mock.patch.object(sys, "meta_path", [finder, *sys.meta_path]),
        # Some classes are written for Python 3.12, whose TypedDict pydantic can look into.
        mock.patch.object(typing, "TypedDict", typing_extensions.TypedDict),
    ):
        yield


def save_and_load(rank: int, world_size: int, name: str, url: str, env: dict[str, str]) -> None:
    env = env | {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
    env |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world_size)}
    with mock.patch.dict(os.environ, env), dos.install(), imports_on_a_cpu(name):
        DOORS[name].train(url)
        assert not Path("s3:").exists()


@pytest.mark.parametrize("name", DOORS)
def test_its_own_checkpoint_code_saves_to_a_bucket_and_resumes_from_it(bucket, name):
    door = DOORS[name]
    if importlib.util.find_spec(door.package) is None:
        pytest.skip(f"no checkout of {name} on PYTHONPATH")
    run_ranks(2, save_and_load, name, bucket.url, environment(bucket), timeout_seconds=300)
    for step in door.committed:
        dos.open(bucket.at(step), storage_options=bucket.storage_options).verify()
