"""The bytes of a `torch.save` file, front to back, without its tensors in memory."""

from __future__ import annotations

import io
import math
import mmap
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from dcp_objstore.config import MIB
from dcp_objstore.errors import UnsupportedError
from dcp_objstore.state.memory import byte_memory
from dcp_objstore.state.tensor_frame import framing
from dcp_objstore.torch_private import untyped_storage

if TYPE_CHECKING:
    from dcp_objstore.convert.sources import TensorInfo
    from dcp_objstore.transfer.upload import ByteArray


# Below this size, tensors get memory of torch, of which the pages are never touched.
_SMALL_BYTES = 64 * MIB


class TorchFile(NamedTuple):
    """A file to be written: what lies between the storages, and what each of them holds.

    Attributes:
        framing: one piece more than there are storages.
        storages: the key of a tensor, or memory.
    """

    framing: list[bytes]
    storages: list[str | ByteArray]

    @property
    def keys(self) -> list[str]:
        """Keys of the tensors, in the order of the file."""
        return [storage for storage in self.storages if isinstance(storage, str)]

    def buffers(self, tensor: Callable[[str], Iterator[ByteArray]]) -> Iterator[ByteArray]:
        """Yield the file's bytes; `tensor` gives the memory of the tensor with a key."""
        for before, storage in zip(self.framing, [*self.storages, None], strict=True):
            yield np.frombuffer(before, np.uint8)
            if isinstance(storage, str):
                yield from tensor(storage)
            elif storage is not None:
                yield storage


def plan_file(
    tensors: Mapping[str, TensorInfo], nest: Callable[[Mapping[str, Any]], Any]
) -> TorchFile:
    """Plan the file that `torch.save(nest(tensors))` would make.

    Args:
        tensors: the tensors by key. Addresses are reserved for them for the moment, but no memory.
        nest: returns the object to save, with the tensors at their places and any other values.

    Raises:
        UnsupportedError: the object is nested too deep for pickle, or a tensor is too large.
    """
    empty = {key: _without_memory(key, info) for key, info in tensors.items()}
    keys = {tensor.data_ptr(): key for key, tensor in empty.items() if tensor.numel()}
    value = nest(empty)
    finder = _StorageFinder()
    try:
        finder.dump(value)
        storages = [keys.get(at) or _memory(storage) for at, storage in finder.storages.items()]
        return TorchFile(framing(value), storages)
    except RecursionError:
        text = (
            "a value, or the nested dict, is nested too deep for a torch.save file; choose others"
            " with keys=, or export to safetensors"
        )
        raise UnsupportedError(text) from None


def _without_memory(key: str, info: TensorInfo) -> torch.Tensor:
    """Return a tensor that may be larger than the memory of the host. It cannot be written to."""
    size_bytes = math.prod(info.shape) * info.dtype.itemsize
    if size_bytes <= _SMALL_BYTES:  # a mapping each would soon reach the limit of a process
        return torch.empty(info.shape, dtype=info.dtype, device="cpu")
    # The kernel does not count what is private and read-only.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    try:
        reserved = mmap.mmap(-1, size_bytes, flags, mmap.PROT_READ)
    except (OSError, OverflowError) as error:
        text = f"this host has no addresses for its {size_bytes} bytes"
        raise UnsupportedError(text, key=key) from error
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable")
        return torch.frombuffer(reserved, dtype=torch.uint8).view(info.dtype).view(info.shape)


def _memory(storage: torch.UntypedStorage) -> ByteArray:
    """Return the memory of a storage that is part of a value."""
    values = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    memory = byte_memory(values.cpu())
    assert memory is not None
    return memory


class _StorageFinder(pickle.Pickler):
    """Finds the storages of an object by their address, in the order of `torch.save`."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO(), protocol=2)
        self.storages: dict[int, torch.UntypedStorage] = {}

    def persistent_id(self, obj: Any) -> str | None:
        """Override `pickle.Pickler.persistent_id`."""
        if not torch.is_storage(obj):
            return None
        storage = untyped_storage(obj)
        if storage.nbytes():
            self.storages.setdefault(storage.data_ptr(), storage)
        return "storage"
