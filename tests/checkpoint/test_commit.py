"""The commit rules, against a store whose answers are lost, late, doubled or wrong."""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

import msgspec
import pytest

from dcp_objstore.checkpoint import commit as commits, index as ix
from dcp_objstore.checkpoint.commit import BeginToken, CommitResult
from dcp_objstore.checkpoint.marker import (
    ON_NOTHING,
    Counts,
    IndexRef,
    Marker,
    decode_marker,
    encode_marker,
    new_id,
)
from dcp_objstore.checkpoint.names import (
    DOT_METADATA_KEY,
    MARKER_KEY,
    beacon_key,
    index_key,
    new_nonce,
)
from dcp_objstore.checkpoint.read import Stored, explain_missing, open_committed, read_marker
from dcp_objstore.errors import (
    CheckpointCorruptError,
    CheckpointExistsError,
    CheckpointGoneError,
    CommitLostError,
    CommitUnknownError,
    ConfigError,
    CredentialsError,
    InputError,
    ObjectNotFoundError,
    PermissionDeniedError,
    PreconditionFailedError,
    RetryableError,
    StoreUnavailableError,
    SupersededError,
    UnsupportedError,
)
from dcp_objstore.stores.protocol import IfAbsent, IfVersion, Version
from tests.support import upkeep
from tests.support.memory_store import (
    DELAYED,
    LOST,
    UNANSWERED,
    Fate,
    MemoryStore,
    Put,
    TickingClock,
    in_turn,
)
from tests.support.upkeep import upload


def finish(
    store: MemoryStore, token: BeginToken, index: ix.Index | None = None, **settings: object
) -> CommitResult:
    settings = {"clock": TickingClock(), **settings}
    return upkeep.finish(store, token, index or upload(store), **settings)


def save(store: MemoryStore, *, overwrite: bool = False, **settings: Any) -> CommitResult:
    return finish(store, commits.take_begin_token(store, overwrite=overwrite, **settings))


def rewrite(store: MemoryStore, **changes: object) -> Marker:
    """Put the marker with other fields, as a deleter or a sweep would."""
    stored = read_marker(store)
    assert stored is not None
    marker = msgspec.structs.replace(stored.record, write_id=new_id(), **changes)
    store.put(MARKER_KEY, encode_marker(marker), precondition=IfVersion(stored.version))
    return marker


def marker_puts(store: MemoryStore) -> list[Put]:
    return [put for put in store.puts if put.key == MARKER_KEY]


# --- what a commit is


def test_commit_is_one_conditional_put_after_objects_and_index(store):
    store.put("0/of-another", b"x")
    del store.requests[:], store.puts[:]
    began_at, nonce = datetime.now(UTC), new_nonce()
    token = commits.take_begin_token(store, overwrite=False, nonce=nonce)
    assert token == BeginToken(None, None, 0, beacon_key(nonce), IfAbsent())
    assert set(store.requests[:2]) == {("put", token.beacon), ("head", DOT_METADATA_KEY)}
    assert store.requests[2:] == [("get", MARKER_KEY)]
    index = upload(store)
    before = len(store.requests)
    done = finish(store, token, index, nonce=nonce, user_metadata={"loss": 0.5})
    first, last = store.requests[before : before + 2], store.requests[before + 2 :]
    assert set(first) == {("list", ""), ("put", index_key(nonce))}
    assert last == [("put", MARKER_KEY), ("delete", token.beacon)]
    [put] = marker_puts(store)
    assert (put.precondition, put.retry) == (IfAbsent(), False)
    marker = decode_marker(store.body(MARKER_KEY))
    assert done == CommitResult(marker.commit_id, marker, 1, IfAbsent())
    body = ix.encode(index)
    assert open_committed(store) == (marker, body)
    assert store.requests[-2:] == [("get", MARKER_KEY), ("get", index_key(nonce))]
    assert marker == Marker(
        state="committed",
        commit_id=done.commit_id,
        write_id=marker.write_id,
        generation=1,
        index=IndexRef(
            key=index_key(nonce), size_bytes=len(body), sha256=hashlib.sha256(body).hexdigest()
        ),
        counts=Counts(objects=2, total_bytes=sum(entry.size_bytes for entry in index.objects)),
        world_size=2,
        created_at=marker.created_at,
        user_metadata={"loss": 0.5},
        put_on=ON_NOTHING,
    )
    assert began_at <= marker.created_at <= datetime.now(UTC)


