"""`CheckpointManager`: a run of checkpoints that looks after itself.

When to save, what to keep, where to resume and what to do when the machine is taken away; the saves
and loads themselves are those of `dcp`. Rank 0 alone lists and deletes; what it finds, and what
went wrong, is told to all ranks in a process group of our own.
"""

from __future__ import annotations

import functools
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from dcp_objstore.checkpoint.marker import check_user_metadata
from dcp_objstore.checkpoint.retention import RetentionPolicy, as_policy
from dcp_objstore.config import TransferConfig
from dcp_objstore.dcp import api, async_api, runs, taking_over, upkeep
from dcp_objstore.dcp.boundaries import Boundaries
from dcp_objstore.dcp.failures import attempt
from dcp_objstore.dcp.groups import current_rank
from dcp_objstore.dcp.report import LoadReport, SaveReport, logger
from dcp_objstore.dcp.retaining import Retainer, step_name, step_number
from dcp_objstore.dcp.run_values import check_step, intervals, user_metadata
from dcp_objstore.dcp.signals import CaughtSignals
from dcp_objstore.dcp.target import Target
from dcp_objstore.dcp.team import Team
from dcp_objstore.errors import (
    CheckpointExistsError,
    CheckpointGoneError,
    CheckpointNotFoundError,
    ConfigError,
    CorruptDataError,
    DcpObjstoreError,
    RankFailedError,
    SaveInProgressError,
)
from dcp_objstore.transfer.workers import spawn

if TYPE_CHECKING:
    from types import TracebackType

    import torch.distributed as dist

    from dcp_objstore.checkpoint.epoch import RunEpoch

Busy = Literal["wait", "skip", "raise"]

_PREEMPTED = "preempted"
_TIMER = "timer"
# As many are listed at first, and all only if none of these can be loaded.
_LOOKED_AT_FIRST = 4


