"""What obstore's clients are made of, and the GETs that are signed without them."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from obstore.store import S3Store

from dcp_objstore.stores.credentials import ANONYMOUS, Credentials
from dcp_objstore.stores.obstore.factory import new_client_of, signed_url, unsigned, with_token


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
