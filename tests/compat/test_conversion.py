"""A file of `torch.save` becomes a checkpoint, and a checkpoint such a file, as the guide says."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dcp_objstore as dos

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    return model, torch.optim.AdamW(model.parameters())


@pytest.fixture
def saved(tmp_path: Path) -> dict[str, Any]:
    """What a usual program has put into `saved.pt`."""
    model, optimizer = make()
    model(torch.randn(5, 4)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 7}
    torch.save(state, tmp_path / "saved.pt")
    return state


@pytest.fixture
def url() -> str:
    return f"memory://{secrets.token_hex(4)}/imported"


def same(found: object, expected: object) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_weights_and_values_come_back_as_they_were(saved, url, tmp_path):
    dos.save(torch.load(tmp_path / "saved.pt", weights_only=True), url)
    torch.save(dos.read_state_dict(url), tmp_path / "exported.pt")
    exported = torch.load(tmp_path / "exported.pt", weights_only=True)
    same(exported["model"], saved["model"])
    assert exported["step"] == 7
    model, _ = make()
    state: dict[str, Any] = {"model": model, "step": 0}
    dos.load(state, url)
    assert state["step"] == 7
    same(model.state_dict(), saved["model"])
    # As everywhere in DCP. So an optimizer takes another way.
    assert set(exported["optimizer"]["state"]) == {"0", "1", "2", "3"}


def test_an_optimizer_is_converted_with_its_model(saved, url, tmp_path):
    model, optimizer = make()
    file = torch.load(tmp_path / "saved.pt", weights_only=True)
    model.load_state_dict(file["model"])
    optimizer.load_state_dict(file["optimizer"])
    dos.save({"model": model, "optimizer": optimizer}, url)
    assert "optimizer.state.0.weight.exp_avg" in dos.open(url)  # named, as FSDP loads it
    model, optimizer = make()
    dos.load({"model": model, "optimizer": optimizer}, url)
    same(optimizer.state_dict()["state"], saved["optimizer"]["state"])
