"""What a user sees of one URL, to which operations that follow one another are compared."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.crash.process import KilledError
from tests.model.faults import Fault
from tests.model.programs import (
    ABSENT,
    DELETED,
    DONE,
    NOTHING,
    REFUSED,
    SUCCESS,
    WHOLE,
    Answer,
    Program,
    deleter,
    pinner,
    reader,
    repairer,
    saver,
    sweeper,
    untrue,
)
from tests.model.stage import Actor, Plan, Stage, at_request, no_faults

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


@dataclass
class Reference:
    """One URL, as a user sees it: a checkpoint is there, or it is not, and it may be pinned.

    Attributes:
        stage: where the operations run.
        commit_id: of what is there; None: nothing.
        pins: of it.
        begun: a deletion was begun and has not been finished.
        empty: nothing was ever committed or fenced: there is no marker.
    """

    stage: Stage
    commit_id: str | None = None
    pins: frozenset[str] = frozenset()
    begun: bool = False
    empty: bool = True
    done: list[str] = field(default_factory=list)

    def act(self, program: Program, plan: Plan = no_faults) -> Answer:
        self.done.append("")
        actor = Actor(self.stage, f"actor {len(self.done)}", plan, save=len(self.done))
        try:
            answer = program(actor)
        except KilledError:
            return Answer("crashed", actor)
        assert untrue(self.stage, answer) is None, f"{untrue(self.stage, answer)}"
        return answer

    def save(self, *, overwrite: bool) -> None:
        answer = self.act(saver(overwrite=overwrite))
        if self.commit_id is not None and (self.pins or not overwrite):
            assert answer.word == REFUSED, answer
        else:  # where a deletion was begun, it finishes that
            assert answer.word == SUCCESS, answer
            self.commit_id, self.pins = answer.commit_id, frozenset()
            self.empty = self.begun = False

    def load(self) -> None:
        answer = self.act(reader)
        wanted = ABSENT if self.commit_id is None else WHOLE
        assert (answer.word, answer.commit_id) == (wanted, self.commit_id), answer

    def delete(self, *, now: bool) -> None:
        answer = self.act(deleter(now=now))
        if self.commit_id is not None and self.pins:
            assert answer.word == REFUSED, answer
        elif self.commit_id is not None or self.begun:
            assert answer.word == DELETED, answer
            self.commit_id, self.begun = None, False
        else:
            # With `now`, what an earlier deletion has left to be removed.
            assert answer.word == NOTHING or (now and answer.word == DELETED), answer

    def sweep(self) -> None:
        answer = self.act(sweeper())
        assert answer.word in {"clean", "swept", "waiting", "mended"}, answer
        self.begun = False
        self.empty = self.stage.bucket.marker() is None  # it may have fenced

    def repair(self) -> None:
        answer = self.act(repairer())
        assert answer.word == (ABSENT if self.empty else DONE), answer
        self.begun = False

    def pin(self, name: str, *, remove: bool) -> None:
        answer = self.act(pinner(name, remove=remove))
        assert answer.word == (DONE if self.commit_id is not None else ABSENT), answer
        if self.commit_id is not None:
            self.pins = self.pins - {name} if remove else self.pins | {name}

    def meet(self, name: str, at: int, fault: Fault) -> None:
        """An operation, whose n-th request meets a fault or a crash."""
        answer = self.act(OPERATIONS[name], at_request(at, fault))
        while self.stage.late:
            self.stage.arrive()
        assert untrue(self.stage, answer) is None, f"{untrue(self.stage, answer)}"
        self._look(name, answer)

    def _look(self, name: str, answer: Answer) -> None:
        """What is there now: the state before, or the one after."""
        marker = self.stage.bucket.marker()
        landed = {who: commit_id for commit_id, who in self.stage.bucket.landed.items()}
        now = marker.commit_id if marker is not None and marker.is_committed else None
        possible = {self.commit_id}
        if name in ("save", "overwrite"):
            possible.add(landed.get(answer.actor.name, self.commit_id))
        if name in ("delete", "delete now") and not self.pins:
            possible.add(None)
        assert now in possible, f"{now} after {name}, not one of {possible}"
        assert answer.word not in (ABSENT, NOTHING) or self.commit_id is None, answer
        pins = frozenset(marker.pins) if marker is not None and now is not None else frozenset()
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
