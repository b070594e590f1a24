"""The plan of a save of all ranks, made in columns: who writes which chunk, and the index's rows.

DCP's default planner does the same with an object for each chunk of each rank, which it pickles to
the coordinator, copies twice, checks one by one and pickles back: 80 µs a chunk. A rank's items are
sent here as one msgpack object and two arrays. Their description is the same on most ranks, so it
is decoded once; their places differ, and are compared as arrays.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from dcp_objstore.checkpoint import index as ix
from dcp_objstore.errors import StateMismatchError, UnsupportedError
from dcp_objstore.write.results import PlannedIndex, incomplete, tensor_entry

# Up to this size it does not matter for the balance which rank saves a tensor.
_TINY_BYTES = 4096

_Boxes: TypeAlias = np.ndarray[tuple[int, int], np.dtype[np.int64]]
_Mask: TypeAlias = np.ndarray[tuple[int], np.dtype[np.bool_]]
Paths: TypeAlias = Mapping[str, tuple[str | int, ...]]


class _Items(msgspec.Struct, frozen=True, array_like=True):
    """The description of a rank's items: key, type and kind of each (None: a pickled value).

    A kind is what a tensor is, apart from its key and its chunks.
    """

    keys: list[str]
    types: bytes
    kind_numbers: list[int | None]
    kinds: list[ix.Tensor]
    paths: dict[str, tuple[str | int, ...]]
    literal_keys: dict[str, tuple[int, ...]]


class LocalPlan(msgspec.Struct, frozen=True):
    """The items that a rank wants to save. Equal plans describe the same items in the same order.

    Attributes:
        items: an encoded `_Items`.
        offsets, sizes: the box of each chunk, chunk after chunk, as an array of int64.
    """

    items: bytes
    offsets: bytes
    sizes: bytes

    @classmethod
    def of(cls, items: Sequence[WriteItem], paths: Paths) -> LocalPlan:
        """Describe a rank's items.

        Args:
            paths: the place of each key in the nested state, as DCP gives it.

        Raises:
            UnsupportedError: a chunk has another number of dimensions than its tensor.
        """
        kind_numbers: list[int | None] = []
        kinds: dict[ix.Tensor, int] = {}
        offsets: list[int] = []
        sizes: list[int] = []
        for item in items:
            data = item.tensor_data
            if data is None:
                kind_numbers.append(None)
                continue
            chunk = data.chunk
            if not len(data.size) == len(chunk.offsets) == len(chunk.sizes):
                raise UnsupportedError(
                    f"the planner cuts a tensor of shape {tuple(data.size)} at"
                    f" {tuple(chunk.offsets)} into {tuple(chunk.sizes)}, which have other"
                    " dimensions",
                    key=item.index.fqn,
                )
            offsets += chunk.offsets
            sizes += chunk.sizes
            # Without key and number of chunks, so that tensors that are alike have one kind.
            kind = tensor_entry("", data, 0, item.type is WriteItemType.SHARD)
            kind_numbers.append(kinds.setdefault(kind, len(kinds)))
        # A `LiteralKey` is sent as a plain str, and beside it where in the path it stands.
        literal_keys = {
            key: tuple(depth for depth, step in enumerate(path) if type(step) is ix.LiteralKey)
            for key, path in paths.items()
            if ix.LiteralKey in map(type, path)
        }
        described = _Items(
            keys=[item.index.fqn for item in items],
            types=bytes(item.type.value for item in items),
            kind_numbers=kind_numbers,
            kinds=list(kinds),
            paths={**paths, **{key: tuple(map(ix.plain, paths[key])) for key in literal_keys}},
            literal_keys=literal_keys,
        )
        return cls(
            msgspec.msgpack.encode(described),
            np.array(offsets, np.int64).tobytes(),
            np.array(sizes, np.int64).tobytes(),
        )


class GlobalPlan(NamedTuple):
    """The plan of all ranks.

    Attributes:
        planned: what the checkpoint's index says of the items, but not where they are stored.
        own: for each rank, the positions of those of its items that it writes.
    """

    planned: PlannedIndex
    own: list[ix.Numbers]


def plan_globally(plans: Sequence[LocalPlan]) -> GlobalPlan:
    """Leave each chunk to one rank, and check that the chunks make up their tensors.

    Of the ranks that have an item, the one with the fewest bytes until then writes it, as in DCP.
    But values and tiny tensors that are not sharded, such as the step count that an optimizer has
    for each parameter, are written by the first rank that has them. DCP would spread them over the
    ranks. Every rank that loads reads all of them, and would send a request for each parameter.

    Raises:
        StateMismatchError: ranks have different values under one key, hold only a part of a tensor,
            or have parts of it that overlap.
    """
    state = _State()
    table = state.add(plans)
    rows = _deduplicated(state, table)
    _check_boxes(state, rows)
    chunk_counts = np.bincount(rows.tensor)
    is_tensor = table.ndim >= 0
    # For each item of each rank its row in the index; -1 if another rank writes the chunk.
    row_of_item = np.full(len(table.tensor), -1)
    # The items in the order of the index's rows: pickled values come after the tensors.
    order = rows.item[np.argsort(~is_tensor[rows.item], kind="stable")]
    row_of_item[order] = np.arange(len(order))
    bounds = np.cumsum([0, *table.counts]).tolist()
    of_ranks = [row_of_item[first:end] for first, end in itertools.pairwise(bounds)]
    used = table.used[order]
    planned = PlannedIndex(
        tensors={
            key: msgspec.structs.replace(kind, key=key, chunk_count=int(count))
            for key, kind, count in zip(state.keys, state.kinds, chunk_counts, strict=True)
            if kind is not None
        },
        blobs=tuple(key for key, kind in zip(state.keys, state.kinds, strict=True) if kind is None),
        chunk_offsets=table.offsets[order][used].astype(np.uint64),
        chunk_sizes=table.sizes[order][used].astype(np.uint64),
        rows=[of_rank[of_rank >= 0] for of_rank in of_ranks],
        flatten_mapping=state.paths,
        literal_keys=state.literal_keys,
    )
    return GlobalPlan(planned, [np.flatnonzero(of_rank >= 0) for of_rank in of_ranks])


@dataclass(slots=True)
class _Table:
    """The items of all ranks, rank after rank: one entry of each column for each item.

    Attributes:
        counts: the number of items of each rank.
        rank: the rank of each item.
        tensor: the number of its key.
        ndim: the number of its dimensions; -1 for a pickled value.
        is_shard: whether DCP calls it a shard; otherwise all ranks that have the key have all of
            it.
        offsets, sizes: its box, padded with zeros on the right.
        used: for each of these numbers, whether it is not padding.
        size_bytes: the size of its payload; 0 for a pickled value, whose size is not known yet.
    """

    counts: list[int]
    rank: ix.Numbers
    tensor: ix.Numbers
    ndim: ix.Numbers
    is_shard: _Mask
    offsets: _Boxes
    sizes: _Boxes
    used: np.ndarray[tuple[int, int], np.dtype[np.bool_]]
    size_bytes: ix.Numbers

    @property
    def elements(self) -> ix.Numbers:
        """The number of elements of each chunk."""
        elements: ix.Numbers = np.where(self.used, self.sizes, 1).prod(axis=1)
        return elements


class _Decoded(NamedTuple):
    """The description of a rank's items as columns of a `_Table`, and their element sizes."""

    tensor: ix.Numbers
    ndim: ix.Numbers
    is_shard: _Mask
    item_size_bytes: ix.Numbers


