"""A training job that is saved by some ranks and resumed by others."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed.checkpoint as dcp

import dcp_objstore as dos
from tests.support.servers import Bucket
from tests.support.states import TrainingJob, fill, flat, wrong_keys

Options = Mapping[str, object]


def save_job(rank: int, world_size: int, url: str, options: Options) -> None:
    job = TrainingJob(sharded=True, lr=0.25)
    state = job.state()
    fill(state)
    dcp.save(state, storage_writer=dos.ObjectStoreWriter(url, storage_options=options))


def load_job(rank: int, world_size: int, url: str, options: Options) -> int:
    return resume(TrainingJob(sharded=world_size > 0), url, options)


def resume(job: TrainingJob, url: str, options: Options) -> int:
    """Load into the job; the number of tensors checked."""
    state = job.state()
    assert wrong_keys(state), "the fresh state already has the saved values"
    dcp.load(state, storage_reader=dos.ObjectStoreReader(url, storage_options=options))
    assert wrong_keys(state) == []
    job.adopt(state)
    assert wrong_keys(job.state()) == []
    lrs = {value for key, value in flat(job.state()).items() if key.endswith(".lr")}
    assert lrs == {0.25}
    return sum(isinstance(value, torch.Tensor) for value in flat(state).values())


def assert_whole(bucket: Bucket, name: str) -> None:
    keys = bucket.keys(name)
    assert "_COMMIT" in keys
    assert ".metadata" in keys
    assert bucket.uploads() == []
