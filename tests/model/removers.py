"""Deleting: rule 8, `deleting.delete`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.model.actors import Actor
from tests.model.world import (
    DATA,
    DOT,
    INDEX,
    NO_ANSWER,
    NOBODY,
    Event,
    Marker,
    Me,
    Move,
    Request,
    Store,
)


class Remover(Actor):
    """Rule 8 from where the marker says `deleting`, `deleting.finish_deleting`: anyone may do it.

    `me.token` is a marker of the commit that goes.
    """

    def done(self, me: Me, answer: str, *, gave_up: bool = False) -> Me:
        return self.end(me, answer, gave_up=gave_up)

    def retry(self, event: Event, me: Me, store: Store, at: str) -> Iterator[Move]:
        for after in self.again(me, at, self.done(me, "unfinished", gave_up=True)):
            yield event, after, store

    def finish(self, was: Me, store: Store) -> Iterator[Move]:
        assert was.token
        for event, found, me in self.get_marker(was, store):
            if found == NO_ANSWER:
                after = self.done(me, "failed", gave_up=True)
            elif isinstance(found, Marker) and found.commit == me.token.commit:
                after = self.buried(me)
                if found.state == "deleting":
                    after = me._replace(at="remove_dot", token=found)
            else:
                after = self.buried(me)
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

    def decided(self, me: Me, landed: bool | None) -> Me:
        if landed is None:
            return self.done(me, "unknown", gave_up=True)
        if landed:
            me = me._replace(token=me.body)
        return getattr(self, f"after_{me.then}")(me._replace(body=None), landed)

    def after_bury(self, me: Me, landed: bool) -> Me:
        return self.buried(me) if landed else self.once_more(me, "finish")

    def once_more(self, me: Me, at: str) -> Me:
        if me.tries:
            return me._replace(at=at, tries=me.tries - 1)
        return self.done(me, "unfinished", gave_up=True)

    def buried(self, me: Me) -> Me:
        raise NotImplementedError


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
            if not isinstance(found, Marker):
                after = self.end(me, "nothing")
            elif self.now and found.commit != NOBODY:
                after = me._replace(at="read_index", token=found)
            elif found.state == "deleted":
                after = self.end(me, "nothing")
            else:
                after = self.mark(me._replace(token=found))
            yield event, after, store

    def read_index(self, me: Me, store: Store) -> Iterator[Move]:
        """Which objects there are is read while the index is sure to be there."""
        assert me.token
        event, there = self.get(me, store, INDEX, me.token.commit)
        if there:
            after = self.mark(me._replace(candidates=1 << me.token.commit))
        else:
            after = me._replace(at="why")
        yield event, after, store

    def why(self, was: Me, store: Store) -> Iterator[Move]:
        for event, found, me in self.get_marker(was, store):
            after = self.end(me, "failed") if found == NO_ANSWER else self.mark(me)
            yield event, after, store

    def mark(self, me: Me) -> Me:
        assert me.token
        if me.token.is_committed:
            return self.rewrite(me, "deleting", "mark")
        if me.token.state == "deleted" and not me.candidates:
            return self.end(me, "nothing")
        return me._replace(at="finish")

    def after_mark(self, me: Me, landed: bool) -> Me:
        return me._replace(at="finish" if landed else "beaten")

    def beaten(self, was: Me, store: Store) -> Iterator[Move]:
        assert was.token
        for event, found, me in self.get_marker(was, store):
            if found == NO_ANSWER:
                after = self.end(me, "failed", gave_up=True)
            elif not isinstance(found, Marker) or found.commit != me.token.commit:
                after = self.end(me, "lost")
            elif not found.is_committed:
                after = me._replace(at="finish")
            elif me.tries:
                after = self.rewrite(
                    me._replace(token=found, tries=me.tries - 1), "deleting", "mark"
                )
            else:
                after = self.end(me, "unfinished", gave_up=True)
            yield event, after, store

    def buried(self, me: Me) -> Me:
        if me.candidates:
            return me._replace(at="remove_data", body=None)
        return self.end(me, "deleted")

    def remove_data(self, was: Me, before: Store) -> Iterator[Move]:
        for event, _, me, store in self.send(was, before, Request("delete", DATA, was.candidates)):
            yield event, me._replace(at="remove_index"), store

    def remove_index(self, was: Me, before: Store) -> Iterator[Move]:
        for event, _, me, store in self.send(was, before, Request("delete", INDEX, was.candidates)):
            yield event, self.end(me, "deleted"), store
