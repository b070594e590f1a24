"""Each transport sends a request once; one loop sends again what failed, and counts it."""

from __future__ import annotations

import itertools
import random
import re
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta

import pytest

from dcp_objstore.config import TransferConfig
from dcp_objstore.errors import StoreUnavailableError
from dcp_objstore.stores import ObjectStore, StoreSpec, open_store
from dcp_objstore.stores.admission.limiter import limiter_of
from dcp_objstore.stores.clients import make_filesystems
from dcp_objstore.stores.obstore.clients import Clients
from dcp_objstore.stores.obstore.factory import ClientFactory
from dcp_objstore.stores.ranges import read_range
from dcp_objstore.stores.retries import SMALL_BYTES
from dcp_objstore.stores.spec import open_uploads
from dcp_objstore.stores.urls import parse_url
from tests.support.campaign import cases
from tests.support.scripted import Answer, RawServer, ScriptedServer
from tests.support.verbs import VERBS

MIB = 1024 * 1024
KEYS = {"key": "a", "secret": "b"}
ADAPTERS: dict[str, tuple[str, dict[str, object]]] = {
    "obstore": ("s3", KEYS),
    "boto3": ("s3", {**KEYS, "transport": "boto3"}),
    "s3fs": ("s3", {**KEYS, "transport": "fsspec"}),
}
# What obstore sends again by itself: parts cannot be sent again from here.
HIDDEN = {("obstore", "put_stream")}
EACH = [(adapter, verb) for adapter in ADAPTERS for verb in VERBS if (adapter, verb) not in HIDDEN]
RETRIES = 2
BODY = random.Random(1).randbytes(4 * MIB)


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dcp_objstore.stores.retries.RetryPolicy.pause_seconds", lambda *_: 0.001)


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer() as found:
        yield found


def store_over(adapter: str, endpoint_url: str, retries: int = RETRIES) -> ObjectStore:
    scheme, options = ADAPTERS[adapter]
    if adapter == "s3fs":
        pytest.importorskip(adapter)
    given = {**options, "endpoint_url": endpoint_url}
    return open_store(f"{scheme}://bucket/run", given, TransferConfig(max_retries=retries))


@pytest.mark.parametrize(("adapter", "verb"), EACH)
def test_a_request_that_always_fails_is_sent_as_often_as_was_asked_for(server, adapter, verb):
    server.answer = lambda *_: (500, {}, b"")
    store = store_over(adapter, server.endpoint_url)
    with pytest.raises(StoreUnavailableError) as caught:
        VERBS[verb](store)
    assert "max retries" not in str(caught.value), "a library's own count"
    assert len(server.requests) == (1 if verb == "put_absent" else 1 + RETRIES)
    if verb == "put":
        with pytest.raises(StoreUnavailableError):
            store.put("k", b"x", retry=False)
        assert len(server.requests) == 1 + RETRIES + 1


# The loop and the count are the same, whatever has failed.
@pytest.mark.parametrize(
    ("adapter", "verb"),
    cases(EACH, default=[one for one in EACH if one[1] in ("get", "put_absent", "put_stream")]),
)
def test_a_connection_that_is_hung_up_counts_as_a_try(adapter, verb):
    with RawServer() as server, pytest.raises(StoreUnavailableError):
        VERBS[verb](store_over(adapter, f"http://{server.address}"))
    # aiohttp sends each once more over another connection, and has no public switch.
    times = 2 if adapter == "s3fs" and verb != "put_stream" else 1
    assert len(server.heads) == times * (1 if verb == "put_absent" else 1 + RETRIES)


@pytest.mark.parametrize(
    ("verb", "adapter"),
    cases(
        itertools.product(["put", "put_absent", "delete"], ADAPTERS),
        # Of boto3 another test looks at the time-outs, and which of them each operation has.
        default=[("put_absent", "obstore"), ("put_absent", "s3fs"), ("delete", "obstore")],
    ),
)
def test_a_small_write_to_a_silent_server_has_a_third_of_the_stall_time_out(
    adapter, verb, monkeypatch
):
    monkeypatch.setattr("dcp_objstore.stores.retries._LEAST_SMALL_TIMEOUT_SECONDS", 0.1)

    def given_up(seconds: float, write: Callable[[ObjectStore], object]) -> float:
        """Return after how many seconds; a request has so many, a small one 0.1."""
        # urllib3, below boto3, has the time to connect for sending, too.
        config = TransferConfig(
            max_retries=0,
            request_timeout_seconds=seconds,
            connect_timeout_seconds=1,
            stall_timeout_seconds=0.3,
        )
        scheme, options = ADAPTERS[adapter]
        given = {**options, "endpoint_url": f"http://127.0.0.1:{silent.getsockname()[1]}"}
        store = open_store(f"{scheme}://bucket/run", given, config)
        began_at = time.monotonic()
        with pytest.raises(StoreUnavailableError):
            write(store)
        return time.monotonic() - began_at

    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert given_up(200, VERBS[verb]) < 100  # whatever else the machine does
        if verb == "put_absent":
            assert given_up(200, lambda store: store.put("k", bytes(SMALL_BYTES))) < 100
            assert given_up(0.5, lambda store: store.put("k", bytes(SMALL_BYTES + 1))) > 0.4


