"""Bodies of requests and answers, taken from and put into memory that is there already."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

from dcp_objstore.stores.ranges import BrokenOffError

# Up to here a body is copied together: a readable one makes botocore wait for the server's
# "100 Continue" before it sends anything, a round trip more.
_SMALL_BYTES = 64 * 1024
# Handed over at once. The HTTP client asks for 128 KiB each time, and every call into a socket may
# have to wait for the interpreter's lock.
_SEND_BYTES = 4 * 1024 * 1024
# Received at once: the client copies once more, which costs little while it is in the cache.
RECEIVE_BYTES = 1024 * 1024


class JoinedBuffers(io.RawIOBase):
    """Several buffers as one body that botocore can measure, read, rewind and read again.

    Args:
        buffers: 1-D, of bytes.
        check: called before each read; what it raises ends the request.
    """

    def __init__(
        self, buffers: Sequence[memoryview], check: Callable[[], None] | None = None
    ) -> None:
        super().__init__()
        self._buffers = [view for view in buffers if len(view)]
        self._size_bytes = sum(len(view) for view in self._buffers)
        self._check = check
        self._rewind(0)

    def _rewind(self, position: int) -> None:
        self._position = position
        self._number, self._offset = 0, position
        while self._number < len(self._buffers) and self._offset >= len(
            self._buffers[self._number]
        ):
            self._offset -= len(self._buffers[self._number])
            self._number += 1

    def __len__(self) -> int:
        return self._size_bytes

    def readable(self) -> bool:
        """Yes."""
        return True

    def seekable(self) -> bool:
        """Yes: a request that is tried again is read again."""
        return True

    def tell(self) -> int:
        """Where the next read begins."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """As of every stream."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size_bytes}[whence]
        self._rewind(base + offset)
        return self._position

    def read(self, size: int | None = -1) -> Any:
        """Without a size all that is left, as bytes; else a view of some, without a copy.

        The view may be longer than `size`, which senders and hashes of bodies accept.
        """
        if self._check is not None:
            self._check()
        if size is None or size < 0:
            return b"".join(iter(lambda: self.read(_SEND_BYTES), b""))
        if self._number == len(self._buffers) or size == 0:
            return b""
        buffer = self._buffers[self._number]
        view = buffer[self._offset : self._offset + _SEND_BYTES]
        self._position += len(view)
        self._offset += len(view)
        if self._offset == len(buffer):
            self._number, self._offset = self._number + 1, 0
        return view


def body_of(
    buffers: Sequence[memoryview], check: Callable[[], None] | None = None
) -> bytes | JoinedBuffers:
    """What to give to boto3 as `Body`."""
    if sum(len(view) for view in buffers) <= _SMALL_BYTES:
        return b"".join(buffers)
    return JoinedBuffers(buffers, check)


def receive_some(body: Any, into: memoryview) -> int:
    """Put the next bytes of an answer's body at the front of `into`; return how many.

    Raises:
        BrokenOffError: it ended before that.
    """
    from botocore.exceptions import BotoCoreError

    try:
        count: int = body.readinto(into[:RECEIVE_BYTES])
    except (BotoCoreError, OSError) as error:
        raise BrokenOffError(str(error)) from error
    if not count:
        raise BrokenOffError("the body ended early")
    return count


def receive(body: Any, into: memoryview) -> None:
    """Fill `into` from an answer's body.

    Raises:
        BrokenOffError: it ended before that.
    """
    while into:
        into = into[receive_some(body, into) :]
