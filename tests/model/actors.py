"""What all actors of the model have in common: requests, rule 5, and rule 6."""

from __future__ import annotations

from collections.abc import Iterator

from tests.model.world import (
    ANY,
    DENIED,
    DOT,
    MARKER,
    NO_ANSWER,
    NOBODY,
    Answer,
    Event,
    Marker,
    Me,
    Move,
    Request,
    Store,
    arrivals,
    describe,
    etag,
    save_name,
    send,
)

Found = Marker | str | None


class Actor:
    """A program: each step is a method that yields every way in which it can go.

    Args:
        name: for events, and for write_ids.
        faults: how many of its requests the network may hit.
        tries: how often it sends again before its deadline.
        weak: the rules that are weakened.
    """

    first = "begin"
    rounds = 1

    def __init__(
        self, name: str, *, faults: int = 0, tries: int = 1, weak: frozenset[str] = frozenset()
    ) -> None:
        self.name, self.faults, self.tries, self.weak = name, faults, tries, weak

    def start(self) -> Me:
        return Me(self.first, self.faults, self.tries, self.rounds)

    def moves(self, me: Me, store: Store) -> Iterator[Move]:
        for step in me.at.split("+") if me.at is not None else ():
            for event, after, then in getattr(self, step)(me, store):
                if not after.pausing:
                    yield event, after, then
                    continue
                awake = after._replace(pausing=False)
                yield event, self.give_up(awake), then
                if awake.tries:
                    yield event, awake._replace(tries=awake.tries - 1), then
        yield from arrivals(self.name, me, store, self.weak)

    def wrong(self, me: Me, store: Store) -> str | None:
        """Why what this actor has been told is not true, or None."""
        return None

    def end(self, me: Me, answer: str, *, gave_up: bool = False) -> Me:
        """No step is left, and what was known is forgotten, so that equal ends are one state."""
        gave_up = gave_up or me.gave_up
        return Me(None, 0, 0, 0, flying=me.flying, answer=answer, gave_up=gave_up)

    def again(self, me: Me, at: str) -> Me:
        """After a failure, unless the deadline has come."""
        return me._replace(at=at, pausing=True)

    def give_up(self, me: Me) -> Me:
        """The deadline has come, before `me.at` was tried again."""
        return self.decided(me, None) if me.at == "put" else self.published(me, None)

    # --- requests

    def event(self, verb: str, kind: str, outcome: str = "ok") -> Event:
        return Event(self.name, verb, kind, "", outcome)

    def get_marker(self, me: Me, store: Store) -> Iterator[tuple[Event, Found, Me]]:
        yield self.event("get", MARKER, describe(store.marker)), store.marker, me
        if me.faults:
            yield self.event("get", MARKER, NO_ANSWER), NO_ANSWER, me._replace(faults=me.faults - 1)

    def get(self, me: Me, store: Store, kind: str, save: int) -> tuple[Event, bool]:
        there = bool((store.index if kind == "index" else store.data) >> save & 1)
        return self.event("get", kind, "ok" if there else "missing"), there

    def look_at_dot(self, me: Me, store: Store, verb: str) -> Iterator[tuple[Event, bool, Me]]:
        """HEAD tells whether it is there, GET also of which commit."""
        what = save_name(store.dot)
        if verb == "head" and store.dot is not None:
            what = "present"
        yield self.event(verb, DOT, what), True, me._replace(dot_token=store.dot)
        if me.faults:
            yield self.event(verb, DOT, NO_ANSWER), False, me._replace(faults=me.faults - 1)

    def send(
        self, me: Me, store: Store, request: Request
    ) -> Iterator[tuple[Event, Answer, Me, Store]]:
        return send(self.name, request, me, store, self.weak)

    # --- rules 4 and 5, `commit.put_marker`: `me.body` against `me.token`, what for is `me.then`

    def put(self, was: Me, before: Store) -> Iterator[Move]:
        expected = ANY if "unconditional marker" in self.weak else etag(was.token, self.weak)
        request = Request("put", MARKER, was.body, expected)
        for event, answer, me, store in self.send(was, before, request):
            if answer is True:
                yield event, self.decided(me, True), store
            elif answer == DENIED and BELIEVED in self.weak:
                yield event, self.decided(me, DENIED), store
            elif "no read-back" not in self.weak:
                unsure = me.unsure or answer is None
                yield event, me._replace(at="ask", denied=answer == DENIED, unsure=unsure), store
            elif answer is None:
                yield event, self.again(me, "put"), store
            else:
                yield event, self.decided(me, False), store

    def ask(self, was: Me, store: Store) -> Iterator[Move]:
        for event, found, me in self.get_marker(was, store):
            if isinstance(found, Marker) and self.landed(me, found):
                yield event, self.decided(me, True), store
            elif found == NO_ANSWER:
                yield event, self.again(me, "put"), store
            elif etag(found, self.weak) == etag(me.token, self.weak):
                refused = me.denied and not me.unsure
                after = self.decided(me, DENIED) if refused else self.again(me, "put")
                yield event, after, store
            else:
                yield event, self.decided(me, False), store

    def landed(self, me: Me, found: Marker) -> bool:
        return found.write == me.body.write

    def decided(self, me: Me, landed: Answer) -> Me:
        """What follows on the PUT of the marker; None: its outcome is unknown; DENIED: refused."""
        raise NotImplementedError

    def rewrite(self, me: Me, state: str, then: str) -> Me:
        """The marker of the same commit with a new write_id (rule 1), about to be put."""
        body = Marker(state, NOBODY, (self.name, me.writes))
        if me.token is not None:
            body = body._replace(commit=me.token.commit, log=me.token.log)
        after = me._replace(at="put", body=body, then=then, writes=me.writes + 1)
        return after._replace(denied=False, unsure=False)

    # --- rule 6, `publish.publish_dot_metadata`: `.metadata` of commit `me.body`

    def publish(self, was: Me, store: Store) -> Iterator[Move]:
        for event, answered, me in self.look_at_dot(was, store, "head"):
            after = me._replace(at="publish_check") if answered else self.published(me, None)
            yield event, after, store

    def publish_check(self, was: Me, store: Store) -> Iterator[Move]:
        for event, found, me in self.get_marker(was, store):
            if found == NO_ANSWER:
                after = self.published(me, None)
            elif isinstance(found, Marker) and found.is_committed and found.commit == me.body:
                after = me._replace(at="publish_put")
            else:
                after = self.not_ours(me, found)
            yield event, after, store

    def publish_put(self, was: Me, before: Store) -> Iterator[Move]:
        expected = ANY if "unconditional .metadata" in self.weak else was.dot_token
        looks_again = NO_LOOK not in self.weak
        request = Request("put", DOT, was.body, expected)
        for event, answer, me, store in self.send(was, before, request):
            if answer:
                after = me._replace(at="look_again", dot_token=None)
                yield event, after if looks_again else self.published(me, True), store
            else:
                unsure = me._replace(maybe=looks_again)
                yield event, self.again(unsure, "publish"), store

    def look_again(self, was: Me, store: Store) -> Iterator[Move]:
        for event, found, me in self.get_marker(was, store):
            if found == NO_ANSWER:
                yield event, self.published(me, None), store
            else:
                yield event, self.not_ours(me._replace(maybe=True), found, otherwise=True), store

    def not_ours(self, me: Me, found: Found, *, otherwise: bool = False) -> Me:
        """Who replaced us writes `.metadata`; who deleted us may have removed it before ours."""
        if me.maybe and isinstance(found, Marker) and not found.is_committed:
            return me._replace(at="take_back")
        return self.published(me, otherwise)

    def take_back(self, was: Me, before: Store) -> Iterator[Move]:
        for event, answer, me, store in self.send(was, before, Request("delete", DOT, None)):
            yield event, self.published(me, False if answer else None), store

    def published(self, me: Me, done: bool | None) -> Me:
        """What follows; None: not until the deadline."""
        raise NotImplementedError


NO_LOOK = "publisher does not look again"
BELIEVED = "a refusal is believed without reading"
