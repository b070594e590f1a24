"""Lightning's Trainer and Fabric on a bucket: one commit for all, other ranks, our rules."""

from __future__ import annotations

import contextlib
import importlib
import operator
import os
import re
import runpy
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import dcp_objstore as dos
from dcp_objstore.checkpoint.names import DOT_METADATA_KEY, MARKER_KEY, is_index_key, is_ours
from tests.support.command_line import environment
from tests.support.programs import run_example
from tests.support.proxy import Asked, NetworkProxy
from tests.support.ranks import run_ranks, start_workers
from tests.support.servers import Bucket

pytest.importorskip("lightning")

from dcp_objstore.integrations.lightning import META_KEY, with_object_store

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "lightning_fsdp.py"
pytestmark = pytest.mark.timeout(600)


@dataclass(frozen=True)
class Job:
    """What the ranks of one job do. They work in `folder`, with credentials from the environment.

    Attributes:
        kind: "model-parallel" (FSDP2), "fsdp" (FSDP1), or "plain": Lightning without a bucket.
        callback: arguments of the `ModelCheckpoint` besides its `dirpath`.
        storage: arguments of `with_object_store`.
    """

    url: str
    environment: dict[str, str]
    folder: str
    kind: str = "model-parallel"
    steps: int = 4
    ckpt_path: str | None = None
    callback: dict[str, Any] = field(default_factory=dict)
    storage: dict[str, Any] = field(default_factory=dict)
    package: str = "lightning.pytorch"
    hparam: Any = 8


@pytest.fixture
def job(bucket: Bucket, tmp_path: Path) -> Iterator[Job]:
    """A job in a bucket; afterwards no local file, and only objects of commits, are there."""
    yield Job(bucket.url, environment(bucket.storage_options), str(tmp_path))
    assert list(tmp_path.iterdir()) == []
    assert_only_commits(bucket)


def names(bucket: Bucket) -> list[str]:
    """The committed checkpoints, the newest last."""
    found = dos.steps(bucket.url, storage_options=bucket.storage_options)
    return [step.name for step in sorted(found, key=lambda step: step.created_at)]


def assert_only_commits(bucket: Bucket) -> None:
    for name in names(bucket):
        opened = dos.open(bucket.at(name), storage_options=bucket.storage_options)
        assert opened.verify(deep=True).ok
    others = [key.rpartition("/")[2] for key in bucket.keys("")]
    assert all(name in (MARKER_KEY, DOT_METADATA_KEY) or is_ours(name) for name in others), others
    uploads = bucket.client().list_multipart_uploads(Bucket=bucket.name, Prefix=bucket.prefix)
    assert not uploads.get("Uploads")


@contextlib.contextmanager
def as_rank(rank: int, world_size: int, job: Job) -> Iterator[None]:
    """What torchrun sets, which Lightning looks at, and a working directory to look into."""
    here = Path.cwd()
    ranks = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "GROUP_RANK": 0,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": world_size,
    }
    texts = {name: str(value) for name, value in ranks.items()}
    os.chdir(job.folder)
    try:
        with mock.patch.dict(os.environ, {**texts, **job.environment}):
            yield
    finally:
        os.chdir(here)


def sharded(net: nn.Module, kind: str, mesh: Any) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    if kind == "plain":
        return net
    if kind == "model-parallel":
        return fully_shard(net, mesh=mesh["data_parallel"])
    # Lightning takes a model that is wrapped already; by itself it wraps for GPUs only.
    return FullyShardedDataParallel(net, device_id=torch.device("cpu"), use_orig_params=True)


def layers() -> nn.Module:
    torch.manual_seed(0)
    # Of the small ones, some ranks have no shard.
    return nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 1))


