"""Sweeping: nothing that a commit names, a reader uses or a save needs is ever removed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings, strategies as st

from dcp_objstore.checkpoint import commit as commits
from dcp_objstore.checkpoint.delete import delete
from dcp_objstore.checkpoint.names import (
    CLAIM_KEY,
    DOT_METADATA_KEY,
    MARKER_KEY,
    beacon_key,
    data_key,
    index_key,
    is_beacon_key,
    is_ours,
    new_nonce,
    parse_data_key,
    parse_index_key,
)
from dcp_objstore.checkpoint.pins import pin, unpin
from dcp_objstore.checkpoint.publish import publish_dot_metadata
from dcp_objstore.checkpoint.read import open_committed
from dcp_objstore.checkpoint.repair import repair
from dcp_objstore.checkpoint.sweep import (
    GRACE_SECONDS,
    CheckpointSweep,
    SweepPlan,
    check_grace,
    plan_sweep,
    sweep,
)
from dcp_objstore.errors import CheckpointCorruptError, ConfigError
from dcp_objstore.stores import ObjectStore, StoreSpec
from dcp_objstore.stores.protocol import ObjectMeta, UnfinishedUpload, Version
from tests.support.memory_store import MemoryStore, TickingClock, in_turn
from tests.support.servers import Bucket
from tests.support.upkeep import (
    DAY_SECONDS,
    DESCRIBED,
    AgedStore,
    finish,
    keys,
    loose,
    named,
    save,
    state,
    tear,
    tear_deletion,
    upload,
)


@pytest.fixture
def store() -> AgedStore:
    return AgedStore(MemoryStore())


@pytest.fixture
def real(bucket: Bucket) -> AgedStore:
    return AgedStore(StoreSpec(bucket.at("run/step-1"), bucket.storage_options).open())


class Offset(TickingClock):
    """A host whose clock is wrong."""

    def __init__(self, seconds: float = 0.0) -> None:
        super().__init__()
        self.offset = timedelta(seconds=seconds)

    def utc_now(self) -> datetime:
        return datetime.now(UTC) + self.offset


class FakeUploads:
    def __init__(self, *uploads: UnfinishedUpload) -> None:
        self.left = list(uploads)

    def list(self) -> list[UnfinishedUpload]:
        return list(self.left)

    def abort(self, upload: UnfinishedUpload) -> None:
        self.left.remove(upload)


def an_upload(age_seconds: float, key: str | None = None, size_bytes: int = 7) -> UnfinishedUpload:
    when = datetime.now(UTC) - timedelta(seconds=age_seconds)
    return UnfinishedUpload(key or data_key(0, 0, new_nonce()), new_nonce(), when, size_bytes)


def go(store: ObjectStore, **changes) -> CheckpointSweep:
    return sweep(store, **{"dot_metadata": DESCRIBED, "clock": Offset(), **changes})


def kind(key: str) -> str:
    """What an object is, whatever its nonce."""
    if is_beacon_key(key):
        return "beacon"
    return "data" if parse_data_key(key) else "index" if parse_index_key(key) else key


def watched(store: AgedStore, **changes) -> tuple[dict[str, object], list[str]]:
    """Sweep: every field of the report, and the requests in their order."""
    inner: MemoryStore = store.inner  # type: ignore[assignment]
    before = len(inner.requests)
    report = asdict(go(store, **changes))
    return report, [f"{verb} {kind(key)}" for verb, key in inner.requests[before:]]


def report(**fields: object) -> dict[str, object]:
    """A report in which nothing happened but for these fields."""
    nothing = {
        **dict.fromkeys(("deleted", "deleted_bytes", "kept_young"), 0),
        **dict.fromkeys(("uploads_aborted", "uploads_bytes", "uploads_young"), 0),
        **dict.fromkeys(("finished_delete", "superseded", "fenced", "dry_run"), False),
        **dict.fromkeys(("reason", "dot_metadata")),
    }
    return {"url": "memory://test/run/step-1", "unknown": (), **nothing, **fields}


MOMENT = datetime(2026, 1, 10, tzinfo=UTC)
DAY = timedelta(days=1)  # the default grace period
AN_INSTANT = timedelta(microseconds=1)

READ_MARKER, READ_INDEX, READ_DOT_METADATA = "get _COMMIT", "get index", "get .metadata"
PUT_MARKER = "put _COMMIT"
FENCE = [PUT_MARKER, READ_MARKER]
PUBLISH = ["head .metadata", READ_MARKER, "put .metadata", READ_MARKER]


@pytest.mark.backends("seaweed", "moto", "gcs", "azure")
def test_old_orphans_of_a_committed_checkpoint_go_and_nothing_else(real):
    torn = tear(real)
    save(real)
    real.put("notes.txt", b"somebody's")
    real.put("step-2/" + data_key(0, 0, new_nonce()), b"of another checkpoint")
    before = keys(real)
    real.age()
    done = go(real)
    assert (done.outcome, done.deleted, done.unknown) == ("swept", 3, ("notes.txt",))
    assert done.deleted_bytes > 0
    assert done.fenced
    assert keys(real) == {key for key in before - torn if not is_beacon_key(key)}
    named(real)


@pytest.mark.backends("seaweed", "moto", "gcs", "azure")
def test_what_an_overwrite_replaced_goes_after_the_grace_period(real):
    save(real)
    replaced = named(real)
    real.age()
    second = save(real, overwrite=True)
    waiting = go(real)
    # Readers of the first may still be at it: the objects are old but the change is not.
    assert (waiting.outcome, waiting.deleted, waiting.fenced) == ("waiting", 0, False)
    assert replaced <= keys(real)
    real.age()
    done = go(real)
    assert (done.outcome, done.deleted) == ("swept", 3)
    assert keys(real) == {MARKER_KEY, DOT_METADATA_KEY, *named(real)}
    assert open_committed(real)[0].commit_id == second.commit_id


def test_young_orphans_stay_and_their_save_can_still_commit(real):
    save(real)
    real.age()
    token = commits.take_begin_token(real, overwrite=True)
    index = upload(real)
    done = go(real)
    assert (done.outcome, done.kept_young, done.fenced) == ("waiting", 3, False)
    finish(real, token, index)
    assert named(real) >= {entry.key for entry in index.objects}


def test_one_young_object_protects_a_save_whose_first_ones_are_old(store):
    token = commits.take_begin_token(store, overwrite=False)
    index = upload(store)
    store.age(2 * DAY_SECONDS, index.objects[0].key)
    assert go(store).outcome == "waiting"
    finish(store, token, index)
    named(store)


@pytest.mark.parametrize("hours", [-1000, 1000])
def test_wrong_clock_of_this_host_removes_nothing_too_young(store, hours):
    save(store)
    replaced = named(store)
    save(store, overwrite=True)
    store.age(GRACE_SECONDS / 2)
    done = go(store, clock=Offset(hours * 3600.0))
    assert (done.outcome, done.deleted) == ("waiting", 0)
    assert replaced <= keys(store)


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_save_that_no_listing_shows_is_not_defeated(store, overwrite):
    """S3 lists no object before its upload is complete, and not everybody can list uploads."""
    if overwrite:
        save(store)
    torn = tear(store)
    store.age()
    token = commits.take_begin_token(store, overwrite=overwrite)
    done = go(store, uploads=None)
    assert (done.outcome, done.fenced) == ("waiting", False)
    finish(store, token, upload(store))
    assert torn <= keys(store)
    named(store)


@pytest.mark.parametrize("deleted", [False, True])
def test_mending_waits_for_a_save_too_for_it_ends_with_a_fence(store, deleted):
    save(store, publish=False)
    if deleted:
        delete(store, grace_seconds=GRACE_SECONDS)
        store.put(DOT_METADATA_KEY, b"metadata of another")
    store.age(3600)
    token = commits.take_begin_token(store, overwrite=True)
    done = go(store)
    assert (done.outcome, done.dot_metadata) == ("waiting", None)
    finish(store, token, upload(store))
    named(store)
    assert go(store).dot_metadata == "written"


def test_the_beacon_of_a_save_that_died_goes_and_needs_no_fence(store):
    beacon = commits.take_begin_token(store, overwrite=False).beacon
    assert go(store).outcome == "waiting"
    store.age()
    done = go(store)
    assert (done.outcome, done.deleted, done.unknown, done.fenced) == ("swept", 1, (), False)
    assert beacon not in keys(store)


def test_a_superseded_step_that_somebody_pins_or_changes_first_stays(store):
    save(store)
    store.age()
    inner: MemoryStore = store.inner  # type: ignore[assignment]
    inner.on_put = in_turn(MARKER_KEY, lambda _: pin(inner, "look at it"))
    assert go(store, base=1).outcome == "lost"
    store.age()
    assert not go(store, base=1).superseded  # it is pinned
    named(store)
    unpin(inner, "look at it")
    assert not go(store, base=1).superseded  # and unpinned just now
    store.age()
    assert not go(store, base=0).superseded  # in a run that nobody has taken over
    assert go(store, base=1).superseded
    assert state(store) == "deleted"


@pytest.mark.parametrize("more", [0, 1])
def test_a_superseded_step_stays_until_it_is_older_than_the_grace_period(store, more):
    save(store)
    age = timedelta(seconds=GRACE_SECONDS, microseconds=more)
    clock = Offset()
    clock.utc_now = lambda: store.head(MARKER_KEY).last_modified + age  # type: ignore[method-assign]
    assert go(store, base=1, clock=clock, dry_run=True).superseded == bool(more)


@pytest.mark.backends("seaweed", "moto", "gcs", "azure")
def test_unfinished_deletion_is_finished_and_nothing_more(real):
    save(real)
    data = named(real)
    tear_deletion(real)
    assert state(real) == "deleting"
    real.age()
    done = go(real)
    assert (done.outcome, done.finished_delete, done.deleted) == ("mended", True, 0)
    assert keys(real) == {MARKER_KEY, *data}
    assert state(real) == "deleted"
    assert go(real).outcome == "waiting"
    real.age()
    assert go(real).deleted == 3


def test_stale_dot_metadata_is_mended_before_anything_is_removed(real):
    """A crash between marker and `.metadata`: stock readers still read the replaced commit."""
    save(real)
    replaced = named(real)
    old = real.get(DOT_METADATA_KEY, max_size_bytes=10**6)[0]
    save(real, overwrite=True, publish=False)
    real.age()
    done = go(real)
    assert (done.outcome, done.dot_metadata, done.deleted) == ("mended", "written", 0)
    assert replaced <= keys(real)
    body = real.get(DOT_METADATA_KEY, max_size_bytes=10**6)[0]
    assert body != old
    assert DESCRIBED.describes(body, open_committed(real)[1])
    # Stock readers that opened the old one have another grace period.
    assert go(real).outcome == "waiting"
    real.age()
    assert go(real).deleted == 3
    named(real)


@pytest.mark.parametrize("before", [None, b"stock torch's"], ids=["missing", "outdated"])
def test_dot_metadata_is_mended_even_if_there_is_nothing_to_remove(store, before):
    """After a crash right after the commit, also of one that replaced a stock checkpoint."""
    if before is not None:
        store.put(DOT_METADATA_KEY, before)
        store.age(60)
    save(store, overwrite=True, publish=False)
    done = go(store)
    assert (done.outcome, done.dot_metadata) == ("mended", "written")
    body = store.get(DOT_METADATA_KEY, max_size_bytes=10**6)[0]
    assert body == DESCRIBED.derive(open_committed(store)[1])
    assert go(store).outcome == "clean"


def test_dot_metadata_left_beside_a_tombstone_is_removed_first(store):
    save(store)
    data = named(store)
    body = store.get(DOT_METADATA_KEY, max_size_bytes=10**6)[0]
    delete(store, grace_seconds=GRACE_SECONDS)
    store.put(DOT_METADATA_KEY, body)  # a writer that was paused before it wrote it
    store.age()
    done = go(store)
    assert (done.outcome, done.dot_metadata, done.deleted) == ("mended", "removed", 0)
    assert keys(store) == {MARKER_KEY, *data}
    assert go(store).outcome == "waiting"
    store.age()
    assert go(store).deleted == 3


def test_what_repair_makes_obsolete_is_kept_for_the_grace_period(store):
    """Stock readers may have begun with the old `.metadata` a moment ago."""
    save(store)
    old = named(store)
    save(store, overwrite=True, publish=False)
    store.age()
    assert repair(store, dot_metadata=DESCRIBED).dot_metadata == "written"
    assert go(store).outcome == "waiting"
    assert old <= keys(store)
    store.age()
    assert go(store).outcome == "swept"
    assert not old & keys(store)


def test_what_a_late_publication_makes_obsolete_is_kept_for_the_grace_period(store):
    save(store)
    old = named(store)
    done = save(store, overwrite=True, publish=False)
    store.age()
    body = DESCRIBED.derive(open_committed(store)[1])
    assert publish_dot_metadata(store, done.commit_id, body, tries=TickingClock().tries())
    assert go(store).outcome == "waiting"
    assert old <= keys(store)


def test_what_a_removed_dot_metadata_named_is_kept_for_the_grace_period(store):
    save(store)
    old = named(store)
    stale, _ = store.get(DOT_METADATA_KEY, max_size_bytes=10**6)
    delete(store, grace_seconds=GRACE_SECONDS)
    store.put(DOT_METADATA_KEY, stale)
    store.age()
    assert repair(store, dot_metadata=DESCRIBED).dot_metadata == "removed"
    assert go(store).outcome == "waiting"
    assert old <= keys(store)


def test_a_sweep_removes_nothing_once_a_deletion_has_crossed_it(store):
    save(store)
    replaced = named(store)
    save(store, overwrite=True, publish=False)
    store.age()
    inner: MemoryStore = store.inner  # type: ignore[assignment]

    def cross(key: str) -> None:
        if key == DOT_METADATA_KEY:
            inner.on_get = None
            delete(store)

    inner.on_get = cross
    lost = asdict(go(store))
    reason = "another job changed the marker"
    assert lost == report(outcome="lost", reason=reason, fenced=True)
    assert inner.on_get is None
    assert replaced <= keys(store)


def test_another_librarys_checkpoint_is_left_alone(store):
    """A tombstone would hide it from our readers, and `.metadata` would be removed next."""
    for key in (DOT_METADATA_KEY, "__0_0.distcp", "__1_0.distcp"):
        store.put(key, b"stock")
    upload(store)  # an overwrite with ours that died
    store.age()
    before = keys(store)
    done = go(store)
    assert done.outcome == "foreign"
    assert keys(store) == before


def test_checkpoint_whose_index_is_damaged_is_left_alone(store):
    done = save(store)
    tear(store)
    assert done.marker.index is not None
    store.put(done.marker.index.key, b"damaged")
    store.age()
    before = keys(store)
    with pytest.raises(CheckpointCorruptError):
        go(store)
    assert keys(store) == before


def test_old_uploads_are_aborted_and_young_ones_protect_their_save(store):
    old, young = an_upload(2 * DAY_SECONDS, size_bytes=5), an_upload(60)
    others = an_upload(2 * DAY_SECONDS, key="dataset.tar")
    torn = tear(store)
    store.age()
    uploads = FakeUploads(old, young, others)
    done = go(store, uploads=uploads)
    assert (done.outcome, done.deleted, done.fenced) == ("waiting", 1, False)  # the beacon
    assert (done.uploads_aborted, done.uploads_bytes, done.uploads_young) == (1, 5, 1)
    assert uploads.left == [young, others]
    assert torn <= keys(store)
    uploads.left.remove(young)
    assert go(store, uploads=uploads).deleted == 2


def test_what_was_replaced_after_the_listing_is_left_to_the_next_sweep(store):
    class Listed(AgedStore):
        def list(self, prefix: str = "") -> Iterator[ObjectMeta]:
            found = list(super().list(prefix))
            save(self.inner, overwrite=True, publish=False)
            return iter(found)

    save(store, publish=False)
    lost = asdict(go(Listed(store)))
    assert lost == report(outcome="lost", reason="another job changed the marker")
    assert DOT_METADATA_KEY not in keys(store)
    done = go(store)
    assert (done.outcome, done.dot_metadata) == ("waiting", "written"), "what it replaced is young"


def test_dry_run_changes_nothing_and_tells_what_a_sweep_does(real):
    tear(real)
    save(real)
    real.age()
    uploads = FakeUploads(an_upload(2 * DAY_SECONDS))
    before = {meta.key: meta.version for meta in real.list()}
    planned = go(real, uploads=uploads, dry_run=True)
    assert {meta.key: meta.version for meta in real.list()} == before
    assert len(uploads.left) == 1
    done = go(real, uploads=uploads)
    assert planned == replace(done, dry_run=True, fenced=False)
    assert done.deleted == 3


@pytest.mark.parametrize("grace", [0, 3599.9, -1, float("nan"), float("inf"), "24h", True, None])
def test_grace_of_less_than_an_hour_is_refused(store, grace):
    with pytest.raises(ConfigError, match="at least 3600"):
        go(store, grace_seconds=grace)


@pytest.mark.parametrize("grace", [3600, 3600.0, 10**9])
def test_grace_of_an_hour_or_more_is_accepted(grace):
    assert check_grace(grace) == grace


@pytest.mark.parametrize("saved", [False, True])
def test_probe_leftovers_go_and_need_no_fence(store, saved):
    if saved:
        save(store)
    before = keys(store)
    for suffix in ("", "-race"):
        store.put(f".probe-{new_nonce()}{suffix}", b"1")
    assert go(store).outcome == "waiting"  # somebody may be about to save
    store.age()
    assert go(store, dry_run=True).deleted == 2
    done = go(store)
    assert (done.outcome, done.deleted, done.fenced) == ("swept", 2, False)
    assert keys(store) == before


def test_stock_checkpoint_beside_a_tombstone_keeps_its_dot_metadata(store):
    """Somebody deleted the checkpoint with ours and saved another one there with stock torch."""
    save(store)
    delete(store, grace_seconds=GRACE_SECONDS)
    stock = {DOT_METADATA_KEY, "__0_0.distcp"}
    for key in stock:
        store.put(key, b"stock torch's")
    store.age()
    done = go(store)
    assert (done.outcome, done.deleted) == ("swept", 3)
    assert keys(store) == {MARKER_KEY, *stock}
    assert go(store).outcome == "clean"
    assert keys(store) == {MARKER_KEY, *stock}


# --- the requests of a sweep, and its report


@pytest.mark.parametrize("dry_run", [False, True])
def test_what_no_commit_names_is_removed_behind_a_fence_and_the_index_last(store, dry_run):
    save(store)
    save(store, overwrite=True)
    store.put("notes.txt", b"somebody's")
    replaced = {meta.key: meta.size_bytes for meta in store.list() if meta.key in loose(store)}
    store.age()
    removed, requests = watched(store, dry_run=dry_run)
    aligned = [READ_INDEX, READ_DOT_METADATA]
    deletes = ["delete data", "delete data", "delete index"]
    look = [READ_MARKER, READ_INDEX, "list "]
    assert requests == look + (aligned if dry_run else FENCE + aligned + deletes)
    assert removed == report(
        outcome="swept",
        deleted=3,
        deleted_bytes=sum(replaced.values()),
        unknown=("notes.txt",),
        fenced=not dry_run,
        dry_run=dry_run,
    )


@pytest.mark.parametrize("dry_run", [False, True])
def test_what_was_never_committed_is_removed_behind_a_tombstone(store, dry_run):
    tear(store)
    size = sum(meta.size_bytes for meta in store.list())
    store.age()
    removed, requests = watched(store, dry_run=dry_run)
    deletes = [*FENCE, READ_DOT_METADATA, "delete data", "delete data"]
    look = [READ_MARKER, "list "]
    assert requests == look + ([] if dry_run else ["delete beacon", *deletes])
    assert removed == report(
        outcome="swept", deleted=3, deleted_bytes=size, fenced=not dry_run, dry_run=dry_run
    )
    if not dry_run:
        fields = json.loads(store.get(MARKER_KEY, max_size_bytes=1000)[0])
        assert (fields["format"], fields["generation"], fields["state"]) == (1, 1, "deleted")
        assert (fields["index"], fields["log"], fields["world_size"]) == (None, [], 0)


@pytest.mark.parametrize("dry_run", [False, True])
def test_where_there_is_nothing_to_remove_a_sweep_only_looks(store, dry_run):
    """Stores tell the time in seconds, and `.metadata` is often of the second of the marker."""
    store.inner.bucket.now = lambda: MOMENT  # type: ignore[attr-defined]
    save(store)
    store.age()
    clean, requests = watched(store, dry_run=dry_run)
    assert requests == [READ_MARKER, READ_INDEX, "list "]
    assert clean == report(outcome="clean", dry_run=dry_run)


@pytest.mark.parametrize("dry_run", [False, True])
def test_a_deletion_is_finished_by_its_last_three_requests(store, dry_run):
    save(store)
    tear_deletion(store)
    store.age()
    finished, requests = watched(store, dry_run=dry_run)
    ended = [READ_MARKER, "delete .metadata", PUT_MARKER]
    assert requests == [READ_MARKER] + ([] if dry_run else ended)
    assert finished == report(outcome="mended", finished_delete=True, dry_run=dry_run)


@pytest.mark.parametrize("dry_run", [False, True])
def test_a_step_that_never_counts_is_deleted_as_delete_does_it(store, dry_run):
    save(store)
    store.age()
    deleted, requests = watched(store, base=1, dry_run=dry_run)
    deletion = [PUT_MARKER, READ_MARKER, "delete .metadata", PUT_MARKER]
    assert requests == [READ_MARKER, "list "] + ([] if dry_run else deletion)
    assert deleted == report(outcome="mended", superseded=True, dry_run=dry_run)


@pytest.mark.parametrize("late", [False, True])
def test_a_step_that_never_counts_is_not_deleted_under_the_save_that_replaces_it(late):
    store = MemoryStore()
    store.bucket.now = lambda: MOMENT - 2 * DAY  # type: ignore[method-assign]
    save(store)
    tear(store)  # whose beacon is old
    store.bucket.now = lambda: MOMENT  # type: ignore[method-assign]
    token = commits.take_begin_token(store, overwrite=False, claim=1)
    clock = Offset()
    clock.utc_now = lambda: MOMENT + DAY + late * AN_INSTANT  # type: ignore[method-assign]
    done = go(store, base=1, clock=clock)
    assert (done.superseded, done.outcome) == (late, "mended" if late else "waiting")
    if not late:
        finish(store, token, upload(store))
        named(store)


def test_only_steps_of_claims_below_the_base_never_count(store):
    inner: MemoryStore = store.inner  # type: ignore[assignment]
    finish(store, commits.take_begin_token(store, overwrite=False, claim=2), upload(store))
    store.age()
    for base in (1, 2):
        assert not go(store, base=base, dry_run=True).superseded
    assert go(store, base=3, dry_run=True).superseded
    delete(store)
    store.age()
    assert not go(store, base=3).superseded, "a tombstone is no step"
    assert inner.objects


@pytest.mark.parametrize("moment", ["the deletion", "the fence", "after the fence"])
def test_a_sweep_that_loses_a_race_says_so_and_removes_nothing(store, moment):
    """Somebody pins the checkpoint right before or after the sweep puts the marker."""
    inner: MemoryStore = store.inner  # type: ignore[assignment]

    def change(_: object = None) -> None:
        inner.on_put = inner.on_get = None
        pin(inner, "look at it")

    def fence(_: object) -> None:
        inner.on_get = change

    save(store)
    save(store, overwrite=True)
    store.age()
    before = keys(store)
    inner.on_put = in_turn(MARKER_KEY, fence if moment == "after the fence" else change)
    lost = asdict(go(store, base=int(moment == "the deletion")))
    fenced = moment == "after the fence"
    assert lost == report(outcome="lost", reason="another job changed the marker", fenced=fenced)
    assert keys(store) == before


def test_nothing_is_mended_if_the_marker_is_gone_after_the_listing(store):
    inner: MemoryStore = store.inner  # type: ignore[assignment]
    save(store, publish=False)
    inner.on_list = lambda: inner.objects.pop(MARKER_KEY) and None
    lost = asdict(go(store))
    assert lost == report(outcome="lost", reason="another job changed the marker")
    assert DOT_METADATA_KEY not in inner.objects


def test_nothing_is_removed_if_the_marker_is_gone_after_the_fence(store):
    inner: MemoryStore = store.inner  # type: ignore[assignment]

    def remove(_: object) -> None:
        inner.on_get = lambda key: inner.objects.pop(MARKER_KEY) and None

    save(store)
    save(store, overwrite=True)
    store.age()
    inner.on_put = in_turn(MARKER_KEY, remove)
    lost = asdict(go(store))
    assert lost == report(outcome="lost", reason="another job changed the marker", fenced=True)


@pytest.mark.parametrize("dry_run", [False, True])
@pytest.mark.parametrize("torn", [False, True])
def test_dot_metadata_is_written_and_then_the_marker(store, torn, dry_run):
    save(store, publish=False)
    if torn:
        save(store, overwrite=True, publish=False)
    store.age()
    mended, requests = watched(store, dry_run=dry_run)
    aligned = [READ_INDEX, READ_DOT_METADATA]
    looked = ([] if dry_run else FENCE if torn else [READ_MARKER]) + aligned
    written = [] if dry_run else [*PUBLISH, READ_MARKER, PUT_MARKER]
    assert requests == [READ_MARKER, READ_INDEX, "list ", *looked, *written]
    assert mended == report(
        outcome="mended", dot_metadata="written", fenced=torn and not dry_run, dry_run=dry_run
    )


@pytest.mark.parametrize("dry_run", [False, True])
def test_dot_metadata_beside_a_young_tombstone_is_removed_and_nothing_else(store, dry_run):
    save(store)
    body = store.get(DOT_METADATA_KEY, max_size_bytes=10**6)[0]
    delete(store, grace_seconds=GRACE_SECONDS)
    store.put(DOT_METADATA_KEY, body)
    mended, requests = watched(store, dry_run=dry_run)
    removed = ["delete .metadata", READ_MARKER, PUT_MARKER]
    mend = [READ_DOT_METADATA] if dry_run else [READ_MARKER, READ_DOT_METADATA, *removed]
    assert requests == [READ_MARKER, "list ", *mend]
    assert mended == report(
        outcome="waiting",
        reason="3 objects are younger than the grace period, which a save under way may need",
        kept_young=3,
        dot_metadata="removed",
        dry_run=dry_run,
    )


def test_uploads_are_listed_before_the_objects_and_aborted_before_the_fence(store):
    inner: MemoryStore = store.inner  # type: ignore[assignment]

    class Noted(FakeUploads):
        def list(self) -> list[UnfinishedUpload]:
            inner.requests.append(("list", "uploads"))
            return super().list()

        def abort(self, upload: UnfinishedUpload) -> None:
            inner.requests.append(("abort", upload.key))
            super().abort(upload)

    save(store)
    tear(store)
    store.age()
    _, requests = watched(store, uploads=Noted(an_upload(2 * DAY_SECONDS)))
    first = [READ_MARKER, READ_INDEX, "list uploads", "list ", "abort data", "delete beacon"]
    assert requests[: len(first) + 2] == first + FENCE


# --- by the store's clock


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("what", ["candidates", "marker", ".metadata"])
def test_at_the_limit_the_clock_of_the_store_decides(what, late):
    """This host's clock is ahead, so that it sees all of them as old."""
    store = MemoryStore()

    def at(moment: datetime) -> None:
        store.bucket.now = lambda: moment  # type: ignore[method-assign]

    at(MOMENT - 2 * DAY)
    save(store, publish=False)
    if what != "candidates":
        tear(store)
    for key in filter(is_beacon_key, keys(store)):
        store.delete(key)
    described = DESCRIBED.derive(open_committed(store)[1])
    store.put(DOT_METADATA_KEY, described)
    at(MOMENT)
    if what == "candidates":
        upload(store)
    elif what == "marker":
        pin(store, "look at it")
    else:
        store.put(DOT_METADATA_KEY, described)
    at(MOMENT + DAY + (AN_INSTANT if late else timedelta()))
    size = sum(meta.size_bytes for meta in store.list() if meta.key in loose(store))
    done = asdict(go(store, clock=Offset(10 * 365 * DAY_SECONDS)))
    if late:
        assert done == report(outcome="swept", deleted=2, deleted_bytes=size, fenced=True)
    else:
        assert done == report(
            outcome="waiting",
            fenced=True,
            reason="'.metadata' is younger than the grace period: stock readers may use the old"
            if what == ".metadata"
            else "by the store's clock, nothing is older than the grace period",
        )


