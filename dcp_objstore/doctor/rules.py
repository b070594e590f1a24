"""Checks of what a bucket does by itself with unfinished uploads and old versions of objects."""

from __future__ import annotations

import shlex
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from dcp_objstore.doctor.checks import Verdict, not_made, ok, warning
from dcp_objstore.observe.report import counted, size_text
from dcp_objstore.stores.uploads.lifecycle import covering_days, lifecycle_configuration

if TYPE_CHECKING:
    from collections.abc import Callable

    from dcp_objstore.stores.uploads.s3 import S3Uploads
    from dcp_objstore.stores.urls import StoreUrl

# No save takes longer, so an older upload will hardly be finished.
_OLD = timedelta(hours=24)


def lifecycle(uploads: Callable[[], S3Uploads], url: StoreUrl) -> Verdict:
    """Look for a rule of the bucket that removes unfinished uploads."""
    prefix = f"{url.prefix}/" if url.prefix else ""
    if url.scheme == "gs":
        rule = shlex.quote(lifecycle_configuration("gs", prefix))
        return not_made(
            "the rules of the bucket cannot be read here; one should remove unfinished uploads",
            f"`echo {rule} > rules.json` and `gcloud storage buckets update gs://{url.bucket}"
            " --lifecycle-file=rules.json` replace all its rules by one that does",
        )
    rules = uploads().lifecycle_rules()
    days = covering_days(rules, prefix)
    if days is None:
        rule = shlex.quote(lifecycle_configuration("s3", prefix, rules))
        return warning(
            "no rule of the bucket removes unfinished uploads, which are billed but invisible",
            f"`aws s3api put-bucket-lifecycle-configuration --bucket {url.bucket}"
            f" --lifecycle-configuration {rule}` adds one, and keeps its other rules",
        )
    return ok(f"the bucket removes unfinished uploads after {counted(days, 'day')}", days=days)


def versioning(uploads: S3Uploads) -> Verdict:
    """Look whether the bucket keeps old versions of objects."""
    state = (uploads.versioning() or "off").lower()
    if state == "enabled":
        return warning(
            "on: deleted or overwritten objects stay as old versions, and are billed",
            "add a lifecycle rule with NoncurrentVersionExpiration",
            state=state,
        )
    return ok(f"{state}: deleted objects are gone", state=state)


def unfinished(uploads: S3Uploads, url: StoreUrl) -> Verdict:
    """Look for unfinished uploads below the URL."""
    listed = uploads.list()
    old = [upload for upload in listed if datetime.now(UTC) - upload.initiated > _OLD]
    all_bytes, old_bytes = (sum(upload.size_bytes for upload in some) for some in (listed, old))
    details = {
        "uploads": len(listed),
        "bytes": all_bytes,
        "old_uploads": len(old),
        "old_bytes": old_bytes,
    }
    if old:
        return warning(
            f"{len(old)} older than a day ({size_text(old_bytes)}), billed but not visible",
            f"`dcp-objstore sweep {shlex.quote(str(url))} --yes` removes those of saves",
            **details,
        )
    young = f"{len(listed)} of the last day ({size_text(all_bytes)}), perhaps of running saves"
    return ok(young if listed else "none below the URL", **details)
