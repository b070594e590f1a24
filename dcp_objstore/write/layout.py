"""Lay one rank's items out in objects: a stream of buffers, and the place of each item.

Items follow one another, each framed as stock torch readers expect it (`state.tensor_frame`). Large
payloads are passed on as views of the tensors' own memory and hashed in worker threads at the same
time. Small payloads are gathered, so that thousands of tiny tensors do not become thousands of tiny
buffers.
"""

from __future__ import annotations

import functools
import io
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np
import torch
import xxhash
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from dcp_objstore.config import MIB
from dcp_objstore.distributed.plugin import by_cause
from dcp_objstore.errors import DcpObjstoreError, UnsupportedError
from dcp_objstore.state import tensor_frame
from dcp_objstore.state.memory import lend
from dcp_objstore.state.stored import StoredItem, StoredObject, constant_name
from dcp_objstore.transfer.digests import small_digest
from dcp_objstore.transfer.parts import PartPlan, check_item_size

if TYPE_CHECKING:
    from dcp_objstore.state.device import Outbound
    from dcp_objstore.transfer.memory import ByteArray

# A payload up to this size is copied into the gathering buffer: that costs less than a separate
# buffer, for which the transport and the hashers must get the GIL half a dozen times. In a program
# that is busy in Python each of these takes up to 5 ms, and slows the program down.
SMALL_BYTES = MIB
# The same limit for device memory, where each small payload is a separate copy.
_SMALL_DEVICE_BYTES = 64 * 1024
# The gathering buffer is passed on at this size.
_GATHERED_BYTES = 8 * MIB

# One word in this many bytes of a large tensor's memory is compared again after its upload. That
# takes 1.5 ms of processor time per GiB, and finds every change of at least this many contiguous
# bytes.
_WATCHED_EVERY_BYTES = 64 * 1024
_WORD = np.dtype(np.uint64)


class SizedItem(NamedTuple):
    """An item to write and its `item_bytes`."""

    item: WriteItem
    size_bytes: int


class ChangedSlice(NamedTuple):
    """A slice of a tensor that changed between its digest and the end of its upload.

    Attributes:
        digests: digests of the slice's blocks, as the index will have them.
    """

    key: str
    offset: int
    size_bytes: int
    digests: Future[bytes]


# The cyclic garbage collector does not track these objects, which form no cycles. With tens of
# thousands of tensors its passes over the whole program would cost more than the tensors.
class Placed(msgspec.Struct, gc=False):
    """The place of one item; offsets are within its object."""

    item: WriteItem
    offset: int
    length: int
    payload_offset: int
    payload_length: int
    digests: bytes | list[Future[bytes]]
    pickled: bool
    dtype: str | None

    def result(self, stored: StoredObject) -> WriteResult:
        """Return the result of the item in this object; wait for its digests."""
        digests = self.digests
        if not isinstance(digests, bytes):
            digests = b"".join(future.result() for future in digests)
        place = StoredItem(
            object=stored,
            offset=self.offset,
            length=self.length,
            payload_offset=self.payload_offset,
            payload_length=self.payload_length,
            digests=digests,
            pickled=self.pickled,
            converted_to=None if self.dtype == planned_dtype(self.item) else self.dtype,
        )
        return WriteResult(self.item.index, self.length, place)


def planned_dtype(item: WriteItem) -> str | None:
    """Return the name of the dtype that an item was planned with; None for a pickled value."""
    return None if item.tensor_data is None else constant_name(_dtype_of(item))


def _dtype_of(item: WriteItem) -> torch.dtype:
    assert item.tensor_data is not None
    return item.tensor_data.properties.dtype


def item_bytes(item: WriteItem, dtype: torch.dtype | None = None) -> int:
    """Return the payload size of an item; 0 for a pickled value, whose size is not known yet.

    Args:
        dtype: the dtype that a planner converted the tensor to. Default: the dtype of the item.
    """
    if item.tensor_data is None:
        return 0
    return (
        item.tensor_data.chunk.sizes.numel() * (dtype or item.tensor_data.properties.dtype).itemsize
    )


