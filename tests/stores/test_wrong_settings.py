"""Settings and keys that obstore cannot use: an error of the right type, at once, not retried."""

from __future__ import annotations

import json
import os
import pickle
from typing import Any

import pytest
import torch

import dcp_objstore as dos
from dcp_objstore.config import TransferConfig
from dcp_objstore.errors import ConfigError, CredentialsError, DcpObjstoreError
from dcp_objstore.stores import open_store
from dcp_objstore.stores.endpoint import server_url, tls_context
from dcp_objstore.stores.options import parse
from dcp_objstore.stores.s3.endpoint import s3_checksum
from dcp_objstore.stores.s3.options import S3Options
from tests.support.ranks import run_alone, try_ranks
from tests.support.verbs import ONCE, VERBS

UNUSED = "http://127.0.0.1:1"  # nothing is sent
S3 = {"key": "a", "secret": "b", "endpoint_url": UNUSED}
BAD_PEM = {"type": "service_account", "private_key": "SECRET", "client_email": "a@b"}
KMS = {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": "\x7f"}
WRONG: dict[str, tuple[str, dict[str, Any], type[DcpObjstoreError], str]] = {
    "kms": ("s3", {**S3, "s3_additional_kwargs": KMS}, ConfigError, "SSEKMSKeyId"),
    "pem": ("gs", {"token": BAD_PEM, "endpoint_url": UNUSED}, CredentialsError, "cannot be used"),
}


@pytest.fixture
def unwaiting(monkeypatch: pytest.MonkeyPatch) -> None:
    def sleep(seconds: float) -> None:
        raise AssertionError("a setting that is wrong was tried again")

    monkeypatch.setattr("dcp_objstore.stores.retries.time.sleep", sleep)


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_used_is_said_at_once(unwaiting, case, verb):
    scheme, options, kind, text = WRONG[case]
    with pytest.raises(kind, match=text) as caught:
        VERBS[verb](open_store(f"{scheme}://bucket/run", options, TransferConfig()))
    assert "SECRET" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "scheme", "kind"),
    [
        ("AWS_SERVER_SIDE_ENCRYPTION", "no-such-kind", "s3", ConfigError),
        ("GOOGLE_SERVICE_ACCOUNT_KEY", "{}", "gs", CredentialsError),
        ("GOOGLE_SERVICE_ACCOUNT", "/nowhere.json", "gs", CredentialsError),
    ],
)
def test_what_the_environment_says_and_cannot_be_used_is_said_at_once(
    unwaiting, monkeypatch, name, value, scheme, kind
):
    monkeypatch.setenv(name, value)
    options = S3 if scheme == "s3" else {"endpoint_url": UNUSED}
    with pytest.raises(kind):
        open_store(f"{scheme}://bucket/run", options).head("k")


def test_certificates_that_the_environment_names_and_cannot_be_read_are_said_at_once():
    run_alone(read_without_certificates)  # a process reads them once


def read_without_certificates() -> None:
    with pytest.MonkeyPatch.context() as patch:
        for variable in ("SSL_CERT_FILE", "SSL_CERT_DIR", "AWS_CA_BUNDLE"):  # one is enough
            patch.delenv(variable, raising=False)
        patch.setenv("SSL_CERT_FILE", "/nowhere/ca.pem")
        patch.setattr("dcp_objstore.stores.retries.time.sleep", lambda _: pytest.fail("again"))
        with pytest.raises(ConfigError, match="SSL_CERT_FILE"):
            open_store("s3://bucket/run", S3).head("k")


@pytest.mark.parametrize("options", [{"token": "ya29.x"}, {"anon": True}])
def test_an_unreadable_service_account_in_the_environment_is_said_at_once(
    unwaiting, monkeypatch, options
):
    """obstore reads it even where other credentials are given."""
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", "/nowhere.json")
    store = open_store("gs://bucket/run", {**options, "endpoint_url": UNUSED})
    with pytest.raises(CredentialsError, match="in the environment"):
        store.head("k")


@pytest.mark.parametrize("form", ["mapping", "text", "path"])
@pytest.mark.parametrize(
    ("key", "lacks"),
    [
        ({}, "private_key, client_email"),
        ({**BAD_PEM, "private_key": None}, "private_key"),
        ({"type": "authorized_user"}, "client_id, client_secret, refresh_token"),
        ({"client_secret": 2, "refresh_token": "SECRET"}, "client_id, client_secret"),
    ],
)
def test_a_key_that_lacks_fields_is_refused_when_a_store_is_opened(tmp_path, form, key, lacks):
    place = tmp_path / "key.json"
    place.write_text(json.dumps(key))
    token = {"mapping": key, "text": json.dumps(key), "path": str(place)}[form]
    with pytest.raises(CredentialsError, match=rf"it lacks {lacks} \(") as caught:
        open_store("gs://bucket/run", {"token": token, "endpoint_url": UNUSED})
    assert "SECRET" not in str(caught.value)


@pytest.mark.backends("moto")
@pytest.mark.parametrize("transport", ["boto3", "fsspec"])
@pytest.mark.parametrize("named", ["none", "NONE"])
def test_the_environment_can_say_that_no_checksum_goes_with_bodies(
    bucket, monkeypatch, transport, named
):
    monkeypatch.setenv("AWS_CHECKSUM_ALGORITHM", named)
    store = open_store(bucket.url, {**bucket.storage_options, "transport": transport})
    store.put("k", b"body")
    assert bucket.get("k") == b"body"
    assert os.environ["AWS_CHECKSUM_ALGORITHM"] == named
    assert s3_checksum(parse(S3Options, {}), None) is None


