"""Runs the checks in a thread, so that whoever waits can leave at any time; they clean up then.

Each check is made whatever became of the one before it, unless that leaves nothing to ask: then
it says so. Checks of one right after the other tell which one is missing.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Generator, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TYPE_CHECKING

from dcp_objstore.config import TransferConfig
from dcp_objstore.doctor.findings import Finding
from dcp_objstore.doctor.objects import ObjectChecks
from dcp_objstore.doctor.scratch import Scratch, Stop, StoppedError
from dcp_objstore.doctor.surroundings import Surroundings, versions
from dcp_objstore.stores.spec import StoreSpec
from dcp_objstore.transfer.workers import run_into, spawn
from dcp_objstore.waiting import take

if TYPE_CHECKING:
    from collections.abc import Mapping

_log = logging.getLogger("dcp_objstore")

# A diagnosis has less patience than a save: a wrong endpoint is told in seconds.
CONFIG = TransferConfig(
    connect_timeout_seconds=5,
    request_timeout_seconds=30,
    stall_timeout_seconds=30,
    max_retries=1,
    retry_timeout_seconds=5,
)
_CLEAN_UP_SECONDS = 30.0
_OBJECT_CHECKS = (
    "put",
    "list",
    "read",
    "multipart",
    "checksums",
    "abort",
    "conditional put",
    "delete",
    "lifecycle",
    "versioning",
    "unfinished uploads",
    "clean-up",
)


def check_up(
    url: str,
    storage_options: Mapping[str, object] | None = None,
    *,
    config: TransferConfig = CONFIG,
) -> Generator[Finding, None, None]:
    """Check a store, as a stream of findings in a fixed order.

    What is written lies under a random name below the URL and is removed at the end, also when the
    generator is closed early; nothing else is changed.

    Args:
        url: what checkpoints are to lie below.
        storage_options: as everywhere.
        config: time-outs and retries.

    Raises:
        InvalidUrlError, ConfigError: the URL or the options are wrong in themselves.
    """
    spec = StoreSpec(url, storage_options, config)
    found: queue.SimpleQueue[Finding | None] = queue.SimpleQueue()
    stop = Stop()
    done: Future[None] = Future()

    def work() -> None:
        try:
            for finding in _checks(spec, stop):
                found.put(finding)
        finally:
            found.put(None)

    spawn(lambda: run_into(done, work), "check-up")
    try:
        while (finding := take(found)) is not None:
            yield finding
        done.result()
    finally:
        stop.set()
        try:
            done.exception(timeout=_CLEAN_UP_SECONDS)
        except FutureTimeoutError:
            _log.warning("a request does not end; objects .doctor-* may stay below %s", spec.url)


def _checks(spec: StoreSpec, stop: Stop) -> Iterator[Finding]:
    yield versions(spec)
    around = Surroundings(spec)
    yield from around.access()
    stop.check()
    if around.blocked is not None:
        for check in _OBJECT_CHECKS:
            yield Finding(check, "not made", around.blocked)
        return
    scratch = Scratch(spec)
    try:
        objects = ObjectChecks(spec, scratch, stop)
        yield from objects.all()
        stop.check()
        yield from around.rules(scratch.around)
    except BaseException:
        left = scratch.remove()
        if left.keys:
            _log.warning("%s could not be removed: %s", ", ".join(left.keys), left.why)
        raise
    yield _clean_up(scratch)


def _clean_up(scratch: Scratch) -> Finding:
    left = scratch.remove()
    if not left.keys:
        return Finding("clean-up", "ok", "nothing is left of these checks")
    return Finding(
        "clean-up",
        "failed",
        f"{len(left.keys)} of our objects could not be removed: {left.why}",
        f"remove everything below {scratch.name}",
        {"url": scratch.name, "keys": list(left.keys)},
    )


# `StoppedError` never leaves the thread but through `done`, where nobody waits for it any more.
__all__ = ["CONFIG", "StoppedError", "check_up"]
