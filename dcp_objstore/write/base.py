"""The base of an incremental save: what has not changed since is copied by the store.

Tensors whose dtype, shape and digests equal those of the base are not uploaded. The store copies
their bytes into new objects of this save, which belong to it like those that are uploaded. So
no checkpoint refers to the objects of another, and deletion, sweeps and readers know nothing of
this.

- Each rank decides alone what is equal, from the base's index and digests of its tensors. A
  tensor that has changed is noticed at the first block that differs. Its digests are computed again
  as it is uploaded: copies may take minutes, and digests from before them would not be those of
  what is sent if the tensor changes during the save.
- Runs are copied: items that follow one another in an object of the base, with the framing between
  them, which must be what this process would write. (The index has one digest of all framing of an
  object, and a copied object needs its own.) A run is a contiguous range, so an object that
  is made of one has equal parts, as some servers want (Cloudflare R2).
- A run that is too short for a part of an upload is uploaded, together with others that have not
  changed. So the next save finds one long run where this one has found many short ones.
- A store that copies only whole objects copies a run if it is one. Unchanged data, if it is long
  enough, is uploaded into separate objects there, so that the next save finds whole ones.
- The base is read like any checkpoint (rule 7 of `checkpoint.read`), but nothing holds it: it may
  be deleted or swept in the meantime, or something else may overwrite its objects. So the store
  copies an object only if it has the ETag that the base's index gives (rule 12 of
  `checkpoint.commit`). Items that cannot be copied, for whatever reason, are uploaded.
"""

from __future__ import annotations

import io
import itertools
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import xxhash
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from dcp_objstore.checkpoint import index as ix
from dcp_objstore.checkpoint.catalogue import list_run
from dcp_objstore.checkpoint.names import data_key
from dcp_objstore.checkpoint.read import open_committed, open_marked
from dcp_objstore.config import TransferConfig
from dcp_objstore.errors import ConfigError, DcpObjstoreError, InvalidUrlError
from dcp_objstore.observe.events import NotCopied
from dcp_objstore.observe.report import logger
from dcp_objstore.state import tensor_frame
from dcp_objstore.state.device import Outbound
from dcp_objstore.state.stored import StoredItem, StoredObject, constant_name, known_dtype
from dcp_objstore.stores import StoreSpec
from dcp_objstore.stores.protocol import CopySource, Version
from dcp_objstore.stores.urls import parse_url
from dcp_objstore.threads import result_of
from dcp_objstore.transfer.copies import LEAST_PART_BYTES, copied_parts, copy_objects
from dcp_objstore.transfer.digests import BLOCK_SIZE_BYTES, DIGEST_SIZE_BYTES, small_digest
from dcp_objstore.transfer.memory import ByteArray
from dcp_objstore.transfer.parts import PartPlan
from dcp_objstore.transfer.progress import Progress
from dcp_objstore.transfer.upload import Uploaded
from dcp_objstore.transfer.workers import DaemonPool
from dcp_objstore.write.layout import SMALL_BYTES, planned_dtype

if TYPE_CHECKING:
    from dcp_objstore.write.session import Save


LATEST = "latest"
# Up to this number of runs each has its own object; more of them share as many objects.
_MOST_OBJECTS = 16


@dataclass(frozen=True, slots=True)
class Base:
    """A checkpoint that a save may copy from, or the reason why there is none. Picklable.

    Attributes:
        url: URL of the checkpoint; empty if the run has none yet.
        index: its index; None if it cannot be copied from.
        why_not: the reason, for the user; empty if there is nothing to say.
    """

    url: str = ""
    index: ix.Index | None = None
    why_not: str = ""


def check_base(base: str | None, spec: StoreSpec) -> None:
    """Refuse a base from which no store could copy into the checkpoint.

    Raises:
        InvalidUrlError: it is neither "latest" nor a URL.
        ConfigError: its scheme is not that of the checkpoint.
    """
    if base is None or base == LATEST:
        return
    try:
        scheme = parse_url(base, (spec.parsed.scheme,)).scheme
    except InvalidUrlError as error:
        raise InvalidUrlError(
            f'base must be "latest" or the URL of a checkpoint: {error.message}'
        ) from None
    if scheme != spec.parsed.scheme:
        raise ConfigError(
            f"base is at {scheme}://, the checkpoint at {spec.parsed.scheme}://: a store copies"
            " only what it has itself",
            url=spec.url,
        )


