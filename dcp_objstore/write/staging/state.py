"""Staging: copy a state to host memory, so that training may change the state.

`staging.regions` plans the copy. As many threads as torch is set to use copy host memory, and hash
what they copy; a device copies its memory itself, on a separate stream.
"""

from __future__ import annotations

import copy
import ctypes
import io
import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import closing
from functools import partial
from types import MappingProxyType
from typing import Any, NoReturn

import torch
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from dcp_objstore import torch_private
from dcp_objstore.config import MIB
from dcp_objstore.distributed.plugin import by_cause
from dcp_objstore.errors import DcpObjstoreError, UnsupportedError
from dcp_objstore.forking import PerProcess
from dcp_objstore.state import device
from dcp_objstore.state.ring import Ticket
from dcp_objstore.state.tensor_frame import PLAIN_TYPES, check_kind, pickled_blob
from dcp_objstore.torch_private import parts, rebuilt
from dcp_objstore.transfer.digests import BLOCK_SIZE_BYTES, BlockDigest
from dcp_objstore.transfer.memory import ByteArray
from dcp_objstore.transfer.workers import DaemonPool
from dcp_objstore.write.staging.memory import StagingMemory
from dcp_objstore.write.staging.regions import Region, copy_of, lay, plan_regions

_SCALARS = frozenset({bool, int, float, complex, str, bytes, type(None)})
_CONTAINERS = frozenset({dict, OrderedDict, list, tuple})
# A copying thread takes this many bytes at a time: whole digest blocks.
_COPY_BYTES = 32 * MIB
# Tensors of at least this size are hashed as they are copied, in steps so small that source and
# copy fit a core's own cache. With more threads the steps are larger, because each step takes the
# GIL twice.
_HASHED_BYTES = MIB
_CACHED_BYTES = 256 * 1024
_MOST_THREADS = 8


class StagedState(dict[str, Any]):
    """The copy of a state: a dict that can be weakly referenced. When it dies, the save has ended.

    Attributes:
        size_bytes: the size of the copy.
        digests: the `block_digests` of the large contiguous tensors that were copied within host
            memory, by the address and size in bytes of their memory.
    """

    size_bytes: int
    digests: Mapping[tuple[int, int], bytes] = MappingProxyType({})

    def __reduce__(self) -> tuple[Any, ...]:
        # `multiprocessing` sends the memory of a tensor to a child, but no attributes.
        state = dict(self)
        return _receive, (state, [*map(torch_private.own_sharding, _tensors(state))])


