"""Tell which non-tensor values can be read without running code.

DCP stores what is not a tensor as the bytes of `torch.save`, and its planner reads them back with
`weights_only=False`, which executes whatever pickle they hold. So each body is test-loaded with
`weights_only=True` before it is handed on. torch's own list decides, with what the user added by
`torch.serialization.add_safe_globals`; and this library's list of values that run nothing
(`vetting.py`). Nothing process-wide is changed here.
"""

from __future__ import annotations

import functools
import io
import os
import pickle
import warnings
import zipfile
from typing import Final

import torch

from dcp_objstore.compat.archive import ZIP_START
from dcp_objstore.compat.vetting import vet
from dcp_objstore.errors import CheckpointCorruptError, UntrustedPickleError

# Optimizers store thousands of equal numbers (lr, betas, eps) as equal bodies. A test-load takes
# some 60 microseconds, so verdicts on small bodies are kept: 1024 of up to 4 KiB, 4 MiB at most.
_REMEMBERED: Final = 1024
_REMEMBERED_SIZE_BYTES: Final = 4096

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
        UntrustedPickleError: it needs a type that torch does not load by `weights_only=True`, and
            that is not on our list.
        CheckpointCorruptError: torch cannot read it. A flipped bit that leaves it readable passes
            here (torch ignores the archive's checksums); block digests are there to find that.
    """
    if trust_pickle:
        return
    refused = _refusal(body, key)
    if refused is not None:
        raise UntrustedPickleError(
            f"the value needs {refused}, which could run code when it is unpickled. If you know it"
            " to be harmless, declare it by torch.serialization.add_safe_globals before you load."
            " trust_pickle=True turns this check off for all values: pass it only if you trust"
            " the author of this checkpoint",
            key=key,
        )


def warn_unsafe_value(body: bytes, key: str, warned: set[str] | None = None) -> None:
    """Warn, once per key, that this value will not load by default.

    Args:
        body: what `torch.save` wrote for the value.
        key: its state-dict key.
        warned: the keys already warned about; extended. Default: a set of this process.
    """
    seen = _warned if warned is None else warned
    if key in seen:
        return
    try:
        refused = _refusal(body, key)
    except CheckpointCorruptError:  # a planner's own format, which is its affair
        seen.add(key)
        warnings.warn(
            f"the value of {key!r} is not what torch.save writes: loading this checkpoint will"
            " need trust_pickle=True and a planner that can read it",
            UserWarning,
            stacklevel=2,
        )
        return
    if refused is not None:
        seen.add(key)
        warnings.warn(
            f"the value of {key!r} needs {refused}: loading it will need"
            " torch.serialization.add_safe_globals, or trust_pickle=True. Save it as plain Python"
            " data or as a tensor to avoid that",
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
        CheckpointCorruptError: torch cannot read it, or should not even try.
    """
    inert = vet(body)
    try:
        torch.load(io.BytesIO(body), map_location="cpu", weights_only=True)
    except Exception as error:
        unsafe = _unsafe_globals(body) if isinstance(error, pickle.UnpicklingError) else None
        if inert and unsafe is not None and inert.issuperset(unsafe) and not _forced():
            _load_inert(body)
            return None
        refused = refused_globals(body, error, inert)
        if refused is not None:
            return refused
        if isinstance(error, pickle.UnpicklingError):
            raise CheckpointCorruptError(
                "the value is damaged, or not what torch.save writes"
            ) from error
        raise CheckpointCorruptError(
            f"the value cannot be loaded ({type(error).__name__}): it is damaged"
        ) from error
    return None


def _forced() -> bool:
    """Whether torch is set to load by `weights_only=True` whatever it is asked."""
    forced = os.environ.get("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "0")
    return forced.lower() in ("1", "y", "yes", "true")


def _load_inert(body: bytes) -> None:
    """Load a value that is known to run nothing, as planners do.

    Raises:
        CheckpointCorruptError: it cannot be loaded.
    """
    try:
        torch.load(io.BytesIO(body), map_location="cpu", weights_only=False)
    except Exception as error:
        raise CheckpointCorruptError(
            f"the value cannot be loaded ({type(error).__name__}): it is damaged"
        ) from error


def refused_globals(
    body: bytes, error: Exception, inert: frozenset[str] = frozenset()
) -> str | None:
    """What torch refused in `body`, if that is why `weights_only=True` raised `error`; else None.

    Runs nothing from the body.

    Args:
        inert: names that are not reported where others keep it from being loaded.
    """
    # Only bytes that are no archive take torch to its old format, which DCP never writes.
    if not isinstance(error, pickle.UnpicklingError) or not body.startswith(ZIP_START):
        return None
    unsafe = _unsafe_globals(body)
    if not unsafe:
        # None, and the archive's checksums, which torch.load ignores, do not hold: it is damaged.
        return "a pickle that torch refuses by weights_only=True" if _is_whole(body) else None
    names = sorted(unsafe - inert or unsafe)
    shown = ", ".join(name[:200] for name in names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"


def _unsafe_globals(body: bytes) -> set[str] | None:
    """The globals in `body` that torch does not allow, as torch names them; runs nothing.

    None where torch cannot tell: it knows only protocol 2, and damage makes it raise anything.
    """
    try:
        return set(torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(body)))
    except Exception:  # noqa: BLE001 - as above
        return None


def _is_whole(body: bytes) -> bool:
    """Whether every record of the archive has its checksum."""
    try:
        with zipfile.ZipFile(io.BytesIO(body)) as archive:
            return archive.testzip() is None
    except Exception:  # noqa: BLE001 - hostile archives make zipfile raise anything
        return False
