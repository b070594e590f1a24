"""`Exchange`: one rank fetches the blocks that several ranks need and hands them to the others.

`read.peers.plan` decides who fetches what, in rounds. This module runs the rounds. A rank fetches
and verifies its part of a round (and, as memory allows, of later ones). Then all ranks agree that
each has its part, and only then they exchange bytes, point to point, in a gloo group.

Every step that the ranks take together begins with such an agreement, starting with the memory for
the slots. Work that may fail on one rank alone is done between two agreements. A rank that fails
reports its error in the next one instead of agreeing, so no rank waits for bytes that will not
come. Nothing is waited for before it is needed: ranks fetch while they find each other's slots.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from dcp_objstore.contexts import contextmanager
from dcp_objstore.distributed.failures import typed_failures
from dcp_objstore.distributed.plugin import typed
from dcp_objstore.distributed.ranks import current_rank
from dcp_objstore.errors import DcpObjstoreError
from dcp_objstore.read.geometry import Selection
from dcp_objstore.read.peers.plan import NEED, ExchangePlan, Needs, Segment, SharedRequest
from dcp_objstore.read.peers.shared_memory import SharedMemory, SharedMemoryAddress, attach
from dcp_objstore.read.plan import PlannedLoad, blocks_at
from dcp_objstore.read.tensor_read import Block, BlockRange, Read, TensorRead
from dcp_objstore.threads import STEP_SECONDS, result_of, wait_in_steps
from dcp_objstore.transfer.progress import Progress
from dcp_objstore.transfer.ranges import RangeRequest, Span
from dcp_objstore.transfer.workers import DaemonPool

# If the needed pieces make up less of a stretch than this, they are packed. Otherwise the whole
# stretch is sent, which saves both sides a copy.
_PACK_BELOW = 0.75


@dataclass(frozen=True, slots=True)
class Share:
    """The message of the coordinator to a rank before a load.

    Attributes:
        plan: this rank's part of the exchange; it has no rounds if nothing is shared.
        selections: the parts that reads of other ranks need of the blocks that this rank fetches,
            by the rank's number and that rank's number for the read. Only reads whose messages are
            packed are listed.
        meeting: a name for the load, the same on all of its ranks and unique among loads.
    """

    plan: ExchangePlan
    selections: dict[tuple[int, int], Selection]
    meeting: str


def needs_of(
    reads: Sequence[Read], spans: Iterable[Span[Block]]
) -> tuple[Needs, dict[int, Selection]]:
    """Return what this rank needs, for the coordinator, and the selections of its packed reads.

    A read is packed in a block if it needs only separate pieces of it: the fetching rank then sends
    these pieces alone, and needs the selection to find them.

    Args:
        reads: the reads; the position of a read in this sequence is its number.
        spans: the whole digest blocks that the reads need.
    """
    number_of = {id(read): number for number, read in enumerate(reads)}
    rows: list[tuple[int, int, int, int, int, int, int]] = []  # as in `NEED`
    selections: dict[int, Selection] = {}
    for span in spans:
        # These count bytes from the start of the item's payload. With `offset` added, they count
        # from the start of the object.
        start, end = span.tag.position, span.tag.position + span.end - span.start
        offset = span.start - start
        for read in span.tag.reads:
            # Without a selection, the read needs the whole block, unchanged.
            low, high, packed_bytes, packed_read = start, end, 0, -1
            selection = read.selection
            if selection is not None:
                low, high = selection.within(start, end)
                needed_bytes = selection.count_bytes(start, end)
                # If most of the stretch is needed, it is sent unchanged.
                if needed_bytes <= _PACK_BELOW * (high - low):
                    packed_bytes, packed_read = needed_bytes, number_of[id(read)]
                    selections[packed_read] = selection
            block = span.object_number, span.start, span.end
            rows.append((*block, low + offset, high + offset, packed_bytes, packed_read))
    return np.array(rows, dtype=NEED), selections


class _SlotsAddress(NamedTuple):
    """The place of this rank's slots, for another rank, and the size of each."""

    memory: SharedMemoryAddress
    slot_bytes: int


