"""`list_checkpoints` finds the checkpoints of a run and its torn saves; it changes nothing."""

from __future__ import annotations

import itertools
import secrets
from datetime import UTC, datetime

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
from dcp_objstore.errors import (
    CheckpointCorruptError,
    ConfigError,
    ObjectNotFoundError,
    PermissionDeniedError,
    RetryableError,
    UnsupportedError,
)
from dcp_objstore.run.listing import ListedCheckpoint
from dcp_objstore.stores import open_store
from tests.support.checkpoints import memory_url
from tests.support.managers import save_steps, state
from tests.support.wrapped_stores import Fault, FaultStore, Through


def put(url: str, body: bytes = b"") -> None:
    """Write an object."""
    above, _, name = url.rpartition("/")
    open_store(above).put(name, body)


def save(run: str, *steps: int) -> None:
    for step in steps:
        dos.save({"w": torch.ones(5)}, f"{run}/step-{step}", progress=False)


def go_back(run: str) -> None:
    """A job saves steps 1 to 3, and goes back from there to save step 2 again."""
    save_steps(run, (1, 2, 3))
    with dos.CheckpointManager(run, sweep=False) as manager:
        manager.load(state(0), 1)
        manager.save(2, state(2))


def test_a_listed_checkpoint_says_what_its_marker_says(requests):
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
    assert put_tombstone(open_store(f"{run}/step-5"), SYSTEM_CLOCK.tries()) is not None
    requests.clear()
    found = dos.list_checkpoints(run)
    verbs = [one.verb for one in requests]
    assert (set(verbs), verbs.count("list")) == ({"get", "list"}, 1)
    assert {one.key for one in requests} == {MARKER_KEY, CLAIM_KEY, ""}, "no other object is read"
    step, deleted, torn, foreign, fence = found.checkpoints
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
    assert (deleted.state, deleted.total_bytes, deleted.is_fence) == ("deleted", 0, False)
    assert (fence.state, fence.is_fence) == ("deleted", True)
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


def test_a_checkpoint_itself_counts_by_the_claim_of_its_run_if_that_can_be_read(through):
    top = f"memory://{secrets.token_hex(6)}"  # above which there can be no run
    dos.save({"w": torch.ones(5)}, top)
    assert dos.list_checkpoints(top).checkpoints[0].state == "committed"
    run = memory_url()
    go_back(run)
    for error, left in (
        (None, "superseded"),
        (PermissionDeniedError("may not read it"), "committed"),
        (CheckpointCorruptError("damaged"), "committed"),
        (UnsupportedError("too new"), "committed"),
    ):
        if error is not None:
            refuse(through, CLAIM_KEY, error)
        states = [dos.list_checkpoints(f"{run}/step-{n}").checkpoints[0].state for n in (3, 2)]
        assert states == [left, "committed"]


def test_a_checkpoint_is_described_where_nothing_may_be_listed(through):
    run = memory_url()
    save(run, 1)
    whole = dos.list_checkpoints(f"{run}/step-1").checkpoints
    refuse(through, "list", PermissionDeniedError("no listing"))
    found = dos.list_checkpoints(f"{run}/step-1")
    assert (found.url, found.checkpoints) == (f"{run}/step-1", whole)
    assert "no listing" in str(found.unlisted)
    with pytest.raises(PermissionDeniedError):
        dos.list_checkpoints(run)


def test_the_newest_steps_are_as_many_as_were_asked_for():
    run = memory_url()
    save(run, 1, 9, 10)
    names = {n: [step.name for step in dos.steps(run, newest=n)] for n in (None, 1, 2, 9)}
    every = ["step-1", "step-9", "step-10"]
    assert names == {None: every, 1: every[2:], 2: every[1:], 9: every}
    for wrong in (0, -1, "1", 1.5):
        with pytest.raises(ConfigError, match="newest"):
            dos.steps(run, newest=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("times", [1, 99])
def test_a_listing_that_a_claim_ran_through_is_made_again_but_not_for_ever(through, times):
    run = memory_url()
    go_back(run)
    number, left = dos.claim_run(run).number, iter(range(times))

    def claim(verb: str, key: str, _: int) -> None:
        nonlocal number
        if verb == "get" and key == MARKER_KEY and next(left, None) is not None:
            number += 1
            record = ClaimRecord(number=number, base=number, write_id=f"{number:032x}")
            put(f"{run}/{CLAIM_KEY}", encode_claim(record))

    through(lambda store: FaultStore(store, claim))
    if times == 1:
        found = dos.list_checkpoints(run).checkpoints
        assert {one.state for one in found} == {"superseded"}
    else:
        first = number
        with pytest.raises(RetryableError, match="claiming"):
            dos.list_checkpoints(run)
        assert number - first == 1 + 5 * 3, "at the URL itself, and of three steps in each listing"


def test_a_claim_that_was_listed_is_there_whatever_one_answer_says(through):
    run, asked = memory_url(), itertools.count()
    go_back(run)

    def lose(_verb: str, key: str, _: int) -> Fault | None:
        wrong = key == CLAIM_KEY and next(asked) % 2  # not the GET after it, nor that of no run
        return Fault("before", ObjectNotFoundError("there is none")) if wrong else None

    through(lambda store: FaultStore(store, lose))
    states = [one.state for one in dos.list_checkpoints(run).checkpoints]
    assert states == ["committed", "committed", "superseded"]


def test_of_each_run_below_a_url_its_own_claim_counts(requests):
    above = memory_url()
    save_steps(f"{above}/a", (1, 2, 3))
    go_back(f"{above}/b")
    requests.clear()
    found = dos.list_checkpoints(above).checkpoints
    # Of the run above, and of the two below: before the markers are read and after that.
    assert [one.key for one in requests].count(CLAIM_KEY) == 1 + 2 * 2
    assert [one.name for one in found if one.state == "superseded"] == ["b/step-3"]
    assert len(found) == 6


def test_what_lies_at_the_url_itself_comes_first():
    url = memory_url()
    put(f"{url}/{data_key(0, 0, new_nonce())}", b"12345")
    (torn,) = dos.list_checkpoints(url).checkpoints
    assert (torn.url, torn.name, torn.state, torn.total_bytes) == (url, "", "not committed", 5)
    ids = [dos.save({"w": torch.ones(5)}, at).commit_id for at in (url, f"{url}/best")]
    found = dos.list_checkpoints(url).checkpoints
    assert [(one.name, one.commit_id) for one in found] == [("", ids[0]), ("best", ids[1])]
