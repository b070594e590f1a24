"""The store and the network of the model.

Everything is a tuple of small values: a state is one value, equal to any other way of getting
there. One request is one step. An answer that takes long needs no step of its own: who gets it
late is who acts late on it, and every actor may pause, for ever too, before every step.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

MARKER, DOT, DATA, INDEX, EVERYTHING = "_COMMIT", ".metadata", "data", "index", ""
BEACON = "beacon"
ANY = "any version"  # no precondition
NO_ANSWER = "no answer"
DENIED = "denied"  # a refusal for good, of the store or of something before it
NOBODY = 9  # in place of a commit, in a tombstone that a sweep put where nothing was

Marks = int  # a set of saves: bit n is save n


class Marker(NamedTuple):
    """What `_COMMIT` holds (rule 1). `log` is a set here; its order decides nothing."""

    state: str
    commit: int
    write: tuple[str, int]  # the write_id: who wrote this content, and its how-manieth it was
    log: Marks = 0

    def knows(self, save: int) -> bool:
        return self.commit == save or bool(self.log >> save & 1)

    @property
    def is_committed(self) -> bool:
        return self.state == "committed"


class Store(NamedTuple):
    """The objects of one checkpoint, as sets of saves: `data` and `index` where they are whole."""

    marker: Marker | None = None
    dot: int | None = None  # the commit that `.metadata` describes
    data: Marks = 0
    index: Marks = 0
    beacons: Marks = 0
    aged: bool = True  # the marker is older than the grace period
    dot_aged: bool = True  # so is `.metadata`
    loading: bool = False  # a stock reader, which cannot see the marker, is under way
    committed: Marks = 0  # not on the store: all saves whose marker ever took effect
    under_way: Marks = 0  # not on the store: saves that have a begin token, and no answer yet
    strange: Marks = 0  # saves whose data has other bytes than their index says
    borrowed: Marks = 0  # saves whose index names the data of save 0; only in a mutant
    # Of the checkpoint that is copied here, see `copies`; its versions are saves 5 and 6.
    source: Marker = Marker("committed", 5, ("owner", 0))
    source_data: Marks = 1 << 5 | 1 << 6
    rotten: Marks = 0  # versions whose bytes have changed under their ETag
    made_of: frozenset[tuple[int, int]] = frozenset()  # data of a copy, and the version in its name
    unread: Marks = 0  # data that the store has copied, as its name says
    reused: frozenset[tuple[int, int]] = frozenset()  # saves whose index names another's data

    def data_of(self, save: int) -> int:
        """The save whose data is named by the index of this one."""
        return next((data for each, data in self.reused if each == save), save)


class Request(NamedTuple):
    """A change. `expected`: ANY, None (If-None-Match: *) or an ETag (If-Match)."""

    verb: str
    kind: str
    body: Any = None
    expected: Any = ANY

    @property
    def condition(self) -> str:
        if self.expected == ANY:
            return ""
        return "if-absent" if self.expected is None else "if-version"


class Event(NamedTuple):
    """What one step looks like from outside. The trace tests record the same of the real code."""

    actor: str
    verb: str
    kind: str = ""
    condition: str = ""
    outcome: str = "ok"

    def __str__(self) -> str:
        condition = f" {self.condition}" if self.condition else ""
        return f"{self.actor:8} {self.verb:6} {self.kind:9}{condition:11} -> {self.outcome}"


class Me(NamedTuple):
    """What an actor knows. `at` is its next step, or `a+b`; None: it has ended."""

    at: str | None
    faults: int  # of the network, that may still hit a request of this actor
    tries: int  # left until its deadline
    rounds: int  # sweeps that are left, this one included
    pausing: bool = False  # it has failed, and does `at` again unless its deadline has come
    token: Marker | None = None  # the marker that it found, or wrote
    body: Any = None  # what it is putting
    then: str = ""  # what for
    dot_token: int | None = None
    removing: tuple[tuple[str, int], ...] = ()  # kind and save of each object that is to go
    held: Me | None = None  # what follows when old beacons are removed
    saw_under_way: Marks = 0  # `Store.under_way` when it listed
    denied: bool = False  # the answer to the last PUT of the marker was `DENIED`
    unsure: bool = False  # a PUT of this marker has had no answer, and may yet arrive
    writes: int = 0  # markers written by it, for the next write_id
    changed: bool = False  # `.metadata` was not in line
    maybe: bool = False  # a PUT of `.metadata` may have taken effect or may yet
    failed: bool = False  # of the requests under way at the same time, one has failed
    lit: bool = False  # its beacon is to be removed, at any time
    base: int | None = None  # the save that it has copied a part of
    strange: bool = False  # that part had other bytes than the base's index says
    flying: tuple[Request, ...] = ()  # copies of requests that may yet arrive
    answer: str | None = None
    gave_up: bool = False  # ended with work undone, as if it had crashed


Move = tuple[Event, Me, Store]
Answer = bool | str | None


def etag(marker: Marker | None, weak: frozenset[str]) -> Any:
    """Content decides an ETag; the write_id makes every content new (rule 1)."""
    if marker is None:
        return None
    if "repeatable ETags" in weak:
        return (marker.state, marker.commit)
    return marker.write


def apply(request: Request, store: Store, weak: frozenset[str]) -> tuple[bool, Store]:
    """The store's side of a change: whether the precondition held, and the store afterwards."""
    if request.kind in (MARKER, DOT):
        now = etag(store.marker, weak) if request.kind == MARKER else store.dot
        if request.expected not in (ANY, now):
            return False, store
    body = request.body
    if request.kind == DOT:
        return True, store._replace(dot=body, dot_aged=False)
    if request.kind in (DATA, INDEX, BEACON):
        name = {DATA: "data", INDEX: "index", BEACON: "beacons"}[request.kind]
        there = getattr(store, name)
        if request.kind == DATA and request.verb == "put" and "shared data keys" in weak:
            there = 0
        there = there & ~body if request.verb == "delete" else there | body
        return True, store._replace(**{name: there})
    committed = store.committed
    if body is not None and body.is_committed:
        committed |= 1 << body.commit
    return True, store._replace(marker=body, aged=False, committed=committed)


