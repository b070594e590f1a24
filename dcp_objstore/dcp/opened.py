"""`open`: a checkpoint to look into, without a process group and without downloading it.

    ckpt = dos.open("s3://bucket/run/step-1000")
    ckpt["model.embed.weight"].shape, ckpt["model.embed.weight"][:100]
    ckpt.read("model.*")

Only marker and index are read to open it; then the blocks that are asked for, verified.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from dcp_objstore.config import TransferConfig
from dcp_objstore.dcp.loading import plan_load, run_load
from dcp_objstore.dcp.planner import nearest
from dcp_objstore.dcp.report import size_text
from dcp_objstore.dcp.source import open_source
from dcp_objstore.dcp.verify import VerifyReport, verify_source
from dcp_objstore.errors import AbsentKeyError, ConfigError, StateMismatchError
from dcp_objstore.stores import StoreSpec
from dcp_objstore.transfer.workers import wait_for

if TYPE_CHECKING:
    import io
    from datetime import datetime

    from dcp_objstore.dcp.report import LoadReport
    from dcp_objstore.dcp.source import Source

Patterns: TypeAlias = str | Sequence[str] | None
_Box: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]  # offsets and sizes


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor of a checkpoint, not read yet.

    Attributes:
        key: its name, as DCP flattens state dicts ("model.embed.weight").
        shape: of the whole tensor.
        dtype: as it was saved.
        chunks: (offsets, sizes) of the boxes in which it is stored.
    """

    checkpoint: Checkpoint
    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[_Box, ...]

    def __repr__(self) -> str:
        return f"<TensorEntry {self.key} {self.shape} {self.dtype}>"

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """The whole tensor.

        Raises:
            As `Checkpoint.read`.
        """
        return self._read(((0,) * len(self.shape), self.shape), device)

    def __getitem__(self, index: Any) -> torch.Tensor:
        """A part, in CPU memory: `entry[10:20]`, `entry[..., 0]`, `entry[-1, :, 5:]`.

        Integers, slices without a step, and one Ellipsis, with the meaning that they have for
        tensors; only the blocks that hold the part are fetched.

        Raises:
            IndexError: an index is of another kind, out of range, or there are too many.
            As `Checkpoint.read`.
        """
        box, kept = _box_of(index, self.shape)
        return self._read(box, "cpu").reshape([box[1][dim] for dim in kept])

    def _read(self, box: _Box, device: torch.device | str) -> torch.Tensor:
        tensor = torch.empty(box[1], dtype=self.dtype, device=device)
        self.checkpoint._fill({self.key: (box, tensor)}, ())
        return tensor


@dataclass(frozen=True, slots=True)
class ValueEntry:
    """A pickled value of a checkpoint (a step, a learning rate), not read yet.

    Attributes:
        key: its name.
        nbytes: of the pickle.
    """

    checkpoint: Checkpoint
    key: str
    nbytes: int

    def __repr__(self) -> str:
        return f"<ValueEntry {self.key}, {self.nbytes} bytes>"

    def read(self) -> Any:
        """The value.

        Raises:
            As `Checkpoint.read`.
        """
        return self.checkpoint._fill({}, [self.key])[self.key]


