"""What a marker says of parts that were left out, beside what the user has noted there."""

from __future__ import annotations

import pytest

from dcp_objstore.checkpoint.marker import left_out_of

COUNT = {"tensors": 1, "elements": 6}


@pytest.mark.parametrize(
    "other", [3, [1, 6], {"tensors": 1}, {**COUNT, "more": 1}, {"tensors": "1", "elements": 6}, {}]
)
def test_counts_of_a_save_are_told_from_values_of_the_user(other):
    assert left_out_of({"left_out": {"model": COUNT, "mine": other}}) == {"model": COUNT}
    assert left_out_of({"left_out": other}) == {}


def test_a_save_that_left_nothing_out_says_nothing():
    assert left_out_of({"step": 1}) == {}
