"""Verify a checkpoint, or those of a run: find and name all damage, in little memory. No torch."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from functools import partial
from typing import NamedTuple, TypeAlias

import xxhash
from typing_extensions import Buffer

from dcp_objstore.checkpoint import index as ix
from dcp_objstore.checkpoint.catalogue import list_run
from dcp_objstore.checkpoint.marker import Counts, Marker
from dcp_objstore.checkpoint.names import DOT_METADATA_KEY, MARKER_KEY
from dcp_objstore.checkpoint.publish import MAX_SIZE_BYTES
from dcp_objstore.checkpoint.read import (
    explain_missing,
    open_marked,
    read_marker,
    read_record,
    retry_damaged,
)
from dcp_objstore.compat.dot_metadata import StockDotMetadata
from dcp_objstore.config import TransferConfig, at_most
from dcp_objstore.distributed.ranks import rank_and_world_size
from dcp_objstore.errors import (
    CheckpointCorruptError,
    CheckpointGoneError,
    CheckpointNotFoundError,
    ConfigError,
    CorruptDataError,
    CredentialsError,
    ObjectNotFoundError,
    RetryableError,
    UnsupportedError,
)
from dcp_objstore.observe.dispatch import Channel, EventSettings
from dcp_objstore.observe.events import OnEvent, Planned, Verified
from dcp_objstore.observe.report import Damage, VerifyReport, first_few
from dcp_objstore.read.stored_checkpoint import open_stored_checkpoint
from dcp_objstore.stores import ObjectStore, StoreSpec
from dcp_objstore.transfer.digests import BLOCK_SIZE_BYTES, DIGEST_SIZE_BYTES, block_digest
from dcp_objstore.transfer.download import fetch_ranges
from dcp_objstore.transfer.progress import Progress
from dcp_objstore.transfer.ranges import RangeRequest, Span, plan_requests
from dcp_objstore.transfer.workers import MOST_IN_FLIGHT, DaemonPool

_SHOWN = 3  # number of keys to name for a missing object


class Piece(NamedTuple):
    """A block of payload: its item's key and row in the index, and its number in the item.

    Without a digest, it is a piece between payloads and its number in its object.
    """

    key: str
    row: int
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


class _Verification:
    """Compares a checkpoint with its digests, and collects the damage.

    Args:
        store: the store, rooted at the checkpoint.
        marker: its marker.
        index: its index.
        config: sizes, concurrency, time-outs and the memory budget.
        channel: channel for the events of the verification.
    """

    def __init__(
        self,
        store: ObjectStore,
        marker: Marker,
        index: ix.Index,
        config: TransferConfig,
        channel: Channel,
    ) -> None:
        self._damaged: set[Damage] = set()
        self._blocks = 0
        self._total_bytes = 0
        self._store = store
        self._marker = marker
        self._index = index
        self._config = config
        self._channel = channel
        self._exists = False  # whether the store has said that the checkpoint is not gone
        self._lock = threading.Lock()
        # The pieces that have differed in one read, and the pieces whose result counts. Both are
        # kept by place: a request may arrive in parts, whose spans are temporary objects.
        self._differed_once: set[_Place] = set()
        self._compared: set[_Place] = set()
        self._framing: dict[int, _Framing] = {}  # by the number of the object

    def run(
        self, index_body: bytes, *, quick: bool, deep: bool, only_key: str | None
    ) -> VerifyReport:
        """Verify the checkpoint; return the report.

        Args:
            index_body: its index as it is stored.
            quick: whether to check only the existence and the sizes of the objects.
            deep: whether to compare framing, padding, the marker's counts, and `.metadata`.
            only_key: the key of the tensor or value whose blocks are read. Default: all.

        Raises:
            CheckpointGoneError: the checkpoint was replaced or deleted since it was opened.
        """
        objects, sizes = self._index.objects, self._sizes()
        payload = self._payload(sizes)
        if only_key in self._index.keys:  # no key, or one that is not there, selects all blocks
            payload = [span for span in payload if span.tag.key == only_key]
        if not quick:
            # The framing of an object is compared only if the object has its size.
            whole = [number for number, size in sizes.items() if size == objects[number].size_bytes]
            self._read(payload, whole if deep else ())
        if deep:
            self._check_derived(index_body)
        report = VerifyReport(
            url=self._store.url,
            commit_id=self._marker.commit_id,
            objects=len(objects),
            blocks=self._blocks,
            total_bytes=self._total_bytes,
            quick=quick,
            deep=deep,
            damaged=tuple(sorted(self._damaged)),
        )
        self._channel.emit(Verified, self._channel.began_at, report=report)
        return report

    def _unchecked(self, spans: Iterable[Span[Piece]]) -> list[Span[Piece]]:
        """Return the pieces that were not compared."""
        return [span for span in spans if _place(span) not in self._compared]

    def _consume(self, request: RangeRequest[Piece], body: Buffer) -> None:
        """Compare the pieces of a body; a piece that differs is read again before it counts.

        `fetch_ranges` calls this in its threads. It reads a range again for which this raises
        CheckpointCorruptError.
        """
        view = memoryview(body)
        different, framing = [], []
        unchecked = self._unchecked(request.spans)
        for span in unchecked:
            part = view[span.start - request.start : span.end - request.start]
            if span.tag.digest is None:  # a piece between payloads
                framing.append((span.tag.number, bytes(part)))
            elif block_digest(part) != span.tag.digest:
                different.append(span)
        with self._lock:
            first_time = [span for span in different if _place(span) not in self._differed_once]
            if first_time:  # the transfer may have been damaged, and not the checkpoint
                self._differed_once.update(map(_place, first_time))
                raise CheckpointCorruptError("blocks differ", key=first_time[0].tag.key)
            self._compared.update(map(_place, unchecked))
            self._blocks += len(unchecked) - len(framing)
            self._total_bytes += _size(unchecked)
            for span in different:
                self._note_difference(span)
            for number, piece in framing:
                self._framing[request.object_number].add(number, piece)

    def _note_difference(self, span: Span[Piece]) -> None:
        """Note a damaged block of payload."""
        object_key = self._index.objects[span.object_number].key
        key, number = span.tag.key, span.tag.number
        part = _elements(self._index, key, span.tag.row, number)
        text = (
            f"{part}: block {number}, bytes [{span.start}, {span.end}) of {object_key}, differs"
            " from what was saved"
        )
        self._damaged.add(
            Damage(object_key, "block", key=key, block=number, elements=(part,), text=text)
        )

    def _note_missing(self, object_number: int) -> None:
        """Note a missing object and the items whose bytes it held."""
        object_key = self._index.objects[object_number].key
        held = tuple(
            _elements(self._index, key, row)
            for key, row, item in _items(self._index)
            if item.object_number == object_number
        )
        text = f"{object_key}: the object is missing"
        text += f"; it held {first_few(held, _SHOWN)}" if held else ""
        self._damaged.add(Damage(object_key, "missing", elements=held, text=text))

    def _sizes(self) -> dict[int, int]:
        """Return the sizes of existing objects by number; note missing ones and wrong sizes.

        Raises:
            CheckpointGoneError: an object is missing, because the checkpoint is gone.
        """

        def ask(entry: ix.ObjectEntry) -> int:
            """Return an object's size; raise ObjectNotFoundError if it is missing."""
            with suppress(ObjectNotFoundError):
                if self._store.head(entry.key).size_bytes == entry.size_bytes:
                    return entry.size_bytes
            # The object seems to be missing or to have another size. One answer may be wrong, so
            # the second one counts.
            return self._store.head(entry.key).size_bytes

        sizes = {}
        objects = self._index.objects
        threads = min(at_most(self._config.download_concurrency, MOST_IN_FLIGHT), len(objects))
        with DaemonPool(threads, "head") as pool:
            answers = [pool.submit(ask, entry) for entry in objects]
            for number, (entry, answer) in enumerate(zip(objects, answers, strict=True)):
                try:
                    sizes[number] = answer.result()
                except ObjectNotFoundError as error:
                    self._raise_if_checkpoint_gone(error)
                    self._note_missing(number)
                    continue
                if sizes[number] != entry.size_bytes:
                    text = f"{entry.key}: has {sizes[number]} bytes, {entry.size_bytes} were saved"
                    self._damaged.add(Damage(entry.key, "size", text=text))
        return sizes

    def _payload(self, sizes: Mapping[int, int]) -> list[Span[Piece]]:
        """Return the blocks of payload that lie within objects of these sizes.

        A block that reaches beyond the end of its object is noted as damaged. Blocks of missing
        objects are left out: the object was noted.
        """
        spans = []
        for span in payload_blocks(self._index):
            if span.end <= sizes.get(span.object_number, 0):
                spans.append(span)
            elif span.object_number in sizes:
                self._note_difference(span)
        return spans

    def _read(self, payload: Sequence[Span[Piece]], whole: Collection[int]) -> None:
        """Read and compare blocks of payload, and the framing of whole objects.

        If this is interrupted or fails, notes of the error give the damage so far.
        """
        framing = framing_pieces(self._index, payload, whole)
        self._framing = {number: _Framing() for number in whole}
        requests = self._requests([*payload, *framing])
        self._channel.emit(
            Planned,
            self._channel.began_at,
            operation="verify",
            items=len(self._index.columns.offset),
            size_bytes=sum(_size(request.spans) for request in requests),
            objects=len({request.object_number for request in requests}),
            requests=len(requests),
        )
        try:
            broken = self._compare(requests)
            suspects = self._differing_framing()
            # Like blocks, framing is read twice before it counts as damaged: the transfer may have
            # been damaged, and not the checkpoint.
            if suspects:
                framing = [span for span in framing if span.object_number in suspects]
                self._compared.difference_update(map(_place, framing))
                self._framing = {number: _Framing() for number in suspects}
                broken |= self._compare(self._requests(framing))
        except (KeyboardInterrupt, RetryableError, CredentialsError) as error:
            for damage in sorted(self._damaged):
                error.add_note(f"damaged so far: {damage.text}")
            raise
        for entry in self._differing_framing().values():
            if entry.key not in broken:  # what is broken was noted already
                text = f"{entry.key}: framing or padding differs from what was saved"
                self._damaged.add(Damage(entry.key, "framing", text=text))

    def _requests(self, spans: Iterable[Span[Piece]]) -> Sequence[RangeRequest[Piece]]:
        return plan_requests(spans, request_size_bytes=self._config.request_size_bytes)

    def _differing_framing(self) -> dict[int, ix.ObjectEntry]:
        """Return the objects whose framing differs from what was saved."""
        objects = self._index.objects
        return {
            number: objects[number]
            for number, framing in self._framing.items()
            if framing.digest() != objects[number].framing_digest
        }

    def _compare(self, requests: Sequence[RangeRequest[Piece]]) -> set[str]:
        """Fetch and compare; return the keys of objects that are missing or too short after all.

        Such an object is noted, and the others are read without it, in another round. Each of them
        existed with the right size a moment ago. So there are few, or the checkpoint is gone.
        """
        keys = [entry.key for entry in self._index.objects]
        broken: set[str] = set()
        while True:
            unchecked = [
                request
                for request in requests
                if keys[request.object_number] not in broken and self._unchecked(request.spans)
            ]
            progress = Progress(self._config.stall_timeout_seconds, self._channel)
            fetched = fetch_ranges(
                self._store,
                keys,
                unchecked,
                self._consume,
                config=self._config,
                progress=progress,
            )
            try:
                with closing(fetched) as arriving:
                    for _ in arriving:
                        pass
            except ObjectNotFoundError as error:
                self._raise_if_checkpoint_gone(error)
                object_key = error.object_key
                # Another round would change nothing.
                if object_key is None or object_key in broken:
                    raise
                self._note_missing(keys.index(object_key))
            except CorruptDataError as error:
                object_key = error.object_key
                if object_key is None or object_key in broken:
                    raise
                text = f"{object_key}: {error.message}; the bytes after that were not compared"
                self._damaged.add(Damage(object_key, "size", text=text))
            else:
                return broken
            broken.add(object_key)

    def _check_derived(self, index_body: bytes) -> None:
        """Compare what is derived from the index: the marker's counts, and `.metadata`."""
        counts = Counts.of(self._index)
        if self._marker.counts != counts:
            text = f"{MARKER_KEY}: counts {self._marker.counts}, the index has {counts}"
            self._damaged.add(Damage(MARKER_KEY, "counts", text=text))
        if _misleads(self._store, index_body):
            # It may be the `.metadata` of a commit that has replaced this checkpoint.
            self._raise_if_checkpoint_gone(ObjectNotFoundError("", object_key=DOT_METADATA_KEY))
            text = (
                f"{DOT_METADATA_KEY}: does not describe this checkpoint;"
                f" `dcp-objstore repair {self._store.url}` writes it again"
            )
            self._damaged.add(Damage(DOT_METADATA_KEY, "metadata", text=text))

    def _raise_if_checkpoint_gone(self, error: ObjectNotFoundError) -> None:
        """Raise CheckpointGoneError if the whole checkpoint is gone, and not only an object.

        If the store does not tell, its error is raised. Once it has said that the checkpoint is
        there, it is not asked again.
        """
        if self._exists:
            return
        explained = explain_missing(self._store, self._marker.commit_id, error.object_key)
        if not isinstance(
            explained, CheckpointCorruptError
        ):  # which says that only this is missing
            raise explained from error
        self._exists = True


