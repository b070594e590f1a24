"""A tensor as the bytes of a `torch.save` blob, without copying its memory.

`torch.save` writes a zip around the raw memory. Under `torch.serialization.skip_data()` it writes
everything but that memory and seeks over its place, so the bytes before (header) and after
(trailer) are known, and header + memory + trailer is what stock torch readers load. Both depend
only on dtype, shape and torch's save options, never on values, so they are made once for each.
(The zip's checksums stay zero; torch's zip reader is built not to look at them.)
"""

from __future__ import annotations

import ctypes
import functools
import io
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.utils.serialization import config as serialization_config

from dcp_objstore.checkpoint.index import ITEM_SIZE_BYTES
from dcp_objstore.errors import UnsupportedError
from dcp_objstore.state.dcp_metadata import constant_name
from dcp_objstore.state.memory import byte_memory, is_quantized

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dcp_objstore.transfer.upload import ByteArray

# Payloads start on such boundaries of their object: what torch aligns storages to in its own
# files, and a cache line.
ALIGNMENT_BYTES = 64
# Up to here a copy costs less than an array does.
_COPIED_BYTES = 16 * 1024


@dataclass(frozen=True, slots=True)
class Frame:
    """The bytes around a payload in its `torch.save` blob."""

    header: bytes
    trailer: bytes


class _FrameSink(io.RawIOBase):
    """Collects what `torch.save` writes before and after the one seek over the payload."""

    def __init__(self) -> None:
        self.parts: list[list[bytes]] = [[]]

    def writable(self) -> bool:
        return True

    def write(self, data: object) -> int:
        body = bytes(data)  # type: ignore[call-overload]
        self.parts[-1].append(body)
        return len(body)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if whence != io.SEEK_CUR:
            raise io.UnsupportedOperation("torch.save is expected to seek over payload only")
        self.parts.append([])
        return offset


def save_options() -> tuple[object, ...]:
    """The process-wide torch options that a frame depends on; part of its cache key."""
    alignment = serialization_config.save.storage_alignment
    return alignment, torch.serialization.get_crc32_options()


@functools.lru_cache(maxsize=65536)
def frame(dtype: torch.dtype, shape: tuple[int, ...], options: tuple[object, ...]) -> Frame:
    """Header and trailer for a contiguous tensor of `dtype` and `shape` that needs no grad.

    Args:
        dtype, shape: of the tensor.
        options: `save_options()`.
    """
    del options  # in force in this process; only part of the cache key
    sink = _FrameSink()
    # A fresh empty tensor: meta tensors are not seeked over, fake ones do not pickle, and for a
    # view of a larger storage the whole storage would be. Its memory is never touched.
    with torch.serialization.skip_data():
        torch.save(torch.empty(shape, dtype=dtype), sink)  # type: ignore[arg-type]
    if len(sink.parts) == 1:  # no elements, so nothing to seek over
        return Frame(b"".join(sink.parts[0]), b"")
    header, trailer = sink.parts
    return Frame(b"".join(header), b"".join(trailer))


def padding_before(position: int, header_bytes: int) -> int:
    """Zero bytes to write at `position` so that the payload after the header is aligned."""
    return -(position + header_bytes) % ALIGNMENT_BYTES


def raw_payload(tensor: torch.Tensor, key: str) -> torch.Tensor | None:
    """The tensor whose memory is the payload, or None where only plain `torch.save` will do.

    Copies only what is not contiguous, conjugated or negated. None for quantized and
    subclass tensors.

    Raises:
        UnsupportedError: the tensor has no memory (meta, fake), or is sparse.
    """
    if tensor.requires_grad or type(tensor) is not torch.Tensor:
        tensor = tensor.detach()
    check_layout(tensor.layout, key)
    if tensor.is_meta:
        raise UnsupportedError("a meta tensor has no data to save", key=key)
    if type(tensor) is not torch.Tensor or tensor.layout != torch.strided or tensor.is_quantized:
        return None
    if tensor.numel() and tensor.data_ptr() == 0:
        raise UnsupportedError("the tensor's memory was freed, there is no data to save", key=key)
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor if tensor.is_contiguous() else tensor.contiguous()


def check_layout(layout: torch.layout, key: str) -> None:
    """Refuse tensors that DCP cannot place in a grid of chunks; stock writers fail on them too.

    Raises:
        UnsupportedError: it is a sparse layout, or MKL-DNN's.
    """
    if layout not in (torch.strided, torch.jagged):
        raise UnsupportedError(
            f"a tensor of layout {str(layout).removeprefix('torch.')} cannot be saved; save its"
            " to_dense(), or its parts (indices and values) as tensors of their own",
            key=key,
        )


def check_dtype(dtype: torch.dtype, key: str) -> None:
    """Refuse tensors that could not be loaded again.

    Raises:
        UnsupportedError: see `ITEM_SIZE_BYTES`.
    """
    name = constant_name(dtype)
    if name not in ITEM_SIZE_BYTES:
        instead = "dequantize()" if is_quantized(dtype) else "view(torch.uint8)"
        raise UnsupportedError(
            f"a tensor of dtype {name} cannot be saved, because it could not be loaded again; save"
            f" its {instead}",
            key=key,
        )


def small_payload(tensor: torch.Tensor, size_bytes: int) -> bytes | ByteArray:
    """The memory of a contiguous CPU tensor, or a copy of it, by the cheapest way there is."""
    if size_bytes > _COPIED_BYTES and (memory := byte_memory(tensor)) is not None:
        return memory
    return ctypes.string_at(tensor.data_ptr(), size_bytes)


def payload_slices(tensor: torch.Tensor, slice_size_bytes: int) -> Iterator[ByteArray]:
    """The memory of a contiguous tensor in slices, as arrays that keep it alive.

    CPU memory is not copied. Memory of another device is copied one slice at a time (that of a
    GPU goes another way: `device.Outbound`).
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
    """The whole tensor by plain `torch.save`, on the CPU."""
    sink = io.BytesIO()
    torch.save(tensor.detach().cpu(), sink)
    return np.frombuffer(sink.getbuffer(), dtype=np.uint8)