def make_trainer(world_size: int, job: Job) -> tuple[Any, Any, Any]:
    """A Trainer, a module for it and data."""
    pl = importlib.import_module(job.package)
    strategies = importlib.import_module(f"{job.package}.strategies")

    class Module(pl.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self, width: Any) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net: Any = None
            self.restored: Any = None

        def configure_model(self) -> None:
            if self.net is None:
                self.net = sharded(layers(), job.kind, getattr(self, "device_mesh", None))

        def on_train_start(self) -> None:
            if job.ckpt_path is not None:
                rates = [one.scheduler.last_epoch for one in self.trainer.lr_scheduler_configs]
                self.restored = (self.trainer.global_step, rates)
                # So that the test can compare all that was loaded with all that was saved.
                self.trainer.save_checkpoint(f"{job.url}/again-{world_size}.ckpt")

        def training_step(self, batch: Any, _: int) -> Any:
            loss = self.net(batch).square().mean()
            self.log("loss", loss, sync_dist=True)
            self.log("number", float(self.trainer.global_step))
            return loss

        def validation_step(self, batch: Any, _: int) -> None:
            self.log("checked", self.net(batch).square().mean(), sync_dist=True)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
            # Its state has a Counter with numbers as keys.
            scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5])
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    class CpuFsdp(strategies.FSDPStrategy):  # type: ignore[misc,name-defined]
        """Lightning refuses the class itself without a GPU."""

    strategy: Any = "auto"
    if job.kind == "model-parallel":
        strategy = strategies.ModelParallelStrategy(
            data_parallel_size=world_size, tensor_parallel_size=1
        )
    elif job.kind == "fsdp":
        strategy = CpuFsdp(state_dict_type="sharded")
    settings = {"every_n_train_steps": 2, "filename": "{step}", "save_top_k": -1, **job.callback}
    callback = pl.callbacks.ModelCheckpoint(job.url, **settings)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=strategy,
        default_root_dir=job.url,
        max_steps=job.steps,
        callbacks=[callback],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = torch.utils.data.DataLoader(torch.randn(96, 8), batch_size=4)
    if job.kind != "plain":
        with_object_store(trainer, **job.storage)
    return trainer, Module(job.hparam), data


def fit(rank: int, world_size: int, job: Job) -> dict[str, Any]:
    with as_rank(rank, world_size, job):
        trainer, module, data = make_trainer(world_size, job)
        trainer.fit(module, data, ckpt_path=job.ckpt_path)
        callback = trainer.checkpoint_callback
        return {
            "resumed": trainer.ckpt_path,
            "restored": module.restored,
            "step": trainer.global_step,
            "best": callback.best_model_path,
            "kept": sorted(path.rpartition("/")[2] for path in callback.best_k_models),
        }


def run(world_size: int, job: Job, **changes: Any) -> dict[str, Any]:
    """Run a job; what its ranks return, which is the same on all."""
    first, *others = run_ranks(world_size, fit, replace(job, **changes), timeout_seconds=280)
    assert all(other == first for other in others)
    return first  # type: ignore[no-any-return]


def assert_same(bucket: Bucket, one: str, other: str) -> None:
    """Both checkpoints have the same tensors and optimizer settings."""
    first, second = (
        dos.open(bucket.at(name), storage_options=bucket.storage_options).read(progress=False)
        for name in (one, other)
    )
    # Several ranks also save the groups of each set of parameters.
    of_ranks = {key for key in first.keys() ^ second.keys() if key.startswith("optimizer.groups.")}
    assert first.keys() - of_ranks == second.keys() - of_ranks
    for key in first.keys() - {META_KEY} - of_ranks:
        is_tensor = isinstance(first[key], torch.Tensor)
        same = torch.equal if is_tensor else operator.eq
        assert same(first[key], second[key]), key


def page_blocks() -> list[str]:
    page = (ROOT / "docs" / "frameworks" / "lightning.md").read_text()
    return re.findall(r"^```py\n(.*?)^```", page, re.M | re.S)


def in_one_file(job: Job, name: str, file: Path) -> dict[str, Any]:
    """All of a checkpoint, as Lightning reads it from a file."""
    with mock.patch.dict(os.environ, job.environment):
        dos.export_checkpoint(f"{job.url}/{name}", file, progress=False)
    return torch.load(file)  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", ["model-parallel", "fsdp"])
