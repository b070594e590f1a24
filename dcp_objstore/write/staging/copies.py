"""Copy the planned regions of a staging to their memory.

As many threads as torch is set to use copy host memory, and hash what they copy.
"""

from __future__ import annotations

import ctypes
import math
from typing import TYPE_CHECKING

import torch

from dcp_objstore.config import MIB
from dcp_objstore.transfer.digests import BLOCK_SIZE_BYTES, BlockDigest
from dcp_objstore.transfer.workers import DaemonPool

if TYPE_CHECKING:
    from dcp_objstore.transfer.upload import ByteArray
    from dcp_objstore.write.staging.regions import Region

# A copying thread takes this many bytes at a time: whole digest blocks.
_COPY_BYTES = 32 * MIB
# Tensors of at least this size are hashed as they are copied, in steps so small that source and
# copy fit a core's own cache. With more threads the steps are larger, because each step takes the
# GIL twice.
_HASHED_BYTES = MIB
_CACHED_BYTES = 256 * 1024
_MOST_THREADS = 8


def copy_by_torch(regions: list[Region]) -> None:
    """Copy with torch; copies from devices that work asynchronously are only queued."""
    for region in regions:
        target = torch.from_numpy(region.array)
        if region.storage is None:
            assert region.tensor is not None
            tensor = region.tensor
            target.view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=True)
        else:
            source = torch.empty(0, dtype=torch.uint8, device=region.device)
            source.set_(region.storage, region.start, (region.size_bytes,), (1,))
            target.copy_(source, non_blocking=True)


def copy_host(regions: list[Region]) -> dict[tuple[int, int], bytes]:
    """Copy within host memory, without the GIL. `memmove` takes two thirds of `copy_`'s time.

    The saved third pays for the digests, which are computed while the copied bytes are in the
    processor's cache. Computed later, they would take processor time from the training loop, and
    the GIL for each block.

    Returns:
        The digests of the large contiguous tensors, by the address and size of the copy, as in
        `StagedState.digests`.
    """
    pieces: list[tuple[Region, int, int]] = []
    for region in regions:
        for start in range(0, region.size_bytes, _COPY_BYTES):
            pieces.append((region, start, min(region.size_bytes, start + _COPY_BYTES)))
    total_bytes = sum(region.size_bytes for region in regions)
    threads = min(torch.get_num_threads(), _MOST_THREADS, math.ceil(total_bytes / _COPY_BYTES))
    step_bytes = min(_CACHED_BYTES * max(1, threads), BLOCK_SIZE_BYTES)

    def copy(piece: tuple[Region, int, int]) -> bytes:
        region, start, end = piece
        assert region.storage is not None
        assert region.array is not None
        source = region.storage.data_ptr() + region.start + start
        if not region.is_payload or region.size_bytes < _HASHED_BYTES:
            ctypes.memmove(region.address + start, source, end - start)
            return b""
        return _copy_and_digest(region.array[start:end], region.address + start, source, step_bytes)

    if threads <= 1:
        digests = [copy(piece) for piece in pieces]
    else:
        with DaemonPool(threads, "stage") as pool:
            digests = [done.result() for done in [pool.submit(copy, piece) for piece in pieces]]
    found: dict[tuple[int, int], bytes] = {}
    for (region, _, _), some in zip(pieces, digests, strict=True):
        if some:
            place = region.address, region.size_bytes
            found[place] = found.get(place, b"") + some
    return found


def _copy_and_digest(target: ByteArray, address: int, source: int, step_bytes: int) -> bytes:
    """Copy a whole number of blocks (the last may be short) and return their digests."""
    digests = b""
    for block in range(0, target.nbytes, BLOCK_SIZE_BYTES):
        state = BlockDigest()
        block_end = min(block + BLOCK_SIZE_BYTES, target.nbytes)
        for start in range(block, block_end, step_bytes):
            end = min(start + step_bytes, block_end)
            ctypes.memmove(address + start, source + start, end - start)
            state.update(target[start:end])
        digests += state.digest()
    return digests
