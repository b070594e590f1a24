"""What ranks report, and the index that becomes of it."""

from __future__ import annotations

import dataclasses
import pickle
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
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
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from dcp_objstore.checkpoint import index as ix
from dcp_objstore.errors import RankFailedError, StateMismatchError, UnsupportedError
from dcp_objstore.state.dcp_metadata import describe
from dcp_objstore.state.stored import DCP_VERSION, StoredItem, StoredObject
from dcp_objstore.transfer.digests import BLOCK_SIZE_BYTES
from dcp_objstore.write.results import (
    PlannedIndex,
    Results,
    WriteResults,
    build_index,
    planned_index,
)


def test_the_results_of_a_rank_travel_without_a_pickled_object_for_each():
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
    assert received.column("length").tolist() == [2**40] * 4
    assert received.column("payload_offset").tolist() == [1, 2, 3, 4]
    assert received.column("payload_length").tolist() == [6] * 4
    assert received.column("pickled").tolist() == [0, 1, 0, 0]
    assert received.converted == {0: "float32", 1: "float32", 2: "int64"}
    assert received.digests == b"d" * 32 * 4
    assert pickle.loads(pickle.dumps(WriteResults())).objects == []


def tensor(*boxes: tuple[Sequence[int], Sequence[int]], size: Sequence[int]) -> Any:
    chunks = [ChunkStorageMetadata(torch.Size(at), torch.Size(sizes)) for at, sizes in boxes]
    properties = TensorProperties(torch.float32, requires_grad=True, pin_memory=True)
    return TensorStorageMetadata(properties, torch.Size(size), chunks)


@pytest.mark.parametrize(
    ("missing", "place"),
    [("a", "at offset (0, 2)"), ("b", "at offset (4,)"), ("n", "this item;"), ("m", "this item;")],
)
def test_an_item_that_no_rank_reported_is_named(missing, place):
    """With the place of the chunk that is missing, the last one of the tensor."""
    boxes: dict[str, Any] = {
        "a": [((0, at), (2, 2)) for at in (0, 2)],
        "b": [((at,), (4,)) for at in (0, 4)],
    }
    described = {"a": tensor(*boxes["a"], size=(2, 4)), "b": tensor(*boxes["b"], size=(8,))}
    described |= {key: BytesStorageMetadata() for key in "nm"}
    places = {key: [MetadataIndex(key, at) for at, _ in of_key] for key, of_key in boxes.items()}
    places |= {key: [MetadataIndex(key)] for key in "nm"}
    places[missing].pop()
    entry = ix.ObjectEntry("__0_0.a0.distcp", 100, None, b"d" * 16)
    stored = StoredObject(entry, 1, "memory://x")
    item = StoredItem(stored, 0, 100, 64, 16, b"d" * 16, False, "float32")
    results = WriteResults(
        WriteResult(index, 100, item) for of_key in places.values() for index in of_key
    )
    planned = planned_index(Metadata(described))
    with pytest.raises(RankFailedError, match=re.escape(place)) as caught:
        build_index(planned, [results.columns()], StorageMeta())
    assert caught.value.key == missing


BLOCKS = 2 * BLOCK_SIZE_BYTES + 1


def two_ranks() -> PlannedIndex:
    """Two tensors and two values, as a planner describes them."""
    metadata = Metadata(
        {
            "v": BytesStorageMetadata(),
            "t": tensor(((2, 0), (2, 3)), ((0, 0), (2, 3)), size=(4, 3)),
            "w": BytesStorageMetadata(),
            "s": tensor(((), ()), size=()),
        },
        planner_data={"v": ("v", 0), "t": ("t",)},
    )
    return planned_index(metadata)


