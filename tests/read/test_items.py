"""The items of a checkpoint, whoever wrote it and whatever they are called."""

from __future__ import annotations

import dataclasses
import io
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

import dcp_objstore as dos
from dcp_objstore.checkpoint.index import LiteralKey
from dcp_objstore.errors import (
    CheckpointCorruptError,
    ConfigError,
    StateMismatchError,
    UnsupportedError,
)
from dcp_objstore.read.items import (
    IndexItems,
    ItemLocation,
    RenamedItems,
    StockItems,
    new_names,
    typed_paths,
)
from dcp_objstore.read.stored_checkpoint import StoredCheckpoint, open_stored_checkpoint
from dcp_objstore.stores import StoreSpec
from dcp_objstore.transfer.digests import block_digest
from tests.support.checkpoints import memory_url, saved_by

STATE: dict[str, Any] = {
    "a": torch.arange(6.0).view(2, 3),
    "nested": {"b": torch.ones(4, dtype=torch.int16), "sparse": torch.eye(3)},
    "step": 7,
    "scalar": torch.tensor(5.0),
}


@pytest.fixture(params=["ours", "stock"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> StoredCheckpoint:
    return open_stored_checkpoint(StoreSpec(saved_by(request.param, tmp_path, STATE)), "load id")


def test_items_say_what_was_saved_and_where_it_lies(opened):
    items = opened.items
    keys = ["a", "nested.b", "nested.sparse", "scalar", "step"]
    assert sorted(items.keys) == keys
    assert items.paths is not None
    assert {key: items.paths[key] for key in ("a", "nested.b", "step")} == {
        "a": ("a",),
        "nested.b": ("nested", "b"),
        "step": ("step",),
    }
    assert items.are_blobs == isinstance(items, StockItems)
    for key in ("step", "absent"):
        assert items.tensor(key) is None
    saved = items.tensor("nested.b")
    assert saved is not None
    assert (saved.shape, saved.dtype) == ((4,), "int16")
    assert (saved.offsets.tolist(), saved.sizes.tolist()) == ([[0]], [[4]])
    scalar = items.tensor("scalar")
    assert scalar is not None
    assert (scalar.shape, scalar.offsets.shape, scalar.sizes.shape) == ((), (1, 0), (1, 0))
    lengths = 0
    for key in keys:
        offset = None if key == "step" else (0,) * len(items.tensor(key).shape)  # type: ignore[union-attr]
        found = items.find(key, offset, 0)
        assert found is not None
        lengths += found.payload_length
        if key != "step":
            assert found.sizes == items.tensor(key).shape  # type: ignore[union-attr]
        assert (found.sizes is None) == (key == "step")
        is_raw = isinstance(items, IndexItems) and key != "step"
        assert (found.dtype is not None) == is_raw == (found.limit_bytes is None)
        assert items.find(key, (1, 1, 1), 0) is None
    assert items.payload_bytes == lengths
    metadata = items.describe("load id")
    assert metadata.storage_meta is not None and metadata.storage_meta.load_id == "load id"
    assert sorted(metadata.state_dict_metadata) == keys
    if isinstance(items, StockItems):
        assert items.metadata.storage_meta is None or items.metadata.storage_meta.load_id is None


def test_renamed_items_are_the_same_under_other_keys(opened):
    own = opened.items
    assert not isinstance(own, RenamedItems)
    items = RenamedItems(own, [("^nested", "model"), ("^a$", "first")])
    names = {"first": "a", "model.b": "nested.b", "model.sparse": "nested.sparse"}
    names |= {"scalar": "scalar", "step": "step"}
    assert set(items.keys) == names.keys()
    assert items.payload_bytes == own.payload_bytes
    assert items.are_blobs == own.are_blobs
    # Where a key is called otherwise, nobody knows its place in a nested state.
    assert items.paths == {
        name: own.paths[key] if name == key else (name,)  # type: ignore[index]
        for name, key in names.items()
    }
    for name, key in names.items():
        assert str(items.tensor(name)) == str(own.tensor(key))
        assert items.find(name, (0,), 0) == own.find(key, (0,), 0)
        assert items.find(name, None, None) == own.find(key, None, None)
    for absent in ("a", "nested.b"):
        assert items.tensor(absent) is None
        assert items.find(absent, (0,), 0) is None
    kept = RenamedItems(own, [("^a$", "first")]).paths
    assert kept is not None and kept["nested.b"] == ("nested", "b")
    metadata = items.describe("load id")
    assert metadata.planner_data == items.paths
    theirs = own.describe("load id").state_dict_metadata
    assert metadata.state_dict_metadata == {name: theirs[key] for name, key in names.items()}
    own.paths = None
    assert RenamedItems(own, [("^a$", "first")]).paths is None


def test_a_number_that_was_a_key_of_a_dict_stays_one_unless_its_key_is_renamed():
    state = {"dict": {3: torch.ones(2)}, "list": [torch.ones(1)], "a": 1}
    dos.save(state, url := memory_url(), progress=False)
    own = open_stored_checkpoint(StoreSpec(url)).items
    assert not isinstance(own, RenamedItems)
    for items in (own, RenamedItems(own, [("^a$", "b")])):
        paths = typed_paths(items)
        assert [type(paths[key][1]) for key in ("dict.3", "list.0")] == [LiteralKey, int]
    renamed_paths = typed_paths(RenamedItems(own, [("^dict", "new")]))
    assert renamed_paths == {"new.3": ("new.3",), "list.0": ("list", 0), "a": ("a",)}


def test_an_item_of_ours_has_the_digests_of_its_blocks_and_a_bound():
    dos.save(STATE, url := memory_url(), progress=False)
    opened = open_stored_checkpoint(StoreSpec(url))
    found = opened.item("a", (0, 0))
    assert (found.sizes, found.dtype) == ((2, 3), "float32")
    assert found.digests == block_digest(STATE["a"].numpy().tobytes())
    value = opened.item("step")
    assert value.limit_bytes == value.payload_length
    assert (value.sizes, value.dtype, value.transforms) == (None, None, ())


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, that these will go
def test_what_only_torch_decodes_is_bounded_and_an_unknown_dtype_is_refused():
    state = {"q": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "t": torch.ones(3)}
    dos.save(state, url := memory_url())
    opened = open_stored_checkpoint(StoreSpec(url))
    found, index = opened.item("q", (0,)), opened.index
    assert (found.sizes, found.dtype, found.limit_bytes) == ((3,), None, found.payload_length)
    assert index is not None
    unknown = partial(msgspec.structs.replace, dtype="float3")
    tensors = {key: unknown(tensor) for key, tensor in index.tensors.items()}
    checkpoint = StoredCheckpoint((), IndexItems(dataclasses.replace(index, tensors=tensors)))
    for key in state:
        with pytest.raises(UnsupportedError, match="float3") as caught:
            checkpoint.item(key, (0,))
        assert caught.value.key == key


def test_planners_see_the_metadata_of_a_stock_checkpoint_with_the_id_of_the_load():
    for meta in (None, StorageMeta(checkpoint_id="theirs", save_id="saved")):
        metadata = Metadata({}, storage_meta=meta)
        found = StockItems(metadata, {}).describe("loaded").storage_meta
        assert found == dataclasses.replace(meta or StorageMeta(), load_id="loaded")
        assert metadata.storage_meta is meta


def test_a_payload_is_undone_or_is_raw():
    body = io.BytesIO()
    torch.save(torch.arange(100.0), body)
    size = len(body.getvalue())
    raw = ItemLocation(0, 0, size, (1,), "uint8", None)
    assert raw.undo_transforms(body, "t") is body
    bounded = ItemLocation(0, 0, size, None, None, None, (), size)
    assert bounded.undo_transforms(body, "t").getvalue() == body.getvalue()
    packed = ItemLocation(0, 0, size, None, None, None, ("stream.zstd/1",), size)
    with pytest.raises(CheckpointCorruptError) as caught:
        packed.undo_transforms(io.BytesIO(b"no zstd"), "t")
    assert caught.value.key == "t"


def test_rules_are_applied_one_after_the_other():
    for rename, names in (
        ([], ["a.b", "a.c"]),
        ([("^a", "x"), ("^x", "y")], ["y.b", "y.c"]),
        ([(r"\.(\w)", r"/\1")], ["a/b", "a/c"]),
        ((("b", "d"),), ["a.d", "a.c"]),
    ):
        assert new_names(["a.b", "a.c"], rename) == dict(zip(["a.b", "a.c"], names, strict=True))


def test_no_two_keys_get_one_name_and_none_gets_an_empty_one():
    assert new_names([""], [("^", "")]) == {"": ""}
    with pytest.raises(StateMismatchError, match="'b' and 'a' both become 'x'"):
        new_names(["b", "a"], [("^.$", "x")])
    with pytest.raises(StateMismatchError, match="no name") as caught:
        new_names(["b", "a"], [("^a$", "")])
    assert caught.value.key == "a"
    for rules in ([("(", "")], [("a", r"\1")], ["ab"], "ab", 3, [("a",)], [(1, "b")]):
        with pytest.raises(ConfigError, match="rename="):
            new_names(["a"], rules)  # type: ignore[arg-type]
