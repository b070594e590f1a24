"""Check that a pickled value can be read without running code.

DCP stores a value that is not a tensor with `torch.save`, and its planner reads it back with
`weights_only=False`, which executes any code in the pickle. So each value is first test-loaded with
`weights_only=True`. A value is accepted if torch allows its types (including those that the user
has declared with `torch.serialization.add_safe_globals`), or if they are on this package's list of
types that run no code (`compat.vet`). Nothing process-wide is changed.
"""

from __future__ import annotations

import functools
import io
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any, Final

import torch

from dcp_objstore.compat.archive import ZIP_START, ArchiveError
from dcp_objstore.compat.inert_pickle import HostilePickleError
from dcp_objstore.compat.vet import vet
from dcp_objstore.distributed.plugin import by_cause
from dcp_objstore.errors import (
    CheckpointCorruptError,
    DcpObjstoreError,
    UnsupportedError,
    UntrustedPickleError,
)
from dcp_objstore.observe.report import first_few, warn

# Optimizers store thousands of equal numbers (lr, betas, eps) as equal bodies, and a test-load
# takes about 60 microseconds. So results are kept for 1024 bodies of up to 4 KiB.
_CACHED_RESULTS: Final = 1024
_CACHED_SIZE_BYTES: Final = 4096
_NOT_OF_TORCH: Final = (ArchiveError, HostilePickleError, pickle.UnpicklingError)


def check_safe(body: bytes, key: str, *, trust_pickle: bool, is_verified: bool = False) -> None:
    """Check that `torch.load(body, weights_only=False)` runs no code from the body.

    Args:
        body: the bytes that `torch.save` wrote.
        key: the state-dict key, for the error.
        trust_pickle: whether the user allows the checkpoint to run code. If so, nothing is tested,
            and damage is found when the value is loaded.
        is_verified: whether the bytes have the digests that they were saved with.

    Raises:
        UntrustedPickleError: the value needs a type that neither torch (with `weights_only=True`)
            nor this package allows.
        CheckpointCorruptError: the value is damaged. A flipped bit that leaves it readable is not
            found here, because torch ignores the archive's checksums; block digests find it.
        DcpObjstoreError: the value cannot be built, as `not_built` says.
    """
    if trust_pickle:
        return
    try:
        refused = _refusal(body)
    except Exception as error:
        raise not_built(error, body, key, is_verified=is_verified) from error
    if refused is not None:
        raise UntrustedPickleError(
            f"the value needs {refused}, which could run code when it is unpickled",
            advice="if you know it to be harmless, declare it by"
            " torch.serialization.add_safe_globals before you load. trust_pickle=True turns this"
            " check off: pass it only if you trust the author",
            key=key,
        )


def check_vetted(body: bytes, key: str) -> None:
    """Check that `torch.load(body, weights_only=True)` can only refuse it, and do no harm.

    Raises:
        UntrustedPickleError: it is not what `torch.save` writes.
    """
    try:
        vet(body)
    except (ArchiveError, HostilePickleError) as error:
        raise not_built(error, body, key, is_verified=True) from error


def warn_unsafe_value(body: bytes, key: str, warned: set[str]) -> None:
    """Warn, once per key, if a pickled value will not load by default; before it is uploaded.

    Args:
        body: the bytes that `torch.save`, or a planner with its own format, wrote for the value.
        key: its state-dict key.
        warned: keys for which a warning was given; this adds to them.
    """
    if key in warned:
        return
    try:
        refused = _refusal(body)
        if refused is None:
            return
        text = f"a load of {key!r} needs {refused} in add_safe_globals, or trust_pickle=True"
    except _NOT_OF_TORCH:  # a planner may have its own format
        text = (
            f"the value of {key!r} is not what torch.save writes: loading this checkpoint will"
            " need trust_pickle=True and a planner that can read it"
        )
    except Exception as error:  # noqa: BLE001 - whatever the value's class does; the save goes on
        text = (
            f"the value of {key!r} is saved, but does not load again in this program"
            f" ({type(error).__name__}: {error})"
        )
    warned.add(key)
    warn(text)


