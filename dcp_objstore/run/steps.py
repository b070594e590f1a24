"""`steps`: the checkpoints of a run, and what ties a checkpoint to its run. Without torch.

The rules are those of `checkpoint.claim`; here they get URLs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dcp_objstore.checkpoint import claim as rule
from dcp_objstore.errors import ConfigError
from dcp_objstore.stores import StoreSpec
from dcp_objstore.stores.target import Target
from dcp_objstore.transfer.workers import wait_for

if TYPE_CHECKING:
    from datetime import datetime

    from dcp_objstore.config import TransferConfig
    from dcp_objstore.stores import ObjectStore


@dataclass(frozen=True, kw_only=True)
class RunStep:
    """A committed step of a run.

    Attributes:
        url: the checkpoint.
        name: below the run, as `step-1000`.
        commit_id: of its commit.
        created_at: by the clock of the host that committed; timezone-aware.
        total_bytes: the sizes of its data objects.
        world_size: ranks that saved it.
        claim: of the job that saved it, or adopted it; 0: none.
        pins: names under which it is protected.
        user_metadata: as given to `save`.
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
    """The committed steps of a run that count, the newest last. Called by any process, alone.

    They are in the order of their names, with numbers in them taken as numbers: `step-9` comes
    before `step-10`. In a run that was never taken over all committed steps count. A step with a
    damaged marker is left out, and a warning logged.

    Requests: two for the run's `_CLAIM`, one listing of the run (a page for each 1,000 objects),
    and one for each step; again if a job takes the run over meanwhile.

    Args:
        run_url: the run; its steps are the checkpoints directly below.
        newest: only so many, the last ones; markers are read from the last on, until they are
            found. Default: all.
        storage_options: as for `save`.
        config: time-outs and retries.

    Raises:
        CheckpointCorruptError: the run's `_CLAIM` is damaged.
        UnsupportedError: a newer version wrote the run.
        RetryableError: other jobs kept taking the run over.
        DcpObjstoreError: as the store says.
    """
    if newest is not None and (not isinstance(newest, int) or newest < 1):
        raise ConfigError(f"newest must be a number of steps, at least 1, got {newest!r}")
    spec = Target(run_url, storage_options, config).spec
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
    """How the store of a step of a run is opened, by its name."""
    return lambda name: run.at(f"{run.url}/{name}").open()
