"""`dos.delete`, `sweep`, `repair`, `pin` and `unpin` against real stores and stock torch."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import dcp_objstore as dos
from dcp_objstore.checkpoint import commit as commits, probe as probes
from dcp_objstore.checkpoint.delete import DeleteReport
from dcp_objstore.checkpoint.names import (
    CLAIM_KEY,
    DOT_METADATA_KEY,
    MARKER_KEY,
    data_key,
    new_nonce,
)
from dcp_objstore.checkpoint.probe import require_rewrites
from dcp_objstore.checkpoint.read import open_committed
from dcp_objstore.compat.dot_metadata import StockDotMetadata
from dcp_objstore.compat.foreign import decode_metadata
from dcp_objstore.run import upkeep
from dcp_objstore.stores import ObjectStore, StoreSpec
from dcp_objstore.stores.protocol import IfAbsent, IfVersion, ObjectMeta
from dcp_objstore.stores.wrappers import WrappedStore
from tests.support.checkpoints import memory_url
from tests.support.memory_store import MemoryStore
from tests.support.servers import Bucket, RcloneServer
from tests.support.upkeep import AgedStore, Ages, finish, tear, upload

WEIGHT = torch.arange(12.0).reshape(3, 4)


@pytest.fixture
def later(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> AgedStore:
    """The store at the bucket's prefix; `age` makes all that is there now old, for everybody."""
    ages: Ages = {}
    really_open = StoreSpec.open

    def open_aged(spec: StoreSpec) -> ObjectStore:
        return AgedStore(really_open(spec), ages)

    monkeypatch.setattr(StoreSpec, "open", open_aged)
    store = StoreSpec(bucket.url, bucket.storage_options).open()
    assert isinstance(store, AgedStore)
    return store


def save(bucket: Bucket, name: str, factor: float = 1.0, *, overwrite: bool = False) -> None:
    state = {"model": {"weight": WEIGHT * factor}, "step": 7, "half": WEIGHT.bfloat16()}
    dos.save(
        state,
        bucket.at(name),
        storage_options=bucket.storage_options,
        overwrite=overwrite,
        progress=False,
    )


def stock_weight(bucket: Bucket, name: str, directory: Path) -> torch.Tensor:
    state = {"model": {"weight": torch.zeros(3, 4)}}
    reader = dcp.FileSystemReader(str(bucket.download(name, directory)))
    dcp.load(state, storage_reader=reader, no_dist=True)
    return state["model"]["weight"]


def test_repair_writes_what_the_writer_would_have_written(bucket, tmp_path):
    save(bucket, "step-1")
    written = bucket.get("step-1/.metadata")
    store = StoreSpec(bucket.at("step-1"), bucket.storage_options).open()
    index = open_committed(store)[1]
    # Not byte for byte: pickle notes which equal objects are one.
    assert decode_metadata(StockDotMetadata().derive(index)) == decode_metadata(written)
    bucket.delete("step-1/.metadata")
    report = dos.repair(bucket.at("step-1"), storage_options=bucket.storage_options)
    assert (report.dot_metadata, report.dry_run) == ("written", False)
    assert torch.equal(stock_weight(bucket, "step-1", tmp_path), WEIGHT)
    again = dos.repair(bucket.at("step-1"), storage_options=bucket.storage_options)
    assert again.dot_metadata is None


def test_dot_metadata_is_judged_by_what_it_names(bucket):
    save(bucket, "step-1")
    save(bucket, "step-2", 2.0)
    judge = StockDotMetadata()
    bodies = [bucket.get(f"step-{n}/.metadata") for n in (1, 2)]
    indexes = [
        open_committed(StoreSpec(bucket.at(f"step-{n}"), bucket.storage_options).open())[1]
        for n in (1, 2)
    ]
    for number, body in enumerate(bodies):
        assert [judge.describes(body, index) for index in indexes] == [number == 0, number == 1]
        assert judge.is_ours(body)
    for damaged in (b"", bodies[0][:-20], b"no pickle"):
        assert not judge.describes(damaged, indexes[0])
        assert not judge.is_ours(damaged)


def test_a_stock_checkpoint_is_not_taken_for_ours(tmp_path):
    dcp.save({"a": WEIGHT}, checkpoint_id=str(tmp_path / "stock"), no_dist=True)
    assert not StockDotMetadata().is_ours((tmp_path / "stock" / ".metadata").read_bytes())


