"""`all`: saves and loads under every condition, into one file; what a stranger can run and send."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from benchmarks.conditions import Conditions
from benchmarks.picture import draw
from benchmarks.rounds import compare
from benchmarks.settings import Settings
from benchmarks.table import Result, Table

_LIKE_S3 = Conditions(latency_ms=30.0, rate_mib_per_connection=60.0)
# What the sink can be; a bucket is as it is.
CONDITIONS = {
    "HTTP": Conditions(),
    "HTTPS": Conditions(tls=True),
    "like S3": _LIKE_S3,
    "like S3, HTTPS": replace(_LIKE_S3, tls=True),
}
_VERSIONS = ("dcp-objstore", "torch", "obstore", "s3torchconnector", "s3fs", "multi-storage-client")


def measure_all(
    target: str, rounds: int, peers: Sequence[str], settings: Settings, out: str
) -> tuple[Table, Result]:
    """Measure saves and loads one after the other; write what was found after each.

    Args:
        target: "sink" for all conditions; SeaweedFS or a bucket is measured as it is.
        rounds: of each peer and condition.
        peers: their names.
        settings: sizes.
        out: name of the file of results; the pictures stand beside it.
    """
    conditions = CONDITIONS if target == "sink" else {target: Conditions()}
    found: Result = {
        "command": "all",
        "began_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {"system": platform.platform(), "processors": os.cpu_count()},
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in _VERSIONS},
        "results": [],
        "problems": {},
    }
    tables: list[Table] = []
    for name, of in conditions.items():
        for action in ("save", "load"):
            print(f"{action}, {name} ...", file=sys.stderr, flush=True)
            table, result = compare(action, peers, settings, target, rounds, of)
            tables.append(table)
            found["results"].append({"name": name, **result})
            found["problems"] |= result["problems"]
            Path(out).write_text(json.dumps(found, indent=1))
    pictures = draw(found, out)
    note = f"All figures: {out}. Pictures: {', '.join(pictures)}."
    return Table("", [], [], [note], tables), found


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
