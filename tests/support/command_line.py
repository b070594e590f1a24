"""`dcp-objstore` as a user runs it."""

from __future__ import annotations

import os
import subprocess
import sys


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run it in an environment without credentials, but for what is given."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    return subprocess.run(
        [sys.executable, "-m", "dcp_objstore.cli", *arguments],
        capture_output=True,
        text=True,
        env={**plain, **environment},
        timeout=120,
        check=False,
    )
