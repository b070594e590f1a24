"""`claim_run`: by all ranks of a job, which then is the only one whose saves count in a run; and
`go_back`, by which such a job leaves later steps behind.

The rules are those of `checkpoint.claim`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch.distributed as dist

from dcp_objstore.checkpoint import claim as rule
from dcp_objstore.checkpoint.claim import RunClaim
from dcp_objstore.checkpoint.probe import require_rewrites
from dcp_objstore.distributed.failures import capture, raise_on_all, typed_failures
from dcp_objstore.distributed.groups import sync_group
from dcp_objstore.run.housekeeping import step_number
from dcp_objstore.run.steps import opener
from dcp_objstore.stores.target import Target
from dcp_objstore.transfer.workers import wait_for

if TYPE_CHECKING:
    from dcp_objstore.config import TransferConfig


def claim_run(
    run_url: str,
    *,
    storage_options: Mapping[str, object] | None = None,
    config: TransferConfig | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> RunClaim:
    """Make this job the only one whose saves count in a run. Called by every rank, before training.

    From here on a job that had the run before (preempted and still alive, paused, cut off) adds,
    replaces and deletes no step that counts, whenever it wakes up: its saves raise SupersededError.
    That is so for jobs that pass their claim to `save`. In a run that was taken over a save without
    one is refused; what had begun before does not count. All steps that count stay: two requests
    for each, so it takes longer in a run of thousands. After a crash, take over again.

    Args:
        run_url: the run; its steps are the checkpoints directly below.
        storage_options: as for `save`.
        config: time-outs and retries.
        process_group: the ranks of the job. Default: all. The first of them makes the requests.

    Returns:
        The claim, for `save`, `async_save`, `delete` and `ObjectStoreWriter`; the same on each
        rank.

    Raises:
        SupersededError: another job took the run over at the same time, and goes on with it.
        CommitUnknownError, RetryableError: no clear answers; take over again, it is safe.
        CheckpointCorruptError: the run's `_CLAIM` is damaged.
        UnsupportedError: the store has no conditional writes; or a newer version wrote the run.
        DcpObjstoreError: as the store says, on every rank.
    """
    group = sync_group(process_group, config)

    def make() -> RunClaim:
        spec = Target(run_url, storage_options, config).spec
        run = spec.open()
        wait_for(require_rewrites, run, "no run can be taken over")
        return RunClaim(spec.url, wait_for(rule.claim_run, run, opener(spec)))

    first = group is None or dist.get_rank(group) == 0
    made, failed = capture(make) if first else (None, None)
    url = run_url if isinstance(run_url, str) else None
    raise_on_all(failed, url, group)
    held = [made]
    if group is not None:
        with typed_failures(url, group):
            dist.broadcast_object_list(held, group=group, group_src=0)
    assert held[0] is not None  # else `raise_on_all` has raised
    return held[0]


def go_back(
    claim: RunClaim,
    step: int,
    *,
    storage_options: Mapping[str, object] | None,
    config: TransferConfig | None,
) -> RunClaim:
    """Make the steps of a run that are later than `step` not count any more. Called by one rank.

    Checkpoints with other names than `step-N` go on counting.

    Args:
        claim: of this job.
        step: the last one that counts.
        storage_options, config: as for `claim_run`.

    Returns:
        The claim of this job from now on.

    Raises:
        SupersededError: another job has taken the run over; nothing was changed.
        DcpObjstoreError: see `claim_run`.
    """
    spec = Target(claim.run_url, storage_options, config).spec

    def keeps(name: str) -> bool:
        number = step_number(name)
        return number is None or number <= step

    number = wait_for(rule.go_back, spec.open(), opener(spec), claim.number, keeps)
    return RunClaim(spec.url, number)
