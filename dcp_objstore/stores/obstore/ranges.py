"""Ranges of obstore's adapter: asked for over the direct lane if it can, otherwise of obstore.

`ObstoreSource` alone decides who is asked: the store knows no lane, and the lane no obstore.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from dcp_objstore.config import MIB
from dcp_objstore.errors import CorruptDataError
from dcp_objstore.observe.dispatch import emit_retry
from dcp_objstore.observe.report import logger
from dcp_objstore.stores.obstore.direct import LaneError
from dcp_objstore.stores.obstore.errors import sent_whole
from dcp_objstore.stores.protocol import Version
from dcp_objstore.stores.ranges import (
    Answer,
    RangeSource,
    ReceivedChunks,
    RetriedSource,
    check_length,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from typing_extensions import Buffer

    from dcp_objstore.stores.obstore.clients import Clients


# obstore gathers so much of a body before it hands it over, joined: little enough to lie in the
# cache, and enough for the interpreter's lock to be asked for rarely.
_CHUNK_BYTES = MIB
# The pieces of a chunk, which are up to 1 MiB themselves, and the chunk.
MEMORY_BYTES = 4 * MIB


class ObstoreSource(RetriedSource):
    """Asks for ranges of one object.

    Args:
        clients: the bucket's clients.
        path: the key in the bucket.
        in_memory: whether it is obstore's memory store, which knows a range past the end by the
            text of its error alone.
        other_source: a function that returns another source of the object, if that reads the answer
            which obstore could not, and raises the error if not.
    """

    def __init__(
        self,
        clients: Clients,
        path: str,
        *,
        in_memory: bool,
        other_source: Callable[[str, Exception], RangeSource],
    ) -> None:
        # A function of the module: a bound method would be a reference cycle for each range.
        super().__init__(clients, path, partial(_ask_obstore, clients, path, in_memory))
        self._clients = clients
        self._other_source = other_source
        self._path = path
        self._over_lane = True  # until the lane fails for this object

    def ask_ahead(self, start: int, end: int) -> Answer | None:
        """Send the request over the direct lane; return None if it cannot carry it."""
        lane = self._clients.lane if self._over_lane else None
        if lane is None:
            return None
        try:
            return lane.ask(self._path, start, end)
        except LaneError as error:
            logger.debug("a range was not asked for directly: %s", error)
            self._over_lane = False
            return None

    def ask(self, start: int, end: int) -> Answer:
        """Ask for bytes `[start, end)`, another library where obstore cannot read the answer."""
        try:
            return super().ask(start, end)
        except Exception as error:  # noqa: BLE001  raised again, unless another try is made
            return self._other_source(self._path, error).ask(start, end)

    def wait_to_ask_again(self, error: Exception, asked_at: float, *, had_begun: bool) -> None:
        """Wait until the rest may be asked for, or raise.

        After any failure of the lane but the store's throttling, the rest is asked of obstore.
        """
        if isinstance(error, LaneError) and error.status is None:
            self._over_lane = False
            if not error.broke_off:  # the answer was another one: nothing to wait for
                emit_retry(self._path, 2, str(error), asked_at)
                return
        super().wait_to_ask_again(error, asked_at, had_begun=had_begun)


def _ask_obstore(clients: Clients, path: str, in_memory: bool, start: int, end: int) -> Answer:
    """Ask obstore for bytes `[start, end)` of an object."""
    import obstore

    client = clients.get("range")
    if in_memory:  # obstore's memory store has no error of its own for a range past the end
        size_bytes = obstore.head(client, path)["size"]
        if size_bytes < end:
            raise CorruptDataError(f"bytes [{start}, {end}) of an object of {size_bytes} bytes")
    try:
        answer = obstore.get(client, path, options={"range": (start, end)})
    except Exception as error:
        # A server may answer with status 200, which obstore refuses, if the range is the whole
        # object. Then the object is asked for without a range; if it has another size, the first
        # error is raised.
        if start != 0 or not sent_whole(error):
            raise
        answer = obstore.get(client, path)
        if answer.meta["size"] != end:
            raise
    if answer.range != (start, end):
        raise CorruptDataError(
            f"bytes [{start}, {end}) asked for, of an object of {answer.meta['size']} bytes"
        )
    version = Version.of(answer.meta["e_tag"], answer.meta["version"])
    return ReceivedChunks(_chunks(answer, start, end), version)


def _chunks(answer: Any, start: int, end: int) -> Iterator[Buffer]:
    """Yield a body as it comes, and check its length."""
    received_bytes = 0
    chunks = iter(answer.stream(min_chunk_size=_CHUNK_BYTES))
    while received_bytes < end - start and (chunk := next(chunks, None)) is not None:
        received_bytes += len(memoryview(chunk))
        if received_bytes <= end - start:  # otherwise `check_length` raises below
            yield chunk
        del chunk  # so that its memory is free before the next chunk is gathered
    check_length(received_bytes, start, end)
