"""Reads of items that only torch can decode: collect each whole, then finish it, in bounded memory.

The worker that delivers the last byte of a tensor also finishes it. A value is finished by the
calling thread, because DCP's planners are called from one thread only; `CompletionQueue` limits how
much waits for that thread.
"""

from __future__ import annotations

import io
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch

from dcp_objstore.compat.values import check_safe, not_built, refused_globals, unpickled
from dcp_objstore.compat.vet import vet
from dcp_objstore.distributed.plugin import typed
from dcp_objstore.errors import (
    CheckpointCorruptError,
    DcpObjstoreError,
    StateMismatchError,
    UntrustedPickleError,
)
from dcp_objstore.read.geometry import Box, fits, narrow
from dcp_objstore.state.memory import copy_elements, values_of
from dcp_objstore.threads import STEP_SECONDS, wait_in_steps
from dcp_objstore.torch_private import is_wrapper

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import ReadItem
    from typing_extensions import Buffer

    from dcp_objstore.read.items import ItemLocation
    from dcp_objstore.transfer.progress import Progress


# A destination of a read is a tensor that is filled in place, or a callable that takes a pickled
# value.
Destination: TypeAlias = torch.Tensor | Callable[[io.BytesIO], object]
# The type of `ItemRead.takes`.
Takes: TypeAlias = Callable[[str, torch.Tensor, tuple[int, ...]], bool]


class ItemRead:
    """A read of all bytes of an item, which torch then decodes.

    Its memory is allocated when the first block arrives. When the last block arrives, a tensor is
    copied into its destination at once, so that arrived bytes do not pile up. The read is then
    passed to `on_complete`, and the thread that takes it from there calls `finish`.

    Args:
        location: the place of the item. Its payload is a whole `torch.save` blob or pickled value.
        is_verified: whether the blocks that arrive were compared with their digests.

    Attributes:
        selection: None, because the read needs the whole payload.
        is_trusted: whether to unpickle a tensor that `torch.load(weights_only=True)` refuses.
        takes: a function that is called with the key, a stored tensor of a subclass and the sizes
            that are wanted of it, if the destination is plain. It returns whether it has taken the
            tensor itself, so that nothing is copied.
    """

    selection: None = None

    def __init__(
        self, item: ReadItem, location: ItemLocation, *, is_verified: bool = False
    ) -> None:
        self.item = item
        self.location = location
        # `run_load` sets these two; see the class.
        self.is_trusted = False
        self.takes: Takes | None = None
        self._is_verified = is_verified
        self._error: DcpObjstoreError | None = None  # of a tensor; `finish` raises it
        self._missing_bytes = location.payload_length  # those that have not arrived
        self._body: io.BytesIO | None = None  # the payload, from the first block until `take`
        self._lock = threading.Lock()

    @property
    def needed_bytes(self) -> int:
        """The number of payload bytes."""
        return self.location.payload_length

    def bind(self, destination: Destination, on_complete: Callable[[ItemRead], None]) -> None:
        """Set the destination, before any block arrives.

        Args:
            destination: the tensor to copy into; for a value, a callable that takes its bytes.
            on_complete: a function that is called once, in the thread that delivered the last byte;
                at once for an item without bytes.
        """
        self._destination = destination
        self._on_complete = on_complete
        if not self._missing_bytes:
            self._complete()

    def accept(self, position: int, block: Buffer) -> None:
        """Store the payload bytes at `position`; complete the read with the last of them."""
        arrived = np.frombuffer(block, dtype=np.uint8)
        with self._lock:
            if self._body is None:
                # BytesIO adopts these bytes without a copy. It lets us write to them, because
                # nothing else refers to them.
                self._body = io.BytesIO(bytes(self.location.payload_length))
            body = np.frombuffer(self._body.getbuffer(), dtype=np.uint8)
        body[position : position + arrived.nbytes] = arrived
        del body  # a BytesIO of which there is a view cannot be resized or closed
        with self._lock:
            self._missing_bytes -= arrived.nbytes
            if self._missing_bytes:
                return
        self._complete()

    def _complete(self) -> None:
        """Decode the body into a destination that is a tensor, and report the read as complete."""
        if isinstance(self._destination, torch.Tensor):
            try:
                self._load_tensor(self._destination)
            except Exception as error:  # noqa: BLE001 - `finish` raises it
                # If the worker raised the error here, it would fetch the last range again.
                self._error = typed(error, None, None).at(key=self.item.dest_index.fqn)
        on_complete = self._on_complete
        # It refers to the queue that holds this read, which would be a reference cycle.
        del self._on_complete
        on_complete(self)

    def finish(self, *, trust_pickle: bool) -> None:
        """Pass a value to its destination, or raise what went wrong with a tensor.

        Raises:
            UntrustedPickleError: the value needs `trust_pickle` or a declared safe global.
            DcpObjstoreError: the item cannot be decoded, or the planner does not take the value.
        """
        if self._error is not None:
            raise self._error
        if not isinstance(self._destination, torch.Tensor):
            key = self.item.dest_index.fqn
            body = self.location.undo_transforms(self.take(), key)
            check_safe(
                body.getvalue(), key, trust_pickle=trust_pickle, is_verified=self._is_verified
            )
            try:
                self._destination(body)
            except DcpObjstoreError as error:
                raise error.at(key=key) from None
            except Exception as error:  # of torch, or of the user's planner
                raise self._not_built(error, body) from error

    def _not_built(self, error: Exception, body: io.BytesIO) -> DcpObjstoreError:
        """Return the error for an item that torch or the planner could not make a value of."""
        key = self.item.dest_index.fqn
        return not_built(error, body.getvalue(), key, is_verified=self._is_verified)

    def held_bytes(self) -> int:
        """Return the bytes that the read still holds: a value's until `take`, none for a tensor."""
        return 0 if self._body is None else self.location.payload_length

    def take(self) -> io.BytesIO:
        """Return the whole item without a copy, and give up the memory."""
        body, self._body = self._body, None
        return io.BytesIO() if body is None else body

    def _load_tensor(self, destination: torch.Tensor) -> None:
        """Unpickle the item as a tensor and copy the requested part into `destination`.

        Raises:
            CheckpointCorruptError: the item is damaged, not a tensor, or has an unexpected shape.
            StateMismatchError: torch cannot copy the tensor into the destination, or it is
                quantized and the destination is not quantized in the same way.
            UntrustedPickleError: the tensor is of a class that torch does not load safely.
            DcpObjstoreError: the tensor cannot be built; `not_built` chooses the type.
        """
        key = self.item.dest_index.fqn
        body = self.location.undo_transforms(self.take(), key)
        try:
            if not self.is_trusted:
                with body.getbuffer() as view:
                    vet(view)
            tensor = unpickled(body, weights_only=not self.is_trusted)
        except Exception as error:
            refused = refused_globals(body.getvalue(), error)
            if refused is not None:
                raise UntrustedPickleError(
                    f"the stored tensor needs {refused}, which could run code when it is unpickled",
                    advice="if you know it to be harmless, declare it by"
                    " torch.serialization.add_safe_globals; or pass trust_pickle=True if you"
                    " trust the author of this checkpoint",
                    key=key,
                ) from error
            raise self._not_built(error, body) from error
        if not isinstance(tensor, torch.Tensor):
            raise CheckpointCorruptError(
                f"expected a tensor, but a {type(tensor).__name__} is stored", key=key
            )
        wanted = Box(tuple(self.item.storage_offsets), tuple(self.item.lengths))
        if not fits(wanted, tuple(tensor.shape)):
            raise CheckpointCorruptError(
                f"the stored tensor has shape {tuple(tensor.shape)}, expected one that contains"
                f" {wanted}",
                key=key,
            )
        # A copy into a plain destination would lose the class of a stored wrapper. `takes` may
        # keep the tensor itself instead.
        loses_class = is_wrapper(tensor) and not is_wrapper(destination)
        if loses_class and self.takes is not None and self.takes(key, tensor, wanted.sizes):
            return
        try:
            copy_elements(_part_for(destination, tensor, wanted), destination)
        except StateMismatchError as error:
            raise error.at(key=key) from None
        except torch.OutOfMemoryError:  # it does not mean that the tensors do not fit each other
            raise
        except Exception as error:
            raise StateMismatchError(
                f"the stored {tensor.dtype} tensor cannot be copied into the state's"
                f" {destination.dtype} tensor: {str(error).partition(chr(10))[0]}",
                key=key,
            ) from error


