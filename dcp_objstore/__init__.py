"""torch.distributed.checkpoint straight to S3, GCS and any other object store.

    import dcp_objstore as dos

    dcp.save(state, storage_writer=dos.ObjectStoreWriter("s3://bucket/run/step-1000"))
    dcp.load(state, storage_reader=dos.ObjectStoreReader("s3://bucket/run/step-1000"))

Names are resolved on first use, so importing this package does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from dcp_objstore import errors, events
from dcp_objstore.config import TransferConfig
from dcp_objstore.errors import *  # noqa: F403 - the whole error tree is public

if TYPE_CHECKING:
    from dcp_objstore.checkpoint.deleting import DeleteReport
    from dcp_objstore.checkpoint.epoch import RunEpoch
    from dcp_objstore.checkpoint.repairing import RepairReport
    from dcp_objstore.checkpoint.retention import (
        KeepAll,
        KeepAny,
        KeepBest,
        KeepEvery,
        KeepLatest,
        RetentionPolicy,
        StepFacts,
    )
    from dcp_objstore.checkpoint.sweep import CheckpointSweep
    from dcp_objstore.dcp.api import load, save
    from dcp_objstore.dcp.async_api import AsyncSaveHandle, async_save
    from dcp_objstore.dcp.entries import TensorEntry, ValueEntry
    from dcp_objstore.dcp.opened import (
        Checkpoint,
        load_state_dict,
        open,  # noqa: A004 - `dos.open`, as gzip.open
    )
    from dcp_objstore.dcp.per_rank import PerRank
    from dcp_objstore.dcp.random_state import RandomState
    from dcp_objstore.dcp.reader import ObjectStoreReader
    from dcp_objstore.dcp.report import LoadReport, SaveReport
    from dcp_objstore.dcp.resuming import ResumeReport, SkippedStep
    from dcp_objstore.dcp.runs import RunStep, steps
    from dcp_objstore.dcp.sweeping import SweepReport, sweep
    from dcp_objstore.dcp.taking_over import take_over
    from dcp_objstore.dcp.upkeep import delete, pin, repair, unpin
    from dcp_objstore.dcp.verify import Damage, VerifyReport
    from dcp_objstore.dcp.writer import ObjectStoreWriter
    from dcp_objstore.manager import CheckpointManager
    from dcp_objstore.tracing import merge_traces

_HOMES = {
    "PerRank": "dcp_objstore.dcp.per_rank",
    "RandomState": "dcp_objstore.dcp.random_state",
    "CheckpointManager": "dcp_objstore.manager",
    "ResumeReport": "dcp_objstore.dcp.resuming",
    "SkippedStep": "dcp_objstore.dcp.resuming",
    "KeepAll": "dcp_objstore.checkpoint.retention",
    "KeepAny": "dcp_objstore.checkpoint.retention",
    "KeepBest": "dcp_objstore.checkpoint.retention",
    "KeepEvery": "dcp_objstore.checkpoint.retention",
    "KeepLatest": "dcp_objstore.checkpoint.retention",
    "RetentionPolicy": "dcp_objstore.checkpoint.retention",
    "StepFacts": "dcp_objstore.checkpoint.retention",
    "ObjectStoreReader": "dcp_objstore.dcp.reader",
    "ObjectStoreWriter": "dcp_objstore.dcp.writer",
    "LoadReport": "dcp_objstore.dcp.report",
    "SaveReport": "dcp_objstore.dcp.report",
    "Damage": "dcp_objstore.dcp.verify",
    "VerifyReport": "dcp_objstore.dcp.verify",
    "Checkpoint": "dcp_objstore.dcp.opened",
    "TensorEntry": "dcp_objstore.dcp.entries",
    "ValueEntry": "dcp_objstore.dcp.entries",
    "load_state_dict": "dcp_objstore.dcp.opened",
    "merge_traces": "dcp_objstore.tracing",
    "open": "dcp_objstore.dcp.opened",
    "load": "dcp_objstore.dcp.api",
    "save": "dcp_objstore.dcp.api",
    "AsyncSaveHandle": "dcp_objstore.dcp.async_api",
    "async_save": "dcp_objstore.dcp.async_api",
    "DeleteReport": "dcp_objstore.checkpoint.deleting",
    "RepairReport": "dcp_objstore.checkpoint.repairing",
    "RunEpoch": "dcp_objstore.checkpoint.epoch",
    "RunStep": "dcp_objstore.dcp.runs",
    "steps": "dcp_objstore.dcp.runs",
    "take_over": "dcp_objstore.dcp.taking_over",
    "CheckpointSweep": "dcp_objstore.checkpoint.sweep",
    "SweepReport": "dcp_objstore.dcp.sweeping",
    "sweep": "dcp_objstore.dcp.sweeping",
    "delete": "dcp_objstore.dcp.upkeep",
    "pin": "dcp_objstore.dcp.upkeep",
    "repair": "dcp_objstore.dcp.upkeep",
    "unpin": "dcp_objstore.dcp.upkeep",
}

__version__ = "0.1.0.dev0"

__all__ = [  # noqa: PLE0604 - errors.__all__ holds strings
    "AsyncSaveHandle",
    "Checkpoint",
    "CheckpointManager",
    "CheckpointSweep",
    "Damage",
    "DeleteReport",
    "KeepAll",
    "KeepAny",
    "KeepBest",
    "KeepEvery",
    "KeepLatest",
    "LoadReport",
    "ObjectStoreReader",
    "ObjectStoreWriter",
    "PerRank",
    "RandomState",
    "RepairReport",
    "ResumeReport",
    "RetentionPolicy",
    "RunEpoch",
    "RunStep",
    "SaveReport",
    "SkippedStep",
    "StepFacts",
    "SweepReport",
    "TensorEntry",
    "TransferConfig",
    "ValueEntry",
    "VerifyReport",
    "async_save",
    "delete",
    "events",
    "load",
    "load_state_dict",
    "merge_traces",
    "open",
    "pin",
    "repair",
    "save",
    "steps",
    "sweep",
    "take_over",
    "unpin",
    *errors.__all__,
]


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
