"""The contract on every store that we have; what the servers do beyond it is pinned here too."""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest

from dcp_objstore.stores import ObjectStore, open_store
from dcp_objstore.stores.wrappers import FaultStore, LatencyStore, RecordingStore
from tests.store_contract import PART, ExpectedError, StoreContract
from tests.support.servers import Bucket


class TestMemory(StoreContract):
    @pytest.fixture
    def store(self) -> ObjectStore:
        return open_store(f"memory://{secrets.token_hex(4)}/pre fix")


class TestFile(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> ObjectStore:
        return open_store(f"file://{tmp_path}/pre fix/not yet there")


class TestBucket(StoreContract):
    """SeaweedFS and moto (or `--bucket-url`)."""

    @pytest.fixture
    def store(self, bucket: Bucket) -> ObjectStore:
        return open_store(f"{bucket.url}/pre fix #1", bucket.storage_options)

    def test_an_aborted_stream_leaves_no_upload_behind(
        self, bucket: Bucket, store: ObjectStore
    ) -> None:
        def broken():
            for _ in range(3):
                yield bytes(PART)
            raise ExpectedError

        with pytest.raises(ExpectedError):
            store.put_stream("k", broken(), part_size_bytes=PART, max_concurrency=2)
        assert bucket.uploads() == []
        assert bucket.keys() == []

    def test_all_parts_but_the_last_have_the_same_size(
        self, bucket: Bucket, store: ObjectStore
    ) -> None:
        if bucket.kind == "seaweed":
            pytest.skip("SeaweedFS does not answer GetObject with a part number as S3 does")
        sizes = [1, PART - 7, PART, 3_000_000, 17]
        total = sum(sizes)
        pieces = iter([bytes(size) for size in sizes])
        store.put_stream("k", pieces, part_size_bytes=PART, max_concurrency=2)
        key = f"{bucket.prefix}pre fix #1/k"
        first = bucket.client().head_object(Bucket=bucket.name, Key=key, PartNumber=1)
        last = bucket.client().head_object(Bucket=bucket.name, Key=key, PartNumber=3)
        assert first["PartsCount"] == 3
        assert first["ContentLength"] == PART
        assert last["ContentLength"] == total - 2 * PART

    def test_a_listing_longer_than_a_page_is_whole(self, store: ObjectStore) -> None:
        # One page of S3 has at most 1000 keys.
        from concurrent.futures import ThreadPoolExecutor

        names = [f"many/{number:04d}" for number in range(1003)]
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(lambda name: store.put(name, b""), names))
        assert sorted(meta.key for meta in store.list("many/")) == names


@pytest.mark.backends("gcs")
class TestGcs(StoreContract):
    @pytest.fixture
    def store(self, bucket: Bucket) -> ObjectStore:
        return open_store(f"{bucket.url}/pre fix", bucket.storage_options)


class TestWrapped(StoreContract):
    """Wrappers change nothing when they have nothing to do."""

    @pytest.fixture
    def store(self) -> ObjectStore:
        inner = open_store(f"memory://{secrets.token_hex(4)}")
        return RecordingStore(FaultStore(LatencyStore(inner, 0), lambda *_: None))
