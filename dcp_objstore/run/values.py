"""Check a run's arguments and convert them to the form in which they are stored. Pure functions."""

from __future__ import annotations

import datetime
import math
from collections.abc import Mapping
from typing import Any

from dcp_objstore.checkpoint.marker import check_user_metadata
from dcp_objstore.errors import ConfigError


def intervals(
    every: int | datetime.timedelta | None, every_seconds: float | None
) -> tuple[int | None, float | None]:
    """Return the interval between saves in steps and in seconds; None for one that is not given.

    Raises:
        ConfigError: an interval is not positive, or there are two times.
    """
    if isinstance(every, datetime.timedelta):
        if every_seconds is not None:
            raise ConfigError("save_every is a time, so save_every_seconds must be left out")
        return intervals(None, every.total_seconds())
    if every is not None and (not isinstance(every, int) or isinstance(every, bool) or every < 1):
        raise ConfigError(
            f"save_every must be a number of steps of at least 1, or a timedelta, got {every!r}"
        )
    if every_seconds is not None and not every_seconds > 0:
        raise ConfigError(f"the time between saves must be positive, got {every_seconds!r}")
    return every, every_seconds


def check_step(step: object) -> None:
    """Raise ConfigError unless the step is a whole number, 0 or more."""
    if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < 10**18:
        raise ConfigError(f"a step must be a whole number, 0 or more, got {step!r}")


def described_by(
    step: int,
    of_run: Mapping[str, Any],
    of_step: Mapping[str, object] | None,
    metrics: Mapping[str, object] | None,
) -> dict[str, Any]:
    """Return the user's values for the marker of a step, which `ls` shows.

    Args:
        step: number of the step.
        of_run: the values that all steps of the run have.
        of_step: the values of this step.
        metrics: the metrics of this step.

    Raises:
        ConfigError: a value cannot be stored as JSON.
    """
    found = {"step": step, **of_run, **(of_step or {})}
    if metrics is not None:
        if not isinstance(metrics, Mapping):
            raise ConfigError(f"metrics must be a mapping, got {type(metrics).__name__}")
        found["metrics"] = {name: _number(name, value) for name, value in metrics.items()}
    return check_user_metadata(found)


def _number(name: object, value: object) -> object:
    """Convert a metric to a JSON value.

    A tensor or NumPy number becomes its value. NaN and infinities, which JSON cannot hold, become
    text: a loss that has diverged is no reason to lose a checkpoint.
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
