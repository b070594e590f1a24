"""The server of S3 that requests go to, and how a bucket is addressed there."""

from __future__ import annotations

import os
import re
from typing import Any
from urllib.parse import urlsplit

from dcp_objstore.errors import ConfigError
from dcp_objstore.stores.credentials import Credentials
from dcp_objstore.stores.endpoint import is_address, server_url
from dcp_objstore.stores.s3.options import S3Options

_DEFAULT_REGION = "us-east-1"
# In other regions, S3 has another domain: China, the isolated ones, the European sovereign cloud.
_USUAL_REGION = re.compile(r"(?:af|ap|ca|eu|il|me|mx|sa|us)(?:-gov)?-[a-z]+-\d+")
# Variables that ask for other servers of AWS, and botocore's names of these settings in a profile.
_VARIANTS = {
    "AWS_USE_FIPS_ENDPOINT": "use_fips_endpoint",
    "AWS_USE_DUALSTACK_ENDPOINT": "use_dualstack_endpoint",
}
_REGION = re.compile(r"[A-Za-z0-9._-]+")


def s3_server(settings: S3Options, credentials: Credentials) -> tuple[str | None, str]:
    """Return endpoint and region: from the options, else the environment, else the profile.

    Args:
        settings: the options, completed with the settings of the environment.
        credentials: what the profile says, if one was read.

    Returns:
        The endpoint as a URL, None for AWS itself, and the region.

    Raises:
        ConfigError: an endpoint or a region that cannot be one.
    """
    endpoint = settings.endpoint_url or credentials.endpoint_url
    region = settings.region or credentials.region or _DEFAULT_REGION
    if _REGION.fullmatch(region) is None:
        raise ConfigError(
            f"the region {region!r} cannot be one: letters, digits, '-', '_' and '.' (it is taken"
            f" from storage_options, {', '.join(settings.option('region').environment)}, or the"
            " profile)"
        )
    if endpoint is None:
        return _unusual_server(region, credentials.core), region
    return server_url(endpoint, use_ssl=settings.use_ssl), region


def _unusual_server(region: str, core: Any) -> str | None:
    """Return AWS's own server for a region; None if it is `s3.REGION.amazonaws.com`.

    botocore knows the other ones: a client is made to ask it, which sends no request.

    Args:
        region: the region.
        core: the session of botocore that has read a profile; None: no profile was read, and only
            the environment may ask for another server.

    Raises:
        ConfigError: botocore is needed and not installed, or it knows no such server.
    """
    variables = [name for name in _VARIANTS if os.environ.get(name, "").lower() == "true"]
    in_profile = core is not None and any(map(core.get_config_variable, _VARIANTS.values()))
    if _USUAL_REGION.fullmatch(region) and not (variables or in_profile):
        return None
    what = ", ".join((f"the region {region}", *variables))
    try:
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError
        from botocore.session import Session
    except ImportError as error:
        raise ConfigError(
            f"boto3 knows the server for {what}: pip install 'dcp-objstore[s3]', or name it in"
            " endpoint_url"
        ) from error
    try:
        client = (core or Session()).create_client(
            "s3",
            region_name=region,
            # Nothing is signed with these; without them botocore would look for credentials.
            aws_access_key_id="-",
            aws_secret_access_key="-",
            config=Config(s3={"us_east_1_regional_endpoint": "regional"}),
        )
    except BotoCoreError as error:
        raise ConfigError(f"AWS has no server for {what}: {error}") from error
    return str(client.meta.endpoint_url)


def s3_checksum(settings: S3Options, endpoint: str | None) -> str | None:
    """The checksum to send with each body, by which the store refuses one that was damaged.

    On AWS CRC64NVME, its own default ("Checking object integrity", Amazon S3 user guide); it took
    0.11 CPU-seconds per GiB, SHA-256 0.85 (2 cores, loopback). Other servers may not know it, and
    get none unless one is asked for.
    """
    algorithm = settings.checksum_algorithm
    if algorithm is None and is_aws(endpoint):
        return "CRC64NVME"
    return None if algorithm == "none" else algorithm


def is_aws(endpoint: str | None) -> bool:
    """Whether an endpoint is AWS itself: None, or one of its hosts."""
    domains = (".amazonaws.com", ".amazonaws.com.cn")
    return endpoint is None or str(urlsplit(endpoint).hostname).endswith(domains)


def is_directory_bucket(name: str) -> bool:
    """Whether a bucket is of S3 Express One Zone ("Directory bucket naming rules")."""
    return name.endswith("--x-s3")


def is_virtual(style: str | None, endpoint: str | None, bucket: str) -> bool:
    """Whether the bucket goes into the host's name; otherwise it goes into the path.

    Args:
        style: the addressing style that options or a profile ask for, or None.
        endpoint: the server as a URL; None for AWS itself.
        bucket: the name of the bucket.
    """
    if style in ("virtual", "path"):
        return style == "virtual"
    # A bucket name with dots does not match the certificate of *.s3.amazonaws.com.
    return endpoint is None and "." not in bucket


def virtual_url(base: str, bucket: str) -> str:
    """The URL of a bucket that is addressed by its own host name.

    Raises:
        ConfigError: the endpoint's host is an address, which has no names below it.
    """
    scheme, _, host_and_path = base.partition("://")
    if is_address(str(urlsplit(base).hostname)):
        raise ConfigError(
            f"addressing_style 'virtual' needs a host name, and the endpoint {base} has an address:"
            " use 'path', or the host's name"
        )
    return f"{scheme}://{bucket}.{host_and_path}"
