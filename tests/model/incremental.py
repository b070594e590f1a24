"""A save with a base (rule 12 of `commit`), and who may overwrite the base's data meanwhile.

The base is the checkpoint at the same URL, so that a deleter and a sweeper are after it. Its data
is copied in two parts, each of which sees the store as it then is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.model.actors import Actor
from tests.model.world import DATA, INDEX, Event, Marker, Me, Move, Store
from tests.model.writers import Writer

UNPINNED = "a base is copied whatever its ETag"
PINNED_LATE = "the ETag of a base is that of the time of the copy"
BORROWED = "the data of a base is named instead of copied"


class IncrementalWriter(Writer):
    """Save number `save`, which copies what it can instead of uploading it."""

    def __init__(self, save: int, **options: Any) -> None:
        super().__init__(save, **options)
        self.after["begin"] = "base"

    def base(self, was: Me, store: Store) -> Iterator[Move]:
        for event, found, me in self.get_marker(was, store):
            is_committed = isinstance(found, Marker) and found.is_committed
            base = found.commit if isinstance(found, Marker) and is_committed else None
            yield (
                event,
                me._replace(at="upload" if base is None else "base_index", base=base),
                store,
            )

    def base_index(self, me: Me, store: Store) -> Iterator[Move]:
        event, there = self.get(me, store, INDEX, me.base)
        yield event, me._replace(at="copy" if there else "base_why"), store

    def base_why(self, was: Me, store: Store) -> Iterator[Move]:
        for event, _, me in self.get_marker(was, store):
            yield event, me._replace(at="upload"), store

    def copy(self, me: Me, store: Store) -> Iterator[Move]:
        yield from self._part(me, store, "copy_rest")

    def copy_rest(self, me: Me, store: Store) -> Iterator[Move]:
        yield from self._part(me, store, "complete")

    def _part(self, me: Me, store: Store, then: str) -> Iterator[Move]:
        bit = 1 << me.base
        event, is_strange = self.event("copy", DATA), bool(store.strange & bit)
        first = then == "copy_rest"
        holds = not is_strange or UNPINNED in self.weak
        if PINNED_LATE in self.weak:
            holds = first or is_strange == me.strange
        if BORROWED in self.weak and me.base == 0:
            after = me._replace(at=self.after["upload"])
            yield event, after, store._replace(borrowed=store.borrowed | self.bit)
        elif not store.data & bit or not holds:
            word = "missing" if holds else "refused"
            yield event._replace(outcome=word), me._replace(at="upload", strange=False), store
        else:
            yield event, me._replace(at=then, strange=me.strange or is_strange), store

    def complete(self, me: Me, store: Store) -> Iterator[Move]:
        strange = store.strange | (self.bit if me.strange else 0)
        made = store._replace(data=store.data | self.bit, strange=strange)
        after = me._replace(at=self.after["upload"], base=None, strange=False)
        yield self.event("put", DATA), after, made

    def check(self, me: Me, store: Store) -> Iterator[Move]:
        if not store.borrowed & self.bit:
            yield from super().check(me, store)
        else:
            yield self.event("list", DATA), self.answered(me, "check", bool(store.data & 1)), store


class Stranger(Actor):
    """Another program, which overwrites the data of save 0, once."""

    def __init__(self, **options: Any) -> None:
        super().__init__("stranger", **options)

    def begin(self, me: Me, store: Store) -> Iterator[Move]:
        strange = store._replace(strange=store.strange | 1, data=store.data | 1)
        yield Event(self.name, "put", DATA), self.end(me, "done"), strange
