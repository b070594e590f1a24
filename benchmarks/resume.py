"""`resume`: a job of several ranks loads what another number of ranks has saved."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.conditions import Conditions
from benchmarks.peers import RESUME_PEERS, absent
from benchmarks.processes import ChildFailedError
from benchmarks.rank import RankJob, run
from benchmarks.settings import GIB, Settings
from benchmarks.table import Result, Table, number
from benchmarks.targets import open_target
from dcp_objstore.cli.demo.ranks import Ranks

Measurements = dict[str, list[dict[str, Any]]]
_PRELOAD = ["benchmarks.resume_state", "torch.distributed.checkpoint"]
_JOB_SECONDS, _GROUP_SECONDS = 86_400, 1800


def resume(
    peers: Sequence[str],
    settings: Settings,
    target: str,
    rounds: int,
    conditions: Conditions,
    *,
    saved_by: int,
    loaded_by: int,
    saved_layout: str,
    layout: str,
) -> tuple[Table, Result]:
    """Measure the load of a job of `loaded_by` ranks; each peer loads what it saved itself.

    A peer that is missing, fails or loads other values than were saved is reported as such.

    Raises:
        ChildFailedError: a rank ended without an answer.
    """
    problems = absent(peers)
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
            found = _run_ranks(world_size, job)
            problems.update(found["problems"])
            size.update({name: found[name] for name in size})
            return {name: found["measured"][name] for name in able if name not in problems}

        work("save", saved_by, saved_layout)
        measured = work("load", loaded_by, layout)
    shown = {name: _summary(measured, name, size["total_bytes"]) for name in measured}
    title = (
        f"resume from {conditions.described(target)}:"
        f" {size['total_bytes'] / GIB:.3g} GiB in {size['tensors']} tensors,"
        f" saved by {saved_by} ranks ({saved_layout}), loaded by {loaded_by} ({layout}), medians of"
        f" {rounds} rounds"
    )
    return _table(title, shown, problems), {
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


def _run_ranks(world_size: int, job: RankJob) -> dict[str, Any]:
    """Do the job in fresh processes; what rank 0 found."""
    with Ranks(preload=_PRELOAD) as ranks:
        outcomes = ranks.start(
            world_size,
            run,
            job,
            timeout_seconds=_JOB_SECONDS,
            group_timeout_seconds=_GROUP_SECONDS,
        ).end()
    for outcome in outcomes:
        if outcome.failed:
            raise ChildFailedError(str(outcome))
    found: dict[str, Any] = outcomes[0].value
    return found


def _summary(measured: Measurements, name: str, total_bytes: int) -> dict[str, float | None]:
    """Medians, and the median of the ratios to the first peer in the same round."""
    own = measured[name]
    first = next(iter(measured.values()))
    gib = total_bytes / GIB

    def median(values: list[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return statistics.median(known) if len(known) == len(values) and known else None

    def ratio(figures: dict[str, Any], bytes_: float) -> float | None:
        fetched = figures["fetched_bytes"]
        return None if fetched is None else fetched / bytes_

    return {
        "seconds": median([f["seconds"] for f in own]),
        "to_first": median([f["seconds"] / g["seconds"] for f, g in zip(own, first, strict=True)]),
        "cpu_seconds_per_gib": median([f["cpu_seconds"] / gib for f in own]),
        "fetched_to_needed": median([ratio(f, f["needed_bytes"]) for f in own]),
        "fetched_to_saved": median([ratio(f, total_bytes) for f in own]),
        "requests": median([f["requests"] for f in own]),
        "extra_mib": median([f["extra_mib"] for f in own]),
    }


def _table(
    title: str, shown: dict[str, dict[str, float | None]], problems: dict[str, str]
) -> Table:
    columns = ["peer", "seconds", "x first", "CPU-s/GiB", "fetched/needed", "fetched/saved"]
    forms = {
        "seconds": ".2f",
        "to_first": ".2f",
        "cpu_seconds_per_gib": ".2f",
        "fetched_to_needed": ".3f",
        "fetched_to_saved": ".3f",
        "requests": ".0f",
        "extra_mib": ".0f",
    }
    rows = [
        [RESUME_PEERS[name].label, *(number(figures[key], form) for key, form in forms.items())]
        for name, figures in shown.items()
    ]
    notes = [f"{RESUME_PEERS[name].label}: {why}" for name, why in problems.items()]
    return Table(title, [*columns, "GETs", "extra MiB"], rows, notes)
