"""`link`: what each of several processes gets of a link that they share.

Each process saves a checkpoint of its own, or loads one, again and again. They begin one after the
other, so that the first have found their number of requests when the last begin. What is counted is
what each moves from then on, while all of them are at it.
"""

from __future__ import annotations

import dataclasses
import time
import warnings
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.child import make_state
from benchmarks.conditions import Conditions
from benchmarks.peers.ours import Ours
from benchmarks.processes import ChildFailedError, run_ranks
from benchmarks.settings import GIB, Settings
from benchmarks.table import Result, Table, number
from benchmarks.targets import Place, open_target
from dcp_objstore.observe.events import Event, PartUploaded, RangeRead

_PRELOAD = ["benchmarks.link"]
_JOB_SECONDS = 1800
# From one beginning to the next.
_APART_SECONDS = 0.5


@dataclass(frozen=True, kw_only=True)
class LinkJob:
    """What all processes do.

    Attributes:
        action: `save` or `load`.
        place: each process has a place of its own below it.
        settings: sizes of the state and of the requests.
        seconds: how long is counted.
    """

    action: str
    place: Place
    settings: Settings
    seconds: float


def run(rank: int, world_size: int, job: LinkJob) -> int:
    """Save or load until the time is over; the bytes that were moved while all did."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    settings, place = job.settings, job.place.at(f"process-{rank}")
    moved: list[tuple[float, int]] = []

    def hear(event: Event) -> None:
        if isinstance(event, PartUploaded | RangeRead):
            moved.append((time.monotonic(), event.size_bytes))

    state, peer = make_state(settings, blank=False), Ours(on_event=hear)
    if job.action == "load":
        peer.save(state, place, settings)
    dist.barrier()
    counted_from = time.monotonic() + world_size * _APART_SECONDS
    counted_until = counted_from + job.seconds
    time.sleep(rank * _APART_SECONDS)
    turn = 0
    while time.monotonic() < counted_until:
        if job.action == "load":
            peer.load(state, place, settings)
        else:
            peer.save(state, place.at(f"save-{turn}"), settings)
        turn += 1
    return sum(size for at, size in moved if counted_from <= at < counted_until)


def link(
    action: str, settings: Settings, conditions: Conditions, processes: int, seconds: float
) -> tuple[Table, Result]:
    """Measure what each process moves.

    Raises:
        ChildFailedError: a process failed, or none has moved a part or a range in time.
    """
    with open_target("sink", keep=action == "load", conditions=conditions) as place:
        job = LinkJob(action=action, place=place, settings=settings, seconds=seconds)
        moved: list[int] = run_ranks(processes, run, job, preload=_PRELOAD, seconds=_JOB_SECONDS)
    if not sum(moved):
        raise ChildFailedError(f"nothing was moved in {seconds:g} s: give them more --seconds")
    shares = sorted(each * processes / sum(moved) for each in moved)
    result: dict[str, Any] = {
        "command": "link",
        "action": action,
        "conditions": dataclasses.asdict(conditions),
        "settings": dataclasses.asdict(settings),
        "seconds": seconds,
        "moved_bytes": moved,
        "gib_per_second": sum(moved) / GIB / seconds,
        "shares": shares,
    }
    title = (
        f"{action} by {processes} processes on {conditions.described('sink')}: {settings.gib:g} GiB"
        f" each, again and again, for {seconds:g} s"
    )
    columns = ["GiB/s, all together", "least of its fair share", "most"]
    figures = [result["gib_per_second"], shares[0], shares[-1]]
    return Table(title, columns, [[number(each) for each in figures]], []), result
