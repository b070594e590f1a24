"""Let ranks agree on a step boundary at which all do the same, without a collective per step.

Any rank may request something at any moment, for example because of a signal or a timer. All ranks
must act on it at the same boundary, or the collectives of the save would mix with those of the
training. The protocol is:

- Each rank counts the boundaries that it reaches. All ranks reach the same boundaries in the same
  order.
- A thread on each rank polls a key of the process group's store a few times a second. A rank that
  requests something sets this key.
- A rank that sees the key chooses a boundary some way ahead of its main thread. It promises not to
  pass that boundary before the ranks agree, and announces it in the store. The thread does this
  even while its main thread is in the middle of a step, so no rank waits for a rank that waits.
- When all ranks have announced, they agree on the largest boundary. No rank can have passed it.
- If the store fails on a rank, its thread connects again and goes on where it was. So whatever it
  asks may be asked twice: the first announcement of a rank counts.

Without a request a step costs one uncontended lock. With a request, a rank waits only if it reaches
its own boundary before the agreement. That boundary is about two polls ahead, so this is rare.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed as dist

from dcp_objstore import torch_private
from dcp_objstore.distributed.failures import on_first
from dcp_objstore.distributed.groups import count_ranks
from dcp_objstore.distributed.ranks import current_rank
from dcp_objstore.errors import RankFailedError
from dcp_objstore.observe.report import logger
from dcp_objstore.threads import spawn, wait_in_steps

POLL_SECONDS = 0.25
_LONGEST_PAUSE_SECONDS = 10.0  # between polls, while the store does not answer
_LEFT = "left"


def shared_store(url: str, group: dist.ProcessGroup | None) -> dist.Store | None:  # type: ignore[name-defined]  # torch exports it
    """Return a new namespace in the process group's store; None for one rank. A collective.

    It has its own connection, because another thread may wait for long in the group's.

    Args:
        group: the ranks that share the namespace; None if this process is alone.
    """
    token = on_first(lambda: secrets.token_hex(8), url, group)
    if count_ranks(group) == 1:
        return None
    shared: Any = torch_private.default_store()
    prefixed: Any = dist.PrefixStore  # type: ignore[attr-defined]  # as above
    return prefixed(f"dcp_objstore/{token}", shared.clone())


@dataclass(frozen=True)
class _Agreed:
    """An agreement: the boundary, counted from 1, and what to do there."""

    boundary: int
    reasons: frozenset[str]


class StepConsensus:
    """The step boundaries of one rank.

    Args:
        ask: callable that returns what this rank requests now, as words without blanks; empty if
            nothing. A thread calls it every `poll_seconds`; it may be slow. It is called again
            after an agreement that did not include the request.
        store: store for this purpose and these ranks only; None if there is only one rank.
        peer_timeout_seconds: how long a rank waits for the others at its boundary.
        poll_seconds: interval between two polls of the key. Default 0.25.
    """

    def __init__(
        self,
        ask: Callable[[], Collection[str]],
        *,
        store: dist.Store | None,  # type: ignore[name-defined]  # torch exports it
        rank: int,
        world_size: int,
        peer_timeout_seconds: float,
        poll_seconds: float = POLL_SECONDS,
    ) -> None:
        """Keep the arguments; `start` begins to poll."""
        self._ask = ask
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._peer_timeout_seconds = peer_timeout_seconds
        self._poll_seconds = poll_seconds
        self._state = threading.Condition()  # guards what both threads change
        self._count = 0  # number of boundaries that the main thread has reached
        self._count_at_poll = 0  # the same at the last poll
        self._round = 0  # number of agreements that the main thread has acted on
        self._hold: int | None = None  # boundary not to pass before the ranks agree
        self._reasons: frozenset[str] = frozenset()  # what this rank announces in this round
        self._agreed: _Agreed | None = None  # until the main thread has acted on it
        self._over = False  # a rank or the store has gone: no more agreements
        self._announcing = threading.Lock()
        self._announced = -1  # the last round that this rank announced
        self._stop = threading.Event()

    def start(self) -> None:
        """Start polling in a daemon thread."""
        spawn(self._watch, "step-consensus")

    def reached(self) -> frozenset[str]:
        """Count a boundary. The main thread of every rank calls this at each boundary.

        Returns:
            What all ranks must do at this boundary; the same on each rank.

        Raises:
            RankFailedError: another rank did not announce its boundary in time.
        """
        with self._state:
            self._count += 1
            if self._hold is not None and self._count >= self._hold:
                self._wait()  # it gives up the lock meanwhile, so that the other thread can go on
            agreed = self._agreed  # None, too, if there are no more agreements
            if agreed is None or self._count < agreed.boundary:
                return frozenset()
            self._agreed = self._hold = None
            self._round += 1
            return agreed.reasons

    def _wait(self) -> None:
        """Wait until the ranks have agreed, or there are no more agreements."""
        has_settled = partial(self._state.wait_for, lambda: self._agreed is not None or self._over)
        if not wait_in_steps(has_settled, self._peer_timeout_seconds):
            raise RankFailedError(
                "the ranks had to agree on a step at which to save, and one of them did not answer"
                f" within {self._peer_timeout_seconds:g} s: it has died or hangs",
                rank=current_rank(),
            )

    def close(self) -> None:
        """Leave: this rank reaches no more boundaries, so the ranks agree on no more."""
        self._stop.set()
        with self._state:
            left_at, self._over = self._round, True
            self._state.notify_all()
        try:
            self._announce(left_at, _LEFT)
        except RuntimeError as error:
            logger.debug("the store of the process group is gone: %s", error)

    def _watch(self) -> None:
        """Poll the store until the end; connect again if it fails, and give up after a time."""
        pause_seconds = self._poll_seconds
        failed_at: float | None = None
        while not self._stop.wait(pause_seconds) and not self._over:
            try:
                self._poll()
                pause_seconds, failed_at = self._poll_seconds, None
            except RuntimeError as error:  # torch's error for a store that does not answer
                if self._stop.is_set():
                    return
                if failed_at is None:
                    failed_at = time.monotonic()
                    logger.warning("the store of the process group failed; trying again: %s", error)
                if time.monotonic() - failed_at > self._peer_timeout_seconds:
                    logger.warning(
                        "the store of the process group no longer answers, so this job saves no"
                        " more by time or when it must end: %s",
                        error,
                    )
                    self._end()
                    return
                pause_seconds = min(2 * pause_seconds, _LONGEST_PAUSE_SECONDS)
                with contextlib.suppress(RuntimeError):  # then the next poll fails as well
                    self._store = self._store and self._store.clone()

    def _poll(self) -> None:
        """Look once whether a rank, or this one, requests something; if so, agree on a boundary."""
        with self._state:
            round_number, boundary, agreed = self._round, self._hold, self._agreed
            boundaries_per_poll = self._count - self._count_at_poll
            self._count_at_poll = self._count
        if agreed is not None:
            return  # the main thread has not reached the agreed boundary yet
        if boundary is None:  # otherwise one was chosen in this round, and then the store failed
            reasons = frozenset(self._ask())
            if not (self._check_or_request(round_number, reasons) or reasons):
                return
            with self._state:
                # Two polls ahead at the present speed; a single rank does not have to wait.
                ahead = 1 if self._store is None else 1 + 2 * boundaries_per_poll
                self._hold = boundary = self._count + ahead
                self._reasons = reasons
        self._agree(round_number, boundary)

    def _check_or_request(self, round_number: int, reasons: frozenset[str]) -> bool:
        """Return whether a rank has requested something; if not, and for any reason, request it."""
        if self._store is None:
            return False
        key = f"{round_number}/request"
        requested: bool = self._store.check([key])
        if reasons and not requested:
            self._store.set(key, "1")
        return requested

    def _agree(self, round_number: int, boundary: int) -> None:
        """Run one round: announce, wait for the other ranks, and notify the main thread.

        If a rank has left, there are no more rounds. If the store fails, call it again with the
        same arguments.
        """
        if self._store is None:
            agreed: _Agreed | None = _Agreed(boundary, self._reasons)
        else:
            self._announce(round_number, " ".join((str(boundary), *sorted(self._reasons))))
            agreed = self._collect(round_number)
        if agreed is None:  # a rank has left
            self._end()
            return
        with self._state:
            self._agreed = agreed
            self._state.notify_all()

    def _announce(self, round_number: int, text: str) -> None:
        """Announce this rank's boundary in the store, once in a round.

        Args:
            round_number: the round.
            text: the boundary and this rank's reasons, such as "120 end"; or `_LEFT`.
        """
        if self._store is None:
            return
        with self._announcing:  # the main thread may leave while the other announces
            if self._announced >= round_number:
                return
            # This sets nothing if an announcement is there: that of a call whose answer was lost.
            self._store.compare_set(f"{round_number}/at/{self._rank}", "", text)
            self._store.add(f"{round_number}/count", 1)
            self._announced = round_number
            if round_number >= 2:
                # A rank announces only after it has acted on the agreement of the previous round.
                # For that agreement, all ranks had read the announcements of the round before it.
                self._store.delete_key(f"{round_number - 2}/at/{self._rank}")
                if self._rank == 0:
                    self._store.delete_key(f"{round_number - 2}/request")
                    self._store.delete_key(f"{round_number - 2}/count")

    def _collect(self, round_number: int) -> _Agreed | None:
        """Collect what all ranks have announced; None if a rank, or this one, has left."""
        assert self._store is not None
        pause_seconds = 0.01
        keys = [f"{round_number}/at/{rank}" for rank in range(self._world_size)]

        def have_all_announced(store: Any) -> bool:
            # The count is cheap, but has a rank twice if an answer was lost.
            count: int = store.add(f"{round_number}/count", 0)
            return count >= self._world_size and store.check(keys)

        while not have_all_announced(self._store):
            if self._stop.wait(pause_seconds):
                return None
            pause_seconds = min(2 * pause_seconds, self._poll_seconds)
        announced = [value.decode().split() for value in self._store.multi_get(keys)]
        boundaries = [boundary for boundary, *_ in announced]
        if _LEFT in boundaries:
            return None
        reasons = frozenset(reason for _, *reasons in announced for reason in reasons)
        return _Agreed(max(map(int, boundaries)), reasons)

    def _end(self) -> None:
        """End all agreements, because a rank has left or the store has gone; training goes on."""
        with self._state:
            self._over = True
            self._hold = None
            self._state.notify_all()
