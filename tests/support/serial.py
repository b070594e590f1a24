"""What a save sends at the same time is sent one after the other, in an order that a test chooses.

Requests are atomic, so an order of them is all that a server ever sees of calls at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any
from unittest import mock

from dcp_objstore.transfer import workers

Call = Callable[[], Any]
Order = Callable[[Sequence[int]], Sequence[int]]


def as_given(numbers: Sequence[int]) -> Sequence[int]:
    return numbers


def reverse(numbers: Sequence[int]) -> Sequence[int]:
    return numbers[::-1]


@contextmanager
def one_after_the_other(order: Order) -> Iterator[None]:
    """Calls of `concurrently` run in this order, in the thread that makes them.

    Those of `in_waves` run as given, in one thread: two that wait for the turn of one actor might
    both wait for ever.
    """

    def in_order(*calls: Call) -> list[Any]:
        futures: list[Future[Any]] = [Future() for _ in calls]
        for number in order(range(len(calls))):
            workers.run_into(futures[number], calls[number])
        return [future.result() for future in futures]

    with (
        mock.patch.object(workers, "concurrently", in_order),
        mock.patch.object(workers, "MOST_IN_FLIGHT", 1),
    ):
        yield