def open_base(base: str, spec: StoreSpec) -> Base:
    """Read marker and index of the base; never raise because of what is, or is not, there.

    Args:
        base: URL of the base, or "latest": the newest checkpoint directly below the prefix in which
            the checkpoint of the save lies.
        spec: the store of the checkpoint of the save.

    Returns:
        The base. If nothing can be copied from it, it has no index, but the reason for that; and no
        reason if there is no checkpoint yet.
    """
    if not spec.open().capabilities.copies:
        return Base(base, None, "this store copies nothing by itself, or not over this transport")
    try:
        return _read_base(base, spec)
    except DcpObjstoreError as error:
        return Base(base, None, f"it cannot be read: {error}")


def _read_base(base: str, spec: StoreSpec) -> Base:
    """Read the index of the base: the checkpoint at a URL, or the newest step of the run."""
    if base != LATEST:
        base_spec = spec.at(base)
        _, body = open_committed(base_spec.open())
        return Base(base_spec.url, ix.decode(body))
    run, _ = spec.parent()
    if run is None:  # no prefix lies above the checkpoint
        return Base()
    # At most one step; none if the run has no checkpoint yet.
    for step in list_run(run.open(), run.open_child, newest=1).steps:
        _, body = open_marked(step.store, step.stored)
        return Base(step.store.url, ix.decode(body))
    return Base()


class _BaseItem(NamedTuple):
    """An item of this save for which the base has one with the same key, offset and shape.

    Attributes:
        row: the row of the base's item in the base's index.
        stored: what that row says.
        dtype: the name of the dtype that the tensor has in the base.
    """

    item: WriteItem
    row: int
    stored: ix.Item
    dtype: str

    @property
    def end(self) -> int:
        """The position of its end in its object."""
        return self.stored.offset + self.stored.length


class _Run(NamedTuple):
    """Items that have not changed, and follow one another in an object of the base.

    Attributes:
        source: the object of the base.
        framing: the bytes of the run that are not payload.
        start: the offset of the padding before the first item.
    """

    source: ix.ObjectEntry
    items: Sequence[_BaseItem]
    framing: bytes
    start: int

    @property
    def end(self) -> int:
        """The position of the end of the last item."""
        return self.items[-1].end

    @property
    def is_whole(self) -> bool:
        """Whether it is the whole object."""
        return (self.start, self.end) == (0, self.source.size_bytes)

    @property
    def size_bytes(self) -> int:
        """Number of bytes to copy."""
        return self.end - self.start


class _NotCopied(NamedTuple):
    """Bytes that have not changed, but are uploaded, and the reason."""

    reason: str
    size_bytes: int


