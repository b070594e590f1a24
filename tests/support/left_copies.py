"""Copies that a job has left on a node: it has ended, so no process uses them."""

from __future__ import annotations

import gc
from pathlib import Path

import torch

import dcp_objstore as dos
from tests.support.node_copies import restart

STATE_BYTES = 4 << 20


def leave_copies(node: Path, *step_urls: str) -> None:
    """Save these steps with copies on the node, and use the node no longer."""
    node.mkdir(exist_ok=True)
    for number, url in enumerate(step_urls):
        state = {"w": torch.full((STATE_BYTES // 4,), float(number))}
        dos.save(state, url, local=str(node), progress=False)
    restart()
    gc.collect()  # closes the folder


def lose_objects(run: Path) -> None:
    """Remove all data objects of a run: now only copies have the bytes."""
    objects = [*run.glob("*/*.distcp")]
    assert objects
    for path in objects:
        path.unlink()
