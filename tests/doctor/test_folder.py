"""`dcp-objstore doctor --local`: right about a folder for copies, and nothing of it stays."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from dcp_objstore.config import Local
from dcp_objstore.doctor import Finding, check_folder
from dcp_objstore.local import room
from dcp_objstore.local.folder import home_of
from tests.support.command_line import run, run_here

CHECKS = [*("local folder", "local file system", "local room"), *("local memory", "local speed")]


@pytest.fixture
def in_memory() -> Iterator[Path]:
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("no /dev/shm")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


def examine(folder: Path) -> dict[str, Finding]:
    found = list(check_folder(Local(str(folder))))
    assert [one.check for one in found] == CHECKS
    assert all(one.text for one in found)
    assert all(one.advice for one in found if one.status in ("failed", "warning")), found
    return {one.check: one for one in found}


def on_tmpfs(tmp_path: Path, options: str) -> dict[str, Mapping[str, object]]:
    """Examine a tmpfs of these options, in a mount namespace of its own."""
    folder = tmp_path / "tmpfs"
    folder.mkdir()
    script = (
        'mount -t tmpfs -o "$1" tmpfs "$2" || exit 99;'
        ' exec "$3" -m dcp_objstore doctor --json --local "$2"'
    )
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", script, "sh", options, str(folder), sys.executable],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 99 or "unshare" in done.stderr:
        pytest.skip("no file system can be mounted here")
    return {one["check"]: one for one in json.loads(done.stdout)["checks"]}


def test_a_good_folder_passes_and_is_left_as_it_was(tmp_path):
    found = examine(tmp_path)
    statuses = {name: one.status for name, one in found.items() if name != "local speed"}
    assert set(statuses.values()) <= {"ok", "not applicable", "not made"}
    # On a busy machine it may be a warning.
    assert found["local speed"].details["write_to_copy"] > 0
    assert list(tmp_path.iterdir()) == []
    home_of(str(tmp_path)).mkdir(0o700)
    assert home_of(str(tmp_path)).name in examine(tmp_path)["local folder"].text
    assert list(home_of(str(tmp_path)).iterdir()) == []


def test_a_folder_in_memory_is_bounded_by_memory(in_memory, tmp_path, monkeypatch):
    assert examine(in_memory)["local file system"].details["type"] == "tmpfs"
    """By the limit of the job's own cgroup, and not only the root's."""
    group = tmp_path / "slurm" / "job_7"
    group.mkdir(parents=True)
    limits = {"memory.max": 1 << 30, "memory.current": 900 << 20}
    for name, value in limits.items():
        (group / name).write_text(f"{value}\n")
    (group / "memory.stat").write_text("inactive_file 0\nactive_file 0\n")
    (tmp_path / "self").write_text("0::/slurm/job_7\n")
    monkeypatch.setattr(room, "_OWN_CGROUPS", tmp_path / "self")
    monkeypatch.setattr(room, "_MOUNTED", tmp_path)
    found = examine(in_memory)
    left_bytes = (1 << 30) - (900 << 20) - (1 << 30) // 10
    assert found["local memory"].status == "warning"
    assert "limits.memory" in found["local memory"].advice
    assert found["local memory"].details == {"left_bytes": left_bytes}
    assert found["local room"].details["may_take_bytes"] == left_bytes
    (group / "memory.current").write_text(f"{1 << 30}\n")
    full = examine(in_memory)
    assert {full[f"local {name}"].status for name in ("room", "memory")} == {"failed"}
    assert full["local speed"].status == "not made"


def test_the_shm_of_a_container_is_noticed(tmp_path):
    found = on_tmpfs(tmp_path, "size=64m")
    assert found["local room"]["status"] == "warning"
    for word in ("--shm-size", "emptyDir", "medium: Memory"):
        assert word in found["local room"]["advice"]
    assert found["local speed"]["details"]["read_to_copy"] > 0


def test_a_tmpfs_with_huge_pages_that_is_larger_than_memory(tmp_path):
    found = on_tmpfs(tmp_path, "size=100t,huge=always")
    assert "huge=always" in found["local file system"]["text"]
    assert found["local file system"]["advice"] == ""
    assert found["local memory"]["status"] == "warning"


@pytest.mark.parametrize("kind", ["nfs4", "fuse.sshfs", "overlay", "hugetlbfs", "ramfs"])
def test_a_file_system_that_does_not_suit_is_named(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(
        "dcp_objstore.doctor.folder.mount_of", lambda device: room.Mount(kind, "rw")
    )
    found = examine(tmp_path)["local file system"]
    assert found.status == ("failed" if kind in ("hugetlbfs", "ramfs") else "warning")
    assert kind in found.text


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda node: node.rmdir(), "no such folder"),
        (lambda node: (node.rmdir(), node.write_text("a file")), "Not a directory"),
        (lambda node: home_of(str(node)).mkdir(0o755), "only this user"),
        (lambda node: home_of(str(node)).symlink_to("/"), "no link"),
    ],
)
def test_a_folder_that_is_not_used_fails(tmp_path, make, reason):
    node = tmp_path / "node"
    node.mkdir()
    make(node)
    found = examine(node)
    assert found["local folder"].status == "failed"
    assert reason in found["local folder"].text
    assert {found[name].status for name in CHECKS[1:]} == {"not made"}
    done = run_here("doctor", "--local", str(node))
    assert done.returncode == 1
    assert "FAILED: local folder" in done.stdout.splitlines()


def test_a_store_and_a_folder_are_checked_together(tmp_path):
    (tmp_path / "node").mkdir()
    url, folder = f"file://{tmp_path}/run", str(tmp_path / "node")
    answer = json.loads(run_here("doctor", url, "--local", folder, "--json").stdout)
    assert (answer["url"], answer["local"], answer["ok"]) == (url, folder, True)
    checks = [one["check"] for one in answer["checks"]]
    assert checks[0] == "versions"
    assert checks[-len(CHECKS) :] == CHECKS
    shown = run_here("doctor", url, "--local", folder).stdout.splitlines()
    assert [line for line in shown if line in (url, folder)] == [url, folder]
    assert "fit to hold checkpoints and copies of checkpoints" in shown
    alone = json.loads(run_here("doctor", "--local", folder, "--json").stdout)
    assert alone["url"] is None
    assert json.loads(run_here("doctor", url, "--json").stdout)["local"] is None


def test_without_a_url_and_a_folder_there_is_nothing_to_check():
    done = run("doctor")
    assert done.returncode == 2
    assert "--local" in done.stderr
