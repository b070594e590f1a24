"""Make obstore's clients for each provider, from its options and credentials.

A maker holds what the clients of a bucket have in common. It takes time-outs and retries, which
differ from client to client (`obstore.clients`).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dcp_objstore.errors import ConfigError
from dcp_objstore.forking import PerProcess
from dcp_objstore.stores.endpoint import (
    is_directory_bucket,
    is_virtual,
    s3_checksum,
    s3_server,
    server_url,
    virtual_url,
)
from dcp_objstore.stores.options.s3 import CHECKSUM_VARIABLE

if TYPE_CHECKING:
    from obstore.store import MemoryStore

    from dcp_objstore.stores.credentials.base import Credentials
    from dcp_objstore.stores.options.azure import AzureOptions
    from dcp_objstore.stores.options.gcs import GcsOptions
    from dcp_objstore.stores.options.s3 import S3Options
    from dcp_objstore.stores.urls import StoreUrl

# From time-outs and the retry configuration to a store of obstore.
Make = Callable[[dict[str, Any], dict[str, Any]], Any]

# Checksums that obstore does not have.
_OF_BOTO3 = ("CRC32", "CRC32C")

_memory: PerProcess[dict[str, MemoryStore]] = PerProcess(dict)
_environ_lock = PerProcess(threading.Lock)


def memory_maker(url: StoreUrl) -> Make:
    """The memory store of a name: the same one in the whole process."""

    def make(_timeouts: dict[str, Any], _retry: dict[str, Any]) -> MemoryStore:
        from obstore.store import MemoryStore

        return _memory.here.setdefault(url.bucket, MemoryStore())

    return make


def s3_maker(url: StoreUrl, settings: S3Options, found: Credentials) -> tuple[Make, str | None]:
    """Return the maker of clients for an S3 bucket, and the endpoint; None is AWS itself.

    Raises:
        ConfigError: an endpoint or a region that cannot be used.
    """
    from obstore.store import S3Store

    endpoint, region = s3_server(settings, found)
    virtual = is_virtual(settings, endpoint, url.bucket)
    config: dict[str, Any] = {
        "bucket": url.bucket,
        "region": region,
        # One object per DELETE: the bulk call is missing in some stores that speak S3.
        "disable_bulk_delete": True,
        # SHA-256 of every body took 1.0 instead of 0.3 CPU-seconds per GiB (2 cores, loopback).
        # AWS, SeaweedFS and moto take bodies without; TLS and our own digests protect the bytes.
        "unsigned_payload": not settings.sign_payload,
        "virtual_hosted_style_request": virtual,
    }
    if endpoint is not None:
        place = virtual_url(endpoint, url.bucket) if virtual else endpoint
        # This field wins over every other, also over those of the environment.
        config["aws_endpoint_url_s3"] = place
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
    if is_directory_bucket(url.bucket) and endpoint is None:
        # Sessions (CreateSession) and the endpoint of its zone.
        config["s3_express"] = True
    make = _maker(S3Store, config, found, endpoint, settings.verify)
    return (make if checksum is not None else _without_variable(make)), endpoint


def gcs_maker(url: StoreUrl, options: GcsOptions, found: Credentials) -> tuple[Make, str | None]:
    """Return the maker of clients for a GCS bucket, and the endpoint; None is Google's own.

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
    return _maker(GCSStore, config, found, endpoint, options.verify, headers), endpoint


def azure_maker(
    url: StoreUrl, options: AzureOptions, found: Credentials
) -> tuple[Make, str | None]:
    """Return the maker of clients for an Azure container, and the endpoint; None is Azure's own.

    Raises:
        ConfigError: an endpoint that cannot be used.
    """
    from obstore.store import AzureStore

    config: dict[str, Any] = {"container_name": url.bucket, "account_name": found.account_name}
    endpoint = found.endpoint_url and server_url(found.endpoint_url, use_ssl=True)
    if endpoint is not None:
        config["endpoint"] = endpoint
    return _maker(AzureStore, config, found, endpoint, options.verify), endpoint


def _maker(
    store: Callable[..., Any],
    config: Mapping[str, Any],
    found: Credentials,
    endpoint: str | None,
    verify: bool | str,
    headers: Mapping[str, str] | None = None,
) -> Make:
    """Return the maker of clients, from what the providers have in common."""
    client: dict[str, Any] = {}
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
            config={"skip_signature": False, **config, **found.config},
            client_options={**client, **timeouts},
            retry_config=retry,
            credential_provider=found.provider,
        )

    return make


def _without_variable(make: Make) -> Make:
    """Keep the checksum's variable from obstore, which reads it itself and has no word for none.

    obstore passes over values that are no text. To change a variable in place is harmless to C code
    that reads the environment meanwhile; to remove it and put it back would not be.
    """

    def make_without(timeouts: dict[str, Any], retry: dict[str, Any]) -> Any:
        with _environ_lock.here:
            named = os.environ.get(CHECKSUM_VARIABLE)
            if named is None:
                return make(timeouts, retry)
            os.environ[CHECKSUM_VARIABLE] = "\udcff"
            try:
                return make(timeouts, retry)
            finally:
                os.environ[CHECKSUM_VARIABLE] = named

    return make_without
