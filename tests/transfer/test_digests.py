"""Digests: one for each block of 4 MiB, the same in whatever steps it is computed."""

from __future__ import annotations

import random

import pytest
import xxhash

from dcp_objstore.transfer.digests import (
    BLOCK_SIZE_BYTES,
    DIGEST_SIZE_BYTES,
    block_digest,
    block_digests,
    small_digest,
)

BODY = random.Random(7).randbytes(8 * 1024 * 1024 + 1)


@pytest.mark.parametrize("size_bytes", [1, 65_535, 65_536, 65_537, 200_000, BLOCK_SIZE_BYTES])
def test_the_digest_of_a_block_is_xxh3_128_of_all_of_it(size_bytes):
    block = BODY[:size_bytes]
    digest = xxhash.xxh3_128_digest(block)
    assert block_digest(block) == small_digest(block) == block_digests(block) == digest
    assert len(digest) == DIGEST_SIZE_BYTES == 16


def test_each_4_mib_have_a_digest_and_nothing_has_none():
    assert BLOCK_SIZE_BYTES == 4 * 1024 * 1024
    blocks = [BODY[at : at + BLOCK_SIZE_BYTES] for at in range(0, len(BODY), BLOCK_SIZE_BYTES)]
    assert block_digests(BODY) == b"".join(map(xxhash.xxh3_128_digest, blocks))
    assert small_digest(b"") == block_digests(b"") == b""
