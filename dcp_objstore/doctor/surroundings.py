"""Checks apart from objects: credentials, the server and its clock, the bucket and its rules."""

from __future__ import annotations

import importlib.metadata
import platform
import shlex
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from dcp_objstore.doctor.findings import Finding, failed, summary
from dcp_objstore.errors import (
    BucketNotFoundError,
    ConfigError,
    CorruptDataError,
    CredentialsError,
    DcpObjstoreError,
    ObjectNotFoundError,
    PermissionDeniedError,
    StoreUnavailableError,
    UnsupportedError,
)
from dcp_objstore.observe.report import size_text
from dcp_objstore.stores.diagnosis import Identity, ask_server, identify, named_server
from dcp_objstore.stores.obstore.errors import http_code
from dcp_objstore.stores.ranges import read_range
from dcp_objstore.stores.s3.errors import code_of
from dcp_objstore.stores.uploads.lifecycle import LIFECYCLE_DAYS, covering_days
from dcp_objstore.stores.uploads.s3 import S3Uploads

if TYPE_CHECKING:
    from dcp_objstore.stores.spec import StoreSpec

_PACKAGES = ("dcp-objstore", "torch", "obstore", "boto3")
_FILESYSTEMS = {"s3": ("fsspec", "s3fs"), "gs": ("fsspec", "gcsfs")}
# AWS refuses requests from a clock that is 15 minutes off ("RequestTimeTooSkewed").
_SKEW_REFUSED_SECONDS = 15 * 60
_SKEW_WARNED_SECONDS = 60
# No save takes longer, so an older upload will hardly be finished.
_OLD = timedelta(hours=24)
_LOCAL = ("file", "memory")
_OTHER_TOOLS = {
    "s3": "`aws sts get-caller-identity` shows what other tools find on this machine",
    "gs": "`gcloud auth list` shows what other tools find on this machine",
    "az": "`az account show` shows what other tools find on this machine",
}
_OLD_VERSIONS = {
    "s3": "add a lifecycle rule with NoncurrentVersionExpiration",
    "gs": "add a lifecycle rule that deletes versions by daysSinceNoncurrentTime",
}
# A week, according to Azure's documentation of "Put Block". Listing such blocks takes a request
# that obstore neither makes nor signs.
_AZURE_RULES = (
    Finding(
        "lifecycle",
        "ok",
        "Azure removes the blocks of an unfinished upload a week after the last block, so no rule"
        " is needed",
        details={"days": 7},
    ),
    Finding(
        "versioning",
        "not made",
        "it is a setting of the account, which cannot be read with the rights to a container",
        "`az storage account blob-service-properties show` shows it",
    ),
    Finding(
        "unfinished uploads",
        "not applicable",
        "Azure has no uploads that can be listed or aborted; uncommitted blocks are not visible,"
        " but are billed, and removed after a week",
    ),
)
_NO_CODE = "its answer for an absent object does not have the error code of a store"
_NO_STORE = "check that this is the store that you mean, not a web server or proxy"
_ANSWERS_ALL = (
    "it sends data for an object that does not exist, so it is a web server or a proxy, not a store"
)
_ABSENT = ".doctor-asks-for-nothing"
# The time-out of the first answer: a server that accepts connections but stays silent is no store.
_PATIENCE_SECONDS = 10.0


def versions(spec: StoreSpec) -> Finding:
    """Return the versions of this library and its main dependencies, without importing them."""
    found: dict[str, object] = {"python": platform.python_version()}
    carriers = _FILESYSTEMS.get(spec.parsed.scheme, ("fsspec",)) if _over_fsspec(spec) else ()
    for name in (*_PACKAGES, *carriers):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    shown = [f"{name} {version or 'is not installed'}" for name, version in found.items()]
    return Finding("versions", "ok", ", ".join(shown), details=found)


def _over_fsspec(spec: StoreSpec) -> bool:
    """Whether fsspec carries the requests."""
    own = spec.parsed.scheme in (*_LOCAL, *_OTHER_TOOLS) and "fs" not in spec.storage_options
    return spec.config.transport == "fsspec" or not own


