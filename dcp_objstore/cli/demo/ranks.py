"""The processes of the demo: forked from one that has imported torch, heard over pipes."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection as mp_connection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerContext, SpawnContext

# The module with what ranks do. This process only names its functions, because it does not import
# torch.
_TRAINING = "dcp_objstore.cli.demo.training"
# Modules that are imported once, before ranks are forked. Otherwise every rank would import the
# last three at first use; optimizers need torch._dynamo. The only thread that these imports start
# belongs to NumPy's OpenBLAS, which handles forks.
_PRELOAD = [_TRAINING, "torch._dynamo", "dcp_objstore.write.async_save", "obstore.store"]
# Apple's frameworks do not survive a fork after torch was imported.
_METHOD = "spawn" if sys.platform == "darwin" else "forkserver"
# A limit for slow machines: no job takes more than half a minute on two cores.
_JOB_SECONDS = 300.0
# Collectives of a group with a dead rank end after this, if its closed connections do not end them.
GROUP_SECONDS = 60.0


@dataclass(frozen=True)
class State:
    """The content of a state when it was saved, or after it was loaded.

    Attributes:
        step: number of training steps done.
        recorded_loss: loss on the fixed batch, as recorded in the state.
        fixed_loss: the same loss, computed now from the weights; None if there is no model.
        digests: SHA-256 of every whole tensor and value, by key.
    """

    step: int
    recorded_loss: float
    fixed_loss: float | None
    digests: Mapping[str, str]


@dataclass(frozen=True)
class FinishedLoad:
    """A finished load; bytes and seconds are those of one rank.

    Attributes:
        state: what was loaded.
        seconds: how long it took.
        total_bytes: bytes that were read of data objects.
        local_bytes: how many of the bytes came from copies on this node.
    """

    state: State
    seconds: float
    total_bytes: int = 0
    local_bytes: int = 0


@dataclass(frozen=True)
class Outcome:
    """How one rank's call ended.

    Attributes:
        rank: number of the rank.
        value: what the call returned.
        error: what it raised, or None.
        status: the exit status of the process, if it ended by itself or was killed (-9).
        log: the end of what it printed.
    """

    rank: int
    value: Any = None
    error: BaseException | None = None
    status: int | None = None
    log: str = ""

    @property
    def failure(self) -> str | None:
        """Why the call did not return, on one line; None if it did."""
        if self.error is not None:
            return f"rank {self.rank} raised {self.error!r}"
        return None if self.status is None else f"rank {self.rank} ended with status {self.status}"


def warm_up() -> None:
    """Start the server from which ranks are forked.

    It prints nothing: if this process ended while the server imports torch, the server would print
    errors on the user's terminal. What cannot be imported, a rank reports.
    """
    if _METHOD != "forkserver":
        return
    from multiprocessing import forkserver

    multiprocessing.get_context("forkserver").set_forkserver_preload(_PRELOAD)
    sys.stderr.flush()
    before = os.dup(2)
    with Path(os.devnull).open("wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
        try:
            forkserver.ensure_running()
        finally:
            os.dup2(before, 2)
            os.close(before)


class Ranks:
    """A function of `training` in some processes; a context manager that kills what is left.

    Args:
        count: number of processes.
        function: name of the function. It is called with `say`, which sends a message, and `args`.
        args: must pickle.
        grouped: whether the ranks form a gloo group.
    """

    def __init__(self, count: int, function: str, *args: object, grouped: bool = True) -> None:
        self.outcomes: dict[int, Outcome] = {}
        self._deadline = time.monotonic() + _JOB_SECONDS
        self._folder = tempfile.TemporaryDirectory(prefix="dcp-objstore-demo-")
        meeting = f"{self._folder.name}/meeting" if grouped else None
        context: ForkServerContext | SpawnContext = multiprocessing.get_context(_METHOD)  # type: ignore[assignment]
        pipes = [context.Pipe() for _ in range(count)]
        self._rank_of = {ours: rank for rank, (ours, _) in enumerate(pipes)}
        self._processes = [
            context.Process(
                target=_run, args=(theirs, self._log(rank), rank, count, meeting, function, args)
            )
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process, (_, theirs) in zip(self._processes, pipes, strict=True):
            process.start()
            theirs.close()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()  # all at once, before any is waited for
        for process in self._processes:
            process.join()
        self._folder.cleanup()

    def messages(self) -> Iterator[tuple[Any, ...]]:
        """Yield what the ranks say, as it arrives, until all have ended or one has failed.

        Raises:
            TimeoutError: they do not end.
        """
        while len(self.outcomes) < len(self._processes):
            waiting = [one for one, rank in self._rank_of.items() if rank not in self.outcomes]
            ready = mp_connection.wait(waiting, max(0.0, self._deadline - time.monotonic()))
            if not ready:
                late = [self._rank_of[one] for one in waiting]
                raise TimeoutError(f"ranks {late} did not finish in time")
            for one in ready:
                assert isinstance(one, Connection)
                rank = self._rank_of[one]
                try:
                    kind, *contents = one.recv()
                except (EOFError, OSError):  # it died, perhaps while it was sending
                    self._processes[rank].join()
                    status = self._processes[rank].exitcode
                    self.outcomes[rank] = Outcome(rank, status=status, log=self._tail(rank))
                    continue
                if kind == "said":
                    yield tuple(contents)
                elif kind == "returned":
                    self.outcomes[rank] = Outcome(rank, *contents)
                else:
                    self.outcomes[rank] = Outcome(rank, error=contents[0], log=self._tail(rank))
            if any(outcome.failure for outcome in self.outcomes.values()):
                return

    def end(self, within_seconds: float = _JOB_SECONDS) -> list[Outcome]:
        """Wait until all ranks have ended; return how, in their order.

        Raises:
            TimeoutError: they do not end.
        """
        self._deadline = min(self._deadline, time.monotonic() + within_seconds)
        while len(self.outcomes) < len(self._processes):
            for _ in self.messages():
                pass
        return [self.outcomes[rank] for rank in range(len(self._processes))]

    def kill(self, rank: int) -> None:
        """Kill a rank by SIGKILL."""
        self._processes[rank].kill()

    def _log(self, rank: int) -> str:
        return f"{self._folder.name}/rank-{rank}.log"

    def _tail(self, rank: int) -> str:
        log = Path(self._log(rank))
        return log.read_text(errors="replace")[-2000:] if log.exists() else ""


def _run(
    connection: Connection,
    log: str,
    rank: int,
    count: int,
    meeting: str | None,
    function: str,
    args: tuple[object, ...],
) -> None:
    # Ctrl-C in a terminal goes to a process group; the launching process ends its ranks itself.
    os.setpgid(0, 0)
    threading.Thread(target=_end_with_launcher, daemon=True).start()
    output = Path(log).open("w", buffering=1)  # noqa: SIM115  lives as long as the process
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    speaking = threading.Lock()  # also by threads that save

    def send(*message: object) -> None:
        with speaking:
            connection.send(message)

    try:
        value = _call(lambda *said: send("said", *said), rank, count, meeting, function, args)
        send("returned", value)
    except BaseException as error:  # noqa: BLE001  everything is reported
        traceback.print_exc()
        try:
            send("raised", error)
        except Exception:  # noqa: BLE001  an error that does not pickle can raise anything
            send("raised", RuntimeError(repr(error)))
        # Without closing the group, which can wait for a dead rank. The others see it closed.
        sys.stderr.flush()
        os._exit(1)


def _call(
    say: object, rank: int, count: int, meeting: str | None, function: str, args: tuple[object, ...]
) -> object:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if meeting is not None:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{meeting}",
            rank=rank,
            world_size=count,
            timeout=timedelta(seconds=GROUP_SECONDS),
        )
        dist.barrier()  # a rank that ends at once would leave while others still connect to it
    value = getattr(importlib.import_module(_TRAINING), function)(say, *args)
    if dist.is_initialized():
        dist.destroy_process_group()
    return value


def _end_with_launcher() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    mp_connection.wait([parent.sentinel])
    os._exit(1)
