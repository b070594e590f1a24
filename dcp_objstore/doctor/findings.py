"""`Finding`: the result of one check as data, and what an error means for a check."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from dcp_objstore import errors
from dcp_objstore.stores.errors import advice_on
from dcp_objstore.stores.obstore.errors import answer_of

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


_NO_STORE: Final = (
    "check that this is the server that you mean; if it is, it cannot be used as a store"
)
_ADVICE: Final[Sequence[tuple[type[errors.DcpObjstoreError], str]]] = (
    (
        errors.CredentialsError,
        "check that key and secret belong together and to this endpoint, and have not expired",
    ),
    (
        errors.CorruptDataError,
        "use a store, and a network path to it, that answers range requests with those ranges",
    ),
    (errors.UnsupportedError, _NO_STORE),
    (errors.ObjectNotFoundError, _NO_STORE),
    (
        errors.StoreUnavailableError,
        "try again; if that does not help, check the server's log and proxies on the way",
    ),
    (errors.DcpObjstoreError, "check the server's log; --json shows the whole message"),
)

_NAME_THE_SERVER: Final[Mapping[str, str]] = {
    "s3": "set AWS_ENDPOINT_URL, AWS_REGION or storage_options so that they name the server",
    "gs": "check storage_options['endpoint_url'] and GOOGLE_BASE_URL: they name the server; without"
    " them it is Google's",
    "az": "check storage_options['account_name'] and ['endpoint_url'], AZURE_STORAGE_ACCOUNT_NAME"
    " and any connection string: they name the server",
}

# The right that each check needs; `absent`: to be told that there is no such object. S3: "Actions,
# resources, and condition keys for Amazon S3"; GCS: "IAM permissions for Cloud Storage"; Azure:
# "Permissions for calling data operations".
_BLOBS: Final = "Microsoft.Storage/storageAccounts/blobServices/containers/blobs"
RIGHTS: Final[Mapping[str, Mapping[str, str]]] = {
    "s3": {
        "put": "s3:PutObject",
        "list": "s3:ListBucket",
        "absent": "s3:ListBucket",
        "read": "s3:GetObject",
        "multipart": "s3:PutObject",
        "abort": "s3:AbortMultipartUpload",
        "conditional put": "s3:PutObject and s3:GetObject",
        "delete": "s3:DeleteObject",
        "lifecycle": "s3:GetLifecycleConfiguration",
        "versioning": "s3:GetBucketVersioning",
        "unfinished uploads": "s3:ListBucketMultipartUploads and s3:ListMultipartUploadParts",
    },
    "gs": {
        "put": "storage.objects.create",
        "list": "storage.objects.list",
        "absent": "storage.objects.list",
        "read": "storage.objects.get",
        "multipart": "storage.multipartUploads.create and storage.objects.create",
        "abort": "storage.multipartUploads.abort",
        "conditional put": "storage.objects.create, .get and .delete (to replace an object)",
        "delete": "storage.objects.delete",
    },
    "az": {
        "put": f"{_BLOBS}/write",
        "list": f"{_BLOBS}/read",
        "read": f"{_BLOBS}/read",
        "multipart": f"{_BLOBS}/write",
        "conditional put": f"{_BLOBS}/write",
        "delete": f"{_BLOBS}/delete",
    },
}
# The verdicts on Azure that take no request. The week is that of its documentation of "Put Block";
# to list such blocks takes a request that obstore neither makes nor signs.
_WITHOUT_RULES: Final[Mapping[tuple[str, str], Verdict]] = {
    ("az", "lifecycle"): Verdict(
        "ok",
        "Azure removes the blocks of an unfinished upload a week after the last block, so no rule"
        " is needed",
        details={"days": 7},
    ),
    ("az", "versioning"): Verdict(
        "not made",
        "it is a setting of the account, which cannot be read with the rights to a container",
        "`az storage account blob-service-properties show` shows it",
    ),
    ("az", "unfinished uploads"): Verdict(
        "not applicable",
        "Azure has no uploads that can be listed or aborted; uncommitted blocks are not visible,"
        " but are billed, and removed after a week",
    ),
}
# A longer text, such as a proxy's web page, is cut off.
_LONGEST_TEXT: Final = 400
# Rights to the bucket itself, not to the objects in it.
_OF_BUCKET: Final = (
    "s3:ListBucket",
    "s3:ListBucketMultipartUploads",
    "s3:GetLifecycleConfiguration",
    "s3:GetBucketVersioning",
)


def failure(check: str, error: errors.DcpObjstoreError, url: StoreUrl) -> Verdict:
    """Return the verdict of a check that ended with an error."""
    details = {"error": type(error).__name__, "message": error.message}
    return Verdict("failed", summary(error), advice_for(check, error, url), details)


def unread(check: str, error: errors.DcpObjstoreError, url: StoreUrl) -> Verdict:
    """Return the verdict of a check of the bucket's rules that ended with an error.

    No job needs to read them, so this is not a failure.
    """
    if isinstance(error, errors.UnsupportedError) and (url.scheme, check) in _WITHOUT_RULES:
        return _WITHOUT_RULES[url.scheme, check]
    if isinstance(error, errors.UnsupportedError) and url.scheme in ("file", "memory"):
        return Verdict("not applicable", error.message)
    if isinstance(error, errors.PermissionDeniedError):
        text = "these credentials do not have the right to read it"
        return Verdict("not made", text, advice_for(check, error, url))
    return Verdict("not made", error.message)


def summary(error: errors.DcpObjstoreError) -> str:
    """Return an error's text; if the store has answered, only the meaning and that answer."""
    answer, said = answer_of(error), advice_on(type(error))
    text = f"{said}: {answer}" if answer and said else error.message
    return textwrap.shorten(text, _LONGEST_TEXT, placeholder=" …")


def advice_for(check: str, error: errors.DcpObjstoreError, url: StoreUrl) -> str:
    """Return what to do about an error."""
    if isinstance(error, errors.PermissionDeniedError):
        return _allow(check, url)
    if isinstance(error, errors.BucketNotFoundError):
        return f"create the bucket {url.bucket!r}, or check its name and the endpoint"
    if check == "endpoint":
        return _NAME_THE_SERVER.get(
            url.scheme, "check the host in the URL and storage_options: they name the server"
        )
    if url.scheme == "file" and not isinstance(
        error, errors.CorruptDataError | errors.UnsupportedError
    ):
        return (
            f"check that {url.prefix} is a folder, or that it can be created, on a disk that is"
            " mounted and has free space; or choose another folder"
        )
    return next(text for kind, text in _ADVICE if isinstance(error, kind))


def _allow(check: str, url: StoreUrl) -> str:
    right = RIGHTS.get(url.scheme, {}).get(check)
    if url.scheme == "file":
        return f"allow this user to read and write {url.prefix}, or choose another folder"
    if right is None:
        return "give the account of these credentials the right to do this"
    if url.scheme == "s3":
        below = f"{url.bucket}/{url.prefix}".rstrip("/") + "/*"
        places: dict[str, list[str]] = {}
        for action in right.split(" and "):
            places.setdefault(url.bucket if action in _OF_BUCKET else below, []).append(action)
        allowed = [f"{' and '.join(some)} on arn:aws:s3:::{it}" for it, some in places.items()]
        return f"allow {' and '.join(allowed)}"
    return f"allow {right} on the bucket {url.bucket!r} to this account"
