"""The `.metadata` that we write is one that stock torch, old and new, reads."""

from __future__ import annotations

import io
import pickle
import pickletools
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from dcp_objstore.checkpoint import index as ix
from dcp_objstore.compat import dot_metadata, foreign
from dcp_objstore.compat.dot_metadata import StockDotMetadata, encode_metadata
from dcp_objstore.compat.foreign import decode_metadata
from dcp_objstore.errors import CheckpointCorruptError, UnsupportedError
from tests.support import indexes
from tests.support.campaign import cases

FAR = 2**31  # the least that takes eight bytes


def chunk(number: int, offset: int, row: int) -> indexes.Chunk:
    item = indexes.Item(number, offset, 1000, offset + 64, 6, b"d" * 16)
    return indexes.Chunk((row, 0), (1, 3), item)


def tensor(**changes: Any) -> indexes.Tensor:
    chunks = chunk(0, 0, 0), chunk(1, FAR, 1)
    plain = indexes.Tensor((2, 3), "bfloat16", "strided", True, "contiguous_format", False, chunks)
    return msgspec.structs.replace(plain, **changes)


def scalar() -> indexes.Tensor:
    item = indexes.Item(0, 2000, 1000, 2064, 8, b"d" * 16)
    one = indexes.Chunk((), (), item)
    return tensor(shape=(), dtype="float64", requires_grad=False, chunks=(one,))


def index(**changes: Any) -> ix.Index:
    """Two tensors, of two chunks and of no dimensions, and one value."""
    plain = indexes.Index(
        objects=(
            ix.ObjectEntry("__0_0.a1.distcp", 3000, None, b"f" * 16),
            ix.ObjectEntry("__1_0.b2.distcp", FAR + 1000, None, b"f" * 16),
        ),
        tensors={"w": tensor(), "n": scalar()},
        blobs={"step": indexes.Item(0, 1000, 900, 1000, 900, b"d" * 16)},
        flatten_mapping={"w": ("model", "w"), "n": ("n",), "step": ("step", 0)},
        storage=ix.StorageInfo("s3://bucket/run/step-1", "save-1", ("module",)),
    )
    return ix.decode(indexes.encode(msgspec.structs.replace(plain, **changes)))


def metadata() -> Metadata:
    """What stock torch would pickle for `index()`."""
    properties = TensorProperties(torch.bfloat16, requires_grad=True)
    chunks = [ChunkStorageMetadata(torch.Size([row, 0]), torch.Size([1, 3])) for row in range(2)]
    alone = ChunkStorageMetadata(torch.Size([]), torch.Size([]))
    return Metadata(
        state_dict_metadata={
            "w": TensorStorageMetadata(properties, torch.Size([2, 3]), chunks),
            "n": TensorStorageMetadata(TensorProperties(torch.float64), torch.Size([]), [alone]),
            "step": BytesStorageMetadata(),
        },
        planner_data={"w": ("model", "w"), "n": ("n",), "step": ("step", 0)},
        storage_data={
            MetadataIndex("w", [0, 0], 0): _StorageInfo("__0_0.a1.distcp", 0, 1000),
            MetadataIndex("w", [1, 0], 1): _StorageInfo("__1_0.b2.distcp", FAR, 1000),
            MetadataIndex("n", [], 0): _StorageInfo("__0_0.a1.distcp", 2000, 1000),
            MetadataIndex("step"): _StorageInfo("__0_0.a1.distcp", 1000, 900),
        },
        storage_meta=StorageMeta("s3://bucket/run/step-1", "save-1", modules=["module"]),
        version="1.0.0",
    )


def test_pickle_load_and_our_decoder_give_back_what_stock_torch_would_have_written():
    body = encode_metadata(index())
    for read in (pickle.loads(body), decode_metadata(body)):
        assert read == metadata()
        for place in read.storage_data:  # equality leaves the hints out
            (wanted,) = [one for one in metadata().storage_data if one == place]
            assert place.index == wanted.index
            assert type(place.offset) is type(wanted.offset)
        for one in (read.state_dict_metadata["w"].chunks, read.storage_meta.modules):
            assert type(one) is list


@pytest.mark.parametrize("count", cases([200, 256, 300, 70_000], default=[200, 256, 300]))
def test_every_item_is_found_in_its_object_however_many_there_are(count):
    keys = [f"__{number}_0.a1.distcp" for number in range(count)]
    chunks = tuple(
        indexes.Chunk((number,), (1,), indexes.Item(number, number, 100, number + 9, 2, b"d" * 16))
        for number in range(count)
    )
    objects = tuple(ix.ObjectEntry(key, count + 100, None, b"f" * 16) for key in keys)
    made = index(objects=objects, tensors={"w": tensor(shape=(count,), chunks=chunks)}, blobs={})
    read = pickle.loads(encode_metadata(made))
    assert read.storage_data == {
        MetadataIndex("w", [number]): _StorageInfo(key, number, 100)
        for number, key in enumerate(keys)
    }
    assert [place.index for place in read.storage_data] == list(range(count))


