"""`ObjectStore`: what the rest of the project may ask of a store, and nothing more.

Every verb is one logical request. Keys are relative to the store's root (the URL that it was
opened with), `/`-separated, without a leading slash. Every verb raises only errors of
`dcp_objstore.errors`; besides those named below, any of them may raise `StoreUnavailableError`,
`CredentialsError`, `PermissionDeniedError` and `BucketNotFoundError`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol, Self, TypeAlias, runtime_checkable

from typing_extensions import Buffer

# The text of an error where the parts of an upload may stay behind.
LEFTOVER_ADVICE = (
    "an incomplete multipart upload may be left under this key, unseen and billed; a lifecycle rule"
    " of the bucket (AbortIncompleteMultipartUpload after a day or two) removes such"
)


@dataclass(frozen=True, slots=True)
class Version:
    """The store's own token for one state of an object: an ETag, a generation, or both."""

    e_tag: str | None = None
    version: str | None = None

    @classmethod
    def of(cls, e_tag: str | None, version: str | None) -> Version:
        """Make the token of an answer of S3."""
        # moto and unversioned buckets say 'null' after a multipart upload, and nothing to a HEAD.
        # Ceph's gateway says '' there, and the ETag without quotes to who asks again.
        quoted = f'"{e_tag}"' if e_tag and not e_tag.endswith('"') else e_tag
        return cls(quoted or None, None if version == "null" else version)


@dataclass(frozen=True, slots=True)
class IfAbsent:
    """Precondition: there is no object under the key (S3 `If-None-Match: *`)."""


@dataclass(frozen=True, slots=True)
class IfVersion:
    """Precondition: the object is still in this state (S3 `If-Match`, GCS generation).

    Attributes:
        version: the state.
        bare: send its ETag without the quotes, for a server that lacks `quoted_e_tags`.
    """

    version: Version
    bare: bool = False

    @property
    def e_tag(self) -> str | None:
        """The ETag, as it must be sent.

        A weak one never matches (RFC 9110, section 13.1.1), so the server is asked for the strong
        one, from which something on the way has made it.
        """
        if self.version.e_tag is None:
            return None
        e_tag = self.version.e_tag.removeprefix("W/")
        return e_tag.strip('"') if self.bare else e_tag


Precondition: TypeAlias = IfAbsent | IfVersion


@dataclass(frozen=True, slots=True)
class ObjectMeta:
    """The store's description of an object.

    Attributes:
        key: its key, relative to the store's root.
        size_bytes: its size.
        version: the token for a conditional write against this state.
        last_modified: the time of the last write, by the store's clock (timezone-aware).
    """

    key: str
    size_bytes: int
    version: Version
    last_modified: datetime


@dataclass(frozen=True, slots=True)
class CopySource:
    """Bytes `[start, end)` of an object, to be copied by the store itself.

    Attributes:
        url: the URL of the object, at the same provider or server, for the same credentials. The
            bucket may be another one.
        start, end: the range, which is not empty.
        version: the state in which the object must be.
    """

    url: str
    start: int
    end: int
    version: Version


@dataclass(frozen=True, slots=True)
class UnfinishedUpload:
    """A multipart upload that was neither completed nor aborted: unseen, and billed.

    Attributes:
        key: the key of the object that it would become, relative to the root of the `Uploads`.
        upload_id: the store's id of it.
        initiated: the time at which it began, by the store's clock (timezone-aware).
        size_bytes: the size of its parts.
    """

    key: str
    upload_id: str
    initiated: datetime
    size_bytes: int


