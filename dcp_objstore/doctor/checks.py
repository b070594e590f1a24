"""`Check`, a line of a table of checks, and `Finding`, its result as data.

A check returns a `Verdict`, or raises; an error becomes a verdict by the table of advice.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from dcp_objstore import errors
from dcp_objstore.stores.errors import words_for

if TYPE_CHECKING:
    from dcp_objstore.stores.urls import StoreUrl

Status = Literal["ok", "warning", "failed", "not applicable", "not made"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check.

    Attributes:
        check: name of the check, which does not change between versions.
        status: `ok`; `warning`: saving and loading work, but something needs attention; `failed`;
            `not applicable`: this store has nothing to check here; `not made`: the check could not
            be made, and `text` says why.
        text: the result as a sentence.
        advice: what to do; empty if there is nothing to do.
        details: the result for programs, as JSON values: numbers and names.
    """

    check: str
    status: Status
    text: str
    advice: str = ""
    details: Mapping[str, object] = field(default_factory=dict)


class Verdict(NamedTuple):
    """A finding without the name of its check; the fields are those of `Finding`."""

    status: Status
    text: str
    advice: str = ""
    details: Mapping[str, object] = {}


def ok(text: str, **details: object) -> Verdict:
    """Return the verdict of a check that found nothing wrong."""
    return Verdict("ok", text, "", details)


def warning(text: str, advice: str, **details: object) -> Verdict:
    """Return the verdict of a check that found what needs attention."""
    return Verdict("warning", text, advice, details)


def failed(text: str, advice: str, **details: object) -> Verdict:
    """Return the verdict of a check that failed."""
    return Verdict("failed", text, advice, details)


def not_made(text: str, advice: str = "") -> Verdict:
    """Return the verdict of a check that could not be made."""
    return Verdict("not made", text, advice)


def not_applicable(text: str) -> Verdict:
    """Return the verdict of a check that has nothing to look at."""
    return Verdict("not applicable", text)


class Rights(NamedTuple):
    """The right that a request needs, by the scheme of the store; None where it has no name."""

    s3: str
    gs: str | None = None
    az: str | None = None


class Check(NamedTuple):
    """One line of a table of checks.

    Attributes:
        name: name of the check.
        kind: `access`: if it fails, no later check is made; a store without a server has none.
            `request`: what a job needs, so an error is a failure. `written`: the same, of the
            object that the check `put` has written. `rule`: the same as `request`, but no job
            needs it.
        make: the check; it returns what it found, or raises.
        rights: the rights that it needs.
    """

    name: str
    kind: Literal["access", "request", "written", "rule"]
    make: Callable[[], Verdict]
    rights: Rights | None = None


BLOBS: Final = "Microsoft.Storage/storageAccounts/blobServices/containers/blobs"
# Also for the answer that there is no such object.
TO_LIST: Final = Rights("s3:ListBucket", "storage.objects.list", f"{BLOBS}/read")
_NO_STORE: Final = (
    "check that this is the server that you mean; if it is, it cannot be used as a store"
)
_SIGNED: Final = (
    "; if it is a server that refuses unsigned bodies, storage_options={'sign_payload': True}"
)
# The advice for an error, by its kind. The first kind that fits counts, and the last fits all.
_ADVICE: Final[Mapping[type[errors.DcpObjstoreError], str]] = {
    errors.BucketNotFoundError: (
        "create the bucket {bucket!r}, or check its name and the endpoint"
    ),
    errors.CredentialsError: (
        "check that key and secret belong together and to this endpoint, and have not expired; and"
        " this machine's clock"
    ),
    errors.CorruptDataError: (
        "use a store, and a network path to it, that answers range requests with those ranges"
    ),
    errors.UnsupportedError: _NO_STORE,
    errors.ObjectNotFoundError: _NO_STORE,
    errors.StoreUnavailableError: (
        "try again; if that does not help, check the server's log and proxies on the way"
    ),
    errors.DcpObjstoreError: "check the server's log; --json shows the whole message",
}
_OF_FOLDERS: Final = (
    "check that {prefix} is a folder, or that it can be created, on a disk that is mounted and has"
    " free space; or choose another folder"
)
# What names the server, by the scheme.
_SERVER_NAMED_BY: Final = {
    "s3": "storage_options['endpoint_url'], AWS_ENDPOINT_URL and AWS_REGION",
    "gs": "storage_options['endpoint_url'] and GOOGLE_BASE_URL",
    "az": "storage_options['account_name'] and ['endpoint_url'], AZURE_STORAGE_ACCOUNT_NAME and any"
    " connection string",
}
# A longer text, such as a proxy's web page, is cut off.
_LONGEST_TEXT: Final = 400
# Rights to the bucket itself, not to the objects in it.
_OF_BUCKET: Final = (
    "s3:ListBucket",
    "s3:ListBucketMultipartUploads",
    "s3:GetLifecycleConfiguration",
)