@pytest.mark.parametrize(
    ("seconds", "small", "whole", "between"),
    [
        # Of a request, to connect, of a stall; then of one that is small.
        ((100, 7, 60), 20, 100, 30),
        ((10, 15, 6), 3, 10, 10),
    ],
)
def test_each_client_waits_as_long_as_its_use_allows(seconds, small, whole, between, monkeypatch):
    """For an answer as a whole and to connect, and for the next bytes of a read."""
    config = TransferConfig(
        request_timeout_seconds=seconds[0],
        connect_timeout_seconds=seconds[1],
        stall_timeout_seconds=seconds[2],
        retry_timeout_seconds=44,
        max_retries=4,
    )
    monkeypatch.setattr("dcp_objstore.stores.obstore.clients.DirectLane", lambda *given: given)
    factory = ClientFactory(lambda *given: given, sign=lambda *given: given)
    obstore = Clients(parse_url("s3://bucket"), factory, config, trust=list)
    sign, *of_lane = obstore.lane  # type: ignore[misc]
    assert of_lane == [between, list]
    assert sign("k") == (obstore.get("range"), "k")
    backoff = {"init_backoff": timedelta(seconds=1), "max_backoff": timedelta(seconds=10)}
    retries = {"retry_timeout": timedelta(seconds=44), "backoff": {**backoff, "base": 3}}
    for use, timeout, next_bytes in (
        ("stream", whole, None),
        ("write", whole, None),
        ("small", small, None),
        ("read", whole, small),
        ("range", whole, between),
        ("list", small, small),
    ):
        made = obstore.get(use)  # type: ignore[arg-type]
        timeouts, retries_of_use = made
        expected = {"timeout": timeout, "connect_timeout": min(seconds[1], timeout)}
        expected |= {} if next_bytes is None else {"read_timeout": next_bytes}
        assert {name: value.total_seconds() for name, value in timeouts.items()} == expected
        assert retries_of_use == {**retries, "max_retries": 4 if use == "stream" else 0}
        assert obstore.get(use) is made  # type: ignore[arg-type]
    spec = StoreSpec("s3://bucket", {**KEYS, "endpoint_url": "http://127.0.0.1:1"}, config)
    for use, timeout in (("write", whole), ("small", small), ("read", between)):
        made = spec.boto3_clients().get(use).meta.config  # type: ignore[arg-type]
        assert (made.read_timeout, made.connect_timeout) == (timeout, seconds[1])
        assert spec.boto3_clients().get(use).meta.config is made, "it is made once"  # type: ignore[arg-type]
    pytest.importorskip("s3fs")
    over_s3fs = make_filesystems(spec.parsed, spec.storage_options, config)
    for fs, timeout in ((over_s3fs.write, whole), (over_s3fs.read, between)):
        assert fs.config_kwargs["read_timeout"] == timeout
        assert fs.config_kwargs["connect_timeout"] == seconds[1]


def test_unfinished_uploads_are_asked_for_as_often_page_by_page(server):
    page = (
        "<ListMultipartUploadsResult><IsTruncated>{more}</IsTruncated><NextKeyMarker>run/a"
        "</NextKeyMarker><NextUploadIdMarker>u</NextUploadIdMarker></ListMultipartUploadsResult>"
    )
    pages = [
        (500, ""),
        (200, page.format(more="true")),
        (500, ""),
        (200, page.format(more="false")),
    ]

    def answer(method: str, target: str, nth: int) -> Answer:
        status, body = pages[nth - 1]
        return status, {"Content-Type": "application/xml"}, body.encode()

    server.answer = answer
    options = {**KEYS, "endpoint_url": server.endpoint_url}
    spec = StoreSpec("s3://bucket/run", options, TransferConfig(max_retries=RETRIES))
    assert open_uploads(spec).list() == []
    targets = [target for _, target, _ in server.requests]
    assert ["upload-id-marker=u" in target for target in targets] == [False, False, True, True]
    server.answer = lambda *_: (500, {}, b"")
    del server.requests[:]
    with pytest.raises(StoreUnavailableError):
        open_uploads(spec).list()
    assert len(server.requests) == 1 + RETRIES


