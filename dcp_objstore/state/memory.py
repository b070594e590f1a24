"""The memory of destination tensors: write to it, bypassing torch where that is faster.

`fill_order` says in which order to fill tensors that share memory.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from dcp_objstore import torch_private
from dcp_objstore.errors import StateMismatchError
from dcp_objstore.torch_private import is_wrapper, parts, rebuilt
from dcp_objstore.transfer.memory import ByteArray


class Exposed:
    """Memory in NumPy's array interface. It dies with the last array made of it, and keeps `owner`.

    Args:
        owner: what the memory belongs to: a tensor, or another array.
        address: where the memory begins.
        size_bytes: its size.
        layout: entries of the interface that say how elements lie in it. Default: as bytes.
    """

    def __init__(self, owner: object, address: int, size_bytes: int, **layout: object) -> None:
        self._owner = owner
        as_bytes = {"shape": (size_bytes,), "typestr": "|u1"}
        data = address, False  # not read-only
        self.__array_interface__ = {"version": 3, "data": data, **as_bytes, **layout}


def byte_memory(tensor: torch.Tensor) -> ByteArray | None:
    """Return the bytes of a contiguous CPU tensor, writable; None if copies need torch.

    The bytes are written without torch, whose copy would start a team of OpenMP threads in each
    worker thread. (`tensor.numpy()` is not used, because the storage could not be resized after it,
    nor `np.from_dlpack`, which makes read-only arrays in older versions of NumPy.)
    """
    if tensor.device.type != "cpu" or not _is_raw(tensor):
        return None
    return np.asarray(Exposed(tensor, tensor.data_ptr(), tensor.numel() * tensor.element_size()))


def _is_raw(tensor: torch.Tensor) -> bool:
    """Whether the tensor's memory holds the values of its elements one after the other."""
    return (
        type(tensor) is torch.Tensor
        and not tensor.is_conj()
        and not tensor.is_neg()
        and tensor.is_contiguous()
    )


def lend(array: ByteArray, give_back: Callable[[], object]) -> ByteArray:
    """Return the same memory as a new array, and call `give_back` when its last view dies.

    `give_back` may run in any thread, at any point of that thread's code.
    """
    lent = Exposed(array, array.ctypes.data, array.nbytes)
    weakref.finalize(lent, give_back).atexit = False
    return cast("ByteArray", np.asarray(cast("Any", lent)))


