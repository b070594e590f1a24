"""Start rank processes: the launcher of the tests and the benchmarks.

    with Ranks(preload=["torch"]) as ranks:
        job = ranks.start(4, train, url)    # train(rank, 4, url) in four processes, a gloo group
        for said in job.messages():         # what they tell by `say(…)`, as it arrives
            print(said.rank, said.message)
        outcomes = job.end()                # what each has returned or raised, or how it died

Processes are forked from a server that has imported torch once; the launching process itself does
not import torch. They end with the launching process, even if it is killed.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import gc
import itertools
import multiprocessing
import os
import pickle
import pkgutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import connection as mp_connection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerContext, SpawnContext

# Apple's frameworks do not survive a fork after torch was imported.
_METHOD = "spawn" if sys.platform == "darwin" else "forkserver"

# The output of the fork server and its resource tracker, in a file without a name, which vanishes
# with this process.
_server_output: IO[bytes] | None = None
# In a rank, the connection to which `say` sends. Threads of the rank may speak at the same time.
_launcher: Connection | None = None
_speaking = threading.Lock()
# In a rank, whether it takes no other call.
_retires = threading.Event()


def warm_up(preload: Sequence[str]) -> None:
    """Start the server from which ranks are forked, unless it runs.

    Args:
        preload: the modules that it imports; they must not start threads that a fork would lose.
    """
    global _server_output
    if _METHOD != "forkserver" or _server_output is not None:
        return
    from multiprocessing import forkserver

    multiprocessing.get_context("forkserver").set_forkserver_preload([*preload])
    _server_output = tempfile.TemporaryFile()  # noqa: SIM115  lives as long as the server
    # The server inherits where to print. If this process ended while the server imports torch, the
    # server would print errors on the user's terminal.
    sys.stderr.flush()
    before = os.dup(2)
    try:
        os.dup2(_server_output.fileno(), 2)
        forkserver.ensure_running()
    finally:
        os.dup2(before, 2)
        os.close(before)


def say(*message: object) -> None:
    """In a rank: tell the launching process. It hears this even if the rank dies right after."""
    assert _launcher is not None, "only a rank can say something"
    with _speaking:
        _launcher.send(("said", message))


def retire() -> None:
    """In a rank: let this process end after the call, because the call has changed it for good."""
    _retires.set()


@dataclass(frozen=True)
class Said:
    """What a rank said, and when it arrived (`time.monotonic`)."""

    rank: int
    message: tuple[Any, ...]
    at: float


@dataclass
class Outcome:
    """How one rank's call ended.

    Attributes:
        rank: number of the rank.
        value: the value that the call returned.
        error: the error that it raised, or None.
        text: the traceback of the error, or the output of a process that died or hung.
        exit_signal: the signal that ended the process, or None.
        timed_out: whether it had not finished in time and was killed for that.
    """

    rank: int
    value: Any = None
    error: BaseException | None = None
    text: str = ""
    exit_signal: signal.Signals | None = None
    timed_out: bool = False

    @property
    def failed(self) -> bool:
        """Whether the call did not return."""
        return self.error is not None or self.exit_signal is not None or self.timed_out

    @property
    def reason(self) -> str:
        """Why it failed, on one line."""
        if self.timed_out:
            return f"rank {self.rank} did not finish in time"
        if self.exit_signal is not None:
            return f"rank {self.rank} was ended by {self.exit_signal.name}"
        return f"rank {self.rank} raised {self.error!r}"

    def __str__(self) -> str:
        return f"{self.reason}\n{self.text}"


class RankEndedError(Exception):
    """The process of a rank ended by itself before its call returned."""


class UnpicklableError(Exception):
    """A rank raised or returned something that does not survive a pickle; this is its text."""


@dataclass(frozen=True)
class _Call:
    """What a worker is sent: a pickled function with arguments, and how its group meets.

    Attributes:
        meeting: a path, which no other job has: of the file in which the ranks meet or, with a
            `port`, the prefix of the job's keys in the TCPStore there. None: there is no group.
    """

    rank: int
    world_size: int
    meeting: str | None
    port: int | None
    group_timeout: datetime.timedelta
    reuse: bool
    pickled: bytes


class _RankWorker:
    def __init__(self, log: Path) -> None:
        self.log = log
        self.idle = True
        context: ForkServerContext | SpawnContext = multiprocessing.get_context(_METHOD)  # type: ignore[assignment]
        self.connection, theirs = context.Pipe()
        # Not a daemon, because a rank may have children (DCP's async_save in process mode).
        self.process = context.Process(target=_worker_main, args=(theirs, str(log)), daemon=False)
        self.process.start()
        theirs.close()

    @property
    def output(self) -> str:
        """What it has printed; if that is nothing, what the fork server has."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        if not text and _server_output is not None:
            _server_output.seek(0)
            text = _server_output.read().decode(errors="replace")
        return text

    def end(self) -> None:
        self.idle = False
        self.connection.close()
        self.process.kill()
        self.process.join()


