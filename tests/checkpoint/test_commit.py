"""The commit rules, against a store whose answers are lost, late, doubled or wrong."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable

import msgspec
import pytest

from dcp_objstore.checkpoint import commit as commits, index as ix
from dcp_objstore.checkpoint.commit import BeginToken, CommitResult
from dcp_objstore.checkpoint.delete import delete
from dcp_objstore.checkpoint.marker import Marker, decode_marker, encode_marker, new_id
from dcp_objstore.checkpoint.names import (
    DOT_METADATA_KEY,
    MARKER_KEY,
    index_key,
    new_nonce,
)
from dcp_objstore.checkpoint.publish import publish_dot_metadata
from dcp_objstore.checkpoint.read import explain_missing, open_committed, read_marker
from dcp_objstore.errors import (
    CheckpointCorruptError,
    CheckpointExistsError,
    CheckpointGoneError,
    CheckpointNotFoundError,
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
from dcp_objstore.stores.protocol import IfAbsent, IfVersion
from tests.support import upkeep
from tests.support.memory_store import (
    DELAYED,
    LOST,
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


def save(store: MemoryStore, *, overwrite: bool = False) -> CommitResult:
    return finish(store, commits.begin(store, overwrite=overwrite))


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


def test_commit_is_one_conditional_put_after_objects_and_index(store: MemoryStore) -> None:
    token = commits.begin(store, overwrite=False)
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
    assert done == CommitResult(marker.commit_id, False, marker)
    assert marker.generation == 1
    assert marker.user_metadata == {"loss": 0.5}
    assert marker.index is not None
    body = ix.encode(index)
    assert marker.index.sha256 == hashlib.sha256(body).hexdigest()
    assert open_committed(store) == (marker, body)


def test_a_deletion_of_a_later_claim_is_not_finished_by_a_superseded_job(
    store: MemoryStore,
) -> None:
    save(store)
    before = rewrite(store, state="deleting", claim=2, format=2)
    with pytest.raises(SupersededError):
        commits.begin(store, overwrite=True, claim=1)
    assert decode_marker(store.body(MARKER_KEY)) == before


def test_what_is_committed_while_a_save_finishes_a_deletion_is_not_replaced_unasked(
    store: MemoryStore,
) -> None:
    save(store)
    rewrite(store, state="deleting")
    others: list[CommitResult] = []

    def overtake(key: str) -> None:
        store.on_delete = None
        others.append(save(store))

    store.on_delete = overtake
    with pytest.raises(CheckpointExistsError):
        commits.begin(store, overwrite=False)
    assert open_committed(store)[0].commit_id == others[0].commit_id


@pytest.mark.parametrize("there", [False, True])
def test_begin_token_travels_between_processes(store: MemoryStore, there: bool) -> None:
    if there:
        save(store)
    token = commits.begin(store, overwrite=True)
    assert pickle.loads(pickle.dumps(token)) == token


def test_begin_token_of_another_checkpoint_is_refused(store: MemoryStore) -> None:
    token = commits.begin(MemoryStore("memory://test/run/step-2"), overwrite=False)
    with pytest.raises(InputError, match="step-2"):
        finish(store, token)
    assert MARKER_KEY not in store.objects


# --- objects are checked first


@pytest.mark.parametrize("damage", ["missing", "short", "long"])
def test_nothing_is_committed_when_an_object_is_not_as_uploaded(
    store: MemoryStore, damage: str
) -> None:
    store.put("unrelated/object", b"x")
    token = commits.begin(store, overwrite=False)
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


def test_unrelated_objects_do_not_disturb_a_commit(store: MemoryStore) -> None:
    for i in range(50):
        store.put(f"{i:02}/other", b"x")
        store.put(f"zz{i}", b"x")
    done = save(store)
    assert open_committed(store)[0] == done.marker


# --- races


def test_marker_removed_by_hand_since_begin_defeats_an_overwrite(store: MemoryStore) -> None:
    """AWS answers `If-Match` on a missing key with 404, others with 412."""
    for answer in (ObjectNotFoundError("404"), PreconditionFailedError("412")):
        save(store, overwrite=True)
        token = commits.begin(store, overwrite=True)
        store.delete(MARKER_KEY)
        store.on_put = in_turn(MARKER_KEY, answer)
        with pytest.raises(CommitLostError, match="removed"):
            finish(store, token)
        assert MARKER_KEY not in store.objects


# --- ambiguity


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_404_to_the_marker_where_nothing_has_changed_is_no_refusal(
    store: MemoryStore, overwrite: bool
) -> None:
    """It is the answer of a store that is not sure yet of what it has."""
    if overwrite:
        save(store)
        store.puts.clear()
    store.on_put = in_turn(MARKER_KEY, ObjectNotFoundError("404"))
    done = save(store, overwrite=overwrite)
    assert len(marker_puts(store)) == 2
    assert open_committed(store)[0] == done.marker


def test_a_put_without_an_effect_is_sent_again_with_the_same_body(store: MemoryStore) -> None:
    """S3 may answer 409 to a conditional PUT although nobody else wins."""
    store.on_put = in_turn(MARKER_KEY, LOST, LOST, PreconditionFailedError("409"))
    done = save(store)
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
def test_what_lost_its_answer_is_a_success_whatever_came_then(
    store: MemoryStore, then: Callable[[MemoryStore], object], superseded: bool
) -> None:
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


def test_silence_until_the_deadline_is_unknown_and_deletes_nothing(store: MemoryStore) -> None:
    clock = TickingClock()
    token = commits.begin(store, overwrite=False)
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
def test_a_refusal_is_not_believed_before_the_marker_is_read(
    store: MemoryStore, kind: type[InputError]
) -> None:
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
def test_a_refusal_is_unknown_as_long_as_the_marker_cannot_be_read(
    store: MemoryStore, lands: bool
) -> None:
    token = commits.begin(store, overwrite=False)
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
def test_refusal_of_the_first_put_is_raised_at_once(
    store: MemoryStore, kind: type[InputError]
) -> None:
    clock = TickingClock()
    token = commits.begin(store, overwrite=False)
    store.on_put = in_turn(MARKER_KEY, kind("no"), kind("no"))
    with pytest.raises(kind) as caught:
        finish(store, token, clock=clock)
    assert (caught.value.object_key, caught.value.url) == (MARKER_KEY, store.url)
    assert len(marker_puts(store)) == 1
    assert clock.now == 0
    assert MARKER_KEY not in store.objects


def test_a_conflict_with_nobody_is_neither_final_nor_an_answer_that_may_come(
    store: MemoryStore,
) -> None:
    store.on_put = in_turn(MARKER_KEY, PreconditionFailedError("409"))
    save(store)
    assert len(marker_puts(store)) == 2
    token = commits.begin(store, overwrite=True)
    store.on_put = in_turn(MARKER_KEY, PreconditionFailedError("409"), CredentialsError("expired"))
    with pytest.raises(CredentialsError):  # nothing that was sent can land any more
        finish(store, token)


def test_refusal_after_an_unanswered_put_does_not_hide_that_it_may_land(
    store: MemoryStore,
) -> None:
    """Credentials that expire between two PUTs say nothing of the first one."""
    token, index = commits.begin(store, overwrite=False), upload(store)
    store.on_put = in_turn(MARKER_KEY, DELAYED, *[CredentialsError("expired")] * 1000)
    with pytest.raises(CommitUnknownError):
        finish(store, token, index)
    store.on_put = None
    assert store.deliver() == [True]
    assert open_committed(store)[1] == ix.encode(index)


@pytest.mark.parametrize(("body", "why"), [(b"{}", "damaged"), (b'{"format":99}', "upgrade")])
def test_unreadable_marker_after_a_lost_answer_is_unknown(
    store: MemoryStore, body: bytes, why: str
) -> None:
    token = commits.begin(store, overwrite=False)

    def damaged(put: Put) -> Fate:
        store.put(MARKER_KEY, body)
        return LOST

    store.on_put = in_turn(MARKER_KEY, damaged)
    clock = TickingClock()
    with pytest.raises(CommitUnknownError, match=why):
        finish(store, token, clock=clock)
    assert clock.now == 0  # asking again would not help
    assert store.body(MARKER_KEY) == body


def test_unfenced_commit_sends_no_condition(store: MemoryStore) -> None:
    def refuse_conditions(put: Put) -> BaseException | None:
        return UnsupportedError("501") if put.precondition is not None else None

    store.on_put = refuse_conditions
    done = finish(store, commits.begin(store, overwrite=False), fenced=False)
    assert publish(store, done.commit_id, b"ours", fenced=False)
    assert open_committed(store)[0] == done.marker


# --- .metadata


def publish(store: MemoryStore, commit_id: str, body: bytes, **options) -> bool:
    return publish_dot_metadata(store, commit_id, body, tries=TickingClock().tries(), **options)


def test_dot_metadata_loop_stops_for_a_newer_commit_that_comes_in_between(
    store: MemoryStore,
) -> None:
    """The newer commit publishes between our look at the marker and our PUT."""
    first = save(store)

    def overtake(put: Put) -> None:
        store.on_put = None
        second = save(store, overwrite=True)
        assert publish(store, second.commit_id, b"second")

    store.on_put = overtake
    assert not publish(store, first.commit_id, b"first")
    assert store.body(DOT_METADATA_KEY) == b"second"


def test_a_deletion_that_crosses_a_publication_leaves_no_dot_metadata(store: MemoryStore) -> None:
    """The PUT takes effect after the deletion, and its answer is lost."""
    done = save(store)

    def cross(put: Put) -> BaseException:
        delete(store, clock=TickingClock())
        store.apply(put)
        return StoreUnavailableError("no answer")

    store.on_put = in_turn(DOT_METADATA_KEY, cross)
    assert not publish(store, done.commit_id, b"first")
    assert DOT_METADATA_KEY not in store.objects


def overwrite_seen(store: MemoryStore) -> tuple[BeginToken, CommitResult]:
    """A save that saw the `.metadata` of the first, and its commit."""
    assert publish(store, save(store).commit_id, b"first")
    token = commits.begin(store, overwrite=True)
    return token, finish(store, token)


def test_dot_metadata_costs_two_requests_if_it_is_what_the_save_saw(store: MemoryStore) -> None:
    token, done = overwrite_seen(store)
    before = len(store.requests)
    assert publish(store, done.commit_id, b"second", seen=token.dot_metadata)
    assert store.requests[before:] == [("put", DOT_METADATA_KEY), ("get", MARKER_KEY)]
    assert store.body(DOT_METADATA_KEY) == b"second"


def test_dot_metadata_that_cannot_be_written_is_an_error_and_the_commit_stands(
    store: MemoryStore,
) -> None:
    done = save(store)
    for fate, kind in (
        (LOST, RetryableError),
        (PermissionDeniedError("no"), PermissionDeniedError),
    ):
        store.on_put = lambda put, fate=fate: fate
        with pytest.raises(kind):
            publish(store, done.commit_id, b"ours")
    assert open_committed(store)[0] == done.marker


# --- reading


def test_absence_is_explained(store: MemoryStore) -> None:
    def reason() -> str:
        with pytest.raises(CheckpointNotFoundError) as caught:
            open_committed(store)
        return str(caught.value)

    assert "nothing here" in reason()
    store.put("step-3/_COMMIT", b"x")
    assert "memory://test/run/step-1/step-3" in reason()
    upload(store)
    assert "never committed" in reason()
    for key in list(store.objects):
        store.delete(key)
    store.put(DOT_METADATA_KEY, b"x")
    assert "not a checkpoint of dcp_objstore" in reason()

    def refuse() -> None:
        raise PermissionDeniedError("no listing")

    store.on_list = refuse
    assert "no listing" in reason()


def test_opening_a_committed_checkpoint_never_lists(store: MemoryStore) -> None:
    done = save(store)
    store.requests.clear()
    open_committed(store)
    assert done.marker.index is not None
    assert store.requests == [("get", MARKER_KEY), ("get", done.marker.index.key)]


@pytest.mark.parametrize(
    "damage", [lambda body: body[:-1], lambda body: body + b"!", lambda body: b"A" + body[1:], None]
)
def test_damaged_or_missing_index_is_corrupt(
    store: MemoryStore, damage: Callable[[bytes], bytes] | None
) -> None:
    done = save(store)
    assert done.marker.index is not None
    key = done.marker.index.key
    body = store.body(key)
    store.delete(key)
    if damage is not None:
        store.put(key, damage(body))
    with pytest.raises(CheckpointCorruptError) as caught:
        open_committed(store)
    assert caught.value.object_key == key


@pytest.mark.parametrize("how", ["replaced", "deleted", "removed"])
def test_index_that_went_with_its_commit_is_gone_not_corrupt(store: MemoryStore, how: str) -> None:
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
    with pytest.raises(CheckpointGoneError, match="replaced" if how == "replaced" else "deleted"):
        open_committed(store)


def test_missing_object_is_explained_by_the_marker(store: MemoryStore) -> None:
    done = save(store)

    def explain() -> DcpObjstoreError:
        return explain_missing(store, done.commit_id, "__0_0.x.distcp")

    assert isinstance(explain(), CheckpointCorruptError)
    rewrite(store)  # a sweep: the same commit
    assert isinstance(explain(), CheckpointCorruptError)
    rewrite(store, state="deleting")
    assert isinstance(explain(), CheckpointGoneError)

    def unreadable(key: str) -> None:
        raise StoreUnavailableError("503")

    store.on_get = unreadable
    assert isinstance(explain(), StoreUnavailableError)
    assert explain().object_key in (None, "__0_0.x.distcp")


def test_damaged_marker_is_never_taken_for_absence(store: MemoryStore) -> None:
    save(store)
    body = store.body(MARKER_KEY)
    for damaged in (b"", body[:-1], body.replace(b'"committed"', b'"deleted"'), body * 200):
        store.put(MARKER_KEY, damaged)
        with pytest.raises(CheckpointCorruptError):
            commits.begin(store, overwrite=False)
        with pytest.raises(CheckpointCorruptError) as caught:
            open_committed(store)
        assert caught.value.object_key == MARKER_KEY


@pytest.mark.parametrize("damage", [lambda body: body[:-1], lambda body: body * 200])
def test_damaged_marker_is_replaced_when_that_is_asked_for(
    store: MemoryStore, damage: Callable[[bytes], bytes]
) -> None:
    save(store)
    store.put(MARKER_KEY, damage(store.body(MARKER_KEY)))
    committed = save(store, overwrite=True)
    assert not committed.superseded
    assert open_committed(store)[0].commit_id == committed.commit_id


def test_of_two_who_replace_a_damaged_marker_one_loses(store: MemoryStore) -> None:
    store.put(MARKER_KEY, b"damaged")
    first, second = (commits.begin(store, overwrite=True) for _ in range(2))
    committed = finish(store, first)
    with pytest.raises(CommitLostError):
        finish(store, second)
    assert open_committed(store)[0].commit_id == committed.commit_id


def test_marker_that_is_repaired_while_it_is_looked_at_is_not_replaced(store: MemoryStore) -> None:
    save(store)
    body = store.body(MARKER_KEY)
    store.put(MARKER_KEY, b"damaged")
    seen: list[str] = []

    def repair(key: str) -> None:
        seen.append(key)
        if len(seen) == 2:  # the version was read in between
            store.on_get = None
            store.put(MARKER_KEY, body)

    store.on_get = repair
    with pytest.raises(RetryableError, match="another writer"):
        commits.begin(store, overwrite=True)
    assert store.body(MARKER_KEY) == body


def test_a_beacon_that_takes_long_leaves_the_time_to_finish_a_deletion(store: MemoryStore) -> None:
    save(store)
    rewrite(store, state="deleting")
    clock, fates = TickingClock(), [LOST]

    def slow(put: Put) -> Fate | None:
        if put.key == MARKER_KEY:
            return fates.pop() if fates else None
        clock.now += 100
        return None

    store.on_put = slow
    token = commits.begin(store, overwrite=False, clock=clock)
    assert token.marker is not None
    assert token.marker.state == "deleted"


def test_a_checkpoint_of_another_library_is_not_replaced_unasked(store: MemoryStore) -> None:
    store.put(DOT_METADATA_KEY, b"stock")
    with pytest.raises(CheckpointExistsError, match="another library"):
        commits.begin(store, overwrite=False)
    assert commits.begin(store, overwrite=True).marker is None
    assert store.get(DOT_METADATA_KEY, max_size_bytes=10)[0] == b"stock"
