"""`Exchange`: blocks that several ranks need, fetched by one and handed to the others.

`transfer.sharing` has planned who fetches what, in rounds. Here the rounds are run: a rank fetches
and verifies its part of a round (and, as memory allows, of later ones), then all ranks agree that
each has its part, and only then do bytes change hands, point to point, in a gloo group. A rank
that fails says so in place of agreeing, and every rank raises its error: none waits for bytes
that will not come.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist

from dcp_objstore.dcp.failures import agree, typed_failures
from dcp_objstore.dcp.geometry import Selection
from dcp_objstore.dcp.groups import current_rank
from dcp_objstore.errors import DcpObjstoreError, RankFailedError
from dcp_objstore.transfer.ranges import RangeRequest, Span
from dcp_objstore.transfer.sharing import NEED, Needs, Segment, SharedRequest, Sharing
from dcp_objstore.transfer.workers import wait_for

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Buffer

    from dcp_objstore.config import TransferConfig
    from dcp_objstore.dcp.loading import PlannedLoad
    from dcp_objstore.dcp.reads import Block, Read
    from dcp_objstore.transfer.progress import Progress

# Pieces that make up less of a stretch than this are packed; otherwise all of it is sent, which
# saves both sides a copy.
_PACK_BELOW = 0.75
_POLL_SECONDS = 0.25


@dataclass(frozen=True, slots=True)
class Share:
    """What the coordinator tells a rank before a load.

    Attributes:
        sharing: this rank's part; no rounds where nothing is shared.
        selections: what reads of other ranks want of the blocks that this rank fetches, by the
            rank's number and its own for the read; only those whose messages are packed.
    """

    sharing: Sharing
    selections: dict[tuple[int, int], Selection]


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


class Exchange:
    """The shared part of one load on one rank; around the load, as a context manager.

    When the load ends with an error before all rounds were run, the other ranks are told; then all
    raise the same, that of the lowest rank that has failed.

    Args:
        share: from the coordinator.
        planned: this rank's load.
        group: a gloo group of the ranks that load, numbered as in the plan.
        url: of the checkpoint, for errors.
        config: a quarter of the memory budget is for what is fetched (or on its way) before its
            round has come, and a quarter for what is received in a round.

    Attributes:
        requests: what this rank is to fetch for itself and others, in the order of the rounds.
        memory_bytes: what it holds at most.
        received_bytes: what has come from other ranks.
    """

    def __init__(
        self,
        share: Share,
        planned: PlannedLoad,
        group: dist.ProcessGroup,
        url: str,
        config: TransferConfig,
    ) -> None:
        self._selections = share.selections
        self._rounds = share.sharing.rounds
        self._reads = planned.reads
        self._spans = {(s.object_number, s.start, s.end): s for s in planned.spans}
        self._group = group
        self._rank = dist.get_rank(group)
        self._url = url
        self._round = 0
        self._told = False
        self._outbox: dict[int, dict[int, torch.Tensor]] = {}  # by request: messages by rank
        self._ours: list[list[RangeRequest[Block]]] = [
            [self._request(r) for r in requests if r.fetcher == self._rank]
            for requests in self._rounds
        ]
        self.requests = [request for ours in self._ours for request in ours]
        self._planned = {
            id(request): planned
            for request, planned in zip(
                self.requests, share.sharing.fetched_by(self._rank), strict=True
            )
        }
        self._changed = threading.Condition()
        self._admitted = 0  # requests, in order
        self._held_bytes = 0
        own_bytes = sum(request.end - request.start for request in self.requests)
        self._ahead_bytes = min(own_bytes, config.memory_budget_bytes // 4)
        self._arena = torch.empty(
            max(map(self._incoming_bytes, self._rounds), default=0), dtype=torch.uint8
        )
        self.memory_bytes = self._ahead_bytes + self._arena.nbytes
        self.received_bytes = 0

    def __enter__(self) -> Exchange:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Tell the others of an error, in the round that they wait for this rank in."""
        if error is None or self._told or self.done:
            return
        self._told = True
        if not isinstance(error, Exception):  # Ctrl-C here; a second one ends the telling
            error = RankFailedError(f"{type(error).__name__}: {error}")
            with contextlib.suppress(DcpObjstoreError):
                wait_for(self._agree, error.at(rank=current_rank()))
            return
        if not isinstance(error, DcpObjstoreError):
            error = RankFailedError(f"{type(error).__name__}: {error}")
        wait_for(self._agree, error.at(rank=current_rank()))

    def _request(self, planned: SharedRequest) -> RangeRequest[Block]:
        spans = [self._spans[planned.object_number, *block] for block in planned.blocks]
        return RangeRequest(planned.object_number, planned.start, planned.end, spans)

    def _incoming_bytes(self, requests: Iterable[SharedRequest]) -> int:
        return sum(
            segment.length_bytes
            for request in requests
            if request.fetcher != self._rank
            for segment in request.messages[self._rank]
        )

    def alone(self) -> list[Span[Block]]:
        """What is not shared, for this rank to fetch by itself."""
        shared = {
            (request.object_number, *block)
            for requests in self._rounds
            for request in requests
            for block in request.blocks
        }
        return [span for place, span in self._spans.items() if place not in shared]

    def admit(self, request: RangeRequest[Block], progress: Progress) -> None:
        """Wait, in a worker, until memory allows to fetch a request; shared ones in their order."""
        if id(request) not in self._planned:
            return
        size = request.end - request.start

        def may_begin() -> bool:
            return self.requests[self._admitted] is request and (
                self._held_bytes == 0 or self._held_bytes + size <= self._ahead_bytes
            )

        with self._changed:
            while not self._changed.wait_for(may_begin, _POLL_SECONDS):
                progress.check_stopped()
            self._admitted += 1
            self._held_bytes += size
            self._changed.notify_all()

    def keep(self, request: RangeRequest[Block], body: Buffer) -> None:
        """Keep what others want of a verified body until its round; in a worker."""
        planned = self._planned.get(id(request))
        if planned is None:
            return
        view = memoryview(body)
        messages = {
            rank: self._message(planned, rank, segments, view)
            for rank, segments in planned.messages.items()
        }
        with self._changed:
            self._outbox[id(request)] = messages

    def _message(
        self, planned: SharedRequest, rank: int, segments: Sequence[Segment], body: memoryview
    ) -> torch.Tensor:
        if len(segments) == 1 and not segments[0].packed_bytes:
            start, end = segments[0].start, segments[0].end
            return torch.frombuffer(
                body[start - planned.start : end - planned.start], dtype=torch.uint8
            )
        message = np.empty(sum(segment.length_bytes for segment in segments), dtype=np.uint8)
        filled = 0
        for segment in segments:
            part = np.frombuffer(
                body[segment.start - planned.start : segment.end - planned.start], dtype=np.uint8
            )
            into = message[filled : filled + segment.length_bytes]
            if segment.packed_bytes:
                span = self._spans[planned.object_number, segment.start, segment.end]
                self._selections[rank, segment.read].pack(part, span.tag.position, into)
            else:
                into[:] = part
            filled += segment.length_bytes
        return torch.from_numpy(message)

    def advance(self) -> None:
        """Run every round for which this rank has its part.

        Raises:
            As `typed_failures`: when another rank has failed or died.
        """
        while not self.done:
            requests, ours = self._rounds[self._round], self._ours[self._round]
            with self._changed:
                if any(id(request) not in self._outbox for request in ours):
                    return
            try:
                wait_for(self._trade, requests)
            except BaseException:
                self._told = True
                raise
            self._round += 1
            with self._changed:
                for request in ours:
                    del self._outbox[id(request)]
                    self._held_bytes -= request.end - request.start
                self._changed.notify_all()
            self._deliver(requests)

    @property
    def done(self) -> bool:
        """Whether all rounds were run."""
        return self._round == len(self._rounds)

    def _agree(self, error: DcpObjstoreError | None) -> None:
        """Every rank has its part of the round; or all raise. A collective."""
        with typed_failures(self._url, self._group):
            failed = torch.tensor([error is not None], dtype=torch.uint8)
            dist.all_reduce(failed, dist.ReduceOp.MAX, group=self._group)
        if failed.item():
            agree(error, self._url, self._group)

    def _trade(self, requests: Sequence[SharedRequest]) -> None:
        self._agree(None)
        works: list[dist.Work | None] = []
        filled = 0
        ours = iter(self._ours[self._round])
        with typed_failures(self._url, self._group):
            # Both ends meet the messages between them in the same order, so they need no tags.
            for request in requests:
                if request.fetcher == self._rank:
                    for rank, message in self._outbox[id(next(ours))].items():
                        works.append(dist.isend(message, group=self._group, group_dst=rank))
                else:
                    size = sum(s.length_bytes for s in request.messages[self._rank])
                    into = self._arena[filled : filled + size]
                    works.append(dist.irecv(into, group=self._group, group_src=request.fetcher))
                    filled += size
            for work in works:
                assert work is not None  # None only for ranks outside of the group
                work.wait()

    def _deliver(self, requests: Sequence[SharedRequest]) -> None:
        """Hand what has come to the reads."""
        filled = 0
        arena = memoryview(self._arena.numpy())
        for request in requests:
            if request.fetcher == self._rank:
                continue
            for segment in request.messages[self._rank]:
                self._accept(request, segment, arena[filled : filled + segment.length_bytes])
                filled += segment.length_bytes
        self.received_bytes += filled

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
