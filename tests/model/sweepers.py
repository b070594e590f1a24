"""Sweeping: rule 9, `sweep.sweep`, with `publishing.align_dot_metadata`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.model.removers import Remover
from tests.model.world import (
    BEACON,
    DATA,
    DOT,
    EVERYTHING,
    INDEX,
    NO_ANSWER,
    Marker,
    Marks,
    Me,
    Move,
    Request,
    Store,
)

NO_SECOND_FENCE = "no second fence"
UNFENCED = "mending without a fence"
TRUSTS_YOUNG = "a young .metadata is trusted"
GOES_ON = "a sweep goes on although the marker has changed"
MENDS_ALWAYS = "mending while a beacon is young"


class Sweeper(Remover):
    """Removes what no commit names. Every object and marker may look old to it.

    S3 dates a multipart object from its initiation, so a save that is under way may look old. In
    the model nothing hangs on time: what the grace period adds is kindness to slow readers.

    Args:
        rounds: sweeps, one after the other.
        patient: where a marker younger than the grace period is seen to be young.
        old: the saves whose objects are older than the grace period, where all others, and all
            beacons, are seen to be young. None: everything may look old, or young.
    """

    def __init__(
        self,
        name: str = "sweeper",
        *,
        rounds: int = 1,
        patient: bool = False,
        old: Marks | None = None,
        **options: Any,
    ) -> None:
        super().__init__(name, **options)
        self.rounds, self.patient = rounds, patient and "removing what is young" not in self.weak
        self.old = old

    def wrong(self, me: Me, store: Store) -> str | None:
        if me.saw_under_way and me.at == "put" and me.then in ("fence", "last_fence"):
            saves = f"{me.saw_under_way:b}"
            return f"a healthy save defeated: a fence against saves under way ({saves}), all young"
        return None

    def begin(self, was: Me, store: Store) -> Iterator[Move]:
        if "sweeping by age alone" in self.weak:
            yield from self.list(was, store)
            return
        for event, found, me in self.get_marker(was, store):
            if found == NO_ANSWER:
                after = self.done(me, "failed", gave_up=True)
            elif not isinstance(found, Marker):
                after = self.looked(me)
            elif found.state == "deleting":
                after = me._replace(at="finish", token=found)
            elif found.is_committed:
                after = me._replace(at="read_index", token=found)
            else:
                after = self.looked(me._replace(token=found))
            yield event, after, store

    def read_index(self, me: Me, store: Store) -> Iterator[Move]:
        event, there = self.get(me, store, INDEX, me.token.commit)
        yield event, self.looked(me) if there else me._replace(at="why"), store

    def why(self, was: Me, store: Store) -> Iterator[Move]:
        for event, _, me in self.get_marker(was, store):
            yield event, self.done(me, "failed"), store

    def looked(self, me: Me) -> Me:
        if "listing after the fence" in self.weak:
            return self.fence(me)
        return me._replace(at="list")

    def list(self, me: Me, store: Store) -> Iterator[Move]:
        """Old beacons go at once: no commit names them. A young one keeps the sweep off."""
        if self.old is not None:
            me = me._replace(saw_under_way=store.under_way)
        for event, after, then in self.choose(me, store):
            if store.beacons and self.old is None:
                yield event, after._replace(at="clear", held=after, body=store.beacons), then
            waits = store.beacons and after.at in ("put", "mend") and MENDS_ALWAYS not in self.weak
            yield event, self.done(me, "nothing", gave_up=True) if waits else after, then

    def clear(self, was: Me, before: Store) -> Iterator[Move]:
        """In any order: their names are random."""
        for bit in (1 << n for n in range(was.body.bit_length()) if was.body >> n & 1):
            for event, _, me, store in self.send(was, before, Request("delete", BEACON, bit)):
                left = was.body & ~bit
                yield event, me._replace(body=left) if left else was.held, store

    def choose(self, me: Me, store: Store) -> Iterator[Move]:
        event = self.event("list", EVERYTHING)
        named = me.token.commit if me.token is not None and me.token.is_committed else None
        data = None if named is None else store.data_of(named)
        loose = tuple(
            (kind, save)
            for kind, there, kept in ((DATA, store.data, data), (INDEX, store.index, named))
            for save in range(there.bit_length())
            if there >> save & 1 and save != kept
        )
        # Nothing is old, or something young keeps the sweep off: then only `.metadata` is mended.
        if named is not None or (me.token is not None and store.dot is not None):
            yield event, me._replace(at="mend"), store
        if me.token is None or (named is None) == (
            store.dot is None
        ):  # which may look older than the marker, or not
            yield event, self.done(me, "nothing"), store
        young = self.patient and not store.aged and me.token is not None
        foreign = me.token is None and store.dot is not None
        if "sweeping by age alone" in self.weak:
            foreign = False
        young = young or (self.old is not None and any(not self.old >> n & 1 for _, n in loose))
        if loose and not young and not foreign:
            if self.weak & {"listing after the fence", "no fence", "sweeping by age alone"}:
                yield event, self.removing(me, loose, "swept"), store
            else:
                yield event, self.fence(me._replace(removing=loose)), store

    def mend(self, was: Me, store: Store) -> Iterator[Move]:
        for event, found, me in self.get_marker(was, store):
            if found == NO_ANSWER:
                after = self.done(me, "failed", gave_up=True)
            elif isinstance(found, Marker) and found.write == me.token.write:
                after = self.align(me._replace(then="mend", token=found))
            else:
                after = self.done(me, "lost")
            yield event, after, store

    # --- the fence: PUT, and read back in any case

    def fence(self, me: Me) -> Me:
        return self.rewrite(me, "deleted" if me.token is None else me.token.state, "fence")

    def after_fence(self, me: Me, landed: bool) -> Me:
        return me._replace(at="read_back") if landed else self.done(me, "lost")

    def read_back(self, was: Me, store: Store) -> Iterator[Move]:
        for event, found, me in self.get_marker(was, store):
            if found == NO_ANSWER:
                after = self.done(me, "failed", gave_up=True)
            elif not isinstance(found, Marker) or found.write != me.token.write:
                after = self.done(me, "lost")
            elif "listing after the fence" in self.weak:
                after = me._replace(at="list")
            else:
                after = self.align(me)
            yield event, after, store

    # --- `.metadata` into line with `me.token`, in a loop

    def align(self, me: Me) -> Me:
        if me.token.state == "deleting":
            return self.done(me, "deleting", gave_up=True)
        return me._replace(at="judge_index" if me.token.is_committed else "judge_tombstone")

    def judge_tombstone(self, was: Me, store: Store) -> Iterator[Move]:
        for event, answered, me in self.look_at_dot(was, store, "get"):
            if not answered:
                after = self.done(me, "failed", gave_up=True)
            elif me.dot_token is None:
                after = self.aligned(me)
            else:
                after = me._replace(at="remove_stale", dot_token=None)
            yield event, after, store

    def remove_stale(self, was: Me, before: Store) -> Iterator[Move]:
        for event, answer, me, store in self.send(was, before, Request("delete", DOT, None)):
            if answer:
                yield event, me._replace(at="align_again", changed=True), store
            else:
                yield event, self.done(me, "failed", gave_up=True), store

    def judge_index(self, me: Me, store: Store) -> Iterator[Move]:
        event, there = self.get(me, store, INDEX, me.token.commit)
        yield event, me._replace(at="judge_dot" if there else "why"), store

    def judge_dot(self, was: Me, store: Store) -> Iterator[Move]:
        for event, answered, me in self.look_at_dot(was, store, "get"):
            if not answered:
                after = self.done(me, "failed", gave_up=True)
            elif me.dot_token == me.token.commit:
                after = self.aligned(me._replace(dot_token=None))
                young = self.patient and not store.dot_aged and TRUSTS_YOUNG not in self.weak
                if young and me.then == "fence":
                    after = self.done(me, "too young")
                elif not self.patient and me.then == "fence" and not me.changed:
                    yield event, self.done(me, "too young"), store  # it may look so, too
            else:
                after = me._replace(at="publish", body=me.token.commit, dot_token=None)
            yield event, after, store

    def published(self, me: Me, done: bool | None) -> Me:
        if done is None:
            return self.done(me, "failed", gave_up=True)
        me = me._replace(body=None, dot_token=None, maybe=False, changed=me.changed or done)
        return me._replace(at="align_again")

    def align_again(self, was: Me, store: Store) -> Iterator[Move]:
        for event, found, me in self.get_marker(was, store):
            if not isinstance(found, Marker):
                after = self.done(me, "failed", gave_up=True)
            elif (found.commit, found.state) == (me.token.commit, me.token.state):
                after = self.aligned(me._replace(token=found))
            else:
                # It is not ours that stands: nothing is removed any more.
                then = me.then if GOES_ON in self.weak else "mend"
                after = self.align(me._replace(token=found, then=then))
                if found.state != "deleting":
                    after = self.again(after, after.at)
            yield event, after, store

    def aligned(self, me: Me) -> Me:
        if me.then == "fence" and not me.changed:
            return self.removing(me, me.removing, "swept")
        unfenced = NO_SECOND_FENCE in self.weak or (me.then == "mend" and UNFENCED in self.weak)
        if unfenced or not me.changed:
            return self.done(me, "mended")
        # Stock readers may still be using what the old one named: the marker is young from now on.
        return self.rewrite(me, me.token.state, "last_fence")

    def after_last_fence(self, me: Me, landed: bool) -> Me:
        return self.done(me, "mended")

    def buried(self, me: Me) -> Me:
        """The objects are for a later sweep, when the tombstone is old."""
        return self.done(me, "finished")

    def done(self, me: Me, answer: str, *, gave_up: bool = False) -> Me:
        """The next sweep begins, or this was the last. A later one does what this one could not."""
        if me.rounds <= 1:
            return self.end(me, answer, gave_up=gave_up)
        fresh = Me("begin", me.faults, self.tries, me.rounds - 1, writes=me.writes)
        return fresh._replace(flying=me.flying, gave_up=me.gave_up)
