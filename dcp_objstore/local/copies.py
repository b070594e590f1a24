"""`SaveCopies`, written during an upload, and `LoadCopies`, read instead of the store.

Nothing here raises because of the node: what goes wrong is one warning, and a `LocalUnused` event
for each save or load. The store has everything.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import xxhash

from dcp_objstore.contexts import contextmanager
from dcp_objstore.errors import CorruptDataError
from dcp_objstore.forking import PerProcess, close_here, open_here
from dcp_objstore.local import folder as on_node
from dcp_objstore.local.folder import File
from dcp_objstore.observe.events import LocalUnused
from dcp_objstore.observe.report import logger, size_text
from dcp_objstore.stores.local import (
    LOCK_POLICY,
    FileSource,
    locked,
    temporary_name,
    try_lock,
)
from dcp_objstore.stores.ranges import Range
from dcp_objstore.stores.wrappers import WrappedStore

if TYPE_CHECKING:
    from dcp_objstore.config import Local
    from dcp_objstore.observe.dispatch import Channel
    from dcp_objstore.stores import ObjectStore, StoreSpec
    from dcp_objstore.stores.protocol import RangeBody
    from dcp_objstore.transfer.memory import ByteArray

_WARNING = "no copies in %s: %s. The store has everything; see 'dcp-objstore local ls %s'"
# The folders and kinds of errors of which a warning was given.
_warned_of: set[tuple[str, int | None]] = set()
# The folders of the checkpoints that this process has saved, by the URL without the step's number
# and the endpoint. Where each step has a prefix, as in `step-5/model`, its run has only one step.
_saved: PerProcess[dict[tuple[str, str | None], list[Path]]] = PerProcess(dict)
# The last segment of a URL with a number, which tells steps apart: `step-5` in `run/step-5/model`.
_STEP = re.compile(r"[^/]*\d[^/]*(?=(/\D*)?$)")


class _Copies:
    """The folder of a checkpoint on this node, for one save or load.

    Args:
        local: where copies may be kept.
        spec: the checkpoint.
        channel: the channel of the save or load.
    """

    def __init__(self, local: Local, spec: StoreSpec, channel: Channel) -> None:
        self._local, self._channel = local, channel
        self._has_stopped = False
        # A run is named by its URL, and the endpoint of the store if it has one.
        run, self._name = spec.parent()
        self._run_url = " ".join(filter(None, ((run or spec).url, spec.open().endpoint_url)))
        with self._giving_up_on_error():
            self._home = on_node.home_of(local.folder)
            self._run = self._home / xxhash.xxh3_128_hexdigest(self._run_url.encode())
            self._folder = self._run / (quote(self._name) or on_node.STORE_ROOT)
            self._begin()

    def _begin(self) -> None:
        """Do what the save or load begins with. An error here is reported like any other."""

    @contextmanager
    def _giving_up_on_error(self) -> Iterator[None]:
        """Report an error of the `with` block, which ends there, and use no copies after it."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever it is, the store has everything
            self._report(error)

    def _report(self, error: Exception) -> None:
        """Emit and log an error, once in this save or load; no copies are used after it."""
        if self._has_stopped:
            return
        self._has_stopped = True
        folder, reason = self._local.folder, str(error)
        self._channel.emit(LocalUnused, time.monotonic(), folder=folder, reason=reason)
        # A warning is given once for each folder and kind of error. The text does not tell kinds
        # apart: it may say how much room there is, which is never the same.
        kind = folder, getattr(error, "errno", None)
        if kind not in _warned_of:
            _warned_of.add(kind)
            logger.warning(_WARNING, folder, reason, folder)


