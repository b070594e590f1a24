"""The commit rules, against a store whose answers are lost, late, doubled or wrong."""

from __future__ import annotations

import hashlib
import logging
import pickle
import threading
from dataclasses import replace
from datetime import UTC, datetime
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
    DcpObjstoreError,
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
    began_at = datetime.now(UTC)
    token = commits.take_begin_token(store, overwrite=False)
    assert set(store.requests[:2]) == {("put", token.beacon), ("head", DOT_METADATA_KEY)}
    assert store.requests[2:] == [("get", MARKER_KEY)]
    index, nonce = upload(store), new_nonce()
    before = len(store.requests)
    done = finish(store, token, index, nonce=nonce, user_metadata={"loss": 0.5})
    first, last = store.requests[before : before + 2], store.requests[before + 2 :]
    assert set(first) == {("list", ""), ("put", index_key(nonce))}
    assert last == [("put", MARKER_KEY), ("delete", token.beacon)]
    assert token.beacon not in store.objects
    [put] = marker_puts(store)
    assert put.precondition == IfAbsent()
    assert put.retry is False
    marker = decode_marker(store.body(MARKER_KEY))
    assert done == CommitResult(marker.commit_id, False, marker, 1, IfAbsent())
    body = ix.encode(index)
    assert open_committed(store) == (marker, body)
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
    token, nonce = commits.take_begin_token(store, overwrite=False), new_nonce()
    before = len(store.requests)
    finish(store, token, upload(store, ranks=0), nonce=nonce)
    assert store.requests[before:] == [
        ("put", index_key(nonce)),
        ("put", MARKER_KEY),
        ("delete", token.beacon),
    ]


# --- what a save begins with


def test_the_nonce_of_a_save_names_its_beacon(store):
    nonce = new_nonce()
    token = commits.take_begin_token(store, overwrite=False, claim=3, nonce=nonce)
    assert token == BeginToken(store.url, None, None, 3, beacon_key(nonce), IfAbsent())
    assert list(store.objects) == [beacon_key(nonce)]


def test_a_save_without_a_claim_has_claim_0(store):
    assert commits.take_begin_token(store, overwrite=False).claim == 0


def newer_format(store: MemoryStore) -> None:
    store.put(MARKER_KEY, b'{"format":99}')


def pinned(store: MemoryStore) -> None:
    save(store)
    rewrite(store, pins=("paper", "demo"))


