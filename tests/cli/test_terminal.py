"""What the commands show on a terminal: its width is kept, and colours only where they are seen."""

from __future__ import annotations

import logging
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import torch

import dcp_objstore as dos
from dcp_objstore.cli.terminal import age, wrapped
from dcp_objstore.doctor import Finding
from dcp_objstore.errors import CheckpointCorruptError, StateMismatchError
from dcp_objstore.observe.report import logger
from dcp_objstore.stores.errors import redacted
from tests.support import captures
from tests.support.command_line import on_terminal, run_here

# Moves the cursor, sets the title, begins a line, and turns the direction of what follows.
EVIL = "w\x1b[2K\x1b[1A\x9b31m\x1b]0;owned\x07\rFORGED\nFORGED\u202egnp\u2066"


@pytest.mark.campaign
def test_the_pictures_of_the_documentation_are_what_the_commands_show(tmp_path):
    captures.make(tmp_path)
    for name in captures.COMMANDS:
        made, shown = tmp_path / f"{name}.svg", captures.IMAGES / f"{name}.svg"
        assert captures.text_of(made) == captures.text_of(shown), (
            "run `python -m tests.support.captures`"
        )
        assert "@font-face" not in made.read_text()  # a page makes no requests to other servers


def test_an_age_is_in_the_largest_unit_of_which_there_are_two():
    ages = {-5: "0 s", 119: "119 s", 120: "2 min", 7199: "119 min", 7200: "2 h", 172799: "47 h"}
    ages |= {172800: "2 d", 800 * 86400: "800 d"}
    assert {
        seconds: age(datetime.now(UTC) - timedelta(seconds=seconds)) for seconds in ages
    } == ages
    assert age(None) == "-"


def test_a_text_is_cut_at_spaces_and_only_a_long_word_elsewhere():
    assert wrapped("aa-bb cc-dd", 9, "> ") == ["aa-bb", "> cc-dd"]
    assert (wrapped("x" * 5, 3), wrapped("x" * 5, 3, break_words=False)) == (
        ["xxx", "xx"],
        ["xxxxx"],
    )
    assert wrapped("", 5) == [""]


def test_doctor_prints_a_table_and_what_it_comes_to(monkeypatch):
    denied = {"error": "PermissionDeniedError"}
    role = "Allow s3:PutObject to the role that the job has, on everything below this prefix."
    findings = [
        Finding("list", "ok", "first"),
        Finding("put", "failed", "403 " * 20, role, denied),
        Finding("multipart", "not made", "no right to put", "allow it"),
        Finding("copy", "not made", "no right to put", "allow it"),
        Finding("delete", "not made", "another reason", f"`aws {'x' * 60}`"),
        Finding("clock", "warning", "12 s late"),
        Finding("lifecycle", "not applicable", "none"),
    ]
    monkeypatch.setattr("dcp_objstore.doctor.check_up", lambda *_: (one for one in findings))
    done = run_here("doctor", "file:///b", COLUMNS="80")
    assert (done.returncode, done.stdout) == (
        1,
        f"""\
file:///b

list                ok        first
put                 FAILED    403 403 403 403 403 403 403 403 403 403 403 403
                              403 403 403 403 403 403 403 403
                              -> Allow s3:PutObject to the role that the job
                                 has, on everything below this prefix.
multipart           not made  no right to put
                              -> allow it
delete              not made  another reason
                              -> `aws {"x" * 60}`
clock               warning   12 s late
lifecycle           n/a       none

FAILED: put
warnings: clock
not made: multipart, copy, delete
Rights come from the policy of the user or role, and the bucket's own must not
deny them; servers other than AWS may call them differently.
""",
    )
    del findings[1]
    fit = run_here("doctor", "file:///b", COLUMNS="80")
    summary = ["fit to hold checkpoints", "warnings: clock", "not made: multipart, copy, delete"]
    assert (fit.returncode, fit.stdout.splitlines()[-3:]) == (0, summary)


