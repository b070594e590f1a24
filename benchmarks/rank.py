"""One rank of `resume`: it saves or loads what it is told to, together with its fellows.

A job comes on stdin; rank 0 prints all ranks' measurements, as JSON, in its last line of stdout.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.distributed.checkpoint.api import CheckpointException
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
    # Small tensors are about square, so that every rank has some of them in either layout.
    columns = min(_COLUMNS, 1 << (settings.tensor_elements.bit_length() - 1) // 2)
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
    rows = torch.arange(offset[0], offset[0] + shape[0], dtype=torch.int32).unsqueeze(1)
    columns = torch.arange(offset[1], offset[1] + shape[1], dtype=torch.int32)
    # Those that float32 has; in place, for the tensors may be a large part of the memory.
    return (rows * tensor.shape[1] + (columns + number)).bitwise_and_((1 << 24) - 1).float()


def run(job: RankJob) -> dict[str, Any]:
    """Do the job: the measurements of each peer's rounds, and why others have none."""
    states = {
        "warm-up": make_state(
            dataclasses.replace(job.settings, gib=_WARM_UP_BYTES / 2**30, tensors=2), job.layout
        ),
        "measured": make_state(job.settings, job.layout),
    }
    peers: dict[str, DcpPeer] = {name: RESUME_PEERS[name].load_dcp() for name in job.peers}
    measured: dict[str, list[dict[str, Any]]] = {name: [] for name in peers}
    problems: dict[str, str] = {}
    for turn in range(1 if job.action == "save" else job.rounds):
        for name in [name for name in peers if name not in problems]:
            place = job.place.at(name)
            try:
                if job.action == "save":
                    for what, state in states.items():
                        _save(job, peers[name], state, place.at(what))
                    continue
                if turn == 0:
                    _load(job, peers[name], states["warm-up"], place.at("warm-up"))
                measured[name].append(
                    _load(job, peers[name], states["measured"], place.at("measured"))
                )
            except PeerFailedError as error:
                problems[name] = f"failed:\n{error}"
    return {"measured": measured, "problems": problems}


class PeerFailedError(Exception):
    """A rank failed; raised on all of them, with its error as text."""


def _save(job: RankJob, peer: DcpPeer, state: Tensors, place: Place) -> None:
    for number, tensor in enumerate(state.values()):
        local(tensor).copy_(expected(tensor, number))
    error = _error(lambda: save(dict(state), storage_writer=peer.writer(place, job.settings)))
    _gather(job, {"error": error})


def _load(job: RankJob, peer: DcpPeer, state: Tensors, place: Place) -> dict[str, Any]:
    """Load once; what it cost all ranks together."""
    for tensor in state.values():
        local(tensor).fill_(-1)
    if place.counted and job.rank == 0:
        fetch_stats(str(place.endpoint_url), reset=True)
    reports = []

    def act() -> None:
        reader = peer.reader(place, job.settings)
        load(dict(state), storage_reader=reader)
        reports.append(getattr(reader, "last_load", None))

    before_mib = reset_peak_mib()
    dist.barrier()
    cpu, start = cpu_seconds(), time.perf_counter()
    error = _error(act)
    cpu = cpu_seconds() - cpu
    dist.barrier()
    seconds = time.perf_counter() - start
    peak_mib = status_mib("VmHWM")
    report = reports[0] if reports else None
    own = {
        "cpu_seconds": cpu,
        "needed_bytes": sum(local(tensor).nbytes for tensor in state.values()),
        "extra_mib": None if peak_mib is None or before_mib is None else peak_mib - before_mib,
        "fetched_bytes": None if report is None else report.total_bytes,
        "requests": None if report is None else report.requests,
        "error": error or _error(lambda: check_loaded(state)),
    }
    ranks = _gather(job, own)
    total = {name: _sum(ranks, name) for name in own if name not in ("extra_mib", "error")}
    if place.counted:
        stats = fetch_stats(str(place.endpoint_url))
        total["fetched_bytes"] = stats["sent_bytes"]
        total["requests"] = stats["requests"].get("GET", 0)
    extra = [rank["extra_mib"] for rank in ranks if rank["extra_mib"] is not None]
    return {**total, "seconds": seconds, "extra_mib": max(extra, default=None)}


def check_loaded(state: Tensors) -> None:
    """Raise unless this rank's part of every tensor holds, bit by bit, what was saved."""
    for number, tensor in enumerate(state.values()):
        bits = [part.view(torch.int32) for part in (local(tensor), expected(tensor, number))]
        if not torch.equal(*bits):
            raise AssertionError(f"tensor {number} was not loaded")


def _error(act: Callable[[], object]) -> str | None:
    """What `act` raised, as text: the other ranks must hear of it where they all meet."""
    try:
        act()
    except (Exception, CheckpointException) as error:
        return "".join(traceback.format_exception(error))[-2000:]
    return None


def _gather(job: RankJob, own: dict[str, Any]) -> list[dict[str, Any]]:
    """What every rank has, if none has an `error`.

    Raises:
        PeerFailedError: on all ranks, with the error of the lowest rank that has one.
    """
    ranks: list[dict[str, Any]] = [{}] * job.world_size
    dist.all_gather_object(ranks, own)
    for number, rank in enumerate(ranks):
        if rank["error"] is not None:
            raise PeerFailedError(f"rank {number}: {rank['error']}")
    return ranks


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
    found = run(job)
    dist.barrier()
    dist.destroy_process_group()
    print(json.dumps(found if job.rank == 0 else None))


if __name__ == "__main__":
    main()
