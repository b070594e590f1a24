"""What `file://` guarantees beyond the contract: whole objects, versions, processes, durability."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import signal
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path
from unittest.mock import Mock

import pytest

from dcp_objstore.checkpoint.names import (
    MARKER_KEY,
    data_key,
    new_nonce,
)
from dcp_objstore.config import TransferConfig
from dcp_objstore.errors import (
    CorruptDataError,
    InputError,
    ObjectNotFoundError,
    PermissionDeniedError,
    PreconditionFailedError,
    StoreFullError,
    StoreUnavailableError,
    UnsupportedError,
)
from dcp_objstore.run.sweep import sweep
from dcp_objstore.stores import IfAbsent, IfVersion, ObjectStore, StoreSpec, local, open_store
from dcp_objstore.stores.protocol import CopySource, UnfinishedUpload
from dcp_objstore.stores.ranges import read_range
from dcp_objstore.stores.spec import open_uploads
from tests.contract import keys, read


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(root: Path) -> ObjectStore:
    return open_store(f"file://{root}")


def names(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


def test_each_rewrite_of_equal_content_is_another_version(store):
    versions = [store.put("k", b"the same") for _ in range(100)]
    assert len(set(versions)) == 100
    with pytest.raises(PreconditionFailedError):
        store.put("k", b"x", precondition=IfVersion(versions[0]))


def test_our_own_names_are_no_objects(store, root):
    store.put("k", b"x")
    store.put("k", b"y")
    assert ".dcp-objstore.lock" in names(root)
    assert keys(store) == ["k"]
    for key in (".dcp-objstore.lock", "a/.dcp-objstore.x/b"):
        with pytest.raises(InputError):
            store.put(key, b"x")
    more = [f"{number * 7 % 40:02}/{number}" for number in range(40)]
    for key in more:
        store.put(key, b"x")
    assert [meta.key for meta in store.list()] == [*sorted(more), "k"], "in order of the segments"


def test_a_key_below_an_object_is_refused(store):
    store.put("a", b"x")
    for key in ("a/b", "a/b/c"):
        with pytest.raises(InputError, match=r"/a' is a file, where a folder is needed"):
            store.put(key, b"y")
    store.put("p/q", b"x")
    for precondition in (None, IfAbsent()):  # a marker's, which is not sent again and again
        with pytest.raises(InputError, match="p' is a folder"):
            store.put("p", b"y", precondition=precondition)
    with pytest.raises(InputError, match="TypeError"):
        store.put("k", "no bytes")
    assert keys(store) == ["a", "p/q"]
    assert keys(store, "a/") == []


def test_a_name_may_be_as_long_as_the_file_system_takes(store):
    for key in ("x" * 255, "a/" + "ü" * 127):  # no room for it in a temporary name
        store.put(key, b"1", precondition=IfAbsent())
        assert read(store, key) == b"1"
    with pytest.raises(InputError):
        store.put("x" * 300, b"x")


@pytest.mark.parametrize("target", ["a-loop", ".", "..", "b/y", "gone"])
def test_links_that_lead_nowhere_or_up_are_no_objects(store, root, target):
    store.put("a/x", b"1")
    store.put("b/x", b"2")
    (root / "a-loop").symlink_to(target)
    (root / "a" / "to-b").symlink_to("../b")
    (root / "b" / "to-a").symlink_to("../a")
    assert [key for key in keys(store) if not key.startswith("a-loop")] == [
        "a/to-b/x",
        "a/x",
        "b/to-a/x",
        "b/x",
    ]


def test_what_is_neither_a_file_nor_a_folder_is_no_object(store, root):
    store.put("k", b"1")
    os.mkfifo(root / "pipe")
    assert keys(store) == ["k"]
    for look in (store.head, partial(read, store), lambda key: read_range(store, key, 0, 1)):
        with pytest.raises(ObjectNotFoundError):
            look("pipe")


def test_a_folder_that_cannot_be_read_is_an_error_that_names_the_store(store, monkeypatch):
    error = PermissionError(errno.EACCES, "not yours")
    for entries in (Mock(side_effect=error), lambda _: [Mock(is_dir=Mock(side_effect=error))]):
        monkeypatch.setattr(local, "_entries", entries)
        with pytest.raises(PermissionDeniedError, match="not yours") as caught:
            next(store.list())
        assert (caught.value.object_key, caught.value.url) == (None, store.url)


def test_an_upload_that_ends_while_it_is_listed_or_aborted_is_no_error(root, monkeypatch):
    root.mkdir()
    there, gone = (root / f".dcp-objstore.tmp.0.{name}" for name in ("there", "gone"))
    there.write_bytes(b"123")
    monkeypatch.setattr(Path, "rglob", lambda *_: [gone, there])
    uploads = open_uploads(StoreSpec(f"file://{root}"))
    (one,) = uploads.list()
    assert (one.key, one.size_bytes) == ("there", 3)
    refuse = Mock(side_effect=PermissionError(errno.EACCES, "not yours"))
    for name, call in (("stat", uploads.list), ("unlink", partial(uploads.abort, one))):
        with monkeypatch.context() as patch:
            patch.setattr(Path, name, refuse)
            with pytest.raises(PermissionDeniedError, match="not yours") as caught:
                call()
        assert caught.value.url == f"file://{root}"
    uploads.abort(one)
    uploads.abort(one)
    assert names(root) == []


def test_uploads_are_listed_by_the_names_of_their_objects_below_a_folder(root):
    start = ".dcp-objstore.tmp."
    for name in (f"a/{start}0.x.y", f"a/b/{start}1.z", f"{start}2.", "a/k", ".dcp-objstore.lock"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"12")
        os.utime(root / name, (1e9, 1e9))
    uploads = local.LocalUploads(root)
    written = datetime(2001, 9, 9, 1, 46, 40, tzinfo=UTC)
    assert uploads.list() == [
        UnfinishedUpload(f"{start}2.", f"{start}2.", written, 2),
        UnfinishedUpload("a/x.y", f"a/{start}0.x.y", written, 2),
        UnfinishedUpload("a/b/z", f"a/b/{start}1.z", written, 2),
    ]
    assert [upload.key for upload in uploads.below("a").list()] == ["x.y", "b/z"]
    for upload in uploads.below("a").list():
        uploads.below("a").abort(upload)
    assert names(root) == [".dcp-objstore.lock", f"{start}2.", "a/k"]
    room = 255 - len(local.temporary_name(""))
    assert local.temporary_name("x" * room).endswith(".x" + "x" * (room - 1))
    assert local.temporary_name("x" * (room + 1)).endswith(".")


def test_a_call_that_takes_a_part_of_the_bytes_is_repeated_for_the_rest(store, monkeypatch):
    write, copy_range = os.write, os.copy_file_range
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:3]))
    monkeypatch.setattr(
        os, "copy_file_range", lambda fd, to, count, start: copy_range(fd, to, min(3, count), start)
    )
    version = store.put("k", [b"01234567", b"", b"89"])
    assert read(store, "k") == b"0123456789"
    moved: list[int] = []

    def copy(start: int, end: int) -> None:
        source = CopySource(f"{store.url}/k", start, end, version)
        store.copy("c", [source], part_size_bytes=5, max_concurrency=1, moved=moved.append)

    copy(1, 9)
    assert (read(store, "c"), moved) == (b"12345678", [4, 4])
    with pytest.raises(CorruptDataError, match="ends at 10, before 11"):
        copy(8, 11)
    assert keys(store) == ["c", "k"]
    with store.open_range("k", 0, 10) as body:
        monkeypatch.undo()
        body.readinto(memoryview(bytearray(4)))
        (Path(store.url.removeprefix("file://")) / "k").write_bytes(b"0123")
        with pytest.raises(CorruptDataError, match="ends at 4"):
            body.readinto(memoryview(bytearray(4)))
    with pytest.raises(ObjectNotFoundError):
        store.head("k/below")
    store.delete("k/below")
    assert keys(store) == ["c", "k"]


def test_no_verb_leaves_a_descriptor_open(store, root, monkeypatch):
    source = CopySource(f"{store.url}/k", 0, 4, store.put("k", b"data"))
    os.mkfifo(root / "pipe")
    descriptors = Path("/proc/self/fd")
    before = len([*descriptors.iterdir()])
    for precondition in (None, IfAbsent(), IfVersion(source.version)):
        with suppress(PreconditionFailedError):
            store.put("l", b"x", precondition=precondition)
    store.copy("copy", [source], part_size_bytes=9, max_concurrency=1, moved=lambda _: None)
    get_less = partial(store.get, max_size_bytes=1)
    for look in (store.head, get_less, lambda key: read_range(store, key, 0, 5)):
        for key in ("k", "pipe", "k/below", "absent"):
            with suppress(ObjectNotFoundError, CorruptDataError):
                look(key)
    for results in ([OSError("of the file")], [None, OSError("of the folder")]):
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", Mock(side_effect=results))
            with pytest.raises(StoreUnavailableError, match="of the"):
                store.put("l", b"x")
    store.delete("l")
    assert keys(store) == ["copy", "k"]
    assert len([*descriptors.iterdir()]) == before


def test_the_lock_of_a_folder_can_be_removed_by_who_has_it(store, root):
    store.remove_lock()  # there is no folder yet
    store.put("k", b"x")
    store.put("k", b"y")
    store.remove_lock()
    assert names(root) == ["k"]


@pytest.mark.parametrize(
    ("call", "numbers"),
    [
        ("copy_file_range", [errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP]),
        ("link", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK]),
    ],
)
def test_a_call_that_a_file_system_does_not_have_is_told_from_one_that_fails(
    store, root, monkeypatch, call, numbers
):
    def refuse(number: int, *_: object) -> None:
        raise OSError(number, os.strerror(number))

    source = CopySource(f"file://{root}/from", 0, 4, store.put("from", b"data"))
    for number in [*numbers, errno.EIO]:
        monkeypatch.setattr(os, call, partial(refuse, number))
        is_missing = number in numbers
        if call == "copy_file_range":
            with pytest.raises(UnsupportedError if is_missing else StoreUnavailableError):
                store.copy(
                    "k", [source], part_size_bytes=9, max_concurrency=1, moved=lambda _: None
                )
        elif is_missing:
            store.put("k", b"created", precondition=IfAbsent())
            assert read(store, "k") == b"created"
            store.delete("k")
        else:
            with pytest.raises(StoreUnavailableError):
                store.put("k", b"created", precondition=IfAbsent())
        assert keys(store) == ["from"]
        assert not [name for name in names(root) if "tmp" in name]


@pytest.mark.parametrize("transport", ["native", "fsspec"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_says_so_and_to_try_again_does_not_help(root, monkeypatch, number, transport):
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "write", refuse)  # of both
    monkeypatch.setattr("fsspec.implementations.local.LocalFileOpener.write", refuse)
    store = open_store(f"file://{root}", config=TransferConfig(transport=transport))
    with pytest.raises(StoreFullError, match=r"(?s)quota is reached.*remove") as put:
        store.put("k", b"x")
    with pytest.raises(StoreFullError, match=r"(?s)quota is reached.*remove") as streamed:
        store.put_stream("k", iter([b"x"]), part_size_bytes=1, max_concurrency=1)
    for caught in (put, streamed):
        assert isinstance(caught.value, InputError)
        assert caught.value.object_key == "k"
        assert (" are free there now" in caught.value.message) == (transport == "native")
    monkeypatch.setattr("shutil.disk_usage", refuse)
    with pytest.raises(StoreFullError, match="quota is reached"):
        store.put("k", b"x")
    assert names(root) == []


@pytest.mark.parametrize("precondition", [None, IfAbsent()])
def test_bytes_are_synced_before_the_name_and_the_name_after(
    store, root, monkeypatch, precondition
):
    events: list[object] = []
    real_fsync, real_link, real_replace = os.fsync, os.link, Path.replace

    def what(fd: int) -> object:
        status = os.fstat(fd)
        return status.st_ino if stat.S_ISDIR(status.st_mode) else "object"

    monkeypatch.setattr(os, "fsync", lambda fd: (events.append(what(fd)), real_fsync(fd))[1])
    monkeypatch.setattr(os, "link", lambda *a: (events.append("name"), real_link(*a))[1])
    monkeypatch.setattr(Path, "replace", lambda *a: (events.append("name"), real_replace(*a))[1])
    store.put("a/k", b"x", precondition=precondition)
    above, new, folder = (place.stat().st_ino for place in (root.parent, root, root / "a"))
    # The folders that were made could vanish, too.
    assert events == [above, new, "object", "name", folder]
    store.delete("a/k")
    assert events[5:] == [folder]


@pytest.mark.parametrize(
    "change",
    [
        lambda store, _: store.put("k", b"2"),
        lambda store, version: store.put("k", b"2", precondition=IfVersion(version)),
        lambda store, _: store.put_stream("k", iter([b"2"]), part_size_bytes=1, max_concurrency=1),
        lambda store, _: store.delete("k"),
        lambda store, _: store.put("l", b"2", precondition=IfAbsent()),
    ],
    ids=["put", "update", "put_stream", "delete", "create without links"],
)
def test_a_lock_of_another_process_is_waited_for_as_long_as_a_small_request(
    root, change, monkeypatch
):
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    store = open_store(f"file://{root}", config=TransferConfig(stall_timeout_seconds=0.3))
    version = store.put("k", b"1")
    # Of an open file description, so this thread is as good as another process.
    with (root / ".dcp-objstore.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(StoreUnavailableError, match="fuser") as caught:
            change(store, version)
        assert caught.value.object_key in ("k", "l")
        assert names(root) == [".dcp-objstore.lock", "k"]
        assert read(store, "k") == b"1", "to read takes no lock"
    change(store, version)


def _race(spec: StoreSpec, barrier: Barrier, rounds: int, told: Connection) -> None:
    """Create objects, and count one up, against others."""
    store = spec.open()
    wins = []
    for number in range(rounds):
        barrier.wait(60)
        with suppress(PreconditionFailedError):
            store.put(f"race-{number}", b"%d" % os.getpid(), precondition=IfAbsent(), retry=False)
            wins.append(number)
    counted = 0
    while counted < rounds:
        body, meta = store.get("counter", max_size_bytes=99)
        with suppress(PreconditionFailedError):
            store.put("counter", b"%d" % (int(body) + 1), precondition=IfVersion(meta.version))
            counted += 1
    told.send((os.getpid(), wins))


def test_of_creators_in_many_processes_one_wins_and_all_updates_count(store, root):
    rounds, racers = 40, 3
    store.put("counter", b"0")
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(racers)
    ours, theirs = context.Pipe()
    given = (StoreSpec(f"file://{root}"), barrier, rounds, theirs)
    children = [context.Process(target=_race, args=given) for _ in range(racers)]
    for child in children:
        child.start()
    won = [(number, pid) for pid, wins in (ours.recv() for _ in children) for number in wins]
    for child in children:
        child.join(60)
    assert sorted(number for number, _ in won) == list(range(rounds))
    assert all(read(store, f"race-{number}") == b"%d" % pid for number, pid in won)
    assert read(store, "counter") == b"%d" % (rounds * racers)


def test_where_nothing_is_linked_the_second_of_two_creators_is_refused(store, root, monkeypatch):
    """The first one has the lock until the object is there."""
    real_lock = local.try_lock

    def lock(fd: int) -> bool:
        (root / "k").write_bytes(b"of the first")
        return real_lock(fd)

    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(local, "try_lock", lock)
    with pytest.raises(PreconditionFailedError):
        store.put("k", b"of the second", precondition=IfAbsent())
    assert read(store, "k") == b"of the first"
    assert names(root) == [".dcp-objstore.lock", "k"]


def _stream_for_ever(spec: StoreSpec, key: str, half: Connection) -> None:
    def endless() -> Iterator[bytes]:
        yield b"half of it"
        yield b""
        half.send("half")
        half.recv()

    spec.open().put_stream(key, endless(), part_size_bytes=99, max_concurrency=1)


@pytest.mark.parametrize("where", ["in a stream", "under the lock"])
def test_a_killed_writer_leaves_the_old_object_and_what_a_sweep_removes(root, where):
    spec = StoreSpec(f"file://{root}/run")
    store = spec.at(f"{spec.url}/step-1").open()
    key = data_key(0, 0, new_nonce())
    for name in (key, MARKER_KEY) if where == "in a stream" else (key,):
        store.put(name, b"old")
        ours, theirs = multiprocessing.Pipe()
        target = _stream_for_ever if where == "in a stream" else _replace_for_ever
        context = multiprocessing.get_context("fork")
        child = context.Process(target=target, args=(spec.at(store.url), name, theirs))
        child.start()
        theirs.close()
        assert ours.recv() == "half"
        child.kill()
        child.join(60)
        assert read(store, name) == b"old"
        # Nobody waits for a lock of the dead.
        store.put(name, b"newer", precondition=IfVersion(store.head(name).version))
        store.delete(name)
    assert keys(store) == []
    left = open_uploads(spec).list()
    assert {one.key for one in left} == {f"step-1/{key}", f"step-1/{MARKER_KEY}"} - (
        {f"step-1/{MARKER_KEY}"} if where == "under the lock" else set()
    )
    assert {one.size_bytes for one in left} <= {len(b"half of it"), len(b"new")}
    young = sweep(spec.url)
    assert young.uploads_aborted == 0
    assert len(open_uploads(spec).list()) == len(left), "it may still be under way"
    old = time.time() - 2 * 24 * 3600
    for place in root.rglob("*"):
        os.utime(place, (old, old))
    report = sweep(spec.url)
    assert report.uploads_aborted == len(left)
    assert report.uploads_unseen is None
    assert [name for name in names(root) if ".tmp" in name] == []


def _replace_for_ever(spec: StoreSpec, key: str, half: Connection) -> None:
    def stop(*_: object) -> None:
        half.send("half")
        half.recv()

    Path.replace = stop  # type: ignore[method-assign,assignment]
    spec.open().put(key, b"new")


def test_a_child_that_is_forked_under_the_lock_does_not_keep_it(root):
    """A DataLoader's worker may be forked in a save, and live to the end of the job."""
    root.mkdir(exist_ok=True)
    reading, writing = os.pipe()
    with local.locked(root, local.LOCK_POLICY):
        if not (child := os.fork()):
            os.write(writing, b".")
            signal.pause()
        os.read(reading, 1)
    try:
        with (root / ".dcp-objstore.lock").open() as lock:
            assert local.try_lock(lock.fileno())
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_lock_whose_file_was_removed_before_it_was_taken_is_not_held(root, monkeypatch):
    root.mkdir()
    place, tries, lock = root / ".dcp-objstore.lock", list[int](), local.try_lock

    def removed_at_first(fd: int) -> bool:
        tries.append(fd)
        if len(tries) == 1:
            place.unlink()
        return lock(fd)

    monkeypatch.setattr(local, "try_lock", removed_at_first)
    with local.locked(root, local.LOCK_POLICY):
        assert place.exists()
    assert len(tries) == 2
