"""Run the checks in a thread, so that the caller can stop at any time; the thread then cleans up.

A failed check does not end the run: each later one is made, or its finding says why it was not.
The checks try one right at a time, so the results show which right is missing.
"""

from __future__ import annotations

import queue
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError

from dcp_objstore.config import TransferConfig
from dcp_objstore.doctor.access import (
    LOCAL_SCHEMES,
    Access,
    lifecycle,
    unfinished,
    versions,
    working_directory,
)
from dcp_objstore.doctor.checks import (
    BLOBS,
    TO_LIST,
    Check,
    Finding,
    Rights,
    Verdict,
    failure,
    not_applicable,
    not_made,
)
from dcp_objstore.doctor.objects import ObjectChecks
from dcp_objstore.doctor.scratch import Stop
from dcp_objstore.errors import DcpObjstoreError
from dcp_objstore.observe.report import logger
from dcp_objstore.stores.spec import StoreSpec
from dcp_objstore.threads import run_in_thread, take

# Time-outs are shorter than for a save, so that a wrong endpoint is reported within seconds.
CONFIG = TransferConfig(
    connect_timeout_seconds=5,
    request_timeout_seconds=30,
    stall_timeout_seconds=30,
    max_retries=1,
    retry_timeout_seconds=5,
)
_CLEAN_UP_SECONDS = 30.0


def table(spec: StoreSpec, objects: ObjectChecks) -> Sequence[Check]:
    """Return all checks, in an order in which each can rely on those before it.

    The second word of a check is its `kind`: `written` stands for a check of the object that "put"
    has written.

    The rights are on these pages of the providers: "Actions, resources, and condition keys for
    Amazon S3"; "IAM permissions for Cloud Storage"; for Azure "Permissions for calling data
    operations".
    """
    url, access = spec.parsed, Access(spec)
    write = f"{BLOBS}/write"
    put = Rights("s3:PutObject", "storage.objects.create", write)
    read = Rights("s3:GetObject", "storage.objects.get", f"{BLOBS}/read")
    gs_create_parts = "storage.multipartUploads.create and storage.objects.create"
    put_parts = Rights("s3:PutObject", gs_create_parts, write)
    abort = Rights("s3:AbortMultipartUpload", "storage.multipartUploads.abort")
    gs_replace = "storage.objects.create, .get and .delete (to replace an object)"
    put_conditionally = Rights("s3:PutObject and s3:GetObject", gs_replace, write)
    delete = Rights("s3:DeleteObject", "storage.objects.delete", f"{BLOBS}/delete")
    read_rules = Rights("s3:GetLifecycleConfiguration")
    list_uploads = Rights("s3:ListBucketMultipartUploads and s3:ListMultipartUploadParts")
    return (
        Check("versions", "request", versions),
        Check("working directory", "request", working_directory),
        Check("endpoint", "access", access.endpoint),
        Check("credentials", "access", access.credentials),
        Check("bucket", "access", access.bucket),
        Check("put", "request", objects.put, put),
        Check("list", "request", objects.listing, TO_LIST),
        Check("read", "written", objects.read, read),
        Check("multipart", "request", objects.multipart, put_parts),
        Check("abort", "written", objects.abort, abort),
        Check("conditional put", "written", objects.conditional_put, put_conditionally),
        Check("delete", "written", objects.delete, delete),
        Check("lifecycle", "rule", lambda: lifecycle(objects.scratch, url), read_rules),
        Check("unfinished uploads", "rule", lambda: unfinished(objects.scratch, url), list_uploads),
        Check("clean-up", "request", objects.clean_up, delete),
    )


def findings(spec: StoreSpec, objects: ObjectChecks, checks: Sequence[Check]) -> Iterator[Finding]:
    """Make the checks of a table, each when its finding is asked for.

    A check is not made, and the finding says why, once one of kind `access` has failed; if the
    store has nothing to check; or if the object that it needs could not be written.
    """
    blocked: Verdict | None = None
    for check in checks:
        verdict = blocked
        if check.kind == "access" and spec.parsed.scheme in LOCAL_SCHEMES:
            verdict = not_applicable(f"{spec.parsed.scheme}:// does not have this")
        elif check.kind == "written" and not objects.has_written:
            verdict = verdict or not_made("no object can be written")
        try:
            verdict = verdict or check.make()
        except DcpObjstoreError as error:
            verdict = failure(spec.parsed, check, error)
        if check.kind == "access" and verdict.status == "failed":
            blocked = not_made(f"the check of the {check.name} has failed")
        yield Finding(check.name, *verdict)


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
    queued: queue.SimpleQueue[Finding | None] = queue.SimpleQueue()  # None comes last
    stop = Stop()

    def work() -> None:
        objects = ObjectChecks(spec)
        try:
            for finding in findings(spec, objects, table(spec, objects)):
                queued.put(finding)
                stop.check()
        except BaseException:  # perhaps the last check, which cleans up, was not reached
            objects.abandon()
            raise
        finally:
            queued.put(None)

    ended = run_in_thread(work, "check-up")
    try:
        while (finding := take(queued)) is not None:
            yield finding
        ended.result()  # raises the error of the thread
    finally:
        stop.set()
        try:
            ended.exception(timeout=_CLEAN_UP_SECONDS)  # waits until it has cleaned up
        except FutureTimeoutError:
            logger.warning(
                "a request does not end, so objects .doctor-* may remain below %s", spec.url
            )
