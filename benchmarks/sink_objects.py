"""What the sink remembers: objects and uploads, with their bodies or without."""

from __future__ import annotations

import itertools
import threading
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, chain

import xxhash

# What bodies are kept in; see `Blocks`.
_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class Body:
    """The bytes of an object or part; `blocks` is None when they were discarded."""

    size_bytes: int
    blocks: tuple[bytes, ...] | None

    def views(self, start: int, end: int) -> Iterator[memoryview]:
        """Yield the memory of bytes `[start, end)`; the body must have been kept."""
        assert self.blocks is not None
        for number in range(bisect_right(self._starts, start) - 1, len(self.blocks)):
            block, position = self.blocks[number], self._starts[number]
            if position >= end:
                return
            yield memoryview(block)[max(start - position, 0) : end - position]

    @cached_property
    def _starts(self) -> list[int]:
        assert self.blocks is not None
        return list(accumulate(map(len, self.blocks), initial=0))


class Blocks:
    """Keeps bodies, equal blocks of them once.

    The states that are measured repeat themselves, so that what is sent comes from the processor's
    cache and not over the memory bus, for which the client would have to compete with its server:
    as on a machine whose network card brings the bytes.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks: dict[bytes, bytes] = {}

    def keep(self, data: bytearray) -> Body:
        """A body of these bytes."""
        view = memoryview(data)
        cut = [view[at : at + _BLOCK_BYTES] for at in range(0, len(view), _BLOCK_BYTES)]
        return Body(len(data), tuple(self._shared(block) for block in cut))

    def _shared(self, block: memoryview) -> bytes:
        if len(block) < _BLOCK_BYTES:
            return bytes(block)
        digest = xxhash.xxh3_128_digest(block)
        with self._lock:
            known = self._blocks.get(digest)
            if known is None or known != block:
                known = self._blocks[digest] = bytes(block)
        return known


@dataclass(frozen=True)
class Stored:
    """One object."""

    body: Body
    e_tag: str


@dataclass(frozen=True)
class Page:
    """One page of a listing: objects and common prefixes, and where the next one begins."""

    objects: list[tuple[str, Stored]]
    prefixes: list[str]
    next_token: str | None


class RefusedError(Exception):
    """The request is answered with this status line and S3 error code."""

    def __init__(self, status: str, code: str) -> None:
        super().__init__(f"{status}: {code}")
        self.status = status
        self.code = code


@dataclass
class _Upload:
    key: str
    parts: dict[int, Body] = field(default_factory=dict)


class Objects:
    """Every bucket's objects by `bucket/key`, uploads in progress, and counts of requests.

    Attributes:
        blocks: what their bodies are kept in.
    """

    def __init__(self) -> None:
        self.blocks = Blocks()
        self._lock = threading.Lock()
        self._objects: dict[str, Stored] = {}
        self._uploads: dict[str, _Upload] = {}
        self._numbers = itertools.count(1)
        self._requests: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()
        self._refused = 0
        self._cpu_seconds = time.process_time()

    def count(self, verb: str, received_bytes: int) -> None:
        """Count one request and the bytes of its body."""
        with self._lock:
            self._requests[verb] += 1
            self._bytes["received"] += received_bytes

    def count_sent(self, size_bytes: int) -> None:
        """Count the bytes of an answer's body."""
        with self._lock:
            self._bytes["sent"] += size_bytes

    def count_refused(self) -> None:
        """Count a request that was refused because there were too many."""
        with self._lock:
            self._refused += 1

    def stats(self) -> dict[str, object]:
        """Return what was counted.

        `requests` by verb; `refused` of them; `received_bytes` and `sent_bytes` of bodies; uploads
        in progress; `cpu_seconds` of this process.
        """
        with self._lock:
            return {
                "requests": dict(self._requests),
                "refused": self._refused,
                "received_bytes": self._bytes["received"],
                "sent_bytes": self._bytes["sent"],
                "open_uploads": len(self._uploads),
                "cpu_seconds": time.process_time() - self._cpu_seconds,
            }

    def reset_stats(self) -> None:
        """Begin counting at zero."""
        with self._lock:
            self._requests.clear()
            self._bytes.clear()
            self._refused = 0
            self._cpu_seconds = time.process_time()

    def put(
        self, key: str, body: Body, *, if_none_match: str | None, if_match: str | None
    ) -> Stored:
        """Store an object if the preconditions hold.

        Raises:
            RefusedError: they do not; AWS's statuses (404 for If-Match on an absent key).
        """
        with self._lock:
            return self._put(key, body, if_none_match, if_match)

    def get(self, key: str) -> Stored:
        """The object.

        Raises:
            RefusedError: there is none.
        """
        with self._lock:
            stored = self._objects.get(key)
        if stored is None:
            raise RefusedError("404 Not Found", "NoSuchKey")
        return stored

    def delete(self, key: str) -> None:
        """Forget the object, if there is one."""
        with self._lock:
            self._objects.pop(key, None)

    def list_page(
        self, bucket: str, prefix: str, delimiter: str, after: str, max_keys: int
    ) -> Page:
        """Up to `max_keys` keys (without the bucket) and common prefixes above `after`."""
        root = f"{bucket}/"
        with self._lock:
            found = [(k[len(root) :], o) for k, o in self._objects.items() if k.startswith(root)]
        found = sorted(item for item in found if item[0].startswith(prefix))
        start = bisect_right([key for key, _ in found], after) if after else 0
        objects: list[tuple[str, Stored]] = []
        prefixes: list[str] = []
        last = ""
        for key, stored in found[start:]:
            head, cut, _ = key[len(prefix) :].partition(delimiter) if delimiter else (key, "", "")
            group = f"{prefix}{head}{cut}" if cut else None
            if group is not None and (group == after or (prefixes and prefixes[-1] == group)):
                last = key
                continue
            if len(objects) + len(prefixes) == max_keys:
                return Page(objects, prefixes, last)
            last = key
            if group is None:
                objects.append((key, stored))
            else:
                prefixes.append(group)
        return Page(objects, prefixes, None)

    def begin_upload(self, key: str) -> str:
        """A new multipart upload's id."""
        with self._lock:
            upload_id = f"upload-{next(self._numbers)}"
            self._uploads[upload_id] = _Upload(key)
        return upload_id

    def put_part(self, key: str, upload_id: str, number: int, body: Body) -> str:
        """Store a part and return its ETag.

        Raises:
            RefusedError: there is no such upload.
        """
        with self._lock:
            self._upload(key, upload_id).parts[number] = body
            return f'"part-{next(self._numbers):x}"'

    def complete_upload(
        self,
        key: str,
        upload_id: str,
        numbers: Sequence[int],
        *,
        if_none_match: str | None,
        if_match: str | None,
    ) -> Stored:
        """Join the named parts into the object.

        Raises:
            RefusedError: no such upload or part, or a precondition does not hold.
        """
        with self._lock:
            upload = self._upload(key, upload_id)
            if not numbers or any(number not in upload.parts for number in numbers):
                raise RefusedError("400 Bad Request", "InvalidPart")
            parts = [upload.parts[number] for number in numbers]
            kept = [part.blocks for part in parts if part.blocks is not None]
            blocks = tuple(chain.from_iterable(kept)) if len(kept) == len(parts) else None
            body = Body(sum(part.size_bytes for part in parts), blocks)
            stored = self._put(key, body, if_none_match, if_match)
            del self._uploads[upload_id]
            return stored

    def abort_upload(self, key: str, upload_id: str) -> None:
        """Forget an upload and its parts.

        Raises:
            RefusedError: there is no such upload.
        """
        with self._lock:
            self._upload(key, upload_id)
            del self._uploads[upload_id]

    def _upload(self, key: str, upload_id: str) -> _Upload:
        upload = self._uploads.get(upload_id)
        if upload is None or upload.key != key:
            raise RefusedError("404 Not Found", "NoSuchUpload")
        return upload

    def _put(self, key: str, body: Body, if_none_match: str | None, if_match: str | None) -> Stored:
        present = self._objects.get(key)
        if if_match is not None and present is None:
            raise RefusedError("404 Not Found", "NoSuchKey")
        clash = (if_none_match == "*" and present is not None) or (
            if_match is not None and present is not None and present.e_tag != if_match
        )
        if clash:
            raise RefusedError("412 Precondition Failed", "PreconditionFailed")
        stored = Stored(body, f'"sink-{next(self._numbers):x}"')
        self._objects[key] = stored
        return stored
