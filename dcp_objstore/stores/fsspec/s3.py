"""`ObjectStore` over s3fs, which lets any operation of S3 through.

`call_s3` and its coroutine `_call_s3` take the arguments of botocore's client and add those that
s3fs was made with. s3fs's own verbs have no conditional update, and send parts one after the other.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

from dcp_objstore.errors import DcpObjstoreError
from dcp_objstore.stores.fsspec.errors import is_of_botocore
from dcp_objstore.stores.protocol import RangeReading
from dcp_objstore.stores.ranges import FETCHED_READING, FetchedSource
from dcp_objstore.stores.s3.errors import translate_botocore
from dcp_objstore.stores.s3.store import S3Store, Use
from dcp_objstore.stores.urls import StoreUrl
from dcp_objstore.waiting import STEP_SECONDS, result_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dcp_objstore.stores.fsspec.filesystems import Filesystems


class S3fsStore(S3Store):
    """A store rooted at one URL, over s3fs."""

    def __init__(self, url: StoreUrl, filesystems: Filesystems) -> None:
        super().__init__(url, filesystems, filesystems.checksums, filesystems.endpoint_url)
        self._filesystems = filesystems

    def _place(self, key: str | None) -> dict[str, str]:
        self._filesystems.check_process()
        return super()._place(key)

    def _call(
        self,
        use: Use,
        operation: str,
        arguments: Mapping[str, Any],
        check: Callable[[], None] | None = None,
    ) -> Any:
        fs = self._filesystems.read if use == "read" else self._filesystems.write
        sent = asyncio.run_coroutine_threadsafe(fs._call_s3(operation, **arguments), fs.loop)
        # aiohttp has no time-out for the "100 Continue" before a body.
        seconds = self._filesystems.request_timeout_seconds
        if use == "small":
            seconds = self._filesystems.small_timeout_seconds
        step_seconds = None if check is None else STEP_SECONDS
        try:
            return result_of(sent, seconds, look=check, step_seconds=step_seconds)
        finally:
            sent.cancel()

    def _body(
        self,
        part: Sequence[memoryview],
        check: Callable[[], None] | None,  # noqa: ARG002  `_call` calls it
    ) -> bytes:
        return b"".join(part)

    def _translate(self, error: Exception, *, conditional: bool = False) -> DcpObjstoreError:
        if is_of_botocore(error) or isinstance(error, KeyError):
            return translate_botocore(error, conditional=conditional)
        return self._filesystems.translate(error)

    def _read(
        self, target: Mapping[str, str], max_size_bytes: int
    ) -> tuple[Mapping[str, Any], bytes | None]:
        from fsspec.asyn import sync

        fs = self._filesystems.read

        async def read() -> tuple[Mapping[str, Any], bytes | None]:
            answer = await fs._call_s3("get_object", **target)
            stream = answer["Body"]
            try:
                is_large = answer.get("ContentLength", 0) > max_size_bytes
                return answer, None if is_large else await stream.read()
            finally:
                stream.close()

        found: tuple[Mapping[str, Any], bytes | None] = sync(fs.loop, read)
        return found

    @property
    def range_reading(self) -> RangeReading:
        """See `ObjectStore.range_reading`."""
        return FETCHED_READING

    def _range_source(self, place: Mapping[str, str]) -> FetchedSource:
        return FetchedSource(partial(self._fetch, place))

    def _fetch(self, target: Mapping[str, str], start: int, end: int) -> bytes:
        path = f"{target['Bucket']}/{target['Key']}"
        cat = partial(self._filesystems.read.cat_file, path, start=start, end=end)
        tries = self._filesystems.tries("open_range", target["Key"])
        return bytes(self._filesystems.run(tries, cat))
