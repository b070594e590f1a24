"""Jobs that are killed at any moment of their saves: nothing is torn, nothing acknowledged is lost.

Two ranks save one step after the other; one of them, or both, are killed by SIGKILL at a moment
that the seed says; then a job of another size resumes and saves on. Which phase of the save the
kill fell into is told by what it left in the bucket, and the kills must fall into all of them.
Every second job has copies on its node, so that the next one fetches nothing of its newest save;
some nodes are lost with theirs.

    pytest tests/faults/test_kills.py -m campaign -n 0 -s     # 500 kills; -k batch-3: a tenth
"""

from __future__ import annotations

import random
import re
import shutil
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

import dcp_objstore as dos
from dcp_objstore.checkpoint.names import is_index_key, parse_data_key
from dcp_objstore.checkpoint.read import read_marker
from dcp_objstore.errors import DcpObjstoreError
from dcp_objstore.stores import StoreSpec
from tests.support.launcher import Job, Ranks, say
from tests.support.proxy import Asked, Cut, Fault, NetworkProxy
from tests.support.ranks import listen_until, run_ranks, start_workers, wait_for
from tests.support.servers import Bucket
from tests.support.states import own_part, same_bits, tensor_state

Options = Mapping[str, object]
MIB = 1024 * 1024

pytestmark = pytest.mark.backends("seaweed", "ceph")

# Of 512 bytes each: a shard of a few, or of 7 MiB, which is two parts.
SMALL_ROWS, LARGE_ROWS = 13, 2 * 7 * 2048
MOST_SAVES = 40  # far more than any kill waits for
# A rank that comes to make the groups of `async_save` waits so long for one that has died.
CONFIG = dos.TransferConfig(part_size_bytes=5 * MIB, peer_timeout_seconds=8)
PHASES = (
    "nothing",
    "uploads",
    "objects without index",
    "index without marker",
    "marker without .metadata",
    "complete",
)


# --- the job


def state_of(step: int, rows: int) -> dict[str, Any]:
    """Every element of it, and its plain value, says which step it is of."""
    state: dict[str, Any] = dict(tensor_state("shard0", {"weights": (rows, 64)}, torch.int64))
    weights = state["weights"]
    weights.to_local().copy_(own_part(weights_of(step, rows), weights))
    state["bias"] = torch.full((11,), float(step))
    state["step"] = step
    return state


def weights_of(step: int, rows: int) -> torch.Tensor:
    return (torch.arange(rows * 64) + (step << 32)).view(rows, 64)


def step_in(url: str, options: Options, local: str | None) -> tuple[int, int]:
    """Loads a checkpoint with all ranks; of which step all of this rank is, and what it fetched."""
    rows = dos.open(url, storage_options=options)["weights"].shape[0]
    state = state_of(0, rows)
    report = dos.load(state, url, storage_options=options, local=local, progress=False)
    step: int = state["step"]
    weights = state["weights"]
    assert isinstance(weights, DTensor)
    own = own_part(weights_of(step, rows), weights)
    assert same_bits(weights.to_local(), own.contiguous()), f"torn: weights are not of step {step}"
    assert state["bias"].eq(step).all(), f"torn: bias is not of step {step}"
    return step, report.fetched_bytes


def save_on_and_on(
    rank: int, world_size: int, run: str, options: Options, local: str | None, seed: int
) -> None:
    """To the same URL or to a new one, in the foreground or in the background."""
    rng = random.Random(seed)  # the same on every rank
    for step in range(1, MOST_SAVES):
        how = rng.choice(["new", "same", "background"])
        url = f"{run}/latest" if how == "same" else f"{run}/step-{step}"
        state = state_of(step, LARGE_ROWS if rng.random() < 1 / 3 else SMALL_ROWS)
        settings: Any = {
            "storage_options": options,
            "config": CONFIG,
            "local": local,
            "overwrite": how == "same",
            "user_metadata": {"step": step},
            "progress": False,
        }
        if rank == 0:
            say("begun", step, url)
        if how == "background":
            handle = dos.async_save(state, url, **settings)
            state["weights"].to_local().fill_(-1)  # training goes on
            handle.result()
        else:
            dos.save(state, url, **settings)
        if rank == 0:
            say("saved", step, url)


