"""Staging: a copy of a state in host memory, after which training may change the state.

What shares memory in the state shares it in the copy, and is copied once. Of a view into a large
storage only what the view reaches is copied. Device memory is copied by the device, on a stream of
its own; host memory by as many threads as torch is set to use, which hash what they copy.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.tensor import DTensor

from dcp_objstore.config import MIB
from dcp_objstore.dcp import device
from dcp_objstore.dcp.staging_memory import StagingMemory
from dcp_objstore.transfer.digests import BLOCK_SIZE_BYTES, BlockDigest
from dcp_objstore.transfer.workers import DaemonPool

if TYPE_CHECKING:
    from dcp_objstore.dcp.ring import Ticket
    from dcp_objstore.transfer.upload import ByteArray

# Regions are laid into slabs of this size, one after the other; a large one has its own.
_SLAB_BYTES = 64 * MIB
_LARGE_BYTES = 16 * MIB
_SMALLEST_SLAB_BYTES = 1 << 16
_PAGE_BYTES = 4096
# What torch aligns memory to; and no element is larger than 16, so that one is aligned in a copy
# that begins at such a boundary of its storage.
_ALIGNMENT_BYTES = 64
_ELEMENT_BYTES = 16
# A thread that copies takes this much at a time: whole digest blocks.
_COPY_BYTES = 32 * MIB
# Tensors from here on are hashed as they are copied, in steps of which source and copy fit a
# processor's cache of its own; the more threads, the larger, as each step takes the GIL twice.
_HASHED_BYTES = MIB
_CACHED_BYTES = 256 * 1024
_MOST_THREADS = 8

_SCALARS = frozenset({bool, int, float, complex, str, bytes, type(None)})
_CONTAINERS = frozenset({dict, OrderedDict, list, tuple})
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


class StagedState(dict[str, Any]):
    """The copy. A dict that can be weakly referenced: when it goes, the save has ended.

    Attributes:
        size_bytes: of the memory that was copied into.
        digests: `block_digests` of the large contiguous tensors in it that were copied between
            host memory, by their memory's address and size in bytes.
    """

    size_bytes: int = 0
    digests: Mapping[tuple[int, int], bytes] = MappingProxyType({})

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


@dataclass(slots=True)
class _Region:
    """Bytes of a storage that are copied together.

    Attributes:
        storage: the bytes are `[start, end)` of it; None: the elements of `tensor` are copied,
            closely packed.
        array, address: where to.
        is_payload: these are the bytes of one contiguous tensor, as they are uploaded.
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
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class _View:
    """A tensor of the state: the bytes `[start, end)` of its storage are all that it reaches."""

    tensor: torch.Tensor
    storage: torch.UntypedStorage
    start: int
    end: int

    @property
    def alias(self) -> tuple[Any, ...]:
        """The same for views that are the same tensor in all but name."""
        return self.start, self.tensor.dtype, self.tensor.shape, self.tensor.stride()


