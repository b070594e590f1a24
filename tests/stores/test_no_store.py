"""A web server where a store was meant: the error says so, and what to check."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch

import dcp_objstore as dos
from dcp_objstore.config import TransferConfig
from dcp_objstore.errors import ConfigError, DcpObjstoreError, ObjectNotFoundError
from dcp_objstore.stores import ObjectStore, open_store
from dcp_objstore.stores.protocol import IfAbsent, IfVersion, Version
from tests.support.scripted import Answer, Scripted, ScriptedServer
from tests.support.tampering import TamperingProxy
from tests.support.verbs import ONCE, VERBS

PAGE = b"<html><body>Welcome</body></html>"
OPTIONS: dict[str, dict[str, Any]] = {
    "s3": {"key": "a", "secret": "b"},
    "gs": {"token": "t"},
    "az": {"account_name": "a", "account_key": "a2V5"},
    "s3 over boto3": {"key": "a", "secret": "b", "transport": "boto3"},
}
SAYS = r"(?s)this does not look like a store.*check endpoint_url"


@pytest.fixture
def web() -> Iterator[Callable[[int], str]]:
    """Makes a web server that answers everything with one status and a page; gives its URL."""
    with ExitStack() as stack:

        def make(status: int) -> str:
            server = stack.enter_context(ScriptedServer())
            page = (status, {"Content-Type": "text/html; charset=utf-8"}, PAGE)
            server.answer = lambda *_: page
            return server.endpoint_url

        yield make


def url_of(scheme: str) -> str:
    return f"{scheme.split(maxsplit=1)[0]}://bucket/run"


def at(scheme: str, endpoint_url: str) -> ObjectStore:
    return open_store(url_of(scheme), {**OPTIONS[scheme], "endpoint_url": endpoint_url}, ONCE)


@pytest.mark.parametrize("scheme", OPTIONS)
def test_a_page_or_a_404_without_a_code_is_no_stores_answer(web, scheme):
    store = at(scheme, web(200))
    for verb in ("get", "put", "put_stream", *(["list"] if scheme in ("s3", "gs", "az") else [])):
        with pytest.raises(DcpObjstoreError, match=SAYS):
            VERBS[verb](store)
    store = at(scheme, web(404))
    for verb in ("list", "put", "put_stream"):
        with pytest.raises(ConfigError, match=SAYS):
            VERBS[verb](store)


def test_a_save_and_a_load_say_that_there_is_no_store(web):
    for status in (200, 404):
        options = {**OPTIONS["s3"], "endpoint_url": web(status)}
        with pytest.raises(ConfigError, match=SAYS):
            dos.save({"w": torch.ones(2)}, "s3://bucket/run", storage_options=options)
    options["endpoint_url"] = web(200)
    with pytest.raises(ConfigError, match=SAYS):
        dos.load({"w": torch.ones(2)}, "s3://bucket/run", storage_options=options)


@pytest.mark.parametrize("scheme", ["s3", "s3 over boto3"])
def test_a_404_without_a_code_may_say_that_an_object_is_missing(web, scheme):
    store = at(scheme, web(404))
    for verb in ("get", "head", "open_range"):
        with pytest.raises(ObjectNotFoundError):
            VERBS[verb](store)
    with pytest.raises(ObjectNotFoundError):
        store.put("k", b"", precondition=IfVersion(Version('"e"', None)))
    with pytest.raises(ConfigError, match=SAYS):
        store.put("k", b"", precondition=IfAbsent())


def test_only_the_first_empty_listing_asks_whether_there_is_a_store(bucket):
    with TamperingProxy(bucket.storage_options) as proxy:
        store = open_store(bucket.url, proxy.storage_options, ONCE)
        assert list(store.list()) == []
        assert list(store.list()) == []
        assert [asked.method for asked in proxy.asked] == ["GET", "HEAD", "GET", "GET", "GET"]


LISTING = b"""<ListBucketResult><Name>bucket</Name><KeyCount>1</KeyCount><MaxKeys>1000</MaxKeys>
<IsTruncated>false</IsTruncated><Contents><Key>run/k</Key><Size>1</Size><ETag>"e"</ETag>
<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents></ListBucketResult>"""


@pytest.mark.parametrize("body", [PAGE, b""])
@pytest.mark.parametrize("transport", ["native", "boto3", "fsspec"])
def test_a_page_in_place_of_one_listing_is_not_believed(transport, body):
    """A run would be taken for an empty one, and its job would begin anew."""

    def answer(method: str, _target: str, nth: int) -> Answer:
        wrong = method == "GET" and nth == 2
        return Answer(200, {"Content-Type": "application/xml"}, body if wrong else LISTING)

    with Scripted(answer) as server:
        store = server.store(TransferConfig(max_retries=2), transport=transport)
        for _ in range(2):
            assert [meta.key for meta in store.list()] == ["k"]
        assert len(server.requests) == 3
