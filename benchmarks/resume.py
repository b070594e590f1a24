"""`resume`: a job of several ranks loads what another number of ranks has saved."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from benchmarks.conditions import Conditions
from benchmarks.peers import RESUME_PEERS, absent
from benchmarks.processes import median, run_ranks
from benchmarks.rank import RankJob, run
from benchmarks.resume_state import FSDP2
from benchmarks.settings import GIB, Settings
from benchmarks.table import Result, Table
from benchmarks.targets import open_target

Measurements = dict[str, list[dict[str, Any]]]
_PRELOAD = ["benchmarks.resume_state", "torch.distributed.checkpoint"]
_JOB_SECONDS = 86_400
_COLUMNS = {
    "saved in": ("save_seconds", ".2f"),
    "seconds": ("seconds", ".2f"),
    "x first": ("to_first", ".2f"),
    "CPU-s/GiB": ("cpu_seconds_per_gib", ".2f"),
    "fetched/needed": ("fetched_to_needed", ".3f"),
    "fetched/saved": ("fetched_to_saved", ".3f"),
    "GETs": ("requests", ".0f"),
    "extra MiB": ("extra_mib", ".0f"),
}


def resume(
    peers: Sequence[str],
    settings: Settings,
    target: str,
    rounds: int,
    conditions: Conditions,
    *,
    saved_by: int,
    loaded_by: int,
    saved_layout: str | None,
    layout: str,
) -> tuple[Table, Result]:
    """Measure the load of a job of `loaded_by` ranks; each peer loads what it saved itself.

    A peer that is missing, fails or loads other values than were saved is reported as such.

    Raises:
        ChildFailedError: a rank ended without an answer.
    """
    # A model's state has keys of its own: it is loaded from one.
    saved_layout = saved_layout or (layout if layout == FSDP2 else "shard0")
    problems = absent(peers, here=True)  # its ranks load with all of them
    size = {"total_bytes": settings.total_bytes, "tensors": settings.tensors}
    with open_target(target, keep=True, conditions=conditions) as place:

        def work(action: str, world_size: int, layout: str) -> Measurements:
            able = [name for name in peers if name not in problems]
            if not able:
                return {}
            job = RankJob(
                action=action,
                peers=able,
                layout=layout,
                rounds=rounds,
                place=place,
                settings=settings,
            )
            found = run_ranks(world_size, run, job, preload=_PRELOAD, seconds=_JOB_SECONDS)[0]
            problems.update(found["problems"])
            size.update({name: found[name] for name in size})
            return {name: found["measured"][name] for name in able if name not in problems}

        saved = work("save", saved_by, saved_layout)
        measured = work("load", loaded_by, layout)
    shown = {
        name: {
            "save_seconds": saved[name][0]["seconds"],
            **_summary(measured, name, size["total_bytes"]),
        }
        for name in measured
    }
    title = (
        f"resume from {conditions.described(target)}:"
        f" {size['total_bytes'] / GIB:.3g} GiB in {size['tensors']} tensors,"
        f" saved by {saved_by} ranks ({saved_layout}), loaded by {loaded_by} ({layout}), medians of"
        f" {rounds} rounds"
    )
    figures = {RESUME_PEERS[name].label: own for name, own in shown.items()}
    notes = [f"{RESUME_PEERS[name].label}: {why}" for name, why in problems.items()]
    return Table.of(title, "peer", _COLUMNS, figures, notes), {
        "command": "resume",
        "target": target,
        "conditions": dataclasses.asdict(conditions),
        "settings": dataclasses.asdict(settings),
        **size,
        "saved_by": saved_by,
        "loaded_by": loaded_by,
        "layouts": [saved_layout, layout],
        "peers": shown,
        "rounds": measured,
        "problems": problems,
    }


def _summary(measured: Measurements, name: str, total_bytes: int) -> dict[str, float | None]:
    """Medians, and the median of the ratios to the first peer in the same round."""
    own = measured[name]
    first = next(iter(measured.values()))
    gib = total_bytes / GIB

    def ratio(figures: dict[str, Any], size_bytes: float) -> float | None:
        fetched = figures["fetched_bytes"]
        return None if fetched is None else fetched / size_bytes

    return {
        "seconds": median(f["seconds"] for f in own),
        "to_first": median(f["seconds"] / g["seconds"] for f, g in zip(own, first, strict=True)),
        "cpu_seconds_per_gib": median(f["cpu_seconds"] / gib for f in own),
        "fetched_to_needed": median(ratio(f, f["needed_bytes"]) for f in own),
        "fetched_to_saved": median(ratio(f, total_bytes) for f in own),
        "requests": median(f["requests"] for f in own),
        "extra_mib": median(f["extra_mib"] for f in own),
    }
