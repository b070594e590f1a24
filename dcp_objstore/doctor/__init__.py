"""Check whether a store is fit for checkpoints, and a folder for copies; say what to do if not."""

from __future__ import annotations

from dcp_objstore.doctor.findings import Finding, Status
from dcp_objstore.doctor.folder import FolderChecks
from dcp_objstore.doctor.runner import check_up

__all__ = ["Finding", "FolderChecks", "Status", "check_up"]
