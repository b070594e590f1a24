"""URLs, options, secrets and forks of the fsspec adapter."""

from __future__ import annotations

import io
import pickle
from multiprocessing.reduction import ForkingPickler

import fsspec
import pytest
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from dcp_objstore.config import TransferConfig
from dcp_objstore.errors import (
    ConfigError,
    CredentialsError,
    InvalidUrlError,
    StoreUnavailableError,
)
from dcp_objstore.stores import StoreSpec, open_store
from dcp_objstore.stores.local import LocalStore
from dcp_objstore.stores.urls import is_supported_url, parse_url

FSSPEC = TransferConfig(transport="fsspec")
SECRET = "hunter2-secret"


class LoggingIn(MemoryFileSystem):
    """A filesystem that logs in with options."""

    protocol = "logging-in"

    def __init__(self, name: str, passphrase: str, **kwargs: object) -> None:
        if passphrase == "wrong":
            raise ValueError(f"{name} with {passphrase} was not let in")
        super().__init__(**kwargs)


@pytest.fixture(autouse=True)
def registered() -> None:
    fsspec.register_implementation("logging-in", LoggingIn, clobber=True)


@pytest.mark.parametrize(
    ("url", "normal"),
    [
        ("sftp://host/a/b/", "sftp://host/a/b"),
        ("sftp://user@host:22/a", "sftp://user@host:22/a"),
        ("HF://datasets/me/run", "hf://datasets/me/run"),
        ("github://org:repo@branch/path", "github://org:repo@branch/path"),
        ("webhdfs://host:9870/a", "webhdfs://host:9870/a"),
        ("dbfs:///a/b", "dbfs:///a/b"),
        ("oss://bucket/a b%20c#d", "oss://bucket/a b%20c#d"),
    ],
)
def test_urls_that_fsspec_knows_are_taken_literally(url, normal):
    assert str(parse_url(url)) == normal
    assert StoreSpec(url).url == normal
    assert is_supported_url(url)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("sftp://user:hunter2@host/x", "password"),
        ("smb://domain;user:hunter2@host/x", "password"),
        ("oss://bucket/a//b", "empty"),
        ("oss://bucket/../b", "segment"),
        ("oss://", "names no place"),
        ("simplecache::s3://bucket/x", "storage_options={'fs'"),
        ("zip://inner::s3://bucket/x.zip", "no bucket|chains|unknown"),
        ("dbfs:/a/b", "lost a slash"),
        ("s4://bucket/x", "did you mean s3://"),
        ("minio://bucket/x", "did you mean s3://"),
        ("local:///tmp", "did you mean file://"),
        ("zip://x", "unknown scheme"),
        ("https://host/x", "unknown scheme"),
    ],
)
def test_urls_that_we_cannot_use_are_refused_without_a_secret(url, says):
    with pytest.raises(InvalidUrlError, match=says) as caught:
        StoreSpec(url)
    assert "hunter2" not in str(caught.value)


def test_the_transport_is_chosen_by_the_config_or_the_scheme(tmp_path):
    assert isinstance(open_store(f"file://{tmp_path}"), LocalStore)
    assert type(open_store(f"file://{tmp_path}", config=FSSPEC)).__name__ == "FsspecStore"
    given = {"fs": fsspec.filesystem("file")}
    assert type(open_store(f"file://{tmp_path}", given)).__name__ == "FsspecStore"
    options = {"name": "me", "passphrase": SECRET}
    assert type(open_store("logging-in://x", options)).__name__ == "FsspecStore"
    with pytest.raises(ConfigError, match="transport"):
        TransferConfig(transport="carrier-pigeon")  # type: ignore[arg-type]


def test_a_filesystem_must_fit_its_url_and_stand_alone(tmp_path):
    fs = fsspec.filesystem("file")
    folder = DirFileSystem(path=str(tmp_path), fs=fs)
    assert open_store("dir://x", {"fs": folder}).url == "dir://x"
    for url, options, says in (
        ("memory://x", {"fs": fs}, "does not fit"),
        (f"file://{tmp_path}", {"fs": "not one"}, "must be a filesystem"),
        (f"file://{tmp_path}", {"fs": fs, "auto_mkdir": True}, "its own"),
    ):
        with pytest.raises(ConfigError, match=says):
            StoreSpec(url, options)
    with pytest.raises(InvalidUrlError):
        StoreSpec("dir://x")


