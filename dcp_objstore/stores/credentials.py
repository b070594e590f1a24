"""`Credentials`: what every finder returns, and what the finders share."""

from __future__ import annotations

import http.client
import importlib.util
import threading
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from dcp_objstore.errors import CredentialsError
from dcp_objstore.observe.report import logger
from dcp_objstore.stores.options import cannot_be_sent

LOG_IN_TO_AWS: Final = (
    "log in again (aws sso login), or use a source that renews them itself: a profile, a role"
)
# The libraries renew credentials this long before they end, or later.
_MARGIN = timedelta(minutes=10)
# A source that failed is asked again after this time, while the last credentials are still valid.
_AGAIN_AFTER = timedelta(seconds=10)
# The time-out of each try to connect to the metadata service. boto3 waits as long, tries once.
_METADATA_TIMEOUT_SECONDS = 1.0
_METADATA_TRIES = 2


@dataclass(frozen=True)
class Credentials:
    """The credentials to give obstore, and what is known of them.

    Attributes:
        source: the place where they come from, in words, for messages.
        provider: a function that obstore calls for credentials; None where obstore finds them
            itself.
        config: additional settings of obstore's store.
        renew: a function that makes the next client of obstore, or the next call of `provider`,
            ask the source again, and raises `CredentialsError` if there is nothing else to get.
            None: what was given is all there is.
        advice: the advice for when they are refused and there are no others.
        region: the profile's region, or None.
        endpoint_url: the endpoint that a profile or a connection string names, or None.
        account_name: the storage account (Azure), the account's e-mail address (GCS), or None.
        addressing_style: the profile's addressing style (S3 alone), or None.
        core: the session of botocore that has read the profile, or None.
    """

    source: str
    provider: Callable[[], Any] | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    renew: Callable[[], None] | None = None
    advice: str = LOG_IN_TO_AWS
    region: str | None = None
    endpoint_url: str | None = None
    account_name: str | None = None
    addressing_style: str | None = None
    core: Any = None

    def __repr__(self) -> str:
        return f"Credentials(source={self.source!r})"

    @property
    def anonymous(self) -> bool:
        """Whether requests are sent without any."""
        return bool(self.config.get("skip_signature"))


ANONYMOUS: Final = Credentials("anonymous", config={"skip_signature": True})


def fixed_credentials(source: str, **credential: str | None) -> Credentials:
    """Credentials that are given once, under obstore's names.

    They are a provider's answer. obstore would mix settings of its store with credentials in the
    environment, such as an AWS_SESSION_TOKEN that belongs to another key.

    Raises:
        CredentialsError: one cannot be sent in a header, over which obstore would panic.
    """
    for name, value in credential.items():
        if value is not None and cannot_be_sent(value):
            raise CredentialsError(f"{source}: the {name} holds a line break or control character")
    return Credentials(source, lambda: {**credential, "expires_at": None})


