"""`ObjectStore` over boto3, for s3://: what carries the requests where obstore cannot.

It works under `moto.mock_aws`, which catches botocore's requests in the process, and in forked
children, and takes credentials from whatever boto3 knows (SSO, assumed roles, plug-ins). It costs
more processor time: see docs/stores.md.

Facts about boto3 1.44 that shape this module (each is pinned by a test):
- botocore retries until an answer's head has come; a body that breaks off is the caller's.
- A HEAD's answer has no `<Code>`, so a failed HEAD is asked again as a GET.
- A readable body is sent after the server's "100 Continue".
"""

from __future__ import annotations

import http.client
import logging
import random
import time
from contextlib import closing, contextmanager
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from dcp_objstore.errors import (
    ConfigError,
    CorruptDataError,
    DcpObjstoreError,
    InputError,
    ObjectNotFoundError,
    StoreUnavailableError,
)
from dcp_objstore.observe.dispatch import emit_retry
from dcp_objstore.stores.boto3_bodies import BrokenOffError, body_of, receive
from dcp_objstore.stores.boto3_errors import status_of, translate_boto3
from dcp_objstore.stores.boto3_upload import Upload, parts_of
from dcp_objstore.stores.inputs import WatchedBuffers, as_buffers, check_buffer, check_range
from dcp_objstore.stores.protocol import (
    LEFTOVER_ADVICE,
    Capabilities,
    IfAbsent,
    IfVersion,
    ObjectMeta,
    Precondition,
    Version,
)
from dcp_objstore.stores.rooted import RootedStore
from dcp_objstore.stores.translate import NO_STORE
from dcp_objstore.stores.urls import StoreUrl, check_key, check_prefix

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping, Sequence

    from typing_extensions import Buffer

    from dcp_objstore.stores.boto3_clients import Boto3Clients

_log = logging.getLogger("dcp_objstore")

# A HEAD's answer has no body, so these say too little: is the key or the bucket missing, is the
# secret wrong or the right missing?
_UNCLEAR_IN_HEAD = (400, 403, 404, 409)
# Of a body that breaks off, the first pause is random up to this, and twice as long each time.
_FIRST_PAUSE_SECONDS = 0.05
_LONGEST_PAUSE_SECONDS = 10.0