def test_colours_are_for_terminals_alone(tmp_path):
    url = f"file://{tmp_path}/run"
    captures.save_run(url, tmp_path / "run")
    step = f"{url}/step-40"
    assert on_terminal(80, "verify", "--quick", step).startswith("\x1b[32mcomplete\x1b[0m: ")
    for plain in (
        on_terminal(80, "verify", "--quick", step, NO_COLOR="1"),
        run_here("verify", "--quick", step).stdout,
    ):
        assert plain.startswith("complete: ")
        assert "\x1b" not in plain
    assert len(run_here("rm", step).stderr.splitlines()) == 1


def assert_harmless(shown: str) -> None:
    for line in shown.splitlines():
        assert line.isprintable()
        assert not line.lstrip().startswith("FORGED")


@pytest.fixture
def evil_run(tmp_path: Path) -> str:
    """A run of two damaged checkpoints, whose every name is hostile."""
    run_url = f"file://{tmp_path}/run"
    for step in (1, 2):
        state = {EVIL: torch.arange(10.0 * step), f"{EVIL}.value": EVIL * step, "x.0.y": 1}
        notes = {EVIL: EVIL, "metrics": {EVIL: EVIL}}
        url = f"{run_url}/step-{step}\u202e"
        dos.save(state, url, user_metadata=notes, progress=False)
        folder = tmp_path / "run" / f"step-{step}\u202e"
        data = next(folder.glob("__0_0*"))
        data.write_bytes(data.read_bytes()[:100])
        (folder / EVIL).write_bytes(b"nothing that we write")
        dos.pin(url, f"pin\u202e{step}")
    return run_url


def test_nothing_that_a_store_names_acts_on_a_terminal(evil_run, tmp_path):
    one, two = (f"{evil_run}/step-{step}\u202e" for step in (1, 2))
    seen = 0
    for command in (
        *(("ls", evil_run), ("inspect", one), ("inspect", one, "W*")),
        *(("verify", one), ("verify", "--deep", one)),
        *(("verify", "--quick", one), ("verify", "--run", evil_run), ("diff", one, two)),
        ("export", one, f"{tmp_path}/m.safetensors"),
        *(("export", one, f"{tmp_path}/m.pt"), ("cp", one, f"{evil_run}/copy")),
        *(("import", one, f"{evil_run}/new"), ("import", one, two), ("sweep", evil_run)),
        *(("rm", one), ("repair", one), ("pin", one, "x"), ("unpin", one, "x")),
    ):
        done = run_here(*command)
        assert done.stdout + done.stderr
        assert_harmless(done.stdout + done.stderr)
        seen += "\\x1b" in done.stdout + done.stderr
    assert seen >= 8


def test_no_error_or_log_line_acts_on_a_terminal(evil_run, caplog):
    url = f"{evil_run}/step-1\u202e"
    error = CheckpointCorruptError(EVIL.replace("\n", ""), key=EVIL, object_key=EVIL, url=EVIL)
    assert_harmless(str(error))
    assert (error.key, error.message) == (EVIL, EVIL.replace("\n", ""))
    with pytest.raises(StateMismatchError) as caught:
        dos.load({EVIL: torch.zeros(3), f"{EVIL}.valu": 1}, url, progress=False)
    assert_harmless(str(caught.value))
    assert_harmless(repr(list(dos.open(url).values())))
    report = dos.open(url).verify(progress=False)
    assert_harmless("\n".join(damage.text for damage in report.damaged))
    assert any(EVIL in part for damage in report.damaged for part in damage.elements)
    logger.warning("%s is odd", EVIL.replace("\n", ""))
    logging.getLogger("dcp_objstore").warning(EVIL.replace("\n", ""))
    ours = [one.getMessage() for one in caplog.records if one.name == "dcp_objstore"]
    assert len(ours) >= 2
    assert_harmless("\n".join(ours))
    assert redacted("<Message>\x1b[2Jgone</Message>\n") == "<Message>\\x1b[2Jgone</Message>\n"
