"""`ObjectStore` over boto3, for s3://. It carries the requests where obstore cannot.

It works under `moto.mock_aws`, which catches botocore's requests in the process, and takes
credentials from whatever boto3 knows (SSO, assumed roles, plug-ins). It costs more processor time:
see docs/stores.md.

Facts about boto3 1.44 that shape this module (each is pinned by a test):
- botocore is told to send each request once. It does follow a redirect to the bucket's region.
- A HEAD's answer has no `<Code>`, so a failed HEAD is asked again as a GET.
- A readable body is sent after the server's "100 Continue".
"""

from __future__ import annotations

import importlib.util
import io
import threading
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from itertools import accumulate
from typing import Any

from dcp_objstore.config import MIB, TransferConfig
from dcp_objstore.errors import ConfigError
from dcp_objstore.forking import PerProcess
from dcp_objstore.stores.options import parse
from dcp_objstore.stores.protocol import RangeReading, Version
from dcp_objstore.stores.ranges import Answer, BrokenOffError, RetriedSource
from dcp_objstore.stores.retries import READ_PROGRESS_SECONDS
from dcp_objstore.stores.s3.credentials import no_s3_credentials, session_of
from dcp_objstore.stores.s3.endpoint import is_virtual, s3_server
from dcp_objstore.stores.s3.errors import judge_botocore
from dcp_objstore.stores.s3.options import S3Options
from dcp_objstore.stores.s3.store import (
    S3Requests,
    S3Store,
    Use,
    botocore_settings,
    check_range_answer,
)
from dcp_objstore.stores.s3.upload import checksums_for
from dcp_objstore.stores.urls import StoreUrl

_conditional_writes = PerProcess(threading.Lock)

# Up to this size a body is copied together: a readable one makes botocore wait for the server's
# "100 Continue" before it sends anything, a round trip more.
_SMALL_BYTES = 64 * 1024
# The bytes that are handed over in one go. The HTTP client asks for 128 KiB each time, and every
# call into a socket may have to wait for the interpreter's lock.
_SEND_BYTES = 4 * MIB
# The bytes that are received in one go: the client copies once more, which costs little while they
# are in the cache.
_RECEIVE_BYTES = MIB


class Boto3Store(S3Store):
    """A store rooted at one URL."""

    # Ranges are read 1 MiB at a time, which the client copies.
    range_reading = RangeReading(memory_bytes=2 * _RECEIVE_BYTES)

    def __init__(self, url: StoreUrl, clients: Boto3Clients) -> None:
        super().__init__(url, clients)
        self._clients = clients

    def _call(
        self,
        use: Use,
        operation: str,
        arguments: Mapping[str, Any],
        check: Callable[[], None] | None = None,  # noqa: ARG002  `JoinedBuffers` calls it
    ) -> Any:
        return getattr(self._clients.get(use), operation)(**arguments)

    def _body(
        self, part: Sequence[memoryview], check: Callable[[], None] | None
    ) -> bytes | JoinedBuffers:
        """Return the buffers in the form that boto3 takes as `Body`."""
        return b"".join(part) if sum(map(len, part)) <= _SMALL_BYTES else JoinedBuffers(part, check)

    def _conditional_write(self) -> threading.Lock:
        """Return the lock that is held during a conditional write.

        `moto.mock_aws` answers in the thread that asks and has no locks: of several threads that
        create an object there, two could win. A server sees to this itself; there such writes are
        so few that it does not matter.
        """
        return _conditional_writes.here

    def _read(
        self, target: Mapping[str, str], max_size_bytes: int
    ) -> tuple[Mapping[str, Any], bytearray | None]:
        answer = self._clients.get("read").get_object(**target)
        with closing(ReceivedBody(answer["Body"])) as body:
            if "ContentLength" not in answer:  # the body comes in chunks
                received = body.in_chunks(max_size_bytes)
                return {**answer, "ContentLength": len(received)}, received
            if answer["ContentLength"] > max_size_bytes:
                return answer, None
            received = bytearray(answer["ContentLength"])
            rest = memoryview(received)
            while rest:  # `readinto` raises at an early end, so this always ends
                rest = rest[body.readinto(rest) :]
            return answer, received

    def _range_source(self, place: Mapping[str, str]) -> RetriedSource:
        return RetriedSource(self._clients, place["Key"], partial(self._open_body, place))

    def _open_body(self, target: Mapping[str, str], start: int, end: int) -> ReceivedBody:
        """Ask for bytes `[start, end)` once; return the body, of which nothing is read yet."""
        client = self._clients.get("read")
        answer = client.get_object(**target, Range=f"bytes={start}-{end - 1}")
        try:
            check_range_answer(answer, start, end)
        except BaseException:
            # Until its body is closed, the connection is not back in the client's pool.
            answer["Body"].close()
            raise
        return ReceivedBody(answer["Body"], Version.of(answer.get("ETag"), answer.get("VersionId")))


