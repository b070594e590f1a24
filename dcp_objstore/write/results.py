"""The reports of ranks about a save, and the index that they become."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.ma
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from dcp_objstore.checkpoint import index as ix
from dcp_objstore.errors import RankFailedError, StateMismatchError, UnsupportedError
from dcp_objstore.state.stored import StoredItem, StoredObject, constant_name
from dcp_objstore.transfer.digests import DIGEST_SIZE_BYTES

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem

# Applied by `map`, these make no Python call per chunk: a large job has half a million.
_OFFSETS, _SIZES = attrgetter("offsets"), attrgetter("sizes")


class WriteResults(list[WriteResult]):
    """A rank's results, with a `StoredItem` in each.

    DCP pickles them for the coordinator. They arrive as `Results`.

    Attributes:
        planned: the items of the rank's plan, if the coordinator has their rows of the index.
    """

    planned: Sequence[WriteItem] | None = None

    def __reduce__(self) -> tuple[object, ...]:
        return self.columns().__reduce__()  # type: ignore[return-value]

    def columns(self) -> Results:
        """Return the results as columns, each object once."""
        objects: dict[str, StoredObject] = {}
        number_of: dict[str, int] = {}
        rows: list[tuple[int, ...]] = []
        for result in self:
            stored: StoredItem = result.storage_data
            key = stored.object.entry.key
            if key not in objects:
                objects[key], number_of[key] = stored.object, len(number_of)
            rows.append((number_of[key], *_STORED(stored)))
        positions: bytes | None = None
        places: list[tuple[str, tuple[int, ...] | None]] | None = None
        if self.planned is None:
            places = [(result.index.fqn, result.index.offset) for result in self]
        else:
            # By the `id` of its `index`, which a result shares with its item: a hash costs more.
            position_of = {id(item.index): number for number, item in enumerate(self.planned)}
            numbers_in_plan = [position_of[id(result.index)] for result in self]
            positions = np.array(numbers_in_plan, np.int64).tobytes()
        return Results(
            objects=list(objects.values()),
            numbers=np.array(rows, np.int64).tobytes(),
            digests=b"".join([result.storage_data.digests for result in self]),
            converted={
                number: result.storage_data.converted_to
                for number, result in enumerate(self)
                if result.storage_data.converted_to is not None
            },
            positions=positions,
            places=places,
        )


class Results(msgspec.Struct, frozen=True, array_like=True):
    """The items that a rank has stored, in columns.

    Attributes:
        objects: the objects that hold the items.
        numbers: a row of `_RESULT` for each item.
        digests: the digests of all blocks, item after item.
        converted: by their number, the dtypes of items that a planner converted.
        positions: the position of each item in the rank's plan, as int64; or
        places: its key and offset, if the coordinator does not have that plan.
    """

    objects: list[StoredObject]
    numbers: bytes
    digests: bytes
    converted: dict[int, str]
    positions: bytes | None
    places: list[tuple[str, tuple[int, ...] | None]] | None

    @classmethod
    def of(cls, results: Results | Sequence[WriteResult]) -> Results:
        """Return the results of a rank as columns.

        What DCP has sent to the coordinator became columns on the way. Without other ranks it sends
        nothing, and the results are still a list.
        """
        if isinstance(results, Results):
            return results
        return (results if isinstance(results, WriteResults) else WriteResults(results)).columns()

    def column(self, name: str) -> ix.Numbers:
        """Return a column of `numbers`."""
        numbers = np.frombuffer(self.numbers, np.int64).reshape(-1, len(_RESULT))
        return numbers[:, _RESULT.index(name)]


# The columns of `Results.numbers`: of all but the first, `StoredItem` has an attribute.
_RESULT = ("object_number", "offset", "length", "payload_offset", "payload_length", "pickled")
_STORED = attrgetter(*_RESULT[1:])


@dataclass(frozen=True, slots=True)
class PlannedIndex:
    """An index's description of the items of a save, without the places where they are stored.

    Attributes:
        tensors, blobs, chunk_offsets, chunk_sizes, flatten_mapping, literal_keys: the fields of
            `Index`.
        rows: the row of each item of a plan, for each rank; empty if only the planner knows.
    """

    tensors: dict[str, ix.Tensor]
    blobs: tuple[str, ...]
    chunk_offsets: ix.Column
    chunk_sizes: ix.Column
    rows: Sequence[ix.Numbers]
    flatten_mapping: dict[str, tuple[str | int, ...]] | None
    literal_keys: dict[str, tuple[int, ...]] = field(default_factory=dict)


def planned_index(metadata: Metadata) -> PlannedIndex:
    """Return what a planner that is not ours has put into DCP's Metadata.

    Raises:
        UnsupportedError: the planner left `planner_data` that a load could not restore.
        StateMismatchError: the ranks hold only a part of a tensor.
    """
    tensors: dict[str, ix.Tensor] = {}
    blobs: list[str] = []
    chunks: list[ChunkStorageMetadata] = []
    for fqn, described in metadata.state_dict_metadata.items():
        if isinstance(described, BytesStorageMetadata):
            blobs.append(fqn)
            continue
        boxes = sorted(described.chunks, key=_OFFSETS)
        saved_elements = sum(map(math.prod, map(_SIZES, boxes)))
        elements = math.prod(described.size)
        if saved_elements != elements:
            raise incomplete(fqn, saved_elements, elements)
        tensors[fqn] = tensor_entry(fqn, described, len(boxes))
        chunks += boxes
    flat = itertools.chain.from_iterable
    return PlannedIndex(
        tensors=tensors,
        blobs=tuple(blobs),
        chunk_offsets=np.fromiter(flat(map(_OFFSETS, chunks)), np.uint64),
        chunk_sizes=np.fromiter(flat(map(_SIZES, chunks)), np.uint64),
        rows=(),  # only that planner knows which rank has which row
        flatten_mapping=_flatten_mapping(metadata.planner_data),
    )


def build_index(
    planned: PlannedIndex, results: Sequence[Results], storage: StorageMeta
) -> tuple[ix.Index, list[StoredObject]]:
    """Build the index of a checkpoint whose data all ranks have uploaded.

    Returns:
        The index, and the objects of all ranks, in its order.

    Raises:
        UnsupportedError: a planner converted parts of one tensor to different dtypes.
        RankFailedError: no rank reported an item of the plan.
    """
    objects = [stored for of_rank in results for stored in of_rank.objects]
    # The number of each rank's first object among all objects.
    first_objects = np.cumsum([0, *(len(of_rank.objects) for of_rank in results)])[:-1]
    rows_of_ranks = _rows_of_results(planned, results)
    result_of_row = _results_by_row(planned, np.concatenate(rows_of_ranks))

    def column(name: str) -> ix.Numbers:
        """Return a column of the results of all ranks, rank after rank."""
        return np.concatenate([of_rank.column(name) for of_rank in results])

    object_numbers = [
        of_rank.column("object_number") + first
        for of_rank, first in zip(results, first_objects, strict=True)
    ]
    offset, length, payload_offset, payload_length, pickled = (
        column(name)[result_of_row] for name in _RESULT[1:]
    )
    converted = {
        int(rows[number]): dtype
        for rows, of_rank in zip(rows_of_ranks, results, strict=True)
        for number, dtype in of_rank.converted.items()
    }
    index = ix.Index(
        objects=tuple(stored.entry for stored in objects),
        tensors=_with_stored_dtypes(planned, converted),
        blobs=planned.blobs,
        columns=ix.Columns(
            object_number=np.concatenate(object_numbers)[result_of_row].astype(np.uint64),
            offset=offset.astype(np.uint64),
            lead=(payload_offset - offset).astype(np.uint64),
            payload_length=payload_length.astype(np.uint64),
            trail=(offset + length - payload_offset - payload_length).astype(np.uint64),
            pickled=pickled.astype(np.uint64),
            chunk_offsets=planned.chunk_offsets,
            chunk_sizes=planned.chunk_sizes,
            digests=_digests(results, column("payload_length"), result_of_row),
        ),
        flatten_mapping=planned.flatten_mapping,
        storage=ix.StorageInfo(
            checkpoint_id=None if storage.checkpoint_id is None else str(storage.checkpoint_id),
            save_id=storage.save_id,
            modules=tuple(storage.modules),
        ),
        literal_keys=planned.literal_keys,
    )
    return index, objects


def _rows_of_results(planned: PlannedIndex, results: Sequence[Results]) -> list[ix.Numbers]:
    """Return the index's row of each result, for each rank; -1 if the index has no such row."""
    # A writer around ours may return a plain list, which has no positions.
    has_places = any(of_rank.positions is None for of_rank in results)
    row_of_place = _rows_by_place(planned) if has_places else {}
    rows_of_ranks: list[ix.Numbers] = []
    for rank, of_rank in enumerate(results):
        if of_rank.positions is not None:
            rows = planned.rows[rank][np.frombuffer(of_rank.positions, np.int64)]
        else:
            assert of_rank.places is not None
            # A foreign planner may report a result that is not in the plan.
            rows = np.array([row_of_place.get(place, -1) for place in of_rank.places], np.int64)
        rows_of_ranks.append(rows)
    return rows_of_ranks


