"""`SaveCopies`, written beside an upload, and `LoadCopies`, read instead of the store.

Nothing here raises because of the node: what goes wrong is one warning, and a `LocalUnused` event
for each save or load. The store has everything.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from dcp_objstore.contexts import contextmanager
from dcp_objstore.errors import CorruptDataError
from dcp_objstore.forking import PerProcess
from dcp_objstore.local.folder import CopyFile, LocalError, RunFolder, Spare
from dcp_objstore.observe.events import LocalUnused
from dcp_objstore.observe.report import logger
from dcp_objstore.stores.wrappers import WrappedStore

if TYPE_CHECKING:
    from dcp_objstore.local.settings import Local
    from dcp_objstore.observe.dispatch import Channel
    from dcp_objstore.stores import ObjectStore, StoreSpec
    from dcp_objstore.stores.protocol import RangeBody, Version
    from dcp_objstore.transfer.upload import ByteArray


class _Folders:
    """The folders of this process, and the warnings about them that were given."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.opened: dict[tuple[str, str], RunFolder] = {}
        self.warned_of: set[tuple[str, int | None]] = set()


_folders = PerProcess(_Folders)


class _Copies:
    """The folder of the run in which a checkpoint lies, for one save or load.

    Args:
        local: where copies may be kept.
        spec: the checkpoint.
        channel: that of the save or load.
    """

    def __init__(self, local: Local, spec: StoreSpec, channel: Channel) -> None:
        self._local = local
        self._channel = channel
        self._reported = False
        run, name = spec.parent()
        self._prefix = f"{name}/" if run is not None else ""
        place = (run or spec).url, spec.open().endpoint_url or ""
        self._folder: RunFolder | None = None
        with self._excused():
            self._folder = self._open(" ".join(filter(None, place)))

    def _open(self, run_url: str) -> RunFolder:
        folders, place = _folders.here, (self._local.folder, run_url)
        with folders.lock:
            if place not in folders.opened:
                folders.opened[place] = RunFolder(self._local, run_url)
            return folders.opened[place]

    @contextmanager
    def _excused(self) -> Iterator[None]:
        """Report what goes wrong on the node, and go on."""
        try:
            yield
        except (LocalError, OSError) as error:
            self._report(error)

    def _report(self, error: Exception) -> None:
        if self._reported:
            return
        self._reported = True
        folder, reason = self._local.folder, str(error)
        self._channel.emit(LocalUnused, time.monotonic(), folder=folder, reason=reason)
        # The text says how much room there is, which is never the same.
        kind = folder, getattr(error, "errno", None)
        warned_of = _folders.here.warned_of
        if kind not in warned_of:
            warned_of.add(kind)
            logger.warning(
                "no copies in %s: %s. The store has everything; 'dcp-objstore doctor --local %s'"
                " looks at the folder",
                *(folder, reason, folder),
            )


class SaveCopies(_Copies):
    """The copies that one rank writes of its objects in one save."""

    def __init__(self, local: Local, spec: StoreSpec, channel: Channel) -> None:
        super().__init__(local, spec, channel)
        self._keys: list[str] = []
        self._spares: list[Spare] = []
        if self._folder is not None:
            self._before = self._folder.needed, self._folder.has_saved
            with self._excused():
                self._spares = self._folder.spares()

    @contextmanager
    def beside(
        self, key: str, buffers: Iterator[ByteArray], size_bytes: int
    ) -> Iterator[Iterator[ByteArray]]:
        """Yield an iterator over `buffers` that writes each of them to the copy, too.

        If it is not read to its end, there is no copy.

        Args:
            key: the object's, relative to the checkpoint.
            buffers: its content.
            size_bytes: about how much that is.
        """
        key = self._prefix + key
        copy: _Beside | None = None
        with self._excused():
            if self._folder is not None:
                copy = _Beside(
                    buffers=buffers,
                    folder=self._folder,
                    spares=self._spares,
                    key=key,
                    size_bytes=size_bytes,
                    report=self._report,
                )
        if copy is None:
            yield buffers
            return
        try:
            yield copy
        finally:
            copy.close()
        if copy.is_whole:
            self._keys.append(key)

    def end(self) -> None:
        """Keep these copies from now on, and remove what they have not been written over."""
        if self._folder is not None:
            self._folder.has_saved = True
            self._folder.need(self._keys)
            self._folder.remove(self._spares)

    def give_up(self) -> None:
        """Keep the copies that were kept before: the save has failed."""
        if self._folder is not None:
            self._folder.needed, self._folder.has_saved = self._before


