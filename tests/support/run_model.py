"""What must be in a run after each act of its jobs: a model without stores, threads or ranks.

An act leads from a world to what the job is told and to the world that follows; to several where a
job is cut off, because its last requests may have taken effect or not. The rules are written as
users know them, not as the code carries them out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

# What a job is told: what a call returned, or the name of its error.
Answer: TypeAlias = str
OK, NONE = "ok", "None"
ANY_ERROR = "any error"  # of a job that is cut off
EXISTS, NOT_FOUND, PINNED = (
    "CheckpointExistsError",
    "CheckpointNotFoundError",
    "CheckpointPinnedError",
)
SUPERSEDED, CORRUPT = "SupersededError", "CheckpointCorruptError"
ENDED, KILLED = "EndedError", "KilledError"
BAD_METRIC, BAD_VALUE = "ConfigError", "UnsupportedError"


class Act(NamedTuple):
    """One act.

    Attributes:
        kind: the name of a method of `World`.
        job: the name of the job that acts; empty for somebody else.
        step: the number of a step; -1 for the newest.
        value: the content of the state that is saved, different in each save.
        how: a variant.
        at: the number of the request at which a job is cut off.
    """

    kind: str
    job: str = ""
    step: int = -1
    value: int = 0
    how: str = ""
    at: int = 0


def loss(value: int) -> float:
    """Return the metric of a save."""
    return value * 7 % 5


@dataclass
class Step:
    """A step on the store.

    Attributes:
        value: the content of the save that was committed last.
        counts: whether jobs may resume from it.
        deleted: whether it has only a tombstone.
        objects: "whole", "none", or "data lost" or "index lost" if somebody has removed some.
        pinned: whether a pin protects it.
    """

    value: int
    counts: bool = True
    deleted: bool = False
    objects: str = "whole"
    pinned: bool = False

    def delete(self, objects: str = "none") -> None:
        """Leave a tombstone, and these objects."""
        self.deleted, self.counts, self.objects = True, False, objects


class Settings(NamedTuple):
    """The arguments of a manager; `keep` has names of policies and their numbers."""

    keep: tuple[tuple[str, int], ...] = ()
    save_every: int | None = None
    save_last: bool = True
    saves_preempted: bool = True
    grace: bool = False


@dataclass
class Job:
    """A job, as its user knows it.

    Attributes:
        claims: whether it has claimed the run.
        resumed: the step that it resumed from.
        behind: whether later steps may count: it has gone back, or has saved none.
        saved: the steps that it has saved since it resumed.
        tried: the contents of failed saves, by step; they may be committed.
        pending: the step whose save in the background was not asked for.
        failure: the error of that save.
        last: step and content of the last call of `step`, if that was not saved.
        stepped: the last step that it was called with, or that was loaded.
        announced: whether a signal has said that it must end.
        held: whether the program's handler has raised an error.
    """

    settings: Settings
    claims: bool = False
    loaded: bool = False
    resumed: int | None = None
    behind: bool = True
    saved: set[int] = field(default_factory=set)
    tried: dict[int, set[int]] = field(default_factory=dict)
    pending: int | None = None
    failure: Answer | None = None
    last: tuple[int, int] | None = None
    stepped: int | None = None
    announced: bool = False
    preempted: bool = False
    held: bool = False

    def knows(self, step: int) -> bool:
        """Return whether it need not save the step."""
        return step in self.saved or step == self.resumed

    def may_have(self, step: int, value: int) -> None:
        """Record that a save of the step has failed."""
        self.tried.setdefault(step, set()).add(value)


@dataclass
class World:
    """A run and its jobs.

    Attributes:
        steps: the steps on the store, by number.
        owner: the name of the job that has claimed the run last; empty if that has ended.
        jobs: the jobs that run, by name, in the order in which they began.
    """

    steps: dict[int, Step] = field(default_factory=dict)
    owner: str = ""
    jobs: dict[str, Job] = field(default_factory=dict)

    def after(self, act: Act) -> Iterator[tuple[Answer, World]]:
        """Yield what may be answered to an act, and what the world then is."""
        if act.kind == "cut":
            yield from self._cut(act)
            return
        world = deepcopy(self)
        answer: Answer = getattr(world, act.kind)(act)
        yield answer, world
        if act.kind == "sweep":  # what it rewrites no longer shows whose it is
            world = deepcopy(world)
            for job in world.jobs.values():
                job.tried.clear()
            yield answer, world

    def newest(self) -> int | None:
        """Return the newest step that counts."""
        return max(self.counting(), default=None)

    def is_superseded(self, name: str) -> bool:
        """Return whether another job has claimed the run since this one did."""
        return self.jobs[name].claims and self.owner != name

    def counting(self) -> list[int]:
        return [number for number, step in self.steps.items() if step.counts]

    # --- jobs begin and end

    def start(self, act: Act, settings: Settings = Settings()) -> Answer:  # noqa: B008
        """Begin a job."""
        self.jobs[act.job] = Job(settings)
        return NONE

    def close(self, act: Act) -> Answer:
        """Leave the block, or `finish`: save the last step, and raise what has failed."""
        job = self.jobs[act.job]
        if act.how == "finish":
            self._claim(act.job)
        answer = self._save_last(act.job) or self._settle(job) or NONE
        if act.how == "finish" and answer == NONE and self.owner != act.job:
            answer = SUPERSEDED
        del self.jobs[act.job]
        return ENDED if job.held else answer

    def _save_last(self, name: str) -> Answer | None:
        job = self.jobs[name]
        last, job.last = job.last, None
        settings = job.settings
        if last is None or not settings.save_last:
            return None
        if job.preempted and not settings.saves_preempted:
            return None
        pending, failed = job.pending, self._settle(job)
        if not job.knows(last[0]):
            answer = self.save(Act("save", name, *last))
            if answer != OK:
                return answer
        return failed if pending is not None and not job.knows(pending) else None

    def interrupted_close(self, act: Act) -> Answer:
        """Save in the background; Ctrl-C ends the wait for it; the second `close` waits."""
        job = self.jobs[act.job]
        answer = self.save_in_background(act)
        if answer != OK or job.failure is not None:
            return answer if answer != OK else self.close(act)
        del self.jobs[act.job]
        return f"{ENDED if job.held else 'KeyboardInterrupt'}, {NONE}"

    def kill(self, act: Act) -> Answer:
        """Kill a job between two calls."""
        del self.jobs[act.job]
        return NONE

    def sigterm(self, act: Act) -> Answer:
        """Send the process a signal: each job hears of it; the first holds the handler's error."""
        for number, job in enumerate(self.jobs.values()):
            job.announced = True
            job.held = job.held or number == 0
        return NONE

    def _claim(self, name: str) -> None:
        if not self.jobs[name].claims:
            self._claimed_by(name)
            self.jobs[name].claims = True

    def _claimed_by(self, name: str) -> None:
        """Record a claim, which rewrites markers, so that they no longer show whose they are."""
        self.owner = name
        for job in self.jobs.values():
            job.tried.clear()

    def claim(self, act: Act) -> Answer:
        """Let a job that is not looked at claim the run."""
        self._claimed_by("")
        return NONE

    # --- loads

    def load(self, act: Act) -> Answer:
        """Load the newest step that is whole, or a given one."""
        job = self.jobs[act.job]
        if failed := self._settle(job):
            return failed
        self._claim(act.job)
        job.last = None
        skipped = False
        if act.step >= 0:
            step, chosen = self.steps.get(act.step), act.step
            if step is None or step.deleted:
                return NOT_FOUND
            if step.objects != "whole":
                return CORRUPT
        else:
            counting = sorted(self.counting())
            whole = [number for number in counting if self.steps[number].objects == "whole"]
            if counting and not whole:
                return CORRUPT
            if not whole:
                self._resume(job, None, behind=False)
                return NONE
            chosen, skipped = whole[-1], whole[-1] != counting[-1]
        self._resume(job, chosen, behind=skipped or act.step >= 0)
        return f"step {chosen} with {self.steps[chosen].value}"

    def _resume(self, job: Job, step: int | None, *, behind: bool) -> None:
        job.loaded, job.resumed, job.behind, job.stepped = True, step, behind, step
        job.saved = {saved for saved in job.saved if step is not None and saved <= step}
        job.tried = {n: values for n, values in job.tried.items() if step is not None and n <= step}

    # --- saves

    def save(self, act: Act) -> Answer:
        """Save in the foreground."""
        job = self.jobs[act.job]
        if refused := self._refusal(act):
            return refused
        answer = self._commit(act)
        if answer != OK:
            if answer != EXISTS:
                job.may_have(act.step, act.value)
            return answer
        job.saved.add(act.step)
        job.tried.pop(act.step, None)
        job.behind = False
        self._note_saved(job, act.step)
        self._retain(job, act.step)
        return OK

    def save_in_background(self, act: Act) -> Answer:
        """Save in the background: the next call that saves, loads or closes raises its error."""
        job = self.jobs[act.job]
        if refused := self._refusal(act):
            return refused
        job.saved.add(act.step)
        job.pending = act.step
        self._note_saved(job, act.step)
        answer = BAD_VALUE if act.how == "bad value" else self._commit(act)
        if answer == OK:
            self._retain(job, act.step)
        else:
            job.failure = answer
            if answer == SUPERSEDED:
                job.may_have(act.step, act.value)
        return OK

    def step(self, act: Act) -> Answer:
        """Report a step, which is saved if it is time to, or if the job must end."""
        job = self.jobs[act.job]
        every, before = job.settings.save_every, job.stepped
        job.stepped = act.step
        known = job.knows(act.step)
        job.last = None if known else (act.step, act.value)
        if job.announced and not job.preempted:
            job.preempted = True
            if job.settings.saves_preempted:
                self._settle(job)
                known = job.knows(act.step)
                if not known and (answer := self.save(act)) != OK:
                    return answer
                return self._held(job) or str(not known)
            if held := self._held(job):
                return held
        since = act.step - 1 if before is None else before
        if known or every is None or act.step // every <= max(since, 0) // every:
            return str(False)
        answer = self.save_in_background(act)
        return str(True) if answer == OK else answer

    def _held(self, job: Job) -> Answer | None:
        held, job.held = job.held, False
        return ENDED if held else None

    def _note_saved(self, job: Job, step: int) -> None:
        if job.last is not None and step >= job.last[0]:
            job.last = None

    def _settle(self, job: Job) -> Answer | None:
        """End the save in the background; return its error, once."""
        (step, job.pending), (failure, job.failure) = (job.pending, None), (job.failure, None)
        if step is not None and failure is None:
            job.behind = False
            job.tried.pop(step, None)
        elif step is not None:
            job.saved.discard(step)
        return failure

    def _refusal(self, act: Act) -> Answer | None:
        """Return why a save does not begin, or None."""
        job = self.jobs[act.job]
        self._claim(act.job)
        if act.how == "bad metric":
            return BAD_METRIC
        if failed := self._settle(job):
            return failed
        if act.step in job.saved or (self._goes_back(job, act.step) and job.resumed is None):
            return EXISTS
        return SUPERSEDED if self._goes_back(job, act.step) and self.owner != act.job else None

    def _goes_back(self, job: Job, step: int) -> bool:
        """Return whether the commit of a step makes later ones stop counting."""
        newest = self.newest()
        if not job.behind or newest is None:
            return False
        own = self.steps[newest].value in job.tried.get(newest, ())
        return not own and newest > (step if job.resumed is None else job.resumed)

    def _commit(self, act: Act) -> Answer:
        """Commit a step, unless that is refused: then nothing changes."""
        job, there = self.jobs[act.job], self.steps.get(act.step)
        if self.owner != act.job:
            return SUPERSEDED
        since = job.resumed
        goes_back = self._goes_back(job, act.step)
        if there is not None and not there.deleted:
            later = since is None or act.step > since
            again = (job.loaded and later) or act.step in job.tried
            if (there.counts and not again) or there.pinned:
                return EXISTS
        if act.how == "bad value":
            return BAD_VALUE
        if goes_back:
            assert since is not None
            for number in self.counting():
                self.steps[number].counts = number <= since
        self.steps[act.step] = Step(act.value)
        return OK

    def _retain(self, job: Job, committed: int) -> None:
        """Delete what no policy keeps, of the steps whose index is there."""
        known = {n: self.steps[n] for n in self.counting()}
        known = {n: step for n, step in known.items() if step.objects != "index lost"}
        if not job.settings.keep or not known:
            return
        kept = {committed, job.resumed, max(known)}
        for policy, n in job.settings.keep:
            kept |= set(_POLICIES[policy](known, n))
        for number, step in known.items():
            if number not in kept and not step.pinned:
                step.delete(step.objects if job.settings.grace else "none")

    # --- a save that is cut off

    def _cut(self, act: Act) -> Iterator[tuple[Answer, World]]:
        """Yield what may follow if something happens at one request of a save.

        `how` is "ctrl_c", "kill", "forbidden" (the request is refused) or "claimed" (another job
        claims the run before it).
        """
        plain = act._replace(kind="save", how="")
        whole, cut_off = next(self.after(plain)), self._cut_off(plain)
        yield whole  # the request never came, or its answer did not matter
        if act.how == "claimed":  # or another job came at the very end
            answer, world = deepcopy(whole)
            world._claimed_by("")
            yield answer, world
        for world in cut_off:
            if act.how == "kill":
                del world.jobs[act.job]
            if act.how == "claimed":
                world._claimed_by("")
            yield KILLED if act.how == "kill" else ANY_ERROR, world

    def _cut_off(self, act: Act) -> Iterator[World]:
        """Yield how far a save may have come that was not acknowledged."""
        yield deepcopy(self)
        begun = deepcopy(self)
        refused = begun._refusal(act)
        for owner in {begun.owner, self.owner, ""}:
            for claims in {self.jobs[act.job].claims, True}:
                world = deepcopy(begun)
                world.owner, world.jobs[act.job].claims = owner, claims
                yield deepcopy(world)
                world.jobs[act.job].may_have(act.step, act.value)
                yield world
        if refused:
            return
        there = begun.steps.get(act.step)
        if begun.owner == act.job and (there is None or not there.counts):
            world = deepcopy(begun)  # another job claimed the run before the commit
            world.steps[act.step] = Step(act.value, counts=False)
            world.jobs[act.job].may_have(act.step, act.value)
            world.owner = ""
            yield world
        if begun._commit(act) == OK:
            begun.jobs[act.job].may_have(act.step, act.value)
            yield begun

    # --- others

    def pin(self, act: Act) -> Answer:
        """Pin a step, or remove the pin."""
        step = self.steps.get(act.step)
        if step is None or step.deleted:
            return NOT_FOUND
        was_pinned, step.pinned = step.pinned, act.how != "unpin"
        for job in self.jobs.values() if step.pinned != was_pinned else ():
            job.tried.pop(act.step, None)  # a marker that was rewritten does not show whose it is
        return NONE

    def remove(self, act: Act) -> Answer:
        """Delete a step, or remove some of its objects, or all with its marker."""
        step = self.steps.get(act.step)
        if act.how != "delete":
            if act.how == "prefix":
                self.steps.pop(act.step, None)
            elif step is not None and step.objects == "whole":
                step.objects = act.how
            return NONE
        if step is None or (step.deleted and step.objects in ("none", "index lost")):
            return NOT_FOUND
        if step.pinned and not step.deleted:
            return PINNED
        step.delete("index lost" if step.objects == "index lost" else "none")
        return NONE

    def sweep(self, act: Act) -> Answer:
        """Sweep the run when all that is there is old."""
        for step in self.steps.values():
            if step.deleted or not (step.counts or step.pinned):
                step.delete()
        return NONE


def _latest(steps: dict[int, Step], n: int) -> list[int]:
    return sorted(steps)[-n:]


def _every(steps: dict[int, Step], n: int) -> list[int]:
    return [number for number in steps if number % n == 0]


def _best(steps: dict[int, Step], n: int) -> list[int]:
    return sorted(steps, key=lambda number: (-loss(steps[number].value), number))[-n:]


_POLICIES: dict[str, Callable[[dict[int, Step], int], list[int]]] = {
    "latest": _latest,
    "every": _every,
    "best": _best,
}
