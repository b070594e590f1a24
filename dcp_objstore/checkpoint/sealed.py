"""Small JSON objects that end with a digest of themselves: how a marker and a `_CLAIM` are stored.

The last field is `digest`: the SHA-256, in hexadecimal, of the bytes of the same object without
that field. So the digest covers the bytes as they lie, unknown fields included, and no re-encoding
has to agree with anybody's.
"""

from __future__ import annotations

import hashlib
import re

import msgspec

from dcp_objstore.errors import CheckpointCorruptError, UnsupportedError

_TAIL = re.compile(rb',"digest":"([0-9a-f]{64})"\}\Z')
_TAIL_SIZE_BYTES = len(',"digest":""}') + 64


class _Format(msgspec.Struct):
    format: int


_format_decoder = msgspec.json.Decoder(_Format)


def with_checksum(body: bytes) -> bytes:
    """A JSON object, not empty, with its digest as one more field."""
    return body[:-1] + b',"digest":"%s"}' % hashlib.sha256(body).hexdigest().encode()


def check_checksum(body: bytes, *, what: str, newest_format: int, max_size_bytes: int) -> None:
    """Check size, format and digest, before anything else is decoded.

    Args:
        body: as it lies on the store.
        what: it is, for errors.
        newest_format: the largest `format` that this version knows.
        max_size_bytes: the largest that is looked at.

    Raises:
        CheckpointCorruptError: too large, not JSON, or the digest is wrong.
        UnsupportedError: written by a newer version in a format that this one does not know.
    """
    if len(body) > max_size_bytes:
        raise damaged(what, f"it has {len(body)} bytes, at most {max_size_bytes} are allowed")
    try:
        found = _format_decoder.decode(body).format
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise damaged(what, f"{error}") from error
    # Before the digest, whose rule a newer format may have changed.
    if found > newest_format:
        raise UnsupportedError(
            f"{what} has format {found}, this version of dcp_objstore knows up to {newest_format};"
            " upgrade dcp_objstore"
        )
    tail = _TAIL.search(body, max(0, len(body) - _TAIL_SIZE_BYTES))
    if tail is None:
        raise damaged(what, "it does not end with its digest")
    if hashlib.sha256(body[: tail.start()] + b"}").hexdigest().encode() != tail[1]:
        raise damaged(what, "it differs from its own digest")


def damaged(what: str, reason: str) -> CheckpointCorruptError:
    """The error for one that cannot be what was written."""
    return CheckpointCorruptError(f"{what} is damaged: {reason}")
