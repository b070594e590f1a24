"""The model is one of our code: what the code does on a stage is always a path in the model.

Saves, deletions, sweeps and loads run together, one request at a time in a drawn order, with
answers lost, requests late or doubled, and processes that die. The model has to allow every
request that was made, has to end with the same answers, and with the same objects on the store.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import pytest

from dcp_objstore.checkpoint import commit as commits
from dcp_objstore.checkpoint import index as ix
from dcp_objstore.checkpoint.clock import Retries
from dcp_objstore.checkpoint.delete import delete
from dcp_objstore.checkpoint.marker import decode_marker
from dcp_objstore.checkpoint.read import explain_missing
from dcp_objstore.checkpoint.sweep import sweep
from dcp_objstore.errors import (
    CheckpointCorruptError,
    CheckpointExistsError,
    CheckpointGoneError,
    CheckpointNotFoundError,
    CommitLostError,
    CommitUnknownError,
    LostRaceError,
    ObjectNotFoundError,
    PermissionDeniedError,
    RetryableError,
    StoreUnavailableError,
)
from tests.model.actors import BELIEVED, Actor
from tests.model.configs import CODE_LACKS
from tests.model.paths import Path
from tests.model.readers import Reader
from tests.model.removers import KEEPS_DOT, Deleter
from tests.model.stage import Stage, StageClock, StagedStore, kind_of
from tests.model.sweepers import Sweeper
from tests.model.world import BEACON, DATA, DOT, INDEX, MARKER, Event, Marker, Store
from tests.model.writers import LATE_BEACON, UNSEEN, Writer
from tests.support import upkeep

FAULTS = 2
TRIES = 20  # more than any run needs: the code's deadline decides
NOT_DONE = "not done"  # for removers, whose errors all mean: call again


def saver(save: int, stage: Stage, *, overwrite: bool) -> Callable[[StagedStore], str]:
    clock, deadline_seconds = StageClock(old=True), stage.rng.choice([0.0, 60.0])
    settings = {"clock": clock, "deadline_seconds": deadline_seconds}

    def program(store: StagedStore) -> str:
        try:
            token = commits.begin(store, overwrite=overwrite, **settings)
        except CheckpointExistsError:
            return "refused"
        except (RetryableError, PermissionDeniedError):
            return "failed"
        index = upkeep.upload(store, ranks=1)
        try:
            done = upkeep.commit(store, token, index, **settings)
        except CommitLostError:
            return "lost"
        except CommitUnknownError:
            return "unknown"
        except (CheckpointCorruptError, StoreUnavailableError, PermissionDeniedError):
            return "failed"
        body = upkeep.DESCRIBED.derive(ix.encode(index))
        # As in `dcp.committing`: it is committed all the same.
        with suppress(StoreUnavailableError, RetryableError):
            commits.publish_dot_metadata(store, done.commit_id, body, **settings)
        commits.remove_beacon(store, token.beacon)
        return "success"

    return program


def deleter(stage: Stage, *, now: bool) -> Callable[[StagedStore], str]:
    clock, deadline_seconds = StageClock(old=True), stage.rng.choice([0.0, 60.0])

    def program(store: StagedStore) -> str:
        try:
            delete(store, now=now, clock=clock, deadline_seconds=deadline_seconds)
        except CheckpointNotFoundError:
            return "nothing"
        except (RetryableError, PermissionDeniedError):
            return NOT_DONE
        except LostRaceError:
            return "lost"
        return "deleted"

    return program


def sweeper(stage: Stage) -> Callable[[StagedStore], str]:
    clock = StageClock(old=stage.rng.random() < 0.8)
    deadline_seconds = stage.rng.choice([0.0, 60.0])

    def program(store: StagedStore) -> str:
        try:
            report = sweep(
                store,
                dot_metadata=upkeep.DESCRIBED,
                clock=clock,
                deadline_seconds=deadline_seconds,
            )
        except (
            RetryableError,
            PermissionDeniedError,
            CheckpointGoneError,
            CheckpointCorruptError,
        ):
            return NOT_DONE
        return report.outcome

    return program


def reader(store: StagedStore) -> str:
    try:
        marker, body = commits.open_committed(store)
        [entry] = ix.decode(body).objects
        try:
            store.get(entry.key, max_size_bytes=entry.size_bytes)
        except ObjectNotFoundError:
            raise explain_missing(store, marker.commit_id, entry.key) from None
    except CheckpointNotFoundError:
        return "absent"
    except CheckpointGoneError:
        return "gone"
    except CheckpointCorruptError:
        return "corrupt"
    except StoreUnavailableError:
        return "failed"
    return "whole"


# What a sweep or deletion of the model may have said, where that of the code says this.
SAME = {
    NOT_DONE: {"failed", "unknown", "unfinished", "deleting"},
    "clean": {"nothing", "mended"},
    "swept": {"swept", "nothing", "mended"},  # of beacons alone
    "waiting": {"nothing", "mended", "too young"},
    "lost": {"lost", "mended"},
    "foreign": {"nothing"},
    "mended": {"mended", "finished"},
    "deleted": {"deleted"},
}


@dataclass(frozen=True)
class Play:
    """Who plays, and what is there at first."""

    first: str
    writers: tuple[bool, ...]  # whether each overwrites
    deleter: bool = False
    sweepers: int = 0
    reader: bool = True


PLAYS = [
    Play("absent", (False, False)),
    Play("absent", (False, True)),
    Play("committed", (True, True)),
    Play("committed", (True, True), deleter=True),
    Play("committed", (True,), deleter=True, sweepers=1),
    Play("absent", (False, True), sweepers=1),
    Play("orphan", (True, True), deleter=True, sweepers=1),
    Play("tombstone", (False, True), deleter=True, sweepers=2),
    Play("committed", (True, True), deleter=True, sweepers=2),
    Play("stale", (False,), sweepers=2),
    Play("deleting", (False, True), deleter=True, sweepers=1),
]


def set_up(stage: Stage, first: str) -> Store:
    """Save 0 and what became of it, on the stage's store and in the model."""
    store = stage.store
    if first == "absent":
        return Store()
    if first == "orphan":
        [entry] = upkeep.upload(store, ranks=1).objects
        stage.names.keys[entry.key] = 3
        return Store(data=8)
    assert saver(0, stage, overwrite=False)(store) == "success"
    for key, (body, _) in store.objects.items():
        stage.names.learn(key, body, 0)
    published = store.objects[DOT]
    if first == "deleting":
        found = commits.read_marker(store)
        assert found
        assert commits.rewrite_marker(
            store, found, "the deletion", Retries(60.0, StageClock(old=True)), state="deleting"
        )
    elif first != "committed":
        delete(store, clock=StageClock(old=True))
    if first == "stale":
        store.objects[DOT] = published
    return seen(stage)


