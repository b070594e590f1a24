"""The index: what is in a checkpoint and where, as one msgpack object.

It is typed, validated and bounded, and never pickled. `decode` returns only an index in which every
offset is inside its object and every size agrees with its shape, so that readers may allocate
and read by it without further checks. This module knows the names and sizes of dtypes; it does not
import torch.

Structs are encoded as arrays. New fields are appended with a default, and the format number rises
when an old reader would misread a new index.
"""

from __future__ import annotations

import math
from typing import Final

import msgspec

from dcp_objstore.checkpoint.names import check_object_key
from dcp_objstore.errors import CheckpointCorruptError, UnsupportedError
from dcp_objstore.transfer.digests import DIGEST_SIZE_BYTES, digest_count

FORMAT: Final = 1

# Bytes per element of every dtype that can be saved, by torch's name. The others (bits8, int4,
# quint4x2) cannot: torch cannot pickle or copy them, or DCP does not know their size.
ITEM_SIZE_BYTES: Final[dict[str, int]] = {
    "bool": 1,
    **dict.fromkeys(("uint8", "int8", "quint8", "qint8"), 1),
    **dict.fromkeys(("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"), 1),
    **dict.fromkeys(("float8_e8m0fnu", "float4_e2m1fn_x2"), 1),
    **dict.fromkeys(("uint16", "int16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("uint32", "int32", "float32", "complex32", "qint32"), 4),
    **dict.fromkeys(("uint64", "int64", "float64", "complex64"), 8),
    "complex128": 16,
}
_MAX_SIZE = 2**63 - 1
_MAX_DIMENSIONS = 64
# msgspec does not wrap the decoder's error for a map key that is not UTF-8.
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class ObjectEntry(msgspec.Struct, frozen=True, array_like=True):
    """One data object.

    Attributes:
        key: relative to the checkpoint.
        size_bytes: its size.
        e_tag: the ETag that the store reported after the upload, or None.
        framing_digest: XXH3-128 over all its bytes that are not payload, in order.
    """

    key: str
    size_bytes: int
    e_tag: str | None
    framing_digest: bytes


class Item(msgspec.Struct, frozen=True, array_like=True):
    """Where an item is stored, and the digests of its payload.

    Attributes:
        object_number: position in `Index.objects`.
        offset, length: the item within its object, in bytes; stock torch readers read this range.
        payload_offset: where the payload begins in the object.
        payload_length: size of the payload in bytes.
        digests: 16 bytes per 4 MiB block of payload, counted from the payload's start.
    """

    object_number: int
    offset: int
    length: int
    payload_offset: int
    payload_length: int
    digests: bytes


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """One saved box of a tensor.

    Attributes:
        offsets, sizes: the box within the tensor, in elements, one number per dimension.
        item: where it is stored. The payload is the raw row-major elements or, if `pickled`, the
            whole item as `torch.save` wrote it.
        pickled: whether only torch can decode the payload (sparse, quantized and subclass tensors).
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    item: Item
    pickled: bool = False


class Tensor(msgspec.Struct, frozen=True, array_like=True):
    """One tensor of the state dict, as DCP's TensorProperties describe it, and its chunks.

    `dtype` is that of the stored elements. If it is not in `ITEM_SIZE_BYTES`, a newer version wrote
    it: the tensor cannot be read, and its payload was not compared with its shape.
    """

    shape: tuple[int, ...]
    dtype: str
    layout: str
    requires_grad: bool
    memory_format: str
    pin_memory: bool
    chunks: tuple[Chunk, ...]


class StorageInfo(msgspec.Struct, frozen=True, array_like=True):
    """DCP's StorageMeta, for the record."""

    checkpoint_id: str | None = None
    save_id: str | None = None
    modules: tuple[str, ...] = ()


class Index(msgspec.Struct, frozen=True, array_like=True):
    """The whole checkpoint.

    Attributes:
        format: number of this format; a newer one is refused.
        objects: the data objects.
        tensors: the tensors, by state-dict key (DCP's fqn).
        blobs: pickled values by state-dict key, exactly as DCP's planner gave them (BYTE_IO).
        flatten_mapping: the place of each flattened key in the nested state dict, or None.
        storage: DCP's storage_meta.
    """

    format: int
    objects: tuple[ObjectEntry, ...]
    tensors: dict[str, Tensor]
    blobs: dict[str, Item]
    flatten_mapping: dict[str, tuple[str | int, ...]] | None = None
    storage: StorageInfo = StorageInfo()

    @property
    def payload_bytes(self) -> int:
        """Size of all tensors and pickled values in bytes, without framing."""
        return sum(item.payload_length for item in self._items())

    def _items(self) -> list[Item]:
        items = [chunk.item for tensor in self.tensors.values() for chunk in tensor.chunks]
        items.extend(self.blobs.values())
        return items


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Index)


def encode(index: Index) -> bytes:
    """Encode an index as it is stored."""
    return _encoder.encode(index)


def decode(body: bytes) -> Index:
    """Decode and check a stored index.

    Raises:
        UnsupportedError: a newer version of this package wrote it.
        CheckpointCorruptError: it is damaged, or it contradicts itself.
    """
    try:
        index = _decoder.decode(body)
    except _UNREADABLE as error:
        _refuse_newer(body)
        raise CheckpointCorruptError(f"the index cannot be read: {error}") from None
    if index.format != FORMAT:
        _refuse_newer(body)
        raise CheckpointCorruptError(f"the index has the impossible format {index.format}")
    for entry in index.objects:
        _check_object(entry)
    sizes = [entry.size_bytes for entry in index.objects]
    for key, tensor in index.tensors.items():
        _check_tensor(key, tensor, sizes)
    for key, blob in index.blobs.items():
        if key in index.tensors:
            raise CheckpointCorruptError("the index lists it as a tensor and as a value", key=key)
        _check_item(key, blob, sizes)
    return index


def _refuse_newer(body: bytes) -> None:
    try:
        first = msgspec.msgpack.decode(body)
    except _UNREADABLE:
        return
    if isinstance(first, list) and first and type(first[0]) is int and first[0] > FORMAT:
        raise UnsupportedError(
            f"the checkpoint has index format {first[0]}, this version of dcp_objstore reads up"
            f" to {FORMAT}; upgrade dcp_objstore to load it"
        )


def _check_object(entry: ObjectEntry) -> None:
    check_object_key(entry.key)
    if not 0 <= entry.size_bytes <= _MAX_SIZE:
        raise CheckpointCorruptError(
            f"the index gives an impossible size of {entry.size_bytes} bytes",
            object_key=entry.key,
        )
    if len(entry.framing_digest) != DIGEST_SIZE_BYTES:
        raise CheckpointCorruptError("framing digest of wrong length", object_key=entry.key)


def _check_item(key: str, item: Item, object_sizes: list[int]) -> None:
    if not 0 <= item.object_number < len(object_sizes):
        raise CheckpointCorruptError(
            f"the index refers to object number {item.object_number} of {len(object_sizes)}",
            key=key,
        )
    end = item.offset + item.length
    payload_end = item.payload_offset + item.payload_length
    if (
        min(item.offset, item.length, item.payload_offset, item.payload_length) < 0
        or end > object_sizes[item.object_number]
        or item.payload_offset < item.offset
        or payload_end > end
    ):
        raise CheckpointCorruptError(
            f"the index places bytes [{item.offset}, {end}), payload [{item.payload_offset},"
            f" {payload_end}), in an object of {object_sizes[item.object_number]} bytes",
            key=key,
        )
    if len(item.digests) != digest_count(item.payload_length) * DIGEST_SIZE_BYTES:
        raise CheckpointCorruptError(
            f"the index has {len(item.digests)} bytes of digests for"
            f" {item.payload_length} bytes of payload",
            key=key,
        )


def _check_tensor(key: str, tensor: Tensor, object_sizes: list[int]) -> None:
    item_size = ITEM_SIZE_BYTES.get(tensor.dtype)
    _check_extents(key, tensor.shape)
    # If a chunk were missing, a part of the destination would silently keep its old values.
    given = sum(math.prod(chunk.sizes) for chunk in tensor.chunks)
    if given != math.prod(tensor.shape) or len({c.offsets for c in tensor.chunks}) != len(
        tensor.chunks
    ):
        raise CheckpointCorruptError(
            f"the index has chunks of {given} elements for a tensor of shape {tensor.shape}",
            key=key,
        )
    for chunk in tensor.chunks:
        _check_extents(key, chunk.sizes)
        _check_extents(key, chunk.offsets)
        if not len(chunk.sizes) == len(chunk.offsets) == len(tensor.shape) or any(
            offset + size > extent
            for offset, size, extent in zip(chunk.offsets, chunk.sizes, tensor.shape, strict=True)
        ):
            raise CheckpointCorruptError(
                f"the index has a chunk at {chunk.offsets} of sizes {chunk.sizes}"
                f" in a tensor of shape {tensor.shape}",
                key=key,
            )
        _check_item(key, chunk.item, object_sizes)
        if chunk.pickled or item_size is None:
            continue
        payload_bytes = math.prod(chunk.sizes) * item_size
        if chunk.item.payload_length != payload_bytes:
            raise CheckpointCorruptError(
                f"the index has {chunk.item.payload_length} bytes of payload for a chunk of"
                f" sizes {chunk.sizes} and dtype {tensor.dtype}, which takes {payload_bytes}",
                key=key,
            )


def _check_extents(key: str, extents: tuple[int, ...]) -> None:
    if len(extents) > _MAX_DIMENSIONS or any(n < 0 for n in extents):
        raise CheckpointCorruptError(f"the index has impossible extents {extents[:8]}", key=key)
    if math.prod(n or 1 for n in extents) > _MAX_SIZE:
        raise CheckpointCorruptError(f"the index has extents {extents[:8]} that overflow", key=key)
