"""What obstore's clients are made of, and the GETs that are signed without them."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from obstore.store import S3Store

from dcp_objstore.stores.azure.client import azure_factory
from dcp_objstore.stores.azure.options import AzureOptions
from dcp_objstore.stores.credentials import ANONYMOUS, Credentials
from dcp_objstore.stores.gcs.client import gcs_factory
from dcp_objstore.stores.gcs.options import GcsOptions
from dcp_objstore.stores.obstore.direct import LaneError, SignedGet
from dcp_objstore.stores.obstore.factory import new_client_of, signed_url, unsigned, with_token
from dcp_objstore.stores.s3.client import s3_factory
from dcp_objstore.stores.s3.options import S3Options
from dcp_objstore.stores.urls import parse_url


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


def client_of(credentials: Credentials = ANONYMOUS, **settings: Any) -> dict[str, Any]:
    usual = {"endpoint": None, "verify": True}
    config = {"region": "r", "skip_signature": False}
    make = new_client_of(dict, config, credentials, **{**usual, **settings})
    made: dict[str, Any] = make({"timeout": 1}, {"max_retries": 2})
    return made


def test_a_client_has_the_shared_settings_and_those_of_its_use(tmp_path: Path):
    certificates = tmp_path / "ca.pem"
    certificates.write_bytes(b"PEM")
    assert client_of() == {
        "config": {"skip_signature": True, "region": "r"},
        "client_options": {"timeout": 1},
        "retry_config": {"max_retries": 2},
        "credential_provider": None,
    }
    given = Credentials("a place", provider=dict, config={"sas_key": "s"})
    made = client_of(given)
    assert made["config"] == {"skip_signature": False, "region": "r", "sas_key": "s"}
    assert made["credential_provider"] is given.provider
    for settings, options in (
        ({"verify": False}, {"allow_invalid_certificates": True}),
        ({"verify": str(certificates)}, {"root_certificate": b"PEM"}),
        ({"endpoint": "http://host"}, {"allow_http": True}),
        ({"endpoint": "https://host"}, {"allow_http": False}),
        ({"headers": {"a": "b"}}, {"default_headers": {"a": "b"}}),
        ({"headers": {}}, {}),
    ):
        assert client_of(**settings)["client_options"] == {**options, "timeout": 1}, settings


@pytest.mark.parametrize(
    ("variables", "is_excluded"),
    [
        ({"no_proxy": "*", "https_proxy": "http://proxy"}, True),
        ({"no_proxy": " * ", "http_proxy": "http://proxy"}, True),
        ({"no_proxy": "host", "https_proxy": "http://proxy"}, False),
        ({"https_proxy": "http://proxy"}, False),
        ({"no_proxy": "*"}, False),
    ],
)
def test_no_host_has_a_proxy_where_the_environment_says_none(monkeypatch, variables, is_excluded):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    options = client_of()["client_options"]
    assert ("proxy_url" in options) == ("proxy_excludes" in options) == is_excluded


def test_a_get_is_signed_by_a_token_until_a_minute_before_its_end_or_by_obstore():
    headers = {"x-ms-version": "1"}
    signed = with_token("https://host/k", {"token": "t", "expires_at": None}, headers)
    assert (signed.url, signed.until) == ("https://host/k", float("inf"))
    assert signed.headers == {"Authorization": "Bearer t", **headers}
    ends_at = datetime.now(UTC) + timedelta(minutes=5)
    signed = with_token("https://host/k", {"token": "t", "expires_at": ends_at}, {})
    assert 239 < signed.until - time.monotonic() <= 240
    assert signed.origin == "https://host"
    client = S3Store("bucket", access_key_id="a", secret_access_key="b", region="r")
    signed = signed_url(client, "k")
    assert "X-Amz-Expires=1800" in signed.url  # clocks may differ
    assert signed.url.startswith("https://s3.r.amazonaws.com/bucket/k?")
    plain = unsigned("https://host/bucket")(None, "a b/ü~+%")
    assert (plain.url, plain.headers) == ("https://host/bucket/a%20b/%C3%BC~%2B%25", {})


GIVEN = Credentials("a place", lambda: {"token": "t", "expires_at": None}, account_name="acct")
TOKEN = {"Authorization": "Bearer t"}
AWS = "s3.eu-west-1.amazonaws.com"
EXPRESS = "name--euw1-az2--x-s3"
OTHER = {"endpoint_url": "http://x"}
PATH = {"virtual_hosted_style_request": False}
OF_OTHER = {"checksum_algorithm": None, "aws_endpoint_url_s3": "http://x"}
SEALED = {"sse": "aws:kms", "sse_kms_key_id": "k", "sse_bucket_key": False}
OF_SEALED = {
    "server_side_encryption": "aws:kms",
    "sse_kms_key_id": "k",
    "sse_bucket_key_enabled": False,
}


@pytest.mark.parametrize(
    ("name", "options", "changed", "bucket_url"),
    [
        ("bkt", SEALED, OF_SEALED, f"https://bkt.{AWS}"),
        ("a.b", {"sign_payload": True}, {**PATH, "unsigned_payload": False}, f"https://{AWS}/a.b"),
        ("bkt", OTHER, {**OF_OTHER, **PATH}, "http://x/bkt"),
        ("x", {**OTHER, "checksum_algorithm": "SHA256", "addressing_style": "virtual"},
         {"checksum_algorithm": "SHA256", "aws_endpoint_url_s3": "http://x.x"}, "http://x.x"),
        ("bkt", {"requester_pays": True}, {"request_payer": True}, None),
        (EXPRESS, {}, {"s3_express": True}, None),
        (EXPRESS, OTHER, {**OF_OTHER, **PATH}, f"http://x/{EXPRESS}"),
    ],
)  # fmt: skip
def test_a_client_of_s3_has_every_setting_and_the_lane_signs_where_it_can(
    monkeypatch, name, options, changed, bucket_url
):
    monkeypatch.setattr("obstore.store.S3Store", dict)
    url, settings = parse_url(f"s3://{name}"), S3Options(region="eu-west-1", **options)
    public = s3_factory(url, replace(settings, anon=True), ANONYMOUS)
    config = {
        "skip_signature": True,
        "bucket": name,
        "region": "eu-west-1",
        "disable_bulk_delete": True,
        "unsigned_payload": True,
        "virtual_hosted_style_request": True,
        "conditional_put": "etag",
        "s3_express": False,
        "checksum_algorithm": "CRC64NVME",
        **changed,
    }
    expected = {key: value for key, value in config.items() if value is not None}
    assert public.new_client({}, {})["config"] == expected
    assert (public.endpoint_url, public.copier) == (settings.endpoint_url, None)
    assert public.ordered == (name != EXPRESS)
    assert (public.sign and public.sign(None, "k")) == (bucket_url and SignedGet(f"{bucket_url}/k"))
    assert s3_factory(url, settings, GIVEN).sign is (bucket_url and signed_url)


def test_a_client_of_gcs_has_every_setting_and_the_lane_a_token(monkeypatch):
    monkeypatch.setattr("obstore.store.GCSStore", dict)
    url = parse_url("gs://bkt/run")
    public = gcs_factory(url, GcsOptions(anon=True), ANONYMOUS)
    assert public.new_client({}, {})["config"] == {"skip_signature": True, "bucket": "bkt"}
    assert (public.endpoint_url, public.copier, public.ordered) == (None, None, True)
    assert public.sign and public.sign(None, "k").url == "https://storage.googleapis.com/bkt/k"
    paid = gcs_factory(url, GcsOptions(endpoint_url="x", requester_pays="p"), GIVEN)
    made = paid.new_client({}, {})
    assert made["config"] == {"skip_signature": False, "bucket": "bkt", "base_url": "https://x"}
    payer = {"x-goog-user-project": "p"}
    assert made["client_options"] == {"allow_http": False, "default_headers": payer}
    assert paid.endpoint_url == "https://x" and paid.copier and paid.copier.server == "https://x"
    assert paid.copier.sign("POST", "u", {}) == {**TOKEN, **payer}
    assert paid.sign and paid.sign(None, "a b") == SignedGet(
        "https://x/bkt/a%20b", {**TOKEN, **payer}
    )


AT = "https://acct.blob.core.windows.net"


@pytest.mark.parametrize(
    ("credentials", "server", "signed", "copies"),
    [
        (replace(ANONYMOUS, account_name="acct"), AT, SignedGet(f"{AT}/bkt/a%20b"), False),
        (Credentials("a place", account_name="acct"), AT, None, False),
        (
            replace(GIVEN, endpoint_url="x"),
            "https://x",
            SignedGet("https://x/bkt/a%20b", {**TOKEN, "x-ms-version": "2023-11-03"}),
            True,
        ),
        (
            replace(GIVEN, provider=lambda: {"sas_token": "sig=s"}),
            AT,
            SignedGet(f"{AT}/bkt/a%20b?sig=s"),
            False,
        ),
        (replace(GIVEN, provider=lambda: {"access_key": "a2V5"}), AT, LaneError, True),
        # To ask for a token may take a request.
        (replace(GIVEN, provider=lambda: 1 // 0, renew=print), AT, ZeroDivisionError, True),
    ],
)
def test_a_client_of_azure_has_every_setting_and_the_lane_what_its_credentials_allow(
    monkeypatch, credentials, server, signed, copies
):
    monkeypatch.setattr("obstore.store.AzureStore", dict)
    factory = azure_factory(parse_url("az://bkt/run"), AzureOptions(), credentials)
    endpoint = None if server == AT else server
    config = {"skip_signature": credentials.anonymous, "container_name": "bkt"}
    config |= {"account_name": "acct"} | ({"endpoint": endpoint} if endpoint else {})
    assert factory.new_client({}, {})["config"] == config
    assert (factory.endpoint_url, factory.ordered) == (endpoint, False)
    assert (factory.copier and factory.copier.server) == (server if copies else None)
    if isinstance(signed, type):
        with pytest.raises(signed):
            factory.sign(None, "a b")  # type: ignore[misc]
    else:
        assert (factory.sign and factory.sign(None, "a b")) == signed
