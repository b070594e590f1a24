"""State: modules, optimizers and Stateful objects come back as they were, wherever they stand."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from types import MappingProxyType

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dcp_objstore as dos
from dcp_objstore import torch_private
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


def copied(state_dict):
    """As if it had been written and read: no tensor is shared with the original."""
    if isinstance(state_dict, torch.Tensor):
        return state_dict.detach().clone()
    if isinstance(state_dict, dict):
        return {key: copied(value) for key, value in state_dict.items()}
    if isinstance(state_dict, list):
        return [copied(value) for value in state_dict]
    return state_dict


def test_ranks_go_through_the_state_in_one_order_modules_and_optimizers_first():
    """Its methods may be collectives; a scheduler may read what its optimizer has restored."""
    calls: list[tuple[str, str]] = []
    seen: list[tuple[float, float]] = []
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    nn.init.constant_(model.weight, 7.0)

    class Noted:
        def __init__(self, name: str) -> None:
            self.name = name

        def state_dict(self) -> dict[str, int]:
            calls.append(("save", self.name))
            return {"n": 1}

        def load_state_dict(self, state: dict[str, int]) -> None:
            calls.append(("load", self.name))
            seen.append((optimizer.param_groups[0]["lr"], model.weight[0, 0].item()))

    state = {"c": Noted("c"), "d": optimizer, "e": model, "b": Noted("b"), "a": Noted("a")}
    dos.save(state, url := memory_url(), progress=False)
    optimizer.param_groups[0]["lr"] = 0.1
    nn.init.zeros_(model.weight)
    dos.load(state, url, progress=False)
    assert calls == [(verb, name) for verb in ("save", "save", "load") for name in "abc"]
    assert seen == [(0.5, 7.0)] * 3


def test_values_deep_in_dicts_and_lists_are_converted_and_replaced():
    inner, counter = nn.BatchNorm1d(2), Holder({"count": 1})
    state = {"a": {"b": [1, inner, {"c": "x", "n": counter}]}, "act": nn.ReLU()}
    saved = copied(to_state_dict(state))
    assert saved["act"] == {}
    assert set(saved["a"]["b"][1]) == {*inner.state_dict()}
    inner.running_mean.fill_(7.0)
    counter.held = {"count": 2}
    saved["a"]["b"][0] = 7
    saved["a"]["b"][2]["c"] = "y"
    saved["a"]["b"][1]["bias"] = torch.full((2,), 5.0)
    restore(state, saved)
    assert state["a"]["b"][0] == 7
    assert state["a"]["b"][2]["c"] == "y"
    assert state["a"]["b"][1] is inner
    assert inner.bias.tolist() == [5.0, 5.0]
    assert inner.running_mean.tolist() == [0.0, 0.0]
    assert state["a"]["b"][2]["n"] is counter
    assert counter.held == {"count": 1}


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


def test_an_optimizer_without_its_module_says_what_to_pass():
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(StateMismatchError, match="no module of the state") as caught:
        to_state_dict({"train": {"optimizer": optimizer}, "m": other})
    assert caught.value.key == "train.optimizer"
    both = torch.optim.SGD([*model.parameters(), *other.parameters()])
    with pytest.raises(StateMismatchError, match="module that contains"):
        to_state_dict({"m": model, "o": other, "third": nn.Linear(2, 2), "optimizer": both})


class Holder:
    """A Stateful, by its two methods alone."""

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
    "of a later rank's PerRank": (lambda: {"d": PerRank(1), "d.12": 2}, ("d.12", "state['d']")),
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
    ConvertedState({"rng": PerRank(1), "rng.note": 2, "rng.1a": 3}, loading=loading)


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


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4)
        for name in ("mean", "scale"):
            self.register_buffer(name, torch.zeros(4))
        for number in range(4):
            self.register_buffer(f"freqs{number}", torch.arange(4.0), persistent=False)


def test_a_module_on_the_meta_device_is_refused_with_what_to_do():
    with torch.device("meta"):
        model = Rotary()
    state = {"optimizer": torch.optim.AdamW(model.parameters()), "model": model}
    with pytest.raises(UnsupportedError, match="to_empty") as caught:
        ConvertedState(state, loading=True)
    assert caught.value.key == "model"
    assert "(model.mean, model.scale, model.proj.weight and 1 more)" in str(caught.value)
    assert "(freqs0, freqs1, freqs2 and 1 more)" in str(caught.value)
    model.to_empty(device="cpu")
    ConvertedState({"model": model}, loading=True)
    # What is not loaded may lie anywhere.
    model.freqs0 = model.freqs0.to("meta")
    ConvertedState({"model": model}, loading=True)
    ConvertedState({"t": torch.zeros(2, device="meta")}, loading=False)


def test_a_tensor_on_the_meta_device_is_not_loaded_into_wherever_it_stands():
    class Holder:
        def state_dict(self):
            return {"inner": [torch.zeros(2, device="meta")]}

        def load_state_dict(self, state): ...

    for state in ({"a": {"inner": [torch.zeros(2, device="meta")]}}, {"a": Holder()}):
        with pytest.raises(UnsupportedError, match="empty_like") as caught:
            ConvertedState(state, loading=True)
        assert caught.value.key == "a.inner.0"


def test_a_module_that_is_compiled_loads_what_was_saved_without():
    model, url = nn.Linear(2, 2), memory_url()
    dos.save({"model": model}, url)
    compiled = torch.compile(nn.Linear(2, 2), backend="eager")
    dos.load({"model": compiled}, url)
    assert torch.equal(compiled.weight, model.weight)


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
            "held": Holder({"n": 1}),
            "numbered": {"state": {}, "param_groups": [{"params": [0]}]},
            "plain": 1,
            "listed": [1, 2],
            "empty": {},
        },
        loading=False,
    )
    optimizers = [("of_whole",), ("parts", "0", "1")]
    assert converted.optimizers == optimizers
    lists_and_dicts, held = [("parts",), ("empty",)], [("held",), ("numbered",)]
    assert converted.whole == [*lists_and_dicts, ("whole",), *optimizers, *held]
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


def test_the_state_dict_of_a_module_is_made_once():
    """Under FSDP1 that is a collective."""
    made: list[int] = []

    class Model(nn.Linear):
        def state_dict(self, *args, **settings):
            made.append(1)
            return super().state_dict(*args, **settings)

    to_state_dict({"model": Model(2, 2)})
    assert len(made) == 1


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
        ([], [0.5, 0.25]),
    ],
)
def test_a_plain_value_is_replaced_by_any_other_and_a_list_at_the_top_is_filled(value, loaded):
    state = {"in": {"value": value}, "losses": (losses := [9, 9, 9])}
    restore(state, {"in": {"value": loaded}, "losses": [1]})
    assert state == {"in": {"value": loaded}, "losses": [1]}
    assert state["losses"] is losses


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
        Holder({"count": 0}),
        [{"a": 1}],
        [[torch.ones(1)]],
        [0, [0, Holder({"count": 0})]],
    ],
    ids=lambda inner: type(inner).__name__,
)
def test_what_stands_in_a_list_beside_plain_values_is_stored_by_itself(inner):
    state = {"list": [0, inner, "x"]}
    assert ConvertedState(state, loading=True).state_dict["list"] is not state["list"]


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


@pytest.mark.parametrize(
    "part",
    [
        {"n": 1, "m": nn.Linear(1, 1)},
        [1, nn.Linear(1, 1)],
        (1, Holder({"count": 0})),
        torch.optim.SGD([torch.ones(1)]),
        dos.trainable(nn.Linear(1, 1)),
        PerRank(1),
    ],
    ids=lambda part: type(part).__name__,
)
def test_nothing_that_is_restored_in_place_may_stand_in_a_tuple(part):
    with pytest.raises(StateMismatchError, match="tuple") as caught:
        to_state_dict({"t": (0, part)})
    assert caught.value.key == "t"
    with pytest.raises(StateMismatchError, match="PerRank"):
        to_state_dict({"t": PerRank((0, part))})


@pytest.mark.parametrize(
    ("state", "said", "advice"),
    [
        (nn.Linear(2, 2), "got Linear", "wrap it as {'model': ...}"),
        ({1: 2}, "must be str, got 1", None),
    ],
)
def test_a_state_is_a_dict_of_names(state, said, advice):
    with pytest.raises(StateMismatchError, match=said) as caught:
        to_state_dict(state)
    assert caught.value.advice == advice


@pytest.mark.parametrize("lacks", ["state_dict", "load_state_dict"])
def test_an_object_with_one_of_the_two_methods_is_a_plain_value(lacks):
    methods = {name: lambda self: None for name in ("state_dict", "load_state_dict")}
    del methods[lacks]
    value = type("Half", (), methods)()
    plain = {"a": value, "b": [value], "c": (value,)}
    assert to_state_dict(plain) == plain


@pytest.mark.parametrize(
    ("error", "flat"), [(dist.DistBackendError("gone"), False), (ValueError("gone"), True)]
)
def test_what_breaks_off_a_collective_is_no_error_of_the_value(error, flat, monkeypatch):
    """Under FSDP1 a module makes its state dict in collectives."""

    class Breaks(nn.Module):
        def state_dict(self, *_, **__):
            raise error

    monkeypatch.setattr(torch_private, "has_flat_parameters", lambda module: flat)
    with pytest.raises(type(error)) as caught:
        to_state_dict({"model": Breaks()})
    assert caught.value is error


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
