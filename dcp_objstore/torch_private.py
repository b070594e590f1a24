"""The parts of torch's private API that the package uses.

Private names may change in any release. So each is used only here, behind a name of this project,
and `tests/test_torch_private.py` calls each with the installed torch. The docstrings name the
releases that have it. The names of classes in pickles are data, not API; they are in `compat`.
"""

from __future__ import annotations

import copy
import dataclasses
import datetime
import inspect
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed._shard.sharded_tensor.api import (
    # What FSDP1 shards without a device mesh. torch 2.9 to 2.15.
    ShardedTensor,
)
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint._async_process_executor import (
    # Saves in a spawned child for `dcp.async_save`, in process mode. torch 2.9 to 2.15.
    _ProcessBasedAsyncCheckpointExecutor as ProcessExecutor,
)
from torch.distributed.checkpoint._async_thread_executor import (
    # Saves in a thread for `dcp.async_save`, in thread mode. torch 2.9 to 2.15.
    _ThreadBasedAsyncCheckpointExecutor as ThreadExecutor,
)
from torch.distributed.checkpoint._nested_dict import (  # type: ignore[attr-defined]
    flatten_state_dict,
    # Puts a value into a nested dict. torch 2.9 to 2.15.
    set_element,
)
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING as MemoryFormatEncoding  # noqa: N811 - a class
from torch.distributed.checkpoint.state_dict import _get_fqns
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.nn import functional as dist_functions
from torch.distributed.remote_device import _remote_device
from torch.distributed.tensor import DTensor

from dcp_objstore.contexts import contextmanager

# Process groups.


def default_store() -> dist.Store:  # type: ignore[name-defined]  # torch exports it
    """Return the store of the default process group. torch 2.9 to 2.15."""
    return dist.distributed_c10d._get_default_store()


def is_registered(group: dist.ProcessGroup) -> bool:
    """Return whether the group still exists: it was made and not destroyed. torch 2.9 to 2.15."""
    return group in dist.distributed_c10d._world.pg_map


def is_in_default_group() -> bool:
    """Return whether the `dcp.async_save` that calls this saves in the default group, in a thread.

    `async_save` tells a stager nothing of that, so its arguments are read from its frame.
    torch 2.9 to 2.15.
    """
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_name != "async_save":
        frame = frame.f_back
    if frame is None or frame.f_globals.get("__name__") != state_dict_saver.__name__:
        return False
    arguments = frame.f_locals
    kind = arguments["async_checkpointer_type"]
    in_thread = kind is state_dict_saver.AsyncCheckpointerType.THREAD
    is_alone = arguments["no_dist"] or not dist.is_initialized() or dist.get_world_size() == 1
    return in_thread and not is_alone and arguments["process_group"] is None


def count_groups() -> int:
    """Return the number of groups of this rank, part of the next one's name. torch 2.9 to 2.15."""
    return len(dist.distributed_c10d._world.pg_names)


@contextmanager
def groups_named_from(number: int) -> Iterator[None]:
    """Name the groups that `new_group` makes in the block after `number`. torch 2.9 to 2.14.

    Otherwise torch counts them from 0. (A group of some ranks only, made with
    `use_local_synchronization=True`, has a name of another form.)
    """
    world = dist.distributed_c10d._world
    before, world.group_count = world.group_count, number
    try:
        yield
    finally:
        world.group_count = before


def has_cpu_backend(group: dist.ProcessGroup) -> bool:
    """Return whether the group's collectives take CPU tensors. torch 2.9 to 2.15."""
    return torch.device("cpu") in group._device_types


def set_group_timeout(group: dist.ProcessGroup, timeout: datetime.timedelta) -> None:
    """Change how long collectives of an existing group wait. torch 2.9 to 2.15, public in 2.15."""
    name = "set_timeout" if hasattr(dist.distributed_c10d, "set_timeout") else "_set_pg_timeout"
    getattr(dist.distributed_c10d, name)(timeout, group)


def unbind_default_group() -> None:
    """Make the functions of `torch.distributed.nn` refer to the default group by None.

    None is their default argument if the module is imported before `init_process_group`. If it is
    imported later, as DDP and torch.compile do it, they keep the group itself. Then its threads
    stay after `destroy_process_group`, and one of them may abort Python at its end. torch 2.9 to
    2.15.
    """
    for function in vars(dist_functions).values():
        if isinstance(function, FunctionType) and function.__defaults__:
            function.__defaults__ = tuple(
                None if isinstance(value, dist.ProcessGroup) else value
                for value in function.__defaults__
            )


# Tensors and modules.


def is_fake(tensor: torch.Tensor) -> bool:
    """Return whether it is a `FakeTensor`, which has no memory. torch 2.9 to 2.15."""
    return isinstance(tensor, FakeTensor)


def untyped_storage(storage: torch.TypedStorage | torch.UntypedStorage) -> torch.UntypedStorage:
    """Return the storage without a dtype; the public `untyped()` warns. torch 2.9 to 2.15."""
    return storage if isinstance(storage, torch.UntypedStorage) else storage._untyped_storage