class SaveCopies(_Copies):
    """The copies that one rank writes of its objects in one save. After an error it writes none.

    Args:
        rank: the rank.
    """

    def __init__(self, local: Local, spec: StoreSpec, channel: Channel, rank: int) -> None:
        self._rank = rank
        self._removed_if_save_fails: list[Path] = []
        self._spares: list[File] = []  # what may be written over
        # A series is all steps whose URLs differ only in numbers of the segment that names them:
        # `run-2/step-5` is of the series `run-2/step-#`.
        series = _STEP.sub(lambda step: _without_numbers(step[0]), spec.url)
        # The very list that `_saved` holds: `end` changes it for the next save of the series.
        self._folders_saved_before = _saved.here.setdefault((series, spec.open().endpoint_url), [])
        super().__init__(local, spec, channel)

    def _begin(self) -> None:
        """Make the folders, find the files to write over, and remove runs that are not used."""
        on_node.home_of(self._local.folder, make=True)
        with locked(self._home, LOCK_POLICY):
            self._folder.mkdir(parents=True, exist_ok=True)
            (self._run / on_node.URL).write_text(self._run_url, encoding="utf-8")
            on_node.note_use(self._run, saves=True)
            self._spares = self._find_spares()
        while on_node.remove_unused(self._home, self._run):  # it removes one run
            pass

    def _find_spares(self) -> list[File]:
        """Return the files to write over: what is left over, and all copies but the newest state's.

        A state is the copies of one step. But the copies in the folder of this checkpoint were
        written by earlier saves of the same step: there, the copies of each save are a state.
        """
        spares: list[File] = []
        # By the folder of a step, or by the end of the keys of an earlier save of this one.
        states: dict[object, list[File]] = {}
        for folder in {*on_node.folders_in(self._run), *self._folders_saved_before}:
            files = on_node.files_in(folder)
            copies = [file for file in files if not file.is_temporary]
            spares += (file for file in files if file.is_temporary and not file.is_being_written)
            # Steps of one series have the same name but for numbers, such as `step-5` and `step-6`.
            if _without_numbers(folder.name) == _without_numbers(self._folder.name):
                states[folder] = copies
        own_copies = states.pop(self._folder)
        newest_ns = max(map(_newest_ns, states.values()), default=0)
        for file in own_copies:
            # Such as `__0_1.<nonce of the save>.distcp` of rank 0. A newer file of another rank
            # belongs to this save, which that rank has already begun.
            name, time_ns = file.path.name, file.status.st_mtime_ns
            if name.startswith(f"__{self._rank}_") or time_ns < newest_ns:
                states.setdefault(name.partition(".")[2], []).append(file)
        return sum(sorted(states.values(), key=_newest_ns)[:-1], spares)

    @contextmanager
    def tee(
        self, key: str, buffers: Iterator[ByteArray], size_bytes: int
    ) -> Iterator[Iterator[ByteArray]]:
        """Yield an iterator over `buffers` that writes each of them to the copy, too.

        If it is not read to its end, there is no copy. If no copies are written (any more), it
        yields `buffers` themselves.

        Args:
            key: the object's, relative to the checkpoint.
            buffers: its content.
            size_bytes: about how much that is.
        """
        with contextlib.ExitStack() as stack:
            # Only what is done here is reported as an error of the node, not what the caller does.
            with self._giving_up_on_error():
                if not self._has_stopped:
                    path = self._folder / key
                    file, temporary = self._create(key, size_bytes)
                    copy = _CopyBeingWritten(path, file, temporary, self)
                    stack.callback(copy.close)
                    self._removed_if_save_fails.append(path)
                    self.reserve(copy.file, size_bytes)
                    buffers = copy.through(buffers)
            yield buffers

    def _create(self, key: str, size_bytes: int) -> tuple[int, Path]:
        """Return an open file for a copy, and its path: the spare that fits best, or a new one.

        Its lock shows others that it is being written.
        """
        path = self._folder / temporary_name(key)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
        with locked(self._home, LOCK_POLICY):
            while self._spares and flags & os.O_CREAT:  # until a spare file has the name
                best = min(self._spares, key=lambda file: abs(file.status.st_size - size_bytes))
                self._spares.remove(best)
                # Another rank may have taken the file; or its folder is not empty, and so stays.
                with contextlib.suppress(OSError):
                    best.path.rename(path)
                    flags = os.O_RDWR
                    best.path.parent.rmdir()
            file = open_here(path, flags, 0o600)
            try_lock(file)
        return file, path

    def reserve(self, file: int, size_bytes: int) -> None:
        """Find room for so many bytes of a file, which other processes see as taken from now on."""
        while True:
            with locked(self._home, LOCK_POLICY):
                present = os.fstat(file).st_size
                room = max(0, on_node.room_bytes(self._home, self._local.max_bytes))
                if size_bytes - present <= room:
                    return os.ftruncate(file, max(size_bytes, present))
            # There is no room: remove what may be written over, then runs that nobody uses.
            if self._spares:
                on_node.remove(file.path for file in self._spares)
                self._spares.clear()
            elif not on_node.remove_unused(self._home, self._run, needed=True):
                raise on_node.LocalError(
                    f"{size_text(size_bytes - present)} are needed and there is room for"
                    f" {size_text(room)}: a node takes two states of its ranks"
                )

    def end(self) -> None:
        """Remove the spare files that are left, and note the folder for the next step's save."""
        on_node.remove(file.path for file in self._spares)
        with self._giving_up_on_error():
            if not self._has_stopped:
                folders = {*self._folders_saved_before, self._folder}
                self._folders_saved_before[:] = filter(Path.exists, folders)

    def give_up(self) -> None:
        """Remove these copies: the save has failed."""
        on_node.remove(self._removed_if_save_fails)