class _State:
    """The keys of all ranks, in the order in which they come up, rank after rank."""

    def __init__(self) -> None:
        self.keys: list[str] = []
        self.kinds: list[ix.Tensor | None] = []  # None: a pickled value
        self.first_ranks: list[int] = []  # of each key, the first rank that has it
        self.paths: dict[str, tuple[str | int, ...]] = {}
        self.literal_keys: dict[str, tuple[int, ...]] = {}
        self._numbers: dict[str, int] = {}

    def add(self, plans: Sequence[LocalPlan]) -> _Table:
        """Decode the plans of the ranks, in their order."""
        # By the encoded description, which is the same for most ranks and is decoded once.
        decoded: dict[bytes, _Decoded] = {}
        for rank, plan in enumerate(plans):
            if plan.items not in decoded:
                decoded[plan.items] = self._decode(plan.items, rank)
        of_ranks = [decoded[plan.items] for plan in plans]
        counts = [len(rank.tensor) for rank in of_ranks]
        ndim = np.concatenate([rank.ndim for rank in of_ranks])
        # For each item and dimension, whether the item has that dimension (a value has none).
        used = np.arange(ndim.max(initial=0)) < ndim[:, None]
        offsets: _Boxes = np.zeros(used.shape, np.int64)
        sizes: _Boxes = np.zeros(used.shape, np.int64)
        offsets[used] = np.frombuffer(b"".join(plan.offsets for plan in plans), np.int64)
        sizes[used] = np.frombuffer(b"".join(plan.sizes for plan in plans), np.int64)
        table = _Table(
            counts=counts,
            rank=np.repeat(np.arange(len(plans)), counts),
            tensor=np.concatenate([rank.tensor for rank in of_ranks]),
            ndim=ndim,
            is_shard=np.concatenate([rank.is_shard for rank in of_ranks]),
            offsets=offsets,
            sizes=sizes,
            used=used,
            size_bytes=np.concatenate([rank.item_size_bytes for rank in of_ranks]),
        )
        table.size_bytes *= table.elements  # until now the size of one element
        return table

    def _decode(self, body: bytes, rank: int) -> _Decoded:
        """Decode what a rank's items are; give each key a number that is the same for all ranks.

        Args:
            body: the encoded `_Items`.
            rank: the first rank that has sent this description.
        """
        items = msgspec.msgpack.decode(body, type=_Items)
        for key, path in items.paths.items():
            self.paths.setdefault(key, path)
        self.literal_keys.update(items.literal_keys)
        kinds = [None if number is None else items.kinds[number] for number in items.kind_numbers]
        numbers = [
            self._number(key, kind, rank) for key, kind in zip(items.keys, kinds, strict=True)
        ]
        sizes = [0 if kind is None else ix.ITEM_SIZE_BYTES[kind.dtype] for kind in kinds]
        return _Decoded(
            np.array(numbers, int),
            np.array([-1 if kind is None else len(kind.shape) for kind in kinds], int),
            np.frombuffer(items.types, np.uint8) == WriteItemType.SHARD.value,
            np.array(sizes, int),
        )

    def _number(self, key: str, kind: ix.Tensor | None, rank: int) -> int:
        """Return the number of a key; raise if another rank has something else under it."""
        number = self._numbers.setdefault(key, len(self.keys))
        if number == len(self.keys):  # the key is new
            self.keys.append(key)
            self.kinds.append(kind)
            self.first_ranks.append(rank)
            return number
        first_kind = self.kinds[number]
        if _described(kind) != _described(first_kind):
            raise StateMismatchError(
                f"rank {self.first_ranks[number]} has {_described(first_kind)}, rank {rank}"
                f" {_described(kind)}",
                advice="save what differs under other keys, or in a PerRank",
                key=key,
            )
        return number


