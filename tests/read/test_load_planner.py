"""`AgreeingLoadPlanner`: one error names all keys that do not fit, and ranks agree on the rest."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan

import dcp_objstore as dos
from dcp_objstore.errors import InvalidUrlError, RankFailedError, StateMismatchError
from dcp_objstore.read import planner as module
from dcp_objstore.read.mismatch import mismatch, refuse_other_dtypes
from dcp_objstore.read.planner import AgreeingLoadPlanner
from dcp_objstore.state.state_dict import ConvertedState
from tests.support.checkpoints import memory_url


def saved(state: dict[str, Any]) -> Metadata:
    dos.save(state, url := memory_url(), progress=False)
    return dos.ObjectStoreReader(url).read_metadata()


def planner(state: Mapping[str, Any], metadata: Metadata, **settings: Any) -> AgreeingLoadPlanner:
    converted = ConvertedState({}, loading=True)
    for name in ("per_rank", "left_out", "whole"):
        vars(converted)[name] = settings.pop(name, getattr(converted, name))
    made = AgreeingLoadPlanner(settings.pop("url", "url"), converted, **settings)
    made.set_up_planner(dict(state), metadata)
    return made


def plans(metadata: Metadata, *states: Mapping[str, Any], **settings: Any) -> list[LoadPlan]:
    """The plans of ranks as they reach the coordinator."""
    made = (planner(state, metadata, **settings).create_local_plan() for state in states)
    return [pickle.loads(pickle.dumps(plan)) for plan in made]


def refusal(state: Mapping[str, Any], metadata: Metadata, **settings: Any) -> str:
    with pytest.raises(StateMismatchError) as caught:
        planner(state, metadata, **settings).create_local_plan()
    return str(caught.value)


class WithExtraState(torch.nn.Module):
    def __init__(self, kept: Any) -> None:
        super().__init__()
        self.line, self.kept = torch.nn.Linear(2, 2), kept

    def get_extra_state(self) -> Any:
        return self.kept

    def set_extra_state(self, state: Any) -> None:
        self.kept = state


@pytest.mark.parametrize("trained", [torch.arange(2.0), "text"])
def test_a_module_gets_the_extra_state_that_was_saved_whatever_its_own_is(trained):
    dos.save({"m": WithExtraState(trained)}, url := memory_url(), progress=False)
    for fresh in (torch.ones(2), torch.ones(3, 3), torch.ones(2).int(), 5, None):
        module = WithExtraState(fresh)
        with torch.device("meta"):  # where new tensors lie by default
            dos.load({"m": module}, url, progress=False)
        assert str(module.kept) == str(trained)
        # What fits is filled in place, on its own device.
        kinds = [(getattr(x, "shape", None), getattr(x, "dtype", None)) for x in (fresh, trained)]
        fits = isinstance(fresh, torch.Tensor) and kinds[0] == kinds[1]
        assert (module.kept is fresh) == fits


def test_every_key_that_does_not_fit_is_named_with_both_sides():
    metadata = saved(
        {"fine": torch.ones(2), "value": 3, "shape": torch.ones(2, 3)}
        | {"int": torch.ones(1), "bytes": torch.ones(1), "last": torch.ones(4)}
    )
    state = {
        "absent": torch.ones(1),
        "fine": torch.ones(2),
        "value": torch.ones(1),
        "shape": torch.ones(3, 2),
        "int": 3,
        "bytes": b"x",
        "last": torch.ones(5),
    }
    for strict in (True, False):
        _, *lines, _ = refusal(state, metadata, strict=strict).splitlines()
        assert [line.strip() for line in lines] == [
            "value: saved as a plain value, the state has a tensor",
            "shape: saved with shape (2, 3), the state has (3, 2)",
            "int: saved as a tensor, the state has an int",
            "bytes: saved as a tensor, the state has a bytes",
            "last: saved with shape (4,), the state has (5,)",
        ]


def test_every_tensor_of_another_dtype_is_named_where_that_is_an_error():
    metadata = saved({"step": 3, "a": torch.ones(2), "b": torch.ones(2), "c": torch.ones(2)})
    state = {
        "absent": torch.ones(1),
        "step": 0,
        "a": torch.ones(2).half(),
        "b": torch.ones(2),
        "c": torch.ones(2).double(),
    }
    text = refusal(state, metadata, strict=False, on_dtype="error")
    assert "in 2 keys" in text
    assert "a: saved as float32, the state has float16" in text
    assert "c: saved as float32, the state has float64" in text
    del state["a"], state["c"]
    for on_dtype in ("error", "warn"):
        planner(state, metadata, strict=False, on_dtype=on_dtype).create_local_plan()
    refuse_other_dtypes([])


@pytest.mark.parametrize(
    ("count", "shown", "more"), [(1, "in 1 key:", ""), (10, "in 10 keys:", ""), (13, "13", "3")]
)
def test_an_error_shows_the_first_ten_keys_and_counts_the_others(count, shown, more):
    summary, *lines = mismatch("they differ", [f"key\n{n}" for n in range(count)]).message.split(
        "\n  "
    )
    assert summary.startswith("they differ")
    assert shown in summary
    assert len(lines) == min(count, 10) + bool(more)
    assert lines[0] == r"key\n0"
    assert bool(more) == ("more" in lines[-1]) == (f"and {more} more" in lines[-1])


def test_the_nearest_names_are_looked_for_only_where_they_are_shown(monkeypatch):
    monkeypatch.setattr(module, "nearest", looked := Mock(wraps=module.nearest))
    metadata = saved({f"layer{n}.weight": torch.ones(1) for n in range(14)})
    state = {f"layer{n}.wight": torch.ones(1) for n in range(14)}
    text = refusal(state, metadata)
    assert "in 14 keys" in text
    for n in range(10):
        assert f"layer{n}.wight: not in the checkpoint (nearest: layer{n}.weight" in text
    assert "strict=False" in text
    assert text.count("nearest") == looked.call_count == 10
    (line,) = (x for x in refusal({"qqq": 1}, metadata).splitlines() if "qqq" in x)
    assert line.strip() == "qqq: not in the checkpoint"


def test_what_is_missing_and_unexpected_is_in_the_order_of_state_and_checkpoint():
    metadata = saved({"d": 1, "b": torch.ones(1), "c": torch.ones(1), "a": torch.ones(1)})
    one = planner({"y": 1, "b": torch.ones(1), "x": torch.ones(1)}, metadata, strict=False)
    plan = one.create_local_plan()
    assert [item.dest_index.fqn for item in plan.items] == ["b"]
    assert one.missing == ("y", "x")
    saved_keys = list(metadata.state_dict_metadata)
    assert one.unexpected == tuple(key for key in saved_keys if key != "b")
    assert not one.reading
    finished = one.finish_plan(pickle.loads(pickle.dumps(plan)))
    assert finished.items == plan.items, "they have stayed on their rank"
    assert one.reading


def test_ranks_are_refused_if_the_checkpoint_has_nothing_that_any_of_them_asks_for(caplog):
    metadata = saved({"a": 1})
    for states in ([{"x": 1}, {"a": 1}], [{"a": 1}, {"x": 1}], [{}, {}]):
        of_ranks = plans(metadata, *states, strict=False)
        coordinator = planner(states[0], metadata, strict=False)
        assert coordinator.create_global_plan(of_ranks) is of_ranks
        assert ("nothing is loaded" in caplog.text) == (not any(states))
    of_ranks = plans(metadata, {"x": 1}, {"y": 1, "z": 1}, strict=False)
    with pytest.raises(StateMismatchError, match="none of the 3 keys"):
        coordinator.create_global_plan(of_ranks)


def test_ranks_that_load_from_different_urls_are_refused():
    metadata = saved({"a": 1})
    of_ranks = [plans(metadata, {"a": 1}, url=url)[0] for url in ("one", "two")]
    with pytest.raises(InvalidUrlError, match="rank 0 has one and rank 1 two"):
        planner({"a": 1}, metadata).create_global_plan(of_ranks)


@pytest.mark.parametrize("strict", [True, False])
def test_a_part_must_be_asked_for_by_the_ranks_together(strict, caplog):
    """Of twelve keys, in the parts of a byte; keys beside it do not count."""
    keys = [f"part.{n}" for n in range(12)]
    metadata = saved({**dict.fromkeys(keys, 1), "parting": 1, "other": 1})
    settings: dict[str, Any] = {"left_out": [("part",)], "strict": strict}
    halves = [dict.fromkeys(keys[:7], 0), dict.fromkeys(keys[7:], 0)]
    coordinator = planner(halves[0], metadata, **settings)
    coordinator.create_global_plan(plans(metadata, *halves, **settings))
    del halves[0]["part.3"], halves[1]["part.11"]
    of_ranks = plans(metadata, *halves, **settings)
    if not strict:
        coordinator.create_global_plan(of_ranks)
        return
    with pytest.raises(StateMismatchError, match="in 2 keys") as caught:
        coordinator.create_global_plan(of_ranks)
    assert caught.value.message.splitlines()[1:] == ["  part.3", "  part.11"]
    assert caplog.records == []


@pytest.mark.parametrize(
    ("state", "advice"),
    [
        ({"model.w": 1, "model.v": 1}, 'rename=[("^", "model.")]'),
        ({"model.x": 1}, None),
        ({"optim.state.3.step": 1}, "pass the optimizer itself"),
        ({"state.3.step": 1}, "pass the optimizer itself"),
        ({"upstate.3.step": 1}, None),
    ],
)
def test_an_error_for_missing_keys_says_what_may_help(state, advice):
    text = refusal(state, saved({"w": 1, "v": 1}))
    if advice is None:
        assert "rename" not in text
        assert "optimizer" not in text
    else:
        assert advice in text


def test_a_key_that_another_one_fills_is_not_asked_for():
    metadata = saved({"embed": torch.ones(3), "other": torch.ones(3)})
    weight = torch.zeros(3)
    state = {"head": weight, "embed": weight, "other": torch.zeros(3)}
    one = planner(state, metadata)
    plan = one.create_local_plan()
    assert [item.dest_index.fqn for item in plan.items] == ["embed", "other"]
    assert one.missing == one.unexpected == ()
    assert "head: not in" in refusal({**state, "head": torch.zeros(3)}, metadata)
    assert "head: not in" in refusal({"head": weight, "other": torch.zeros(3)}, metadata)


def test_a_stored_dtype_that_is_unknown_is_no_other_dtype():
    """That it cannot be read is said where it is read."""
    metadata = saved({"t": torch.ones(3)})
    entry: Any = metadata.state_dict_metadata["t"]
    entry.properties.dtype = None
    planner({"t": torch.zeros(3)}, metadata, on_dtype="error").create_local_plan()


@pytest.mark.parametrize("call", ["create_local_plan", "create_global_plan"])
def test_whatever_goes_wrong_while_planning_has_a_rank_and_can_be_sent(monkeypatch, call):
    def fail(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    one = planner({"a": 1}, metadata := saved({"a": 1}))
    arguments = [plans(metadata, {"a": 1})] if call == "create_global_plan" else []
    monkeypatch.setattr(module, "same_url" if arguments else "_mismatches", fail)
    with pytest.raises(RankFailedError, match="ZeroDivisionError: a bug"):
        getattr(one, call)(*arguments)


@pytest.mark.parametrize("wants_all", [True, False])
@pytest.mark.parametrize("rank", ["0", "1", "2"])
def test_a_rank_asks_for_its_own_value_or_for_all(monkeypatch, rank, wants_all):
    """One that did not exist asks for none; values that no rank saved are missing."""
    monkeypatch.setattr(module, "own_name", lambda: rank)
    metadata = saved({"rng": {"0": 10, "1": 11, "x": 12}, "other": {"0": 1}})
    state = {"none": {rank: 0}, "rng": {rank: 0}}
    per_rank = {("none",): wants_all, ("rng",): wants_all}
    one = planner(state, metadata, per_rank=per_rank, strict=False)
    plan = one.create_local_plan()
    asked = ["0", "1"] if wants_all else [rank] if rank != "2" else []
    assert [item.dest_index.fqn for item in plan.items] == [f"rng.{name}" for name in asked]
    assert {key: one.mappings[f"rng.{key}"] for key in asked} == {
        key: ("rng", key) for key in asked
    }
    assert one.missing == (f"none.{rank}",)
    assert set(one.unexpected) == {"rng.x", "other.0"}


def test_a_part_of_the_state_that_is_missing_is_named_once():
    text = refusal({"w": 1, "plan.a": 1, "plan.b": 1, "v": 1}, saved({"w": 1}))
    assert "in 3 keys:\n  plan: none of its 2 keys" in text
    assert "\n  v: not in the checkpoint" in text
    text = refusal({"net.w": 1, "net.v": 1}, saved({"model.w": 1, "model.v": 1}))
    assert 'rename=[("^model[.]", "net.")]' in text
    text = refusal({"net.w": 1, "model.w": 1}, saved({"model.w": 1}))
    assert "rename" not in text  # the state asks for `model`, too
