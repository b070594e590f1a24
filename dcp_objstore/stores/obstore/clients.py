"""obstore clients for one bucket: their time-outs and retries, and credentials that are renewed."""

from __future__ import annotations

import http.client
import ssl
import threading
from collections.abc import Callable
from datetime import timedelta
from email.message import Message
from typing import Any, Literal, TypeVar
from urllib.request import Request

from dcp_objstore.config import TransferConfig
from dcp_objstore.errors import ConfigError, CredentialsError, StoreUnavailableError
from dcp_objstore.stores.admission.limiter import HIDDEN_PAUSE_SECONDS
from dcp_objstore.stores.credentials import ANONYMOUS, Credentials
from dcp_objstore.stores.endpoint import answer_to
from dcp_objstore.stores.errors import Failure
from dcp_objstore.stores.obstore.direct import DirectLane
from dcp_objstore.stores.obstore.errors import (
    RefusedError,
    http_code,
    judge_obstore,
    refusal_of,
)
from dcp_objstore.stores.obstore.factory import ClientFactory
from dcp_objstore.stores.retries import READ_PROGRESS_SECONDS, Requests, Tries
from dcp_objstore.stores.urls import StoreUrl

# The pauses of the parts of uploads, which only obstore itself can send again. It has a jitter of
# its own: a pause is random between the first one and `base` times the last one, and with a base of
# 2 they would hardly grow. Parts are sent again no sooner than after 1 s, by which the limiter
# recognizes them (`admission`).
_BACKOFF = {
    "init_backoff": timedelta(seconds=HIDDEN_PAUSE_SECONDS),
    "max_backoff": timedelta(seconds=10),
    "base": 3,
}
Use = Literal["stream", "write", "small", "read", "range", "list"]

T = TypeVar("T")


