"""Repair: what a crash left undone is done, and nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dcp_objstore.checkpoint import probe
from dcp_objstore.checkpoint.names import DOT_METADATA_KEY, MARKER_KEY
from dcp_objstore.checkpoint.read import open_committed, read_marker
from dcp_objstore.checkpoint.repair import RepairReport, repair
from dcp_objstore.errors import CheckpointCorruptError, CheckpointNotFoundError
from dcp_objstore.stores import ObjectStore
from dcp_objstore.stores.protocol import Capabilities
from tests.support.memory_store import TickingClock
from tests.support.upkeep import DESCRIBED, keys, save, tear, tear_deletion


def go(store: ObjectStore, *, dry_run: bool = False) -> RepairReport:
    return repair(store, dot_metadata=DESCRIBED, dry_run=dry_run, clock=TickingClock())


@pytest.mark.backends("seaweed", "moto", "gcs", "azure")
@pytest.mark.parametrize("what", ["unpublished", "outdated", "being deleted"])
def test_what_was_left_undone_is_done_and_a_dry_run_says_so(real, what):
    done = save(real, publish=what == "being deleted")
    if what == "outdated":
        done = save(real, overwrite=True, publish=False)
    deleting = what == "being deleted"
    if deleting:
        tear_deletion(real)
    before = {meta.key: meta.version for meta in real.list()}
    planned = go(real, dry_run=True)
    assert planned == RepairReport(
        url=real.url,
        state="deleted" if deleting else "committed",
        commit_id=done.commit_id,
        finished_delete=deleting,
        dot_metadata=None if deleting else "written",
        dry_run=True,
    )
    assert {meta.key: meta.version for meta in real.list()} == before
    assert go(real) == replace(planned, dry_run=False)
    if deleting:
        assert keys(real) == before.keys() - {DOT_METADATA_KEY}
    else:
        body = real.get(DOT_METADATA_KEY, max_size_bytes=10**6)[0]
        assert DESCRIBED.describes(body, open_committed(real)[1])
    assert (go(real).finished_delete, go(real).dot_metadata) == (False, None)


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


def test_nothing_is_touched_where_all_is_well(store):
    save(store)
    tear(store)
    before = dict(store.objects)
    report = go(store)
    assert (report.dot_metadata, report.finished_delete) == (None, False)
    assert store.objects == before


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
