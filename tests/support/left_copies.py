"""Copies that a job has left on a node: it has ended, so no process uses them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

STATE_BYTES = 4 << 20
_JOB = """
import sys, torch, dcp_objstore as dos
node, size_bytes, *steps = sys.argv[1:]
for number, url in enumerate(steps):
    state = {"w": torch.full((int(size_bytes) // 4,), float(number))}
    dos.save(state, url, local=node, progress=False)
"""


def leave_copies(node: Path, *step_urls: str) -> None:
    """Run a job that saves these steps, with copies on the node."""
    node.mkdir(exist_ok=True)
    subprocess.run([sys.executable, "-c", _JOB, node, str(STATE_BYTES), *step_urls], check=True)


def lose_objects(run: Path) -> None:
    """Remove all data objects of a run: now only copies have the bytes."""
    objects = [*run.glob("*/*.distcp")]
    assert objects
    for path in objects:
        path.unlink()
