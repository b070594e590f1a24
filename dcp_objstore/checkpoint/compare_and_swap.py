"""Settling a conditional PUT: sent until its outcome is known, or the deadline has come.

What rules 4 and 5 of `commit` say of the marker holds for every small object that is changed by
conditional PUTs alone: a marker, and a run's `_CLAIM`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from dcp_objstore.checkpoint.clock import Retries
from dcp_objstore.errors import (
    CheckpointCorruptError,
    CommitUnknownError,
    DcpObjstoreError,
    InputError,
    LostRaceError,
    ObjectNotFoundError,
    UnsupportedError,
)
from dcp_objstore.stores.protocol import IfAbsent, IfVersion, ObjectStore, Precondition, Version

T = TypeVar("T")


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """What became of a PUT.

    Attributes:
        landed: it took effect.
        found: what was read to find out, with its version; None after a clean answer, or if there
            is nothing.
    """

    landed: bool
    found: tuple[T, Version] | None = None

    @property
    def seen(self) -> T | None:
        """As `found`, without the version."""
        return None if self.found is None else self.found[0]


def compare_and_swap(
    store: ObjectStore,
    key: str,
    body: bytes,
    version: Version | None,
    retries: Retries,
    what: str,
    *,
    read: Callable[[ObjectStore], tuple[T, Version] | None],
    landed: Callable[[T], bool],
    fenced: bool = True,
) -> Outcome[T]:
    """Rules 4 and 5 of `commit`: send one body until the outcome is known.

    Args:
        store: where the object is.
        key: the object.
        body: what to put; no two ever are equal, because each has a `write_id` of its own.
        version: of the object that it replaces; None: there must be none.
        retries: bounds when a PUT may start.
        what: is put, in words, for the error.
        read: gives the object as it is now, or None.
        landed: tells by an object read later that ours took effect.
        fenced: False puts without a condition (rule 11).

    Raises:
        CommitUnknownError: no clear answer until the deadline; it may still take effect.
        InputError: the store refused the PUT for good, and the object is as it was; nothing was
            changed.
    """
    condition: Precondition = IfAbsent() if version is None else IfVersion(version)
    may_still_land = False
    while True:
        try:
            store.put(key, body, precondition=condition if fenced else None, retry=False)
            return Outcome(True)
        except DcpObjstoreError as error:
            # A refusal of this PUT says nothing of an earlier one that was never answered.
            may_still_land = may_still_land or not isinstance(error, (LostRaceError, InputError))
            answer: DcpObjstoreError = error
        last = answer
        try:
            found = read(store)
        except (CheckpointCorruptError, UnsupportedError) as error:
            raise _unknown(store, what, error) from error
        except DcpObjstoreError as error:
            # Not the refusal of the PUT: without a look at the object it may be a middlebox's, for
            # a PUT that took effect.
            last = error
        else:
            if found is not None and landed(found[0]):
                return Outcome(True, found)
            if (found[1] if found is not None else None) != version:
                return Outcome(False, found)
            if _is_refusal(answer) and not may_still_land:
                answer.at(object_key=key, url=store.url)
                raise answer
        if not retries.pause(last):
            raise _unknown(store, what, last) from last


def _is_refusal(error: DcpObjstoreError) -> bool:
    """Whether sending the same again would not help, if it is the store that answered.

    404 is left out: it is AWS's answer to `If-Match` where there is no object any more.
    """
    return isinstance(error, InputError) and not isinstance(error, ObjectNotFoundError)


def _unknown(store: ObjectStore, what: str, last: DcpObjstoreError) -> CommitUnknownError:
    return CommitUnknownError(
        f"the store never said whether {what} took effect, and it still may (last: {last});"
        " nothing was deleted. Look at what is there before you go on",
        url=store.url,
    )
