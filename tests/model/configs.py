"""What is searched: who is there, in what state the store is at first, how much may go wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.model.actors import BELIEVED, NO_LOOK, Actor
from tests.model.checker import Result, Search
from tests.model.incremental import (
    BORROWED,
    PINNED_LATE,
    UNPINNED,
    IncrementalWriter,
    Stranger,
)
from tests.model.invariants import what_is_wrong, what_is_wrong_at_rest
from tests.model.readers import Clock, Reader, StockReader
from tests.model.removers import KEEPS_DOT, Deleter
from tests.model.sweepers import GOES_ON, NO_SECOND_FENCE, TRUSTS_YOUNG, UNFENCED, Sweeper
from tests.model.world import Marker, Store
from tests.model.writers import LATE_BEACON, LATE_LOOK, UNASKED, UNSEEN, Writer

Weak = frozenset[str]
NONE: Weak = frozenset()

_FIRST = ("before", 0)
ABSENT = Store()
COMMITTED = Store(Marker("committed", 0, _FIRST), dot=0, data=1, index=1, committed=1)
TOMBSTONE = Store(Marker("deleted", 0, _FIRST), data=1, index=1, committed=1)
STALE = TOMBSTONE._replace(dot=0)
DELETING = COMMITTED._replace(marker=Marker("deleting", 0, _FIRST))
ORPHAN = Store(data=8)  # of save 3, whose writer died


@dataclass(frozen=True)
class Config:
    """One search.

    Attributes:
        name: says who is there.
        store: the first state.
        actors: made for a set of weakened rules.
        at_rest: whether `.metadata` is checked when all actors have ended.
        quick: belongs to the default test run.
    """

    name: str
    store: Store
    actors: Callable[[Weak], list[Actor]]
    at_rest: bool = True
    quick: bool = True

    def search(self, weak: Weak = NONE, *, most_states: int = 10**9) -> Result:
        at_rest = what_is_wrong_at_rest if self.at_rest else lambda _: None
        search = Search(self.actors(weak), self.store, what_is_wrong, at_rest)
        return search.run(most_states=most_states)


def _writers(weak: Weak, *faults: int, overwrite: str = "12", beacon: bool = False) -> list[Actor]:
    """Saves 1 and up, as many as there are numbers of faults."""
    return [
        Writer(n, overwrite=str(n) in overwrite, beacon=beacon, faults=each, weak=weak)
        for n, each in enumerate(faults, 1)
    ]


CONFIGS = [
    Config(
        "two create, reader",
        ABSENT,
        lambda weak: [*_writers(weak, 1, 1, overwrite=""), Reader("reader", faults=1)],
    ),
    Config(
        "create, overwrite, reader",
        ABSENT,
        lambda weak: [*_writers(weak, 2, 1, overwrite="2"), Reader("reader")],
    ),
    Config(
        "two overwrite, reader",
        COMMITTED,
        lambda weak: [*_writers(weak, 1, 2), Reader("reader", faults=1)],
    ),
    Config(
        "save after a deletion, deleter, reader",
        TOMBSTONE,
        lambda weak: [
            *_writers(weak, 1, overwrite=""),
            Deleter(faults=1, weak=weak),
            Reader("reader"),
        ],
    ),
    Config(
        "overwrite, deleter, reader",
        COMMITTED,
        lambda weak: [*_writers(weak, 1), Deleter(faults=1, weak=weak), Reader("reader")],
    ),
    Config(
        "overwrite, deleter, both with faults, reader",
        COMMITTED,
        lambda weak: [*_writers(weak, 2), Deleter(faults=2, weak=weak), Reader("reader")],
        quick=False,
    ),
    Config(
        "create, overwrite, deleter",
        ABSENT,
        lambda weak: [*_writers(weak, 1, 0, overwrite="2"), Deleter(weak=weak)],
    ),
    Config(
        "overwrite, sweeper twice, reader",
        COMMITTED,
        lambda weak: [
            *_writers(weak, 1, beacon=True),
            Sweeper(faults=1, rounds=2, weak=weak),
            Reader("reader"),
        ],
    ),
    Config(
        "create, sweeper of an orphan",
        ORPHAN,
        lambda weak: [
            *_writers(weak, 1, overwrite="", beacon=True),
            Sweeper(faults=1, rounds=2, weak=weak),
        ],
    ),
    Config(
        "two create where a deletion was left, reader",
        DELETING,
        lambda weak: [*_writers(weak, 1, 1, overwrite=""), Reader("reader")],
    ),
    Config(
        "create where a deletion is under way, deleter",
        DELETING,
        lambda weak: [*_writers(weak, 2, overwrite=""), Deleter(faults=1, weak=weak)],
    ),
    Config(
        "create, sweeper that cannot see uploads",
        ORPHAN,
        lambda weak: [
            *_writers(weak, 1, overwrite="", beacon=True),
            Sweeper(old=8, rounds=2, weak=weak),
        ],
    ),
    Config(
        "overwrite with itself as base, stranger, reader",
        COMMITTED,
        lambda weak: [
            IncrementalWriter(1, overwrite=True, faults=1, weak=weak),
            Stranger(),
            Reader("reader"),
        ],
    ),
    Config(
        "overwrite with itself as base, sweeper, stranger",
        COMMITTED,
        lambda weak: [
            IncrementalWriter(1, overwrite=True, weak=weak),
            Sweeper(rounds=2, weak=weak),
            Stranger(),
        ],
    ),
    Config(
        "overwrite with itself as base, deleter, sweeper, stranger",
        COMMITTED,
        lambda weak: [
            IncrementalWriter(1, overwrite=True, beacon=False, weak=weak),
            Deleter(weak=weak),
            Sweeper(weak=weak),
            Stranger(),
        ],
        quick=False,
    ),
    Config("a sweep mends .metadata", STALE, lambda weak: [Sweeper(weak=weak)]),
    Config(
        "overwrite, deleter, sweeper",
        COMMITTED,
        lambda weak: [*_writers(weak, 1), Deleter(weak=weak), Sweeper(weak=weak)],
    ),
    Config(
        "overwrite, patient sweeper, stock reader",
        COMMITTED,
        lambda weak: [
            *_writers(weak, 1),
            Sweeper(rounds=2, patient=True, weak=weak),
            StockReader("stock"),
            Clock(),
        ],
        at_rest=False,
    ),
    Config(
        "deleter, patient sweeper, stock reader",
        COMMITTED,
        lambda weak: [
            Deleter(now=False, weak=weak),
            Sweeper(rounds=2, patient=True, weak=weak),
            StockReader("stock"),
            Clock(),
        ],
    ),
    Config(
        "patient sweeper of a tombstone, stock reader",
        STALE,
        lambda weak: [Sweeper(rounds=3, patient=True, weak=weak), StockReader("stock"), Clock()],
    ),
    Config(
        "overwrite, deleter, patient sweeper, stock reader",
        COMMITTED,
        lambda weak: [
            *_writers(weak, 0),
            Deleter(now=False, weak=weak),
            Sweeper(rounds=2, patient=True, weak=weak),
            StockReader("stock"),
            Clock(),
        ],
        quick=False,
    ),
    Config(
        "create, overwrite where a deletion was left, sweeper",
        DELETING,
        lambda weak: [*_writers(weak, 1, 0, overwrite="2"), Sweeper(weak=weak)],
        quick=False,
    ),
    Config(
        "two overwrite, sweeper that cannot see uploads",
        COMMITTED._replace(data=9),
        lambda weak: [*_writers(weak, 1, 0, beacon=True), Sweeper(old=9, rounds=2, weak=weak)],
        quick=False,
    ),
    Config(
        "overwrite with faults, deleter, sweeper, reader",
        COMMITTED,
        lambda weak: [
            *_writers(weak, 1),
            Deleter(tries=0, weak=weak),
            Sweeper(tries=0, weak=weak),
            Reader("reader"),
        ],
        quick=False,
    ),
    Config(
        "overwrite, deleter with faults, sweeper, reader",
        COMMITTED,
        lambda weak: [
            *_writers(weak, 0),
            Deleter(faults=1, weak=weak),
            Sweeper(weak=weak),
            Reader("reader"),
        ],
        quick=False,
    ),
    Config(
        "overwrite, deleter, sweeper with faults, reader",
        COMMITTED,
        lambda weak: [
            *_writers(weak, 0),
            Deleter(weak=weak),
            Sweeper(faults=1, weak=weak),
            Reader("reader"),
        ],
        quick=False,
    ),
    Config(
        "two overwrite, sweeper, reader",
        COMMITTED,
        lambda weak: [*_writers(weak, 1, 0), Sweeper(weak=weak), Reader("reader")],
        quick=False,
    ),
    Config(
        "two overwrite, sweeper with faults, reader",
        COMMITTED,
        lambda weak: [*_writers(weak, 0, 0), Sweeper(faults=1, weak=weak), Reader("reader")],
        quick=False,
    ),
    Config(
        "create, overwrite, deleter, sweeper, reader",
        ABSENT,
        lambda weak: [
            *_writers(weak, 0, 0, overwrite="2"),
            Deleter(tries=0, weak=weak),
            Sweeper(tries=0, weak=weak),
            Reader("reader"),
        ],
        quick=False,
    ),
]

# Every mutant, that is a protocol with one rule weakened, by the name that the actors look for; and
# a configuration that catches it.
MUTANTS = {
    "unconditional marker": "two create, reader",
    "no read-back": "two create, reader",
    "tombstone removed": "save after a deletion, deleter, reader",
    "sweeping by age alone": "overwrite, sweeper twice, reader",
    "no fence": "overwrite, sweeper twice, reader",
    "listing after the fence": "overwrite, sweeper twice, reader",
    "begin token read after data": "create, sweeper of an orphan",
    "cleaning up after an unknown outcome": "two overwrite, reader",
    "shared data keys": "two overwrite, reader",
    "repeatable ETags": "overwrite, sweeper twice, reader",
    "unconditional .metadata": "create, overwrite, reader",
    NO_LOOK: "create, overwrite, deleter",
    "removing what is young": "deleter, patient sweeper, stock reader",
    NO_SECOND_FENCE: "patient sweeper of a tombstone, stock reader",
    TRUSTS_YOUNG: "overwrite, patient sweeper, stock reader",
    GOES_ON: "overwrite, deleter, patient sweeper, stock reader",
    UNFENCED: "patient sweeper of a tombstone, stock reader",
    BELIEVED: "two create, reader",
    UNSEEN: "create, sweeper that cannot see uploads",
    LATE_BEACON: "create, sweeper that cannot see uploads",
    LATE_LOOK: "create, overwrite, reader",
    UNASKED: "two create where a deletion was left, reader",
    UNPINNED: "overwrite with itself as base, stranger, reader",
    PINNED_LATE: "overwrite with itself as base, stranger, reader",
    BORROWED: "overwrite with itself as base, sweeper, stranger",
    KEEPS_DOT: "create where a deletion is under way, deleter",
}

# The mutants that the code still is. The trace tests follow it with these rules weakened.
CODE_LACKS: Weak = frozenset()


def catch(mutant: str) -> tuple[str, Result] | None:
    """What a mutant breaks, the shortest way; None: nothing."""
    config = next(config for config in CONFIGS if config.name == MUTANTS[mutant])
    result = config.search(frozenset({mutant}))
    return (config.name, result) if result.wrong else None
