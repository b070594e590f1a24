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
from dcp_objstore.local import folder as at
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
# The last part of a URL that has a number: it tells steps apart.
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
        run, self._name = spec.parent()
        self._run_url = " ".join(filter(None, ((run or spec).url, spec.open().endpoint_url)))
        with self._giving_up_on_error():
            self._home = at.home_of(local.folder)
            self._run = self._home / xxhash.xxh3_128_hexdigest(self._run_url.encode())
            self._folder = self._run / (quote(self._name, safe="") or at.STORE_ROOT)
            self._begin()

    def _begin(self) -> None:
        """Do what the save or load begins with."""

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
        # The text says how much room there is, which is never the same.
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
        self._spares: list[at.File] = []  # what may be written over
        series = _STEP.sub(lambda step: _words(step[0]), spec.url)
        self._before = _saved.here.setdefault((series, spec.open().endpoint_url), [])
        super().__init__(local, spec, channel)

    def _begin(self) -> None:
        at.home_of(self._local.folder, make=True)
        with locked(self._home, LOCK_POLICY):
            self._folder.mkdir(parents=True, exist_ok=True)
            (self._run / at.URL).write_text(self._run_url, encoding="utf-8")
            at.note_use(self._run, saves=True)
            self._spares = self._find_spares()
        while at.remove_unused(self._home, self._run):
            pass

    def _find_spares(self) -> list[at.File]:
        """Return what is left over, and the copies of all steps but the newest.

        Copies of this checkpoint itself are of an earlier save, which this one replaces or repeats.
        """
        spares: list[at.File] = []
        states: dict[object, list[at.File]] = {}
        for folder in {*at.folders_in(self._run), *self._before}:
            files = at.files_in(folder)
            copies = [file for file in files if not file.is_temporary]
            spares += (file for file in files if file.is_temporary and not file.is_being_written)
            if _words(folder.name) == _words(self._folder.name):
                states[folder] = copies
        own = states.pop(self._folder)
        newest_ns = max(map(_newest_ns, states.values()), default=0)
        for file in own:
            # A newer file of another rank belongs to this save, which that rank has already begun.
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
        """Return a file for a copy, and its name. The spare file that fits best is written over."""
        path = self._folder / temporary_name(key)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
        with locked(self._home, LOCK_POLICY):
            while self._spares and flags & os.O_CREAT:
                best = min(self._spares, key=lambda file: abs(file.status.st_size - size_bytes))
                self._spares.remove(best)
                with contextlib.suppress(OSError):  # another rank has taken it
                    best.path.rename(path)
                    flags = os.O_RDWR
                    best.path.parent.rmdir()  # if it is empty
            file = open_here(path, flags, 0o600)
            try_lock(file)
        return file, path

    def reserve(self, file: int, size_bytes: int) -> None:
        """Find room for so many bytes of a file, which other processes see as taken from now on."""
        while True:
            with locked(self._home, LOCK_POLICY):
                present = os.fstat(file).st_size
                room = max(0, at.room_bytes(self._home, self._local.max_bytes))
                if size_bytes - present <= room:
                    return os.ftruncate(file, max(size_bytes, present))
            if self._spares:
                at.remove(file.path for file in self._spares)
                self._spares.clear()
            elif not at.remove_unused(self._home, self._run, needed=True):
                raise at.LocalError(
                    f"{size_text(size_bytes - present)} are needed and there is room for"
                    f" {size_text(room)}: a node takes two states of its ranks"
                )

    def end(self) -> None:
        """Remove what these copies have not been written over."""
        at.remove(file.path for file in self._spares)
        with self._giving_up_on_error():
            if not self._has_stopped:
                self._before[:] = filter(Path.exists, {*self._before, self._folder})

    def give_up(self) -> None:
        """Remove these copies: the save has failed."""
        at.remove(self._removed_if_save_fails)


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
        # Not a generator: its frame would keep a buffer until the next one is asked for.
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
                self._close()  # reached only if `act` failed

    def _write(self, rest: memoryview) -> None:
        end = self._size_bytes + len(rest)
        if end > os.fstat(self.file).st_size:  # frames, and values whose size nobody knew
            self._save.reserve(self.file, end)
        while rest:
            written = os.pwrite(self.file, rest, self._size_bytes)
            self._size_bytes += written
            rest = rest[written:]

    def _finish(self) -> None:
        os.ftruncate(self.file, self._size_bytes)
        self._temporary.rename(self._path)
        self._close()

    def close(self) -> None:
        """Give the copy up, unless it is whole. A write that hangs is left to its thread."""
        if self._lock.acquire(timeout=LOCK_POLICY.patience_seconds):
            self._close()
            self._lock.release()

    def _close(self) -> None:
        if self._is_open:
            self._is_open = False
            at.remove([self._temporary])
            close_here(self.file)


