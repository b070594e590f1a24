"""`S3Store`: what the transports that call S3's operations by botocore's names have in common.

boto3's clients and s3fs take the same arguments and give the same answers. What differs is how an
operation is called and how a body is read, which the adapters say.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from dcp_objstore.errors import (
    ConfigError,
    DcpObjstoreError,
    InputError,
    ObjectNotFoundError,
    StoreUnavailableError,
)
from dcp_objstore.stores.answers import UNCLEAR_IN_HEAD, check_fits, check_whole, version_of
from dcp_objstore.stores.base import BaseStore
from dcp_objstore.stores.buffers import WatchedBuffers, as_buffers, check_buffer, cut_parts
from dcp_objstore.stores.errors import NO_STORE
from dcp_objstore.stores.protocol import (
    LEFTOVER_ADVICE,
    Capabilities,
    IfAbsent,
    IfVersion,
    ObjectMeta,
    Precondition,
    Version,
)
from dcp_objstore.stores.s3.errors import status_of
from dcp_objstore.stores.s3.upload import MultipartUpload
from dcp_objstore.stores.urls import StoreUrl, check_key, check_prefix

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from typing_extensions import Buffer

    from dcp_objstore.stores.s3.checksums import Checksums

_log = logging.getLogger("dcp_objstore")


class S3Store(BaseStore, ABC):
    """A store rooted at one s3:// URL.

    Args:
        url: the root.
        checksums: that go with bodies.
        extra: arguments of every request.
        sealing: arguments of every write: how the store is to encrypt.
    """

    def __init__(
        self,
        url: StoreUrl,
        checksums: Checksums,
        *,
        extra: Mapping[str, str] | None = None,
        sealing: Mapping[str, str | bool] | None = None,
    ) -> None:
        super().__init__(url)
        self._checksums = checksums
        self._sealing = sealing or {}
        self._bucket = {"Bucket": url.bucket, **(extra or {})}
        self._root = f"{url.prefix}/" if url.prefix else ""

    @property
    def capabilities(self) -> Capabilities:
        """Everything; `checkpoint.probe` finds out if the server keeps it."""
        return Capabilities()

    # What an adapter says.

    @abstractmethod
    def _client(self, use: Literal["read", "write", "once"]) -> Any:
        """What has S3's operations as methods; with `once` it sends each request once."""

    @abstractmethod
    def _read_whole(
        self, target: Mapping[str, str], max_size_bytes: int
    ) -> tuple[Mapping[str, Any], bytes | bytearray | None]:
        """Answer and body of a GET; no body where it is announced to be larger."""

    @abstractmethod
    def _body(self, part: Sequence[memoryview], check: Any = None) -> Any:
        """The buffers as the `Body` of a request; `check` is called while it is sent."""

    @abstractmethod
    def _translate(self, error: Exception, *, conditional: bool = False) -> DcpObjstoreError:
        """Translate what an operation raised, as `translate_botocore` does."""

    def _conditional_write(self) -> AbstractContextManager[Any]:
        """Entered around each conditional write."""
        return nullcontext()

    def _upload(self, target: Mapping[str, str], max_concurrency: int) -> MultipartUpload:
        client = self._client("write")
        return MultipartUpload(
            client, target, self._sealing, self._checksums, max_concurrency, self._body
        )

    # The verbs, but for ranges.

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
            views = [memoryview(buffer) for buffer in buffers]
            if not condition:
                return self._put_whole(target, views, retry=retry)
            with self._conditional_write():
                return self._put_whole({**target, **condition}, views, retry=retry)

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
                parts = cut_parts(source, part_size_bytes)
                part = next(parts, [])
                if sum(map(len, part)) < part_size_bytes:
                    return self._put_whole(target, part, retry=True)
                upload = self._upload(target, max_concurrency)
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
                shown = error if source.error is None else source.error
                if isinstance(shown, DcpObjstoreError):
                    shown.message += f"; {LEFTOVER_ADVICE}"
                else:
                    _log.warning("the upload of %s was not aborted; %s", key, LEFTOVER_ADVICE)
            if source.error is None:
                raise
        # Outside of the handler, so that the caller's error keeps its own cause and context.
        raise source.error

    def _put_whole(
        self, target: Mapping[str, str], views: Sequence[memoryview], *, retry: bool
    ) -> Version:
        body = self._body(views)
        # With an empty Body, botocore before 1.44 hangs in the next request of the connection.
        carried = {"Body": body} if len(body) else {}
        client = self._client("write" if retry else "once")
        checksum = self._checksums.of(views)
        return _version(client.put_object(**target, **self._sealing, **checksum, **carried))

    def get(self, key: str, *, max_size_bytes: int) -> tuple[bytes, ObjectMeta]:
        """See `ObjectStore.get`."""
        with self._errors(key) as target:
            answer, body = self._read_whole(target, max_size_bytes)
            if str(answer.get("ContentType", "")).startswith("text/html"):
                raise ConfigError(NO_STORE)  # no object here is a page
            meta = _meta(key, answer)
            check_fits(meta.size_bytes, max_size_bytes)
            body = body or b""
            check_whole(len(body), meta.size_bytes)
            return bytes(body), meta

    def head(self, key: str) -> ObjectMeta:
        """See `ObjectStore.head`."""
        with self._errors(key) as target:
            try:
                return _meta(key, self._client("read").head_object(**target))
            except Exception as error:
                if status_of(error) not in UNCLEAR_IN_HEAD:
                    raise
            # A GET of nearly nothing says what is wrong.
            answer, _ = self._read_whole({**target, "Range": "bytes=0-0"}, 1)
            size = str(answer.get("ContentRange", "")).rpartition("/")[2]
            return _meta(key, {**answer, "ContentLength": int(size or answer["ContentLength"])})

    def list(self, prefix: str = "") -> Iterator[ObjectMeta]:
        """See `ObjectStore.list`."""
        below = check_prefix(prefix)
        return self._pages(self._root + (f"{below}/" if below else ""))

    def _pages(self, start: str) -> Iterator[ObjectMeta]:
        after: dict[str, str] = {}
        with self._errors(None) as target:
            client = self._client("read")
            while True:
                page = client.list_objects_v2(**target, Prefix=start, **after)
                for entry in page.get("Contents", ()):
                    yield self._listed(entry, start)
                token = page.get("NextContinuationToken")
                if not page.get("IsTruncated") or token is None:
                    return
                if after.get("ContinuationToken") == token:
                    raise StoreUnavailableError("the store answers with the same page again")
                after = {"ContinuationToken": token}

    def _listed(self, entry: Mapping[str, Any], start: str) -> ObjectMeta:
        key: str = entry["Key"]
        if not key.startswith(start):
            raise StoreUnavailableError(f"the store answered with a key outside the root: {key!r}")
        version = Version(entry["ETag"])
        return ObjectMeta(key[len(self._root) :], entry["Size"], version, entry["LastModified"])

    def delete(self, key: str) -> None:
        """See `ObjectStore.delete`."""
        with self._errors(key) as target:
            try:
                self._client("write").delete_object(**target)
            except Exception as error:
                # S3 says 204 for an absent object; others say 404.
                if not isinstance(self._translate(error), ObjectNotFoundError):
                    raise

    @contextmanager
    def _errors(self, key: str | None, *, conditional: bool = False) -> Iterator[dict[str, str]]:
        """Check the key, yield the arguments that name the object, translate what is raised."""
        target = dict(self._bucket)
        if key is not None:
            target["Key"] = self._root + check_key(key)
        with self._located(key, partial(self._translate, conditional=conditional)):
            yield target


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


def _meta(key: str, answer: Mapping[str, Any]) -> ObjectMeta:
    missing = [name for name in ("ContentLength", "ETag", "LastModified") if name not in answer]
    if missing:
        raise StoreUnavailableError(f"{NO_STORE}: its answer has no {' and no '.join(missing)}")
    return ObjectMeta(key, answer["ContentLength"], _version(answer), answer["LastModified"])


def _version(answer: Mapping[str, Any]) -> Version:
    return version_of(answer["ETag"], answer.get("VersionId"))
