"""One rank of `resume`: it saves or loads, together with the other ranks of its job."""

from __future__ import annotations

import dataclasses
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from benchmarks.child import cpu_seconds, reset_peak_mib, status_mib
from benchmarks.peers import RESUME_PEERS, DcpPeer
from benchmarks.resume_state import (
    State,
    blank,
    expected_digests,
    fill,
    make_state,
    own_bytes,
    tensors_of,
    total_bytes,
    wrong_tensors,
)
from benchmarks.settings import MIB, Settings
from benchmarks.targets import Place

if TYPE_CHECKING:
    from dcp_objstore.reports import LoadReport

_WARM_UP_BYTES = MIB


@dataclass(frozen=True, kw_only=True)
class RankJob:
    """What all ranks do.

    Attributes:
        action: `save` (once; how long it takes is measured) or `load` (measured and checked).
        peers: by name, in turn.
        layout: one of `resume_state.LAYOUTS`.
        rounds: how often each peer loads.
        place: each peer has a place of its own below it.
        settings: sizes of the state and of the requests.
    """

    action: str
    peers: Sequence[str]
    layout: str
    rounds: int
    place: Place
    settings: Settings


def run(rank: int, world_size: int, job: RankJob) -> dict[str, Any]:  # noqa: ARG001
    """Do the job: the measurements of each peer's rounds, and why others have none."""
    warnings.simplefilter("ignore")
    warm_up = dataclasses.replace(job.settings, gib=_WARM_UP_BYTES / 2**30, tensors=2)
    states = {
        "warm-up": Filled(make_state(warm_up, job.layout), job.action),
        "measured": Filled(make_state(job.settings, job.layout), job.action),
    }
    peers: dict[str, DcpPeer] = {name: RESUME_PEERS[name].load_dcp() for name in job.peers}
    measured: dict[str, list[dict[str, Any]]] = {name: [] for name in peers}
    problems: dict[str, str] = {}
    for turn in range(1 if job.action == "save" else job.rounds):
        for name in [name for name in peers if name not in problems]:
            place = job.place.at(name)
            try:
                if job.action == "save":
                    for what, filled in states.items():
                        seconds = _save(peers[name], filled, place.at(what), job.settings)
                    measured[name].append({"seconds": seconds})
                    continue
                if turn == 0:
                    _load(peers[name], states["warm-up"], place.at("warm-up"), job.settings)
                measured[name].append(
                    _load(peers[name], states["measured"], place.at("measured"), job.settings)
                )
            except PeerFailedError as error:
                problems[name] = f"failed:\n{error}"
    state = states["measured"].state
    size = {"total_bytes": total_bytes(state), "tensors": len(tensors_of(state))}
    return {"measured": measured, "problems": problems, **size}


class Filled:
    """A state, full of what is to be saved, or with the digests of what is to be loaded."""

    def __init__(self, state: State, action: str) -> None:
        self.state = state
        self.digests: list[bytes] = []
        if action == "save":
            fill(state)
        else:
            self.digests = expected_digests(state)

    def check(self) -> None:
        """Raise unless this rank's part of every tensor holds, bit by bit, what was saved."""
        wrong = wrong_tensors(self.state, self.digests)
        if wrong:
            raise AssertionError(f"tensors {wrong[:10]} were not loaded")


class PeerFailedError(Exception):
    """A rank failed; raised on all of them, with its error as text."""


def _save(peer: DcpPeer, filled: Filled, place: Place, settings: Settings) -> float:
    dist.barrier()
    start = time.perf_counter()
    error = error_of(lambda: save(dict(filled.state), storage_writer=peer.writer(place, settings)))
    gather({"error": error})
    return time.perf_counter() - start


def _load(peer: DcpPeer, filled: Filled, place: Place, settings: Settings) -> dict[str, Any]:
    def act() -> LoadReport | None:
        reader = peer.reader(place, settings)
        load(dict(filled.state), storage_reader=reader)
        return getattr(reader, "last_load", None)

    return measure_load(act, filled, place)


def measure_load(
    act: Callable[[], LoadReport | None], filled: Filled, place: Place
) -> dict[str, Any]:
    """Load once on all ranks; what it cost them together.

    Args:
        act: the load; it returns a report of ours, if there is one.
        filled: the state that it fills.
        place: what it loads from.
    """
    state = filled.state
    blank(state)
    if place.counted and dist.get_rank() == 0:
        place.stats(reset=True)
    reports: list[LoadReport | None] = []
    before_mib = reset_peak_mib()
    dist.barrier()
    cpu, start = cpu_seconds(), time.perf_counter()
    error = error_of(lambda: reports.append(act()))
    cpu = cpu_seconds() - cpu
    dist.barrier()
    seconds = time.perf_counter() - start
    peak_mib = status_mib("VmHWM")
    report = reports[0] if reports else None
    own = {
        "cpu_seconds": cpu,
        "needed_bytes": own_bytes(state),
        "extra_mib": None if peak_mib is None or before_mib is None else peak_mib - before_mib,
        "fetched_bytes": None if report is None else report.total_bytes,
        "requests": None if report is None else report.requests,
        "error": error or error_of(filled.check),
    }
    ranks = gather(own)
    total = {name: _sum(ranks, name) for name in own if name not in ("extra_mib", "error")}
    if place.counted:
        stats = place.stats()
        total["fetched_bytes"] = stats["sent_bytes"]
        total["requests"] = stats["requests"].get("GET", 0)
    extra = [rank["extra_mib"] for rank in ranks if rank["extra_mib"] is not None]
    return {**total, "seconds": seconds, "extra_mib": max(extra, default=None)}


def error_of(act: Callable[[], object]) -> str | None:
    """What `act` raised, as text: the other ranks must hear of it where they all meet."""
    try:
        act()
    except (Exception, CheckpointException) as error:
        return "".join(traceback.format_exception(error))[-2000:]
    return None


def gather(own: dict[str, Any]) -> list[dict[str, Any]]:
    """What every rank has, if none has an `error`.

    Raises:
        PeerFailedError: on all ranks, with the error of the lowest rank that has one.
    """
    ranks: list[dict[str, Any]] = [{}] * dist.get_world_size()
    dist.all_gather_object(ranks, own)
    for number, rank in enumerate(ranks):
        if rank["error"] is not None:
            raise PeerFailedError(f"rank {number}: {rank['error']}")
    return ranks


def _sum(ranks: list[dict[str, Any]], name: str) -> float | None:
    values = [rank[name] for rank in ranks]
    return None if None in values else sum(values)
