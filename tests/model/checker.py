"""The search: every state that any order of steps and any faults can lead to, shortest way first.

A step reads and changes the store and one actor. So the moves of an actor depend on those two
alone, are worked out once for each such pair, in the readable way, and kept as numbers to add: a
state is one integer with a field for the store and one for each actor.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

FIELD_BITS = 20
FIELD = (1 << FIELD_BITS) - 1


@dataclass
class Result:
    """Of a search.

    Attributes:
        states: distinct ones, the first included.
        seconds: of the processor.
        wrong: the promise that was broken, or None.
        trace: the events that led there.
    """

    states: int
    seconds: float
    wrong: str | None = None
    trace: list[Any] = field(default_factory=list)


class BrokenPromiseError(Exception):
    """A move that breaks a promise."""

    def __init__(self, wrong: str, state: int, event: Any) -> None:
        super().__init__(wrong)
        self.wrong, self.state, self.event = wrong, state, event


Weak = frozenset[str]  # the names of the rules that are weakened


@dataclass(frozen=True)
class Config:
    """One search.

    Attributes:
        name: says who is there.
        store: the first state.
        actors: each makes one, of a set of weakened rules.
        wrong, wrong_at_rest: see `Search`.
    """

    name: str
    store: Any
    actors: Sequence[Callable[..., Any]]
    wrong: Callable[[Any], str | None]
    wrong_at_rest: Callable[[Any], str | None] = lambda _: None

    def search(self, weak: Weak = frozenset()) -> Result:
        actors = [make(weak=weak) for make in self.actors]
        return Search(actors, self.store, self.wrong, self.wrong_at_rest).run()


def catch(configs: Iterable[Config], weak: Weak) -> tuple[str, Result] | None:
    """The first configuration in which a weakened protocol breaks a promise; None: none."""
    for config in configs:
        result = config.search(weak)
        if result.wrong:
            return config.name, result
    return None


class _Numbers:
    """Values and their numbers. The lowest bit of an actor's number says that it has ended."""

    def __init__(self, has_ended: Callable[[Any], bool]) -> None:
        self.values: dict[int, Any] = {}
        self._numbers: dict[Any, int] = {}
        self._has_ended = has_ended

    def of(self, value: Any) -> int:
        number = self._numbers.get(value)
        if number is None:
            number = 2 * len(self._numbers) + self._has_ended(value)
            if number > FIELD:
                raise OverflowError("more local states than a field holds")
            self._numbers[value] = number
            self.values[number] = value
        return number


class Search:
    """All states of some actors around one store.

    Args:
        actors: each has `start()`, `moves(me, store)` and `wrong(me, store)`; a `me` has `at`.
        store: the first.
        wrong: what is wrong with a store, whichever actor does what.
        wrong_at_rest: what is wrong with it when all actors have ended.
    """

    def __init__(
        self,
        actors: Sequence[Any],
        store: Any,
        wrong: Callable[[Any], str | None],
        wrong_at_rest: Callable[[Any], str | None],
    ) -> None:
        self.actors, self.wrong, self.wrong_at_rest = actors, wrong, wrong_at_rest
        self.stores = _Numbers(lambda _: False)
        self.mes = [_Numbers(lambda me: me.at is None and not me.gave_up) for _ in actors]
        self.shifts = [FIELD_BITS * (i + 1) for i in range(len(actors))]
        self.first = self.stores.of(store)
        for actor, numbers, shift in zip(actors, self.mes, self.shifts, strict=True):
            self.first += numbers.of(actor.start()) << shift
        self.all_ended = sum(1 << shift for shift in self.shifts)

    def run(self, parents: dict[int, int] | None = None) -> Result:
        """Search until everything has been seen, or a promise is broken."""
        started = time.process_time()
        seen = {self.first}
        try:
            self._search(seen, parents)
        except BrokenPromiseError as broken:
            states, seconds = len(seen), time.process_time() - started
            if parents is None:  # the same way again, this time remembering it
                trace = self.run({}).trace
            else:
                trace = [*self._trace(parents, broken.state), broken.event]
            return Result(states, seconds, broken.wrong, trace)
        return Result(len(seen), time.process_time() - started)

    def _search(self, seen: set[int], parents: dict[int, int] | None) -> None:
        tables: list[tuple[int, int, dict[int, list[int]]]] = [
            (i, FIELD << shift | FIELD, {}) for i, shift in enumerate(self.shifts)
        ]
        ended = self.all_ended
        layer = [self.first]
        while layer:
            following: list[int] = []
            for state in layer:
                for i, mask, table in tables:
                    deltas = table.get(state & mask)
                    if deltas is None:
                        deltas = table[state & mask] = self._deltas(i, state)
                    for delta in deltas:
                        new = state + delta
                        if new not in seen:
                            seen.add(new)
                            following.append(new)
                            if parents is not None:
                                parents[new] = state
                            if new & ended == ended:
                                self._check_rest(new, state)
            layer = following

    def _deltas(self, i: int, state: int) -> list[int]:
        """What each move of actor `i` adds to the state; checks where they lead."""
        shift = self.shifts[i]
        store_number, me_number = state & FIELD, state >> shift & FIELD
        deltas = []
        for event, me, store in self._moves(i, state):
            wrong = self.wrong(store) or self.actors[i].wrong(me, store)
            if wrong:
                raise BrokenPromiseError(wrong, state, event)
            here = (self.mes[i].of(me) - me_number << shift) + self.stores.of(store) - store_number
            if here:
                deltas.append(here)
        return deltas

    def _moves(self, i: int, state: int) -> list[Any]:
        me = self.mes[i].values[state >> self.shifts[i] & FIELD]
        return list(self.actors[i].moves(me, self.stores.values[state & FIELD]))

    def _check_rest(self, new: int, state: int) -> None:
        wrong = self.wrong_at_rest(self.stores.values[new & FIELD])
        if wrong:
            raise BrokenPromiseError(wrong, state, self._event(state, new))

    def _trace(self, parents: dict[int, int], state: int) -> list[Any]:
        events = []
        while state != self.first:
            events.append(self._event(parents[state], state))
            state = parents[state]
        return events[::-1]

    def _event(self, state: int, new: int) -> Any:
        for i, shift in enumerate(self.shifts):
            others = state & ~(FIELD << shift | FIELD)
            for event, me, store in self._moves(i, state):
                if others | self.mes[i].of(me) << shift | self.stores.of(store) == new:
                    return event
        raise AssertionError("no move leads there")
