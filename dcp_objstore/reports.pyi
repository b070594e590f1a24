"""The names of `dcp_objstore.reports` and where each is defined."""

from .checkpoint.delete import DeleteReport as DeleteReport
from .checkpoint.repair import RepairReport as RepairReport
from .checkpoint.sweep import CheckpointSweep as CheckpointSweep
from .convert.copy import CopyReport as CopyReport
from .convert.export import ExportReport as ExportReport
from .inspect.checkpoint import (
    Module as Module,
    TensorEntry as TensorEntry,
    ValueEntry as ValueEntry,
)
from .inspect.diff import (
    DiffReport as DiffReport,
    TensorDifference as TensorDifference,
    ValueDifference as ValueDifference,
)
from .observe.report import (
    Damage as Damage,
    LoadReport as LoadReport,
    SaveReport as SaveReport,
    VerifyReport as VerifyReport,
)
from .run.listing import ListedCheckpoint as ListedCheckpoint, Listing as Listing
from .run.resume import ResumeReport as ResumeReport, SkippedStep as SkippedStep
from .run.sweep import SweepReport as SweepReport
