"""What adapters do with their arguments: check buffers, watch an iterator of them, cut it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, cast

from dcp_objstore.errors import InputError

if TYPE_CHECKING:
    from typing_extensions import Buffer


def cut_range(start: int, end: int, most_bytes: int) -> Iterator[tuple[int, int]]:
    """Cut a range into as few parts as have at most `most_bytes`, equal but for the last."""
    count = max(1, -(-(end - start) // most_bytes))
    size_bytes = max(1, -(-(end - start) // count))
    for at in range(start, end, size_bytes):
        yield at, min(end, at + size_bytes)


def as_buffers(data: Buffer | Sequence[Buffer]) -> Sequence[Buffer]:
    """One buffer, or a list or tuple of them, as a sequence."""
    if isinstance(data, (list, tuple)):
        return data
    return [cast("Buffer", data)]


def check_buffer(buffer: Buffer) -> None:
    """Raise `InputError` unless it is a 1-D, contiguous buffer of bytes.

    obstore alone would take a 2-D one.
    """
    try:
        view = memoryview(buffer)
    except (TypeError, BufferError) as error:
        raise InputError(f"not a buffer: {type(buffer).__name__}") from error
    if view.ndim != 1 or view.itemsize != 1 or not view.c_contiguous:
        raise InputError(
            f"a buffer must be 1-D, contiguous and of bytes; got {view.ndim}-D of {view.format!r}"
        )


class WatchedBuffers:
    """Hands buffers through, and remembers what the iterator raised.

    It is no generator, because a generator's local variable would keep the last buffer alive
    until the next is asked for; writers see the end of an upload in the death of its buffer.

    Attributes:
        error: what the iterator raised, or None.
        left_parts: whether the writer could not remove what it had sent before it failed.
    """

    def __init__(
        self, buffers: Iterator[Buffer], on_buffer: Callable[[Buffer], None] | None = None
    ) -> None:
        self._buffers = iter(buffers)
        self._on_buffer = on_buffer
        self.error: BaseException | None = None
        self.left_parts = False

    def __iter__(self) -> WatchedBuffers:
        return self

    def __next__(self) -> Buffer:
        try:
            if self._on_buffer is None:
                return next(self._buffers)
            buffer = next(self._buffers)
            self._on_buffer(buffer)
        except StopIteration:
            raise
        except BaseException as error:
            self.error = error
            raise
        return buffer


def cut_parts(buffers: Iterator[Buffer], part_size_bytes: int) -> Iterator[list[memoryview]]:
    """Cut a stream into parts of equal size; only the last one may be shorter. None is empty.

    No variable here holds a buffer while the next one is waited for, except in an unfinished part.
    """
    part: list[memoryview] = []
    room_bytes = part_size_bytes
    for buffer in buffers:
        view = memoryview(buffer)
        del buffer
        while view:
            part.append(view[:room_bytes])
            room_bytes -= len(part[-1])
            view = view[len(part[-1]) :]
            if not room_bytes:
                full, part, room_bytes = part, [], part_size_bytes
                yield full
                del full
        del view
    if part:
        yield part
