"""Unfinished uploads, and what can be asked of the uploads below a root."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol


@dataclass(frozen=True, slots=True)
class UnfinishedUpload:
    """A multipart upload that was neither completed nor aborted.

    Attributes:
        key: of the object that it would become, relative to the root that was looked below.
        upload_id: the store's.
        initiated: when it began, by the store's clock (timezone-aware).
        size_bytes: of its parts.
    """

    key: str
    upload_id: str
    initiated: datetime
    size_bytes: int


class Uploads(Protocol):
    """Looks at the multipart uploads below one root."""

    def list(self) -> Sequence[UnfinishedUpload]:
        """Those in progress or orphaned."""
        ...

    def abort(self, upload: UnfinishedUpload) -> None:
        """Remove its parts; one that has gone meanwhile is no error."""
        ...
