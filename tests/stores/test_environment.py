"""What the environment says of a store holds whichever library carries the requests."""

from __future__ import annotations

import pytest

from dcp_objstore.config import TransferConfig
from dcp_objstore.errors import ConfigError, DcpObjstoreError
from dcp_objstore.stores import StoreSpec, open_store
from dcp_objstore.stores.clients import make_filesystems
from dcp_objstore.stores.gcs.options import GcsOptions
from dcp_objstore.stores.options import parse
from dcp_objstore.stores.s3.options import S3Options
from dcp_objstore.stores.urls import parse_url
from tests.support.s3_requests import carrying, requests_of
from tests.support.scripted import Answer, ScriptedServer

ONCE = TransferConfig(max_retries=0)
ALL = pytest.mark.parametrize("transport", ["native", "boto3", "fsspec"])
KEYS = {"key": "a", "secret": "b"}


@pytest.mark.backends("moto")
@ALL
def test_the_environment_seals_pays_and_checks_over_every_transport(bucket, monkeypatch, transport):
    monkeypatch.setenv("AWS_REQUEST_PAYER", "requester")
    monkeypatch.setenv("AWS_SERVER_SIDE_ENCRYPTION", "aws:kms")
    monkeypatch.setenv("AWS_SSE_KMS_KEY_ID", "key-1")
    monkeypatch.setenv("AWS_SSE_BUCKET_KEY_ENABLED", "true")
    monkeypatch.setenv("AWS_CHECKSUM_ALGORITHM", "SHA256")
    found = requests_of(bucket, {"transport": transport})
    assert carrying(found, "x-amz-server-side-encryption") == {"put", "begin"}
    for kind in ("put", "begin"):
        headers = found[kind].headers
        assert headers["x-amz-server-side-encryption"] == "aws:kms"
        assert headers["x-amz-server-side-encryption-aws-kms-key-id"] == "key-1"
        assert headers["x-amz-server-side-encryption-bucket-key-enabled"] == "true"
    assert carrying(found, "x-amz-checksum-sha256") == {"put", "part"}
    assert carrying(found, "x-amz-request-payer") == set(found)
    assert not any(asked.signed_url for asked in found.values())  # it could not be there
    # Options count before the environment.
    extra = {"ServerSideEncryption": "aws:kms:dsse", "SSEKMSKeyId": "key-2"}
    found = requests_of(bucket, {"transport": transport, "s3_additional_kwargs": extra})
    for kind in ("put", "begin"):
        headers = found[kind].headers
        assert headers["x-amz-server-side-encryption"] == "aws:kms:dsse"
        assert headers["x-amz-server-side-encryption-aws-kms-key-id"] == "key-2"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("AWS_SERVER_SIDE_ENCRYPTION", "sse-c"),
        ("AWS_SSE_KMS_KEY_ID", "key-1"),
        ("AWS_SSE_BUCKET_KEY_ENABLED", "perhaps"),
    ],
)
@ALL
def test_encryption_that_would_not_take_place_is_refused(monkeypatch, transport, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=name):
        open_store("s3://bucket", {**KEYS, "transport": transport})
    if name == "AWS_SSE_KMS_KEY_ID":
        extra = {"ServerSideEncryption": "AES256"}
        with pytest.raises(ConfigError, match=name):
            open_store(
                "s3://bucket", {**KEYS, "transport": transport, "s3_additional_kwargs": extra}
            )
    monkeypatch.setenv(name, "")
    assert parse(S3Options, KEYS).sse is None


@pytest.mark.parametrize("name", ["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"])
@ALL
def test_the_endpoint_of_the_environment_may_hold_no_password_and_is_known(
    monkeypatch, transport, name
):
    options = {**KEYS, "transport": transport}
    monkeypatch.setenv(name, "http://u:SECRET@127.0.0.1:1")
    with pytest.raises(ConfigError, match="without credentials") as caught:
        open_store("s3://bucket", options)
    assert "SECRET" not in str(caught.value)
    monkeypatch.setenv(name, "http://127.0.0.1:1/")
    assert open_store("s3://bucket", options).endpoint_url == "http://127.0.0.1:1"  # type: ignore[attr-defined]


def test_the_endpoint_of_the_environment_for_gcs_holds_over_gcsfs(monkeypatch):
    options = {"anon": True, "transport": "fsspec"}
    monkeypatch.setenv("GOOGLE_BASE_URL", "http://u:SECRET@127.0.0.1:1")
    with pytest.raises(ConfigError, match="without credentials"):
        open_store("gs://bucket", options)
    monkeypatch.setenv("GOOGLE_BASE_URL", "http://127.0.0.1:1")
    assert open_store("gs://bucket", options).endpoint_url == "http://127.0.0.1:1"  # type: ignore[attr-defined]


@pytest.mark.usefixtures("bare_environment")
@pytest.mark.parametrize("transport", ["native", "fsspec"])
@pytest.mark.parametrize("with_scheme", [True, False])
def test_an_emulator_of_gcs_is_asked_where_googles_variable_names_one(
    monkeypatch, transport, with_scheme
):
    with ScriptedServer(lambda *_: Answer(404, {}, b"")) as server:
        named = server.endpoint_url if with_scheme else server.endpoint_url.partition("://")[2]
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", named)
        store = open_store("gs://bucket/x", {"transport": transport}, ONCE)
        assert store.endpoint_url == server.endpoint_url  # type: ignore[attr-defined]
        with pytest.raises(DcpObjstoreError):
            store.head("k")
        assert server.requests
        assert not any("Authorization" in headers for _, _, headers in server.requests)


@pytest.mark.parametrize(
    ("options", "payer"),
    [
        ({"requester_pays": "other"}, "other"),
        ({"requester_pays": True, "project": "mine"}, "mine"),
        ({}, None),
    ],
)
def test_gcsfs_names_the_project_that_pays(options, payer):
    given = {"anon": True, "endpoint_url": "http://127.0.0.1:1", **options}
    fs = make_filesystems(parse_url("gs://bucket"), given, TransferConfig()).read
    assert fs._get_params({}).get("userProject") == payer == parse(GcsOptions, options).payer


def test_gcsfs_refuses_requester_pays_without_a_project():
    with pytest.raises(ConfigError, match="project"):
        StoreSpec("gs://b", {"anon": True, "requester_pays": True, "transport": "fsspec"})
