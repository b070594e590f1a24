"""The help of each command is quick, narrow, and ends with an example that runs as it stands."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import safetensors.torch
import torch
from typer.testing import CliRunner

import dcp_objstore as dos
from dcp_objstore.cli.app import app
from dcp_objstore.stores import open_store
from tests.support.command_line import environment, examples
from tests.support.left_copies import leave_copies

COMMANDS = examples()
STATUSES = {"diff": 1}  # the steps differ
# What works without tensors, in an order in which it can run; and the other commands.
WITHOUT_TENSORS = (
    "ls {run}",
    "follow --until 2 {run}",
    "inspect {run}/step-1",
    "inspect {run}/step-1 model.* --json",
    "diff {run}/step-1 {run}/step-2 --keys model.*",
    "verify --deep {run}/step-1",
    "verify --quick --run {run}",
    "doctor {run}",
    "cp {run}/step-1 {run}/step-3",
    "cp --streamed {run}/step-1 {run}/step-4",
    "repair {run}/step-1",
    "pin {run}/step-1 paper",
    "unpin {run}/step-1 paper",
    "rm --yes --grace 24h {run}/step-1",
    "sweep --yes {run}",
    "local ls {node}",
    "local rm {node}",
    "inspect {run}/hub",
    "inspect {run}/hub/model.safetensors --json",
)
ON_A_SERVER = {"ls", "inspect", "doctor", "cp", "rm", "sweep"}
WITH_TENSORS = {"demo", "bench", "export", "import", "average"}
# Their own tests run them, because they start a server.
SERVING = {"demo", "serve"}
IMPORTS = """
import sys
from dcp_objstore.cli import main
assert "typer" not in sys.modules
for command in sys.argv[1:]:
    sys.argv = ["dcp-objstore", *command.split()]
    try:
        main()
    except SystemExit as ended:
        assert not ended.code or sys.argv[1] == "diff", (command, ended.code)
    is_help = command.endswith(("-h", "--help", "--version"))
    heavy = {"torch", "rich"} | ({"numpy", "msgspec", "tqdm", "statistics"} if is_help else set())
    heavy |= {"numpy"} if command.startswith("ls file:") else set()
    heavy |= {"boto3", "obstore"} if is_help or "file:" in command else set()
    assert not heavy & sys.modules.keys(), (command, heavy & sys.modules.keys())
"""


def test_the_examples_run(tmp_path, capsys):
    for step in (20, 40):
        state = {"model": {"embed": {"weight": torch.full((50, 4), 1.0 * step)}}, "step": step}
        dos.save(state, f"file://{tmp_path}/run/step-{step}", progress=False)
    leave_copies(tmp_path / "node", f"file://{tmp_path}/other/step-60")
    for name, (program, *words) in COMMANDS.items():
        assert (program, " ".join(words)[: len(name)]) == ("dcp-objstore", name)
        if name in SERVING:
            continue
        arguments = [word.replace("/tmp/", f"{tmp_path}/") for word in words]
        if status := STATUSES.get(name):
            with pytest.raises(SystemExit) as caught:
                app(arguments, standalone_mode=False)
            assert caught.value.code == status
        else:
            app(arguments, standalone_mode=False)
        assert capsys.readouterr().out


def test_each_help_fits_80_columns_and_ends_with_the_example():
    runner = CliRunner(env={"COLUMNS": "160", "TERMINAL_WIDTH": "160"})
    for name in ("", *COMMANDS):
        shown = runner.invoke(app, [*name.split(), "--help"] if name else ["--help"])
        assert shown.exit_code == 0
        lines = shown.output.rstrip().splitlines()
        assert max(map(len, lines)) <= 80, name
        assert "..." not in shown.output.partition("Commands:")[2], "a summary is cut off"
        example = shown.output[shown.output.rindex("Example: ") :].split(maxsplit=1)[1]
        assert shlex.split(example) == COMMANDS.get(name, ["dcp-objstore", "ls", "file:///tmp/run"])


def test_what_needs_no_tensor_imports_no_torch(tmp_path, bucket):
    named = {name for name in COMMANDS for words in WITHOUT_TENSORS if words.startswith(name)}
    assert named == COMMANDS.keys() - WITH_TENSORS - SERVING
    node = tmp_path / "node"
    leave_copies(node, f"file://{tmp_path}/other/step-1")
    commands = ["--version", "-h", *(f"{name} --help" for name in COMMANDS)]
    over_a_server = [words for words in WITHOUT_TENSORS if words.split()[0] in ON_A_SERVER]
    for url, options, given in (
        (f"file://{tmp_path}", {}, WITHOUT_TENSORS),
        (bucket.url, bucket.storage_options, over_a_server),
    ):
        for step in (1, 2):
            state = {"model": {"w": torch.full((3,), float(step))}, "step": step}
            at = f"{url}/step-{step}"
            dos.save(state, at, storage_options=options, stock_metadata=step > 1, progress=False)
        hub = {"w": torch.ones(3, dtype=torch.bfloat16)}
        open_store(f"{url}/hub", options).put("model.safetensors", safetensors.torch.save(hub))
        commands += [command.format(run=url, node=node) for command in given]
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS, *commands],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment(bucket.storage_options)},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(".metadata was written") == 1


SCRIPT = Path(sysconfig.get_path("scripts")) / "dcp-objstore"


@pytest.mark.parametrize("program", [[str(SCRIPT)], [sys.executable, "-m", "dcp_objstore"]])
def test_it_runs_as_a_script_and_as_a_module(program):
    if not Path(program[0]).exists():
        pytest.skip("the package is not installed, so there is no script")
    done = subprocess.run([*program, "--version"], capture_output=True, text=True, check=False)
    assert done.stdout == f"dcp-objstore {dos.__version__}\n"


def complete(shell: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Start it as the script does, under its own name."""
    code = "import sys; from dcp_objstore.cli import main; sys.argv[0] = 'dcp-objstore'; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *shell.split()],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1", **variables},
    )


@pytest.mark.parametrize(("typed", "offered"), [("ver", {"verify"}), ("verify --qu", {"--quick"})])
def test_what_the_shell_asks_for_is_offered(typed, offered):
    words = f"dcp-objstore {typed}"
    answer = complete(
        "",
        _DCP_OBJSTORE_COMPLETE="complete_bash",
        COMP_WORDS=words,
        COMP_CWORD=str(len(words.split()) - 1),
    )
    assert set(answer.stdout.split()) == offered, answer.stderr
