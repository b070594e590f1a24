"""What a bad network does to a save and a load: it delays them, or they fail, soon, on every rank.

A proxy on the way to a real server stalls and cuts connections. How long a call may take is the
time-out of its job: a rank that is not done by then is killed, and says that it hung.

    pytest tests/faults/test_network_faults.py -m campaign -n 0 -s     # 30 seeds, and more stalls
"""

from __future__ import annotations

import random
import re
import secrets
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest

import dcp_objstore as dos
from dcp_objstore.cli.seaweedfs import SeaweedServer
from dcp_objstore.errors import (
    CheckpointNotFoundError,
    CommitUnknownError,
    RankFailedError,
    RetryableError,
    TransferStalledError,
)
from tests.support.campaign import cases
from tests.support.checkpoints import assert_nothing_visible
from tests.support.launcher import Outcome, Ranks
from tests.support.proxy import Asked, Cut, Fault, NetworkProxy
from tests.support.ranks import run_ranks, start_workers, try_ranks
from tests.support.servers import BUCKET, Bucket
from tests.support.states import fill, tensor_state, wrong_keys

Options = Mapping[str, object]
MIB = 1024 * 1024

pytestmark = pytest.mark.backends("seaweed")

# Three parts per rank of two.
SHAPES = {"weights": (3, 2 * MIB), "bias": (5, 7)}
PART_SIZE_BYTES = 5 * MIB
# The stall time-out, the transport's time to send its abort (5 s), and what a busy machine needs.
SOON_SECONDS = 90.0
PATIENT = dos.TransferConfig(part_size_bytes=PART_SIZE_BYTES, request_size_bytes=4 * MIB)
# Of the rank that is stalled alone: on a busy machine, another one may move nothing for so long.
IMPATIENT = replace(PATIENT, stall_timeout_seconds=1.5)


def save(
    rank: int, world_size: int, url: str, options: list[Options], configs: list[dos.TransferConfig]
) -> dos.reports.SaveReport:
    """Each rank with options of its own, which may lead it through a proxy of its own."""
    state = tensor_state("shard0", SHAPES)
    fill(state)
    mine, config = options[rank % len(options)], configs[rank % len(configs)]
    return dos.save(dict(state), url, storage_options=mine, config=config, progress=False)


