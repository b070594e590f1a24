"""The rank processes of the demo: start them, read their reports, kill them.

Ranks are forked from a server process that has imported torch once. The launching process itself
never imports torch and starts no threads. A rank ends with the launching process in every case.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from multiprocessing import connection as mp_connection
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any

from dcp_objstore.cli.demo.messages import Ended, Job, RankEvent
from dcp_objstore.errors import RetryableError

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerContext, SpawnContext

_WORKER_MODULE = "dcp_objstore.cli.demo.worker"
# Imported once, before ranks are forked. Otherwise every rank would import the last three at first
# use; optimizers need torch._dynamo. The only thread that these imports start belongs to NumPy's
# OpenBLAS, which handles forks.
_PRELOAD = [_WORKER_MODULE, "torch._dynamo", "dcp_objstore.write.async_save", "obstore.store"]
_LOG_TAIL_BYTES = 2000
# Apple's frameworks do not survive a fork after torch was imported.
_METHOD = "spawn" if sys.platform == "darwin" else "forkserver"


class SilenceError(RetryableError):
    """No rank reported anything in the allowed time."""


# The output of the fork server and its resource tracker, in a file without a name, which vanishes
# with this process.
_server_output: IO[bytes] | None = None


def warm_up() -> None:
    """Start the server process from which ranks are forked; it imports torch."""
    global _server_output  # noqa: PLW0603  there is one fork server in a process
    if _METHOD != "forkserver" or _server_output is not None:
        return
    from multiprocessing import forkserver

    _context()
    _server_output = tempfile.TemporaryFile()  # noqa: SIM115  lives as long as the server
    # The server inherits that Ctrl-C is ignored, because this process ends the others. It also
    # inherits where to print: if this process ended while the server imports torch, the server
    # would print errors on the user's terminal.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    ours = os.dup(2)
    try:
        os.dup2(_server_output.fileno(), 2)
        forkserver.ensure_running()
    finally:
        os.dup2(ours, 2)
        os.close(ours)
        signal.signal(signal.SIGINT, before)


def _context() -> ForkServerContext | SpawnContext:
    if _METHOD == "forkserver":
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOAD)
        return context
    return multiprocessing.get_context("spawn")


class Crew:
    """The processes of one phase, which all do the same job; a context manager that ends them.

    Args:
        job: the job of each process.
        ranks: number of ranks in one gloo group; 0 for one process without a process group.
    """

    def __init__(self, job: Job, ranks: int) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="dcp-objstore-demo-")
        self._processes: list[Any] = []
        self._pipes: dict[Connection, int] = {}
        try:
            for rank in range(max(ranks, 1)):
                self._start(job, rank, ranks)
        except BaseException:
            self.end()
            raise

    def _start(self, job: Job, rank: int, ranks: int) -> None:
        context = _context()
        ours, theirs = context.Pipe(duplex=False)
        log = Path(self._directory.name) / f"rank-{rank}.log"
        rendezvous = Path(self._directory.name) / "rendezvous"
        process = context.Process(
            target=_rank_main, args=(theirs, job, rank, ranks, str(rendezvous), str(log))
        )
        self._pipes[ours] = rank
        process.start()
        self._processes.append(process)
        theirs.close()

    def events(self, silence_seconds: float) -> Iterator[tuple[int, RankEvent]]:
        """Yield the reports of the ranks, as (rank, event), until all of them have ended.

        Raises:
            SilenceError: no report came for `silence_seconds`; the ranks go on.
        """
        while self._pipes:
            ready = mp_connection.wait(list(self._pipes), timeout=silence_seconds)
            if not ready:
                raise SilenceError(f"no rank has reported anything for {silence_seconds:g} s")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                yield self._receive(pipe)

    def _receive(self, pipe: Connection) -> tuple[int, RankEvent]:
        rank = self._pipes[pipe]
        try:
            return rank, pipe.recv()
        except (EOFError, ConnectionResetError):
            del self._pipes[pipe]
            pipe.close()
            process = self._processes[rank]
            process.join()
            return rank, Ended(exit_code=process.exitcode)

    def end_quietly(self, within_seconds: float) -> tuple[dict[int, list[RankEvent]], list[int]]:
        """Read reports until all ranks have ended, and kill those that have not ended in time.

        Returns:
            The reports of each rank, and the ranks that had to be killed.
        """
        deadline = time.monotonic() + within_seconds
        heard: dict[int, list[RankEvent]] = {}
        while self._pipes and (left := deadline - time.monotonic()) > 0:
            for pipe in mp_connection.wait(list(self._pipes), timeout=left):
                assert isinstance(pipe, Connection)
                rank, event = self._receive(pipe)
                heard.setdefault(rank, []).append(event)
        late = sorted(self._pipes.values())
        self.end()
        return heard, late

    def kill(self, rank: int) -> None:
        """Kill one rank by SIGKILL."""
        self._processes[rank].kill()

    def log_tail(self, rank: int) -> str:
        """Return the end of the rank's output, or of the fork server's if there is none."""
        log = Path(self._directory.name) / f"rank-{rank}.log"
        text = log.read_text(errors="replace") if log.exists() else ""
        if not text and _server_output is not None:
            _server_output.seek(0)
            text = _server_output.read().decode(errors="replace")
        return text[-_LOG_TAIL_BYTES:]

    def end(self) -> None:
        """Kill all processes that still run, wait for their end, and remove their logs."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._pipes.clear()
        self._directory.cleanup()

    def __enter__(self) -> Crew:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.end()


def _end_with_launcher() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    mp_connection.wait([parent.sentinel])
    os._exit(1)


def _rank_main(
    connection: Connection, job: Job, rank: int, ranks: int, rendezvous: str, log: str
) -> None:
    """Run a rank from start to end.

    It ends by `os._exit`, because a group with a dead rank cannot be closed.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(output, 1)
        os.dup2(output, 2)
    threading.Thread(target=_end_with_launcher, daemon=True).start()
    from dcp_objstore.cli.demo import worker

    done = worker.run(job, rank, ranks, rendezvous, connection.send)
    sys.stdout.flush()
    sys.stderr.flush()
    connection.close()
    os._exit(0 if done else 1)
