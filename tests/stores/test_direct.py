"""`DirectLane`: exactly the bytes asked for, in the memory given, or the transport is asked."""

from __future__ import annotations

import math
import os
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime, timedelta
from functools import partial
from http.client import HTTPConnection, HTTPResponse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from unittest.mock import Mock

import obstore
import pytest

from dcp_objstore.errors import ConfigError, CorruptDataError, InputError, ObjectNotFoundError
from dcp_objstore.stores import open_store
from dcp_objstore.stores.obstore import direct, ranges, tls
from dcp_objstore.stores.obstore.direct import (
    WORTHWHILE_BYTES,
    DirectAnswer,
    DirectLane,
    LaneError,
    SignedGet,
)
from dcp_objstore.stores.obstore.tls import TlsSocket
from dcp_objstore.stores.protocol import RangeReading
from dcp_objstore.stores.ranges import Answer, Range, RangeSource, read_range
from tests.support import tampering
from tests.support.azurite import ACCOUNT, KEY, AzureBucket, Azurite, Identity
from tests.support.scripted import RawServer
from tests.support.servers import BUCKET
from tests.support.tampering import TamperingProxy
from tests.support.tls import Certificate, make_certificate, speak_tls
from tests.support.verbs import ONCE

MIB = 1024 * 1024
BODY = bytes(range(256)) * 4096  # 1 MiB


class Handler(BaseHTTPRequestHandler):
    """Answers a range, in the way that the server is told to."""

    protocol_version = "HTTP/1.1"
    server: Server

    def do_GET(self) -> None:
        how = self.server.how
        self.server.seen.append(self.headers["Range"])
        self.server.places.append((self.headers["Host"], self.path))
        first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        part = BODY[first : last + 1]
        statuses = {"whole": 200, "refused": 403, "moved": 307, "throttled": 503}
        status = statuses.get(how, 206)
        place = f"bytes {first + (how == 'elsewhere')}-{last}/{len(BODY)}"
        self.send_response(status)
        length = len(part) - (how == "short")
        framing = (
            ("Transfer-Encoding", "chunked") if how == "chunked" else ("Content-Length", length)
        )
        self.send_header(framing[0], str(framing[1]))
        self.send_header("Content-Range", place)
        if how == "packed":
            self.send_header("Content-Encoding", "gzip")
        if how == "moved":
            self.send_header("Location", "/elsewhere")
        if how == "last":
            self.send_header("Connection", "close")
        if how == "silent":
            self.server.released.wait()
        if how.startswith("paused"):
            self.flush_headers()
            self.wfile.write(b"" if how == "paused between fields" else b"X-A-Field: of no")
            self.server.released.wait()
            self.wfile.write(b"" if how == "paused between fields" else b" matter\r\n")
        self.end_headers()
        of_record = {"in a record": 16384, "forged": 99}
        some = how in ("broken", "stalled", *of_record)
        sent = part[: length // 2 if some else length]
        step = {"small records": 1001, "chunked": 99_999}.get(how, len(sent))
        for at in range(0, len(sent), step):
            piece = sent[at : at + step]
            self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece) if how == "chunked" else piece)
        if how == "chunked":
            self.wfile.write(b"0\r\n\r\n")
        if how in of_record and self.server.scheme == "https":
            # The head of a record of TLS 1.2 and 1.3, and the same or less than it announces.
            with socket.socket(fileno=os.dup(self.connection.fileno())) as raw:
                raw.sendall(b"\x17\x03\x03" + of_record[how].to_bytes(2) + bytes(99))
        if how == "stalled":
            self.server.released.wait()
        if how in ("broken", "stalled", "closing", *of_record):
            self.close_connection = True

    def setup(self) -> None:
        self.server.connections += 1
        super().setup()

    def log_message(self, *_: Any) -> None:
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.scheme = "http"
        if tls is not None:
            self.scheme = "https"
            speak_tls(self, tls)
        self.how = "right"
        self.seen: list[str] = []
        self.places: list[tuple[str, str]] = []
        self.connections = 0
        self.released = threading.Event()
        self.url = f"{self.scheme}://127.0.0.1:{self.server_address[1]}/bucket/key?signed=1"

    def handle_error(self, *_: Any) -> None:
        """A client that has gone is what some tests are about."""


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return make_certificate(tmp_path_factory.mktemp("certificate"))