def failure(url: StoreUrl, check: Check, error: errors.DcpObjstoreError) -> Verdict:
    """Return the verdict of a check that ended with an error.

    If the check is of kind `rule`, the verdict is that it was not made or is not applicable: no job
    needs what it asks for. The error of any other check is a failure.
    """
    if check.kind == "rule" and isinstance(error, errors.PermissionDeniedError):
        text = "these credentials do not have the right to read it"
        return not_made(text, allow(check.rights, url))
    if check.kind == "rule":
        # Only S3 has these requests, so at another store there is nothing to check. On `s3://` an
        # UnsupportedError says that boto3 or the server lacks them, so the check was not made.
        is_absent = isinstance(error, errors.UnsupportedError) and url.scheme != "s3"
        return (not_applicable if is_absent else not_made)(error.message)
    details = {"error": type(error).__name__, "message": error.message}
    return failed(_summary(error), _advice(check, error, url), **details)


def _summary(error: errors.DcpObjstoreError) -> str:
    """Return an error's text; if it begins with a known meaning, only that and the answer's code.

    Such as "the credentials do not allow this: 403 AccessDenied".
    """
    meaning, text = words_for(type(error)), error.message
    if error.code and meaning and text.startswith(meaning):
        text = f"{meaning}: {error.status} {error.code}"
    return textwrap.shorten(text, _LONGEST_TEXT, placeholder=" …")


def _advice(check: Check, error: errors.DcpObjstoreError, url: StoreUrl) -> str:
    """Return what the user should do about the error of a check."""
    if isinstance(error, errors.PermissionDeniedError):
        # Some servers refuse an unsigned body with the same answer as a missing right.
        to_sign = _SIGNED if (check.name, url.scheme) == ("put", "s3") else ""
        return allow(check.rights, url) + to_sign
    if check.name == "endpoint":
        server = _SERVER_NAMED_BY.get(url.scheme, "the host in the URL and storage_options")
        return f"check {server}: they name the server"
    if url.scheme == "file" and not isinstance(
        error, errors.CorruptDataError | errors.UnsupportedError
    ):
        return _OF_FOLDERS.format(prefix=url.prefix)
    advice = next(text for kind, text in _ADVICE.items() if isinstance(error, kind))
    return advice.format(bucket=url.bucket)


def allow(rights: Rights | None, url: StoreUrl) -> str:
    """Return what to do so that requests which need these rights are allowed.

    Such as "allow s3:ListBucket on arn:aws:s3:::bucket and s3:GetObject on arn:aws:s3:::bucket/*".
    """
    right: str | None = getattr(rights, url.scheme, None)
    if url.scheme == "file":
        return f"allow this user to read and write {url.prefix}, or choose another folder"
    if right is None:
        return "give the account of these credentials the right to do this"
    if url.scheme != "s3":
        return f"allow {right} on the bucket {url.bucket!r} to this account"
    objects = f"{url.bucket}/{url.prefix}".rstrip("/") + "/*"
    actions_on: dict[str, list[str]] = {}
    for action in right.split(" and "):
        resource = url.bucket if action in _OF_BUCKET else objects
        actions_on.setdefault(f"arn:aws:s3:::{resource}", []).append(action)
    statements = [f"{' and '.join(actions)} on {arn}" for arn, actions in actions_on.items()]
    return f"allow {' and '.join(statements)}"
