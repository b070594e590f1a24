"""Run the checks in a thread, so that the caller can stop at any time; the thread then cleans up.

Each check is made whatever the result of the one before it. If a check has nothing left to ask, it
says so. The checks try one right at a time, so the results show which right is missing.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TYPE_CHECKING

from dcp_objstore.config import TransferConfig
from dcp_objstore.doctor.findings import (
    BLOBS,
    TO_LIST,
    Check,
    Finding,
    Rights,
    Verdict,
    failure,
)
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


def table(spec: StoreSpec, around: Surroundings, objects: ObjectChecks) -> Sequence[Check]:
    """Return all checks, in an order in which each can rely on those before it.

    S3's rights: "Actions, resources, and condition keys for Amazon S3"; those of GCS: "IAM
    permissions for Cloud Storage"; those of Azure: "Permissions for calling data operations".
    """
    url, uploads = spec.parsed, objects.uploads
    write, read_blob = f"{BLOBS}/write", f"{BLOBS}/read"
    put = Rights("s3:PutObject", "storage.objects.create", write)
    read = Rights("s3:GetObject", "storage.objects.get", read_blob)
    made = "storage.multipartUploads.create and storage.objects.create"
    parts = Rights("s3:PutObject", made, write)
    abort = Rights("s3:AbortMultipartUpload", "storage.multipartUploads.abort")
    replace = "storage.objects.create, .get and .delete (to replace an object)"
    race = Rights("s3:PutObject and s3:GetObject", replace, write)
    delete = Rights("s3:DeleteObject", "storage.objects.delete", f"{BLOBS}/delete")
    rules = Rights("s3:GetLifecycleConfiguration")
    old = Rights("s3:GetBucketVersioning")
    unended = Rights("s3:ListBucketMultipartUploads and s3:ListMultipartUploadParts")
    return (
        Check("versions", "access", lambda: versions(spec)),
        Check("working directory", "access", working_directory),
        Check("credentials", "access", around.verdict("credentials")),
        Check("endpoint", "access", around.verdict("endpoint")),
        Check("bucket", "access", around.verdict("bucket")),
        Check("clock", "access", around.clock),
        Check("put", "request", objects.put, put),
        Check("list", "request", objects.listing, TO_LIST),
        Check("read", "request", objects.read, read),
        Check("multipart", "request", objects.multipart, parts),
        Check("checksums", "request", objects.checksums, read),
        Check("abort", "request", objects.abort, abort),
        Check("conditional put", "request", objects.conditional_put, race),
        Check("delete", "request", objects.delete, delete),
        Check("lifecycle", "rule", lambda: lifecycle(uploads, url), rules),
        Check("versioning", "rule", lambda: versioning(uploads()), old),
        Check("unfinished uploads", "rule", lambda: unfinished(uploads(), url), unended),
        Check("clean-up", "request", objects.clean_up, delete),
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
        return failure(check, error, url)
