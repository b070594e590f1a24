"""The folder of a run on a node: who may use it, what is removed from it, and when."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import secrets
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import dcp_objstore as dos
from dcp_objstore.cli.ranks import Job, say
from dcp_objstore.config import MIB
from dcp_objstore.errors import ConfigError, PermissionDeniedError
from dcp_objstore.local import copies, folder as run_folder
from dcp_objstore.local.folder import LocalError, RunFolder, remove_abandoned, remove_run
from dcp_objstore.local.settings import Local
from tests.support.campaign import cases
from tests.support.node_copies import Node, open_files, restart
from tests.support.ranks import start_workers, wait_for
from tests.support.wrapped_stores import Fault, FaultStore, Through

DAY = 24 * 3600


def run_of(node: Node) -> Path:
    (path,) = (one for one in node.home.iterdir() if one.is_dir())
    return path


# --- what is not ours, is not used


def give_away(path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root gives folders away")
    os.chown(path, 12345, -1)


def open_to_all(path: Path) -> None:
    path.chmod(0o777)


def link_instead(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def file_instead(path: Path) -> None:
    shutil.rmtree(path)
    path.touch(0o600)


def fifo_instead(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    os.mkfifo(path, 0o600)


WHERE: dict[str, Callable[[Node], Path]] = {
    "home": lambda node: node.home,
    "run": run_of,
    "objects": lambda node: run_of(node) / "objects",
}
WAYS = (give_away, open_to_all, link_instead, file_instead, fifo_instead)


@pytest.mark.parametrize(
    ("where", "spoil"),
    cases(
        product(WHERE, WAYS),
        default=[*product(("home",), WAYS), ("run", open_to_all), ("objects", link_instead)],
    ),
)
def test_a_folder_that_others_could_have_made_is_not_used(
    node: Node, caplog: pytest.LogCaptureFixture, spoil: Callable[[Path], None], where: str
) -> None:
    node.save(1)
    restart()
    spoil(WHERE[where](node))
    before = {path: path.lstat().st_ino for path in node.folder.rglob("*")}
    report = node.load(1)
    assert report.local_bytes == 0
    assert len(node.unused) == 1
    node.save(2)
    assert len(node.unused) == 2, "one event for each save and load"
    assert {path: path.lstat().st_ino for path in node.folder.rglob("*")} == before
    assert sum("no copies in" in line for line in caplog.messages) == 1


def test_a_folder_that_is_refused_costs_no_file_descriptor(node: Node) -> None:
    node.save(1)
    for where in WHERE.values():
        restart()
        gc.collect()
        spoiled = where(node)
        spoiled.chmod(0o777)
        node.load(1)
        before = open_files()
        for _ in range(5):
            node.load(1)
        assert open_files() == before
        spoiled.chmod(0o700)
    lock = run_of(node) / "lock"
    lock.unlink()
    lock.symlink_to("elsewhere")
    restart()
    before = open_files()
    node.load(1)
    assert open_files() == before
    assert node.unused


def no_folder(path: Path) -> Path:
    return path / "missing"


def a_file(path: Path) -> Path:
    (path / "file").touch()
    return path / "file"


def a_fifo(path: Path) -> Path:
    os.mkfifo(path / "fifo")
    return path / "fifo"


@pytest.mark.parametrize("make", [no_folder, a_file, a_fifo])
def test_what_is_no_folder_is_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, make: Callable[[Path], Path]
) -> None:
    node = Node(make(tmp_path), f"memory://{secrets.token_hex(6)}/run")
    node.save(1)
    assert node.load(1).local_bytes == 0
    assert len(node.unused) == 2
    assert sum("no copies in" in line for line in caplog.messages) == 1
    assert not no_folder(tmp_path).exists()


@pytest.mark.parametrize("local", ["s3://bucket/x", "file:///tmp", "", "a\0b", 7, True])
def test_what_is_no_path_is_refused_at_once(local: object) -> None:
    with pytest.raises(ConfigError, match="local"):
        dos.load({}, "memory://nothing/here", local=local)  # type: ignore[arg-type]


# --- what is no regular file of ours, is not read


def as_fifo(copy: Path) -> None:
    copy.unlink()
    os.mkfifo(copy, 0o600)


def as_link(copy: Path) -> None:
    copy.rename(copy.parent.parent / "elsewhere")
    copy.symlink_to("../elsewhere")


def as_second_name(copy: Path) -> None:
    os.link(copy, copy.parent.parent / "elsewhere")


def as_folder(copy: Path) -> None:
    copy.unlink()
    copy.mkdir(0o700)


@pytest.mark.parametrize(
    "spoil",
    [as_fifo, as_link, as_second_name, as_folder, give_away],
)
def test_a_copy_that_is_no_file_of_ours_is_neither_read_nor_written(
    node: Node, spoil: Callable[[Path], None]
) -> None:
    node.save(1)
    spoil(node.copy_of(1))
    elsewhere = run_of(node) / "elsewhere"
    before = elsewhere.read_bytes() if elsewhere.exists() else b""
    opened = open_files()
    assert node.load(1).local_bytes == 0
    assert open_files() == opened
    for step in (2, 3, 4, 5):
        node.save(step)
        report = node.load(step)
        assert report.fetched_bytes == 0
    assert elsewhere.exists() == bool(before)
    assert not before or elsewhere.read_bytes() == before
    assert not node.unused


# --- what stays, and what is removed


def test_two_states_stay_after_any_number_of_saves_and_restarts(node: Node) -> None:
    for step in range(1, 12):
        if step % 3 == 0:
            restart()
            node.load(step - 1)
        node.save(step)
        assert len(node.files) <= 2
        assert node.load(step).fetched_bytes == 0
    assert node.steps == [10, 11]
    (folder,) = copies._folders.here.opened.values()
    assert folder._written == {path.name for path in node.files}  # no more in a job of weeks
    folder.remove(folder.spares())
    assert folder._written == {path.name for path in node.files}


def test_a_crash_in_any_save_leaves_the_copies_of_the_newest_step(node: Node) -> None:
    """It also does in the first one after a restart, whose files are all spare but those."""
    for step in (1, 2, 3):
        node.save(step)
    restart()
    node.load(3)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(run_folder.RunFolder, "need", lambda *_: None)  # it does not come so far
        node.save(4)
    restart()
    assert node.load(3).fetched_bytes == 0


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
def test_two_states_stay_after_failed_saves_one_of_them_the_newest(
    node: Node, through: Through, where: str
) -> None:
    fail = failing(through)
    for step in range(1, 4):
        fail("none")
        node.save(2 * step)
        fail(where)
        for _ in range(3):
            with pytest.raises(dos.errors.DcpObjstoreError):
                node.save(2 * step + 1)
            assert len(node.files) <= 2
            assert node.load(2 * step).fetched_bytes == 0  # the newest committed one
        fail("none")
    restart()
    node.save(9)
    node.save(10)
    assert node.steps == [9, 10]


def test_an_upload_that_breaks_off_leaves_neither_a_file_nor_a_descriptor(
    node: Node, through: Through
) -> None:
    fail = failing(through)
    node.rows = 6 * 1024  # more than a part
    config = dos.TransferConfig(part_size_bytes=5 * MIB)
    node.save(1, config=config)
    files, opened = node.files, open_files()
    fail(".distcp")
    with pytest.raises(PermissionDeniedError):
        node.save(2, config=config)
    gc.collect()
    assert node.files == files
    assert open_files() == opened


def test_a_copy_of_which_one_write_fails_is_given_up(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.rows = 12 * 1024  # more than one write
    write, errors = os.pwrite, [OSError(errno.EIO, "once")]

    def fail_once(*args: Any) -> int:
        if errors:
            raise errors.pop()
        return write(*args)

    monkeypatch.setattr(os, "pwrite", fail_once)
    node.save(1)
    assert (node.files, len(node.unused)) == ([], 1)


def test_one_url_that_is_overwritten_has_two_states(node: Node) -> None:
    for _ in range(4):
        node.save(1, overwrite=True)
        assert len(node.files) <= 2
        assert node.load(1).fetched_bytes == 0


def test_a_process_that_saves_keeps_what_it_has_saved_whatever_it_loads(node: Node) -> None:
    for step in (1, 2):
        node.save(step)
    node.load(1)
    node.save(3)
    assert node.load(2).fetched_bytes == 0
    node.load(1)
    node.save(4)
    assert node.steps == [3, 4]


def test_a_process_that_has_not_saved_keeps_what_it_has_loaded_last(node: Node) -> None:
    for step in (1, 2):
        node.save(step)
    restart()
    node.load(2)
    node.load(1)
    node.save(3)
    assert node.steps == [1, 3]


def test_two_runs_in_one_folder_have_a_state_each(node: Node) -> None:
    other = Node(node.folder, f"{node.run}-other")
    for step in (1, 2, 3):
        node.save(step)
        other.save(step)
    restart()
    for one in (node, other):
        assert one.load(3).fetched_bytes == 0
    assert len(node.files) == 4


# --- other processes


def do_and_wait(rank: int, world: int, node: Node, statements: str) -> None:
    """Another job on the node, which runs a few statements, says "ready" and waits for its end."""
    exec(statements, {"node": node})
    ready_for_good()


def ready_for_good() -> None:
    say("ready")
    threading.Event().wait()


@contextmanager
def other_job(node: Node, statements: str) -> Iterator[Job]:
    with start_workers() as crew:
        yield crew.start(1, do_and_wait, node, statements, grouped=False)


@pytest.fixture
def shared(tmp_path: Path) -> Node:
    """A node whose run other processes see."""
    (tmp_path / "node").mkdir()
    return Node(tmp_path / "node", (tmp_path / "bucket" / "run").as_uri())


def make_old(path: Path, seconds: float) -> None:
    moment = time.time() - seconds
    for part in ("lock", "objects"):
        os.utime(path / part, (moment, moment))


def test_a_job_that_begins_again_finds_its_copies_however_long_it_ran(node: Node) -> None:
    """Nobody has used the folder for a day, and its own job is the one that comes back."""
    node.save(1)
    restart()
    gc.collect()
    make_old(run_of(node), 3 * DAY)
    assert node.load(1).fetched_bytes == 0


def test_a_folder_that_was_written_to_is_not_abandoned_however_long_ago_its_job_began(
    node: Node,
) -> None:
    node.save(1)
    moment = time.time() - 3 * DAY
    os.utime(run_of(node) / "lock", (moment, moment))
    restart()
    gc.collect()
    Node(node.folder, f"{node.run}-other").save(1)
    assert node.load(1).fetched_bytes == 0


def test_abandoned_folders_are_removed_after_a_day(node: Node) -> None:
    others = [Node(node.folder, f"{node.run}-{number}") for number in range(3)]
    for other in others:
        other.save(1)
    restart()
    gc.collect()
    homes = sorted(node.home.iterdir())
    make_old(homes[0], DAY + 60)
    make_old(homes[1], DAY - 600)
    node.save(1)
    left = set(node.home.iterdir())
    assert homes[0] not in left
    assert {homes[1], homes[2]} < left


def test_a_folder_that_a_process_uses_is_never_removed(shared: Node) -> None:
    with other_job(shared, "node.save(1)") as job:
        wait_for(job, "ready")
        used = run_of(shared)
        make_old(used, 9 * DAY)
        other = Node(shared.folder, f"{shared.run}-other", max_bytes=150 << 10)
        other.save(1)  # there is no room for it
        assert len(other.unused) == 1
        assert shared.steps == [1]
        job.kill()
        job.end()
        restart()
        gc.collect()
        make_old(used, 60)
        other.save(2)
        assert len(other.unused) == 1
        assert not used.exists()
        assert other.load(2).fetched_bytes == 0


def test_the_oldest_go_first_and_no_more_than_are_needed(node: Node) -> None:
    homes = {}
    for age, number in ((300, 0), (500, 1), (400, 2)):
        Node(node.folder, f"{node.run}-{number}").save(1)
        (made,) = set(node.home.iterdir()) - set(homes)
        homes[made] = age
    restart()
    gc.collect()
    for path, age in homes.items():
        make_old(path, age)
    node.max_bytes = 380 << 10  # three of the four
    node.save(1)
    assert not node.unused
    gone = {age for path, age in homes.items() if not path.exists()}
    assert gone == {500}


def test_a_removal_that_was_killed_is_ended_by_the_next_job(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.save(1)
    home = os.open(node.home, os.O_RDONLY)
    name = run_of(node).name
    restart()
    gc.collect()

    def die(path: str, *, dir_fd: int) -> None:
        os.unlink(f"{path}/lock", dir_fd=dir_fd)
        raise InterruptedError

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", die)
        assert not remove_run(home, name)
    assert remove_abandoned(home, most=1) == 1
    assert list(node.home.iterdir()) == []
    os.close(home)


@pytest.mark.parametrize("moment", ["before", "renamed", "no lock", "gone"])
def test_a_job_that_begins_during_a_removal_has_a_folder_of_its_own(
    node: Node, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """It has opened the old folder, and the removal goes on to this moment before it locks it."""
    local, url = Local(str(node.folder)), "memory://a/run"
    RunFolder(local, url)
    gc.collect()
    (old,) = node.home.iterdir()
    home = os.open(node.home, os.O_RDONLY)
    rename, rmtree, open_own = os.rename, shutil.rmtree, run_folder._open_own
    reached, go_on = threading.Event(), threading.Event()

    def meet(here: str) -> None:
        if here == moment:
            reached.set()
            assert go_on.wait(10)

    def slow_rename(*names: str, src_dir_fd: int, dst_dir_fd: int) -> None:
        meet("before")
        rename(*names, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
        meet("renamed")

    def slow_rmtree(path: str, *, dir_fd: int) -> None:
        os.unlink(f"{path}/lock", dir_fd=dir_fd)
        meet("no lock")
        rmtree(path, dir_fd=dir_fd)
        meet("gone")

    removal = threading.Thread(target=remove_run, args=(home, old.name))

    def open_first(at: int, name: str, where: str) -> int:
        descriptor = open_own(at, name, where)
        if name == old.name and not removal.is_alive() and not reached.is_set():
            removal.start()
            assert reached.wait(10)
            threading.Timer(0.1, go_on.set).start()
        return descriptor

    monkeypatch.setattr(run_folder, "_open_own", open_first)
    monkeypatch.setattr(os, "rename", slow_rename)
    monkeypatch.setattr(shutil, "rmtree", slow_rmtree)
    job = RunFolder(local, url)
    removal.join()
    monkeypatch.undo()
    assert os.fstat(job._objects).st_ino == (old / "objects").stat().st_ino
    assert not remove_run(home, old.name), "it is in use"
    remove_abandoned(home, after_seconds=0)
    assert list(node.home.iterdir()) == [old]
    os.close(home)


def test_what_a_killed_save_leaves_is_written_over_and_never_read(shared: Node) -> None:
    shared.rows = 9000
    shared.save(1)
    dies = (
        "from dcp_objstore.local.folder import RunFolder; import os, signal\n"
        "RunFolder.finish = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "node.load(1); node.save(2)"
    )
    with other_job(shared, dies) as job:
        assert job.end()[0].exit_signal == signal.SIGKILL
    (left,) = set(shared.files) - set(shared.copies.values())
    assert left.stat().st_size > 8 << 20
    number = left.stat().st_ino
    restart()
    assert shared.load(1).fetched_bytes == 0
    shared.save(2)
    assert shared.copy_of(2).stat().st_ino == number
    assert len(shared.files) == 2
    assert shared.load(2).fetched_bytes == 0


def test_two_jobs_of_one_run_do_not_take_what_the_other_writes(shared: Node) -> None:
    """The one that began later sees files of the other, whole and being written."""
    shared.save(1)
    pauses = (
        "from dcp_objstore.local.folder import RunFolder\n"
        "from tests.local.test_folder import ready_for_good\n"
        "RunFolder.finish = lambda *_: ready_for_good()\n"
        "node.save(2)"
    )
    with other_job(shared, pauses) as job:
        wait_for(job, "ready")
        (being_written,) = set(shared.files) - set(shared.copies.values())
        content = being_written.read_bytes()
        restart()
        for step in (3, 4, 5):
            shared.save(step)
            assert shared.load(step).fetched_bytes == 0
        assert being_written.read_bytes() == content
    shared.save(6)
    shared.save(7)
    assert len(shared.files) == 2


def test_ranks_that_set_room_aside_do_not_wait_for_each_other(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tmpfs needs a second for each GiB: eight ranks of 10 GiB would wait for a minute."""
    monkeypatch.setattr(run_folder, "_PATIENCE_SECONDS", 0.5)
    both = threading.Barrier(2, timeout=20)
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: both.wait())
    local = Local(str(node.folder), max_bytes=25 << 20)
    errors: list[BaseException] = []

    def write(size_bytes: int) -> None:
        folder = RunFolder(local, "memory://a/run")
        try:
            file, name = folder.create([], size_bytes)
            folder.drop(file, name)
        except BaseException as error:  # noqa: BLE001 - asserted below
            errors.append(error)

    ranks = [threading.Thread(target=write, args=(10 << 20,)) for _ in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert not errors


def test_room_that_is_set_aside_counts_before_it_is_there(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: None)
    folder = RunFolder(Local(str(node.folder), max_bytes=25 << 20), "memory://a/run")
    for _ in range(2):
        folder.create([], 10 << 20)
    with pytest.raises(LocalError, match="room"):
        folder.create([], 10 << 20)


def test_the_lock_of_a_folder_is_shared_by_the_jobs_processes(node: Node) -> None:
    node.save(1)
    with (run_of(node) / "lock").open("rb+") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        fcntl.flock(lock, fcntl.LOCK_UN)
        with pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