def test_a_commit_of_no_objects_lists_nothing(store):
    finish(store, commits.take_begin_token(store, overwrite=False), upload(store, ranks=0))
    assert ("list", "") not in store.requests


# --- what a save begins with


def pinned(store: MemoryStore) -> None:
    save(store)
    rewrite(store, pins=("paper", "demo"))


def being_deleted(store: MemoryStore) -> None:
    save(store)
    rewrite(store, state="deleting", claim=2, format=2)


def there_is(key: str, body: bytes) -> Callable[[MemoryStore], object]:
    return lambda store: store.put(key, body)


LATER = partial(save, claim=2)


@pytest.mark.parametrize(
    ("prepare", "settings", "kind", "why"),
    [
        (save, {}, CheckpointExistsError, "overwrite=True"),
        (pinned, {"overwrite": True}, CheckpointExistsError, "paper, demo"),
        (pinned, {"claim": 1}, CheckpointExistsError, "paper, demo"),
        (LATER, {"claim": 1, "overwrite": True}, SupersededError, "claim 2.*has claim 1"),
        (LATER, {"overwrite": True}, SupersededError, "claim 2.*has none"),
        (being_deleted, {"claim": 1, "overwrite": True}, SupersededError, "claim 2"),
        (there_is(MARKER_KEY, b"damaged"), {}, CheckpointCorruptError, "the marker is damaged"),
        (there_is(MARKER_KEY, bytes(10**5)), {}, CheckpointCorruptError, "the marker is damaged"),
        (there_is(MARKER_KEY, b'{"format":99}'), {"overwrite": True}, UnsupportedError, "upgrade"),
        (there_is(DOT_METADATA_KEY, b"stock"), {}, CheckpointExistsError, "another library"),
    ],
)
def test_a_save_that_is_refused_changes_nothing_and_leaves_no_beacon(
    store, prepare, settings, kind, why
):
    prepare(store)
    before, puts = dict(store.objects), len(store.puts)
    with pytest.raises(kind, match=why) as caught:
        commits.take_begin_token(store, **{"overwrite": False, **settings})
    assert caught.value.url == store.url
    assert store.objects == before
    assert len(store.puts) == puts + 1, "the beacon alone"


def raises(error: BaseException) -> Callable[[str], None]:
    def fail(key: str) -> None:
        raise error

    return fail


def test_a_save_that_meets_a_store_that_does_not_answer_sends_nothing_more(store):
    """A sweep removes the beacon: to remove it, the save would have to wait for the store."""
    store.on_get = raises(StoreUnavailableError("503"))
    with pytest.raises(StoreUnavailableError):
        commits.take_begin_token(store, overwrite=True)
    assert store.requests[-1] == ("get", MARKER_KEY)


@pytest.mark.parametrize("damaged", [False, True])
def test_a_beacon_that_gets_no_answer_is_put_again_after_a_look_at_the_marker(store, damaged):
    """If a web server answers in the store's place, the look ends the save at once."""
    if damaged:
        store.put(MARKER_KEY, b"damaged")
    nonce = new_nonce()
    beacon = beacon_key(nonce)
    store.on_put = in_turn(beacon, LOST)
    token = commits.take_begin_token(store, overwrite=True, nonce=nonce)
    assert [put.retry for put in store.puts if put.key == beacon] == [False, True]
    assert len({put.data for put in store.puts if put.key == beacon}) == 1
    requests = [request for request in store.requests if request != ("head", DOT_METADATA_KEY)]
    assert requests[damaged:][: 4 + damaged] == [
        ("put", beacon),
        *[("get", MARKER_KEY)] * (1 + damaged),
        ("put", beacon),
        ("get", MARKER_KEY),
    ]
    assert token.beacon in store.objects


def test_a_web_server_where_a_store_was_meant_ends_a_save_at_once(store):
    store.on_put = lambda _: StoreUnavailableError("no answer")
    store.on_get = raises(ConfigError("this does not look like a store"))
    with pytest.raises(ConfigError, match="does not look like a store"):
        commits.take_begin_token(store, overwrite=True)
    assert [put.retry for put in store.puts] == [False]


