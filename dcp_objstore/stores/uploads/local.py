"""Temporary objects that a killed process left on `file://`: there, what uploads are on S3.

An object is written under a temporary name in its folder and then renamed (`local`). A process that
is killed in between leaves the temporary object, which `list` never shows. A sweep removes those
older than its grace period.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dcp_objstore.errors import StoreUnavailableError
from dcp_objstore.stores.local import TEMPORARY, key_of_temporary
from dcp_objstore.stores.uploads.unfinished import UnfinishedUpload


class LocalUploads:
    """The temporary objects below one folder, as `Uploads`. Made by `open_uploads`.

    `initiated` is the time of the last write: one that is still growing is young.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    def below(self, prefix: str) -> LocalUploads:
        """The same, of a folder further down; an empty prefix is this one."""
        return LocalUploads(self._root / prefix)

    def list(self) -> Sequence[UnfinishedUpload]:
        """See `Uploads`.

        Raises:
            StoreUnavailableError: the file system failed.
        """
        found = []
        for place in sorted(self._root.rglob(TEMPORARY)):
            try:
                status = place.stat()
            except FileNotFoundError:
                continue  # named or removed since the folder was read
            except OSError as error:
                raise StoreUnavailableError(f"{error}", url=f"file://{self._root}") from error
            folder = place.parent.relative_to(self._root)
            key = str(folder / key_of_temporary(place.name))
            written = datetime.fromtimestamp(status.st_mtime, tz=UTC)
            upload_id = str(place.relative_to(self._root))
            found.append(UnfinishedUpload(key, upload_id, written, status.st_size))
        return found

    def abort(self, upload: UnfinishedUpload) -> None:
        """See `Uploads`.

        Raises:
            StoreUnavailableError: it cannot be removed.
        """
        try:
            (self._root / upload.upload_id).unlink(missing_ok=True)
        except OSError as error:
            raise StoreUnavailableError(f"{error}", url=f"file://{self._root}") from error

    def lifecycle_rules(self) -> Sequence[Mapping[str, Any]]:
        """A folder has none."""
        return ()
