"""Tell which non-tensor values can be read without running code.

DCP stores what is not a tensor as the bytes of `torch.save`, and its planner reads them back with
`weights_only=False`, which executes whatever pickle they hold. So each body is test-loaded with
`weights_only=True` before it is handed on. torch's own list decides, with what the user added by
`torch.serialization.add_safe_globals`; nothing process-wide is changed here.
"""

from __future__ import annotations

import functools
import io
import pickle
import warnings
from typing import Final

import torch

from dcp_objstore.errors import CheckpointCorruptError, UntrustedPickleError

# Optimizers store thousands of equal numbers (lr, betas, eps) as equal bodies. A test-load takes
# some 60 microseconds, so verdicts on small bodies are kept: 1024 of up to 4 KiB, 4 MiB at most.
_REMEMBERED: Final = 1024
_REMEMBERED_SIZE_BYTES: Final = 4096
_ZIP_START: Final = b"PK\x03\x04"

# Keys already warned about in this process.
_warned: set[str] = set()


def check_safe(body: bytes, key: str, *, trust_pickle: bool) -> None:
    """Return if `torch.load(body, weights_only=False)` runs no code from the body.

    Args:
        body: what `torch.save` wrote.
        key: the state-dict key, for the error.
        trust_pickle: the user's word that the checkpoint may run code; then nothing is tested,
            and damage shows when the value is loaded.

    Raises:
        UntrustedPickleError: it needs a type that torch does not load by `weights_only=True`.
        CheckpointCorruptError: it is damaged, or not what `torch.save` writes.
    """
    if trust_pickle:
        return
    refused = _refusal(body, key)
    if refused is not None:
        raise UntrustedPickleError(
            f"the value needs {refused}, which could run code when it is unpickled; pass "
            "trust_pickle=True if you trust whoever wrote this checkpoint",
            key=key,
        )


def warn_unsafe_value(body: bytes, key: str, warned: set[str] | None = None) -> None:
    """Warn, once per key, that loading this value will need `trust_pickle=True`.

    Args:
        body: what `torch.save` wrote for the value.
        key: its state-dict key.
        warned: the keys already warned about; extended. Default: a set of this process.

    Raises:
        CheckpointCorruptError: `body` is not what `torch.save` writes.
    """
    seen = _warned if warned is None else warned
    if key in seen:
        return
    refused = _refusal(body, key)
    if refused is not None:
        seen.add(key)
        warnings.warn(
            f"the value of {key!r} needs {refused}: loading this checkpoint will need "
            "trust_pickle=True. Save it as plain Python data or as a tensor to avoid that",
            UserWarning,
            stacklevel=2,
        )


def _refusal(body: bytes, key: str) -> str | None:
    """What keeps torch from loading `body` safely, or None."""
    try:
        if len(body) > _REMEMBERED_SIZE_BYTES:
            return _test_load(body)
        # What the user declared safe is part of the question: it can be taken back.
        return _remembered(bytes(body), frozenset(torch.serialization.get_safe_globals()))
    except CheckpointCorruptError as error:
        raise error.at(key=key) from error.__cause__


@functools.lru_cache(maxsize=_REMEMBERED)
def _remembered(body: bytes, allowed: frozenset[object]) -> str | None:  # noqa: ARG001
    """`_test_load`, asked once per body; `allowed` is only part of the question."""
    return _test_load(body)


def _test_load(body: bytes) -> str | None:
    """Load `body` by `weights_only=True`: what torch refuses in it, or None.

    Raises:
        CheckpointCorruptError: it is no archive of `torch.save`, or damaged.
    """
    try:
        torch.load(io.BytesIO(body), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        # An archive that opens, and whose checksums hold, is refused for what it asks for. Only
        # bytes that are no archive take torch to its old format, which nothing writes any more.
        if not body.startswith(_ZIP_START):
            raise CheckpointCorruptError("the value is not what torch.save writes") from error
        return _unsafe_names(body)
    except Exception as error:
        raise CheckpointCorruptError(
            f"the value cannot be loaded ({type(error).__name__}): it is damaged"
        ) from error
    return None


def _unsafe_names(body: bytes) -> str:
    """The globals in `body` that torch does not allow, as torch names them; runs nothing."""
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(body))
    except (pickle.UnpicklingError, RuntimeError, ValueError, AttributeError):
        names = []  # its disassembler knows only the opcodes of protocol 2
    if not names:
        return "a pickle that torch refuses by weights_only=True"
    shown = ", ".join(name[:200] for name in sorted(names)[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"
