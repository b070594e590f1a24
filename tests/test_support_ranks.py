"""The rank pool: groups work, failures come back as what they were, hangs end."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import dcp_objstore as dos
from tests.support.launcher import Ranks, say
from tests.support.ranks import PRELOAD, run_ranks, try_ranks
from tests.support.shared_servers import warm_up


def add_ranks(rank: int, world_size: int, start: int) -> tuple[int, int]:
    total = torch.tensor(start + rank)
    dist.all_reduce(total)
    return int(total), os.getpid()


def test_ranks_form_a_group_and_workers_are_used_again():
    first = run_ranks(4, add_ranks, 10)
    assert [total for total, _ in first] == [46] * 4
    second = run_ranks(3, add_ranks, 0)
    assert [total for total, _ in second] == [3] * 3
    assert {pid for _, pid in second} < {pid for _, pid in first}


def raise_on_one(rank: int, world_size: int) -> None:
    if rank == 1:
        raise CheckpointException("from a rank", {1: (ValueError("inner"), None)})  # type: ignore[dict-item]


def die_on_one(rank: int, world_size: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def test_a_killed_rank_is_reported_and_replaced():
    outcomes = try_ranks(3, die_on_one)
    assert outcomes[1].exit_signal == signal.SIGKILL
    assert outcomes[0].error is not None
    assert [total for total, _ in run_ranks(3, add_ranks, 0)] == [3] * 3


def hang_on_one(rank: int, world_size: int) -> None:
    if rank == 1:
        threading.Event().wait()


def test_a_hanging_rank_is_killed_and_its_stack_is_shown():
    run_ranks(2, add_ranks, 0)  # they are there, however long that takes
    outcomes = try_ranks(2, hang_on_one, timeout_seconds=2)
    assert not outcomes[0].failed
    assert outcomes[1].timed_out
    assert "hang_on_one" in outcomes[1].text
    assert [total for total, _ in run_ranks(2, add_ranks, 0)] == [1] * 2


def tell(rank: int, world_size: int) -> bool:
    say("rank", rank, world_size)
    return dist.is_initialized()


def test_ranks_need_no_tcp_store_and_no_import_here():
    warm_up(PRELOAD)
    with Ranks() as ranks:
        job = ranks.start(3, f"{__name__}:tell")
        said = sorted((one.rank, *one.message) for one in job.messages())
        assert said == [(rank, "rank", rank, 3) for rank in range(3)]
        assert [outcome.value for outcome in job.end()] == [True] * 3
        (alone,) = ranks.start(1, tell, grouped=False).end()
        assert alone.value is False
    assert not any(psutil.pid_exists(pid) for pid in job.pids)


def test_a_rank_that_fails_ends_as_in_a_real_job():
    with Ranks() as ranks:
        job = ranks.start(2, raise_on_one)
        assert isinstance(job.end()[1].error, CheckpointException)
        for _ in range(200):  # it reports the error before it ends
            if not psutil.pid_exists(job.pids[1]):
                break
            threading.Event().wait(0.05)
        assert [psutil.pid_exists(pid) for pid in job.pids] == [True, False]
        again = ranks.start(2, add_ranks, 0).end()
        assert [one.value[0] for one in again] == [1, 1], "it is replaced"


def leave_much_behind(rank: int, world: int, folder: str) -> int:
    os.environ["LEFT_BEHIND"] = "1"
    os.chdir(folder)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if rank == 1:
        dos.install()
        dos.uninstall()
    return os.getpid()


def what_is_left(rank: int, world: int) -> tuple[int, bool, str, bool]:
    ignored = signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    hooked = dcp.FileSystemWriter.__new__ is not object.__new__
    return os.getpid(), "LEFT_BEHIND" in os.environ or ignored, str(Path.cwd()), hooked


def test_a_rank_meets_nothing_of_the_call_before(tmp_path):
    *_, (_, _, folder, _) = run_ranks(2, what_is_left)
    pids = run_ranks(2, leave_much_behind, str(tmp_path))
    first, second = run_ranks(2, what_is_left)
    assert first == (pids[0], False, folder, False)
    assert second[0] != pids[1], "hooks stay, so it has ended"
    assert second[1:] == (False, folder, False)
