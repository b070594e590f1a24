"""`index`: what the index of a large job costs, and the `.metadata` that stock torch reads.

The index of a checkpoint of R ranks and T tensors, each cut into R chunks, is made without the
data. Then it is decoded with all checks, and stock torch's own pickle of the same metadata is
unpickled. A second checkpoint with shards of 32 bytes is put on a local disk, and one rank's shards
are loaded from it with `dos.load`, once with DCP's planning of it timed on its own. All of that is
repeated with fewer tensors, for the growth in chunks. Each size has a process of its own.
"""

from __future__ import annotations

import pickle
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from torch.distributed.checkpoint.default_planner import create_default_local_load_plan
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import dcp_objstore as dos
from benchmarks.processes import answer, run_module
from benchmarks.table import Result, Table
from dcp_objstore.checkpoint import commit, index as ix
from dcp_objstore.checkpoint.marker import Counts
from dcp_objstore.checkpoint.names import data_key, new_nonce
from dcp_objstore.compat.dot_metadata import encode_metadata
from dcp_objstore.stores import StoreSpec

_MODULE = "benchmarks.index"
# Elements of a shard: those of a transformer's matrices and norms under FSDP, and of 32 bytes.
_SHARDS = ((16, 4096), (56, 4096), (16, 14336), (16,))
_SMALL_SHARDS = ((1, 16), (2, 8), (4, 4), (16,))
_LEAD, _TRAIL, _ITEMSIZE = 960, 320, 2
_PARTS = (8, 4, 2, 1)  # of the tensors
_RANK = 1
_COLUMNS = {
    "size to stock": ("size", ".2f"),
    "decode s": ("decode_seconds", ".3f"),
    "unpickle stock s": ("unpickle_seconds", ".3f"),
    "times": ("times", ".1f"),
    "load s": ("load_seconds", ".3f"),
    "outside of DCP s": ("own_seconds", ".3f"),
    "of unpickle": ("of_unpickle", ".2f"),
    "make .metadata s": ("publish_seconds", ".3f"),
}