class Uploads(Protocol):
    """The unfinished uploads below one root."""

    def list(self) -> Sequence[UnfinishedUpload]:
        """Return the uploads in progress and the orphaned ones."""
        ...

    def abort(self, upload: UnfinishedUpload) -> None:
        """Remove its parts. No error is raised if it is already gone."""
        ...


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The guarantees that an adapter claims; the default is everything.

    `tests/contract` holds each adapter to its claims, and `checkpoint.probe` tries the first
    three on the server that is really there. A store that lacks one says so here and refuses what
    it cannot do with `UnsupportedError`; it never does something weaker in silence.

    Attributes:
        conditional_create: `put(..., precondition=IfAbsent())` is atomic: of any number of
            writers exactly one succeeds. Without it, such a put raises `UnsupportedError`.
        conditional_update: `put(..., precondition=IfVersion(v))` is atomic, and `put`,
            `put_stream`, `get` and `head` give the same token for the same state. Without it, such
            a put raises `UnsupportedError`, and a `Version` may be empty.
        multipart: `put_stream` uploads parts in parallel. Without it a stream is written in order.
        listed_versions: `list` gives the tokens that `head` gives, to be used in an `IfVersion`.
            Without it (GCS), ask `head` first; a listed token is none or another one.
        clean_abort: a stream whose iterator raises leaves nothing behind on the store: no
            object, no open upload, no parts. Without it, what is left is unseen by `list`.
        atomic_put: an object appears whole or not at all, also when a stream or the process ends
            in the middle, and a reader never sees a part of it. Without it, a broken write may
            leave a short object, or none where there was one.
        modified_times: `last_modified` is when the object was written, by the store's clock.
            Without it the time is that of the request, so nothing ever looks old.
        ranges: `open_range` gives any part of an object. Without it (a server that ignores `Range`,
            as `rclone serve s3` does), a part is an error, never other bytes; nothing can be
            loaded from there.
        copies: `copy` makes an object of others without their bytes passing through here. Without
            it, `copy` raises `UnsupportedError`.
        range_copies: `copy` takes ranges, and several of them. Without it (GCS, Azure) it takes one
            whole object. It says nothing where there are no copies.
        quoted_e_tags: an `IfVersion` holds by an ETag with its quotes, as the server gave it.
            Without it (Ceph's gateway), only an `IfVersion` that is `bare` holds.
    """

    conditional_create: bool = True
    conditional_update: bool = True
    multipart: bool = True
    listed_versions: bool = True
    clean_abort: bool = True
    atomic_put: bool = True
    modified_times: bool = True
    ranges: bool = True
    copies: bool = True
    range_copies: bool = True
    quoted_e_tags: bool = True

    def if_version(self, version: Version) -> IfVersion:
        """Return the condition that an object is in a state, as the server takes it."""
        return IfVersion(version, bare=not self.quoted_e_tags)


@dataclass(frozen=True, slots=True)
class RangeReading:
    """The way a store reads ranges, by which a transfer plans its threads and its memory.

    Attributes:
        ahead: `open_range` sends the request at once and returns before the answer has come. Then
            a few threads keep many connections busy: while one body is worked on, the next ones
            arrive in the memory of the kernel.
        takes_gil: a thread that reads takes the GIL for every few KiB, as over TLS. Then threads
            that read at the same time wait for one another, and fewer of them cost less.
        memory_bytes: an opened range takes at most this much memory besides the caller's while it
            is read, and none before.
    """

    ahead: bool = False
    takes_gil: bool = False
    memory_bytes: int = 0


class RangeBody(Protocol):
    """Bytes `[start, end)` of an object, read front to back into the caller's memory.

    Use it from one thread at a time, but for `cancel`, and close it. It is a context manager that
    does.
    """

    def readinto(self, into: memoryview) -> None:
        """Fill `into` with the next bytes. It waits for them, and asks again for what broke off.

        A reader that is done with a piece before it reads the next one into the same memory finds
        it in the processor's cache, and has less memory in use than the range is long.

        Args:
            into: memory that is writable, 1-D and contiguous. After an error it may hold anything.

        Raises:
            InputError: `into` is read-only or longer than what is left, or the range is closed. No
                byte was read.
            ObjectNotFoundError: there is no such object.
            CorruptDataError: the object ends before `end`, or other bytes came than were asked
                for.
        """
        ...

    def hold(self, check: Callable[[Version], None]) -> None:
        """Hold the range to a state of the object: check that of each answer before its bytes.

        Args:
            check: a function that `readinto` calls with the state that the answer is of, and that
                may raise. It is not called where the store does not say the state.
        """
        ...

    def descriptor_to_poll(self) -> int | None:
        """Return a descriptor that is readable once the answer has begun.

        A server that serves few requests at a time begins an answer only when the ones before it
        were read. Who has several ranges open reads those first whose answers have begun.

        Returns:
            None if the answer has begun, or there is none to wait for.
        """
        ...

    def cancel(self, *, at_once: bool) -> bool:
        """End a `readinto` that another thread is in, with an error. Any thread may call this.

        Args:
            at_once: what becomes of a `readinto` whose transport cannot be interrupted. True:
                nothing, it goes on. False: it ends when the transport does, and sends no other
                request; if the store reads ranges ahead, it writes nothing from now on.

        Returns:
            Whether it ends at once, because its connection was shut down.
        """
        ...

    def close(self) -> None:
        """Give up what was not read."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


@runtime_checkable
class ObjectStore(Protocol):
    """A store rooted at one URL. Safe to use from many threads; not across a fork."""

    @property
    def url(self) -> str:
        """The root, without credentials."""
        ...

    @property
    def endpoint_url(self) -> str | None:
        """The server; None for the provider's own, and where there is no server."""
        ...

    @property
    def capabilities(self) -> Capabilities:
        """The guarantees that the adapter claims."""
        ...

    @property
    def reports_throttling(self) -> Collection[str]:
        """The verbs whose requests the adapter sends again itself.

        It reports each such retry, and each request that the store puts off, to the bucket's
        `Limiter`. The transport retries other verbs out of sight.
        """
        ...

    @property
    def range_reading(self) -> RangeReading:
        """The way ranges are read, as far as is known; a lane that only fails is given up."""
        ...

    def put(
        self,
        key: str,
        data: Buffer | Sequence[Buffer],
        *,
        precondition: Precondition | None = None,
        retry: bool = True,
    ) -> Version:
        """Write one object in one request, whole or not at all.

        Args:
            key: the object.
            data: 1-D contiguous uint8 buffer, or several that are sent one after the other.
            precondition: write only if it holds.
            retry: False sends the request once; any unclear answer is raised at once as
                `StoreUnavailableError` (the write may have taken effect).

        Raises:
            PreconditionFailedError: the precondition did not hold; nothing was written. With
                `retry=True` this may also be the answer to a retry of our own successful first
                try, so conditional puts that matter pass `retry=False`.
        """
        ...

    def put_stream(
        self,
        key: str,
        buffers: Iterator[Buffer],
        *,
        part_size_bytes: int,
        max_concurrency: int,
    ) -> Version:
        """Write one object from an iterator of buffers as a multipart upload.

        Buffers are 1-D contiguous uint8, at most `part_size_bytes` each. They are held, not
        copied, until their part is uploaded, and dropped then; their memory must not change
        before. All parts but the last have exactly `part_size_bytes`.

        The calling thread asks the iterator for more only while at most `max_concurrency` parts
        (two, if that is 1) are without a good answer, so callers count all earlier parts as
        uploaded. If the iterator raises, the upload is aborted and the error passes through
        unchanged.
        """
        ...

    def copy(
        self,
        key: str,
        sources: Sequence[CopySource],
        *,
        part_size_bytes: int,
        max_concurrency: int,
        moved: Callable[[int], None],
    ) -> Version:
        """Write one object of ranges of other objects, which the store copies.

        The object appears whole or not at all, and only if all sources were in the given states
        when they were copied. Where there are parts, each source is cut into as few equal ones as
        have at most `part_size_bytes`. All parts but the last need 5 MiB, and some servers
        (Cloudflare R2) refuse parts that are not equal.

        Args:
            key: the object.
            sources: the ranges that it is made of, in order.
            part_size_bytes: the largest part.
            max_concurrency: the number of parts that are copied at a time.
            moved: a function that is called in any thread with the size of each part that was
                copied. What it raises (a `DcpObjstoreError`, or what is no `Exception`) ends the
                copy.

        Raises:
            UnsupportedError: the store does not copy, or not from there, or not ranges.
            ObjectNotFoundError: a source is missing.
            PreconditionFailedError: a source is in another state.
            CorruptDataError: a source ends before its range.
            InputError: there are no sources, or an empty range.
        """
        ...

    def get(self, key: str, *, max_size_bytes: int) -> tuple[bytes, ObjectMeta]:
        """Read a whole small object, body and metadata from the same response.

        Raises:
            ObjectNotFoundError: there is none.
            CorruptDataError: it is larger than `max_size_bytes`; the body was not read.
        """
        ...

    def open_range(self, key: str, start: int, end: int) -> RangeBody:
        """Open bytes `[start, end)` of an object, to be read front to back.

        Where `range_reading.ahead` says so, the request is sent now, otherwise at the first
        `readinto`. An empty range needs no request.

        Raises:
            InputError: that is not a range. Everything else that goes wrong, an absent object
                included, is raised by `readinto`.
        """
        ...

    def head(self, key: str) -> ObjectMeta:
        """Metadata of one object.

        Raises:
            ObjectNotFoundError: there is none.
        """
        ...

    def list(self, prefix: str = "") -> Iterator[ObjectMeta]:
        """All objects whose key starts with `prefix`, page by page, in the store's order.

        `prefix` ends at a `/` or is empty. An absent prefix is an empty listing.
        """
        ...

    def delete(self, key: str) -> None:
        """Remove one object. No error is raised if it is absent."""
        ...