def save_and_give_up(rank: int, world: int, *rest: Any) -> dos.reports.SaveReport:
    """`save` by a transport that has no 5 s for an abort that does not go through."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dcp_objstore.transfer.upload._ABORT_GRACE_SECONDS", 0.5)
        return save(rank, world, *rest)


def load(
    rank: int, world_size: int, url: str, options: list[Options], configs: list[dos.TransferConfig]
) -> list[str]:
    """The keys whose bytes are wrong."""
    state = tensor_state("shard0", SHAPES)
    mine, config = options[rank % len(options)], configs[rank % len(configs)]
    dos.load(dict(state), url, storage_options=mine, config=config, progress=False)
    return wrong_keys(state)


def end_soon(
    act: Callable[..., object], url: str, ways: list[Options], configs: list[dos.TransferConfig]
) -> list[Outcome]:
    """How it ends on as many ranks as there are ways."""
    began = time.monotonic()
    outcomes = try_ranks(len(ways), act, url, ways, configs, timeout_seconds=SOON_SECONDS)
    print(f"{len(ways)} ranks ended {time.monotonic() - began:.1f} s after they began")
    return outcomes


def assert_loads(url: str, options: Options) -> None:
    state = tensor_state("plain", SHAPES)
    dos.load(dict(state), url, storage_options=options, progress=False)
    assert wrong_keys(state) == []


@pytest.fixture
def proxy(bucket: Bucket) -> Iterator[NetworkProxy]:
    with NetworkProxy(bucket.storage_options) as proxy:
        yield proxy


def is_part(asked: Asked) -> bool:
    return asked.method == "PUT" and "partNumber=" in asked.query


def is_range(asked: Asked) -> bool:
    return asked.method == "GET" and asked.name.endswith(".distcp")


def assert_nothing_saved(bucket: Bucket, name: str) -> None:
    """No marker, nothing for any reader, and nothing left behind that a sweep will not see."""
    assert_nothing_visible(bucket, name, uploads=True)
    with pytest.raises(CheckpointNotFoundError):
        dos.open(bucket.at(name), storage_options=bucket.storage_options)
    assert_orphans_are_reported(bucket, name)


def assert_orphans_are_reported(bucket: Bucket, name: str) -> None:
    swept = dos.sweep(bucket.at(name), storage_options=bucket.storage_options, dry_run=True)
    assert swept.uploads_unseen is None
    assert sum(one.uploads_young for one in swept.checkpoints) == len(bucket.uploads())


# --- stalls


@pytest.mark.parametrize(("stalled", "world_size"), cases([(0, 4), (1, 2)], default=[(1, 2)]))
def test_a_stalled_rank_fails_the_save_soon_and_typed_on_every_rank(
    bucket, proxy, stalled, world_size
):
    """Its connections stand still in the middle of a part; the server never hears the rest."""
    url, options = bucket.at("step-1"), bucket.storage_options
    held = proxy.hold(is_part, after_bytes=MIB)
    ways, configs = [options] * world_size, [PATIENT] * world_size
    ways[stalled], configs[stalled] = proxy.storage_options, IMPATIENT
    outcomes = end_soon(save_and_give_up, url, ways, configs)
    assert held.reached, [str(outcome) for outcome in outcomes]
    for outcome in outcomes:
        assert isinstance(outcome.error, TransferStalledError), str(outcome)
        assert outcome.error.rank == stalled
        assert outcome.error.url == url
    assert_nothing_saved(bucket, "step-1")
    assert {key.rpartition("/__")[2][0] for key in bucket.uploads()} <= {str(stalled)}
    held.release()


def puts(asked: Asked, name: str) -> bool:
    return asked.method == "PUT" and asked.name == name


# Small requests obey the stall time-out, although their own time-outs are minutes.
AT_THE_COMMIT: dict[str, tuple[Callable[[NetworkProxy, Asked], bool], type | None]] = {
    "before it, the marker": (lambda _, asked: asked.name == "_COMMIT", RetryableError),
    "before it, the probe": (lambda _, asked: asked.name.startswith(".probe-"), RetryableError),
    "before it, the index": (lambda _, asked: asked.name.startswith("index."), RetryableError),
    # Whether the marker can be read meanwhile or not: what was sent may still land.
    "its put": (lambda _, asked: puts(asked, "_COMMIT"), CommitUnknownError),
    "its put and what follows": (
        lambda proxy, asked: (
            asked.name == "_COMMIT" and any(puts(one, "_COMMIT") for one in [*proxy.asked, asked])
        ),
        CommitUnknownError,
    ),
    "after it": (lambda _, asked: puts(asked, ".metadata"), None),
}


@pytest.mark.campaign
@pytest.mark.parametrize("where", AT_THE_COMMIT)
def test_a_coordinator_that_stalls_around_the_commit_ends_soon_on_every_rank(bucket, proxy, where):
    url, options = bucket.at("step-1"), bucket.storage_options
    meant, expected = AT_THE_COMMIT[where]
    held = proxy.hold(lambda asked: meant(proxy, asked))
    ways, configs = [proxy.storage_options, options], [IMPATIENT, PATIENT]
    outcomes = end_soon(save, url, ways, configs)
    assert held.reached, [str(outcome) for outcome in outcomes]
    for outcome in outcomes:
        if expected is None:
            assert not outcome.failed, str(outcome)
        else:
            assert isinstance(outcome.error, expected), str(outcome)
            assert expected is CommitUnknownError or outcome.error.rank == 0  # type: ignore[attr-defined]
    if expected is None:
        assert_loads(url, options)
    else:
        assert_nothing_visible(bucket, "step-1")
    held.release()


@pytest.mark.parametrize("stalled", cases([0, 1], default=[1]))
def test_a_stalled_load_fails_soon_and_typed_on_every_rank(bucket, proxy, stalled):
    url, options = bucket.at("step-1"), bucket.storage_options
    run_ranks(3, save, url, [options], [PATIENT])
    held = proxy.hold(is_range, "answer", after_bytes=MIB)
    ways, configs = [options, options], [PATIENT, PATIENT]
    ways[stalled], configs[stalled] = proxy.storage_options, IMPATIENT
    for outcome in end_soon(load, url, ways, configs):
        assert isinstance(outcome.error, TransferStalledError), str(outcome)
        assert outcome.error.rank == stalled
        assert "load again" in str(outcome.error)
    assert held.reached
    held.release()
    assert_loads(url, options)


@pytest.fixture(scope="module")
def crew() -> Iterator[Ranks]:
    with start_workers() as crew:
        yield crew


def save_until_ctrl_c(rank: int, world: int, url: str, *ways: object) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored under nohup
    save(rank, world, url, *ways)  # type: ignore[arg-type]


@pytest.mark.campaign
@pytest.mark.parametrize("everywhere", [False, True], ids=["stalled-rank", "every-rank"])
def test_ctrl_c_ends_a_stalled_save_long_before_any_time_out(bucket, proxy, crew, everywhere):
    """The time-outs are minutes; what it takes are the 5 s that the transport has for its abort."""
    url, options = bucket.at("step-1"), bucket.storage_options
    held = proxy.hold(is_part, after_bytes=MIB)
    config = dos.TransferConfig(part_size_bytes=PART_SIZE_BYTES)
    ways = [options, proxy.storage_options]
    job = crew.start(2, save_until_ctrl_c, url, ways, [config], timeout_seconds=SOON_SECONDS)
    held.wait()
    job.signal(signal.SIGINT, *(() if everywhere else (1,)))
    first, second = job.end()
    assert isinstance(second.error, KeyboardInterrupt), str(second)
    if everywhere:
        assert isinstance(first.error, KeyboardInterrupt), str(first)
    else:
        assert isinstance(first.error, RankFailedError), str(first)
        assert first.error.rank == 1
    assert_nothing_saved(bucket, "step-1")
    held.release()


@pytest.mark.campaign
@pytest.mark.parametrize("name", ["_COMMIT", "index."])
def test_a_load_that_is_stalled_before_its_first_byte_fails_soon_on_every_rank(bucket, proxy, name):
    url, options = bucket.at("step-1"), bucket.storage_options
    run_ranks(2, save, url, [options], [PATIENT])
    held = proxy.hold(lambda asked: asked.name.startswith(name), "answer", after_bytes=20)
    ways = [proxy.storage_options]
    for outcome in end_soon(load, url, ways * 2, [IMPATIENT]):
        assert isinstance(outcome.error, RetryableError), str(outcome)
    assert held.reached
    held.release()


@pytest.mark.campaign
def test_one_stalled_connection_only_delays_a_save(bucket, proxy):
    url = bucket.at("step-1")
    held = proxy.hold(is_part, after_bytes=MIB, times=1)
    config = dos.TransferConfig(
        part_size_bytes=PART_SIZE_BYTES, request_timeout_seconds=2, stall_timeout_seconds=30
    )
    run_ranks(2, save, url, [proxy.storage_options], [config], timeout_seconds=150)
    assert held.reached
    assert_loads(url, bucket.storage_options)
    assert bucket.uploads() == []
    held.release()


@pytest.mark.campaign
def test_a_slow_network_is_no_stall(bucket, proxy):
    """A part takes nearly half of the stall time-out; all of a rank's take longer than that."""
    url = bucket.at("step-1")
    proxy.bytes_per_second = 4 * MIB
    config = dos.TransferConfig(
        part_size_bytes=PART_SIZE_BYTES, upload_concurrency=1, stall_timeout_seconds=3
    )
    run_ranks(2, save, url, [proxy.storage_options], [config], timeout_seconds=150)
    assert_loads(url, bucket.storage_options)


