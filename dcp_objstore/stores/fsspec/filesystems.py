"""`Filesystems`: the filesystems of fsspec that carry the requests to one bucket."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from dcp_objstore.errors import (
    ForkedProcessError,
)
from dcp_objstore.stores.fsspec.errors import judge_fsspec
from dcp_objstore.stores.retries import Requests

if TYPE_CHECKING:
    from collections.abc import Callable

    from dcp_objstore.config import TransferConfig
    from dcp_objstore.stores.errors import Failure
    from dcp_objstore.stores.urls import StoreUrl


class Filesystems(Requests):
    """The filesystems that carry the requests to one bucket.

    What failed over s3fs is sent again by its adapter. Other filesystems have retries of their own,
    which cannot be seen from here.

    Args:
        url: a URL of the bucket; its prefix is not used.
        config: time-outs and retries.
        read: the filesystem for reads.
        write: the filesystem for writes. It differs in its time-outs, where those are ours to set.
        endpoint_url: the server, where the filesystem has such an option.
        judge: a function that says what an error of the filesystems means.
    """

    def __init__(
        self,
        url: StoreUrl,
        config: TransferConfig,
        read: Any,
        write: Any = None,
        *,
        endpoint_url: str | None = None,
        judge: Callable[[Exception], Failure] = judge_fsspec,
    ) -> None:
        """Keep the filesystems, and switch off their caches of listings."""
        super().__init__(
            config,
            judge,
            endpoint_url=endpoint_url,
            scheme=url.scheme,
            bucket=url.bucket,
        )
        self.read = read
        self.write = read if write is None else write
        self.request_timeout_seconds = config.request_timeout_seconds
        self._pid = os.getpid()
        for fs in (self.read, self.write):
            if hasattr(getattr(fs, "dircache", None), "use_listings_cache"):
                # A checkpoint must not be judged by what was there some time ago. Set here, because
                # not every filesystem takes the option: sftp's passes all it is given to paramiko.
                fs.dircache.use_listings_cache = False

    def check_process(self) -> None:
        """Raise `ForkedProcessError` if the process was forked from the one that made them."""
        if self._pid != os.getpid() and self.read.async_impl:
            raise ForkedProcessError(
                f"this store was opened in process {self._pid}, from which process {os.getpid()}"
                " was forked; its event loop is not here. Open it again in this process"
            )
