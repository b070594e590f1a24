"""What the real code does on a stage is a path in the model, and keeps every promise.

Saves, deletions, sweeps and loads run together, one request at a time in a drawn order, with
requests lost, late, doubled or refused, answers of every kind, and processes that die. Where all
that happens has a word in the model, the model has to allow every request that was made, and has
to end with the same answers and with the same objects on the store. Whatever happens, what is
committed is whole after every change, answers are true, and sweeps and a new save find a clean
checkpoint in the end.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta

import pytest

from dcp_objstore.checkpoint.names import parse_data_key
from dcp_objstore.errors import (
    CheckpointCorruptError,
    CheckpointGoneError,
    PermissionDeniedError,
    RetryableError,
)
from tests.model import reference
from tests.model.actors import BELIEVED, Actor as ModelActor
from tests.model.copies import ANY_SOURCE, BEHIND_FENCE, UNREAD, Copy, Owner
from tests.model.faults import CRASH, KINDS, Fault
from tests.model.firsts import (
    absent,
    committed,
    deleting,
    fenced,
    interrupted,
    orphan,
    pinned,
    replaced,
    source,
    stale,
    tombstone,
    torn,
    unpublished,
)
from tests.model.incremental import UNPINNED, IncrementalWriter, Stranger
from tests.model.paths import Path
from tests.model.programs import (
    ABSENT,
    DELETED,
    DONE,
    FAILED,
    GONE,
    LOST,
    NOTHING,
    REFUSED,
    SUCCESS,
    UNKNOWN,
    WHOLE,
    Answer,
    Program,
    copier,
    deleter,
    heal,
    incremental,
    owner,
    pinner,
    reader,
    repairer,
    saver,
    stranger,
    sweeper,
    untrue,
)
from tests.model.readers import Reader
from tests.model.removers import KEEPS_DOT, Deleter
from tests.model.stage import (
    DAYS_SECONDS,
    HOUR_SECONDS,
    ROOT,
    Actor,
    Plan,
    Request,
    Stage,
    at_request,
    kind_of,
    seeded,
)
from tests.model.sweepers import Sweeper
from tests.model.world import BEACON, DATA, DOT, INDEX, MARKER, Marker, Store
from tests.model.writers import LATE_BEACON, LATE_LOOK, UNSEEN, Writer
from tests.support.campaign import cases
from tests.support.serial import Order, as_given, one_after_the_other, reverse

FAULTS = 2
TRIES = 20  # more than any run needs: the code's deadline decides


def seen(stage: Stage) -> Store:
    """The real store in the words of the model, but for write_ids."""
    bucket, names = stage.bucket, stage.names
    found = {DATA: 0, INDEX: 0, BEACON: 0}
    copies = {}
    for key in bucket.keys(ROOT):
        if kind_of(key) in found:
            found[kind_of(key)] |= 1 << names.keys[key]
        if data := parse_data_key(key):
            copies[names.keys[key]] = stage.sources.get(data.nonce[24:], (0, False))
    marker, real = None, bucket.marker()
    if real is not None:
        log = sum(1 << names.commits[each] for each in real.log if each in names.commits)
        marker = Marker(real.state, names.commit(real), ("before", 0), log)
    published = bucket.objects.get(ROOT + DOT)
    dot = None if published is None else names.dots[published[0]]
    ever = 0 if marker is None else 1
    return Store(
        *(marker, dot, found[DATA], found[INDEX], found[BEACON]),
        committed=ever,
        made_of=frozenset((save, version) for save, (version, _) in copies.items() if version),
        unread=sum(unread << save for save, (_, unread) in copies.items()),
    )


# --- a path in the model

# What a sweep or deletion of the model may have said, where that of the code says this.
_CALL_AGAIN = {"failed", "unknown", "unfinished", "deleting"}
SAME = {
    FAILED: _CALL_AGAIN,
    UNKNOWN: _CALL_AGAIN,
    "clean": {"nothing", "mended"},
    "swept": {"swept", "nothing", "mended"},  # of beacons alone
    "waiting": {"nothing", "mended", "too young"},
    LOST: {"lost", "mended"},
    "foreign": {"nothing"},
    "mended": {"mended", "finished"},
}


@dataclass(frozen=True)
class Play:
    """Who plays, and what is there at first."""

    first: Callable[[Stage], None]
    writers: tuple[bool, ...]  # whether each overwrites
    deleter: bool = False
    sweepers: int = 0
    copies: tuple[bool, ...] = ()  # whether each compares every byte
    owner: bool = False  # of the source of the copies
    is_incremental: bool = False  # the writers have what is there as base
    stranger: bool = False


PLAYS = [
    Play(absent, (False, False)),
    Play(absent, (False, True)),
    Play(committed, (True, True)),
    Play(committed, (True, True), deleter=True),
    Play(committed, (True,), deleter=True, sweepers=1),
    Play(absent, (False, True), sweepers=1),
    Play(orphan, (True, True), deleter=True, sweepers=1),
    Play(tombstone, (False, True), deleter=True, sweepers=2),
    Play(committed, (True, True), deleter=True, sweepers=2),
    Play(stale, (False,), sweepers=2),
    Play(deleting, (False, True), deleter=True, sweepers=1),
    Play(source, (True,), copies=(False, True), owner=True, deleter=True),
    Play(interrupted, (), copies=(False, True), owner=True, sweepers=1),
    Play(fenced, (), copies=(False,), deleter=True, sweepers=1),
    Play(committed, (True,), is_incremental=True, stranger=True, sweepers=1),
    Play(committed, (True,), is_incremental=True, deleter=True, sweepers=1),
]


def _deadline(rng: random.Random) -> float:
    return rng.choice([0.0, 60.0])


def _planned(stage: Stage) -> Plan:
    """Faults that have a word in the model, `FAULTS` of them at most."""
    left = FAULTS

    def plan(_number: int, request: Request) -> Fault | None:
        nonlocal left
        if not left or stage.rng.random() < 0.6:
            return None
        words: dict[str, list[Fault]] = {}
        for fault in EVERY_FAULT:
            word = fault.word(
                request.verb,
                kind_of(request.key),
                holds=request.holds,
                conditional=request.conditional,
            )
            # Two copies on the way are one in the model.
            flies = any(late == request for late, _ in stage.late)
            if word is not None and not (flies and fault.may_be_late):
                words.setdefault(word, []).append(fault)
        if not words:
            return None
        left -= 1
        return stage.rng.choice(words[stage.rng.choice(list(words))])

    return plan


EVERY_FAULT = [Fault(kind, effect) for kind in KINDS for effect in (True, False)]


def _cast(stage: Stage, play: Play, weak: frozenset[str]) -> list[ModelActor]:
    """Put the actors on the stage; their likes in the model."""
    settings = {"faults": FAULTS, "tries": TRIES, "weak": weak}
    rng, actors = stage.rng, []

    def add(actor: ModelActor, program: Program, save: int | None = None) -> None:
        actors.append(actor)
        stage.add(actor.name, program, _planned(stage), save)

    kind = IncrementalWriter if play.is_incremental else Writer
    prepare = incremental if play.is_incremental else None
    for save, overwrite in enumerate(play.writers, 1):
        given = {"deadline_seconds": _deadline(rng), "ranks": 1, "prepare": prepare}
        add(kind(save, overwrite=overwrite, **settings), saver(overwrite=overwrite, **given), save)
    for save, streamed in enumerate(play.copies, 2):
        program = copier(streamed=streamed, deadline_seconds=_deadline(rng))
        add(Copy(save, streamed=streamed, **settings), program, save)
    if play.owner:
        add(Owner(), owner)
    if play.stranger:
        add(Stranger(), stranger)
    if play.deleter:
        now = rng.random() < 0.7
        add(Deleter(now=now, **settings), deleter(now=now, deadline_seconds=_deadline(rng)))
    for number in range(play.sweepers):
        # To its clock everything is old; or young.
        ahead = timedelta(days=10_000 if rng.random() < 0.8 else -10_000)
        add(Sweeper(f"sweep {number}", **settings), sweeper(_deadline(rng), ahead))
    add(Reader("reader", **settings), reader)
    return actors


def run(seed: int, *, weak: frozenset[str] = frozenset()) -> Stage:
    """One play on the stage, followed in the model."""
    stage, play = Stage(seed), PLAYS[seed % len(PLAYS)]
    with seeded(seed):
        play.first(stage)
        stage.events.clear()
        path = Path(_cast(stage, play, weak), seen(stage))
        stage.bucket.slowness, stage.crashes = DAYS_SECONDS, 0.01
        answers = stage.run()
        while stage.late and stage.rng.random() < 0.9:
            stage.arrive()
        events, ending = list(stage.events), seen(stage)
        for event in events:
            path.follow(event)
        for name, answer in answers.items():
            assert path.answers(name) & _possible(answer), _told(stage, f"{answer}", path)
        ends = {_comparable(store) for store in path.stores()}
        assert _comparable(ending) in ends, _told(stage, f"{ending}", path)
        _check_promises(stage, answers)
    return stage


def _possible(answer: Answer) -> set[str]:
    if answer.actor.save is not None or answer.word not in SAME:
        return {answer.word}
    if answer.word == FAILED:
        expected = (
            RetryableError,
            PermissionDeniedError,
            CheckpointGoneError,
            CheckpointCorruptError,
        )
        assert isinstance(answer.error, expected), answer
    return SAME[answer.word]


def _comparable(store: Store) -> tuple[object, ...]:
    marker = store.marker and (store.marker.state, store.marker.commit, store.marker.log)
    return (marker, store.dot, store.data, store.index, store.beacons)


def _check_promises(stage: Stage, answers: dict[str, Answer]) -> None:
    """Answers are true, also when what is late has arrived; and it all heals."""
    for when in ("at once", "in the end"):
        for answer in answers.values():
            assert untrue(stage, answer) is None, _told(stage, f"{untrue(stage, answer)} {when}")
        if when == "at once":
            why = heal(stage)
            assert why is None, _told(stage, f"{why}")


def _told(stage: Stage, why: str, path: Path | None = None) -> str:
    lines = [f"seed {stage.seed}: {why}", *stage.log]
    return "\n".join([*lines, "" if path is None else f"model: {path.stores()}"])


def test_what_the_code_does_is_a_path_in_the_model():
    for seed in range(64):
        run(seed)


@pytest.mark.parametrize(
    "mutant",
    cases(
        [
            "unconditional marker",
            "no read-back",
            "tombstone removed",
            "no fence",
            "listing after the fence",
            "begin token read after data",
            "unconditional .metadata",
            BELIEVED,
            UNSEEN,
            LATE_BEACON,
            LATE_LOOK,
            KEEPS_DOT,
            ANY_SOURCE,
            BEHIND_FENCE,
            UNREAD,
            UNPINNED,
        ],
        default=["no fence", LATE_LOOK],
    ),
)
def test_a_mutant_is_no_model_of_the_code(mutant):
    """The check above has teeth: where code and model differ by one rule, it sees that."""
    with pytest.raises(AssertionError):
        for seed in range(400):
            run(seed, weak=frozenset({mutant}))


@pytest.mark.campaign
def test_what_the_code_does_is_a_path_in_the_model_for_long():
    for seed in range(1000, 11_000):
        run(seed)


# --- every fault at every request of every operation


@dataclass(frozen=True)
class Operation:
    """What meets a fault, and from where it begins."""

    first: Callable[[Stage], None]
    program: Program


OPERATIONS = {
    "save": Operation(absent, saver(overwrite=False)),
    "save over another": Operation(committed, saver(overwrite=True)),
    "save over a deleted one": Operation(tombstone, saver(overwrite=False)),
    "save where a deletion was left": Operation(deleting, saver(overwrite=False)),
    "delete": Operation(committed, deleter(now=False)),
    "delete now": Operation(committed, deleter(now=True)),
    "sweep what was replaced": Operation(replaced, sweeper()),
    "sweep what was deleted": Operation(tombstone, sweeper()),
    "sweep a dead save": Operation(torn, sweeper()),
    "repair": Operation(unpublished, repairer()),
    "pin": Operation(committed, pinner("paper")),
    "copy": Operation(interrupted, copier(streamed=True)),
    "incremental save": Operation(committed, saver(overwrite=True, prepare=incremental)),
    "unpin": Operation(pinned, pinner("paper", remove=True)),
    "load": Operation(committed, reader),
}


def _one_fault(
    operation: Operation, at: int, fault: Fault | None, order: Order
) -> tuple[Stage, Answer]:
    """The operation, whose n-th request meets the fault."""
    stage = Stage(at)
    with one_after_the_other(order):
        operation.first(stage)
        return stage, operation.program(Actor(stage, "actor", at_request(at, fault), save=2))


def _faults_of(operation: Operation, order: Order) -> Iterator[tuple[int, str, str, Fault]]:
    """Every fault that there is for each of its requests."""
    _, rehearsed = _one_fault(operation, 0, None, order)
    assert rehearsed.word not in (FAILED, UNKNOWN), rehearsed
    for at, (verb, key) in enumerate(rehearsed.actor.requests, 1):
        for fault in EVERY_FAULT:
            if fault.fits(verb):
                yield at, verb, key.removeprefix(ROOT), fault


# Requests of every kind, and what each rule does.
_DEFAULT = ["save over another", "delete now", "repair", "load"]


@pytest.mark.parametrize(
    ("name", "order"),
    cases(
        [(name, as_given) for name in OPERATIONS]
        + [(name, reverse) for name in OPERATIONS if name.startswith("save")],
        default=[
            *((name, as_given) for name in _DEFAULT),
            ("save", reverse),
        ],
    ),
)
def test_one_fault_at_any_request_is_answered_truly_and_heals(name, order):
    operation = OPERATIONS[name]
    usual = _one_fault(operation, 0, None, order)[1].word
    tried: Counter[str] = Counter()
    for at, verb, key, fault in _faults_of(operation, order):
        tried[fault.kind] += 1
        with seeded(at):
            stage, answer = _one_fault(operation, at, fault, order)
            where = f"{name}: {fault} at {at}. {verb} {key}"
            assert answer.actor.faults, f"{where}: was never met"
            # Everybody answers again within the deadline, and nothing seems to be what it is not.
            assert answer.word not in {UNKNOWN, *_WRONG - {usual}}, _told(stage, where)
            if name.startswith("save") and _from_the_commit_on(at, answer.actor):
                refused = (verb, key, fault) == ("put", MARKER, Fault("403", False))
                assert answer.word == (FAILED if refused else SUCCESS), _told(stage, where)
            _check_promises(stage, {"actor": answer})
    assert set(tried) == set(KINDS) - (_OF_CHANGES if name == "load" else set())
    assert sum(tried.values()) >= 15


_WRONG = {ABSENT, NOTHING, REFUSED, GONE}
_OF_CHANGES = {"409", "403", "late", "late, and doubled"}


def _from_the_commit_on(at: int, actor: Actor) -> bool:
    """Whether the n-th request was the first PUT of its own marker, or came after it."""
    requests = actor.requests[:at]
    indexes = [n for n, (_, key) in enumerate(requests) if kind_of(key[len(ROOT) :]) == INDEX]
    return bool(indexes) and ("put", ROOT + MARKER) in requests[indexes[0] :]


# --- several faults of every kind, several actors

FIRSTS = (absent, committed, replaced, tombstone, stale, deleting, torn, unpublished)
Cast = dict[str, Program]


def _two_writers(rng: random.Random) -> Cast:
    return {f"writer {number}": _writer(rng) for number in (1, 2)}


def _writer(rng: random.Random) -> Program:
    return saver(overwrite=rng.random() < 0.7, deadline_seconds=_deadline(rng))


def _deleter(rng: random.Random) -> Program:
    return deleter(now=rng.random() < 0.5, deadline_seconds=_deadline(rng))


CASTS: tuple[Callable[[random.Random], Cast], ...] = (
    _two_writers,
    lambda rng: {"writer": _writer(rng), "deleter": _deleter(rng)},
    lambda rng: {"writer": _writer(rng), "sweeper": sweeper(_deadline(rng))},
    lambda rng: {"deleter": _deleter(rng), "sweeper": sweeper(_deadline(rng))},
)
THIRDS: Cast = {"reader": reader, "repairer": repairer(), "pinner": pinner("paper")}


def play(seed: int) -> Stage:
    """One schedule of faults, all of it drawn from the seed."""
    stage = Stage(seed)
    rng = stage.rng
    with seeded(seed):
        rng.choice(FIRSTS)(stage)
        cast = rng.choice(CASTS)(rng)
        if rng.random() < 0.5:
            third = rng.choice(list(THIRDS))
            cast[third] = THIRDS[third]
        share, kinds = rng.choice([0.05, 0.2, 0.5]), rng.sample(KINDS, rng.randint(1, len(KINDS)))
        left = Counter(dict.fromkeys(cast, 12))
        # Within the grace period of 24 h, or beyond it: a paused writer wakes up after a sweep.
        stage.jumps, stage.crashes = rng.choice([0.0, 0.1]), rng.choice([0.0, 0.01])

        def plan(_number: int, request: Request) -> Fault | None:
            if not left[request.actor] or rng.random() > share:
                return None
            left[request.actor] -= 1
            return Fault(rng.choice(kinds), rng.random() < 0.5)

        for number, (name, program) in enumerate(cast.items(), 2):
            stage.add(name, program, plan, number if name.startswith("writer") else None)
        answers = stage.run()
        stage.log += [f"{answer}" for answer in answers.values()]
        _check_promises(stage, answers)
    return stage


def test_drawn_faults_of_every_kind_are_answered_truly_and_heal():
    for seed in range(50):
        play(seed)


def test_drawn_faults_meet_everything_that_they_are_for():
    """Or they would prove nothing."""
    left = {*KINDS, CRASH, "late  ", "success", LOST, UNKNOWN, "swept", DELETED, DONE, WHOLE}
    for seed in range(300, 600):
        text = "\n".join(play(seed).log)
        left = {word for word in left if word not in text}
        if not left:
            return
    pytest.fail(f"never came up: {left}")


def test_the_same_seed_gives_the_same_log():
    for act in (run, play):
        seen_logs = set()
        for seed in range(6):
            first, second = act(seed), act(seed)
            assert first.log == second.log
            assert len(first.log) > 10
            seen_logs.add(tuple(first.log))
        assert len(seen_logs) == 6


@pytest.mark.campaign
@pytest.mark.timeout(1800)
def test_ten_thousand_drawn_faults_are_answered_truly_and_heal():
    for seed in range(10_000, 20_000):
        play(seed)


# --- one after the other, in any order, against a reference


def in_any_order(seed: int, steps: int) -> Counter[str]:
    """So many operations, one after the other; how often each was done."""
    stage = Stage(seed)
    rng, there, done = stage.rng, reference.Reference(stage), Counter[str]()

    def coin() -> bool:
        return rng.random() < 0.5

    def meet(kind: str) -> None:
        # More requests than any of them makes; what is to meet a fault later, does not.
        there.meet(rng.choice(list(reference.OPERATIONS)), rng.randint(1, 16), Fault(kind, coin()))

    rules: dict[str, Callable[[], None]] = {
        "save": lambda: there.save(overwrite=coin()),
        "load": there.load,
        "delete": lambda: there.delete(now=coin()),
        "sweep": there.sweep,
        "repair": there.repair,
        "pin": lambda: there.pin(rng.choice(["paper", "release"]), remove=coin()),
        "crash": lambda: meet(CRASH),
        "fault": lambda: meet(rng.choice(KINDS)),
    }
    with seeded(seed):
        try:
            for _ in range(steps):
                rule = rng.choice([*rules, "wait"])
                done[rule] += 1
                stage.log.append(rule)
                if rule == "wait":
                    stage.bucket.seconds += rng.choice([1, 20, 30, 72]) * HOUR_SECONDS
                else:
                    rules[rule]()
            assert heal(stage) is None
        except AssertionError as error:
            raise AssertionError(_told(stage, f"{error}")) from error
    return done


def test_any_order_of_operations_crashes_and_faults_does_what_the_reference_says():
    done = Counter[str]()
    for seed in range(30):
        done += in_any_order(seed, 40)
    assert min(done.values()) > 90, done


@pytest.mark.campaign
@pytest.mark.timeout(3600)
def test_any_long_order_of_operations_does_what_the_reference_says():
    for seed in range(10_000, 12_000):
        in_any_order(seed, 200)
