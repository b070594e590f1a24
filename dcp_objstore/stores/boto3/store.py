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

import http.client
import os
import threading
import time
from contextlib import closing
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from dcp_objstore.errors import CorruptDataError, DcpObjstoreError
from dcp_objstore.stores.boto3.bodies import JoinedBuffers, body_of, receive
from dcp_objstore.stores.buffers import check_range
from dcp_objstore.stores.s3.errors import translate_botocore
from dcp_objstore.stores.s3.store import S3Store, Use
from dcp_objstore.stores.urls import StoreUrl, check_key

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping, Sequence

    from typing_extensions import Buffer

    from dcp_objstore.stores.boto3.clients import Boto3Clients

# By process, endpoint and bucket. A forked child makes its own: its parent's may be held by
# a thread that the child does not have.
_conditional_writes: dict[tuple[int, str | None, str], threading.Lock] = {}


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

    def _translate(self, error: Exception, *, conditional: bool = False) -> DcpObjstoreError:
        return translate_botocore(error, conditional=conditional)

    def _conditional_write(self) -> threading.Lock:
        """Held during a conditional write to the bucket.

        `moto.mock_aws` answers in the thread that asks and has no locks: of several threads that
        create an object there, two could win. A server sees to this itself; there such writes are
        so few that it does not matter.
        """
        place = (os.getpid(), self.endpoint_url, self._url.bucket)
        return _conditional_writes.setdefault(place, threading.Lock())

    def _read(
        self, target: Mapping[str, str], max_size_bytes: int
    ) -> tuple[Mapping[str, Any], bytearray | None]:
        answer = self._clients.get("read").get_object(**target)
        size_bytes = answer.get("ContentLength", 0)
        into = bytearray(size_bytes) if size_bytes <= max_size_bytes else None
        with closing(answer["Body"]) as body:
            if into is not None:
                receive(body, memoryview(into))
        return answer, into

    def get_range(
        self, key: str, start: int, end: int, *, into: memoryview | None = None
    ) -> Buffer:
        """See `ObjectStore.get_range`. An empty range is answered without a request."""
        check_range(start, end)
        if start == end:
            check_key(key)
            return b""
        if into is None:
            into = memoryview(bytearray(end - start))
        (piece,) = self.get_pieces(key, (start, end), into)
        return piece

    def get_pieces(
        self, key: str, cuts: Sequence[int], into: memoryview
    ) -> Generator[Buffer, None, None]:
        """See `PiecewiseStore.get_pieces`."""
        check_range(cuts[0], cuts[-1])
        with self._errors(key) as target:
            given = 0
            tries = self._clients.tries("get_range", target["Key"])
            while given < len(cuts) - 1:
                begun_at = time.monotonic()
                try:
                    for piece in self._arriving(target, cuts[given:], into):
                        given += 1
                        yield piece
                except Exception as error:  # noqa: BLE001  botocore's have no type in common
                    self._clients.again(tries, error, begun_at)

    def _arriving(
        self, target: Mapping[str, str], cuts: Sequence[int], into: memoryview
    ) -> Iterator[memoryview]:
        """The pieces of one answer.

        Raises:
            BrokenOffError: the connection was lost before the last one. The caller, who knows how
                many have come, may ask for the rest.
        """
        start, end = cuts[0], cuts[-1]
        answer = self._clients.get("read").get_object(**target, Range=f"bytes={start}-{end - 1}")
        with closing(answer["Body"]) as body:
            _check_range_answer(answer, start, end)
            for begin, stop in pairwise(cuts):
                piece = into[: stop - begin]
                receive(body, piece)
                yield piece


def _check_range_answer(answer: Mapping[str, Any], start: int, end: int) -> None:
    """Raise `CorruptDataError` unless the body is bytes `[start, end)` (RFC 9110, section 14)."""
    if answer["ResponseMetadata"]["HTTPStatusCode"] != http.client.PARTIAL_CONTENT:
        raise CorruptDataError(
            "the store ignores Range: it sends whole objects where a part was asked for (or"
            " something on the way to it does)"
        )
    given = str(answer.get("ContentRange", ""))
    if not given.startswith(f"bytes {start}-{end - 1}/"):
        size = given.rpartition("/")[2]
        if size.isdecimal() and int(size) < end:
            raise CorruptDataError(f"bytes [{start}, {end}) of an object of {size} bytes")
        raise CorruptDataError(f"the store sent another range than was asked for: {given!r}")
    if answer["ContentLength"] != end - start:
        raise CorruptDataError(
            f"bytes [{start}, {end}) asked for, but {answer['ContentLength']} bytes announced"
        )
