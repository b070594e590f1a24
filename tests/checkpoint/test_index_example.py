"""The example in `docs/design/the-index-in-columns.md` is what a save of two ranks writes."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import dcp_objstore as dos
from dcp_objstore.checkpoint.index import Index, decode
from dcp_objstore.checkpoint.read import open_committed
from dcp_objstore.stores import StoreSpec
from tests.support.doc_tables import ROOT, between
from tests.support.ranks import run_ranks

PAGE = ROOT / "docs" / "design" / "the-index-in-columns.md"


def save(rank: int, world_size: int, url: str) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    whole = torch.arange(15.0).reshape(5, 3)
    state = {
        "w": distribute_tensor(whole, mesh, [Shard(0)]),
        "b": distribute_tensor(torch.arange(4.0), mesh, [Replicate()]),
        "step": 7,
    }
    dos.save(state, url, progress=False)
    dist.barrier()


def table(index: Index) -> str:
    columns = index.columns
    names = ("object_number", "offset", "lead", "payload_length", "trail", "pickled")
    lines = [
        f"| row | of | {' | '.join(names)} | box: offset, size |",
        "|" + "---|" * (len(names) + 3),
    ]
    boxes = {
        row: f"{box[0]}, {box[1]}"
        for key in index.tensors
        for number, row in enumerate(index.rows(key))
        for box in [index.box(key, number)]
    }
    for key in index.keys:
        for row in index.rows(key):
            numbers = " | ".join(str(getattr(columns, name)[row]) for name in names)
            lines.append(f"| {row} | `{key}` | {numbers} | {boxes.get(row, '')} |")
    return "\n".join(lines)


def test_the_worked_example_of_the_page_is_what_is_written(tmp_path):
    url = f"file://{tmp_path}/step"
    run_ranks(2, save, url)
    _, body = open_committed(StoreSpec(url).open())
    index = decode(body)
    assert index.columns.chunk_offsets.tolist() == [0, 0, 3, 0, 0]
    assert index.columns.chunk_sizes.tolist() == [3, 3, 2, 3, 4]
    assert table(index) == between(PAGE.read_text(encoding="utf-8"), "index example")
