"""The process groups that checkpoint collectives run in."""

from __future__ import annotations

import torch
import torch.distributed as dist

# The gloo groups made here, by the group whose ranks they have. Groups of a destroyed world are
# recognised by the world's identity and dropped.
_own: dict[tuple[str, dist.ProcessGroup], dist.ProcessGroup] = {}


def current_rank() -> int | None:
    """The global rank, or None without a process group."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else None


def sync_group(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The group for the collectives of a call that waits: the given one, or the default one.

    Where the default group has no CPU backend (NCCL alone), a gloo group of our own with the same
    ranks: pickled plans do not belong on a GPU. Making it is a collective of all ranks, once.
    """
    if process_group is not None or current_rank() is None:
        return process_group
    world = dist.distributed_c10d._get_default_group()
    if torch.device("cpu") in world._device_types:
        return None
    return _own_group("sync", world, None)


def background_group(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """A gloo group of our own for saves in the background, beside the training's collectives.

    Collectives of two threads in one group would be matched in whatever order they come. Making
    it is a collective of the group's ranks, once.
    """
    if current_rank() is None:
        return None
    world = process_group or dist.distributed_c10d._get_default_group()
    return _own_group("background", world, process_group)


def _own_group(
    purpose: str, world: dist.ProcessGroup, subset: dist.ProcessGroup | None
) -> dist.ProcessGroup:
    current = dist.distributed_c10d._get_default_group()
    for key in [key for key in _own if key[1] not in (current, world)]:
        del _own[key]
    found = _own.get((purpose, world))
    if found is None:
        ranks = None if subset is None else dist.get_process_group_ranks(subset)
        found = dist.new_group(ranks, backend="gloo", use_local_synchronization=subset is not None)
        _own[purpose, world] = found
    return found
