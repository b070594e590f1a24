"""Hugging Face weights: safetensors are read as a checkpoint, by any number of ranks."""

from __future__ import annotations

import json
import secrets
from collections import Counter
from collections.abc import Callable, Mapping
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
from dcp_objstore.checkpoint import read as checkpoint_read
from dcp_objstore.errors import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    DcpObjstoreError,
    InputError,
    PermissionDeniedError,
    StateMismatchError,
    UnsupportedError,
)
from dcp_objstore.read import session, stored_checkpoint
from dcp_objstore.stores import open_store
from tests.support.checkpoints import saved_by
from tests.support.command_line import run_here
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


@pytest.fixture
def memory() -> str:
    return f"memory://{secrets.token_hex(6)}/llama"


def put(url: str, **files: Mapping[str, torch.Tensor] | bytes) -> None:
    """Put files of safetensors, or bytes; `_` in a name stands for a dot before its ending."""
    for name, content in files.items():
        body = content if isinstance(content, bytes) else safetensors.torch.save(dict(content))
        open_store(url).put(f"{name}.safetensors", body)


def file_of(header: dict[str, Any] | bytes, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


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


def test_a_long_header_takes_a_second_range(requests, memory):
    tensors = {f"{'layer' * 20}.{n}": torch.tensor(n) for n in range(3000)}
    put(memory, model=tensors)
    assert int(dos.open(memory)[f"{'layer' * 20}.2999"].read()) == 2999
    ranges = [one for one in requests if one.verb == "open_range"]
    assert [one.start for one in ranges[:2]] == [0, 256 * 1024]
    assert len(ranges) == 3


# --- which files ----------------------------------------------------------------------------------


def test_of_several_files_those_count_that_transformers_would_read(memory):
    one, two, three = ({"w": torch.tensor(n)} for n in range(3))
    put(f"{memory}/original", model=three)  # a folder inside is another model
    with pytest.raises(CheckpointNotFoundError):
        dos.open(memory)
    put(memory, adapter_model=one)
    assert int(dos.open(memory)["w"].read()) == 0
    put(memory, consolidated=two)
    with pytest.raises(InputError, match=r"adapter_model.*, consolidated"):
        dos.open(memory)
    index = {"weight_map": {"w": "consolidated.safetensors"}}
    store = open_store(memory)
    store.put("model.safetensors.index.json", json.dumps(index).encode())
    store.put("other.safetensors.index.json", b"{")
    assert int(dos.open(memory)["w"].read()) == 1
    put(memory, model=three)
    assert int(dos.open(memory)["w"].read()) == 2


def test_files_that_a_listing_was_cut_before_are_asked_for_by_name(memory, monkeypatch):
    """Subfolders come between the names of a folder; what is listed first does not decide."""
    for module in (checkpoint_read, stored_checkpoint):
        monkeypatch.setattr(module, "LOOK_AROUND_LIMIT", 3)
    one, two, three = ({"w": torch.tensor(n)} for n in range(3))
    put(memory, best=one)
    put(f"{memory}/keep", **{f"{n:03}": three for n in range(29)})
    with pytest.raises(InputError, match=r"too many objects to list.* best\.safetensors"):
        dos.open(memory)
    put(memory, **{"model-00001-of-00001": two})
    index = {"weight_map": {"w": "model-00001-of-00001.safetensors"}}
    open_store(memory).put("model.safetensors.index.json", json.dumps(index).encode())
    assert int(dos.open(memory)["w"].read()) == 1
    put(memory, model=three)
    assert int(dos.open(memory)["w"].read()) == 2
    open_store(memory).delete("best.safetensors")
    assert int(dos.open(memory)["w"].read()) == 2


@pytest.mark.parametrize("place", ["shards/part.safetensors", "./part.safetensors"])
def test_an_index_may_name_files_as_os_path_join_takes_them(memory, place):
    place_in = memory if place.startswith(".") else f"{memory}/shards"
    put(place_in, part={"w": torch.ones(2)}, other={"w": torch.zeros(2)})
    open_store(memory).put(INDEX, index_of(w=place))
    assert dos.read_state_dict(memory, progress=False)["w"].tolist() == [1.0, 1.0]


def test_one_of_several_shards_is_no_model(memory):
    """An upload that has only begun."""
    put(memory, **{"model-00001-of-00002": {"w": torch.ones(1)}})
    with pytest.raises(InputError, match="index"):
        dos.open(memory)
    assert list(dos.open(f"{memory}/model-00001-of-00002.safetensors")) == ["w"]


def test_a_save_that_was_never_committed_is_not_hidden_by_weights(tmp_path):
    dos.save({"w": torch.ones(1)}, tmp_path.as_uri(), progress=False)
    safetensors.torch.save_file({"w": torch.zeros(1)}, tmp_path / "model.safetensors")
    assert dos.read_state_dict(tmp_path.as_uri(), progress=False)["w"].item() == 1
    (tmp_path / "_COMMIT").unlink()
    (tmp_path / ".metadata").unlink()
    with pytest.raises(CheckpointNotFoundError, match="never committed"):
        dos.open(tmp_path.as_uri())


def test_a_checkpoint_may_have_a_name_like_a_file(tmp_path):
    url = (tmp_path / "step.safetensors").as_uri()
    dos.save({"w": torch.ones(1)}, url, progress=False)
    assert dos.read_state_dict(url, progress=False)["w"].item() == 1


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


def test_tied_weights_that_the_file_leaves_out_are_what_the_model_ties(memory):
    put(memory, model=untied())
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
def test_a_weight_that_is_not_tied_is_missing(memory, strict):
    """Nor is one that shares only a part, or lies in the same memory in another order."""
    put(memory, model={"square": torch.ones(3, 3)})
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


# --- bad input ------------------------------------------------------------------------------------

F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def index_of(**weight_map: str) -> bytes:
    return json.dumps({"weight_map": weight_map}).encode()


W, V = {"w": torch.ones(2)}, {"v": torch.ones(2)}
INDEX, ONE, TWO = "model.safetensors.index.json", "1.safetensors", "2.safetensors"
FILE = {ONE: safetensors.torch.save(W)}
# The files, by what the error says of them.
BAD: dict[str, dict[str, bytes]] = {
    f"{ONE} is not a whole safetensors file": {INDEX: index_of(w=ONE), ONE: FILE[ONE][:-1]},
    "git lfs pull": {
        ONE: b"version https://git-lfs.github.com/spec/v1\noid sha256:%s\nsize 1976163472\n"
        % (b"0" * 64)
    },
    "header would end at byte 8 of 0": {ONE: b""},
    "header would end": {ONE: (2**40).to_bytes(8, "little") + b"{}"},
    f"names {TWO}, which is not in the folder": {INDEX: index_of(w=ONE, v=TWO), **FILE},
    "no weight_map of this folder": {INDEX: index_of(w=f"../{ONE}"), **FILE},
    "weight_map": {INDEX: index_of(w=".")},
    "not in the folder": {INDEX: index_of(w=f"s3://bucket/{ONE}")},
    "it has not": {INDEX: index_of(w=ONE, v=ONE), **FILE},
    INDEX: {INDEX: b"[]", **FILE},
    f"both {ONE} and {TWO} have this tensor": {
        INDEX: index_of(w=ONE, v=TWO),
        ONE: safetensors.torch.save({**W, "x": torch.ones(1)}),
        TWO: safetensors.torch.save({**V, "x": torch.zeros(1)}),
    },
    "begins at byte": {ONE: file_of({"a": F32, "b": {**F32, "data_offsets": [4, 12]}}, bytes(12))},
    "offsets 8 and 0": {
        ONE: file_of({"a": F32, "w": {**F32, "dtype": "X", "data_offsets": [8, 0]}}, bytes(8))
    },
    "tensors end at byte": {ONE: file_of({"a": F32}, bytes(9))},
    "F6_E3M2": {ONE: file_of({"w": {**F32, "dtype": "F6_E3M2"}}, bytes(8))},
    "QUINT8": {ONE: file_of({"w": {**F32, "dtype": "quint8"}}, bytes(8))},
}


@pytest.mark.parametrize("text", BAD)
def test_bad_input_gets_one_clear_error_and_leaves_nothing(tmp_path, text):
    files, is_unknown = BAD[text], text in ("F6_E3M2", "QUINT8")
    for name, body in files.items():
        (tmp_path / name).write_bytes(body)
    state = {"w": torch.zeros(2)}
    loads: list[Callable[[], object]] = [
        lambda: dos.load(state, tmp_path.as_uri(), progress=False),
        lambda: dos.read_state_dict(tmp_path.as_uri(), progress=False),
        lambda: dos.import_checkpoint(tmp_path, f"{tmp_path.as_uri()}/new", progress=False),
    ]
    for load in loads:
        with pytest.raises(DcpObjstoreError) as caught:
            load()
        assert type(caught.value) is (UnsupportedError if is_unknown else CheckpointCorruptError)
        assert text in str(caught.value) or (is_unknown and load is loads[2])
        if text == "it has not":
            assert (caught.value.key, caught.value.object_key) == ("v", "1.safetensors")
    assert not state["w"].any()
    assert {path.name for path in tmp_path.iterdir()} == files.keys()


def test_the_metadata_of_a_header_may_be_null_or_have_the_names_of_a_tensors_fields(memory):
    fields = {"dtype": "bf16", "shape": "large", "data_offsets": "none", "format": "pt"}
    for metadata in (None, fields):
        put(memory, model=file_of({"__metadata__": metadata, "w": F32}, bytes(8)))
        assert dos.read_state_dict(memory, progress=False)["w"].tolist() == [0.0, 0.0]
    put(memory, model=file_of({"v": F32, "w": None}, bytes(8)))
    with pytest.raises(CheckpointCorruptError, match="'w' has no shape"):
        dos.open(memory)


def test_a_tensor_of_an_unknown_dtype_is_left_out(memory):
    for dtype, shape in (("F6_E3M2", [4, 4]), ("F4", [16, 1]), ("F4", [])):
        strange = {"dtype": dtype, "shape": shape, "data_offsets": [8, 16]}
        put(memory, model=file_of({"w": F32, "x": strange}, bytes(16)))
        assert dos.read_state_dict(memory, "w", progress=False)["w"].tolist() == [0.0, 0.0]
        assert dos.open(memory)["x"].dtype_name == "unknown"


# --- the commands ---------------------------------------------------------------------------------


def test_each_command_says_what_it_makes_of_weights(tmp_path):
    tensors = {"a.w": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2)}
    write_shards(tmp_path / "hub", tensors)
    before = sorted((tmp_path / "hub").iterdir())
    url, new = (tmp_path / "hub").as_uri(), f"{tmp_path.as_uri()}/new"
    shown = run_here("inspect", url)
    assert (shown.returncode, shown.stdout.count("unverified")) == (0, 1)
    assert json.loads(run_here("inspect", url, "--json").stdout)["unverified"] is True
    file = f"{url}/model-00001-of-00002.safetensors"
    for place in (url, file):
        for command in (("verify", place), ("cp", place, new)):
            refused = run_here(*command)
            assert (refused.returncode, "without digests" in refused.stderr) == (2, True)
    for command in (("ls", url), ("rm", url), ("pin", url, "paper"), ("unpin", url, "paper")):
        refused = run_here(*command)
        assert refused.returncode == 2
        assert "a folder of safetensors" in refused.stderr
        assert "dcp-objstore import" in refused.stderr
    assert run_here("import", url, new).returncode == 0
    assert run_here("diff", url, new).returncode == 0
    assert run_here("export", url, str(tmp_path / "out.safetensors")).returncode == 0
    found = safetensors.torch.load_file(tmp_path / "out.safetensors")
    assert all(torch.equal(found[key], value) for key, value in tensors.items())
    assert sorted((tmp_path / "hub").iterdir()) == before
