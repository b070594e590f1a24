"""`S3Store`: what the transports that call S3's operations by botocore's names have in common.

boto3's clients and s3fs take the same arguments and give the same answers. They differ in how an
operation is called and how a body is read, which the adapters say. Each request is sent once by the
transport and sent again here (`stores.retries`).
"""

from __future__ import annotations

import http.client
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal

from typing_extensions import Buffer

from dcp_objstore.config import TransferConfig, at_most
from dcp_objstore.errors import (
    CorruptDataError,
    DcpObjstoreError,
    InputError,
    PreconditionFailedError,
    StoreUnavailableError,
    UnsupportedError,
    add_advice,
)
from dcp_objstore.stores import errors
from dcp_objstore.stores.base import BaseStore, WatchedBuffers, cut_parts, cut_range
from dcp_objstore.stores.protocol import (
    LEFTOVER_ADVICE,
    Capabilities,
    CopySource,
    IfAbsent,
    ObjectMeta,
    Precondition,
    Version,
)
from dcp_objstore.stores.retries import SMALL_BYTES, Requests, guard_fork
from dcp_objstore.stores.s3.errors import read_botocore, status_of
from dcp_objstore.stores.s3.upload import Checksums, CopiedPart, MultipartUpload
from dcp_objstore.stores.urls import StoreUrl, check_key, parse_url

# How long a request may take depends on its use: see `Boto3Clients.get`.
Use = Literal["read", "small", "write"]
_READS = ("get_object", "head_object", "list_objects_v2")
# Writes of little data, but for the end of an upload, which takes the store long.
_SMALL_WRITES = ("put_object", "delete_object", "create_multipart_upload")


class S3Requests(Requests):
    """The requests to one bucket, by the operations of S3.

    Attributes:
        payer: arguments of every request to a bucket whose requests the caller pays for.
        sealing: arguments of every write, which say how the store is to encrypt.
        checksums: the checksums that go with bodies.
    """

    payer: Mapping[str, str]
    sealing: Mapping[str, str | bool]
    checksums: Checksums


