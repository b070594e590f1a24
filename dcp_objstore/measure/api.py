"""`bench`: measure saves and loads, and what limits them.

It measures everything in turns, round by round, because the speed of a network or of a shared
machine changes from one second to the next.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import dataclass, replace
from statistics import median, median_low
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from dcp_objstore.checkpoint.names import MARKER_KEY, data_key, new_nonce, parse_data_key
from dcp_objstore.config import MIB, TransferConfig, processors
from dcp_objstore.doctor.scratch import Scratch, Stop, StoppedError
from dcp_objstore.errors import ConfigError, printable
from dcp_objstore.observe.bar import StatusLine
from dcp_objstore.observe.events import AnyEvent, PartUploaded, RangeRead
from dcp_objstore.observe.report import GIB, counted, logger, size_text
from dcp_objstore.read.api import load
from dcp_objstore.stores.protocol import ObjectMeta, ObjectStore
from dcp_objstore.stores.spec import StoreSpec
from dcp_objstore.threads import result_of, run_in_thread
from dcp_objstore.transfer.memory import ByteArray
from dcp_objstore.transfer.workers import DaemonPool, in_waves
from dcp_objstore.write.api import save

# A store that does not answer ends the measurement soon. None of this changes the speed.
CONFIG = TransferConfig(max_retries=3, retry_timeout_seconds=10, stall_timeout_seconds=60)
SECONDS = 45.0
_LEAST_SECONDS = 0.1
_LEAST_SIZE_BYTES = MIB
_LEAST_AUTO_BYTES, _MOST_AUTO_BYTES = 16 * MIB, 1024 * MIB
_TENSOR_BYTES = 32 * MIB
# One save or load takes at most this share of the time, unless the smallest takes longer.
_SHARE = 1 / 25
# If the processors are busy for more than this share of the time, they limit the transfer.
_NEARLY_BUSY = 0.8
_MOST_ROUNDS = 5
_ENOUGH_ROUNDS = 3
_SMALL_REQUESTS = 9
_NOISY = 1.25  # rounds that differ by this factor are worth a warning


@dataclass(frozen=True, kw_only=True)
class Spread:
    """The figures of some rounds.

    Attributes:
        lowest, median, highest: the lowest, median and highest figure of the rounds.
        rounds: the number of them.
    """

    lowest: float
    median: float
    highest: float
    rounds: int

    @classmethod
    def of(cls, figures: Sequence[float]) -> Spread:
        """Return the spread of figures, of which there is at least one."""
        return cls(
            lowest=min(figures),
            median=median(figures),
            highest=max(figures),
            rounds=len(figures),
        )


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """The figures of one way of moving the bytes.

    Attributes:
        gib_per_second: the speed, counting the bytes of the tensors.
        cpu_seconds_per_gib: user and system time of this process; the median of the rounds.
        requests: the number of requests that carried these bytes in one round, the median.
        request_size_bytes: size of the largest of them.
        connections: the largest number of them in flight together, the median.
    """

    gib_per_second: Spread
    cpu_seconds_per_gib: float
    requests: int
    request_size_bytes: int
    connections: int


@dataclass(frozen=True, kw_only=True)
class BenchReport:
    """The figures of `dcp_objstore.measure.bench`, of one process.

    Attributes:
        url: URL below which it wrote.
        size_bytes: size of the tensors of one save or load.
        seconds: time that all of it took.
        processors: number of processors that this process may use.
        get_ms: milliseconds until the first byte of a GET comes, on a connection that is open.
        put_ms: milliseconds of the PUT of an object of one byte.
        save, load: `dcp_objstore.save` and `load`, with the settings as they are.
        plain_puts, plain_gets: plain requests, as many at a time as the saves and loads had, of the
            same size, without digests.
        sent_bytes, received_bytes: all that was moved.
        warnings: reasons to doubt the figures, and what could not be removed.
    """

    url: str
    size_bytes: int
    seconds: float
    processors: int
    get_ms: Spread
    put_ms: Spread
    save: Throughput
    load: Throughput
    plain_puts: Throughput
    plain_gets: Throughput
    sent_bytes: int
    received_bytes: int
    warnings: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return how fast saves and loads are, what limits them, and what to doubt, in lines."""
        size = f"{size_text(self.size_bytes)} of tensors, one process, {self.seconds:.0f} s in all"
        lines = [
            self.url,
            size,
            self._in_words("save", self.save, self.plain_puts),
            self._in_words("load", self.load, self.plain_gets),
            *(f"warning: {warning}" for warning in self.warnings),
        ]
        return "\n".join(map(printable, lines))

    def _in_words(self, name: str, transfer: Throughput, plain: Throughput) -> str:
        """Say how fast a save or load is, and what limits it, if the figures are good enough."""
        speed, plain_speed = transfer.gib_per_second.median, plain.gib_per_second.median
        seconds = 100 / speed  # for 100 GiB
        duration = f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
        if self.warnings:
            limit = "What limits it is not clear: see the warnings."
        # CPU-seconds for each second of the transfer, against the number of processors.
        elif transfer.cpu_seconds_per_gib * speed > _NEARLY_BUSY * self.processors:
            limit = "The processors are busy all the time: they limit it."
        else:
            limit = "The store, or the way to it, gives no more to one process."
        requests = f"{counted(plain.connections, 'plain request')} at a time"
        return (
            f"{name}  {size_text(speed * GIB)}/s: 100 GiB in {duration}. {requests} reached"
            f" {size_text(plain_speed * GIB)}/s; this {name} reached {speed / plain_speed:.0%} of"
            f" that. {limit}"
        )