def _described(kind: ix.Tensor | None) -> str:
    """Return what must be the same on all ranks that have a key, in words."""
    if kind is None:
        return "a value that is no tensor"
    return f"a {kind.dtype} tensor of shape {kind.shape}"


class _Rows(NamedTuple):
    """The items that are written, sorted by tensor and offset.

    Attributes:
        item: the position of each in the table.
        tensor: the number of its key.
    """

    item: ix.Numbers
    tensor: ix.Numbers
    table: _Table


def _deduplicated(state: _State, table: _Table) -> _Rows:
    """Choose the rank that writes each chunk.

    Items are the same chunk if they have the same tensor and offset. Their sizes must be the same,
    too, unless one of them is empty.
    """
    # By tensor and offset. At one place, items with elements come first, in the order of ranks.
    is_empty = table.elements == 0
    order = np.lexsort((table.rank, is_empty, *table.offsets.T[::-1], table.tensor))
    tensor, offsets, sizes = table.tensor[order], table.offsets[order], table.sizes[order]
    is_repeated = np.zeros(len(order), bool)  # whether it is the same chunk as the item before
    is_repeated[1:] = (tensor[1:] == tensor[:-1]) & (offsets[1:] == offsets[:-1]).all(axis=1)
    # Whether an item with elements repeats the one before, but has another size.
    differs = is_repeated & ~is_empty[order]
    differs[1:] &= (sizes[1:] != sizes[:-1]).any(axis=1)
    if differs.any():
        position = int(np.argmax(differs))
        item, other = order[position - 1], order[position]
        raise StateMismatchError(
            f"rank {table.rank[item]} has {_box(table, item)} of this tensor, and rank"
            f" {table.rank[other]} {_box(table, other)}",
            advice="each rank must know the same sharding",
            key=state.keys[tensor[position]],
        )
    firsts = np.flatnonzero(~is_repeated)
    # For each chunk the item that is written; until they are shared out, that of the first rank.
    chosen = order[firsts]
    counts = np.diff(firsts, append=len(order))  # how many ranks have each chunk
    # Large items that several ranks have go to the one with the fewest bytes until then.
    is_shared = (counts > 1) & (table.is_shard[chosen] | (table.size_bytes[chosen] > _TINY_BYTES))
    unshared = chosen[~is_shared]
    loads = np.zeros(len(table.counts), np.int64)  # the bytes of each rank
    np.add.at(loads, table.rank[unshared], table.size_bytes[unshared])
    shared = np.flatnonzero(is_shared)
    # The largest chunk comes first.
    for chunk in shared[np.argsort(-table.size_bytes[chosen[shared]])].tolist():
        candidates = order[firsts[chunk] : firsts[chunk] + counts[chunk]]
        # An empty item at the same offset cannot stand for one with elements.
        if not is_empty[candidates[0]]:
            candidates = candidates[~is_empty[candidates]]
        least_loaded = candidates[np.argmin(loads[table.rank[candidates]])]
        loads[table.rank[least_loaded]] += table.size_bytes[least_loaded]
        chosen[chunk] = least_loaded
    return _Rows(chosen, tensor[firsts], table)


