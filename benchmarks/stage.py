"""`stage`: how long a copy of the state takes before training goes on, by several stagers.

Beside a plain copy, tensor by tensor, into tensors whose memory has been touched. The first copy
allocates; `later` is the median of those after it. What a save would hold is dropped between two.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import torch
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from benchmarks.child import Job, make_state, reset_peak_mib, status_mib
from benchmarks.peers import State
from benchmarks.processes import answer, in_turns, medians
from benchmarks.settings import Settings
from benchmarks.table import Result, Table
from benchmarks.targets import Place

_MODULE = "benchmarks.stage"
_COPIES = 6
OURS, FRESH = "dcp_objstore", "DefaultStager, new for each save"
_COLUMNS = {
    "plain copy ms": ("copy_ms", ".0f"),
    "first ms": ("first_ms", ".0f"),
    "later ms": ("later_ms", ".0f"),
    "later / plain": ("ratio", ".2f"),
    "extra MiB": ("grown_mib", ".0f"),
}
_OPTIONS = ("use_pinned_memory", "use_shared_memory", "use_async_staging", "use_non_blocking_copy")


def _kept() -> Iterator[tuple[str, StagingOptions]]:
    """DefaultStagers with every set of options that works here; pinned and non-blocking: GPUs."""
    gpu = (False, True) if torch.cuda.is_available() else (False,)
    for chosen in itertools.product(gpu, (False, True), (False, True), gpu):
        names = [name for name, on in zip(_OPTIONS, chosen, strict=True) if on]
        yield f"DefaultStager, kept: {', '.join(names) or 'no options'}", StagingOptions(*chosen)


def stage(settings: Settings, rounds: int) -> tuple[Table, Result]:
    """Every stager once per round in a fresh process; medians of the rounds."""
    problems: dict[str, str] = {}

    def measure_one(name: str, _turn: int) -> dict[str, float | None]:
        place = Place(bucket="none", prefix="none")
        job = Job(peer=name, action="stage", place=place, settings=settings)
        found: dict[str, float | None] = job.run(_MODULE)
        return found

    names = [OURS, FRESH, *(name for name, _ in _kept())]
    found = medians(in_turns(names, rounds, measure_one, problems))
    table = Table.of(
        f"staging of {settings.gib:g} GiB in {settings.tensors} tensors, medians of {rounds}",
        "stager",
        _COLUMNS,
        found,
        [f"{name}: {problem}" for name, problem in problems.items()],
    )
    return table, {"command": "stage", "stagers": found, "problems": problems}


def _fresh(state: State) -> Any:
    """As `dcp.async_save` does with a writer that is no stager."""
    stager = DefaultStager(StagingOptions(False, False, False, False))
    staged = stager.stage(state)
    stager.close()
    return staged


def _stager(name: str) -> Callable[[State], Any]:
    if name == OURS:
        from dcp_objstore.write.staging.state import stage as ours

        return ours
    if name == FRESH:
        return _fresh
    kept = DefaultStager(dict(_kept())[name])

    def staged(state: State) -> Any:
        result = kept.stage(state)
        return result.result() if isinstance(result, Future) else result

    return staged


def measure(fields: dict[str, Any]) -> dict[str, float]:
    """Copies in turn with plain ones, in this process."""
    job = Job.of(fields)
    state = make_state(job.settings, blank=False)
    touched = make_state(job.settings, blank=True)
    act = _stager(job.peer)
    plain, staged = [], []
    before_mib = reset_peak_mib()
    for _ in range(_COPIES):
        start = time.perf_counter()
        for key, tensor in state.items():
            touched[key].copy_(tensor)
        plain.append(time.perf_counter() - start)
        start = time.perf_counter()
        copy = act(state)
        staged.append(time.perf_counter() - start)
        del copy
    peak_mib = status_mib("VmHWM")
    later, copied = statistics.median(staged[1:]), statistics.median(plain[1:])
    return {
        "copy_ms": copied * 1e3,
        "first_ms": staged[0] * 1e3,
        "later_ms": later * 1e3,
        "ratio": later / copied,
        "grown_mib": 0.0 if before_mib is None or peak_mib is None else peak_mib - before_mib,
    }


if __name__ == "__main__":
    answer(measure)