@dataclass(slots=True)
class Unchanged:
    """The part of a rank's plan that need not be uploaded.

    Attributes:
        items: all items that have not changed, also those that cannot be copied.
        objects: the objects that the store should make: for each the runs of which it consists.
        refused: the runs that are not copied.
        whole_only: whether the store copies only whole objects.
        copied: the items that `copy` has had copied.
        results: a result for each of these.
        stored: the objects that the store has made of them.
    """

    base: Base = field(default_factory=Base)
    items: set[MetadataIndex] = field(default_factory=set)
    objects: list[Sequence[_Run]] = field(default_factory=list)
    refused: list[_NotCopied] = field(default_factory=list)
    whole_only: bool = False
    copied: set[MetadataIndex] = field(default_factory=set)
    results: list[WriteResult] = field(default_factory=list)
    stored: list[StoredObject] = field(default_factory=list)

    @property
    def parts(self) -> int:
        """The number of parts to copy."""
        if self.whole_only:
            return len(self.objects)
        return sum(len(copied_parts(self._sources(runs))) for runs in self.objects)

    @property
    def to_copy(self) -> set[MetadataIndex]:
        """The items to copy."""
        runs = itertools.chain.from_iterable(self.objects)
        return {unchanged.item.index for run in runs for unchanged in run.items}

    def copy(self, save: Save, config: TransferConfig) -> None:
        """Have the store copy, and record what it has copied.

        The first numbers of the rank's objects belong to copies, also to those that failed. Such an
        object may exist, if only the answer was lost, and a key is never written twice (rule 3 of
        `checkpoint.names`).
        """
        keys = [data_key(save.rank, number, save.nonce) for number in range(len(self.objects))]
        runs_of = dict(zip(keys, self.objects, strict=True))
        outcomes = copy_objects(
            save.open(),
            {key: self._sources(runs) for key, runs in runs_of.items()},
            config,
            Progress(config.stall_timeout_seconds, save.channel),
        )
        refused = list(self.refused)
        for key, outcome in outcomes.items():
            if isinstance(outcome, Uploaded):
                self._record(save, key, runs_of[key], outcome)
            else:
                size_bytes = sum(run.size_bytes for run in runs_of[key])
                refused.append(_NotCopied(str(outcome), size_bytes))
        if refused:
            size_bytes = sum(run.size_bytes for run in refused)
            report_not_copied(save, self.base.url, refused[0].reason, size_bytes)

    def _sources(self, runs: Iterable[_Run]) -> list[CopySource]:
        """Return where the store finds the bytes of an object that consists of these runs."""
        return [
            CopySource(
                f"{self.base.url}/{run.source.key}", run.start, run.end, Version(run.source.e_tag)
            )
            for run in runs
        ]

    def _record(self, save: Save, key: str, runs: Sequence[_Run], copy: Uploaded) -> None:
        """Record an object that the store has made, and where its items lie in it."""
        framing = xxhash.xxh3_128(b"".join(run.framing for run in runs)).digest()
        entry = ix.ObjectEntry(key, copy.size_bytes, copy.version.e_tag, framing)
        stored = StoredObject(entry, copy.parts, save.spec.url, copied=True)
        self.stored.append(stored)
        # Where each run begins in the new object; one more than there are runs: its end.
        begins = itertools.accumulate((run.size_bytes for run in runs), initial=0)
        for run, begin in zip(runs, begins, strict=False):
            moved_by = begin - run.start
            for item, _, in_base, dtype in run.items:
                self.copied.add(item.index)
                place = StoredItem(
                    object=stored,
                    offset=in_base.offset + moved_by,
                    length=in_base.length,
                    payload_offset=in_base.payload_offset + moved_by,
                    payload_length=in_base.payload_length,
                    digests=in_base.digests,
                    pickled=False,  # a tensor that is pickled is never found unchanged
                    converted_to=None if dtype == planned_dtype(item) else dtype,
                )
                self.results.append(WriteResult(item.index, in_base.length, place))


def report_not_copied(save: Save, base: str, reason: str, size_bytes: int) -> None:
    """Log and emit that bytes which the store was to copy are uploaded instead."""
    logger.warning(
        "%s: rank %d uploads what has not changed since the base (%s), too: %s",
        save.spec.url,
        save.rank,
        base,
        reason,
    )
    save.channel.emit(
        NotCopied, time.monotonic(), base=base, reason=reason, not_copied_bytes=size_bytes
    )


def find_unchanged(
    base: Base,
    items: Iterable[WriteItem],
    resolve: Callable[[WriteItem], torch.Tensor | io.BytesIO],
    *,
    known_digests: Mapping[tuple[int, int], bytes],
    config: TransferConfig,
    part_plan: PartPlan,
    digests_of: Callable[[ByteArray], bytes],
    whole_only: bool,
) -> Unchanged:
    """Compare a rank's items with those of the base, and plan what to copy. Sends no request.

    Extra memory: that of as many tensors as there are threads that hash, if they are not contiguous
    or are made by the planner.

    Args:
        known_digests: digests that staging has computed, by the address and size of the memory.
        part_plan: the sizes of slices out of a GPU's memory.
        digests_of: `block_digests` or a wrapper of it, for the threads that hash.
        whole_only: whether the store copies only whole objects.
    """
    assert base.index is not None
    unchanged_items = _compare(
        _candidates(base.index, items),
        resolve,
        known_digests=known_digests,
        config=config,
        part_plan=part_plan,
        digests_of=digests_of,
    )
    most_bytes = config.max_object_size_bytes
    # If the store copies only whole objects, runs must not be cut, however large they are.
    runs, refused = _runs(base.index, unchanged_items, sys.maxsize if whole_only else most_bytes)
    # Shorter runs are uploaded: they are too short for a part of an upload.
    long = [run for run in runs if run.size_bytes >= LEAST_PART_BYTES]
    objects: Iterable[Sequence[_Run]] = _shares(long, most_bytes)
    if whole_only:
        objects = [[run] for run in long if run.is_whole]
    return Unchanged(
        base,
        items={unchanged.item.index for unchanged in unchanged_items},
        objects=list(objects),
        refused=refused,
        whole_only=whole_only,
    )


