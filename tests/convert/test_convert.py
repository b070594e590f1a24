"""Checkpoints to files and back: the same tensors and values, whole files or none."""

from __future__ import annotations

import errno
import json
import pickle
import secrets
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import dcp_objstore as dos
from dcp_objstore.compat.archive import ArchiveError
from dcp_objstore.convert import copied_files
from dcp_objstore.convert.files import torch_file
from dcp_objstore.convert.sources import TensorInfo
from dcp_objstore.errors import (
    CheckpointCorruptError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    ConfigError,
    InputError,
    ObjectNotFoundError,
    RetryableError,
    StateMismatchError,
    UnsupportedError,
    UntrustedPickleError,
)
from dcp_objstore.inspect import slabs
from dcp_objstore.inspect.fill import new_tensors
from dcp_objstore.observe.events import Failed, Planned
from dcp_objstore.stores import open_store
from tests.support import hostile, hostile_cases
from tests.support.checkpoints import memory_url
from tests.support.command_line import run_here
from tests.support.listening import Heard, of
from tests.support.ranks import run_ranks
from tests.support.states import same_bits, seeded

STRIP = [(r"^model\.", "")]


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that small tensors are cut, too."""
    monkeypatch.setattr(slabs, "WINDOW_BYTES", 4096)


def training_state() -> dict[str, Any]:
    return {
        "model": {
            "embed": {"weight": seeded("embed", (300, 40))},
            "head": [seeded("head0", (4,)), torch.arange(7, dtype=torch.int16)],
            "half": seeded("half", (5, 3)).bfloat16(),
        },
        "optim": {"lr": 0.25, "betas": (0.9, 0.95), "step": torch.tensor(3.0)},
        "none": torch.zeros(0, 4),
        "step": 7,
    }


@pytest.fixture
def url(tmp_path: Path) -> str:
    place = (tmp_path / "run" / "step-7").as_uri()
    dos.save(training_state(), place, progress=False)
    return place


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, list | tuple):
        for left, right in zip(one, other, strict=True):
            assert_same(left, right)
    elif isinstance(one, torch.Tensor):
        assert same_bits(one, other)
    else:
        assert one == other


def save_sharded(rank: int, world: int, url: str, options: Mapping[str, object]) -> None:
    mesh = init_device_mesh("cpu", (world,))
    rows = distribute_tensor(seeded("rows", (301, 20)), mesh, [Shard(0)])
    columns = distribute_tensor(seeded("columns", (200, 31)), mesh, [Shard(1)])
    dos.save(
        {"rows": rows, "columns": columns, "step": 3}, url, storage_options=options, progress=False
    )


def test_a_torch_file_is_what_stock_torch_makes_of_the_checkpoint(url, tmp_path):
    ours, stock = tmp_path / "ours.pt", tmp_path / "stock.pt"
    report = dos.export_checkpoint(url, ours)
    dcp_to_torch_save(url.removeprefix("file://"), stock)
    found = torch.load(ours, weights_only=True)
    assert_same(found, torch.load(stock, weights_only=True))
    assert_same(found, training_state())
    assert_same(torch.load(ours, mmap=True), training_state())
    assert report.files == (str(ours),)
    assert report.total_bytes == ours.stat().st_size
    assert (report.tensors, report.left_out) == (6, ())


def test_tensors_inside_a_value_are_in_the_file(tmp_path):
    place, out = (tmp_path / "step").as_uri(), tmp_path / "out.pt"
    state = {"w": torch.ones(3), "pair": (torch.arange(4), {"deep": torch.zeros(2)}), "v": 1}
    dos.save(state, place, progress=False)
    dos.export_checkpoint(place, out)
    assert_same(torch.load(out, weights_only=True), state)


def test_shards_of_safetensors_hold_the_model_under_its_own_names(url, tmp_path):
    out, config = tmp_path / "hf", tmp_path / "config.json"
    config.write_text("{}")
    report = dos.export_checkpoint(
        url,
        out,
        "model.*",
        rename=STRIP,
        max_shard_size_bytes=24_000,
        copied_files=[config],
        dtype=torch.bfloat16,
        on_event=(heard := Heard()),
    )
    (plan,) = of(Planned, heard)
    assert (plan.url, plan.operation, plan.size_bytes) == (
        out.as_uri(),
        "export",
        report.total_bytes,
    )
    assert (plan.items, plan.objects, plan.requests) == (4, 4, 4)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert sorted(path.name for path in out.iterdir()) == sorted(
        ["config.json", "model.safetensors.index.json", *shards]
    )
    assert report.files == tuple(
        str(out / name) for name in ("config.json", *shards, "model.safetensors.index.json")
    )
    found = {key: load_file(out / name)[key] for key, name in index["weight_map"].items()}
    saved = training_state()["model"]
    assert_same(
        found,
        {
            "embed.weight": saved["embed"]["weight"].bfloat16(),
            "half": saved["half"],
            "head.0": saved["head"][0].bfloat16(),
            "head.1": saved["head"][1],
        },
    )
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())
    assert (out / "model.safetensors.index.json").read_text() == json.dumps(index, indent=2)


def test_one_safetensors_file_leaves_values_out_and_names_them(url, tmp_path):
    report = dos.export_checkpoint(url, tmp_path / "all.safetensors")
    assert report.left_out == ("optim.lr", "optim.betas", "step")
    found = load_file(tmp_path / "all.safetensors")
    assert found["none"].shape == (0, 4)
    assert torch.equal(found["optim.step"], torch.tensor(3.0))
    save_file(found, tmp_path / "theirs.safetensors", metadata={"format": "pt"})
    theirs = (tmp_path / "theirs.safetensors").read_bytes()
    assert (tmp_path / "all.safetensors").read_bytes() == theirs


def test_float4_goes_into_safetensors_and_comes_out_of_it(tmp_path):
    shapes = {"matrix": (4, 8), "odd": (3,), "none": (0, 5)}
    state = {key: seeded(key, shape, torch.float4_e2m1fn_x2) for key, shape in shapes.items()}
    place = (tmp_path / "step").as_uri()
    dos.save(state, place, progress=False)
    dos.export_checkpoint(place, tmp_path / "ours" / "model.safetensors")
    assert_same(load_file(tmp_path / "ours" / "model.safetensors"), state)
    save_file(state, tmp_path / "theirs.safetensors")
    for file in (tmp_path / "ours" / "model.safetensors", tmp_path / "theirs.safetensors"):
        assert_same(dos.read_state_dict(file.as_uri(), progress=False), state)
    dos.save({"scalar": state["odd"][0], **state}, place, progress=False, overwrite=True)
    with pytest.raises(UnsupportedError, match="float4") as caught:
        dos.export_checkpoint(place, tmp_path / "scalar.safetensors")
    assert caught.value.key == "scalar"


@pytest.mark.backends("seaweed", "gcs")
def test_sharded_tensors_come_whole_out_of_a_bucket_and_into_another(bucket, tmp_path, monkeypatch):
    options = bucket.storage_options
    run_ranks(3, save_sharded, bucket.at("step-1"), options)
    state = {"rows": seeded("rows", (301, 20)), "columns": seeded("columns", (200, 31))}
    dos.export_checkpoint(bucket.at("step-1"), bucket.at("hf"), storage_options=options)
    dos.export_checkpoint(bucket.at("step-1"), bucket.at("files/out.pt"), storage_options=options)
    (tmp_path / "out.pt").write_bytes(bucket.get("files/out.pt"))
    assert_same(torch.load(tmp_path / "out.pt"), {**state, "step": 3})
    (tmp_path / "model.safetensors").write_bytes(bucket.get("hf/model.safetensors"))
    assert_same(load_file(tmp_path / "model.safetensors"), state)
    # The file is downloaded in several pieces.
    monkeypatch.setattr(copied_files, "_PIECE_BYTES", 10_000)
    for number, source in enumerate(("hf", "hf/model.safetensors", "files/out.pt", "step-1")):
        again = bucket.at(f"again-{number}")
        dos.import_checkpoint(bucket.at(source), again, storage_options=options, progress=False)
        ckpt = dos.open(again, storage_options=options)
        assert ckpt.verify(deep=True, progress=False).ok
        assert_same({key: ckpt[key].read() for key in state}, state)
    assert ckpt["step"].read() == 3
    assert bucket.keys("hf") == ["model.safetensors"]


@pytest.mark.parametrize("way", ["torch", "stock", "ours"])
def test_imports_are_what_was_saved(url, tmp_path, way):
    source: Any = url
    if way == "torch":
        source = tmp_path / "state.pt"
        torch.save(training_state(), source)
    if way == "stock":
        torch.save(training_state(), tmp_path / "state.pt")
        source = tmp_path / "stock"
        torch_save_to_dcp(tmp_path / "state.pt", source)
    report = dos.import_checkpoint(
        source, (tmp_path / "new").as_uri(), user_metadata={"from": way}, progress=False
    )
    assert_same(dos.read_state_dict(report.url), training_state())
    ckpt = dos.open(report.url)
    assert ckpt.verify(deep=True, progress=False).ok
    assert ckpt.user_metadata == {"from": way}


def test_a_model_of_the_hub_loads_into_a_state_under_a_prefix(tmp_path):
    hub = tmp_path / "hub"
    hub.mkdir()
    first, second = {"a.weight": torch.ones(40, 50)}, {"b": torch.arange(3)}
    save_file(first, hub / "model-00001-of-00002.safetensors")
    save_file(second, hub / "model-00002-of-00002.safetensors")
    save_file({"stray": torch.ones(1)}, hub / "consolidated.safetensors")
    place = (tmp_path / "step-0").as_uri()
    with pytest.raises(InputError, match="no single index"):
        dos.import_checkpoint(hub, place)
    names = {
        "a.weight": "model-00001-of-00002.safetensors",
        "b": "model-00002-of-00002.safetensors",
    }
    (hub / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    dos.import_checkpoint(hub, place, rename=[("^", "model.")], progress=False)
    state: dict[str, Any] = {
        "model": {"a.weight": torch.zeros(40, 50), "b": torch.zeros(3, dtype=torch.int64)}
    }
    dos.load(state, place, progress=False)
    assert_same(state["model"], {**first, **second})


def test_of_two_files_that_have_a_tensor_the_index_chooses(tmp_path):
    hub, place = tmp_path / "hub", (tmp_path / "step-0").as_uri()
    hub.mkdir()
    save_file({"w": torch.ones(2)}, hub / "1.safetensors")
    save_file({"w": torch.zeros(2), "v": torch.arange(3)}, hub / "2.safetensors")
    weight_map = {"v": "2.safetensors", "w": "1.safetensors"}
    (hub / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    dos.import_checkpoint(hub, place, progress=False)
    assert_same(dos.read_state_dict(place), {"w": torch.ones(2), "v": torch.arange(3)})


def test_a_torch_file_that_is_no_zip_is_refused(tmp_path):
    source, place = tmp_path / "old.pt", (tmp_path / "step-0").as_uri()
    torch.save(training_state(), source, _use_new_zipfile_serialization=False)
    for trust_pickle in (False, True):
        with pytest.raises(CheckpointCorruptError, match="zip"):
            dos.import_checkpoint(source, place, trust_pickle=trust_pickle)
    source.write_bytes(b"<html>" * 100)
    with pytest.raises(CheckpointCorruptError, match="zip"):
        dos.import_checkpoint(source, place)
    assert not (tmp_path / "step-0").exists()


def repacked(source: Path) -> None:
    """Pack a file's records again, as `zip` does."""
    with zipfile.ZipFile(source) as file:
        records = {name: file.read(name) for name in file.namelist()}
    with zipfile.ZipFile(source, "w", zipfile.ZIP_DEFLATED) as file:
        for name, body in records.items():
            file.writestr(name, body)


