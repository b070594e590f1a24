"""A sweep of a run in the model of `claim`: steps that never count again are deleted (rule 9)."""

from __future__ import annotations

from collections.abc import Iterator

from tests.model.checker import Weak
from tests.model.claim import Job, Me, Move, Run

SWEEPS_BY_NUMBER = "a sweep deletes what is of an earlier claim than the last"


class RunSweeper(Job):
    """Anybody: reads the base, and deletes a step of an earlier claim, by the marker that it read.

    Args:
        step: the one that it looks at.
    """

    def __init__(self, step: int, *, weak: Weak = frozenset()) -> None:
        super().__init__(f"sweep {step}", weak=weak)
        self.step = step

    def start(self) -> Me:
        return Me("read_claim")

    def read_claim(self, me: Me, run: Run) -> Iterator[Move]:
        after = me._replace(at="read_step", claim=run.claim)
        yield self.event("get", "_CLAIM", str(run.claim[:2])), after, run

    def read_step(self, me: Me, run: Run) -> Iterator[Move]:
        found = run.steps[self.step]
        base = me.claim.number if SWEEPS_BY_NUMBER in self.weak else me.claim.base
        after = self.end("clean")
        if found and found.commit and found.claim < base:
            after = me._replace(at="delete", token=found)
        yield self.event("get", f"step {self.step}", str(found)), after, run

    def delete(self, me: Me, run: Run) -> Iterator[Move]:
        done = run.steps[self.step] == me.token
        steps = run.steps
        if done:
            gone = me.token._replace(commit="")
            steps = (*steps[: self.step], gone, *steps[self.step + 1 :])
        event = self.event("delete", f"step {self.step}", "ok" if done else "refused")
        yield event, self.end("swept"), run._replace(steps=steps)
