"""Ranks for tests: warm processes, used again and again, each run in a fresh gloo group.

    run_ranks(4, save_shard, url)     # [save_shard(0, 4, url), …, save_shard(3, 4, url)]

Importing torch takes seconds, so one fork server imports it once and each worker is forked from
there. A worker that was killed or hangs is replaced; the others go on to the next run.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import faulthandler
import itertools
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_WORKERS = 8
_PRELOAD = [
    "torch",
    "torch.distributed",
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.nn.parallel",
    "torch.optim",
    "numpy",
    "pytest",
    "boto3",
]


@dataclass
class Outcome:
    """How one rank's call ended.

    Attributes:
        value: what it returned.
        error: what it raised, else None.
        text: the traceback, and for a hang the stacks of all its threads.
        exit_signal: the signal that ended the process, or None.
        timed_out: it had not finished in time and was killed for that.
    """

    rank: int
    value: Any = None
    error: BaseException | None = None
    text: str = ""
    exit_signal: signal.Signals | None = None
    timed_out: bool = False

    @property
    def failed(self) -> bool:
        return self.error is not None or self.exit_signal is not None or self.timed_out

    def __str__(self) -> str:
        if self.timed_out:
            return f"rank {self.rank} did not finish in time:\n{self.text}"
        if self.exit_signal is not None:
            return f"rank {self.rank} was ended by {self.exit_signal.name}\n{self.text}"
        return f"rank {self.rank} raised {self.error!r}\n{self.text}"


class RanksFailedError(Exception):
    """At least one rank failed; `outcomes` has all of them."""

    def __init__(self, outcomes: list[Outcome]) -> None:
        super().__init__("\n".join(str(outcome) for outcome in outcomes if outcome.failed))
        self.outcomes = outcomes


class UnpicklableError(Exception):
    """A rank raised or returned something that does not survive a pickle; this is its text."""


def run_ranks(
    world_size: int, fn: Callable[..., Any], *args: Any, timeout_seconds: float = 150
) -> list[Any]:
    """Call `fn(rank, world_size, *args)` on every rank; their results in the order of the ranks.

    Args:
        world_size: 1 to 8.
        fn: a function at the top level of a module, so that pickle finds it.
        args: must pickle.
        timeout_seconds: for all ranks together; who is not done then is killed.

    Raises:
        RanksFailedError: a rank raised, was killed or timed out.
    """
    outcomes = try_ranks(world_size, fn, *args, timeout_seconds=timeout_seconds)
    if any(outcome.failed for outcome in outcomes):
        raise RanksFailedError(outcomes)
    return [outcome.value for outcome in outcomes]


def try_ranks(
    world_size: int, fn: Callable[..., Any], *args: Any, timeout_seconds: float = 150
) -> list[Outcome]:
    """As `run_ranks`, but failures are outcomes too and nothing is raised for them."""
    return _pool().run(world_size, fn, args, timeout_seconds)


class _Worker:
    def __init__(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOAD)
        handle, name = tempfile.mkstemp(prefix="rank-", suffix=".log")
        os.close(handle)
        self.log = Path(name)
        self.connection, theirs = context.Pipe()
        # Not a daemon: async_save in process mode has a child of its own.
        self.process = context.Process(target=_worker_main, args=(theirs, name), daemon=False)
        self.process.start()
        theirs.close()

    def end(self) -> None:
        self.connection.close()
        self.process.kill()
        self.process.join()
        self.log.unlink(missing_ok=True)


class _Pool:
    def __init__(self) -> None:
        from torch.distributed import TCPStore

        self.workers: dict[int, _Worker] = {}
        self.runs = itertools.count()
        # Here, not on rank 0: it outlives every rank, and port 0 means no race for a port.
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        atexit.register(self.end)

    def end(self) -> None:
        while self.workers:
            self.workers.popitem()[1].end()

    def run(
        self, world_size: int, fn: Callable[..., Any], args: tuple[Any, ...], seconds: float
    ) -> list[Outcome]:
        if not 1 <= world_size <= MAX_WORKERS:
            raise ValueError(f"world_size must be 1 to {MAX_WORKERS}, got {world_size}")
        # A worker keeps its rank for life, as a real rank does: DTensor caches what it worked out
        # for a mesh, and a process that changed its rank would go on with the old coordinates.
        for rank, worker in list(self.workers.items()):
            if not worker.process.is_alive():
                self._drop(rank)
        for rank in range(world_size):
            if rank not in self.workers:
                self.workers[rank] = _Worker()
        chosen = [self.workers[rank] for rank in range(world_size)]
        deadline = time.monotonic() + seconds
        job = (next(self.runs), self.store.port, world_size, seconds, pickle.dumps((fn, args)))
        for rank, worker in enumerate(chosen):
            worker.log.write_text("")
            worker.connection.send((rank, *job))
        return self._collect(chosen, deadline)

    def _collect(self, chosen: list[_Worker], deadline: float) -> list[Outcome]:
        outcomes: dict[int, Outcome] = {}
        while len(outcomes) < len(chosen):
            waiting = {
                worker.connection: rank
                for rank, worker in enumerate(chosen)
                if rank not in outcomes
            }
            left = deadline - time.monotonic()
            ready = multiprocessing.connection.wait(list(waiting), timeout=max(0.0, left))
            for connection in ready:
                rank = waiting[connection]  # type: ignore[index]
                outcomes[rank] = self._receive(rank, chosen[rank])
            if not ready and left <= 0:
                for rank in waiting.values():
                    outcomes[rank] = self._give_up(rank, chosen[rank])
        return [outcomes[rank] for rank in range(len(chosen))]

    def _receive(self, rank: int, worker: _Worker) -> Outcome:
        try:
            joined, ok, payload, text = worker.connection.recv()
        except (EOFError, ConnectionResetError):
            worker.process.join()
            code = worker.process.exitcode or 0
            text = worker.log.read_text(errors="replace")
            self._drop(rank)
            if code < 0:
                return Outcome(rank, text=text, exit_signal=signal.Signals(-code))
            return Outcome(
                rank, error=UnpicklableError(f"the process exited with {code}"), text=text
            )
        if not joined:
            self._drop(rank)  # torch there has counted another number of groups than elsewhere
        value = pickle.loads(payload)
        return Outcome(rank, value=value) if ok else Outcome(rank, error=value, text=text)

    def _give_up(self, rank: int, worker: _Worker) -> Outcome:
        """Ask for the stacks of a hanging worker, then kill it."""
        pid = worker.process.pid
        assert pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
        worker.process.join(0.5)  # the handler writes at once; this only leaves it the time
        text = worker.log.read_text(errors="replace")
        self._drop(rank)
        return Outcome(rank, text=text, timed_out=True)

    def _drop(self, rank: int) -> None:
        worker = self.workers.pop(rank)
        worker.end()


_the_pool: list[_Pool] = []


def _pool() -> _Pool:
    if not _the_pool:
        _the_pool.append(_Pool())
    return _the_pool[0]


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)


def _worker_main(connection: multiprocessing.connection.Connection, log: str) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    output = Path(log).open("a", buffering=1)  # noqa: SIM115 - for the life of the process
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    faulthandler.register(signal.SIGUSR1, file=output, all_threads=True)
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            job = connection.recv()
        except EOFError:
            os._exit(0)
        _joined.clear()
        result = _call(*job)
        connection.send((_joined.is_set(), *result))


# Of a rank's process: whether it was in the group of its latest job.
_joined = threading.Event()


def _call(
    rank: int, run: int, port: int, world_size: int, seconds: float, call: bytes
) -> tuple[bool, bytes, str]:
    """One call in a group of its own: (returned, pickled value or error, traceback)."""
    import torch.distributed as dist

    try:
        fn, args = pickle.loads(call)
        limit = datetime.timedelta(seconds=seconds)
        store = dist.PrefixStore(f"run-{run}", dist.TCPStore("127.0.0.1", port, timeout=limit))
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world_size, timeout=limit
        )
        # A rank with nothing to do with others would leave while these still connect to it.
        if store.add("joined", 1) == world_size:
            store.set("all joined", "")
        store.wait(["all joined"], limit)
        _joined.set()
        try:
            return True, pickle.dumps(fn(rank, world_size, *args)), ""
        finally:
            _end_checkpoint_child()
            if dist.is_initialized():
                dist.destroy_process_group()
    except BaseException as error:  # noqa: BLE001 - DCP's CheckpointException is one
        text = traceback.format_exc()
        print(text, file=sys.stderr)
        try:
            pickled = pickle.dumps(error)
            pickle.loads(pickled)
        except Exception as why:  # noqa: BLE001
            pickled = pickle.dumps(UnpicklableError(f"{error!r} does not pickle: {why!r}"))
        return False, pickled, text


def _end_checkpoint_child() -> None:
    """DCP's process mode keeps one child for good, in the group of the job that made it.

    In a job of another size it would wait for ranks that have gone.
    """
    executor = sys.modules.get("torch.distributed.checkpoint._async_process_executor")
    child = getattr(executor, "_CHECKPOINT_PROCESS", None)
    if executor is not None and child is not None:
        child._save_process.kill()
        child._save_process.join()
        executor._CHECKPOINT_PROCESS = None