# --- cuts


class Cutter:
    """Cuts what it is told to, at random places, in both ways; the first `times` of it."""

    def __init__(self, proxy: NetworkProxy, seed: int, likelihood: float, times: int) -> None:
        self.random = random.Random(seed)
        self.likelihood, self.left = likelihood, times
        self.where: list[str] = []
        proxy.plan = self.plan

    def plan(self, asked: Asked) -> Fault | None:
        if self.left == 0 or self.random.random() > self.likelihood:
            return None
        self.left -= 1
        side = self.random.choice(["request", "answer"])
        most = asked.size_bytes + 300 if side == "request" else 2 * MIB if is_range(asked) else 200
        cut = Cut(side, self.random.randrange(most), self.random.choice(["rst", "fin"]))  # type: ignore[arg-type]
        self.where.append(f"{asked.method} {asked.name}?{asked.query[:12]} {cut}")
        return cut


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(30))
def test_connections_cut_at_random_only_delay_a_save_and_a_load(bucket, proxy, seed):
    url, ways = bucket.at("step-1"), [proxy.storage_options]
    config = dos.TransferConfig(part_size_bytes=PART_SIZE_BYTES, request_size_bytes=4 * MIB)
    cutter = Cutter(proxy, seed, 0.3, 8)
    outcomes = try_ranks(2, save, url, ways, [config], timeout_seconds=150)
    assert not any(one.failed for one in outcomes), f"{cutter.where} {[str(o) for o in outcomes]}"
    saving, proxy.cuts = proxy.cuts, 0
    assert_loads(url, bucket.storage_options)
    # Who never learns the id of an upload cannot abort it.
    assert_orphans_are_reported(bucket, "step-1")
    cutter = Cutter(proxy, seed, 0.6, 8)
    for outcome in try_ranks(3, load, url, ways, [config], timeout_seconds=150):
        assert outcome.value == [], f"{cutter.where} {outcome}"
    print(f"seed {seed}: {saving} cuts in the save, {proxy.cuts} in the load")
    assert saving + proxy.cuts > 0


