"""The claim of a run: keeps a job that was superseded from adding steps.

The rules, with the numbers that they have in the model that was searched for a way around them
(two jobs that take over, one that was superseded, a lister; crashes anywhere). A step is one
checkpoint directly below the run; `_CLAIM`, at the run, is changed by conditional PUTs alone.

C1. Every marker carries the claim of the job that wrote it.
C2. A job takes over: conditional PUT of `_CLAIM` with the next number and the base as it is; list
    the steps that count; **adopt** each, which rewrites its marker with the new claim (refused:
    list again); conditional PUT of `_CLAIM` with base = number, and only then it begins to train.
    Refused there: somebody else takes over; give up. So of two that take over at once, the one
    whose first PUT was the last to succeed trains, and no other.
    A job that has gone back to an earlier step does the same before its next save, but only if
    `_CLAIM` still has its own number, and it does not adopt the steps later than that one.
C3. A step counts if it is committed and the claim of its marker is at least the base. Who lists
    reads `_CLAIM` before and after, and lists again if it has changed.
C4. After its commit a job reads `_CLAIM`. Its own number still: success. Otherwise superseded.
    It reads it before it uploads as well, so as not to upload in vain. A save without a claim is
    refused there where `_CLAIM` exists, because its step would not count.
C5. Nobody replaces or deletes a marker of a later claim than its own. One of an earlier claim does
    not count once a job trains, so it is replaced unasked, also when it beat a commit. (In
    `commit`: only where it was put on the very marker that the save began with; if a sweep came in
    between, the save has lost.) Pinned ones are left.

The base only ever rises, and only what counts is adopted: what once does not count never will.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Final, TypeAlias

import msgspec
from msgspec import Meta

from dcp_objstore.checkpoint.clock import DEADLINE_SECONDS, SYSTEM_CLOCK, Clock, Retries
from dcp_objstore.checkpoint.commit import rewrite_marker
from dcp_objstore.checkpoint.compare_and_swap import compare_and_swap
from dcp_objstore.checkpoint.marker import MAX_CLAIM, Marker, new_id
from dcp_objstore.checkpoint.names import CLAIM_KEY, natural_order, step_of
from dcp_objstore.checkpoint.read import Found, read_marker
from dcp_objstore.checkpoint.sealed import check_checksum, damaged, with_checksum
from dcp_objstore.errors import (
    CheckpointCorruptError,
    CommitUnknownError,
    ConfigError,
    CorruptDataError,
    DcpObjstoreError,
    ObjectNotFoundError,
    RetryableError,
    SupersededError,
)
from dcp_objstore.stores.protocol import ObjectStore, Version
from dcp_objstore.transfer.workers import WAVE, in_waves

FORMAT: Final = 1
MAX_SIZE_BYTES: Final = 4096
_WHAT = "the run's _CLAIM"
_log = logging.getLogger(__name__)

OpenStep: TypeAlias = Callable[[str], ObjectStore]


@dataclass(frozen=True)
class RunClaim:
    """The right to save steps of a run, until another job takes the run over. Picklable.

    Attributes:
        run_url: the run; its steps lie directly below.
        number: of the claim, from 1.
    """

    run_url: str
    number: int

    def __post_init__(self) -> None:
        """Refuse what `claim_run` never gives."""
        whole = isinstance(self.number, int) and not isinstance(self.number, bool)
        if not isinstance(self.run_url, str) or not whole or not 0 < self.number <= MAX_CLAIM:
            raise ConfigError("a RunClaim comes from dcp_objstore.claim_run")


class ClaimRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `_CLAIM`.

    Attributes:
        format: rises when an older version would misread it.
        number: of the job that took over last.
        base: the oldest claim whose steps count.
        write_id: fresh for every content.
    """

    format: Annotated[int, Meta(ge=1)] = FORMAT
    number: Annotated[int, Meta(ge=1, le=MAX_CLAIM)]
    base: Annotated[int, Meta(ge=0, le=MAX_CLAIM)]
    write_id: Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]


_encoder = msgspec.json.Encoder(order="deterministic")
_decoder = msgspec.json.Decoder(ClaimRecord)


