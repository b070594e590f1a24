"""The public names and where each is defined: the only list of both."""

from . import errors as errors, measure as measure, observe as observe, reports as reports
from .checkpoint.claim import RunClaim as RunClaim
from .config import Local as Local, TransferConfig as TransferConfig
from .convert.average import average as average
from .convert.copy import copy_checkpoint as copy_checkpoint
from .convert.export import export_checkpoint as export_checkpoint
from .convert.import_checkpoint import import_checkpoint as import_checkpoint
from .inspect.checkpoint import (
    Checkpoint as Checkpoint,
    open as open,  # noqa: A004 - `dos.open`, as gzip.open
    read_state_dict as read_state_dict,
)
from .inspect.diff import diff as diff
from .inspect.verify import verify_run as verify_run
from .integrations.install import (
    Installation as Installation,
    install as install,
    uninstall as uninstall,
)
from .read.api import load as load
from .read.reader import ObjectStoreReader as ObjectStoreReader
from .run.claim_run import claim_run as claim_run
from .run.follow import follow as follow
from .run.listing import list_checkpoints as list_checkpoints, steps as steps
from .run.manager import CheckpointManager as CheckpointManager
from .run.preemption import Preemption as Preemption
from .run.retention import (
    KeepBest as KeepBest,
    KeepEvery as KeepEvery,
    KeepLatest as KeepLatest,
    RetentionPolicy as RetentionPolicy,
    StepFacts as StepFacts,
)
from .run.sweep import sweep as sweep
from .run.upkeep import delete as delete, pin as pin, repair as repair, unpin as unpin
from .state.per_rank import PerRank as PerRank, RandomState as RandomState
from .state.trainable import trainable as trainable
from .write.api import save as save
from .write.async_save import AsyncSaveHandle as AsyncSaveHandle, async_save as async_save
from .write.writer import ObjectStoreWriter as ObjectStoreWriter

__version__: str
