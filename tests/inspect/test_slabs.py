"""Slabs cover a tensor front to back, whatever its shape, and few of them are in memory."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, strategies as st

from dcp_objstore.config import MIB
from dcp_objstore.inspect import slabs
from dcp_objstore.inspect.slabs import Slab, cut, read_ahead
from dcp_objstore.read.geometry import narrow

WINDOW = 64


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slabs, "WINDOW_BYTES", WINDOW)
    monkeypatch.setattr(slabs, "BLOCK_SIZE_BYTES", 16)


@given(
    shape=st.lists(st.integers(1, 9), max_size=4),
    starts=st.lists(st.integers(0, 8), unique=True).map(sorted),
    dtype=st.sampled_from([torch.uint8, torch.float32, torch.float64]),
)
def test_slabs_are_a_tensor_front_to_back(shape, starts, dtype):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slabs, "BLOCK_SIZE_BYTES", 16)
        found = list(cut("w", shape, dtype, starts, most_bytes=WINDOW))
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
    parts = [narrow(whole, slab.box).reshape(-1) for slab in found]
    assert torch.equal(torch.cat(parts), whole.reshape(-1))
    for slab, part in zip(found, parts, strict=True):
        assert slab.size_bytes == part.numel() * dtype.itemsize <= WINDOW


def test_slabs_begin_where_stored_blocks_do():
    found = [
        slab.box.offsets[0] for slab in cut("w", (100, 4), torch.uint8, (0, 50), most_bytes=WINDOW)
    ]
    assert found == [0, 16, 32, 48, 62, 78, 94]  # from 50 on, three blocks of four rows further
    assert [slab.size_bytes for slab in cut("w", (33, MIB), torch.uint8)] == [32 * MIB, MIB]


def test_a_tensor_without_elements_has_no_slab():
    assert list(cut("w", (0, 5), torch.float32)) == []


def test_what_was_taken_is_not_kept_and_little_is_read_ahead():
    made: list[weakref.ref[torch.Tensor]] = []
    read: list[int] = []

    def make(window: Sequence[Slab]) -> list[torch.Tensor]:
        read.append(sum(slab.size_bytes for slab in window))
        tensors = [torch.empty(slab.size_bytes, dtype=torch.uint8) for slab in window]
        made.extend(weakref.ref(tensor) for tensor in tensors)
        return tensors

    wanted = [
        slab for n in range(20) for slab in cut(f"w{n}", (40, 3), torch.uint8, most_bytes=WINDOW)
    ]
    tensors = read_ahead(wanted, make)
    for _ in wanted:
        next(tensors)
        alive = sum(tensor.numel() for one in made if (tensor := one()) is not None)
        assert alive <= 3 * WINDOW
    assert max(read) <= WINDOW
    assert next(tensors, None) is None
