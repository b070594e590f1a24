"""`save` and `load`: every peer once per round, each in a fresh process; medians of the rounds."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from benchmarks.child import Job, Measured
from benchmarks.conditions import Conditions
from benchmarks.peers import PEERS, RAW, absent
from benchmarks.processes import in_turns, median
from benchmarks.settings import Settings
from benchmarks.table import Result, Table
from benchmarks.targets import Place, open_target

Rounds = dict[str, list[Measured]]
_CHILD = "benchmarks.child"
_COLUMNS = {
    "GiB/s": ("gib_per_second", ".2f"),
    "x raw": ("to_raw", ".2f"),
    "CPU-s/GiB": ("cpu_seconds_per_gib", ".2f"),
    "CPU x raw": ("cpu_to_raw", ".2f"),
    "extra MiB": ("extra_mib", ".0f"),
    "requests/GiB": ("requests_per_gib", ".0f"),
    "refused": ("refused", ".0f"),
    "sink's CPU-s/GiB": ("server_cpu_seconds_per_gib", ".2f"),
}


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
    with open_target(target, keep=action == "load", conditions=conditions) as root:

        def job(name: str, action: str, place: Place) -> Any:
            return Job(peer=name, action=action, place=place, settings=settings).run(_CHILD)

        def measure(name: str, turn: int) -> Measured:
            place = root.at(f"{name}-{turn}")
            try:
                if action == "load":
                    job(name, "prepare", place)
                return Measured(**job(name, action, place))
            finally:
                place.clear()  # the sink keeps one peer's data at a time

        measured = in_turns(peers, rounds, measure, problems)
    summaries = {name: _summary(measured, name) for name in measured}
    title = (
        f"{action} on {conditions.described(target)}: {settings.gib:g} GiB in"
        f" {settings.tensors} tensors, medians of {rounds} rounds"
    )
    figures = {PEERS[name].label: summary for name, summary in summaries.items()}
    failed = (PEERS[name].label for name, problem in problems.items() if "failed:" in problem)
    figures |= {f"{label} (failed)": {} for label in failed}
    notes = [f"{PEERS[name].label}: {problem}" for name, problem in problems.items()]
    return Table.of(title, "peer", _COLUMNS, figures, notes), {
        "command": action,
        "target": target,
        "conditions": dataclasses.asdict(conditions),
        "settings": dataclasses.asdict(settings),
        "peers": summaries,
        "rounds": {name: [dataclasses.asdict(m) for m in all_] for name, all_ in measured.items()},
        "problems": problems,
    }


def _summary(measured: Rounds, name: str) -> dict[str, float | None]:
    """Medians, and the median of the ratios to the raw loop of the same round."""
    own = measured[name]
    pairs = list(zip(own, measured.get(RAW, []), strict=False))  # none without the raw loop
    return {
        "gib_per_second": median(m.gib_per_second for m in own),
        "to_raw": median(m.gib_per_second / r.gib_per_second for m, r in pairs),
        "cpu_seconds_per_gib": median(m.cpu_seconds / m.gib_moved for m in own),
        "cpu_to_raw": median(m.cpu_seconds / r.cpu_seconds for m, r in pairs),
        "extra_mib": median(m.extra_mib for m in own),
        "requests_per_gib": median(m.requests and m.requests / m.gib_moved for m in own),
        "refused": median(m.refused for m in own),
        "server_cpu_seconds_per_gib": median(
            m.server_cpu_seconds and m.server_cpu_seconds / m.gib_moved for m in own
        ),
    }