def test_a_torch_file_of_packed_records_is_imported_right(tmp_path):
    source, place = tmp_path / "packed.pt", (tmp_path / "step-0").as_uri()
    # Noise does not get smaller: as large a record as the tensor, and other bytes.
    state = {**training_state(), "noise": torch.randn(1000), "zeros": torch.zeros(1000)}
    torch.save(state, source)
    repacked(source)
    dos.import_checkpoint(source, place, progress=False)
    assert_same(dos.read_state_dict(place), state)


PACKED = hostile.archive(b"\x80\x02K\7.", {"data/0": b"x" * 99}, packed=True)


@pytest.mark.parametrize(
    "body",
    [
        hostile.v2(hostile.called("builtins.bytearray", hostile.long_number(2**33))),
        hostile.claims(PACKED, b"archive/data/0", 3 << 30),
    ],
    ids=["bytearray(2**33)", "a record says 3 GiB"],
)
def test_a_torch_file_that_asks_for_what_no_save_needs_is_refused(body, tmp_path):
    source, place = tmp_path / "hostile.pt", tmp_path / "step-0"
    source.write_bytes(body)
    with pytest.raises((CheckpointCorruptError, UntrustedPickleError)):
        dos.import_checkpoint(source, place.as_uri(), progress=False)
    assert not place.exists()


