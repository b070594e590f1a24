"""What the commands show on a terminal: its width is kept, and colours only where they are seen."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import captures
from tests.support.campaign import cases
from tests.support.command_line import on_terminal, run


@pytest.mark.campaign
def test_the_pictures_of_the_documentation_are_what_the_commands_show(tmp_path: Path) -> None:
    captures.make(tmp_path)
    for name in captures.COMMANDS:
        made, shown = tmp_path / f"{name}.svg", captures.IMAGES / f"{name}.svg"
        assert captures.text_of(made) == captures.text_of(shown), (
            "run `python -m tests.support.captures`"
        )
        assert "@font-face" not in made.read_text()  # a page makes no requests to other servers


@pytest.mark.parametrize("columns", cases([80, 160], default=[80]))
def test_colours_are_for_terminals_and_errors_are_wrapped_there(
    columns: int, tmp_path: Path
) -> None:
    url = f"file://{tmp_path}/run"
    captures.save_run(url, tmp_path / "run")
    step = f"{url}/step-40"
    assert on_terminal(columns, "verify", "--quick", step).startswith("\x1b[32mcomplete\x1b[0m: ")
    for plain in (
        on_terminal(columns, "verify", "--quick", step, NO_COLOR="1"),
        run("verify", "--quick", step).stdout,
    ):
        assert plain.startswith("complete: ")
        assert "\x1b" not in plain
    shown = on_terminal(columns, "rm", step, status=2).splitlines()
    assert len(shown) > 1
    assert max(len(line) for line in shown if str(tmp_path) not in line) <= columns
    assert len(run("rm", step).stderr.splitlines()) == 1
