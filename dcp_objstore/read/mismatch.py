"""The errors for a state that does not fit a checkpoint, with all keys concerned or the nearest."""

from __future__ import annotations

import difflib
import heapq
import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias

from dcp_objstore.errors import StateMismatchError, printable
from dcp_objstore.observe.report import counted
from dcp_objstore.state.stored import constant_name

if TYPE_CHECKING:
    import torch

# What to do if a tensor of the state has another dtype than the stored one.
OnDtype: TypeAlias = Literal["warn", "error"]

SHOWN_KEYS = 10


def mismatch(summary: str, lines: Sequence[str], keys: int | None = None) -> StateMismatchError:
    """Return the error that says what is wrong, and lists the first keys.

    Args:
        summary: what is wrong.
        lines: a line for each key.
        keys: the number of keys, if a line may stand for several.
    """
    lines = list(map(printable, lines))
    keys = len(lines) if keys is None else keys
    unshown = f"\n  ... and {len(lines) - SHOWN_KEYS} more" if len(lines) > SHOWN_KEYS else ""
    shown = "\n  ".join(lines[:SHOWN_KEYS])
    return StateMismatchError(f"{summary} in {counted(keys, 'key')}:\n  {shown}{unshown}")


def refuse_other_dtypes(tensors: Iterable[tuple[str, str, torch.dtype]]) -> None:
    """Raise if tensors have other dtypes than were saved.

    Args:
        tensors: the key of each tensor, torch's name of the saved dtype, and the state's dtype.

    Raises:
        StateMismatchError: a tensor has another dtype than was saved.
    """
    lines = [
        f"{key}: saved as {saved}, the state has {constant_name(dtype)}"
        for key, saved, dtype in tensors
        if saved != constant_name(dtype)
    ]
    if lines:
        raise mismatch(
            'the checkpoint has another dtype than the state (on_dtype="warn" converts)', lines
        )


# Comparing two names takes some 50 microseconds, so only the likely ones are compared.
_COMPARED = 200


def nearest(key: str, saved: list[str]) -> list[str]:
    """Return up to three saved names that are most like `key`."""
    below = [name for name in saved if name.startswith(f"{key}.")]
    if below:  # a dict or a module was saved here
        return below[:3]
    # Names with one prefix more or less, such as `model.` or `module.`; shortest prefix first.
    shifted = [name for name in saved if name.endswith(f".{key}") or key.endswith(f".{name}")]
    shifted.sort(key=lambda name: abs(len(name) - len(key)))

    def in_common(name: str) -> int:
        """Count the equal characters at the start and at the end."""
        start = os.path.commonprefix((key, name))  # noqa: RUF071 - by character on purpose
        end = os.path.commonprefix((key[::-1], name[::-1]))  # noqa: RUF071 - as above
        return len(start) + len(end)

    # difflib compares slowly, so it gets only the names that have most characters in common.
    likely = heapq.nlargest(_COMPARED, saved, key=in_common)
    alike = [name for name in difflib.get_close_matches(key, likely) if name not in shifted]
    return [*shifted, *alike][:3]
