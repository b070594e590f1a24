"""Check whether a store is fit for checkpoints, and a folder for copies; say what to do if not."""

from __future__ import annotations

from dcp_objstore.doctor.checks import Finding, Status
from dcp_objstore.doctor.folder import check_folder
from dcp_objstore.doctor.runner import check_up

__all__ = ["Finding", "Status", "check_folder", "check_up"]
