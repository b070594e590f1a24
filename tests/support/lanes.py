"""A device for the tests: its memory is the host's, and its copies are as late as they may be."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import torch

from dcp_objstore.state import device
from dcp_objstore.state.ring import Lane


class LateTicket:
    def __init__(self, lane: LateLane, work: Callable[[], object]) -> None:
        self._lane = lane
        self.work = work
        self.done = False

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self._lane.run(self)


class LateLane:
    """Copies are made when somebody waits for them, and not before; others of them then too, in
    any order. So code that does not wait finds that nothing was copied, or that something else was.

    Attributes:
        queued: what was not copied yet.
        allocated, starts: sizes and addresses of all host memory that was asked for.
        copied: how many copies were made.
        finished: how often all of them were waited for.

    Args:
        fail_at: the number of the copy, from 1, that raises as it is queued.
    """

    def __init__(self, seed: int = 0, *, fail_at: int = 0) -> None:
        self.queued: list[LateTicket] = []
        self.allocated: list[int] = []
        self.starts: list[int] = []
        self.copied = 0
        self.finished = 0
        self._fail_at = fail_at
        self._asked = 0
        self._random = random.Random(seed)
        self._lock = threading.RLock()

    def allocate(self, size_bytes: int) -> torch.Tensor:
        memory = torch.full((size_bytes,), 0xAA, dtype=torch.uint8)
        with self._lock:
            self.allocated.append(size_bytes)
            self.starts.append(memory.data_ptr())
        return memory

    def follow(self) -> None:
        pass

    def queue(self, work: Callable[[], object]) -> LateTicket:
        with self._lock:
            self._asked += 1
            if self._asked == self._fail_at:
                raise RuntimeError("the device is lost")
            ticket = LateTicket(self, work)
            self.queued.append(ticket)
            return ticket

    def run(self, ticket: LateTicket) -> None:
        with self._lock:
            others = [other for other in self.queued if self._random.random() < 0.3]
            self._random.shuffle(others)
            for chosen in [*others, ticket]:
                if chosen in self.queued:
                    self.queued.remove(chosen)
                    chosen.work()
                    chosen.done = True
                    self.copied += 1

    def finish(self) -> None:
        with self._lock:
            while self.queued:
                self.run(self._random.choice(self.queued))
            self.finished += 1


def use_lane(monkeypatch, make: Callable[[], Lane]) -> None:
    """Send CPU tensors over lanes, as if they were a device's."""

    def lane_of(place: torch.device, direction: device.Direction) -> Lane | None:
        return make() if place.type == "cpu" else None

    monkeypatch.setattr(device, "lane_of", lane_of)