def test_repair_after_a_crash_in_an_overwrite_makes_stock_torch_read_the_new_one(bucket, tmp_path):
    save(bucket, "step-1")
    old = bucket.get("step-1/.metadata")
    save(bucket, "step-1", 2.0, overwrite=True)
    bucket.put("step-1/.metadata", old)
    assert torch.equal(stock_weight(bucket, "step-1", tmp_path / "before"), WEIGHT)
    dos.repair(bucket.at("step-1"), storage_options=bucket.storage_options)
    assert torch.equal(stock_weight(bucket, "step-1", tmp_path / "after"), WEIGHT * 2)


@pytest.mark.backends("seaweed", "moto", "gcs", "azure")
def test_newest_committed_step_of_a_run_is_not_deleted_by_mistake(bucket):
    options = bucket.storage_options
    for step in (9, 10, 11):
        save(bucket, f"run/step-{step}")
    save(bucket, "run-2/step-1")  # newer, and of another run
    save(bucket, "run/deeper/step-1")
    with pytest.raises(dos.errors.InputError, match="newest"):
        dos.delete(bucket.at("run/step-11"), storage_options=options)
    assert len(bucket.keys("run/step-11")) == 4
    dos.delete(bucket.at("run/step-9"), storage_options=options)
    dos.delete(bucket.at("run/step-11"), storage_options=options, allow_newest=True)
    # A tombstone is no checkpoint, so now this is the newest.
    with pytest.raises(dos.errors.InputError, match="newest"):
        dos.delete(bucket.at("run/step-10"), storage_options=options)
    dos.delete(bucket.at("run/step-10"), storage_options=options, allow_newest=True)
    assert bucket.keys("run/step-10") == [MARKER_KEY]
    with pytest.raises(dos.errors.CheckpointNotFoundError):
        dos.open(bucket.at("run/step-10"), storage_options=options)


@pytest.mark.parametrize("names", [("step-9", "step-10"), ("z", "a")])
@pytest.mark.parametrize("minutes", [(0, -10), (10, 0)])
def test_hosts_whose_clocks_differ_do_not_change_which_step_is_the_newest(
    tmp_path, names, minutes, monkeypatch
):
    run = tmp_path.as_uri()
    for name, ahead in zip(names, minutes, strict=True):

        class Wrong(datetime):
            @classmethod
            def now(cls, tz: Any = None, by: timedelta = timedelta(minutes=ahead)) -> datetime:  # type: ignore[override]
                return datetime.now(tz) + by

        monkeypatch.setattr(commits, "datetime", Wrong)
        dos.save({"a": WEIGHT}, f"{run}/{name}", progress=False)
    with pytest.raises(dos.errors.InputError, match="newest"):
        dos.delete(f"{run}/{names[1]}")
    dos.delete(f"{run}/{names[0]}")


@pytest.mark.parametrize("names", [("step-1", "step-2", "step-3"), ("old", "new", "newest")])
def test_one_listing_and_one_newer_marker_show_that_a_step_is_not_the_newest(
    tmp_path, requests, names
):
    run = tmp_path.as_uri()
    for name in names:
        dos.save({"a": WEIGHT}, f"{run}/{name}", progress=False)
    requests.clear()
    dos.delete(f"{run}/{names[0]}", dry_run=True)
    assert [one.verb for one in requests if one.verb == "list"] == ["list"]
    # Its own marker before the run is looked at and after that, and another's.
    assert len([one for one in requests if one.key == MARKER_KEY]) == 3
    assert CLAIM_KEY not in {one.key for one in requests}, "there is none"
    dos.pin(f"{run}/{names[0]}", "paper")  # its marker is new, its commit is not
    requests.clear()
    with pytest.raises(dos.errors.InputError, match="newest"):
        dos.delete(f"{run}/{names[2]}", dry_run=True)
    assert len([one for one in requests if one.key == MARKER_KEY]) == 1


def test_a_checkpoint_without_an_index_that_is_newer_is_not_read_to_find_the_newest(
    tmp_path, requests
):
    run = tmp_path.as_uri()
    for name in ("old", "new"):
        dos.save({"a": WEIGHT}, f"{run}/{name}", progress=False)
    (tmp_path / "old" / "notes.txt").touch()
    requests.clear()
    with pytest.raises(dos.errors.InputError, match="newest"):
        dos.delete(f"{run}/new", dry_run=True)
    assert len([one for one in requests if one.key == MARKER_KEY]) == 1


