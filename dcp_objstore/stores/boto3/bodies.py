"""Bodies of requests and answers, taken from and put into memory that is there already."""

from __future__ import annotations

import io
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

from dcp_objstore.stores.ranges import Answer, BrokenOffError

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
        self._starts = list(accumulate(map(len, self._buffers), initial=0))  # and the end
        self._check = check
        self._position = 0

    def __len__(self) -> int:
        return self._starts[-1]

    def readable(self) -> bool:
        """Yes."""
        return True

    def seekable(self) -> bool:
        """Yes: a request that is tried again is read again."""
        return True

    def tell(self) -> int:
        """Return the position of the next read."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Set the position of the next read, as of every stream."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: len(self)}[whence]
        self._position = base + offset
        return self._position

    def read(self, size: int | None = -1) -> Any:
        """Without a size all that is left, as bytes; else a view of some, without a copy.

        The view may be longer than `size`, which senders and hashes of bodies accept.
        """
        if self._check is not None:
            self._check()
        if size is None or size < 0:
            return b"".join(iter(lambda: self.read(_SEND_BYTES), b""))
        if size == 0 or self._position >= len(self):
            return b""
        number = bisect_right(self._starts, self._position) - 1
        first = self._position - self._starts[number]
        view = self._buffers[number][first : first + _SEND_BYTES]
        self._position += len(view)
        return view


def body_of(
    buffers: Sequence[memoryview], check: Callable[[], None] | None = None
) -> bytes | JoinedBuffers:
    """Return the buffers in the form that boto3 takes as `Body`."""
    if sum(len(view) for view in buffers) <= _SMALL_BYTES:
        return b"".join(buffers)
    return JoinedBuffers(buffers, check)


class ReceivedBody(Answer):
    """An `Answer` whose body botocore receives."""

    def __init__(self, body: Any) -> None:
        self._body = body

    def readinto(self, into: memoryview) -> int:
        """Read the next bytes to the front of `into`; return how many.

        Raises:
            BrokenOffError: the body ended early.
        """
        from botocore.exceptions import BotoCoreError

        try:
            count: int = self._body.readinto(into[:RECEIVE_BYTES])
        except (BotoCoreError, OSError) as error:
            raise BrokenOffError(str(error)) from error
        if not count:
            raise BrokenOffError("the body ended early")
        return count

    def close(self) -> None:
        """Close the body of the answer."""
        self._body.close()
