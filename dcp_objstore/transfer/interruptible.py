"""`InterruptibleStore`: a store in which Ctrl-C ends the wait for the current request.

No obstore call can be interrupted. If a whole operation ran in another thread, it would go on after
Ctrl-C and delete objects behind the user's back. So each request has its own thread, and after
Ctrl-C no further request begins.
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

_PAGE_KEYS = 1000  # as on S3


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
        """Put an object, in a daemon thread."""
        return wait_for(self.inner.put, key, data, precondition=precondition, retry=retry)

    def get(self, key: str, *, max_size_bytes: int) -> tuple[bytes, ObjectMeta]:
        """Read a small object, in a daemon thread."""
        return wait_for(self.inner.get, key, max_size_bytes=max_size_bytes)

    def head(self, key: str) -> ObjectMeta:
        """Read the metadata of an object, in a daemon thread."""
        return wait_for(self.inner.head, key)

    def list(self, prefix: str = "") -> Iterator[ObjectMeta]:
        """List objects; fetch each page in a daemon thread."""
        listing = self.inner.list(prefix)
        while page := wait_for(lambda: tuple(islice(listing, _PAGE_KEYS))):
            yield from page

    def delete(self, key: str) -> None:
        """Delete an object, in a daemon thread."""
        wait_for(self.inner.delete, key)
