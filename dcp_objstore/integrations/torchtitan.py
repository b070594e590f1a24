"""`install` for torchtitan: its `CheckpointManager` keeps a run of steps in a bucket.

torchtitan (0.3) looks at its folder with the functions of `torchtitan.tools.filesystem`, on each
rank by itself. For a URL they use fsspec: its listing is cached and so may differ between ranks,
and its deletion knows neither markers nor pins. For a URL of `dcp_objstore.install`, functions of
this module take their place, and a hook of `BaseCheckpointManager.load` shows all ranks the same
steps. The hooks stay for good; they do nothing for other folders.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

from torchtitan.components.checkpointer import BaseCheckpointManager
from torchtitan.tools import filesystem

from dcp_objstore.checkpoint.delete import check_deletion_grace
from dcp_objstore.checkpoint.names import DOT_METADATA_KEY, MARKER_KEY
from dcp_objstore.distributed.failures import on_first
from dcp_objstore.distributed.groups import sync_group
from dcp_objstore.errors import (
    CheckpointNotFoundError,
    InputError,
    ObjectNotFoundError,
    UnsupportedError,
)
from dcp_objstore.integrations.install import (
    Installation,
    for_urls,
    install as install_for_torch,
    installed_spec,
)
from dcp_objstore.run.housekeeping import Retainer
from dcp_objstore.run.steps import catalogue, step_number, step_numbers, step_url
from dcp_objstore.stores import StoreSpec


class _AgreedSteps(NamedTuple):
    """The steps of a run, which all ranks know alike."""

    run_url: str
    steps: tuple[int, ...]


class _Installed:
    """The hooks that are installed in this process.

    Attributes:
        grace_seconds: the argument of `install`.
        retainers: sweep the runs and know the steps that this job resumed from, by the runs' URLs.
        agreed: during a load, the URL of the run and its steps, the same on all ranks.
    """

    grace_seconds: float = 0.0
    retainers: ClassVar[dict[str, Retainer]] = {}
    agreed: _AgreedSteps | None = None


def install(*, grace_seconds: float = 0.0, **options: Any) -> Installation:
    """Let torchtitan's own `CheckpointManager` keep its steps in a bucket with this library.

    Call it once on every rank, in place of `dcp_objstore.install`, which it calls. From then on, if
    the folder of checkpoints is a URL, torchtitan

    - saves with `ObjectStoreWriter` and loads with `ObjectStoreReader`, in each `async_mode`;
    - resumes all ranks from the same step: the newest that is committed, or that torch's own writer
      completed. Rank 0 lists the run each time that `load` is called;
    - deletes what `keep_latest_k` does not keep, as `dcp_objstore.delete` does. A pinned step, the
      last one that was committed and the one that this job resumed from are kept, and torchtitan
      logs why. After a deletion, once an hour, it sweeps the run.

    Other folders stay torchtitan's.

    Args:
        grace_seconds: keep the objects of a deleted step this long, for jobs that are reading it.
            They go at the first deletion when it is over; what is left when this job ends goes by a
            sweep, a day later. Default 0: they are removed with the step.
        options: those of `dcp_objstore.install`.

    Returns:
        What `dcp_objstore.install` returns. `dcp_objstore.uninstall` ends both.

    Raises:
        UnsupportedError: this version of torchtitan or torch has no place to hook.
        ConfigError, InvalidUrlError: as `dcp_objstore.install`.
    """
    _hook()
    installation = install_for_torch(**options)
    _Installed.grace_seconds = check_deletion_grace(grace_seconds)
    _Installed.retainers = {}
    return installation


@functools.cache
def _hook() -> None:
    """Put our functions in place of torchtitan's, once in a process."""
    ours: dict[str, Callable[..., Any]] = {
        "exists": _exists,
        "isdir": _isdir,
        "isfile": _isfile,
        "listdir": _listdir,
        "rmtree": _rmtree,
    }
    if not all(hasattr(filesystem, name) for name in ours):
        raise UnsupportedError(
            "install() cannot hook this version of torchtitan: torchtitan.tools.filesystem lacks"
            f" one of {', '.join(ours)}. Use torchtitan 0.3"
        )
    for name, function in ours.items():
        setattr(filesystem, name, for_urls(function, getattr(filesystem, name)))
    BaseCheckpointManager.load = _with_agreed_steps(BaseCheckpointManager.load)


