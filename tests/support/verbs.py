"""Every verb of a store, called once, for tests of what a failure becomes in each of them."""

from __future__ import annotations

import pickle
from collections.abc import Callable

from dcp_objstore.config import TransferConfig
from dcp_objstore.errors import (
    BucketNotFoundError,
    CorruptDataError,
    CredentialsError,
    DcpObjstoreError,
    InputError,
    PermissionDeniedError,
    PreconditionFailedError,
    StoreUnavailableError,
    UnsupportedError,
)
from dcp_objstore.stores import IfAbsent, ObjectStore
from dcp_objstore.stores.ranges import read_range

_MIB = 1024 * 1024
ONCE = TransferConfig(max_retries=0, connect_timeout_seconds=5, request_timeout_seconds=20)

READS: dict[str, Callable[[ObjectStore], object]] = {
    "get": lambda store: store.get("k", max_size_bytes=100),
    "open_range": lambda store: read_range(store, "k", 0, 1),
    "head": lambda store: store.head("k"),
    "list": lambda store: list(store.list()),
}
WRITES: dict[str, Callable[[ObjectStore], object]] = {
    "put": lambda store: store.put("k", b"x"),
    "put_absent": lambda store: store.put("k2", b"x", precondition=IfAbsent(), retry=False),
    "put_stream": lambda store: store.put_stream(
        "k", iter([bytes(6 * _MIB)]), part_size_bytes=5 * _MIB, max_concurrency=2
    ),
    "delete": lambda store: store.delete("k"),
}
VERBS = {**READS, **WRITES}


# What a server of S3 answers to any verb, by status and code, and what becomes of it.
ANSWERS: list[tuple[int, str, type[DcpObjstoreError]]] = [
    (400, "ExpiredToken", CredentialsError),
    (403, "RequestTimeTooSkewed", CredentialsError),
    (401, "", CredentialsError),
    (403, "AccessDenied", PermissionDeniedError),
    (403, "", PermissionDeniedError),
    (404, "NoSuchBucket", BucketNotFoundError),
    (400, "InvalidArgument", InputError),
    (400, "RequestTimeout", StoreUnavailableError),
    (408, "", StoreUnavailableError),
    (412, "PreconditionFailed", PreconditionFailedError),
    (409, "OperationAborted", StoreUnavailableError),
    (416, "InvalidRange", CorruptDataError),
    (429, "SlowDown", StoreUnavailableError),
    (500, "InternalError", StoreUnavailableError),
    (501, "NotImplemented", UnsupportedError),
    (502, "", StoreUnavailableError),
    (503, "SlowDown", StoreUnavailableError),
    (418, "", DcpObjstoreError),
]


def check(error: DcpObjstoreError, store: ObjectStore, verb: str) -> None:
    """What each error carries: where, in plain words, through a pickle."""
    assert error.url == store.url
    assert (error.object_key is None) == (verb == "list")
    assert "Debug source" not in str(error)
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is type(error)
    assert str(back) == str(error)
