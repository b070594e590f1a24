"""`local ls` and `local rm`: what is on the node, and nothing is removed that a process uses."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from dcp_objstore.local.folder import home_of, pid_namespace
from dcp_objstore.stores.local import TEMPORARY
from tests.support.command_line import run_here
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
    (url,) = (one for one in node.glob("*/*/=url") if one.read_text().endswith(f"/{name}"))
    return url.parent


def _use(node: Path, name: str) -> None:
    """Let a process that is alive have used a run: this one."""
    (_folder(node, name) / f"=used {pid_namespace()} {os.getpid()}").touch()


def _listed(node: Path) -> dict[str, dict[str, object]]:
    done = run_here("local", "ls", str(node), "--json")
    assert done.returncode == 0, done.stderr
    entries = [json.loads(line) for line in done.stdout.splitlines()]
    return {entry["url"].rpartition("/")[2]: entry for entry in entries}


def test_ls_shows_each_run_its_steps_and_what_is_not_whole(left, node):
    step = _folder(node, "a") / "step-9"
    (step / f"{TEMPORARY}killed").write_bytes(b"x" * 5000)
    _use(node, "a")
    with (step / f"{TEMPORARY}writing").open("wb") as file:
        file.write(b"x" * 100)
        file.flush()
        fcntl.flock(file, fcntl.LOCK_EX)
        listed = _listed(node)
        lines = run_here("local", "ls", str(node)).stdout.splitlines()
        (_folder(node, "a") / f"=used {pid_namespace()} {os.getpid()}").unlink()
        # It may be a process that is not seen, in a container.
        assert "a process uses it" in run_here("local", "rm", str(node)).stdout
    first, other, folder = listed["a"], listed["b"], _folder(left, "b")
    (copies,) = other["steps"].values()
    assert other == {
        "url": other["url"],
        "endpoint_url": None,
        "folder": folder.name,
        "in_use": False,
        "used": other["used"],
        "bytes": copies["bytes"],
        "steps": {"step-1": {"files": 1, "bytes": copies["bytes"]}},
        "unfinished": {"files": 0, "bytes": 0},
    }
    assert datetime.now(UTC) - datetime.fromisoformat(other["used"]) < timedelta(hours=1)
    assert first["in_use"]
    assert list(first["steps"]) == ["step-9", "step-10"]
    assert all(STATE_BYTES <= one["bytes"] < 1.1 * STATE_BYTES for one in first["steps"].values())
    assert first["unfinished"]["files"] == 2
    assert [line.split()[0] for line in lines[1:]] == [
        *("size", "not", "step-1", "in", "step-9", "step-10", "unfinished", "total")
    ]
    assert lines[-1].split()[-2:] == ["2", "runs"]


def test_rm_removes_what_no_process_uses_and_says_what_it_keeps(node):
    _use(node, "a")
    done = run_here("local", "rm", str(node), "--json")
    assert done.returncode == 0
    removed = {one["url"][-1]: one["removed"] for one in map(json.loads, done.stdout.splitlines())}
    assert removed == {"a": False, "b": True}
    assert _listed(node).keys() == {"a"}
    (_folder(node, "a") / f"=used {pid_namespace()} {os.getpid()}").unlink()
    assert "removed" in run_here("local", "rm", str(node)).stdout
    assert "no copies" in run_here("local", "ls", str(node)).stdout
    assert [path for path in node.glob("*/*") if path.is_dir()] == []


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda node: None, "no job of this user"),
        (lambda node: node.rmdir(), "No such file"),
        (lambda node: (node.rmdir(), node.write_text("a file")), "Not a directory"),
        (lambda node: (node / home_of(str(node)).name).mkdir(0o755), "only this user"),
        (lambda node: (node / home_of(str(node)).name).symlink_to("/"), "no link"),
        (lambda node: (node / home_of(str(node)).name).write_text("a file"), "must be a folder"),
    ],
)
def test_what_is_no_folder_of_copies_is_one_clear_error(tmp_path, make, reason):
    node = tmp_path / "node"
    node.mkdir()
    make(node)
    for command in ("ls", "rm"):
        done = run_here("local", command, str(node))
        assert (done.returncode, done.stdout) == (2, "")
        assert reason in done.stderr
        assert len(done.stderr.splitlines()) == 1
