"""`restart`: what a job reads again from its node, and what the copies cost a save.

Each measurement has a fresh process, which has saved to and loaded from its bucket before. `memcpy`
copies the state from memory to memory with one thread. `floor` is a loop, also of one thread, that
reads a copy by 4 MiB, makes the digest of each piece and copies it, and does nothing else. The
copies lie in /dev/shm and in a folder of a disk, whose files are in the page cache, as they are
when only the job was killed. The bucket is the sink, on loopback as it is and like S3 (30 ms, 60
MiB/s a connection). The last rows are a job of several ranks, from its first collective to the last
tensor in place.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import dcp_objstore as dos
from benchmarks.child import check_loaded, cpu_seconds, make_state
from benchmarks.conditions import Conditions
from benchmarks.processes import answer, in_turns, median, run_module, run_ranks
from benchmarks.resume_state import (
    blank,
    expected_digests,
    fill,
    make_state as make_sharded,
    wrong_tensors,
)
from benchmarks.settings import GIB, MIB, Settings
from benchmarks.table import Result, Table
from benchmarks.targets import Place, open_target
from dcp_objstore.transfer.digests import BLOCK_SIZE_BYTES, block_digest

_MODULE = "benchmarks.restart"
_PRELOAD = ["benchmarks.restart", "torch.distributed.checkpoint", "torch.distributed.fsdp"]
_LIKE_S3 = Conditions(latency_ms=30.0, rate_mib_per_connection=60.0)
_LAYOUT = "shard0"


@dataclass(frozen=True, kw_only=True)
class _Job:
    """What a process measures.

    Attributes:
        action: `memcpy`, `floor`, `load`, `save` or `prepare` (a save that is not measured).
        place: the step.
        settings: the size of the state.
        local: the folder for copies, if there are any.
    """

    action: str
    place: Place
    settings: Settings
    local: str | None

    @classmethod
    def of(cls, fields: dict[str, Any]) -> _Job:
        """From what `dataclasses.asdict` has made of one."""
        place, settings = Place(**fields["place"]), Settings(**fields["settings"])
        return cls(**{**fields, "place": place, "settings": settings})

    @property
    def access(self) -> dict[str, Any]:
        """What `dos.save` and `dos.load` are told."""
        return {
            "storage_options": self.place.storage_options,
            "progress": False,
            "local": self.local,
        }


_COLUMNS = {
    "seconds": ("seconds", ".2f"),
    "CPU-s/GiB": ("cpu_seconds_per_gib", ".2f"),
    "x memcpy's CPU": ("cpu_to_memcpy", ".2f"),
    "fetched MiB": ("fetched_mib", ".0f"),
    "from the node MiB": ("local_mib", ".0f"),
}
_RATIOS = {
    "load: bucket on loopback / from /dev/shm": ("load, loopback", "load, /dev/shm", "seconds"),
    "load: bucket on loopback / from the page cache": (
        "load, loopback",
        "load, page cache",
        "seconds",
    ),
    "load: bucket like S3 / from the page cache": ("load, like S3", "load, page cache", "seconds"),
    "save like S3: without copies / with them in /dev/shm": (
        "save, like S3",
        "save, like S3, /dev/shm",
        "seconds",
    ),
    "save like S3: without copies / with them on a disk": (
        "save, like S3",
        "save, like S3, page cache",
        "seconds",
    ),
    "job: bucket like S3 / from the page cache": (
        "job loads, like S3",
        "job loads, page cache",
        "seconds",
    ),
}


def restart(settings: Settings, rounds: int, ranks: int) -> tuple[Table, Result]:
    """Measure every row once per round; ratios are medians of those of each round."""
    problems: dict[str, str] = {}
    with (
        open_target("sink", keep=True) as near,
        open_target("sink", keep=True, conditions=_LIKE_S3) as far,
        open_target("sink", keep=False, conditions=_LIKE_S3) as discarding,
        _folder("/dev/shm") as memory,
        _folder("/var/tmp") as disk,
    ):
        for place, local in ((near, None), (far, memory), (far, disk)):
            _run("prepare", place.at(f"load-{local == memory}/step-1"), settings, local)
        job = _Job(action="save", place=far.at("job/step-1"), settings=settings, local=disk)
        run_ranks(ranks, save_rank, job, preload=_PRELOAD, seconds=600)
        floors = {"floor, /dev/shm": memory, "floor, page cache": disk}
        loads = {
            "load, /dev/shm": (far.at("load-True/step-1"), memory),
            "load, page cache": (far.at("load-False/step-1"), disk),
            "load, loopback": (near.at("load-False/step-1"), None),
            "load, like S3": (far.at("load-False/step-1"), None),
        }
        saves = {
            "save, like S3": (discarding.at("save"), None),
            "save, like S3, /dev/shm": (discarding.at("save-1"), memory),
            "save, like S3, page cache": (discarding.at("save-2"), disk),
        }
        jobs = {"job loads, like S3": None, "job loads, page cache": disk}

        def measure(name: str, turn: int) -> dict[str, Any]:
            if name in jobs:
                job_ = dataclasses.replace(job, action="load", local=jobs[name])
                return _together(run_ranks(ranks, load_rank, job_, preload=_PRELOAD, seconds=600))
            if name in saves:
                place, local = saves[name]
                return _run("save", place.at(f"step-{turn}"), settings, local)
            if name in loads:
                place, local = loads[name]
                return _run("load", place, settings, local)
            if name in floors:
                return _run("floor", near.at("none"), settings, floors[name])
            return _run(name, near.at("none"), settings, None)

        measured = in_turns(["memcpy", *floors, *loads, *saves, *jobs], rounds, measure, problems)
    return _result(measured, settings, rounds, ranks, problems)


@contextlib.contextmanager
def _folder(parent: str) -> Iterator[str]:
    folder = tempfile.mkdtemp(prefix="dcp-objstore-bench-", dir=parent)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run(action: str, place: Place, settings: Settings, local: str | None) -> dict[str, Any]:
    job = _Job(action=action, place=place, settings=settings, local=local)
    found: dict[str, Any] = run_module(_MODULE, dataclasses.asdict(job))
    return found


def measure_here(fields: dict[str, Any]) -> dict[str, Any]:
    """Do one thing in this process: what it cost."""
    job = _Job.of(fields)
    if job.action in ("save", "load"):  # imports and first-use work are not measured
        small = make_state(dataclasses.replace(job.settings, gib=MIB / GIB), blank=False)
        warm_up = f"{job.place.url}-warm-up-{os.getpid()}"
        dos.save(small, warm_up, **{**job.access, "local": None})
        if job.action == "load":
            dos.load(small, warm_up, **{**job.access, "local": None})
    state = make_state(job.settings, blank=job.action == "load")
    if job.action in ("save", "prepare"):
        # The process has saved before, so that the copies are written over.
        for turn in range(3 if job.local and job.action == "save" else 0):
            dos.save(state, f"{job.place.url}-before-{turn}", **job.access)
        return _measured(partial(dos.save, state, job.place.url, **job.access), job.settings)
    if job.action == "floor":
        assert job.local is not None
        copies_here = Path(job.local).glob("dcp-objstore-*/*/step-1/*")
        largest = max(copies_here, key=lambda path: path.stat().st_size)  # the others are the job's
        _read_all(largest, dict(list(state.items())[:1]))  # as the loads, it has run before
        return _measured(partial(_read_all, largest, state), job.settings)
    if job.action == "memcpy":
        copies = make_state(job.settings, blank=True)

        def copy() -> None:
            for name, tensor in state.items():
                copies[name].copy_(tensor)

        return _measured(copy, job.settings)
    found = _measured(partial(dos.load, state, job.place.url, **job.access), job.settings)
    check_loaded(state)
    return found


def _read_all(path: Path, state: dict[str, torch.Tensor]) -> None:
    piece = memoryview(bytearray(BLOCK_SIZE_BYTES))
    into = [tensor.view(torch.uint8).numpy() for tensor in state.values()]
    with path.open("rb", buffering=0) as file:
        for tensor in into:
            for start in range(0, tensor.nbytes, BLOCK_SIZE_BYTES):
                count = file.readinto(piece)
                block_digest(piece[:count])
                end = min(start + count, tensor.nbytes)
                tensor[start:end] = np.frombuffer(piece[: end - start], np.uint8)


def _measured(act: Any, settings: Settings) -> dict[str, Any]:
    cpu, start = cpu_seconds(), time.perf_counter()
    report = act()
    seconds, cpu = time.perf_counter() - start, cpu_seconds() - cpu
    loaded = report if isinstance(report, dos.reports.LoadReport) else None
    return {
        "seconds": seconds,
        "cpu_seconds_per_gib": cpu / (settings.total_bytes / GIB),
        "fetched_mib": None if loaded is None else loaded.fetched_bytes / MIB,
        "local_mib": None if loaded is None else loaded.local_bytes / MIB,
    }


def save_rank(rank: int, world_size: int, job: _Job) -> None:
    """Save this rank's share."""
    del rank, world_size
    state = make_sharded(job.settings, _LAYOUT)
    fill(state)
    dos.save(state, job.place.url, **job.access)