def seen(stage: Stage) -> Store:
    """The real store in the words of the model, but for write_ids."""
    objects, names = stage.store.objects, stage.names
    found = {DATA: 0, INDEX: 0, BEACON: 0}
    marker = dot = None
    for key, (body, _) in objects.items():
        if key == MARKER:
            real = decode_marker(body)
            log = sum(1 << names.commits[each] for each in real.log if each in names.commits)
            marker = Marker(real.state, names.commit(real), ("before", 0), log)
        elif key == DOT:
            dot = names.dots[body]
        else:
            found[kind_of(key)] |= 1 << names.keys[key]
    committed = 0 if marker is None else 1
    return Store(marker, dot, found[DATA], found[INDEX], found[BEACON], committed=committed)


def cast(stage: Stage, play: Play, weak: frozenset[str]) -> list[Actor]:
    """Put the actors on the stage; their likes in the model."""
    settings = {"faults": FAULTS, "tries": TRIES, "weak": weak}
    actors: list[Actor] = []
    for save, overwrite in enumerate(play.writers, 1):
        actors.append(Writer(save, overwrite=overwrite, **settings))
        program = saver(save, stage, overwrite=overwrite)
        stage.add(actors[-1].name, program, faults=FAULTS, save=save)
    if play.deleter:
        now = stage.rng.random() < 0.7
        actors.append(Deleter(now=now, **settings))
        stage.add("deleter", deleter(stage, now=now), faults=FAULTS, save=None)
    for number in range(play.sweepers):
        actors.append(Sweeper(f"sweep {number}", **settings))
        stage.add(actors[-1].name, sweeper(stage), faults=FAULTS, save=None)
    if play.reader:
        actors.append(Reader("reader", **settings))
        stage.add("reader", reader, faults=FAULTS, save=None)
    return actors


def run(seed: int, *, weak: frozenset[str] = CODE_LACKS) -> list[Event]:
    """One play on the stage, followed in the model."""
    stage = Stage(seed)
    play = PLAYS[seed % len(PLAYS)]
    first = set_up(stage, play.first)
    path = Path(cast(stage, play, weak), first)
    stage.run()
    for event in stage.events:
        path.follow(event)
    for player in stage.players.values():
        if not player.crashed:
            possible = SAME.get(player.answer or "", {player.answer})
            assert path.answers(player.name) & possible, _told(stage, player.name, path)
    ends = {_comparable(store) for store in path.stores()}
    assert _comparable(seen(stage)) in ends, _told(stage, "store", path)
    return stage.events


def _comparable(store: Store) -> tuple[object, ...]:
    marker = store.marker and (store.marker.state, store.marker.commit, store.marker.log)
    return (marker, store.dot, store.data, store.index, store.beacons)


def _told(stage: Stage, name: str, path: Path) -> str:
    lines = [str(event) for event in stage.events]
    if name in stage.players:
        lines.append(f"{name}: {stage.players[name].answer}, model: {path.answers(name)}")
    return "\n".join([*lines, f"{seen(stage)}", f"model: {path.stores()}"])


def test_what_the_code_does_is_a_path_in_the_model() -> None:
    for seed in range(400):
        run(seed)


@pytest.mark.parametrize(
    "mutant",
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
        KEEPS_DOT,
    ],
)
def test_a_mutant_is_no_model_of_the_code(mutant: str) -> None:
    """The check above has teeth: where code and model differ by one rule, it sees that."""
    with pytest.raises(AssertionError):
        for seed in range(400):
            run(seed, weak=CODE_LACKS | {mutant})


@pytest.mark.campaign
def test_what_the_code_does_is_a_path_in_the_model_for_long() -> None:
    for seed in range(1000, 11_000):
        run(seed)
