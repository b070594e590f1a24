"""`dcp-objstore inspect`: print a checkpoint's modules, a tensor's figures, or a load's plan."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Annotated, TypeAlias

import typer

import dcp_objstore as dos
from dcp_objstore.checkpoint.left_out import left_out_of
from dcp_objstore.cli.options import Checkpoint, Json, chosen
from dcp_objstore.cli.terminal import aligned, columns, json_text, say
from dcp_objstore.errors import ConfigError, DcpObjstoreError
from dcp_objstore.observe.report import counted, size_text

_Entry: TypeAlias = "dos.reports.TensorEntry | dos.reports.ValueEntry"
_Module: TypeAlias = "dos.reports.Module[_Entry]"

_SIZE_WIDTH = len("1023.99 MiB")
_VALUE_WIDTH = 60


def inspect(
    url: Checkpoint,
    patterns: Annotated[
        list[str] | None,
        typer.Argument(help="Only these keys; shell patterns.", metavar="PATTERN"),
    ] = None,
    tensor: Annotated[
        str | None,
        typer.Option(
            "--tensor",
            help="Read this tensor: extremes, mean, standard deviation, NaN, Inf, histogram.",
            metavar="NAME",
        ),
    ] = None,
    plan: Annotated[
        int | None,
        typer.Option(
            "--plan",
            min=1,
            max=65536,
            help="Show what each of N ranks of an FSDP2 job would read. Reads nothing.",
            metavar="N",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show what is in a checkpoint: modules, tensors, shapes, sizes.

    Reads only the index, also of checkpoints by other libraries, and plain values such as a
    learning rate. Numbered modules that are alike are shown once.
    """
    if tensor is not None and (plan is not None or patterns):
        raise ConfigError("--tensor NAME stands alone: leave PATTERN and --plan out")
    checkpoint = dos.open(url, storage_options=chosen())
    if tensor is not None:
        _inspect_tensor(checkpoint, tensor, as_json=as_json)
    elif plan is not None:
        _print_plan(checkpoint, checkpoint.plan(plan, patterns or None), as_json=as_json)
    else:
        show = _print_json if as_json else _print_tree
        show(checkpoint, checkpoint.modules(patterns or None))


def _inspect_tensor(checkpoint: dos.Checkpoint, name: str, *, as_json: bool) -> None:
    entry = checkpoint[name]
    if not isinstance(entry, dos.reports.TensorEntry):
        raise ConfigError(f"{name} is a value, not a tensor", url=checkpoint.url)
    stats = entry.stats()
    if as_json:
        print(json_text({**_described(entry), **dataclasses.asdict(stats)}))
    else:
        say(f"{name}  {_dtype(entry)} {list(entry.shape)}, {size_text(entry.nbytes)}")
        _print_stats(stats)


def _print_stats(stats: dos.reports.TensorStats) -> None:
    say(f"  {stats.elements} elements, {stats.nans} NaN, {stats.infs} Inf")
    if stats.minimum is None:
        return
    for name in ("minimum", "maximum", "mean", "std"):
        say(f"  {name.ljust(8)} {getattr(stats, name):.6g}")
    ends = [(f"{low:.4g}", f"{high:.4g}", count) for low, high, count in stats.histogram]
    low_width = max(len(low) for low, *_ in ends)
    high_width = max(len(high) for _, high, _ in ends)
    most = max(count for *_, count in ends)
    room = min(columns(), 100) - low_width - high_width - 8
    room -= len(str(most)) + 2
    for low, high, count in ends:
        bar = "#" * -(-count * room // most)
        say(f"  [{low.rjust(low_width)}, {high.rjust(high_width)})  {bar} {count}")


def _print_plan(
    checkpoint: dos.Checkpoint, planned: Sequence[dos.reports.RankPlan], *, as_json: bool
) -> None:
    if as_json:
        plans = [dataclasses.asdict(plan) for plan in planned]
        print(json_text({"url": checkpoint.url, "ranks": plans}))
        return
    lines = [("rank", "fetches", "requests", "objects", "from other ranks")]
    for _, group in groupby(planned, lambda plan: dataclasses.replace(plan, rank=0)):
        alike = list(group)
        first, last = alike[0], alike[-1]
        name = str(first.rank) if first is last else f"{first.rank}-{last.rank}"
        figures = str(first.requests), str(first.objects), size_text(first.received_bytes)
        lines.append((name, size_text(first.total_bytes), *figures))
    total_bytes = sum(plan.total_bytes for plan in planned)
    received_bytes = sum(plan.received_bytes for plan in planned)
    requests = str(sum(plan.requests for plan in planned))
    lines.append(("all", size_text(total_bytes), requests, "", size_text(received_bytes)))
    say(checkpoint.url)
    say(*aligned(lines, lines[0]))


def _dtype(entry: _Entry) -> str:
    from dcp_objstore.inspect.selection import dtype_name

    return dtype_name(entry)


def _described(entry: _Entry) -> dict[str, object]:
    described: dict[str, object] = {"key": entry.key, "bytes": entry.nbytes}
    if isinstance(entry, dos.reports.TensorEntry):
        described["dtype"] = _dtype(entry)
        described["shape"] = list(entry.shape)
        described["shards"] = len(entry.chunks)
    return described


def _print_json(checkpoint: dos.Checkpoint, root: _Module) -> None:
    entries, values = list(root.walk()), _plain_values(checkpoint, root)
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
            {**_described(entry), **({"value": values[entry.key]} if entry.key in values else {})}
            for entry in entries
            if isinstance(entry, dos.reports.ValueEntry)
        ],
        "total_bytes": root.total_bytes,
        "bytes_by_dtype": root.bytes_by_dtype(),
        "left_out": left_out_of(checkpoint.user_metadata or {}),
    }
    print(json_text(report))


