"""The `.metadata` that we write is one that stock torch, old and new, reads."""

from __future__ import annotations

import copy
import pickle
import pickletools
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
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

from dcp_objstore.compat import dot_metadata
from dcp_objstore.compat.dot_metadata import encode_metadata
from dcp_objstore.compat.foreign import decode_metadata
from dcp_objstore.errors import UnsupportedError
from tests.support.stock_checkpoints import save_stock


def sample(**changes: Any) -> Metadata:
    """One tensor of two chunks and one value."""
    properties = TensorProperties(torch.bfloat16, requires_grad=True)
    chunks = [ChunkStorageMetadata(torch.Size([row, 0]), torch.Size([1, 3])) for row in range(2)]
    fields: dict[str, Any] = {
        "state_dict_metadata": {
            "w": TensorStorageMetadata(properties, torch.Size([2, 3]), chunks),
            "step": BytesStorageMetadata(),
        },
        "planner_data": {"w": ("model", "w"), "step": ("step", 0)},
        "storage_data": {
            MetadataIndex("w", [0, 0], 0): _StorageInfo("__0_0.a1.distcp", 0, 1000),
            MetadataIndex("w", [1, 0], 1): _StorageInfo("__1_0.b2.distcp", 2**40, 1000),
            MetadataIndex("step"): _StorageInfo("__0_0.a1.distcp", 1000, 900),
        },
        "storage_meta": StorageMeta("s3://bucket/run/step-1", "save-1"),
        "version": "1.0.0",
    }
    return Metadata(**{**fields, **changes})


def test_pickle_load_and_our_decoder_give_back_what_was_encoded() -> None:
    body = encode_metadata(sample())
    assert pickle.loads(body) == sample()
    assert decode_metadata(body) == sample()


def test_the_bytes_are_those_of_stock_torch_for_the_same_metadata() -> None:
    """Up to torch 2.14 the stock pickle of a metadata like ours is already what must be written."""
    assert encode_metadata(sample()) == pickle.dumps(sample(), 4)


def test_stock_reader_loads_a_checkpoint_with_its_metadata_rewritten(tmp_path: Path) -> None:
    place = tmp_path / "checkpoint"
    stock_body = save_stock(place)
    (place / ".metadata").write_bytes(encode_metadata(decode_metadata(stock_body)))
    loaded = {"model": {"weight": torch.zeros(5, 4), "scalar": torch.zeros(())}, "step": 0}
    dcp.load(loaded, storage_reader=dcp.FileSystemReader(place), no_dist=True)
    assert loaded["step"] == 2**40
    assert loaded["model"]["scalar"] == 3
    assert loaded["model"]["weight"].abs().sum() > 0


def test_every_memory_format_dtype_and_layout_survives() -> None:
    for changed in (
        {"memory_format": torch.channels_last},
        {"memory_format": torch.preserve_format},
        {"dtype": torch.float8_e4m3fn},
        {"dtype": torch.complex128},
        {"layout": torch.sparse_coo},
        {"pin_memory": True},
    ):
        stored = sample().state_dict_metadata["w"]
        item = TensorStorageMetadata(TensorProperties(**changed), stored.size, stored.chunks)
        given = sample(state_dict_metadata={**sample().state_dict_metadata, "w": item})
        body = encode_metadata(given)
        assert pickle.loads(body) == given
        assert decode_metadata(body) == given


class NewerProperties(TensorProperties):
    """As torch 2.15 has it: one more field, at the end of the pickled state."""

    def __getstate__(self) -> tuple[object, ...]:
        return (*super().__getstate__(), (3, 1))


def test_properties_of_a_newer_torch_are_written_as_the_five_fields_of_an_older_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # There the class is TensorProperties itself: for the pickler, by name, and for our check.
    newer = type(
        "TensorProperties",
        (NewerProperties,),
        {"__module__": TensorProperties.__module__, "__eq__": TensorProperties.__eq__},
    )
    given = sample()
    given.state_dict_metadata["w"].properties = newer(torch.bfloat16, requires_grad=True)
    monkeypatch.setattr(dot_metadata, "TensorProperties", newer)
    monkeypatch.setattr(dot_metadata, "_STOCK", dot_metadata._STOCK | {newer})
    with monkeypatch.context() as stock_module:
        stock_module.setattr("torch.distributed.checkpoint.metadata.TensorProperties", newer)
        assert len(given.state_dict_metadata["w"].properties.__getstate__()) == 6
        body = encode_metadata(given)
    assert pickle.loads(body) == sample()


@pytest.mark.parametrize("place", [PurePosixPath("/data/run"), Path("run"), "s3://b/run"])
def test_checkpoint_id_is_written_as_text(place: object) -> None:
    given = sample(storage_meta=StorageMeta(place, "save", "load", ["module"]))
    read = pickle.loads(encode_metadata(given)).storage_meta
    assert read == StorageMeta(str(place), "save", "load", ["module"])
    assert type(read.checkpoint_id) is str
    assert given.storage_meta.checkpoint_id is place


def test_a_metadata_without_storage_meta_or_planner_data_is_written() -> None:
    given = Metadata({}, None, {}, None)
    assert pickle.loads(encode_metadata(given)) == given


def test_only_globals_of_torch_are_named_and_the_protocol_is_one_that_old_python_reads() -> None:
    body = encode_metadata(sample(storage_meta=StorageMeta(Path("/data"), "save")))
    strings: list[str] = []
    named = set()
    for opcode, argument, _ in pickletools.genops(body):
        if isinstance(argument, str):
            strings.append(argument)
        if opcode.name == "PROTO":
            assert argument == 4
        if opcode.name == "STACK_GLOBAL":
            named.add(strings[-1])
    assert named == {
        "Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata",
        "BytesStorageMetadata", "MetadataIndex", "StorageMeta", "_StorageInfo",
        "_MEM_FORMAT_ENCODING", "_get_layout", "Size", "bfloat16",
    }  # fmt: skip
    assert not any("path" in text and text != "relative_path" for text in strings)


def test_attributes_that_stock_torch_does_not_know_are_left_out() -> None:
    given = sample()
    given.mcore_data = {"w": {1: 2}}
    assert not hasattr(pickle.loads(encode_metadata(given)), "mcore_data")
    assert hasattr(given, "mcore_data")


class Text(str):
    __slots__ = ()


@pytest.mark.parametrize(
    "changes",
    [
        {"planner_data": {"w": (Text("w"),)}},
        {"planner_data": lambda: None},
        {"planner_data": torch.zeros(1)},
        {"version": Path},
        {"storage_data": {MetadataIndex("w"): Path("x")}},
        {"state_dict_metadata": {"w": NewerProperties()}},
    ],
)
def test_a_class_that_stock_torch_does_not_write_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match="cannot hold"):
        encode_metadata(sample(**changes))


def test_encoding_leaves_its_argument_as_it_was() -> None:
    given = sample()
    before = copy.deepcopy(given)
    encode_metadata(given)
    assert given == before
