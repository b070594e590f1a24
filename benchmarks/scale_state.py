"""The state that `scale` simulates, and what each rank plans and reports for it.

A Llama of real shapes and its AdamW state in float32, as `get_state_dict` gives them under FSDP2:
every tensor is cut along its first dimension, but each parameter's step count is a tensor that all
ranks have, as are the optimizer's settings. The state of one rank can be built of DTensors over
memory that is never touched. The plans of all other ranks are written item by item, as DCP's
planners make them; each measured rank compares its own with what DCP made.
"""

from __future__ import annotations

import io
import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    ReadItem,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from dcp_objstore.checkpoint.index import Index, ObjectEntry
from dcp_objstore.checkpoint.names import data_key, new_nonce
from dcp_objstore.config import TransferConfig
from dcp_objstore.read.peers.plan import NEED, Needs
from dcp_objstore.state import tensor_frame
from dcp_objstore.state.stored import StoredItem, StoredObject, constant_name
from dcp_objstore.transfer.digests import BLOCK_SIZE_BYTES, DIGEST_SIZE_BYTES
from dcp_objstore.transfer.parts import PartPlan, part_count, plan_parts
from dcp_objstore.transfer.ranges import DEFAULT_GAP_BYTES
from dcp_objstore.write.layout import item_bytes
from dcp_objstore.write.results import WriteResults

_DTYPE = torch.float32
_SCALAR = torch.Size([])
_CONFIG = TransferConfig()
_STATE = ("step", "exp_avg", "exp_avg_sq")  # of AdamW, for each parameter


