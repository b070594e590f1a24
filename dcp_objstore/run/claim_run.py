"""`claim_run` makes a job the only one whose saves count in a run; `go_back` drops later steps, and
`finish` says that there will be no more.

All ranks of the job call `claim_run`. The rules are those of `checkpoint.claim`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist

from dcp_objstore.checkpoint import claim as rule
from dcp_objstore.checkpoint.claim import RunClaim
from dcp_objstore.checkpoint.probe import require_rewrites
from dcp_objstore.config import TransferConfig
from dcp_objstore.distributed.failures import capture, every_rank, meeting, on_first
from dcp_objstore.distributed.groups import sync_group, world_group
from dcp_objstore.run.steps import STEP_NAMES, StepNames
from dcp_objstore.stores import StoreSpec


def claim_run(
    url: str,
    *,
    storage_options: Mapping[str, object] | None = None,
    config: TransferConfig | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> RunClaim:
    """Make this job the only one whose saves count in a run. Every rank calls it before training.

        claim = dos.claim_run("s3://bucket/run")
        dos.save(state, "s3://bucket/run/step-2500", claim=claim)

    An earlier job of the run may still be alive: preempted, paused or cut off from the network.
    From now on it adds, replaces and deletes no step that counts, whenever it wakes up: its saves
    raise SupersededError. This holds for jobs that pass their claim to `save`. In a run that has a
    claim, a save without one is refused; a save that had already begun does not count.

    All steps that count keep counting. That takes two requests for each, so in a run with thousands
    of steps it takes longer. After a crash, call it again.

    Args:
        url: URL of the run; its steps are the checkpoints directly below.
        storage_options: credentials and endpoint, as for `save`.
        config: time-outs and retries.
        process_group: the ranks of the job. Default: all. The first of them makes the requests.

    Returns:
        The claim, for `save`, `async_save`, `delete` and `ObjectStoreWriter`; the same on each
        rank.

    Raises:
        SupersededError: another job claimed the run at the same time, and goes on with it.
        CommitUnknownError, RetryableError: no clear answers; it is safe to call this again.
        CheckpointCorruptError: the run's `_CLAIM` or the marker of a step cannot be read. All steps
            that counted still do.
        UnsupportedError: the store has no conditional writes, or a newer version wrote the run.
        DcpObjstoreError: the store refused or failed; raised on every rank.
    """

    def make() -> RunClaim:
        spec = StoreSpec(url, storage_options, config)
        run = spec.open()
        require_rewrites(run, "no run can be claimed")
        return RunClaim(spec.url, rule.claim_run(run, spec.open_child))

    checked, _ = capture(lambda: StoreSpec(url, storage_options, config))
    # Of a wrong URL, `make` raises the error on all ranks. Errors of the meeting, where each rank
    # has to make this call, do not show a wrong URL, which may hold a password.
    checked_url = None if checked is None else checked.url
    with meeting(checked_url, process_group or world_group(), every_rank("dcp_objstore.claim_run")):
        return on_first(make, checked_url, sync_group(process_group, config))


def go_back(
    run: StoreSpec, claim: RunClaim, resumed: int, saves: int, names: StepNames = STEP_NAMES
) -> RunClaim:
    """Prepare the first save of a job that has gone back to an earlier step.

    With the commit of that save, the steps after `resumed` stop counting. Checkpoints whose names
    are not those of steps still count. One rank calls this.

    Args:
        run: the run.
        claim: the claim of the job.
        resumed: the number of the step to which the job has gone back.
        saves: the number of the step that it saves next.
        names: the names of the run's steps.

    Returns:
        The claim for that save; its number is that of this job from now on.

    Raises:
        SupersededError: another job has claimed the run; nothing was changed.
        DcpObjstoreError: the store refused or failed; this job may have lost its claim.
    """

    def keeps(name: str) -> bool:
        """Return whether the checkpoint with this name still counts."""
        number = names.number(name)
        return number is None or number <= resumed

    store, step = run.open(), names.name(saves)
    number = rule.go_back(store, run.open_child, claim.number, step, keeps)
    return RunClaim(claim.url, number, goes_back=True)


def finish(run: StoreSpec, claim: RunClaim) -> None:
    """Note in the run that this job has trained to the end. One rank calls it."""
    rule.finish(run.open(), claim.number)
