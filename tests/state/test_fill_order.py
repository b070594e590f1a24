"""Tensors that share memory end as if one key were filled after the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from dcp_objstore.state.memory import fill_order
from tests.support.wrappers import Boxed, Codes, Pair

ALL = torch.zeros(24)
MATRIX = ALL.view(4, 6)
BYTES = ALL.view(torch.uint8).view(4, 24)


@pytest.mark.parametrize(
    ("first", "second", "covered", "after"),
    [
        ([ALL], [ALL], {"first"}, set()),
        ([ALL[4:8]], [ALL[4:9]], {"first"}, set()),
        ([ALL[4:8]], [ALL[5:8]], set(), {"second"}),
        ([ALL[4:8]], [ALL[3:9:2]], set(), {"second"}),
        ([ALL[4:8:2]], [ALL[5:9:2]], set(), set()),
        ([BYTES[:, 8:10]], [MATRIX[:, :2]], set(), set()),
        ([BYTES[:, 7:9]], [MATRIX[:, :2]], set(), {"second"}),
        ([MATRIX[:, 2:]], [BYTES[:, 6:8]], set(), set()),
        ([MATRIX[:, 2:]], [BYTES.view(torch.int16)[:, 3:5]], set(), {"second"}),
        ([MATRIX[1:3, ::2], ALL[:0]], [ALL[:0], MATRIX[::2, 1::2], ALL[18:20]], set(), set()),
        ([MATRIX[:, :2]], [MATRIX[:, 2:4]], set(), set()),  # each lies between parts of the other
        ([MATRIX[:, :2]], [ALL[:20]], {"first"}, set()),
        ([ALL[12:], ALL[:12]], [ALL[:2]], set(), {"second"}),
        ([ALL[:2]], [ALL[12:], ALL[:12]], {"first"}, set()),
        ([ALL[:2], ALL[20:]], [ALL[8:12]], set(), set()),
        ([ALL[:0], ALL[4:8]], [ALL[4:8]], {"first"}, set()),
        ([ALL], [ALL[:0]], set(), set()),
    ],
)
def test_keys_that_share_memory_end_as_if_they_were_filled_in_turn(first, second, covered, after):
    assert fill_order({"first": first, "second": second}) == (covered, after)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9), st.integers(1, 3)), max_size=5))
def test_what_is_filled_so_holds_what_filling_one_key_after_the_other_gives(slices):
    """What is covered not at all, the others in any order, and then what comes after them."""
    found, expected = torch.zeros(24), torch.zeros(24)
    parts = {number: slice(at, at + size, step) for number, (at, size, step) in enumerate(slices)}
    covered, after = fill_order({str(number): [found[part]] for number, part in parts.items()})
    for number, part in parts.items():
        expected[part] = number + 1
    first = [number for number in parts if str(number) not in covered | after]
    last = [number for number in parts if str(number) in after]
    for number in (*reversed(first), *last):
        found[parts[number]] = number + 1
    assert torch.equal(found, expected)


def test_wrappers_share_what_their_parts_share():
    scale, codes = torch.ones(3), torch.ones(3, 4, dtype=torch.int8)
    tied, near = Codes(codes, scale), Codes(torch.ones(3, 4, dtype=torch.int8), scale)
    assert fill_order({"a": [tied], "b": [tied]}) == ({"a"}, set())
    assert fill_order({"a": [tied], "b": [near]}) == (set(), {"b"})
    assert fill_order({"a": [codes], "b": [tied]}) == ({"a"}, set())
    assert fill_order({"a": [tied], "b": [codes]}) == (set(), {"b"})
    halves = [tied[:1], tied[1:]]
    assert fill_order({"a": halves, "b": [tied]}) == ({"a"}, set())
    assert fill_order({"a": [tied], "b": [Boxed(torch.ones(2))]}) == (set(), set())
    twice = Pair(Boxed(codes), Boxed(codes))  # what its own parts share is its own matter
    assert fill_order({"a": [twice]}) == (set(), set())


class On:
    """A tensor as if its memory were another device's."""

    def __init__(self, device: str, tensor: torch.Tensor) -> None:
        self.device = device
        self._tensor = tensor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tensor, name)


@pytest.mark.parametrize(
    ("tensors", "covered", "after"),
    [
        ({"a": ALL[4:8], "b": ALL[:12], "c": ALL[5:9]}, {"a"}, {"c"}),
        ({"a": ALL[:12], "b": ALL[2:4], "c": ALL[6:8]}, set(), {"b", "c"}),
        ({"a": ALL[2:4], "b": ALL[6:8], "c": ALL[:12]}, {"a", "b"}, set()),
        ({"a": ALL[:4], "b": On("cuda:0", ALL[1:3]), "c": ALL[2:6]}, set(), {"c"}),
        (
            {"a": On("cuda:0", ALL[:4]), "b": On("cuda:1", ALL), "c": On("cuda:0", ALL)},
            {"a"},
            set(),
        ),
    ],
)
def test_what_is_filled_in_vain_and_what_after_others_holds_for_many_keys(tensors, covered, after):
    assert fill_order({key: [tensor] for key, tensor in tensors.items()}) == (covered, after)