class S3Store(BaseStore["dict[str, str]"]):
    """A store rooted at one s3:// URL. An object's place is the arguments that name it.

    Args:
        url: the root.
        requests: the requests to its bucket.
    """

    capabilities = Capabilities()  # it claims everything; `probe` finds out if the server keeps it
    # Reads what an operation raised; `conditional`: it had an `If-Match`.
    _read_details: Callable[..., errors.ErrorDetails] = staticmethod(read_botocore)

    def __init__(self, url: StoreUrl, requests: S3Requests) -> None:
        super().__init__(url, requests.endpoint_url)
        self._requests = requests
        self._checksums = requests.checksums
        self._sealing = requests.sealing
        self._bucket = {"Bucket": url.bucket, **requests.payer}
        self._root = f"{url.prefix}/" if url.prefix else ""

    @property
    def reports_throttling(self) -> Collection[str]:
        """All verbs."""
        return ("put", "put_stream", "copy", "get", "open_range", "head", "list", "delete")

    # What an adapter says.

    @abstractmethod
    def _call(
        self,
        use: Use,
        operation: str,
        arguments: Mapping[str, Any],
        check: Callable[[], None] | None = None,
    ) -> Any:
        """Send the request of an operation once; `check` is called while waiting, and may raise."""

    @abstractmethod
    def _read(
        self, target: Mapping[str, str], max_size_bytes: int
    ) -> tuple[Mapping[str, Any], bytes | bytearray | None]:
        """Send a GET once; return answer and body: None where a larger one is announced."""

    @abstractmethod
    def _body(self, part: Sequence[memoryview], check: Callable[[], None] | None) -> Any:
        """Return the buffers as the `Body` of a request; `check` is called while it is sent."""

    def _translate(self, error: Exception, *, conditional: bool = False) -> DcpObjstoreError:
        return errors.judge(error, partial(self._read_details, conditional=conditional)).error

    def _conditional_write(self) -> AbstractContextManager[Any]:
        """Return the context in which a conditional write is sent."""
        return nullcontext()

    # The verbs, but for ranges.

    def _send(
        self,
        verb: str,
        operation: str,
        arguments: Mapping[str, Any],
        *,
        body: Sequence[memoryview] = (),
        check: Callable[[], None] | None = None,
        repeatable: bool = True,
        retry: bool = True,
    ) -> Any:
        """Send the request of an operation, again where that may help; return the answer.

        Args:
            verb: the verb of `ObjectStore`.
            operation: botocore's name of it.
            arguments: the arguments of the operation, without its body.
            body: the bytes that are sent with it. If there are none, no `Body` is passed: after an
                empty one, botocore before 1.44 hangs in the next request of the connection.
            check: a function that is called before and while it is sent, and ends it by raising.
            repeatable: whether it may be sent again if it may have taken effect.
            retry: whether it may be sent again at all.
        """
        size_bytes = sum(map(len, body))
        use: Use = "read" if operation in _READS else "write"
        if operation in _SMALL_WRITES and size_bytes <= SMALL_BYTES:
            use = "small"

        def request() -> Any:
            if check is not None:
                check()
            with_body = {"Body": self._body(body, check)} if size_bytes else {}
            return self._call(use, operation, {**arguments, **with_body}, check)

        if not retry:
            return request()
        tries = self._requests.tries(verb, arguments.get("Key", ""), size_bytes)
        return self._requests.run(tries, request, repeatable=repeatable)

    def _put(
        self,
        place: dict[str, str],
        buffers: Sequence[Buffer],
        precondition: Precondition | None,
        *,
        retry: bool,
    ) -> Version:
        condition = _condition_arguments(precondition)
        views = [memoryview(buffer) for buffer in buffers]
        if not condition:  # then it does no harm to write the same bytes again
            return self._put_whole(place, views, retry=retry)
        try:
            with self._conditional_write():
                return self._put_whole({**place, **condition}, views, retry=retry, repeatable=False)
        except DcpObjstoreError:  # the tries are over: it is translated, and has its cause
            raise
        except Exception as error:
            # The caller's `_errors` would translate it without knowing of the condition.
            raise self._translate(error, conditional="IfMatch" in condition) from error

    def _put_whole(
        self,
        target: Mapping[str, str],
        views: Sequence[memoryview],
        *,
        retry: bool = True,
        repeatable: bool = True,
    ) -> Version:
        """Write an object by a single PUT; see `_send`."""
        arguments = {**target, **self._sealing, **self._checksums.of(views)}
        answer = self._send(
            "put", "put_object", arguments, body=views, retry=retry, repeatable=repeatable
        )
        return _version(answer)

    def _put_stream(
        self,
        place: dict[str, str],
        source: WatchedBuffers,
        part_size_bytes: int,
        max_concurrency: int,
    ) -> Version:
        """A stream of less than a part goes in a single PUT."""
        parts = cut_parts(source, part_size_bytes)
        part = next(parts, [])
        if sum(map(len, part)) < part_size_bytes:
            return self._put_whole(place, part)
        upload = MultipartUpload(
            partial(self._send, "put_stream"),
            place,
            self._sealing,
            checksums=self._checksums,
            threads=max_concurrency,
        )
        try:
            upload.create()
            while part:
                upload.send(part)
                del part  # not held while the next one is waited for
                part = next(parts, [])
            return self._completed_version(place, upload.complete())
        except BaseException:
            source.left_parts = not upload.abort()  # `BaseStore.put_stream` tells the user
            raise

    def _completed_version(self, place: dict[str, str], answer: Mapping[str, Any]) -> Version:
        """Return the version of an upload that was completed; Ceph's gateway does not say it."""
        version = _version(answer)
        return self._head(place).version if version == Version() else version

    def _copy(
        self,
        place: dict[str, str],
        sources: Sequence[CopySource],
        part_size_bytes: int,
        max_concurrency: int,
        moved: Callable[[int], None],
    ) -> Version:
        """Copy each source in parts (`UploadPartCopy`), if it still has the ETag of its version.

        Some servers ignore that condition. So each source is looked at again when all parts are
        copied, and before the object is made of them.
        """
        # The store computes its own checksums of what it copies.
        upload = MultipartUpload(
            partial(self._send, "copy"),
            place,
            self._sealing,
            checksums=Checksums(None),
            threads=max_concurrency,
        )
        places = {source.url: self._place_of(source, place) for source in sources}
        try:
            upload.create()
            for source in sources:
                origin = places[source.url]
                for start, end in cut_range(source.start, source.end, part_size_bytes):
                    arguments = {
                        "CopySource": {"Bucket": origin["Bucket"], "Key": origin["Key"]},
                        "CopySourceIfMatch": source.version.e_tag,
                        "CopySourceRange": f"bytes={start}-{end - 1}",
                    }
                    upload.send(CopiedPart(arguments, partial(moved, end - start)))
            upload.wait()
            metas = {url: self._head(origin) for url, origin in places.items()}
            for source in sources:
                meta = metas[source.url]
                if meta.version.e_tag != source.version.e_tag:
                    raise PreconditionFailedError(f"{source.url} was changed by another writer")
                if source.end > meta.size_bytes:
                    raise CorruptDataError(f"{source.url} has only {meta.size_bytes} bytes")
            return self._completed_version(place, upload.complete())
        except BaseException as error:
            is_aborted = upload.abort()
            if not isinstance(error, Exception):  # Ctrl-C, for example, is raised as it is
                raise
            translated, cause = self._translate(error), error.__cause__
            # An error of this package is its own translation, and stays as it is: it may be one of
            # the caller's, which `moved` raised. An error of botocore says which copy failed.
            if translated is not error:
                translated.message += f" (in a copy of {', '.join(places)})"
                cause = error
            if not is_aborted:
                add_advice(translated, LEFTOVER_ADVICE)
            raise translated from cause

    def _place_of(self, source: CopySource, target: Mapping[str, str]) -> dict[str, str]:
        """Return the arguments that name a source; the others are those of the new object's place.

        Raises:
            UnsupportedError: this store cannot copy it, or not safely.
        """
        url = parse_url(source.url)
        if url.scheme != self._url.scheme or source.version.e_tag is None:
            raise UnsupportedError(f"{source.url} is not on this store, or its ETag is not known")
        if self.endpoint_url is not None and ("%" in url.prefix or "+" in url.prefix):
            # Ceph's gateway decodes the key twice, and may copy another object. AWS (where the
            # endpoint is None) does not.
            raise UnsupportedError(
                f"{source.url} has a '%' or '+' in its key, which some servers misread in a copy"
            )
        return {**target, "Bucket": url.bucket, "Key": url.prefix}

    def _get(self, place: dict[str, str], max_size_bytes: int) -> tuple[bytes, ObjectMeta]:
        answer, body = self._read_again("get", place, max_size_bytes)
        errors.check_no_page(answer.get("ContentType"))
        # Without a body `_check_size` raises.
        return bytes(body or b""), self._check_size(self._meta(place, answer), max_size_bytes)

    def _read_again(
        self, verb: str, target: Mapping[str, str], max_size_bytes: int
    ) -> tuple[Mapping[str, Any], bytes | bytearray | None]:
        """Do what `_read` does, again where that may help."""
        tries = self._requests.tries(verb, target["Key"])
        return self._requests.run(tries, partial(self._read, target, max_size_bytes))

    def _head(self, place: dict[str, str]) -> ObjectMeta:
        try:
            answer = self._send("head", "head_object", place)
            if "ContentLength" in answer:
                return self._meta(place, answer)
        except Exception as error:
            if status_of(error) not in errors.UNCLEAR_IN_HEAD:
                raise
        # The HEAD was refused without a reason (its answer has no body), or did not say the size.
        # A GET of one byte says why, or the size ("bytes 0-0/SIZE"). A server that ignores Range
        # announces the whole object.
        answer, _ = self._read_again("head", {**place, "Range": "bytes=0-0"}, 1)
        size = str(answer.get("ContentRange", "")).rpartition("/")[2]
        return self._meta(place, {**answer, "ContentLength": int(size or answer["ContentLength"])})

    def _delete(self, place: dict[str, str]) -> None:
        self._send("delete", "delete_object", place)

    def _meta(self, place: Mapping[str, str], answer: Mapping[str, Any]) -> ObjectMeta:
        """Return the metadata in the answer to a GET or HEAD of an object."""
        missing = [name for name in ("ContentLength", "ETag", "LastModified") if name not in answer]
        if missing:
            raise errors.NO_STORE_ANSWERED.error(f"its answer has no {' and no '.join(missing)}")
        key = place["Key"].removeprefix(self._root)
        return ObjectMeta(key, answer["ContentLength"], _version(answer), answer["LastModified"])

    def _place(self, key: str | None) -> dict[str, str]:
        guard_fork()
        if key is None:
            return dict(self._bucket)
        return {**self._bucket, "Key": self._root + check_key(key)}

    def _list(self, folder: str) -> Iterator[ObjectMeta]:
        start = self._root + (f"{folder}/" if folder else "")
        marks = {"ContinuationToken": "NextContinuationToken"}
        with self._errors(None) as target:
            send = partial(self._send, "list", "list_objects_v2")
            for page in pages(send, {**target, "Prefix": start}, marks):
                for entry in page.get("Contents", ()):
                    # A console makes a folder as an empty object, whose key ends with a slash.
                    if not entry["Key"].endswith("/"):
                        yield self._entry_meta(entry, start)

    def _entry_meta(self, entry: Mapping[str, Any], start: str) -> ObjectMeta:
        """Return the metadata in an entry of a listing; all its keys should begin with `start`."""
        key: str = entry["Key"]
        if not key.startswith(start):
            raise StoreUnavailableError(f"the store answered with a key outside the root: {key!r}")
        version = Version.of(entry["ETag"], None)
        return ObjectMeta(key[len(self._root) :], entry["Size"], version, entry["LastModified"])


