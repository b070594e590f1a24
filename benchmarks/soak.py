"""`soak`: does anything grow in a job that saves, loads, deletes and is killed for an hour?

A job of several ranks on SeaweedFS resumes from its run, saves in the background, loads, checks
each element of what it has loaded, saves in a child process, deletes by retention and sweeps. A
proxy in front of the server cuts connections, answers 503 and answers late. Once a minute it
answers only 503, until a save fails. Now and then a rank is killed. Then all are started again, as
torchrun does: first another number of ranks, which are preempted after some saves.

Each figure is measured at the end of a cycle, when no save is under way. Its slope is the one that
fits all jobs of the full number of ranks, each with a level of its own, without the warm-up of
each. Samples that follow each other are alike, so the standard error is widened by their
correlation. A figure grows if its slope is more than 4 standard errors, and if it has grown by more
than `_MATTERS` in the time that was measured.
"""

from __future__ import annotations

import itertools
import random
import signal
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import psutil

from benchmarks.settings import Settings
from benchmarks.soak_rank import TURNS, SoakJob, train
from benchmarks.table import Result, Table
from dcp_objstore.cli.seaweedfs import SeaweedServer
from tests.support.launcher import Job, Ranks, Said
from tests.support.proxy import Asked, Cut, Fault, Hold, NetworkProxy, Refuse

_PRELOAD = ["benchmarks.soak_rank", "torch.distributed.checkpoint", "dcp_objstore.run.manager"]
_TENSORS = 8
# The numbers of ranks that resume after a kill, and for how many cycles.
_OTHER_NUMBERS, _OTHER_CYCLES = (3, 1, 5, 2), 3
_LEAST_CYCLES = 4 * TURNS
_SILENCE_SECONDS = 400.0
_OUTAGE_SECONDS = 10.0
# Of all requests.
_CUT, _REFUSED, _LATE = 1 / 80, 1 / 80, 1 / 160
_LATE_SECONDS = 3.0
_MOST_WARM_UP = 48
_ERRORS = 4.0
# What a figure may grow by. In an hour there are some 500 cycles.
_OF_A_RANK = {"memory": 24.0, "children": 24.0, "threads": 2.0, "files": 4.0, "sockets": 4.0}
_STORED = {"objects": 20.0, "deleted steps": np.inf, "MiB": 64.0, "uploads": 3.0}
_SECONDS = ("s/save", "s held up", "s/load", "s/resume", "s/sweep")
_MATTERS_OF_SECONDS = 0.5  # of what it is on average
# Memory and seconds take their time to settle: a shorter run judges only counts.
_JUDGED_FROM_MINUTES = 10.0
_NOT_COUNTS = ("memory", "children", *_SECONDS)
_LINE = "{:>5} {:>4} {:>6} {:>7} {:>24} {:>20} {:>12} {:>12} {:>12} {:>8} {:>5} {:>8} {:>7} {:>7}"
_COLUMNS = {
    "mean": ("mean", ".2f"),
    "slope per hour": ("slope_per_hour", ".2f"),
    "its error": ("error_per_hour", ".2f"),
    "grown": ("grown", ".2f"),
    "grows": ("grows", ""),
}


Pairs = list[tuple[float, float]]
"""Hours and values."""


class Sample(NamedTuple):
    """What a rank measured at the end of a cycle, `hour` hours after the beginning."""

    job: int
    rank: int
    hour: float
    figures: dict[str, float]


