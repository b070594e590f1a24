"""Jobs that a test watches, pauses and kills while they run.

with Crew() as crew:
    job = crew.start(2, save_on_and_on, url)     # save_on_and_on(rank, world_size, url)
    job.wait_for("begun")                        # what a rank says with `say("begun", …)`
    job.kill(0)
    job.end()

`ranks` waits for a call to end, and its workers live on; here spare workers get warm (imports of
seconds) while others run, because most of them die. What a rank said before it died arrives.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support import ranks
from tests.support.ranks import Outcome

_connection: multiprocessing.connection.Connection | None = None


def say(*message: object) -> None:
    """On a rank of a job: tell the test. What was said has been said, whatever happens next."""
    assert _connection is not None
    _connection.send(("said", message))


@dataclass(frozen=True)
class Said:
    """What a rank said, and when it arrived here (`time.monotonic`)."""

    rank: int
    message: tuple[Any, ...]
    at: float


class _Worker:
    def __init__(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(ranks._PRELOAD)
        handle, name = tempfile.mkstemp(prefix="job-", suffix=".log")
        os.close(handle)
        self.log = Path(name)
        self.busy = False
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_main, args=(theirs, name), daemon=False)
        self.process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def end(self) -> None:
        self.busy = False
        self.connection.close()
        self.process.kill()
        self.process.join()
        self.log.unlink(missing_ok=True)

    def stacks(self) -> str:
        """What it has written, and where its threads are, if they are not stopped."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGUSR1)
        self.process.join(0.5)  # the handler writes at once; this only leaves it the time
        return self.log.read_text(errors="replace")


class Crew:
    """Warm workers; each has a rank from its first job on, for life.

    Args:
        spares: workers that get ready beside those that run.
    """

    def __init__(self, spares: int = 2) -> None:
        from torch.distributed import TCPStore

        self._spares = [_Worker() for _ in range(spares)]
        self._ranked: dict[int, _Worker] = {}
        self._runs = itertools.count()
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in [*self._spares, *self._ranked.values()]:
            worker.end()

    def start(
        self, world_size: int, fn: Callable[..., Any], *args: Any, timeout_seconds: float = 60
    ) -> Job:
        """Begin `fn(rank, world_size, *args)` on every rank, in a gloo group of their own."""
        for rank in range(world_size):
            worker = self._ranked.get(rank)
            if worker is not None and worker.busy:  # a test failed before the end of its job
                worker.end()
            if worker is None or not worker.process.is_alive():
                self._ranked[rank] = self._spares.pop(0) if self._spares else _Worker()
                self._spares.append(_Worker())
        workers = [self._ranked[rank] for rank in range(world_size)]
        call = pickle.dumps((fn, args))
        job = (next(self._runs), self._store.port, world_size, timeout_seconds, call)
        for rank, worker in enumerate(workers):
            worker.connection.send((rank, *job))
            worker.busy = True
        return Job(workers, timeout_seconds)


class Job:
    """A call on every rank, under way.

    Attributes:
        said: what the ranks have said so far, in the order of arrival.
    """

    def __init__(self, workers: list[_Worker], timeout_seconds: float) -> None:
        self.said: list[Said] = []
        self.pids = [worker.pid for worker in workers]
        self._workers = workers
        self._deadline = time.monotonic() + timeout_seconds
        self._outcomes: dict[int, Outcome] = {}

    def wait_for(self, first: str, count: int = 1) -> list[Said]:
        """Listen until ranks have said something that begins so, so many times."""
        while len(found := [one for one in self.said if one.message[0] == first]) < count:
            if not self._listen(self._deadline) or len(self._outcomes) == len(self._workers):
                raise AssertionError(f"not said: {first!r}; {self._failures()}")
        return found

    def listen_until(self, moment: float) -> None:
        """Listen until a moment (`time.monotonic`), or until all ranks have ended."""
        while len(self._outcomes) < len(self._workers) and self._listen(moment):
            pass

    def signal(self, number: signal.Signals, *only: int) -> None:
        """Send a signal to these ranks, or to all of them."""
        for rank in only or range(len(self._workers)):
            os.kill(self.pids[rank], number)

    def kill(self, *only: int) -> None:
        """SIGKILL these ranks, or all of them. At once, also from another thread."""
        self.signal(signal.SIGKILL, *only)

    def pause(self) -> None:
        """SIGSTOP all ranks, and wait until every thread of them has stopped."""
        self.signal(signal.SIGSTOP)
        for pid in self.pids:
            for task in Path(f"/proc/{pid}/task").iterdir():
                while _state(task) not in "TZX":
                    os.sched_yield()

    def resume(self) -> None:
        """SIGCONT all ranks."""
        self.signal(signal.SIGCONT)

    def end(self) -> list[Outcome]:
        """Listen until every rank has returned, raised or died; kill who is not done in time."""
        while len(self._outcomes) < len(self._workers):
            if not self._listen(self._deadline):
                for rank, worker in enumerate(self._workers):
                    if rank not in self._outcomes:
                        text = worker.stacks()
                        self._outcomes[rank] = Outcome(rank, text=text, timed_out=True)
                        worker.end()
        return [self._outcomes[rank] for rank in range(len(self._workers))]

    def _failures(self) -> str:
        return "; ".join(str(one) for one in self._outcomes.values() if one.failed) or "still going"

    def _listen(self, until: float) -> bool:
        """Take in what comes next; False if nothing came until then."""
        waiting = {
            worker.connection: rank
            for rank, worker in enumerate(self._workers)
            if rank not in self._outcomes
        }
        left = max(0.0, min(until, self._deadline) - time.monotonic())
        ready = multiprocessing.connection.wait(list(waiting), timeout=left)
        for connection in ready:
            self._receive(waiting[connection])  # type: ignore[index]
        return bool(ready)

    def _receive(self, rank: int) -> None:
        worker = self._workers[rank]
        try:
            kind, content = worker.connection.recv()
        except (EOFError, OSError):  # died, perhaps in the middle of a message
            worker.end()
            code = worker.process.exitcode or 0
            if code < 0:
                self._outcomes[rank] = Outcome(rank, exit_signal=signal.Signals(-code))
            else:
                error = ranks.UnpicklableError(f"the process exited with {code}")
                self._outcomes[rank] = Outcome(rank, error=error)
            return
        if kind == "said":
            self.said.append(Said(rank, content, time.monotonic()))
            return
        worker.busy = False
        ok, payload, text = content
        value = pickle.loads(payload)
        self._outcomes[rank] = (
            Outcome(rank, value=value) if ok else Outcome(rank, error=value, text=text)
        )


def _state(task: Path) -> str:
    """Of a thread, one letter (proc(5)); X when it has ended."""
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"


def _main(connection: multiprocessing.connection.Connection, log: str) -> None:
    global _connection
    threading.Thread(target=ranks._end_with_parent, daemon=True).start()
    output = Path(log).open("a", buffering=1)  # noqa: SIM115 - for the life of the process
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    faulthandler.register(signal.SIGUSR1, file=output, all_threads=True)
    import torch
    import torch.distributed.checkpoint

    import dcp_objstore as dos

    _ = dos.save, dos.async_save, dos.load, dos.open
    torch.set_num_threads(1)
    _connection = connection
    while True:
        try:
            job = connection.recv()
        except EOFError:
            os._exit(0)
        connection.send(("ended", ranks._call(*job)))
