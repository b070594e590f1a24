"""What every call of DCP is wrapped in: failures are reported once, a single process is fine."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING

from dcp_objstore.read.reader import ObjectStoreReader
from dcp_objstore.write.writer import ObjectStoreWriter

if TYPE_CHECKING:
    pass


@contextlib.contextmanager
def telling_failures(plugin: ObjectStoreWriter | ObjectStoreReader | None) -> Iterator[None]:
    """Tell of an error that leaves, unless the plug-in has told of it itself."""
    try:
        yield
    except BaseException as error:
        if plugin is not None:
            plugin._tell_failed(error)
        raise


def aim(plugin: ObjectStoreWriter | ObjectStoreReader | None) -> str | None:
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
