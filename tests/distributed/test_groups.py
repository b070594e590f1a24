"""Process groups: few, late, and never under a name that an earlier attempt of the job has used."""

from __future__ import annotations

import sys
import threading
import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dcp_objstore as dos
from dcp_objstore import torch_private
from dcp_objstore.distributed import groups
from tests.support.rank_threads import RankThreads
from tests.support.ranks import run_alone, run_ranks


def again(backend: str, prefix: str) -> None:
    """End the world and begin another one on the same ranks."""
    rank, world, store = dist.get_rank(), dist.get_world_size(), torch_private.default_store()
    dist.destroy_process_group()
    prefixed: Any = dist.PrefixStore  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=prefixed(prefix, store), rank=rank, world_size=world)


def made_by_each_call(rank: int, world: int, url: str, backend: str) -> dict[str, int]:
    if backend != "gloo":
        again(backend, "without-cpu")
    made = {}

    def note(call: str) -> None:
        made[call] = torch_private.count_groups() - before

    before = torch_private.count_groups()
    state = {"w": torch.ones(2), "mine": dos.PerRank(rank)}
    dos.save(state, f"{url}/alone", progress=False)
    note("save")
    dos.load(state, f"{url}/alone", progress=False)
    note("load")
    with dos.CheckpointManager(f"{url}/run") as run:
        run.load(state)
        run.save(1, state)
        note("manager")
        for step in (2, 3):
            run.async_save(step, state)
        note("async_save")
    return made


@pytest.mark.parametrize("backend", ["gloo", "cuda:gloo"])
def test_all_calls_share_one_group_and_saves_in_the_background_have_another(tmp_path, backend):
    expected = dict.fromkeys(("save", "load", "manager"), 1) | {"async_save": 2}
    assert run_ranks(2, made_by_each_call, tmp_path.as_uri(), backend) == [expected] * 2


def names_of_groups(rank: int, world: int) -> list[str]:
    names = []
    for purpose in (groups.CALLS, groups.SAVES):
        group = groups.own_group(purpose, None)
        dist.barrier(group=group)
        assert group is not None
        names.append(group.group_name)
    names.append(dist.new_group(backend="gloo").group_name)
    return names


def test_a_restarted_job_uses_no_name_again_below_which_its_store_has_addresses():
    attempts = [run_ranks(2, names_of_groups) for _ in range(2)]
    assert all(of_rank == attempt[0] for attempt in attempts for of_rank in attempt)
    names = [name for attempt in attempts for name in attempt[0][:2]]
    assert len(set(names)) == 4
    assert {attempt[0][2] for attempt in attempts} == {"1"}  # the program's own, as torch counts


def call_alone(rank: int, world: int) -> list[str]:
    again("cuda:gloo", "without-cpu")
    store, texts = torch_private.default_store(), []
    if rank == 1:
        store.wait(["failed"])
        return []
    try:
        for outlives in ("True", "False"):
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("TORCHELASTIC_USE_AGENT_STORE", outlives)
                config = dos.TransferConfig(peer_timeout_seconds=0.5)
                with pytest.raises(dos.errors.RankFailedError) as caught:
                    groups.own_group(groups.CALLS, None, config)
            texts.append(str(caught.value))
    finally:
        store.set("failed", "")
    return texts


def test_the_error_names_a_dead_rank_and_under_torchrun_the_store_that_outlives_it():
    texts, _ = run_ranks(2, call_alone)
    assert all("has died" in text and text.endswith("[rank 0]") for text in texts)
    assert ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in text for text in texts] == [True, False]


def trained_while_a_thread_loads(rank: int, world: int, meeting: str) -> bool:
    made = threading.Event()

    def load() -> None:
        group = groups.exchange_group(None, dos.TransferConfig(), meeting)
        dist.barrier(group=group)
        made.set()

    sums = []
    for step in range(20):
        value = torch.tensor([rank + step])
        dist.all_reduce(value)
        sums.append(int(value))
        if step == 10 * rank:  # the ranks make the group between different steps
            threading.Thread(target=load, daemon=True).start()
    return made.wait(60) and sums == [1 + 2 * step for step in range(20)]


def test_a_load_in_a_thread_makes_its_group_without_a_default_collective():
    meeting = str(uuid.uuid4())
    assert run_ranks(2, trained_while_a_thread_loads, meeting) == [True, True]


@pytest.mark.parametrize(
    ("given", "has_cpu", "meeting", "made_for"),
    [
        ("gloo", True, str(uuid.UUID(int=0)), None),
        ("nccl", False, str(uuid.UUID(int=2**128 - 1)), ("nccl", 2**62 - 1)),
        ("world", False, None, (None, None)),
        (None, True, str(uuid.UUID(int=5 * 2**66 + 1)), (None, 5)),
    ],
)
def test_a_load_makes_a_group_unless_the_given_one_takes_tensors_of_the_host(
    given, has_cpu, meeting, made_for, monkeypatch
):
    world, config = SimpleNamespace(group=SimpleNamespace(WORLD="world")), dos.TransferConfig()
    monkeypatch.setattr(groups, "dist", world)
    monkeypatch.setattr(torch_private, "has_cpu_backend", lambda _: has_cpu)
    monkeypatch.setattr(groups, "own_group", lambda *args, number: (*args, number))
    group: Any = groups.exchange_group(given, config, meeting)
    if made_for is None:
        assert group == given
    else:
        assert group == ("read once", made_for[0], config, made_for[1])


@pytest.mark.parametrize("more", [0, 1])
def test_ranks_of_which_some_are_in_more_groups_are_refused_on_all(more, monkeypatch):
    ranks = RankThreads(3)
    monkeypatch.setattr(groups, "dist", ranks)
    monkeypatch.setattr(torch_private, "count_groups", lambda: 2 + more * ranks.calling.rank)

    def refuse(rank: int, group: Any) -> None:
        ranks.calling.rank = rank
        groups._refuse_unlike_names(group)

    kinds = [type(outcome) for outcome in ranks.run(refuse)]
    assert kinds == [dos.errors.UnsupportedError if more else type(None)] * 3


def threads_of_gloo_after(url: str) -> int:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    import torch.distributed.nn  # as DDP does, and keeps the default group as a default argument

    state = {"w": torch.ones(2)}
    dos.save(state, url)
    dos.async_save(state, url, overwrite=True).result()
    dos.load(state, url)
    dist.destroy_process_group()
    return sum("gloo" in comm.read_text() for comm in Path("/proc/self/task").glob("*/comm"))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_thread_of_gloo_outlives_destroy_process_group(tmp_path):
    """Such a thread now and then aborts Python at its end, though all work was done."""
    assert run_alone(threads_of_gloo_after, f"file://{tmp_path}/run") == 0


def patience_of_each_call(rank: int, world: int, url: str) -> list[float]:
    found = []
    for seconds in (70.0, 40.0, 90.0):
        config = dos.TransferConfig(peer_timeout_seconds=seconds)
        dos.save({"w": torch.ones(2)}, f"{url}/{seconds}", config=config, progress=False)
        group: Any = groups._existing(groups.CALLS, None)
        found.append(group._get_backend(torch.device("cpu")).options._timeout.total_seconds())
    return found


def test_the_group_has_the_time_out_of_the_latest_call(tmp_path):
    """Not only the one with which it was made."""
    found = run_ranks(2, patience_of_each_call, f"file://{tmp_path}")
    assert found == [[70.0, 40.0, 90.0]] * 2
