"""`InterruptibleStore`: a store whose requests can be left by Ctrl-C, one at a time.

No obstore call can be interrupted. A whole operation in another thread would go on after Ctrl-C
and delete behind the user's back; so each request has a thread, and what follows it has not begun.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from dcp_objstore.stores.wrappers import WrappedStore
from dcp_objstore.transfer.workers import wait_for

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from dcp_objstore.stores.protocol import ObjectMeta, Precondition, Version

_LISTED_AT_ONCE = 1000  # a page of S3


class InterruptibleStore(WrappedStore):
    """Runs the small requests of the inner store in daemon threads."""

    def put(
        self,
        key: str,
        data: Buffer | Sequence[Buffer],
        *,
        precondition: Precondition | None = None,
        retry: bool = True,
    ) -> Version:
        """See `ObjectStore.put`."""
        return wait_for(self.inner.put, key, data, precondition=precondition, retry=retry)

    def get(self, key: str, *, max_size_bytes: int) -> tuple[bytes, ObjectMeta]:
        """See `ObjectStore.get`."""
        return wait_for(self.inner.get, key, max_size_bytes=max_size_bytes)

    def head(self, key: str) -> ObjectMeta:
        """See `ObjectStore.head`."""
        return wait_for(self.inner.head, key)

    def list(self, prefix: str = "") -> Iterator[ObjectMeta]:
        """See `ObjectStore.list`."""
        listing = self.inner.list(prefix)
        while page := wait_for(lambda: tuple(islice(listing, _LISTED_AT_ONCE))):
            yield from page

    def delete(self, key: str) -> None:
        """See `ObjectStore.delete`."""
        wait_for(self.inner.delete, key)
