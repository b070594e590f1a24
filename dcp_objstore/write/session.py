"""`Save`: the state of one save on one rank, from its set-up to its end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dcp_objstore.checkpoint.names import new_nonce
from dcp_objstore.observe.report import SaveReport

if TYPE_CHECKING:
    from dcp_objstore.checkpoint.commit import BeginToken
    from dcp_objstore.observe.dispatch import Channel
    from dcp_objstore.state.stored import StoredObject
    from dcp_objstore.stores import ObjectStore, StoreSpec


@dataclass(slots=True)
class Save:
    """One save on one rank.

    Attributes:
        is_coordinator: whether this rank commits the save.
        nonce: random part of the names of this save's objects and of its commit.
        begin: what was at the URL before the save; None until the coordinator has read it.
        fenced: whether the store keeps two writers of one checkpoint apart.
    """

    spec: StoreSpec
    rank: int
    is_coordinator: bool
    channel: Channel
    nonce: str = field(default_factory=new_nonce)
    begin: BeginToken | None = None
    fenced: bool = True
    world_size: int = 1

    def open(self) -> ObjectStore:
        """Open the store, rooted at the checkpoint."""
        return self.spec.open()

    def report(self, objects: Sequence[StoredObject], commit_id: str | None) -> SaveReport:
        """Report on all ranks' objects (on the coordinator) or on this rank's objects."""
        return SaveReport(
            url=self.spec.url,
            total_bytes=sum(stored.entry.size_bytes for stored in objects),
            copied_bytes=sum(stored.entry.size_bytes for stored in objects if stored.copied),
            seconds=time.monotonic() - self.channel.began_at,
            objects=len(objects),
            parts=sum(stored.parts for stored in objects),
            commit_id=commit_id,
        )
