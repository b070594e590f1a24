"""What every call of DCP is wrapped in: failures are reported once, a single process is fine."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Iterator
from typing import Protocol

_NO_GROUP_TEXT = "torch.distributed is disabled"


# As `warnings.filters` holds it.
_NO_GROUP_WARNING = ("ignore", re.compile(_NO_GROUP_TEXT, re.IGNORECASE), UserWarning, None, 0)


class Plugin(Protocol):
    """What `ObjectStoreWriter` and `ObjectStoreReader` have in common."""

    @property
    def checkpoint_id(self) -> str | None:
        """The URL that it is aimed at."""

    def _tell_failed(self, error: BaseException) -> None: ...


@contextlib.contextmanager
def reporting_failures(plugin: Plugin | None) -> Iterator[None]:
    """Tell of an error that leaves, unless the plug-in has told of it itself."""
    try:
        yield
    except BaseException as error:
        if plugin is not None:
            plugin._tell_failed(error)
        raise


def aim(plugin: Plugin | None) -> str | None:
    """The checkpoint's URL, for errors; None where the URL or another argument was refused."""
    return None if plugin is None else plugin.checkpoint_id


def single_process_is_fine() -> None:
    """Ignore torch's warning that there is no process group, which here needs none.

    From now on, not only during a call: `warnings.catch_warnings` puts back the filters of all
    threads as they were when it began, and a save runs beside the program.
    """
    if _NO_GROUP_WARNING not in warnings.filters:
        warnings.filterwarnings("ignore", message=_NO_GROUP_TEXT, category=UserWarning)
