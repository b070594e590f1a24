"""Hugging Face weights: safetensors are read as a checkpoint, by any number of ranks."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, empty as empty_dtensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import dcp_objstore as dos
from benchmarks.sink import Sink, fetch_stats
from dcp_objstore.errors import (
    CheckpointNotFoundError,
    PermissionDeniedError,
    StateMismatchError,
)
from dcp_objstore.read import session
from dcp_objstore.stores import open_store
from tests.support.checkpoints import memory_url, put_weights, saved_by
from tests.support.ranks import run_ranks
from tests.support.states import same_bits, seeded
from tests.support.wrapped_stores import WatchedStore

Options = Mapping[str, object]
MODEL = [("^", "model.")]
DTYPES = (
    *(torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.bool),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8),
)
SHAPES = {"even": (16, 24), "odd": (13, 7), "few": (2, 9), "cube": (6, 10, 4), "none": (0, 5)}


def every_kind() -> dict[str, torch.Tensor]:
    """Tensors of all dtypes and shapes, one of them without dimensions."""
    tensors = {
        f"{name}.{str(dtype).partition('.')[2]}": seeded(name, shape, dtype)
        for dtype in DTYPES
        for name, shape in {**SHAPES, "scalar": ()}.items()
    }
    assert len(tensors) == len(DTYPES) * 6
    return tensors


def write_shards(folder: Path, tensors: Mapping[str, torch.Tensor], count: int = 2) -> None:
    """Write a folder as the hub has it: shards, an index, and other files beside them."""
    folder.mkdir(parents=True, exist_ok=True)
    weight_map = {}
    for number in range(count):
        name = f"model-{number + 1:05d}-of-{count:05d}.safetensors"
        part = dict(list(tensors.items())[number::count])
        safetensors.torch.save_file(part, folder / name, {"format": "pt"})
        weight_map |= dict.fromkeys(part, name)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text("{}")


def upload(folder: Path, url: str, options: Options = {}) -> None:  # noqa: B006
    store = open_store(url, options)
    for path in folder.iterdir():
        store.put(path.name, path.read_bytes())


# --- what is loaded -------------------------------------------------------------------------------


@pytest.mark.backends("seaweed", "gcs")
def test_a_folder_and_a_file_of_a_bucket_are_read_in_every_way(bucket, tmp_path):
    tensors, url, options = every_kind(), bucket.at("llama"), bucket.storage_options
    write_shards(tmp_path / "hub", tensors)
    upload(tmp_path / "hub", url, options)
    state = {key: torch.zeros_like(value) for key, value in tensors.items()}
    report = dos.load(state, f"{url}/", storage_options=options, progress=False)
    assert all(same_bits(state[key], value) for key, value in tensors.items())
    assert (report.unverified, report.commit_id, report.unexpected) == (True, None, ())
    assert report.fetched_bytes == report.needed_bytes == sum(t.nbytes for t in tensors.values())

    name = "model-00001-of-00002.safetensors"
    first = safetensors.torch.load_file(tmp_path / "hub" / name)
    found = dos.read_state_dict(f"{url}/{name}", storage_options=options, progress=False)
    assert found.keys() == first.keys()
    assert all(same_bits(found[key], value) for key, value in first.items())
    state = {f"m.{key}": torch.zeros_like(value) for key, value in first.items()}
    reader = dos.ObjectStoreReader(
        f"{url}/{name}", storage_options=options, rename=[("^", "m.")], progress=False
    )
    dcp.load(state, storage_reader=reader, no_dist=True)
    assert all(same_bits(state[f"m.{key}"], value) for key, value in first.items())
    assert reader.last_load is not None
    assert reader.last_load.url == f"{url}/{name}"
    assert bucket.uploads() == []


def load_as_both(rank: int, world_size: int, folder: str) -> None:
    """On a mesh of 2 x 2: with torch's reader and with ours."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    every_way = [
        (mesh, [Shard(0), Shard(1)]),
        (mesh, [Replicate(), Shard(0)]),
        (mesh, [Shard(1), Replicate()]),
        (mesh["dp"], [Shard(0)]),
    ]
    theirs, ours = {}, {}
    for number, (key, value) in enumerate(every_kind().items()):
        for state in (theirs, ours):
            state[key] = torch.zeros_like(value)
            if value.ndim > 1 and value.numel():
                on, placements = every_way[number % 4]
                state[key] = empty_dtensor(
                    *value.shape, dtype=value.dtype, device_mesh=on, placements=placements
                )
    full = {key: value for key, value in theirs.items() if value.numel()}
    dcp.load(full, storage_reader=dcp.HuggingFaceStorageReader(folder))
    dos.load(ours, f"file://{folder}", progress=False)
    for key in ours:
        one, two = (
            s[key].to_local() if isinstance(s[key], DTensor) else s[key] for s in (ours, theirs)
        )
        assert same_bits(one, two), key


