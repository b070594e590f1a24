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
from collections.abc import Callable, Mapping
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore

from dcp_objstore.errors import DcpObjstoreError, InputError
from dcp_objstore.observe.report import counted

DEFAULT_RANKS = 8
# A limit for slow machines: no job takes more than half a minute on two cores.
_JOB_SECONDS = 300.0
# Collectives of a group with a dead rank end after this, if its closed connections do not end them.
_GROUP_SECONDS = 60.0
# Apple's frameworks do not survive a fork after torch was imported.
_METHOD = "spawn" if sys.platform == "darwin" else "forkserver"
# What every rank would otherwise import at first use.
_PRELOAD = ["dcp_objstore.cli.demo", "torch._dynamo", "dcp_objstore.run.manager", "obstore.store"]


class DemoFailedError(Exception):
    """A process of the demo did not do its job, or what was to be proved does not hold."""


class Ended(NamedTuple):
    """The end of a rank, and its output before.

    Attributes:
        outcome: None after success; the error of the library; another error's text; or the exit
            status of one that was killed, such as -9.
        notes: what it has noted by name; nothing if it was killed.
        log: the end of its output.
    """

    outcome: DcpObjstoreError | str | int | None
    notes: dict[str, Any]
    log: str


class _Job(NamedTuple):
    """What the ranks of a job have in common.

    Attributes:
        host, port: address of the TCPStore in which they meet.
        name: the part of that store which is theirs.
        ranks: their number.
        device: "cpu" or "cuda".
        work, args: the function that each of them calls, and its arguments.
    """

    host: str
    port: int
    name: str
    ranks: int
    device: str
    work: Callable[..., None]
    args: tuple[object, ...]


class Crew:
    """The processes that start ranks, as one of them sees it.

    Args:
        ranks: the number of ranks of a job. Default: those of the allocation, or 8.
        device: "cpu" or "cuda".

    Attributes:
        ranks: the largest number of ranks of a job.
        device: "cpu" or "cuda".
        launcher: "torchrun", "srun", or None if the user has started this process.
        is_first: whether this process proves and prints.

    Raises:
        InputError: there are not enough ranks or GPUs.
    """

    def __init__(self, ranks: int | None, device: str) -> None:
        self.launcher, env = _allocation()
        self.device = device
        self.ranks = int(env["WORLD_SIZE"]) if self.launcher else ranks or DEFAULT_RANKS
        # Under a launcher, --ranks may only repeat the number of ranks that it has started.
        if ranks not in {None, self.ranks} or self.ranks < 2:
            raise InputError(
                f"{self.launcher} has started {self.ranks} ranks: the demo needs 2, and takes all"
                " of them, without --ranks"
            )
        # The ranks that this process starts, with their numbers on this machine.
        self._own = {rank: rank for rank in range(self.ranks)}
        if self.launcher:
            self._own = {int(env["RANK"]): int(env.get("LOCAL_RANK", 0))}
        self.is_first = 0 in self._own
        gpus = torch.cuda.device_count()
        if device == "cuda" and gpus < int(env.get("LOCAL_WORLD_SIZE", self.ranks)):
            raise InputError(
                f"--device cuda: torch sees {counted(gpus, 'GPU')} here, and NCCL needs one for"
                " each rank; choose --ranks"
            )
        host, port = env.get("MASTER_ADDR", "127.0.0.1"), int(env.get("MASTER_PORT", 0))
        self._store = TCPStore(
            host,
            port,
            # torchrun's agent may have made the store already.
            is_master=self.is_first and env.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
            timeout=timedelta(seconds=_JOB_SECONDS + 2 * _GROUP_SECONDS),
            wait_for_workers=False,
        )
        self._address = host, self._store.port
        self._jobs = 0
        multiprocessing.get_context(_METHOD).set_forkserver_preload(_PRELOAD)

    def share(self, name: str, value: object) -> list[Any]:
        """Return the values of all starters. All of them call it with the same name."""
        starters = self.ranks if self.launcher else 1
        self._store.set(f"demo/{name}/{min(self._own)}", pickle.dumps(value))  # type: ignore[arg-type]
        keys = [f"demo/{name}/{starter}" for starter in range(starters)]
        return [pickle.loads(self._store.get(key)) for key in keys]

    def run(self, ranks: int, work: Callable[..., None], *args: object) -> list[Ended]:
        """Run a job; return how each of its ranks has ended. All starters call it alike.

        Args:
            ranks: number of ranks.
            work: called in each rank with the device, a dict for its notes, and `args`.

        Raises:
            DemoFailedError: the ranks do not end in time.
        """
        self._jobs += 1
        job = _Job(*self._address, f"job-{self._jobs}", ranks, self.device, work, args)
        with tempfile.TemporaryDirectory(prefix="dcp-objstore-demo-") as folder:
            ended = self._run_own(folder, job)
        return list(chain.from_iterable(self.share(f"ended-{self._jobs}", ended)))

    def _run_own(self, folder: str, job: _Job) -> list[Ended]:
        """Run the job's ranks of this starter as processes, and return how each ended."""
        context: Any = multiprocessing.get_context(_METHOD)
        processes: dict[int, Any] = {}
        deadline = time.monotonic() + _JOB_SECONDS
        try:
            for rank, local_rank in self._own.items():
                if rank < job.ranks:
                    call = f"{folder}/{rank}", job, rank, local_rank
                    processes[rank] = context.Process(target=_run_rank, args=call)
                    processes[rank].start()
            for process in processes.values():
                process.join(max(0.0, deadline - time.monotonic()))
            if late := [rank for rank, process in processes.items() if process.is_alive()]:
                raise DemoFailedError(f"ranks {late} did not end in time")
        finally:
            for process in processes.values():
                process.kill()  # all, before any is waited for
            for process in processes.values():
                process.join()
        return [_ended(f"{folder}/{rank}", processes[rank].exitcode) for rank in processes]


