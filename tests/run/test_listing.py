"""`list_checkpoints` finds the checkpoints of a run and its torn saves; it changes nothing."""

from __future__ import annotations

import itertools
import json
import secrets
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
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
    new_nonce,
)
from dcp_objstore.cli.ls import print_checkpoints
from dcp_objstore.errors import (
    CheckpointCorruptError,
    ConfigError,
    PermissionDeniedError,
    RetryableError,
    UnsupportedError,
)
from dcp_objstore.run import listing
from dcp_objstore.run.listing import ListedCheckpoint
from dcp_objstore.stores import open_store
from tests.support.checkpoints import memory_url
from tests.support.command_line import environment
from tests.support.proxy import NetworkProxy
from tests.support.servers import READ_ONLY, Bucket
from tests.support.wrapped_stores import Fault, FaultStore, Through

STATES = {
    "step-1": "committed",
    "step-2": "deleted",
    "step-3": "not committed",
    "step-5": "deleted",
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
    step = open_store(bucket.at("run/step-5"), bucket.storage_options)
    assert put_tombstone(step, SYSTEM_CLOCK.tries()) is not None
    bucket.put("run/step-6/.metadata", b"theirs")
    bucket.put("run/step-6/__0_0.distcp", b"theirs")
    bucket.put("run/logs/log.txt", b"theirs")
    save(bucket, 7)
    yield bucket


def listed(
    bucket: Bucket, storage_options: Mapping[str, object]
) -> dict[str, dos.reports.ListedCheckpoint]:
    listing = dos.list_checkpoints(bucket.at("run"), storage_options=storage_options)
    return {one.url.rpartition("/")[2]: one for one in listing.checkpoints}


@pytest.mark.backends("seaweed")
def test_a_run_is_listed_by_its_markers_alone_and_nothing_is_changed(run):
    before = run.keys(), run.uploads()
    with NetworkProxy(run.storage_options) as proxy:
        found = listed(run, proxy.storage_options)
        assert {asked.method for asked in proxy.asked} <= {"GET", "HEAD"}
        markers = [asked for asked in proxy.asked if asked.name == "_COMMIT"]
        listings = [asked for asked in proxy.asked if asked.is_listing]
        others = [
            a for a in proxy.asked if not a.is_listing and a.name not in ("_COMMIT", "_CLAIM")
        ]
    assert (run.keys(), run.uploads()) == before
    assert {name: one.state for name, one in found.items()} == STATES
    assert [one.name for one in found.values()] == list(found)
    assert (len(markers), len(listings), others) == (5, 1, [])
    assert found["step-3"].total_bytes == 1000
    assert found["step-5"].is_fence
    assert not found["step-2"].is_fence
    assert found["step-1"].pins == ("paper",)
    assert found["step-1"].user_metadata["metrics"] == {"loss": 0.25}


@pytest.mark.backends("seaweed")
def test_the_table_fits_80_columns_and_json_has_all_of_it(run, capsys, monkeypatch):
    for name, value in environment({**run.storage_options, **READ_ONLY}).items():
        monkeypatch.setenv(name, value)
    print_checkpoints(run.at("run"), as_json=False)
    shown = capsys.readouterr()
    assert shown.err == ""
    lines = shown.out.splitlines()[1:]
    assert max(map(len, lines[:-1])) <= 80
    states = ["state", "committed", "not committed", "committed"]
    assert [line.strip().split("  ")[0] for line in lines[:-1]] == states
    assert lines[1].endswith("step-1  pinned: paper; loss 0.25")
    assert "1 deleted checkpoint left" in lines[-1]  # nothing is left of the other one
    print_checkpoints(run.at("run"), as_json=True)
    entries = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [entry["state"] for entry in entries] == list(STATES.values())


def put(url: str, body: bytes = b"") -> None:
    """Write an object."""
    above, _, name = url.rpartition("/")
    open_store(above).put(name, body)


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
    put(f"{run}/step-4/{data_key(0, 0, new_nonce())}", b"12345")
    put(f"{run}/step-4/notes.txt", b"12345")
    found = dos.list_checkpoints(run)
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
    )
    assert step == committed
    assert step.created_at is not None
    assert began <= step.created_at <= datetime.now(UTC)
    assert dos.steps(run) == (committed,)
    assert (deleted.state, deleted.is_fence, deleted.pins) == ("deleted", False, ())
    for one, state_there, objects in ((torn, "not committed", None), (foreign, "foreign", 1)):
        assert (one.state, one.objects, one.total_bytes) == (state_there, objects, 5)
        assert (one.url, one.name) == (f"{run}/{one.name}", one.url.rpartition("/")[2])
        assert (one.claim, one.is_fence, one.error) == (0, False, None)
    assert (found.url, found.unread, found.unlisted) == (run, (), None)


@pytest.mark.parametrize(
    ("names", "is_listed"),
    [
        ([MARKER_KEY], True),
        ([beacon_key("0" * 24)], True),
        ([data_key(0, 0, "0" * 24)], True),
        ([index_key("0" * 24)], False),
        ([".metadata"], False),
        ([], False),
        (["logs/x"], False),
    ],
)
def test_a_place_is_listed_by_what_a_save_has_begun_there(names, is_listed):
    run = memory_url()
    dos.save({"w": torch.ones(5)}, f"{run}/step-1")
    for name in (*names, "notes.txt"):
        put(f"{run}/step-2/{name}")
    found = dos.list_checkpoints(run).checkpoints
    assert [one.name for one in found] == ["step-1", *(["step-2"] if is_listed else [])]


def test_what_cannot_be_read_is_told_and_the_rest_is_listed():
    above = memory_url()
    for name in ("a/step-1", "a/step-2", "a/step-10", "b/step-1"):
        dos.save({"w": torch.ones(5)}, f"{above}/{name}")
    newer = open_store(f"{above}/a/step-2").get(MARKER_KEY, max_size_bytes=2**16)[0]
    put(f"{above}/a/step-2/{MARKER_KEY}", newer.replace(b'"format":1', b'"format":9'))
    put(f"{above}/a/step-10/{MARKER_KEY}", b"{}")
    for run in ("b", "a"):
        put(f"{above}/{run}/{CLAIM_KEY}", b"damaged")
    found = dos.list_checkpoints(above)
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
    found = dos.list_checkpoints(f"{run}/step-1")
    assert (found.url, found.checkpoints) == (f"{run}/step-1", whole)
    assert "no listing" in str(found.unlisted)
    with pytest.raises(PermissionDeniedError):
        dos.list_checkpoints(run)


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
    found = dos.list_checkpoints(url).checkpoints
    assert [(one.name, one.commit_id) for one in found] == [("", ids[0]), ("best", ids[1])]


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
