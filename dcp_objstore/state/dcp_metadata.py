"""Describe the index of a checkpoint as the Metadata that DCP's planners know."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from dcp_objstore.checkpoint import index as ix
from dcp_objstore.errors import CheckpointCorruptError
from dcp_objstore.state.stored import DCP_VERSION, known_dtype

T = TypeVar("T")


class _SharedChunks(dict[object, tuple[ChunkStorageMetadata, ...]]):
    """The chunks made so far of one index, by how their tensor is cut: `Chunks` has the key."""

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), ()  # a pickle is empty: chunks are made again where they are needed


class Chunks(Sequence[ChunkStorageMetadata]):
    """The chunks of a tensor, for DCP, which takes them for a list.

    They are made of the index when someone first looks at one, as DCP's planners do for the tensors
    that their rank loads. Tensors that are cut alike, as most are, share them. A pickle holds the
    index instead of them.

    Args:
        shared: the chunks that were made of this index.
    """

    def __init__(self, index: ix.Index, key: str, shared: _SharedChunks) -> None:
        self._index = index
        self._key = key
        self._shared = shared
        self._chunks_once: tuple[ChunkStorageMetadata, ...] | None = None  # None: no look yet

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self._index, self._key, self._shared)

    @property
    def _chunks(self) -> tuple[ChunkStorageMetadata, ...]:
        """The tensor's chunks. Tensors that are cut in the same way share one tuple."""
        if self._chunks_once is None:
            offsets, sizes = self._index.boxes(self._key)
            # With the shape of the arrays: the 6 offsets of a vector's chunks and the 3 x 2 of a
            # matrix's can have the same bytes.
            boxes = offsets.shape, offsets.tobytes(), sizes.tobytes()
            if boxes not in self._shared:
                self._shared[boxes] = tuple(
                    ChunkStorageMetadata(torch.Size(offset), torch.Size(size))
                    for offset, size in zip(offsets.tolist(), sizes.tolist(), strict=True)
                )
            self._chunks_once = self._shared[boxes]
        return self._chunks_once

    @property
    def is_sharded(self) -> bool | None:
        """Whether the tensor was sharded, as in the index."""
        return self._index.tensors[self._key].is_sharded

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

    Raises:
        CheckpointCorruptError: torch does not have a layout or memory format.
    """
    entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    shared = _SharedChunks()
    for key, tensor in index.tensors.items():
        entries[key] = TensorStorageMetadata(
            properties=TensorProperties(
                dtype=known_dtype(tensor.dtype),  # type: ignore[arg-type]  # None where unknown
                layout=_torch_constant(tensor.layout, torch.layout, key),
                requires_grad=tensor.requires_grad,
                memory_format=_torch_constant(tensor.memory_format, torch.memory_format, key),
                pin_memory=tensor.pin_memory,
            ),
            size=torch.Size(tensor.shape),
            chunks=Chunks(index, key, shared),  # type: ignore[arg-type]  # see `Chunks`
        )
    for key in index.blobs:
        entries[key] = BytesStorageMetadata()
    return Metadata(
        state_dict_metadata=entries,
        planner_data=index.flatten_mapping,
        storage_meta=StorageMeta(
            checkpoint_id=index.storage.checkpoint_id,
            save_id=index.storage.save_id,
            load_id=load_id,
            modules=list(index.storage.modules),
        ),
        version=DCP_VERSION,
    )


def _torch_constant(name: str, kind: type[T], key: str) -> T:
    """Return torch's constant that the index names for a tensor, such as `torch.strided`."""
    value = getattr(torch, name, None)
    if not isinstance(value, kind):
        raise CheckpointCorruptError(
            f"the index names a {kind.__name__} {name!r} that this torch does not have", key=key
        )
    return value
