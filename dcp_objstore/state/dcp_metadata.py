"""Convert DCP's Metadata and WriteResults to the index of a checkpoint, and back."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import TypeAlias, TypeVar

import msgspec
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
from dcp_objstore.torch_private import StorageInfo

T = TypeVar("T")

# What a stock reader expects to find in Metadata.version (torch's CURRENT_DCP_VERSION).
_DCP_VERSION = "1.0.0"


class StoredObject(msgspec.Struct, frozen=True, array_like=True):
    """A data object that a rank has uploaded, with its number of parts and its checkpoint's URL."""

    entry: ix.ObjectEntry
    parts: int
    url: str


class StoredItem(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The location of a stored item: `WriteResult.storage_data`, pickled between ranks.

    All items of an object share one `object` instance, so pickle stores it once.

    Attributes:
        object: the data object that holds the item.
        offset: offset of the item in its object.
        length: number of bytes of the item, framing included.
        payload_offset: offset of the payload in the object.
        payload_length: number of bytes of the payload.
        digests: digests of the payload's blocks.
        pickled: whether the payload is a tensor pickled as a whole.
        dtype: name of the dtype of the stored elements, which a planner may have converted; None
            for a pickled value.
    """

    object: StoredObject
    offset: int
    length: int
    payload_offset: int
    payload_length: int
    digests: bytes
    pickled: bool
    dtype: str | None = None


# The items that the ranks have stored, by key and the chunk's offsets (None for a value).
_Reported: TypeAlias = dict[tuple[str, tuple[int, ...] | None], tuple[ix.Item, StoredItem]]


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
    objects: dict[str, StoredObject] = {}
    numbers: dict[str, int] = {}
    items: _Reported = {}
    for result in (result for rank_results in results for result in rank_results):
        stored: StoredItem = result.storage_data
        key = stored.object.entry.key
        number = numbers.setdefault(key, len(numbers))
        objects.setdefault(key, stored.object)
        offset = None if result.index.offset is None else tuple(result.index.offset)
        place = ix.Item(
            number,
            stored.offset,
            stored.length,
            stored.payload_offset,
            stored.payload_length,
            stored.digests,
        )
        items[result.index.fqn, offset] = place, stored
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
    items: _Reported, fqn: str, offset: tuple[int, ...] | None
) -> tuple[ix.Item, StoredItem]:
    try:
        return items[fqn, offset]
    except KeyError:
        place = "" if offset is None else f" at offset {offset}"
        raise RankFailedError(
            f"no rank reported having written this item{place}; the save is not committed",
            key=fqn,
        ) from None


def _tensor_entry(fqn: str, described: TensorStorageMetadata, items: _Reported) -> ix.Tensor:
    chunks = []
    dtypes: set[str] = set()
    for chunk in described.chunks:
        offsets = tuple(chunk.offsets)
        item, stored = _reported(items, fqn, offsets)
        chunks.append(ix.Chunk(offsets, tuple(chunk.sizes), item, stored.pickled))
        if stored.dtype is not None:
            dtypes.add(stored.dtype)
    given, wanted = sum(math.prod(c.sizes) for c in chunks), math.prod(described.size)
    if given != wanted:
        raise StateMismatchError(
            f"the ranks that save hold only {given} of this tensor's {wanted} elements; call save"
            " on all ranks that it is sharded over",
            key=fqn,
        )
    if len(dtypes) > 1:
        raise UnsupportedError(
            "the save planner gave parts of this tensor in different dtypes"
            f" ({', '.join(sorted(dtypes))}); convert all of a tensor to one dtype",
            key=fqn,
        )
    properties = described.properties
    return ix.Tensor(
        shape=tuple(described.size),
        # The stored dtype: a planner may convert tensors after it has described them.
        dtype=dtypes.pop() if dtypes else constant_name(properties.dtype),
        layout=constant_name(properties.layout),
        requires_grad=properties.requires_grad,
        memory_format=constant_name(properties.memory_format),
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
        f"the planner left planner_data of type {type(planner_data).__name__}; only the mapping of"
        " flattened keys that DefaultSavePlanner makes can be stored"
    )


def describe(index: ix.Index, load_id: str | None = None) -> Metadata:
    """Return the Metadata that DCP's planners need, without storage_data.

    The dtype of a tensor is None if this version or this torch does not know it;
    `StoredCheckpoint.item` refuses to read such a tensor.
    """
    described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    for fqn, tensor in index.tensors.items():
        described[fqn] = TensorStorageMetadata(
            properties=TensorProperties(
                dtype=known_dtype(tensor.dtype),  # type: ignore[arg-type]  # None where unknown
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
    """Return the Metadata with which a stock FileSystemReader finds the items.

    Args:
        metadata: the Metadata that DCP's planner made, or `describe(index)`.
        index: the index of the checkpoint.

    Raises:
        UnsupportedError: the dtype of a tensor is unknown.
    """
    described = dict(metadata.state_dict_metadata)
    storage_data: dict[MetadataIndex, StorageInfo] = {}
    for fqn, tensor in index.tensors.items():
        dtype, saved = known_dtype(tensor.dtype), described[fqn]
        if dtype is None:
            raise unknown_dtype(tensor.dtype, fqn)
        assert isinstance(saved, TensorStorageMetadata)
        if saved.properties.dtype != dtype:  # the planner converted it
            properties = dataclasses.replace(saved.properties, dtype=dtype)
            described[fqn] = dataclasses.replace(saved, properties=properties)
        for number, chunk in enumerate(tensor.chunks):
            storage_data[MetadataIndex(fqn, chunk.offsets, number)] = _stock_place(
                index, chunk.item
            )
    for fqn, item in index.blobs.items():
        storage_data[MetadataIndex(fqn)] = _stock_place(index, item)
    return Metadata(
        state_dict_metadata=described,
        planner_data=metadata.planner_data,
        storage_data=storage_data,
        storage_meta=metadata.storage_meta,
        version=_DCP_VERSION,
    )


def _stock_place(index: ix.Index, item: ix.Item) -> StorageInfo:
    return StorageInfo(index.objects[item.object_number].key, item.offset, item.length)


@functools.cache  # one str per constant, which pickle stores once
def constant_name(constant: torch.dtype | torch.layout | torch.memory_format) -> str:
    """Return torch's name of a constant as the index stores it, such as "float32"."""
    return str(constant).removeprefix("torch.")


def known_dtype(name: str) -> torch.dtype | None:
    """Return the dtype of this name; None if this version or this torch does not know it."""
    dtype = getattr(torch, name, None) if name in ix.ITEM_SIZE_BYTES else None
    return dtype if isinstance(dtype, torch.dtype) else None


def unknown_dtype(name: str, key: str) -> UnsupportedError:
    """Return the error for a tensor whose dtype is unknown."""
    return UnsupportedError(
        f"the checkpoint has this tensor as {name[:100]!r}, a dtype that this version of"
        f" dcp_objstore or torch {torch.__version__} does not know: upgrade them, or leave the"
        " tensor out of what you load",
        key=key,
    )


def _named(name: str, kind: type[T], fqn: str) -> T:
    value = getattr(torch, name, None)
    if not isinstance(value, kind):
        raise CheckpointCorruptError(
            f"the index names a {kind.__name__} {name!r} that this torch does not have", key=fqn
        )
    return value
