"""Where a job resumes: the newest step of its run that can be loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from dcp_objstore.distributed.team import Team
from dcp_objstore.errors import (
    CheckpointGoneError,
    CheckpointNotFoundError,
    CorruptDataError,
    DcpObjstoreError,
)
from dcp_objstore.observe.report import LoadReport, logger

# As many are listed at first, and all only if none of these can be loaded.
_LOOKED_AT_FIRST = 4


@dataclass(frozen=True)
class SkippedStep:
    """A step that could not be loaded and was gone past.

    Attributes:
        step: its number.
        error: why.
    """

    step: int
    error: DcpObjstoreError


@dataclass(frozen=True)
class ResumeReport:
    """What `CheckpointManager.load` did.

    Attributes:
        step: that was loaded; None: the run has no committed step.
        load: the report of loading it.
        skipped: newer steps that could not be loaded, the newest first.
    """

    step: int | None
    load: LoadReport | None = None
    skipped: tuple[SkippedStep, ...] = ()


def load_newest(
    url: str,
    team: Team,
    numbers: Callable[[int | None], tuple[int, ...]],
    load: Callable[[int], LoadReport],
) -> ResumeReport:
    """Load the newest step that is whole. A collective.

    Args:
        url: the run, for the log.
        team: the ranks.
        numbers: lists so many of the newest committed steps, or all (None), the newest last.
            Called on rank 0.
        load: loads a step, on all ranks.

    Raises:
        CorruptDataError: there are steps, and none can be loaded; the error of the newest. The
            state may be partly filled, so this is no beginning.
        DcpObjstoreError: any error that is not damage, at once.
    """
    skipped: list[SkippedStep] = []
    for newest in (_LOOKED_AT_FIRST, None):
        tried = {one.step for one in skipped}
        listed = team.on_first(partial(numbers, newest))
        for step in reversed([step for step in listed if step not in tried]):
            try:
                return ResumeReport(step, load(step), tuple(skipped))
            except (CorruptDataError, CheckpointGoneError, CheckpointNotFoundError) as error:
                skipped.append(SkippedStep(step, error))
                if team.is_first:
                    logger.warning(
                        "%s: step %d cannot be loaded, trying the one before: %s", url, step, error
                    )
        if len(listed) < _LOOKED_AT_FIRST:
            break
    damaged = next((one for one in skipped if isinstance(one.error, CorruptDataError)), None)
    if damaged is not None:
        raise damaged.error
    return ResumeReport(None, None, tuple(skipped))
