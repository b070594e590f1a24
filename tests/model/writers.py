"""A save: rules 2 to 6, `commit.begin`, `commit.commit`, `publishing.publish_dot_metadata`.

With rule 8, where it finds a deletion that nobody has finished.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from tests.model.removers import Remover
from tests.model.world import (
    BEACON,
    DATA,
    DENIED,
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

UNSEEN = "a save that no listing shows"
LATE_BEACON = "the beacon follows the begin token"
LATE_LOOK = "what .metadata was is asked after the commit"
UNASKED = "what stands when a deletion is finished is replaced"


class Writer(Remover):
    """Save number `save`. What it sends at the same time may arrive in any order.

    Args:
        overwrite: may replace what is committed.
        beacon: False leaves the beacon out, which only a sweep looks at, to have fewer states.
    """

    def __init__(
        self, save: int, *, overwrite: bool = False, beacon: bool = True, **options: Any
    ) -> None:
        super().__init__(f"writer {save}", **options)
        self.beacon = beacon and UNSEEN not in self.weak
        self.save, self.bit, self.overwrite = save, 1 << save, overwrite
        order = ["light+look", "begin", "upload", "check+index", "put"]
        if "begin token read after data" in self.weak:
            order = ["light+look", "upload", "begin", "check+index", "put"]
        elif LATE_BEACON in self.weak:
            order = ["look", "begin", "light", "upload", "check+index", "put"]
        if not self.beacon:
            order = [each.removeprefix("light+") for each in order if each != "light"]
        self.first = order[0]
        self.after = {step: then for steps, then in pairwise(order) for step in steps.split("+")}

    def wrong(self, me: Me, store: Store) -> str | None:
        took_effect = bool(store.committed & self.bit)
        if me.answer == "success" and not took_effect:
            return f"false success: save {self.save} was never committed"
        if me.answer in ("lost", "refused", "failed") and took_effect:
            return f"false conflict: save {self.save} took effect, its writer was told: {me.answer}"
        replaces = me.at == "upload" and me.token is not None and me.token.is_committed
        if replaces and not self.overwrite:
            return f"replaced unasked: save {self.save} is to replace what is committed"
        return None

    def moves(self, me: Me, store: Store) -> Iterator[Move]:
        """As all actors; and who looks on sees from when to when the save can be defeated."""
        for event, after, then in super().moves(me, store):
            under_way = then.under_way
            if me.at == "begin" and after.at == self.after["begin"]:
                under_way |= self.bit
            elif after.at is None or after.answer == "success":
                under_way &= ~self.bit
            yield event, after, then._replace(under_way=under_way)
        if me.lit:
            for event, _, after, then in self.send(me, store, Request("delete", BEACON, self.bit)):
                yield event, after._replace(lit=False), then

    def answered(self, me: Me, step: str, ok: bool = True) -> Me:
        """A request was answered; go on if no other is under way."""
        left = "+".join(each for each in me.at.split("+") if each != step)
        failed = me.failed or not ok
        if left:
            return me._replace(at=left, failed=failed)
        if not failed:
            return me._replace(at=self.after[step])
        missing = self.after[step] == "put"
        return me._replace(at="missing", failed=False) if missing else self.end(me, "failed")

    # --- the beacon, and what `.metadata` was: around rules 2 to 6

    def light(self, was: Me, before: Store) -> Iterator[Move]:
        for event, _, me, store in self.send(was, before, Request("put", BEACON, self.bit)):
            yield event, self.answered(me, "light"), store

    def look(self, was: Me, store: Store) -> Iterator[Move]:
        for event, answered, me in self.look_at_dot(was, store, "head"):
            yield event, self.answered(me, "look", answered), store

    def put_out(self, was: Me, before: Store) -> Iterator[Move]:
        for event, _, me, store in self.send(was, before, Request("delete", BEACON, self.bit)):
            yield event, self.end(me, was.answer), store

    def leave(self, me: Me, answer: str, *, gave_up: bool = False) -> Me:
        """Remove the beacon, and end."""
        if not self.beacon:
            return self.end(me, answer, gave_up=gave_up)
        gave_up = gave_up or me.gave_up
        return Me("put_out", 0, 0, 0, flying=me.flying, answer=answer, gave_up=gave_up)

    # --- rule 2

    def begin(self, was: Me, store: Store) -> Iterator[Move]:
        for event, found, me in self.get_marker(was, store):
            if not isinstance(found, Marker):
                foreign = me.dot_token is not None and not self.overwrite
                after = me._replace(at=self.after["begin"])
                if found == NO_ANSWER:
                    after = self.end(me, "failed")
                elif foreign:
                    after = self.leave(me, "refused")
            elif found.state == "deleting":
                after = me._replace(at="finish", token=found)
            elif found.is_committed and not self.overwrite and not me.changed:
                after = self.leave(me, "refused")
            else:
                after = me._replace(at=self.after["begin"], token=found, changed=False)
            yield event, after, store

    def buried(self, me: Me) -> Me:
        """The deletion is finished, by us or by somebody else: begin again."""
        weak = UNASKED in self.weak
        return me._replace(at="begin", token=None, then="", changed=weak)

    def done(self, me: Me, answer: str, *, gave_up: bool = False) -> Me:
        """The deletion could not be finished: refused, or nobody knows."""
        finish = self.leave if answer == "failed" and me.denied else self.end
        return finish(me, "failed", gave_up=gave_up)

    # --- rules 3 to 5

    def upload(self, was: Me, before: Store) -> Iterator[Move]:
        for event, _, me, store in self.send(was, before, Request("put", DATA, self.bit)):
            yield event, me._replace(at=self.after["upload"]), store

    def check(self, me: Me, store: Store) -> Iterator[Move]:
        whole = bool(store.data >> store.data_of(self.save) & 1)
        yield self.event("list", EVERYTHING), self.answered(me, "check", whole), store

    def missing(self, was: Me, store: Store) -> Iterator[Move]:
        """Who has removed it has changed the marker before."""
        for event, found, me in self.get_marker(was, store):
            same = found in (NO_ANSWER, me.token)
            yield event, self.end(me, "failed" if same else "lost"), store

    def index(self, was: Me, before: Store) -> Iterator[Move]:
        log = 0
        if was.token is not None:
            log = was.token.log | (0 if was.token.commit == NOBODY else 1 << was.token.commit)
        body = Marker("committed", self.save, (self.name, was.writes), log)
        for event, _, me, store in self.send(was, before, Request("put", INDEX, self.bit)):
            yield event, self.answered(me._replace(body=body), "index"), store

    def landed(self, me: Me, found: Marker) -> bool:
        return super().landed(me, found) if me.then else found.knows(self.save)

    def ask(self, was: Me, store: Store) -> Iterator[Move]:
        """Who reads that it was superseded looks at `.metadata` again."""
        marker = store.marker
        is_ours = marker and marker.is_committed and marker.commit == self.save
        for event, me, then in super().ask(was, store):
            late = me.at == "publish_put" and not is_ours
            yield event, me._replace(at="publish", dot_token=None) if late else me, then

    def decided(self, me: Me, landed: Answer) -> Me:
        if me.then:
            return super().decided(me, landed)
        if landed == DENIED:
            return self.end(me, "failed")
        if landed:
            return self.start()._replace(
                at="late_look" if LATE_LOOK in self.weak else "publish_put",
                body=self.save,
                dot_token=me.dot_token,
                lit=self.beacon,
                answer="success",
                faults=me.faults,
                flying=me.flying,
                gave_up=me.gave_up,
            )
        if landed is not None:
            return self.end(me, "lost")
        if "cleaning up after an unknown outcome" in self.weak:
            return me._replace(at="clean_up")
        return self.end(me, "unknown", gave_up=True)

    def clean_up(self, was: Me, before: Store) -> Iterator[Move]:
        for event, _, me, store in self.send(was, before, Request("delete", DATA, self.bit)):
            yield event, self.end(me, "unknown", gave_up=True), store

    def late_look(self, was: Me, store: Store) -> Iterator[Move]:
        """Only in a mutant."""
        for event, answered, me in self.look_at_dot(was, store, "head"):
            yield event, me._replace(at="publish_put" if answered else "publish"), store

    def published(self, me: Me, done: bool | None) -> Me:
        end = self.leave if me.lit else self.end
        return end(me, "success", gave_up=done is None)
