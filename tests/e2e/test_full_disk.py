"""A disk that is full ends a save with an error that says how much room is missing."""

from __future__ import annotations

import errno
import os

import pytest
import torch

import dcp_objstore as dos
from dcp_objstore.errors import StoreFullError
from tests.support.servers import Folder


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
