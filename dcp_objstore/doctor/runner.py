"""Run the checks in a thread, so that the caller can stop at any time; the thread then cleans up.

Each check is made whatever the result of the one before it. If a check has nothing left to ask, it
says so. The checks try one right at a time, so the results show which right is missing.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TYPE_CHECKING, Literal, NamedTuple

from dcp_objstore.config import TransferConfig
from dcp_objstore.doctor.findings import Finding, Verdict, failure, unread
from dcp_objstore.doctor.objects import ObjectChecks
from dcp_objstore.doctor.scratch import Stop
from dcp_objstore.doctor.surroundings import (
    Surroundings,
    lifecycle,
    unfinished,
    versioning,
    versions,
    working_directory,
)
from dcp_objstore.errors import DcpObjstoreError
from dcp_objstore.stores.spec import StoreSpec
from dcp_objstore.transfer.workers import run_in_thread
from dcp_objstore.waiting import take

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dcp_objstore.stores.uploads.s3 import S3Uploads
    from dcp_objstore.stores.urls import StoreUrl

logger = logging.getLogger("dcp_objstore")

# Time-outs are shorter than for a save, so that a wrong endpoint is reported within seconds.
CONFIG = TransferConfig(
    connect_timeout_seconds=5,
    request_timeout_seconds=30,
    stall_timeout_seconds=30,
    max_retries=1,
    retry_timeout_seconds=5,
)
_CLEAN_UP_SECONDS = 30.0


class Check(NamedTuple):
    """One line of the table of checks.

    Attributes:
        name: name of the check.
        kind: `access`: made in any case. `request`: made if the store can be reached; what a job
            needs, so an error is a failure. `rule`: the same, but no job needs it.
        make: the check; it returns what it found, or raises.
    """

    name: str
    kind: Literal["access", "request", "rule"]
    make: Callable[[], Verdict]


def table(spec: StoreSpec, around: Surroundings, objects: ObjectChecks) -> Sequence[Check]:
    """Return all checks, in an order in which each can rely on those before it."""
    url = spec.parsed

    def uploads() -> S3Uploads:
        return objects.scratch.around()

    return (
        Check("versions", "access", lambda: versions(spec)),
        Check("working directory", "access", working_directory),
        Check("credentials", "access", lambda: around.access.credentials),
        Check("endpoint", "access", lambda: around.access.endpoint),
        Check("bucket", "access", lambda: around.access.bucket),
        Check("clock", "access", around.clock),
        Check("put", "request", objects.put),
        Check("list", "request", objects.listing),
        Check("read", "request", objects.read),
        Check("multipart", "request", objects.multipart),
        Check("checksums", "request", objects.checksums),
        Check("abort", "request", objects.abort),
        Check("conditional put", "request", objects.conditional_put),
        Check("delete", "request", objects.delete),
        Check("lifecycle", "rule", lambda: lifecycle(uploads(), url)),
        Check("versioning", "rule", lambda: versioning(uploads())),
        Check("unfinished uploads", "rule", lambda: unfinished(uploads(), url)),
        Check("clean-up", "request", objects.clean_up),
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
    findings: queue.SimpleQueue[Finding | None] = queue.SimpleQueue()
    stop = Stop()

    def work() -> None:
        try:
            for finding in _findings(spec, stop):
                findings.put(finding)
        finally:
            findings.put(None)

    done = run_in_thread(work, "check-up")
    try:
        while (finding := take(findings)) is not None:
            yield finding
        done.result()
    finally:
        stop.set()
        try:
            done.exception(timeout=_CLEAN_UP_SECONDS)
        except FutureTimeoutError:
            logger.warning(
                "a request does not end, so objects .doctor-* may remain below %s", spec.url
            )


def _findings(spec: StoreSpec, stop: Stop) -> Iterator[Finding]:
    """Make all checks; if they are ended early, remove what they wrote."""
    around, objects = Surroundings(spec), ObjectChecks(spec)
    try:
        for check in table(spec, around, objects):
            stop.check()
            yield Finding(check.name, *_made(check, spec.parsed, around))
    except BaseException:
        objects.abandon()
        raise


def _made(check: Check, url: StoreUrl, around: Surroundings) -> Verdict:
    if check.kind != "access" and around.access.blocked is not None:
        return Verdict("not made", around.access.blocked)
    try:
        return check.make()
    except DcpObjstoreError as error:
        meaning = unread if check.kind == "rule" else failure
        return meaning(check.name, error, url)
