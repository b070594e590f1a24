"""The public names and where each is defined: the only list of both."""

from . import errors as errors
from .checkpoint.claim import RunClaim as RunClaim
from .checkpoint.delete import DeleteReport as DeleteReport
from .checkpoint.repair import RepairReport as RepairReport
from .checkpoint.sweep import CheckpointSweep as CheckpointSweep
from .config import TransferConfig as TransferConfig
from .convert.copy import CopyReport as CopyReport, copy_checkpoint as copy_checkpoint
from .convert.export import ExportReport as ExportReport, export_checkpoint as export_checkpoint
from .convert.import_checkpoint import import_checkpoint as import_checkpoint
from .errors import (
    AbsentKeyError as AbsentKeyError,
    BucketNotFoundError as BucketNotFoundError,
    CheckpointCorruptError as CheckpointCorruptError,
    CheckpointExistsError as CheckpointExistsError,
    CheckpointGoneError as CheckpointGoneError,
    CheckpointNotFoundError as CheckpointNotFoundError,
    CheckpointPinnedError as CheckpointPinnedError,
    CommitLostError as CommitLostError,
    CommitUnknownError as CommitUnknownError,
    ConfigError as ConfigError,
    CorruptDataError as CorruptDataError,
    CredentialsError as CredentialsError,
    DcpObjstoreError as DcpObjstoreError,
    ForkedProcessError as ForkedProcessError,
    InputError as InputError,
    InvalidUrlError as InvalidUrlError,
    LostRaceError as LostRaceError,
    ObjectNotFoundError as ObjectNotFoundError,
    PermissionDeniedError as PermissionDeniedError,
    PreconditionFailedError as PreconditionFailedError,
    RankFailedError as RankFailedError,
    RetryableError as RetryableError,
    SaveInProgressError as SaveInProgressError,
    StateMismatchError as StateMismatchError,
    StoreUnavailableError as StoreUnavailableError,
    SupersededError as SupersededError,
    TransferStalledError as TransferStalledError,
    UnsupportedError as UnsupportedError,
    UntrustedPickleError as UntrustedPickleError,
)
from .inspect.checkpoint import (
    Checkpoint as Checkpoint,
    TensorEntry as TensorEntry,
    ValueEntry as ValueEntry,
    load_state_dict as load_state_dict,
    open as open,  # noqa: A004 - `dos.open`, as gzip.open
)
from .inspect.diff import (
    DiffReport as DiffReport,
    TensorDifference as TensorDifference,
    ValueDifference as ValueDifference,
    diff as diff,
)
from .inspect.modules import Module as Module
from .inspect.rank_plan import RankPlan as RankPlan
from .inspect.stats import TensorStats as TensorStats
from .inspect.verify import Damage as Damage, VerifyReport as VerifyReport
from .inspect.verify_run import verify_run as verify_run
from .integrations.install import (
    Installation as Installation,
    install as install,
    uninstall as uninstall,
)
from .measure.bench import bench as bench
from .measure.report import (
    BenchReport as BenchReport,
    Spread as Spread,
    Throughput as Throughput,
)
from .observe import events as events
from .observe.report import LoadReport as LoadReport, SaveReport as SaveReport
from .observe.trace import merge_traces as merge_traces
from .read.api import load as load
from .read.reader import ObjectStoreReader as ObjectStoreReader
from .run.claim_run import claim_run as claim_run
from .run.gc import SweepReport as SweepReport, sweep as sweep
from .run.listing import (
    Leftovers as Leftovers,
    ListedCheckpoint as ListedCheckpoint,
    Listing as Listing,
    list_checkpoints as list_checkpoints,
    steps as steps,
)
from .run.manager import CheckpointManager as CheckpointManager
from .run.resume import ResumeReport as ResumeReport, SkippedStep as SkippedStep
from .run.retention import (
    KeepAll as KeepAll,
    KeepAny as KeepAny,
    KeepBest as KeepBest,
    KeepEvery as KeepEvery,
    KeepLatest as KeepLatest,
    RetentionPolicy as RetentionPolicy,
    StepFacts as StepFacts,
)
from .run.upkeep import delete as delete, pin as pin, repair as repair, unpin as unpin
from .state.per_rank import PerRank as PerRank
from .state.random_state import RandomState as RandomState
from .write.api import save as save
from .write.async_save import AsyncSaveHandle as AsyncSaveHandle, async_save as async_save
from .write.writer import ObjectStoreWriter as ObjectStoreWriter

__version__: str
