"""`async-loop`: does a training loop keep its pace while `async_save` uploads?

Ours is `dcp_objstore.async_save`; the other storages are called through `dcp.async_save`.

A step is Python, which needs the GIL all the time (the worst case for an upload that wants it
too), and a small matrix product. The sink takes about 0.3 GiB/s, as a network would, so that the
upload lasts, and does not take the processors from the loop. The raw loop in a thread, which has
no format and no digests and copies nothing, shows what the upload costs whatever the client does.

Also: how long the call of `async_save` takes, from the second save of the state on, and a plain
copy of the state to tensors whose memory has been touched.
"""

from __future__ import annotations

import dataclasses
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.checkpoint.state_dict_saver import async_save

from benchmarks.child import Job, make_state
from benchmarks.conditions import Conditions
from benchmarks.peers import PEERS, AsyncPeer, DcpPeer, State, absent
from benchmarks.processes import answer, in_turns, medians
from benchmarks.settings import GIB, MIB, Settings
from benchmarks.table import Result, Table
from benchmarks.targets import Place, open_target

_MODULE = "benchmarks.async_loop"
_STEP_ITERATIONS = 10_000  # about a millisecond
_ALONE_SECONDS = 1.5  # before and after each save
_SAVES = 6
_MATRIX = 64
_COLUMNS = {
    "steps/s alone": ("alone_per_second", ".0f"),
    "during": ("during_per_second", ".0f"),
    "ratio": ("ratio", ".2f"),
    "ran, ratio": ("ran_ratio", ".2f"),
    "longest ms": ("during_longest_ms", ".0f"),
    "upload s": ("upload_seconds", ".2f"),
    "call ms": ("blocked_ms", ".0f"),
    "/ plain copy": ("blocked_ratio", ".2f"),
}


@dataclass(frozen=True)
class Pace:
    """Steps that were made in some time.

    Attributes:
        steps: how many.
        seconds: in which time.
        longest_ms: the longest single step.
        ran_seconds: of these, the thread had a processor: it waited neither for the GIL nor for
            its turn. Unlike steps, that does not vary with how fast the processor is, which on a
            machine that is shared changes by more from one second to the next than a save costs.
            (Linux; elsewhere all of them.)
    """

    steps: int
    seconds: float
    longest_ms: float
    ran_seconds: float

    @classmethod
    def until(cls, done: Callable[[], bool]) -> Pace:
        """Make steps until `done`."""
        steps, longest = 0, 0.0
        began, ran = time.perf_counter(), _ran_seconds()
        while not done():
            start = time.perf_counter()
            _step()
            longest = max(longest, time.perf_counter() - start)
            steps += 1
        seconds = time.perf_counter() - began
        return cls(steps, seconds, longest * 1e3, _ran_seconds() - ran)

    @property
    def per_second(self) -> float:
        """Steps per second."""
        return self.steps / self.seconds if self.seconds else 0.0

    @property
    def ran_share(self) -> float:
        """The share of the time in which the thread had a processor."""
        return self.ran_seconds / self.seconds if self.seconds else 0.0


def _ran_seconds() -> float:
    """How long this thread has run (Linux: Documentation/scheduler/sched-stats)."""
    schedstat = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
    if not schedstat.exists():
        return time.perf_counter()
    return int(schedstat.read_text().split()[0]) / 1e9


def async_loop(
    peers: list[str],
    settings: Settings,
    target: str,
    rounds: int,
    conditions: Conditions,
) -> tuple[Table, Result]:
    """Every peer once per round in a fresh process; medians of the rounds."""
    problems = absent(peers)
    with open_target(target, keep=False, conditions=conditions) as root:

        def measure_one(name: str, turn: int) -> dict[str, float | None]:
            place = root.at(f"{name}-{turn}")
            try:
                job = Job(peer=name, action="async", place=place, settings=settings)
                found: dict[str, float | None] = job.run(_MODULE)
            finally:
                place.clear()
            return found

        found = medians(in_turns(peers, rounds, measure_one, problems))
    table = Table.of(
        f"steps of a Python loop during async_save of {settings.gib:g} GiB to"
        f" {conditions.described(target)}, medians of {rounds} rounds",
        "peer",
        _COLUMNS,
        {PEERS[name].label: figures for name, figures in found.items()},
        [f"{PEERS[name].label}: {problem}" for name, problem in problems.items()],
    )
    return table, {"command": "async-loop", "peers": found, "problems": problems}