class Clients(Requests):
    """Makes each client on first use. They differ because time-outs and retries are per client.

    Only what cannot be sent again from here is retried by obstore: the parts of an upload. One try
    of a small request (marker, index, listing) has a third of the stall time-out.

    Attributes:
        lane: the direct lane for reads whose requests can be signed here; None if there is none.
        copier: what asks for copies of whole objects; None where there are none.
        ordered: whether a listing may begin behind a key.
        is_secure: whether requests go over TLS.
        proven: whether an answer has shown that this is a store.
        has_put: whether an object was put, so that a 404 means the key and not the bucket.
    """

    _verbs_in_slots = (
        *Requests._verbs_in_slots,
        "list",
    )  # the next keys may have come with the last ones

    def __init__(
        self,
        url: StoreUrl,
        factory: ClientFactory,
        config: TransferConfig,
        *,
        trust: Callable[[], ssl.SSLContext] = ssl.create_default_context,
        credentials: Credentials = ANONYMOUS,
    ) -> None:
        """Keep the arguments. A client is made when it is first used."""
        super().__init__(config, judge_obstore, factory.endpoint_url, url)
        self._factory = factory
        self.ordered, self.copier = factory.ordered, factory.copier
        # Without an endpoint the server is the provider's own, which speaks TLS.
        self.is_secure = not (factory.endpoint_url or "").startswith("http:")
        self._credentials = credentials
        self._trust = trust
        self._renewal_count = 0
        # No request was sent yet, so no answer has shown that this is a store.
        self.proven = self.has_put = False
        self._config = config
        self.lane = self._new_lane()
        self._clients_by_use: dict[str, Any] = {}
        self._lock = threading.Lock()

    def get(self, use: Use) -> Any:
        """Return the client for a use.

        Args:
            use: `stream` for uploads in parts, `write` and `small` for a PUT or DELETE by its size,
                `read` for small objects, `range`, and `list`. A body that stalls is given up.
        """
        with self._lock:
            if use not in self._clients_by_use:
                self._clients_by_use[use] = self._open(use)
            return self._clients_by_use[use]

    def _open(self, use: Use) -> Any:
        """Make a client of obstore with the time-outs and retries of a use.

        `timeout` bounds a whole request, `read_timeout` the wait for the next bytes of an answer.
        """
        config, small_seconds = self._config, self.small_timeout_seconds
        is_small = use in ("small", "list")
        seconds = {"timeout": small_seconds if is_small else config.request_timeout_seconds}
        seconds["connect_timeout"] = min(config.connect_timeout_seconds, seconds["timeout"])
        # Only reads have a `read_timeout`: see `READ_PROGRESS_SECONDS`.
        if use in ("read", "list"):
            seconds["read_timeout"] = min(READ_PROGRESS_SECONDS, seconds["timeout"], small_seconds)
        elif use == "range":
            seconds["read_timeout"] = min(READ_PROGRESS_SECONDS, seconds["timeout"])
        retries = {
            # `run` sends every request again but the parts of a stream.
            "max_retries": config.max_retries if use == "stream" else 0,
            "retry_timeout": timedelta(seconds=self._policy.patience_seconds),
            "backoff": dict(_BACKOFF),
        }
        return self._factory.new_client(
            {name: timedelta(seconds=value) for name, value in seconds.items()}, retries
        )

    def with_fresh_credentials(self, request: Callable[[], T]) -> T:
        """Call `request`; if the store refuses the credentials, once more with fresh ones.

        A request that was refused had no effect, so it may be sent again.

        Args:
            request: a function that sends the request. It must `get` its client each time that it
                is called, because a client keeps its credentials.

        Raises:
            CredentialsError: the credentials were refused, and there are no others; says what to
                do.
        """
        renewals_before = self._renewal_count
        try:
            return request()
        except Exception as error:
            if not self.were_refused(error):
                raise
            refusal = error
        self.renew(refusal, renewals_before)  # raises `CredentialsError` if there are no others
        try:
            return request()
        except Exception as error:
            # Any other error is the store's own to explain, also that it does not know the new key.
            if refusal_of(error) not in ("expired", "token"):
                raise
            raise self._refused_error(
                error, "fresh ones from there were refused as well"
            ) from error

    def were_refused(self, error: BaseException) -> bool:
        """Whether the store refused the credentials of a request, and others may be accepted.

        If there are no others, `renew` raises the error that says so.
        """
        if self._credentials.anonymous:
            return False
        why = refusal_of(error)
        # If credentials are given once and never renewed, an unknown key is wrong, not too old.
        is_given_once = self._credentials.renew is None
        return why is not None and not (why == "unknown key" and is_given_once)

    def renew(self, error: Exception, renewals_before: int | None = None) -> None:
        """Forget the credentials that were refused, so that the next request asks for others.

        Args:
            error: the refusal.
            renewals_before: the number of renewals when the request was made; if there has been
                another since, there is nothing to do. None: it is not known.

        Raises:
            CredentialsError: there are no others.
        """
        renew = self._credentials.renew
        if renew is None:
            raise self._refused_error(error, "they cannot be refreshed from here") from error
        with self._lock:
            if renewals_before not in (None, self._renewal_count):
                return  # another thread has renewed them since the request was made
            renew()
            self._renewal_count += 1
            self._clients_by_use.clear()  # a client of obstore keeps its credentials
            self.lane = self._new_lane()  # the old lane keeps requests that are signed with them

    def _refused_error(self, error: Exception, why: str) -> CredentialsError:
        """Return the error for credentials that the store refused, where there are no others.

        Args:
            error: the refusal.
            why: the reason why no others will do, in words.
        """
        # Only this code says for certain that they were valid once.
        have_expired = refusal_of(error) == "expired"
        accepts = "no longer accepts" if have_expired else "does not, or no longer, accept"
        return CredentialsError(
            f"the store {accepts} the credentials (source: {self._credentials.source}), and {why}:"
            f" {judge_obstore(error).details.text}",
            advice=f"pass new ones, {self._credentials.advice}",
        )

    def run(self, tries: Tries, request: Callable[[], T], *, repeatable: bool = True) -> T:
        """Do what `Requests.run` does, with fresh credentials where those sent were refused."""
        try:
            return self.with_fresh_credentials(
                lambda: super(Clients, self).run(tries, request, repeatable=repeatable)
            )
        except Exception as error:
            _, code = http_code(error)
            if code is not None:
                self.proven = True  # only a store answers with an error code
            raise

    def ask(self, key: str, purpose: str, make: Callable[[], Request]) -> tuple[Message, bytes]:
        """Send a request of a copy, which obstore has no call for.

        It is tried again and gets fresh credentials as by `run`.

        Args:
            key: the key in the bucket.
            purpose: the purpose of the request, in words.
            make: a function that makes the request, each time that it is sent.

        Returns:
            The answer's headers and body.
        """

        def send() -> tuple[Message, bytes]:
            seconds = self._config.request_timeout_seconds
            try:
                request = make()
            except Exception as error:
                # The libraries that ask for tokens raise errors of any kind.
                raise CredentialsError(f"{type(error).__name__}: {error}") from error
            try:
                status, headers, body = answer_to(request, self._trust(), seconds, purpose)
            except StoreUnavailableError as error:
                reason = getattr(error.__cause__, "reason", None)
                if isinstance(reason, ssl.SSLCertVerificationError):
                    raise ConfigError(f"the TLS certificate is not valid here: {reason}") from error
                # After this error, `Tries.run` sends the request again; after a `DcpObjstoreError`
                # it does not.
                raise ConnectionError(error.message) from error
            except ValueError:
                # `http.client` refuses a header; the error's text may show the credentials in it.
                raise CredentialsError("the credentials cannot be sent in a header") from None
            # An error or a redirect, which is not followed. The header is Azure's.
            if status >= http.client.MULTIPLE_CHOICES:
                raise RefusedError(purpose, status, headers["x-ms-error-code"])
            return headers, body

        return self.run(self.tries("copy", key), send)

    def _judge_try(self, tries: Tries, error: Exception) -> Failure:
        # What the lane has seen of the server counts, too.
        lane = self.lane
        self.reached = self.reached or (lane is not None and lane.answered)
        return super()._judge_try(tries, error)

    def _new_lane(self) -> DirectLane | None:
        """Make a direct lane; None where its requests cannot be signed here."""
        sign = self._factory.sign
        if sign is None:
            return None
        seconds = min(READ_PROGRESS_SECONDS, self._config.request_timeout_seconds)
        # A client of obstore may sign the request; `get` makes another client after `renew`.
        return DirectLane(lambda path: sign(self.get("range"), path), seconds, self._trust)
