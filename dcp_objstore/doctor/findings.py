"""`Finding`: what one check found, as data, and what to do about an error."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal

from dcp_objstore.config import MIB
from dcp_objstore.errors import (
    BucketNotFoundError,
    CorruptDataError,
    CredentialsError,
    DcpObjstoreError,
    ObjectNotFoundError,
    PermissionDeniedError,
    StoreUnavailableError,
    UnsupportedError,
)
from dcp_objstore.stores.errors import advice_on
from dcp_objstore.stores.obstore.errors import answer_of

if TYPE_CHECKING:
    from dcp_objstore.stores.urls import StoreUrl

Status = Literal["ok", "warning", "failed", "not applicable", "not made"]


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found.

    Attributes:
        check: its name; stable.
        status: `ok`; `warning`: saving and loading work, something should still be looked at;
            `failed`; `not applicable`: there is no such thing at this store; `not made`: the check
            could not be made, `text` says why.
        text: what was found, as a sentence.
        advice: what to do; empty where there is nothing.
        details: the same for programs: numbers and names, JSON values.
    """

    check: str
    status: Status
    text: str
    advice: str = ""
    details: Mapping[str, object] = field(default_factory=dict)


_NO_STORE: Final = "check that this is the server that was meant; if so, it is no fit store"
_ADVICE: Final[Sequence[tuple[type[DcpObjstoreError], str]]] = (
    (
        CredentialsError,
        "check that key and secret belong together and to this endpoint, and have not expired",
    ),
    (
        CorruptDataError,
        "use a store, and a way to it, that answers requests for ranges with those ranges",
    ),
    (UnsupportedError, _NO_STORE),
    (ObjectNotFoundError, _NO_STORE),
    (
        StoreUnavailableError,
        "try again; if it stays so, look at the server's log and at what is in between",
    ),
    (DcpObjstoreError, "look at the server's log; --json has the whole message"),
)

_NAME_THE_SERVER: Final[Mapping[str, str]] = {
    "s3": "set AWS_ENDPOINT_URL, AWS_REGION or storage_options so that they name the server",
    "gs": "check storage_options['endpoint_url'] and GOOGLE_BASE_URL: they name the server, and"
    " without them it is Google's own",
    "az": "check storage_options['account_name'] and ['endpoint_url'], AZURE_STORAGE_ACCOUNT_NAME"
    " and any connection string: they name the server",
}

# The right that each check needs. S3: "Actions, resources, and condition keys for Amazon S3";
# GCS: "IAM permissions for Cloud Storage"; Azure: "Permissions for calling data operations".
_BLOBS: Final = "Microsoft.Storage/storageAccounts/blobServices/containers/blobs"
RIGHTS: Final[Mapping[str, Mapping[str, str]]] = {
    "s3": {
        "put": "s3:PutObject",
        "list": "s3:ListBucket",
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
        "read": "storage.objects.get",
        "multipart": "storage.multipartUploads.create and storage.objects.create",
        "abort": "storage.multipartUploads.abort",
        "conditional put": "storage.objects.create, .get and .delete (to replace an object)",
        "delete": "storage.objects.delete",
        "lifecycle": "storage.buckets.get",
        "versioning": "storage.buckets.get",
        "unfinished uploads": "storage.multipartUploads.list and .listParts",
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
# A proxy's web page is told no further.
_LONGEST_TEXT: Final = 400
# Rights to the bucket itself, not to the objects in it.
_OF_BUCKET: Final = ("list", "lifecycle", "versioning", "unfinished uploads")


def failed(check: str, error: DcpObjstoreError, url: StoreUrl) -> Finding:
    """A check that ended with an error."""
    details = {"error": type(error).__name__, "message": error.message}
    return Finding(check, "failed", summary(error), advice_for(check, error, url), details)


def summary(error: DcpObjstoreError) -> str:
    """An error's text, shorter where the store has answered: its answer says it all."""
    answer, said = answer_of(error), advice_on(type(error))
    text = f"{said}: {answer}" if answer and said else error.message
    return textwrap.shorten(text, _LONGEST_TEXT, placeholder=" …")


def size_text(count_bytes: int) -> str:
    """Bytes in MiB, or GiB."""
    if count_bytes >= 1024 * MIB:
        return f"{count_bytes / (1024 * MIB):.1f} GiB"
    return f"{count_bytes / MIB:.1f} MiB"


def advice_for(check: str, error: DcpObjstoreError, url: StoreUrl) -> str:
    """What to do about an error."""
    if isinstance(error, PermissionDeniedError):
        return _allow(check, url)
    if isinstance(error, BucketNotFoundError):
        return f"make the bucket {url.bucket!r}, or check its name and the endpoint"
    if check == "endpoint":
        return _NAME_THE_SERVER.get(
            url.scheme, "check the host in the URL and storage_options: they name the server"
        )
    if url.scheme == "file" and not isinstance(error, CorruptDataError | UnsupportedError):
        return (
            f"check that {url.prefix} is a folder, or that one can be made there, on a disk that"
            " is mounted and has room; or choose another"
        )
    return next(text for kind, text in _ADVICE if isinstance(error, kind))


def _allow(check: str, url: StoreUrl) -> str:
    right = RIGHTS.get(url.scheme, {}).get(check)
    if url.scheme == "file":
        return f"allow this user to read and write {url.prefix}, or choose another folder"
    if right is None:
        return "allow this to the account of these credentials"
    if url.scheme == "s3":
        below = f"{url.bucket}/{url.prefix}".rstrip("/")
        where = f"arn:aws:s3:::{url.bucket if check in _OF_BUCKET else below + '/*'}"
        return f"allow {right} on {where}"
    return f"allow {right} on the bucket {url.bucket!r} to this account"
