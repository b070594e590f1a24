"""What the clients of a bucket have in common, for each provider: how obstore makes them, and how
the GETs that the direct lane sends are signed.

None of this makes a request, but for a token that has ended.
"""

from __future__ import annotations

import os
import time
import urllib.request
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

from dcp_objstore.errors import ConfigError
from dcp_objstore.forking import PerProcess
from dcp_objstore.stores.endpoint import (
    is_aws,
    is_directory_bucket,
    is_virtual,
    s3_checksum,
    s3_server,
    server_url,
    virtual_url,
)
from dcp_objstore.stores.obstore.copies import (
    AZURE_VERSION,
    Copier,
    azure_headers,
    azure_steps,
    gcs_steps,
)
from dcp_objstore.stores.obstore.direct import LaneError, SignedGet
from dcp_objstore.stores.options.s3 import CHECKSUM_VARIABLE

if TYPE_CHECKING:
    from obstore.store import MemoryStore

    from dcp_objstore.stores.credentials.base import Credentials
    from dcp_objstore.stores.options.azure import AzureOptions
    from dcp_objstore.stores.options.gcs import GcsOptions
    from dcp_objstore.stores.options.s3 import S3Options
    from dcp_objstore.stores.urls import StoreUrl

# A function that makes a store of obstore from time-outs and the retry configuration.
NewClient = Callable[[dict[str, Any], dict[str, Any]], Any]
# A function that makes the GET of a key in the bucket, which a client of obstore may sign.
Sign = Callable[[Any, str], SignedGet]

# Checksums that obstore does not have.
_OF_BOTO3 = ("CRC32", "CRC32C")
# A URL is signed for longer than it is used: the clocks of client and store may differ by minutes.
_SIGNED_FOR = timedelta(minutes=30)
# A token is not used so shortly before its end.
_LEAST_LEFT_SECONDS = 60.0

_memory: PerProcess[dict[str, MemoryStore]] = PerProcess(dict)


class ClientFactory(NamedTuple):
    """How requests to a bucket are made.

    Attributes:
        new_client: a function that makes a client; they differ in their time-outs and retries.
        endpoint_url: the server; None for the provider's own.
        sign: a function that makes a GET for the direct lane; None if it takes more than that.
        ordered: whether a listing may begin behind a key. Directory buckets and Azure's
            hierarchical namespaces list in an order of their own.
        copier: what asks for copies of whole objects; None where there are none.
    """

    new_client: NewClient
    endpoint_url: str | None = None
    sign: Sign | None = None
    ordered: bool = True
    copier: Copier | None = None


def memory_factory(url: StoreUrl) -> ClientFactory:
    """The memory store of a name: the same one in the whole process."""

    def make(_timeouts: dict[str, Any], _retry: dict[str, Any]) -> MemoryStore:
        from obstore.store import MemoryStore

        return _memory.here.setdefault(url.bucket, MemoryStore())

    return ClientFactory(make)


def s3_factory(url: StoreUrl, settings: S3Options, credentials: Credentials) -> ClientFactory:
    """Return the factory for an S3 bucket.

    Raises:
        ConfigError: an endpoint or a region that cannot be used.
    """
    from obstore.store import S3Store

    endpoint, region = s3_server(settings, credentials)
    style = settings.addressing_style or credentials.addressing_style
    virtual = is_virtual(style, endpoint, url.bucket)
    config: dict[str, Any] = {
        "bucket": url.bucket,
        "region": region,
        # One object per DELETE: the bulk call is missing in some stores that speak S3.
        "disable_bulk_delete": True,
        # SHA-256 of every body took 1.0 instead of 0.3 CPU-seconds per GiB (2 cores, loopback).
        # AWS, SeaweedFS and moto take bodies without; TLS and our own digests protect the bytes.
        "unsigned_payload": not settings.sign_payload,
        "virtual_hosted_style_request": virtual,
        # Settings of other tools in the environment do not count.
        "conditional_put": "etag",
        "s3_express": _is_express(url.bucket, endpoint),
    }
    base = endpoint or f"https://s3.{region}.amazonaws.com"
    of_bucket = virtual_url(base, url.bucket) if virtual else f"{base}/{url.bucket}"
    if endpoint is not None:
        # This field wins over every other, also over those of the environment.
        config["aws_endpoint_url_s3"] = of_bucket if virtual else endpoint
    if settings.requester_pays:
        config["request_payer"] = True
    for name in ("sse", "sse_kms_key_id", "sse_bucket_key"):
        if (value := getattr(settings, name)) is not None:
            config[settings.option(name).native[0]] = value
    checksum = s3_checksum(settings, endpoint)
    if checksum in _OF_BOTO3:
        raise ConfigError(
            f"transport 'native' sends CRC64NVME or SHA256, not {checksum}; transport 'boto3' does"
        )
    if checksum is not None:
        config["checksum_algorithm"] = checksum
    elif os.environ.get(CHECKSUM_VARIABLE) is not None:
        raise ConfigError(
            f"{CHECKSUM_VARIABLE} is set in the environment, and obstore reads it, which has no"
            " word for none: unset it, or use transport 'boto3'"
        )
    sign: Sign | None = None
    if not (settings.requester_pays or config["s3_express"]):
        sign = _unsigned(of_bucket) if settings.anon else _signed_url
    make = _make(S3Store, config, credentials, endpoint=endpoint, verify=settings.verify)
    return ClientFactory(make, endpoint, sign, ordered=not is_directory_bucket(url.bucket))


