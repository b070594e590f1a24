"""Frame a tensor as the bytes of a `torch.save` blob, without copying its memory.

`torch.save` writes a zip around the raw memory. Under `torch.serialization.skip_data()` it writes
everything but that memory and seeks over its place. So the bytes before (header) and after
(trailer) are known, and stock torch readers can load header + memory + trailer. Header and trailer
depend only on dtype, shape and torch's save options, never on values, so each pair is made once.
(The zip's checksums stay zero; torch's zip reader is built not to check them.)
"""

from __future__ import annotations

import ctypes
import functools
import io
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch.distributed.tensor import DTensor, Placement
from torch.nn.parameter import is_lazy
from torch.utils.serialization import config as serialization_config
from typing_extensions import Buffer

from dcp_objstore import torch_private
from dcp_objstore.checkpoint.index import ITEM_SIZE_BYTES
from dcp_objstore.errors import UnsupportedError
from dcp_objstore.state.memory import byte_memory, is_quantized
from dcp_objstore.state.stored import constant_name
from dcp_objstore.torch_private import is_wrapper, parts, rebuilt
from dcp_objstore.transfer.memory import ByteArray

# Payloads start at multiples of this in their object: the alignment of storages in torch's own
# files, and the size of a cache line.
ALIGNMENT_BYTES = 64
PLAIN_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})
# Up to this size a copy costs less than making an array.
_COPIED_BYTES = 2**14


@dataclass(frozen=True, slots=True)
class Frame:
    """The bytes around a payload in its `torch.save` blob."""

    header: bytes
    trailer: bytes


class _FrameSink:
    """A sink for the bytes that `torch.save` writes before and after its seek over the payload.

    Attributes:
        parts: the pieces that were written before the first seek, those before the next, and so on.
    """

    def __init__(self) -> None:
        self.parts: list[list[bytes]] = [[]]

    def write(self, data: Buffer) -> None:
        self.parts[-1].append(bytes(data))

    def seek(self, _offset: int, whence: int) -> None:
        assert whence == io.SEEK_CUR, "torch.save seeks over payload only"
        self.parts.append([])

    def flush(self) -> None:
        """Do nothing; torch calls it at the end."""


def save_options() -> tuple[object, ...]:
    """Return the process-wide torch options that a frame depends on, for its cache key."""
    alignment = serialization_config.save.storage_alignment
    return alignment, torch.serialization.get_crc32_options()


@functools.lru_cache(maxsize=65536)
def frame(dtype: torch.dtype, shape: tuple[int, ...], _options: tuple[object, ...]) -> Frame:
    """Return the header and trailer for a contiguous tensor that does not require grad.

    Args:
        _options: the result of `save_options()`; process-wide, so part of the cache key only.

    Raises:
        UnsupportedError: the dtype is not one of `ITEM_SIZE_BYTES`.
    """
    check_dtype(dtype)
    # A new, empty tensor: torch does not seek over meta tensors, cannot pickle fake ones, and would
    # seek over the whole storage of a view. The memory of this tensor is never touched, so it does
    # not come from `torch.empty`, which fills it under `use_deterministic_algorithms`.
    memory = torch.UntypedStorage(math.prod(shape) * dtype.itemsize)  # type: ignore[no-untyped-call]
    untouched = torch.empty(0, dtype=dtype, device="cpu").set_(memory).view(shape)
    header, *trailer = framing(untouched)
    return Frame(header, b"".join(trailer))  # no elements: no trailer


def framing(value: object) -> list[bytes]:
    """Return what `torch.save(value)` writes before, between and after its storages.

    The memory of the tensors in it is not read. Storages without bytes have no place.
    """
    sink = _FrameSink()
    with torch.serialization.skip_data():
        torch.save(value, sink)  # type: ignore[arg-type]
    return [b"".join(part) for part in sink.parts]


def padding_before(position: int, header_bytes: int) -> int:
    """Return how many zero bytes to write at `position` so that the payload is aligned."""
    return -(position + header_bytes) % ALIGNMENT_BYTES


