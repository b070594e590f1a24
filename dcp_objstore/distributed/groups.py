"""The process groups that checkpoint collectives run in."""

from __future__ import annotations

import datetime
from typing import Any

import torch.distributed as dist

from dcp_objstore import torch_private
from dcp_objstore.config import TransferConfig
from dcp_objstore.errors import ConfigError, InputError, UnsupportedError

# The gloo groups made here, by purpose and the group whose ranks they have. They belong to the
# world that they were made in, which is kept beside each: a destroyed world's are dropped.
# Nothing else may drop one, because all its ranks would have to make it again together; and nothing
# that may differ between ranks, such as a setting, may be part of the key.
_own: dict[tuple[str, dist.ProcessGroup], tuple[dist.ProcessGroup, dist.ProcessGroup]] = {}


def current_rank() -> int | None:
    """The global rank, or None without a process group."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else None


def rank_and_world_size() -> tuple[int, int]:
    """The global rank and the number of ranks; (0, 1) without a process group."""
    rank = current_rank()
    return (0, 1) if rank is None else (rank, dist.get_world_size())


def world_group() -> dist.ProcessGroup | None:
    """The default group by name, or None without one."""
    return None if current_rank() is None else dist.group.WORLD


def count_ranks(group: dist.ProcessGroup | None) -> int:
    """How many ranks a call has that was made in this group; one without a group.

    One rank has nobody to exchange plans with. DCP would pickle and unpickle the plan three times
    for itself: 100 objects a tensor, enough for the cyclic collector to walk through the whole
    program twice.
    """
    return 1 if group is None else dist.get_world_size(group)


def has_gone(group: dist.ProcessGroup | None) -> bool:
    """Whether the group was destroyed. A save in the background may outlive it."""
    return group is not None and not torch_private.is_registered(group)


def gone_error(url: str | None) -> InputError:
    """Why ranks cannot do together any more what they began together."""
    return InputError(
        "the process group of this call was destroyed, so its ranks cannot go on together: call"
        " result() of each save in the background before"
        " torch.distributed.destroy_process_group()",
        url=url,
    )


def sync_group(
    process_group: dist.ProcessGroup | None, config: TransferConfig | None = None
) -> dist.ProcessGroup | None:
    """The group for the collectives of a call that waits: the given one, or the default one.

    Where the default group has no CPU backend (NCCL alone), a gloo group of our own with the same
    ranks: pickled plans do not belong on a GPU. Making it is a collective of all ranks, once.

    Returns:
        The group; None without a process group: this process is alone.

    Raises:
        ConfigError: this rank is not in the given group.
    """
    _refuse_outsider(process_group)
    if current_rank() is None:
        return None
    if process_group is not None:
        return process_group
    world = dist.group.WORLD
    assert world is not None
    if torch_private.has_cpu_backend(world):
        return world
    return own_group("sync", None, config)


def own_group(
    purpose: str, process_group: dist.ProcessGroup | None, config: TransferConfig | None = None
) -> dist.ProcessGroup | None:
    """A gloo group of our own with the same ranks, beside the training's collectives.

    Collectives of two threads in one group would be matched in whatever order they come, so each
    thread has a group with a purpose of its own. Making one is a collective of its ranks, once,
    which waits for a rank that does not come as long as `init_process_group` did, or less. Its
    time-out is `config.peer_timeout_seconds` of the latest call. Where `config` is something
    else, which other code refuses, it is the default's: this rank must come to the collective.

    Raises:
        ConfigError: this rank is not in the given group.
        UnsupportedError: torch cannot make a group of these ranks.
    """
    _refuse_outsider(process_group)
    if current_rank() is None:
        return None
    usable = config if isinstance(config, TransferConfig) else TransferConfig()
    timeout = datetime.timedelta(seconds=usable.peer_timeout_seconds)
    store: Any = torch_private.default_store()  # torch's stubs lack `timeout`
    world = dist.group.WORLD
    assert world is not None
    for key in [key for key, (_, home) in _own.items() if home is not world]:
        del _own[key]
    key = (purpose, process_group or world)
    if key not in _own:
        ranks = None
        if process_group is not None:
            _refuse_unlike_names(process_group)
            ranks = dist.get_process_group_ranks(process_group)
        made = dist.new_group(
            ranks,
            timeout=min(timeout, store.timeout),
            backend="gloo",
            use_local_synchronization=ranks is not None,
        )
        _own[key] = (made, world)
    group = _own[key][0]
    torch_private.set_group_timeout(group, timeout)
    return group


def _refuse_outsider(process_group: object) -> None:
    """Raise where torch would say "Invalid process group specified".

    Not a collective: the ranks of the group do not wait for one that is not in it.
    """
    if process_group is None or current_rank() is None:
        return
    if process_group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ConfigError(
            "this rank is not in the process group; only the group's ranks may make this call",
            rank=current_rank(),
        )
    if not isinstance(process_group, dist.ProcessGroup):
        raise ConfigError(
            f"process_group must be a ProcessGroup, got {type(process_group).__name__}",
            rank=current_rank(),
        )


def _refuse_unlike_names(group: dist.ProcessGroup) -> None:
    """Raise on all ranks of the group where torch would wait in vain.

    Made by some ranks only, a group gets its name from the number of groups that its rank is in;
    ranks with different names for it never meet.
    """
    counts: list[int] = [0] * dist.get_world_size(group)
    dist.all_gather_object(counts, torch_private.count_groups(), group=group)
    if len(set(counts)) > 1:
        raise UnsupportedError(
            "torch cannot make a process group of these ranks alone, because some of them are in"
            " more groups than others; leave process_group out, or save with"
            " dcp_objstore.save"
        )