class Boto3Store(RootedStore):
    """A store rooted at one URL. Unlike others it may be used after a fork, too."""

    def __init__(self, url: StoreUrl, clients: Boto3Clients) -> None:
        super().__init__(url)
        self._clients = clients
        self._root = f"{url.prefix}/" if url.prefix else ""
        self._bucket = {"Bucket": url.bucket, **clients.payer}

    @property
    def endpoint_url(self) -> str | None:
        """The server, or None for AWS; `checkpoint.probe` remembers by it."""
        return self._clients.endpoint_url

    @property
    def capabilities(self) -> Capabilities:
        """Everything; `checkpoint.probe` finds out if the server keeps it."""
        return Capabilities()

    def put(
        self,
        key: str,
        data: Buffer | Sequence[Buffer],
        *,
        precondition: Precondition | None = None,
        retry: bool = True,
    ) -> Version:
        """See `ObjectStore.put`."""
        condition = _condition(precondition)
        with self._errors(key, conditional="IfMatch" in condition) as target:
            buffers = as_buffers(data)
            for buffer in buffers:
                check_buffer(buffer)
            client = self._clients.write() if retry else self._clients.once()
            views = [memoryview(buffer) for buffer in buffers]
            answer = client.put_object(**target, **condition, **self._whole(views))
            return _version(answer)

    def put_stream(
        self,
        key: str,
        buffers: Iterator[Buffer],
        *,
        part_size_bytes: int,
        max_concurrency: int,
    ) -> Version:
        """See `ObjectStore.put_stream`. A stream of less than a part goes in a single PUT."""
        source = WatchedBuffers(buffers, check_buffer)
        clean = True
        try:
            with self._errors(key) as target:
                parts = parts_of(source, part_size_bytes)
                part = next(parts, [])
                client, sealing = self._clients.write(), self._clients.sealing
                if sum(map(len, part)) < part_size_bytes:
                    return _version(client.put_object(**target, **self._whole(part)))
                upload = Upload(client, target, sealing, self._clients.checksums, max_concurrency)
                try:
                    upload.begin()
                    while part:
                        upload.send(part)
                        del part  # not held while the next one is waited for
                        part = next(parts, [])
                    return _version(upload.complete())
                except BaseException:
                    clean = upload.abort()
                    raise
        except BaseException as error:
            if not clean:
                told = error if source.error is None else source.error
                if isinstance(told, DcpObjstoreError):
                    told.message += f"; {LEFTOVER_ADVICE}"
                else:
                    _log.warning("the upload of %s was not aborted; %s", key, LEFTOVER_ADVICE)
            if source.error is None:
                raise
        # Outside of the handler, so that the caller's error keeps its own cause and context.
        raise source.error

    def _whole(self, views: Sequence[memoryview]) -> dict[str, Any]:
        """What a PUT of an object carries."""
        body = body_of(views)
        # With an empty Body, botocore before 1.44 hangs in the next request of the connection.
        carried = {"Body": body} if len(body) else {}
        return {**self._clients.sealing, **self._clients.checksums.of(views), **carried}

    def get(self, key: str, *, max_size_bytes: int) -> tuple[bytes, ObjectMeta]:
        """See `ObjectStore.get`."""
        with self._errors(key) as target:

            def capture() -> tuple[bytes, ObjectMeta]:
                answer = self._clients.read().get_object(**target)
                with closing(answer["Body"]) as body:
                    if str(answer.get("ContentType", "")).startswith("text/html"):
                        raise ConfigError(NO_STORE)  # no object here is a page
                    meta = _meta(key, answer)
                    if meta.size_bytes > max_size_bytes:
                        raise CorruptDataError(
                            f"the object has {meta.size_bytes} bytes,"
                            f" at most {max_size_bytes} expected"
                        )
                    into = bytearray(meta.size_bytes)
                    receive(body, memoryview(into))
                return bytes(into), meta

            tries = _Tries(target["Key"], self._clients.max_retries)
            while True:
                try:
                    return capture()
                except BrokenOffError as error:
                    tries.failed(error)

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
            tries = _Tries(target["Key"], self._clients.max_retries)
            while given < len(cuts) - 1:
                try:
                    for piece in self._arriving(target, cuts[given:], into):
                        given += 1
                        yield piece
                except BrokenOffError as error:
                    tries.failed(error)

    def _arriving(
        self, target: Mapping[str, str], cuts: Sequence[int], into: memoryview
    ) -> Iterator[memoryview]:
        """The pieces of one answer.

        Raises:
            BrokenOffError: the connection was lost before the last one; whoever knows how many
                have come may ask for the rest.
        """
        start, end = cuts[0], cuts[-1]
        answer = self._clients.read().get_object(**target, Range=f"bytes={start}-{end - 1}")
        with closing(answer["Body"]) as body:
            _check_range_answer(answer, start, end)
            for begin, stop in pairwise(cuts):
                piece = into[: stop - begin]
                receive(body, piece)
                yield piece

    def head(self, key: str) -> ObjectMeta:
        """See `ObjectStore.head`."""
        from botocore.exceptions import ClientError

        with self._errors(key) as target:
            client = self._clients.read()
            try:
                return _meta(key, client.head_object(**target))
            except ClientError as error:
                if status_of(error) not in _UNCLEAR_IN_HEAD:
                    raise
            # A GET of nearly nothing says what is wrong.
            answer = client.get_object(**target, Range="bytes=0-0")
            answer["Body"].close()
            size = str(answer.get("ContentRange", "")).rpartition("/")[2]
            return _meta(key, {**answer, "ContentLength": int(size or answer["ContentLength"])})

    def list(self, prefix: str = "") -> Iterator[ObjectMeta]:
        """See `ObjectStore.list`."""
        below = check_prefix(prefix)
        return self._pages(self._root + (f"{below}/" if below else ""))

    def _pages(self, start: str) -> Iterator[ObjectMeta]:
        with self._errors(None) as target:
            pages = self._clients.read().get_paginator("list_objects_v2")
            for page in pages.paginate(**target, Prefix=start):
                for entry in page.get("Contents", ()):
                    if not entry["Key"].startswith(start):
                        raise StoreUnavailableError(
                            f"the store answered with a key outside the root: {entry['Key']!r}"
                        )
                    yield ObjectMeta(
                        entry["Key"][len(self._root) :],
                        entry["Size"],
                        Version(entry["ETag"]),
                        entry["LastModified"],
                    )

    def delete(self, key: str) -> None:
        """See `ObjectStore.delete`."""
        from botocore.exceptions import ClientError

        with self._errors(key) as target:
            try:
                self._clients.write().delete_object(**target)
            except ClientError as error:
                # S3 says 204 for an absent object; others say 404.
                if not isinstance(translate_boto3(error), ObjectNotFoundError):
                    raise

    @contextmanager
    def _errors(self, key: str | None, *, conditional: bool = False) -> Iterator[dict[str, str]]:
        """Check the key, yield the arguments that name the object, translate what is raised."""
        target = dict(self._bucket)
        if key is not None:
            target["Key"] = self._root + check_key(key)
        with self._located(key, partial(translate_boto3, conditional=conditional)):
            yield target


class _Tries:
    """How often the body of an object may break off."""

    def __init__(self, bucket_key: str, max_retries: int) -> None:
        self._bucket_key = bucket_key
        self._began_at = time.monotonic()
        self._failures = 0
        self._max_retries = max_retries
        self._pause_seconds = _FIRST_PAUSE_SECONDS

    def failed(self, error: BrokenOffError) -> None:
        """Wait before the next try, or raise `error` if there is none."""
        if self._failures == self._max_retries:
            raise error
        self._failures += 1
        emit_retry(self._bucket_key, self._failures + 1, str(error), self._began_at)
        time.sleep(random.uniform(0, self._pause_seconds))
        self._pause_seconds = min(2 * self._pause_seconds, _LONGEST_PAUSE_SECONDS)


def _condition(precondition: Precondition | None) -> dict[str, str]:
    if precondition is None:
        return {}
    if isinstance(precondition, IfAbsent):
        return {"IfNoneMatch": "*"}
    if isinstance(precondition, IfVersion):
        token = precondition.version
        if token.e_tag is None:
            raise InputError(f"a conditional write to s3:// needs the e_tag of {token}")
        return {"IfMatch": token.e_tag}
    raise InputError(f"not a precondition: {precondition!r}")


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


def _meta(key: str, answer: Mapping[str, Any]) -> ObjectMeta:
    missing = [name for name in ("ContentLength", "ETag", "LastModified") if name not in answer]
    if missing:
        raise StoreUnavailableError(f"{NO_STORE}: its answer has no {' and no '.join(missing)}")
    return ObjectMeta(key, answer["ContentLength"], _version(answer), answer["LastModified"])


def _version(answer: Mapping[str, Any]) -> Version:
    # moto and unversioned buckets say 'null' after a multipart upload and nothing in a HEAD.
    version = answer.get("VersionId")
    return Version(answer["ETag"], None if version == "null" else version)
