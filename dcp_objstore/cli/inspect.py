"""`dcp-objstore inspect`: print a checkpoint's modules, a tensor's figures, or a load's plan."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TypeAlias

from dcp_objstore.cli.access import chosen
from dcp_objstore.errors import ConfigError
from dcp_objstore.inspect.checkpoint import (
    Checkpoint,
    TensorEntry,
    ValueEntry,
    open as open_checkpoint,
)
from dcp_objstore.inspect.modules import Module as GenericModule, dtype_name
from dcp_objstore.inspect.stats import TensorStats
from dcp_objstore.observe.report import counted, size_text

Module: TypeAlias = GenericModule[TensorEntry | ValueEntry]

_SIZE_WIDTH = len("1023.99 MiB")


def inspect(
    url: str, patterns: Sequence[str], *, tensor: str | None, plan: int | None, as_json: bool
) -> None:
    """Print what is in a checkpoint.

    Raises:
        ConfigError: the options contradict each other.
        DcpObjstoreError: a function of `dcp_objstore.Checkpoint` refused or failed.
    """
    if tensor is not None and (plan is not None or patterns):
        raise ConfigError("--tensor NAME stands alone: leave PATTERN and --plan out")
    checkpoint = open_checkpoint(url, storage_options=chosen())
    if tensor is not None:
        _inspect_tensor(checkpoint, tensor, as_json=as_json)
    elif plan is not None:
        _inspect_plan(checkpoint, plan, patterns, as_json=as_json)
    else:
        root = checkpoint.modules(list(patterns) or None)
        if as_json:
            _print_json(checkpoint, root)
        else:
            _print_tree(checkpoint, root)


def _inspect_tensor(checkpoint: Checkpoint, name: str, *, as_json: bool) -> None:
    entry = checkpoint[name]
    if not isinstance(entry, TensorEntry):
        raise ConfigError(f"{name} is a value, not a tensor", url=checkpoint.url)
    stats = entry.stats()
    if as_json:
        print(json.dumps({**_described(entry), **dataclasses.asdict(stats)}))
    else:
        print(f"{name}  {dtype_name(entry)} {list(entry.shape)}, {size_text(entry.nbytes)}")
        _print_stats(stats)


def _print_stats(stats: TensorStats) -> None:
    print(f"  {stats.elements} elements, {stats.nans} NaN, {stats.infs} Inf")
    if stats.minimum is None:
        return
    for name in ("minimum", "maximum", "mean", "std"):
        print(f"  {name.ljust(8)} {getattr(stats, name):.6g}")
    ends = [(f"{low:.4g}", f"{high:.4g}", count) for low, high, count in stats.histogram]
    low_width = max(len(low) for low, *_ in ends)
    high_width = max(len(high) for _, high, _ in ends)
    most = max(count for *_, count in ends)
    room = min(shutil.get_terminal_size().columns, 100) - low_width - high_width - 8
    room -= len(str(most)) + 2
    for low, high, count in ends:
        bar = "#" * -(-count * room // most)
        print(f"  [{low.rjust(low_width)}, {high.rjust(high_width)})  {bar} {count}")


def _inspect_plan(
    checkpoint: Checkpoint, ranks: int, patterns: Sequence[str], *, as_json: bool
) -> None:
    planned = checkpoint.plan(ranks, list(patterns) or None)
    if as_json:
        plans = [dataclasses.asdict(one) for one in planned]
        print(json.dumps({"url": checkpoint.url, "ranks": plans}))
        return
    lines = [("rank", "fetches", "requests", "objects", "from other ranks")]
    for _, group in groupby(planned, lambda one: dataclasses.replace(one, rank=0)):
        alike = list(group)
        one, last = alike[0], alike[-1]
        name = str(one.rank) if one is last else f"{one.rank}-{last.rank}"
        figures = str(one.requests), str(one.objects), size_text(one.received_bytes)
        lines.append((name, size_text(one.total_bytes), *figures))
    total_bytes = sum(one.total_bytes for one in planned)
    received_bytes = sum(one.received_bytes for one in planned)
    requests = str(sum(one.requests for one in planned))
    lines.append(("all", size_text(total_bytes), requests, "", size_text(received_bytes)))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    print(checkpoint.url)
    for line in lines:
        cells = (cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        print("  ".join(cells).rstrip())


def _described(entry: TensorEntry | ValueEntry) -> dict[str, object]:
    described: dict[str, object] = {"key": entry.key, "bytes": entry.nbytes}
    if isinstance(entry, TensorEntry):
        described["dtype"] = dtype_name(entry)
        described["shape"] = list(entry.shape)
        described["shards"] = len(entry.chunks)
    return described


def _print_json(checkpoint: Checkpoint, root: Module) -> None:
    entries = list(root.walk())
    report = {
        "url": checkpoint.url,
        "commit_id": checkpoint.commit_id,
        "world_size": checkpoint.world_size,
        "objects": len(checkpoint.objects),
        "tensors": [_described(one) for one in entries if isinstance(one, TensorEntry)],
        "values": [_described(one) for one in entries if isinstance(one, ValueEntry)],
        "total_bytes": root.total_bytes,
        "bytes_by_dtype": root.bytes_by_dtype(),
    }
    print(json.dumps(report))


def _print_tree(checkpoint: Checkpoint, root: Module) -> None:
    print(checkpoint.url)
    objects = counted(len(checkpoint.objects), "object")
    if checkpoint.created_at is None:
        print(f"by another library, {objects}")
    else:
        at = checkpoint.created_at.strftime("%Y-%m-%d %H:%M UTC")
        print(f"saved {at}, {counted(checkpoint.world_size or 0, 'rank')}, {objects}")
        print(f"commit {checkpoint.commit_id}")
    by_dtype = root.bytes_by_dtype()
    kinds = Counter(dtype_name(entry) for entry in root.walk())
    lines = [("size", "dtype", "shards", "name"), *_tree_lines(root, "")]
    for kind, size_bytes in by_dtype.items():
        noun = "value" if kind == "value" else "tensor"
        lines.append((size_text(size_bytes), kind, "", f"{counted(kinds[kind], noun)} in all"))
    width = max(len(dtype) for _, dtype, *_ in lines)
    for size, dtype, shards, name in lines:
        print(f"{size.rjust(_SIZE_WIDTH)}  {dtype.ljust(width)}  {shards.rjust(6)}  {name}")


def _tree_lines(module: Module, indent: str) -> Iterator[tuple[str, str, str, str]]:
    for part, entry in module.entries.items():
        size = size_text(entry.nbytes)
        if isinstance(entry, TensorEntry):
            shards = str(len(entry.chunks))
            yield size, dtype_name(entry), shards, f"{indent}{part} {list(entry.shape)}"
        else:
            yield size, "value", "", f"{indent}{part}"
    for _, group in groupby(module.modules.items(), _kind):
        alike = list(group)
        total_bytes = sum(one.total_bytes for _, one in alike)
        part, first = alike[0]
        if len(alike) > 1:
            part = f"{part} ... {alike[-1][0]} ({len(alike)} alike)"
        yield size_text(total_bytes), "", "", f"{indent}{part}"
        yield from _tree_lines(first, f"{indent}  ")


def _kind(named: tuple[str, Module]) -> object:
    """Return what neighbours must have in common to be shown once: all but their numbers."""
    part, module = named
    return _structure(module) if part.isdecimal() else part


def _structure(module: Module) -> tuple[object, ...]:
    entries = tuple(
        (part, dtype_name(one), one.shape, len(one.chunks))
        if isinstance(one, TensorEntry)
        else (part, "value")
        for part, one in module.entries.items()
    )
    return entries, tuple((part, _structure(one)) for part, one in module.modules.items())
