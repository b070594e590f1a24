"""`bench`: measure saves and loads, what limits them, and what other settings would gain.

It measures everything in turns, round by round, because the speed of a network or of a shared
machine changes from one second to the next.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle, islice, zip_longest
from statistics import median, median_low
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
import torch.distributed as dist

from dcp_objstore.checkpoint.names import MARKER_KEY, parse_data_key
from dcp_objstore.config import MIB, TransferConfig, processors
from dcp_objstore.doctor.scratch import Scratch, Stop, StoppedError
from dcp_objstore.errors import ConfigError
from dcp_objstore.measure import plain
from dcp_objstore.measure.report import (
    LEAST_GAIN,
    BenchReport,
    SettingsGain,
    Spread,
    Throughput,
    settings_text,
)
from dcp_objstore.observe.events import AnyEvent, PartUploaded, RangeRead
from dcp_objstore.observe.report import GIB, StatusLine, counted
from dcp_objstore.read.api import load
from dcp_objstore.stores.spec import StoreSpec
from dcp_objstore.threads import spawn
from dcp_objstore.transfer.digests import BLOCK_SIZE_BYTES, block_digests
from dcp_objstore.transfer.workers import DaemonPool, in_waves, run_into
from dcp_objstore.waiting import result_of
from dcp_objstore.write.api import save

if TYPE_CHECKING:
    from dcp_objstore.stores.protocol import ObjectStore
    from dcp_objstore.transfer.upload import ByteArray

_log = logging.getLogger("dcp_objstore")

# A store that does not answer ends the measurement soon. None of this changes the speed.
CONFIG = TransferConfig(max_retries=3, retry_timeout_seconds=10, stall_timeout_seconds=60)
SECONDS = 45.0
_LEAST_SECONDS = 0.1
_LEAST_SIZE_BYTES = MIB
_LEAST_AUTO_BYTES, _MOST_AUTO_BYTES = 16 * MIB, 1024 * MIB
_TENSOR_BYTES = 32 * MIB
# One save or load takes at most this share of the time, unless the smallest takes longer.
_SHARE = 1 / 25
_TRY_SHARE = 0.5  # of the time, in which all settings are tried once
_ALONE_SHARE = 1 / 20
_MOST_ALONE = 8
_MOST_ROUNDS = 5
_ENOUGH_ROUNDS = 3
_MACHINE_BYTES = 256 * MIB
_SMALL_REQUESTS = 9
_NOISY = 1.25  # rounds that differ by this factor are worth a warning

Action = Literal["save", "load"]
Settings = Mapping[str, int]
_USUAL: Settings = {}
_TRIED: Mapping[Action, Sequence[Settings]] = {
    "save": [
        *({"upload_concurrency": number} for number in (32, 16, 64, 8)),
        *({"part_size_bytes": size * MIB} for size in (32, 8, 64)),
    ],
    "load": [
        *({"download_concurrency": number} for number in (32, 16, 64, 8)),
        *({"request_size_bytes": size * MIB} for size in (16, 32)),
    ],
}


def bench(
    url: str,
    *,
    size_bytes: int | None = None,
    seconds: float = SECONDS,
    storage_options: Mapping[str, object] | None = None,
    config: TransferConfig | None = None,
    progress: bool = True,
) -> BenchReport:
    """Measure saves and loads on a store, from this machine, and what other settings would gain.

    One process saves tensors below a random name under the URL, loads them, and sends plain
    requests, which show what the network and the store can do. It removes everything it wrote, also
    after an error or Ctrl-C; it touches nothing else. At most about twice the size is on
    the store at any time. In a bucket with versioning, old versions stay.

    Args:
        url: URL below which you save checkpoints.
        size_bytes: size of the tensors of one save, at least 1 MiB and at most half of the memory.
            Default: what this store and machine move in a second or two, 16 MiB to 1 GiB, and at
            most an eighth of the memory.
        seconds: about how long to measure. A step that has begun is finished, so a large
            `size_bytes` takes longer. Default 45.
        storage_options: credentials and endpoint, as for `save`.
        config: the settings that you use, to compare others with. Default `TransferConfig()`, but
            with fewer retries.
        progress: show what is being measured if standard error is a terminal. Default True.

    Returns:
        The figures. `warnings` says why to doubt them, and what could not be removed.

    Raises:
        ConfigError: `size_bytes` or `seconds` is out of its bounds, or this is a rank of a job.
        PermissionDeniedError: these credentials may not write, list, read and delete here. This is
            found out with small objects first.
        DcpObjstoreError: the store refused or failed. What could not be removed is logged.
    """
    _check(size_bytes, seconds)
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise ConfigError("bench measures one process: call it outside of a job of several ranks")
    spec = StoreSpec(url, storage_options, config or CONFIG)
    stop, line = Stop(), StatusLine(shown=progress)
    done: Future[BenchReport] = Future()
    spawn(lambda: run_into(done, lambda: _cleaned(spec, size_bytes, seconds, stop, line)), "bench")
    try:
        return result_of(done)
    except BaseException:
        # Ctrl-C. No request is cut off, so none takes effect after the removal.
        stop.set()
        line.show("ending this step, then removing what was written (Ctrl-C again: leave it)")
        try:
            with suppress(StoppedError, Exception):
                result_of(done)
        except BaseException:  # noqa: BLE001 - Ctrl-C again; the first error is raised
            _log.warning("objects .bench-* may remain below %s", spec.url)
        raise
    finally:
        line.clear()


def _check(size_bytes: int | None, seconds: float) -> None:
    most_bytes = _memory_bytes() // 2
    if size_bytes is not None and not (
        type(size_bytes) is int and _LEAST_SIZE_BYTES <= size_bytes <= most_bytes
    ):
        raise ConfigError(
            f"size_bytes must be an integer from {_LEAST_SIZE_BYTES} to {most_bytes}, half of this"
            f" machine's memory, got {size_bytes!r}"
        )
    if type(seconds) not in (int, float) or not _LEAST_SECONDS <= seconds < float("inf"):
        raise ConfigError(f"seconds must be a number of at least {_LEAST_SECONDS}, got {seconds!r}")


def _cleaned(
    spec: StoreSpec, size_bytes: int | None, seconds: float, stop: Stop, line: StatusLine
) -> BenchReport:
    """Measure, and remove what was written."""
    scratch = Scratch(spec, ".bench")
    try:
        report = _Bench(scratch, seconds, stop, line).run(spec.url, size_bytes)
    except BaseException:
        if left := _removed(scratch):
            _log.warning(left)
        raise
    left = _removed(scratch)
    return replace(report, warnings=(*report.warnings, left)) if left else report


def _removed(scratch: Scratch) -> str:
    """Remove everything; say what could not be."""
    left = scratch.remove()
    if left.listed and not left.keys:
        return ""
    return (
        f"what was written could not be removed ({left.why or 'no reason was given'}): remove"
        f" everything below {scratch.spec.url}"
    )


@dataclass(frozen=True)
class _Round:
    """One measurement of one way to move the bytes."""

    seconds: float
    cpu_seconds: float
    size_bytes: int
    requests: int
    request_size_bytes: int
    connections: int

    @property
    def gib_per_second(self) -> float:
        return self.size_bytes / GIB / self.seconds


@dataclass(frozen=True)
class _Compared:
    """Rounds in which the ways to save, or to load, took turns. `best` is empty if it is None."""

    settings: Settings | None
    usual: list[_Round] = field(default_factory=list)
    best: list[_Round] = field(default_factory=list)
    plain: list[_Round] = field(default_factory=list)


class _Bench:
    """One run, step by step."""

    def __init__(self, scratch: Scratch, seconds: float, stop: Stop, line: StatusLine) -> None:
        self._scratch = scratch
        self._store = scratch.store
        self._config = scratch.spec.config
        self._seconds = seconds
        self._stop = stop
        self._line = line
        self._began_at = time.monotonic()
        self._saves = 0
        self._moved_bytes: dict[Action, int] = {"save": 0, "load": 0}

    def run(self, url: str, size_bytes: int | None) -> BenchReport:
        """Measure everything. The caller removes what is left."""
        busy = list(_busy())
        put_ms, get_ms = self._small_requests()
        self._fill(min(size_bytes or _LEAST_AUTO_BYTES, _LEAST_AUTO_BYTES))
        copied, hashed = self._machine()
        put_alone, get_alone = self._alone()
        self._remove(self._first()[0])  # which imports, connects and so on
        kept, saved, loaded = self._first()
        while next_bytes := self._next_size_bytes(size_bytes, saved, loaded):
            self._remove(kept)
            self._fill(next_bytes)
            kept, saved, loaded = self._first()
        usual: dict[Action, _Round] = {"save": saved, "load": loaded}
        tried = self._try(kept, usual)
        compared = self._compare(kept, usual, tried)
        save, load = compared["save"], compared["load"]
        return BenchReport(
            url=url,
            size_bytes=len(self._memory),
            seconds=self._elapsed_seconds,
            processors=processors(),
            copy_gib_per_second=copied,
            hash_gib_per_second=hashed,
            put_ms=put_ms,
            get_ms=get_ms,
            put_alone=_throughput(put_alone),
            get_alone=_throughput(get_alone),
            save=_throughput(save.usual),
            load=_throughput(load.usual),
            plain_puts=_throughput(save.plain),
            plain_gets=_throughput(load.plain),
            save_settings=_gain(save, tried["save"]),
            load_settings=_gain(load, tried["load"]),
            sent_bytes=self._moved_bytes["save"],
            received_bytes=self._moved_bytes["load"],
            warnings=(*busy, *_doubts("saves", save), *_doubts("loads", load)),
        )

    @property
    def _elapsed_seconds(self) -> float:
        return time.monotonic() - self._began_at

    def _step(self, text: str) -> None:
        self._stop.check()
        self._line.show(f"{self._elapsed_seconds:3.0f} of about {self._seconds:.0f} s: {text}")

    def _small_requests(self) -> tuple[Spread, Spread]:
        """Measure PUTs and GETs of one byte. Whoever may make these may make all that follow."""
        self._step("small requests")
        requests = plain.plan_puts(np.zeros(_SMALL_REQUESTS, dtype=np.uint8), 1)
        with self._scratch.writing(requests[0].key):
            plain.put(self._store, requests[0])
        plain.get(self._store, requests[0])
        next(iter(self._store.list()), None)
        self._store.delete(requests[0].key)
        self._scratch.keys.clear()
        found = []
        for do in (plain.put, plain.get):
            rounds = [self._timed("save", 0, [one], 1, do) for one in requests]
            found.append(Spread.of([1000 * one.seconds for one in rounds]))
        self._delete(one.key for one in requests)
        return found[0], found[1]

    def _fill(self, size_bytes: int) -> None:
        """Make tensors of that size, of bytes that no store can compress or has had before."""
        self._step("making tensors")
        words = np.random.default_rng().integers(0, 2**64, -(-size_bytes // 8), dtype=np.uint64)
        self._memory: ByteArray = words.view(np.uint8)[:size_bytes]
        pieces = np.array_split(self._memory, max(1, size_bytes // _TENSOR_BYTES))
        self._state: dict[str, Any] = {
            f"tensor-{number}": torch.from_numpy(piece) for number, piece in enumerate(pieces)
        }

    def _first(self) -> tuple[str, _Round, _Round]:
        """Save and load once; the checkpoint stays."""
        name, saved = self._save(_USUAL, keep=True)
        return name, saved, self._load(name, _USUAL)

    def _next_size_bytes(self, wanted_bytes: int | None, saved: _Round, loaded: _Round) -> int:
        """Return a larger size, or 0 if this one is right.

        With little to move, a store that answers late shows only how late it answers.
        """
        now_bytes = len(self._memory)
        if wanted_bytes is not None:
            return wanted_bytes if now_bytes < wanted_bytes else 0
        most_bytes = min(_MOST_AUTO_BYTES, _memory_bytes() // 8)
        takes_long = 2 * max(saved.seconds, loaded.seconds) > _SHARE * self._seconds
        return 0 if takes_long or 2 * now_bytes > most_bytes else 2 * now_bytes

    def _machine(self) -> tuple[Spread, Spread]:
        """Measure how fast memory is copied, and how fast it is hashed."""
        self._step("this machine's memory")
        source = np.resize(self._memory, _MACHINE_BYTES)
        target = np.zeros_like(source)
        slices = np.array_split(source, _MACHINE_BYTES // (4 * BLOCK_SIZE_BYTES))

        def hash_all() -> None:
            with DaemonPool(self._config.hash_threads, "hash") as pool:
                for future in [pool.submit(block_digests, one) for one in slices]:
                    future.result()

        figures: list[list[float]] = [[], []]
        ways: Sequence[Callable[[], object]] = (lambda: np.copyto(target, source), hash_all)
        for _ in range(_MOST_ROUNDS):
            for way, found in zip(ways, figures, strict=True):
                began_at = time.perf_counter()
                way()
                found.append(_MACHINE_BYTES / GIB / (time.perf_counter() - began_at))
        return Spread.of(figures[0]), Spread.of(figures[1])

    def _alone(self) -> tuple[list[_Round], list[_Round]]:
        """Measure PUTs, then GETs, one after the other."""
        requests = plain.plan_puts(self._memory, self._config.part_size_bytes)
        found: tuple[list[_Round], list[_Round]] = ([], [])
        for do, rounds, action in zip((plain.put, plain.get), found, _TRIED, strict=True):
            self._step(f"one connection, {do.__name__.upper()}")
            deadline = time.monotonic() + _ALONE_SHARE * self._seconds
            for one in islice(cycle(requests), _MOST_ALONE):
                rounds.append(self._timed(action, one.memory.nbytes, [one], 1, do))
                if time.monotonic() > deadline:
                    break
            requests = requests[: len(rounds)]
        self._delete(one.key for one in requests)
        return found

    def _try(self, kept: str, usual: Mapping[Action, _Round]) -> dict[Action, dict[str, float]]:
        """Try all settings that may matter once; return GiB/s by their text."""
        tried: dict[Action, dict[str, float]] = {"save": {}, "load": {}}
        for pair in zip_longest(*_TRIED.values()):
            for action, settings in zip(_TRIED, pair, strict=True):
                if self._elapsed_seconds > _TRY_SHARE * self._seconds:
                    return tried
                if settings is not None and self._matters(settings, usual[action]):
                    measured = self._move(action, kept, settings)
                    tried[action][settings_text(settings)] = measured.gib_per_second
        return tried

    def _matters(self, settings: Settings, usual: _Round) -> bool:
        ((name, value),) = settings.items()
        if getattr(self._config, name) == value:
            return False
        if name.endswith("_concurrency"):
            return value <= usual.requests
        return value <= len(self._memory) // 2

    def _compare(
        self,
        kept: str,
        usual: Mapping[Action, _Round],
        tried: Mapping[Action, Mapping[str, float]],
    ) -> dict[Action, _Compared]:
        """Let the usual settings, the best that were tried and plain requests take turns."""
        compared: dict[Action, _Compared] = {}
        turns: list[list[tuple[list[_Round], partial[_Round]]]] = []
        for action, found in tried.items():
            best = max(_TRIED[action], key=lambda one: found.get(settings_text(one), 0.0))
            one = _Compared(best if found else None)
            ways = [
                (one.usual, partial(self._move, action, kept, _USUAL)),
                (one.plain, partial(self._plain, action, kept, usual[action])),
            ]
            if found:
                ways.append((one.best, partial(self._move, action, kept, best)))
            compared[action] = one
            turns.append(ways)
        for turn in range(_MOST_ROUNDS):
            began_seconds = self._elapsed_seconds
            for ways in turns:
                # Another one first each time: a way may profit from the one before it.
                first = turn % len(ways)
                for rounds, way in ways[first:] + ways[:first]:
                    rounds.append(way())
            if 2 * self._elapsed_seconds - began_seconds > self._seconds:
                break  # one more round would take too long
        return compared

    def _move(self, action: Action, kept: str, settings: Settings) -> _Round:
        return self._save(settings)[1] if action == "save" else self._load(kept, settings)

    def _save(self, settings: Settings, *, keep: bool = False) -> tuple[str, _Round]:
        """Save once; return the checkpoint's name, and how it went."""
        self._step(f"saving {_described(settings)}")
        self._saves += 1
        name = f"save-{self._saves}"
        with self._scratch.writing(f"{name}/{MARKER_KEY}"):
            measured = self._call(save, "save", name, settings)
        if not keep:
            self._remove(name)
        return name, measured

    def _load(self, name: str, settings: Settings) -> _Round:
        """Load once. The tensors have the same bytes before and after."""
        self._step(f"loading {_described(settings)}")
        return self._call(load, "load", name, settings)

    def _call(
        self, do: Callable[..., object], action: Action, name: str, settings: Settings
    ) -> _Round:
        spec = self._scratch.spec
        config = replace(self._config, **settings)  # type: ignore[arg-type]  # it checks them
        seen: list[AnyEvent] = []
        began_at, cpu = time.perf_counter(), time.process_time()
        do(
            self._state,
            f"{spec.url}/{name}",
            storage_options=spec.storage_options,
            config=config,
            progress=False,
            on_event=seen.append,
        )
        seconds, cpu = time.perf_counter() - began_at, time.process_time() - cpu
        self._moved_bytes[action] += self._memory.nbytes
        requests = [one for one in seen if isinstance(one, PartUploaded | RangeRead)]
        largest_bytes = max((one.size_bytes for one in requests), default=0)
        connections = len({one.worker for one in requests})
        return _Round(seconds, cpu, self._memory.nbytes, len(requests), largest_bytes, connections)

    def _remove(self, name: str) -> None:
        """Remove a checkpoint that this run has saved."""
        self._delete(meta.key for meta in self._store.list(f"{name}/"))
        self._scratch.keys.discard(f"{name}/{MARKER_KEY}")

    def _delete(self, keys: Iterable[str]) -> None:
        for _ in in_waves(self._store.delete, list(keys)):
            pass

    def _plain(self, action: Action, kept: str, usual: _Round) -> _Round:
        """Send as many plain requests at once as a save or load did, of the same size."""
        self._step(f"plain requests instead of a {action}")
        if action == "save":
            puts = plain.plan_puts(self._memory, usual.request_size_bytes)
            measured = self._timed(action, self._memory.nbytes, puts, usual.connections, plain.put)
            self._delete(one.key for one in puts)
            return measured
        objects = [
            meta
            for meta in self._store.list(f"{kept}/")
            if parse_data_key(meta.key.rpartition("/")[2]) is not None
        ]
        gets = plain.plan_gets(objects, self._memory, usual.request_size_bytes)
        return self._timed(action, self._memory.nbytes, gets, usual.connections, plain.get)

    def _timed(
        self,
        action: Action,
        size_bytes: int,
        requests: Sequence[plain.PlainRequest],
        connections: int,
        do: Callable[[ObjectStore, plain.PlainRequest], None],
    ) -> _Round:
        began_at, cpu = time.perf_counter(), time.process_time()
        plain.send_all(do, self._store, requests, connections, self._stop)
        seconds, cpu = time.perf_counter() - began_at, time.process_time() - cpu
        self._moved_bytes[action] += size_bytes
        largest_bytes = max(one.memory.nbytes for one in requests)
        connections = min(connections, len(requests))
        return _Round(seconds, cpu, size_bytes, len(requests), largest_bytes, connections)


