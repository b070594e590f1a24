"""A run's claim (rules C1 to C5): a job that was superseded adds, replaces and deletes nothing.

On a store in memory, where every request can be the last one of a job, get no answer, or meet what
another job did first.
"""

from __future__ import annotations

import itertools
import pickle
import threading
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from itertools import groupby
from typing import Any

import msgspec
import pytest

from dcp_objstore.checkpoint import claim as rule, commit as commits
from dcp_objstore.checkpoint.catalogue import ClaimRecord, decode_claim, encode_claim, list_run
from dcp_objstore.checkpoint.claim import RunClaim
from dcp_objstore.checkpoint.commit import CommitResult
from dcp_objstore.checkpoint.delete import delete
from dcp_objstore.checkpoint.marker import (
    MAX_CLAIM,
    Marker,
    decode_marker,
    new_id,
    with_checksum,
)
from dcp_objstore.checkpoint.names import CLAIM_KEY, MARKER_KEY
from dcp_objstore.checkpoint.pins import pin, unpin
from dcp_objstore.checkpoint.read import read_marker
from dcp_objstore.checkpoint.sweep import sweep
from dcp_objstore.errors import (
    CheckpointCorruptError,
    CheckpointExistsError,
    CommitLostError,
    CommitUnknownError,
    ConfigError,
    InputError,
    LostRaceError,
    ObjectNotFoundError,
    PermissionDeniedError,
    RetryableError,
    StoreUnavailableError,
    SupersededError,
    UnsupportedError,
)
from dcp_objstore.stores import StoreSpec
from tests.support.memory_store import (
    DELAYED,
    LOST,
    UNANSWERED,
    Below,
    MemoryStore,
    Put,
    TickingClock,
    in_turn,
)
from tests.support.upkeep import DESCRIBED, AgedStore, finish as finish_upload, loose, named, upload


class Dead(BaseException):
    """The process is gone; whatever it would still ask never arrives."""


class Process:
    """A store as one process sees it: at a prefix of the run; dead after some requests.

    Args:
        run: holds everything.
        last: the number of the request (from 1) at which the process dies.
        after: whether that request still takes effect.
    """

    def __init__(self, run: MemoryStore, *, last: int = 10**9, after: bool = False) -> None:
        self.run, self.last, self.after, self.asked = run, last, after, 0
        self.meeting: tuple[int, Callable[[], object]] | None = None
        self._lock = threading.Lock()  # markers are read in several threads

    def meet(self, number: int, act: Callable[[], object]) -> None:
        """After so many more requests, have something done before the next one."""
        self.meeting = self.asked + number, act

    def at(self, name: str) -> Below:
        return Below(self.run, name, self.ask)

    def ask(self, do: Callable[[], Any]) -> Any:
        with self._lock:
            if self.meeting is not None and self.asked == self.meeting[0]:
                (_, act), self.meeting = self.meeting, None
                act()
        self.asked += 1
        if self.asked > self.last or (self.asked == self.last and not self.after):
            raise Dead
        answer = do()
        if self.asked == self.last:
            raise Dead
        return answer


class Job:
    """A job of the run, with the claim that it took, or was given."""

    def __init__(self, run: MemoryStore, number: int | None = None, **process: Any) -> None:
        self.process = Process(run, **process)
        self.number = self.take() if number is None else number

    def take(self, clock: TickingClock | None = None) -> int:
        return rule.claim_run(self.process.at(""), self.process.at, clock=clock or TickingClock())

    def begin(
        self, name: str, *, overwrite: bool = False, goes_back: bool = False
    ) -> Callable[[], CommitResult]:
        """All of a save but its end, which is returned."""
        store = self.process.at(name)
        token = commits.take_begin_token(store, overwrite=overwrite, claim=self.number)
        uploaded = upload(store)

        def end() -> CommitResult:
            done = finish_upload(store, token, uploaded, goes_back=goes_back, clock=TickingClock())
            if self.number:
                self.confirm(goes_back=goes_back)
            return done

        return end

    def confirm(self, *, clock: TickingClock | None = None, goes_back: bool = False) -> None:
        run = self.process.at("")
        rule.confirm(run, self.number, goes_back=goes_back, clock=clock or TickingClock())

    def save(self, name: str, *, overwrite: bool = False, goes_back: bool = False) -> str:
        return self.begin(name, overwrite=overwrite, goes_back=goes_back)().commit_id

    def save_steps(self, *numbers: int) -> dict[str, str]:
        return {f"step-{number}": self.save(f"step-{number}") for number in numbers}

    def go_back(self, last: int, saves: str = "step-3") -> None:
        """Only the steps up to `last` are to count."""
        run, at = self.process.at(""), self.process.at
        self.number = rule.go_back(
            run,
            at,
            self.number,
            saves,
            lambda name: int(name.rpartition("-")[2]) <= last,
            clock=TickingClock(),
        )

    def finish(self) -> None:
        rule.finish(self.process.at(""), self.number, clock=TickingClock())

    def delete(self, name: str) -> None:
        delete(self.process.at(name), claim=self.number, clock=TickingClock())


