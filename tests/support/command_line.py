"""`dcp-objstore` and `python -m benchmarks` as a user runs them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from typer.testing import CliRunner

from dcp_objstore.cli.app import app


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run it in an environment without credentials, but for what is given."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    return subprocess.run(
        [sys.executable, "-m", "dcp_objstore", *arguments],
        capture_output=True,
        text=True,
        env={**plain, **environment},
        timeout=120,
        check=False,
    )


def run_here(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """As `run`, without a process of its own: to start one takes a second or three."""
    plain = dict.fromkeys(name for name in os.environ if name.startswith("AWS_"))
    done = CliRunner().invoke(app, arguments, env={**plain, **environment})
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
