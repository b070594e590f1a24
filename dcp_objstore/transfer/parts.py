"""Planning of uploads, as pure functions: how large a part is and where buffers are cut.

S3 limits (Amazon S3 user guide, "multipart upload limits"): parts of 5 MiB to 5 GiB, the last may
be smaller; at most 10,000 parts; objects up to 5 TiB (48.8 TiB since the end of 2025; we keep to
the older limit, which is that of GCS and of other servers, too). Azure takes 50,000 blocks.
R2 also wants all parts but the last to be equal, so the size is fixed for a whole object.
"""

from __future__ import annotations

from dataclasses import dataclass

from dcp_objstore.config import MAX_OBJECT_SIZE_BYTES, MIB
from dcp_objstore.errors import UnsupportedError
from dcp_objstore.transfer.digests import BLOCK_SIZE_BYTES

MAX_PARTS = 10_000
MAX_PART_SIZE_BYTES = 5 * 1024 * MIB

# Up to here parts grow with the payload as long as there are many of them: fewer requests, and
# measured on loopback a tenth less processor time per byte at 32 than at 16 MiB. Not further: what
# is in flight has to get through within the request time-out on a slow network too.
_GROWN_PART_SIZE_BYTES = 32 * MIB
_MANY_PARTS = 32
# Planned against fewer parts than allowed: pickled values are only sized when they are written.
_PLANNED_PARTS = 9_000
# Buffers handed to the transport: it lets go of them when their part is sent, so smaller ones would
# show no more progress, and each calls for the GIL. Where parts are larger still, this is what is
# copied at once from a device.
_MAX_SLICE_BYTES = 32 * MIB


@dataclass(frozen=True, slots=True)
class PartPlan:
    """How one rank's objects are cut.

    Attributes:
        part_size_bytes: every part but the last of an object has this size.
        slice_size_bytes: payload is handed over in slices of at most this size: a multiple of the
            4 MiB digest block, at most one part (else there is no back pressure).
        max_object_size_bytes: a new object is begun before an item that would exceed this; an item
            that is larger by itself gets an object of its own.
    """

    part_size_bytes: int
    slice_size_bytes: int
    max_object_size_bytes: int


def plan_parts(
    total_bytes: int,
    least_part_size_bytes: int,
    *,
    max_object_size_bytes: int = MAX_OBJECT_SIZE_BYTES,
    largest_item_bytes: int = 0,
) -> PartPlan:
    """Choose the part size for `total_bytes` of payload on this rank.

    The part size is the configured one; from 32 parts on it grows, in whole MiB, up to 32 MiB, and
    beyond that only as far as 9,000 parts of an object require, up to 5 GiB.

    Args:
        total_bytes: payload of all items.
        least_part_size_bytes: the configured part size.
        max_object_size_bytes: the configured limit of an object.
        largest_item_bytes: payload of the largest item, which is not split; see
            `check_item_size`.
    """
    object_bytes = min(total_bytes, max(max_object_size_bytes, largest_item_bytes))
    grown = min(object_bytes // _MANY_PARTS, _GROWN_PART_SIZE_BYTES)
    needed = max(-(-object_bytes // _PLANNED_PARTS), grown)
    part_size = max(least_part_size_bytes, -(-needed // MIB) * MIB)
    part_size = min(part_size, MAX_PART_SIZE_BYTES)
    slice_size = min(part_size, _MAX_SLICE_BYTES) // BLOCK_SIZE_BYTES * BLOCK_SIZE_BYTES
    return PartPlan(
        part_size_bytes=part_size,
        slice_size_bytes=slice_size,
        max_object_size_bytes=min(part_size * MAX_PARTS, max_object_size_bytes),
    )


def check_item_size(size_bytes: int) -> None:
    """Refuse an item that fits no object, which is never split.

    Raises:
        UnsupportedError: it has about 5 TiB or more.
    """
    # Framing comes on top: some KiB.
    if size_bytes > MAX_OBJECT_SIZE_BYTES - MIB:
        raise UnsupportedError(
            f"one rank's part of a tensor has {size_bytes} bytes, and an object holds at most"
            f" {MAX_OBJECT_SIZE_BYTES} (5 TiB): shard it over more ranks"
        )


def part_count(size_bytes: int, part_size_bytes: int) -> int:
    """Parts of an object of `size_bytes`; 1 stands for a single PUT."""
    return max(1, -(-size_bytes // part_size_bytes))
