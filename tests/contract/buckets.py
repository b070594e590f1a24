"""The contract over the fixture `bucket`: the side door, the parts and the crowd of a server."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import pytest

from dcp_objstore.checkpoint.probe import probe
from dcp_objstore.stores import ObjectStore, open_store
from dcp_objstore.stores.protocol import Capabilities
from tests.contract.common import Endpoint
from tests.contract.suite import StoreContract
from tests.support.proxy import NetworkProxy
from tests.support.servers import Bucket
from tests.support.side_doors import BucketDoor, SideDoor

# What an adapter of S3 lacks on the kinds of the fixture `bucket`.
S3_LACKS = dict.fromkeys(("seaweed", "moto", "user"), frozenset[str]()) | {
    "ceph": frozenset({"quoted_e_tags"})
}

# One crowd for all adapters on the same server: its URL to the prefix in the bucket.
_crowds: dict[str, str] = {}


class InBucket(Endpoint):
    """A store in the fixture `bucket`; a subclass says by which adapter (`open`)."""

    below = "pre fix #1"

    def open(self, url: str, options: Mapping[str, object]) -> ObjectStore:
        return open_store(url, options)

    @pytest.fixture
    def store(self, bucket: Bucket) -> ObjectStore:
        return self.open(f"{bucket.url}/{self.below}", bucket.storage_options)

    @pytest.fixture
    def capabilities(self, bucket: Bucket, store: ObjectStore) -> Capabilities:
        return probe(store) if bucket.kind == "ceph" else store.capabilities

    @pytest.fixture
    def side_door(self, bucket: Bucket) -> SideDoor:
        return BucketDoor(bucket, self.below)

    @pytest.fixture
    def measured(self, bucket: Bucket) -> Iterator[tuple[ObjectStore, SideDoor]]:
        # Not every server tells the parts of an object: the requests do.
        with NetworkProxy(bucket.storage_options) as proxy:
            store = self.open(f"{bucket.url}/{self.below}", proxy.storage_options)
            yield store, BucketDoor(bucket, self.below, proxy)

    @pytest.fixture
    def crowd(self, bucket: Bucket) -> ObjectStore:
        server = str(bucket.s3_options.get("endpoint_url"))
        if server not in _crowds:
            store = open_store(f"{bucket.url}/crowd", bucket.storage_options)  # the quickest
            with ThreadPoolExecutor(16) as pool:
                list(pool.map(lambda key: store.put(key, b""), self.crowd_keys))
            _crowds[server] = bucket.prefix
        url = f"{urlsplit(bucket.url).scheme}://{bucket.name}/{_crowds[server]}crowd"
        return self.open(url, bucket.storage_options)


class BucketContract(InBucket, StoreContract):
    """The guarantees of a store in the fixture `bucket`."""
