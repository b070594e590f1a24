"""Ranks agree on a step boundary at which all of them do the same, without a collective per step.

Any rank may ask for something at any moment: a signal came, or a timer ran out. All ranks have to
act on it at the same boundary, or the collectives of the save meet those of the training. So:

- Each rank counts the boundaries that it reaches. All reach the same ones, in the same order.
- A thread on each rank looks at a key of the process group's store, a few times a second. Who asks
  sets that key.
- Whoever sees it promises not to pass a boundary of its own choice, some way ahead of where its
  main thread is, before all is agreed, and announces that boundary in the store. The thread does
  so, also while its main thread is in the middle of a step; so nobody waits for a rank that waits.
- All have announced: the boundary agreed on is the largest one. Nobody can have passed it.

Between requests a step costs a lock that nobody else holds. When there is one, a rank waits only
if it comes to its own boundary first; that is some two looks at the key ahead, so mostly never.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial

import torch.distributed as dist

from dcp_objstore.distributed.groups import current_rank
from dcp_objstore.errors import RankFailedError
from dcp_objstore.observe.report import logger
from dcp_objstore.transfer.workers import spawn
from dcp_objstore.waiting import wait_in_steps

LOOK_EVERY_SECONDS = 0.25
_LEFT = "left"


@dataclass(frozen=True)
class _Agreed:
    """What was agreed on: the boundary, by its count from 1, and what is to be done there."""

    at: int
    reasons: frozenset[str]


class StepConsensus:
    """The step boundaries of one rank.

    Args:
        ask: what this rank asks for now, as words without blanks; empty: nothing. Called by a
            thread every `look_every_seconds`; may take its time. Asked again after a boundary was
            agreed on that did not include it.
        store: for this purpose and these ranks alone; None: there is one rank.
        rank: number of this one, from 0.
        world_size: of them all.
        peer_timeout_seconds: how long a rank waits at its boundary for the others.
        look_every_seconds: how often to look at the key. Default 0.25.
    """

    def __init__(
        self,
        ask: Callable[[], Collection[str]],
        *,
        store: dist.Store | None,  # type: ignore[name-defined]  # torch exports it
        rank: int,
        world_size: int,
        peer_timeout_seconds: float,
        look_every_seconds: float = LOOK_EVERY_SECONDS,
    ) -> None:
        self._ask = ask
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._peer_timeout_seconds = peer_timeout_seconds
        self._look_every_seconds = look_every_seconds
        self._state = threading.Condition()
        self._count = 0  # boundaries that the main thread has reached
        self._seen = 0  # as of the last look
        self._round = 0
        self._hold: int | None = None  # not to be passed before all is agreed
        self._agreed: _Agreed | None = None
        self._over = False  # a rank has left, or the store has: nothing is agreed on any more
        self._announcing = threading.Lock()
        self._announced = -1  # the last round
        self._stop = threading.Event()

    def start(self) -> None:
        """Begin to look, in a daemon thread."""
        spawn(self._watch, "boundaries")

    def reached(self) -> frozenset[str]:
        """Called by the main thread of every rank at each boundary.

        Returns:
            What all ranks are to do at this boundary; the same on each.

        Raises:
            RankFailedError: another rank did not announce its boundary in time.
        """
        with self._state:
            self._count += 1
            if self._hold is not None and self._count >= self._hold:
                self._wait()
            agreed = self._agreed
            if agreed is None or self._count < agreed.at:
                return frozenset()
            self._agreed = self._hold = None
            self._round += 1
            return agreed.reasons

    def _wait(self) -> None:
        settled = partial(self._state.wait_for, lambda: self._agreed is not None or self._over)
        if not wait_in_steps(settled, self._peer_timeout_seconds):
            raise RankFailedError(
                "the ranks were to agree on a step at which to save, and one of them did not answer"
                f" within {self._peer_timeout_seconds:g} s: it has died or hangs",
                rank=current_rank(),
            )

    def close(self) -> None:
        """This rank reaches no boundary any more. Others that are about to agree go on without."""
        self._stop.set()
        with self._state:
            left_at, self._over = self._round, True
            self._state.notify_all()
        try:
            self._announce(left_at, _LEFT)
        except RuntimeError as error:
            logger.debug("the store of the process group has gone: %s", error)

    def _watch(self) -> None:
        try:
            while not self._stop.wait(self._look_every_seconds) and not self._over:
                self._look()
        except RuntimeError as error:  # torch's errors of a store that has gone
            if not self._stop.is_set():
                logger.warning(
                    "the store of the process group does not answer any more, so the ranks cannot"
                    " agree on a step to save at: %s",
                    error,
                )
            self._end()

    def _look(self) -> None:
        with self._state:
            number, waiting = self._round, self._hold is None
            speed, self._seen = self._count - self._seen, self._count
        if not waiting:
            return  # the main thread is still on the way to what was agreed on
        reasons = frozenset(self._ask())
        bell = f"{number}/bell"
        if self._store is not None:
            rung = self._store.check([bell])
            if reasons and not rung:
                self._store.set(bell, "1")
        else:
            rung = False
        if reasons or rung:
            self._settle(number, reasons, speed)

    def _settle(self, number: int, reasons: frozenset[str], speed: int) -> None:
        """One round: announce, wait for the others, and tell the main thread."""
        with self._state:
            # Two looks ahead, at the present speed; alone there is nobody to wait for.
            ahead = 1 if self._store is None else 1 + 2 * speed
            self._hold = mine = self._count + ahead
        if self._store is None:
            agreed: _Agreed | None = _Agreed(mine, reasons)
        else:
            self._announce(number, " ".join((str(mine), *sorted(reasons))))
            agreed = self._collect(number)
        if agreed is None:
            self._end()
            return
        with self._state:
            self._agreed = agreed
            self._state.notify_all()

    def _announce(self, number: int, text: str) -> None:
        """Once in a round."""
        if self._store is None:
            return
        with self._announcing:
            if self._announced >= number:
                return
            self._announced = number
            self._store.set(f"{number}/at/{self._rank}", text)
            self._store.add(f"{number}/count", 1)
            if number >= 2:
                # Whoever announces has done what was agreed on in the round before; and for that,
                # all had read what was announced in the one before that.
                self._store.delete_key(f"{number - 2}/at/{self._rank}")
                if self._rank == 0:
                    self._store.delete_key(f"{number - 2}/bell")
                    self._store.delete_key(f"{number - 2}/count")

    def _collect(self, number: int) -> _Agreed | None:
        """What all have announced; None: one has left, or this one has."""
        assert self._store is not None
        pause_seconds, deadline = 0.01, time.monotonic() + self._peer_timeout_seconds
        while self._store.add(f"{number}/count", 0) < self._world_size:
            if self._stop.wait(pause_seconds) or time.monotonic() > deadline:
                return None
            pause_seconds = min(2 * pause_seconds, self._look_every_seconds)
        keys = [f"{number}/at/{rank}" for rank in range(self._world_size)]
        said = [value.decode().split() for value in self._store.multi_get(keys)]
        if any(words[0] == _LEFT for words in said):
            return None
        reasons = frozenset(reason for words in said for reason in words[1:])
        return _Agreed(max(int(words[0]) for words in said), reasons)

    def _end(self) -> None:
        with self._state:
            self._over = True
            self._hold = None
            self._state.notify_all()
