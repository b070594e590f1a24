"""The command line: quick to start, one clear line for an error, and stable exit statuses."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch

import dcp_objstore as dos
from dcp_objstore import errors
from dcp_objstore.checkpoint.commit import commit_checkpoint, take_begin_token
from dcp_objstore.checkpoint.marker import Counts
from dcp_objstore.checkpoint.names import MARKER_KEY, data_key, new_nonce
from dcp_objstore.checkpoint.pins import pin
from dcp_objstore.cli import convert
from dcp_objstore.cli.exits import exits, status_of
from dcp_objstore.cli.ls import print_checkpoints
from dcp_objstore.run.upkeep import delete
from dcp_objstore.stores import open_store
from dcp_objstore.stores.local import LocalStore
from tests.support.checkpoints import saved_by
from tests.support.command_line import on_terminal, run_here


def save_step(url: str, **user_metadata: object) -> None:
    """Commit a checkpoint of one object without torch."""
    store, nonce = open_store(url), new_nonce()
    token = take_begin_token(store, overwrite=False)
    store.put(data_key(0, 0, nonce), b"x" * 2048)
    commit_checkpoint(
        store,
        token,
        index=b"index",
        objects=[(data_key(0, 0, nonce), 2048)],
        counts=Counts(tensors=3, objects=1, total_bytes=2048),
        world_size=4,
        user_metadata=user_metadata,
        nonce=nonce,
    )


def test_help_tells_the_exit_statuses_one_a_line():
    lines = [line.strip() for line in run_here("--help").stdout.splitlines()]
    for status in ("0", "1", "2", "3", "4", "5", "130"):
        assert any(line.split()[:1] == [status] for line in lines), (status, lines)
    for words in ((), ("local",)):
        alone = run_here(*words)
        assert "Commands:" in alone.stdout + alone.stderr


def test_without_the_cli_extra_the_command_says_how_to_get_it():
    code = "import sys; sys.modules['typer'] = None; from dcp_objstore.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "pip install 'dcp-objstore[cli]'" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_wrong_option_is_a_usage_error():
    for arguments in (["demo", "--ranks", "1"], ["demo", "--resume-ranks", "0"], ["nothing"]):
        done = run_here(*arguments)
        assert done.returncode == 2
        assert "Usage: " in done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (errors.StoreUnavailableError, 3),
        (errors.CommitUnknownError, 3),
        (errors.InvalidUrlError, 2),
        (errors.CheckpointNotFoundError, 2),
        (errors.CheckpointCorruptError, 4),
        (errors.CommitLostError, 5),
        (errors.RankFailedError, 1),
        (errors.DcpObjstoreError, 1),
    ],
)
def test_each_kind_of_error_has_its_status(error, status, capsys):
    assert status_of(error("")) == status
    with pytest.raises(SystemExit) as caught, exits():
        raise error("what", url="s3://bucket/x", advice="do that")
    assert caught.value.code == status
    shown = capsys.readouterr().err
    assert shown.startswith(f"dcp-objstore: {error.__name__}: what [url 's3://bucket/x']; do that")
    assert shown.count("\n") == 1


@pytest.mark.parametrize("on_terminal", [True, False])
def test_notes_keep_their_lines_and_an_error_its_own_on_a_terminal(
    capsys, monkeypatch, on_terminal
):
    error = errors.StoreUnavailableError("it did not start", url="s3://b")
    error.add_note("the log ends:\nfirst\nsecond")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: on_terminal)
    with pytest.raises(SystemExit), exits():
        raise error
    first, *lines = capsys.readouterr().err.splitlines()
    assert ("doctor" in first) is not on_terminal
    assert len(lines) == (5 if on_terminal else 3)
    assert lines[-3:] == ["the log ends:", "first", "second"]


@pytest.mark.parametrize("said", [(), ("interrupted while waiting",)])
def test_ctrl_c_is_130_and_no_traceback(capsys, said):
    with pytest.raises(SystemExit) as caught, exits():
        raise KeyboardInterrupt(*said)
    assert caught.value.code == 130
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.usefixtures("usual_signals")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_command_as_ctrl_c_does_unless_it_is_ignored(number, capsys):
    before = signal.getsignal(number)
    with pytest.raises(SystemExit) as caught, exits():
        try:
            signal.raise_signal(number)
        except KeyboardInterrupt as error:
            error.add_note("where to go on")
            raise
    assert caught.value.code == 128 + number
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"dcp-objstore: ended by {number.name}", "where to go on"]
    assert signal.getsignal(number) is before
    signal.signal(number, signal.SIG_IGN)
    try:
        with exits():
            signal.raise_signal(number)  # as when a terminal closes on a command under nohup
    finally:
        signal.signal(number, before)


def test_a_reader_that_goes_away_is_no_error_message(tmp_path):
    save_step(f"file://{tmp_path}/step-1")
    process = subprocess.Popen(
        [sys.executable, "-m", "dcp_objstore", "ls", f"file://{tmp_path}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() == 141


def test_output_that_cannot_be_written_is_one_line_and_a_status(tmp_path):
    """A full disk, and no standard output at all."""
    save_step(f"file://{tmp_path}/step-1")
    command = f"{sys.executable} -m dcp_objstore ls --json file://{tmp_path}"
    for where, says in ((">/dev/full", "No space left"), (">&-", "closed")):
        done = subprocess.run(
            ["sh", "-c", f"{command} {where}"], stderr=subprocess.PIPE, text=True, check=False
        )
        assert done.returncode == 1
        assert says in done.stderr
        assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_json_has_no_constants_that_are_no_json(tmp_path, value):
    one, other = f"file://{tmp_path}/a", f"file://{tmp_path}/b"
    dos.save({"lr": value, "w": torch.tensor([1.0, 2.0])}, one, progress=False)
    dos.save({"lr": 1.0, "w": torch.tensor([1.0, value])}, other, progress=False)

    def refuse(text: str) -> None:
        raise AssertionError(text)

    shown = json.loads(run_here("diff", "--json", one, other).stdout, parse_constant=refuse)
    assert shown["values"][0]["value"] == str(value)


def test_ls_shows_committed_steps_in_order_and_torn_saves_as_not_committed(tmp_path, capsys):
    url = f"file://{tmp_path}"
    for step in (10, 9):
        save_step(f"{url}/run/step-{step}", step=step)
    open_store(f"{url}/run/step-11").put(data_key(0, 0, new_nonce()), b"torn")
    print_checkpoints(f"{url}/run", as_json=False)
    where, head, *lines = capsys.readouterr().out.splitlines()
    assert where == f"{url}/run"
    assert head.split()[:3] == ["state", "size", "ranks"]
    assert [line.split("step-")[1].split()[0] for line in lines] == ["9", "10", "11"]
    assert lines[0].startswith("committed")
    assert "2.00 KiB" in lines[0]
    assert lines[2].startswith("not committed")


def test_ls_fits_a_terminal_of_80_columns(tmp_path):
    url = f"file://{tmp_path}/a-bucket/a-model/a-run"
    for step in (1000, 2000):
        save_step(f"{url}/step-{step}", step=step, note="words " * 20, metrics={"loss": 1 / 3})
    where, *lines = on_terminal(80, "ls", url).splitlines()
    assert where == url
    assert all(len(line) <= 80 for line in lines)
    assert [line.split()[6] for line in lines[1:]] == ["step-1000", "step-2000"]
    assert all(line.endswith("...") and "loss 0.3333, note words" in line for line in lines[1:])
    narrow = on_terminal(50, "ls", url).splitlines()
    assert "metrics" not in narrow[1]
    assert narrow[2].endswith("step-1000")


def test_ls_shows_a_checkpoint_and_those_below_it(tmp_path, capsys):
    url = f"file://{tmp_path}/run"
    for where in (f"{url}/step-1", url):
        save_step(where)
    print_checkpoints(url, as_json=False)
    _, _, *lines = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in lines] == ["run", "step-1"]
    print_checkpoints(url, as_json=True)
    entries = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [entry["url"] for entry in entries] == [url, f"{url}/step-1"]


def test_ls_of_a_checkpoint_needs_no_right_to_list(tmp_path, capsys, monkeypatch):
    url = f"file://{tmp_path}/run"
    save_step(url)

    def refuse(*_: object) -> None:
        raise errors.PermissionDeniedError("no")

    monkeypatch.setattr("dcp_objstore.stores.local.LocalStore.list", refuse)
    print_checkpoints(url, as_json=True)
    shown = capsys.readouterr()
    assert json.loads(shown.out)["url"] == url
    assert "not listed" in shown.err


def test_ls_shows_pins_and_as_json_the_markers_figures(tmp_path, capsys):
    url = f"file://{tmp_path}/step-1"
    save_step(url, loss=0.5)
    pin(open_store(url), "paper")
    print_checkpoints(url, as_json=False)
    assert "; ".join(("pinned: paper", "loss 0.5")) in capsys.readouterr().out
    print_checkpoints(url, as_json=True)
    entry, step = json.loads(capsys.readouterr().out), dos.list_checkpoints(url).checkpoints[0]
    assert entry == {
        "url": url,
        "state": "committed",
        "bytes": 2048,
        "tensors": 3,
        "objects": 1,
        "world_size": 4,
        "created": step.created_at.isoformat(timespec="seconds"),
        "commit_id": step.commit_id,
        "claim": 0,
        "pins": ["paper"],
        "user_metadata": {"loss": 0.5},
    }


def test_ls_says_what_else_a_step_has(tmp_path):
    url = f"file://{tmp_path}/run"
    save_step(f"{url}/step-1", step=1, metrics={"loss": 0.123456, "good": True}, note="a", n=[2])
    save_step(f"{url}/step-2", metrics="none")
    first, second = run_here("ls", url).stdout.splitlines()[2:]
    assert first.endswith("step-1  loss 0.1235, good true, note a, n [2]")
    assert second.endswith("step-2  metrics none")


def test_ls_of_what_is_not_there_or_damaged_says_so(tmp_path):
    nothing = run_here("ls", f"file://{tmp_path}/nothing")
    assert nothing.returncode == 2
    assert "CheckpointNotFoundError" in nothing.stderr
    assert run_here("ls", "s4://bucket/x").returncode == 2
    open_store(f"file://{tmp_path}/step-1").put(MARKER_KEY, b"{}")
    damaged = run_here("ls", f"file://{tmp_path}/step-1")
    assert damaged.returncode == 4
    assert "CheckpointCorruptError" in damaged.stderr
    for done in (nothing, damaged):
        assert len(done.stderr.splitlines()) == 1
        assert done.stdout == ""


def test_a_url_at_which_nothing_is_gets_the_urls_most_like_it(tmp_path, monkeypatch):
    save_step(f"file://{tmp_path}/first-run/step-10")
    for wrong, right in (
        ("frist-run", "first-run"),
        ("frist-run/step-10", "first-run/step-10"),
        ("first-run/step-1O", "first-run/step-10"),
    ):
        for command in ("ls", "inspect"):
            said = run_here(command, f"file://{tmp_path}/{wrong}").stderr
            assert f"did you mean 'file://{tmp_path}/{right}'?" in said
    save_step(f"file://{tmp_path}/first-run-2/step-10")
    (tmp_path / "a-file").write_bytes(b"")
    assert "did you mean" not in run_here("inspect", f"file://{tmp_path}/a-filf").stderr
    said = run_here("inspect", f"file://{tmp_path}/first-rum").stderr
    assert f"'file://{tmp_path}/first-run' or 'file://{tmp_path}/first-run-2'?" in said
    for name in ("other", "first-run"):  # a run, which is no checkpoint
        assert "did you mean" not in run_here("inspect", f"file://{tmp_path}/{name}").stderr

    def refuse(*_: object) -> None:
        raise errors.PermissionDeniedError("403")

    monkeypatch.setattr(LocalStore, "_list", refuse)
    done = run_here("inspect", f"file://{tmp_path}/frist-run")
    assert done.returncode == 2
    assert "CheckpointNotFoundError" in done.stderr


def test_ls_goes_on_after_a_damaged_step_and_says_so(tmp_path):
    url = f"file://{tmp_path}/run"
    save_step(f"{url}/step-1")
    open_store(f"{url}/step-2").put(MARKER_KEY, b"{}")
    open_store(f"{url}/step-3").put(MARKER_KEY, b'{"format":99}')
    save_step(f"{url}/step-4")
    done = run_here("ls", url)
    assert done.returncode == 4
    assert [line.split()[0] for line in done.stdout.splitlines()[2:]] == [
        "committed",
        "damaged",
        "unsupported",
        "committed",
    ]
    assert len(done.stderr.splitlines()) == 1
    assert "step-2" in done.stderr
    entries = [json.loads(line) for line in run_here("ls", url, "--json").stdout.splitlines()]
    assert [entry["state"] for entry in entries][1:3] == ["damaged", "unsupported"]
    assert "error" not in entries[0]
    assert "marker is damaged" in entries[1]["error"]


def test_ls_counts_deleted_steps_and_says_what_removes_them(tmp_path, capsys):
    url = f"file://{tmp_path}/run"
    for step in (1, 2, 3):
        save_step(f"{url}/step-{step}", step=step)
    for step in (1, 2):
        delete(f"{url}/step-{step}")
    print_checkpoints(url)
    _, _, *steps, deleted = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in steps] == ["step-3"]
    assert "2 deleted checkpoints" in deleted and f"sweep '{url}'" in deleted


@pytest.mark.parametrize(("out", "err"), [*itertools.product([True, False], repeat=2)])
def test_import_prints_its_result_unless_a_terminal_shows_it_already(
    tmp_path, monkeypatch, *, out, err
):
    """The bar of the save leaves a line there, if both streams are on it."""
    torch.save({"w": torch.ones(3)}, tmp_path / "w.pt")
    streams = {
        name: SimpleNamespace(isatty=lambda there=there: there)
        for name, there in (("stdout", out), ("stderr", err))
    }
    monkeypatch.setattr(convert, "sys", SimpleNamespace(**streams))
    done = run_here("import", f"{tmp_path}/w.pt", f"file://{tmp_path}/a")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"saved file://{tmp_path}/a") == (0 if out and err else 1)


def test_each_command_says_what_it_makes_of_weights(tmp_path):
    tensors = {"a.w": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2)}
    url, new = saved_by("safetensors", tmp_path / "hub", tensors), f"{tmp_path.as_uri()}/new"
    before = (tmp_path / "hub" / "model.safetensors").read_bytes()
    shown = run_here("inspect", url)
    assert (shown.returncode, shown.stdout.count("unverified")) == (0, 1)
    assert json.loads(run_here("inspect", url, "--json").stdout)["unverified"] is True
    for place in (url, f"{url}/model.safetensors"):
        for command in (("verify", place), ("cp", place, new)):
            refused = run_here(*command)
            assert (refused.returncode, "without digests" in refused.stderr) == (2, True)
    for command in (("ls", url), ("rm", url), ("pin", url, "paper"), ("unpin", url, "paper")):
        refused = run_here(*command)
        assert refused.returncode == 2
        assert "a folder of safetensors" in refused.stderr
        assert "dcp-objstore import" in refused.stderr
    assert run_here("import", url, new).returncode == 0
    assert run_here("diff", url, new).returncode == 0
    assert run_here("export", url, str(tmp_path / "out.safetensors")).returncode == 0
    found = safetensors.torch.load_file(tmp_path / "out.safetensors")
    assert all(torch.equal(found[key], value) for key, value in tensors.items())
    assert [path.read_bytes() for path in (tmp_path / "hub").iterdir()] == [before]
