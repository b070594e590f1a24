"""The fsspec adapter: the contract on four filesystems."""

from __future__ import annotations

import errno
import secrets
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import fsspec
import pytest
from aiohttp import ClientPayloadError, ClientResponseError
from aiohttp.http_exceptions import TransferEncodingError
from fsspec import AbstractFileSystem
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractBufferedFile

from dcp_objstore.config import TransferConfig
from dcp_objstore.errors import (
    BucketNotFoundError,
    CredentialsError,
    DcpObjstoreError,
    InputError,
    PermissionDeniedError,
    StoreFullError,
    StoreUnavailableError,
    UnsupportedError,
)
from dcp_objstore.stores import ObjectStore, open_store
from dcp_objstore.stores.errors import Meaning
from dcp_objstore.stores.fsspec.filesystems import read_fsspec
from dcp_objstore.stores.protocol import Capabilities, Version
from tests.contract import (
    PART,
    SMALL_CROWD,
    ExpectedError,
    StoreContract,
    put_broken,
)
from tests.contract.buckets import S3_LACKS, InBucket
from tests.contract.copies import CopiesContract
from tests.contract.failures import FailuresContract
from tests.contract.listing import ListingContract
from tests.contract.objects import ObjectsContract
from tests.contract.preconditions import PreconditionsContract
from tests.contract.reading import ReadingContract
from tests.contract.streams import StreamsContract
from tests.support.servers import BUCKET, FakeGcsServer
from tests.support.side_doors import FolderDoor, SideDoor

FSSPEC = TransferConfig(transport="fsspec")
ONCE = TransferConfig(
    transport="fsspec", max_retries=0, connect_timeout_seconds=5, request_timeout_seconds=20
)


class TestLocal(StoreContract):
    endpoint = "fsspec `file://`"
    lacks = frozenset({"multipart", "conditional_update", "copies"})
    crowd_keys = SMALL_CROWD

    @pytest.fixture
    def store(self, tmp_path: Path) -> ObjectStore:
        return open_store(f"file://{tmp_path}/pre fix/not yet there", config=FSSPEC)

    @pytest.fixture
    def side_door(self, tmp_path: Path) -> SideDoor:
        return FolderDoor(tmp_path / "pre fix" / "not yet there")


class TestUnknown(StoreContract):
    """A given filesystem that is unknown: written under another name and moved, and not fenced."""

    endpoint = "any other fsspec filesystem"
    lacks = frozenset(
        {
            "multipart",
            "conditional_create",
            "conditional_update",
            "clean_abort",
            "atomic_put",
            "modified_times",
            "copies",
        }
    )
    crowd_keys = SMALL_CROWD

    @pytest.fixture
    def store(self, tmp_path: Path) -> ObjectStore:
        fs = DirFileSystem(path=str(tmp_path), fs=fsspec.filesystem("file"))
        return open_store("dir://some/where", {"fs": fs})

    @pytest.fixture
    def side_door(self, tmp_path: Path) -> SideDoor:
        return FolderDoor(tmp_path / "some" / "where")


class UploadedWhenClosed(AbstractBufferedFile):
    """What fsspec's filesystems on object stores write to: parts, or one PUT if it is small."""

    def _upload_chunk(self, final: bool = False) -> None:
        self.parts = [*getattr(self, "parts", []), self.buffer.getvalue()]
        if final:
            self.fs.uploaded[self.path] = self.parts


class OfAnObjectStore(AbstractFileSystem):
    protocol = "of-an-object-store"

    def __init__(self, **options: object) -> None:
        super().__init__(**options)
        self.uploaded: dict[str, list[bytes]] = {}

    def _open(self, path: str, mode: str = "rb", **options: object) -> UploadedWhenClosed:
        return UploadedWhenClosed(self, path, mode, **options)


@pytest.fixture
def of_an_object_store(monkeypatch: pytest.MonkeyPatch) -> OfAnObjectStore:
    monkeypatch.setattr(OfAnObjectStore, "__module__", "ossfs.core")
    return OfAnObjectStore(skip_instance_cache=True)


