"""Sweeping: nothing that a commit names, a reader uses or a save needs is ever removed."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from functools import partial

import pytest

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
    is_index_key,
    new_nonce,
    parse_data_key,
)
from dcp_objstore.checkpoint.pins import pin, unpin
from dcp_objstore.checkpoint.read import open_committed
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
    return "data" if parse_data_key(key) else "index" if is_index_key(key) else key


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


PROBES = (f".probe-{0:024x}", f".probe-{0:024x}-race")
MOMENT = datetime(2026, 1, 10, tzinfo=UTC)
DAY = timedelta(days=1)  # the default grace period
AN_INSTANT = timedelta(microseconds=1)

READ_MARKER, READ_INDEX, READ_DOT_METADATA = "get _COMMIT", "get index", "get .metadata"
PUT_MARKER = "put _COMMIT"
FENCE = [PUT_MARKER, READ_MARKER]


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


@pytest.mark.parametrize("key", [beacon_key("0" * 24), *PROBES])
@pytest.mark.parametrize("saved", [False, True])
def test_what_a_dead_save_or_probe_has_left_goes_and_needs_no_fence(store, saved, key):
    if saved:
        save(store)
    before = keys(store)
    store.put(key, b"1")
    assert go(store).outcome == "waiting"  # somebody may be about to save
    store.age()
    done = go(store)
    assert (done.outcome, done.deleted, done.unknown, done.fenced) == ("swept", 1, (), False)
    assert keys(store) == before


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


@pytest.mark.parametrize("grace", [0, 3599.9, -1, float("nan"), float("inf"), "24h", True, None])
def test_a_grace_period_is_at_least_an_hour(store, grace):
    with pytest.raises(ConfigError, match="at least 3600"):
        go(store, grace_seconds=grace)
    assert [check_grace(good) for good in (3600, 10.0**9)] == [3600, 10.0**9]


# --- the requests of a sweep, and its report


def replaced(store: AgedStore, **second: bool) -> None:
    save(store)
    save(store, overwrite=True, **second)
    store.put("notes.txt", b"somebody's")


def all_in_line(store: AgedStore) -> None:
    """Stores tell the time in seconds, and `.metadata` is often of the second of the marker."""
    store.inner.bucket.now = lambda: MOMENT  # type: ignore[attr-defined]
    save(store)


def being_deleted(store: AgedStore) -> None:
    save(store)
    tear_deletion(store)


def published_by_stock_torch(store: AgedStore) -> None:
    store.put(DOT_METADATA_KEY, b"stock torch's")
    store.age(60)
    save(store, overwrite=True, publish=False)


def published_on_a_young_tombstone(store: AgedStore) -> None:
    save(store)
    body = store.get(DOT_METADATA_KEY, max_size_bytes=10**6)[0]
    delete(store, grace_seconds=GRACE_SECONDS)
    store.put(DOT_METADATA_KEY, body)
    store.age(-2 * DAY_SECONDS)


LOOK, LOOK_ALONE = [READ_MARKER, READ_INDEX, "list "], [READ_MARKER, "list "]
JUDGE = [READ_INDEX, READ_DOT_METADATA]
DELETE_DATA = ["delete data", "delete data"]
END_DELETION = [READ_MARKER, "delete .metadata", PUT_MARKER]
PUBLISH = ["head .metadata", READ_MARKER, "put .metadata", *[READ_MARKER] * 2, PUT_MARKER]
WRITTEN = {"outcome": "mended", "dot_metadata": "written"}


@pytest.mark.parametrize(
    ("prepare", "look", "judge", "change", "fields"),
    [
        (
            *(replaced, LOOK, JUDGE, [*FENCE, *JUDGE, *DELETE_DATA, "delete index"]),
            {"outcome": "swept", "deleted": 3, "fenced": True, "unknown": ("notes.txt",)},
        ),
        (
            *(tear, LOOK_ALONE, []),
            ["delete beacon", *FENCE, READ_DOT_METADATA, *DELETE_DATA],
            {"outcome": "swept", "deleted": 3, "fenced": True},
        ),
        (all_in_line, LOOK, [], [], {"outcome": "clean"}),
        (
            *(being_deleted, [READ_MARKER], [], END_DELETION),
            {"outcome": "mended", "finished_delete": True},
        ),
        (
            *(partial(save, publish=False), LOOK, JUDGE, [READ_MARKER, *JUDGE, *PUBLISH]),
            WRITTEN,
        ),
        (published_by_stock_torch, LOOK, JUDGE, [READ_MARKER, *JUDGE, *PUBLISH], WRITTEN),
        (
            *(partial(replaced, publish=False), LOOK, JUDGE, [*FENCE, *JUDGE, *PUBLISH]),
            {**WRITTEN, "fenced": True, "unknown": ("notes.txt",)},
        ),
        (
            *(published_on_a_young_tombstone, LOOK_ALONE, [READ_DOT_METADATA]),
            [READ_MARKER, READ_DOT_METADATA, "delete .metadata", READ_MARKER, PUT_MARKER],
            {"outcome": "waiting", "kept_young": 3, "dot_metadata": "removed"}
            | {"reason": "3 objects are younger than the grace period, which a save under way"},
        ),
    ],
)
def test_a_sweep_changes_behind_its_looks_what_a_dry_run_says(
    store, prepare, look, judge, change, fields
):
    """Objects are removed behind a fence and the index last; `.metadata` and then the marker."""
    prepare(store)
    store.age()
    inner: MemoryStore = store.inner  # type: ignore[assignment]
    before = dict(inner.objects)
    planned, requests = watched(store, dry_run=True)
    assert requests == look + judge
    assert inner.objects == before
    done, requests = watched(store)
    assert requests == look + change
    assert planned == {**done, "dry_run": True, "fenced": False}
    gone = [key for key in before if key not in inner.objects and key != DOT_METADATA_KEY]
    size = sum(len(before[key][0]) for key in gone)
    reason = done["reason"] and str(done["reason"]).removesuffix(" may need")
    assert {**done, "reason": reason} == report(**{"deleted_bytes": size, **fields})


def test_a_step_that_never_counts_is_deleted_as_delete_does_it(store):
    """Its claim is below the base; a tombstone is no step."""
    finish(store, commits.take_begin_token(store, overwrite=False, claim=2), upload(store))
    store.age()
    for base in (1, 2):
        assert not go(store, base=base, dry_run=True).superseded
    planned, requests = watched(store, base=3, dry_run=True)
    assert requests == LOOK_ALONE
    deleted, requests = watched(store, base=3)
    assert requests == [*LOOK_ALONE, PUT_MARKER, *END_DELETION]
    assert deleted == report(outcome="mended", superseded=True) == {**planned, "dry_run": False}
    store.age()
    assert not go(store, base=3).superseded


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


LOST = {"outcome": "lost", "reason": "another job changed the marker"}


@pytest.mark.parametrize(
    ("moment", "fields"),
    [
        ("the deletion", {}),
        ("the fence", {}),
        ("after the fence", {"fenced": True}),
        ("the listing", {"kept_young": 3}),
    ],
)
@pytest.mark.parametrize("change", ["pinned", "removed"])
def test_a_sweep_that_loses_a_race_says_so_and_removes_nothing(store, moment, change, fields):
    """Somebody changes the marker right before or after the sweep lists or puts it."""
    inner: MemoryStore = store.inner  # type: ignore[assignment]

    def act(_: object = None) -> None:
        inner.on_put = inner.on_get = inner.on_list = None
        if change == "pinned":
            pin(inner, "look at it")
        else:
            inner.delete(MARKER_KEY)

    def wait(_: object) -> None:
        inner.on_get = act

    save(store)
    save(store, overwrite=True, publish=moment != "the listing")
    before = keys(store)
    if moment == "the listing":  # where there is only `.metadata` to mend
        inner.on_list = act
    else:
        store.age()
        inner.on_put = in_turn(MARKER_KEY, wait if moment == "after the fence" else act)
    lost = asdict(go(store, base=int(moment == "the deletion")))
    assert lost == report(**LOST, **fields)
    assert keys(store) == (before if change == "pinned" else before - {MARKER_KEY})


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
    assert asdict(go(store)) == report(**LOST, fenced=True)
    assert replaced <= keys(store)


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


def at_age(key: str, age: timedelta, size_bytes: int = 1) -> ObjectMeta:
    return ObjectMeta(key, size_bytes, Version(key), NOW - age)


def upload_of(age: timedelta) -> UnfinishedUpload:
    return UnfinishedUpload(OURS[1], "id", NOW - age, 1)


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
        short_lived=(old[beacon], old[probe]),
        uploads=(old_upload,),
        uploads_young=(young_upload,),
    )


YOUNG = "younger than the grace period, which a save under way may need"


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
        ([OURS[0]], {"uploads": [upload_of(DAY)]}, "waiting", "an upload is in progress"),
        ([OURS[0]], {"uploads": [upload_of(DAY + AN_INSTANT)]}, "swept", None),
        ([], {"uploads": [upload_of(DAY)]}, "clean", None),
        ([OURS[0]], {"now": NOW - DAY}, "waiting", f"an object is {YOUNG}"),
    ],
)
def test_the_outcome_of_a_plan_and_its_reason(listing, changes, outcome, reason):
    plan = planned(*(at_age(key, 2 * DAY) for key in listing), **changes)
    assert plan.outcome == outcome
    assert plan.reason is None if reason is None else reason in str(plan.reason)
