"""DCP's default save planner with clear errors that all ranks agree on."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItemType

from dcp_objstore.distributed.groups import gone_error
from dcp_objstore.distributed.plugin import same_url
from dcp_objstore.observe.report import logger
from dcp_objstore.state.state_dict import AgreeingPlanner
from dcp_objstore.write.layout import item_bytes
from dcp_objstore.write.staging.state import StagedState
from dcp_objstore.write.write_items import WriteItems

# So small that which rank saves it does not matter for the balance.
_TINY_BYTES = 4096

# One for the process: `dcp_objstore.async_save` runs one save at a time.
_staged_items = WriteItems()


class AgreeingSavePlanner(AgreeingPlanner, DefaultSavePlanner):
    """A save planner that refuses ranks with different URLs before a byte is uploaded.

    Tiny tensors and values that several ranks have are saved together, by the first of them.

    It saves tensors as they are, and no other code has a reference to a copy that
    `dcp_objstore.async_save` stages. So the digests computed during staging hold for what is
    uploaded. A copy that a writer stages for `dcp.async_save` may be changed by the caller or a
    wrapper of that, so it is hashed as it is uploaded.

    Args:
        url: URL of the checkpoint.
        state_dict: the state to save. (DCP passes a dict of its own to the planner.)
        ranks: number of ranks that save together. DCP itself believes that a rank is alone once its
            process group was destroyed.

    Attributes:
        digests: known digests of staged tensors, by the address and size of their memory; empty if
            the state was not staged.
        is_copied: the planner resolves items to copies, which take memory until they are uploaded.
    """

    is_copied = False

    def __init__(self, url: str, state_dict: Mapping[str, Any], ranks: int) -> None:
        super().__init__()
        self._url = url
        self._ranks = ranks
        self._staged = isinstance(state_dict, StagedState)
        self.digests: Mapping[tuple[int, int], bytes] = (
            state_dict.digests if isinstance(state_dict, StagedState) else {}
        )

    def create_local_plan(self) -> SavePlan:
        """Override `DefaultSavePlanner.create_local_plan`; reuse the items of a staged state."""
        with self._typed_errors():
            if self._staged:
                items = _staged_items.of(self.state_dict, is_coordinator=self.is_coordinator)
                self.plan = SavePlan(items, planner_data=self.mappings)
            else:
                super().create_local_plan()
            return dataclasses.replace(self.plan, storage_data=self._url)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Override `DefaultSavePlanner.create_global_plan`; check that all ranks save together.

        Raises:
            InvalidUrlError: the ranks save to different URLs.
            InputError: the process group was destroyed during the save.
        """
        with self._typed_errors():
            if len(all_plans) != self._ranks:
                raise gone_error(self._url)
            same_url([plan.storage_data for plan in all_plans])
            plans, metadata = super().create_global_plan(_with_tiny_together(all_plans))
        if not metadata.state_dict_metadata:
            logger.warning("%s: the state is empty on every rank; nothing is saved", self._url)
        return plans, metadata


def _with_tiny_together(plans: Sequence[SavePlan]) -> list[SavePlan]:
    """Leave each value and tiny plain tensor that several ranks have to the first of them.

    DCP would spread them over the ranks: an optimizer's step counts, one a parameter. Every rank
    that loads reads all of them, so each rank would send as many requests as there are parameters.
    """
    taken: set[MetadataIndex] = set()
    found = []
    for plan in plans:
        items = []
        for item in plan.items:
            if item.type != WriteItemType.SHARD and item_bytes(item) <= _TINY_BYTES:
                if item.index in taken:
                    continue
                taken.add(item.index)
            items.append(item)
        found.append(dataclasses.replace(plan, items=items))
    return found
