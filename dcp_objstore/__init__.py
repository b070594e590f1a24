"""torch.distributed.checkpoint straight to S3, GCS and any other object store.

    import dcp_objstore as dos

    dcp.save(state, storage_writer=dos.ObjectStoreWriter("s3://bucket/run/step-1000"))
    dcp.load(state, storage_reader=dos.ObjectStoreReader("s3://bucket/run/step-1000"))

Names are resolved on first use, so importing this package does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from dcp_objstore import errors
from dcp_objstore.config import TransferConfig
from dcp_objstore.errors import *  # noqa: F403 - the whole error tree is public
from dcp_objstore.observe import events

if TYPE_CHECKING:
    from dcp_objstore.checkpoint.claim import RunEpoch
    from dcp_objstore.checkpoint.delete import DeleteReport
    from dcp_objstore.checkpoint.repair import RepairReport
    from dcp_objstore.checkpoint.sweep import CheckpointSweep
    from dcp_objstore.inspect.checkpoint import (
        Checkpoint,
        load_state_dict,
        open,  # noqa: A004 - `dos.open`, as gzip.open
    )
    from dcp_objstore.inspect.entries import TensorEntry, ValueEntry
    from dcp_objstore.inspect.verify import Damage, VerifyReport
    from dcp_objstore.observe.report import LoadReport, SaveReport
    from dcp_objstore.observe.trace import merge_traces
    from dcp_objstore.read.api import load
    from dcp_objstore.read.reader import ObjectStoreReader
    from dcp_objstore.run.claim_run import take_over
    from dcp_objstore.run.gc import SweepReport, sweep
    from dcp_objstore.run.manager import CheckpointManager
    from dcp_objstore.run.resume import ResumeReport, SkippedStep
    from dcp_objstore.run.retention import (
        KeepAll,
        KeepAny,
        KeepBest,
        KeepEvery,
        KeepLatest,
        RetentionPolicy,
        StepFacts,
    )
    from dcp_objstore.run.steps import RunStep, steps
    from dcp_objstore.run.upkeep import delete, pin, repair, unpin
    from dcp_objstore.state.per_rank import PerRank
    from dcp_objstore.state.random_state import RandomState
    from dcp_objstore.write.api import save
    from dcp_objstore.write.async_save import AsyncSaveHandle, async_save
    from dcp_objstore.write.writer import ObjectStoreWriter

_HOMES = {
    "PerRank": "dcp_objstore.state.per_rank",
    "RandomState": "dcp_objstore.state.random_state",
    "CheckpointManager": "dcp_objstore.run.manager",
    "ResumeReport": "dcp_objstore.run.resume",
    "SkippedStep": "dcp_objstore.run.resume",
    "KeepAll": "dcp_objstore.run.retention",
    "KeepAny": "dcp_objstore.run.retention",
    "KeepBest": "dcp_objstore.run.retention",
    "KeepEvery": "dcp_objstore.run.retention",
    "KeepLatest": "dcp_objstore.run.retention",
    "RetentionPolicy": "dcp_objstore.run.retention",
    "StepFacts": "dcp_objstore.run.retention",
    "ObjectStoreReader": "dcp_objstore.read.reader",
    "ObjectStoreWriter": "dcp_objstore.write.writer",
    "LoadReport": "dcp_objstore.observe.report",
    "SaveReport": "dcp_objstore.observe.report",
    "Damage": "dcp_objstore.inspect.verify",
    "VerifyReport": "dcp_objstore.inspect.verify",
    "Checkpoint": "dcp_objstore.inspect.checkpoint",
    "TensorEntry": "dcp_objstore.inspect.entries",
    "ValueEntry": "dcp_objstore.inspect.entries",
    "load_state_dict": "dcp_objstore.inspect.checkpoint",
    "merge_traces": "dcp_objstore.observe.trace",
    "open": "dcp_objstore.inspect.checkpoint",
    "load": "dcp_objstore.read.api",
    "save": "dcp_objstore.write.api",
    "AsyncSaveHandle": "dcp_objstore.write.async_save",
    "async_save": "dcp_objstore.write.async_save",
    "DeleteReport": "dcp_objstore.checkpoint.delete",
    "RepairReport": "dcp_objstore.checkpoint.repair",
    "RunEpoch": "dcp_objstore.checkpoint.claim",
    "RunStep": "dcp_objstore.run.steps",
    "steps": "dcp_objstore.run.steps",
    "take_over": "dcp_objstore.run.claim_run",
    "CheckpointSweep": "dcp_objstore.checkpoint.sweep",
    "SweepReport": "dcp_objstore.run.gc",
    "sweep": "dcp_objstore.run.gc",
    "delete": "dcp_objstore.run.upkeep",
    "pin": "dcp_objstore.run.upkeep",
    "repair": "dcp_objstore.run.upkeep",
    "unpin": "dcp_objstore.run.upkeep",
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
