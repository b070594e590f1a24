"""One rank of `resume`: it saves or loads what it is told to, together with its fellows.

A job comes on stdin; rank 0 prints all ranks' measurements, as JSON, in its last line of stdout.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor import empty as empty_dtensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from benchmarks.child import cpu_seconds, reset_peak_mib, status_mib
from benchmarks.peers import RESUME_PEERS, DcpPeer
from benchmarks.rank_job import RankJob
from benchmarks.settings import MIB, Settings
from benchmarks.sink import fetch_stats
from benchmarks.targets import Place

Tensors = dict[str, torch.Tensor]
_COLUMNS = 1024
_WARM_UP_BYTES = MIB


def make_state(settings: Settings, layout: str) -> Tensors:
    """Tensors of two dimensions with touched memory, full of -1, spread over the ranks."""
    columns = min(_COLUMNS, settings.tensor_elements)
    shape = (settings.tensor_elements // columns, columns)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state: Tensors = {}
    for number in range(settings.tensors):
        if layout == "replicated":
            tensor = torch.empty(shape)
        else:
            placements = [Shard(int(layout.removeprefix("shard")))]
            tensor = empty_dtensor(*shape, device_mesh=mesh, placements=placements)
        local(tensor).fill_(-1)
        state[f"tensor-{number:05d}"] = tensor
    return state


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def expected(tensor: torch.Tensor, number: int) -> torch.Tensor:
    """What this rank's part of tensor `number` holds once saved: its elements' own numbers."""
    offset: tuple[int, ...] = (0,) * tensor.ndim
    if isinstance(tensor, DTensor):
        _, offset = compute_local_shape_and_global_offset(
            tensor.shape, tensor.device_mesh, tensor.placements
        )
    shape = local(tensor).shape
    rows = torch.arange(offset[0], offset[0] + shape[0]).unsqueeze(1)
    columns = torch.arange(offset[1], offset[1] + shape[1])
    return ((rows * tensor.shape[1] + columns + number) % (1 << 24)).float()


def run(job: RankJob) -> list[list[dict[str, Any]]]:
    """Do the job; for a load, the measurements of each round."""
    states = {
        "warm-up": make_state(
            dataclasses.replace(job.settings, gib=_WARM_UP_BYTES / 2**30, tensors=2), job.layout
        ),
        "measured": make_state(job.settings, job.layout),
    }
    peers: dict[str, DcpPeer] = {name: RESUME_PEERS[name].load_dcp() for name in job.peers}
    if job.action == "save":
        for name, peer in peers.items():
            for what, state in states.items():
                for number, tensor in enumerate(state.values()):
                    local(tensor).copy_(expected(tensor, number))
                place = job.place.at(name).at(what)
                save(dict(state), storage_writer=peer.writer(place, job.settings))
        return []
    rounds = []
    for turn in range(job.rounds):
        measured = []
        for name, peer in peers.items():
            if turn == 0:
                _load(job, peer, states["warm-up"], job.place.at(name).at("warm-up"))
            measured.append(_load(job, peer, states["measured"], job.place.at(name).at("measured")))
        rounds.append(measured)
    return rounds


def _load(job: RankJob, peer: DcpPeer, state: Tensors, place: Place) -> dict[str, Any]:
    """Load once; what it cost all ranks together."""
    for tensor in state.values():
        local(tensor).fill_(-1)
    if place.counted and job.rank == 0:
        fetch_stats(str(place.endpoint_url), reset=True)
    before_mib = reset_peak_mib()
    dist.barrier()
    cpu, start = cpu_seconds(), time.perf_counter()
    reader = peer.reader(place, job.settings)
    load(dict(state), storage_reader=reader)
    cpu = cpu_seconds() - cpu
    dist.barrier()
    seconds = time.perf_counter() - start
    peak_mib = status_mib("VmHWM")
    report = getattr(reader, "last_load", None)
    own = {
        "cpu_seconds": cpu,
        "needed_bytes": sum(local(tensor).nbytes for tensor in state.values()),
        "extra_mib": None if peak_mib is None or before_mib is None else peak_mib - before_mib,
        "fetched_bytes": None if report is None else report.total_bytes,
        "requests": None if report is None else report.requests,
    }
    for number, tensor in enumerate(state.values()):
        if not torch.equal(local(tensor), expected(tensor, number)):
            raise AssertionError(f"tensor {number} was not loaded")
    ranks: list[dict[str, Any]] = [{}] * job.world_size
    dist.all_gather_object(ranks, own)
    total = {name: _sum(ranks, name) for name in own if name != "extra_mib"}
    if place.counted:
        stats = fetch_stats(str(place.endpoint_url))
        total["fetched_bytes"] = stats["sent_bytes"]
        total["requests"] = stats["requests"].get("GET", 0)
    extra = [rank["extra_mib"] for rank in ranks if rank["extra_mib"] is not None]
    return {**total, "seconds": seconds, "extra_mib": max(extra, default=None)}


def _sum(ranks: list[dict[str, Any]], name: str) -> float | None:
    values = [rank[name] for rank in ranks]
    return None if None in values else sum(values)


def main() -> None:
    """Read a job from stdin and do it."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    job = RankJob.loads(sys.stdin.read())
    store = FileStore(job.meeting, job.world_size)
    dist.init_process_group("gloo", store=store, rank=job.rank, world_size=job.world_size)
    rounds = run(job)
    dist.barrier()
    dist.destroy_process_group()
    print(json.dumps(rounds if job.rank == 0 else None))


if __name__ == "__main__":
    main()