def load_rank(rank: int, world_size: int, job: _Job) -> dict[str, Any]:
    """Load this rank's share, and check it; what it cost."""
    del rank, world_size
    state = make_sharded(job.settings, _LAYOUT)
    blank(state)
    dist.barrier()
    found = _measured(partial(dos.load, state, job.place.url, **job.access), job.settings)
    if wrong := wrong_tensors(state, expected_digests(state)):
        raise AssertionError(f"tensors {wrong[:10]} were not loaded")
    return found


def _together(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """What a job cost: the time of the last rank, and what all of them took."""
    total = {name: sum(rank[name] for rank in ranks) for name in ranks[0]}
    return {**total, "seconds": max(rank["seconds"] for rank in ranks)}


def _result(
    measured: dict[str, list[dict[str, Any]]],
    settings: Settings,
    rounds: int,
    ranks: int,
    problems: dict[str, str],
) -> tuple[Table, Result]:
    shown: dict[str, dict[str, float | None]] = {}
    for name, own in measured.items():
        shown[name] = {key: median(one[key] for one in own) for key in own[0]}
        if name.startswith(("load", "memcpy", "floor")):
            pairs = zip(own, measured["memcpy"], strict=False)
            cpu = "cpu_seconds_per_gib"
            shown[name]["cpu_to_memcpy"] = median(one[cpu] / copy[cpu] for one, copy in pairs)
        else:
            shown[name]["cpu_to_memcpy"] = None
    ratios = {
        what: median(
            one[figure] / other[figure]
            for one, other in zip(measured[first], measured[second], strict=False)
        )
        for what, (first, second, figure) in _RATIOS.items()
        if first in measured and second in measured
    }
    notes = [f"{what}: {ratio:.2f}" for what, ratio in ratios.items() if ratio is not None]
    notes += [f"{name}: {why}" for name, why in problems.items()]
    title = (
        f"restart: {settings.gib:g} GiB in {settings.tensors} tensors, a job of {ranks} ranks,"
        f" medians of {rounds} rounds"
    )
    return Table.of(title, "what", _COLUMNS, shown, notes), {
        "command": "restart",
        "settings": dataclasses.asdict(settings),
        "ranks": ranks,
        "rows": shown,
        "ratios": ratios,
        "rounds": measured,
        "problems": problems,
    }


if __name__ == "__main__":
    answer(measure_here)
