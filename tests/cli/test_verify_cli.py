"""`verify`: what it prints, and its statuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import dcp_objstore as dos
from dcp_objstore.cli.verify import verify
from dcp_objstore.errors import CheckpointNotFoundError, UnsupportedError
from tests.support.command_line import run_here

ALL = {
    "quick": False,
    "deep": False,
    "run": False,
    "as_json": False,
}


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A run of three steps; a block of the last and the object of the first are damaged."""
    url = (tmp_path / "run").as_uri()
    for step in (1, 2, 3):
        dos.save({"w": torch.zeros(3000, 500), "step": step}, f"{url}/step-{step}", progress=False)
    (last,) = (tmp_path / "run" / "step-3").glob("*.distcp")
    body = bytearray(last.read_bytes())
    body[5 * 1024**2] ^= 1
    last.write_bytes(body)
    (first,) = (tmp_path / "run" / "step-1").glob("*.distcp")
    first.unlink()
    return url


def test_a_run_is_verified_and_each_step_gets_a_line(url):
    done = run_here("verify", "--run", url)
    assert done.returncode == 4
    lines = done.stdout.splitlines()
    assert [line.rpartition("/")[2] for line in lines if not line.startswith(" ")] == [
        "step-3",
        "step-2",
        "step-1",
        "step-2",
    ]
    assert lines[0] == f"DAMAGED: {url}/step-3"
    assert "w[2097:3000, 0:500]: block 1" in done.stdout
    assert lines[-1] == f"the newest whole step: {url}/step-2"
    assert done.stderr == f"dcp-objstore: 2 steps damaged: {url}/step-3\n"


def test_json_is_a_line_a_step_and_complete(url, capsys):
    with pytest.raises(SystemExit) as caught:
        verify(url, **{**ALL, "run": True, "as_json": True})
    assert caught.value.code == 4
    reports = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(one["url"], one["ok"]) for one in reports] == [
        (f"{url}/step-3", False),
        (f"{url}/step-2", True),
        (f"{url}/step-1", False),
    ]
    (damage,) = reports[2]["damaged"]
    assert damage["what"] == "missing"
    assert damage["elements"] == ["w[0:3000, 0:500]", "step"]


def test_only_damage_that_was_looked_for_gives_status_4(url, capsys):
    verify(f"{url}/step-2", **{**ALL, "deep": True})
    assert capsys.readouterr().out.splitlines()[0] == f"whole: {url}/step-2"
    verify(f"{url}/step-3", **{**ALL, "quick": True})
    assert capsys.readouterr().out.splitlines()[0] == f"complete: {url}/step-3"
    with pytest.raises(SystemExit) as caught:
        verify(f"{url}/step-3", **ALL)
    assert caught.value.code == 4


def test_a_damaged_index_is_damage(url, capsys):
    (index,) = Path(url.removeprefix("file://"), "step-2").glob("index.*")
    index.write_bytes(b"x" + index.read_bytes()[1:])
    with pytest.raises(SystemExit) as caught:
        verify(f"{url}/step-2", **{**ALL, "as_json": True})
    assert caught.value.code == 4
    (damage,) = json.loads(capsys.readouterr().out)["damaged"]
    assert (damage["what"], damage["object_key"]) == ("unreadable", index.name)


def test_many_damages_are_cut_and_fit_80_columns(tmp_path, capsys, monkeypatch):
    url = (tmp_path / "step-1").as_uri()
    state = {f"model.layers.{n}.weight": torch.full((10,), n + 1.0) for n in range(30)}
    dos.save(state, url, progress=False)
    (path,) = (tmp_path / "step-1").glob("*.distcp")
    body = path.read_bytes()
    for tensor in state.values():
        body = body.replace(tensor.numpy().tobytes(), bytes(40))
    path.write_bytes(body)
    for columns, width in (("80", 80), ("20", 60)):  # in narrower lines no key could be read
        monkeypatch.setenv("COLUMNS", columns)
        with pytest.raises(SystemExit):
            verify(url, **ALL)
        lines = capsys.readouterr().out.splitlines()
        assert lines[-1] == "  and 10 more; `damaged` and --json have all"
        assert width - 20 < max(map(len, lines[1:])) <= width


def test_what_cannot_be_verified_is_no_damage(url, tmp_path):
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "stock")
    with pytest.raises(UnsupportedError, match="without digests"):
        verify((tmp_path / "stock").as_uri(), **ALL)
    with pytest.raises(CheckpointNotFoundError):
        verify(url, **ALL)
    with pytest.raises(CheckpointNotFoundError, match="one object"):
        verify(f"{url}/step-2/_COMMIT", **ALL)
    assert run_here("verify", "s4://bucket/x").returncode == 2
