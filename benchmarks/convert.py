"""`convert`: exports, imports and copies, compared with the throughput of a save.

A conversion loads and saves, and a save takes longer than a load.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import dcp_objstore as dos
from benchmarks.conditions import Conditions
from benchmarks.settings import Settings
from benchmarks.steps import compare_steps, main, random_state
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
    "x save": ("speed", ".2f"),
    "CPU-s/GiB": ("cpu_seconds_per_gib", ".2f"),
    "extra MiB": ("extra_mib", ".0f"),
}
_STEPS = ("save", "load", *_CONVERSIONS)


def convert(
    settings: Settings, target: str, rounds: int, conditions: Conditions
) -> tuple[Table, Result]:
    """Measure every step once a round; medians of the rounds."""
    return compare_steps(
        "convert", _STEPS, lambda _: "save", _COLUMNS, settings, target, rounds, conditions
    )


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