def bench(
    url: str,
    *,
    size_bytes: int | None = None,
    seconds: float = SECONDS,
    storage_options: Mapping[str, object] | None = None,
    config: TransferConfig | None = None,
    progress: bool = True,
) -> BenchReport:
    """Measure saves and loads on a store, from this machine, and what limits them.

        report = dos.measure.bench("s3://bucket/bench", size_bytes=1 << 20, seconds=1)
        report.save.gib_per_second.median

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
        config: the settings that you use. Default `TransferConfig()`, but with fewer retries.
        progress: show what is being measured if standard error is a terminal. Default True.

    Returns:
        The figures. `warnings` says why to doubt them, and what could not be removed.

    Raises:
        ConfigError: `size_bytes` or `seconds` is out of its bounds, or this is a rank of a job.
        PermissionDeniedError: these credentials may not write, list, read and delete here. This is
            found out with small objects first.
        DcpObjstoreError: the store refused or failed. Objects that could not be removed are logged.
    """
    _check(size_bytes, seconds)
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise ConfigError("bench measures one process: call it outside of a job of several ranks")
    spec = StoreSpec(url, storage_options, config or CONFIG)
    stop, line = Stop(), StatusLine(shown=progress)
    done = run_in_thread(lambda: _measure(spec, size_bytes, seconds, stop=stop, line=line), "bench")
    try:
        return result_of(done)
    except BaseException:
        # After an error of the measurement, its thread has ended already. After Ctrl-C, the thread
        # is waited for: no request is cut off, so none takes effect after the removal.
        stop.set()
        line.show("ending this step, then removing what was written (Ctrl-C again: leave it)")
        try:
            with suppress(StoppedError, Exception):  # a StoppedError is no Exception
                result_of(done)
        except BaseException:  # noqa: BLE001 - Ctrl-C again; the first error is raised
            logger.warning("objects .bench-* may remain below %s", spec.url)
        raise
    finally:
        line.clear()


def _check(size_bytes: int | None, seconds: float) -> None:
    """Raise ConfigError unless the size and the duration are in their bounds."""
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


def _measure(
    spec: StoreSpec, size_bytes: int | None, seconds: float, *, stop: Stop, line: StatusLine
) -> BenchReport:
    """Measure, and remove what was written. A failure to remove it is no error, but a warning."""
    scratch = Scratch(spec, ".bench")
    try:
        report = _Bench(scratch, seconds, stop, line).run(spec.url, size_bytes)
    except BaseException:
        if warning := _remove_all(scratch):
            logger.warning(warning)
        raise
    warning = _remove_all(scratch)
    return replace(report, warnings=(*report.warnings, warning)) if warning else report


