"""Jobs with copies on their nodes that are killed at any moment go on as if they had not been.

Ranks of two or three nodes train and save all the time; all of them, one, or a node with its folder
is killed by SIGKILL; then a job of as many ranks or of another number, whose processes are new,
resumes. Its losses are those of a job that was never killed, and what a node has is not fetched.

    pytest tests/faults/test_kills_with_copies.py -m campaign -n 0 -s
"""

from __future__ import annotations

import contextlib
import random
import shutil
import sys
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
from tests.support import elastic
from tests.support.launcher import Job, say
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
        url, save_every=3, keep=dos.KeepLatest(2), storage_options=options, local=folders[rank]
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
        last_step: the last step that any job has trained.
        nodes_of: the nodes that have the copies of a step, if the job that trained it last saved
            it; None if one of them was lost since.
    """

    path: Path
    bucket: Bucket
    url: str
    expected: list[int]
    last_step: int = 0
    nodes_of: dict[int, set[int] | None] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)

    def folders(self, nodes: tuple[int, ...]) -> list[str]:
        for node in nodes:
            (self.path / f"node{node}").mkdir(exist_ok=True)
        return [str(self.path / f"node{node}") for node in nodes]

    def run(self, rng: random.Random | None, nodes: tuple[int, ...], last_step: int) -> None:
        """Run a job, and kill it at some moment if there is an `rng`."""
        lost = None
        with start_workers(reuse=False) as crew:
            options = self.bucket.storage_options
            folders = self.folders(nodes)
            job = crew.start(len(nodes), train_on_and_on, self.url, options, folders, last_step)
            if rng is not None:
                lost = self._kill(job, rng, nodes)
            outcomes = job.end()
            assert rng is not None or not any(one.failed for one in outcomes), outcomes
        self._check(job, nodes)
        for step, of_step in self.nodes_of.items():
            if of_step is not None and lost in of_step:
                self.nodes_of[step] = None

    def _kill(self, job: Job, rng: random.Random, nodes: tuple[int, ...]) -> int | None:
        """Kill ranks at some moment of a load or a save; the node that is lost."""
        kind = rng.choice(["loads", "resumed", "loss", "loss", "loss"])
        count = rng.randint(1, 12) if kind == "loss" else 1
        while len(wait_for(job, kind)) < count:
            assert job.listen()
        listen_until(job, time.monotonic() + rng.uniform(0, 0.3))
        victims = rng.choice(["all", "all", "one", "one", "node"])
        self.counts[f"{victims} while {kind}"] += 1
        one = rng.randrange(len(nodes))
        ranks = {
            "all": list(range(len(nodes))),
            "one": [one],
            "node": [rank for rank, node in enumerate(nodes) if node == nodes[one]],
        }[victims]
        job.kill(*ranks)
        if victims == "node":
            shutil.rmtree(self.path / f"node{nodes[one]}")
        # The others go on until they notice, or until the launcher ends them.
        listen_until(job, time.monotonic() + rng.choice([0, 0.3]))
        for rank in range(len(nodes)):
            with contextlib.suppress(ProcessLookupError):
                job.kill(rank)
        return nodes[one] if victims == "node" else None

    def _check(self, job: Job, nodes: tuple[int, ...]) -> None:
        said = [one.message for one in job.said]
        resumed = [one[1:] for one in said if one[0] == "resumed"]
        assert len({start for start, *_ in resumed}) <= 1, "ranks that see different steps"
        if len(resumed) == len(nodes) and resumed[0][0] > 0:
            start, fetched = resumed[0][0], sum(one[1] for one in resumed)
            of_step = self.nodes_of[start]
            all_there = of_step is not None and of_step <= set(nodes)
            self.counts["resumed"] += 1
            self.counts["with all nodes"] += all_there
            assert fetched == 0 or not all_there, (start, of_step, nodes, resumed)
        for _, step, loss in (one for one in said if one[0] == "loss"):
            assert loss == self.expected[step - 1], f"step {step}"
            self.last_step = max(self.last_step, step)
            self.nodes_of[step] = set(nodes)
        for node in self.path.glob("node*"):
            taken = sum(file.stat().st_size for file in node.rglob("*") if file.is_file())
            # A node has three quarters of the state at most; frames and names are a few pages.
            assert taken <= 2 * STATE_BYTES * 3 / 4 + 64 * 1024


def kill_often(bucket: Bucket, path: Path, seed: int, kills: int) -> Counter[str]:
    rng = random.Random(f"node {seed}")
    most_steps = min(1000 * kills, MOST_STEPS)
    rack = Rack(path, bucket, bucket.at("run"), losses(most_steps))
    rack.run(None, WORLDS[0], 7)
    for _ in range(kills):
        rack.run(rng, rng.choice(WORLDS), most_steps)
    rack.run(None, WORLDS[0], min(rack.last_step + 7, most_steps))
    print(f"\n{kills} kills, {rack.last_step} steps: {dict(sorted(rack.counts.items()))}")
    return rack.counts


@pytest.mark.campaign
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(1, 9))
def test_twenty_kills(bucket, tmp_path, seed):
    counts = kill_often(bucket, tmp_path, seed, 20)
    assert counts["resumed"] > 10
    assert counts["with all nodes"] > 0


@pytest.mark.campaign
@pytest.mark.timeout(600)
def test_restarts_by_torchrun_fetch_nothing(bucket, tmp_path):
    """Each rank dies with its copies of a step that is never committed."""
    url, node = bucket.at("run"), tmp_path / "node"
    node.mkdir()
    kills = {elastic.KILLS: f"{tmp_path} 1:20 0:30 1:50", elastic.LOCAL: str(node)}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--max-restarts", "3", "-m", "tests.support.elastic"]
    command += [str(elastic.EXAMPLES / "torchrun_elastic.py"), url, "60"]
    with elastic.Program(command, tmp_path, elastic.environment(bucket) | kills) as job:
        job.end()
        fetched = job.found(r"fetched (\d+) of [1-9]\d* bytes of step (\d+)")
    assert sorted(fetched) == [("0", step) for step in ("10", "20", "40") for _ in range(2)]
    assert len(list(node.glob("*/*/step-*/*"))) == 4
