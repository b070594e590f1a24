"""Process groups for the collectives of checkpoints."""

from __future__ import annotations

import datetime
import os
import secrets
import uuid
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary, ref

import torch.distributed as dist

from dcp_objstore import torch_private
from dcp_objstore.config import TransferConfig
from dcp_objstore.distributed.ranks import current_rank
from dcp_objstore.errors import ConfigError, InputError, RankFailedError, UnsupportedError

# Purposes of groups: the calls of the program's thread, the saves in the background, and the saves
# of dcp.async_save, whose threads do not take turns with the others.
CALLS = "calls"
SAVES = "saves"
DCP_SAVES = "saves of dcp.async_save"

# The gloo groups that this module has made, by the group whose ranks they have and by purpose.
# torch keeps them until they are destroyed; if this did too, their threads would go on. No code may
# drop one, because all its ranks would have to make it again together. The key must not contain
# anything that may differ between ranks, such as a setting.
_Groups: TypeAlias = dict[str, ref[dist.ProcessGroup]]
_own_groups: WeakKeyDictionary[dist.ProcessGroup, _Groups] = WeakKeyDictionary()


def world_group() -> dist.ProcessGroup | None:
    """Return the name `dist.group.WORLD` of the default group, or None if there is none."""
    return None if current_rank() is None else dist.group.WORLD


def count_ranks(group: dist.ProcessGroup | None) -> int:
    """Return the number of ranks in the group; 1 without a group.

    With one rank, DCP should exchange no plans. It would pickle and unpickle the plan three times:
    100 objects per tensor, enough for the cyclic garbage collector to walk through the whole
    program twice.
    """
    return 1 if group is None else dist.get_world_size(group)


def rank_in(group: dist.ProcessGroup | None) -> int:
    """Return this rank's number in the group; 0 without a group."""
    return 0 if group is None else dist.get_rank(group)


def is_first(group: dist.ProcessGroup | None) -> bool:
    """Whether this rank is the first of the group; True without a group."""
    return rank_in(group) == 0


def has_gone(group: dist.ProcessGroup | None) -> bool:
    """Whether the group was destroyed. A save in the background may outlive its group."""
    return group is not None and not torch_private.is_registered(group)


def gone_error(url: str | None) -> InputError:
    """Return the error for a process group that was destroyed during a call of its ranks."""
    return InputError(
        "the process group of this call was destroyed before its end",
        url=url,
        advice="call result() of each save, and leave a CheckpointManager's block, before"
        " destroy_process_group()",
    )


def sync_group(
    process_group: dist.ProcessGroup | None, config: TransferConfig | None = None
) -> dist.ProcessGroup | None:
    """Return the group for the collectives of a blocking call: the given one, or a gloo group.

    The gloo group has all ranks, and is made by the first such call, which is a collective. The
    default group may be NCCL's alone, and pickled plans do not belong on a GPU. If it is gloo's,
    the last tensor of a collective is freed by one of its threads, which needs the GIL. DDP frees
    that group while it holds the GIL, so a job that ends right after a save would hang or abort.

    Returns:
        The group; None without a process group, because then this process is alone.

    Raises:
        ConfigError: this rank is not in the given group.
    """
    _refuse_outsider(process_group)
    return process_group or own_group(CALLS, None, config)


def exchange_group(
    process_group: dist.ProcessGroup | None, config: TransferConfig, meeting: str | None
) -> dist.ProcessGroup | None:
    """Return the group in which the ranks of a load pass bytes: the given one, if it can.

    It makes a separate gloo group, which is a collective of its ranks, if the given group has no
    CPU backend, or if none is given: the load may then run in a thread, while training uses the
    default group. So the default group is not used to agree on a name: that comes from `meeting`,
    the UUID of the load, if there is one.

    Raises:
        UnsupportedError: torch cannot make a group of these ranks.
    """
    if process_group is not None and torch_private.has_cpu_backend(process_group):
        return process_group
    ranks_of = None if process_group is dist.group.WORLD else process_group
    number = None if meeting is None else uuid.UUID(meeting).int >> 66  # 62 of its 128 bits
    return own_group("read once", ranks_of, config, number=number)


