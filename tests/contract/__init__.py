"""What every `ObjectStore` guarantees, as tests over a `store` fixture.

A module that has a store to check subclasses `StoreContract` and provides the fixture `store`: an
empty store that nobody else uses. With `endpoint` and `lacks` it gets a row in the table of
docs/stores.md; with `side_door`, `measured` and `store_at` the store is looked at from outside as
well (`common` says how). A test of what a store lacks asserts that it refuses.
"""

from tests.contract.buckets import BucketContract
from tests.contract.common import (
    CROWD,
    MAX,
    MIB,
    PART,
    SMALL_CROWD,
    Endpoint,
    ExpectedError,
    keys,
    put_broken,
    race,
    read,
)
from tests.contract.suite import StoreContract

__all__ = [
    "CROWD",
    "MAX",
    "MIB",
    "PART",
    "SMALL_CROWD",
    "BucketContract",
    "Endpoint",
    "ExpectedError",
    "StoreContract",
    "keys",
    "put_broken",
    "race",
    "read",
]
