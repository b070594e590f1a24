"""The example that ends a command's help runs as it stands there."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import torch
from typer.main import get_command

import dcp_objstore as dos
from dcp_objstore.cli.app import app

EXAMPLES = {
    name: command.epilog.removeprefix("Example: ")
    for name, command in get_command(app).commands.items()  # type: ignore[attr-defined]
    if command.epilog
}
STATUSES = {"diff": 1}  # the steps differ


def test_the_examples_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (20, 40):
        state = {"model": {"embed": {"weight": torch.full((50, 4), 1.0 * step)}}, "step": step}
        dos.save(state, f"file://{tmp_path}/run/step-{step}", progress=False)
    assert "verify" in EXAMPLES
    for name, example in EXAMPLES.items():
        program, *arguments = shlex.split(example.replace("/tmp/", f"{tmp_path}/"))
        assert (program, arguments[0]) == ("dcp-objstore", name)
        if status := STATUSES.get(name):
            with pytest.raises(SystemExit) as caught:
                app(arguments, standalone_mode=False)
            assert caught.value.code == status
        else:
            app(arguments, standalone_mode=False)
        assert capsys.readouterr().out
