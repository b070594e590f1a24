"""`dcp-objstore ls`: list the checkpoints at and below a URL, and their states."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from dcp_objstore.checkpoint.claim import ClaimRecord, counts, read_claim
from dcp_objstore.checkpoint.marker import Marker
from dcp_objstore.checkpoint.names import (
    CLAIM_KEY,
    MARKER_KEY,
    is_beacon_key,
    natural_order,
    parse_data_key,
)
from dcp_objstore.checkpoint.read import explain_absence, explain_object, read_marker
from dcp_objstore.cli.access import chosen
from dcp_objstore.cli.exits import fail, status_of
from dcp_objstore.errors import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    DcpObjstoreError,
    PermissionDeniedError,
    RetryableError,
    UnsupportedError,
)
from dcp_objstore.observe.report import size_text
from dcp_objstore.stores import ObjectStore, StoreSpec
from dcp_objstore.transfer.workers import in_waves

# The listing starts again if a job claims one of the runs meanwhile, at most this often in all.
_TRIES = 5
# If the terminal leaves fewer columns than this for user metadata, it is left out.
_LEAST_METADATA_COLUMNS = 16


def print_checkpoints(url: str, *, as_json: bool) -> None:
    """Print one line for each checkpoint and each save that was never committed.

    A checkpoint at the URL itself does not hide those below it. The table names checkpoints
    relative to the URL. On a terminal, user metadata is cut to the length of a line, or left out. A
    checkpoint below the URL that cannot be read gets a line, too, and the exit status reports it at
    the end. In a run that has a claim, a committed step that no longer counts is `superseded`.

    Args:
        url: URL of a checkpoint, or a prefix above some.
        as_json: print one JSON object per line instead of a table.

    Raises:
        CheckpointNotFoundError: there is no checkpoint and no save at or below the URL.
        DcpObjstoreError: the store refused or failed, or the marker at the URL itself is damaged.
        SystemExit: a checkpoint below the URL cannot be read.
    """
    spec = StoreSpec(url, chosen())
    store = spec.open()
    entry = _describe(store, _base_above(spec))
    entries = [entry] if entry is not None else []
    unread: list[DcpObjstoreError] = []
    try:
        below, unread = _below(spec, store, but_itself=entry is not None)
        entries += below
    except PermissionDeniedError as error:
        if entry is None:
            raise
        print(f"dcp-objstore: checkpoints below are not listed: {error}", file=sys.stderr)
    if not entries:
        raise CheckpointNotFoundError(explain_object(spec) or explain_absence(store), url=store.url)
    if as_json:
        for one in entries:
            print(json.dumps(one))
    else:
        _print_table(store.url, entries)
    if unread:
        fail(f"{type(unread[0]).__name__}: {unread[0]}", status_of(unread[0]))


def _base_above(spec: StoreSpec) -> int:
    """Return the base of the run that contains a checkpoint; 0 if there is none, or unreadable."""
    run, _ = spec.parent()
    if run is None:
        return 0
    try:
        found = read_claim(run.open())
    except (PermissionDeniedError, CheckpointCorruptError, UnsupportedError):
        return 0
    return found[0].base if found is not None else 0


def _below(
    spec: StoreSpec, store: ObjectStore, *, but_itself: bool
) -> tuple[list[dict[str, Any]], list[DcpObjstoreError]]:
    """Do what `_below_once` does, again if a job claims a run meanwhile (rule C3 of `claim`)."""
    for _ in range(_TRIES):
        entries, unread, claims = _below_once(spec, store, but_itself=but_itself)
        again = {run: _claim_of(spec, run, []) for run in claims}
        if again == claims:
            return entries, unread
    raise RetryableError("jobs kept claiming the runs here; try again", url=spec.url)


def _below_once(
    spec: StoreSpec, store: ObjectStore, *, but_itself: bool
) -> tuple[list[dict[str, Any]], list[DcpObjstoreError], dict[str, ClaimRecord | None]]:
    """Describe all checkpoints below, and prefixes with a save but no marker, in natural order.

    Args:
        spec: the URL and its options.
        store: rooted at the URL.
        but_itself: leave out the checkpoint at the URL itself.

    Returns:
        The descriptions, the errors of what could not be read, and the `_CLAIM` of each run that
        has one.
    """
    sizes: dict[str, int] = {}
    marked: set[str] = set()
    unread: list[DcpObjstoreError] = []
    claims: dict[str, ClaimRecord | None] = {}
    for meta in store.list():
        prefix, _, name = meta.key.rpartition("/")
        if name == MARKER_KEY:
            marked.add(prefix)
        elif name == CLAIM_KEY:
            claims[prefix] = _claim_of(spec, prefix, unread)
        elif parse_data_key(name) is not None:
            sizes[prefix] = sizes.get(prefix, 0) + meta.size_bytes
        elif is_beacon_key(name):
            sizes.setdefault(prefix, 0)

    def describe(
        at: tuple[str, StoreSpec, ObjectStore],
    ) -> tuple[dict[str, Any], DcpObjstoreError | None]:
        prefix, one, opened = at
        # The last segment is the step's name; the segments before it name the run.
        claim = claims.get(prefix.rpartition("/")[0]) if prefix else None
        size_bytes = sizes.get(prefix, 0)
        entry = None
        if prefix in marked:
            try:
                entry = _describe(opened, claim.base if claim is not None else 0)
            except (CheckpointCorruptError, UnsupportedError) as error:
                return _unreadable(one.url, size_bytes, error), error
        return entry or _uncommitted(one.url, size_bytes), None

    places = []
    for prefix in sorted(marked | sizes.keys(), key=natural_order):
        if prefix or not but_itself:
            one = spec.at(f"{spec.url}/{prefix}") if prefix else spec
            places.append((prefix, one, one.open()))
    described = list(in_waves(describe, places))
    unread += [error for _, error in described if error is not None]
    return [entry for entry, _ in described], unread, claims


def _claim_of(spec: StoreSpec, run: str, unread: list[DcpObjstoreError]) -> ClaimRecord | None:
    """Return the run's `_CLAIM`, or None; if it cannot be read, add the error to `unread`."""
    try:
        found = read_claim(spec.at(f"{spec.url}/{run}" if run else spec.url).open())
    except (CheckpointCorruptError, UnsupportedError) as error:
        unread.append(error)
        return None
    return found[0] if found is not None else None


