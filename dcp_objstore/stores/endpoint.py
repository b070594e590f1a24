"""The server that requests go to, and how a bucket is addressed there; for every client library."""

from __future__ import annotations

import http.client
import ipaddress
import os
import re
import socket
import ssl
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from dcp_objstore.errors import ConfigError, StoreUnavailableError
from dcp_objstore.stores.options.schema import check_endpoint

if TYPE_CHECKING:
    from email.message import Message

    from dcp_objstore.stores.credentials.base import Credentials
    from dcp_objstore.stores.options.s3 import S3Options

_DEFAULT_REGION = "us-east-1"
# In others, S3 has another domain: China, the isolated ones, the European sovereign cloud.
_USUAL_REGION = re.compile(r"(?:af|ap|ca|eu|il|me|mx|sa|us)(?:-gov)?-[a-z]+-\d+")
_VARIANTS = ("use_fips_endpoint", "use_dualstack_endpoint")
_REGION = re.compile(r"[A-Za-z0-9._-]+")
# RFC 3986, without those that `check_endpoint` refuses.
_OF_URLS = re.compile(r"[A-Za-z0-9._~:/\[\]!$&'()*+,;=%-]+")
_AUTHORITY = re.compile(r"(?:\[[^]]+\]|[^:/\[\]]+)(?::\d+)?(?:/|$)")
# If its last label is a number, it is read as an address (WHATWG, "URL": "ends in a number").
_HOST_NAME = re.compile(r"(?:[A-Za-z0-9_-]+\.)*(?!(?:\d+|0[xX][0-9a-fA-F]*)\.?$)[A-Za-z0-9_-]+\.?")


def s3_server(settings: S3Options, credentials: Credentials) -> tuple[str | None, str]:
    """Endpoint and region: from the options and the environment, then from the profile.

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
    """Return AWS's own server where it is not `s3.REGION.amazonaws.com`; botocore knows it.

    Args:
        region: the region.
        core: the session of botocore that has read a profile; None: the environment counts.

    Raises:
        ConfigError: botocore is not installed, or there is none.
    """
    asked = [name for name in _VARIANTS if _is_on(f"AWS_{name.upper()}")]
    is_usual = _USUAL_REGION.fullmatch(region) is not None
    if is_usual and not (asked or (core and any(map(core.get_config_variable, _VARIANTS)))):
        return None
    what = f"the region {region}" + "".join(f", AWS_{name.upper()}" for name in asked)
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
    chosen = settings.checksum_algorithm
    if chosen is None and is_aws(endpoint):
        return "CRC64NVME"
    return None if chosen == "none" else chosen


def _is_on(variable: str) -> bool:
    return os.environ.get(variable, "").lower() == "true"


def is_aws(endpoint: str | None) -> bool:
    """Whether an endpoint is AWS itself: None, or one of its hosts."""
    host = urlsplit(endpoint or "").hostname or ""
    return endpoint is None or host.endswith((".amazonaws.com", ".amazonaws.com.cn"))


def is_directory_bucket(name: str) -> bool:
    """Whether a bucket is of S3 Express One Zone ("Directory bucket naming rules")."""
    return name.endswith("--x-s3")


def is_virtual(style: str | None, endpoint: str | None, bucket: str) -> bool:
    """Whether the bucket goes into the host's name; otherwise it goes into the path."""
    # A bucket name with dots does not match the certificate of *.s3.amazonaws.com.
    return style == "virtual" or (
        style in (None, "auto") and endpoint is None and "." not in bucket
    )


def server_url(text: str, *, use_ssl: bool) -> str:
    """Make a URL of an endpoint.

    Raises:
        ConfigError: it is not one, it holds credentials, or its host or port cannot exist.
    """
    base = text if "://" in text else f"{'https' if use_ssl else 'http'}://{text}"
    scheme, _, host = base.rstrip("/").partition("://")
    check_endpoint(host)  # those of the environment and of profiles, too
    if scheme not in ("http", "https") or not host:
        raise ConfigError("an endpoint must read http(s)://host[:port], without credentials")
    wrong = _wrong_with(host)
    if wrong is not None:
        raise ConfigError(f"the endpoint {text!r} {wrong}; it must read http(s)://host[:port]")
    return f"{scheme}://{host}"


def virtual_url(base: str, bucket: str) -> str:
    """The URL of a bucket that is addressed by its own host name.

    Raises:
        ConfigError: the endpoint's host is an address, which has no names below it.
    """
    scheme, _, host = base.partition("://")
    name = urlsplit(base).hostname or ""
    if _is_address(name):
        raise ConfigError(
            f"addressing_style 'virtual' needs a host name, and the endpoint {base} has an address:"
            " use 'path', or the host's name"
        )
    return f"{scheme}://{bucket}.{host}"


def tls_context(verify: bool | str) -> ssl.SSLContext:
    """Return the TLS settings for Python's own HTTP client.

    Args:
        verify: True for the usual certificates, False for any, or the path of others.

    Raises:
        ConfigError: they cannot be read.
    """
    try:
        context = ssl.create_default_context(
            cafile=Path(verify).expanduser() if isinstance(verify, str) else None
        )
    except OSError as error:
        raise ConfigError(f"the certificates named by 'verify' cannot be read: {error}") from error
    if verify is False:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Python's own sends `Authorization` to wherever an answer points."""

    def redirect_request(self, *_: object, **__: object) -> None:
        return None  # the redirect is then raised as an HTTPError


def answer_to(
    request: urllib.request.Request, context: ssl.SSLContext, timeout_seconds: float, url: str
) -> tuple[int, Message, bytes]:
    """Send a request by Python's own HTTP client, once; return status, headers and body.

    The body is empty where the status is an error's or a redirect's, which is not followed.

    Raises:
        StoreUnavailableError: no answer came in time. It names `url`, of the store.
    """
    https = urllib.request.HTTPSHandler(context=context)
    proxies = urllib.request.getproxies()
    if proxies.get("all", "").startswith("http"):  # obstore takes ALL_PROXY, Python does not
        proxies = {**dict.fromkeys(("http", "https"), proxies["all"]), **proxies}
    proxy = urllib.request.ProxyHandler(proxies)
    opener = urllib.request.build_opener(https, proxy, _NoRedirects)
    try:
        with opener.open(request, timeout=timeout_seconds) as answer:
            return answer.status, answer.headers, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers, b""
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise StoreUnavailableError(f"{type(error).__name__}: {reason}", url=url) from error


def _wrong_with(place: str) -> str | None:
    """Return what is wrong with the part behind `://`; None if nothing is.

    obstore panics on a URL that does not pass here.
    """
    if _OF_URLS.fullmatch(place) is None:
        return "has a space, or another character that a URL cannot have"
    if _AUTHORITY.match(place) is None:
        return "has no host, or no port after its ':'"
    try:
        parts = urlsplit(f"//{place}")
        parts.port  # noqa: B018  raises for one that cannot exist
    except ValueError as error:
        return f"cannot be read ({error})"
    name = parts.hostname or ""
    if not _is_address(name) and (":" in name or _HOST_NAME.fullmatch(name) is None):
        return f"has a host name that cannot exist ({name!r})"
    return None


def _is_address(name: str) -> bool:
    """Whether a host is an address of IPv4, in any form that is read as one, or of IPv6."""
    with suppress(ValueError):
        return bool(ipaddress.IPv6Address(name))
    with suppress(OSError):
        return bool(socket.inet_aton(name))
    return False