class Staging:
    """A copy that is being made.

    Args:
        state_dict: nested dicts, lists and tuples of anything. Tensors are copied; scalars are
            taken as they are, other values are deep-copied, all at once.
        memory: where to.

    Copies from devices are under way when this is made; those in host memory are made by `finish`.
    Until then neither may be changed.

    Attributes:
        state: the copy, whole once `finish` has returned.
    """

    def __init__(self, state_dict: Mapping[str, Any], memory: StagingMemory) -> None:
        leaves = [leaf for value in state_dict.values() for leaf in _leaves(value)]
        tensors = {
            id(local): local for leaf in leaves if (local := _plain_tensor(leaf)) is not None
        }
        others = {
            id(leaf): leaf
            for leaf in leaves
            if type(leaf) not in _SCALARS and _plain_tensor(leaf) is None
        }
        copies: dict[int, Any] = dict(zip(others, _deep_copies(list(others.values())), strict=True))
        places = _plan_regions(list(tensors.values()))
        regions = list({id(region): region for region, _ in places.values()}.values())
        self._tickets: list[Ticket] = []
        self._host: list[_Region] = []
        with torch.no_grad():
            self._begin(regions, memory)
            for key, tensor in tensors.items():
                copies[key] = (
                    _copy_of(tensor, *places[key]) if key in places else _no_region(tensor)
                )
            self.state = StagedState(
                (name, _rebuilt(value, copies)) for name, value in state_dict.items()
            )
            self.state.size_bytes = sum(region.size_bytes for region in regions)
        # Their memory is read until `finish` has returned.
        self._sources = list(tensors.values())

    def _begin(self, regions: list[_Region], memory: StagingMemory) -> None:
        pinned = [region for region in regions if region.device.type == "cuda"]
        _lay(pinned, memory, pinned=True)
        _lay([region for region in regions if region.device.type != "cuda"], memory, pinned=False)
        on_devices: dict[torch.device, list[_Region]] = {}
        for region in regions:
            on_devices.setdefault(region.device, []).append(region)
        for of, found in on_devices.items():
            lane = device.lane_of(of, "out")
            if lane is None:
                self._host += found
            else:
                lane.follow()  # what training has queued so far
                self._tickets.append(
                    lane.queue(lambda found=found: _copy_all(found))  # type: ignore[misc]
                )

    def finish(self) -> None:
        """Wait for what devices copy, and copy what lies in host memory."""
        host = [region for region in self._host if region.device.type == "cpu" and region.storage]
        with torch.no_grad():
            self.state.digests = _copy_host(host)
            _copy_all([r for r in self._host if r.device.type != "cpu" or not r.storage])
        self._host.clear()
        for ticket in self._tickets:
            ticket.synchronize()
        self._tickets.clear()
        self._sources.clear()


def _leaves(value: Any) -> Iterator[Any]:
    """What is not a container to descend into."""
    if type(value) in _CONTAINERS:
        for item in value.values() if isinstance(value, dict) else value:
            yield from _leaves(item)
    else:
        yield value


def _rebuilt(value: Any, copies: Mapping[int, Any]) -> Any:
    """The same containers, with copies of the leaves."""
    kind = type(value)
    if kind in _SCALARS:
        return value
    if kind not in _CONTAINERS:
        if isinstance(value, DTensor) and id(value) not in copies:
            local = _local(value)
            return DTensor(copies[id(local)], value._spec, requires_grad=False)  # type: ignore[no-untyped-call]
        return copies[id(value)]
    if isinstance(value, dict):
        return kind((key, _rebuilt(item, copies)) for key, item in value.items())
    return kind(_rebuilt(item, copies) for item in value)


def _local(value: DTensor) -> torch.Tensor:
    return value._local_tensor


def _plain_tensor(leaf: Any) -> torch.Tensor | None:
    """The tensor whose memory is to be copied; None for a leaf that is deep-copied."""
    tensor = leaf._local_tensor if isinstance(leaf, DTensor) else leaf
    if type(tensor) not in _PLAIN or tensor.is_quantized:
        return None
    return tensor


def _deep_copies(values: list[Any]) -> list[Any]:
    """As DCP's own stager makes them: of quantized tensors, subclasses and any other object.

    Their memory is not kept for the next save.
    """
    if not values:
        return []
    for value in values:
        if isinstance(value, DTensor) and isinstance(value._local_tensor, AsyncCollectiveTensor):
            value._local_tensor.wait()
    stager = DefaultStager(StagingOptions(False, False, False, False))
    try:
        copied: Any = stager.stage({"values": values})  # not async: no future
    finally:
        stager.close()
    copies: list[Any] = copied["values"]
    return copies


def _view(tensor: torch.Tensor) -> _View:
    start = int(tensor.storage_offset()) * tensor.itemsize
    if tensor.is_contiguous():
        return _View(tensor, tensor.untyped_storage(), start, start + tensor.nbytes)
    reach = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return _View(tensor, tensor.untyped_storage(), start, start + reach * tensor.itemsize)