def new_run() -> MemoryStore:
    return MemoryStore("memory://test/run")


@pytest.fixture
def run() -> MemoryStore:
    return new_run()


def listed(run: MemoryStore, **settings: Any) -> dict[str, str]:
    """Name and commit of every step that counts, as a resuming job finds them; each is whole."""
    process = Process(run)
    found = list_run(process.at(""), process.at, clock=TickingClock(), **settings).steps
    for step in found:
        named(process.at(step.name))
    return {step.name: step.marker.commit_id for step in found}


def marker_of(run: MemoryStore, name: str) -> Marker:
    stored = read_marker(Process(run).at(name))
    assert stored is not None
    return stored.record


def pin_step(run: MemoryStore, name: str) -> None:
    pin(Process(run).at(name), "paper", clock=TickingClock())


def trace(run: MemoryStore, act: Callable[[], object]) -> list[str]:
    """The requests of `act` to `_CLAIM` and to markers, with the numbers that it puts there.

    In order; those of several steps, which are sent at the same time, in the order of their names.
    """
    before, since = len(run.requests), len(run.puts)
    act()
    puts = iter(run.puts[since:])
    lines = []
    for verb, key in run.requests[before:]:
        line = f"{verb} {key.removesuffix(f'/{MARKER_KEY}')}".rstrip()
        if verb == "put":
            put = next(puts)
            assert put.precondition is not None
            assert not put.retry
            line += f" {claims_in(put)}"
        lines.append(line)
    groups = groupby(lines, lambda line: line.split()[0] if "step-" in line else line)
    return [line for _, group in groups for line in sorted(group)]


def claims_in(put: Put) -> str:
    if put.key != CLAIM_KEY:
        return str(decode_marker(put.data).claim)
    claim = decode_claim(put.data)
    back = f", going back by {claim.going_back.step}" if claim.going_back else ""
    return f"{claim.number}, base {claim.base}{back}"


# --- a superseded job


def test_a_superseded_job_cannot_replace_a_step(run):
    zombie = Job(run)
    before = zombie.save_steps(1)
    late = zombie.begin("step-1", overwrite=True)
    before |= Job(run).save_steps(2)
    for name in before:
        with pytest.raises(SupersededError, match="claim 2"):
            zombie.save(name, overwrite=True)
    with pytest.raises(SupersededError):
        late()
    with pytest.raises(SupersededError, match="claim_run"):
        Job(run, 0).save("step-2", overwrite=True)  # one without a claim
    assert listed(run) == before


def test_a_deletion_that_meets_the_take_over_deletes_nothing(run):
    zombie = Job(run)
    before = zombie.save_steps(1)
    run.on_put = in_turn(f"step-1/{MARKER_KEY}", lambda _: Job(run))
    with pytest.raises(SupersededError):
        zombie.delete("step-1")
    assert listed(run) == before


def test_a_save_without_a_claim_is_refused_and_what_it_had_begun_does_not_count(run):
    late = Job(run, 0).begin("step-1")
    Job(run)
    late()

    def refuse(number: int, error: type[Exception], why: str) -> None:
        with pytest.raises(error, match=why):
            rule.refuse_uncounted(Process(run).at(""), number)

    assert trace(run, partial(refuse, 0, SupersededError, "has no claim")) == ["get _CLAIM"]
    assert trace(run, partial(refuse, 2, CheckpointCorruptError, "removed")) == ["get _CLAIM"]
    rule.refuse_uncounted(Process(run).at(""), 1)
    assert listed(run) == {}