def test_it_is_read_back_as_stock_torch_pickles_it():
    read = pickle.loads(encode_metadata(index()))
    assert pickle.loads(pickle.dumps(read)) == metadata()


@pytest.mark.parametrize("module", ["_pickle", "pickle"])
def test_it_leaves_one_value_and_nothing_else_on_the_stack(module):
    body = encode_metadata(index())
    pickletools.dis(body, out=io.StringIO())  # raises if anything is left
    load = pickle._loads if module == "pickle" else pickle.loads  # type: ignore[attr-defined]
    assert load(body) == metadata()


@pytest.mark.parametrize(
    ("changes", "properties"),
    [
        ({"memory_format": "channels_last"}, {"memory_format": torch.channels_last}),
        ({"memory_format": "preserve_format"}, {"memory_format": torch.preserve_format}),
        ({"layout": "sparse_coo"}, {"layout": torch.sparse_coo}),
        ({"pin_memory": True}, {"pin_memory": True}),
        ({"dtype": "float16"}, {"dtype": torch.float16}),
    ],
)
def test_every_property_survives(changes, properties):
    alike = tensor(chunks=(chunk(0, 2000, 0), chunk(1, 0, 1)))  # but for the property
    body = encode_metadata(index(tensors={"n": alike, "w": tensor(**changes)}))
    plain = {"dtype": torch.bfloat16, "requires_grad": True}
    for read in (pickle.loads(body), decode_metadata(body)):
        assert read.state_dict_metadata["n"].properties == TensorProperties(**plain)
        assert read.state_dict_metadata["w"].properties == TensorProperties(**plain | properties)


def test_the_layouts_are_those_of_torch():
    layouts = {str(value) for value in vars(torch).values() if isinstance(value, torch.layout)}
    assert layouts <= {f"torch.{name}" for name in dot_metadata._LAYOUTS}


def test_an_empty_checkpoint_is_written():
    empty = ix.decode(indexes.encode(indexes.Index()))
    wanted = Metadata({}, None, {}, StorageMeta(), "1.0.0")
    assert pickle.loads(encode_metadata(empty)) == wanted
    assert decode_metadata(encode_metadata(empty)) == wanted


@pytest.mark.parametrize("error", [CheckpointCorruptError, UnsupportedError])
def test_a_dot_metadata_that_cannot_be_read_is_not_called_ours(error, monkeypatch):
    monkeypatch.setattr(foreign, "decode_metadata", Mock(side_effect=error("it")))
    assert not StockDotMetadata().is_ours(b"")


def test_dot_metadata_names_only_torchs_globals_in_an_old_protocol():
    named = set()
    for opcode, argument, _ in pickletools.genops(encode_metadata(index())):
        assert opcode.proto <= 4
        assert opcode.name != "STACK_GLOBAL"
        if opcode.name == "PROTO":
            assert argument == 4
        if opcode.name == "GLOBAL":
            module, _, name = argument.rpartition(" ")
            assert module.partition(".")[0] == "torch"
            named.add(name)
    assert named == {
        "Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata",
        "BytesStorageMetadata", "MetadataIndex", "StorageMeta", "_StorageInfo",
        "_MEM_FORMAT_ENCODING", "_get_layout", "Size", "bfloat16", "float64",
    }  # fmt: skip


def test_a_tensor_that_stock_torch_cannot_name_is_refused():
    for name, value, kind in (
        ("dtype", "float3", UnsupportedError),
        ("layout", "load", CheckpointCorruptError),
        ("memory_format", "float32", CheckpointCorruptError),
    ):
        with pytest.raises(kind, match=value) as caught:
            encode_metadata(index(tensors={"w": tensor(**{name: value}), "n": scalar()}))
        assert caught.value.key == "w"


def test_a_metadata_that_stock_torch_has_pickled_itself_describes_the_same_index():
    body = indexes.encode(indexes.Index())
    assert StockDotMetadata().describes(StockDotMetadata().derive(body), body)
    body = ix.encode(index())
    assert StockDotMetadata().describes(pickle.dumps(metadata()), body)
    elsewhere, retyped, moved = metadata(), metadata(), metadata()
    elsewhere.storage_data[MetadataIndex("step")] = _StorageInfo("__0_0.a1.distcp", 1000, 901)
    retyped.state_dict_metadata["n"].properties.dtype = torch.int64
    moved.planner_data["n"] = ("m",)
    for other in (elsewhere, retyped, moved):
        assert not StockDotMetadata().describes(pickle.dumps(other), body)
    assert not StockDotMetadata().describes(b"other", body)
