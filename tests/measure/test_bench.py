"""`bench`: figures of what was really moved, honest about noise, and nothing of it stays."""

from __future__ import annotations

import json
import re
import signal
import threading
from dataclasses import asdict, replace
from typing import NoReturn
from unittest.mock import Mock

import pytest

import dcp_objstore as dos
from dcp_objstore.config import MIB
from dcp_objstore.errors import (
    BucketNotFoundError,
    ConfigError,
    CredentialsError,
    InvalidUrlError,
    PermissionDeniedError,
)
from dcp_objstore.measure import api
from dcp_objstore.measure.api import CONFIG, Spread, Throughput, _doubts, _Round
from tests.support.campaign import cases
from tests.support.checkpoints import memory_url
from tests.support.command_line import run_here
from tests.support.proxy import Asked, NetworkProxy, Refuse
from tests.support.servers import READ_ONLY, WRITE_ONLY, Bucket
from tests.support.unfinished_uploads import Before

PARTS = replace(CONFIG, part_size_bytes=5 * MIB)
SIZE = 6 * MIB
IMPATIENT = replace(PARTS, max_retries=0, retry_timeout_seconds=0.1)


def is_scratch(asked: Asked) -> bool:
    return "/.bench-" in asked.key


def measure(bucket: Bucket, **arguments: object) -> dos.measure.BenchReport:
    usual = {"size_bytes": SIZE, "seconds": 0.1, "config": PARTS}
    options = {"storage_options": bucket.storage_options}
    return dos.measure.bench(bucket.url, **{**usual, **options, **arguments})


def test_the_figures_are_of_the_bytes_that_were_moved_and_nothing_stays(bucket):
    before = Before(bucket)
    with NetworkProxy(bucket.storage_options) as proxy:
        report = measure(bucket, storage_options=proxy.storage_options)
        sent = sum(asked.size_bytes for asked in proxy.asked if asked.method == "PUT")
        assert all(is_scratch(asked) for asked in proxy.asked if asked.method in ("PUT", "DELETE"))
    before.check()
    # What is sent beyond the tensors: framing, markers, indices.
    assert report.sent_bytes <= sent <= 1.02 * report.sent_bytes
    # A save and a load to begin with, then at least one of each, and as much by plain requests.
    assert report.received_bytes >= 3 * SIZE
    assert (report.size_bytes, report.url) == (SIZE, bucket.url)
    assert report.save.requests == 2
    assert report.plain_puts.requests == 2
    assert report.plain_puts.request_size_bytes == report.save.request_size_bytes == 5 * MIB
    assert report.plain_gets.connections == report.load.connections
    for found in (report.save, report.load, report.plain_puts, report.plain_gets):
        speed = found.gib_per_second
        assert 0 < speed.lowest <= speed.median <= speed.highest
        assert speed.rounds == 1
        assert found.cpu_seconds_per_gib > 0
    # One round is too few to say anything, and it says so.
    assert any("too few" in one for one in report.warnings)


@pytest.mark.parametrize(
    ("scheme", "seconds", "size_bytes", "rounds"),
    [("memory", 99, 4 * MIB, 5), ("file", 0.1, MIB, 1)],
)
def test_without_a_size_it_doubles_while_there_is_time_and_all_is_left_as_it_was(
    scheme, seconds, size_bytes, rounds, tmp_path, monkeypatch
):
    monkeypatch.setattr(api, "_LEAST_AUTO_BYTES", MIB)
    monkeypatch.setattr(api, "_MOST_AUTO_BYTES", 5 * MIB)
    place = f"{tmp_path}/new/run" if scheme == "file" else "bench-test/run"
    report = dos.measure.bench(f"{scheme}://{place}", seconds=seconds)
    assert report.size_bytes == size_bytes
    assert report.plain_gets.gib_per_second.rounds == rounds
    assert ("too few" in str(report)) is (rounds < 3)
    assert list(tmp_path.iterdir()) == []
    assert list(dos.steps(f"{scheme}://{place}")) == []


def test_every_request_is_counted_and_plain_ones_are_like_those_of_saves_and_loads(requests):
    report = dos.measure.bench(
        "memory://bench-test/all", size_bytes=SIZE, seconds=0.1, config=PARTS
    )
    # A save and a load to begin with, those that choose the size, and those that are measured.
    small, others = [], []
    for one in requests:
        if one.verb in ("put", "open_range") and re.fullmatch(r"__0_\d+\.\w+\.distcp", one.key):
            (small if len(small) < 20 else others).append(one.verb)
    assert small == ["put", "open_range", *["put"] * 9, *["open_range"] * 9]
    loaded = "open_range"
    assert others == [loaded, loaded, "put", "put", loaded], "plain PUTs before the third load"
    gets = [one for one in requests if one.verb == "open_range" and one.key.startswith("save-2/_")]
    gets = gets[-report.plain_gets.requests :]
    assert report.sent_bytes == 9 + 4 * SIZE
    assert report.received_bytes == 9 + 3 * SIZE + sum(one.end - one.start for one in gets)
    assert (report.put_ms.rounds, report.get_ms.rounds) == (9, 9)
    assert (report.plain_puts.requests, report.plain_puts.connections) == (2, 2)
    assert requests[-1].verb == "list"


