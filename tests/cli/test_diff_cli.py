"""`diff`: what it prints, and status 1 if checkpoints differ."""

from __future__ import annotations

import dataclasses
import json
from collections import deque
from pathlib import Path

import pytest
import torch

import dcp_objstore as dos
from dcp_objstore.cli.diff import print_diff
from dcp_objstore.errors import CheckpointNotFoundError

ALL = {"keys": [], "trust_pickle": False, "as_json": False}


@pytest.fixture
def urls(tmp_path: Path) -> tuple[str, str]:
    one, other = (tmp_path / "step-1").as_uri(), (tmp_path / "step-2").as_uri()
    long = "model.layers.17.self_attention.query_projection.weight"
    alike = {"model.b": torch.ones(4), long: torch.zeros(20, 3), "step": 1, "text": "a"}
    alike |= {"wide": torch.ones(2), "cut": torch.ones(4)}
    dos.save({**alike, "old": 1, "model.half": torch.ones(2)}, one, progress=False)
    other_state = {**alike, long: torch.full((20, 3), 0.5), "step": 2, "text": "b" * 70}
    other_state |= {"wide": torch.ones(2, 1), "cut": torch.ones(3).half()}
    dos.save({**other_state, "new": 1, "model.half": torch.ones(2).half()}, other, progress=False)
    return one, other


def test_differences_are_printed_on_80_columns(urls, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as caught:
        print_diff(*urls, **ALL)
    assert caught.value.code == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[2:] == [
        "removed   old",
        "added     new",
        "changed   model.layers.17.self_attention.query_projection.weight",
        "            float32 [20, 3]",
        "reshaped  wide  [2] -> [2, 1]",
        "reshaped  cut  [4] -> [3], float32 -> float16",
        "retyped   model.half  float32 -> float16",
        "changed   step  1 -> 2",
        "changed   text",
        "8 differences, 1 equal (no tensor read)",
    ]
    assert all(len(line) <= 80 for line in lines[2:])
    print_diff(*urls, **{**ALL, "keys": ["model.b"]})
    assert capsys.readouterr().out.splitlines()[2:] == ["0 differences, 1 equal (no tensor read)"]


def test_values_that_are_too_large_to_print_are_named_by_their_type(urls, capsys, monkeypatch):
    repeated: tuple[object, ...] = ()
    for _ in range(100):
        repeated = repeated, repeated  # 2**100 parts
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    values = {"repeated": repeated, "deep": (deep,), "number": (10**5000,), "keys": ({(1, 2): 3},)}
    others = {"lines": torch.eye(2), "fits": "x" * 53, "long": "x" * 54, "code": None}
    # Of 200 parts and of 201, with the list or the mapping itself.
    limits: dict[str, object] = {"most": [0] * 199, "more": [0] * 200}
    limits |= {"even": dict.fromkeys(range(99)), "odd": dict.fromkeys(range(100))}
    for name, kind in (("sets", frozenset), ("queues", deque)):
        limits[name] = kind(range(200))
    differences = tuple(
        dos.reports.ValueDifference(key=key, is_known=key != "code", value=value, other_value=1)
        for key, value in {**values, **others, **limits}.items()
    )
    report = dataclasses.replace(dos.diff(*urls), values=differences)
    monkeypatch.setattr(dos, "diff", lambda *_, **__: report)
    with pytest.raises(SystemExit):
        print_diff(*urls, **{**ALL, "as_json": True})
    shown = {one["key"]: one["value"] for one in json.loads(capsys.readouterr().out)["values"]}
    too_large = {key for key in limits if "too large" in str(shown[key])}
    assert too_large == {"more", "odd", "sets", "queues"}
    turned = tuple(
        dataclasses.replace(one, value=one.other_value, other_value=one.value)
        for one in report.values
    )
    monkeypatch.setattr(dos, "diff", lambda *_, **__: dataclasses.replace(report, values=turned))
    with pytest.raises(SystemExit):
        print_diff(*urls, **{**ALL, "as_json": True})
    others = json.loads(capsys.readouterr().out)["values"]
    assert {one["key"]: one["other_value"] for one in others} == shown
    monkeypatch.setattr(dos, "diff", lambda *_, **__: report)
    shown = {key: shown[key] for key in values}
    assert shown.pop("keys") == "({(1, 2): 3},)"
    assert set(shown.values()) == {"<tuple, too large to show>"}
    with pytest.raises(SystemExit):
        print_diff(*urls, **ALL)
    lines = [line.split(maxsplit=2)[1:] for line in capsys.readouterr().out.splitlines()]
    assert ["keys", "({(1, 2): 3},) -> 1"] in lines
    assert ["code", "needs --trust-pickle to be shown"] in lines
    assert (["lines"] in lines, ["fits"] in lines, ["long"] in lines) == (True, False, True)


def test_json_and_statuses(urls, tmp_path, capsys):
    with pytest.raises(SystemExit) as caught:
        print_diff(*urls, **{**ALL, "as_json": True})
    assert caught.value.code == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["same"], report["added"], report["equal"]) == (False, ["new"], 1)
    assert report["values"][0]["other_value"] == 2
    print_diff(urls[0], urls[0], **ALL)
    with pytest.raises(CheckpointNotFoundError):
        print_diff(urls[0], (tmp_path / "nothing").as_uri(), **ALL)
