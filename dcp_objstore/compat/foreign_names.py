"""The globals that a `.metadata` may name, and what they stand for. None of them is imported.

Sources: the code of torch 2.1 to 2.15 (distributed/checkpoint/metadata.py, planner.py,
filesystem.py), Megatron-Core 0.8 to 0.16 (core/dist_checkpointing/strategies) and
multi-storage-client 1.3 (pathlib.py).
"""

from __future__ import annotations

import pathlib
from typing import Final

import torch

# CPython 3.11.0 to 3.11.3 pickle a member of an enum as `getattr(class, name)`, others as
# `class(value)`.
GETATTR: Final = frozenset({"builtins.getattr", "__builtin__.getattr"})
ORDERED_DICT: Final = "collections.OrderedDict"
METADATA: Final = "torch.distributed.checkpoint.metadata."
FILESYSTEM: Final = "torch.distributed.checkpoint.filesystem."
_PLANNER: Final = "torch.distributed.checkpoint.planner."
_MEGATRON: Final = "megatron.core.dist_checkpointing.strategies.torch."
# Before TensorProperties moved (torch 2.3) it lived here; its state is the same.
_SHARDED: Final = "torch.distributed._shard.sharded_tensor.metadata."

SIZE: Final = "torch.Size"
LAYOUT: Final = "torch.serialization._get_layout"
# Megatron-Core 0.15 writes a subclass with one attribute more.
METADATA_CLASSES: Final = (METADATA + "Metadata", _MEGATRON + "MCoreMetadata")
PROPERTIES: Final = frozenset({METADATA + "TensorProperties", _SHARDED + "TensorProperties"})
MEMORY_ENCODING: Final = frozenset(
    {METADATA + "_MEM_FORMAT_ENCODING", _SHARDED + "MEM_FORMAT_ENCODING"}
)
MEMORY_FORMATS: Final = {
    0: torch.contiguous_format,
    1: torch.channels_last,
    2: torch.preserve_format,
}
# By the names of the members, as CPython 3.11.0 to 3.11.3 write them.
MEMORY_NAMES: Final = {
    f"{cls}.{name}": number
    for cls in MEMORY_ENCODING
    for number, name in enumerate(
        ("TORCH_CONTIGUOUS_FORMAT", "TORCH_CHANNELS_LAST", "TORCH_PRESERVE_FORMAT")
    )
}
DTYPES: Final = {
    f"torch.{name}": value for name, value in vars(torch).items() if isinstance(value, torch.dtype)
}
LAYOUTS: Final = {
    str(value): value for value in vars(torch).values() if isinstance(value, torch.layout)
}
# Python 3.13 pickles its paths from a private module.
PATHS: Final[dict[str, type[pathlib.PurePath]]] = {
    f"{module}.{pure}{flavour}Path": cls
    for module in ("pathlib", "pathlib._local")
    for pure in ("", "Pure")
    for flavour, cls in (
        ("Posix", pathlib.PurePosixPath),
        ("Windows", pathlib.PureWindowsPath),
    )
}
# A path of multi-storage-client (MSC), whose state has the text as `_path`.
MSC_PATH: Final = "multistorageclient.pathlib.MultiStoragePath"
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
        FILESYSTEM + "_StoragePrefix",
    }
)  # fmt: skip

ALLOWED: Final = frozenset(
    {
        *DTYPES,
        *PATHS,
        *PROPERTIES,
        *MEMORY_ENCODING,
        *MEMORY_NAMES,
        *METADATA_CLASSES,
        *GETATTR,
        *_PLANS,
        SIZE,
        LAYOUT,
        MSC_PATH,
        ORDERED_DICT,
        FILESYSTEM + "_StorageInfo",
        *(
            METADATA + name
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
