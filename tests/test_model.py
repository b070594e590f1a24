"""The commit rules, explored: no order of steps and no fault in the model breaks a promise.

`python -m tests.model` prints the same as a table. That the model is one of our code is tested in
`test_model_traces`.
"""

from __future__ import annotations

import pytest

from tests.model.configs import CONFIGS, MUTANTS, Config, catch

QUICK = [config for config in CONFIGS if config.quick]
LONG = [config for config in CONFIGS if not config.quick]


@pytest.mark.parametrize("config", QUICK, ids=lambda config: config.name)
def test_no_order_of_steps_and_no_fault_breaks_a_promise(config: Config) -> None:
    result = config.search()
    assert not result.wrong, _told(result.wrong, result.trace)
    assert result.complete


@pytest.mark.campaign
def test_a_million_states_and_more_break_no_promise() -> None:
    results = [config.search() for config in CONFIGS]
    for result in results:
        assert not result.wrong, _told(result.wrong, result.trace)
        assert result.complete
    assert sum(result.states for result in results) >= 1_000_000


@pytest.mark.parametrize("mutant", MUTANTS)
def test_every_weakened_rule_is_caught(mutant: str) -> None:
    caught = catch(mutant)
    assert caught, f"nothing breaks without the rule: {mutant}"
    _, result = caught
    print(_told(result.wrong, result.trace))
    assert result.trace


def _told(wrong: str | None, trace: list[object]) -> str:
    return "\n".join([f"{wrong}, after", *(f"    {event}" for event in trace)])
