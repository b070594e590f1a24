"""The sink answers as S3 does, and the benchmarks run."""

from __future__ import annotations

import dataclasses
import http.client
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import dcp_objstore as dos
from benchmarks import environments, rounds
from benchmarks.child import Measured
from benchmarks.conditions import Conditions
from benchmarks.peers import PEERS, environment_of, site_packages
from benchmarks.picture import picture
from benchmarks.prices import DEFAULT, Prices
from benchmarks.processes import ChildFailedError
from benchmarks.resume_state import blank, expected_digests, fill, wrong_tensors
from benchmarks.settings import Settings
from benchmarks.sink import Sink
from benchmarks.svg import THEMES, ticks
from dcp_objstore.errors import StoreUnavailableError
from dcp_objstore.stores import open_store
from dcp_objstore.stores.protocol import ObjectStore
from dcp_objstore.stores.ranges import read_range
from tests.support.command_line import printed_by_benchmark

MIB = 1024**2
_ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def keeping() -> Iterator[Sink]:
    with Sink(keep=True) as sink:
        yield sink


@pytest.fixture(scope="module")
def discarding() -> Iterator[Sink]:
    with Sink() as sink:
        yield sink


def _store(sink: Sink, prefix: str) -> ObjectStore:
    return open_store(f"s3://bench/{prefix}", sink.storage_options)


def _parts(count: int, size_bytes: int) -> list[bytes]:
    return [bytes([number + 1]) * size_bytes for number in range(count)]


def test_what_is_saved_through_a_keeping_sink_loads_bit_identical(keeping):
    torch.manual_seed(1)
    state = {f"w{i}": torch.randn(3 * MIB) for i in range(4)}
    state["half"] = torch.randn(7, 11).half()
    url = "s3://bench/whole/step-1"
    options = keeping.storage_options
    writer = dos.ObjectStoreWriter(url, storage_options=options, progress=False)
    dcp.save(state, storage_writer=writer, no_dist=True)
    loaded = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
    reader = dos.ObjectStoreReader(url, storage_options=options, progress=False)
    dcp.load(loaded, storage_reader=reader, no_dist=True)
    assert all(torch.equal(loaded[key], state[key]) for key in state)
    assert keeping.stats()["open_uploads"] == 0


def test_a_save_goes_through_a_discarding_sink(discarding):
    state = {"w": torch.ones(5 * MIB), "b": torch.ones(3)}
    writer = dos.ObjectStoreWriter(
        "s3://bench/gone/step-1", storage_options=discarding.storage_options, progress=False
    )
    dcp.save(state, storage_writer=writer, no_dist=True)
    names = {meta.key: meta.size_bytes for meta in _store(discarding, "gone/step-1").list()}
    assert {"_COMMIT", ".metadata"} < set(names)
    assert sum(names.values()) > 20 * MIB


def test_discarded_objects_keep_their_size_and_refuse_to_be_read(discarding):
    store = _store(discarding, "sizes")
    store.put("single", b"x" * (2 * MIB))
    store.put_stream("parts", iter(_parts(3, 5 * MIB)), part_size_bytes=5 * MIB, max_concurrency=2)
    assert {m.key: m.size_bytes for m in store.list()} == {"single": 2 * MIB, "parts": 15 * MIB}
    assert store.head("parts").size_bytes == 15 * MIB
    at_once = dos.TransferConfig(max_retries=0)
    with pytest.raises(dos.errors.DcpObjstoreError):
        read_range(open_store(store.url, discarding.storage_options, at_once), "parts", 0, 10)


def test_ranges_cross_the_parts_they_were_sent_in(keeping):
    store = _store(keeping, "ranges")
    parts = _parts(3, 5 * MIB)
    store.put_stream("o", iter(parts), part_size_bytes=5 * MIB, max_concurrency=3)
    whole = b"".join(parts)
    for start, end in ((0, 1), (5 * MIB - 3, 5 * MIB + 3), (4 * MIB, 11 * MIB), (0, len(whole))):
        assert read_range(store, "o", start, end) == whole[start:end]


def test_listing_goes_on_past_a_thousand_keys(keeping):
    store = _store(keeping, "many")
    for number in range(1001):
        store.put(f"{number:04d}", b"")
    assert [meta.key for meta in store.list()] == [f"{number:04d}" for number in range(1001)]


def test_chunked_bodies_with_trailing_checksums_are_stored_without_their_framing(keeping):
    body = b"5\r\nhello\r\n6;chunk-signature=0\r\n world\r\n0\r\nx-amz-checksum-crc32:AA==\r\n\r\n"
    connection = http.client.HTTPConnection(keeping.endpoint_url.removeprefix("http://"))
    headers = {"Content-Encoding": "aws-chunked", "x-amz-decoded-content-length": "11"}
    connection.request("PUT", "/bench/chunked/o", body, headers)
    assert connection.getresponse().read() == b""
    connection.close()
    assert _store(keeping, "chunked").get("o", max_size_bytes=100)[0] == b"hello world"


