"""The safetensors format: an 8-byte length, a JSON header, then the tensors' memory.

https://github.com/huggingface/safetensors says what the header holds. It is read and written here,
because the library wants all tensors of a file in memory. Neither needs torch.
"""

from __future__ import annotations

import json
import math
import posixpath
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeAlias

import msgspec
import numpy as np

from dcp_objstore.checkpoint import index as ix
from dcp_objstore.config import MIB
from dcp_objstore.errors import (
    CheckpointCorruptError,
    InputError,
    InvalidUrlError,
    UnsupportedError,
)
from dcp_objstore.state.stored import constant_name
from dcp_objstore.stores.ranges import read_range
from dcp_objstore.stores.urls import check_key
from dcp_objstore.transfer.workers import in_waves

if TYPE_CHECKING:
    import torch

    from dcp_objstore.stores import ObjectStore

SUFFIX = ".safetensors"
_INDEX_SUFFIX = ".safetensors.index.json"
_ONE_FILE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
# The files that count in a folder, whatever else is there.
BY_NAME = (_ONE_FILE, _INDEX)
_SHARD = re.compile(r"-\d+-of-(\d+)\.safetensors\Z")
# Torch's names of the format's dtypes.
_TORCH_NAMES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "F4": "float4_e2m1fn_x2",
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
_FORMAT_NAMES = {dtype: name for name, dtype in _TORCH_NAMES.items()}
# The format counts numbers; an element of torch's dtype is two of them, in the last dimension.
_TWO_NUMBERS = "float4_e2m1fn_x2"
_LENGTH_BYTES = 8
_METADATA = "__metadata__"
# The format's own limit for a file, here for all files of a model. (140,000 tensors take 20 MB.)
# The parsed header takes up to 14 times as much memory.
_MOST_HEADER_BYTES = 100_000_000
_MOST_INDEX_BYTES = 64 * MIB
# The header of 2,500 tensors.
_FIRST_READ_BYTES = MIB // 4
# The text that git has in place of a large file, until `git lfs pull` fetches it.
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_LFS_ADVICE = (
    "it is the text that git-lfs leaves in place of a large file; run 'git lfs pull' where the"
    " model was cloned, and copy the files again"
)
_MOST_DIMENSIONS = 64  # torch's own limit

# msgspec does not wrap the decoder's error for a key that is not UTF-8.
_UNREADABLE = (msgspec.DecodeError, ValueError, RecursionError)

_Size: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class WeightFiles(NamedTuple):
    """The files of a model.

    Attributes:
        names: their names.
        weight_map: the file of each tensor, as far as an index says it.
    """

    names: Sequence[str]
    weight_map: Mapping[str, str]


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


class _Entry(msgspec.Struct):
    """An entry of a header: a tensor, or the metadata, whose values are texts of any name."""

    dtype: str = ""
    shape: tuple[_Size, ...] | str = ""
    data_offsets: tuple[_Size, _Size] | str = ""


class _Place(NamedTuple):
    """A tensor: bytes `[start, end)` of a file, and torch's name of its dtype."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


_entries = msgspec.json.Decoder(dict[str, _Entry | None])  # the metadata may be null
_indices = msgspec.json.Decoder(_Index)


def check(key: str, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Refuse a tensor that the format cannot hold.

    Args:
        key: its key.
        name: its name in the file.
        dtype: its dtype.
        shape: its shape.

    Raises:
        UnsupportedError: the format has no such dtype, or no scalar of it, or uses the name itself.
    """
    if name == _METADATA:
        raise UnsupportedError(
            f"in safetensors no tensor can be called {name}",
            advice="rename it (rename=), leave it out (keys=), or export to a torch.save file",
            key=key,
        )
    stored = constant_name(dtype)
    # A scalar has no last dimension in which the format could count two numbers.
    if stored not in _FORMAT_NAMES or (stored == _TWO_NUMBERS and not shape):
        what = f"safetensors has no {'scalar of' if stored in _FORMAT_NAMES else 'dtype'} {stored}"
        raise UnsupportedError(
            what,
            advice="convert it (dtype=), leave it out (keys=), or export to a torch.save file",
            key=key,
        )


