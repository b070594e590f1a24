"""State of this process, which a forked child must make again.

A forked child does not have its parent's threads. A lock that one of them held stays locked there,
and a transfer that one of them ran never ends.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


def in_forked_child(renew: Callable[[], object]) -> None:
    """Call `renew` in each child that is forked from now on. A hook cannot be removed."""
    os.register_at_fork(after_in_child=renew)


class PerProcess(Generic[T]):
    """Holds an object of this process; a forked child makes its own.

    It is never collected, so use it at module level only.

    Args:
        make: makes the object. Called at once, and in each forked child.

    Attributes:
        here: the object of this process.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        # The parent's object is not freed in a child, because its finalizers may not work there:
        # those of pinned memory call CUDA.
        self._inherited: list[T] = []
        self.here = make()
        in_forked_child(self._renew)

    def _renew(self) -> None:
        self._inherited.append(self.here)
        self.here = self._make()


_opened: set[int] = set()


def open_here(path: str | os.PathLike[str], flags: int, mode: int = 0o666) -> int:
    """Open a file for this process alone. Close it with `close_here`.

    A forked child would share its lock, and keep its room when it is removed. So the child closes
    it, as a program that is started does.
    """
    file = os.open(path, flags, mode)
    _opened.add(file)
    return file


def close_here(file: int) -> None:
    """Close a file of `open_here`; its lock is free then."""
    _opened.discard(file)
    os.close(file)


def _close_inherited() -> None:
    while _opened:
        os.close(_opened.pop())


in_forked_child(_close_inherited)
