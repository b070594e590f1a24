"""The URL of a server, and one request to it by Python's own client; for every client library."""

from __future__ import annotations

import http.client
import ipaddress
import re
import socket
import ssl
import urllib.error
import urllib.request
from contextlib import suppress
from email.message import Message
from pathlib import Path
from urllib.parse import urlsplit

from dcp_objstore.errors import ConfigError, StoreUnavailableError
from dcp_objstore.stores.options import check_endpoint

# The characters of RFC 3986, without those that `check_endpoint` refuses.
_URL_CHARACTERS = re.compile(r"[A-Za-z0-9._~:/\[\]!$&'()*+,;=%-]+")
_AUTHORITY = re.compile(r"(?:\[[^]]+\]|[^:/\[\]]+)(?::\d+)?(?:/|$)")
# If its last label is a number, it is read as an address (WHATWG, "URL": "ends in a number").
_HOST_NAME = re.compile(r"(?:[A-Za-z0-9_-]+\.)*(?!(?:\d+|0[xX][0-9a-fA-F]*)\.?$)[A-Za-z0-9_-]+\.?")


def server_url(text: str, *, use_ssl: bool) -> str:
    """Make a URL of an endpoint.

    Raises:
        ConfigError: the text is no endpoint, it holds credentials, or its host or port cannot
            exist.
    """
    base = text if "://" in text else f"{'https' if use_ssl else 'http'}://{text}"
    scheme, _, host = base.rstrip("/").partition("://")
    check_endpoint(host)  # checked here, too, as it may come from the environment or a profile
    if scheme not in ("http", "https"):
        raise ConfigError("an endpoint must read http(s)://host[:port], without credentials")
    wrong = _wrong_with(host)
    if wrong is not None:
        raise ConfigError(f"the endpoint {text!r} {wrong}; it must read http(s)://host[:port]")
    return f"{scheme}://{host}"


def tls_context(verify: bool | str) -> ssl.SSLContext:
    """Return the TLS settings for Python's own HTTP client.

    Args:
        verify: True for the usual certificates, False for any, or the path of others.

    Raises:
        ConfigError: the certificates cannot be read.
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
    """Follow no redirect: Python's own handler sends `Authorization` to wherever one points."""

    def redirect_request(self, *_: object, **__: object) -> None:
        return None  # the redirect is then raised as an HTTPError


def answer_to(
    request: urllib.request.Request, context: ssl.SSLContext, timeout_seconds: float, url: str
) -> tuple[int, Message, bytes]:
    """Send a request by Python's own HTTP client, once; return status, headers and body.

    The body is empty where the status is an error's or a redirect's, which is not followed.

    Raises:
        StoreUnavailableError: no answer came in time, or none that is HTTP. The error names `url`,
            which is that of the store.
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
    except urllib.error.HTTPError as error:  # an answer, too, whose status is an error's
        with error:
            return error.code, error.headers, b""
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise StoreUnavailableError(f"{type(error).__name__}: {reason}", url=url) from error


def _wrong_with(host_and_path: str) -> str | None:
    """Return what is wrong with the part of an endpoint behind `://`; None if nothing is.

    obstore panics on a URL that does not pass here.
    """
    if _URL_CHARACTERS.fullmatch(host_and_path) is None:
        return "has a space, or another character that a URL cannot have"
    if _AUTHORITY.match(host_and_path) is None:
        return "has no host, or no port after its ':'"
    try:
        parts = urlsplit(f"//{host_and_path}")
        parts.port  # noqa: B018  raises for one that cannot exist
    except ValueError as error:
        return f"cannot be read ({error})"
    name = str(parts.hostname)
    # In square brackets only an address of IPv6 may stand: no name has a ':'.
    if not is_address(name) and _HOST_NAME.fullmatch(name) is None:
        return f"has a host name that cannot exist ({name!r})"
    return None


def is_address(name: str) -> bool:
    """Whether a host is an address of IPv4, in any form that is read as one, or of IPv6."""
    with suppress(ValueError):  # it is no IPv6 address
        return bool(ipaddress.IPv6Address(name))
    with suppress(OSError):  # it is no IPv4 address
        return bool(socket.inet_aton(name))
    return False
