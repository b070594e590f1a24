"""Checks apart from objects: this machine, the server, the bucket and its rules."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from dcp_objstore import errors
from dcp_objstore.doctor.checks import Verdict, failed, not_made, ok, warning
from dcp_objstore.doctor.scratch import Scratch
from dcp_objstore.observe.report import counted, size_text
from dcp_objstore.stores.diagnosis import ask_region, identify, named_server
from dcp_objstore.stores.ranges import read_range
from dcp_objstore.stores.spec import StoreSpec
from dcp_objstore.stores.urls import StoreUrl

_PACKAGES = ("dcp-objstore", "torch", "obstore", "boto3", "fsspec", "s3fs", "gcsfs")
LOCAL_SCHEMES = ("file", "memory")
_CLOUD_SCHEMES = ("s3", "gs", "gcs", "az", "azure", "abfs", "abfss")
# A key, and a prefix, that no store has.
_ABSENT_KEY = ".doctor-asks-for-nothing"
# The time-out of the first answer: a server that accepts connections and stays silent has failed.
_PATIENCE_SECONDS = 10.0


def versions() -> Verdict:
    """Return the versions of Python, of this library and of the packages that it sends requests by.

    Nothing is imported for it.
    """
    installed = {"python": platform.python_version()}
    for name in _PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            installed[name] = importlib.metadata.version(name)
    return ok(", ".join(map(" ".join, installed.items())), **installed)


def working_directory() -> Verdict:
    """Look for a folder `s3:` that a program has made because it takes a URL for a local path."""
    folders = [f"{scheme}:" for scheme in _CLOUD_SCHEMES if Path(f"{scheme}:").is_dir()]
    if not folders:
        return ok("no program has taken a URL for a local path here")
    return warning(
        f"{Path.cwd()} has the folder {folders[0]!r}: a program took a URL for a local path, and"
        " what it wrote there is not in the bucket",
        "see the page of its framework in the documentation; then copy the files, and remove it",
        folders=folders,
    )


class Access:
    """The checks of the server, the credentials and the bucket.

    They share two requests (`_error`). The kind of the error says which check has failed: the
    credentials or the bucket, and otherwise the server.
    """

    def __init__(self, spec: StoreSpec) -> None:
        self._spec = spec
        self._url = spec.parsed

    @cached_property
    def _error(self) -> errors.DcpObjstoreError | None:
        """The error of the first listing and read; None if a store has answered.

        Both ask for a key that no store has. To answer that it is not there, or that these
        credentials do not have the right to ask, is to answer as a store does.
        """
        patience = min(_PATIENCE_SECONDS, self._spec.config.request_timeout_seconds)
        hasty = replace(self._spec.config, request_timeout_seconds=patience, max_retries=0)
        try:
            store = replace(self._spec, config=hasty).open()
            next(iter(store.list(f"{_ABSENT_KEY}/")), None)
            read_range(store, _ABSENT_KEY, 0, 1)
        except (errors.ObjectNotFoundError, errors.PermissionDeniedError):
            return None  # the next checks report which right is missing
        except errors.CorruptDataError:
            pass  # the answer is not one byte: perhaps a web page
        except errors.DcpObjstoreError as error:
            return error
        # No store has the key, so it was no store that answered the read.
        text = "it sends data for an object that does not exist, so it is a web server or a proxy"
        return errors.ConfigError(f"{text}, not a store")

    @cached_property
    def _bucket_region(self) -> str | None:
        """The bucket's region, if AWS names another than the one that was asked; otherwise None."""
        # AWS redirects a request for a bucket in another region, and that is a ConfigError.
        if not isinstance(self._error, errors.ConfigError):
            return None
        try:
            return ask_region(self._spec)
        except errors.DcpObjstoreError:
            return None  # the error of the endpoint is reported

    def endpoint(self) -> Verdict:
        """Look whether the server answers as a store does."""
        error = self._error
        # The checks of the credentials and of the bucket report these two, and another region.
        is_of_others = isinstance(error, errors.CredentialsError | errors.BucketNotFoundError)
        if error is not None and not is_of_others and self._bucket_region is None:
            raise error
        try:
            server, region = named_server(self._spec)
        except errors.DcpObjstoreError:
            return not_made("without credentials, no request is sent")
        text = server or "the provider's own endpoint"
        text += f", region {region}" if region else ""
        return ok(text, endpoint_url=server, region=region)

    def credentials(self) -> Verdict:
        """Find out whose credentials they are, and whether the store accepts them."""
        try:
            identity = identify(self._spec)
        except errors.ConfigError:
            identity = None  # the check of the endpoint has reported it
        if isinstance(self._error, errors.CredentialsError):
            raise self._error
        if identity is None:
            return ok("in use; this store does not show whose they are")
        details = identity._asdict()
        if identity.source == "anonymous":
            return ok("anonymous", **details)
        name = identity.account or identity.access_key or "unnamed"
        return ok(f"{name}, from {identity.source}", **details)

    def bucket(self) -> Verdict:
        """Look whether the bucket exists, and in the region that is asked."""
        region = self._bucket_region
        if region is not None:
            return failed(
                f"it is in {region}, but requests go to {named_server(self._spec).region}",
                f"set AWS_REGION={region}, or storage_options={{'region': '{region}'}}",
                region=region,
            )
        if self._error is not None:
            raise self._error
        return ok(f"the bucket {self._url.bucket} exists")


