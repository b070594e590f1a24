"""Deleting: rule 8, in `checkpoint.delete`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.model.actors import Actor
from tests.model.world import (
    DATA,
    DENIED,
    DOT,
    EVERYTHING,
    INDEX,
    NO_ANSWER,
    NOBODY,
    Answer,
    Marker,
    Me,
    Move,
    Request,
    Store,
)

KEEPS_DOT = "a deletion is finished without removing .metadata"


class Remover(Actor):
    """Rule 8 from where the marker says `deleting`, `commit.finish_deleting`: anyone may do it.

    `me.token` is a marker of the commit that goes.
    """

    def done(self, me: Me, answer: str, *, gave_up: bool = False) -> Me:
        return self.end(me, answer, gave_up=gave_up)

    def give_up(self, me: Me) -> Me:
        if me.at in ("put", "publish"):
            return super().give_up(me)
        return self.done(me, "unfinished", gave_up=True)

    def finish(self, was: Me, store: Store) -> Iterator[Move]:
        for event, found, me in self.get_marker(was, store):
            if found == NO_ANSWER:
                after = self.done(me, "failed", gave_up=True)
            elif isinstance(found, Marker) and found.commit == me.token.commit:
                after = self.buried(me)
                if found.state == "deleting":
                    after = me._replace(at="remove_dot", token=found)
                    if KEEPS_DOT in self.weak:
                        after = self.rewrite(after, "deleted", "bury")
            else:
                # `.metadata` of the save that came next may have met our removal. `upkeep.delete`
                # repairs it then, otherwise a later sweep has to.
                after = self.buried(me._replace(gave_up=True))
            yield event, after, store

    def remove_dot(self, was: Me, before: Store) -> Iterator[Move]:
        for event, answer, me, store in self.send(was, before, Request("delete", DOT, None)):
            if not answer:
                after = self.done(me, "failed", gave_up=True)
            elif "tombstone removed" in self.weak:
                after = me._replace(at="remove_marker")
            else:
                after = self.rewrite(me, "deleted", "bury")
            yield event, after, store

    def remove_marker(self, was: Me, before: Store) -> Iterator[Move]:
        """Only in a mutant."""
        for event, _, me, store in self.send(was, before, Request("delete", "_COMMIT", None)):
            yield event, self.buried(me), store

    def decided(self, me: Me, landed: Answer) -> Me:
        if landed is None or landed == DENIED:
            return self.done(me, "failed" if landed else "unknown", gave_up=True)
        me = me._replace(denied=False, unsure=False)
        if landed:
            me = me._replace(token=me.body)
        return getattr(self, f"after_{me.then}")(me._replace(body=None), landed)

    def after_bury(self, me: Me, landed: bool) -> Me:
        return self.buried(me) if landed else self.again(me, "finish")

    def buried(self, me: Me) -> Me:
        raise NotImplementedError

    def removing(self, me: Me, objects: tuple[tuple[str, int], ...], answer: str) -> Me:
        """Remove them; say so when that is done."""
        if not objects:
            return self.done(me, answer)
        return me._replace(at="remove", removing=objects, body=None, token=None, answer=answer)

    def remove(self, was: Me, before: Store) -> Iterator[Move]:
        """Data in any order, then indexes: as long as one is there, it says what else was."""
        data = [each for each in was.removing if each[0] == DATA]
        for kind, save in data or was.removing:
            request = Request("delete", kind, 1 << save)
            for event, _, me, store in self.send(was, before, request):
                left = tuple(each for each in was.removing if each != (kind, save))
                yield event, self.removing(me, left, was.answer), store


class Deleter(Remover):
    """Deletes what is committed.

    Args:
        now: removes the objects, too, and at once.
    """

    def __init__(self, name: str = "deleter", *, now: bool = True, **options: Any) -> None:
        super().__init__(name, **options)
        self.now = now

    def begin(self, was: Me, store: Store) -> Iterator[Move]:
        for event, found, me in self.get_marker(was, store):
            if found is None:
                after = me._replace(at="explain")
            elif not isinstance(found, Marker):
                after = self.end(me, "failed")
            elif self.now and found.commit != NOBODY:
                after = me._replace(at="read_index", token=found)
            elif found.state == "deleted":
                after = self.end(me, "nothing")
            else:
                after = self.mark(me._replace(token=found))
            yield event, after, store

    def explain(self, me: Me, store: Store) -> Iterator[Move]:
        yield self.event("list", EVERYTHING), self.end(me, "nothing"), store

    def read_index(self, me: Me, store: Store) -> Iterator[Move]:
        """Which objects there are is read while the index is sure to be there."""
        save = me.token.commit
        event, there = self.get(me, store, INDEX, save)
        if there:
            objects = (DATA, store.data_of(save)), (INDEX, save)
            after = self.mark(me._replace(removing=objects))
        else:
            after = me._replace(at="why")
        yield event, after, store

    def why(self, was: Me, store: Store) -> Iterator[Move]:
        for event, found, me in self.get_marker(was, store):
            after = self.end(me, "failed") if found == NO_ANSWER else self.mark(me)
            yield event, after, store

    def mark(self, me: Me) -> Me:
        if me.token.is_committed:
            return self.rewrite(me, "deleting", "mark")
        if me.token.state == "deleted" and not me.removing:
            return self.end(me, "nothing")
        return me._replace(at="finish")

    def after_mark(self, me: Me, landed: bool) -> Me:
        return me._replace(at="finish" if landed else "beaten")

    def beaten(self, was: Me, store: Store) -> Iterator[Move]:
        for event, found, me in self.get_marker(was, store):
            if found == NO_ANSWER:
                after = self.end(me, "failed", gave_up=True)
            elif not isinstance(found, Marker) or found.commit != me.token.commit:
                after = self.end(me, "lost")
            elif not found.is_committed:
                after = me._replace(at="finish")
            else:
                after = self.again(self.mark(me._replace(token=found)), "put")
            yield event, after, store

    def buried(self, me: Me) -> Me:
        return self.removing(me, me.removing, "deleted")