def pages(
    ask: Callable[[Mapping[str, Any]], Mapping[str, Any]],
    arguments: Mapping[str, Any],
    marks: Mapping[str, str],
) -> Iterator[Mapping[str, Any]]:
    """Yield the pages of a listing.

    Args:
        ask: a function that sends a request with these arguments for a page.
        arguments: the arguments of every request.
        marks: where a page begins: the name of an argument of the request, and of the field of the
            page before that has its value: `{"ContinuationToken": "NextContinuationToken"}`.

    Raises:
        StoreUnavailableError: a page begins where an earlier one did.
    """
    beginning: dict[str, Any] = {}
    # The values of the marks so far. The first page has none, so a later one without is a repeat.
    seen: set[tuple[Any, ...]] = {()}
    while True:
        page = ask({**arguments, **beginning})
        yield page
        if not page.get("IsTruncated"):
            return
        beginning = {name: page[mark] for name, mark in marks.items() if page.get(mark) is not None}
        values = tuple(beginning.values())
        if values in seen:
            raise StoreUnavailableError(errors.SAME_PAGE)
        seen.add(values)


def _condition_arguments(precondition: Precondition | None) -> dict[str, str]:
    """Return the arguments of a PUT that is sent on a condition; empty without one."""
    if precondition is None:
        return {}
    if isinstance(precondition, IfAbsent):
        return {"IfNoneMatch": "*"}
    if precondition.e_tag is None:
        raise InputError(f"a conditional write to s3:// needs the e_tag of {precondition.version}")
    return {"IfMatch": precondition.e_tag}