def test_zombies_that_beat_a_commit_are_replaced(run):
    """Each comes right before one of our PUTs, the second even on top of the first."""
    first = Job(run).begin("step-1")
    second = Job(run)
    late = Job(run).begin("step-1")

    def beat(commit: Callable[[], object]) -> None:
        with pytest.raises(SupersededError):
            commit()

    key = f"step-1/{MARKER_KEY}"

    def beat_again(_: Put) -> None:
        run.on_put = None
        beat(partial(second.save, "step-1"))
        run.on_put = in_turn(key, UNANSWERED)

    def beat_first(_: Put) -> None:
        run.on_put = None
        beat(first)
        run.on_put = in_turn(key, beat_again)

    run.on_put = in_turn(key, beat_first)
    done = late()
    assert listed(run) == {"step-1": done.commit_id}
    assert (len(done.marker.log), done.attempts) == (2, 3)


@pytest.mark.parametrize("there", [False, True], ids=["new", "replaces"])
@pytest.mark.parametrize("order", ["fence first", "fence last"])
def test_a_commit_that_a_sweep_fenced_off_is_not_put_over_a_zombies(run, there, order):
    """The sweep removes what our save had uploaded: only a commit in between is passed over."""
    zombie = Job(run)
    stray = zombie.begin("step-1")
    successor = Job(run)
    if there:
        with pytest.raises(SupersededError):
            stray()
    late = successor.begin("step-1")
    aged = AgedStore(Process(run).at("step-1"))

    def fence() -> None:
        while loose(aged):
            aged.age()
            sweep(aged, dot_metadata=DESCRIBED, clock=TickingClock())

    def commit() -> None:
        with pytest.raises(SupersededError):
            zombie.save("step-1", overwrite=True)

    def fence_and_commit(_: Put) -> None:
        for do in (fence, commit) if order == "fence first" else (commit, fence):
            do()

    run.on_put = in_turn(f"step-1/{MARKER_KEY}", fence_and_commit)
    with pytest.raises(CommitLostError):
        late()
    assert listed(run) == {}
    named(Process(run).at("step-1"))  # the zombie's is whole


# --- success


def test_what_was_acknowledged_is_in_the_successors_list_wherever_the_take_over_came():
    """The take-over comes before each request of the save, in turn."""
    for moment in itertools.count():
        world = new_run()
        old = Job(world)
        acknowledged = old.save_steps(1)
        old.process.meet(moment, partial(Job, world))
        with suppress(LostRaceError):
            acknowledged |= old.save_steps(2)
        assert acknowledged.items() <= listed(world).items(), moment
        if old.process.meeting:
            break
    assert moment >= 7
    assert "step-2" in acknowledged


AWAY, REFUSED = StoreUnavailableError("503"), PermissionDeniedError("403")


@pytest.mark.parametrize(
    ("answers", "kind", "asked"),
    [
        ([AWAY, AWAY], None, 3),
        ([AWAY] * 1000, CommitUnknownError, None),
        ([REFUSED], CommitUnknownError, 1),  # training is not held up for a minute to find out
        (None, CheckpointCorruptError, 2),  # it was removed: a 404 is asked again
    ],
    ids=["away for a moment", "away", "refused", "removed"],
)
def test_a_save_is_a_success_only_if_the_claim_was_read_after_it(run, answers, kind, asked):
    job, left, clock = Job(run), list(answers or ()), TickingClock()

    def answer(key: str) -> None:
        if left:
            raise left.pop()

    run.on_get = answer
    if answers is None:
        run.delete(CLAIM_KEY)
    before = len(run.requests)
    with pytest.raises(kind) if kind else nullcontext():
        job.confirm(clock=clock)
    sent = run.requests[before:]
    assert sent == [("get", CLAIM_KEY)] * (asked or len(sent))
    assert bool(clock.now) == (AWAY in (answers or ()))


