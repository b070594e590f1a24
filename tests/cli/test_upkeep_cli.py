"""`rm`, `sweep`, `repair`, `pin`, `unpin`: nothing goes without --yes; each says what it did."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import dcp_objstore as dos
from dcp_objstore.checkpoint.read import open_committed
from dcp_objstore.cli import upkeep
from dcp_objstore.errors import (
    CheckpointNotFoundError,
    CheckpointPinnedError,
    InputError,
)
from dcp_objstore.reports import CheckpointSweep, SweepReport
from dcp_objstore.stores import StoreSpec
from tests.support.command_line import run_here
from tests.support.upkeep import DAY_SECONDS, keys, loose, save, state
from tests.support.wrapped_stores import Request, WatchedStore


class Run:
    """Steps below a local folder, of any age."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = f"file://{folder}"

    def step(self, number: int):
        return StoreSpec(f"{self.url}/step-{number}").open()

    def age(self) -> None:
        when = time.time() - 2 * DAY_SECONDS
        for path in self.folder.rglob("*"):
            if path.is_file():
                os.utime(path, (when, when))

    def all(self) -> dict[str, bytes]:
        return {
            str(path.relative_to(self.folder)): path.read_bytes()
            for path in self.folder.rglob("*")
            if path.is_file() and not path.name.startswith(".dcp-objstore.")
        }


@pytest.fixture
def steps(tmp_path: Path) -> Run:
    return Run(tmp_path / "run")


def test_rm_deletes_only_with_yes_and_prints_the_command(steps):
    for number in (1, 2):
        save(steps.step(number))
    before = steps.all()
    planned = run_here("rm", f"{steps.url}/step-1")
    assert planned.returncode == 0
    assert steps.all() == before
    command = planned.stdout.splitlines()[-1].split()
    assert command == ["dcp-objstore", "rm", f"{steps.url}/step-1", "--yes"]
    assert "would delete" in planned.stdout
    done = run_here(*command[1:])
    assert (done.returncode, done.stderr) == (0, "")
    assert "would" not in done.stdout
    assert keys(steps.step(1)) == {"_COMMIT"}
    assert state(steps.step(2)) == "committed"
    again = run_here(*command[1:])
    assert again.returncode == 2
    assert "was deleted" in again.stderr


class SavedMeanwhile(WatchedStore):
    """A store in which a save replaces the checkpoint that is being deleted."""

    due = True

    @contextmanager
    def _around(self, request: Request) -> Iterator[None]:
        if (request.verb, request.key) == ("delete", ".metadata") and self.due:
            SavedMeanwhile.due = False
            save(self.inner, overwrite=True)
        yield


@pytest.mark.parametrize("saved", [False, True])
def test_rm_says_that_a_new_save_has_been_committed_since(steps, capsys, through, saved):
    for number in (1, 2):
        save(steps.step(number))
    SavedMeanwhile.due = saved
    through(SavedMeanwhile)
    upkeep.remove(f"{steps.url}/step-1", grace="0m", yes=True, allow_newest=False, as_json=False)
    assert ("a new save" in capsys.readouterr().out) is saved
    assert state(steps.step(1)) == ("committed" if saved else "deleted")


def test_rm_with_a_grace_period_leaves_the_objects_and_a_sweep_removes_them_when_old(steps, capsys):
    for number in (1, 2):
        save(steps.step(number))
    upkeep.remove(f"{steps.url}/step-1", grace="1h", yes=True, allow_newest=False, as_json=False)
    assert "or a sweep after 24 h" in capsys.readouterr().out
    assert len(loose(steps.step(1))) == 3
    upkeep.sweep(steps.url, grace="24h", yes=True, as_json=False)
    assert "not yet" in capsys.readouterr().out
    assert len(loose(steps.step(1))) == 3
    steps.age()
    upkeep.sweep(steps.url, grace="24h", yes=False, as_json=False)
    shown = capsys.readouterr().out
    assert shown.splitlines()[-1].strip() == f"dcp-objstore sweep {steps.url} --yes"
    assert "3 objects" in shown
    assert len(loose(steps.step(1))) == 3
    upkeep.sweep(steps.url, grace="24h", yes=True, as_json=False)
    assert "removed" in capsys.readouterr().out
    assert keys(steps.step(1)) == {"_COMMIT"}
    assert not loose(steps.step(2))


