"""XXH3-128 digests of payload, one per 4 MiB block.

They detect damage in transit and at rest; they are no signature. `xxhash` releases the GIL for
each call, so blocks are hashed beside the upload of the same memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    from typing_extensions import Buffer

BLOCK_SIZE_BYTES = 4 * 1024 * 1024
DIGEST_SIZE_BYTES = 16


def digest_count(size_bytes: int) -> int:
    """How many blocks a payload of `size_bytes` has; the last one may be short."""
    return -(-size_bytes // BLOCK_SIZE_BYTES)


def block_digest(block: Buffer) -> bytes:
    """The digest of one block: 16 bytes, big-endian (XXH3's canonical form)."""
    return xxhash.xxh3_128_digest(block)


def block_digests(payload: Buffer) -> bytes:
    """The digests of all blocks of a payload, one after the other.

    Args:
        payload: 1-D contiguous uint8 buffer that starts at a block boundary.
    """
    view = memoryview(payload)
    if view.nbytes <= BLOCK_SIZE_BYTES:
        return xxhash.xxh3_128_digest(view) if view.nbytes else b""
    return b"".join(
        xxhash.xxh3_128_digest(view[start : start + BLOCK_SIZE_BYTES])
        for start in range(0, view.nbytes, BLOCK_SIZE_BYTES)
    )
