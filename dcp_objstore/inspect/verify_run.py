"""`verify_run`: verify the steps of a run, the newest first. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from dcp_objstore.checkpoint.catalogue import list_run
from dcp_objstore.checkpoint.names import natural_order
from dcp_objstore.errors import CheckpointGoneError, CheckpointNotFoundError
from dcp_objstore.inspect.verify import VerifyReport, check_depth, verify_at
from dcp_objstore.observe.dispatch import EventSettings
from dcp_objstore.stores import StoreSpec
from dcp_objstore.transfer.workers import wait_for

if TYPE_CHECKING:
    import os

    from dcp_objstore.config import TransferConfig
    from dcp_objstore.observe.events import OnEvent


def verify_run(
    url: str,
    *,
    quick: bool = False,
    deep: bool = False,
    before: str | None = None,
    storage_options: Mapping[str, object] | None = None,
    config: TransferConfig | None = None,
    progress: bool = True,
    on_event: OnEvent | None = None,
    trace: str | os.PathLike[str] | None = None,
) -> Iterator[VerifyReport]:
    """Verify the committed steps of a run that count, one after the other, the newest first.

    The steps are listed at once, and each is read when its report is asked for. So this reads no
    more than is needed to find the newest whole step:

        next((report.url for report in dos.verify_run(url, deep=True) if report.ok), None)

    A step that is deleted meanwhile is left out. One process calls it.

    Args:
        url: URL of the run; its steps are the checkpoints directly below.
        quick: whether to read no tensors and check only that all objects exist, with their sizes.
            Default False.
        deep: whether to compare what `Checkpoint.verify(deep=True)` compares. Default False.
        before: the name of a step, such as "step-3000". Only older steps are verified, to go on
            where an earlier verification ended. Default: all.
        storage_options: credentials and endpoint in fsspec's spelling. Default: taken from the
            environment.
        config: sizes, concurrency, time-outs and the memory budget.
        progress: show a progress bar for each step if standard error is a terminal. Default True.
        on_event: callable that receives each event, in a thread of its own. `ObjectStoreWriter`
            describes how it is called.
        trace: name of a local file to write a trace of each verification to. `ObjectStoreWriter`
            describes how the file is named.

    Returns:
        An iterator of the reports. Damage of every kind is reported, also a marker that cannot be
        read.

    Raises:
        CheckpointNotFoundError: the run has no such step.
        ConfigError: `quick` and `deep` contradict each other, or another argument is wrong.
        CheckpointCorruptError: the run's `_CLAIM` is damaged.
        UnsupportedError: a newer version wrote the run.
        StoreUnavailableError: the store did not answer, after all retries.
        PermissionDeniedError: the credentials do not allow the request.
    """
    check_depth(quick=quick, deep=deep)
    spec = StoreSpec(url, storage_options, config)
    event_settings = EventSettings(on_event, trace)
    listed = wait_for(list_run, spec.open(), spec.open_child, with_damaged=True)
    names = [step.name for step in reversed(listed.steps)]
    if before is not None:
        names = [name for name in names if natural_order(name) < natural_order(before)]
    if not names:
        older = "" if before is None else f" older than {before}"
        raise CheckpointNotFoundError(f"no committed step{older} lies below", url=spec.url)

    def reports() -> Iterator[VerifyReport]:
        for name in names:
            with suppress(CheckpointGoneError, CheckpointNotFoundError):
                at = spec.child(name)
                yield verify_at(at, event_settings, quick=quick, deep=deep, progress=progress)

    return reports()