@pytest.mark.parametrize(
    "act",
    [
        Job.finish,
        lambda job: job.go_back(1),
        lambda job: job.confirm(goes_back=True),
        lambda job: rule.refuse_uncounted(job.process.at(""), 1),
    ],
)
def test_one_answer_that_a_run_has_no_claim_is_not_believed_by_its_job(act):
    """Whichever of its GETs of `_CLAIM` is answered so."""
    for wrong in itertools.count(1):
        world = new_run()
        job = Job(world)
        job.save_steps(1, 2)
        asked = itertools.count(1)

        def answer(key: str, asked: Any = asked, wrong: int = wrong) -> None:
            if key == CLAIM_KEY and next(asked) == wrong:
                raise ObjectNotFoundError("404")

        world.on_get = answer
        act(job)
        if next(asked) <= wrong:
            break
    assert wrong > 1


# --- taking over


def test_all_steps_that_count_are_adopted_and_others_are_not(run):
    plain = Job(run, 0).save_steps(9, 10)
    pin_step(run, "step-9")
    first = Job(run)
    stray = first.begin("step-11")
    second = Job(run)
    with pytest.raises(SupersededError):
        stray()
    third = Job(run)
    assert (first.number, second.number, third.number) == (1, 2, 3)
    assert list(listed(run).items()) == list(plain.items())
    assert (marker_of(run, "step-9").claim, marker_of(run, "step-9").pins) == (3, ("paper",))
    assert marker_of(run, "step-11").claim == 1


@pytest.mark.parametrize("owned", [False, True], ids=["first", "again"])
def test_of_two_that_take_over_at_once_exactly_one_trains(owned):
    """The other comes before each request of the first, in turn."""
    for moment in itertools.count():
        world = new_run()
        old = (Job(world) if owned else Job(world, 0)).save_steps(1)
        one, others = Job(world, 0), []
        one.process.meet(moment, lambda: others.append(Job(world)))  # noqa: B023 - at once
        try:
            one.number = one.take()
        except SupersededError:
            [winner] = others
        else:
            winner = one
            for other in others:
                with pytest.raises(SupersededError):
                    other.save("step-2")
        if not others:
            break
        assert listed(world) == old
        old |= winner.save_steps(2)
        assert listed(world) == old
    assert moment >= 7


def test_what_a_claim_asks_of_its_run(run, caplog):
    Job(run, 0).save_steps(1, 2)
    markers = ["list", "get step-1", "get step-2"]
    assert trace(run, lambda: Job(run)) == [
        *("get _CLAIM", *markers),
        *("put _CLAIM 1, base 0", "get _CLAIM", *markers, "put step-1 1", "put step-2 1"),
        *("list", "put _CLAIM 1, base 1", "get _CLAIM"),
    ]
    assert trace(run, lambda: Job(run)) == [
        "get _CLAIM",
        *("put _CLAIM 2, base 1", "get _CLAIM", *markers, "put step-1 2", "put step-2 2"),
        *("list", "put _CLAIM 2, base 2", "get _CLAIM"),
    ]
    assert caplog.text == ""


def test_a_claim_that_somebody_removes_in_the_middle_is_not_taken(run):
    Job(run)
    puts = len(run.puts)
    run.on_get = lambda key: run.delete(CLAIM_KEY) if len(run.puts) > puts else None
    with pytest.raises(SupersededError):
        Job(run)
    assert CLAIM_KEY not in run.objects


def test_a_claim_ends_at_the_deadline_if_others_keep_changing_the_steps(run):
    Job(run).save("step-1")
    step, clock = Process(run).at("step-1"), TickingClock(deadline_seconds=2)

    def change(put: Put) -> None:
        if put.key != CLAIM_KEY and decode_marker(put.data).claim == 2:
            pin_step(run, "step-1")
            unpin(step, "paper", clock=TickingClock())

    run.on_put = change
    with pytest.raises(RetryableError, match="claim it again") as caught:
        Job(run, 0).take(clock)
    assert caught.value.url == run.url
    assert 2 <= clock.now < 3