def round_of(seconds: float) -> _Round:
    return _Round(seconds, seconds, 1 << 30, 64, 16 * MIB, 8)


def test_noise_is_told_of():
    steady = [round_of(seconds) for seconds in (1.0, 1.24, 1.0)]
    noisy = [round_of(1.26), *steady]
    assert list(_doubts(saves=steady, loads=steady)) == []
    (warning,) = _doubts(saves=steady, loads=noisy)
    assert "factor of 1.3" in warning
    (warning,) = _doubts(saves=steady[:2], loads=steady[:2])
    assert "too few rounds of saves and loads" in warning


@pytest.mark.backends("seaweed")
def test_who_may_not_do_all_of_it_is_told_before_anything_large_is_sent(bucket):
    before = Before(bucket)
    for rights in (READ_ONLY, WRITE_ONLY):
        with NetworkProxy({**bucket.storage_options, **rights}) as proxy:
            with pytest.raises(PermissionDeniedError):
                measure(bucket, storage_options=proxy.storage_options)
            assert sum(asked.size_bytes for asked in proxy.asked) <= 100
        before.check()


@pytest.mark.backends("seaweed")
def test_wrong_urls_settings_and_credentials_are_told(bucket):
    with pytest.raises(InvalidUrlError):
        dos.measure.bench("bucket/run")
    for wrong in (
        {"size_bytes": 1000},
        {"size_bytes": 2e6},
        {"size_bytes": 1 << 50},  # more than any machine's memory
        {"seconds": 0},
        {"seconds": float("inf")},
    ):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            measure(bucket, **wrong)
    with pytest.raises(BucketNotFoundError):
        dos.measure.bench("s3://no-such-bucket/run", storage_options=bucket.storage_options)
    with pytest.raises(CredentialsError):
        measure(bucket, storage_options={**bucket.storage_options, "secret": "wrong"})
    assert bucket.keys() == []


def part(asked: Asked) -> bool:
    return asked.method == "PUT" and "partNumber=2" in asked.query


def plain_put(asked: Asked) -> bool:
    return asked.method == "PUT" and asked.size_bytes > MIB and "partNumber" not in asked.query


def marker(asked: Asked) -> bool:
    return asked.method == "PUT" and asked.name == "_COMMIT"


def large_range(asked: Asked) -> bool:
    return asked.method == "GET" and asked.name.endswith(".distcp") and "/save-" in asked.key


@pytest.mark.usefixtures("usual_signals")
@pytest.mark.backends("seaweed")
@pytest.mark.parametrize("meant", cases([marker, part, plain_put, large_range], default=[marker]))
def test_nothing_stays_after_ctrl_c(bucket, meant):
    """A request that is under way takes effect before the removal."""
    before = Before(bucket)
    with NetworkProxy(bucket.storage_options) as proxy:
        held = proxy.hold(meant)

        def interrupt() -> None:
            held.wait()
            signal.raise_signal(signal.SIGINT)
            held.release()

        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            measure(bucket, storage_options=proxy.storage_options)
        thread.join()
    before.check()