# --- the plan


NOW = datetime(2026, 1, 10, tzinfo=UTC)
PASSING = [beacon_key(f"{0:024x}"), f".probe-{0:024x}"]
OURS = [data_key(n, 0, f"{n:024x}") for n in range(4)] + [index_key(f"{n:024x}") for n in range(2)]
ages = st.integers(0, 72).map(lambda hours: timedelta(hours=hours))
listed = st.lists(
    st.tuples(
        st.sampled_from([*OURS, *PASSING, "other", ".metadata", "_COMMIT", f"x/{OURS[0]}"]), ages
    ),
    unique_by=lambda one: one[0],
)


@settings(deadline=None)
@given(listed, st.none() | ages, st.sets(st.sampled_from(OURS)), st.lists(ages, max_size=2))
def test_plan_never_removes_what_is_named_young_or_not_ours(listed, marker_age, named, up):
    plan = plan_sweep(
        [ObjectMeta(key, 1, Version("x"), NOW - age) for key, age in listed],
        marker_written_at=None if marker_age is None else NOW - marker_age,
        named=named,
        uploads=[UnfinishedUpload(OURS[0], str(n), NOW - age, 1) for n, age in enumerate(up)],
        now=NOW,
        grace_seconds=GRACE_SECONDS,
    )
    age_of = dict(listed)
    grace = timedelta(seconds=GRACE_SECONDS)
    for meta in plan.candidates:
        assert is_ours(meta.key)
        assert meta.key not in named
        assert age_of[meta.key] > grace
    if plan.outcome == "swept":
        assert plan.candidates
        assert not plan.young
        assert not plan.uploads_young
        assert marker_age is None or marker_age > grace
        assert marker_age is not None or ".metadata" not in age_of
    assert all(NOW - one.initiated > grace for one in plan.uploads)
    assert len(plan.uploads) + len(plan.uploads_young) == len(up)
    assert all(meta.key in PASSING and age_of[meta.key] > grace for meta in plan.passing)
    shown = (*plan.candidates, *plan.young, *plan.passing)
    every = {meta.key for meta in shown} | set(plan.unknown) | named
    assert {key for key in age_of if "/" not in key} <= every | {MARKER_KEY, DOT_METADATA_KEY}


