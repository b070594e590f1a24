"""Unfinished uploads to GCS, and what the bucket does with them, read with an access token.

GCS's XML API has the calls of S3 for uploads ("XML API multipart uploads"), so boto3 sends them: it
signs nothing, and each request carries the token. The bucket's lifecycle rules and versioning have
another form than S3's and come from the JSON API ("Buckets: get").
"""

from __future__ import annotations

import http.client
import json
import os
import urllib.request
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import quote

from dcp_objstore.errors import (
    BucketNotFoundError,
    ConfigError,
    CredentialsError,
    DcpObjstoreError,
    UnsupportedError,
)
from dcp_objstore.stores.credentials.google import find_gcs_token
from dcp_objstore.stores.endpoint import answer_to, server_url, tls_context
from dcp_objstore.stores.errors import advice_on, kind_of_answer
from dcp_objstore.stores.options.gcs import GcsOptions
from dcp_objstore.stores.options.schema import parse
from dcp_objstore.stores.retries import Requests
from dcp_objstore.stores.s3.errors import judge_botocore
from dcp_objstore.stores.s3.settings import botocore_settings
from dcp_objstore.stores.uploads.s3 import S3Uploads, boto_errors

if TYPE_CHECKING:
    from dcp_objstore.stores.spec import StoreSpec

_GOOGLE = "https://storage.googleapis.com"


class GcsUploads(S3Uploads):
    """The multipart uploads below one root of a GCS bucket.

    Args:
        spec: URL, options and settings of the store.

    Raises:
        ConfigError, CredentialsError: as for the store.
    """

    _scheme = "gs"

    def __init__(self, spec: StoreSpec) -> None:
        options = parse(GcsOptions, spec.storage_options)
        self._token = find_gcs_token(options, spec.stripped)
        self._server = server_url(options.endpoint_url or _GOOGLE, use_ssl=True)
        self._payer = options.payer
        if self._payer and not _fits_header(self._payer):
            raise ConfigError(
                f"the project that pays is no project's name: {self._payer!r}", url=spec.url
            )
        self._config = spec.config
        self._verify = options.verify
        self._context = tls_context(options.verify)
        root = f"{spec.parsed.prefix}/" if spec.parsed.prefix else ""
        with boto_errors(spec.url):
            client = self._make_client()
        bucket = spec.parsed.bucket
        requests = Requests(
            spec.config,
            judge_botocore,
            endpoint_url=options.endpoint_url,
            scheme="gs",
            bucket=bucket,
        )
        super().__init__(client, requests, bucket=bucket, root=root, extra={})

    def lifecycle_rules(self) -> Sequence[Mapping[str, Any]]:
        """The bucket's lifecycle rules, as GCS describes them; none is an empty sequence.

        Raises:
            As `list`.
        """
        return tuple(self._bucket_field("lifecycle").get("rule", ()))

    def versioning(self) -> Literal["Enabled", "Suspended"] | None:
        """Whether the bucket keeps what is overwritten and deleted; None: not now.

        Raises:
            As `list`.
        """
        return "Enabled" if self._bucket_field("versioning").get("enabled") else None

    def _headers(self) -> dict[str, str]:
        headers = {} if self._payer is None else {"x-goog-user-project": self._payer}
        if self._token is not None:
            bearer = self._token()
            if not _fits_header(bearer):
                raise CredentialsError(
                    "the access token cannot be sent: it has a line break, or a character that is"
                    " not ASCII",
                    url=self._url,
                )
            headers["Authorization"] = f"Bearer {bearer}"
        return headers

    def _make_client(self) -> Any:
        """Make a client that signs nothing and sends the access token with each request."""
        import boto3
        import botocore
        import botocore.session
        from botocore.config import Config

        settings = botocore_settings(self._config, "path", self._config.request_timeout_seconds)
        # Nothing that is set up for AWS counts here: neither its profiles nor its endpoints.
        unset = (None, None, None, None)
        nowhere = (None, None, os.devnull, None)
        core = botocore.session.Session(
            {"profile": unset, "config_file": nowhere, "credentials_file": nowhere}
        )
        client = boto3.Session(botocore_session=core).client(
            "s3",
            endpoint_url=self._server,
            region_name="auto",
            verify=None if self._verify is True else self._verify,
            config=Config(signature_version=botocore.UNSIGNED, **settings),
        )

        def carry_token(request: Any, **_: object) -> None:
            for name, value in self._headers().items():
                request.headers[name] = value

        client.meta.events.register("before-send.s3", carry_token)
        return client

    def _bucket_field(self, field: str) -> Mapping[str, Any]:
        """One field of the bucket, as the JSON API describes it; empty where it is not set."""
        bucket = quote(self._bucket, safe="")
        request = urllib.request.Request(
            f"{self._server}/storage/v1/b/{bucket}?fields={field}", headers=self._headers()
        )
        timeout_seconds = self._config.request_timeout_seconds
        status, _, body = answer_to(request, self._context, timeout_seconds, self._url)
        if status >= 300:
            raise _refused(status).at(url=self._url)
        try:
            value: Mapping[str, Any] = json.loads(body).get(field, {})
        except (ValueError, AttributeError):  # AttributeError: not an object
            raise UnsupportedError(
                "the server does not answer as GCS's JSON API does", url=self._url
            ) from None
        return value


def _fits_header(value: str) -> bool:
    return value.isascii() and value.isprintable()


def _refused(status: int) -> DcpObjstoreError:
    if status == http.client.NOT_FOUND:
        return BucketNotFoundError(
            "there is no such bucket, or the server has the XML API but no JSON API (404)"
        )
    if 300 <= status < 400:
        return ConfigError(
            f"the server points elsewhere (status {status}), where no access token is sent; check"
            " endpoint_url"
        )
    kind = kind_of_answer(status, None) or DcpObjstoreError
    return kind(f"{advice_on(kind) or 'the bucket cannot be asked'} (status {status})")
