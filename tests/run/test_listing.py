"""`list_checkpoints` finds all that lies in a run, and what no commit names; it changes nothing."""

from __future__ import annotations

import itertools
import json
import os
import secrets
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch

import dcp_objstore as dos
from dcp_objstore.checkpoint.catalogue import ClaimRecord, encode_claim
from dcp_objstore.checkpoint.clock import SYSTEM_CLOCK
from dcp_objstore.checkpoint.commit import put_tombstone
from dcp_objstore.checkpoint.names import (
    CLAIM_KEY,
    MARKER_KEY,
    beacon_key,
    data_key,
    index_key,
    is_ours,
    new_nonce,
)
from dcp_objstore.cli.ls import print_checkpoints
from dcp_objstore.errors import (
    CheckpointCorruptError,
    CheckpointGoneError,
    CheckpointNotFoundError,
    ConfigError,
    DcpObjstoreError,
    PermissionDeniedError,
    RetryableError,
    StoreUnavailableError,
    UnsupportedError,
)
from dcp_objstore.run import listing
from dcp_objstore.run.listing import Leftovers, ListedCheckpoint
from dcp_objstore.stores import open_store
from dcp_objstore.stores.local import TEMPORARY
from tests.support.checkpoints import memory_url
from tests.support.command_line import environment
from tests.support.proxy import NetworkProxy
from tests.support.servers import READ_ONLY, Bucket
from tests.support.unfinished_uploads import PART, begin_upload
from tests.support.wrapped_stores import Fault, FaultStore, Through

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
    dos.delete(
        bucket.at("run/step-2"),
        allow_newest=True,
        grace_seconds=3600,
        storage_options=bucket.storage_options,
    )
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
def test_everything_in_a_run_is_listed_and_nothing_is_changed(run):
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
def test_without_all_only_markers_are_read(run):
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
def test_the_table_of_all_fits_80_columns_and_json_has_all_of_it(run, capsys, monkeypatch):
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


def put(url: str, body: bytes = b"", *, age_seconds: float | None = None) -> None:
    """Write an object; into a folder also with a time at which it was written."""
    if age_seconds is None:
        above, _, name = url.rpartition("/")
        open_store(above).put(name, body)
        return
    path = Path(url.removeprefix("file://"))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(body)
    os.utime(path, (age_seconds, age_seconds))