class AnswerError(Exception):
    """An answer of a store, as libraries raise it."""

    def __init__(self, **attributes: object) -> None:
        super().__init__("the answer")
        self.__dict__.update(attributes)


def cut_off() -> Exception:
    error = ClientPayloadError("the body was cut off")
    error.__cause__ = TransferEncodingError("a chunk")
    assert error.__cause__.code == 400
    return error


@pytest.mark.parametrize(
    ("error", "kind", "status"),
    [
        (ClientResponseError(Mock(), (), status=403), PermissionDeniedError, 403),
        (AnswerError(status_code=403), PermissionDeniedError, 403),
        (AnswerError(code=403), PermissionDeniedError, 403),
        (AnswerError(response=SimpleNamespace(status_code=403)), PermissionDeniedError, 403),
        (cut_off(), StoreUnavailableError, None),
    ],
)
def test_an_error_means_what_the_status_of_the_answer_says_wherever_it_is(error, kind, status):
    details = read_fsspec(error)
    assert details.meaning is not None
    assert (details.meaning.kind, details.status) == (kind, status)


def of_library(name: str) -> Exception:
    """An error of this class: `library.Class`."""
    library, _, kind = name.partition(".")
    made: Exception = type(kind, (Exception,), {"__module__": f"{library}.inner"})("it says")
    return made


CHECK = "check endpoint_url, that the server runs"


@pytest.mark.parametrize(
    ("error", "kind", "connected", "timed_out", "advises"),
    [
        (of_library("google.TransportError"), StoreUnavailableError, True, False, False),
        (of_library("google.GoogleAuthError"), CredentialsError, True, False, False),
        (of_library("aiohttp.ClientError"), StoreUnavailableError, True, False, False),
        (of_library("aiohttp.ClientConnectorError"), DcpObjstoreError, False, False, False),
        (of_library("aiohttp.ConnectionTimeoutError"), DcpObjstoreError, False, False, False),
        (of_library("urllib3.HTTPError"), StoreUnavailableError, True, False, False),
        (of_library("paramiko.AuthenticationException"), CredentialsError, True, False, False),
        (of_library("paramiko.SSHException"), StoreUnavailableError, True, False, False),
        (ConnectionRefusedError("it says"), StoreUnavailableError, False, False, True),
        (TimeoutError("it says"), StoreUnavailableError, True, True, True),
        (ConnectionResetError("it says"), StoreUnavailableError, True, False, False),
        (OSError("Forbidden: it says"), PermissionDeniedError, True, False, False),
        (AnswerError(status=299), DcpObjstoreError, True, False, False),
        (AnswerError(status=300), DcpObjstoreError, True, False, False),
        (AnswerError(status=599), StoreUnavailableError, True, False, False),
        (AnswerError(status=600), DcpObjstoreError, True, False, False),
    ],
)
def test_each_error_of_a_library_says_what_is_known(error, kind, connected, timed_out, advises):
    details = read_fsspec(error)
    assert details.meaning is not None
    assert (details.meaning.kind, details.meaning.words) == (kind, type(error).__name__)
    assert (details.connected, details.timed_out) == (connected, timed_out)
    assert ((details.meaning.advice or "").startswith(CHECK)) == advises
    status = getattr(error, "status", None)
    assert details.status == (status if status in (300, 599) else None)


def test_a_full_disk_is_told_without_its_path():
    details = read_fsspec(OSError(errno.ENOSPC, "no space", "/a/secret/place"))
    assert details.text == "no space"
    assert details.meaning == Meaning(StoreFullError)


@pytest.mark.parametrize("library", ["adlfs", "gcsfs", "ocifs", "ossfs", "tosfs"])
def test_on_an_object_store_a_stream_that_breaks_off_uploads_nothing(
    of_an_object_store, monkeypatch, library
):
    monkeypatch.setattr(OfAnObjectStore, "__module__", f"{library}.core")
    store = open_store("of-an-object-store://broken/run", {"fs": of_an_object_store})
    assert store.capabilities == Capabilities(
        conditional_create=library == "gcsfs",
        conditional_update=False,
        multipart=False,
        copies=False,
    )
    for pieces in ([b"some", b"more"], [bytes(PART), b"more"]):
        put_broken(store, "k", pieces, ExpectedError())
    monkeypatch.setattr(UploadedWhenClosed, "close", lambda _: pytest.fail("it was closed"))
    put_broken(store, "k", pieces, ExpectedError())
    assert of_an_object_store.uploaded == {}


