"""One wrong answer anywhere costs no step, brings none back, and makes no success of what failed.

For each operation on a run and each request that it sends, that one answer is a page of HTML, a
404, empty, cut short, another object's, a 403, a reset or a 500. Afterwards what was acknowledged
counts and can be loaded, what had stopped counting does not count, an operation that returned has
told the truth, and a second try ends well. `python -m tests.faults.test_one_wrong_answer` runs all
of it in two processes, and prints the counts.
"""

from __future__ import annotations

import multiprocessing
import random
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from unittest import mock

import pytest
import torch

import dcp_objstore as dos
from dcp_objstore.checkpoint.claim import RunClaim
from dcp_objstore.errors import DcpObjstoreError
from dcp_objstore.stores.retries import RetryPolicy
from tests.crash.jobs import in_memory
from tests.crash.judging import quiet
from tests.crash.process import here
from tests.support.campaign import cases
from tests.support.memory_store import Bucket
from tests.support.wrong_answers import Asked, Confused, Wrong, every_wrong

RUN = "s3://wrong/run"
Steps = dict[str, int]  # what a step holds, by its name
# Saved in this order. One more was left by a job that was superseded, and one job has gone back.
STEPS = {f"step-{number}": number for number in (10, 20, 30)}
LEFT = {"step-5", "step-40"}


def state(value: int) -> dict[str, Any]:
    return {"w": torch.full((4,), value)}


def save(step: int, claim: RunClaim | None, value: int | None = None, **settings: Any) -> None:
    value = step if value is None else value
    dos.save(state(value), f"{RUN}/step-{step}", claim=claim, progress=False, **settings)


def loaded(step: str) -> int:
    found = state(-1)
    dos.load(found, f"{RUN}/{step}", progress=False)
    [value] = set(found["w"].tolist())
    return int(value)


def manager(**settings: Any) -> dos.CheckpointManager:
    return dos.CheckpointManager(RUN, sweep=False, **settings)


def counting() -> Steps:
    """The steps that count, and what each holds."""
    try:
        names = [step.name for step in dos.steps(RUN)]
    except DcpObjstoreError as error:
        raise AssertionError(f"the run cannot be listed: {error}") from error
    return {name: _holds(name, _objects(name)) for name in names}


def _objects(name: str) -> tuple[tuple[str, bytes], ...]:
    prefix = f"run/{name}/"
    there = sorted(here.bucket.objects.items())
    return tuple((key, body) for key, (body, _) in there if key.startswith(prefix))


@lru_cache(maxsize=4096)
def _holds(name: str, _: object) -> int:
    """Load a step. The same objects need not be loaded twice."""
    return loaded(name)


@dataclass(frozen=True)
class Operation:
    """What is done to the run.

    Attributes:
        name: of the operation.
        act: does it, and returns what it says.
        holds: whether what it said is true, with the steps that count afterwards.
        allowed: whether these steps may count after it has failed. Default: those before and those
            after.
        again: does it a second time. Default: `act`.
    """

    name: str
    act: Callable[[], Any]
    holds: Callable[[Any, Steps], bool]
    allowed: Callable[[Steps], bool] = lambda steps: steps == STEPS
    again: Callable[[], Any] | None = None


def claim_and_save(**settings: Any) -> RunClaim:
    claim = dos.claim_run(RUN)
    save(31, claim, **settings)
    return claim


def train() -> tuple[int | None, int]:
    """Resume, save some steps, keep two: what a job does. Returns where it began."""
    with manager(keep=dos.KeepLatest(2)) as run:
        begin = run.load(state(0))
        assert run.last_resume is not None
        for step in range(31, 35):
            run.save(step, state(step))
        return begin, len(run.last_resume.skipped)


def trained(steps: Steps) -> bool:
    """What one job has saved, and what it or its retention has left of the rest, in order."""
    every = [*STEPS.values(), *range(31, 35)]
    values = sorted(steps.values())
    newest = every.index(values[-1]) if values else -1
    kept = every[max(0, newest - 1) : newest + 1]
    return newest >= 2 and set(kept) <= set(values) <= set(every)


def go_back() -> int | None:
    with manager() as run:
        begin = run.load(state(0), step=10)
        run.save(11, state(11))
        return begin


WENT_BACK = {"step-10": 10, "step-11": 11}


