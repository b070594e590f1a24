"""The index: what is in a checkpoint and where, as one msgpack object.

Properties of objects and tensors (keys, shapes, dtypes) are stored as msgpack values. Properties of
items are stored in columns: arrays of unsigned little-endian integers, which are decoded and
checked as arrays. A save by 256 ranks has up to 256 chunks of each tensor; no Python
object is made of a chunk before someone asks for that chunk.

The index is typed, validated and bounded, and never pickled. `decode` returns only an index in
which every item lies inside its object, no two items overlap, and every size agrees with its shape,
so that readers may allocate and read by it without further checks. This module knows the names and
sizes of dtypes; it does not import torch.

Structs are encoded as arrays. New fields are appended with a default, and the format number rises
when an old reader would misread a new index.
"""

from __future__ import annotations

import ast
import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, KeysView, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

import msgspec
import numpy as np

from dcp_objstore.checkpoint.names import check_object_key
from dcp_objstore.errors import CheckpointCorruptError, UnsupportedError
from dcp_objstore.transfer.digests import BLOCK_SIZE_BYTES, DIGEST_SIZE_BYTES

FORMAT: Final = 2

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
# Steps of a place in the nested dict: DCP descends by recursion, in Python, to make them.
MAX_PLACE_LENGTH: Final = 1000
_NUMBER = "None|True|False|-?[0-9]+|-?[0-9]+[.][0-9]+|-?[0-9]+([.][0-9]+)?e[-+]?[0-9]+"
# The text of a key that is not a str: a number, or a flat tuple of numbers. So `ast` may read it.
_LITERAL = re.compile(rf"(?=.{{1,200}}$)(({_NUMBER})|\(({_NUMBER})(, ({_NUMBER}))*,?\))")
# The widths of a column in bytes; each column has the narrowest that holds its largest number.
_WIDTHS = (1, 2, 4, 8)
_HALF = np.uint64(32)
_LOW_HALF = np.uint64(2**32 - 1)
# msgspec does not wrap the decoder's error for a map key that is not UTF-8, nor, before 0.22, for
# one that cannot be hashed.
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, TypeError)

T = TypeVar("T")
Column: TypeAlias = np.ndarray[tuple[int], np.dtype[np.unsignedinteger[Any]]]
Matrix: TypeAlias = np.ndarray[tuple[int, int], np.dtype[np.unsignedinteger[Any]]]
_Mask: TypeAlias = np.ndarray[tuple[int], np.dtype[np.bool_]]
Numbers: TypeAlias = np.ndarray[tuple[int], np.dtype[np.int64]]


class ObjectEntry(msgspec.Struct, frozen=True, array_like=True):
    """One data object.

    Attributes:
        e_tag: the ETag that the store reported after the upload, or None.
        framing_digest: XXH3-128 over all its bytes that are not payload, in order.
    """

    key: str
    size_bytes: int
    e_tag: str | None
    framing_digest: bytes


class Tensor(msgspec.Struct, frozen=True, array_like=True):
    """One tensor of the state dict, as DCP's TensorProperties describe it.

    `dtype` is that of the stored elements. If it is not in `ITEM_SIZE_BYTES`, a newer version wrote
    it: the tensor cannot be read, and its payload was not compared with its shape. `is_sharded` is
    whether it was a DTensor or the like, which the chunks of one that is replicated do not show;
    None if the save did not note it.
    """

    key: str
    shape: tuple[int, ...]
    dtype: str
    layout: str
    requires_grad: bool
    memory_format: str
    pin_memory: bool
    chunk_count: int
    is_sharded: bool | None = None


class StorageInfo(msgspec.Struct, frozen=True, array_like=True):
    """DCP's StorageMeta, for the record."""

    checkpoint_id: str | None = None
    save_id: str | None = None
    modules: tuple[str, ...] = ()