@dataclass(frozen=True)
class SkippedStep:
    """A step that `load` could not load and went past.

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


@dataclass(frozen=True)
class _Pending:
    """A save in the background."""

    step: int
    handle: async_api.AsyncSaveHandle


class CheckpointManager:
    """The checkpoints `step-N` of a run, below one URL.

        with CheckpointManager(url, keep=[KeepLatest(3), KeepEvery(5000)], save_every=500) as run:
            start = run.load(state) or 0
            for step in range(start + 1, steps + 1):
                train(state)
                run.step(step, state)
                if run.preempted():
                    break

    Every rank makes one with the same arguments, and calls its methods in the same order with the
    same steps. Collectives, which all ranks must call: `load`, `save`, `async_save`, `latest`,
    `steps`, `pin`, `unpin`, `close`, entering the block and leaving it without an error. `step` is
    to be called by all ranks too, at each step boundary; between saves it communicates nothing.
    `preempted` is local.

    Leaving the block waits for the save that is under way, and raises its error. After an error in
    the body, Ctrl-C for one, the save is waited for as well, on this rank alone; what goes wrong
    with it then is noted on the body's error, which is raised. A second Ctrl-C ends the waiting;
    the program still does not end before the save has.

    Args:
        url: the run.
        keep: which steps are kept: a policy, or several, of which any may keep a step. Others are
            deleted, in the background and only after a newer one is durable; never the newest, a
            pinned one, or the one that this job resumed from. Default: all are kept.
        save_every: `step` saves where the number of the step is a multiple of this (or the first
            one after it); or, as a `timedelta`, when so much time has passed since the last save.
        save_every_seconds: the same as a number. May be given beside a number of steps.
        metadata: small JSON values for the marker of each checkpoint, which `ls` shows.
        busy: what `step` and `async_save` do while a save is under way: "wait" for it (default),
            "skip" this one, or "raise" SaveInProgressError. All ranks do the same.
        save_on_preemption: `step` saves, and waits for the commit, where the ranks agree that the
            job is to end. Default True.
        preemption_signals: which ask for that. Caught from entering the block until leaving it,
            or `close`, if this is the main thread. Default: SIGTERM.
        preemption_check: called in a thread of its own a few times a second, and returns whether
            the job is to end; for machines that announce it otherwise.
        take_over: with the first `load` or save, make this job the only one that adds to the run;
            see `dcp_objstore.take_over`. Default True; pass False to look at a run that another
            job is writing, or where the store has no conditional writes (`allow_unfenced`).
        delete_now: remove the objects of steps that are not kept at once. Default False: they do
            not count any more, and `sweep` removes them after its grace period, so that readers
            are not disturbed.
        storage_options, config, allow_unfenced, process_group: see `dcp_objstore.save`.
        verify, trust_pickle: see `dcp_objstore.load`.

    Attributes:
        last_resume: a `ResumeReport` of the last `load`, or None.

    Raises:
        InvalidUrlError, ConfigError: wrong arguments.
    """

    def __init__(
        self,
        url: str,
        *,
        keep: RetentionPolicy | Iterable[RetentionPolicy] | None = None,
        save_every: int | timedelta | None = None,
        save_every_seconds: float | None = None,
        metadata: Mapping[str, object] | None = None,
        busy: Busy = "wait",
        save_on_preemption: bool = True,
        preemption_signals: Sequence[signal.Signals] = (signal.SIGTERM,),
        preemption_check: Callable[[], bool] | None = None,
        take_over: bool = True,
        delete_now: bool = False,
        storage_options: Mapping[str, object] | None = None,
        config: TransferConfig | None = None,
        allow_unfenced: bool = False,
        process_group: dist.ProcessGroup | None = None,
        verify: Literal["strict", "off"] = "strict",
        trust_pickle: bool = False,
    ) -> None:
        self._url = Target(url, storage_options, config).spec.url.rstrip("/")
        self._every, self._every_seconds = intervals(save_every, save_every_seconds)
        if busy not in ("wait", "skip", "raise"):
            raise ConfigError(f"busy must be 'wait', 'skip' or 'raise', got {busy!r}")
        self._busy = busy
        self._metadata = check_user_metadata(metadata)
        self._save_on_preemption = save_on_preemption
        self._signals = CaughtSignals(preemption_signals)
        self._check = preemption_check
        self._check_failed = False  # warned of it
        self._takes_over = take_over
        self._group_given = process_group
        self._config = config
        self._access: dict[str, Any] = {"storage_options": storage_options, "config": config}
        self._saving = {**self._access, "allow_unfenced": allow_unfenced}
        self._loading = {**self._access, "verify": verify, "trust_pickle": trust_pickle}
        self._retainer = Retainer(self._url, as_policy(keep), now=delete_now, **self._access)
        self._epoch: RunEpoch | None = None
        self._boundaries: Boundaries | None = None
        self._team: Team
        self._pending: _Pending | None = None
        self._retention: threading.Thread | None = None
        self._closed = False
        self._loaded = False  # `load` was called, so later steps are this job's to replace
        self._resumed: int | None = None
        self._saved: set[int] = set()
        self._last_step: int | None = None
        self._last_save_at = time.monotonic()
        self._preempted = False
        self.last_resume: ResumeReport | None = None

    def __repr__(self) -> str:
        return f"CheckpointManager({self._url!r})"

    @property
    def url(self) -> str:
        """The run, in the normal form of its URL."""
        return self._url

    # --- the block

    def __enter__(self) -> CheckpointManager:
        """Begin to watch for signals. A collective."""
        self._begin()
        self._signals_on()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """As `close`; after an error in the body not a collective, and that error is raised."""
        if error is None:
            self.close()
        else:
            self._abandon(error)

    def close(self) -> None:
        """Wait for the save under way and for deletions; the run is not used after that.

        A collective. Calling it again does nothing.

        Raises:
            DcpObjstoreError: as `dcp_objstore.save`, where the save under way has failed.
        """
        if self._closed:
            return
        self._closed = True
        try:
            self._settle()
            if self._retention is not None:
                self._retention.join()
        finally:
            self._stop_watching()

    def _abandon(self, error: BaseException) -> None:
        """Wait for the save under way, without the other ranks, which may be anywhere."""
        if self._closed:
            return
        self._closed = True
        self._stop_watching()
        pending, self._pending = self._pending, None
        if pending is None:
            return
        failed = pending.handle.exception()
        if failed is not None:
            note = f"{pending.handle.url} was being saved then, and that failed too: {failed}"
            logger.error("%s", note)
            error.add_note(note)

    def _begin(self) -> None:
        """Once: the group, and what the ranks need to agree on a boundary. A collective."""
        if self._closed:
            raise ConfigError("this CheckpointManager was closed; make another one", url=self._url)
        if self._boundaries is not None:
            return
        self._team = Team(self._url, self._group_given, self._config)
        self._boundaries = Boundaries(
            self._ask,
            store=self._team.shared_store(),
            rank=self._team.rank,
            world_size=self._team.world_size,
            peer_timeout_seconds=(self._config or TransferConfig()).peer_timeout_seconds,
        )
        self._boundaries.start()

    def _signals_on(self) -> None:
        if threading.current_thread() is threading.main_thread():
            self._signals.install()
        elif self._check is None:
            logger.warning(
                "%s: signals are only caught in the main thread, and there is no"
                " preemption_check, so this run does not see that its job is to end",
                self._url,
            )

    def _stop_watching(self) -> None:
        self._signals.restore()
        if self._boundaries is not None:
            self._boundaries.close()

    # --- saving

    def step(
        self,
        step: int,
        state: Mapping[str, Any],
        metrics: Mapping[str, object] | None = None,
        *,
        metadata: Mapping[str, object] | None = None,
    ) -> bool:
        """A step has ended: save, if it is time to. Called by every rank at every step boundary.

        Saves in the background; where the ranks have agreed that the job is to end, it waits for
        the commit. A step that this job has saved, or resumed from, is not saved again.

        Args:
            step: number of the step, from 0; higher than in the call before.
            state: as for `dcp_objstore.save`; only looked at when it is saved.
            metrics: numbers for the marker, by which `KeepBest` ranks; those of rank 0 count.
            metadata: more JSON values for the marker.

        Returns:
            Whether a save was begun, or made; the same on every rank.

        Raises:
            As `async_save` and `save`. Of the save before: its error, at the next save.
        """
        self._begin()
        assert self._boundaries is not None
        due = self._is_due(step)
        reasons = self._boundaries.reached()
        known = step in self._saved or step == self._resumed
        if _PREEMPTED in reasons:
            self._preempted = True
            logger.warning("%s: this job is to end; step %d is the last one", self._url, step)
            if self._save_on_preemption:
                return self._save_last(step, state, metrics, metadata)
        if known or not (due or _TIMER in reasons):
            return False
        return self.async_save(step, state, metrics=metrics, metadata=metadata) is not None

    def _save_last(
        self,
        step: int,
        state: Mapping[str, Any],
        metrics: Mapping[str, object] | None,
        metadata: Mapping[str, object] | None,
    ) -> bool:
        try:
            self._settle()
        except DcpObjstoreError as error:
            # The state at hand is worth more than the error, and may be saved all the same.
            logger.error("%s: an earlier save failed: %s", self._url, error)
            self._saved.discard(step)
        if step in self._saved or step == self._resumed:
            return False
        self.save(step, state, metrics=metrics, metadata=metadata)
        return True

    def preempted(self) -> bool:
        """Whether the job is to end now. Local; the same on all ranks between two steps.

        True from the `step` on at which the ranks agreed on it, which has saved (with
        `save_on_preemption`). A signal alone does not make it true: the ranks agree within about a
        second, on one of their next steps.
        """
        return self._preempted

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        *,
        metrics: Mapping[str, object] | None = None,
        metadata: Mapping[str, object] | None = None,
    ) -> SaveReport:
        """Save a step and wait for its commit. A collective.

        Waits for a save under way first.

        Args:
            step, state, metrics, metadata: see `step`.

        Raises:
            CheckpointExistsError: this job has saved that step, or there is one already. (After
                `load`, steps later than the one loaded are replaced: this job does them again.)
            DcpObjstoreError: see `dcp_objstore.save`; or the save before has failed.
        """
        prepared = self._prepare(step, metrics, metadata, busy="wait")
        assert prepared is not None  # only `busy="skip"` skips
        url, keywords = prepared
        self._last_save_at = time.monotonic()
        report = api.save(state, url, **keywords)
        self._saved.add(step)
        self._retain(step, keywords, None)
        return report

    def async_save(
        self,
        step: int,
        state: Mapping[str, Any],
        *,
        metrics: Mapping[str, object] | None = None,
        metadata: Mapping[str, object] | None = None,
        busy: Busy | None = None,
    ) -> async_api.AsyncSaveHandle | None:
        """Copy the state, and save the copy in the background. A collective.

        Args:
            step, state, metrics, metadata: see `step`.
            busy: while a save is under way; default: that of the run.

        Returns:
            The save; None: one was under way, and this one was skipped.

        Raises:
            As `save`. The error of this one is raised by the next call that saves, or by `close`.
            SaveInProgressError: one is under way on some rank, and `busy` is "raise".
        """
        prepared = self._prepare(step, metrics, metadata, busy=busy or self._busy)
        if prepared is None:
            return None
        url, keywords = prepared
        self._last_save_at = time.monotonic()
        handle = async_api.async_save(state, url, **keywords)
        self._saved.add(step)
        self._pending = _Pending(step, handle)
        self._retain(step, keywords, handle)
        return handle

    def _retain(
        self, step: int, saved: Mapping[str, Any], handle: async_api.AsyncSaveHandle | None
    ) -> None:
        """On rank 0, in a thread: once the step is committed, delete what is not kept."""
        if not self._team.is_first:
            return
        metrics = saved["user_metadata"].get("metrics", {})
        before = self._retention

        def follow() -> None:
            if before is not None:
                before.join()
            # Only looks at the outcome: an error is raised by the next call that saves.
            if handle is None or handle.exception() is None:
                self._retainer.committed(step, metrics)

        # A daemon thread: a deletion that is not begun, or ended, does no harm.
        self._retention = spawn(follow, "retention")

    def _prepare(
        self,
        step: int,
        metrics: Mapping[str, object] | None,
        metadata: Mapping[str, object] | None,
        *,
        busy: Busy,
    ) -> tuple[str, dict[str, Any]] | None:
        """Wait for the turn to save, and give what to save where; None: skip it."""
        self._begin()

        def make() -> dict[str, Any]:
            self._check_step(step)
            if busy not in ("wait", "skip", "raise"):
                raise ConfigError(f"busy must be 'wait', 'skip' or 'raise', got {busy!r}")
            return user_metadata(step, self._metadata, metadata, metrics)

        described, refused = attempt(make)
        self._team.agree(refused)
        if busy != "wait" and self._team.any(
            self._pending is not None and not self._pending.handle.done()
        ):
            if busy == "raise":
                assert self._pending is not None
                raise SaveInProgressError(
                    f"step {self._pending.step} is still being saved", url=self._pending.handle.url
                )
            logger.info("%s: step %d is not saved, a save is under way", self._url, step)
            return None
        self._settle()
        self._own_run()
        # What this job does again since it went back to an earlier step, it may replace.
        again = self._loaded and (self._resumed is None or step > self._resumed)
        return self._step_url(step), {
            **self._saving,
            "overwrite": again,
            "user_metadata": described,
            "process_group": self._group_given,
            "epoch": self._epoch,
            "progress": False,
        }

    def _check_step(self, step: object) -> None:
        check_step(step)
        if step in self._saved:
            raise CheckpointExistsError(f"this job has saved step {step} already", url=self._url)

    def _settle(self) -> None:
        """Wait for the save before; raise its error on all ranks if it failed on any."""
        pending, failed = self._pending, None
        if pending is not None:
            error = pending.handle.exception()
            if error is not None:
                self._saved.discard(pending.step)
                failed = (
                    error
                    if isinstance(error, DcpObjstoreError)
                    else RankFailedError(f"{type(error).__name__}: {error}", current_rank())
                )
            self._pending = None
            self._team.agree(failed.at(url=pending.handle.url) if failed is not None else None)

    def _own_run(self) -> None:
        """Once, before anything is loaded or saved: become the run's only job. A collective."""
        if self._takes_over and self._epoch is None:
            self._epoch = self._retainer.epoch = taking_over.take_over(
                self._url, process_group=self._group_given, **self._access
            )

    def _is_due(self, step: int) -> bool:
        """Whether a multiple of `save_every` lies in what was done since the call before."""
        check_step(step)
        before, self._last_step = self._last_step, step
        if self._every is None:
            return False
        if before is None:
            before = self._resumed if self._resumed is not None else step - 1
        return step // self._every > max(before, 0) // self._every

    def _ask(self) -> frozenset[str]:
        """What this rank wants to be agreed on. In the thread of the boundaries."""
        wanted = set()
        if not self._preempted and (self._signals.came or self._is_announced()):
            wanted.add(_PREEMPTED)
        seconds = time.monotonic() - self._last_save_at
        if (
            self._every_seconds is not None
            and self._team.is_first
            and seconds >= self._every_seconds
        ):
            wanted.add(_TIMER)
        return frozenset(wanted)

    def _is_announced(self) -> bool:
        if self._check is None:
            return False
        try:
            return bool(self._check())
        except Exception as error:  # noqa: BLE001 - the user's own; training goes on
            if not self._check_failed:
                logger.warning("%s: the preemption_check failed: %r", self._url, error)
            self._check_failed = True
            return False

    # --- loading

    def load(self, state: MutableMapping[str, Any], step: int | None = None) -> int | None:
        """Load a step into a state, in place. A collective; call it before training.

        Without `step` it loads the newest committed one. Where that is damaged, or goes away while
        it is read, the next older one is loaded instead, with a warning; `last_resume` says which
        were gone past. The steps later than the one loaded are this job's to save again.

        Args:
            state: see `dcp_objstore.load`.
            step: load this one, or raise. Default: the newest that can be loaded.

        Returns:
            The number of the step; None: the run has no committed step, and the state is as it was.

        Raises:
            CorruptDataError: there are steps, and all are damaged; the error of the newest.
            CheckpointNotFoundError: `step` was given, and is not committed.
            DcpObjstoreError: see `dcp_objstore.load`; what is not damage is raised at once.
        """
        self._begin()
        self._settle()
        self._own_run()
        if step is not None:
            check_step(step)
            report = self._load_one(state, step)
            self._resume(ResumeReport(step, report))
            return step
        skipped: list[SkippedStep] = []
        for newest in (_LOOKED_AT_FIRST, None):
            tried = {one.step for one in skipped}
            for number in reversed(self._team.on_first(functools.partial(self._list, newest))):
                if number in tried:
                    continue
                try:
                    report = self._load_one(state, number)
                except (CorruptDataError, CheckpointGoneError, CheckpointNotFoundError) as error:
                    skipped.append(SkippedStep(number, error))
                    if self._team.is_first:
                        logger.warning(
                            "%s: step %d cannot be loaded, trying the one before: %s",
                            self._url,
                            number,
                            error,
                        )
                else:
                    self._resume(ResumeReport(number, report, tuple(skipped)))
                    return number
        if any(isinstance(one.error, CorruptDataError) for one in skipped):
            raise skipped[0].error
        self._resume(ResumeReport(None, None, tuple(skipped)))
        return None

    def _load_one(self, state: MutableMapping[str, Any], step: int) -> LoadReport:
        return api.load(
            state,
            self._step_url(step),
            progress=False,
            process_group=self._group_given,
            **self._loading,
        )

    def _resume(self, report: ResumeReport) -> None:
        self._loaded = True
        self._resumed = self._retainer.resumed = report.step
        self._last_step = report.step
        self._last_save_at = time.monotonic()
        self.last_resume = report

    # --- the run

    def latest(self) -> int | None:
        """The newest committed step, or None. A collective; rank 0 makes the requests.

        Three requests, and one more for each 1,000 objects of the run; and one for each deleted or
        unfinished step that is newer.
        """
        self._begin()
        found = self._team.on_first(lambda: self._list(1))
        return found[-1] if found else None

    def steps(self) -> tuple[int, ...]:
        """The committed steps, the newest last. A collective; rank 0 makes the requests.

        Two requests, one for each 1,000 objects of the run, and one for each step.
        """
        self._begin()
        return self._team.on_first(lambda: self._list(None))

    def _list(self, newest: int | None) -> tuple[int, ...]:
        found = runs.steps(self._url, newest=newest, **self._access)
        numbers = sorted(number for one in found if (number := step_number(one.name)) is not None)
        if newest is not None and len(found) == newest and len(numbers) < newest:
            return self._list(None)[-newest:]  # other names came in between
        return tuple(numbers)

    def pin(self, step: int, name: str = "pinned") -> None:
        """Protect a step from deletion and overwriting, under a name. A collective.

        Raises:
            CheckpointNotFoundError: that step is not committed.
            DcpObjstoreError: see `dcp_objstore.pin`.
        """
        self._change_pins(step, lambda: upkeep.pin(self._step_url(step), name, **self._access))

    def unpin(self, step: int, name: str = "pinned") -> None:
        """Remove a pin; one that is not there is no error. Otherwise as `pin`. A collective."""
        self._change_pins(step, lambda: upkeep.unpin(self._step_url(step), name, **self._access))

    def _change_pins(self, step: int, change: Callable[[], tuple[str, ...]]) -> None:
        self._begin()
        left = self._team.on_first(change)
        self._retainer.set_pinned(step, pinned=bool(left))

    def _step_url(self, step: int) -> str:
        return f"{self._url}/{step_name(step)}"


__all__ = ["CheckpointManager", "ResumeReport", "SkippedStep"]
