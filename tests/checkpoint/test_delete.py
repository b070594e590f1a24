"""Deleting: never a half of a checkpoint, never more than it named, and anybody can finish."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest

from dcp_objstore.checkpoint import commit as commits
from dcp_objstore.checkpoint.delete import delete
from dcp_objstore.checkpoint.marker import decode_marker, encode_marker, new_id
from dcp_objstore.checkpoint.names import (
    DOT_METADATA_KEY,
    MARKER_KEY,
    data_key,
    is_beacon_key,
    new_nonce,
)
from dcp_objstore.checkpoint.pins import pin, unpin
from dcp_objstore.checkpoint.read import explain_missing, open_committed, read_marker
from dcp_objstore.errors import (
    CheckpointCorruptError,
    CheckpointGoneError,
    CheckpointNotFoundError,
    CheckpointPinnedError,
    CommitLostError,
    CommitUnknownError,
    DcpObjstoreError,
    LostRaceError,
    StoreUnavailableError,
)
from dcp_objstore.stores import ObjectStore
from dcp_objstore.stores.protocol import IfVersion
from tests.support.memory_store import (
    DELAYED,
    LOST,
    UNANSWERED,
    MemoryStore,
    Put,
    TickingClock,
    in_turn,
)
from tests.support.upkeep import finish, keys, loose, named, save, state, tear, upload
from tests.support.wrapped_stores import Fault, FaultStore


def go(store: ObjectStore, **settings: bool):
    return delete(store, clock=TickingClock(), **settings)


def test_deleted_checkpoint_is_gone_for_readers_and_its_objects_stay(real: ObjectStore) -> None:
    done = save(real)
    data = named(real)
    report = go(real)
    assert (report.commit_id, report.objects, report.removed_objects) == (done.commit_id, 2, 0)
    assert report.total_bytes == done.marker.counts.total_bytes > 0
    assert keys(real) == {MARKER_KEY, *data}
    found = read_marker(real)
    assert found is not None
    assert (found[0].state, found[0].commit_id) == ("deleted", done.commit_id)
    assert found[0].index == done.marker.index
    with pytest.raises(CheckpointNotFoundError, match="was deleted"):
        open_committed(real)


@pytest.mark.backends("seaweed", "moto", "gcs", "azure")
def test_delete_now_removes_exactly_what_the_commit_named(real: ObjectStore) -> None:
    torn = tear(real)
    save(real)
    others = {"notes.txt", "step-2/_COMMIT", "__0_0.distcp"}
    for key in others:
        real.put(key, b"somebody's")
    report = go(real, now=True)
    assert report.removed_objects == 3
    left = {key for key in keys(real) if not is_beacon_key(key)}
    assert left == {MARKER_KEY, *torn, *others}


@pytest.mark.backends("seaweed", "moto", "gcs", "azure")
def test_deleted_checkpoint_can_be_saved_again(real: ObjectStore) -> None:
    first = save(real)
    go(real, now=True)
    second = save(real)
    assert named(real) == loose(real) | named(real)
    assert open_committed(real)[0].log == (first.commit_id,)
    assert open_committed(real)[0].commit_id == second.commit_id


def test_what_is_not_there_is_not_deleted(store: MemoryStore) -> None:
    with pytest.raises(CheckpointNotFoundError, match="nothing here"):
        go(store)
    save(store)
    go(store)
    before = dict(store.objects)
    with pytest.raises(CheckpointNotFoundError, match="was deleted"):
        go(store)
    assert store.objects == before
    go(store, now=True)
    with pytest.raises(CheckpointNotFoundError, match="was deleted"):
        go(store, now=True)
    assert set(store.objects) == {MARKER_KEY}


def test_another_librarys_checkpoint_is_not_deleted(store: MemoryStore) -> None:
    for key in (".metadata", "__0_0.distcp"):
        store.put(key, b"stock")
    with pytest.raises(CheckpointNotFoundError):
        go(store, now=True)
    assert set(store.objects) == {".metadata", "__0_0.distcp"}


def test_pinned_checkpoint_is_not_deleted_until_it_is_unpinned(real: ObjectStore) -> None:
    save(real)
    assert pin(real, "paper") == ("paper",)
    assert pin(real, "release 1") == ("paper", "release 1")
    before = keys(real)
    with pytest.raises(CheckpointPinnedError, match="paper, release 1"):
        go(real, now=True)
    assert keys(real) == before
    assert state(real) == "committed"
    unpin(real, "paper")
    unpin(real, "release 1")
    go(real)
    assert state(real) == "deleted"


def test_a_pin_that_comes_between_reading_and_deleting_wins(store: MemoryStore) -> None:
    save(store)
    store.on_put = in_turn(MARKER_KEY, lambda _: pin(store, "paper", clock=TickingClock()))
    with pytest.raises(CheckpointPinnedError, match="paper"):
        go(store, now=True)
    assert state(store) == "committed"
    assert DOT_METADATA_KEY in store.objects
    named(store)


def test_a_commit_that_comes_between_reading_and_deleting_wins(store: MemoryStore) -> None:
    save(store)
    saved = []
    store.on_put = in_turn(MARKER_KEY, lambda _: saved.append(save(store, overwrite=True)))
    with pytest.raises(LostRaceError, match="replaced"):
        go(store, now=True)
    assert open_committed(store)[0].commit_id == saved[0].commit_id
    named(store)
    assert DOT_METADATA_KEY in store.objects


def test_a_fence_that_comes_between_does_not_keep_it_from_being_deleted(store: MemoryStore) -> None:
    save(store)

    def fence(_: Put) -> None:
        found = read_marker(store)
        assert found is not None
        marker = msgspec.structs.replace(found[0], write_id=new_id())
        store.put(MARKER_KEY, encode_marker(marker), precondition=IfVersion(found[1]))

    store.on_put = in_turn(MARKER_KEY, fence)
    go(store)
    assert state(store) == "deleted"


def test_a_save_under_way_cannot_commit_over_a_deletion(real: ObjectStore) -> None:
    save(real)
    token = commits.begin(real, overwrite=True)
    index = upload(real)
    go(real)
    with pytest.raises(CommitLostError):
        finish(real, token, index, clock=TickingClock())
    assert state(real) == "deleted"


def test_while_it_is_being_deleted_it_is_neither_read_nor_saved(store: MemoryStore) -> None:
    save(store)
    store.on_delete = lambda _key: (_ for _ in ()).throw(StoreUnavailableError("died"))
    with pytest.raises(StoreUnavailableError):
        go(store)
    assert state(store) == "deleting"
    with pytest.raises(CheckpointNotFoundError, match="being deleted"):
        open_committed(store)
    with pytest.raises(StoreUnavailableError):
        commits.begin(store, overwrite=True)  # it would finish that first
    with pytest.raises(CheckpointNotFoundError, match="being deleted"):
        pin(store, "too late", clock=TickingClock())


@pytest.mark.parametrize("now", [False, True])
def test_cut_anywhere_the_same_call_finishes_it(now: bool) -> None:
    """Before and after the effect of every request; nobody ever sees a half of it."""
    cut = -1
    while True:
        cut += 1
        store = MemoryStore()
        save(store)
        requests = -1

        def plan(*_: object, cut: int = cut) -> Fault | None:
            nonlocal requests
            requests += 1
            if requests < cut // 2:
                return None
            when = "before" if cut % 2 == 0 or requests > cut // 2 else "after"
            return Fault(when, PermissionError("dead"))  # not one of our types: nothing catches it

        try:
            go(FaultStore(store, plan), now=now)
        except PermissionError:
            pass
        else:
            break
        if state(store) == "committed":
            named(store)
        else:
            with pytest.raises(CheckpointNotFoundError):
                open_committed(store)
        try:
            go(store, now=now)
        except CheckpointNotFoundError as error:
            assert "was deleted" in str(error)
        assert state(store) == "deleted"
        assert DOT_METADATA_KEY not in store.objects
        assert loose(store) == (set() if now else loose(store))
        assert len(store.objects) == (1 if now else 4)
    assert cut // 2 >= 5


@pytest.mark.parametrize("fate", [LOST, UNANSWERED, DELAYED])
@pytest.mark.parametrize("number", [1, 2], ids=["deleting", "deleted"])
def test_lost_and_late_answers_are_found_out(store: MemoryStore, fate, number: int) -> None:
    save(store)
    store.on_put = in_turn(MARKER_KEY, *[None] * (number - 1), fate)
    go(store, now=True)
    store.deliver()
    assert set(store.objects) == {MARKER_KEY}
    assert state(store) == "deleted"


def test_no_answer_at_all_is_an_unknown_outcome_and_nothing_is_removed(store: MemoryStore) -> None:
    save(store)
    data = named(store)
    store.on_put = lambda put: LOST if put.key == MARKER_KEY else None
    with pytest.raises(CommitUnknownError):
        go(store, now=True)
    assert named(store) == data
    assert DOT_METADATA_KEY in store.objects


def test_two_deleters_at_once_both_succeed(store: MemoryStore) -> None:
    save(store)
    seen = []

    def other(key: str) -> None:
        if key == DOT_METADATA_KEY and not seen:
            seen.append(True)
            seen.append(go(store, now=True))

    store.on_delete = other
    report = go(store, now=True)
    assert seen[1].finished
    assert not report.finished
    assert set(store.objects) == {MARKER_KEY}


def test_a_deleter_that_was_paused_over_a_new_save_says_so(store: MemoryStore) -> None:
    save(store)
    seen = []

    def other(key: str) -> None:
        if key == DOT_METADATA_KEY and not seen:
            seen.append(True)
            go(store)
            seen.append(save(store))

    store.on_delete = other
    report = go(store, now=True)
    assert report.superseded
    assert open_committed(store)[0].commit_id == seen[1].commit_id
    named(store)


def test_reader_in_the_middle_is_told_that_the_checkpoint_has_gone(store: MemoryStore) -> None:
    done = save(store)
    go(store, now=True)
    error = explain_missing(store, done.commit_id, "__0_0.x.distcp")
    assert isinstance(error, CheckpointGoneError)


def test_damaged_index_does_not_keep_it_from_being_deleted(store: MemoryStore) -> None:
    done = save(store)
    assert done.marker.index is not None
    data = named(store)
    store.put(done.marker.index.key, b"damaged")
    report = go(store, now=True)
    assert report.index_damaged
    assert report.removed_objects == 0
    assert set(store.objects) == {MARKER_KEY, *data}


def test_keys_that_are_not_of_our_form_are_never_removed(store: MemoryStore) -> None:
    """Also where an index, which anybody with the right to write could make, names them."""
    index = upload(store)
    others = (MARKER_KEY, "step-2/_COMMIT", "notes.txt", f"x/{data_key(0, 0, new_nonce())}")
    entry = index.objects[0]
    for key in others[1:]:
        store.put(key, b"somebody's")
    named_too = [msgspec.structs.replace(entry, key=key, size_bytes=1) for key in others]
    token = commits.begin(store, overwrite=False)
    hostile = replace(index, objects=(*index.objects, *named_too))
    import dcp_objstore.checkpoint.commit as module

    original, module.check_objects = module.check_objects, lambda *_: None
    try:
        finish(store, token, hostile)
    finally:
        module.check_objects = original
    go(store, now=True)
    assert set(store.objects) == set(others)


def test_dry_run_changes_nothing_and_says_what_would_go(store: MemoryStore) -> None:
    save(store)
    before = dict(store.objects)
    report = go(store, now=True, dry_run=True)
    assert (report.dry_run, report.objects, report.removed_objects) == (True, 2, 3)
    assert store.objects == before


def test_damaged_marker_is_left_as_it_is(store: MemoryStore) -> None:
    save(store)
    store.put(MARKER_KEY, b"{}")
    before: dict[str, object] = dict(store.objects)
    with pytest.raises(CheckpointCorruptError):
        go(store, now=True)
    assert store.objects == before


def test_the_tombstone_keeps_the_history(store: MemoryStore) -> None:
    first, second = save(store), save(store, overwrite=True)
    go(store)
    marker = decode_marker(store.body(MARKER_KEY))
    assert marker.generation == 2
    assert marker.knows(first.commit_id)
    assert marker.commit_id == second.commit_id


def test_errors_of_the_store_pass_through(store: MemoryStore) -> None:
    save(store)
    errors: list[Callable[[], DcpObjstoreError]] = [lambda: StoreUnavailableError("503")]
    for error in errors:
        faulty = FaultStore(
            store,
            lambda verb, key, nth, error=error: Fault("before", error()) if verb == "get" else None,
        )
        with pytest.raises(StoreUnavailableError):
            go(faulty)
    assert state(store) == "committed"