class Checkpoint(Mapping[str, TensorEntry | ValueEntry]):
    """A checkpoint that was opened: its keys, and what is behind them. Made by `open`.

    It stays with the commit that it has opened: when that is replaced or deleted, reading raises
    CheckpointGoneError. Safe to use from many threads; each process of a job reads for itself.

    Attributes:
        url: where it is.
        last_read: report of the last read, or None.
    """

    def __init__(
        self,
        spec: StoreSpec,
        config: TransferConfig,
        source: Source,
        *,
        verify: bool,
        trust_pickle: bool,
    ) -> None:
        self.url = spec.url
        self.last_read: LoadReport | None = None
        self._spec = spec
        self._config = config
        self._source = source
        self._verify = verify
        self._trust_pickle = trust_pickle

    def __repr__(self) -> str:
        tensors = sum(isinstance(entry, TensorEntry) for entry in self.values())
        return (
            f"<Checkpoint {self.url}: {tensors} tensors, {len(self) - tensors} values,"
            f" {size_text(self.total_bytes)}, commit {self.commit_id}>"
        )

    @property
    def commit_id(self) -> str | None:
        """Of the commit; None if another library wrote it, as are the properties that follow."""
        return self._source.commit_id

    @property
    def created_at(self) -> datetime | None:
        """When it was committed, by the clock of the host that did."""
        return None if self._source.marker is None else self._source.marker.created_at

    @property
    def world_size(self) -> int | None:
        """How many ranks saved it."""
        return None if self._source.marker is None else self._source.marker.world_size

    @property
    def user_metadata(self) -> dict[str, Any] | None:
        """What was given to `save` with it."""
        return None if self._source.marker is None else dict(self._source.marker.user_metadata)

    @property
    def objects(self) -> tuple[str, ...]:
        """Keys of its data objects, relative to the checkpoint."""
        return self._source.object_keys

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors and pickled values, without framing."""
        return sum(stored.payload_length for stored in self._source.items.values())

    def __len__(self) -> int:
        return len(self._source.metadata.state_dict_metadata)

    def __iter__(self) -> Iterator[str]:
        return iter(self._source.metadata.state_dict_metadata)

    def __getitem__(self, key: str) -> TensorEntry | ValueEntry:
        saved = self._source.metadata.state_dict_metadata.get(key)
        if saved is None:
            near = nearest(key, list(self)) if isinstance(key, str) else []
            hint = f"; nearest: {', '.join(near)}" if near else ""
            raise AbsentKeyError(f"the checkpoint has no key {key!r}{hint}", url=self.url)
        if isinstance(saved, TensorStorageMetadata):
            chunks = tuple((tuple(c.offsets), tuple(c.sizes)) for c in saved.chunks)
            dtype = saved.properties.dtype
            return TensorEntry(self, key, tuple(saved.size), dtype, chunks)
        return ValueEntry(self, key, self._source.item(MetadataIndex(key)).payload_length)

    def matching(self, patterns: Patterns = None) -> list[str]:
        """The keys that match any of the patterns, in the order of the checkpoint.

        Args:
            patterns: as in a shell, on whole keys, case-sensitive: `"model.*"`, or several.
                Default: all keys.

        Raises:
            StateMismatchError: a pattern matches nothing.
        """
        if patterns is None:
            return list(self)
        wanted = [patterns] if isinstance(patterns, str) else list(patterns)
        for pattern in wanted:
            if not isinstance(pattern, str):
                raise ConfigError(f"a pattern of keys must be str, got {pattern!r}")
            if not any(fnmatchcase(key, pattern) for key in self):
                near = nearest(pattern.rstrip("*.") or pattern, list(self))
                hint = f" (nearest: {', '.join(near)})" if near else ""
                raise StateMismatchError(f"no key matches {pattern!r}{hint}", url=self.url)
        return [key for key in self if any(fnmatchcase(key, pattern) for pattern in wanted)]

    def read(
        self, patterns: Patterns = None, *, device: torch.device | str = "cpu"
    ) -> dict[str, Any]:
        """Tensors and values by key, in one parallel read.

        Args:
            patterns: see `matching`.
            device: where the tensors are made.

        Raises:
            StateMismatchError: a pattern matches nothing.
            CheckpointCorruptError, CheckpointGoneError, UntrustedPickleError, UnsupportedError,
            StoreUnavailableError, PermissionDeniedError: as `ObjectStoreReader`.
        """
        tensors: dict[str, tuple[_Box, torch.Tensor]] = {}
        values: list[str] = []
        keys = self.matching(patterns)
        for key in keys:
            entry = self[key]
            if isinstance(entry, TensorEntry):
                tensor = torch.empty(entry.shape, dtype=entry.dtype, device=device)
                tensors[key] = (((0,) * len(entry.shape), entry.shape), tensor)
            else:
                values.append(key)
        found = self._fill(tensors, values)
        return {key: tensors[key][1] if key in tensors else found[key] for key in keys}

    def verify(self, *, deep: bool = False) -> VerifyReport:
        """Read everything and compare it with its digests; see `VerifyReport`.

        All damage is reported, not the first alone; nothing is raised for it.

        Args:
            deep: also sizes of objects, and the bytes around the payloads (framing and padding),
                which only stock torch's readers use.

        Raises:
            UnsupportedError: another library wrote it, without digests.
            CheckpointGoneError: it was replaced or deleted meanwhile.
            StoreUnavailableError, PermissionDeniedError: as they say.
        """
        return verify_source(self._spec.open(), self._source, self._config, deep=deep)

    def nested(self, flat: Mapping[str, Any]) -> dict[str, Any]:
        """Values by key as the nested dict that was saved."""
        places = self._source.metadata.planner_data or {}
        result: dict[str, Any] = {}
        for key, value in flat.items():
            set_element(result, places.get(key, (key,)), value)
        return result

    def _fill(
        self, tensors: Mapping[str, tuple[_Box, torch.Tensor]], values: Iterable[str]
    ) -> dict[str, Any]:
        """Read boxes into tensors; returns the values."""
        items: list[ReadItem] = []
        for key, (box, _) in tensors.items():
            saved = self._source.metadata.state_dict_metadata[key]
            assert isinstance(saved, TensorStorageMetadata)
            chunk = ChunkStorageMetadata(torch.Size(box[0]), torch.Size(box[1]))
            items += create_read_items_for_chunk_list(key, saved, [chunk])
        for key in values:
            place = MetadataIndex(key)
            nothing = torch.Size([0])
            items.append(ReadItem(LoadItemType.BYTE_IO, place, nothing, place, nothing, nothing))
        planner = _Filling({key: tensor for key, (_, tensor) in tensors.items()})
        planned = plan_load(self._source, items, verify=self._verify)
        self.last_read = run_load(
            self._spec.open(),
            planned,
            planner,
            self._config,
            trust_pickle=self._trust_pickle,
            started_at=time.monotonic(),
            bar_shown=False,
        )
        return planner.values


class _Filling(LoadPlanner):
    """Hands out parts of given tensors, and takes values."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self.values: dict[str, Any] = {}

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        tensor = self._tensors[read_item.dest_index.fqn]
        for dim, (offset, size) in enumerate(
            zip(read_item.dest_offsets, read_item.lengths, strict=True)
        ):
            tensor = tensor.narrow(dim, offset, size)
        return tensor

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        pass

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        # It was test-loaded with `weights_only=True`, or the user trusts it.
        self.values[read_item.dest_index.fqn] = torch.load(value, weights_only=False)

    def set_up_planner(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError("this planner makes no plans")

    def create_local_plan(self) -> LoadPlan:
        raise NotImplementedError("this planner makes no plans")

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        raise NotImplementedError("this planner makes no plans")

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        raise NotImplementedError("this planner makes no plans")


def open(  # noqa: A001 - `dos.open`, as gzip.open
    url: str,
    *,
    storage_options: Mapping[str, object] | None = None,
    config: TransferConfig | None = None,
    verify: Literal["strict", "off"] = "strict",
    trust_pickle: bool = False,
) -> Checkpoint:
    """Open a checkpoint to look into: two requests, no process group.

    Args:
        url: the checkpoint, ours or another library's.
        storage_options, config, verify, trust_pickle: see `ObjectStoreReader`.

    Raises:
        CheckpointNotFoundError: nothing is committed at this URL.
        CheckpointCorruptError, CheckpointGoneError, UnsupportedError, UntrustedPickleError,
        StoreUnavailableError, PermissionDeniedError, CredentialsError, BucketNotFoundError,
        InvalidUrlError, ConfigError: as they say.
    """
    if verify not in ("strict", "off"):
        raise ConfigError(f"verify must be 'strict' or 'off', got {verify!r}")
    config = config or TransferConfig()
    spec = StoreSpec(url, storage_options, config)
    source = wait_for(open_source, spec.open())
    return Checkpoint(spec, config, source, verify=verify == "strict", trust_pickle=trust_pickle)


def load_state_dict(
    url: str,
    keys: Patterns = None,
    *,
    nested: bool = True,
    device: torch.device | str = "cpu",
    storage_options: Mapping[str, object] | None = None,
    config: TransferConfig | None = None,
    verify: Literal["strict", "off"] = "strict",
    trust_pickle: bool = False,
) -> dict[str, Any]:
    """A state dict, or a part of one, as new tensors; no state to load into is needed.

    Not a collective: every process that calls it reads what it asks for. To load into a sharded
    model use `load`, which reads each byte once for all ranks.

    Args:
        keys: patterns of keys, as `"model.*"`; see `Checkpoint.matching`. Default: everything.
        nested: as the nested dict that was saved (default); otherwise flat, by key.
        device: where the tensors are made. Default: CPU memory.
        url, storage_options, config, verify, trust_pickle: see `open`.

    Raises:
        As `open` and `Checkpoint.read`.
    """
    checkpoint = open(
        url,
        storage_options=storage_options,
        config=config,
        verify=verify,
        trust_pickle=trust_pickle,
    )
    found = checkpoint.read(keys, device=device)
    return checkpoint.nested(found) if nested else found


def _box_of(index: Any, shape: tuple[int, ...]) -> tuple[_Box, list[int]]:
    """The box that an index selects, and the dimensions of it that remain."""
    parts = list(index) if isinstance(index, tuple) else [index]
    if sum(part is Ellipsis for part in parts) > 1:
        raise IndexError("an index can have only one Ellipsis")
    if Ellipsis not in parts:
        parts.append(Ellipsis)
    given = len(parts) - 1
    if given > len(shape):
        raise IndexError(f"too many indices: the tensor has {len(shape)} dimensions, got {given}")
    place = parts.index(Ellipsis)
    parts[place : place + 1] = [slice(None)] * (len(shape) - given)
    offsets, sizes, kept = [], [], []
    for dim, (part, extent) in enumerate(zip(parts, shape, strict=True)):
        if isinstance(part, slice):
            start, stop, step = part.indices(extent)
            if step != 1:
                raise IndexError(f"slices with a step are not supported, got {part}")
            offsets.append(start)
            sizes.append(max(0, stop - start))
            kept.append(dim)
            continue
        number = _integer(part)
        if not -extent <= number < extent:
            raise IndexError(f"index {number} is out of range for dimension {dim} of {extent}")
        offsets.append(number % extent)
        sizes.append(1)
    return (tuple(offsets), tuple(sizes)), kept


def _integer(part: Any) -> int:
    as_index: Callable[[], int] | None = getattr(part, "__index__", None)
    if isinstance(part, bool) or as_index is None:
        raise IndexError(
            f"only integers, slices and Ellipsis select a part, got a {type(part).__name__}; read"
            " the tensor first for anything else"
        )
    return as_index()
