"""Unfinished uploads to S3, and the lifecycle rules by which a bucket removes objects by itself.

An unfinished upload is a multipart upload that was neither completed nor aborted. Its parts take
space, and listings of objects do not show them.

obstore has no calls for these, so they go through boto3 (extra `s3`), with the endpoint and the
credentials that obstore gets.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, Self

from dcp_objstore.contexts import contextmanager
from dcp_objstore.errors import DcpObjstoreError
from dcp_objstore.stores.protocol import UnfinishedUpload
from dcp_objstore.stores.retries import Requests
from dcp_objstore.stores.s3.errors import code_of, is_upload_gone, judge_botocore
from dcp_objstore.stores.s3.store import pages

_RULES: Final = "get_bucket_lifecycle_configuration"  # the one operation without a payer
_NO_RULES: Final = "NoSuchLifecycleConfiguration"


class S3Uploads:
    """The multipart uploads below one root of an S3 bucket. Made by `open_uploads`.

    Args:
        client: a client of boto3 that sends each request once.
        requests: the requests to the bucket, which send again what failed.
        bucket: the name of the bucket.
        root: the beginning of the keys, with a slash at its end; empty for the whole bucket.
        payer: the arguments that say that the caller pays.
    """

    def __init__(
        self, client: Any, requests: Requests, bucket: str, root: str, payer: Mapping[str, str]
    ) -> None:
        self._client = client
        self._requests = requests
        self._bucket = bucket
        self._root = root
        self._payer = payer

    def below(self, prefix: str) -> Self:
        """Return the uploads of a root further down; an empty prefix is this one."""
        uploads = copy.copy(self)
        uploads._root = f"{self._root}{prefix}/" if prefix else self._root
        return uploads

    def list(self) -> list[UnfinishedUpload]:
        """Return the unfinished uploads: a request per 1000, and one for the parts of each.

        Raises:
            As every verb of `ObjectStore`; UnsupportedError if the server has no such call.
        """
        with boto_errors(self._url):
            marks = {"KeyMarker": "NextKeyMarker", "UploadIdMarker": "NextUploadIdMarker"}
            ask = partial(self._ask, "list_multipart_uploads")
            # Some servers ignore the prefix and list the uploads to the whole bucket.
            return [
                self._with_size(entry)
                for page in pages(ask, {"Prefix": self._root}, marks)
                for entry in page.get("Uploads", ())
                if entry["Key"].startswith(self._root)
            ]

    def _with_size(self, entry: Mapping[str, Any]) -> UnfinishedUpload:
        """Return the upload of an entry of the listing, with the size of its parts."""
        marks = {"PartNumberMarker": "NextPartNumberMarker"}
        arguments = {"Key": entry["Key"], "UploadId": entry["UploadId"]}
        of_parts = pages(partial(self._ask, "list_parts"), arguments, marks)
        size_bytes = 0
        try:
            size_bytes = sum(part["Size"] for page in of_parts for part in page.get("Parts", ()))
        except self._client.exceptions.ClientError as error:
            if not is_upload_gone(error):  # completed or aborted since it was listed
                raise
        key = entry["Key"].removeprefix(self._root)
        return UnfinishedUpload(key, entry["UploadId"], entry["Initiated"], size_bytes)

    def abort(self, upload: UnfinishedUpload) -> None:
        """Remove the parts of an upload. No error is raised if it is already gone."""
        with boto_errors(self._url):
            try:
                arguments = {"Key": self._root + upload.key, "UploadId": upload.upload_id}
                self._ask("abort_multipart_upload", arguments)
            except self._client.exceptions.ClientError as error:
                if not is_upload_gone(error):
                    raise

    def lifecycle_rules(self) -> Sequence[Mapping[str, Any]]:
        """The bucket's lifecycle rules, in the form that AWS documents; empty if it has none.

        Raises:
            As `list`.
        """
        with boto_errors(self._url):
            try:
                answer = self._ask(_RULES, {})
            except self._client.exceptions.ClientError as error:
                if code_of(error) != _NO_RULES:  # S3 refuses the request if there are no rules
                    raise
                return ()
            return tuple(answer.get("Rules", ()))

    def _ask(self, operation: str, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Send the request of an operation, again where that may help; return the answer.

        Raises:
            ClientError: the store refused it; the caller tells what that means.
        """
        payer = {} if operation == _RULES else self._payer  # only `_RULES` does not take it
        # `tries` wants a verb of `ObjectStore`. These requests are as small as those of `list`.
        tries = self._requests.tries("list", arguments.get("Key", ""))
        call = getattr(self._client, operation)
        send = partial(call, Bucket=self._bucket, **arguments, **payer)
        answer: Mapping[str, Any] = self._requests.run(tries, send)
        return answer

    @property
    def _url(self) -> str:
        return f"s3://{self._bucket}/{self._root}".rstrip("/")


@contextmanager
def boto_errors(url: str) -> Iterator[None]:
    """Translate errors of boto3, and say in them which URL they are about."""
    try:
        yield
    except DcpObjstoreError as error:
        error.at(url=url)
        raise
    except Exception as error:
        raise judge_botocore(error).error.at(url=url) from error