def _allocation() -> tuple[str | None, Mapping[str, str]]:
    """Return what has started this process as a rank, and its variables, by torchrun's names."""
    env = os.environ
    if "RANK" in env and "WORLD_SIZE" in env:
        return "torchrun", env
    if int(env.get("SLURM_STEP_NUM_TASKS", "0")) < 2:
        return None, {}
    names = {"RANK": "PROCID", "WORLD_SIZE": "STEP_NUM_TASKS", "LOCAL_RANK": "LOCALID"}
    variables = {name: env[f"SLURM_{slurm_name}"] for name, slurm_name in names.items()}
    # "2(x3),1": three nodes of the step have two tasks each, the last has one.
    counts = re.findall(r"(\d+)(?:\(x\d+\))?", env["SLURM_STEP_TASKS_PER_NODE"])
    port = 20_000 + int(env["SLURM_JOB_ID"]) % 10_000  # all ranks know it, other jobs have others
    return "srun", {
        **variables,
        "LOCAL_WORLD_SIZE": str(max(map(int, counts))),
        "MASTER_ADDR": env.get("MASTER_ADDR", env["SLURM_LAUNCH_NODE_IPADDR"]),
        "MASTER_PORT": env.get("MASTER_PORT", str(port)),
    }


def _run_rank(files: str, job: _Job, rank: int, local_rank: int) -> None:
    """Be a rank: its output goes to `<files>.log`, how it ended to `<files>.ended`."""
    threading.Thread(target=_end_with_starter, daemon=True).start()
    sys.stdout = os.fdopen(os.dup(1), "w", buffering=1)  # what `work` tells the user
    log = os.open(f"{files}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)  # torch's own lines
    os.dup2(log, 2)
    notes: dict[str, Any] = {}
    outcome: DcpObjstoreError | str | None = None
    try:
        torch.set_num_threads(1)
        device, backend = torch.device(job.device), "gloo"
        if job.device == "cuda":
            device, backend = torch.device("cuda", local_rank), "cpu:gloo,cuda:nccl"
            torch.cuda.set_device(device)
        dist.init_process_group(
            backend,
            store=PrefixStore(job.name, TCPStore(job.host, job.port)),
            rank=rank,
            world_size=job.ranks,
            timeout=timedelta(seconds=_GROUP_SECONDS),
        )
        dist.barrier()  # a rank that ends at once would leave while others still connect to it
        job.work(device, notes, *job.args)
        dist.destroy_process_group()
    except BaseException as error:  # noqa: BLE001  everything is reported
        traceback.print_exc()
        outcome = error if isinstance(error, DcpObjstoreError) else repr(error)
    Path(f"{files}.ended").write_bytes(pickle.dumps((outcome, notes)))
    # After an error the group is still open, because closing it can wait for a dead rank. The other
    # ranks see that the connections of this process are closed.
    os._exit(outcome is not None)


def _end_with_starter() -> None:
    """End this rank when the process that started it has ended, even if that was killed."""
    starter = multiprocessing.parent_process()
    assert starter is not None
    starter.join()
    os._exit(1)


def _ended(files: str, status: int) -> Ended:
    """Return how a rank has ended, from what it has left."""
    log, ended = Path(f"{files}.log"), Path(f"{files}.ended")
    text = log.read_text(errors="replace")[-2000:] if log.exists() else ""
    if not ended.exists():
        return Ended(status, {}, text)
    outcome, notes = pickle.loads(ended.read_bytes())
    return Ended(outcome, notes, text)
