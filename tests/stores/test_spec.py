"""`StoreSpec`: secrets stay where they belong, clients are shared, children work or fail fast."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
import threading
from contextlib import suppress
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

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
from dcp_objstore.stores.clients import make_clients
from dcp_objstore.stores.local import LocalStore
from dcp_objstore.stores.spec import options_of_other
from dcp_objstore.stores.urls import is_supported_url, parse_url

SECRETS = ("AKIA-secret-0", "hunter2-secret-1", "session-secret-2")
OPTIONS: dict[str, object] = {
    "key": SECRETS[0],
    "secret": SECRETS[1],
    "token": SECRETS[2],
    "endpoint_url": "http://127.0.0.1:1",
}
NESTED: dict[str, object] = {
    "client_kwargs": {
        "aws_access_key_id": SECRETS[0],
        "aws_secret_access_key": SECRETS[1],
        "aws_session_token": SECRETS[2],
        "region_name": "eu-west-3",
    }
}


@pytest.mark.parametrize("options", [OPTIONS, NESTED])
def test_no_secret_is_shown_or_pickled(options):
    spec = StoreSpec("s3://bucket/run", options)
    texts = [repr(spec), str(spec), f"{spec!r}", repr(spec.at("s3://bucket/other"))]
    texts.append(repr(spec.open()))
    dumps = [pickle.dumps(spec, protocol) for protocol in range(2, 6)]
    for secret in SECRETS:
        assert not any(secret in text for text in texts)
        assert not any(secret.encode() in dump for dump in dumps)
    spec = StoreSpec("s3://bucket/run", {"anon": None, **options, "transport": "boto3"})
    back = pickle.loads(pickle.dumps(spec))
    assert (back.url, back.config) == (spec.url, spec.config)
    assert back.stripped


def test_a_copy_keeps_the_credentials():
    spec = StoreSpec("s3://bucket/x", OPTIONS)
    for other in (copy.copy(spec), copy.deepcopy({"a": spec})["a"], spec.at("s3://bucket/y")):
        assert other.storage_options == OPTIONS


def test_a_spec_keeps_its_options_when_the_callers_mapping_changes():
    options: dict[str, object] = {"client_kwargs": {"region_name": "r"}, "anon": True}
    spec = StoreSpec("s3://bucket/x", options)
    options["client_kwargs"]["region_name"] = "changed"  # type: ignore[index]
    options.clear()
    assert spec.storage_options == {"client_kwargs": {"region_name": "r"}, "anon": True}


def test_clients_are_shared_by_specs_that_agree():
    clients = StoreSpec.boto3_clients
    spec = StoreSpec("s3://bucket/x", OPTIONS)
    assert clients(spec) is clients(StoreSpec("s3://bucket/y", dict(OPTIONS)))
    assert clients(spec) is not clients(StoreSpec("s3://bucket2/x", OPTIONS))
    assert clients(spec) is not clients(StoreSpec("s3://bucket/x", {**OPTIONS, "secret": "other"}))
    patient = TransferConfig(max_retries=20)
    assert clients(spec) is not clients(StoreSpec("s3://bucket/x", OPTIONS, patient))


def test_specs_are_equal_by_url_options_and_settings():
    spec, patient = StoreSpec("s3://bucket/x", NESTED), TransferConfig(max_retries=20)
    others = [
        StoreSpec("s3://bucket/y", NESTED),
        StoreSpec("s3://bucket/x", OPTIONS),
        StoreSpec("s3://bucket/x", NESTED, patient),
    ]
    assert spec == StoreSpec("s3://bucket/x/", dict(NESTED))
    assert others[1] == StoreSpec("s3://bucket/x", dict(reversed(OPTIONS.items())))
    assert not any(spec == other for other in [*others, spec.url])
    assert len({spec, StoreSpec("s3://bucket/x", dict(NESTED)), *others}) == 4
    unhashable = [StoreSpec("sftp://host/x", {"keys": {"a": [{number}]}}) for number in (1, 2)]
    assert unhashable[0] == unhashable[0].at("sftp://host/x") != unhashable[1]
    stripped = pickle.loads(pickle.dumps(StoreSpec("s3://bucket/x", OPTIONS, patient)))
    moved = stripped.at("s3://bucket/y")
    assert (moved.config, moved.stripped) == (patient, ("key", "secret", "token"))
    assert pickle.loads(pickle.dumps(moved)).stripped == moved.stripped
    assert moved.child("") is moved
    with pytest.raises(ConfigError, match="must be a TransferConfig, got dict"):
        StoreSpec("s3://bucket/x", None, {"max_retries": 2})  # type: ignore[arg-type]


def test_options_go_over_to_another_url_of_the_same_scheme_that_has_none():
    for given, url, other, expected in (
        (None, "s3://a", "s3://b", OPTIONS),
        (None, "s3://a", "gs://b", None),
        (None, "s3://a", Path("/b"), None),
        ({}, "s3://a", "s3://b", {}),
        (NESTED, "s3://a", "gs://b", NESTED),
    ):
        assert options_of_other(given, url, OPTIONS, other) == expected, (given, url, other)


def test_clients_are_made_anew_where_a_providers_variable_has_changed(monkeypatch):
    def clients() -> object:
        return open_store("memory://variables")._clients  # type: ignore[attr-defined]

    for prefix in ("AWS_", "GOOGLE_", "CLOUDSDK_", "AZURE_", "STORAGE_EMULATOR_", "SSL_CERT_"):
        before = clients()
        monkeypatch.setenv(f"{prefix}X", "1")
        assert clients() is not before, prefix
        assert clients() is clients()
    monkeypatch.setenv("AWX_X", "1")
    assert clients() is clients()


def test_clients_are_made_once_for_threads_that_open_a_store_at_the_same_time(monkeypatch):
    made = list[int]()

    def make(*given: Any) -> Any:
        made.append(1)
        if len(made) == 1:
            other.start()
            other.join(0.05)
        return make_clients(*given)

    monkeypatch.setattr("dcp_objstore.stores.clients.make_clients", make)
    other = threading.Thread(target=open_store, args=("memory://at-the-same-time",))
    open_store("memory://at-the-same-time")
    other.join(30)
    assert made == [1]


@pytest.mark.parametrize(
    ("url", "parent", "name"),
    [
        ("s3://bucket/run/step-1", "s3://bucket/run", "step-1"),
        ("s3://bucket/run", "s3://bucket", "run"),
        ("s3://bucket", None, ""),
        ("file:///run/step-1", "file:///run", "step-1"),
        ("file:///run", None, ""),
        ("sftp:///run/step-1", "sftp:///run", "step-1"),
        ("sftp:///run", None, ""),
        ("memory://name/x", "memory://name", "x"),
        ("memory://name", None, ""),
    ],
)
def test_the_parent_of_a_prefix_and_its_name_lead_back_to_it(url, parent, name):
    spec = StoreSpec(url)
    assert spec.parent() == (parent and StoreSpec(parent), name)
    assert (spec.parent()[0] or spec).child(name) == spec


def test_the_clients_that_were_not_used_for_longest_make_way_for_others():
    def clients(number: int) -> object:
        return open_store(f"memory://way-{number}")._clients  # type: ignore[attr-defined]

    first, second = clients(0), clients(1)
    for number in range(2, 32):
        clients(number)
    assert clients(0) is first
    clients(32)
    assert clients(0) is first
    assert clients(1) is not second


def test_a_store_itself_is_not_pickled():
    with pytest.raises(TypeError, match="StoreSpec"):
        pickle.dumps(open_store("s3://bucket/x", OPTIONS))


# In a process of its own: forking one that runs torch and test threads is nobody's guarantee.
_FORK = """
import faulthandler, os, sys
from dcp_objstore.config import TransferConfig
from dcp_objstore.stores import StoreSpec
from dcp_objstore.stores.ranges import read_range
from dcp_objstore.errors import ForkedProcessError
url, key, secret, endpoint_url, *transports = sys.argv[1:]
options = {"key": key, "secret": secret, "endpoint_url": endpoint_url}
specs = [StoreSpec(f"{url}/{transport}", options, TransferConfig(transport=transport))
         for transport in transports] + [StoreSpec("memory://x")]
