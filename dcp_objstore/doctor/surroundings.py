"""Checks apart from objects: credentials, the server and its clock, the bucket and its rules."""

from __future__ import annotations

import importlib.metadata
import platform
import shlex
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from dcp_objstore import errors
from dcp_objstore.doctor.findings import Check, Verdict, failure
from dcp_objstore.observe.report import counted, size_text
from dcp_objstore.stores.diagnosis import Identity, ask_server, identify, named_server
from dcp_objstore.stores.ranges import read_range
from dcp_objstore.stores.uploads.lifecycle import covering_days, lifecycle_configuration

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dcp_objstore.stores.protocol import ObjectStore
    from dcp_objstore.stores.spec import StoreSpec
    from dcp_objstore.stores.uploads.s3 import S3Uploads
    from dcp_objstore.stores.urls import StoreUrl

_PACKAGES = ("dcp-objstore", "torch", "obstore", "boto3")
_FILESYSTEMS = {"s3": ("fsspec", "s3fs"), "gs": ("fsspec", "gcsfs")}
# AWS refuses requests from a clock that is 15 minutes off ("RequestTimeTooSkewed").
_SKEW_REFUSED_SECONDS = 15 * 60
_SKEW_WARNED_SECONDS = 60
# No save takes longer, so an older upload will hardly be finished.
_OLD = timedelta(hours=24)
_LOCAL = ("file", "memory")
_CLOUDS = ("s3", "gs", "gcs", "az", "azure", "abfs", "abfss")
_SERVERS = ("s3", "gs", "az")
_NO_CODE = "its answer for an absent object does not have the error code of a store"
_NO_STORE = "check that this is the store that you mean, not a web server or proxy"
_ANSWERS_ALL = (
    "it sends data for an object that does not exist, so it is a web server or a proxy, not a store"
)
_ABSENT = ".doctor-asks-for-nothing"
# The time-out of the first answer: a server that accepts connections but stays silent is no store.
_PATIENCE_SECONDS = 10.0
# The check that an error of the first answer belongs to, and why no other request is then made.
_BLAMED = (
    (errors.CredentialsError, "credentials", "the store does not accept the credentials"),
    (errors.BucketNotFoundError, "bucket", "the bucket does not exist"),
    (errors.StoreUnavailableError, "endpoint", "the endpoint does not answer"),
    (errors.DcpObjstoreError, "endpoint", "the endpoint does not answer like a store"),
)


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
    return Verdict("ok", ", ".join(shown), details=installed)


def working_directory() -> Verdict:
    """Look for a folder `s3:` that a program has made because it takes a URL for a local path."""
    found = [f"{scheme}:" for scheme in _CLOUDS if Path(f"{scheme}:").is_dir()]
    if not found:
        return Verdict("ok", "no program has taken a URL for a local path here")
    return Verdict(
        "warning",
        f"{Path.cwd()} has the folder {found[0]!r}: a program took a URL for a local path, and what"
        " it wrote there is not in the bucket",
        "see the page of its framework in the documentation; then copy the files, and remove it",
        {"folders": found},
    )


def _over_fsspec(spec: StoreSpec) -> bool:
    """Whether fsspec carries the requests."""
    own = spec.parsed.scheme in (*_LOCAL, *_SERVERS) and "fs" not in spec.storage_options
    return spec.config.transport == "fsspec" or not own


class Access(NamedTuple):
    """What the first answer of the store shows.

    Attributes:
        verdicts: those of credentials, endpoint and bucket; of the clock, if it cannot be asked.
        blocked: why no other request can be made to the store; None if requests can be made.
    """

    verdicts: Mapping[str, Verdict]
    blocked: str | None = None


