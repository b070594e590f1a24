"""Read the `.metadata` pickle of a stock torch writer without executing anything in it.

FileSystemWriter, FsspecWriter (torch 2.1 to 2.15) and writers derived from them, such as
s3torchconnector's, pickle one `Metadata`. `inert_pickle` unpickles it to stand-ins. This module
checks the type and bounds of each value and makes real stock objects of them. Attributes and
trailing fields that stock torch 2.13 does not know (Megatron's `mcore_data` and `all_local_plans`,
the strides that torch 2.15 adds to TensorProperties) are dropped.
"""

from __future__ import annotations

import functools
import gc
import io
import math
import pathlib
import pickle
from collections.abc import Iterator
from typing import Final

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from dcp_objstore.checkpoint.index import MAX_PLACE_LENGTH
from dcp_objstore.compat.inert_pickle import Dialect, Global, Node, opcodes, scan, stand_in
from dcp_objstore.contexts import contextmanager
from dcp_objstore.errors import CheckpointCorruptError, UnsupportedError, UntrustedPickleError
from dcp_objstore.torch_private import StorageInfo

# The globals that a `.metadata` may name, and what they stand for. None of them is imported.
# Sources: the code of torch 2.1 to 2.15 (distributed/checkpoint/metadata.py, planner.py,
# filesystem.py), Megatron-Core 0.8 to 0.16 (core/dist_checkpointing/strategies) and
# multi-storage-client 1.3 (pathlib.py).

# CPython 3.11.0 to 3.11.3 pickle a member of an enum as `getattr(class, name)`, others as
# `class(value)`.
_GETATTR: Final = frozenset({"builtins.getattr", "__builtin__.getattr"})
_ORDERED_DICT: Final = "collections.OrderedDict"
_METADATA: Final = "torch.distributed.checkpoint.metadata."
_FILESYSTEM: Final = "torch.distributed.checkpoint.filesystem."
_PLANNER: Final = "torch.distributed.checkpoint.planner."
_MEGATRON: Final = "megatron.core.dist_checkpointing.strategies.torch."
# The module of TensorProperties before torch 2.3; its state is the same.
_SHARDED: Final = "torch.distributed._shard.sharded_tensor.metadata."

_SIZE: Final = "torch.Size"
_LAYOUT: Final = "torch.serialization._get_layout"
# Megatron-Core 0.15 writes a subclass with one attribute more.
_METADATA_CLASSES: Final = (_METADATA + "Metadata", _MEGATRON + "MCoreMetadata")
_PROPERTIES: Final = (_METADATA + "TensorProperties", _SHARDED + "TensorProperties")
_MEMORY_ENCODING: Final = frozenset(
    {_METADATA + "_MEM_FORMAT_ENCODING", _SHARDED + "MEM_FORMAT_ENCODING"}
)
_MEMORY_FORMATS: Final = {
    0: torch.contiguous_format,
    1: torch.channels_last,
    2: torch.preserve_format,
}
# The members by their names, as CPython 3.11.0 to 3.11.3 write them.
_MEMORY_NAMES: Final = {
    f"{cls}.{name}": number
    for cls in _MEMORY_ENCODING
    for number, name in enumerate(
        ("TORCH_CONTIGUOUS_FORMAT", "TORCH_CHANNELS_LAST", "TORCH_PRESERVE_FORMAT")
    )
}
_DTYPES: Final = {
    f"torch.{name}": value for name, value in vars(torch).items() if isinstance(value, torch.dtype)
}
_LAYOUTS: Final = {
    str(value): value for value in vars(torch).values() if isinstance(value, torch.layout)
}
# Python 3.13 pickles its paths from a private module.
_PATHS: Final[dict[str, type[pathlib.PurePath]]] = {
    f"{module}.{pure}{flavour}Path": cls
    for module in ("pathlib", "pathlib._local")
    for pure in ("", "Pure")
    for flavour, cls in (
        ("Posix", pathlib.PurePosixPath),
        ("Windows", pathlib.PureWindowsPath),
    )
}
# A path of multi-storage-client (MSC), whose state has the text as `_path`.
_MSC_PATH: Final = "multistorageclient.pathlib.MultiStoragePath"
# Megatron-Core from 0.12 keeps the plans of all ranks in an attribute `all_local_plans`, which must
# be parsed before it can be dropped.
_PLANS: Final = frozenset(
    {
        *(
            _PLANNER + name
            for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData",
                         "BytesIOWriteData")
        ),
        *(f"{_PLANNER}WriteItemType.{name}" for name in ("TENSOR", "SHARD", "BYTE_IO")),
        _MEGATRON + "MCoreSavePlan",
        _FILESYSTEM + "_StoragePrefix",
    }
)  # fmt: skip

