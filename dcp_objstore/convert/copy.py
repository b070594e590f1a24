"""`copy_checkpoint`: a checkpoint in another run, bucket or provider, byte for byte.

A copy is a save whose objects come from another checkpoint, so the rules of `checkpoint.commit`
hold for it. Its objects have new names, because the names of two writers must never be equal
(rule 3).

Where both are on one store that copies, the store copies each object by itself, if it still has the
ETag that the source's index gives (rule 12). Otherwise, and where that fails, the bytes stream
through here and are compared with the source's digests.

**What an interrupted copy has sent is not sent again.** The nonce in the names of a copy's objects
is the save's own, followed by digits of the SHA-256 of the source's index. That index has the
digests of every byte, and an object appears only after all its bytes were compared with them (the
first digits), or were copied from the object that they describe (the last digits, which a copy
that streams every object does not accept). So an object with these digits, its number and its size
is the one to copy, and the new copy names it in its index instead of sending it. This is
done only if there is no marker at the destination when the copy begins. Then no sweep has put its
fence since the object was written, and one that puts it later defeats this commit; so none removes
an object that this commit names. (`tests/model/copies.py` explores this, with two concurrent copies
and a source that changes during the copy.)
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial

import msgspec
import numpy as np
from typing_extensions import Buffer

from dcp_objstore.checkpoint import index as ix
from dcp_objstore.checkpoint.claim import RunClaim
from dcp_objstore.checkpoint.clock import Clock
from dcp_objstore.checkpoint.names import data_key, new_nonce, parse_data_key
from dcp_objstore.config import TransferConfig, at_most
from dcp_objstore.distributed.plugin import plugin_errors
from dcp_objstore.distributed.ranks import rank_and_world_size
from dcp_objstore.errors import (
    CheckpointCorruptError,
    CorruptDataError,
    DcpObjstoreError,
    ObjectNotFoundError,
    UnsupportedError,
    printable,
)
from dcp_objstore.inspect.slabs import ahead
from dcp_objstore.inspect.verify import Piece, framing_pieces, payload_blocks
from dcp_objstore.observe.dispatch import EventSettings
from dcp_objstore.observe.events import OnEvent, Planned
from dcp_objstore.observe.report import SaveReport, logger, size_text
from dcp_objstore.read.stored_checkpoint import StoredCheckpoint, open_stored_checkpoint
from dcp_objstore.state.stored import StoredObject
from dcp_objstore.stores import StoreSpec
from dcp_objstore.stores.protocol import CopySource, Version
from dcp_objstore.stores.spec import options_of_other
from dcp_objstore.transfer.copies import copy_objects
from dcp_objstore.transfer.digests import BlockDigest, block_digest
from dcp_objstore.transfer.download import fetch_ranges
from dcp_objstore.transfer.memory import ByteArray
from dcp_objstore.transfer.parts import part_count, plan_parts
from dcp_objstore.transfer.progress import Progress
from dcp_objstore.transfer.ranges import RangeRequest, Span, plan_requests
from dcp_objstore.transfer.upload import Content, run_watched, upload_object
from dcp_objstore.transfer.workers import DaemonPool
from dcp_objstore.write.session import Save

_MOST_CONCURRENT_OBJECTS = 4
_FINGERPRINT_DIGITS = 40  # a name has room for 64, and the nonce takes 24


@dataclass(frozen=True, kw_only=True)
class CopyReport:
    """A finished copy.

    Attributes:
        source: URL of the checkpoint that was copied.
        url: URL of the copy.
        commit_id: id of the copy's commit.
        objects: number of data objects.
        total_bytes: their size.
        sent_bytes: bytes of data objects that this copy wrote. The others were there, from an
            earlier copy that was interrupted.
        copied_bytes: how many of these the store copied by itself.
        seconds: how long it took.
    """

    source: str
    url: str
    commit_id: str
    objects: int
    total_bytes: int
    sent_bytes: int
    copied_bytes: int
    seconds: float

    def __str__(self) -> str:
        """Return what was copied and how, on a few lines."""
        size = size_text(self.total_bytes)
        text = f"copied {size} in {self.seconds:.1f} s to {self.url}\ncommit {self.commit_id}"
        if self.sent_bytes < self.total_bytes:
            text += f"\nsent {size_text(self.sent_bytes)}; an interrupted copy had sent the rest"
        if self.copied_bytes:
            copied = size_text(self.copied_bytes)
            text += f"\nthe store copied {copied} by itself, without a check here"
        return printable(text, keep="\n")


def copy_checkpoint(
    source: str,
    url: str,
    *,
    overwrite: bool = False,
    claim: RunClaim | None = None,
    storage_options: Mapping[str, object] | None = None,
    source_storage_options: Mapping[str, object] | None = None,
    config: TransferConfig | None = None,
    progress: bool = True,
    on_event: OnEvent | None = None,
    trace: str | os.PathLike[str] | None = None,
    allow_unfenced: bool = False,
    streamed: bool = False,
) -> CopyReport:
    """Copy a checkpoint between runs, buckets and providers, byte for byte.

        dos.copy_checkpoint("s3://bucket/run/step-1000", "gs://bucket/kept/step-1000")

    If both URLs are on one store that can copy (`s3://`, `gs://`, `az://`, `file://`) and have the
    same options, it copies the objects by itself, each on the condition that it has the ETag which
    the save got for it; its bytes are not read. Otherwise the data streams through some 400 MiB of
    this process's memory, however large it is, and each byte is compared with the source's digests
    on the way; so are objects that the store does not copy. The copy is committed as `save` does
    it: when this returns, the whole checkpoint exists. It has its own commit; the source's
    `user_metadata` and `world_size` are kept, its pins are not.

    If a copy is interrupted, call it again: objects that have arrived are not sent again, unless a
    sweep has removed them, or something is or was committed at `url`. With `streamed`, objects that
    the store had copied are sent again.

    Args:
        source: URL of the checkpoint to copy, which this library wrote.
        url: URL of the checkpoint to write.
        overwrite: replace a committed checkpoint at this URL. Default False: refuse.
        claim: the claim that `claim_run` returned for the run that `url` lies in. Default: none.
        storage_options: credentials and endpoint of `url`, in fsspec's spelling. Default: taken
            from the environment.
        source_storage_options: the same for the source. Default: `storage_options` if the source is
            of the same scheme.
        config: sizes, concurrency, time-outs and the memory budget, for both sides.
        progress: show a progress bar if standard error is a terminal. Default True.
        on_event: callable that receives each event of the save, in another thread.
        trace: name of a local file to write a trace of the save to.
        allow_unfenced: save even to a store without conditional writes. Default False: refuse.
        streamed: compare every byte: never have the store copy by itself. Default False.

    Returns:
        What was copied.

    Raises:
        CheckpointNotFoundError: there is no checkpoint at the source.
        UnsupportedError: another library wrote the source; `import_checkpoint` takes it.
        CheckpointCorruptError: the source is damaged; the error names the tensor. Nothing was
            committed. Objects that the store copies are not read: `verify` the copy.
        CheckpointGoneError: the source was deleted or replaced, and its objects removed.
        CheckpointExistsError: a checkpoint is committed at `url` and `overwrite` is False, or it is
            pinned.
        DcpObjstoreError: any other error of `save`, or of reading the source.
    """
    source_options = options_of_other(source_storage_options, url, storage_options, source)
    spec = StoreSpec(source, source_options, config)
    stored = open_stored_checkpoint(spec)
    marker = stored.marker
    if marker is None:
        raise UnsupportedError(
            "another library wrote this checkpoint, without digests to compare a copy with",
            advice="dcp_objstore.import_checkpoint (dcp-objstore import) adds them",
            url=spec.url,
        )
    target = StoreSpec(url, storage_options, config)
    channel = EventSettings(on_event, trace).channel("save", target.url, *rank_and_world_size())
    channel.show(bar=progress, summary=True)
    # As rank 0, the coordinator: this process saves alone, and commits.
    save = Save(target, 0, True, channel, world_size=marker.world_size)
    reports: list[SaveReport] = []
    copy = _Copy(spec, stored, on_store=not streamed and _on_one_store(spec, target))
    clock = Clock.of_job(target.config.stall_timeout_seconds)
    try:
        with channel.watching(), plugin_errors(None, target.url):
            save.start(overwrite=overwrite, claim=claim, allow_unfenced=allow_unfenced, clock=clock)
            copied = copy.upload(save)
            save.commit_index(
                *copied,
                user_metadata=marker.user_metadata,
                claim=claim,
                clock=clock,
                on_committed=reports.append,
            )
    except BaseException as error:
        save.abandon(error)
        raise
    report = reports[-1]
    assert report.commit_id is not None
    return CopyReport(
        source=spec.url,
        url=report.url,
        commit_id=report.commit_id,
        objects=report.objects,
        total_bytes=report.total_bytes,
        sent_bytes=copy.sent_bytes,
        copied_bytes=report.copied_bytes,
        seconds=report.seconds,
    )


def _on_one_store(source: StoreSpec, target: StoreSpec) -> bool:
    """Return whether the store may be asked to copy: the same credentials hold on both sides."""
    access = source.parsed.scheme, source.storage_options
    target_access = target.parsed.scheme, target.storage_options
    return access == target_access and target.open().capabilities.copies


class _Copy:
    """Copies the data objects of a checkpoint into a save, several at a time.

    Args:
        spec: the store of the source.
        stored: the opened source.
        on_store: whether the store copies what it can.

    Attributes:
        sent_bytes: bytes of the objects that no earlier copy had sent; `upload` sets it.
    """

    def __init__(self, spec: StoreSpec, stored: StoredCheckpoint, *, on_store: bool) -> None:
        assert stored.index is not None
        assert stored.marker is not None
        assert stored.marker.index is not None
        self._on_store = on_store
        self._source = spec.open()
        self._config = spec.config
        self._stored = stored
        self._index = stored.index
        digits = stored.marker.index.sha256
        self._streamed_fingerprint = digits[:_FINGERPRINT_DIGITS]
        self._on_store_fingerprint = digits[-_FINGERPRINT_DIGITS:]
        self.sent_bytes = 0

    def upload(self, save: Save) -> tuple[ix.Index, list[StoredObject]]:
        """Upload what is not there yet; return the index of the copy, and its objects.

        Each object is there already from an earlier copy, or the store copies it, or it is streamed
        through this process.
        """
        channel, objects, config = save.channel, self._index.objects, self._config
        arrived = self._of_earlier_copies(save)
        unsent = [number for number in range(len(objects)) if number not in arrived]
        self.sent_bytes = sum(objects[number].size_bytes for number in unsent)
        channel.emit(
            Planned,
            channel.began_at,
            operation="save",
            items=len(self._index.columns.offset),
            size_bytes=self.sent_bytes,
            objects=len(unsent),
            requests=sum(
                part_count(objects[number].size_bytes, config.part_size_bytes) for number in unsent
            ),
        )
        if self._on_store:
            arrived |= self._copy_on_store(save, unsent)
            unsent = [number for number in unsent if number not in arrived]
        progress = Progress(config.stall_timeout_seconds, channel)
        if unsent:
            arrived |= run_watched(
                lambda: self._send_all(save, unsent, progress),
                f"copy of {self._source.url}",
                progress,
            )
        in_order = [arrived[number] for number in range(len(objects))]
        storage = ix.StorageInfo(save.spec.url, save.nonce, self._index.storage.modules)
        entries = tuple(stored_object.entry for stored_object in in_order)
        return replace(self._index, objects=entries, storage=storage), in_order

    def _of_earlier_copies(self, save: Save) -> dict[int, StoredObject]:
        """Return the objects that interrupted copies have sent, by number.

        Takes at most one listing.
        """
        assert save.token is not None
        store = save.open()
        had_marker = save.token.version is not None
        # As the module says: if there was a marker, or the store has no conditional writes, a sweep
        # may remove these objects before the commit. If the store shows an object while it is still
        # written, an object that is listed may not be whole.
        if had_marker or not save.fenced or not store.capabilities.atomic_put:
            return {}
        fingerprints = {self._streamed_fingerprint}
        if self._on_store:
            fingerprints.add(self._on_store_fingerprint)
        objects = self._index.objects
        present: dict[int, StoredObject] = {}
        for meta in store.list():
            name = parse_data_key(meta.key)
            if name is None or name.nonce[len(save.nonce) :] not in fingerprints:
                continue  # the fingerprint stands behind the nonce of a save
            # The ETag in an index is what the store reported after the upload, which is not known
            # here; and this copy has sent no parts of the object.
            if name.number < len(objects) and meta.size_bytes == objects[name.number].size_bytes:
                entry = msgspec.structs.replace(objects[name.number], key=meta.key, e_tag=None)
                present[name.number] = StoredObject(entry, parts=0, url=save.spec.url)
        return present

    def _copy_on_store(self, save: Save, numbers: Sequence[int]) -> dict[int, StoredObject]:
        """Have the store copy objects; return those that it has copied, by number.

        Objects without an ETag in the index are left out: nothing would show that they changed.
        """
        objects = self._index.objects
        # These keys are used only here. A copy that seems to have failed may have arrived all the
        # same, and no key is written twice, so the streamed object gets another one.
        nonce = new_nonce() + self._on_store_fingerprint
        number_of = {
            data_key(0, number, nonce): number for number in numbers if objects[number].e_tag
        }
        outcomes = copy_objects(
            save.open(),
            {
                key: [_source(self._source.url, objects[number])]
                for key, number in number_of.items()
            },
            self._config,
            Progress(self._config.stall_timeout_seconds, save.channel),
        )
        copied: dict[int, StoredObject] = {}
        for key, outcome in outcomes.items():
            if isinstance(outcome, DcpObjstoreError):
                logger.info("%s is streamed, because the store did not copy it: %s", key, outcome)
                continue
            number = number_of[key]
            entry = msgspec.structs.replace(objects[number], key=key, e_tag=outcome.version.e_tag)
            copied[number] = StoredObject(entry, outcome.parts, save.spec.url, copied=True)
        return copied

    def _send_all(
        self, save: Save, numbers: Sequence[int], progress: Progress
    ) -> dict[int, StoredObject]:
        """Read objects and upload them, several at a time; return what was sent, by number."""
        spans: dict[int, list[Span[Piece]]] = {number: [] for number in numbers}
        blocks = list(payload_blocks(self._index))
        for span in (*blocks, *framing_pieces(self._index, blocks, numbers)):
            if span.object_number in spans:
                spans[span.object_number].append(span)
        config = self._config
        limits = at_most(config.upload_concurrency), at_most(config.download_concurrency)
        # All threads together keep to the limits of the configuration.
        threads = min(_MOST_CONCURRENT_OBJECTS, len(numbers), *limits)
        # With "auto", `_send` limits the parts of each thread by their memory.
        if config.upload_concurrency != "auto":
            config = replace(config, upload_concurrency=config.upload_concurrency // threads)

        def send(number: int) -> StoredObject:
            try:
                return self._send(
                    save,
                    number,
                    spans.pop(number),
                    config=config,
                    threads=threads,
                    progress=progress,
                )
            except BaseException as error:
                progress.stop(error)  # the other threads stop, too
                raise

        with DaemonPool(threads, "copy") as pool:
            futures = {number: pool.submit(send, number) for number in numbers}
            wait(futures.values())
        return {number: future.result() for number, future in futures.items()}

    def _send(
        self,
        save: Save,
        number: int,
        spans: list[Span[Piece]],
        *,
        config: TransferConfig,
        threads: int,
        progress: Progress,
    ) -> StoredObject:
        """Stream one object, within a thread's share of the limits; return what was written.

        Half of the thread's memory is for what is read, and half for what is uploaded.

        Args:
            save: the save that the object becomes part of.
            number: its number.
            spans: its blocks and the bytes around them, front to back, without a gap.
            config: the sizes, and this thread's share of the upload's concurrency.
            threads: the number of threads that send objects.
            progress: the object that receives the bytes, and stops the copy.
        """
        entry = self._index.objects[number]
        half_bytes = config.memory_budget_bytes // (2 * threads)
        windows = plan_requests(spans, request_size_bytes=config.request_size_bytes, gap_bytes=0)
        most_reads = at_most(config.download_concurrency) // threads
        reads = max(1, min(half_bytes // config.request_size_bytes, most_reads))
        plan = plan_parts(entry.size_bytes, config.part_size_bytes, is_near=False)
        key = data_key(0, number, save.nonce + self._streamed_fingerprint)
        uploaded = upload_object(
            save.open(),
            key,
            Content(partial(self._buffers, entry, windows, reads, progress)),
            plan,
            config=config,
            progress=progress,
            most=max(1, half_bytes // plan.part_size_bytes),
            is_own=True,
        )
        own_entry = msgspec.structs.replace(entry, key=key, e_tag=uploaded.version.e_tag)
        return StoredObject(own_entry, uploaded.parts, save.spec.url)

    def _buffers(
        self,
        entry: ix.ObjectEntry,
        windows: Sequence[RangeRequest[Piece]],
        reads: int,
        progress: Progress,
    ) -> Iterator[ByteArray]:
        """Yield the bytes of an object front to back. `_read` has compared its blocks.

        Args:
            entry: the object in the source's index.
            windows: the requests, front to back, without a gap.
            reads: the number of windows that are read ahead.
            progress: the object that stops the copy.

        Raises:
            CheckpointCorruptError: the bytes between its blocks are damaged. Raised before the
                iterator ends, so that the upload never completes.
        """
        framing = BlockDigest()
        read = partial(self._read, progress)
        with closing(ahead(windows, read, reads, progress.check_stopped)) as arriving:
            for window in windows:
                memory = next(arriving)
                for span in window.spans:
                    if span.tag.digest is None:  # bytes between blocks
                        framing.update(memory[span.start - window.start : span.end - window.start])
                yield memory
                del memory  # it is freed before the next window arrives
        if framing.digest() != entry.framing_digest:
            raise CheckpointCorruptError(
                "the bytes around its tensors differ from what was saved; nothing was committed",
                object_key=entry.key,
                url=self._source.url,
            )

    def _read(self, progress: Progress, window: RangeRequest[Piece]) -> ByteArray:
        """Read a stretch of an object into new memory, and compare its blocks. Called in threads.

        Raises:
            CheckpointCorruptError: a block differs from what was saved.
        """
        memory = np.empty(window.end - window.start, dtype=np.uint8)

        def compare(request: RangeRequest[Piece], body: Buffer) -> None:
            view = memoryview(body)
            for span in request.spans:
                block = view[span.start - request.start : span.end - request.start]
                if span.tag.digest is not None and block_digest(block) != span.tag.digest:
                    raise CheckpointCorruptError(
                        f"block {span.tag.number} differs from what was saved; nothing was"
                        " committed",
                        key=span.tag.key,
                        url=self._source.url,
                    )
            progress.alive()  # the upload waits for these bytes, so it has not stalled

        with closing(
            fetch_ranges(
                self._source,
                self._stored.object_keys,
                [window],
                compare,
                config=self._config,
                # Not the copy's own object, which counts the bytes that are uploaded.
                progress=Progress(self._config.stall_timeout_seconds),
                admit=lambda *_: memoryview(memory),
                explain=self._explain,
            )
        ) as arriving:
            for _ in arriving:
                pass  # `compare` has the body
        return memory

    def _explain(self, window: RangeRequest[Piece], error: DcpObjstoreError) -> DcpObjstoreError:
        """Say what the error of a GET means for the checkpoint."""
        if isinstance(error, ObjectNotFoundError):
            return self._stored.explain(self._source, error)
        if isinstance(error, CorruptDataError):  # the object is too short, or the answer was wrong
            key = next((span.tag.key for span in window.spans if span.tag.key), None)
            return CheckpointCorruptError(error.message, key=key, url=self._source.url)
        return error


def _source(url: str, entry: ix.ObjectEntry) -> CopySource:
    """Return the whole object of an entry, in the state that its ETag names."""
    return CopySource(f"{url}/{entry.key}", 0, entry.size_bytes, Version(entry.e_tag))
