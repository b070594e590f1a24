"""`dcp-objstore export`, `import` and `cp`: call them and print what was written."""

from __future__ import annotations

import re
from collections.abc import Sequence

from dcp_objstore.cli.access import chosen
from dcp_objstore.cli.upkeep import print_json
from dcp_objstore.errors import ConfigError
from dcp_objstore.observe.report import counted, size_text

_UNITS_BYTES = {
    "": 1,
    **{unit: 1000**power for power, unit in enumerate(("KB", "MB", "GB", "TB"), 1)},
    **{unit: 1024**power for power, unit in enumerate(("KIB", "MIB", "GIB", "TIB"), 1)},
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?) *([a-z]*)", re.IGNORECASE)


def export(
    url: str,
    out: str,
    *,
    keys: Sequence[str],
    rename: Sequence[str],
    dtype: str | None,
    max_shard_size: str,
    copied: Sequence[str],
    overwrite: bool,
    trust_pickle: bool,
    as_json: bool,
) -> None:
    """Export a checkpoint and print the report.

    Raises:
        DcpObjstoreError: `dcp_objstore.export_checkpoint` refused or failed.
    """
    most_bytes, rules = size_bytes("--max-shard-size", max_shard_size), _rules(rename)
    import torch

    from dcp_objstore.convert.export import export_checkpoint

    torch_dtype = None if dtype is None else getattr(torch, dtype, None)
    if dtype is not None and not isinstance(torch_dtype, torch.dtype):
        raise ConfigError(f"--dtype {dtype}: torch has no such dtype; write bfloat16, for example")
    report = export_checkpoint(
        url,
        out,
        list(keys) or None,
        rename=rules,
        dtype=torch_dtype,
        max_shard_size_bytes=most_bytes,
        copied_files=copied,
        overwrite=overwrite,
        storage_options=chosen(),
        trust_pickle=trust_pickle,
    )
    if as_json:
        print_json(report)
        return
    tensors = counted(report.tensors, "tensor")
    print(f"exported {tensors}, {size_text(report.total_bytes)}, in {report.seconds:.1f} s to")
    for file in report.files:
        print(f"  {file}")
    if report.left_out:
        left = counted(len(report.left_out), "value")
        print(f"left out {left} that safetensors cannot hold, such as {report.left_out[0]}")


def import_(
    source: str,
    url: str,
    *,
    keys: Sequence[str],
    rename: Sequence[str],
    overwrite: bool,
    trust_pickle: bool,
    as_json: bool,
) -> None:
    """Import files as a checkpoint and print the report.

    Raises:
        DcpObjstoreError: `dcp_objstore.import_checkpoint` refused or failed.
    """
    rules = _rules(rename)
    from dcp_objstore.convert.import_checkpoint import import_checkpoint

    report = import_checkpoint(
        source,
        url,
        list(keys) or None,
        rename=rules,
        overwrite=overwrite,
        storage_options=chosen(),
        trust_pickle=trust_pickle,
    )
    if as_json:
        print_json(report)
        return
    size = size_text(report.total_bytes)
    print(f"imported {size} in {report.seconds:.1f} s to {report.url}")
    print(f"commit {report.commit_id}")


def copy(source: str, url: str, *, overwrite: bool, streamed: bool, as_json: bool) -> None:
    """Copy a checkpoint and print the report.

    Raises:
        DcpObjstoreError: `dcp_objstore.copy_checkpoint` refused or failed.
    """
    from dcp_objstore.convert.copy import copy_checkpoint

    report = copy_checkpoint(
        source, url, overwrite=overwrite, storage_options=chosen(), streamed=streamed
    )
    if as_json:
        print_json(report)
        return
    size = size_text(report.total_bytes)
    print(f"copied {size} in {report.seconds:.1f} s to {report.url}")
    print(f"commit {report.commit_id}")
    if report.sent_bytes < report.total_bytes:
        sent = size_text(report.sent_bytes)
        print(f"sent {sent}; an interrupted copy had sent the rest")
    if report.copied_bytes:
        print(f"the store copied {size_text(report.copied_bytes)} by itself, without a check here")


def _rules(rename: Sequence[str]) -> list[tuple[str, str]]:
    rules = []
    for rule in rename:
        pattern, equals, replacement = rule.rpartition("=")
        if not equals:
            raise ConfigError(f"--rename {rule}: write PATTERN=REPLACEMENT, such as '^model[.]='")
        rules.append((pattern, replacement))
    return rules


def size_bytes(option: str, text: str) -> int:
    """Return the number of bytes that a size such as 500MB or 2GiB means.

    Raises:
        ConfigError: it is no size; names the option.
    """
    found = _SIZE.fullmatch(text)
    unit = None if found is None else _UNITS_BYTES.get(found[2].upper())
    if found is None or unit is None or not float(found[1]):
        raise ConfigError(f"{option} {text}: write a size such as 500MB, 5GB or 2GiB")
    return int(float(found[1]) * unit)
