"""A save's part in the run that its checkpoint lies in, and in the claim of the job on that run."""

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
    """Return the run that a checkpoint lies in and its name there; None at the root of a store."""
    run_url, _, name = spec.url.rpartition("/")
    if not name or not spec.parsed.prefix.strip("/") or run_url in ("file:/", "file://"):
        return None, ""
    return spec.at(run_url), name


def check_claim(claim: RunClaim | None, step: StoreSpec) -> int | None:
    """Return the number of the claim that a step is saved with, or None if there is no claim.

    Raises:
        ConfigError: `claim` is not a RunClaim.
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
            f"the claim is for the run {claim.run_url}, but this step is not directly below it",
            url=step.url,
        )
    return claim.number


def confirm(claim: RunClaim, step: StoreSpec) -> None:
    """Check after a commit that the claim still holds (rule C4 of `checkpoint.claim`)."""
    rule.confirm(
        step.at(claim.run_url).open(),
        claim.number,
        deadline_seconds=deadline_seconds_for(step.config.stall_timeout_seconds),
    )


def refuse_uncounted(claim: RunClaim | None, step: StoreSpec) -> None:
    """Raise, before a save, if its step would not count in its run. Costs one GET.

    Without a claim, the run is the prefix above the checkpoint. If that cannot be read (for example
    with rights to the checkpoint only), the save goes on: the prefix may well not be a run.

    Raises:
        SupersededError: another job has taken the run over.
        DcpObjstoreError: the run's claim cannot be used, or the store failed.
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
        _log.debug("%s: cannot read the prefix above, so no claim is checked: %s", step.url, error)