def test_a_step_that_somebody_rewrites_during_the_take_over_is_not_lost(run):
    """A pin, which belongs to no job, comes right before the step is adopted."""
    before = Job(run).save_steps(1, 2)
    run.on_put = in_turn(f"step-1/{MARKER_KEY}", lambda _: pin_step(run, "step-1"))
    since = len(run.puts)
    assert Job(run).number == 2
    assert listed(run) == before
    assert marker_of(run, "step-1").pins == ("paper",)
    puts = [put.key for put in run.puts[since:]]
    assert puts.count("step-2/_COMMIT") == 1, "it was adopted already"
    assert puts.count(CLAIM_KEY) == 2


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("owned", [False, True], ids=["first", "again"])
def test_after_a_crash_at_any_request_another_take_over_loses_nothing(after, owned):
    for last in itertools.count(1):
        world, died = new_run(), False
        old = Job(world) if owned else Job(world, 0)
        before = old.save_steps(1, 2)
        try:
            Job(world, last=last, after=after)
        except Dead:
            died = True
        if owned:  # until somebody has it, a job that is told success keeps what it saves
            with suppress(SupersededError):
                before |= old.save_steps(4)
        assert before.items() <= listed(world).items()
        Job(world)
        assert before.items() <= listed(world).items()
        if owned:
            with pytest.raises(SupersededError):
                old.save("step-5")
        if not died:
            break
    assert last >= 10


@pytest.mark.parametrize("key", [CLAIM_KEY, f"step-1/{MARKER_KEY}"])
@pytest.mark.parametrize("fate", [LOST, UNANSWERED, DELAYED])
@pytest.mark.parametrize("which", [1, 2])
def test_a_take_over_whose_answers_are_lost_comes_true(run, key, fate, which):
    before = Job(run).save_steps(1)
    run.on_put = in_turn(key, *[None] * (which - 1), fate)
    successor = Job(run)
    run.deliver()
    before |= successor.save_steps(2)
    assert listed(run) == before
    assert successor.number == 2


def test_steps_that_were_copied_from_another_run_count(run):
    """With a later claim than this run has, before it was ever taken over or afterwards."""
    wanted = copy_steps(run, 4, 1, 2)
    step_2 = run.bucket.copy().objects
    assert Job(run).number == 5
    for key in run.bucket.keys("step-2/"):  # with claim 4, where step-1 has claim 5
        run.objects[f"step-2/{key}"] = step_2[f"step-2/{key}"]
    run.put(CLAIM_KEY, encode_claim(ClaimRecord(number=1, base=1, write_id=new_id())))
    assert trace(run, lambda: Job(run)) == [
        *("get _CLAIM", "put _CLAIM 2, base 1", "get _CLAIM", "list", "get step-1", "get step-2"),
        *("put _CLAIM 5, base 1", "get _CLAIM", "put step-2 5", "list"),
        *("put _CLAIM 5, base 5", "get _CLAIM"),
    ]
    assert listed(run) == wanted


def copy_steps(run: MemoryStore, claim: int, *numbers: int) -> dict[str, str]:
    """Copy steps, as they are, from a run with so many claims."""
    other = MemoryStore("memory://test/other")
    for _ in range(claim):
        job = Job(other)
    copied = job.save_steps(*numbers)
    for meta in list(other.list("step-")):
        run.put(meta.key, other.body(meta.key))
    return copied


@pytest.mark.parametrize(
    ("marker", "kind"), [(b"{}", CheckpointCorruptError), (b'{"format":99}', UnsupportedError)]
)
def test_a_claim_that_cannot_read_a_step_is_refused_and_no_step_stops_counting(run, marker, kind):
    """Or the step would never count again, although perhaps only a proxy had answered."""
    good = Job(run).save_steps(1, 2, 3)
    body = run.body(f"step-2/{MARKER_KEY}")
    run.put(f"step-2/{MARKER_KEY}", marker)
    with pytest.raises(kind, match="step-2"):
        Job(run)
    run.put(f"step-2/{MARKER_KEY}", body)
    assert listed(run) == good
    Job(run)
    assert listed(run) == good


