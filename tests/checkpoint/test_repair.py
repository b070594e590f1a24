"""Repair: what a crash left undone is done, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from dcp_objstore.checkpoint import probe
from dcp_objstore.checkpoint.delete import delete
from dcp_objstore.checkpoint.names import DOT_METADATA_KEY, MARKER_KEY
from dcp_objstore.checkpoint.read import open_committed, read_marker
from dcp_objstore.checkpoint.repair import RepairReport, repair
from dcp_objstore.errors import CheckpointCorruptError, CheckpointNotFoundError, RetryableError
from dcp_objstore.stores import ObjectStore
from dcp_objstore.stores.protocol import Capabilities
from tests.support.memory_store import MemoryStore, TickingClock
from tests.support.upkeep import DESCRIBED, keys, named, save, state, tear, tear_deletion


def go(store: ObjectStore, *, dry_run: bool = False) -> RepairReport:
    return repair(store, dot_metadata=DESCRIBED, dry_run=dry_run, clock=TickingClock())


def in_line(store: ObjectStore) -> bool:
    body = store.get(DOT_METADATA_KEY, max_size_bytes=10**6)[0]
    return DESCRIBED.describes(body, open_committed(store)[1])


def test_missing_dot_metadata_is_written(real):
    done = save(real, publish=False)
    before = read_marker(real)
    assert go(real, dry_run=True).dot_metadata == "written"
    assert DOT_METADATA_KEY not in keys(real)
    assert read_marker(real) == before
    report = go(real)
    assert (report.state, report.commit_id) == ("committed", done.commit_id)
    assert report.dot_metadata == "written"
    assert in_line(real)
    assert go(real).dot_metadata is None


def test_a_dry_run_says_what_it_would_do_and_only_reads(store):
    done = save(store, publish=False)
    del store.requests[:]
    planned = go(store, dry_run=True)
    assert {verb for verb, _ in store.requests} == {"get"}
    assert planned == RepairReport(
        url=store.url,
        state="committed",
        commit_id=done.commit_id,
        finished_delete=False,
        dot_metadata="written",
        dry_run=True,
    )
    assert go(store) == replace(planned, dry_run=False)


def test_the_marker_is_rewritten_only_where_that_can_lose_no_save(store):
    def written(can_update: bool) -> bool:
        store.capabilities = Capabilities(conditional_update=can_update)
        probe.forget()
        store.delete(DOT_METADATA_KEY)
        before = read_marker(store)
        assert go(store).dot_metadata == "written"
        return read_marker(store) != before

    save(store)
    assert written(can_update=True)
    assert not written(can_update=False)


@pytest.mark.backends("seaweed", "moto", "gcs", "azure")
def test_dot_metadata_of_the_replaced_commit_is_written_anew(real):
    save(real)
    save(real, overwrite=True, publish=False)
    assert not in_line(real)
    assert go(real).dot_metadata == "written"
    assert in_line(real)
    named(real)


def test_nothing_is_touched_where_all_is_well(store):
    save(store)
    tear(store)
    before = dict(store.objects)
    report = go(store)
    assert (report.dot_metadata, report.finished_delete) == (None, False)
    assert store.objects == before


def test_deletion_that_was_begun_is_finished(real):
    done = save(real)
    data = named(real)
    tear_deletion(real)
    planned = go(real, dry_run=True)
    assert planned == RepairReport(
        url=real.url,
        state="deleted",
        commit_id=done.commit_id,
        finished_delete=True,
        dot_metadata=None,
        dry_run=True,
    )
    assert state(real) == "deleting"
    assert go(real) == replace(planned, dry_run=False)
    assert keys(real) == {MARKER_KEY, *data}


def test_dot_metadata_beside_a_tombstone_is_removed(store):
    save(store)
    delete(store)
    store.put(DOT_METADATA_KEY, b"metadata of late")
    assert go(store).dot_metadata == "removed"
    assert DOT_METADATA_KEY not in store.objects
    assert go(store).dot_metadata is None


def test_dot_metadata_of_another_library_beside_a_tombstone_stays(store):
    """Somebody deleted the checkpoint with ours and saved another one there with stock torch."""
    save(store)
    delete(store)
    store.put(DOT_METADATA_KEY, b"stock torch's")
    assert go(store).dot_metadata is None
    assert store.body(DOT_METADATA_KEY) == b"stock torch's"


def change_at_the_last_look(store: MemoryStore, change: Callable[[MemoryStore], object]) -> None:
    """The checkpoint changes right after its `.metadata` was written and looked after."""
    save(store, publish=False)
    looks: list[str] = []

    def look(key: str) -> None:
        if key == MARKER_KEY and DOT_METADATA_KEY in store.objects:
            looks.append(key)
            if len(looks) == 2:
                change(store)

    store.on_get = look


def test_a_deletion_that_begins_as_dot_metadata_is_repaired_is_left_to_finish(store):
    """The last look at the marker finds the same commit, which is being deleted."""
    change_at_the_last_look(store, tear_deletion)
    with pytest.raises(RetryableError, match="being deleted"):
        go(store)


def test_a_save_that_comes_as_dot_metadata_is_repaired_has_its_own(store):
    change_at_the_last_look(store, lambda store: save(store, overwrite=True, publish=False))
    assert go(store).dot_metadata == "written"
    assert in_line(store)


def test_without_a_marker_there_is_nothing_to_repair(store):
    torn = tear(store)
    with pytest.raises(CheckpointNotFoundError, match="never committed"):
        go(store)
    assert torn < set(store.objects)
    assert MARKER_KEY not in store.objects


def test_damage_is_said_and_nothing_is_published(store):
    done = save(store, publish=False)
    assert done.marker.index is not None
    store.put(done.marker.index.key, b"damaged")
    with pytest.raises(CheckpointCorruptError):
        go(store)
    assert DOT_METADATA_KEY not in store.objects