def storage_number(tensor: torch.Tensor) -> int:
    """Return what tells storages apart, also empty ones, while they live. torch 2.9 to 2.15."""
    return int(tensor.untyped_storage()._cdata)


def copied_to_host(value: ShardedTensor) -> ShardedTensor:
    """Copy this rank's shards of a ShardedTensor (FSDP1) to host memory. torch 2.9 to 2.15."""
    metadata = copy.deepcopy(value.metadata())
    # The placement says where a shard is, as "rank:0/cuda:0".
    for shard in metadata.shards_metadata:
        rank = None if shard.placement is None else shard.placement.rank()
        shard.placement = None if rank is None else _remote_device(f"rank:{rank}/cpu")
    at = {tuple(shard.shard_offsets): shard for shard in metadata.shards_metadata}
    shards = [
        Shard(shard.tensor.detach().to("cpu", copy=True), at[tuple(shard.metadata.shard_offsets)])
        for shard in value.local_shards()
    ]
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        shards, metadata, process_group=value._process_group
    )


def local_tensor(value: Any) -> Any:
    """Return this rank's shard of a DTensor, else the value. torch 2.9 to 2.15.

    It is the shard itself, while `DTensor.to_local` makes a new tensor that autograd knows, and
    waits for a collective that is under way.
    """
    return value._local_tensor if isinstance(value, DTensor) else value


def spec_of(value: DTensor) -> Any:
    """Return the mesh, placements, global shape and strides of a DTensor. torch 2.9 to 2.15."""
    return value._spec


def dtensor(local: torch.Tensor, spec: Any) -> DTensor:
    """Make a `DTensor` of a shard and a spec. Not a collective. torch 2.9 to 2.15.

    `DTensor.from_local` would need the strides, and cannot take uneven shards without them.
    """
    return DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]


def dtensor_alike(local: torch.Tensor, like: DTensor) -> DTensor:
    """Make a DTensor of a shard, with the mesh, placements and shape of another. torch 2.9 to 2.15.

    Not a collective; the dtype is the shard's.
    """
    spec = spec_of(like)
    if spec.tensor_meta.dtype != local.dtype:
        meta = spec.tensor_meta._replace(dtype=local.dtype)
        spec = dataclasses.replace(spec, tensor_meta=meta)
    return dtensor(local, spec)


# The attributes that DCP asks how a tensor is sharded: the methods of `_Checkpointable` (torch 2.9
# to 2.15) and the fields of `CheckpointableTensor` (torch 2.14 and 2.15).
_SHARDING = (
    *("__create_write_items__", "__create_chunk_list__", "__get_tensor_shard__"),
    *("global_shape", "global_offsets", "local_offsets", "local_sizes"),
)


def own_sharding(tensor: torch.Tensor) -> dict[str, Any]:
    """Return what is set on this very tensor to tell DCP how it is sharded. torch 2.9 to 2.15.

    Megatron-FSDP sets such methods on the shards of its DTensors.
    """
    attributes = vars(tensor)  # without those of its class
    return {name: attributes[name] for name in _SHARDING if name in attributes}


def size_in_checkpoint(tensor: torch.Tensor) -> torch.Size:
    """Return the size of the whole of which DCP takes a tensor to be a part. torch 2.9 to 2.15.

    Only a `CheckpointableTensor` has another size itself.
    """
    protocol: Any = getattr(dcp, "CheckpointableTensor", ())  # from torch 2.14 on
    return torch.Size(tensor.global_shape) if isinstance(tensor, protocol) else tensor.size()


