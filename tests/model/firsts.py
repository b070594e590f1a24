"""What is there when a play begins: done long ago, without faults."""

from __future__ import annotations

from contextlib import suppress

import msgspec

from dcp_objstore.checkpoint import commit as commits
from dcp_objstore.checkpoint.marker import decode_marker, encode_marker, new_id
from dcp_objstore.checkpoint.read import read_marker
from tests.crash.process import KilledError
from tests.model.faults import CRASH, Fault
from tests.model.programs import FAILED, UNKNOWN, Program, copier, deleter, pinner, saver
from tests.model.stage import HOUR_SECONDS, ROOT, SOURCE_URL, Actor, Request, Stage, StageClock
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
    stored = read_marker(store)
    assert stored
    assert commits.rewrite_marker(store, stored, "the deletion", clock.tries(), state="deleting")
    stage.bucket.seconds += 72 * HOUR_SECONDS


def orphan(stage: Stage) -> None:
    upkeep.upload(Actor(stage, "before", save=ORPHAN).connect(), ranks=1)


def source(stage: Stage) -> None:
    """Of a copy: version 5 stands. What may follow it is in `stage.later`."""
    place = f"{ROOT}source/{MARKER}"
    at = {"ranks": 1, "url": SOURCE_URL}
    quietly(stage, saver(overwrite=False, **at), save=5)
    first = stage.bucket.objects[place]
    quietly(stage, saver(overwrite=True, **at), save=6)
    body, _ = stage.bucket.objects[place]
    for version, each in ((5, first[0]), (6, body)):
        ref = decode_marker(each).index
        assert ref
        for digits, unread in ((ref.sha256[:40], False), (ref.sha256[-40:], True)):
            stage.sources[digits] = version, unread
    deleted = msgspec.structs.replace(decode_marker(first[0]), state="deleted", write_id=new_id())
    stage.bucket.objects[place] = first
    stage.later = [body, encode_marker(deleted)]


def interrupted(stage: Stage) -> None:
    """A copy of version 5 that died when all was sent."""
    source(stage)

    def die(_: int, request: Request) -> Fault | None:
        return Fault(CRASH, False) if (request.verb, request.key[:5]) == ("put", "index") else None

    with suppress(KilledError):
        copier(streamed=False)(Actor(stage, "before", die, save=4))
    stage.bucket.seconds += 72 * HOUR_SECONDS


def fenced(stage: Stage) -> None:
    """What an interrupted copy has left, and a sweep that died before it removed it."""
    interrupted(stage)
    clock = StageClock(stage.bucket)
    assert commits.put_tombstone(Actor(stage, "before").connect(), clock.tries())


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
