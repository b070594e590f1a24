"""Verify a whole checkpoint: find and name all damage, and keep nothing in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

import xxhash
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from dcp_objstore.checkpoint.marker import Counts
from dcp_objstore.checkpoint.names import MARKER_KEY
from dcp_objstore.config import at_most
from dcp_objstore.errors import (
    CheckpointCorruptError,
    CorruptDataError,
    ObjectNotFoundError,
    UnsupportedError,
)
from dcp_objstore.observe.events import Planned, Verified
from dcp_objstore.observe.report import first_few
from dcp_objstore.transfer.digests import BLOCK_SIZE_BYTES, DIGEST_SIZE_BYTES, block_digest
from dcp_objstore.transfer.download import fetch_ranges
from dcp_objstore.transfer.progress import Progress
from dcp_objstore.transfer.ranges import RangeRequest, Span, plan_requests
from dcp_objstore.transfer.workers import AT_ONCE, DaemonPool

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from dcp_objstore.checkpoint.index import ObjectEntry
    from dcp_objstore.config import TransferConfig
    from dcp_objstore.observe.dispatch import Channel
    from dcp_objstore.read.stored_checkpoint import ItemLocation, StoredCheckpoint
    from dcp_objstore.stores import ObjectStore

_SHOWN = 3  # number of keys to name for a missing object


@dataclass(frozen=True, slots=True, order=True)
class Damage:
    """A single difference between a checkpoint and what was saved.

    Attributes:
        object_key: key of the data object, or of the marker.
        what: kind of damage. `missing`: the object does not exist; `size`: it has another size, or
            ends too early; `block`: a block of payload differs; `framing`: bytes around the
            payloads differ; `counts`: the marker's counts are not those of the index.
        key: key of the tensor or value with the damaged block; otherwise empty.
        block: number of the damaged 4 MiB block in its item; otherwise -1.
        text: description for people.
    """

    object_key: str
    what: Literal["missing", "size", "block", "framing", "counts"]
    key: str = ""
    block: int = -1
    text: str = ""


@dataclass(frozen=True, kw_only=True)
class VerifyReport:
    """The result of a verification.

    Attributes:
        url: URL of the checkpoint.
        commit_id: commit that was verified.
        objects: number of data objects that were checked.
        blocks: number of blocks of payload that were read and compared.
        total_bytes: number of bytes read.
        deep: whether framing, padding and counts were compared as well.
        damaged: all damage that was found, ordered by object.
    """

    url: str
    commit_id: str | None
    objects: int
    blocks: int
    total_bytes: int
    deep: bool
    damaged: tuple[Damage, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing is damaged."""
        return not self.damaged


@dataclass(frozen=True, slots=True)
class Piece:
    """A block of payload and its number in its item.

    Without a digest, it is a piece between payloads and its number in its object.
    """

    key: str
    number: int
    digest: bytes | None


_Place: TypeAlias = tuple[int, int]


def _place(span: Span[Piece]) -> _Place:
    """Return the place of a piece: its object and its first byte there."""
    return span.object_number, span.start


class _Framing:
    """The digest of the bytes between an object's payloads, which arrive in any order."""

    def __init__(self) -> None:
        self._digest = xxhash.xxh3_128()
        self._next = 0
        self._early: dict[int, bytes] = {}

    def add(self, number: int, piece: bytes) -> None:
        """Add piece `number`; keep it in memory only until all earlier pieces have arrived."""
        self._early[number] = piece
        while self._next in self._early:
            self._digest.update(self._early.pop(self._next))
            self._next += 1

    def digest(self) -> bytes:
        """Return the digest of all pieces before the first that did not arrive."""
        return self._digest.digest()