class Ranks:
    """Processes that run calls as ranks; a context manager that ends them.

    A process whose call has returned takes the next one. It keeps its rank for life, because
    DTensor caches what it computed for that rank. A process that died is replaced.

    Args:
        preload: modules for `warm_up`.
        reuse: whether a process takes another call after one that raised, too. Default: it ends, as
            in a real job, and the other ranks see that its connections close.
        store_port: port of a `TCPStore` on this machine through which the ranks meet, as those of
            torchrun do. Default: they meet in a file, so that this process needs no torch.
    """

    def __init__(
        self, *, preload: Sequence[str] = (), reuse: bool = False, store_port: int | None = None
    ) -> None:
        warm_up(preload)
        self._reuse = reuse
        self._store_port = store_port
        self._directory = tempfile.TemporaryDirectory(prefix="dcp-objstore-ranks-")
        self._workers: dict[int, _RankWorker] = {}
        self._numbers = itertools.count()

    def start(
        self,
        world_size: int,
        function: Callable[..., Any] | str,
        *args: Any,
        timeout_seconds: float = 150.0,
        group_timeout_seconds: float | None = None,
        grouped: bool = True,
    ) -> Job:
        """Begin `function(rank, world_size, *args)` in every rank.

        Args:
            world_size: number of ranks.
            function: a function at the top level of a module, so that pickle finds it; or its name
                as `module:function`, so that this process need not import the module.
            args: must pickle.
            timeout_seconds: how long the whole job may take.
            group_timeout_seconds: time-out of the process group. Default: `timeout_seconds`.
            grouped: whether the ranks form a gloo group.
        """
        pickled = pickle.dumps((function, args))
        number = next(self._numbers)
        meeting = f"{self._directory.name}/meeting-{number}" if grouped else None
        limit = datetime.timedelta(seconds=group_timeout_seconds or timeout_seconds)
        workers = [self._ready_worker(rank, number) for rank in range(world_size)]
        for rank, worker in enumerate(workers):
            worker.idle = False
            worker.log.write_text("")
            worker.connection.send(
                _Call(
                    rank=rank,
                    world_size=world_size,
                    meeting=meeting,
                    port=self._store_port,
                    group_timeout=limit,
                    reuse=self._reuse,
                    pickled=pickled,
                )
            )
        return Job(workers, time.monotonic() + timeout_seconds)

    def _ready_worker(self, rank: int, number: int) -> _RankWorker:
        worker = self._workers.get(rank)
        if worker is not None and not (worker.idle and worker.process.is_alive()):
            worker.end()
            worker = None
        if worker is None:
            log = Path(self._directory.name, f"rank-{rank}-from-job-{number}.log")
            worker = self._workers[rank] = _RankWorker(log)
        return worker

    def end(self) -> None:
        """Kill all processes, wait for their end, and remove their logs."""
        for worker in self._workers.values():
            worker.process.kill()  # all at once, before any is waited for
        while self._workers:
            _, worker = self._workers.popitem()
            worker.end()
        self._directory.cleanup()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


class Job:
    """A call in every rank, under way.

    Attributes:
        said: what the ranks have said so far, in the order of arrival.
        outcomes: how the calls ended that have ended so far, by rank.
        pids: the process ids, by rank.
    """

    def __init__(self, workers: list[_RankWorker], deadline: float) -> None:
        self.said: list[Said] = []
        self.outcomes: dict[int, Outcome] = {}
        self.pids = [worker.process.pid or 0 for worker in workers]
        self._workers = workers
        self._deadline = deadline

    @property
    def under_way(self) -> bool:
        """Whether the call of a rank has not ended."""
        return len(self.outcomes) < len(self._workers)

    def messages(self) -> Iterator[Said]:
        """Yield what ranks say, until all calls have ended, one has failed, or time is up."""
        heard = 0
        while True:
            yield from self.said[heard:]
            heard = len(self.said)
            failed = any(outcome.failed for outcome in self.outcomes.values())
            if failed or not self.under_way or not self.listen():
                return

    def listen(self, until: float | None = None) -> bool:
        """Take in what comes next; return False if nothing comes until then or the time is up.

        Args:
            until: a moment (`time.monotonic`). Default: the deadline of the job.
        """
        waiting = {
            worker.connection: rank
            for rank, worker in enumerate(self._workers)
            if rank not in self.outcomes
        }
        moment = self._deadline if until is None else min(until, self._deadline)
        seconds = max(0.0, moment - time.monotonic())
        ready = mp_connection.wait(list(waiting), timeout=seconds)
        for connection in ready:
            assert isinstance(connection, Connection)
            self._receive(waiting[connection])
        return bool(ready)

    def signal(self, number: signal.Signals, *only: int) -> None:
        """Send a signal to these ranks, or to all of them."""
        for rank in only or range(len(self.pids)):
            os.kill(self.pids[rank], number)

    def kill(self, *only: int) -> None:
        """Kill these ranks, or all of them, by SIGKILL."""
        self.signal(signal.SIGKILL, *only)

    def end(self, within_seconds: float | None = None) -> list[Outcome]:
        """Wait until all calls have ended; note the stacks of ranks that are late, and kill them.

        Args:
            within_seconds: shortens the time that the job has left.
        """
        if within_seconds is not None:
            self._deadline = min(self._deadline, time.monotonic() + within_seconds)
        while self.under_way:
            if not self.listen():
                for rank in range(len(self._workers)):
                    if rank not in self.outcomes:
                        self._give_up(rank)
        return [self.outcomes[rank] for rank in range(len(self._workers))]

    def _give_up(self, rank: int) -> None:
        worker = self._workers[rank]
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pids[rank], signal.SIGUSR1)
        worker.process.join(0.5)  # the handler writes at once; this only leaves it the time
        self.outcomes[rank] = Outcome(rank, text=worker.output, timed_out=True)
        worker.end()

    def _receive(self, rank: int) -> None:
        worker = self._workers[rank]
        try:
            kind, content = worker.connection.recv()
        except (EOFError, OSError):  # it died, perhaps while it was sending
            worker.process.join()
            code = worker.process.exitcode or 0
            outcome = Outcome(rank, text=worker.output)
            if code < 0:
                outcome.exit_signal = signal.Signals(-code)
            else:
                outcome.error = RankEndedError(f"the process ended with status {code}")
            worker.end()
        else:
            if kind == "said":
                self.said.append(Said(rank, content, time.monotonic()))
                return
            worker.idle, returned, payload, text = content
            value = pickle.loads(payload)
            outcome = Outcome(rank, value) if returned else Outcome(rank, error=value, text=text)
        self.outcomes[rank] = outcome


