"""What actors of a fault schedule do, at the checkpoint floor, and which of their answers are true.

An answer is a word and, for a save, the commit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from dcp_objstore.checkpoint import commit as commits
from dcp_objstore.checkpoint import index as ix
from dcp_objstore.checkpoint.delete import delete
from dcp_objstore.checkpoint.names import MARKER_KEY
from dcp_objstore.checkpoint.pins import pin, unpin
from dcp_objstore.checkpoint.read import explain_missing
from dcp_objstore.checkpoint.repair import repair
from dcp_objstore.checkpoint.sweep import sweep
from dcp_objstore.errors import (
    CheckpointCorruptError,
    CheckpointExistsError,
    CheckpointGoneError,
    CheckpointNotFoundError,
    CheckpointPinnedError,
    CommitLostError,
    CommitUnknownError,
    CorruptDataError,
    DcpObjstoreError,
    LostRaceError,
    ObjectNotFoundError,
    RetryableError,
)
from tests.support import upkeep
from tests.support.schedules import (
    ERROR_IN_200,
    HOUR_SECONDS,
    ROOT,
    TRUNCATED,
    Actor,
    World,
    loose,
)
from tests.support.upkeep import DESCRIBED

SAVED, LOST, UNKNOWN, REFUSED, FAILED = "saved", "lost", "unknown", "refused", "failed"
DONE, ABSENT, WHOLE, CORRUPT = "done", "absent", "whole", "corrupt"


@dataclass(frozen=True)
class Answer:
    """What an actor said.

    Attributes:
        word: one of the above.
        commit_id: of a save that says that it has committed; of a deletion, of what it deleted.
        actor: with the requests that it made and the faults that it met.
        text: of the error.
    """

    word: str
    commit_id: str | None
    actor: Actor
    text: str = ""


Program: TypeAlias = Callable[[Actor], Answer]


def saver(*, overwrite: bool, deadline_seconds: float = 60.0) -> Program:
    """A save by two ranks."""

    def program(actor: Actor) -> Answer:
        store, clock = actor.connect(), actor.world.clock
        try:
            token = commits.begin(store, overwrite=overwrite)
            index = upkeep.upload(store)
            settings = {"clock": clock, "deadline_seconds": deadline_seconds}
            done = upkeep.finish(store, token, index, **settings)
        except CommitLostError as error:
            return Answer(LOST, None, actor, str(error))
        except CommitUnknownError as error:
            return Answer(UNKNOWN, None, actor, str(error))
        except CheckpointExistsError as error:
            return Answer(REFUSED, None, actor, str(error))
        except DcpObjstoreError as error:
            return Answer(FAILED, None, actor, str(error))
        body = DESCRIBED.derive(ix.encode(index))
        with contextlib.suppress(DcpObjstoreError):  # it is committed all the same
            commits.publish_dot_metadata(store, done.commit_id, body, **settings)
        return Answer(SAVED, done.commit_id, actor)

    return program


def _undone(act: Callable[[Actor], str | None]) -> Program:
    """`act`, and what its errors mean: call again."""

    def program(actor: Actor) -> Answer:
        try:
            return Answer(DONE, act(actor), actor)
        except CheckpointNotFoundError as error:
            return Answer(ABSENT, None, actor, str(error))
        except CommitUnknownError as error:
            return Answer(UNKNOWN, None, actor, str(error))
        except CheckpointPinnedError as error:
            return Answer(REFUSED, None, actor, str(error))
        except (LostRaceError, RetryableError, CorruptDataError, DcpObjstoreError) as error:
            return Answer(FAILED, None, actor, str(error))

    return program


def deleter(*, now: bool, deadline_seconds: float = 60.0) -> Program:
    """A deletion."""
    return _undone(
        lambda actor: (
            delete(
                actor.connect(), now=now, clock=actor.world.clock, deadline_seconds=deadline_seconds
            ).commit_id
        )
    )


def sweeper(deadline_seconds: float = 60.0) -> Program:
    """A sweep; its word is its outcome."""

    def program(actor: Actor) -> Answer:
        outcomes: list[str] = []

        def act(actor: Actor) -> None:
            store = actor.connect()
            done = sweep(
                store,
                dot_metadata=DESCRIBED,
                uploads=store.uploads(),
                clock=actor.world.clock,
                deadline_seconds=deadline_seconds,
            )
            outcomes.append(done.outcome)

        answer = _undone(act)(actor)
        return Answer(outcomes[0], None, actor) if outcomes else answer

    return program


def repairer() -> Program:
    """A repair."""
    return _undone(
        lambda actor: (
            repair(actor.connect(), dot_metadata=DESCRIBED, clock=actor.world.clock).commit_id
        )
    )


def pinner(name: str, *, remove: bool = False) -> Program:
    """Sets a pin, or removes it."""

    def act(actor: Actor) -> None:
        (unpin if remove else pin)(actor.connect(), name, clock=actor.world.clock)

    return _undone(act)


def reader(actor: Actor) -> Answer:
    """A load: every byte that the index names."""
    store = actor.connect()
    try:
        marker, body = commits.open_committed(store)
        for entry in ix.decode(body).objects:
            try:
                found, _ = store.get(entry.key, max_size_bytes=entry.size_bytes)
            except ObjectNotFoundError:
                raise explain_missing(store, marker.commit_id, entry.key) from None
            # The torch floor compares digests; the bytes say here what they belong to.
            if found != b"data of " + entry.key.encode():
                raise CheckpointCorruptError("another body")
    except CheckpointNotFoundError as error:
        return Answer(ABSENT, None, actor, str(error))
    except CheckpointGoneError as error:
        return Answer(FAILED, None, actor, str(error))
    except CorruptDataError as error:
        return Answer(CORRUPT, None, actor, str(error))
    except DcpObjstoreError as error:
        return Answer(FAILED, None, actor, str(error))
    return Answer(WHOLE, marker.commit_id, actor)


def untrue(world: World, answer: Answer) -> str | None:
    """Why this answer is not true of what has happened; None: it is true."""
    actor, landed = answer.actor, world.bucket.landed
    own = {commit_id for commit_id, who in landed.items() if who == actor.name}
    saves = any(verb == "put" and key == ROOT + MARKER_KEY for verb, key in actor.requests)
    if answer.word == SAVED:
        marker = world.bucket.marker()
        if own != {answer.commit_id} or marker is None or not marker.knows(answer.commit_id or ""):
            return f"it says that it has saved {answer.commit_id}, and what landed is {own}"
    elif answer.word in (LOST, REFUSED, FAILED) and own:
        return f"it says {answer.word} ({answer.text}), and {own} landed"
    elif answer.word == UNKNOWN:
        # Only where the answer to a PUT of the marker was lost, or the look at it afterwards.
        if not saves or not any(key == MARKER_KEY for _, key, _ in actor.faults):
            return f"it says unknown ({answer.text}) without a fault that explains it"
    elif answer.word == WHOLE and answer.commit_id not in landed:
        return "it has read what was never committed"
    elif answer.word == CORRUPT and not any(
        fault.kind in (TRUNCATED, ERROR_IN_200) for _, _, fault in actor.faults
    ):
        return f"it says corrupt ({answer.text})"
    return None


def gone(world: World, answer: Answer) -> str | None:
    """Why a deletion that says that it is done is not."""
    marker = world.bucket.marker()
    stands = marker is not None and marker.is_committed and marker.commit_id == answer.commit_id
    return f"{answer.commit_id} still stands" if answer.word == DONE and stands else None


def heal(world: World) -> str | None:
    """What is late arrives, sweeps come, a job resumes: why that does not end well, or None."""
    while world.late:
        world.arrive()
    # A late request may have come after the deletion of what it is about: sweeps are for that.
    for _ in range(6):
        world.clock.seconds += 72 * HOUR_SECONDS
        found = sweeper()(Actor(world, "healer"))
        if found.word == "clean":
            break
    else:
        return f"never clean, at last {found.word} {found.text}"
    if left := loose(world.bucket):
        return f"left after the sweeps: {left}"
    before = world.bucket.marker()
    read = reader(Actor(world, "healer"))
    wanted = WHOLE if before is not None and before.is_committed else ABSENT
    if read.word != wanted:
        return f"loading says {read.word} {read.text}, not {wanted}"
    if before is not None and before.pins:
        return None
    saved = saver(overwrite=True)(Actor(world, "healer"))
    if saved.word != SAVED or reader(Actor(world, "healer")).commit_id != saved.commit_id:
        return f"saving again says {saved.word} {saved.text}"
    return None
