"""examples/: the commands in their first lines run on a bucket and do what the text says."""

from __future__ import annotations

import ast
import os
import re
import shlex
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import dcp_objstore as dos
from dcp_objstore.checkpoint.names import MARKER_KEY
from tests.support.campaign import cases
from tests.support.command_line import environment
from tests.support.programs import run_in_forks, run_in_processes
from tests.support.servers import Bucket

EXAMPLES = Path(__file__).parents[2] / "examples"
Run = Callable[..., str]


def commands(name: str) -> list[str]:
    """The commands in the first lines of an example."""
    text = ast.get_docstring(ast.parse((EXAMPLES / name).read_text()), clean=False) or ""
    return re.findall(r"^    ((?:torchrun|python) .*)$", text, re.M)


@pytest.fixture
def run(bucket: Bucket, tmp_path: Path) -> Run:
    """Run a command as the reader does, in a folder that holds nothing but `examples`."""
    (tmp_path / "examples").symlink_to(EXAMPLES)

    def call(command: str, *, succeeds: bool | None = True, warm: bool = False) -> str:
        assert "s3://bucket/" in command
        words = shlex.split(command.replace("s3://bucket", bucket.url))
        env = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": f"{EXAMPLES.parent}:{os.environ.get('PYTHONPATH', '')}",
            **environment(bucket.storage_options),
            # Without it each torchrun wants port 29500, and tests run at the same time.
            "PET_STANDALONE": "1",
            "OMP_NUM_THREADS": "1",
        }
        run_words = run_in_forks if warm else run_in_processes
        printed = run_words(words, tmp_path, env, succeeds)
        # A library that takes the URL for a path makes a folder `s3:`.
        assert {path.name for path in tmp_path.iterdir()} <= {"examples", "model.pt"}
        return printed

    return call


def assert_whole(bucket: Bucket, *names: str) -> None:
    """These checkpoints are committed and every byte of them verifies; no other one is."""
    markers = [key for key in bucket.keys() if key.rpartition("/")[2] == MARKER_KEY]  # noqa: SIM118
    assert sorted(markers) == sorted(f"{name}/{MARKER_KEY}" for name in names)
    for name in names:
        found = dos.open(bucket.at(name), storage_options=bucket.storage_options)
        assert found.verify(deep=True).ok
    assert bucket.uploads() == []


@pytest.mark.backends("seaweed")
def test_what_ddp_saved_is_whole_and_a_plain_model_takes_it(run, bucket):
    two, _ = commands("ddp.py")
    assert "started at step 0, saved step 10" in run(two, warm=True)
    assert_whole(bucket, "run")
    saved = dos.read_state_dict(bucket.at("run"), storage_options=bucket.storage_options)
    assert saved["step"] == 10
    # No key begins with "module.".
    assert set(saved["model"]) == {"0.weight", "0.bias", "2.weight", "2.bias"}


@pytest.mark.campaign
@pytest.mark.backends("seaweed")
def test_ddp_resumes_on_one_rank(run, bucket):
    two, one = commands("ddp.py")
    run(two)
    assert "resumed from step 10, saved step 20" in run(one)
    assert_whole(bucket, "run")


@pytest.mark.parametrize("warm", cases([True, False], default=[True]))
@pytest.mark.backends("seaweed")
def test_what_fsdp_saved_on_two_ranks_loads_alone(run, bucket, tmp_path, warm):
    save, _, export = commands("fsdp_save_load_reshard.py")
    total = re.findall(r"sum up to (\S+?)[,\n]", run(save, warm=warm) + run(export, warm=warm))
    assert len(total) == 2
    assert total[0] == total[1]
    assert_whole(bucket, "step-1")
    weights = torch.load(tmp_path / "model.pt", weights_only=True)
    assert f"{sum(weight.sum().item() for weight in weights.values()):.3f}" == total[0]


@pytest.mark.campaign
@pytest.mark.backends("seaweed")
def test_what_fsdp_saved_on_two_ranks_loads_on_three(run):
    save, load, _ = commands("fsdp_save_load_reshard.py")
    total = re.findall(r"sum up to (\S+)", run(save) + run(load))
    assert len(total) == 2
    assert total[0] == total[1]


@pytest.mark.backends("seaweed")
def test_the_manager_loses_no_last_checkpoint(run, bucket):
    _, killed, resumed = commands("last_checkpoint.py")
    run(killed, succeeds=False, warm=True)
    assert_whole(bucket, "run/step-10")
    assert "resumed from step 10, saved: step-10 step-20 step-25" in run(resumed, warm=True)
    assert_whole(bucket, "run/step-10", "run/step-20", "run/step-25")


@pytest.mark.campaign
@pytest.mark.backends("seaweed")
def test_the_naive_loop_loses_its_last_checkpoint(run, bucket):
    naive, *_ = commands("last_checkpoint.py")
    # Status 0 if the save of step 20 fails before the end of the program, otherwise 120.
    run(naive, succeeds=None)
    assert_whole(bucket, "naive/step-10")


@pytest.mark.campaign
@pytest.mark.backends("seaweed")
def test_each_stage_of_async_save_tells_how_long_it_held_the_loop(run, bucket):
    (command,) = commands("async_save.py")
    held = re.findall(r"stage (\d) held the loop for \d+\.\d+ s", run(command, warm=True))
    assert held == ["0", "1", "2", "3"]
    assert_whole(bucket, *(f"run/step-{stage}" for stage in held))


@pytest.mark.parametrize("warm", cases([True, False], default=[True]))
@pytest.mark.backends("seaweed")
def test_an_evaluator_follows_a_trainer_that_deletes_its_old_steps(run, bucket, warm):
    train, evaluate = commands("follow_run.py")
    with ThreadPoolExecutor() as pool:
        evaluated = pool.submit(run, evaluate, warm=warm)
        run(train, warm=warm)
        printed = evaluated.result()
    found = re.findall(r"step-(\d+): loss (\S+), (\S+) when", printed)
    steps = [int(step) for step, _, _ in found]
    assert steps == sorted(set(steps))
    assert steps[-1] == 12
    assert all(loss == saved for _, loss, saved in found), found
    left = dos.steps(bucket.at("run"), storage_options=bucket.storage_options)
    assert [step.name for step in left][-2:] == ["step-11", "step-12"]
    assert len(left) <= 3  # the last deletion may have met a pin
    assert not any(step.pins for step in left)
    assert bucket.uploads() == []


def test_every_example_is_short_and_listed_with_a_command_that_starts_it():
    table = (EXAMPLES / "README.md").read_text()
    for path in EXAMPLES.glob("*.py"):
        assert len(path.read_text().splitlines()) < 80, path
        assert f"[{path.name}]({path.name})" in table, f"{path.name} is not in examples/README.md"
        assert any(f"examples/{path.name}" in command for command in commands(path.name)), path