def trend(series: Iterable[Pairs], matters: float) -> dict[str, Any] | None:
    """Fit one slope to several series, each with a level of its own; None if they are too short.

    Args:
        series: hours and values.
        matters: what the figure may grow by.
    """
    arrays = [np.array(one) for one in series if len(one) > 2]
    count = sum(map(len, arrays))
    if count < len(arrays) + 2:
        return None
    centred = [one - one.mean(axis=0) for one in arrays]
    hours, values = np.concatenate(centred).T
    slope = hours @ values / (hours @ hours)
    rest = [one[:, 1] - slope * one[:, 0] for one in centred]
    square = sum(one @ one for one in rest)
    alike = sum(one[:-1] @ one[1:] for one in rest) / square if square else 0.0
    alike = min(max(alike, 0.0), 0.95)
    error = np.sqrt(square / (count - len(arrays) - 1) / (hours @ hours))
    error *= np.sqrt((1 + alike) / (1 - alike))
    grown = slope * sum(one[-1, 0] - one[0, 0] for one in arrays)
    return {
        "mean": float(np.concatenate(arrays)[:, 1].mean()),
        "slope_per_hour": float(slope),
        "error_per_hour": float(error),
        "grown": float(grown),
        "grows": bool(slope > _ERRORS * error and grown > matters),
    }


class _Faults:
    """The plan of the proxy.

    Attributes:
        counts: the faults so far.
        outage_until: a moment (`time.monotonic`); until then it answers only 503.
        uploads: how many objects and parts of data were sent.
    """

    def __init__(self, proxy: NetworkProxy, seed: int) -> None:
        self.counts = {"cut": 0, "503": 0, "late": 0}
        self.outage_until = 0.0
        self.uploads = 0
        self._proxy, self._random = proxy, random.Random(seed)

    def __call__(self, asked: Asked) -> Fault | None:
        self._proxy.asked.clear()  # the proxy itself must not grow
        self.uploads += asked.method == "PUT" and asked.name.endswith(".distcp")
        drawn = self._random.random()
        if time.monotonic() < self.outage_until or drawn < _REFUSED:
            self.counts["503"] += 1
            return Refuse(503, "SlowDown")
        if drawn < _REFUSED + _CUT:
            self.counts["cut"] += 1
            after = self._random.randrange(max(1, asked.size_bytes))
            return self._random.choice([Cut("request", after, "rst"), Cut("answer", 0, "fin")])
        if drawn < _REFUSED + _CUT + _LATE:
            self.counts["late"] += 1
            hold = Hold(self._proxy.loop, "answer", 0)
            self._proxy.loop.call_later(_LATE_SECONDS, hold.release)
            return hold
        return None


