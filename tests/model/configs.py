"""What is searched: who is there, in what state the store is at first, how much may go wrong."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tests.model.actors import BELIEVED, NO_LOOK, Actor
from tests.model.checker import Config
from tests.model.copies import ANY_SOURCE, BEHIND_FENCE, UNREAD, Copy, Owner
from tests.model.incremental import BORROWED, PINNED_LATE, UNPINNED, IncrementalWriter, Stranger
from tests.model.invariants import what_is_wrong, what_is_wrong_at_rest
from tests.model.readers import Clock, Reader, StockReader
from tests.model.removers import KEEPS_DOT, Deleter
from tests.model.sweepers import (
    GOES_ON,
    MENDS_ALWAYS,
    NO_SECOND_FENCE,
    TRUSTS_YOUNG,
    UNFENCED,
    Sweeper,
)
from tests.model.world import Marker, Store
from tests.model.writers import LATE_BEACON, LATE_LOOK, UNASKED, UNSEEN, Writer

Make = Callable[..., Actor]

_FIRST = ("before", 0)
ABSENT = Store()
COMMITTED = Store(Marker("committed", 0, _FIRST), dot=0, data=1, index=1, committed=1)
TOMBSTONE = Store(Marker("deleted", 0, _FIRST), data=1, index=1, committed=1)
STALE = TOMBSTONE._replace(dot=0)
DELETING = COMMITTED._replace(marker=Marker("deleting", 0, _FIRST))
ORPHAN = Store(data=8)  # of save 3, whose writer died


def _config(name: str, store: Store, *actors: Make) -> Config:
    return Config(name, store, actors, what_is_wrong, what_is_wrong_at_rest)


def _writers(*faults: int, overwrite: str = "12", beacon: bool = False) -> list[Make]:
    """Saves 1 and up, as many as there are numbers of faults."""
    return [
        partial(Writer, n, overwrite=str(n) in overwrite, beacon=beacon, faults=each)
        for n, each in enumerate(faults, 1)
    ]


# How the other actors are made; a call gives the options of one.
_deleter, _sweeper = partial(partial, Deleter), partial(partial, Sweeper)
_patient = partial(_sweeper, patient=True)
_copy = partial(partial, Copy)
_incremental = partial(partial, IncrementalWriter, 1, overwrite=True)
_reader, _faulty_reader = partial(Reader, "reader"), partial(Reader, "reader", faults=1)
_stock = [partial(StockReader, "stock"), Clock]

# Those that the default tests search.
QUICK = [
    _config("two create, reader", ABSENT, *_writers(1, 1, overwrite=""), _faulty_reader),
    _config("create, overwrite, reader", ABSENT, *_writers(2, 1, overwrite="2"), _reader),
    _config("two overwrite, reader", COMMITTED, *_writers(1, 2), _faulty_reader),
    _config(
        "save after a deletion, deleter, reader",
        TOMBSTONE,
        *(*_writers(1, overwrite=""), _deleter(faults=1), _reader),
    ),
    _config("overwrite, deleter, reader", COMMITTED, *_writers(1), _deleter(faults=1), _reader),
    _config("create, overwrite, deleter", ABSENT, *_writers(1, 0, overwrite="2"), _deleter()),
    _config(
        "create where a deletion is under way, deleter",
        DELETING,
        *(*_writers(2, overwrite=""), _deleter(faults=1)),
    ),
    _config(
        "create, sweeper that cannot see uploads",
        ORPHAN,
        *(*_writers(1, overwrite="", beacon=True), _sweeper(old=8, rounds=2)),
    ),
    _config(
        "overwrite with itself as base, stranger, reader",
        COMMITTED,
        *(_incremental(faults=1), Stranger, _reader),
    ),
    _config(
        "overwrite with itself as base, sweeper, stranger",
        COMMITTED,
        *(_incremental(), _sweeper(rounds=2), Stranger),
    ),
    _config(
        "save, copy, streamed copy of a rotten source",
        ABSENT._replace(rotten=1 << 5),
        *(*_writers(0), _copy(2, faults=1), _copy(3, streamed=True)),
    ),
    _config("a sweep mends .metadata", STALE, _sweeper()),
    _config("a save, a sweep mends", STALE, *_writers(1, beacon=True), _sweeper(old=1, rounds=2)),
    Config(
        "overwrite, patient sweeper, stock reader",
        COMMITTED,
        [*_writers(1), _patient(rounds=2), *_stock],
        what_is_wrong,
    ),
    _config(
        "deleter, patient sweeper, stock reader",
        COMMITTED,
        *(_deleter(now=False), _patient(rounds=2), *_stock),
    ),
    _config("patient sweeper of a tombstone, stock reader", STALE, _patient(rounds=3), *_stock),
]
LARGE = [
    _config(
        "overwrite, sweeper twice, reader",
        COMMITTED,
        *(*_writers(1, beacon=True), _sweeper(faults=1, rounds=2), _reader),
    ),
    _config(
        "create, sweeper of an orphan",
        ORPHAN,
        *(*_writers(1, overwrite="", beacon=True), _sweeper(faults=1, rounds=2)),
    ),
    _config(
        "two create where a deletion was left, reader",
        DELETING,
        *(*_writers(1, 1, overwrite=""), _reader),
    ),
    _config(
        "two copies, owner of the source, sweeper",
        ABSENT,
        *(_copy(1, beacon=False), _copy(2, beacon=False), Owner, _sweeper()),
    ),
    _config("overwrite, deleter, sweeper", COMMITTED, *_writers(1), _deleter(), _sweeper()),
    _config(
        "two copies with faults, owner of the source, sweeper",
        ABSENT,
        *(_copy(1, beacon=False, faults=1), _copy(2, beacon=False), Owner, _sweeper()),
    ),
    _config(
        "copy, copy that overwrites, deleter, sweeper",
        ABSENT,
        *(_copy(1, beacon=False), _copy(2, beacon=False, overwrite=True)),
        *(_deleter(), _sweeper(tries=0)),
    ),
    _config(
        "two copies with faults, deleter, reader",
        ABSENT,
        *(_copy(1, beacon=False, faults=1), _copy(2, beacon=False), _deleter(), _reader),
    ),
    _config(
        "overwrite, deleter, both with faults, reader",
        COMMITTED,
        *(*_writers(2), _deleter(faults=2), _reader),
    ),
    _config(
        "overwrite with itself as base, deleter, sweeper, stranger",
        COMMITTED,
        *(_incremental(beacon=False), _deleter(), _sweeper(), Stranger),
    ),
    _config(
        "overwrite, deleter, patient sweeper, stock reader",
        COMMITTED,
        *(*_writers(0), _deleter(now=False), _patient(rounds=2), *_stock),
    ),
    _config(
        "create, overwrite where a deletion was left, sweeper",
        DELETING,
        *(*_writers(1, 0, overwrite="2"), _sweeper()),
    ),
    _config(
        "two overwrite, sweeper that cannot see uploads",
        COMMITTED._replace(data=9),
        *(*_writers(1, 0, beacon=True), _sweeper(old=9, rounds=2)),
    ),
    _config(
        "overwrite with faults, deleter, sweeper, reader",
        COMMITTED,
        *(*_writers(1), _deleter(tries=0), _sweeper(tries=0), _reader),
    ),
    _config(
        "overwrite, deleter with faults, sweeper, reader",
        COMMITTED,
        *(*_writers(0), _deleter(faults=1), _sweeper(), _reader),
    ),
    _config(
        "overwrite, deleter, sweeper with faults, reader",
        COMMITTED,
        *(*_writers(0), _deleter(), _sweeper(faults=1), _reader),
    ),
    _config("two overwrite, sweeper, reader", COMMITTED, *_writers(1, 0), _sweeper(), _reader),
    _config(
        "two overwrite, sweeper with faults, reader",
        COMMITTED,
        *(*_writers(0, 0), _sweeper(faults=1), _reader),
    ),
    _config(
        "create, overwrite, deleter, sweeper, reader",
        ABSENT,
        *(*_writers(0, 0, overwrite="2"), _deleter(tries=0), _sweeper(tries=0), _reader),
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
    MENDS_ALWAYS: "a save, a sweep mends",
    UNFENCED: "patient sweeper of a tombstone, stock reader",
    BELIEVED: "two create, reader",
    UNSEEN: "create, sweeper that cannot see uploads",
    LATE_BEACON: "create, sweeper that cannot see uploads",
    LATE_LOOK: "create, overwrite, reader",
    UNASKED: "two create where a deletion was left, reader",
    UNPINNED: "overwrite with itself as base, stranger, reader",
    PINNED_LATE: "overwrite with itself as base, stranger, reader",
    BORROWED: "overwrite with itself as base, sweeper, stranger",
    ANY_SOURCE: "two copies, owner of the source, sweeper",
    BEHIND_FENCE: "two copies, owner of the source, sweeper",
    UNREAD: "save, copy, streamed copy of a rotten source",
    KEEPS_DOT: "create where a deletion is under way, deleter",
}
