"""The base of an incremental save: what has not changed since is copied by the store.

Tensors whose dtype, shape and digests equal those of the base are not uploaded. The store copies
their bytes into new objects of this save, which are as much its own as those that are uploaded. So
no checkpoint refers to the objects of another, and deletion, sweeps and readers know nothing of
this.

- What is equal is decided by each rank alone, from the base's index and digests of its tensors. A
  tensor that has changed is noticed at the first block that differs. Its digests are computed again
  as it is uploaded: copies may take minutes, and digests from before them would not be those of
  what is sent if the tensor changes meanwhile.
- Copied are runs: items that follow one another in an object of the base, with the framing between
  them, which must be what this process would write. (The index has one digest of all framing of an
  object, and a copied object needs one of its own.) A run is a contiguous range, so an object that
  is made of one has equal parts, as some servers want (Cloudflare R2).
- A run that is too short for a part of an upload is uploaded, together with others that have not
  changed. So the next save finds one long run where this one has found many short ones.
- A store that copies only whole objects copies a run if it is one. What has not changed, if it is
  long enough, is uploaded into objects of its own there, so that the next save finds whole ones.
- The base is read like any checkpoint (rule 7 of `checkpoint.read`), but nothing holds it: it may
  be deleted or swept in the meantime, or something else may overwrite its objects. So the store
  copies an object only if it has the ETag that the base's index gives (rule 12 of
  `checkpoint.commit`). What cannot be copied, for whatever reason, is uploaded.
"""

from __future__ import annotations

import io
import itertools
import logging
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import xxhash
from torch.distributed.checkpoint.storage import WriteResult

from dcp_objstore.checkpoint import index as ix
from dcp_objstore.checkpoint.catalogue import list_run
from dcp_objstore.checkpoint.names import data_key
from dcp_objstore.checkpoint.read import open_committed, open_found
from dcp_objstore.errors import ConfigError, DcpObjstoreError, InvalidUrlError
from dcp_objstore.observe.events import NotCopied
from dcp_objstore.state import tensor_frame
from dcp_objstore.state.device import Outbound
from dcp_objstore.state.stored import StoredItem, StoredObject, constant_name, known_dtype
from dcp_objstore.stores.protocol import CopySource, Version
from dcp_objstore.stores.urls import parse_url
from dcp_objstore.transfer.copies import LEAST_PART_BYTES, copied_parts, copy_objects
from dcp_objstore.transfer.digests import (
    BLOCK_SIZE_BYTES,
    DIGEST_SIZE_BYTES,
    block_digests,
    small_digest,
)
from dcp_objstore.transfer.parts import plan_parts
from dcp_objstore.transfer.progress import Progress
from dcp_objstore.transfer.upload import Uploaded
from dcp_objstore.transfer.workers import DaemonPool, wait_for
from dcp_objstore.waiting import result_of
from dcp_objstore.write.layout import SMALL_BYTES

if TYPE_CHECKING:
    import torch
    from torch.distributed.checkpoint.metadata import MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

    from dcp_objstore.config import TransferConfig
    from dcp_objstore.stores import StoreSpec
    from dcp_objstore.transfer.upload import ByteArray
    from dcp_objstore.write.session import Save

logger = logging.getLogger("dcp_objstore")

