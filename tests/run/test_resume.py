"""A job goes on from the newest step that can be loaded."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dcp_objstore as dos
from dcp_objstore.checkpoint.names import MARKER_KEY
from dcp_objstore.errors import (
    CheckpointCorruptError,
    CheckpointGoneError,
    CheckpointNotFoundError,
    DcpObjstoreError,
    PermissionDeniedError,
)
from dcp_objstore.run import resume
from dcp_objstore.run.resume import ResumeReport, SkippedStep, load_newest
from dcp_objstore.stores import StoreSpec
from tests.support.checkpoints import memory_url
from tests.support.wrapped_stores import Request

DAMAGED = CheckpointCorruptError("damaged")
GONE = CheckpointGoneError("gone")
DELETED = CheckpointNotFoundError("deleted")


class Loads:
    """Loads of a run with six steps, some of which fail."""

    def __init__(self, errors: dict[int, DcpObjstoreError], steps: int = 6) -> None:
        self.run = StoreSpec(memory_url())
        for step in range(1, steps + 1):
            dos.save({"w": torch.ones(1)}, f"{self.run.url}/step-{step}", progress=False)
        self.errors = errors
        self.tried: list[int] = []

    def load(self, step: int) -> Any:
        self.tried.append(step)
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
def test_the_newest_step_that_can_be_loaded_is_and_each_is_tried_once(
    errors: dict[int, DcpObjstoreError],
) -> None:
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
    ],
)
def test_damage_to_all_is_raised_as_the_error_of_the_newest_and_others_at_once(
    errors: dict[int, DcpObjstoreError], raised: DcpObjstoreError
) -> None:
    loads = Loads(errors, steps=3)
    with pytest.raises(type(raised), match=raised.message):
        loads.newest()
    assert loads.tried == list(errors)


def test_where_all_steps_are_deleted_meanwhile_there_is_none() -> None:
    errors = {2: GONE, 1: DELETED}
    found = Loads(errors, steps=2).newest()
    assert (found.step, found.load) == (None, None)
    assert [one.step for one in found.skipped] == [2, 1]


def test_only_the_newest_few_markers_are_read(requests: list[Request]) -> None:
    loads = Loads({})
    requests.clear()
    loads.newest()
    assert [one.key for one in requests].count(MARKER_KEY) < 6


@pytest.mark.parametrize("is_first", [True, False])
def test_one_rank_warns_of_a_step_that_is_skipped(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_first: bool
) -> None:
    loads = Loads({2: DAMAGED}, steps=2)
    monkeypatch.setattr(resume, "is_first", lambda _: is_first)
    assert loads.newest().step == 1
    assert ("step 2 cannot be loaded" in caplog.text) is is_first


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_a_run_that_was_listed_whole_is_not_listed_again(
    requests: list[Request], steps: int
) -> None:
    loads = Loads({1: GONE, 2: GONE, 3: GONE}, steps)
    requests.clear()
    assert loads.newest().step is None
    assert [one.verb for one in requests].count("list") == 1
