"""Compare and swap: send a conditional PUT until its outcome is known or the deadline has passed.

Rules 4 and 5 of `commit` hold for every small object that only conditional PUTs change: a marker, a
run's `_CLAIM`, and the small files of an export.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from typing_extensions import Buffer

from dcp_objstore.checkpoint.probe import if_version
from dcp_objstore.checkpoint.read import Stored
from dcp_objstore.errors import (
    CheckpointCorruptError,
    CommitUnknownError,
    DcpObjstoreError,
    InputError,
    LostRaceError,
    ObjectNotFoundError,
    StoreUnavailableError,
    UnsupportedError,
)
from dcp_objstore.stores.protocol import IfAbsent, ObjectStore, Precondition, Version
from dcp_objstore.stores.retries import Tries

T = TypeVar("T")


@dataclass(frozen=True)
class SwapOutcome(Generic[T]):
    """The outcome of a PUT.

    Attributes:
        landed: the PUT took effect.
        stored: the object that was read to find out, with its version. None if the store's answer
            was clear, or if there is no object.
        version: the state that the PUT has made, if the store's answer was clear.
    """

    landed: bool
    stored: Stored[T] | None = None
    version: Version | None = None


def compare_and_swap(
    store: ObjectStore,
    key: str,
    body: Buffer | Sequence[Buffer],
    version: Version | None,
    *,
    tries: Tries,
    what: str,
    read: Callable[[ObjectStore], Stored[T] | None],
    landed: Callable[[T], bool],
    fenced: bool = True,
) -> SwapOutcome[T]:
    """Send one body until the outcome is known (rules 4 and 5 of `commit`).

    Args:
        body: what to put. No two markers or claims are ever equal, because each has its own
            `write_id`.
        version: the version of the object to replace; None if there must be none.
        tries: bounds when a PUT may start.
        what: the thing that is put, in words, for the error.
        read: reads and decodes the object; None if there is none.
        landed: decides from an object that was read later whether this PUT took effect.
        fenced: whether to send the PUT with its condition (rule 11).

    Raises:
        CommitUnknownError: no clear answer before the deadline; the PUT may still take effect.
        InputError: the store refused the PUT for good; nothing was changed.
    """
    condition: Precondition = IfAbsent() if version is None else if_version(store, version)
    may_still_land = False  # some PUT of this call was not answered clearly
    put_error: DcpObjstoreError
    while True:
        try:
            written = store.put(key, body, precondition=condition if fenced else None, retry=False)
            if written != Version():
                return SwapOutcome(True, version=written)
            # Perhaps it was not the store that answered: a success names the object's version.
            may_still_land, put_error = True, StoreUnavailableError("the answer names no version")
        except DcpObjstoreError as error:
            # These two kinds are refusals of this PUT, which say nothing about an earlier one that
            # was never answered.
            may_still_land = may_still_land or not isinstance(error, (LostRaceError, InputError))
            put_error = error
        last_error = put_error
        try:
            stored = read(store)
        except (CheckpointCorruptError, UnsupportedError) as error:
            # What is there now cannot be read, and another try would not change that.
            raise _unknown(store, what, error) from error
        except DcpObjstoreError as error:
            # Do not report the refusal of the PUT: until the object has been read, the refusal may
            # come from a middlebox, for a PUT that took effect.
            last_error = error
        else:
            if stored is not None and landed(stored.record):
                return SwapOutcome(True, stored)
            if (None if stored is None else stored.version) != version:
                return SwapOutcome(False, stored)  # another writer was first
            # The object is unchanged, so the PUT did not take effect, or not yet.
            if _is_refusal(put_error) and not may_still_land:
                put_error.at(object_key=key, url=store.url)
                raise put_error
        if not tries.pause(last_error):
            raise _unknown(store, what, last_error) from last_error


def _is_refusal(error: DcpObjstoreError) -> bool:
    """Return whether it would be useless to send the PUT again, if the store itself answered.

    A 404 does not count: it is AWS's answer to `If-Match` if the object is gone.
    """
    return isinstance(error, InputError) and not isinstance(error, ObjectNotFoundError)


def _unknown(store: ObjectStore, what: str, last: DcpObjstoreError) -> CommitUnknownError:
    """Return the error for a PUT of which it is not known whether it took effect.

    Args:
        last: the last error, of the PUT or of the read after it.
    """
    return CommitUnknownError(
        f"the store did not say whether {what} took effect; it still may (last answer: {last})",
        advice="look at what is there before you go on",
        url=store.url,
    )
