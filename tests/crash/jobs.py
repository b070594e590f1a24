"""Processes at work on a bucket: one in this thread, or the ranks of a job as threads.

The ranks meet in torch's process group of threads. Like gloo when a peer has died, it fails in
every collective of the survivors, from the moment on at which one is killed; so nothing that the
clean-up code of the dead does reaches them either.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.testing._internal.distributed import multi_threaded_pg as threaded

from dcp_objstore.checkpoint import probe
from dcp_objstore.run import sweep as sweeping
from dcp_objstore.stores.spec import StoreSpec
from tests.crash.process import Connection, ConnectionUploads, Process, here
from tests.support.memory_store import Bucket
from tests.support.serial import as_given, one_after_the_other

Act = Callable[[int], None]  # of one rank


@contextmanager
def in_memory() -> Iterator[None]:
    """Stores open onto the bucket of the thread that opens them, and the n-th request is known."""
    opens, uploads = StoreSpec.open, sweeping.open_uploads

    def connect(spec: StoreSpec) -> Connection:
        return Connection(here.bucket, here.process, spec.url)

    def see_uploads(spec: StoreSpec) -> ConnectionUploads:
        return connect(spec).uploads()

    StoreSpec.open = connect  # type: ignore[method-assign,assignment]
    sweeping.open_uploads = see_uploads  # type: ignore[assignment]
    try:
        with one_after_the_other(as_given):
            yield
    finally:
        StoreSpec.open, sweeping.open_uploads = opens, uploads  # type: ignore[method-assign]
        probe.forget()


def run_here(
    bucket: Bucket, act: Act, process: Process | None = None, rank: int = 0
) -> BaseException | None:
    """In this thread; what it raised, if it lived to raise anything."""
    here.bucket, here.process = bucket, process or Process()
    try:
        act(rank)
    except BaseException as error:  # noqa: BLE001 - judged by the caller
        return error
    return None


def run_job(bucket: Bucket, act: Act, processes: Sequence[Process]) -> list[BaseException | None]:
    """A rank for each process; what each raised."""
    if len(processes) == 1:
        return [run_here(bucket, act, processes[0])]
    ended: list[BaseException | None] = [None] * len(processes)
    store = dist.HashStore()

    def rank_main(rank: int) -> None:
        dist.init_process_group("threaded", rank=rank, world_size=len(processes), store=store)
        try:
            ended[rank] = run_here(bucket, act, processes[rank], rank)
            if ended[rank] is not None:
                break_group()  # it leaves, so the others cannot meet it any more
        finally:
            dist.destroy_process_group()

    with _threads_as_ranks():
        threads = [
            threading.Thread(target=rank_main, args=(rank,), daemon=True)
            for rank in range(len(processes))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), "a rank hangs"
    return ended


def break_group() -> None:
    """Every collective fails from now on."""
    threaded.ProcessLocalGroup.exception_handle(None)


@contextmanager
def _threads_as_ranks() -> Iterator[None]:
    hook = sys.excepthook  # torch puts one on top for each group
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    threaded._install_threaded_pg()
    try:
        yield
    finally:
        threaded._uninstall_threaded_pg()
        threaded.ProcessLocalGroup.reset()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        sys.excepthook = hook
