"""Convert DCP's Metadata and WriteResults to the index of a checkpoint, and back."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, TypeVar

import msgspec
import numpy as np
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from dcp_objstore.checkpoint import index as ix
from dcp_objstore.errors import (
    CheckpointCorruptError,
    RankFailedError,
    StateMismatchError,
    UnsupportedError,
)
from dcp_objstore.state.stored import (
    DCP_VERSION,
    StoredItem,
    StoredObject,
    constant_name,
    known_dtype,
)

T = TypeVar("T")

# Applied with `map`, which makes no Python call per chunk: a large job has half a million.
_OFFSETS, _SIZES = attrgetter("offsets"), attrgetter("sizes")


class WriteResults(list[WriteResult]):
    """A rank's results, with a `StoredItem` in each.

    DCP pickles them for the coordinator. They travel as one msgpack object, because it takes five
    times as long to unpickle them one by one.
    """

    def __reduce__(self) -> tuple[object, ...]:
        objects: dict[str, StoredObject] = {}
        numbers: dict[str, int] = {}
        sent = []
        for result in self:
            stored: StoredItem = result.storage_data
            key = stored.object.entry.key
            if key not in objects:
                objects[key], numbers[key] = stored.object, len(numbers)
            place = msgspec.structs.astuple(stored)[1:]
            at = result.index.fqn, result.index.offset, result.index.index
            sent.append((*at, result.size_in_bytes, numbers[key], *place))
        return _received, (msgspec.msgpack.encode((list(objects.values()), sent)),)


class _Sent(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A result on its way to the coordinator: a WriteResult and its StoredItem, flat."""

    fqn: str
    chunk_offset: tuple[int, ...] | None
    chunk_number: int | None
    size_in_bytes: int
    object_number: int
    offset: int
    length: int
    payload_offset: int
    payload_length: int
    digests: bytes
    pickled: bool
    dtype: str | None


def _received(body: bytes) -> WriteResults:
    objects, sent = msgspec.msgpack.decode(body, type=tuple[list[StoredObject], list[_Sent]])
    return WriteResults(
        WriteResult(
            MetadataIndex(one.fqn, one.chunk_offset, one.chunk_number),
            one.size_in_bytes,
            StoredItem(
                objects[one.object_number],
                one.offset,
                one.length,
                one.payload_offset,
                one.payload_length,
                one.digests,
                one.pickled,
                one.dtype,
            ),
        )
        for one in sent
    )


