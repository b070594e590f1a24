"""What DCP's planners get of an index: made of a chunk only when a planner looks at it."""

from __future__ import annotations

import pickle
import re

import pytest
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
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult

from dcp_objstore.checkpoint import index as ix
from dcp_objstore.errors import RankFailedError
from dcp_objstore.state import dcp_metadata
from dcp_objstore.state.dcp_metadata import (
    Results,
    WriteResults,
    build_index,
    describe,
    planned_index,
)
from dcp_objstore.state.stored import StoredItem, StoredObject
from tests.support import indexes

RANKS = 64


def cut(number: int, rows: int) -> indexes.Tensor:
    """A tensor of `rows` rows for each rank, all in one object."""
    chunks = []
    for rank in range(RANKS):
        place = (number * RANKS + rank) * 100
        item = indexes.Item(0, place, 100, place, rows * 12, b"d" * 16)
        chunks.append(indexes.Chunk((rank * rows, 0), (rows, 3), item))
    shape = RANKS * rows, 3
    return indexes.Tensor(
        shape, "float32", "strided", False, "contiguous_format", False, tuple(chunks)
    )


def index() -> ix.Index:
    """Two tensors that are cut alike, and one that is not."""
    tensors = {"a": cut(0, 2), "b": cut(1, 2), "c": cut(2, 3)}
    entry = ix.ObjectEntry("__0_0.a1.distcp", 1_000_000, None, b"d" * 16)
    return ix.decode(indexes.encode(indexes.Index((entry,), tensors)))


def saved(metadata: Metadata, key: str) -> TensorStorageMetadata:
    found = metadata.state_dict_metadata[key]
    assert isinstance(found, TensorStorageMetadata)
    return found


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[ChunkStorageMetadata]:
    """Every chunk that is made from now on."""
    found: list[ChunkStorageMetadata] = []

    def counted(*args: torch.Size) -> ChunkStorageMetadata:
        found.append(ChunkStorageMetadata(*args))
        return found[-1]

    monkeypatch.setattr(dcp_metadata, "ChunkStorageMetadata", counted)
    return found


def test_chunks_are_made_of_the_tensors_that_a_planner_looks_at(
    made: list[ChunkStorageMetadata],
) -> None:
    metadata = describe(index())
    for key in "abc":
        assert len(saved(metadata, key).chunks) == RANKS
    assert not made
    wanted = ChunkStorageMetadata(torch.Size([10, 0]), torch.Size([2, 3]))
    (item,) = create_read_items_for_chunk_list("a", saved(metadata, "a"), [wanted])
    assert item.storage_index.offset == (10, 0)
    assert len(made) == RANKS


def test_tensors_that_are_cut_alike_share_their_chunks(made: list[ChunkStorageMetadata]) -> None:
    metadata = describe(index())
    assert all(saved(metadata, "a").chunks[n] is saved(metadata, "b").chunks[n] for n in range(3))
    assert len(made) == RANKS
    assert saved(metadata, "c").chunks[1].sizes == (3, 3)
    assert len(made) == 2 * RANKS


def test_the_results_of_a_rank_travel_without_a_pickled_object_for_each() -> None:
    objects = [
        StoredObject(ix.ObjectEntry(key, 9, '"e"', b"d" * 16), 2, "memory://x") for key in "pq"
    ]
    places: list[tuple[MetadataIndex, str | None]] = [
        (MetadataIndex("w", [2, 0], 1), "float32"),
        (MetadataIndex("w", [4, 0], 2), "float32"),
        (MetadataIndex("n", [], 0), "int64"),
        (MetadataIndex("step"), None),
    ]
    sent = WriteResults(
        WriteResult(
            place, 7, StoredItem(objects[n % 2], n, 2**40, n + 1, 6, b"d" * 32, n == 1, dtype)
        )
        for n, (place, dtype) in enumerate(places)
    )
    body = pickle.dumps(sent)
    assert b"MetadataIndex" not in body
    received = pickle.loads(body)
    assert isinstance(received, Results)
    assert received.objects == objects
    assert received.places == [(place.fqn, place.offset) for place, _ in places]
    assert received.column("object_number").tolist() == [0, 1, 0, 1]
    assert received.column("offset").tolist() == [0, 1, 2, 3]
    assert received.column("pickled").tolist() == [0, 1, 0, 0]
    assert [received.dtypes[n] for n in received.column("dtype_number")] == [
        dtype for _, dtype in places
    ]
    assert received.digests == b"d" * 32 * 4
    assert pickle.loads(pickle.dumps(WriteResults())).objects == []


