"""State: modules, optimizers and Stateful objects come back as they were, wherever they stand."""

from __future__ import annotations

import inspect
import operator
from collections import Counter, OrderedDict, defaultdict
from types import MappingProxyType

import pytest
import torch
from torch import nn

import dcp_objstore as dos
from dcp_objstore.errors import RankFailedError, StateMismatchError, UnsupportedError
from dcp_objstore.state.per_rank import PerRank
from dcp_objstore.state.state_dict import AgreeingPlanner, ConvertedState
from tests.support.checkpoints import memory_url


def to_state_dict(state):
    return ConvertedState(state, loading=False).state_dict


def restore(state, saved) -> None:
    """Load what a state dict has, as it was written."""
    url = memory_url()
    dos.save(saved, url, progress=False)
    dos.load(state, url, progress=False)


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


_OPTIMIZERS = [
    kind
    for kind in vars(torch.optim).values()
    if isinstance(kind, type)
    and issubclass(kind, torch.optim.Optimizer)
    and kind is not torch.optim.Optimizer
]
# The one wants a closure, the other sparse gradients.
_OTHER_STEPS = ("LBFGS", "SparseAdam")


def small(kind: type[torch.optim.Optimizer], steps: int = 0) -> dict[str, object]:
    """A training whose optimizer has each setting that leaves a mark in a state of no gradients."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2, bias=False)
    wanted = {"weight_decay": 0.1, "momentum": 0.9, "dampening": 0.5, "amsgrad": True}
    known = inspect.signature(kind).parameters
    optimizer = kind(model.parameters(), **{k: v for k, v in wanted.items() if k in known})
    state = {"model": model, "optimizer": optimizer}
    train(state, steps)
    return state


def train(state: dict[str, object], steps: int) -> torch.Tensor:
    for _ in range(steps):
        state["model"](torch.arange(12.0).view(4, 3)).square().sum().backward()
        state["optimizer"].step()
        state["optimizer"].zero_grad()
    return state["model"].weight.detach().clone()


@pytest.mark.parametrize("kind", _OPTIMIZERS, ids=operator.attrgetter("__name__"))
def test_an_optimizer_that_has_not_stepped_is_saved_as_such(kind, caplog):
    url, saved = memory_url(), small(kind)
    before = dict(saved["optimizer"].state)  # Adagrad has one from the start
    dos.save(saved, url, progress=False)
    assert dict(saved["optimizer"].state) == before
    assert any(key.startswith("optimizer.state") for key in dos.open(url)) is bool(before)
    if kind.__name__ in _OTHER_STEPS:
        state = small(kind)
        dos.load(state, url, progress=False)
        assert dict(state["optimizer"].state) == before
        assert state["model"].weight.grad is None
        return
    expected = train(small(kind), 3)
    for steps in (0, 2):  # the one that has stepped is as fresh as the other afterwards
        loaded = small(kind, steps)
        dos.load(loaded, url, progress=False)
        assert loaded["optimizer"].state.keys() == {loaded["model"].weight for _ in before}
        assert torch.equal(train(loaded, 3), expected)
    assert torch.equal(train(saved, 3), expected)
    assert "no optimizer state" not in caplog.text


def test_what_a_checkpoint_does_not_know_of_keeps_its_optimizer_state_if_not_strict():
    url, state = memory_url(), small(torch.optim.Adam, 3)
    dos.save({"model": state["model"]}, url, progress=False)
    before = {name: value.clone() for name, value in state_of(state).items()}
    dos.load(state, url, strict=False, progress=False)
    assert all(torch.equal(value, before[name]) for name, value in state_of(state).items())
    fresh = small(torch.optim.Adam)
    dos.load(fresh, url, strict=False, progress=False)
    assert not fresh["optimizer"].state


def state_of(state: dict[str, object]) -> dict[str, torch.Tensor]:
    return state["optimizer"].state[state["model"].weight]


def test_optimizer_state_is_keyed_by_parameter_name_not_by_position():
    saved = to_state_dict(trained(1))
    assert "0.weight" in saved["optimizer"]["state"]
    assert saved["optimizer"]["param_groups"][0]["params"] == ["0.weight", "0.bias"]


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


def test_a_list_of_plain_values_comes_back_with_the_length_it_was_saved_with():
    losses: list[float] = []
    state = {"losses": losses, "nested": {"seen": [9, 9, 9]}}
    restore(state, {"losses": [0.5, 0.25], "nested": {"seen": [[1], None]}})
    assert losses == [0.5, 0.25]
    assert state["losses"] is losses
    assert state["nested"]["seen"] == [[1], None]


def test_keys_that_are_no_str_and_types_of_dicts_come_back():
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4])
    saved = to_state_dict({"scheduler": scheduler, "by_layer": {3: "x", 4: {True: "a"}}})
    assert saved["scheduler"]["milestones"] == {"2": 1, "4": 1}
    assert saved["by_layer"] == {"3": "x", "4": {"True": "a"}}
    saved["scheduler"]["milestones"]["2"] = 5
    state = {"scheduler": scheduler, "by_layer": {3: "y", 4: {True: "b"}}}
    restore(state, saved)
    assert scheduler.milestones == Counter({2: 5, 4: 1})
    assert isinstance(scheduler.milestones, Counter)
    assert state["by_layer"] == {3: "x", 4: {True: "a"}}


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


class Odometer:
    """Stateful by its two methods alone."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state_dict):
        self.count = state_dict["count"]


