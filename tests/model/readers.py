"""Loads: rule 7, as `opening.open_committed` and the GETs of data after it; and by stock torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.model.actors import Actor
from tests.model.world import DATA, EVERYTHING, INDEX, NO_ANSWER, Event, Marker, Me, Move, Store


class Reader(Actor):
    """`_COMMIT`, the index, the objects."""

    def wrong(self, me: Me, store: Store) -> str | None:
        if me.answer == "corrupt":
            return "torn read: the commit stands, and an object of it is missing or replaced"
        return None

    def begin(self, was: Me, store: Store) -> Iterator[Move]:
        for event, found, me in self.get_marker(was, store):
            if found == NO_ANSWER:
                after = self.end(me, "failed")
            elif isinstance(found, Marker):
                after = self.end(me, "absent")
                if found.is_committed:
                    after = me._replace(at="index", token=found)
            else:
                after = me._replace(at="explain")
            yield event, after, store

    def explain(self, me: Me, store: Store) -> Iterator[Move]:
        yield self.event("list", EVERYTHING), self.end(me, "absent"), store

    def index(self, me: Me, store: Store) -> Iterator[Move]:
        event, there = self.get(me, store, INDEX, me.token.commit)
        yield event, me._replace(at="data" if there else "why"), store

    def data(self, me: Me, store: Store) -> Iterator[Move]:
        event, there = self.get(me, store, DATA, store.data_of(me.token.commit))
        yield event, self.end(me, "whole") if there else me._replace(at="why"), store

    def why(self, was: Me, store: Store) -> Iterator[Move]:
        for event, found, me in self.get_marker(was, store):
            if found == NO_ANSWER:
                answer = "failed"
            elif isinstance(found, Marker) and found.commit == me.token.commit:
                answer = "corrupt" if found.is_committed else "gone"
            else:
                answer = "gone"
            yield event, self.end(me, answer), store


class StockReader(Actor):
    """`.metadata`, the objects: no marker tells it that the checkpoint has gone meanwhile.

    It takes less than the grace period: see `Clock`.
    """

    def wrong(self, me: Me, store: Store) -> str | None:
        if me.answer == "torn":
            return "torn read: an object was removed within the grace period, under a stock reader"
        return None

    def begin(self, was: Me, store: Store) -> Iterator[Move]:
        for event, _, me in self.look_at_dot(was, store, "get"):
            if me.dot_token is None:
                yield event, self.end(me, "absent"), store
            else:
                yield event, me._replace(at="data"), store._replace(loading=True)

    def data(self, me: Me, store: Store) -> Iterator[Move]:
        event, there = self.get(me, store, DATA, store.data_of(me.dot_token))
        yield event, self.end(me, "whole" if there else "torn"), store._replace(loading=False)


class Clock(Actor):
    """The grace period passes since the marker was written; no stock reader takes that long."""

    rounds = 3  # how many times

    def __init__(self, **options: Any) -> None:
        super().__init__("time", **options)

    def begin(self, me: Me, store: Store) -> Iterator[Move]:
        if not (store.aged and store.dot_aged) and not store.loading:
            after = me._replace(rounds=me.rounds - 1)
            if after.rounds == 0:
                after = self.end(me, "over")
            yield Event(self.name, "passes"), after, store._replace(aged=True, dot_aged=True)
