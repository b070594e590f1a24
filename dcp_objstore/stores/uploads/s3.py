"""Unfinished uploads to S3, and what the bucket does by itself: lifecycle rules and versioning.

obstore has no calls for these, so they go through boto3 (extra `s3`), with the endpoint and the
credentials that obstore gets. `uploads.gcs` has what differs on GCS.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, Literal, cast

from dcp_objstore.errors import DcpObjstoreError, UnsupportedError
from dcp_objstore.stores.protocol import UnfinishedUpload
from dcp_objstore.stores.s3.errors import code_of, is_upload_gone, translate_botocore

if TYPE_CHECKING:
    from typing import Self


_NO_RULES: Final = "NoSuchLifecycleConfiguration"


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

    def list(self) -> list[UnfinishedUpload]:
        """See `Uploads`. One request per 1000 uploads, and one per upload for its parts.

        Raises:
            As every verb of `ObjectStore`; UnsupportedError if the server has no such call.
        """
        with boto_errors(self._url):
            pages = self._client.get_paginator("list_multipart_uploads").paginate(
                Bucket=self._bucket, Prefix=self._root, **self._extra
            )
            # Some servers ignore the prefix.
            return [
                self._described(entry)
                for page in pages
                for entry in page.get("Uploads", ())
                if entry["Key"].startswith(self._root)
            ]

    def _described(self, entry: Mapping[str, Any]) -> UnfinishedUpload:
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
        return UnfinishedUpload(key, entry["UploadId"], entry["Initiated"], size_bytes)

    def abort(self, upload: UnfinishedUpload) -> None:
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


@contextmanager
def boto_errors(url: str) -> Iterator[None]:
    """Translate errors of boto3, and say in them which URL they are about."""
    try:
        yield
    except DcpObjstoreError as error:
        error.at(url=url)
        raise
    except Exception as error:
        raise translate_botocore(error).at(url=url) from error
