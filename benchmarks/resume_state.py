"""The states that `resume` saves and loads: how they are spread, and what they hold."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, empty as empty_dtensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from benchmarks.settings import GIB, Settings

FSDP2 = "fsdp2"
LAYOUTS = ("shard0", "shard1", "replicated", FSDP2)
State = dict[str, Any]
_COLUMNS = 1024
_BLOCKS = 12
_WIDTH_STEP = 8
_EXACT = (1 << 24) - 1  # whole numbers that float32 has


def make_state(settings: Settings, layout: str) -> State:
    """A state with touched memory, full of -1, spread over the ranks.

    Args:
        settings: its size; for `fsdp2` as near as whole widths of its layers come, in as many
            tensors as those need.
        layout: one of `LAYOUTS`. `fsdp2` is what `get_state_dict` gives of a transformer under
            `fully_shard` with its AdamW; the others are tensors of two dimensions.
    """
    state = _fsdp2_state(settings.gib) if layout == FSDP2 else _plain_state(settings, layout)
    blank(state)
    return state


def _plain_state(settings: Settings, layout: str) -> State:
    # Small tensors are about square, so that every rank has some of them in either layout.
    columns = min(_COLUMNS, 1 << (settings.tensor_elements.bit_length() - 1) // 2)
    shape = (settings.tensor_elements // columns, columns)
    if layout == "replicated":
        return {f"tensor-{n:05d}": torch.empty(shape) for n in range(settings.tensors)}
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    placements = [Shard(int(layout.removeprefix("shard")))]
    return {
        f"tensor-{n:05d}": empty_dtensor(*shape, device_mesh=mesh, placements=placements)
        for n in range(settings.tensors)
    }


class _Block(nn.Module):
    """The parameters of a transformer's block; it is never run."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, _WIDTH_STEP)
        self.norm_2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)


def _fsdp2_state(gib: float) -> State:
    # Each weight has two moments of AdamW as well.
    model = make_model(gib / 3)
    # It makes the optimizer's state, by a step that changes nothing.
    weights, optimizer = get_state_dict(model, torch.optim.AdamW(model.parameters()))
    return {"model": weights, "optimizer": optimizer}


def make_model(gib: float) -> nn.Module:
    """Return a transformer under `fully_shard`, as near to this size as whole widths come."""
    # A block has 12 weights for each square of its width.
    width = math.sqrt(gib * GIB / 4 / 12 / _BLOCKS)
    width = max(1, round(width / _WIDTH_STEP)) * _WIDTH_STEP
    with torch.device("meta"):
        model = nn.Sequential(*(_Block(width) for _ in range(_BLOCKS)), nn.LayerNorm(width))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model.to_empty(device="cpu")


def tensors_of(state: Mapping[str, Any]) -> list[torch.Tensor]:
    """Its tensors, however they are nested, in the same order on every rank."""
    found: list[torch.Tensor] = []
    for value in state.values():
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, Mapping):
            found.extend(tensors_of(value))
    return found


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def own_bytes(state: Mapping[str, Any]) -> int:
    """What this rank holds."""
    return sum(local(tensor).nbytes for tensor in tensors_of(state))


def total_bytes(state: Mapping[str, Any]) -> int:
    """What it would be on one rank."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_of(state))


def blank(state: Mapping[str, Any]) -> None:
    """Fill it with -1, which is nowhere in what is saved."""
    with torch.no_grad():
        for tensor in tensors_of(state):
            local(tensor).fill_(-1)


def fill(state: Mapping[str, Any]) -> None:
    """Fill it with what is to be saved: in each tensor, the elements' own numbers."""
    with torch.no_grad():
        for number, tensor in enumerate(tensors_of(state)):
            local(tensor).copy_(_expected(tensor, number))


def _expected(tensor: torch.Tensor, number: int) -> torch.Tensor:
    """What this rank's part of tensor `number` holds once saved."""
    offsets: tuple[int, ...] = (0,) * tensor.ndim
    if isinstance(tensor, DTensor):
        _, offsets = compute_local_shape_and_global_offset(
            tensor.shape, tensor.device_mesh, tensor.placements
        )
    sizes = local(tensor).shape
    values = torch.tensor(number, dtype=torch.int32)
    for dim, (size, offset) in enumerate(zip(sizes, offsets, strict=True)):
        step = math.prod(tensor.shape[dim + 1 :])
        places = torch.arange(offset, offset + size, dtype=torch.int32) * step
        values = values.unsqueeze(-1) + places
    # In place, for the tensors may be a large part of the memory.
    return values.bitwise_and_(_EXACT).float()


def expected_digests(state: Mapping[str, Any]) -> list[bytes]:
    """For `wrong_tensors`, once: making the values takes ten times as long as hashing them."""
    return [_digest(_expected(t, number)) for number, t in enumerate(tensors_of(state))]


def wrong_tensors(state: Mapping[str, Any], expected: list[bytes]) -> list[int]:
    """Numbers of the tensors of which this rank's part is not, bit by bit, what was saved."""
    found = [_digest(local(tensor)) for tensor in tensors_of(state)]
    return [n for n, pair in enumerate(zip(found, expected, strict=True)) if pair[0] != pair[1]]


def _digest(tensor: torch.Tensor) -> bytes:
    # A detached view of contiguous memory, a copy of anything else.
    flat = tensor.detach().contiguous().view(-1)
    return xxhash.xxh3_128_digest(flat.numpy()) if flat.numel() else b""