def at_age(key: str, age: timedelta, size_bytes: int = 1) -> ObjectMeta:
    return ObjectMeta(key, size_bytes, Version(key), NOW - age)


def planned(*listing: ObjectMeta, **changes) -> SweepPlan:
    usual = {"marker_written_at": NOW - 2 * DAY, "named": (), "uploads": (), "now": NOW}
    return plan_sweep(listing, **{**usual, "grace_seconds": GRACE_SECONDS, **changes})


def test_a_plan_says_of_every_object_and_upload_what_it_is():
    """What is as old as the grace period is young; what is older is old."""
    old = {key: at_age(key, DAY + AN_INSTANT) for key in (*OURS, *PASSING)}
    orphan, index, beacon, probe = OURS[0], OURS[-1], *PASSING
    young = [at_age(key, DAY) for key in (OURS[1], beacon_key("1" * 24), f".probe-{'1' * 24}")]
    others = [
        at_age(key, age)
        for key in (*(MARKER_KEY, DOT_METADATA_KEY, CLAIM_KEY, "x/__0_0.distcp", "named"), "notes")
        for age in (DAY * 2,)
    ]
    named = [old[OURS[2]], at_age(OURS[3], timedelta())]
    listing = [old[index], old[orphan], old[beacon], old[probe], *young, *others, *named]
    old_upload, young_upload, foreign = (
        UnfinishedUpload(key, "id", NOW - age, 1)
        for key, age in ((OURS[0], DAY + AN_INSTANT), (OURS[1], DAY), ("notes", 2 * DAY))
    )
    assert planned(
        *listing, named=("named", OURS[2], OURS[3]), uploads=[foreign, young_upload, old_upload]
    ) == SweepPlan(
        outcome="waiting",
        reason="3 objects are younger than the grace period, which a save under way may need",
        candidates=(old[orphan], old[index]),
        young=tuple(young),
        unknown=("notes",),
        passing=(old[beacon], old[probe]),
        uploads=(old_upload,),
        uploads_young=(young_upload,),
    )


