"""Slurm's own daemons on this machine: examples/slurm, preempted, requeued, cut off, resumed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dcp_objstore as dos
from tests.support import elastic
from tests.support.elastic import (
    EXAMPLES,
    assert_only_whole_steps,
    assert_quotes,
    environment,
    newest_of,
)
from tests.support.programs import run_in_forks
from tests.support.servers import Bucket
from tests.support.slurm import Slurm

SCRIPT = EXAMPLES / "slurm" / "train.sbatch"
# The example, with a pause at each step. Each rank notes with which error it has ended.
TRAIN = f"""
import os, runpy
from pathlib import Path
from typing import Any
from tests.support import elastic
elastic.train_slowly()
elastic.tell_what_is_fetched()
try:
    runpy.run_path("{EXAMPLES / "slurm" / "train.py"}", run_name="__main__")
except BaseException as error:
    attempt = os.environ.get("SLURM_RESTART_COUNT", "0")
    Path(f"error-{{attempt}}-{{os.environ['RANK']}}").write_text(type(error).__name__)
    raise
"""
GO_ON = r"attempt (\d+): (\d+) ranks start from step (\d+)"
LAST = r"this job must end; step (\d+) is its last one"
FOREVER = "1000000"


def campaign(test: Any) -> Any:
    """Mark a test of the daemons: each takes one to five minutes."""
    return pytest.mark.campaign(pytest.mark.timeout(1200)(test))


class Job:
    """A job of the example's batch script, and its output, that of all attempts."""

    def __init__(self, slurm: Slurm, bucket: Bucket, cwd: Path, *words: str) -> None:
        self.slurm, self.bucket, self.cwd = slurm, bucket, cwd
        self.url = bucket.at("run")
        (cwd / "train.py").write_text(TRAIN)
        env = environment(bucket) | {elastic.PAUSE_SECONDS: "0.02"}
        options = [word for word in words if word.startswith("-")]
        folders = [word for word in words if not word.startswith("-")]
        command = ["sbatch", "--parsable", *options, str(SCRIPT), self.url, FOREVER, *folders]
        self.id = slurm.call(*command, cwd=cwd, env=env)

    @property
    def output(self) -> str:
        log = self.cwd / f"train-{self.id}.out"
        return log.read_text(errors="replace") if log.exists() else ""

    def wait_until(self, holds: Callable[[], bool], what: str) -> None:
        """Wait until something holds; fail if the job ends before."""

        def held_or_ended() -> bool:
            return holds() or self.slurm.job(self.id)["JobState"] in {"COMPLETED", "FAILED"}

        self.slurm.wait_until(held_or_ended, what)
        assert holds(), f"ended before: {what}\n{self.output}\n{self.slurm.log}"

    def wait_for_steps(self, more_than: int = 0) -> int:
        """Wait for a step after this one; the newest."""
        self.wait_until(lambda: newest_of(self.bucket, self.url) > more_than, "a step")
        return newest_of(self.bucket, self.url)

    def starts(self) -> list[tuple[str, ...]]:
        """Of each attempt that has begun: its number, ranks and the step after which it goes on."""
        return re.findall(GO_ON, self.output)

    def wait_for_start(self, attempt: int) -> int:
        """Wait until this attempt trains; the step after which it goes on."""
        self.wait_until(
            lambda: any(start[0] == str(attempt) for start in self.starts()), f"attempt {attempt}"
        )
        (step,) = [int(start[2]) for start in self.starts() if start[0] == str(attempt)]
        return step

    def last_step(self) -> int:
        """Wait until the ranks have agreed on the last step of an attempt; its number."""
        self.wait_until(lambda: bool(re.findall(LAST, self.output)), "the last step")
        return int(re.findall(LAST, self.output)[-1])

    def errors(self, attempt: int) -> list[str]:
        """The errors with which ranks of an attempt have ended."""
        return [note.read_text() for note in self.cwd.glob(f"error-{attempt}-*")]

    def cancel(self) -> None:
        self.slurm.call("scancel", self.id)
        self.slurm.wait_for(self.id, "CANCELLED")
        self.wait_until(
            lambda: not any(self.slurm.tasks(node) for node in self.slurm.nodes), "the end of ranks"
        )

    def assert_whole(self) -> list[int]:
        """Nothing but whole steps is in the run, and no upload is left; their numbers."""
        return assert_only_whole_steps(self.bucket, self.url, self.cwd)


