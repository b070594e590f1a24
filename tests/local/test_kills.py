"""Jobs with copies on their nodes that are killed at any moment go on as if they had not been.

Ranks of two or three nodes train and save all the time; all of them, one, or a node with its folder
is killed by SIGKILL; then a job of as many ranks or of another number, whose processes are new,
resumes. Its losses are those of a job that was never killed, and what a node has is not fetched.

    pytest tests/local/test_kills.py -m campaign -n 0 -s
"""

from __future__ import annotations

import contextlib
import random
import shutil
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import dcp_objstore as dos
from dcp_objstore.cli.ranks import Job, say
from tests.support.ranks import listen_until, start_workers, wait_for
from tests.support.servers import Bucket

pytestmark = pytest.mark.backends("seaweed")

ROWS, COLUMNS = 4096, 64  # 2 MiB of int64
STATE_BYTES = ROWS * COLUMNS * 8
MOST_STEPS = 4000  # far more than any kill waits for
PRIME = 2**31 - 1
# The nodes of the ranks of a job.
WORLDS = [(0, 0, 1, 1), (0, 0, 1, 1), (1, 1, 0, 0), (0, 0, 1), (0, 1, 2, 2)]


def weights() -> torch.Tensor:
    return torch.arange(ROWS * COLUMNS).view(ROWS, COLUMNS)


def train(weights: torch.Tensor, step: int) -> None:
    """Exact, whatever the number of ranks, and each element depends on all steps before."""
    weights.mul_(31).add_(step).remainder_(PRIME)


def losses(steps: int) -> list[int]:
    """Those of a job that nobody kills."""
    values, found = weights(), []
    for step in range(1, steps + 1):
        train(values, step)
        found.append(int(values.sum()))
    return found


def train_on_and_on(
    rank: int, world: int, url: str, options: Any, folders: list[str], last_step: int
) -> None:
    mesh = init_device_mesh("cpu", (world,))
    state: dict[str, Any] = {"weights": distribute_tensor(weights(), mesh, [Shard(0)]), "step": 0}
    with dos.CheckpointManager(
        url,
        save_every=3,
        keep=dos.KeepLatest(2),
        storage_options=options,
        local=folders[rank],
    ) as run:
        say("loads")
        start = run.load(state) or 0
        report = run.last_resume.load if run.last_resume is not None else None
        fetched = (report.fetched_bytes, report.total_bytes) if report is not None else (0, 0)
        say("resumed", start, *fetched)
        for step in range(start + 1, last_step + 1):
            own = state["weights"]
            assert isinstance(own, DTensor)
            train(own.to_local(), step)
            loss = own.to_local().sum()
            dist.all_reduce(loss)
            say("loss", step, int(loss))
            state["step"] = step
            run.step(step, state)


@dataclass
class Rack:
    """The nodes, and what is known of the run.

    Attributes:
        lost_at: the last step when a node was lost. Of steps up to it, copies may be missing.
        lost: whether the job that has just ended lost a node.
    """

    path: Path
    bucket: Bucket
    url: str
    expected: list[int]
    last_step: int = 0
    lost_at: int = 0
    lost: bool = False
    counts: Counter[str] = field(default_factory=Counter)

    def folders(self, nodes: tuple[int, ...]) -> list[str]:
        for node in nodes:
            (self.path / f"node{node}").mkdir(exist_ok=True)
        return [str(self.path / f"node{node}") for node in nodes]

    def run(self, rng: random.Random | None, nodes: tuple[int, ...], last_step: int) -> None:
        """Run a job, and kill it at some moment if there is an `rng`."""
        with start_workers(reuse=False) as crew:
            options = self.bucket.storage_options
            folders = self.folders(nodes)
            job = crew.start(len(nodes), train_on_and_on, self.url, options, folders, last_step)
            if rng is not None:
                self._kill(job, rng, nodes)
            outcomes = job.end()
            assert rng is not None or not any(one.failed for one in outcomes), outcomes
        self._check(job, nodes)

    def _kill(self, job: Job, rng: random.Random, nodes: tuple[int, ...]) -> None:
        # While it loads; or in some save or between two.
        kind = rng.choice(["loads", "resumed", "loss", "loss"])
        seconds = rng.uniform(0, {"loads": 0.4, "resumed": 0.3, "loss": 2.0}[kind])
        listen_until(job, wait_for(job, kind)[0].at + seconds)
        victims = rng.choice(["all", "one", "node"])
        self.counts[f"{victims} while {kind}"] += 1
        if victims == "all":
            job.kill()
            return
        one = rng.randrange(len(nodes))
        ranks = (
            [one] if victims == "one" else [r for r in range(len(nodes)) if nodes[r] == nodes[one]]
        )
        job.kill(*ranks)
        if victims == "node":
            shutil.rmtree(self.path / f"node{nodes[one]}")
        # The others go on until they notice, or until the launcher ends them.
        listen_until(job, time.monotonic() + rng.choice([0, 0.3]))
        for rank in range(len(nodes)):
            with contextlib.suppress(ProcessLookupError):
                job.kill(rank)
        self.lost = victims == "node"

    def _check(self, job: Job, nodes: tuple[int, ...]) -> None:
        said = [one.message for one in job.said]
        for _, step, loss in (one for one in said if one[0] == "loss"):
            assert loss == self.expected[step - 1], f"step {step}"
            self.last_step = max(self.last_step, step)
        resumed = [one[1:] for one in said if one[0] == "resumed"]
        assert len({start for start, *_ in resumed}) <= 1, "ranks that see different steps"
        if len(resumed) == len(nodes) and resumed[0][0] > 0:
            ((start, *_), *_) = resumed
            fetched = sum(one[1] for one in resumed)
            self.counts["resumed"] += 1
            self.counts["of all nodes"] += start > self.lost_at
            assert fetched == 0 or start <= self.lost_at, (start, self.lost_at, resumed)
        for node in self.path.glob("node*"):
            taken = sum(file.stat().st_size for file in node.rglob("*") if file.is_file())
            # A node has three ranks of four at most; frames and names are a few pages.
            assert taken <= 2 * STATE_BYTES * 3 / 4 + 64 * 1024
            steps = {file.name.partition("%2F")[0] for file in node.glob("*/*/objects/step*")}
            assert len(steps) <= 3, "two states, and one that is being written over"
        self.lost_at = self.last_step if self.lost else self.lost_at
        self.lost = False


def kill_often(bucket: Bucket, path: Path, seed: int, kills: int) -> Counter[str]:
    rng = random.Random(f"node {seed}")
    rack = Rack(path, bucket, bucket.at("run"), losses(MOST_STEPS))
    rack.run(None, WORLDS[0], 7)
    for _ in range(kills):
        rack.run(rng, rng.choice(WORLDS), MOST_STEPS)
    rack.run(None, WORLDS[0], rack.last_step + 7)
    print(f"\n{kills} kills, {rack.last_step} steps: {dict(sorted(rack.counts.items()))}")
    return rack.counts


def test_a_job_that_is_killed_goes_on_from_its_nodes(bucket: Bucket, tmp_path: Path) -> None:
    counts = kill_often(bucket, tmp_path, 0, 3)
    assert counts["of all nodes"] > 0


@pytest.mark.campaign
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(1, 9))
def test_twenty_kills(bucket: Bucket, tmp_path: Path, seed: int) -> None:
    counts = kill_often(bucket, tmp_path, seed, 20)
    assert counts["resumed"] > 10
    assert counts["of all nodes"] > 5