def _described(settings: Settings) -> str:
    return f"with {settings_text(settings)}" if settings else "with the settings as they are"


def _throughput(rounds: Sequence[_Round]) -> Throughput:
    return Throughput(
        gib_per_second=Spread.of([one.gib_per_second for one in rounds]),
        cpu_seconds_per_gib=median(one.cpu_seconds / one.size_bytes * GIB for one in rounds),
        requests=median_low(one.requests for one in rounds),
        request_size_bytes=max(one.request_size_bytes for one in rounds),
        connections=median_low(one.connections for one in rounds),
    )


def _gain(compared: _Compared, tried: Mapping[str, float]) -> SettingsGain | None:
    if compared.settings is None:
        return None
    pairs = zip(compared.usual, compared.best, strict=True)
    gains = [usual.seconds / best.seconds for usual, best in pairs]
    # Of two equal settings, one is faster in each of three pairs of rounds in every eighth
    # measurement; the slowest of its rounds is faster than all of the other in every 20th.
    apart = max(one.seconds for one in compared.best) < min(one.seconds for one in compared.usual)
    return SettingsGain(
        settings=compared.settings,
        gain=median(gains),
        is_faster=len(gains) >= _ENOUGH_ROUNDS and median(gains) >= LEAST_GAIN and apart,
        best=_throughput(compared.best),
        tried=tried,
    )


def _doubts(what: str, compared: _Compared) -> Iterator[str]:
    """Say why not to trust the rounds."""
    rounds = compared.usual
    if len(rounds) < _ENOUGH_ROUNDS:
        yield (
            f"{what}: {counted(len(rounds), 'round')}, too few to compare settings; give it more"
            " time or a smaller size"
        )
    took = [one.seconds for one in rounds]
    gain = _gain(compared, {})
    differ = max(took) / min(took)
    if differ > max(_NOISY, 1.0 if gain is None else max(gain.gain, 1 / gain.gain)):
        yield (
            f"{what}: equal rounds differ by a factor of {differ:.1f}, more than other settings"
            " change; something else uses this machine, the network or the store"
        )


def _busy() -> Iterator[str]:
    """Say if other programs use the processors."""
    load_average = os.getloadavg()[0]
    if load_average > processors():
        yield (
            f"the machine was busy when this began: load {load_average:.1f} on"
            f" {counted(processors(), 'processor')}"
        )


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
