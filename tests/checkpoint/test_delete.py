"""Deleting: never a half of a checkpoint, never more than it named, and anybody can finish."""

from __future__ import annotations

import math
from dataclasses import replace

import msgspec
import pytest

from dcp_objstore.checkpoint import commit as commits, index as ix
from dcp_objstore.checkpoint.delete import delete
from dcp_objstore.checkpoint.names import (
    DOT_METADATA_KEY,
    MARKER_KEY,
    data_key,
    is_beacon_key,
    new_nonce,
)
from dcp_objstore.checkpoint.pins import pin, unpin
from dcp_objstore.checkpoint.read import open_committed, read_marker
from dcp_objstore.errors import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    CheckpointPinnedError,
    LostRaceError,
    RetryableError,
    UnsupportedError,
)
from dcp_objstore.stores import ObjectStore
from tests.support.memory_store import Put, TickingClock, in_turn
from tests.support.upkeep import (
    finish,
    keys,
    named,
    save,
    state,
    tear,
    tear_deletion,
    upload,
)


def go(store: ObjectStore, grace_seconds: float = math.inf, **settings: bool):
    return delete(store, clock=TickingClock(), grace_seconds=grace_seconds, **settings)


def test_deleted_checkpoint_is_gone_for_readers_and_its_objects_stay(real):
    done = save(real)
    data = named(real)
    report = go(real)
    assert (report.commit_id, report.objects, report.removed_objects) == (done.commit_id, 2, 0)
    assert report.total_bytes == done.marker.counts.total_bytes > 0
    assert keys(real) == {MARKER_KEY, *data}
    stored = read_marker(real)
    assert stored is not None
    assert (stored.record.state, stored.record.commit_id) == ("deleted", done.commit_id)
    assert stored.record.index == done.marker.index
    with pytest.raises(CheckpointNotFoundError, match="was deleted"):
        open_committed(real)


@pytest.mark.backends("seaweed", "moto", "gcs", "azure")
def test_delete_now_removes_exactly_what_the_commit_named(real):
    torn = tear(real)
    first = save(real)
    others = {"notes.txt", "step-2/_COMMIT", "__0_0.distcp"}
    for key in others:
        real.put(key, b"somebody's")
    report = go(real, grace_seconds=0)
    assert report.removed_objects == 3
    left = {key for key in keys(real) if not is_beacon_key(key)}
    assert left == {MARKER_KEY, *torn, *others}
    second = save(real)
    marker, _ = open_committed(real)
    assert (marker.commit_id, marker.log) == (second.commit_id, (first.commit_id,))


def test_what_is_not_there_is_not_deleted(store):
    with pytest.raises(CheckpointNotFoundError, match="nothing here"):
        go(store)
    save(store)
    go(store)
    before = dict(store.objects)
    with pytest.raises(CheckpointNotFoundError, match="was deleted"):
        go(store)
    assert store.objects == before
    go(store, grace_seconds=0)
    with pytest.raises(CheckpointNotFoundError, match="was deleted"):
        go(store, grace_seconds=0)
    assert set(store.objects) == {MARKER_KEY}


def test_a_pin_that_comes_between_reading_and_deleting_wins(store):
    save(store)
    store.on_put = in_turn(MARKER_KEY, lambda _: pin(store, "paper", clock=TickingClock()))
    with pytest.raises(CheckpointPinnedError, match="paper"):
        go(store, grace_seconds=0)
    assert state(store) == "committed"
    assert DOT_METADATA_KEY in store.objects
    named(store)


def test_a_deletion_that_meets_others_pauses_and_tries_again_if_the_commit_stands(store):
    save(store)
    clock = TickingClock()
    store.on_put = in_turn(MARKER_KEY, lambda _: pin(store, "paper") and unpin(store, "paper"))
    assert not delete(store, clock=clock).finished
    assert clock.now > 0
    assert state(store) == "deleted"
    save(store)
    store.on_put = in_turn(MARKER_KEY, lambda _: store.delete(MARKER_KEY))
    with pytest.raises(LostRaceError):
        go(store)


def test_while_it_is_being_deleted_it_is_neither_read_nor_saved_and_anybody_ends_it(store):
    save(store)
    tear_deletion(store)
    assert state(store) == "deleting"
    with pytest.raises(CheckpointNotFoundError, match="being deleted"):
        open_committed(store)
    with pytest.raises(CheckpointNotFoundError, match="being deleted"):
        pin(store, "too late", clock=TickingClock())
    before = len(store.puts)
    assert go(store).finished
    assert len(store.puts) == before + 1  # the tombstone


def test_a_deletion_that_another_deleter_has_ended_meanwhile_changes_nothing_more(store):
    save(store)
    bodies: list[bytes] = []

    def delete_first(_: Put) -> None:
        go(store)
        bodies.append(store.body(MARKER_KEY))

    store.on_put = in_turn(MARKER_KEY, delete_first)
    clock = TickingClock()
    assert not delete(store, clock=clock).superseded
    assert clock.now == 0
    assert store.body(MARKER_KEY) == bodies[0]  # so a save that begins on it is not defeated


def test_a_deletion_that_others_keep_changing_ends_at_the_deadline(store):
    save(store)

    clock = TickingClock()

    def change_it_first(_: Put) -> None:
        found = read_marker(store)
        if found is not None and found[0].state == "deleting":
            store.on_put = None
            assert commits.rewrite_marker(store, found, "a fence", clock.tries())
            store.on_put = change_it_first

    store.on_put = change_it_first
    with pytest.raises(RetryableError, match="try again"):
        delete(store, clock=clock)
    assert clock.deadline_seconds - 15 <= clock.now <= clock.deadline_seconds + 0.01
    assert state(store) == "deleting"


@pytest.mark.parametrize("error", [CheckpointCorruptError("damaged"), UnsupportedError("upgrade")])
def test_an_index_that_cannot_be_read_does_not_keep_it_from_being_deleted(
    store, monkeypatch, error
):
    save(store)
    data = named(store)

    def unreadable(_: bytes) -> None:
        raise error

    monkeypatch.setattr(ix, "decode", unreadable)
    report = go(store, grace_seconds=0)
    assert (report.index_damaged, report.removed_objects) == (True, 0)
    assert set(store.objects) == {MARKER_KEY, *data}
    assert state(store) == "deleted"


def test_keys_that_are_not_of_our_form_are_never_removed(store, monkeypatch):
    """Also where an index, which anybody with the right to write could make, names them."""
    index = upload(store)
    others = (MARKER_KEY, "step-2/_COMMIT", "notes.txt", f"x/{data_key(0, 0, new_nonce())}")
    entry = index.objects[0]
    for key in others[1:]:
        store.put(key, b"somebody's")
    named_too = [msgspec.structs.replace(entry, key=key, size_bytes=1) for key in others]
    token = commits.take_begin_token(store, overwrite=False)
    hostile = replace(index, objects=(*index.objects, *named_too))
    monkeypatch.setattr(commits, "check_objects", lambda *_: None)
    finish(store, token, hostile)
    go(store, grace_seconds=0)
    assert set(store.objects) == set(others)


def test_dry_run_changes_nothing_and_says_what_would_go(store):
    save(store)
    before = dict(store.objects)
    report = go(store, grace_seconds=0, dry_run=True)
    assert (report.dry_run, report.objects, report.removed_objects) == (True, 2, 3)
    assert not report.superseded
    assert store.objects == before
