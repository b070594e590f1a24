"""Steps that follow one another on one place, each in a fresh process, as `convert` has them."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.child import Job, measure, status_mib
from benchmarks.conditions import Conditions
from benchmarks.peers import State
from benchmarks.processes import answer, in_turns, median, medians
from benchmarks.settings import GIB, MIB, Settings
from benchmarks.table import Result, Table
from benchmarks.targets import Place, open_target

# Returns what does a step; making it is not measured.
Prepare = Callable[[str, Settings, Place], Callable[[], None]]

_LOOK_SECONDS = 0.005
_RATIOS = {"speed": "gib_per_second", "time": "seconds", "cpu": "cpu_seconds_per_gib"}


def compare_steps(
    command: str,
    steps: Sequence[str],
    compared_with: Callable[[str], str],
    columns: Mapping[str, tuple[str, str]],
    settings: Settings,
    target: str,
    rounds: int,
    conditions: Conditions,
) -> tuple[Table, Result]:
    """Run every step once a round, in order, as `python -m benchmarks.COMMAND`.

    Args:
        command: name of the command and its module.
        steps: names of the steps.
        compared_with: returns the step that a step is compared with, in the same round.
        columns: as in `Table.of`; besides what `main` prints there are `speed`, `time` and `cpu`,
            the ratios to the step that a step is compared with.
        settings: size of the state.
        target: as in `open_target`.
        rounds: how often.
        conditions: of the sink.
    """
    problems: dict[str, str] = {}
    with open_target(target, keep=True, conditions=conditions) as root:

        def run(step: str, turn: int) -> dict[str, float]:
            place = root.at(f"round-{turn}")
            job = Job(peer=step, action="step", place=place, settings=settings)
            found: dict[str, float] = job.run(f"benchmarks.{command}")
            if step == steps[-1]:
                place.clear()
            return found

        found = in_turns(steps, rounds, run, problems)
    figures = medians(found)
    for step, one in figures.items():
        pairs = list(zip(found[step], found.get(compared_with(step), []), strict=False))
        for ratio, key in _RATIOS.items():
            one[ratio] = median(each[key] / other[key] for each, other in pairs)
    title = (
        f"{command} on {conditions.described(target)}: {settings.gib:g} GiB in"
        f" {settings.tensors} tensors, medians of {rounds}"
    )
    notes = [f"{step}: {problem}" for step, problem in problems.items()]
    return Table.of(title, "step", columns, figures, notes), {
        "command": command,
        "target": target,
        "settings": dataclasses.asdict(settings),
        "steps": figures,
        "rounds": found,
        "problems": problems,
    }


def main(steps: Sequence[str], prepare: Prepare) -> None:
    """Do the step that stdin names, after all steps so far with a small state; print the figures.

    Extra memory is anonymous memory: files that are mapped do not count.
    """

    def run(fields: dict[str, Any]) -> dict[str, float]:
        job = Job.of(fields)
        small = dataclasses.replace(job.settings, gib=32 * MIB / GIB)
        for step in steps[: steps.index(job.peer) + 1]:
            prepare(step, small, job.place.at(f"small-{job.peer}"))()
        act = prepare(job.peer, job.settings, job.place)
        with _peak_mib() as peak:
            measured = measure(act, job.settings, job.place)
        return {
            "seconds": measured.seconds,
            "gib_per_second": measured.gib_per_second,
            "cpu_seconds_per_gib": measured.cpu_seconds / measured.gib_moved,
            "extra_mib": peak[-1],
        }

    answer(run)


def random_state(settings: Settings, seeds: Iterable[int]) -> State:
    """Tensors of random integers, one for each seed: real stores compress what repeats itself."""
    elements = settings.tensor_elements
    return {
        f"tensor-{i:05d}": torch.from_numpy(
            np.random.default_rng(seed).integers(1 << 31, size=elements, dtype=np.int32)
        )
        for i, seed in enumerate(seeds)
    }


@contextlib.contextmanager
def _peak_mib() -> Iterator[Sequence[float]]:
    """Give a list whose last entry is the peak of anonymous memory above that of the beginning."""
    before, peak = status_mib("RssAnon") or 0.0, [0.0]
    over = threading.Event()

    def look() -> None:
        while not over.wait(_LOOK_SECONDS):
            peak[-1] = max(peak[-1], (status_mib("RssAnon") or 0.0) - before)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield peak
    finally:
        over.set()
        thread.join()