@dataclass(frozen=True)
class Step:
    """A step whose marker was read.

    Attributes:
        name: below the run.
        store: rooted at the step.
        found: its marker, in whatever state.
    """

    name: str
    store: ObjectStore
    found: Found

    @property
    def marker(self) -> Marker:
        """The marker alone."""
        return self.found[0]


def encode_claim(record: ClaimRecord) -> bytes:
    """`_CLAIM` as it lies on the store."""
    return with_checksum(_encoder.encode(record))


def decode_claim(body: bytes) -> ClaimRecord:
    """`_CLAIM` from the bytes on the store, checked.

    Raises:
        CheckpointCorruptError: too large, not JSON, digest or a field wrong.
        UnsupportedError: written by a newer version in a format that this one does not know.
    """
    check_checksum(body, what=_WHAT, newest_format=FORMAT, max_size_bytes=MAX_SIZE_BYTES)
    try:
        record = _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise damaged(_WHAT, f"{error}") from error
    if record.base > record.number:
        raise damaged(_WHAT, f"base {record.base} is beyond number {record.number}")
    return record


def read_claim(run: ObjectStore) -> tuple[ClaimRecord, Version] | None:
    """`_CLAIM` with the version of the same response; None: nobody ever took this run over. One
    GET.

    Raises:
        CheckpointCorruptError, UnsupportedError: see `decode_claim`.
    """
    try:
        body, meta = run.get(CLAIM_KEY, max_size_bytes=MAX_SIZE_BYTES)
    except ObjectNotFoundError:
        return None
    except CorruptDataError as error:
        raise damaged(_WHAT, error.message).at(object_key=CLAIM_KEY, url=run.url) from error
    try:
        return decode_claim(body), meta.version
    except DcpObjstoreError as error:
        error.at(object_key=CLAIM_KEY, url=run.url)
        raise


def counts(marker: Marker, base: int) -> bool:
    """Rule C3, of one marker."""
    return marker.is_committed and marker.claim >= base


# --- C2


def claim_run(
    run: ObjectStore,
    open_step: OpenStep,
    *,
    deadline_seconds: float = DEADLINE_SECONDS,
    clock: Clock = SYSTEM_CLOCK,
) -> int:
    """Take the run over (rule C2); after a crash, the next one goes on. One at a time trains.

    Args:
        run: rooted at the run; with conditional updates (see `probe.require_rewrites`).
        open_step: the store of a step, by its name; called from several threads.
        deadline_seconds: for each PUT, how long it may be begun again; and for listing again.
        clock: for tests.

    Returns:
        The number of the new claim.

    Raises:
        SupersededError: another job took the run over at the same time.
        CommitUnknownError, RetryableError: not until the deadline; take over again, it is safe.
        CheckpointCorruptError, UnsupportedError: `_CLAIM` cannot be read, or a step is in a newer
            format. (A step whose marker is damaged is left out, with a warning.)
    """
    known = read_claim(run)
    number = known[0].number + 1 if known else 1 + _last_claim(_read_steps(run, open_step))
    return _take(run, open_step, known, number, _every, deadline_seconds, clock)


def go_back(
    run: ObjectStore,
    open_step: OpenStep,
    number: int,
    keeps: Callable[[str], bool],
    *,
    deadline_seconds: float = DEADLINE_SECONDS,
    clock: Clock = SYSTEM_CLOCK,
) -> int:
    """Make the other steps than `keeps` not count any more, durably (rule C2).

    A crash on the way leaves all of them counting, or none. What does not count stays on the
    store; this job may replace it, unless it is pinned.

    Args:
        run, open_step, deadline_seconds, clock: see `claim_run`.
        number: the claim of this job.
        keeps: whether a step, by its name, goes on counting.

    Returns:
        The number of the new claim, which this job has from now on.

    Raises:
        SupersededError: another job has taken the run over; nothing was changed.
        As `claim_run` for the rest. After such an error this job has lost its claim.
    """
    known = read_claim(run)
    _refuse_not_owned(run, known, number)
    return _take(run, open_step, known, number + 1, keeps, deadline_seconds, clock)


def _every(_name: str) -> bool:
    return True


