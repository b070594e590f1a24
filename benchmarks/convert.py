"""`convert`: exports, imports and copies, as shares of the throughput of a save and a load.

A conversion loads and saves, so it is compared with the slower of the two in the same round.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import dcp_objstore as dos
from benchmarks.conditions import Conditions
from benchmarks.processes import median, medians
from benchmarks.settings import Settings
from benchmarks.steps import main, random_state, run_steps
from benchmarks.table import Result, Table
from benchmarks.targets import Place

_CONVERSIONS: dict[str, Callable[..., object]] = {
    "export one file": lambda url, **options: dos.export_checkpoint(
        f"{url}/saved", f"{url}/model.pt", **options
    ),
    "export a folder": lambda url, **options: dos.export_checkpoint(
        f"{url}/saved", f"{url}/folder", **options
    ),
    "import one file": lambda url, **options: dos.import_checkpoint(
        f"{url}/model.pt", f"{url}/of-file", **options
    ),
    "import a folder": lambda url, **options: dos.import_checkpoint(
        f"{url}/folder", f"{url}/of-folder", **options
    ),
    "import a checkpoint": lambda url, **options: dos.import_checkpoint(
        f"{url}/saved", f"{url}/of-checkpoint", **options
    ),
    "copy": lambda url, **options: dos.copy_checkpoint(f"{url}/saved", f"{url}/copy", **options),
    "copy, streamed": lambda url, **options: dos.copy_checkpoint(
        f"{url}/saved", f"{url}/streamed", streamed=True, **options
    ),
}
_COLUMNS = {
    "GiB/s": ("gib_per_second", ".2f"),
    "x the slower of save and load": ("share", ".2f"),
    "CPU-s/GiB": ("cpu_seconds_per_gib", ".2f"),
    "extra MiB": ("extra_mib", ".0f"),
}
_STEPS = ("save", "load", *_CONVERSIONS)


def convert(
    settings: Settings, target: str, rounds: int, conditions: Conditions
) -> tuple[Table, Result]:
    """Measure every step once a round; medians of the rounds."""
    found, problems = run_steps("benchmarks.convert", _STEPS, settings, target, rounds, conditions)
    both = zip(found.get("save", []), found.get("load", []), strict=False)
    slower = [min(one["gib_per_second"], other["gib_per_second"]) for one, other in both]
    steps = medians(found)
    for step, one in steps.items():
        pairs = zip(found[step], slower, strict=False)
        one["share"] = median(each["gib_per_second"] / most for each, most in pairs)
    title = (
        f"conversions on {conditions.described(target)}: {settings.gib:g} GiB in"
        f" {settings.tensors} tensors, medians of {rounds}"
    )
    notes = [f"{step}: {problem}" for step, problem in problems.items()]
    table = Table.of(title, "step", _COLUMNS, steps, notes)
    return table, {
        "command": "convert",
        "target": target,
        "settings": dataclasses.asdict(settings),
        "steps": steps,
        "rounds": found,
        "problems": problems,
    }


def _prepare(step: str, settings: Settings, place: Place) -> Callable[[], None]:
    options: dict[str, Any] = {"storage_options": place.storage_options, "progress": False}
    state = {} if step in _CONVERSIONS else random_state(settings, range(settings.tensors))

    def act() -> None:
        if step in _CONVERSIONS:
            _CONVERSIONS[step](place.url, **options)
        elif step == "save":
            dos.save(state, f"{place.url}/saved", **options)
        else:
            dos.load(state, f"{place.url}/saved", **options)

    return act


if __name__ == "__main__":
    main(_STEPS, _prepare)