def test_a_trainer_goes_on_with_1_and_with_3_ranks_and_from_a_file_by_itself(
    bucket, job, kind, tmp_path_factory
):
    assert run(2, job, kind=kind)["resumed"] is None
    assert names(bucket) == ["step=2.ckpt", "step=4.ckpt"]
    alone = run(1, job, kind=kind, ckpt_path="last", steps=6)
    assert alone["resumed"].rpartition("/")[0] == bucket.at("step=4.ckpt")
    assert alone["restored"] == (4, [4])
    assert_same(bucket, "step=4.ckpt", "again-1.ckpt")
    three = run(3, job, kind=kind, ckpt_path=bucket.at("step=6.ckpt"), steps=8)
    assert three["restored"] == (6, [6])
    assert_same(bucket, "step=6.ckpt", "again-3.ckpt")
    assert names(bucket)[-1] == "step=8.ckpt"
    folder = tmp_path_factory.mktemp("local")
    saved = in_one_file(job, "step=8.ckpt", folder / "one.ckpt")
    assert saved["global_step"] == 8
    assert saved["hyper_parameters"] == {"width": 8}
    alone = run(1, job, url=str(folder), kind="plain", ckpt_path=str(folder / "one.ckpt"), steps=10)
    assert alone["restored"] == (8, [8])
    again = torch.load(folder / "again-1.ckpt")
    assert again["state_dict"].keys() == saved["state_dict"].keys()
    for name, value in saved["state_dict"].items():
        assert torch.equal(again["state_dict"][name], value)
    states = [one["optimizer_states"][0]["state"].values() for one in (again, saved)]
    for ours, theirs in zip(*states, strict=True):
        assert torch.equal(ours["exp_avg"], theirs["exp_avg"])


def test_a_rank_killed_in_a_save_leaves_the_previous_checkpoint_as_the_last(bucket, tmp_path):
    def second_save(asked: Asked) -> bool:
        return asked.method == "PUT" and "step=4" in asked.key and asked.name.startswith("__1_")

    with NetworkProxy(bucket.storage_options) as proxy, start_workers() as crew:
        held = proxy.hold(second_save)
        job = Job(bucket.url, environment(proxy.storage_options), str(tmp_path))
        running = crew.start(2, fit, job, timeout_seconds=280)
        held.wait()
        running.kill(1)
        held.release()
        outcomes = running.end()
    assert all(outcome.failed for outcome in outcomes)
    assert bucket.keys("step=4.ckpt")
    assert names(bucket) == ["step=2.ckpt"]
    again = Job(bucket.url, environment(bucket.storage_options), str(tmp_path))
    resumed = run(2, again, ckpt_path="last")
    assert resumed["restored"] == (2, [2])
    # What the dead save left is no checkpoint, so its name is free.
    assert names(bucket)[-1] == "step=4.ckpt"
    assert list(tmp_path.iterdir()) == []


def test_top_k_deletes_by_our_rules(bucket, job):
    best = {"monitor": "number", "mode": "max", "save_top_k": 2, "save_last": True}
    first = run(2, job, callback=best, steps=6, storage={"grace_seconds": 0})
    assert first["kept"] == ["step=4.ckpt", "step=6.ckpt"]
    assert names(bucket) == ["step=4.ckpt", "step=6.ckpt", "last.ckpt"]
    assert bucket.keys("step=2.ckpt") == [MARKER_KEY]  # the tombstone
    dos.pin(bucket.at("step=4.ckpt"), "paper", storage_options=bucket.storage_options)
    second = run(2, job, callback=best, ckpt_path=bucket.at("step=6.ckpt"), steps=10, storage={})
    # The callback's own state has come with the checkpoint, except for the one that was saved last.
    assert second["restored"] == (6, [6])
    assert second["kept"] == ["step=10.ckpt", "step=8.ckpt"]
    committed = set(names(bucket)) - {"again-2.ckpt"}
    # One is pinned, and from the other the job resumed.
    assert committed == {"step=4.ckpt", "step=6.ckpt", "step=8.ckpt", "step=10.ckpt", "last.ckpt"}
    third = run(1, job, callback=best, ckpt_path="last", steps=12, storage={"grace_seconds": 3600})
    assert third["kept"] == ["step=10.ckpt", "step=12.ckpt"]
    assert "step=8.ckpt" not in names(bucket)
    assert len(bucket.keys("step=8.ckpt")) > 1  # until a sweep, for readers


def save_in_the_background(rank: int, world_size: int, job: Job) -> tuple[list[str], str]:
    with as_rank(rank, world_size, job):
        trainer, module, data = make_trainer(world_size, job)
        trainer.fit(module, data)
        saved = [step.name for step in dos.steps(job.url)]
        wrong = f"{job.url}/no\tkey.ckpt"
        trainer.save_checkpoint(f"{job.url}/by-hand.ckpt")
        trainer.strategy.teardown()
        try:
            trainer.save_checkpoint(wrong)
            trainer.strategy.teardown()
        except dos.errors.DcpObjstoreError as error:
            return saved, type(error).__name__
        return saved, "nothing"


