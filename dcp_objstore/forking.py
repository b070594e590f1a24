"""State of this process, and what becomes of it in a forked child.

A child has none of its parent's threads: a lock that one of them held stays held, and a transfer
that one of them ran never ends.
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
    """Holds one object per process; a forked child makes its own.

    Use it at module level only: it is never collected.

    Args:
        make: called at once, and in each child.

    Attributes:
        here: the object.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        # A parent's object is not freed in a child: its finalizers may need what does not work
        # there, such as calls of CUDA, which unpin memory.
        self._inherited: list[T] = []
        self.here = make()
        in_forked_child(self._renew)

    def _renew(self) -> None:
        self._inherited.append(self.here)
        self.here = self._make()