def test_a_save_whose_run_refuses_it_says_so_whatever_becomes_of_the_beacon(store):
    threads: list[threading.Thread] = []

    def refuse() -> None:
        threads.append(threading.current_thread())
        raise SupersededError("the run")

    store.on_put = lambda _: PermissionDeniedError("the beacon")
    with pytest.raises(SupersededError, match="the run"):
        commits.take_begin_token(store, overwrite=False, check=refuse)
    assert threads == [threading.current_thread()]


def test_a_beacon_that_cannot_be_removed_is_left_to_a_sweep(store, caplog):
    token = commits.take_begin_token(store, overwrite=False)
    store.on_delete = raises(PermissionDeniedError("no deletion"))
    with caplog.at_level(logging.DEBUG, "dcp_objstore"):
        commits.remove_beacon(store, token.beacon)
    assert f"{store.url}/{token.beacon} stays until the next sweep" in caplog.text


def test_what_is_committed_while_a_save_finishes_a_deletion_is_not_replaced_unasked(store):
    save(store)
    rewrite(store, state="deleting")
    others: list[CommitResult] = []

    def overtake(key: str) -> None:
        store.on_delete = None
        others.append(save(store))

    store.on_delete = overtake
    with pytest.raises(CheckpointExistsError):
        commits.take_begin_token(store, overwrite=False)
    assert open_committed(store)[0].commit_id == others[0].commit_id


# --- what others do to a save


@pytest.mark.parametrize("more", [None, -1, 1], ids=["missing", "short", "long"])
def test_nothing_is_committed_when_an_object_is_not_as_uploaded(store, more):
    """That is told even if the index is refused: it shows that a sweep was here."""
    token, index = commits.take_begin_token(store, overwrite=False), upload(store)
    entry = index.objects[1]
    store.delete(entry.key)
    if more is not None:
        store.put(entry.key, bytes(entry.size_bytes + more))
    store.on_put = lambda _: CredentialsError("expired")
    with pytest.raises(CheckpointCorruptError) as caught:
        finish(store, token, index)
    assert caught.value.object_key == entry.key
    assert MARKER_KEY not in store.objects


# What follows a save of claim 1 that has begun, and what its commit says then.
FOLLOWED = [
    (lambda store: store.delete(MARKER_KEY), CommitLostError, "the marker was removed"),
    (rewrite, CommitLostError, "commit [0-9a-f]{32}"),
    (lambda store: rewrite(store, claim=2, format=2), SupersededError, "claim 2, this job has 1"),
]
MISSES = (lambda store: None, CheckpointCorruptError, "1 of 2 uploaded objects")


@pytest.mark.parametrize(
    ("misses", "follow", "kind", "why"),
    [(True, *MISSES), *((misses, *case) for misses in (False, True) for case in FOLLOWED)],
)
def test_a_commit_that_somebody_was_before_reads_the_marker_and_changes_nothing(
    store, misses, follow, kind, why
):
    """Also one that misses an object looks who was here."""
    save(store, claim=1)
    token, nonce = commits.take_begin_token(store, overwrite=True, claim=1), new_nonce()
    index = upload(store)
    if misses:
        store.delete(index.objects[0].key)
    follow(store)
    before, marker = len(store.requests), store.objects.get(MARKER_KEY)
    with pytest.raises(kind, match=why) as caught:
        finish(store, token, index, nonce=nonce)
    assert caught.value.url == store.url
    sent = store.requests[before:]
    assert sorted(sent[:2]) == [("list", ""), ("put", index_key(nonce))]
    assert sent[2:] == [("put", MARKER_KEY)] * (not misses) + [("get", MARKER_KEY)]
    assert store.objects.get(MARKER_KEY) == marker


# --- ambiguity