def _box(table: _Table, item: int) -> str:
    """Return the sizes and offsets of an item, in words."""
    used = table.used[item]
    offsets, sizes = table.offsets[item][used].tolist(), table.sizes[item][used].tolist()
    return f"{sizes} at {offsets}"


def _check_boxes(state: _State, rows: _Rows) -> None:
    """Check that the chunks of each tensor lie inside it, do not overlap and fill it."""
    table = rows.table
    shapes = np.zeros((len(state.keys), table.used.shape[1]), np.int64)
    for number, kind in enumerate(state.kinds):
        if kind is not None:
            shapes[number, : len(kind.shape)] = kind.shape
    offsets, sizes = table.offsets[rows.item], table.sizes[rows.item]
    outside = (offsets < 0) | (sizes < 0) | (offsets + sizes > shapes[rows.tensor])
    if outside.any():
        position = int(np.argmax(outside.any(axis=1)))
        item, number = rows.item[position], rows.tensor[position]
        raise StateMismatchError(
            f"rank {table.rank[item]} has {_box(table, item)}, which is outside of"
            f" {_described(state.kinds[number])}",
            key=state.keys[number],
        )
    elements = table.elements[rows.item]
    saved_elements = np.zeros(len(state.keys), np.int64)
    np.add.at(saved_elements, rows.tensor, elements)
    # A tensor with too many elements has chunks that overlap, which the loop below finds.
    for number, (key, kind) in enumerate(zip(state.keys, state.kinds, strict=True)):
        if kind is not None and saved_elements[number] < math.prod(kind.shape):
            raise incomplete(key, int(saved_elements[number]), math.prod(kind.shape))
    for number in _may_overlap(rows.tensor, offsets, sizes):
        boxes = np.flatnonzero((rows.tensor == number) & (elements > 0))
        low, high = offsets[boxes], offsets[boxes] + sizes[boxes]
        items = rows.item[boxes]
        for at, item in enumerate(items):  # each box is compared with all boxes after it
            # Boxes overlap if they do so in every dimension that the tensor has (`used`).
            overlaps = (low[at] < high[at + 1 :]) & (low[at + 1 :] < high[at])
            overlapping = np.flatnonzero(overlaps[:, table.used[item]].all(axis=1))
            if len(overlapping):
                other = items[at + 1 + overlapping[0]]
                raise StateMismatchError(
                    f"rank {table.rank[item]} has {_box(table, item)} of this tensor, and rank"
                    f" {table.rank[other]} {_box(table, other)}, which overlap",
                    key=state.keys[number],
                )


def _may_overlap(tensor: ix.Numbers, offsets: _Boxes, sizes: _Boxes) -> set[int]:
    """Return the numbers of the tensors whose boxes may overlap: they are not cut along a grid.

    Along each dimension of a grid, intervals that begin at different places do not overlap. No two
    boxes of a tensor have the same offset, so in some dimension they begin at different places, and
    boxes of a grid do not overlap.
    """
    suspects: set[int] = set()
    for starts, lengths in zip(offsets.T, sizes.T, strict=True):
        order = np.lexsort((lengths, starts, tensor))
        owner, start, length = tensor[order], starts[order], lengths[order]
        # Of the intervals that begin at one place, the longest comes last. It is compared with the
        # next one, which begins later.
        begins_later = (owner[1:] == owner[:-1]) & (start[1:] > start[:-1])
        reaches_next = start[1:] < start[:-1] + length[:-1]
        suspects |= {*owner[1:][begins_later & reaches_next].tolist()}
    return suspects