class Surroundings:
    """The checks of credentials, server, bucket and clock."""

    def __init__(self, spec: StoreSpec) -> None:
        self._spec = spec
        self._url = spec.parsed
        self._region: str | None = None

    @cached_property
    def access(self) -> Access:
        """What the first answer of the store shows, which is asked for at first use."""
        checks = ("credentials", "endpoint", "bucket", "clock")
        if self._url.scheme in _LOCAL:
            without = Verdict("not applicable", f"{self._url.scheme}:// does not have this")
            return Access(dict.fromkeys(checks, without))
        try:
            identity = identify(self._spec)
        except errors.ConfigError:
            identity = None  # the first request fails alike
        except errors.DcpObjstoreError as error:
            blocked = "there are no credentials"
            unasked = dict.fromkeys(checks, Verdict("not made", blocked))
            return Access({**unasked, "credentials": self._failure("credentials", error)}, blocked)
        self._region = identity.region if identity is not None else None
        return self._first_answer(identity)

    def verdict(self, check: str) -> Callable[[], Verdict]:
        """Return the check that takes its verdict from the first answer."""
        return lambda: self.access.verdicts[check]

    def _failure(self, check: str, error: errors.DcpObjstoreError) -> Verdict:
        return failure(Check(check, "access", self.verdict(check)), error, self._url)

    def _first_answer(self, identity: Identity | None) -> Access:
        """Judge credentials, endpoint and bucket by one request."""
        error, has_code = self._ask()
        who, details = _who(identity)
        where, endpoint = self._where()
        verdicts = {
            "credentials": Verdict("ok", who, details=details),
            "endpoint": Verdict("ok", where, details=endpoint),
            "bucket": Verdict("ok", f"the bucket {self._url.bucket} exists"),
        }
        if not has_code:
            verdicts["endpoint"] = Verdict("warning", f"{where}: {_NO_CODE}", _NO_STORE, endpoint)
            text = "the answer does not show whether the bucket exists"
            verdicts["bucket"] = Verdict("not made", text)
        if error is None:
            return Access(verdicts)
        blamed, blocked = next(why for kind, *why in _BLAMED if isinstance(error, kind))
        region = self._right_region() if isinstance(error, errors.ConfigError) else None
        if region is not None:
            blocked = "the bucket is in another region"
        unasked = Verdict("not made", blocked)
        if blamed == "endpoint":
            verdicts["credentials"] = Verdict("not made", f"{who}; {blocked}", details=details)
            verdicts["clock"] = unasked
        if blamed != "bucket":
            verdicts["bucket"] = region or unasked
        if region is None:
            verdicts[blamed] = self._failure(blamed, error)
        return Access(verdicts, blocked)

    def _ask(self) -> tuple[errors.DcpObjstoreError | None, bool]:
        """Return what is wrong, if anything, and whether the answer is like that of a store."""
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
            return self._missing_bucket(store), self._has_code(error)
        except errors.BucketNotFoundError as error:
            return error, self._has_code(error)
        except errors.CorruptDataError:
            pass  # the answer is not the requested byte
        except errors.DcpObjstoreError as error:
            return error, True
        return errors.ConfigError(_ANSWERS_ALL), False

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

    def _where(self) -> tuple[str, dict[str, object]]:
        try:
            endpoint = named_server(self._spec)
        except errors.DcpObjstoreError:
            endpoint = None  # the request before has shown what is wrong
        shown = endpoint or {"s3": "AWS", "gs": "Google"}.get(self._url.scheme, "the provider")
        region = f", region {self._region}" if self._region else ""
        return f"{shown}{region}", {"endpoint_url": endpoint, "region": self._region}

    def _right_region(self) -> Verdict | None:
        """Return a verdict with the bucket's true region, if AWS names it."""
        try:
            answer = ask_server(self._spec)
        except errors.DcpObjstoreError:
            answer = None  # the error of the endpoint was already reported
        region = answer.bucket_region if answer is not None else None
        if region is None:
            return None
        return Verdict(
            "failed",
            f"it is in {region}, but requests go to {self._region}",
            f"set AWS_REGION={region}, or storage_options={{'region': '{region}'}}",
            {"region": region},
        )

    def clock(self) -> Verdict:
        """Compare the server's clock with this machine's."""
        if "clock" in self.access.verdicts:
            return self.access.verdicts["clock"]
        try:
            answer = ask_server(self._spec)
        except errors.DcpObjstoreError as error:
            return Verdict("not made", f"the server's clock could not be read: {error.message}")
        ahead = answer.ahead_seconds if answer is not None else None
        if ahead is None:
            return Verdict("not made", "the server does not send its time")
        off = abs(ahead)
        details = {"server_ahead_seconds": round(ahead, 1)}
        by = f"{timedelta(seconds=round(off))} {'behind' if ahead > 0 else 'ahead of'}"
        text = f"this machine's clock is {by} the server's"
        advice = "set this machine's clock with NTP, or check the server's clock"
        if off >= _SKEW_REFUSED_SECONDS:
            more = "; a server refuses signed requests from 15 minutes on"
            return Verdict("failed", text + more, advice, details)
        if off >= _SKEW_WARNED_SECONDS:
            return Verdict("warning", text, advice, details)
        return Verdict("ok", "this machine's clock agrees with the server's", details=details)


