"""The public names and where each is defined: the only list of both."""

from . import errors as errors
from .checkpoint.claim import RunClaim as RunClaim
from .checkpoint.delete import DeleteReport as DeleteReport
from .checkpoint.repair import RepairReport as RepairReport
from .checkpoint.sweep import CheckpointSweep as CheckpointSweep
from .config import TransferConfig as TransferConfig
from .errors import (
    AbsentKeyError as AbsentKeyError,
)
from .errors import (
    BucketNotFoundError as BucketNotFoundError,
)
from .errors import (
    CheckpointCorruptError as CheckpointCorruptError,
)
from .errors import (
    CheckpointExistsError as CheckpointExistsError,
)
from .errors import (
    CheckpointGoneError as CheckpointGoneError,
)
from .errors import (
    CheckpointNotFoundError as CheckpointNotFoundError,
)
from .errors import (
    CheckpointPinnedError as CheckpointPinnedError,
)
from .errors import (
    CommitLostError as CommitLostError,
)
from .errors import (
    CommitUnknownError as CommitUnknownError,
)
from .errors import (
    ConfigError as ConfigError,
)
from .errors import (
    CorruptDataError as CorruptDataError,
)
from .errors import (
    CredentialsError as CredentialsError,
)
from .errors import (
    DcpObjstoreError as DcpObjstoreError,
)
from .errors import (
    ForkedProcessError as ForkedProcessError,
)
from .errors import (
    InputError as InputError,
)
from .errors import (
    InvalidUrlError as InvalidUrlError,
)
from .errors import (
    LostRaceError as LostRaceError,
)
from .errors import (
    ObjectNotFoundError as ObjectNotFoundError,
)
from .errors import (
    PermissionDeniedError as PermissionDeniedError,
)
from .errors import (
    PreconditionFailedError as PreconditionFailedError,
)
from .errors import (
    RankFailedError as RankFailedError,
)
from .errors import (
    RetryableError as RetryableError,
)
from .errors import (
    SaveInProgressError as SaveInProgressError,
)
from .errors import (
    StateMismatchError as StateMismatchError,
)
from .errors import (
    StoreUnavailableError as StoreUnavailableError,
)
from .errors import (
    SupersededError as SupersededError,
)
from .errors import (
    TransferStalledError as TransferStalledError,
)
from .errors import (
    UnsupportedError as UnsupportedError,
)
from .errors import (
    UntrustedPickleError as UntrustedPickleError,
)
from .inspect.checkpoint import (
    Checkpoint as Checkpoint,
)
from .inspect.checkpoint import TensorEntry as TensorEntry
from .inspect.checkpoint import ValueEntry as ValueEntry
from .inspect.checkpoint import (
    load_state_dict as load_state_dict,
)
from .inspect.checkpoint import (
    open as open,  # noqa: A004 - `dos.open`, as gzip.open
)
from .inspect.verify import Damage as Damage
from .inspect.verify import VerifyReport as VerifyReport
from .observe import events as events
from .observe.report import LoadReport as LoadReport
from .observe.report import SaveReport as SaveReport
from .observe.trace import merge_traces as merge_traces
from .read.api import load as load
from .read.reader import ObjectStoreReader as ObjectStoreReader
from .run.claim_run import claim_run as claim_run
from .run.gc import SweepReport as SweepReport
from .run.gc import sweep as sweep
from .run.manager import CheckpointManager as CheckpointManager
from .run.resume import ResumeReport as ResumeReport
from .run.resume import SkippedStep as SkippedStep
from .run.retention import (
    KeepAll as KeepAll,
)
from .run.retention import (
    KeepAny as KeepAny,
)
from .run.retention import (
    KeepBest as KeepBest,
)
from .run.retention import (
    KeepEvery as KeepEvery,
)
from .run.retention import (
    KeepLatest as KeepLatest,
)
from .run.retention import (
    RetentionPolicy as RetentionPolicy,
)
from .run.retention import (
    StepFacts as StepFacts,
)
from .run.steps import RunStep as RunStep
from .run.steps import steps as steps
from .run.upkeep import delete as delete
from .run.upkeep import pin as pin
from .run.upkeep import repair as repair
from .run.upkeep import unpin as unpin
from .state.per_rank import PerRank as PerRank
from .state.random_state import RandomState as RandomState
from .write.api import save as save
from .write.async_save import AsyncSaveHandle as AsyncSaveHandle
from .write.async_save import async_save as async_save
from .write.writer import ObjectStoreWriter as ObjectStoreWriter

__version__: str
