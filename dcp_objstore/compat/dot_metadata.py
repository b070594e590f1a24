"""Write `.metadata`, the pickle by which stock torch readers find a checkpoint's items.

It holds stock classes only, in a form that `pickle.load` reads with torch 2.6 and later. torch
pickles three objects per chunk. Here their pickles are written from the columns of the index
instead, as rows of bytes that differ only in their numbers. Classes are written by their names, so
this needs no torch. (`StockDotMetadata` compares: a `.metadata` that differs is decoded, which
imports torch.)
"""

from __future__ import annotations

import io
import pickle
from typing import Final, NamedTuple, TypeAlias

import msgspec
import numpy as np

from dcp_objstore.checkpoint import index as ix
from dcp_objstore.checkpoint.names import parse_data_key
from dcp_objstore.errors import CheckpointCorruptError, CorruptDataError, InputError
from dcp_objstore.state.stored import DCP_VERSION, unknown_dtype

# Stock torch takes Python's default protocol: 4 up to Python 3.13, 5 from 3.14 on.
_PROTOCOL: Final = 4
# Protocol 3 is the last one without frames, so its opcodes can stand inside of another pickle.
_PART_PROTOCOL: Final = 3

_LAYOUTS: Final = (
    *("strided", "jagged", "_mkldnn"),
    *("sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc"),
)
# The memory formats, in the order of the numbers that stand for them.
_MEMORY_FORMATS: Final = ("contiguous_format", "channels_last", "preserve_format")


class _Global(NamedTuple):
    """A class or function of torch."""

    module: str
    name: str


_METADATA: Final = "torch.distributed.checkpoint.metadata"
_CHUNK: Final = _Global(_METADATA, "ChunkStorageMetadata")
_PLACE: Final = _Global(_METADATA, "MetadataIndex")
_INFO: Final = _Global("torch.distributed.checkpoint.filesystem", "_StorageInfo")
_TENSOR: Final = _Global(_METADATA, "TensorStorageMetadata")
_PROPERTIES: Final = _Global(_METADATA, "TensorProperties")
_BYTES: Final = _Global(_METADATA, "BytesStorageMetadata")
_SIZE: Final = _Global("torch", "Size")

# What the pickles of all chunks refer to. Each has its position here as its number in the memo;
# then come the keys of the objects, and then the state-dict keys.
_SHARED: Final = (
    *(_CHUNK, "offsets", "sizes", _SIZE),
    *(_PLACE, "fqn", "offset", "index"),
    *(_INFO, "relative_path", "length"),
    *(_TENSOR, "properties", "size", "chunks"),
    *(_PROPERTIES, _BYTES),
)

_Rows: TypeAlias = np.ndarray[tuple[int, int], np.dtype[np.uint8]]


def encode_metadata(index: ix.Index) -> bytes:
    """Pickle the `Metadata` by which a stock FileSystemReader finds the items of a checkpoint.

    TensorProperties is always the 5-tuple (dtype, layout, requires_grad, memory format, pinned):
    torch 2.15 writes six fields, which torch up to 2.14 rejects.

    Raises:
        UnsupportedError: the dtype of a tensor is unknown.
        CheckpointCorruptError: `.metadata` cannot have a tensor's layout or memory format.
    """
    shared = (*_SHARED, *(entry.key for entry in index.objects))
    first = len(shared)  # the number in the memo of the first state-dict key
    number_of = {key: first + at for at, key in enumerate((*index.tensors, *index.blobs))}
    chunks: dict[str, bytes] = {}
    places = [_value_places(index, np.array([number_of[key] for key in index.blobs], np.int64))]
    for group in index.groups():
        pickled = _chunks(group)
        for tensor, (low, high) in zip(group.tensors, group.bounds(), strict=True):
            chunks[tensor.key] = pickled[low:high].tobytes()
        keys = np.array([number_of[tensor.key] for tensor in group.tensors], dtype=np.int64)
        places.append(_chunk_places(index, group, keys))
    value = _get(_BYTES) + pickle.EMPTY_TUPLE + pickle.NEWOBJ
    described: list[bytes] = []
    heads: dict[object, bytes] = {}
    for key, tensor in index.tensors.items():
        alike = msgspec.structs.astuple(tensor)[1:-1]  # all but its key and chunks
        if alike not in heads:
            heads[alike] = _head(tensor)
        described += (_put(key, number_of[key]), heads[alike], chunks[key], _TAIL)
    described += (_put(key, number_of[key]) + value for key in index.blobs)
    storage = {
        "checkpoint_id": index.storage.checkpoint_id,
        "save_id": index.storage.save_id,
        "load_id": None,
        "modules": list(index.storage.modules),
    }
    fields = {
        # Only the last value of a field counts: the first one fills the memo.
        "version": b"(" + b"".join(map(_put, shared, range(first))) + b"t",
        "state_dict_metadata": _dict(*described),
        "planner_data": _part(index.flatten_mapping),
        "storage_data": _dict(*places),
        "storage_meta": _new("StorageMeta") + _part(storage) + pickle.BUILD,
    }
    state = [_part(name) + body for name, body in fields.items()]
    return b"".join([
        pickle.PROTO + bytes([_PROTOCOL]),
        _new("Metadata"),
        _dict(*state, _part("version") + _part(DCP_VERSION)) + pickle.BUILD + pickle.STOP,
    ])  # fmt: skip


