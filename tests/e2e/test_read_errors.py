"""What a load says of a checkpoint that is absent, damaged or different: typed, on every rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import dcp_objstore as dos
from dcp_objstore.errors import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    PermissionDeniedError,
    UntrustedPickleError,
)
from tests.support.checkpoints import Options, cause, causes, load_here, save_edition_here
from tests.support.ranks import try_ranks
from tests.support.servers import READ_ONLY, Bucket
from tests.support.states import seeded, tensor_state


def refused(url: str, options: Options) -> BaseException:
    with pytest.raises(CheckpointException) as caught:
        load_here(url, options)
    return cause(caught.value)


def load_sharded(rank: int, world_size: int, url: str, options: Options) -> None:
    reader = dos.ObjectStoreReader(url, storage_options=options)
    dcp.load(dict(tensor_state("shard0")), storage_reader=reader)


def data_keys(bucket: Bucket, name: str) -> list[str]:
    return [key for key in bucket.keys(name) if key.endswith(".distcp")]


@pytest.mark.backends("seaweed", "moto", "gcs")
def test_a_checkpoint_that_was_never_saved_is_not_found_on_every_rank(bucket):
    for outcome in try_ranks(2, load_sharded, bucket.at("step-9"), bucket.storage_options):
        errors = causes(outcome.error)
        assert {type(error) for error in errors} == {CheckpointNotFoundError}
        assert all(error.url == bucket.at("step-9") for error in errors)
        assert "step-9" in str(errors[0])


def test_a_checkpoint_without_its_marker_is_not_found(bucket):
    url, options = bucket.at("step-1"), bucket.storage_options
    save_edition_here("lost", url, options)
    bucket.delete("step-1/_COMMIT")
    bucket.delete("step-1/.metadata")
    assert data_keys(bucket, "step-1")
    assert isinstance(refused(url, options), CheckpointNotFoundError)


def test_unverified_loading_is_possible_but_only_on_request(bucket):
    url, options = bucket.at("step-1"), bucket.storage_options
    save_edition_here("good", url, options)
    (key,) = data_keys(bucket, "step-1")
    payload = seeded("good/even", (16, 8)).numpy().tobytes()
    bucket.flip_byte(f"step-1/{key}", bucket.get(f"step-1/{key}").index(payload))
    assert isinstance(refused(url, options), CheckpointCorruptError)
    reader = dos.ObjectStoreReader(url, storage_options=options, verify=False)
    dcp.load(dict(tensor_state("plain")), storage_reader=reader)


def load_more_than_there_is(rank: int, world_size: int, url: str, options: Options) -> None:
    state = {**tensor_state("shard0"), "evem": torch.zeros(3)}
    dcp.load(state, storage_reader=dos.ObjectStoreReader(url, storage_options=options))


def load_another_shape(rank: int, world_size: int, url: str, options: Options) -> None:
    state = {**tensor_state("plain"), "even": torch.zeros(16, 9)}
    dcp.load(state, storage_reader=dos.ObjectStoreReader(url, storage_options=options))


def test_a_key_or_shape_that_the_checkpoint_lacks_is_named_on_every_rank(bucket):
    url, options = bucket.at("step-1"), bucket.storage_options
    save_edition_here("good", url, options)
    for outcome in try_ranks(2, load_more_than_there_is, url, options):
        assert "evem" in str(outcome.error)
    for outcome in try_ranks(2, load_another_shape, url, options):
        assert "even" in str(outcome.error)


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


def test_a_state_without_tensors_can_be_saved_and_loaded(bucket):
    url, options = bucket.at("step-1"), bucket.storage_options
    dcp.save({"step": 3}, storage_writer=dos.ObjectStoreWriter(url, storage_options=options))
    state = {"step": 0}
    dcp.load(state, storage_reader=dos.ObjectStoreReader(url, storage_options=options))
    assert state == {"step": 3}


@pytest.mark.backends("moto")
def test_a_value_that_needs_unpickling_is_refused_until_it_is_trusted(bucket):
    url, options = bucket.at("step-1"), bucket.storage_options
    place = slice(3, 7)
    writer = dos.ObjectStoreWriter(url, storage_options=options)
    with pytest.warns(UserWarning, match="place"):
        dcp.save({"place": place, "step": 1}, storage_writer=writer)
    with pytest.raises(CheckpointException) as caught:
        reader = dos.ObjectStoreReader(url, storage_options=options)
        dcp.load({"place": None, "step": 0}, storage_reader=reader)
    error = cause(caught.value)
    assert isinstance(error, UntrustedPickleError)
    assert error.key == "place"
    state = {"place": None, "step": 0}
    reader = dos.ObjectStoreReader(url, storage_options=options, trust_pickle=True)
    dcp.load(state, storage_reader=reader)
    assert state == {"place": place, "step": 1}
