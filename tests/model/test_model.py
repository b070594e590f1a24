"""The commit rules, explored: no order of steps and no fault in the model breaks a promise.

`python -m tests.model` prints the same as a table. That the model is one of our code is tested in
`test_model_traces`.
"""

from __future__ import annotations

import pytest

from tests.model.__main__ import mutants, searches
from tests.model.checker import Result

QUICK = searches(quick=True)
MUTANTS = mutants()


@pytest.mark.parametrize("config", QUICK, ids=lambda config: config.name)
def test_no_order_of_steps_and_no_fault_breaks_a_promise(config):
    result = config.search()
    assert not result.wrong, _told(result)


@pytest.mark.campaign
def test_millions_of_states_break_no_promise():
    states = 0
    for config in searches(quick=False):
        result = config.search()
        assert not result.wrong, _told(result)
        states += result.states
    assert states >= 5_000_000


# Its search is as long as all others together.
LONGEST = "a sweep goes on although the marker has changed"


@pytest.mark.parametrize(
    "catch",
    [
        pytest.param(catch, id=name, marks=[pytest.mark.campaign] * (name == LONGEST))
        for name, catch in MUTANTS.items()
    ],
)
def test_every_weakened_rule_is_caught(catch):
    caught = catch()
    assert caught, "nothing breaks without this rule"
    print(_told(caught[1]))
    assert caught[1].trace


def _told(result: Result) -> str:
    return "\n".join([f"{result.wrong}, after", *(f"    {event}" for event in result.trace)])
