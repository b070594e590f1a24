"""Verbs of the project on `file://`, in a folder whose name needs care."""

from __future__ import annotations

import errno
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
from dcp_objstore.errors import StoreFullError
from tests.support.command_line import run_here
from tests.support.servers import Folder


def state(factor: float) -> dict[str, Any]:
    return {"weight": torch.arange(12.0).reshape(3, 4) * factor, "step": int(factor)}


def assert_holds(url: str, factor: float) -> None:
    found = {"weight": torch.zeros(3, 4), "step": -1}
    dos.load(found, url, progress=False)
    assert torch.equal(found["weight"], state(factor)["weight"])
    assert found["step"] == int(factor)


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_a_run_is_saved_managed_resumed_deleted_and_swept(tmp_path):
    folder = Folder("file", f"file://{tmp_path}/a run #1 %20", {})
    with dos.CheckpointManager(folder.url, keep=[dos.KeepLatest(3)], save_every=1) as manager:
        assert manager.load(state(0)) is None
        for step in (1, 2, 3, 4):
            manager.step(step, state(step))
    assert [step.name for step in dos.steps(folder.url)] == ["step-2", "step-3", "step-4"]
    with dos.CheckpointManager(folder.url) as manager:
        assert manager.load(state(0)) == 4
    stock = {"weight": torch.zeros(3, 4)}
    path = folder.at("step-4").removeprefix("file://")
    dcp.load(stock, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    assert torch.equal(stock["weight"], state(4)["weight"])

    claim = dos.claim_run(folder.url)
    handle = dos.async_save(state(5), folder.at("step-4"), claim=claim, overwrite=True)
    handle.result()
    assert_holds(folder.at("step-4"), 5)
    dos.delete(folder.at("step-2"), claim=claim)
    assert folder.keys("step-2") == [MARKER_KEY]
    folder.put(f"step-3/{data_key(0, 0, new_nonce())}", b"torn")
    assert dos.sweep(folder.url).deleted == 0, "all of it is young"
    old = time.time() - 2 * 24 * 3600
    for place in Path(folder.url.removeprefix("file://")).rglob("*"):
        os.utime(place, (old, old))
    assert dos.sweep(folder.url).deleted > 0
    assert_holds(folder.at("step-3"), 3)
    listed = run_here("ls", folder.url, "--json").stdout.splitlines()
    assert {folder.at("step-3"), folder.at("step-4")} < {json.loads(line)["url"] for line in listed}
    assert folder.uploads() == []


def test_a_full_disk_says_what_is_free_and_leaves_nothing_and_then_there_is_room(tmp_path):
    def refuse_data(fd: int, data: memoryview) -> int:
        if len(data) > 1 << 20:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, data)

    write, folder = os.write, Folder("file", f"file://{tmp_path}", {})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "write", refuse_data)
        with pytest.raises(StoreFullError, match=r"iB are free there now; this rank saves 8\.00"):
            dos.save({"w": torch.ones(2 << 20)}, folder.at("step-1"))
    assert folder.keys() == []
    assert folder.uploads() == []
    dos.save({"w": torch.ones(2 << 20)}, folder.at("step-1"))
    assert dos.open(folder.at("step-1")).verify().ok
