"""`Save`: what belongs to one save on one rank, from its set-up to its end."""

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
    from dcp_objstore.state.dcp_metadata import StoredObject
    from dcp_objstore.stores import ObjectStore, StoreSpec


@dataclass(slots=True)
class Save:
    """One save on one rank.

    Attributes:
        spec: the checkpoint.
        channel: what happens is told there.
        nonce: names the objects and the commit of this save.
        begin: what was there before; on the coordinator, once it has looked.
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
        """The store, rooted at the checkpoint."""
        return self.spec.open()

    def report(self, objects: Sequence[StoredObject], commit_id: str | None) -> SaveReport:
        """What was done so far: on the coordinator with all ranks' objects, elsewhere its own."""
        return SaveReport(
            url=self.spec.url,
            total_bytes=sum(stored.entry.size_bytes for stored in objects),
            seconds=time.monotonic() - self.channel.began_at,
            objects=len(objects),
            parts=sum(stored.parts for stored in objects),
            commit_id=commit_id,
        )
