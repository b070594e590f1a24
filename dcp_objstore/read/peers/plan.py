"""Planning of loads that ranks do together, as a pure function: who fetches what and for whom.

Blocks that several ranks need (replicas, values, blocks that shards of another layout cut) are
fetched by one of them, which hands every other rank what that rank wants of them. This happens in
rounds: in each, every rank first has its part of the round, then all of it changes hands. The
bytes of a round are bounded, and so is the memory that receiving them takes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from dcp_objstore.transfer.ranges import DEFAULT_GAP_BYTES

# What one read of one rank wants of one block: bytes `[low, high)` of block `[start, end)`, all
# counted from the start of the object. Where it wants separate pieces within them, `packed_bytes`
# is the sum of their lengths and `read` the rank's own number for the read; otherwise 0 and -1.
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


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of a message: bytes `[start, end)` of the object as they are, or packed.

    Attributes:
        packed_bytes: 0 for bytes as they are; otherwise the length of what the receiver's read
            number `read` wants of block `[start, end)`, in the order in which it lies there.
        read: see `packed_bytes`; -1 for bytes as they are.
    """

    start: int
    end: int
    packed_bytes: int = 0
    read: int = -1

    @property
    def length_bytes(self) -> int:
        """Its length in the message."""
        return self.packed_bytes or self.end - self.start


@dataclass(frozen=True, slots=True)
class SharedRequest:
    """One ranged GET of bytes `[start, end)` by one rank for itself and others.

    Attributes:
        fetcher: number of the rank that fetches it; it needs all blocks in it, too.
        turn: how many other requests that rank fetches before this one.
        blocks: `(start, end)` of each.
        messages: what each other rank gets, by its number.
    """

    object_number: int
    start: int
    end: int
    fetcher: int
    turn: int
    blocks: tuple[tuple[int, int], ...]
    messages: dict[int, tuple[Segment, ...]]


@dataclass(slots=True)
class Sharing:
    """One rank's view of the shared part of a load.

    Attributes:
        rounds: in each, the requests that this rank fetches (with all messages) or of which it
            receives something (with its own message alone). All ranks have the same number of
            rounds; some may be empty.
    """

    rounds: list[list[SharedRequest]] = field(default_factory=list)

    def fetched_by(self, rank: int) -> Iterator[SharedRequest]:
        """The requests of all rounds that `rank` fetches, in order."""
        return (r for requests in self.rounds for r in requests if r.fetcher == rank)


def plan_sharing(
    needs: Sequence[Needs],
    *,
    request_size_bytes: int,
    round_size_bytes: int,
    gap_bytes: int = DEFAULT_GAP_BYTES,
) -> list[Sharing]:
    """Who fetches the blocks that more than one rank needs, and hands them to whom, when.

    Fetching is spread so that every rank fetches about as many bytes as the others, those that it
    alone needs included. A block is fetched by one rank only, which is one of those that need it.

    Args:
        needs: for each rank, an array of `NEED`.
        request_size_bytes: largest request, unless a single block is larger.
        round_size_bytes: the requests of a round have at most this many bytes together, unless
            there is only one.

    Returns:
        For each rank its part. No rounds at all where nothing is shared.
    """
    shared, loads = _split(needs)
    requests = _assign(_merge(shared, request_size_bytes, gap_bytes), loads)
    plans = [Sharing() for _ in needs]
    room = 0
    for request in requests:
        size = request.end - request.start
        if size > room:
            room = round_size_bytes
            for plan in plans:
                plan.rounds.append([])
        room -= size
        plans[request.fetcher].rounds[-1].append(request)
        for rank, segments in request.messages.items():
            plans[rank].rounds[-1].append(
                SharedRequest(
                    request.object_number,
                    request.start,
                    request.end,
                    request.fetcher,
                    request.turn,
                    request.blocks,
                    {rank: segments},
                )
            )
    return plans


@dataclass(slots=True)
class _Block:
    """A block that several ranks need, and the rows of each."""

    object_number: int
    start: int
    end: int
    wants: dict[int, list[tuple[int, int, int, int]]]  # rank: (low, high, packed_bytes, read)


def _split(needs: Sequence[Needs]) -> tuple[list[_Block], list[int]]:
    """The shared blocks in order of their place, and the bytes that each rank alone needs."""
    rows = np.concatenate(list(needs)) if needs else np.empty(0, NEED)
    ranks = np.repeat(np.arange(len(needs)), [len(n) for n in needs])
    order = np.lexsort((ranks, rows["end"], rows["start"], rows["object_number"]))
    rows, ranks = rows[order], ranks[order]
    if not len(rows):
        return [], [0] * len(needs)
    place = rows[["object_number", "start", "end"]]
    first = np.flatnonzero(np.concatenate([[True], place[1:] != place[:-1]]))
    # Sorted by rank within a block: it is shared when its first and last rank differ.
    last = np.concatenate([first[1:], [len(rows)]]) - 1
    is_shared = ranks[first] != ranks[last]
    alone = first[~is_shared]
    lengths = (rows["end"] - rows["start"])[alone]
    loads = np.bincount(ranks[alone], weights=lengths, minlength=len(needs)).astype(np.int64)
    blocks = []
    for low, high in zip(first[is_shared].tolist(), last[is_shared].tolist(), strict=True):
        number, start, end, *_ = rows[low].item()
        wants: dict[int, list[tuple[int, int, int, int]]] = {}
        for rank, row in zip(
            ranks[low : high + 1].tolist(), rows[low : high + 1].tolist(), strict=True
        ):
            wants.setdefault(rank, []).append(row[3:])
        blocks.append(_Block(number, start, end, wants))
    return blocks, loads.tolist()


def _merge(
    blocks: Sequence[_Block], request_size_bytes: int, gap_bytes: int
) -> Iterator[list[_Block]]:
    """Neighbouring blocks that the same ranks need, up to the size of a request."""
    run: list[_Block] = []
    end = 0
    for block in blocks:
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


def _assign(runs: Iterator[list[_Block]], loads: list[int]) -> Iterator[SharedRequest]:
    """Each run to the rank that has least to fetch of those that need it."""
    turns = [0] * len(loads)
    for run in runs:
        ranks = run[0].wants
        fetcher = min(ranks, key=lambda rank: (loads[rank], rank))
        start, end = run[0].start, max(block.end for block in run)
        loads[fetcher] += end - start
        yield SharedRequest(
            run[0].object_number,
            start,
            end,
            fetcher,
            turns[fetcher],
            tuple((block.start, block.end) for block in run),
            {rank: _message(run, rank) for rank in ranks if rank != fetcher},
        )
        turns[fetcher] += 1


def _message(run: Sequence[_Block], rank: int) -> tuple[Segment, ...]:
    """What `rank` wants of the blocks, stretches over small gaps as one."""
    rows = [(block, *row) for block in run for row in block.wants[rank]]
    packed = [Segment(b.start, b.end, size, read) for b, _, _, size, read in rows if size]
    plain: list[Segment] = []
    for low, high in sorted({(low, high) for _, low, high, size, _ in rows if not size}):
        # Bytes in between cost less than a copy of all, which several segments take.
        if plain and low <= plain[-1].end + DEFAULT_GAP_BYTES:
            plain[-1] = Segment(plain[-1].start, max(plain[-1].end, high))
        else:
            plain.append(Segment(low, high))
    return (*plain, *packed)