def test_rm_refuses_the_newest_and_pinned_ones(steps, capsys):
    for number in (1, 2):
        save(steps.step(number))
    url = f"{steps.url}/step-2"
    for yes in (False, True):
        with pytest.raises(InputError, match="--allow-newest"):
            upkeep.remove(url, grace="0m", yes=yes, allow_newest=False, as_json=False)
    upkeep.pin(url, "paper", as_json=False)
    assert capsys.readouterr().out == f"{url}: pinned as paper\n"
    with pytest.raises(CheckpointPinnedError):
        upkeep.remove(url, grace="0m", yes=True, allow_newest=True, as_json=False)
    upkeep.unpin(url, "paper", as_json=True)
    assert json.loads(capsys.readouterr().out) == {"url": url, "pins": []}
    open_committed(steps.step(2))
    for grace, option in (("0m", ""), ("2h", " --grace 2h")):
        upkeep.remove(url, grace=grace, yes=False, allow_newest=True, as_json=False)
        printed = capsys.readouterr().out.splitlines()[-1]
        assert printed == f"  dcp-objstore rm {url}{option} --allow-newest --yes"
    upkeep.remove(url, grace="0m", yes=True, allow_newest=True, as_json=True)
    report = json.loads(capsys.readouterr().out)
    assert (report["url"], report["removed_objects"], report["dry_run"]) == (url, 3, False)


def test_gc_names_what_it_left_and_a_damaged_checkpoint_is_status_4(steps):
    save(steps.step(1))
    steps.step(1).put("notes.txt", b"somebody's")
    save(steps.step(2))
    steps.step(2).put("_COMMIT", b"{}")
    steps.age()
    before = steps.all()
    done = run_here("sweep", steps.url, "--yes")
    assert done.returncode == 4
    assert "step-1/notes.txt" in done.stdout
    assert "step-2: cannot be read" in done.stdout
    assert len(done.stderr.splitlines()) == 1
    assert steps.all() == before


TOTALS = ("deleted", "deleted_bytes", "uploads_aborted", "uploads_bytes")


@pytest.mark.parametrize(
    ("outcome", "uploads", "has_work"),
    [
        ("swept", 0, True),
        ("mended", 0, True),
        ("clean", 1, True),
        *((outcome, 0, False) for outcome in ("clean", "waiting", "lost", "foreign")),
    ],
)
def test_a_dry_run_prints_its_command_where_there_is_something_to_do(
    outcome, uploads, has_work, monkeypatch
):
    url = "file:///run"
    figures = dict(zip(TOTALS, (2, 25, uploads, 30), strict=True))
    step = CheckpointSweep(url=f"{url}/step-1", outcome=outcome, **figures)
    other = CheckpointSweep(url=f"{url}/step-2", outcome="clean", **{**figures, TOTALS[2]: 0})
    report = SweepReport(url=url, checkpoints=(step, other), dry_run=True)
    monkeypatch.setattr(dos, "sweep", lambda *_, **__: report)
    last = run_here("--transport", "fsspec", "sweep", url, "--grace", "25h").stdout.splitlines()[-1]
    command = f"  dcp-objstore --transport fsspec sweep {url} --grace 25h --yes"
    assert (last == command) is has_work
    shown = json.loads(run_here("sweep", url, "--json").stdout)
    totals = {name: shown[name] for name in TOTALS}
    assert totals == dict(zip(TOTALS, (4, 50, uploads, 60), strict=True))


def test_repair_says_what_it_did(steps, capsys):
    import torch

    url = f"{steps.url}/step-1"
    dos.save({"a": torch.ones(3)}, url, progress=False)
    steps.step(1).delete(".metadata")
    for dry_run, told in ((True, "would be written"), (False, "was written")):
        upkeep.repair(url, dry_run=dry_run, as_json=False)
        assert told in capsys.readouterr().out
        assert (".metadata" in keys(steps.step(1))) is not dry_run
    upkeep.repair(url, dry_run=False, as_json=False)
    assert "nothing to repair" in capsys.readouterr().out
    upkeep.repair(url, dry_run=False, as_json=True)
    assert json.loads(capsys.readouterr().out)["dot_metadata"] is None
    with pytest.raises(CheckpointNotFoundError):
        upkeep.repair(f"{steps.url}/step-9", dry_run=False, as_json=False)