def test_values_that_are_dicts_are_imported_as_they_are(tmp_path):
    state = {"w": torch.ones(2), "meta": {"a": 1, "t": torch.zeros(2)}, "list": [1, {"a": 2}]}
    whole = DefaultSavePlanner(flatten_state_dict=False)
    dcp.save(state, checkpoint_id=tmp_path / "stock", planner=whole)
    place = (tmp_path / "step-0").as_uri()
    dos.import_checkpoint(tmp_path / "stock", place, progress=False)
    assert_same(dos.read_state_dict(place), state)


def test_a_value_too_deep_for_pickle_is_refused(tmp_path):
    for key, body in hostile.CASES["our value is odd: lists, 200,000 deep"].build().items():
        (tmp_path / key).write_bytes(body)
    with pytest.raises(UnsupportedError, match="deep"):
        dos.export_checkpoint(tmp_path.as_uri(), tmp_path / "out.pt")
    assert not (tmp_path / "out.pt").exists()


def test_a_torch_file_is_planned_for_a_tensor_larger_than_the_memory():
    info = TensorInfo((2**38,), torch.float32)  # 1 TiB
    planned = torch_file("w.pt", {"w": info, "b": TensorInfo((3,), torch.float32)}, dict)
    assert planned.keys == ["w", "b"]
    for power in (45, 62):
        with pytest.raises(UnsupportedError, match="no addresses for its"):
            torch_file("w.pt", {"w": TensorInfo((2**power,), torch.float32)}, dict)


