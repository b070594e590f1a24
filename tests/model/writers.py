"""A save: rules 2 to 6, `commit.begin`, `commit.commit`, `publishing.publish_dot_metadata`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from tests.model.actors import Actor
from tests.model.world import (
    DATA,
    EVERYTHING,
    INDEX,
    NO_ANSWER,
    NOBODY,
    Marker,
    Me,
    Move,
    Request,
    Store,
)


class Writer(Actor):
    """Save number `save`.

    Args:
        overwrite: may replace what is committed.
    """

    def __init__(self, save: int, *, overwrite: bool = False, **options: Any) -> None:
        super().__init__(f"writer {save}", **options)
        self.save, self.bit, self.overwrite = save, 1 << save, overwrite
        order = ["begin", "upload", "check"]
        if "begin token read after data" in self.weak:
            order = ["upload", "begin", "check"]
        self.first = order[0]
        self.after = dict(pairwise(order))

    def wrong(self, me: Me, store: Store) -> str | None:
        took_effect = bool(store.committed & self.bit)
        if me.answer == "success" and not took_effect:
            return f"false success: save {self.save} was never committed"
        if me.answer in ("lost", "refused", "failed") and took_effect:
            return f"false conflict: save {self.save} took effect, its writer was told: {me.answer}"
        return None

    # --- rule 2

    def begin(self, was: Me, store: Store) -> Iterator[Move]:
        for event, found, me in self.get_marker(was, store):
            if not isinstance(found, Marker):
                at = self.after["begin"] if self.overwrite else "begin_foreign"
                after = me._replace(at=at) if found is None else self.end(me, "failed")
            elif found.state == "deleting" or (found.is_committed and not self.overwrite):
                after = self.end(me, "refused")
            else:
                after = me._replace(at=self.after["begin"], token=found)
            yield event, after, store

    def begin_foreign(self, was: Me, store: Store) -> Iterator[Move]:
        for event, answered, me in self.look_at_dot(was, store, "head"):
            if not answered:
                after = self.end(me, "failed")
            elif me.dot_token is not None:
                after = self.end(me, "refused")
            else:
                after = me._replace(at=self.after["begin"])
            yield event, after, store

    # --- rules 3 to 5

    def upload(self, was: Me, before: Store) -> Iterator[Move]:
        for event, _, me, store in self.send(was, before, Request("put", DATA, self.bit)):
            yield event, me._replace(at=self.after["upload"]), store

    def check(self, me: Me, store: Store) -> Iterator[Move]:
        whole = bool(store.data & self.bit)
        yield self.event("list", EVERYTHING), me._replace(at="index" if whole else "missing"), store

    def missing(self, was: Me, store: Store) -> Iterator[Move]:
        """Who has removed it has changed the marker before."""
        for event, found, me in self.get_marker(was, store):
            same = found in (NO_ANSWER, me.token)
            yield event, self.end(me, "failed" if same else "lost"), store

    def index(self, was: Me, before: Store) -> Iterator[Move]:
        log = 0
        if was.token is not None:
            log = was.token.log | (0 if was.token.commit == NOBODY else 1 << was.token.commit)
        body = Marker("committed", self.save, (self.name, 0), log)
        for event, _, me, store in self.send(was, before, Request("put", INDEX, self.bit)):
            yield event, me._replace(at="put", body=body), store

    def landed(self, me: Me, found: Marker) -> bool:
        return found.knows(self.save)

    def decided(self, me: Me, landed: bool | None) -> Me:
        if landed:
            return self.start()._replace(
                at="publish", body=self.save, answer="success", faults=me.faults, flying=me.flying
            )
        if landed is not None:
            return self.end(me, "lost")
        if "cleaning up after an unknown outcome" in self.weak:
            return me._replace(at="clean_up")
        return self.end(me, "unknown", gave_up=True)

    def clean_up(self, was: Me, before: Store) -> Iterator[Move]:
        for event, _, me, store in self.send(was, before, Request("delete", DATA, self.bit)):
            yield event, self.end(me, "unknown", gave_up=True), store

    def published(self, me: Me, done: bool | None) -> Me:
        return self.end(me, "success", gave_up=done is None)
