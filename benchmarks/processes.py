"""Measurements run in fresh processes; this starts one and reads its result."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parent.parent


class ChildFailedError(Exception):
    """A measured process ended with an error; the message is the end of what it said."""


def run_module(module: str, job: str) -> Any:
    """Run `python -m module` with `job` on stdin; the JSON in its last line of stdout.

    Raises:
        ChildFailedError: it ended with an error.
    """
    return json.loads(run_python(["-m", module], job).splitlines()[-1])


def run_python(arguments: list[str], text: str = "") -> str:
    """Run this Python with arguments, from the folder that holds `benchmarks`; its stdout.

    Raises:
        ChildFailedError: it ended with an error.
    """
    child = subprocess.run(
        [sys.executable, *arguments],
        input=text,
        capture_output=True,
        text=True,
        cwd=_ROOT,
        check=False,
    )
    if child.returncode != 0:
        said = child.stderr.strip()[-2000:]
        raise ChildFailedError(f"{said}\nended with status {child.returncode}".lstrip())
    return child.stdout
