"""Multipart uploads that were neither completed nor aborted: they are unseen, and billed.

obstore has no call for them, so for S3 this goes through boto3 (extra `s3`), with the endpoint and
the credentials that obstore gets. A lifecycle rule of the bucket removes them without any sweep.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from dcp_objstore.errors import (
    ConfigError,
    CredentialsError,
    DcpObjstoreError,
    StoreUnavailableError,
    UnsupportedError,
)
from dcp_objstore.stores.options import s3_settings
from dcp_objstore.stores.translate import kind_of_answer

if TYPE_CHECKING:
    from dcp_objstore.stores.local_uploads import LocalUploads
    from dcp_objstore.stores.options import S3Settings
    from dcp_objstore.stores.spec import StoreSpec

LIFECYCLE_DAYS: Final = 2
_RULE_ID: Final = "dcp-objstore-incomplete-uploads"
_GONE: Final = "NoSuchUpload"
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

    def __init__(self, client: Any, bucket: str, root: str, extra: Mapping[str, str]) -> None:
        self._client = client
        self._bucket = bucket
        self._root = root
        self._extra = extra

    def below(self, prefix: str) -> S3Uploads:
        """The same, of a root further down; an empty prefix is this one."""
        root = f"{self._root}{prefix}/" if prefix else self._root
        return S3Uploads(self._client, self._bucket, root, self._extra)

    def list(self) -> list[Upload]:
        """See `Uploads`. One request per 1000 uploads, and one per upload for its parts.

        Raises:
            As every verb of `ObjectStore`; UnsupportedError if the server has no such call.
        """
        with _errors(self._url):
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
            if _code(error) != _GONE:  # completed or aborted since it was listed
                raise
        key = entry["Key"].removeprefix(self._root)
        return Upload(key, entry["UploadId"], entry["Initiated"], size_bytes)

    def abort(self, upload: Upload) -> None:
        """See `Uploads`."""
        with _errors(self._url):
            try:
                self._client.abort_multipart_upload(
                    Bucket=self._bucket,
                    Key=self._root + upload.key,
                    UploadId=upload.upload_id,
                    **self._extra,
                )
            except self._client.exceptions.ClientError as error:
                if _code(error) != _GONE:
                    raise

    def lifecycle_rules(self) -> Sequence[Mapping[str, Any]]:
        """The bucket's lifecycle rules, as AWS describes them; none is an empty sequence.

        Raises:
            As `list`.
        """
        with _errors(self._url):
            try:
                answer = self._client.get_bucket_lifecycle_configuration(Bucket=self._bucket)
            except self._client.exceptions.ClientError as error:
                if _code(error) != _NO_RULES:
                    raise
                return ()
            return tuple(answer.get("Rules", ()))

    @property
    def prefix(self) -> str:
        """What all keys start with, with a slash at its end; empty for a whole bucket."""
        return self._root

    @property
    def _url(self) -> str:
        return f"s3://{self._bucket}/{self._root}".rstrip("/")


def open_uploads(spec: StoreSpec) -> S3Uploads | LocalUploads:
    """Look at the multipart uploads below a URL; on `file://` at temporary objects.

    Raises:
        UnsupportedError: neither S3 nor `file://`, or boto3 is not installed; says what to do
            instead.
        ConfigError, CredentialsError: as for the store.
    """
    url = spec.parsed
    if url.scheme == "file":
        from dcp_objstore.stores.local_uploads import LocalUploads

        return LocalUploads(Path(url.prefix))
    if url.scheme == "memory":
        raise UnsupportedError("memory:// has no multipart uploads")
    if url.scheme != "s3":
        raise UnsupportedError(
            f"unfinished uploads to {url.scheme}:// cannot be listed; a lifecycle rule of the"
            " bucket removes them"
        )
    if importlib.util.find_spec("boto3") is None:
        raise UnsupportedError(
            "boto3 is not installed, which lists unfinished uploads: pip install 'dcp-objstore[s3]'"
        )
    settings = s3_settings(spec.storage_options or {})
    with _errors(spec.url):
        client = _client(spec, settings)
    extra = {"RequestPayer": "requester"} if settings.requester_pays else {}
    return S3Uploads(client, url.bucket, f"{url.prefix}/" if url.prefix else "", extra)


def _client(spec: StoreSpec, settings: S3Settings) -> Any:
    import boto3
    import botocore
    from botocore.config import Config

    endpoint: str | None = getattr(spec.open(), "endpoint_url", None)
    # As in `clients`.
    virtual = settings.addressing_style == "virtual" or (
        settings.addressing_style in (None, "auto")
        and endpoint is None
        and "." not in spec.parsed.bucket
    )
    session = boto3.Session(
        aws_access_key_id=settings.key,
        aws_secret_access_key=settings.secret,
        aws_session_token=settings.token,
        profile_name=settings.profile,
        region_name=settings.region,
    )
    config = Config(
        s3={"addressing_style": "virtual" if virtual else "path"},
        connect_timeout=spec.config.connect_timeout_seconds,
        read_timeout=spec.config.request_timeout_seconds,
        retries={"mode": "standard", "total_max_attempts": 1 + spec.config.max_retries},
        **({"signature_version": botocore.UNSIGNED} if settings.anon else {}),
    )
    return session.client(
        "s3",
        endpoint_url=endpoint,
        region_name=session.region_name or "us-east-1",
        verify=settings.verify,
        config=config,
    )


def covering_days(rules: Sequence[Mapping[str, Any]], prefix: str) -> int | None:
    """After how many days the bucket's rules remove unfinished uploads below a prefix, or None."""
    days = [
        rule["AbortIncompleteMultipartUpload"]["DaysAfterInitiation"]
        for rule in rules
        if rule.get("Status") == "Enabled"
        and "DaysAfterInitiation" in rule.get("AbortIncompleteMultipartUpload", {})
        and prefix.startswith(_rule_prefix(rule))
    ]
    return min(days, default=None)


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
        rules: those that the bucket has (S3), which are kept.
        days: after the upload was begun. It must be longer than the longest save.
    """
    if scheme == "gs":
        condition: dict[str, object] = {"age": days}
        if prefix:
            condition["matchesPrefix"] = [prefix]
        action = {"type": "AbortIncompleteMultipartUpload"}
        return json.dumps({"rule": [{"action": action, "condition": condition}]})
    ours = {
        "ID": _RULE_ID,
        "Status": "Enabled",
        "Filter": {"Prefix": prefix},
        "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": days},
    }
    others = [rule for rule in rules if rule.get("ID") != _RULE_ID]
    return json.dumps({"Rules": [*others, ours]}, default=str)


@contextmanager
def _errors(url: str) -> Iterator[None]:
    """Errors of boto3 as ours, by type and code."""
    from botocore import exceptions as boto

    try:
        yield
    except DcpObjstoreError as error:
        error.at(url=url)
        raise
    except boto.ClientError as error:
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        kind = kind_of_answer(status, _code(error)) or DcpObjstoreError
        raise kind(f"{error}", url=url) from error
    except (
        boto.CredentialRetrievalError,
        boto.NoCredentialsError,
        boto.PartialCredentialsError,
        boto.TokenRetrievalError,
    ) as error:
        raise CredentialsError(f"{error}", url=url) from error
    except (boto.HTTPClientError, boto.ConnectionError) as error:
        raise StoreUnavailableError(f"{error}", url=url) from error
    except boto.BotoCoreError as error:
        raise ConfigError(f"{error}", url=url) from error


def _code(error: Any) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))