def test_a_request_may_name_the_whole_url(keeping):
    """As the AWS SDK for C++ does."""
    _store(keeping, "named").put("o", b"body")
    connection = http.client.HTTPConnection(keeping.endpoint_url.removeprefix("http://"))
    connection.request("GET", f"{keeping.endpoint_url}/bench/named/o")
    assert connection.getresponse().read() == b"body"
    connection.close()


def test_the_sink_ends_with_its_process():
    code = "from benchmarks.sink import Sink; import os; sink = Sink(); os._exit(3)"
    # The sink holds the pipe of standard error too: this returns only once both have ended.
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=_ROOT, capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 3


@pytest.mark.campaign  # .ci/run starts it
def test_the_save_benchmark_prints_its_table():
    sizes = ["--gib", "0.05", "--rounds", "1", "--peers", "dcp_objstore"]
    table = printed_by_benchmark("save", *sizes)
    assert "CPU-s/GiB" in table
    assert "dcp_objstore" in table


@pytest.mark.campaign  # up to ten processes import torch
@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("load --gib 0.05 --peers raw dcp_objstore", ["requests/GiB", "raw obstore loop"]),
        (
            "weights --gib 0.03 --ranks 2 --peers dcp_objstore 'own checkpoint' load_file",
            ["own checkpoint", "load_file"],
        ),
        ("convert --gib 0.03", ["export a folder", "import one file", "copy, streamed"]),
        ("incremental --gib 0.03 --tensors 20", ["all of it", "base, 95 % frozen"]),
        ("export --gib 0.03 --ranks 2", ["1 ranks", "2 ranks"]),
        ("killed --gib 0.01 --tensors 4 --ranks 2", ["from the bucket", "from the node"]),
    ],
)
def test_a_benchmark_shows_all_that_it_compares(command, shown):
    table = printed_by_benchmark(*shlex.split(command), "--rounds", "1")
    assert [name for name in shown if name not in table] == []


@pytest.mark.campaign  # four processes import torch
def test_the_index_benchmark_loads_a_shard_of_each_tensor():
    scale = ["--ranks", "64", "--tensors", "80", "--rounds", "1"]
    sizes = json.loads(printed_by_benchmark("index", *scale, "--json"))["sizes"]
    assert [one["chunks"] for one in sizes] == [640, 1280, 2560, 5120]
    assert sizes[-1]["index_bytes"] < 0.5 * sizes[-1]["stock_bytes"]
    assert sizes[-1]["decode_seconds"] < sizes[-1]["unpickle_seconds"]


@pytest.mark.campaign
def test_the_gpu_benchmark_measures_or_says_that_there_is_no_gpu():
    table = printed_by_benchmark("gpu", "--gib", "0.25", "--rounds", "1", "--tensors", "4")
    assert ("to floor" if torch.cuda.is_available() else "no GPU here") in table


@pytest.mark.campaign
def test_an_environment_of_a_peer_sees_this_one_and_what_it_has_itself_first(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "prefix", str(tmp_path))  # where the environments of peers stand
    peer = PEERS["s3torchconnector"]
    assert peer.python == sys.executable
    environments.make(environment_of(peer.name))
    code = "import torch, dcp_objstore"
    subprocess.run([peer.python, "-c", code], cwd=tmp_path, timeout=120, check=True)
    own = site_packages(environment_of(peer.name)) / "s3torchconnector-1.4.dist-info"
    own.mkdir()
    (own / "METADATA").write_text("Metadata-Version: 2.1\nName: s3torchconnector\nVersion: 1.4\n")
    assert peer.versions() == {"s3torchconnector": "1.4"}
    assert "1.4 is installed" in str(peer.missing())
    assert peer.versions(here=True) != peer.versions()


def test_requests_are_priced_by_what_a_bucket_charges_for_them():
    prices = Prices.read(DEFAULT)
    verbs = {"PART": 900, "BEGIN": 50, "COMPLETE": 50, "GET": 1500, "HEAD": 500, "DELETE": 9999}
    assert prices.usd_of(verbs) == pytest.approx(0.005 + 2 * 0.0004)