def _take(
    run: ObjectStore,
    open_step: OpenStep,
    known: tuple[ClaimRecord, Version] | None,
    number: int,
    keeps: Callable[[str], bool],
    deadline_seconds: float,
    clock: Clock,
) -> int:
    base = known[0].base if known else 0
    retries = Retries(deadline_seconds, clock)

    def put(version: Version | None, new_base: int) -> Version:
        """Change `_CLAIM`, and return its new version."""
        record = ClaimRecord(number=number, base=new_base, write_id=new_id())
        outcome = compare_and_swap(
            run,
            CLAIM_KEY,
            encode_claim(record),
            version,
            Retries(deadline_seconds, clock),
            f"taking the run over as claim {number}",
            read=read_claim,
            landed=lambda seen: seen.write_id == record.write_id,
        )
        again = read_claim(run) if outcome.landed else None
        if again is None or again[0].write_id != record.write_id:
            raise _beaten(run, number)
        return again[1]

    claimed = put(known[1] if known else None, base)
    while True:
        found = _read_steps(run, open_step)
        later = _last_claim(found)
        if later > number:
            # Ours still, so no job of this run has it: a step that was copied here from another.
            number = later + 1
            claimed = put(claimed, base)
            continue
        counting = [step for step in found if counts(step.marker, base)]
        kept = [step for step in counting if keeps(step.name)]
        if _adopt(kept, number, deadline_seconds, clock):
            put(claimed, number)
            _log_dropped(run, [step for step in counting if not keeps(step.name)])
            return number
        if not retries.pause():
            raise RetryableError(
                "others kept changing the steps of this run until the deadline; take it over again",
                url=run.url,
            )


def _adopt(steps: Sequence[Step], number: int, deadline_seconds: float, clock: Clock) -> bool:
    """Rewrite the markers of these steps; False: somebody changed one meanwhile."""

    def adopt(step: Step) -> bool:
        retries = Retries(deadline_seconds, clock)
        what = f"adopting the step as of claim {number}"
        return rewrite_marker(step.store, step.found, what, retries, claim=number) is not None

    return all(list(in_waves(adopt, [step for step in steps if step.marker.claim < number])))


def _log_dropped(run: ObjectStore, dropped: Sequence[Step]) -> None:
    if not dropped:
        return
    names = [step.name for step in reversed(dropped)]
    _log.warning(
        "%s: this job went back, so these %d steps do not count any more: %s%s",
        run.url,
        len(names),
        ", ".join(names[:8]),
        ", ..." if len(names) > 8 else "",
    )
    for step in dropped:
        if step.marker.pins:
            _log.warning(
                "%s is pinned (%s): it stays, and cannot be saved again before the pin is removed",
                step.store.url,
                ", ".join(step.marker.pins),
            )


def _last_claim(found: Sequence[Step]) -> int:
    return max((step.marker.claim for step in found), default=0)


def _beaten(run: ObjectStore, number: int) -> SupersededError:
    return SupersededError(
        f"another job took this run over while this one did (as claim {number}), and goes on with"
        " it. Stop this job",
        url=run.url,
    )


# --- C3


def list_steps(
    run: ObjectStore,
    open_step: OpenStep,
    *,
    newest: int | None = None,
    deadline_seconds: float = DEADLINE_SECONDS,
    clock: Clock = SYSTEM_CLOCK,
) -> list[Step]:
    """The steps that count, in natural order of their names, the last one newest (rule C3).

    Two GETs of `_CLAIM`, one listing, and a GET for each marker, with `newest` from the last on.
    None for a marker that is alone: of a deleted step only that is left in the end, for ever, and a
    committed one has its index, which was put before. So what was deleted costs no requests.

    Args:
        run: rooted at the run.
        open_step: the store of a step, by its name; called from several threads.
        newest: only so many, the newest. Default: all.
        deadline_seconds: listing again ends then.
        clock: for tests.

    Raises:
        RetryableError: jobs kept taking the run over until the deadline.
        CheckpointCorruptError, UnsupportedError: `_CLAIM` cannot be read, or a step is in a newer
            format. (A step whose marker is damaged is left out, with a warning.)
    """
    retries = Retries(deadline_seconds, clock)
    while True:
        before = read_claim(run)
        base = before[0].base if before else 0
        found: list[Step] = []
        for step in _steps_backwards(run, open_step, newest, but_bare=True):
            if counts(step.marker, base):
                found.append(step)
            if len(found) == newest:
                break
        after = read_claim(run)
        if (before and before[0]) == (after and after[0]):
            return found[::-1]
        if not retries.pause():
            raise RetryableError(
                "other jobs kept taking this run over until the deadline; try again", url=run.url
            )