def not_built(error: Exception, body: bytes, key: str, *, is_verified: bool) -> DcpObjstoreError:
    """Return what is raised because a value cannot be built of its bytes, by the cause.

    It is damaged only if a digest or a checksum says so. Otherwise the bytes are what was saved,
    and the program or the machine has to change.

    Args:
        error: the error that building it raised.
        body: the bytes that `torch.save` wrote, or a planner that has its own format.
        key: the state-dict key.
        is_verified: whether the bytes have the digests that they were saved with.
    """
    if not is_verified and not _is_whole(body):
        return CheckpointCorruptError(
            f"the value is damaged, or not what torch.save writes: {type(error).__name__}: {error}",
            key=key,
        )
    # torch's reader of archives names itself in its errors.
    if isinstance(error, _NOT_OF_TORCH) or "PytorchStreamReader" in str(error):
        return UntrustedPickleError(
            f"this is not what torch.save writes ({str(error).partition(chr(10))[0]})."
            " trust_pickle=True passes it to the planner as it is (only if you trust its author)",
            key=key,
        )
    problem = "the bytes of this value are what was saved, but it could not be built"
    advice = (
        "its class has changed since the save or is not installed, or the planner does not take it."
        " Load it with the code that saved it, or leave this key out"
    )
    if type(error) is RuntimeError:  # as torch calls sizes and strides that do not fit a storage
        text = f"{problem} ({type(error).__name__}: {error}): {advice}"
        return UnsupportedError(text, key=key)
    return by_cause(error, problem, key, advice)


def _refusal(body: bytes) -> str | None:
    """Return the types that prevent torch from loading `body` safely, or None.

    Raises what `_test_load` raises.
    """
    if len(body) > _CACHED_SIZE_BYTES:
        return _test_load(body)
    # The types that the user has declared are part of the key, because they may change.
    return _cached_refusal(bytes(body), frozenset(torch.serialization.get_safe_globals()))


@functools.lru_cache(maxsize=_CACHED_RESULTS)
def _cached_refusal(body: bytes, allowed: frozenset[object]) -> str | None:  # noqa: ARG001
    """Return what `_test_load` returns; `allowed` is only part of the cache's key."""
    return _test_load(body)


def _test_load(body: bytes) -> str | None:
    """Load `body` with `weights_only=True`; return what torch refuses in it, or None.

    Raises:
        ArchiveError, HostilePickleError, UnpicklingError: torch cannot read the body, or it would
            be unsafe to try.
        Exception: whatever the class of a value raises.
    """
    inert = vet(body)
    try:
        unpickled(io.BytesIO(body), weights_only=True)
    except pickle.UnpicklingError as error:
        unsafe = _unsafe_globals(body)
        runs_nothing = inert and unsafe is not None and inert.issuperset(unsafe)
        if runs_nothing and not _weights_only_is_forced():
            unpickled(io.BytesIO(body), weights_only=False)
            return None
        refused = refused_globals(body, error, inert)
        if refused is None:
            raise
        return refused
    return None


def unpickled(body: io.BytesIO | Path, *, weights_only: bool, mmap: bool = False) -> Any:
    """Return what `torch.save` has written, whatever the program's setting for `mmap` is.

    What others may have written has to pass `vet` first, or the user trusts it: `check_safe` does
    that for values. Nothing else here unpickles what comes from a store.
    """
    return torch.load(body, map_location="cpu", mmap=mmap, weights_only=weights_only)


def _weights_only_is_forced() -> bool:
    """Return whether the environment forces torch to load with `weights_only=True`."""
    forced = os.environ.get("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "0")
    return forced.lower() in ("1", "y", "yes", "true")


def refused_globals(
    body: bytes, error: Exception, inert: frozenset[str] = frozenset()
) -> str | None:
    """Return what torch refused in `body`, or None if it raised `error` for another reason.

    Runs nothing from the body.

    Args:
        body: the bytes that torch could not load with `weights_only=True`.
        error: the error that torch raised.
        inert: names of globals to leave out, unless there are no others.
    """
    # Torch reads anything but an archive in its old format, which DCP never writes.
    if not isinstance(error, pickle.UnpicklingError) or not body.startswith(ZIP_START):
        return None
    unsafe = _unsafe_globals(body)
    if not unsafe:
        return None
    return first_few([name[:200] for name in sorted(unsafe - inert or unsafe)], 5)


def _unsafe_globals(body: bytes) -> set[str] | None:
    """Return the globals in `body` that torch does not allow. Runs nothing.

    Returns None if torch cannot tell: it reads only protocol 2, and damage may raise any error.
    """
    try:
        return set(torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(body)))
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 - as the docstring says
        return None


def _is_whole(body: bytes) -> bool:
    """Return whether every record of the archive has its checksum."""
    try:
        with zipfile.ZipFile(io.BytesIO(body)) as archive:
            return archive.testzip() is None
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 - hostile archives make zipfile raise anything
        return False
