"""State: modules, optimizers and Stateful objects come back as they were, wherever they stand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dcp_objstore.dcp.state import restore, to_state_dict
from dcp_objstore.errors import StateMismatchError


def trained(steps: int, seed: int = 0) -> dict[str, object]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(
        [
            {"params": model[0].parameters(), "lr": 0.1},
            {"params": [*model[1].parameters(), *model[2].parameters()]},
        ],
        lr=0.01,
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": 0}
    for _ in range(steps):
        advance(state)
    return state


def advance(state) -> float:
    loss = state["model"](torch.arange(12.0).view(3, 4)).square().sum()
    loss.backward()
    state["optimizer"].step()
    state["optimizer"].zero_grad()
    state["scheduler"].step()
    state["step"] += 1
    return loss.item()


def copied(state_dict):
    """As if it had been written and read: no tensor is shared with the original."""
    if isinstance(state_dict, torch.Tensor):
        return state_dict.detach().clone()
    if isinstance(state_dict, dict):
        return {key: copied(value) for key, value in state_dict.items()}
    if isinstance(state_dict, list):
        return [copied(value) for value in state_dict]
    return state_dict


def test_training_goes_on_exactly_where_it_was_saved():
    before = trained(5)
    saved = copied(to_state_dict(before))
    after = trained(0, seed=1)
    restore(after, saved)
    assert after["step"] == 5
    assert [advance(before) for _ in range(4)] == [advance(after) for _ in range(4)]


def test_optimizer_state_is_keyed_by_parameter_name_not_by_position():
    saved = to_state_dict(trained(1))
    assert "0.weight" in saved["optimizer"]["state"]
    assert saved["optimizer"]["param_groups"][0]["params"] == ["0.weight", "0.bias"]


def test_names_are_the_same_whether_compiled_or_not():
    model = nn.Linear(2, 2)
    compiled = torch.compile(model, backend="eager")
    assert to_state_dict({"m": compiled})["m"].keys() == to_state_dict({"m": model})["m"].keys()


def test_values_deep_in_dicts_and_lists_are_converted_and_replaced():
    inner = nn.Linear(2, 2)
    state = {"a": {"b": [1, inner, {"c": "x"}]}, "t": torch.zeros(2)}
    saved = copied(to_state_dict(state))
    assert set(saved["a"]["b"][1]) == {"weight", "bias"}
    saved["a"]["b"][0] = 7
    saved["a"]["b"][2]["c"] = "y"
    saved["a"]["b"][1]["bias"] = torch.full((2,), 5.0)
    restore(state, saved)
    assert state["a"]["b"][0] == 7
    assert state["a"]["b"][2]["c"] == "y"
    assert state["a"]["b"][1] is inner
    assert inner.bias.tolist() == [5.0, 5.0]


def test_several_optimizers_find_each_its_own_module():
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    state = {
        "generator": first,
        "critic": second,
        "optimizers": [
            torch.optim.SGD(second.parameters(), lr=0.1, momentum=0.9),
            torch.optim.SGD(first.parameters(), lr=0.2, momentum=0.9),
        ],
    }
    saved = copied(to_state_dict(state))
    for optimizer in state["optimizers"]:
        optimizer.param_groups[0]["lr"] = 9.0
    restore(state, saved)
    assert [o.param_groups[0]["lr"] for o in state["optimizers"]] == [0.1, 0.2]


def test_frozen_and_shared_parameters_are_saved_and_restored():
    model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
    model["b"].weight = model["a"].weight
    model["a"].bias.requires_grad_(False)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad])
    state = {"model": model, "optimizer": optimizer}
    model["b"](model["a"](torch.ones(1, 3))).sum().backward()
    optimizer.step()
    saved = copied(to_state_dict(state))
    expected = model["a"].weight.detach().clone()
    with torch.no_grad():
        model["a"].weight.zero_()
        model["a"].bias.fill_(3)
    restore(state, saved)
    assert torch.equal(model["b"].weight, expected)
    assert not torch.equal(model["a"].bias, torch.full((3,), 3.0))


class Counter:
    """Stateful by its two methods alone."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state_dict):
        self.count = state_dict["count"]


def test_anything_with_the_two_methods_is_restored_in_place():
    counter = Counter()
    state = {"nested": {"counter": counter}}
    restore(state, {"nested": {"counter": {"count": 4}}})
    assert state["nested"]["counter"] is counter
    assert counter.count == 4


def test_an_optimizer_without_its_module_says_what_to_pass():
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(StateMismatchError, match="no module of the state") as caught:
        to_state_dict({"train": {"optimizer": optimizer}, "m": other})
    assert caught.value.key == "train.optimizer"
    both = torch.optim.SGD([*model.parameters(), *other.parameters()])
    with pytest.raises(StateMismatchError, match="several modules"):
        to_state_dict({"m": model, "o": other, "optimizer": both})


def test_a_bare_module_is_refused_with_the_way_to_pass_it():
    with pytest.raises(StateMismatchError, match="'model'"):
        to_state_dict(nn.Linear(2, 2))
