"""What a load says of a checkpoint that is absent, damaged or different: typed, on every rank."""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import dcp_objstore as dos
from dcp_objstore.errors import (
    BucketNotFoundError,
    CheckpointCorruptError,
    CheckpointNotFoundError,
    CredentialsError,
    InputError,
    PermissionDeniedError,
    StoreUnavailableError,
    UntrustedPickleError,
)
from tests.support.checkpoints import (
    Options,
    cause,
    causes,
    load_here,
    save_edition,
    save_edition_here,
)
from tests.support.ranks import run_ranks, try_ranks
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
def test_a_checkpoint_that_was_never_saved_is_not_found_on_every_rank(bucket: Bucket) -> None:
    for outcome in try_ranks(2, load_sharded, bucket.at("step-9"), bucket.storage_options):
        errors = causes(outcome.error)
        assert {type(error) for error in errors} == {CheckpointNotFoundError}
        assert all(error.url == bucket.at("step-9") for error in errors)
        assert "step-9" in str(errors[0])


def test_a_checkpoint_without_its_marker_is_not_found(bucket: Bucket) -> None:
    url, options = bucket.at("step-1"), bucket.storage_options
    save_edition_here("lost", url, options)
    bucket.delete("step-1/_COMMIT")
    bucket.delete("step-1/.metadata")
    assert data_keys(bucket, "step-1")
    assert isinstance(refused(url, options), CheckpointNotFoundError)


