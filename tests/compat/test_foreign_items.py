"""What stock writers store loads bit by bit: tensors of every kind, zstd, values."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import pickle
import random
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import zstandard
from torch.distributed.checkpoint import FileSystemWriter, _version
from torch.distributed.checkpoint._extension import (
    ZStandard,
)
from torch.distributed.checkpoint.api import CheckpointException

import dcp_objstore as dos
from dcp_objstore.compat import transforms
from dcp_objstore.compat.transforms import FRAMING_SIZE_BYTES, check_transforms, undo
from dcp_objstore.errors import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    DcpObjstoreError,
    UnsupportedError,
    UntrustedPickleError,
)
from dcp_objstore.read.stored_checkpoint import _MAX_UNEXPLAINED_BYTES
from tests.support import hostile, hostile_cases  # noqa: F401 - registers the cases
from tests.support.checkpoints import cause
from tests.support.ranks import run_ranks
from tests.support.states import ALL_DTYPES, same_bits, seeded

ZSTD = ["stream.zstd/1"]
LIMIT = 1 << 20


def save(state: dict[str, Any], place: Path, **settings: Any) -> Path:
    dcp.save(state, storage_writer=FileSystemWriter(place, **settings), no_dist=True)
    return place


def load(state: dict[str, Any], place: Path, **settings: Any) -> None:
    reader = dos.ObjectStoreReader(f"file://{place}", **settings)
    dcp.load(state, storage_reader=reader, no_dist=True)


def refused(state: dict[str, Any], place: Path) -> DcpObjstoreError:
    with pytest.raises(CheckpointException) as caught:
        load(state, place)
    error = cause(caught.value)
    assert isinstance(error, DcpObjstoreError)
    return error


def remove_data(place: Path) -> None:
    for one in place.glob("*.distcp"):
        one.unlink()


# --- tensors -------------------------------------------------------------------------------------

SOURCES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "as it is": lambda full: full.clone(),
    "transposed": lambda full: full.t().clone().t(),
    "rows of a larger storage": lambda full: torch.cat([full, full, full])[4:8],
    "every other column": lambda full: full.repeat_interleave(2, 1)[:, ::2],
    "requires grad": lambda full: full.clone().requires_grad_(),
    "a transposed parameter": lambda full: torch.nn.Parameter(full.t().clone().t()),
    "expanded": lambda full: full[:1].expand(4, 6),
}
DESTINATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": torch.zeros_like,
    "transposed": lambda full: torch.zeros_like(
        full.t(), memory_format=torch.contiguous_format
    ).t(),
    "a parameter": lambda full: torch.nn.Parameter(torch.zeros_like(full)),
}


@pytest.mark.parametrize("zstd", [False, True])
def test_tensors_of_any_strides_load_into_tensors_of_any_strides(tmp_path, zstd):
    full = torch.arange(24.0).reshape(4, 6)
    stored = {
        f"{source}/{destination}": make(full)
        for source, make in SOURCES.items()
        for destination in DESTINATIONS
    }
    place = save(dict(stored), tmp_path / "stock", _extensions=[ZStandard()] if zstd else None)
    state = {key: DESTINATIONS[key.partition("/")[2]](torch.zeros(4, 6)) for key in stored}
    load(state, place)
    for key, expected in stored.items():
        assert torch.equal(state[key], expected), key


@pytest.mark.parametrize("zstd", [False, True])
def test_every_dtype_and_odd_shape_loads(tmp_path, zstd):
    dtypes = [dtype for dtype in ALL_DTYPES if dtype is not torch.complex32]
    stored: dict[str, torch.Tensor] = {
        f"{dtype}{shape}": seeded(f"{dtype}{shape}", shape, dtype)
        for dtype in dtypes
        for shape in ((), (0, 3), (5, 3), (1,))
    }
    stored["conj"] = torch.tensor([1 + 2j, 3 - 4j]).conj()
    stored["neg"] = torch.tensor([1 + 2j, 3 - 4j]).conj().imag
    stored["channels last"] = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    place = save(dict(stored), tmp_path / "stock", _extensions=[ZStandard()] if zstd else None)
    state = {key: torch.zeros(value.shape, dtype=value.dtype) for key, value in stored.items()}
    load(state, place)
    assert [key for key in stored if not same_bits(state[key], stored[key])] == []


def test_a_view_that_was_saved_with_all_of_its_storage_loads(tmp_path):
    """Stock writers copy a view first; a writer derived from them may not."""
    full = torch.arange(1_000_000.0)
    place = save({"w": full[5:9].clone()}, tmp_path / "stock")
    buffer = io.BytesIO()
    torch.save(full[5:9], buffer)
    assert len(buffer.getvalue()) > 4_000_000
    replace_items(place, lambda _: buffer.getvalue())
    state = {"w": torch.zeros(4)}
    load(state, place)
    assert torch.equal(state["w"], full[5:9])


# --- zstd ----------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="zstd comes with Python")
def test_without_a_zstd_package_the_command_that_installs_it_is_named(tmp_path, monkeypatch):
    place = save({"w": torch.ones(3)}, tmp_path / "stock", _extensions=[ZStandard()])
    monkeypatch.setitem(sys.modules, "zstandard", None)
    remove_data(place)  # it is found out before anything is fetched
    error = refused({"w": torch.zeros(3)}, place)
    assert isinstance(error, UnsupportedError)
    assert "pip install 'dcp-objstore[zstd]'" in str(error)
    assert error.key == "w"


def test_an_item_that_cannot_be_undone_does_not_stop_the_others(tmp_path):
    place = save({"w": torch.ones(3), "v": torch.ones(2)}, tmp_path / "stock")
    metadata = pickle.loads((place / ".metadata").read_bytes())
    for index, info in metadata.storage_data.items():
        info.transform_descriptors = ["stream.other/1"] if index.fqn == "w" else None
    (place / ".metadata").write_bytes(pickle.dumps(metadata))
    state = {"v": torch.zeros(2)}
    load(state, place)
    assert torch.equal(state["v"], torch.ones(2))
    assert isinstance(refused({"w": torch.zeros(3)}, place), UnsupportedError)


@pytest.mark.parametrize("name", ["stream.zstd/2", "stream.zstd", "stream.zstd/", "zstd/1", ""])
def test_other_versions_and_names_of_zstd_are_not_guessed_at(name):
    with pytest.raises(UnsupportedError) as caught:
        check_transforms([*ZSTD, name], "w")
    assert caught.value.key == "w"


def test_python_3_14_and_later_have_zstd_themselves(monkeypatch):
    monkeypatch.setitem(sys.modules, "zstandard", None)
    for version, has_zstd in (((3, 13, 9), False), ((3, 14, 0), True)):
        monkeypatch.setattr(transforms, "sys", SimpleNamespace(version_info=version))
        with contextlib.nullcontext() if has_zstd else pytest.raises(UnsupportedError):
            check_transforms(["stream.zstd/1.5"], "w")


def test_frames_follow_each_other_as_pyzstd_ends_one_at_every_flush():
    parts = [b"first" * 1000, b"", b"second" * 100_000]
    body = io.BytesIO(b"".join(map(zstandard.compress, parts)))
    assert undo(body, ZSTD, "w", LIMIT).getvalue() == b"".join(parts)
    twice = io.BytesIO(zstandard.compress(zstandard.compress(b"both")))
    assert undo(twice, ZSTD * 2, "w", LIMIT).getvalue() == b"both"


def zeros_packed(size_bytes: int) -> io.BytesIO:
    packer = zstandard.ZstdCompressor().compressobj()
    piece = bytes(1 << 20)
    return io.BytesIO(
        b"".join(packer.compress(piece) for _ in range(size_bytes >> 20)) + packer.flush()
    )


@pytest.mark.parametrize("limit", [1 << 20, 64 << 20])
def test_a_bomb_is_refused_in_bounded_memory(limit):
    body = zeros_packed(512 << 20)
    assert body.getbuffer().nbytes < 1 << 20
    assert undo(zeros_packed(limit), ZSTD, "w", limit).getbuffer().nbytes == limit
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointCorruptError, match="unpacks to more than"):
            undo(body, ZSTD, "w", limit)
        assert tracemalloc.get_traced_memory()[1] < 3 * limit + (8 << 20)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "case", ["foreign value takes memory: packed, 128 MiB", "zstd: packed archive inside"]
)
def test_a_packed_archive_may_not_unpack_to_more_than_its_shape_or_a_value_has(tmp_path, case):
    for key, body in hostile.CASES[case].build().items():
        (tmp_path / key).write_bytes(body)
    with pytest.raises(CheckpointCorruptError, match="unpack"):
        dos.read_state_dict(tmp_path.as_uri(), progress=False)


def test_a_frame_that_wants_too_much_history_is_refused():
    content = random.Random(1).randbytes(1000)
    for window_log in (27, 28):
        parameters = zstandard.ZstdCompressionParameters(window_log=window_log)
        packer = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
        body = io.BytesIO(packer.compress(content) + packer.flush())
        if window_log == 27:
            assert undo(body, ZSTD, "w", LIMIT).getvalue() == content
        else:
            with pytest.raises(CheckpointCorruptError, match="cannot be unpacked"):
                undo(body, ZSTD, "w", LIMIT)


def replace_items(place: Path, change: Callable[[bytes], bytes]) -> None:
    """Change every item on the store, and where they lie, as a hostile writer could."""
    metadata = pickle.loads((place / ".metadata").read_bytes())
    whole = {one.name: one.read_bytes() for one in place.glob("*.distcp")}
    made = b""
    for info in metadata.storage_data.values():
        item = change(whole[info.relative_path][info.offset : info.offset + info.length])
        info.relative_path, info.offset, info.length = "changed.distcp", len(made), len(item)
        made += item
    (place / "changed.distcp").write_bytes(made)
    (place / ".metadata").write_bytes(pickle.dumps(metadata))


# --- values --------------------------------------------------------------------------------------


class Tagged(torch.Tensor):
    """A subclass that torch does not load safely."""


def test_a_tensor_of_a_class_that_torch_refuses_is_not_called_corrupt(tmp_path):
    place = save({"w": torch.arange(3.0).as_subclass(Tagged)}, tmp_path / "stock")
    error = refused({"w": torch.zeros(3)}, place)
    assert isinstance(error, UntrustedPickleError)
    assert "Tagged" in str(error)
    assert "add_safe_globals" in str(error)
    assert error.key == "w"
    state = {"w": torch.zeros(3)}
    with torch.serialization.safe_globals([Tagged]):
        load(state, place)
    assert torch.equal(state["w"], torch.arange(3.0))


# --- keys ----------------------------------------------------------------------------------------


def nested(value: int) -> dict[str, Any]:
    """Of which torch up to 2.3 flattened only what holds tensors."""
    return {
        "model": {"w": torch.full((3,), float(value))},
        "optimizer": {"state": {"w": {"step": value}}, "groups": [{"lr": value / 4}, {"lr": 9}]},
        "mixed": [torch.full((2,), float(value)), {"plain": value}],
        "settings": {"seed": value, "deep": {"name": str(value)}},
    }


@pytest.mark.parametrize("how", ["dcp", "dos"])
def test_the_keys_of_torch_before_2_4_are_found(tmp_path, monkeypatch, how):
    with monkeypatch.context() as patch:
        patch.setattr(_version, "_derived_version", "2_3")  # torch's own switch for the old format
        place = save(nested(5), tmp_path / "stock")
    saved = pickle.loads((place / ".metadata").read_bytes()).state_dict_metadata
    assert "settings" in saved
    assert "settings.seed" not in saved
    state = nested(0)
    if how == "dcp":
        load(state, place)
    else:
        dos.load(state, f"file://{place}")
    tensors = (state["model"].pop("w"), state["mixed"].pop(0))
    expected = nested(5)
    assert torch.equal(tensors[0], expected["model"].pop("w"))
    assert torch.equal(tensors[1], expected["mixed"].pop(0))
    assert state == expected


def save_apart(rank: int, world_size: int, directory: str) -> None:
    dcp.save(
        {"w": torch.ones(3)}, storage_writer=FileSystemWriter(directory), use_collectives=False
    )


def test_metadata_of_each_rank_is_named_as_what_it_is(tmp_path):
    run_ranks(2, save_apart, str(tmp_path / "stock"))
    assert (tmp_path / "stock" / "__1.metadata").exists()
    error = refused({"w": torch.zeros(3)}, tmp_path / "stock")
    assert isinstance(error, UnsupportedError)
    assert "use_collectives=False" in str(error)


@pytest.mark.parametrize("key", ["w", "v"])
def test_bytes_that_nothing_explains_are_refused_before_they_are_asked_for(tmp_path, key):
    place = save({"w": torch.ones(2), "v": {1, 2}}, tmp_path / "stock")
    metadata = pickle.loads((place / ".metadata").read_bytes())
    (index,) = (index for index in metadata.storage_data if index.fqn == key)
    info = metadata.storage_data[index]
    remove_data(place)
    # What frames a tensor, and its 8 bytes, are no surprise.
    explained = FRAMING_SIZE_BYTES + 8 if key == "w" else 0
    others = sum(one.length for at, one in metadata.storage_data.items() if at.fqn == "v" != key)
    for more in (0, 1):
        length = _MAX_UNEXPLAINED_BYTES + explained - others + more
        metadata.storage_data[index] = dataclasses.replace(info, length=length)
        (place / ".metadata").write_bytes(pickle.dumps(metadata))
        if more:
            with pytest.raises(CheckpointCorruptError, match="framing"):
                dos.open(place.as_uri())
        else:
            assert sorted(dos.open(place.as_uri()).keys()) == ["v", "w"]


def test_a_stock_checkpoint_without_anything_is_one(tmp_path):
    place = save({}, tmp_path / "stock")
    assert not dos.open(place.as_uri()).keys()
    metadata = pickle.loads((save({"w": torch.ones(2)}, place) / ".metadata").read_bytes())
    metadata.storage_data.clear()
    (place / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointNotFoundError, match="where they lie"):
        dos.open(place.as_uri())
