"""`save` and `load`: every peer once per round, each in a fresh process; medians of the rounds."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence

from benchmarks.child import Job, Measured
from benchmarks.conditions import Conditions
from benchmarks.peers import PEERS, RAW, absent
from benchmarks.processes import ChildFailedError, run_module
from benchmarks.settings import Settings
from benchmarks.table import Result, Table, number
from benchmarks.targets import open_target

Rounds = dict[str, list[Measured]]
_CHILD = "benchmarks.child"


def compare(
    action: str,
    peers: Sequence[str],
    settings: Settings,
    target: str,
    rounds: int,
    conditions: Conditions,
) -> tuple[Table, Result]:
    """Measure `save` or `load`; a peer that is missing or fails is reported as such."""
    problems = absent(peers)
    measured: Rounds = {name: [] for name in peers if name not in problems}
    with open_target(target, keep=action == "load", conditions=conditions) as root:
        if action == "load":
            for name in list(measured):
                _attempt(
                    Job(peer=name, action="prepare", place=root.at(name), settings=settings),
                    measured,
                    problems,
                )
        for turn in range(rounds):
            for name in list(measured):
                place = root.at(name) if action == "load" else root.at(f"{name}-{turn}")
                job = Job(peer=name, action=action, place=place, settings=settings)
                _attempt(job, measured, problems)
                if action == "save":
                    place.clear()
    return _table(action, settings, conditions.described(target), rounds, measured, problems), {
        "command": action,
        "target": target,
        "conditions": dataclasses.asdict(conditions),
        "settings": dataclasses.asdict(settings),
        "peers": {name: _summary(measured, name) for name in measured},
        "rounds": {name: [dataclasses.asdict(m) for m in all_] for name, all_ in measured.items()},
        "problems": problems,
    }


def _attempt(job: Job, measured: Rounds, problems: dict[str, str]) -> None:
    """Run a job and keep its result; a peer that failed takes part in no further round."""
    try:
        fields = run_module(_CHILD, job.dumps())
    except ChildFailedError as error:
        problems[job.peer] = f"failed:\n{error}"
        del measured[job.peer]
    else:
        if fields is not None:
            measured[job.peer].append(Measured(**fields))


def _summary(measured: Rounds, name: str) -> dict[str, float | None]:
    """Medians, and the median of the ratios to the raw loop of the same round."""
    own, raw = measured[name], measured.get(RAW, [])
    extra = [m.extra_mib for m in own if m.extra_mib is not None]
    requests = [m.requests / m.gib_moved for m in own if m.requests is not None]
    pairs = list(zip(own, raw, strict=False))  # of the same round; none without the raw loop
    return {
        "gib_per_second": _median([m.gib_per_second for m in own]),
        "to_raw": _median([m.gib_per_second / r.gib_per_second for m, r in pairs]),
        "cpu_seconds_per_gib": _median([m.cpu_seconds / m.gib_moved for m in own]),
        "cpu_to_raw": _median([m.cpu_seconds / r.cpu_seconds for m, r in pairs]),
        "extra_mib": _median(extra),
        "requests_per_gib": _median(requests),
        "refused": _median([m.refused for m in own if m.refused is not None]),
        "server_cpu_seconds_per_gib": _median(
            [m.server_cpu_seconds / m.gib_moved for m in own if m.server_cpu_seconds is not None]
        ),
    }


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _table(
    action: str,
    settings: Settings,
    where: str,
    rounds: int,
    measured: Rounds,
    problems: dict[str, str],
) -> Table:
    rows: list[list[str | None]] = []
    for name in measured:
        row = _summary(measured, name)
        rows.append(
            [
                PEERS[name].label,
                number(row["gib_per_second"]),
                number(row["to_raw"]),
                number(row["cpu_seconds_per_gib"]),
                number(row["cpu_to_raw"]),
                number(row["extra_mib"], ".0f"),
                number(row["requests_per_gib"], ".0f"),
                number(row["refused"], ".0f"),
                number(row["server_cpu_seconds_per_gib"]),
            ]
        )
    return Table(
        f"{action} on {where}: {settings.gib:g} GiB in {settings.tensors} tensors, "
        f"medians of {rounds} rounds",
        [
            "peer",
            "GiB/s",
            "x raw",
            "CPU-s/GiB",
            "CPU x raw",
            "extra MiB",
            "requests/GiB",
            "refused",
            "sink's CPU-s/GiB",
        ],
        rows,
        [f"{PEERS[name].label}: {problem}" for name, problem in problems.items()],
    )