@campaign
@pytest.mark.backends("file", "seaweed")
@pytest.mark.parametrize("grace_seconds", [0, 120])
def test_a_job_that_another_displaces_saves_its_last_step_and_goes_on_after_it(
    bucket, tmp_path, grace_seconds
):
    with Slurm(2, grace_seconds=grace_seconds) as slurm:
        job = Job(slurm, bucket, tmp_path)
        assert job.wait_for_start(0) == 0
        saved = job.wait_for_steps()
        urgent = ["--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null"]
        other = slurm.call("sbatch", "--parsable", *urgent, "--wrap=sleep 3", cwd=tmp_path)
        last = job.last_step()
        slurm.wait_for(other, "COMPLETED")
        assert job.wait_for_start(1) == last >= saved
        assert slurm.job(job.id)["Restarts"] == "1"
        job.wait_for_steps(last)
        job.cancel()
    assert [start[1] for start in job.starts()] == ["4", "4"]
    job.assert_whole()


@campaign
@pytest.mark.backends("file", "seaweed")
def test_a_job_at_its_time_limit_saves_and_queues_itself_again(bucket, tmp_path):
    with Slurm(2) as slurm:
        # Slurm may send the signal a minute earlier.
        job = Job(slurm, bucket, tmp_path, "--time=4", "--signal=B:USR1@90")
        assert job.wait_for_start(0) == 0
        last = job.last_step()
        assert job.wait_for_start(1) == last
        assert "time limit" not in job.output.lower(), "Slurm itself has ended the job"
        job.cancel()
    assert job.assert_whole()[-1] >= last


@campaign
@pytest.mark.backends("file", "seaweed")
def test_scancel_saves_the_last_step_and_the_next_job_goes_on_after_it(bucket, tmp_path):
    with Slurm(2) as slurm:
        job = Job(slurm, bucket, tmp_path)
        job.wait_for_steps()
        job.cancel()
        last = job.last_step()
        assert job.assert_whole()[-1] == last
        assert slurm.job(job.id)["Restarts"] == "0"
        after = Job(slurm, bucket, tmp_path)
        assert after.wait_for_start(0) == last
        after.cancel()
    after.assert_whole()


@campaign
@pytest.mark.backends("file", "seaweed")
def test_a_job_that_loses_a_node_goes_on_with_another_after_its_newest_step(bucket, tmp_path):
    with Slurm(3) as slurm:
        job = Job(slurm, bucket, tmp_path)
        job.wait_for_steps()
        first, second, third = slurm.nodes
        slurm.kill_node(second)
        saved = newest_of(bucket, job.url)
        assert job.wait_for_start(1) >= saved
        names = slurm.call("scontrol", "show", "hostnames", slurm.job(job.id)["NodeList"])
        assert set(names.split()) == {first, third}
        job.wait_for_steps(saved)
        job.cancel()
    job.assert_whole()


@campaign
@pytest.mark.backends("file", "seaweed")
def test_the_steps_of_an_attempt_that_slurm_cannot_reach_do_not_count(bucket, tmp_path):
    with Slurm(4) as slurm:
        job = Job(slurm, bucket, tmp_path)
        job.wait_for_steps()
        old = slurm.nodes[:2]  # Slurm takes the first ones that are free
        for node in old:
            slurm.kill_daemon(node)
        resumed = job.wait_for_start(1)
        assert all(slurm.tasks(node) for node in old), "the first attempt still runs"
        # It has no output any more: Slurm has ended its `srun`, not its ranks.
        job.wait_until(lambda: len(job.errors(0)) == 4, "the end of the first attempt")
        assert set(job.errors(0)) == {"SupersededError"}
        job.wait_for_steps(resumed)
        assert slurm.job(job.id)["JobState"] == "RUNNING"
        steps = dos.steps(job.url, storage_options=bucket.storage_options)
        assert {step.claim for step in steps} == {json.loads(bucket.get("run/_CLAIM"))["number"]}
        for node in old:
            slurm.start_node(node)
        job.cancel()
    job.assert_whole()


