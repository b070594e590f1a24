"""`ObjectStore` over s3fs, which lets any operation of S3 through.

`call_s3` and its coroutine `_call_s3` take the arguments of botocore's client and add those that
s3fs was made with. s3fs's own verbs have no conditional update, and send parts one after the other.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from dcp_objstore.errors import DcpObjstoreError
from dcp_objstore.stores.fsspec.errors import is_of_botocore, translate_fsspec
from dcp_objstore.stores.protocol import RangeReading
from dcp_objstore.stores.ranges import FETCHED_READING, FetchedSource
from dcp_objstore.stores.s3.errors import translate_botocore
from dcp_objstore.stores.s3.store import S3Store
from dcp_objstore.stores.s3.upload import MultipartUpload
from dcp_objstore.stores.urls import StoreUrl

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from dcp_objstore.stores.fsspec.filesystems import Filesystems


class S3fsStore(S3Store):
    """A store rooted at one URL, over s3fs."""

    def __init__(self, url: StoreUrl, filesystems: Filesystems) -> None:
        super().__init__(url, filesystems.checksums)
        self._filesystems = filesystems
        self._fs = filesystems.fs

    @property
    def endpoint_url(self) -> str | None:
        """The server, or None for AWS."""
        return self._filesystems.endpoint_url

    def _client(self, use: Literal["read", "write", "once"]) -> Any:
        return _Operations(self._filesystems.once if use == "once" else self._fs)

    def _body(self, part: Sequence[memoryview], check: Any = None) -> bytes:  # noqa: ARG002
        return b"".join(part)

    def _upload(self, target: Mapping[str, str], max_concurrency: int) -> MultipartUpload:
        upload = super()._upload(target, max_concurrency)
        upload.cancel = upload.client.cancel_parts
        return upload

    def _translate(self, error: Exception, *, conditional: bool = False) -> DcpObjstoreError:
        if is_of_botocore(error) or isinstance(error, KeyError):
            return translate_botocore(error, conditional=conditional)
        return translate_fsspec(error)

    @contextmanager
    def _errors(self, key: str | None, *, conditional: bool = False) -> Iterator[dict[str, str]]:
        with super()._errors(key, conditional=conditional) as target:
            self._filesystems.prepare()
            yield target

    def _read_whole(
        self, target: Mapping[str, str], max_size_bytes: int
    ) -> tuple[Mapping[str, Any], bytes | None]:
        from fsspec.asyn import sync

        async def read() -> tuple[Mapping[str, Any], bytes | None]:
            answer = await self._fs._call_s3("get_object", **target)
            stream = answer["Body"]
            try:
                is_large = answer.get("ContentLength", 0) > max_size_bytes
                return answer, None if is_large else await stream.read()
            finally:
                stream.close()

        found: tuple[Mapping[str, Any], bytes | None] = sync(self._fs.loop, read)
        return found

    @property
    def range_reading(self) -> RangeReading:
        """See `ObjectStore.range_reading`."""
        return FETCHED_READING

    def _range_source(self, place: Mapping[str, str]) -> FetchedSource:
        path = f"{place['Bucket']}/{place['Key']}"
        return FetchedSource(lambda start, end: self._fs.cat_file(path, start=start, end=end))


class _Operations:
    """S3's operations as blocking methods, as boto3's clients have them."""

    def __init__(self, fs: Any) -> None:
        self._fs = fs
        self._parts: set[Future[Any]] = set()

    def __getattr__(self, operation: str) -> Any:
        return partial(self._fs.call_s3, operation)

    def upload_part(self, **arguments: Any) -> Any:
        """Send a part; `cancel_parts` ends it."""
        call = self._fs._call_s3("upload_part", **arguments)
        future = asyncio.run_coroutine_threadsafe(call, self._fs.loop)
        self._parts.add(future)
        try:
            return future.result()
        finally:
            self._parts.discard(future)

    def cancel_parts(self) -> None:
        """End the requests of parts that are under way."""
        for future in list(self._parts):
            future.cancel()
