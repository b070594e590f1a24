"""Saved on some ranks, loaded on others: every byte of every shard is the one that was saved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import dcp_objstore as dos
from tests.support.ranks import run_ranks
from tests.support.states import TrainingJob, fill, seeded, tensor_state, wrong_keys
from tests.support.training_jobs import assert_whole, load_job, resume, save_job

Options = Mapping[str, object]


@pytest.mark.backends("seaweed", "moto", "gcs", "azure", "file")
def test_fsdp2_model_and_optimizer_saved_on_8_resume_on_4_and_on_1(bucket):
    url = bucket.at("step-1")
    run_ranks(8, save_job, url, bucket.storage_options)
    assert_whole(bucket, "step-1")
    tensors = run_ranks(4, load_job, url, bucket.storage_options)
    assert len(set(tensors)) == 1
    # In this process, without a process group, into an unsharded model.
    assert not torch.distributed.is_initialized()
    assert resume(TrainingJob(sharded=False), url, bucket.storage_options) == tensors[0]


def save_tensors(
    rank: int, world_size: int, layout: str, url: str, options: Options, **kind: Any
) -> None:
    state = tensor_state(layout, **kind)
    fill(state)
    assert wrong_keys(state) == []
    dcp.save(dict(state), storage_writer=dos.ObjectStoreWriter(url, storage_options=options))


def load_tensors(
    rank: int, world_size: int, layout: str, url: str, options: Options, **kind: Any
) -> None:
    state = tensor_state(layout, **kind)
    dcp.load(dict(state), storage_reader=dos.ObjectStoreReader(url, storage_options=options))
    assert wrong_keys(state) == []


@pytest.mark.parametrize(
    ("saved_on", "saved_as", "loaded_on", "loaded_as"),
    [
        pytest.param(3, "shard0", 5, "shard1", id="3-to-5-uneven"),
        pytest.param(8, "mesh2d", 4, "mesh2d", id="dp4-tp2-to-dp2-tp2"),
        pytest.param(2, "plain", 4, "mesh2d", id="plain-to-mesh2d", marks=pytest.mark.campaign),
    ],
)
def test_resharding_is_bit_identical(bucket, saved_on, saved_as, loaded_on, loaded_as):
    url = bucket.at("step-1")
    run_ranks(saved_on, save_tensors, saved_as, url, bucket.storage_options)
    assert_whole(bucket, "step-1")
    run_ranks(loaded_on, load_tensors, loaded_as, url, bucket.storage_options)
    state = tensor_state("plain")
    reader = dos.ObjectStoreReader(url, storage_options=bucket.storage_options)
    dcp.load(dict(state), storage_reader=reader)
    assert wrong_keys(state) == []


def save_ddp(rank: int, world_size: int, url: str, options: Options) -> dos.reports.SaveReport:
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(7, 5))
    state = model.state_dict()
    fill(state)
    writer = dos.ObjectStoreWriter(url, storage_options=options)
    dcp.save(state, storage_writer=writer)
    assert writer.last_save is not None
    return writer.last_save


def load_ddp(rank: int, world_size: int, url: str, options: Options) -> None:
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(7, 5))
    state = model.state_dict()
    dcp.load(state, storage_reader=dos.ObjectStoreReader(url, storage_options=options))
    assert wrong_keys(state) == []
    assert wrong_keys(model.state_dict()) == []


def test_ddp_replicated_state_is_saved_once_and_loads_on_every_rank(bucket):
    run_ranks(4, save_ddp, bucket.at("step-1"), bucket.storage_options)
    assert_whole(bucket, "step-1")
    stored = b"".join(bucket.get(f"step-1/{key}") for key in bucket.keys("step-1"))
    payload = seeded("module.weight", (5, 7)).numpy().tobytes()
    assert stored.count(payload) == 1, "one copy, whatever the number of ranks"
    run_ranks(2, load_ddp, bucket.at("step-1"), bucket.storage_options)


VALUES: dict[str, Any] = {
    "step": 1234,
    "loss": 0.1 + 0.2,
    "name": "läufer",
    "none": None,
    "flag": True,
    "raw": b"\x00\xff",
    "list": [1, "two", [3.0]],
    "dict": {"a": {"b": [1, 2]}},
    "tuple": (1, 2),
    "size": torch.Size([2, 3]),
    "dtype": torch.bfloat16,
}


def save_values(rank: int, world_size: int, url: str, options: Options) -> None:
    state = {**VALUES, "mine": rank, "tensor": torch.arange(4)}
    dcp.save(state, storage_writer=dos.ObjectStoreWriter(url, storage_options=options))


def load_values(rank: int, world_size: int, url: str, options: Options) -> None:
    state: dict[str, Any] = {
        name: type(value)() if isinstance(value, (int, str)) else value
        for name, value in VALUES.items()
    }
    state |= {"list": [0, "", [0.0]], "dict": {"a": {"b": [0, 0]}}, "tensor": torch.zeros(4).long()}
    dcp.load(state, storage_reader=dos.ObjectStoreReader(url, storage_options=options))
    assert {name: state[name] for name in VALUES} == VALUES
    assert torch.equal(state["tensor"], torch.arange(4))


def test_values_that_are_no_tensors_come_back_equal(bucket):
    run_ranks(2, save_values, bucket.at("step-1"), bucket.storage_options)
    assert_whole(bucket, "step-1")
    run_ranks(3, load_values, bucket.at("step-1"), bucket.storage_options)


MIB = 1024 * 1024
BIG = {"big": (3001, 4096), "small": (3, 3)}


def save_big(rank: int, world_size: int, url: str, options: Options) -> tuple[int, int]:
    state = tensor_state("shard0", BIG, torch.uint8)
    fill(state)
    config = dos.TransferConfig(part_size_bytes=5 * MIB, upload_concurrency=2)
    writer = dos.ObjectStoreWriter(url, storage_options=options, config=config)
    dcp.save(dict(state), storage_writer=writer)
    assert writer.last_save is not None
    return writer.last_save.objects, writer.last_save.parts or 0


def load_big(rank: int, world_size: int, url: str, options: Options) -> None:
    state = tensor_state("shard1", BIG, torch.uint8)
    config = dos.TransferConfig(memory_budget_bytes=8 * MIB, request_size_bytes=4 * MIB)
    reader = dos.ObjectStoreReader(url, storage_options=options, config=config)
    dcp.load(dict(state), storage_reader=reader)
    assert wrong_keys(state) == []


@pytest.mark.backends("seaweed", "moto", "gcs", "azure")
def test_objects_of_several_parts_come_back_through_a_small_memory_budget(bucket):
    (objects, parts), _ = run_ranks(2, save_big, bucket.at("step-1"), bucket.storage_options)
    assert objects == 2
    assert parts == 4, "11.7 MiB in two objects of 5 MiB parts"
    assert_whole(bucket, "step-1")
    run_ranks(3, load_big, bucket.at("step-1"), bucket.storage_options)