@campaign
@pytest.mark.backends("file", "seaweed")
def test_a_requeued_job_reads_the_scratch_of_its_nodes_and_nothing_else(bucket, tmp_path):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    with Slurm(2) as slurm:
        job = Job(slurm, bucket, tmp_path, str(scratch))
        job.wait_for_steps()
        slurm.call("scontrol", "requeue", job.id)
        last = job.last_step()
        assert job.wait_for_start(1) == last
        said = re.compile(rf"fetched (\d+) of (\d+) bytes of step {last}\n")
        job.wait_until(lambda: len(said.findall(job.output)) == 4, "what each rank has fetched")
        for bytes_fetched, total in said.findall(job.output):
            assert (int(bytes_fetched), int(total) > 0) == (0, True)
        job.cancel()
    job.assert_whole()


SAVE = """
import sys, torch
import dcp_objstore as dos
from dcp_objstore.local.folder import free_memory_bytes

url, folder = sys.argv[1:]
dos.save({"w": torch.ones(1)}, f"{url}/warm-up")  # what it imports takes memory, too
free = min(free_memory_bytes())
print("free", free)
for name, share in (("fits", 0.3), ("too-large", 0.7)):
    state = {"w": torch.ones(int(free * share) // 4)}
    report = dos.save(state, f"{url}/{name}", local=folder)
    print(name, report.total_bytes)
    del state
"""


@campaign
@pytest.mark.backends("file")
def test_copies_in_memory_leave_room_below_the_limit_that_slurm_sets_for_the_job(bucket, tmp_path):
    (tmp_path / "save.py").write_text(SAVE)
    with Slurm(1) as slurm, tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        if not slurm.has_cgroups:
            pytest.skip(
                "here is no folder for cgroups of version 1 that Slurm could limit memory by"
            )
        command = ["srun", "--mem=900M", sys.executable, "save.py", bucket.url, folder]
        printed = slurm.call(*command, cwd=tmp_path, env=environment(bucket))
        kept = [path.name for path in Path(folder).rglob("*.distcp")]
    free = int(re.findall(r"free (\d+)", printed)[0])
    assert free < 900 << 20
    assert len(kept) == 1, kept


@campaign
@pytest.mark.backends("seaweed")
def test_under_srun_the_demo_uses_the_tasks_that_are_there(bucket, tmp_path):
    report = tmp_path / "report.md"
    command = [sys.executable, "-m", "dcp_objstore", "demo", "--url", bucket.url]
    with Slurm(2) as slurm:
        printed = slurm.call(
            *("srun", "--nodes=2", "--ntasks=3", "--kill-on-bad-exit=1"),
            *(*command, "--report", str(report)),
            cwd=tmp_path,
            env=environment(bucket),
            timeout_seconds=600,
        )
    assert printed.count("All 11 proofs hold") == 1
    assert "typed error (RankFailedError) on 2 of 2 surviving ranks" in printed
    assert "3 ranks started by srun" in report.read_text()
    assert bucket.keys() == []
    assert bucket.uploads() == []


def test_the_batch_script_is_what_bash_and_the_page_take_it_for():
    subprocess.run(["bash", "-n", str(SCRIPT)], check=True)
    assert_quotes("how-to/slurm.md", "slurm/train.py")
    page = (EXAMPLES.parent / "docs" / "how-to" / "slurm.md").read_text()
    script = SCRIPT.read_text()
    for named in re.findall(r"`(--[\w-]+(?:[= ][\w:@]+)?|trap [^`]+|most_\w+|TORCH_\w+)`", page):
        assert named in script or named in {"--signal=B:USR1@SECONDS", "--mem"}, named


@pytest.mark.backends("file")
def test_the_program_of_the_batch_script_trains_on_two_ranks_and_ends_the_run(bucket, tmp_path):
    program = str(EXAMPLES / "slurm" / "train.py")
    words = ["torchrun", "--nproc-per-node", "2", program, bucket.at("run"), "10"]
    env = {"OMP_NUM_THREADS": "1"}
    assert "attempt 0: 2 ranks start from step 0" in run_in_forks(words, tmp_path, env, True)
    assert assert_only_whole_steps(bucket, bucket.at("run"), tmp_path) == [10]
    assert json.loads(bucket.get("run/_CLAIM"))["finished"] is True
