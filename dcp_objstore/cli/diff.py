"""`dcp-objstore diff`: compare two checkpoints and print what differs."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Annotated, Any

import typer

import dcp_objstore as dos
from dcp_objstore.cli.options import Checkpoint, Json, Keys, TrustPickle, chosen
from dcp_objstore.cli.terminal import columns, print_json, say

_DIFFERENT_STATUS = 1
_WORD_WIDTH = len("reshaped") + 2
# A value is shown if "OLD -> NEW" is at most this long.
_MOST_TEXT = 60
# The most elements of nested lists and mappings that are printed.
_MOST_PARTS = 200


def print_diff(
    url: Checkpoint,
    other_url: Annotated[
        str, typer.Argument(help="URL of the checkpoint to compare it with.", metavar="URL2")
    ],
    keys: Keys = None,
    trust_pickle: TrustPickle = False,
    as_json: Json = False,
) -> None:
    """Compare two checkpoints: keys, shapes, dtypes, contents.

    Compares digests, and reads tensors only where these cannot tell: in checkpoints by other
    libraries, or if the two are cut into different chunks. Exits with status 1 if they differ.
    """
    report = dos.diff(
        url,
        other_url,
        keys or None,
        storage_options=chosen(),
        other_storage_options=chosen(),
        trust_pickle=trust_pickle,
    )
    if as_json:
        values = tuple(
            dataclasses.replace(
                difference,
                value=_plain(difference.value),
                other_value=_plain(difference.other_value),
            )
            for difference in report.values
        )
        print_json(dataclasses.replace(report, values=values), same=report.same)
    else:
        _print(report)
    if not report.same:
        sys.exit(_DIFFERENT_STATUS)


def _print(report: dos.reports.DiffReport) -> None:
    """Print each difference on a line, or on two if the terminal is too narrow."""
    url, other_url, *_, total = str(report).splitlines()
    say(url, other_url)
    for word, key, text in _lines(report):
        line = f"{word.ljust(_WORD_WIDTH)}{key}"
        if text and len(line) + 2 + len(text) > columns():
            say(line, f"{' ' * _WORD_WIDTH}  {text}")
        else:
            say(f"{line}  {text}".rstrip())
    say(total)


def _lines(report: dos.reports.DiffReport) -> Iterator[tuple[str, str, str]]:
    """Yield what differs: the kind of difference, the key, and the two sides."""
    for key in report.removed:
        yield "removed", key, ""
    for key in report.added:
        yield "added", key, ""
    for tensor in report.tensors:
        yield tensor.what, tensor.key, _tensor_text(tensor)
    for value in report.values:
        yield "changed", value.key, _value_text(value)


def _tensor_text(tensor: dos.reports.TensorDifference) -> str:
    shape, other_shape = (str(list(sizes)) for sizes in (tensor.shape, tensor.other_shape))
    if tensor.what == "retyped":
        return f"{tensor.dtype} -> {tensor.other_dtype}"
    if tensor.what == "reshaped":
        dtypes = tensor.dtype, tensor.other_dtype
        retyped = f", {' -> '.join(dtypes)}" if tensor.dtype != tensor.other_dtype else ""
        return f"{shape} -> {other_shape}{retyped}"
    return f"{tensor.dtype} {shape}"


def _value_text(value: dos.reports.ValueDifference) -> str:
    """Return both sides of a value, or nothing if they do not fit on a line."""
    if not value.is_known:
        return "needs --trust-pickle to be shown"
    text = f"{_shown(value.value)} -> {_shown(value.other_value)}"
    return text if len(text) <= _MOST_TEXT and "\n" not in text else ""


def _plain(value: object) -> Any:
    """Return a value as JSON has it, or else its text."""
    try:
        return json.loads(json.dumps(value, default=repr)) if _is_small(value) else _shown(value)
    except (TypeError, ValueError):  # keys that are not text, or a number of thousands of digits
        return _shown(value)


def _shown(value: object) -> str:
    """Return a value as Python writes it, or what type it is if it is too large."""
    try:
        return repr(value) if _is_small(value) else f"<{type(value).__name__}, too large to show>"
    except ValueError:  # Python writes no number of thousands of digits
        return f"<{type(value).__name__}, too large to show>"


def _is_small(value: object) -> bool:
    """Whether a value has few parts, counted as often as they would be printed.

    A few nested lists can stand for more parts than there is memory for.
    """
    waiting, count = [value], 0  # parts to count, and those counted
    while waiting and count < _MOST_PARTS:
        current = waiting.pop()
        if isinstance(current, Mapping):
            for key_and_value in islice(current.items(), _MOST_PARTS):
                waiting += key_and_value
        elif isinstance(current, list | tuple | set | frozenset | deque):
            waiting += islice(current, _MOST_PARTS)
        count += 1
    return not waiting
