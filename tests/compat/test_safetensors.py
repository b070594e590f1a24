"""Safetensors, alone or in a folder as on the Hugging Face hub: which files count, and bad ones."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import pytest
import safetensors.torch
import torch

import dcp_objstore as dos
from dcp_objstore.checkpoint import read as checkpoint_read
from dcp_objstore.compat.safetensors import header_bytes
from dcp_objstore.config import MIB
from dcp_objstore.errors import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    DcpObjstoreError,
    InputError,
    UnsupportedError,
)
from dcp_objstore.inspect.checkpoint import TensorEntry
from dcp_objstore.read import stored_checkpoint
from dcp_objstore.stores import open_store
from tests.support.checkpoints import memory_url, put_weights as put


@pytest.fixture
def memory() -> str:
    return memory_url()


# --- which files ----------------------------------------------------------------------------------


def test_of_several_files_those_count_that_transformers_would_read(memory):
    one, two, three = ({"w": torch.tensor(n)} for n in range(3))
    put(f"{memory}/original", model=three)  # a folder inside is another model
    with pytest.raises(CheckpointNotFoundError):
        dos.open(memory)
    put(memory, adapter_model=one)
    assert int(dos.open(memory)["w"].read()) == 0
    put(memory, consolidated=two)
    with pytest.raises(InputError, match=r"adapter_model.*, consolidated") as caught:
        dos.open(memory)
    assert caught.value.url == memory
    index = {"weight_map": {"w": "consolidated.safetensors"}}
    store = open_store(memory)
    store.put("model.safetensors.index.json", json.dumps(index).encode())
    store.put("other.safetensors.index.json", b"{")
    assert int(dos.open(memory)["w"].read()) == 1
    put(memory, model=three)
    assert int(dos.open(memory)["w"].read()) == 2


def test_files_that_a_listing_was_cut_before_are_asked_for_by_name(memory, monkeypatch):
    """Subfolders come between the names of a folder; what is listed first does not decide."""
    for module in (checkpoint_read, stored_checkpoint):
        monkeypatch.setattr(module, "LOOK_AROUND_LIMIT", 3)
    one, two, three = ({"w": torch.tensor(n)} for n in range(3))
    put(memory, best=one)
    put(f"{memory}/keep", **{f"{n:03}": three for n in range(29)})
    with pytest.raises(InputError, match=r"too many objects to list.* best\.safetensors"):
        dos.open(memory)
    put(memory, **{"model-00001-of-00001": two})
    index = {"weight_map": {"w": "model-00001-of-00001.safetensors"}}
    open_store(memory).put("model.safetensors.index.json", json.dumps(index).encode())
    assert int(dos.open(memory)["w"].read()) == 1
    put(memory, model=three)
    assert int(dos.open(memory)["w"].read()) == 2
    open_store(memory).delete("best.safetensors")
    assert int(dos.open(memory)["w"].read()) == 2


@pytest.mark.parametrize("place", ["shards/part.safetensors", "./part.safetensors"])
def test_an_index_may_name_files_as_os_path_join_takes_them(memory, place):
    place_in = memory if place.startswith(".") else f"{memory}/shards"
    put(place_in, part={"w": torch.ones(2)}, other={"w": torch.zeros(2)})
    open_store(memory).put(INDEX, index_of(w=place))
    assert dos.read_state_dict(memory, progress=False)["w"].tolist() == [1.0, 1.0]


def test_one_of_several_shards_is_no_model(memory):
    """An upload that has only begun."""
    put(memory, **{"model-00001-of-00002": {"w": torch.ones(1)}})
    with pytest.raises(InputError, match="index"):
        dos.open(memory)
    assert list(dos.open(f"{memory}/model-00001-of-00002.safetensors")) == ["w"]


def test_a_save_that_was_never_committed_is_not_hidden_by_weights(tmp_path):
    dos.save({"w": torch.ones(1)}, tmp_path.as_uri(), progress=False)
    safetensors.torch.save_file({"w": torch.zeros(1)}, tmp_path / "model.safetensors")
    assert dos.read_state_dict(tmp_path.as_uri(), progress=False)["w"].item() == 1
    (tmp_path / "_COMMIT").unlink()
    (tmp_path / ".metadata").unlink()
    with pytest.raises(CheckpointNotFoundError, match="never committed"):
        dos.open(tmp_path.as_uri())


def test_a_checkpoint_may_have_a_name_like_a_file(tmp_path):
    url = (tmp_path / "step.safetensors").as_uri()
    dos.save({"w": torch.ones(1)}, url, progress=False)
    assert dos.read_state_dict(url, progress=False)["w"].item() == 1


def file_of(header: dict[str, Any] | bytes, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


# --- bad input ------------------------------------------------------------------------------------

F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def index_of(**weight_map: str) -> bytes:
    return json.dumps({"weight_map": weight_map}).encode()


W, V = {"w": torch.ones(2)}, {"v": torch.ones(2)}
INDEX, ONE, TWO = "model.safetensors.index.json", "1.safetensors", "2.safetensors"
FILE = {ONE: safetensors.torch.save(W)}
# The files, by what the error says of them.
BAD: dict[str, dict[str, bytes]] = {
    f"{ONE} is not a whole safetensors file": {INDEX: index_of(w=ONE), ONE: FILE[ONE][:-1]},
    "git lfs pull": {
        ONE: b"version https://git-lfs.github.com/spec/v1\noid sha256:%s\nsize 1976163472\n"
        % (b"0" * 64)
    },
    "header would end at byte 8 of 0": {ONE: b""},
    "header would end": {ONE: (2**40).to_bytes(8, "little") + b"{}"},
    f"names {TWO}, which is not in the folder": {INDEX: index_of(w=ONE, v=TWO), **FILE},
    "no weight_map of this folder": {INDEX: index_of(w=f"../{ONE}"), **FILE},
    "weight_map": {INDEX: index_of(w=".")},
    "not in the folder": {INDEX: index_of(w=f"s3://bucket/{ONE}")},
    "it has not": {INDEX: index_of(w=ONE, v=ONE), **FILE},
    INDEX: {INDEX: b"[]", **FILE},
    f"both {ONE} and {TWO} have this tensor": {
        INDEX: index_of(w=ONE, v=TWO),
        ONE: safetensors.torch.save({**W, "x": torch.ones(1)}),
        TWO: safetensors.torch.save({**V, "x": torch.zeros(1)}),
    },
    "begins at byte": {ONE: file_of({"a": F32, "b": {**F32, "data_offsets": [4, 12]}}, bytes(12))},
    "offsets 8 and 0": {
        ONE: file_of({"a": F32, "w": {**F32, "dtype": "X", "data_offsets": [8, 0]}}, bytes(8))
    },
    "tensors end at byte": {ONE: file_of({"a": F32}, bytes(9))},
    "tensors end at byte ": {ONE: file_of({"a": F32}, bytes(7))},
    "65 dimensions": {ONE: file_of({"a": {**F32, "shape": [2] + [1] * 64}}, bytes(8))},
    "impossible shape": {
        ONE: file_of({"a": {**F32, "shape": [0, 2**61, 1], "data_offsets": [0, 0]}})
    },
    "F6_E3M2": {ONE: file_of({"w": {**F32, "dtype": "F6_E3M2"}}, bytes(8))},
    "QUINT8": {ONE: file_of({"w": {**F32, "dtype": "quint8"}}, bytes(8))},
}


DTYPES = {
    "F64": ("float64", 8), "F32": ("float32", 4), "F16": ("float16", 2), "BF16": ("bfloat16", 2),
    "F8_E4M3": ("float8_e4m3fn", 1), "F8_E4M3FNUZ": ("float8_e4m3fnuz", 1),
    "F8_E5M2": ("float8_e5m2", 1), "F8_E5M2FNUZ": ("float8_e5m2fnuz", 1),
    "F8_E8M0": ("float8_e8m0fnu", 1), "F4": ("float4_e2m1fn_x2", 1), "I64": ("int64", 8),
    "I32": ("int32", 4), "I16": ("int16", 2), "I8": ("int8", 1), "U64": ("uint64", 8),
    "U32": ("uint32", 4), "U16": ("uint16", 2), "U8": ("uint8", 1), "BOOL": ("bool", 1),
    "C64": ("complex64", 8),
}  # fmt: skip


def test_each_dtype_of_the_format_is_read_and_written(memory):
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (_, size) in DTYPES.items():
        shape = [1] * 63 + [2 if name == "F4" else 1]  # 64 dimensions, the most that torch has
        header[name] = {"dtype": name, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    tensors = [(name, getattr(torch, dtype), (1,) * 64) for name, (dtype, _) in DTYPES.items()]
    assert json.loads(header_bytes(tensors)[8:]) == header
    header["empty"] = {**F32, "shape": [0], "data_offsets": [3, 3]}  # may lie anywhere
    # A header that the first read has not whole.
    put(memory, model=file_of(json.dumps(header).encode() + b" " * 300_000, bytes(end)))
    checkpoint = dos.open(memory)
    entries = [entry for entry in checkpoint.values() if isinstance(entry, TensorEntry)]
    found = {entry.key: (entry.dtype_name, entry.nbytes) for entry in entries}
    assert found == {**DTYPES, "empty": ("float32", 0)}
    assert checkpoint["F32"].read().shape == (1,) * 64


@pytest.mark.parametrize("text", BAD)
def test_bad_input_gets_one_clear_error_and_leaves_nothing(tmp_path, text):
    files, is_unknown = BAD[text], text in ("F6_E3M2", "QUINT8")
    for name, body in files.items():
        (tmp_path / name).write_bytes(body)
    state = {"w": torch.zeros(2)}
    loads: list[Callable[[], object]] = [
        lambda: dos.load(state, tmp_path.as_uri(), progress=False),
        lambda: dos.read_state_dict(tmp_path.as_uri(), progress=False),
        lambda: dos.import_checkpoint(tmp_path, f"{tmp_path.as_uri()}/new", progress=False),
    ]
    for load in loads:
        with pytest.raises(DcpObjstoreError) as caught:
            load()
        assert type(caught.value) is (UnsupportedError if is_unknown else CheckpointCorruptError)
        assert text in str(caught.value) or (is_unknown and load is loads[2])
        assert is_unknown or caught.value.object_key
        assert load is loads[2] or is_unknown or caught.value.url == tmp_path.as_uri()
        if text == "it has not":
            assert (caught.value.key, caught.value.object_key) == ("v", "1.safetensors")
    assert not state["w"].any()
    assert {path.name for path in tmp_path.iterdir()} == files.keys()


@pytest.mark.parametrize(
    ("name", "most", "within", "beyond"),
    [
        ("model.safetensors", 100_000_000 - 8, "not a whole", "more than 100000000 bytes"),
        (INDEX, 64 * MIB, "no weight_map", "at most 67108864"),
    ],
)
def test_headers_and_indices_are_read_up_to_their_limits(tmp_path, name, most, within, beyond):
    url = tmp_path.as_uri()
    for size, text in ((most, within), (most + 1, beyond)):
        (tmp_path / name).write_bytes(size.to_bytes(8, "little"))
        os.truncate(tmp_path / name, size + 8 * (name != INDEX))
        with pytest.raises(CheckpointCorruptError, match=text) as caught:
            dos.open(url)
        assert caught.value.url == url


def test_the_metadata_of_a_header_may_be_null_or_have_the_names_of_a_tensors_fields(memory):
    fields = {"dtype": "bf16", "shape": "large", "data_offsets": "none", "format": "pt"}
    for metadata in (None, fields):
        put(memory, model=file_of({"__metadata__": metadata, "w": F32}, bytes(8)))
        assert dos.read_state_dict(memory, progress=False)["w"].tolist() == [0.0, 0.0]
    put(memory, model=file_of({"v": F32, "w": None}, bytes(8)))
    with pytest.raises(CheckpointCorruptError, match="'w' has no shape"):
        dos.open(memory)


def test_a_tensor_of_an_unknown_dtype_is_left_out(memory):
    for dtype, shape in (("F6_E3M2", [4, 4]), ("F4", [16, 1]), ("F4", [])):
        strange = {"dtype": dtype, "shape": shape, "data_offsets": [8, 16]}
        put(memory, model=file_of({"w": F32, "x": strange}, bytes(16)))
        assert dos.read_state_dict(memory, "w", progress=False)["w"].tolist() == [0.0, 0.0]
        assert dos.open(memory)["x"].dtype_name == "unknown"
