"""One measurement in a process of its own: a job comes on stdin, its result goes to stdout.

A fresh process per measurement, so that no peer inherits another's memory, threads or warmed-up
allocator. The state is allocated and touched, and a small save or load is done, before the
measured one: imports and first-use work are not part of it.
"""

from __future__ import annotations

import dataclasses
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers import PEERS, Peer, State
from benchmarks.processes import answer, run_module
from benchmarks.settings import GIB, MIB, Settings
from benchmarks.targets import Place

_WARM_UP = "warm-up"
_MEASURED = "measured"


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a child does.

    Attributes:
        peer: by name.
        action: `save` (measured), `prepare` (save so that it can be loaded, not measured) or
            `load` (measured; checked).
        place: a save begins with nothing there.
    """

    peer: str
    action: str
    place: Place
    settings: Settings

    @classmethod
    def of(cls, fields: dict[str, Any]) -> Job:
        """From what `dataclasses.asdict` has made of one."""
        place, settings = Place(**fields["place"]), Settings(**fields["settings"])
        return cls(**{**fields, "place": place, "settings": settings})

    def run(self, module: str) -> Any:
        """Do it in a fresh process, in the peer's own environment if there is one."""
        peer = PEERS.get(self.peer)  # the name of a step is none
        python = sys.executable if peer is None else peer.python
        return run_module(module, dataclasses.asdict(self), python)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One measurement.

    Attributes:
        seconds: wall time.
        cpu_seconds: user and system time of the client process.
        gib_moved: bytes of tensors, in GiB.
        extra_mib: peak resident memory above what was resident before; None where the kernel
            does not tell (only Linux does).
        requests_by_verb, refused: as counted by the sink, else None. The refused are among both.
        server_cpu_seconds: user and system time of the sink, else None.
    """

    seconds: float
    cpu_seconds: float
    gib_moved: float
    extra_mib: float | None
    requests_by_verb: dict[str, int] | None
    refused: int | None
    server_cpu_seconds: float | None

    @property
    def gib_per_second(self) -> float:
        """Throughput."""
        return self.gib_moved / self.seconds

    @property
    def requests(self) -> int | None:
        """Requests of all kinds, if they were counted."""
        return None if self.requests_by_verb is None else sum(self.requests_by_verb.values())


def make_state(settings: Settings, *, blank: bool) -> State:
    """Tensors with touched memory: number i is full of i + 1, or of -1 when `blank`."""
    return {
        f"tensor-{i:05d}": torch.full((settings.tensor_elements,), -1.0 if blank else i + 1.0)
        for i in range(settings.tensors)
    }


def check_loaded(state: State) -> None:
    """Raise unless every tensor holds what `make_state` put there."""
    for i, (name, tensor) in enumerate(state.items()):
        if not bool((tensor == i + 1.0).all()):
            raise AssertionError(f"{name} was not loaded")


def measure(act: Callable[[], None], settings: Settings, place: Place) -> Measured:
    """Run `act` once and tell what it cost."""
    if place.counted:
        place.stats(reset=True)
    before_mib = reset_peak_mib()
    cpu, start = cpu_seconds(), time.perf_counter()
    act()
    seconds, cpu = time.perf_counter() - start, cpu_seconds() - cpu
    peak_mib = status_mib("VmHWM")
    stats = place.stats() if place.counted else None
    return Measured(
        seconds=seconds,
        cpu_seconds=cpu,
        gib_moved=settings.total_bytes / GIB,
        extra_mib=None if before_mib is None or peak_mib is None else peak_mib - before_mib,
        requests_by_verb=None if stats is None else stats["requests"],
        refused=None if stats is None else stats["refused"],
        server_cpu_seconds=None if stats is None else stats["cpu_seconds"],
    )


def run(fields: dict[str, Any]) -> dict[str, Any] | None:
    """Do a job in this process; the fields of what was `Measured`."""
    job = Job.of(fields)
    peer, settings = PEERS[job.peer].load(), job.settings
    warm_up = dataclasses.replace(settings, gib=32 * MIB / GIB, tensors=2)
    warm_place, place = job.place.at(_WARM_UP), job.place.at(_MEASURED)
    if job.action == "load":
        _load(peer, warm_up, warm_place)
        return dataclasses.asdict(_load(peer, settings, place))
    peer.save(make_state(warm_up, blank=False), warm_place, warm_up)
    state = make_state(settings, blank=False)
    if job.action == "prepare":
        peer.save(state, place, settings)
        return None
    saved = measure(lambda: peer.save(state, place, settings), settings, place)
    return dataclasses.asdict(saved)


def _load(peer: Peer, settings: Settings, place: Place) -> Measured:
    state = make_state(settings, blank=True)
    measured = measure(lambda: peer.load(state, place, settings), settings, place)
    check_loaded(state)
    return measured


def cpu_seconds() -> float:
    """User and system time of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def reset_peak_mib() -> float | None:
    """Begin a new peak (Linux: proc(5), clear_refs); the memory resident now, in MiB."""
    clear = Path("/proc/self/clear_refs")
    if not clear.exists():
        return None
    clear.write_text("5")
    return status_mib("VmRSS")


def status_mib(name: str) -> float | None:
    """A figure of the kernel about this process, as `VmHWM`; None where it gives none."""
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    fields = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
    return int(fields[name].split()[0]) / 1024


if __name__ == "__main__":
    answer(run)