class Columns(NamedTuple):
    """The properties of all items in the index, one array for each property.

    A row of the first six columns is an item: first the chunks of each tensor, in the order of
    their offsets, tensor after tensor; then the pickled values. An item lies in its object like
    this, so that no number in a column can place its payload outside of it:

        [ object ... offset | lead | payload_length | trail ...          ]
                            [----------- the item ----------]

    Attributes:
        object_number: position of the item's object in `Index.objects`.
        offset: the byte of its object at which the item begins; stock torch readers read from here.
        lead: number of bytes of the item before its payload.
        payload_length: number of bytes of the payload.
        trail: number of bytes of the item after its payload.
        pickled: 1 if only torch can decode the payload (sparse, quantized and subclass tensors,
            which are stored as `torch.save` wrote them); 0 for raw row-major elements and for
            pickled values.
        chunk_offsets: the offset of each chunk in its tensor, in elements: one number per
            dimension, chunk after chunk.
        chunk_sizes: the sizes of each chunk, likewise.
        digests: 16 bytes per 4 MiB block of payload, counted from the payload's start, item after
            item.
    """

    object_number: Column
    offset: Column
    lead: Column
    payload_length: Column
    trail: Column
    pickled: Column
    chunk_offsets: Column
    chunk_sizes: Column
    digests: Column


class Item(NamedTuple):
    """One row of the columns: where an item is stored, and the digests of its payload.

    `Columns` describes the fields. `length` is that of the whole item; `payload_offset` counts from
    the start of the object.
    """

    object_number: int
    offset: int
    length: int
    payload_offset: int
    payload_length: int
    pickled: bool
    digests: bytes


class Group(NamedTuple):
    """The chunks of all tensors that have the same number of dimensions, one row a chunk.

    Attributes:
        owner: position of the chunk's tensor in `tensors`.
        chunk_in_tensor: position of the chunk among those of its tensor.
        rows: the chunk's row in the columns.
        offsets, sizes: the chunk's box in its tensor.
    """

    tensors: Sequence[Tensor]
    owner: Numbers
    chunk_in_tensor: Numbers
    rows: Numbers
    offsets: Matrix
    sizes: Matrix

    def bounds(self) -> Iterator[tuple[int, int]]:
        """Iterate over the tensors' first chunks and the ones after their last."""
        counts = [tensor.chunk_count for tensor in self.tensors]
        return itertools.pairwise(itertools.accumulate(counts, initial=0))


class _Stored(msgspec.Struct, frozen=True, array_like=True):
    """The index as it is stored. `columns` are the bytes of `Columns`, in its order."""

    format: int
    objects: tuple[ObjectEntry, ...]
    tensors: tuple[Tensor, ...]
    blobs: tuple[str, ...]
    columns: tuple[bytes, bytes, bytes, bytes, bytes, bytes, bytes, bytes, bytes]
    flatten_mapping: dict[str, tuple[str | int, ...]] | None
    storage: StorageInfo
    literal_keys: dict[str, tuple[int, ...]] = {}


class LiteralKey(str):
    """The name, in a path, of a key of a dict that is a number, a bool, None or a tuple of such.

    Its text is that of `repr`, from which `value` gets the key: the key 3 has the name "3". DCP's
    flattening leaves the name as it is.
    """

    __slots__ = ()

    def __str__(self) -> str:
        return self

    @property
    def value(self) -> Any:
        """The key."""
        return ast.literal_eval(self)


def with_own_keys(entries: Mapping[Any, T]) -> dict[Any, T]:
    """Return the entries of a dict under the keys that its steps are names of.

    Two ranks may have saved keys that are equal, such as 1 and 1.0. Then the names stay, because
    one dict cannot have both.
    """
    own = {
        step.value if isinstance(step, LiteralKey) else step: entry
        for step, entry in entries.items()
    }
    if len(own) == len(entries):
        return own
    return {plain(step): entry for step, entry in entries.items()}


def plain(step: str | int) -> str | int:
    """Return a step of a path as DCP has it: a plain str, or the int of a position in a list."""
    return str.__str__(step) if isinstance(step, LiteralKey) else step


def is_literal(step: object) -> bool:
    """Return whether a step of a path is the text that a `LiteralKey` may have."""
    return isinstance(step, str) and _LITERAL.fullmatch(step) is not None