def _results_by_row(planned: PlannedIndex, row_of_result: ix.Numbers) -> ix.Numbers:
    """Return the number of its result for each row of the index.

    Raises:
        RankFailedError: a row has no result.
    """
    count = sum(tensor.chunk_count for tensor in planned.tensors.values()) + len(planned.blobs)
    # Results without a row have the row -1: one more at the end, which is dropped.
    result_of_row = np.full(count + 1, -1, np.int64)
    result_of_row[row_of_result] = np.arange(len(row_of_result))
    result_of_row = result_of_row[:count]
    if (result_of_row < 0).any():
        raise _unreported(planned, int(np.argmax(result_of_row < 0)))
    return result_of_row


def _rows_by_place(
    planned: PlannedIndex,
) -> dict[tuple[str, tuple[int, ...] | None], int]:
    """Return the row of each chunk by its key and offset, and of each value by its key."""
    rows: dict[tuple[str, tuple[int, ...] | None], int] = {}
    offsets, first, row = planned.chunk_offsets.tolist(), 0, 0
    for key, tensor in planned.tensors.items():
        ndim = len(tensor.shape)
        for _ in range(tensor.chunk_count):
            rows[key, tuple(offsets[first : first + ndim])] = row
            first, row = first + ndim, row + 1
    return rows | {(key, None): row + number for number, key in enumerate(planned.blobs)}


