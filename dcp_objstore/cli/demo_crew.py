"""The processes of the demo: those that start ranks, and the ranks.

Each job of the demo is a new process group of new processes. The process of the command starts all
of them. Under `torchrun` or `srun` each rank of the allocation starts one, so that a rank of a job
can be killed, and a job can have fewer ranks, without the launcher's knowledge. The starters tell
each other in a TCPStore how their ranks have ended.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import re
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import connection as pipes
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore

from dcp_objstore.errors import DcpObjstoreError, InputError
from dcp_objstore.stores import StoreSpec
from dcp_objstore.stores.wrappers import WrappedStore

DEFAULT_RANKS = 8
# A limit for slow machines: no job takes more than half a minute on two cores.
_JOB_SECONDS = 300.0
# Collectives of a group with a dead rank end after this, if its closed connections do not end them.
_GROUP_SECONDS = 60.0
# Apple's frameworks do not survive a fork after torch was imported.
_METHOD = "spawn" if sys.platform == "darwin" else "forkserver"
# What every rank would otherwise import at first use.
_PRELOAD = ["dcp_objstore.cli.demo", "torch._dynamo", "dcp_objstore.run.manager", "obstore.store"]
_VERBS = {"put", "put_stream", "copy", "get", "head", "open_range", "list", "delete"}


class DemoFailedError(Exception):
    """A process of the demo did not do its job, or what was to be proved does not hold."""


@contextmanager
def counted_requests() -> Iterator[Counter[str]]:
    """Count the requests of the stores that are opened in the block, by their verbs."""
    requests: Counter[str] = Counter()

    class CountedStore(WrappedStore):
        def __getattribute__(self, name: str) -> Any:
            if name in _VERBS:
                requests[name] += 1
            return super().__getattribute__(name)

    opened = StoreSpec.open
    StoreSpec.open = lambda spec: CountedStore(opened(spec))  # type: ignore[method-assign,assignment]
    try:
        yield requests
    finally:
        StoreSpec.open = opened  # type: ignore[method-assign]


class Ended(NamedTuple):
    """How a rank has ended, and what it has said before.

    Attributes:
        how: None after success; the error of the library, another error's text, or an exit status.
        requests: the numbers of its requests by their verbs; none if it was killed.
        said: what it has said last under each name.
        log: the end of its output.
    """

    how: DcpObjstoreError | str | int | None
    requests: Counter[str]
    said: dict[str, Any]
    log: str


class Crew:
    """The processes that start ranks, as one of them sees it.

    Args:
        ranks: the number of ranks of a job. Default: those of the allocation, or 8.
        device: "cpu" or "cuda".

    Attributes:
        ranks: the largest number of ranks of a job.
        launcher: "torchrun", "srun", or None if the user has started this process.
        is_first: whether this process prints.

    Raises:
        InputError: there are not enough ranks or GPUs.
    """

    def __init__(self, ranks: int | None, device: str) -> None:
        self.launcher, env = _allocation()
        self.ranks = int(env["WORLD_SIZE"]) if self.launcher else ranks or DEFAULT_RANKS
        if ranks not in {None, self.ranks} or self.ranks < 2:
            raise InputError(
                f"{self.launcher} has started {self.ranks} ranks: the demo needs 2, and takes all"
                " of them, without --ranks"
            )
        own_rank = int(env["RANK"]) if self.launcher else 0
        self.device, self.is_first = device, own_rank == 0
        self._own = [own_rank] if self.launcher else list(range(self.ranks))
        self._local_rank = int(env.get("LOCAL_RANK", 0))
        self._check_gpus(int(env.get("LOCAL_WORLD_SIZE", self.ranks)))
        self._address = env.get("MASTER_ADDR", "127.0.0.1"), int(env.get("MASTER_PORT", 0))
        is_master = self.is_first and env.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        limit = timedelta(seconds=_JOB_SECONDS + 2 * _GROUP_SECONDS)
        self._store = TCPStore(
            *self._address, is_master=is_master, timeout=limit, wait_for_workers=False
        )
        self._address = self._address[0], self._store.port
        self._jobs = 0
        multiprocessing.get_context(_METHOD).set_forkserver_preload(_PRELOAD)

    def _check_gpus(self, ranks_here: int) -> None:
        if self.device == "cuda" and not torch.cuda.is_available():
            raise InputError("--device cuda: torch sees no GPU here")
        if self.device == "cuda" and torch.cuda.device_count() < ranks_here:
            raise InputError(
                f"--device cuda: NCCL needs a GPU for each rank, and here are"
                f" {torch.cuda.device_count()} for {ranks_here}; choose --ranks"
            )

    def share(self, name: str, value: object) -> list[Any]:
        """Return the values of all starters. All of them call it with the same name."""
        starters = self.ranks if self.launcher else 1
        self._store.set(f"demo/{name}/{self._own[0]}", pickle.dumps(value))  # type: ignore[arg-type]
        return [pickle.loads(self._store.get(f"demo/{name}/{one}")) for one in range(starters)]

    def run(
        self, ranks: int, work: Callable[..., None], *args: object, hear: Callable[..., bool]
    ) -> list[Ended]:
        """Run a job; return how each of its ranks has ended. All starters call it alike.

        Args:
            ranks: number of ranks.
            work: called in each rank with the device, a function that says something, and `args`.
            hear: called with what a rank of this starter says; returns whether to kill that rank.

        Raises:
            DemoFailedError: the ranks do not end in time.
        """
        self._jobs += 1
        own = [rank for rank in self._own if rank < ranks]
        with tempfile.TemporaryDirectory(prefix="dcp-objstore-demo-") as folder:
            ended = self._run_own(own, folder, (ranks, work, args), hear)
        shared = self.share(f"job-{self._jobs}", ended)
        return [one for starter in shared for one in starter]

    def _run_own(
        self, own: Sequence[int], folder: str, job: tuple[Any, ...], hear: Callable[..., bool]
    ) -> list[Ended]:
        context: Any = multiprocessing.get_context(_METHOD)
        processes: dict[int, Any] = {}
        open_pipes: dict[Any, int] = {}
        said: dict[int, dict[str, Any]] = {rank: {} for rank in own}
        deadline = time.monotonic() + _JOB_SECONDS
        try:
            for rank in own:
                ours, theirs = context.Pipe(duplex=False)
                place = rank, self._local_rank or rank, self.device
                group = (*self._address, f"job-{self._jobs}")
                call = theirs, f"{folder}/{rank}.log", group, place, *job
                processes[rank] = context.Process(target=_run_rank, args=call)
                processes[rank].start()
                theirs.close()
                open_pipes[ours] = rank
            while open_pipes:
                ready = pipes.wait(list(open_pipes), max(0.0, deadline - time.monotonic()))
                if not ready:
                    raise DemoFailedError(
                        f"ranks {sorted(open_pipes.values())} did not end in time"
                    )
                for pipe in ready:
                    assert isinstance(pipe, Connection)
                    rank = open_pipes[pipe]
                    try:
                        name, value = pipe.recv()
                    except (EOFError, OSError):  # it has ended, or died while it was sending
                        del open_pipes[pipe]
                        processes[rank].join()
                        continue
                    said[rank][name] = value
                    if hear(rank, name, value):
                        processes[rank].kill()
        finally:
            for process in processes.values():
                process.kill()  # all at once, before any is waited for
            for process in processes.values():
                process.join()
        return [
            Ended(
                said[rank].pop("error", process.exitcode or None),
                said[rank].pop("requests", Counter()),
                said[rank],
                Path(folder, f"{rank}.log").read_text(errors="replace")[-2000:],
            )
            for rank, process in processes.items()
        ]


def _allocation() -> tuple[str | None, Mapping[str, str]]:
    """Return what has started this process as a rank, and its variables, by torchrun's names."""
    env = os.environ
    if "RANK" in env and "WORLD_SIZE" in env:
        return "torchrun", env
    if int(env.get("SLURM_STEP_NUM_TASKS", "0")) < 2:
        return None, {}
    names = {"RANK": "PROCID", "WORLD_SIZE": "STEP_NUM_TASKS", "LOCAL_RANK": "LOCALID"}
    ours = {name: env[f"SLURM_{theirs}"] for name, theirs in names.items()}
    # "2(x3),1": the nodes of a step may have different numbers of tasks.
    most = max(map(int, re.findall(r"(\d+)(?:\(x\d+\))?", env["SLURM_STEP_TASKS_PER_NODE"])))
    ours |= {"LOCAL_WORLD_SIZE": str(most)}
    ours["MASTER_ADDR"] = env.get("MASTER_ADDR", env["SLURM_LAUNCH_NODE_IPADDR"])
    ours["MASTER_PORT"] = env.get("MASTER_PORT", str(20_000 + int(env["SLURM_JOB_ID"]) % 10_000))
    return "srun", ours


