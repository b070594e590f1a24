"""Optimizers and Stateful objects load what was saved, into fresh and stepped ones, no more.

`test_optimizers_resume` compares whole trainings; here is what a training does not show.
"""

from __future__ import annotations

import copy
import logging
import operator
from collections import Counter, defaultdict
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties, TensorStorageMetadata

import dcp_objstore as dos
from dcp_objstore.errors import RankFailedError, StateMismatchError
from dcp_objstore.state import fsdp1, optimizers
from dcp_objstore.state.fsdp1 import FlatOptimizer
from dcp_objstore.state.optimizers import NamedOptimizer
from dcp_objstore.state.record import Record
from tests.support.checkpoints import memory_url


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, times: int = 1) -> None:
    for _ in range(times):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).square().sum().backward()
        optimizer.step()


def saved(steps: int = 2, **settings: Any) -> str:
    model = layers()
    optimizer = torch.optim.AdamW(model.parameters(), **settings)
    step(model, optimizer, steps)
    dos.save({"model": model, "optimizer": optimizer}, url := memory_url(), progress=False)
    return url


def test_what_an_optimizer_has_already_is_filled_in_place():
    url, model = saved(), layers()
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    before = {id(parameter): dict(state) for parameter, state in optimizer.state.items()}
    dos.load({"model": model, "optimizer": optimizer}, url, progress=False)
    for parameter, state in optimizer.state.items():
        assert all(state[name] is value for name, value in before[id(parameter)].items())
        assert float(state["step"]) == 2


def test_an_optimizer_with_a_state_dict_of_its_own_form_gets_it_back():
    class Counting(torch.optim.SGD):
        kept = 1

        def state_dict(self) -> dict[str, Any]:
            return {"kept": self.kept}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.kept = state_dict["kept"]

    model = layers()
    optimizer = Counting(model.parameters(), lr=0.1)
    optimizer.kept = 5
    dos.save({"model": model, "optim": optimizer}, url := memory_url(), progress=False)
    fresh = Counting(model.parameters(), lr=0.1)
    dos.load({"model": model, "optim": fresh}, url, progress=False)
    assert fresh.kept == 5


def test_a_state_that_was_only_looked_at_is_not_saved():
    model = layers()
    optimizer = torch.optim.AdamW(model.parameters())
    assert optimizer.state[model[0].weight] == {}  # now there is one, which is empty
    dos.save({"model": model, "optimizer": optimizer}, url := memory_url(), progress=False)
    assert not [key for key in dos.open(url) if key.startswith("optimizer.state")]


@pytest.mark.parametrize("set_to", [None, torch.bfloat16])
def test_new_state_lies_in_memory_as_its_parameter_does(set_to):
    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Conv2d(3, 4, 2), nn.Conv2d(4, 2, 2))
        model.to(memory_format=torch.channels_last, dtype=set_to)
        return model, torch.optim.AdamW(model.parameters())

    model, optimizer = made()
    model(torch.ones(1, 3, 4, 4, dtype=set_to)).sum().backward()
    optimizer.step()
    dos.save({"model": model, "optimizer": optimizer}, url := memory_url(), progress=False)
    other, fresh = made()
    dos.load({"model": other, "optimizer": fresh}, url, progress=False)
    for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
        for name, loaded in fresh.state[mine].items():
            expected = optimizer.state[theirs][name]
            assert torch.equal(loaded, expected)
            assert loaded.stride() == expected.stride()


