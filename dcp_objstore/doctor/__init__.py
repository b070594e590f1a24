"""Check whether a store is fit to hold checkpoints, and say what to do if it is not."""

from __future__ import annotations

from dcp_objstore.doctor.findings import Finding, Status
from dcp_objstore.doctor.runner import check_up

__all__ = ["Finding", "Status", "check_up"]