def check_item(item: WriteItem) -> None:
    """Refuse an item that cannot be saved, before anything is sent.

    Raises:
        UnsupportedError: the key is not UTF-8 (the rank would fail while DCP gathers its results,
            where the others wait for it), DCP cannot place the layout, the dtype cannot be loaded
            again, or the chunk is larger than an object may be.
    """
    key, data = item.index.fqn, item.tensor_data
    try:
        if not isinstance(key, str) or not (key.isascii() or _is_text(key)):
            raise UnsupportedError(
                f"the key {key!r} cannot be stored: use a str of characters that UTF-8 has (a name"
                " of a file may hold others)"
            )
        if data is not None:
            _check_kind(data.properties.layout, data.properties.dtype)
            check_item_size(item_bytes(item))
    except UnsupportedError as error:
        raise error.at(key=key) from None


def _is_text(key: str) -> bool:
    """Return whether UTF-8 has all characters of a key that is not ASCII."""
    try:
        return bool(key.encode())
    except UnicodeEncodeError:
        return False


@functools.cache
def _check_kind(layout: torch.layout, dtype: torch.dtype) -> None:
    """Raise UnsupportedError for a layout or dtype that cannot be saved; once for each pair."""
    tensor_frame.check_layout(layout)
    tensor_frame.check_dtype(dtype)


class _Sliced(NamedTuple):
    """An item whose payload is passed on in slices, and the framing after it."""

    placed: Placed
    slices: Iterable[ByteArray]
    trailer: bytes = b""


