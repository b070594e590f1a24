"""Which server is meant, and what requests to an S3 server say of themselves.

From the options, the environment and the profile; the same for every client library.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from dcp_objstore.errors import ConfigError
from dcp_objstore.stores.options import S3Settings, check_endpoint

if TYPE_CHECKING:
    from dcp_objstore.stores.credentials import Credentials

_DEFAULT_REGION = "us-east-1"


def s3_server(settings: S3Settings, found: Credentials) -> tuple[str | None, str]:
    """Endpoint and region: from the options, the environment, then the profile.

    Returns:
        The endpoint as it was given, None for AWS itself, and the region.
    """
    environ = os.environ
    endpoint = (
        settings.endpoint_url
        or environ.get("AWS_ENDPOINT_URL_S3")
        or environ.get("AWS_ENDPOINT_URL")
        or environ.get("AWS_ENDPOINT")
        or found.endpoint_url
    )
    region = (
        settings.region
        or environ.get("AWS_REGION")
        or environ.get("AWS_DEFAULT_REGION")
        or found.region
        or _DEFAULT_REGION
    )
    return endpoint, region


def s3_requester_pays(settings: S3Settings) -> bool:
    """Whether requests say that we pay for them."""
    named = os.environ.get("AWS_REQUEST_PAYER", "").lower()
    return settings.requester_pays or named in ("requester", "true")


def s3_checksum(settings: S3Settings, endpoint: str | None) -> str | None:
    """The checksum to send with each body, by which the store refuses one that was damaged.

    On AWS CRC64NVME, its own default ("Checking object integrity", Amazon S3 user guide); it took
    0.11 CPU-seconds per GiB, SHA-256 0.85 (2 cores, loopback). Other servers may not know it, and
    get none unless one is asked for.
    """
    chosen = settings.checksum_algorithm or os.environ.get("AWS_CHECKSUM_ALGORITHM")
    if chosen is None and is_aws(endpoint):
        chosen = "CRC64NVME"
    return None if chosen == "none" else chosen


def is_aws(endpoint: str | None) -> bool:
    """Whether an endpoint is AWS itself: None, or one of its hosts."""
    if endpoint is None:
        return True
    host = urlsplit(endpoint if "://" in endpoint else f"//{endpoint}").hostname or ""
    return host.endswith((".amazonaws.com", ".amazonaws.com.cn"))


def is_directory_bucket(name: str) -> bool:
    """Whether a bucket is of S3 Express One Zone ("Directory bucket naming rules")."""
    return name.endswith("--x-s3")


def server_url(text: str, *, use_ssl: bool) -> str:
    """An endpoint as a URL.

    Raises:
        ConfigError: it is none, or holds credentials.
    """
    base = text if "://" in text else f"{'https' if use_ssl else 'http'}://{text}"
    scheme, _, host = base.rstrip("/").partition("://")
    check_endpoint(host)  # those of the environment and of profiles, too
    if scheme not in ("http", "https") or not host:
        raise ConfigError("an endpoint must read http(s)://host[:port], without credentials")
    return f"{scheme}://{host}"
