"""Copies planned out of linear stretches put every wanted element in its place, once."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings, strategies as st

from dcp_objstore.errors import UnsupportedError
from dcp_objstore.read.geometry import Box, Selection, collapse, fills, fits, narrow


@st.composite
def chunk_and_box(draw: st.DrawFn) -> tuple[tuple[int, ...], Box]:
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=4)))
    offsets = tuple(draw(st.integers(0, n - 1)) for n in shape)
    sizes = tuple(draw(st.integers(1, n - o)) for n, o in zip(shape, offsets, strict=True))
    return shape, Box(offsets, sizes)


def apply(source, shape, wanted, start, end, destination):
    for copy in Selection(shape, wanted, 1).copies(start, end):
        first = start + copy.start
        block = source[first : first + math.prod(copy.source_shape)].view(copy.source_shape)
        target = narrow(destination, copy.destination)
        target += narrow(block, copy.source)


@settings(deadline=None)
@given(chunk_and_box(), st.integers(1, 17), st.booleans())
def test_stretches_of_any_size_deliver_every_wanted_element_exactly_once(case, step, collapsed):
    shape, wanted = case
    source = torch.arange(1, math.prod(shape) + 1)
    box = zip(wanted.offsets, wanted.ends, strict=True)
    expected = source.view(shape)[tuple(slice(low, high) for low, high in box)]
    destination = torch.zeros(wanted.sizes, dtype=torch.int64)
    view = destination
    if collapsed:
        shape, wanted = collapse(shape, wanted)
        view = destination.view(wanted.sizes)
    for start, end in Selection(shape, wanted, 1).runs(step):
        for low in range(start, end, step):
            apply(source, shape, wanted, low, min(end, low + step), view)
    assert torch.equal(destination, expected)


@pytest.mark.parametrize(
    ("shape", "wanted", "collapsed"),
    [
        ((), Box((), ()), ((), Box((), ()))),
        ((4, 6), Box((1, 0), (2, 6)), ((24,), Box((6,), (12,)))),
        ((4, 2, 3), Box((1, 0, 0), (2, 2, 3)), ((24,), Box((6,), (12,)))),
        ((4, 2, 3), Box((1, 1, 0), (2, 1, 3)), ((4, 6), Box((1, 3), (2, 3)))),
        ((4, 2, 3), Box((1, 0, 1), (2, 2, 1)), ((4, 2, 3), Box((1, 0, 1), (2, 2, 1)))),
    ],
)
def test_trailing_dimensions_that_are_wanted_in_full_become_one(shape, wanted, collapsed):
    assert collapse(shape, wanted) == collapsed


@pytest.mark.parametrize(
    ("start", "end", "boxes"),
    [
        (0, 24, [(0, (4, 6))]),
        (6, 18, [(0, (2, 6))]),
        (8, 11, [(0, (1, 3))]),
        (8, 12, [(0, (1, 4))]),
        (8, 14, [(0, (1, 4)), (4, (1, 2))]),
        (8, 20, [(0, (1, 4)), (4, (1, 6)), (10, (1, 2))]),
    ],
)
def test_a_stretch_is_the_rest_of_a_row_whole_rows_and_the_start_of_one(start, end, boxes):
    copies = Selection((4, 6), Box((0, 0), (4, 6)), 1).copies(start, end)
    assert [(copy.start, copy.source_shape) for copy in copies] == boxes


def test_nothing_is_copied_from_an_empty_stretch_or_read_for_an_empty_box():
    for shape in ((), (4,), (2, 3), (3, 0)):
        assert Selection(shape, Box((0,) * len(shape), shape), 1).copies(0, 0) == []
    for sizes in ((0, 4), (4, 0)):
        assert Selection((4, 4), Box((0, 0), sizes), 4).runs(10) == []


def wanted_bytes(selection: Selection) -> set[int]:
    """Numbers of all bytes of the chunk that are wanted, by NumPy's own indexing."""
    count = math.prod(selection.shape) * selection.itemsize
    numbers = np.arange(count).reshape(*selection.shape, selection.itemsize)
    box = zip(selection.wanted.offsets, selection.wanted.sizes, strict=True)
    return set(numbers[tuple(slice(o, o + n) for o, n in box)].flatten().tolist())


