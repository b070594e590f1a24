"""`DirectLane`: exactly the bytes asked for, in the memory given, or the transport is asked."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import islice, pairwise
from typing import Any

import numpy as np
import pytest

from dcp_objstore.errors import CorruptDataError, ObjectNotFoundError
from dcp_objstore.stores import open_store
from dcp_objstore.stores.obstore.direct import WORTHWHILE_BYTES, DirectLane
from dcp_objstore.stores.obstore.store import ObstoreStore
from dcp_objstore.stores.protocol import PiecewiseStore
from tests.support.servers import Bucket

MIB = 1 << 20
BODY = bytes(range(256)) * 4096  # 1 MiB


class Handler(BaseHTTPRequestHandler):
    """Answers a range, in the way that the server is told to."""

    protocol_version = "HTTP/1.1"
    server: Server

    def do_GET(self) -> None:
        self.server.seen.append(self.headers["Range"])
        how = self.server.how
        first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        part = BODY[first : last + 1]
        status = {"whole": 200, "refused": 403, "moved": 307}.get(how, 206)
        place = f"bytes {first + (how == 'elsewhere')}-{last}/{len(BODY)}"
        self.send_response(status)
        length = len(part) - (how == "short")
        self.send_header("Content-Length", str(length))
        self.send_header("Content-Range", place)
        if how == "packed":
            self.send_header("Content-Encoding", "gzip")
        if how == "moved":
            self.send_header("Location", "/elsewhere")
        if how == "last":
            self.send_header("Connection", "close")
        if how == "silent":
            self.server.released.wait()
        self.end_headers()
        self.wfile.write(part[: length // 2 if how in ("broken", "stalled") else length])
        if how == "stalled":
            self.server.released.wait()
        if how in ("broken", "closing"):
            self.close_connection = True

    def setup(self) -> None:
        self.server.connections += 1
        super().setup()

    def log_message(self, *_: Any) -> None:
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.how = "right"
        self.seen: list[str] = []
        self.connections = 0
        self.released = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_address[1]}/bucket/key?signed=1"

    def handle_error(self, *_: Any) -> None:
        """A client that has gone is what some tests are about."""


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield running
        running.released.set()
        running.shutdown()


@pytest.fixture
def lane(server: Server) -> DirectLane:
    return DirectLane(lambda _key: server.url, timeout_seconds=5)


def lies_in(body: Any, memory: memoryview) -> bool:
    begins = np.frombuffer(memory, dtype=np.uint8).ctypes.data
    return 0 <= np.frombuffer(body, dtype=np.uint8).ctypes.data - begins < len(memory)


def read(lane: DirectLane, start: int = 1000, end: int = 500_000) -> bytes | None:
    into = bytearray(end - start)
    return bytes(into) if list(lane.read("key", (start, end), memoryview(into))) else None


def test_bytes_arrive_in_the_memory_given_over_one_connection(
    server: Server, lane: DirectLane
) -> None:
    for start, end in [(0, 400_000), (1000, 500_000), (0, len(BODY)), (9, len(BODY))]:
        assert read(lane, start, end) == BODY[start:end]
    assert server.connections == 1


def test_a_connection_that_the_server_closed_while_idle_is_replaced(
    server: Server, lane: DirectLane
) -> None:
    server.how = "closing"
    for _ in range(5):
        assert read(lane) == BODY[1000:500_000]
    assert server.connections == 5


def test_a_server_that_closes_after_every_answer_is_read_from(
    server: Server, lane: DirectLane
) -> None:
    server.how = "last"
    for _ in range(5):
        assert read(lane) == BODY[1000:500_000]
    assert server.connections == 5


@pytest.mark.parametrize("how", ["silent", "stalled"])
def test_a_server_that_sends_nothing_for_the_time_out_is_given_up(server: Server, how: str) -> None:
    lane = DirectLane(lambda _key: server.url, timeout_seconds=0.2)
    server.how = how
    assert read(lane) is None
    server.how = "right"
    assert read(lane) == BODY[1000:500_000]


@pytest.mark.parametrize(
    "how", ["whole", "refused", "moved", "elsewhere", "short", "packed", "broken"]
)
def test_an_answer_that_is_not_the_bytes_asked_for_is_none(
    server: Server, lane: DirectLane, how: str
) -> None:
    server.how = how
    assert read(lane) is None
    server.how = "right"
    assert read(lane) == BODY[1000:500_000]


def test_a_lane_that_only_fails_is_left_alone(server: Server, lane: DirectLane) -> None:
    server.how = "refused"
    for _ in range(20):
        assert read(lane) is None
    assert len(server.seen) == 3


def test_a_server_that_is_gone_and_a_url_that_cannot_be_signed_are_no_errors(
    server: Server,
) -> None:
    server.shutdown()
    server.server_close()
    assert read(DirectLane(lambda _key: server.url, timeout_seconds=1)) is None

    def refuse(key: str) -> str:
        raise ValueError(f"cannot sign {key}")

    assert read(DirectLane(refuse, timeout_seconds=1)) is None


def test_a_proxy_is_left_to_the_transport(
    server: Server, lane: DirectLane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.setenv("no_proxy", "")
    assert read(lane) is None
    assert server.seen == []
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    assert read(lane) == BODY[1000:500_000]


CUTS = [1000, 1001, 9000, 400_000, 400_100, 700_000, len(BODY)]
PIECES = [BODY[start:end] for start, end in pairwise(CUTS)]


def test_pieces_of_one_answer_arrive_one_by_one_in_the_same_memory(
    server: Server, lane: DirectLane
) -> None:
    into = memoryview(bytearray(400_000))
    for _ in range(3):
        assert [bytes(piece) for piece in lane.read("key", CUTS, into)] == PIECES
    assert all(lies_in(piece, into) for piece in lane.read("key", CUTS, into))
    assert len(server.seen) == 4
    assert server.connections == 1


def test_a_connection_is_not_used_again_when_its_pieces_were_not_all_taken(
    server: Server, lane: DirectLane
) -> None:
    into = memoryview(bytearray(400_000))
    for piece in lane.read("key", CUTS, into):
        assert bytes(piece) == PIECES[0]
        break
    assert [bytes(piece) for piece in lane.read("key", CUTS, into)] == PIECES
    assert server.connections == 2


def test_pieces_that_came_before_a_body_broke_off_are_whole(
    server: Server, lane: DirectLane
) -> None:
    server.how = "broken"
    came = [bytes(piece) for piece in lane.read("key", CUTS, memoryview(bytearray(400_000)))]
    assert came == PIECES[: len(came)]
    assert 0 < len(came) < len(PIECES)


def test_what_was_asked_ahead_is_read_in_any_order_each_with_one_request(
    server: Server, lane: DirectLane
) -> None:
    ranges = [(0, 300_000), (300_000, 700_000), (700_000, len(BODY))]
    asked = [lane.ask("key", *one) for one in ranges]
    for (start, end), one in reversed(list(zip(ranges, asked, strict=True))):
        assert one is not None
        into = bytearray(end - start)
        assert len(list(lane.read("key", (start, end), memoryview(into), one))) == 1
        assert bytes(into) == BODY[start:end]
    assert sorted(server.seen) == sorted(f"bytes={start}-{end - 1}" for start, end in ranges)
    assert server.connections == 3
    assert read(lane) == BODY[1000:500_000]
    assert server.connections == 3, "they are kept for later"


@pytest.mark.parametrize("how", ["closing", "broken", "refused", "short"])
def test_what_was_asked_ahead_and_goes_wrong_is_left_to_the_transport(
    server: Server, lane: DirectLane, how: str
) -> None:
    server.how = how
    asked = [lane.ask("key", 0, 400_000) for _ in range(2)]
    into = bytearray(400_000)
    came = [list(lane.read("key", (0, 400_000), memoryview(into), one)) for one in asked]
    whole = [into] if how == "closing" else []
    assert came == [whole, whole]
    assert (bytes(into) == BODY[:400_000]) is bool(whole)


def test_nothing_is_asked_ahead_that_the_lane_does_not_read(server: Server) -> None:
    def fail(_key: str) -> str:
        raise ValueError("no signature")

    assert DirectLane(fail, timeout_seconds=5).ask("key", 0, 400_000) is None
    lane = DirectLane(lambda _key: server.url, timeout_seconds=5)
    assert lane.ask("key", 0, WORTHWHILE_BYTES - 1) is None
    asked = lane.ask("key", 0, 400_000)
    assert asked is not None
    asked.close()
    assert read(lane) == BODY[1000:500_000]


@pytest.mark.backends("seaweed", "moto")
@pytest.mark.parametrize("direct", [0, 2, 6])
def test_pieces_that_the_lane_does_not_give_come_through_the_transport(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, direct: int
) -> None:
    bucket.put("key", BODY)
    lane_reads = DirectLane.read
    monkeypatch.setattr(DirectLane, "read", lambda *args: islice(lane_reads(*args), direct))
    into = memoryview(bytearray(400_000))
    store = open_store(bucket.url, bucket.storage_options)
    assert isinstance(store, PiecewiseStore)
    came = [(bytes(piece), lies_in(piece, into)) for piece in store.get_pieces("key", CUTS, into)]
    assert came == [(piece, number < direct) for number, piece in enumerate(PIECES)]
    monkeypatch.setattr(DirectLane, "read", lambda *_: iter(()))
    with pytest.raises(ObjectNotFoundError):
        list(store.get_pieces("absent", CUTS, into))
    with pytest.raises(CorruptDataError):
        list(store.get_pieces("key", [*CUTS, len(BODY) + 5], into))


@pytest.mark.backends("seaweed")
def test_what_the_lane_does_not_give_is_asked_of_the_transport_in_small_ranges(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = random.Random(3).randbytes(21 * MIB)
    bucket.put("key", body)
    cuts = [*range(0, 21 * MIB, 4 * MIB), 21 * MIB]
    store = open_store(bucket.url, bucket.storage_options)
    assert isinstance(store, ObstoreStore)
    asked: list[tuple[int, int]] = []
    get = store._range

    def counted(path: str, start: int, end: int, tries: Any) -> Any:
        asked.append((start // MIB, end // MIB))
        return get(path, start, end, tries)

    monkeypatch.setattr(store, "_range", counted)
    lane_reads = DirectLane.read
    monkeypatch.setattr(DirectLane, "read", lambda *args: islice(lane_reads(*args), 1))
    into = memoryview(bytearray(4 * MIB))
    assert b"".join(bytes(piece) for piece in store.get_pieces("key", cuts, into)) == body
    assert asked == [(4, 12), (12, 20), (20, 21)]
    asked.clear()
    monkeypatch.setattr(DirectLane, "read", lambda *_: iter(()))
    whole = memoryview(bytearray(21 * MIB))
    assert b"".join(store.get_pieces("key", [0, 21 * MIB], whole)) == body, "a piece is not cut"
    assert asked == [(0, 21)]


@pytest.mark.backends("seaweed", "moto")
def test_a_store_reads_large_ranges_directly_and_says_what_is_wrong_as_ever(bucket: Bucket) -> None:
    bucket.put("an object/ü+%.bin", BODY)
    store = open_store(bucket.url, bucket.storage_options)

    def ranged(key: str, start: int, end: int) -> tuple[bytes, bool]:
        into = memoryview(bytearray(end - start))
        body = store.get_range(key, start, end, into=into)
        return bytes(body), lies_in(body, into)

    large = WORTHWHILE_BYTES + 17
    assert ranged("an object/ü+%.bin", 3, 3 + large) == (BODY[3 : 3 + large], True)
    assert ranged("an object/ü+%.bin", 3, 103) == (BODY[3:103], False)
    with pytest.raises(ObjectNotFoundError):
        ranged("absent", 0, large)
    with pytest.raises(CorruptDataError):
        ranged("an object/ü+%.bin", 100, len(BODY) + 1)


@pytest.mark.backends("seaweed")
def test_what_a_signed_url_cannot_say_is_left_to_the_transport(bucket: Bucket) -> None:
    bucket.put("key", BODY)
    options = {**bucket.storage_options, "requester_pays": True}
    into = memoryview(bytearray(len(BODY)))
    body = open_store(bucket.url, options).get_range("key", 0, len(BODY), into=into)
    assert not lies_in(body, into)
    assert bytes(body) == BODY