class Renewing:
    """A provider of obstore that asks a library for credentials, again before they end.

    The libraries of the clouds know when temporary credentials end (SSO, an assumed role, a token),
    and renew them, but only when they are asked. obstore's own helpers ask every half hour or at
    the end, so credentials that last an hour or less expire in the middle of a save. This asks 10
    minutes before they end, or once two thirds of a shorter life are over. A request with all its
    retries, which keep their first signature, takes less time than what is left then.

    Args:
        source: the place where they come from, in words.
        ask: a function that returns credentials under obstore's names, with the time at which they
            end, or None. With True it returns others than those before, which were refused. It
            raises CredentialsError with a text that holds no secret. Only the class of any other
            error is shown.
        advice: what to do if there are none.
        now: the time, for tests.
    """

    # obstore's default, 5 minutes, calls for each request in that time; `expires_at` is early.
    refresh_threshold = timedelta(0)

    def __init__(
        self,
        source: str,
        ask: Callable[[bool], Mapping[str, Any]],
        advice: str = LOG_IN_TO_AWS,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self.ask = ask
        self._source = source
        self._advice = advice
        self._now = now
        self._lock = threading.Lock()  # the first requests of a save come at the same time
        self._credentials: Mapping[str, Any] | None = None
        self._ask_again_at: datetime | None = None  # None: not asked yet, or they do not end

    def __repr__(self) -> str:
        return f"Renewing({self._source!r})"

    def __call__(self) -> dict[str, Any]:
        """Return credentials for now.

        Raises:
            CredentialsError: there are none, or none any more.
        """
        with self._lock:
            credentials = self._credentials
            is_due = self._ask_again_at is not None and self._now() >= self._ask_again_at
            if credentials is None or is_due:
                credentials = self._fetch(others=False)
            return {**credentials, "expires_at": self._ask_again_at}

    def renew(self) -> None:
        """Get other credentials: the present ones were refused.

        Raises:
            CredentialsError: there are no others.
        """
        with self._lock:
            self._credentials = None
            self._fetch(others=True)

    def _fetch(self, *, others: bool) -> Mapping[str, Any]:
        """Ask for credentials. If that fails, the last ones are returned until they end.

        Args:
            others: whether the last ones were refused, so that others are needed.

        Raises:
            CredentialsError: asking failed, and there are no last ones, or they have ended.
        """
        now = self._now()
        try:
            self._credentials = credentials = self.ask(others)
        except CredentialsError as error:
            failure = error.message
        except Exception as error:  # noqa: BLE001  files, processes and services are asked
            # The error's text is left out: it may quote what a credential process printed.
            failure = class_and_line(error)
        else:
            self._ask_again_at = ends_at = credentials["expires_at"]
            if ends_at is not None:
                # Of a short life, two thirds pass before it is asked again.
                margin = min(_MARGIN, (ends_at - now) / 3)
                # obstore takes only `datetime.UTC` itself, no other zone of the same time.
                self._ask_again_at = (ends_at - margin).astimezone(UTC)
            return credentials
        last = self._credentials  # None if `renew` was called: the store refused them
        ends_at = None if last is None else last["expires_at"]
        if last is None or ends_at is None or now >= ends_at:
            raise CredentialsError(
                f"{self._source}: the credentials could not be renewed ({failure})",
                advice=f"pass new ones, {self._advice}",
            )
        logger.warning("%s: the credentials could not be renewed (%s)", self._source, failure)
        self._ask_again_at = min(now + _AGAIN_AFTER, ends_at).astimezone(UTC)
        return last


def asked_by_clients() -> None:
    """Do nothing: the `renew` of a source that each new client of obstore asks by itself."""


def stripped_note(stripped: tuple[str, ...]) -> str:
    """Return what an error adds about the options that pickling left out."""
    if not stripped:
        return ""
    return (
        f". The options {', '.join(stripped)} were given where this was made, but pickle.dumps"
        " leaves credentials behind: pass them again here"
    )


def class_and_line(error: Exception) -> str:
    """Describe an error of a parser by its class and line: its text may quote a secret.

    Raise the error for the user outside of the handler, so that this one is not its context.
    """
    # configparser's errors have several lines in `errors`, those of json and tomllib one.
    lines = [str(number) for number, _ in getattr(error, "errors", ())]
    lines += [str(error.lineno)] if getattr(error, "lineno", None) else []  # type: ignore[attr-defined]
    return type(error).__name__ + (f", line {', '.join(lines)}" if lines else "")


def metadata_answers(base: str, method: str, path: str, headers: dict[str, str]) -> bool:
    """Whether this machine has a metadata service: it answers, and not with a failure of its own.

    obstore would try for minutes to find out; many laptops and containers have none.
    """
    host = base.removeprefix("http://").rstrip("/")
    for _ in range(_METADATA_TRIES):
        connection = http.client.HTTPConnection(host, timeout=_METADATA_TIMEOUT_SECONDS)
        with suppress(OSError, http.client.HTTPException), closing(connection):
            connection.request(method, path, headers=headers)
            return connection.getresponse().status < 500
    return False


def is_installed(module: str) -> bool:
    """Whether a module of a namespace package is installed; it is not imported."""
    package = module.partition(".")[0]
    return all(importlib.util.find_spec(name) is not None for name in (package, module))
