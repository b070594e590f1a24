"""Resume: load the newest step of a run that can be loaded. It knows nothing of a manager."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch.distributed as dist

from dcp_objstore.distributed.failures import on_first
from dcp_objstore.distributed.groups import is_first
from dcp_objstore.errors import (
    CheckpointGoneError,
    CheckpointNotFoundError,
    CorruptDataError,
    DcpObjstoreError,
    RetryableError,
    one_line,
    printable,
)
from dcp_objstore.inspect.verify import verify_at
from dcp_objstore.observe.dispatch import EventSettings
from dcp_objstore.observe.report import LoadReport, logger
from dcp_objstore.run.steps import step_numbers, step_url
from dcp_objstore.stores import StoreSpec

# The number of steps that are listed first; all are listed only if none of these can be loaded.
_LOOKED_AT_FIRST = 4


@dataclass(frozen=True)
class SkippedStep:
    """A step that was skipped because it could not be loaded.

    Attributes:
        step: number of the step.
        error: why it could not be loaded.
    """

    step: int
    error: DcpObjstoreError


@dataclass(frozen=True)
class ResumeReport:
    """The result of `CheckpointManager.load`.

    Attributes:
        step: number of the step that was loaded; None if the run has no committed step.
        load: the report of the load, or None.
        skipped: newer steps that could not be loaded, the newest first.
    """

    step: int | None
    load: LoadReport | None = None
    skipped: tuple[SkippedStep, ...] = ()

    def __str__(self) -> str:
        """Return which step was loaded, how, and why newer ones were not, on a few lines."""
        lines = ["there is no committed step" if self.step is None else f"step {self.step}"]
        lines += [f"step {one.step} was skipped: {one_line(one.error)}" for one in self.skipped]
        text = "\n".join(map(printable, lines))
        return text if self.load is None else f"{text}\n{self.load}"


def load_newest(
    run: StoreSpec,
    group: dist.ProcessGroup | None,
    load: Callable[[int], LoadReport],
) -> ResumeReport:
    """Load the newest step that is whole. A collective.

    A step is skipped only if a verification finds, too, that it is damaged or gone. For a job that
    goes on from an older step makes the newer ones stop counting.

    Args:
        run: the run.
        group: the ranks that load; None if this process is alone.
        load: a function that loads the step with this number into the state.

    Raises:
        CorruptDataError: there are steps, but none can be loaded; this is the error of the newest.
            The state may be partly filled, so training must not start from it.
        RetryableError: a load met what the verification does not find.
        CheckpointGoneError: the last step of the run was deleted while it was loaded. The state
            may be partly filled then, too.
        DcpObjstoreError: any error other than damage; raised at once.
    """
    skipped: list[SkippedStep] = []
    url = run.url
    most: int | None = _LOOKED_AT_FIRST  # how many steps to list; None: all
    # Until all steps are listed and all were tried: new ones may have been saved meanwhile.
    while True:
        tried = {skip.step for skip in skipped}
        listed = on_first(partial(step_numbers, run, most, with_damaged=True), url, group)
        untried = [step for step in listed if step not in tried]
        # A list that is shorter than it may be has all steps.
        if not untried and (most is None or len(listed) < most):
            break
        most = None
        for step in reversed(untried):
            try:
                return ResumeReport(step, load(step), tuple(skipped))
            except (CorruptDataError, CheckpointGoneError, CheckpointNotFoundError) as error:
                spec = run.at(step_url(url, step))
                if not on_first(partial(_is_lost, spec, error.key), url, group):
                    raise RetryableError(
                        f"{error.message}; yet a verification finds this step whole",
                        advice="load again; if that fails, too, pass the number of a step",
                        key=error.key,
                        object_key=error.object_key,
                        url=spec.url,
                    ) from error
                skipped.append(SkippedStep(step, error))
                if is_first(group):
                    logger.warning(
                        "%s: step %d cannot be loaded, trying an older one: %s",
                        run.url,
                        step,
                        error,
                    )
    # After these errors, the state may be partly filled. Steps that were not found, the only ones
    # that remain, were not begun to be loaded, so the state is unchanged.
    for kind in (CorruptDataError, CheckpointGoneError):
        for skip in skipped:
            if isinstance(skip.error, kind):
                raise skip.error
    return ResumeReport(None, None, tuple(skipped))


def _is_lost(step: StoreSpec, key: str | None) -> bool:
    """Whether a step is damaged or gone, according to a verification.

    Args:
        key: the only key whose payload is read; None for that of all keys.
    """
    verify = partial(verify_at, step, EventSettings(None, None), deep=False, progress=False)
    try:
        # First what takes few requests, then the payload.
        is_whole = verify(quick=True).ok and verify(quick=False, only_key=key).ok
    except (CheckpointGoneError, CheckpointNotFoundError):
        return True
    return not is_whole