def test_of_numbered_steps_the_one_that_was_saved_last_is_not_the_newest(tmp_path):
    run = tmp_path.as_uri()
    for step in (10, 9):
        dos.save({"a": WEIGHT}, f"{run}/step-{step}", progress=False)
    with pytest.raises(dos.errors.InputError, match="newest"):
        dos.delete(f"{run}/step-10")
    dos.delete(f"{run}/step-9")


def test_of_checkpoints_of_one_second_by_the_stores_clock_the_host_tells_the_newest(
    tmp_path, monkeypatch
):
    run = tmp_path.as_uri()
    for name in ("z", "a"):
        dos.save({"a": WEIGHT}, f"{run}/{name}", progress=False)
    really, then = upkeep.list_places, datetime.now(UTC)

    def in_one_second(store: ObjectStore) -> dict[str, dict[str, ObjectMeta]]:
        return {
            name: {key: replace(meta, last_modified=then) for key, meta in objects.items()}
            for name, objects in really(store).items()
        }

    monkeypatch.setattr(upkeep, "list_places", in_one_second)
    with pytest.raises(dos.errors.InputError, match="newest"):
        dos.delete(f"{run}/a")
    dos.delete(f"{run}/z")
    really_then = commits.datetime
    monkeypatch.setattr(commits, "datetime", SimpleNamespace(now=lambda _: then))
    for name in ("y", "b"):  # nor does the host
        dos.save({"a": WEIGHT}, f"{run}/{name}", progress=False)
    monkeypatch.setattr(commits, "datetime", really_then)
    dos.delete(f"{run}/a", allow_newest=True)
    for name in ("y", "b"):
        with pytest.raises(dos.errors.InputError, match="newest"):
            dos.delete(f"{run}/{name}")


def test_a_step_whose_marker_is_damaged_is_not_the_newer_one(tmp_path):
    run = tmp_path.as_uri()
    for step in (1, 2, 3):
        dos.save({"a": WEIGHT}, f"{run}/step-{step}", progress=False)
    (tmp_path / "step-3" / MARKER_KEY).write_bytes(b"{}")
    with pytest.raises(dos.errors.InputError, match="newest"):
        dos.delete(f"{run}/step-2")
    dos.delete(f"{run}/step-1")


def test_a_save_that_came_during_a_deletion_keeps_its_dot_metadata(monkeypatch):
    url = memory_url()
    dos.save({"a": WEIGHT}, url, progress=False)
    really_delete = upkeep.delete_checkpoint

    def lose(store: ObjectStore, **settings: Any) -> DeleteReport:
        report = really_delete(store, **settings)
        dos.save({"a": WEIGHT * 2}, url, progress=False)
        store.delete(DOT_METADATA_KEY)  # as a deletion that was late does
        return replace(report, superseded=True)

    monkeypatch.setattr(upkeep, "delete_checkpoint", lose)
    assert dos.delete(url, allow_newest=True).superseded
    store = StoreSpec(url).open()
    body, _ = store.get(DOT_METADATA_KEY, max_size_bytes=1 << 20)
    assert StockDotMetadata().describes(body, open_committed(store)[1])


def test_what_stands_against_a_deletion_is_said_in_this_order(through):
    run = memory_url()
    with pytest.raises(dos.errors.CheckpointNotFoundError):
        dos.delete(f"{run}/step-1")
    with dos.CheckpointManager(run, sweep=False) as manager:
        for step in (1, 2, 3):
            manager.save(step, {"a": WEIGHT})
        manager.load({"a": WEIGHT.clone()}, 1)
        manager.save(2, {"a": WEIGHT})
    dos.pin(f"{run}/step-2", "paper")
    for allow in (False, True):
        with pytest.raises(dos.errors.CheckpointPinnedError):
            dos.delete(f"{run}/step-2", allow_newest=allow)
    dos.unpin(f"{run}/step-2", "paper")
    with pytest.raises(dos.errors.InputError, match="newest"):
        dos.delete(f"{run}/step-2")
    assert dos.delete(f"{run}/step-3").commit_id  # it does not count, so nobody resumes from it
    for allow in (False, True):
        with pytest.raises(dos.errors.CheckpointNotFoundError):
            dos.delete(f"{run}/step-3", allow_newest=allow)
    assert [step.name for step in dos.steps(run)] == ["step-1", "step-2"]


def test_what_lies_in_no_run_is_the_newest(tmp_path):
    top = f"memory://{tmp_path.name}"
    dos.save({"a": WEIGHT}, top, progress=False)
    with pytest.raises(dos.errors.InputError, match="newest"):
        dos.delete(top)
    dos.delete(top, allow_newest=True)


