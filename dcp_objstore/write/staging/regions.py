"""Plan a staging: which bytes are copied together, and where in them each tensor begins.

Tensors whose memory touches form one region, so memory that the state shares is copied once and
shared in the copy. Only the bytes that a view into a large storage reaches are copied.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from dcp_objstore.config import MIB
from dcp_objstore.state.memory import reach

if TYPE_CHECKING:
    from dcp_objstore.transfer.memory import ByteArray
    from dcp_objstore.write.staging.memory import StagingMemory

# Regions are laid one after the other into slabs of this size; a large region has its own slab.
_SLAB_BYTES = 64 * MIB
_LARGE_BYTES = 16 * MIB
_SMALLEST_SLAB_BYTES = 1 << 16
_PAGE_BYTES = 4096
# Torch aligns memory to 64 bytes. No element is larger than 16 bytes, so elements are aligned in a
# copy that begins at a multiple of 16 bytes of the storage.
_ALIGNMENT_BYTES = 64
_ELEMENT_BYTES = 16


@dataclass(slots=True)
class Region:
    """Bytes of a storage that are copied together.

    Attributes:
        storage: the storage to copy the bytes from; None to copy the elements of `tensor`, closely
            packed.
        tensor: the tensor to copy if `storage` is None.
        array: the memory of the copy, from `lay`.
        address: the address of that memory.
        is_payload: whether these are the bytes of one contiguous tensor, as they are uploaded.
    """

    device: torch.device
    storage: torch.UntypedStorage | None
    start: int
    end: int
    tensor: torch.Tensor | None = None
    array: ByteArray | None = None
    address: int = 0
    is_payload: bool = False

    @property
    def size_bytes(self) -> int:
        """Number of bytes to copy."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class _View:
    """A tensor of the state, which reaches only the bytes `[start, end)` of its storage."""

    tensor: torch.Tensor
    storage: torch.UntypedStorage
    start: int
    end: int

    @property
    def alias(self) -> tuple[Any, ...]:
        """A key that is equal for views of the same elements with the same dtype and strides."""
        return self.start, self.tensor.dtype, self.tensor.shape, self.tensor.stride()


def plan_regions(tensors: list[torch.Tensor]) -> dict[int, tuple[Region, int]]:
    """Return, for each tensor (by id), its region and its offset in the region.

    A tensor without elements has no region, nor has one without memory (meta, freed), which the
    writer refuses by name.
    """
    views: dict[tuple[torch.device, int], list[_View]] = {}  # by device and address of the storage
    places: dict[int, tuple[Region, int]] = {}
    for tensor in tensors:
        if tensor.layout != torch.strided or not tensor.numel():
            continue
        if not tensor.untyped_storage().data_ptr():
            continue
        if tensor.is_conj() or tensor.is_neg():  # its memory is not its value
            places[id(tensor)] = _packed(tensor), 0
            continue
        start, storage = int(tensor.storage_offset()) * tensor.itemsize, tensor.untyped_storage()
        view = _View(tensor, storage, start, start + reach(tensor))
        views.setdefault((tensor.device, storage.data_ptr()), []).append(view)
    for (device, _), of_storage in views.items():
        for group in _touching(sorted(of_storage, key=lambda view: view.start)):
            first = group[0]
            # Most often a group is one tensor that fills its bytes.
            if len(group) == 1 and first.end - first.start == first.tensor.nbytes:
                region = Region(device, first.storage, first.start, first.end)
                region.is_payload = first.tensor.is_contiguous()
                places[id(first.tensor)] = region, 0
                continue
            # Rounded down, so that elements that are aligned in the storage are in the copy, too.
            start = first.start // _ELEMENT_BYTES * _ELEMENT_BYTES
            end = max(view.end for view in group)
            distinct = {view.alias: view.tensor for view in reversed(group)}
            # The group becomes one region, so that tensors that share memory share it in the copy,
            # too. But if the tensors leave gaps, as columns of a matrix do, and the region would be
            # larger than all of them together, each is copied by itself.
            if end - start <= _ELEMENT_BYTES + sum(tensor.nbytes for tensor in distinct.values()):
                region = Region(device, first.storage, start, end)
                places.update({id(view.tensor): (region, view.start - start) for view in group})
                continue
            packed = {alias: _packed(tensor) for alias, tensor in distinct.items()}
            places.update({id(view.tensor): (packed[view.alias], 0) for view in group})
    return places


def _packed(tensor: torch.Tensor) -> Region:
    """Return the region of a tensor whose elements are copied closely packed."""
    return Region(tensor.device, None, start=0, end=tensor.nbytes, tensor=tensor.detach())


def _touching(views: list[_View]) -> Iterator[list[_View]]:
    """Group views (at least one), ordered by their start, so that the views of a group touch."""
    group: list[_View] = []
    end = 0
    for view in views:
        if group and view.start > end:
            yield group
            group = []
        end = max(end, view.end)
        group.append(view)
    yield group


def lay(regions: list[Region], memory: StagingMemory, *, pinned: bool) -> None:
    """Assign memory to each region.

    A large region has a slab of its own. Small ones follow one another in shared slabs.
    """
    slabs: list[int] = []  # the size of each
    places: list[tuple[int, int]] = []  # of each region: the number of its slab, and its offset
    # The slab that small regions go into, and how full it is. At first there is none, as if one
    # were full.
    open_slab, filled_bytes = -1, _SLAB_BYTES
    for region in regions:
        size_bytes = region.size_bytes
        if size_bytes > _LARGE_BYTES:
            slabs.append(-(-size_bytes // _PAGE_BYTES) * _PAGE_BYTES)
            places.append((len(slabs) - 1, 0))
            continue
        if filled_bytes + size_bytes > _SLAB_BYTES:
            slabs.append(_SLAB_BYTES)
            open_slab, filled_bytes = len(slabs) - 1, 0
        places.append((open_slab, filled_bytes))
        filled_bytes += -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    if open_slab >= 0:
        # The last slab for small regions is only as large as these need, rounded up to a power of
        # two, so that a slightly larger or smaller state asks for the same size.
        slabs[open_slab] = max(_SMALLEST_SLAB_BYTES, 1 << (filled_bytes - 1).bit_length())
    arrays = memory.take(slabs, pinned=pinned) if slabs else []
    addresses = [array.ctypes.data for array in arrays]  # read once: it takes microseconds
    for region, (number, offset) in zip(regions, places, strict=True):
        region.array = arrays[number][offset : offset + region.size_bytes]
        region.address = addresses[number] + offset


def copy_of(tensor: torch.Tensor, region: Region, offset_bytes: int) -> torch.Tensor:
    """Return the staged tensor; it has the same strides unless its region is closely packed."""
    memory = torch.from_numpy(region.array)
    # The usual case, in two calls.
    if region.size_bytes == tensor.nbytes and tensor.is_contiguous():
        return memory.view(tensor.dtype).view(tensor.shape)
    # The region may begin or end within an element of this dtype, if it has views of other dtypes.
    whole = memory[: memory.numel() // tensor.itemsize * tensor.itemsize].view(tensor.dtype)
    if region.storage is None:  # closely packed
        return whole.view(tensor.shape)
    return whole.as_strided(tensor.shape, tensor.stride(), offset_bytes // tensor.itemsize)
