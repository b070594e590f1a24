"""DCP's default save planner, with clear errors on which all ranks agree."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan

from dcp_objstore.distributed.groups import current_rank, gone_error
from dcp_objstore.distributed.plugin import plugin_errors
from dcp_objstore.errors import InvalidUrlError
from dcp_objstore.observe.report import logger
from dcp_objstore.state.state_dict import same_name
from dcp_objstore.write.staging.state import StagedState
from dcp_objstore.write.write_items import WriteItems

# Of this process: `dcp_objstore.async_save` has one save under way at a time.
_staged_items = WriteItems()


class AgreeingSavePlanner(DefaultSavePlanner):
    """Refuses ranks that save to different URLs, before a byte is uploaded.

    It has the tensors saved as they are, and nobody else gets hold of a copy that
    `dcp_objstore.async_save` stages: so what is known of the copy holds for what is uploaded. What
    a writer stages for `dcp.async_save` may be changed by whoever calls or wraps that, and is
    hashed as it is uploaded.

    Args:
        url: the checkpoint.
        state_dict: what will be saved. (DCP hands on a dict of its own.)
        ranks: how many save together. DCP itself takes a rank to be alone once there is no process
            group any more.

    Attributes:
        digests: see `StagedState`; empty for a state that is none.
    """

    def __init__(self, url: str, state_dict: Mapping[str, Any], ranks: int) -> None:
        super().__init__()
        self._url = url
        self._ranks = ranks
        self._staged = isinstance(state_dict, StagedState)
        self.digests: Mapping[tuple[int, int], bytes] = (
            state_dict.digests if isinstance(state_dict, StagedState) else {}
        )

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """See `DefaultSavePlanner`.

        Raises:
            StateMismatchError: two values of the state have the same name in a checkpoint.
        """
        with plugin_errors(current_rank(), self._url), _naming_what_clashes(state_dict):
            super().set_up_planner(state_dict, storage_meta, is_coordinator)

    def create_local_plan(self) -> SavePlan:
        """See `DefaultSavePlanner`."""
        with plugin_errors(current_rank(), self._url):
            if self._staged:
                items = _staged_items.of(self.state_dict, is_coordinator=self.is_coordinator)
                self.plan = SavePlan(items, planner_data=self.mappings)
            else:
                super().create_local_plan()
            return dataclasses.replace(self.plan, storage_data=self._url)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """See `DefaultSavePlanner`.

        Raises:
            InvalidUrlError: the ranks save to different URLs.
            InputError: the process group was destroyed meanwhile.
        """
        with plugin_errors(current_rank(), self._url):
            if len(all_plans) != self._ranks:
                raise gone_error(self._url)
            same_url([plan.storage_data for plan in all_plans])
            plans, metadata = super().create_global_plan(all_plans)
        if not metadata.state_dict_metadata:
            logger.warning("%s: the state is empty on every rank; nothing is saved", self._url)
        return plans, metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """See `DefaultSavePlanner`."""
        with plugin_errors(current_rank(), self._url):
            return super().finish_plan(new_plan)


@contextlib.contextmanager
def _naming_what_clashes(state_dict: Mapping[str, Any]) -> Iterator[None]:
    """Around DCP's flattening, whose ValueError for two values of one name says only the name."""
    try:
        yield
    except ValueError:
        clash = same_name(state_dict)
        if clash is None:
            raise
        raise clash from None


def same_url(urls: Sequence[Any]) -> None:
    """Refuse ranks that mean different checkpoints; one URL for each rank."""
    for rank, url in enumerate(urls):
        if url != urls[0]:
            raise InvalidUrlError(
                f"every rank must pass the same URL, but rank 0 has {urls[0]} and rank {rank} {url}"
            )