def _describe(store: ObjectStore, base: int) -> dict[str, Any] | None:
    found = read_marker(store)
    if found is None:
        return None
    marker = found[0]
    return {
        "url": store.url,
        "state": _state(marker, base),
        "bytes": marker.counts.total_bytes,
        "tensors": marker.counts.tensors,
        "objects": marker.counts.objects,
        "world_size": marker.world_size,
        "created": marker.created_at.isoformat(timespec="seconds"),
        "commit_id": marker.commit_id,
        "claim": marker.claim,
        "pins": list(marker.pins),
        "user_metadata": marker.user_metadata,
    }


def _state(marker: Marker, base: int) -> str:
    if marker.is_committed and not counts(marker, base):
        return "superseded"
    return marker.state


def _unreadable(url: str, size_bytes: int, error: DcpObjstoreError) -> dict[str, Any]:
    """Describe a checkpoint that is damaged, or that a newer version wrote."""
    state = "damaged" if isinstance(error, CheckpointCorruptError) else "unsupported"
    return {"url": url, "state": state, "bytes": size_bytes, "error": error.message}


def _uncommitted(url: str, size_bytes: int) -> dict[str, Any]:
    return {"url": url, "state": "not committed", "bytes": size_bytes}


def _print_table(root: str, entries: Sequence[dict[str, Any]]) -> None:
    """Print the URL on a separate line, then a table with names relative to it."""
    lines = [("state", "size", "ranks", "created (UTC)", "name", "user metadata")]
    for entry in entries:
        created = entry.get("created")
        lines.append(
            (
                f"{entry['state']}, pinned" if entry.get("pins") else entry["state"],
                size_text(entry["bytes"]),
                str(entry.get("world_size", "-")),
                datetime.fromisoformat(created).strftime("%Y-%m-%d %H:%M") if created else "-",
                entry["url"].removeprefix(root).lstrip("/") or ".",
                _notes(entry),
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


def _notes(entry: dict[str, Any]) -> str:
    """Return the text of the last column: pins and user metadata."""
    if entry.get("pins"):
        pinned = f"pinned: {', '.join(entry['pins'])}"
        return (
            f"{pinned} {json.dumps(entry['user_metadata'])}" if entry["user_metadata"] else pinned
        )
    return json.dumps(entry["user_metadata"]) if entry.get("user_metadata") else ""


def _cut(text: str, columns: int) -> str:
    return text if len(text) <= columns else f"{text[: columns - 3]}..." if columns else ""