@pytest.mark.parametrize(
    ("prepare", "settings", "kind", "why"),
    [
        (save, {}, CheckpointExistsError, "overwrite=True"),
        (pinned, {"overwrite": True}, CheckpointExistsError, "paper, demo"),
        (pinned, {"claim": 1}, CheckpointExistsError, "paper, demo"),
        (
            lambda store: save(store, claim=2),
            {"claim": 1, "overwrite": True},
            SupersededError,
            "claim 2.*has claim 1",
        ),
        (
            lambda store: save(store, claim=2),
            {"overwrite": True},
            SupersededError,
            "claim 2.*has none",
        ),
        (
            lambda store: store.put(MARKER_KEY, b"damaged"),
            {},
            CheckpointCorruptError,
            "the marker is damaged",
        ),
        (newer_format, {"overwrite": True}, UnsupportedError, "upgrade"),
        (
            lambda store: store.put(DOT_METADATA_KEY, b"stock"),
            {},
            CheckpointExistsError,
            "another library",
        ),
    ],
    ids=["exists", "pinned", "adopts", "later", "unclaimed", "damaged", "newer", "stock"],
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


def test_a_save_that_meets_a_store_that_does_not_answer_sends_nothing_more(store):
    """A sweep removes the beacon: to remove it, the save would have to wait for the store."""

    def silent(key: str) -> None:
        raise StoreUnavailableError("503")

    store.on_get = silent
    with pytest.raises(StoreUnavailableError):
        commits.take_begin_token(store, overwrite=True)
    assert store.requests[-1] == ("get", MARKER_KEY)


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_step_of_an_earlier_claim_is_replaced_unasked(store, overwrite):
    first = save(store, claim=1)
    done = save(store, claim=2, overwrite=overwrite)
    assert done.marker.put_on == first.marker.write_id
    assert done.marker.log == (first.commit_id,)


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
    def page(key: str) -> None:
        raise ConfigError("this does not look like a store")

    store.on_put, store.on_get = (lambda _: StoreUnavailableError("no answer")), page
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
    def refuse(key: str) -> None:
        raise PermissionDeniedError("no deletion")

    token = commits.take_begin_token(store, overwrite=False)
    store.on_delete = refuse
    with caplog.at_level(logging.DEBUG, "dcp_objstore"):
        commits.remove_beacon(store, token.beacon)
    assert f"{store.url}/{token.beacon} stays until the next sweep" in caplog.text


def test_a_deletion_of_a_later_claim_is_not_finished_by_a_superseded_job(store):
    save(store)
    before = rewrite(store, state="deleting", claim=2, format=2)
    with pytest.raises(SupersededError):
        commits.take_begin_token(store, overwrite=True, claim=1)
    assert decode_marker(store.body(MARKER_KEY)) == before


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


@pytest.mark.parametrize("there", [False, True])
def test_begin_token_travels_between_processes(store, there):
    if there:
        save(store)
    token = commits.take_begin_token(store, overwrite=True)
    assert pickle.loads(pickle.dumps(token)) == token


def test_begin_token_of_another_checkpoint_is_refused(store):
    token = commits.take_begin_token(MemoryStore("memory://test/run/step-2"), overwrite=False)
    with pytest.raises(InputError, match="step-2"):
        finish(store, token)
    assert MARKER_KEY not in store.objects


# --- objects are checked first


@pytest.mark.parametrize("damage", ["missing", "short", "long"])
def test_nothing_is_committed_when_an_object_is_not_as_uploaded(store, damage):
    store.put("unrelated/object", b"x")
    token = commits.take_begin_token(store, overwrite=False)
    index, nonce = upload(store), new_nonce()
    key, size = index.objects[1].key, index.objects[1].size_bytes
    if damage == "missing":
        store.delete(key)
    else:
        store.put(key, bytes(size - 1 if damage == "short" else size + 1))
    with pytest.raises(CheckpointCorruptError) as caught:
        finish(store, token, index, nonce=nonce)
    assert caught.value.object_key == key
    assert MARKER_KEY not in store.objects


# What follows a save that has begun, and what its commit says then.
FOLLOWED = [
    ("a hand", CommitLostError, "the marker was removed"),
    ("a sweep", CommitLostError, "commit [0-9a-f]{32}"),
    ("a later claim", SupersededError, "claim 2, this job has 1"),
]


def follow(store: MemoryStore, by: str) -> None:
    """What may become of the marker while a save with claim 1 is under way."""
    if by == "nobody":
        return
    if by == "a hand":
        store.delete(MARKER_KEY)
    elif by == "a later claim":
        rewrite(store, claim=2, format=2)
    else:
        rewrite(store)


@pytest.mark.parametrize(
    ("by", "kind", "why"),
    [("nobody", CheckpointCorruptError, "1 of 2 uploaded objects"), *FOLLOWED],
)
def test_a_save_that_misses_an_object_looks_who_was_here(store, by, kind, why):
    save(store, claim=1)
    token, nonce = commits.take_begin_token(store, overwrite=True, claim=1), new_nonce()
    index = upload(store)
    store.delete(index.objects[0].key)
    follow(store, by)
    before, marker = len(store.requests), store.objects.get(MARKER_KEY)
    with pytest.raises(kind, match=why) as caught:
        finish(store, token, index, nonce=nonce)
    assert caught.value.url == store.url
    assert sorted(store.requests[before:-1]) == [("list", ""), ("put", index_key(nonce))]
    assert store.requests[-1] == ("get", MARKER_KEY)
    assert store.objects.get(MARKER_KEY) == marker


def test_a_missing_object_is_told_even_if_the_index_is_refused(store):
    """It says that a sweep was here; that credentials have expired meanwhile does not."""
    token, index = commits.take_begin_token(store, overwrite=False), upload(store)
    store.delete(index.objects[0].key)
    store.on_put = lambda _: CredentialsError("expired")
    with pytest.raises(CheckpointCorruptError):
        finish(store, token, index)


def test_unrelated_objects_do_not_disturb_a_commit(store):
    for i in range(50):
        store.put(f"{i:02}/other", b"x")
        store.put(f"zz{i}", b"x")
    done = save(store)
    assert open_committed(store)[0] == done.marker


# --- races


@pytest.mark.parametrize(("by", "kind", "why"), FOLLOWED)
def test_a_commit_that_somebody_was_before_is_read_and_not_sent_again(store, by, kind, why):
    save(store, claim=1)
    token, index = commits.take_begin_token(store, overwrite=True, claim=1), upload(store)
    follow(store, by)
    before, marker = len(store.requests), store.objects.get(MARKER_KEY)
    with pytest.raises(kind, match=why) as caught:
        finish(store, token, index)
    assert caught.value.url == store.url
    assert store.requests[before + 2 :] == [("put", MARKER_KEY), ("get", MARKER_KEY)]
    assert store.objects.get(MARKER_KEY) == marker


@pytest.mark.parametrize("claim", [0, 1])
@pytest.mark.parametrize("there", [False, True])
def test_of_two_saves_of_one_job_the_first_to_commit_stays(store, claim, there):
    if there:
        save(store, claim=claim)
    first, second = (commits.take_begin_token(store, overwrite=True, claim=claim) for _ in range(2))
    done = finish(store, first)
    with pytest.raises(CommitLostError, match=done.commit_id):
        finish(store, second)
    assert open_committed(store)[0] == done.marker


def test_marker_removed_by_hand_since_begin_defeats_an_overwrite(store):
    """AWS answers `If-Match` on a missing key with 404, others with 412."""
    for answer in (ObjectNotFoundError("404"), PreconditionFailedError("412")):
        save(store, overwrite=True)
        token = commits.take_begin_token(store, overwrite=True)
        store.delete(MARKER_KEY)
        store.on_put = in_turn(MARKER_KEY, answer)
        with pytest.raises(CommitLostError, match="removed"):
            finish(store, token)
        assert MARKER_KEY not in store.objects


# --- ambiguity


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_404_to_the_marker_where_nothing_has_changed_is_no_refusal(store, overwrite):
    """It is the answer of a store that is not sure yet of what it has."""
    if overwrite:
        save(store)
        store.puts.clear()
    store.on_put = in_turn(MARKER_KEY, ObjectNotFoundError("404"))
    done = save(store, overwrite=overwrite)
    assert len(marker_puts(store)) == 2
    assert open_committed(store)[0] == done.marker


def test_a_put_without_an_effect_is_sent_again_with_the_same_body(store):
    """S3 may answer 409 to a conditional PUT although nobody else wins."""
    store.on_put = in_turn(MARKER_KEY, LOST, LOST, PreconditionFailedError("409"))
    retries: list[tuple[int, str, float]] = []
    clock = TickingClock()
    done = finish(
        store,
        commits.take_begin_token(store, overwrite=False),
        clock=clock,
        on_retry=lambda number, error, began: retries.append((number, f"{error}"[:3], began)),
    )
    assert retries == [(2, "no ", 0.0), (3, "no ", 0.0), (4, "409", 0.0)]
    assert done.attempts == 4
    puts = marker_puts(store)
    assert len(puts) == 4
    assert len({put.data for put in puts}) == 1
    assert len({put.precondition for put in puts}) == 1
    assert not any(put.retry for put in puts)
    assert open_committed(store)[0] == done.marker


@pytest.mark.parametrize(
    ("then", "superseded"),
    [
        (lambda store: save(store, overwrite=True), True),
        (lambda store: rewrite(store, state="deleted"), True),
        (rewrite, False),  # a sweep changes write_id and ETag; only commit_ids may be compared
    ],
    ids=["replaced", "deleted", "swept"],
)
def test_what_lost_its_answer_is_a_success_whatever_came_then(store, then, superseded):
    after: list[bytes] = []

    def land_and_be_followed(put: Put) -> BaseException:
        store.apply(put)
        then(store)
        after.append(store.body(MARKER_KEY))
        return StoreUnavailableError("no answer")

    store.on_put = in_turn(MARKER_KEY, land_and_be_followed)
    done = save(store)
    assert done.superseded is superseded
    assert done.dot_metadata == (None if superseded else IfAbsent())
    assert store.body(MARKER_KEY) == after[-1]
    marker = decode_marker(after[-1])
    assert done.commit_id in (marker.commit_id, *marker.log)


def test_silence_until_the_deadline_is_unknown_and_deletes_nothing(store):
    clock = TickingClock()
    token = commits.take_begin_token(store, overwrite=False)
    index, nonce = upload(store), new_nonce()
    store.on_put = lambda put: DELAYED if put.key == MARKER_KEY else None
    with pytest.raises(CommitUnknownError) as caught:
        finish(store, token, index, nonce=nonce, clock=clock)
    assert caught.value.url == store.url
    assert 60 <= clock.now < 70
    assert len(marker_puts(store)) > 5
    assert ("delete", MARKER_KEY) not in store.requests
    assert not [verb for verb, _ in store.requests if verb == "delete"]
    left = {entry.key for entry in index.objects} | {index_key(nonce), token.beacon}
    assert left == set(store.objects)
    # And so the commit that lands after all is whole.
    assert store.deliver()[0]
    assert open_committed(store)[1] == ix.encode(index)


REFUSALS = [PermissionDeniedError, CredentialsError, UnsupportedError, ConfigError, InputError]


@pytest.mark.parametrize("kind", REFUSALS)
def test_a_refusal_is_not_believed_before_the_marker_is_read(store, kind):
    """A middlebox answers with nonsense, or with 403, for a PUT that has reached the store."""

    def landed(put: Put) -> BaseException:
        store.apply(put)
        return kind("no")

    store.on_put = in_turn(MARKER_KEY, landed)
    done = save(store)
    assert not done.superseded
    assert len(marker_puts(store)) == 1
    assert open_committed(store)[0] == done.marker


@pytest.mark.parametrize("lands", [False, True])
def test_a_refusal_is_unknown_as_long_as_the_marker_cannot_be_read(store, lands):
    token = commits.take_begin_token(store, overwrite=False)
    index = upload(store)

    def unreadable(key: str) -> None:
        raise CredentialsError("expired")

    def refused(put: Put) -> BaseException | None:
        if put.key != MARKER_KEY:
            return None
        store.on_get = unreadable
        if lands and put.number == 1:
            store.apply(put)
        return CredentialsError("expired")

    store.on_put = refused
    with pytest.raises(CommitUnknownError, match="expired"):
        finish(store, token, index)
    store.on_get = None
    assert (MARKER_KEY in store.objects) == lands


@pytest.mark.parametrize("kind", REFUSALS)
def test_refusal_of_the_first_put_is_raised_at_once(store, kind):
    clock = TickingClock()
    token = commits.take_begin_token(store, overwrite=False)
    store.on_put = in_turn(MARKER_KEY, kind("no"), kind("no"))
    with pytest.raises(kind) as caught:
        finish(store, token, clock=clock)
    assert (caught.value.object_key, caught.value.url) == (MARKER_KEY, store.url)
    assert len(marker_puts(store)) == 1
    assert clock.now == 0
    assert MARKER_KEY not in store.objects


def test_a_conflict_with_nobody_is_neither_final_nor_an_answer_that_may_come(store):
    store.on_put = in_turn(MARKER_KEY, PreconditionFailedError("409"))
    save(store)
    assert len(marker_puts(store)) == 2
    token = commits.take_begin_token(store, overwrite=True)
    store.on_put = in_turn(MARKER_KEY, PreconditionFailedError("409"), CredentialsError("expired"))
    with pytest.raises(CredentialsError):  # nothing that was sent can land any more
        finish(store, token)


def test_refusal_after_an_unanswered_put_does_not_hide_that_it_may_land(store):
    """Credentials that expire between two PUTs say nothing of the first one."""
    token, index = commits.take_begin_token(store, overwrite=False), upload(store)
    store.on_put = in_turn(MARKER_KEY, DELAYED, *[CredentialsError("expired")] * 1000)
    with pytest.raises(CommitUnknownError):
        finish(store, token, index)
    store.on_put = None
    assert store.deliver() == [True]
    assert open_committed(store)[1] == ix.encode(index)


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


def test_opening_a_committed_checkpoint_never_lists(store):
    done = save(store)
    store.requests.clear()
    open_committed(store)
    assert done.marker.index is not None
    assert store.requests == [("get", MARKER_KEY), ("get", done.marker.index.key)]


@pytest.mark.parametrize(
    "damage", [lambda body: body[:-1], lambda body: body + b"!", lambda body: b"A" + body[1:], None]
)
def test_damaged_or_missing_index_is_corrupt(store, damage):
    done = save(store)
    assert done.marker.index is not None
    key = done.marker.index.key
    body = store.body(key)
    store.delete(key)
    if damage is not None:
        store.put(key, damage(body))
    with pytest.raises(CheckpointCorruptError) as caught:
        open_committed(store)
    assert (caught.value.url, caught.value.object_key) == (store.url, key)


@pytest.mark.parametrize("how", ["replaced", "deleted", "removed"])
def test_index_that_went_with_its_commit_is_gone_not_corrupt(store, how):
    done = save(store)
    assert done.marker.index is not None
    key = done.marker.index.key

    def meanwhile(asked: str) -> None:
        if asked != key:
            return
        store.on_get = None
        if how == "replaced":
            save(store, overwrite=True)
        elif how == "deleted":
            rewrite(store, state="deleted")
        else:
            store.delete(MARKER_KEY)
        store.delete(key)

    store.on_get = meanwhile
    with pytest.raises(CheckpointGoneError) as caught:
        open_committed(store)
    assert ("replaced" if how == "replaced" else "deleted") in str(caught.value)
    assert (caught.value.url, caught.value.object_key) == (store.url, key)


def test_missing_object_is_explained_by_the_marker(store):
    done = save(store)

    def explain() -> DcpObjstoreError:
        return explain_missing(store, done.commit_id, "__0_0.x.distcp")

    missing = explain()
    assert isinstance(missing, CheckpointCorruptError)
    assert (missing.url, missing.object_key) == (store.url, "__0_0.x.distcp")
    rewrite(store)  # a sweep: the same commit
    assert isinstance(explain(), CheckpointCorruptError)
    rewrite(store, state="deleting")
    assert isinstance(explain(), CheckpointGoneError)

    def unreadable(key: str) -> None:
        raise StoreUnavailableError("503")

    store.on_get = unreadable
    assert isinstance(explain(), StoreUnavailableError)
    assert explain().object_key in (None, "__0_0.x.distcp")


def test_damaged_marker_is_never_taken_for_absence(store):
    save(store)
    body = store.body(MARKER_KEY)
    for damaged in (b"", body[:-1], body.replace(b'"committed"', b'"deleted"'), body * 200):
        store.put(MARKER_KEY, damaged)
        with pytest.raises(CheckpointCorruptError):
            commits.take_begin_token(store, overwrite=False)
        with pytest.raises(CheckpointCorruptError) as caught:
            open_committed(store)
        assert caught.value.object_key == MARKER_KEY


@pytest.mark.parametrize("damage", [lambda body: body[:-1], lambda body: body * 200])
def test_damaged_marker_is_replaced_when_that_is_asked_for(store, damage):
    save(store)
    store.put(MARKER_KEY, damage(store.body(MARKER_KEY)))
    committed = save(store, overwrite=True)
    assert not committed.superseded
    assert open_committed(store)[0].commit_id == committed.commit_id


def test_of_two_who_replace_a_damaged_marker_one_loses(store):
    store.put(MARKER_KEY, b"damaged")
    first, second = (commits.take_begin_token(store, overwrite=True) for _ in range(2))
    committed = finish(store, first)
    with pytest.raises(CommitLostError):
        finish(store, second)
    assert open_committed(store)[0].commit_id == committed.commit_id


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


def test_a_checkpoint_of_another_library_is_not_replaced_unasked(store):
    store.put(DOT_METADATA_KEY, b"stock")
    with pytest.raises(CheckpointExistsError, match="another library"):
        commits.take_begin_token(store, overwrite=False)
    assert commits.take_begin_token(store, overwrite=True).marker is None
    assert store.get(DOT_METADATA_KEY, max_size_bytes=10)[0] == b"stock"


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


def test_a_rewrite_that_came_too_late_changes_nothing(store):
    save(store)
    before = stored_marker(store)
    rewrite(store)
    after = store.body(MARKER_KEY)
    tries = TickingClock().tries()
    assert commits.rewrite_marker(store, before, "a fence", tries) is None
    assert store.body(MARKER_KEY) == after


def test_a_rewrite_without_answers_says_what_may_still_come(store):
    save(store)
    store.on_put = lambda _: LOST
    with pytest.raises(CommitUnknownError, match="whether the change took effect"):
        commits.rewrite_marker(store, stored_marker(store), "the change", TickingClock().tries())


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


def test_a_tombstone_is_not_put_where_a_marker_is(store):
    done = save(store)
    assert commits.put_tombstone(store, TickingClock().tries()) is None
    assert stored_marker(store).record == done.marker


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