def _head(tensor: ix.Tensor) -> bytes:
    """Return the opcodes that push a tensor's TensorStorageMetadata, up to its list of chunks.

    `encode_metadata` writes the chunks and `_TAIL` after it.
    """
    if tensor.dtype not in ix.ITEM_SIZE_BYTES:
        raise unknown_dtype(tensor.dtype, tensor.key)
    for name, known in ((tensor.layout, _LAYOUTS), (tensor.memory_format, _MEMORY_FORMATS)):
        if name not in known:
            text = f"stock torch's .metadata has no layout or memory format {name[:100]!r}"
            raise CheckpointCorruptError(text, key=tensor.key)
    layout = _Global("torch.serialization", "_get_layout")
    memory_format = _Global(_METADATA, "_MEM_FORMAT_ENCODING")
    return b"".join([
        _opened(_TENSOR),
        *(_get("properties"), _get(_PROPERTIES), pickle.EMPTY_TUPLE, pickle.NEWOBJ),
        pickle.MARK,  # what torch 2.6 to 2.14 pickle; later versions append to it
        _part(_Global("torch", tensor.dtype)),
        _called(layout, f"torch.{tensor.layout}"),
        _part(tensor.requires_grad),
        _called(memory_format, _MEMORY_FORMATS.index(tensor.memory_format)),
        *(_part(tensor.pin_memory), pickle.TUPLE, pickle.BUILD),
        *(_get("size"), _called(_SIZE, tensor.shape)),
        *(_get("chunks"), pickle.EMPTY_LIST, pickle.MARK),
    ])  # fmt: skip


def _chunks(group: ix.Group) -> _Rows:
    """A row for each chunk: its ChunkStorageMetadata."""
    return _side_by_side(
        len(group.rows),
        _opened(_CHUNK),
        *(_get("offsets"), *_size(group.offsets)),
        *(_get("sizes"), *_size(group.sizes)),
        _CLOSED,
    )


def _chunk_places(index: ix.Index, group: ix.Group, keys: ix.Numbers) -> bytes:
    """For each chunk: its MetadataIndex and its StorageInfo."""
    return _side_by_side(
        len(group.rows),
        _opened(_PLACE),
        *(_get("fqn"), *_get_each(keys[group.owner])),
        *(_get("offset"), *_size(group.offsets)),
        *(_get("index"), _numbers(group.chunk_in_tensor)),
        _CLOSED,
        *_storage_info(index, group.rows),
    ).tobytes()


def _value_places(index: ix.Index, keys: ix.Numbers) -> bytes:
    """For each pickled value: its MetadataIndex and its StorageInfo."""
    items = len(index.columns.offset)
    return _side_by_side(
        len(keys),
        _opened(_PLACE),
        *(_get("fqn"), *_get_each(keys)),
        *(_get("index"), pickle.NONE),
        _CLOSED,
        *_storage_info(index, np.arange(items - len(keys), items)),
    ).tobytes()


def _storage_info(index: ix.Index, rows: ix.Numbers) -> tuple[bytes | _Rows, ...]:
    """Return the opcodes of the StorageInfo of items: one row for each row of the index."""
    columns = index.columns
    keys = columns.object_number[rows].astype(np.int64) + len(_SHARED)
    length = columns.payload_length[rows].astype(np.int64)
    length += columns.lead[rows].astype(np.int64) + columns.trail[rows].astype(np.int64)
    return (
        _opened(_INFO),
        *(_get("relative_path"), *_get_each(keys)),
        *(_get("offset"), _numbers(columns.offset[rows])),
        *(_get("length"), _numbers(length)),
        _CLOSED,
    )


# Opcodes.

