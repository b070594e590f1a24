"""dcp_objstore with each rank reading for itself."""

from __future__ import annotations

from benchmarks.peers.ours import Ours

PEER = Ours(read_once=False)
