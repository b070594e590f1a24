"""Is a store fit to hold checkpoints, and what to do where it is not: checks with plain results."""

from __future__ import annotations

from dcp_objstore.doctor.findings import Finding, Status
from dcp_objstore.doctor.runner import check_up

__all__ = ["Finding", "Status", "check_up"]
