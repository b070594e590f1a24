"""Plan a load that ranks do together, as a pure function: who fetches what, and for whom.

Blocks that several ranks need (replicas, values, blocks that shards of another layout cut) are
fetched by one of them, which hands every other rank the parts that it needs. This happens in
rounds: every rank first fetches its part of the round, then the ranks exchange all of it. The bytes
of a round are bounded, and with them the memory for receiving.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeAlias, TypeVar

import numpy as np

from dcp_objstore.transfer.ranges import DEFAULT_GAP_BYTES, Span

T = TypeVar("T")

# What one read of one rank needs of one block: bytes `[low, high)` of block `[start, end)`, all
# counted from the start of the object. If it needs separate pieces within them, `packed_bytes` is
# the sum of their lengths and `read` is the rank's number for the read; otherwise 0 and -1.
NEED = np.dtype(
    [
        ("object_number", np.int64),
        ("start", np.int64),
        ("end", np.int64),
        ("low", np.int64),
        ("high", np.int64),
        ("packed_bytes", np.int64),
        ("read", np.int64),
    ]
)

Needs = np.ndarray[tuple[int], np.dtype[np.void]]


class NodeCopies(NamedTuple):
    """The objects of which a rank's node has copies.

    Attributes:
        node: an id that all ranks of the node have in common, and no others.
        objects: the numbers of the objects.
    """

    node: bytes
    objects: frozenset[int]


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of a message: bytes `[start, end)` of the object, unchanged or packed.

    Attributes:
        packed_bytes: the length of the pieces that the receiver needs of block `[start, end)`,
            packed in the order in which they lie there; 0 for unchanged bytes.
        read: the receiver's number for the read that needs the packed pieces; -1 for unchanged
            bytes.
    """

    start: int
    end: int
    packed_bytes: int = 0
    read: int = -1

    @property
    def length_bytes(self) -> int:
        """The length of the piece in the message."""
        return self.packed_bytes or self.end - self.start


@dataclass(frozen=True, slots=True)
class SharedRequest:
    """A ranged GET of bytes `[start, end)` that one rank makes for itself and others.

    Attributes:
        fetcher: the number of the rank that makes the request. It needs all of its blocks as well,
            or its node has a copy of the object.
        sequence: the number of requests that this rank makes before this one.
        blocks: `(start, end)` of each block in the request.
        messages: the segments that each other rank receives, by the rank's number.
    """

    object_number: int
    start: int
    end: int
    fetcher: int
    sequence: int
    blocks: tuple[tuple[int, int], ...]
    messages: dict[int, tuple[Segment, ...]]


@dataclass(slots=True)
class ExchangePlan:
    """One rank's view of the shared part of a load.

    Attributes:
        rounds: for each round, the requests that this rank fetches (with all messages) or receives
            a part of (with its own message only). All ranks have the same number of rounds, and
            some rounds may be empty.
    """

    rounds: list[list[SharedRequest]] = field(default_factory=list)

    def fetched_by(self, rank: int) -> Iterator[SharedRequest]:
        """Iterate over the requests of all rounds that `rank` fetches, in order."""
        return (
            request for requests in self.rounds for request in requests if request.fetcher == rank
        )

    def alone(self, spans: Iterable[Span[T]]) -> list[Span[T]]:
        """Return the spans that are not shared, which this rank fetches by itself."""
        shared = {
            (request.object_number, *block)
            for requests in self.rounds
            for request in requests
            for block in request.blocks
        }
        return [span for span in spans if (span.object_number, span.start, span.end) not in shared]


def plan_exchange(
    needs: Sequence[Needs],
    *,
    request_size_bytes: int,
    round_size_bytes: int,
    copies: Sequence[NodeCopies | None] = (),
    gap_bytes: int = DEFAULT_GAP_BYTES,
) -> list[ExchangePlan]:
    """Plan who fetches each block that more than one rank needs, who receives it, and when.

    Every rank fetches about as many bytes as the others, counting those that it alone needs. A
    block is fetched by one rank only, and that rank needs the block itself. But on each node that
    has a copy of the block's object, one rank reads it for those of the node that need it, and on
    one of these nodes for all others as well.

    Args:
        needs: an array of `NEED` for each rank.
        copies: the objects of which each rank's node has copies. Default: no node has any.
        request_size_bytes: the size of the largest request, unless a single block is larger.
        round_size_bytes: the largest total size of the requests of a round, unless the round has
            only one request.

    Returns:
        The part of each rank. It has no rounds if nothing is shared.
    """
    shared, loads = _split(needs, _ranks_with_copies(copies))
    requests = _assign(_merge(shared, request_size_bytes, gap_bytes), loads)
    plans = [ExchangePlan() for _ in needs]
    room_bytes = 0  # in the current round
    for request in requests:
        size_bytes = request.end - request.start
        if size_bytes > room_bytes:
            room_bytes = round_size_bytes
            for plan in plans:
                plan.rounds.append([])
        room_bytes -= size_bytes
        plans[request.fetcher].rounds[-1].append(request)
        for rank, segments in request.messages.items():
            plans[rank].rounds[-1].append(replace(request, messages={rank: segments}))
    return plans


