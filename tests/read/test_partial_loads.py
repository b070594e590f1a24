"""Loads of a part: weights without their optimizer, states that have more than was saved."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

import dcp_objstore as dos
from dcp_objstore.errors import StateMismatchError
from dcp_objstore.read.mismatch import nearest
from tests.support.checkpoints import memory_url
from tests.support.ranks import run_ranks


def model(layers: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))


def trained(layers: int) -> tuple[nn.Sequential, torch.optim.AdamW]:
    made = model(layers)
    optimizer = torch.optim.AdamW(made.parameters(), lr=0.25)
    made(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return made, optimizer


def saved(url: str) -> tuple[nn.Sequential, torch.optim.AdamW]:
    made, optimizer = trained(2)
    dos.save({"model": made, "optim": optimizer, "step": 5}, url, progress=False)
    return made, optimizer


def test_a_larger_model_takes_what_there_is_and_keeps_the_rest(tmp_path, caplog):
    url = (tmp_path / "step-5").as_uri()
    made, optimizer = saved(url)
    larger = model(3)
    theirs = torch.optim.AdamW(larger.parameters(), lr=1e-3)
    head = larger[2].weight.detach().clone()
    state: dict[str, Any] = {"model": larger, "optim": theirs, "step": 0, "epoch": 3}
    with pytest.raises(StateMismatchError, match="strict=False"):
        dos.load(state, url, progress=False)
    assert torch.equal(larger[2].weight, head)
    assert not theirs.state

    with caplog.at_level(logging.WARNING, logger="dcp_objstore"):
        report = dos.load(state, url, strict=False, progress=False)
    assert torch.equal(larger[0].weight, made[0].weight)
    assert torch.equal(larger[2].weight, head)
    assert (state["step"], state["epoch"]) == (5, 3)
    average = optimizer.state[made[0].weight]["exp_avg"]
    assert torch.equal(theirs.state[larger[0].weight]["exp_avg"], average)
    assert larger[2].weight not in theirs.state
    assert len(theirs.param_groups[0]["params"]) == 6
    assert theirs.param_groups[0]["lr"] == 0.25
    assert {"epoch", "model.2.weight", "model.2.bias"} <= set(report.missing)
    assert not any(".0." in key for key in report.missing)
    assert report.unexpected == ()
    assert "model.2.weight" in caplog.text
    # And training goes on with all of it.
    larger(torch.ones(1, 4)).sum().backward()
    theirs.step()
    assert larger[2].weight in theirs.state


def test_an_optimizer_that_was_not_saved_is_left_as_it_is(tmp_path):
    url = (tmp_path / "weights").as_uri()
    made, _ = trained(2)
    dos.save({"model": made}, url, progress=False)
    fresh = model(2)
    optimizer = torch.optim.AdamW(fresh.parameters(), lr=0.5)
    report = dos.load({"model": fresh, "optim": optimizer}, url, strict=False, progress=False)
    assert torch.equal(fresh[1].bias, made[1].bias)
    assert not optimizer.state
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert all(key.startswith("optim.") for key in report.missing)


def test_the_nearest_of_many_names_is_found():
    saved = [f"mod{number:04}.norm.bias" for number in range(1000)]
    saved.insert(500, "model.head.weight")
    for asked in (
        *("head.weight", "module.model.head.weight", "model.head", "modul.head.weight"),
        "model.head.weigth",
    ):
        assert nearest(asked, saved)[0] == "model.head.weight"


def test_of_many_names_the_end_counts_as_much_as_the_start():
    saved = [f"encoder.norm{number:04}.bias" for number in range(300)]
    saved.append("decoder.head.weight")
    assert nearest("encoder.head.weight", saved)[0] == "decoder.head.weight"


def test_of_names_with_a_prefix_more_or_less_the_shortest_prefix_is_named_first():
    saved = ["ema.module.model.head.weight", "model.head.weight", "x.model.head.weight", "weight"]
    assert nearest("head.weight", saved) == ["weight", "model.head.weight", "x.model.head.weight"]
    # Also where the rest is so long that nothing else is alike.
    assert nearest("w", ["encoder.layers.0.w", "b"]) == ["encoder.layers.0.w"]
    assert nearest("encoder.layers.0.w", ["w", "b"]) == ["w"]
    # After them come those that are merely alike.
    saved = ["weight", "head.weight", "model.bed.weight", "model.head.weights"]
    assert nearest("model.head.weight", saved) == ["head.weight", "weight", "model.head.weights"]
    assert nearest("model.head.weight", saved[1:3]) == ["head.weight", "model.bed.weight"]
    saved = [f"layer{number}.weight" for number in range(4)]
    assert nearest("layer9.weight", saved) == saved[:0:-1]


def test_of_the_names_inside_a_key_up_to_three_are_named():
    saved = [f"model.layers.{number}" for number in range(4)]
    assert nearest("model", saved[:2]) == saved[:2]
    assert nearest("model", saved) == saved[:3]


def test_a_value_whose_name_begins_like_that_of_a_module_is_none_of_its_keys(caplog):
    state = {"model": model(2), "model.ema": {"decay": torch.ones(1), "model": model(1)}}
    dos.save(state, url := memory_url(), progress=False)
    dos.load({"model": model(2)}, url, progress=False)
    dos.load({"model": dos.trainable(model(2))}, url, progress=False)
    assert "unread" not in caplog.text
    with caplog.at_level(logging.WARNING):
        dos.load({"model": model(1)}, url, progress=False)
    assert "2 keys" in caplog.text


def test_a_model_that_is_smaller_than_the_saved_one_is_warned_of(tmp_path, caplog):
    made, optimizer = trained(4)
    dos.save({"model": made, "optim": optimizer}, url := tmp_path.as_uri(), progress=False)
    dos.load({"model": model(4)}, url)
    assert caplog.records == []  # that the optimizer is left unread is no surprise
    dos.load({"model": model(1)}, url)
    (record,) = caplog.records
    text = record.getMessage()
    assert "6 keys" in text and "model.1.bias" in text and "and 1 more" in text


def load_stage(rank: int, _world: int, url: str) -> list[str]:
    """Load the layer of this rank, as a stage of a pipeline does, at the place of the model."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("dcp_objstore").addHandler(handler)
    dos.load({"model": nn.ModuleDict({str(rank): nn.Linear(4, 4)})}, url)
    logging.getLogger("dcp_objstore").removeHandler(handler)
    return messages


def test_what_another_rank_asks_for_is_not_warned_of(tmp_path):
    for layers, warned in ((2, False), (3, True)):
        url = f"{tmp_path.as_uri()}/{layers}"
        dos.save({"model": model(layers)}, url)
        first, second = run_ranks(2, load_stage, url)
        assert len(first) == warned
        assert all("2 keys" in message and "model.2.weight" in message for message in first)
        assert second == []


def test_an_optimizer_that_was_passed_is_not_said_to_be_torchs_state(tmp_path):
    url = tmp_path.as_uri()
    saved(url)
    larger = model(3)  # its parameters have names such as 2.weight
    with pytest.raises(StateMismatchError, match=r"model\.2\.weight") as caught:
        dos.load({"model": larger, "optim": torch.optim.AdamW(larger.parameters())}, url)
    assert "pass the optimizer itself" not in str(caught.value)
