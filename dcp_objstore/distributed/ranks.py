"""This process's rank. Importing this does not import torch."""

from __future__ import annotations

import sys
from typing import Any


def current_rank() -> int | None:
    """Return the global rank, or None without a process group."""
    dist: Any = sys.modules.get("torch.distributed")  # None: not imported, so there is no group
    # A torch that was built without `distributed` has the module, but no such function.
    is_initialized = getattr(dist, "is_initialized", lambda: False)
    return dist.get_rank() if is_initialized() else None


def rank_and_world_size() -> tuple[int, int]:
    """Return the global rank and the number of ranks; (0, 1) without a process group."""
    rank = current_rank()
    return (0, 1) if rank is None else (rank, sys.modules["torch.distributed"].get_world_size())
