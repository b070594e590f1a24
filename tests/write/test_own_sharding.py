"""A tensor that says itself how DCP shards it is saved in the background as in the foreground."""

from __future__ import annotations

import functools
import pickle
import types
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import dcp_objstore as dos
from dcp_objstore.write.staging.state import stage
from tests.support.campaign import cases
from tests.support.checkpoints import memory_url
from tests.support.ranks import run_ranks

# Two halves of a tensor of four rows, which lie the other way round in memory.
_HALF = torch.Size((2, 3))
_PLACES = {torch.Size((0, 0)): 2, torch.Size((2, 0)): 0}
_WHOLE = torch.arange(12.0).view(4, 3)


def chunks() -> list[ChunkStorageMetadata]:
    return [ChunkStorageMetadata(offsets, _HALF) for offsets in _PLACES]


def write_items(key: str, value: torch.Tensor) -> list[WriteItem]:
    properties = TensorProperties(dtype=torch.float32)
    return [
        WriteItem(
            MetadataIndex(key, chunk.offsets),
            WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk, properties, torch.Size((4, 3))),
        )
        for chunk in chunks()
    ]


def shard(tensor: torch.Tensor, index: MetadataIndex) -> torch.Tensor:
    assert index.offset is not None
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local[_PLACES[index.offset] :][:2]


def turned(tensor: Any, by: str = "partial") -> Any:
    """The same tensor, with methods of its own by which its halves are turned round."""
    tensor.__create_write_items__ = write_items
    tensor.__create_chunk_list__ = chunks
    tensor.__get_tensor_shard__ = {
        "partial": functools.partial(shard, tensor),
        "method": types.MethodType(shard, tensor),
        "function": lambda index: shard(tensor, index),
    }[by]
    return tensor


def memory() -> torch.Tensor:
    return torch.cat([_WHOLE[2:], _WHOLE[:2]])


def dtensor(local: torch.Tensor) -> DTensor:
    return DTensor.from_local(local, init_device_mesh("cpu", (1,)), [Shard(0)])


def kinds() -> dict[str, Any]:
    around = dtensor(memory())
    turned(around._local_tensor)
    return {
        "plain": turned(memory()),
        "method": turned(memory(), "method"),
        "parameter": turned(torch.nn.Parameter(memory())),
        "transposed": turned(memory().t().contiguous().t()),
        "around": around,
        "itself": turned(dtensor(memory())),
        "nested": {"list": [turned(memory())]},
    }


def test_a_background_save_takes_the_shards_that_a_tensor_names(world):
    def async_save(state: dict[str, Any], url: str) -> None:
        dos.async_save(state, url).result()

    def by_dcp(state: dict[str, Any], url: str) -> None:
        done: Any = dcp.async_save(state, storage_writer=dos.ObjectStoreWriter(url))
        done.result()

    for save in (dos.save, async_save, by_dcp):
        url, state = memory_url(), kinds()
        save(state, url)
        saved = dos.read_state_dict(url)
        whole = [*(saved[key] for key in state if key != "nested"), saved["nested"]["list"][0]]
        assert all(torch.equal(value, _WHOLE) for value in whole), save
        assert dos.open(url).verify(deep=True).ok
        loaded: Any = kinds()
        for value in loaded.values():
            if isinstance(value, torch.Tensor):
                torch.nn.init.zeros_(value)
        dos.load(loaded, url, progress=False)
        assert torch.equal(loaded["plain"], memory())
        assert torch.equal(loaded["around"].to_local(), memory())
        assert torch.equal(loaded["itself"].to_local(), memory())


@pytest.mark.parametrize("by", ["partial", "method"])
def test_what_training_changes_during_a_background_save_is_not_saved(world, by):
    state = {"plain": turned(memory(), by), "itself": turned(dtensor(memory()), by)}
    staged = stage(state)
    state["plain"].zero_()
    state["itself"].to_local().zero_()
    url = memory_url()
    dos.save(dict(staged), url)
    assert torch.equal(dos.read_state_dict(url)["plain"], _WHOLE)
    assert torch.equal(dos.read_state_dict(url)["itself"], _WHOLE)


def test_a_child_that_saves_gets_the_sharding_with_the_memory():
    sent = ForkingPickler.dumps(stage({"t": turned(memory()), "other": torch.ones(2)}))
    received = pickle.loads(sent)
    url = memory_url()
    dos.save(received, url)
    assert torch.equal(dos.read_state_dict(url)["t"], _WHOLE)


def test_a_method_that_can_only_return_what_training_changes_is_refused():
    url, state = memory_url(), {"model": {"t": turned(memory(), "function")}}
    with pytest.raises(dos.errors.UnsupportedError, match=r"functools\.partial") as refused:
        dos.async_save(state, url).result()
    assert refused.value.key == "model"
    with pytest.raises(dos.errors.CheckpointNotFoundError):
        dos.open(url)
    dos.save(state, url)
    assert torch.equal(dos.read_state_dict(url)["model"]["t"], _WHOLE)