def _here(port: int, host: str, _port: object, *_: object, **__: object) -> list[Any]:
    """`socket.getaddrinfo` of a world in which every host is the test's server."""
    return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", port))]


@contextmanager
def running(server: Server) -> Iterator[Server]:
    with server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.released.set()
        server.shutdown()


@pytest.fixture(params=["http", "https"])
def server(request: pytest.FixtureRequest, certificate: Certificate) -> Iterator[Server]:
    with running(Server(certificate.context() if request.param == "https" else None)) as found:
        yield found


Lanes = Callable[..., DirectLane]


@pytest.fixture
def make_lane(certificate: Certificate) -> Lanes:
    """To a server that has the certificate."""
    trust = partial(ssl.create_default_context, cafile=certificate.path)
    return partial(DirectLane, trust=trust)


@pytest.fixture
def lane(server: Server, make_lane: Lanes) -> DirectLane:
    return make_lane(lambda _key: SignedGet(server.url), timeout_seconds=5)


def read(lane: DirectLane, start: int = 1000, end: int = 500_000) -> bytes | None:
    """The bytes over the lane; None if it does not give them."""
    came = received(lane, start, end)
    return came if len(came) == end - start else None


def received(lane: DirectLane, start: int, end: int, answer: DirectAnswer | None = None) -> bytes:
    """What the lane gives of a range, in pieces of 100,001 bytes."""
    into, at = memoryview(bytearray(end - start)), 0
    try:
        answer = answer or lane.ask("key", start, end)
    except LaneError:
        answer = None
    if answer is None:
        return b""
    try:
        while at < len(into):
            at += answer.readinto(into[at : at + 100_001])
    except LaneError:
        pass
    finally:
        answer.close()
    return bytes(into[:at])


@pytest.mark.parametrize("how", ["right", "small records", "chunked"])
def test_bytes_arrive_in_the_memory_given_over_one_connection(server, lane, how):
    server.how = how
    for start, end in [(0, 400_000), (1000, 500_000), (0, len(BODY)), (9, len(BODY))]:
        assert read(lane, start, end) == BODY[start:end]
    assert server.connections == (4 if how == "chunked" else 1)  # the last chunk is not read


def test_connections_to_two_servers_are_kept_apart(server, make_lane, certificate):
    with running(Server(certificate.context() if server.scheme == "https" else None)) as other:
        urls = {"key": server.url, "other": other.url}
        lane = make_lane(lambda key: SignedGet(urls[key]), timeout_seconds=5)
        for key in [*urls] * 3:
            answer = lane.ask(key, 0, 400_000)
            assert received(lane, 0, 400_000, answer) == BODY[:400_000]
        assert (server.connections, other.connections) == (1, 1)


@pytest.mark.parametrize("how", ["right", "small records"])
def test_one_call_receives_many_records_and_waits_for_no_more_than_come(
    certificate, make_lane, monkeypatch, how
):
    calls: list[tuple[int, int, int]] = []

    def counted(sock: socket.socket, size: int, flags: int = 0) -> bytes:
        if flags & socket.MSG_DONTWAIT:
            raise BlockingIOError  # as if the server were always late: each call waits
        came = socket.socket.recv(sock, size, flags)
        calls.append((size, len(came), flags))
        return came

    monkeypatch.setattr(TlsSocket, "recv", counted)
    with running(Server(certificate.context())) as server:
        server.how = how
        lane = make_lane(lambda _key: SignedGet(server.url), timeout_seconds=60)
        answer, counts, into = lane.ask("key", 0, len(BODY)), list[int](), bytearray(len(BODY))
        assert answer is not None
        while (at := sum(counts)) < len(BODY):
            counts.append(answer.readinto(memoryview(into)[at : at + 100_001]))
        answer.close()
    assert into == BODY
    assert {*counts[1:-1]} == {100_001}, "but what came with the head"
    waits = [(asked, came) for asked, came, flags in calls if flags & socket.MSG_WAITALL]
    assert waits
    assert all(asked == came for asked, came in waits)
    if how == "right":
        assert len(calls) < len(BODY) // 16384, "handshake and head included"


