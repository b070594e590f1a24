"""`dcp-objstore follow`: a line, or a command, for each step; no pin stays behind."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import dcp_objstore as dos
from dcp_objstore.stores import StoreSpec
from tests.support.command_line import run_here
from tests.support.upkeep import save


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A run with the steps 9 and 10."""
    url = f"file://{tmp_path}/run"
    for step in (9, 10):
        save(StoreSpec(f"{url}/step-{step}").open())
    return url


def pins(url: str) -> dict[str, tuple[str, ...]]:
    return {step.name: step.pins for step in dos.steps(url) if step.pins}


def script(text: str) -> str:
    return shlex.join([sys.executable, "-c", text])


def test_it_prints_the_url_of_each_step_or_what_ls_prints_of_it(url):
    done = run_here("follow", url, "--until", "10")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [f"{url}/step-9", f"{url}/step-10"]
    done = run_here("follow", url, "--timeout", "0s", "--json", "--after", "step-9")
    assert done.stdout == run_here("ls", "--json", f"{url}/step-10").stdout
    done = run_here("follow", url, "--timeout", "0s", "--skip-to-newest")
    assert done.stdout.splitlines() == [f"{url}/step-10"]


def test_a_command_is_run_for_each_step_without_a_shell(url, capfd, tmp_path, monkeypatch):
    """Names come from the bucket, so nothing in them may act."""
    monkeypatch.chdir(tmp_path)
    save(StoreSpec(f"{url}/step-11 $(touch hacked) {{name}}").open())
    printed = script("import sys; print(sys.argv[1:], flush=True)")
    words = ("follow", url, "--timeout", "0s", "--exec")
    done = run_here(*words, f"{printed} '{{name}} at {{url}}'")
    assert (done.returncode, done.stdout) == (0, "")
    name = "step-11 $(touch hacked) {name}"
    steps = ["step-9", "step-10"]
    assert capfd.readouterr().out.splitlines() == [
        str([f"{step} at {url}/{step}"]) for step in (*steps, name)
    ]
    assert {path.name for path in tmp_path.iterdir()} == {"run"}
    assert run_here(*words, printed, "--until", "9").returncode == 0
    assert capfd.readouterr().out.splitlines() == [str([f"{url}/step-9"])]


def test_a_command_that_fails_ends_it_with_its_status(url, capfd):
    failing = script("import sys; print(sys.argv[1], flush=True); sys.exit(7)")
    words = ("follow", url, "--timeout", "0s", "--pin", "evaluator", "--exec", failing)
    done = run_here(*words)
    assert done.returncode == 7
    assert "step-9" in done.stderr
    assert capfd.readouterr().out.splitlines() == [f"{url}/step-9"]
    assert run_here(*words, "--keep-going").returncode == 7
    assert capfd.readouterr().out.splitlines() == [f"{url}/step-9", f"{url}/step-10"]
    killed = script("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert run_here("follow", url, "--exec", killed).returncode == 128 + signal.SIGKILL
    assert pins(url) == {}


@pytest.mark.parametrize(
    "words",
    [
        ("--exec", "no-such-program"),
        ("--exec", ""),
        ("--exec", "'open"),
        ("--pin", "evaluator"),
        ("--poll", "0s"),
        ("--timeout", "soon"),
        ("--pin", "", "--exec", "true"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_status_2(url, words):
    done = run_here("follow", url, *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("dcp-objstore: ")
    assert len(done.stderr.splitlines()) == 1
    assert pins(url) == {}


def test_with_json_a_step_that_no_longer_counts_is_printed_too(url, monkeypatch):
    followed = dos.follow

    def drop_the_first(*args: Any, on_dropped: Any, **settings: Any) -> Any:
        on_dropped(dos.steps(url)[0])
        return followed(*args, on_dropped=on_dropped, **settings)

    monkeypatch.setattr(dos, "follow", drop_the_first)
    done = run_here("follow", url, "--json", "--until", "10")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["url"].rpartition("/")[2] for line in lines] == ["step-9", "step-9", "step-10"]


def test_ctrl_c_leaves_no_pin_and_what_sigkill_leaves_the_next_follower_removes(url, usual_signals):
    words = ["follow", url, "--pin", "evaluator", "--exec"]
    waiting = script("import time; print('waits', flush=True); time.sleep(600)")
    for number, status, pinned in (
        (signal.SIGINT, 130, {}),
        (signal.SIGTERM, 143, {}),
        (signal.SIGKILL, -9, {"step-9": ("evaluator",)}),
    ):
        with subprocess.Popen(
            [sys.executable, "-m", "dcp_objstore", *words, waiting],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as process:
            assert process.stdout.readline() == "waits\n"
            assert pins(url) == {"step-9": ("evaluator",)}
            process.send_signal(number)
            assert process.wait(60) == status
            if number == signal.SIGKILL:
                os.killpg(process.pid, signal.SIGKILL)  # its command, which it could not end
            assert process.stdout.read() == ""
            assert len(process.stderr.read().splitlines()) == (number != signal.SIGKILL)
        assert pins(url) == pinned
    assert run_here(*words, "true", "--after", "10", "--timeout", "0s").returncode == 0
    assert pins(url) == {}