def _receive(state: dict[str, Any], sharding: list[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the state that a parent has staged, in the child that saves it."""
    for tensor, own in zip(_tensors(state), sharding, strict=True):
        vars(tensor).update(own)
    return state


class Staging:
    """A copy of a state in progress.

    The constructor starts the copies from devices; `finish` makes those within host memory. Until
    `finish` has returned, no tensor of the state may be changed.

    Args:
        state_dict: nested dicts, lists and tuples of anything. Tensors are copied, scalars are used
            as they are, and all other values are deep-copied together.
        memory: the memory for the copies of tensors.

    Attributes:
        state: the copy, complete once `finish` has returned.
    """

    def __init__(self, state_dict: Mapping[str, Any], memory: StagingMemory) -> None:
        """Lay out the copy, copy what is not a tensor, and start the copies from devices.

        `finish` copies what is in host memory, and waits for the devices.
        """
        # All of these dicts are by the id of the value. A leaf is a value in a container. A leaf
        # that is a wrapper, such as a DTensor, is made of units, which are copied one by one. Any
        # other leaf is its only unit.
        leaves = {id(leaf): leaf for value in state_dict.values() for leaf in _leaves(value)}
        # The lists keep the parts of wrappers alive, and so their ids.
        made_of = {key: parts(leaf) for key, leaf in leaves.items() if type(leaf) not in _SCALARS}
        units = {id(unit): unit for of_leaf in made_of.values() for unit in of_leaf}
        tensors = {key: unit for key, unit in units.items() if _is_copied_raw(unit)}
        others = {key: unit for key, unit in units.items() if key not in tensors}
        try:
            copies = dict(zip(others, _deep_copies([*others.values()]), strict=True))
        except Exception as error:
            raise _not_copied(state_dict, error) from error
        self._tickets: list[Ticket] = []
        self._host: list[Region] = []
        copies |= self._begin(tensors, memory)
        for key, of_leaf in made_of.items():
            if key not in units:  # a wrapper, whose copy is made of the copies of its units
                copied_units = iter([copies[id(unit)] for unit in of_leaf])
                copies[key] = rebuilt(leaves[key], copied_units)
        _keep_sharding(leaves, copies, state_dict)
        self.state = StagedState(
            (name, _rebuilt(value, copies)) for name, value in state_dict.items()
        )
        self.state.size_bytes = self._size_bytes
        # Keeps the tensors alive, because their memory is read until `finish` has returned.
        self._sources = list(tensors.values())

    def _begin(
        self, tensors: Mapping[int, torch.Tensor], memory: StagingMemory
    ) -> dict[int, torch.Tensor]:
        """Queue the copies from devices; return the copies, by the id of their tensor."""
        places = plan_regions(list(tensors.values()))
        regions = list({id(region): region for region, _ in places.values()}.values())
        self._size_bytes = sum(region.size_bytes for region in regions)
        # A GPU copies by itself only to pinned memory.
        for pinned in (True, False):
            alike = [region for region in regions if (region.device.type == "cuda") == pinned]
            lay(alike, memory, pinned=pinned)
        by_device: dict[torch.device, list[Region]] = {}
        for region in regions:
            by_device.setdefault(region.device, []).append(region)
        for source_device, of_device in by_device.items():
            lane = device.lane_of(source_device, "out")
            if lane is None:  # host memory, or a device without a queue of copies
                self._host += of_device
            else:
                lane.follow()  # the copies come after what training has queued so far
                self._tickets.append(lane.queue(partial(_copy_by_torch, of_device)))
        # A tensor without memory, such as an empty one, has no place.
        return {
            key: copy_of(tensor, *places[key]) if key in places else _without_memory(tensor)
            for key, tensor in tensors.items()
        }

    def finish(self) -> None:
        """Copy within host memory, and wait for the copies from devices."""
        # `_copy_host` copies bytes of storages in host memory. Torch copies the rest: tensors that
        # are packed, and memory of devices that have no queue of copies.
        host: list[Region] = []
        others: list[Region] = []
        for region in self._host:
            of_host = region.device.type == "cpu" and region.storage is not None
            (host if of_host else others).append(region)
        self._host.clear()
        self.state.digests = _copy_host(host)
        _copy_by_torch(others)
        for ticket in self._tickets:
            ticket.synchronize()
        self._tickets.clear()
        self._sources.clear()


def _copy_by_torch(regions: list[Region]) -> None:
    """Copy with torch; copies from devices that work asynchronously are only queued."""
    for region in regions:
        target = torch.from_numpy(region.array)
        if region.storage is None:  # closely packed
            assert region.tensor is not None
            tensor = region.tensor
            target.view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=True)
        else:
            source = torch.empty(0, dtype=torch.uint8, device=region.device)
            source.set_(region.storage, region.start, (region.size_bytes,), (1,))
            target.copy_(source, non_blocking=True)


def _copy_host(regions: list[Region]) -> dict[tuple[int, int], bytes]:
    """Copy within host memory, without the GIL. `memmove` takes two thirds of `copy_`'s time.

    The saved third pays for the digests, which are computed while the copied bytes are in the
    processor's cache. Computed later, they would take processor time from the training loop, and
    the GIL for each block.

    Returns:
        The digests of the large contiguous tensors, by the address and size of the copy, as in
        `StagedState.digests`.
    """
    pieces: list[tuple[Region, int, int]] = []  # bytes `[start, end)` of a region
    for region in regions:
        for start in range(0, region.size_bytes, _COPY_BYTES):
            pieces.append((region, start, min(region.size_bytes, start + _COPY_BYTES)))
    total_bytes = sum(region.size_bytes for region in regions)
    # None if there is nothing to copy.
    threads = min(torch.get_num_threads(), _MOST_THREADS, math.ceil(total_bytes / _COPY_BYTES))
    step_bytes = min(_CACHED_BYTES * max(1, threads), BLOCK_SIZE_BYTES)

    def copy(piece: tuple[Region, int, int]) -> bytes:
        """Copy a piece; return its digests if it is part of a large contiguous tensor."""
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
            futures = [pool.submit(copy, piece) for piece in pieces]
            digests = [future.result() for future in futures]
    of_tensors: dict[tuple[int, int], bytes] = {}  # by address and size
    for (region, _, _), of_piece in zip(pieces, digests, strict=True):
        if of_piece:
            place = region.address, region.size_bytes
            of_tensors[place] = of_tensors.get(place, b"") + of_piece
    return of_tensors


def _copy_and_digest(target: ByteArray, address: int, source: int, step_bytes: int) -> bytes:
    """Copy a whole number of blocks (the last may be short) and return their digests."""
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


def _leaves(value: Any) -> Iterator[Any]:
    """Yield every value that is not a container to descend into."""
    if type(value) in _CONTAINERS:
        for item in value.values() if isinstance(value, dict) else value:
            yield from _leaves(item)
    else:
        yield value


def _rebuilt(value: Any, copies: Mapping[int, Any], *, is_item: bool = True) -> Any:
    """Return a value with the copies of its leaves, in new containers of the same types.

    Args:
        copies: the copy of each leaf, by the id of the leaf.
        is_item: whether DCP stores each tensor in it as a separate item. It is False inside of a
            tuple, which DCP pickles as a whole.
    """
    kind = type(value)
    if kind in _SCALARS:
        return value
    if kind not in _CONTAINERS:
        if is_item and isinstance(value, torch.Tensor):
            try:
                check_kind(value)
            except UnsupportedError as error:
                # DCP asks this empty tensor for its write items when it plans the save. It raises
                # the error then, from where it reaches all ranks.
                refused = torch.empty(0, device="cpu")
                vars(refused)["__create_write_items__"] = partial(_refuse, error)
                return refused
        return copies[id(value)]
    is_item = is_item and kind is not tuple
    if isinstance(value, dict):
        return kind((key, _rebuilt(item, copies, is_item=is_item)) for key, item in value.items())
    return kind(_rebuilt(item, copies, is_item=is_item) for item in value)


def _keep_sharding(
    leaves: Mapping[int, Any], copies: dict[int, Any], state: Mapping[str, Any]
) -> None:
    """Give the copies of tensors their attributes that tell DCP how they are sharded.

    An attribute may be a method of a tensor of the state. It is deep-copied with `copies` as the
    memo, which makes it a method of the copy of that tensor.

    Args:
        leaves: the leaves of the state, by id.
        copies: the copies of leaves and their parts, by the id of the original.
        state: the state, in which an error finds the key of a tensor.

    Raises:
        UnsupportedError: an attribute returns the tensor's own memory, not that of the copy.
    """
    tensors = [leaf for leaf in leaves.values() if isinstance(leaf, torch.Tensor)]
    for sharded in [leaf for leaf in tensors if isinstance(leaf, DTensor)]:
        shard = torch_private.local_tensor(sharded)
        copies[id(shard)] = torch_private.local_tensor(copies[id(sharded)])
        tensors.append(shard)
    for tensor in tensors:
        for attribute, value in torch_private.own_sharding(tensor).items():
            copied = copies[id(tensor)]
            value_of_copy = copy.deepcopy(value, copies)
            # `deepcopy` returns a function as it is, and it knows only the tensor of the state.
            if attribute == "__get_tensor_shard__" and value_of_copy is value:
                raise UnsupportedError(
                    f"a tensor of shape {tuple(tensor.shape)} is not copied with its {attribute}",
                    advice="set a functools.partial in its place, or save with dcp_objstore.save",
                    key=next(
                        name
                        for name, value in state.items()
                        if any(part is tensor for part in _tensors(value))
                    ),
                )
            setattr(copied, attribute, value_of_copy)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor that is a leaf; after a DTensor, this rank's shard."""
    for leaf in _leaves(value):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        if isinstance(leaf, DTensor):
            yield torch_private.local_tensor(leaf)


def _refuse(error: UnsupportedError, key: str, _: object) -> NoReturn:
    """Raise an error in place of making the write items of a tensor with this key."""
    raise error.at(key=key)


def _is_copied_raw(unit: Any) -> bool:
    """Return whether a unit is a tensor whose memory is copied; others are deep-copied."""
    if type(unit) not in PLAIN_TYPES or unit.layout != torch.strided:
        return False
    return not (unit.is_quantized or unit.is_nested)


def _deep_copies(values: list[Any]) -> list[Any]:
    """Copy quantized tensors, subclasses and other objects as DCP's own stager does.

    The memory of these copies is not kept for the next save.
    """
    with closing(torch_private.HostStager(_copied)) as stager:
        copies: list[Any] = stager.stage(values)
    return copies


def _copied(tensor: torch.Tensor) -> torch.Tensor | None:
    """Copy a tensor that DCP's stager would not copy rightly; return None for others."""
    if is_lazy(tensor):  # it has no data yet
        return tensor
    if isinstance(tensor, torch_private.ShardedTensor):
        return torch_private.copied_to_host(tensor)
    is_plain = type(tensor) in PLAIN_TYPES
    if is_plain and tensor.layout != torch.strided:  # such as a sparse tensor
        return tensor.detach().clone()
    # A subclass that runs code in the place of operators, or a quantized or nested tensor, is
    # copied by pickling it.
    if torch_private.is_dispatched(tensor) or (is_plain and not _is_copied_raw(tensor)):
        own: torch.Tensor = torch.load(
            io.BytesIO(pickled_blob(tensor)), weights_only=False, mmap=False
        )
        return own
    return None


def _not_copied(state_dict: Mapping[str, Any], error: Exception) -> DcpObjstoreError:
    """Return what is raised because values cannot be copied, with the key of the first of them."""
    key = None
    for name, value in torch_private.flattened(state_dict).items():
        try:
            if not isinstance(value, torch.Tensor):
                _deep_copies([value])
        except Exception as failed:  # noqa: BLE001 - the first value that fails is named
            key, error = name, failed
            break
    return by_cause(error, "this value cannot be copied, as a save in the background does", key)


def _without_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor without memory, which the writer may refuse."""
    return tensor if tensor.numel() else torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")


_memory = PerProcess(StagingMemory)


def staging_memory() -> StagingMemory:
    """Return the one staging memory of this process, which consecutive writers share."""
    return _memory.here


def stage(state_dict: Mapping[str, Any]) -> StagedState:
    """Copy the state to host memory; when this returns, training may change the state."""
    staging = Staging(state_dict, staging_memory())
    staging.finish()
    return staging.state
