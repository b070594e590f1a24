"""`ObjectStore` over gcsfs: creates by generation, and body and generation from one answer."""

from __future__ import annotations

from collections.abc import Mapping
from email.utils import parsedate_to_datetime

from dcp_objstore.errors import UnsupportedError
from dcp_objstore.stores.answers import check_fits, check_whole
from dcp_objstore.stores.fsspec.store import FsspecStore
from dcp_objstore.stores.protocol import IfAbsent, ObjectMeta, Precondition, Version


class GcsfsStore(FsspecStore):
    """A store rooted at one URL, over gcsfs.

    An object is created conditionally (`ifGenerationMatch=0`), but gcsfs has no call for an update
    against a generation. A large object is one resumable upload, whose parts go one after the
    other.
    """

    def _put(
        self, path: str, body: bytes, precondition: Precondition | None, *, retry: bool
    ) -> Version:
        if precondition is not None and not isinstance(precondition, IfAbsent):
            raise UnsupportedError("gcsfs cannot replace an object conditionally")
        fs = self._filesystems.fs if retry else self._filesystems.once
        mode = "overwrite" if precondition is None else "create"
        answer = fs.pipe_file(path, body, mode=mode)
        if isinstance(answer, Mapping):
            return Version(None, str(answer["generation"]))
        return self._meta("", self._info(path)).version  # large: it tells the upload's address

    def _get(self, key: str, path: str, max_size_bytes: int) -> tuple[bytes, ObjectMeta]:
        meta = self._meta(key, self._info(path))
        check_fits(meta.size_bytes, max_size_bytes)
        headers, body = self._fs.call("GET", self._fs.url(path))
        generation = headers["X-Goog-Generation"]
        if meta.version.version != generation:  # rewritten in between; the body's own then
            modified = parsedate_to_datetime(headers["Last-Modified"])
            meta = ObjectMeta(key, len(body), Version(None, generation), modified)
        check_fits(len(body), max_size_bytes)
        check_whole(len(body), meta.size_bytes)
        return body, meta