def test_a_variable_with_an_unwanted_checksum_is_refused_for_obstore(monkeypatch):
    option = {"s3_additional_kwargs": {"ChecksumAlgorithm": "none"}}
    for named, options in (("none", {}), ("SHA256", option)):
        monkeypatch.setenv("AWS_CHECKSUM_ALGORITHM", named)
        with pytest.raises(ConfigError, match=r"AWS_CHECKSUM_ALGORITHM.*unset it"):
            open_store("s3://bucket/run", {**S3, **options})
        open_store("s3://bucket/run", {**S3, **options, "transport": "boto3"})


@pytest.mark.parametrize("transport", ["native", "boto3", "fsspec"])
@pytest.mark.parametrize("named", ["", "md5"])
def test_a_checksum_that_there_is_not_is_refused_when_a_store_is_opened(
    monkeypatch, transport, named
):
    monkeypatch.setenv("AWS_CHECKSUM_ALGORITHM", named)
    with pytest.raises(ConfigError, match=r"^AWS_CHECKSUM_ALGORITHM is .*must be one of CRC64NVME"):
        open_store("s3://bucket/run", {**S3, "transport": transport})


# No header can hold the line break: obstore panics when it signs a request. Such variables are
# refused, so the tests of what becomes of a panic switch that off.
PANICKING = {"AWS_ACCESS_KEY_ID": "a\nb", "AWS_SECRET_ACCESS_KEY": "SECRET"}
CHECK = "dcp_objstore.stores.credentials.cannot_be_sent"
KEYS = {"key": "a", "secret": "b"}


@pytest.mark.parametrize("verb", VERBS)
def test_a_panic_of_obstore_is_an_error_of_ours_that_travels(verb, monkeypatch):
    for name, value in PANICKING.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(CHECK, lambda _: False)
    with pytest.raises(ConfigError, match="no request can be made of these settings") as caught:
        VERBS[verb](open_store("s3://bucket/run", {"endpoint_url": UNUSED}, ONCE))
    assert type(caught.value.__cause__).__name__ == "PanicException"
    assert "InvalidHeaderValue" in str(pickle.loads(pickle.dumps(caught.value)))
    assert "SECRET" not in str(caught.value)


def save_or_load(
    rank: int, world: int, verb: str, options: dict[str, Any], environ: dict[str, str]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environ.items():
            patch.setenv(name, value)
        patch.setattr(CHECK, lambda _: False)
        getattr(dos, verb)({"w": torch.ones(4)}, "s3://bucket/run", storage_options=options)


@pytest.mark.parametrize("verb", ["save", "load"])
def test_every_rank_fails_with_the_error_and_none_waits(verb):
    for outcome in try_ranks(2, save_or_load, verb, {"endpoint_url": UNUSED}, PANICKING):
        assert isinstance(outcome.error, ConfigError), str(outcome)


@pytest.mark.parametrize("scheme", ["s3", "gs", "az"])
@pytest.mark.parametrize(
    "endpoint_url",
    [
        "http://127.0.0.1:99999",
        "http://127.0.0.1:x",
        "http://ex ample",
        "http://exämple",
        "http://[::1",
        "http://[::1]x",
        "http://1.2.3.4.5",
        "http://:9000",
        "http://a..b",
        "http://host/a b",
    ],
)
def test_an_endpoint_that_there_cannot_be_is_refused_at_once(scheme, endpoint_url):
    account = {"account_name": "a", "account_key": "a2V5"}
    given = {"s3": KEYS, "gs": {"token": "t"}, "az": account}[scheme]
    with pytest.raises(ConfigError, match=r"must read http\(s\)://host\[:port\]"):
        open_store(f"{scheme}://bucket/run", {**given, "endpoint_url": endpoint_url}, ONCE)


def test_every_endpoint_that_there_can_be_is_taken():
    for place in (
        "127.0.0.1:9000",
        "127.1",
        "[::1]:9000",
        "localhost",
        "3f2a9c:80",
        "minio_1.svc.cluster.local.:9000",
        "xn--exmple-cua.org",
        "azurite:10000/devstoreaccount1",
        "host/a%20b",
    ):
        assert server_url(f"http://{place}", use_ssl=True) == f"http://{place}"


def test_certificates_that_cannot_be_read_are_a_wrong_setting(tmp_path):
    (tmp_path / "ca.pem").write_text("no certificate")
    for name in ("nowhere", "ca.pem"):
        with pytest.raises(ConfigError, match="'verify' cannot be read"):
            tls_context(str(tmp_path / name))


@pytest.mark.parametrize("transport", ["native", "boto3"])
@pytest.mark.parametrize("region", ["a\nb", "é", "eu west", "a/b"])
def test_a_region_that_there_cannot_be_is_refused_at_once(transport, region):
    options = {**KEYS, "endpoint_url": UNUSED, "region": region, "transport": transport}
    with pytest.raises(ConfigError, match="the region"):
        open_store("s3://bucket/run", options, ONCE)


@pytest.mark.parametrize("host", ["127.0.0.1:9000", "[::1]:9000"])
def test_virtual_addressing_needs_a_host_name(host):
    options = {**KEYS, "addressing_style": "virtual"}
    with pytest.raises(ConfigError, match="'virtual' needs a host name"):
        open_store("s3://bucket/run", {**options, "endpoint_url": f"http://{host}"}, ONCE)
    open_store("s3://bucket/run", {**options, "endpoint_url": "http://localhost:9000"}, ONCE)
