"""`RandomState`: what is drawn after a load is what would have been drawn after the save."""

from __future__ import annotations

import copy
import random
import secrets

import numpy as np
import pytest
import torch

import dcp_objstore as dos


def draw() -> list[float]:
    # Of `gauss` and `randn` one more value waits for the next call.
    return [
        random.random(),
        random.gauss(0, 1),
        float(np.random.rand()),
        float(np.random.randn()),
        torch.rand(()).item(),
        *([torch.rand((), device="cuda").item()] if torch.cuda.is_initialized() else []),
    ]


def seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)
    draw()


def test_draws_go_on_where_they_were_saved():
    url = f"memory://{secrets.token_hex(6)}/step-1"
    seed(1)
    dos.save({"random": dos.RandomState()}, url, progress=False)
    expected = [draw() for _ in range(3)]
    seed(2)
    dos.load({"random": dos.RandomState()}, url, progress=False)
    assert [draw() for _ in range(3)] == expected


@pytest.mark.gpu
def test_cuda_draws_go_on_where_they_were_saved():
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    torch.cuda.init()
    test_draws_go_on_where_they_were_saved()


def test_the_generators_that_both_sides_have_are_set(monkeypatch):
    states = [torch.full((16,), number, dtype=torch.uint8) for number in range(3)]
    given: dict[int, torch.Tensor] = {}
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    monkeypatch.setattr("torch.cuda.get_rng_state_all", lambda: states)
    monkeypatch.setattr(
        "torch.cuda.set_rng_state", lambda state, device: given.update({device: state})
    )
    dos.RandomState().load_state_dict(dos.RandomState().state_dict())
    assert {device: state[0] for device, state in given.items()} == {0: 0, 1: 1}


def test_the_states_lie_on_the_host_whatever_the_default_device():
    with torch.device("meta"):
        state = dos.RandomState().state_dict()
    expected = draw()
    with torch.device("meta"):
        dos.RandomState().load_state_dict(state)
    assert draw() == expected


def test_a_gpu_that_is_not_in_use_is_left_alone(monkeypatch, caplog):
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: False)
    monkeypatch.delattr("torch.cuda.get_rng_state_all")
    state = dos.RandomState().state_dict()
    assert state["cuda"] == []
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.delattr("torch.cuda.set_rng_state")
    dos.RandomState().load_state_dict(state)
    assert not caplog.text
    state["cuda"] = [torch.zeros(16, dtype=torch.uint8)]
    dos.RandomState().load_state_dict(state)
    assert "of 1 GPUs, this process with 0" in caplog.text


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state.pop("numpy"),
        lambda state: state.pop("cuda"),
        lambda state: state.update(python=None),
        lambda state: state.update(python=(3, torch.zeros(3, dtype=torch.int64), None)),
        lambda state: state.update(python=(3, (1, 2), None)),
        lambda state: state.update(python=(3, 1)),
        lambda state: state.update(torch=torch.zeros(3, dtype=torch.uint8)),
        lambda state: state.update(torch=b"bytes"),
        lambda state: state.update(torch=torch.zeros_like(state["torch"])),
        lambda state: state.update(numpy=(*state["numpy"][:1], torch.zeros(3), 0, 0, 0.0)),
        lambda state: state.update(numpy=("another kind", *state["numpy"][1:])),
    ],
)
def test_what_is_no_such_state_is_refused_and_sets_nothing(change):
    seed(1)
    state = copy.deepcopy(dos.RandomState().state_dict())
    change(state)
    seed(2)
    before = dos.RandomState().state_dict()
    with pytest.raises(dos.errors.StateMismatchError, match="RandomState"):
        dos.RandomState().load_state_dict(state)
    expected = draw()
    dos.RandomState().load_state_dict(before)
    assert draw() == expected
