"""What obstore cannot make a request of: one of our errors, never its panic, and for all ranks."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

import dcp_objstore as dos
from dcp_objstore.errors import ConfigError, DcpObjstoreError
from dcp_objstore.stores import open_store
from dcp_objstore.stores.endpoint import server_url
from dcp_objstore.stores.obstore.errors import translate_panic
from tests.support.ranks import try_ranks
from tests.support.verbs import ONCE, VERBS

UNUSED = "http://127.0.0.1:1"  # nothing is sent
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


def test_a_panic_for_another_reason_keeps_its_text_and_other_exceptions_are_none():
    panic = type("PanicException", (BaseException,), {"__module__": "pyo3_runtime"})
    found = translate_panic(panic("index out of bounds"))
    assert type(found) is DcpObjstoreError
    assert "index out of bounds" in str(found)
    assert translate_panic(KeyboardInterrupt()) is None


def save_or_load(
    rank: int, world: int, verb: str, options: dict[str, Any], environ: dict[str, str]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environ.items():
            patch.setenv(name, value)
        patch.setattr(CHECK, lambda _: False)
        getattr(dos, verb)({"w": torch.ones(4)}, "s3://bucket/run", storage_options=options)


@pytest.mark.parametrize("verb", ["save", "load"])
@pytest.mark.parametrize(
    ("options", "environ"),
    [({}, PANICKING), ({**KEYS, "addressing_style": "virtual"}, {})],
    ids=["panic", "virtual"],
)
def test_every_rank_fails_with_the_error_and_none_waits(verb, options, environ):
    given = {**options, "endpoint_url": UNUSED}
    for outcome in try_ranks(2, save_or_load, verb, given, environ):
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
