"""`list_checkpoints` finds all that lies in a run, and what no commit names; it changes nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import dcp_objstore as dos
from dcp_objstore.checkpoint.clock import SYSTEM_CLOCK
from dcp_objstore.checkpoint.commit import put_tombstone
from dcp_objstore.checkpoint.names import (
    beacon_key,
    data_key,
    index_key,
    is_ours,
    new_nonce,
)
from dcp_objstore.cli.ls import print_checkpoints
from dcp_objstore.errors import CheckpointCorruptError, CheckpointNotFoundError
from dcp_objstore.run import listing
from dcp_objstore.stores import open_store
from tests.support.checkpoints import memory_url
from tests.support.command_line import environment
from tests.support.proxy import NetworkProxy
from tests.support.servers import READ_ONLY, Bucket
from tests.support.unfinished_uploads import PART, begin_upload

STATES = {
    "step-1": "committed",
    "step-2": "deleted",
    "step-3": "not committed",
    "step-4": "not committed",
    "step-5": "deleted",
    "step-6": "foreign",
    "step-7": "committed",
}


def save(bucket: Bucket, step: int, *, overwrite: bool = False) -> None:
    dos.save(
        {"w": torch.full((500,), float(step))},
        bucket.at(f"run/step-{step}"),
        overwrite=overwrite,
        storage_options=bucket.storage_options,
        user_metadata={"step": step, "metrics": {"loss": 0.25}},
    )


@pytest.fixture
def run(bucket: Bucket) -> Iterator[Bucket]:
    """A run in which everything has happened."""
    save(bucket, 1)
    save(bucket, 1, overwrite=True)
    dos.pin(bucket.at("run/step-1"), "paper", storage_options=bucket.storage_options)
    save(bucket, 2)
    dos.delete(bucket.at("run/step-2"), allow_newest=True, storage_options=bucket.storage_options)
    bucket.put(f"run/step-3/{data_key(0, 0, new_nonce())}", b"x" * 1000)
    bucket.put(f"run/step-3/{beacon_key(new_nonce())}", b"")
    begin_upload(bucket, f"run/step-4/{data_key(3, 0, new_nonce())}")
    begin_upload(bucket, "run/step-4/.metadata")
    begin_upload(bucket, "run/step-4/theirs.bin")
    step = open_store(bucket.at("run/step-5"), bucket.storage_options)
    assert put_tombstone(step, SYSTEM_CLOCK.tries()) is not None
    bucket.put("run/step-6/.metadata", b"theirs")
    bucket.put("run/step-6/__0_0.distcp", b"theirs")
    bucket.put("run/logs/log.txt", b"theirs")
    save(bucket, 7)
    yield bucket


def listed(bucket: Bucket, **options: object) -> dict[str, dos.reports.ListedCheckpoint]:
    storage_options = options.pop("storage_options", bucket.storage_options)
    listing = dos.list_checkpoints(
        bucket.at("run"),
        storage_options=storage_options,  # type: ignore[arg-type]
        **options,  # type: ignore[arg-type]
    )
    return {one.url.rpartition("/")[2]: one for one in listing.checkpoints}


@pytest.mark.backends("seaweed")
def test_everything_in_a_run_is_listed_and_nothing_is_changed(run: Bucket) -> None:
    before = run.keys(), run.uploads()
    with NetworkProxy(run.storage_options) as proxy:
        found = listed(run, everything=True, storage_options=proxy.storage_options)
        assert {asked.method for asked in proxy.asked} <= {"GET", "HEAD"}
        indices = [asked.key for asked in proxy.asked if asked.name.endswith(".msgpack")]
    assert (run.keys(), run.uploads()) == before
    assert {name: one.state for name, one in found.items()} == STATES
    assert [one.name for one in found.values()] == list(found)
    # Only where more lies than the marker counts.
    assert [key.split("/")[-2] for key in indices] == ["step-1"]
    left = {name: one.leftovers for name, one in found.items()}
    replaced, tombstone, torn, upload, fence = (left[f"step-{n}"] for n in range(1, 6))
    assert replaced is not None
    assert tombstone is not None
    assert torn is not None
    assert upload is not None
    assert (replaced.objects, tombstone.objects, torn.objects) == (2, 2, 1)
    assert (torn.objects_bytes, torn.saves, torn.began_at is not None) == (1000, 1, True)
    assert (upload.objects, upload.uploads, upload.uploads_bytes) == (0, 2, 2 * len(PART))
    assert found["step-5"].is_fence
    assert not found["step-2"].is_fence
    assert not fence
    assert not left["step-7"]
    assert found["step-1"].pins == ("paper",)
    assert found["step-1"].user_metadata["metrics"] == {"loss": 0.25}
    # What sweep would remove is the same, whatever its age.
    objects = {
        one.url.rpartition("/")[2]: one.kept_young + one.deleted
        for one in dos.sweep(
            run.at("run"), dry_run=True, storage_options=run.storage_options
        ).checkpoints
    }
    assert {name: one.objects + one.saves for name, one in left.items() if one} == {
        name: number for name, number in objects.items() if number or name == "step-4"
    }


@pytest.mark.backends("seaweed")
def test_without_all_only_markers_are_read(run: Bucket) -> None:
    with NetworkProxy(run.storage_options) as proxy:
        found = listed(run, storage_options=proxy.storage_options)
        markers = [asked for asked in proxy.asked if asked.name == "_COMMIT"]
        listings = [asked for asked in proxy.asked if asked.is_listing]
        others = [
            a for a in proxy.asked if not a.is_listing and a.name not in ("_COMMIT", "_CLAIM")
        ]
    assert {name: one.state for name, one in found.items()} == {
        name: state for name, state in STATES.items() if name not in ("step-4", "step-6")
    }
    assert all(one.leftovers is None for one in found.values())
    assert (len(markers), len(listings), others) == (5, 1, [])


@pytest.mark.backends("seaweed")
def test_the_table_of_all_fits_80_columns_and_json_has_all_of_it(
    run: Bucket, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment({**run.storage_options, **READ_ONLY}).items():
        monkeypatch.setenv(name, value)
    print_checkpoints(run.at("run"), as_json=False, everything=True)
    shown = capsys.readouterr()
    assert shown.err == ""
    lines = shown.out.splitlines()[1:]
    assert max(map(len, lines)) <= 80
    assert [line.strip().split("  ")[0] for line in lines] == [
        "state",
        "committed",
        "left over",
        "deleted",
        "left over",
        "not committed",
        "beacon",
        "not committed",
        "upload",
        "deleted",
        "foreign",
        "committed",
    ]
    assert lines[1].endswith("step-1  pinned: paper; loss 0.25")
    assert "10.00 MiB" in lines[8]
    assert lines[10].split()[:4] == ["foreign", "6", "B", "1"]
    assert lines[9].endswith("a fence")
    print_checkpoints(run.at("run"), as_json=True, everything=True)
    entries = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [entry["state"] for entry in entries] == list(STATES.values())
    assert entries[3]["leftovers"]["uploads_bytes"] == 2 * len(PART)


@pytest.mark.backends("seaweed")
def test_a_place_where_only_leftovers_are_is_found_only_with_all(bucket: Bucket) -> None:
    begin_upload(bucket, f"run/step-1/{data_key(0, 0, new_nonce())}")
    with pytest.raises(CheckpointNotFoundError):
        listed(bucket)
    bucket.put(f"run/step-2/{index_key(new_nonce())}", b"ours")
    bucket.put("run/step-2/notes.txt", b"theirs")
    assert set(listed(bucket, everything=True)) == {"step-1", "step-2"}
    with pytest.raises(CheckpointNotFoundError):
        dos.list_checkpoints(
            bucket.at("other"), everything=True, storage_options=bucket.storage_options
        )


@pytest.mark.backends("seaweed")
def test_of_a_damaged_checkpoint_nothing_is_called_left_over(bucket: Bucket) -> None:
    save(bucket, 1)
    save(bucket, 2)
    save(bucket, 2, overwrite=True)
    bucket.put("run/step-1/_COMMIT", b"{}")
    for key in bucket.keys("run/step-2"):
        if key.endswith(".msgpack"):
            bucket.put(f"run/step-2/{key}", b"damaged")
    found = listed(bucket, everything=True)
    assert (found["step-1"].state, found["step-2"].state) == ("damaged", "committed")
    assert found["step-1"].objects is None
    assert "damaged" in (found["step-1"].error or "")
    assert found["step-2"].error is None
    assert not found["step-1"].leftovers
    assert not found["step-2"].leftovers
    with pytest.raises(CheckpointCorruptError):
        dos.list_checkpoints(
            bucket.at("run/step-1"), everything=True, storage_options=bucket.storage_options
        )


@pytest.mark.backends("seaweed")
def test_what_a_sweep_leaves_alone_is_not_called_left_over(
    bucket: Bucket, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its marker, a checkpoint with a `.metadata` may be another library's."""
    for name, value in environment(bucket.storage_options).items():
        monkeypatch.setenv(name, value)
    for step in (1, 2):
        save(bucket, step)
    bucket.put("run/step-1/_COMMIT", b"{}")
    bucket.client().delete_object(Bucket=bucket.name, Key=f"{bucket.prefix}run/step-2/_COMMIT")
    (swept,) = dos.sweep(
        bucket.at("run/step-2"), dry_run=True, storage_options=bucket.storage_options
    ).checkpoints
    assert (swept.outcome, swept.deleted) == ("foreign", 0)
    found = listed(bucket, everything=True)["step-2"]
    assert (found.state, found.objects, found.leftovers) == ("foreign", 1, dos.reports.Leftovers())
    with pytest.raises(SystemExit):
        print_checkpoints(bucket.at("run"), as_json=False, everything=True)
    damaged, foreign = capsys.readouterr().out.splitlines()[2:]
    assert damaged.split()[3] == "-"  # objects
    assert foreign.split()[3] == "1"


