"""The files of an export in their folder: written, and removed again if that fails on any rank.

**The deciding file** is put last and makes the others count: the index of shards, or the only file
of weights. Two exports may write to one folder at the same time. The first to put its deciding file
wins. The other one raises `LostRaceError`, removes its own weights, and spoils nothing of the
winner. These are the steps of an export, which `FolderWriter.run` goes through:

1. Look: note the files that it will replace or remove, each with its version (`_earlier`). Without
   `overwrite`, one such file ends the export.
2. Claim: in a folder without weights, create `model.safetensors.claim`, which only one of two
   exports can, and call the shards `model-00001-of-00003.safetensors`. Where weights are (a claim
   counts as such), nothing is claimed, and the shards have 8 random digits in their names. So no
   two exports write to one shard.
3. Write the shards, then small files such as config.json, and last the deciding file. Before each
   file is written, the deciding file must be as in step 1. Each file that is no shard is put on the
   condition that the file of its name is as in step 1, too. (A large file is sent in parts, which
   have no condition: of two exports that write one large file, the last to end stays.)
4. Compare. Right before the deciding file is put, all others must be as this export has written
   them. An index and `model.safetensors` are both deciding files, and no condition covers the two:
   whoever has put one of them looks for the other, and the index wins.
5. Clean up: remove the claim, and the files that step 1 has noted and this export has not replaced.
   An export that fails removes what it has written, and puts back what it has replaced. Either way
   it touches a file only while that has the version that was noted. A store cannot delete on a
   condition, so the version is looked up right before.

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
        # The version of each file that this rank has begun to write. It is None until the file has
        # arrived, and stays None if it is not known whether the file there is this export's. (A
        # request that Ctrl-C did not stop in time may still arrive after the clean-up.)
        self._written: dict[str, Version | None] = {}
        # The content of the files that this rank has replaced, to be put back if the export fails.
        self._replaced: dict[str, bytes] = {}
        # The random content of this export's claim, which tells it from the claim of another.
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
            # On every rank, also if it has failed: otherwise the other ranks would wait for it.
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
        # From here on the export counts: if the clean-up fails, nothing is undone.
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

        Only a local folder has to be made, perhaps with folders above it; the innermost comes
        first.

        Raises:
            InputError: there are such files, and `overwrite` is False; or two files of this export
                would have the same name.
        """
        names = self._plan.names
        if twice := [name for name in names if names.count(name) > 1]:
            raise InputError(f"two files would be called {twice[0]}", url=self._store.url)
        earlier = self._present()
        if earlier and not overwrite:
            text = f"{min(earlier)} exists there already; overwrite=True replaces or removes it"
            if [*earlier] == [self._claim_name]:  # the claim alone, and none of its files yet
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

        The deciding files are looked at first. If another export puts its deciding file after that
        look, this export notices the change and fails. If it has put the file before, it had
        written its shards by then, so the listing has them all.
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
        """Create the claim, unless step 1 has found weights, or the claim of another export.

        For an export of one file such as "w.pt", the files that it writes count instead of weights.

        Raises:
            LostRaceError: another export has begun or ended there since this one looked.
        """
        writes_weights = has_weights(self._plan.names)
        is_taken = has_weights(self._earlier) if writes_weights else bool(self._earlier)
        if is_taken:
            # Shards without random digits: their names were chosen shortly before step 1, when the
            # folder had no weights. So another export came in between, and may use these names.
            if self._shard_names and self._plan.stem == STEM:
                raise self._lost(min(self._earlier))
        elif self._conditions.conditional_create:
            self._written[self._claim_name] = None  # `_Target.put` sets its version
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

        Called on the first rank.

        Args:
            written_by_all: the claim and the shards of all ranks, as `_written` has those of one.
        """
        *small_files, deciding = self._plan.after_shards
        for file in small_files:
            self._write(file)
        written = {**written_by_all, **self._written}
        sizes = self._sizes(written)  # step 4: raises if one of these files has changed
        sizes[deciding.name] = self._write(deciding)
        self._check_other_deciding_file(deciding.name, written)
        return {name: sizes[name] for name in self._plan.names}

    def _write(self, file: PlannedFile) -> int:
        """Write one file from slabs that are read ahead; return its size in bytes.

        Raises:
            LostRaceError: since step 1, another export has changed a deciding file, or this file.
        """
        if (changed := self._changed_deciding_name()) is not None:
            raise self._lost(changed)
        earlier = self._earlier.get(file.name)
        if earlier is not None and earlier.size_bytes <= _PUT_BACK_MOST_BYTES:
            body, _ = self._store.get(file.name, max_size_bytes=_PUT_BACK_MOST_BYTES)
            self._replaced[file.name] = body
        self._written[file.name] = None  # `_Target` sets its version when it has arrived
        plan = plan_parts(file.size_bytes, self._spec.config.part_size_bytes)
        # A shard needs no condition: no other export writes a file of its name (step 2).
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
            reading: the caller closes it at the end, which stops the reads. An upload that is tried
                again calls this method once more, which first stops the reads of the earlier try.
        """
        reading.close()
        # The tensors of `source` have the dtypes that were saved, `tensors` those that are written.
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
        """Return the store through which one file is put.

        Args:
            earlier: the file of this name that step 1 has noted; None if there was none.
            has_condition: whether to put the file only if the folder still has `earlier`, or still
                has no file of this name.
        """
        is_fenced = False
        if has_condition:  # otherwise `_conditions` would send requests for nothing
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
        """Return the sizes of files of this export, each of which must be as it was written.

        Args:
            written: the version of each file by its name; None if it is not known.

        Raises:
            LostRaceError: a file was replaced, or one that this rank has written is gone.
            InputError: a file that another rank has written is not there.
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
            # The index wins, unless the other export has already cleaned up and, before the index
            # was there, taken shards of this export for leftovers: then `_sizes` raises.
            self._sizes(written)
            self._earlier[ONE_FILE] = one_file  # so step 5 removes it

    def _pinned(self, written: Mapping[str, Version | None]) -> PinnedStore:
        """Return the store, which refuses files that are not as this export has written them."""
        is_known = self._store.capabilities.conditional_update
        versions = {name: version for name, version in written.items() if version and is_known}
        return PinnedStore(self._store, versions)

    # --- step 5

    def _clean_up(self) -> None:
        """Remove the claim, and the files of an earlier export that were not replaced.

        The earlier index goes first. Nothing more is removed once there is an index that is neither
        the earlier one nor this export's: step 1 may have noted shards that belong to it.
        """
        if self._claim_name in self._written:
            self._remove_unchanged(self._claim_name, self._written[self._claim_name])
        earlier = {name: meta.version for name, meta in self._earlier.items()}
        # The index of this export if it has put one, otherwise the earlier one; None if it is not
        # known which version that is.
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
        """Remove the lock file that the conditional writes of a local store leave in the folder."""
        if isinstance(self._store, LocalStore):
            self._store.remove_lock()

    def _undo(self, error: BaseException) -> None:
        """Remove the files that this rank has written, and put back those that it has replaced.

        After a lost race, weights are removed and not put back, because those of the winner have
        replaced the earlier ones. Small files are put back where this export has replaced one, and
        never removed: the winner may have written files with the same bytes, which look the same.
        """
        names = list(reversed(self._written))
        if self._group is not None and isinstance(error, RankFailedError):
            if is_first(self._group):
                # A rank that has died cannot remove its shards, so this one does.
                names += sorted(self._shard_names - {*names, *self._earlier})
            elif self._changed_deciding_name():
                # The first rank has put the deciding file. If it has died, the files count; if not,
                # it removes all of them.
                return
        small_names = {file.name for file in self._plan.after_shards[:-1]}
        is_lost = type(error) is LostRaceError  # not a subclass, which a read may raise
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
                continue  # it is gone, or another export's: nothing to remove
            except DcpObjstoreError:
                unremoved.append(name)
        if unremoved:
            error.add_note(f"{', '.join(unremoved)} could not be removed from {self._store.url}")

    def _undo_file(self, name: str, *, may_remove: bool, may_put_back: bool) -> None:
        """Remove one file, or put back the file that it has replaced, if this export has put it.

        An earlier file that was too large to be kept in memory cannot be put back; then the new one
        stays.

        Args:
            name: the name of the file.
            may_remove: whether the file may be removed, if it has replaced none.
            may_put_back: whether the file that it has replaced is to be put back. If not, the new
                file counts as one that has replaced none.

        Raises:
            ObjectNotFoundError, PreconditionFailedError: it is not there, or is another export's.
        """
        version = self._written.get(name)
        if name.endswith(CLAIM_SUFFIX):
            if self._store.get(name, max_size_bytes=1024)[0] != self._claim_body:
                return  # another export's claim
        elif version is None and name not in self._shard_names:
            return  # it may be another export's file: only the names of shards are never shared
        self._pinned(self._written).head(name)  # raises if the file is not as it was written
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
        earlier: the version that the file there must have when the new one is put in one request;
            None if there must be no file.
        is_fenced: whether to put it on this condition, which the store can check. If not, the file
            is put whatever is there.
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
            LostRaceError: the file there is not `earlier`, so another export has changed it.
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
        own_version = outcome.version  # None: no answer came, but a file with these bytes is there
        # Another export may have put these bytes, so the version stays unknown. An index is surely
        # this export's: no other index has these names of shards in it.
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
    """Return a file of this size and its state; None if there is no file.

    Of a file of another size no bytes are read: `compare_and_swap` only needs to know that it is
    not the file that was put.
    """
    try:
        meta = store.head(key)
        if meta.size_bytes != size_bytes:
            return Stored(b"", meta)
        return Stored(*store.get(key, max_size_bytes=size_bytes))
    except ObjectNotFoundError:
        return None