@dataclass
class _Soak:
    """The jobs, one after the other, and what they said.

    Attributes:
        told: what all jobs are told.
        faults: the plan of the proxy.
        random: which rank is killed.
    """

    told: dict[str, Any]
    faults: _Faults
    random: random.Random
    samples: list[Sample] = field(default_factory=list)
    began: list[float] = field(default_factory=list)  # hour, by job
    problems: dict[str, str] = field(default_factory=dict)
    done: dict[str, int] = field(
        default_factory=lambda: {"saved": 0, "failed": 0, "resumed": 0, "killed": 0}
    )
    newest: int = 0
    lines: int = 0
    started: float = field(default_factory=time.monotonic)

    @property
    def hour(self) -> float:
        """Hours since the beginning."""
        return (time.monotonic() - self.started) / 3600

    def run(self, ranks: int, until: float, cycles: int, *, kill: bool) -> None:
        """One job until an hour and for so many cycles; then kill one rank, or preempt all."""
        number = len(self.began)
        self.began.append(self.hour)
        children: set[int] = set()
        with Ranks(preload=_PRELOAD) as crew:
            job = crew.start(
                ranks,
                train,
                SoakJob(**self.told, newest=self.newest),
                timeout_seconds=86_400,
                group_timeout_seconds=120,
            )
            heard = 0
            spoken_at = time.monotonic()
            while self.hour < until or cycles > 0:
                job.listen(time.monotonic() + 1)
                for said in job.said[heard:]:
                    spoken_at = said.at
                    children.update(self._hear(number, said))
                    cycles -= said.rank == 0 and said.message[0] == "measured"
                heard = len(job.said)
                self._tick(number, ranks)
                if job.outcomes or time.monotonic() - spoken_at > _SILENCE_SECONDS:
                    kill = False
                    break
            self._end(job, kill=kill)
            for said in job.said[heard:]:
                self._hear(number, said)
        alive = [psutil.Process(pid) for pid in children if psutil.pid_exists(pid)]
        if left := psutil.wait_procs(alive, timeout=60)[1]:
            self.problems[f"children of job {number}"] = f"failed: still there: {left}"

    def _end(self, job: Job, *, kill: bool) -> None:
        victim = self.random.randrange(len(job.pids))
        if kill:
            self.done["killed"] += 1
            before, moment = self.faults.uploads, time.monotonic() + 60
            while self.faults.uploads == before and time.monotonic() < moment:
                job.listen(time.monotonic() + 0.01)  # until a save is under way
            job.kill(victim)
        elif not job.outcomes:
            job.signal(signal.SIGTERM)
        what = f"rank {victim} of {len(job.pids)} is killed" if kill else "the job is preempted"
        print(f"{self.hour * 60:5.1f} {len(self.began) - 1:>4}  {what}", file=sys.stderr)
        bad = [
            one for one in job.end(within_seconds=300) if one.timed_out or (one.failed and not kill)
        ]
        if bad:
            text = "\n".join(map(str, bad))
            self.problems[f"job {len(self.began) - 1}"] = f"failed: {what}\n{text}"

    def _hear(self, number: int, said: Said) -> list[int]:
        """Take in what a rank said; the children that it has."""
        kind, *content = said.message
        if kind == "measured":
            self.samples.append(Sample(number, said.rank, self.hour, content[0]))
            children: list[int] = content[1]
            return children
        if said.rank == 0:
            self.done[kind] += 1
            if kind == "saved":
                (self.newest,) = content
        return []

    def _tick(self, number: int, ranks: int) -> None:
        """Once a minute: a line, and an outage."""
        if self.hour * 60 < self.lines + 1:
            return
        self.lines += 1
        self.faults.outage_until = time.monotonic() + _OUTAGE_SECONDS
        late = [one for one in self.samples if one.job == number and one.hour > self.hour - 1 / 60]
        last = {one.rank: one.figures for one in late}

        def of(name: str) -> str:
            return "/".join(f"{last[rank][name]:.0f}" for rank in range(ranks) if rank in last)

        def mean(name: str) -> str:
            seconds = [one.figures[name] for one in late if name in one.figures]
            return f"{statistics.mean(seconds):.2f}" if seconds else "-"

        stored = [f"{last[0][name]:.0f}" if 0 in last else "-" for name in _STORED]
        del stored[1]
        counts = (self.lines, number, self.done["saved"], self.done["failed"])
        row = (*counts, *map(of, _OF_A_RANK), *stored, mean("s/save"), mean("s/load"))
        print(_LINE.format(*row), file=sys.stderr, flush=True)

    def series(self, name: str, ranks: Iterable[int], jobs: Iterable[int] | None) -> list[Pairs]:
        """Return a figure without the warm-up: of each rank and job, or of all jobs as one."""
        measured: dict[tuple[int, int], list[Sample]] = {}
        for one in self.samples:
            if one.rank in ranks and (jobs is None or one.job in jobs):
                measured.setdefault((one.job if jobs else 0, one.rank), []).append(one)
        return [
            [(one.hour, one.figures[name]) for one in warm if name in one.figures]
            for samples in measured.values()
            if (warm := samples[_warm_up(len(samples)) :])
        ]


