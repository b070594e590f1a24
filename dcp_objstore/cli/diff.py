"""`dcp-objstore diff`: compare two checkpoints and print what differs."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from collections.abc import Iterator, Sequence

from dcp_objstore.cli.access import chosen
from dcp_objstore.inspect.diff import DiffReport, TensorDifference, ValueDifference, diff
from dcp_objstore.observe.report import counted, size_text

_DIFFERENT_STATUS = 1
_WORD_WIDTH = len("reshaped") + 2
_MOST_OF_A_VALUE = 60


def print_diff(
    url: str,
    other_url: str,
    *,
    keys: Sequence[str],
    stats: bool,
    trust_pickle: bool,
    as_json: bool,
) -> None:
    """Print the differences of two checkpoints; exit with status 1 if there are any.

    Raises:
        DcpObjstoreError: `dcp_objstore.diff` refused or failed.
        SystemExit: they differ.
    """
    report = diff(
        url,
        other_url,
        list(keys) or None,
        stats=stats,
        storage_options=chosen(),
        other_storage_options=chosen(),
        trust_pickle=trust_pickle,
    )
    if as_json:
        print(json.dumps({"same": report.same, **dataclasses.asdict(report)}, default=repr))
    else:
        _print(report)
    if not report.same:
        sys.exit(_DIFFERENT_STATUS)


def _print(report: DiffReport) -> None:
    columns = shutil.get_terminal_size().columns
    print(f"from  {report.url}")
    print(f"to    {report.other_url}")
    different = 0
    for word, key, text in _lines(report):
        line = f"{word.ljust(_WORD_WIDTH)}{key}"
        if text and len(line) + 2 + len(text) > columns:
            print(f"{line}\n{' ' * _WORD_WIDTH}  {text}")
        else:
            print(f"{line}  {text}".rstrip())
        different += 1
    read = f"{size_text(report.read_bytes)} read" if report.read_bytes else "no tensor read"
    print(f"{counted(different, 'difference')}, {report.equal} equal ({read})")


def _lines(report: DiffReport) -> Iterator[tuple[str, str, str]]:
    for key in report.removed:
        yield "removed", key, ""
    for key in report.added:
        yield "added", key, ""
    for tensor in report.tensors:
        yield tensor.what, tensor.key, _tensor_text(tensor)
    for value in report.values:
        yield "changed", value.key, _value_text(value)


def _tensor_text(tensor: TensorDifference) -> str:
    shape, other_shape = (str(list(one)) for one in (tensor.shape, tensor.other_shape))
    if tensor.what == "retyped":
        return f"{tensor.dtype} -> {tensor.other_dtype}"
    if tensor.what == "reshaped":
        dtypes = tensor.dtype, tensor.other_dtype
        retyped = f", {' -> '.join(dtypes)}" if dtypes[0] != dtypes[1] else ""
        return f"{shape} -> {other_shape}{retyped}"
    if tensor.max_difference is None:
        return f"{tensor.dtype} {shape}"
    return (
        f"max {tensor.max_difference:.4g}, mean {tensor.mean_difference:.4g},"
        f" {counted(tensor.changed_elements or 0, 'element')}"
    )


def _value_text(value: ValueDifference) -> str:
    if not value.is_known:
        return "needs --trust-pickle to be shown"
    text = f"{value.value!r} -> {value.other_value!r}"
    return text if len(text) <= _MOST_OF_A_VALUE and "\n" not in text else ""