def written(rank: int, *, by_position: bool, foreign: bool = False) -> Results:
    """What each rank wrote: in other orders than the index has, in two objects or in one."""

    def stored(name: str, *numbers: int, digests: str, **values: Any) -> StoredItem:
        entry = ix.ObjectEntry(f"__{rank}_{name}.distcp", 2**40, None, name.encode() * 16)
        body = b"".join(digest.encode() * 16 for digest in digests)
        settings = {"pickled": False, "converted_to": "float32", **values}
        return StoredItem(StoredObject(entry, 1, "memory://x"), *numbers, body, **settings)

    value = {"converted_to": None}
    of_rank = [
        [
            (MetadataIndex("w"), stored("a", 9, 9, 9, 9, digests="w", **value)),
            (MetadataIndex("t", [2, 0]), stored("b", 10, 200, 64, 24, digests="t")),
        ],
        [
            (MetadataIndex("s", []), stored("c", 0, 90, 64, 4, digests="s", pickled=True)),
            (MetadataIndex("t", [0, 0]), stored("c", 100, 100, 164, 24, digests="u")),
            (MetadataIndex("v"), stored("c", 300, BLOCKS, 300, BLOCKS, digests="xyz", **value)),
        ],
    ][rank]
    if foreign:
        of_rank.append((MetadataIndex("else"), of_rank[0][1]))
    results = WriteResults(WriteResult(at, 1, item) for at, item in of_rank)
    if by_position:
        # The plan is in another order than the results.
        indices = [result.index for result in results][::-1]
        results.planned = [WriteItem(at, WriteItemType.TENSOR) for at in indices]
    return results.columns()


@pytest.mark.parametrize(
    "how", ["by position", "by place", "by both", "with items of nobody's plan"]
)
def test_the_index_says_of_each_item_where_its_rank_has_put_it(how):
    planned = two_ranks()
    by_position = {"by position": (True, True), "by both": (False, True)}.get(how, (False, False))
    if any(by_position):
        # The plans: t[2:], w; v, t[:2], s. The rows: t[:2], t[2:], s, v, w.
        planned = dataclasses.replace(planned, rows=[np.array([1, 4]), np.array([3, 0, 2])])
    results = [
        written(rank, by_position=by_position[rank], foreign=how.startswith("with"))
        for rank in (0, 1)
    ]
    storage = StorageMeta(checkpoint_id="s3://b/c", save_id="n", modules=["m"])
    index, objects = build_index(planned, results, storage)
    assert [stored.entry.key for stored in objects] == [
        "__0_a.distcp",
        "__0_b.distcp",
        "__1_c.distcp",
    ]
    assert index.objects == tuple(stored.entry for stored in objects)
    assert [index.item(row) for row in range(5)] == [
        (2, 100, 100, 164, 24, False, b"u" * 16),
        (1, 10, 200, 64, 24, False, b"t" * 16),
        (2, 0, 90, 64, 4, True, b"s" * 16),
        (2, 300, BLOCKS, 300, BLOCKS, False, b"x" * 16 + b"y" * 16 + b"z" * 16),
        (0, 9, 9, 9, 9, False, b"w" * 16),
    ]
    assert index.blobs == ("v", "w")
    assert [box.tolist() for box in index.boxes("t")] == [[[0, 0], [2, 0]], [[2, 3], [2, 3]]]
    assert index.tensors["t"] == ix.Tensor(
        *("t", (4, 3), "float32", "strided", True, "contiguous_format", True, 2)
    )
    assert index.flatten_mapping == {"v": ("v", 0), "t": ("t",)}
    assert index.storage == ix.StorageInfo("s3://b/c", "n", ("m",))
    assert ix.decode(ix.encode(index)).tensors == index.tensors


def test_a_checkpoint_without_a_tensor_or_without_anything_has_an_index():
    nothing, _ = build_index(planned_index(Metadata({})), [WriteResults().columns()], StorageMeta())
    assert (nothing.keys, nothing.storage.checkpoint_id) == (set(), None)
    planned = planned_index(Metadata({"w": BytesStorageMetadata()}))
    index, _ = build_index(planned, [written(0, by_position=False)], StorageMeta())
    assert index.item(0).digests == b"w" * 16