LATEST = "latest"
# Up to this number of runs each has an object of its own; more of them share as many objects.
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
        ConfigError: it has another scheme.
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
    """
    if not spec.open().capabilities.copies:
        return Base(base, None, "this store copies nothing by itself, or not over this transport")
    try:
        return wait_for(_read_base, base, spec)
    except DcpObjstoreError as error:
        return Base(base, None, f"it cannot be read: {error}")


def _read_base(base: str, spec: StoreSpec) -> Base:
    if base != LATEST:
        there = spec.at(base)
        _, body = open_committed(there.open())
        return Base(there.url, ix.decode(body))
    run, _ = spec.parent()
    if run is None:
        return Base()
    for step in list_run(run.open(), run.open_child, newest=1).steps:
        _, body = open_found(step.store, step.found)
        return Base(step.store.url, ix.decode(body))
    return Base()


class _Kept(NamedTuple):
    """An item that the base has, in the same shape and dtype."""

    item: WriteItem
    row: int
    stored: ix.Item
    dtype: str

    @property
    def end(self) -> int:
        return self.stored.offset + self.stored.length


class _Run(NamedTuple):
    """Items that have not changed, and follow one another in an object of the base."""

    source: ix.ObjectEntry
    items: Sequence[_Kept]
    framing: bytes
    start: int  # of the padding before the first item

    @property
    def end(self) -> int:
        return self.items[-1].end

    @property
    def is_whole(self) -> bool:
        return (self.start, self.end) == (0, self.source.size_bytes)

    @property
    def size_bytes(self) -> int:
        return self.end - self.start


@dataclass(slots=True)
class Unchanged:
    """The part of a rank's plan that need not be uploaded.

    Attributes:
        items: all that have not changed, also what cannot be copied.
        objects: what the store is to make: for each object the runs of which it consists.
        refused: why other runs are not copied, and their size.
        whole: the store copies whole objects alone.
        copied: set by `copy`: the items that were copied.
        results: set by `copy`: a result for each of these.
        stored: set by `copy`: the objects that were made.
    """

    base: Base = field(default_factory=Base)
    items: set[MetadataIndex] = field(default_factory=set)
    objects: list[Sequence[_Run]] = field(default_factory=list)
    refused: list[tuple[str, int]] = field(default_factory=list)
    whole: bool = False
    copied: set[MetadataIndex] = field(default_factory=set)
    results: list[WriteResult] = field(default_factory=list)
    stored: list[StoredObject] = field(default_factory=list)

    @property
    def parts(self) -> int:
        """The number of parts to copy."""
        if self.whole:
            return len(self.objects)
        return sum(len(copied_parts(self._sources(runs))) for runs in self.objects)

    @property
    def to_copy(self) -> set[MetadataIndex]:
        """The items that are to be copied."""
        runs = itertools.chain.from_iterable(self.objects)
        return {kept.item.index for run in runs for kept in run.items}

    def copy(self, save: Save, config: TransferConfig) -> None:
        """Have the store copy; note what it has copied.

        The objects take the first numbers, whether they were made or not: the answer of one that
        failed may only have been lost, and a key is never written twice (rule 3).
        """
        keys = [data_key(save.rank, number, save.nonce) for number in range(len(self.objects))]
        runs_of = dict(zip(keys, self.objects, strict=True))
        made = copy_objects(
            save.open(),
            {key: self._sources(runs) for key, runs in runs_of.items()},
            config,
            Progress(config.stall_timeout_seconds, save.channel),
        )
        failed = list(self.refused)
        for key, outcome in made.items():
            if isinstance(outcome, Uploaded):
                self._note(save, key, runs_of[key], outcome)
            else:
                failed.append((str(outcome), sum(run.size_bytes for run in runs_of[key])))
        if failed:
            report_not_copied(save, self.base.url, failed[0][0], sum(size for _, size in failed))

    def _sources(self, runs: Iterable[_Run]) -> list[CopySource]:
        return [
            CopySource(
                f"{self.base.url}/{run.source.key}", run.start, run.end, Version(run.source.e_tag)
            )
            for run in runs
        ]

    def _note(self, save: Save, key: str, runs: Sequence[_Run], made: Uploaded) -> None:
        framing = xxhash.xxh3_128(b"".join(run.framing for run in runs)).digest()
        entry = ix.ObjectEntry(key, made.size_bytes, made.version.e_tag, framing)
        stored = StoredObject(entry, made.parts, save.spec.url, copied=True)
        self.stored.append(stored)
        begins = itertools.accumulate((run.size_bytes for run in runs), initial=0)
        for run, begin in zip(runs, begins, strict=False):
            moved_by = begin - run.start
            for item, _, there, dtype in run.items:
                self.copied.add(item.index)
                offset, payload_offset = there.offset + moved_by, there.payload_offset + moved_by
                place = StoredItem(
                    *(stored, offset, there.length, payload_offset, there.payload_length),
                    *(there.digests, False, dtype),
                )
                self.results.append(WriteResult(item.index, there.length, place))


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
    known_digests: Mapping[tuple[int, int], bytes],
    config: TransferConfig,
    digests_of: Callable[[ByteArray], bytes] = block_digests,
    *,
    whole: bool = False,
) -> Unchanged:
    """Compare a rank's items with those of the base. Sends no request.

    Extra memory: that of as many tensors as there are threads that hash, if they are not contiguous
    or are made by the planner.

    Args:
        known_digests: digests that staging has computed, by the address and size of the memory.
        digests_of: `block_digests` or a wrapper of it; called in the threads that hash.
        whole: the store copies whole objects alone.
    """
    assert base.index is not None
    stop = Progress(config.stall_timeout_seconds)
    outbound = Outbound(plan_parts(0, config.part_size_bytes), config, stop.check_stopped)
    same: list[_Kept] = []
    waiting: deque[tuple[_Kept, bool | Future[bool]]] = deque()

    def compare(kept: _Kept) -> bool | Future[bool]:
        """Compare an item: large host memory in a thread, the rest at once."""
        size_bytes, digests = kept.stored.payload_length, kept.stored.digests
        data = resolve(kept.item)
        if isinstance(data, io.BytesIO):
            return False
        payload = tensor_frame.raw_payload(data)
        dtype = None if payload is None else constant_name(payload.dtype)
        if payload is None or (dtype, payload.nbytes) != (kept.dtype, size_bytes):
            return False
        if known := known_digests.get((payload.data_ptr(), size_bytes)):
            return known == digests
        if payload.is_cpu and size_bytes <= SMALL_BYTES:
            return small_digest(tensor_frame.small_payload(payload, size_bytes)) == digests
        copied = outbound.slices(payload)
        slices = copied or tensor_frame.payload_slices(payload, BLOCK_SIZE_BYTES)
        if copied is not None or not payload.is_cpu:
            return _have(digests, slices, digests_of)
        return hashers.submit(_have, digests, slices, digests_of)

    def settle() -> None:
        kept, is_same = waiting.popleft()
        if is_same if isinstance(is_same, bool) else result_of(is_same):
            same.append(kept)

    with DaemonPool(config.hash_threads, "hash") as hashers:
        for one in _candidates(base.index, items):
            with suppress(Exception):  # raised again, with its place, when it is uploaded
                waiting.append((one, compare(one)))
            if len(waiting) > 2 * config.hash_threads:
                settle()
        while waiting:
            settle()
    found = Unchanged(base, {one.item.index for one in same}, whole=whole)
    most_bytes = config.max_object_size_bytes
    runs = _runs(base.index, same, found, sys.maxsize if whole else most_bytes)
    long = [run for run in runs if run.size_bytes >= LEAST_PART_BYTES]
    if whole:
        found.objects = [[run] for run in long if run.is_whole]
    else:
        found.objects.extend(_shares(long, most_bytes))
    return found


def _shares(runs: Sequence[_Run], most_bytes: int) -> Iterator[Sequence[_Run]]:
    """Distribute runs over up to `_MOST_OBJECTS` objects, or more if these were too large."""
    for numbers in np.array_split(np.arange(len(runs)), min(_MOST_OBJECTS, len(runs)) or 1):
        share: list[_Run] = []
        size_bytes = 0
        for run in (runs[number] for number in numbers):
            if share and size_bytes + run.size_bytes > most_bytes:
                yield share
                share, size_bytes = [], 0
            share.append(run)
            size_bytes += run.size_bytes
        if share:
            yield share


def _candidates(index: ix.Index, items: Iterable[WriteItem]) -> Iterator[_Kept]:
    """Yield the items that the base has, in the same place, shape and dtype."""
    for item in items:
        tensor, data = index.tensors.get(item.index.fqn), item.tensor_data
        if tensor is None or data is None or tensor.shape != tuple(data.size):
            continue
        row = index.find(tensor.key, data.chunk.offsets, item.index.index)
        if row is None:
            continue
        stored = index.item(row)
        sizes = index.box(tensor.key, row - index.rows(tensor.key).start)[1]
        if sizes == list(data.chunk.sizes) and not stored.pickled:
            yield _Kept(item, row, stored, tensor.dtype)


def _have(
    digests: bytes,
    pieces: Iterable[ByteArray],
    digests_of: Callable[[ByteArray], bytes],
) -> bool:
    """Return whether all blocks have these digests; stop at the first that has not."""
    at = 0
    for piece in pieces:
        for start in range(0, piece.nbytes, BLOCK_SIZE_BYTES):
            digest = digests_of(piece[start : start + BLOCK_SIZE_BYTES])
            if digest != digests[at : at + DIGEST_SIZE_BYTES]:
                return False
            at += DIGEST_SIZE_BYTES
    return True


def _runs(
    index: ix.Index, same: Iterable[_Kept], found: Unchanged, most_bytes: int
) -> Iterator[_Run]:
    """Join unchanged items that follow one another in an object of the base; note refused ones.

    A run of several items has at most `most_bytes`.
    """
    kept_at = {one.row: one for one in same}
    numbers = index.columns.object_number
    for number in sorted({one.stored.object_number for one in kept_at.values()}):
        rows = np.flatnonzero(numbers == number)
        # An empty value comes before what has the same offset.
        rows = rows[np.lexsort((index.columns.payload_length[rows], index.columns.offset[rows]))]
        entry = index.objects[number]
        framing = _framing(index, entry, rows.tolist())
        if framing is None or entry.e_tag is None:
            why = "an object of the base has no ETag, or another torch wrote what is around tensors"
            there = [one.stored for one in kept_at.values()]
            size_bytes = sum(one.length for one in there if one.object_number == number)
            found.refused.append((why, size_bytes))
            continue
        kept: list[_Kept] = []
        between: list[bytes] = []
        start = 0
        for row, (padding, frame) in zip(rows.tolist(), framing, strict=True):
            one = kept_at.get(row)
            if kept and (one is None or one.end - start > most_bytes):
                yield _Run(entry, kept, b"".join(between), start)
                kept, between = [], []
            if one is not None:
                start = start if kept else one.stored.offset - len(padding)
                between += [padding, frame]
                kept.append(one)
        if kept:
            yield _Run(entry, kept, b"".join(between), start)


def _framing(
    index: ix.Index, entry: ix.ObjectEntry, rows: Sequence[int]
) -> list[tuple[bytes, bytes]] | None:
    """Return the padding before each item of an object, and its framing; None if it has others.

    The framing that this process would write is that of the object if it has the same digest.
    """
    shapes: dict[int, tuple[str, tuple[int, ...]]] = {}
    for group in index.groups():
        for at in np.flatnonzero(np.isin(group.rows, rows)).tolist():
            shape = tuple(group.sizes[at].tolist())
            shapes[int(group.rows[at])] = group.tensors[group.owner[at]].dtype, shape
    options = tensor_frame.save_options()
    found: list[tuple[bytes, bytes]] = []
    digest, end = xxhash.xxh3_128(), 0
    for row in rows:
        item = index.item(row)
        frame = b""
        dtype = known_dtype(shapes[row][0]) if row in shapes and not item.pickled else None
        if dtype is not None:
            try:
                around = tensor_frame.frame(dtype, shapes[row][1], options)
            except RuntimeError:  # another rank's tensor that is larger than this machine's memory
                return None
            frame = around.header + around.trailer
        padding_bytes = item.offset - end
        if padding_bytes >= tensor_frame.ALIGNMENT_BYTES:
            return None
        if len(frame) != item.length - item.payload_length:
            return None
        padding = bytes(padding_bytes)
        found.append((padding, frame))
        digest.update(padding + frame)
        end = item.offset + item.length
    return found if digest.digest() == entry.framing_digest else None