REFUSALS = (PermissionDeniedError, CredentialsError, UnsupportedError, ConfigError, InputError)


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(
    ("fates", "puts"),
    [
        ((), 1),
        ((UNANSWERED,), 1),
        ((ObjectNotFoundError("404"),), 2),  # of a store that is not sure yet of what it has
        ((PreconditionFailedError("409"),), 2),  # although nobody else wins, as on S3
        ((LOST, LOST, PreconditionFailedError("409")), 4),
    ],
)
def test_a_put_is_sent_again_with_the_same_body_until_it_has_taken_effect(
    store, overwrite, fates, puts
):
    if overwrite:
        save(store)
        store.puts.clear()
    retries: list[int] = []
    store.on_put = in_turn(MARKER_KEY, *fates)
    token = commits.take_begin_token(store, overwrite=overwrite)
    done = finish(store, token, on_retry=lambda number, *_: retries.append(number))
    assert retries == list(range(2, puts + 1))
    assert (done.attempts, done.dot_metadata is None) == (puts, False)
    sent = marker_puts(store)
    assert len(sent) == puts
    assert len({(put.data, put.precondition, put.retry) for put in sent}) == 1
    assert open_committed(store)[0] == done.marker


@pytest.mark.parametrize("kind", REFUSALS)
def test_a_refusal_counts_only_if_the_marker_shows_that_nothing_took_effect(store, kind):
    """A middlebox answers with nonsense, or with 403, for a PUT that has reached the store."""
    clock = TickingClock()
    token = commits.take_begin_token(store, overwrite=False)
    store.on_put = in_turn(MARKER_KEY, kind("no"))
    with pytest.raises(kind) as caught:
        finish(store, token, clock=clock)
    assert (caught.value.object_key, caught.value.url) == (MARKER_KEY, store.url)
    assert (len(marker_puts(store)), clock.now) == (1, 0)
    assert MARKER_KEY not in store.objects

    def landed(put: Put) -> BaseException:
        store.apply(put)
        return kind("no")

    store.on_put = in_turn(MARKER_KEY, landed)
    done = save(store)
    assert done.dot_metadata is not None
    assert len(marker_puts(store)) == 2
    assert open_committed(store)[0] == done.marker


@pytest.mark.parametrize("then", [DELAYED, CredentialsError("expired")], ids=["silent", "refused"])
def test_what_may_still_land_is_unknown_at_the_deadline_and_nothing_is_deleted(store, then):
    """Credentials that expire between two PUTs say nothing of the first one."""
    clock = TickingClock()
    token = commits.take_begin_token(store, overwrite=False)
    index, nonce = upload(store), new_nonce()
    store.on_put = in_turn(MARKER_KEY, DELAYED, *[then] * 1000)
    with pytest.raises(CommitUnknownError) as caught:
        finish(store, token, index, nonce=nonce, clock=clock)
    assert caught.value.url == store.url
    assert 60 <= clock.now < 70
    assert len(marker_puts(store)) > 5
    assert "delete" not in {verb for verb, _ in store.requests}
    left = {entry.key for entry in index.objects} | {index_key(nonce), token.beacon}
    assert left == set(store.objects)
    # And so the commit that lands after all is whole.
    assert store.deliver()[0]
    assert open_committed(store)[1] == ix.encode(index)


def test_a_put_that_was_refused_with_409_can_not_land_any_more(store):
    token = commits.take_begin_token(store, overwrite=False)
    store.on_put = in_turn(MARKER_KEY, PreconditionFailedError("409"), CredentialsError("expired"))
    with pytest.raises(CredentialsError):
        finish(store, token)


@pytest.mark.parametrize(
    ("then", "publishes"),
    [
        (lambda store: save(store, overwrite=True), False),
        (lambda store: rewrite(store, state="deleted"), False),
        (rewrite, True),  # a sweep changes write_id and ETag; only commit_ids may be compared
    ],
    ids=["replaced", "deleted", "swept"],
)
def test_what_lost_its_answer_is_a_success_whatever_came_then(store, then, publishes):
    after: list[bytes] = []

    def land_and_be_followed(put: Put) -> BaseException:
        store.apply(put)
        then(store)
        after.append(store.body(MARKER_KEY))
        return StoreUnavailableError("no answer")

    store.on_put = in_turn(MARKER_KEY, land_and_be_followed)
    done = save(store)
    assert done.dot_metadata == (IfAbsent() if publishes else None)
    assert store.body(MARKER_KEY) == after[-1]
    marker = decode_marker(after[-1])
    assert done.commit_id in (marker.commit_id, *marker.log)


