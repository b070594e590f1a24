"""What actors on a stage do, at the checkpoint floor, and which of their answers are true.

An answer is a word and, for a save, the commit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, TypeAlias

import xxhash

from dcp_objstore.checkpoint import commit as commits, index as ix
from dcp_objstore.checkpoint.delete import delete
from dcp_objstore.checkpoint.pins import pin, unpin
from dcp_objstore.checkpoint.publish import publish_dot_metadata
from dcp_objstore.checkpoint.read import explain_missing, open_committed
from dcp_objstore.checkpoint.repair import repair
from dcp_objstore.checkpoint.sweep import sweep
from dcp_objstore.config import TransferConfig
from dcp_objstore.convert.copy import _Copy
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
)
from dcp_objstore.observe.dispatch import Channel
from dcp_objstore.read.stored_checkpoint import open_rooted
from dcp_objstore.stores.protocol import Capabilities, ObjectStore
from dcp_objstore.transfer import workers
from dcp_objstore.write.base import Unchanged, _BaseItem, _Run, open_base
from dcp_objstore.write.session import Save
from tests.model.faults import DAMAGED, ERROR_IN_200, TRUNCATED
from tests.model.stage import HOUR_SECONDS, ROOT, SOURCE_URL, URL, Actor, Stage, StageClock
from tests.model.world import MARKER
from tests.support import upkeep
from tests.support.upkeep import DESCRIBED

# As the actors of the model say it.
SUCCESS, LOST, UNKNOWN, REFUSED, FAILED = "success", "lost", "unknown", "refused", "failed"
DELETED, NOTHING, ABSENT, WHOLE, GONE = "deleted", "nothing", "absent", "whole", "gone"
CORRUPT, DONE = "corrupt", "done"


@dataclass(frozen=True)
class Answer:
    """What an actor said.

    Attributes:
        word: one of the above, or the outcome of a sweep.
        actor: with the requests that it made and the faults that it met.
        commit_id: of a save that says that it has committed; of a deletion, of what it deleted;
            of a load, of what it read.
        error: that it ended with.
    """

    word: str
    actor: Actor
    commit_id: str | None = None
    error: DcpObjstoreError | None = None

    def __str__(self) -> str:
        return f"{self.actor.name}: {self.word}{'' if self.error is None else f' ({self.error})'}"


Program: TypeAlias = Callable[[Actor], Answer]


def _saying(
    act: Callable[[Actor], Answer], words: dict[type[DcpObjstoreError], str]
) -> Callable[[Actor], Answer]:
    """`act`, and a word for each error; what is not among them is a failure."""

    def program(actor: Actor) -> Answer:
        try:
            return act(actor)
        except DcpObjstoreError as error:
            said = (word for kind, word in words.items() if isinstance(error, kind))
            return Answer(next(said, FAILED), actor, error=error)

    return program


def _settings(
    actor: Actor, deadline_seconds: float, ahead: timedelta = timedelta()
) -> dict[str, Any]:
    return {"clock": StageClock(actor.stage.bucket, deadline_seconds, ahead)}


Upload: TypeAlias = Callable[[Save], ix.Index]


def saver(
    *,
    overwrite: bool,
    deadline_seconds: float = 60.0,
    ranks: int = 2,
    url: str = URL,
    prepare: Callable[[Actor], Upload] | None = None,
) -> Program:
    """A save.

    Args:
        prepare: comes before it begins; uploads what it makes the index of. Default: new objects.
    """

    def act(actor: Actor) -> Answer:
        store, settings = actor.connect(url), _settings(actor, deadline_seconds)
        upload = prepare(actor) if prepare else lambda _: upkeep.upload(store, ranks=ranks)
        try:
            token = commits.take_begin_token(store, overwrite=overwrite, **settings)
        except CommitUnknownError as error:  # of a deletion that it finishes
            return Answer(FAILED, actor, error=error)
        save = Save(_spec(actor, url), 0, True, Channel("save", url), token=token)
        index = upload(save)
        done = upkeep.commit(store, token, index, **settings)
        body = DESCRIBED.derive(ix.encode(index))

        def publish() -> None:
            with suppress(DcpObjstoreError):  # it is committed all the same
                seen, tries = done.dot_metadata, settings["clock"].tries()
                publish_dot_metadata(store, done.commit_id, body, condition=seen, tries=tries)

        workers.concurrently(partial(commits.remove_beacon, store, token.beacon), publish)
        return Answer(SUCCESS, actor, done.commit_id)

    words = {CommitLostError: LOST, CommitUnknownError: UNKNOWN, CheckpointExistsError: REFUSED}
    return _saying(act, words)


def _spec(actor: Actor, url: str) -> Any:
    """What the code takes for a `StoreSpec`."""

    def connect() -> ObjectStore:
        store = actor.connect(url)
        store.capabilities = Capabilities()  # it copies
        return store

    return SimpleNamespace(url=url, config=TransferConfig(), open=connect, at=partial(_spec, actor))


def copier(*, streamed: bool, deadline_seconds: float = 60.0) -> Program:
    """A copy."""

    def prepare(actor: Actor) -> Upload:
        spec = _spec(actor, SOURCE_URL)
        copy = _Copy(spec, open_rooted(spec.open()), on_store=not streamed)
        return lambda save: copy.upload(save)[0]

    return saver(overwrite=False, deadline_seconds=deadline_seconds, prepare=prepare)


def incremental(_actor: Actor) -> Upload:
    """As the writer does with itself as base: an object that has not changed, in two runs."""

    def upload(save: Save) -> ix.Index:
        base = open_base(URL, save.spec)
        unchanged = Unchanged(base)
        if base.index is not None:
            (entry,) = base.index.objects
            whole = b"data of " + entry.key.encode()
            cuts = pairwise((0, 20, len(whole)))
            runs = [_Run(entry, [_base_item(*cut)], whole[slice(*cut)], cut[0]) for cut in cuts]
            unchanged.objects = [runs]
        unchanged.copy(save, TransferConfig())
        if base.index is None or not unchanged.stored:
            return upkeep.upload(save.open(), ranks=1)
        return replace(base.index, objects=(unchanged.stored[0].entry,))

    return upload


def _base_item(start: int, end: int) -> _BaseItem:
    stored = ix.Item(0, start, end - start, start, end - start, False, b"")
    return _BaseItem(SimpleNamespace(index=start, tensor_data=None), start, stored, "")


def owner(actor: Actor) -> Answer:
    """Replaces or deletes the source of a copy, and removes its data."""
    store, names = actor.connect(SOURCE_URL), actor.stage.names
    store.put(MARKER, actor.stage.rng.choice(actor.stage.later))
    store.delete(names.data_of(5))
    return Answer(DONE, actor)


def stranger(actor: Actor) -> Answer:
    """Overwrites the data of the save that was here first."""
    bucket, key = actor.stage.bucket, actor.stage.names.data_of(0)
    bucket.strange.add(key)
    actor.connect().put(key, bucket.written[key][::-1])
    return Answer(DONE, actor)


def deleter(*, now: bool, deadline_seconds: float = 60.0) -> Program:
    """A deletion."""

    def act(actor: Actor) -> Answer:
        done = delete(
            actor.connect(),
            grace_seconds=0 if now else math.inf,
            **_settings(actor, deadline_seconds),
        )
        return Answer(DELETED, actor, done.commit_id)

    return _saying(
        act,
        {
            CheckpointNotFoundError: NOTHING,
            CommitUnknownError: UNKNOWN,
            CheckpointPinnedError: REFUSED,
            LostRaceError: LOST,
        },
    )


def sweeper(deadline_seconds: float = 60.0, ahead: timedelta = timedelta()) -> Program:
    """A sweep; its word is its outcome."""

    def act(actor: Actor) -> Answer:
        store, settings = actor.connect(), _settings(actor, deadline_seconds, ahead)
        report = sweep(store, dot_metadata=DESCRIBED, uploads=store.uploads(), **settings)
        return Answer(report.outcome, actor)

    return _saying(act, {CommitUnknownError: UNKNOWN})


def repairer() -> Program:
    """A repair."""

    def act(actor: Actor) -> Answer:
        done = repair(actor.connect(), dot_metadata=DESCRIBED, **_settings(actor, 60.0))
        return Answer(DONE, actor, done.commit_id)

    return _saying(act, {CheckpointNotFoundError: ABSENT, CommitUnknownError: UNKNOWN})


def pinner(name: str, *, remove: bool = False) -> Program:
    """Sets a pin, or removes it."""

    def act(actor: Actor) -> Answer:
        (unpin if remove else pin)(actor.connect(), name, **_settings(actor, 60.0))
        return Answer(DONE, actor)

    return _saying(act, {CheckpointNotFoundError: ABSENT, CommitUnknownError: UNKNOWN})


def _read(actor: Actor) -> Answer:
    store = actor.connect()
    marker, body = open_committed(store)
    for entry in ix.decode(body).objects:
        try:
            found, _ = store.get(entry.key, max_size_bytes=entry.size_bytes)
        except ObjectNotFoundError:
            raise explain_missing(store, marker.commit_id, entry.key) from None
        # The torch floor compares digests of what is around tensors, too.
        same = xxhash.xxh3_128_digest(found) == entry.framing_digest
        if not same and entry.key not in actor.stage.bucket.strange:
            raise CheckpointCorruptError("another body")
    return Answer(WHOLE, actor, marker.commit_id)


# A load: every byte that the index names.
reader = _saying(
    _read, {CheckpointNotFoundError: ABSENT, CheckpointGoneError: GONE, CorruptDataError: CORRUPT}
)


def untrue(stage: Stage, answer: Answer) -> str | None:
    """Why this answer is not true of what has happened; None: it is true."""
    actor, landed, marker = answer.actor, stage.bucket.landed, stage.bucket.marker()
    own = {commit_id for commit_id, who in landed.items() if who == actor.name}
    stands = marker is not None and marker.is_committed and marker.commit_id == answer.commit_id
    met = {fault.kind for _, _, fault in actor.faults}
    # Only where the answer to a PUT of the marker was lost, or the look at it afterwards.
    puts = any(verb == "put" and key == ROOT + MARKER for verb, key in actor.requests)
    unknowable = puts and any(key == MARKER for _, key, _ in actor.faults)
    known = marker is not None and marker.knows(answer.commit_id or "")
    # Who is shown a damaged marker, twice, replaces it, and cannot know its log.
    forgetful = stage.bucket.forgotten.get(answer.commit_id or "")
    for player in stage.players.values():
        if player.name == forgetful:
            shown = [(key, fault.kind) for _, key, fault in player.actor.faults]
            known = known or shown.count((MARKER, DAMAGED)) > 1
    promises = {
        SUCCESS: own == {answer.commit_id} and known,
        LOST: not own,
        REFUSED: not own,
        FAILED: not own,
        UNKNOWN: unknowable,
        DELETED: not stands,
        WHOLE: answer.commit_id in landed,
        CORRUPT: bool(met & {TRUNCATED, DAMAGED, ERROR_IN_200}),
    }
    if promises.get(answer.word, True):
        return None
    return f"{answer}, commit {answer.commit_id}: what it put and landed is {own}, it met {met}"


def heal(stage: Stage) -> str | None:
    """What is late arrives, sweeps come, a job resumes: why that does not end well, or None."""
    bucket = stage.bucket
    while stage.late:
        stage.arrive()
    # A late request may have come after the deletion of what it is about: sweeps are for that.
    for _ in range(6):
        bucket.seconds += 72 * HOUR_SECONDS
        found = sweeper()(Actor(stage, "healer"))
        if found.word == "clean":
            break
    else:
        return f"never clean, at last {found}"
    if left := bucket.loose():
        return f"left after the sweeps: {left}"
    before = bucket.marker()
    read = reader(Actor(stage, "healer"))
    wanted = WHOLE if before is not None and before.is_committed else ABSENT
    if read.word != wanted:
        return f"loading says {read}, not {wanted}"
    if before is not None and before.pins:
        return None
    saved = saver(overwrite=True)(Actor(stage, "healer"))
    if saved.word != SUCCESS or reader(Actor(stage, "healer")).commit_id != saved.commit_id:
        return f"saving again says {saved}"
    return None