def _run_rank(
    pipe: Connection,
    log: str,
    group: tuple[str, int, str],
    place: tuple[int, int, str],
    ranks: int,
    work: Callable[..., None],
    args: tuple[Any, ...],
) -> None:
    # Ctrl-C in a terminal goes to a process group; the launching process ends its ranks itself.
    os.setpgid(0, 0)
    threading.Thread(target=_end_with_starter, daemon=True).start()
    output = Path(log).open("w", buffering=1)  # noqa: SIM115  until it ends
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    rank, local_rank, kind = place
    with counted_requests() as requests:
        try:
            torch.set_num_threads(1)
            device = torch.device(kind, local_rank) if kind == "cuda" else torch.device(kind)
            if kind == "cuda":
                torch.cuda.set_device(device)
            host, port, name = group
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo",
                store=PrefixStore(name, TCPStore(host, port)),
                rank=rank,
                world_size=ranks,
                timeout=timedelta(seconds=_GROUP_SECONDS),
            )
            dist.barrier()  # a rank that ends at once would leave while others still connect to it
            work(device, lambda *said: pipe.send(said), *args)
            pipe.send(("requests", requests))
            dist.destroy_process_group()
        except BaseException as error:  # noqa: BLE001  everything is reported
            traceback.print_exc()
            pipe.send(("requests", requests))
            pipe.send(("error", error if isinstance(error, DcpObjstoreError) else repr(error)))
            # Without closing the group, which can wait for a dead rank. The others see it closed.
            sys.stderr.flush()
            os._exit(1)


def _end_with_starter() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    pipes.wait([parent.sentinel])
    os._exit(1)
