"""Whatever the network does to which request: answers are true, and what is committed is whole.

Every request of every operation meets every fault, one at a time; then several, drawn, with two
or three actors that take turns. The same seed gives the same log.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from dcp_objstore.checkpoint import commit as commits
from dcp_objstore.checkpoint.names import DOT_METADATA_KEY, MARKER_KEY
from dcp_objstore.errors import (
    CheckpointCorruptError,
    ConfigError,
    CorruptDataError,
    InputError,
    StoreUnavailableError,
)
from dcp_objstore.stores.protocol import IfVersion, Version
from tests.support.programs import (
    FAILED,
    SAVED,
    UNKNOWN,
    Answer,
    Program,
    deleter,
    gone,
    heal,
    pinner,
    reader,
    repairer,
    saver,
    sweeper,
    untrue,
)
from tests.support.schedules import (
    EPOCH,
    HOUR_SECONDS,
    KINDS,
    ROOT,
    Actor,
    Fault,
    Stage,
    World,
    seeded,
)
from tests.test_stores_errors import Scripted


def quietly(world: World, *acts: Program) -> None:
    """What went before, long ago and without faults."""
    for act in acts:
        answer = act(Actor(world, "before"))
        assert answer.word not in (FAILED, UNKNOWN), answer.text
        world.clock.seconds += 72 * HOUR_SECONDS
    world.log.clear()


def empty(world: World) -> None:
    pass


def committed(world: World) -> None:
    quietly(world, saver(overwrite=False))


def replaced(world: World) -> None:
    quietly(world, saver(overwrite=False), saver(overwrite=True))


def deleted(world: World) -> None:
    quietly(world, saver(overwrite=False), deleter(now=False))


def torn(world: World) -> None:
    quietly(world, saver(overwrite=False))
    for name in [
        name for name in world.bucket.keys(ROOT) if name in (MARKER_KEY, DOT_METADATA_KEY)
    ]:
        del world.bucket.objects[ROOT + name]
    world.bucket.landed.clear()


def unpublished(world: World) -> None:
    quietly(world, saver(overwrite=False))
    del world.bucket.objects[ROOT + DOT_METADATA_KEY]


def pinned(world: World) -> None:
    quietly(world, saver(overwrite=False), pinner("paper"))


@dataclass(frozen=True)
class Operation:
    """What meets a fault, and from where it begins."""

    first: Callable[[World], None]
    program: Callable[[], Program]


OPERATIONS = {
    "save": Operation(empty, lambda: saver(overwrite=False)),
    "save over another": Operation(committed, lambda: saver(overwrite=True)),
    "save over a deleted one": Operation(deleted, lambda: saver(overwrite=False)),
    "delete": Operation(committed, lambda: deleter(now=False)),
    "delete now": Operation(committed, lambda: deleter(now=True)),
    "sweep what was replaced": Operation(replaced, sweeper),
    "sweep what was deleted": Operation(deleted, sweeper),
    "sweep a dead save": Operation(torn, sweeper),
    "repair": Operation(unpublished, repairer),
    "pin": Operation(committed, lambda: pinner("paper")),
    "unpin": Operation(pinned, lambda: pinner("paper", remove=True)),
    "load": Operation(committed, lambda: reader),
}


def one_fault(operation: Operation, at: int, fault: Fault | None) -> tuple[World, Answer]:
    """The operation, whose n-th request meets the fault."""
    world = World(at)
    with seeded(at):
        operation.first(world)
        plan = (lambda n, verb, key: fault if n == at else None) if fault else (lambda *_: None)
        answer = operation.program()(Actor(world, "actor", plan))
    return world, answer


def faults_of(operation: Operation) -> Iterator[tuple[int, str, str, Fault]]:
    """Every fault that there is for each of its requests."""
    _, rehearsed = one_fault(operation, 0, None)
    assert rehearsed.word not in (FAILED, UNKNOWN), rehearsed.text
    for at, (verb, key) in enumerate(rehearsed.actor.requests, 1):
        for kind in KINDS:
            for effect in (True, False):
                fault = Fault(kind, effect)
                if fault.fits(verb):
                    yield at, verb, key.removeprefix(ROOT), fault


@pytest.mark.parametrize("name", OPERATIONS)
def test_one_fault_at_any_request_is_answered_truly_and_heals(name: str) -> None:
    operation = OPERATIONS[name]
    tried: Counter[str] = Counter()
    for at, verb, key, fault in faults_of(operation):
        tried[fault.kind] += 1
        where = f"{name}: {fault} at {at}. {verb} {key}"
        world, answer = one_fault(operation, at, fault)
        assert answer.actor.faults, f"{where}: was never met"
        told = f"{where}, {answer.word} {answer.text}\n" + "\n".join(world.log)
        assert answer.word != UNKNOWN, told  # everybody answers again within the deadline
        assert untrue(world, answer) is None, told
        if name.startswith("delete"):
            assert gone(world, answer) is None, told
        if name.startswith("save") and _from_the_commit_on(at, answer.actor):
            assert answer.word == SAVED, told
        assert heal(world) is None, told
    assert set(tried) == set(KINDS)
    assert sum(tried.values()) >= 20


def _from_the_commit_on(at: int, actor: Actor) -> bool:
    """Whether the n-th request was the first PUT of the marker, or came after it."""
    commit = ("put", ROOT + MARKER_KEY)
    return commit in actor.requests[:at]


# --- what our adapter makes of a 200 that is none, over HTTP: `schedules` does the same


@pytest.fixture
def server() -> Iterator[Scripted]:
    found = Scripted()
    yield found
    found.server.shutdown()
    found.server.server_close()


def test_200_with_an_error_body_is_no_success_of_a_put(server: Scripted) -> None:
    """S3 begins to answer CompleteMultipartUpload with 200 before it knows how it will end."""
    answers = {
        ("POST", "?uploads="): _STARTED,
        ("PUT", "partNumber="): (200, {"ETag": '"p"'}, b""),
        ("DELETE", "uploadId="): (204, {}, b""),
    }

    def answer(method: str, target: str, _nth: int) -> tuple[int, dict[str, str], bytes]:
        said = (
            value for (verb, part), value in answers.items() if verb == method and part in target
        )
        return next(said, (200, {}, _FAILED))

    server.answer = answer
    store = server.store()
    for retry in (True, False):
        with pytest.raises(StoreUnavailableError):
            store.put("k", b"x", retry=retry)
    part = np.zeros(5 * 1024 * 1024, np.uint8)
    with pytest.raises(StoreUnavailableError, match="InternalError"):
        store.put_stream(
            "k", iter([part, part[:9]]), part_size_bytes=part.nbytes, max_concurrency=2
        )
    assert [verb for verb, target, _ in server.requests if "uploadId=" in target][-1] == "DELETE"


def test_200_with_an_error_body_is_never_what_was_asked_for(server: Scripted) -> None:
    server.answer = lambda *_: (200, {}, _FAILED)
    store = server.store()
    with pytest.raises(ConfigError, match="does not look like a store"):
        list(store.list())
    store.delete("k")
    body, meta = store.get(MARKER_KEY, max_size_bytes=1000)
    assert (body, meta.version, meta.last_modified) == (_FAILED, Version(None, None), EPOCH)
    assert store.head("k").version == Version(None, None)
    with pytest.raises(CorruptDataError):
        store.get_range("k", 0, 10)
    with pytest.raises(InputError):
        store.put("k", b"x", precondition=IfVersion(Version(None, None)))
    # So whoever opens a checkpoint is told that it is damaged, and whoever saves stops.
    with pytest.raises(CheckpointCorruptError):
        commits.open_committed(store)
    with pytest.raises(StoreUnavailableError, match="does not look like a store"):
        commits.begin(store, overwrite=True)


_FAILED = b"<Error><Code>InternalError</Code><Message>We failed.</Message></Error>"
_STARTED = (
    200,
    {},
    b"<InitiateMultipartUploadResult><UploadId>1</UploadId></InitiateMultipartUploadResult>",
)


# --- several faults, several actors


@dataclass(frozen=True)
class Play:
    """Who acts, and from where it begins."""

    first: Callable[[World], None]
    programs: Callable[[random.Random], dict[str, Program]]


def _deadline(rng: random.Random) -> float:
    return rng.choice([0.0, 60.0])


def _two_writers(rng: random.Random) -> dict[str, Program]:
    return {
        f"writer {number}": saver(overwrite=rng.random() < 0.7, deadline_seconds=_deadline(rng))
        for number in (1, 2)
    }


def _writer_and_deleter(rng: random.Random) -> dict[str, Program]:
    return {
        "writer": saver(overwrite=True, deadline_seconds=_deadline(rng)),
        "deleter": deleter(now=rng.random() < 0.5, deadline_seconds=_deadline(rng)),
    }


def _writer_and_sweeper(rng: random.Random) -> dict[str, Program]:
    return {
        "writer": saver(overwrite=rng.random() < 0.7, deadline_seconds=_deadline(rng)),
        "sweeper": sweeper(_deadline(rng)),
    }


def _deleter_and_sweeper(rng: random.Random) -> dict[str, Program]:
    return {
        "deleter": deleter(now=rng.random() < 0.5, deadline_seconds=_deadline(rng)),
        "sweeper": sweeper(_deadline(rng)),
    }


FIRSTS = (empty, committed, replaced, deleted, torn, unpublished)
CASTS = (_two_writers, _writer_and_deleter, _writer_and_sweeper, _deleter_and_sweeper)

THIRDS: dict[str, Callable[[], Program]] = {
    "reader": lambda: reader,
    "repairer": repairer,
    "pinner": lambda: pinner("paper"),
}


def play(seed: int) -> World:
    """One schedule, all of it drawn from the seed."""
    world = World(seed)
    rng = world.rng
    with seeded(seed):
        rng.choice(FIRSTS)(world)
        cast = rng.choice(CASTS)(rng)
        if rng.random() < 0.5:
            name = rng.choice(list(THIRDS))
            cast[name] = THIRDS[name]()
        share, kinds = rng.choice([0.05, 0.2, 0.5]), rng.sample(KINDS, rng.randint(1, len(KINDS)))
        left = Counter(dict.fromkeys(cast, 12))
        # Within the grace period of 24 h, or beyond it: a paused writer wakes up after a sweep.
        stage = Stage(world, jumps=rng.choice([0.0, 0.1]))

        def planned(name: str) -> Callable[[int, str, str], Fault | None]:
            def plan(_number: int, _verb: str, _key: str) -> Fault | None:
                if not left[name] or rng.random() > share:
                    return None
                left[name] -= 1
                return Fault(rng.choice(kinds), rng.random() < 0.5)

            return plan

        for name, program in cast.items():
            stage.add(name, program, planned(name))
        answers = stage.run()
        for name, answer in answers.items():
            world.log.append(f"{name}: {answer.word} {answer.text}")
        wrong = [why for answer in answers.values() if (why := untrue(world, answer))]
        if "deleter" in answers and (why := gone(world, answers["deleter"])):
            wrong.append(why)
        assert not wrong, _told(world, wrong)
        why = heal(world)
        # What was late has arrived: whoever said that it lost has still lost.
        wrong = [why for answer in answers.values() if (why := untrue(world, answer))]
        assert not why and not wrong, _told(world, [why, *wrong])
    return world


def _told(world: World, wrong: object) -> str:
    return "\n".join([f"seed {world.seed}: {wrong}", *world.log])


def test_random_schedules_are_answered_truly_and_heal() -> None:
    for seed in range(300):
        play(seed)


def test_the_same_seed_gives_the_same_log() -> None:
    seen = set()
    for seed in range(20):
        first, second = play(seed), play(seed)
        assert first.log == second.log
        assert len(first.log) > 10
        seen.add(tuple(first.log))
    assert len(seen) == 20


def test_random_schedules_meet_everything_that_they_are_for() -> None:
    """Or they would prove nothing."""
    left = {*KINDS, "late", "saved", "lost", "unknown", "swept", "done", "whole"}
    for seed in range(300, 600):
        text = "\n".join(play(seed).log)
        left = {word for word in left if word not in text}
        if not left:
            return
    pytest.fail(f"never came up: {left}")


@pytest.mark.campaign
@pytest.mark.timeout(1800)
def test_ten_thousand_random_schedules_are_answered_truly_and_heal() -> None:
    for seed in range(10_000, 20_000):
        play(seed)
