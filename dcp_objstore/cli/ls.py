"""`dcp-objstore ls`: print the checkpoints at and below a URL, and their states."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import dcp_objstore as dos
from dcp_objstore.cli.exits import fail, status_of
from dcp_objstore.cli.options import CheckpointOrRun, JsonLines, chosen
from dcp_objstore.cli.terminal import age, aligned, columns, json_text, say
from dcp_objstore.observe.report import counted, size_text

# If the terminal leaves fewer columns than this for the last column, it is left out.
_LEAST_LAST_COLUMNS = 16
_FIGURES = {"size", "ranks"}  # columns that are aligned to the right

_Line: TypeAlias = tuple[str, ...]


def print_checkpoints(url: CheckpointOrRun, as_json: JsonLines = False) -> None:
    """List the checkpoint at a URL, and those below it.

    A save that was never committed is listed, too, with the state "not committed". Nothing is ever
    changed.
    """
    listing = dos.list_checkpoints(url, storage_options=chosen())
    if listing.unlisted is not None:
        text = f"dcp-objstore: checkpoints below are not listed: {listing.unlisted}"
        say(text, to_errors=True)
    if as_json:
        for entry in listing.checkpoints:
            print(json_text(described(entry)))
    else:
        say(listing.url)
        _print_table(list(_lines(listing)))
        deleted_bytes = [one.total_bytes for one in listing.checkpoints if one.state == "deleted"]
        if sum(deleted_bytes):
            # A deleted checkpoint whose objects were removed has no bytes, and is not counted.
            count = counted(sum(map(bool, deleted_bytes)), "deleted checkpoint")
            say(
                f"{size_text(sum(deleted_bytes))} of {count} left, which dcp-objstore sweep"
                f" '{listing.url}' removes a day after the deletion"
            )
    if listing.unread:
        error = listing.unread[0]
        fail(f"{type(error).__name__}: {error}", status_of(error))


def described(entry: dos.reports.ListedCheckpoint) -> dict[str, Any]:
    """Return what `--json` prints of a checkpoint; an unreadable one has fewer fields."""
    fields: dict[str, Any] = {
        "url": entry.url,
        "state": entry.state,
        "bytes": entry.total_bytes,
    }
    if entry.error is not None:
        fields["error"] = entry.error
    if entry.created_at is not None:
        fields |= {
            "tensors": entry.tensors,
            "objects": entry.objects,
            "world_size": entry.world_size,
            "created": entry.created_at.isoformat(timespec="seconds"),
            "commit_id": entry.commit_id,
            "claim": entry.claim,
            "pins": list(entry.pins),
            "user_metadata": dict(entry.user_metadata),
        }
    return fields


def _lines(listing: dos.reports.Listing) -> Iterator[_Line]:
    """Yield the head of the table and a row for each checkpoint that was not deleted."""
    yield "state", "size", "ranks", "age", "name", "metrics and notes"
    for entry in listing.checkpoints:
        if entry.state != "deleted":
            yield (
                entry.state,
                size_text(entry.total_bytes),
                "-" if entry.world_size is None else str(entry.world_size),
                age(entry.created_at),
                entry.name or entry.url.rpartition("/")[2],
                _notes(entry),
            )


def _notes(entry: dos.reports.ListedCheckpoint) -> str:
    """Return the text of the last column: pins, metrics and the other metadata."""
    others = dict(entry.user_metadata)
    metrics = others.pop("metrics", {})  # a dict if a manager saved it; users may save anything
    by_name = metrics if isinstance(metrics, dict) else {"metrics": metrics}
    others.pop("step", None)  # the name says it
    shown = ", ".join(f"{name} {_figure(value)}" for name, value in {**by_name, **others}.items())
    pinned = f"pinned: {', '.join(entry.pins)}" if entry.pins else ""
    return "; ".join(filter(None, (pinned, shown)))


def _figure(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return value if isinstance(value, str) else json.dumps(value)


def _print_table(lines: Sequence[_Line]) -> None:
    """Print aligned rows; a narrow terminal gets no last column, or shortened rows."""
    shown = list(aligned(lines, _FIGURES))
    if sys.stdout.isatty():
        width = columns()
        without_last = list(aligned([line[:-1] for line in lines], _FIGURES))
        if width - max(map(len, without_last)) - 2 < _LEAST_LAST_COLUMNS:
            shown = without_last
        else:
            shown = [name if len(name) <= width else f"{name[: width - 3]}..." for name in shown]
    say(*shown)