def _digests(
    results: Sequence[Results], payload_length: ix.Numbers, result_of_row: ix.Numbers
) -> ix.Column:
    """Return the digests of all blocks in the order of the index's rows.

    For example, result 0 has the blocks 0 and 1, and result 1 has the block 2. The index has result
    1 in its row 0, and result 0 in its row 1. Then:

        result_of_row  1 0
        counts         2 1    number of blocks of each result
        first          0 2    number of its first block, in the order of the results
        row_counts     1 2    number of blocks of each row
        row_first      0 1    number of its first block, in the order of the rows
        blocks         2 0 1  for each block in the order of the rows, its number in that of results
    """
    counts = ix.digest_counts(payload_length.astype(np.uint64))
    first = np.cumsum(counts) - counts
    row_counts = counts[result_of_row]
    row_first = np.cumsum(row_counts) - row_counts
    blocks = np.repeat(first[result_of_row] - row_first, row_counts) + np.arange(row_counts.sum())
    body = np.frombuffer(b"".join([of_rank.digests for of_rank in results]), np.uint8)
    digests: ix.Column = body.reshape(-1, DIGEST_SIZE_BYTES)[blocks].reshape(-1)
    return digests


def _with_stored_dtypes(
    planned: PlannedIndex, converted: Mapping[int, str]
) -> dict[str, ix.Tensor]:
    """Return the tensors with the dtypes that were stored, if a planner has converted rows."""
    if not converted:
        return planned.tensors
    tensors, first_row = {}, 0
    for key, tensor in planned.tensors.items():
        rows = range(first_row, first_row + tensor.chunk_count)
        first_row = rows.stop
        # A tensor without chunks keeps its dtype.
        dtypes = {converted.get(number, tensor.dtype) for number in rows} or {tensor.dtype}
        if len(dtypes) > 1:
            raise UnsupportedError(
                "the save planner gave parts of this tensor in different dtypes"
                f" ({', '.join(sorted(dtypes))})",
                advice="convert all of a tensor to one dtype",
                key=key,
            )
        tensors[key] = msgspec.structs.replace(tensor, dtype=dtypes.pop())
    return tensors


def _unreported(planned: PlannedIndex, row: int) -> RankFailedError:
    """Return the error for a row of the index that no rank has reported."""
    places = _rows_by_place(planned).items()
    key, offset = next(place for place, number in places if number == row)
    place = "" if offset is None else f" at offset {offset}"
    return RankFailedError(
        f"no rank reported having written this item{place}; the save is not committed", key=key
    )


def incomplete(key: str, saved_elements: int, elements: int) -> StateMismatchError:
    """Return the error for a tensor of which elements are missing."""
    return StateMismatchError(
        f"the ranks that save hold only {saved_elements} of this tensor's {elements} elements",
        advice="call save on all ranks that it is sharded over",
        key=key,
    )


def tensor_entry(
    key: str,
    described: TensorStorageMetadata | TensorWriteData,
    chunk_count: int,
    is_sharded: bool | None = None,
) -> ix.Tensor:
    """Return what an index says of a tensor.

    Args:
        described: DCP's description of the tensor.
        chunk_count: the number of its chunks.
        is_sharded: whether ranks have parts of it; None if that is not known.
    """
    properties = described.properties
    return ix.Tensor(
        key=key,
        shape=tuple(described.size),
        dtype=constant_name(properties.dtype),
        layout=constant_name(properties.layout),
        requires_grad=properties.requires_grad,
        memory_format=constant_name(properties.memory_format),
        pin_memory=properties.pin_memory,
        chunk_count=chunk_count,
        is_sharded=is_sharded,
    )


def _flatten_mapping(planner_data: object) -> dict[str, tuple[str | int, ...]] | None:
    """Return the planner's mapping of keys to places, or None if it has none.

    Raises:
        UnsupportedError: the planner has left something else.
    """
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