class _Want(NamedTuple):
    """What one read needs of a block: the fields of `NEED` from `low` on."""

    low: int
    high: int
    packed_bytes: int
    read: int


@dataclass(slots=True)
class _SharedBlock:
    """A block, and ranks that get it from one that reads it.

    Attributes:
        wants: what each rank needs of it, by the rank's number.
        readers: the ranks of which one reads it, in order: ranks that need it or, if none of these
            is on a node that has a copy, the ranks of such a node.
    """

    object_number: int
    start: int
    end: int
    wants: dict[int, list[_Want]]
    readers: Sequence[int]


# The ranks that can read the copy of an object, by the object's number and the node.
_Holders: TypeAlias = dict[int, dict[bytes, list[int]]]


def _ranks_with_copies(copies: Sequence[NodeCopies | None]) -> _Holders:
    """Return which ranks can read a copy of each object; see `plan_exchange`."""
    holders: _Holders = {}
    for rank, node_copies in enumerate(copies):
        if node_copies is None:
            continue
        for number in node_copies.objects:
            holders.setdefault(number, {}).setdefault(node_copies.node, []).append(rank)
    return holders


def _split(needs: Sequence[Needs], holders: _Holders) -> tuple[list[_SharedBlock], list[int]]:
    """Return the shared blocks, by object and offset, and the bytes that each rank alone needs.

    `needs` has a row for each block that a rank needs. If rank 0 needs blocks [0, 64) and [64, 128)
    of an object and rank 1 only [64, 128), there are three rows, in order of the ranks 0, 0 and 1.
    Block [0, 64) has row 0 alone. Block [64, 128), which is shared, has rows 1 and 2.
    """
    rows = np.concatenate(list(needs)) if needs else np.empty(0, NEED)
    # The rank that each row is of.
    ranks = np.repeat(np.arange(len(needs)), [len(of_rank) for of_rank in needs])
    order = np.lexsort((ranks, rows["end"], rows["start"], rows["object_number"]))
    rows, ranks = rows[order], ranks[order]
    if not len(rows):
        return [], []
    # A block has the rows from its first to its last one, in order of their ranks. So it is shared
    # if its first and its last row are of different ranks.
    block_of_row = rows[["object_number", "start", "end"]]
    firsts = np.flatnonzero(np.concatenate([[True], block_of_row[1:] != block_of_row[:-1]]))
    lasts = np.concatenate([firsts[1:], [len(rows)]]) - 1
    is_shared = ranks[firsts] != ranks[lasts]
    # A block with a copy is looked at even if one rank alone needs it, because a rank of another
    # node may have to read the copy for it.
    if holders:
        is_shared |= np.isin(block_of_row["object_number"][firsts], list(holders))
    alone = firsts[~is_shared]
    lengths = (rows["end"] - rows["start"])[alone]
    loads = np.bincount(ranks[alone], weights=lengths, minlength=len(needs)).astype(np.int64)
    blocks = []
    for first, last in zip(firsts[is_shared].tolist(), lasts[is_shared].tolist(), strict=True):
        number, start, end, *_ = rows[first].item()
        of_block = slice(first, last + 1)  # the rows of the block
        wants: dict[int, list[_Want]] = {}
        for rank, row in zip(ranks[of_block].tolist(), rows[of_block].tolist(), strict=True):
            wants.setdefault(rank, []).append(_Want(*row[3:]))
        block = _SharedBlock(number, start, end, wants=wants, readers=list(wants))
        divided = _by_node(block, holders[number]) if number in holders else [block]
        for of_node in divided:
            # One rank reads the block for itself alone: it is not shared after all.
            if of_node.readers == [*of_node.wants] and len(of_node.wants) == 1:
                loads[of_node.readers[0]] += end - start
            else:
                blocks.append(of_node)
    # `_merge` joins neighbours, so the blocks that the same rank reads are put next to each other.
    if holders:
        blocks.sort(key=lambda block: (block.object_number, block.readers[0], block.start))
    return blocks, loads.tolist()