@settings(deadline=None)
@given(chunk_and_box(), st.sampled_from([1, 2, 4, 8, 16]), st.integers(0, 70))
def test_runs_hold_every_wanted_byte_and_no_gap_that_is_longer_than_allowed(case, itemsize, gap):
    selection = Selection(*case, itemsize)
    wanted = wanted_bytes(selection)
    runs = selection.runs(gap)
    covered = [number for start, end in runs for number in range(start, end)]
    assert covered == sorted(set(covered))
    assert wanted <= set(covered)
    for start, end in runs:
        inside = sorted(wanted & set(range(start, end)))
        assert (inside[0], inside[-1]) == (start, end - 1)
        assert all(b - a - 1 <= gap for a, b in itertools.pairwise(inside))
    assert all(b[0] - a[1] > gap for a, b in itertools.pairwise(runs))


@settings(deadline=None)
@given(chunk_and_box(), st.sampled_from([1, 2, 4, 8, 16]), st.integers(1, 40))
def test_packing_takes_the_wanted_bytes_of_a_block_in_their_order(case, itemsize, step):
    selection = Selection(*case, itemsize)
    wanted = wanted_bytes(selection)
    chunk = np.random.default_rng(7).integers(0, 256, math.prod(selection.shape) * itemsize)
    chunk = chunk.astype(np.uint8)
    for low in range(0, len(chunk), step * itemsize):
        block = chunk[low : low + step * itemsize]
        into = np.zeros(selection.count_bytes(low, low + len(block)), np.uint8)
        selection.pack(block, low, into)
        expected = [n for n in range(low, low + len(block)) if n in wanted]
        if expected:
            stretch = selection.within(low, low + len(block))
            assert stretch == (expected[0], expected[-1] + 1)
        assert into.tolist() == chunk[expected].tolist()


def test_runs_are_few_where_rows_are_short_and_separate_where_they_are_long():
    columns = Selection((4096, 4096), Box((0, 0), (4096, 512)), 4)
    assert columns.runs(256 * 1024) == [(0, (4095 * 4096 + 512) * 4)]
    long = Selection((8, 1 << 20), Box((0, 0), (8, 1 << 17)), 4)
    assert long.runs(256 * 1024) == [(n << 22, (n << 22) + (1 << 19)) for n in range(8)]


@st.composite
def shape_and_boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """Boxes within a shape, mostly of a grid, of which some may be left out or be there twice."""
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
    cuts = [sorted({0, n, *draw(st.sets(st.integers(0, n), max_size=2))}) for n in shape]
    grid = itertools.product(*([*itertools.pairwise(at)] or [(0, 0)] for at in cuts))
    some = [
        Box(tuple(low for low, _ in cell), tuple(high - low for low, high in cell)) for cell in grid
    ]
    if draw(st.booleans()):
        some = draw(st.lists(st.sampled_from(some), max_size=len(some) + 2))
    if shape and 0 not in shape and draw(st.booleans()):
        low = tuple(draw(st.integers(0, n)) for n in shape)
        some.append(
            Box(low, tuple(draw(st.integers(0, n - at)) for n, at in zip(shape, low, strict=True)))
        )
    return shape, draw(st.permutations(some))


@settings(deadline=None, max_examples=100)
@given(shape_and_boxes(), st.booleans())
@example(((2, 2), [Box((0, 0), (2, 1)), Box((0, 0), (2, 1)), Box((0, 0), (0, 2))]), True)
@example(((5, 5), [Box(at, (1, 1)) for at in itertools.product(range(5), repeat=2)]), True)
@example(((5, 5), [Box((0, at), (5, 1)) for at in (0, 1, 2, 3, 3)]), True)
@example(((4,), [Box((0,), (3,)), Box((0,), (3,))]), False)  # enough elements, but one is left out
@example(((4,), [Box((1,), (3,)), Box((1,), (3,))]), False)
@example(((2, 2), [Box((0, 0), (2, 1)), Box((0, 0), (2, 1))]), True)
def test_boxes_fill_a_shape_if_no_element_is_left_out(case, as_arrays):
    shape, boxes = case
    left = np.ones(shape, dtype=bool)
    for box in boxes:
        left[tuple(slice(a, a + n) for a, n in zip(box.offsets, box.sizes, strict=True))] = False
    rows = [[list(box.offsets) for box in boxes], [list(box.sizes) for box in boxes]]
    if as_arrays:
        rows = [np.array(some, dtype=np.uint64).reshape(len(boxes), len(shape)) for some in rows]
    assert fills(shape, *rows) == (not left.any())


