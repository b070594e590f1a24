"""Slow uploads, so that the demo can kill a rank in the middle of one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from dcp_objstore.checkpoint.names import parse_data_key
from dcp_objstore.cli.demo.messages import Uploading
from dcp_objstore.stores import ObjectStore, StoreSpec
from dcp_objstore.stores.wrappers import Request, WrappedStore

# Far longer than the launcher needs to kill this process; after that time the upload goes on.
_HOLD_SECONDS = 120.0


class _SlowStore(WrappedStore):
    """Reports the upload of a data object when it begins, and then waits very long."""

    def __init__(self, inner: ObjectStore, report: Callable[[Uploading], None]) -> None:
        super().__init__(inner)
        self._report = report

    @contextmanager
    def _around(self, request: Request) -> Iterator[None]:
        if request.verb in {"put", "put_stream"} and parse_data_key(request.key):
            self._report(Uploading(key=request.key, size_bytes=request.bytes))
            threading.Event().wait(_HOLD_SECONDS)
        yield


def hold_uploads(report: Callable[[Uploading], None]) -> None:
    """Report and then hold all uploads of data objects in this process, from now on."""
    open_fast = StoreSpec.open

    def open_slow(spec: StoreSpec) -> ObjectStore:
        return _SlowStore(open_fast(spec), report)

    # The launcher is about to kill this process, so no other code will use the changed method.
    StoreSpec.open = open_slow  # type: ignore[method-assign,assignment]
