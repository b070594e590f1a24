"""`TensorStats`: what the numbers of a tensor look like, in one pass and bounded memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from dcp_objstore.errors import UnsupportedError
from dcp_objstore.inspect.slabs import Slab, read_ahead
from dcp_objstore.observe.bar import Bar

if TYPE_CHECKING:
    from collections.abc import Iterator

# This many elements are converted to float64 at a time.
_PIECE_ELEMENTS = 1 << 20
_FINE_BINS = 1024
_MOST_BINS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorStats:
    """What the numbers of a tensor look like. Of complex numbers, their absolute values.

    All are computed in float64. Only finite numbers count for all but the first four; the figures
    are None if there are none.

    Attributes:
        key: name of the tensor.
        elements: number of elements.
        nans: number of elements that are NaN.
        infs: number of elements that are infinite.
        minimum: the smallest.
        maximum: the largest.
        mean: their mean.
        std: their standard deviation, divided by their number.
        histogram: (lower end, upper end, count) of at most 16 bins of equal width, which is a power
            of two; an element on an end belongs to the upper bin.
    """

    key: str
    elements: int
    nans: int
    infs: int
    minimum: float | None
    maximum: float | None
    mean: float | None
    std: float | None
    histogram: tuple[tuple[float, float, int], ...]


def tensor_stats(
    key: str,
    slabs: Sequence[Slab],
    read: Callable[[Sequence[Slab]], list[torch.Tensor]],
    *,
    progress: bool,
) -> TensorStats:
    """Read a tensor slab by slab, and describe its numbers.

    Raises:
        UnsupportedError: elements of this dtype are no numbers.
    """
    sums = _Sums()
    bar = Bar("read")
    if progress and bar.is_seen():
        bar.begin(sum(slab.size_bytes for slab in slabs))
    try:
        with closing(read_ahead(slabs, read)) as tensors:
            for slab, tensor in zip(slabs, tensors, strict=True):
                for piece in torch.split(tensor.reshape(-1), _PIECE_ELEMENTS):
                    try:
                        wide = piece.abs() if piece.is_complex() else piece
                        wide = wide.to(torch.float64)
                    except (RuntimeError, TypeError) as error:
                        text = f"elements of {tensor.dtype} are not numbers that can be counted"
                        raise UnsupportedError(text, key=key) from error
                    sums.add(wide)
                bar.advance(slab.size_bytes)
    finally:
        bar.flush()
    some = sums.finite > 0
    return TensorStats(
        key=key,
        elements=sums.elements,
        nans=sums.nans,
        infs=sums.infs,
        minimum=sums.minimum if some else None,
        maximum=sums.maximum if some else None,
        mean=sums.mean if some else None,
        std=math.sqrt(sums.squares / sums.finite) if some else None,
        histogram=tuple(sums.histogram()),
    )


class _Sums:
    """Figures that are added up piece by piece.

    The bins of the histogram have a width of a power of two, so that pairs of them become one
    without error when a later piece has a larger range.
    """

    def __init__(self) -> None:
        self.elements = self.nans = self.infs = self.finite = 0
        self.minimum, self.maximum = math.inf, -math.inf
        self.mean = self.squares = 0.0  # squares: the sum of squared distances from the mean
        self._counts: dict[int, int] = {}
        self._exponent = -1000  # of a bin's width; its reciprocal is finite

    def add(self, piece: torch.Tensor) -> None:
        """Add numbers in float64."""
        self.elements += len(piece)
        nans, infs = piece.isnan(), piece.isinf()
        self.nans += int(nans.sum())
        self.infs += int(infs.sum())
        piece = piece[~(nans | infs)]
        if not len(piece):
            return
        self.minimum = min(self.minimum, float(piece.min()))
        self.maximum = max(self.maximum, float(piece.max()))
        count, mean = len(piece), float(piece.mean())
        squares = float((piece - mean).square().sum())
        # Chan, Golub, LeVeque: Updating formulae and a pairwise algorithm for variances (1979).
        total = self.finite + count
        distance = mean - self.mean
        self.squares += squares + distance**2 * (self.finite * count / total)
        self.mean += distance * (count / total)
        self.finite = total
        self._count(piece)

    def _count(self, piece: torch.Tensor) -> None:
        spread = self.maximum / _FINE_BINS - self.minimum / _FINE_BINS
        # Numbers of bins are whole numbers in float64: at most 2**40.
        farthest = max(abs(self.minimum), abs(self.maximum)) * 2.0**-40
        wanted = math.frexp(max(spread, farthest))[1] if spread or farthest else self._exponent
        self._merge(wanted - self._exponent)
        per_bin = 2.0**-self._exponent
        first = math.floor(self.minimum * per_bin)
        numbers = (piece * per_bin).floor().to(torch.int64) - first
        counts = np.bincount(numbers.numpy())
        self._add((first + int(at), int(counts[at])) for at in counts.nonzero()[0])

    def _merge(self, doublings: int) -> None:
        if doublings > 0:
            before, self._counts = self._counts, {}
            self._exponent += doublings
            self._add((number >> doublings, count) for number, count in before.items())

    def _add(self, counts: Iterable[tuple[int, int]]) -> None:
        for number, count in counts:
            self._counts[number] = self._counts.get(number, 0) + count

    def histogram(self) -> Iterator[tuple[float, float, int]]:
        """Yield the bins; merges them first."""
        if not self._counts:
            return
        while max(self._counts) - min(self._counts) >= _MOST_BINS:
            self._merge(1)
        for number in range(min(self._counts), max(self._counts) + 1):
            low, high = (at * 2.0**self._exponent for at in (number, number + 1))
            yield low, high, self._counts.get(number, 0)
