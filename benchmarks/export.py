"""`export`: a checkpoint as a folder of safetensors, by one process and by several ranks.

The checkpoint lies on one sink and the folder on another, which discards it: both on loopback as it
is, and both under conditions, by default like S3 (30 ms, 60 MiB/s a connection). A measurement has
fresh processes, and takes from when all ranks are there to the end of the last one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import time
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

import dcp_objstore as dos
from benchmarks.child import cpu_seconds
from benchmarks.conditions import Conditions
from benchmarks.processes import in_turns, median, run_ranks
from benchmarks.settings import GIB, MIB, Settings
from benchmarks.steps import random_state
from benchmarks.table import Result, Table
from benchmarks.targets import Place, open_target

_PRELOAD = ["benchmarks.export", "torch.distributed.checkpoint"]
_COLUMNS = {
    "seconds": ("seconds", ".2f"),
    "times one": ("speed", ".2f"),
    "CPU-s/GiB": ("cpu_seconds_per_gib", ".2f"),
}


@dataclass(frozen=True, kw_only=True)
class _Job:
    """What all ranks do.

    Attributes:
        saved: the checkpoint.
        out: the folder.
        settings: the size of the state.
    """

    saved: Place
    out: Place
    settings: Settings


def save_rank(rank: int, world_size: int, job: _Job) -> None:
    """Save the checkpoint, and a small one, by one rank."""
    del rank, world_size
    small = dataclasses.replace(job.settings, gib=MIB / GIB)
    for name, settings in (("saved", job.settings), ("small", small)):
        state = random_state(settings, range(settings.tensors))
        place = job.saved.at(name)
        dos.save(state, place.url, storage_options=place.storage_options, progress=False)


def export_rank(rank: int, world_size: int, job: _Job) -> dict[str, float]:
    """Export it with all ranks; what this one took."""
    del rank, world_size
    options: dict[str, Any] = {
        "storage_options": job.saved.storage_options,
        "out_storage_options": job.out.storage_options,
        "progress": False,
    }
    # Imports, first-use work and connections are not measured.
    dos.export_checkpoint(
        job.saved.at("small").url, job.out.at(secrets.token_hex(4)).url, **options
    )
    dist.barrier()
    cpu, start = cpu_seconds(), time.perf_counter()
    saved, group = job.saved.at("saved").url, dist.group.WORLD
    dos.export_checkpoint(saved, job.out.url, process_group=group, **options)
    return {"seconds": time.perf_counter() - start, "cpu_seconds": cpu_seconds() - cpu}


def export(
    settings: Settings, conditions: Conditions, rounds: int, ranks: int
) -> tuple[Table, Result]:
    """Measure every row once per round; ratios are medians of those of each round."""
    places = {"loopback": Conditions(), conditions.described("sink"): conditions}
    problems: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        jobs: dict[str, _Job] = {}
        for name, kept_to in places.items():
            saved, out = (
                stack.enter_context(open_target("sink", keep=keep, conditions=kept_to))
                for keep in (True, False)
            )
            jobs[name] = _Job(saved=saved, out=out, settings=settings)
            run_ranks(1, save_rank, jobs[name], preload=_PRELOAD, seconds=600)
        rows = {f"{n} ranks, {name}": (job, n) for name, job in jobs.items() for n in (1, ranks)}

        def measure(row: str, turn: int) -> dict[str, float]:
            job, count = rows[row]
            own = dataclasses.replace(job, out=job.out.at(f"{count}-{turn}"))
            found = run_ranks(count, export_rank, own, preload=_PRELOAD, seconds=600)
            cpu = sum(each["cpu_seconds"] for each in found)
            return {
                "seconds": max(each["seconds"] for each in found),
                "cpu_seconds_per_gib": cpu / (settings.total_bytes / GIB),
            }

        measured = in_turns(rows, rounds, measure, problems)
    figures: dict[str, dict[str, float | None]] = {}
    for row, own in measured.items():
        alone = measured.get(f"1 ranks, {row.partition(', ')[2]}", [])
        pairs = zip(alone, own, strict=False)
        figures[row] = {key: median(each[key] for each in own) for key in own[0]}
        figures[row]["speed"] = median(one["seconds"] / each["seconds"] for one, each in pairs)
    title = f"export: {settings.gib:g} GiB in {settings.tensors} tensors, medians of {rounds}"
    notes = [f"{row}: {problem}" for row, problem in problems.items()]
    return Table.of(title, "by how many, where", _COLUMNS, figures, notes), {
        "command": "export",
        "conditions": dataclasses.asdict(conditions),
        "settings": dataclasses.asdict(settings),
        "ranks": ranks,
        "rows": figures,
        "rounds": measured,
        "problems": problems,
    }
