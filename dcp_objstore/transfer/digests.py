"""XXH3-128 digests of payload, one per 4 MiB block.

They detect damage in transit and at rest; they are not a signature. `xxhash` releases the GIL for
each large block, so blocks are hashed while the same memory is uploaded.
"""

from __future__ import annotations

import xxhash
from typing_extensions import Buffer

BLOCK_SIZE_BYTES = 4 * 1024 * 1024
DIGEST_SIZE_BYTES = 16
# `xxhash` keeps the GIL up to this size, and releases it for more (measured with 4.1).
_LARGEST_WITH_GIL_BYTES = 65_536

# Makes the digest of one block from its pieces: `update(piece)`, then `digest()`.
BlockDigest = xxhash.xxh3_128


def block_digest(block: Buffer) -> bytes:
    """Return the digest of one block: 16 bytes, big-endian (XXH3's canonical form)."""
    return xxhash.xxh3_128_digest(block)


def small_digest(payload: Buffer) -> bytes:
    """Return the digest of a payload of at most one block, without releasing the GIL.

    Up to a MiB or so (100 us), this costs other threads less than if the GIL changed hands twice.
    `xxhash` would release it for a large buffer, so it gets the payload in small pieces. An empty
    payload has an empty digest.
    """
    with memoryview(payload) as view:
        if not view.nbytes:
            return b""
        state = BlockDigest()
        for start in range(0, view.nbytes, _LARGEST_WITH_GIL_BYTES):
            with view[start : start + _LARGEST_WITH_GIL_BYTES] as piece:
                state.update(piece)
        return state.digest()


def block_digests(payload: Buffer) -> bytes:
    """Return the digests of all blocks of a payload, joined.

    Args:
        payload: a 1-D contiguous uint8 buffer that starts at a block boundary.
    """
    view = memoryview(payload)
    return b"".join(
        xxhash.xxh3_128_digest(view[start : start + BLOCK_SIZE_BYTES])
        for start in range(0, view.nbytes, BLOCK_SIZE_BYTES)
    )