def test_a_hole_behind_many_dimensions_is_not_taken_for_filled():
    """There are as many elements as in the shape, for one half of it is there twice."""
    zeros, ones, twos = (0,) * 8, (1,) * 8, (2,) * 8
    offsets = [(0, *zeros), (1, *zeros), (1, *zeros)]
    sizes = [(1, *ones), (1, *twos), (1, *twos)]
    assert not fills((2, *twos), offsets, sizes)
    assert fills((2, *twos), [*offsets, (0, *zeros)], [*sizes, (1, *twos)])


def test_boxes_that_interlock_in_too_many_pieces_are_refused():
    """It would take out of proportion to find out whether they fill the shape.

    Wide boxes are cut by narrow ones into 100 pieces each; 4096 pieces and 64 a box are allowed.
    """
    for wide, is_refused in ((288, False), (289, True)):
        offsets = [*[(0,)] * wide, *((at,) for at in range(100))]
        sizes = [*[(100,)] * wide, *[(1,)] * 100]
        if is_refused:
            with pytest.raises(UnsupportedError, match="interlock"):
                fills((100,), offsets, sizes)
        else:
            assert fills((100,), offsets, sizes)


@pytest.mark.parametrize("ranks", [1, 7, 400])
def test_a_tensor_that_was_divided_as_one_long_row_fills_its_shape(ranks):
    """A rank's stretch is several boxes, whose borders hardly ever meet."""
    shape = (61, 127, 33)
    count = math.prod(shape)
    whole = Box((0, 0, 0), shape)
    boxes = [
        copy.destination
        for rank in range(ranks)
        for copy in Selection(shape, whole, 1).copies(
            rank * count // ranks, (rank + 1) * count // ranks
        )
    ]
    numbers = [box.offsets for box in boxes], [box.sizes for box in boxes]
    assert fills(shape, *numbers)
    assert not fills(shape, *(rows[1:] for rows in numbers))


def test_a_shape_may_have_more_dimensions_than_numpy_if_few_are_cut():
    sizes = [(1,) * 70, (1,) * 69 + (2,)]
    for last in (0, 1):
        assert fills((1,) * 69 + (3,), [(0,) * 70, (0,) * 69 + (last,)], sizes) is (last == 1)


def test_elements_beyond_what_a_float_tells_apart_are_counted_exactly():
    numbers = [np.array([[one], [one]], dtype=np.uint64) for one in (0, 2**60 - 1)]
    assert not fills((2**60,), *numbers)


@pytest.mark.parametrize(
    ("sizes", "shape", "inside"),
    [
        ((2, 3), (3, 5), True),
        ((2, 3), (2, 5), False),
        ((2, 3), (3, 4), False),
        ((2, 3), (3, 5, 1), False),
        ((2, 3), (15,), False),
        ((0, 0), (1, 2), True),
    ],
)
def test_a_box_fits_up_to_the_last_element(sizes, shape, inside):
    assert fits(Box((1, 2), sizes), shape) is inside


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, that these will go
def test_a_box_is_cut_out_and_a_whole_tensor_left_as_it_is():
    """torch cannot cut one that is quantized by channels."""
    tensor = torch.arange(12).view(3, 4)
    assert narrow(tensor, Box((1, 2), (2, 2))).tolist() == [[6, 7], [10, 11]]
    assert narrow(tensor, Box((2, 0), (1, 4))).tolist() == [[8, 9, 10, 11]]
    scales, zeros = torch.ones(2), torch.zeros(2, dtype=torch.int64)
    whole = torch.quantize_per_channel(torch.ones(2, 2), scales, zeros, 0, torch.qint8)
    assert narrow(whole, Box((0, 0), (2, 2))) is whole
