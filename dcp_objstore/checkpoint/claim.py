"""The claim of a run: it keeps a superseded job from adding steps.

A model of these rules was searched for a way around them: two jobs that claim the run, one that was
superseded, one that lists; crashes anywhere. The rules have the same numbers in the model. A step
is one checkpoint directly below the run. `_CLAIM`, at the run, is changed by conditional PUTs
alone; it holds the number of the latest claim, and the base, the oldest claim whose steps count.

C1. Every marker carries the number of the claim of the job that wrote it.
C2. To claim a run, a job puts `_CLAIM` conditionally, with the next number and all else unchanged.
    If `going_back` names a step, it reads that step's marker. If the marker has that claim as its
    base, so has the run. Otherwise the job **fences** the step: it rewrites the marker, or puts a
    tombstone, with its own number as the base, and the base of the run is as in `_CLAIM`.
    The job lists the steps that count and **adopts** each: it rewrites the step's marker with the
    new number. If that is refused, or another listing shows a step that the first one lacked, it
    lists again. If a marker cannot be read, it gives up, because the step might count. Then it puts
    `_CLAIM` conditionally with base = number, and only then begins to train. If a PUT of `_CLAIM`
    is refused, another job is claiming the run, and this one gives up. So of two jobs that claim a
    run together, the one whose first PUT was the last to succeed trains, and no other.
    A job that has gone back to an earlier step does the same before its next save, but only if
    `_CLAIM` still has its own number. It does not adopt the steps after that one, and its last PUT
    leaves the base as it is and names in `going_back` the step that it is about to save. The
    **commit of that step decides**: its marker has the new number as its base. So a save that is
    refused changes nothing, and a crash after the commit does not undo it. A job that was refused
    and goes back again takes a number that is later than that of its fence, which is not a commit.
    After the commit the job puts `_CLAIM` with base = number, by rule C4.
C3. A step counts if it is committed and the claim of its marker is at least the base: that of
    `_CLAIM`, or of the marker that `going_back` leads to. To list the steps, a job reads these two
    before and after, and lists again if they have changed (`catalogue.list_run`).
C4. After its commit a job reads `_CLAIM`. If the number is still its own, the save succeeded;
    otherwise the job is superseded. It also reads `_CLAIM` before it uploads, so as not to upload
    in vain. There a save without a claim is refused if `_CLAIM` exists, because its step would not
    count.
C5. No job replaces or deletes a marker of a later claim, or with a later base, than its own. A
    marker of an earlier claim does not count once a job trains, so it is replaced without
    `overwrite`, even if it beat a commit. (`commit` does so only if it replaced the very marker
    that the save began with; if a sweep came in between, the save has lost.) Pinned markers are
    left alone.

The base only rises, and only steps that count are adopted: a step that does not count never will.
Nothing makes it rise but a claim that has adopted all steps that count, or a commit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from dcp_objstore import errors
from dcp_objstore.checkpoint.catalogue import (
    ClaimRecord,
    Entry,
    GoingBack,
    Objects,
    OpenBelow,
    base_by,
    counts,
    encode_claim,
    list_by_prefix,
    read_claim,
    read_steps,
    step_names,
)
from dcp_objstore.checkpoint.clock import SYSTEM_CLOCK, Clock, pause_or_raise
from dcp_objstore.checkpoint.commit import put_tombstone, rewrite_marker
from dcp_objstore.checkpoint.compare_and_swap import SwapOutcome, compare_and_swap
from dcp_objstore.checkpoint.marker import MAX_CLAIM, new_id
from dcp_objstore.checkpoint.names import CLAIM_KEY
from dcp_objstore.checkpoint.read import Stored, read_marker
from dcp_objstore.observe.report import first_few, logger
from dcp_objstore.stores import StoreSpec
from dcp_objstore.stores.protocol import ObjectStore, Version
from dcp_objstore.stores.retries import Tries
from dcp_objstore.transfer.workers import in_waves


@dataclass(frozen=True)
class RunClaim:
    """The right to save steps of a run, until another job claims the run. Picklable.

        claim = dos.claim_run("s3://bucket/run")
        dos.save(state, "s3://bucket/run/best", claim=claim)

    Attributes:
        url: URL of the run; its steps are directly below it.
        number: the number of the claim, from 1.
        goes_back: with the next commit, steps of earlier claims stop counting. For the first save
            of a `CheckpointManager` that has gone back.
    """

    url: str
    number: int
    goes_back: bool = False

    def __post_init__(self) -> None:
        """Refuse values that `claim_run` never returns."""
        is_number = type(self.number) is int and 0 < self.number <= MAX_CLAIM  # and not a bool
        if not isinstance(self.url, str) or not is_number:
            raise errors.ConfigError("a RunClaim comes from dcp_objstore.claim_run")


def check_claim(claim: RunClaim | None, step: StoreSpec) -> int | None:
    """Return the number of the claim that a step is saved with, or None if there is no claim.

    Raises:
        ConfigError: `claim` is not a RunClaim.
        InputError: the step does not lie directly below the claim's run.
    """
    if claim is None:
        return None
    if not isinstance(claim, RunClaim):
        raise errors.ConfigError(
            f"claim must be what dcp_objstore.claim_run returned, got {type(claim).__name__}"
        )
    run, _ = step.parent()
    # No run is above a step at the root of a store. A URL can be written in several ways; `at`
    # brings the claim's into the form of the step's.
    if run is None or run.url != step.at(claim.url).url:
        raise errors.InputError(
            f"the claim is for the run {claim.url}, but this step is not directly below it",
            url=step.url,
        )
    return claim.number


# --- C2


def claim_run(
    run: ObjectStore,
    open_step: OpenBelow,
    *,
    clock: Clock = SYSTEM_CLOCK,
) -> int:
    """Claim the run (rule C2): from now on no other job's steps count.

    After a crash in the middle, the next call goes on. Only one job at a time may train.

    Args:
        run: the store, rooted at the run. It needs conditional updates
            (`probe.require_rewrites`).
        open_step: returns the store of a step by its name; called from several threads.
        clock: the time, and the deadline. Default: 60 s.

    Returns:
        The number of the new claim.

    Raises:
        SupersededError: another job claimed the run at the same time.
        CommitUnknownError, RetryableError: no success before the deadline; it is safe to call this
            again.
        CheckpointCorruptError, UnsupportedError: `_CLAIM` or the marker of a step cannot be read.
            All steps that counted still do.
    """
    stored = read_claim(run)
    if stored:
        last_number = stored.record.number
    else:
        # The run was never claimed, or somebody removed `_CLAIM`. Then markers, those of deleted
        # steps too, still have the numbers of its claims.
        last_number = _latest_claim(_read_all(list_by_prefix(run), open_step, bare=True))
    return _take(run, open_step, stored, number=last_number + 1, clock=clock)


def go_back(
    run: ObjectStore,
    open_step: OpenBelow,
    number: int,
    step: str,
    keeps: Callable[[str], bool],
    *,
    clock: Clock = SYSTEM_CLOCK,
) -> int:
    """Prepare a save by which all steps but those that `keeps` names stop counting (rule C2).

    They all stop together, when that save commits with `goes_back=True`, and not before. A step
    that does not count stays on the store; this job may replace it, unless it is pinned.

    Args:
        run: the store, rooted at the run. It needs conditional updates
            (`probe.require_rewrites`).
        open_step: returns the store of a step by its name; called from several threads.
        number: the number of this job's claim.
        step: the name of the step that this job saves next.
        keeps: returns whether the step of this name shall still count after that save.

    Returns:
        The number of the new claim, which is this job's from now on.

    Raises:
        SupersededError: another job has claimed the run; nothing was changed.
        CommitUnknownError, RetryableError: no success before the deadline; this job has lost its
            claim.
        CheckpointCorruptError, UnsupportedError: `_CLAIM` or the marker of a step that is kept
            cannot be read; this job has lost its claim.
    """
    stored = _require_own(run, read_claim(run, expected=True), number)
    return _take(run, open_step, stored, number=number + 1, keeps=keeps, decider=step, clock=clock)


def _take(
    run: ObjectStore,
    open_step: OpenBelow,
    old_claim: Stored[ClaimRecord] | None,
    *,
    number: int,
    keeps: Callable[[str], bool] = lambda _: True,
    decider: str = "",
    clock: Clock,
) -> int:
    """Claim the run with this number, or a later one, and adopt the steps that `keeps` names.

    Args:
        old_claim: `_CLAIM` as it was read, which the first PUT of it must find unchanged; None if
            there was none.
        keeps: returns whether a step, by its name, is adopted. Default: each one is.
        decider: if this job goes back to an earlier step, the name of the step whose commit decides
            and raises the base. Default: the claim itself raises it.

    Returns:
        The number of the claim that this job has now.
    """
    first_claim = ClaimRecord(number=number, base=0, write_id=new_id())
    old = old_claim.record if old_claim else first_claim
    tries = clock.tries()

    def put(version: Version | None, base: int, back: GoingBack | None) -> Version:
        """Replace this version of `_CLAIM` by one with the present `number`; return its version.

        Raises:
            SupersededError: afterwards `_CLAIM` is another job's.
        """
        record = ClaimRecord(number=number, base=base, going_back=back, write_id=new_id())
        current = _swap(run, record, version, clock).stored
        if old_claim and current and _says_the_same(current.record, old_claim.record):
            # The PUT was refused only because the last job has noted since that it is finished.
            _swap(run, record, current.version, clock)
        # Whether these PUTs were refused does not matter: `_CLAIM` now says who has the run.
        again = read_claim(run, expected=True)
        if again is None or again.record.write_id != record.write_id:
            raise errors.SupersededError(
                f"another job claimed this run at the same time (claim {number}) and has it",
                advice="stop this job",
                url=run.url,
            )
        return again.version

    # Only the number changes, so the same steps count until the last PUT below.
    claim_version = put(old_claim.version if old_claim else None, old.base, old.going_back)
    base = _decide_base(open_step, old, number, tries)
    # If the last job was going back, `_decide_base` may have fenced its step, with `number` as the
    # base. This job may go back to save that very step. `base_by` tells a commit by its base, so
    # the commit needs a later number than the fence.
    least_number = number + 1 if decider and old.going_back else number
    while True:
        objects_at = list_by_prefix(run)
        steps = _read_all(objects_at, open_step, keeps=keeps)
        counting = [step for step in steps if counts(step.marker, base)]
        kept_steps = [step for step in counting if keeps(step.name)]
        dropped_steps = [step for step in counting if not keeps(step.name)]
        # Our number becomes the base. It must not be below that of any step, and it must be above
        # those of the dropped steps, so that they stop counting.
        needed_number = max(_latest_claim(steps), _latest_claim(dropped_steps) + 1, least_number)
        if needed_number > number:
            # `least_number` demands it, or a step has a later claim than this job. No job of this
            # run has one, because `_CLAIM` still has our number: the step was copied here from
            # another run.
            number = needed_number
            claim_version = put(claim_version, old.base, old.going_back)
        # List once more, because the first listing may lack a step that was saved at that time.
        if _adopt(kept_steps, number, clock) and step_names(list_by_prefix(run)) <= step_names(
            objects_at
        ):
            if decider:  # the commit of that step raises the base
                put(claim_version, base, GoingBack(step=decider, claim=number))
                _log_dropped(run, decider, dropped_steps)
            else:  # all steps that count have this number by now
                put(claim_version, number, None)
            return number
        pause_or_raise(
            run,
            tries,
            "others kept changing the steps of this run until the deadline; claim it again",
        )


def _decide_base(open_step: OpenBelow, claim: ClaimRecord, number: int, tries: Tries) -> int:
    """Decide the base of a run that another job had claimed, and return it.

    That job may have been going back, and the commit that raises the base may still be under way.
    When this function returns, either that commit has taken effect, or its step is fenced, so that
    the commit never will (rule C2).

    Args:
        claim: `_CLAIM` before this job claimed the run.
        number: the number of this job's claim.
    """
    if claim.going_back is None:
        return claim.base
    step = open_step(claim.going_back.step)
    while True:
        stored = read_marker(step)
        if stored is None:
            fence = put_tombstone(step, tries, base=number)
        elif base_by(claim, stored.record) != claim.base:
            return claim.going_back.claim  # the commit has taken effect
        else:
            fence = rewrite_marker(step, stored, "the fence", tries, base=number)
        if fence is not None:
            return claim.base
        pause_or_raise(step, tries)


def _swap(
    run: ObjectStore, record: ClaimRecord, version: Version | None, clock: Clock
) -> SwapOutcome[ClaimRecord]:
    """Put `_CLAIM` if it still has this version; with None, if there is no `_CLAIM`."""
    return compare_and_swap(
        run,
        CLAIM_KEY,
        encode_claim(record),
        version,
        tries=clock.tries(),
        what=f"claim {record.number} of the run",
        read=read_claim,
        landed=lambda seen: seen.write_id == record.write_id,
    )


def _says_the_same(new: ClaimRecord, old: ClaimRecord) -> bool:
    """Return whether two records differ at most in `finished`, which no rule looks at."""
    return (new.number, new.base, new.going_back) == (old.number, old.base, old.going_back)


def _adopt(steps: Sequence[Entry], number: int, clock: Clock) -> bool:
    """Rewrite the markers of these steps; return False if another job changed one."""

    def adopt(step: Entry) -> bool:
        assert step.stored is not None
        what = f"adopting the step as of claim {number}"
        rewritten = rewrite_marker(step.store, step.stored, what, clock.tries(), claim=number)
        return rewritten is not None

    # A step that has the number already was adopted before. `list`, because `all` would stop at the
    # first step that another job has changed.
    return all(list(in_waves(adopt, [step for step in steps if step.marker.claim < number])))


def _log_dropped(run: ObjectStore, decider: str, dropped: Sequence[Entry]) -> None:
    """Warn of the steps that stop counting when the job that has gone back saves `decider`.

    Args:
        dropped: these steps, the last name first.
    """
    if dropped:
        logger.warning(
            "%s: this job went back to an earlier step. When %s is saved, these %d steps no longer"
            " count: %s",
            run.url,
            decider,
            len(dropped),
            first_few([step.name for step in reversed(dropped)], 8),
        )
    for step in dropped:
        if step.marker.pins:
            logger.warning(
                "%s is pinned (%s), so it stays; remove the pin before you save this step again",
                step.store.url,
                ", ".join(step.marker.pins),
            )


def _read_all(
    objects_at: Mapping[str, Objects],
    open_step: OpenBelow,
    *,
    keeps: Callable[[str], bool] = lambda _: True,
    bare: bool = False,
) -> list[Entry]:
    """Read the steps of the run that have a marker, the last name first, as `read_steps` does.

    Raises:
        CheckpointCorruptError: the marker of a step that is kept cannot be read. Others are left
            out.
    """
    steps = []
    for step in read_steps(objects_at, open_step, bare=bare, with_damaged=True):
        if step.error is None:
            steps.append(step)
        elif keeps(step.name):
            step.error.message += (
                "; so the run was not claimed, because this step would not count any more. Try"
                " again. If that does not help, the step is lost: remove this object by hand"
            )
            raise step.error
    return steps


def _latest_claim(steps: Iterable[Entry]) -> int:
    """Return the largest number of a claim in the markers of these steps; 0 if there are none."""
    return max((step.marker.claim for step in steps), default=0)


# --- C4


def refuse_uncounted(run: ObjectStore, number: int) -> None:
    """Refuse a save whose step would not count in the run (rule C4). One GET, before the save.

    Args:
        number: the number of the claim of the job that saves; 0 for none.

    Raises:
        SupersededError: another job has claimed the run.
        CheckpointCorruptError, UnsupportedError: `_CLAIM` cannot be read.
    """
    claim = read_claim(run, expected=number > 0)
    if number:
        _require_own(run, claim, number)
    elif claim is not None:
        raise errors.SupersededError(
            f"a job has claimed this run (claim {claim.record.number}), and this save has no claim,"
            " so its step would not count: no job would resume from it",
            advice="pass claim=, which dcp_objstore.claim_run returns, or save under another run",
            url=run.url,
        )


def confirm(
    run: ObjectStore,
    number: int,
    *,
    goes_back: bool = False,
    clock: Clock = SYSTEM_CLOCK,
) -> None:
    """Check after a commit that the run still has this claim, so that the step counts (rule C4).

    If the job went back, also put the new base into `_CLAIM` (rule C2). If that fails, nothing is
    lost: readers find the base in the marker of the step, and the next claim puts it into `_CLAIM`.

    Raises:
        SupersededError: a newer job claimed the run.
        CommitUnknownError: `_CLAIM` could not be read. An error that may pass is retried until the
            deadline.
        CheckpointCorruptError: `_CLAIM` was removed or damaged, or replaced by an older one.
    """
    tries = clock.tries()
    while True:
        try:
            stored = read_claim(run, expected=True)
            break
        except errors.CheckpointCorruptError:
            raise  # `read_claim` calls `_CLAIM` damaged only after it has read it twice
        except errors.DcpObjstoreError as error:
            if not isinstance(error, errors.RetryableError) or not tries.pause():
                raise errors.CommitUnknownError(
                    "the step is committed, but it is not known whether it counts, because the"
                    f" run's _CLAIM could not be read ({error})",
                    advice="look at the run before you go on",
                    url=run.url,
                ) from error
    stored = _require_own(run, stored, number)
    if goes_back:
        record = ClaimRecord(number=number, base=number, write_id=new_id())
        try:
            outcome = _swap(run, record, stored.version, clock)
        except errors.DcpObjstoreError as error:
            # Whether the PUT took effect may be unknown.
            logger.warning("the base of %s may still be %d: %s", run.url, stored.record.base, error)
        else:
            # The PUT was refused because `_CLAIM` was changed since it was read. If a newer job did
            # that, this raises. It does not if our number is still there: another process has used
            # the same claim meanwhile, to `finish` the run or to `confirm` a save.
            if not outcome.landed:
                _require_own(run, outcome.stored, number)


def _require_own(
    run: ObjectStore, claim: Stored[ClaimRecord] | None, number: int
) -> Stored[ClaimRecord]:
    """Return the `_CLAIM` that was read; raise unless it has this job's number."""
    if claim is None or claim.record.number < number:
        raise errors.CheckpointCorruptError(
            "the run's _CLAIM was removed, or replaced by an older one (this job has claim"
            f" {number})",
            object_key=CLAIM_KEY,
            url=run.url,
        )
    if claim.record.number > number:
        raise errors.SupersededError(
            f"a newer job claimed this run (claim {claim.record.number}; this job has claim"
            f" {number}), so what this job saves does not count",
            advice="stop this job",
            url=run.url,
        )
    return claim


# --- the end


def finish(run: ObjectStore, number: int, *, clock: Clock = SYSTEM_CLOCK) -> None:
    """Note in `_CLAIM` that this job has trained to the end. The next claim takes the note back.

    Raises:
        SupersededError: another job has claimed the run; nothing was changed.
        CommitUnknownError: no clear answer before the deadline; it is safe to call this again.
        CheckpointCorruptError, UnsupportedError: `_CLAIM` cannot be read.
    """
    stored = _require_own(run, read_claim(run, expected=True), number)
    record = msgspec.structs.replace(stored.record, finished=True, write_id=new_id())
    outcome = _swap(run, record, stored.version, clock)
    # The PUT was refused. This raises if a newer job has claimed the run, and not if it was another
    # process with the same claim that changed `_CLAIM`.
    if not outcome.landed:
        _require_own(run, outcome.stored, number)