def measure(fields: dict[str, Any]) -> dict[str, float]:
    """Steps per second without and with uploads under way, in this process."""
    job = Job.of(fields)
    settings = job.settings
    # async_save works in a process group only.
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    warm_up = dataclasses.replace(settings, gib=32 * MIB / GIB, tensors=2)
    begin = _begin_raw if job.peer == "raw" else _begin_async
    begin(job, make_state(warm_up, blank=False), job.place.at("warm-up")).wait()
    state = make_state(settings, blank=False)
    begin(job, state, job.place.at("first")).wait()  # staging memory is allocated
    touched = make_state(settings, blank=True)
    alone, during = [_alone()], []
    blocked, copied = [], []
    for number_ in range(_SAVES):
        copied.append(_timed(lambda: _copy(state, touched))[0])
        place = job.place.at(f"save-{number_}")
        seconds, save = _timed(lambda place=place: begin(job, state, place))  # type: ignore[misc]
        blocked.append(seconds)
        during.append(Pace.until(save.ended.is_set))
        save.wait()
        alone.append(_alone())
    dist.destroy_process_group()
    # Against what was made just before and after: the machine's own pace drifts by more than the
    # uploads cost.
    around = list(zip(during, pairwise(alone), strict=True))
    ratios = [
        pace.per_second / statistics.mean(one.per_second for one in pair) for pace, pair in around
    ]
    ran_ratios = [
        pace.ran_share / statistics.mean(one.ran_share for one in pair) for pace, pair in around
    ]
    return {
        "alone_per_second": statistics.median(pace.per_second for pace in alone),
        "during_per_second": statistics.median(pace.per_second for pace in during),
        "ratio": statistics.median(ratios),
        "ran_ratio": statistics.median(ran_ratios),
        "alone_longest_ms": max(pace.longest_ms for pace in alone),
        "during_longest_ms": max(pace.longest_ms for pace in during),
        "upload_seconds": sum(pace.seconds for pace in during) / _SAVES,
        "blocked_ms": statistics.median(blocked) * 1e3,
        "copy_ms": statistics.median(copied) * 1e3,
        "blocked_ratio": statistics.median(blocked) / statistics.median(copied),
    }


def _alone() -> Pace:
    deadline = time.perf_counter() + _ALONE_SECONDS
    return Pace.until(lambda: time.perf_counter() > deadline)


def _copy(state: State, to: State) -> None:
    for key, tensor in state.items():
        to[key].copy_(tensor)


def _timed(act: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = act()
    return time.perf_counter() - start, result


class _Save:
    """A save that runs in a thread of its own."""

    def __init__(self, result: Callable[[], Any]) -> None:
        self.ended = threading.Event()
        self._error: BaseException | None = None

        def wait() -> None:
            try:
                result()
            except BaseException as error:
                self._error = error
            self.ended.set()

        self._thread = threading.Thread(target=wait)
        self._thread.start()

    def wait(self) -> None:
        """Wait for its end; raise what it raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error


def _begin_raw(job: Job, state: State, place: Place) -> _Save:
    peer = PEERS[job.peer].load()
    return _Save(lambda: peer.save(state, place, job.settings))


def _begin_async(job: Job, state: State, place: Place) -> _Save:
    peer = PEERS[job.peer].load()
    if isinstance(peer, AsyncPeer):
        return _Save(peer.async_save(state, place, job.settings))
    future = async_save(state, storage_writer=cast(DcpPeer, peer).writer(place, job.settings))
    return _Save(cast(Any, future).result)


_matrix = torch.full((_MATRIX, _MATRIX), 1.0 / _MATRIX)


def _step() -> int:
    total = 0
    for i in range(_STEP_ITERATIONS):
        total += i * i & 7
    torch.mm(_matrix, _matrix)
    return total


if __name__ == "__main__":
    answer(measure)
