"""The first contact with a server over s3fs or gcsfs: one question, asked until it is answered.

Both retry what gets no answer for minutes, and a server that has never been reached is likelier a
wrong endpoint than an outage. So it is given up sooner, as over the other transports.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from dcp_objstore.errors import ConfigError, StoreUnavailableError
from dcp_objstore.stores.errors import redacted
from dcp_objstore.stores.fsspec.errors import status_and_code, translate_fsspec
from dcp_objstore.stores.fsspec.kinds import is_s3fs

# As in `boto3.clients`: no try begins later than this after the first.
_PATIENCE_SECONDS = 5.0
_PAUSE_SECONDS = 0.5
# What one try waits for; a server that takes connections and says nothing is given up after it.
CONNECT_TIMEOUT_SECONDS = 5.0
ANSWER_TIMEOUT_SECONDS = 20.0


class Greeting:
    """Asks for the bucket once, before anything else is.

    Any answer will do, a refusal too: the server is there, and what was really wanted will tell
    more.

    Args:
        make: a filesystem without retries, with the time-outs of this module.
        bucket: by name.
        server: for messages; None for the provider's own.
    """

    def __init__(self, make: Callable[[], Any], bucket: str, server: str | None) -> None:
        self._make = make
        self._bucket = bucket
        self._server = server
        self._lock = threading.Lock()
        self._reached = False

    def once(self) -> None:
        """Return when the server has been reached, now or before.

        Raises:
            StoreUnavailableError: it was not, after about five seconds for one that is not there,
                and twenty for one that says nothing.
            Exception: of the filesystem's, at once, for a setting by which no request can be made.
        """
        if self._reached:
            return
        with self._lock:
            if not self._reached:
                self._ask()
                self._reached = True

    def _ask(self) -> None:
        fs = self._make()
        last = time.monotonic() + _PATIENCE_SECONDS
        while True:
            try:
                if is_s3fs(fs):
                    fs.call_s3("head_bucket", Bucket=self._bucket)
                else:
                    fs.call("GET", "b/{}", self._bucket)
            except Exception as error:
                if _is_wrong(error):
                    raise
                if not _is_silence(error):
                    return
                if time.monotonic() + _PAUSE_SECONDS > last:
                    text = f"{type(error).__name__}: {redacted(str(error))}".removesuffix(": ")
                    raise StoreUnavailableError(
                        f"cannot reach {self._server or 'the server'}: {text}; check endpoint_url,"
                        " that the server runs, the network and any proxy or firewall"
                    ) from error
                time.sleep(_PAUSE_SECONDS)
            else:
                return


def _is_wrong(error: Exception) -> bool:
    """Whether a setting keeps it from being asked at all; both would try that again."""
    no_answer = status_and_code(error)[0] is None
    return no_answer and isinstance(translate_fsspec(error), ConfigError)


def _is_silence(error: Exception) -> bool:
    """Whether no answer came."""
    # gcsfs makes an OSError without an errno of a 403.
    if status_and_code(error)[0] is not None or type(error) in (OSError, FileNotFoundError):
        return False
    return isinstance(translate_fsspec(error), StoreUnavailableError)
