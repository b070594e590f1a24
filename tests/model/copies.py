"""A copy of a checkpoint, `convert.copy`, and who changes its source meanwhile.

A copy is a save of one object, which another copy may have left: one that died, or that is still
under way. Its source lies at another URL; versions 5 and 6 of it are saves of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.model.actors import Actor
from tests.model.world import (
    DATA,
    EVERYTHING,
    INDEX,
    MARKER,
    Event,
    Me,
    Move,
    Request,
    Store,
    describe,
)
from tests.model.writers import Writer

SOURCE = "source "  # before the kind of an object of it
ANY_SOURCE = "an object of another source is reused"
BEHIND_FENCE = "what a sweep may be removing is reused"
UNREAD = "a copy that compares every byte reuses what was copied unread"


class Copy(Writer):
    """Copy number `save`.

    Args:
        streamed: compares every byte. Otherwise the store copies, if it can.
    """

    def __init__(self, save: int, *, streamed: bool = False, **options: Any) -> None:
        super().__init__(save, **options)
        self.streamed = streamed
        self.after |= {"open_index": self.first, "begin": "arrived"}
        self.first = "open"

    def open(self, me: Me, store: Store) -> Iterator[Move]:
        event = self.event("get", SOURCE + MARKER, describe(store.source))
        opened = me._replace(at="open_index", base=store.source.commit)
        yield event, opened if store.source.is_committed else self.end(me, "failed"), store

    def open_index(self, me: Me, store: Store) -> Iterator[Move]:
        yield self.event("get", SOURCE + INDEX), me._replace(at=self.after["open_index"]), store

    def begin(self, was: Me, store: Store) -> Iterator[Move]:
        """A sweep puts a marker before it removes anything: where one is, nothing is reused."""
        for event, me, then in super().begin(was, store):
            fenced = me.at == "arrived" and me.token is not None and BEHIND_FENCE not in self.weak
            yield event, me._replace(at="upload") if fenced else me, then

    def arrived(self, me: Me, store: Store) -> Iterator[Move]:
        """One object of several whose names say that it is what would be sent, or none."""
        event, found = self.event("list", EVERYTHING), False
        for data, version in store.made_of:
            same = version == me.base or ANY_SOURCE in self.weak
            unread = self.streamed and bool(store.unread >> data & 1)
            if store.data >> data & 1 and same and (not unread or UNREAD in self.weak):
                found = True
                strange = version != me.base or (unread and bool(store.rotten >> version & 1))
                named = store._replace(
                    reused=store.reused | {(self.save, data)},
                    strange=store.strange | (self.bit if strange else 0),
                )
                yield event, me._replace(at=self.after["upload"], base=None), named
        if not found:
            yield event, me._replace(at="upload"), store

    def upload(self, me: Me, store: Store) -> Iterator[Move]:
        """The store copies the state of the object that has its ETag; otherwise it is read."""
        there = bool(store.source_data >> me.base & 1)
        if self.streamed:
            yield from self.fetch(me, store)
        else:
            event = self.event("copy", DATA, "ok" if there else "missing")
            yield event, me._replace(at="copied" if there else "fetch"), store

    def fetch(self, me: Me, store: Store) -> Iterator[Move]:
        there = bool(store.source_data >> me.base & 1)
        whole = me._replace(at="send_it")
        if store.rotten >> me.base & 1:
            whole = self.end(me, "failed")
        event = self.event("get", SOURCE + DATA, "ok" if there else "missing")
        yield event, whole if there else me._replace(at="explain_source"), store

    def explain_source(self, me: Me, store: Store) -> Iterator[Move]:
        event = self.event("get", SOURCE + MARKER, describe(store.source))
        yield event, self.end(me, "failed"), store

    def copied(self, me: Me, store: Store) -> Iterator[Move]:
        for event, after, then in self.send_it(me, store):
            yield event, after, then._replace(unread=then.unread | self.bit)

    def send_it(self, was: Me, before: Store) -> Iterator[Move]:
        made_of = before.made_of | {(self.save, was.base)}
        for event, _, me, store in self.send(was, before, Request("put", DATA, self.bit)):
            after = me._replace(at=self.after["upload"], base=None)
            yield event, after, store._replace(made_of=made_of)


class Owner(Actor):
    """Replaces version 5 of the source by version 6, or deletes it; then removes its data."""

    def __init__(self, **options: Any) -> None:
        super().__init__("owner", **options)

    def begin(self, me: Me, store: Store) -> Iterator[Move]:
        for state, version in (("committed", 6), ("deleted", 5)):
            source = store.source._replace(state=state, commit=version)
            event = Event(self.name, "put", SOURCE + MARKER)
            yield event, me._replace(at="remove"), store._replace(source=source)

    def remove(self, me: Me, store: Store) -> Iterator[Move]:
        after = store._replace(source_data=store.source_data & ~(1 << 5))
        yield Event(self.name, "delete", SOURCE + DATA), self.end(me, "done"), after