class _Beside:
    """Iterates over buffers and writes each to a file. It keeps no reference to them.

    The thread that uploads iterates, and another one may close it.
    """

    def __init__(
        self,
        *,
        buffers: Iterator[ByteArray],
        folder: RunFolder,
        spares: list[Spare],
        key: str,
        size_bytes: int,
        report: Callable[[Exception], None],
    ) -> None:
        self._buffers, self._folder, self._spares = buffers, folder, spares
        self._key, self._report = key, report
        self._file, self._name = folder.create(spares, size_bytes)
        self._lock = threading.Lock()
        self._is_open = True
        self._size_bytes = 0
        self.is_whole = False

    def __iter__(self) -> Iterator[ByteArray]:
        return self

    def __next__(self) -> ByteArray:
        try:
            buffer = next(self._buffers)
        except StopIteration:
            self._while_open(self._finish)
            raise
        self._while_open(lambda: self._write(memoryview(buffer)))
        return buffer

    def _while_open(self, act: Callable[[], None]) -> None:
        with self._lock:
            if not self._is_open:
                return
            try:
                act()
            except (LocalError, OSError) as error:
                self._close()
                self._report(error)

    def _write(self, rest: memoryview) -> None:
        end = self._size_bytes + len(rest)
        if end > os.fstat(self._file).st_size:  # frames, and values whose size nobody knew
            self._folder.reserve(self._file, end, self._spares)
        while rest:
            written = os.pwrite(self._file, rest, self._size_bytes)
            self._size_bytes += written
            rest = rest[written:]

    def _finish(self) -> None:
        self._is_open = False  # whatever happens, the folder closes the file
        self._folder.finish(self._file, self._name, self._key, self._size_bytes)
        self.is_whole = True

    def close(self) -> None:
        """Give the copy up, unless it is whole."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._folder.drop(self._file, self._name)


class LoadCopies(_Copies):
    """The copies of a checkpoint's objects that this node has.

    Args:
        local: where they are kept.
        spec: the checkpoint.
        channel: that of the load.
        object_keys: the keys of its objects, relative to it.

    Attributes:
        numbers: which of the objects there are copies of, by their positions in `object_keys`.
        node: what the processes of this node have in common, and no others.
    """

    def __init__(
        self, local: Local, spec: StoreSpec, channel: Channel, object_keys: Sequence[str]
    ) -> None:
        super().__init__(local, spec, channel)
        self._files: dict[str, CopyFile] = {}
        self.numbers: frozenset[int] = frozenset()
        self.node = b""
        if self._folder is not None:
            with self._excused():
                keys = {self._prefix + key: key for key in object_keys}
                files = self._folder.open_copies(keys)
                self._files = {keys[key]: file for key, file in files.items()}
                self.numbers = frozenset(
                    number for number, key in enumerate(object_keys) if key in self._files
                )
                self.node = self._folder.identity

    def before(self, store: ObjectStore) -> LocalFirst:
        """Return a store, rooted at the checkpoint, that reads copies first."""
        return LocalFirst(store, self._files)

    def keep(self) -> None:
        """Keep the copies until a save has written all of its own: the state comes from them.

        A process that has saved keeps what it has saved, whatever it looks at.
        """
        if self._folder is not None and not self._folder.has_saved:
            self._folder.need(self._prefix + key for key in self._files)


class LocalFirst(WrappedStore):
    """Reads a range from the copy, and what is asked for once more from the inner store.

    A reader that finds damage asks once more from the damaged piece on: this piece is fetched, and
    the copy gives the rest. If that is not enough, the rest is fetched, too.

    Attributes:
        local_bytes: how many bytes copies have given, without those that were fetched then.
    """

    def __init__(self, inner: ObjectStore, files: dict[str, CopyFile]) -> None:
        super().__init__(inner)
        self._files = files
        self._lock = threading.Lock()
        self._asked: Counter[tuple[str, int]] = Counter()
        self._fetched_to: dict[tuple[str, int], int] = {}
        self.local_bytes = 0

    def open_range(self, key: str, start: int, end: int) -> RangeBody:
        """Open bytes `[start, end)`. Ranges with the same end are the same, or what is left."""
        file = self._files.get(key)
        if file is None or end > file.size_bytes:
            return self.inner.open_range(key, start, end)
        with self._lock:
            asked = self._asked[key, end]
            self._asked[key, end] += 1
            if not asked:
                self.local_bytes += end - start
        if asked < 2:
            fetch = partial(self._open_inner, key, end) if asked else None
            return _CopyRange(file, start, fetch)
        return self._open_inner(key, end, start, end)

    def _open_inner(self, key: str, range_end: int, start: int, end: int) -> RangeBody:
        """Open bytes of the range that ends there, which the copy has not given then."""
        with self._lock:
            fetched_to = max(start, self._fetched_to.get((key, range_end), 0))
            self.local_bytes -= max(0, end - fetched_to)
            self._fetched_to[key, range_end] = max(end, fetched_to)
        return self.inner.open_range(key, start, end)


class _CopyRange:
    """A `RangeBody` of a copy.

    Args:
        file: the copy.
        start: where the range begins.
        fetch: opens bytes of the store, from which the first piece comes. None: from the copy.
    """

    def __init__(
        self, file: CopyFile, start: int, fetch: Callable[[int, int], RangeBody] | None
    ) -> None:
        self._file = file
        self._at = start
        self._fetch = fetch
        self._fetched: RangeBody | None = None

    def readinto(self, into: memoryview) -> None:
        """Fill `into` with the next bytes."""
        if self._fetch is None:
            self._read(into)
            return
        with self._fetch(self._at, self._at + len(into)) as self._fetched:
            self._fetch = None
            self._fetched.readinto(into)
        self._fetched = None
        self._at += len(into)

    def _read(self, into: memoryview) -> None:
        try:
            while into:
                size_bytes = os.preadv(self._file.descriptor, [into], self._at)
                if not size_bytes:
                    raise CorruptDataError("the copy on this node has become shorter")
                self._at += size_bytes
                into = into[size_bytes:]
        except OSError as error:
            raise CorruptDataError(f"the copy on this node cannot be read: {error}") from error

    def hold(self, check: Callable[[Version], None]) -> None:
        """Do nothing: digests say whether the bytes are right."""

    def cancel(self, *, at_once: bool) -> bool:
        """End a `readinto` that another thread is in, if it reads from the store."""
        fetched = self._fetched
        return fetched is not None and fetched.cancel(at_once=at_once)

    def close(self) -> None:
        """Do nothing: the load closes the file."""

    def __enter__(self) -> _CopyRange:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