def test_what_a_superseded_step_names_is_not_called_left_over() -> None:
    run = memory_url()
    with dos.CheckpointManager(run) as manager:
        for step in (1, 2, 3):
            manager.save(step, {"w": torch.ones(5)})
    before = [meta for meta in open_store(f"{run}/step-2").list() if is_ours(meta.key)]
    with dos.CheckpointManager(run) as manager:
        manager.load({"w": torch.zeros(5)}, 1)
        manager.save(2, {"w": torch.ones(5)})
    found = dos.list_checkpoints(run, everything=True).checkpoints
    assert [one.state for one in found] == ["committed", "committed", "superseded"]
    kept, replaced, superseded = (one.leftovers for one in found)
    assert not kept
    assert not superseded
    assert replaced is not None
    assert replaced.objects == len(before) == 2
    assert replaced.objects_bytes == sum(meta.size_bytes for meta in before)
    assert replaced.written_at == max(meta.last_modified for meta in before)


def test_a_list_that_a_claim_ran_through_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    run = memory_url()
    with dos.CheckpointManager(run) as manager:
        for step in (1, 2, 3):
            manager.save(step, {"w": torch.ones(5)})
    read, moments = listing._Look._claims, iter(["first"])

    def read_then_go_back(*args: Any) -> Any:
        found = read(*args)
        if next(moments, None):
            with dos.CheckpointManager(run) as manager:
                manager.load({"w": torch.zeros(5)}, 1)
                manager.save(2, {"w": torch.ones(5)})
        return found

    monkeypatch.setattr(listing._Look, "_claims", read_then_go_back)
    found = dos.list_checkpoints(run).checkpoints
    assert [one.state for one in found] == ["committed", "committed", "superseded"]


