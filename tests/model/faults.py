"""What may become of a request of the real code on a stage, and the model's word for it.

A fault is a kind, which says how the caller learns of it, and whether the request takes effect.
The model knows fewer: an answer that is lost is one thing there, whatever it looks like.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

from obstore.exceptions import GenericError

from dcp_objstore.errors import (
    ConfigError,
    CorruptDataError,
    DcpObjstoreError,
    PermissionDeniedError,
    PreconditionFailedError,
)
from dcp_objstore.stores.obstore.errors import judge_obstore
from tests.model.world import DENIED, DOT, MARKER, NO_ANSWER

# As obstore tells them; `translate` makes our errors of these.
_REQUEST = "Error performing PUT http://127.0.0.1:1/b/k in 1.2s, after 3 retries"
_STATUS = f"Generic S3 error: {_REQUEST} - Server returned error response: status code: "
_DUMP = "\n\nDebug source:\nGeneric { source: "
_NO_ETAG = "Generic S3 error: Unable to extract metadata from headers: ETag Header missing"
_TIMEOUT, _RESET = "timeout", "connection reset"
_LOST = {
    "500": f"{_STATUS}500: <Error><Code>InternalError</Code><Message>m</Message></Error>",
    "503 SlowDown": f"{_STATUS}503: <Error><Code>SlowDown</Code><Message>m</Message></Error>",
    _TIMEOUT: f"Generic S3 error: {_REQUEST} - HTTP error{_DUMP}HttpError {{ kind: Timeout }} }}",
    _RESET: f"Generic S3 error: {_REQUEST} - HTTP error{_DUMP}"
    "legacy::Error( SendRequest, ConnectionReset ) }",
}
TRUNCATED, ERROR_IN_200, STALE = "truncated body", "200 with an error body", "stale ETag"
DAMAGED = "damaged body"  # unnoticed by the transport: a byte changed, or the last ones missing
TWICE = "duplicate delivery"  # both at once; or the second later, without an effect now
LATE, BOTH_LATE = "late", "late, and doubled"  # no answer, and it arrives later
REFUSED, CONFLICT = "403", "409"
CRASH = "crash"  # the process dies before the request, or after its effect
_UNUSUAL = (TRUNCATED, ERROR_IN_200, STALE, DAMAGED, TWICE, LATE, BOTH_LATE, REFUSED, CONFLICT)
KINDS = (*_LOST, *_UNUSUAL)
ERROR_BODY = b"<Error><Code>InternalError</Code><Message>We failed.</Message></Error>"
UNIX_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_READS = ("get", "head", "list", "list uploads")


@dataclass(frozen=True)
class Fault:
    """What becomes of one request."""

    kind: str
    effect: bool

    def __str__(self) -> str:
        return f"{self.kind}, {'' if self.effect else 'no '}effect"

    def fits(self, verb: str) -> bool:
        """Whether there is such a thing for this verb."""
        if self.kind == STALE:
            return self.effect and verb in ("get", "head", "put")
        if self.kind in (CONFLICT, DAMAGED):
            return verb == ("put" if self.kind == CONFLICT else "get")
        if self.kind == REFUSED:
            return verb in ("put", "delete")
        if self.kind in (LATE, BOTH_LATE):
            return not self.effect and verb in ("put", "delete")
        return self.effect or self.kind == CRASH or verb not in _READS

    def word(self, verb: str, kind: str, *, holds: bool, conditional: bool) -> str | None:
        """The model's word for what the caller and the store make of it; None: it has none.

        Args:
            verb: of the request.
            kind: the model's word for the object.
            holds: the precondition of the request is met.
            conditional: a second delivery of the request would be refused.
        """
        if not self.fits(verb) or kind not in (MARKER, DOT):
            return None
        if verb in ("get", "head"):
            return NO_ANSWER if self.is_lost(verb) else None
        took_effect = self.effect and holds
        twice = took_effect and conditional
        plain = "ok" if holds else "refused"
        denied = f"ok, {DENIED}" if took_effect else DENIED
        words = {
            STALE: plain,
            LATE: "delayed",
            BOTH_LATE: None,  # two copies on the way are one in the model
            CONFLICT: "refused for nothing" if holds else plain,
            TWICE: plain if self.effect else "ok, a copy delayed" if holds else None,
            REFUSED: denied if kind == MARKER and verb == "put" else None,
        }
        if self.kind in (TWICE, CONFLICT) and twice:
            return "ok, then its copy refused"
        if self.kind == ERROR_IN_200 and verb == "delete":  # it looks like a success
            return plain if self.effect else None
        return words.get(self.kind, "ok, no answer" if took_effect else "delayed")

    @property
    def may_be_late(self) -> bool:
        """Whether a copy of the request may arrive later."""
        return self.kind in (LATE, BOTH_LATE) or (self.kind == TWICE and not self.effect)

    def is_lost(self, verb: str) -> bool:
        """Whether all that the caller sees is that there was no answer."""
        return self.kind in _LOST or (self.kind == TRUNCATED and verb == "head")

    def error(self, verb: str) -> DcpObjstoreError:
        """What the caller is told, where it is told anything."""
        if self.kind == REFUSED:
            return PermissionDeniedError("403")
        if self.kind == CONFLICT:
            return PreconditionFailedError("409")
        if self.kind == TRUNCATED and verb == "get":
            return CorruptDataError("the store announced 100 bytes and sent 7")
        if self.kind == ERROR_IN_200:
            # As our adapter takes it, which the tests of its errors show.
            if verb == "list":
                return ConfigError("that does not look like a store")
            return judge_obstore(GenericError(_NO_ETAG)).error
        surface = {TRUNCATED: _RESET, LATE: _TIMEOUT, BOTH_LATE: _TIMEOUT}.get(self.kind, self.kind)
        return judge_obstore(GenericError(_LOST[surface])).error
