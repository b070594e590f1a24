"""What ties a checkpoint to the run that it lies in, and to the job that owns the run."""

from __future__ import annotations

import logging

from dcp_objstore.checkpoint import claim as rule
from dcp_objstore.checkpoint.claim import RunClaim
from dcp_objstore.checkpoint.clock import deadline_seconds_for
from dcp_objstore.errors import ConfigError, InputError, UnsupportedError
from dcp_objstore.stores import StoreSpec
from dcp_objstore.transfer.workers import wait_for

_log = logging.getLogger(__name__)


def above(spec: StoreSpec) -> tuple[StoreSpec | None, str]:
    """The run that a checkpoint is in, and its name there; None: it is at the root of a store."""
    run_url, _, name = spec.url.rpartition("/")
    if not name or not spec.parsed.prefix.strip("/") or run_url in ("file:/", "file://"):
        return None, ""
    return spec.at(run_url), name


def check_claim(claim: RunClaim | None, step: StoreSpec) -> int | None:
    """The number of a claim that is used for a step; None: there is none.

    Raises:
        ConfigError: it is no claim.
        InputError: the step does not lie directly below the claim's run.
    """
    if claim is None:
        return None
    if not isinstance(claim, RunClaim):
        raise ConfigError(
            f"claim must be what dcp_objstore.claim_run returned, got {type(claim).__name__}"
        )
    run, _ = above(step)
    if run is None or run.url != step.at(claim.run_url).url:
        raise InputError(
            f"the claim is of the run {claim.run_url}, and this is no step directly below it",
            url=step.url,
        )
    return claim.number


def confirm(claim: RunClaim, step: StoreSpec) -> None:
    """Rule C4, after a commit; see `checkpoint.claim.confirm`."""
    rule.confirm(
        step.at(claim.run_url).open(),
        claim.number,
        deadline_seconds=deadline_seconds_for(step.config.stall_timeout_seconds),
    )


def refuse_uncounted(claim: RunClaim | None, step: StoreSpec) -> None:
    """Before a save: raise if its step could not count in its run. One GET.

    Without a claim the run is what lies above the checkpoint. Where that cannot be read (rights
    that end at the checkpoint, say) the save goes on: it may well be no run.

    Raises:
        SupersededError: the run was taken over, and not by this job.
        DcpObjstoreError: see `checkpoint.claim.refuse_uncounted`; or as the store says.
    """
    if claim is not None:
        wait_for(rule.refuse_uncounted, step.at(claim.run_url).open(), claim.number)
        return
    try:
        run, _ = above(step)
        if run is not None:
            wait_for(rule.refuse_uncounted, run.open(), 0)
    except UnsupportedError:
        raise
    except InputError as error:
        _log.debug("%s is saved without a look at what lies above it: %s", step.url, error)
