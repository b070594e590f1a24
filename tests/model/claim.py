"""A second model: the claim of a run, which keeps a job that was superseded from adding steps.

Each step is one checkpoint, and what is known of its commit from the other model is one atomic
change here. `_CLAIM`, at the run, says which claim is the current one and which is the base: the
oldest whose steps count. They differ only while a job takes the run over.

 C1. Every marker carries the claim of the job that wrote it.
 C2. A job takes over: conditional PUT of `_CLAIM` with the next number and all else as it is; where
    a job was going back, see whether its commit is there, and **fence** that step if not, with the
    new number, which jobs of earlier claims respect; list the steps that count; **adopt** each,
    which rewrites its marker with the new claim (refused: list again); conditional PUT of `_CLAIM`
    with base = number, and only then it begins to train. Refused there: somebody else takes over;
    begin again, or give up.
    A job that has gone back to an earlier step does the same before its next save, but only if
    `_CLAIM` still has its own number, and it does not adopt the steps later than that one. Its last
    PUT leaves the base as it is and names the step that it saves next: the commit of that step,
    whose marker has the number as its base, makes that the base of the run. Then comes another
    PUT of `_CLAIM`, which says so itself. The save may be refused, and the job may end anywhere. If
    it goes back once more, it fences what it named before, and takes the next number after that.
 C3. A step counts if the claim of its marker is at least the base. Who lists reads `_CLAIM`, and
    the marker that decides for a job that was going back, before and after, and lists again if they
    have changed.
 C4. After its commit a job reads `_CLAIM`. Its own number still: success. Otherwise superseded.
 C5. Nobody replaces or deletes a marker of a later claim than its own. One of an earlier claim
     does not count once a job trains, so it is replaced unasked, also when it beat a commit.

`SKETCH` is the protocol as it was first proposed: without adopting, `_CLAIM` records the last step
of each ended claim; a lister reads it once, and C5 is missing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from tests.model.checker import Weak
from tests.model.world import Event

BY_NUMBER = "the last step instead of adopting"
REPLACES = "later claims are replaced"
BLOCKED = "leftovers of earlier claims are respected"
LISTS_ONCE = "listing without reading _CLAIM again"
NO_READ_BACK = "success without reading _CLAIM"
EARLY = "base moves at once"
STEALS = "who was superseded goes back all the same"
KEEPS_LATER = "going back adopts the later steps too"
BEFORE_COMMIT = "going back moves the base before the commit"
UNMARKED = "the commit of a job that went back does not say so"
UNREAD_BACK = "a claim does not look for the commit of a job that went back"
UNFENCED_BACK = "a claim does not fence the step of a job that goes back"
FENCED_ONCE = "the fence of a claim stops only what has begun"
MARKER_ONCE = "listing without reading again whether a job has gone back"
EVERY_COMMIT = "every commit after going back says so"
FENCED_ALIKE = "going back once more has the number of its fence"
MUTANTS = [
    BY_NUMBER, REPLACES, BLOCKED, LISTS_ONCE, NO_READ_BACK, EARLY, STEALS, KEEPS_LATER,
    BEFORE_COMMIT, UNMARKED, UNREAD_BACK, UNFENCED_BACK, FENCED_ONCE, MARKER_ONCE, EVERY_COMMIT,
    FENCED_ALIKE,
]  # fmt: skip
SKETCH = frozenset({BY_NUMBER, REPLACES, BLOCKED, LISTS_ONCE})


class Step(NamedTuple):
    """A marker. The commit stays through adoption; every write is new.

    Attributes:
        commit: empty in a tombstone.
        base: what this commit makes the base of the run, or the claim that has fenced it since.
    """

    commit: str
    claim: int
    base: int = 0


class Claim(NamedTuple):
    number: int
    base: int
    ended: tuple[tuple[int, int], ...] = ()  # in the sketch: claim, its last step
    back: tuple[int, int] | None = None  # the step whose commit raises the base, and to what


Steps = tuple[Step | None, ...]


class Run(NamedTuple):
    claim: Claim
    steps: Steps
    acknowledged: frozenset[str] = frozenset()  # commits whose jobs were told that they stand
    kept: frozenset[str] = frozenset()  # what counted when the last takeover was complete
    training: int = 1  # the claim of that takeover
    dropped: frozenset[str] = frozenset()  # what was left when a job went back


class Me(NamedTuple):
    at: str | None
    claim: Claim | None = None
    token: Any = None
    steps: Steps = ()
    start: Run | None = None
    step: int = 0
    tries: int = 1
    back: int | None = None  # the claim in which it went back
    goes_back: bool = False  # with its next commit
    base: int = 0  # of the run, as it has found out
    answer: str | None = None
    gave_up: bool = False


Move = tuple[Event, Me, Run]


def base_of(claim: Claim, step: Step | None) -> int:
    """The base, by `_CLAIM` and the marker that it leads to."""
    back = claim.back
    return back[1] if back is not None and step and step.base == back[1] else claim.base


def base_in(run: Run) -> int:
    """The base as it is now."""
    return base_of(run.claim, run.steps[run.claim.back[0]] if run.claim.back else None)


def counting(claim: Claim, base: int, steps: Steps, weak: frozenset[str]) -> dict[int, Step]:
    """The steps that count."""
    ended = dict(claim.ended)
    there = {n: s for n, s in enumerate(steps) if s and s.commit}
    if BY_NUMBER in weak:
        last = len(steps)
        return {n: s for n, s in there.items() if n <= ended.get(s.claim, last)}
    return {n: s for n, s in there.items() if s.claim >= base}


class Job:
    """Saves steps, one after the other, and may delete one.

    Args:
        name: of the job.
        number: its claim; None: it has to take the run over first.
        deletes: a step that its retention removes at last.
        goes_back: a step that it goes back to when it has saved, to save the later ones again.
        again: the first of those. Default: the next one.
    """

    def __init__(
        self,
        name: str,
        number: int | None = None,
        *,
        saves: int = 1,
        deletes: int | None = None,
        goes_back: int | None = None,
        again: int | None = None,
        weak: frozenset[str] = frozenset(),
    ) -> None:
        self.name, self.number, self.saves, self.deletes = name, number, saves, deletes
        self.goes_back = goes_back
        self.again = (goes_back or 0) + 1 if again is None else again
        self.weak = weak

    def start(self) -> Me:
        if self.number is None:
            return Me("look")
        return Me("begin", Claim(self.number, self.number), step=1)

    def event(self, verb: str, kind: str, outcome: str = "ok") -> Event:
        return Event(self.name, verb, kind, "", outcome)

    def moves(self, me: Me, run: Run) -> Iterator[Move]:
        if me.at is not None:
            yield from getattr(self, me.at)(me, run)

    def end(self, answer: str) -> Me:
        return Me(None, answer=answer)

    def wrong(self, me: Me, run: Run) -> str | None:
        return me.answer if me.answer and me.answer.startswith("wrong") else None

    # --- C2

    def look(self, me: Me, run: Run) -> Iterator[Move]:
        yield (
            self.event("get", "_CLAIM", str(run.claim[:2])),
            me._replace(at="claim", claim=run.claim),
            run,
        )

    def claim(self, me: Me, run: Run) -> Iterator[Move]:
        if run.claim != me.claim:
            yield self.event("put", "_CLAIM", "refused"), self.once_more(me), run
            return
        number = run.claim.number + 1
        base = number if EARLY in self.weak else run.claim.base
        mine = run.claim._replace(number=number, base=base)
        after = me._replace(at="settle" if mine.back else "list", claim=mine, base=base)
        yield self.event("put", "_CLAIM", f"{mine[:2]}"), after, run._replace(claim=mine)

    def settle(self, me: Me, run: Run) -> Iterator[Move]:
        n, _ = me.claim.back
        found = run.steps[n]
        base = me.claim.base if UNREAD_BACK in self.weak else base_of(me.claim, found)
        after = me._replace(at="fence", token=found)
        if base != me.claim.base or UNFENCED_BACK in self.weak:
            after = me._replace(at="list", base=base)
        yield self.event("get", f"step {n}", str(found)), after, run

    def fence(self, me: Me, run: Run) -> Iterator[Move]:
        n, _ = me.claim.back
        found = run.steps[n]
        event = self.event("fence", f"step {n}", "ok" if found == me.token else "refused")
        if found == me.token:
            number = 0 if FENCED_ONCE in self.weak else me.claim.number
            fenced = (found or Step("", 0))._replace(base=number)
            again = me.back is not None and FENCED_ALIKE not in self.weak
            after = me._replace(at="renumber" if again else "list", token=None)
            yield event, after, run._replace(steps=_with(run.steps, n, fenced))
        else:
            yield event, me._replace(at="settle", token=None), run

    def renumber(self, me: Me, run: Run) -> Iterator[Move]:
        """The fence of a job that goes back once more is not to pass for its next commit."""
        if run.claim != me.claim:
            yield self.event("put", "_CLAIM", "refused"), self.once_more(me), run
            return
        mine = run.claim._replace(number=run.claim.number + 1)
        after = me._replace(at="list", claim=mine)
        yield self.event("put", "_CLAIM", f"{mine[:2]}"), after, run._replace(claim=mine)

    def look_back(self, me: Me, run: Run) -> Iterator[Move]:
        event = self.event("get", "_CLAIM", f"{run.claim[:2]}, goes back")
        if run.claim.number != me.claim.number and STEALS not in self.weak:
            yield event, self.end("superseded"), run
        else:
            after = Me("claim", run.claim, back=me.claim.number, tries=me.tries)
            yield event, after, run

    def once_more(self, me: Me) -> Me:
        if me.back is not None:
            return self.end("beaten")
        return Me("look", tries=me.tries - 1) if me.tries else self.end("beaten")

    def list(self, me: Me, run: Run) -> Iterator[Move]:
        event = self.event("list", "steps", _names(run.steps))
        if any(step and step.claim > me.claim.number for step in run.steps):
            yield event, self.end("beaten"), run
            return
        after = me._replace(at="complete", steps=run.steps)
        if BY_NUMBER not in self.weak and self.next_to_adopt(me, run.steps) is not None:
            after = after._replace(at="adopt")
        yield event, after, run

    def left(self, me: Me, n: int) -> bool:
        """Whether the job has gone back past this step."""
        return me.back is not None and self.goes_back is not None and n > self.goes_back

    def next_to_adopt(self, me: Me, steps: Steps) -> int | None:
        for n, step in counting(me.claim, me.base, steps, self.weak).items():
            if step.claim < me.claim.number and (not self.left(me, n) or KEEPS_LATER in self.weak):
                return n
        return None

    def adopt(self, me: Me, run: Run) -> Iterator[Move]:
        n = self.next_to_adopt(me, me.steps)
        assert n is not None
        old = me.steps[n]
        assert old
        mine = old._replace(claim=me.claim.number)
        seen = _with(me.steps, n, mine)
        following = me._replace(steps=seen)
        if self.next_to_adopt(me, seen) is None:
            following = me._replace(at="complete", steps=seen)
        if run.steps[n] == old:
            yield (
                self.event("adopt", f"step {n}"),
                following,
                run._replace(steps=_with(run.steps, n, mine)),
            )
        else:
            yield self.event("adopt", f"step {n}", "refused"), me._replace(at="list", steps=()), run

    def complete(self, me: Me, run: Run) -> Iterator[Move]:
        if run.claim != me.claim:
            yield self.event("put", "_CLAIM", "refused"), self.once_more(me), run
            return
        number = me.claim.number
        mine = Claim(number, number)
        if me.back is not None and BEFORE_COMMIT not in self.weak:
            mine = Claim(number, me.base, back=(self.again, number))
        if BY_NUMBER in self.weak:
            seen = counting(me.claim, me.base, me.steps, self.weak)
            last = max((n for n, s in seen.items() if s.claim < number), default=0)
            known = dict(me.claim.ended)
            ended = {e: known.get(e, last) for e in range(1, number)}
            mine = Claim(number, number, tuple(sorted(ended.items())))
        found = counting(mine, mine.base, me.steps, self.weak)
        kept = frozenset(step.commit for step in found.values())
        last = max(found, default=0) if me.back is None else self.goes_back or 0
        after = Me("begin", mine, step=last + 1, back=me.back)
        if me.back is not None:
            after = after._replace(step=self.again, goes_back=True, tries=me.tries)
        if after.step == len(run.steps):
            after = self.end("trains")
        if me.back is not None and me.back != run.training:
            after = self.end(f"wrong: {self.name} was superseded, and leaves what others saved")
        if kept & run.dropped:
            after = self.end(f"wrong: {_missing(kept & run.dropped, set())} was left, and counts")
        if not run.acknowledged <= kept:
            lost = _missing(run.acknowledged, kept)
            after = self.end(f"wrong: {lost} was acknowledged, and is lost")
        told = f"{mine[:2]}, trains from step {last}"
        done = run._replace(claim=mine, kept=kept, training=number)
        yield self.event("put", "_CLAIM", told), after, done

    # --- saving: C1, C4, C5

    def begin(self, me: Me, run: Run) -> Iterator[Move]:
        found = run.steps[me.step]
        event = self.event("get", f"step {me.step}", str(found))
        mine = me.claim.number
        if found and max(found.claim, found.base) > mine and REPLACES not in self.weak:
            yield event, self.end("superseded"), run
        elif found and found.commit and (found.claim == mine or BLOCKED in self.weak):
            answer = "refused"
            if run.training == mine and found.claim < mine:
                answer = f"wrong: {self.name} trains, and is kept from step {me.step} by {found}"
            yield event, self.end(answer), run
        else:
            yield event, me._replace(at="commit", token=found), run
        if me.goes_back:
            refused = self.event("get", f"step {me.step}", "the save is refused")
            yield refused, self.end("refused"), run
            yield refused, me._replace(at="resume", goes_back=False), run
            if me.tries:  # it goes back once more
                yield refused, Me("look_back", me.claim, tries=me.tries - 1), run

    def resume(self, me: Me, run: Run) -> Iterator[Move]:
        """After a save that was refused: go on from the newest step."""
        found = counting(run.claim, base_in(run), run.steps, self.weak)
        after = me._replace(at="begin", step=max(found, default=0) + 1)
        if after.step == len(run.steps):
            after = self.end("trains")
        yield self.event("list", "steps", _names(run.steps)), after, run

    def commit(self, me: Me, run: Run) -> Iterator[Move]:
        found = run.steps[me.step]
        if found == me.token:
            says = me.goes_back or (EVERY_COMMIT in self.weak and me.back is not None)
            base = me.claim.number if says and UNMARKED not in self.weak else 0
            mine = Step(self.commit_of(me), me.claim.number, base)
            after = me._replace(at="verify", token=None)
            done = run._replace(steps=_with(run.steps, me.step, mine))
            if me.goes_back and run.training == me.claim.number:
                before = counting(run.claim, base_in(run), run.steps, self.weak)
                leaves = {step.commit for n, step in before.items() if n > (self.goes_back or 0)}
                done = done._replace(
                    dropped=run.dropped | leaves,
                    acknowledged=run.acknowledged - leaves,
                    kept=run.kept - leaves,
                )
            yield self.event("commit", f"step {me.step}"), after, done
        elif found and max(found.claim, found.base) < me.claim.number and BLOCKED not in self.weak:
            again = me._replace(token=found)
            yield self.event("commit", f"step {me.step}", f"refused: {found}"), again, run
        else:
            answer = "lost"
            latest = max(found.claim, found.base) if found else run.training
            if latest < run.training == me.claim.number:
                answer = f"wrong: {self.name} trains, and loses step {me.step} to {found}"
            yield self.event("commit", f"step {me.step}", "refused"), self.end(answer), run

    def commit_of(self, me: Me) -> str:
        return f"{self.name}/{me.step}" + ("" if me.back is None else " again")

    def verify(self, me: Me, run: Run) -> Iterator[Move]:
        event = self.event("get", "_CLAIM", str(run.claim[:2]))
        commit = self.commit_of(me)
        if run.claim.number != me.claim.number and NO_READ_BACK not in self.weak:
            yield event, self.end("superseded"), run
        elif run.training > me.claim.number and commit not in run.kept:
            yield event, self.end(f"wrong: {commit} does not count, and is acknowledged"), run
        elif me.goes_back:
            yield event, me._replace(at="raise_base"), run
            yield self.event("end", "", "it dies before the base rises"), self.end("died"), run
        else:
            run = run._replace(acknowledged=run.acknowledged | {commit})
            after = self.end("saved")
            if me.step < self.saves and me.step + 1 < len(run.steps):
                after = me._replace(at="begin", step=me.step + 1)
            elif self.goes_back is not None and me.back is None:
                after = me._replace(at="look_back")
            elif self.deletes is not None:
                after = me._replace(at="look_at_old")
            yield event, after, run

    def raise_base(self, me: Me, run: Run) -> Iterator[Move]:
        mine = Claim(me.claim.number, me.claim.number)
        if run.claim.number != mine.number:
            yield self.event("put", "_CLAIM", "refused"), self.end("superseded"), run
            return
        after = me._replace(at="verify", claim=mine, goes_back=False)
        yield self.event("put", "_CLAIM", f"{mine[:2]}"), after, run._replace(claim=mine)
        yield (
            self.event("put", "_CLAIM", "no answer"),
            me._replace(at="verify", goes_back=False),
            run,
        )

    # --- deleting: C5

    def look_at_old(self, me: Me, run: Run) -> Iterator[Move]:
        found = run.steps[self.deletes]
        after = me._replace(at="delete", token=found)
        if (
            not found
            or not found.commit
            or (found.claim > me.claim.number and REPLACES not in self.weak)
        ):
            after = self.end("saved")
        yield self.event("get", f"step {self.deletes}", str(found)), after, run

    def delete(self, me: Me, run: Run) -> Iterator[Move]:
        done = run.steps[self.deletes] == me.token
        after = run
        if done:
            gone = me.token.commit
            after = run._replace(
                steps=_with(run.steps, self.deletes, me.token._replace(commit="")),
                acknowledged=run.acknowledged - {gone},
            )
            if me.claim and run.training <= me.claim.number:
                after = after._replace(kept=run.kept - {gone})
        yield (
            self.event("delete", f"step {self.deletes}", "ok" if done else "refused"),
            self.end("saved"),
            after,
        )


class Lister(Job):
    """Lists the run, as a resuming or evaluating job does: C3."""

    def __init__(self, *, weak: Weak = frozenset()) -> None:
        super().__init__("lister", weak=weak)

    def start(self) -> Me:
        return Me("first")

    def first(self, me: Me, run: Run) -> Iterator[Move]:
        at_first = run._replace(steps=(), claim=Claim(0, 0))
        at = "first_marker" if run.claim.back else "list"
        after = Me(at, run.claim, start=at_first, tries=me.tries, base=run.claim.base)
        yield self.event("get", "_CLAIM", str(run.claim[:2])), after, run

    def first_marker(self, me: Me, run: Run) -> Iterator[Move]:
        found = run.steps[me.claim.back[0]]
        after = me._replace(at="list", base=base_of(me.claim, found))
        yield self.event("get", f"step {me.claim.back[0]}", str(found)), after, run

    def list(self, me: Me, run: Run) -> Iterator[Move]:
        at_list = me.start._replace(kept=run.kept, training=run.training, dropped=run.dropped)
        after = me._replace(at="second", steps=run.steps, start=at_list)
        if LISTS_ONCE in self.weak:
            after = self.listed(after, run)
        yield self.event("list", "steps", _names(run.steps)), after, run

    def once_more(self, me: Me) -> Me:
        return Me("first", tries=me.tries - 1) if me.tries else self.end("gave up")

    def second(self, me: Me, run: Run) -> Iterator[Move]:
        event = self.event("get", "_CLAIM", str(run.claim[:2]))
        if run.claim != me.claim:
            yield event, self.once_more(me), run
        elif run.claim.back and MARKER_ONCE not in self.weak:
            yield event, me._replace(at="second_marker"), run
        else:
            yield event, self.listed(me, run), run

    def second_marker(self, me: Me, run: Run) -> Iterator[Move]:
        found = run.steps[me.claim.back[0]]
        same = base_of(me.claim, found) == me.base
        after = self.listed(me, run) if same else self.once_more(me)
        yield self.event("get", f"step {me.claim.back[0]}", str(found)), after, run

    def listed(self, me: Me, run: Run) -> Me:
        found = counting(me.claim, me.base, me.steps, self.weak)
        commits = {step.commit for step in found.values()}
        stray = {
            step.commit
            for step in found.values()
            if step.claim < me.start.training and step.commit not in me.start.kept
        }
        if stray:
            return self.end(f"wrong: listed {_missing(stray, set())}, which a superseded job added")
        if commits & me.start.dropped:
            return self.end(f"wrong: listed {_missing(commits & me.start.dropped, set())}, left")
        missed = (me.start.acknowledged & run.acknowledged) - commits
        if missed:
            return self.end(
                f"wrong: missed {_missing(missed, set())}, which was acknowledged before"
            )
        return self.end("listed")


def wrong_with_run(run: Run) -> str | None:
    """What has been acknowledged, or kept by a job that trains, stands."""
    commits = {step.commit for step in run.steps if step and step.commit}
    for promised in (run.kept, run.acknowledged):
        if not promised <= commits:
            return f"wrong: {_missing(promised, commits)} was replaced or deleted by another job"
    return None


def _with(steps: Steps, n: int, step: Step | None) -> Steps:
    return (*steps[:n], step, *steps[n + 1 :])


def _names(steps: Steps) -> str:
    return ", ".join(f"{step.commit} of {step.claim}" for step in steps if step) or "nothing"


def _missing(wanted: Any, there: Any) -> str:
    return ", ".join(sorted(wanted - there))
