"""`local ls` and `local rm`: what is on the node, and nothing is removed that a process uses."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dcp_objstore.local.folder import home_name
from tests.support.command_line import run, run_here
from tests.support.left_copies import STATE_BYTES, leave_copies


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("jobs")
    steps = [
        f"file://{folder}/{step}" for step in ("a/step-1", "a/step-9", "a/step-10", "b/step-1")
    ]
    leave_copies(folder / "node", *steps)
    return folder / "node"


@pytest.fixture
def node(left: Path, tmp_path: Path) -> Path:
    """A node with copies of two steps of the run `a` and of one of `b`."""
    return shutil.copytree(left, tmp_path / "node")


def _folder(node: Path, name: str) -> Path:
    (url,) = (one for one in node.glob("*/*/url") if one.read_text().endswith(f"/{name}"))
    return url.parent


@contextmanager
def _in_use(node: Path, name: str) -> Iterator[None]:
    with (_folder(node, name) / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        yield


def _listed(node: Path) -> dict[str, dict[str, object]]:
    done = run_here("local", "ls", str(node), "--json")
    assert done.returncode == 0, done.stderr
    entries = [json.loads(line) for line in done.stdout.splitlines()]
    return {entry["url"].rpartition("/")[2]: entry for entry in entries}


def test_ls_shows_each_run_its_steps_and_what_is_being_written_or_left_over(node: Path) -> None:
    objects = _folder(node, "a") / "objects"
    (objects / "tmp.killed").write_bytes(b"x" * 5000)
    with (objects / "tmp.writing").open("wb") as file, _in_use(node, "a"):
        file.write(b"x" * 100)
        file.flush()
        fcntl.flock(file, fcntl.LOCK_EX)
        listed = _listed(node)
        lines = run_here("local", "ls", str(node)).stdout.splitlines()
    first = listed["a"]
    assert (first["in_use"], listed["b"]["in_use"]) == (True, False)
    assert list(first["steps"]) == ["step-9", "step-10"]
    assert all(STATE_BYTES <= one["bytes"] < 1.1 * STATE_BYTES for one in first["steps"].values())
    assert (first["being_written"]["files"], first["left_over"]["files"]) == (1, 1)
    assert [line.split()[0] for line in lines[1:]] == [
        *("size", "not", "step-1", "in", "step-9", "step-10", "being", "left", "total")
    ]
    assert lines[-1].split()[-2:] == ["2", "runs"]


def test_rm_removes_what_no_process_uses_and_says_what_it_keeps(node: Path) -> None:
    with _in_use(node, "a"):
        refused = run_here("local", "rm", str(node), "--run", _listed(node)["a"]["url"])
        assert refused.returncode == 2
        assert "a process uses it" in refused.stderr
        done = run_here("local", "rm", str(node), "--json")
    assert done.returncode == 0
    removed = {one["url"][-1]: one["removed"] for one in map(json.loads, done.stdout.splitlines())}
    assert removed == {"a": False, "b": True}
    assert _listed(node).keys() == {"a"}
    assert run_here("local", "rm", str(node), "--run", "file:///nowhere").returncode == 2
    url = _listed(node)["a"]["url"]
    assert "removed" in run_here("local", "rm", str(node), "--run", f"{url}/").stdout
    assert "no copies" in run_here("local", "ls", str(node)).stdout
    assert [*node.glob("*/*")] == []


def test_rm_finishes_a_removal_that_was_killed(node: Path) -> None:
    """Its lock is gone already, and it has another name."""
    folder = _folder(node, "a")
    (folder / "lock").unlink()
    folder.rename(folder.with_name("removed.killed"))
    listed = _listed(node)["a"]
    assert (listed["steps"], listed["left_over"]["files"]) == ({}, 2)
    run_here("local", "rm", str(node))
    assert [*node.glob("*/*")] == []


def test_a_job_that_has_run_for_days_has_not_abandoned_its_copies(node: Path) -> None:
    """The lock is as old as the job, the copies are as old as its last save."""
    for name in ("a", "b"):
        os.utime(_folder(node, name) / "lock", (0, 0))
    os.utime(_folder(node, "b") / "objects", (0, 0))
    leave_copies(node, f"{node.parent.as_uri()}/c/step-1")
    assert _listed(node).keys() == {"a", "c"}


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda node: None, "no job of this user"),
        (lambda node: node.rmdir(), "there is no folder"),
        (lambda node: (node.rmdir(), node.write_text("a file")), "Not a directory"),
        (lambda node: (node / home_name()).mkdir(0o755), "others may use it"),
        (lambda node: (node / home_name()).symlink_to("/"), "symbolic link"),
        (lambda node: (node / home_name()).write_text("a file"), "no folder"),
    ],
)
def test_what_is_no_folder_of_copies_is_one_clear_error(tmp_path: Path, make, reason: str) -> None:
    node = tmp_path / "node"
    node.mkdir()
    make(node)
    for command in ("ls", "rm"):
        done = run_here("local", command, str(node))
        assert (done.returncode, done.stdout) == (2, "")
        assert reason in done.stderr
        assert len(done.stderr.splitlines()) == 1
    assert not (node / home_name() / "lock").exists()


def test_a_url_is_no_folder() -> None:
    done = run("local", "ls", "s3://bucket/run")
    assert done.returncode == 2
    assert "ConfigError" in done.stderr