def _check_depth(*, quick: bool, deep: bool) -> None:
    """Refuse a verification that is both quick and deep."""
    if quick and deep:
        raise ConfigError("a verification is either quick or deep")


def verify_at(
    spec: StoreSpec,
    event_settings: EventSettings,
    *,
    quick: bool,
    deep: bool,
    progress: bool,
    commit_id: str | None = None,
    only_key: str | None = None,
) -> VerifyReport:
    """Do what `Checkpoint.verify` does, for a URL. Damage to the marker or index is reported, too.

    Args:
        commit_id: the commit to verify. Default: the one that is there.
        only_key: the key of the tensor or value whose blocks are read. Default: all, also if there
            is no such key.

    Raises:
        CheckpointNotFoundError: nothing is committed at this URL.
        DcpObjstoreError: any other error that `Checkpoint.verify` raises.
    """
    _check_depth(quick=quick, deep=deep)
    store = spec.open()
    channel = event_settings.channel("verify", spec.url, *rank_and_world_size())
    channel.show(bar=progress, summary=False)
    with channel.watching():
        try:
            # CheckpointGoneError may come from one wrong answer, too: a marker that is not of this
            # checkpoint. So marker and index are then read once more.
            marker, body, index = retry_damaged(
                partial(_marker_and_index, store), CheckpointGoneError
            )
            if commit_id not in (None, marker.commit_id):
                raise explain_missing(store, commit_id, MARKER_KEY)
        except CheckpointNotFoundError as error:
            if commit_id is not None:  # the checkpoint was there when it was opened
                raise explain_missing(store, commit_id, MARKER_KEY) from None
            open_stored_checkpoint(spec, verify=False)  # raises why there is nothing
            # Opening has not raised, so there is a checkpoint of another library.
            raise without_digests(spec.url) from error
        except CheckpointCorruptError as error:
            object_key = error.object_key or MARKER_KEY
            text = f"{object_key}: {error.message}"
            return VerifyReport(
                url=spec.url,
                commit_id=None,
                objects=0,
                blocks=0,
                total_bytes=0,
                quick=quick,
                deep=deep,
                damaged=(Damage(object_key, "unreadable", text=text),),
            )
        verification = _Verification(store, marker, index, config=spec.config, channel=channel)
        return verification.run(body, quick=quick, deep=deep, only_key=only_key)


