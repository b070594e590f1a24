"""obstore clients for one bucket: their time-outs and retries, and credentials that are renewed."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from dcp_objstore.config import MIB, TransferConfig
from dcp_objstore.errors import CredentialsError, DcpObjstoreError
from dcp_objstore.stores.admission.limiter import HIDDEN_PAUSE_SECONDS, Limiter, limiter_at
from dcp_objstore.stores.credentials.aws import find_s3_credentials
from dcp_objstore.stores.credentials.azure import find_azure_credentials
from dcp_objstore.stores.credentials.base import Credentials
from dcp_objstore.stores.credentials.google import find_gcs_credentials
from dcp_objstore.stores.endpoint import tls_context
from dcp_objstore.stores.obstore.direct import DirectLane
from dcp_objstore.stores.obstore.errors import (
    http_code,
    is_expired,
    is_refused_token,
    is_unknown_key,
    never_connected,
    translate_obstore,
)
from dcp_objstore.stores.obstore.makers import (
    Make,
    azure_maker,
    gcs_maker,
    memory_maker,
    s3_maker,
)
from dcp_objstore.stores.obstore.retries import (
    LONGEST_PAUSE_SECONDS,
    PAUSE_BASE,
    Tries,
)
from dcp_objstore.stores.obstore.signing import Sign, azure_sign, gcs_sign, s3_sign
from dcp_objstore.stores.options.azure import AzureOptions
from dcp_objstore.stores.options.gcs import GcsOptions
from dcp_objstore.stores.options.parse import parse
from dcp_objstore.stores.options.s3 import S3Options

if TYPE_CHECKING:
    from dcp_objstore.stores.urls import StoreUrl

# A read may wait this long for the next bytes. For writes there is no such limit: the transport
# counts it from the start of the request, so it would cut uploads off, not only stalled ones.
_READ_PROGRESS_TIMEOUT_SECONDS = 30.0
# Before a server has ever been reached, a wrong endpoint is likelier than an outage.
_FIRST_RETRY_TIMEOUT_SECONDS = 5.0
# What is sent with a longer body than this gets the time for a part of an upload.
SMALL_BYTES = 4 * MIB
# However short the stall time-out is, a small request has so long.
_LEAST_SMALL_TIMEOUT_SECONDS = 3.0
# As in `retries`, for what obstore itself must retry; but parts of uploads are sent again no
# sooner than after 1 s, by which the limiter tells that they were (`admission`).
_BACKOFF = {
    "init_backoff": timedelta(seconds=HIDDEN_PAUSE_SECONDS),
    "max_backoff": timedelta(seconds=LONGEST_PAUSE_SECONDS),
    "base": PAUSE_BASE,
}
_Kind = Literal["stream", "write", "small", "read", "range", "list", "first"]

T = TypeVar("T")


class Clients:
    """Makes each client on first use. They differ because time-outs and retries are per client.

    Only what cannot be sent again from here is retried by obstore: the parts of an upload, and the
    pages of a listing. A small request (marker, index, listing) is given up within the stall
    time-out, like a transfer: a try has a third of that, and no retry begins after a third of it.

    Attributes:
        endpoint_url: the server, or None for the provider's own.
        reached: whether the server has ever answered, in whatever way.
        proven: whether an answer was such as only a store gives.
        limiter: of the bucket.
    """

    def __init__(
        self,
        make: Make,
        config: TransferConfig,
        limiter: Limiter,
        endpoint_url: str | None = None,
        *,
        sign: Sign | None = None,
        trust: Callable[[], ssl.SSLContext] = ssl.create_default_context,
        credentials: Credentials | None = None,
    ) -> None:
        self.endpoint_url = endpoint_url
        self._credentials = credentials
        self._sign, self._trust = sign, trust
        self._renewals = 0
        self.reached = False
        self.proven = False
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
        """For reads whose requests can be signed here."""
        return self._lane

    def tries(self, verb: str, key: str, size_bytes: int = 0) -> Tries:
        """For one request of at most `size_bytes`, whose client sends it once."""
        patience_seconds = self._small_patience_seconds
        if size_bytes > SMALL_BYTES or verb == "open_range":
            patience_seconds = self._config.retry_timeout_seconds
        return Tries(self.limiter, key, self._config.max_retries, patience_seconds)

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
            if not self.were_refused(error):
                raise
            failure = error
        self.renew(failure, seen)
        try:
            return request()
        except Exception as error:
            if not (is_expired(error) or is_refused_token(error)):
                raise
            raise self._expired(error, "fresh ones from there were refused as well") from error

    def were_refused(self, error: BaseException | None) -> bool:
        """Whether a request failed because of credentials in whose place others may do."""
        found = self._credentials
        if found is None or found.anonymous:
            return False
        gone = found.renew is not None and is_unknown_key(error)
        return gone or is_expired(error) or is_refused_token(error)

    def renew(self, error: Exception, seen: int | None = None) -> None:
        """Forget the credentials that were refused, so that the next request asks for others.

        Args:
            error: the refusal.
            seen: how often they had been renewed when the request was made; if somebody has
                done so since, there is nothing to do.

        Raises:
            CredentialsError: there are no others.
        """
        found = self._credentials
        if found is None or found.renew is None:
            raise self._expired(error, "they cannot be refreshed from here") from error
        with self._lock:
            if seen is not None and seen != self._renewals:
                return
            found.renew()
            self._renewals += 1
            self._made.clear()  # obstore keeps credentials per client
            self._lane = self._new_lane()

    def _expired(self, error: Exception, why: str) -> CredentialsError:
        found = self._credentials or Credentials("unknown")
        accepts = "no longer accepts" if is_expired(error) else "does not, or no longer, accept"
        return CredentialsError(
            f"the store {accepts} the credentials (source: {found.source}), and {why}. Pass new"
            f" ones, {found.advice} ({translate_obstore(error).message})"
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
            if http_code(error)[1] is not None:
                self.proven = True
            raise
        self.reached = True
        return result

    def _new_lane(self) -> DirectLane | None:
        sign = self._sign
        if sign is None:
            return None
        seconds = min(_READ_PROGRESS_TIMEOUT_SECONDS, self._config.request_timeout_seconds)
        return DirectLane(lambda path: sign(self.range(), path), seconds, self._trust)

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
        return Clients(memory_maker(url), config, limiter)
    verify: bool | str
    if url.scheme == "gs":
        gcs = parse(GcsOptions, options)
        found = find_gcs_credentials(gcs, stripped)
        make, endpoint_url = gcs_maker(url, gcs, found)
        sign = gcs_sign(url, gcs, found, endpoint_url)
        verify = gcs.verify
    elif url.scheme == "az":
        azure = parse(AzureOptions, options)
        found = find_azure_credentials(azure, stripped)
        make, endpoint_url = azure_maker(url, azure, found)
        sign = azure_sign(url, found, endpoint_url)
        verify = azure.verify
    else:
        settings = parse(S3Options, options)
        found = find_s3_credentials(settings, stripped)
        make, endpoint_url = s3_maker(url, settings, found)
        sign = s3_sign(url, settings, found)
        verify = settings.verify
    limiter = limiter_at(endpoint_url, url.scheme, url.bucket)
    trust = partial(tls_context, verify)
    return Clients(make, config, limiter, endpoint_url, sign=sign, trust=trust, credentials=found)
