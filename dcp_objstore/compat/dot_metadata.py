"""Write `.metadata`, the pickle by which stock torch readers find a checkpoint's items.

It contains only stock classes, in a form that `pickle.load` reads with torch 2.6 and later,
regardless of the version of torch that wrote it.
"""

from __future__ import annotations

import copyreg
import io
import os
import pickle
from types import FunctionType
from typing import Any, Final

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

from dcp_objstore import torch_private
from dcp_objstore.errors import UnsupportedError

# Stock torch takes Python's default protocol: 4 up to Python 3.13, 5 from 3.14 on.
_PROTOCOL: Final = 4
_STOCK: Final = frozenset(
    {
        BytesStorageMetadata,
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        StorageMeta,
        TensorProperties,
        TensorStorageMetadata,
        torch_private.MemoryFormatEncoding,
        torch_private.StorageInfo,
        torch.Size,
        torch.dtype,
        torch.layout,
    }
)


def encode_metadata(metadata: Metadata) -> bytes:
    """Pickle `metadata` so that stock torch 2.6 and later can read it.

    TensorProperties is always the 5-tuple (dtype, layout, requires_grad, memory format, pinned):
    torch 2.15 writes six fields, which torch up to 2.14 rejects. `storage_meta.checkpoint_id` is
    converted to `str`. Attributes that `Metadata` does not have are left out. The argument is not
    changed.

    Raises:
        UnsupportedError: `metadata` contains a class that stock torch does not write there.
    """
    buffer = io.BytesIO()
    _StockPickler(buffer, _PROTOCOL).dump(
        Metadata(
            state_dict_metadata=metadata.state_dict_metadata,
            planner_data=metadata.planner_data,
            storage_data=metadata.storage_data,
            storage_meta=_with_text_id(metadata.storage_meta),
            version=getattr(metadata, "version", None),
        )
    )
    return buffer.getvalue()


def _with_text_id(meta: StorageMeta | None) -> StorageMeta | None:
    """Return a copy with a `str` as `checkpoint_id`, so that no class of paths is pickled."""
    if meta is None:
        return None
    place = meta.checkpoint_id
    return StorageMeta(
        checkpoint_id=None if place is None else str(os.fspath(place)),
        save_id=meta.save_id,
        load_id=meta.load_id,
        modules=list(meta.modules),
    )


class _StockPickler(pickle.Pickler):
    """A pickler of stock classes and plain data, which refuses everything else."""

    def reducer_override(self, value: Any) -> Any:
        kind = type(value)
        if kind is TensorProperties:
            return copyreg.__newobj__, (TensorProperties,), _five_fields(value)  # type: ignore[attr-defined]
        if kind in _STOCK:
            return NotImplemented
        if kind is FunctionType and value is torch_private.layout_by_name:
            return NotImplemented
        if isinstance(value, type) and value in _STOCK:
            return NotImplemented
        raise UnsupportedError(
            f".metadata cannot hold a {kind.__module__}.{kind.__qualname__}: stock torch writes "
            "only its own classes and plain data there"
        )


def _five_fields(properties: TensorProperties) -> tuple[object, ...]:
    """Return the fields that torch 2.6 to 2.14 pickle; later versions append others."""
    state: tuple[object, ...] = properties.__getstate__()  # type: ignore[no-untyped-call]
    return state[:5]