_ALLOWED: Final = frozenset(
    {
        *_DTYPES,
        *_PATHS,
        *_PROPERTIES,
        *_MEMORY_ENCODING,
        *_MEMORY_NAMES,
        *_METADATA_CLASSES,
        *_GETATTR,
        *_PLANS,
        _SIZE,
        _LAYOUT,
        _MSC_PATH,
        _ORDERED_DICT,
        _FILESYSTEM + "_StorageInfo",
        *(
            _METADATA + name
            for name in (
                "TensorStorageMetadata",
                "BytesStorageMetadata",
                "ChunkStorageMetadata",
                "MetadataIndex",
                "StorageMeta",
            )
        ),
    }
)

_MAX_NUMBER: Final = 2**63 - 1
_MAX_DIMENSIONS: Final = 64
_MAX_KEY_LENGTH_BYTES: Final = 1024  # S3's and GCS's bound on an object's key
_MAX_TRANSFORMS: Final = 4

# The smallest pickled chunk, path or entry takes more than this, so a body in which the memo
# makes one list appear in many places runs out of its budget before it costs quadratic time.
_MIN_ENTRY_SIZE_BYTES: Final = 4

MAX_METADATA_SIZE_BYTES: Final = 512 * 1024 * 1024

# What protocols 2 to 5 write for plain data and objects. The stock pickler nests marks about six
# deep.
_DIALECT: Final = Dialect(
    opcodes("\x80\x95.(c\x93R\x81baesut)\x85\x86\x87]}N\x88\x89JKM\x8aG\x8cX\x8dCBqr\x94hj"),
    max_marks=100,
    max_key_parts=17,
)


def decode_metadata(body: bytes) -> Metadata:
    """Decode a stock `.metadata` without importing or executing anything that it names.

    In the result, every key, shape, offset and length has its proper type; chunks lie within their
    tensor; no size exceeds 2**63 - 1 bytes; `relative_path` is a clean relative key;
    `storage_meta.checkpoint_id` is a `str` or None; and `transform_descriptors` is a short list of
    `str` or None. The reader must check that each chunk has an entry in `storage_data`, and that
    the objects exist.

    Args:
        body: the whole object, of at most 512 MiB (a tensor takes about 200 bytes, each further
            chunk 100). Decoding takes about 20 times as much memory as the body, or 100 times for a
            hostile one.

    Raises:
        CheckpointCorruptError: the body is damaged, too large, or not a `Metadata`.
        UntrustedPickleError: the body needs a global that stock torch does not write; the message
            names it.
        UnsupportedError: an object's key has an empty part (`a//b`).
    """
    if len(body) > MAX_METADATA_SIZE_BYTES:
        text = f".metadata has {len(body)} bytes, more than {MAX_METADATA_SIZE_BYTES}"
        raise CheckpointCorruptError(text)
    with _collector_paused():
        # A copy, because the body must not change between the scan and the load.
        return _Converter(len(body)).metadata(_unpickled(bytes(body)))


