"""The contract on every store that we have; what the servers do beyond it is pinned here too."""

from __future__ import annotations

import secrets
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import dcp_objstore as dos
from dcp_objstore.checkpoint.probe import probe, require_fencing
from dcp_objstore.config import TransferConfig
from dcp_objstore.errors import ObjectNotFoundError, StoreUnavailableError, UnsupportedError
from dcp_objstore.stores import ObjectStore, Precondition, open_store
from dcp_objstore.stores.protocol import Capabilities
from tests.contract import SMALL_CROWD, BucketContract, StoreContract, keys
from tests.contract.buckets import S3_LACKS
from tests.support.side_doors import FolderDoor, SideDoor
from tests.support.wrapped_stores import FaultStore, RecordingStore

TRANSPORTS = ("native", "boto3", "fsspec")
ONCE = TransferConfig(max_retries=0, connect_timeout_seconds=5, request_timeout_seconds=20)


class TestMemory(StoreContract):
    endpoint = "`memory://`"
    lacks = frozenset({"multipart", "copies"})

    @pytest.fixture
    def store(self) -> ObjectStore:
        return open_store(f"memory://{secrets.token_hex(4)}/pre fix")


class TestFile(StoreContract):
    endpoint = "`file://`"
    lacks = frozenset({"multipart"})
    crowd_keys = SMALL_CROWD

    @pytest.fixture
    def store(self, tmp_path: Path) -> ObjectStore:
        return open_store(f"file://{tmp_path}/pre fix/not yet there")

    @pytest.fixture
    def side_door(self, tmp_path: Path) -> SideDoor:
        return FolderDoor(tmp_path / "pre fix" / "not yet there")


class TestBucket(BucketContract):
    """SeaweedFS, moto and Ceph (or `--bucket-url`)."""

    endpoint = {  # noqa: RUF012
        "seaweed": "SeaweedFS (`s3://`)",
        "moto": "moto (`s3://`)",
        "ceph": "Ceph RGW (`s3://`)",
        "user": "your bucket",
    }
    lacks = S3_LACKS
    dialect = "s3"
    # A loser on SeaweedFS sleeps a second before it asks again for the lock.
    race_rounds = 1
    races_at_once = 8

    def store_at(self, endpoint_url: str) -> ObjectStore:
        options = {"key": "a", "secret": "b", "endpoint_url": endpoint_url}
        return open_store("s3://bucket/run", options, ONCE)


@pytest.mark.backends("gcs")
class TestGcs(BucketContract):
    endpoint = "moto (`gs://`)"
    lacks = frozenset({"listed_versions", "range_copies"})
    dialect = "gcs-xml"
    below = "pre fix"
    crowd_keys = SMALL_CROWD
    race_rounds = 1  # moto answers one request at a time, and slowly

    def store_at(self, endpoint_url: str) -> ObjectStore:
        options = {"token": "dummy", "endpoint_url": endpoint_url}
        return open_store("gs://bucket/run", options, ONCE)


@pytest.mark.campaign  # the adapter of `TestBucket`; what the probe finds is tested with it
@pytest.mark.backends("rclone")
class TestUnfenced(BucketContract):
    """A server that ignores conditions (the probe finds out, a save is refused) and ranges.

    And a GET during a PUT may answer with some of the old and some of the new bytes.
    """

    endpoint = "`rclone serve s3` (`s3://`)"
    lacks = frozenset(
        {"conditional_create", "conditional_update", "ranges", "atomic_put", "copies"}
    )
    dialect = "s3"

    @pytest.fixture
    def capabilities(self, store: ObjectStore) -> Capabilities:
        return replace(probe(store), ranges=False, atomic_put=False, copies=False)

    def store_at(self, endpoint_url: str) -> ObjectStore:
        return TestBucket().store_at(endpoint_url)

    def assert_refused(self, store: ObjectStore, key: str, precondition: Precondition) -> None:
        with pytest.raises(UnsupportedError, match="two writers apart"):
            require_fencing(store, replaces=True, allow_unfenced=False)

    def test_a_prefix_of_keys_is_no_object(self, bucket):
        # rclone answers 500 where it should say that there is no such object.
        store = open_store(bucket.url, bucket.storage_options, ONCE)
        store.put("a/b", b"x")
        with pytest.raises(ObjectNotFoundError):
            store.head("a")
        with pytest.raises(StoreUnavailableError):
            store.delete("a")
        assert bucket.keys() == ["a/b"]


class TestWrapped(StoreContract):
    """Wrappers change nothing when they have nothing to do."""

    race_rounds = 0  # `TestMemory` has them

    @pytest.fixture
    def store(self) -> ObjectStore:
        inner = open_store(f"memory://{secrets.token_hex(4)}")
        return RecordingStore(FaultStore(inner, lambda *_: None))


@pytest.mark.backends("seaweed")
def test_a_run_in_a_folder_that_a_console_has_made_is_like_any_other(bucket):
    options = bucket.storage_options
    url = bucket.at("run")
    bucket.put("run/", b"")
    over = [open_store(url, {**options, "transport": name}) for name in TRANSPORTS]
    assert [list(store.list()) for store in over] == [[], [], []]
    with dos.CheckpointManager(url, storage_options=options) as run:
        assert run.load({"w": torch.zeros(2)}) is None
        run.save(1, {"w": torch.ones(2)})
    bucket.put("run/step-1/", b"")
    assert [step.name for step in dos.steps(url, storage_options=options)] == ["step-1"]
    step, *others = (keys(store, "step-1/") for store in over)
    assert others == [step, step]
    assert "step-1/_COMMIT" in step
    assert not {"step-1", "step-1/"} & {*step}
    dos.sweep(url, storage_options=options)
    assert {"run/", "run/step-1/"} <= {*bucket.keys()}