def _with_agreed_steps(original: Callable[[Any, int], bool]) -> Callable[[Any, int], bool]:
    """Answer what a load asks about its folder from one listing, which rank 0 makes."""

    @functools.wraps(original)
    def load(self: Any, step: int = -1) -> bool:
        run = installed_spec(getattr(self, "folder", None))  # has none if it is not enabled
        if run is None:
            return original(self, step)
        steps = on_first(lambda: _loadable(run), run.url, sync_group(None, run.config))
        _Installed.agreed = _AgreedSteps(run.url, steps)
        try:
            loaded = original(self, step)
        finally:
            _Installed.agreed = None
        if loaded and steps:
            _retainer(run).resumed = steps[-1] if step == -1 else step
        return loaded

    return load


def _retainer(run: StoreSpec) -> Retainer:
    """Return the one object that deletes and sweeps in a run."""
    retainer = Retainer(run, grace_seconds=_Installed.grace_seconds)
    return _Installed.retainers.setdefault(run.url, retainer)


def _loadable(run: StoreSpec) -> tuple[int, ...]:
    """List the committed steps, and those of torch's own writer, which have only `.metadata`."""
    listed = catalogue(run)
    names = {step.name for step in listed.steps}
    if listed.claim is None:  # with a claim, only steps that carry one count
        names |= {
            name
            for name, objects in listed.objects_at.items()
            if DOT_METADATA_KEY in objects and MARKER_KEY not in objects
        }
    return tuple(sorted(number for name in names if (number := step_number(name)) is not None))


def _agreed(spec: StoreSpec) -> bool | None:
    """Return whether something exists in the run that is being loaded.

    None if it is not in that run, or if nothing is being loaded.
    """
    if _Installed.agreed is None:
        return None
    run_url, steps = _Installed.agreed
    if spec.url == run_url:
        return bool(steps)
    if not spec.url.startswith(f"{run_url}/"):
        return None
    # If the step can be loaded, then so can its metadata.
    url = spec.url.removesuffix(f"/{DOT_METADATA_KEY}")
    return url in {step_url(run_url, step) for step in steps}


def _exists(spec: StoreSpec, _path: Any = None) -> bool:
    """Return whether there is an object, or objects below, for `os.path.exists`."""
    return _isdir(spec) or _isfile(spec)


def _isdir(spec: StoreSpec, _path: Any = None) -> bool:
    """Return whether there are objects below; of an agreed step, whether the ranks agreed on it."""
    agreed = _agreed(spec)
    if agreed is not None:
        return agreed
    return any(True for _ in spec.open().list())


def _isfile(spec: StoreSpec, _path: Any = None) -> bool:
    """Return whether an object exists; of an agreed step, whether the ranks agreed on it."""
    agreed = _agreed(spec)
    folder, name = spec.parent()
    if agreed is not None or folder is None:  # without a folder around it, it is a bucket
        return bool(agreed)
    try:
        folder.open().head(name)
    except ObjectNotFoundError:
        return False
    return True


def _listdir(spec: StoreSpec, _path: Any = None) -> list[str]:
    """Return the names of a run's steps: during a load, those that the ranks agreed on."""
    agreed = _Installed.agreed
    if agreed is not None and agreed.run_url == spec.url:
        steps = agreed.steps
    else:
        steps = step_numbers(spec)
    return [f"step-{step}" for step in steps]


def _rmtree(spec: StoreSpec, _path: Any = None) -> None:
    """Delete a step that torchtitan no longer keeps, then sweep the run."""
    run, name = spec.parent()
    if run is None:
        raise InputError("a whole bucket is not deleted", url=spec.url)
    retainer = _retainer(run)
    if step_number(name) == retainer.resumed is not None:
        raise InputError("this job resumed from this step, so it is kept", url=spec.url)
    # 0: torchtitan claims no run, so this deletes no step of a job that has.
    with contextlib.suppress(CheckpointNotFoundError):
        retainer.deletions.delete(spec, 0, allow_newest=False)
    retainer.sweep()
