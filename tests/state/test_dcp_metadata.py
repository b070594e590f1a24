"""What DCP's planners get of an index: made of a chunk only when a planner looks at it."""

from __future__ import annotations

import pickle

import msgspec
import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from dcp_objstore.checkpoint import index as ix
from dcp_objstore.errors import CheckpointCorruptError
from dcp_objstore.state import dcp_metadata
from dcp_objstore.state.dcp_metadata import describe
from dcp_objstore.state.stored import constant_name, known_dtype
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


def test_chunks_are_made_of_the_tensors_that_a_planner_looks_at(made):
    metadata = describe(index())
    for key in "abc":
        assert len(saved(metadata, key).chunks) == RANKS
    assert not made
    wanted = ChunkStorageMetadata(torch.Size([10, 0]), torch.Size([2, 3]))
    (item,) = create_read_items_for_chunk_list("a", saved(metadata, "a"), [wanted])
    assert item.storage_index.offset == (10, 0)
    assert len(made) == RANKS


def test_tensors_that_are_cut_alike_share_their_chunks(made):
    metadata = describe(index())
    assert all(saved(metadata, "a").chunks[n] is saved(metadata, "b").chunks[n] for n in range(3))
    assert len(made) == RANKS
    assert saved(metadata, "c").chunks[1].sizes == (3, 3)
    assert len(made) == 2 * RANKS


def test_chunks_are_taken_for_a_list():
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


def test_a_pickled_metadata_carries_the_index_once_and_no_chunk():
    stored = index()
    metadata = describe(stored)
    before = len(pickle.dumps(metadata))
    assert sum(len(saved(metadata, key).chunks[:]) for key in "abc") == 3 * RANKS
    assert len(pickle.dumps(metadata)) == before < 2 * len(ix.encode(stored))
    received = pickle.loads(pickle.dumps(metadata))
    assert received == metadata
    assert saved(received, "a").chunks[0] is saved(received, "b").chunks[0]


def test_a_tensor_is_described_as_it_was_whatever_it_was():
    stored = ix.decode(ix.encode(index()))
    change = {"layout": "jagged", "memory_format": "channels_last", "dtype": "float3"}
    stored.tensors["b"] = msgspec.structs.replace(stored.tensors["b"], **change)
    found = saved(describe(stored), "b").properties
    assert (found.layout, found.memory_format) == (torch.jagged, torch.channels_last)
    assert (found.dtype, found.requires_grad, found.pin_memory) == (None, False, False)


@pytest.mark.parametrize("change", [{"layout": "float32"}, {"memory_format": "woven"}])
def test_a_layout_that_this_torch_lacks_is_an_error_of_its_tensor(change):
    stored = ix.decode(ix.encode(index()))
    stored.tensors["b"] = msgspec.structs.replace(stored.tensors["b"], **change)
    with pytest.raises(CheckpointCorruptError, match=next(iter(change.values()))) as caught:
        describe(stored)
    assert caught.value.key == "b"


def test_a_dtype_is_known_if_torch_and_this_version_know_it(monkeypatch):
    for constant in (torch.bfloat16, torch.float32):
        assert known_dtype(constant_name(constant)) is constant
    assert constant_name(torch.channels_last) == "channels_last"
    for name in ("quint4x2", "strided", "float3"):
        assert known_dtype(name) is None
    monkeypatch.setitem(ix.ITEM_SIZE_BYTES, "float3", 1)
    assert known_dtype("float3") is None