def index(ranks: int, tensors: int, rounds: int) -> tuple[Table, Result]:
    """Medians of the rounds for each number of chunks, and how they grow."""
    found: list[dict[str, Any]] = []
    for part in _PARTS:
        job = {"ranks": ranks, "tensors": max(1, tensors // part), "rounds": rounds}
        found.append(run_module(_MODULE, job))
    ratios = {
        str(one["chunks"]): one
        | {
            "size": one["index_bytes"] / one["stock_bytes"],
            "times": one["unpickle_seconds"] / one["decode_seconds"],
            "of_unpickle": one["own_seconds"] / one["unpickle_seconds"],
        }
        for one in found
    }
    names = ("decode_seconds", "own_seconds", "publish_seconds", "unpickle_seconds")
    fits = {name: _fit([(one["chunks"], one[name]) for one in found]) for name in names}
    table = Table.of(
        f"index of {ranks} ranks x {tensors} tensors, processor time, medians of {rounds} rounds",
        "chunks",
        _COLUMNS,
        ratios,
        [
            f"{name}: {1e6 * slope:.2f} us per chunk, grows as chunks ** {exponent:.2f}"
            for name, (slope, exponent) in fits.items()
        ],
    )
    return table, {"command": "index", "ranks": ranks, "tensors": tensors, "sizes": found}


def _fit(points: list[tuple[int, float]]) -> tuple[float, float]:
    """Seconds per chunk of a straight line, and the exponent of a power of the chunks."""
    chunks, seconds = (np.array(values, dtype=np.float64) for values in zip(*points, strict=True))
    slope = np.polyfit(chunks, seconds, 1)[0]
    exponent = np.polyfit(np.log(chunks), np.log(seconds), 1)[0]
    return float(slope), float(exponent)


def _made(ranks: int, tensors: int, shards: tuple[tuple[int, ...], ...]) -> ix.Index:
    """An index in which every rank has one object, with its shard of every tensor in it."""
    of_tensor = [shards[number % len(shards)] for number in range(tensors)]
    payload = np.array([np.prod(shard) * _ITEMSIZE for shard in of_tensor], dtype=np.uint64)
    item_bytes = payload + np.uint64(_LEAD + _TRAIL)
    ends = np.cumsum(item_bytes)
    digests = int(ix.digest_counts(payload).sum()) * ranks
    offsets: list[np.ndarray[Any, Any]] = []
    sizes: list[np.ndarray[Any, Any]] = []
    for shard in of_tensor:
        box = np.zeros((ranks, len(shard)), dtype=np.uint64)
        box[:, 0] = np.arange(ranks) * shard[0]
        offsets.append(box.reshape(-1))
        sizes.append(np.tile(np.array(shard, dtype=np.uint64), ranks))
    same = np.ones(ranks * tensors, dtype=np.uint64)
    keys = [f"model.layers.{number}.feed_forward.weight" for number in range(tensors)]
    return ix.Index(
        objects=tuple(
            ix.ObjectEntry(data_key(rank, 0, new_nonce()), int(ends[-1]), '"e"', bytes(16))
            for rank in range(ranks)
        ),
        tensors={
            key: ix.Tensor(
                key,
                (shard[0] * ranks, *shard[1:]),
                *("bfloat16", "strided", True, "contiguous_format", False),
                ranks,
            )
            for key, shard in zip(keys, of_tensor, strict=True)
        },
        blobs=(),
        columns=ix.Columns(
            object_number=np.tile(np.arange(ranks, dtype=np.uint64), tensors),
            offset=np.repeat(ends - item_bytes, ranks),
            lead=same * np.uint64(_LEAD),
            payload_length=np.repeat(payload, ranks),
            trail=same * np.uint64(_TRAIL),
            pickled=same * np.uint64(0),
            chunk_offsets=np.concatenate(offsets),
            chunk_sizes=np.concatenate(sizes),
            # All payload is zeros.
            digests=np.tile(np.frombuffer(_digest_of_zeros(32), dtype=np.uint8), digests),
        ),
        flatten_mapping={key: tuple(key.split(".")) for key in keys},
    )


def _digest_of_zeros(size_bytes: int) -> bytes:
    return xxhash.xxh3_128_digest(bytes(size_bytes))


def _put(index: ix.Index, folder: Path) -> str:
    """Commit a checkpoint whose data is zeros; the files have holes in place of them."""
    folder.mkdir()
    for entry in index.objects:
        with (folder / entry.key).open("wb") as made:
            made.truncate(entry.size_bytes)
    store = StoreSpec(folder.as_uri()).open()
    commit.commit_checkpoint(
        store,
        commit.take_begin_token(store, overwrite=False),
        index=ix.encode(index),
        objects=[(entry.key, entry.size_bytes) for entry in index.objects],
        counts=Counts(tensors=len(index.tensors), objects=len(index.objects)),
        world_size=len(index.objects),
        user_metadata=None,
        nonce=new_nonce(),
    )
    return folder.as_uri()


def _state(index: ix.Index, ranks: int) -> dict[str, Any]:
    """One rank's shard of every tensor, to be loaded in a process of its own."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=_RANK, world_size=ranks, store=FakeStore())
    mesh = DeviceMesh("cpu", list(range(ranks)))
    state: dict[str, Any] = {}
    for key, tensor in index.tensors.items():
        shape = tensor.shape[0] // ranks, *tensor.shape[1:]
        local = torch.ones(shape, dtype=torch.bfloat16)
        state[key] = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
    dist.destroy_process_group()
    return state


def _seconds(call: Callable[[], object], rounds: int) -> float:
    """The median of the rounds, in processor time: other programs change that least."""
    found = []
    for _ in range(rounds):
        start = time.process_time()
        made = call()
        found.append(time.process_time() - start)
        del made  # which takes long, too
    return statistics.median(found)


def _planning_seconds(url: str, state: dict[str, Any], rounds: int) -> float:
    """What DCP's own planning takes, once there are chunks to plan with."""
    metadata = dos.ObjectStoreReader(url, progress=False).read_metadata()
    for saved in metadata.state_dict_metadata.values():
        list(saved.chunks)  # type: ignore[union-attr]  # there are tensors only
    return _seconds(lambda: create_default_local_load_plan(state, metadata), rounds)


def measure(job: dict[str, int]) -> dict[str, float]:
    """The figures of one size, in this process."""
    ranks, tensors, rounds = job["ranks"], job["tensors"], job["rounds"]
    body = ix.encode(_made(ranks, tensors, _SHARDS))
    stored = ix.decode(body)
    stock = pickle.dumps(pickle.loads(encode_metadata(stored)), 4)
    found: dict[str, float] = {
        "chunks": ranks * tensors,
        "index_bytes": len(body),
        "stock_bytes": len(stock),
        "decode_seconds": _seconds(lambda: ix.decode(body), rounds),
        "unpickle_seconds": _seconds(lambda: pickle.loads(stock), rounds),
        "publish_seconds": _seconds(lambda: encode_metadata(stored), rounds),
    }
    small = _made(ranks, tensors, _SMALL_SHARDS)
    state = _state(small, ranks)
    with tempfile.TemporaryDirectory() as folder:
        url = _put(small, Path(folder) / "checkpoint")
        first = next(iter(state))
        dos.load({first: state[first]}, url, progress=False)  # imports and caches
        loading = _seconds(lambda: dos.load({**state}, url, progress=False), rounds)
        planning = _planning_seconds(url, state, rounds)
    assert not any(tensor.to_local().any() for tensor in state.values())
    found["load_seconds"] = loading
    found["own_seconds"] = loading - planning
    return found


if __name__ == "__main__":
    answer(measure)