@dataclass(frozen=True, kw_only=True)
class Model:
    """The sizes of a Llama: of its residual stream, keys and values, MLP, vocabulary; its depth."""

    hidden: int
    key_value: int
    mlp: int
    vocabulary: int
    layers: int

    def parameters(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield names and shapes, without end: after the last layer come more of the same."""
        yield "tok_embeddings.weight", (self.vocabulary, self.hidden)
        yield "norm.weight", (self.hidden,)
        yield "output.weight", (self.vocabulary, self.hidden)
        for layer in itertools.count():
            for name, shape in {
                "attention.wq": (self.hidden, self.hidden),
                "attention.wk": (self.key_value, self.hidden),
                "attention.wv": (self.key_value, self.hidden),
                "attention.wo": (self.hidden, self.hidden),
                "feed_forward.w1": (self.mlp, self.hidden),
                "feed_forward.w2": (self.hidden, self.mlp),
                "feed_forward.w3": (self.mlp, self.hidden),
                "attention_norm": (self.hidden,),
                "ffn_norm": (self.hidden,),
            }.items():
                yield f"layers.{layer}.{name}.weight", shape

    @property
    def tensors(self) -> int:
        """Tensors of the whole model and its optimizer."""
        return 4 * (3 + 9 * self.layers)


MODELS = {
    "70b": Model(hidden=8192, key_value=1024, mlp=28672, vocabulary=128256, layers=80),
    "405b": Model(hidden=16384, key_value=1024, mlp=53248, vocabulary=128256, layers=126),
}


@dataclass(frozen=True)
class ScaledState:
    """The state of a job.

    Attributes:
        parameters: names and shapes of the model's parameters. Each has four tensors: the weight,
            two moments and the step count.
        ranks: number of ranks of the job.
    """

    parameters: Sequence[tuple[str, tuple[int, ...]]]
    ranks: int

    @classmethod
    def of(cls, model: str, ranks: int, tensors: int) -> ScaledState:
        """Return the state with the first parameters of a model, four tensors each."""
        taken = itertools.islice(MODELS[model].parameters(), max(1, tensors // 4))
        return cls(tuple(taken), ranks)

    @cached_property
    def values(self) -> dict[str, object]:
        """The optimizer's settings, which DCP stores as pickled values."""
        group: dict[str, object] = {
            "lr": 1e-4,
            "betas": (0.9, 0.95),
            "eps": 1e-8,
            "weight_decay": 0.1,
        }
        group |= {"amsgrad": False, "maximize": False, "foreach": None}
        group |= {"capturable": False, "differentiable": False, "fused": None}
        group |= {"decoupled_weight_decay": True}
        return group | {"params": [name for name, _ in self.parameters]}

    @cached_property
    def value_bytes(self) -> dict[str, int]:
        """Size of each value as it is stored, by its key."""
        sizes = {}
        for name, value in self.values.items():
            torch.save(value, body := io.BytesIO())
            sizes[f"optimizer.param_groups.0.{name}"] = body.getbuffer().nbytes
        return sizes

    @cached_property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Shape of each tensor, by its key, in the order of the state; () for a step count."""
        found = {f"model.{name}": shape for name, shape in self.parameters}
        for name, shape in self.parameters:
            for part in _STATE:
                found[f"optimizer.state.{name}.{part}"] = () if part == "step" else shape
        return found

    @cached_property
    def mappings(self) -> dict[str, tuple[str | int, ...]]:
        """DCP's place of each key in the nested state."""
        # The same strings in all places, as in DCP's: it is pickled.
        keys = iter(self.tensors)
        found: dict[str, tuple[str | int, ...]] = {}
        found |= {next(keys): ("model", name) for name, _ in self.parameters}
        for name, _ in self.parameters:
            found |= {next(keys): ("optimizer", "state", name, part) for part in _STATE}
        for key, name in zip(self.value_bytes, self.values, strict=True):
            found[key] = ("optimizer", "param_groups", 0, name)
        return found

    @property
    def payload_bytes(self) -> int:
        """Size of all tensors together."""
        return sum(torch.Size(shape).numel() for shape in self.tensors.values()) * _DTYPE.itemsize

    @cached_property
    def chunks(self) -> int:
        """Chunks of all tensors together."""
        total = 0
        for shape in self.tensors.values():
            rows = -(-shape[0] // self.ranks) if shape else 1
            filled = -(-shape[0] // rows) if shape else 1
            # The parts of 0 rows have one place, so they are one chunk.
            total += filled + (bool(shape) and filled < self.ranks)
        return total

    def chunk(self, shape: tuple[int, ...], rank: int) -> ChunkStorageMetadata:
        """Return a rank's part of a tensor, as FSDP2 cuts it; a part of 0 rows lies at its end."""
        rows = -(-shape[0] // self.ranks)
        first = min(rank * rows, shape[0])
        return ChunkStorageMetadata(
            torch.Size((first, *(0 for _ in shape[1:]))),
            torch.Size((min(rows, shape[0] - first), *shape[1:])),
        )

    def build(self, rank: int) -> dict[str, Any]:
        """Return a rank's state; `fake_group` must be the default group of this process.

        The memory of its tensors is allocated, but not touched.
        """
        mesh = DeviceMesh("cpu", list(range(self.ranks)))
        elements = max(self.chunk(s, rank).sizes.numel() for s in self.tensors.values() if s)
        memory = torch.empty(elements, dtype=_DTYPE)
        nested: dict[str, Any] = {"model": {}, "optimizer": {"state": {}, "param_groups": [{}]}}
        for key, shape in self.tensors.items():
            tensor = torch.zeros(())
            if shape:
                sizes = self.chunk(shape, rank).sizes
                tensor = DTensor.from_local(
                    memory[: sizes.numel()].view(sizes),
                    mesh,
                    [Shard(0)],
                    run_check=False,
                    shape=torch.Size(shape),
                    stride=tuple(torch.empty(shape, device="meta").stride()),
                )
            at: Any = nested
            *path, last = self.mappings[key]
            for step in path:
                at = at.setdefault(step, {})
            at[last] = tensor
        nested["optimizer"]["param_groups"][0] |= self.values
        return nested

    def save_items(self, rank: int) -> list[WriteItem]:
        """Return the items that a rank's planner makes."""
        items = []
        for key, shape in self.tensors.items():
            at = self.chunk(shape, rank) if shape else ChunkStorageMetadata(_SCALAR, _SCALAR)
            kind = WriteItemType.SHARD if shape else WriteItemType.TENSOR
            data = TensorWriteData(at, TensorProperties(dtype=_DTYPE), torch.Size(shape))
            items.append(WriteItem(MetadataIndex(key, at.offsets), kind, tensor_data=data))
        items += [WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO) for key in self.value_bytes]
        return items

    def read_items(self, rank: int) -> list[ReadItem]:
        """Return what a rank reads that resumes with the same number of ranks."""
        items = []
        for key, shape in self.tensors.items():
            at = self.chunk(shape, rank) if shape else ChunkStorageMetadata(_SCALAR, _SCALAR)
            if at.sizes.numel():
                origin = torch.Size([0] * len(shape))
                items.append(
                    ReadItem(
                        LoadItemType.TENSOR,
                        MetadataIndex(key, at.offsets, 0),
                        origin,
                        MetadataIndex(key, at.offsets, rank if shape else 0),
                        origin,
                        at.sizes,
                    )
                )
        for key in self.value_bytes:
            place, zero = MetadataIndex(key), torch.Size([0])
            items.append(ReadItem(LoadItemType.BYTE_IO, place, zero, place, zero, zero))
        return items

    def results(self, rank: int, items: Sequence[WriteItem], url: str) -> WriteResults:
        """Return what a rank reports once it has uploaded its items, as `upload_items` would.

        The digests are zeros.
        """
        sized = [
            (item, item_bytes(item) if item.tensor_data else self.value_bytes[item.index.fqn])
            for item in items
        ]
        sized.sort(
            key=lambda pair: (
                pair[0].tensor_data is not None,
                pair[0].tensor_data is not None and pair[1] > DEFAULT_GAP_BYTES,
            )
        )
        parts = plan_parts(
            sum(size for item, size in sized if item.tensor_data),
            _CONFIG.part_size_bytes,
            max_object_size_bytes=_CONFIG.max_object_size_bytes,
            largest_item_bytes=max((size for item, size in sized if item.tensor_data), default=0),
        )
        pending, nonce, results = deque(sized), new_nonce(), WriteResults()
        results.planned = items
        for number in itertools.count():
            if not pending:
                return results
            results += _object(pending, parts, data_key(rank, number, nonce), url)
        return results


def _object(
    pending: deque[tuple[WriteItem, int]], parts: PartPlan, key: str, url: str
) -> list[WriteResult]:
    """Take the items of the next object from the left, as `Layout` does; return their results."""
    options = tensor_frame.save_options()
    placed: list[tuple[WriteItem, int, int, int, int]] = []
    end = 0
    while pending:
        item, size = pending[0]
        is_tensor = item.tensor_data is not None
        if end and end + (size if is_tensor else 0) > parts.max_object_size_bytes:
            break
        pending.popleft()
        lead = trail = 0
        if item.tensor_data is not None:
            sizes = tuple(item.tensor_data.chunk.sizes)
            frame = tensor_frame.frame(item.tensor_data.properties.dtype, sizes, options)
            lead, trail = len(frame.header), len(frame.trailer)
        offset = end + tensor_frame.padding_before(end, lead)
        end = offset + lead + size + trail
        placed.append((item, offset, end - offset, offset + lead, size))
    entry = ObjectEntry(key, end, f'"{"0" * 32}-1"', bytes(DIGEST_SIZE_BYTES))
    stored = StoredObject(entry, part_count(end, parts.part_size_bytes), url)
    return [
        WriteResult(
            item.index,
            length,
            StoredItem(
                stored,
                offset,
                length,
                payload_offset,
                size,
                bytes(-(-size // BLOCK_SIZE_BYTES) * DIGEST_SIZE_BYTES),
                False,
                constant_name(_DTYPE) if item.tensor_data else None,
            ),
        )
        for item, offset, length, payload_offset, size in placed
    ]


def needs_of_rows(index: Index, rows: Sequence[int]) -> Needs:
    """Return what `needs_of` returns for reads of whole items: all of their blocks."""
    columns = index.columns
    offset, lead, length = (
        column[list(rows)].astype(np.int64)
        for column in (columns.offset, columns.lead, columns.payload_length)
    )
    counts = -(-length // BLOCK_SIZE_BYTES)
    owner = np.repeat(np.arange(len(rows)), counts)
    number = np.arange(len(owner)) - (np.cumsum(counts) - counts)[owner]
    start = (offset + lead)[owner]
    needs = np.zeros(len(owner), NEED)
    needs["object_number"] = columns.object_number[list(rows)][owner]
    needs["start"] = needs["low"] = start + number * BLOCK_SIZE_BYTES
    end = np.minimum(needs["start"] + BLOCK_SIZE_BYTES, start + length[owner])
    needs["end"] = needs["high"] = end
    needs["read"] = -1
    return needs


def fake_group(rank: int, ranks: int) -> None:
    """Make a default process group of this many ranks, of which only this one exists.

    A process can be one rank only: DTensor remembers what it computed for it.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
