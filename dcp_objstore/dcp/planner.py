"""DCP's default planners, with clear errors that every rank agrees on.

A planner runs inside DCP's collectives, so what it raises is raised on all ranks. That is why a
failure to prepare the state on one rank is handed to the planner (`failed=`) instead of being
raised at once: the other ranks would wait in the collective for a rank that never comes.
"""

from __future__ import annotations

import difflib
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan

from dcp_objstore.errors import DcpObjstoreError, StateMismatchError

_SHOWN = 10


class AgreeingSavePlanner(DefaultSavePlanner):
    """Raises `failed` on every rank, if it is given on any."""

    def __init__(self, failed: DcpObjstoreError | None = None) -> None:
        super().__init__()
        self._failed = failed

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """See `DefaultSavePlanner`."""
        if self._failed is not None:
            raise self._failed
        super().set_up_planner(state_dict, storage_meta, is_coordinator)


class AgreeingLoadPlanner(DefaultLoadPlanner):
    """Names every key and shape that the checkpoint does not have, with the nearest names.

    Raises `failed` on every rank, if it is given on any.
    """

    def __init__(self, failed: DcpObjstoreError | None = None) -> None:
        super().__init__()
        self._failed = failed

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """See `DefaultLoadPlanner`."""
        if self._failed is not None:
            raise self._failed
        super().set_up_planner(state_dict, metadata, is_coordinator)

    def create_local_plan(self) -> LoadPlan:
        """See `DefaultLoadPlanner`.

        Raises:
            StateMismatchError: the state asks for what the checkpoint does not have.
        """
        assert self.metadata is not None
        problems = _mismatches(self.state_dict, self.metadata)
        if problems:
            raise StateMismatchError(_listed("the checkpoint does not fit the state", problems))
        try:
            # It also knows the key format of torch before 2.4, under which keys that look missing
            # may be there.
            return super().create_local_plan()
        except Exception:
            missing = _missing(self.state_dict, self.metadata)
            if missing:
                raise StateMismatchError(
                    _listed("the checkpoint does not have what the state asks for", missing)
                ) from None
            raise


def _mismatches(state_dict: dict[str, Any], metadata: Metadata) -> list[str]:
    """One line for each key whose value is of another shape, or tensor against value."""
    problems = []
    for key, value in state_dict.items():
        saved = metadata.state_dict_metadata.get(key)
        if saved is None:
            continue
        is_tensor = isinstance(value, torch.Tensor)
        if isinstance(saved, TensorStorageMetadata):
            if is_tensor and value.size() != saved.size:
                problems.append(
                    f"{key}: saved with shape {tuple(saved.size)}, the state has"
                    f" {tuple(value.size())}"
                )
            elif not is_tensor:
                problems.append(f"{key}: saved as a tensor, the state has a {type(value).__name__}")
        elif is_tensor:
            problems.append(f"{key}: saved as a plain value, the state has a tensor")
    return problems


def _missing(state_dict: dict[str, Any], metadata: Metadata) -> list[str]:
    """One line for each key that was not saved, with the nearest saved names."""
    saved = list(metadata.state_dict_metadata)
    lines: list[str] = []
    for key in state_dict:
        if key in metadata.state_dict_metadata:
            continue
        # Comparing names is slow for long lists; only lines that will be shown are worth it.
        near = difflib.get_close_matches(key, saved, n=3) if len(lines) < _SHOWN else []
        hint = f" (nearest: {', '.join(near)})" if near else ""
        lines.append(f"{key}: not in the checkpoint{hint}")
    return lines


def _listed(summary: str, lines: list[str]) -> str:
    more = f"\n  ... and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
    return f"{summary} in {len(lines)} keys:\n  " + "\n  ".join(lines[:_SHOWN]) + more
