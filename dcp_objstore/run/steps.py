"""`steps`: list the checkpoints of a run that count. Does not import torch.

The rules are those of `checkpoint.claim`; the functions here take URLs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dcp_objstore.checkpoint import claim as rule
from dcp_objstore.errors import ConfigError
from dcp_objstore.stores import StoreSpec
from dcp_objstore.transfer.workers import wait_for

if TYPE_CHECKING:
    from datetime import datetime

    from dcp_objstore.config import TransferConfig
    from dcp_objstore.stores import ObjectStore


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
    found = wait_for(rule.list_steps, spec.open(), opener(spec), newest=newest)
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
        for step in found
    )


def opener(run: StoreSpec) -> Callable[[str], ObjectStore]:
    """Return a function that opens the store of a step of the run, by the step's name."""
    return lambda name: run.at(f"{run.url}/{name}").open()
