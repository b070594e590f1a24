"""The files of an export: which tensors each holds, how its bytes come about, which rank writes it.

This stands alone so that what a format needs can be added without the code that writes it.
"""

from __future__ import annotations

import io
import json
import math
import mmap
import os
import pickle
import re
import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

from dcp_objstore.compat import safetensors
from dcp_objstore.config import MIB
from dcp_objstore.errors import UnsupportedError
from dcp_objstore.state.memory import byte_memory
from dcp_objstore.state.tensor_frame import framing
from dcp_objstore.torch_private import untyped_storage

if TYPE_CHECKING:
    from dcp_objstore.convert.sources import TensorInfo
    from dcp_objstore.transfer.memory import ByteArray

STEM = "model"
ONE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# What an export creates so that no other one begins there; it removes it at its end.
CLAIM_SUFFIX = ".claim"
_WEIGHTS = re.compile(
    r"model(-[0-9a-f]{8})?(-\d{5}-of-\d{5})?\.safetensors"
    rf"|{re.escape(INDEX)}|{re.escape(ONE_FILE + CLAIM_SUFFIX)}"
)
# Shards are not cut smaller than this for the sake of more ranks.
_LEAST_SHARD_BYTES = 250_000_000

# Yields the memory of the tensor with a key, in the dtype in which it is written.
ReadTensor: TypeAlias = Callable[[str], Iterator["ByteArray"]]


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """A file to be written.

    Attributes:
        name: its name in the folder.
        size_bytes: about how large it gets.
        buffers: yields its bytes; is called with what yields those of one tensor.
        keys: keys of the tensors in it, in their order.
    """

    name: str
    size_bytes: int
    buffers: Callable[[ReadTensor], Iterator[ByteArray]]
    keys: Sequence[str] = ()

    @classmethod
    def of(cls, name: str, body: bytes) -> PlannedFile:
        """Return a small file with these bytes."""
        return cls(name, len(body), lambda _: iter([np.frombuffer(body, np.uint8)]))


def folder_and_name(
    path: str | os.PathLike[str], suffixes: tuple[str, ...]
) -> tuple[str, str | None]:
    """Return the URL of a folder and the name of a file in it; None if the path is the folder.

    With the suffix `.pt`, `runs/w.pt` is `("file:///home/user/runs", "w.pt")`, and `s3://b/run` is
    `("s3://b/run", None)`.

    Args:
        path: a local path or a URL.
        suffixes: how the name of a file ends.
    """
    url = os.fspath(path)
    if "://" not in url:
        local = Path(url).absolute()
        # Links stay as they are named, but "link/.." is not the folder that has the link.
        url = f"file://{local.resolve() if '..' in local.parts else local}"
    if not url.endswith(suffixes):
        return url, None
    folder, _, name = url.rpartition("/")
    return folder, name


def tensor_bytes(info: TensorInfo) -> int:
    """Return the size of a tensor."""
    return math.prod(info.shape) * info.dtype.itemsize


def safetensors_file(
    name: str, keys: Sequence[str], tensors: Mapping[str, TensorInfo], names: Mapping[str, str]
) -> PlannedFile:
    """Return a file of safetensors with these keys, each under its name in `names`."""
    # As the library orders them: the widest elements first, so that all are aligned.
    keys = sorted(keys, key=lambda key: (-tensors[key].dtype.itemsize, names[key]))
    for key in keys:
        safetensors.check(key, names[key], tensors[key].dtype, tensors[key].shape)
    header = safetensors.header_bytes(
        (names[key], tensors[key].dtype, tensors[key].shape) for key in keys
    )

    def buffers(read: ReadTensor) -> Iterator[ByteArray]:
        yield np.frombuffer(header, np.uint8)
        for key in keys:
            yield from read(key)

    size_bytes = len(header) + sum(tensor_bytes(tensors[key]) for key in keys)
    return PlannedFile(name, size_bytes, buffers, keys)