class _CopyBeingWritten:
    """Writes an object's buffers to a file. It keeps no reference to them.

    The thread that uploads writes, and another one may close it.
    """

    def __init__(self, path: Path, file: int, temporary: Path, save: SaveCopies) -> None:
        self._path, self.file, self._temporary, self._save = path, file, temporary, save
        self._lock = threading.Lock()
        self._is_open, self._size_bytes = True, 0

    def through(self, buffers: Iterator[ByteArray]) -> Iterator[ByteArray]:
        """Iterate over buffers and write each of them. After the last one the copy is whole."""
        # Not a generator: its frame would keep a buffer until the next one is asked for. The second
        # iterator yields nothing: it calls `_finish` once, and ends because that returns None.
        return chain(map(self._pass, buffers), iter(partial(self._while_open, self._finish), None))

    def _pass(self, buffer: ByteArray) -> ByteArray:
        self._while_open(partial(self._write, memoryview(buffer)))
        return buffer

    def _while_open(self, act: Callable[[], None]) -> None:
        """Do something with the copy, unless it is closed; if that fails, close it."""
        with self._lock:
            if self._is_open:
                with self._save._giving_up_on_error():
                    act()
                    return
                self._close()  # reached only if `act` failed: its error was reported

    def _write(self, unwritten: memoryview) -> None:
        """Write a buffer at the end of what was written so far."""
        end = self._size_bytes + len(unwritten)
        # The room was reserved without framing, and without values whose size was not known.
        if end > os.fstat(self.file).st_size:
            self._save.reserve(self.file, end)
        while unwritten:
            count = os.pwrite(self.file, unwritten, self._size_bytes)
            self._size_bytes += count
            unwritten = unwritten[count:]

    def _finish(self) -> None:
        os.ftruncate(self.file, self._size_bytes)
        self._temporary.rename(self._path)
        self._close()

    def close(self) -> None:
        """Give the copy up, unless it is whole. Called when the upload has ended, however it did.

        A write that hangs, and so keeps the lock, is left to its thread.
        """
        if self._lock.acquire(timeout=LOCK_POLICY.patience_seconds):
            self._close()
            self._lock.release()

    def _close(self) -> None:
        if self._is_open:
            self._is_open = False
            on_node.remove([self._temporary])  # a whole copy has another name by now
            close_here(self.file)


