"""Checks apart from objects: this machine, the server, the bucket and its rules."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import cached_property
from pathlib import Path
from typing import Any, Final, NamedTuple

from dcp_objstore import errors
from dcp_objstore.doctor.checks import Verdict, failed, not_made, ok, warning
from dcp_objstore.doctor.scratch import Scratch
from dcp_objstore.observe.report import counted, size_text
from dcp_objstore.stores.diagnosis import ask_region, identify, named_server
from dcp_objstore.stores.protocol import ObjectStore
from dcp_objstore.stores.ranges import read_range
from dcp_objstore.stores.spec import StoreSpec
from dcp_objstore.stores.urls import StoreUrl

_PACKAGES = ("dcp-objstore", "torch", "obstore", "boto3")
_FILESYSTEMS = {"s3": ("fsspec", "s3fs"), "gs": ("fsspec", "gcsfs")}
LOCAL = ("file", "memory")
_CLOUDS = ("s3", "gs", "gcs", "az", "azure", "abfs", "abfss")
_SERVERS = ("s3", "gs", "az")
_PROVIDERS = {"s3": "AWS", "gs": "Google"}
_ABSENT = ".doctor-asks-for-nothing"
# The time-out of the first answer: a server that accepts connections and stays silent has failed.
_PATIENCE_SECONDS = 10.0


def versions(spec: StoreSpec) -> Verdict:
    """Return the versions of this library and its main dependencies, without importing them."""
    installed: dict[str, object] = {"python": platform.python_version()}
    carriers = _FILESYSTEMS.get(spec.parsed.scheme, ("fsspec",)) if _over_fsspec(spec) else ()
    for name in (*_PACKAGES, *carriers):
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            installed[name] = None
    shown = [f"{name} {version or 'is not installed'}" for name, version in installed.items()]
    return ok(", ".join(shown), **installed)


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


def _over_fsspec(spec: StoreSpec) -> bool:
    """Whether fsspec carries the requests."""
    own = spec.parsed.scheme in (*LOCAL, *_SERVERS) and "fs" not in spec.storage_options
    return spec.config.transport == "fsspec" or not own


class _Answer(NamedTuple):
    """The first answer of the store.

    Attributes:
        error: what is wrong, if anything.
        has_code: whether the answer is like that of a store.
    """

    error: errors.DcpObjstoreError | None
    has_code: bool = True


class Access:
    """The checks of the server, the credentials and the bucket.

    One request shows the most of it; which check its error belongs to depends on its kind.
    """

    def __init__(self, spec: StoreSpec) -> None:
        self._spec = spec
        self._url = spec.parsed

    @cached_property
    def _answer(self) -> _Answer:
        """Ask for an object that is not there, or say why that cannot be done."""
        patience = min(_PATIENCE_SECONDS, self._spec.config.request_timeout_seconds)
        hasty = replace(self._spec.config, request_timeout_seconds=patience, max_retries=0)
        try:
            store = replace(self._spec, config=hasty).open()
            if self._url.scheme not in _SERVERS:
                store.head(_ABSENT)
            else:
                read_range(store, _ABSENT, 0, 1)  # the answer to a HEAD has no body to hold a code
        except (errors.ObjectNotFoundError, errors.PermissionDeniedError) as error:
            # Without the right to list, a store answers "denied" for absent objects as well. The
            # next checks report that.
            return _Answer(self._missing_bucket(store), self._has_code(error))
        except errors.BucketNotFoundError as error:
            return _Answer(error, self._has_code(error))
        except errors.CorruptDataError:
            pass  # the answer is not the requested byte
        except errors.DcpObjstoreError as error:
            return _Answer(error)
        text = "it sends data for an object that does not exist, so it is a web server or a proxy"
        return _Answer(errors.ConfigError(f"{text}, not a store"))

    def _missing_bucket(self, store: ObjectStore) -> errors.BucketNotFoundError | None:
        """Return the error of a bucket that is missing. Over gcsfs, only a listing shows that."""
        if self._url.scheme == "gs" and _over_fsspec(self._spec):
            try:
                list(store.list(f"{_ABSENT}/"))
            except errors.BucketNotFoundError as error:
                return error
            except (errors.RetryableError, errors.PermissionDeniedError):  # the next checks tell
                pass
        return None

    def _has_code(self, error: errors.DcpObjstoreError) -> bool:
        """Whether an error has a store's error code; True if the transport does not show codes."""
        scheme = self._url.scheme
        shows_none = scheme not in _SERVERS or (scheme != "s3" and _over_fsspec(self._spec))
        return shows_none or error.code is not None

    @cached_property
    def _bucket_region(self) -> str | None:
        """The bucket's region, if AWS names another than the one that was asked."""
        if not isinstance(self._answer.error, errors.ConfigError):
            return None
        try:
            return ask_region(self._spec)
        except errors.DcpObjstoreError:
            return None  # the error of the endpoint is reported

    def endpoint(self) -> Verdict:
        """Look whether the server answers as a store does."""
        error = self._answer.error
        others = isinstance(error, errors.CredentialsError | errors.BucketNotFoundError)
        if error is not None and not others and self._bucket_region is None:
            raise error
        try:
            server, region = named_server(self._spec)
        except errors.DcpObjstoreError:
            return not_made("without credentials, no request is sent")
        shown = server or _PROVIDERS.get(self._url.scheme, "the provider")
        where = f"{shown}, region {region}" if region else shown
        if not self._answer.has_code:
            return warning(
                f"{where}: its answer for an absent object does not have the error code of a store",
                "check that this is the store that you mean, not a web server or proxy",
                endpoint_url=server,
                region=region,
            )
        return ok(where, endpoint_url=server, region=region)

    def credentials(self) -> Verdict:
        """Find out whose credentials they are, and whether the store accepts them."""
        try:
            identity = identify(self._spec)
        except errors.ConfigError:
            identity = None  # the first request failed alike
        if isinstance(self._answer.error, errors.CredentialsError):
            raise self._answer.error
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
        if self._answer.error is not None:
            raise self._answer.error
        if not self._answer.has_code:
            return not_made("the answer does not show whether the bucket exists")
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