def test_a_step_that_one_listing_lacks_is_adopted_all_the_same(run):
    every = Job(run).save_steps(1, 2)
    hidden: dict[str, Any] = {}

    def hide() -> None:
        if hidden:
            run.objects.update(hidden)
            run.on_list = None
        else:
            hidden.update({key: run.objects.pop(key) for key in list(run.objects) if "-2/" in key})

    run.on_list = hide
    Job(run)
    assert listed(run) == every


# --- going back


def test_later_steps_count_until_the_job_that_went_back_has_committed_and_then_never(run, caplog):
    job = Job(run)
    before = job.save_steps(1, 2, 3, 4)
    job.go_back(2)
    assert "When step-3 is saved, these 2 steps no longer count: step-3, step-4" in caplog.text
    end = job.begin("step-3", goes_back=True)
    assert listed(run) == before, "the save may still fail"
    kept = {name: before[name] for name in ("step-1", "step-2")}
    kept["step-3"] = end().commit_id
    assert listed(run) == kept
    named(Process(run).at("step-4"))  # it is whole, for any reader
    Job(run)
    assert listed(run) == kept
    with pytest.raises(SupersededError):
        job.save("step-4")


def test_what_going_back_asks_of_the_run_and_says(run, caplog):
    job = Job(run)
    job.save_steps(1, 2, 3)
    pin_step(run, "step-2")
    assert trace(run, lambda: job.go_back(1)) == [
        *("get _CLAIM", "put _CLAIM 2, base 1", "get _CLAIM", "list"),
        *("get step-1", "get step-2", "get step-3", "put step-1 2", "list"),
        *("put _CLAIM 2, base 1, going back by step-3", "get _CLAIM"),
    ]
    assert job.number == 2
    [_, pinned] = [record.getMessage() for record in caplog.records]
    assert "run/step-2 is pinned (paper), so it stays" in pinned
    assert trace(run, lambda: job.confirm(goes_back=True)) == ["get _CLAIM", "put _CLAIM 2, base 2"]


@pytest.mark.parametrize("claim", [1, 2, 3])
def test_a_job_goes_back_past_a_step_that_was_copied_from_another_run(run, claim):
    """Whatever its claim: also with the number that the job is about to take."""
    job = Job(run)
    kept = job.save_steps(1)
    copied = copy_steps(run, claim, 2)
    job.go_back(1, saves="step-2")
    assert listed(run) == kept | copied
    assert job.number == max(2, claim + 1)
    kept["step-2"] = job.save("step-2", goes_back=True)
    assert listed(run) == kept


def test_a_save_that_commits_nothing_makes_no_step_stop_counting(run):
    """The next save of the job does, or another job goes on with all of them."""
    job = Job(run)
    every = job.save_steps(1, 2, 3)
    pin_step(run, "step-2")
    job.go_back(1, saves="step-2")
    with pytest.raises(CheckpointExistsError, match="paper"):
        job.save("step-2", overwrite=True, goes_back=True)
    assert listed(run) == every
    job.go_back(1, saves="step-4")
    successor = Job(run)
    with pytest.raises(SupersededError):
        job.save("step-4", goes_back=True)
    assert listed(run) == every
    successor.go_back(1, saves="step-4")
    new = successor.save("step-4", goes_back=True)
    assert listed(run) == {"step-1": every["step-1"], "step-4": new}


def test_what_was_left_stays_left_though_the_step_that_decided_is_deleted(run):
    """Before the base has risen in `_CLAIM`: its tombstone still has it."""
    job = Job(run)
    every = job.save_steps(1, 2, 3)
    job.go_back(1, saves="step-2")
    store = job.process.at("step-2")
    token = commits.take_begin_token(store, overwrite=True, claim=job.number)
    finish_upload(store, token, upload(store), goes_back=True)
    assert "step-3" not in listed(run)
    job.delete("step-2")
    assert listed(run) == {"step-1": every["step-1"]}
    Job(run)
    assert listed(run) == {"step-1": every["step-1"]}