def test_the_bars_of_a_condition_have_one_scale_that_begins_at_zero():
    speeds = {"save": {"raw": 4.0, "dcp_objstore": 3.0}, "load": {"raw": 1.0}}
    found = {
        "results": [
            {
                "name": "HTTP",
                "command": action,
                "peers": {peer: {"gib_per_second": speed} for peer, speed in own.items()},
            }
            for action, own in speeds.items()
        ]
    }
    light, dark = (picture(found, theme) for theme in THEMES.values())
    widths = [float(width) for width in re.findall(r'<rect .* width="([\d.]+)"', light)]
    # Ours comes first; its load is missing and has no bar.
    assert [width / max(widths) for width in widths] == pytest.approx([0.75, 1, 0.25], abs=1e-3)
    assert "failed" in light
    assert light != dark
    assert ticks(4.0) == [0, 1, 2, 3, 4]
    narrow = picture(found, THEMES["light"], columns=1)
    assert [float(width) for width in re.findall(r'<rect .* width="([\d.]+)"', narrow)] == widths
    sizes = [re.findall(r'viewBox="0 0 (\d+) (\d+)"', one)[0] for one in (light, narrow)]
    assert int(sizes[1][0]) < int(sizes[0][0])
    assert int(sizes[1][1]) == 2 * int(sizes[0][1])


ALL = ["all", "--gib", "0.03", "--tensors", "2", "--rounds", "1", "--peers", "dcp_objstore"]


@pytest.mark.campaign  # a dozen processes import torch
@pytest.mark.timeout(900)
def test_all_measures_each_condition_and_draws_what_it_found(tmp_path):
    table = printed_by_benchmark(*ALL, "--out", str(tmp_path / "found.json"))
    assert "US dollars" in table
    found = json.loads((tmp_path / "found.json").read_text())
    assert [len(one["peers"]) for one in found["results"]] == [1] * 8
    assert found["usd_in_a_bucket"] > 0
    assert "like S3, HTTPS" in (tmp_path / "found-dark.svg").read_text()


@pytest.mark.campaign
def test_the_results_of_a_bucket_do_not_name_it(keeping, tmp_path, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", keeping.endpoint_url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "sink")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "sink")
    url = "s3://bench/not-named"
    printed_by_benchmark(*ALL, "--url", url, "--out", str(tmp_path / "found.json"))
    text = (tmp_path / "found.json").read_text()
    assert [one["target"] for one in json.loads(text)["results"]] == ["a bucket"] * 2
    assert "not-named" not in text
    assert list(_store(keeping, "not-named").list()) == []


@pytest.mark.campaign
def test_a_timeline_shows_the_parts_of_a_save(tmp_path):
    sizes = ["--gib", "0.06", "--tensors", "2", "--out", str(tmp_path / "save.svg")]
    spans = json.loads(printed_by_benchmark("timeline", *sizes, "--json"))["spans"]
    names = [{name for name, *_ in own} for own in spans.values()]
    assert {"stage", "part", "commit"} <= names[0]
    assert {"hash", "part", "commit"} <= names[1]
    assert "copy and hash" in (tmp_path / "save-light.svg").read_text()


RESUME = ["resume", "--gib", str(1 / 32), "--tensors", "2", "--rounds", "1", "--json"]


@pytest.mark.campaign  # 20 s each
@pytest.mark.parametrize("action", ["save", "load"])
def test_the_link_benchmark_tells_what_each_process_moved(action):
    sizes = ["--gib", str(1 / 32), "--tensors", "2", "--processes", "2", "--seconds", "10"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "link", action, *sizes, "--json"],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=True,
    )
    result = json.loads(done.stdout)
    assert sum(result["shares"]) == pytest.approx(2)
    # A link of 0.25 GiB/s is not faster than that, but for what was in flight when counting began.
    assert 0 < sum(result["moved_bytes"]) < 1.3 * 10 * 256 * MIB


@pytest.mark.campaign
def test_the_resume_benchmark_counts_what_all_ranks_fetched_together():
    peers = ["dcp_objstore", "dcp_objstore-alone"]
    ranks = ["--saved-by", "2", "--loaded-by", "3", "--layout", "replicated"]
    result = json.loads(printed_by_benchmark(*RESUME, *ranks, "--peers", *peers))
    once, alone = (result["peers"][name] for name in peers)
    # Three ranks need all of it: one of them fetches each byte, or each of them all.
    assert once["fetched_to_saved"] == pytest.approx(1, abs=0.02)
    assert alone["fetched_to_saved"] == pytest.approx(3, abs=0.06)
    assert alone["fetched_to_needed"] == pytest.approx(1, abs=0.02)
    assert [len(rounds) for rounds in result["rounds"].values()] == [1, 1]
    for figures in (once, alone):
        assert figures["save_seconds"] > 0
        assert figures["seconds"] > 0
        assert figures["cpu_seconds_per_gib"] > 0
        # Of two tensors of 16 MiB, in requests of 8 MiB, plus the marker and the index.
        assert figures["requests"] > 4