def test_on_an_object_store_a_small_object_is_one_put_and_a_large_one_goes_in_parts(
    of_an_object_store,
):
    store = open_store("of-an-object-store://whole/run", {"fs": of_an_object_store})
    for body in (b"", b"small"):
        store.put("k", body)
        assert list(of_an_object_store.uploaded.values()) == [[body]]
    store.put_stream("k", iter([bytes(PART), b"rest"]), part_size_bytes=PART, max_concurrency=1)
    assert list(of_an_object_store.uploaded.values()) == [[bytes(PART), b"rest"]]


MIDNIGHT = datetime(2026, 1, 1, tzinfo=UTC)


class Changing(MemoryFileSystem):
    """Says that an object is in the next of some states, each time that it is asked."""

    protocol = "changing"
    states: Iterator[str]

    def info(self, path: str, **_: object) -> dict[str, object]:
        self.state = next(self.states)
        told = {"ETag": self.state, "LastModified": MIDNIGHT}
        return {"name": path, "size": len(self.state), "type": "file", **told}

    def cat_file(self, path: str, *_: object, **__: object) -> bytes:
        return self.state.encode()


def test_body_and_metadata_of_an_object_are_of_one_state():
    fs = Changing(skip_instance_cache=True)
    store = open_store("changing://x", {"fs": fs})
    fs.states = iter(["a", "bb", "cc", "cc"])
    body, meta = store.get("k", max_size_bytes=9)
    assert (body, meta.size_bytes) == (b"cc", 2)
    assert "cc" in str(meta.version.e_tag)
    assert meta.last_modified > MIDNIGHT, "the times of an unknown filesystem are not trusted"
    fs.states = iter("abcdef")
    with pytest.raises(StoreUnavailableError, match="each of 5 reads"):
        store.get("k", max_size_bytes=9)
    assert not list(fs.states)


def test_the_time_of_a_write_is_known_in_whatever_form_a_filesystem_gives_it(
    of_an_object_store, monkeypatch
):
    store = open_store("of-an-object-store://times/run", {"fs": of_an_object_store})
    for time in (
        {"LastModified": MIDNIGHT},
        {"mtime": MIDNIGHT.timestamp()},
        {"created": int(MIDNIGHT.timestamp())},
        {"updated": "2026-01-01T00:00:00Z"},
        {"last_modified": "2026-01-01T01:00:00+01:00"},
        {"modified": datetime(2026, 1, 1)},
        {"LastModified": None, "mtime": MIDNIGHT},
    ):
        info = {"name": "times/run/k", "size": 1, "type": "file", **time}
        monkeypatch.setattr(of_an_object_store, "info", lambda _, info=info: info)
        assert store.head("k").last_modified == MIDNIGHT
    for unknown in ({}, {"mtime": True}, {"mtime": []}):
        monkeypatch.setattr(
            of_an_object_store, "info", lambda _, more=unknown: {"type": "file", **more}
        )
        assert store.head("k").last_modified > MIDNIGHT
    tags = ("ETag", "etag", "e_tag", "content_hash", "sha", "ino", "size")
    for version, state in (
        (Version(None, "7"), {"generation": "7", "ETag": "e"}),
        *((Version("7"), {tag: 7}) for tag in tags),
        (Version(f"7-{MIDNIGHT}"), {"size": 7, "mtime": MIDNIGHT}),
    ):
        monkeypatch.setattr(
            of_an_object_store, "info", lambda _, more=state: {"type": "file", **more}
        )
        assert store.head("k").version == version


