"""The process groups that checkpoint collectives run in."""

from __future__ import annotations

import datetime

import torch
import torch.distributed as dist

from dcp_objstore.config import TransferConfig
from dcp_objstore.errors import UnsupportedError

# The gloo groups made here, by purpose, the group whose ranks they have, and time-out. They belong
# to the world that they were made in, which is kept beside each: a destroyed world's are dropped.
# Nothing else may drop one, because all its ranks would have to make it again together.
_own: dict[tuple[str, dist.ProcessGroup, float], tuple[dist.ProcessGroup, dist.ProcessGroup]] = {}


def current_rank() -> int | None:
    """The global rank, or None without a process group."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else None


def sync_group(
    process_group: dist.ProcessGroup | None, config: TransferConfig | None = None
) -> dist.ProcessGroup | None:
    """The group for the collectives of a call that waits: the given one, or the default one.

    Where the default group has no CPU backend (NCCL alone), a gloo group of our own with the same
    ranks: pickled plans do not belong on a GPU. Making it is a collective of all ranks, once.
    """
    if process_group is not None or current_rank() is None:
        return process_group
    world = dist.distributed_c10d._get_default_group()
    if torch.device("cpu") in world._device_types:
        return None
    return own_group("sync", None, config)


def own_group(
    purpose: str, process_group: dist.ProcessGroup | None, config: TransferConfig | None = None
) -> dist.ProcessGroup | None:
    """A gloo group of our own with the same ranks, beside the training's collectives.

    Collectives of two threads in one group would be matched in whatever order they come, so each
    thread has a group with a purpose of its own. Making one is a collective of its ranks, once;
    its time-out is `config.peer_timeout_seconds`.

    Raises:
        UnsupportedError: torch cannot make a group of these ranks.
    """
    if current_rank() is None:
        return None
    world = dist.distributed_c10d._get_default_group()
    for key in [key for key, (_, home) in _own.items() if home is not world]:
        del _own[key]
    timeout_seconds = (config or TransferConfig()).peer_timeout_seconds
    key = (purpose, process_group or world, timeout_seconds)
    if key not in _own:
        ranks = None
        if process_group is not None:
            _refuse_unlike_names(process_group)
            ranks = dist.get_process_group_ranks(process_group)
        made = dist.new_group(
            ranks,
            timeout=datetime.timedelta(seconds=timeout_seconds),
            backend="gloo",
            use_local_synchronization=ranks is not None,
        )
        _own[key] = (made, world)
    return _own[key][0]


def _refuse_unlike_names(group: dist.ProcessGroup) -> None:
    """Raise on all ranks of the group where torch would wait in vain.

    Made by some ranks only, a group gets its name from the number of groups that its rank is in;
    ranks with different names for it never meet.
    """
    counts: list[int] = [0] * dist.get_world_size(group)
    dist.all_gather_object(counts, len(dist.distributed_c10d._world.pg_names), group=group)
    if len(set(counts)) > 1:
        raise UnsupportedError(
            "torch cannot make a process group of these ranks alone, because some of them are in"
            " more groups than others; leave process_group out, or save with"
            " dcp_objstore.save"
        )
