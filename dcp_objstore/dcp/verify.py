"""Verification of a whole checkpoint: all damage is found and named, nothing is kept in memory."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import xxhash

from dcp_objstore.errors import (
    CheckpointCorruptError,
    CorruptDataError,
    ObjectNotFoundError,
    UnsupportedError,
)
from dcp_objstore.transfer.digests import BLOCK_SIZE_BYTES, DIGEST_SIZE_BYTES, block_digest
from dcp_objstore.transfer.download import fetch_ranges
from dcp_objstore.transfer.progress import Progress
from dcp_objstore.transfer.ranges import RangeRequest, Span, plan_requests

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from dcp_objstore.config import TransferConfig
    from dcp_objstore.dcp.source import Source, Stored
    from dcp_objstore.stores import ObjectStore


@dataclass(frozen=True, slots=True, order=True)
class Damage:
    """One thing that is not as it was saved.

    Attributes:
        object_key: the data object.
        what: `missing`: there is no such object; `size`: it has another size; `block`: a block of
            payload differs; `framing`: something around the payloads differs.
        key: of the tensor or value, for a block.
        block: number of the 4 MiB block in its item, for a block.
        text: the same for people.
    """

    object_key: str
    what: Literal["missing", "size", "block", "framing"]
    key: str = ""
    block: int = -1
    text: str = ""


@dataclass(frozen=True, kw_only=True)
class VerifyReport:
    """What was verified.

    Attributes:
        url, commit_id: the checkpoint.
        objects: data objects looked at.
        blocks: blocks of payload that were compared.
        total_bytes: bytes read.
        deep: whether sizes and framing were looked at, too.
        damaged: everything that was found, by object.
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
class _Block:
    """A block of payload, or, without a digest, bytes between payloads."""

    key: str
    number: int
    digest: bytes | None


class _Comparison:
    """Collects what differs, and framing until all of an object's is there."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._lock = threading.Lock()
        self._read_again: set[int] = set()
        self._framing: dict[int, dict[int, bytes]] = {}
        self.damaged: list[Damage] = []

    def consume(self, request: RangeRequest[_Block], body: Buffer) -> None:
        """Compare the blocks of a body; what differs is read once more before it counts."""
        view = memoryview(body)
        different = []
        framing = []
        for span in request.spans:
            part = view[span.start - request.start : span.end - request.start]
            if span.tag.digest is None:
                framing.append((span.start, bytes(part)))
            elif block_digest(part) != span.tag.digest:
                different.append(span)
        with self._lock:
            if different and id(request) not in self._read_again:
                self._read_again.add(id(request))
                raise CheckpointCorruptError("blocks differ", key=different[0].tag.key)
            self._framing.setdefault(request.object_number, {}).update(framing)
            for span in different:
                self._differs(span)

    def _differs(self, span: Span[_Block]) -> None:
        object_key = self._source.object_keys[span.object_number]
        text = (
            f"{span.tag.key}: block {span.tag.number}, bytes [{span.start}, {span.end}) of"
            f" {object_key}, differs from what was saved"
        )
        self.damaged.append(Damage(object_key, "block", span.tag.key, span.tag.number, text))

    def finish_framing(self, object_numbers: Iterable[int]) -> None:
        """Compare the framing of the objects that were read whole."""
        assert self._source.objects is not None
        for number in object_numbers:
            digest = xxhash.xxh3_128()
            for _, piece in sorted(self._framing.get(number, {}).items()):
                digest.update(piece)
            entry = self._source.objects[number]
            if digest.digest() != entry.framing_digest:
                text = f"{entry.key}: framing or padding differs from what was saved"
                self.damaged.append(Damage(entry.key, "framing", text=text))


def verify_source(
    store: ObjectStore, source: Source, config: TransferConfig, *, deep: bool
) -> VerifyReport:
    """See `Checkpoint.verify`."""
    if source.objects is None:
        raise UnsupportedError(
            "another library wrote this checkpoint, without digests to verify it by", url=store.url
        )
    comparison = _Comparison(source)
    sizes = {}
    for number, entry in enumerate(source.objects):
        try:
            size = store.head(entry.key).size_bytes
        except ObjectNotFoundError as error:
            # Raises if it is missing because the checkpoint was replaced.
            explained = source.explain(store, error)
            if not isinstance(explained, CheckpointCorruptError):
                raise explained from error
            comparison.damaged.append(
                Damage(entry.key, "missing", text=f"{entry.key}: there is no such object")
            )
            continue
        sizes[number] = size
        if size != entry.size_bytes:
            text = f"{entry.key}: has {size} bytes, {entry.size_bytes} were saved"
            comparison.damaged.append(Damage(entry.key, "size", text=text))
    whole = [n for n, size in sizes.items() if size == source.objects[n].size_bytes]
    spans = [s for s in _payload(source) if s.object_number in sizes]
    # What an object is too short for differs by itself.
    for span in spans:
        if span.end > sizes[span.object_number]:
            comparison._differs(span)
    spans = [s for s in spans if s.end <= sizes[s.object_number]]
    blocks = len(spans)
    if deep:
        spans += _framing(source, spans, whole)
    requests = plan_requests(spans, request_size_bytes=config.request_size_bytes)
    progress = Progress(config.stall_timeout_seconds)
    keys = source.object_keys
    try:
        with closing(
            fetch_ranges(store, keys, requests, comparison.consume, config, progress)
        ) as arriving:
            for _ in arriving:
                pass
    except ObjectNotFoundError as error:
        raise source.explain(store, error) from error
    except CorruptDataError as error:  # it became shorter since we asked for its size
        raise CheckpointCorruptError(
            error.message, error.rank, error.key, error.object_key, error.url
        ) from error
    if deep:
        comparison.finish_framing(whole)
    return VerifyReport(
        url=store.url,
        commit_id=source.commit_id,
        objects=len(source.objects),
        blocks=blocks,
        total_bytes=sum(request.end - request.start for request in requests),
        deep=deep,
        damaged=tuple(sorted(comparison.damaged)),
    )


def _payload(source: Source) -> Iterator[Span[_Block]]:
    """Every block of every item."""
    for (key, _), stored in source.items.items():
        yield from _blocks(key, stored)


def _blocks(key: str, stored: Stored) -> Iterator[Span[_Block]]:
    assert stored.digests is not None
    for number in range(-(-stored.payload_length // BLOCK_SIZE_BYTES)):
        start = number * BLOCK_SIZE_BYTES
        end = min(start + BLOCK_SIZE_BYTES, stored.payload_length)
        digest = stored.digests[number * DIGEST_SIZE_BYTES : (number + 1) * DIGEST_SIZE_BYTES]
        yield Span(
            stored.object_number,
            stored.payload_offset + start,
            stored.payload_offset + end,
            _Block(key, number, digest),
        )


def _framing(
    source: Source, payload: Sequence[Span[_Block]], object_numbers: Sequence[int]
) -> list[Span[_Block]]:
    """What lies between the payloads of these objects, in pieces of at most a block."""
    assert source.objects is not None
    taken: dict[int, list[tuple[int, int]]] = {number: [] for number in object_numbers}
    for span in payload:
        if span.object_number in taken:
            taken[span.object_number].append((span.start, span.end))
    spans = []
    for number, stretches in taken.items():
        position = 0
        ends = (source.objects[number].size_bytes,) * 2
        for start, end in [*sorted(stretches), ends]:
            while position < start:
                stop = min(start, position + BLOCK_SIZE_BYTES)
                spans.append(Span(number, position, stop, _Block("", -1, None)))
                position = stop
            position = max(position, end)
    return spans
