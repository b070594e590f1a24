"""dcp_objstore with a callback that counts every event, and a trace."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.peers.ours import Ours

if TYPE_CHECKING:
    from dcp_objstore.observe.events import AnyEvent

_counts: Counter[str] = Counter()


def _count(event: AnyEvent) -> None:
    _counts[type(event).__name__] += 1


PEER = Ours(on_event=_count, trace=Path(tempfile.gettempdir()) / "dcp_objstore-benchmark.json")
