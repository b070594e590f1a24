"""A job goes on from the newest step that can be loaded."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dcp_objstore as dos
from dcp_objstore.checkpoint.delete import delete
from dcp_objstore.checkpoint.names import MARKER_KEY
from dcp_objstore.errors import (
    CheckpointCorruptError,
    CheckpointGoneError,
    CheckpointNotFoundError,
    CorruptDataError,
    DcpObjstoreError,
    PermissionDeniedError,
    RetryableError,
    UnsupportedError,
)
from dcp_objstore.run import resume
from dcp_objstore.run.resume import ResumeReport, SkippedStep, load_newest
from dcp_objstore.stores import StoreSpec
from tests.support.checkpoints import memory_url
from tests.support.managers import damage

DAMAGED = CheckpointCorruptError("damaged", key="w")
GONE = CheckpointGoneError("gone")
DELETED = CheckpointNotFoundError("deleted")
WEIGHT = torch.tensor([12345.678])


class Loads:
    """Loads of a run with six steps, some of which fail, and are damaged or gone as they say."""

    def __init__(self, errors: dict[int, DcpObjstoreError], steps: int = 6) -> None:
        self.run = StoreSpec(memory_url())
        state = {"w": WEIGHT, "note": "a remark"}
        for step in range(1, steps + 1):
            url = f"{self.run.url}/step-{step}"
            dos.save(state, url, progress=False)
            if isinstance(errors.get(step), CheckpointCorruptError):
                damage(url, WEIGHT.numpy().tobytes())
        self.errors = errors
        self.tried: list[int] = []

    def load(self, step: int) -> Any:
        self.tried.append(step)
        if self.errors.get(step) in (GONE, DELETED):
            delete(StoreSpec(f"{self.run.url}/step-{step}").open())
        if step in self.errors:
            raise self.errors[step]
        return f"report of {step}"

    def newest(self) -> ResumeReport:
        return load_newest(self.run, None, self.load)


@pytest.mark.parametrize(
    "errors",
    [
        {},
        {6: DAMAGED},
        {6: GONE, 5: DELETED, 4: DAMAGED},
        {6: DAMAGED, 5: DAMAGED, 4: DAMAGED, 3: DAMAGED, 2: GONE},
    ],
)
def test_the_newest_step_that_can_be_loaded_is_and_each_is_tried_once(errors):
    loads = Loads(errors)
    found = loads.newest()
    assert loads.tried == list(range(6, 6 - len(errors) - 1, -1))
    skipped = tuple(SkippedStep(step, error) for step, error in errors.items())
    assert found == ResumeReport(6 - len(errors), f"report of {found.step}", skipped)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("errors", "raised"),
    [
        ({3: GONE, 2: DAMAGED, 1: CheckpointCorruptError("older")}, DAMAGED),
        ({3: PermissionDeniedError("denied")}, PermissionDeniedError("denied")),
        # A value that this program cannot build.
        ({3: UnsupportedError("another name")}, UnsupportedError("another name")),
        ({3: GONE, 2: DELETED, 1: DELETED}, GONE),  # the state may be half filled
    ],
)
def test_damage_to_all_is_raised_as_the_error_of_the_newest_and_others_at_once(errors, raised):
    loads = Loads(errors, steps=3)
    with pytest.raises(type(raised), match=raised.message):
        loads.newest()
    assert loads.tried == list(errors)


@pytest.mark.parametrize(("steps", "listings"), [(0, 1), (1, 2), (3, 2)])
def test_where_all_steps_are_deleted_before_they_are_read_there_is_none(requests, steps, listings):
    loads = Loads({1: DELETED, 2: DELETED, 3: DELETED}, steps)
    requests.clear()
    found = loads.newest()
    assert (found.step, found.load) == (None, None)
    assert [one.step for one in found.skipped] == list(range(steps, 0, -1))
    assert [one.verb for one in requests].count("list") == listings, "again if it had steps"


def test_a_step_that_is_deleted_while_it_is_loaded_gives_way_to_one_that_came_since():
    """By the retention of the job that writes the run, say."""
    loads = Loads({1: GONE}, steps=1)

    def load(step: int) -> Any:
        if step == 1:
            dos.save({"w": WEIGHT}, f"{loads.run.url}/step-2", progress=False)
        return loads.load(step)

    found = load_newest(loads.run, None, load)
    assert (found.step, [skip.step for skip in found.skipped]) == (2, [1])


def test_only_the_newest_few_markers_are_read(requests):
    loads = Loads({})
    requests.clear()
    loads.newest()
    assert [one.key for one in requests].count(MARKER_KEY) < 6


@pytest.mark.parametrize("is_first", [True, False])
def test_one_rank_warns_of_a_step_that_is_skipped(monkeypatch, caplog, is_first):
    loads = Loads({2: DAMAGED}, steps=2)
    monkeypatch.setattr(resume, "is_first", lambda _: is_first)
    assert loads.newest().step == 1
    assert ("step 2 cannot be loaded" in caplog.text) is is_first


@pytest.mark.parametrize(
    "error",
    [
        DAMAGED,
        CheckpointCorruptError("damaged"),
        CorruptDataError(""),
        CheckpointGoneError("one answer said so"),
        CheckpointNotFoundError("one answer said so"),
    ],
)
def test_a_step_is_not_skipped_for_what_a_verification_does_not_find(error):
    loads = Loads({}, steps=3)
    loads.errors[3] = error
    with pytest.raises(RetryableError, match="finds this step whole") as caught:
        loads.newest()
    assert loads.tried == [3]
    assert caught.value.__cause__ is error
    assert caught.value.url == f"{loads.run.url}/step-3"


def test_only_what_the_load_has_found_damaged_is_read_to_verify_it():
    loads = Loads({}, steps=2)
    loads.errors[2] = DAMAGED
    damage(f"{loads.run.url}/step-2", b"a remark")
    with pytest.raises(RetryableError):
        loads.newest()
    loads.errors[2] = CheckpointCorruptError("damaged", key="note")
    assert loads.newest().step == 1


@pytest.mark.parametrize("is_deleted", [False, True])
def test_a_step_that_lacks_an_object_or_is_deleted_meanwhile_is_skipped(is_deleted):
    loads = Loads({}, steps=2)
    loads.errors[2] = CheckpointCorruptError("an object is missing")
    url = f"{loads.run.url}/step-2"
    store = StoreSpec(url).open()

    def load(step: int) -> Any:
        if step == 2 and is_deleted:
            delete(store)
        elif step == 2:
            store.delete(next(meta.key for meta in store.list() if meta.key.endswith(".distcp")))
        return loads.load(step)

    assert load_newest(loads.run, None, load).step == 1
