"""What any server says in the header of an answer: its clock, and AWS also the bucket's region.

Asked without credentials and with Python's own HTTP client, because the transport does not show
headers. Nothing but a diagnosis may rest on it.
"""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from dcp_objstore.errors import StoreUnavailableError
from dcp_objstore.stores.credentials.aws import find_s3_credentials
from dcp_objstore.stores.credentials.azure import find_azure_credentials
from dcp_objstore.stores.endpoint import s3_server, server_url, tls_context
from dcp_objstore.stores.options.azure import AzureOptions
from dcp_objstore.stores.options.parse import parse
from dcp_objstore.stores.options.s3 import s3_options

if TYPE_CHECKING:
    from dcp_objstore.stores.spec import StoreSpec

_TIMEOUT_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class ServerAnswer:
    """What the headers said.

    Attributes:
        ahead_seconds: how far the server's clock is ahead of ours (negative: behind), to about a
            second; None: it sent no Date.
        bucket_region: where the bucket is, by AWS's `x-amz-bucket-region`; None elsewhere.
    """

    ahead_seconds: float | None
    bucket_region: str | None


def ask_server(spec: StoreSpec) -> ServerAnswer | None:
    """One HEAD of the bucket, without credentials; None where there is no server.

    Raises:
        StoreUnavailableError: no answer within 5 s (or only through a proxy that we do not know).
        CredentialsError, ConfigError: as for the store.
    """
    url, verify = _bucket_url(spec)
    if url is None:
        return None
    request = urllib.request.Request(url, method="HEAD")
    handler = urllib.request.HTTPSHandler(context=tls_context(verify))
    before = datetime.now(UTC)
    try:
        with urllib.request.build_opener(handler).open(request, timeout=_TIMEOUT_SECONDS) as answer:
            headers = answer.headers
    except urllib.error.HTTPError as error:
        with error:
            headers = error.headers
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise StoreUnavailableError(f"{type(error).__name__}: {reason}", url=spec.url) from error
    ours = before + (datetime.now(UTC) - before) / 2
    return ServerAnswer(_ahead_seconds(headers["Date"], ours), headers["x-amz-bucket-region"])


def named_server(spec: StoreSpec) -> str | None:
    """The server that requests go to, None for the provider's own.

    Over s3fs it is botocore that finds the one of a profile, and the store does not know it.

    Raises:
        CredentialsError, ConfigError: as for the store.
    """
    endpoint = spec.open().endpoint_url
    options = spec.storage_options
    if endpoint is None and spec.parsed.scheme == "s3" and "fs" not in options:
        settings = s3_options(options)
        named, _ = s3_server(settings, find_s3_credentials(settings, spec.stripped))
        endpoint = server_url(named, use_ssl=settings.use_ssl) if named else None
    return endpoint


def _ahead_seconds(date: str | None, ours: datetime) -> float | None:
    try:
        theirs = parsedate_to_datetime(date) if date else None
    except ValueError:
        return None
    if theirs is None:
        return None
    # The header is cut to whole seconds.
    return (theirs.astimezone(UTC) + timedelta(seconds=0.5) - ours).total_seconds()


def _bucket_url(spec: StoreSpec) -> tuple[str | None, bool | str]:
    url, options = spec.parsed, spec.storage_options
    endpoint = named_server(spec)
    verify = options.get("verify", True)
    if url.scheme == "s3":
        settings = s3_options(options)
        verify = settings.verify
        if endpoint is None:
            found = find_s3_credentials(settings, spec.stripped)
            _, region = s3_server(settings, found)
            endpoint = f"https://s3.{region}.amazonaws.com"
    elif url.scheme == "gs":
        endpoint = endpoint or "https://storage.googleapis.com"
    elif url.scheme == "az" and endpoint is None:
        account = find_azure_credentials(parse(AzureOptions, options), spec.stripped).account_name
        endpoint = f"https://{account}.blob.core.windows.net"
    if endpoint is None or urlsplit(endpoint).scheme not in ("http", "https"):
        return None, True
    return f"{endpoint.rstrip('/')}/{url.bucket}", verify if isinstance(verify, str) else bool(
        verify
    )