def converted(*dtypes: str) -> tuple[ix.Index, list[StoredObject]]:
    """The halves of a tensor of float32 that a planner converted, between others that it left."""
    halves = [([0], [2]), ([2], [2])]
    planned = planned_index(
        Metadata(
            {
                "a": tensor(*halves, size=[4]),
                "b": tensor(*halves, size=[4]),
                "c": tensor(*halves, size=[4]),
                "none": tensor(size=[0]),
            }
        )
    )
    entry = ix.ObjectEntry("__0_a.distcp", 2**40, None, b"d" * 16)
    results = WriteResults()
    for number, key in enumerate("cba"):
        for half, dtype in enumerate(dtypes if key == "b" else ["float32", "float32"]):
            size = 2 * ix.ITEM_SIZE_BYTES[dtype]
            at = 100 * number + 50 * half
            place = (at, size, at, size, b"d" * 16, False, dtype)
            item = StoredItem(StoredObject(entry, 1, "memory://x"), *place)
            results.append(WriteResult(MetadataIndex(key, [2 * half]), 1, item))
    return build_index(planned, [results.columns()], StorageMeta())


def test_a_tensor_has_the_dtype_that_the_planner_gave_it():
    index, _ = converted("bfloat16", "bfloat16")
    dtypes = {key: tensor.dtype for key, tensor in index.tensors.items()}
    assert dtypes == {"a": "float32", "b": "bfloat16", "c": "float32", "none": "float32"}
    for dtypes_of_parts in (("float32", "bfloat16"), ("bfloat16", "float64")):
        with pytest.raises(UnsupportedError, match=", ".join(sorted(dtypes_of_parts))) as caught:
            converted(*dtypes_of_parts)
        assert caught.value.key == "b"


@pytest.mark.parametrize("boxes", [[((0,), (3,))], [((0,), (3,)), ((2,), (2,))]])
def test_a_tensor_whose_parts_do_not_add_up_is_refused(boxes):
    with pytest.raises(StateMismatchError) as caught:
        planned_index(Metadata({"t": tensor(*boxes, size=[4])}))
    assert caught.value.key == "t"


@pytest.mark.parametrize("data", [["a"], {1: ("a",)}, {"a": ["b"]}, {"a": ("b", 1.5)}])
def test_planner_data_that_a_load_could_not_restore_is_refused(data):
    with pytest.raises(UnsupportedError, match=type(data).__name__):
        planned_index(Metadata({}, planner_data=data))


def test_results_come_as_dcp_sends_them_or_as_it_leaves_them():
    """Without other ranks it sends nothing; a writer around ours may have made a list of them."""
    columns = written(1, by_position=False)
    entry = StoredObject(ix.ObjectEntry("k", 9, None, b"d" * 16), 1, "memory://x")
    plain = [
        WriteResult(MetadataIndex("w"), 9, StoredItem(entry, 0, 9, 0, 9, b"d" * 16, False, None))
    ]
    assert Results.of(columns) is columns
    assert Results.of(plain) == Results.of(WriteResults(plain)) == WriteResults(plain).columns()


def test_metadata_says_what_the_index_does():
    index, _ = build_index(
        two_ranks(),
        [written(rank, by_position=False) for rank in (0, 1)],
        StorageMeta(checkpoint_id="s3://b/c", save_id="n", modules=["m"]),
    )
    metadata = describe(index, "load")
    assert list(metadata.state_dict_metadata) == ["t", "s", "v", "w"]
    assert isinstance(metadata.state_dict_metadata["w"], BytesStorageMetadata)
    assert metadata.state_dict_metadata["t"] == tensor(
        ((0, 0), (2, 3)), ((2, 0), (2, 3)), size=(4, 3)
    )
    assert metadata.planner_data == {"v": ("v", 0), "t": ("t",)}
    assert metadata.storage_meta == StorageMeta("s3://b/c", "n", "load", ["m"])
    assert (metadata.storage_data, metadata.version) == (None, DCP_VERSION)
