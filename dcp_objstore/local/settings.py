"""`Local`: which folder of the node a run may keep copies in, and how much of it."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import TypeAlias

from dcp_objstore.config import check_number
from dcp_objstore.errors import ConfigError

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/")


@dataclass(frozen=True)
class Local:
    """A folder on each node for copies of what a run saves; `local="/mnt/nvme"` is short for it.

        with dos.CheckpointManager(url, local=dos.Local("/dev/shm", max_bytes=64 << 30)) as run:
            start = run.load(state)

    A job that starts again on its nodes reads the copies, and from the bucket only what no node
    has. They can never fail a save or load: what goes wrong with them is one warning and one
    `LocalUnused` event, and the bucket's bytes.

    Attributes:
        folder: an existing folder of this machine: of an NVMe disk, a tmpfs or `/dev/shm`. In it
            `dcp-objstore-<uid>` is made, which only this user may use. A relative path counts from
            where the program is now.
        max_bytes: the most that the copies of all runs of this user may take there. Two states of
            the node's ranks must fit: the newest one, and the one that is being saved. Default
            None: what is free, but a tenth of the file system stays free.

    Raises:
        ConfigError: `folder` is a URL or no path, or `max_bytes` is not a number of bytes.
    """

    folder: str
    max_bytes: int | None = None

    def __post_init__(self) -> None:
        """Check both, and note where the program is now."""
        try:
            folder = os.fsdecode(self.folder)
        except TypeError:
            raise ConfigError(f"local must be a path or dos.Local, got {self.folder!r}") from None
        if not folder or "\0" in folder or _SCHEME.match(folder):
            raise ConfigError(
                f"local must be a folder of this machine, such as '/mnt/nvme', got {folder!r}"
            )
        if self.max_bytes is not None:
            check_number("max_bytes", self.max_bytes, 0, unless="None or ")
        object.__setattr__(self, "folder", os.path.abspath(folder))  # noqa: PTH100 - resolves no link


LocalFolder: TypeAlias = "str | os.PathLike[str] | Local | None"


def local_of(local: LocalFolder) -> Local | None:
    """Return the settings that an argument `local=` stands for.

    Raises:
        ConfigError: it is no path of this machine.
    """
    if local is None or isinstance(local, Local):
        return local
    return Local(local)  # type: ignore[arg-type]  # made a str there
