"""Measurements run in fresh processes: start them, read their results, take turns."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tests.support.launcher import Ranks

T = TypeVar("T")
Figures = Mapping[str, float | None]
_ROOT = Path(__file__).parent.parent


class ChildFailedError(Exception):
    """A measured process ended with an error; the message is the end of what it said."""


def run_module(module: str, job: object, python: str = sys.executable) -> Any:
    """Run `python -m module` with `job` on stdin; what it answers.

    Raises:
        ChildFailedError: it ended with an error.
    """
    return json.loads(run_python(["-m", module], json.dumps(job), python).splitlines()[-1])


def run_python(arguments: list[str], text: str = "", python: str = sys.executable) -> str:
    """Run Python (this one by default) from the folder that holds `benchmarks`; its stdout.

    Raises:
        ChildFailedError: it ended with an error.
    """
    child = subprocess.run(
        [python, *arguments],
        input=text,
        capture_output=True,
        text=True,
        cwd=_ROOT,
        check=False,
    )
    if child.returncode != 0:
        said = child.stderr.strip()[-2000:]
        raise ChildFailedError(f"{said}\nended with status {child.returncode}".lstrip())
    return child.stdout


def answer(measure: Callable[[dict[str, Any]], object]) -> None:
    """In the process of `run_module`: read the job, measure, and print the result last."""
    import torch

    warnings.simplefilter("ignore")
    # As torchrun sets it for each rank; idle OpenMP threads would else spin during the transfer.
    torch.set_num_threads(1)
    print(json.dumps(measure(json.loads(sys.stdin.read()))))


def run_ranks(
    world_size: int, act: Callable[..., Any], job: object, *, preload: list[str], seconds: float
) -> list[Any]:
    """Call `act(rank, world_size, job)` in a fresh process for each rank; what they return.

    Raises:
        ChildFailedError: a rank failed, or was not done after so many seconds.
    """
    with Ranks(preload=preload) as ranks:
        outcomes = ranks.start(
            world_size, act, job, timeout_seconds=seconds, group_timeout_seconds=1800
        ).end()
    for outcome in outcomes:
        if outcome.failed:
            raise ChildFailedError(str(outcome))
    return [outcome.value for outcome in outcomes]


def in_turns(
    names: Iterable[str], rounds: int, measure: Callable[[str, int], T], problems: dict[str, str]
) -> dict[str, list[T]]:
    """Measure each name once per round, by `measure(name, round)`.

    What fails, or leaves what cannot be removed, takes part in no further round, and is among the
    problems instead of the results.
    """
    found: dict[str, list[T]] = {name: [] for name in names if name not in problems}
    for turn in range(rounds):
        for name in list(found):
            try:
                found[name].append(measure(name, turn))
            except Exception as error:
                first = error.__context__ or error  # what it left may be in the way of removing it
                kind = "" if isinstance(first, ChildFailedError) else f"{type(first).__name__}: "
                problems[name] = f"failed:\n{kind}{first}"
                del found[name]
    return found


def median(values: Iterable[float | None]) -> float | None:
    """The median of what was measured; None if nothing was."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def medians(found: Mapping[str, Sequence[Figures]]) -> dict[str, dict[str, float | None]]:
    """By name, the median of each figure over the rounds."""
    return {
        name: {key: median(one[key] for one in rounds) for key in rounds[0]}
        for name, rounds in found.items()
    }
