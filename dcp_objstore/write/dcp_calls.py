"""Wrappers around calls of DCP: report each failure once, and accept a single process."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Iterator
from typing import Protocol

_NO_GROUP_TEXT = "torch.distributed is disabled"


# The entry that `warnings.filters` holds for it.
_NO_GROUP_WARNING = ("ignore", re.compile(_NO_GROUP_TEXT, re.IGNORECASE), UserWarning, None, 0)


class Plugin(Protocol):
    """The common part of `ObjectStoreWriter` and `ObjectStoreReader`."""

    @property
    def checkpoint_id(self) -> str | None:
        """The URL of the checkpoint."""

    def _report_failure(self, error: BaseException) -> None: ...


@contextlib.contextmanager
def reporting_failures(plugin: Plugin | None) -> Iterator[None]:
    """Report an error that leaves the block, unless the plug-in has already reported it."""
    try:
        yield
    except BaseException as error:
        if plugin is not None:
            plugin._report_failure(error)
        raise


def aim(plugin: Plugin | None) -> str | None:
    """Return the checkpoint's URL for errors; None if an argument was refused."""
    return None if plugin is None else plugin.checkpoint_id


def single_process_is_fine() -> None:
    """Ignore torch's warning that there is no process group; none is needed here.

    The filter stays in place after the call. `warnings.catch_warnings` would restore the filters of
    all threads to an earlier state, and a save runs at the same time as the program.
    """
    if _NO_GROUP_WARNING not in warnings.filters:
        warnings.filterwarnings("ignore", message=_NO_GROUP_TEXT, category=UserWarning)
