"""`contextmanager`: that of contextlib, without a reference cycle for each error.

An error that is thrown into a generator keeps the generator's frame in its traceback. From Python
3.12 on that frame leads to the one that threw it, which holds the error. If the generator turns the
error into another or swallows it, this cycle stays, and with it the variables of every caller: a
whole state, until the cyclic garbage collector runs.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Generic, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class _Manager(Generic[T]):
    def __init__(self, inner: contextlib.AbstractContextManager[T, bool | None]) -> None:
        self._inner = inner

    def __enter__(self) -> T:
        return self._inner.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        try:
            return self._inner.__exit__(kind, error, traceback)
        finally:
            if error is not None:  # without the generator's frame
                BaseException.with_traceback(error, traceback)  # which no subclass can refuse


def contextmanager(
    function: Callable[P, Iterator[T]],
) -> Callable[P, contextlib.AbstractContextManager[T, bool | None]]:
    """Make a context manager of a generator function, as `contextlib.contextmanager` does."""
    make = contextlib.contextmanager(function)

    @functools.wraps(function)
    def manager(
        *args: P.args, **settings: P.kwargs
    ) -> contextlib.AbstractContextManager[T, bool | None]:
        return _Manager(make(*args, **settings))

    return manager
