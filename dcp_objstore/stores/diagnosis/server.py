"""What any server says in the head of an answer: its clock, and AWS also the bucket's region.

The request is sent without credentials and by Python's own HTTP client, because the transport does
not show headers. Nothing but a diagnosis may rest on it.
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
from dcp_objstore.stores.endpoint import s3_server, tls_context
from dcp_objstore.stores.options.azure import AzureOptions
from dcp_objstore.stores.options.parse import parse
from dcp_objstore.stores.options.s3 import S3Options

if TYPE_CHECKING:
    from dcp_objstore.stores.spec import StoreSpec

_TIMEOUT_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class ServerAnswer:
    """What the headers hold.

    Attributes:
        ahead_seconds: how far the server's clock is ahead of this machine's (negative: behind), to
            about a second; None: it sent no Date.
        bucket_region: where the bucket is, by AWS's `x-amz-bucket-region`; None elsewhere.
    """

    ahead_seconds: float | None
    bucket_region: str | None


def ask_server(spec: StoreSpec) -> ServerAnswer | None:
    """Send one HEAD of the bucket, without credentials; return None where there is no server.

    Raises:
        StoreUnavailableError: no answer within 5 s; one may come only through a proxy.
        CredentialsError, ConfigError: as for the store.
    """
    base = named_server(spec) or _own_server(spec)
    if base is None or urlsplit(base).scheme not in ("http", "https"):
        return None
    bucket_url = f"{base.rstrip('/')}/{spec.parsed.bucket}"
    request = urllib.request.Request(bucket_url, method="HEAD")
    handler = urllib.request.HTTPSHandler(context=tls_context(_verify(spec)))
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
    here = before + (datetime.now(UTC) - before) / 2
    return ServerAnswer(_ahead_seconds(headers["Date"], here), headers["x-amz-bucket-region"])


def named_server(spec: StoreSpec) -> str | None:
    """The server that requests go to, None for the provider's own.

    Over s3fs it is botocore that finds the one of a profile, and the store does not know it.

    Raises:
        CredentialsError, ConfigError: as for the store.
    """
    endpoint = spec.open().endpoint_url
    if endpoint is None and spec.parsed.scheme == "s3" and "fs" not in spec.storage_options:
        endpoint, _ = _s3_server(spec)
    return endpoint


def _s3_server(spec: StoreSpec) -> tuple[str | None, str]:
    settings = parse(S3Options, spec.storage_options)
    return s3_server(settings, find_s3_credentials(settings, spec.stripped))


def _verify(spec: StoreSpec) -> bool | str:
    if spec.parsed.scheme == "s3" and "fs" not in spec.storage_options:
        return parse(S3Options, spec.storage_options).verify
    verify = spec.storage_options.get("verify", True)
    return verify if isinstance(verify, str) else bool(verify)


def _own_server(spec: StoreSpec) -> str | None:
    """The provider's own server for the bucket; None where there is none, or it is not known."""
    scheme, options = spec.parsed.scheme, spec.storage_options
    if scheme == "gs":
        return "https://storage.googleapis.com"
    if scheme == "s3" and "fs" not in options:
        _, region = _s3_server(spec)
        return f"https://s3.{region}.amazonaws.com"
    if scheme == "az" and "fs" not in options:
        found = find_azure_credentials(parse(AzureOptions, options), spec.stripped)
        return f"https://{found.account_name}.blob.core.windows.net"
    return None


def _ahead_seconds(date: str | None, here: datetime) -> float | None:
    try:
        there = parsedate_to_datetime(date) if date else None
    except ValueError:
        return None
    if there is None:
        return None
    # The header is cut to whole seconds.
    return (there.astimezone(UTC) + timedelta(seconds=0.5) - here).total_seconds()
