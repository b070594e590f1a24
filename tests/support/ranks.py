"""Ranks for tests: the launcher with a TCPStore, as under torchrun.

    run_ranks(4, save_shard, url)     # [save_shard(0, 4, url), …, save_shard(3, 4, url)]

    with start_workers() as crew:     # of its own, for ranks that the test pauses and kills
        job = crew.start(2, save_on_and_on, url)
        wait_for(job, "begun")        # what a rank says with `say("begun", …)`
        job.kill(0)
        job.end()

The workers of `run_ranks` live as long as pytest. Each run has a gloo group of its own.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from dcp_objstore.integrations.install import _hook
from tests.support import shared_servers
from tests.support.launcher import Job, Outcome, Ranks, Said, retire

MAX_WORKERS = 8
PRELOAD = [
    "torch",
    "torch._dynamo",  # an optimizer's first step imports it
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
    "dcp_objstore.run.manager",
    "dcp_objstore.inspect.checkpoint",
]
# What all processes of this run of pytest have in common, if there are several.
common_folder: Path | None = None


class RanksFailedError(Exception):
    """At least one rank failed; `outcomes` has all of them."""

    def __init__(self, outcomes: list[Outcome]) -> None:
        super().__init__("\n".join(str(outcome) for outcome in outcomes if outcome.failed))
        self.outcomes = outcomes


def run_ranks(
    world_size: int, fn: Callable[..., Any], *args: Any, timeout_seconds: float = 150
) -> list[Any]:
    """Call `fn(rank, world_size, *args)` on every rank; their results in the order of the ranks.

    Args:
        world_size: 1 to 8.
        fn: a function at the top level of a module, so that pickle finds it.
        args: must pickle.
        timeout_seconds: for all ranks together; a rank that is not done then is killed.

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
    if not 1 <= world_size <= MAX_WORKERS:
        raise ValueError(f"world_size must be 1 to {MAX_WORKERS}, got {world_size}")
    job = _pool().start(world_size, _call, fn, args, timeout_seconds=timeout_seconds)
    return job.end()


def run_alone(fn: Callable[..., Any], *args: Any) -> Any:
    """Call `fn(*args)` in a new process that has imported torch; for one that forks or ends."""
    with start_workers() as crew:
        (outcome,) = crew.start(1, _call_alone, fn, args, grouped=False).end()
    if outcome.failed:
        raise RanksFailedError([outcome])
    return outcome.value


def start_workers(*, reuse: bool = True, preload: Sequence[str] = ()) -> Ranks:
    """Workers apart from those of `run_ranks`; use them in a `with` block.

    Args:
        preload: more modules that are imported once for all, if these are the first workers.
    """
    shared_servers.warm_up([*PRELOAD, *preload])
    return Ranks(reuse=reuse, store_port=_store().port)


@functools.cache
def _pool() -> Ranks:
    pool = start_workers()
    atexit.register(pool.end)
    return pool


@functools.cache
def _store() -> Any:
    from torch.distributed import TCPStore

    # Here, not on rank 0: it outlives every rank, and port 0 means no race for a port.
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def wait_for(job: Job, first: str) -> list[Said]:
    """Listen until ranks have said something that begins so; all that begins so."""
    while not (found := [one for one in job.said if one.message[0] == first]):
        if not job.under_way or not job.listen():
            failures = [str(one) for one in job.outcomes.values() if one.failed]
            raise AssertionError(f"not said: {first!r}; {'; '.join(failures) or 'still going'}")
    return found


def listen_until(job: Job, moment: float) -> None:
    """Listen until a moment (`time.monotonic`), or until all ranks have ended."""
    while job.under_way and job.listen(moment):
        pass


def pause(job: Job) -> None:
    """SIGSTOP all ranks, and wait until every thread of them has stopped."""
    job.signal(signal.SIGSTOP)
    for pid in job.pids:
        for task in Path(f"/proc/{pid}/task").iterdir():
            while _state(task) not in "TZX":
                os.sched_yield()


def _state(task: Path) -> str:
    """Of a thread, one letter (proc(5)); X when it has ended."""
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"


def _call(rank: int, world_size: int, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    with _nothing_left():
        return fn(rank, world_size, *args)


@contextlib.contextmanager
def _nothing_left() -> Iterator[None]:
    """The next call in this process meets nothing of this one's."""
    environment, folder = dict(os.environ), Path.cwd()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        _end_checkpoint_child()
        if os.environ != environment:
            os.environ.clear()
            os.environ.update(environment)
        os.chdir(folder)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        # The hooks of `dos.install` stay for good.
        if _hook.cache_info().currsize:
            retire()


def _call_alone(_rank: int, _world: int, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    return fn(*args)


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