@dataclass(frozen=True, slots=True, eq=False)
class Index:
    """The whole checkpoint.

    Attributes:
        tensors: the tensors, by state-dict key (DCP's fqn).
        blobs: keys of the pickled values, whose items are exactly what DCP's planner gave
            (BYTE_IO).
        flatten_mapping: the place of each flattened key in the nested state dict, or None.
        literal_keys: the steps of such places that are keys of a dict but not str, by their
            numbers. (In `flatten_mapping` they are str; an int there is a position in a list.)
    """

    objects: tuple[ObjectEntry, ...]
    tensors: dict[str, Tensor]
    blobs: tuple[str, ...]
    columns: Columns
    flatten_mapping: dict[str, tuple[str | int, ...]] | None = None
    storage: StorageInfo = field(default_factory=StorageInfo)
    literal_keys: dict[str, tuple[int, ...]] = field(default_factory=dict)
    # By key: the row of its first item, and for a tensor the position, in `chunk_offsets` and
    # `chunk_sizes`, of the first number of its first chunk. By row: the number of earlier digests.
    _first_row: dict[str, int] = field(init=False)
    _first_extent: dict[str, int] = field(init=False)
    _first_digest: Numbers = field(init=False)

    def __post_init__(self) -> None:
        """Find out where in the columns each key and each row begins.

        Each begins at the sum of the counts of all that comes before it.
        """
        counts = [tensor.chunk_count for tensor in self.tensors.values()]
        rows = itertools.accumulate([*counts, *(1 for _ in self.blobs)], initial=0)
        ndims = [len(tensor.shape) for tensor in self.tensors.values()]
        extents = itertools.accumulate(map(int.__mul__, counts, ndims), initial=0)
        set_field = object.__setattr__  # the class is frozen
        # Not strict: `accumulate` gives one sum more, at which a further key would begin.
        set_field(self, "_first_row", dict(zip((*self.tensors, *self.blobs), rows, strict=False)))
        set_field(self, "_first_extent", dict(zip(self.tensors, extents, strict=False)))
        counts_of_digests = digest_counts(self.columns.payload_length)
        set_field(self, "_first_digest", np.cumsum(counts_of_digests) - counts_of_digests)

    @property
    def payload_bytes(self) -> int:
        """Size of all tensors and pickled values in bytes, without framing."""
        return sum(self.columns.payload_length.tolist())

    @property
    def keys(self) -> KeysView[str]:
        """The keys of all tensors and then of all values."""
        return self._first_row.keys()

    def item(self, row: int) -> Item:
        """Return one row of the columns."""
        columns = self.columns
        offset, lead = int(columns.offset[row]), int(columns.lead[row])
        length = int(columns.payload_length[row])
        # In bytes; there is a digest for each block, and the last block may be short.
        first = int(self._first_digest[row]) * DIGEST_SIZE_BYTES
        after = first + -(-length // BLOCK_SIZE_BYTES) * DIGEST_SIZE_BYTES
        return Item(
            object_number=int(columns.object_number[row]),
            offset=offset,
            length=lead + length + int(columns.trail[row]),
            payload_offset=offset + lead,
            payload_length=length,
            pickled=bool(columns.pickled[row]),
            digests=columns.digests[first:after].tobytes(),
        )

    def rows(self, key: str) -> range:
        """Return the rows of a tensor's chunks, or the one row of a value."""
        first, tensor = self._first_row[key], self.tensors.get(key)
        return range(first, first + (1 if tensor is None else tensor.chunk_count))

    def digests(self, key: str) -> bytes:
        """Return the digests of all blocks of a tensor or value, item after item."""
        rows, columns = self.rows(key), self.columns
        if not rows:  # a tensor without elements may have no chunks
            return b""
        first = int(self._first_digest[rows.start])
        count = int(digest_counts(columns.payload_length[rows.start : rows.stop]).sum())
        return columns.digests.reshape(-1, DIGEST_SIZE_BYTES)[first : first + count].tobytes()

    def boxes(self, key: str) -> tuple[Matrix, Matrix]:
        """Return the offsets and the sizes of a tensor's chunks: matrices with a line per chunk."""
        tensor = self.tensors[key]
        count, ndim = tensor.chunk_count, len(tensor.shape)
        first = self._first_extent[key]
        after = first + count * ndim
        columns = self.columns
        offsets, sizes = columns.chunk_offsets[first:after], columns.chunk_sizes[first:after]
        return offsets.reshape(count, ndim), sizes.reshape(count, ndim)

    def box(self, key: str, chunk_in_tensor: int) -> tuple[list[int], list[int]]:
        """Return the offsets and the sizes of one chunk of a tensor."""
        ndim = len(self.tensors[key].shape)
        first = self._first_extent[key] + chunk_in_tensor * ndim
        after, columns = first + ndim, self.columns
        offsets, sizes = columns.chunk_offsets[first:after], columns.chunk_sizes[first:after]
        return offsets.tolist(), sizes.tolist()

    def groups(self) -> Iterator[Group]:
        """Iterate over the tensors, grouped by their number of dimensions.

        For example, `w` has 2 dimensions and `b` has 1, and each has two chunks. The rows are
        w0 w1 b0 b1, and `chunk_offsets` has the numbers w0 w0 w1 w1 b0 b1, one per dimension. In
        the group of `w`, rows is 0 1, owner 0 0, chunk_in_tensor 0 1, and offsets, a matrix of
        2 x 2, has the first four numbers; sizes likewise.
        """
        by_ndim: dict[int, list[Tensor]] = {}
        for tensor in self.tensors.values():
            by_ndim.setdefault(len(tensor.shape), []).append(tensor)
        counts = np.array([tensor.chunk_count for tensor in self.tensors.values()], np.int64)
        ndims = np.array([len(tensor.shape) for tensor in self.tensors.values()], np.uint8)
        ndim_of_row = np.repeat(ndims, counts)
        ndim_of_number = np.repeat(ndims, counts * ndims)  # of each in `chunk_offsets`
        for ndim, tensors in by_ndim.items():
            rows = np.flatnonzero(ndim_of_row == ndim)
            group_counts = counts[ndims == ndim]
            owner = np.repeat(np.arange(len(tensors)), group_counts)
            # The position in the group of each tensor's first chunk.
            first_of_owner = np.cumsum(group_counts) - group_counts
            chunk_in_tensor = np.arange(len(owner)) - first_of_owner[owner]
            mask, shape = ndim_of_number == ndim, (len(rows), ndim)
            offsets = self.columns.chunk_offsets[mask].reshape(shape)
            sizes = self.columns.chunk_sizes[mask].reshape(shape)
            yield Group(tensors, owner, chunk_in_tensor, rows=rows, offsets=offsets, sizes=sizes)

    def find(self, key: str, offset: Sequence[int] | None, hint: int | None = None) -> int | None:
        """Return the row of a chunk or of a pickled value, or None if there is no such item.

        Args:
            offset: the chunk's offset in its tensor; None for a pickled value.
            hint: position of the chunk that it probably is, among the tensor's chunks.
        """
        # No item has the key; or it is a tensor's and a value is asked for, or the other way round.
        if key not in self._first_row or (offset is None) == (key in self.tensors):
            return None
        first = self._first_row[key]
        if offset is None:
            return first
        # A negative number would not fit the array below.
        wanted, tensor = list(offset), self.tensors[key]
        if len(wanted) != len(tensor.shape) or any(number < 0 for number in wanted):
            return None
        # Most often the hint is right; otherwise all chunks of the tensor are compared.
        if hint is not None and 0 <= hint < tensor.chunk_count and self.box(key, hint)[0] == wanted:
            return first + hint
        offsets, _ = self.boxes(key)
        numbers = np.flatnonzero((offsets == np.array(wanted, dtype=np.uint64)).all(axis=1))
        return first + int(numbers[0]) if len(numbers) else None


def digest_counts(payload_length: Column) -> Numbers:
    """Return the number of blocks of each payload; the last one of a payload may be short."""
    whole, rest = np.divmod(payload_length, np.uint64(BLOCK_SIZE_BYTES))
    counts: Numbers = whole.astype(np.int64)
    counts += rest != 0
    return counts


def encode(index: Index) -> bytes:
    """Encode an index as it is stored."""
    return msgspec.msgpack.encode(
        _Stored(
            format=FORMAT,
            objects=index.objects,
            tensors=tuple(index.tensors.values()),
            blobs=index.blobs,
            columns=tuple(map(_narrow, index.columns)),  # type: ignore[arg-type]  # there are nine
            flatten_mapping=index.flatten_mapping,
            storage=index.storage,
            literal_keys=index.literal_keys,
        )
    )


def _narrow(column: Column) -> bytes:
    """Return the bytes of a column, with the narrowest numbers that hold its largest one."""
    largest = int(column.max(initial=0))
    width = next(width for width in _WIDTHS if largest < 256**width)
    return column.astype(f"<u{width}").tobytes()


_decoder = msgspec.msgpack.Decoder(_Stored)


def decode(body: bytes) -> Index:
    """Decode and check a stored index.

    Raises:
        UnsupportedError: a newer version of this package wrote it.
        CheckpointCorruptError: it is damaged, or it contradicts itself.
    """
    try:
        stored = _decoder.decode(body)
    except _UNREADABLE as error:
        _refuse_newer(body)  # it is not damaged if a newer format has another form
        raise CheckpointCorruptError(f"the index cannot be read: {error}") from None
    if stored.format != FORMAT:
        _refuse_newer(body)
        raise CheckpointCorruptError(f"the index has the impossible format {stored.format}")
    for entry in stored.objects:
        _check_object(entry)
    for tensor in stored.tensors:
        _check_tensor(tensor)
    tensors = {tensor.key: tensor for tensor in stored.tensors}
    _refuse_duplicates([*(tensor.key for tensor in stored.tensors), *stored.blobs])
    for key, place in (stored.flatten_mapping or {}).items():
        if len(place) > MAX_PLACE_LENGTH:
            text = f"the index places it {len(place)} deep, at most {MAX_PLACE_LENGTH} are possible"
            raise CheckpointCorruptError(text, key=key)
    # `literal_keys` names steps of a place. Each must be there and be the text of such a key.
    for key, steps in stored.literal_keys.items():
        place = (stored.flatten_mapping or {}).get(key, ())
        if not all(0 <= step < len(place) and is_literal(place[step]) for step in steps):
            raise CheckpointCorruptError("the index takes a name for a number", key=key)
    chunks = sum(tensor.chunk_count for tensor in stored.tensors)
    extents = sum(tensor.chunk_count * len(tensor.shape) for tensor in stored.tensors)
    items = chunks + len(stored.blobs)
    # The first six columns have a number for each item, and the next two one for each dimension of
    # each chunk. The last one has bytes, which `_check_digests` counts.
    counts = (*(items,) * 6, extents, extents, len(stored.columns[-1]))
    columns = Columns(*map(_column, Columns.__annotations__, stored.columns, counts))
    index = Index(
        stored.objects,
        tensors,
        stored.blobs,
        columns,
        flatten_mapping=stored.flatten_mapping,
        storage=stored.storage,
        literal_keys=stored.literal_keys,
    )
    _check_items(index)
    _check_digests(index)
    _refuse_bad(
        index, columns.pickled > 1, lambda row: f"the flag {columns.pickled[row]}, not 0 or 1"
    )
    for group in index.groups():
        _check_chunks(index, group)
    return index


def _refuse_newer(body: bytes) -> None:
    """Raise UnsupportedError if a body that cannot be read begins with a later format number."""
    try:
        fields = msgspec.msgpack.decode(body)
    except _UNREADABLE:
        return
    # In every format the first field is its number.
    if isinstance(fields, list) and fields and type(fields[0]) is int and fields[0] > FORMAT:
        raise UnsupportedError(
            f"the checkpoint has index format {fields[0]}, dcp_objstore here reads up to {FORMAT}",
            advice="upgrade dcp_objstore to load it",
        )


def _column(name: str, body: bytes, count: int) -> Column:
    """Return the `count` numbers of a column; their width is that which makes them fill `body`.

    Nothing larger than `body` is allocated, whatever the count.
    """
    width = 1 if not count else len(body) // count
    if width not in _WIDTHS or len(body) != count * width:
        raise CheckpointCorruptError(
            f"the index has {len(body)} bytes in column {name}, which do not hold {count} numbers"
        )
    return np.frombuffer(body, dtype=f"<u{width}")


def _check_object(entry: ObjectEntry) -> None:
    """Check the key, size and framing digest of a data object."""
    check_object_key(entry.key)
    if not 0 <= entry.size_bytes <= _MAX_SIZE:
        raise CheckpointCorruptError(
            f"the index gives an impossible size of {entry.size_bytes} bytes",
            object_key=entry.key,
        )
    if len(entry.framing_digest) != DIGEST_SIZE_BYTES:
        raise CheckpointCorruptError("framing digest of wrong length", object_key=entry.key)


def _check_tensor(tensor: Tensor) -> None:
    """Check that the extents of a tensor are possible, and that their product fits 63 bits."""
    shape, key = tensor.shape, tensor.key
    if len(shape) > _MAX_DIMENSIONS or any(length < 0 for length in (*shape, tensor.chunk_count)):
        raise CheckpointCorruptError(
            f"the index has impossible extents {shape[:8]}, or {tensor.chunk_count} chunks", key=key
        )
    # A length of 0 counts as 1, because `_check_chunks` multiplies the lengths one by one, and what
    # comes before the 0 must not overflow either.
    if math.prod(length or 1 for length in shape) > _MAX_SIZE:
        raise CheckpointCorruptError(f"the index has extents {shape[:8]} that overflow", key=key)


def _refuse_duplicates(keys: Sequence[str]) -> None:
    if len(set(keys)) != len(keys):
        twice, _ = Counter(keys).most_common(1)[0]
        raise CheckpointCorruptError("the index lists it twice", key=twice)


def _refuse_bad(
    index: Index, bad: _Mask, what: Callable[[int], str], rows: Numbers | None = None
) -> None:
    """Raise CheckpointCorruptError for the first bad row, if there is one.

    Args:
        bad: which rows are bad.
        what: describes a bad row, by its position in `bad`.
        rows: the row of each position in `bad`. Default: `bad` is about all rows, in their order.
    """
    if not bad.any():
        return
    position = int(bad.argmax())
    row = position if rows is None else int(rows[position])
    key = next(key for key in (*index.tensors, *index.blobs) if row in index.rows(key))
    raise CheckpointCorruptError(f"the index has {what(position)}", key=key)


# No sum or product in the checks below overflows: a number is compared with what is left of its
# bound before it is subtracted, and a volume is at most the product of a checked shape.


def _check_items(index: Index) -> None:
    """Check that every item lies inside its object, and that no two items overlap."""
    columns, count = index.columns, len(index.objects)
    _refuse_bad(
        index,
        columns.object_number >= count,
        lambda row: f"an item in object number {columns.object_number[row]} of {count}",
    )
    sizes = np.array([entry.size_bytes for entry in index.objects], dtype=np.uint64)
    size = sizes[columns.object_number]
    # What is left of the object behind the item. Nothing that is larger than this is subtracted, so
    # no difference is negative, which an unsigned number cannot be.
    remaining = size.copy()
    outside = np.zeros(len(remaining), dtype=bool)
    for column in (columns.offset, columns.lead, columns.payload_length, columns.trail):
        outside |= column > remaining
        remaining -= column.clip(max=remaining)
    _refuse_bad(
        index,
        outside,
        lambda row: (
            f"an item at byte {columns.offset[row]}, of {columns.lead[row]} +"
            f" {columns.payload_length[row]} + {columns.trail[row]} bytes, in an object of"
            f" {size[row]} bytes"
        ),
    )
    end = size - remaining
    # By object, then by offset, then by end, so that items overlap only if neighbours do. Each item
    # in `after` follows the one at its position in `before`.
    order = np.lexsort((end, columns.offset, columns.object_number))
    before, after = order[:-1], order[1:]
    same_object = columns.object_number[before] == columns.object_number[after]
    shared = same_object & (end[before] > columns.offset[after])
    _refuse_bad(
        index,
        shared,
        lambda at: f"another item in the bytes from {columns.offset[after[at]]}",
        after,
    )


def _check_digests(index: Index) -> None:
    """Check that there is one digest for each block of each item."""
    count, rest = divmod(len(index.columns.digests), DIGEST_SIZE_BYTES)
    needed = digest_counts(index.columns.payload_length)
    # No item may need more than there are in all. So the sum below cannot overflow.
    _refuse_bad(
        index,
        needed > count,
        lambda row: f"{count} digests for {index.columns.payload_length[row]} bytes of payload",
    )
    if rest or int(needed.sum()) != count:
        raise CheckpointCorruptError(
            f"the index has {len(index.columns.digests)} bytes of digests for {needed.sum()} blocks"
        )


def _check_chunks(index: Index, group: Group) -> None:
    """Check the chunks of tensors that have the same number of dimensions.

    If a chunk were missing, a part of the destination would silently keep its old values.
    """
    tensors = group.tensors
    owner, rows = group.owner, group.rows
    shapes = np.array([tensor.shape for tensor in tensors], dtype=np.uint64)
    inside = np.ones(len(rows), dtype=bool)
    volumes = np.ones(len(rows), dtype=np.uint64)
    same_tensor = owner[1:] == owner[:-1]
    # Each chunk but the first is compared with the one before it: `ascends` if a dimension tells
    # that its offset is larger, `tied` as long as all dimensions so far are equal.
    ascends, tied = np.zeros(len(same_tensor), dtype=bool), same_tensor.copy()
    # By dimension, because a matrix of 64-bit numbers may be 60 times as large as the index.
    for axis, (offset, size) in enumerate(zip(group.offsets.T, group.sizes.T, strict=True)):
        # By `clip` the difference is not negative, which an unsigned number cannot be.
        limit = shapes[owner, axis]
        inside &= (offset <= limit) & (size <= limit - offset.clip(max=limit))
        volumes *= size
        ascends |= tied & (offset[:-1] < offset[1:])
        tied &= offset[:-1] == offset[1:]

    def chunk(at: int) -> str:
        """Describe a chunk by its position in the group."""
        return f"a chunk at {group.offsets[at].tolist()} of sizes {group.sizes[at].tolist()}"

    _refuse_bad(index, ~inside, lambda at: f"{chunk(at)}, outside of its tensor", rows)
    # In each tensor the offsets ascend, so no two chunks have the same.
    unordered = same_tensor & ~ascends
    _refuse_bad(index, unordered, lambda at: f"{chunk(at + 1)}, twice or out of order", rows[1:])
    # The sum of volumes that a damaged index gives may need more than 64 bits, so their halves are
    # added up.
    high, low = (
        np.concatenate([np.zeros(1, dtype=np.uint64), np.cumsum(half)])
        for half in (volumes >> _HALF, volumes & _LOW_HALF)
    )
    for tensor, (first, last) in zip(tensors, group.bounds(), strict=True):
        elements = (int(high[last] - high[first]) << 32) + int(low[last] - low[first])
        if elements != math.prod(tensor.shape):
            raise CheckpointCorruptError(
                f"the index has chunks of {elements} elements for a tensor of shape {tensor.shape}",
                key=tensor.key,
            )
    # 0 for a dtype that this version does not know; such a payload is not checked.
    item_sizes = [ITEM_SIZE_BYTES.get(tensor.dtype, 0) for tensor in tensors]
    item_size = np.array(item_sizes, dtype=np.uint64)[owner]
    is_raw = (index.columns.pickled[rows] == 0) & (item_size != 0)
    # A raw payload of a known dtype has the size of its elements.
    elements_stored, rest = np.divmod(index.columns.payload_length[rows], item_size.clip(min=1))
    _refuse_bad(
        index,
        is_raw & ((elements_stored != volumes) | (rest != 0)),
        lambda at: (
            f"{index.columns.payload_length[rows[at]]} bytes of payload for {chunk(at)} with"
            f" elements of {item_size[at]} bytes"
        ),
        rows,
    )
