"""torchtitan's own CheckpointManager keeps a run in a bucket: what it saves, loads and deletes."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchtitan")

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.staging import StagingOptions
from torch.distributed.fsdp import fully_shard
from torchtitan.components.checkpointer import CheckpointManager, dcp as titan_dcp
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.tools import filesystem

import dcp_objstore as dos
from dcp_objstore.checkpoint.names import MARKER_KEY
from dcp_objstore.integrations import torchtitan
from dcp_objstore.run import housekeeping
from dcp_objstore.run.steps import step_numbers
from dcp_objstore.run.sweep import sweep_below
from dcp_objstore.stores import StoreSpec
from tests.support.checkpoints import Options
from tests.support.programs import run_example
from tests.support.ranks import run_ranks
from tests.support.servers import Bucket

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.backends("seaweed")
EXAMPLE = ROOT / "examples" / "torchtitan_train.py"


@pytest.fixture(autouse=True)
def no_local_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is installed after a test, and none leaves a folder `s3:` behind."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    yield
    dos.uninstall()
    assert list(Path().iterdir()) == []


class Numbers(torch.utils.data.IterableDataset[int]):
    """Counts on from where it was."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        while True:
            self.at += 1
            yield self.at

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Job:
    """What torchtitan's Trainer makes around its CheckpointManager. Its values tell their step."""

    def __init__(self, url: str, **config: Any) -> None:
        self.step = 0
        self.model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 7))
        world = dist.get_world_size()
        fully_shard(self.model, mesh=dist.init_device_mesh("cpu", (world,)))
        self.optimizers = default_adamw(fused=False).build(model_parts=[self.model])
        schedulers = LRSchedulersContainer.Config(warmup_steps=2)
        self.schedulers = schedulers.build(optimizers=self.optimizers, training_steps=100)
        self.loader = ParallelAwareDataloader(Numbers(), dist.get_rank(), world, batch_size=None)
        config = {"interval": 1, "last_save_model_only": False, **config}
        self.manager = CheckpointManager.Config(enable=True, folder=url, **config).build(
            dataloader=self.loader,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=self.schedulers,
            states={"train_state": self},
            sd_adapter=None,
        )

    def state_dict(self) -> dict[str, Any]:
        return {"step": torch.tensor(self.step, dtype=torch.int32)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = int(state["step"])

    def tensors(self) -> list[Any]:
        states = [state for one in self.optimizers for state in one.state.values()]
        return [*self.model.parameters(), *(state["exp_avg"] for state in states)]

    def train(self, steps: int) -> None:
        numbers = iter(self.loader)
        for _ in range(steps):
            self.step += 1
            self.number = next(numbers)
            self.model(torch.ones(2, 6)).sum().backward()
            self.optimizers.step()
            self.optimizers.zero_grad()
            self.schedulers.step()
            with torch.no_grad():
                for place, tensor in enumerate(self.tensors()):
                    tensor.fill_(self.step + place / 8)
            self.manager.save(self.step)
            self.manager.maybe_wait_for_staging()

    def resume(self, step: int = -1) -> int:
        """Load, and check that every value is that of one step."""
        if not self.manager.load(step):
            return 0
        for place, tensor in enumerate(self.tensors()):
            whole = tensor.full_tensor()
            assert torch.equal(whole, torch.full_like(whole, self.step + place / 8))
        assert self.schedulers.schedulers[0].last_epoch == self.step
        return self.step

    def close(self) -> None:
        self.manager.maybe_wait_for_saving()
        self.manager.close()


def staging_on_cpu(**settings: bool) -> StagingOptions:
    """torchtitan's options without what needs a GPU."""
    gpu = {"use_pinned_memory": False, "use_non_blocking_copy": False}
    return StagingOptions(**{**settings, **gpu})


def train(
    rank: int, world: int, url: str, options: Options, steps: int, config: dict[str, Any]
) -> tuple[int, int]:
    """Resume and train some steps; where it resumed, and what came last from the data loader."""
    if not torch.accelerator.is_available():
        titan_dcp.StagingOptions = staging_on_cpu  # type: ignore[misc]
    load_step = config.get("load_step", -1)
    with torchtitan.install(storage_options=options):
        job = Job(url, **config)
        start = job.resume(load_step)
        job.train(steps)
        job.close()
    return start, job.number


def committed(bucket: Bucket) -> list[int]:
    """The steps of the run, after a look at everything that the bucket holds."""
    assert bucket.uploads() == []
    found = step_numbers(StoreSpec(bucket.url, bucket.storage_options))
    left: dict[str, set[str]] = {}
    for key in bucket.keys():  # noqa: SIM118 - not a mapping
        name, _, rest = key.partition("/")
        left.setdefault(name, set()).add(rest)
    for name, keys in left.items():
        if int(name.removeprefix("step-")) not in found:
            assert keys == {MARKER_KEY}, name  # the tombstone
            continue
        checkpoint = dos.open(bucket.at(name), storage_options=bucket.storage_options)
        assert checkpoint.verify(deep=True).ok
        assert not any(key.startswith(".save-") for key in keys)
    return list(found)


@pytest.mark.parametrize("mode", ["disabled", "async", "async_with_pinned_mem"])
def test_a_run_is_saved_tidied_up_and_resumed_on_another_number_of_ranks(bucket, mode):
    run: tuple[Any, ...] = (bucket.url, bucket.storage_options)
    config: dict[str, Any] = {"async_mode": mode, "keep_latest_k": 2}
    assert run_ranks(2, train, *run, 4, config) == [(0, 4)] * 2
    # Where a save goes on in the background, it does not count yet when the others are tidied up.
    assert {3, 4} <= set(committed(bucket)) <= ({3, 4} if mode == "disabled" else {2, 3, 4})
    dos.pin(bucket.at("step-3"), "paper", storage_options=bucket.storage_options)
    # torchtitan cannot split the state of its data loader, so that begins from the start.
    config["exclude_from_loading"] = ["dataloader"]
    assert run_ranks(3, train, *run, 4, config) == [(4, 4)] * 3
    # 3 is pinned, and the last job resumed from 4.
    kept = {3, 4, 7, 8}
    assert kept <= set(committed(bucket)) <= (kept if mode == "disabled" else kept | {6})


def load_again_and_again(
    rank: int, world: int, url: str, options: Options
) -> tuple[list[int], list[str]]:
    with torchtitan.install(storage_options=options):
        job, other = Job(url, keep_latest_k=2), Job(url, keep_latest_k=2)
        found = []
        for steps in (2, 6):
            other.train(steps)
            found.append(job.resume())
        listed = torchtitan._loadable

        def and_then_one_more(run: Any) -> Any:
            """Another job commits a step right after the steps were listed."""
            steps = listed(run)
            bucket = Bucket("seaweed", url, options, options)
            for key in sorted(bucket.keys("step-8"), key=MARKER_KEY.__eq__):
                bucket.put(f"step-9/{key}", bucket.get(f"step-8/{key}"))
            return steps

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(torchtitan, "_loadable", and_then_one_more)
            found.append(job.resume())
        job.close()
        other.close()
        dist.barrier()
        return found, filesystem.listdir(url)


def test_all_ranks_load_the_same_step_whenever_they_load(bucket):
    found = run_ranks(2, load_again_and_again, bucket.url, bucket.storage_options)
    assert found == [([2, 8, 8], ["step-2", "step-7", "step-8", "step-9"])] * 2


def test_a_job_that_went_back_keeps_where_it_came_from_and_its_last_step(bucket):
    run: tuple[Any, ...] = (bucket.url, bucket.storage_options)
    run_ranks(2, train, *run, 4, {"keep_latest_k": 0})
    # With as many ranks as before, the data loader goes on, too.
    went_on = run_ranks(2, train, *run, 2, {"keep_latest_k": 2, "load_step": 1})
    assert went_on == [(1, 3)] * 2
    # 2 and 3 were saved again. With 2 kept, 1 and 2 are too old, but the job resumed from 1.
    found = step_numbers(StoreSpec(bucket.url, bucket.storage_options))
    assert found == (1, 3, 4)


def refused(rank: int, world: int, url: str, options: Options) -> str:
    with torchtitan.install(storage_options={**options, "secret": "wrong"}):
        job = Job(url)
        try:
            job.resume()
        except dos.errors.DcpObjstoreError as error:
            return f"{type(error).__name__} {error.rank}"
        finally:
            job.close()
    return "resumed"


def test_a_listing_that_fails_is_the_same_error_on_all_ranks(bucket):
    found = run_ranks(2, refused, bucket.url, bucket.storage_options)
    assert found == ["CredentialsError 0"] * 2


def train_with_torchs_own_writer(rank: int, world: int, folder: str) -> None:
    with torchtitan.install():
        job = Job(folder, keep_latest_k=2)
        assert job.resume() == 0
        job.train(3)
        job.close()


def test_a_run_of_torchs_own_writer_is_resumed_and_left_alone(bucket, tmp_path):
    run_ranks(2, train_with_torchs_own_writer, str(tmp_path / "run"))
    assert sorted(one.name for one in (tmp_path / "run").iterdir()) == ["step-2", "step-3"]
    before = [one for one in (tmp_path / "run").rglob("*") if one.is_file()]
    for one in before:
        bucket.put(str(one.relative_to(tmp_path / "run")), one.read_bytes())
    bucket.put("step-9/__0_0.distcp", b"torch's writer was killed here")
    run: tuple[Any, ...] = (bucket.url, bucket.storage_options)
    assert run_ranks(2, train, *run, 3, {"keep_latest_k": 2})[0] == (3, 6)
    keys = bucket.keys()
    assert {str(one.relative_to(tmp_path / "run")) for one in before} <= set(keys)
    found = step_numbers(StoreSpec(bucket.url, bucket.storage_options))
    assert found == (5, 6)


def test_a_folder_is_looked_at_and_tidied_up_by_the_librarys_rules(bucket, tmp_path, monkeypatch):
    swept: list[str] = []

    def sweep(run: StoreSpec, **settings: Any) -> dos.reports.SweepReport:
        swept.append(run.url)
        return sweep_below(run, **settings)

    monkeypatch.setattr(housekeeping, "sweep_below", sweep)
    options = bucket.storage_options
    torchtitan.install(storage_options=options)
    assert not filesystem.exists(bucket.url)
    for step in (1, 9, 10):
        dos.save({"step": step}, bucket.at(f"step-{step}"), storage_options=options)
    bucket.put("step-11/__0_0.00000000000000000000000a.distcp", b"not committed")
    bucket.put("notes.txt", b"not a step")
    assert filesystem.listdir(bucket.url) == ["step-1", "step-9", "step-10"]
    assert filesystem.isdir(bucket.url)
    assert filesystem.isfile(bucket.at("notes.txt"))
    assert not filesystem.isfile(bucket.at("step-1"))

    dos.pin(bucket.at("step-9"), "paper", storage_options=options)
    with pytest.raises(dos.errors.CheckpointPinnedError, match="paper"):
        filesystem.rmtree(bucket.at("step-9"))
    with pytest.raises(dos.errors.InputError, match="newest"):
        filesystem.rmtree(bucket.at("step-10"))
    filesystem.rmtree(bucket.at("step-1"))
    filesystem.rmtree(bucket.at("step-1"))  # as with a local folder, it does not have to be there
    assert filesystem.listdir(bucket.url) == ["step-9", "step-10"]
    assert bucket.keys("step-1") == ["_COMMIT"], "a tombstone"
    assert swept == [bucket.url]  # once an hour

    (tmp_path / "local" / "step-1").mkdir(parents=True)
    assert filesystem.listdir(tmp_path / "local") == ["step-1"]
    filesystem.rmtree(tmp_path / "local")
    assert not filesystem.exists(tmp_path / "local")


def test_a_torchtitan_without_these_functions_is_refused(monkeypatch):
    monkeypatch.setattr(torchtitan, "_hook", torchtitan._hook.__wrapped__)
    monkeypatch.delattr(filesystem, "rmtree")
    with pytest.raises(dos.errors.UnsupportedError, match="rmtree"):
        torchtitan.install()
    assert type(FileSystemWriter("s3://bucket/key")) is FileSystemWriter


def test_an_install_that_is_refused_leaves_that_of_the_library_in_order(tmp_path):
    run = (tmp_path / "run").as_uri()
    for step in (1, 2):
        dos.save({"step": step}, f"{run}/step-{step}", progress=False)
    program = """
import contextlib, sys
import dcp_objstore as dos
from dcp_objstore.integrations import torchtitan
from torchtitan.tools import filesystem

with contextlib.suppress(dos.errors.ConfigError):
    torchtitan.install(schemes="file")
dos.install(schemes=["file"])
filesystem.rmtree(f"{sys.argv[1]}/step-1")
assert filesystem.listdir(sys.argv[1]) == ["step-2"]
"""
    subprocess.run([sys.executable, "-c", program, run], check=True)


def test_the_example_goes_on_with_another_number_of_ranks(bucket):
    for ranks, steps, start in ((2, 30, 0), (1, 50, 30)):
        words = ranks, bucket.url, str(steps)
        printed = run_example(EXAMPLE, *words, bucket=bucket, cwd=Path.cwd())
        assert f"after step {start}, trained to step {steps}" in printed


def test_the_page_shows_what_the_example_does():
    page = (ROOT / "docs" / "frameworks" / "torchtitan.md").read_text()
    example = EXAMPLE.read_text()
    launcher, shown = re.findall(r"^```py\n(.*?)^```", page, re.M | re.S)
    compile(launcher, "launcher", "exec")
    assert "    torchtitan.install()" in launcher
    lines = {line.strip() for line in example.splitlines()}
    assert {line.strip() for line in shown.splitlines()} <= lines