def _steps_backwards(
    run: ObjectStore, open_step: OpenStep, newest: int | None = None, *, but_bare: bool = False
) -> Iterator[Step]:
    """All steps with a marker, the last name first; with `newest`, read a few at a time.

    With `but_bare` those are left out that have nothing but a marker.
    """

    def read(name: str) -> Step | None:
        store = open_step(name)
        try:
            found = read_marker(store)
        except CheckpointCorruptError as error:
            _log.warning("a step is left out, because its marker cannot be read: %s", error)
            return None
        return None if found is None else Step(name, store, found)

    names: set[str | None] = set()
    holding: set[str | None] = set()
    for meta in run.list():
        name = step_of(meta.key)
        if name is not None:
            names.add(name)
        else:
            holding.add(meta.key.partition("/")[0])
    if but_bare:
        names &= holding
    ordered = sorted((name for name in names if name), key=natural_order, reverse=True)
    wave = WAVE if newest is None else max(1, min(newest, WAVE))
    return (step for step in in_waves(read, ordered, wave) if step is not None)


def _read_steps(run: ObjectStore, open_step: OpenStep) -> list[Step]:
    return list(_steps_backwards(run, open_step))


# --- C4


def refuse_uncounted(run: ObjectStore, number: int) -> None:
    """Before a save: raise if its step could not count in the run (rule C4). One GET.

    Args:
        run: rooted at the run.
        number: the claim of the job that saves; 0: it has none.

    Raises:
        SupersededError: the run was taken over, and not by this job.
        CheckpointCorruptError, UnsupportedError: `_CLAIM` cannot be read.
    """
    found = read_claim(run)
    if number:
        _refuse_not_owned(run, found, number)
    elif found is not None:
        raise SupersededError(
            f"a job took this run over (claim {found[0].number}), and this save has no claim, so"
            " its step would not count: no job would resume from it. Pass the claim that"
            " dcp_objstore.claim_run returned (CheckpointManager does, with claim_run=True, and"
            " has it as its attribute `claim`), or save under a URL that is not directly below"
            " this run",
            url=run.url,
        )


def confirm(
    run: ObjectStore,
    number: int,
    *,
    deadline_seconds: float = DEADLINE_SECONDS,
    clock: Clock = SYSTEM_CLOCK,
) -> None:
    """After a commit: return if the run is still this claim's, so that the step counts (rule C4).

    Raises:
        SupersededError: a newer job took the run over.
        CommitUnknownError: `_CLAIM` could not be read until the deadline.
        CheckpointCorruptError: somebody removed or damaged it.
    """
    retries = Retries(deadline_seconds, clock)
    while True:
        try:
            found = read_claim(run)
            break
        except CorruptDataError:
            raise
        except DcpObjstoreError as error:
            if not isinstance(error, RetryableError) or not retries.pause():
                raise CommitUnknownError(
                    "the step is committed, but whether it counts is not known, because the run's"
                    f" _CLAIM could not be read ({error}). Look at the run before you go on",
                    url=run.url,
                ) from error
    _refuse_not_owned(run, found, number)


def _refuse_not_owned(
    run: ObjectStore, found: tuple[ClaimRecord, Version] | None, number: int
) -> None:
    """Raise unless the run is of the claim `number`, by the `_CLAIM` that was read."""
    if found is None or found[0].number < number:
        raise CheckpointCorruptError(
            f"somebody removed the run's _CLAIM, or put an older one in its place (this job has"
            f" claim {number})",
            object_key=CLAIM_KEY,
            url=run.url,
        )
    if found[0].number > number:
        raise SupersededError(
            f"a newer job took this run over (claim {found[0].number}; this job has claim"
            f" {number}), so what this job saves does not count. Stop this job",
            url=run.url,
        )