def _page(keys: Iterable[int], token: str = "") -> bytes:
    """A page of a listing, as S3 and GCS give it; without a token it is the last one."""
    entries = "".join(
        f"<Contents><Key>run/{number:04d}</Key><Size>1</Size><ETag>e</ETag>"
        "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
        for number in keys
    )
    more = f"<IsTruncated>true</IsTruncated><NextContinuationToken>{token}</NextContinuationToken>"
    return f"<ListBucketResult>{entries}{more if token else ''}</ListBucketResult>".encode()


def _azure_page(keys: Iterable[int], token: str) -> bytes:
    entries = "".join(
        f"<Blob><Name>run/{number:04d}</Name><Properties><Content-Length>1</Content-Length>"
        "<Content-Type>a/b</Content-Type><Last-Modified>Thu, 01 Jan 2026 00:00:00 GMT"
        "</Last-Modified><Etag>e</Etag></Properties></Blob>"
        for number in keys
    )
    more = f"<NextMarker>{token}</NextMarker>"
    return f"<EnumerationResults><Blobs>{entries}</Blobs>{more}</EnumerationResults>".encode()


@pytest.mark.parametrize(
    ("adapter", "is_new"),
    cases(
        itertools.product(["obstore", "boto3", "s3fs", "azure"], [False, True]),
        default=[*((adapter, True) for adapter in ADAPTERS), ("obstore", False), ("azure", False)],
    ),
)
def test_a_listing_that_repeats_its_pages_ends_with_an_error(server, adapter, is_new):
    """One page with one token, or two pages by turns with ever new tokens."""

    def answer(method: str, target: str, nth: int) -> Answer:
        if nth > 50:
            return Answer(400, {}, b"")
        number = nth if is_new else 0
        # obstore hands over what comes by the thousand.
        count = 500 if adapter in ("obstore", "azure") else 20
        numbers = range(count * (number % 2), count * (number % 2) + count)
        make = _azure_page if adapter == "azure" else _page
        return Answer(200, {"Content-Type": "application/xml"}, make(numbers, f"t{number}"))

    server.answer = answer
    if adapter == "azure":
        options = {"account_name": "a", "anon": True, "endpoint_url": server.endpoint_url}
        store = open_store("az://bucket/run", options, TransferConfig(max_retries=RETRIES))
    else:
        store = store_over(adapter, server.endpoint_url)
    with pytest.raises(StoreUnavailableError, match="again"):
        list(store.list())
    assert len(server.requests) <= 10


@pytest.mark.parametrize(("adapter", "page"), [("obstore", 1000), ("boto3", 20), ("s3fs", 20)])
def test_a_listing_that_breaks_off_goes_on_behind_the_last_key(server, adapter, page):
    def answer(method: str, target: str, nth: int) -> Answer:
        headers = {"Content-Type": "application/xml"}
        if nth == 2:
            return 500, headers, b""
        goes_on = "continuation-token=t" in target or "start-after=run%2F0999" in target
        return 200, headers, _page(range(page, page + 9)) if goes_on else _page(range(page), "t")

    server.answer = answer
    found = [meta.key for meta in store_over(adapter, server.endpoint_url).list()]
    assert found == [f"{number:04d}" for number in range(page + 9)]
    assert len(server.requests) == 3


