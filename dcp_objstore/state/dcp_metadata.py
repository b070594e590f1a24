"""DCP's Metadata and WriteResults to our index, and back."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TypeVar

import msgspec
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
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

T = TypeVar("T")

# What a stock reader expects to find in Metadata.version (torch's CURRENT_DCP_VERSION).
_DCP_VERSION = "1.0.0"


class StoredObject(msgspec.Struct, frozen=True, array_like=True):
    """A data object that a rank has put: how many requests carried it, and to which checkpoint."""

    entry: ix.ObjectEntry
    parts: int
    url: str


class StoredItem(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """`WriteResult.storage_data`: where an item went. Pickled between ranks.

    The `object` is one instance shared by all its items, so pickle stores it once.
    """

    object: StoredObject
    offset: int
    length: int
    payload_offset: int
    payload_length: int
    digests: bytes
    pickled: bool


def build_index(
    metadata: Metadata, results: Sequence[Sequence[WriteResult]]
) -> tuple[ix.Index, list[StoredObject]]:
    """The index of a checkpoint whose data all ranks have put.

    Raises:
        UnsupportedError: the planner left `planner_data` that we would not restore.
        RankFailedError: an item of the global plan was reported by no rank.
    """
    objects: dict[str, StoredObject] = {}
    numbers: dict[str, int] = {}
    items: dict[tuple[str, tuple[int, ...] | None], tuple[ix.Item, bool]] = {}
    for result in (result for rank_results in results for result in rank_results):
        stored: StoredItem = result.storage_data
        key = stored.object.entry.key
        number = numbers.setdefault(key, len(numbers))
        objects.setdefault(key, stored.object)
        offset = None if result.index.offset is None else tuple(result.index.offset)
        items[result.index.fqn, offset] = (
            ix.Item(
                number,
                stored.offset,
                stored.length,
                stored.payload_offset,
                stored.payload_length,
                stored.digests,
            ),
            stored.pickled,
        )
    tensors: dict[str, ix.Tensor] = {}
    blobs: dict[str, ix.Item] = {}
    for fqn, described in metadata.state_dict_metadata.items():
        if isinstance(described, BytesStorageMetadata):
            blobs[fqn] = _reported(items, fqn, None)[0]
        else:
            tensors[fqn] = _tensor_entry(fqn, described, items)
    meta = metadata.storage_meta or StorageMeta()
    index = ix.Index(
        format=ix.FORMAT,
        objects=tuple(stored.entry for stored in objects.values()),
        tensors=tensors,
        blobs=blobs,
        flatten_mapping=_flatten_mapping(metadata.planner_data),
        storage=ix.StorageInfo(
            checkpoint_id=None if meta.checkpoint_id is None else str(meta.checkpoint_id),
            save_id=meta.save_id,
            modules=tuple(meta.modules),
        ),
    )
    return index, list(objects.values())


def _reported(
    items: Mapping[tuple[str, tuple[int, ...] | None], tuple[ix.Item, bool]],
    fqn: str,
    offset: tuple[int, ...] | None,
) -> tuple[ix.Item, bool]:
    try:
        return items[fqn, offset]
    except KeyError:
        place = "" if offset is None else f" at offset {offset}"
        raise RankFailedError(
            f"no rank reported having written this item{place}; the save is not committed",
            key=fqn,
        ) from None


def _tensor_entry(
    fqn: str,
    described: TensorStorageMetadata,
    items: Mapping[tuple[str, tuple[int, ...] | None], tuple[ix.Item, bool]],
) -> ix.Tensor:
    chunks = []
    for chunk in described.chunks:
        offsets = tuple(chunk.offsets)
        item, pickled = _reported(items, fqn, offsets)
        chunks.append(ix.Chunk(offsets, tuple(chunk.sizes), item, pickled))
    given, wanted = sum(math.prod(c.sizes) for c in chunks), math.prod(described.size)
    if given != wanted:
        raise StateMismatchError(
            f"the ranks that save hold only {given} of this tensor's {wanted} elements; all ranks"
            " that it is sharded over have to call save",
            key=fqn,
        )
    properties = described.properties
    return ix.Tensor(
        shape=tuple(described.size),
        dtype=_name(properties.dtype),
        layout=_name(properties.layout),
        requires_grad=properties.requires_grad,
        memory_format=_name(properties.memory_format),
        pin_memory=properties.pin_memory,
        chunks=tuple(chunks),
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
        f"the planner left planner_data of type {type(planner_data).__name__}, which is not the"
        " mapping of flattened keys that DefaultSavePlanner makes; only that can be stored"
    )


def describe(index: ix.Index, load_id: str | None = None) -> Metadata:
    """What DCP's planners need to know of a checkpoint; storage_data is left out."""
    described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    for fqn, tensor in index.tensors.items():
        described[fqn] = TensorStorageMetadata(
            properties=TensorProperties(
                dtype=_named(tensor.dtype, torch.dtype, fqn),
                layout=_named(tensor.layout, torch.layout, fqn),
                requires_grad=tensor.requires_grad,
                memory_format=_named(tensor.memory_format, torch.memory_format, fqn),
                pin_memory=tensor.pin_memory,
            ),
            size=torch.Size(tensor.shape),
            chunks=[
                ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))
                for chunk in tensor.chunks
            ],
        )
    for fqn in index.blobs:
        described[fqn] = BytesStorageMetadata()
    return Metadata(
        state_dict_metadata=described,
        planner_data=index.flatten_mapping,
        storage_meta=StorageMeta(
            checkpoint_id=index.storage.checkpoint_id,
            save_id=index.storage.save_id,
            load_id=load_id,
            modules=list(index.storage.modules),
        ),
        version=_DCP_VERSION,
    )


def stock_metadata(metadata: Metadata, index: ix.Index) -> Metadata:
    """The Metadata that a stock FileSystemReader finds the items by."""
    storage_data: dict[MetadataIndex, _StorageInfo] = {}
    for fqn, tensor in index.tensors.items():
        for number, chunk in enumerate(tensor.chunks):
            storage_data[MetadataIndex(fqn, chunk.offsets, number)] = _stock_place(
                index, chunk.item
            )
    for fqn, item in index.blobs.items():
        storage_data[MetadataIndex(fqn)] = _stock_place(index, item)
    return Metadata(
        state_dict_metadata=metadata.state_dict_metadata,
        planner_data=metadata.planner_data,
        storage_data=storage_data,
        storage_meta=metadata.storage_meta,
        version=_DCP_VERSION,
    )


def _stock_place(index: ix.Index, item: ix.Item) -> _StorageInfo:
    return _StorageInfo(index.objects[item.object_number].key, item.offset, item.length)


def _name(torch_constant: object) -> str:
    return str(torch_constant).removeprefix("torch.")


def _named(name: str, kind: type[T], fqn: str) -> T:
    value = getattr(torch, name, None)
    if not isinstance(value, kind):
        raise CheckpointCorruptError(
            f"the index names a {kind.__name__} {name!r} that this torch does not have", key=fqn
        )
    return value
