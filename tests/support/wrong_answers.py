"""One wrong answer: a bucket in memory of which one request, of any kind, is answered wrongly.

Requests are told apart by verb, key and how often they came, with nonces left out of the keys. So
the same one is met in each run, in whatever order threads send theirs.
"""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from enum import Enum
from typing import Any, NamedTuple, TypeVar

from dcp_objstore.errors import (
    BucketNotFoundError,
    CorruptDataError,
    DcpObjstoreError,
    ObjectNotFoundError,
    PermissionDeniedError,
    StoreUnavailableError,
)
from dcp_objstore.stores.protocol import ObjectMeta, Version
from tests.crash.process import Process
from tests.support.memory_store import Bucket

T = TypeVar("T")

_PAGE = b"<html><body><h1>502 Bad Gateway</h1></body></html>"
_NONCE = re.compile(r"[0-9a-f]{16,}")


class Wrong(Enum):
    """What is wrong with an answer. A request that is refused or answered for has no effect."""

    HTML = "200 with HTML"
    NOT_FOUND = "404"
    EMPTY = "empty body"
    TRUNCATED = "truncated body"
    OTHER = "another object's"
    FORBIDDEN = "403"
    FORBIDDEN_AFTER = "403 for what took effect"
    ERROR = "500, or a reset before the effect"
    RESET = "a reset after the effect"


class Asked(NamedTuple):
    """A request: the n-th of this verb for this key."""

    verb: str
    key: str
    nth: int


class Confused(Process):
    """A process, one of whose requests is answered wrongly.

    Args:
        bucket: what it works on.
        at: which request; None: none.
        wrong: how it is answered.

    Attributes:
        asked: every request so far.
        met: whether the wrong answer was given.
    """

    def __init__(self, bucket: Bucket, at: Asked | None = None, wrong: Wrong = Wrong.ERROR) -> None:
        super().__init__()
        self.bucket, self.at, self.wrong, self.met = bucket, at, wrong, False
        self.asked: list[Asked] = []
        self._counts: Counter[tuple[str, str]] = Counter()
        self._counting = threading.Lock()

    def request(self, verb: str, key: str, effect: Callable[[], T]) -> T:
        place = verb, _NONCE.sub("*", key)
        with self._counting:
            self._counts[place] += 1
            asked = Asked(*place, self._counts[place])
            self.asked.append(asked)
        if asked != self.at:
            return effect()
        self.met = True
        return self._answer(verb, key, effect)

    def _answer(self, verb: str, key: str, effect: Callable[[], T]) -> Any:
        wrong = self.wrong
        if wrong in (Wrong.FORBIDDEN_AFTER, Wrong.RESET) and verb not in ("get", "head"):
            effect()
        if error := _ERRORS.get(wrong):
            raise error(wrong.value, object_key=key)
        if wrong is Wrong.NOT_FOUND:
            if verb in ("delete", "abort"):
                return None
            raise (BucketNotFoundError if "list" in verb else ObjectNotFoundError)(wrong.value)
        return getattr(self, f"_wrong_{verb.replace(' ', '_')}")(key, effect)

    def _other(self, key: str) -> tuple[bytes, ObjectMeta]:
        """The object of the same name at another step, or any other."""
        name = key.rpartition("/")[2]
        others = sorted(one for one in self.bucket.objects if one != key)
        of_name = [one for one in others if one.endswith(f"/{name}")]
        found = next(iter(of_name or others), None)
        return self.bucket.objects[found] if found else (b"{}", _meta(key, b"{}"))

    def _wrong_get(self, key: str, effect: Callable[[], Any]) -> Any:
        if self.wrong is Wrong.HTML:
            return _PAGE, _meta(key, _PAGE)
        if self.wrong is Wrong.EMPTY:
            return b"", _meta(key, b"")
        if self.wrong is Wrong.OTHER:
            return self._other(key)
        body, meta = effect()
        body = body[: len(body) // 2]
        return body, replace(meta, size_bytes=len(body))

    def _wrong_head(self, key: str, effect: Callable[[], Any]) -> Any:
        return self._wrong_get(key, effect)

    def _wrong_list(self, key: str, effect: Callable[[], Any]) -> Any:
        """An error: an adapter refuses what is no listing, and asks again for one of nothing."""
        raise CorruptDataError(self.wrong.value)

    def _wrong_list_uploads(self, key: str, effect: Callable[[], Any]) -> Any:
        return self._wrong_list(key, effect)

    def _wrong_put(self, key: str, effect: Callable[[], Any]) -> Any:
        """Success, as it seems; nothing says in which state the object is."""
        if self.wrong in (Wrong.OTHER, Wrong.TRUNCATED):
            effect()
        return self._other(key)[1].version if self.wrong is Wrong.OTHER else Version()

    _wrong_complete = _wrong_put

    def _wrong_begin(self, key: str, effect: Callable[[], Any]) -> Any:
        raise StoreUnavailableError(self.wrong.value)

    def _wrong_part(self, key: str, effect: Callable[[], Any]) -> Any:
        raise StoreUnavailableError(self.wrong.value)

    def _wrong_delete(self, key: str, effect: Callable[[], Any]) -> Any:
        return None

    _wrong_abort = _wrong_delete


_ERRORS: dict[Wrong, type[DcpObjstoreError]] = {
    Wrong.FORBIDDEN: PermissionDeniedError,
    Wrong.FORBIDDEN_AFTER: PermissionDeniedError,
    Wrong.RESET: StoreUnavailableError,
    Wrong.ERROR: StoreUnavailableError,
}


def _meta(key: str, body: bytes) -> ObjectMeta:
    return ObjectMeta(key, len(body), Version(), Bucket.now())


def every_wrong(asked: list[Asked]) -> Iterator[tuple[Asked, Wrong]]:
    """Each request that a rehearsal has made, with all that can be wrong with its answer."""
    for one in dict.fromkeys(asked):
        for wrong in Wrong:
            yield one, wrong