def _plain_values(checkpoint: dos.Checkpoint, root: _Module) -> dict[str, object]:
    """Return the values that can be shown; say why there are none if they cannot be read."""
    keys = [entry.key for entry in root.walk() if isinstance(entry, dos.reports.ValueEntry)]
    try:
        return checkpoint.plain_values(keys)
    except DcpObjstoreError as error:
        say(f"dcp-objstore: values are not shown: {error}", to_errors=True)
        return {}


def _shown(value: object) -> str:
    """Return a value as text of at most 60 characters, floats with six digits."""
    text = f"{value:.6g}" if isinstance(value, float) else repr(value)
    return text if len(text) <= _VALUE_WIDTH else f"{text[: _VALUE_WIDTH - 3]}..."


def _print_tree(checkpoint: dos.Checkpoint, root: _Module) -> None:
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
    for name, count in left_out_of(checkpoint.user_metadata or {}).items():
        tensors = counted(count["tensors"], "frozen tensor")
        say(f"left out of {name}: {tensors}, {count['elements']:,} elements")
    by_dtype = root.bytes_by_dtype()
    kinds = Counter(_dtype(entry) for entry in root.walk())
    values = _plain_values(checkpoint, root)
    lines = [("size", "dtype", "shards", "name"), *_tree_lines(root, "", values)]
    for kind, size_bytes in by_dtype.items():
        noun = "value" if kind == "value" else "tensor"
        lines.append((size_text(size_bytes), kind, "", f"{counted(kinds[kind], noun)} in all"))
    width = max(len(dtype) for _, dtype, *_ in lines)
    for size, dtype, shards, name in lines:
        say(f"{size.rjust(_SIZE_WIDTH)}  {dtype.ljust(width)}  {shards.rjust(6)}  {name}")


def _tree_lines(
    module: _Module, indent: str, values: Mapping[str, object]
) -> Iterator[tuple[str, str, str, str]]:
    for part, entry in module.entries.items():
        size = size_text(entry.nbytes)
        if isinstance(entry, dos.reports.TensorEntry):
            shards = str(len(entry.chunks))
            yield size, _dtype(entry), shards, f"{indent}{part} {list(entry.shape)}"
        else:
            shown = f" = {_shown(values[entry.key])}" if entry.key in values else ""
            yield size, "value", "", f"{indent}{part}{shown}"
    for _, group in groupby(module.modules.items(), _kind):
        alike = list(group)
        total_bytes = sum(child.total_bytes for _, child in alike)
        part, first = alike[0]
        if len(alike) > 1:
            last_part, _ = alike[-1]
            part = f"{part} ... {last_part} ({len(alike)} alike)"
        yield size_text(total_bytes), "", "", f"{indent}{part}"
        yield from _tree_lines(first, f"{indent}  ", values)


def _kind(named: tuple[str, _Module]) -> object:
    """Return what neighbours must have in common to be shown once: all but their numbers."""
    part, module = named
    return _structure(module) if part.isdecimal() else part


def _structure(module: _Module) -> tuple[object, ...]:
    entries = tuple(
        (part, _dtype(entry), entry.shape, len(entry.chunks))
        if isinstance(entry, dos.reports.TensorEntry)
        else (part, "value")
        for part, entry in module.entries.items()
    )
    return entries, tuple((part, _structure(child)) for part, child in module.modules.items())
