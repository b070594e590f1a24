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
LOCAL = ("file", "memory")
_CLOUDS = ("s3", "gs", "gcs", "az", "azure", "abfs", "abfss")
_ABSENT = ".doctor-asks-for-nothing"
# The time-out of the first answer: a server that accepts connections and stays silent has failed.
_PATIENCE_SECONDS = 10.0


def versions() -> Verdict:
    """Return the versions of this library and of what carries its requests; import nothing."""
    installed = {"python": platform.python_version()}
    for name in _PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            installed[name] = importlib.metadata.version(name)
    return ok(", ".join(map(" ".join, installed.items())), **installed)


def working_directory() -> Verdict:
    """Look for a folder `s3:` that a program has made because it takes a URL for a local path."""
    folders = [f"{scheme}:" for scheme in _CLOUDS if Path(f"{scheme}:").is_dir()]
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

    One request shows the most of it; which check its error belongs to depends on its kind.
    """

    def __init__(self, spec: StoreSpec) -> None:
        self._spec = spec
        self._url = spec.parsed

    @cached_property
    def _error(self) -> errors.DcpObjstoreError | None:
        """What is wrong with the first answers; None if they are a store's, which may deny all."""
        patience = min(_PATIENCE_SECONDS, self._spec.config.request_timeout_seconds)
        hasty = replace(self._spec.config, request_timeout_seconds=patience, max_retries=0)
        try:
            store = replace(self._spec, config=hasty).open()
            next(iter(store.list(f"{_ABSENT}/")), None)
            read_range(store, _ABSENT, 0, 1)
        except (errors.ObjectNotFoundError, errors.PermissionDeniedError):
            return None  # the next checks report which right is missing
        except errors.CorruptDataError:
            pass  # the answer is not the requested byte
        except errors.DcpObjstoreError as error:
            return error
        text = "it sends data for an object that does not exist, so it is a web server or a proxy"
        return errors.ConfigError(f"{text}, not a store")

    @cached_property
    def _bucket_region(self) -> str | None:
        """The bucket's region, if AWS names another than the one that was asked."""
        if not isinstance(self._error, errors.ConfigError):
            return None
        try:
            return ask_region(self._spec)
        except errors.DcpObjstoreError:
            return None  # the error of the endpoint is reported

    def endpoint(self) -> Verdict:
        """Look whether the server answers as a store does."""
        error = self._error
        others = isinstance(error, errors.CredentialsError | errors.BucketNotFoundError)
        if error is not None and not others and self._bucket_region is None:
            raise error
        try:
            server, region = named_server(self._spec)
        except errors.DcpObjstoreError:
            return not_made("without credentials, no request is sent")
        shown = server or "the provider's own endpoint"
        where = f"{shown}, region {region}" if region else shown
        return ok(where, endpoint_url=server, region=region)

    def credentials(self) -> Verdict:
        """Find out whose credentials they are, and whether the store accepts them."""
        try:
            identity = identify(self._spec)
        except errors.ConfigError:
            identity = None  # the first request failed alike
        if isinstance(self._error, errors.CredentialsError):
            raise self._error
        if identity is None:
            return ok("in use; this store does not show whose they are")
        source, key, account = identity
        details = {"source": source, "access_key": key, "account": account}
        if source == "anonymous":
            return ok("anonymous", **details)
        return ok(f"{account or key or 'unnamed'}, from {source}", **details)

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
_OLD = timedelta(hours=24)
# Longer than the longest save.
_LIFECYCLE_DAYS: Final = 2
_RULE_ID: Final = "dcp-objstore-incomplete-uploads"


def lifecycle(scratch: Scratch, url: StoreUrl) -> Verdict:
    """Look for a rule of the bucket that removes unfinished uploads."""
    prefix = f"{url.prefix}/" if url.prefix else ""
    if url.scheme == "gs":
        rule = shlex.quote(lifecycle_configuration("gs", prefix))
        return not_made(
            "the rules of the bucket cannot be read here; one should remove unfinished uploads",
            f"`echo {rule} > rules.json` and `gcloud storage buckets update gs://{url.bucket}"
            " --lifecycle-file=rules.json` replace all its rules by one that does",
        )
    rules = scratch.around.lifecycle_rules()
    days = covering_days(rules, prefix)
    if days is None:
        rule = shlex.quote(lifecycle_configuration("s3", prefix, rules))
        return warning(
            "no rule of the bucket removes unfinished uploads, which are billed but invisible",
            f"`aws s3api put-bucket-lifecycle-configuration --bucket {url.bucket}"
            f" --lifecycle-configuration {rule}` adds one, and keeps its other rules",
        )
    return ok(f"the bucket removes unfinished uploads after {counted(days, 'day')}", days=days)


def unfinished(scratch: Scratch, url: StoreUrl) -> Verdict:
    """Look for unfinished uploads below the URL that no save can still finish."""
    old = [one for one in scratch.around.list() if datetime.now(UTC) - one.initiated > _OLD]
    old_bytes = sum(upload.size_bytes for upload in old)
    if not old:
        return ok("none below the URL is older than a day")
    return warning(
        f"{len(old)} older than a day ({size_text(old_bytes)}), billed but not visible",
        f"`dcp-objstore sweep {shlex.quote(str(url))} --yes` removes those of saves",
        old_uploads=len(old),
        old_bytes=old_bytes,
    )


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
    scheme: str, prefix: str, rules: Sequence[Mapping[str, Any]] = ()
) -> str:
    """The lifecycle configuration that removes unfinished uploads below a prefix, as JSON.

    Args:
        scheme: `s3`: for `aws s3api put-bucket-lifecycle-configuration`, which replaces all rules
            of the bucket; `gs`: for `gcloud storage buckets update --lifecycle-file`, as well,
            whose other rules are not known here.
        prefix: a prefix with a slash at its end; empty for the whole bucket.
        rules: the rules that the bucket has, which are kept.
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
    others = [rule for rule in rules if rule.get("ID") != _RULE_ID]
    return json.dumps({"Rules": [*others, advised]}, default=str)
