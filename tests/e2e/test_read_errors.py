"""What a load says of a checkpoint that is absent, damaged or different: typed, on every rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import dcp_objstore as dos
from dcp_objstore.errors import (
    CheckpointNotFoundError,
    PermissionDeniedError,
)
from tests.support.checkpoints import Options, cause, causes, load_here, save_edition_here
from tests.support.ranks import run_ranks, try_ranks
from tests.support.servers import READ_ONLY
from tests.support.states import tensor_state


def load_sharded(rank: int, world_size: int, url: str, options: Options) -> None:
    reader = dos.ObjectStoreReader(url, storage_options=options)
    dcp.load(dict(tensor_state("shard0")), storage_reader=reader)


@pytest.mark.backends("seaweed", "gcs")
def test_a_checkpoint_that_was_never_saved_is_not_found_on_every_rank(bucket):
    for outcome in try_ranks(2, load_sharded, bucket.at("step-9"), bucket.storage_options):
        errors = causes(outcome.error)
        assert {type(error) for error in errors} == {CheckpointNotFoundError}
        assert all(error.url == bucket.at("step-9") for error in errors)
        assert "step-9" in str(errors[0])


def load_wrongly(rank: int, world_size: int, url: str, options: Options) -> None:
    for state, key in (
        ({**tensor_state("shard0"), "evem": torch.zeros(3)}, "evem"),
        ({**tensor_state("plain"), "even": torch.zeros(16, 9)}, "even"),
    ):
        with pytest.raises(CheckpointException, match=key):
            dcp.load(state, storage_reader=dos.ObjectStoreReader(url, storage_options=options))


def test_a_key_or_shape_that_the_checkpoint_lacks_is_named_on_every_rank(bucket):
    url, options = bucket.at("step-1"), bucket.storage_options
    save_edition_here("good", url, options)
    run_ranks(2, load_wrongly, url, options)


@pytest.mark.backends("seaweed")
def test_credentials_that_may_only_read_load_but_cannot_save(bucket):
    options = {**bucket.storage_options, **READ_ONLY}
    save_edition_here("good", bucket.at("step-1"), bucket.storage_options)
    load_here(bucket.at("step-1"), options)
    before = bucket.keys()
    with pytest.raises(CheckpointException) as caught:
        save_edition_here("never", bucket.at("step-2"), options)
    assert isinstance(cause(caught.value), PermissionDeniedError)
    assert bucket.keys() == before
