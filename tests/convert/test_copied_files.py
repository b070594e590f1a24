"""Files beside exported weights: from disk, from a store, and from a Trainer's checkpoint."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Any

import pytest
import torch

import dcp_objstore as dos
from dcp_objstore.config import MIB
from dcp_objstore.convert import copied_files
from dcp_objstore.errors import InputError, PreconditionFailedError
from dcp_objstore.stores import open_store
from dcp_objstore.stores.ranges import read_range
from tests.support.command_line import run_here

# What a folder of a model on the hub may hold besides weights.
SMALL = {
    "config.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "tokenizer.model": bytes(range(256)),
    "vocab.txt": b"",
}
LEFT_OUT = (
    *("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "tf_model.h5"),
    *("flax_model.msgpack", "model-q4.gguf", "model.onnx", "scheduler.pkl", "model.pth"),
    *(".gitattributes", "optimizer.pt", "trainer_state.json", "original/params.json"),
)


@pytest.fixture
def url(tmp_path: Path) -> str:
    place = (tmp_path / "run" / "step-7").as_uri()
    dos.save({"w": torch.ones(3)}, place, progress=False)
    return place


def exported(url: str, out: Path, *copied: str | os.PathLike[str], **settings: Any) -> set[str]:
    dos.export_checkpoint(url, out, "w", copied_files=copied, progress=False, **settings)
    found = {path.name: path.read_bytes() for path in out.iterdir()}
    assert {name: found[name] for name in SMALL if name in found} == {
        name: SMALL[name] for name in SMALL if name in found
    }
    return set(found) - {"model.safetensors"}


def test_files_come_from_a_path_a_folder_or_a_pattern(url, tmp_path):
    base = tmp_path / "base"
    for name in (*SMALL, *LEFT_OUT):
        (base / name).parent.mkdir(parents=True, exist_ok=True)
        (base / name).write_bytes(SMALL.get(name, b"no"))
    # As in the cache of the hub's library.
    (tmp_path / "blob").write_bytes(b"{}")
    (base / "config.json").unlink()
    (base / "config.json").symlink_to(tmp_path / "blob")
    (base / "odd[1].txt").write_bytes(b"x")
    assert exported(url, tmp_path / "1", base) == {*SMALL, "odd[1].txt"}
    assert exported(url, tmp_path / "2", f"{base}/*.json", f"{base}/voc*") == {
        "config.json",
        "vocab.txt",
    }
    root = f"memory://{secrets.token_hex(6)}"  # of a bucket
    open_store(root).put("config.json", b"{}")
    assert exported(url, tmp_path / "0", root) == {"config.json"}
    # A file that is named is copied, whatever it is.
    assert exported(url, tmp_path / "3", base / "pytorch_model.bin", base / "odd[1].txt") == {
        "pytorch_model.bin",
        "odd[1].txt",
    }
    for nothing in (base / "none.json", base / "*.bin", tmp_path / "empty", base / "*.none"):
        with pytest.raises(InputError, match="nothing to copy"):
            exported(url, tmp_path / "4", nothing)
    with pytest.raises(InputError, match=r"two files would be called config\.json"):
        exported(url, tmp_path / "4", base, base / "config.json")
    assert not (tmp_path / "4").exists()


def test_a_single_path_needs_no_list(url, tmp_path):
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_bytes(b"{}")
    for number, path in enumerate((tmp_path / "base", f"{tmp_path}/base/*.json")):
        dos.export_checkpoint(url, out := tmp_path / str(number), "w", copied_files=path)
        assert (out / "config.json").read_bytes() == b"{}"


def test_files_come_from_a_bucket_large_ones_in_pieces(url, bucket, tmp_path):
    for name in (*SMALL, *LEFT_OUT):
        bucket.put(f"base/{name}", SMALL.get(name, b"no"))
    options = {"out_storage_options": bucket.storage_options}
    large = os.urandom(9 * MIB + 1)
    bucket.put("large/tokenizer.json", large)
    dos.export_checkpoint(
        url,
        bucket.at("hf"),
        copied_files=[bucket.at("base"), bucket.at("large/*.json")],
        progress=False,
        **options,
    )
    assert set(bucket.keys("hf")) == {*SMALL, "tokenizer.json", "model.safetensors"}
    assert bucket.get("hf/tokenizer.json") == large
    assert bucket.get("hf/vocab.txt") == b""


@pytest.mark.parametrize("size_bytes", [10, 40 * MIB])
@pytest.mark.parametrize("when", ["before the first block", "after it"])
def test_a_file_that_is_replaced_while_it_is_copied_is_not_copied(
    url, tmp_path, monkeypatch, when, size_bytes
):
    """Its version was planned: another one of the same size is not copied either."""
    file, read = tmp_path / "tokenizer.json", read_range
    file.write_bytes(bytes(size_bytes))

    def replace() -> None:
        other = tmp_path / "other"
        other.write_bytes(bytes(size_bytes))
        other.replace(file)

    def replacing(store: Any, key: str, start: int, end: int) -> Any:
        is_first = start == 0
        if is_first and when == "before the first block":
            replace()
        found = read(store, key, start, end)
        if is_first and when == "after it":
            replace()
        return found

    monkeypatch.setattr(copied_files, "read_range", replacing)
    with pytest.raises(PreconditionFailedError):
        exported(url, tmp_path / "hf", file)
    assert not (tmp_path / "hf").exists()


def test_the_files_of_a_trainer_come_from_its_checkpoint(tmp_path):
    place = (tmp_path / "run").as_uri()
    files = {name: SMALL.get(name, b"no") for name in (*SMALL, *LEFT_OUT, "rng_state_0.pth")}
    state = {"w": torch.ones(3), "files": dos.PerRank(files), "other": {"files": 1}}
    dos.save(state, place, progress=False)
    assert exported(place, tmp_path / "1") == set(SMALL)
    # One that is named counts instead.
    mine = tmp_path / "chat_template.jinja"
    mine.write_bytes(SMALL[mine.name])
    assert exported(place, tmp_path / "2", mine) == set(SMALL)
    dos.export_checkpoint(place, tmp_path / "3" / "one.safetensors", "w", progress=False)
    assert [path.name for path in (tmp_path / "3").iterdir()] == ["one.safetensors"]


CONFIG = {"config.json": b"{}"}


@pytest.mark.parametrize(
    ("value", "copied"),
    [
        (dos.PerRank({"a": b""}), set()),
        (dos.PerRank({"config.json": "{}"}), set()),
        (dos.PerRank(Path("x")), set()),
        (dos.PerRank(3), set()),
        (dos.PerRank(slice(3)), set()),
        ([3], set()),
        (dos.PerRank({**CONFIG, 3: b"", "vocab.txt": ""}), {"config.json"}),
    ],
)
def test_values_of_that_name_that_are_no_files_are_left_alone(value, copied, tmp_path):
    place = (tmp_path / "run").as_uri()
    dos.save({"w": torch.ones(3), "files": value}, place, progress=False)
    assert exported(place, tmp_path / "hf") == copied


def test_the_command_copies_files(url, tmp_path):
    (tmp_path / "base").mkdir()
    for name, body in SMALL.items():
        (tmp_path / "base" / name).write_bytes(body)
    done = run_here(
        *("export", url, f"{tmp_path}/hf", "--files", f"{tmp_path}/base/*.json"),
        *("--files", f"{tmp_path}/base/vocab.txt"),
    )
    assert (done.returncode, done.stderr) == (0, "")
    found = {path.name for path in (tmp_path / "hf").iterdir()}
    assert found == {"config.json", "vocab.txt", "model.safetensors"}
