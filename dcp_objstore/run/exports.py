"""`RunExports`: exports of a run's steps, which no retention deletes meanwhile.

They stand apart from the saves of the manager, because a save may begin while an export runs.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING

from dcp_objstore.distributed.failures import capture, raise_on_all
from dcp_objstore.errors import InputError
from dcp_objstore.observe.report import logger
from dcp_objstore.threads import spawn
from dcp_objstore.transfer.workers import run_into
from dcp_objstore.waiting import result_of, wait_until

if TYPE_CHECKING:
    import torch.distributed as dist

    from dcp_objstore.convert.export import ExportReport
    from dcp_objstore.run.housekeeping import Retainer
    from dcp_objstore.write.async_save import AsyncSaveHandle


class RunExports:
    """The exports of this job. All ranks call its methods, except those marked "Local".

    Args:
        url: the run.
        retainer: what deletes steps of the run.
    """

    def __init__(self, url: str, retainer: Retainer) -> None:
        self._url = url
        self._retainer = retainer
        self._pending: Future[ExportReport] | None = None

    def prepare(
        self,
        step: int,
        save: AsyncSaveHandle | None,
        export: Callable[[], ExportReport],
        group: dist.ProcessGroup | None,
    ) -> Callable[[], ExportReport]:
        """Return a function that exports a step; until it has returned, the step is not deleted.

        Args:
            step: number of the step.
            save: its save, if that is under way; it is waited for.
            export: exports it, with the ranks of the group.
            group: the ranks; None if this process is alone.
        """
        self._retainer.hold(step)

        def run() -> ExportReport:
            try:
                _, failed = capture(partial(self._wait, step, save))
                raise_on_all(failed, self._url, group)
                return export()
            finally:
                self._retainer.release(step)

        return run

    def _wait(self, step: int, save: AsyncSaveHandle | None) -> None:
        """Wait for deletions that were planned before the step was held, and for its save."""
        self._retainer.settle()
        if save is not None:
            # `exception` would mark the error as seen, so that nothing reports it.
            wait_until(save._ended)
            if save._error is not None:
                raise InputError(f"step {step} is not exported: it was not saved", url=save.url)

    def begin(self, run: Callable[[], ExportReport]) -> Future[ExportReport]:
        """Run what `prepare` has returned in the background, when the one before is settled."""
        pending: Future[ExportReport] = Future()
        self._pending = pending
        pending.set_running_or_notify_cancel()  # an export cannot be cancelled
        spawn(partial(run_into, pending, run), "export")
        return pending

    def settle(self, group: dist.ProcessGroup | None) -> None:
        """Wait for the export under way; raise its error on all ranks if it failed on any."""
        pending, self._pending = self._pending, None
        if pending is not None:
            _, failed = capture(partial(result_of, pending))
            raise_on_all(failed, self._url, group)

    def abandon(self, error: BaseException) -> None:
        """Wait for the export under way on this rank alone. Local.

        If it fails, the error that ends the job gets a note.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            result_of(pending)
        except Exception as failed:  # noqa: BLE001 - it must not hide the error of the job
            note = f"a step of {self._url} was being exported then, and that failed, too: {failed}"
            logger.error("%s", note)
            error.add_note(note)