def _compare(
    candidates: Iterable[_BaseItem],
    resolve: Callable[[WriteItem], torch.Tensor | io.BytesIO],
    *,
    known_digests: Mapping[tuple[int, int], bytes],
    config: TransferConfig,
    part_plan: PartPlan,
    digests_of: Callable[[ByteArray], bytes],
) -> list[_BaseItem]:
    """Return the items whose dtype and digests are those of the base; see `find_unchanged`."""
    outbound = Outbound(part_plan, config, lambda: None)
    unchanged_items: list[_BaseItem] = []
    waiting: deque[tuple[_BaseItem, Future[bool]]] = deque()  # comparisons that a thread makes

    def compare(candidate: _BaseItem) -> bool | Future[bool]:
        """Compare an item: large host memory in a thread, the rest here and now."""
        size_bytes, digests = candidate.stored.payload_length, candidate.stored.digests
        data = resolve(candidate.item)
        assert not isinstance(data, io.BytesIO)  # a candidate is a tensor
        payload = tensor_frame.raw_payload(data)
        if payload is None:  # it would be pickled; what the base has is not
            return False
        if (constant_name(payload.dtype), payload.nbytes) != (candidate.dtype, size_bytes):
            return False
        if staged_digests := known_digests.get((payload.data_ptr(), size_bytes)):
            return staged_digests == digests
        if payload.is_cpu and size_bytes <= SMALL_BYTES:
            return small_digest(tensor_frame.small_payload(payload, size_bytes)) == digests
        copied = outbound.slices(payload)  # None for host memory
        slices = copied or tensor_frame.payload_slices(payload, BLOCK_SIZE_BYTES)
        # Device memory is compared in this thread: `outbound` is for one thread at a time.
        if copied is not None or not payload.is_cpu:
            return _have_digests(digests, slices, digests_of)
        return hashers.submit(_have_digests, digests, slices, digests_of)

    def take_first() -> None:
        """Wait for the comparison that was begun first."""
        candidate, is_same = waiting.popleft()
        if result_of(is_same):
            unchanged_items.append(candidate)

    with DaemonPool(config.hash_threads, "hash") as hashers:
        for candidate in candidates:
            # An item that raises is uploaded, where it raises again, and the error names its key.
            with suppress(Exception):
                is_same = compare(candidate)
                if isinstance(is_same, Future):
                    waiting.append((candidate, is_same))
                elif is_same:
                    unchanged_items.append(candidate)
            if len(waiting) > 2 * config.hash_threads:
                take_first()
        while waiting:
            take_first()
    return unchanged_items


def _shares(runs: Sequence[_Run], most_bytes: int) -> Iterator[Sequence[_Run]]:
    """Distribute runs over up to `_MOST_OBJECTS` objects, or more if these were too large."""
    # `array_split` must make at least one section. Without runs it is empty, and yields nothing.
    for numbers in np.array_split(np.arange(len(runs)), min(_MOST_OBJECTS, len(runs)) or 1):
        share: list[_Run] = []
        size_bytes = 0
        for run in (runs[number] for number in numbers):
            # Runs that are too much for one object go on in another.
            if share and size_bytes + run.size_bytes > most_bytes:
                yield share
                share, size_bytes = [], 0
            share.append(run)
            size_bytes += run.size_bytes
        if share:
            yield share


def _candidates(index: ix.Index, items: Iterable[WriteItem]) -> Iterator[_BaseItem]:
    """Yield the items that the base may have: it has one with the same key, offset and shape.

    Dtypes and bytes are compared by `_compare`, because a planner may convert what it saves.
    """
    for item in items:
        tensor, data = index.tensors.get(item.index.fqn), item.tensor_data
        # `data` is None for a value that is not a tensor.
        if tensor is None or data is None or tensor.shape != tuple(data.size):
            continue
        row = index.find(tensor.key, data.chunk.offsets, item.index.index)
        if row is None:
            continue
        _, sizes = index.box(tensor.key, row - index.rows(tensor.key).start)
        if sizes == list(data.chunk.sizes):
            yield _BaseItem(item, row, index.item(row), tensor.dtype)