def test_a_later_save_takes_the_shards_that_a_tensor_names_by_then():
    tensor = memory()
    for step in (1, 2, 3):
        url = memory_url()
        if step == 2:
            turned(tensor)
        dos.async_save({"t": tensor}, url).result()
        expected = memory() if step == 1 else _WHOLE
        assert torch.equal(dos.read_state_dict(url)["t"], expected), step
        if step == 2:
            vars(tensor).clear()
            tensor.copy_(_WHOLE)


# Ranks --------------------------------------------------------------------------------------------


def part(rank: int, fill: float) -> Any:
    """Two of four rows, as a `CheckpointableTensor` of torch 2.14 and later."""
    tensor: Any = torch.full((3, 4), fill)
    tensor.global_shape = (4, 4)
    tensor.global_offsets = ((2 * rank, 0),)
    tensor.local_offsets = ((1, 0),)  # below a row of padding
    tensor.local_sizes = ((2, 4),)
    return tensor


def uneven(rank: int, fill: float) -> DTensor:
    """One row of four on rank 0 and three on rank 1, as Megatron-FSDP has it."""
    rows = (1, 3)[rank]
    made = DTensor.from_local(
        torch.full((rows, 4), fill),
        init_device_mesh("cpu", (2,)),
        [Shard(0)],
        run_check=False,
        shape=torch.Size((4, 4)),
        stride=(4, 1),
    )
    local: Any = made._local_tensor
    chunk = ChunkStorageMetadata(torch.Size((rank, 0)), torch.Size((rows, 4)))
    data = TensorWriteData(chunk, TensorProperties(dtype=torch.float32), torch.Size((4, 4)))
    local.__create_chunk_list__ = lambda: [chunk]
    local.__create_write_items__ = lambda key, _: [
        WriteItem(MetadataIndex(key, chunk.offsets), WriteItemType.SHARD, tensor_data=data)
    ]
    return made


def save_and_load(rank: int, world_size: int, url: str, kind: str, in_child: bool) -> Any:
    make = {"part": part, "uneven": uneven}[kind]
    group = dist.new_group(backend="gloo")
    state = {"t": make(rank, rank + 1.0)}

    def by_dcp(at: str, **settings: Any) -> None:
        writer = dos.ObjectStoreWriter(at)
        done: Any = dcp.async_save(state, storage_writer=writer, process_group=group, **settings)
        done.result()

    dos.save(state, f"{url}/0")
    dos.async_save(state, f"{url}/1").result()
    by_dcp(f"{url}/2")
    if in_child:
        by_dcp(f"{url}/3", async_checkpointer_type=AsyncCheckpointerType.PROCESS)
    loaded = {"t": make(rank, 0.0)}
    dos.load(loaded, f"{url}/0", progress=False)
    local = loaded["t"].to_local() if kind == "uneven" else loaded["t"][1:]
    assert torch.equal(local, torch.full_like(local, rank + 1.0))


_KNOWS_PARTS = hasattr(dcp, "CheckpointableTensor")


def check_saves(url: str, kind: str, rows_of_first: int, *, in_child: bool) -> None:
    run_ranks(2, save_and_load, url, kind, in_child)
    rows = [[1.0] * 4] * rows_of_first + [[2.0] * 4] * (4 - rows_of_first)
    for save in range(3 + in_child):
        assert dos.read_state_dict(f"{url}/{save}")["t"].tolist() == rows, save


def test_a_background_save_of_dtensors_takes_the_chunks_that_their_shards_name(tmp_path):
    check_saves(tmp_path.as_uri(), "uneven", 1, in_child=False)


@pytest.mark.skipif(not _KNOWS_PARTS, reason="CheckpointableTensor: torch 2.14")
@pytest.mark.parametrize("in_child", cases([False, True], default=[False]))
def test_a_background_save_of_checkpointable_tensors_has_all_parts(tmp_path, in_child):
    check_saves(tmp_path.as_uri(), "part", 2, in_child=in_child)


@pytest.mark.skipif(not _KNOWS_PARTS, reason="CheckpointableTensor: torch 2.14")
def test_a_part_of_another_whole_than_was_saved_is_refused_with_the_shapes_of_both():
    url, saved, other = memory_url(), torch.ones(2, 4), part(0, 0.0)
    dos.save({"t": saved}, url)
    with pytest.raises(dos.errors.StateMismatchError, match=r"\(2, 4\), the state has \(4, 4\)"):
        dos.load({"t": other}, url, progress=False)
