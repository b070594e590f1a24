"""PEFT's folder is written of a checkpoint that describes its adapters, whole or not at all.

`tests/frameworks/test_hugging_face.py` has PEFT itself read it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import dcp_objstore as dos
from dcp_objstore.errors import InputError, UnsupportedError
from tests.support.checkpoints import memory_url

TENSORS = {f"a.{part}.{name}.weight": torch.rand(2) for part in "AB" for name in ("default", "b")}
SHARED = {"a.bias": torch.rand(3), "rest": torch.rand(4)}
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def described(*adapters: str, **names: str | None) -> str:
    return json.dumps(
        {
            adapter: {
                "config": f'{{"of": "{adapter}"}}',
                "names": {f"x.{part}.weight": f"a.{part}.{adapter}.weight" for part in "AB"}
                | names,
            }
            for adapter in adapters
        }
    )


def saved(peft: Any, **values: Any) -> str:
    dos.save({"model": {**TENSORS, **SHARED}, "peft": peft, **values}, url := memory_url())
    return url


def test_rename_of_an_adapter_is_refused_where_peft_has_its_own_names(tmp_path):
    url, rules = saved(described("default")), [("^model[.]", "mine.")]
    with pytest.raises(InputError, match="rename="):
        dos.export_checkpoint(url, tmp_path / "out", rename=rules)
    dos.export_checkpoint(url, tmp_path / "one.safetensors", rename=rules, progress=False)
    assert "mine.rest" in load_file(tmp_path / "one.safetensors")


@pytest.mark.parametrize(
    ("adapters", "keys", "written"),
    [
        (("b", "default"), None, "default"),
        (("b",), None, "b"),
        (("default", "b"), "model.*.b.*", "b"),
        (("default", "b"), ["model.a.A.b.weight"], "b"),  # the folder is whole all the same
        (("default",), "model.*", "default"),
    ],
)
def test_the_folder_has_all_of_one_adapter(tmp_path, adapters, keys, written):
    report = dos.export_checkpoint(saved(described(*adapters)), tmp_path / "out", keys)
    assert {Path(file).name for file in report.files} == {WEIGHTS, CONFIG}
    assert json.loads((tmp_path / "out" / CONFIG).read_text()) == {"of": written}
    tensors = load_file(tmp_path / "out" / WEIGHTS)
    assert tensors.keys() == {"x.A.weight", "x.B.weight"}
    for part in "AB":
        assert torch.equal(tensors[f"x.{part}.weight"], TENSORS[f"a.{part}.{written}.weight"])


def test_files_of_the_trainer_come_along_and_files_of_the_user_count(tmp_path):
    (tmp_path / CONFIG).write_text("own")
    url = saved(described("default"), files={"0": ({"tokenizer.json": b"{}", "rng.pth": b""},)})
    dos.export_checkpoint(url, tmp_path / "out", copied_files=[tmp_path / CONFIG])
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        WEIGHTS,
        CONFIG,
        "tokenizer.json",
    }
    assert (tmp_path / "out" / CONFIG).read_text() == "own"


@pytest.mark.parametrize(
    ("peft", "keys", "error", "text"),
    [
        (described("default", "b"), "model.*", InputError, "default and b"),
        (described("default", prompts=None), None, UnsupportedError, "save_pretrained"),
    ],
)
def test_what_is_no_folder_of_one_adapter_is_refused(tmp_path, peft, keys, error, text):
    with pytest.raises(error, match=text):
        dos.export_checkpoint(saved(peft), tmp_path / "out", keys)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "value", [3, "{", "[]", '{"default": 1}', torch.ones(2), {"a": "b"}, slice(3)]
)
def test_another_value_of_that_name_changes_nothing(tmp_path, value):
    dos.export_checkpoint(saved(value), tmp_path / "out", "model.*")
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == {
        f"model.{name}" for name in (TENSORS | SHARED)
    }


def test_a_single_file_has_the_keys_that_are_asked_for(tmp_path):
    out = tmp_path / "all.safetensors"
    dos.export_checkpoint(saved(described("default")), out, "model.a.*")
    assert load_file(out).keys() == {f"model.{name}" for name in (*TENSORS, "a.bias")}