class Renaming(LocalFileSystem):
    """Renames as WebHDFS does, which says nothing where it does not replace."""

    protocol = "renaming"

    @classmethod
    def _strip_protocol(cls, path: str) -> str:  # fsspec before 2025.12 knows `file` alone
        found: str = super()._strip_protocol(path.removeprefix("renaming://"))
        return found

    def mv(self, path1: str, path2: str, **options: object) -> None:
        if not self.exists(path2):
            super().mv(path1, path2)


def test_an_object_that_a_filesystem_does_not_replace_is_an_error(tmp_path):
    store = open_store(f"renaming://{tmp_path}", {"fs": Renaming(skip_instance_cache=True)})
    store.put("k", b"old")
    with pytest.raises(UnsupportedError, match="replace"):
        store.put("k", b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["k"]


def test_a_prefix_of_other_keys_is_not_taken_for_an_object_that_was_put(tmp_path):
    store = open_store(f"file://{tmp_path}", config=FSSPEC)
    store.put("a/b", b"1")
    with pytest.raises(InputError, match="prefix"):
        store.put("a", b"2")
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["b"]
    (tmp_path / "a" / ".dcp-objstore.0123.tmp").write_text("of a write that was killed")
    assert [meta.key for meta in store.list()] == ["a/b"]


@pytest.mark.backends("seaweed", "moto", "ceph")
class OverS3fs(InBucket):
    endpoint = {"seaweed": "SeaweedFS (s3fs)", "ceph": "Ceph RGW (s3fs)"}  # noqa: RUF012
    lacks = S3_LACKS
    dialect = "s3"
    race_rounds = 0
    races_at_once = 8

    @pytest.fixture(autouse=True)
    def _installed(self) -> None:
        # Beside a boto3 that is too new for it, pip takes s3fs 0.4.
        pytest.importorskip("s3fs", minversion="2025.5")

    def open(self, url: str, options: object, config: TransferConfig | None = None) -> ObjectStore:
        return open_store(url, options, config or FSSPEC)

    def store_at(self, endpoint_url: str) -> ObjectStore:
        options = {"key": "a", "secret": "b", "endpoint_url": endpoint_url}
        return open_store("s3://bucket/run", options, ONCE)


class TestS3fs(
    OverS3fs,
    ObjectsContract,
    ReadingContract,
    PreconditionsContract,
    StreamsContract,
    FailuresContract,
):
    """What s3fs carries in its own way: bodies, time-outs and errors."""


@pytest.mark.campaign
class TestS3fsAsBoto3(OverS3fs, ListingContract, CopiesContract):
    """Pages and copies are `S3Store`'s, whatever carries their requests."""


class TestGcsfs(StoreContract):
    endpoint = "fake-gcs-server (gcsfs)"
    lacks = frozenset({"multipart", "conditional_update", "copies"})
    dialect = "gcs-json"
    untold_faults = frozenset({"no bucket"})  # gcsfs drops the body of a 404
    crowd_keys = SMALL_CROWD  # its pages are its own matter

    @pytest.fixture(autouse=True)
    def no_retries_of_gcsfs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """It sends a request six times within half a minute, which no option changes."""
        retry = pytest.importorskip("gcsfs.retry")
        monkeypatch.setattr(retry, "is_retriable", lambda _: False)

    @pytest.fixture
    def store(self, fake_gcs: FakeGcsServer) -> ObjectStore:
        url = f"gs://{BUCKET}/{secrets.token_hex(4)}/pre fix"
        return open_store(url, fake_gcs.storage_options, FSSPEC)

    def store_at(self, endpoint_url: str) -> ObjectStore:
        pytest.importorskip("gcsfs")
        return open_store("gs://bucket/run", {"anon": True, "endpoint_url": endpoint_url}, ONCE)

    def test_a_missing_bucket_is_not_listed_as_an_empty_one(self, fake_gcs):
        store = open_store(f"gs://{BUCKET}/nothing", fake_gcs.storage_options, FSSPEC)
        assert not list(store.list())
        with pytest.raises(BucketNotFoundError, match="the bucket nowhere does not exist"):
            list(open_store("gs://nowhere/run", fake_gcs.storage_options, FSSPEC).list())
