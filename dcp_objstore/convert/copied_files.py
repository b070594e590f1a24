"""The small files beside exported weights: configurations, a tokenizer, a chat template.

They come from disk, from a store, or from the checkpoint itself, if a Trainer of Hugging Face saved
it (`integrations.hf`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dcp_objstore.checkpoint.names import TORCH_SUFFIXES
from dcp_objstore.config import MIB
from dcp_objstore.convert.files import PlannedFile, ReadTensor, folder_and_name
from dcp_objstore.convert.frameworks import DESCRIPTION_KEY
from dcp_objstore.errors import (
    InputError,
    ObjectNotFoundError,
    PreconditionFailedError,
    UntrustedPickleError,
)
from dcp_objstore.inspect.slabs import ahead
from dcp_objstore.stores import ObjectStore, StoreSpec
from dcp_objstore.stores.protocol import ObjectMeta
from dcp_objstore.stores.ranges import read_range
from dcp_objstore.stores.wrappers import PinnedStore

if TYPE_CHECKING:
    from dcp_objstore.inspect.checkpoint import Checkpoint
    from dcp_objstore.transfer.memory import ByteArray

# Files that no folder, pattern or checkpoint of a Trainer brings: weights in any format, by the end
# of their names, and what a Trainer notes of its training. (Nor are hidden files brought.)
_WEIGHTS_SUFFIXES = (
    *TORCH_SUFFIXES,
    *(".safetensors", ".index.json", ".h5", ".msgpack", ".gguf", ".onnx", ".pkl"),
)
_TRAINER_STATE = "trainer_state.json"
# The key of the files that the first rank of a Trainer has written, a tuple of one mapping of names
# to bytes; and a file that is among them if the model is one of transformers. (Adapters of PEFT are
# there without it.)
_TRAINER_KEY = "files.0"
_CONFIG = "config.json"
# An object is read in pieces of this size, so many at a time.
_PIECE_BYTES = 16 * MIB
_CONCURRENT_READS = 8


def named_files(
    paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    spec_of: Callable[[str], StoreSpec],
) -> list[PlannedFile]:
    """Return the files that paths and URLs name: of a file, a folder, or a shell pattern.

    Args:
        paths: one path or URL, or several. The last segment of one may be a pattern.
        spec_of: returns how to open the store at a URL.

    Raises:
        InputError: there is nothing to copy under one of the names.
    """
    files: list[PlannedFile] = []
    for path in [paths] if isinstance(paths, str | os.PathLike) else paths:
        # Without suffixes that make it the path of a file, the whole path counts as a folder, of
        # which this is the URL.
        url = folder_and_name(path, suffixes=())[0].rstrip("/")
        copies = _copies(url, spec_of)
        if not copies:
            raise InputError(
                "nothing to copy: there is no such file, and no folder or pattern of this name with"
                " a file that is neither hidden nor weights (name such a file itself)",
                url=url,
            )
        files += copies
    return files


def _copies(url: str, spec_of: Callable[[str], StoreSpec]) -> list[PlannedFile]:
    """Return a copy of the object at a URL, or of what is in that folder, or matches the pattern.

    The first of the three that brings a file counts. A file of weights is only copied if the URL is
    that of the file itself.
    """
    folder, _, name = url.rpartition("/")
    if folder.endswith("/"):  # the URL is that of a bucket, such as "s3://bucket"
        return _in_folder(spec_of(url))
    parent = spec_of(folder)
    store = parent.open()
    try:
        return [_copy_of(store, store.head(name))]
    except ObjectNotFoundError:
        return _in_folder(spec_of(url)) or _in_folder(parent, name)


def _in_folder(spec: StoreSpec, pattern: str = "*") -> list[PlannedFile]:
    """Return copies of the small files directly below a URL whose names match."""
    store = spec.open()
    names = [name for name in names_in(spec, store) if _is_small_file(name, pattern)]
    return [_copy_of(store, store.head(name)) for name in names]


def names_in(spec: StoreSpec, store: ObjectStore) -> list[str]:
    """Return the names of the files that lie directly below a URL, which `store` has open."""
    if spec.parsed.scheme == "file":  # `list` would go through all folders below
        folder = Path(spec.url.removeprefix("file://"))
        entries = sorted(folder.iterdir()) if folder.is_dir() else []
        return [entry.name for entry in entries if entry.is_file()]
    return [meta.key for meta in store.list() if "/" not in meta.key]


def _is_small_file(name: str, pattern: str = "*") -> bool:
    """Whether a name is that of a small file, neither hidden nor in a folder, and matches."""
    is_weights = name.endswith(_WEIGHTS_SUFFIXES) or name == _TRAINER_STATE
    is_below = "/" in name or name.startswith(".")
    return not is_weights and not is_below and fnmatchcase(name, pattern)


def _copy_of(store: ObjectStore, meta: ObjectMeta) -> PlannedFile:
    """Return a file with the bytes of an object, which it reads while it is written."""

    def buffers(_: ReadTensor) -> Iterator[ByteArray]:
        # All GETs must have one ETag. It is not compared with that of `meta`, because a CDN may
        # answer a GET with another ETag than a HEAD; so the HEAD is repeated at the end.
        pinned = PinnedStore(store, {})
        with closing(pieces_of(pinned, meta.key, meta.size_bytes)) as pieces:
            yield from pieces
        now = store.head(meta.key)
        if (now.version, now.size_bytes) != (meta.version, meta.size_bytes):
            raise PreconditionFailedError("replaced while it was copied", object_key=meta.key)

    return PlannedFile(meta.key, meta.size_bytes, buffers)


def pieces_of(store: ObjectStore, key: str, size_bytes: int) -> Generator[ByteArray, None, None]:
    """Read an object front to back, several pieces at a time."""

    def read(start: int) -> ByteArray:
        end = min(size_bytes, start + _PIECE_BYTES)
        return np.frombuffer(read_range(store, key, start, end), np.uint8)

    return ahead(range(0, size_bytes, _PIECE_BYTES), read, _CONCURRENT_READS)


def trainer_files(checkpoint: Checkpoint) -> list[PlannedFile]:
    """Return the small files of the model in a checkpoint that a Trainer saved; none in another."""
    if _TRAINER_KEY not in checkpoint:
        return []
    try:
        value: Any = checkpoint[_TRAINER_KEY].read()
    except UntrustedPickleError:  # another program's: a Trainer's value has only strings and bytes
        return []
    # A Trainer saves a tuple of one mapping.
    files = value[0] if isinstance(value, tuple) and len(value) == 1 else None
    if not isinstance(files, Mapping):
        return []
    if _CONFIG not in files and DESCRIPTION_KEY not in checkpoint:
        return []  # neither a model of transformers nor adapters of PEFT
    return [
        PlannedFile.of(name, body)
        for name, body in files.items()
        if isinstance(name, str) and isinstance(body, bytes) and _is_small_file(name)
    ]