def test_saves_in_the_background_end_with_fit_and_deletions_wait_for_them(bucket, job):
    changes = {"callback": {"save_top_k": 1}, "storage": {"background": True}, "steps": 8}
    first, other = run_ranks(2, save_in_the_background, replace(job, **changes))
    assert first == (["step=8.ckpt"], "InvalidUrlError")
    assert other[1] == "InvalidUrlError"  # the other rank has not waited for the deletions
    assert names(bucket) == ["step=8.ckpt", "by-hand.ckpt"]


def stay_in_the_root(rank: int, world_size: int, job: Job) -> list[Any]:
    with as_rank(rank, world_size, job):
        said: list[Any] = []
        for steps, ckpt_path in ((2, None), (4, "last")):
            changes = {"steps": steps, "callback": {"every_n_train_steps": 1, "save_top_k": 1}}
            trainer, module, data = make_trainer(world_size, replace(job, **changes))
            trainer.checkpoint_callback.dirpath = None  # as if it was made without one
            trainer.fit(module, data, ckpt_path=ckpt_path)
            said.append(trainer.ckpt_path)
            trainer.validate(module, data, ckpt_path="best", verbose=False)
            said.append(trainer.ckpt_path)
        return said


def test_a_root_in_the_bucket_is_where_best_and_last_are_found(bucket, job):
    first, second = run_ranks(2, stay_in_the_root, job)
    assert first == second
    folder = bucket.at("checkpoints")
    before = f"{folder}/step=2.ckpt"
    last = first.pop(2)
    assert first == [None, before, f"{folder}/step=4.ckpt"]
    assert is_index_key(last.removeprefix(f"{before}/")), "the object whose time Lightning reads"


def look_at_names(rank: int, world_size: int, job: Job) -> dict[str, Any]:
    import s3fs

    with as_rank(rank, world_size, job):
        trainer, module, data = make_trainer(world_size, job)
        callback = trainer.checkpoint_callback
        listing = s3fs.S3FileSystem()
        trainer.fit(module, data)
        listing.ls(job.url)  # all that is in its cache now stays there
        found = {}
        for moment in ("saved", "deleted"):
            found[moment] = [
                callback.file_exists(f"{job.url}/{name}", trainer)
                for name in ("step=2.ckpt", "new.ckpt")
            ]
            found[f"{moment}, by s3fs"] = [
                listing.exists(f"{job.url}/{name}") for name in ("step=2.ckpt", "new.ckpt")
            ]
            if moment == "saved":
                trainer.save_checkpoint(f"{job.url}/new.ckpt")
                trainer.strategy.remove_checkpoint(f"{job.url}/step=2.ckpt")
                trainer.strategy.remove_checkpoint(f"{job.url}/there-is-none.ckpt")
                trainer.strategy.teardown()
        listing.clear_instance_cache()
        return found


def test_what_exists_is_what_is_committed_whatever_s3fs_remembers(bucket, job):
    for found in run_ranks(1, look_at_names, job):
        assert found["saved"] == found["saved, by s3fs"] == [True, False]
        assert found["deleted"] == [False, True]
        assert found["deleted, by s3fs"] == [True, False]


def test_names_that_are_taken_get_a_version(bucket, job):
    run(1, job, steps=2)  # so that Lightning lists the folder when the next job starts
    twice = {"monitor": "number", "mode": "max", "filename": "model", "save_top_k": 2}
    found = run(1, job, callback=twice, steps=4)
    assert found["kept"] == ["model-v1.ckpt", "model.ckpt"]
    assert names(bucket) == ["step=2.ckpt", "model.ckpt", "model-v1.ckpt"]