def lifecycle(uploads: Callable[[], S3Uploads], url: StoreUrl) -> Verdict:
    """Look for a rule of the bucket that removes unfinished uploads."""
    prefix = f"{url.prefix}/" if url.prefix else ""
    if url.scheme == "gs":
        rule = shlex.quote(lifecycle_configuration("gs", prefix))
        return Verdict(
            "not made",
            "the rules of the bucket cannot be read here; one should remove unfinished uploads",
            f"`echo {rule} > rules.json` and `gcloud storage buckets update gs://{url.bucket}"
            " --lifecycle-file=rules.json` replace all its rules by one that does",
        )
    rules = uploads().lifecycle_rules()
    days = covering_days(rules, prefix)
    if days is None:
        rule = shlex.quote(lifecycle_configuration("s3", prefix, rules))
        return Verdict(
            "warning",
            "no rule of the bucket removes unfinished uploads, which are billed but invisible",
            f"`aws s3api put-bucket-lifecycle-configuration --bucket {url.bucket}"
            f" --lifecycle-configuration {rule}` adds one, and keeps its other rules",
        )
    return Verdict(
        "ok",
        f"the bucket removes unfinished uploads after {counted(days, 'day')}",
        details={"days": days},
    )


def versioning(uploads: S3Uploads) -> Verdict:
    """Look whether the bucket keeps old versions of objects."""
    state = (uploads.versioning() or "off").lower()
    details = {"state": state}
    if state == "enabled":
        return Verdict(
            "warning",
            "on: deleted or overwritten objects stay as old versions, and are billed",
            "add a lifecycle rule with NoncurrentVersionExpiration",
            details,
        )
    return Verdict("ok", f"{state}: deleted objects are gone", details=details)


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
        return Verdict(
            "warning",
            f"{len(old)} older than a day ({size_text(old_bytes)}), billed but not visible",
            f"`dcp-objstore sweep {shlex.quote(str(url))} --yes` removes those of saves",
            details,
        )
    young = f"{len(listed)} of the last day ({size_text(all_bytes)}), perhaps of running saves"
    return Verdict("ok", young if listed else "none below the URL", details=details)


def _who(identity: Identity | None) -> tuple[str, dict[str, object]]:
    if identity is None:
        return "in use; this store does not show whose they are", {}
    details: dict[str, object] = {
        "source": identity.source,
        "access_key": identity.access_key,
        "account": identity.account,
    }
    if identity.source == "anonymous":
        return "anonymous", details
    named = " ".join(part for part in (identity.account, identity.access_key) if part)
    text = f"{named or 'unnamed'}, from {identity.source}"
    if identity.account is None and identity.unknown and not identity.access_key:
        text += f" ({identity.unknown})"
    return text, details
