"""`weights`: a job of several ranks fills a model under FSDP2 with weights of Hugging Face.

What the ranks load is one model: a checkpoint of this library, which they have saved, and a folder
of safetensors that was exported of it. torch's `HuggingFaceStorageReader` and
`safetensors.torch.load_file` read local files, so one rank downloads the folder first, with boto3,
into a folder on disk. `runai-model-streamer` streams all tensors to every rank: each rank fetches a
part of them and broadcasts it to the others.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

import dcp_objstore as dos
from benchmarks.conditions import Conditions
from benchmarks.processes import median, run_ranks
from benchmarks.rank import Filled, PeerFailedError, measure_load
from benchmarks.resume_state import State, make_model, tensors_of, total_bytes
from benchmarks.settings import GIB, MIB, Settings
from benchmarks.table import Result, Table
from benchmarks.targets import Place, open_target

if TYPE_CHECKING:
    from dcp_objstore.reports import LoadReport

_OWN = "own checkpoint"
_PRELOAD = ["benchmarks.weights"]
_JOB_SECONDS = 86_400
_FILES = 4
_WARM_UP_GIB = 16 * MIB / GIB
_COLUMNS = {
    "seconds": ("seconds", ".2f"),
    "GiB/s": ("gib_per_second", ".2f"),
    "x own checkpoint": ("to_own", ".2f"),
    "CPU-s/GiB": ("cpu_seconds_per_gib", ".2f"),
    "fetched/needed": ("fetched_to_needed", ".3f"),
    "GETs": ("requests", ".0f"),
    "extra MiB": ("extra_mib", ".0f"),
}


@dataclass(frozen=True, kw_only=True)
class _Job:
    """What all ranks do.

    Attributes:
        action: `save` (once, not measured) or `load` (measured and checked).
        peers: by name, in turn.
        rounds: how often each peer loads.
        place: the checkpoints are below it.
        gib: size of the model.
    """

    action: str
    peers: Sequence[str]
    rounds: int
    place: Place
    gib: float


def weights(
    settings: Settings,
    target: str,
    rounds: int,
    conditions: Conditions,
    *,
    peers: Sequence[str],
    ranks: int,
) -> tuple[Table, Result]:
    """Measure the load of a model by a job; a peer that is missing or fails is reported as such.

    Raises:
        ChildFailedError: a rank ended without an answer.
    """
    problems = {}
    if "runai-model-streamer" in peers and find_spec("runai_model_streamer") is None:
        problems["runai-model-streamer"] = "is not installed: pip install -e '.[peers]'"
    with open_target(target, keep=True, conditions=conditions) as place:
        job = _Job(action="save", peers=peers, rounds=rounds, place=place, gib=settings.gib)
        run_ranks(ranks, run, job, preload=_PRELOAD, seconds=_JOB_SECONDS)
        for name, gib in (("warm-up", _WARM_UP_GIB), ("measured", settings.gib)):
            dos.export_checkpoint(
                f"{place.url}/{name}-own",
                f"{place.url}/{name}-hub",
                max_shard_size_bytes=int(gib * GIB / _FILES),
                storage_options=place.storage_options,
                progress=False,
            )
        able = [name for name in peers if name not in problems]
        job = dataclasses.replace(job, action="load", peers=able)
        answer = run_ranks(ranks, run, job, preload=_PRELOAD, seconds=_JOB_SECONDS)[0]
    problems.update(answer["problems"])
    measured = {name: own for name, own in answer["measured"].items() if name not in problems}
    shown = {name: _summary(measured, name, answer["total_bytes"]) for name in measured}
    title = (
        f"weights from {conditions.described(target)}: {answer['total_bytes'] / GIB:.3g} GiB in"
        f" {answer['tensors']} tensors and {_FILES} files, {ranks} ranks, medians of {rounds}"
        " rounds"
    )
    notes = [f"{name}: {why}" for name, why in problems.items()]
    return Table.of(title, "peer", _COLUMNS, shown, notes), {
        "command": "weights",
        "target": target,
        "conditions": dataclasses.asdict(conditions),
        "gib": settings.gib,
        "ranks": ranks,
        "peers": shown,
        "rounds": measured,
        "problems": problems,
    }


def _summary(
    measured: dict[str, list[dict[str, Any]]], name: str, size_bytes: int
) -> dict[str, float | None]:
    """Medians, and the median of the ratios to our own checkpoint in the same round."""
    gib, rounds = size_bytes / GIB, measured[name]
    own = measured.get(_OWN, [])
    return {
        "seconds": median(one["seconds"] for one in rounds),
        "gib_per_second": median(gib / one["seconds"] for one in rounds),
        "to_own": median(b["seconds"] / a["seconds"] for a, b in zip(rounds, own, strict=False)),
        "cpu_seconds_per_gib": median(one["cpu_seconds"] / gib for one in rounds),
        "fetched_to_needed": median(
            one["fetched_bytes"] and one["fetched_bytes"] / one["needed_bytes"] for one in rounds
        ),
        "requests": median(one["requests"] for one in rounds),
        "extra_mib": median(one["extra_mib"] for one in rounds),
    }


def run(rank: int, world_size: int, job: _Job) -> dict[str, Any]:
    """Do the job: the measurements of each peer's rounds, and why others have none."""
    del rank, world_size
    states = {
        name: Filled(dict(make_model(gib).state_dict()), job.action)
        for name, gib in (("warm-up", _WARM_UP_GIB), ("measured", job.gib))
    }
    if job.action == "save":
        for name, filled in states.items():
            at = job.place.at(f"{name}-own")
            dos.save(filled.state, at.url, storage_options=at.storage_options, progress=False)
        return {}
    measured: dict[str, list[dict[str, Any]]] = {name: [] for name in job.peers}
    problems: dict[str, str] = {}
    for turn in range(-1, job.rounds):
        filled = states["warm-up" if turn < 0 else "measured"]
        at = job.place.at("warm-up" if turn < 0 else "measured")
        for name in [name for name in job.peers if name not in problems]:
            try:
                figures = measure_load(lambda: PEERS[name](filled.state, at), filled, at)  # noqa: B023
            except PeerFailedError as error:
                problems[name] = f"failed:\n{error}"
                continue
            if turn >= 0:
                measured[name].append(figures)
    state = states["measured"].state
    size = {"total_bytes": total_bytes(state), "tensors": len(tensors_of(state))}
    return {"measured": measured, "problems": problems, **size}


