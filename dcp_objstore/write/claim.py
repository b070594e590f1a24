"""What ties a checkpoint to the run that it lies in, and to the job that owns the run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcp_objstore.checkpoint import claim as rule
from dcp_objstore.checkpoint.claim import RunEpoch
from dcp_objstore.checkpoint.clock import deadline_seconds_for
from dcp_objstore.errors import ConfigError, InputError
from dcp_objstore.stores import StoreSpec

if TYPE_CHECKING:
    pass


def above(spec: StoreSpec) -> tuple[StoreSpec | None, str]:
    """The run that a checkpoint is in, and its name there; None: it is at the root of a store."""
    run_url, _, name = spec.url.rpartition("/")
    if not name or not spec.parsed.prefix.strip("/") or run_url in ("file:/", "file://"):
        return None, ""
    return spec.at(run_url), name


def check_epoch(epoch: RunEpoch | None, step: StoreSpec) -> int | None:
    """The number of an epoch that is used for a step; None: there is none.

    Raises:
        ConfigError: it is no epoch.
        InputError: the step does not lie directly below the epoch's run.
    """
    if epoch is None:
        return None
    if not isinstance(epoch, RunEpoch):
        raise ConfigError(
            f"epoch must be what dcp_objstore.take_over returned, got {type(epoch).__name__}"
        )
    run, _ = above(step)
    if run is None or run.url != step.at(epoch.run_url).url:
        raise InputError(
            f"the epoch is of the run {epoch.run_url}, and this is no step directly below it",
            url=step.url,
        )
    return epoch.number


def confirm(epoch: RunEpoch, step: StoreSpec) -> None:
    """Rule E4, after a commit; see `checkpoint.epoch.confirm`."""
    rule.confirm(
        step.at(epoch.run_url).open(),
        epoch.number,
        deadline_seconds=deadline_seconds_for(step.config.stall_timeout_seconds),
    )
