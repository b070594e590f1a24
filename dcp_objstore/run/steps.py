"""The steps of a run: their numbers, names and values, and which of them count. No torch."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from dcp_objstore.checkpoint.catalogue import Catalogue, ReadEntry, list_run, read_entry
from dcp_objstore.checkpoint.marker import check_user_metadata
from dcp_objstore.errors import ConfigError
from dcp_objstore.stores import StoreSpec

_STEP_NAME = re.compile(r"step-(0|[1-9][0-9]{0,17})\Z")


def catalogue(
    run: StoreSpec,
    newest: int | None = None,
    read: ReadEntry = read_entry,
    *,
    with_damaged: bool = False,
) -> Catalogue:
    """List a run and its steps that count, or the newest of them, as `list_run` does."""
    settings: dict[str, Any] = {"newest": newest, "read": read, "with_damaged": with_damaged}
    return list_run(run.open(), run.open_child, **settings)


def as_step(step: Any) -> Any:
    """Return a step of NumPy or torch as an int; anything else as it is, for `check_step`."""
    if not isinstance(step, int):
        with suppress(TypeError):
            return operator.index(step)
    return step


def check_step(step: object) -> None:
    """Raise ConfigError unless the step is a whole number, 0 or more."""
    if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < 10**18:
        raise ConfigError(f"a step must be a whole number, 0 or more, got {step!r}")


def step_name(step: int) -> str:
    """Return the name of a step's checkpoint."""
    return f"step-{step}"


def step_url(run_url: str, step: int) -> str:
    """Return the URL of a step's checkpoint."""
    return f"{run_url.rstrip('/')}/{step_name(step)}"


def step_number(name: str) -> int | None:
    """Return the number of the step that `step_name` gives this name; None for any other name.

    One number has one name: `step-01` names no step, so retention, which plans by numbers, cannot
    take one checkpoint for another.
    """
    match = _STEP_NAME.match(name)
    return int(match[1]) if match else None


class StepNames(NamedTuple):
    """The names of the steps of a run.

    Attributes:
        name: returns the name of a step's checkpoint, by its number.
        number: returns the number of a step by its name; None for a name that `name` does not give,
            so that no two names are one step.
    """

    name: Callable[[int], str]
    number: Callable[[str], int | None]


STEP_NAMES = StepNames(step_name, step_number)


def step_numbers(
    run: StoreSpec,
    newest: int | None = None,
    *,
    with_damaged: bool = False,
    names: StepNames = STEP_NAMES,
) -> tuple[int, ...]:
    """List the numbers of the newest steps of a run that count, or of all; the newest last.

    Args:
        with_damaged: also list steps whose markers are damaged.
    """
    listed = [step.name for step in catalogue(run, newest, with_damaged=with_damaged).steps]
    numbers = tuple(number for name in listed if (number := names.number(name)) is not None)
    if len(listed) == newest and len(numbers) < len(listed):
        # Some of the newest names are not those of steps, so too few were listed: list all.
        return step_numbers(run, with_damaged=with_damaged, names=names)[-len(listed) :]
    return numbers


def newest_step(run: StoreSpec, names: StepNames = STEP_NAMES) -> int | None:
    """Return the number of the newest step of a run that counts, or None."""
    return next(iter(step_numbers(run, 1, names=names)), None)


def described_by(
    step: int,
    of_run: Mapping[str, Any],
    user_metadata: Mapping[str, object] | None,
    metrics: Mapping[str, object] | None,
) -> dict[str, Any]:
    """Return the user's values for the marker of a step, which `ls` shows.

    Args:
        step: the number of the step, which becomes a value, too.
        of_run: values for each step of the run.
        user_metadata: values for this step; they replace those of the run with the same names.
        metrics: metrics of this step.

    Raises:
        ConfigError: a value cannot be stored as JSON.
    """
    values = {"step": step, **of_run, **(user_metadata or {})}
    if metrics is not None:
        if not isinstance(metrics, Mapping):
            raise ConfigError(f"metrics must be a mapping, got {type(metrics).__name__}")
        values["metrics"] = {name: _metric(name, value) for name, value in metrics.items()}
    return check_user_metadata(values)


def _metric(name: object, value: object) -> object:
    """Convert a metric to a JSON value.

    A tensor or NumPy number becomes its value. NaN and infinities, which JSON cannot hold, become
    text: a diverged loss is not a reason to lose a checkpoint.
    """
    item = getattr(value, "item", None)
    if callable(item):
        try:
            value = item()
        except (RuntimeError, ValueError) as error:
            raise ConfigError(f"the metric {name!r} is not a single number: {error}") from error
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
