"""Stores: the `ObjectStore` protocol and its adapters; no SDK is imported before one is opened."""

from __future__ import annotations

from dcp_objstore.stores.protocol import (
    Capabilities,
    IfAbsent,
    IfVersion,
    ObjectMeta,
    ObjectStore,
    Precondition,
    Version,
)
from dcp_objstore.stores.spec import StoreSpec, open_store

__all__ = [
    "Capabilities",
    "IfAbsent",
    "IfVersion",
    "ObjectMeta",
    "ObjectStore",
    "Precondition",
    "StoreSpec",
    "Version",
    "open_store",
]
