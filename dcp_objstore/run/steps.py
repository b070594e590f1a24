"""The steps of a run: numbers, names, values, and `steps`, which lists those that count. No torch.

The rules are those of `checkpoint.claim`; the functions here take URLs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dcp_objstore.checkpoint import claim as rule
from dcp_objstore.checkpoint.marker import check_user_metadata
from dcp_objstore.errors import ConfigError
from dcp_objstore.stores import StoreSpec
from dcp_objstore.transfer.workers import wait_for

if TYPE_CHECKING:
    from datetime import datetime

    from dcp_objstore.checkpoint.marker import Marker
    from dcp_objstore.config import TransferConfig
    from dcp_objstore.stores import ObjectStore


_STEP_NAME = re.compile(r"step-(0|[1-9][0-9]{0,17})\Z")


@dataclass(frozen=True, kw_only=True)
class RunStep:
    """A committed step of a run.

    Attributes:
        url: URL of the checkpoint.
        name: its name below the run, such as `step-1000`.
        commit_id: id of its commit.
        created_at: time of the commit by the committing host's clock; timezone-aware.
        total_bytes: size of its data objects.
        world_size: number of ranks that saved it.
        claim: number of the claim of the job that saved or adopted it; 0 for none.
        pins: names of the pins that protect it.
        user_metadata: the values that were passed to `save`.
    """

    url: str
    name: str
    commit_id: str
    created_at: datetime
    total_bytes: int
    world_size: int
    claim: int = 0
    pins: tuple[str, ...] = ()
    user_metadata: Mapping[str, Any] = field(default_factory=dict)


def steps(
    run_url: str,
    *,
    newest: int | None = None,
    storage_options: Mapping[str, object] | None = None,
    config: TransferConfig | None = None,
) -> tuple[RunStep, ...]:
    """List the committed steps of a run that count, the newest last. One process calls it.

    Steps are sorted by name, and numbers in names are compared as numbers: `step-9` comes before
    `step-10`. In a run without a claim all committed steps count. A step with a damaged marker is
    left out, and a warning is logged.

    Sends two requests for the run's `_CLAIM`, one listing of the run (a page for each 1,000
    objects), and one request for each step. It starts again if a job claims the run meanwhile.

    Args:
        run_url: URL of the run; its steps are the checkpoints directly below.
        newest: how many steps to list, the newest ones. Markers are read from the last step on
            until there are enough. Default: all.
        storage_options: credentials and endpoint, as for `save`.
        config: time-outs and retries.

    Raises:
        ConfigError: `newest` is not a number of steps.
        CheckpointCorruptError: the run's `_CLAIM` is damaged.
        UnsupportedError: a newer version wrote the run.
        RetryableError: other jobs kept claiming the run.
        DcpObjstoreError: the store refused or failed.
    """
    if newest is not None and (not isinstance(newest, int) or newest < 1):
        raise ConfigError(f"newest must be a number of steps, at least 1, got {newest!r}")
    spec = StoreSpec(run_url, storage_options, config)
    return tuple(
        RunStep(
            url=step.store.url,
            name=step.name,
            commit_id=step.marker.commit_id,
            created_at=step.marker.created_at,
            total_bytes=step.marker.counts.total_bytes,
            world_size=step.marker.world_size,
            claim=step.marker.claim,
            pins=step.marker.pins,
            user_metadata=step.marker.user_metadata,
        )
        for step in steps_of(spec, newest)
    )


def steps_of(run: StoreSpec, newest: int | None = None) -> Sequence[rule.Step]:
    """List the steps of a run with their markers, as `steps` does."""
    return wait_for(rule.list_steps, run.open(), opener(run), newest=newest)


def check_step(step: object) -> None:
    """Raise ConfigError unless the step is a whole number, 0 or more."""
    if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < 10**18:
        raise ConfigError(f"a step must be a whole number, 0 or more, got {step!r}")


def step_url(run_url: str, step: int) -> str:
    """Return the URL of a step's checkpoint."""
    return f"{run_url.rstrip('/')}/step-{step}"


def step_number(name: str) -> int | None:
    """Return the number in a step's name, or None for any other name."""
    found = _STEP_NAME.match(name)
    return int(found[1]) if found else None


def step_numbers(run: StoreSpec, newest: int | None = None) -> tuple[int, ...]:
    """List the numbers of the newest steps of a run that count, or of all; the newest last."""
    found = steps_of(run, newest)
    numbers = sorted(number for one in found if (number := step_number(one.name)) is not None)
    if newest is not None and len(found) == newest and len(numbers) < newest:
        return step_numbers(run)[-newest:]  # there were other names among them
    return tuple(numbers)


def commit_time(
    name: str, marker: Marker, written_at: Mapping[str, datetime]
) -> tuple[datetime, datetime]:
    """Return when a checkpoint was committed: by the store's clock, and by the host's.

    The first is that of the index: hosts have clocks of their own, and sweeps, pins and claims
    rewrite the marker. The second is for stores that count whole seconds.

    Args:
        name: its name below the run.
        marker: its marker.
        written_at: when each object of the run was written, by its key below the run.
    """
    index = marker.index.key if marker.index is not None else ""
    return written_at.get(f"{name}/{index}", marker.created_at), marker.created_at


def opener(run: StoreSpec) -> Callable[[str], ObjectStore]:
    """Return a function that opens the store of a step of the run, by the step's name."""
    return lambda name: run.child(name).open()


def described_by(
    step: int,
    of_run: Mapping[str, Any],
    user_metadata: Mapping[str, object] | None,
    metrics: Mapping[str, object] | None,
) -> dict[str, Any]:
    """Return the user's values for the marker of a step, which `ls` shows.

    Raises:
        ConfigError: a value cannot be stored as JSON.
    """
    found = {"step": step, **of_run, **(user_metadata or {})}
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