@pytest.mark.parametrize("side", cases(["request", "answer"], default=["answer"]))
def test_a_save_survives_the_loss_of_every_kind_of_request_and_answer(bucket, proxy, side):
    """Each once: nothing of the request arrives; or it takes effect, and its answer is lost."""
    url = bucket.at("step-1")
    lost: set[tuple[str, ...]] = set()

    def plan(asked: Asked) -> Fault | None:
        kind = re.sub(r"[0-9a-f]{16,}", "*", asked.name)
        query = re.sub(r"=[^&]*", "", asked.query)
        if (asked.method, kind, query) in lost:
            return None
        lost.add((asked.method, kind, query))
        return Cut(side, 0, "rst")

    proxy.plan = plan
    config = dos.TransferConfig(part_size_bytes=PART_SIZE_BYTES)
    outcomes = try_ranks(2, save, url, [proxy.storage_options], [config], timeout_seconds=150)
    assert not any(one.failed for one in outcomes), f"{lost} {[str(one) for one in outcomes]}"
    print(f"{len(lost)} kinds of {side}s lost: {sorted(lost)}")
    assert {"GET", "PUT", "POST"} <= {method for method, *_ in lost}
    assert_loads(url, bucket.storage_options)
    assert (
        dos.repair(url, storage_options=bucket.storage_options, dry_run=True).dot_metadata is None
    )


# --- the server


@pytest.fixture(scope="module")
def server() -> Iterator[SeaweedServer]:
    """One that may be killed."""
    with SeaweedServer() as server:
        server.create_bucket(BUCKET)
        yield server


@pytest.mark.campaign
@pytest.mark.parametrize("moment", [is_part, lambda asked: puts(asked, "_COMMIT")])
def test_a_server_that_is_killed_and_restarted_in_mid_save_only_delays_it(server, crew, moment):
    options = server.storage_options
    bucket = Bucket("seaweed", f"s3://{BUCKET}/{secrets.token_hex(4)}", options, options)
    url = bucket.at("step-1")
    config = dos.TransferConfig(part_size_bytes=PART_SIZE_BYTES)
    with NetworkProxy(options) as proxy:
        # The rest of the request never arrives, and nobody is there to hear the next ones.
        held = proxy.hold(moment, after_bytes=100)
        job = crew.start(2, save, url, [proxy.storage_options], [config], timeout_seconds=150)
        held.wait()
        server.kill()
        before = len(proxy.asked)
        proxy.hang_up()
        server.restart()
        outcomes = job.end()
    assert not any(one.failed for one in outcomes), [str(one) for one in outcomes]
    assert_loads(url, options)
    assert any(moment(asked) for asked in proxy.asked[before:]), "it was asked again"
    assert_orphans_are_reported(bucket, "step-1")
