"""A bucket in memory as an S3 server has it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta

import xxhash

from dcp_objstore.errors import ObjectNotFoundError, PreconditionFailedError
from dcp_objstore.stores.protocol import IfAbsent, IfVersion, ObjectMeta, Precondition, Version


@dataclass
class _Pending:
    key: str
    initiated: datetime
    parts: dict[int, bytes] = field(default_factory=dict)


class Bucket:
    """Objects and uploads by full key. Equal content has an equal ETag, as on S3."""

    now: Callable[[], datetime] = staticmethod(lambda: datetime.now(UTC))

    def __init__(self) -> None:
        self.objects: dict[str, tuple[bytes, ObjectMeta]] = {}
        self.uploads: dict[str, _Pending] = {}
        self._numbers = 0
        self._lock = threading.RLock()

    def copy(self) -> Bucket:
        """As it is now."""
        twin = Bucket()
        twin.objects = dict(self.objects)
        twin.uploads = {
            name: replace(pending, parts=dict(pending.parts))
            for name, pending in self.uploads.items()
        }
        twin._numbers = self._numbers
        return twin

    def age(self, **units: float) -> None:
        """Let time pass: all that is here becomes so much older (see `timedelta`)."""
        by = timedelta(**units)
        for key, (body, meta) in self.objects.items():
            self.objects[key] = body, replace(meta, last_modified=meta.last_modified - by)
        for pending in self.uploads.values():
            pending.initiated -= by

    def keys(self, root: str) -> list[str]:
        """Keys below a prefix, relative to it."""
        return sorted(key.removeprefix(root) for key in self.objects if key.startswith(root))

    def put(self, key: str, body: bytes, precondition: Precondition | None = None) -> Version:
        """One PUT, or the completion of an upload."""
        with self._lock:
            current = self.objects.get(key)
            absent = isinstance(precondition, IfAbsent) and current is not None
            changed = isinstance(precondition, IfVersion) and (
                current is None or current[1].version != precondition.version
            )
            if absent or changed:
                raise PreconditionFailedError("412", object_key=key)
            version = Version(f'"{xxhash.xxh3_128_hexdigest(body)}"')
            meta = ObjectMeta(key, len(body), version, self.now())
            self.objects[key] = body, meta
            return version

    def get(self, key: str) -> tuple[bytes, ObjectMeta]:
        """Body and metadata."""
        with self._lock:
            found = self.objects.get(key)
        if found is None:
            raise ObjectNotFoundError("404", object_key=key)
        return found

    def list(self, prefix: str) -> list[ObjectMeta]:
        """In the order of the keys."""
        with self._lock:
            return [self.objects[key][1] for key in sorted(self.objects) if key.startswith(prefix)]

    def delete(self, key: str) -> None:
        """Absent or not."""
        with self._lock:
            self.objects.pop(key, None)

    def begin(self, key: str) -> str:
        """A multipart upload; its id."""
        with self._lock:
            self._numbers += 1
            name = f"upload-{self._numbers}"
            self.uploads[name] = _Pending(key, self.now())
            return name

    def part(self, name: str, number: int, body: bytes) -> None:
        """One part of it."""
        with self._lock:
            self.uploads[name].parts[number] = body

    def complete(self, name: str) -> Version:
        """The object comes to be."""
        with self._lock:
            pending = self.uploads.pop(name)
            return self.put(
                pending.key, b"".join(body for _, body in sorted(pending.parts.items()))
            )

    def abort(self, name: str) -> None:
        """Gone or not."""
        with self._lock:
            self.uploads.pop(name, None)
