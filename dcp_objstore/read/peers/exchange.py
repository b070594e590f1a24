"""`Exchange`: blocks that several ranks need, fetched by one and handed to the others.

`transfer.sharing` has planned who fetches what, in rounds. Here the rounds are run: a rank fetches
and verifies its part of a round (and, as memory allows, of later ones), then all ranks agree that
each has its part, and only then do bytes change hands, point to point, in a gloo group.

Whatever is done together begins with that agreement, from the memory for the slots on. What may
fail on one rank alone is done between two of them; a rank that fails says so in the next one, in
place of agreeing, and no rank waits for bytes that will not come.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from dcp_objstore.distributed.failures import typed_failures
from dcp_objstore.distributed.groups import current_rank
from dcp_objstore.distributed.plugin import typed
from dcp_objstore.errors import DcpObjstoreError
from dcp_objstore.read.peers.plan import NEED, Needs, Segment, SharedRequest, Sharing
from dcp_objstore.read.peers.shared_memory import Slots, SlotsAddress, attach
from dcp_objstore.state.geometry import Selection
from dcp_objstore.transfer.ranges import RangeRequest, Span
from dcp_objstore.transfer.workers import DaemonPool
from dcp_objstore.waiting import STEP_SECONDS, result_of, wait_in_steps

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Buffer

    from dcp_objstore.read.session import PlannedLoad
    from dcp_objstore.read.tensor_read import Block, Read
    from dcp_objstore.transfer.progress import Progress

T = TypeVar("T")

# Pieces that make up less of a stretch than this are packed; otherwise all of it is sent, which
# saves both sides a copy.
_PACK_BELOW = 0.75


@dataclass(frozen=True, slots=True)
class Share:
    """What the coordinator tells a rank before a load.

    Attributes:
        sharing: this rank's part; no rounds where nothing is shared.
        selections: what reads of other ranks want of the blocks that this rank fetches, by the
            rank's number and its own for the read; only those whose messages are packed.
        meeting: a name that no other load has, the same for all of its ranks.
    """

    sharing: Sharing
    selections: dict[tuple[int, int], Selection]
    meeting: str


def needs_of(
    reads: Sequence[Read], spans: Iterable[Span[Block]]
) -> tuple[Needs, dict[int, Selection]]:
    """What this rank wants, for the coordinator, and how its packed reads select it.

    Args:
        reads: in the order of their numbers.
        spans: whole digest blocks.
    """
    numbers = {id(read): number for number, read in enumerate(reads)}
    rows: list[tuple[int, int, int, int, int, int, int]] = []
    selections: dict[int, Selection] = {}
    for span in spans:
        start, end = span.tag.position, span.tag.position + span.end - span.start
        for read in span.tag.reads:
            low, high, size = start, end, 0
            selection = read.selection
            if selection is not None:
                low, high = selection.within(start, end)
                size = selection.count_bytes(start, end)
            place = (span.object_number, span.start, span.end)
            low, high = span.start + low - start, span.start + high - start
            if selection is None or size > _PACK_BELOW * (high - low):
                rows.append((*place, low, high, 0, -1))
            else:
                selections[numbers[id(read)]] = selection
                rows.append((*place, low, high, size, numbers[id(read)]))
    return np.array(rows, dtype=NEED), selections


class PeerFailedError(Exception):
    """Another rank has failed in the exchange, and raises its error itself.

    Attributes:
        cause: that of the lowest rank that has failed.
    """

    def __init__(self, cause: DcpObjstoreError) -> None:
        super().__init__(str(cause))
        self.cause = cause


class Exchange:
    """The shared part of one load on one rank; around the load, as a context manager.

    A body is fetched into a slot. Ranks on the same host read it there; to others, what they want
    of it is sent. An error that leaves the block before all rounds were run is told to the other
    ranks, where `prepare` or `advance` raises PeerFailedError.

    Args:
        share: from the coordinator.
        group: a gloo group of the ranks that load, numbered as in the plan.
        url: of the checkpoint, for errors.

    Attributes:
        requests: what this rank is to fetch for itself and others, in the order of the rounds.
        memory_bytes: what it holds, once prepared.
        received_bytes: what has come from other ranks.
    """

    def __init__(self, share: Share, group: dist.ProcessGroup, url: str) -> None:
        self._share = share
        self._rounds = share.sharing.rounds
        self._group = group
        self._rank = dist.get_rank(group)
        self._url = url
        # One for all that is done together, so that it is done in the same order on every rank:
        # Ctrl-C ends the waiting for it, and the others are told after what is under way.
        self._thread = DaemonPool(1, "exchange")
        self._over = False  # no rank waits for another any more
        self._round = 0
        self._reads: Sequence[Read] = ()
        self._spans: dict[tuple[int, int, int], Span[Block]] = {}
        self.requests: list[RangeRequest[Block]] = []
        self._ours: dict[int, SharedRequest] = {}
        self._due: list[int] = []
        self._slots: Slots  # once prepared
        self._slot_bytes = 0
        self._near: dict[int, tuple[memoryview, int]] = {}  # slots of other ranks, and their size
        self._far: set[int] = set()  # ranks that cannot read ours
        self._outbox: dict[int, dict[int, torch.Tensor]] = {}  # by turn: messages to them
        self._changed = threading.Condition()
        self._admitted = 0  # requests, in order
        self._freed = 0  # those of which everybody has what they want
        self._arena = torch.empty(0, dtype=torch.uint8)
        self.memory_bytes = 0
        self.received_bytes = 0

    def _request(self, planned: SharedRequest) -> RangeRequest[Block]:
        spans = [self._spans[planned.object_number, *block] for block in planned.blocks]
        return RangeRequest(planned.object_number, planned.start, planned.end, spans)

    def _count_slots(self, ahead_bytes: int) -> int:
        """As many as may be ahead, but at least those of two rounds.

        A round's slots are free when all have come to the next one, which they do with their
        parts of that one at hand.
        """
        before = [0, 0, *self._due]
        two_rounds = max((b - a for a, b in zip(before, self._due, strict=False)), default=0)
        ahead = ahead_bytes // max(1, self._slot_bytes)
        return min(len(self.requests), max(two_rounds, ahead))

    def prepare(self, planned: PlannedLoad, ahead_bytes: int) -> None:
        """Get the memory, and find out who can read whose slots. With the other ranks.

        Args:
            planned: this rank's load.
            ahead_bytes: how much may be fetched (or be on its way) before its round has come.

        Raises:
            PeerFailedError: another rank has failed.
            RankFailedError: another rank has died.
        """
        self._reads = planned.reads
        self._spans = {(s.object_number, s.start, s.end): s for s in planned.spans}
        ours = list(self._share.sharing.fetched_by(self._rank))
        self.requests = [self._request(planned_request) for planned_request in ours]
        self._ours = {id(request): one for request, one in zip(self.requests, ours, strict=True)}
        # Requests of ours up to and with each round.
        self._due = list(
            itertools.accumulate(
                sum(request.fetcher == self._rank for request in requests)
                for requests in self._rounds
            )
        )
        self._slot_bytes = max((r.end - r.start for r in self.requests), default=0)
        self._slots = Slots(self._count_slots(ahead_bytes), self._slot_bytes)
        address = self._slots.address
        doors: list[tuple[SlotsAddress, int] | None] = self._do(
            self._gather, None if address is None else (address, self._slot_bytes)
        )
        for rank in {r.fetcher for requests in self._rounds for r in requests} - {self._rank}:
            if (found := doors[rank]) is not None and (memory := attach(found[0])) is not None:
                self._near[rank] = (memory, found[1])
        self._arena = torch.empty(
            max(map(self._incoming_bytes, self._rounds), default=0), dtype=torch.uint8
        )
        self.memory_bytes = self._slots.size_bytes + self._arena.nbytes
        reached: list[list[int]] = self._do(self._gather, list(self._near))
        self._slots.close_door()
        self._far = {rank for rank, near in enumerate(reached) if self._rank not in near}

    def _gather(self, value: object) -> list[Any]:
        """What each rank has, on all of them."""
        self._agree(None)
        found: list[Any] = [None] * dist.get_world_size(self._group)
        with typed_failures(self._url, self._group):
            dist.all_gather_object(found, value, group=self._group)
        return found

    def _do(self, together: Callable[..., T], *args: object) -> T:
        """Do something that all ranks do, in its turn."""

        def in_turn() -> T:
            try:
                return together(*args)
            except BaseException:
                self._over = True
                raise

        return result_of(self._thread.submit(in_turn))

    def _incoming_bytes(self, requests: Iterable[SharedRequest]) -> int:
        return sum(
            segment.length_bytes
            for request in requests
            if request.fetcher != self._rank and request.fetcher not in self._near
            for segment in request.messages[self._rank]
        )

    def __enter__(self) -> Exchange:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Tell the others of an error, where they wait for this rank."""
        with self._thread:
            if error is not None:
                with contextlib.suppress(Exception):  # what has happened here matters more
                    self._do(self._tell, typed(error, current_rank(), self._url))

    def _tell(self, error: DcpObjstoreError) -> None:
        if not self._over:
            self._agree(error)

    def alone(self) -> list[Span[Block]]:
        """What is not shared, for this rank to fetch by itself."""
        shared = {
            (request.object_number, *block)
            for requests in self._rounds
            for request in requests
            for block in request.blocks
        }
        return [span for place, span in self._spans.items() if place not in shared]

    def admit(self, request: RangeRequest[Block], progress: Progress) -> memoryview | None:
        """Wait, in a worker, for a slot to fetch a shared request into; they go in their order."""
        planned = self._ours.get(id(request))
        if planned is None:
            return None
        with self._changed:
            may_begin = partial(self._changed.wait_for, partial(self._may_begin, planned))
            wait_in_steps(may_begin, look=progress.check_stopped, step_seconds=STEP_SECONDS)
            self._admitted += 1
            self._changed.notify_all()
        return self._slot_of(planned)

    def _may_begin(self, planned: SharedRequest) -> bool:
        slots = self._slots.size_bytes // self._slot_bytes
        return self._admitted == planned.turn and planned.turn < self._freed + slots

    def _slot_of(self, planned: SharedRequest) -> memoryview:
        slots = self._slots.size_bytes // self._slot_bytes
        return self._slots[planned.turn % slots][: planned.end - planned.start]

    def keep(self, request: RangeRequest[Block], body: Buffer) -> None:
        """Keep a verified body until its round; in a worker."""
        planned = self._ours.get(id(request))
        if planned is None:
            return
        slot = self._slot_of(planned)
        came = np.frombuffer(body, dtype=np.uint8)
        if came.ctypes.data != np.frombuffer(slot, dtype=np.uint8).ctypes.data:
            slot[:] = came.data  # the transport had memory of its own
        messages = {
            rank: self._message(planned, rank, segments, slot)
            for rank, segments in planned.messages.items()
            if rank in self._far
        }
        with self._changed:
            self._outbox[planned.turn] = messages

    def _message(
        self, planned: SharedRequest, rank: int, segments: Sequence[Segment], body: memoryview
    ) -> torch.Tensor:
        pieces = [body[s.start - planned.start : s.end - planned.start] for s in segments]
        if len(segments) == 1 and not segments[0].packed_bytes:
            return torch.frombuffer(pieces[0], dtype=torch.uint8)
        message = np.empty(sum(segment.length_bytes for segment in segments), dtype=np.uint8)
        filled = 0
        for segment, piece in zip(segments, pieces, strict=True):
            into = message[filled : filled + segment.length_bytes]
            part = np.frombuffer(piece, dtype=np.uint8)
            if segment.packed_bytes:
                span = self._spans[planned.object_number, segment.start, segment.end]
                self._share.selections[rank, segment.read].pack(part, span.tag.position, into)
            else:
                into[:] = part
            filled += segment.length_bytes
        return torch.from_numpy(message)

    @property
    def done(self) -> bool:
        """Whether all rounds were run."""
        return self._round == len(self._rounds)

    def advance(self) -> None:
        """Run every round for which this rank has its part.

        Raises:
            PeerFailedError: another rank has failed.
            RankFailedError: another rank has died.
        """
        while not self.done:
            due = self._due[self._round]
            with self._changed:
                if any(turn not in self._outbox for turn in range(self._freed, due)):
                    return
            requests = self._rounds[self._round]
            self._do(self._trade, requests)
            self._deliver(requests)

    def _agree(self, error: DcpObjstoreError | None) -> None:
        """Every rank has got so far; or those that have raise. A collective."""
        with typed_failures(self._url, self._group):
            failed = torch.tensor([error is not None], dtype=torch.uint8)
            dist.all_reduce(failed, dist.ReduceOp.MAX, group=self._group)
            if not failed.item():
                return
            found: list[DcpObjstoreError | None] = [None] * dist.get_world_size(self._group)
            dist.all_gather_object(found, error, group=self._group)
        if error is None:
            raise PeerFailedError(next(one for one in found if one is not None))

    def _trade(self, requests: Sequence[SharedRequest]) -> None:
        self._agree(None)
        self._free_slots()
        works: list[dist.Work | None] = []
        filled = 0
        with typed_failures(self._url, self._group):
            # Both ends meet the messages between them in the same order, so they need no tags.
            for request in requests:
                if request.fetcher == self._rank:
                    for rank, message in self._outbox[request.turn].items():
                        works.append(dist.isend(message, group=self._group, group_dst=rank))
                elif request.fetcher not in self._near:
                    size = sum(s.length_bytes for s in request.messages[self._rank])
                    into = self._arena[filled : filled + size]
                    works.append(dist.irecv(into, group=self._group, group_src=request.fetcher))
                    filled += size
            for work in works:
                assert work is not None  # None only for ranks outside of the group
                work.wait()
        self._round += 1
        self._over = self.done

    def _free_slots(self) -> None:
        """All ranks have come to this round: they have taken what they want of earlier ones."""
        if self._round:
            with self._changed:
                for turn in range(self._freed, self._due[self._round - 1]):
                    del self._outbox[turn]
                self._freed = self._due[self._round - 1]
                self._changed.notify_all()

    def _deliver(self, requests: Sequence[SharedRequest]) -> None:
        """Hand what has come to the reads."""
        filled = 0
        arena = memoryview(self._arena.numpy())
        for request in requests:
            if request.fetcher == self._rank:
                continue
            if request.fetcher in self._near:
                self._read_slot(request)
                continue
            for segment in request.messages[self._rank]:
                self._accept(request, segment, arena[filled : filled + segment.length_bytes])
                filled += segment.length_bytes
                self.received_bytes += segment.length_bytes

    def _read_slot(self, request: SharedRequest) -> None:
        memory, slot_bytes = self._near[request.fetcher]
        first = request.turn % (memory.nbytes // slot_bytes) * slot_bytes - request.start
        for start, end in request.blocks:
            span = self._spans[request.object_number, start, end]
            for read in span.tag.reads:
                read.accept(span.tag.position, memory[first + start : first + end])
        self.received_bytes += sum(s.length_bytes for s in request.messages[self._rank])

    def _accept(self, request: SharedRequest, segment: Segment, part: memoryview) -> None:
        if segment.packed_bytes:
            span = self._spans[request.object_number, segment.start, segment.end]
            self._reads[segment.read].accept_packed(span.tag.position, span.end - span.start, part)
            return
        for start, end in request.blocks:
            low, high = max(start, segment.start), min(end, segment.end)
            if low >= high:
                continue
            span = self._spans[request.object_number, start, end]
            piece = part[low - segment.start : high - segment.start]
            for read in span.tag.reads:
                read.accept(span.tag.position + low - start, piece)
