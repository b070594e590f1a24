"""Is a store fit to hold checkpoints, and what to do where it is not: checks with plain results."""

from __future__ import annotations

from dcp_objstore.doctor.findings import Finding, Status
from dcp_objstore.doctor.runner import check_up
from dcp_objstore.doctor.speed import Limits

__all__ = ["Finding", "Limits", "Status", "check_up"]