def follow(**settings: Any) -> list[str]:
    steps = dos.follow(RUN, timeout_seconds=0, poll_seconds=0.001, **settings)
    return [step.name for step in steps]


def swept() -> Any:
    here.bucket.age(days=3)
    return dos.sweep(RUN)


def deleted(**settings: Any) -> Any:
    return dos.delete(f"{RUN}/step-10", **settings)


def deleted_again(**settings: Any) -> None:
    with suppress(dos.errors.CheckpointNotFoundError):  # the first try has done it
        deleted(**settings)


WITH_31 = {**STEPS, "step-31": 31}
WITHOUT_10 = {name: value for name, value in STEPS.items() if name != "step-10"}

OPERATIONS = [
    Operation(
        "claim and save",
        claim_and_save,
        lambda _, steps: steps == WITH_31,
        lambda steps: steps in (STEPS, WITH_31),
        lambda: claim_and_save(overwrite=True),
    ),
    Operation(
        "save over another",
        lambda: save(30, dos.claim_run(RUN), 300, overwrite=True),
        lambda _, steps: steps == {**STEPS, "step-30": 300},
        lambda steps: steps in (STEPS, {**STEPS, "step-30": 300}),
    ),
    Operation("load", lambda: loaded("step-30"), lambda value, _: value == 30),
    Operation("claim_run", lambda: dos.claim_run(RUN), lambda claim, _: claim.number > 0),
    Operation(
        "a job with retention",
        train,
        lambda said, steps: said == (30, 0) and set(steps.values()) >= {33, 34} and trained(steps),
        trained,
        lambda: None,
    ),
    Operation(
        "go back",
        go_back,
        lambda _, steps: steps == WENT_BACK,
        lambda steps: steps in (STEPS, WENT_BACK),
    ),
    Operation("follow", follow, lambda names, _: names == list(STEPS)),
    Operation("follow with a pin", lambda: follow(pin="me"), lambda names, _: names == list(STEPS)),
    Operation("sweep", swept, lambda report, _: report.damaged == ()),
    Operation(
        "delete",
        deleted,
        lambda _, steps: steps == WITHOUT_10,
        lambda steps: steps in (STEPS, WITHOUT_10),
        deleted_again,
    ),
    Operation(
        "delete with a grace period",
        lambda: deleted(grace_seconds=3600),
        lambda _, steps: steps == WITHOUT_10,
        lambda steps: steps in (STEPS, WITHOUT_10),
        lambda: deleted_again(grace_seconds=3600),
    ),
    Operation(
        "verify_run",
        lambda: [report.ok for report in dos.verify_run(RUN, progress=False)],
        lambda oks, _: oks == [True] * 3,
    ),
    Operation(
        "list",
        lambda: [
            one.name for one in dos.list_checkpoints(RUN).checkpoints if one.state == "committed"
        ],
        lambda names, _: names == list(STEPS),
    ),
    Operation(
        "steps", lambda: [one.name for one in dos.steps(RUN)], lambda names, _: names == list(STEPS)
    ),
]


@contextmanager
def a_run() -> Iterator[Bucket]:
    """The run, as each operation finds it."""
    with in_memory(), quiet():
        bucket = Bucket()
        work(bucket)
        zombie = dos.claim_run(RUN)
        save(10, zombie)
        dos.claim_run(RUN)
        with pytest.raises(dos.errors.SupersededError):
            save_late(5, zombie)
        with manager() as run:
            run.load(state(0))
            run.save(40, state(40))
            run.load(state(0), step=10)
            run.save(20, state(20))
            run.save(30, state(30))
        bucket.age(days=2)
        assert counting() == STEPS
        yield bucket


@pytest.fixture(scope="module")
def first() -> Iterator[Bucket]:
    """The run."""
    with a_run() as bucket:
        yield bucket


def save_late(step: int, zombie: RunClaim) -> None:
    """A save that a superseded job had begun."""
    save(step, zombie)


def work(bucket: Bucket, at: Asked | None = None, wrong: Wrong = Wrong.ERROR) -> Confused:
    """From now on this is what is worked on, as a new process."""
    process = Confused(bucket, at, wrong)
    here.bucket, here.process = bucket, process
    return process


def committed() -> list[str]:
    return [one.name for one in dos.list_checkpoints(RUN).checkpoints if one.state == "committed"]


def attempt(act: Callable[[], Any]) -> tuple[Any, DcpObjstoreError | None]:
    try:
        return act(), None
    except DcpObjstoreError as error:
        return None, error


