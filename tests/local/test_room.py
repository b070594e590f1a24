"""No room and a broken disk: the same checkpoints, the same values, and no error."""

from __future__ import annotations

import errno
import itertools
import os
import secrets
import shutil
import stat
import subprocess
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

import dcp_objstore as dos
from dcp_objstore.local import copies, folder as room
from dcp_objstore.stores import StoreSpec
from dcp_objstore.stores.local import LOCK_POLICY, locked
from tests.support.campaign import cases
from tests.support.node_copies import Node, restart

KIB, MIB = 1024, 1024 * 1024


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 4 MiB."""
    place = tmp_path / "tmpfs"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("only root may mount a tmpfs")
    yield place
    subprocess.run(["umount", str(place)], check=True)  # nothing is held, so it is not busy


def warnings(caplog: pytest.LogCaptureFixture) -> int:
    return sum("no copies in" in line for line in caplog.messages)


# --- no room


# Two states fit, one and a half, and half a one; the file system keeps a tenth for others.
@pytest.mark.parametrize(("rows", "whole"), [(1500, 5), (2500, 1), (4500, 0)])
def test_a_tmpfs_that_is_too_small_fails_nothing(tmpfs, caplog, rows, whole):
    node = Node(tmpfs, f"memory://{secrets.token_hex(6)}/run", rows=rows)
    reports = []
    for step in range(1, 6):
        node.save(step)
        reports.append(node.load(step))
        assert len(node.files) <= 2
        free = os.statvfs(tmpfs)
        assert free.f_bavail * free.f_frsize >= 0.375 * MIB
    assert sum(report.fetched_bytes == 0 for report in reports) >= whole
    assert warnings(caplog) == (whole < 5)
    assert node.load(1, local=None).fetched_bytes > 0


@pytest.mark.parametrize("room_kib", [0, 50, 150, 1000])
def test_max_bytes_are_never_exceeded(node, caplog, room_kib):
    """A state takes 101 KiB; the files of a folder are whole pages."""
    node.max_bytes = room_kib * KIB
    for step in range(1, 6):
        node.save(step)
        assert node.load(step).total_bytes > 100 * KIB
        assert room.sizes_of(node.folder)[0] <= max(node.max_bytes, 4 * KIB), "the URL's page"
    assert len(node.files) == min(2, room_kib // 105)
    assert warnings(caplog) == (len(node.files) < 2)
    assert len(node.unused) <= 5


def test_max_bytes_give_no_room_that_the_file_system_does_not_have(tmp_path, monkeypatch):
    system = SimpleNamespace(f_bavail=3, f_frsize=4 * KIB, f_blocks=20)
    monkeypatch.setattr(os, "statvfs", lambda _: system)
    rooms = [room.room_bytes(tmp_path / "home", most) for most in (10 * KIB, 100 * KIB, None)]
    assert rooms == [10 * KIB, 12 * KIB, 4 * KIB], "by default it keeps a tenth"


def test_a_file_takes_its_blocks_and_if_it_is_not_whole_its_size(tmp_path, monkeypatch):
    files = {
        "whole": SimpleNamespace(st_mode=stat.S_IFREG, st_blocks=3, st_size=1000),
        "begun": SimpleNamespace(st_mode=stat.S_IFREG, st_blocks=2, st_size=5000),
        "other": SimpleNamespace(st_mode=stat.S_IFIFO, st_blocks=9, st_size=9000),
    }
    for name in files:
        (tmp_path / name).touch()
    monkeypatch.setattr(os, "lstat", lambda path: files[Path(path).name])
    assert room.sizes_of(tmp_path) == (5 * 512, 3 * 512 + 5000)


def test_a_file_counts_as_large_as_it_will_be(tmp_path):
    """So two ranks that begin at a time do not take the same room."""
    home = tmp_path / "home"
    home.mkdir()
    with (home / "being-written").open("wb") as file:
        file.truncate(10 * MIB)
    assert room.room_bytes(home, 25 * MIB) == 15 * MIB


def test_a_file_may_take_what_is_free_besides_what_it_has(node, monkeypatch):
    save = copies.SaveCopies(dos.Local(str(node.folder)), StoreSpec(node.run), Mock(), 0)
    with (node.folder / "file").open("wb") as file:
        for free, wanted, has in ((10, 10, 10), (5, 15, 15), (-1, 15, 15), (-1, 9, 15), (4, 20, 0)):
            monkeypatch.setattr(room, "room_bytes", lambda *_, free=free: free)
            with nullcontext() if has else pytest.raises(room.LocalError, match="room for 4 B"):
                save.reserve(file.fileno(), wanted)
            assert os.fstat(file.fileno()).st_size == (has or 15)
    for size_bytes in (5, 1):  # once there was no room, nothing is copied
        buffers = iter([b"x"])
        with save.tee("key", buffers, size_bytes) as teed:
            assert teed is buffers


def test_a_save_of_many_objects_says_once_that_there_is_no_room(node, caplog):
    node.rows, node.max_bytes = 40 * KIB, 8 * KIB
    config = dos.TransferConfig(max_object_size_bytes=8 * MIB)
    for count in (1, 2):
        node.save(count, config=config)
        assert len(node.unused) == count
    assert warnings(caplog) == 1


def test_a_value_whose_size_was_not_known_is_not_beyond_max_bytes(node):
    state = {"plain": [str(item) * (MIB // 2) for item in range(9)]}
    for max_bytes, copies_there in ((2 * MIB, 0), (24 * MIB, 1)):
        local = dos.Local(str(node.folder), max_bytes=max_bytes)
        dos.save(state, f"{node.run}/{max_bytes}", local=local, progress=False)
        assert room.sizes_of(node.folder)[1] <= max_bytes
        assert len(node.files) == copies_there


def test_a_lock_that_a_stopped_process_holds_costs_the_copies_and_no_more(node, monkeypatch):
    node.save(1)
    monkeypatch.setattr(copies, "LOCK_POLICY", replace(LOCK_POLICY, patience_seconds=0.01))
    with locked(node.home, LOCK_POLICY):
        node.save(2)
        assert node.load(1).fetched_bytes == 0
    assert [event.reason for event in node.unused if "fuser" in event.reason]
    assert node.load(2).local_bytes == 0


# --- memory


def test_a_tmpfs_leaves_memory_to_the_job(tmpfs, monkeypatch):
    node = Node(tmpfs, f"memory://{secrets.token_hex(6)}/run")
    monkeypatch.setattr(room, "free_memory_bytes", lambda: [10 * MIB, 50 * KIB])
    node.save(1)
    assert node.files == []
    monkeypatch.setattr(room, "free_memory_bytes", list)
    node.save(2)
    assert node.steps == [2]


def test_where_nothing_says_what_a_file_system_is_it_is_not_known(monkeypatch):
    assert room._file_system_of(Path("/proc").stat().st_dev) == "proc"
    monkeypatch.setattr(Path, "read_text", Mock(side_effect=PermissionError))
    assert room._file_system_of(Path("/proc").stat().st_dev) is None


V2 = ("memory.max", "memory.current", "")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")


@pytest.mark.parametrize(
    ("own", "root", "names"),
    [
        ("0::/slurm/job_7/step:0/new/odd", "", V2),
        ("0::/slurm/job_7/step:0/new/odd", "unified", V2),
        ("4:cpu,memory:/slurm/job_7/step:0/new/odd", "memory", V1),
    ],
)
def test_the_limit_of_each_cgroup_from_the_own_one_up_counts_without_the_page_cache(
    tmp_path, monkeypatch, own, root, names
):
    monkeypatch.setattr(room, "_OWN_CGROUPS", tmp_path / "self")
    monkeypatch.setattr(room, "_MOUNTED", tmp_path)
    read = Path.read_text
    texts = {Path("/proc/meminfo"): "MemTotal: 4000 kB\nMemFree: 9 kB\nMemAvailable: 1000 kB\n"}
    monkeypatch.setattr(
        Path, "read_text", lambda path, **settings: texts.get(path) or read(path, **settings)
    )
    machine = [1000 * KIB - 400 * KIB]
    assert room.free_memory_bytes() == machine, "without cgroups"
    (tmp_path / "self").write_text(f"3:pids:/elsewhere\n{own}\n")
    limit, used, total = names
    cached = f"{total}inactive_file {300 * MIB}\n{total}active_file {100 * MIB}\n"
    usual = f"inactive_file 0\nactive_file 0\n{cached}shmem 7\n"

    def bound(place: str, most: object, held_mib: int, counts: str = usual) -> None:
        group = tmp_path / root / place
        group.mkdir(parents=True, exist_ok=True)
        (group / limit).write_text(f"{most}\n")
        (group / used).write_text(f"{held_mib * MIB}\n")
        (group / "memory.stat").write_text(counts)

    bound("slurm/job_7", 1000 * MIB, 700)
    bound("slurm/job_7/step:0", "max", 500)
    bound("slurm", 8000 * MIB, 500)
    bound("", 9000 * MIB, 600)  # a container's, whose name only the host knows
    bound("elsewhere", 1, 0)
    bound("slurm/job_7/step:0/new", 1, 0, "")  # a kernel that says something else
    bound("slurm/job_7/step:0/new/odd", 1, 0, "inactive_file\n")
    groups = [(1000 - 300 - 100) * MIB, (8000 - 100 - 800) * MIB, (9000 - 200 - 900) * MIB]
    assert room.free_memory_bytes() == machine + groups


# --- errors of the disk


class Disk:
    """The calls that use the folder, of which one fails, and perhaps all later ones.

    Attributes:
        calls: how many calls there were.
    """

    def __init__(self, patched: pytest.MonkeyPatch, node: Node) -> None:
        self.calls = 0
        self._fails_at, self._error, self._for_good = 0, 0, False
        self._node = node
        names = ("pwrite", "ftruncate", "preadv", "open", "mkdir", "rename", "utime", "scandir")
        for name in (*names, "statvfs", "stat", "lstat", "unlink", "rmdir"):
            patched.setattr(os, name, self._failing(getattr(os, name)))

    def fail(self, at: int, error: int, *, for_good: bool) -> None:
        self.calls, self._fails_at, self._error, self._for_good = 0, at, error, for_good

    def _failing(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(path: Any = ".", *args: Any, **keywords: Any) -> Any:
            place = str(Path(f"/proc/self/fd/{path}").readlink() if isinstance(path, int) else path)
            if place.startswith(str(self._node.folder)):
                self.calls += 1
                at = self._fails_at
                if at and (self.calls == at or (self._for_good and self.calls > at)):
                    raise OSError(self._error, os.strerror(self._error))
            return call(path, *args, **keywords)

        return watched


SOME = [(errno.ENOSPC, False, 0, 7), (errno.EIO, True, 3, 7)]
ERRORS = [errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS, errno.EMFILE]


@pytest.mark.parametrize(
    ("error", "for_good", "saved_before", "stride"),
    cases(
        [*itertools.product(ERRORS, (False, True), (0, 3), (1,)), *SOME],
        default=SOME,
    ),
)
@pytest.mark.timeout(600)
def test_an_error_at_any_call_of_a_save_leaves_the_same_checkpoint(
    tmp_path, monkeypatch, caplog, error, saved_before, stride, *, for_good
):
    """In the first save, which makes the folders, and in one that writes files over."""
    node = Node(tmp_path / "first", f"memory://{secrets.token_hex(6)}/run")
    node.folder.mkdir()
    for step in range(1, saved_before + 1):
        node.save(step)
    disk = Disk(monkeypatch, node)
    for at in itertools.count(1, stride):
        node.folder = tmp_path / f"node-{at}"
        shutil.copytree(tmp_path / "first", node.folder)
        step = 10 * at
        restart()
        caplog.clear()
        node.unused.clear()
        disk.fail(at, error, for_good=for_good)
        node.save(step)
        reached = disk.calls >= at
        disk.fail(0, 0, for_good=False)
        assert warnings(caplog) <= 1
        assert len(node.unused) <= 1
        node.load(step, local=None)
        node.load(step)
        node.save(step + 1)
        node.save(step + 2)
        assert node.load(step + 2).fetched_bytes == 0
        assert len(node.files) == 2
        if not reached:
            break
    assert at > 20, "the disk was asked so often"


@pytest.mark.parametrize("for_good", [False, True])
def test_an_error_at_any_call_of_a_load_loads_the_same_values(
    node, monkeypatch, caplog, *, for_good
):
    node.rows = 9 * KIB  # three blocks
    node.save(1)
    disk = Disk(monkeypatch, node)
    fetched = []
    at, reached = 0, True
    while reached:
        at += 1
        restart()
        caplog.clear()
        node.unused.clear()
        disk.fail(at, errno.EIO, for_good=for_good)
        fetched.append(node.load(1).fetched_bytes)
        reached = disk.calls >= at
        disk.fail(0, 0, for_good=False)
        assert warnings(caplog) <= 1
        assert len(node.unused) <= 1
        assert len(node.copies) == 1, "what cannot be read is not damaged"
    assert fetched[-1] == 0
    assert max(fetched) > 9 * MIB
    assert at > 7