class CompletionQueue:
    """A queue of complete items that wait for the calling thread, bounded in bytes.

    DCP's planners take values from one thread only, while workers go on fetching. Workers wait for
    room before they accept another piece of a body. A worker that finds the queue full after a
    piece must wake the calling thread at once: only `drain` makes room, and the worker itself may
    be the next to wait for it.

    Args:
        limit_bytes: the size of the values that may wait. One piece per worker may complete further
            values above this limit.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._waiting: deque[ItemRead] = deque()
        self._waiting_bytes = 0
        self._changed = threading.Condition()

    def add(self, read: ItemRead) -> None:
        """Add an item that has all its bytes. Thread-safe."""
        with self._changed:
            self._waiting.append(read)
            self._waiting_bytes += read.held_bytes()

    @property
    def is_full(self) -> bool:
        """Whether the waiting items exceed the limit, so that workers wait for `drain`."""
        return self._waiting_bytes > self._limit_bytes

    def drain(self, finish: Callable[[ItemRead], None]) -> None:
        """Call `finish` with each waiting item, which counts as waiting until `finish` returns."""
        while self._waiting:
            read = self._waiting.popleft()
            held_bytes = read.held_bytes()
            finish(read)
            with self._changed:
                self._waiting_bytes -= held_bytes
                self._changed.notify_all()

    def wait_for_room(self, progress: Progress) -> None:
        """Block a worker until the queue is within its limit or the transfer is stopped."""
        with self._changed:
            if self.is_full:
                progress.check_stopped()  # raises, since nobody drains the queue after a stop
                has_room = partial(self._changed.wait_for, lambda: not self.is_full)
                wait_in_steps(has_room, check=progress.check_stopped, step_seconds=STEP_SECONDS)


def _part_for(destination: torch.Tensor, tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """Return what a box covers of a stored tensor, as a wrapper if both are and it can be cut."""
    if is_wrapper(destination):
        with suppress(Exception):  # a class may cut only rows, or only between blocks
            return narrow(tensor, box)
    return narrow(values_of(tensor), box)
