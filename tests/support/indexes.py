"""Indexes made of plain numbers, valid or not: what somebody could put on the store.

`encode` writes numbers that no column can hold modulo 2**64, as somebody would who wants a negative
offset, and checks nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import numpy as np

from dcp_objstore.checkpoint import index as ix


class Item(msgspec.Struct, frozen=True):
    """Where an item lies. All offsets are counted from the start of its object."""

    object_number: int
    offset: int
    length: int
    payload_offset: int
    payload_length: int
    digests: bytes


class Chunk(msgspec.Struct, frozen=True):
    """A box of a tensor, and where it lies."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    item: Item
    pickled: int = 0


class Tensor(msgspec.Struct, frozen=True):
    """A tensor, and its chunks in the order in which they are written."""

    shape: tuple[int, ...]
    dtype: str
    layout: str
    requires_grad: bool
    memory_format: str
    pin_memory: bool
    chunks: tuple[Chunk, ...]


class Index(msgspec.Struct, frozen=True):
    """A whole index."""

    objects: tuple[ix.ObjectEntry, ...] = ()
    tensors: dict[str, Tensor] = {}
    blobs: dict[str, Item] = {}
    flatten_mapping: dict[str, tuple[str | int, ...]] | None = None
    storage: ix.StorageInfo = ix.StorageInfo()
    format: int = ix.FORMAT


def encode(index: Index) -> bytes:
    """The index as it would be stored."""
    chunks = [chunk for tensor in index.tensors.values() for chunk in tensor.chunks]
    items = [*(chunk.item for chunk in chunks), *index.blobs.values()]
    columns = [
        _column(item.object_number for item in items),
        _column(item.offset for item in items),
        _column(item.payload_offset - item.offset for item in items),
        _column(item.payload_length for item in items),
        _column(
            item.offset + item.length - item.payload_offset - item.payload_length for item in items
        ),
        _column([*(chunk.pickled for chunk in chunks), *(0 for _ in index.blobs)]),
        _column(number for chunk in chunks for number in chunk.offsets),
        _column(number for chunk in chunks for number in chunk.sizes),
        b"".join(item.digests for item in items),
    ]
    tensors = [
        [
            *(key, tensor.shape, tensor.dtype, tensor.layout, tensor.requires_grad),
            *(tensor.memory_format, tensor.pin_memory, len(tensor.chunks), None),
        ]
        for key, tensor in index.tensors.items()
    ]
    return msgspec.msgpack.encode([
        *(index.format, index.objects, tensors, list(index.blobs), columns),
        *(index.flatten_mapping, index.storage, {}),
    ])  # fmt: skip


def _column(numbers: Iterable[int]) -> bytes:
    """The numbers in the narrowest width that holds them."""
    made = np.array([number % 2**64 for number in numbers], dtype=np.uint64)
    largest = int(made.max(initial=0))
    width = next(width for width in (1, 2, 4, 8) if largest < 256**width)
    return made.astype(f"<u{width}").tobytes()