def send(
    name: str, request: Request, me: Me, store: Store, weak: frozenset[str]
) -> Iterator[tuple[Event, Answer, Me, Store]]:
    """Everything that a network may do with a change: the answer is True, False, DENIED or None.

    A request that is lost is one that is delayed and never arrives.
    """
    done, after = apply(request, store, weak)
    event = Event(name, request.verb, request.kind, request.condition)
    word = "ok" if done else "refused"
    yield event._replace(outcome=word), done, me, after
    if not me.faults or request.kind in (DATA, INDEX, BEACON):
        # Uploads are retried until they are answered, and repeating them or deletions changes
        # nothing, since keys are used once (rule 3).
        return
    hit = me._replace(faults=me.faults - 1)
    later = hit._replace(flying=tuple(sorted({*me.flying, request}, key=repr)))
    yield event._replace(outcome="delayed"), None, later, store
    if request.kind == MARKER and request.verb == "put":
        yield event._replace(outcome=DENIED), DENIED, hit, store
        if done:
            yield event._replace(outcome=f"ok, {DENIED}"), DENIED, hit, after
    if done:
        yield event._replace(outcome="ok, no answer"), None, hit, after
        yield event._replace(outcome="ok, a copy delayed"), True, later, after
        again, twice = apply(request, after, weak)
        if not again:
            yield event._replace(outcome="ok, then its copy refused"), False, hit, twice
        if request.expected != ANY:
            yield event._replace(outcome="refused for nothing"), False, hit, store


def arrivals(name: str, me: Me, store: Store, weak: frozenset[str]) -> Iterator[Move]:
    """A copy that was delayed arrives, now, whatever has happened meanwhile."""
    for request in me.flying:
        done, after = apply(request, store, weak)
        left = me._replace(flying=tuple(one for one in me.flying if one != request))
        if done and request.kind == DOT and (request.verb == "delete" or request.expected is None):
            left = left._replace(gave_up=True)  # a later sweep has to see to it; see `invariants`
        word = "ok" if done else "refused"
        yield Event(name, "late", request.kind, request.condition, word), left, after


def describe(marker: Marker | None) -> str:
    return "absent" if marker is None else f"{marker.state} {save_name(marker.commit)}"


def save_name(save: int | None) -> str:
    return {None: "absent", NOBODY: "nobody's"}.get(save, f"save {save}")
