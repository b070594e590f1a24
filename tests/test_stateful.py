"""Saves, loads, deletions, sweeps, repairs and pins in any order, with crashes and faults between
them, always do what a simple model says: a checkpoint is there, or it is not, and it may be pinned.
"""

from __future__ import annotations

import itertools
import random
import secrets
from unittest import mock

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from tests.crash.bucket import Cut, KilledError, When
from tests.support.programs import (
    ABSENT,
    DONE,
    REFUSED,
    SAVED,
    WHOLE,
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
from tests.support.schedules import HOUR_SECONDS, KINDS, Actor, Fault, World

PINS = ("paper", "release")
OPERATIONS: dict[str, Program] = {
    "save": saver(overwrite=False),
    "overwrite": saver(overwrite=True),
    "delete": deleter(now=False),
    "delete now": deleter(now=True),
    "sweep": sweeper(),
    "repair": repairer(),
    "pin": pinner("paper"),
    "unpin": pinner("paper", remove=True),
    "load": reader,
}
NAMES = st.sampled_from(sorted(OPERATIONS))
# More requests than any of them makes; what is cut or meets a fault later, is not.
AT = st.integers(1, 16)


class Checkpoint(RuleBasedStateMachine):
    """One URL.

    Attributes:
        commit_id: of what is there; None: nothing.
        pins: of it.
        begun: a deletion was begun and has not been finished.
        empty: nothing was ever committed or fenced: there is no marker.
    """

    def __init__(self) -> None:
        super().__init__()
        rng = random.Random(0)
        self.ids = mock.patch.object(secrets, "token_hex", lambda size: rng.randbytes(size).hex())
        self.ids.start()
        self.world = World(0)
        self.names = itertools.count()
        self.commit_id: str | None = None
        self.pins: set[str] = set()
        self.begun = False
        self.empty = True

    def teardown(self) -> None:
        try:
            assert heal(self.world) is None
        finally:
            self.ids.stop()

    def act(self, program: Program) -> Answer:
        """Do it without a crash or a fault."""
        answer = program(Actor(self.world, f"actor {next(self.names)}"))
        assert untrue(self.world, answer) is None
        self.world.log.clear()
        return answer

    # --- what is done, and what the model says of it

    @rule(overwrite=st.booleans())
    def save(self, overwrite: bool) -> None:
        answer = self.act(saver(overwrite=overwrite))
        if self.begun:  # a save finishes the deletion
            self.begun, self.commit_id, self.pins = False, None, set()
        if self.commit_id is not None and (self.pins or not overwrite):
            assert answer.word == REFUSED
        else:
            assert answer.word == SAVED
            self.commit_id, self.pins, self.empty = answer.commit_id, set(), False

    @rule()
    def load(self) -> None:
        answer = self.act(reader)
        wanted = ABSENT if self.commit_id is None else WHOLE
        assert (answer.word, answer.commit_id) == (wanted, self.commit_id)

    @rule(now=st.booleans())
    def delete(self, now: bool) -> None:
        answer = self.act(deleter(now=now))
        if self.commit_id is not None and self.pins:
            assert answer.word == REFUSED
        elif self.commit_id is not None or self.begun:
            assert answer.word == DONE
            self.commit_id, self.begun = None, False
        else:
            # With `now`, what an earlier deletion has left to be removed.
            assert answer.word == ABSENT or (now and answer.word == DONE)
        assert gone(self.world, answer) is None

    @rule()
    def sweep(self) -> None:
        answer = self.act(sweeper())
        assert answer.word in {"clean", "swept", "waiting", "mended"}
        self.begun = False
        self.empty = self.world.bucket.marker() is None  # it may have fenced

    @rule()
    def repair(self) -> None:
        answer = self.act(repairer())
        assert answer.word == (ABSENT if self.empty else DONE)
        self.begun = False

    @rule(name=st.sampled_from(PINS), remove=st.booleans())
    def pin(self, name: str, remove: bool) -> None:
        answer = self.act(pinner(name, remove=remove))
        assert answer.word == (DONE if self.commit_id is not None else ABSENT)
        if self.commit_id is not None:
            self.pins = self.pins - {name} if remove else self.pins | {name}

    @rule(hours=st.sampled_from([1, 20, 30, 72]))
    def wait(self, hours: int) -> None:
        self.world.clock.seconds += hours * HOUR_SECONDS

    @rule(
        name=st.sampled_from(sorted(OPERATIONS)), at=AT, when=st.sampled_from(["before", "after"])
    )
    def crash(self, name: str, at: int, when: When) -> None:
        actor = Actor(self.world, f"actor {next(self.names)}", cut=Cut(at, when))
        try:
            answer = OPERATIONS[name](actor)
        except KilledError:
            answer = None
        else:
            assert untrue(self.world, answer) is None
        self._look(name, actor, answer)

    @rule(name=NAMES, at=AT, kind=st.sampled_from(KINDS), effect=st.booleans())
    def fault(self, name: str, at: int, kind: str, effect: bool) -> None:
        met = Fault(kind, effect)
        actor = Actor(
            self.world,
            f"actor {next(self.names)}",
            lambda number, _verb, _key: met if number == at else None,
        )
        answer = OPERATIONS[name](actor)
        assert untrue(self.world, answer) is None
        while self.world.late:
            self.world.arrive()
        assert untrue(self.world, answer) is None
        self._look(name, actor, answer)

    def _look(self, name: str, actor: Actor, answer: Answer | None) -> None:
        """What is there now: the state before, or the one after."""
        self.world.log.clear()
        marker = self.world.bucket.marker()
        landed = {who: commit_id for commit_id, who in self.world.bucket.landed.items()}
        now = marker.commit_id if marker is not None and marker.is_committed else None
        possible = {self.commit_id}
        if name in ("save", "overwrite"):
            possible.add(landed.get(actor.name, self.commit_id))
        if name in ("delete", "delete now") and not self.pins:
            possible.add(None)
        assert now in possible, f"{now} after {name}, not one of {possible}"
        if answer is not None and answer.word == DONE and name.startswith("delete"):
            assert now is None
        pins = set(marker.pins) if marker is not None and now is not None else set()
        if now == self.commit_id:
            changed = pins ^ self.pins if now is not None else set()
            assert changed <= ({"paper"} if name in ("pin", "unpin") else set())
        else:
            assert not pins
        # Nobody begins a deletion but a deletion.
        begun = marker is not None and marker.state == "deleting"
        assert not begun or self.begun or name in ("delete", "delete now")
        self.commit_id, self.pins, self.begun = now, pins, begun
        self.empty = marker is None

    @invariant()
    def committed_is_whole(self) -> None:
        self.world.bucket.check()


def explore(examples: int, steps: int, *, derandomize: bool) -> None:
    run_state_machine_as_test(
        Checkpoint,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            derandomize=derandomize,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_any_order_of_operations_crashes_and_faults_does_what_the_model_says() -> None:
    explore(100, 40, derandomize=True)


@pytest.mark.campaign
@pytest.mark.timeout(3600)
def test_any_long_order_of_operations_crashes_and_faults_does_what_the_model_says() -> None:
    explore(2000, 200, derandomize=False)
