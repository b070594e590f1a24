"""`dcp-objstore` and `python -m benchmarks` as a user runs them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path


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
    """Return the variables that name a server and its credentials."""
    return {
        "AWS_ACCESS_KEY_ID": str(options["key"]),
        "AWS_SECRET_ACCESS_KEY": str(options["secret"]),
        "AWS_ENDPOINT_URL": str(options["endpoint_url"]),
    }
