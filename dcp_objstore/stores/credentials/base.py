"""`Credentials` as every finder gives them, and what the finders have in common."""

from __future__ import annotations

import http.client
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

# Time to establish a connection to the metadata service, two tries, as boto3 does by default one.
_METADATA_TIMEOUT_SECONDS = 1.0
_METADATA_TRIES = 2


@dataclass(frozen=True)
class Credentials:
    """What to give obstore.

    Attributes:
        source: where they come from, in words, for messages.
        provider: called by obstore for credentials; None where obstore finds them itself.
        config: additional settings of obstore's store.
        renewable: whether asking for them again may give others.
        renew: makes `provider` ask its source again; None where each call, or each new client of
            obstore's, asks it. Raises `CredentialsError` if there are no others.
        advice: what to do once they are refused and there are no others.
        region: the profile's region, or None.
        endpoint_url: the profile's endpoint, or None.
    """

    source: str
    provider: Callable[[], Any] | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    renewable: bool = False
    renew: Callable[[], None] | None = None
    advice: str = (
        "log in again (aws sso login), or use a source that renews them itself: a profile, a role"
    )
    region: str | None = None
    endpoint_url: str | None = None

    def __repr__(self) -> str:
        return f"Credentials(source={self.source!r})"

    @property
    def anonymous(self) -> bool:
        """Whether requests are sent without any."""
        return bool(self.config.get("skip_signature"))


def lost(stripped: tuple[str, ...]) -> str:
    """What an error adds about options that pickling has left behind."""
    if not stripped:
        return ""
    return (
        f". The options {', '.join(stripped)} were given where this was made, but pickle.dumps"
        " leaves credentials behind: pass them again here"
    )


def without_text(error: Exception) -> str:
    """Of an error whose text may quote a line with a secret in it: its class, and where.

    What is raised with it is raised outside of the handler: the error must not be its context.
    """
    lines = [str(number) for number, _ in getattr(error, "errors", ())]
    lines += [str(error.lineno)] if getattr(error, "lineno", None) else []  # type: ignore[attr-defined]
    return type(error).__name__ + (f", line {', '.join(lines)}" if lines else "")


def metadata_answers(base: str, method: str, path: str, headers: dict[str, str]) -> bool:
    """Whether a machine's metadata service is there.

    obstore would try for minutes to find out; a laptop or a container without one is common.
    """
    host = base.removeprefix("http://").rstrip("/")
    for _ in range(_METADATA_TRIES):
        connection = http.client.HTTPConnection(host, timeout=_METADATA_TIMEOUT_SECONDS)
        try:
            connection.request(method, path, headers=headers)
            return connection.getresponse().status < 500
        except (OSError, http.client.HTTPException):
            continue
        finally:
            connection.close()
    return False
