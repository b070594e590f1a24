"""`dcp-objstore inspect`: print a checkpoint's modules, tensors and values. It needs no torch."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

import dcp_objstore as dos
from dcp_objstore.cli.options import Checkpoint, Json, chosen
from dcp_objstore.cli.terminal import json_text, say
from dcp_objstore.observe.report import counted, size_text

if TYPE_CHECKING:
    from dcp_objstore.checkpoint.marker import LeftOut

_Entry: TypeAlias = "dos.reports.TensorEntry | dos.reports.ValueEntry"
_Module: TypeAlias = "dos.reports.Module"

_SIZE_WIDTH = len("1023.99 MiB")


def inspect(
    url: Checkpoint,
    patterns: Annotated[
        list[str] | None,
        typer.Argument(help="Only these keys; shell patterns.", metavar="PATTERN"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show what is in a checkpoint: modules, tensors, shapes, sizes.

    Reads only the index, also of checkpoints by other libraries. Numbered modules that are alike
    are shown once.
    """
    checkpoint = dos.open(url, storage_options=chosen())
    show = _print_json if as_json else _print_tree
    show(checkpoint, checkpoint.modules(patterns or None))


def _dtype(entry: _Entry) -> str:
    """Return what the column "dtype" has, which is also what totals are by."""
    return entry.dtype_name if isinstance(entry, dos.reports.TensorEntry) else "value"


def _described(entry: _Entry) -> dict[str, object]:
    """Return what `--json` prints of an entry."""
    fields: dict[str, object] = {"key": entry.key, "bytes": entry.nbytes}
    if isinstance(entry, dos.reports.TensorEntry):
        fields["dtype"] = _dtype(entry)
        fields["shape"] = list(entry.shape)
        fields["shards"] = len(entry.chunks)
    return fields


def _left_out(checkpoint: dos.Checkpoint) -> Mapping[str, LeftOut]:
    """Return how many frozen tensors the save did not store, by module (`dos.trainable`)."""
    from dcp_objstore.checkpoint.marker import left_out_of

    return left_out_of(checkpoint.user_metadata or {})


def _print_json(checkpoint: dos.Checkpoint, root: _Module) -> None:
    entries = list(root.walk())
    report = {
        "user_metadata": checkpoint.user_metadata,
        "url": checkpoint.url,
        "commit_id": checkpoint.commit_id,
        "world_size": checkpoint.world_size,
        "unverified": checkpoint.commit_id is None,
        "objects": len(checkpoint.objects),
        "tensors": [
            _described(entry) for entry in entries if isinstance(entry, dos.reports.TensorEntry)
        ],
        "values": [
            _described(entry) for entry in entries if isinstance(entry, dos.reports.ValueEntry)
        ],
        "total_bytes": root.total_bytes,
        "bytes_by_dtype": root.bytes_by_dtype(),
        "left_out": _left_out(checkpoint),
    }
    print(json_text(report))


def _print_tree(checkpoint: dos.Checkpoint, root: _Module) -> None:
    """Print what the checkpoint is, its modules as a tree, and a sum for each dtype."""
    say(checkpoint.url)
    objects = counted(len(checkpoint.objects), "object")
    if checkpoint.created_at is None:
        say(f"by another library, {objects}, unverified: without digests")
    else:
        at = checkpoint.created_at.strftime("%Y-%m-%d %H:%M UTC")
        say(f"saved {at}, {counted(checkpoint.world_size or 0, 'rank')}, {objects}")
        say(f"commit {checkpoint.commit_id}")
        if checkpoint.user_metadata:
            say(f"metadata {json.dumps(checkpoint.user_metadata)}")
    for name, count in _left_out(checkpoint).items():
        tensors = counted(count["tensors"], "frozen tensor")
        say(f"left out of {name}: {tensors}, {count['elements']:,} elements")
    by_dtype = root.bytes_by_dtype()
    kinds = Counter(_dtype(entry) for entry in root.walk())
    lines = [("size", "dtype", "shards", "name"), *_tree_lines(root, "")]
    for kind, size_bytes in by_dtype.items():
        noun = "value" if kind == "value" else "tensor"
        lines.append((size_text(size_bytes), kind, "", f"{counted(kinds[kind], noun)} in all"))
    width = max(len(dtype) for _, dtype, *_ in lines)
    for size, dtype, shards, name in lines:
        say(f"{size.rjust(_SIZE_WIDTH)}  {dtype.ljust(width)}  {shards.rjust(6)}  {name}")


def _tree_lines(module: _Module, indent: str) -> Iterator[tuple[str, str, str, str]]:
    """Yield a line for each entry of a module: its size, dtype, number of shards and name."""
    for part, entry in module.entries.items():
        size = size_text(entry.nbytes)
        if isinstance(entry, dos.reports.TensorEntry):
            shards = str(len(entry.chunks))
            yield size, _dtype(entry), shards, f"{indent}{part} {list(entry.shape)}"
        else:
            # A small value is mostly the archive around it.
            yield "-" if entry.nbytes < 4096 else size, "value", "", f"{indent}{part}"
    for _, group in groupby(module.modules.items(), _kind):
        alike = dict(group)
        total_bytes = sum(child.total_bytes for child in alike.values())
        first, *_, last = [*alike, *alike]  # twice, so that a single name is both of them
        name = first if len(alike) == 1 else f"{first} ... {last} ({len(alike)} alike)"
        yield size_text(total_bytes), "", "", f"{indent}{name}"
        yield from _tree_lines(alike[first], f"{indent}  ")


def _kind(part_and_module: tuple[str, _Module]) -> object:
    """Return what neighbours must have in common to be shown once: all but their numbers."""
    part, module = part_and_module
    return _structure(module) if part.isdecimal() else part


def _structure(module: _Module) -> tuple[object, ...]:
    """Return all of a module but its name and values: equal ones are printed alike."""
    entries = tuple(
        (part, _dtype(entry), entry.shape, len(entry.chunks))
        if isinstance(entry, dos.reports.TensorEntry)
        else (part, "value")
        for part, entry in module.entries.items()
    )
    return entries, tuple((part, _structure(child)) for part, child in module.modules.items())