@pytest.mark.parametrize("by_file", [False, True])
def test_keys_of_dicts_that_are_no_text_come_back_from_a_checkpoint_and_a_file(tmp_path, by_file):
    layer = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    keys = {7: [{8: torch.ones(1)}, 9], (1, 2): torch.zeros(1), None: 2, False: torch.ones(1)}
    state = {"optimizer": optimizer.state_dict(), "keys": {**keys, "5": torch.ones(1)}}
    url, again = (tmp_path / "saved").as_uri(), (tmp_path / "again").as_uri()
    if by_file:
        torch.save(state, tmp_path / "in.pt")
        dos.import_checkpoint(tmp_path / "in.pt", url, progress=False)
    else:
        dos.save(state, url, progress=False)
    dos.export_checkpoint(url, tmp_path / "out.pt", progress=False)
    dos.import_checkpoint(url, again, rename=[("^no", "")], progress=False)
    file = torch.load(tmp_path / "out.pt", weights_only=False)
    for found in (dos.read_state_dict(url), file, dos.read_state_dict(again)):
        assert {*found["keys"]} == {*state["keys"]}
        torch.testing.assert_close(found["keys"][7], [{8: torch.ones(1)}, 9])
        other = torch.optim.AdamW(layer.parameters())
        other.load_state_dict(found["optimizer"])
        torch.testing.assert_close(other.state_dict(), state["optimizer"])


def test_two_keys_of_a_torch_file_with_one_name_are_refused(tmp_path):
    torch.save({1: torch.ones(1), "1": torch.ones(2)}, tmp_path / "clash.pt")
    with pytest.raises(StateMismatchError, match="same name"):
        dos.import_checkpoint(tmp_path / "clash.pt", (tmp_path / "new").as_uri())