def settle() -> None:
    """Wait for the deletions that a manager has left behind: after an error it waits for none.

    While they go on, a step can be listed and gone when it is loaded.
    """
    for thread in threading.enumerate():
        if thread.name in {"dcp_objstore-upkeep", "dcp_objstore-sweep"}:
            thread.join(timeout=60)
            assert not thread.is_alive(), f"{thread.name} does not end"


# How an operation ends that met one wrong answer; otherwise what is wrong is said.
RIGHT, REFUSED, NOT_MET = "right", "refused", "not met"


def outcome(first: Bucket, operation: Operation, at: Asked, wrong: Wrong) -> str:
    """Do it with this one wrong answer; return how it ended."""
    bucket = first.copy()
    process = work(bucket, at, wrong)
    said, error = attempt(operation.act)
    settle()
    if not process.met:
        return NOT_MET  # other threads were faster
    work(bucket)
    try:
        steps = counting()
        if error is None:
            assert operation.holds(said, steps), f"false success: {said!r}; {steps} count"
        else:
            assert operation.allowed(steps), f"{steps} count, after {error!r}"
        said = (operation.again or operation.act)()
        steps = counting()
        assert operation.again or operation.holds(said, steps), f"then {said!r}; {steps} count"
        dos.claim_run(RUN)
        assert counting() == steps, f"{steps} counted before another claim"
    except (AssertionError, DcpObjstoreError) as harm:
        return repr(harm)
    return RIGHT if error is None else REFUSED


# By default a part of all cases is run, another one for each operation.
_SHARES = 96


def share(first: Bucket, operation: Operation, number: int) -> Iterator[tuple[str, str]]:
    """Run a share of all wrong answers; yield each, and how the operation ended."""
    rehearsal = work(first.copy())
    said = operation.act()
    asked = list(rehearsal.asked)
    assert operation.holds(said, counting())
    every = random.Random(operation.name).sample(list(every_wrong(asked)), k=9 * len({*asked}))
    for at, wrong in every[number::_SHARES]:
        yield f"{at.verb} {at.key} {at.nth}, {wrong.value}", outcome(first, operation, at, wrong)


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda one: one.name)
@pytest.mark.parametrize("number", cases(range(_SHARES), default=[0]))
def test_one_wrong_answer_anywhere_does_no_harm(first, operation, number):
    ends = dict(share(first, operation, number))
    harm = [f"{at}: {end}" for at, end in ends.items() if end not in (RIGHT, REFUSED, NOT_MET)]
    assert not harm, "\n".join(harm)


def _count(name: str) -> tuple[str, Counter[str], list[str]]:
    """Run all of one operation, in a process."""
    counts, harm = Counter[str](), []
    [operation] = [one for one in OPERATIONS if one.name == name]
    pause_seconds = RetryPolicy.pause_seconds

    def soon(policy: RetryPolicy, retry: int) -> float:
        return pause_seconds(policy, retry) / 40  # as in all tests

    with mock.patch.object(RetryPolicy, "pause_seconds", soon), a_run() as bucket:
        for number in range(_SHARES):
            for at, end in share(bucket, operation, number):
                counts[end if end in (RIGHT, REFUSED, NOT_MET) else "harm"] += 1
                if end not in (RIGHT, REFUSED, NOT_MET):
                    harm.append(f"{name}: {at}: {end}")
    return name, counts, harm


def main() -> int:
    """Print a table of all operations, or of those that were named."""
    names = sys.argv[1:] or [one.name for one in OPERATIONS]
    print(
        "| operation | wrong answers | right all the same | refused | harm |\n|---|---|---|---|---|"
    )
    harmful, total = 0, Counter[str]()
    with multiprocessing.get_context("spawn").Pool(2, maxtasksperchild=1) as pool:
        for name, counts, harm in pool.imap_unordered(_count, names):
            total += counts
            harmful += len(harm)
            print(_row(name, counts), *harm, sep="\n", flush=True)
    print(_row("all", total))
    return 1 if harmful else 0


def _row(name: str, counts: Counter[str]) -> str:
    met = counts[RIGHT] + counts[REFUSED] + counts["harm"]
    return f"| {name} | {met} | {counts[RIGHT]} | {counts[REFUSED]} | {counts['harm']} |"


if __name__ == "__main__":
    raise SystemExit(main())
