"""Unfinished uploads to GCS, and what the bucket does with them, asked with an access token.

GCS's XML API has the calls of S3 for uploads ("XML API multipart uploads"), so boto3 asks them: it
signs nothing, and each request carries the token. The bucket's lifecycle rules and versioning have
another form than S3's and come from the JSON API ("Buckets: get").
"""

from __future__ import annotations

import http.client
import importlib.util
import json
import os
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import quote

from dcp_objstore.errors import (
    BucketNotFoundError,
    ConfigError,
    CredentialsError,
    DcpObjstoreError,
    StoreUnavailableError,
    UnsupportedError,
)
from dcp_objstore.stores.credentials.google import find_gcs_token
from dcp_objstore.stores.endpoint import gcs_endpoint, gcs_payer, server_url, tls_context
from dcp_objstore.stores.errors import advice_on, kind_of_answer
from dcp_objstore.stores.options.gcs import GcsOptions
from dcp_objstore.stores.options.parse import parse
from dcp_objstore.stores.retries import Requests
from dcp_objstore.stores.s3.errors import judge_botocore
from dcp_objstore.stores.uploads.s3 import S3Uploads, boto_errors

if TYPE_CHECKING:
    from dcp_objstore.stores.spec import StoreSpec

_GOOGLE = "https://storage.googleapis.com"


class GcsUploads(S3Uploads):
    """The multipart uploads below one root of a GCS bucket. Made by `open_gcs_uploads`."""

    _scheme = "gs"
    _asks: Callable[[], Mapping[str, Any]]

    def lifecycle_rules(self) -> Sequence[Mapping[str, Any]]:
        """The bucket's lifecycle rules, as GCS describes them; none is an empty sequence.

        Raises:
            As `list`.
        """
        return tuple(self._asks().get("lifecycle", {}).get("rule", ()))

    def versioning(self) -> Literal["Enabled", "Suspended"] | None:
        """Whether the bucket keeps what is overwritten and deleted; None: not now.

        Raises:
            As `list`.
        """
        return "Enabled" if self._asks().get("versioning", {}).get("enabled") else None


def open_gcs_uploads(spec: StoreSpec) -> GcsUploads:
    """Look at the multipart uploads below a URL, and at what the bucket does with them.

    Raises:
        UnsupportedError: boto3 or google-auth is needed and is not installed; says what to do.
        ConfigError, CredentialsError: as for the store.
    """
    if importlib.util.find_spec("boto3") is None:
        raise UnsupportedError(
            "boto3 is not installed, which lists unfinished uploads to gs://, too: pip install"
            " 'dcp-objstore[gcs,s3]'"
        )
    url, options = spec.parsed, parse(GcsOptions, spec.storage_options or {})
    endpoint = gcs_endpoint(options)
    token = find_gcs_token(options, endpoint, spec.stripped)
    base = server_url(endpoint, use_ssl=True) if endpoint else _GOOGLE
    payer = gcs_payer(options)

    if payer and not _fits_header(payer):
        raise ConfigError(f"the project that pays is no project's name: {payer!r}", url=spec.url)

    def headers() -> dict[str, str]:
        bearer = None if token is None else token()
        if bearer is not None and not _fits_header(bearer):
            raise CredentialsError(
                "the access token cannot be sent: it has a line break, or a character that is not"
                " ASCII",
                url=spec.url,
            )
        found = {} if bearer is None else {"Authorization": f"Bearer {bearer}"}
        return {**found, **({"x-goog-user-project": payer} if payer else {})}

    root = f"{url.prefix}/" if url.prefix else ""
    context = tls_context(options.verify)
    with boto_errors(spec.url):
        client = _client(spec, base, options.verify, headers)
    requests = Requests(spec.config, judge_botocore, endpoint, "gs", url.bucket)
    uploads = GcsUploads(client, requests, url.bucket, root, {})
    asked = f"{base}/storage/v1/b/{quote(url.bucket, safe='')}?fields=lifecycle,versioning"
    seconds = spec.config.request_timeout_seconds
    uploads._asks = lambda: _bucket(asked, headers(), context, seconds, spec.url)
    return uploads


def _client(
    spec: StoreSpec, base: str, verify: bool | str, headers: Callable[[], Mapping[str, str]]
) -> Any:
    import boto3
    import botocore
    import botocore.session
    from botocore.config import Config

    config = spec.config
    # Nothing that is set up for AWS counts here: neither its profiles nor its endpoints.
    unset = (None, None, None, None)
    nowhere = (None, None, os.devnull, None)
    core = botocore.session.Session(
        {"profile": unset, "config_file": nowhere, "credentials_file": nowhere}
    )
    client = boto3.Session(botocore_session=core).client(
        "s3",
        endpoint_url=base,
        region_name="auto",
        verify=None if verify is True else verify,
        config=Config(
            signature_version=botocore.UNSIGNED,
            s3={"addressing_style": "path"},
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            connect_timeout=config.connect_timeout_seconds,
            read_timeout=config.request_timeout_seconds,
            retries={"total_max_attempts": 1},
        ),
    )

    def carry_token(request: Any, **_: object) -> None:
        for name, value in headers().items():
            request.headers[name] = value

    client.meta.events.register("before-send.s3", carry_token)
    return client


def _fits_header(value: str) -> bool:
    return value.isascii() and value.isprintable()


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Python's own carries `Authorization` to wherever an answer points."""

    def redirect_request(self, *_: object, **__: object) -> None:
        return None  # the redirect is then raised as an HTTPError


def _bucket(
    url: str, headers: Mapping[str, str], context: ssl.SSLContext, seconds: float, shown: str
) -> Mapping[str, Any]:
    request = urllib.request.Request(url, headers=dict(headers))
    opener = urllib.request.build_opener(urllib.request.HTTPSHandler(context=context), _NoRedirects)
    try:
        with opener.open(request, timeout=seconds) as answer:
            body = answer.read()
    except urllib.error.HTTPError as error:
        with error:
            raise _refused(error.code).at(url=shown) from error
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise StoreUnavailableError(f"{type(error).__name__}: {reason}", url=shown) from error
    try:
        found = json.loads(body)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise UnsupportedError("the server does not answer as GCS's JSON API does", url=shown)
    return found


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
    return kind(f"{advice_on(kind, status) or 'the bucket cannot be asked'} (status {status})")