def test_sharded_tensors_are_as_torchs_own_reader_loads_them(tmp_path):
    write_shards(tmp_path, every_kind())
    run_ranks(4, load_as_both, str(tmp_path))


# --- how it is read -------------------------------------------------------------------------------

WIDE = {"up": (1237, 1000), "down": (1000, 1237), "norm": (1000,)}  # no shard is a whole block


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(1000, 1237, bias=False)
        self.down = nn.Linear(1237, 1000, bias=False)
        self.norm = nn.LayerNorm(1000, bias=False)


def wide() -> dict[str, torch.Tensor]:
    return {f"{name}.weight": seeded(name, shape) for name, shape in WIDE.items()}


def load_model(rank: int, world_size: int, url: str, options: Options) -> dos.reports.LoadReport:
    """Into a model that is cut both ways, by tensor parallelism and by FSDP."""
    model = Mlp()
    mesh = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    report = dos.load({"model": model}, url, storage_options=options, rename=MODEL, progress=False)
    for name, weight in model.state_dict().items():
        whole = weight.full_tensor() if isinstance(weight, DTensor) else weight
        assert same_bits(whole, wide()[name])
    return report


def test_each_byte_is_fetched_once_and_each_rank_gets_its_own():
    url = "s3://bucket/wide"
    with Sink(keep=True) as sink:
        store = open_store(url, sink.storage_options)
        store.put("model.safetensors", safetensors.torch.save(wide()))
        fetch_stats(sink.endpoint_url, reset=True)
        reports = run_ranks(4, load_model, url, sink.storage_options)
        sent_bytes = sink.stats()["sent_bytes"]
    payload_bytes = sum(tensor.nbytes for tensor in wide().values())
    header_bytes = 256 * 1024
    assert sent_bytes <= 1.02 * payload_bytes + header_bytes
    assert sum(report.fetched_bytes for report in reports) <= 1.02 * payload_bytes


def test_opening_takes_one_range_of_each_file_and_one_listing(requests, tmp_path):
    write_shards(tmp_path, every_kind(), 3)
    dos.open(tmp_path.as_uri())
    verbs = Counter(request.verb for request in requests)
    # _COMMIT, .metadata and the index.
    assert verbs == {"get": 3, "list": 1, "open_range": 3}
    del requests[:]
    dos.open(f"{tmp_path.as_uri()}/model-00002-of-00003.safetensors")
    assert [request.verb for request in requests] == ["head", "open_range"]


def test_what_is_absent_takes_no_more_requests_than_before(requests, tmp_path):
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(CheckpointNotFoundError, match="only other objects"):
        dos.open(tmp_path.as_uri())
    # The last two ask whether the folder above is a run, whose next step the error would name.
    assert sorted(one.verb for one in requests[:3]) == ["get", "get", "list"]
    assert [one.verb for one in requests[3:]] == ["head", "get"]


def test_without_the_right_to_list_a_file_is_read_and_a_folder_is_absent(through, tmp_path):
    class Unlisted(WatchedStore):
        def list(self, prefix: str = "") -> Any:
            raise PermissionDeniedError("no listing")

    write_shards(tmp_path, every_kind())
    through(Unlisted)
    with pytest.raises(CheckpointNotFoundError, match="no listing"):
        dos.open(tmp_path.as_uri())
    dos.read_state_dict(f"{tmp_path.as_uri()}/model-00001-of-00002.safetensors", progress=False)


def test_a_long_header_takes_a_second_range(requests):
    memory = memory_url()
    tensors = {f"{'layer' * 20}.{n}": torch.tensor(n) for n in range(3000)}
    put_weights(memory, model=tensors)
    assert int(dos.open(memory)[f"{'layer' * 20}.2999"].read()) == 2999
    ranges = [one for one in requests if one.verb == "open_range"]
    assert [one.start for one in ranges[:2]] == [0, 256 * 1024]
    assert len(ranges) == 3


# --- names, dtypes, ties --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["ours", "stock", "safetensors"])
def test_rules_rename_the_keys_of_every_kind_of_checkpoint(tmp_path, kind):
    state: dict[str, Any] = {"old.a": torch.arange(6.0), "b": torch.arange(3)}
    if kind != "safetensors":
        state |= {"old.step": 7}
    url = saved_by(kind, tmp_path / "step", state)
    rules = [("^old", "new"), (r"^b$", "c.b")]
    to: dict[str, Any] = {"new": {"a": torch.zeros(6)}, "c": {"b": torch.zeros(3).long()}}
    if kind != "safetensors":
        to["new"]["step"] = 0
    report = dos.load(to, url, rename=rules, progress=False)
    assert to["new"]["a"].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert to["c"]["b"].tolist() == [0, 1, 2]
    assert to["new"].get("step", 7) == 7
    assert (report.missing, report.unexpected) == ((), ())
    opened = dos.open(url, rename=rules)
    assert {"new.a", "c.b"} <= opened.keys()
    assert opened["new.a"][2:4].tolist() == [2.0, 3.0]
    with pytest.raises(StateMismatchError, match="both become 'one'") as caught:
        dos.open(url, rename=[(".*(a|b)$", "one")])
    assert caught.value.url == url
    with pytest.raises(StateMismatchError, match="both become 'one'"):
        dos.load(to, url, rename=[(".*(a|b)$", "one")], progress=False)
    with pytest.raises(StateMismatchError, match=r"nearest: new\.a"):
        dos.load({"new.aa": torch.zeros(6)}, url, rename=rules, progress=False)


