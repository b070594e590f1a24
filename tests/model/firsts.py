"""What is there when a play begins: done long ago, without faults."""

from __future__ import annotations

from dcp_objstore.checkpoint import commit as commits
from dcp_objstore.checkpoint.read import read_marker
from tests.model.programs import FAILED, UNKNOWN, Program, deleter, pinner, saver
from tests.model.stage import HOUR_SECONDS, ROOT, Actor, Stage, StageClock
from tests.model.world import DOT, MARKER
from tests.support import upkeep

ORPHAN = 3  # the save of an object whose writer died


def quietly(stage: Stage, *acts: Program, save: int = 0) -> None:
    """What went before, long ago and without faults."""
    for number, act in enumerate(acts, save):
        answer = act(Actor(stage, "before", save=number))
        assert answer.word not in (FAILED, UNKNOWN), answer
        stage.bucket.seconds += 72 * HOUR_SECONDS


def absent(stage: Stage) -> None:
    pass


def committed(stage: Stage) -> None:
    quietly(stage, saver(overwrite=False, ranks=1))


def replaced(stage: Stage) -> None:
    quietly(stage, saver(overwrite=False), saver(overwrite=True))


def tombstone(stage: Stage) -> None:
    committed(stage)
    quietly(stage, deleter(now=False), save=1)


def stale(stage: Stage) -> None:
    """A tombstone that was left with a `.metadata`."""
    committed(stage)
    published = stage.bucket.objects[ROOT + DOT]
    quietly(stage, deleter(now=False), save=1)
    stage.bucket.objects[ROOT + DOT] = published


def deleting(stage: Stage) -> None:
    committed(stage)
    store, clock = Actor(stage, "before").connect(), StageClock(stage.bucket)
    found = read_marker(store)
    assert found
    assert commits.rewrite_marker(store, found, "the deletion", clock.tries(), state="deleting")
    stage.bucket.seconds += 72 * HOUR_SECONDS


def orphan(stage: Stage) -> None:
    upkeep.upload(Actor(stage, "before", save=ORPHAN).connect(), ranks=1)


def torn(stage: Stage) -> None:
    committed(stage)
    for key in (MARKER, DOT):
        del stage.bucket.objects[ROOT + key]
    stage.bucket.landed.clear()


def unpublished(stage: Stage) -> None:
    committed(stage)
    del stage.bucket.objects[ROOT + DOT]


def pinned(stage: Stage) -> None:
    committed(stage)
    quietly(stage, pinner("paper"), save=1)