stores = [spec.open() for spec in specs]
for store in stores:
    store.put("k", b"parent")

def refused(store, spec):
    for call in (lambda: store.get("k", max_size_bytes=9), lambda: store.put("k", b"child"),
                 lambda: store.head("k"), lambda: list(store.list()), lambda: store.delete("k"),
                 lambda: read_range(store, "k", 0, 1), spec.open,
                 lambda: store.put_stream("k", iter([b"x"]), part_size_bytes=5 << 20,
                                          max_concurrency=1)):
        try:
            call()
        except ForkedProcessError as error:
            assert "spawn" in str(error)
        else:
            print(f"a child used {store}", flush=True)
            os._exit(3)

if os.fork() == 0:
    faulthandler.dump_traceback_later(40, exit=True)  # a hang ends as a failure
    for store, spec in zip(stores, specs):
        refused(store, spec)
    os._exit(0)
status = os.waitstatus_to_exitcode(os.wait()[1])
for store in stores:
    assert store.get("k", max_size_bytes=9)[0] == b"parent"
sys.exit(status)
"""


@pytest.mark.backends("seaweed")
def test_a_forked_child_raises_and_does_not_hang(bucket):
    given = [str(bucket.storage_options[name]) for name in ("key", "secret", "endpoint_url")]
    transports = ["native", "boto3"]
    with suppress(pytest.skip.Exception):
        pytest.importorskip("s3fs", minversion="2025.5")
        transports.append("fsspec")
    command = [sys.executable, "-W", "ignore", "-c", _FORK, bucket.url, *given, *transports]
    subprocess.run(command, check=True, timeout=100)


# --- the transport


def test_a_transport_given_twice_must_be_the_same():
    with pytest.raises(ConfigError, match="say it once"):
        StoreSpec("s3://b", {"transport": "native"}, TransferConfig(transport="boto3"))
    with pytest.raises(ConfigError, match="say it once"):
        StoreSpec("s3://b", {"transport": "boto3"}, TransferConfig(transport="fsspec"))


@pytest.mark.parametrize("url", ["gs://bucket/x", "file:///tmp/x", "memory://x"])
def test_a_transport_that_does_not_carry_a_scheme_is_refused(url):
    with pytest.raises(ConfigError, match=r"'boto3' does not carry .*; use 'native' or 'fsspec'"):
        StoreSpec(url, {"transport": "boto3"})
    with pytest.raises(ConfigError, match="'boto3' does not carry"):
        StoreSpec(url, None, TransferConfig(transport="boto3"))
    given = {"fs": fsspec.filesystem("file")}
    with pytest.raises(ConfigError, match="; use 'fsspec'"):
        StoreSpec("file:///tmp/x", {**given, "transport": "boto3"})


def test_an_unknown_transport_is_refused():
    with pytest.raises(ConfigError, match="native, boto3, fsspec"):
        TransferConfig(transport="boto")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="native, boto3, fsspec"):
        StoreSpec("s3://b", {"transport": "boto"})
    with pytest.raises(ConfigError, match="did you mean 'transport'"):
        StoreSpec("s3://b", {"transprot": "boto3"})


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
        ("oss://../b", "segment"),
        ("oss://", "names no place"),
        ("simplecache::s3://bucket/x", "storage_options={'fs'"),
        ("zip://inner::s3://bucket/x.zip", "segment"),
        ("dbfs:/a/b", "lost a slash"),
        ("local:///tmp", "did you mean file://"),
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
    for endpoint_url, known in (("http://here", "http://here"), (7, None)):
        store = open_store("logging-in://x", {**options, "endpoint_url": endpoint_url})
        assert (type(store).__name__, store.endpoint_url) == ("FsspecStore", known)


def test_a_filesystem_must_fit_its_url_and_stand_alone(tmp_path):
    fs = fsspec.filesystem("file")
    folder = DirFileSystem(path=str(tmp_path), fs=fs)
    assert open_store("dir://x", {"fs": folder}).url == "dir://x"
    for url, options, says in (
        ("memory://x", {"fs": fs}, "does not fit"),
        (f"file://{tmp_path}", {"fs": "not one"}, "must be a filesystem"),
        (f"file://{tmp_path}", {"fs": fs, "auto_mkdir": True, "key": None}, "its own"),
    ):
        with pytest.raises(ConfigError, match=says):
            StoreSpec(url, options)
    with pytest.raises(ConfigError, match="cannot make a filesystem"):
        open_store("dir://x")


def test_an_asynchronous_filesystem_is_refused():
    s3fs = pytest.importorskip("s3fs", minversion="2025.9")
    fs = s3fs.S3FileSystem(anon=True, asynchronous=True, skip_instance_cache=True)
    with pytest.raises(ConfigError, match="make it without"):
        StoreSpec("s3://bucket/x", {"fs": fs})


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
        spec, buffer = StoreSpec("logging-in://x", options), io.BytesIO()
        ForkingPickler(buffer, 5).dump({"deep": [spec]})
        back = pickle.loads(buffer.getvalue())["deep"][0]
        back.open().put("k", b"x")
        assert back.storage_options == options
        assert back == spec or "fs" in options  # a copy of it is another one


def test_a_filesystem_that_takes_no_other_options_gets_none_and_keeps_no_listings():
    class Strict(MemoryFileSystem):
        """As that of sftp://, which passes all options to paramiko."""

        protocol = "strict"
        _get_kwargs_from_urls = staticmethod(lambda url: {"host": url})

        def __init__(self, host: str) -> None:
            super().__init__()
            self.host = host

    fsspec.register_implementation("strict", Strict, clobber=True)
    for options, host in ((None, "strict://x"), ({"host": "here"}, "here")):
        fs = open_store("strict://x", options)._fs  # type: ignore[attr-defined]
        assert fs.host == host
        assert not fs.dircache.use_listings_cache
        assert Strict(host) is not fs, "it is not shared with others"


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
        open_store("refusing://x", {"host": "here", "path": "", "username": "u", "password": "pw"})
    assert "connection to here refused for" in str(caught.value)
    assert "'***'" in str(caught.value)
    assert "pw" not in str(caught.value)
    for password, shown in (("use", "refused for"), ("fuse", "re***d for")):
        with pytest.raises(StoreUnavailableError, match="check the host") as caught:
            open_store("refusing://x", {"host": "here", "nested": {"password": password}})
        assert shown in str(caught.value)
        assert f"'{password}'" not in str(caught.value)


def test_a_package_that_is_missing_is_named():
    with pytest.raises(ConfigError, match=r"ossfs|oss"):
        open_store("oss://bucket/x")
