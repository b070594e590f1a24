"""Traces for Perfetto and `chrome://tracing`: write events to a file.

The format is that of the "Trace Event Format" document of the Chromium project: complete events
(`ph` X) with `ts` and `dur` in microseconds, and metadata events (`ph` M) that name the rows.

The clock is that of `torch.profiler`. Kineto (`ChromeTraceBaseTime`) writes Unix time minus a base,
which keeps `ts` exact in a double: the last multiple of 7,889,238 s (three months) before the
process first profiled. The base is in the file as `baseTimeNanoseconds`. These traces have a base
in the same way, so two files are merged by adding the difference of their bases.
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dcp_objstore.errors import ConfigError
from dcp_objstore.observe import events
from dcp_objstore.observe.events import AnyEvent
from dcp_objstore.observe.report import logger

_BASE_STEP_NS = 7_889_238 * 10**9
# A number above the highest process id of Linux (2^22), so that the rows of each rank form their
# own group in a file with a torch.profiler trace, or with other ranks and hosts.
_FIRST_PID = 10_000_000
# The row of everything that happens once, and the first row of each kind of worker.
_MAIN_ROW = 0
_WORKER_ROWS = {
    events.PartUploaded: (100, "upload"),
    events.RangeRead: (1_000, "read"),
    events.Hashed: (2_000, "hash"),
}
_NAMES: Mapping[type[events.Event], str] = {
    events.Staged: "stage",
    events.Opened: "open",
    events.Planned: "plan {0.operation}",
    events.Hashed: "hash",
    events.NotCopied: "not copied",
    events.LocalUnused: "local not used",
    events.PartCopied: "copied",
    events.PartUploaded: "part {0.part}",
    events.ObjectUploaded: "upload",
    events.RangeRead: "range",
    events.Retried: "{0.what} retried",
    events.NoAnswer: "no answer",
    events.Committed: "commit",
    events.Saved: "save",
    events.Loaded: "load",
    events.Verified: "verify",
    events.Failed: "{0.operation} failed: {0.error}",
}
_COMMON_FIELDS = frozenset(field.name for field in dataclasses.fields(events.Event))


def base_ns(unix_ns: int) -> int:
    """Return the base that Kineto subtracts from times around this one."""
    return unix_ns // _BASE_STEP_NS * _BASE_STEP_NS


def check_trace(trace: object) -> str | None:
    """Check the user's `trace` setting and return it as text, or None if there is none.

    Raises:
        ConfigError: it is not the name of a local file, or has unknown fields in braces.
    """
    if trace is None:
        return None
    if not isinstance(trace, (str, os.PathLike)) or "://" in str(trace) or not str(trace):
        raise ConfigError(f"trace must name a local file, such as 'save.json', got {trace!r}")
    text = os.fspath(trace)
    try:
        text.format(rank=0, name="")
    except (KeyError, IndexError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"trace={text!r} has an unknown field: only {{rank}} and {{name}} are known"
        ) from error
    return text


def trace_path(pattern: str, url: str, rank: int, world_size: int) -> Path:
    """Return the path of one rank's trace.

    The pattern may hold `{rank}` and `{name}`, the last element of the URL. If there are several
    ranks and no `{rank}`, "save.json" becomes "save.rank3.json".
    """
    path = Path(pattern.format(rank=rank, name=url.rstrip("/").rpartition("/")[2]))
    if world_size > 1 and "{rank}" not in pattern:
        path = path.with_name(f"{path.stem}.rank{rank}{path.suffix}")
    return path


class TraceFile:
    """A listener that writes the events to a file, and rewrites the file when there are more.

    Args:
        path: the file. It is replaced as a whole; missing folders are created.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._events: list[AnyEvent] = []
        self._flushed_count = 0

    def take(self, event: AnyEvent) -> None:
        """Keep the event."""
        self._events.append(event)

    def flush(self) -> None:
        """Write the file if there are new events. Log a failure: it must not fail the save."""
        events = list(self._events)
        if len(events) == self._flushed_count:
            return
        self._flushed_count = len(events)
        try:
            entries, base = trace_events(events)
            document = {
                "schemaVersion": 1,
                "displayTimeUnit": "ms",
                "baseTimeNanoseconds": base,
                "traceEvents": entries,
            }
            _write(self._path, document)
        except OSError as error:
            logger.warning("the trace %s could not be written: %s", self._path, error)


def trace_events(events: Sequence[AnyEvent]) -> tuple[list[dict[str, Any]], int]:
    """Convert events, at least one. A viewer shows a group of rows for each rank.

    Each worker of a rank has a row, and everything else of the rank is on one row.

    Returns:
        The trace events, and the base that was subtracted from their times.
    """
    entries: list[dict[str, Any]] = []
    rows: dict[tuple[int, int], str] = {}  # the labels, by rank and number of the row
    base = base_ns(min(event.start_ns for event in events))
    for event in events:
        row, label = _row(event)
        rows[event.rank, row] = label
        entries.append(
            {
                "ph": "X",
                "cat": "dcp_objstore",
                "name": _NAMES[type(event)].format(event),
                "pid": _FIRST_PID + event.rank,
                "tid": row,
                "ts": (event.start_ns - base) / 1000,
                "dur": event.seconds * 1e6,
                "args": _arguments(event),
            }
        )
    return [*_metadata(rows), *entries], base


def _row(event: AnyEvent) -> tuple[int, str]:
    """Return the number and the label of the row on which an event is drawn."""
    if isinstance(event, (events.PartUploaded, events.RangeRead, events.Hashed)):
        first, label = _WORKER_ROWS[type(event)]
        return first + event.worker, f"{label} {event.worker}"
    return _MAIN_ROW, "checkpoint"


def _arguments(event: AnyEvent) -> dict[str, Any]:
    """Return what a viewer shows of an event: its URL, its own fields, and those of its report."""
    fields = dataclasses.asdict(event)
    fields |= fields.pop("report", {})
    shown = fields.keys() - _COMMON_FIELDS | {"url"}
    return {name: value for name, value in fields.items() if name in shown}


def _metadata(rows: dict[tuple[int, int], str]) -> list[dict[str, Any]]:
    """Return the entries that name and sort the processes (one for each rank) and their rows.

    Args:
        rows: the labels of the rows, by rank and number of the row.
    """
    where = f"{socket.gethostname()}, process {os.getpid()}"

    def entry(kind: str, rank: int, row: int, **arguments: object) -> dict[str, Any]:
        return {"ph": "M", "name": kind, "pid": _FIRST_PID + rank, "tid": row, "args": arguments}

    entries = []
    for rank in sorted({rank for rank, _ in rows}):
        name = f"dcp_objstore rank {rank} ({where})"
        entries.append(entry("process_name", rank, 0, name=name))
        # Viewers sort processes and rows by such an index. This one puts ranks after the other
        # processes of a file.
        entries.append(entry("process_sort_index", rank, 0, sort_index=_FIRST_PID + rank))
    for (rank, row), label in sorted(rows.items()):
        entries.append(entry("thread_name", rank, row, name=label))
        entries.append(entry("thread_sort_index", rank, row, sort_index=row))
    return entries


def _write(path: Path, document: dict[str, Any]) -> None:
    """Write a temporary file and rename it, so that no reader sees half of it."""
    body = json.dumps(document, separators=(",", ":")).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(body)
        Path(name).chmod(0o644)  # `mkstemp` lets only the user read it
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
