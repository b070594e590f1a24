"""Probe: test whether a store has the conditional writes that a commit depends on.

Some servers accept the header of a conditional PUT and ignore it (`rclone serve s3` does), so two
writers could both believe that they committed. Names, versions and documentation prove nothing
about the server at the other end. About a dozen small requests do, once per process and bucket.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import partial
from typing import TypeAlias

from dcp_objstore.checkpoint.clock import SYSTEM_CLOCK, Clock
from dcp_objstore.checkpoint.names import new_nonce
from dcp_objstore.errors import (
    DcpObjstoreError,
    ObjectNotFoundError,
    PreconditionFailedError,
    StoreUnavailableError,
    UnsupportedError,
)
from dcp_objstore.observe.report import logger
from dcp_objstore.stores.protocol import (
    Capabilities,
    IfAbsent,
    IfVersion,
    ObjectStore,
    Precondition,
    Version,
)
from dcp_objstore.stores.retries import Tries
from dcp_objstore.transfer.workers import concurrently

_RACERS = 4
_DEADLINE_SECONDS = 30.0

_LOCAL_SCHEMES = ("file", "memory")

_Bucket: TypeAlias = tuple[str, str, str]  # scheme, endpoint and name, from `bucket_of`
# By bucket and by what the adapter claims: two adapters may claim different things of one bucket.
_results: dict[tuple[_Bucket, Capabilities], Capabilities] = {}


def probe(
    store: ObjectStore,
    *,
    clock: Clock = SYSTEM_CLOCK,
) -> Capabilities:
    """Test conditional writes with objects `.probe-…` under the store's root, and remove them.

    Sends 11 requests if all goes well: two creates in a row, a GET for the token, an update with
    it, a second update with the same, now stale, token, a race of 4 creates, and 2 deletes. If the
    first update is refused, the ETag of the next ones has no quotes (2 requests more): Ceph's
    gateway compares what comes with an ETag that has none.
    Capabilities that the adapter does not claim are not tested. A race that no create wins proves
    nothing against the store; a race with two winners does.

    Args:
        store: any store; needs the right to PUT and GET. Without the right to delete, the probe's
            objects stay (a few bytes each, which nothing reads).

    Returns:
        The capabilities that the store has shown, never more than the adapter claims.

    Raises:
        StoreUnavailableError: no clear answers for 30 s, or until the deadline of `clock`.
        InputError: there are no rights or credentials, or there is no bucket.
    """
    tries = clock.tries(most_seconds=_DEADLINE_SECONDS)
    while True:
        try:
            return _probe_once(store, tries)
        except StoreUnavailableError:
            # Use another name for the retry: an unanswered create may still land under this one.
            if not tries.pause():
                raise


def require_fencing(
    store: ObjectStore,
    *,
    replaces: bool,
    allow_unfenced: bool,
    clock: Clock = SYSTEM_CLOCK,
) -> Capabilities:
    """Refuse a save that this store could not fence (rule 11 of `commit`).

    Args:
        replaces: whether there is, or may be, a marker to replace: a checkpoint's or a tombstone.
            If there is none, overwriting is creating, which needs no conditional update.
        allow_unfenced: the user's promise that there is only one writer; accept a store without
            conditional creates. The caller then passes `fenced=result.conditional_create`, which is
            False, to `commit` and `publish_dot_metadata`.

    Returns:
        What the store can do, from `probe`. The result is kept for this process and bucket.

    Raises:
        UnsupportedError: the store has no conditional create and `allow_unfenced` is False; or it
            has create but no update, and `replaces` is True.
    """
    capabilities = probed(store, clock)
    if not capabilities.conditional_create:
        if not allow_unfenced:
            raise UnsupportedError(
                "this store does not keep two writers apart: a PUT with `If-None-Match: *` replaced"
                " an object",
                advice="use a store with conditional writes, or, if only one job ever saves here,"
                " pass allow_unfenced=True",
                url=store.url,
            )
        logger.warning(
            "saving to %s without protection against a second writer (allow_unfenced=True)",
            store.url,
        )
        return capabilities
    if replaces and not capabilities.conditional_update:
        raise UnsupportedError(
            "this store can create an object conditionally but not replace one, so a checkpoint"
            " there can be neither overwritten nor saved again after it was deleted",
            advice="save under another URL",
            url=store.url,
        )
    return capabilities


def require_rewrites(store: ObjectStore, what: str) -> None:
    """Refuse to rewrite markers (to delete, sweep or pin) on a store that cannot fence it.

    Args:
        store: a store that is rooted where markers are.
        what: the beginning of the error message, such as "nothing can be deleted".

    Raises:
        UnsupportedError: the store cannot replace an object conditionally (rule 11 of `commit`).
    """
    if not can_rewrite(store):
        lacks = "replace" if probed(store).conditional_create else "create or replace"
        raise UnsupportedError(
            f"{what} here: this store cannot {lacks} an object conditionally, so nothing would keep"
            " a save that is under way from committing onto what is being removed",
            advice="use a store with conditional writes; here, remove by hand while no job runs",
            url=store.url,
        )


def can_rewrite(store: ObjectStore) -> bool:
    """Return whether the store can create and replace objects conditionally."""
    # `probe` reports conditional updates only together with conditional creates.
    return probed(store).conditional_update


def if_version(store: ObjectStore, version: Version) -> IfVersion:
    """Return the condition that an object is in a state, in the form that `probe` has found."""
    claims = store.capabilities  # they are believed as long as nobody has probed
    return _results.get((bucket_of(store), claims), claims).if_version(version)


def probed(store: ObjectStore, clock: Clock = SYSTEM_CLOCK) -> Capabilities:
    """Return the result of `probe`, which is sent once per process and bucket."""
    bucket = bucket_of(store)
    claims = store.capabilities
    capabilities = _results.get((bucket, claims))
    if capabilities is None:
        # No lock is needed: two threads that probe together find the same.
        capabilities = probe(store, clock=clock)
        _results[bucket, claims] = capabilities
    return capabilities


def bucket_of(store: ObjectStore) -> _Bucket:
    """Return scheme, endpoint and bucket, which are equal for stores on the same server and bucket.

    A bucket's name means nothing without its server. For `file://` the whole URL stands for the
    bucket.
    """
    scheme, _, rest = store.url.partition("://")
    if scheme in _LOCAL_SCHEMES:
        return scheme, "", rest
    return scheme, store.endpoint_url or "", rest.partition("/")[0]


def forget() -> None:
    """Forget the results of all probes, as in a new process."""
    _results.clear()


def _probe_once(store: ObjectStore, tries: Tries) -> Capabilities:
    """Test which conditions the store keeps, with two objects of new names; remove them.

    Each name is noted before its object is put, because a PUT without an answer may take effect.
    """
    claims = store.capabilities
    nonce = new_nonce()
    key, race_key = f".probe-{nonce}", f".probe-{nonce}-race"
    keys_to_remove: list[str] = []
    create = update = False
    quoted = True
    try:
        if claims.conditional_create:
            keys_to_remove.append(key)
            create = _creates_once(store, key, tries)
        if create and claims.conditional_update:
            update, quoted = _updates_once(store, key, tries)
        if create:
            keys_to_remove.append(race_key)
            create = _race_has_one_winner(store, race_key)
    finally:
        for each_key in keys_to_remove:
            _remove(store, each_key)
    return replace(
        claims,
        conditional_create=create,
        conditional_update=create and update,
        quoted_e_tags=quoted,
    )


def _creates_once(store: ObjectStore, key: str, tries: Tries) -> bool:
    """Return whether the store accepts one create of an object and refuses a second one."""
    if not _accepts(store, key, b"1", IfAbsent()):
        return False
    return not _accepts_in_the_end(store, key, b"2", precondition=IfAbsent(), tries=tries)


def _updates_once(store: ObjectStore, key: str, tries: Tries) -> tuple[bool, bool]:
    """Test updates on the condition of a version, of which the store shall accept just one.

    Returns:
        Whether it does so, and whether the ETag in the condition must have quotes.
    """
    # Most stores accept the ETag as they gave it. Some want it bare, which is without its quotes.
    for bare in (False, True):
        _, meta = store.get(key, max_size_bytes=1)
        condition = IfVersion(meta.version, bare=bare)
        accepts = partial(_accepts_in_the_end, store, key, precondition=condition, tries=tries)
        if accepts(b"3"):
            return not accepts(b"4"), not bare
    return False, True


def _accepts_in_the_end(
    store: ObjectStore, key: str, data: bytes, *, precondition: Precondition, tries: Tries
) -> bool:
    """Put an object, again while the store is busy; return whether the store accepted it.

    A store may well be busy here: GCS accepts one write of an object per second, and answers 429 to
    others.

    Args:
        data: what no other PUT of this object puts, so that a GET shows whether this one landed.
    """
    is_first = True
    while True:
        try:
            is_accepted = _accepts(store, key, data, precondition)
        except StoreUnavailableError:
            is_first = False
            if not tries.pause():
                raise
        else:
            if is_first:
                return is_accepted
            # An earlier PUT, without an answer, may have taken effect all the same.
            body, _ = store.get(key, max_size_bytes=len(data))
            return body == data


def _race_has_one_winner(store: ObjectStore, key: str) -> bool:
    """Create one object from several threads; return whether at most one succeeded.

    That none succeeds says nothing against the store: it may have been too busy to answer.
    """
    start = threading.Barrier(_RACERS)

    def race(number: int) -> bool:
        start.wait()
        try:
            return _accepts(store, key, b"%d" % number, IfAbsent())
        except StoreUnavailableError:
            return False  # a writer would not count this as a win

    winners: list[bool] = concurrently(*(partial(race, number) for number in range(_RACERS)))
    return sum(winners) <= 1


def _accepts(store: ObjectStore, key: str, data: bytes, precondition: Precondition) -> bool:
    """Put an object, and return whether the store accepted it."""
    try:
        store.put(key, data, precondition=precondition, retry=False)
    except (PreconditionFailedError, UnsupportedError):
        return False
    except ObjectNotFoundError:
        if isinstance(precondition, IfVersion):
            return False
        raise  # a create looks for no object, so it is the bucket that does not exist
    return True


def _remove(store: ObjectStore, key: str) -> None:
    try:
        store.delete(key)
    except DcpObjstoreError as error:
        logger.debug("the probe's object %s/%s stays: %s", store.url, key, error)
