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
_METADATA_INDEX: Final = _Global(_METADATA, "MetadataIndex")
_STORAGE_INFO: Final = _Global("torch.distributed.checkpoint.filesystem", "_StorageInfo")
_TENSOR: Final = _Global(_METADATA, "TensorStorageMetadata")
_PROPERTIES: Final = _Global(_METADATA, "TensorProperties")
_BYTES: Final = _Global(_METADATA, "BytesStorageMetadata")
_SIZE: Final = _Global("torch", "Size")

# What the pickles of all chunks refer to. Each has its position here as its number in the memo;
# then come the keys of the objects, and then the state-dict keys.
_SHARED: Final = (
    *(_CHUNK, "offsets", "sizes", _SIZE),
    *(_METADATA_INDEX, "fqn", "offset", "index"),
    *(_STORAGE_INFO, "relative_path", "length"),
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
    keys = (*index.tensors, *index.blobs)
    # The numbers of the keys in the memo. `shared` comes first, with its positions as the numbers.
    number_of = {key: number for number, key in enumerate(keys, len(shared))}
    # `locations` becomes the entries of `storage_data`, and `descriptions` those of
    # `state_dict_metadata`; each entry is a key and its value.
    value_numbers = np.array([number_of[key] for key in index.blobs], np.int64)
    locations = [_value_locations(index, value_numbers)]
    chunks: dict[str, bytes] = {}
    for group in index.groups():
        rows = _chunks(group)
        for tensor, (low, high) in zip(group.tensors, group.bounds(), strict=True):
            chunks[tensor.key] = rows[low:high].tobytes()
        numbers = np.array([number_of[tensor.key] for tensor in group.tensors], dtype=np.int64)
        locations.append(_chunk_locations(index, group, numbers))
    descriptions: list[bytes] = []
    heads: dict[object, bytes] = {}  # many tensors have the same shape and properties
    for key, tensor in index.tensors.items():
        # All fields but the key and `is_sharded`, which the head does not have.
        of_head = msgspec.structs.astuple(tensor)[1:-1]
        if of_head not in heads:
            heads[of_head] = _head(tensor)
        head = heads[of_head]
        descriptions += (_pushed_as(key, number_of[key]), head, chunks[key], _TAIL)
    value = _from_memo(_BYTES) + pickle.EMPTY_TUPLE + pickle.NEWOBJ
    descriptions += (_pushed_as(key, number_of[key]) + value for key in index.blobs)
    storage = {
        "checkpoint_id": index.storage.checkpoint_id,
        "save_id": index.storage.save_id,
        "load_id": None,
        "modules": list(index.storage.modules),
    }
    fields = {
        # A tuple of all that is shared, only to fill the memo. The true version, a second entry of
        # this name, replaces it below.
        "version": b"(" + b"".join(map(_pushed_as, shared, range(len(shared)))) + b"t",
        "state_dict_metadata": _dict(*descriptions),
        "planner_data": _pushed(index.flatten_mapping),
        "storage_data": _dict(*locations),
        "storage_meta": _new_object("StorageMeta") + _pushed(storage) + pickle.BUILD,
    }
    state = [_pushed(name) + body for name, body in fields.items()]
    return b"".join([
        pickle.PROTO + bytes([_PROTOCOL]),
        _new_object("Metadata"),
        _dict(*state, _pushed("version") + _pushed(DCP_VERSION)) + pickle.BUILD + pickle.STOP,
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
        *(_from_memo("properties"), _from_memo(_PROPERTIES), pickle.EMPTY_TUPLE, pickle.NEWOBJ),
        pickle.MARK,  # the five fields of torch 2.6 to 2.14; later versions pickle more after these
        _pushed(_Global("torch", tensor.dtype)),
        _called(layout, f"torch.{tensor.layout}"),
        _pushed(tensor.requires_grad),
        _called(memory_format, _MEMORY_FORMATS.index(tensor.memory_format)),
        *(_pushed(tensor.pin_memory), pickle.TUPLE, pickle.BUILD),
        *(_from_memo("size"), _called(_SIZE, tensor.shape)),
        *(_from_memo("chunks"), pickle.EMPTY_LIST, pickle.MARK),
    ])  # fmt: skip


def _chunks(group: ix.Group) -> _Rows:
    """Return a row for each chunk: the opcodes of its ChunkStorageMetadata."""
    return _side_by_side(
        len(group.rows),
        _opened(_CHUNK),
        *(_from_memo("offsets"), *_size(group.offsets)),
        *(_from_memo("sizes"), *_size(group.sizes)),
        _CLOSED,
    )


def _chunk_locations(index: ix.Index, group: ix.Group, keys: ix.Numbers) -> bytes:
    """Return, for each chunk, the opcodes of its MetadataIndex and its StorageInfo.

    Args:
        keys: the numbers in the memo of the keys of the group's tensors.
    """
    return _side_by_side(
        len(group.rows),
        _opened(_METADATA_INDEX),
        *(_from_memo("fqn"), *_each_from_memo(keys[group.owner])),
        *(_from_memo("offset"), *_size(group.offsets)),
        *(_from_memo("index"), _numbers(group.chunk_in_tensor)),
        _CLOSED,
        *_storage_info(index, group.rows),
    ).tobytes()


def _value_locations(index: ix.Index, keys: ix.Numbers) -> bytes:
    """Return, for each pickled value, the opcodes of its MetadataIndex and its StorageInfo.

    Args:
        keys: the numbers in the memo of the keys of the values, whose rows are the last ones.
    """
    items = len(index.columns.offset)
    return _side_by_side(
        len(keys),
        _opened(_METADATA_INDEX),
        *(_from_memo("fqn"), *_each_from_memo(keys)),
        *(_from_memo("index"), pickle.NONE),
        _CLOSED,
        *_storage_info(index, np.arange(items - len(keys), items)),
    ).tobytes()


def _storage_info(index: ix.Index, rows: ix.Numbers) -> tuple[bytes | _Rows, ...]:
    """Return the opcodes of the StorageInfo of items: one row for each row of the index."""
    columns = index.columns
    # In the memo, the keys of the objects follow `_SHARED`.
    keys = columns.object_number[rows].astype(np.int64) + len(_SHARED)
    length = columns.payload_length[rows].astype(np.int64)
    length += columns.lead[rows].astype(np.int64) + columns.trail[rows].astype(np.int64)
    return (
        _opened(_STORAGE_INFO),
        *(_from_memo("relative_path"), *_each_from_memo(keys)),
        *(_from_memo("offset"), _numbers(columns.offset[rows])),
        *(_from_memo("length"), _numbers(length)),
        _CLOSED,
    )


# Opcodes.

# Sets the attributes of the object that `_opened` has made.
_CLOSED: Final = pickle.SETITEMS + pickle.BUILD
# What ends the list of a tensor's chunks, and its TensorStorageMetadata.
_TAIL: Final = pickle.APPENDS + _CLOSED


def _pushed(value: object) -> bytes:
    """Return the opcodes that push a value and leave the memo alone."""
    if isinstance(value, _Global):
        return pickle.GLOBAL + f"{value.module}\n{value.name}\n".encode()
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, _PART_PROTOCOL)
    pickler.fast = True  # no memo
    pickler.dump(value)
    return buffer.getvalue()[len(pickle.PROTO) + 1 : -len(pickle.STOP)]