@pytest.mark.parametrize(("processors", "turns"), [(1, 1), (2, 1), (3, 1), (4, 2), (16, 8)])
def test_one_thread_decrypts_at_a_time_on_each_two_processors(monkeypatch, processors, turns):
    monkeypatch.setattr(tls, "processors", lambda: processors)
    free = tls.new_turns()
    assert [free.acquire(blocking=False) for _ in range(turns + 1)] == [True] * turns + [False]


def test_a_thread_that_waits_for_a_server_lets_others_decrypt(certificate, make_lane, monkeypatch):
    turn = threading.Semaphore(1)
    monkeypatch.setattr("dcp_objstore.stores.obstore.tls._turns.here", turn)
    with running(Server(certificate.context())) as server, ThreadPoolExecutor(4) as threads:
        lane = make_lane(lambda _key: SignedGet(server.url), timeout_seconds=60)
        server.how = "stalled"
        try:
            stalled = [threads.submit(read, lane) for _ in range(2)]
            ends_at = time.monotonic() + 20
            while len(server.seen) < 2:
                assert time.monotonic() < ends_at
                time.sleep(0.01)
            server.how = "right"
            for _ in range(5):
                assert threads.submit(read, lane).result(20) == BODY[1000:500_000]
            assert not any(one.done() for one in stalled)
            assert turn.acquire(timeout=20)
            try:
                kept = threads.submit(read, lane)
                with pytest.raises(TimeoutError):
                    kept.result(0.5)
            finally:
                turn.release()
            assert kept.result(20) == BODY[1000:500_000]
        finally:
            server.released.set()
        assert [one.result(20) for one in stalled] == [None, None]


@pytest.mark.parametrize("how", ["last", "closing"])  # says so, or not
def test_a_server_that_closes_after_every_answer_is_read_from(server, lane, how, monkeypatch):
    retries: list[tuple[object, ...]] = []
    monkeypatch.setattr(direct, "emit_retry", lambda *given: retries.append(given[:2]))
    server.how = how
    for _ in range(5):
        assert read(lane) == BODY[1000:500_000]
    assert server.connections == 5
    assert retries == [("key", 2)] * (4 if how == "closing" else 0)


@pytest.mark.parametrize("how", ["silent", "stalled"])
def test_a_server_that_sends_nothing_for_the_time_out_is_given_up(
    server, make_lane, how, monkeypatch
):
    turn = threading.Semaphore(1)
    monkeypatch.setattr("dcp_objstore.stores.obstore.tls._turns.here", turn)
    lane = make_lane(lambda _key: SignedGet(server.url), timeout_seconds=0.5)
    server.how = how
    assert read(lane) is None
    assert [turn.acquire(blocking=False), turn.acquire(blocking=False)] == [True, False]
    turn.release()
    server.how = "right"
    assert read(lane) == BODY[1000:500_000]


def test_a_connection_whose_handshake_fails_is_closed(monkeypatch):
    monkeypatch.setattr(TlsSocket, "_shake_hands", Mock(side_effect=OSError("no agreement")))
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.settimeout(1)
        with pytest.raises(OSError, match="no agreement") as kept:
            TlsSocket(ours, ssl.create_default_context(), "host")
        assert theirs.recv(1) == b"", kept


def test_the_kernel_keeps_the_time_outs_of_a_connection(server, make_lane):
    lane = make_lane(lambda _key: SignedGet(server.url), timeout_seconds=1.5)
    socket.setdefaulttimeout(60)
    try:
        connection = lane.connect(server.url)
    finally:
        socket.setdefaulttimeout(None)
    assert connection.timeout == 1.5, "while it connects"
    sock = connection.sock
    assert sock.gettimeout() is None
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        assert struct.unpack("ll", sock.getsockopt(socket.SOL_SOCKET, option, 16)) == (1, 500_000)
    sock.close()


def test_a_connection_goes_to_the_port_of_the_url_or_else_to_that_of_its_scheme(monkeypatch):
    asked = Mock(side_effect=OSError("no such host"))
    monkeypatch.setattr(socket, "getaddrinfo", asked)
    lane = DirectLane(SignedGet, timeout_seconds=5)
    for origin in ("http://host", "https://host", "https://host:7"):
        with pytest.raises(OSError, match="no such host"):
            lane.connect(origin)
    assert [call.args[:2] for call in asked.call_args_list] == [
        ("host", 80),
        ("host", 443),
        ("host", 7),
    ]