def test_a_refusal_is_unknown_as_long_as_the_marker_cannot_be_read(store):
    def refused(put: Put) -> BaseException:
        store.on_get = raises(CredentialsError("expired"))
        return CredentialsError("expired")

    token = commits.take_begin_token(store, overwrite=False)
    store.on_put = in_turn(MARKER_KEY, *[refused] * 1000)
    with pytest.raises(CommitUnknownError, match="expired"):
        finish(store, token)


@pytest.mark.parametrize(("body", "why"), [(b"{}", "damaged"), (b'{"format":99}', "upgrade")])
def test_unreadable_marker_after_a_lost_answer_is_unknown(store, body, why):
    token = commits.take_begin_token(store, overwrite=False)

    def damaged(put: Put) -> Fate:
        store.put(MARKER_KEY, body)
        return LOST

    store.on_put = in_turn(MARKER_KEY, damaged)
    clock = TickingClock()
    with pytest.raises(CommitUnknownError, match=why):
        finish(store, token, clock=clock)
    assert clock.now == 0  # asking again would not help
    assert store.body(MARKER_KEY) == body


def test_unfenced_commit_sends_no_condition(store):
    def refuse_conditions(put: Put) -> BaseException | None:
        return UnsupportedError("501") if put.precondition is not None else None

    store.on_put = refuse_conditions
    done = finish(store, commits.take_begin_token(store, overwrite=False), fenced=False)
    assert open_committed(store)[0] == done.marker


# --- reading


def index_of(done: CommitResult) -> str:
    assert done.marker.index is not None
    return done.marker.index.key


def test_a_damaged_index_is_corrupt(store):
    key = index_of(save(store))
    body = store.body(key)
    for damaged in (body[:-1], body + b"!", b"A" + body[1:]):
        store.put(key, damaged)
        with pytest.raises(CheckpointCorruptError) as caught:
            open_committed(store)
        assert (caught.value.url, caught.value.object_key) == (store.url, key)


def fail_from_now_on(store: MemoryStore) -> None:
    store.on_get = raises(StoreUnavailableError("503", url=store.url))


@pytest.mark.parametrize(
    ("change", "kind", "why"),
    [
        (lambda store: None, CheckpointCorruptError, "missing"),
        (rewrite, CheckpointCorruptError, "missing"),  # a sweep: the same commit
        (lambda store: save(store, overwrite=True), CheckpointGoneError, "replaced"),
        (lambda store: rewrite(store, state="deleting"), CheckpointGoneError, "deleted"),
        (lambda store: store.delete(MARKER_KEY), CheckpointGoneError, "deleted"),
        (fail_from_now_on, StoreUnavailableError, "503"),
    ],
    ids=["removed", "swept", "replaced", "deleted", "marker removed", "unavailable"],
)
def test_an_index_that_is_missing_is_explained_by_the_marker(store, change, kind, why):
    key = index_of(save(store))

    def meanwhile(asked: str) -> None:
        if asked == key:
            store.on_get = None
            store.delete(key)
            change(store)

    store.on_get = meanwhile
    with pytest.raises(kind, match=why) as caught:
        open_committed(store)
    assert caught.value.url == store.url
    assert kind is StoreUnavailableError or caught.value.object_key == key


def test_why_the_marker_could_not_be_read_is_returned_for_the_caller_to_complete(store):
    fail_from_now_on(store)
    assert isinstance(explain_missing(store, "id", "key"), StoreUnavailableError)


def test_a_commit_of_an_earlier_claim_over_a_damaged_marker_is_not_passed_over(store):
    """A sweep may have come in between: what the damaged marker said is not known."""
    store.put(MARKER_KEY, b"damaged")
    first = commits.take_begin_token(store, overwrite=True, claim=1)
    second = commits.take_begin_token(store, overwrite=True, claim=2)
    done = finish(store, first)
    assert done.marker.put_on == ""
    with pytest.raises(CommitLostError):
        finish(store, second)
    assert open_committed(store)[0] == done.marker