def grouped(*, by_layer: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = layers()
    first, second = model
    kinds = ([first.weight, second.weight], [first.bias, second.bias])
    parts = ([*first.parameters()], [*second.parameters()]) if by_layer else kinds
    groups = [{"params": part, "lr": 0.1 * (at + 1)} for at, part in enumerate(parts)]
    return model, torch.optim.AdamW([{"params": [], "lr": 0.7}, *groups])


def test_a_group_with_different_settings_is_refused_or_keeps_its_own(caplog):
    model, optimizer = grouped(by_layer=True)
    step(model, optimizer)
    for number, group in enumerate(optimizer.param_groups):
        group["initial_lr"] = number
    dos.save({"model": model, "optimizer": optimizer}, url := memory_url(), progress=False)
    other, regrouped = grouped(by_layer=False)
    for group in regrouped.param_groups:
        group["initial_lr"] = 7
    regrouped.param_groups[0]["lr"] = regrouped.param_groups[1]["lr"] = 0.3
    with pytest.raises(StateMismatchError, match="lr") as caught:
        dos.load({"model": other, "optimizer": regrouped}, url, progress=False)
    assert caught.value.key == "optimizer.param_groups.1"
    with caplog.at_level(logging.WARNING):
        dos.load({"model": other, "optimizer": regrouped}, url, strict=False, progress=False)
    assert [group["lr"] for group in regrouped.param_groups] == [0.7, 0.3, 0.2]
    assert [group["initial_lr"] for group in regrouped.param_groups] == [0, 7, 7]
    assert "group 1: initial_lr, lr" in caplog.text
    step(other, regrouped)


def test_state_of_parameters_that_nobody_has_is_warned_of(caplog):
    url, model = saved(), layers()
    optimizer = torch.optim.AdamW(model[1].parameters())
    with caplog.at_level(logging.WARNING):
        dos.load({"model": model, "optimizer": optimizer}, url, progress=False)
    assert "optimizer.state.0.bias.exp_avg" in caplog.text
    assert "6 keys" in caplog.text


def test_only_what_trains_and_has_elements_is_said_to_begin_without_state(caplog):
    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        sizes = {"stated": 2, "lacks": 2, "frozen": 2, "empty": 0}
        model = nn.ParameterDict({name: torch.ones(size) for name, size in sizes.items()})
        model["frozen"].requires_grad_(False)
        return model, torch.optim.Adam(model.parameters())

    model, optimizer = made()
    model["stated"].grad = torch.ones(2)
    optimizer.step()
    dos.save({"model": model, "optimizer": optimizer}, url := memory_url(), progress=False)
    other, fresh = made()
    dos.load({"model": other, "optimizer": fresh}, url, progress=False)
    (said,) = (record.getMessage() for record in caplog.records)
    assert "1 parameters; the optimizer starts without it (lacks)" in said


def test_what_a_checkpoint_does_not_know_of_keeps_its_optimizer_state_if_not_strict():
    model = layers()
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    before = copy.deepcopy(optimizer.state_dict())
    dos.save({"model": model}, url := memory_url(), progress=False)
    dos.load({"model": model, "optimizer": optimizer}, url, strict=False, progress=False)
    assert repr(optimizer.state_dict()) == repr(before)


def test_what_was_saved_in_a_dict_that_is_empty_now_is_warned_of(caplog):
    dos.save({"rates": {"a": 1, "b": 2}, "step": 3}, url := memory_url(), progress=False)
    with caplog.at_level(logging.WARNING):
        dos.load({"rates": {}, "step": 0}, url, progress=False)
    assert "rates.a, rates.b" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING):  # nobody asked for it
        dos.load({"step": 0}, url, progress=False)
    assert not caplog.text


@pytest.mark.parametrize("steps", [0, 1])
def test_a_numbered_state_dict_may_be_the_whole_state(steps):
    model, other = layers(), layers()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    step(model, optimizer, 2)
    dos.save(optimizer.state_dict(), url := memory_url(), progress=False)
    fresh = torch.optim.AdamW(other.parameters())
    step(other, fresh, steps)
    dos.load(raw := fresh.state_dict(), url, progress=False)
    fresh.load_state_dict(raw)
    assert fresh.param_groups[0]["lr"] == 0.5
    pairs = zip(other.parameters(), model.parameters(), strict=True)
    for mine, theirs in pairs:
        assert torch.equal(fresh.state[mine]["exp_avg"], optimizer.state[theirs]["exp_avg"])