# Sets the attributes of the object that `_opened` has made.
_CLOSED: Final = pickle.SETITEMS + pickle.BUILD
# What ends the list of a tensor's chunks, and its TensorStorageMetadata.
_TAIL: Final = pickle.APPENDS + _CLOSED


def _part(value: object) -> bytes:
    """Return the opcodes that push a value and leave the memo alone."""
    if isinstance(value, _Global):
        return pickle.GLOBAL + f"{value.module}\n{value.name}\n".encode()
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, _PART_PROTOCOL)
    pickler.fast = True  # no memo
    pickler.dump(value)
    return buffer.getvalue()[len(pickle.PROTO) + 1 : -len(pickle.STOP)]


def _put(value: object, number: int) -> bytes:
    """Push a value and give it a number in the memo."""
    return _part(value) + pickle.LONG_BINPUT + number.to_bytes(4, "little")


def _get(value: object) -> bytes:
    """Push one of `_SHARED`."""
    return pickle.BINGET + bytes([_SHARED.index(value)])


def _get_each(numbers: ix.Column | ix.Numbers) -> tuple[bytes, _Rows]:
    """In each row, push the value that has this number in the memo."""
    return pickle.LONG_BINGET, numbers.astype("<u4").view(np.uint8).reshape(len(numbers), 4)


def _new(name: str) -> bytes:
    """Push a new object of a class of torch's."""
    return _part(_Global(_METADATA, name)) + pickle.EMPTY_TUPLE + pickle.NEWOBJ


def _called(function: _Global, argument: object) -> bytes:
    """Push what a function of torch returns for an argument."""
    return _part(function) + _part(argument) + pickle.TUPLE1 + pickle.REDUCE


def _dict(*items: bytes) -> bytes:
    return b"".join([pickle.EMPTY_DICT, pickle.MARK, *items, pickle.SETITEMS])


def _opened(cls: _Global) -> bytes:
    """Push a new object; then come its attributes, then `_CLOSED`."""
    return _get(cls) + pickle.EMPTY_TUPLE + pickle.NEWOBJ + pickle.EMPTY_DICT + pickle.MARK


def _size(sizes: ix.Matrix) -> tuple[bytes | _Rows, ...]:
    """In each row, push a `torch.Size` of the row's numbers."""
    opened, closed = _get(_SIZE) + pickle.MARK, pickle.TUPLE + pickle.TUPLE1 + pickle.REDUCE
    numbers = _numbers(sizes.reshape(-1))
    rows, dims = sizes.shape
    return opened, numbers.reshape(rows, dims * numbers.shape[1]), closed


def _numbers(column: ix.Column | ix.Numbers) -> _Rows:
    """In each row, push the row's number."""
    is_small = int(column.max(initial=0)) < 2**31
    opcode, dtype = (pickle.BININT, "<i4") if is_small else (pickle.LONG1 + b"\x08", "<i8")
    numbers = column.astype(dtype)
    digits = numbers.view(np.uint8).reshape(len(column), numbers.itemsize)
    return _side_by_side(len(column), opcode, digits)


def _side_by_side(count: int, *pieces: bytes | _Rows) -> _Rows:
    """Return `count` rows of the same width; a piece of bytes is the same in each."""
    return np.concatenate(
        [
            np.broadcast_to(np.frombuffer(piece, dtype=np.uint8), (count, len(piece)))
            if isinstance(piece, bytes)
            else piece
            for piece in pieces
        ],
        axis=1,
    )


class StockDotMetadata:
    """The content of `.metadata` as stock torch reads it, for `checkpoint.publish`."""

    def derive(self, index: bytes) -> bytes:
        """Return the `.metadata` of an encoded index."""
        return encode_metadata(ix.decode(index))

    def describes(self, body: bytes, index: bytes) -> bool:
        """Return whether a `.metadata` leads stock torch to the items of an encoded index."""
        derived = self.derive(index)
        if body == derived:
            return True
        from dcp_objstore.compat.foreign import decode_metadata

        try:
            present, wanted = decode_metadata(body), decode_metadata(derived)
        except (CorruptDataError, InputError):
            return False
        return (
            present.storage_data == wanted.storage_data
            and present.state_dict_metadata == wanted.state_dict_metadata
            and present.planner_data == wanted.planner_data
        )

    def is_ours(self, body: bytes) -> bool:
        """Return whether all objects that a `.metadata` names have names that we write."""
        from dcp_objstore.compat.foreign import decode_metadata

        try:
            places = decode_metadata(body).storage_data.values()
        except (CorruptDataError, InputError):
            return False
        return all(parse_data_key(place.relative_path) is not None for place in places)