class _Comparison:
    """Compare arriving bodies with their digests, and collect the damage."""

    def __init__(self, stored: StoredCheckpoint) -> None:
        self.damaged: set[Damage] = set()
        self.blocks = 0
        self.total_bytes = 0
        self._stored = stored
        self._lock = threading.Lock()
        # By place, not by identity: a request may arrive in pieces, which are temporary objects.
        self._tried: set[_Place] = set()
        self._done: set[_Place] = set()
        self._framing: dict[int, _Framing] = {}

    def is_done(self, request: RangeRequest[Piece]) -> bool:
        """Whether the request was compared."""
        return all(_place(span) in self._done for span in request.spans)

    def consume(self, request: RangeRequest[Piece], body: Buffer) -> None:
        """Compare the pieces of a body; a piece that differs is read again before it counts."""
        view = memoryview(body)
        different, framing = [], []
        left = [span for span in request.spans if _place(span) not in self._done]
        for span in left:
            part = view[span.start - request.start : span.end - request.start]
            if span.tag.digest is None:
                framing.append((span.tag.number, bytes(part)))
            elif block_digest(part) != span.tag.digest:
                different.append(span)
        with self._lock:
            new = [span for span in different if _place(span) not in self._tried]
            if new:
                self._tried.update(map(_place, new))
                raise CheckpointCorruptError("blocks differ", key=new[0].tag.key)
            self._done.update(map(_place, left))
            self.blocks += len(left) - len(framing)
            self.total_bytes += _size(left)
            for span in different:
                self.differs(span)
            for number, piece in framing:
                self._framing[request.object_number].add(number, piece)

    def differs(self, span: Span[Piece]) -> None:
        """Note a damaged block of payload."""
        object_key = self._stored.object_keys[span.object_number]
        text = (
            f"{span.tag.key}: block {span.tag.number}, bytes [{span.start}, {span.end}) of"
            f" {object_key}, differs from what was saved"
        )
        self.damaged.add(Damage(object_key, "block", span.tag.key, span.tag.number, text))

    def missing(self, object_key: str) -> None:
        """Note a missing object and the items whose bytes it held."""
        number = self._stored.object_keys.index(object_key)
        items = self._stored.items
        keys = list(dict.fromkeys(key for key, place in items if place.object_number == number))
        held = f"; it held {first_few(keys, _SHOWN)}" if keys else ""
        text = f"{object_key}: the object is missing{held}"
        self.damaged.add(Damage(object_key, "missing", text=text))

    def begin(self, object_numbers: Iterable[int]) -> None:
        """Begin a round of requests that fetch all framing of these objects."""
        self._tried.clear()
        self._done.clear()
        self._framing = {number: _Framing() for number in object_numbers}

    def differing_framing(self) -> dict[int, ObjectEntry]:
        """Return the objects whose framing differs from what was saved."""
        objects = self._stored.objects
        assert objects is not None
        return {
            number: objects[number]
            for number, framing in self._framing.items()
            if framing.digest() != objects[number].framing_digest
        }


def verify_checkpoint(
    store: ObjectStore,
    stored: StoredCheckpoint,
    config: TransferConfig,
    channel: Channel,
    *,
    deep: bool,
) -> VerifyReport:
    """Read a checkpoint, compare it with its digests, and report all damage.

    Args:
        store: the store, rooted at the checkpoint.
        stored: the opened checkpoint.
        config: sizes, concurrency, time-outs and the memory budget.
        channel: channel for the events of the verification.
        deep: also compare framing, padding and the marker's counts.

    Raises:
        UnsupportedError: another library wrote the checkpoint, without digests.
        CheckpointGoneError: the checkpoint was replaced or deleted since it was opened.
    """
    if stored.objects is None:
        raise UnsupportedError(
            "another library wrote this checkpoint, without digests to verify it with",
            url=store.url,
        )
    comparison = _Comparison(stored)
    sizes = _sizes(store, stored, comparison, config)
    whole = {n for n, size in sizes.items() if size == stored.objects[n].size_bytes}
    spans = []
    for span in payload_blocks(stored):
        if span.end <= sizes.get(span.object_number, 0):
            spans.append(span)
        elif span.object_number in sizes:  # the object ends before the block
            comparison.differs(span)
    framing = framing_pieces(stored, spans, whole) if deep else []
    comparison.begin(whole if deep else ())
    requests = plan_requests([*spans, *framing], request_size_bytes=config.request_size_bytes)
    channel.emit(
        Planned,
        channel.began_at,
        operation="verify",
        items=len(stored.items),
        size_bytes=_size(spans) + _size(framing),
        objects=len({request.object_number for request in requests}),
        requests=len(requests),
    )
    broken = _compare(store, stored, requests, comparison, config, channel)
    again = comparison.differing_framing()
    if again:  # read again, as for blocks: the transfer may be damaged, not the checkpoint
        comparison.begin(again)
        framing = [span for span in framing if span.object_number in again]
        requests = plan_requests(framing, request_size_bytes=config.request_size_bytes)
        broken |= _compare(store, stored, requests, comparison, config, channel)
    for entry in comparison.differing_framing().values():
        if entry.key not in broken:
            text = f"{entry.key}: framing or padding differs from what was saved"
            comparison.damaged.add(Damage(entry.key, "framing", text=text))
    if deep:
        comparison.damaged.update(_miscounted(stored))
    channel.emit(
        Verified,
        channel.began_at,
        size_bytes=comparison.total_bytes,
        damaged=len(comparison.damaged),
    )
    return VerifyReport(
        url=store.url,
        commit_id=stored.commit_id,
        objects=len(stored.objects),
        blocks=comparison.blocks,
        total_bytes=comparison.total_bytes,
        deep=deep,
        damaged=tuple(sorted(comparison.damaged)),
    )


def _sizes(
    store: ObjectStore, stored: StoredCheckpoint, comparison: _Comparison, config: TransferConfig
) -> dict[int, int]:
    """Return the sizes of existing objects by number; note missing ones and wrong sizes."""
    assert stored.objects is not None
    sizes = {}
    check_gone = _GoneCheck(store, stored)
    threads = min(at_most(config.download_concurrency, AT_ONCE), len(stored.objects))
    with DaemonPool(threads, "head") as pool:
        answers = [pool.submit(store.head, entry.key) for entry in stored.objects]
        for number, (entry, answer) in enumerate(zip(stored.objects, answers, strict=True)):
            try:
                sizes[number] = answer.result().size_bytes
            except ObjectNotFoundError as error:
                check_gone(error)
                comparison.missing(entry.key)
                continue
            if sizes[number] != entry.size_bytes:
                text = f"{entry.key}: has {sizes[number]} bytes, {entry.size_bytes} were saved"
                comparison.damaged.add(Damage(entry.key, "size", text=text))
    return sizes


