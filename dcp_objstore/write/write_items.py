"""The write items of a staged state, kept from save to save.

They say of each tensor where it belongs and what it is, and are the same each time. DCP makes them
of the tensors with calls that give up the GIL, in the thread that saves; in a program that is busy
in Python each such call waits for the GIL, up to 5 ms, and interrupts the program.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.tensor import DTensor

from dcp_objstore import torch_private

_Kept = dict[str, tuple[tuple[Any, ...], list[WriteItem]]]


class WriteItems:
    """Makes the items of states, and keeps those of the latest one."""

    def __init__(self) -> None:
        self._kept: _Kept = {}

    def of(self, state_dict: Mapping[str, Any], *, is_coordinator: bool) -> list[WriteItem]:
        """What `create_default_local_save_plan` has of a flat state whose tensors are copies.

        Whether the memory of a copy is pinned may be told as it was for an earlier one.
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
    """Equal for values that have the same items; None for those that are made each time."""
    if type(value) is torch.Tensor:
        return None, value.dtype, value.layout, value.requires_grad, value.size()
    if type(value) is DTensor:
        local = torch_private.local_tensor(value)
        # The very same spec: of an equal one, this process may have another coordinate in its mesh.
        spec = _Same(torch_private.spec_of(value))
        return spec, local.dtype, local.layout, value.requires_grad, value.size()
    return None


class _Same:
    """Equal only to what holds the same object, which it keeps alive."""

    __slots__ = ("_held",)

    def __init__(self, held: object) -> None:
        self._held = held

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._held is other._held

    __hash__ = None  # type: ignore[assignment]
