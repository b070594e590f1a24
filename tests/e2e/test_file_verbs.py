"""Every verb of the project on `file://`, in a folder whose name needs care."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import dcp_objstore as dos
from dcp_objstore.checkpoint.names import MARKER_KEY, data_key, new_nonce
from tests.support.command_line import run
from tests.support.servers import Folder


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder("file", f"file://{tmp_path}/a run #1 %20", {})


def state(factor: float) -> dict[str, Any]:
    return {"weight": torch.arange(12.0).reshape(3, 4) * factor, "step": int(factor)}


def loaded(url: str) -> dict[str, Any]:
    found = {"weight": torch.zeros(3, 4), "step": -1}
    dos.load(found, url, progress=False)
    return found


def assert_holds(url: str, factor: float) -> None:
    found = loaded(url)
    assert torch.equal(found["weight"], state(factor)["weight"])
    assert found["step"] == int(factor)


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_saves_loads_and_overwrites(folder):
    url = folder.at("step-1")
    dos.save(state(1), url, progress=False)
    assert_holds(url, 1)
    with pytest.raises(dos.errors.CheckpointExistsError):
        dos.save(state(2), url, progress=False)
    dos.async_save(state(2), url, overwrite=True, progress=False).result()
    assert_holds(url, 2)
    stock = {"weight": torch.zeros(3, 4)}
    reader = dcp.FileSystemReader(url.removeprefix("file://"))
    dcp.load(stock, storage_reader=reader, no_dist=True)
    assert torch.equal(stock["weight"], state(2)["weight"])
    opened = dos.open(url)
    assert torch.equal(opened["weight"][1:2], state(2)["weight"][1:2])
    assert opened.verify(deep=True).ok
    assert folder.uploads() == []


def test_deletes_pins_repairs_and_sweeps(folder):
    for step in (1, 2, 3):
        dos.save(state(step), folder.at(f"step-{step}"), progress=False)
    dos.pin(folder.at("step-1"), "paper")
    with pytest.raises(dos.errors.CheckpointPinnedError):
        dos.delete(folder.at("step-1"))
    dos.unpin(folder.at("step-1"), "paper")
    dos.delete(folder.at("step-1"))
    assert folder.keys("step-1") == [MARKER_KEY]
    dos.delete(folder.at("step-2"), grace_seconds=3600)
    with pytest.raises(dos.errors.CheckpointNotFoundError):
        loaded(folder.at("step-2"))
    folder.delete("step-3/.metadata")
    assert dos.repair(folder.at("step-3")).dot_metadata == "written"
    folder.put(f"step-3/{data_key(0, 0, new_nonce())}", b"torn")
    assert dos.sweep(folder.url).deleted == 0, "all of it is young"
    old = time.time() - 2 * 24 * 3600
    for place in Path(folder.url.removeprefix("file://")).rglob("*"):
        os.utime(place, (old, old))
    swept = dos.sweep(folder.url)
    assert folder.keys("step-2") == [MARKER_KEY]
    assert swept.deleted == 2 + 1, "data and index of the deleted one, and what was torn"
    assert_holds(folder.at("step-3"), 3)


def test_a_run_is_managed_taken_over_and_resumed(folder):
    keep = [dos.KeepLatest(2)]
    with dos.CheckpointManager(folder.url, keep=keep, save_every=1) as manager:
        assert manager.load(state(0)) is None
        for step in (1, 2, 3):
            manager.step(step, state(step))
    names = [step.name for step in dos.steps(folder.url)]
    assert names == ["step-2", "step-3"]
    found = state(0)
    with dos.CheckpointManager(folder.url, keep=keep, save_every=1) as manager:
        assert manager.load(found) == 3
    assert torch.equal(found["weight"], state(3)["weight"])
    claim = dos.claim_run(folder.url)
    dos.save(state(4), folder.at("step-4"), claim=claim, progress=False)
    assert_holds(folder.at("step-4"), 4)
    listed = run("ls", folder.url, "--json")
    assert listed.returncode == 0
    assert [json.loads(line)["url"] for line in listed.stdout.splitlines()] == [
        folder.at(name) for name in ("step-1", "step-2", "step-3", "step-4")
    ]