# No save takes longer, so an older upload will hardly be finished.
_LONGEST_SAVE = timedelta(hours=24)
# The rule that is advised removes uploads after this time, which is longer than the longest save.
_LIFECYCLE_DAYS: Final = 2
_RULE_ID: Final = "dcp-objstore-incomplete-uploads"


def lifecycle(scratch: Scratch, url: StoreUrl) -> Verdict:
    """Look for a rule of the bucket that removes unfinished uploads below the URL.

    The rules of GCS cannot be read here. For any other store than S3, `scratch.around` raises an
    error, which says why there is nothing to look for.
    """
    prefix = f"{url.prefix}/" if url.prefix else ""
    if url.scheme == "gs":
        configuration = shlex.quote(lifecycle_configuration("gs", prefix))
        return not_made(
            "the rules of the bucket cannot be read here; one should remove unfinished uploads",
            f"`echo {configuration} > rules.json` and `gcloud storage buckets update gs://{url.bucket}"
            " --lifecycle-file=rules.json` replace all its rules by one that does",
        )
    rules = scratch.around.lifecycle_rules()
    days = covering_days(rules, prefix)
    if days is None:
        configuration = shlex.quote(lifecycle_configuration("s3", prefix, rules))
        return warning(
            "no rule of the bucket removes unfinished uploads, which are billed but invisible",
            f"`aws s3api put-bucket-lifecycle-configuration --bucket {url.bucket}"
            f" --lifecycle-configuration {configuration}` adds one, and keeps its other rules",
        )
    return ok(f"the bucket removes unfinished uploads after {counted(days, 'day')}", days=days)


def unfinished(scratch: Scratch, url: StoreUrl) -> Verdict:
    """Look for unfinished uploads below the URL that no save can still finish."""
    newest_old = datetime.now(UTC) - _LONGEST_SAVE
    old_uploads = [upload for upload in scratch.around.list() if upload.initiated < newest_old]
    old_bytes = sum(upload.size_bytes for upload in old_uploads)
    if not old_uploads:
        return ok("none below the URL is older than a day")
    return warning(
        f"{len(old_uploads)} older than a day ({size_text(old_bytes)}), billed but not visible",
        f"`dcp-objstore sweep {shlex.quote(str(url))} --yes` removes those of saves",
        old_uploads=len(old_uploads),
        old_bytes=old_bytes,
    )


def covering_days(rules: Sequence[Mapping[str, Any]], prefix: str) -> int | None:
    """Return the days after which a bucket's rules remove unfinished uploads; None for never.

    Args:
        rules: the bucket's rules, in the form of S3.
        prefix: the prefix of the uploads, with a slash at its end; empty for the whole bucket.
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
    """Return the prefix of an S3 rule; empty if it holds for the whole bucket.

    It is in `Filter`, in `Filter` and `And` beside other conditions, or in the rule itself (the old
    form). See "Elements to describe lifecycle actions".
    """
    conditions = rule.get("Filter", {})
    conditions = conditions.get("And", conditions)
    return str(conditions.get("Prefix", rule.get("Prefix", "")))


def lifecycle_configuration(
    scheme: str, prefix: str, rules: Sequence[Mapping[str, Any]] = ()
) -> str:
    """Return a lifecycle configuration that removes unfinished uploads below a prefix, as JSON.

    The commands that take it, one for S3 and one for GCS, replace all rules of the bucket.

    Args:
        scheme: `s3`: for `aws s3api put-bucket-lifecycle-configuration`; `gs`: for `gcloud storage
            buckets update --lifecycle-file`.
        prefix: a prefix with a slash at its end; empty for the whole bucket.
        rules: the rules that the bucket has, which are kept. For `gs` they are not known.
    """
    if scheme == "gs":
        condition: dict[str, object] = {"age": _LIFECYCLE_DAYS}
        if prefix:
            condition["matchesPrefix"] = [prefix]
        advised = {"action": {"type": "AbortIncompleteMultipartUpload"}, "condition": condition}
        return json.dumps({"rule": [advised]})
    advised = {
        "ID": _RULE_ID,
        "Status": "Enabled",
        "Filter": {"Prefix": prefix},
        "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": _LIFECYCLE_DAYS},
    }
    # An earlier version of this rule is replaced. `default`, because a rule may hold a date.
    others = [rule for rule in rules if rule.get("ID") != _RULE_ID]
    return json.dumps({"Rules": [*others, advised]}, default=str)
