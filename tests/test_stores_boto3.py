"""The boto3 transport keeps the same contract as the native one, and more ways to be used."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import boto3
import pytest
from moto import mock_aws

from dcp_objstore.stores import ObjectStore, open_store
from tests.store_contract import StoreContract
from tests.support.servers import Bucket

BOTO3 = {"transport": "boto3"}


class TestBucket(StoreContract):
    """SeaweedFS and moto's server (or `--bucket-url`)."""

    @pytest.fixture
    def store(self, bucket: Bucket) -> ObjectStore:
        return open_store(f"{bucket.url}/pre fix #1", {**bucket.storage_options, **BOTO3})


class TestMockAws(StoreContract):
    """moto in this process, which no other transport meets."""

    @pytest.fixture(scope="class")
    def mocked(self) -> Iterator[str]:
        with mock_aws():
            boto3.client("s3", region_name="us-east-1").create_bucket(Bucket="mocked")
            yield "s3://mocked"

    @pytest.fixture
    def store(self, mocked: str) -> ObjectStore:
        return open_store(f"{mocked}/{secrets.token_hex(4)}/pre fix", BOTO3)
