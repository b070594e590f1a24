"""DCP's default save planner with clear errors that all ranks agree on."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from dcp_objstore.distributed.groups import gone_error
from dcp_objstore.distributed.plugin import same_url
from dcp_objstore.observe.report import logger
from dcp_objstore.state.state_dict import AgreeingPlanner
from dcp_objstore.write.staging.state import StagedState
from dcp_objstore.write.write_items import WriteItems

# One for the process: `dcp_objstore.async_save` runs one save at a time.
_staged_items = WriteItems()


class AgreeingSavePlanner(AgreeingPlanner, DefaultSavePlanner):
    """A save planner that refuses ranks with different URLs before a byte is uploaded.

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
    """

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
            plans, metadata = super().create_global_plan(all_plans)
        if not metadata.state_dict_metadata:
            logger.warning("%s: the state is empty on every rank; nothing is saved", self._url)
        return plans, metadata