def test_of_one_that_goes_back_and_one_that_takes_over_exactly_one_trains():
    """The other comes before each request of the first, in turn."""
    outcomes = []
    for moment in itertools.count():
        world, others = new_run(), []
        old = Job(world)
        before = old.save_steps(1, 2)
        old.process.meet(moment, lambda: others.append(Job(world)))  # noqa: B023 - at once
        try:
            old.go_back(1)
            old.save("step-3", goes_back=True)
        except SupersededError:
            [winner] = others
            with pytest.raises(SupersededError):
                old.save("step-3")
        else:
            winner = others[0] if others else Job(world, old.number)
        found = listed(world)
        outcomes.append("step-2" not in found)
        some = {name: one for name, one in found.items() if name != "step-3"}
        assert some in (before, {"step-1": before["step-1"]}), "all of it, or nothing"
        assert ("step-3" in found) == ("step-2" not in found), "the commit decides"
        found |= winner.save_steps(4)
        assert listed(world) == found
        if not others:
            break
    assert moment >= 12
    assert outcomes == sorted(outcomes)
    assert outcomes[-1]


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_after_a_crash_while_going_back_all_later_steps_count_or_none(after):
    """At each request, of the first save, too. What its commit has decided is not undone."""
    outcomes = []
    for last in itertools.count(1):
        world, died = new_run(), False
        job = Job(world)
        every = job.save_steps(1, 2, 3)
        job.process = Process(world, last=last, after=after)
        try:
            job.go_back(1)
            job.save("step-3", goes_back=True)
        except Dead:
            died = True
        found = listed(world)
        if found != every:
            assert found == {"step-1": every["step-1"], "step-3": found["step-3"]}
            assert found["step-3"] != every["step-3"]
        outcomes.append(found != every)
        for _ in range(2):
            Job(world)
            assert listed(world) == found
        if not died:
            break
    assert outcomes == sorted(outcomes), "once they do not count they never do"
    assert outcomes.count(True) >= 3, "after the commit come more requests"


# --- the list


def test_a_list_during_which_the_base_rose_is_made_again(run):
    """The successor's number is there already; its second PUT comes while the list is made."""
    zombie = Job(run)
    first = zombie.save_steps(1)
    late = zombie.begin("step-2")
    found: dict[str, str] = {}

    def list_before_it_arrives(put: Put) -> None:
        with pytest.raises(SupersededError):
            late()  # its marker has the zombie's claim, which still counts

        def arrive(key: str) -> None:
            if key == f"step-1/{MARKER_KEY}":
                run.on_get = None
                run.apply(put)

        run.on_get = arrive
        found.update(listed(run))

    run.on_put = in_turn(CLAIM_KEY, None, list_before_it_arrives)
    Job(run)
    assert found == first


def test_requests_of_a_list_are_bounded(run):
    Job(run).save_steps(*range(40))
    process = Process(run)
    for newest, markers in ((None, 40), (1, 1), (3, 3)):
        before = len(run.requests)
        found = list_run(process.at(""), process.at, newest=newest, clock=TickingClock()).steps
        assert len(run.requests) - before == 2 + 1 + markers
        assert [step.name for step in found] == [f"step-{n}" for n in range(40 - markers, 40)]


def test_a_claim_reads_no_marker_of_a_deleted_step_whose_objects_are_gone(run):
    job = Job(run)
    job.save_steps(*range(5))
    for name in ("step-1", "step-2", "step-3"):
        job.delete(name)
    before = len(run.requests)
    second = Job(run)
    assert not [key for _, key in run.requests[before:] if key.startswith(("step-1", "step-3"))]
    assert list(listed(run)) == ["step-0", "step-4"]
    # Rule C5 holds there, too: the marker is of an earlier claim.
    second.save("step-3")
    assert list(listed(run)) == ["step-0", "step-3", "step-4"]


# --- the end


def is_finished(run: MemoryStore) -> bool:
    return decode_claim(run.body(CLAIM_KEY)).finished


@pytest.mark.parametrize("fate", [None, LOST, UNANSWERED])
def test_a_job_finishes_its_run_until_the_next_claim(run, fate):
    job = Job(run)
    steps = job.save_steps(1)
    run.on_put = in_turn(CLAIM_KEY, fate)
    job.finish()
    assert is_finished(run)
    steps |= job.save_steps(2)  # no rule looks at it
    assert listed(run) == steps
    assert Job(run).number == 2
    assert not is_finished(run)
    assert listed(run) == steps


