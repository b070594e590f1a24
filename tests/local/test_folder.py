"""The folder of copies on a node: who may use it, what stays in it, and what is removed."""

from __future__ import annotations

import gc
import os
import re
import secrets
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

import dcp_objstore as dos
from dcp_objstore.config import MIB
from dcp_objstore.errors import ConfigError, PermissionDeniedError
from dcp_objstore.local import copies, folder
from dcp_objstore.stores import StoreSpec
from dcp_objstore.stores.local import LOCK_POLICY, TEMPORARY
from tests.support.node_copies import Node, open_files, restart, state_of
from tests.support.wrapped_stores import Fault, FaultStore, Request, Through

DAY = 24 * 3600
KIB = 1024


def run_of(node: Node) -> Path:
    (path,) = folder.folders_in(node.home)
    return path


def beside(node: Node, name: str, max_kib: int | None = None) -> Node:
    """Another run on the same node."""
    return Node(node.folder, f"{node.run}-{name}", None if max_kib is None else max_kib * KIB)


# --- what is not ours, is not used


def give_away(path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root gives folders away")
    os.chown(path, 12345, -1)


def open_to_all(path: Path) -> None:
    path.chmod(0o701)  # even to enter it


def link_instead(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def fifo_instead(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    os.mkfifo(path, 0o600)


@pytest.mark.parametrize("spoil", [give_away, open_to_all, link_instead, fifo_instead])
def test_a_folder_that_others_could_have_made_is_not_used(node, caplog, spoil):
    node.save(1)
    spoil(node.home)
    before = {path: path.lstat().st_ino for path in node.folder.rglob("*")}
    opened = open_files(node.folder)
    assert node.load(1).local_bytes == 0
    assert len(node.unused) == 1
    node.save(2)
    assert len(node.unused) == 2, "one event for each save and load"
    assert {path: path.lstat().st_ino for path in node.folder.rglob("*")} == before
    assert open_files(node.folder) == opened
    assert sum("no copies in" in line for line in caplog.messages) == 1


def test_what_is_no_folder_is_one_warning_for_each_kind_of_error(tmp_path, caplog):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "file").touch()
    for warnings, kind in enumerate(("missing", "fifo", "file", "file"), 1):
        node = Node(tmp_path / kind, f"memory://{secrets.token_hex(6)}/run")
        node.save(1)
        assert node.load(1).local_bytes == 0
        assert len(node.unused) == 2
        assert sum("no copies in" in line for line in caplog.messages) == warnings
        if kind == "file":
            (tmp_path / kind).unlink(missing_ok=True)
    assert not (tmp_path / "missing").exists()


@pytest.mark.parametrize("local", ["s3://bucket/x", "file:///tmp", "", "a\0b", 7, True])
def test_what_is_no_path_is_refused_at_once(local):
    with pytest.raises(ConfigError, match="local"):
        dos.load({}, "memory://nothing/here", local=local)  # type: ignore[arg-type]


def as_fifo(copy: Path) -> None:
    copy.unlink()
    os.mkfifo(copy, 0o600)


def as_link(copy: Path) -> None:
    copy.rename(copy.parent.parent / "elsewhere")
    copy.symlink_to("../elsewhere")


def as_second_name(copy: Path) -> None:
    os.link(copy, copy.parent.parent / "elsewhere")


@pytest.mark.parametrize("spoil", [as_fifo, as_link, as_second_name, give_away])
def test_a_copy_that_is_no_file_of_ours_is_neither_read_nor_written(node, spoil):
    node.save(1)
    spoil(node.copy_of(1))
    elsewhere = run_of(node) / "elsewhere"
    before = elsewhere.read_bytes() if elsewhere.exists() else b""
    assert node.load(1).local_bytes == 0
    for step in (2, 3, 4, 5):
        node.save(step)
        assert node.load(step).fetched_bytes == 0
    assert not before or elsewhere.read_bytes() == before
    assert not node.unused


def test_a_folder_that_is_read_only_is_read(node, monkeypatch, caplog):
    node.save(1)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    with monkeypatch.context() as patched:
        for owner, name in ((Path, "touch"), (os, "utime"), (Path, "mkdir"), (Path, "write_text")):
            patched.setattr(owner, name, refuse)
        restart()
        assert node.load(1).fetched_bytes == 0
        node.save(2)
    assert sum("Read-only" in line for line in caplog.messages) == 1
    assert node.load(2).local_bytes == 0


def test_a_checkpoint_at_the_root_of_a_store_is_a_run_of_its_own(node):
    url = node.run.removesuffix("/run")

    def load() -> dos.reports.LoadReport:
        return dos.load(state_of(1, blank=True), url, local=node.local, on_event=node.note)

    dos.save(state_of(1), url)
    assert (load().local_bytes, list(node.folder.iterdir()), node.unused) == (0, [], [])
    dos.save(state_of(1), url, overwrite=True, local=node.local)
    assert load().fetched_bytes == 0
    (node.home / "half removed").mkdir()
    (node.home / "link").symlink_to("half removed")
    half, run = folder.local_runs(node.local)
    nothing = folder.Files(0, 0)
    assert half == folder.LocalRun(
        folder="half removed",
        url=None,
        endpoint_url=None,
        in_use=False,
        used_at=None,
        steps={},
        unfinished=nothing,
    )
    assert run.used_at is not None
    (copy,) = node.files
    files = folder.Files(1, copy.stat().st_blocks * 512)
    assert (run.url, run.endpoint_url, run.in_use) == (url, None, True)
    assert (run.steps, run.unfinished, run.total) == ({".": files}, nothing, files)
    assert copy.stat().st_mode & 0o777 == 0o600


def test_where_the_system_names_no_boot_a_process_is_alone(monkeypatch):
    monkeypatch.setattr(os, "readlink", Mock(side_effect=OSError))
    assert folder.pid_namespace() == f"{os.uname().nodename} {os.getpid()}"


def test_a_file_that_is_removed_meanwhile_is_not_being_written(tmp_path):
    assert not folder.File(tmp_path / "gone", tmp_path.stat()).is_being_written


# --- what stays


def test_two_states_stay_after_any_number_of_saves_and_restarts(node):
    for step in range(1, 12):
        if step % 3 == 0:
            restart()
            node.load(step - 1)
        node.save(step)
        assert len(node.files) <= 2
        assert node.load(step).fetched_bytes == 0
    assert node.steps == [10, 11]
    assert len(list(run_of(node).iterdir())) == 4, "two steps, the URL and one process"


@pytest.mark.parametrize(
    ("places", "states"),
    [
        ([f"/step-{step}/model" for step in range(6)], 2),
        ([f"/{step}/a/b" for step in range(6)], 2),
        ([f"{name}/step-{step}" for step in range(3) for name in ("", "-other")], 4),
    ],
)
def test_of_each_kind_of_checkpoint_and_of_each_run_two_states_stay(node, places, states):
    number = {}
    for step, place in enumerate(places):
        number[place] = step
        dos.save(state_of(step), f"{node.run}{place}", overwrite=True, local=node.local)
    assert len(node.files) == states
    restart()

    def fetches(place: str) -> bool:
        blank = state_of(number[place], blank=True)
        return dos.load(blank, f"{node.run}{place}", local=node.local).fetched_bytes > 0

    assert [place for place in number if not fetches(place)] == list(number)[-states:]


TEMP = f"{TEMPORARY}0.x"


@pytest.mark.parametrize(
    ("files", "gone"),
    [
        ({"step-1/__0_0.a": 1, "step-2/__0_0.b": 2}, ["step-1/__0_0.a"]),
        ({"step-3/__0_0.a": 1, "step-3/__0_0.b": 2}, ["step-3/__0_0.a"]),
        ({"step-2/__0_0.a": 1, "step-3/__0_0.b": 2}, ["step-2/__0_0.a"]),
        ({"step-2/__0_0.a": 2, "step-3/__0_0.b": 1}, ["step-3/__0_0.b"]),
        # Another rank's: of an earlier save, or of this one, which that rank has begun.
        ({"step-2/__0_0.a": 2, "step-3/__1_0.b": 1}, ["step-3/__1_0.b"]),
        ({"step-2/__0_0.a": 2, "step-3/__1_0.b": 2}, []),
        ({"step-2/__0_0.a": 2, "step-3/__1_0.b": 3}, []),
        ({"step-3/__0_0.a": 1, "step-3/__1_0.b": 0}, []),
        (
            {"step-1/__0_0.a": 1, "step-2/__0_0.b": 4, "step-3/__1_0.c": 2},
            ["step-1/__0_0.a", "step-3/__1_0.c"],
        ),
        ({"best-1/__0_0.a": 1, "step-1/__0_0.b": 2, "step-2/__0_0.c": 3}, ["step-1/__0_0.b"]),
        ({"step-1/__0_0.a": 1, f"step-2/{TEMP}": 9}, [f"step-2/{TEMP}"]),
    ],
)
def test_a_save_writes_over_all_but_the_newest_state(node, files, gone):
    """What is left of these files, of which it has needed none, goes at its end."""

    def save() -> copies.SaveCopies:
        return copies.SaveCopies(node.local, StoreSpec(f"{node.run}/step-3"), Mock(), 0)

    save()
    run = run_of(node)
    for name, seconds in files.items():
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).touch()
        os.utime(run / name, (seconds, seconds))
    save().end()
    assert [name for name in files if not (run / name).exists()] == gone


@pytest.mark.parametrize("loaded", [True, False])
def test_a_save_that_is_killed_leaves_the_newest_step_and_is_written_over(
    node, monkeypatch, *, loaded
):
    """It leaves a file that is not whole, and perhaps one that is: of a step without a commit."""
    for step in (1, 2):
        node.save(step)
    killed = node.copy_of(1).parent.with_name("step-3")
    killed.mkdir()
    shutil.copy(node.copy_of(1), killed / "__0_0.whole.distcp")
    shutil.copy(node.copy_of(1), killed / f"{TEMPORARY}0.__0_1.whole.distcp")
    restart()
    if loaded:
        node.load(2)
    node.save(3)
    assert open_files(node.folder) == []
    assert len(node.files) == 2
    assert node.load(3).fetched_bytes == 0
    assert (node.load(2).fetched_bytes == 0) == loaded


def failing(through: Through) -> Callable[[str], None]:
    """Puts of keys with a text fail from now on."""
    names: list[str] = []
    error = PermissionDeniedError("no more")

    def plan(verb: str, key: str, nth: int) -> Fault | None:
        is_put = verb in ("put", "put_stream")
        return Fault("before", error) if is_put and any(name in key for name in names) else None

    through(lambda store: FaultStore(store, plan))

    def fail(name: str) -> None:
        names[:] = [name]

    return fail


@pytest.mark.parametrize("where", [".distcp", "index", "_COMMIT"])
def test_two_states_stay_after_failed_saves_one_of_them_the_newest(node, through, where):
    fail = failing(through)
    node.run += "/tmp."  # as a file that is not whole once was named
    for step in (1, 2):
        fail("none")
        node.save(2 * step)
        fail(where)
        for _ in range(2):
            with pytest.raises(dos.errors.DcpObjstoreError):
                node.save(2 * step + 1)
            assert len(node.files) <= 2
            assert node.load(2 * step).fetched_bytes == 0  # the newest committed one
        fail("none")
    restart()
    node.save(9)
    node.save(10)
    assert node.steps == [9, 10]


def test_an_upload_that_breaks_off_leaves_neither_a_file_nor_a_descriptor(node, through):
    fail = failing(through)
    node.rows = 6 * 1024  # more than a part
    config = dos.TransferConfig(part_size_bytes=5 * MIB)
    node.save(1, config=config)
    files, opened = node.files, open_files(node.folder)
    fail(".distcp")
    with pytest.raises(PermissionDeniedError):
        node.save(2, config=config)
    gc.collect()
    assert node.files == files
    assert open_files(node.folder) == opened


def before_a_copy_is_whole(patched: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    rename = Path.rename

    def renaming(path: Path, target: Path) -> Path:
        if path.name.startswith(TEMPORARY):
            act()
        return rename(path, target)

    patched.setattr(Path, "rename", renaming)


def test_a_folder_that_is_removed_during_a_save_costs_its_copies(node, monkeypatch):
    with monkeypatch.context() as patched:
        before_a_copy_is_whole(patched, lambda: shutil.rmtree(node.home))
        node.save(1)
    assert len(node.unused) == 1
    node.save(2)
    assert node.load(2).fetched_bytes == 0


def test_a_write_that_hangs_does_not_hold_up_who_gives_the_copy_up(node, monkeypatch):
    monkeypatch.setattr(copies, "LOCK_POLICY", replace(LOCK_POLICY, patience_seconds=0.05))
    writing, go_on = threading.Event(), threading.Event()

    def hang(*_: object) -> int:
        writing.set()
        assert go_on.wait(60)
        return 1

    local, spec = dos.Local(str(node.folder)), StoreSpec(f"{node.run}/step-1")
    save = copies.SaveCopies(local, spec, Mock(), 0)
    monkeypatch.setattr(os, "pwrite", hang)
    with ThreadPoolExecutor(1) as pool:
        with save.tee("k", iter([b"x"]), 1) as buffers:
            uploading = pool.submit(list, buffers)
            assert writing.wait(60)
        assert not uploading.done()
        go_on.set()
        assert uploading.result(60) == [b"x"]


def test_a_process_that_saves_keeps_what_it_has_saved_whatever_it_loads(node):
    for step in (1, 2):
        node.save(step)
    node.load(1)
    node.save(3)
    assert node.load(2).fetched_bytes == 0
    node.load(1)
    node.save(4)
    assert node.steps == [3, 4]


# --- nothing is held


def held(node: Node, process: int) -> list[str]:
    """The files on the node that a process has open."""
    places = [
        str(path.readlink()) for path in Path(f"/proc/{process}/fd").iterdir() if path.is_symlink()
    ]
    return [place for place in places if str(node.folder) in place]


def test_between_saves_and_loads_no_file_is_open_and_no_lock_is_held(node):
    node.save(1)
    node.load(1)
    assert not held(node, os.getpid())


def test_a_forked_child_holds_nothing(node, monkeypatch):
    """A DataLoader's worker that is forked in a save, and lives on."""
    seen: list[list[str]] = []

    def fork() -> None:
        reading, writing = os.pipe()
        if not (child := os.fork()):
            os.write(writing, b".")
            signal.pause()
        os.read(reading, 1)
        seen.extend([held(node, os.getpid()), held(node, child)])
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)

    before_a_copy_is_whole(monkeypatch, fork)
    node.save(1)
    assert [len(places) for places in seen] == [1, 0]
    assert node.load(1).fetched_bytes == 0


# --- other runs and processes


def age(node: Node, run: Path, seconds: float) -> None:
    for mark in run.glob("=used *"):
        os.utime(mark, (time.time() - seconds,) * 2)


def of_process(run: Path, process: str) -> None:
    """Let another process have used a run last."""
    (mark,) = run.glob("=used *")
    mark.rename(run / f"=used {process}")


def test_a_run_that_this_process_has_left_gives_its_room_to_the_next(node):
    for trial in range(4):
        run = beside(node, f"trial-{trial}", 240)
        run.save(1)
        run.save(2)
        assert run.load(2).fetched_bytes == 0
        assert not run.unused


DEAD, ELSEWHERE = 2**22 + 1, "another-boot pid:[1] 7"


@pytest.mark.parametrize(
    ("process", "age_seconds", "is_kept"),
    [
        ("{place} {dead}", 60, False),
        ("{place} 1", DAY - 60, True),
        ("{place} 1", DAY + 60, False),
        (ELSEWHERE, 60, True),  # it may be alive in another container
        (ELSEWHERE, DAY + 60, False),
    ],
)
def test_a_run_gives_its_room_away_only_if_its_processes_have_ended(
    node, process, age_seconds, *, is_kept
):
    node.save(1)
    run = run_of(node)
    of_process(run, process.format(place=folder.pid_namespace(), dead=DEAD))
    age(node, run, age_seconds)
    restart()
    other = beside(node, "other", 150)
    other.save(1)
    assert run.exists() == is_kept
    assert len(other.unused) == is_kept


def test_what_nobody_has_used_for_a_day_is_removed_though_there_is_room(node):
    ages = {}
    for number, hours in enumerate((30, 20, 0)):
        beside(node, str(number)).save(1)
        (run,) = set(folder.folders_in(node.home)) - set(ages)
        ages[run] = hours
        age(node, run, hours * 3600)
    node.save(1)
    assert {hours for run, hours in ages.items() if run.exists()} == {20, 0}


def test_what_another_save_writes_stays(node, monkeypatch):
    """Also if its process cannot be seen."""
    other = beside(node, "other", 150)

    def meanwhile() -> None:
        patched.undo()
        (written,) = node.files
        assert written.name.startswith(TEMPORARY)
        of_process(run_of(node), f"{folder.pid_namespace()} {DEAD}")
        restart()
        other.save(1)
        assert other.unused, "there is no room for it"
        node.save(2)
        assert written.exists()

    with monkeypatch.context() as patched:
        before_a_copy_is_whole(patched, meanwhile)
        node.save(1)
    assert node.steps == [1, 2]


def shapes(requests: list[Request]) -> Counter[tuple[str, str, int]]:
    """Requests without what is drawn at random or says how long something took."""
    return Counter(
        (
            one.verb,
            re.sub(r"[0-9a-f]{8,}", "*", one.key.rpartition("/")[2]),
            one.bytes if one.key.endswith(".distcp") else 0,
        )
        for one in requests
    )


def use(run: str, **options: Any) -> None:
    """In the foreground and in the background, to a new URL and over another checkpoint."""
    for step in (1, 2):
        dos.save(state_of(step), f"{run}/step-{step}", progress=False, **options)
    dos.async_save(state_of(3), f"{run}/step-3", progress=False, **options).result()
    dos.save(state_of(3), f"{run}/step-3", overwrite=True, progress=False, **options)
    dos.load(state_of(3, blank=True), f"{run}/step-3", progress=False, **options)


def test_nobody_who_has_not_asked_for_copies_gets_a_folder(tmp_path, monkeypatch):
    for name in ("HOME", "TMPDIR"):
        (tmp_path / name).mkdir()
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.chdir(tmp_path)
    use(f"memory://{secrets.token_hex(6)}/run")
    assert not [path for path in tmp_path.rglob("*dcp-objstore-*") if path.is_dir()]


def test_copies_change_no_request_but_those_that_they_spare(tmp_path, requests):
    run = f"memory://{secrets.token_hex(6)}/run"
    use(f"{run}-1")
    without = shapes(requests)
    requests.clear()
    use(f"{run}-2", local=str(tmp_path))
    with_copies = shapes(requests)
    spared = without - with_copies
    assert with_copies - without == Counter()
    assert {(verb, key.rpartition(".")[2]) for verb, key, _ in spared} == {("open_range", "distcp")}
    assert not [one for one in with_copies if one[0] == "open_range"]
