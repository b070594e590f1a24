"""Copies that a job has left on a node: it has ended, so no process uses them."""

from __future__ import annotations

from pathlib import Path

import torch

import dcp_objstore as dos
from dcp_objstore.local.folder import pid_namespace
from tests.support.node_copies import restart

STATE_BYTES = 4 << 20
_NO_PROCESS = (1 << 22) + 1  # more than a kernel counts to


def leave_copies(node: Path, *step_urls: str) -> None:
    """Save these steps with copies on the node, and use the node no longer."""
    node.mkdir(exist_ok=True)
    for number, url in enumerate(step_urls):
        state = {"w": torch.full((STATE_BYTES // 4,), float(number))}
        dos.save(state, url, local=str(node), progress=False)
    for mark in node.glob("*/*/=used *"):
        mark.rename(mark.with_name(f"=used {pid_namespace()} {_NO_PROCESS}"))
    restart()


def lose_objects(run: Path) -> None:
    """Remove all data objects of a run: now only copies have the bytes."""
    objects = [*run.glob("*/*.distcp")]
    assert objects
    for path in objects:
        path.unlink()