def verify_run(
    url: str,
    *,
    quick: bool = False,
    deep: bool = False,
    storage_options: Mapping[str, object] | None = None,
    config: TransferConfig | None = None,
    progress: bool = True,
    on_event: OnEvent | None = None,
    trace: str | os.PathLike[str] | None = None,
) -> Iterator[VerifyReport]:
    """Verify the committed steps of a run that count, one after the other, the newest first.

    The steps are listed when this is called, and each is read when its report is asked for. So
    this reads no more than is needed to find the newest whole step:

        next((report.url for report in dos.verify_run(url, deep=True) if report.ok), None)

    A step that is deleted before its turn is left out. One process calls it.

    Args:
        url: URL of the run; its steps are the checkpoints directly below.
        quick: whether to read no tensors and check only that all objects exist, with their sizes.
            Default False.
        deep: whether to compare what `Checkpoint.verify(deep=True)` compares. Default False.
        storage_options: credentials and endpoint in fsspec's spelling. Default: taken from the
            environment.
        config: sizes, concurrency, time-outs and the memory budget.
        progress: show a progress bar for each step if standard error is a terminal. Default True.
        on_event: callable that receives each event, in another thread. `ObjectStoreWriter`
            describes how it is called.
        trace: name of a local file to write a trace of each verification to. `ObjectStoreWriter`
            describes how the file is named.

    Returns:
        An iterator of the reports. Damage of every kind is reported, also a marker that cannot be
        read.

    Raises:
        CheckpointNotFoundError: the run has no such step.
        ConfigError: `quick` and `deep` contradict each other, or another argument is wrong.
        CheckpointCorruptError: the run's `_CLAIM` is damaged.
        UnsupportedError: a newer version wrote the run.
        StoreUnavailableError: the store did not answer, after all retries.
        PermissionDeniedError: the credentials do not allow the request.
    """
    _check_depth(quick=quick, deep=deep)
    spec = StoreSpec(url, storage_options, config)
    event_settings = EventSettings(on_event, trace)
    listed = list_run(spec.open(), spec.open_child, with_damaged=True)
    names = [step.name for step in reversed(listed.steps)]
    if not names:
        raise CheckpointNotFoundError("no committed step lies below", url=spec.url)

    def reports() -> Iterator[VerifyReport]:
        for name in names:
            with suppress(CheckpointGoneError, CheckpointNotFoundError):
                step = spec.child(name)
                yield verify_at(step, event_settings, quick=quick, deep=deep, progress=progress)

    return reports()