def _unpickled(body: bytes) -> object:
    """Return the value of a pickle: plain data, `Global` and `Node`. It may contain itself."""
    end = 0
    try:
        end, is_whole = scan(body, _DIALECT)
        # A body that is not whole is unpickled as far as it goes, because the name of a forbidden
        # global in it says more than where the body ends.
        value = _Unpickler(io.BytesIO(body[:end])).load()
        if is_whole and end == len(body):
            return value
    except (UntrustedPickleError, MemoryError):
        raise
    except EOFError:  # it is not whole: refused below
        pass
    except Exception as error:  # a damaged pickle raises errors of any type
        raise _damaged(str(error)[:200]) from error
    raise _damaged(f"it ends, or has an opcode that torch does not write, near byte {end}")


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Global:
        return _allowed_stand_in(module, name)


def _allowed_stand_in(module: str, name: str) -> Global:
    """Return the stand-in for a global that stock torch writes; refuse any other."""
    # A dot in `name` would stand for attributes. No stock class needs that, and the joined name
    # would no longer show where the module ends.
    full_name = f"{module}.{name}"
    if "." in name or full_name not in _ALLOWED:
        raise UntrustedPickleError(
            f"the .metadata asks for {full_name[:200]!r}, which is not among the classes that stock"
            " torch.distributed.checkpoint writes; it was not unpickled"
        )
    return _stand_in_for(full_name)


@functools.cache
def _stand_in_for(name: str) -> Global:
    """Return the class that stands in for an allowed global, always the same one."""
    bases = {**dict.fromkeys(_GETATTR, _Getattr), _ORDERED_DICT: _OrderedDict}
    return stand_in(bases.get(name, Node), name)


class _Getattr(Node):
    """A call of `getattr` on a class, which stands for the attribute if that is allowed."""

    __slots__ = ()

    @classmethod
    def result(cls, args: tuple[object, ...], *, is_new: bool) -> object:
        """Return the stand-in for the attribute.

        A new object of `getattr` (NEWOBJ), which no pickler writes, is only recorded, because no
        field that is read may have it.
        """
        if is_new:
            return super().result(args, is_new=is_new)
        if len(args) != 2 or type(args[0]) is not Global or type(args[1]) is not str:
            raise UntrustedPickleError("the .metadata calls getattr on what it made itself")
        return _allowed_stand_in(args[0].name, args[1])


