"""The errors for a state that does not fit a checkpoint, with all keys concerned."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias

from dcp_objstore.errors import StateMismatchError, printable
from dcp_objstore.state.stored import constant_name

if TYPE_CHECKING:
    import torch

# What to do if a tensor of the state has another dtype than the stored one.
OnDtype: TypeAlias = Literal["warn", "error"]

SHOWN_KEYS = 10


def mismatch(summary: str, lines: Sequence[str]) -> StateMismatchError:
    """Return the error that says what is wrong, and lists the first keys.

    Args:
        summary: what is wrong.
        lines: a line for each key.
    """
    lines = list(map(printable, lines))
    more = f"\n  ... and {len(lines) - SHOWN_KEYS} more" if len(lines) > SHOWN_KEYS else ""
    count = "1 key" if len(lines) == 1 else f"{len(lines)} keys"
    shown = "\n  ".join(lines[:SHOWN_KEYS])
    return StateMismatchError(f"{summary} in {count}:\n  {shown}{more}")


def refuse_other_dtypes(tensors: Iterable[tuple[str, str, torch.dtype]]) -> None:
    """Raise if tensors have other dtypes than were saved.

    Args:
        tensors: the key of each tensor, torch's name of the saved dtype, and the state's dtype.

    Raises:
        StateMismatchError: some have.
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
