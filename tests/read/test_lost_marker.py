"""A checkpoint of this library without its marker: nothing verifies it, so it is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import dcp_objstore as dos
from dcp_objstore.errors import CheckpointNotFoundError, DcpObjstoreError, UnsupportedError
from tests.support.checkpoints import cause

MARKER = "_COMMIT"
State = dict[str, object]


def new_state() -> State:
    return {"w": torch.zeros(1000), "step": 0}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A checkpoint with a flipped bit and without its marker."""
    folder = tmp_path / "step-7"
    values = torch.arange(1000.0)
    dos.save({"w": values, "step": 7}, folder.as_uri(), progress=False)
    (data,) = folder.glob("__0_0*")
    body = bytearray(data.read_bytes())
    body[body.find(values.numpy().tobytes()) + 400] ^= 0x40
    data.write_bytes(body)
    (folder / MARKER).unlink()
    return folder


READS: dict[str, Callable[[str, Path], object]] = {
    "load": lambda url, _: dos.load(new_state(), url, progress=False),
    "dcp.load": lambda url, _: dcp.load(new_state(), storage_reader=dos.ObjectStoreReader(url)),
    "open": lambda url, _: dos.open(url),
    "read_state_dict": lambda url, _: dos.read_state_dict(url, progress=False),
    "import": lambda url, to: dos.import_checkpoint(url, to.as_uri(), progress=False),
    "export": lambda url, to: dos.export_checkpoint(url, to / "m.safetensors", progress=False),
    "cp": lambda url, to: dos.copy_checkpoint(url, to.as_uri(), progress=False),
}


@pytest.mark.parametrize("read", READS)
def test_a_checkpoint_that_lost_its_marker_is_not_read_unverified(checkpoint, tmp_path, read):
    with pytest.raises((DcpObjstoreError, dcp.api.CheckpointException)) as caught:
        READS[read](checkpoint.as_uri(), tmp_path / "copy")
    error = caught.value if isinstance(caught.value, DcpObjstoreError) else cause(caught.value)
    assert isinstance(error, CheckpointNotFoundError)
    assert MARKER in str(error)
    assert "verify=False" in str(error)
    assert not (tmp_path / "copy" / MARKER).exists()


def test_it_is_read_unverified_where_that_is_asked_for(checkpoint):
    state, url = new_state(), checkpoint.as_uri()
    assert dos.load(state, url, verify=False, progress=False).commit_id is None
    assert state["step"] == 7
    reader = dos.ObjectStoreReader(url, verify=False)
    dcp.load(state, storage_reader=reader)
    assert dos.open(url, verify=False).keys() == {"w", "step"}
    assert int((dos.read_state_dict(url, verify=False)["w"] != torch.arange(1000.0)).sum()) == 1


def test_what_needs_the_marker_names_it(checkpoint):
    url = checkpoint.as_uri()
    for change in (dos.repair, dos.delete, lambda url: dos.pin(url, "paper")):
        with pytest.raises(CheckpointNotFoundError, match=MARKER):
            change(url)
    for quick in (False, True):
        with pytest.raises(UnsupportedError, match=MARKER):
            dos.open(url, verify=False).verify(quick=quick)


def test_an_empty_checkpoint_of_another_library_is_none_of_ours(tmp_path):
    dcp.save({}, checkpoint_id=tmp_path / "stock")
    assert list(dos.open((tmp_path / "stock").as_uri())) == []
