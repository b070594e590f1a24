"""`.metadata` in the pickled layouts of other versions of torch and of libraries built on it.

Only one version of torch can be installed with the tests. So a checkpoint is written by the
installed one and its `.metadata` pickled again, field by field as the sources of the other version
do it (torch/distributed/checkpoint/metadata.py and filesystem.py of that tag), with stand-in
classes under the real names where the installed torch has none.
"""

from __future__ import annotations

import copyreg
import dataclasses
import io
import pathlib
import pickle
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from torch.distributed._shard.sharded_tensor import metadata as sharded
from torch.distributed.checkpoint import metadata as stock
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"
MSC = "multistorageclient.pathlib"


def stand_in(module: str, name: str, *bases: type) -> type:
    """A class that pickle writes as `module.name`."""
    return type(name, bases or (object,), {"__module__": module})


@dataclass(frozen=True)
class Layout:
    """What a version pickles differently from torch 2.13.

    Attributes:
        metadata_lacks: attributes that did not exist yet.
        properties: the class of a tensor's properties.
        strides: whether TensorProperties has a sixth field (torch 2.15).
        enum_by_name: as CPython 3.11.0 to 3.11.3 pickle a member of an enum.
        path: makes `checkpoint_id` of the text.
        protocol: of pickle; 4 up to Python 3.13, 5 from 3.14 on.
        metadata: its class.
        extra: further attributes of it.
    """

    metadata_lacks: tuple[str, ...] = ()
    properties: type = stock.TensorProperties
    strides: bool = False
    enum_by_name: bool = False
    path: Callable[[str], Any] = pathlib.PosixPath
    protocol: int = 4
    metadata: type = stock.Metadata
    extra: Mapping[str, Any] = field(default_factory=dict)

    def pickled(self, metadata: stock.Metadata) -> bytes:
        """`metadata` in this layout."""
        stream = io.BytesIO()
        classes = {self.metadata, type(self.path("/")), *_classes_in(self.extra)}
        with mock.patch.dict(sys.modules):
            for cls in classes:
                _install(cls)
            _Pickler(stream, self).dump(self._converted(metadata))
        return stream.getvalue()

    def _converted(self, metadata: stock.Metadata) -> stock.Metadata:
        """The same of this layout's classes, without what they lack."""
        left = {k: v for k, v in vars(metadata).items() if k not in self.metadata_lacks}
        left |= self.extra
        left["state_dict_metadata"] = {
            key: dataclasses.replace(item, properties=self._properties(item.properties))
            if isinstance(item, stock.TensorStorageMetadata)
            else item
            for key, item in metadata.state_dict_metadata.items()
        }
        made = self.metadata.__new__(self.metadata)
        made.__dict__.update(left)
        return made  # type: ignore[no-any-return]

    def _properties(self, properties: stock.TensorProperties) -> Any:
        return self.properties(**vars(properties))


def _classes_in(extra: Mapping[str, Any]) -> list[type]:
    return [type(one) for value in extra.values() if isinstance(value, list) for one in value]


def _install(cls: type) -> None:
    """Make a class importable, also where the library that it stands for is installed."""
    parts, known = cls.__module__.split("."), sys.modules.get(cls.__module__)
    if getattr(known, cls.__name__, None) is cls:
        return
    for end in range(1, len(parts)):
        above = ".".join(parts[:end])
        sys.modules.setdefault(above, types.ModuleType(above))
    module = types.ModuleType(cls.__module__)
    vars(module).update(vars(known) if known else {}, **{cls.__name__: cls})
    sys.modules[cls.__module__] = module


class _Pickler(pickle.Pickler):
    def __init__(self, stream: io.BytesIO, layout: Layout) -> None:
        super().__init__(stream, layout.protocol)
        self.layout = layout

    def reducer_override(self, value: Any) -> Any:
        layout, kind = self.layout, type(value)
        if kind is stock.StorageMeta:
            place = {"checkpoint_id": layout.path(str(value.checkpoint_id))}
            return copyreg.__newobj__, (kind,), vars(value) | place  # type: ignore[attr-defined]
        if kind is stock.TensorProperties and layout.strides:
            return copyreg.__newobj__, (kind,), (*value.__getstate__(), (4, 1))  # type: ignore[attr-defined]
        if kind in (stock._MEM_FORMAT_ENCODING, sharded.MEM_FORMAT_ENCODING, WriteItemType):
            if layout.enum_by_name:
                return getattr, (kind, value.name)
            return kind, (value.value,)
        return NotImplemented


class PosixPathOfPython313(pathlib.PurePosixPath):
    """Pickled as Python 3.13 does: from its private module, as one text."""

    def __reduce__(self) -> Any:
        return type(self), (str(self),)


PosixPathOfPython313.__name__ = PosixPathOfPython313.__qualname__ = "PosixPath"
PosixPathOfPython313.__module__ = "pathlib._local"
if pathlib.PosixPath.__module__ == "pathlib._local":  # this is Python 3.13
    PosixPathOfPython313 = pathlib.PosixPath  # type: ignore[assignment,misc]


_MULTI_STORAGE_PATH = stand_in(MSC, "MultiStoragePath")


def multi_storage_path(text: str) -> Any:
    """`MultiStoragePath` of multi-storage-client 1.3: its `__getstate__` has two attributes."""
    place = _MULTI_STORAGE_PATH()
    place.__dict__.update(_path=text, _internal_path=pathlib.PurePosixPath(text))
    return place


_MCORE_PLAN = stand_in(MEGATRON, "MCoreSavePlan", SavePlan)


def megatron_plans(metadata: stock.Metadata) -> list[Any]:
    """What Megatron-Core 0.12 to 0.16 keeps as `all_local_plans`: each rank's plan."""
    items = []
    for place in metadata.storage_data:
        described = metadata.state_dict_metadata[place.fqn]
        if isinstance(described, stock.TensorStorageMetadata):
            (chunk,) = described.chunks
            data = TensorWriteData(chunk, described.properties, described.size)
            items.append(WriteItem(place, WriteItemType.SHARD, tensor_data=data))
        else:
            items.append(WriteItem(place, WriteItemType.BYTE_IO))
    plan = _MCORE_PLAN.__new__(_MCORE_PLAN)
    plan.__dict__.update(vars(SavePlan(items, planner_data={})), mcore_data={"weight": {}})
    return [plan, SavePlan(items)]


MCORE_METADATA = stand_in(MEGATRON, "MCoreMetadata", stock.Metadata)
MCORE_DATA = {"weight": {"nd_reformulated_orig_global_shape": (4, 3)}}
