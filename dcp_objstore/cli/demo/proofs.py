"""The demo's proofs, as pure comparisons: each returns what it has shown, or raises."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from dcp_objstore.checkpoint.names import MARKER_KEY, parse_data_key
from dcp_objstore.cli.ranks import Outcome
from dcp_objstore.errors import CheckpointNotFoundError, DcpObjstoreError
from dcp_objstore.observe.report import counted, first_few, size_text

# Ranks add the same float32 numbers in another order; a wrong weight would change far more.
_LOSS_TOLERANCE = 1e-4
# The tolerance for the losses of several steps, over which such differences grow.
_PATH_TOLERANCE = 1e-2


class ProofFailedError(Exception):
    """A statement that the demo had to prove does not hold."""


def prove(holds: bool, otherwise: str) -> None:
    """Raise ProofFailedError with the text, unless the statement holds."""
    if not holds:
        raise ProofFailedError(otherwise)


@dataclass(frozen=True, kw_only=True)
class State:
    """The content of a state when it was saved, or after it was loaded.

    Attributes:
        step: number of training steps done.
        recorded_loss: loss on the fixed batch, as recorded in the state.
        fixed_loss: the same loss, computed now from the weights; None if there is no model.
        digests: SHA-256 of every whole tensor and value, by key.
    """

    step: int
    recorded_loss: float
    fixed_loss: float | None
    digests: Mapping[str, str]


@dataclass(frozen=True)
class FinishedLoad:
    """A finished load; bytes and seconds are those of one rank.

    Attributes:
        state: what was loaded.
        total_bytes: bytes that were read of data objects.
        seconds: how long it took.
        local_bytes: how many of the bytes came from copies on this node.
    """

    state: State
    total_bytes: int
    seconds: float
    local_bytes: int = 0


def identical(saved: State, loaded: State) -> str:
    """Prove that every tensor and value of two states is the same, bit for bit."""
    prove(bool(saved.digests), "nothing was saved")
    missing = sorted(saved.digests.keys() ^ loaded.digests.keys())
    prove(not missing, f"{len(missing)} keys are only in one state: {first_few(missing, 3)}")
    differ = sorted(key for key in saved.digests if saved.digests[key] != loaded.digests[key])
    prove(
        not differ,
        f"{len(differ)} of {len(saved.digests)} values differ from what was saved:"
        f" {first_few(differ, 3)}",
    )
    return f"state bit-identical: all {len(saved.digests)} SHA-256 digests agree"


def same_loss(saved: State, loaded: State) -> str:
    """Prove that the loss on the fixed batch, computed again, is the one that was recorded."""
    now = loaded.fixed_loss
    prove(
        now is not None and abs(saved.recorded_loss - now) <= _LOSS_TOLERANCE,
        f"the loss on the same batch was {saved.recorded_loss:.6f} when saved and is {now} after"
        " the load",
    )
    return (
        f"loss on the same batch: {saved.recorded_loss:.4f} when it was saved, {now:.4f} after the"
        " load"
    )


def from_the_node(loads: Sequence[FinishedLoad]) -> str:
    """Prove that ranks that have started again on their node read nothing from the bucket."""
    local_bytes = sum(load.local_bytes for load in loads)
    fetched_bytes = sum(load.total_bytes for load in loads) - local_bytes
    text = f"{size_text(local_bytes)} from its copies, {size_text(fetched_bytes)} from the bucket"
    prove(local_bytes > 0 and not fetched_bytes, f"the job that started again read {text}")
    return f"the job that starts again reads its bytes from this node: {text}"


def falling(before: State, after: State) -> str:
    """Prove that training went on from where it was."""
    losses = (
        f"{before.recorded_loss:.4f} at step {before.step},"
        f" {after.recorded_loss:.4f} at step {after.step}"
    )
    prove(after.recorded_loss < before.recorded_loss, f"the loss did not go on falling: {losses}")
    return f"loss goes on falling: {losses}"


def same_path(killed: Mapping[int, float], resumed: Mapping[int, float]) -> str:
    """Prove that the resumed run had the losses of the killed run, step by step.

    Args:
        killed: the killed run's loss by step, over the whole batch, which is the same for any
            number of ranks.
        resumed: the resumed run's loss by step.
    """
    steps = sorted(killed.keys() & resumed.keys())
    prove(bool(steps), "the resumed run trained none of the steps of the killed one")
    gap, step = max((abs(killed[step] - resumed[step]), step) for step in steps)
    prove(
        gap <= _PATH_TOLERANCE,
        f"the loss of step {step} was {killed[step]:.5f} before the kill and is"
        f" {resumed[step]:.5f} after the resume",
    )
    return (
        f"steps {steps[0]} to {steps[-1]} have the losses that they had before the kill, within"
        f" {gap:.0e}"
    )


def ranks_that_wrote(keys: Collection[str]) -> set[int]:
    """Return the ranks whose data objects are among these keys."""
    return {name.rank for key in keys if (name := parse_data_key(key)) is not None}


def torn(keys: Collection[str], ranks: int, held_key: str) -> str:
    """Prove that the objects of all ranks but one are there, and no marker."""
    prove(MARKER_KEY not in keys, "the save was committed although a rank had not finished it")
    prove(held_key not in keys, "the killed rank's object is complete: the kill came too late")
    done = len(ranks_that_wrote(keys))
    prove(done >= ranks - 1, f"only {done} of {ranks - 1} surviving ranks' objects are there")
    count = sum(parse_data_key(key) is not None for key in keys)
    return f"the torn save left {counted(count, 'data object')} and no {MARKER_KEY} marker"


def ended_cleanly(survivors: Sequence[Outcome]) -> str:
    """Prove that every surviving rank raised a `DcpObjstoreError` by itself."""
    others = [outcome for outcome in survivors if not isinstance(outcome.error, DcpObjstoreError)]
    prove(
        not others,
        f"{len(others)} of {counted(len(survivors), 'surviving rank')} ended without a typed"
        f" error: {', '.join(outcome.reason for outcome in others)}",
    )
    kinds = ", ".join(sorted({type(outcome.error).__name__ for outcome in survivors}))
    return f"typed error ({kinds}) on {len(survivors)} of {len(survivors)} surviving ranks"


def invisible(load: Outcome) -> str:
    """Prove that the load of the torn checkpoint has found none."""
    prove(load.failed, "the torn checkpoint was loaded")
    prove(
        isinstance(load.error, CheckpointNotFoundError),
        f"the load of the torn checkpoint failed otherwise: {load.reason}",
    )
    return f"so it does not exist: dos.load raises {type(load.error).__name__}"