def device_bytes(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the bytes of a contiguous tensor of any device as a view; None if impossible."""
    if not _is_raw(tensor):
        return None
    # In inference mode, a view with another dtype is an inference tensor even if `tensor` is not
    # one, and other threads could not write to it.
    with torch.inference_mode(tensor.is_inference()):
        # Not `view(-1)`, which keeps the stride of a single element that lies in a larger tensor.
        return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def same_memory(value: Any) -> tuple[object, ...] | None:
    """Return a key of a tensor's elements in memory; those of tied weights have the same key.

    None if it is not a plain tensor. The key of a DTensor is that of this rank's part, which may be
    empty.
    """
    local = torch_private.local_tensor(value)
    if type(local) not in (torch.Tensor, torch.nn.Parameter) or local.layout != torch.strided:
        return None
    begin = torch_private.storage_number(local), local.storage_offset()
    return *begin, local.shape, local.stride(), local.dtype


def reach(tensor: torch.Tensor) -> int:
    """Return the number of bytes from the first element to the end of the last."""
    steps = (
        (length - 1) * step for length, step in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return (sum(steps) + 1) * tensor.itemsize


def count_write(tensor: torch.Tensor) -> None:
    """Tell autograd about a write that bypassed torch."""
    if not tensor.is_inference():
        torch.autograd.graph.increment_version(tensor)


def is_quantized(dtype: torch.dtype) -> bool:
    """Whether elements of this dtype need a scale and a zero point to have a value."""
    return str(dtype).startswith(("torch.qint", "torch.quint"))


def copy_elements(source: torch.Tensor, destination: torch.Tensor) -> None:
    """Copy all elements, and convert them if the dtypes or the classes of tensors differ.

    Raises:
        StateMismatchError: one tensor is quantized, and the other is not quantized in the same way;
            or the destination is a wrapper whose class does not take the elements.
    """
    if is_wrapper(destination) and torch_private.are_alike(source, destination):
        for source_part, part in zip(parts(source), parts(destination), strict=True):
            copy_elements(source_part, part)
        return
    if is_wrapper(destination):  # the source has another class or settings: `copy_` must convert it
        check_takes_values(destination)
    if source.is_quantized or destination.is_quantized:
        _check_quantization(source, destination)
    source_bytes, destination_bytes = byte_memory(source), byte_memory(destination)
    if source_bytes is None or destination_bytes is None or source.dtype != destination.dtype:
        # A tensor that was made in inference mode can be written to only in that mode.
        with torch.inference_mode(parts(destination)[0].is_inference()), torch.no_grad():
            destination.copy_(values_of(source))
    else:
        destination_bytes[:] = source_bytes
        count_write(destination)


def values_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a wrapper as a plain tensor; any other tensor as it is."""
    if not is_wrapper(tensor):
        return tensor
    try:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
    except Exception:  # noqa: BLE001 - torchao's weights refuse with an AttributeError
        return tensor.dequantize()


def check_takes_values(wrapper: torch.Tensor) -> None:
    """Raise unless the class of a wrapper copies plain elements into it.

    Ones, then zeros are copied to a trial wrapper, whose parts must differ after the two copies.
    (Some classes turn the wrapper into a plain tensor and copy to that: nothing is raised, and the
    wrapper stays as it was.)

    Raises:
        StateMismatchError: the class refuses the elements, or the trial wrapper does not change.
    """
    trial, parts_after = with_own_memory(wrapper), []
    try:
        for number in (1, 0) if wrapper.numel() else ():  # without elements, nothing can be tried
            values = torch.full(wrapper.shape, number, dtype=wrapper.dtype, device=wrapper.device)
            with torch.no_grad():
                trial.copy_(values)
            parts_after.append([part.clone() for part in parts(trial)])
        if parts_after and all(map(torch.equal, *parts_after)):
            raise NotImplementedError("copy_ changes nothing")
    except Exception as error:
        raise StateMismatchError(
            f"the state's {type(wrapper).__name__} takes no other tensor than one of its class,"
            f" made alike ({str(error).partition(chr(10))[0]})"
        ) from error


def with_own_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return a new tensor of the same class, dtype and shape, contiguous if it is plain."""
    if is_wrapper(tensor):
        return cast("torch.Tensor", rebuilt(tensor, map(torch.clone, parts(tensor))))
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def _check_quantization(source: torch.Tensor, destination: torch.Tensor) -> None:
    """Raise unless both are quantized in the same way: torch copies the integers unchanged."""
    if _quantization(source) != _quantization(destination):
        raise StateMismatchError(
            f"saved as {source.dtype}, the state has {destination.dtype}, and the scales or zero"
            " points differ: load into one quantized alike, or save dequantize()"
        )


def _quantization(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return the dtype, followed by the mapping from integers to values."""
    if not tensor.is_quantized:
        return (tensor.dtype,)
    scheme = tensor.qscheme()
    if scheme == torch.per_tensor_affine:
        return tensor.dtype, scheme, tensor.q_scale(), tensor.q_zero_point()
    scales, zero_points = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
    axis = tensor.q_per_channel_axis()
    return tensor.dtype, scheme, scales.tolist(), zero_points.tolist(), axis


class _Region(NamedTuple):
    """The place of a key's tensors: bytes `[start, end)`, of which they take `size_bytes`.

    They are parts of one tensor, or of one of those that a wrapper is made of.

    Attributes:
        number: the region's place in the order of filling.
    """

    key: str
    number: int
    device: str
    start: int
    end: int
    size_bytes: int
    tensors: Sequence[torch.Tensor]

    def covers(self, other: _Region) -> bool:
        """Whether the tensors take all bytes of another region."""
        is_dense = self.size_bytes == self.end - self.start
        return is_dense and self.start <= other.start and other.end <= self.end


class FillOrder(NamedTuple):
    """How to fill keys that share memory.

    Attributes:
        covered: the keys that need not be filled, because later keys fill all of their memory.
        last: the keys to fill after the others, because they share elements with an earlier one.
    """

    covered: set[str]
    last: set[str]


def fill_order(tensors: Mapping[str, Sequence[torch.Tensor]]) -> FillOrder:
    """Return how to fill keys that share memory as if one key were filled after the other.

    Args:
        tensors: the tensors of each key, which do not overlap one another; in the order of filling.
    """
    regions: list[_Region] = []
    for key, key_tensors in tensors.items():
        # A key has a region for each part of its tensors. A wrapper has several parts; a plain
        # tensor is its own only part.
        for same_parts in zip(*map(parts, key_tensors), strict=True):
            nonempty = [part for part in same_parts if part.numel()]
            if nonempty:
                regions.append(_region(key, len(regions), nonempty))
    # Each pair of overlapping regions of two keys: first the region that is filled earlier.
    pairs: list[list[_Region]] = []
    open_regions: list[_Region] = []  # those that may overlap the next one
    for region in sorted(regions, key=attrgetter("device", "start")):
        open_regions = [
            before
            for before in open_regions
            if before.device == region.device and before.end > region.start
        ]
        for before in open_regions:
            if before.key != region.key:
                pairs.append(sorted((before, region), key=attrgetter("number")))
        open_regions.append(region)
    hidden_numbers = {earlier.number for earlier, later in pairs if later.covers(earlier)}
    # A key must be filled if one of its regions is not hidden by a later key.
    needed = {region.key for region in regions if region.number not in hidden_numbers}
    covered = {region.key for region in regions} - needed
    # Regions may overlap where tensors do not, as those of two columns of one matrix.
    last = {
        later.key
        for earlier, later in pairs
        if needed.issuperset((earlier.key, later.key))
        and any(itertools.starmap(_overlap, itertools.product(earlier.tensors, later.tensors)))
    }
    return FillOrder(covered, last)


def _region(key: str, number: int, tensors: Sequence[torch.Tensor]) -> _Region:
    """Return the region of memory from the first byte of these tensors to the last.

    Args:
        key: the key of the tensors.
        number: the region's place in the order of filling.
        tensors: tensors on one device.
    """
    return _Region(
        key=key,
        number=number,
        device=str(tensors[0].device),
        start=min(tensor.data_ptr() for tensor in tensors),
        end=max(tensor.data_ptr() + reach(tensor) for tensor in tensors),
        size_bytes=sum(tensor.nbytes for tensor in tensors),
        tensors=tensors,
    )


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether tensors have a byte in common. (Columns of one matrix have none.)"""
    return np.shares_memory(_addresses(one.squeeze()), _addresses(other.squeeze()))


def _addresses(tensor: torch.Tensor) -> ByteArray:
    """Return an array with the addresses of the elements, for `np.shares_memory` alone.

    It may be the memory of a GPU, which nothing may read here.
    """
    strides = tuple(step * tensor.itemsize for step in tensor.stride())
    layout = {"shape": (*tensor.shape,), "strides": strides, "typestr": f"|V{tensor.itemsize}"}
    return np.asarray(Exposed(tensor, tensor.data_ptr(), 0, **layout))
