"""Checks of what a bucket does by itself with unfinished uploads and old versions of objects."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from dcp_objstore.doctor.checks import Verdict, not_made, ok, warning
from dcp_objstore.observe.report import counted, size_text

if TYPE_CHECKING:
    from dcp_objstore.stores.s3.unfinished import S3Uploads
    from dcp_objstore.stores.urls import StoreUrl

# No save takes longer, so an older upload will hardly be finished.
_OLD = timedelta(hours=24)
LIFECYCLE_DAYS: Final = 2
_RULE_ID: Final = "dcp-objstore-incomplete-uploads"


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


def covering_days(rules: Sequence[Mapping[str, Any]], prefix: str) -> int | None:
    """Return the days after which rules remove unfinished uploads below a prefix; None: never.

    Args:
        rules: the bucket's rules, in the form of S3.
        prefix: a prefix with a slash at its end; empty for the whole bucket.
    """
    days = [
        rule["AbortIncompleteMultipartUpload"]["DaysAfterInitiation"]
        for rule in rules
        if rule.get("Status") == "Enabled"
        and "DaysAfterInitiation" in rule.get("AbortIncompleteMultipartUpload", {})
        and prefix.startswith(_rule_prefix(rule))
    ]
    return min(days, default=None)


def _rule_prefix(rule: Mapping[str, Any]) -> str:
    """Return the prefix of an S3 rule, in its old or new form.

    They are in "Elements to describe lifecycle actions".
    """
    scope = rule.get("Filter", {})
    inner = scope.get("And", scope)
    return str(inner.get("Prefix", rule.get("Prefix", "")))


def lifecycle_configuration(
    scheme: str, prefix: str, rules: Sequence[Mapping[str, Any]] = (), days: int = LIFECYCLE_DAYS
) -> str:
    """The lifecycle configuration that removes unfinished uploads below a prefix, as JSON.

    Args:
        scheme: `s3`: for `aws s3api put-bucket-lifecycle-configuration`, which replaces all rules
            of the bucket; `gs`: for `gcloud storage buckets update --lifecycle-file`, as well,
            whose other rules are not known here.
        prefix: a prefix with a slash at its end; empty for the whole bucket.
        rules: the rules that the bucket has, which are kept.
        days: the number of days after the upload was begun. It must be longer than the longest
            save.
    """
    if scheme == "gs":
        condition: dict[str, object] = {"age": days}
        if prefix:
            condition["matchesPrefix"] = [prefix]
        advised = {"action": {"type": "AbortIncompleteMultipartUpload"}, "condition": condition}
        return json.dumps({"rule": [advised]})
    advised = {
        "ID": _RULE_ID,
        "Status": "Enabled",
        "Filter": {"Prefix": prefix},
        "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": days},
    }
    others = [rule for rule in rules if rule.get("ID") != _RULE_ID]
    return json.dumps({"Rules": [*others, advised]}, default=str)