@pytest.mark.campaign  # five minutes: it is for a machine of many cores
@pytest.mark.timeout(1800)
@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU, run it with its own limit")
def test_each_part_of_the_gpu_machine_script_runs_where_there_is_no_gpu(tmp_path):
    command = str(_ROOT / "benchmarks" / "gpu_machine.sh")
    options = {**os.environ, "LIMIT": "9000", "GIB": "0.06"}
    subprocess.run([command, str(tmp_path)], env=options, stdout=subprocess.DEVNULL, check=True)
    summary = (tmp_path / "summary.txt").read_text()
    ended = re.findall(r"^([\w-]+): status (\d+)", summary, re.M)
    assert {name.split("-")[0] for name, _ in ended} == {"tests", "gpu", "cores", "ranks"}, summary
    assert [name for name, status in ended if status != "0"] == [], summary
    assert "no GPU here" in (tmp_path / "gpu.txt").read_text()
    rows = re.findall(r"^\W*s3torchconnector\b", (tmp_path / "cores.txt").read_text(), re.M)
    assert len(rows) == 4  # save and load, http and https


@pytest.mark.campaign  # half a minute: a dozen processes import torch
def test_the_resume_benchmark_loads_a_model_and_its_optimizer_under_fully_shard():
    ranks = ["--saved-by", "3", "--loaded-by", "2", "--layout", "fsdp2"]
    result = json.loads(printed_by_benchmark(*RESUME, *ranks, "--peers", "dcp_objstore"))
    # 12 blocks of 12 parameters and the last norm's 2: each with two moments and a step count.
    assert result["tensors"] == 4 * (12 * 12 + 2)
    assert result["total_bytes"] == pytest.approx(MIB * 32, rel=0.1)
    # A block of these small tensors is less than a gap that is read over to save a request: ranks
    # that need some of a third rank's object read most of it. (Of 1 GiB it is 1.02.)
    assert 1 <= result["peers"]["dcp_objstore"]["fetched_to_saved"] < 1.4


def test_the_resume_benchmark_finds_a_tensor_that_differs_in_one_bit():
    state = {"one": torch.empty(7, 5), "two": {"deep": torch.empty(3), "count": torch.empty(())}}
    fill(state)
    expected = expected_digests(state)
    assert wrong_tensors(state, expected) == []
    state["two"]["deep"][1] = -state["two"]["deep"][1]
    assert wrong_tensors(state, expected) == [1]
    blank(state)
    assert wrong_tensors(state, expected) == [0, 1, 2]


@pytest.mark.parametrize("left", [False, True])
def test_a_peer_that_fails_on_a_server_is_a_row_and_the_others_are_measured(left, monkeypatch):
    """Also where it leaves what cannot be removed."""
    fine = Measured(
        seconds=2.0,
        cpu_seconds=1.0,
        gib_moved=4.0,
        extra_mib=None,
        requests_by_verb=None,
        refused=None,
        server_cpu_seconds=None,
    )

    class Place:
        def __init__(self, name: str = "") -> None:
            self.name = name

        def at(self, name: str) -> Place:
            return Place(name)

        def clear(self) -> None:
            if left and "torch" in self.name:
                raise StoreUnavailableError("the listing has a key that is none")

    class Job:
        def __init__(self, *, peer: str, **_: object) -> None:
            self.peer = peer

        def run(self, module: str) -> dict[str, Any]:
            if "torch" in self.peer:
                raise ChildFailedError("Header ETag not found")
            return dataclasses.asdict(fine)

    monkeypatch.setattr(rounds, "Job", Job)
    monkeypatch.setattr(rounds, "open_target", lambda *_, **__: nullcontext(Place()))
    monkeypatch.setattr(rounds, "absent", lambda peers: {})
    peers = ["s3torchconnector", "raw", "dcp_objstore"]
    table, result = rounds.compare("save", peers, Settings(), "s3://b", 2, Conditions())
    assert "Header ETag not found" in result["problems"]["s3torchconnector"]
    assert {name: len(found) for name, found in result["rounds"].items()} == {
        "raw": 2,
        "dcp_objstore": 2,
    }
    assert [row[0] for row in table.rows][2:] == ["s3torchconnector (failed)"]
    assert table.rows[2][1:] == [None] * (len(table.columns) - 1)


@pytest.mark.campaign
def test_a_peer_that_fails_to_resume_is_reported():
    # 5 MiB is the least size of a part that is valid.
    wrong = ["--saved-by", "2", "--peers", "dcp_objstore", "--part-size-bytes", "1"]
    result = json.loads(printed_by_benchmark(*RESUME, *wrong, status=1))
    assert result["peers"] == {}
    assert result["problems"]["dcp_objstore"].startswith("failed:\nrank 0: ")
    assert "ConfigError" in result["problems"]["dcp_objstore"]
