"""`StoreSpec`: secrets stay where they belong, clients are shared, children work or fail fast."""

from __future__ import annotations

import copy
import io
import multiprocessing
import os
import pickle
import subprocess
import sys
from multiprocessing.reduction import ForkingPickler

import pytest

from dcp_objstore.config import TransferConfig
from dcp_objstore.errors import ConfigError, CredentialsError
from dcp_objstore.stores import StoreSpec, open_store

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
NO_CREDENTIALS = {
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent",
    "AWS_CONFIG_FILE": "/nonexistent",
}


@pytest.fixture
def no_aws(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    for name, value in NO_CREDENTIALS.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("options", [OPTIONS, NESTED])
def test_no_secret_is_shown_or_pickled(options):
    spec = StoreSpec("s3://bucket/run", options)
    texts = [repr(spec), str(spec), f"{spec!r}", repr(spec.at("s3://bucket/other"))]
    texts.append(repr(spec.open()))
    dumps = [pickle.dumps(spec, protocol) for protocol in range(2, 6)]
    for secret in SECRETS:
        assert not any(secret in text for text in texts)
        assert not any(secret.encode() in dump for dump in dumps)
    spec = StoreSpec("s3://bucket/run", {**options, "transport": "boto3", "anon": None})
    back = pickle.loads(pickle.dumps(spec))
    assert (back.url, back.config) == (spec.url, spec.config)
    assert back.stripped


def test_a_gcs_token_is_a_secret_and_a_method_is_not():
    spec = StoreSpec("gs://bucket", {"token": SECRETS[0]})
    assert SECRETS[0] not in repr(spec)
    assert SECRETS[0].encode() not in pickle.dumps(spec)
    assert pickle.loads(pickle.dumps(StoreSpec("gs://b", {"token": "anon"}))).stripped == ()


def test_multiprocessing_carries_the_credentials():
    spec = StoreSpec("s3://bucket/x", OPTIONS)
    buffer = io.BytesIO()
    ForkingPickler(buffer, 5).dump({"deep": [spec]})
    back = pickle.loads(buffer.getvalue())["deep"][0]
    assert back == spec
    assert back.storage_options == OPTIONS


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


def test_clients_are_shared_by_specs_that_agree(no_aws):
    clients = StoreSpec.boto3_clients
    spec = StoreSpec("s3://bucket/x", OPTIONS)
    assert clients(spec) is clients(StoreSpec("s3://bucket/y", dict(OPTIONS)))
    assert clients(spec) is not clients(StoreSpec("s3://bucket2/x", OPTIONS))
    assert clients(spec) is not clients(StoreSpec("s3://bucket/x", {**OPTIONS, "secret": "other"}))
    patient = TransferConfig(max_retries=20)
    assert clients(spec) is not clients(StoreSpec("s3://bucket/x", OPTIONS, patient))


def test_renewed_credentials_in_the_environment_are_used(no_aws, monkeypatch, bucket):
    options = {"endpoint_url": bucket.storage_options["endpoint_url"]}
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", str(bucket.storage_options["key"]))
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    if bucket.kind == "seaweed":
        with pytest.raises(CredentialsError):
            open_store(bucket.url, options).put("k", b"x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", str(bucket.storage_options["secret"]))
    open_store(bucket.url, options).put("k", b"x")
    assert bucket.keys() == ["k"]


def test_a_store_itself_is_not_pickled():
    with pytest.raises(TypeError, match="StoreSpec"):
        pickle.dumps(open_store("s3://bucket/x", OPTIONS))


def _put_in_child(spec: StoreSpec, key: str) -> None:
    spec.open().put(key, b"from the child")


@pytest.mark.backends("seaweed")
def test_a_spawned_child_gets_the_credentials(bucket, no_aws):
    spec = StoreSpec(bucket.url, bucket.storage_options)
    spec.open().put("parent", b"x")
    child = multiprocessing.get_context("spawn").Process(target=_put_in_child, args=(spec, "k"))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert bucket.get("k") == b"from the child"


# In a process of its own: forking one that runs torch and test threads is nobody's guarantee.
_FORK = """
import faulthandler, os, sys
from dcp_objstore.config import TransferConfig
from dcp_objstore.stores import StoreSpec
from dcp_objstore.stores.ranges import read_range
from dcp_objstore.errors import ForkedProcessError
url, transport, *options = sys.argv[1:]
options = dict(zip(("key", "secret", "endpoint_url"), options)) or None
spec = StoreSpec(url, options, TransferConfig(transport=transport))
is_native = transport == "native"
store = spec.open()
store.put("k", b"parent")
if os.fork() == 0:
    faulthandler.dump_traceback_later(40, exit=True)  # a hang ends as a failure
    for call in (lambda: store.get("k", max_size_bytes=9), lambda: store.put("k", b"child"),
                 lambda: store.head("k"), lambda: list(store.list()), lambda: store.delete("k"),
                 lambda: read_range(store, "k", 0, 1),
                 lambda: store.put_stream("k", iter([b"x"]), part_size_bytes=5 << 20,
                                          max_concurrency=1)):
        try:
            call()
        except ForkedProcessError as error:
            assert ("spawn" if is_native else "Open it again") in str(error)
        else:
            os._exit(3)
    try:
        spec.open().put("child", b"x")
    except ForkedProcessError:
        os._exit(0 if is_native else 4)
    os._exit(5 if is_native else 0)
status = os.waitstatus_to_exitcode(os.wait()[1])
assert store.get("k", max_size_bytes=9)[0] == b"parent"
sys.exit(status)
"""


@pytest.mark.backends("seaweed")
@pytest.mark.parametrize("transport", ["native", "boto3", "fsspec", "memory"])
def test_a_forked_child_uses_nothing_of_its_parent_and_does_not_hang(bucket, transport):
    """Over the libraries that can, it opens the store again."""
    given = [str(bucket.storage_options[name]) for name in ("key", "secret", "endpoint_url")]
    given = [bucket.url, transport, *given]
    if transport == "memory":
        given = ["memory://x", "native"]
    if transport == "fsspec":
        pytest.importorskip("s3fs", minversion="2025.5")
    subprocess.run([sys.executable, "-W", "ignore", "-c", _FORK, *given], check=True, timeout=100)


def test_a_file_store_works_in_a_forked_child(tmp_path):
    store = open_store(f"file://{tmp_path}/s")
    store.put("k", b"parent")
    if not (child := os.fork()):
        store.put("k", b"child")
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert store.get("k", max_size_bytes=9)[0] == b"child"


# --- the transport


def test_a_transport_given_twice_must_be_the_same():
    with pytest.raises(ConfigError, match="say it once"):
        StoreSpec("s3://b", {"transport": "native"}, TransferConfig(transport="boto3"))
    with pytest.raises(ConfigError, match="say it once"):
        StoreSpec("s3://b", {"transport": "boto3"}, TransferConfig(transport="fsspec"))


@pytest.mark.parametrize("url", ["gs://bucket/x", "file:///tmp/x", "memory://x"])
def test_a_transport_that_does_not_carry_a_scheme_is_refused(url):
    with pytest.raises(ConfigError, match="'boto3' does not carry"):
        StoreSpec(url, {"transport": "boto3"})
    with pytest.raises(ConfigError, match="'boto3' does not carry"):
        StoreSpec(url, None, TransferConfig(transport="boto3"))


def test_an_unknown_transport_is_refused():
    with pytest.raises(ConfigError, match="native, boto3, fsspec"):
        TransferConfig(transport="boto")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="native, boto3, fsspec"):
        StoreSpec("s3://b", {"transport": "boto"})
    with pytest.raises(ConfigError, match="did you mean 'transport'"):
        StoreSpec("s3://b", {"transprot": "boto3"})