def _version(answer: Mapping[str, Any]) -> Version:
    return Version.of(answer["ETag"], answer.get("VersionId"))


def check_range_answer(answer: Mapping[str, Any], start: int, end: int) -> None:
    """Raise `CorruptDataError` unless the body is bytes `[start, end)` (RFC 9110, section 14)."""
    if answer["ResponseMetadata"]["HTTPStatusCode"] != http.client.PARTIAL_CONTENT:
        raise errors.WHOLE.error()
    content_range = str(answer.get("ContentRange", ""))
    if not content_range.startswith(f"bytes {start}-{end - 1}/"):
        size = content_range.rpartition("/")[2]
        if size.isdecimal() and int(size) < end:  # the object ends before the range does
            raise CorruptDataError(f"bytes [{start}, {end}) of an object of {size} bytes")
        raise errors.ANOTHER_RANGE.error(repr(content_range))
    # A body in chunks is announced without its length.
    if (announced_bytes := answer.get("ContentLength", end - start)) != end - start:
        raise CorruptDataError(
            f"bytes [{start}, {end}) asked for, but {announced_bytes} bytes announced"
        )


def botocore_settings(
    config: TransferConfig,
    addressing_style: str | None,
    read_seconds: float,
    *,
    sign_payload: bool = False,
) -> dict[str, Any]:
    """The arguments of botocore's `Config`, by which it sends each request once.

    Args:
        config: time-outs, and how many requests there may be.
        addressing_style: `virtual` or `path`; None leaves it to the profile.
        read_seconds: the longest time without a byte of an answer.
        sign_payload: sign bodies, too.
    """
    return {
        "s3": {
            **({} if addressing_style is None else {"addressing_style": addressing_style}),
            # SHA-256 of every body costs 1 CPU-second per GiB; see `s3.client`.
            "payload_signing_enabled": sign_payload,
        },
        # By default botocore computes CRC32 of every body in Python's zlib and sends it in a
        # trailer over TLS, which some stores that speak S3 refuse; see `s3.upload`.
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
        "connect_timeout": config.connect_timeout_seconds,
        "read_timeout": read_seconds,
        # A save and a load may run at the same time.
        "max_pool_connections": at_most(config.upload_concurrency)
        + at_most(config.download_concurrency),
        "retries": {"total_max_attempts": 1},
    }