def _by_node(block: _SharedBlock, holders: dict[bytes, list[int]]) -> Iterator[_SharedBlock]:
    """Divide a block by the nodes that have a copy, on each of which one rank reads it.

    One of these nodes also serves the ranks of nodes without a copy.

    Args:
        holders: for each node that has a copy, its ranks.
    """
    # For each node that has a copy, those of its ranks that need the block.
    needing = {
        node: [rank for rank in ranks if rank in block.wants] for node, ranks in holders.items()
    }
    without_copy = block.wants.keys() - {rank for ranks in needing.values() for rank in ranks}
    # The ranks without a copy are served by a node that needs the block itself, if there is one,
    # and otherwise by any node with a copy. The choice depends on the object's number, so all
    # blocks of an object that the same ranks need have the same host.
    hosts = sorted(filter(needing.get, holders)) or sorted(holders)
    host = hosts[block.object_number % len(hosts)]
    for node, ranks in needing.items():
        served = [*ranks, *(without_copy if node == host else ())]
        if served:
            wants = {rank: block.wants[rank] for rank in served}
            # If no rank of the node needs the block, any of its ranks may read it for the others.
            yield replace(block, wants=wants, readers=ranks or holders[node])


def _merge(
    blocks: Sequence[_SharedBlock], request_size_bytes: int, gap_bytes: int
) -> Iterator[list[_SharedBlock]]:
    """Group neighbouring blocks that the same ranks need, up to the size of a request.

    Such blocks of one object have the same readers, too, because these follow from the ranks that
    need the block.
    """
    run: list[_SharedBlock] = []
    end = 0  # where the run ends
    for block in blocks:
        # The block is added to the run if it is of the same object, the same ranks need it, it is
        # near enough, and the run does not become too large.
        if (
            run
            and block.object_number == run[0].object_number
            and block.wants.keys() == run[0].wants.keys()
            and block.start <= end + gap_bytes
            and max(block.end, end) - run[0].start <= request_size_bytes
        ):
            run.append(block)
            end = max(end, block.end)
        else:
            if run:
                yield run
            run, end = [block], block.end
    if run:
        yield run


def _assign(runs: Iterator[list[_SharedBlock]], loads: list[int]) -> Iterator[SharedRequest]:
    """Assign each run to the rank that has the least to fetch among those that may read it."""
    sequences = [0] * len(loads)  # the number of requests of each rank so far
    for run in runs:
        ranks = run[0].wants
        fetcher = min(run[0].readers, key=lambda rank: (loads[rank], rank))
        start, end = run[0].start, max(block.end for block in run)
        loads[fetcher] += end - start
        yield SharedRequest(
            run[0].object_number,
            start,
            end,
            fetcher=fetcher,
            sequence=sequences[fetcher],
            blocks=tuple((block.start, block.end) for block in run),
            messages={rank: _message(run, rank) for rank in ranks if rank != fetcher},
        )
        sequences[fetcher] += 1


def _message(run: Sequence[_SharedBlock], rank: int) -> tuple[Segment, ...]:
    """Return the message for `rank`: unchanged stretches, then packed pieces.

    Stretches with small gaps between them become one.
    """
    packed = [
        Segment(block.start, block.end, want.packed_bytes, want.read)
        for block in run
        for want in block.wants[rank]
        if want.packed_bytes
    ]
    stretches = {
        (want.low, want.high)
        for block in run
        for want in block.wants[rank]
        if not want.packed_bytes
    }
    unchanged: list[Segment] = []
    for low, high in sorted(stretches):
        # A message of one segment is sent without a copy. To send the bytes of a small gap, too,
        # costs less than a copy.
        if unchanged and low <= unchanged[-1].end + DEFAULT_GAP_BYTES:
            unchanged[-1] = Segment(unchanged[-1].start, max(unchanged[-1].end, high))
        else:
            unchanged.append(Segment(low, high))
    return (*unchanged, *packed)
