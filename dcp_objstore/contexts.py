"""Errors that hold no memory: `contextmanager` without a cycle, `led_to` and `drop_frames`.

An error that is thrown into a generator keeps the generator's frame in its traceback. From Python
3.12 on that frame leads to the one that threw it, which holds the error. If the generator turns the
error into another or swallows it, this cycle stays, and with it the variables of every caller: a
whole state, until the cyclic garbage collector runs.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Generic, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def led_to(
    error: BaseException,
    *,
    handled: int | None = None,
    more: Callable[[BaseException], Iterable[object]] = lambda _: (),
) -> Iterator[BaseException]:
    """Yield an error and what it was raised for, each once. Causes and contexts may form a circle.

    Args:
        error: the error to begin with.
        handled: the id of an error that the caller was handling: it is left out, with what led to
            it. (It is an id, because a caller that kept the error during a long block would keep
            the memory that the error holds.)
        more: a function that returns what else may have led to an error; only errors count.
    """
    seen = {handled}
    waiting: list[object] = [error]
    while waiting:
        cause = waiting.pop()
        if isinstance(cause, BaseException) and id(cause) not in seen:
            seen.add(id(cause))
            yield cause
            waiting += [cause.__cause__, cause.__context__, *more(cause)]


def drop_frames(errors: Iterable[BaseException]) -> None:
    """Remove the frames from these errors, because their variables hold memory."""
    for error in errors:
        BaseException.with_traceback(error, None)  # which no subclass can refuse


class _Manager(Generic[T]):
    """Passes on to a generator's manager, and takes its frame from the error that was thrown in."""

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
        """Leave the context; take the generator's frame out of the traceback of the error."""
        try:
            return self._inner.__exit__(kind, error, traceback)
        finally:
            if error is not None:
                # `traceback` is that of the error as it came, without the generator's frame. The
                # method is the base class's, because a subclass may have one of its own.
                BaseException.with_traceback(error, traceback)


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
