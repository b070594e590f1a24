"""Optimizers of other libraries go on as through their own `state_dict` and `load_state_dict`."""

from __future__ import annotations

import importlib.util

import pytest

from tests.support.campaign import cases
from tests.support.optimizers.cases import cases_of
from tests.support.optimizers.rows import RIGHT, WRONG, row
from tests.support.optimizers.scenes import SCENES

pytestmark = pytest.mark.timeout(900)

# How many of each go on exactly after a load into a fresh one; the others are refused by their key.
_LEAST_RIGHT = {"pytorch_optimizer": 134, "schedulefree": 11, "timm": 23, "torchao": 6}


@pytest.mark.parametrize("scene", cases(SCENES, default=["fresh", "stepped"]))
@pytest.mark.parametrize("library", _LEAST_RIGHT)
def test_each_optimizer_goes_on_as_through_its_own_state_dict(library, scene):
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    found = [row(case, SCENES[scene]) for case in cases_of(library)]
    wrong = [str(one) for one in found if one.outcome == WRONG]
    assert not wrong, "\n".join(["", *wrong])
    if scene == "fresh":
        assert sum(one.outcome == RIGHT for one in found) >= _LEAST_RIGHT[library]
