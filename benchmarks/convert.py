"""`convert`: exports, imports and copies, as shares of the throughput of a save and a load.

Each step runs in a fresh process and reads what an earlier one wrote on the same target. A
conversion loads and saves, so it is compared with the slower one of the two in the same round.
Extra memory is anonymous memory: files that are mapped do not count.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import statistics
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

import dcp_objstore as dos
from benchmarks.child import Job, make_state, measure, status_mib
from benchmarks.conditions import Conditions
from benchmarks.processes import ChildFailedError, run_module
from benchmarks.settings import Settings
from benchmarks.table import Result, Table, number
from benchmarks.targets import Place, open_target

_MODULE = "benchmarks.convert"
_LOOK_SECONDS = 0.005

# By step: what is done with the place's options, below its URL.
_CONVERSIONS: dict[str, Callable[[str, dict[str, Any]], object]] = {
    "export one file": lambda url, options: dos.export_checkpoint(
        f"{url}/saved", f"{url}/model.pt", **options
    ),
    "export a folder": lambda url, options: dos.export_checkpoint(
        f"{url}/saved", f"{url}/folder", **options
    ),
    "import one file": lambda url, options: dos.import_checkpoint(
        f"{url}/model.pt", f"{url}/of-file", **options
    ),
    "import a folder": lambda url, options: dos.import_checkpoint(
        f"{url}/folder", f"{url}/of-folder", **options
    ),
    "import a checkpoint": lambda url, options: dos.import_checkpoint(
        f"{url}/saved", f"{url}/of-checkpoint", **options
    ),
    "copy": lambda url, options: dos.copy_checkpoint(f"{url}/saved", f"{url}/copy", **options),
    "copy, streamed": lambda url, options: dos.copy_checkpoint(
        f"{url}/saved", f"{url}/streamed", streamed=True, **options
    ),
}
_STEPS = ("save", "load", *_CONVERSIONS)


def convert(
    settings: Settings, target: str, rounds: int, conditions: Conditions
) -> tuple[Table, Result]:
    """Measure every step once a round; medians of the rounds."""
    found: dict[str, list[dict[str, float]]] = {step: [] for step in _STEPS}
    problems: dict[str, str] = {}
    with open_target(target, keep=True, conditions=conditions) as root:
        for turn in range(rounds):
            place = root.at(f"round-{turn}")
            for step in [step for step in _STEPS if step not in problems]:
                job = Job(peer=step, action="convert", place=place, settings=settings)
                try:
                    found[step].append(run_module(_MODULE, job.dumps()))
                except ChildFailedError as error:
                    problems[step] = f"failed:\n{error}"
            place.clear()
    both = zip(found["save"], found["load"], strict=False)
    slower = [min(one["gib_per_second"], other["gib_per_second"]) for one, other in both]
    steps = {
        step: {
            **{key: statistics.median(one[key] for one in all_) for key in all_[0]},
            "share": statistics.median(
                one["gib_per_second"] / most for one, most in zip(all_, slower, strict=False)
            ),
        }
        for step, all_ in found.items()
        if all_ and slower
    }
    return _table(settings, conditions.described(target), rounds, steps, problems), {
        "command": "convert",
        "target": target,
        "settings": dataclasses.asdict(settings),
        "steps": steps,
        "rounds": found,
        "problems": problems,
    }


def _table(
    settings: Settings,
    where: str,
    rounds: int,
    steps: dict[str, dict[str, float]],
    problems: dict[str, str],
) -> Table:
    return Table(
        f"conversions on {where}: {settings.gib:g} GiB in {settings.tensors} tensors, "
        f"medians of {rounds}",
        ["step", "GiB/s", "x the slower of save and load", "CPU-s/GiB", "extra MiB"],
        [
            [
                step,
                number(one["gib_per_second"]),
                number(one["share"]),
                number(one["cpu_seconds_per_gib"]),
                number(one["extra_mib"], ".0f"),
            ]
            for step, one in steps.items()
        ],
        [f"{step}: {problem}" for step, problem in problems.items()],
    )


def run(job: Job) -> dict[str, float]:
    """Do one step in this process, after all steps so far with a small state."""
    small = dataclasses.replace(job.settings, gib=1 / 1024, tensors=2)
    for step in _STEPS[: _STEPS.index(job.peer) + 1]:
        _act(step, small, job.place.at(f"small-{job.peer}"))()
    act = _act(job.peer, job.settings, job.place)
    with _peak_mib() as peak:
        measured = measure(act, job.settings, job.place)
    return {
        "gib_per_second": measured.gib_per_second,
        "cpu_seconds_per_gib": measured.cpu_seconds / measured.gib_moved,
        "extra_mib": peak[-1],
    }


def _act(step: str, settings: Settings, place: Place) -> Callable[[], None]:
    """Return what does a step; the state of a save or load is made now."""
    options: dict[str, Any] = {"storage_options": place.storage_options, "progress": False}
    state = {} if step in _CONVERSIONS else make_state(settings, blank=step == "load")

    def act() -> None:
        if step in _CONVERSIONS:
            _CONVERSIONS[step](place.url, options)
        elif step == "save":
            dos.save(state, f"{place.url}/saved", **options)
        else:
            dos.load(state, f"{place.url}/saved", **options)

    return act


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


def main() -> None:
    """Read a job from stdin, do it, print the result as JSON."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print(json.dumps(run(Job.loads(sys.stdin.read()))))


if __name__ == "__main__":
    main()
