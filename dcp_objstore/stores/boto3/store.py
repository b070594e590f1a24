"""`ObjectStore` over boto3, for s3://: what carries the requests where obstore cannot.

It works under `moto.mock_aws`, which catches botocore's requests in the process, and in forked
children, and takes credentials from whatever boto3 knows (SSO, assumed roles, plug-ins). It costs
more processor time: see docs/stores.md.

Facts about boto3 1.44 that shape this module (each is pinned by a test):
- botocore is told to send each request once. It does follow a redirect to the bucket's region.
- A HEAD's answer has no `<Code>`, so a failed HEAD is asked again as a GET.
- A readable body is sent after the server's "100 Continue".
"""

from __future__ import annotations

import threading
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any

from dcp_objstore.forking import PerProcess
from dcp_objstore.stores.boto3.bodies import RECEIVE_BYTES, JoinedBuffers, ReceivedBody, body_of
from dcp_objstore.stores.protocol import RangeReading
from dcp_objstore.stores.ranges import RetriedSource
from dcp_objstore.stores.s3.store import S3Store, Use, check_range_answer
from dcp_objstore.stores.urls import StoreUrl

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dcp_objstore.stores.boto3.clients import Boto3Clients

# By endpoint and bucket.
_conditional_writes: PerProcess[dict[tuple[str | None, str], threading.Lock]] = PerProcess(dict)


class Boto3Store(S3Store):
    """A store rooted at one URL. Unlike others it may be used after a fork, too."""

    def __init__(self, url: StoreUrl, clients: Boto3Clients) -> None:
        super().__init__(
            url,
            clients,
            clients.checksums,
            clients.endpoint_url,
            extra=clients.payer,
            sealing=clients.sealing,
        )
        self._clients = clients

    def _call(
        self,
        use: Use,
        operation: str,
        arguments: Mapping[str, Any],
        check: Callable[[], None] | None = None,  # noqa: ARG002  the body calls it
    ) -> Any:
        return getattr(self._clients.get(use), operation)(**arguments)

    def _body(
        self, part: Sequence[memoryview], check: Callable[[], None] | None
    ) -> bytes | JoinedBuffers:
        return body_of(part, check)

    def _conditional_write(self) -> threading.Lock:
        """Return the lock that is held during a conditional write to the bucket.

        `moto.mock_aws` answers in the thread that asks and has no locks: of several threads that
        create an object there, two could win. A server sees to this itself; there such writes are
        so few that it does not matter.
        """
        place = (self.endpoint_url, self._url.bucket)
        return _conditional_writes.here.setdefault(place, threading.Lock())

    def _read(
        self, target: Mapping[str, str], max_size_bytes: int
    ) -> tuple[Mapping[str, Any], bytearray | None]:
        answer = self._clients.get("read").get_object(**target)
        size_bytes = answer.get("ContentLength", 0)
        into = bytearray(size_bytes) if size_bytes <= max_size_bytes else None
        with closing(ReceivedBody(answer["Body"])) as body:
            left = memoryview(into or b"")
            while left:
                left = left[body.readinto(left) :]
        return answer, into

    @property
    def range_reading(self) -> RangeReading:
        """How ranges are read: 1 MiB at once, which the client copies."""
        return RangeReading(memory_bytes=2 * RECEIVE_BYTES)

    def _range_source(self, place: Mapping[str, str]) -> RetriedSource:
        return RetriedSource(self._clients, place["Key"], partial(self._ask, place))

    def _ask(self, target: Mapping[str, str], start: int, end: int) -> ReceivedBody:
        client = self._clients.get("read")
        answer = client.get_object(**target, Range=f"bytes={start}-{end - 1}")
        try:
            check_range_answer(answer, start, end)
        except BaseException:
            answer["Body"].close()
            raise
        return ReceivedBody(answer["Body"])