class LoadCopies(_Copies):
    """The copies of a checkpoint's objects that this node has.

    Args:
        local: where they are kept.
        spec: the checkpoint.
        channel: the channel of the load.
        object_keys: the keys of its objects, relative to it.

    Attributes:
        numbers: the positions in `object_keys` of the objects that there are copies of.
        node: bytes that the processes of this node have in common, and no others; empty without
            copies.
    """

    def __init__(
        self, local: Local, spec: StoreSpec, channel: Channel, object_keys: Sequence[str]
    ) -> None:
        self._files: dict[str, File] = {}
        self._keys = object_keys
        self.node = b""
        super().__init__(local, spec, channel)  # it calls `_begin`, which finds the files
        self.numbers = frozenset(
            number for number, key in enumerate(object_keys) if key in self._files
        )

    def _begin(self) -> None:
        """Find the copies; if there are any, identify the node and note that the run is used."""
        files = {file.path.name: file for file in on_node.files_in(self._folder)}
        if files := {key: files[key] for key in self._keys if key in files}:
            home, boot = self._home.stat(), on_node.pid_namespace().split()[0]
            self.node = repr((boot, home.st_ino, home.st_dev)).encode()
            self._files = files
            on_node.note_use(self._run, saves=False)

    def before(self, store: ObjectStore) -> LocalFirst:
        """Return a store, rooted at the checkpoint, that reads copies first."""
        self._store = LocalFirst(store, self._files, self._report)
        return self._store

    def keep(self) -> None:
        """Keep the copies until a save has written all of its copies: the state comes from them.

        Called once the load has succeeded. Copies that were damaged are removed: those of which a
        range was asked for again.
        """
        # If a range was asked for again because it took long, its copy need not be damaged.
        if not self._channel.slow_ranges:
            on_node.remove(self._files[key].path for key in self._store.asked_again)
        # A save keeps the newest files, so these become the newest. But if this process has saved
        # here, the copies of its save are those to keep.
        if not on_node.runs_here.here.get(self._run):
            with contextlib.suppress(OSError):
                for file in self._files.values():
                    os.utime(file.path)


class LocalFirst(WrappedStore):
    """Reads a range from the copy, or from the inner store if it is asked for once more.

    A reader that finds damage asks once more from the damaged piece on, and so it does where a copy
    cannot be read.

    Args:
        inner: the store.
        files: the copies by their keys. Those that cannot be read are taken out.
        report: receives an error of the node.

    Attributes:
        local_bytes: how many bytes copies have given, without those that were fetched then.
        asked_again: the keys of the readable copies of which a range was asked for once more.
    """

    def __init__(
        self, inner: ObjectStore, files: dict[str, File], report: Callable[[Exception], None]
    ) -> None:
        super().__init__(inner)
        self._files, self._report = files, report
        self._lock = threading.Lock()
        # For each range that was opened, by its key and end: the position from which on the store
        # gives it. As long as the copy gives all of it, that is its end.
        self._fetched_from: dict[tuple[str, int], int] = {}
        self.local_bytes = 0
        self.asked_again: set[str] = set()

    def open_range(self, key: str, start: int, end: int) -> RangeBody:
        """Open bytes `[start, end)`: the first time those of the copy, if there is one.

        A reader that asks again, for the range or for the rest of it, asks with the same end, and
        is given what the store has.
        """
        with self._lock:
            file, fetched_from = self._files.get(key), self._fetched_from.get((key, end))
            if file is not None and fetched_from is None:
                self._fetched_from[key, end] = end
                self.local_bytes += end - start
                return Range(FileSource(file.path), start, end, partial(self._errors, key))
            if fetched_from is not None:  # from `start` on, the copy was damaged or unreadable
                self._fetched_from[key, end] = min(start, fetched_from)
                self.local_bytes -= max(0, fetched_from - start)
                # A copy that `_errors` has taken out, because it cannot be read, does not count.
                self.asked_again |= {key} & self._files.keys()
        return self.inner.open_range(key, start, end)

    @contextmanager
    def _errors(self, key: str) -> Iterator[None]:
        """Turn an error of reading a copy into `CorruptDataError`: its reader then asks again."""
        try:
            yield
        except CorruptDataError:
            raise  # the copy is too short
        except Exception as error:
            self._files.pop(key, None)
            self._report(error)
            raise CorruptDataError(f"the copy on this node cannot be read: {error}") from error


def _without_numbers(name: str) -> str:
    """Return a name that is the same for all steps: `step-#` of `step-5`."""
    return re.sub(r"\d+", "#", name)


def _newest_ns(state: Iterable[File]) -> int:
    return max((file.status.st_mtime_ns for file in state), default=0)