def test_a_parameter_whose_name_is_a_number_is_not_taken_for_a_group():
    def make() -> tuple[nn.ParameterList, torch.optim.Optimizer]:
        model = nn.ParameterList([torch.ones(1), torch.ones(2)])
        groups = [{"params": [model[1]], "lr": 1.0}, {"params": [model[0]], "lr": 2.0}]
        return model, torch.optim.AdamW(groups)

    model, optimizer = make()
    dos.save({"model": model, "optimizer": optimizer}, url := memory_url(), progress=False)
    other, fresh = make()
    for group in fresh.param_groups:
        group["lr"] = 9.0
    dos.load({"model": other, "optimizer": fresh}, url, progress=False)
    assert [group["lr"] for group in fresh.param_groups] == [1.0, 2.0]


@pytest.mark.parametrize("rates", [(0.25, 0.25), (0.25, 0.5), (0.25, None)])
def test_groups_become_one_where_their_settings_that_are_tensors_are_equal(rates):
    model = layers()
    values = [0.25 if rate is None else torch.tensor(rate) for rate in rates]
    parts = zip(model, values, strict=True)
    groups = [{"params": layer.parameters(), "lr": value} for layer, value in parts]
    dos.save(
        {"model": model, "optimizer": torch.optim.AdamW(groups)},
        url := memory_url(),
        progress=False,
    )
    optimizer = torch.optim.AdamW(model.parameters())
    if len({*rates}) == 1:
        dos.load({"model": model, "optimizer": optimizer}, url, progress=False)
        assert repr(optimizer.param_groups[0]["lr"]) == repr(values[0])
    else:
        with pytest.raises(StateMismatchError, match="lr"):
            dos.load({"model": model, "optimizer": optimizer}, url, progress=False)


def test_a_group_of_new_parameters_keeps_all_of_its_settings(caplog):
    url, model = saved(), nn.Sequential(*layers(), nn.Linear(3, 3))
    groups = [{"params": part.parameters(), "lr": 0.5, "initial_lr": 0.5} for part in model]
    optimizer = torch.optim.AdamW(groups)
    dos.load({"model": model, "optimizer": optimizer}, url, strict=False, progress=False)
    rates = [group.get("initial_lr") for group in optimizer.param_groups]
    assert (rates, optimizer.param_groups[2]["lr"]) == ([None, None, 0.5], 0.5)
    assert "group 2: all" in caplog.text


@pytest.mark.parametrize("setting", [None, "capturable", "fused"])
def test_steps_are_counted_on_the_host_unless_the_optimizer_counts_on_the_device(setting):
    model = nn.Linear(2, 3, bias=False, device="meta")
    optimizer = torch.optim.AdamW(model.parameters())
    if setting is not None:
        optimizer.param_groups[0][setting] = True
    named = NamedOptimizer(optimizer, model, {"weight"}, ("model",))
    properties = TensorProperties(torch.float32)
    sizes = {"step": torch.Size([]), "exp_avg": torch.Size([3, 2]), "norm": torch.Size([])}
    record = Record(
        Metadata({
            f"optimizer.state.weight.{name}": TensorStorageMetadata(properties, size, [])
            for name, size in sizes.items()
        }),
        {},
    )  # fmt: skip
    wanted = named.ask(named.state_dict, record, ("optimizer",), strict=True)
    assert wanted is not None
    devices = {name.rpartition(".")[2]: str(tensor.device) for name, tensor in wanted.items()}
    assert devices == {"step": "meta" if setting else "cpu", "exp_avg": "meta", "norm": "meta"}