@pytest.mark.parametrize("how", ["paused between fields", "paused in a field"])
def test_a_pause_inside_the_head_of_an_answer_is_not_its_end(server, make_lane, monkeypatch, how):
    begin = HTTPResponse.begin

    def begin_and_release(answer: HTTPResponse) -> None:
        try:
            begin(answer)
        finally:
            server.released.set()  # the rest of the head comes, when the client has gone on

    monkeypatch.setattr(HTTPResponse, "begin", begin_and_release)
    lane = make_lane(lambda _key: SignedGet(server.url), timeout_seconds=0.2)
    server.how = how
    assert received(lane, 1000, 500_000) == b""
    server.how = "right"
    assert read(lane) == BODY[1000:500_000]


@pytest.mark.parametrize("how", ["silent", "stalled"])
@pytest.mark.parametrize("is_new", [True, False])
def test_a_read_that_another_thread_cancels_ends_and_is_no_failure(server, lane, how, is_new):
    if not is_new:
        assert read(lane) == BODY[1000:500_000]
    server.how = how
    before = server.connections
    with ThreadPoolExecutor(1) as pool:
        for _ in range(3):  # as many failures would be the end of the lane
            body = Range(LaneSource(lane), 0, 400_000, nullcontext)
            asked = len(server.seen)
            reading = pool.submit(body.readinto, memoryview(bytearray(400_000)))
            while len(server.seen) == asked or not body.cancel(at_once=True):
                time.sleep(0.001)
            with pytest.raises(InputError, match="closed"):
                reading.result(4)
            assert len(server.seen) == asked + 1, "it is not asked again"
    assert server.connections == before + 2 + is_new
    server.how = "right"
    assert lane.is_used
    assert read(lane) == BODY[1000:500_000]


class LaneSource(RangeSource):
    """Asks a lane, and nothing else."""

    def __init__(self, lane: DirectLane) -> None:
        self._lane = lane

    def ask(self, start: int, end: int) -> Answer:
        found = self._lane.ask("key", start, end)
        assert found is not None
        return found


WRONG = ("whole", "refused", "moved", "elsewhere", "short", "packed", "broken")
IN_A_RECORD = ("in a record", "forged")  # over plain HTTP they are "broken"


