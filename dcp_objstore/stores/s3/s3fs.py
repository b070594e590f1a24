"""`ObjectStore` over s3fs, and the making of the filesystems that it needs.

The requests are sent by the client of aiobotocore that s3fs has made (`set_session` returns it):
s3fs's own verbs have no conditional update, and send the parts of an upload one after the other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any

from dcp_objstore.config import MIB, TransferConfig
from dcp_objstore.stores import errors
from dcp_objstore.stores.credentials import Credentials
from dcp_objstore.stores.errors import ErrorDetails
from dcp_objstore.stores.fsspec.filesystems import Filesystems, is_from, read_fsspec
from dcp_objstore.stores.ranges import FETCHED_READING, FetchedSource
from dcp_objstore.stores.retries import READ_PROGRESS_SECONDS
from dcp_objstore.stores.s3.credentials import keys_of_environment
from dcp_objstore.stores.s3.endpoint import s3_server
from dcp_objstore.stores.s3.errors import read_botocore
from dcp_objstore.stores.s3.options import S3Options
from dcp_objstore.stores.s3.store import (
    S3Requests,
    S3Store,
    Use,
    botocore_settings,
    check_range_answer,
)
from dcp_objstore.stores.s3.upload import Checksums, checksums_for
from dcp_objstore.stores.urls import StoreUrl
from dcp_objstore.threads import STEP_SECONDS, result_of

S3FS = "s3fs.S3FileSystem"  # others call themselves `s3` as well


def read_s3fs(error: Exception, *, conditional: bool = False) -> ErrorDetails:
    """Read what s3fs raised: an error of botocore, of aiohttp, or a builtin one."""
    if is_from(error, "botocore") or isinstance(error, (KeyError, RecursionError)):
        return read_botocore(error, conditional=conditional)
    return read_fsspec(error)


judge_s3fs = partial(errors.judge, read=read_s3fs)


class S3Filesystems(S3Requests, Filesystems):
    """The filesystems of s3fs that carry the requests to one bucket.

    Args:
        args: the positional arguments of `Filesystems`.
        checksums: the checksums that go with bodies.
        settings: further arguments of `Filesystems`.
    """

    def __init__(self, *args: Any, checksums: Checksums, **settings: Any) -> None:
        Filesystems.__init__(self, *args, judge=judge_s3fs, **settings)
        self.checksums = checksums
        # s3fs keeps them for its own verbs. They are the user's where the filesystem was given.
        self.payer, self.sealing = self.read.req_kw, self.read.s3_additional_kwargs


class S3fsStore(S3Store):
    """A store rooted at one URL, over s3fs."""

    range_reading = FETCHED_READING
    _read_details = staticmethod(read_s3fs)

    def __init__(self, url: StoreUrl, filesystems: S3Filesystems) -> None:
        super().__init__(url, filesystems)
        self._filesystems = filesystems

    def _call(
        self,
        use: Use,
        operation: str,
        arguments: Mapping[str, Any],
        check: Callable[[], None] | None = None,
    ) -> Any:
        filesystems = self._filesystems
        fs = filesystems.read if use == "read" else filesystems.write
        # `_run` ends the wait: aiohttp has no time-out for the server's "100 Continue", which
        # comes before a body is sent.
        seconds = filesystems.request_timeout_seconds
        if use == "small":
            seconds = filesystems.small_timeout_seconds
        return self._run(_send(fs, operation, arguments), seconds, check)

    def _run(
        self,
        coroutine: Coroutine[Any, Any, Any],
        seconds: float | None = None,
        check: Callable[[], None] | None = None,
    ) -> Any:
        """Run a coroutine in the event loop of s3fs and return its result.

        Args:
            seconds: the time-out. Default: none.
            check: a function that is called every `STEP_SECONDS` during the wait; it ends the wait
                by raising.

        Raises:
            TimeoutError: the coroutine has not ended in time.
            Also what it or `check` raises.
        """
        future = asyncio.run_coroutine_threadsafe(coroutine, self._filesystems.read.loop)
        step_seconds = None if check is None else STEP_SECONDS
        try:
            return result_of(future, seconds, check=check, step_seconds=step_seconds)
        finally:
            future.cancel()  # does nothing if the coroutine has ended

    def _body(
        self,
        part: Sequence[memoryview],
        check: Callable[[], None] | None,  # noqa: ARG002  `_call` calls it
    ) -> bytes:
        return b"".join(part)

    def _read(
        self, target: Mapping[str, str], max_size_bytes: int
    ) -> tuple[Mapping[str, Any], bytes | None]:
        async def read() -> tuple[Mapping[str, Any], bytes | None]:
            answer = await _send(self._filesystems.read, "get_object", target)
            stream = answer["Body"]
            async with stream:
                if "ContentLength" not in answer:  # the body comes in chunks
                    # Read just beyond the limit at most: the caller refuses what is larger.
                    body = bytearray()
                    while len(body) <= max_size_bytes and (piece := await stream.read(MIB)):
                        body += piece
                    return {**answer, "ContentLength": len(body)}, bytes(body)
                is_large = answer["ContentLength"] > max_size_bytes
                return answer, None if is_large else await stream.read()

        # Without a time-out here, as botocore's own begins anew with each piece of the body.
        answer_and_body: tuple[Mapping[str, Any], bytes | None] = self._run(read())
        return answer_and_body

    def _range_source(self, place: Mapping[str, str]) -> FetchedSource:
        return FetchedSource(partial(self._fetch, place), lambda: self._head(dict(place)).version)

    def _fetch(self, target: Mapping[str, str], start: int, end: int) -> bytes:
        arguments = {**target, "Range": f"bytes={start}-{end - 1}"}
        answer, body = self._read_again("open_range", arguments, end - start)
        check_range_answer(answer, start, end)
        return bytes(body or b"")


async def _send(fs: Any, operation: str, arguments: Mapping[str, Any]) -> Any:
    """Send the request of an operation by the client of a filesystem of s3fs."""
    client = await fs.set_session()
    return await getattr(client, operation)(**arguments)


def make_s3fs(
    cls: Any, url: StoreUrl, settings: S3Options, config: TransferConfig
) -> S3Filesystems:
    """Make a filesystem for reads and one for writes, which waits longer for the next bytes."""
    if not (settings.anon or settings.key or settings.profile):
        # Only to raise an error if these keys cannot be sent; botocore reads them by itself.
        keys_of_environment()
    # These credentials name nothing. botocore looks up in the profile what the options leave out.
    endpoint_url, _ = s3_server(settings, Credentials("fsspec"))
    filesystems = [
        sending_once(
            cls,
            endpoint_url=endpoint_url,
            anon=settings.anon,
            key=settings.key,
            secret=settings.secret,
            token=settings.token,
            profile=settings.profile,
            requester_pays=settings.requester_pays,
            s3_additional_kwargs=settings.encryption,
            client_kwargs={
                "verify": None if settings.verify is True else settings.verify,
                "region_name": settings.region,
            },
            config_kwargs=botocore_settings(
                config, settings.addressing_style, seconds, sign_payload=settings.sign_payload
            ),
        )
        for seconds in (
            min(READ_PROGRESS_SECONDS, config.request_timeout_seconds),
            config.request_timeout_seconds,
        )
    ]
    checksums = checksums_for(settings, endpoint_url)
    return S3Filesystems(url, config, *filesystems, endpoint_url=endpoint_url, checksums=checksums)


def sending_once(cls: Any, /, *args: Any, **options: Any) -> Any:
    """Make a filesystem that is not shared, whose botocore sends each request once.

    Args:
        cls: `s3fs.S3FileSystem`.
        args: its positional arguments.
        options: its options.
    """
    config = {**(options.pop("config_kwargs", None) or {}), "retries": {"total_max_attempts": 1}}
    options["skip_instance_cache"] = True
    return cls(*args, config_kwargs=config, **options)