@dataclass(slots=True, kw_only=True)
class Layout:
    """The layout of the items in one object.

    Args:
        pending: items that this rank still has to write, in order. The object takes items from the
            left, and leaves what would exceed `plan.max_object_size_bytes` to the next object. A
            larger item gets its own object.
        resolve: a function that returns the data of an item, as DCP's planners do.
        plan: the sizes of parts and slices.
        hash_slice: a function that begins to compute the digests of a slice's blocks.
        on_value: a function that receives each pickled value's key and bytes, and those of the
            first tensor of each class that is pickled.
        outbound: the path for slices out of a GPU's memory.
        known_digests: digests that staging has computed, by the address and size of the memory.

    Attributes:
        placed: the place of each item so far.
        changed: the slices that were found to change during their upload.
        is_over: whether the upload has ended, after which the tensors' memory is not read.
    """

    pending: deque[SizedItem]
    resolve: Callable[[WriteItem], torch.Tensor | io.BytesIO]
    plan: PartPlan
    hash_slice: Callable[[ByteArray], Future[bytes]]
    on_value: Callable[[str, bytes], None]
    outbound: Outbound
    known_digests: Mapping[tuple[int, int], bytes]
    placed: list[Placed] = field(default_factory=list)
    changed: list[ChangedSlice] = field(default_factory=list)
    is_over: bool = False
    # What this object has of `pending`. A second call of `buffers` puts it back.
    _taken: list[SizedItem] = field(default_factory=list)
    # The number of bytes so far, and the digest of those that are framing.
    _position: int = field(init=False)
    _framing: xxhash.xxh3_128 = field(default_factory=xxhash.xxh3_128)
    # Framing and small payloads that were not yielded yet.
    _gathered: bytearray = field(default_factory=bytearray)
    # The settings of `torch.save` that frames depend on.
    _options: tuple[object, ...] = field(default_factory=tensor_frame.save_options)
    # Classes of tensors that `on_value` need not see: plain ones, and those that it has seen.
    _seen_types: set[type] = field(default_factory=lambda: set(tensor_frame.PLAIN_TYPES))

    @property
    def framing_digest(self) -> bytes:
        """XXH3-128 digest of all framing and padding written so far."""
        return self._framing.digest()

    def buffers(self) -> Iterator[ByteArray]:
        """Yield the object's bytes; resolve items one at a time, as the transport asks for more.

        Each call makes the object anew, for another try of the upload. It begins with the items
        that the call before has taken from `pending`.

        Raises:
            DcpObjstoreError: an item cannot be saved; the error names its key.
            UnsupportedError, RankFailedError: the planner, the class of a value or torch raised
                another error.
        """
        self.pending.extendleft(reversed(self._taken))
        self._taken, self.placed, self.changed = [], [], []
        self._position, self._framing, self._gathered = 0, xxhash.xxh3_128(), bytearray()
        # So much that with one more small tensor and its framing it is no larger than a slice.
        enough_bytes = min(_GATHERED_BYTES, self.plan.slice_size_bytes - 2 * SMALL_BYTES)
        while self.pending:
            item, size_bytes = self.pending[0]
            if not self._fits(size_bytes):
                break
            self._taken.append(self.pending.popleft())
            try:
                data = self._resolved(item)
                # A planner has converted the tensor, whose size may be another one now.
                if isinstance(data, torch.Tensor) and data.dtype != _dtype_of(item):
                    size_bytes = item_bytes(item, data.dtype)
                    if not self._fits(size_bytes):  # the next object takes it
                        self._taken.pop()
                        self.pending.appendleft(SizedItem(item, size_bytes))
                        break
                sliced = self._begin(item, data)
                # `data` and, below, `sliced` are deleted, so that their memory is free before the
                # planner makes the next item's data.
                del data
                if sliced is not None:
                    if self._gathered:
                        yield self._take_gathered()
                    yield from map(partial(self._hash_and_watch, sliced), sliced.slices)
                    self._add_framing(sliced.trailer)
                    self.placed.append(sliced.placed)
                elif len(self._gathered) >= enough_bytes:
                    yield self._take_gathered()
                del sliced
            except DcpObjstoreError as error:
                raise error.at(key=item.index.fqn) from None
            except Exception as error:
                key = item.index.fqn
                raise by_cause(error, "this value cannot be read or pickled", key) from error
        if self._gathered:
            yield self._take_gathered()

    def _fits(self, size_bytes: int) -> bool:
        """Return whether an item of this size goes into this object. The first one always does."""
        end = self._position + size_bytes
        return not self._position or end <= self.plan.max_object_size_bytes

    def _resolved(self, item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Return an item's data, and check what the planner makes of it."""
        data = self.resolve(item)
        if item.type == WriteItemType.BYTE_IO:
            if not isinstance(data, io.BytesIO):
                raise UnsupportedError(
                    f"the planner resolved a BYTE_IO item to {type(data).__name__}"
                )
            return data
        if not isinstance(data, torch.Tensor):
            raise UnsupportedError(f"the planner resolved a tensor item to {type(data).__name__}")
        assert item.tensor_data is not None  # only BYTE_IO items have none
        if data.shape != item.tensor_data.chunk.sizes:
            raise UnsupportedError(
                f"the save planner gave a tensor of shape {tuple(data.shape)} for a part of shape"
                f" {tuple(item.tensor_data.chunk.sizes)}, and may only change dtypes"
            )
        return data

    def _begin(self, item: WriteItem, data: torch.Tensor | io.BytesIO) -> _Sliced | None:
        """Begin an item; return None if it was small and was gathered as a whole."""
        if isinstance(data, io.BytesIO):
            self.on_value(item.index.fqn, data.getvalue())
            return self._begin_whole(item, np.frombuffer(data.getbuffer(), np.uint8), None)
        payload = tensor_frame.raw_payload(data)
        if payload is None:  # a quantized tensor or a tensor subclass, which is pickled as a whole
            tensor_frame.check_dtype(data.dtype)
            blob = tensor_frame.pickled_blob(data)
            if type(data) not in self._seen_types:
                self._seen_types.add(type(data))
                self.on_value(item.index.fqn, blob.tobytes())
            return self._begin_whole(item, blob, data.dtype)
        size_bytes = payload.nbytes
        if size_bytes > (SMALL_BYTES if payload.is_cpu else _SMALL_DEVICE_BYTES):
            return self._begin_tensor(item, payload)
        self._gather(item, payload.cpu(), size_bytes)
        return None

    def _gather(self, item: WriteItem, payload: torch.Tensor, size_bytes: int) -> None:
        """Gather a small tensor and the framing around it."""
        frame = tensor_frame.frame(payload.dtype, tuple(payload.shape), self._options)
        body = tensor_frame.small_payload(payload, size_bytes)
        # `_add_framing` is inlined, because this runs once per tensor, and there may be tens of
        # thousands of them.
        padding = tensor_frame.padding_before(self._position, header_bytes=len(frame.header))
        lead = bytes(padding) + frame.header
        self._framing.update(lead)
        self._framing.update(frame.trailer)
        self._gathered += lead
        self._gathered += memoryview(body)
        # The digest of the bytes that are sent, not of the tensor. If the tensor is changed during
        # the save, the checkpoint has the values of the moment, and still loads.
        with memoryview(self._gathered) as all_, all_[len(all_) - size_bytes :] as gathered:
            digest = small_digest(gathered)
        self._gathered += frame.trailer
        offset = self._position + padding
        payload_offset = self._position + len(lead)
        self._position = payload_offset + size_bytes + len(frame.trailer)
        length = self._position - offset
        self.placed.append(
            Placed(
                item,
                offset=offset,
                length=length,
                payload_offset=payload_offset,
                payload_length=size_bytes,
                digests=digest,
                pickled=False,
                dtype=constant_name(payload.dtype),
            )
        )

    def _begin_tensor(self, item: WriteItem, payload: torch.Tensor) -> _Sliced:
        """Begin a large tensor: frame its memory, or slices that are copied from its device."""
        frame = tensor_frame.frame(payload.dtype, tuple(payload.shape), self._options)
        padding = tensor_frame.padding_before(self._position, header_bytes=len(frame.header))
        self._add_framing(bytes(padding) + frame.header)
        size_bytes = self.plan.slice_size_bytes
        return _Sliced(
            Placed(
                item,
                offset=self._position - len(frame.header),
                length=len(frame.header) + payload.nbytes + len(frame.trailer),
                payload_offset=self._position,
                payload_length=payload.nbytes,
                digests=self.known_digests.get((payload.data_ptr(), payload.nbytes), []),
                pickled=False,
                dtype=constant_name(payload.dtype),
            ),
            self.outbound.slices(payload) or tensor_frame.payload_slices(payload, size_bytes),
            trailer=frame.trailer,
        )

    def _begin_whole(self, item: WriteItem, body: ByteArray, dtype: torch.dtype | None) -> _Sliced:
        """Begin an item that is all payload: a pickled value, or a tensor pickled as a whole.

        Args:
            body: the pickled bytes.
            dtype: the dtype of the tensor; None for a value.
        """
        self._add_framing(bytes(tensor_frame.padding_before(self._position, 0)))
        size_bytes = self.plan.slice_size_bytes
        return _Sliced(
            Placed(
                item,
                offset=self._position,
                length=body.nbytes,
                payload_offset=self._position,
                payload_length=body.nbytes,
                digests=[],
                pickled=dtype is not None,  # said of tensors only: values are always pickled
                dtype=None if dtype is None else constant_name(dtype),
            ),
            [body[at : at + size_bytes] for at in range(0, body.nbytes, size_bytes)],
        )

    def _hash_and_watch(self, sliced: _Sliced, piece: ByteArray) -> ByteArray:
        """Begin to hash a slice, and watch whether it changes during its upload."""
        offset = self._position
        self._position += piece.nbytes
        digests = sliced.placed.digests
        if isinstance(digests, bytes):  # computed for a staged copy, which nobody else can change
            return piece
        words = _watched_words(piece)
        digests.append(self.hash_slice(piece))
        change = ChangedSlice(sliced.placed.item.index.fqn, offset, piece.nbytes, digests[-1])

        def compare() -> None:  # called in any thread, where the last array of the slice dies
            if not self.is_over and (_watched_words(piece) != words).any():
                self.changed.append(change)

        return lend(piece, compare)  # the transport releases it when it has sent it

    def _add_framing(self, framing: bytes) -> None:
        """Add padding, a header or a trailer to the object."""
        self._framing.update(framing)
        self._gathered += framing
        self._position += len(framing)

    def _take_gathered(self) -> ByteArray:
        """Return what was gathered, and begin to gather anew."""
        taken, self._gathered = self._gathered, bytearray()
        return np.frombuffer(taken, dtype=np.uint8)


def _watched_words(piece: ByteArray) -> ByteArray:
    """Copy words that are spread evenly over the piece."""
    words = piece[: piece.nbytes // _WORD.itemsize * _WORD.itemsize].view(_WORD)
    return words[:: _WATCHED_EVERY_BYTES // _WORD.itemsize].copy().view(np.uint8)
