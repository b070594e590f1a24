"""`killed`: from SIGKILL of a job's ranks to its first step, and which part of that is the load.

torchrun starts the ranks again. In turns they load from the bucket, a sink like S3, and from the
copies on their node, which are in the page cache. What comes before the load is the same for both:
torchrun notices, the processes start and import torch, the process group forms, and the state gets
memory.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.conditions import Conditions
from benchmarks.processes import ChildFailedError, in_turns, medians
from benchmarks.settings import Settings
from benchmarks.table import Result, Table
from benchmarks.targets import Place, open_target

_PHASES = ("processes start", "imports", "process group", "state", "load", "step")
_COLUMNS = {name: (name, ".2f") for name in (*_PHASES, "total")}
_WAIT_SECONDS = 600


def killed(
    settings: Settings, rounds: int, ranks: int, conditions: Conditions
) -> tuple[Table, Result]:
    """Measure both kinds of load once per round."""
    problems: dict[str, str] = {}
    with (
        open_target("sink", keep=True, conditions=conditions) as place,
        tempfile.TemporaryDirectory(prefix="dcp-objstore-bench-", dir="/var/tmp") as disk,
    ):

        def measure(name: str, turn: int) -> dict[str, float]:
            at = place.at(f"{name.replace(' ', '-')}/step-{turn}")
            return _one(settings, ranks, at, disk if name == "from the node" else None)

        found = in_turns(["from the bucket", "from the node"], rounds, measure, problems)
    shown = medians(found)
    notes = [f"{name}: {why}" for name, why in problems.items()]
    if not problems:
        for what in ("load", "total"):
            far, near = (shown[name][what] for name in found)
            assert far is not None and near is not None
            notes.append(f"{what}: from the bucket / from the node: {far / near:.2f}")
    title = (
        f"killed: {settings.gib:g} GiB in {settings.tensors} tensors, {ranks} ranks,"
        f" {conditions.described('sink')}, seconds, medians of {rounds} rounds"
    )
    return Table.of(title, "loaded", _COLUMNS, shown, notes), {
        "command": "killed",
        "settings": dataclasses.asdict(settings),
        "conditions": dataclasses.asdict(conditions),
        "ranks": ranks,
        "rows": shown,
        "rounds": found,
        "problems": problems,
    }


def _one(settings: Settings, ranks: int, place: Place, local: str | None) -> dict[str, float]:
    """Run a job that is killed once: the seconds that each phase took, by the slowest rank."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        job = {
            "settings": dataclasses.asdict(settings),
            "url": place.url,
            "storage_options": place.storage_options,
            "local": local,
            "folder": name,
        }
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={ranks}", "--max-restarts=1", "--monitor-interval=0.1"]
        command += ["-m", "benchmarks.killed_rank", json.dumps(job)]
        # What torchrun would set with a warning, and what keeps new processes from waiting for the
        # address of a dead rank.
        env = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        with subprocess.Popen(
            command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as torchrun:
            pids = _saved_by(folder, ranks, torchrun)
            killed_at = time.time()
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            said, _ = torchrun.communicate(timeout=_WAIT_SECONDS)
        if torchrun.returncode:
            raise ChildFailedError(said[-2000:])
        return _phases([json.loads(path.read_text()) for path in folder.glob("times-*")], killed_at)


def _saved_by(folder: Path, ranks: int, torchrun: subprocess.Popen[str]) -> list[int]:
    """Wait until all ranks have saved; their processes."""
    while len(saved := list(folder.glob("saved-*"))) < ranks or not all(
        path.stat().st_size for path in saved
    ):
        if torchrun.poll() is not None:
            assert torchrun.stdout is not None
            raise ChildFailedError(torchrun.stdout.read()[-2000:])
        time.sleep(0.1)
    return [int(path.read_text()) for path in saved]


def _phases(ranks: list[dict[str, Any]], killed_at: float) -> dict[str, float]:
    if wrong := [rank["wrong"] for rank in ranks if rank["wrong"]]:
        raise ChildFailedError(f"tensors {wrong[0][:10]} were not loaded")
    ends = [killed_at, *(max(rank["times"][name] for rank in ranks) for name in _PHASES)]
    seconds = {
        name: end - before for name, before, end in zip(_PHASES, ends[:-1], ends[1:], strict=True)
    }
    return {**seconds, "total": ends[-1] - killed_at}
