"""Checkpoints of other versions of torch, of Megatron-Core and of MSC load, every value of them.

`fixtures` holds small ones that the checkpoint packages of other releases of torch and that
Megatron-Core wrote (see `make.py` there). What other versions of Python and multi-storage-client
write is made here: the tensors and values by the installed torch, the `.metadata` in the layout
that their sources show (see `tests.support.layouts`).
"""

from __future__ import annotations

import pickle
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import dcp_objstore as dos
from dcp_objstore.compat.foreign import decode_metadata
from tests.support import layouts
from tests.support.layouts import Layout


def some_state() -> dict[str, Any]:
    return {
        "weight": torch.arange(12.0).reshape(4, 3),
        "bias": torch.nn.Parameter(torch.full((3,), 2.0)),
        "transposed": torch.arange(6).reshape(2, 3).t(),
        "scalar": torch.tensor(2.5, dtype=torch.bfloat16),
        "nested": {"list": [torch.ones(2), {"deep": 5}], "step": 7},
    }


def empty_state() -> dict[str, Any]:
    return {
        "weight": torch.zeros(4, 3),
        "bias": torch.nn.Parameter(torch.zeros(3)),
        "transposed": torch.zeros(3, 2, dtype=torch.int64),
        "scalar": torch.tensor(0.0, dtype=torch.bfloat16),
        "nested": {"list": [torch.zeros(2), {"deep": 0}], "step": 0},
    }


@pytest.fixture
def written(tmp_path: Path) -> Path:
    place = tmp_path / "stock"
    dcp.save(some_state(), storage_writer=dcp.FileSystemWriter(place), no_dist=True)
    return place


def rewrite(place: Path, layout: Layout) -> None:
    """Put the `.metadata` into another layout."""
    body = (place / ".metadata").read_bytes()
    (place / ".metadata").write_bytes(layout.pickled(pickle.loads(body)))


def load(place: Path) -> dict[str, Any]:
    state = empty_state()
    dcp.load(state, storage_reader=dos.ObjectStoreReader(f"file://{place}"), no_dist=True)
    return state


def check(state: dict[str, Any]) -> None:
    for (key, value), (_, expected) in zip(state.items(), some_state().items(), strict=True):
        if key != "nested":
            assert torch.equal(value, expected), key
    assert torch.equal(state["nested"]["list"][0], torch.ones(2))
    assert state["nested"]["list"][1] == {"deep": 5}
    assert state["nested"]["step"] == 7


FIXTURES = Path(__file__).parents[1] / "fixtures"
STOCK = {one.stem: one for one in (FIXTURES / "stock").glob("*.zip")}
MEGATRON = {one.stem: one for one in (FIXTURES / "megatron").glob("*.zip")}


def unpack(fixture: Path, place: Path) -> None:
    with zipfile.ZipFile(fixture) as archive:
        archive.extractall(place)


def test_the_fixtures_are_there():
    assert len(MEGATRON) >= 4
    assert {"torch-2.1.2", "torch-2.6.0", "torch-2.15.0", "torch-2.15.0-zstd"} <= STOCK.keys()
    assert len(STOCK) >= 11


@pytest.mark.parametrize("how", ["dcp", "dos"])
@pytest.mark.parametrize("writer", sorted(STOCK))
def test_what_other_releases_of_torch_wrote_loads(tmp_path, writer, how):
    unpack(STOCK[writer], tmp_path)
    state: dict[str, Any] = {
        "weight": torch.zeros(4, 6),
        "transposed": torch.zeros(4, 6),
        "view": torch.zeros(2, 6),
        "parameter": torch.nn.Parameter(torch.zeros(4, 6)),
        "low": torch.zeros(4, 6).to(torch.float8_e4m3fn),
        "scalar": torch.tensor(0.0, dtype=torch.bfloat16),
        "empty": torch.zeros(0, 3),
        "nested": {"list": [torch.zeros(2), {"deep": 0}], "step": 0, "groups": [{"lr": 0.0}]},
    }
    if how == "dcp":
        reader = dos.ObjectStoreReader(f"file://{tmp_path}")
        dcp.load(state, storage_reader=reader, no_dist=True)
    else:
        dos.load(state, f"file://{tmp_path}")
    full = torch.arange(24.0).reshape(4, 6)
    for key in ("weight", "transposed", "parameter"):
        assert torch.equal(state[key], full), key
    assert torch.equal(state["view"], full[1:3])
    assert torch.equal(
        state["low"].view(torch.uint8), full.to(torch.float8_e4m3fn).view(torch.uint8)
    )
    assert state["scalar"].item() == 2.5
    nested = state["nested"]
    assert torch.equal(nested["list"].pop(0), torch.ones(2))
    assert nested == {"list": [{"deep": 5}], "step": 7, "groups": [{"lr": 0.5}]}


@pytest.mark.parametrize("writer", sorted(MEGATRON))
def test_what_megatron_core_wrote_loads(tmp_path, writer):
    unpack(MEGATRON[writer], tmp_path)
    body = (tmp_path / ".metadata").read_bytes()
    assert b"all_local_plans" in body
    assert (b"MCoreSavePlan" in body) == (writer < "megatron-core-0.16")
    assert (b"MCoreMetadata" in body) == ("0.15" in writer)
    state: dict[str, Any] = {
        "weight": torch.zeros(4, 6),
        "bias": torch.zeros(3),
        "object/shard_0_1": None,
    }
    reader = dos.ObjectStoreReader(f"file://{tmp_path}")
    dcp.load(state, storage_reader=reader, no_dist=True)
    assert torch.equal(state["weight"], torch.arange(24.0).reshape(4, 6))
    assert torch.equal(state["bias"], torch.ones(3))
    assert state["object/shard_0_1"] == [{"x": 5}]


# Of which there is no fixture.
LAYOUTS = {
    "torch 2.3": Layout(metadata_lacks=("storage_meta", "version")),
    "torch 2.15 on Python 3.14": Layout(strides=True, protocol=5),
    "Python 3.11.0": Layout(enum_by_name=True),
    "Python 3.11.0 and torch up to 2.2": Layout(
        metadata_lacks=("storage_meta", "version"),
        properties=layouts.sharded.TensorProperties,
        enum_by_name=True,
    ),
    "Python 3.13": Layout(path=layouts.PosixPathOfPython313),
    "FsspecWriter": Layout(path=str),
    "multi-storage-client": Layout(path=layouts.multi_storage_path),
}


@pytest.mark.parametrize("writer", LAYOUTS)
def test_every_known_layout_loads(written, writer):
    before = set(sys.modules)
    rewrite(written, LAYOUTS[writer])
    check(load(written))
    assert not {name for name in set(sys.modules) - before if name.startswith(("mega", "multi"))}


@pytest.mark.parametrize("by_name", [False, True])
def test_the_plans_that_megatron_keeps_in_its_metadata_are_dropped(written, by_name):
    plain = pickle.loads((written / ".metadata").read_bytes())
    extra = {"all_local_plans": layouts.megatron_plans(plain), "mcore_data": layouts.MCORE_DATA}
    layout = Layout(metadata=layouts.MCORE_METADATA, extra=extra, enum_by_name=by_name)
    rewrite(written, layout)
    body = (written / ".metadata").read_bytes()
    assert b"MCoreSavePlan" in body
    assert b"WriteItemType" in body
    assert vars(decode_metadata(body)).keys() == vars(plain).keys()
    check(load(written))


def test_the_stand_ins_pickle_what_stock_torch_writes(written):
    body = (written / ".metadata").read_bytes()
    assert pickle.loads(Layout().pickled(pickle.loads(body))) == pickle.loads(body)
