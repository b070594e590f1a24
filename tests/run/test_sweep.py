"""`dos.sweep` below a URL: where it looks, what it reports, and what it leaves alone."""

from __future__ import annotations

import os
import secrets
import time
from pathlib import Path
from typing import Any

import pytest

import dcp_objstore as dos
from dcp_objstore.checkpoint import probe as probes, sweep as rule
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
    LostRaceError,
    PermissionDeniedError,
    StoreUnavailableError,
    UnsupportedError,
)
from dcp_objstore.run import sweep as sweeping
from dcp_objstore.run.sweep import SweepReport, sweep_below
from dcp_objstore.stores import StoreSpec, open_store
from dcp_objstore.stores.local import TEMPORARY
from tests.support.checkpoints import memory_url
from tests.support.managers import save_each, save_steps, state
from tests.support.wrapped_stores import Fault, FaultStore


def swept(report: SweepReport) -> dict[str, str]:
    return {one.url.removeprefix(report.url).lstrip("/"): one.outcome for one in report.checkpoints}


def age(folder: Path, hours: float = 48) -> None:
    """Make all that is in a folder so old."""
    then = time.time() - hours * 3600
    for path in folder.rglob("*"):
        os.utime(path, (then, then))


@pytest.mark.parametrize(
    ("names", "is_swept"),
    [
        ([MARKER_KEY], False),  # of a step that was deleted: a run has ever more of them
        ([MARKER_KEY, "notes.txt"], True),
        ([beacon_key("0" * 24)], True),
        ([data_key(0, 0, "0" * 24)], True),
        ([index_key("0" * 24)], True),
        ([".probe-" + "0" * 24], True),
        (["notes.txt"], False),
        (["__0_0.distcp"], False),
    ],
)
def test_a_place_is_swept_where_a_save_can_have_left_something(names, is_swept):
    run = memory_url()
    save_each(run, 1)
    for name in names:
        open_store(f"{run}/step-0").put(name, b"")
    report = dos.sweep(run, dry_run=True)
    assert list(swept(report)) == [*(["step-0"] if is_swept else []), "step-1"]


def test_what_a_sweep_has_removed_is_counted_over_all_checkpoints(tmp_path):
    for step in (1, 2):
        folder = tmp_path / f"step-{step}"
        folder.mkdir()
        for name in (data_key(0, 0, new_nonce()), index_key(new_nonce())):
            (folder / name).write_bytes(b"12345")
        (folder / f"{TEMPORARY}0.{data_key(0, 0, new_nonce())}").write_bytes(b"123")
        (folder / f"{TEMPORARY}1.theirs").write_bytes(b"123")
    (tmp_path / "step-3").mkdir()
    (tmp_path / "step-3" / f"{TEMPORARY}2.{MARKER_KEY}").write_bytes(b"1234")
    age(tmp_path)
    for dry_run in (True, False):
        report = dos.sweep(tmp_path.as_uri(), dry_run=dry_run)
        assert swept(report) == {"step-1": "swept", "step-2": "swept", "step-3": "clean"}
        assert (report.deleted, report.deleted_bytes) == (4, 20)
        assert (report.uploads_aborted, report.uploads_bytes) == (3, 10)
        assert (report.url, report.dry_run) == (tmp_path.as_uri(), dry_run)
        assert (report.uploads_unseen, report.damaged) == (None, ())
        assert [one.dry_run for one in report.checkpoints] == [dry_run] * 3
    left = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    left.discard(".dcp-objstore.lock")
    assert left == {f"{TEMPORARY}1.theirs", MARKER_KEY}


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (LostRaceError("another job came first"), "lost"),
        (CheckpointCorruptError("cannot be read"), "damaged"),
        (UnsupportedError("too new"), "damaged"),
    ],
)
def test_a_sweep_goes_on_after_a_checkpoint_that_it_must_leave(monkeypatch, error, outcome):
    run = f"memory://{secrets.token_hex(6)}"
    save_each(run, 1, 2)
    dos.save(state(0), run)  # no run can be above it
    really = rule.sweep

    def sweep(store: Any, **settings: Any) -> Any:
        if store.url.endswith("step-1"):
            raise error
        return really(store, **settings)

    monkeypatch.setattr(rule, "sweep", sweep)
    report = dos.sweep(run)
    assert swept(report) == {"": "clean", "step-1": outcome, "step-2": "clean"}
    assert report.checkpoints[1].reason == error.message
    assert report.damaged == (report.checkpoints[1:2] if outcome == "damaged" else ())


