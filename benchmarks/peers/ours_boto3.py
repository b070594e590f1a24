"""dcp_objstore with boto3 as its transport."""

from __future__ import annotations

from benchmarks.peers.ours import Ours

PEER = Ours(transport="boto3")
