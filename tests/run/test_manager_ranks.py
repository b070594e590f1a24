"""A run on several ranks: they save, skip, resume and end together."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import dcp_objstore as dos
from dcp_objstore.run import saves
from dcp_objstore.write import async_save as async_api
from tests.support.campaign import cases
from tests.support.checkpoints import numbers
from tests.support.ranks import run_ranks

LAST_STEP = 100_000


def sharded(step: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    own = torch.full((2, 3), float(step + dist.get_rank()))
    return {"weight": DTensor.from_local(own, mesh, [Shard(0)]), "step": step}


def run_job(
    rank: int,
    world_size: int,
    url: str,
    options: Any,
    last: int,
    values: dict[str, Any],
    back_to: int | None = None,
) -> Any:
    upkeep = []
    really = saves.after_commit
    with (
        pytest.MonkeyPatch.context() as patch,
        dos.CheckpointManager(url, storage_options=options, save_every=2, **values) as run,
    ):
        patch.setattr(saves, "after_commit", lambda *args: upkeep.append(rank) or really(*args))
        state = sharded(0)
        start = run.load(state, back_to)
        own = state["weight"].to_local()
        for step in range((start or 0) + 1, last + 1):
            run.step(step, sharded(step), metrics={"loss": 1 / step + rank})
        assert set(upkeep) == ({0} if rank == 0 else set()), "one rank deletes"
        return start, own[0, 0].item(), run.latest(), numbers(run)


def test_all_ranks_resume_from_the_same_step_and_list_the_same(bucket):
    jobs = (bucket.url, bucket.storage_options)
    keep = {"keep": [dos.KeepLatest(2), dos.KeepBest("loss", mode="max")]}
    first = run_ranks(2, run_job, *jobs, 5, keep)
    assert [one[0] for one in first] == [None, None]
    again = run_ranks(2, run_job, *jobs, 9, keep)
    assert [one[:2] for one in again] == [(5, 5.0), (5, 6.0)]
    assert again[0][2:] == again[1][2:]
    # 2 has the best metric, 5 is where the second job came from, 9 is its last step.
    look = dos.CheckpointManager(jobs[0], storage_options=jobs[1])
    assert numbers(look) == (2, 5, 8, 9)
    back = run_ranks(2, run_job, *jobs, 7, keep, 5)
    assert [one[:2] for one in back] == [(5, 5.0), (5, 6.0)]
    assert numbers(look) == (2, 5, 6, 7)


def work(rank: int, world_size: int, url: str, seed: int, fifo: str, values: Any) -> Any:
    """Steps of a few milliseconds with an all-reduce each, until the job is to end."""
    chance = random.Random(seed + rank)
    with dos.CheckpointManager(url, **values) as run:
        step = 0
        for step in range(1, LAST_STEP):
            dist.all_reduce(torch.ones(1))
            torch.rand(chance.randrange(1, 20_000)).sort()
            run.step(step, sharded(step))
            if step == 3:
                Path(f"{fifo}-{rank}").write_text(json.dumps(os.getpid()))
            if run.preempted():
                break
        return step, run.latest()


def preempt_at_random(url: str, tmp_path: Path, seed: int, values: dict[str, Any]) -> None:
    """SIGTERM to a random rank at a random moment, or to both, one shortly after the other."""
    chance = random.Random(seed)
    name = str(tmp_path / f"pids-{seed}")
    chosen = chance.choice([(0,), (1,), (0, 1), (1, 0)])

    def send() -> None:
        waiting = threading.Event()
        places = [Path(f"{name}-{rank}") for rank in (0, 1)]
        while not all(place.exists() and place.read_text() for place in places):
            waiting.wait(0.01)
        for rank in chosen:
            waiting.wait(chance.uniform(0, 0.6))
            os.kill(json.loads(places[rank].read_text()), signal.SIGTERM)

    sender = threading.Thread(target=send)
    sender.start()
    values = {"preemption": dos.Preemption(signals=(signal.SIGTERM,)), **values}
    outcomes = run_ranks(2, work, url, seed, name, values, timeout_seconds=120)
    sender.join()
    (step, latest), other = outcomes
    assert (step, latest) == other
    assert 3 <= step == latest < LAST_STEP - 1
    found = {"weight": torch.zeros(4, 3), "step": -1}
    dos.load(found, f"{url}/step-{step}", progress=False)
    assert found["step"] == step
    assert found["weight"][:, 0].tolist() == [step, step, step + 1, step + 1]


@pytest.mark.parametrize("seed", cases(range(100, 120), default=[104]))
def test_all_ranks_save_the_same_step_after_a_signal_at_any_moment(seed, tmp_path):
    values: dict[str, Any] = [{}, {"save_every": 7}, {"save_every": timedelta(seconds=0.3)}][
        seed % 3
    ]
    preempt_at_random((tmp_path / "run").as_uri(), tmp_path, seed, values)


def skip_where_one_is_slow(rank: int, world_size: int, url: str) -> list[bool]:
    """Rank 1 sees the end of the first save late; rank 0 has seen it when it comes to the next."""
    go, really = threading.Event(), async_api.run_save

    def late(*args: Any) -> Any:
        report = really(*args)
        assert go.wait(30)
        return report

    if rank == 1:
        async_api.run_save = late  # type: ignore[assignment]
    try:
        with dos.CheckpointManager(url, save_every=1, on_busy="skip") as run:
            first = run.async_save(1, sharded(1))
            assert first is not None
            if rank == 0:
                first.result(30)
            dist.barrier()
            saved = [run.step(2, sharded(2))]
            go.set()
            first.result(30)
            dist.barrier()
            return [*saved, run.step(3, sharded(3))]
    finally:
        async_api.run_save = really


def test_a_save_is_skipped_on_all_ranks_when_it_is_busy_on_one(tmp_path):
    url = (tmp_path / "run").as_uri()
    assert run_ranks(2, skip_where_one_is_slow, url) == [[False, True]] * 2
    assert [step.name for step in dos.steps(url)] == ["step-1", "step-3"]


def two_managers(rank: int, world_size: int, url: str) -> list[list[float]]:
    """On rank 1 the save of the model begins when that of the average has been staged."""
    staged, really, began = threading.Event(), async_api.run_save, []

    def late(writer: Any, *args: Any) -> Any:
        began.append(writer.checkpoint_id)
        if rank == 1:
            assert staged.wait(30)
        return really(writer, *args)

    async_api.run_save = late
    try:
        with (
            dos.CheckpointManager(f"{url}/model") as model,
            dos.CheckpointManager(f"{url}/ema") as ema,
        ):
            model.async_save(1, sharded(1))
            handle = ema.async_save(1, sharded(10))
            assert handle is not None
            assert began in ([], [f"{url}/model/step-1"])
            staged.set()
            handle.result(60)
            loaded = [sharded(0), sharded(0)]
            for run, into in zip((model, ema), loaded, strict=True):
                run.load(into)
            return [into["weight"].to_local()[0].tolist() for into in loaded]
    finally:
        async_api.run_save = really


def test_saves_of_two_managers_take_turns_so_that_their_ranks_meet(tmp_path):
    found = run_ranks(2, two_managers, (tmp_path / "run").as_uri())
    assert found == [[[1.0] * 3, [10.0] * 3], [[2.0] * 3, [11.0] * 3]]


def interrupted_while_it_waits(rank: int, world_size: int, url: str, staging: bool) -> str:
    """Ctrl-C on rank 1 as it waits for the save before, or as it copies the state."""
    raised = ""
    with dos.CheckpointManager(url, claim_run=False) as run, pytest.MonkeyPatch.context() as patch:
        run.async_save(1, sharded(1))
        if rank == 1:
            where: Any = async_api if staging else async_api.AsyncSaveHandle
            patch.setattr(where, "Staging" if staging else "exception", interrupt)
        try:
            run.async_save(2, sharded(2))
        except (KeyboardInterrupt, dos.errors.RankFailedError) as error:
            raised = repr(error)
        patch.undo()
        with contextlib.suppress(*[dos.errors.RankFailedError] * staging):  # on all ranks, once
            run.async_save(3, sharded(3))
        run.async_save(4, sharded(4))
    return raised


def interrupt(*args: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("staging", [False, True])
def test_ctrl_c_in_a_managers_save_on_one_rank_leaves_the_ranks_in_step(tmp_path, staging):
    url = (tmp_path / "run").as_uri()
    first, second = run_ranks(2, interrupted_while_it_waits, url, staging)
    assert second == "KeyboardInterrupt()"
    assert staging or "KeyboardInterrupt" in first
    expected = [1, 4] if staging else [1, 3, 4]
    assert [step.name for step in dos.steps(url)] == [f"step-{step}" for step in expected]


def ask_for_what_differs(rank: int, world_size: int, url: str) -> list[str]:
    """What one rank alone has wrong, or as no other."""
    told = []
    for loss, base in ((object() if rank else 0.5, None), (0.5, "latest" if rank else None)):
        with dos.CheckpointManager(url, base=base) as run:
            for act in (
                lambda: run.load({"step": 0}, rank + 1),
                lambda: run.save(1, {"step": 1}, metrics={"loss": loss}),  # noqa: B023
            ):
                try:
                    told.append(str(act()))
                except dos.errors.ConfigError as error:
                    told.append(f"of rank {error.rank}: {error}")
    return told


def test_what_one_rank_has_wrong_or_as_no_other_is_refused_on_all(tmp_path):
    for told in run_ranks(2, ask_for_what_differs, (tmp_path / "run").as_uri()):
        assert ["same step=" in text for text in told] == [True, False, True, False]
        assert "of rank 1: " in told[1]
        assert "same base=" in told[3]
    assert [path.name for path in (tmp_path / "run").glob("[!.]*")] == ["_CLAIM"]


def leave_without_the_group(rank: int, world_size: int, url: str) -> list[str]:
    """The tutorials' `cleanup()` comes before the blocks of managers end."""
    verbs: dict[str, Callable[[dos.CheckpointManager], object]] = {
        "close": lambda run: run.close(),
        "save": lambda run: run.save(3, {"step": 3}),
        "load": lambda run: run.load({"step": 0}),
        "go back": lambda run: run.load({"step": 0}, 1),
        "latest": lambda run: run.latest(),
        "pin": lambda run: run.pin(1),
    }
    runs = {verb: dos.CheckpointManager(f"{url}/{verb}", sweep=False) for verb in verbs}
    for run in runs.values():
        run.__enter__()
        run.step(2, {"step": dos.PerRank(rank)})
    runs["pin"].save(1, {"step": 1})
    told = []
    with (
        pytest.raises(ValueError, match="of the program"),
        dos.CheckpointManager(f"{url}/closed", sweep=False) as run,
    ):
        run.step(1, {"step": dos.PerRank(rank)})
        run.close()
        dist.destroy_process_group()
        raise ValueError("of the program")
    for verb, call in verbs.items():
        try:
            told.append(f"{verb} returns {call(runs[verb])}")
        except dos.errors.InputError as error:
            told.append(str(error))
    return told


