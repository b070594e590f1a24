"""Compare the contents of two checkpoints: tensors bit for bit, and values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

# Elements that are compared at a time, so that the copies in float64 stay small.
_AT_ONCE = 1 << 20


def same(one: Any, other: Any) -> bool:
    """Whether two values are equal; NaN equals NaN."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    try:
        return bool(one == other) or bool(one != one and other != other)  # noqa: PLR0124
    except (TypeError, ValueError):  # an array
        return bool(np.array_equal(one, other))


class Sum:
    """How much the elements of a tensor differ, added up over its slabs."""

    def __init__(self, *, stats: bool) -> None:
        self.changed = 0
        self._elements = 0
        self._with_stats = stats
        self._largest = self._total = 0.0

    def add(self, one: torch.Tensor, other: torch.Tensor) -> None:
        """Compare a slab."""
        self._elements += one.numel()
        pieces = (torch.split(tensor.reshape(-1), _AT_ONCE) for tensor in (one, other))
        for a, b in zip(*pieces, strict=True):
            bits = (piece.view(torch.uint8).reshape(len(piece), -1) for piece in (a, b))
            differs = torch.ne(*bits).any(1)
            changed = int(differs.sum())
            self.changed += changed
            if changed and self._with_stats:
                self._measure(a, b, differs)

    def _measure(self, a: torch.Tensor, b: torch.Tensor, differs: torch.Tensor) -> None:
        wide = torch.complex128 if a.is_complex() else torch.float64
        try:
            distance = (b.to(wide)[differs] - a.to(wide)[differs]).abs()
        except (RuntimeError, TypeError):  # two numbers in one element, such as float4_e2m1fn_x2
            self._with_stats = False
            return
        largest = float(distance.max())
        self._largest = largest if math.isnan(largest) else max(self._largest, largest)
        self._total += float(distance.sum())

    def stats(self) -> dict[str, float]:
        """Return the fields of `TensorDifference` with `stats=True`."""
        if not self._with_stats:
            return {}
        return {
            "changed_elements": self.changed,
            "max_difference": self._largest,
            "mean_difference": self._total / self._elements,
        }
