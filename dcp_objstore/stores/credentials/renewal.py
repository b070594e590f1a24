"""`Renewing`: the credentials of a profile for obstore, renewed before they end.

boto3 knows when temporary credentials end (SSO, an assumed role, `credential_process`), and renews
them in their last 10 minutes, but only when it is asked. obstore's own helper asks every half hour,
so credentials that last an hour or less expire in the middle of a save. `Renewing` asks 10 minutes
before they end, or once two thirds of a shorter life are over. A request with all its retries,
which keep their first signature, takes less time than what is left then.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

from dcp_objstore.errors import CredentialsError

_log = logging.getLogger("dcp_objstore")

# boto3 renews credentials this long before they end, not earlier.
_MARGIN = timedelta(minutes=10)
_AGAIN_AFTER = timedelta(seconds=10)


class Renewing:
    """A provider of obstore, which calls it again when `expires_at` has come.

    Args:
        source: where they come from, in words.
        load: reads botocore's credentials again and returns them, or None.
        now: the time, for tests.
    """

    # obstore's default, 5 minutes, calls for each request in that time; `expires_at` is early.
    refresh_threshold = timedelta(0)

    def __init__(
        self,
        source: str,
        load: Callable[[], Any],
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._source = source
        self._load = load
        self._now = now
        self._lock = threading.Lock()
        self._held: Any = None
        self._kept: dict[str, Any] | None = None
        self._ends_at: datetime | None = None

    def __repr__(self) -> str:
        return f"Renewing({self._source!r})"

    def __call__(self) -> dict[str, Any]:
        """Credentials for now.

        Raises:
            CredentialsError: there are none, or none any more.
        """
        with self._lock:
            kept = self._kept
            if kept is not None and (
                kept["expires_at"] is None or self._now() < kept["expires_at"]
            ):
                return dict(kept)
            self._kept = self._fetch()
            return dict(self._kept)

    def renew(self) -> None:
        """Forget credentials that were refused: the next request reads them again."""
        with self._lock:
            self._held = self._kept = self._ends_at = None

    def _fetch(self) -> dict[str, Any]:
        from botocore.exceptions import BotoCoreError

        failure = None
        try:
            if self._held is None:
                self._held = self._load()
            frozen = self._held.get_frozen_credentials() if self._held is not None else None
        except BotoCoreError as error:
            # Not its text, which may quote what a credential process printed.
            failure, frozen = type(error).__name__, None
        if frozen is None or frozen.access_key is None:
            return self._as_before(failure or "none were found")
        now = self._now()
        # Not public; `tests/e2e/test_credentials_expire.py` fails should it go.
        self._ends_at = getattr(self._held, "_expiry_time", None)
        until = None
        if self._ends_at is not None:
            early = self._ends_at - min(_MARGIN, (self._ends_at - now) / 3)
            until = early.astimezone(UTC)  # obstore takes no other time zone, not even an equal one
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": until,
        }

    def _as_before(self, failure: str) -> dict[str, Any]:
        """Return the present credentials while they last: the next renewal may succeed."""
        now = self._now()
        if self._kept is not None and self._ends_at is not None and now < self._ends_at:
            _log.warning("%s: the credentials could not be renewed (%s)", self._source, failure)
            return {
                **self._kept,
                "expires_at": min(now + _AGAIN_AFTER, self._ends_at).astimezone(UTC),
            }
        raise CredentialsError(
            f"{self._source}: the credentials could not be renewed ({failure}). Log in again (aws"
            " sso login), or look at what gives them, and try again"
        )
