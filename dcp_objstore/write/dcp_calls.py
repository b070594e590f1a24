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
from dcp_objstore.write.api import _NO_GROUP_TEXT, _NO_GROUP_WARNING


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


def single_process_is_fine() -> None:
    """Ignore torch's warning that there is no process group, which here needs none.

    From now on, not only during a call: `warnings.catch_warnings` puts back the filters of all
    threads as they were when it began, and a save runs beside the program.
    """
    if _NO_GROUP_WARNING not in warnings.filters:
        warnings.filterwarnings("ignore", message=_NO_GROUP_TEXT, category=UserWarning)
