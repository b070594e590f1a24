"""Which kind a filesystem of fsspec is, and so how it is written and what it can promise.

- Object stores (gcsfs, adlfs, …): what is written appears when it is complete, or never.
- Anything else may show an object while it is being written.
A create that fails where something is exists for those filesystems only whose way of doing it is
known to be atomic; elsewhere `mode="create"` looks first and writes then.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Ways:
    """How a kind of filesystem is written.

    Attributes:
        whole: what is written appears when it is complete, or never.
        create: how an object is created where none is, atomically: by its `own` adapter, by
            `link`, under a `lock` (within this process), or not at all.
        buckets: the first segment is a bucket, which may be missing.
    """

    whole: bool
    create: Literal["own", "link", "lock"] | None
    buckets: bool


UNKNOWN = Ways(whole=False, create=None, buckets=False)
_OBJECTS = Ways(whole=True, create=None, buckets=True)
# Of these, writing into an open upload and closing it is how an object comes to be.
_OBJECT_LIBRARIES = ("adlfs", "ocifs", "ossfs", "s3fs", "tosfs")


def ways_of(fs: object) -> Ways:
    """How a filesystem is written; `UNKNOWN` for other kinds."""
    if is_gcsfs(fs):
        return Ways(whole=True, create="own", buckets=True)
    if _is_of(fs, "fsspec.implementations.local", "LocalFileSystem"):
        return Ways(whole=False, create="link", buckets=False)
    if _is_of(fs, "fsspec.implementations.memory", "MemoryFileSystem"):
        return Ways(whole=True, create="lock", buckets=False)
    libraries = {cls.__module__.partition(".")[0] for cls in type(fs).__mro__}
    return _OBJECTS if libraries.intersection(_OBJECT_LIBRARIES) else UNKNOWN


def is_s3fs(fs: object) -> bool:
    """Whether it is s3fs's; others call themselves `s3` as well."""
    return _is_of(fs, "s3fs.core", "S3FileSystem")


def is_gcsfs(fs: object) -> bool:
    """Whether it is gcsfs's."""
    return _is_of(fs, "gcsfs.core", "GCSFileSystem")


def _is_of(fs: object, module: str, name: str) -> bool:
    return any((cls.__module__, cls.__name__) == (module, name) for cls in type(fs).__mro__)