def test_after_the_process_group_was_destroyed_no_rank_acts_alone(tmp_path):
    """But the block of a manager that was closed before ends."""
    url = (tmp_path / "run").as_uri()
    for told in run_ranks(2, leave_without_the_group, url):
        for text in told:
            assert "destroy_process_group" in text
    assert [step.name for step in dos.steps(f"{url}/closed")] == ["step-1"]
    assert [step.pins for step in dos.steps(f"{url}/pin")] == [()]
    saved = {path.parent.name for path in tmp_path.glob("run/*/_CLAIM")}
    assert saved == {"closed", "pin"}


def one_run_each(rank: int, world_size: int, url: str) -> tuple[Any, ...]:
    """Two jobs of one rank each, which never make the same call at the same time."""
    groups = [dist.new_group([number]) for number in range(world_size)]
    found = {"step": 0}
    with dos.CheckpointManager(f"{url}/{rank}", process_group=groups[rank]) as run:
        for step in range(1, 2 + rank):
            run.save(step, {"step": step})
        run.async_save(5, {"step": 5})
        return run.load(found), found["step"], numbers(run), run.claim is not None


def test_a_manager_concerns_no_ranks_but_those_of_its_group(tmp_path):
    url = (tmp_path / "run").as_uri()
    assert run_ranks(2, one_run_each, url) == [(5, 5, (1, 5), True), (5, 5, (1, 2, 5), True)]