def _plan_regions(tensors: list[torch.Tensor]) -> dict[int, tuple[_Region, int]]:
    """Which bytes are copied together, and at which offset in them each tensor (by id) begins.

    A tensor without memory (meta, freed) has no region: the writer refuses it, by name.
    """
    views: dict[tuple[torch.device, int], list[_View]] = {}
    places: dict[int, tuple[_Region, int]] = {}
    for tensor in tensors:
        if tensor.layout != torch.strided or tensor.is_meta or not tensor.numel():
            continue
        if not tensor.untyped_storage().data_ptr():
            continue
        if tensor.is_conj() or tensor.is_neg():  # its memory is not its value
            places[id(tensor)] = _packed(tensor), 0
            continue
        view = _view(tensor)
        views.setdefault((tensor.device, view.storage.data_ptr()), []).append(view)
    for (of, _), found in views.items():
        for group in _touching(sorted(found, key=lambda view: view.start)):
            first = group[0]
            if len(group) == 1 and first.end - first.start == first.tensor.nbytes:
                region = _Region(of, first.storage, first.start, first.end)
                region.is_payload = first.tensor.is_contiguous()
                places[id(first.tensor)] = region, 0
                continue
            start = first.start // _ELEMENT_BYTES * _ELEMENT_BYTES
            end = max(view.end for view in group)
            firsts = {view.alias: view.tensor for view in reversed(group)}
            if end - start <= _ELEMENT_BYTES + sum(tensor.nbytes for tensor in firsts.values()):
                region = _Region(of, first.storage, start, end)
                places.update({id(view.tensor): (region, view.start - start) for view in group})
                continue
            packed = {alias: _packed(tensor) for alias, tensor in firsts.items()}
            places.update({id(view.tensor): (packed[view.alias], 0) for view in group})
    return places


def _packed(tensor: torch.Tensor) -> _Region:
    return _Region(tensor.device, None, 0, tensor.nbytes, tensor.detach())


def _touching(views: list[_View]) -> Iterator[list[_View]]:
    """Views, ordered by where they begin, in groups that reach one another."""
    group: list[_View] = []
    end = 0
    for view in views:
        if group and view.start > end:
            yield group
            group = []
        end = max(end, view.end) if group else view.end
        group.append(view)
    if group:
        yield group