def resume(
    rank: int,
    world_size: int,
    urls: list[str],
    torn_url: str,
    step: int,
    options: Options,
    local: str | None,
) -> tuple[dict[str, int], int, dict[str, int]]:
    """The steps that are there; that of a save to where the killed one was; what was fetched."""
    loaded = {url: step_in(url, options, local) for url in urls}
    state = state_of(step, SMALL_ROWS)
    dos.save(state, torn_url, storage_options=options, local=local, overwrite=True, progress=False)
    found = {url: step for url, (step, _) in loaded.items()}
    fetched = {url: fetched_bytes for url, (_, fetched_bytes) in loaded.items()}
    return found, step_in(torn_url, options, local)[0], fetched


# --- the kill


@dataclass(frozen=True)
class Aim:
    """When to kill: so long after so many requests of a kind; or after the first save began.

    Attributes:
        unsent: the last of these requests has not left the host when the rank is killed.
    """

    ranks: tuple[int, ...]
    kind: str
    count: int
    delay_seconds: float
    unsent: bool


def kind_of(asked: Asked) -> str | None:
    if asked.is_listing:
        return "check"
    if asked.name.endswith(".distcp") and asked.method == "PUT":
        return "part" if "partNumber=" in asked.query else "object"
    if asked.name.startswith("index.") and asked.method == "PUT":
        return "index"
    if asked.name == "_COMMIT":
        return "begin" if asked.method == "GET" else "commit"
    if asked.name == ".metadata" and asked.method in ("GET", "PUT"):
        return "publish"
    return None


def take_aim(rng: random.Random) -> Aim:
    kind = rng.choice(
        ["any", "begin", "object", "part", "part", "check", "index", "commit", "publish"]
    )
    # A request takes a few milliseconds, a save a tenth of a second and more.
    delay = rng.uniform(0, {"any": 2.0, "part": 0.03}.get(kind, 0.01))
    ranks = rng.choice([(0,), (0,), (1,), (0, 1)])
    unsent = 0 in ranks and kind in ("check", "index", "commit", "publish") and rng.random() < 0.5
    return Aim(ranks, kind, rng.randint(1, 5), delay, unsent)


def kill_one(
    crew: Ranks, proxy: NetworkProxy, run: str, local: str | None, seed: int, aim: Aim
) -> Job:
    jobs: list[Job] = []
    count = 0

    def plan(asked: Asked) -> Fault | None:
        nonlocal count
        if kind_of(asked) == aim.kind:
            count += 1
            if count == aim.count and aim.unsent:
                jobs[0].kill(*aim.ranks)
                return Cut("request", 0, "rst")
            if count == aim.count:
                proxy.loop.call_later(aim.delay_seconds, lambda: jobs[0].kill(*aim.ranks))
        return None

    proxy.plan = plan
    jobs.append(crew.start(2, save_on_and_on, run, proxy.storage_options, local, seed))
    (job,) = jobs
    if aim.kind == "any":
        (begun,) = wait_for(job, "begun")[:1]
        listen_until(job, begun.at + aim.delay_seconds)
        job.kill(*aim.ranks)
    for outcome in job.end():
        if outcome.rank in aim.ranks:
            assert outcome.exit_signal is not None, str(outcome)
        else:
            assert isinstance(outcome.error, DcpObjstoreError), str(outcome)
    return job