@pytest.mark.parametrize("how", [*WRONG, *IN_A_RECORD])
def test_an_answer_that_is_not_the_bytes_asked_for_is_none(server, lane, how):
    server.how = how
    came = received(lane, 1000, len(BODY))
    # The bytes that came before a body broke off are right.
    assert len(came) == ((len(BODY) - 1000) // 2 if how in ("broken", *IN_A_RECORD) else 0)
    assert came == BODY[1000 : 1000 + len(came)]
    server.how = "right"
    assert read(lane) == BODY[1000:500_000]


def test_a_lane_is_left_alone_after_three_failures_in_a_row(server, make_lane):
    signed: list[str] = []
    lane = make_lane(lambda key: signed.append(key) or SignedGet(server.url), timeout_seconds=5)
    usual = ("refused", "refused", "right", "refused", "refused", "throttled", "throttled", "right")
    for how in usual:
        server.how = how
        assert (read(lane) is not None) is (how == "right")
    server.how = "refused"
    for _ in range(20):
        assert read(lane) is None
    assert len(server.seen) == len(usual) + 3
    assert len(signed) == 7, "at first, and afresh after each failure"


def test_a_url_is_signed_once_as_long_as_it_is_among_those_of_the_last_objects(monkeypatch):
    monkeypatch.setattr(direct, "_MOST_SIGNED", 3)
    signed: list[str] = []

    def sign(path: str) -> SignedGet:
        signed.append(path)
        return SignedGet(server.url, until=0.0 if path == "over" else math.inf)

    def ask(paths: str | list[str]) -> None:
        for path in paths:
            answer = lane.ask(path, 0, WORTHWHILE_BYTES)
            assert answer is not None
            answer.close()

    with running(Server()) as server:
        lane = DirectLane(sign, timeout_seconds=5)
        ask("abca")
        assert signed == ["a", "b", "c"]
        ask("dbcda")  # the first one made way
        assert signed == ["a", "b", "c", "d", "a"]
        ask(["over", "d", "over", "d", "a", "over", "d"])  # one that is signed again is young
        assert signed[5:] == ["over"] * 3


@pytest.mark.parametrize(
    ("of_the_token", "of_the_url", "signatures"), [(600, 600, 1), (0, 600, 2), (600, 0, 2)]
)
def test_a_signature_is_used_until_it_or_its_token_expires(
    make_lane, monkeypatch, of_the_token, of_the_url, signatures
):
    monkeypatch.setattr(direct, "_USED_FOR_SECONDS", of_the_url)
    signed: list[str] = []

    def sign(key: str) -> SignedGet:
        signed.append(key)
        return SignedGet(server.url, until=time.monotonic() + of_the_token)

    with running(Server()) as server:
        lane = make_lane(sign, timeout_seconds=5)
        for _ in range(2):
            assert read(lane) is not None
    assert len(signed) == signatures


@pytest.mark.parametrize("whose", ["its own", "of all schemes"])
def test_a_proxy_is_left_to_the_transport(server, lane, monkeypatch, whose):
    variable = f"{server.scheme if whose == 'its own' else 'all'}_proxy"
    monkeypatch.setenv(variable, "http://127.0.0.1:1")
    monkeypatch.setenv("no_proxy", "")
    assert read(lane) is None
    assert server.seen == []
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    assert read(lane) == BODY[1000:500_000]


def test_a_connection_whose_body_was_not_read_or_is_cancelled_is_not_used_again(
    server, lane, monkeypatch
):
    answer = lane.ask("key", 1000, 500_000)
    assert answer is not None
    descriptor = answer.descriptor_to_poll()
    assert descriptor is not None
    assert select.select([descriptor], [], [], 60)[0] == [descriptor]
    into = memoryview(bytearray(9))
    assert answer.readinto(into) == 9
    assert into == BODY[1000:1009]
    assert answer.descriptor_to_poll() is answer.version() is None  # it has no ETag
    answer.close()
    assert answer._connection.sock is None, "it is closed"
    assert answer.cancel(at_once=True), "nothing is left to be shut down"
    answer = lane.ask("key", 0, 400_000)
    assert answer is not None
    monkeypatch.setattr(answer, "close", lambda: None)
    assert received(lane, 0, 400_000, answer) == BODY[:400_000]
    monkeypatch.undo()
    answer.cancel(at_once=True)
    answer.close()
    assert read(lane) == BODY[1000:500_000]
    assert server.connections == 3


def test_what_was_asked_ahead_is_read_in_any_order_each_with_one_request(server, lane):
    ranges = [(0, 300_000), (300_000, 700_000), (700_000, len(BODY))]
    for times in (1, 2):
        asked = [lane.ask("key", *one) for one in ranges]
        for (start, end), one in reversed(list(zip(ranges, asked, strict=True))):
            assert one is not None
            assert received(lane, start, end, one) == BODY[start:end]
        seen = sorted(f"bytes={start}-{end - 1}" for start, end in ranges * times)
        assert sorted(server.seen) == seen
        assert server.connections == 3, "they are kept for later"


def test_nothing_is_asked_ahead_that_the_lane_does_not_read(server, make_lane, monkeypatch):
    def fail(_key: str) -> str:
        raise ValueError("no signature")

    gone = SignedGet(f"{server.scheme}://127.0.0.1:1/key")
    for sign in (fail, lambda _: gone):
        with pytest.raises(LaneError):
            make_lane(sign, timeout_seconds=5).ask("key", 0, 400_000)
    lane = make_lane(lambda _key: SignedGet(server.url), timeout_seconds=5)
    assert lane.ask("key", 9, 256 * 1024 + 8) is None
    asked = lane.ask("key", 0, 256 * 1024)
    assert asked is not None
    assert asked.version() is None
    assert asked.cancel(at_once=True)
    assert asked.descriptor_to_poll() is None
    asked.close()
    assert read(lane) == BODY[1000:500_000]
    lane = make_lane(lambda _key: SignedGet(server.url), timeout_seconds=5)
    connection = Mock(spec=HTTPConnection, request=Mock(side_effect=OSError))
    monkeypatch.setattr(lane, "connect", lambda _: connection)
    with pytest.raises(LaneError):
        lane.ask("key", 0, 400_000)
    connection.close.assert_called_once_with()
    with RawServer() as other:
        assert read(make_lane(lambda _: SignedGet(f"http://{other.address}/k"), 5)) is None
        assert len(other.heads) == 1, "only a connection that was idle may have been lost meanwhile"


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_both_versions_of_tls_are_spoken_and_sessions_are_resumed(certificate, make_lane, version):
    context = certificate.context()
    context.minimum_version = context.maximum_version = version
    with running(Server(context)) as server:
        server.how = "last"
        lane = make_lane(lambda _key: SignedGet(server.url), timeout_seconds=5)
        for _ in range(3):
            assert read(lane) == BODY[1000:500_000]
        assert server.connections == 3
        server.how = "right"
        assert read(lane) == BODY[1000:500_000]
        assert read(lane) == BODY[1000:500_000]
        server.how = "last"
        asked = [lane.ask("key", 0, 400_000) for _ in range(2)]
        assert [received(lane, 0, 400_000, one) for one in asked] == [BODY[:400_000]] * 2
        assert context.session_stats()["hits"] == 1


@pytest.mark.parametrize("credentials", [{"key": "k", "secret": "s"}, {"anon": True}])
def test_plain_aws_is_read_directly_at_the_host_and_path_that_were_signed(
    monkeypatch, tmp_path, credentials
):
    host = "a-bucket.s3.eu-west-1.amazonaws.com"
    certificate = make_certificate(tmp_path, host)
    options = {**credentials, "region": "eu-west-1", "verify": str(certificate.path)}
    with running(Server(certificate.context())) as server:
        monkeypatch.setattr(socket, "getaddrinfo", partial(_here, server.server_port))
        store = open_store("s3://a-bucket/run", options)
        assert store.range_reading == RangeReading(True, True, memory_bytes=4 * MIB)
        assert read_range(store, "an object/ü +%.bin", 3, 500_000) == BODY[3:500_000]
    ((asked_host, asked_path),) = server.places
    assert asked_host == host
    path, _, query = asked_path.partition("?")
    assert path == "/run/an%20object/%C3%BC%20%2B%25.bin"
    assert ("X-Amz-Signature=" in query) == ("key" in credentials)


@pytest.mark.parametrize("named", ["verify", "AWS_CA_BUNDLE", "SSL_CERT_FILE", "not checked"])
def test_certificates_are_those_that_the_option_and_the_environment_name(
    certificate, monkeypatch, named
):
    options: dict[str, object] = {"key": "k", "secret": "s"}
    monkeypatch.delenv("AWS_CA_BUNDLE", raising=False)
    if named in ("verify", "not checked"):
        options["verify"] = str(certificate.path) if named == "verify" else False
    else:
        monkeypatch.setenv(named, str(certificate.path))
    with running(Server(certificate.context())) as server:
        endpoint_url = f"https://127.0.0.1:{server.server_port}"
        store = open_store("s3://bucket", {**options, "endpoint_url": endpoint_url}, ONCE)
        assert read_range(store, "key", 3, 500_000) == BODY[3:500_000]
        assert read_range(store, "key", 3, 500) == BODY[3:500]
    over_lane = ["X-Amz-Signature=" in path for _, path in server.places]
    assert over_lane == [True, False], "the transport, for small ranges, trusts the same ones"


@pytest.mark.parametrize("wrong", ["expired", "of another host", "signed by itself"])
def test_a_certificate_that_is_not_valid_is_an_error_and_nothing_is_sent(
    certificate, tmp_path, wrong
):
    used = {
        "expired": partial(make_certificate, lasting=timedelta(days=-1)),
        "of another host": partial(make_certificate, host="localhost"),
        "signed by itself": make_certificate,
    }[wrong](tmp_path)
    trusted = certificate if wrong == "signed by itself" else used
    with running(Server(used.context())) as server:
        options = {"key": "k", "secret": "s", "verify": str(trusted.path)}
        options["endpoint_url"] = f"https://127.0.0.1:{server.server_port}"
        store = open_store("s3://bucket", options, ONCE)
        for _ in range(3):
            with pytest.raises(ConfigError, match="certificate is not valid"):
                read_range(store, "key", 3, 500_000)
    assert not server.seen
    assert store.range_reading == RangeReading(memory_bytes=4 * MIB), "the lane is given up"


class Asks:
    """What a store asks for, over the lane and of the transport.

    Attributes:
        over_lane, of_transport: start and end of each range.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.over_lane: list[tuple[int, int]] = []
        self.of_transport: list[tuple[int, int]] = []
        lane_asks, obstore_gets = DirectLane.ask, obstore.get

        def ask(lane: DirectLane, path: str, start: int, end: int) -> DirectAnswer | None:
            answer = lane_asks(lane, path, start, end)
            if answer is not None:
                self.over_lane.append((start, end))
            return answer

        def get(client: Any, path: str, *, options: Any) -> Any:
            self.of_transport.append(options["range"])
            return obstore_gets(client, path, options=options)

        monkeypatch.setattr(DirectLane, "ask", ask)
        monkeypatch.setattr(obstore, "get", get)


@pytest.fixture
def asks(monkeypatch: pytest.MonkeyPatch) -> Asks:
    return Asks(monkeypatch)


@pytest.mark.backends("seaweed", "moto")
def test_a_store_reads_large_ranges_directly_and_says_what_is_wrong_as_ever(
    bucket, asks, monkeypatch
):
    retries: list[tuple[object, ...]] = []
    monkeypatch.setattr(ranges, "emit_retry", lambda *given: retries.append(given[:2]))
    bucket.put("an object/ü+%.bin", BODY)
    store = open_store(bucket.url, bucket.storage_options)
    assert store.range_reading == RangeReading(True, takes_gil=False, memory_bytes=4 * MIB)
    large = WORTHWHILE_BYTES + 17
    assert read_range(store, "an object/ü+%.bin", 3, 3 + large) == BODY[3 : 3 + large]
    assert (asks.over_lane, asks.of_transport) == ([(3, 3 + large)], [])
    assert read_range(store, "an object/ü+%.bin", 3, 103) == BODY[3:103]
    assert asks.of_transport == [(3, 103)]
    with pytest.raises(ObjectNotFoundError):
        read_range(store, "absent", 0, large)
    with pytest.raises(CorruptDataError):
        read_range(store, "an object/ü+%.bin", 100, len(BODY) + 1)
    assert len(asks.over_lane) == len(asks.of_transport) == 3
    assert retries == [(f"{bucket.prefix}{key}", 2) for key in ("absent", "an object/ü+%.bin")]


@pytest.mark.parametrize("tls", [False, True])
@pytest.mark.backends("seaweed")
def test_the_transport_is_asked_only_for_the_rest_of_a_broken_body(bucket, asks, certificate, tls):
    bucket.put("key", BODY)
    with TamperingProxy(bucket.storage_options, certificate if tls else None) as proxy:
        proxy.tamper(tampering.cut, lambda asked: asked.signed_url, times=1)
        store = open_store(bucket.url, proxy.storage_options)
        assert read_range(store, "key", 24, len(BODY)) == BODY[24:]
        half = 24 + (len(BODY) - 24) // 2
        assert [(one.start, one.end) for one in proxy.asked if one.method == "GET"] == [
            (24, len(BODY)),
            (half, len(BODY)),
        ]
    assert (asks.over_lane, asks.of_transport) == ([(24, len(BODY))], [(half, len(BODY))])


@pytest.mark.backends("gcs", "azure")
def test_gcs_and_azure_are_read_directly_too(bucket, asks):
    bucket.put("dir/object-1_2.bin", BODY)
    store = open_store(bucket.url, bucket.storage_options)
    assert store.range_reading.ahead
    assert read_range(store, "dir/object-1_2.bin", 3, 500_000) == BODY[3:500_000]
    assert (asks.over_lane, asks.of_transport) == ([(3, 500_000)], [])
    # With an account's key, obstore cannot sign this one.
    bucket.put("an object/ü +%.bin", BODY)
    assert read_range(store, "an object/ü +%.bin", 3, 500_000) == BODY[3:500_000]
    assert len(asks.of_transport) == (bucket.kind == "azure")
    assert len(asks.over_lane) == 1 + (bucket.kind == "gcs")


@pytest.mark.parametrize(
    ("url", "path", "path_there"),
    [
        ("s3://bucket/run", "", "/bucket/run/a%20key"),
        ("gs://bucket/run", "", "/bucket/run/a%20key"),
        ("az://container/run", "/account", "/account/container/run/a%20key"),
    ],
)
def test_public_buckets_are_read_directly_without_any_credentials(
    certificate, asks, url, path, path_there
):
    options: dict[str, object] = {"anon": True, "verify": str(certificate.path)}
    if path:
        options["account_name"] = "account"
    with running(Server(certificate.context())) as server:
        options["endpoint_url"] = f"https://127.0.0.1:{server.server_port}{path}"
        store = open_store(url, options, ONCE)
        assert read_range(store, "a key", 3, 500_000) == BODY[3:500_000]
    assert asks.of_transport == []
    assert [place for _, place in server.places] == [path_there]


@pytest.mark.backends("azure")
def test_a_signature_in_place_of_a_key_serves_as_well(bucket, asks):
    bucket.put("an object/ü +%.bin", BODY)
    options = {**bucket.storage_options, "sas_token": read_signature()}
    del options["account_key"]
    store = open_store(bucket.url, options)
    assert read_range(store, "an object/ü +%.bin", 3, 500_000) == BODY[3:500_000]
    assert (asks.over_lane, asks.of_transport) == ([(3, 500_000)], [])


def test_an_access_token_serves_and_one_that_is_refused_is_left_to_the_transport(certificate, asks):
    with Azurite(certificate) as server:
        bucket = AzureBucket("azure", f"az://{BUCKET}/run", {}, server=server)
        bucket.put("key", BODY)
        options = {"account_name": ACCOUNT, "endpoint_url": server.endpoint_url}
        options["verify"] = str(certificate.path)
        # The transport has the same token, which is refused once more, and then another one.
        for lasting, of_transport in ([3600], []), ([-10, 3600], [(3, 500_000)] * 2):
            identity = Identity(*lasting)
            store = open_store(bucket.url, {**options, "credential": identity})
            assert read_range(store, "key", 3, 500_000) == BODY[3:500_000]
            assert asks.over_lane.pop() == (3, 500_000)
            assert asks.of_transport == of_transport


@pytest.mark.backends("gcs")
def test_the_project_that_pays_is_named_in_each_request_over_the_lane_too(bucket):
    bucket.put("key", BODY)
    with TamperingProxy(bucket.storage_options) as proxy:
        options = {**proxy.storage_options, "requester_pays": "payer"}
        store = open_store(bucket.url, options)
        assert read_range(store, "key", 0, len(BODY)) == BODY
        store.put("another", b"x")
    assert {asked.headers.get("x-goog-user-project") for asked in proxy.asked} == {"payer"}
    (asked,) = [asked for asked in proxy.asked if asked.start == 0]
    assert "user-agent" not in asked.headers, "it is not the transport that asks"


def test_what_a_lane_keeps_is_changed_by_one_thread_at_a_time(server, certificate):
    locked: list[bool] = []

    def trust() -> ssl.SSLContext:
        locked.append(lane._lock.locked())
        return ssl.create_default_context(cafile=certificate.path)

    lane = DirectLane(lambda _key: SignedGet(server.url), timeout_seconds=5, trust=trust)
    assert read(lane) == BODY[1000:500_000]
    assert locked == [True] * (server.scheme == "https")
    (idle,) = lane._idle
    for change in (
        lambda: lane.failed("key"),
        lambda: lane.succeeded(idle.connection, idle.origin),
        lambda: lane._signed_get("another key"),
        lambda: lane._idle_or_new_connection(idle.origin),
    ):
        thread = threading.Thread(target=change)
        with lane._lock:
            thread.start()
            thread.join(0.02)
            assert thread.is_alive()
        thread.join(30)


def test_a_connection_that_was_idle_for_long_is_not_used_again(server, lane, monkeypatch):
    monkeypatch.setattr(direct, "_IDLE_SECONDS", -1.0)
    assert read(lane) == BODY[1000:500_000]
    (idle,) = lane._idle
    assert read(lane) == BODY[1000:500_000]
    assert idle.connection.sock is None, "it is closed"
    assert server.connections == 2


def test_what_holds_a_secret_does_not_show_it():
    signed = SignedGet("https://store/bucket/key?sig=secret", {"Authorization": "Bearer secret"})
    assert "secret" not in f"{signed!r} {signed}"


def read_signature() -> str:
    from azure.storage.blob import generate_container_sas

    ends = datetime.now(UTC) + timedelta(1)
    return str(generate_container_sas(ACCOUNT, BUCKET, KEY, permission="rl", expiry=ends))