def _of_bucket(state: State, place: Place) -> LoadReport:
    options = place.storage_options
    return dos.load(dict(state), f"{place.url}-hub", storage_options=options, progress=False)


def _of_own(state: State, place: Place) -> LoadReport:
    options = place.storage_options
    return dos.load(dict(state), f"{place.url}-own", storage_options=options, progress=False)


def _of_torch(state: State, place: Place) -> None:
    for folder in _downloaded(place):
        load(dict(state), storage_reader=HuggingFaceStorageReader(folder, thread_count=_FILES))


def _of_load_file(state: State, place: Place) -> None:
    from safetensors.torch import load_file

    for folder in _downloaded(place):
        for path in sorted(Path(folder).glob("*.safetensors")):
            for key, tensor in load_file(path).items():
                _take(state[key], tensor)


def _of_runai(state: State, place: Place) -> None:
    # Its documentation names these for a server of one's own, and for gloo.
    os.environ |= {
        "RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": "0",
        "RUNAI_STREAMER_DIST": "1",
        # Its default of a second is too little for a server that shares two cores with the ranks.
        "RUNAI_STREAMER_S3_REQUEST_TIMEOUT_MS": "30000",
        "RUNAI_STREAMER_LOG_LEVEL": "ERROR",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    if place.endpoint_url is not None:
        os.environ["AWS_ENDPOINT_URL"] = place.endpoint_url
        os.environ["AWS_ACCESS_KEY_ID"] = place.access_key or ""
        os.environ["AWS_SECRET_ACCESS_KEY"] = place.secret_key or ""
    from runai_model_streamer import SafetensorsStreamer, list_safetensors

    with SafetensorsStreamer() as streamer:
        files = list_safetensors(f"{place.url}-hub")
        streamer.stream_files(files, device="cpu", is_distributed=True, owned=False)
        for key, tensor in streamer.get_tensors():
            _take(state[key], tensor)


PEERS: dict[str, Callable[[State, Place], LoadReport | None]] = {
    "dcp_objstore": _of_bucket,
    _OWN: _of_own,
    "HuggingFaceStorageReader": _of_torch,
    "load_file": _of_load_file,
    "runai-model-streamer": _of_runai,
}


def _take(destination: DTensor, tensor: torch.Tensor) -> None:
    """Copy this rank's part of a whole tensor."""
    sizes, offsets = compute_local_shape_and_global_offset(
        destination.shape, destination.device_mesh, destination.placements
    )
    part = tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))
    with torch.no_grad():
        destination.to_local().copy_(tensor[part])


def _downloaded(place: Place) -> Iterator[str]:
    """Yield a local folder into which one rank has downloaded the files; remove it afterwards."""
    folder: list[str | None] = [None]
    if not dist.get_rank():
        import boto3

        folder = [tempfile.mkdtemp(prefix="dcp-objstore-bench-", dir="/var/tmp")]
        client = boto3.client(
            "s3",
            endpoint_url=place.endpoint_url,
            aws_access_key_id=place.access_key,
            aws_secret_access_key=place.secret_key,
        )
        listed = client.list_objects_v2(Bucket=place.bucket, Prefix=f"{place.prefix}-hub/")
        for entry in listed["Contents"]:
            name = entry["Key"].rpartition("/")[2]
            client.download_file(place.bucket, entry["Key"], f"{folder[0]}/{name}")
    dist.broadcast_object_list(folder)
    try:
        yield str(folder[0])
        dist.barrier()
    finally:
        if not dist.get_rank():
            shutil.rmtree(str(folder[0]), ignore_errors=True)