def _have_digests(
    digests: bytes,
    pieces: Iterable[ByteArray],
    digests_of: Callable[[ByteArray], bytes],
) -> bool:
    """Return whether all blocks have these digests; stop at the first that has not.

    Args:
        digests: the digests of all blocks, one after the other.
        pieces: the bytes, cut only between blocks.
        digests_of: a function that returns the digest of a block.
    """
    position = 0
    for piece in pieces:
        for start in range(0, piece.nbytes, BLOCK_SIZE_BYTES):
            digest = digests_of(piece[start : start + BLOCK_SIZE_BYTES])
            if digest != digests[position : position + DIGEST_SIZE_BYTES]:
                return False
            position += DIGEST_SIZE_BYTES
    return True


def _runs(
    index: ix.Index, unchanged_items: Iterable[_BaseItem], most_bytes: int
) -> tuple[list[_Run], list[_NotCopied]]:
    """Join unchanged items that follow one another in an object of the base.

    A run of several items has at most `most_bytes`.

    Returns:
        The runs; and for each object of the base from which nothing can be copied, how many
        unchanged bytes it has, and why.
    """
    runs: list[_Run] = []
    refused: list[_NotCopied] = []
    unchanged_at = {unchanged.row: unchanged for unchanged in unchanged_items}
    object_numbers = index.columns.object_number
    for number in {item.stored.object_number for item in unchanged_at.values()}:
        rows = np.flatnonzero(object_numbers == number)
        # An item without bytes has the offset of the item that follows it, and comes before that.
        rows = rows[np.lexsort((index.columns.payload_length[rows], index.columns.offset[rows]))]
        entry = index.objects[number]
        framing = _framing(index, entry, rows.tolist())
        if framing is None or entry.e_tag is None:
            why = "an object of the base has no ETag, or another torch wrote what is around tensors"
            stored = [item.stored for item in unchanged_at.values()]
            size_bytes = sum(item.length for item in stored if item.object_number == number)
            refused.append(_NotCopied(why, size_bytes))
            continue
        run: list[_BaseItem] = []
        run_framing: list[bytes] = []
        start = 0
        for row, (padding, frame) in zip(rows.tolist(), framing, strict=True):
            unchanged = unchanged_at.get(row)
            # The run ends before an item that has changed, and before it would be too long.
            if run and (unchanged is None or unchanged.end - start > most_bytes):
                runs.append(_Run(entry, run, b"".join(run_framing), start))
                run, run_framing = [], []
            if unchanged is not None:
                if not run:
                    start = unchanged.stored.offset - len(padding)
                run_framing += [padding, frame]
                run.append(unchanged)
        if run:
            runs.append(_Run(entry, run, b"".join(run_framing), start))
    return runs, refused


class _Kind(NamedTuple):
    """The dtype of a stored chunk, and its shape."""

    dtype: torch.dtype
    shape: tuple[int, ...]


class _Framing(NamedTuple):
    """The bytes around an item: the padding before it, and its header and trailer."""

    padding: bytes
    frame: bytes


def _framing(index: ix.Index, entry: ix.ObjectEntry, rows: Sequence[int]) -> list[_Framing] | None:
    """Return what this process would write around the items of an object of the base.

    Return None if these bytes do not have the digest of the object's framing: another version of
    torch has written something else there.

    Args:
        rows: the rows of the object's items, by their offsets.
    """
    kinds: dict[int, _Kind] = {}
    for group in index.groups():
        for position in np.flatnonzero(np.isin(group.rows, rows)).tolist():
            dtype = known_dtype(group.tensors[group.owner[position]].dtype)
            if dtype is None:  # this torch does not know it
                return None
            kinds[int(group.rows[position])] = _Kind(dtype, tuple(group.sizes[position].tolist()))
    options = tensor_frame.save_options()
    framing: list[_Framing] = []
    digest, end = xxhash.xxh3_128(), 0
    for row in rows:
        item = index.item(row)
        frame = b""  # an item that is pickled has no framing but padding
        if row in kinds and not item.pickled:
            try:
                around = tensor_frame.frame(*kinds[row], options)
            except RuntimeError:
                # Another rank's tensor may be larger than this machine's memory.
                return None
            frame = around.header + around.trailer
        padding_bytes = item.offset - end  # this process would write less than the alignment
        if padding_bytes >= tensor_frame.ALIGNMENT_BYTES:
            return None
        padding = bytes(padding_bytes)
        framing.append(_Framing(padding, frame))
        digest.update(padding + frame)
        end = item.offset + item.length
    return framing if digest.digest() == entry.framing_digest else None