def test_chunks_are_taken_for_a_list() -> None:
    chunks = saved(describe(index()), "c").chunks
    listed = list(chunks)
    assert chunks == listed
    assert listed == chunks
    assert chunks != listed[1:]
    assert chunks != len(listed)
    assert (
        chunks[-1] == listed[-1] == ChunkStorageMetadata(torch.Size([189, 0]), torch.Size([3, 3]))
    )
    assert list(chunks[2:4]) == listed[2:4]
    assert type(chunks[0].offsets) is torch.Size
    with pytest.raises(IndexError):
        chunks[RANKS]


def test_a_pickled_metadata_carries_the_index_once_and_no_chunk() -> None:
    stored = index()
    metadata = describe(stored)
    before = len(pickle.dumps(metadata))
    assert sum(len(saved(metadata, key).chunks[:]) for key in "abc") == 3 * RANKS
    assert len(pickle.dumps(metadata)) == before < 2 * len(ix.encode(stored))
    received = pickle.loads(pickle.dumps(metadata))
    assert received == metadata
    assert saved(received, "a").chunks[0] is saved(received, "b").chunks[0]


@pytest.mark.parametrize(
    ("missing", "place"),
    [("a", "at offset (0, 2)"), ("b", "at offset (4,)"), ("n", "this item;"), ("m", "this item;")],
)
def test_an_item_that_no_rank_reported_is_named(missing: str, place: str) -> None:
    """With the place of the chunk that is missing, the last one of the tensor."""
    properties = TensorProperties(torch.float32)
    chunks = {
        "a": [ChunkStorageMetadata(torch.Size([0, at]), torch.Size([2, 2])) for at in (0, 2)],
        "b": [ChunkStorageMetadata(torch.Size([at]), torch.Size([4])) for at in (0, 4)],
    }
    shapes = {"a": torch.Size([2, 4]), "b": torch.Size([8])}
    planned = planned_index(
        Metadata(
            {
                **{
                    key: TensorStorageMetadata(properties, shapes[key], boxes)
                    for key, boxes in chunks.items()
                },
                "n": BytesStorageMetadata(),
                "m": BytesStorageMetadata(),
            }
        )
    )
    stored = StoredObject(ix.ObjectEntry("__0_0.a0.distcp", 100, None, b"d" * 16), 1, "memory://x")
    item = StoredItem(stored, 0, 100, 64, 16, b"d" * 16, False, "float32")
    written = {
        key: [MetadataIndex(key, box.offsets) for box in boxes] for key, boxes in chunks.items()
    }
    written |= {key: [MetadataIndex(key)] for key in ("n", "m")}
    written[missing].pop()
    results = WriteResults(
        WriteResult(index, 100, item) for places in written.values() for index in places
    )
    with pytest.raises(RankFailedError, match=re.escape(place)) as caught:
        build_index(planned, [results.columns()], StorageMeta())
    assert caught.value.key == missing


def test_the_chunks_of_a_tensor_stand_in_the_order_of_their_offsets() -> None:
    """Whatever rank has which: so equal states have equal indexes, and neighbours are found."""
    halves = [ChunkStorageMetadata(torch.Size([at]), torch.Size([4])) for at in (4, 0)]
    properties = TensorProperties(torch.float32)
    tensor = TensorStorageMetadata(properties, torch.Size([8]), halves)
    results = []
    for rank, half in enumerate(halves):
        entry = ix.ObjectEntry(f"__{rank}_0.a{rank}.distcp", 100, None, b"d" * 16)
        stored = StoredObject(entry, 1, "memory://x")
        digest = bytes([rank]) * 16
        item = StoredItem(stored, 0, 100, 64, 16, digest, False, "float32")
        results.append([WriteResult(MetadataIndex("w", half.offsets, rank), 100, item)])
    sent = [WriteResults(of_rank).columns() for of_rank in results]
    planned = planned_index(Metadata({"w": tensor}))
    built, _ = build_index(planned, sent, StorageMeta())
    assert built.boxes("w")[0].tolist() == [[0], [4]]
    assert [built.item(row).digests for row in built.rows("w")] == [b"\1" * 16, b"\0" * 16]
    assert [built.item(row).object_number for row in built.rows("w")] == [1, 0]