@pytest.mark.parametrize(
    ("listing", "changes", "outcome", "reason"),
    [
        ([OURS[0]], {}, "swept", None),
        ([], {}, "clean", None),
        ([OURS[0]], {"marker_written_at": None}, "swept", None),
        ([OURS[0]], {"marker_written_at": NOW - DAY}, "waiting", "the last change here"),
        ([OURS[0]], {"marker_written_at": NOW - DAY - AN_INSTANT}, "swept", None),
        ([], {"marker_written_at": NOW}, "clean", None),
        ([OURS[0], DOT_METADATA_KEY], {}, "swept", None),
        ([OURS[0], DOT_METADATA_KEY], {"marker_written_at": None}, "foreign", "'.metadata' with"),
        ([DOT_METADATA_KEY, OURS[0]], {"marker_written_at": None}, "foreign", "'.metadata' with"),
    ],
)
def test_the_outcome_of_a_plan_and_its_reason(listing, changes, outcome, reason):
    plan = planned(*(at_age(key, 2 * DAY) for key in listing), **changes)
    assert plan.outcome == outcome
    assert plan.reason is None if reason is None else reason in str(plan.reason)


@pytest.mark.parametrize(("age", "outcome"), [(DAY, "waiting"), (DAY + AN_INSTANT, "swept")])
def test_an_upload_in_progress_protects_a_save_of_which_all_objects_are_old(age, outcome):
    upload = UnfinishedUpload(OURS[1], "id", NOW - age, 1)
    plan = planned(at_age(OURS[0], 2 * DAY), uploads=[upload])
    assert plan.outcome == outcome
    assert plan.reason == ("an upload is in progress" if outcome == "waiting" else None)
    assert planned(uploads=[upload]).outcome == "clean"


def test_one_young_object_is_told_in_the_singular():
    plan = planned(at_age(OURS[0], 2 * DAY), at_age(OURS[1], DAY))
    assert (
        plan.reason == "an object is younger than the grace period, which a save under way may need"
    )