@pytest.mark.parametrize("kind", ["ours", "safetensors"])
def test_bytes_that_nobody_checks_are_received_in_the_tensors_own_memory(bucket, monkeypatch, kind):
    """Not what must be converted or spread, is less than what is read, or has a digest to check."""
    sizes = {"whole": (3, 2**20), "half": (2**20,), "spread": (4, 2**18), "other": (2**20,)}
    saved = {key: seeded(key, shape) for key, shape in sizes.items()}
    url, options = bucket.at("step"), {"storage_options": bucket.storage_options}
    if kind == "ours":
        dos.save(dict(saved), url, **options)
    else:
        open_store(url, **options).put("m.safetensors", safetensors.torch.save(saved))
    consumed: set[str] = set()

    def consume(request: Any, body: Any) -> None:
        consumed.update(span.tag.key for span in request.spans)
        really(request, body)

    really = session.consume
    monkeypatch.setattr(session, "consume", consume)
    config = dos.TransferConfig(request_size_bytes=4 * 2**20)  # a tensor each
    for verify in (True, False):
        state = {key: torch.zeros_like(value) for key, value in saved.items()}
        state["spread"] = torch.zeros(2**18, 4).t()
        state["other"] = torch.zeros(2**20, dtype=torch.float64)
        consumed.clear()
        dos.load(state, url, **options, progress=False, config=config, verify=verify)
        for key, value in saved.items():
            assert same_bits(state[key], value.to(state[key].dtype)), key
        assert consumed >= {"spread", "other"}
        assert ("whole" in consumed) == ("half" in consumed) == (verify and kind == "ours")


class Tied(nn.Module):
    """A language model whose head has the weight of its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(3, 8)
        self.block = nn.Linear(8, 8)
        self.head = nn.Linear(8, 3, bias=False)
        self.head.weight = self.embed.weight


def untied() -> dict[str, torch.Tensor]:
    return {
        "embed.weight": seeded("e", (3, 8)),
        "block.weight": seeded("w", (8, 8)),
        "block.bias": seeded("b", (8,)),
    }


def test_tied_weights_that_the_file_leaves_out_are_what_the_model_ties():
    memory = memory_url()
    put_weights(memory, model=untied())
    model = Tied()
    report = dos.load({"model": model}, memory, rename=MODEL, progress=False)
    assert same_bits(model.head.weight, untied()["embed.weight"])
    assert model.head.weight is model.embed.weight
    assert report.missing == ()
    assert report.needed_bytes == sum(tensor.nbytes for tensor in untied().values())
    # As a dict of tensors, too; and the other way round.
    weight = torch.zeros(3, 8)
    dos.load({"head.weight": weight, "embed.weight": weight}, memory, progress=False)
    assert same_bits(weight, untied()["embed.weight"])


@pytest.mark.parametrize("strict", [True, False])
def test_a_weight_that_is_not_tied_is_missing(strict):
    """Nor is one that shares only a part, or lies in the same memory in another order."""
    memory = memory_url()
    put_weights(memory, model={"square": torch.ones(3, 3)})
    square = torch.zeros(3, 3)
    others = {"other": torch.zeros(3, 3), "part": square[:2], "across": square.t()}
    for name, tensor in others.items():
        state = {"square": square, name: tensor, "empty": torch.zeros(0, 3)}
        if strict:
            with pytest.raises(StateMismatchError, match="in 2 keys"):
                dos.load(state, memory, progress=False)
        else:
            report = dos.load(state, memory, strict=False, progress=False)
            assert set(report.missing) == {name, "empty"}


def load_tied(rank: int, world_size: int, url: str) -> None:
    """With fewer words than ranks, so that some have nothing of the tied weight."""
    model = Tied()
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    dos.load({"model": model}, url, rename=MODEL, progress=False)
    for name, weight in model.state_dict().items():
        whole = weight.full_tensor()
        assert same_bits(whole, untied()[name.replace("head", "embed")])


def test_tied_weights_under_fsdp2_are_filled_on_ranks_without_a_part_of_them(tmp_path):
    safetensors.torch.save_file(untied(), tmp_path / "model.safetensors")
    run_ranks(4, load_tied, tmp_path.as_uri())
