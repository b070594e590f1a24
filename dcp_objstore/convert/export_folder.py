"""The files of an export in their folder: written, and removed again if that fails on any rank.

**The deciding file** makes the others count: the index of shards, or the only file of weights.
Two exports may write to one folder at the same time. The first to put its deciding file wins. The
other one raises `LostRaceError`, removes its own weights, and spoils nothing of the winner. The
steps of an export, which `FolderWriter.run` goes through:

1. Look: note the files that it will replace or remove, each with its version (`_earlier`). Without
   `overwrite`, one such file ends the export.
2. Claim: in a folder without weights, create `model.safetensors.claim`, which only one of two
   exports can, and call the shards `model-00001-of-00003.safetensors`. Where weights are, nothing
   is claimed, and the shards have 8 random digits in their names. So no two exports write to one
   shard.
3. Write the shards, then small files such as config.json, and last the deciding file. Before each
   file, the deciding file must be as in step 1. A file that is no shard is put on the condition
   that it is as in step 1, too. (In parts there are no conditions: of two exports that write one
   large file, the last to end stays.)
4. Compare. Right before the deciding file is put, all others must be as this export has written
   them. An index and `model.safetensors` are both deciding files, and no condition covers the two:
   whoever has put one of them looks for the other, and the index wins.
5. Clean up: remove the claim, and what step 1 has noted and nothing has replaced. An export that
   fails removes what it has written, and puts back what it has replaced. Either way it changes a
   file only while that is as noted. A store cannot delete on a condition, so a look comes right
   before.

Where the store has no conditional writes, exports to one folder must not overlap.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from pathlib import Path

import torch.distributed as dist
from typing_extensions import Buffer

from dcp_objstore.checkpoint.clock import Clock
from dcp_objstore.checkpoint.compare_and_swap import compare_and_swap
from dcp_objstore.checkpoint.names import new_nonce
from dcp_objstore.checkpoint.probe import if_version, probed
from dcp_objstore.checkpoint.read import Stored
from dcp_objstore.config import COPIED_MOST_BYTES, MIB
from dcp_objstore.convert.copied_files import names_in
from dcp_objstore.convert.files import (
    CLAIM_SUFFIX,
    INDEX,
    ONE_FILE,
    STEM,
    PlannedFile,
    has_weights,
    tensor_bytes,
)
from dcp_objstore.convert.sources import CheckpointSource, TensorInfo
from dcp_objstore.distributed.failures import capture, from_all, on_first, raise_on_all
from dcp_objstore.distributed.groups import is_first
from dcp_objstore.errors import (
    DcpObjstoreError,
    InputError,
    LostRaceError,
    ObjectNotFoundError,
    PreconditionFailedError,
    RankFailedError,
)
from dcp_objstore.inspect.slabs import cut, read_ahead, stop
from dcp_objstore.observe.dispatch import Channel
from dcp_objstore.observe.events import Planned
from dcp_objstore.state.memory import byte_memory
from dcp_objstore.stores import StoreSpec
from dcp_objstore.stores.base import as_buffers
from dcp_objstore.stores.local import LocalStore
from dcp_objstore.stores.protocol import (
    Capabilities,
    ObjectMeta,
    ObjectStore,
    Precondition,
    Version,
)
from dcp_objstore.stores.wrappers import PinnedStore, WrappedStore, is_same_state
from dcp_objstore.transfer.memory import ByteArray
from dcp_objstore.transfer.parts import plan_parts
from dcp_objstore.transfer.progress import Progress
from dcp_objstore.transfer.upload import Content, upload_object
from dcp_objstore.transfer.workers import in_waves

# A larger file is not put back if an export that has replaced it fails.
_PUT_BACK_MOST_BYTES = 256 * MIB


@dataclass(frozen=True, kw_only=True)
class ExportPlan:
    """What one rank knows of the files of an export.

    Attributes:
        source: the checkpoint to read.
        tensors: its tensors, in the form that is written.
        own_shards: the shards that this rank writes.
        after_shards: what the first rank writes when all shards are there: small files, and last
            the deciding file. Empty on the other ranks.
        names: on the first rank, the names of all files, the deciding one last; on the others, the
            names of all shards.
        left_out: keys of the values that are not written.
        stem: what the names of shards begin with.
        digest: stands for the arguments that say which tensors lie where; the same on all ranks.
    """

    source: CheckpointSource
    tensors: Mapping[str, TensorInfo]
    own_shards: list[PlannedFile]
    after_shards: list[PlannedFile]
    names: tuple[str, ...]
    left_out: tuple[str, ...]
    stem: str
    digest: str


class FolderWriter:
    """Writes the files of one export. The module says what holds for two of them.

    Args:
        spec: the folder.
        plan: what to write.
        channel: channel for the events.
        group: the ranks that write; None if this process is alone.
    """

    def __init__(
        self, spec: StoreSpec, plan: ExportPlan, channel: Channel, group: dist.ProcessGroup | None
    ) -> None:
        self._spec = spec
        self._store = spec.open()
        self._plan = plan
        self._channel = channel
        self._group = group
        self._progress = Progress(spec.config.stall_timeout_seconds, channel)
        # The files of an earlier export that are replaced or removed (step 1), by name.
        self._earlier: dict[str, ObjectMeta] = {}
        # The version of each file that this rank has written; None while it is written, or if it is
        # not known whether it arrived. (One that Ctrl-C has not stopped in time arrives yet.)
        self._written: dict[str, Version | None] = {}
        # The content of the files that this rank has replaced, to be put back if the export fails.
        self._replaced: dict[str, bytes] = {}
        # The content of the claim, by which this export knows its own one.
        self._claim_body = new_nonce().encode()

    def run(self, *, overwrite: bool) -> dict[str, int]:
        """Write the files; return the sizes of those of all ranks, by name. A collective."""
        url, group = self._spec.url, self._group
        self._earlier, new_folders = on_first(
            lambda: self._check_destination(overwrite=overwrite), url, group
        )
        try:
            on_first(self._claim, url, group)
            _, failed = capture(self._write_shards)
            written_by_ranks = from_all(self._written, url, group)
            raise_on_all(failed, url, group)
            written = {name: by_rank[name] for by_rank in written_by_ranks for name in by_rank}
            sizes = on_first(lambda: self._finish(written), url, group)
        except BaseException as error:
            self._undo(error)
            self._remove_lock()
            for folder in new_folders:
                with suppress(OSError):  # other ranks have files in it, or have removed it
                    folder.rmdir()
            raise
        on_first(self._clean_up, url, group)
        return sizes

    # --- names

    @property
    def _deciding_names(self) -> tuple[str, ...]:
        """The names that a deciding file of this folder may have; none if this rank knows none."""
        names = self._plan.names
        return (INDEX, ONE_FILE) if has_weights(names) else names[-1:]

    @property
    def _claim_name(self) -> str:
        """The name of the file that only one of several exports can create (on the first rank)."""
        names = self._plan.names
        return f"{ONE_FILE if has_weights(names) else names[-1]}{CLAIM_SUFFIX}"

    @property
    def _shard_names(self) -> set[str]:
        """The names of the shards of all ranks."""
        return {*self._plan.names} - {file.name for file in self._plan.after_shards}

    # --- steps 1 and 2

    def _check_destination(self, *, overwrite: bool) -> tuple[dict[str, ObjectMeta], list[Path]]:
        """Return the existing files that the export replaces or removes, and the folders it makes.

        Raises:
            InputError: there are such files, and they are not to be replaced.
        """
        names = self._plan.names
        if twice := [name for name in names if names.count(name) > 1]:
            raise InputError(f"two files would be called {twice[0]}", url=self._store.url)
        earlier = self._present()
        if earlier and not overwrite:
            text = f"{min(earlier)} exists there already; overwrite=True replaces or removes it"
            if [*earlier] == [self._claim_name]:
                text = (
                    f"another export is under way there, or has died ({min(earlier)} is there);"
                    " overwrite=True goes on all the same"
                )
            raise InputError(text, url=self._store.url)
        folder = Path(self._spec.parsed.prefix)
        above = (folder, *folder.parents) if self._spec.parsed.scheme == "file" else ()
        return earlier, [directory for directory in above if not directory.exists()]

    def _present(self) -> dict[str, ObjectMeta]:
        """Return the files that are there and that this export replaces or removes, by name.

        The deciding files are looked at first. Another export that puts one later makes this export
        fail; one that has put it before had written its shards by then, so the listing has them.
        """
        deciding = [self._head(name) for name in self._deciding_names]
        names = {*self._plan.names, self._claim_name}
        if has_weights(self._plan.names):
            # All weights of earlier exports go: some servers read every shard that is there.
            present = names_in(self._spec, self._store)
            names = {name for name in present if name in names or has_weights([name])}
        others = in_waves(self._head, sorted(names - {*self._deciding_names}))
        return {meta.key: meta for meta in (*deciding, *others) if meta}

    def _head(self, name: str) -> ObjectMeta | None:
        try:
            return self._store.head(name)
        except ObjectNotFoundError:
            return None

    def _claim(self) -> None:
        """Create the claim, if step 1 has found no weights (no file, if this export writes none).

        Raises:
            LostRaceError: another export has begun or ended there since this one looked.
        """
        writes_weights = has_weights(self._plan.names)
        is_taken = has_weights(self._earlier) if writes_weights else bool(self._earlier)
        if is_taken:
            # The names of shards were chosen before step 1, when the folder had no weights yet.
            if self._shard_names and self._plan.stem == STEM:
                raise self._lost(min(self._earlier))
        elif self._conditions.conditional_create:
            self._written[self._claim_name] = None
            self._target(None, has_condition=True).put(self._claim_name, self._claim_body)

    @cached_property
    def _conditions(self) -> Capabilities:
        """The capabilities of the store; a server's conditional writes are tried out."""
        is_here = self._spec.parsed.scheme in ("file", "memory")
        return self._store.capabilities if is_here else probed(self._store)

    # --- steps 3 and 4

    def _write_shards(self) -> None:
        """Write the shards of this rank."""
        own_files = [*self._plan.own_shards, *self._plan.after_shards]
        self._channel.emit(
            Planned,
            self._channel.began_at,
            operation="export",
            items=sum(len(file.keys) for file in own_files),
            size_bytes=sum(file.size_bytes for file in own_files),
            objects=len(own_files),
            requests=len(own_files),
        )
        for file in self._plan.own_shards:
            self._write(file)

    def _finish(self, written_by_all: Mapping[str, Version | None]) -> dict[str, int]:
        """Write all other files, now that the shards are there; return the sizes of all files.

        Args:
            written_by_all: the claim and the shards of all ranks, as `_written` has those of one.
        """
        *small_files, deciding = self._plan.after_shards
        for file in small_files:
            self._write(file)
        written = {**written_by_all, **self._written}
        sizes = self._sizes(written)
        sizes[deciding.name] = self._write(deciding)
        self._check_other_deciding_file(deciding.name, written)
        return {name: sizes[name] for name in self._plan.names}

    def _write(self, file: PlannedFile) -> int:
        """Write one file from slabs that are read ahead; return its size in bytes.

        Raises:
            LostRaceError: another export has ended, whose files this one would replace.
        """
        if (changed := self._changed_deciding_name()) is not None:
            raise self._lost(changed)
        earlier = self._earlier.get(file.name)
        if earlier is not None and earlier.size_bytes <= _PUT_BACK_MOST_BYTES:
            body, _ = self._store.get(file.name, max_size_bytes=_PUT_BACK_MOST_BYTES)
            self._replaced[file.name] = body
        self._written[file.name] = None  # `_Target` sets its version
        plan = plan_parts(file.size_bytes, self._spec.config.part_size_bytes)
        # No other export has the names of shards.
        has_condition = file not in self._plan.own_shards
        with ExitStack() as reading:
            uploaded = upload_object(
                self._target(earlier, has_condition=has_condition),
                file.name,
                Content(partial(self._buffers, file, plan.slice_size_bytes, reading)),
                plan,
                config=self._spec.config,
                progress=self._progress,
                most=max(2, COPIED_MOST_BYTES // plan.part_size_bytes),
            )
        return uploaded.size_bytes

    def _buffers(
        self, file: PlannedFile, slice_size_bytes: int, reading: ExitStack
    ) -> Iterator[ByteArray]:
        """Return the bytes of a file, of which each buffer has at most `slice_size_bytes`.

        Args:
            file: the file.
            slice_size_bytes: what the upload takes at a time.
            reading: its end stops the reads. An upload that is tried again calls this once more,
                which stops the reads of the earlier try.
        """
        reading.close()
        source, tensors = self._plan.source, self._plan.tensors
        slabs = chain.from_iterable(cut(key, *source.tensors[key]) for key in file.keys)
        pieces = read_ahead(slabs, source.read)
        reading.callback(stop, pieces)

        def bytes_of(key: str) -> Iterator[ByteArray]:
            remaining_bytes = tensor_bytes(tensors[key])
            while remaining_bytes:
                memory = byte_memory(next(pieces).to(tensors[key].dtype))
                assert memory is not None
                remaining_bytes -= memory.nbytes
                for start in range(0, memory.nbytes, slice_size_bytes):
                    yield memory[start : start + slice_size_bytes]

        return file.buffers(bytes_of)

    def _target(self, earlier: ObjectMeta | None, *, has_condition: bool) -> _Target:
        """Return the folder for one file.

        Args:
            earlier: the file that step 1 has noted; None if there was none.
            has_condition: whether it must still be there, unchanged (or not there).
        """
        is_fenced = False
        if has_condition:  # otherwise no request is sent to try out the store
            can = self._conditions
            is_fenced = can.conditional_update if earlier else can.conditional_create
        return _Target(self, earlier.version if earlier else None, is_fenced=is_fenced)

    def _changed_deciding_name(self) -> str | None:
        """Return the name of a deciding file that is not as step 1 has noted it; None if all are.

        It was written, replaced or removed by another export, or by the first rank of this one.
        """
        names = self._deciding_names
        return next((name for name in names if self._has_changed(name, self._head(name))), None)

    def _has_changed(self, name: str, now: ObjectMeta | None) -> bool:
        earlier = self._earlier.get(name)
        return (now and now.version) != (earlier and earlier.version)

    def _lost(self, name: str) -> LostRaceError:
        return LostRaceError(
            f"another export has written or removed {name} there meanwhile",
            advice="export again when none is under way (the weights of this one are removed)",
            url=self._store.url,
        )

    def _sizes(self, written: Mapping[str, Version | None]) -> dict[str, int]:
        """Return the sizes of files of this export.

        Raises:
            LostRaceError: one is not as this export has written it.
            InputError: one of another rank is not there.
        """
        try:
            heads = in_waves(self._pinned(written).head, [*written])
            return {meta.key: meta.size_bytes for meta in heads}
        except (PreconditionFailedError, ObjectNotFoundError) as error:
            is_of_other_rank = error.object_key not in self._written
            if is_of_other_rank and isinstance(error, ObjectNotFoundError):
                raise InputError(
                    f"another rank has written {error.object_key}, and this one does not see it:"
                    " all ranks need one folder or object store that they share",
                    url=self._store.url,
                ) from error
            raise self._lost(str(error.object_key)) from error

    def _check_other_deciding_file(self, put: str, written: Mapping[str, Version | None]) -> None:
        """Look for an index beside `model.safetensors`, or the other way round (step 4).

        Args:
            put: the name of the deciding file that this export has just put.
            written: its other files, each with its version.

        Raises:
            LostRaceError: another export has put an index, so the one file does not count; or it
                has removed shards of this export.
        """
        if put == ONE_FILE and self._has_changed(INDEX, self._head(INDEX)):
            raise self._lost(INDEX)
        one_file = self._head(ONE_FILE) if put == INDEX else None
        if one_file and self._has_changed(ONE_FILE, one_file):
            self._sizes(written)
            self._earlier[ONE_FILE] = one_file  # which step 5 removes

    def _pinned(self, written: Mapping[str, Version | None]) -> PinnedStore:
        """Return the store, which refuses files that are not as this export has written them."""
        is_known = self._store.capabilities.conditional_update
        versions = {name: version for name, version in written.items() if version and is_known}
        return PinnedStore(self._store, versions)

    # --- step 5

    def _clean_up(self) -> None:
        """Remove the claim, and the files of an earlier export that were not replaced.

        The index goes first, and nothing goes once there is another index: its shards may be among
        what this export has taken for leftovers.
        """
        if self._claim_name in self._written:
            self._remove_unchanged(self._claim_name, self._written[self._claim_name])
        earlier = {name: meta.version for name, meta in self._earlier.items()}
        known_index = self._written.get(INDEX, earlier.get(INDEX))
        for name in sorted(earlier.keys() - {*self._plan.names}, key=lambda name: name != INDEX):
            index = self._head(INDEX)
            if index and not (known_index and is_same_state(index.version, known_index)):
                break
            self._remove_unchanged(name, earlier[name])
        self._remove_lock()

    def _remove_unchanged(self, name: str, version: Version | None) -> None:
        """Remove a file, unless it is not in this state, as far as that is known."""
        with suppress(ObjectNotFoundError, PreconditionFailedError):
            self._pinned({name: version}).head(name)
            self._store.delete(name)

    def _remove_lock(self) -> None:
        if isinstance(self._store, LocalStore):
            self._store.remove_lock()

    def _undo(self, error: BaseException) -> None:
        """Remove the files that this rank has written, and put back those that it has replaced.

        After a lost race, weights are only removed and small files only put back. The winner has
        replaced the earlier weights. It may have written small files with the same bytes, which
        look the same as those of this export.
        """
        names = list(reversed(self._written))
        if self._group is not None and isinstance(error, RankFailedError):
            if is_first(self._group):  # for the rank that has died
                names += sorted(self._shard_names - {*names, *self._earlier})
            elif self._changed_deciding_name():
                return  # the first rank has died, but after it had put the deciding file
        small_names = {file.name for file in self._plan.after_shards[:-1]}
        is_lost = type(error) is LostRaceError
        unremoved = []
        for name in names:
            is_small = name in small_names
            try:
                self._undo_file(
                    name,
                    may_remove=not (is_lost and is_small),
                    may_put_back=not is_lost or is_small,
                )
            except (ObjectNotFoundError, PreconditionFailedError):
                continue
            except DcpObjstoreError:
                unremoved.append(name)
        if unremoved:
            error.add_note(f"{', '.join(unremoved)} could not be removed from {self._store.url}")

    def _undo_file(self, name: str, *, may_remove: bool, may_put_back: bool) -> None:
        """Remove one file, or put back what it has replaced, if it is known to be of this export.

        Raises:
            ObjectNotFoundError, PreconditionFailedError: it is not there, or is another's.
        """
        version = self._written.get(name)
        if name.endswith(CLAIM_SUFFIX):
            if self._store.get(name, max_size_bytes=1024)[0] != self._claim_body:
                return
        elif version is None and name not in self._shard_names:
            return  # another export may have put it: only shards have names that no other uses
        self._pinned(self._written).head(name)
        if name not in self._earlier or not may_put_back:
            if may_remove:
                self._store.delete(name)
        elif name in self._replaced:
            condition = None
            if version is not None and self._conditions.conditional_update:
                condition = if_version(self._store, version)
            self._store.put(name, self._replaced[name], precondition=condition)


class _Target(WrappedStore):
    """The folder for one file of an export: puts it, and notes its version.

    Args:
        writer: the export, whose `_written` gets the version of the file when it arrives.
        earlier: the version that the file must have when it is put in one request; None: there must
            be no file.
        is_fenced: whether that holds, and the store can refuse otherwise. If not, the file is put
            whatever is there.
    """

    def __init__(self, writer: FolderWriter, earlier: Version | None, *, is_fenced: bool) -> None:
        super().__init__(writer._store)
        self._writer, self._written = writer, writer._written
        self._earlier, self._is_fenced = earlier, is_fenced

    def put(
        self,
        key: str,
        data: Buffer | Sequence[Buffer],
        *,
        precondition: Precondition | None = None,
        retry: bool = True,
    ) -> Version:
        """Write the file in one request.

        Raises:
            LostRaceError: it is not in the state that was expected.
            CommitUnknownError: the store did not say in time whether it arrived.
        """
        if not self._is_fenced:
            version = super().put(key, data, precondition=precondition, retry=retry)
            self._written[key] = version
            return version
        body = b"".join(as_buffers(data))
        outcome = compare_and_swap(
            self.inner,
            key,
            body,
            self._earlier,
            # For this long, the file is put again until it is known whether it arrived.
            tries=Clock.of_job(self._writer._spec.config.stall_timeout_seconds).tries(),
            what=key,
            read=lambda store: _read(store, key, len(body)),
            landed=lambda seen: seen == body,
        )
        if not outcome.landed:
            raise self._writer._lost(key)
        own_version = outcome.version
        # The answer was lost, and a file with these bytes is there. Only an index is surely of this
        # export: no other has these names of shards in it.
        if key == INDEX and outcome.stored:
            own_version = outcome.stored.version
        self._written[key] = own_version
        return own_version or Version()

    def put_stream(
        self,
        key: str,
        buffers: Iterator[Buffer],
        *,
        part_size_bytes: int,
        max_concurrency: int,
    ) -> Version:
        """Write the file in parts, whatever is there."""
        version = super().put_stream(
            key, buffers, part_size_bytes=part_size_bytes, max_concurrency=max_concurrency
        )
        self._written[key] = version
        return version


def _read(store: ObjectStore, key: str, size_bytes: int) -> Stored[bytes] | None:
    """Return a file and its state; no bytes of one of another size, and None if there is none."""
    try:
        meta = store.head(key)
        if meta.size_bytes != size_bytes:
            return Stored(b"", meta)
        return Stored(*store.get(key, max_size_bytes=size_bytes))
    except ObjectNotFoundError:
        return None