def test_an_empty_key_is_kept(tmp_path):
    save_file({"": torch.ones(2)}, tmp_path / "m.safetensors")
    place = (tmp_path / "new").as_uri()
    dos.import_checkpoint(tmp_path / "m.safetensors", place, progress=False)
    dos.export_checkpoint(place, tmp_path / "out.safetensors")
    assert_same(load_file(tmp_path / "out.safetensors"), {"": torch.ones(2)})


def test_small_tensors_of_a_window_share_memory_that_is_freed_whole():
    wanted = [((3,), torch.int8), ((), torch.float64), ((0, 2), torch.bool), ((2, 2), torch.half)]
    made = new_tensors(wanted)
    assert [(tuple(one.shape), one.dtype) for one in made] == wanted
    assert len({one.untyped_storage().data_ptr() for one in made}) == 1
    for number, one in enumerate(made):
        one.fill_(number)
    assert [one.double().sum().item() for one in made] == [0, 1, 0, 12]


def test_copied_files_come_along_and_never_replace_the_weights(url, tmp_path):
    out, hidden = tmp_path / "hf", tmp_path / ".gitattributes"
    hidden.write_text("x")
    dos.export_checkpoint(url, out, copied_files=[hidden])
    assert sorted(path.name for path in out.iterdir()) == [".gitattributes", "model.safetensors"]
    (tmp_path / "model.safetensors").write_text("x")
    with pytest.raises(InputError, match=r"model\.safetensors"):
        dos.export_checkpoint(url, f"{out}2", copied_files=[tmp_path / "model.safetensors"])
    with pytest.raises(InputError, match="copied"):
        dos.export_checkpoint(url, f"{out}2", copied_files=[tmp_path / "none.json"])