class Unconditional(WrappedStore):
    """A store that knows no conditions."""

    def put(self, key: str, data: Any, **settings: Any) -> Any:
        return self.inner.put(key, data, retry=settings.get("retry", True))


def test_a_store_without_conditions_is_only_looked_at(through, requests):
    run = memory_url()
    for step in (1, 2):
        dos.save({"a": WEIGHT}, f"{run}/step-{step}", progress=False)
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
        lambda: dos.pin(f"{run}/step-1", "paper"),
        lambda: dos.unpin(f"{run}/step-1", "paper"),
        lambda: dos.claim_run(run),
    ):
        with pytest.raises(dos.errors.UnsupportedError, match="cannot create or replace"):
            change()
    assert [step.pins for step in dos.steps(run)] == [(), ()]
    probes.forget()


def test_repair_writes_nothing_in_a_dry_run():
    url = memory_url()
    dos.save({"a": WEIGHT}, url, progress=False)
    store = StoreSpec(url).open()
    store.delete(DOT_METADATA_KEY)
    for dry_run in (True, False):
        report = dos.repair(url, dry_run=dry_run)
        assert (report.dot_metadata, report.dry_run) == ("written", dry_run)
        assert (DOT_METADATA_KEY in {meta.key for meta in store.list()}) is not dry_run


def test_pins_are_named_when_one_is_set_or_removed():
    url = memory_url()
    dos.save({"a": WEIGHT}, url, progress=False)
    assert dos.pin(url, "b") == ("b",)
    assert set(dos.pin(url, "a")) == {"a", "b"}
    assert dos.unpin(url, "b") == ("a",)


def test_pinned_checkpoint_is_protected_through_the_door(bucket):
    options, url = bucket.storage_options, bucket.at("step-1")
    save(bucket, "step-1")
    assert dos.pin(url, "paper", storage_options=options) == ("paper",)
    with pytest.raises(dos.errors.CheckpointPinnedError, match="paper"):
        dos.delete(url, storage_options=options, allow_newest=True)
    with pytest.raises(dos.errors.CheckpointExistsError, match="pinned"):
        save(bucket, "step-1", overwrite=True)
    assert dos.unpin(url, "paper", storage_options=options) == ()
    dos.delete(url, storage_options=options, allow_newest=True)