def at(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def test_a_place_where_only_leftovers_are_is_found_only_with_all(tmp_path):
    run = (tmp_path / "run").as_uri()
    put(f"{run}/step-1/{TEMPORARY}0.{data_key(0, 0, new_nonce())}", b"12345", age_seconds=100)
    put(f"{run}/step-1/{TEMPORARY}1.{MARKER_KEY}", b"1", age_seconds=200)
    put(f"{run}/step-1/{TEMPORARY}2.theirs", b"1", age_seconds=300)
    with pytest.raises(CheckpointNotFoundError):
        dos.list_checkpoints(run)
    put(f"{run}/step-2/{index_key(new_nonce())}", b"1", age_seconds=400)
    put(f"{run}/step-2/{data_key(0, 0, new_nonce())}", b"12", age_seconds=500)
    put(f"{run}/step-2/notes.txt", b"theirs", age_seconds=1000)
    put(f"{run}/step-2/{beacon_key(new_nonce())}", age_seconds=600)
    put(f"{run}/step-2/{beacon_key(new_nonce())}", age_seconds=700)
    only_upload, step = dos.list_checkpoints(run, everything=True).checkpoints
    assert only_upload.leftovers == Leftovers(uploads=2, uploads_bytes=6, initiated_at=at(200))
    assert step.leftovers == Leftovers(
        objects=2, objects_bytes=3, written_at=at(500), saves=2, began_at=at(700)
    )
    assert [one.total_bytes for one in (only_upload, step)] == [0, 2]
    with pytest.raises(CheckpointNotFoundError):
        dos.list_checkpoints((tmp_path / "other").as_uri(), everything=True)


def test_leftovers_are_true_if_there_are_any():
    for one in ("objects", "saves", "uploads"):
        assert Leftovers(**{one: 1})
    assert not Leftovers()


def test_a_listed_checkpoint_says_what_its_marker_says():
    run = memory_url()
    claim, began = dos.claim_run(run), datetime.now(UTC)
    state = {"w": torch.ones(5), "b": torch.ones(2)}
    report = dos.save(state, f"{run}/step-1", claim=claim, user_metadata={"a": 1})
    dos.pin(f"{run}/step-1", "paper")
    dos.save(state, f"{run}/step-2", claim=claim)
    dos.delete(f"{run}/step-2", allow_newest=True)
    put(f"{run}/step-3/{data_key(0, 0, new_nonce())}", b"12345")
    put(f"{run}/step-4/.metadata", b"theirs")
    put(f"{run}/step-4/__0_0.distcp", b"12345")
    put(f"{run}/step-4/notes.txt", b"12345")
    found = dos.list_checkpoints(run, everything=True)
    step, deleted, torn, foreign = found.checkpoints
    committed = ListedCheckpoint(
        url=f"{run}/step-1",
        name="step-1",
        state="committed",
        total_bytes=report.total_bytes,
        objects=report.objects,
        tensors=2,
        world_size=1,
        created_at=step.created_at,
        commit_id=report.commit_id,
        claim=claim.number,
        pins=("paper",),
        user_metadata={"a": 1},
        leftovers=Leftovers(),
    )
    assert step == committed
    assert step.created_at is not None
    assert began <= step.created_at <= datetime.now(UTC)
    assert dos.steps(run) == (replace(committed, leftovers=None),)
    assert (deleted.state, deleted.is_fence, deleted.pins) == ("deleted", False, ())
    for one, state_there, objects in ((torn, "not committed", None), (foreign, "foreign", 1)):
        assert (one.state, one.objects, one.total_bytes) == (state_there, objects, 5)
        assert (one.url, one.name) == (f"{run}/{one.name}", one.url.rpartition("/")[2])
        assert (one.claim, one.is_fence, one.error) == (0, False, None)
    assert (found.url, found.unread, found.unlisted) == (run, (), None)
    assert found.uploads_unseen == "memory:// has no multipart uploads"
    assert dos.list_checkpoints(run).uploads_unseen is None


@pytest.mark.parametrize(
    ("names", "is_listed", "with_everything"),
    [
        ([MARKER_KEY], True, True),
        ([beacon_key("0" * 24)], True, True),
        ([data_key(0, 0, "0" * 24)], True, True),
        ([index_key("0" * 24)], False, True),
        ([".metadata"], False, True),
        ([], False, False),
        (["logs/x"], False, False),
    ],
)
def test_a_place_is_listed_by_what_a_save_has_begun_there(names, is_listed, with_everything):
    run = memory_url()
    dos.save({"w": torch.ones(5)}, f"{run}/step-1")
    for name in (*names, "notes.txt"):
        put(f"{run}/step-2/{name}")
    for everything, wanted in ((False, is_listed), (True, with_everything)):
        found = dos.list_checkpoints(run, everything=everything).checkpoints
        assert [one.name for one in found] == ["step-1", *(["step-2"] if wanted else [])]


def test_what_cannot_be_read_is_told_and_the_rest_is_listed():
    above = memory_url()
    for name in ("a/step-1", "a/step-2", "a/step-10", "b/step-1"):
        dos.save({"w": torch.ones(5)}, f"{above}/{name}")
    newer = open_store(f"{above}/a/step-2").get(MARKER_KEY, max_size_bytes=2**16)[0]
    put(f"{above}/a/step-2/{MARKER_KEY}", newer.replace(b'"format":1', b'"format":9'))
    put(f"{above}/a/step-10/{MARKER_KEY}", b"{}")
    for run in ("b", "a"):
        put(f"{above}/{run}/{CLAIM_KEY}", b"damaged")
    found = dos.list_checkpoints(above, everything=True)
    assert [(one.name, one.state) for one in found.checkpoints] == [
        ("a/step-1", "committed"),
        ("a/step-2", "unsupported"),
        ("a/step-10", "damaged"),
        ("b/step-1", "committed"),
    ]
    assert [error.url for error in found.unread] == [
        f"{above}/{place}" for place in ("a", "b", "a/step-2", "a/step-10")
    ]
    for one in found.checkpoints:
        assert (one.error is None) is (one.state == "committed")
        assert (one.objects is None) is (one.error is not None)
    assert "damaged" in str(found.checkpoints[2].error)
    assert [step.name for step in dos.steps(f"{above}/c")] == []
    assert dos.list_checkpoints(f"{above}/a/step-1").checkpoints[0].state == "committed"
    with pytest.raises(CheckpointCorruptError):
        dos.steps(f"{above}/a")


def refuse(through: Through, what: str, error: Exception) -> None:
    """Have requests for a key, or of a verb, raise an error from now on."""

    def plan(verb: str, key: str, _: int) -> Fault | None:
        return Fault("before", error) if what in (verb, key) else None

    through(lambda store: FaultStore(store, plan))


@pytest.mark.parametrize(
    "error",
    [
        None,
        PermissionDeniedError("may not read it"),
        CheckpointCorruptError("damaged"),
        UnsupportedError("too new"),
    ],
)
def test_a_checkpoint_itself_counts_by_the_claim_of_its_run_if_that_can_be_read(through, error):
    top = f"memory://{secrets.token_hex(6)}"  # above which there can be no run
    dos.save({"w": torch.ones(5)}, top)
    run = memory_url()
    old = dos.claim_run(run)
    dos.save({"w": torch.ones(5)}, f"{run}/step-1", claim=old)
    with dos.CheckpointManager(run) as manager:
        manager.save(2, {"w": torch.ones(5)})
        manager.load({"w": torch.zeros(5)}, 1)
        manager.save(3, {"w": torch.ones(5)})
    if error is not None:
        refuse(through, CLAIM_KEY, error)
    states = [dos.list_checkpoints(f"{run}/step-{n}").checkpoints[0].state for n in (2, 3)]
    assert states == ["superseded" if error is None else "committed", "committed"]
    assert dos.list_checkpoints(top).checkpoints[0].state == "committed"


def test_a_checkpoint_is_described_where_nothing_may_be_listed(through):
    run = memory_url()
    dos.save({"w": torch.ones(5)}, f"{run}/step-1")
    whole = dos.list_checkpoints(f"{run}/step-1").checkpoints
    refuse(through, "list", PermissionDeniedError("no listing"))
    found = dos.list_checkpoints(f"{run}/step-1", everything=True)
    assert (found.url, found.checkpoints) == (f"{run}/step-1", whole)
    assert "no listing" in str(found.unlisted)
    assert "no multipart uploads" in str(found.uploads_unseen)
    with pytest.raises(PermissionDeniedError):
        dos.list_checkpoints(run)


@pytest.mark.parametrize("error", [StoreUnavailableError("down"), UnsupportedError("no boto3")])
def test_uploads_that_cannot_be_listed_hide_nothing_else(monkeypatch, error):
    run = memory_url()
    dos.save({"w": torch.ones(5)}, f"{run}/step-1")

    def fail(_: object) -> None:
        raise error

    monkeypatch.setattr("dcp_objstore.stores.spec.open_uploads", fail)
    found = dos.list_checkpoints(run, everything=True)
    assert [one.name for one in found.checkpoints] == ["step-1"]
    assert found.uploads_unseen == error.message


def test_the_newest_steps_are_as_many_as_were_asked_for():
    run = memory_url()
    for step in (1, 9, 10):
        dos.save({"w": torch.ones(5)}, f"{run}/step-{step}")
    names = {n: [step.name for step in dos.steps(run, newest=n)] for n in (None, 1, 2, 9)}
    every = ["step-1", "step-9", "step-10"]
    assert names == {None: every, 1: every[2:], 2: every[1:], 9: every}
    for wrong in (0, -1, "1", 1.5):
        with pytest.raises(ConfigError, match="newest"):
            dos.steps(run, newest=wrong)  # type: ignore[arg-type]


def test_a_listing_through_which_jobs_keep_claiming_the_run_is_given_up(through):
    run = memory_url()
    dos.save({"w": torch.ones(5)}, f"{run}/step-1")
    dos.claim_run(run)
    store, numbers = open_store(run), itertools.count(2)

    def claim(verb: str, key: str, _: int) -> None:
        if verb == "get" and key == MARKER_KEY:
            number = next(numbers)
            record = ClaimRecord(number=number, base=0, write_id=f"{number:032x}")
            store.put(CLAIM_KEY, encode_claim(record))

    through(lambda store: FaultStore(store, claim))
    with pytest.raises(RetryableError, match="claiming"):
        dos.list_checkpoints(run)


def test_of_a_damaged_checkpoint_nothing_is_called_left_over():
    run = memory_url()
    for step in (1, 2, 2):
        dos.save({"w": torch.ones(5)}, f"{run}/step-{step}", overwrite=True)
    put(f"{run}/step-1/{MARKER_KEY}", b"{}")
    for meta in list(open_store(f"{run}/step-2").list()):
        if meta.key.endswith(".msgpack"):
            put(f"{run}/step-2/{meta.key}", b"damaged")
    damaged, step = dos.list_checkpoints(run, everything=True).checkpoints
    assert (damaged.state, step.state, step.error) == ("damaged", "committed", None)
    assert damaged.leftovers == step.leftovers == Leftovers()
    with pytest.raises(CheckpointCorruptError):
        dos.list_checkpoints(f"{run}/step-1", everything=True)


def test_what_a_sweep_leaves_alone_is_not_called_left_over(capsys):
    """Without its marker, a checkpoint with a `.metadata` may be another library's."""
    run = memory_url()
    for step in (1, 2):
        dos.save({"w": torch.ones(5)}, f"{run}/step-{step}")
    put(f"{run}/step-1/{MARKER_KEY}", b"{}")
    open_store(f"{run}/step-2").delete(MARKER_KEY)
    (swept,) = dos.sweep(f"{run}/step-2", dry_run=True).checkpoints
    assert (swept.outcome, swept.deleted) == ("foreign", 0)
    found = dos.list_checkpoints(run, everything=True).checkpoints[1]
    assert (found.state, found.objects, found.leftovers) == ("foreign", 1, Leftovers())
    with pytest.raises(SystemExit):
        print_checkpoints(run, as_json=False, everything=True)
    shown_damaged, foreign = capsys.readouterr().out.splitlines()[2:]
    assert shown_damaged.split()[3] == "-"  # objects
    assert foreign.split()[3] == "1"


@pytest.mark.parametrize(
    "change",
    [
        CheckpointCorruptError("damaged"),
        CheckpointGoneError("gone"),
        UnsupportedError("too new"),
        "the marker is removed",
        "it is replaced",
    ],
)
def test_objects_of_a_changing_checkpoint_are_not_called_left_over(monkeypatch, change):
    url = memory_url()
    for _ in range(2):
        dos.save({"w": torch.ones(5)}, url, overwrite=True)
    read, read_marker = listing.named_keys, listing.read_marker
    markers = itertools.count()

    def read_then_replace(store: Any, marker: Any) -> list[str]:
        if isinstance(change, DcpObjstoreError):
            raise change
        found = read(store, marker)
        dos.save({"w": torch.ones(5)}, url, overwrite=True)
        return found

    def remove_then_read(store: Any) -> Any:
        if next(markers) and change == "the marker is removed":
            store.delete(MARKER_KEY)
        return read_marker(store)

    monkeypatch.setattr(listing, "named_keys", read_then_replace)
    monkeypatch.setattr(listing, "read_marker", remove_then_read)
    (found,) = dos.list_checkpoints(url, everything=True).checkpoints
    assert found.leftovers is not None
    # Of the first save alone.
    assert found.leftovers.objects == (2 if change == "it is replaced" else 0)


def test_what_a_superseded_step_names_is_not_called_left_over():
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


def test_of_each_run_below_a_url_its_own_claim_counts(requests):
    above = memory_url()
    for run in ("a", "b"):
        with dos.CheckpointManager(f"{above}/{run}") as manager:
            for step in (1, 2):
                manager.save(step, {"w": torch.ones(5)})
            if run == "b":
                manager.load({"w": torch.zeros(5)}, 1)
                manager.save(3, {"w": torch.ones(5)})
    requests.clear()
    found = dos.list_checkpoints(above).checkpoints
    # Of the run above, and of the two below: before the markers are read and after that.
    assert [one.key for one in requests].count(CLAIM_KEY) == 1 + 2 * 2
    assert [one.name for one in found if one.state == "superseded"] == ["b/step-2"]
    assert len(found) == 5


def test_what_lies_at_the_url_itself_comes_first():
    url = memory_url()
    put(f"{url}/{data_key(0, 0, new_nonce())}", b"12345")
    (torn,) = dos.list_checkpoints(url).checkpoints
    assert (torn.url, torn.name, torn.state, torn.total_bytes) == (url, "", "not committed", 5)
    ids = [dos.save({"w": torch.ones(5)}, at).commit_id for at in (url, f"{url}/best")]
    found = dos.list_checkpoints(url, everything=True).checkpoints
    assert [(one.name, one.commit_id) for one in found] == [("", ids[0]), ("best", ids[1])]
    assert found[0].leftovers == Leftovers(
        objects=1, objects_bytes=5, written_at=found[0].leftovers and found[0].leftovers.written_at
    )


def test_a_list_that_a_claim_ran_through_is_made_again(monkeypatch):
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


def test_a_replacement_made_before_the_listing_is_not_called_left_over(monkeypatch):
    url = memory_url()
    dos.save({"w": torch.ones(5)}, url)
    list_places = listing.list_places

    def replace_then_list(*args: Any, **settings: Any) -> Any:
        dos.save({"w": torch.ones(5)}, url, overwrite=True)
        return list_places(*args, **settings)

    monkeypatch.setattr(listing, "list_places", replace_then_list)
    (found,) = dos.list_checkpoints(url, everything=True).checkpoints
    assert found.leftovers == dos.reports.Leftovers()
