"""Stock torch reads what we wrote, after a plain download; we read what stock torch wrote."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

import dcp_objstore as dos
from tests.support.campaign import cases
from tests.support.checkpoints import Options
from tests.support.ranks import run_ranks
from tests.support.servers import Bucket
from tests.support.states import (
    ALL_DTYPES,
    fill,
    flat,
    same_bits,
    seeded,
    tensor_state,
    wrong_keys,
)

# torch's own loaders go through `torch.load`, which cannot rebuild this dtype in every version.
STOCK_DTYPES = [dtype for dtype in ALL_DTYPES if dtype is not torch.complex32]


def mixed_state(layout: str) -> dict[str, Any]:
    """Sharded and plain tensors of many dtypes, nested, and values."""
    dtypes = {
        str(dtype).removeprefix("torch."): tensor_state("plain", {"t": (3, 5), "s": ()}, dtype)
        for dtype in STOCK_DTYPES
    }
    return {
        "sharded": tensor_state(layout),
        "dtypes": dtypes,
        "empty": torch.zeros(0, 3),
        "values": {"step": 7, "name": "run", "list": [1, 2], "none": None},
    }


def save_ours(rank: int, world_size: int, url: str, options: Options) -> None:
    state = mixed_state("shard0")
    fill(state)
    dcp.save(state, storage_writer=dos.ObjectStoreWriter(url, storage_options=options))


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder, as a download makes one."""
    folder = tmp_path_factory.mktemp("ours") / "step-1"
    run_ranks(3, save_ours, folder.as_uri(), {})
    return folder


def check(state: dict[str, Any]) -> None:
    assert wrong_keys(state) == []
    assert state["values"] == {"step": 7, "name": "run", "list": [1, 2], "none": None}


def fresh() -> dict[str, Any]:
    state = mixed_state("plain")
    state["values"] = {"step": 0, "name": "", "list": [0, 0], "none": None}
    return state


def stock_load_sharded(rank: int, world_size: int, directory: str) -> None:
    state = fresh() | {"sharded": tensor_state("shard1")}
    dcp.load(state, storage_reader=FileSystemReader(directory))
    check(state)


def test_stock_readers_load_ours_after_a_plain_download(bucket, tmp_path):
    run_ranks(3, save_ours, bucket.at("step-1"), bucket.storage_options)
    downloaded = bucket.download("step-1", tmp_path / "step-1")
    for reader in (FileSystemReader(downloaded), FsspecReader(f"file://{downloaded}")):
        state = fresh()
        dcp.load(state, storage_reader=reader)
        check(state)
    run_ranks(2, stock_load_sharded, str(downloaded))


def test_stock_dcp_to_torch_save_converts_ours(ours, tmp_path):
    dcp_to_torch_save(ours, tmp_path / "whole.pt")
    state = torch.load(tmp_path / "whole.pt", weights_only=True)
    check(state)


@pytest.mark.filterwarnings("ignore:torch.distributed is unavailable:UserWarning")
def test_stock_load_from_keys_reads_ours(ours):
    state = _load_state_dict_from_keys("sharded.even", checkpoint_id=ours)
    assert same_bits(flat(state)["sharded.even"], seeded("sharded.even", (16, 8)))
    everything = _load_state_dict_from_keys(checkpoint_id=ours)
    assert set(flat(everything)) == set(flat(fresh()))


def test_the_pickled_metadata_holds_only_what_stock_torch_has(ours):
    class StockOnly(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            package = module.split(".", maxsplit=1)[0]
            assert package in {"torch", "builtins", "collections"}, (module, name)
            return super().find_class(module, name)

    with (ours / ".metadata").open("rb") as stream:
        metadata = StockOnly(stream).load()
    assert isinstance(metadata.storage_meta.checkpoint_id, str)


def upload(directory: Path, bucket: Bucket, name: str) -> None:
    for place in sorted(directory.rglob("*")):
        if place.is_file():
            bucket.put(f"{name}/{place.relative_to(directory)}", place.read_bytes())


def save_stock(rank: int, world_size: int, kind: str, directory: str) -> None:
    state = mixed_state("shard0")
    fill(state)
    writers = {
        "file": lambda: FileSystemWriter(directory),
        "fsspec": lambda: FsspecWriter(f"file://{directory}"),
        "zstd": lambda: FileSystemWriter(directory, _extensions=[ZStandard()]),
    }
    dcp.save(state, storage_writer=writers[kind]())


def load_ours_sharded(rank: int, world_size: int, url: str, options: Options) -> None:
    state = fresh() | {"sharded": tensor_state("shard1")}
    dcp.load(state, storage_reader=dos.ObjectStoreReader(url, storage_options=options))
    check(state)


@pytest.mark.parametrize("kind", cases(["file", "fsspec", "zstd"], default=["fsspec", "zstd"]))
def test_ours_reads_what_stock_writers_wrote(bucket, kind, tmp_path):
    run_ranks(3, save_stock, kind, str(tmp_path / "stock"))
    metadata = pickle.loads((tmp_path / "stock" / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        assert info.transform_descriptors == (["stream.zstd/1"] if kind == "zstd" else None)
    upload(tmp_path / "stock", bucket, "stock")
    run_ranks(2, load_ours_sharded, bucket.at("stock"), bucket.storage_options)
    state = fresh()
    reader = dos.ObjectStoreReader(bucket.at("stock"), storage_options=bucket.storage_options)
    dcp.load(state, storage_reader=reader)
    check(state)