def test_anything_with_the_two_methods_is_restored_in_place():
    counter = Odometer()
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
    with pytest.raises(StateMismatchError, match="module that contains"):
        to_state_dict({"m": model, "o": other, "third": nn.Linear(2, 2), "optimizer": both})


def test_a_bare_module_is_refused_with_the_way_to_pass_it():
    with pytest.raises(StateMismatchError, match="'model'"):
        to_state_dict(nn.Linear(2, 2))


def test_what_could_not_be_loaded_again_is_refused_before_it_is_saved():
    model = nn.Linear(2, 2)
    with pytest.raises(StateMismatchError, match="tuple") as caught:
        to_state_dict({"models": (1, {"m": model})})
    assert caught.value.key == "models"
    with pytest.raises(StateMismatchError, match="must be str"):
        to_state_dict({1: model})


class Holder:
    """A Stateful."""

    def __init__(self, held) -> None:
        self.held = held

    def state_dict(self):
        return self.held

    def load_state_dict(self, state_dict) -> None:
        self.held = state_dict


SAME_NAMES = {
    "in a dict": (
        lambda: {"d": {0: torch.ones(1), "0": torch.zeros(1)}},
        ("d.0", "0 and '0' of state['d']"),
    ),
    "of modules": (
        lambda: {"d": {0: nn.Linear(1, 1), "0": nn.Linear(1, 1)}},
        ("d.0", "0 and '0' of state['d']"),
    ),
    "in a Stateful": (
        lambda: {"d": Holder({"l": [{None: torch.ones(1), "None": 1}]})},
        ("d.l.0.None", "None and 'None' of state['d']['l'][0]"),
    ),
    "of this rank's PerRank": (lambda: {"d": PerRank(1), "d.0": 2}, ("d.0", "state['d']")),
    "of another rank's PerRank": (lambda: {"d": PerRank(1), "d.7": 2}, ("d.7", "state['d']")),
}