def _is_express(bucket: str, endpoint: str | None) -> bool:
    """Whether a bucket is a directory bucket of AWS itself.

    Raises:
        ConfigError: its name has no zone, or the endpoint is named, which obstore takes for that of
            an ordinary bucket.
    """
    if not is_directory_bucket(bucket) or not is_aws(endpoint):
        return False
    if endpoint is not None:
        raise ConfigError(
            f"{bucket!r} is a directory bucket, whose endpoint follows from its name and the"
            f" region: leave out endpoint_url ({endpoint}; it may be set in the environment or the"
            " profile), or use transport 'boto3'"
        )
    if bucket.count("--") < 2:
        raise ConfigError(f"{bucket!r} has no zone in its name, as directory buckets do")
    return True


def gcs_factory(url: StoreUrl, options: GcsOptions, credentials: Credentials) -> ClientFactory:
    """Return the factory for a GCS bucket.

    Raises:
        ConfigError: an endpoint that cannot be used.
    """
    from obstore.store import GCSStore

    config = {"bucket": url.bucket}
    endpoint = options.endpoint_url and server_url(options.endpoint_url, use_ssl=True)
    if endpoint is not None:
        config["base_url"] = endpoint
    # "HTTP headers" of the XML API: the project that is billed.
    headers = {"x-goog-user-project": options.payer} if options.payer else {}
    server = endpoint or "https://storage.googleapis.com"
    place = f"{server}/{url.bucket}"
    provider, copier = credentials.provider, None

    def sign(_client: Any, key: str) -> SignedGet:
        # A token, because a signed URL takes a private key or another request.
        assert provider is not None
        return _with_token(f"{place}/{_quoted(key)}", provider(), headers)

    signs = sign if provider is not None else _unsigned(place) if credentials.anonymous else None
    if provider is not None:
        copier = Copier(server, lambda *_: _with_token("", provider(), headers).headers, gcs_steps)
    make = _make(
        GCSStore, config, credentials, endpoint=endpoint, verify=options.verify, headers=headers
    )
    return ClientFactory(make, endpoint, signs, copier=copier)


def azure_factory(url: StoreUrl, options: AzureOptions, credentials: Credentials) -> ClientFactory:
    """Return the factory for an Azure container.

    Raises:
        ConfigError: an endpoint that cannot be used.
    """
    from obstore.store import AzureStore

    account = credentials.account_name
    config: dict[str, Any] = {"container_name": url.bucket, "account_name": account}
    endpoint = credentials.endpoint_url and server_url(credentials.endpoint_url, use_ssl=True)
    if endpoint is not None:
        config["endpoint"] = endpoint
    server = endpoint or f"https://{account}.blob.core.windows.net"
    place = f"{server}/{url.bucket}"
    provider, copier = credentials.provider, None

    def sign(client: Any, key: str) -> SignedGet:
        assert provider is not None
        token, quoted = provider(), _quoted(key)
        if "access_key" in token:
            if quoted != key:
                # obstore 0.12 signs the key as it is in the URL; Azure checks it as it is.
                raise LaneError("a key with such characters is not signed as Azure does")
            return _signed_url(client, key)
        if "sas_token" in token:
            return SignedGet(f"{place}/{quoted}?{token['sas_token']}")
        return _with_token(f"{place}/{quoted}", token, {"x-ms-version": AZURE_VERSION})

    # Without a provider obstore finds credentials of its own.
    signs = sign if provider is not None else _unsigned(place) if credentials.anonymous else None
    # A shared access signature would have to be in the URL of the source, which is kept among the
    # properties of the copy. (To look at what cannot be renewed asks nobody.)
    if provider is not None and (credentials.renew is not None or "sas_token" not in provider()):
        copier = Copier(server, partial(azure_headers, account, provider), azure_steps)
    make = _make(AzureStore, config, credentials, endpoint=endpoint, verify=options.verify)
    return ClientFactory(make, endpoint, signs, ordered=False, copier=copier)


def _make(
    store: Callable[..., Any],
    config: Mapping[str, Any],
    credentials: Credentials,
    *,
    endpoint: str | None,
    verify: bool | str,
    headers: Mapping[str, str] | None = None,
) -> NewClient:
    """Return what makes a store of obstore, of the configuration that all clients share."""
    client: dict[str, Any] = {}
    proxies = urllib.request.getproxies()
    if proxies.pop("no", "").strip() == "*" and proxies:
        # For obstore that is no address. Excluded can only be what goes through a proxy of ours.
        client = {"proxy_url": "http://127.0.0.1", "proxy_excludes": "*,0.0.0.0/0,::/0"}
    if verify is False:
        client["allow_invalid_certificates"] = True
    elif verify is not True:
        client["root_certificate"] = Path(verify).read_bytes()
    if endpoint is not None:
        client["allow_http"] = endpoint.startswith("http://")
    if headers:
        client["default_headers"] = headers

    def make(timeouts: dict[str, Any], retry: dict[str, Any]) -> Any:
        return store(
            config={"skip_signature": False, **config, **credentials.config},
            client_options={**client, **timeouts},
            retry_config=retry,
            credential_provider=credentials.provider,
        )

    return make


def _unsigned(place: str) -> Sign:
    """Send no credentials: everybody may read the bucket."""
    return lambda _client, key: SignedGet(f"{place}/{_quoted(key)}")


def _signed_url(client: Any, key: str) -> SignedGet:
    import obstore

    return SignedGet(obstore.sign(client, "GET", key, _SIGNED_FOR))


def _with_token(place: str, token: Any, headers: Mapping[str, str]) -> SignedGet:
    ends: datetime | None = token["expires_at"]
    left_seconds = (ends - datetime.now(UTC)).total_seconds() if ends else float("inf")
    until = time.monotonic() + left_seconds - _LEAST_LEFT_SECONDS
    return SignedGet(place, {"Authorization": f"Bearer {token['token']}", **headers}, until)


def _quoted(key: str) -> str:
    return quote(key, safe="/~")
