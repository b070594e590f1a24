"""No room and a broken disk: the same checkpoints, the same values, and no error."""

from __future__ import annotations

import errno
import gc
import itertools
import os
import secrets
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import dcp_objstore as dos
from dcp_objstore.local import room
from dcp_objstore.local.folder import FOLDER, home_name, opened
from tests.support.campaign import cases
from tests.support.node_copies import Node, restart

KIB, MIB = 1024, 1024 * 1024


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 16 MiB."""
    place = tmp_path / "tmpfs"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(place)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("only root may mount a tmpfs")
    yield place
    restart()
    gc.collect()  # closes the folder
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def warnings(caplog: pytest.LogCaptureFixture) -> int:
    return sum("no copies in" in line for line in caplog.messages)


# --- no room


# Two states fit, one and a half, and half a one; the file system keeps a tenth for others.
@pytest.mark.parametrize(("rows", "whole"), [(6 * KIB, 5), (10 * KIB, 1), (18 * KIB, 0)])
def test_a_tmpfs_that_is_too_small_fails_nothing(
    tmpfs: Path, caplog: pytest.LogCaptureFixture, rows: int, whole: int
) -> None:
    node = Node(tmpfs, f"memory://{secrets.token_hex(6)}/run", rows=rows)
    reports = []
    for step in range(1, 6):
        node.save(step)
        reports.append(node.load(step))
        assert len(node.files) <= 2
        free = os.statvfs(tmpfs)
        assert free.f_bavail * free.f_frsize >= 1.5 * MIB
    assert sum(report.fetched_bytes == 0 for report in reports) >= whole
    assert warnings(caplog) == (whole < 5)
    assert node.load(1, local=None).fetched_bytes > 0


@pytest.mark.parametrize("room_kib", [0, 50, 150, 230, 1000])
def test_max_bytes_are_never_exceeded(
    node: Node, caplog: pytest.LogCaptureFixture, room_kib: int
) -> None:
    """A state takes 101 KiB; the files of a folder are whole pages."""
    node.max_bytes = room_kib * KIB
    for step in range(1, 6):
        node.save(step)
        assert node.load(step).total_bytes > 100 * KIB
        taken = sum(
            path.stat().st_blocks * 512 for path in node.folder.rglob("*") if path.is_file()
        )
        assert taken <= max(node.max_bytes, 4 * KIB), "url, the smallest file"
    assert len(node.files) == min(2, room_kib // 105)
    assert warnings(caplog) == (len(node.files) < 2)
    assert len(node.unused) <= 5


def test_max_bytes_give_no_room_that_the_file_system_does_not_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    system = SimpleNamespace(f_bavail=3, f_frsize=4 * KIB, f_blocks=10**6)
    monkeypatch.setattr(os, "fstatvfs", lambda _: system)
    with opened(str(tmp_path), FOLDER) as folder:
        rooms = [room.room_bytes(folder, most, None) for most in (10 * KIB, 100 * KIB)]
    assert rooms == [10 * KIB, 12 * KIB]


def test_a_save_of_many_objects_says_once_that_there_is_no_room(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    node.rows, node.max_bytes = 40 * KIB, 8 * KIB
    config = dos.TransferConfig(max_object_size_bytes=8 * MIB)
    for count in (1, 2):
        node.save(count, config=config)
        assert len(node.unused) == count
    assert warnings(caplog) == 1
    node.max_bytes = None
    restart()
    node.save(3, config=config)
    assert len(node.copies) > 1


def test_values_whose_size_was_not_known_are_not_beyond_max_bytes(node: Node) -> None:
    """And what frames each of many small tensors."""
    for number, state in enumerate(
        (
            {"plain": [str(item) * (MIB // 2) for item in range(9)]},
            {f"layer.{number}": torch.ones(1) for number in range(3000)},
        )
    ):
        for max_bytes, whole in ((2 * MIB, 0), (24 * MIB, 2)):
            url = f"{node.run}-{number}-{whole}"
            local = dos.Local(str(node.folder), max_bytes=max_bytes)
            for step in (1, 2):
                dos.save(state, f"{url}/step-{step}", local=local, progress=False)
                files = [path for path in node.folder.rglob("*") if path.is_file()]
                assert sum(path.stat().st_blocks * 512 for path in files) <= max_bytes
            assert len(node.files) == whole
            shutil.rmtree(node.home)
            restart()


def test_a_tmpfs_leaves_memory_to_the_job(tmpfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(tmpfs, f"memory://{secrets.token_hex(6)}/run")
    monkeypatch.setattr(room, "free_memory_bytes", lambda: [10 * MIB, 50 * KIB])
    node.save(1)
    assert node.files == []
    monkeypatch.setattr(room, "free_memory_bytes", list)
    node.save(2)
    assert node.steps == [2]


def test_memory_below_the_limit_of_a_cgroup_counts_without_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(**files: object) -> None:
        for name, body in files.items():
            (tmp_path / name.replace("_", ".")).write_text(f"{body}\n")

    monkeypatch.setattr(room, "_CGROUPS", tmp_path)
    machine = room.free_memory_bytes()
    statistics = f"anon 1\ninactive_file {300 * MIB}\nactive_file {100 * MIB}\nshmem 7"
    write(memory_max=1000 * MIB, memory_current=700 * MIB, memory_stat=statistics)
    (free,) = room.free_memory_bytes()[len(machine) :]
    assert free == (1000 - (700 - 400) - 100) * MIB
    write(memory_max="max")
    assert len(room.free_memory_bytes()) == len(machine)


# --- errors of the disk


class Disk:
    """The calls that change the file system, of which one fails, and perhaps all later ones.

    Attributes:
        calls: how many calls there were.
    """

    def __init__(self, patched: pytest.MonkeyPatch, node: Node) -> None:
        self.calls = 0
        self._fails_at, self._error, self._for_good = 0, 0, False
        self._files = str(node.folder)
        for name in ("pwrite", "ftruncate", "rename", "posix_fallocate", "open", "mkdir", "preadv"):
            patched.setattr(os, name, self._failing(getattr(os, name)))
        for name in ("scandir", "utime", "fstatvfs"):
            patched.setattr(os, name, self._failing(getattr(os, name)))

    def fail(self, at: int, error: int, *, for_good: bool) -> None:
        self.calls, self._fails_at, self._error, self._for_good = 0, at, error, for_good

    def _failing(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **keywords: Any) -> Any:
            # All of ours are by descriptor, but the folder itself.
            is_ours = isinstance(args[0], int) or "dir_fd" in keywords or "src_dir_fd" in keywords
            if is_ours or str(args[0]) == self._files:
                self.calls += 1
                at = self._fails_at
                if at and (self.calls == at or (self._for_good and self.calls > at)):
                    raise OSError(self._error, os.strerror(self._error))
            return call(*args, **keywords)

        return watched


ERRORS = [errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS]


@pytest.mark.parametrize(
    ("error", "for_good", "saved_before"),
    cases(
        itertools.product(ERRORS, (False, True), (0, 3)),
        default=[(errno.ENOSPC, False, 0), (errno.EIO, True, 3)],
    ),
)
@pytest.mark.timeout(600)
def test_an_error_at_any_call_of_a_save_leaves_the_same_checkpoint(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: int,
    saved_before: int,
    *,
    for_good: bool,
) -> None:
    """In the first save, which makes the folders, and in the one that writes files over."""
    node = Node(tmp_path / "node", f"memory://{secrets.token_hex(6)}/run")
    disk = Disk(monkeypatch, node)
    for at in itertools.count(1):
        node.folder = tmp_path / f"node-{at}"
        node.folder.mkdir()
        disk._files = str(node.folder)
        node.run = f"memory://{secrets.token_hex(6)}/run"
        for step in range(1, saved_before + 1):
            node.save(step)
        restart()
        caplog.clear()
        node.unused.clear()
        disk.fail(at, error, for_good=for_good)
        node.save(9)
        reached = disk.calls >= at
        disk.fail(0, 0, for_good=False)
        assert warnings(caplog) <= 1
        assert len(node.unused) <= 1
        node.load(9, local=None)
        node.load(9)
        restart()
        node.save(10)
        node.save(11)
        assert node.load(11).fetched_bytes == 0
        assert len(node.files) == 2
        if not reached:
            break
    assert at > (12 if saved_before else 20), "the disk was asked so often"


@pytest.mark.parametrize("for_good", [False, True])
def test_an_error_at_any_call_of_a_load_loads_the_same_values(
    node: Node, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, *, for_good: bool
) -> None:
    node.rows = 9 * KIB  # three blocks
    node.save(1)
    disk = Disk(monkeypatch, node)
    fetched = []
    at = 0
    while not at or disk.calls >= at:
        at += 1
        restart()
        gc.collect()
        caplog.clear()
        node.unused.clear()
        disk.fail(at, errno.EIO, for_good=for_good)
        fetched.append(node.load(1).fetched_bytes)
        assert warnings(caplog) <= 1
        assert len(node.unused) <= 1
    assert fetched[-1] == 0
    assert max(fetched) > 9 * MIB
    assert at > 12


def test_a_disk_that_dies_while_it_is_read_costs_what_is_left(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One bad sector costs a piece of 4 MiB."""
    node.rows = 40 * KIB
    node.save(1)
    read = os.preadv

    def with_bad_sector(file: int, buffers: Any, at: int) -> int:
        if at <= 9 * MIB < at + len(buffers[0]):
            raise OSError(errno.EIO, "Input/output error")
        return read(file, buffers, at)

    monkeypatch.setattr(os, "preadv", with_bad_sector)
    assert 0 < node.load(1).fetched_bytes <= 5 * MIB


def test_the_name_of_the_folder_says_whose_it_is() -> None:
    assert home_name() == f"dcp-objstore-{os.geteuid()}"