def test_what_replaces_a_checkpoint_before_its_objects_are_listed_is_not_called_left_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url = memory_url()
    dos.save({"w": torch.ones(5)}, url)
    list_places = listing.list_places

    def replace_then_list(*args: Any, **settings: Any) -> Any:
        dos.save({"w": torch.ones(5)}, url, overwrite=True)
        return list_places(*args, **settings)

    monkeypatch.setattr(listing, "list_places", replace_then_list)
    (found,) = dos.list_checkpoints(url, everything=True).checkpoints
    assert found.leftovers == dos.reports.Leftovers()


def test_of_a_checkpoint_whose_index_goes_meanwhile_nothing_is_called_left_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url = memory_url()
    for _ in range(2):
        dos.save({"w": torch.ones(5)}, url, overwrite=True)
    named_keys = listing.named_keys

    def remove_then_read(store: Any, marker: Any) -> list[str]:
        dos.delete(url, allow_newest=True, remove_objects=True)
        return named_keys(store, marker)

    monkeypatch.setattr(listing, "named_keys", remove_then_read)
    (found,) = dos.list_checkpoints(url, everything=True).checkpoints
    assert found.leftovers == dos.reports.Leftovers()


@pytest.mark.backends("seaweed")
def test_a_commit_that_replaces_another_meanwhile_is_not_called_left_over(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        save(bucket, 1, overwrite=True)
    read = listing.named_keys

    def read_then_replace(store: Any, marker: Any) -> list[str]:
        found = read(store, marker)
        save(bucket, 1, overwrite=True)
        return found

    monkeypatch.setattr(listing, "named_keys", read_then_replace)
    left = listed(bucket, everything=True)["step-1"].leftovers
    assert left is not None
    assert left.objects == 2  # of the first save alone