@pytest.mark.parametrize("loading", [False, True], ids=["saving", "loading"])
@pytest.mark.parametrize("where", SAME_NAMES)
def test_keys_that_have_the_same_name_in_a_checkpoint_are_refused(where, loading):
    model = nn.Linear(1, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    make, (key, named) = SAME_NAMES[where]
    with pytest.raises(StateMismatchError) as caught:
        ConvertedState({"model": model, "optimizer": optimizer, **make()}, loading=loading)
    assert caught.value.key == key
    assert named in str(caught.value)
    assert not optimizer.state


@pytest.mark.parametrize("call", [dos.save, dos.load])
def test_a_name_with_a_dot_does_not_stand_for_a_nested_one(call):
    state = {"a": {"b": torch.ones(1)}, "a.b": torch.zeros(1)}
    url = "memory://state/dots"
    dos.save({"a": {"b": torch.ones(1)}}, url, overwrite=True)
    with pytest.raises(
        StateMismatchError, match=r"state\['a'\]\['b'\] and state\['a\.b'\]"
    ) as caught:
        call(state, f"{url}-2" if call is dos.save else url)
    assert caught.value.key == "a.b"


def test_a_module_without_parameters_and_an_empty_parameter_group_are_fine():
    model = nn.Linear(2, 2)
    groups = [{"params": model.parameters()}, {"params": [], "lr": 0.5}]
    state = {"act": nn.ReLU(), "model": model, "optimizer": torch.optim.SGD(groups, lr=0.1)}
    saved = copied(to_state_dict(state))
    assert saved["act"] == {}
    state["optimizer"].param_groups[1]["lr"] = 9.0
    restore(state, saved)
    assert [group["lr"] for group in state["optimizer"].param_groups] == [0.1, 0.5]


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("freqs", torch.arange(4.0), persistent=False)


def test_a_module_on_the_meta_device_is_refused_with_what_to_do():
    with torch.device("meta"):
        model = Rotary()
    state = {"optimizer": torch.optim.AdamW(model.parameters()), "model": model}
    with pytest.raises(UnsupportedError, match="to_empty") as caught:
        ConvertedState(state, loading=True)
    assert caught.value.key == "model"
    assert "(model.mean, model.proj.weight, model.proj.bias)" in str(caught.value)
    assert "(freqs)" in str(caught.value)
    model.to_empty(device="cpu")
    ConvertedState({"model": model}, loading=True)
    # What is not loaded may lie anywhere.
    model.freqs = model.freqs.to("meta")
    ConvertedState({"model": model}, loading=True)


def test_a_tensor_on_the_meta_device_is_not_loaded_into_wherever_it_stands():
    class Holder:
        def state_dict(self):
            return {"inner": [torch.zeros(2, device="meta")]}

        def load_state_dict(self, state): ...

    for state in ({"a": {"inner": [torch.zeros(2, device="meta")]}}, {"a": Holder()}):
        with pytest.raises(UnsupportedError, match="empty_like") as caught:
            ConvertedState(state, loading=True)
        assert caught.value.key == "a.inner.0"


def test_modules_come_first_then_optimizers_then_what_may_look_at_both():
    """Whatever their names: a scheduler may read the rates of its optimizer as it is restored."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[tuple[float, float]] = []

    class Looks:
        def state_dict(self) -> dict[str, int]:
            return {"n": 1}

        def load_state_dict(self, state: dict[str, int]) -> None:
            seen.append((optimizer.param_groups[0]["lr"], model.weight[0, 0].item()))

    state = {"a": Looks(), "b": optimizer, "c": model}
    optimizer.param_groups[0]["lr"] = 0.5
    with torch.no_grad():
        model.weight.fill_(7.0)
    url = memory_url()
    dos.save(state, url)
    optimizer.param_groups[0]["lr"] = 0.1
    with torch.no_grad():
        model.weight.fill_(0.0)
    dos.load(state, url)
    assert seen == [(0.5, 7.0)]


def test_a_module_that_is_compiled_loads_what_was_saved_without():
    model, url = nn.Linear(2, 2), memory_url()
    dos.save({"model": model}, url)
    compiled = torch.compile(nn.Linear(2, 2))
    dos.load({"model": compiled}, url)
    assert torch.equal(compiled.weight, model.weight)


def test_a_name_below_a_per_rank_value_is_refused_only_if_it_is_that_of_a_rank():
    ConvertedState({"rng": PerRank(1), "rng.note": 2, "rng.1a": 3}, loading=False)
    with pytest.raises(StateMismatchError, match="same name"):
        ConvertedState({"rng": PerRank(1), "rng.12": 2}, loading=False)


def test_only_the_optimizer_that_was_saved_without_state_is_left_without():
    def make(seed: int) -> dict[str, object]:
        torch.manual_seed(seed)
        models = {name: nn.Linear(2, 2, bias=False) for name in "ab"}
        optimizers = {
            f"optimizer_{name}": torch.optim.Adam(model.parameters())
            for name, model in models.items()
        }
        return {**models, **optimizers}

    state = make(0)
    for name in "ab":
        state[name](torch.ones(1, 2)).sum().backward()
        state[f"optimizer_{name}"].step()
    saved = to_state_dict(state)
    other = make(1)
    saved["optimizer_b"]["state"].clear()
    restore(other, saved)
    (found,) = other["optimizer_a"].state.values()
    assert torch.equal(found["exp_avg"], next(iter(state["optimizer_a"].state.values()))["exp_avg"])
    assert not other["optimizer_b"].state


def test_momentum_is_restored_only_for_groups_that_had_it():
    def make(steps: int) -> dict[str, object]:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        groups = [{"params": [model.weight]}, {"params": [model.bias], "momentum": 0.0}]
        state = {"model": model, "optimizer": torch.optim.SGD(groups, lr=0.01, momentum=0.9)}
        train(state, steps)
        return state

    url, saved = memory_url(), make(3)
    dos.save(saved, url, progress=False)
    for steps in (0, 1):
        loaded = make(steps)
        dos.load(loaded, url, progress=False)
        assert torch.equal(state_of(loaded)["momentum_buffer"], state_of(saved)["momentum_buffer"])
        assert not loaded["optimizer"].state.get(loaded["model"].bias)


class Noted:
    """A Stateful that notes when it is asked and restored."""

    def __init__(self, name: str, calls: list[tuple[str, str]]) -> None:
        self.name = name
        self.calls = calls

    def state_dict(self) -> dict[str, int]:
        self.calls.append(("save", self.name))
        return {"n": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.calls.append(("load", self.name))


@pytest.mark.parametrize("names", [["a", "b", "c"], ["c", "b", "a"]])
def test_ranks_go_through_the_state_in_one_order_whatever_that_of_their_dicts(names):
    """The two methods may be collectives."""
    calls: list[tuple[str, str]] = []
    state = {name: Noted(name, calls) for name in names}
    restore(state, copied(to_state_dict(state)))
    assert calls == [(verb, name) for verb in ("save", "save", "load") for name in "abc"]


def test_it_is_known_what_stands_where():
    whole, part = nn.Linear(2, 2), nn.Linear(2, 2)
    part.bias.requires_grad_(False)
    converted = ConvertedState(
        {
            "whole": whole,
            "of_whole": torch.optim.SGD(whole.parameters()),
            "parts": [{0: dos.trainable(part), 1: torch.optim.SGD(part.parameters())}],
            "own": PerRank(1),
            "all": PerRank(1, choice="list"),
        },
        loading=False,
    )
    optimizers = [("of_whole",), ("parts", "0", "1")]
    assert converted.optimizers == optimizers
    assert converted.whole == [("parts",), ("whole",), *optimizers]
    assert converted.per_rank == {("own",): False, ("all",): True}
    assert converted.left_out == {("parts", "0", "0"): {"tensors": 1, "elements": 2}}


def test_an_optimizer_belongs_to_the_smallest_module_that_has_its_parameters():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model[1].parameters())
    for state in ({"a": model, "b": model[1]}, {"b": model, "a": model[1]}):
        converted = ConvertedState({"optimizer": optimizer, **state}, loading=False)
        assert [*converted.state_dict["optimizer"]["param_groups"][0]["params"]] == [
            "weight",
            "bias",
        ]


@pytest.mark.parametrize(
    "frozen", [False, True], ids=["which has no elements", "which does not train"]
)
def test_an_optimizer_is_not_stepped_for_a_parameter_that_never_gets_a_state(frozen):
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trains = nn.Parameter(torch.ones(2))
            self.other = nn.Parameter(torch.ones(2 if frozen else 0), requires_grad=not frozen)

    model = Model()
    optimizer = torch.optim.Adam(model.parameters())
    model.trains.grad = torch.ones(2)
    optimizer.step()
    before = optimizer.state[model.trains]["exp_avg"]
    ConvertedState({"model": model, "optimizer": optimizer}, loading=True)
    assert optimizer.state[model.trains]["exp_avg"] is before


def test_the_state_dict_of_a_module_is_made_once():
    """Under FSDP1 that is a collective."""
    made: list[int] = []

    class Model(nn.Linear):
        def state_dict(self, *args, **settings):
            made.append(1)
            return super().state_dict(*args, **settings)

    to_state_dict({"model": Model(2, 2)})
    assert len(made) == 1


def test_buffers_of_a_module_without_parameters_are_saved_and_restored():
    norm = nn.BatchNorm1d(2, affine=False)
    saved = copied(to_state_dict({"norm": norm}))
    norm.running_mean.fill_(7.0)
    restore({"norm": norm}, saved)
    assert norm.running_mean.tolist() == [0.0, 0.0]


def test_a_tensor_without_memory_is_refused_only_where_it_would_be_loaded_into():
    ConvertedState({"t": torch.zeros(2, device="meta")}, loading=False)


@pytest.mark.parametrize(
    ("value", "loaded"),
    [
        ([1, 2], [3]),
        ([1, 2], (3,)),
        ((1, 2), [3]),
        (1, [3]),
        ({}, {}),
        (None, 0),
        ([[1], None], [[], [2, 3]]),
    ],
)
def test_a_plain_value_is_replaced_by_any_other(value, loaded):
    state = {"in": {"value": value}}
    restore(state, {"in": {"value": loaded}})
    assert state == {"in": {"value": loaded}}


def test_tensors_in_a_mapping_that_nobody_can_change_are_loaded_in_place():
    tensor = torch.zeros(2)
    state = {"fixed": MappingProxyType({"t": tensor, "of": Holder(MappingProxyType({1: 2}))})}
    converted = ConvertedState(state, loading=True)
    assert converted.state_dict == {"fixed": {"t": tensor, "of": {"1": 2}}}
    assert converted.state_dict["fixed"]["t"] is tensor
    converted.restore()
    assert state["fixed"]["of"].held == {1: 2}


@pytest.mark.parametrize(
    "inner",
    [
        {"a": 1},
        torch.ones(1),
        nn.Linear(1, 1),
        Odometer(),
        [{"a": 1}],
        [[torch.ones(1)]],
        [0, [0, Odometer()]],
    ],
    ids=lambda inner: type(inner).__name__,
)
def test_what_stands_in_a_list_beside_plain_values_is_stored_by_itself(inner):
    converted = ConvertedState({"list": [0, inner, "x"]}, loading=True)
    listed = converted.state_dict["list"]
    assert listed is not converted._state["list"]


def test_containers_of_a_state_dict_come_back_in_their_types():
    held = {
        "ordered": OrderedDict(b=1, a=2),
        "default": defaultdict(list, {3: [4]}),
        "count": Counter({5: 6}),
        "listed": [{7: 8}, [OrderedDict(c=9)]],
        "whole": [1, [2]],
        "tuple": ({1: 2},),
    }
    holder = Holder(held)
    saved = copied(to_state_dict({"holder": holder}))
    saved["holder"]["listed"][0]["7"] = 10
    saved["holder"]["whole"] = [3]
    restore({"holder": holder}, saved)
    loaded = holder.held
    assert loaded == {**held, "listed": [{7: 10}, [OrderedDict(c=9)]], "whole": [3]}
    assert loaded is not held
    assert {key: type(value) for key, value in loaded.items()} == {
        key: type(value) for key, value in held.items()
    }
    assert type(loaded["listed"][1][0]) is OrderedDict
    assert loaded["default"]["new"] == []


def test_a_list_of_stateful_objects_that_was_shorter_is_named():
    state = {"list": [Odometer(), Odometer()]}
    with pytest.raises(StateMismatchError, match="not in the checkpoint"):
        restore(state, {"list": [{"count": 1}]})


class Half:
    """It has but one of the two methods."""

    def state_dict(self): ...


class OtherHalf:
    def load_state_dict(self, state): ...


@pytest.mark.parametrize("kind", [Half, OtherHalf])
def test_an_object_with_one_of_the_two_methods_is_a_plain_value(kind):
    value = kind()
    assert to_state_dict({"a": value, "b": [value], "c": (value,)}) == {
        "a": value,
        "b": [value],
        "c": (value,),
    }


@pytest.mark.parametrize(
    "part",
    [
        {"n": 1, "m": nn.Linear(1, 1)},
        [1, nn.Linear(1, 1)],
        (1, Odometer()),
        torch.optim.SGD([torch.ones(1)]),
        dos.trainable(nn.Linear(1, 1)),
        PerRank(1),
    ],
    ids=lambda part: type(part).__name__,
)
def test_nothing_that_is_restored_in_place_may_stand_in_a_tuple(part):
    with pytest.raises(StateMismatchError, match="tuple"):
        to_state_dict({"t": (0, part)})
    with pytest.raises(StateMismatchError, match="PerRank"):
        to_state_dict({"t": PerRank((0, part))})


class Failing:
    """A planner of DCP's that meets a defect."""

    def set_up_planner(self, *args) -> None:
        raise ValueError("of another kind")


class Planner(AgreeingPlanner, Failing):
    _url = "s3://bucket/run/step-1"


def test_every_error_of_a_planner_can_be_sent_to_all_ranks_and_names_the_checkpoint():
    with pytest.raises(RankFailedError) as caught:
        Planner().set_up_planner({})
    assert caught.value.url == Planner._url
