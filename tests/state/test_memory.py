"""Keys that share memory, and elements that are copied as they are or not at all."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from dcp_objstore.errors import StateMismatchError
from dcp_objstore.state.memory import copy_elements, fill_order

ALL = torch.zeros(24)
MATRIX = ALL.view(4, 6)


@pytest.mark.parametrize(
    ("first", "second", "covered", "after"),
    [
        ([ALL], [ALL], {"first"}, set()),
        ([MATRIX], [MATRIX], {"first"}, set()),
        ([ALL[4:8]], [ALL[4:9]], {"first"}, set()),
        ([ALL[4:8]], [ALL[4:7]], set(), {"second"}),
        ([ALL[4:8]], [ALL[5:8]], set(), {"second"}),
        ([ALL[:12]], [ALL[12:]], set(), set()),
        ([ALL[12:]], [ALL[:12]], set(), set()),
        ([MATRIX[:, :2]], [MATRIX[:, 2:4]], set(), set()),  # each lies between parts of the other
        ([MATRIX[:, :2]], [MATRIX[:, 1:4]], set(), {"second"}),
        ([MATRIX[:, :2]], [MATRIX[3:, 2:]], set(), set()),
        ([MATRIX[:, :2]], [ALL[:20]], {"first"}, set()),
        ([ALL[12:], ALL[:12]], [ALL[:2]], set(), {"second"}),
        ([ALL[:2]], [ALL[12:], ALL[:12]], {"first"}, set()),
        ([ALL[:2], ALL[20:]], [ALL[8:12]], set(), set()),
        ([ALL[8:12]], [ALL[:2], ALL[20:]], set(), set()),
        ([ALL[:0], ALL[4:8]], [ALL[:4]], set(), set()),
        ([ALL[:0]], [ALL], set(), set()),
        ([ALL], [ALL[:0]], set(), set()),
    ],
)
def test_keys_that_share_memory_end_as_if_they_were_filled_in_turn(
    first: Sequence[torch.Tensor],
    second: Sequence[torch.Tensor],
    covered: set[str],
    after: set[str],
) -> None:
    assert fill_order({"first": first, "second": second}) == (covered, after)


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, that these will go
def test_what_is_quantized_in_another_way_is_described_briefly() -> None:
    floats, zeros = torch.ones(2, 2), torch.zeros(2, dtype=torch.int64)
    one, other = (
        torch.quantize_per_channel(floats, torch.full((2,), scale), zeros, 0, torch.qint8)
        for scale in (0.5, 0.25)
    )
    with pytest.raises(StateMismatchError, match=r"as qint8 with other scales .* state has qint8"):
        copy_elements(one, other)
    whole = torch.quantize_per_tensor(floats, 0.5, 3, torch.quint8)
    with pytest.raises(
        StateMismatchError, match=r"quint8 with scale 0.5 and zero point 3, .* float"
    ):
        copy_elements(whole, floats)
