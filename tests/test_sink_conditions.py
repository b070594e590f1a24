"""The sink keeps the conditions that it was asked for, and counts what it did."""

from __future__ import annotations

import contextlib
import http.client
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

import dcp_objstore as dos
from benchmarks.__main__ import main
from benchmarks.conditions import Conditions
from benchmarks.sink import Sink, connect
from benchmarks.sink_server import SlowAnswers

MIB = 1024**2
_BODY = bytes(range(256)) * (4 * MIB // 256)


@contextlib.contextmanager
def connected(sink: Sink) -> Iterator[http.client.HTTPConnection]:
    with contextlib.closing(connect(sink.endpoint_url, sink.certificate)) as connection:
        connection.connect()
        yield connection


def ask(connection: http.client.HTTPConnection, verb: str, body: bytes = b"") -> tuple[int, bytes]:
    connection.request(verb, "/bench/o", body)
    answer = connection.getresponse()
    return answer.status, answer.read()


def seconds_of(act: Callable[[], object]) -> float:
    began_at = time.perf_counter()
    act()
    return time.perf_counter() - began_at


def measured_until(measure: Callable[[], float], bound_seconds: float) -> float:
    """Measure until a figure is below the bound: a busy machine adds to some, not to every one."""
    return next(seconds for seconds in iter(measure, None) if seconds < bound_seconds)


def test_every_answer_comes_after_the_latency_and_not_much_later():
    with Sink(conditions=Conditions(latency_ms=30)) as sink, connected(sink) as connection:
        seconds = measured_until(lambda: seconds_of(lambda: ask(connection, "HEAD")), 0.060)
        fastest = min(seconds_of(lambda: ask(connection, "HEAD")) for _ in range(15))
    assert min(seconds, fastest) >= 0.030


@pytest.mark.parametrize(("keep", "tls"), [(False, False), (True, True)])
def test_each_connection_has_its_rate_in_both_directions(keep, tls):
    expected_seconds = 4 / 30
    conditions = Conditions(rate_mib_per_connection=30, tls=tls)
    with contextlib.ExitStack() as stack:
        sink = stack.enter_context(Sink(keep=keep, conditions=conditions))
        clients = [stack.enter_context(connected(sink)) for _ in range(3)]

        def together(verb: str, body: bytes = b"") -> float:
            def of(connection: http.client.HTTPConnection) -> float:
                seconds = seconds_of(lambda: ask(connection, verb, body))
                assert seconds >= 0.98 * expected_seconds
                return seconds

            with ThreadPoolExecutor(len(clients)) as pool:
                return max(pool.map(of, clients))

        # If the connections shared the rate, the last would take three times as long.
        measured_until(lambda: together("PUT", _BODY), 2 * expected_seconds)
        if keep:
            measured_until(lambda: together("GET"), 2 * expected_seconds)


def test_all_connections_together_have_the_common_rate():
    with contextlib.ExitStack() as stack:
        sink = stack.enter_context(Sink(conditions=Conditions(gib_per_second=64 / 1024)))
        clients = [stack.enter_context(connected(sink)) for _ in range(3)]
        with ThreadPoolExecutor(len(clients)) as pool:
            together = seconds_of(lambda: list(pool.map(lambda c: ask(c, "PUT", _BODY), clients)))
    assert together >= 0.95 * 12 / 64


def test_a_bucket_answers_so_many_requests_per_second_and_refuses_the_others():
    conditions = Conditions(requests_per_second=4)
    with Sink(conditions=conditions) as sink, connected(sink) as connection:
        began_at = time.perf_counter()
        answers = [ask(connection, "GET") for _ in range(10)]
        while time.perf_counter() - began_at < 0.5:
            answers.append(ask(connection, "GET"))
        elapsed_seconds = time.perf_counter() - began_at
        connection.request("HEAD", "/another/o")
        assert connection.getresponse().status == 404
        stats = sink.stats()
    refused = [body for status, body in answers if status == 503]
    answered = len(answers) - len(refused)
    # Half a second's at once, then one for each quarter of a second.
    assert 2 <= answered <= 2 + 4 * elapsed_seconds + 1
    assert answered >= min(len(answers), 2 + 4 * 0.5 - 1)
    assert all(b"SlowDown" in body for body in refused)
    assert stats["refused"] == len(refused) > 0
    assert stats["requests"] == {"GET": len(answers), "HEAD": 1}


def test_slow_answers_take_so_many_times_as_long_in_latency_and_body():
    usual = Conditions(latency_ms=10, rate_mib_per_connection=80)
    seconds = []
    for percent in (0, 100):
        conditions = replace(usual, slow_percent=percent, slow_factor=5)
        with Sink(keep=True, conditions=conditions) as sink, connected(sink) as connection:
            ask(connection, "PUT", _BODY)
            seconds.append(min(seconds_of(lambda: ask(connection, "GET")) for _ in range(3)))
    assert seconds[0] >= 0.06
    assert seconds[1] >= 5 * 0.06


def test_the_same_answers_are_slow_for_the_same_seed():
    asked = [f"GET bytes={number}" for number in range(1000)] * 2

    def slow(percent: float, seed: int) -> list[float]:
        answers = SlowAnswers(percent, 20.0, seed)
        return [answers.factor(request) for request in asked]

    assert slow(1, 0) == slow(1, 0) != slow(1, 1)
    assert set(slow(1, 0)) == {1.0, 20.0}
    assert 5 < slow(1, 0).count(20.0) < 50
    assert slow(1, 0)[:1000] != slow(1, 0)[1000:], "what comes again has another answer"
    assert set(slow(0, 0)) == {1.0}
    assert set(slow(100, 0)) == {20.0}


def test_over_tls_it_serves_only_who_trusts_its_certificate_and_counts_the_same():
    with Sink(keep=True, conditions=Conditions(tls=True)) as sink:
        state = {"w": torch.arange(3 * MIB, dtype=torch.float32)}
        options = sink.storage_options
        dos.save(state, "s3://bench/run/step-1", storage_options=options)
        loaded = {"w": torch.zeros(3 * MIB)}
        dos.load(loaded, "s3://bench/run/step-1", storage_options=options)
        assert torch.equal(loaded["w"], state["w"])
        stats = sink.stats()
        assert stats["received_bytes"] >= 12 * MIB
        assert stats["sent_bytes"] >= 12 * MIB
        assert stats["cpu_seconds"] > 0
        del options["verify"]
        quick = dos.TransferConfig(max_retries=0)
        with pytest.raises(dos.errors.DcpObjstoreError):
            dos.load(loaded, "s3://bench/run/step-1", storage_options=options, config=quick)


@pytest.mark.parametrize("record_bytes", [4096, 16384])
def test_records_are_as_large_as_was_asked(record_bytes):
    conditions = Conditions(tls=True, tls_record_bytes=record_bytes)
    with Sink(keep=True, conditions=conditions) as sink, connected(sink) as connection:
        ask(connection, "PUT", _BODY)
        connection.sock.sendall(b"GET /bench/o HTTP/1.1\r\nHost: x\r\n\r\n")
        lengths = []  # what comes at a time is a record
        while sum(lengths) < len(_BODY):
            lengths.append(len(connection.sock.recv(1 << 20)))
    assert max(lengths) == record_bytes
    assert lengths.count(record_bytes) >= len(_BODY) // record_bytes - 1


def test_a_body_in_transfer_chunks_is_stored_without_their_framing():
    pieces = [b"hello", b" world" * MIB]
    with Sink(keep=True, conditions=Conditions(tls=True)) as sink, connected(sink) as connection:
        connection.request("PUT", "/bench/o", iter(pieces), encode_chunked=True)
        assert connection.getresponse().read() == b""
        assert ask(connection, "GET") == (200, b"".join(pieces))


def test_conditions_are_for_the_sink_alone(capsys):
    with pytest.raises(SystemExit):
        main(["save", "--target", "seaweedfs", "--tls"])
    assert "conditions" in capsys.readouterr().err


def test_the_options_of_a_command_line_are_the_conditions():
    conditions = Conditions(tls=True, latency_ms=30, rate_mib_per_connection=60)
    assert conditions.arguments == ["--tls", "--latency-ms=30", "--rate-mib-per-connection=60"]
    assert conditions.described("sink") == (
        "sink (https, 30 ms to the first byte, 60 MiB/s per connection)"
    )
