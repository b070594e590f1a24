"""Find out in which order to fill tensors that share memory. It needs nothing else of a load."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping, Sequence
from operator import attrgetter, methodcaller
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dcp_objstore.state.memory import Exposed, reach
from dcp_objstore.torch_private import parts

if TYPE_CHECKING:
    import torch

    from dcp_objstore.transfer.upload import ByteArray


class _Region(NamedTuple):
    """Where tensors of a key lie: bytes `[start, end)`, of which they take `size_bytes`.

    They are parts of one tensor, or of one of those that a wrapper is made of.
    """

    key: str
    number: int
    device: str
    start: int
    end: int
    size_bytes: int
    tensors: Sequence[torch.Tensor]

    def covers(self, other: _Region) -> bool:
        """Whether the tensors take all bytes of another region."""
        is_dense = self.size_bytes == self.end - self.start
        return is_dense and self.start <= other.start and other.end <= self.end


def fill_order(tensors: Mapping[str, Sequence[torch.Tensor]]) -> tuple[set[str], set[str]]:
    """Return how to fill keys that share memory as if one key were filled after the other.

    Args:
        tensors: the tensors of each key, which do not overlap one another; in the order of filling.

    Returns:
        The keys that need not be filled, because later keys fill all of their memory, and the keys
        to fill after the others, because they share elements with an earlier one.
    """
    regions: list[_Region] = []
    for key, of_key in tensors.items():
        for of_part in zip(*map(parts, of_key), strict=True):
            if held := [*filter(methodcaller("numel"), of_part)]:
                regions.append(_region(key, len(regions), held))
    pairs: list[list[_Region]] = []
    begun: list[_Region] = []
    for region in sorted(regions, key=attrgetter("device", "start")):
        begun = [r for r in begun if r.device == region.device and r.end > region.start]
        others = [r for r in begun if r.key != region.key]
        pairs += [sorted((r, region), key=attrgetter("number")) for r in others]
        begun.append(region)
    hidden = {earlier.number for earlier, later in pairs if later.covers(earlier)}
    needed = {region.key for region in regions if region.number not in hidden}
    covered = {region.key for region in regions} - needed
    after = {
        later.key
        for earlier, later in pairs
        if needed.issuperset((earlier.key, later.key))
        and any(itertools.starmap(_meet, itertools.product(earlier.tensors, later.tensors)))
    }
    return covered, after


def _region(key: str, number: int, tensors: Sequence[torch.Tensor]) -> _Region:
    starts = [*map(methodcaller("data_ptr"), tensors)]
    return _Region(
        key=key,
        number=number,
        device=str(tensors[0].device),
        start=min(starts),
        end=max(map(operator.add, starts, map(reach, tensors))),
        size_bytes=sum(map(attrgetter("nbytes"), tensors)),
        tensors=tensors,
    )


def _meet(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether tensors have a byte in common. (Columns of one matrix have none.)"""
    return np.shares_memory(_addresses(one.squeeze()), _addresses(other.squeeze()))


def _addresses(tensor: torch.Tensor) -> ByteArray:
    """Return an array with the elements' addresses. It may be a GPU's memory, which is not read."""
    strides = tuple(step * tensor.itemsize for step in tensor.stride())
    layout = {"shape": (*tensor.shape,), "strides": strides, "typestr": f"|V{tensor.itemsize}"}
    return np.asarray(Exposed(tensor, tensor.data_ptr(), 0, **layout))
