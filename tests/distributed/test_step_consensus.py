"""Ranks agree on a step boundary without a collective: threads as ranks, and stores that fail."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

import dcp_objstore as dos
from dcp_objstore.distributed.step_consensus import StepConsensus


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
            poll_seconds=own.uniform(0.001, 0.02),
        )
        boundaries.start()
        while counts[rank] < 100 or not acted[rank]:
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


def one_of_two(store: Any, peer_timeout_seconds: float, rank: int = 0) -> StepConsensus:
    return StepConsensus(
        lambda: {"end"},
        store=store,
        rank=rank,
        world_size=2,
        peer_timeout_seconds=peer_timeout_seconds,
        poll_seconds=0.001,
    )


def test_a_rank_that_announces_nothing_is_an_error_of_those_that_wait_for_it():
    boundaries = one_of_two(dist.HashStore(), 0.01)
    boundaries.start()
    with pytest.raises(dos.errors.RankFailedError, match="did not answer"):
        while True:
            boundaries.reached()
    boundaries.close()


def test_a_store_that_has_gone_is_given_up_and_training_goes_on(caplog):
    boundaries = one_of_two(GoneStore(), 1e-6)
    boundaries.start()
    while "no longer answers" not in caplog.text:
        assert boundaries.reached() == frozenset()
    boundaries.close()


def test_ranks_agree_two_polls_ahead_and_the_store_keeps_what_two_rounds_need():
    store = dist.HashStore()
    ranks = [one_of_two(store, 60, rank) for rank in (0, 1)]
    names = ["request", "count", "at/0", "at/1"]
    for number, steps in enumerate((1, 3, 7, 15)):  # between two polls, twice as many each time
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(StepConsensus._poll, ranks))
        ranks[0]._poll()  # changes nothing before the agreement was acted on
        for step in range(1, steps + 1):
            expected = frozenset({"end"} if step == steps else ())
            assert [one.reached() for one in ranks] == [expected] * 2
        kept = [at for at in range(9) if all(store.check([f"{at}/{name}"]) for name in names)]
        assert kept == [*range(max(0, number - 1), number + 1)]
        assert store.num_keys() == len(names) * len(kept)
        assert [store.add(f"{at}/count", 0) for at in kept] == [2] * len(kept), "one for each rank"


def test_a_rank_alone_does_at_its_next_step_what_it_asks_for():
    asked = {"time", "end"}
    alone = StepConsensus(lambda: asked, store=None, rank=0, world_size=1, peer_timeout_seconds=60)
    assert alone.reached() == frozenset()
    alone._poll()
    assert alone.reached() == {"time", "end"}
    assert alone.reached() == frozenset()
    asked.clear()
    alone._poll()
    assert alone.reached() == frozenset()
    alone.close()


def test_a_rank_that_leaves_stops_no_other():
    """Its training has ended when another one asks for something."""
    store = dist.HashStore()
    gone, left = (one_of_two(store, 60, rank) for rank in (1, 0))
    gone.start()
    gone.close()
    left.start()
    while not store.check(["0/at/0"]):  # it has asked, and is told that nobody answers
        assert left.reached() == frozenset()
    for _ in range(100):
        assert left.reached() == frozenset()
    left.close()
