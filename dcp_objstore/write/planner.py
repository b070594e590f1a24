"""DCP's default save planner with clear errors that all ranks agree on."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import (
    DefaultSavePlanner,
    create_default_local_save_plan,
)
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from dcp_objstore import torch_private
from dcp_objstore.distributed.groups import gone_error
from dcp_objstore.distributed.plugin import same_url
from dcp_objstore.errors import StateMismatchError
from dcp_objstore.observe.report import logger
from dcp_objstore.state.state_dict import AgreeingPlanner
from dcp_objstore.state.stored import constant_name
from dcp_objstore.write.layout import item_bytes
from dcp_objstore.write.staging.state import StagedState

# So small that which rank saves it does not matter for the balance.
_TINY_BYTES = 4096

_Kept = dict[str, tuple[tuple[Any, ...], list[WriteItem]]]


class WriteItems:
    """The write items of the latest staged state, kept from one save to the next.

    A write item says what a tensor is and where it belongs, and is the same in each save. DCP makes
    the items in the saving thread, with calls that release the GIL. In a program that is busy in
    Python, each such call waits up to 5 ms to get the GIL back, and interrupts the program.
    """

    def __init__(self) -> None:
        self._kept: _Kept = {}

    def of(self, state_dict: Mapping[str, Any], *, is_coordinator: bool) -> list[WriteItem]:
        """Return the items that `create_default_local_save_plan` makes of a flat, staged state.

        Whether a tensor is pinned may be reported as it was for an earlier copy.
        """
        before, kept = self._kept, _Kept()
        items: list[WriteItem] = []
        for key, value in state_dict.items():
            signature = _signature(value)
            if signature is None:
                items += _made(key, value, is_coordinator)
                continue
            known = before.get(key)
            if known is None or known[0] != signature:
                known = signature, _made(key, value, is_coordinator)
            kept[key] = known
            items += known[1]
        self._kept = kept
        return items


def _made(key: str, value: Any, is_coordinator: bool) -> list[WriteItem]:
    return create_default_local_save_plan({key: value}, is_coordinator).items


def _signature(value: Any) -> tuple[Any, ...] | None:
    """Return a key that is equal for values with the same items; None to make them each time."""
    if type(value) not in (torch.Tensor, DTensor):
        return None
    local = torch_private.local_tensor(value) if isinstance(value, DTensor) else value
    if type(local) is not torch.Tensor or any(map(torch_private.own_sharding, (value, local))):
        return None  # the tensor itself says which items it has
    spec = torch_private.spec_of(value) if isinstance(value, DTensor) else None
    # The identical spec object, which the key keeps alive: with an equal spec, this process may
    # have another coordinate in the mesh.
    return id(spec), spec, local.dtype, local.layout, value.requires_grad, value.size()


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
            StateMismatchError: the ranks have different things under one key.
            InputError: the process group was destroyed during the save.
        """
        with self._typed_errors():
            if len(all_plans) != self._ranks:
                raise gone_error(self._url)
            same_url([plan.storage_data for plan in all_plans])
            _check_alike(all_plans)
            plans, metadata = super().create_global_plan(_with_tiny_together(all_plans))
        if not metadata.state_dict_metadata:
            logger.warning("%s: the state is empty on every rank; nothing is saved", self._url)
        return plans, metadata


def _check_alike(plans: Sequence[SavePlan]) -> None:
    """Refuse a key under which ranks have tensors of different dtypes or shapes, or no tensor.

    DCP would save the tensor of one rank and drop the others without a word.

    Raises:
        StateMismatchError: see above.
    """
    known: dict[str, tuple[int, WriteItem]] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            first, other = known.setdefault(item.index.fqn, (rank, item))
            if other is not item and _kind(item) != _kind(other):
                raise StateMismatchError(
                    f"rank {first} has {_shown(other)}, rank {rank} {_shown(item)}; what differs"
                    " between the ranks needs a key of its own on each, or a PerRank around it",
                    key=item.index.fqn,
                )


def _kind(item: WriteItem) -> tuple[torch.Size, torch.dtype] | None:
    """Return the shape of the whole tensor and its dtype; None for a value that is no tensor."""
    data = item.tensor_data
    return None if data is None else (data.size, data.properties.dtype)


def _shown(item: WriteItem) -> str:
    kind = _kind(item)
    if kind is None:
        return "a value that is no tensor"
    return f"a {constant_name(kind[1])} tensor of shape {tuple(kind[0])}"


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