def shards(
    tensors: Mapping[str, TensorInfo],
    names: Mapping[str, str],
    most_bytes: int,
    stem: str = STEM,
    ranks: int = 1,
) -> tuple[list[PlannedFile], PlannedFile]:
    """Return the shards of safetensors that a folder gets, and their index.

    If one file has room for all tensors, there are no shards, and it is in the place of the index.

    Args:
        tensors: the tensors by key.
        names: the name of each tensor in the files.
        most_bytes: size at which another shard begins.
        stem: what the names of shards begin with.
        ranks: the number of ranks that write. With several ranks, shards are equal, and
            each rank gets the same number of them, but none is cut below 250 MB for that.
    """
    groups = _groups(tensors, most_bytes)
    total_bytes = sum(map(tensor_bytes, tensors.values()))
    if ranks > 1:
        # With 5 groups and 4 ranks, up to 8 shards: 2 for each rank.
        equal_count = ranks * -(-len(groups) // ranks)
        most_count = max(len(groups), min(equal_count, total_bytes // _LEAST_SHARD_BYTES))

        def is_enough(size_bytes: int) -> bool:
            return len(_groups(tensors, size_bytes)) <= most_count

        # The least size of a shard with which there are at most `most_count`: so the shards are as
        # equal as can be.
        groups = _groups(
            tensors, bisect_left(range(min(most_bytes, total_bytes)), True, key=is_enough)
        )
    count = len(groups)
    if count == 1:
        return [], safetensors_file(ONE_FILE, groups[0], tensors, names)
    files = [
        safetensors_file(f"{stem}-{number:05d}-of-{count:05d}.safetensors", keys, tensors, names)
        for number, keys in enumerate(groups, 1)
    ]
    index = {
        "metadata": {"total_size": total_bytes},
        "weight_map": {names[key]: file.name for file in files for key in file.keys},
    }
    return files, PlannedFile.of(INDEX, json.dumps(index, indent=2).encode())


def _groups(tensors: Mapping[str, TensorInfo], most_bytes: int) -> list[list[str]]:
    """Return the keys of each shard: another one begins at the size `most_bytes`."""
    groups: list[list[str]] = [[]]
    filled_bytes = 0
    for key, info in tensors.items():
        size_bytes = tensor_bytes(info)
        filled_bytes += size_bytes
        # An empty shard takes any tensor, so a tensor above `most_bytes` is alone in its shard.
        if groups[-1] and filled_bytes > most_bytes:
            groups.append([])
            filled_bytes = size_bytes
        groups[-1].append(key)
    return groups


def has_weights(names: Iterable[str]) -> bool:
    """Return whether a folder with files of these names has weights, or a part of them."""
    return any(map(_WEIGHTS.fullmatch, names))


def share_out(files: Sequence[PlannedFile], ranks: int) -> list[list[PlannedFile]]:
    """Return the files of each rank: the largest first, each to the rank with the fewest bytes."""
    shares: list[list[PlannedFile]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for file in sorted(files, key=lambda file: -file.size_bytes):
        rank = loads.index(min(loads))
        shares[rank].append(file)
        loads[rank] += file.size_bytes
    return shares


# Below this size, tensors get memory of torch, of which the pages are never touched.
_SMALL_BYTES = 64 * MIB


def torch_file(
    name: str,
    tensors: Mapping[str, TensorInfo],
    nest: Callable[[Mapping[str, Any]], dict[str, Any]],
) -> PlannedFile:
    """Return the file that `torch.save(nest(tensors))` would make.

    Args:
        name: its name.
        tensors: the tensors by key. Addresses are reserved for them for the moment, but no memory.
        nest: returns the object to save, with the tensors at their places and any other values.

    Raises:
        UnsupportedError: the object is nested too deep for pickle, or a tensor is too large.
    """
    placeholders = {key: _without_memory(key, info) for key, info in tensors.items()}
    # Storages are told apart by their addresses. Empty ones are left out here and by the finder,
    # because they have no place in the file.
    key_at = {tensor.data_ptr(): key for key, tensor in placeholders.items() if tensor.numel()}
    value = nest(placeholders)
    finder = _StorageFinder()
    try:
        finder.dump(value)
        # The content of each storage, in the order of the file: the key of the tensor whose memory
        # goes there; or the memory itself, if the storage is part of a value.
        storages = finder.storages.items()
        contents = [key_at.get(address) or _memory(storage) for address, storage in storages]
        frames = framing(value)  # the bytes before each storage, and those after the last one
    except RecursionError:
        text = (
            "a value, or the nested dict, is nested too deep for a torch.save file; choose others"
            " with keys=, or export to safetensors"
        )
        raise UnsupportedError(text) from None

    def buffers(read: ReadTensor) -> Iterator[ByteArray]:
        # No content follows the last frame.
        for frame, content in zip(frames, [*contents, None], strict=True):
            yield np.frombuffer(frame, np.uint8)
            if isinstance(content, str):
                yield from read(content)
            elif content is not None:
                yield content

    size_bytes = sum(map(tensor_bytes, tensors.values()))
    keys_in_order = [content for content in contents if isinstance(content, str)]
    return PlannedFile(name, size_bytes, buffers, keys_in_order)


def _without_memory(key: str, info: TensorInfo) -> torch.Tensor:
    """Return a tensor that has an address and takes no memory, so it may be larger than the host's.

    It must not be read or written.

    Raises:
        UnsupportedError: the host has no addresses for so many bytes.
    """
    size_bytes = tensor_bytes(info)
    if size_bytes <= _SMALL_BYTES:
        # Its pages are never touched. A mapping for each small tensor would soon reach the number
        # of mappings that a process may have.
        return torch.empty(info.shape, dtype=info.dtype, device="cpu")
    # The kernel does not count a private read-only mapping as memory that may be needed.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    try:
        reserved = mmap.mmap(-1, size_bytes, flags, mmap.PROT_READ)
    except (OSError, OverflowError) as error:
        text = f"this host has no addresses for its {size_bytes} bytes"
        raise UnsupportedError(text, key=key) from error
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable")
        return torch.frombuffer(reserved, dtype=torch.uint8).view(info.dtype).view(info.shape)


def _memory(storage: torch.UntypedStorage) -> ByteArray:
    """Return the memory of a storage that is part of a value."""
    values = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    memory = byte_memory(values.cpu())
    assert memory is not None
    return memory


class _StorageFinder(pickle.Pickler):
    """Finds the storages of an object by their address, in the order of `torch.save`."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO(), protocol=2)
        self.storages: dict[int, torch.UntypedStorage] = {}

    def persistent_id(self, obj: Any) -> str | None:
        """Override `pickle.Pickler.persistent_id`: note each storage, and pickle nothing of it."""
        if not torch.is_storage(obj):
            return None
        storage = untyped_storage(obj)
        if storage.nbytes():
            self.storages.setdefault(storage.data_ptr(), storage)
        return "storage"
