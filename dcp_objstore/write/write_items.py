"""Keep the write items of a staged state from one save to the next.

A write item says what a tensor is and where it belongs, and is the same in each save. DCP makes the
items in the saving thread, with calls that release the GIL. In a program that is busy in Python,
each such call waits up to 5 ms to get the GIL back, and interrupts the program.
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
    """A cache of the write items of the latest state."""

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
    if type(value) is torch.Tensor:
        return None, value.dtype, value.layout, value.requires_grad, value.size()
    if type(value) is DTensor:
        local = torch_private.local_tensor(value)
        # The identical spec object: with an equal spec, this process may have another coordinate in
        # the mesh.
        spec = _Same(torch_private.spec_of(value))
        return spec, local.dtype, local.layout, value.requires_grad, value.size()
    return None


class _Same:
    """A key that is equal only if it holds the same object, which it keeps alive."""

    __slots__ = ("_held",)

    def __init__(self, held: object) -> None:
        self._held = held

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._held is other._held

    __hash__ = None  # type: ignore[assignment]