class LoadCopies(_Copies):
    """The copies of a checkpoint's objects that this node has.

    Args:
        local: where they are kept.
        spec: the checkpoint.
        channel: the channel of the load.
        object_keys: the keys of its objects, relative to it.

    Attributes:
        numbers: which of the objects there are copies of, by their positions in `object_keys`.
        node: what the processes of this node have in common, and no others.
    """

    def __init__(
        self, local: Local, spec: StoreSpec, channel: Channel, object_keys: Sequence[str]
    ) -> None:
        self._files: dict[str, at.File] = {}
        self._keys = object_keys
        self.node = b""
        super().__init__(local, spec, channel)
        self.numbers = frozenset(
            number for number, key in enumerate(object_keys) if key in self._files
        )

    def _begin(self) -> None:
        files = {file.path.name: file for file in at.files_in(self._folder)}
        if files := {key: files[key] for key in self._keys if key in files}:
            self.node = repr((at.place_of_pids().split()[0], *self._home.stat()[1:3])).encode()
            self._files = files
            at.note_use(self._run, saves=False)

    def before(self, store: ObjectStore) -> LocalFirst:
        """Return a store, rooted at the checkpoint, that reads copies first."""
        self._store = LocalFirst(store, self._files, self._report)
        return self._store

    def keep(self) -> None:
        """Keep the copies until a save has written all of its copies: the state comes from them.

        Those that were damaged are removed.
        """
        if not self._channel.slow_ranges:  # what took long was asked for again, too
            at.remove(self._files[key].path for key in self._store.asked_again)
        if not at.runs_here.here.get(self._run):  # what this process has saved is newer
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
        self, inner: ObjectStore, files: dict[str, at.File], report: Callable[[Exception], None]
    ) -> None:
        super().__init__(inner)
        self._files, self._report = files, report
        self._lock = threading.Lock()
        self._fetched_from: dict[tuple[str, int], int] = {}
        self.local_bytes = 0
        self.asked_again: set[str] = set()

    def open_range(self, key: str, start: int, end: int) -> RangeBody:
        """Open bytes `[start, end)`. Ranges with the same end are the same, or what is left."""
        with self._lock:
            file, fetched_from = self._files.get(key), self._fetched_from.get((key, end))
            if file is not None and fetched_from is None:
                self._fetched_from[key, end] = end
                self.local_bytes += end - start
                return Range(FileSource(file.path), start, end, partial(self._errors, key))
            if fetched_from is not None:
                self._fetched_from[key, end] = min(start, fetched_from)
                self.local_bytes -= max(0, fetched_from - start)
                self.asked_again |= {key} & self._files.keys()
        return self.inner.open_range(key, start, end)

    @contextmanager
    def _errors(self, key: str) -> Iterator[None]:
        try:
            yield
        except CorruptDataError:
            raise
        except Exception as error:
            self._files.pop(key, None)
            self._report(error)
            raise CorruptDataError(f"the copy on this node cannot be read: {error}") from error


def _words(name: str) -> str:
    return re.sub(r"\d+", "#", name)


def _newest_ns(state: Iterable[at.File]) -> int:
    return max((file.status.st_mtime_ns for file in state), default=0)