def test_an_asynchronous_filesystem_is_refused():
    s3fs = pytest.importorskip("s3fs", minversion="2025.9")
    fs = s3fs.S3FileSystem(anon=True, asynchronous=True, skip_instance_cache=True)
    with pytest.raises(ConfigError, match="make it without"):
        StoreSpec("s3://bucket/x", {"fs": fs})


def test_a_given_filesystem_tells_what_is_there_now_not_what_was():
    fs = fsspec.filesystem("memory", skip_instance_cache=True)
    fs.dircache.use_listings_cache = True
    open_store("memory://x", {"fs": fs})
    assert not fs.dircache.use_listings_cache


def test_every_option_of_a_foreign_scheme_is_a_secret_but_for_known_names():
    options = {"name": SECRET, "passphrase": SECRET, "host": "example", "nested": {"host": SECRET}}
    spec = StoreSpec("logging-in://x", options)
    assert SECRET not in repr(spec)
    assert "example" in repr(spec)
    for protocol in range(2, 6):
        assert SECRET.encode() not in pickle.dumps(spec, protocol)
    back = pickle.loads(pickle.dumps(spec))
    assert back.storage_options == {"host": "example"}
    with pytest.raises(CredentialsError, match="name, nested, passphrase were given"):
        back.open()


def test_a_filesystem_as_a_whole_is_a_secret():
    fs = LoggingIn(name="me", passphrase=SECRET)
    spec = StoreSpec("logging-in://x", {"fs": fs})
    assert "<LoggingIn>" in repr(spec)
    assert SECRET not in repr(spec)
    assert SECRET.encode() not in pickle.dumps(spec)
    with pytest.raises(CredentialsError, match="fs were given"):
        pickle.loads(pickle.dumps(spec)).open()


def test_multiprocessing_carries_filesystem_and_options():
    fs = LoggingIn(name="me", passphrase=SECRET)
    for options in ({"fs": fs}, {"name": "me", "passphrase": SECRET}):
        buffer = io.BytesIO()
        ForkingPickler(buffer, 5).dump(StoreSpec("logging-in://x", options))
        back = pickle.loads(buffer.getvalue())
        back.open().put("k", b"x")
        assert back.storage_options == options


def test_a_filesystem_that_takes_no_other_options_gets_none_and_keeps_no_listings():
    class Strict(MemoryFileSystem):
        """As that of sftp://, which passes all options to paramiko."""

        protocol = "strict"

        def __init__(self, host: str) -> None:
            super().__init__()

    fsspec.register_implementation("strict", Strict, clobber=True)
    store = open_store("strict://x", {"host": "here"})
    assert not store._fs.dircache.use_listings_cache  # type: ignore[attr-defined]


def test_what_the_filesystem_says_of_its_options_is_shown_without_their_values():
    with pytest.raises(ConfigError, match=r"required .* 'passphrase'") as caught:
        open_store("logging-in://x", {"name": SECRET, "phrase": SECRET})
    assert caught.value.__cause__ is None
    with pytest.raises(ConfigError, match=r"\*\*\* with \*\*\* was not let in") as caught:
        open_store("logging-in://x", {"name": SECRET, "passphrase": "wrong"})
    assert SECRET not in str(caught.value)


def test_short_values_and_public_ones_leave_the_text_of_an_error_readable():
    class Refusing(MemoryFileSystem):
        def __init__(self, **kwargs: object) -> None:
            raise ConnectionRefusedError(f"connection to {kwargs['host']} refused for {kwargs}")

    fsspec.register_implementation("refusing", Refusing, clobber=True)
    with pytest.raises(StoreUnavailableError, match="check the host, the port") as caught:
        open_store("refusing://x", {"host": "here", "username": "u", "password": "pw"})
    assert "connection to here refused for" in str(caught.value)
    assert "'***'" in str(caught.value)
    assert "pw" not in str(caught.value)


def test_a_filesystem_that_refuses_without_a_word_still_gives_a_text():
    class Silent(MemoryFileSystem):
        def __init__(self, **kwargs: object) -> None:
            raise ValueError

    fsspec.register_implementation("silent", Silent, clobber=True)
    with pytest.raises(ConfigError, match="ValueError: it says no more; its options are a, b"):
        open_store("silent://x", {"a": "1", "b": SECRET})


def test_a_package_that_is_missing_is_named():
    with pytest.raises(ConfigError, match=r"ossfs|oss"):
        open_store("oss://bucket/x")
