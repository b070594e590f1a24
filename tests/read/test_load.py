"""`dos.load`: what it adds to errors, warns of and undoes."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

import dcp_objstore as dos
from dcp_objstore.errors import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    DcpObjstoreError,
    RankFailedError,
    StateMismatchError,
)
from dcp_objstore.observe.events import Failed
from dcp_objstore.read import api
from dcp_objstore.stores import StoreSpec
from tests.support.checkpoints import memory_url
from tests.support.listening import Heard, of

PARTLY = "partly filled"


@pytest.fixture
def url() -> str:
    dos.save({"t": torch.arange(5.0), "v": 3}, url := memory_url(), progress=False)
    return url


def remove_data(url: str) -> None:
    store = StoreSpec(url).open()
    for meta in list(store.list()):
        if meta.key.endswith(".distcp"):
            store.delete(meta.key)


def test_an_error_says_whether_tensors_may_be_partly_filled(url):
    """Not before the first byte is read."""
    with pytest.raises(CheckpointNotFoundError) as early:
        dos.load({"t": torch.zeros(5)}, memory_url(), progress=False)
    assert PARTLY not in str(early.value)
    with pytest.raises(StateMismatchError) as caught:
        dos.load({"t": torch.zeros(6)}, url, progress=False)
    assert PARTLY not in str(caught.value)
    remove_data(url)
    with pytest.raises(CheckpointCorruptError) as late:
        dos.load({"t": torch.zeros(5)}, url, progress=False)
    assert PARTLY in str(late.value)
    assert late.value.url == url


def test_of_a_module_that_was_saved_in_part_an_error_says_how_it_is_loaded():
    def net(*, trained: bool) -> nn.ModuleDict:
        made = nn.ModuleDict({"base": nn.Linear(1, 1), "head": nn.Linear(1, 1)})
        made["base"].requires_grad_(trained)
        return made

    part = dos.trainable(net(trained=False))
    dos.save({"a": {"b": part}, "b": torch.ones(1)}, url := memory_url(), progress=False)
    for state, advice in (
        ({"a": {"b": net(trained=False)}, "b": torch.ones(1)}, "of 'a.b' .* as dos.trainable"),
        ({"a": {"b": dos.trainable(net(trained=True))}}, "in which the same parameters train"),
        ({"a": {"b2": net(trained=False)}}, "does not have"),
    ):
        with pytest.raises(StateMismatchError, match=advice) as caught:
            dos.load(state, url, progress=False)
        assert ("what trained when" in str(caught.value)) == ("train" in advice)


@pytest.mark.parametrize("rank", [0, 1, None])
def test_what_a_partial_load_leaves_is_warned_of_by_the_first_rank(url, caplog, monkeypatch, rank):
    monkeypatch.setattr(api, "current_rank", lambda: rank)
    state = {"t": torch.zeros(5), **{f"x{n}": torch.zeros(1) for n in range(7)}}
    report = dos.load(state, url, strict=False, progress=False)
    assert report.missing == tuple(f"x{n}" for n in range(7))
    assert report.unexpected == ("v",)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == (not rank)
    assert all("7 keys" in line and "x4 and 2 more" in line for line in said)
    caplog.clear()
    dos.load({"t": torch.zeros(5)}, url, strict=False, progress=False)
    assert caplog.records == [], "all that was asked for is there"


@pytest.mark.parametrize(("rank", "strict"), [(0, True), (0, False), (1, True)])
def test_parameters_without_optimizer_state_are_warned_of_by_the_first_rank(
    caplog, monkeypatch, rank, strict
):
    def trained() -> dict[str, Any]:
        idle = nn.Sequential(*(nn.Linear(1, 1) for _ in range(3)))
        model = nn.ModuleDict({"used": nn.Linear(2, 2), "idle": idle})
        optimizer = torch.optim.AdamW(model.parameters())
        model["used"](torch.ones(1, 2)).sum().backward()
        optimizer.step()
        return {"model": model, "optim": optimizer}

    dos.save(trained(), url := memory_url(), progress=False)
    monkeypatch.setattr(api, "current_rank", lambda: rank)
    dos.load(trained(), url, strict=strict, progress=False)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == (rank == 0)
    texts = ["for 6 parameters", "(idle.0.bias, ", "idle.2.bias and 1 more)"]
    assert all(text in line for line in said for text in texts)


def test_a_load_that_nobody_has_finished_is_the_failure_of_another_rank(url, monkeypatch):
    load = Mock()
    monkeypatch.setattr(api.state_dict_loader, "load", load)
    with pytest.raises(RankFailedError, match="without reporting") as caught:
        dos.load({}, url, progress=False)
    assert caught.value.url == url
    assert load.call_args.kwargs["no_dist"] is True, "one process needs nobody else"


def test_a_value_that_cannot_be_restored_fails_the_load(url):
    class Stateful:
        def state_dict(self) -> dict[str, Any]:
            return {"x": 1}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise ZeroDivisionError(state["x"])

    dos.save({"s": Stateful()}, url := memory_url(), progress=False)
    with pytest.raises(DcpObjstoreError, match="ZeroDivisionError: 1") as caught:
        dos.load({"s": Stateful()}, url, progress=False)
    assert PARTLY in str(caught.value)


def test_errors_before_the_checkpoint_is_open_are_reported_with_the_url(url):
    for state, settings, kind in (
        ({}, {"rename": [("^.$", "x")]}, StateMismatchError),
        ({"t": torch.zeros(5, device="meta")}, {}, DcpObjstoreError),
    ):
        heard = Heard()
        with pytest.raises(kind) as caught:
            dos.load(state, url, on_event=heard, progress=False, **settings)
        assert "trained" not in str(caught.value)
        assert [event.url for event in of(Failed, heard)] == [url]


def test_each_setting_reaches_the_load(url, tmp_path):
    heard: list[Any] = []
    report = dos.load(
        {"new": torch.zeros(5)},
        url,
        rename=[("^t$", "new")],
        verify=False,
        on_event=heard.append,
        trace=tmp_path / "trace.json",
        progress=False,
    )
    assert report.unverified
    assert heard
    assert (tmp_path / "trace.json").exists()
    half = torch.zeros(5, dtype=torch.float16)
    with pytest.raises(StateMismatchError):
        dos.load({"t": half}, url, on_dtype="error", progress=False)


def test_an_optimizer_drops_state_saved_as_absent_and_keeps_what_was_not_saved():
    def trained(*names: str, stepped: str) -> tuple[nn.ModuleDict, torch.optim.AdamW]:
        model = nn.ModuleDict({name: nn.Linear(1, 1, bias=False) for name in names})
        optimizer = torch.optim.AdamW(model.parameters())
        for name in stepped:
            model[name](torch.ones(1, 1)).sum().backward()
        optimizer.step()
        return model, optimizer

    model, optimizer = trained("a", "b", stepped="a")
    dos.save({"model": model, "optim": optimizer}, url := memory_url(), progress=False)
    model, optimizer = trained("a", "b", "c", stepped="abc")
    dos.load({"model": model, "optim": optimizer}, url, strict=False, progress=False)
    with_state = [name for name in "abc" if optimizer.state.get(model[name].weight)]
    assert with_state == ["a", "c"]