def _marker_and_index(store: ObjectStore) -> tuple[Marker, bytes, ix.Index]:
    """Return the marker, the index as it is stored, and the index."""
    stored = read_marker(store, expected=True)
    if stored is None:
        raise CheckpointNotFoundError("there is no marker", url=store.url)
    marker, body = open_marked(store, stored)
    return marker, body, ix.decode(body)


def without_digests(url: str) -> UnsupportedError:
    """Return the error for a checkpoint that cannot be verified."""
    text = (
        "this checkpoint is without digests to verify it with: another library wrote it, or its"
        f" marker ({MARKER_KEY}) is gone"
    )
    return UnsupportedError(text, url=url)


def _size(spans: Iterable[Span[Piece]]) -> int:
    return sum(span.end - span.start for span in spans)


def _misleads(store: ObjectStore, index: bytes) -> bool:
    """Whether there is a `.metadata` that does not describe an index.

    It is not damage if there is no `.metadata`: `save(stock_metadata=False)` writes none.
    """
    content = StockDotMetadata()

    def check(body: bytes) -> None:
        if not content.describes(body, index):
            raise CorruptDataError("it describes another checkpoint")

    try:
        read_record(
            store,
            DOT_METADATA_KEY,
            check,
            what="'.metadata'",
            max_size_bytes=MAX_SIZE_BYTES,
            expected=False,
        )
    except CorruptDataError:  # `read_record` raises the subclass CheckpointCorruptError
        return True
    except UnsupportedError:
        pass  # this version cannot make the `.metadata` of this index, so it cannot compare
    return False


