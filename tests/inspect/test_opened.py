"""`dos.open`: a checkpoint to look into; only what is asked for is fetched, and verified."""

from __future__ import annotations

import pickle
import tracemalloc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import dcp_objstore as dos
from dcp_objstore.compat.dot_metadata import StockDotMetadata
from dcp_objstore.compat.foreign import decode_metadata
from dcp_objstore.config import MIB
from dcp_objstore.errors import (
    AbsentKeyError,
    CheckpointCorruptError,
    CheckpointGoneError,
    CheckpointNotFoundError,
    ConfigError,
    DcpObjstoreError,
    StateMismatchError,
    UnsupportedError,
    UntrustedPickleError,
)
from dcp_objstore.inspect import checkpoint, diff
from tests.support import hostile, pickles
from tests.support.checkpoints import memory_url
from tests.support.hostile_cases import many_times_one_chunk
from tests.support.ranks import run_ranks
from tests.support.states import ALL_DTYPES, same_bits, seeded

WIDE = (3000, 2000)  # 24 MB: six blocks


def training_state() -> dict[str, Any]:
    return {
        "model": {
            "embed": {"weight": seeded("embed", (10, 6))},
            "head": [seeded("head0", (4,)), seeded("head1", (4,))],
        },
        "optim": {"lr": 0.25, "betas": (0.9, 0.95)},
        "step": 7,
    }


@pytest.fixture
def url(tmp_path: Path) -> str:
    place = (tmp_path / "step-7").as_uri()
    dos.save(training_state(), place, user_metadata={"loss": 0.5}, progress=False)
    return place


def save_wide(rank: int, world: int, url: str, options: Mapping[str, object]) -> None:
    mesh = init_device_mesh("cpu", (world,))
    wide = distribute_tensor(seeded("wide", WIDE), mesh, [Shard(0)])
    tall = distribute_tensor(seeded("tall", (7, 5)), mesh, [Shard(1)])
    dos.save({"wide": wide, "tall": tall}, url, storage_options=options, progress=False)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> dos.Checkpoint:
    """Saved by three ranks, in chunks."""
    url = (tmp_path_factory.mktemp("run") / "step-1").as_uri()
    run_ranks(3, save_wide, url, {})
    return dos.open(url)


def test_a_checkpoint_is_a_mapping_of_its_keys(url):
    ckpt = dos.open(url)
    assert list(ckpt) == list(ckpt.keys())
    assert set(ckpt) == {
        *("model.embed.weight", "model.head.0", "model.head.1"),
        *("optim.lr", "optim.betas", "step"),
    }
    assert len(ckpt) == 6
    assert "step" in ckpt
    assert "steps" not in ckpt
    entry = ckpt["model.embed.weight"]
    assert (entry.key, entry.shape, entry.dtype) == ("model.embed.weight", (10, 6), torch.float32)
    assert entry.nbytes == 240
    assert entry.chunks == (((0, 0), (10, 6)),)
    assert isinstance(ckpt["step"], dos.reports.ValueEntry)
    assert ckpt["step"].nbytes > 0
    assert (ckpt.url, ckpt.world_size, ckpt.user_metadata) == (url, 1, {"loss": 0.5})
    assert ckpt.commit_id
    assert len(ckpt.objects) == 1
    assert "3 tensors, 3 values" in repr(ckpt)
    assert ckpt.commit_id in repr(ckpt)


def test_tensors_values_and_patterns_read_what_was_saved(url):
    ckpt, saved = dos.open(url), training_state()
    assert same_bits(ckpt["model.embed.weight"].read(), saved["model"]["embed"]["weight"])
    assert ckpt["optim.betas"].read() == (0.9, 0.95)
    found = ckpt.read("model.*")
    assert list(found) == [key for key in ckpt if key.startswith("model.")]
    assert same_bits(found["model.head.1"], saved["model"]["head"][1])
    assert ckpt.read(["step", "optim.*"]) == {
        "step": 7,
        "optim.lr": 0.25,
        "optim.betas": (0.9, 0.95),
    }
    assert set(ckpt.read()) == set(ckpt)


