"""A run on several ranks: they save, skip, resume and end together."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import dcp_objstore as dos
from dcp_objstore.distributed.step_consensus import StepConsensus
from dcp_objstore.write import async_save as async_api
from tests.support.campaign import cases
from tests.support.checkpoints import numbers
from tests.support.ranks import RanksFailedError, run_ranks, try_ranks

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
    with dos.CheckpointManager(url, storage_options=options, save_every=2, **values) as run:
        state = sharded(0)
        start = run.load(state, back_to)
        own = state["weight"].to_local()
        for step in range((start or 0) + 1, last + 1):
            run.step(step, sharded(step), metrics={"loss": 1 / step + rank})
        assert run._saves is not None
        assert (run._saves._retention is None) is (rank > 0), "one rank deletes"
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


def save_with_wrong_metrics_on_one(rank: int, world_size: int, url: str) -> str:
    with dos.CheckpointManager(url) as run:
        try:
            run.save(1, sharded(1), metrics={"loss": object() if rank == 1 else 0.5})
        except dos.errors.ConfigError as error:
            return f"rank {error.rank}"
    return "saved"


def test_an_argument_that_is_wrong_on_one_rank_is_refused_on_all(tmp_path):
    url = (tmp_path / "run").as_uri()
    assert run_ranks(2, save_with_wrong_metrics_on_one, url) == ["rank 1", "rank 1"]
    assert dos.steps(url) == ()


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


@pytest.mark.parametrize("seed", cases(range(3), default=[0, 1]))
def test_all_ranks_save_the_same_step_after_a_signal_at_any_moment(seed, tmp_path):
    values = {"save_every": 7} if seed % 2 else {}
    preempt_at_random((tmp_path / "run").as_uri(), tmp_path, seed, values)


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(100, 120))
def test_twenty_of_twenty_preemptions_are_saved(seed, tmp_path):
    values: dict[str, Any] = [{}, {"save_every": 7}, {"save_every": timedelta(seconds=0.3)}][
        seed % 3
    ]
    preempt_at_random((tmp_path / "run").as_uri(), tmp_path, seed, values)


def save_by_time(rank: int, world_size: int, url: str) -> Any:
    saved = []
    with dos.CheckpointManager(url, save_every=timedelta(seconds=0.05)) as run:
        for step in range(1, LAST_STEP):
            dist.all_reduce(torch.ones(1))
            if run.step(step, sharded(step)):
                saved.append(step)
            if len(saved) == 3:
                break
    return saved


def test_a_timer_makes_all_ranks_save_the_same_steps(tmp_path):
    url = (tmp_path / "run").as_uri()
    one, other = run_ranks(2, save_by_time, url)
    assert one == other
    assert [step.name for step in dos.steps(url)] == [f"step-{step}" for step in one]


def die_after_the_block(rank: int, world_size: int, url: str) -> None:
    with dos.CheckpointManager(url, save_every=1) as run:
        run.step(1, sharded(1))
    os.kill(os.getpid(), signal.SIGKILL)


def test_killed_right_after_the_block_nothing_is_lost(tmp_path):
    url = (tmp_path / "run").as_uri()
    outcomes = try_ranks(2, die_after_the_block, url)
    assert [one.exit_signal for one in outcomes] == [signal.SIGKILL] * 2
    found = {"weight": torch.zeros(4, 3)}
    dos.load(found, f"{url}/step-1", progress=False)
    assert found["weight"][:, 0].tolist() == [1, 1, 2, 2]


def uneven_ends(rank: int, world_size: int, url: str) -> tuple[int, bool]:
    """Rank 0 has left the block when the signal comes to rank 1, which must not wait for it."""
    run = dos.CheckpointManager(url, preemption=dos.Preemption(signals=(), check=lambda: rank == 1))
    with run:
        if rank == 0:
            run._consensus.close()  # type: ignore[union-attr]
        dist.barrier()
        for step in range(1, 400):
            run._consensus.reached()  # type: ignore[union-attr]
            if run._consensus._over:  # type: ignore[union-attr]
                return step, run.preempted()
            torch.rand(100_000).sort()
    return 400, run.preempted()


def test_a_signal_that_comes_as_ranks_leave_stops_none_of_them(tmp_path):
    outcomes = run_ranks(2, uneven_ends, (tmp_path / "run").as_uri())
    assert [preempted for _, preempted in outcomes] == [False, False]


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


def one_save_fails(rank: int, world_size: int, url: str) -> str:
    with dos.CheckpointManager(url, save_every=1) as run:
        run.step(1, sharded(1))
        state = {"bad": object.__reduce_ex__} if rank == 1 else sharded(2)
        run.step(2, state)
    return "saved"


def test_a_background_save_that_fails_on_one_rank_is_raised_on_all(tmp_path):
    url = (tmp_path / "run").as_uri()
    with pytest.raises(RanksFailedError) as caught:
        run_ranks(2, one_save_fails, url)
    assert all(isinstance(one.error, dos.errors.DcpObjstoreError) for one in caught.value.outcomes)
    assert [step.name for step in dos.steps(url)] == ["step-1"]


def leave_after_close(rank: int, world: int, url: str, fails: bool) -> str | None:
    try:
        with dos.CheckpointManager(url) as run:
            run.step(1, {"step": dos.PerRank(rank)})
            run.close()
            dist.destroy_process_group()
            if fails:
                raise ValueError("of the program")
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize("fails", [False, True])
def test_the_block_of_a_closed_manager_ends_without_the_process_group(tmp_path, fails):
    url = (tmp_path / "run").as_uri()
    assert run_ranks(2, leave_after_close, url, fails) == ["of the program" if fails else None] * 2
    assert [step.name for step in dos.steps(url)] == ["step-1"]


def call_without_a_group(rank: int, world_size: int, url: str, verb: str) -> str:
    """What the tutorials' `cleanup()` does before the manager's block ends."""
    run = dos.CheckpointManager(url)
    run.__enter__()
    if verb == "pin":
        run.save(1, {"step": 1})
    run.step(2, {"step": dos.PerRank(rank)})
    dist.destroy_process_group()
    calls: dict[str, Any] = {
        "close": run.close,
        "save": lambda: run.save(3, {"step": 3}),
        "load": lambda: run.load({"step": 0}),
        "go back": lambda: run.load({"step": 0}, 1),
        "latest": run.latest,
        "pin": lambda: run.pin(1),
    }
    try:
        return str(calls[verb]())
    except dos.errors.InputError as error:
        return str(error)


@pytest.mark.parametrize("verb", ["close", "save", "load", "go back", "latest", "pin"])
def test_after_the_process_group_was_destroyed_no_rank_acts_alone(tmp_path, verb):
    url = (tmp_path / "run").as_uri()
    for said in run_ranks(2, call_without_a_group, url, verb):
        assert "destroy_process_group" in said
    assert (tmp_path / "run" / "_CLAIM").exists() is (verb == "pin")
    assert [step.pins for step in dos.steps(url)] == ([()] if verb == "pin" else [])


def name_different_steps(rank: int, world_size: int, url: str) -> list[str]:
    said = []
    with dos.CheckpointManager(url) as run:
        try:
            said.append(str(run.load({"step": 0}, rank + 1)))
        except dos.errors.ConfigError as error:
            said.append(str(error))
    with dos.CheckpointManager(url, base="latest" if rank else None) as run:
        try:
            run.save(1, {"step": 1})
        except dos.errors.ConfigError as error:
            said.append(str(error))
    return said


def test_ranks_that_load_different_steps_are_refused(tmp_path):
    """And those that name different bases."""
    url = (tmp_path / "run").as_uri()
    for said in run_ranks(2, name_different_steps, url):
        assert ["same step=" in text for text in said] == [True, False]
        assert "same base=" in said[1]
    assert [path.name for path in (tmp_path / "run").glob("[!.]*")] == ["_CLAIM"]


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


class SlowStore:
    """A store that hands out what all have announced late."""

    def __init__(self, store: Any, seconds: float) -> None:
        self.store, self.seconds = store, seconds

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        threading.Event().wait(self.seconds)
        return self.store.multi_get(keys)


class BreakingStore:
    """A store whose connection breaks now and then, before or after it did what it was asked."""

    def __init__(self, store: Any, chance: random.Random) -> None:
        self.store, self.chance, self.broken = store, chance, False

    def clone(self) -> BreakingStore:
        return BreakingStore(self.store, self.chance)

    def __getattr__(self, name: str) -> Any:
        def ask(*args: Any) -> Any:
            draw = 0.0 if self.broken else self.chance.random()
            self.broken = self.broken or draw < 0.1
            answer = getattr(self.store, name)(*args) if draw >= 0.05 else None
            if self.broken:
                raise RuntimeError("Connection reset by peer")
            return answer

        return ask


@pytest.mark.parametrize(
    ("seed", "breaks"), [*((seed, False) for seed in range(6)), (0, True), (2, True), (4, True)]
)
def test_ranks_agree_on_a_boundary_that_none_has_passed(seed, breaks):
    """Threads as ranks, in random lockstep, with requests at random moments."""
    world_size, chance = 4, random.Random(seed)
    store = dist.HashStore()
    asked_at = {rank: chance.randrange(1, 60) for rank in chance.sample(range(4), 2)}
    counts = [0] * world_size
    acted: list[list[tuple[int, frozenset[str]]]] = [[] for _ in range(world_size)]
    barrier = threading.Barrier(world_size)

    def ask(rank: int) -> frozenset[str]:
        done = any("end" in reasons for _, reasons in acted[rank])
        return frozenset({"end"} if counts[rank] >= asked_at.get(rank, 10**9) and not done else ())

    def job(rank: int) -> None:
        own = random.Random(1000 * seed + rank)
        reached: Any = SlowStore(store, 0.1) if rank == seed % 5 else store
        boundaries = StepConsensus(
            lambda: ask(rank),
            store=BreakingStore(reached, own) if breaks else reached,
            rank=rank,
            world_size=world_size,
            peer_timeout_seconds=60,
            look_every_seconds=own.uniform(0.001, 0.02),
        )
        boundaries.start()
        while counts[rank] < 200 or not acted[rank]:
            barrier.wait(60)  # the collective of a step
            threading.Event().wait(own.uniform(0, 0.002))
            counts[rank] += 1
            reasons = boundaries.reached()
            if reasons:
                acted[rank].append((counts[rank], reasons))
        boundaries.close()

    threads = [
        threading.Thread(target=job, args=(rank,), daemon=True) for rank in range(world_size)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads)
    assert acted[0] == acted[1] == acted[2] == acted[3]
    assert 1 <= len(acted[0]) <= 2


class GoneStore:
    """A store whose server has gone."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("Connection refused")


def one_of_two(store: Any, peer_timeout_seconds: float) -> StepConsensus:
    return StepConsensus(
        lambda: {"end"},
        store=store,
        rank=0,
        world_size=2,
        peer_timeout_seconds=peer_timeout_seconds,
        look_every_seconds=0.001,
    )


def test_a_store_that_has_gone_is_given_up_and_training_goes_on(caplog):
    boundaries = one_of_two(GoneStore(), 1e-6)
    boundaries._watch()
    assert "no longer answers" in caplog.text
    assert boundaries.reached() == frozenset()
    boundaries.close()


def test_a_rank_that_announces_nothing_is_an_error_of_those_that_wait_for_it():
    boundaries = one_of_two(dist.HashStore(), 0.01)
    boundaries.start()
    with pytest.raises(dos.errors.RankFailedError, match="did not answer"):
        while True:
            boundaries.reached()
    boundaries.close()
