"""A number that shows whether two threads count from it at a time."""

from __future__ import annotations

import contextlib
import threading


class MeetingNumber(int):
    """What is added or subtracted waits for another thread that does so, too; a lock keeps it out.

    The sum is an ordinary number, so only the first two may meet.
    """

    def _meet(self) -> None:
        meeting = self.__dict__.setdefault("meeting", threading.Barrier(2))
        with contextlib.suppress(threading.BrokenBarrierError):
            meeting.wait(0.2)

    def __add__(self, number: int) -> int:
        self._meet()
        return int(self) + number

    def __sub__(self, number: int) -> int:
        self._meet()
        return int(self) - number
