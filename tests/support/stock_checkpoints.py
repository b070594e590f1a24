"""Checkpoints of stock torch, and what holds of every `.metadata` that is read."""

from __future__ import annotations

import math
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import metadata as stock

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.complex64,
          torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16)  # fmt: skip


def save_stock(place: Path) -> bytes:
    """A stock checkpoint of all that a training state holds; its `.metadata`."""
    state = {
        "model": {
            "weight": torch.nn.Parameter(torch.randn(5, 4)),
            "scalar": torch.tensor(3.0),
            "empty": torch.zeros(0, 3),
            "nested": [torch.ones(2), {"deep": torch.ones(3)}],
            **{str(dtype): torch.zeros(3).to(dtype) for dtype in DTYPES},
        },
        "optimizer": {
            "state": {0: {"step": torch.tensor(1.0), "count": 7}},
            "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.95), "params": [0, 1]}],
        },
        "step": 2**40,
        "none": None,
        "name ü": "text",
    }
    dcp.save(state, storage_writer=dcp.FileSystemWriter(place), no_dist=True)
    return (place / ".metadata").read_bytes()


def check_promises(decoded: stock.Metadata) -> None:
    """What `decode_metadata` promises of everything that it returns."""
    for fqn, item in decoded.state_dict_metadata.items():
        assert type(fqn) is str
        if type(item) is stock.TensorStorageMetadata:
            assert math.prod(item.size) * item.properties.dtype.itemsize < 2**63
            for chunk in item.chunks:
                ends = [o + n for o, n in zip(chunk.offsets, chunk.sizes, strict=True)]
                assert all(end <= n for end, n in zip(ends, item.size, strict=True))
    for entry in decoded.storage_data.values():
        assert entry.offset >= 0 and entry.length >= 0
        assert not {"", ".", ".."} & set(entry.relative_path.split("/"))