def test_a_second_ctrl_c_leaves_what_was_written_and_says_where(monkeypatch, caplog):
    monkeypatch.setattr(api, "_measure", Mock())
    monkeypatch.setattr(api, "result_of", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        api.bench(url := memory_url(), progress=False)
    assert f"objects .bench-* may remain below {url}" in caplog.text


@pytest.mark.backends("seaweed")
def test_what_cannot_be_removed_is_named(bucket, caplog):
    large = [0]

    def no_more_deletes(asked: Asked) -> Refuse | None:
        large[0] += asked.size_bytes > MIB
        return Refuse(403, "AccessDenied") if large[0] and asked.method == "DELETE" else None

    with NetworkProxy(bucket.storage_options) as proxy:
        proxy.plan = no_more_deletes
        with pytest.raises(PermissionDeniedError):
            measure(bucket, storage_options=proxy.storage_options)
    (name,) = {one.partition("/")[0] for one in bucket.keys()}  # noqa: SIM118
    assert name.startswith(".bench-")
    assert f"remove everything below {bucket.url}/{name}" in caplog.text


def test_the_figures_are_not_lost_if_uploads_cannot_be_opened(monkeypatch):
    """They are opened with boto3, which may find other credentials than the store did."""

    def refuse(spec: object) -> NoReturn:
        raise CredentialsError("boto3 has none")

    monkeypatch.setattr("dcp_objstore.doctor.scratch.open_bucket_uploads", refuse)
    report = dos.measure.bench("memory://bench-test/other", size_bytes=SIZE, seconds=0.1)
    assert report.save.gib_per_second.median > 0


@pytest.mark.backends("seaweed")
def test_what_cannot_be_listed_any_more_is_named(bucket, caplog):
    """As when credentials expire while plain requests are sent: of these no key is known."""
    expired: list[Asked] = []

    def expire(asked: Asked) -> Refuse | None:
        if expired:
            return Refuse(403, "AccessDenied")
        if plain_put(asked):
            expired.append(asked)
        return None

    with NetworkProxy(bucket.storage_options) as proxy:
        proxy.plan = expire
        with pytest.raises(PermissionDeniedError):
            measure(bucket, storage_options=proxy.storage_options)
    (name,) = {one.partition("/")[0] for one in bucket.keys()}  # noqa: SIM118
    assert f"remove everything below {bucket.url}/{name}" in caplog.text


def figures(connections: int, *gib_per_second: float, cpu: float = 0.3) -> Throughput:
    return Throughput(
        gib_per_second=Spread.of(gib_per_second),
        cpu_seconds_per_gib=cpu,
        requests=2 * connections,
        request_size_bytes=MIB,
        connections=connections,
    )


@pytest.mark.parametrize(
    ("whole", "plain", "says"),
    [
        (
            figures(32, 0.3),
            figures(32, 0.4),
            "307.20 MiB/s: 100 GiB in 6 min. 32 plain requests at a time reached 409.60 MiB/s; this"
            " {} reached 75% of that. The store, or the way to it",
        ),
        (figures(32, 0.3, cpu=6), figures(32, 0.4), "The processors are busy"),
        (figures(32, 0.3, cpu=5), figures(32, 0.4), "The store, or the way to it"),
        (figures(1, 0.9), figures(1, 0.9), "in 111 s. 1 plain request at a time reached"),
    ],
)
def test_words_say_what_a_save_waits_for(whole, plain, says):
    spread = Spread.of([1.0])
    report = dos.measure.BenchReport(
        url="s3://b/run",
        size_bytes=MIB,
        seconds=1.0,
        processors=2,
        get_ms=spread,
        put_ms=spread,
        save=whole,
        load=whole,
        plain_puts=plain,
        plain_gets=plain,
        sent_bytes=1,
        received_bytes=1,
    )
    save, load = str(report).splitlines()[2:]
    for name, text in (("save", save), ("load", load)):
        assert text.startswith(f"{name}  ")
        assert says.format(name) in text


def test_a_store_that_fails_is_given_up_sooner_than_by_a_save():
    usual = dos.TransferConfig()
    for name in ("max_retries", "retry_timeout_seconds", "stall_timeout_seconds"):
        assert getattr(CONFIG, name) < getattr(usual, name)


def test_the_command_prints_words_then_the_table_then_warnings(monkeypatch):
    report = dos.measure.BenchReport(
        url="s3://b/run",
        size_bytes=MIB,
        seconds=1.0,
        processors=2,
        get_ms=Spread.of([1.234, 5.0, 250.0]),
        put_ms=Spread.of([7.0]),
        save=figures(2, 0.25, 0.5, 1.0, cpu=1.5),
        load=figures(8, 2.0, cpu=0.25),
        plain_puts=figures(3, 1.0, cpu=0.1),
        plain_gets=figures(9, 123.4, cpu=0.01),
        sent_bytes=1,
        received_bytes=1,
        warnings=("one " * 30,),
    )
    monkeypatch.setattr(dos.measure, "bench", lambda *_, **__: report)
    done = run_here("bench", "s3://b/run", COLUMNS="80")
    assert (
        done.stdout
        == """\
s3://b/run
1.00 MiB of tensors, one process, 1 s in all

save  512.00 MiB/s: 100 GiB in 3 min. 3 plain requests at a time reached 1.00
      GiB/s; this save reached 50% of that. What limits it is not clear: see the
      warnings.
load  2.00 GiB/s: 100 GiB in 50 s. 9 plain requests at a time reached 123.40
      GiB/s; this load reached 2% of that. What limits it is not clear: see the
      warnings.

small requests GET 5 (1.23 to 250) ms, PUT 7 (7 to 7) ms

            GiB/s  lowest  highest  CPU-s/GiB  requests  at a time
save          0.5    0.25        1        1.5         4          2
plain PUTs      1       1        1        0.1         6          3
load            2       2        2       0.25        16          8
plain GETs    123     123      123       0.01        18          9

warning: one one one one one one one one one one one one one one one one one one
  one one one one one one one one one one one one
"""
    )
    shown = json.loads(run_here("bench", "s3://b/run", "--json").stdout)
    assert shown == json.loads(json.dumps(asdict(report)))
