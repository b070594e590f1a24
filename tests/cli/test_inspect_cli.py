"""`inspect`: the tree of a checkpoint, on 80 columns and as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import dcp_objstore as dos
from dcp_objstore.cli.inspect import inspect
from dcp_objstore.errors import StateMismatchError


@pytest.fixture
def url(tmp_path: Path) -> str:
    url = (tmp_path / "step-1").as_uri()
    layers = {
        f"model.layers.{n}.{name}": torch.ones(shape)
        for n in range(12)
        for name, shape in (("mlp.0.weight", (16, 16)), ("norm.weight", (16 if n else 8,)))
    }
    state = {**layers, "model.head": torch.zeros(512, dtype=torch.bfloat16), "step": 3}
    dos.save(state, url, user_metadata={"note": "first"}, progress=False)
    return url


def test_alike_layers_are_shown_once_with_their_sum(url, capsys):
    inspect(url, [], as_json=False)
    where, saved, commit, notes, head, *lines = capsys.readouterr().out.splitlines()
    assert where == url
    assert saved.endswith("1 rank, 1 object")
    assert commit == f"commit {dos.open(url).commit_id}"
    assert notes == 'metadata {"note": "first"}'
    assert head.split() == ["size", "dtype", "shards", "name"]
    shown = [" ".join(line.split()) for line in lines]
    assert shown[0] == "- value step"
    assert shown[1:-3] == [
        "13.72 KiB model",
        "1.00 KiB bfloat16 1 head [512]",
        "12.72 KiB layers",
        "1.03 KiB 0",
        "1.00 KiB mlp",
        "1.00 KiB 0",
        "1.00 KiB float32 1 weight [16, 16]",
        "32 B norm",
        "32 B float32 1 weight [8]",
        "11.69 KiB 1 ... 11 (11 alike)",
        "1.00 KiB mlp",
        "1.00 KiB 0",
        "1.00 KiB float32 1 weight [16, 16]",
        "64 B norm",
        "64 B float32 1 weight [16]",
    ]
    assert shown[-3] == "12.72 KiB float32 24 tensors in all"
    assert any(line.endswith("value 1 value in all") for line in shown[-2:])
    assert all(len(line) <= 80 for line in lines)
    inspect(url, ["model.head"], as_json=False)
    assert capsys.readouterr().out.splitlines()[-1].split()[2:] == [
        "bfloat16",
        "1",
        "tensor",
        "in",
        "all",
    ]


def test_json_names_every_tensor(url, capsys):
    inspect(url, [], as_json=True)
    report = json.loads(capsys.readouterr().out)
    tensors, (value,), by_dtype = (
        report.pop(name) for name in ("tensors", "values", "bytes_by_dtype")
    )
    assert len(tensors) == 25
    head = {"key": "model.head", "bytes": 1024, "dtype": "bfloat16", "shape": [512], "shards": 1}
    assert head in tensors
    assert value == {"key": "step", "bytes": value["bytes"]}
    assert by_dtype == {"float32": 13024, "bfloat16": 1024, "value": value["bytes"]}
    assert report == {
        "url": url,
        "commit_id": dos.open(url).commit_id,
        "user_metadata": {"note": "first"},
        "world_size": 1,
        "unverified": False,
        "objects": 1,
        "total_bytes": 13024 + 1024 + value["bytes"],
        "left_out": {},
    }


def test_what_a_save_left_out_is_counted(tmp_path, capsys):
    url, model = (tmp_path / "step-1").as_uri(), torch.nn.Linear(100, 20)
    model.weight.requires_grad_(False)
    dos.save({"nets": {"actor": dos.trainable(model)}}, url)
    inspect(url, [], as_json=False)
    line = "left out of nets.actor: 1 frozen tensor, 2,000 elements"
    assert line in capsys.readouterr().out.splitlines()
    inspect(url, [], as_json=True)
    left_out = json.loads(capsys.readouterr().out)["left_out"]
    assert left_out == {"nets.actor": {"tensors": 1, "elements": 2000}}


def test_a_pattern_that_matches_nothing_is_refused(url):
    with pytest.raises(StateMismatchError):
        inspect(url, ["modle.*"], as_json=False)