@pytest.mark.backends("seaweed", "moto", "gcs", "azure")
def test_a_run_is_swept_checkpoint_by_checkpoint(bucket, later):
    options = bucket.storage_options
    save(bucket, "step-1")  # nothing to do
    save(bucket, "step-2")
    save(bucket, "step-2", 2.0, overwrite=True)
    save(bucket, "step-3")
    dos.delete(bucket.at("step-3"), storage_options=options, allow_newest=True, grace_seconds=3600)
    tear(StoreSpec(bucket.at("step-4"), options).open())
    save(bucket, "step-5")
    bucket.put("step-5/_COMMIT", b"{}")
    bucket.put("notes.txt", b"somebody's")
    later.age()
    tear(StoreSpec(bucket.at("step-6"), options).open())  # may be under way
    before = bucket.keys()
    (alone,) = dos.sweep(bucket.at("step-1"), storage_options=options, dry_run=True).checkpoints
    assert (alone.outcome, alone.superseded) == ("clean", False), "no job has claimed the run"
    planned = dos.sweep(bucket.url, storage_options=options, dry_run=True)
    assert bucket.keys() == before
    report = dos.sweep(bucket.url, storage_options=options)
    outcomes = {one.url.rpartition("/")[2]: one.outcome for one in report.checkpoints}
    assert outcomes == {
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
    assert [key for key in before if key.startswith(("step-5", "step-6", "notes"))] == [
        key for key in left if key.startswith(("step-5", "step-6", "notes"))
    ]
    state = {"model": {"weight": torch.zeros(3, 4)}}
    dos.load(state, bucket.at("step-2"), storage_options=options, progress=False)
    assert torch.equal(state["model"]["weight"], WEIGHT * 2)


@pytest.mark.parametrize("swept", ["/run", ""])
def test_a_step_that_a_superseded_job_committed_late_is_swept(bucket, later, swept):
    """A sweep may begin at the run, or above it."""
    run, options = bucket.at("run"), bucket.storage_options
    old = dos.claim_run(run, storage_options=options)
    stores = [StoreSpec(f"{run}/step-{step}", options).open() for step in (2, 3)]
    begun = [commits.take_begin_token(store, overwrite=False, claim=old.number) for store in stores]
    new = dos.claim_run(run, storage_options=options)
    for store, token in zip(stores, begun, strict=True):
        finish(store, token, upload(store))
    dos.pin(f"{run}/step-3", "look at it", storage_options=options)
    dos.save({"a": WEIGHT}, f"{run}/step-4", claim=new, storage_options=options, progress=False)
    report = dos.sweep(bucket.url + swept, storage_options=options)
    assert not [one.url for one in report.checkpoints if one.superseded], "they are young"
    later.age()
    before = {name: bucket.keys(f"run/{name}") for name in ("step-2", "step-3", "step-4")}
    (planned,) = dos.sweep(f"{run}/step-2", storage_options=options, dry_run=True).checkpoints
    assert planned.superseded
    assert open_committed(stores[0])
    report = dos.sweep(bucket.url + swept, storage_options=options)
    assert [one.url for one in report.checkpoints if one.superseded] == [f"{run}/step-2"]
    # Who reads it now gets another grace period.
    assert [key for key in before["step-2"] if key != DOT_METADATA_KEY] == bucket.keys("run/step-2")
    later.age()
    dos.sweep(bucket.url + swept, storage_options=options)
    assert bucket.keys("run/step-2") == [MARKER_KEY]
    assert {name: bucket.keys(f"run/{name}") for name in ("step-3", "step-4")} == {
        name: before[name] for name in ("step-3", "step-4")
    }
    assert [one.name for one in dos.steps(run, storage_options=options)] == ["step-4"]


def test_orphaned_uploads_of_a_save_that_left_nothing_else_are_found(bucket):
    """moto says of every upload that it began years ago, SeaweedFS the truth: just now."""
    client = bucket.client()
    key = f"{bucket.prefix}step-1/{data_key(0, 0, new_nonce())}"
    other = f"{bucket.prefix}step-1/dataset.tar"
    for name in (key, other):
        upload_id = client.create_multipart_upload(Bucket=bucket.name, Key=name)["UploadId"]
        client.upload_part(
            Bucket=bucket.name, Key=name, UploadId=upload_id, PartNumber=1, Body=b"x" * 1000
        )
    report = dos.sweep(bucket.url, storage_options=bucket.storage_options)
    (one,) = report.checkpoints
    if bucket.kind == "moto":
        assert (report.uploads_aborted, report.uploads_bytes) == (1, 1000)
        assert bucket.uploads() == [other]
    else:
        assert (report.uploads_aborted, one.uploads_young) == (0, 1)
        assert len(bucket.uploads()) == 2
    assert bucket.keys() == []  # and no tombstone


def test_sweep_without_boto3_says_what_was_not_looked_at(bucket, monkeypatch):
    save(bucket, "step-1")
    real = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name, *a: None if name == "boto3" else real(name, *a)
    )
    report = dos.sweep(bucket.url, storage_options=bucket.storage_options)
    assert "pip install 'dcp-objstore[s3]'" in (report.uploads_unseen or "")
    assert [one.outcome for one in report.checkpoints] == ["clean"]


# --- stores that cannot fence


@pytest.mark.parametrize("ignored", [(IfVersion,), (IfAbsent, IfVersion)])
def test_nothing_is_removed_where_a_marker_cannot_be_fenced(ignored):
    probes.forget()
    store = MemoryStore("s3://bucket/run")
    store.ignores = ignored
    with pytest.raises(
        dos.errors.UnsupportedError, match="nothing can be swept here: this store cannot"
    ):
        require_rewrites(store, "nothing can be swept")
    assert store.objects == {}


def test_a_server_that_ignores_conditions_is_refused_and_keeps_all(tmp_path):
    probes.forget()
    with RcloneServer(tmp_path) as server:
        url, options = f"s3://{server.bucket}/run/step-1", server.storage_options
        dos.save({"a": WEIGHT}, url, storage_options=options, progress=False, allow_unfenced=True)
        store = StoreSpec(url, options).open()
        before = {meta.key for meta in store.list()}
        for act in (
            lambda: dos.delete(url, storage_options=options, allow_newest=True),
            lambda: dos.sweep(url, storage_options=options),
            lambda: dos.pin(url, "paper", storage_options=options),
        ):
            with pytest.raises(dos.errors.UnsupportedError, match="cannot create or replace"):
                act()
        assert {meta.key for meta in store.list()} == before
        store.delete(DOT_METADATA_KEY)
        assert dos.repair(url, storage_options=options).dot_metadata == "written"
        assert {meta.key for meta in store.list()} == before
    probes.forget()


# --- Ctrl-C, and what is imported
