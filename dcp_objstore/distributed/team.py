"""`Team`: the ranks that share a run, and how they share what one of them found."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from dcp_objstore import torch_private
from dcp_objstore.config import TransferConfig
from dcp_objstore.distributed.failures import capture, raise_on_all, typed_failures
from dcp_objstore.distributed.groups import count_ranks, own_group
from dcp_objstore.errors import DcpObjstoreError

T = TypeVar("T")


class Team:
    """The ranks of a process group, or this process alone. Every method is a collective.

    Args:
        url: URL of the run, for errors.
        process_group: group of the ranks. Default: all ranks.
        config: settings; `peer_timeout_seconds` bounds how long ranks wait for each other.

    Attributes:
        world_size: number of ranks.
        rank: number of this rank within the group.
    """

    def __init__(
        self, url: str, process_group: dist.ProcessGroup | None, config: TransferConfig | None
    ) -> None:
        self._url = url
        with typed_failures(url, None):
            self._group = own_group("run", process_group, config)
        self.world_size = count_ranks(self._group)
        self.rank = 0 if self._group is None else dist.get_rank(self._group)

    @property
    def is_first(self) -> bool:
        """Whether this rank makes the requests. This property is not a collective."""
        return self.rank == 0

    def raise_on_all(self, failed: DcpObjstoreError | None) -> None:
        """Raise on every rank if any rank has an error."""
        raise_on_all(failed, self._url, self._group)

    def any(self, holds: bool) -> bool:
        """Whether `holds` is true on any rank."""
        if self._group is None:
            return holds
        found = [False] * self.world_size
        with typed_failures(self._url, self._group):
            dist.all_gather_object(found, holds, group=self._group)
        return any(found)

    def on_first(self, make: Callable[[], T]) -> T:
        """Call `make` on the first rank; return its result, or raise its error, on every rank."""
        made, failed = capture(make) if self.is_first else (None, None)
        self.raise_on_all(failed)
        held: list[Any] = [made]
        if self._group is not None:
            with typed_failures(self._url, self._group):
                dist.broadcast_object_list(held, group=self._group, group_src=0)
        found: T = held[0]
        return found

    def shared_store(self) -> dist.Store | None:  # type: ignore[name-defined]  # torch exports it
        """Return a new namespace in the process group's store; None if there is only one rank.

        It has its own connection, because another thread may wait for long in the group's.
        """
        token = self.on_first(lambda: secrets.token_hex(8))
        if self.world_size == 1:
            return None
        shared: Any = torch_private.default_store()
        prefixed: Any = dist.PrefixStore  # type: ignore[attr-defined]  # as above
        return prefixed(f"dcp_objstore/{token}", shared.clone())