def test_an_absent_key_is_a_key_error_with_the_nearest_names(url):
    ckpt = dos.open(url)
    with pytest.raises(KeyError, match=r"embed\.weigth.*nearest: model\.embed\.weight") as caught:
        ckpt["model.embed.weigth"]
    assert type(caught.value) is AbsentKeyError
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    assert ckpt.get("nothing") is None
    with pytest.raises(AbsentKeyError, match="3"):
        ckpt[3]
    with pytest.raises(StateMismatchError) as caught:
        ckpt.matching("nothing")
    assert caught.value.url == url


def test_a_large_tensor_is_cut_into_slabs():
    dos.save({"w": torch.zeros(3, 4 * MIB)}, url := memory_url(), progress=False)
    slabs = dos.open(url)["w"].slabs()
    assert [slab.size_bytes for slab in slabs] == [32 * MIB, 16 * MIB]


def test_if_a_step_is_deleted_while_it_is_read_the_error_names_the_next(tmp_path):
    url = (tmp_path / "run").as_uri()
    with dos.CheckpointManager(url) as run:
        for step in (1, 2, 3):
            run.save(step, {"w": torch.ones(3)})
    ckpt = dos.open(f"{url}/step-2")
    dos.delete(f"{url}/step-2")
    with pytest.raises(CheckpointGoneError, match="the next step of the run is step-3"):
        ckpt["w"].read()


def test_a_state_dict_comes_back_nested_as_it_was_saved_or_flat(url):
    saved = training_state()
    whole = dos.read_state_dict(url)
    assert whole.keys() == saved.keys()
    assert whole["optim"] == saved["optim"]
    assert isinstance(whole["model"]["head"], list)
    for number in range(2):
        assert same_bits(whole["model"]["head"][number], saved["model"]["head"][number])
    part = dos.read_state_dict(url, keys="model.embed.*")
    assert set(part) == {"model"}
    assert set(part["model"]) == {"embed"}
    flat = dos.read_state_dict(url, keys=["step", "model.head.0"], nested=False)
    assert set(flat) == {"step", "model.head.0"}
    model = torch.nn.Module()
    model.register_buffer("weight", torch.zeros(10, 6))
    model.load_state_dict(whole["model"]["embed"])
    assert same_bits(model.weight, saved["model"]["embed"]["weight"])


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (5,), (2, 3, 4)], ids=str)
def test_every_dtype_and_shape_reads_bit_identical(tmp_path, shape):
    state = {str(dtype): seeded(str(dtype), shape, dtype) for dtype in ALL_DTYPES}
    url = (tmp_path / "step-1").as_uri()
    dos.save(state, url, progress=False)
    found = dos.open(url).read()
    for key, tensor in state.items():
        assert same_bits(found[key], tensor), key


@pytest.mark.parametrize("index", [-1, (), (-1, -2), (slice(1, 3), 2), (..., slice(1, 4))], ids=str)
def test_a_part_is_what_indexing_the_whole_would_give(sharded, index):
    entry = sharded["tall"]
    assert len(entry.chunks) == 3
    assert same_bits(entry[index], seeded("tall", (7, 5))[index].contiguous())


@pytest.mark.parametrize("index", [7, (..., ...), slice(None, None, 2), None, "a", 1.5])
def test_what_selects_no_part_is_an_index_error(sharded, index):
    with pytest.raises(IndexError):
        sharded["tall"][index]


def test_a_part_fetches_only_the_blocks_that_hold_it(sharded):
    entry = sharded["wide"]
    assert same_bits(entry[10:12], seeded("wide", WIDE)[10:12])
    assert (sharded.last_read.requests, sharded.last_read.total_bytes) == (1, 4 * MIB)
    # Across the border of two ranks' chunks.
    assert same_bits(entry[999:1001, 5:7], seeded("wide", WIDE)[999:1001, 5:7].contiguous())
    assert sharded.last_read.total_bytes <= 8 * MIB
    unverified = dos.open(sharded.url, verify=False)
    part = unverified["wide"]
    assert same_bits(part[10:12], seeded("wide", WIDE)[10:12])
    assert unverified.last_read.total_bytes == 2 * WIDE[1] * 4