def test_a_flipped_byte_is_found_and_named_with_object_and_key(bucket: Bucket) -> None:
    url, options = bucket.at("step-1"), bucket.storage_options
    run_ranks(2, save_edition, "good", url, options)
    payload = seeded("good/even", (16, 8))[8:].numpy().tobytes()  # the second rank's half
    (damaged,) = [key for key in data_keys(bucket, "step-1") if key.startswith("__1_")]
    at = bucket.get(f"step-1/{damaged}").index(payload)
    bucket.flip_byte(f"step-1/{damaged}", at + len(payload) // 2)
    for outcome in try_ranks(2, load_sharded, url, options):
        error = cause(outcome.error)
        assert isinstance(error, CheckpointCorruptError)
        assert error.object_key is not None
        assert error.object_key.endswith(damaged)
        assert error.key == "even"
        assert error.rank == 1, "only the rank that reads those bytes can tell"


def test_unverified_loading_is_possible_but_only_on_request(bucket: Bucket) -> None:
    url, options = bucket.at("step-1"), bucket.storage_options
    save_edition_here("good", url, options)
    (key,) = data_keys(bucket, "step-1")
    payload = seeded("good/even", (16, 8)).numpy().tobytes()
    bucket.flip_byte(f"step-1/{key}", bucket.get(f"step-1/{key}").index(payload))
    assert isinstance(refused(url, options), CheckpointCorruptError)
    reader = dos.ObjectStoreReader(url, storage_options=options, verify="off")
    dcp.load(dict(tensor_state("plain")), storage_reader=reader)


@pytest.mark.parametrize("end", [".msgpack", ".distcp"])
@pytest.mark.parametrize("damage", ["missing", "shorter", "flipped"])
def test_a_damaged_index_or_object_is_corruption_and_named(
    bucket: Bucket, damage: str, end: str
) -> None:
    url, options = bucket.at("step-1"), bucket.storage_options
    save_edition_here("good", url, options)
    (key,) = [one for one in bucket.keys("step-1") if one.endswith(end)]
    first = seeded("good/even", (16, 8)).numpy().tobytes() if end == ".distcp" else b"even"
    if damage == "missing":
        bucket.delete(f"step-1/{key}")
    elif damage == "flipped":
        bucket.flip_byte(f"step-1/{key}", bucket.get(f"step-1/{key}").index(first))
    else:
        bucket.put(f"step-1/{key}", bucket.get(f"step-1/{key}")[:200])
    error = refused(url, options)
    assert isinstance(error, CheckpointCorruptError)
    assert key in str(error)


def test_a_marker_that_was_tampered_with_is_corruption(bucket: Bucket) -> None:
    url, options = bucket.at("step-1"), bucket.storage_options
    save_edition_here("good", url, options)
    marker = json.loads(bucket.get("step-1/_COMMIT"))
    bucket.put("step-1/_COMMIT", json.dumps({**marker, "world_size": 77}).encode())
    assert isinstance(refused(url, options), CheckpointCorruptError)
    bucket.put("step-1/_COMMIT", b"")
    assert isinstance(refused(url, options), CheckpointCorruptError)


def load_more_than_there_is(rank: int, world_size: int, url: str, options: Options) -> None:
    state = {**tensor_state("shard0"), "evem": torch.zeros(3)}
    dcp.load(state, storage_reader=dos.ObjectStoreReader(url, storage_options=options))


def load_another_shape(rank: int, world_size: int, url: str, options: Options) -> None:
    state = {**tensor_state("plain"), "even": torch.zeros(16, 9)}
    dcp.load(state, storage_reader=dos.ObjectStoreReader(url, storage_options=options))


def test_a_key_or_shape_that_the_checkpoint_lacks_is_named_on_every_rank(bucket: Bucket) -> None:
    url, options = bucket.at("step-1"), bucket.storage_options
    save_edition_here("good", url, options)
    for outcome in try_ranks(2, load_more_than_there_is, url, options):
        assert "evem" in str(outcome.error)
    for outcome in try_ranks(2, load_another_shape, url, options):
        assert "even" in str(outcome.error)


def save_and_load_errors(url: str, options: Options) -> list[BaseException]:
    found = [refused(url, options)]
    with pytest.raises(CheckpointException) as caught:
        save_edition_here("never", url, options)
    return [*found, cause(caught.value)]


def test_a_missing_bucket_is_named(bucket: Bucket) -> None:
    scheme = bucket.url.split("://")[0]
    errors = save_and_load_errors(f"{scheme}://no-such-bucket-here/step-1", bucket.storage_options)
    for error in errors:
        assert isinstance(error, BucketNotFoundError), repr(error)
        assert "no-such-bucket-here" in str(error)


@pytest.mark.backends("seaweed")  # moto checks no credentials
def test_wrong_credentials_are_an_input_error_without_the_secret(bucket: Bucket) -> None:
    secret = "wrong-secret-value-0123456789"
    for changed in ({"secret": secret}, {"key": "UNKNOWNKEY", "secret": secret}):
        for error in save_and_load_errors(
            bucket.at("step-1"), {**bucket.storage_options, **changed}
        ):
            assert isinstance(error, (CredentialsError, PermissionDeniedError)), repr(error)
            assert secret not in str(error)
    assert bucket.keys() == []


@pytest.mark.backends("seaweed")
def test_credentials_that_may_only_read_load_but_cannot_save(bucket: Bucket) -> None:
    options = {**bucket.storage_options, **READ_ONLY}
    save_edition_here("good", bucket.at("step-1"), bucket.storage_options)
    load_here(bucket.at("step-1"), options)
    before = bucket.keys()
    with pytest.raises(CheckpointException) as caught:
        save_edition_here("never", bucket.at("step-2"), options)
    assert isinstance(cause(caught.value), PermissionDeniedError)
    assert bucket.keys() == before


def test_a_store_that_nobody_serves_is_an_error_within_bounds() -> None:
    options = {"key": "k", "secret": "s", "endpoint_url": "http://127.0.0.1:9"}
    config = dos.TransferConfig(max_retries=1, retry_timeout_seconds=1, connect_timeout_seconds=1)
    reader = dos.ObjectStoreReader("s3://some-bucket/x", storage_options=options, config=config)
    with pytest.raises(CheckpointException) as caught:
        dcp.load(dict(tensor_state("plain")), storage_reader=reader)
    assert isinstance(cause(caught.value), StoreUnavailableError)


@pytest.mark.parametrize(
    "url", ["s4://bucket/x", "s3:/bucket/x", "s3://", "bucket/x", "s3://key:secret@bucket/x"]
)
def test_a_url_that_cannot_be_is_refused_before_any_request(url: str) -> None:
    for make in (dos.ObjectStoreWriter, dos.ObjectStoreReader):
        with pytest.raises(InputError) as caught:
            make(url)
        assert "secret" not in str(caught.value).replace("'secret': …", "")


def test_a_state_without_tensors_can_be_saved_and_loaded(bucket: Bucket) -> None:
    url, options = bucket.at("step-1"), bucket.storage_options
    dcp.save({"step": 3}, storage_writer=dos.ObjectStoreWriter(url, storage_options=options))
    state = {"step": 0}
    dcp.load(state, storage_reader=dos.ObjectStoreReader(url, storage_options=options))
    assert state == {"step": 3}


@pytest.mark.backends("moto")
def test_a_value_that_needs_unpickling_is_refused_until_it_is_trusted(bucket: Bucket) -> None:
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
