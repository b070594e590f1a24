"""Items that only torch can take apart: gathered whole, then finished, in bounded memory.

A tensor is finished by the worker that brings its last byte. A value is left to the calling
thread, as DCP's planners are called from one thread only; `CompletionQueue` bounds what waits for
that.
"""

from __future__ import annotations

import io
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from dcp_objstore.compat.values import refused_globals
from dcp_objstore.compat.vetting import vet
from dcp_objstore.errors import (
    CheckpointCorruptError,
    DcpObjstoreError,
    StateMismatchError,
    UntrustedPickleError,
)
from dcp_objstore.state.geometry import Box
from dcp_objstore.state.memory import copy_elements, fits, narrow
from dcp_objstore.waiting import STEP_SECONDS, wait_in_steps

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import ReadItem
    from typing_extensions import Buffer

    from dcp_objstore.read.stored_checkpoint import Stored
    from dcp_objstore.transfer.progress import Progress


class ItemRead:
    """All bytes of an item, for torch to take apart.

    Its memory is allocated when the first block arrives. With the last one a tensor is copied into
    its destination, there and then, so that what has arrived does not pile up; `error` keeps what
    went wrong with it. Then the read is handed to `on_complete`, and `take` gives a value away.

    Args:
        item, stored: as for `TensorRead`; a whole `torch.save` blob.
    """

    def __init__(self, item: ReadItem, stored: Stored) -> None:
        self.item = item
        self.stored = stored
        self.error: DcpObjstoreError | None = None
        self._missing_bytes = stored.payload_length
        self._body: io.BytesIO | None = None
        self._lock = threading.Lock()

    @property
    def selection(self) -> None:
        """See `Read`."""
        return

    def bind(
        self, destination: torch.Tensor | None, on_complete: Callable[[ItemRead], None]
    ) -> None:
        """Say what becomes of it, before anything arrives.

        Args:
            destination: of a tensor; None for a value.
            on_complete: called once, from the thread that brought the last byte; at once for an
                item without bytes.
        """
        self._destination = destination
        self._on_complete = on_complete
        if not self._missing_bytes:
            self._complete()

    def accept(self, position: int, block: Buffer) -> None:
        """See `Read`."""
        arrived = np.frombuffer(block, dtype=np.uint8)
        with self._lock:
            if self._body is None:
                # It adopts these bytes, and as nobody else has them lets us write to them.
                self._body = io.BytesIO(bytes(self.stored.payload_length))
            body = np.frombuffer(self._body.getbuffer(), dtype=np.uint8)
        body[position : position + arrived.nbytes] = arrived
        del body
        with self._lock:
            self._missing_bytes -= arrived.nbytes
            if self._missing_bytes:
                return
        self._complete()

    def accept_packed(self, position: int, size_bytes: int, packed: Buffer) -> None:
        """See `Read`. Nothing of it is ever left out."""
        del size_bytes
        self.accept(position, packed)

    def _complete(self) -> None:
        if self._destination is not None:
            try:
                self._load_tensor(self._destination)
            except DcpObjstoreError as error:
                # Not raised in a worker, which would fetch the last range once more.
                self.error = error
        self._on_complete(self)

    def held_bytes(self) -> int:
        """Bytes that it holds: those of a value until it is taken, none of a tensor any more."""
        return 0 if self._body is None else self.stored.payload_length

    def take(self) -> io.BytesIO:
        """The whole item, not copied."""
        body, self._body = self._body, None
        return io.BytesIO() if body is None else body

    def _load_tensor(self, destination: torch.Tensor) -> None:
        """Unpickle the item as a tensor and copy the part that is wanted into `destination`.

        Raises:
            CheckpointCorruptError: it is no tensor, or not one of the expected shape.
            StateMismatchError: torch cannot copy it into the destination, or it is quantized and
                the destination is not quantized in the same way.
            UntrustedPickleError: it is of a class that torch does not load safely.
        """
        key = self.item.dest_index.fqn
        body = self.stored.undone(self.take(), key)
        with body.getbuffer() as view:
            vet(view, key)
        try:
            tensor = torch.load(body, map_location="cpu", weights_only=True)
        except Exception as error:
            needed = refused_globals(body.getvalue(), error)
            if needed is not None:
                raise UntrustedPickleError(
                    f"the stored tensor needs {needed}, which could run code when it is unpickled;"
                    " if you trust that, declare it by torch.serialization.add_safe_globals",
                    key=key,
                ) from error
            raise CheckpointCorruptError(
                f"the stored tensor cannot be read: {type(error).__name__}: {error}", key=key
            ) from error
        if not isinstance(tensor, torch.Tensor):
            raise CheckpointCorruptError(f"a {type(tensor).__name__} is stored", key=key)
        wanted = Box(tuple(self.item.storage_offsets), tuple(self.item.lengths))
        if not fits(wanted, tuple(tensor.shape)):
            raise CheckpointCorruptError(
                f"a tensor of shape {tuple(tensor.shape)} is stored, {wanted} was expected of it",
                key=key,
            )
        try:
            copy_elements(narrow(tensor.detach(), wanted), destination)
        except StateMismatchError as error:
            raise error.at(key=key) from None
        except RuntimeError as error:
            raise StateMismatchError(
                f"the stored {tensor.dtype} tensor cannot be copied into the state's of"
                f" {destination.dtype}: {str(error).partition(chr(10))[0]}",
                key=key,
            ) from error


class CompletionQueue:
    """Items that have arrived and wait for the calling thread, in bounded number.

    DCP's planners take values from one thread only, while workers fetch on: they wait for room
    before they take in another piece of a body. A worker that finds the backlog full after a piece
    must wake the calling thread at once: only `drain` makes room, and the worker itself may be
    the next to wait for it.

    Args:
        limit_bytes: of values that may wait. They may exceed it by those that one piece per worker
            completes.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._waiting: deque[ItemRead] = deque()
        self._waiting_bytes = 0
        self._changed = threading.Condition()

    def add(self, read: ItemRead) -> None:
        """Take an item that has all its bytes; from any thread."""
        with self._changed:
            self._waiting.append(read)
            self._waiting_bytes += read.held_bytes()

    @property
    def is_full(self) -> bool:
        """Whether more waits than the limit, so that workers wait until `drain` is called."""
        return self._waiting_bytes > self._limit_bytes

    def drain(self, finish: Callable[[ItemRead], None]) -> None:
        """Call `finish` with each item that waits; it counts as waiting until that returns."""
        while self._waiting:
            read = self._waiting.popleft()
            held_bytes = read.held_bytes()
            finish(read)
            with self._changed:
                self._waiting_bytes -= held_bytes
                self._changed.notify_all()

    def wait_for_room(self, progress: Progress) -> None:
        """Wait, in a worker, until what waits is within the limit or the transfer is stopped."""
        with self._changed:
            if self.is_full:
                progress.check_stopped()
                has_room = partial(self._changed.wait_for, lambda: not self.is_full)
                wait_in_steps(has_room, look=progress.check_stopped, step_seconds=STEP_SECONDS)
