"""Multipart uploads that were neither completed nor aborted: they are unseen, and billed.

Beside them, what the bucket does by itself: its lifecycle rule for such uploads, and versioning,
which keeps what is deleted. obstore has no call for any of these, so for S3 this goes through
boto3 (extra `s3`), with the endpoint and the credentials that obstore gets; `gcs_uploads` has what
is different on GCS.
"""

from __future__ import annotations

import copy
import importlib.util
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, cast

from dcp_objstore.errors import DcpObjstoreError, UnsupportedError
from dcp_objstore.stores.boto3_errors import code_of, is_upload_gone, translate_boto3

if TYPE_CHECKING:
    from typing import Self

    from dcp_objstore.stores.local_uploads import LocalUploads
    from dcp_objstore.stores.spec import StoreSpec

LIFECYCLE_DAYS: Final = 2
_RULE_ID: Final = "dcp-objstore-incomplete-uploads"
_GCS_ACTION: Final = "AbortIncompleteMultipartUpload"
_NO_RULES: Final = "NoSuchLifecycleConfiguration"


@dataclass(frozen=True, slots=True)
class Upload:
    """A multipart upload that was neither completed nor aborted.

    Attributes:
        key: of the object that it would become, relative to the root that was looked below.
        upload_id: the store's.
        initiated: when it began, by the store's clock (timezone-aware).
        size_bytes: of its parts.
    """

    key: str
    upload_id: str
    initiated: datetime
    size_bytes: int


class Uploads(Protocol):
    """Looks at the multipart uploads below one root."""

    def list(self) -> Sequence[Upload]:
        """Those in progress or orphaned."""
        ...

    def abort(self, upload: Upload) -> None:
        """Remove its parts; one that has gone meanwhile is no error."""
        ...


class S3Uploads:
    """The multipart uploads below one root of an S3 bucket. Made by `open_uploads`."""

    _scheme = "s3"

    def __init__(self, client: Any, bucket: str, root: str, extra: Mapping[str, str]) -> None:
        self._client = client
        self._bucket = bucket
        self._root = root
        self._extra = extra

    def below(self, prefix: str) -> Self:
        """The same, of a root further down; an empty prefix is this one."""
        found = copy.copy(self)
        found._root = f"{self._root}{prefix}/" if prefix else self._root
        return found

    def list(self) -> list[Upload]:
        """See `Uploads`. One request per 1000 uploads, and one per upload for its parts.

        Raises:
            As every verb of `ObjectStore`; UnsupportedError if the server has no such call.
        """
        with boto_errors(self._url):
            pages = self._client.get_paginator("list_multipart_uploads").paginate(
                Bucket=self._bucket, Prefix=self._root, **self._extra
            )
            # The prefix again, for servers that do not look at it.
            return [
                self._described(entry)
                for page in pages
                for entry in page.get("Uploads", ())
                if entry["Key"].startswith(self._root)
            ]

    def _described(self, entry: Mapping[str, Any]) -> Upload:
        pages = self._client.get_paginator("list_parts").paginate(
            Bucket=self._bucket, Key=entry["Key"], UploadId=entry["UploadId"], **self._extra
        )
        size_bytes = 0
        try:
            size_bytes = sum(part["Size"] for page in pages for part in page.get("Parts", ()))
        except self._client.exceptions.ClientError as error:
            if not is_upload_gone(error):  # completed or aborted since it was listed
                raise
        key = entry["Key"].removeprefix(self._root)
        return Upload(key, entry["UploadId"], entry["Initiated"], size_bytes)

    def abort(self, upload: Upload) -> None:
        """See `Uploads`."""
        with boto_errors(self._url):
            try:
                self._client.abort_multipart_upload(
                    Bucket=self._bucket,
                    Key=self._root + upload.key,
                    UploadId=upload.upload_id,
                    **self._extra,
                )
            except self._client.exceptions.ClientError as error:
                if not is_upload_gone(error):
                    raise

    def lifecycle_rules(self) -> Sequence[Mapping[str, Any]]:
        """The bucket's lifecycle rules, as AWS describes them; none is an empty sequence.

        Raises:
            As `list`.
        """
        with boto_errors(self._url):
            try:
                answer = self._client.get_bucket_lifecycle_configuration(Bucket=self._bucket)
            except self._client.exceptions.ClientError as error:
                if code_of(error) != _NO_RULES:
                    raise
                return ()
            return tuple(answer.get("Rules", ()))

    def versioning(self) -> Literal["Enabled", "Suspended"] | None:
        """Whether the bucket keeps what is overwritten and deleted; None if it never did.

        Raises:
            As `list`.
        """
        with boto_errors(self._url):
            answer = self._client.get_bucket_versioning(Bucket=self._bucket)
        status = answer.get("Status") or None
        if status not in ("Enabled", "Suspended", None):
            raise UnsupportedError(
                f"the server calls the bucket's versioning {status!r}", url=self._url
            )
        return cast('Literal["Enabled", "Suspended"] | None', status)

    @property
    def prefix(self) -> str:
        """What all keys start with, with a slash at its end; empty for a whole bucket."""
        return self._root

    @property
    def _url(self) -> str:
        return f"{self._scheme}://{self._bucket}/{self._root}".rstrip("/")


def open_uploads(spec: StoreSpec) -> S3Uploads | LocalUploads:
    """Look at the multipart uploads below a URL; on `file://` at temporary objects.

    Raises:
        As `open_bucket_uploads`.
    """
    if spec.parsed.scheme == "file":
        from dcp_objstore.stores.local_uploads import LocalUploads

        return LocalUploads(Path(spec.parsed.prefix))
    return open_bucket_uploads(spec)