def header_bytes(tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...]]]) -> bytes:
    """Return the bytes before the memory of these tensors, which follow without gaps."""
    entries: dict[str, Any] = {_METADATA: {"format": "pt"}}
    start = 0
    for name, dtype, shape in tensors:
        end = start + math.prod(shape) * dtype.itemsize
        stored = constant_name(dtype)
        entries[name] = {
            "dtype": _FORMAT_NAMES[stored],
            # The format counts numbers, of which an element of this dtype has two.
            "shape": [*shape[:-1], 2 * shape[-1]] if stored == _TWO_NUMBERS else list(shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def choose_files(
    store: ObjectStore, keys: Collection[str], *, is_cut: bool = False
) -> WeightFiles | None:
    """Return the files that transformers would read from a folder; None if there are none.

    That is `model.safetensors`, or else what `model.safetensors.index.json` names. Without either,
    it is what the only index names, or else the only file.

    Args:
        store: the folder.
        keys: keys of its objects.
        is_cut: whether the folder has more objects than these. Those of `BY_NAME` are among these
            in any case.

    Raises:
        InputError: it is not clear which files make up the model: there are several, or several
            indices, or a shard of several without an index, or there may be more than are listed.
        CheckpointCorruptError: the index is damaged, or names something outside of the folder.
    """
    directly_inside = [key for key in keys if "/" not in key]
    files = [key for key in directly_inside if key.endswith(SUFFIX)]
    indices = [key for key in directly_inside if key.endswith(_INDEX_SUFFIX)]
    if _ONE_FILE in files:
        return WeightFiles([_ONE_FILE], {})
    if _INDEX in indices or (len(indices) == 1 and not is_cut):
        weight_map = _read_index(store, _INDEX if _INDEX in indices else indices[0])
        return WeightFiles(sorted({*weight_map.values()}), weight_map)
    if not files and not indices:
        return None
    is_whole_model = len(files) == 1 and not _is_shard(files[0])
    if indices or is_cut or not is_whole_model:
        why = "there are too many objects to list" if is_cut else "there is no single index"
        named = ", ".join(indices or files)
        raise InputError(f"{why}, so name one of the files: {named}", url=store.url)
    return WeightFiles(files, {})


def _is_shard(name: str) -> bool:
    """Return whether a file is one of several, such as `model-00001-of-00002.safetensors`."""
    shard = _SHARD.search(name)
    return shard is not None and int(shard[1]) != 1


def _read_index(store: ObjectStore, name: str) -> dict[str, str]:
    """Return the file of each tensor, as a key of the folder."""
    body, _ = store.get(name, max_size_bytes=_MOST_INDEX_BYTES)
    try:
        weight_map = _indices.decode(body).weight_map
        files = {file: check_key(posixpath.normpath(file)) for file in {*weight_map.values()}}
    except (*_UNREADABLE, InvalidUrlError) as error:  # `check_key` raises the last one
        text = f"{name} has no weight_map of this folder: {error}"
        raise CheckpointCorruptError(text, object_key=name, url=store.url) from None
    return {key: files[file] for key, file in weight_map.items()}


def read_headers(store: ObjectStore, sizes_bytes: Mapping[str, int]) -> dict[str, bytes]:
    """Return the text of each file's header, read with one range unless it is long.

    Args:
        store: the folder.
        sizes_bytes: the size of each file.

    Raises:
        CheckpointCorruptError: a file is shorter than its header, or is a pointer of git-lfs, or
            the headers are impossibly long.
    """

    def read_first(name: str) -> tuple[int, bytes]:
        """Return where a file's header ends, and its text as far as the first read has it."""
        body = bytes(read_range(store, name, 0, min(sizes_bytes[name], _FIRST_READ_BYTES)))
        if body.startswith(_LFS_POINTER):
            raise _broken(store, name, _LFS_ADVICE)
        end = _LENGTH_BYTES + int.from_bytes(body[:_LENGTH_BYTES], "little")
        if not _LENGTH_BYTES < end <= sizes_bytes[name]:
            raise _broken(store, name, f"its header would end at byte {end} of {sizes_bytes[name]}")
        return end, body[_LENGTH_BYTES:end]

    names = list(sizes_bytes)
    first_reads = dict(zip(names, in_waves(read_first, names), strict=True))
    if sum(end for end, _ in first_reads.values()) > _MOST_HEADER_BYTES:
        text = f"the headers of its files have more than {_MOST_HEADER_BYTES} bytes"
        raise CheckpointCorruptError(text, url=store.url)

    def read_whole(name: str) -> bytes:
        """Return the text of a file's header; read what the first read lacks."""
        end, text = first_reads[name]
        read_to = _LENGTH_BYTES + len(text)
        return text if read_to == end else text + read_range(store, name, read_to, end)

    return dict(zip(names, in_waves(read_whole, names), strict=True))


def index_of(
    store: ObjectStore,
    texts: Mapping[str, bytes],
    sizes_bytes: Mapping[str, int],
    weight_map: Mapping[str, str],
) -> ix.Index:
    """Make an index, without digests, of the headers of a model's files.

    Args:
        store: the folder, for errors.
        texts: the text of each file's header.
        sizes_bytes: the size of each file.
        weight_map: the file of each tensor, as far as it is known.

    Raises:
        CheckpointCorruptError: a header does not fit its file, a tensor is not in the file that
            `weight_map` names, or it is in two.
    """
    places: dict[str, _Place] = {}
    for name, text in texts.items():
        try:
            places_in_file = _parsed(name, text, sizes_bytes[name])
        except _UNREADABLE as error:
            raise _broken(store, name, str(error)) from None
        for key, place in places_in_file.items():
            if weight_map.get(key, name) != name:  # the index says that another file's counts
                continue
            if key in places:
                other = places[key].file
                twice = f"both {other} and {name} have this tensor, and no index says which counts"
                raise CheckpointCorruptError(twice, key=key, object_key=name, url=store.url)
            places[key] = place
    for key, name in weight_map.items():
        if key not in places:
            absent = f"the index says that {name} has this tensor, and it has not"
            raise CheckpointCorruptError(absent, key=key, object_key=name, url=store.url)
    return _index(places, sizes_bytes)


def _index(places: Mapping[str, _Place], sizes_bytes: Mapping[str, int]) -> ix.Index:
    """Return an index of tensors that each lie in one piece of a file, without digests."""
    numbers = {name: number for number, name in enumerate(sizes_bytes)}
    zeros = np.zeros(len(places), np.uint64)
    extents = np.array([size for place in places.values() for size in place.shape], np.uint64)

    def column(values: Iterable[int]) -> ix.Column:
        return np.fromiter(values, np.uint64, len(places))

    columns = ix.Columns(
        object_number=column(numbers[place.file] for place in places.values()),
        offset=column(place.start for place in places.values()),
        lead=zeros,
        payload_length=column(place.end - place.start for place in places.values()),
        trail=zeros,
        pickled=zeros,
        chunk_offsets=np.zeros_like(extents),
        chunk_sizes=extents,
        digests=np.empty(0, np.uint8),
    )
    tensors = {
        key: ix.Tensor(
            key,
            place.shape,
            dtype=place.dtype,
            layout="strided",
            requires_grad=False,
            memory_format="contiguous_format",
            pin_memory=False,
            chunk_count=1,
        )
        for key, place in places.items()
    }
    objects = tuple(ix.ObjectEntry(name, size, None, b"") for name, size in sizes_bytes.items())
    return ix.Index(objects, tensors, (), columns)


def _broken(store: ObjectStore, name: str, why: str) -> CheckpointCorruptError:
    text = f"{name} is not a whole safetensors file: {why}"
    return CheckpointCorruptError(text, object_key=name, url=store.url)


def _parsed(name: str, text: bytes, size_bytes: int) -> dict[str, _Place]:
    """Parse a header and check that its tensors fill the file, one after the other.

    Raises:
        ValueError: the header is damaged, or contradicts itself or the file's size.
    """
    data_start = _LENGTH_BYTES + len(text)
    places = {
        key: _place(name, key, entry, data_start)
        for key, entry in _entries.decode(text).items()
        if key != _METADATA
    }
    filled_to = data_start
    for key, place in sorted(places.items(), key=lambda item: (item[1].start, item[1].end)):
        is_empty = place.start == place.end  # an empty tensor may lie anywhere
        if place.start != filled_to and not is_empty:
            raise ValueError(f"{key!r} begins at byte {place.start}, and not at byte {filled_to}")
        filled_to = max(filled_to, place.end)
    if filled_to != size_bytes:
        raise ValueError(f"its tensors end at byte {filled_to} of {size_bytes}")
    return places


def _place(name: str, key: str, entry: _Entry | None, data_start: int) -> _Place:
    """Return where a file has a tensor; raise ValueError if the header's entry cannot be true."""
    if entry is None or isinstance(entry.shape, str) or isinstance(entry.data_offsets, str):
        raise ValueError(f"{key!r} has no shape or no data_offsets")
    shape, (start, end) = entry.shape, entry.data_offsets
    if len(shape) > _MOST_DIMENSIONS:
        raise ValueError(f"{key!r} has {len(shape)} dimensions")
    # torch's names of dtypes are in lower case. A name in upper case is that of a dtype that is not
    # known here.
    dtype = _TORCH_NAMES.get(entry.dtype, entry.dtype.upper())
    if dtype == _TWO_NUMBERS:
        if shape and shape[-1] % 2 == 0:
            shape = (*shape[:-1], shape[-1] // 2)
        else:  # torch has no such tensor, so it counts as one of an unknown dtype
            dtype = entry.dtype
    item_bytes = ix.ITEM_SIZE_BYTES.get(dtype, 0)
    if start > end or (item_bytes and start + math.prod(shape) * item_bytes != end):
        raise ValueError(f"{key!r} has offsets {start} and {end} that do not fit its shape")

    # A size of 0 does not hide others that are too large to multiply.
    if math.prod(max(size, 1) for size in shape) * max(item_bytes, 1) >= 2**63:
        raise ValueError(f"{key!r} has an impossible shape")
    return _Place(name, dtype, shape, data_start + start, data_start + end)
