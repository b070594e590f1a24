"""Plan uploads, as pure functions: how large a part is and where buffers are cut.

S3's limits (Amazon S3 user guide, "multipart upload limits"): parts have 5 MiB to 5 GiB, the last
may be smaller; there are at most 10,000 parts; objects have up to 5 TiB (48.8 TiB since the end of
2025; we keep to the older limit, which GCS and other servers have, too). Azure accepts 50,000
blocks. R2 requires all parts but the last to be equal, so the size is fixed for a whole object.
"""

from __future__ import annotations

from dataclasses import dataclass

from dcp_objstore.config import MAX_OBJECT_SIZE_BYTES, MIB
from dcp_objstore.errors import UnsupportedError
from dcp_objstore.transfer.digests import BLOCK_SIZE_BYTES

MAX_PARTS = 10_000

# Up to this size parts grow with the payload if there are many of them. That means fewer requests
# and, measured on loopback, a tenth less processor time per byte at 32 than at 16 MiB. Parts do not
# grow further, because on a slow network, too, each must be sent within the request time-out.
_GROWN_PART_SIZE_BYTES = 32 * MIB
_MANY_PARTS = 32
# Where up to 64 of them are in flight, a few large parts would end one after the other.
_MANY_PARTS_FAR = 256
# Fewer parts than allowed, because the size of pickled values is only known once they are written.
_PLANNED_PARTS = 9_000
# The largest buffer that is handed to the transport. It drops a buffer when its part is sent, so
# smaller buffers would not show more progress, and each one needs the GIL. If parts are larger than
# this, it is also the size of one copy from a device.
_MAX_SLICE_BYTES = 32 * MIB


@dataclass(frozen=True, slots=True)
class PartPlan:
    """The cut of one rank's objects into parts.

    Attributes:
        part_size_bytes: the size of every part of an object but the last.
        slice_size_bytes: the largest slice of payload that is handed over at a time: a multiple of
            the 4 MiB digest block, and at most one part (otherwise there is no back pressure).
        max_object_size_bytes: a new object begins before an item that would exceed this size; a
            larger item gets its own object.
        parts: the number of parts of the largest object, as far as it is known.
    """

    part_size_bytes: int
    slice_size_bytes: int
    max_object_size_bytes: int
    parts: int


def plan_parts(
    total_bytes: int,
    least_part_size_bytes: int,
    *,
    max_object_size_bytes: int = MAX_OBJECT_SIZE_BYTES,
    largest_item_bytes: int = 0,
    is_near: bool = True,
) -> PartPlan:
    """Choose the part size for `total_bytes` of payload on this rank.

    The part size is the configured one. From 32 parts on (256 if the store is far) it grows, in
    whole MiB, up to 32 MiB. It grows further, up to 583 MiB for 5 TiB, only if an object would have
    more than 9,000 parts.

    Args:
        total_bytes: the payload of all items.
        least_part_size_bytes: the configured part size.
        max_object_size_bytes: the size from which a rank's payload is divided among objects.
        largest_item_bytes: the payload of the largest item, which is never split.
        is_near: whether a few connections move all that the store or this machine can.
    """
    object_bytes = min(total_bytes, max(max_object_size_bytes, largest_item_bytes))
    many_parts = _MANY_PARTS if is_near else _MANY_PARTS_FAR
    grown_size = min(object_bytes // many_parts, _GROWN_PART_SIZE_BYTES)
    needed_size = max(-(-object_bytes // _PLANNED_PARTS), grown_size)
    part_size = max(least_part_size_bytes, -(-needed_size // MIB) * MIB)
    slice_size = min(part_size, _MAX_SLICE_BYTES) // BLOCK_SIZE_BYTES * BLOCK_SIZE_BYTES
    return PartPlan(
        part_size_bytes=part_size,
        slice_size_bytes=slice_size,
        max_object_size_bytes=min(part_size * MAX_PARTS, max_object_size_bytes),
        parts=part_count(object_bytes, part_size),
    )


def check_item_size(size_bytes: int) -> None:
    """Refuse an item that is too large for one object; an item is never split.

    Raises:
        UnsupportedError: the item has about 5 TiB or more.
    """
    # The object also holds framing: some KiB.
    if size_bytes > MAX_OBJECT_SIZE_BYTES - MIB:
        raise UnsupportedError(
            f"one rank's part of a tensor has {size_bytes} bytes, and an object holds at most"
            f" {MAX_OBJECT_SIZE_BYTES} (5 TiB): shard it over more ranks"
        )


def part_count(size_bytes: int, part_size_bytes: int) -> int:
    """Return the number of parts of an object of `size_bytes`; 1 means a single PUT."""
    return max(1, -(-size_bytes // part_size_bytes))