def test_damage_is_found_by_what_reads_it_and_nothing_else(tmp_path):
    url = (tmp_path / "step-1").as_uri()
    state = {"a": seeded("a", (64,)), "b": seeded("b", (64,))}
    dos.save(state, url, progress=False)
    (path,) = (tmp_path / "step-1").glob("*.distcp")
    body = bytearray(path.read_bytes())
    body[body.index(state["b"].numpy().tobytes()) + 7] ^= 1
    path.write_bytes(body)
    ckpt = dos.open(url)
    assert same_bits(ckpt["a"].read(), state["a"])
    with pytest.raises(CheckpointCorruptError, match="block 0") as caught:
        ckpt.read()
    assert caught.value.key == "b"


def test_an_opened_checkpoint_that_is_replaced_is_gone(url, tmp_path):
    ckpt = dos.open(url)
    dos.save({"other": torch.ones(2)}, url, overwrite=True, progress=False)
    (tmp_path / "step-7" / ckpt.objects[0]).unlink()
    with pytest.raises(CheckpointGoneError):
        ckpt.read("model.*")
    with pytest.raises(CheckpointGoneError):
        ckpt.verify()


def test_values_that_need_trust_need_it_here_too(tmp_path):
    url = (tmp_path / "step-1").as_uri()
    with pytest.warns(UserWarning, match="trust_pickle"):
        dos.save({"part": slice(1, 2), "step": 1}, url, progress=False)
    ckpt = dos.open(url)
    assert ckpt["step"].read() == 1
    with pytest.raises(UntrustedPickleError) as caught:
        ckpt["part"].read()
    assert caught.value.key == "part"
    assert dos.read_state_dict(url, trust_pickle=True) == {"part": slice(1, 2), "step": 1}


def test_opening_what_another_library_wrote_takes_no_memory_beyond_its_metadata(tmp_path):
    body = many_times_one_chunk(3000)
    (tmp_path / ".metadata").write_bytes(body)
    url = tmp_path.as_uri()
    dos.open(url)  # imports
    peaks = []
    for read in (lambda: decode_metadata(body), lambda: dos.open(url)):
        tracemalloc.start()
        read()
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.2 * peaks[0] + MIB


@pytest.mark.parametrize("name", ["bits8", "uint3", "quint4x2"])
def test_a_dtype_that_another_library_cannot_have_saved_is_named(tmp_path, name):
    properties = pickles.properties(pickles.name("torch", name))
    tensor = pickles.mapped({pickles.text("w"): pickles.tensor(properties)})
    info = pickles.mapped({pickles.index(): pickles.info()})
    for key, body in hostile.foreign(pickles.metadata(tensor, info)).items():
        (tmp_path / key).write_bytes(body)
    opened = dos.open(tmp_path.as_uri())
    for read in (opened.read, opened["w"].read, opened["w"].slabs):
        with pytest.raises(UnsupportedError, match=name) as caught:
            read()
        assert caught.value.key == "w"


@pytest.mark.parametrize("name", ["float3", "quint4x2"])
def test_a_tensor_of_an_unknown_dtype_spoils_no_other_key(tmp_path, name):
    for key, body in hostile.with_tensor(dtype=name).items():
        (tmp_path / key).write_bytes(body)
    url = tmp_path.as_uri()
    opened = dos.open(url)
    assert set(opened) == {"w", "step"}
    entry = opened["w"]
    assert (entry.shape, entry.dtype, entry.nbytes) == ((2, 3), None, 0)
    assert opened.read("step", progress=False) == {"step": 7}
    assert opened.verify(progress=False).ok
    into = {"step": 0}
    dos.load(into, url, progress=False)
    assert into == {"step": 7}
    for read in (
        lambda: opened.read(progress=False),
        lambda: entry[0],
        lambda: dos.load({"w": torch.zeros(2, 3)}, url, progress=False),
        # Stock readers could not read what a repair would write.
        lambda: StockDotMetadata().derive((tmp_path / hostile.INDEX_KEY).read_bytes()),
    ):
        with pytest.raises(UnsupportedError, match=name) as caught:
            read()
        assert caught.value.key == "w"


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, that these will go
def test_a_quantized_tensor_is_refused_by_name_where_it_would_be_made(tmp_path):
    quantized = torch.quantize_per_tensor(torch.ones(4), 0.1, 3, torch.qint8)
    url = tmp_path.as_uri()
    dos.save({"q": quantized, "x": torch.ones(2)}, url, progress=False)
    opened = dos.open(url)
    for read in (
        lambda: opened.read(progress=False),
        lambda: dos.read_state_dict(url, progress=False),
        opened["q"].read,
        lambda: opened["q"][:2],
    ):
        with pytest.raises(UnsupportedError, match="quantized") as caught:
            read()
        assert caught.value.key == "q"
    assert torch.equal(opened.read("x", progress=False)["x"], torch.ones(2))