def build_index(
    metadata: Metadata, results: Sequence[Sequence[WriteResult]]
) -> tuple[ix.Index, list[StoredObject]]:
    """Build the index of a checkpoint whose data all ranks have uploaded.

    Raises:
        UnsupportedError: the planner left `planner_data` that a load could not restore, or
            converted parts of one tensor to different dtypes.
        RankFailedError: no rank reported an item of the global plan.
        StateMismatchError: the ranks hold only part of a tensor.
    """
    # A rank's items lie together in memory, those of a tensor do not. So what is known of the items
    # is collected in the order of the ranks, and then put into that of the tensors.
    rows: dict[str, dict[tuple[int, ...] | None, int]] = {}
    items: list[StoredItem] = []
    for result in itertools.chain.from_iterable(results):
        rows.setdefault(result.index.fqn, {})[result.index.offset] = len(items)
        items.append(result.storage_data)
    dtypes, digests, keys = (
        list(map(attrgetter(name), items)) for name in ("dtype", "digests", "object.entry.key")
    )
    objects = {key: item.object for key, item in zip(keys, items, strict=True)}
    numbers = {key: number for number, key in enumerate(objects)}
    tensors: dict[str, ix.Tensor] = {}
    blobs: list[str] = []
    chunks: list[ChunkStorageMetadata] = []
    order: list[int] = []
    for fqn, described in metadata.state_dict_metadata.items():
        if isinstance(described, BytesStorageMetadata):
            blobs.append(fqn)
            continue
        boxes = sorted(described.chunks, key=_OFFSETS)
        found = _rows_of(rows, fqn, map(_OFFSETS, boxes))
        tensors[fqn] = _tensor_entry(fqn, described, boxes, {dtypes[row] for row in found})
        chunks += boxes
        order += found
    for fqn in blobs:
        order += _rows_of(rows, fqn, [None])
    by_tensor = np.array(order, dtype=np.int64)
    offset, payload_offset, payload_length, length, pickled = (
        _column(map(attrgetter(name), items))[by_tensor]
        for name in ("offset", "payload_offset", "payload_length", "length", "pickled")
    )
    flat = itertools.chain.from_iterable
    meta = metadata.storage_meta or StorageMeta()
    index = ix.Index(
        objects=tuple(stored.entry for stored in objects.values()),
        tensors=tensors,
        blobs=tuple(blobs),
        columns=ix.Columns(
            object_number=_column(map(numbers.__getitem__, keys))[by_tensor],
            offset=offset,
            lead=payload_offset - offset,
            payload_length=payload_length,
            trail=offset + length - payload_offset - payload_length,
            pickled=pickled,
            chunk_offsets=_column(flat(map(_OFFSETS, chunks))),
            chunk_sizes=_column(flat(map(_SIZES, chunks))),
            digests=np.frombuffer(b"".join([digests[row] for row in order]), dtype=np.uint8),
        ),
        flatten_mapping=_flatten_mapping(metadata.planner_data),
        storage=ix.StorageInfo(
            checkpoint_id=None if meta.checkpoint_id is None else str(meta.checkpoint_id),
            save_id=meta.save_id,
            modules=tuple(meta.modules),
        ),
    )
    return index, list(objects.values())


def _column(numbers: Iterable[int]) -> ix.Column:
    return np.fromiter(numbers, dtype=np.uint64)


def _rows_of(
    rows: Mapping[str, Mapping[tuple[int, ...] | None, int]],
    fqn: str,
    offsets: Iterable[tuple[int, ...] | None],
) -> list[int]:
    known = rows.get(fqn, {})
    try:
        return list(map(known.__getitem__, offsets))
    except KeyError as error:
        offset = error.args[0]
        place = "" if offset is None else f" at offset {tuple(offset)}"
        raise RankFailedError(
            f"no rank reported having written this item{place}; the save is not committed",
            key=fqn,
        ) from None


def _tensor_entry(
    fqn: str,
    described: TensorStorageMetadata,
    chunks: Sequence[ChunkStorageMetadata],
    stored_dtypes: Iterable[str | None],
) -> ix.Tensor:
    given, wanted = sum(map(math.prod, map(_SIZES, chunks))), math.prod(described.size)
    if given != wanted:
        raise StateMismatchError(
            f"the ranks that save hold only {given} of this tensor's {wanted} elements; call save"
            " on all ranks that it is sharded over",
            key=fqn,
        )
    dtypes = {dtype for dtype in stored_dtypes if dtype is not None}
    if len(dtypes) > 1:
        raise UnsupportedError(
            "the save planner gave parts of this tensor in different dtypes"
            f" ({', '.join(sorted(dtypes))}); convert all of a tensor to one dtype",
            key=fqn,
        )
    properties = described.properties
    return ix.Tensor(
        key=fqn,
        shape=tuple(described.size),
        # The stored dtype: a planner may convert tensors after it has described them.
        dtype=dtypes.pop() if dtypes else constant_name(properties.dtype),
        layout=constant_name(properties.layout),
        requires_grad=properties.requires_grad,
        memory_format=constant_name(properties.memory_format),
        pin_memory=properties.pin_memory,
        chunk_count=len(chunks),
    )


def _flatten_mapping(planner_data: object) -> dict[str, tuple[str | int, ...]] | None:
    if planner_data is None:
        return None
    if isinstance(planner_data, dict) and all(
        isinstance(key, str)
        and isinstance(place, tuple)
        and all(isinstance(step, str | int) for step in place)
        for key, place in planner_data.items()
    ):
        return planner_data
    raise UnsupportedError(
        f"the planner left planner_data of type {type(planner_data).__name__}; only the mapping of"
        " flattened keys that DefaultSavePlanner makes can be stored"
    )


