"""A disk that is full ends a save with an error that says how much room is missing."""

from __future__ import annotations

import errno
import os
import subprocess
import sys

import pytest
import torch

import dcp_objstore as dos
from dcp_objstore.errors import StoreFullError
from tests.support.servers import Folder

# With room for one of the two, the second fails; when the first is gone, there is room for it.
PROGRAM = """
import shutil, sys
import torch
import dcp_objstore as dos
url = "file://" + sys.argv[1]
state = {"w": torch.ones(5 << 18)}
dos.save(state, url + "/a")
try:
    dos.save(state, url + "/b")
except dos.errors.StoreFullError as error:
    print(error)
shutil.rmtree(sys.argv[1] + "/a")
dos.save(state, url + "/b")
assert dos.open(url + "/b").verify().ok
"""


def test_a_full_disk_says_what_is_free_and_what_the_save_needs(tmp_path, monkeypatch):
    write = os.write

    def refuse_data(fd: int, data: memoryview) -> int:
        if len(data) > 1 << 20:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, data)

    monkeypatch.setattr(os, "write", refuse_data)
    folder = Folder("file", f"file://{tmp_path}", {})
    with pytest.raises(StoreFullError, match=r"iB are free there now; this rank saves 8\.00 MiB"):
        dos.save({"w": torch.ones(2 << 20)}, folder.at("step-1"))
    assert folder.keys() == []
    assert folder.uploads() == []


@pytest.mark.campaign
def test_a_save_that_found_no_room_succeeds_when_there_is_some(tmp_path):
    script = 'mount -t tmpfs -o size=8m tmpfs "$1" || exit 99; exec "$2" -c "$3" "$1"'
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", script, "sh", str(tmp_path), sys.executable, PROGRAM],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 99 or "unshare" in done.stderr:
        pytest.skip("no file system can be mounted here")
    assert done.returncode == 0, done.stderr
    assert "iB are free there now; this rank saves 5.00 MiB" in done.stdout
    assert list(tmp_path.iterdir()) == []
