"""What all parts of the contract share: hooks and fixtures of an endpoint, and small helpers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from dcp_objstore.errors import PreconditionFailedError, StoreUnavailableError, UnsupportedError
from dcp_objstore.stores import ObjectStore, Precondition, Version
from dcp_objstore.stores.protocol import Capabilities
from tests.support.scripted import Dialect, Fault
from tests.support.side_doors import NoDoor, SideDoor

MIB = 1024 * 1024
PART = 5 * MIB
MAX = 64 * MIB
# More keys than a page of S3, GCS or R2 has.
CROWD = [f"many/{number:04d}" for number in range(1003)]
# More than a page of our moto has. And for stores that have no pages, or pages of 5,000 (Azure).
SMALL_CROWD = CROWD[:53]


class ExpectedError(Exception):
    """Raised by test iterators; must come through unchanged."""


class Endpoint:
    """What a subclass says of its endpoint; `store` is all that it has to give.

    Attributes:
        endpoint: its row in the table of docs/stores.md, or one for each kind of the fixture
            `bucket`; None: none.
        lacks: the capabilities that it does not have, likewise.
        dialect: whose error bodies its adapter reads; None: it speaks no HTTP.
        untold_faults: those of which its library does not tell.
        race_rounds: of each race, in the default suite; 0 leaves it to the campaign.
        crowd_keys: more than a page of it has.
        races_at_once: in the campaign, where a server makes losers wait asleep.
    """

    endpoint: str | Mapping[str, str] | None = None
    lacks: frozenset[str] | Mapping[str, frozenset[str]] = frozenset()
    dialect: Dialect | None = None
    untold_faults: frozenset[Fault] = frozenset()
    crowd_keys: Sequence[str] = CROWD
    race_rounds = 2
    races_at_once = 1

    @pytest.fixture
    def store(self) -> ObjectStore:
        """An empty store that nobody else uses."""
        raise NotImplementedError

    @pytest.fixture
    def capabilities(self, store: ObjectStore) -> Capabilities:
        """What is claimed of the store: by its adapter, if it can know."""
        return store.capabilities

    @pytest.fixture
    def side_door(self, store: ObjectStore) -> SideDoor:
        """Another way to the same objects."""
        return NoDoor(store)

    @pytest.fixture
    def measured(self, store: ObjectStore, side_door: SideDoor) -> tuple[ObjectStore, SideDoor]:
        """The store, and a door that knows the sizes of the parts, if it has any."""
        return store, side_door

    @pytest.fixture
    def crowd(self, store: ObjectStore) -> ObjectStore:
        """A store that holds `self.crowd_keys` and nothing else."""
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(lambda key: store.put(key, b""), self.crowd_keys))
        return store

    def store_at(self, endpoint_url: str) -> ObjectStore:
        """The adapter on bucket `bucket`, root `run`, of another server, without retries."""
        raise NotImplementedError

    def assert_refused(self, store: ObjectStore, key: str, precondition: Precondition) -> None:
        """What happens to a conditional put that the store could not keep."""
        with pytest.raises(UnsupportedError):
            store.put(key, b"refused", precondition=precondition, retry=False)


def read(store: ObjectStore, key: str) -> bytes:
    return store.get(key, max_size_bytes=MAX)[0]


def keys(store: ObjectStore, prefix: str = "") -> list[str]:
    return sorted(meta.key for meta in store.list(prefix))


def put_broken(
    store: ObjectStore, key: str, pieces: list[bytes], error: BaseException, at_once: int = 2
) -> None:
    """A stream whose iterator raises after these pieces."""

    def broken() -> Iterator[bytes]:
        yield from pieces
        raise error

    with pytest.raises(type(error)) as caught:
        store.put_stream(key, broken(), part_size_bytes=PART, max_concurrency=at_once)
    assert caught.value is error


def random_bytes(size: int) -> np.ndarray:
    return np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)


def race(count: int, attempt: Callable[[int], Version]) -> list[int]:
    """Run `attempt` in `count` threads at once; the numbers of those that won.

    A loser gets no clear answer from some servers: Ceph's gateway may say 500.
    """
    barrier = threading.Barrier(count)

    def one(number: int) -> bool:
        barrier.wait()
        try:
            attempt(number)
        except (PreconditionFailedError, StoreUnavailableError):
            return False
        return True

    with ThreadPoolExecutor(count) as pool:
        won = list(pool.map(one, range(count)))
    return [number for number, ok in enumerate(won) if ok]