def test_a_metadata_that_claims_far_more_than_its_objects_have_is_refused(tmp_path):
    def put(elements: int) -> None:
        shape, zero = pickles.size(elements), pickles.size(0)
        tensor = pickles.tensor(shape=shape, chunks=pickles.listed(pickles.chunk(zero, shape)))
        items = pickles.mapped({pickles.text("w"): tensor})
        places = pickles.mapped({pickles.index(offset=zero): pickles.info()})
        for key, body in hostile.foreign(pickles.metadata(items, places)).items():
            (tmp_path / key).write_bytes(body)

    # 64 GiB are believed; more must be at most a thousand times what is stored.
    url, rows = tmp_path.as_uri(), 17_500_000_000
    for elements, stored_bytes, is_refused in (
        (2**34, 1000, False),
        (2**34 + 1, 1000, True),
        (rows, rows * 4 // 1000, False),
        (rows, rows * 4 // 1000 - 1, True),
    ):
        put(elements)
        with (tmp_path / "__0_0.distcp").open("r+b") as file:
            file.truncate(stored_bytes)
        opened = dos.open(url)
        with pytest.raises(DcpObjstoreError) as caught:
            opened.read(device="meta")
        assert ("claims tensors" in str(caught.value)) is is_refused
    assert caught.value.url == url
    with pytest.raises(CheckpointCorruptError, match="claims tensors"):
        dos.diff(url, url)
    (tmp_path / "__0_0.distcp").unlink()
    with pytest.raises(CheckpointCorruptError, match="__0_0") as missing:
        opened.read()
    assert missing.value.url == url


class OpenedError(Exception):
    """What `open` was called with."""


def test_the_settings_of_a_read_and_a_comparison_are_those_of_the_opening(monkeypatch):
    shared: dict[str, Any] = {
        "config": dos.TransferConfig(request_size_bytes=8 * MIB),
        "verify": False,
        "trust_pickle": True,
    }
    calls = []

    def opening(url: str, **settings: Any) -> None:
        calls.append((url, settings))
        if url != "s3://bucket/first":
            raise OpenedError

    for module in (checkpoint, diff):
        name = "open" if module is checkpoint else "open_checkpoint"
        monkeypatch.setattr(module, name, opening)
    read: dict[str, Any] = {
        **shared,
        "storage_options": {"key": "a"},
        "rename": [("a", "b")],
        "on_event": print,
        "trace": "trace.json",
    }
    with pytest.raises(OpenedError):
        dos.read_state_dict("s3://bucket/x", **read)
    assert calls == [("s3://bucket/x", read)]
    keys: dict[str, Any] = {"storage_options": {"key": "a"}, "other_storage_options": {"key": "b"}}
    first, other = "s3://bucket/first", "s3://bucket/other"
    usual = {"config": None, "verify": True, "trust_pickle": False, "storage_options": None}
    for settings in ({**shared, **keys}, {}):
        with pytest.raises(OpenedError):
            dos.diff(first, other, **settings)
    with pytest.raises(OpenedError):
        dos.read_state_dict("s3://bucket/x")
    assert calls[1:] == [
        (first, {**shared, "storage_options": {"key": "a"}}),
        (other, {**shared, "storage_options": {"key": "b"}}),
        (first, usual),
        (other, usual),
        ("s3://bucket/x", {**usual, "rename": (), "on_event": None, "trace": None}),
    ]


def test_bad_arguments_and_absent_checkpoints_are_typed(tmp_path):
    with pytest.raises(CheckpointNotFoundError):
        dos.open((tmp_path / "none").as_uri())
    with pytest.raises(ConfigError, match="verify"):
        dos.open("memory://b/x", verify="some")
