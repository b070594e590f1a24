"""`bench`: figures of what was really moved, honest about noise, and nothing of it stays."""

from __future__ import annotations

import json
import signal
import threading
from dataclasses import replace
from typing import NoReturn

import pytest

import dcp_objstore as dos
from dcp_objstore.cli import bench as cli
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
from tests.support.command_line import environment
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


def figures(gib_per_second: float, connections: int, cpu: float = 0.3) -> Throughput:
    speed = Spread.of([gib_per_second] * 3)
    return Throughput(
        gib_per_second=speed,
        cpu_seconds_per_gib=cpu,
        requests=connections,
        request_size_bytes=MIB,
        connections=connections,
    )


@pytest.mark.parametrize(
    ("whole", "plain", "says"),
    [
        (
            figures(0.3, 32),
            figures(0.4, 32),
            "307.20 MiB/s: 100 GiB in 6 min. 32 plain requests at a time reached 409.60 MiB/s; this"
            " {} reached 75% of that. The store, or the way to it",
        ),
        (figures(0.3, 32, cpu=6), figures(0.4, 32), "The processors are busy"),
        (figures(0.3, 32, cpu=5), figures(0.4, 32), "The store, or the way to it"),
        (figures(0.9, 1), figures(0.9, 1), "in 111 s. 1 plain request at a time reached"),
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


@pytest.mark.backends("seaweed")
def test_the_table_fits_80_columns_and_json_has_all_of_it(bucket, monkeypatch, capsys):
    for name, value in environment(bucket.storage_options).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("COLUMNS", "80")
    cli.measure(bucket.url, size="1MiB", seconds=0.1, as_json=False)
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    text = " ".join(shown.split())
    for words in (
        "1.00 MiB of tensors",
        "100 GiB in",
        "see the warnings",
        "plain PUTs",
        "plain GETs",
        "warning:",
    ):
        assert words in text
    cli.measure(bucket.url, size="1MiB", seconds=0.1, as_json=True)
    report = json.loads(capsys.readouterr().out)
    assert report["size_bytes"] == MIB
    assert set(report) == set(dos.measure.BenchReport.__dataclass_fields__)
    assert bucket.keys() == []
