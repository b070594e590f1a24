"""Run the checks in a thread, so that the caller can stop at any time; the thread then cleans up.

Each check is made whatever the result of the one before it. If a check has nothing left to ask, it
says so. The checks try one right at a time, so the results show which right is missing.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Generator, Iterator
from concurrent.futures import Future, TimeoutError as FutureTimeoutError
from typing import TYPE_CHECKING

from dcp_objstore.config import TransferConfig
from dcp_objstore.doctor.findings import Finding
from dcp_objstore.doctor.objects import ObjectChecks
from dcp_objstore.doctor.scratch import Scratch, Stop
from dcp_objstore.doctor.surroundings import Surroundings, versions
from dcp_objstore.stores.spec import StoreSpec
from dcp_objstore.threads import spawn
from dcp_objstore.transfer.workers import run_into
from dcp_objstore.waiting import take

if TYPE_CHECKING:
    from collections.abc import Mapping

_log = logging.getLogger("dcp_objstore")

# Time-outs are shorter than for a save, so that a wrong endpoint is reported within seconds.
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
    """Check a store, and yield the findings in a fixed order.

    Objects are written under a random name below the URL and removed at the end, even if the
    generator is closed early. Nothing else is changed.

    Args:
        url: URL below which checkpoints will lie.
        storage_options: credentials and endpoint in fsspec's spelling. Default: taken from the
            environment.
        config: time-outs and retries.

    Yields:
        One finding for each check.

    Raises:
        InvalidUrlError: the URL has a form that cannot be used.
        ConfigError: an option has a wrong type or value.
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
            _log.warning(
                "a request does not end, so objects .doctor-* may remain below %s", spec.url
            )


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
        return Finding("clean-up", "ok", "all objects of these checks were removed")
    return Finding(
        "clean-up",
        "failed",
        f"{len(left.keys)} objects of these checks could not be removed: {left.why}",
        f"remove everything below {scratch.spec.url}",
        {"url": scratch.spec.url, "keys": list(left.keys)},
    )
