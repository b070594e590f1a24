"""Check what a store answered; the same for all adapters."""

from __future__ import annotations

from typing import Final

from dcp_objstore.errors import CorruptDataError
from dcp_objstore.stores.protocol import Version

# A HEAD's answer has no body, so these do not say whether the key or the bucket is missing, or
# whether the secret is wrong or a right is missing.
UNCLEAR_IN_HEAD: Final = (400, 403, 404, 409)


def check_fits(size_bytes: int, max_size_bytes: int) -> None:
    """Raise `CorruptDataError` for an object that is larger than expected."""
    if size_bytes > max_size_bytes:
        raise CorruptDataError(
            f"the object has {size_bytes} bytes, at most {max_size_bytes} expected"
        )


def check_whole(came_bytes: int, size_bytes: int) -> None:
    """Raise `CorruptDataError` unless all announced bytes came."""
    if came_bytes != size_bytes:
        raise CorruptDataError(f"the store announced {size_bytes} bytes and sent {came_bytes}")


def check_came(came_bytes: int, start: int, end: int) -> None:
    """Raise `CorruptDataError` unless as many bytes came as the range `[start, end)` has."""
    if came_bytes != end - start:
        raise CorruptDataError(f"bytes [{start}, {end}) asked for, but {came_bytes} bytes came")


def version_of(e_tag: str | None, version: str | None) -> Version:
    """Make the token of a state of an ETag and a version, as S3 names them."""
    # moto and unversioned buckets answer 'null' after a multipart upload, and nothing to a HEAD.
    return Version(e_tag, None if version == "null" else version)
