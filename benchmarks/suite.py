"""`all`: saves and loads under every condition, into one file; what a stranger can run and send."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.conditions import Conditions
from benchmarks.peers import PEERS
from benchmarks.picture import draw
from benchmarks.prices import Prices
from benchmarks.rounds import compare
from benchmarks.settings import GIB, Settings
from benchmarks.table import Result, Table, number

_LIKE_S3 = Conditions(latency_ms=30.0, rate_mib_per_connection=60.0)
_NEAREST_TO_S3 = "like S3, HTTPS"
# What the sink can be; a bucket is as it is.
CONDITIONS = {
    "HTTP": Conditions(),
    "HTTPS": Conditions(tls=True),
    "like S3": _LIKE_S3,
    _NEAREST_TO_S3: replace(_LIKE_S3, tls=True),
}


def measure_all(
    target: str,
    rounds: int,
    peers: Sequence[str],
    settings: Settings,
    out: str,
    prices: Prices,
) -> tuple[Table, Result]:
    """Measure saves and loads one after the other; write the results to a file after each.

    Args:
        target: "sink" for all conditions; SeaweedFS or a bucket is measured as it is.
        rounds: of each peer and condition.
        peers: their names.
        settings: sizes.
        out: name of the file of results; the pictures stand beside it.
        prices: what the same requests cost in a bucket.
    """
    shown = "a bucket" if target.startswith("s3://") else target
    conditions = CONDITIONS if target == "sink" else {shown: Conditions()}
    began = time.monotonic()
    found: Result = {
        "command": "all",
        "began_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": _machine(),
        "versions": _versions(peers),
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
            for peer, problem in result["problems"].items():
                found["problems"][f"{peer}: {action}, {name}"] = problem
            found["seconds"] = time.monotonic() - began
            # The file is made to be sent: it does not name the bucket.
            Path(out).write_text(json.dumps(found, indent=1).replace(target, shown))
    pictures = draw(found, out)
    notes = [f"All figures: {out}. Pictures: {', '.join(pictures)}."]
    if target == "sink":
        tables.append(_bill(found, rounds, prices))
        Path(out).write_text(json.dumps(found, indent=1))
    return Table("", [], [], notes, tables), found


def _bill(found: Result, rounds: int, prices: Prices) -> Table:
    """What a bucket charges for the requests that were counted; it has one condition, not four."""
    save, load = (one for one in found["results"] if one["name"] == _NEAREST_TO_S3)
    rows: list[list[str | None]] = []
    total = 0.0
    for name in load["rounds"]:
        saved, loaded = (_usd(one["rounds"][name], prices) for one in (save, load))
        total += rounds * (2 * saved + loaded)  # each load needs a save before it
        each_tib = [number(1024 * usd / save["settings"]["gib"]) for usd in (saved, loaded)]
        rows.append([PEERS[name].label, *each_tib])
    found["usd_in_a_bucket"] = total
    title = f"US dollars for the requests of 1 TiB ({prices.name})"
    note = (
        f"The same with --url s3://bucket would send requests for ${total:.2f}. The machine, and"
        " transfer out of the bucket's region if it is elsewhere, come on top."
    )
    return Table(title, ["peer", "save", "load"], rows, [note])


def _usd(rounds: Sequence[dict[str, Any]], prices: Prices) -> float:
    """What one save or load costs: the mean of the rounds."""
    verbs: Counter[str] = Counter()
    for one in rounds:
        verbs.update(one["requests_by_verb"])
    return prices.usd_of(verbs) / len(rounds)


def _versions(peers: Sequence[str]) -> dict[str, str | None]:
    own = {name: metadata.version(name) for name in ("dcp-objstore", "torch", "obstore")}
    return own | {name: one for peer in peers for name, one in PEERS[peer].versions().items()}


def _machine() -> dict[str, Any]:
    """Describe the machine; it has no name here."""
    information = Path("/proc/cpuinfo")
    text = information.read_text() if information.exists() else ""
    models = {line.partition(":")[2].strip() for line in text.splitlines() if "model name" in line}
    return {
        "system": platform.platform(),
        "python": platform.python_version(),
        "processors": os.cpu_count(),
        "processor": ", ".join(sorted(models)) or platform.machine(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB, 1),
    }