class _MadeChunks(dict[object, tuple[ChunkStorageMetadata, ...]]):
    """The chunks that were made of an index, by what tells how their tensor is cut."""

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), ()  # they are made again where they are needed


class Chunks(Sequence[ChunkStorageMetadata]):
    """The chunks of a tensor, for DCP, which takes them for a list.

    They are made of the index when someone first looks at one, as DCP's planners do for the tensors
    that their rank loads. Tensors that are cut alike, as most are, share them. A pickle holds the
    index instead of them.

    Args:
        made: the chunks that were made of this index.
    """

    def __init__(self, index: ix.Index, key: str, made: _MadeChunks) -> None:
        self._index = index
        self._key = key
        self._made = made
        self._own: tuple[ChunkStorageMetadata, ...] | None = None

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self._index, self._key, self._made)

    @property
    def _chunks(self) -> tuple[ChunkStorageMetadata, ...]:
        if self._own is None:
            offsets, sizes = self._index.boxes(self._key)
            cut = offsets.shape, offsets.tobytes(), sizes.tobytes()
            if cut not in self._made:
                self._made[cut] = tuple(
                    ChunkStorageMetadata(torch.Size(offset), torch.Size(size))
                    for offset, size in zip(offsets.tolist(), sizes.tolist(), strict=True)
                )
            self._own = self._made[cut]
        return self._own

    def __len__(self) -> int:
        return self._index.tensors[self._key].chunk_count

    def __iter__(self) -> Iterator[ChunkStorageMetadata]:
        return iter(self._chunks)

    def __getitem__(self, number: Any) -> Any:
        return self._chunks[number]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return self._chunks == tuple(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self._chunks))


def describe(index: ix.Index, load_id: str | None = None) -> Metadata:
    """Return the Metadata that DCP's planners need, without `storage_data`.

    The dtype of a tensor is None if this version or this torch does not know it;
    `StoredCheckpoint.item` refuses to read such a tensor.
    """
    described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    made = _MadeChunks()
    for key, tensor in index.tensors.items():
        described[key] = TensorStorageMetadata(
            properties=properties_of(tensor),
            size=torch.Size(tensor.shape),
            chunks=Chunks(index, key, made),  # type: ignore[arg-type]  # see there
        )
    for key in index.blobs:
        described[key] = BytesStorageMetadata()
    return Metadata(
        state_dict_metadata=described,
        planner_data=index.flatten_mapping,
        storage_meta=storage_meta(index, load_id),
        version=DCP_VERSION,
    )


def properties_of(tensor: ix.Tensor) -> TensorProperties:
    """Return DCP's properties of a tensor. The dtype is None if it is unknown.

    Raises:
        CheckpointCorruptError: torch does not have the layout or the memory format.
    """
    return TensorProperties(
        dtype=known_dtype(tensor.dtype),  # type: ignore[arg-type]  # None where unknown
        layout=_named(tensor.layout, torch.layout, tensor.key),
        requires_grad=tensor.requires_grad,
        memory_format=_named(tensor.memory_format, torch.memory_format, tensor.key),
        pin_memory=tensor.pin_memory,
    )


def storage_meta(index: ix.Index, load_id: str | None = None) -> StorageMeta:
    """Return DCP's StorageMeta as the index has it."""
    return StorageMeta(
        checkpoint_id=index.storage.checkpoint_id,
        save_id=index.storage.save_id,
        load_id=load_id,
        modules=list(index.storage.modules),
    )


def _named(name: str, kind: type[T], fqn: str) -> T:
    value = getattr(torch, name, None)
    if not isinstance(value, kind):
        raise CheckpointCorruptError(
            f"the index names a {kind.__name__} {name!r} that this torch does not have", key=fqn
        )
    return value