def test_the_note_that_a_run_is_finished_does_not_keep_the_next_job_from_it():
    """It comes before each request of the claim, in turn; only as long as the old job owns it."""
    for moment in range(20):
        world = new_run()
        old = Job(world)
        steps = old.save_steps(1)
        new, finished = Job(world, 0), []

        def note(old: Job = old, finished: list[bool] = finished) -> None:
            with suppress(SupersededError):
                old.finish()
                finished.append(True)

        new.process.meet(moment, note)
        assert new.take() == 2
        assert not is_finished(world)
        assert listed(world) == steps
        assert bool(finished) == (moment <= 1), moment
        if new.process.meeting:
            return
    raise AssertionError("the claim sends more requests than these")


@pytest.mark.parametrize("requests", [0, 1])
def test_a_job_that_is_superseded_meanwhile_finishes_nothing(run, requests):
    old = Job(run)
    old.process.meet(requests, lambda: Job(run))
    with pytest.raises(SupersededError):
        old.finish()
    assert not is_finished(run)


def test_an_older_version_reads_the_claim_of_a_finished_run():
    record = ClaimRecord(number=3, base=3, finished=True, write_id=new_id())
    assert decode_claim(encode_claim(record)).finished
    without = msgspec.json.decode(msgspec.json.encode(record))
    assert (without.pop("format"), without.pop("finished")) == (1, True)
    body = with_checksum(msgspec.json.encode({"format": 1, **without}))
    assert decode_claim(body) == msgspec.structs.replace(record, finished=False)


# --- `_CLAIM` itself


def test_claim_record_comes_back_equal_and_every_damaged_byte_is_seen():
    record = ClaimRecord(number=3, base=2, write_id=new_id())
    body = encode_claim(record)
    assert decode_claim(body) == record
    for at in range(len(body)):
        flipped = bytearray(body)
        flipped[at] ^= 1
        with pytest.raises((CheckpointCorruptError, UnsupportedError)):
            decode_claim(bytes(flipped))
    for wrong in ({"base": 4}, {"number": 0}, {"number": 2**60}, {"write_id": "x"}, {"base": -1}):
        with pytest.raises(CheckpointCorruptError):
            decode_claim(encode_claim(msgspec.structs.replace(record, **wrong)))
    with pytest.raises(UnsupportedError, match="upgrade"):
        decode_claim(encode_claim(msgspec.structs.replace(record, format=2)))
    fields = msgspec.json.encode(record)[:-1] + b',"later":"%s"}'
    room = 4096 - len(with_checksum(fields % b""))
    assert decode_claim(with_checksum(fields % (b"x" * room))) == record
    with pytest.raises(CheckpointCorruptError, match="at most"):
        decode_claim(with_checksum(fields % (b"x" * (room + 1))))


def test_a_run_claim_travels_between_ranks_and_has_what_claim_run_returns():
    claim = RunClaim("s3://bucket/run", 3)
    assert pickle.loads(pickle.dumps(claim)) == claim
    assert RunClaim("s3://b/r", MAX_CLAIM).number == MAX_CLAIM
    for url, number in (*(("s3://b/r", n) for n in (0, True, "1", MAX_CLAIM + 1)), (None, 1)):
        with pytest.raises(ConfigError):
            RunClaim(url, number)


def test_a_claim_is_for_the_steps_directly_below_its_run():
    claim = RunClaim("s3://bucket/run", 3)
    assert rule.check_claim(claim, StoreSpec("s3://bucket/run/step-1")) == 3
    assert rule.check_claim(None, StoreSpec("s3://bucket/elsewhere/step-1")) is None
    for path in ("/other/step-1", "/run", "/run/a/b", ""):
        with pytest.raises(InputError, match="for the run s3://bucket/run") as caught:
            rule.check_claim(claim, StoreSpec(f"s3://bucket{path}"))
        assert caught.value.url == f"s3://bucket{path}"
    with pytest.raises(ConfigError, match="got int"):
        rule.check_claim(3, StoreSpec("s3://bucket/run/step-1"))
