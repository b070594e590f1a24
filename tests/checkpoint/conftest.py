"""The stores that these tests step into, and look at."""

from __future__ import annotations

import pytest

from dcp_objstore.checkpoint.probe import can_rewrite
from dcp_objstore.stores import ObjectStore, StoreSpec
from tests.support.memory_store import MemoryStore
from tests.support.servers import Bucket


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def real(bucket: Bucket) -> ObjectStore:
    """On a server, at a step of a run."""
    store = StoreSpec(bucket.at("run/step-1"), bucket.storage_options).open()
    if bucket.kind == "ceph":
        can_rewrite(store)  # as every public call does: this server compares ETags without quotes
    return store