class Width:
    """A hyperparameter that torch does not load unasked."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Width)

    __hash__ = None  # type: ignore[assignment]


def load_untrusted(rank: int, world_size: int, job: Job) -> list[str]:
    with as_rank(rank, world_size, job):
        said = []
        for storage in ({}, {"trust_pickle": True}):
            trainer, module, data = make_trainer(world_size, replace(job, storage=storage))
            try:
                trainer.fit(module, data, ckpt_path="last")
                said.append(type(module.restored).__name__)
            except dos.errors.UntrustedPickleError as error:
                said.append(str(error))
        return said


def test_objects_need_trust_and_checkpoints_of_weights_alone_are_not_the_last(bucket, job):
    run(2, job, hparam=Width(), steps=2)
    run(1, job, callback={"filename": "light-{step}", "save_weights_only": True}, steps=2)
    assert names(bucket) == ["step=2.ckpt", "light-step=2.ckpt"]
    (refused, loaded), _ = run_ranks(2, load_untrusted, replace(job, ckpt_path="last"))
    assert "trust_pickle=True" in refused
    assert loaded == "tuple"


def test_the_older_name_of_the_package_is_served_too(bucket, job):
    pytest.importorskip("pytorch_lightning")
    run(1, job, package="pytorch_lightning", steps=2)
    found = run(1, job, package="pytorch_lightning", ckpt_path="last", steps=4)
    assert found["restored"] == (2, [2])
    assert names(bucket) == ["step=2.ckpt", "again-1.ckpt", "step=4.ckpt"]


def work_by_fabric(rank: int, world_size: int, job: Job) -> dict[str, Any]:
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import FSDPStrategy, ModelParallelStrategy

    class CpuFsdp(FSDPStrategy):  # type: ignore[misc]
        """Lightning refuses the class itself without a GPU."""

    with as_rank(rank, world_size, job):
        strategy = (
            ModelParallelStrategy(
                lambda net, mesh: sharded(net, "model-parallel", mesh),
                data_parallel_size=world_size,
                tensor_parallel_size=1,
            )
            if job.kind == "model-parallel"
            else CpuFsdp(state_dict_type="sharded")
        )
        fabric = with_object_store(Fabric(accelerator="cpu", strategy=strategy, devices=world_size))
        fabric.launch()
        net = layers() if job.kind == "model-parallel" else sharded(layers(), "fsdp", None)
        net = fabric.setup_module(net)
        optimizer: Any = fabric.setup_optimizers(torch.optim.AdamW(net.parameters(), lr=0.1))
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3])
        state = {"net": net, "optimizer": optimizer, "scheduler": scheduler, "step": 0}
        remainder = {}
        if job.ckpt_path is not None:
            remainder = fabric.load(job.ckpt_path, state)
            fabric.save(f"{job.url}/again-{world_size}.ckpt", {**state, **remainder})
        for _ in range(2):
            fabric.backward(net(torch.ones(4, 8)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            state["step"] += 1
        fabric.save(f"{job.url}/{state['step']}.ckpt", {**state, "note": {1: "one"}})
        same = state["scheduler"] is scheduler
        errors = []
        calls: list[Any] = [
            lambda: fabric.load(f"{job.url}/{state['step']}.ckpt", {"net": net, "other": 1}),
            lambda: fabric.load(f"{job.url}/{state['step']}.ckpt"),
            lambda: fabric.load(f"{job.url}/none.ckpt", state),
            lambda: fabric.save(f"{job.url}/no.ckpt", state, filter={"net": lambda *_: True}),
        ]
        for call in calls:
            try:
                call()
            except Exception as error:  # noqa: BLE001
                errors.append(type(error).__name__)
        return {
            "remainder": remainder,
            "same": same,
            "step": state["step"],
            "scheduled": scheduler.last_epoch,
            "errors": errors,
        }


@pytest.mark.parametrize("kind", ["model-parallel", "fsdp"])
def test_fabric_goes_on_with_1_and_with_3_ranks(bucket, job, kind):
    job = replace(job, kind=kind)
    for world_size, steps in ((2, 2), (1, 4), (3, 6)):
        before = bucket.at(f"{steps - 2}.ckpt") if steps > 2 else None
        for found in run_ranks(world_size, work_by_fabric, replace(job, ckpt_path=before)):
            assert found["step"] == found["scheduled"] == steps
            assert found["remainder"] == ({"note": {1: "one"}} if before else {})
            assert found["same"]
            assert found["errors"] == [
                "StateMismatchError",
                "ConfigError",
                "CheckpointNotFoundError",
                "NotImplementedError",
            ]
        if before:
            assert_same(bucket, f"{steps - 2}.ckpt", f"again-{world_size}.ckpt")
    saved = dos.open(bucket.at("6.ckpt"), storage_options=bucket.storage_options)
    assert "net.0.weight" in saved
    assert "optimizer.state.0.weight.exp_avg" in saved


def test_what_cannot_be_served_is_refused():
    from lightning.pytorch import Trainer
    from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy

    class CpuFsdp(FSDPStrategy):  # type: ignore[misc]
        pass

    def trainer(strategy: Any) -> Any:
        return Trainer(accelerator="cpu", devices=2, strategy=strategy, logger=False)

    with pytest.raises(dos.errors.ConfigError, match='state_dict_type="sharded"'):
        with_object_store(trainer(CpuFsdp()))
    with pytest.raises(dos.errors.ConfigError, match="save_distributed_checkpoint=True"):
        with_object_store(trainer(ModelParallelStrategy(save_distributed_checkpoint=False)))


def keep_local(rank: int, world_size: int, job: Job) -> list[str]:
    with as_rank(rank, world_size, job):
        trainer, module, data = make_trainer(world_size, job)
        trainer.fit(module, data, ckpt_path=None)
        trainer, module, data = make_trainer(world_size, replace(job, steps=6))
        trainer.fit(module, data, ckpt_path="last")
        return [str(trainer.ckpt_path), *sorted(path.name for path in Path(job.url).iterdir())]


@pytest.mark.parametrize("kind", ["model-parallel", "fsdp"])
def test_local_paths_stay_lightnings_and_have_the_same_keys(bucket, job, tmp_path_factory, kind):
    from lightning.fabric.utilities.load import _load_distributed_checkpoint
    from lightning.pytorch.utilities.consolidate_checkpoint import _format_checkpoint

    run_folder = tmp_path_factory.mktemp("run")
    local = {"url": str(run_folder), "kind": kind, "callback": {"save_last": True}}
    (resumed, *found), _ = run_ranks(2, keep_local, replace(job, **local))
    assert resumed == str(run_folder / "last.ckpt")
    assert found == ["last.ckpt", "step=2.ckpt", "step=4.ckpt", "step=6.ckpt"]
    consolidated = _load_distributed_checkpoint(run_folder / "step=2.ckpt")
    run(2, job, kind=kind, steps=2)
    if kind == "model-parallel":  # of which Lightning's tool knows nothing
        consolidated["model"] = consolidated.pop("state_dict")
    theirs = _format_checkpoint(consolidated)
    ours = in_one_file(job, "step=2.ckpt", run_folder / "one.ckpt")
    assert set(ours) == set(theirs)
    assert ours["state_dict"].keys() == theirs["state_dict"].keys()
    one, other = ours["optimizer_states"][0], theirs["optimizer_states"][0]
    assert one["state"].keys() == other["state"].keys()
    assert one["param_groups"] == other["param_groups"]


def test_the_example_trains_and_goes_on_with_another_number_of_ranks(bucket, tmp_path):
    for ranks, steps, before in ((2, 10, "nothing"), (1, 15, "s3://")):
        words = ranks, bucket.url, str(steps)
        printed = run_example(EXAMPLE, *words, bucket=bucket, cwd=tmp_path)
        assert f"resumed from {before}" in printed
        assert f"trained to step {steps}" in printed
    assert "epoch=0-step=10.ckpt" in names(bucket)  # from which the job resumed
    assert list(tmp_path.iterdir()) == []
    assert_only_commits(bucket)
    one = tmp_path / "one.ckpt"
    url = bucket.at("epoch=0-step=10.ckpt")
    dos.export_checkpoint(url, one, storage_options=bucket.storage_options)
    alone = runpy.run_path(str(EXAMPLE))["Classifier"].load_from_checkpoint(one)
    saved = torch.load(one)["state_dict"]
    assert saved.keys() == alone.state_dict().keys()
    assert all(torch.equal(saved[name], value) for name, value in alone.state_dict().items())


def test_the_page_shows_lines_of_the_example():
    example = {line.strip() for line in EXAMPLE.read_text().splitlines()}
    lines = [line.strip() for line in page_blocks()[0].splitlines() if line.strip()]
    assert set(lines) <= example, set(lines) - example
    assert len(EXAMPLE.read_text().splitlines()) < 80