def _warm_up(cycles: int) -> int:
    """How many cycles of so many are the warm-up: each thing is done twice, or more often."""
    return max(2 * TURNS, min(_MOST_WARM_UP, cycles // 3))


def soak(
    minutes: float,
    ranks: int,
    state_mib: int,
    cycle_seconds: float,
    kill_every_minutes: float | None,
    seed: int,
    plot: str | None,
) -> tuple[Table, Result]:
    """Run the jobs; a figure that grows and a job that ends by itself are problems."""
    if plot is not None:
        import matplotlib  # noqa: F401  what is missing is missed now, not after an hour
    every = (kill_every_minutes or min(15.0, minutes / 2)) / 60
    columns = ("min", "job", "saved", "failed", *_OF_A_RANK, "objects", "MiB", "uploads")
    print(_LINE.format(*columns, "s/save", "s/load"), file=sys.stderr)
    others = itertools.cycle(_OTHER_NUMBERS)
    full = []
    with SeaweedServer() as server, NetworkProxy(server.storage_options) as proxy:
        faults = proxy.plan = _Faults(proxy, seed)
        told = {
            "root": f"{server.create_bucket('soak')}/jobs",
            "storage_options": proxy.storage_options,
            "direct_options": server.storage_options,
            "settings": Settings(gib=state_mib / 1024, tensors=_TENSORS),
            "cycle_seconds": cycle_seconds,
        }
        one = _Soak(told, faults, random.Random(seed))
        last = False
        while not (last or one.problems):
            last = one.hour + 1.5 * every > minutes / 60
            full.append(len(one.began))
            until = minutes / 60 if last else one.hour + every
            one.run(ranks, until, _LEAST_CYCLES, kill=not last)
            if not (last or one.problems):
                one.run(next(others), 0.0, _OTHER_CYCLES, kill=False)
    trends: dict[str, dict[str, Any] | None] = {}
    for name, matters in _OF_A_RANK.items():
        for title, some in (("rank 0", range(1)), ("other ranks", range(1, ranks))):
            trends[f"{name}, {title}"] = trend(one.series(name, some, full), matters)
    for name, matters in _STORED.items():
        trends[name] = trend(one.series(name, [0], None), matters)
    for name in _SECONDS:
        series = one.series(name, [0], full)
        means = [value for pairs in series for _, value in pairs]
        trends[name] = trend(series, _MATTERS_OF_SECONDS * statistics.mean(means or [0]))
    for name, found in trends.items():
        judged = minutes >= _JUDGED_FROM_MINUTES or not name.startswith(_NOT_COUNTS)
        if found and found["grows"] and judged:
            one.problems[name] = f"failed: it grows, by {found['grown']:.3g}"
    if plot is not None:
        _draw(one, plot)
    told_counts = ", ".join(f"{count} {what}" for what, count in (one.done | faults.counts).items())
    table = Table.of(
        f"soak: {minutes:g} minutes, {ranks} ranks, {state_mib} MiB: {told_counts}",
        "figure",
        _COLUMNS,
        {name: found for name, found in trends.items() if found is not None},
        [f"{name}: {why}" for name, why in one.problems.items()],
    )
    return table, {
        "command": "soak",
        "minutes": minutes,
        "ranks": ranks,
        "state_mib": state_mib,
        "done": one.done,
        "faults": faults.counts,
        "trends": trends,
        "samples": [sample._asdict() for sample in one.samples],
        "problems": one.problems,
    }


def _draw(one: _Soak, path: str) -> None:
    """Write a picture of all figures to a file, whose name says the format."""
    import matplotlib as mpl
    from matplotlib import pyplot as plt

    mpl.use("Agg")
    panels: Sequence[Sequence[str]] = (
        ["memory"],
        ["children"],
        ["threads", "files", "sockets"],
        ["objects", "deleted steps", "uploads"],
        ["MiB"],
        _SECONDS,
    )
    figure, places = plt.subplots(3, 2, figsize=(13, 10), sharex=True)
    for place, names in zip(places.flat, panels, strict=True):
        for colour, name in enumerate(names):
            lines: dict[tuple[int, int], Pairs] = {}
            for job, rank, hour, figures in one.samples:
                if name in figures:
                    lines.setdefault((job, rank), []).append((hour * 60, figures[name]))
            for label, ((_, rank), pairs) in zip(
                itertools.chain([name], itertools.repeat(None)), lines.items(), strict=False
            ):
                shade = f"C{colour if len(names) > 1 else rank}"
                place.plot(*zip(*pairs, strict=True), color=shade, linewidth=0.9, label=label)
        for began in one.began[1:]:
            place.axvline(began * 60, color="0.85", linewidth=0.8, zorder=0)
        place.set(ylim=(0, None), xlabel="minutes")
        place.spines[["top", "right"]].set_visible(False)
        place.legend(fontsize=8, frameon=False, loc="lower right")
    figure.suptitle("What a job holds, by rank; lines where a job was killed or ended", fontsize=12)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
