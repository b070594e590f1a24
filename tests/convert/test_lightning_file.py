"""The one file that Lightning reads; `tests/frameworks` has Lightning itself."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch

import dcp_objstore as dos
from dcp_objstore.convert.frameworks import META_KEY
from dcp_objstore.errors import UntrustedPickleError

WEIGHTS = {"net.weight": torch.arange(6.0).view(2, 3)}
# Of eleven, the numbers are not in the order of the text.
STATES = [{"state": {"net.weight": {"step": torch.tensor(float(n))}}} for n in range(11)]


class Setting:
    """A hyperparameter of a class of the user's own."""


def saved(url: str, parts: dict[str, Any], meta: dict[str, Any]) -> str:
    file = io.BytesIO()
    torch.save(meta, file)
    dos.save({**parts, META_KEY: file.getvalue()}, url)
    return url


@pytest.mark.parametrize("model", ["state_dict", "model"])
def test_a_ckpt_file_of_a_trainers_checkpoint_has_lightnings_keys(tmp_path, model):
    meta = {"pytorch-lightning_version": "2.6", "epoch": 3, "loops": {"seen": torch.ones(2)}}
    parts = {model: WEIGHTS, **{f"optimizer_{n}": state for n, state in enumerate(STATES)}}
    url = saved(f"file://{tmp_path}/run", parts, meta)
    dos.export_checkpoint(url, tmp_path / "one.ckpt")
    file = torch.load(tmp_path / "one.ckpt")
    assert file.keys() == {"state_dict", "optimizer_states", *meta}
    assert torch.equal(file["state_dict"]["net.weight"], WEIGHTS["net.weight"])
    steps = [state["state"]["net.weight"]["step"].item() for state in file["optimizer_states"]]
    assert steps == list(range(11))
    assert torch.equal(file["loops"]["seen"], torch.ones(2))
    # Under another name it is what was saved, and so are parts of it.
    dos.export_checkpoint(url, tmp_path / "one.pt")
    assert torch.load(tmp_path / "one.pt").keys() == {*parts, META_KEY}
    dos.export_checkpoint(url, tmp_path / "part.ckpt", f"{model}.*")
    assert torch.load(tmp_path / "part.ckpt").keys() == {model}


def test_a_ckpt_file_of_weights_alone_has_no_optimizers(tmp_path):
    meta = {"pytorch-lightning_version": "2.6"}
    url = saved(f"file://{tmp_path}/run", {"state_dict": WEIGHTS}, meta)
    dos.export_checkpoint(url, tmp_path / "one.ckpt")
    assert torch.load(tmp_path / "one.ckpt").keys() == {"state_dict", *meta}


def test_a_ckpt_file_of_fabrics_checkpoint_has_the_keys_of_its_state(tmp_path):
    parts = {"model": WEIGHTS, "optimizer_a": STATES[0]}
    url = saved(f"file://{tmp_path}/run", parts, {"step": 3})
    dos.export_checkpoint(url, tmp_path / "one.ckpt")
    assert torch.load(tmp_path / "one.ckpt").keys() == {*parts, "step"}


def test_what_could_run_code_in_lightnings_file_is_refused(tmp_path):
    meta = {"pytorch-lightning_version": "2.6", "hyper_parameters": {"one": Setting()}}
    url = saved(f"file://{tmp_path}/run", {"state_dict": WEIGHTS}, meta)
    with pytest.raises(UntrustedPickleError, match="Setting"):
        dos.export_checkpoint(url, tmp_path / "one.ckpt")
    assert not (tmp_path / "one.ckpt").exists()
    dos.export_checkpoint(url, tmp_path / "one.ckpt", trust_pickle=True)
    file = torch.load(tmp_path / "one.ckpt", weights_only=False)
    assert isinstance(file["hyper_parameters"]["one"], Setting)
