"""`dcp-objstore ls`: what is at a URL or below it, and whether it is a checkpoint."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from dcp_objstore.checkpoint.commit import read_marker
from dcp_objstore.checkpoint.listing import explain_absence
from dcp_objstore.checkpoint.names import MARKER_KEY, parse_data_key
from dcp_objstore.errors import CheckpointNotFoundError, PermissionDeniedError
from dcp_objstore.stores import ObjectStore, StoreSpec

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
# With less room than this in a terminal's line, user metadata is left out.
_LEAST_METADATA_COLUMNS = 16


def print_checkpoints(url: str, *, as_json: bool) -> None:
    """Print one line for each checkpoint and each save that was never committed.

    A checkpoint at the URL itself does not hide those below it. The table names them relative to
    the URL; on a terminal, user metadata is cut to what fits a line, or left out.

    Args:
        url: of a checkpoint, or a prefix above some.
        as_json: one JSON object per line instead of a table.

    Raises:
        CheckpointNotFoundError: there is neither.
        DcpObjstoreError: as the store or a damaged marker says.
    """
    spec = StoreSpec(url)
    store = spec.open()
    entry = _describe(store)
    entries = [entry] if entry is not None else []
    try:
        entries += _below(spec, store, but_itself=entry is not None)
    except PermissionDeniedError as error:
        if entry is None:
            raise
        print(f"dcp-objstore: what lies below is not shown: {error}", file=sys.stderr)
    if not entries:
        raise CheckpointNotFoundError(explain_absence(store), url=store.url)
    if as_json:
        for one in entries:
            print(json.dumps(one))
    else:
        _print_table(store.url, entries)


def _below(spec: StoreSpec, store: ObjectStore, *, but_itself: bool) -> list[dict[str, Any]]:
    """All checkpoints below, and prefixes with data objects but no marker, in natural order.

    Args:
        spec: of the URL.
        store: at the URL.
        but_itself: leave out what is at the URL itself.
    """
    sizes: dict[str, int] = {}
    marked: set[str] = set()
    for meta in store.list():
        prefix, _, name = meta.key.rpartition("/")
        if name == MARKER_KEY:
            marked.add(prefix)
        elif parse_data_key(name) is not None:
            sizes[prefix] = sizes.get(prefix, 0) + meta.size_bytes
    entries = []
    for prefix in sorted(marked | sizes.keys(), key=_natural):
        if but_itself and not prefix:
            continue
        url = f"{spec.url}/{prefix}" if prefix else spec.url
        entry = _describe(spec.at(url).open()) if prefix in marked else None
        entries.append(entry or _uncommitted(url, sizes.get(prefix, 0)))
    return entries


def _describe(store: ObjectStore) -> dict[str, Any] | None:
    found = read_marker(store)
    if found is None:
        return None
    marker = found[0]
    return {
        "url": store.url,
        "state": marker.state,
        "bytes": marker.counts.total_bytes,
        "tensors": marker.counts.tensors,
        "objects": marker.counts.objects,
        "world_size": marker.world_size,
        "created": marker.created_at.isoformat(timespec="seconds"),
        "commit_id": marker.commit_id,
        "user_metadata": marker.user_metadata,
    }


def _uncommitted(url: str, size_bytes: int) -> dict[str, Any]:
    return {"url": url, "state": "not committed", "bytes": size_bytes}


def _print_table(root: str, entries: Sequence[dict[str, Any]]) -> None:
    """The URL on a line of its own, then a table that names what is there relative to it."""
    lines = [("state", "size", "ranks", "created (UTC)", "name", "user metadata")]
    for entry in entries:
        metadata = entry.get("user_metadata")
        created = entry.get("created")
        lines.append(
            (
                entry["state"],
                _readable(entry["bytes"]),
                str(entry.get("world_size", "-")),
                datetime.fromisoformat(created).strftime("%Y-%m-%d %H:%M") if created else "-",
                entry["url"].removeprefix(root).lstrip("/") or ".",
                json.dumps(metadata) if metadata else "",
            )
        )
    widths = [max(len(line[at]) for line in lines) for at in range(len(lines[0]))]
    if sys.stdout.isatty():
        room = shutil.get_terminal_size().columns - sum(widths[:-1]) - 2 * (len(widths) - 1)
        widths[-1] = min(widths[-1], room if room >= _LEAST_METADATA_COLUMNS else 0)
    print(root)
    for line in lines:
        cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
        for number in (1, 2):  # figures
            cells[number] = line[number].rjust(widths[number])
        cells[-1] = _cut(line[-1], widths[-1])
        print("  ".join(cells).rstrip())


def _cut(text: str, columns: int) -> str:
    return text if len(text) <= columns else f"{text[: columns - 3]}..." if columns else ""


def _readable(size_bytes: int) -> str:
    size, unit = float(size_bytes), 0
    while size >= 1024 and unit < len(_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:.1f} {_UNITS[unit]}" if unit else f"{size_bytes} B"


def _natural(text: str) -> list[tuple[int, int, str]]:
    """A sort key under which step-9 comes before step-10."""
    return [
        (0, int(part), "") if part.isdigit() else (1, 0, part)
        for part in re.split(r"(\d+)", text)
        if part
    ]
