"""obstore clients for one bucket: with retries for writes and reads, and one without."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar
from urllib.parse import urlsplit

from dcp_objstore.config import MIB, TransferConfig
from dcp_objstore.errors import ConfigError, CredentialsError, DcpObjstoreError
from dcp_objstore.stores.azure_credentials import find_azure_credentials
from dcp_objstore.stores.credentials import Credentials, find_s3_credentials
from dcp_objstore.stores.direct import SIGNED_FOR_SECONDS, DirectLane
from dcp_objstore.stores.google_credentials import find_gcs_credentials
from dcp_objstore.stores.limiter import HIDDEN_PAUSE_SECONDS, Limiter, limiter_at
from dcp_objstore.stores.options import S3Settings, check_endpoint, s3_settings
from dcp_objstore.stores.renewing import Renewing
from dcp_objstore.stores.retrying import (
    LONGEST_PAUSE_SECONDS,
    PAUSE_BASE,
    Tries,
)
from dcp_objstore.stores.translate import (
    http_code,
    is_expired,
    is_unknown_key,
    never_connected,
    translate_obstore,
)

if TYPE_CHECKING:
    from obstore.store import AzureStore, GCSStore, MemoryStore, S3Store

    from dcp_objstore.stores.urls import StoreUrl

# A read may wait this long for the next bytes. For writes there is no such limit: the transport
# counts it from the start of the request, so it would cut uploads off, not only stalled ones.
_READ_PROGRESS_TIMEOUT_SECONDS = 30.0
_DEFAULT_REGION = "us-east-1"
# Before a server has ever been reached, a wrong endpoint is likelier than an outage.
_FIRST_RETRY_TIMEOUT_SECONDS = 5.0
# What is sent with a longer body than this gets the time for a part of an upload.
SMALL_BYTES = 4 * MIB
# However short the stall time-out is, a small request has so long.
_LEAST_SMALL_TIMEOUT_SECONDS = 3.0
# As in `retrying`, for what obstore itself must retry; but parts of uploads are sent again no
# sooner than after 1 s, by which the limiter tells that they were (`limiter`).
_BACKOFF = {
    "init_backoff": timedelta(seconds=HIDDEN_PAUSE_SECONDS),
    "max_backoff": timedelta(seconds=LONGEST_PAUSE_SECONDS),
    "base": PAUSE_BASE,
}
_Kind = Literal["stream", "write", "small", "read", "range", "list", "first"]

T = TypeVar("T")

Make = Callable[[dict[str, Any], dict[str, Any]], "S3Store | GCSStore | AzureStore | MemoryStore"]

_memory: dict[str, MemoryStore] = {}
_memory_lock = threading.Lock()


class Clients:
    """Makes each client on first use. They differ because time-outs and retries are per client.

    Only what cannot be sent again from here is retried by obstore: the parts of an upload, and the
    pages of a listing. A small request (marker, index, listing) is given up within the stall
    time-out, like a transfer: a try has a third of that, and no retry begins after a third of it.

    Attributes:
        endpoint_url: the server, or None for the provider's own.
        reached: whether the server has ever answered, in whatever way.
        limiter: of the bucket.
    """

    def __init__(
        self,
        make: Make,
        config: TransferConfig,
        limiter: Limiter,
        endpoint_url: str | None = None,
        *,
        direct: bool = False,
        credentials: Credentials | None = None,
    ) -> None:
        self.endpoint_url = endpoint_url
        self._credentials = credentials
        self._direct = direct
        self._renewals = 0
        self.reached = False
        self.limiter = limiter
        self._make = make
        self._config = config
        self._lane = self._new_lane()
        third_seconds = config.stall_timeout_seconds / 3
        self._small_timeout_seconds = min(
            config.request_timeout_seconds, max(third_seconds, _LEAST_SMALL_TIMEOUT_SECONDS)
        )
        self._small_patience_seconds = min(config.retry_timeout_seconds, third_seconds)
        self._made: dict[str, Any] = {}
        self._lock = threading.Lock()

    def stream(self) -> Any:
        """For multipart uploads: retries by obstore; each part has `request_timeout_seconds`."""
        return self._get("stream")

    def write(self, size_bytes: int) -> Any:
        """For one PUT or DELETE, sent once."""
        return self._get("small" if size_bytes <= SMALL_BYTES else "write")

    def read(self) -> Any:
        """For a small object, sent once; gives up on a body that makes no progress."""
        return self._get("read")

    def range(self) -> Any:
        """For a range, sent once; gives up on a body that makes no progress."""
        return self._get("range")

    def listing(self) -> Any:
        """For listings: retries by obstore; no retry begins after 5 s if it was never reached."""
        return self._get("list" if self.reached else "first")

    def direct(self) -> DirectLane | None:
        """For reads over plain HTTP whose URL can be signed, without further headers."""
        return self._lane

    def tries(self, verb: str, key: str, size_bytes: int = 0) -> Tries:
        """For one request of at most `size_bytes`, whose client sends it once."""
        patience_seconds = self._small_patience_seconds
        if size_bytes > SMALL_BYTES or verb == "get_range":
            patience_seconds = self._config.retry_timeout_seconds
        return Tries(self.limiter, verb, key, self._config.max_retries, patience_seconds)

    def fresh(self, request: Callable[[], T]) -> T:
        """`request()`; once more with fresh credentials where those were refused as expired.

        It must ask for its client each time. A request that was refused had no effect.

        Raises:
            CredentialsError: they have expired, and there are no others; says what to do.
        """
        seen = self._renewals
        try:
            return request()
        except Exception as error:
            found = self._credentials
            gone = found is not None and found.renewable and is_unknown_key(error)
            if found is None or not (gone or is_expired(error)):
                raise
            failure = error
        self.renew(failure, seen)
        try:
            return request()
        except Exception as error:
            if not is_expired(error):
                raise
            raise self._expired(error, "fresh ones from there were refused as well") from error

    def renew(self, error: Exception, seen: int | None = None) -> None:
        """Forget the credentials that were refused, so that the next request asks for others.

        Args:
            error: the refusal.
            seen: how often they had been renewed when the request was made; if somebody has
                done so since, there is nothing to do.

        Raises:
            CredentialsError: there are no others to be had.
        """
        found = self._credentials
        if found is None or not found.renewable:
            raise self._expired(error, "they cannot be refreshed from here") from error
        with self._lock:
            if seen is not None and seen != self._renewals:
                return
            self._renewals += 1
            if isinstance(found.provider, Renewing):
                found.provider.renew()
            self._made.clear()  # obstore keeps credentials per client
            self._lane = self._new_lane()

    def _expired(self, error: Exception, why: str) -> CredentialsError:
        source = "unknown" if self._credentials is None else self._credentials.source
        return CredentialsError(
            f"the store no longer accepts the credentials (source: {source}), and {why}. Pass new"
            " ones, log in again (aws sso login), or use a source that renews them itself: a"
            f" profile, a role ({translate_obstore(error).message})"
        )

    def run(self, tries: Tries, request: Callable[[], T], *, repeatable: bool = True) -> T:
        """`tries.run(request)`, which gives up soon on a server that has never been reached.

        Args:
            repeatable: False for what must not be sent again after an answer that was lost.
        """

        def may_retry(error: Exception) -> bool:
            lost = never_connected(error)
            if not lost:
                self.reached = True  # it is there, and busy: have the patience that was asked for
            elif not self.reached:
                tries.patience_seconds = min(_FIRST_RETRY_TIMEOUT_SECONDS, tries.patience_seconds)
            return repeatable or lost or http_code(error)[0] is not None

        try:
            result = self.fresh(lambda: tries.run(request, may_retry))
        except Exception as error:
            if not isinstance(error, DcpObjstoreError) and not never_connected(error):
                self.reached = True
            raise
        self.reached = True
        return result

    def _new_lane(self) -> DirectLane | None:
        if not self._direct:
            return None
        seconds = min(_READ_PROGRESS_TIMEOUT_SECONDS, self._config.request_timeout_seconds)
        return DirectLane(self._sign, seconds)

    def _sign(self, path: str) -> str:
        import obstore

        lasting = timedelta(seconds=SIGNED_FOR_SECONDS)
        return obstore.sign(self.range(), "GET", path, lasting)

    def _get(self, kind: _Kind) -> Any:
        with self._lock:
            if kind not in self._made:
                self._made[kind] = self._make(self._timeouts(kind), self._retries(kind))
            return self._made[kind]

    def _timeouts(self, kind: _Kind) -> dict[str, Any]:
        config = self._config
        whole_seconds = config.request_timeout_seconds
        if kind in ("small", "list", "first"):
            whole_seconds = self._small_timeout_seconds
        timeouts = {
            "timeout": timedelta(seconds=whole_seconds),
            "connect_timeout": timedelta(
                seconds=min(config.connect_timeout_seconds, whole_seconds)
            ),
        }
        if kind in ("read", "range", "list", "first"):
            progress_seconds = min(_READ_PROGRESS_TIMEOUT_SECONDS, whole_seconds)
            if kind != "range":
                progress_seconds = min(progress_seconds, self._small_timeout_seconds)
            timeouts["read_timeout"] = timedelta(seconds=progress_seconds)
        return timeouts

    def _retries(self, kind: _Kind) -> dict[str, Any]:
        patience_seconds = self._small_patience_seconds
        if kind == "stream":
            patience_seconds = self._config.retry_timeout_seconds
        elif kind == "first":
            patience_seconds = min(_FIRST_RETRY_TIMEOUT_SECONDS, patience_seconds)
        return {
            "max_retries": self._config.max_retries if kind in ("stream", "list", "first") else 0,
            "retry_timeout": timedelta(seconds=patience_seconds),
            "backoff": dict(_BACKOFF),
        }


def make_clients(
    url: StoreUrl,
    options: Mapping[str, Any],
    config: TransferConfig,
    stripped: tuple[str, ...] = (),
) -> Clients:
    """Clients for the bucket of a URL.

    Args:
        url: its prefix is not used.
        options: as checked by `check_options`.
        config: time-outs and retries.
        stripped: names of options that were left behind when the spec was pickled.

    Raises:
        CredentialsError: there are none.
        ConfigError: an endpoint or certificate that we cannot use.
    """
    if url.scheme == "memory":
        limiter = limiter_at(None, url.scheme, url.bucket)
        return Clients(lambda _client, _retry: _memory_store(url.bucket), config, limiter)
    if url.scheme == "gs":
        # To sign a URL, GCS would ask for a private key or make a request.
        make, endpoint_url = _gcs(url, options, stripped)
        return Clients(make, config, limiter_at(endpoint_url, url.scheme, url.bucket), endpoint_url)
    if url.scheme == "az":
        make, endpoint_url = _azure(url, options, stripped)
        return Clients(make, config, limiter_at(endpoint_url, url.scheme, url.bucket), endpoint_url)
    settings = s3_settings(options)
    found = find_s3_credentials(settings, stripped)
    make, endpoint_url = _s3(url, settings, found)
    plain = endpoint_url is not None and endpoint_url.startswith("http://")
    signed = not settings.anon and not s3_requester_pays(settings)
    limiter = limiter_at(endpoint_url, url.scheme, url.bucket)
    return Clients(make, config, limiter, endpoint_url, direct=plain and signed, credentials=found)


def _memory_store(name: str) -> MemoryStore:
    from obstore.store import MemoryStore

    with _memory_lock:
        return _memory.setdefault(name, MemoryStore())


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


def _s3(url: StoreUrl, settings: S3Settings, found: Credentials) -> tuple[Make, str | None]:
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
    # A bucket name with dots does not match the certificate of *.s3.amazonaws.com.
    virtual = settings.addressing_style == "virtual" or (
        settings.addressing_style in (None, "auto") and endpoint is None and "." not in url.bucket
    )
    config["virtual_hosted_style_request"] = virtual
    client: dict[str, Any] = dict(_tls(settings.verify))
    base: str | None = None
    if endpoint is not None:
        base = server_url(endpoint, use_ssl=settings.use_ssl)
        client["allow_http"] = base.startswith("http://")
        scheme, _, host = base.partition("://")
        # This field wins over every other, also over those of the environment.
        config["aws_endpoint_url_s3"] = f"{scheme}://{url.bucket}.{host}" if virtual else base
    if s3_requester_pays(settings):
        config["request_payer"] = True
    if settings.sse is not None:
        config["server_side_encryption"] = settings.sse
    if settings.sse_kms_key_id is not None:
        config["sse_kms_key_id"] = settings.sse_kms_key_id
    if settings.sse_bucket_key is not None:
        config["sse_bucket_key_enabled"] = settings.sse_bucket_key
    checksum = s3_checksum(settings, base)
    if checksum is not None:
        config["checksum_algorithm"] = checksum
    if is_directory_bucket(url.bucket) and base is None:
        # Sessions (CreateSession) and the endpoint of its zone.
        config["s3_express"] = True

    def make(timeouts: dict[str, Any], retry: dict[str, Any]) -> S3Store:
        return S3Store(
            config=config,  # type: ignore[arg-type]
            client_options={**client, **timeouts},  # type: ignore[arg-type]
            retry_config=retry,  # type: ignore[arg-type]
            credential_provider=found.provider,
        )

    return make, base


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


def _gcs(
    url: StoreUrl, options: Mapping[str, Any], stripped: tuple[str, ...]
) -> tuple[Make, str | None]:
    from obstore.store import GCSStore

    endpoint = options.get("base_url") or options.get("endpoint_url")
    endpoint = endpoint or os.environ.get("GOOGLE_BASE_URL")
    found = find_gcs_credentials(options, endpoint, stripped)
    config: dict[str, Any] = {"bucket": url.bucket, "skip_signature": False, **found.config}
    client: dict[str, Any] = dict(_tls(options.get("verify", True)))
    if endpoint is not None:
        config["base_url"] = server_url(endpoint, use_ssl=True)
        client["allow_http"] = config["base_url"].startswith("http://")
    pays = options.get("requester_pays")
    payer = options.get("project") if pays is True else pays
    if pays is True and payer is None:
        raise ConfigError("'requester_pays': name the project that pays in 'project' as well")
    if payer:
        # "HTTP headers" of the XML API: the project that is billed.
        client["default_headers"] = {"x-goog-user-project": payer}

    def make(timeouts: dict[str, Any], retry: dict[str, Any]) -> GCSStore:
        return GCSStore(
            config=config,  # type: ignore[arg-type]
            client_options={**client, **timeouts},  # type: ignore[arg-type]
            retry_config=retry,  # type: ignore[arg-type]
            credential_provider=found.provider,
        )

    return make, config.get("base_url")


def _azure(
    url: StoreUrl, options: Mapping[str, Any], stripped: tuple[str, ...]
) -> tuple[Make, str | None]:
    from obstore.store import AzureStore

    found = find_azure_credentials(options, stripped)
    config: dict[str, Any] = {
        "container_name": url.bucket,
        "account_name": found.account_name,
        "skip_signature": False,
        **found.config,
    }
    client: dict[str, Any] = dict(_tls(options.get("verify", True)))
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


def _tls(verify: bool | str) -> dict[str, Any]:
    if verify is True:
        return {}
    if verify is False:
        return {"allow_invalid_certificates": True}
    try:
        return {"root_certificate": Path(verify).expanduser().read_bytes()}
    except OSError as error:
        raise ConfigError(f"the certificates named by 'verify' cannot be read: {error}") from error