class Boto3Clients(S3Requests):
    """The clients of a bucket, each made on first use. Each has its own time-outs.

    Args:
        url: a URL of the bucket; its prefix is not used.
        options: the options that `check_options` has checked.
        config: time-outs, retries, and how many connections there may be.
        stripped: names of options that were left behind when the spec was pickled.

    Raises:
        CredentialsError: there are none.
        ConfigError: boto3 is not installed; an endpoint or certificate that we cannot use; a
            checksum that needs awscrt, which is not installed.
    """

    def __init__(
        self,
        url: StoreUrl,
        options: Mapping[str, Any],
        config: TransferConfig,
        stripped: tuple[str, ...] = (),
    ) -> None:
        if importlib.util.find_spec("boto3") is None:
            raise ConfigError("boto3 is not installed: pip install 'dcp-objstore[s3]'")
        self._settings = settings = parse(S3Options, options)
        self._config = config
        self._session = session = session_of(settings)
        if not settings.anon and session.method is None:  # boto3 found no credentials
            raise no_s3_credentials(stripped)
        endpoint_url, self._region = s3_server(settings, session.profile)
        style = settings.addressing_style or session.profile.addressing_style
        self._style = "virtual" if is_virtual(style, endpoint_url, url.bucket) else "path"
        self._lock = threading.Lock()
        self._clients: dict[Use, Any] = {}
        # `S3Requests` says what `payer`, `sealing` and `checksums` are.
        self.payer = {"RequestPayer": "requester"} if settings.requester_pays else {}
        self.sealing = settings.encryption
        super().__init__(config, judge_botocore, endpoint_url, url)
        self.checksums = checksums_for(settings, endpoint_url)

    def get(self, use: Use) -> Any:
        """The client for a use, which sends each request once.

        Args:
            use: `write` waits `request_timeout_seconds` for an answer, `small` less; `read` gives
                up sooner on a body that makes no progress.
        """
        with self._lock:
            if use not in self._clients:
                self._clients[use] = self._new_client(use)
            return self._clients[use]

    def _new_client(self, use: Use) -> Any:
        """Make a client of boto3 with the time-outs of a use."""
        import botocore
        from botocore.config import Config

        config, settings = self._config, self._settings
        seconds = config.request_timeout_seconds
        if use == "read":
            # botocore's time-out begins anew with each piece of a body that arrives, so this is the
            # longest time without progress, not the time of the whole read.
            seconds = min(READ_PROGRESS_SECONDS, seconds)
        elif use == "small":
            seconds = self.small_timeout_seconds
        arguments = botocore_settings(
            config, self._style, seconds, sign_payload=settings.sign_payload
        )
        if settings.anon:
            arguments["signature_version"] = botocore.UNSIGNED
        return self._session.session.client(
            "s3",
            endpoint_url=self.endpoint_url,
            region_name=self._region,
            # With None botocore trusts what AWS_CA_BUNDLE or the profile names, or its own list.
            verify=None if settings.verify is True else settings.verify,
            config=Config(**arguments),
        )