def waited(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor when the collective that makes it, if any, has ended. torch 2.9 to 2.15."""
    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


# A wrapper is a tensor without memory that says by `__tensor_flatten__` which tensors it is made
# of. `is_traceable_wrapper_subclass` looks for the same methods.


def is_wrapper(value: object) -> bool:
    """Return whether it is a wrapper. torch 2.9 to 2.15."""
    is_made_of_tensors = hasattr(type(value), "__tensor_flatten__")
    return is_made_of_tensors and not getattr(value, "is_nested", False)


def parts(value: Any) -> list[Any]:
    """Return what a wrapper, and wrappers in it, are made of; or the value. torch 2.9 to 2.15.

    A DTensor is made of this rank's shard.
    """
    if type(value) is torch.Tensor:  # the most by far
        return [value]
    value = waited(local_tensor(value))
    if not is_wrapper(value):
        return [value]
    return [part for tensor in _inner(value).values() for part in parts(tensor)]


def rebuilt(value: Any, new_parts: Iterator[Any]) -> Any:
    """Return a value like this one, made of other parts. torch 2.9 to 2.15.

    Args:
        value: a wrapper, or any other value, which is its own only part.
        new_parts: what takes the place of `parts(value)`, in their order.
    """
    if type(value) is torch.Tensor:
        return next(new_parts)
    value = waited(value)
    if isinstance(value, DTensor):
        return dtensor(rebuilt(local_tensor(value), new_parts), spec_of(value))
    if not is_wrapper(value):
        return next(new_parts)
    names, context = value.__tensor_flatten__()
    inner = {name: getattr(value, name) for name in names}
    inner |= {name: rebuilt(tensor, new_parts) for name, tensor in _inner(value).items()}
    return type(value).__tensor_unflatten__(inner, context, value.size(), value.stride())


def _inner(wrapper: Any) -> dict[str, torch.Tensor]:
    """Return the tensors that a wrapper names; it may name other objects, too."""
    named = {name: getattr(wrapper, name) for name in wrapper.__tensor_flatten__()[0]}
    return {name: value for name, value in named.items() if isinstance(value, torch.Tensor)}


def are_alike(one: Any, other: Any) -> bool:
    """Return whether they have the same value if their parts have. torch 2.9 to 2.15."""
    try:
        return _form(one) == _form(other)
    except Exception:  # noqa: BLE001 - of contexts that cannot be compared
        return False


def _form(tensor: Any) -> tuple[object, ...]:
    """Return all that a tensor is besides the values of its parts, to be compared."""
    if not is_wrapper(tensor):
        return tensor.dtype, tensor.shape
    names, context = tensor.__tensor_flatten__()
    inner = {name: _form(value) for name, value in _inner(tensor).items()}
    # What it names besides tensors.
    others = [getattr(tensor, name) for name in names if name not in inner]
    return type(tensor), tensor.dtype, tensor.shape, context, inner, others


def is_dispatched(tensor: torch.Tensor) -> bool:
    """Return whether its class runs code in the place of operators. torch 2.9 to 2.15."""
    dispatch = type(tensor).__torch_dispatch__
    return dispatch is not torch.Tensor.__torch_dispatch__ and not isinstance(tensor, DTensor)


def is_opaque(tensor: torch.Tensor) -> bool:
    """Return whether it has no memory and does not say what it is made of. torch 2.9 to 2.15.

    A fake tensor has no memory either, but may stand for one that has.
    """
    if not is_dispatched(tensor) or is_wrapper(tensor) or is_fake(tensor):
        return False
    return bool(tensor.numel()) and not tensor.data_ptr()


class HostStager(StateDictStager):
    """Copies values to host memory as `dcp.async_save` does. torch 2.9 to 2.15.

    Args:
        copied: a function that returns the copy of a tensor, or None to have torch copy it.
    """

    def __init__(self, copied: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
        super().__init__()
        self._copied = copied

    def _offload_tensor(self, x: torch.Tensor, memo: Any, non_blocking: bool = False) -> Any:
        """Override `StateDictStager._offload_tensor`: `copied` comes first."""
        copied = self._copied(x)
        if copied is None:
            return super()._offload_tensor(x, memo, non_blocking)  # type: ignore[no-untyped-call]
        memo[id(x)] = copied  # for the next place of the state that has the same tensor
        return copied


def all_parameters(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield each name that `get_model_state_dict` gives a parameter, with it. torch 2.9 to 2.15.

    A parameter that is shared has several names, and a flat one of FSDP1 stands for several.
    """
    for name, parameter in module.named_parameters(remove_duplicate=False):
        for saved_name in _get_fqns(module, name):  # without the names of wrappers
            yield saved_name, parameter


def has_flat_parameters(module: torch.nn.Module) -> bool:
    """Whether FSDP1 has wrapped the module or a part of it. torch 2.9 to 2.15."""
    return bool(FullyShardedDataParallel.fsdp_modules(module))


class StagesAtOnce:
    """Base of an `AsyncStager` whose `stage` copies everything. torch 2.9 to 2.15.

    `AsyncStager` is a protocol with a private member. Without that member, `dcp.async_save` does
    not accept a writer as a stager.
    """

    # Nothing is left to wait for when `stage` has returned.
    _synchronize_after_execute = should_synchronize_after_execute = False


# Names in pickles.

# Each `.metadata` contains `StorageInfo` (the place of an item) and `MemoryFormatEncoding`, under
# their private names. torch 2.9 to 2.15.

# The function by which a pickle refers to a layout, such as `torch.strided`. torch 2.9 to 2.15.
layout_by_name = torch.serialization._get_layout


def storage_classes() -> dict[torch.dtype, str]:
    """Return the name of the legacy storage class of each dtype. torch 2.9 to 2.15."""
    classes: dict[torch.dtype, str] = torch.storage._dtype_to_storage_type_map()
    return classes


def flattened(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a nested state by the keys that DCP gives them. torch 2.9 to 2.15."""
    return flatten_state_dict(dict(state_dict))[0]


def legacy_classes() -> tuple[type, ...]:
    """Return the typed tensor and storage classes, such as `FloatTensor`. torch 2.9 to 2.15."""
    return (*torch._tensor_classes, *torch._storage_classes)


__all__ = [  # what is imported here for others
    "MemoryFormatEncoding",
    "ProcessExecutor",
    "ShardedTensor",
    "StorageInfo",
    "ThreadExecutor",
    "set_element",
]
