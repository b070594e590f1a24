"""What every call of DCP is wrapped in: failures are reported once, a single process is fine."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Protocol


class Plugin(Protocol):
    """What `ObjectStoreWriter` and `ObjectStoreReader` have in common."""

    @property
    def checkpoint_id(self) -> str | None:
        """The URL that it is aimed at."""

    def _tell_failed(self, error: BaseException) -> None: ...


@contextlib.contextmanager
def telling_failures(plugin: Plugin | None) -> Iterator[None]:
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


@contextlib.contextmanager
def single_process_is_fine() -> Iterator[None]:
    """Without torch's warning that there is no process group, which here needs none."""
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="torch.distributed is disabled", category=UserWarning
        )
        yield
