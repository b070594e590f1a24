"""Make obstore's clients for each provider, from its options and credentials.

A maker holds what the clients of a bucket have in common. It takes time-outs and retries, which
differ from client to client (`obstore.clients`).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
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
    from obstore.store import AzureStore, GCSStore, MemoryStore, S3Store

    from dcp_objstore.stores.credentials.base import Credentials
    from dcp_objstore.stores.options.azure import AzureOptions
    from dcp_objstore.stores.options.gcs import GcsOptions
    from dcp_objstore.stores.options.s3 import S3Options
    from dcp_objstore.stores.urls import StoreUrl

# Client options and the retry configuration to a client.
Make = Callable[[dict[str, Any], dict[str, Any]], "S3Store | GCSStore | AzureStore | MemoryStore"]

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
    """For a bucket of S3, or of a server that speaks it; and its endpoint, None for AWS itself.

    Raises:
        ConfigError: an endpoint, a region or a certificate that we cannot use.
    """
    from obstore.store import S3Store

    endpoint, region = s3_server(settings, found)
    config: dict[str, Any] = {
        "bucket": url.bucket,
        "region": region,
        # One object per DELETE: the bulk call is missing in some stores that speak S3.
        "disable_bulk_delete": True,
        # SHA-256 of every body took 1.0 instead of 0.3 CPU-seconds per GiB (2 cores, loopback).
        # AWS, SeaweedFS and moto take bodies without; TLS and our own digests protect the bytes.
        "unsigned_payload": not settings.sign_payload,
        "skip_signature": False,
        **found.config,
    }
    virtual = is_virtual(settings, endpoint, url.bucket)
    config["virtual_hosted_style_request"] = virtual
    client: dict[str, Any] = dict(_tls(settings.verify))
    if endpoint is not None:
        client["allow_http"] = endpoint.startswith("http://")
        # This field wins over every other, also over those of the environment.
        place = virtual_url(endpoint, url.bucket) if virtual else endpoint
        config["aws_endpoint_url_s3"] = place
    if settings.requester_pays:
        config["request_payer"] = True
    for name in ("sse", "sse_kms_key_id", "sse_bucket_key"):
        if (value := getattr(settings, name)) is not None:
            config[settings.option(name).native[0]] = value
    checksum = s3_checksum(settings, endpoint)
    if checksum is not None:
        if checksum in _OF_BOTO3:
            raise ConfigError(
                f"transport 'native' sends CRC64NVME or SHA256, not {checksum}; transport 'boto3'"
                " does"
            )
        config["checksum_algorithm"] = checksum
    if is_directory_bucket(url.bucket) and endpoint is None:
        # Sessions (CreateSession) and the endpoint of its zone.
        config["s3_express"] = True

    def make(timeouts: dict[str, Any], retry: dict[str, Any]) -> S3Store:
        with _checksum_variable_unread() if checksum is None else nullcontext():
            return S3Store(
                config=config,  # type: ignore[arg-type]
                client_options={**client, **timeouts},  # type: ignore[arg-type]
                retry_config=retry,  # type: ignore[arg-type]
                credential_provider=found.provider,
            )

    return make, endpoint


@contextmanager
def _checksum_variable_unread() -> Iterator[None]:
    """Keep the variable from obstore, which reads it itself and has no word for no checksum.

    It passes over values that are no text. To change a variable in place is harmless to C code that
    reads the environment meanwhile; to remove it and put it back would not be.
    """
    with _environ_lock.here:
        named = os.environ.get(CHECKSUM_VARIABLE)
        if named is None:
            yield
            return
        os.environ[CHECKSUM_VARIABLE] = "\udcff"
        try:
            yield
        finally:
            os.environ[CHECKSUM_VARIABLE] = named


def gcs_maker(url: StoreUrl, options: GcsOptions, found: Credentials) -> tuple[Make, str | None]:
    """For a bucket of Google Cloud Storage; and its endpoint, None for the provider's own.

    Raises:
        ConfigError: an endpoint or certificate that cannot be used; no project that pays.
    """
    from obstore.store import GCSStore

    config: dict[str, Any] = {"bucket": url.bucket, "skip_signature": False, **found.config}
    client: dict[str, Any] = dict(_tls(options.verify))
    if options.endpoint_url is not None:
        config["base_url"] = server_url(options.endpoint_url, use_ssl=True)
        client["allow_http"] = config["base_url"].startswith("http://")
    if options.payer:
        # "HTTP headers" of the XML API: the project that is billed.
        client["default_headers"] = {"x-goog-user-project": options.payer}

    def make(timeouts: dict[str, Any], retry: dict[str, Any]) -> GCSStore:
        return GCSStore(
            config=config,  # type: ignore[arg-type]
            client_options={**client, **timeouts},  # type: ignore[arg-type]
            retry_config=retry,  # type: ignore[arg-type]
            credential_provider=found.provider,
        )

    return make, config.get("base_url")


def azure_maker(
    url: StoreUrl, options: AzureOptions, found: Credentials
) -> tuple[Make, str | None]:
    """For a container of Azure Blob Storage; and its endpoint, None for the provider's own.

    Raises:
        ConfigError: an endpoint or certificate that we cannot use.
    """
    from obstore.store import AzureStore

    config: dict[str, Any] = {
        "container_name": url.bucket,
        "account_name": found.account_name,
        "skip_signature": False,
        **found.config,
    }
    client: dict[str, Any] = dict(_tls(options.verify))
    if found.endpoint_url is not None:
        config["endpoint"] = server_url(found.endpoint_url, use_ssl=True)
        client["allow_http"] = config["endpoint"].startswith("http://")

    def make(timeouts: dict[str, Any], retry: dict[str, Any]) -> AzureStore:
        return AzureStore(
            config=config,  # type: ignore[arg-type]
            client_options={**client, **timeouts},  # type: ignore[arg-type]
            retry_config=retry,  # type: ignore[arg-type]
            credential_provider=found.provider,
        )

    return make, config.get("endpoint")


def _tls(verify: bool | str) -> dict[str, Any]:
    if verify is True:
        return {}
    if verify is False:
        return {"allow_invalid_certificates": True}
    try:
        return {"root_certificate": Path(verify).expanduser().read_bytes()}
    except OSError as error:
        raise ConfigError(f"the certificates named by 'verify' cannot be read: {error}") from error
