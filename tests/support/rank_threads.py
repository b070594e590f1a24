"""Ranks that are threads of this process, for what they do together in a group: in milliseconds.

    ranks = RankThreads(3)
    monkeypatch.setattr(exchange, "dist", ranks)        # in the place of `torch.distributed`
    outcomes = ranks.run(load)                          # load(rank, group), in a thread each

A rank that waits for one that has gone fails, as with gloo, and is noted in `deserted`.
"""

from __future__ import annotations

import pickle
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

_SECONDS = 60


@dataclass(frozen=True)
class RankGroup:
    """A group of all ranks, as one of them has it."""

    ranks: RankThreads
    rank: int


@dataclass
class _Work:
    wait: Callable[[], object]


@dataclass
class RankThreads:
    """The functions of `torch.distributed` for ranks that are threads.

    Attributes:
        deserted: the rank and the call, for each that waited in vain.
        sent: the bytes of each message, by sender and receiver.
    """

    count: int
    deserted: list[tuple[int, str]] = field(default_factory=list)
    sent: dict[tuple[int, int], list[bytes]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.ReduceOp = dist.ReduceOp
        self.calling = threading.local()  # `rank`: whose calls this thread makes
        self._changed = threading.Condition()
        self._gone: set[int] = set()
        self._steps = [0] * self.count
        self._posted: dict[int, dict[int, tuple[str, Any]]] = {}
        self._underway: dict[tuple[int, int], deque[bytes]] = {}

    def run(self, function: Callable[[int, Any], Any]) -> list[Any]:
        """Call `function` with each rank and its group; what it returned or raised."""
        futures: list[Future[Any]] = [Future() for _ in range(self.count)]

        def call(rank: int) -> None:
            try:
                futures[rank].set_result(function(rank, RankGroup(self, rank)))
            except BaseException as error:  # noqa: BLE001 - an outcome
                futures[rank].set_result(error)
            finally:
                self.end(rank)

        threads = [threading.Thread(target=call, args=(n,), daemon=True) for n in range(self.count)]
        for thread in threads:
            thread.start()
        return [future.result(_SECONDS) for future in futures]

    def end(self, *ranks: int) -> None:
        """Nobody waits for these ranks any more."""
        with self._changed:
            self._gone.update(ranks)
            self._changed.notify_all()

    # Of a thread that outlives its test, the group is that of another object than `self`.

    def get_rank(self, group: RankGroup) -> int:
        return group.rank

    def get_world_size(self, group: RankGroup) -> int:
        return group.ranks.count

    def all_gather_object(self, values: list[Any], value: object, *, group: RankGroup) -> None:
        assert len(values) == group.ranks.count
        gathered = group.ranks._together("gather", group.rank, pickle.dumps(value))
        values[:] = map(pickle.loads, gathered)

    def broadcast_object_list(self, values: list[Any], *, group: RankGroup, group_src: int) -> None:
        values[:] = group.ranks._together("broadcast", group.rank, [*values])[group_src]

    def all_reduce(self, tensor: torch.Tensor, op: Any, *, group: RankGroup) -> None:
        assert op == dist.ReduceOp.MAX
        tensors = group.ranks._together("reduce", group.rank, tensor.clone())
        tensor.copy_(torch.stack(tensors).amax(0))

    def isend(self, message: torch.Tensor, *, group: RankGroup, group_dst: int) -> _Work:
        group.ranks._send(group.rank, group_dst, message.numpy().tobytes())
        return _Work(lambda: True)

    def irecv(self, place: torch.Tensor, *, group: RankGroup, group_src: int) -> _Work:
        def receive() -> None:
            body = group.ranks._receive(group_src, group.rank)
            if len(body) != place.nbytes:
                raise RuntimeError(f"{len(body)} bytes were sent, {place.nbytes} expected")
            place.copy_(torch.frombuffer(bytearray(body), dtype=torch.uint8))

        return _Work(receive)

    def _send(self, sender: int, receiver: int, body: bytes) -> None:
        with self._changed:
            self.sent.setdefault((sender, receiver), []).append(body)
            self._underway.setdefault((sender, receiver), deque()).append(body)
            self._changed.notify_all()

    def _receive(self, sender: int, receiver: int) -> bytes:
        with self._changed:
            arrived = self._underway.setdefault((sender, receiver), deque())
            self._wait(lambda: bool(arrived), {sender}, receiver, "receive")
            return arrived.popleft()

    def _together(self, call: str, rank: int, value: object) -> list[Any]:
        self.calling.rank = rank
        with self._changed:
            posted = self._posted.setdefault(self._steps[rank], {})
            self._steps[rank] += 1
            posted[rank] = call, value
            self._changed.notify_all()
            missing = set(range(self.count)) - posted.keys()
            self._wait(lambda: len(posted) == self.count, missing, rank, call)
        if {name for name, _ in posted.values()} != {call}:
            raise RuntimeError(f"the ranks make different calls: {posted}")
        return [posted[number][1] for number in range(self.count)]

    def _wait(self, has_come: Callable[[], bool], others: set[int], rank: int, call: str) -> None:
        def is_over() -> bool:
            return has_come() or bool(others & self._gone)

        self._changed.wait_for(is_over, _SECONDS)
        if not has_come():
            self.deserted.append((rank, call))
            raise RuntimeError("Connection closed by peer")
