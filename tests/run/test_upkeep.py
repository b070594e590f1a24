"""`dos.delete`, `sweep`, `repair`, `pin` and `unpin` by URL, and which step a run must not lose."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import torch

import dcp_objstore as dos
from dcp_objstore.checkpoint import commit as commits, probe as probes
from dcp_objstore.checkpoint.delete import DeleteReport
from dcp_objstore.checkpoint.names import (
    CLAIM_KEY,
    DOT_METADATA_KEY,
    MARKER_KEY,
)
from dcp_objstore.checkpoint.read import open_committed
from dcp_objstore.compat.dot_metadata import StockDotMetadata
from dcp_objstore.run import upkeep
from dcp_objstore.stores import ObjectStore, StoreSpec
from dcp_objstore.stores.protocol import ObjectMeta
from tests.support.checkpoints import memory_url
from tests.support.managers import Unconditional, names, run_url, save_each, save_steps, state
from tests.support.upkeep import AgedStore, Ages, tear
from tests.support.wrapped_stores import Fault, FaultStore


@pytest.fixture
def run() -> str:
    return run_url()


def save(url: str, *names: str, value: int = 1, **settings: Any) -> None:
    for name in names:
        dos.save(state(value), f"{url}/{name}", progress=False, **settings)


def test_dot_metadata_is_judged_by_what_it_names(tmp_path):
    save_each(tmp_path.as_uri(), 1, 2)
    judge, bodies, indexes = StockDotMetadata(), [], []
    for step in (1, 2):
        bodies.append((tmp_path / f"step-{step}" / ".metadata").read_bytes())
        indexes.append(open_committed(StoreSpec(f"{tmp_path.as_uri()}/step-{step}").open())[1])
    for number, body in enumerate(bodies):
        assert [judge.describes(body, index) for index in indexes] == [number == 0, number == 1]
        assert judge.is_ours(body)
    for damaged in (b"", bodies[0][:-20], b"no pickle"):
        assert not judge.describes(damaged, indexes[0])
        assert not judge.is_ours(damaged)
    torch.distributed.checkpoint.save(state(1), checkpoint_id=str(tmp_path / "stock"), no_dist=True)
    assert not judge.is_ours((tmp_path / "stock" / ".metadata").read_bytes())


# --- the newest step


def refuses(url: str) -> bool:
    """Whether `delete` takes it for the newest of its run."""
    try:
        dos.delete(url, dry_run=True)
    except dos.errors.InputError as error:
        assert "newest" in str(error)
        return True
    return False


def test_the_newest_committed_step_of_a_run_is_not_deleted_by_mistake(run):
    save(run, "step-9", "step-11", "step-10")  # not in the order of their numbers
    save(f"{run}-2", "step-12")
    save(f"{run}/deeper", "step-12")
    assert [refuses(f"{run}/step-{step}") for step in (9, 10, 11)] == [False, False, True]
    with pytest.raises(dos.errors.InputError, match="newest"):
        dos.delete(f"{run}/step-11")
    dos.delete(f"{run}/step-11", allow_newest=True)
    assert refuses(f"{run}/step-10"), "a tombstone is no checkpoint"
    StoreSpec(f"{run}/step-10").open().put(MARKER_KEY, b"{}")
    assert refuses(f"{run}/step-9"), "nor is what nobody can read"
    save(run.removesuffix("/run"), "")
    assert refuses(run.removesuffix("/run")), "what lies in no run"


@pytest.mark.parametrize("names", [("step-9", "step-10"), ("z", "a")])
@pytest.mark.parametrize("minutes", [(0, -10), (10, 0)])
def test_hosts_whose_clocks_differ_do_not_change_which_step_is_the_newest(
    run, names, minutes, monkeypatch
):
    for name, ahead in zip(names, minutes, strict=True):

        class Wrong(datetime):
            @classmethod
            def now(cls, tz: Any = None, by: timedelta = timedelta(minutes=ahead)) -> datetime:  # type: ignore[override]
                return datetime.now(tz) + by

        monkeypatch.setattr(commits, "datetime", Wrong)
        save(run, name)
    assert [refuses(f"{run}/{name}") for name in names] == [False, True]


def test_of_checkpoints_of_one_second_by_the_stores_clock_the_host_tells_the_newest(
    run, monkeypatch
):
    """Of two that nothing tells apart, each may be the newest."""
    really, then = upkeep.list_by_prefix, datetime.now(UTC)

    class Stopped(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:  # type: ignore[override]
            return then

    def in_one_second(store: ObjectStore) -> dict[str, dict[str, ObjectMeta]]:
        return {
            name: {key: replace(meta, last_modified=then) for key, meta in objects.items()}
            for name, objects in really(store).items()
        }

    save(run, "z", "a")
    monkeypatch.setattr(commits, "datetime", Stopped)
    save(f"{run}-2", "z", "a")
    monkeypatch.setattr(upkeep, "list_by_prefix", in_one_second)
    assert [refuses(f"{run}/{name}") for name in ("z", "a")] == [False, True]
    assert [refuses(f"{run}-2/{name}") for name in ("z", "a")] == [True, True]


@pytest.mark.parametrize("names", [("step-1", "step-2", "step-3"), ("old", "new", "newest")])
def test_one_listing_and_one_newer_marker_show_that_a_step_is_not_the_newest(run, requests, names):
    save(run, *names)

    def markers_read(name: str, *, is_newest: bool) -> int:
        requests.clear()
        assert refuses(f"{run}/{name}") is is_newest
        assert [one.verb for one in requests].count("list") == 1
        keys = [one.key for one in requests]
        assert CLAIM_KEY not in keys, "there is none"
        return keys.count(MARKER_KEY)

    # Its own marker before the run is looked at and after that, and another's.
    assert markers_read(names[0], is_newest=False) == 3
    dos.pin(f"{run}/{names[0]}", "paper")  # its marker is new, its commit is not
    StoreSpec(f"{run}/{names[0]}").open().put("notes.txt", b"")
    assert markers_read(names[2], is_newest=True) == 1


def test_what_stands_against_a_deletion_is_said_in_this_order(run, through):
    with pytest.raises(dos.errors.CheckpointNotFoundError):
        dos.delete(f"{run}/step-1")
    save_steps(run, (1, 2, 3))
    with dos.CheckpointManager(run, sweep=False) as manager:
        manager.load(state(0), 1)
        manager.save(2, state(2))
    dos.pin(f"{run}/step-2", "paper")
    for allow in (False, True):
        with pytest.raises(dos.errors.CheckpointPinnedError, match="paper"):
            dos.delete(f"{run}/step-2", allow_newest=allow)
    with pytest.raises(dos.errors.CheckpointExistsError, match="pinned"):
        dos.save(state(2), f"{run}/step-2", claim=dos.claim_run(run), overwrite=True)
    assert dos.unpin(f"{run}/step-2", "paper") == ()
    assert refuses(f"{run}/step-2")
    wrong = [Fault("before", dos.errors.ObjectNotFoundError("there is no claim"))]

    def once(_verb: str, key: str, _: int) -> Fault | None:
        return wrong.pop() if wrong and key == CLAIM_KEY else None

    through(lambda store: FaultStore(store, once))
    assert dos.delete(f"{run}/step-3").commit_id, "it does not count, so nobody resumes from it"
    assert not wrong
    for allow in (False, True):
        with pytest.raises(dos.errors.CheckpointNotFoundError):
            dos.delete(f"{run}/step-3", allow_newest=allow)
    assert names(run) == ["step-1", "step-2"]


def test_a_save_that_came_during_a_deletion_keeps_its_dot_metadata(monkeypatch):
    url = memory_url()
    dos.save(state(1), url, progress=False)
    really_delete = upkeep.delete_checkpoint

    def lose(store: ObjectStore, **settings: Any) -> DeleteReport:
        report = really_delete(store, **settings)
        dos.save(state(2), url, progress=False)
        store.delete(DOT_METADATA_KEY)  # as a deletion that was late does
        return replace(report, superseded=True)

    monkeypatch.setattr(upkeep, "delete_checkpoint", lose)
    assert dos.delete(url, allow_newest=True).superseded
    store = StoreSpec(url).open()
    body, _ = store.get(DOT_METADATA_KEY, max_size_bytes=1 << 20)
    assert StockDotMetadata().describes(body, open_committed(store)[1])


def test_a_store_without_conditions_is_only_looked_at(run, through, requests):
    save_each(run, 1, 2)
    probes.forget()
    through(Unconditional)
    requests.clear()
    assert dos.delete(f"{run}/step-1", dry_run=True).dry_run
    for act in (lambda: dos.pin(f"{run}/step-9", "paper"), lambda: dos.delete(f"{run}/step-9")):
        with pytest.raises(dos.errors.CheckpointNotFoundError):
            act()
    assert {one.verb for one in requests} <= {"get", "list", "head"}
    for change in (
        lambda: dos.delete(f"{run}/step-1"),
        lambda: dos.sweep(run),
        lambda: dos.pin(f"{run}/step-1", "paper"),
        lambda: dos.unpin(f"{run}/step-1", "paper"),
        lambda: dos.claim_run(run),
    ):
        with pytest.raises(dos.errors.UnsupportedError, match="cannot create or replace"):
            change()
    assert [step.pins for step in dos.steps(run)] == [(), ()]
    probes.forget()


# --- sweeps of a run on real stores


@pytest.mark.backends("seaweed", "moto", "gcs", "azure")
def test_a_run_is_swept_checkpoint_by_checkpoint(bucket, through):
    options: dict[str, Any] = {"storage_options": bucket.storage_options}
    ages: Ages = {}
    through(lambda store: AgedStore(store, ages))
    save(bucket.url, "step-1", "step-2", "step-3", "step-5", **options)
    save(bucket.url, "step-2", value=2, overwrite=True, **options)
    dos.delete(bucket.at("step-3"), allow_newest=True, grace_seconds=3600, **options)
    tear(StoreSpec(bucket.at("step-4"), bucket.storage_options).open())
    bucket.put("step-5/_COMMIT", b"{}")
    bucket.put("notes.txt", b"somebody's")
    AgedStore(StoreSpec(bucket.url, bucket.storage_options).open(), ages).age()
    tear(StoreSpec(bucket.at("step-6"), bucket.storage_options).open())  # may be under way
    before = bucket.keys()
    planned = dos.sweep(bucket.url, dry_run=True, **options)
    assert bucket.keys() == before
    report = dos.sweep(bucket.url, **options)
    assert {one.url.rpartition("/")[2]: one.outcome for one in report.checkpoints} == {
        "step-1": "clean",
        "step-2": "swept",
        "step-3": "swept",
        "step-4": "swept",
        "step-5": "damaged",
        "step-6": "waiting",
    }
    assert (report.deleted, report.deleted_bytes) == (planned.deleted, planned.deleted_bytes)
    assert report.deleted == 2 + 2 + 3
    left = bucket.keys()
    assert len(bucket.keys("step-1")) == len(bucket.keys("step-2")) == 4
    assert bucket.keys("step-3") == bucket.keys("step-4") == [MARKER_KEY]
    untouched = ("step-5", "step-6", "notes")
    assert [key for key in before if key.startswith(untouched)] == [
        key for key in left if key.startswith(untouched)
    ]
    found = state(0)
    dos.load(found, bucket.at("step-2"), progress=False, **options)
    assert found["step"] == 2
