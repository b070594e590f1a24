"""A source that is replaced while it is imported is not imported."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

import dcp_objstore as dos
from dcp_objstore.convert import copied_files
from dcp_objstore.convert.sources import TorchSource
from dcp_objstore.errors import CheckpointGoneError, LostRaceError, PreconditionFailedError
from dcp_objstore.stores import open_store
from tests.support.checkpoints import memory_url
from tests.support.replaced import (
    ONE_BY_ONE,
    model_of_two_files,
    replaced_at,
    safetensors_objects,
    state,
    stock_objects,
    write,
)


def torch_objects(folder: Path, value: float) -> dict[str, bytes]:
    torch.save(state(value), folder / "m.pt")
    return {"m.pt": (folder / "m.pt").read_bytes()}


def objects(kind: str, folder: Path, value: float) -> dict[str, bytes]:
    if kind == "pt":
        return torch_objects(folder, value)
    if kind == "stock":
        return stock_objects(folder / str(value), value)
    return safetensors_objects(value)


@pytest.mark.parametrize("nth", [0, 1])
@pytest.mark.parametrize("kind", ["safetensors", "pt", "stock"])
def test_a_source_that_is_replaced_is_not_imported(through, monkeypatch, tmp_path, kind, nth):
    monkeypatch.setattr(copied_files, "_PIECE_BYTES", 1024 * 1024)
    monkeypatch.setattr(copied_files, "_CONCURRENT_READS", 1)
    url, old, new = memory_url(), *(objects(kind, tmp_path, value) for value in (1.0, 2.0))
    write(url, old)
    replaced_at(through, "open_range", nth, lambda: write(url, new))
    source = url if kind == "stock" else f"{url}/{min(old)}"
    target = f"{url}/imported"
    with pytest.raises(LostRaceError):
        dos.import_checkpoint(source, target, config=ONE_BY_ONE, progress=False)
    assert [meta.key for meta in open_store(target).list()] == []


def test_files_of_one_model_are_imported_in_one_state(through):
    """The last one is replaced before any of it is read."""
    url, old, new = memory_url(), *(model_of_two_files(value) for value in (1.0, 2.0))
    write(url, old)
    last = {name: new[name] for name in ["2.safetensors"]}
    replaced_at(through, "open_range", 0, lambda: write(url, last))
    with pytest.raises(CheckpointGoneError, match="replaced"):
        dos.import_checkpoint(url, f"{url}/imported", progress=False)


@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize("in_place", [False, True])
def test_a_torch_file_that_is_rewritten_while_it_is_mapped_is_not_imported(
    monkeypatch, tmp_path, nth, in_place
):
    """Renamed over it, the old file would still be read, but which one is meant is not known."""
    torch_objects(tmp_path, 1.0)
    (new := tmp_path / "new").mkdir()
    torch_objects(new, 2.0)
    source, read, reads = tmp_path / "m.pt", TorchSource.read, itertools.count(1)

    def read_and_rewrite(self: TorchSource, slabs: list[object]) -> list[torch.Tensor]:
        if next(reads) == nth:
            if in_place:
                with source.open("r+b") as file:
                    file.write((new / "m.pt").read_bytes())
            else:
                (new / "m.pt").replace(source)
        return read(self, slabs)  # type: ignore[arg-type]

    monkeypatch.setattr(TorchSource, "read", read_and_rewrite)
    monkeypatch.setattr("dcp_objstore.inspect.slabs.WINDOW_BYTES", 2 * 1024 * 1024)
    with pytest.raises(PreconditionFailedError, match="replaced"):
        dos.import_checkpoint(source, (tmp_path / "to").as_uri(), progress=False)
    assert not (tmp_path / "to" / "_COMMIT").exists()