def test_a_damaged_marker_without_a_version_is_not_replaced(store, monkeypatch):
    """What answers like that is no store, and no PUT could be conditioned on it."""
    store.put(MARKER_KEY, b"damaged")
    head = store.head
    monkeypatch.setattr(store, "head", lambda key: replace(head(key), version=Version()))
    with pytest.raises(CheckpointCorruptError, match="damaged"):
        commits.take_begin_token(store, overwrite=True)
    assert list(store.objects) == [MARKER_KEY]


def test_marker_that_is_repaired_while_it_is_looked_at_is_not_replaced(store):
    save(store)
    body = store.body(MARKER_KEY)
    store.put(MARKER_KEY, b"damaged")
    seen: list[str] = []

    def repair(key: str) -> None:
        seen.append(key)
        if len(seen) == 3:  # a damaged one is read twice, and the version after that
            store.on_get = None
            store.put(MARKER_KEY, body)

    store.on_get = repair
    with pytest.raises(RetryableError, match="another writer"):
        commits.take_begin_token(store, overwrite=True)
    assert store.body(MARKER_KEY) == body


def test_a_beacon_that_takes_long_leaves_the_time_to_finish_a_deletion(store):
    save(store)
    rewrite(store, state="deleting")
    clock, fates = TickingClock(), [LOST]

    def slow(put: Put) -> Fate | None:
        if put.key == MARKER_KEY:
            return fates.pop() if fates else None
        clock.now += 100
        return None

    store.on_put = slow
    token = commits.take_begin_token(store, overwrite=False, clock=clock)
    assert token.marker is not None
    assert token.marker.state == "deleted"


# --- rewrites and tombstones


def stored_marker(store: MemoryStore) -> Stored[Marker]:
    stored = read_marker(store)
    assert stored is not None
    return stored


def test_a_rewrite_changes_what_is_asked_for_and_shows_that_it_came(store):
    save(store)
    for changes in ({}, {"pins": ("paper",)}, {"claim": 7}, {"state": "deleting"}):
        before, since = stored_marker(store), len(store.puts)
        rewritten = commits.rewrite_marker(
            store, before, "the change", TickingClock().tries(), **changes
        )
        assert rewritten == stored_marker(store).record
        assert rewritten.write_id != before.record.write_id
        assert rewritten.format == (2 if rewritten.claim else 1)
        wanted = {"put_on": "", "write_id": rewritten.write_id, "format": rewritten.format}
        assert rewritten == msgspec.structs.replace(before.record, **{**wanted, **changes})
        [put] = store.puts[since:]
        assert (put.precondition, put.retry) == (IfVersion(before.version), False)


@pytest.mark.parametrize("fate", [None, LOST, UNANSWERED])
def test_a_tombstone_is_a_marker_of_nothing(store, fate):
    store.on_put = in_turn(MARKER_KEY, fate)
    began_at = datetime.now(UTC)
    marker = commits.put_tombstone(store, TickingClock().tries())
    assert marker is not None
    assert marker == stored_marker(store).record
    assert marker == Marker(
        state="deleted",
        commit_id=marker.commit_id,
        write_id=marker.write_id,
        generation=1,
        index=None,
        world_size=0,
        created_at=marker.created_at,
    )
    assert began_at <= marker.created_at <= datetime.now(UTC)
    assert {(put.precondition, put.retry) for put in store.puts} == {(IfAbsent(), False)}


def test_a_deletion_is_finished_once_and_only_that_of_its_commit(store):
    def finish_it() -> tuple[bool, list[tuple[str, str]]]:
        before = len(store.requests)
        replaced = commits.finish_deleting(store, done.commit_id, TickingClock().tries())
        return replaced, store.requests[before:]

    done = save(store)
    begun = rewrite(store, state="deleting")
    look = ("get", MARKER_KEY)
    assert finish_it() == (False, [look, ("delete", DOT_METADATA_KEY), ("put", MARKER_KEY)])
    tombstone = stored_marker(store).record
    assert tombstone == msgspec.structs.replace(
        begun, state="deleted", write_id=tombstone.write_id, put_on=""
    )
    assert finish_it() == (False, [look])
    save(store)
    rewrite(store, state="deleting")
    assert finish_it() == (True, [look])
    store.delete(MARKER_KEY)
    assert finish_it() == (True, [look, look])  # a marker that was there is not gone at once