def _compare(
    store: ObjectStore,
    stored: StoredCheckpoint,
    requests: Sequence[RangeRequest[Piece]],
    comparison: _Comparison,
    config: TransferConfig,
    channel: Channel,
) -> set[str]:
    """Fetch and compare; return the keys of objects that are missing or too short after all.

    These are left out and the rest goes on, so each of them takes one more round. They existed with
    the right size a moment ago, so there are few of them, or the checkpoint is gone.
    """
    keys = stored.object_keys
    broken: set[str] = set()
    check_gone = _GoneCheck(store, stored)
    while True:
        left = [
            r for r in requests if keys[r.object_number] not in broken and not comparison.is_done(r)
        ]
        progress = Progress(config.stall_timeout_seconds, channel)
        try:
            with closing(
                fetch_ranges(store, keys, left, comparison.consume, config, progress)
            ) as arriving:
                for _ in arriving:
                    pass
        except ObjectNotFoundError as error:
            check_gone(error)
            object_key = error.object_key
            if object_key is None or object_key in broken:
                raise
            comparison.missing(object_key)
        except CorruptDataError as error:
            object_key = error.object_key
            if object_key is None or object_key in broken:
                raise
            text = f"{object_key}: {error.message}; the bytes after that were not compared"
            comparison.damaged.add(Damage(object_key, "size", text=text))
        else:
            return broken
        broken.add(object_key)


def _size(spans: Iterable[Span[Piece]]) -> int:
    return sum(span.end - span.start for span in spans)


def _miscounted(stored: StoredCheckpoint) -> Iterator[Damage]:
    """Yield the damage if the marker's counts are not those of the index."""
    assert stored.marker is not None and stored.objects is not None
    described = stored.metadata.state_dict_metadata.values()
    values = sum(isinstance(item, BytesStorageMetadata) for item in described)
    named = Counts(
        tensors=len(described) - values,
        blobs=values,
        objects=len(stored.objects),
        total_bytes=sum(entry.size_bytes for entry in stored.objects),
    )
    if stored.marker.counts != named:
        text = f"{MARKER_KEY}: counts {stored.marker.counts}, the index has {named}"
        yield Damage(MARKER_KEY, "counts", text=text)


class _GoneCheck:
    """A check for whether the checkpoint or only an object is gone, which asks the store once."""

    def __init__(self, store: ObjectStore, stored: StoredCheckpoint) -> None:
        self._ask: Callable[[ObjectNotFoundError], Exception] | None = lambda error: stored.explain(
            store, error
        )

    def __call__(self, error: ObjectNotFoundError) -> None:
        """Raise unless only the object is missing: CheckpointGoneError, or why this is unknown."""
        if self._ask is not None:
            explained = self._ask(error)
            if not isinstance(explained, CheckpointCorruptError):
                raise explained from error
            self._ask = None


def payload_blocks(stored: StoredCheckpoint) -> Iterator[Span[Piece]]:
    """Yield every block of every item."""
    for key, location in stored.items:
        yield from _blocks(key, location)


def _blocks(key: str, location: ItemLocation) -> Iterator[Span[Piece]]:
    assert location.digests is not None
    for number in range(-(-location.payload_length // BLOCK_SIZE_BYTES)):
        start = number * BLOCK_SIZE_BYTES
        end = min(start + BLOCK_SIZE_BYTES, location.payload_length)
        digest = location.digests[number * DIGEST_SIZE_BYTES : (number + 1) * DIGEST_SIZE_BYTES]
        yield Span(
            location.object_number,
            location.payload_offset + start,
            location.payload_offset + end,
            Piece(key, number, digest),
        )


def framing_pieces(
    stored: StoredCheckpoint, payload: Sequence[Span[Piece]], object_numbers: Iterable[int]
) -> list[Span[Piece]]:
    """Return the bytes between the payloads of these objects, in pieces of at most a block."""
    assert stored.objects is not None
    taken: dict[int, list[tuple[int, int]]] = {number: [] for number in object_numbers}
    for span in payload:
        if span.object_number in taken:
            taken[span.object_number].append((span.start, span.end))
    spans: list[Span[Piece]] = []
    for object_number, stretches in taken.items():
        position = number = 0
        ends = (stored.objects[object_number].size_bytes,) * 2
        for start, end in [*sorted(stretches), ends]:
            while position < start:
                stop = min(start, position + BLOCK_SIZE_BYTES)
                spans.append(Span(object_number, position, stop, Piece("", number, None)))
                position, number = stop, number + 1
            position = max(position, end)
    return spans