def test_a_claim_that_cannot_be_read_makes_no_step_superseded(tmp_path, through, caplog):
    run = f"{tmp_path.as_uri()}/run"
    save_steps(run, (1, 2))
    with dos.CheckpointManager(run, sweep=False) as manager:
        manager.load(state(0), 1)
        manager.save(3, state(3))
    save_each(f"{run}/unclaimed", 1)
    age(tmp_path)
    errors: list[Exception] = []

    def refuse(_verb: str, key: str, _: int) -> Fault | None:
        return Fault("before", errors[-1]) if errors and key == CLAIM_KEY else None

    def superseded(url: str) -> list[str]:
        report = dos.sweep(url, dry_run=True)
        return [one.url.rpartition("/")[2] for one in report.checkpoints if one.superseded]

    through(lambda store: FaultStore(store, refuse))
    for url in (run, f"{run}/step-2", tmp_path.as_uri()):
        assert superseded(url) == ["step-2"]
    for url in (f"{run}/step-3", f"{run}/unclaimed", f"{run}/unclaimed/step-1"):
        assert superseded(url) == []
    for error in (
        PermissionDeniedError("may not read it"),
        CheckpointCorruptError("damaged"),
        UnsupportedError("too new"),
    ):
        errors.append(error)
        assert superseded(f"{run}/unclaimed") == []  # nor a step that was saved without a claim
        for url in (run, f"{run}/step-2"):
            caplog.clear()
            assert superseded(url) == []
            assert f"steps of superseded jobs in {run} are not swept" in caplog.text


@pytest.mark.parametrize("error", [StoreUnavailableError("down"), UnsupportedError("no boto3")])
def test_uploads_that_cannot_be_listed_are_said_and_the_rest_is_swept(monkeypatch, error):
    run = memory_url()
    save_each(run, 1)

    def fail(_: object) -> None:
        raise error

    monkeypatch.setattr(sweeping, "open_uploads", fail)
    report = dos.sweep(run)
    assert (swept(report), report.uploads_unseen) == ({"step-1": "clean"}, error.message)


def test_a_sweep_asks_nothing_of_a_deleted_step_whose_objects_are_gone(requests):
    run = memory_url()
    save_each(run, 0, 1, 2)

    def sweep() -> tuple[list[str], int]:
        requests.clear()
        report = dos.sweep(run)
        return [one.url.rpartition("/")[2] for one in report.checkpoints], len(requests)

    assert sweep()[0] == ["step-0", "step-1", "step-2"]
    sent = []
    for step in (0, 1):
        dos.delete(f"{run}/step-{step}")
        names, number = sweep()
        assert CLAIM_KEY not in {one.key for one in requests}, "there is none"
        assert names == [f"step-{later}" for later in range(step + 1, 3)]
        sent.append(number)
    assert sent[1] < sent[0]


def test_where_nothing_is_to_be_swept_or_in_a_dry_run_nothing_is_written(tmp_path, requests):
    with pytest.raises(ConfigError, match="grace"):
        dos.sweep(tmp_path.as_uri(), grace_seconds=60)
    assert requests == []
    dos.sweep(tmp_path.as_uri())
    assert {one.verb for one in requests} == {"list"}
    save_each(tmp_path.as_uri(), 1)
    (tmp_path / "step-1" / data_key(0, 0, new_nonce())).touch()
    age(tmp_path, hours=2)
    probes.forget()
    requests.clear()
    graces: list[dict[str, float]] = [{}, {"grace_seconds": 2.5 * 3600}, {"grace_seconds": 3600}]
    planned = [dos.sweep(tmp_path.as_uri(), dry_run=True, **grace) for grace in graces]
    assert [report.deleted for report in planned] == [0, 0, 1]
    assert {one.verb for one in requests} == {"list", "get"}


def test_a_sweep_that_is_told_to_end_leaves_the_checkpoints_that_follow():
    run = memory_url()
    save_each(run, 1, 2, 3)
    answers = iter([False, True])
    report = sweep_below(StoreSpec(run), is_over=answers.__next__)
    assert list(swept(report)) == ["step-1"]
    assert not report.dry_run
