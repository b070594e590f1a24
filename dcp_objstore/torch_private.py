"""Everything that the package uses of torch's private API.

Private names may change in any release. So each is used only here, behind a name of this project,
and `tests/test_torch_private.py` calls each with the installed torch. The docstrings name the
releases that have it. The names of classes in pickles are data, not API; they are in `compat`.
"""

from __future__ import annotations

import copy
import dataclasses
import datetime
from types import FunctionType
from typing import TYPE_CHECKING, Any

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
from torch.distributed.checkpoint._async_process_executor import (
    # Saves in a spawned child for `dcp.async_save`, in process mode. torch 2.9 to 2.15.
    _ProcessBasedAsyncCheckpointExecutor as ProcessExecutor,
)
from torch.distributed.checkpoint._async_thread_executor import (
    # Saves in a thread for `dcp.async_save`, in thread mode. torch 2.9 to 2.15.
    _ThreadBasedAsyncCheckpointExecutor as ThreadExecutor,
)
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING as MemoryFormatEncoding,  # noqa: N811 - a class
)
from torch.distributed.checkpoint.state_dict import _get_fqns
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.nn import functional as dist_functions
from torch.distributed.remote_device import _remote_device
from torch.distributed.tensor import DTensor

from dcp_objstore.contexts import contextmanager

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

# Process groups.


def default_store() -> dist.Store:  # type: ignore[name-defined]  # torch exports it
    """Return the store of the default process group. torch 2.9 to 2.15."""
    return dist.distributed_c10d._get_default_store()


def is_registered(group: dist.ProcessGroup) -> bool:
    """Return whether the group still exists: it was made and not destroyed. torch 2.9 to 2.15."""
    return group in dist.distributed_c10d._world.pg_map


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
    counted, world.group_count = world.group_count, number
    try:
        yield
    finally:
        world.group_count = counted


def has_cpu_backend(group: dist.ProcessGroup) -> bool:
    """Return whether the group's collectives take CPU tensors. torch 2.9 to 2.15."""
    return torch.device("cpu") in group._device_types


def set_group_timeout(group: dist.ProcessGroup, timeout: datetime.timedelta) -> None:
    """Change how long collectives of an existing group wait. torch 2.9 to 2.15, public in 2.15."""
    name = "set_timeout" if hasattr(dist.distributed_c10d, "set_timeout") else "_set_pg_timeout"
    getattr(dist.distributed_c10d, name)(timeout, group)


def unbind_default_group() -> None:
    """Make the functions of `torch.distributed.nn` refer to the default group by None.

    That is their default argument if the module is imported before `init_process_group`. If it is
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


def local_tensor(value: DTensor) -> torch.Tensor:
    """Return this rank's shard itself, without autograd or waiting. torch 2.9 to 2.15.

    `DTensor.to_local` makes a new tensor, and waits for a collective that is under way.
    """
    return value._local_tensor


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
    attributes = vars(tensor)
    return {name: attributes[name] for name in _SHARDING if name in attributes}


def size_in_checkpoint(tensor: torch.Tensor) -> torch.Size:
    """Return the size of the whole of which DCP takes a tensor to be a part. torch 2.9 to 2.15.

    Only a `CheckpointableTensor` has another size itself.
    """
    protocol: Any = getattr(dcp, "CheckpointableTensor", ())  # from torch 2.14 on
    return torch.Size(tensor.global_shape) if isinstance(tensor, protocol) else tensor.size()


def wait_for_collective(tensor: torch.Tensor) -> None:
    """Wait for the collective that makes this tensor, if there is one. torch 2.9 to 2.15."""
    if isinstance(tensor, AsyncCollectiveTensor):
        tensor.wait()


def non_persistent_buffers(module: torch.nn.Module) -> Collection[str]:
    """Return the names of the module's own buffers that `state_dict` omits. torch 2.9 to 2.15."""
    return module._non_persistent_buffers_set


def all_parameters(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield each name that `get_model_state_dict` gives a parameter, with it. torch 2.9 to 2.15.

    A parameter that is shared has several names, and a flat one of FSDP1 stands for several.
    """
    for name, parameter in module.named_parameters(remove_duplicate=False):
        for saved_name in _get_fqns(module, name):
            yield saved_name, parameter


def has_flat_parameters(module: torch.nn.Module) -> bool:
    """Whether FSDP1 has wrapped the module or a part of it. torch 2.9 to 2.15."""
    return bool(FullyShardedDataParallel.fsdp_modules(module))


class StagesAtOnce:
    """Base of an `AsyncStager` whose `stage` copies everything. torch 2.9 to 2.15.

    `AsyncStager` is a protocol with a private member. Without that member, `dcp.async_save` does
    not accept a writer as a stager.
    """

    _synchronize_after_execute = False

    @property
    def should_synchronize_after_execute(self) -> bool:
        """False: nothing is left to wait for when `stage` has returned."""
        return self._synchronize_after_execute


# Names in pickles.

# Each `.metadata` contains `StorageInfo` (the place of an item) and `MemoryFormatEncoding`, under
# their private names. torch 2.9 to 2.15.

# The function by which a pickle refers to a layout, such as `torch.strided`. torch 2.9 to 2.15.
layout_by_name = torch.serialization._get_layout


def storage_classes() -> dict[torch.dtype, str]:
    """Return the name of the legacy storage class of each dtype. torch 2.9 to 2.15."""
    classes: dict[torch.dtype, str] = torch.storage._dtype_to_storage_type_map()
    return classes


def legacy_classes() -> tuple[type, ...]:
    """Return the typed tensor and storage classes, such as `FloatTensor`. torch 2.9 to 2.15."""
    return (*torch._tensor_classes, *torch._storage_classes)


__all__ = [
    "MemoryFormatEncoding",
    "ProcessExecutor",
    "ShardedTensor",
    "StagesAtOnce",
    "StorageInfo",
    "ThreadExecutor",
    "all_parameters",
    "copied_to_host",
    "count_groups",
    "default_store",
    "dtensor",
    "dtensor_alike",
    "groups_named_from",
    "has_cpu_backend",
    "has_flat_parameters",
    "is_fake",
    "is_registered",
    "layout_by_name",
    "legacy_classes",
    "local_tensor",
    "non_persistent_buffers",
    "own_sharding",
    "set_group_timeout",
    "size_in_checkpoint",
    "spec_of",
    "storage_classes",
    "unbind_default_group",
    "wait_for_collective",
]