def _items(index: ix.Index) -> Iterator[tuple[str, int, ix.Item]]:
    """Yield each item of the index: its key, its row, and what is in the row."""
    for key in (*index.tensors, *index.blobs):
        for row in index.rows(key):
            yield key, row, index.item(row)


def payload_blocks(index: ix.Index) -> Iterator[Span[Piece]]:
    """Yield every block of every item."""
    for key, row, item in _items(index):
        for number, start in enumerate(range(0, item.payload_length, BLOCK_SIZE_BYTES)):
            digest = item.digests[number * DIGEST_SIZE_BYTES : (number + 1) * DIGEST_SIZE_BYTES]
            yield Span(
                item.object_number,
                item.payload_offset + start,
                item.payload_offset + min(start + BLOCK_SIZE_BYTES, item.payload_length),
                Piece(key, row, number, digest),
            )


def _elements(index: ix.Index, key: str, row: int, block: int | None = None) -> str:
    """Return the elements that an item or one of its blocks holds, such as `w[0:20, 5:7]`.

    The text names the smallest box around these elements, in the coordinates of the whole tensor.
    It is the key alone if the item is no box of elements, such as a pickled value or a scalar.

    Args:
        row: the item's row in the index.
        block: the number of a block in the item. Default: all of the item.
    """
    tensor, item = index.tensors.get(key), index.item(row)
    itemsize = 0 if tensor is None else ix.ITEM_SIZE_BYTES.get(tensor.dtype, 0)
    if item.pickled or not itemsize:  # its bytes are not elements of a known size
        return key
    offsets, sizes = index.box(key, row - index.rows(key).start)
    if not sizes:  # a scalar: its box has no dimensions
        return key
    starts, ends = [0] * len(sizes), list(sizes)
    if block is not None:
        # The block holds the elements `first` to `last`, counted row-major in the chunk. Each turn
        # of the loop narrows the box in one dimension. As soon as the elements have more than one
        # index in a dimension, the dimensions after it stay whole. In a chunk of 5 x 4, elements 4
        # to 5 are the box [1:2, 0:2], and elements 6 to 9 need the box [1:3, 0:4].
        first = block * BLOCK_SIZE_BYTES // itemsize
        end_bytes = min((block + 1) * BLOCK_SIZE_BYTES, item.payload_length)
        last = end_bytes // itemsize - 1
        for dim in range(len(sizes)):
            per_index = math.prod(sizes[dim + 1 :])  # elements that have one index here in common
            starts[dim], ends[dim] = first // per_index, last // per_index + 1
            if ends[dim] - starts[dim] > 1:
                break
            first, last = first % per_index, last % per_index
    parts = (
        f"{offset + start}:{offset + end}"
        for offset, start, end in zip(offsets, starts, ends, strict=True)
    )
    return f"{key}[{', '.join(parts)}]"


def framing_pieces(
    index: ix.Index, payload: Sequence[Span[Piece]], object_numbers: Iterable[int]
) -> list[Span[Piece]]:
    """Return the bytes between the payloads of these objects, in pieces of at most a block."""
    payloads: dict[int, list[tuple[int, int]]] = {number: [] for number in object_numbers}
    for span in payload:
        if span.object_number in payloads:
            payloads[span.object_number].append((span.start, span.end))
    spans: list[Span[Piece]] = []
    for object_number, in_object in payloads.items():
        position = number = 0
        size_bytes = index.objects[object_number].size_bytes
        # An empty payload at the end of the object is added. So each piece lies before a payload,
        # also what follows the last one.
        for start, end in [*sorted(in_object), (size_bytes, size_bytes)]:
            while position < start:
                stop = min(start, position + BLOCK_SIZE_BYTES)
                spans.append(Span(object_number, position, stop, Piece("", -1, number, None)))
                position, number = stop, number + 1
            position = max(position, end)
    return spans
