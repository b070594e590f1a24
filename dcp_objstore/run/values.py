"""What the user of a run passes, checked and in the form that it is stored in. Pure."""

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
    """Between saves: in steps, and in seconds.

    Raises:
        ConfigError: not positive, or two times.
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
    """Raise ConfigError unless it is a whole number from 0 on."""
    if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < 10**18:
        raise ConfigError(f"a step is a whole number from 0 on, got {step!r}")


def described_by(
    step: int,
    of_run: Mapping[str, Any],
    of_step: Mapping[str, object] | None,
    metrics: Mapping[str, object] | None,
) -> dict[str, Any]:
    """What the marker of a step holds of the user's: `ls` shows it.

    Raises:
        ConfigError: it is not JSON; see `check_user_metadata`.
    """
    found = {"step": step, **of_run, **(of_step or {})}
    if metrics is not None:
        if not isinstance(metrics, Mapping):
            raise ConfigError(f"metrics must be a mapping, got {type(metrics).__name__}")
        found["metrics"] = {name: _number(name, value) for name, value in metrics.items()}
    return check_user_metadata(found)


def _number(name: object, value: object) -> object:
    """A metric as JSON has it: of tensors and NumPy's numbers the value; NaN, which JSON cannot
    hold, as text. A loss that has blown up is no reason to lose a checkpoint.
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
