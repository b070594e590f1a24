"""The safetensors format: an 8-byte length, a JSON header, then the tensors' memory.

https://github.com/huggingface/safetensors says what the header holds. It is read and written here,
because the library wants all tensors of a file in memory.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from dcp_objstore.config import MIB
from dcp_objstore.errors import CheckpointCorruptError, UnsupportedError
from dcp_objstore.stores.ranges import read_range

if TYPE_CHECKING:
    from dcp_objstore.stores import ObjectStore

# The format's names of dtypes, for both ways. A name that torch lacks is left out.
_NAMES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
    "C64": "complex64",
}
_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, constant) for name, constant in _NAMES.items() if hasattr(torch, constant)
}
_NAMES_OF = {dtype: name for name, dtype in _DTYPES.items()}
_LENGTH_BYTES = 8
_METADATA = "__metadata__"
# The format's own limit.
_MOST_HEADER_BYTES = 100_000_000
_FIRST_READ_BYTES = MIB
_MOST_DIMENSIONS = 64  # torch's own limit


class TensorPlace(NamedTuple):
    """A tensor in a file; `offset` is that of its first byte in the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int


class FileHeader(NamedTuple):
    """The header of one file."""

    tensors: Mapping[str, TensorPlace]


def check(key: str, name: str, dtype: torch.dtype) -> None:
    """Refuse a tensor that the format cannot hold.

    Args:
        key: its key.
        name: its name in the file.
        dtype: its dtype.

    Raises:
        UnsupportedError: the format has no such dtype, or uses the name itself.
    """
    if name == _METADATA:
        raise UnsupportedError(
            f"in safetensors no tensor can be called {name}; rename it with rename=, leave it out"
            " with keys=, or export to a torch.save file",
            key=key,
        )
    if dtype not in _NAMES_OF:
        raise UnsupportedError(
            f"safetensors has no dtype {str(dtype).removeprefix('torch.')}; convert it with dtype=,"
            " leave the key out with keys=, or export to a torch.save file",
            key=key,
        )


def header_bytes(tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...]]]) -> bytes:
    """Return the bytes before the memory of these tensors, which follow without gaps."""
    entries: dict[str, Any] = {_METADATA: {"format": "pt"}}
    at = 0
    for name, dtype, shape in tensors:
        end = at + math.prod(shape) * dtype.itemsize
        entries[name] = {
            "dtype": _NAMES_OF[dtype],
            "shape": list(shape),
            "data_offsets": [at, end],
        }
        at = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def read_header(store: ObjectStore, key: str) -> FileHeader:
    """Read the header of a file, and check it against the file's size.

    Raises:
        CheckpointCorruptError: it is not a safetensors file, or it was cut off.
        UnsupportedError: it has a dtype that this version or this torch does not know.
    """
    size_bytes = store.head(key).size_bytes
    try:
        return _parsed(_header_text(store, key, size_bytes), size_bytes)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        text = f"{key} is not a whole safetensors file: {error}"
        raise CheckpointCorruptError(text, object_key=key, url=store.url) from None
    except UnsupportedError as error:
        raise error.at(object_key=key, url=store.url) from None


def _header_text(store: ObjectStore, key: str, size_bytes: int) -> bytes:
    first = bytes(read_range(store, key, 0, min(size_bytes, _FIRST_READ_BYTES)))
    end = _LENGTH_BYTES + int.from_bytes(first[:_LENGTH_BYTES], "little")
    if end > min(size_bytes, _LENGTH_BYTES + _MOST_HEADER_BYTES):
        raise ValueError(f"its header would end at byte {end} of {size_bytes}")
    if end > len(first):
        first += read_range(store, key, len(first), end)
    return first[_LENGTH_BYTES:end]


def _parsed(text: bytes, size_bytes: int) -> FileHeader:
    """Parse a header and check that its tensors fill the file, one after the other.

    Raises:
        UnsupportedError: a tensor has a dtype that is not known here.
        ValueError: the header contradicts itself or the file's size.
    """
    tensors: dict[str, TensorPlace] = {}
    begin = _LENGTH_BYTES + len(text)
    for name, entry in json.loads(text).items():
        if name == _METADATA:
            continue
        dtype = _DTYPES.get(entry["dtype"])
        if dtype is None:
            raise UnsupportedError(f"dtype {entry['dtype']!r} is not known here", key=name)
        shape, (start, end) = tuple(map(_natural, entry["shape"])), entry["data_offsets"]
        if len(shape) > _MOST_DIMENSIONS:
            raise ValueError(f"{name!r} has {len(shape)} dimensions")
        if _natural(start) + math.prod(shape) * dtype.itemsize != end:
            raise ValueError(f"{name!r} has offsets {start} and {end} that do not fit its shape")
        if begin + end > size_bytes:
            raise ValueError(f"{name!r} would end at byte {begin + end} of {size_bytes}")
        if math.prod(max(size, 1) for size in shape) * dtype.itemsize >= 2**63:
            raise ValueError(f"{name!r} has an impossible shape")
        tensors[name] = TensorPlace(dtype, shape, begin + start)
    at = begin
    for name, place in sorted(tensors.items(), key=lambda item: item[1].offset):
        if place.offset != at and 0 not in place.shape:
            raise ValueError(f"{name!r} begins at byte {place.offset}, and not at byte {at}")
        at += math.prod(place.shape) * place.dtype.itemsize
    if at != size_bytes:
        raise ValueError(f"its tensors end at byte {at} of {size_bytes}")
    return FileHeader(tensors)


def _natural(number: object) -> int:
    if type(number) is not int or number < 0:
        raise ValueError(f"{number!r} is not a size")
    return number