def raw_payload(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the tensor whose memory is the payload; None if plain `torch.save` is needed.

    Only tensors that are conjugated, negated or not contiguous are copied. The result is None for
    quantized tensors and tensor subclasses.

    Raises:
        UnsupportedError: the tensor has no memory (meta, fake), or is sparse.
    """
    if tensor.requires_grad or type(tensor) is not torch.Tensor:
        check_kind(tensor)
        tensor = torch_private.waited(tensor)
        # (A wrapper is not detached: it is left to `torch.save` below.)
        tensor = tensor if is_wrapper(tensor) else tensor.detach()
    check_layout(tensor.layout)
    if tensor.is_meta:
        raise UnsupportedError("a meta tensor has no data to save")
    if type(tensor) is not torch.Tensor or tensor.is_quantized:
        return None
    if tensor.numel() and tensor.data_ptr() == 0:
        raise UnsupportedError("the tensor's memory was freed; there is no data to save")
    tensor = tensor.resolve_conj().resolve_neg()
    return tensor if tensor.is_contiguous() else tensor.contiguous()


def check_kind(value: object, key: str | None = None) -> None:
    """Refuse a tensor that no grid of chunks can hold, or that does not say what it is made of.

    Raises:
        UnsupportedError: the value is such a tensor.
    """
    if type(value) is torch.Tensor and value.layout is torch.strided and not value.is_nested:
        return  # the most by far
    tensor = torch_private.local_tensor(value)
    if not isinstance(tensor, torch.Tensor) or isinstance(tensor, torch_private.ShardedTensor):
        return
    name, why = type(tensor).__name__, ""  # why not; if this stays empty, it can be saved
    if isinstance(value, DTensor) and any(map(Placement.is_partial, value.placements)):
        name, why = "DTensor with a Partial placement", "redistribute it to Shard or Replicate"
    elif is_lazy(tensor):
        why = "it has no shape before the module has run"
    elif not hasattr(tensor, "__create_write_items__"):  # a tensor with it tells DCP its chunks
        check_layout(torch.jagged if tensor.is_nested else tensor.layout, key)
        if torch_private.is_opaque(tensor):
            why = "it has no memory and no __tensor_flatten__; use the tensors that it is made of"
    if why:
        raise UnsupportedError(f"a {name} cannot be saved or loaded: {why}", key=key)


def check_layout(layout: torch.layout, key: str | None = None) -> None:
    """Refuse tensors that DCP cannot place in a grid of chunks; stock writers fail on them too.

    Raises:
        UnsupportedError: the layout is sparse, jagged (of a nested tensor), or MKL-DNN's.
    """
    if layout != torch.strided:
        raise UnsupportedError(
            f"a tensor of layout {constant_name(layout)} cannot be saved or loaded",
            advice="use its to_dense(), or its parts (such as indices) as separate tensors",
            key=key,
        )


def check_dtype(dtype: torch.dtype) -> None:
    """Refuse tensors that could not be loaded again.

    Raises:
        UnsupportedError: the dtype is not one of `ITEM_SIZE_BYTES`.
    """
    name = constant_name(dtype)
    if name not in ITEM_SIZE_BYTES:
        instead = "dequantize()" if is_quantized(dtype) else "view(torch.uint8)"
        raise UnsupportedError(
            f"a tensor of dtype {name} cannot be saved, because it could not be loaded again",
            advice=f"save its {instead}",
        )


def small_payload(tensor: torch.Tensor, size_bytes: int) -> bytes | ByteArray:
    """Return the memory of a contiguous CPU tensor or a copy of it, whichever is cheaper."""
    if size_bytes <= _COPIED_BYTES:
        return ctypes.string_at(tensor.data_ptr(), size_bytes)
    memory = byte_memory(tensor)
    assert memory is not None
    return memory


def payload_slices(tensor: torch.Tensor, slice_size_bytes: int) -> Iterator[ByteArray]:
    """Yield the memory of a contiguous tensor in slices, as arrays that keep it alive.

    CPU memory is not copied. Memory of another device is copied one slice at a time (but a GPU's
    memory goes through `device.Outbound`).
    """
    memory = byte_memory(tensor)
    if memory is not None:
        for start in range(0, memory.nbytes, slice_size_bytes):
            yield memory[start : start + slice_size_bytes]
        return
    flat = tensor.reshape(-1).view(torch.uint8)
    for start in range(0, flat.numel(), slice_size_bytes):
        yield flat[start : start + slice_size_bytes].cpu().numpy()


def pickled_blob(tensor: torch.Tensor) -> ByteArray:
    """Return the whole tensor as plain `torch.save` writes it, from the CPU."""
    sink = io.BytesIO()
    torch.save(rebuilt(tensor, (part.detach().cpu() for part in parts(tensor))), sink)
    return np.frombuffer(sink.getbuffer(), dtype=np.uint8)
