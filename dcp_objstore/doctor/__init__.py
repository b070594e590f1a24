"""Check whether a store is fit for checkpoints; say what to do if not."""

from __future__ import annotations

from dcp_objstore.doctor.checks import Finding, Status
from dcp_objstore.doctor.runner import check_up

__all__ = ["Finding", "Status", "check_up"]