class Surroundings:
    """The checks of credentials, server, bucket and bucket rules.

    Attributes:
        blocked: why no other request can be made to the store; None if requests can be made.
    """

    def __init__(self, spec: StoreSpec) -> None:
        self._spec = spec
        self._url = spec.parsed
        self.blocked: str | None = None
        self._unreachable = False
        self._region: str | None = None

    def access(self) -> Iterator[Finding]:
        """Check credentials, endpoint, bucket and clock."""
        if self._url.scheme in _LOCAL:
            for check in ("credentials", "endpoint", "bucket", "clock"):
                yield Finding(check, "not applicable", f"{self._url.scheme}:// does not have this")
            return
        try:
            identity = identify(self._spec)
        except ConfigError:
            identity = None  # the first request fails alike
        except DcpObjstoreError as error:
            shown = _OTHER_TOOLS.get(self._url.scheme, "")
            yield replace(failed("credentials", error, self._url), advice=shown)
            self.blocked = "there are no credentials"
            for check in ("endpoint", "bucket", "clock"):
                yield Finding(check, "not made", self.blocked)
            return
        self._region = identity.region if identity is not None else None
        yield from self._first_answer(identity)
        yield self._clock()

    def _first_answer(self, identity: Identity | None) -> Iterator[Finding]:
        """Check credentials, endpoint and bucket with one request."""
        error, a_store = self._ask()
        who, details = _who(identity)
        where, endpoint = self._where()
        known = Finding("credentials", "ok", who, details=details)
        answered = Finding("endpoint", "ok", where, details=endpoint)
        strange = Finding("endpoint", "warning", f"{where}: {_NO_CODE}", _NO_STORE, endpoint)
        if error is None and a_store:
            bucket = Finding("bucket", "ok", f"the bucket {self._url.bucket} exists")
            yield from (known, answered, bucket)
        elif error is None:
            text = "the answer does not show whether the bucket exists"
            yield from (known, strange, Finding("bucket", "not made", text))
        elif isinstance(error, CredentialsError):
            self.blocked = "the store does not accept the credentials"
            advice = failed("credentials", error, self._url).advice
            text = f"{who}: {summary(error)}"
            yield Finding("credentials", "failed", text, advice, details)
            yield from (answered, Finding("bucket", "not made", self.blocked))
        elif isinstance(error, BucketNotFoundError):
            self.blocked = "the bucket does not exist"
            missing = failed("bucket", error, self._url)
            yield from (known, answered if a_store else strange, missing)
        else:
            self._unreachable = True
            self.blocked = "the endpoint does not answer like a store"
            if isinstance(error, StoreUnavailableError):
                self.blocked = "the endpoint does not answer"
            elsewhere = self._right_region() if isinstance(error, ConfigError) else None
            if elsewhere is not None:
                self.blocked = "the bucket is in another region"
            yield Finding("credentials", "not made", f"{who}; {self.blocked}", details=details)
            if elsewhere is not None:
                yield from (answered, elsewhere)
            else:
                yield failed("endpoint", error, self._url)
                yield Finding("bucket", "not made", self.blocked)

    def _ask(self) -> tuple[DcpObjstoreError | None, bool]:
        """Return what is wrong, if anything, and whether the answer is like that of a store."""
        patience = min(_PATIENCE_SECONDS, self._spec.config.request_timeout_seconds)
        hasty = replace(self._spec.config, request_timeout_seconds=patience, max_retries=0)
        try:
            store = replace(self._spec, config=hasty).open()
            if self._url.scheme not in _OTHER_TOOLS:
                store.head(_ABSENT)
            else:
                read_range(store, _ABSENT, 0, 1)  # the answer to a HEAD has no body to hold a code
        except (ObjectNotFoundError, PermissionDeniedError) as error:
            # Without the right to list, a store answers "denied" for absent objects as well. The
            # next checks report that.
            return None, self._has_code(error)
        except BucketNotFoundError as error:
            return error, self._has_code(error)
        except CorruptDataError:
            pass  # the answer is not the requested byte
        except DcpObjstoreError as error:
            return error, True
        return ConfigError(_ANSWERS_ALL), False

    def _has_code(self, error: DcpObjstoreError) -> bool:
        """Whether an error has a store's error code; True if the transport does not show codes."""
        scheme = self._url.scheme
        if scheme not in _OTHER_TOOLS or (scheme != "s3" and _over_fsspec(self._spec)):
            return True
        cause = error.__cause__
        code = "" if cause is None else http_code(cause)[1] or code_of(cause)
        return bool(code) and not code.isdigit()

    def _where(self) -> tuple[str, dict[str, object]]:
        try:
            endpoint = named_server(self._spec)
        except DcpObjstoreError:
            endpoint = None  # the request before has shown what is wrong
        shown = endpoint or {"s3": "AWS", "gs": "Google"}.get(self._url.scheme, "the provider")
        region = f", region {self._region}" if self._region else ""
        return f"{shown}{region}", {"endpoint_url": endpoint, "region": self._region}

    def _right_region(self) -> Finding | None:
        """Return a finding with the bucket's true region, if AWS names it."""
        try:
            answer = ask_server(self._spec)
        except DcpObjstoreError:
            answer = None  # the error of the endpoint was already reported
        region = answer.bucket_region if answer is not None else None
        if region is None:
            return None
        return Finding(
            "bucket",
            "failed",
            f"it is in {region}, but requests go to {self._region}",
            f"set AWS_REGION={region}, or storage_options={{'region': '{region}'}}",
            {"region": region},
        )

    def _clock(self) -> Finding:
        if self._unreachable:
            return Finding("clock", "not made", str(self.blocked))
        try:
            answer = ask_server(self._spec)
        except DcpObjstoreError as error:
            return Finding(
                "clock", "not made", f"the server's clock could not be read: {error.message}"
            )
        ahead = answer.ahead_seconds if answer is not None else None
        if ahead is None:
            return Finding("clock", "not made", "the server does not send its time")
        off = abs(ahead)
        details = {"server_ahead_seconds": round(ahead, 1)}
        text = f"this machine's clock is {_duration(off)} {'behind' if ahead > 0 else 'ahead of'}"
        text += " the server's"
        advice = "set this machine's clock with NTP, or check the server's clock"
        if off >= _SKEW_REFUSED_SECONDS:
            more = "; a server refuses signed requests from 15 minutes on"
            return Finding("clock", "failed", text + more, advice, details)
        if off >= _SKEW_WARNED_SECONDS:
            return Finding("clock", "warning", text, advice, details)
        return Finding(
            "clock", "ok", "this machine's clock agrees with the server's", details=details
        )

    def rules(self, opened: Callable[[], S3Uploads]) -> Iterator[Finding]:
        """Check the bucket's lifecycle rule, its versioning, and unfinished uploads below the URL.

        Args:
            opened: callable that returns the uploads below the URL, or raises as
                `open_bucket_uploads` does.
        """
        if self._url.scheme == "az":
            yield from _AZURE_RULES
            return
        checks = (
            ("lifecycle", self._lifecycle),
            ("versioning", self._versioning),
            ("unfinished uploads", self._uploads),
        )
        for name, check in checks:
            try:
                yield check(opened())
            except UnsupportedError as error:
                missing = self._url.scheme in _LOCAL
                yield Finding(name, "not applicable" if missing else "not made", error.message)
            except PermissionDeniedError as error:
                advice = failed(name, error, self._url).advice
                yield Finding(
                    name, "not made", "these credentials do not have the right to read it", advice
                )
            except DcpObjstoreError as error:
                yield Finding(name, "not made", error.message)

    def _lifecycle(self, uploads: S3Uploads) -> Finding:
        days = covering_days(uploads.lifecycle_rules(), uploads.prefix)
        if days is None:
            return Finding(
                "lifecycle",
                "warning",
                "no rule of the bucket removes unfinished uploads, which are billed but invisible",
                f"add a rule that aborts them after {LIFECYCLE_DAYS} days: `dcp-objstore gc"
                f" {shlex.quote(str(self._url))}` prints the command",
            )
        return Finding(
            "lifecycle",
            "ok",
            f"the bucket removes unfinished uploads after {days} day{'' if days == 1 else 's'}",
            details={"days": days},
        )

    def _versioning(self, uploads: S3Uploads) -> Finding:
        state = (uploads.versioning() or "off").lower()
        details = {"state": state}
        if state == "enabled":
            return Finding(
                "versioning",
                "warning",
                "on: deleted or overwritten objects stay as old versions, and are billed",
                _OLD_VERSIONS.get(self._url.scheme, ""),
                details,
            )
        return Finding("versioning", "ok", f"{state}: deleted objects are gone", details=details)

    def _uploads(self, uploads: S3Uploads) -> Finding:
        found = uploads.list()
        old = [one for one in found if datetime.now(UTC) - one.initiated > _OLD]
        all_bytes, old_bytes = (sum(one.size_bytes for one in some) for some in (found, old))
        details = {
            "uploads": len(found),
            "bytes": all_bytes,
            "old_uploads": len(old),
            "old_bytes": old_bytes,
        }
        name = "unfinished uploads"
        if old:
            return Finding(
                name,
                "warning",
                f"{len(old)} older than a day ({size_text(old_bytes)}), billed but not visible",
                f"`dcp-objstore gc {shlex.quote(str(self._url))} --yes` removes those of saves",
                details,
            )
        young = f"{len(found)} of the last day ({size_text(all_bytes)}), perhaps of running saves"
        return Finding(name, "ok", young if found else "none below the URL", details=details)


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


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} seconds"
    if seconds < 7200:
        return f"{seconds / 60:.0f} minutes"
    return f"{seconds / 3600:.1f} hours"