def own_group(
    purpose: str,
    process_group: dist.ProcessGroup | None,
    config: TransferConfig | None = None,
    *,
    number: int | None = None,
) -> dist.ProcessGroup | None:
    """Return a separate gloo group of the same ranks, apart from the training's collectives.

    Collectives that two threads run in one group would be matched in arrival order, so each thread
    has its own group, named by a purpose. The first call makes the group, which is a collective of
    its ranks. It waits for a missing rank no longer than the time-out of `init_process_group`. The
    time-out of the group is `config.peer_timeout_seconds` of the latest call. If `config` is not a
    TransferConfig, which other code refuses, the default time-out is used, because this rank must
    take part in the collective.

    Args:
        purpose: the name of the thread that uses it.
        process_group: a group of its ranks; None for all ranks.
        number: a number for its name, below 2**62, which all ranks know and no attempt of the job
            has used. Default: rank 0 draws one and sends it to the others.

    Raises:
        ConfigError: this rank is not in the given group.
        UnsupportedError: torch cannot make a group of these ranks.
        RankFailedError: a rank did not connect to the others.
    """
    _refuse_outsider(process_group)
    if current_rank() is None:
        return None
    config = config if isinstance(config, TransferConfig) else TransferConfig()
    timeout = datetime.timedelta(seconds=config.peer_timeout_seconds)
    store: Any = torch_private.default_store()  # torch's stubs lack `timeout`
    group = _existing(purpose, process_group)
    if group is None:
        torch_private.unbind_default_group()
        group = _new_group(process_group, min(timeout, store.timeout), number)
        _own_groups.setdefault(process_group or _world(), {})[purpose] = ref(group)
    torch_private.set_group_timeout(group, timeout)
    return group


def _existing(purpose: str, process_group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Return the group that was made for this purpose, if it was not destroyed."""
    group_ref = _own_groups.get(process_group or _world(), {}).get(purpose)
    group = None if group_ref is None else group_ref()
    return None if has_gone(group) else group


def _world() -> dist.ProcessGroup:
    """Return the default group, which there is."""
    world = dist.group.WORLD
    assert world is not None
    return world


def _new_group(
    process_group: dist.ProcessGroup | None, timeout: datetime.timedelta, number: int | None
) -> dist.ProcessGroup:
    """Make a gloo group of the ranks of the given or the default group. A collective.

    The ranks find each other's addresses in the job's store, below the name of the group. torch
    counts groups to name them, so in a store that outlives a restart (torchrun's does) a rank would
    find the address of a dead one. So if a group can carry it, the ranks agree on a new name.
    """
    if process_group is not None:
        _refuse_unlike_names(process_group)
        ranks = dist.get_process_group_ranks(process_group)
        return _connect(timeout, ranks=ranks, use_local_synchronization=True)
    if number is None:
        # No group of a purpose other than `CALLS` carries a number: its thread may be using it.
        carrier = _world() if torch_private.has_cpu_backend(_world()) else _existing(CALLS, None)
        if carrier is None:  # torch names the group by its count
            return _connect(timeout)
        numbers = [secrets.randbits(62)]  # rank 0's replaces that of the others
        dist.broadcast_object_list(numbers, group=carrier, group_src=0)
        number = numbers[0]
    with torch_private.groups_named_from(number):
        return _connect(timeout)


def _connect(timeout: datetime.timedelta, **options: Any) -> dist.ProcessGroup:
    """Call `dist.new_group`.

    This is not retried: the ranks that did connect wait for the others until the time-out, and
    until then cannot take part in a second attempt.
    """
    try:
        group: dist.ProcessGroup = dist.new_group(timeout=timeout, backend="gloo", **options)
    except RuntimeError as error:
        text = (
            "the ranks could not connect to each other: one of them has died, or did not make the"
            " same call within the time-out of the process group"
        )
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True):
            text += (
                "; or torchrun has restarted the job, and a rank found the address of a dead one in"
                " the store that torchrun keeps: start torchrun with"
                " TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the environment"
            )
        raise RankFailedError(text, rank=current_rank()) from error
    return group


def _refuse_outsider(process_group: object) -> None:
    """Raise if torch would raise "Invalid process group specified".

    This is not a collective: the ranks of the group do not wait for a rank outside of it.
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
    """Raise on all ranks of the group if torch would hang while it makes a group of them.

    If only some ranks make a group, torch names it after the number of groups that each rank is in.
    Ranks with different names for the group never meet.
    """
    counts: list[int] = [0] * dist.get_world_size(group)
    dist.all_gather_object(counts, torch_private.count_groups(), group=group)
    if len(set(counts)) > 1:
        raise UnsupportedError(
            "torch cannot make a process group of these ranks alone, because some are in more"
            " groups than others; leave process_group out"
        )