def _pushed_as(value: object, number: int) -> bytes:
    """Return the opcodes that push a value and give it a number in the memo."""
    return _pushed(value) + pickle.LONG_BINPUT + number.to_bytes(4, "little")


def _from_memo(value: object) -> bytes:
    """Return the opcodes that push one of `_SHARED`, from the memo."""
    return pickle.BINGET + bytes([_SHARED.index(value)])


def _each_from_memo(numbers: ix.Column | ix.Numbers) -> tuple[bytes, _Rows]:
    """Return the opcodes that push, in each row, the value with this number in the memo."""
    return pickle.LONG_BINGET, numbers.astype("<u4").view(np.uint8).reshape(len(numbers), 4)


def _new_object(name: str) -> bytes:
    """Return the opcodes that push a new object of a class of torch's."""
    return _pushed(_Global(_METADATA, name)) + pickle.EMPTY_TUPLE + pickle.NEWOBJ


def _called(function: _Global, argument: object) -> bytes:
    """Return the opcodes that push what a function of torch returns for an argument."""
    return _pushed(function) + _pushed(argument) + pickle.TUPLE1 + pickle.REDUCE


def _dict(*items: bytes) -> bytes:
    """Return the opcodes that push a dictionary; each item pushes keys and their values."""
    return b"".join([pickle.EMPTY_DICT, pickle.MARK, *items, pickle.SETITEMS])


def _opened(cls: _Global) -> bytes:
    """Return the opcodes that push a new object; its attributes follow, then `_CLOSED`."""
    return _from_memo(cls) + pickle.EMPTY_TUPLE + pickle.NEWOBJ + pickle.EMPTY_DICT + pickle.MARK


def _size(sizes: ix.Matrix) -> tuple[bytes | _Rows, ...]:
    """Return the opcodes that push, in each row, a `torch.Size` of the row's numbers."""
    opened, closed = _from_memo(_SIZE) + pickle.MARK, pickle.TUPLE + pickle.TUPLE1 + pickle.REDUCE
    numbers = _numbers(sizes.reshape(-1))
    rows, dims = sizes.shape
    return opened, numbers.reshape(rows, dims * numbers.shape[1]), closed


def _numbers(column: ix.Column | ix.Numbers) -> _Rows:
    """Return the opcodes that push, in each row, the row's number."""
    # All rows have the same width, so one large number gives all of them eight bytes.
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
        """Return whether a `.metadata` leads stock torch to the items of an encoded index.

        Its `version` and `storage_meta`, by which torch finds no item, may differ.
        """
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