def open_bucket_uploads(spec: StoreSpec) -> S3Uploads:
    """Look at the multipart uploads below a URL, and at what the bucket does with them.

    Raises:
        UnsupportedError: it is neither S3 nor GCS, or boto3 is not installed; says what to do
            instead.
        ConfigError, CredentialsError: as for the store.
    """
    url = spec.parsed
    if url.scheme in ("file", "memory"):
        raise UnsupportedError(f"{url.scheme}:// has no multipart uploads")
    if url.scheme == "az":
        raise UnsupportedError(
            "unfinished uploads to az:// cannot be listed; Azure removes their blocks by itself, a"
            " week after the last one"
        )
    if (
        url.scheme == "gs"
        and spec.config.transport == "native"
        and "fs" not in (spec.storage_options or {})
    ):
        from dcp_objstore.stores.gcs_uploads import open_gcs_uploads

        return open_gcs_uploads(spec)
    if url.scheme != "s3":
        raise UnsupportedError(
            f"unfinished uploads to {url.scheme}:// cannot be listed; a lifecycle rule of the"
            " bucket removes them"
        )
    if importlib.util.find_spec("boto3") is None:
        raise UnsupportedError(
            "boto3 is not installed, which lists unfinished uploads: pip install 'dcp-objstore[s3]'"
        )
    with boto_errors(spec.url):
        clients = spec.boto3_clients()
        client = clients.write()
    root = f"{url.prefix}/" if url.prefix else ""
    return S3Uploads(client, url.bucket, root, clients.payer)


def incomplete_upload_rule(spec: StoreSpec) -> int | None:
    """After how many days the bucket removes unfinished uploads below a URL; None: never.

    One request (`s3:GetLifecycleConfiguration`; on GCS `storage.buckets.get`).

    Raises:
        UnsupportedError: neither S3 nor GCS, boto3 is not installed, or the server has no such
            call.
        PermissionDeniedError: common, as it takes a right that a training job does not need.
        Otherwise as every verb of `ObjectStore`.
    """
    uploads = open_bucket_uploads(spec)
    return covering_days(uploads.lifecycle_rules(), uploads.prefix)


def versioning(spec: StoreSpec) -> Literal["Enabled", "Suspended"] | None:
    """Whether the bucket keeps what is overwritten and deleted, which is then billed for ever.

    One request (`s3:GetBucketVersioning`; on GCS `storage.buckets.get`). None: it never had
    versions; on GCS: it has none now.

    Raises:
        As `incomplete_upload_rule`.
    """
    return open_bucket_uploads(spec).versioning()


def covering_days(rules: Sequence[Mapping[str, Any]], prefix: str) -> int | None:
    """After how many days the bucket's rules remove unfinished uploads below a prefix, or None.

    Args:
        rules: in the form of S3 or of GCS.
        prefix: with a slash at its end; empty for the whole bucket.
    """
    days = [rule["condition"]["age"] for rule in rules if _covers_on_gcs(rule, prefix)]
    days += [
        rule["AbortIncompleteMultipartUpload"]["DaysAfterInitiation"]
        for rule in rules
        if rule.get("Status") == "Enabled"
        and "DaysAfterInitiation" in rule.get("AbortIncompleteMultipartUpload", {})
        and prefix.startswith(_rule_prefix(rule))
    ]
    return min(days, default=None)


def _covers_on_gcs(rule: Mapping[str, Any], prefix: str) -> bool:
    """Whether a rule in the form of GCS removes all unfinished uploads below a prefix in time.

    With another condition than age and prefix it does so to some of them.
    """
    condition = rule.get("condition", {})
    if rule.get("action", {}).get("type") != _GCS_ACTION or not isinstance(
        condition.get("age"), int
    ):
        return False
    prefixes = condition.get("matchesPrefix") or [""]
    return condition.keys() <= {"age", "matchesPrefix"} and any(map(prefix.startswith, prefixes))


def _rule_prefix(rule: Mapping[str, Any]) -> str:
    """Of an S3 rule, in its old and its new form ("Elements to describe lifecycle actions")."""
    scope = rule.get("Filter", {})
    inner = scope.get("And", scope)
    return str(inner.get("Prefix", rule.get("Prefix", "")))


def lifecycle_configuration(
    scheme: str, prefix: str, rules: Sequence[Mapping[str, Any]] = (), days: int = LIFECYCLE_DAYS
) -> str:
    """The lifecycle configuration that removes unfinished uploads below a prefix, as JSON.

    Args:
        scheme: `s3`: for `aws s3api put-bucket-lifecycle-configuration`, which replaces all rules
            of the bucket; `gs`: for `gcloud storage buckets update --lifecycle-file`, as well.
        prefix: with a slash at its end; empty for the whole bucket.
        rules: those that the bucket has, which are kept.
        days: after the upload was begun. It must be longer than the longest save.
    """
    if scheme == "gs":
        condition: dict[str, object] = {"age": days}
        if prefix:
            condition["matchesPrefix"] = [prefix]
        advised = {"action": {"type": _GCS_ACTION}, "condition": condition}
        return json.dumps({"rule": [*(rule for rule in rules if rule != advised), advised]})
    ours = {
        "ID": _RULE_ID,
        "Status": "Enabled",
        "Filter": {"Prefix": prefix},
        "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": days},
    }
    others = [rule for rule in rules if rule.get("ID") != _RULE_ID]
    return json.dumps({"Rules": [*others, ours]}, default=str)


@contextmanager
def boto_errors(url: str) -> Iterator[None]:
    """Errors of boto3 as ours."""
    try:
        yield
    except DcpObjstoreError as error:
        error.at(url=url)
        raise
    except Exception as error:
        raise translate_boto3(error).at(url=url) from error