def _lay(regions: list[_Region], memory: StagingMemory, *, pinned: bool) -> None:
    """Give each region its memory."""
    slabs: list[int] = []
    places: list[tuple[int, int]] = []
    open_slab, taken = -1, _SLAB_BYTES
    for region in regions:
        size_bytes = region.size_bytes
        if size_bytes > _LARGE_BYTES:
            slabs.append(-(-size_bytes // _PAGE_BYTES) * _PAGE_BYTES)
            places.append((len(slabs) - 1, 0))
            continue
        if taken + size_bytes > _SLAB_BYTES:
            slabs.append(_SLAB_BYTES)
            open_slab, taken = len(slabs) - 1, 0
        places.append((open_slab, taken))
        taken += -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    if open_slab >= 0:
        # As large as it must be, but the same for a state that is a little larger or smaller.
        slabs[open_slab] = max(_SMALLEST_SLAB_BYTES, 1 << (taken - 1).bit_length())
    arrays = memory.take(slabs, pinned=pinned) if slabs else []
    addresses = [array.ctypes.data for array in arrays]  # asked for once: it takes microseconds
    for region, (number, offset) in zip(regions, places, strict=True):
        region.array = arrays[number][offset : offset + region.size_bytes]
        region.address = addresses[number] + offset


def _copy_of(tensor: torch.Tensor, region: _Region, offset_bytes: int) -> torch.Tensor:
    """The staged tensor: of a region that is copied as it lies, with the same strides."""
    memory = torch.from_numpy(region.array)
    if region.size_bytes == tensor.nbytes and tensor.is_contiguous():
        return memory.view(tensor.dtype).view(tensor.shape)
    whole = memory[: memory.numel() // tensor.itemsize * tensor.itemsize].view(tensor.dtype)
    if region.storage is None:
        return whole.view(tensor.shape)
    return whole.as_strided(tensor.shape, tensor.stride(), offset_bytes // tensor.itemsize)


def _no_region(tensor: torch.Tensor) -> torch.Tensor:
    """Of one that is sparse, or has no memory; where it should have some, the writer refuses it."""
    if tensor.layout != torch.strided:
        return tensor.detach().clone()  # DCP's own stager fails
    return tensor if tensor.numel() else torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")


def _copy_all(regions: list[_Region]) -> None:
    """By torch; queued only, where that is what a device does."""
    for region in regions:
        target = torch.from_numpy(region.array)
        if region.storage is None:
            assert region.tensor is not None
            tensor = region.tensor
            target.view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=True)
        else:
            source = torch.empty(0, dtype=torch.uint8, device=region.device)
            source.set_(region.storage, region.start, (region.size_bytes,), (1,))
            target.copy_(source, non_blocking=True)


def _copy_host(regions: list[_Region]) -> dict[tuple[int, int], bytes]:
    """Copy between host memory, without the GIL: `memmove` takes two thirds of `copy_`'s time.

    Returns:
        `StagedState.digests`, which are computed while what was copied is in the processor's
        cache: the third that was saved. Later they would take the loop's processor time, and ask
        for the GIL for each block.
    """
    pieces: list[tuple[_Region, int, int]] = []
    for region in regions:
        for start in range(0, region.size_bytes, _COPY_BYTES):
            pieces.append((region, start, min(region.size_bytes, start + _COPY_BYTES)))
    total_bytes = sum(region.size_bytes for region in regions)
    threads = min(torch.get_num_threads(), _MOST_THREADS, math.ceil(total_bytes / _COPY_BYTES))
    step_bytes = min(_CACHED_BYTES * max(1, threads), BLOCK_SIZE_BYTES)

    def copy(piece: tuple[_Region, int, int]) -> bytes:
        region, start, end = piece
        assert region.storage is not None
        assert region.array is not None
        source = region.storage.data_ptr() + region.start + start
        if not region.is_payload or region.size_bytes < _HASHED_BYTES:
            ctypes.memmove(region.address + start, source, end - start)
            return b""
        return _copy_and_digest(region.array[start:end], region.address + start, source, step_bytes)

    if threads <= 1:
        digests = [copy(piece) for piece in pieces]
    else:
        with DaemonPool(threads, "stage") as pool:
            digests = [done.result() for done in [pool.submit(copy, piece) for piece in pieces]]
    found: dict[tuple[int, int], bytes] = {}
    for (region, _, _), some in zip(pieces, digests, strict=True):
        if some:
            place = region.address, region.size_bytes
            found[place] = found.get(place, b"") + some
    return found


def _copy_and_digest(target: ByteArray, address: int, source: int, step_bytes: int) -> bytes:
    """Copy a whole number of blocks (the last may be short); the digests of what was copied."""
    digests = b""
    for block in range(0, target.nbytes, BLOCK_SIZE_BYTES):
        state = BlockDigest()
        block_end = min(block + BLOCK_SIZE_BYTES, target.nbytes)
        for start in range(block, block_end, step_bytes):
            end = min(start + step_bytes, block_end)
            ctypes.memmove(address + start, source + start, end - start)
            state.update(target[start:end])
        digests += state.digest()
    return digests


_memory = StagingMemory()
# What a forked child has of its parent's. Never given back there: unpinning takes a call of CUDA,
# which does not work in a forked child.
_inherited: list[StagingMemory] = []


def staging_memory() -> StagingMemory:
    """The memory of this process: one, so that writers which follow one another share it."""
    return _memory


def _forget_parent() -> None:
    global _memory  # noqa: PLW0603 - see `_inherited`
    _inherited.append(_memory)
    _memory = StagingMemory()


os.register_at_fork(after_in_child=_forget_parent)


def stage(state_dict: Mapping[str, Any]) -> StagedState:
    """A copy of the state in host memory; returns when training may change the state."""
    staging = Staging(state_dict, staging_memory())
    staging.finish()
    return staging.state
