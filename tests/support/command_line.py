"""`dcp-objstore` and `python -m benchmarks` as a user runs them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import shlex
import struct
import subprocess
import sys
import termios
from collections.abc import Mapping
from contextvars import copy_context
from functools import partial
from pathlib import Path

from typer.testing import CliRunner

from dcp_objstore.cli.app import app


def run_here(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run it in an environment without credentials, but for what is given.

    It has no process of its own: to start one takes a second or three.
    """
    plain = dict.fromkeys(name for name in os.environ if name.startswith("AWS_"))
    invoke = partial(CliRunner().invoke, app, arguments, env={**plain, **environment})
    done = copy_context().run(invoke)  # the options chosen are kept in a context variable
    return subprocess.CompletedProcess(arguments, done.exit_code, done.stdout, done.stderr)


def printed_by_benchmark(*arguments: str, status: int = 0) -> str:
    """Run a benchmark, which has to end with this status; return what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", *arguments],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status, done.stderr
    return done.stdout


def environment(options: Mapping[str, object]) -> dict[str, str]:
    """Return the variables that name a server and its credentials; without options, our own."""
    if not options:
        return {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    return {
        "AWS_ACCESS_KEY_ID": str(options["key"]),
        "AWS_SECRET_ACCESS_KEY": str(options["secret"]),
        "AWS_ENDPOINT_URL": str(options["endpoint_url"]),
    }


def examples() -> dict[str, list[str]]:
    """Return the words of the example that ends each command's help."""
    from typer.main import get_command

    from dcp_objstore.cli.app import app

    commands = dict(get_command(app).commands)  # type: ignore[attr-defined]
    for group in [name for name, command in commands.items() if hasattr(command, "commands")]:
        inner = commands.pop(group).commands
        commands |= {f"{group} {name}": command for name, command in inner.items()}
    return {
        name: shlex.split(command.epilog.partition("Example: ")[2])
        for name, command in commands.items()
        if not command.hidden
    }


def on_terminal(columns: int, *arguments: str, status: int | None = 0, **environment: str) -> str:
    """Run a command on a terminal of that width, and return all that it shows there.

    Args:
        columns: the width.
        arguments: the command.
        status: the exit status that it must have; None for any.
        environment: more variables.
    """
    controller, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    plain = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    shown = b""
    with subprocess.Popen(
        [sys.executable, "-m", "dcp_objstore", *arguments],
        stdout=terminal,
        stderr=terminal,
        env={**plain, "TERM": "xterm-256color", **environment},
    ) as process:
        os.close(terminal)
        with contextlib.suppress(OSError):  # what Linux says when the other end is closed
            while piece := os.read(controller, 4096):
                shown += piece
    os.close(controller)
    assert status in (None, process.returncode), shown.decode()
    return shown.decode().replace("\r\n", "\n")
