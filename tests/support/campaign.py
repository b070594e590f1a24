"""Cases of one guarantee, of which a few stand for all in the default suite."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest

# Whether the campaign is not asked for: its cases, two of five, are then not even collected.
is_left_out = False


def cases(every: Iterable[Any], *, default: Collection[Any]) -> list[Any]:
    """Parameters for `parametrize`: those that are not in `default` are for the campaign."""
    every = list(every)
    assert all(one in every for one in default)
    if is_left_out and default:
        return [one for one in every if one in default]
    return [
        one
        if one in default
        else pytest.param(*(one if isinstance(one, tuple) else (one,)), marks=pytest.mark.campaign)
        for one in every
    ]