def _remove_all(scratch: Scratch) -> str:
    """Remove everything; return a warning if that is not certain, or ""."""
    unremoved = scratch.remove()
    # Only if a listing shows nothing is it certain that nothing is left.
    if unremoved.listed and not unremoved.keys:
        return ""
    return (
        f"what was written could not be removed ({unremoved.why or 'no reason was given'}):"
        f" remove everything below {scratch.spec.url}"
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
        self._sent_bytes = self._received_bytes = 0

    def run(self, url: str, size_bytes: int | None) -> BenchReport:
        """Measure everything. The caller removes what is left."""
        put_ms, get_ms = self._small_requests()
        self._fill(min(size_bytes or _LEAST_AUTO_BYTES, _LEAST_AUTO_BYTES))
        checkpoint, *_ = self._save_and_load()  # not measured: it imports, connects and so on
        self._remove(checkpoint)
        # Begin small and look for the size to measure. The last checkpoint is the one to load.
        checkpoint, saved, loaded = self._save_and_load()
        while next_bytes := self._next_size_bytes(size_bytes, saved, loaded):
            self._remove(checkpoint)
            self._fill(next_bytes)
            checkpoint, saved, loaded = self._save_and_load()
        saves, plain_puts, loads, plain_gets = self._take_turns(
            lambda: self._save()[1],
            lambda: self._plain_puts(saved),
            lambda: self._load(checkpoint),
            lambda: self._plain_gets(checkpoint, loaded),
        )
        return BenchReport(
            url=url,
            size_bytes=len(self._memory),
            seconds=self._elapsed_seconds,
            processors=processors(),
            put_ms=put_ms,
            get_ms=get_ms,
            save=_throughput(saves),
            load=_throughput(loads),
            plain_puts=_throughput(plain_puts),
            plain_gets=_throughput(plain_gets),
            sent_bytes=self._sent_bytes,
            received_bytes=self._received_bytes,
            warnings=tuple(_doubts(saves=saves, loads=loads)),
        )

    @property
    def _elapsed_seconds(self) -> float:
        return time.monotonic() - self._began_at

    def _step(self, text: str) -> None:
        """Begin a step: say which, unless Ctrl-C has come in the meantime."""
        self._stop.check()
        self._line.show(f"{self._elapsed_seconds:3.0f} of about {self._seconds:.0f} s: {text}")

    def _small_requests(self) -> tuple[Spread, Spread]:
        """Measure PUTs and GETs of one byte.

        First one object is written, read, listed and deleted: credentials that may do so may do all
        that follows. Only then are several objects written.
        """
        self._step("small requests")
        requests = _plan_puts(np.zeros(_SMALL_REQUESTS, dtype=np.uint8), 1)
        first = requests[0]
        with self._scratch.writing(first.key):
            _put(self._store, first)
        _get(self._store, first)
        next(iter(self._store.list()), None)
        self._store.delete(first.key)
        self._scratch.keys.clear()  # the object is gone, so `remove` need not delete it

        def spread_ms(do: Callable[[ObjectStore, _PlainRequest], None]) -> Spread:
            rounds = [self._timed(do, [request], 1) for request in requests]
            return Spread.of([1000 * measured.seconds for measured in rounds])

        put_ms, get_ms = spread_ms(_put), spread_ms(_get)
        self._delete(request.key for request in requests)
        return put_ms, get_ms

    def _fill(self, size_bytes: int) -> None:
        """Make tensors of random bytes: no store can compress them, or has them already."""
        self._step("making tensors")
        words = np.random.default_rng().integers(0, 2**64, -(-size_bytes // 8), dtype=np.uint64)
        self._memory: ByteArray = words.view(np.uint8)[:size_bytes]
        pieces = np.array_split(self._memory, max(1, size_bytes // _TENSOR_BYTES))
        self._state: dict[str, Any] = {
            f"tensor-{number}": torch.from_numpy(piece) for number, piece in enumerate(pieces)
        }

    def _save_and_load(self) -> tuple[str, _Round, _Round]:
        """Save and load once; return the checkpoint's name, and how the save and load went."""
        name, saved = self._save(keep=True)
        return name, saved, self._load(name)

    def _next_size_bytes(self, wanted_bytes: int | None, saved: _Round, loaded: _Round) -> int:
        """Return the next size to try, which is larger, or 0 if the present one is right.

        With little to move, most of the time would be the wait for the store's first answers.
        """
        now_bytes = len(self._memory)
        if wanted_bytes is not None:
            return wanted_bytes if now_bytes < wanted_bytes else 0
        most_bytes = min(_MOST_AUTO_BYTES, _memory_bytes() // 8)
        # Twice the size may take twice as long.
        takes_long = 2 * max(saved.seconds, loaded.seconds) > _SHARE * self._seconds
        return 0 if takes_long or 2 * now_bytes > most_bytes else 2 * now_bytes

    def _take_turns(self, *measures: Callable[[], _Round]) -> Sequence[list[_Round]]:
        """Call each function once a round until the time is up; return the results of each."""
        turns = [(measure, list[_Round]()) for measure in measures]
        measured = [rounds for _, rounds in turns]  # the same lists, in the order of `measures`
        for _ in range(_MOST_ROUNDS):
            began_seconds = self._elapsed_seconds
            for measure, rounds in turns:
                rounds.append(measure())
            # Begin each round with another function, because a measurement may profit from the one
            # that comes before it.
            turns = turns[1:] + turns[:1]
            next_round_seconds = self._elapsed_seconds - began_seconds
            if self._elapsed_seconds + next_round_seconds > self._seconds:
                break
        return measured

    def _save(self, *, keep: bool = False) -> tuple[str, _Round]:
        """Save once; return the checkpoint's name, and how it went."""
        self._step("saving")
        self._saves += 1
        name = f"save-{self._saves}"
        # If the store cannot be listed later, the marker at least is removed. Objects without a
        # marker are no checkpoint.
        with self._scratch.writing(f"{name}/{MARKER_KEY}"):
            measured = self._call(save, name)
        self._sent_bytes += measured.size_bytes
        if not keep:
            self._remove(name)
        return name, measured

    def _load(self, name: str) -> _Round:
        """Load once. The tensors have the same bytes before and after."""
        self._step("loading")
        measured = self._call(load, name)
        self._received_bytes += measured.size_bytes
        return measured

    def _call(self, do: Callable[..., object], name: str) -> _Round:
        """Measure one save or load of a checkpoint; `do` is `save` or `load`."""
        spec = self._scratch.spec
        events: list[AnyEvent] = []
        began_at, cpu_began_at = time.perf_counter(), time.process_time()
        do(
            self._state,
            f"{spec.url}/{name}",
            storage_options=spec.storage_options,
            config=self._config,
            progress=False,
            on_event=events.append,
        )
        seconds = time.perf_counter() - began_at
        cpu_seconds = time.process_time() - cpu_began_at
        requests = [event for event in events if isinstance(event, PartUploaded | RangeRead)]
        return _Round(
            seconds=seconds,
            cpu_seconds=cpu_seconds,
            size_bytes=self._memory.nbytes,
            requests=len(requests),
            request_size_bytes=max(event.size_bytes for event in requests),
            connections=len({event.worker for event in requests}),
        )

    def _remove(self, name: str) -> None:
        """Remove a checkpoint that this run has saved."""
        self._delete(meta.key for meta in self._store.list(f"{name}/"))
        self._scratch.keys.discard(f"{name}/{MARKER_KEY}")

    def _delete(self, keys: Iterable[str]) -> None:
        for _ in in_waves(self._store.delete, list(keys)):
            pass

    def _plain_puts(self, saved: _Round) -> _Round:
        """Send plain requests of the size of a save's requests, and as many at a time."""
        self._step("plain requests instead of a save")
        requests = _plan_puts(self._memory, saved.request_size_bytes)
        measured = self._timed(_put, requests, saved.connections)
        self._delete(request.key for request in requests)
        return measured

    def _plain_gets(self, checkpoint: str, loaded: _Round) -> _Round:
        """Send plain requests of the size of a load's requests, and as many at a time."""
        self._step("plain requests instead of a load")
        objects = [  # the data objects
            meta
            for meta in self._store.list(f"{checkpoint}/")
            if parse_data_key(meta.key.rpartition("/")[2]) is not None
        ]
        requests = _plan_gets(objects, self._memory, loaded.request_size_bytes)
        return self._timed(_get, requests, loaded.connections)

    def _timed(
        self,
        do: Callable[[ObjectStore, _PlainRequest], None],
        requests: Sequence[_PlainRequest],
        connections: int,
    ) -> _Round:
        """Measure plain requests, several at a time; `do` is `_put` or `_get`."""
        began_at, cpu_began_at = time.perf_counter(), time.process_time()
        _send_all(do, self._store, requests, connections=connections, stop=self._stop)
        seconds = time.perf_counter() - began_at
        cpu_seconds = time.process_time() - cpu_began_at
        sizes_bytes = [request.memory.nbytes for request in requests]
        if do is _put:
            self._sent_bytes += sum(sizes_bytes)
        else:
            self._received_bytes += sum(sizes_bytes)
        return _Round(
            seconds=seconds,
            cpu_seconds=cpu_seconds,
            size_bytes=sum(sizes_bytes),
            requests=len(requests),
            request_size_bytes=max(sizes_bytes),
            connections=min(connections, len(requests)),
        )


def _throughput(rounds: Sequence[_Round]) -> Throughput:
    """Return the medians and extremes of several rounds."""
    return Throughput(
        gib_per_second=Spread.of([measured.gib_per_second for measured in rounds]),
        cpu_seconds_per_gib=median(
            measured.cpu_seconds / measured.size_bytes * GIB for measured in rounds
        ),
        requests=median_low(measured.requests for measured in rounds),
        request_size_bytes=max(measured.request_size_bytes for measured in rounds),
        connections=median_low(measured.connections for measured in rounds),
    )


def _doubts(**rounds: Sequence[_Round]) -> Iterator[str]:
    """Yield reasons not to trust the figures.

    Args:
        rounds: the rounds of each kind, by the name of the kind: `saves` and `loads`.
    """
    few = [name for name, measured in rounds.items() if len(measured) < _ENOUGH_ROUNDS]
    if few:
        yield (
            f"too few rounds of {' and '.join(few)} to show how much they differ; give them more"
            " time or a smaller size"
        )
    seconds = [[one.seconds for one in measured] for measured in rounds.values()]
    factor = max(max(of_kind) / min(of_kind) for of_kind in seconds)
    if factor > _NOISY:
        yield (
            f"equal rounds differ by a factor of {factor:.1f}; something else uses this machine,"
            " the network or the store"
        )


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


# Plain requests: what the network and the store give to a loop without format or digests.


@dataclass(frozen=True)
class _PlainRequest:
    """The PUT of an object, or the GET of a range of one.

    Attributes:
        key: key of the object.
        start: the byte at which the range begins.
        memory: the bytes to put, or the memory to read the range into.
    """

    key: str
    start: int
    memory: ByteArray


def _plan_puts(memory: ByteArray, size_bytes: int) -> Sequence[_PlainRequest]:
    """Cut memory into objects.

    They are named as data objects are, so that a sweep takes what a crash leaves for garbage.
    """
    nonce = new_nonce()
    return [
        _PlainRequest(data_key(0, number, nonce), 0, memory[start : start + size_bytes])
        for number, start in enumerate(range(0, len(memory), size_bytes))
    ]


def _plan_gets(
    objects: Iterable[ObjectMeta], memory: ByteArray, size_bytes: int
) -> Sequence[_PlainRequest]:
    """Cut objects into ranges, which are read into memory one behind the other.

    The memory has room for the tensors, and the objects have framing as well. The ranges for which
    there is no room are read to the end of the memory, over the bytes of others.

    Args:
        objects: the objects to read.
        memory: the memory of the tensors.
        size_bytes: the size of one request.
    """
    requests: list[_PlainRequest] = []
    position = 0  # in memory
    for meta in objects:
        for start in range(0, meta.size_bytes, size_bytes):
            length = min(size_bytes, meta.size_bytes - start, len(memory))
            position = min(position, len(memory) - length)
            requests.append(_PlainRequest(meta.key, start, memory[position : position + length]))
            position += length
    return requests


def _put(store: ObjectStore, request: _PlainRequest) -> None:
    """Put an object."""
    store.put(request.key, request.memory)


def _get(store: ObjectStore, request: _PlainRequest) -> None:
    """Read a range."""
    start, end = request.start, request.start + len(request.memory)
    with store.open_range(request.key, start, end) as body:
        body.readinto(memoryview(request.memory))


def _send_all(
    do: Callable[[ObjectStore, _PlainRequest], None],
    store: ObjectStore,
    requests: Sequence[_PlainRequest],
    *,
    connections: int,
    stop: Stop,
) -> None:
    """Send requests, several at a time. When this returns or raises, none of them is under way.

    Args:
        do: `_put` or `_get`.
        store: the store to send them to.
        requests: the requests.
        connections: the largest number in flight.
        stop: a flag; once it is set, no further request is sent.

    Raises:
        StoppedError: `stop` was set.
        Also what a request raised; no further one is sent after a failure.
    """
    failed = threading.Event()

    def send(request: _PlainRequest) -> None:
        stop.check()
        if failed.is_set():
            return
        try:
            do(store, request)
        except BaseException:
            failed.set()
            raise

    with DaemonPool(min(connections, len(requests)), "plain") as pool:
        sent = [pool.submit(send, request) for request in requests]
    wait(sent)
    for future in sent:
        future.result()
