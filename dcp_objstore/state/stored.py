"""The objects that a rank has stored, their items, dtypes by name. Importing it needs no torch."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Final

import msgspec

from dcp_objstore.checkpoint import index as ix
from dcp_objstore.errors import UnsupportedError

if TYPE_CHECKING:
    import torch

# What a stock reader expects to find in Metadata.version (torch's CURRENT_DCP_VERSION).
DCP_VERSION: Final = "1.0.0"


class StoredObject(msgspec.Struct, frozen=True, array_like=True):
    """A data object that a rank has written.

    Attributes:
        parts: number of requests that carried its bytes, or had the store copy them.
        copied: whether the store has copied it from another checkpoint.
    """

    entry: ix.ObjectEntry
    parts: int
    url: str
    copied: bool = False


class StoredItem(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The location of a stored item: `WriteResult.storage_data`.

    Attributes:
        digests: one digest for each block of the payload, one after the other.
        length: number of bytes of the item, framing included.
        pickled: whether the payload is a tensor pickled as a whole.
        converted_to: name of the dtype of the stored elements, if a planner has converted them.
    """

    object: StoredObject
    offset: int
    length: int
    payload_offset: int
    payload_length: int
    digests: bytes
    pickled: bool
    converted_to: str | None = None


@functools.cache  # one str per constant, which pickle stores once
def constant_name(constant: torch.dtype | torch.layout | torch.memory_format) -> str:
    """Return torch's name of a constant as the index stores it, such as "float32"."""
    return str(constant).removeprefix("torch.")


def known_dtype(name: str) -> torch.dtype | None:
    """Return the dtype of this name; None if this version or this torch does not know it."""
    import torch  # only to read tensors

    return getattr(torch, name, None) if name in ix.ITEM_SIZE_BYTES else None


def unknown_dtype(name: str, key: str) -> UnsupportedError:
    """Return the error for a tensor whose dtype is unknown."""
    return UnsupportedError(
        f"the checkpoint has this tensor as {name[:100]!r}, a dtype that this version of"
        " dcp_objstore or of torch does not know: upgrade them, or leave it out",
        key=key,
    )