class JoinedBuffers(io.RawIOBase):
    """Several buffers as one body that botocore can measure, read, rewind and read again.

    Args:
        buffers: the buffers, 1-D and of bytes.
        check: a function that is called before each read; what it raises ends the request.
    """

    def __init__(
        self, buffers: Sequence[memoryview], check: Callable[[], None] | None = None
    ) -> None:
        super().__init__()
        self._buffers = [view for view in buffers if len(view)]
        # The position at which each buffer begins, then the size of the body: [0, 100, 105] if the
        # buffers have 100 and 5 bytes.
        self._starts = list(accumulate(map(len, self._buffers), initial=0))
        self._check = check
        self._position = 0

    def __len__(self) -> int:
        return self._starts[-1]

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True, because the body of a repeated request is read again."""
        return True

    def tell(self) -> int:
        """Return the position of the next read."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Set the position of the next read, as of every stream."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: len(self)}[whence]
        self._position = base + offset
        return self._position

    def read(self, size: int | None = -1) -> Any:
        """Return the next bytes; nothing at the end of the body.

        Without a size, all the rest is copied into one `bytes`. With a size, the result is a view
        of one buffer, without a copy. It may be longer than `size`: the HTTP client asks for
        little at a time, and what sends or hashes a body takes whatever it gets.
        """
        if self._check is not None:
            self._check()
        if size is None or size < 0:  # `_next` returns an empty view, equal to b"", at the end
            return b"".join(iter(lambda: self._next(_SEND_BYTES), b""))
        return b"" if size == 0 else self._next(_SEND_BYTES)

    def readinto(self, into: Any) -> int:
        """Copy the next bytes to the front of `into`: awscrt signs a body by this."""
        view = self._next(len(into))
        into[: len(view)] = view
        return len(view)

    def _next(self, most_bytes: int) -> memoryview:
        """Return a view of the next bytes, all in one buffer; empty at the end of the body."""
        if self._position >= len(self):
            return memoryview(b"")
        number = bisect_right(self._starts, self._position) - 1
        start = self._position - self._starts[number]
        view = self._buffers[number][start : start + most_bytes]
        self._position += len(view)
        return view


class ReceivedBody(Answer):
    """An `Answer` whose body botocore receives.

    Args:
        body: botocore's body of an answer.
        version: the version of the object, if it is known.
    """

    def __init__(self, body: Any, version: Version | None = None) -> None:
        self._body = body
        self._version = version

    def version(self) -> Version | None:
        """Return the version of the object that the bytes are of; None if it is not known."""
        return self._version

    def readinto(self, into: memoryview) -> int:
        """Read the next bytes to the front of `into`; return how many.

        Raises:
            BrokenOffError: the body ended early.
        """
        count = self._receive(into)
        if not count:
            raise BrokenOffError("the body ended early")
        return count

    def in_chunks(self, most_bytes: int) -> bytearray:
        """Return a body whose length was not announced, or more than `most_bytes` of it.

        Raises:
            BrokenOffError: the connection was lost.
        """
        body, piece = bytearray(), memoryview(bytearray(_RECEIVE_BYTES))
        while len(body) <= most_bytes and (count := self._receive(piece)):
            body += piece[:count]
        return body

    def _receive(self, into: memoryview) -> int:
        """Read the next bytes to the front of `into`; return how many, 0 at the end of the body.

        Raises:
            BrokenOffError: the connection was lost, or nothing came in time.
        """
        from botocore.exceptions import BotoCoreError

        try:
            return int(self._body.readinto(into[:_RECEIVE_BYTES]))
        except (BotoCoreError, OSError) as error:
            raise BrokenOffError(str(error)) from error

    def close(self) -> None:
        """Close the body of the answer."""
        self._body.close()