def phase(bucket: Bucket, url: str, saved_before: int, *, said_saved: bool) -> str:
    """Of the save of this URL that was the last to begin, by what is in the bucket."""
    if said_saved:
        return "complete"
    name = url.removeprefix(f"{bucket.url}/")
    stored = read_marker(StoreSpec(url, bucket.storage_options).open())
    if stored is not None and stored.record.generation > saved_before:
        mended = dos.repair(url, storage_options=bucket.storage_options, dry_run=True)
        return "complete" if mended.dot_metadata is None else "marker without .metadata"
    keys = bucket.keys(name)
    if sum(is_index_key(key) for key in keys) > saved_before:
        return "index without marker"
    if sum(parse_data_key(key) is not None for key in keys) > 2 * saved_before:
        return "objects without index"
    listed = bucket.client().list_multipart_uploads(
        Bucket=bucket.name, Prefix=f"{bucket.prefix}{name}/"
    )
    return "uploads" if listed.get("Uploads") else "nothing"


def kill_and_resume(crew: Ranks, proxy: NetworkProxy, bucket: Bucket, seed: int, node: Path) -> str:
    """One kill, and all that must hold afterwards; the phase that it fell into."""
    rng = random.Random(f"kill {seed}")
    aim = take_aim(rng)
    run = bucket.at(f"run-{seed}")
    node.mkdir()
    local = str(node) if seed % 2 else None
    job = kill_one(crew, proxy, run, local, seed, aim)
    begun = [one.message[1:] for one in job.said if one.message[0] == "begun"]
    saved = [one.message[1:] for one in job.said if one.message[0] == "saved"]
    last_step, torn_url = begun[-1] if begun else (0, f"{run}/step-1")
    before = sum(url == torn_url for _, url in saved)
    fell_into = phase(bucket, torn_url, before, said_saved=(last_step, torn_url) in saved)
    there = [
        f"{run}/{key.removesuffix('/_COMMIT')}"
        for key in bucket.keys(f"run-{seed}")
        if re.search(r"/_COMMIT\Z", key)
    ]
    world_size = rng.choice([1, 3, 4])
    is_lost = seed % 8 == 7
    if is_lost:
        shutil.rmtree(node)
    proxy.plan = lambda _: None  # copies are of the endpoint through which they were saved
    told = run_ranks(
        world_size, resume, there, torn_url, last_step + 1, proxy.storage_options, local
    )
    assert all(one[:2] == told[0][:2] for one in told), "ranks that see different checkpoints"
    found, again, _ = told[0]
    where = f"seed {seed}, {aim}, fell into: {fell_into}; saved {saved}, found {found}"
    for step, url in saved:
        assert found.get(url, 0) >= step, f"lost: {where}"
    if local is not None and saved and not is_lost and saved[-1][1] != torn_url:
        assert [fetched[saved[-1][1]] for _, _, fetched in told] == [0] * world_size, where
    for url, step in found.items():
        assert (step, url) in begun, f"never saved: {where}"
    assert max(found.values(), default=0) >= max((step for step, _ in saved), default=0), where
    assert again == last_step + 1, f"the save that follows: {where}"
    return fell_into


def kill_many(bucket: Bucket, seeds: Sequence[int], path: Path) -> Counter[str]:
    fell_into: Counter[str] = Counter()
    began = time.monotonic()
    with start_workers() as crew, NetworkProxy(bucket.storage_options) as proxy:
        for seed in seeds:
            fell_into[kill_and_resume(crew, proxy, bucket, seed, path / f"node{seed}")] += 1
    seconds = time.monotonic() - began
    counts = ", ".join(f"{name}: {fell_into[name]}" for name in PHASES)
    print(f"\n{len(seeds)} kills in {seconds:.0f} s, 0 torn, 0 lost; {counts}")
    return fell_into


def test_a_killed_job_resumes_on_other_ranks_with_nothing_torn_or_lost(bucket, tmp_path):
    # Of both ranks at the marker, and of the coordinator in a part.
    assert kill_many(bucket, (0, 2), tmp_path).total() == 2


@pytest.mark.campaign
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("batch", range(10), ids=lambda batch: f"batch-{batch}")
def test_fifty_kills(bucket, tmp_path, batch):
    fell_into = kill_many(bucket, range(100 + 50 * batch, 150 + 50 * batch), tmp_path)
    assert set(fell_into) == set(PHASES), "kills fall into every phase of a save"