def _end_with_launcher() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    mp_connection.wait([parent.sentinel])
    os._exit(1)


def _worker_main(connection: Connection, log: str) -> None:
    global _launcher
    # Ctrl-C in a terminal goes to a process group; the launching process ends its ranks itself.
    os.setpgid(0, 0)
    threading.Thread(target=_end_with_launcher, daemon=True).start()
    output = Path(log).open("a", buffering=1)  # noqa: SIM115  lives as long as the process
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    faulthandler.register(signal.SIGUSR1, file=output, all_threads=True)
    import torch

    torch.set_num_threads(1)
    # What the server has imported: each look at it for garbage would copy its pages into the rank.
    gc.freeze()
    _launcher = connection
    while True:
        try:
            call: _Call = connection.recv()
        except EOFError:
            os._exit(0)
        ended = _run(call)
        with _speaking:
            connection.send(("ended", ended))
        can_go_on, *_ = ended
        if not can_go_on:
            os._exit(1)


def _run(call: _Call) -> tuple[bool, bool, bytes, str]:
    """Run one call: (can take another, returned, pickled value or error, traceback)."""
    import torch.distributed as dist

    # A rank that did not meet the others has counted fewer groups than they have.
    reuse = False
    try:
        function, args = pickle.loads(call.pickled)
        if isinstance(function, str):
            function = pkgutil.resolve_name(function)
        if call.meeting is not None:
            _meet(call, call.meeting)
        reuse = call.reuse
        value = pickle.dumps(function(call.rank, call.world_size, *args))
        if dist.is_initialized():
            dist.destroy_process_group()
    except BaseException as error:  # noqa: BLE001  everything is reported; CheckpointException is one
        text = traceback.format_exc()
        print(text, file=sys.stderr)
        # A process that ends leaves its group open, because closing can wait for a dead rank.
        if reuse and dist.is_initialized():
            dist.destroy_process_group()
        return reuse and not _retires.is_set(), False, _pickled(error), text
    return not _retires.is_set(), True, value, ""


def _meet(call: _Call, meeting: str) -> None:
    import torch.distributed as dist

    limit = call.group_timeout
    store: Any
    if call.port is None:
        store = dist.FileStore(meeting, call.world_size)  # type: ignore[attr-defined]
    else:
        store = dist.TCPStore("127.0.0.1", call.port, timeout=limit)  # type: ignore[attr-defined]
        store = dist.PrefixStore(meeting, store)  # type: ignore[attr-defined]
    dist.init_process_group(
        "gloo", store=store, rank=call.rank, world_size=call.world_size, timeout=limit
    )
    # A rank that has nothing to do with the others could leave while they still connect to it.
    if store.add("joined", 1) == call.world_size:
        store.set("all joined", "")
    store.wait(["all joined"], limit)


def _pickled(error: BaseException) -> bytes:
    try:
        pickled = pickle.dumps(error)
        pickle.loads(pickled)
    except Exception as why:  # noqa: BLE001  a class can raise anything here
        return pickle.dumps(UnpicklableError(f"{error!r} does not pickle: {why!r}"))
    return pickled