class _Slots(NamedTuple):
    """The slots of another rank, mapped to read, and the size of each."""

    memory: memoryview
    slot_bytes: int


class PeerFailedError(Exception):
    """Another rank has failed in the exchange; that rank raises the error itself.

    Attributes:
        cause: the error of the lowest rank that has failed.
    """

    def __init__(self, cause: DcpObjstoreError) -> None:
        self.cause = cause


class Exchange:
    """The shared part of one load on one rank; a context manager around the load.

    A body is fetched into a slot. Ranks on the same host read it there; other ranks are sent the
    parts that they need. If an error leaves the block before all rounds were run, it is sent to the
    other ranks, where `advance` or `keep` raises PeerFailedError.

    Args:
        group: a gloo group of the ranks that load, numbered as in the plan.

    Attributes:
        requests: the requests that this rank fetches for itself and others, in the order of the
            rounds.
        memory_bytes: the size of the memory that the exchange holds, once prepared.
        received_bytes: the number of bytes received from other ranks.
    """

    def __init__(self, share: Share, group: dist.ProcessGroup, url: str) -> None:
        """Begin the exchange; `prepare` allocates its memory."""
        self._share = share
        self._rounds = share.plan.rounds
        self._group = group
        self._rank = dist.get_rank(group)
        self._url = url
        # One thread for all collective steps, so that they run in the same order on every rank.
        # Ctrl-C ends only the wait for a step; the other ranks hear of it after the current step.
        self._thread = DaemonPool(1, "exchange")
        # Whether all rounds were run or a collective has failed: no rank waits for another then.
        self._is_over = False
        self._round = 0  # the number of rounds that were run
        # Set by `prepare`.
        self._reads: Sequence[Read]
        self._spans: dict[BlockRange, Span[Block]]
        self.requests: list[RangeRequest[Block]]
        # The plan's entry for each of `requests`, by the request's `id`.
        self._shared_by_id: dict[int, SharedRequest]
        # The number of this rank's requests up to the end of each round.
        self._due_by_round: list[int]
        # A slot is the memory for the body of one request of this rank. Requests take the slots in
        # turn.
        self._slots: SharedMemory
        self._slot_bytes: int
        self._arena: torch.Tensor  # the messages that are received in a round
        self.memory_bytes: int
        # The slots of other ranks that this rank can read, by rank.
        self._peer_slots: dict[int, _Slots] = {}
        # The ranks that cannot read this rank's slots, so that messages are sent to them.
        self._unreached: set[int] = set()
        # The messages of each request that was fetched, by its sequence and by the receiving rank.
        # A request without messages has an entry, too, which is empty.
        self._outbox: dict[int, dict[int, torch.Tensor]] = {}
        self._changed = threading.Condition()
        self._admitted = 0  # the number of requests that have a slot; they are admitted in order
        self._freed = 0  # the number of requests whose slots no rank needs any more
        self.received_bytes = 0
        # Done as soon as it is known which ranks can read whose slots.
        self._mapped: Future[None] = Future()

    def _request(self, planned: SharedRequest) -> RangeRequest[Block]:
        """Return the ranged GET of a shared request, with this rank's spans."""
        spans = [self._spans[planned.object_number, *block] for block in planned.blocks]
        return RangeRequest(planned.object_number, planned.start, planned.end, spans)

    def _count_slots(self, ahead_bytes: int) -> int:
        """Return the number of slots: what may be fetched ahead, or two rounds if that is more.

        A round's slots become free when all ranks have reached the next round, and by then each
        rank has already fetched its part of that next round.
        """
        # The requests of two neighbouring rounds are those that are due by the end of the second,
        # less those that were due before the first.
        due_before = [0, 0, *self._due_by_round]
        pairs = zip(due_before, self._due_by_round, strict=False)
        two_rounds = max((due - before for before, due in pairs), default=0)
        ahead = ahead_bytes // max(1, self._slot_bytes)
        return min(len(self.requests), max(two_rounds, ahead))

    def prepare(self, planned: PlannedLoad, ahead_bytes: int) -> None:
        """Allocate the memory, and begin to find out which ranks can read whose slots.

        Args:
            ahead_bytes: the number of bytes that may be fetched, or in flight, before their round.
        """
        self._reads = planned.reads
        self._spans = {(span.object_number, span.start, span.end): span for span in planned.spans}
        fetched = list(self._share.plan.fetched_by(self._rank))
        # This rank reads some blocks that only other ranks need, because its node has the copy.
        for_others = {
            (request.object_number, *block) for request in fetched for block in request.blocks
        } - self._spans.keys()
        self._spans |= blocks_at(planned.checkpoint, for_others)
        self.requests = [self._request(shared) for shared in fetched]
        self._shared_by_id = {
            id(request): shared for request, shared in zip(self.requests, fetched, strict=True)
        }
        self._due_by_round = list(
            itertools.accumulate(
                sum(request.fetcher == self._rank for request in requests)
                for requests in self._rounds
            )
        )
        sizes = (request.end - request.start for request in self.requests)
        self._slot_bytes = max(sizes, default=0)
        self._slots = SharedMemory(self._count_slots(ahead_bytes), self._slot_bytes)
        # This memory is never touched if this rank can read the slots of all others. (torch.empty
        # would touch it under torch.use_deterministic_algorithms, which fills new tensors.)
        arena_bytes = max(map(self._incoming_bytes, self._rounds), default=0)
        self._arena = torch.from_numpy(np.empty(arena_bytes, dtype=np.uint8))
        self.memory_bytes = self._slots.size_bytes + self._arena.nbytes
        self._mapped = self._thread.submit(self._map_slots)

    def _map_slots(self) -> None:
        """Find out which ranks can read whose slots. A collective."""
        address = self._slots.address
        # The address is None if this rank's memory cannot be shared.
        own_slots = None if address is None else _SlotsAddress(address, self._slot_bytes)
        addresses: list[_SlotsAddress | None] = self._gather(own_slots)
        fetchers = {request.fetcher for requests in self._rounds for request in requests}
        for rank in fetchers - {self._rank}:
            slots = addresses[rank]
            memory = None if slots is None else attach(slots.memory)
            if slots is not None and memory is not None:  # the rank is on this host
                self._peer_slots[rank] = _Slots(memory, slots.slot_bytes)
        # Each rank says whose slots it can read.
        readable: list[list[int]] = self._gather(list(self._peer_slots))
        # After this gather all ranks have mapped what they can, so none opens the descriptor again.
        self._slots.close_descriptor()
        self._unreached = {rank for rank, peers in enumerate(readable) if self._rank not in peers}

    def _gather(self, value: object) -> list[Any]:
        """Gather a value from each rank, on all ranks. A collective."""
        self._agree(None)
        values: list[Any] = [None] * dist.get_world_size(self._group)
        with self._together():
            dist.all_gather_object(values, value, group=self._group)
        return values

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Wrap a step that all ranks take together. If it fails, the exchange is over."""
        try:
            with typed_failures(self._url, self._group):
                yield
        except BaseException:
            self._is_over = True
            raise

    def _incoming_bytes(self, requests: Iterable[SharedRequest]) -> int:
        """Return the size of the messages to this rank, if it can read no other rank's slots."""
        return sum(
            segment.length_bytes
            for request in requests
            if request.fetcher != self._rank
            for segment in request.messages[self._rank]
        )

    def __enter__(self) -> Exchange:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        """Send an error to the other ranks, if they still wait for this rank."""
        with self._thread:  # the thread ends when this block does
            if error is not None:
                # An error of the sending is dropped: `error`, which goes on, matters more.
                with contextlib.suppress(Exception):
                    report = partial(self._send_error, typed(error, current_rank(), self._url))
                    result_of(self._thread.submit(report))
        # The old future may have an error, whose frames refer to this object: a reference cycle.
        self._mapped = Future()

    def _send_error(self, error: DcpObjstoreError) -> None:
        """Send an error in place of agreeing to the next step, if there is one."""
        if not self._is_over:
            self._agree(error)

    def alone(self) -> list[Span[Block]]:
        """Return the spans that are not shared, which this rank fetches by itself."""
        return self._share.plan.alone(self._spans.values())

    def admit(self, request: RangeRequest[Block], progress: Progress) -> memoryview | None:
        """Block a worker until a shared request has a slot; return the slot.

        Requests are admitted in order.
        """
        planned = self._shared_by_id.get(id(request))
        if planned is None:  # a request that is not shared takes no slot
            return None
        with self._changed:
            has_begun = partial(self._changed.wait_for, partial(self.may_begin, request))
            wait_in_steps(has_begun, check=progress.check_stopped, step_seconds=STEP_SECONDS)
            self._admitted += 1
            self._changed.notify_all()
        return self._slot_of(planned)

    def may_begin(self, request: RangeRequest[Block]) -> bool:
        """Whether `admit` does not wait for a slot. It stays so until the request is admitted."""
        planned = self._shared_by_id.get(id(request))
        if planned is None:  # a request that is not shared takes no slot
            return True
        slots = self._slots.size_bytes // self._slot_bytes
        # It is the request's turn, and the request that had its slot before has freed it.
        return self._admitted == planned.sequence and planned.sequence < self._freed + slots

    def _slot_of(self, planned: SharedRequest) -> memoryview:
        """Return the memory for a request; all requests take the slots in turn."""
        slots = self._slots.size_bytes // self._slot_bytes
        return self._slots[planned.sequence % slots][: planned.end - planned.start]

    def keep(self, request: RangeRequest[Block], progress: Progress) -> None:
        """Keep a verified body, which lies in its slot, until its round. Called in a worker.

        Raises:
            PeerFailedError: another rank has failed.
            RankFailedError: another rank has died.
        """
        planned = self._shared_by_id.get(id(request))
        if planned is None:  # a request that is not shared
            return
        # Wait until it is known which ranks cannot read the slot and so are sent messages.
        result_of(self._mapped, check=progress.check_stopped, step_seconds=STEP_SECONDS)
        slot = self._slot_of(planned)
        self._outbox[planned.sequence] = {
            rank: self._message(planned, rank, segments, slot)
            for rank, segments in planned.messages.items()
            if rank in self._unreached
        }

    def _message(
        self, planned: SharedRequest, rank: int, segments: Sequence[Segment], body: memoryview
    ) -> torch.Tensor:
        """Return the segments of a body that one rank receives, packed if its reads need that."""
        pieces = [
            body[segment.start - planned.start : segment.end - planned.start]
            for segment in segments
        ]
        if len(segments) == 1 and not segments[0].packed_bytes:  # it can be sent without a copy
            return torch.frombuffer(pieces[0], dtype=torch.uint8)
        message = np.empty(sum(segment.length_bytes for segment in segments), dtype=np.uint8)
        filled = 0
        for segment, piece in zip(segments, pieces, strict=True):
            into = message[filled : filled + segment.length_bytes]
            content = np.frombuffer(piece, dtype=np.uint8)
            if segment.packed_bytes:
                span = self._spans[planned.object_number, segment.start, segment.end]
                self._share.selections[rank, segment.read].pack(content, span.tag.position, into)
            else:
                into[:] = content
            filled += segment.length_bytes
        return torch.from_numpy(message)

    @property
    def is_done(self) -> bool:
        """Whether all rounds have been run."""
        return self._round == len(self._rounds)

    def advance(self) -> None:
        """Run every round whose part this rank has fetched.

        Raises:
            PeerFailedError: another rank has failed.
            RankFailedError: another rank has died.
        """
        while not self.is_done:
            # What this rank must have fetched for the next round. What is freed was fetched.
            due = range(self._freed, self._due_by_round[self._round])
            if any(sequence not in self._outbox for sequence in due):  # one is not yet fetched
                return
            requests = self._rounds[self._round]
            result_of(self._thread.submit(self._exchange_messages, requests))
            self._deliver(requests)

    def _agree(self, error: DcpObjstoreError | None) -> None:
        """Confirm that no rank has failed; otherwise raise PeerFailedError. A collective.

        Args:
            error: the error of this rank, which the others get; None if it has not failed.
        """
        with self._together():
            any_failed = torch.tensor([error is not None], dtype=torch.uint8, device="cpu")
            dist.all_reduce(any_failed, dist.ReduceOp.MAX, group=self._group)
            if not any_failed.item():
                return
            errors: list[DcpObjstoreError | None] = [None] * dist.get_world_size(self._group)
            dist.all_gather_object(errors, error, group=self._group)
            raise PeerFailedError(next(filter(None, errors)))  # that of the lowest rank

    def _exchange_messages(self, requests: Sequence[SharedRequest]) -> None:
        """Send and receive the messages of a round. A collective."""
        # `_map_slots` has run before this in the same thread. If it failed, this raises its error.
        self._mapped.result()
        self._agree(None)
        self._free_slots()
        works: list[dist.Work | None] = []
        filled = 0
        with self._together():
            # Both sides handle the messages between them in the same order, so no tags are needed.
            for request in requests:
                if request.fetcher == self._rank:
                    for rank, message in self._outbox[request.sequence].items():
                        works.append(dist.isend(message, group=self._group, group_dst=rank))
                elif request.fetcher not in self._peer_slots:  # else `_deliver` reads its slot
                    size = sum(segment.length_bytes for segment in request.messages[self._rank])
                    into = self._arena[filled : filled + size]
                    works.append(dist.irecv(into, group=self._group, group_src=request.fetcher))
                    filled += size
            for work in works:
                assert work is not None  # None only for ranks outside of the group
                work.wait()
        self._round += 1
        self._is_over = self.is_done

    def _free_slots(self) -> None:
        """Free the slots of earlier rounds, which all ranks have read before this round."""
        if self._round:  # before the first round there are none
            with self._changed:
                for sequence in range(self._freed, self._due_by_round[self._round - 1]):
                    del self._outbox[sequence]
                self._freed = self._due_by_round[self._round - 1]
                self._changed.notify_all()

    def _deliver(self, requests: Sequence[SharedRequest]) -> None:
        """Pass the received bytes to the reads."""
        filled = 0
        arena = memoryview(self._arena.numpy())
        for request in requests:
            if request.fetcher == self._rank:  # its own reads had the bytes when they arrived
                continue
            if request.fetcher in self._peer_slots:
                self._read_slot(request)
                continue
            for segment in request.messages[self._rank]:
                self._accept(request, segment, arena[filled : filled + segment.length_bytes])
                filled += segment.length_bytes
                self.received_bytes += segment.length_bytes

    def _read_slot(self, request: SharedRequest) -> None:
        """Pass a request's bytes to the reads, out of the slot of the rank that fetched it."""
        memory, slot_bytes = self._peer_slots[request.fetcher]
        slot = request.sequence % (memory.nbytes // slot_bytes)
        shift = slot * slot_bytes - request.start  # from a place in the object to one in `memory`
        for start, end in request.blocks:
            span = self._spans[request.object_number, start, end]
            for read in span.tag.reads:
                read.accept(span.tag.position, memory[shift + start : shift + end])
        self.received_bytes += sum(segment.length_bytes for segment in request.messages[self._rank])

    def _accept(self, request: SharedRequest, segment: Segment, content: memoryview) -> None:
        """Pass a segment that was received to the reads that need it."""
        if segment.packed_bytes:
            span = self._spans[request.object_number, segment.start, segment.end]
            read = self._reads[segment.read]
            assert isinstance(read, TensorRead)  # an item that only torch decodes is sent whole
            # The block has lost the read if another key fills the same memory after this one.
            if read in span.tag.reads:
                read.accept_packed(span.tag.position, span.end - span.start, content)
            return
        for start, end in request.blocks:
            low, high = max(start, segment.start), min(end, segment.end)
            if low < high:
                span = self._spans[request.object_number, start, end]
                piece = content[low - segment.start : high - segment.start]
                position = span.tag.position + low - start
                for read in span.tag.reads:
                    # A block may have several reads, each with its own segment. A read may need
                    # nothing of this piece, which was sent for another read.
                    wanted = read.selection
                    if wanted is None or wanted.copies(position, position + len(piece)):
                        read.accept(position, piece)