class Held:
    """A Stateful."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def state_dict(self) -> Any:
        return self.held

    def load_state_dict(self, state_dict: Any) -> None:
        self.held = state_dict


T = torch.ones(2)


@pytest.mark.parametrize(
    ("had", "has"),
    [
        ({"items": [T, T, T]}, {"items": [T]}),
        ({"items": [T]}, {"items": [T, T, T]}),
        ({"items": [T]}, {"items": []}),
        ({"items": []}, {"items": [T]}),
        ({"items": T}, {"items": None}),
        ({"items": None}, {"items": T}),
        ({"by": Counter({2: 1, 5: 1})}, {"by": Counter({2: 7})}),
        ({"by": {3: {"a": T}}, "empty": {}}, {"by": {}, "empty": {}}),
        ([T, [1]], [T]),
        ({"a": 1, "a.b": T}, {}),
        ({"items": [{"x": T}]}, {"items": [{"x": torch.zeros(2)}, {"x": torch.zeros(2)}]}),
        ({"items": [{"x": T}, {"y": 1}]}, {"items": [{"x": torch.zeros(2)}]}),
        ({"items": [{}, {"x": T}, {}]}, {"items": [{}, {"x": torch.zeros(2)}, {}]}),
        ({"items": [{}, {"x": T}, {}]}, {}),
        ({"n": 1, "of": {1: {}, 2: {"a": {}}}}, {"n": 0}),
        ({"by": {}, "n": 1}, {"by": {1: T}, "n": 0}),
    ],
)
def test_a_stateful_object_is_given_what_was_saved_whatever_it_has(had, has):
    dos.save({"held": Held(had)}, url := memory_url(), progress=False)
    dos.load({"held": (held := Held(has))}, url, progress=False)
    assert repr(held.held) == repr(had)


def test_what_a_load_adds_to_a_list_lies_in_memory_as_the_tensor_before_it():
    plain, order = torch.ones(1, 3, 4, 4), torch.channels_last
    like = plain.to(memory_format=order)
    had = {"items": [plain, like, plain, plain], "by": {"more": [like, plain]}}
    dos.save({"held": Held(had)}, url := memory_url(), progress=False)
    held = Held({"items": [plain.clone(), like.clone(), 5], "by": {"more": [like.clone()]}})
    dos.load({"held": held}, url, progress=False)
    loaded = [*held.held["items"], *held.held["by"]["more"]]
    assert [item.is_contiguous(memory_format=order) for item in loaded] == [False] + [True] * 5


def test_what_a_stateful_object_has_and_the_checkpoint_lacks_is_named():
    """Beside what was saved in the same dict; what is in a list was decided by the save."""
    dos.save({"held": Held({"by": {"a": T, "c": [T]}})}, url := memory_url(), progress=False)
    held = Held({"by": {"a": T * 0, "b": T, "c": [T * 0, T]}})
    with pytest.raises(StateMismatchError, match=r"in 1 key:\s+held\.by\.b:"):
        dos.load({"held": held}, url, progress=False)


@pytest.mark.parametrize("groups", [[1, 2], ["params"], [{"lr": 1}], {"params": [T]}])
def test_a_dict_with_the_keys_of_an_optimizers_state_is_a_dict(groups):
    value = {"state": T, "param_groups": groups}
    dos.save({"own": value}, url := memory_url(), progress=False)
    state = {"own": {"state": (filled := torch.zeros(2)), "param_groups": groups}}
    dos.load(state, url, progress=False)
    assert state["own"]["state"] is filled
    assert repr(state["own"]) == repr(value)


def test_tensors_that_an_optimizer_makes_of_a_load_are_no_inference_tensors():
    class Copies(torch.optim.SGD):
        def load_state_dict(self, state_dict: Any) -> None:
            super().load_state_dict(copy.deepcopy(state_dict))

    model = layers()
    optimizer = Copies(model.parameters(), momentum=0.9)
    step(model, optimizer)
    dos.save({"model": model, "optimizer": optimizer}, url := memory_url(), progress=False)
    with torch.inference_mode():
        dos.load({"model": model, "optimizer": optimizer}, url, progress=False)
    step(model, optimizer)


def test_tensors_that_a_stateful_object_makes_of_a_load_are_no_inference_tensors():
    class Copies(Held):
        def load_state_dict(self, state_dict: Any) -> None:
            self.held = copy.deepcopy(state_dict)

    dos.save({"held": Held({"t": T})}, url := memory_url(), progress=False)
    held = Copies({"t": T * 0})
    with torch.inference_mode():
        dos.load({"held": held}, url, progress=False)
    assert not held.held["t"].is_inference()


def test_a_save_of_an_optimizer_that_lost_a_parameter_says_what_was_raised():
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    del optimizer.param_groups[0]["params"][0]
    with pytest.raises(StateMismatchError, match=r"state_dict of this Adam raised KeyError"):
        dos.save({"model": model, "optimizer": optimizer}, memory_url(), progress=False)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (KeyError("inner"), StateMismatchError),
        (MemoryError("all"), RankFailedError),
        (OSError("too many files"), RankFailedError),
    ],
)
def test_an_error_of_a_values_own_methods_names_the_value(error, kind):
    class Fails(Held):
        def state_dict(self) -> Any:
            raise error

        def load_state_dict(self, state_dict: Any) -> None:
            raise error

    says = f"of this Fails raised {type(error).__name__}: {error}"
    with pytest.raises(kind, match=f"state_dict {says}") as caught:
        dos.save({"a": {"b": Fails(1)}}, memory_url(), progress=False)
    assert caught.value.key == "a.b"
    Fails.state_dict = Held.state_dict  # type: ignore[method-assign]
    dos.save({"b": Fails({"n": 1})}, url := memory_url(), progress=False)
    with pytest.raises(kind, match=f"load_state_dict {says}") as caught:
        dos.load({"b": Fails({"n": 2})}, url, progress=False)
    assert caught.value.key == "b"


def test_a_load_of_what_another_optimizer_wrote_says_so():
    class Other(torch.optim.SGD):
        def load_state_dict(self, state_dict: Any) -> None:
            raise KeyError("momentum_buffer")

    model = layers()
    state = {"model": model, "optimizer": Other(model.parameters(), momentum=0.9)}
    with pytest.raises(StateMismatchError, match="than Other wrote this, without 'momentum_buf"):
        dos.load(state, saved(), progress=False)


def test_a_module_whose_hooks_rename_keys_is_refused_with_what_to_pass():
    model = layers()
    model._register_state_dict_hook(
        lambda _, state, prefix, __: state.update({"core.weight": state.pop(f"{prefix}0.weight")})
    )
    with pytest.raises(StateMismatchError, match="pass its state_dict") as caught:
        dos.save({"model": model}, memory_url(), progress=False)
    assert caught.value.key == "model"


def test_settings_of_a_ranks_own_groups_win_over_numbered_ones(monkeypatch):
    """Under one number there are settings of several ranks, some of each."""
    model = layers()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    monkeypatch.setattr(optimizers, "rank_and_world_size", lambda: (0, 2))
    own = NamedOptimizer(optimizer, model, dict(model.named_parameters()), ("model",)).state_dict
    monkeypatch.undo()
    mixed = own | {"param_groups": [group | {"lr": 0.9} for group in own["param_groups"]]}
    dos.save({"model": model, "optimizer": mixed}, url := memory_url(), progress=False)
    optimizer.param_groups[0]["lr"] = 0.1
    dos.load({"model": model, "optimizer": optimizer}, url, progress=False)
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_under_fsdp1_the_state_of_a_parameter_that_had_none_is_not_asked_for():
    """Of its flat parameters only torch knows the names, so the trial step stands for the state."""
    model = layers()
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    del optimizer.state[model[1].bias]
    dos.save({"model": model, "optimizer": optimizer}, url := memory_url(), progress=False)
    record = Record(dos.ObjectStoreReader(url).read_metadata(), {})
    other = layers()
    fresh = torch.optim.AdamW(other.parameters())
    names = [name for name, _ in other.named_parameters()]
    flat = FlatOptimizer(fresh, other, names, ("model",), loading=True)
    assert not fresh.state
    asked = flat.ask(None, record, ("optimizer",), strict=True)
    assert asked["state"].keys() == {"0.weight", "0.bias", "1.weight"}
    assert flat.lacking == ["1.bias"]
    flat.restore(asked)
    assert other[1].bias not in fresh.state
    assert other[1].weight in fresh.state


@pytest.mark.parametrize("frozen", [False, True], ids=["without elements", "frozen"])
def test_under_fsdp1_an_optimizer_is_not_stepped_for_what_never_gets_a_state(frozen):
    model = nn.ParameterDict({"trains": torch.ones(2), "other": torch.ones(2 if frozen else 0)})
    model["other"].requires_grad_(not frozen)
    optimizer = torch.optim.Adam(model.parameters())
    model["trains"].grad = torch.ones(2)
    optimizer.step()
    flat = FlatOptimizer(optimizer, model, ["trains"], ("model",), loading=True)
    assert flat.state_dict["state"]["trains"]["exp_avg"].all(), "a step would begin with zeros"


NAMES, STATE, GROUPS = ["model.a", "model.b"], "o.state.a.exp_avg", "o.param_groups.0.lr"


@pytest.mark.parametrize(
    ("keys", "steps", "strict", "asked", "lacking", "restored_without"),
    [
        ([*NAMES, STATE], 0, True, "a", "b", "b"),
        ([*NAMES, STATE], 1, True, "a", "b", "b"),
        (["model.a", STATE], 0, True, "ab", "", ""),  # the checkpoint does not know `b`
        (["model.a", STATE], 0, False, "ab", "", "b"),
        (["model.a", STATE], 1, False, "ab", "", ""),
        (NAMES, 0, True, "", "", "ab"),
        (NAMES, 0, False, "ab", "", "ab"),  # it has nothing of the optimizer
        (NAMES, 1, False, "ab", "", ""),
        ([*NAMES, GROUPS], 1, False, "", "", "ab"),
    ],
)
def test_under_fsdp1_a_load_asks_for_state_that_was_saved_or_may_be_missed(
    keys, steps, strict, asked, lacking, restored_without
):
    model = nn.ParameterDict({name: torch.ones(2) for name in "ab"})
    optimizer = torch.optim.Adam(model.parameters())
    if steps:
        sum(value.sum() for value in model.values()).backward()  # type: ignore[union-attr]
        optimizer.step()
    flat = FlatOptimizer(optimizer, model, ["a", "b"], ("model",), loading=True)
    tensor = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size([2]), [])
    record = Record(Metadata(dict.fromkeys(keys, tensor)), {})
    wanted = flat.ask(None, record, ("o",), strict=strict)
    assert "".join(wanted["state"]) == asked
    assert wanted["param_groups"] == flat.state_dict["param_groups"]
    assert ("".join(flat.lacking), "".join(flat._without_state)) == (lacking, restored_without)


def test_under_fsdp1_the_step_that_torch_makes_leaves_no_trace():
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    step(model, optimizer)
    state, gradients = optimizer.state, [parameter.grad for parameter in model.parameters()]
    with pytest.raises(ValueError, match="of the step"), fsdp1._stepping(optimizer):
        assert (optimizer.state, model[0].weight.grad) == ({}, None)
        assert optimizer.state["made when it is looked for"] == {}
        optimizer.param_groups[0]["lr"] = 0.0
        raise ValueError("of the step")
    assert optimizer.state is state
    assert all(map(operator.is_, (one.grad for one in model.parameters()), gradients))
    assert optimizer.param_groups[0]["lr"] == 0.5
    for loaded, after in ((None, state), (other := defaultdict(dict), other)):
        with pytest.raises(ValueError, match="of the load"), fsdp1._not_stepping(optimizer):
            assert optimizer.state, "torch would make one"
            optimizer.state = optimizer.state if loaded is None else loaded
            raise ValueError("of the load")
        assert optimizer.state is after
    empty: dict[str, Any] = {"params": []}
    one = torch.optim.SGD([*optimizer.param_groups, dict(empty)], lr=0.5)
    FlatOptimizer(one, model, [], ("model",), loading=False)
    one.add_param_group(dict(empty))
    with pytest.raises(StateMismatchError, match="at most one"):
        FlatOptimizer(one, model, [], ("model",), loading=False)
