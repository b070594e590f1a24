"""Copies planned out of linear stretches put every wanted element in its place, once."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from dcp_objstore.dcp.geometry import Box, collapse, covering_stretch, plan_copies


@st.composite
def chunk_and_box(draw: st.DrawFn) -> tuple[tuple[int, ...], Box]:
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=4)))
    offsets = tuple(draw(st.integers(0, n - 1)) for n in shape)
    sizes = tuple(draw(st.integers(1, n - o)) for n, o in zip(shape, offsets, strict=True))
    return shape, Box(offsets, sizes)


def apply(source, shape, wanted, start, end, destination):
    for copy in plan_copies(shape, wanted, start, end):
        first = start + copy.start
        block = source[first : first + math.prod(copy.source_shape)].view(copy.source_shape)
        target = destination
        for dim, (offset, size) in enumerate(
            zip(copy.source.offsets, copy.source.sizes, strict=True)
        ):
            block = block.narrow(dim, offset, size)
        for dim, (offset, size) in enumerate(
            zip(copy.destination.offsets, copy.destination.sizes, strict=True)
        ):
            target = target.narrow(dim, offset, size)
        target += block


@given(chunk_and_box(), st.integers(1, 17), st.booleans())
def test_stretches_of_any_size_deliver_every_wanted_element_exactly_once(case, step, collapsed):
    shape, wanted = case
    source = torch.arange(1, math.prod(shape) + 1)
    expected = source.view(shape)
    for dim, (offset, size) in enumerate(zip(wanted.offsets, wanted.sizes, strict=True)):
        expected = expected.narrow(dim, offset, size)
    destination = torch.zeros(wanted.sizes, dtype=torch.int64)
    view = destination
    if collapsed:
        shape, wanted = collapse(shape, wanted)
        view = destination.view(wanted.sizes)
    start, end = covering_stretch(shape, wanted)
    for low in range(start, end, step):
        apply(source, shape, wanted, low, min(end, low + step), view)
    assert torch.equal(destination, expected)


@given(chunk_and_box())
def test_the_covering_stretch_begins_and_ends_at_wanted_elements(case):
    shape, wanted = case
    start, end = covering_stretch(shape, wanted)
    assert plan_copies(shape, wanted, start, start + 1)
    assert plan_copies(shape, wanted, end - 1, end)
    assert not plan_copies(shape, wanted, 0, start)
    assert not plan_copies(shape, wanted, end, math.prod(shape))


def test_nothing_is_read_for_an_empty_box():
    assert covering_stretch((0, 4), Box((0, 0), (0, 4))) == (0, 0)
