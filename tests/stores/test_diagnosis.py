"""Whose credentials a store is asked with, and what its server says, for a diagnosis."""

from __future__ import annotations

import socket
from typing import Any
from unittest.mock import Mock
from urllib.request import Request

import fsspec
import pytest

from dcp_objstore.errors import CredentialsError, StoreUnavailableError
from dcp_objstore.stores import StoreSpec, diagnosis
from dcp_objstore.stores.credentials import Credentials
from dcp_objstore.stores.diagnosis import Identity, ask_region, identify, named_server
from dcp_objstore.stores.endpoint import answer_to, tls_context
from tests.support.scripted import Answer, RawServer, ScriptedServer, refusing

KEYS = {"key": "AKIA0123456789AB", "secret": "SECRET", "region": "r"}


def test_an_identity_names_its_source_and_shows_no_secret(monkeypatch):
    found: Any = identify(StoreSpec("s3://bucket/run", KEYS))
    assert found == Identity(found.source, "AKIA…89AB", None)
    assert "storage_options" in str(found)
    assert "SECRET" not in str(found)
    public = identify(StoreSpec("s3://bucket/run", {"anon": True}))
    assert public == Identity("anonymous", None, None)
    azure = StoreSpec("az://box/run", {"account_name": "acct", "account_key": "a2V5"})
    shown = identify(azure)
    assert shown is not None and (shown.access_key, shown.account) == (None, "acct")
    for provider, key in ((None, None), (lambda: {"access_key_id": "abc"}, "abc…"), (dict, None)):
        found = None, Credentials("a place", provider)
        monkeypatch.setattr(diagnosis, "find_credentials", lambda *_, found=found: found)
        assert identify(StoreSpec("s3://bucket/run")) == Identity("a place", key, None)
    refusing = Credentials("a place", Mock(side_effect=ValueError("no answer")))
    monkeypatch.setattr(diagnosis, "find_credentials", lambda *_: (None, refusing))
    with pytest.raises(CredentialsError, match="a place: no answer"):
        identify(StoreSpec("s3://bucket/run"))
    fs = fsspec.filesystem("memory")
    for url, options in (
        ("memory://x", None),
        ("file:///tmp/x", None),
        ("memory://x", {"fs": fs}),
        ("sftp://host/x", {"host": "h"}),
    ):
        assert identify(StoreSpec(url, options)) is None, url


def test_the_region_is_asked_for_by_one_head_without_credentials():
    answers = iter([{"x-amz-bucket-region": "eu-west-3"}, {}])
    with ScriptedServer(lambda *_: Answer(403, next(answers), b"")) as server:
        options = {**KEYS, "endpoint_url": f"{server.endpoint_url}/"}
        spec = StoreSpec("s3://bucket/run", options)
        assert ask_region(spec) == "eu-west-3"
        assert ask_region(spec) is None
        assert [row[:2] for row in server.requests] == [("HEAD", "/bucket")] * 2
        assert not any("uthorization" in name for row in server.requests for name in row[2])
        assert named_server(spec) == (server.endpoint_url, "r")
        elsewhere = {"anon": True, "endpoint_url": server.endpoint_url}
        other = StoreSpec("gs://bucket/run", elsewhere)
        assert ask_region(other) is None
        assert named_server(other) == (server.endpoint_url, None)
        assert len(server.requests) == 2
    with refusing() as endpoint_url, RawServer(b"this is no HTTP\r\n\r\n") as other:
        for place in (endpoint_url, f"http://{other.address}"):
            spec = StoreSpec("s3://bucket/run", {**KEYS, "endpoint_url": place})
            with pytest.raises(StoreUnavailableError) as caught:
                ask_region(spec)
            assert caught.value.url == "s3://bucket/run"
    assert named_server(StoreSpec("memory://x")) == (None, None)


def test_a_silent_server_is_given_up_after_the_time_out():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        request = Request(f"http://127.0.0.1:{silent.getsockname()[1]}/bucket")
        with pytest.raises(StoreUnavailableError, match="timed out"):
            answer_to(request, tls_context(True), 0.1, "s3://bucket")


@pytest.mark.parametrize(
    ("proxies", "taken"),
    [
        ({"all": "http://a"}, {"http": "http://a", "https": "http://a"}),
        ({"all": "http://a", "http": "http://b"}, {"http": "http://b", "https": "http://a"}),
        ({"all": "socks5://a"}, {}),
        ({"https": "http://b"}, {"https": "http://b"}),
    ],
)
def test_the_proxy_for_all_schemes_is_taken_where_none_has_its_own(monkeypatch, proxies, taken):
    handler = Mock(side_effect=InterruptedError)
    monkeypatch.setattr("urllib.request.ProxyHandler", handler)
    monkeypatch.setattr("urllib.request.getproxies", lambda: proxies)
    with pytest.raises(InterruptedError):
        answer_to(Request("http://host"), tls_context(True), 1, "s3://bucket")
    handler.assert_called_once_with({**proxies, **taken})


def test_aws_is_asked_at_the_server_of_the_region(monkeypatch):
    asked: list[str] = []

    def answer(request: Any, *_: object) -> tuple[int, dict[str, str], bytes]:
        asked.append(request.full_url)
        return 200, {"x-amz-bucket-region": "r"}, b""

    monkeypatch.setattr("dcp_objstore.stores.diagnosis.answer_to", answer)
    for region, endpoint_url in (("eu-west-3", None), ("r", "https://s3.r.amazonaws.com")):
        spec = StoreSpec("s3://bucket", {**KEYS, "region": region})
        assert named_server(spec) == (endpoint_url, region)
        assert ask_region(spec) == "r"
    assert asked == [f"https://s3.{region}.amazonaws.com/bucket" for region in ("eu-west-3", "r")]