def test_relative_paths_may_lead_up(url, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    report = dos.export_checkpoint(url, "../out/model.pt")
    assert report.files == (str(tmp_path / "out" / "model.pt"),)
    dos.import_checkpoint("../out/model.pt", (tmp_path / "new").as_uri(), progress=False)


def test_keys_and_rules_that_do_not_fit_are_refused_before_anything_is_written(url, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(StateMismatchError, match="matches"):
        dos.export_checkpoint(url, out, "modl.*")
    with pytest.raises(StateMismatchError, match="both become"):
        dos.export_checkpoint(url, out, "model.head.*", rename=[(r"\d", "n")])
    with pytest.raises(ConfigError, match="regular expression"):
        dos.export_checkpoint(url, out, rename=[("(", "")])
    for call, place in ((dos.export_checkpoint, out), (dos.import_checkpoint, f"{url}-new")):
        with pytest.raises(ConfigError, match="pairs"):
            call(url, place, rename=("ab", "cd"))
    with pytest.raises(UnsupportedError, match="complex128"):
        dos.save({"z": torch.zeros(2, dtype=torch.complex128)}, f"{url}-z", progress=False)
        dos.export_checkpoint(f"{url}-z", out)
    with pytest.raises(UnsupportedError, match="__metadata__"):
        dos.export_checkpoint(url, out, "model.half", rename=[(".*half", "__metadata__")])
    with pytest.raises(ConfigError, match="float"):
        dos.export_checkpoint(url, out, "model.*", dtype=torch.int8)
    with pytest.raises(ConfigError, match="verify"):
        dos.export_checkpoint(url, out, verify=1)
    for size in ("5GB", 0, -1):
        with pytest.raises(ConfigError, match="max_shard_size_bytes must be"):
            dos.export_checkpoint(url, out, max_shard_size_bytes=size)
    with pytest.raises(CheckpointNotFoundError, match="safetensors"):
        dos.import_checkpoint(tmp_path, f"{url}-new")
    with pytest.raises(ObjectNotFoundError):
        dos.import_checkpoint(tmp_path / "none.pt", f"{url}-new")
    assert not out.exists()
    assert not (tmp_path / "run" / "step-7-new").exists()


def test_nothing_is_neither_imported_nor_exported(url, tmp_path):
    """A model that is there already is not replaced by an empty one."""
    dos.save({"step": 3, "w": torch.ones(2)}, place := f"{url}-few", progress=False)
    for out in (tmp_path / "out", tmp_path / "out" / "model.safetensors"):
        dos.export_checkpoint(place, out, overwrite=True, progress=False)
        for keys in ("step", []):
            with pytest.raises(InputError, match="nothing to export"):
                dos.export_checkpoint(place, out, keys, overwrite=True)
        assert load_file(tmp_path / "out" / "model.safetensors")["w"].tolist() == [1.0, 1.0]
    dos.export_checkpoint(place, tmp_path / "out.pt", "step", progress=False)
    with pytest.raises(InputError, match="nothing to export"):
        dos.export_checkpoint(place, tmp_path / "none.pt", [])
    torch.save({}, tmp_path / "empty.pt")
    for source, keys in ((tmp_path / "empty.pt", None), (tmp_path / "out.pt", [])):
        with pytest.raises(InputError, match="no key to import"):
            dos.import_checkpoint(source, place, keys, overwrite=True)
    assert set(dos.open(place)) == {"step", "w"}


def test_keys_may_come_from_an_iterator_and_rules_may_not(tmp_path):
    save_file({name: torch.ones(2) for name in "ab"}, tmp_path / "model.safetensors")
    place = (tmp_path / "new").as_uri()
    dos.import_checkpoint(tmp_path, place, (key for key in ["a"]), progress=False)
    assert list(dos.open(place)) == ["a"]
    rules = iter([("a", "b")])
    with pytest.raises(ConfigError, match="iterator"):
        dos.load({"b": torch.zeros(2)}, place, rename=rules)


def test_files_and_checkpoints_that_exist_stay_unless_told(url, tmp_path):
    out = tmp_path / "out.pt"
    out.write_bytes(b"mine")
    with pytest.raises(InputError, match="overwrite"):
        dos.export_checkpoint(url, out)
    assert out.read_bytes() == b"mine"
    dos.export_checkpoint(url, out, overwrite=True)
    with pytest.raises(CheckpointExistsError):
        dos.import_checkpoint(out, url)
    dos.import_checkpoint(out, url, "model.*", overwrite=True, progress=False)
    assert set(dos.open(url)) == {key for key in dos.open(url) if key.startswith("model.")}


def test_damage_ends_an_export_and_leaves_no_file(bucket, tmp_path):
    place, options = bucket.at("step-1"), bucket.storage_options
    dos.save(training_state(), place, storage_options=options, progress=False)
    (data,) = (key for key in bucket.keys("step-1") if key.endswith(".distcp"))
    data = f"step-1/{data}"
    bucket.flip_byte(data, len(bucket.get(data)) // 2)
    heard = Heard()
    with pytest.raises(CheckpointCorruptError, match=r"embed\.weight"):
        dos.export_checkpoint(place, tmp_path / "out.pt", storage_options=options, on_event=heard)
    assert [event.key for event in of(Failed, heard)] == ["model.embed.weight"]
    with pytest.raises(CheckpointCorruptError, match=r"embed\.weight"):
        dos.export_checkpoint(
            place, bucket.at("hf"), max_shard_size_bytes=20, storage_options=options
        )
    assert list(tmp_path.iterdir()) == []
    assert bucket.keys("hf") == []
    assert bucket.uploads() == []
    dos.export_checkpoint(place, tmp_path / "out.pt", storage_options=options, verify=False)
    found, saved = torch.load(tmp_path / "out.pt"), training_state()
    assert not same_bits(found["model"]["embed"]["weight"], saved["model"]["embed"]["weight"])
    assert_same(found["optim"], saved["optim"])


def test_a_value_that_may_run_code_is_exported_only_if_it_is_trusted(tmp_path):
    place, out = memory_url(), tmp_path / "out.pt"
    dos.save({"w": torch.ones(2), "kind": pickle.Pickler}, place, progress=False)
    with pytest.raises(UntrustedPickleError):
        dos.export_checkpoint(place, out)
    dos.export_checkpoint(place, out, trust_pickle=True)
    assert torch.load(out, weights_only=False)["kind"] is pickle.Pickler


def test_a_folder_never_holds_one_file_and_shards_of_another_export(url, tmp_path):
    out = tmp_path / "hf"
    dos.export_checkpoint(url, out, max_shard_size_bytes=24_000)
    with pytest.raises(InputError, match="exists"):
        dos.export_checkpoint(url, out)
    dos.export_checkpoint(url, out, overwrite=True)
    assert (out / "model.safetensors").exists()
    assert not (out / "model.safetensors.index.json").exists()


@pytest.mark.parametrize("where", ["file", "memory"])
def test_what_overwrites_an_export_leaves_none_of_its_shards(url, tmp_path, where):
    out = (tmp_path / "hf").as_uri() if where == "file" else memory_url()
    store = open_store(out)
    for name in (theirs := {"model-base.safetensors", "old/model-00001-of-00002.safetensors"}):
        store.put(name, b"")
    for size_bytes in (24_000, 1, 24_000, 10**9):  # a server may read all that is there
        report = dos.export_checkpoint(url, out, max_shard_size_bytes=size_bytes, overwrite=True)
        written = {file.rpartition("/")[2] for file in report.files}
        assert {meta.key for meta in store.list()} - theirs == written


@pytest.mark.parametrize("most", [12_000, 10**9])
def test_a_folder_may_be_exported_onto_itself(url, tmp_path, most):
    for out in (memory_url(), (tmp_path / "hf").as_uri()):
        for earlier in (24_000, 10**9):
            dos.export_checkpoint(url, out, max_shard_size_bytes=earlier, overwrite=True)
            before = dos.read_state_dict(out)
            dos.export_checkpoint(out, out, max_shard_size_bytes=most, overwrite=True)
            after = dos.read_state_dict(out)
            assert all(same_bits(after[key], tensor) for key, tensor in before.items())
        dos.export_checkpoint(out, f"{out}/all.pt", overwrite=True)


def test_a_failed_export_leaves_no_new_folder_and_those_that_were_there(url, tmp_path):
    (data,) = (tmp_path / "run" / "step-7").glob("__0_0*")
    data.write_bytes(data.read_bytes()[:100])
    (tmp_path / "there").mkdir()
    for name in ("new/deep/hf", "new/m.pt", "there/deeper/hf", "there/m.pt"):
        with pytest.raises(CheckpointCorruptError):
            dos.export_checkpoint(url, tmp_path / name, progress=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "there"]
    assert list((tmp_path / "there").iterdir()) == []


@pytest.mark.parametrize("trust_pickle", [False, True])
@pytest.mark.parametrize("name", hostile_cases.BROKEN)
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_damaged_torch_file_is_called_so_trusted_or_not(name, trust_pickle, tmp_path):
    source, place = tmp_path / "state.pt", tmp_path / "step-0"
    body = hostile_cases.BROKEN[name]
    source.write_bytes(body() if callable(body) else body)
    is_unclear = name == "STOP alone" and not trust_pickle  # torch says no more than "refused"
    error = UntrustedPickleError if is_unclear else CheckpointCorruptError
    with pytest.raises(error, match=r"state\.pt is not \S+ \S+"):
        dos.import_checkpoint(source, place.as_uri(), progress=False, trust_pickle=trust_pickle)
    assert not place.exists()


def test_a_hostile_pickle_is_refused_and_a_failed_import_leaves_nothing(bucket, tmp_path):
    place, options = bucket.at("step-1"), bucket.storage_options
    source = tmp_path / "state.pt"
    torch.save({"w": torch.ones(2), "path": pickle.Pickler}, source)
    with pytest.raises(UntrustedPickleError, match="trust_pickle"):
        dos.import_checkpoint(source, place, storage_options=options)
    torch.save([torch.ones(2)], source)
    with pytest.raises(InputError, match="list"):
        dos.import_checkpoint(source, place, storage_options=options)
    torch.save({"w": torch.ones(2000)}, source)
    source.write_bytes(source.read_bytes()[:-300])
    with pytest.raises(CheckpointCorruptError):
        dos.import_checkpoint(source, place, storage_options=options)
    save_file({"a": torch.ones(4000), "b": torch.ones(5)}, tmp_path / "m.safetensors")
    whole = (tmp_path / "m.safetensors").read_bytes()
    bucket.put("m.safetensors", whole[:-1])
    with pytest.raises(CheckpointCorruptError, match="not a whole"):
        dos.import_checkpoint(bucket.at("m.safetensors"), place, storage_options=options)
    assert bucket.keys() == ["m.safetensors"]
    assert bucket.uploads() == []


def test_a_full_disk_ends_an_import_that_downloads_and_says_so(tmp_path, monkeypatch):
    url = f"memory://{secrets.token_hex(6)}"
    torch.save({"w": torch.ones(2000)}, tmp_path / "state.pt")
    open_store(url).put("state.pt", (tmp_path / "state.pt").read_bytes())
    opened = Path.open

    def open_full(path: Path, mode: str = "r", **how: Any) -> Any:
        if path.name == "state.pt" and mode == "wb":
            return opened(Path("/dev/full"), mode, **how)
        return opened(path, mode, **how)

    monkeypatch.setattr(Path, "open", open_full)
    with pytest.raises(InputError, match=r"full.*No space left") as caught:
        dos.import_checkpoint(f"{url}/state.pt", f"{url}/step-1", progress=False)
    assert not isinstance(caught.value, RetryableError)
    assert [meta.key for meta in open_store(f"{url}/step-1").list()] == []


@pytest.mark.parametrize(
    ("raised", "says", "error", "trusted"),
    [
        (OSError(errno.EIO, "disk"), "cannot be read: disk$", InputError, InputError),
        (OSError(errno.EINVAL, "no"), r"file: \[Errno 22\] no$", *(2 * [CheckpointCorruptError])),
        (MemoryError("large"), "^large$", MemoryError, MemoryError),
        *(
            (kind("one\ntwo"), "torch.save file: one$", *(2 * [CheckpointCorruptError]))
            for kind in (RuntimeError, ValueError, ArchiveError)
        ),
        (EOFError(), r"file: EOFError\(\)$", CheckpointCorruptError, CheckpointCorruptError),
        (
            pickle.UnpicklingError("odd\nx"),
            "odd[^x]*$",
            UntrustedPickleError,
            CheckpointCorruptError,
        ),
        (KeyError(3), r"KeyError\(3\)$|^3$", CheckpointCorruptError, KeyError),
        (TypeError("of code"), "of code$", CheckpointCorruptError, TypeError),
    ],
)
def test_what_is_raised_for_a_torch_file_says_what_is_wrong_with_it(
    tmp_path, monkeypatch, raised, says, error, trusted
):
    """Code that a trusted file runs may raise anything, which is passed on as it is."""

    def fail(*_: object, **__: object) -> None:
        raise raised

    torch.save({"w": torch.ones(1)}, tmp_path / "state.pt")
    monkeypatch.setattr("dcp_objstore.convert.import_checkpoint.unpickled", fail)
    for trust_pickle, kind in ((False, error), (True, trusted)):
        with pytest.raises(kind, match=says) as caught:
            dos.import_checkpoint(tmp_path / "state.pt", memory_url(), trust_pickle=trust_pickle)
        assert type(caught.value) is kind


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b"{",
        b'{"a": 3}',
        b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}',
        b'{"a": {"dtype": "F32", "shape": [9], "data_offsets": [0, 36]}}',
        b'{"a": {"dtype": "F32", "shape": [true], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},'
        b' "b": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},'
        b' "b": {"dtype": "F32", "shape": [0, 4611686018427387904, 9], "data_offsets": [8, 8]}}',
        b'{"a": {"dtype": "F32", "shape": [%s 0], "data_offsets": [0, 0]}}' % (b"9," * 9_000),
        b"[" * 100_000,
    ],
)
def test_a_header_that_lies_is_refused(header, tmp_path):
    file = tmp_path / "m.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(CheckpointCorruptError, match="not a whole"):
        dos.import_checkpoint(file, (tmp_path / "new").as_uri())
    file.write_bytes((2**63).to_bytes(8, "little") + header)
    with pytest.raises(CheckpointCorruptError, match="header"):
        dos.import_checkpoint(file, (tmp_path / "new").as_uri())
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--rename", "model"), "PATTERN=REPLACEMENT"),
        (("--dtype", "float17"), "bfloat16"),
        (("--max-shard-size", "big"), "5GB"),
    ],
)
def test_a_wrong_option_of_an_export_is_named_with_what_to_write(url, tmp_path, words, said):
    done = run_here("export", url, f"{tmp_path}/out", *words)
    assert done.returncode == 2
    assert said in done.stderr
    assert not (tmp_path / "out").exists()