class _OrderedDict(Node):
    """A call of OrderedDict."""

    __slots__ = ()

    @classmethod
    def result(cls, args: tuple[object, ...], *, is_new: bool) -> object:
        """Return a dict for the empty call that picklers write; the pickle adds the items to it."""
        return super().result(args, is_new=is_new) if args or is_new else {}


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Pause the cyclic garbage collector, which would walk all records again and again.

    It took half of the time for 20,000 tensors, and more in a process with many objects. If two
    threads overlap here, the one that found the collector running restarts it.
    """
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if running:
            gc.enable()


def _damaged(what: str) -> CheckpointCorruptError:
    return CheckpointCorruptError(f"the .metadata is damaged: {what}")


def _attributes(value: object, *names: str) -> dict[object, object]:
    """Return the attributes of a new object of one of these classes."""
    state = _state(value, *names)
    return {} if state is None else _dict(state, names[0])


def _state(value: object, *names: str) -> object:
    """Return the state of a new object of one of these classes, in whatever form it is."""
    if not isinstance(value, Node) or value.name not in names or not value.is_new or value.args:
        raise _damaged(f"expected {names[0].rpartition('.')[2]}, got {_kind(value)}")
    return value.state


def _kind(value: object) -> str:
    """Name the type of a foreign value, without its contents."""
    return value.name[:200] if isinstance(value, Node | Global) else type(value).__name__


def _dict(value: object, what: str) -> dict[object, object]:
    if type(value) is not dict:
        raise _damaged(f"{what} holds {_kind(value)} in place of a dictionary")
    return value


def _text(value: object, what: str) -> str:
    """Return a value that must be a string that UTF-8 can encode."""
    if type(value) is not str:
        raise _damaged(f"{what} is {_kind(value)}, not a string")
    if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
        raise _damaged(f"{what} is not valid text")
    return value


def _optional_text(value: object, what: str) -> str | None:
    return None if value is None else _text(value, what)


def _number(value: object, what: str) -> int:
    """Return a value that must be an int from 0 to 2**63 - 1, and not a bool."""
    if type(value) is not int or not 0 <= value <= _MAX_NUMBER:
        raise _damaged(f"{what} is not a whole number from 0 to 2**63 - 1")
    return value


def _size(value: object, what: str) -> torch.Size:
    """Return a value that must be a `torch.Size` of non-negative numbers."""
    numbers = _only_argument(value, {_SIZE}, what)
    if type(numbers) is not tuple or len(numbers) > _MAX_DIMENSIONS:
        raise _damaged(f"{what} has no or too many dimensions")
    for number in numbers:
        if type(number) is not int or not 0 <= number <= _MAX_NUMBER:
            raise _damaged(f"{what} is not made of whole numbers from 0 to 2**63 - 1")
    return torch.Size(numbers)


def _properties(value: object, fqn: str) -> TensorProperties:
    """Return TensorProperties from the pickled 5-tuple, or a longer one of a newer torch."""
    state = _state(value, *_PROPERTIES)
    if type(state) is not tuple or len(state) < 5:
        raise _damaged(f"the properties of {fqn!r} do not have their five fields")
    dtype, layout, requires_grad, encoding, pin_memory = state[:5]
    if type(dtype) is not Global or dtype.name not in _DTYPES:
        raise _damaged(f"the dtype of {fqn!r} is {_kind(dtype)}")
    if type(requires_grad) is not bool or type(pin_memory) is not bool:
        raise _damaged(f"requires_grad or pin_memory of {fqn!r} is not a bool")
    layout_name = _only_argument(layout, {_LAYOUT}, f"the layout of {fqn!r}")
    if type(encoding) is Global:  # a member of the enum, from `getattr`
        number: object = _MEMORY_NAMES.get(encoding.name)
    else:
        number = _only_argument(encoding, _MEMORY_ENCODING, f"the memory format of {fqn!r}")
    if type(layout_name) is not str or layout_name not in _LAYOUTS:
        raise _damaged(f"the layout of {fqn!r} is unknown")
    if type(number) is not int or number not in _MEMORY_FORMATS:
        raise _damaged(f"the memory format of {fqn!r} is unknown")
    return TensorProperties(
        dtype=_DTYPES[dtype.name],
        layout=_LAYOUTS[layout_name],
        requires_grad=requires_grad,
        memory_format=_MEMORY_FORMATS[number],
        pin_memory=pin_memory,
    )


def _only_argument(value: object, names: set[str] | frozenset[str], what: str) -> object:
    """Return the only argument of a recorded call of one of `names`, whose result has no state."""
    if (
        not isinstance(value, Node)
        or value.name not in names
        or value.is_new
        or value.state is not None
        or len(value.args) != 1
    ):
        raise _damaged(f"{what} is {_kind(value)}")
    return value.args[0]


def _relative_path(value: object) -> str:
    """Return a key that must lie below the checkpoint, in printable parts that are not empty."""
    path = _text(value, "relative_path")
    parts = path.split("/")
    has_scheme_or_drive = ":" in parts[0]
    # Such as "a//b", and not "//b" or "s3://b", which lead elsewhere.
    has_empty_part = "" in parts[1:-1] and parts[0] != "" and not has_scheme_or_drive
    if has_empty_part:
        raise UnsupportedError(
            f"an item lies in {path[:200]!r}, a key with an empty part, which cannot be addressed"
            " here: copy its objects, and write its .metadata again"
        )
    if (
        not path
        or len(path.encode()) > _MAX_KEY_LENGTH_BYTES
        or any(part in {"", ".", ".."} for part in parts)
        or "\\" in path
        or has_scheme_or_drive
        or any(character < " " or character == "\x7f" for character in path)
    ):
        raise _damaged(f"relative_path {path[:200]!r} does not lead to an object below it")
    return path


class _Converter:
    """Makes stock objects from records, within a budget of entries for one `.metadata`.

    Each method returns the stock object for a value of the pickle, or raises
    CheckpointCorruptError if the value is not of its type or not within its bounds.
    """

    def __init__(self, body_size_bytes: int) -> None:
        self.entries_left = body_size_bytes // _MIN_ENTRY_SIZE_BYTES
        self.valid_paths: set[str] = set()
        self.valid_texts: set[str] = set()

    def spend(self, entries: int) -> None:
        """Count entries; a body that repeats one object may give more than it has bytes for."""
        self.entries_left -= entries
        if self.entries_left < 0:
            raise _damaged("it repeats its entries more often than its size allows")

    def text(self, value: object, what: str) -> str:
        """Return what `_text` returns; check a string only once, however often it appears.

        A string in ASCII needs no check.
        """
        if type(value) is str and (value.isascii() or value in self.valid_texts):
            return value
        text = _text(value, what)
        self.valid_texts.add(text)
        return text

    def metadata(self, value: object) -> Metadata:
        """Return the checked `Metadata`."""
        state = _attributes(value, *_METADATA_CLASSES)
        items = _dict(state.get("state_dict_metadata"), "state_dict_metadata")
        self.spend(len(items))
        return Metadata(
            # For a key that is no string, `text` raises before `item` is called.
            state_dict_metadata={
                self.text(key, "a key"): self.item(str(key), item) for key, item in items.items()
            },
            planner_data=self.planner_data(state.get("planner_data")),
            storage_data=self.storage_data(state.get("storage_data")),
            storage_meta=self.storage_meta(state.get("storage_meta")),
            version=_optional_text(state.get("version"), "version"),
        )

    def item(self, fqn: str, value: object) -> TensorStorageMetadata | BytesStorageMetadata:
        """Return the checked description of a tensor or value."""
        if isinstance(value, Node) and value.name == _METADATA + "BytesStorageMetadata":
            _attributes(value, value.name)
            return BytesStorageMetadata()
        state = _attributes(value, _METADATA + "TensorStorageMetadata")
        fqn = fqn[:200]  # from here on it is only part of texts, of which each chunk makes some
        properties = _properties(state.get("properties"), fqn)
        size = _size(state.get("size"), f"the shape of {fqn!r}")
        # Dimensions of 0 do not hide others that are too large to multiply.
        if math.prod(max(1, length) for length in size) * properties.dtype.itemsize > _MAX_NUMBER:
            raise _damaged(f"{fqn!r} would have more than 2**63 - 1 bytes")
        chunks = state.get("chunks")
        if type(chunks) is not list:
            raise _damaged(f"the chunks of {fqn!r} are not a list")
        if not chunks and size.numel():
            # A load would plan no reads, and leave the destination unchanged.
            raise _damaged(f"{fqn!r} has no chunks")
        self.spend(len(chunks))
        return TensorStorageMetadata(
            properties=properties,
            size=size,
            chunks=[self.chunk(fqn, size, chunk) for chunk in chunks],
        )

    def chunk(self, fqn: str, shape: torch.Size, value: object) -> ChunkStorageMetadata:
        """Return a checked chunk, which must lie inside its tensor."""
        state = _attributes(value, _METADATA + "ChunkStorageMetadata")
        offsets = _size(state.get("offsets"), f"the offsets of a chunk of {fqn!r}")
        sizes = _size(state.get("sizes"), f"the sizes of a chunk of {fqn!r}")
        if len(offsets) != len(shape) or len(sizes) != len(shape):
            raise _damaged(f"a chunk of {fqn!r} has other dimensions than its tensor")
        for offset, length, whole in zip(offsets, sizes, shape, strict=True):
            if offset + length > whole:
                raise _damaged(f"a chunk of {fqn!r} lies outside its tensor")
        return ChunkStorageMetadata(offsets=offsets, sizes=sizes)

    def planner_data(self, value: object) -> dict[str, tuple[str | int, ...]] | None:
        """Return DCP's FLATTEN_MAPPING: the path in the nested state of each key."""
        if value is None:
            return None
        mapping = {}
        for key, path in _dict(value, "planner_data").items():
            if type(path) is not tuple or len(path) > MAX_PLACE_LENGTH:
                raise _damaged("planner_data is not a mapping of keys to paths")
            # A part of a path takes at least two bytes of the body (`h` and a number in the memo),
            # which is half of what `spend` takes for an entry.
            self.spend(1 + len(path) // 2)
            for part in path:
                if type(part) is not int:
                    self.text(part, "a part of a path in planner_data")
                elif abs(part) > _MAX_NUMBER:
                    raise _damaged("a part of a path in planner_data is too large")
            mapping[self.text(key, "a key of planner_data")] = path
        return mapping

    def storage_data(self, value: object) -> dict[MetadataIndex, StorageInfo]:
        """Return where each item lies."""
        entries = _dict(value, "storage_data")
        self.spend(len(entries))
        data = {self.index(key): self.storage_info(info) for key, info in entries.items()}
        if len(data) != len(entries):  # the keys of `entries` are records, which all differ
            raise _damaged("storage_data names one chunk twice")
        return data

    def index(self, value: object) -> MetadataIndex:
        """Return the name of an item: its key, the offset of its chunk, and the chunk's number."""
        state = _attributes(value, _METADATA + "MetadataIndex")
        offset, index = state.get("offset"), state.get("index")
        return MetadataIndex(
            self.text(state.get("fqn"), "the key in a MetadataIndex"),
            None if offset is None else _size(offset, "the offset in a MetadataIndex"),
            None if index is None else _number(index, "the number in a MetadataIndex"),
        )

    def storage_info(self, value: object) -> StorageInfo:
        """Return the checked location of an item."""
        state = _attributes(value, _FILESYSTEM + "_StorageInfo")
        path = state.get("relative_path")
        if type(path) is not str or path not in self.valid_paths:
            # Raises for what is not a string.
            self.valid_paths.add(_relative_path(path))
        offset = _number(state.get("offset"), "the offset of an item")
        length = _number(state.get("length"), "the length of an item")
        if offset + length > _MAX_NUMBER:
            raise _damaged("an item ends beyond 2**63 - 1")
        transforms = self.transforms(state.get("transform_descriptors"))
        return StorageInfo(str(path), offset, length, transforms)

    def transforms(self, value: object) -> list[str] | None:
        """Return the names of an item's stream extensions; None if it has none, as in torch."""
        if value is None:
            return None
        if type(value) not in (list, tuple) or len(value) > _MAX_TRANSFORMS:  # type: ignore[arg-type]
            raise _damaged("transform_descriptors is not a short list")
        names = [self.text(name, "a transform_descriptor") for name in value]  # type: ignore[attr-defined]

        return names or None

    def storage_meta(self, value: object) -> StorageMeta | None:
        """Return the checked `StorageMeta`, or None if there is none."""
        if value is None:
            return None
        state = _attributes(value, _METADATA + "StorageMeta")
        modules = state.get("modules", [])
        if type(modules) is not list:
            raise _damaged("StorageMeta.modules is not a list")
        self.spend(len(modules))
        return StorageMeta(
            checkpoint_id=_checkpoint_id(state.get("checkpoint_id")),
            save_id=_optional_text(state.get("save_id"), "save_id"),
            load_id=_optional_text(state.get("load_id"), "load_id"),
            modules=[self.text(module, "a module's name") for module in modules],
        )


def _checkpoint_id(value: object) -> str | None:
    """Return where the checkpoint was written to, as text. It is never opened."""
    if isinstance(value, Node) and value.name in _PATHS:  # a path: a call of its class with parts
        if len(value.args) > MAX_PLACE_LENGTH:
            raise _damaged("checkpoint_id has too many parts")
        parts = [part for part in value.args if type(part) is str]
        if len(parts) != len(value.args):
            raise _damaged("checkpoint_id is not a path of strings")
        value = str(_PATHS[value.name](*parts))
    elif isinstance(value, Node) and value.name == _MSC_PATH:
        value = _attributes(value, _MSC_PATH).get("_path")
    if type(value) is str:
        # A path on the writer's machine may hold bytes that are not UTF-8.
        return value.encode("utf-8", "replace").decode()
    return _optional_text(value, "checkpoint_id")