@pytest.mark.parametrize("scheme", ["s3", "gs"])
@pytest.mark.parametrize(("count", "size"), [(50, 20), (2000, 1000), (2003, 1000), (41, 41)])
def test_a_listing_goes_on_behind_a_page_without_a_token(server, scheme, count, size):
    """obstore ends a listing there, and does not tell that the server said that there is more."""

    def answer(method: str, target: str, nth: int) -> Answer:
        after = re.search(r"(?:start-after|start-offset|startOffset)=run%2F(\d+)", target)
        first = int(after[1]) + 1 if after else 0
        return 200, {"Content-Type": "application/xml"}, _page(range(first, count)[:size])

    server.answer = answer
    options = {**(KEYS if scheme == "s3" else {"anon": True}), "endpoint_url": server.endpoint_url}
    store = open_store(f"{scheme}://bucket/run", options, TransferConfig(max_retries=RETRIES))
    assert [meta.key for meta in store.list()] == [f"{number:04d}" for number in range(count)]
    # Of a number that no page has, none is asked for in vain.
    assert len(server.requests) == {50: 4, 2000: 3, 2003: 3, 41: 1}[count]


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("s3://bucket--usw2-az1--x-s3/run", KEYS),
        ("az://container/run", {"account_name": "a", "account_key": "a2V5"}),
    ],
    ids=["directory-bucket", "azure"],
)
def test_a_listing_in_an_order_of_its_own_that_breaks_off_loses_and_repeats_no_key(
    server, url, options
):
    keys = [number * 7 % 1500 for number in range(1500)]  # not in the order of their names
    make = _page if url.startswith("s3") else _azure_page

    def answer(method: str, target: str, nth: int) -> Answer:
        goes_on = "continuation-token=t" in target or "marker=t" in target
        page = make(keys[1000:], "") if goes_on else make(keys[:1000], "t")
        return Answer(500 if nth == 2 else 200, {"Content-Type": "application/xml"}, page)

    server.answer = answer
    given = {**options, "endpoint_url": server.endpoint_url}
    store = open_store(url, given, TransferConfig(max_retries=RETRIES))
    assert [meta.key for meta in store.list()] == [f"{number:04d}" for number in keys]
    assert len(server.requests) == 4

    def repeat(method: str, target: str, nth: int) -> Answer:
        status = 400 if nth > 20 else 500 if nth == 6 else 200
        return Answer(status, {"Content-Type": "application/xml"}, make(keys[:1000], "t"))

    server.answer = repeat
    with pytest.raises(StoreUnavailableError, match="same page"):
        list(store.list())


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_a_store_that_throttles_slows_the_process_down_over_each_adapter(server, adapter):
    server.answer = lambda *_: (503, {}, b"")
    store = store_over(adapter, server.endpoint_url, retries=0)
    hidden = {verb for one, verb in HIDDEN if one == adapter}
    assert {*store.reports_throttling} == {"copy", *VERBS} - {"put_absent"} - hidden
    assert not limiter_of(store).window.is_throttled
    with pytest.raises(StoreUnavailableError):
        store.head("k")
    assert limiter_of(store).window.is_throttled


def range_answer(asked: str, *, share: float = 1.0) -> Answer:
    """The answer to a request with this `Range`, or the first share of it."""
    first, last = map(int, asked.removeprefix("bytes=").split("-"))
    headers = {
        "ETag": '"e"',
        "Last-Modified": "Wed, 01 Jan 2025 00:00:00 GMT",
        "Content-Range": f"bytes {first}-{last}/{len(BODY)}",
        "Content-Length": str(last + 1 - first),
        "Connection": "close",
    }
    return Answer(206, headers, BODY[first : first + int(share * (last + 1 - first))])


def asked_range(server: ScriptedServer) -> str:
    return {name.lower(): value for name, value in server.requests[-1][2].items()}["range"]


@pytest.mark.parametrize(
    "options",
    [KEYS, {"anon": True}, {**KEYS, "transport": "boto3"}],
    ids=["direct", "obstore", "boto3"],
)
def test_a_body_that_breaks_off_under_a_slow_reader_is_asked_for_again(server, options):
    server.answer = lambda method, target, nth: range_answer(
        asked_range(server), share=0.5 if nth == 1 else 1.0
    )
    given = {**options, "endpoint_url": server.endpoint_url}
    store = open_store("s3://bucket/run", given, TransferConfig(retry_timeout_seconds=0.1))
    into = memoryview(bytearray(len(BODY)))
    with store.open_range("k", 0, len(BODY)) as body:
        body.readinto(into[:MIB])
        time.sleep(0.15)
        body.readinto(into[MIB:])
    assert into == BODY
    assert len(server.requests) == 2


def test_a_server_reached_over_the_direct_lane_alone_is_waited_for(server, monkeypatch):
    monkeypatch.setattr("dcp_objstore.stores.retries.FIRST_PATIENCE_SECONDS", 0)
    server.answer = lambda *_: range_answer(asked_range(server))
    store = store_over("obstore", server.endpoint_url)
    assert read_range(store, "k", 0, len(BODY)) == BODY
    server.stop()
    with pytest.raises(StoreUnavailableError, match=rf"\({RETRIES} retries in"):
        read_range(store, "k", 0, len(BODY))
