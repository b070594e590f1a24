"""Exports to one folder at the same time: what an index names is of one of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dcp_objstore as dos
from dcp_objstore.config import MIB
from dcp_objstore.convert import export
from dcp_objstore.errors import InputError, LostRaceError
from dcp_objstore.stores import open_store
from dcp_objstore.threads import spawn
from tests.support.campaign import cases
from tests.support.checkpoints import memory_url
from tests.support.ranks import run_ranks

INDEX = "model.safetensors.index.json"
# A shard for each of three tensors; one for two of them and one for the third; one file.
EACH, TWO, ONE = 400, 800, 10**9
SHARDS = [f"model-{number:05d}-of-00003.safetensors" for number in (1, 2, 3)]


def saved(url: str, number: float, **settings: Any) -> str:
    state = {f"w{key}": torch.full((10, 10), number) for key in range(3)}
    dos.save(state, url, progress=False, **settings)
    return url


@pytest.fixture
def mine(tmp_path: Path) -> str:
    return saved((tmp_path / "mine").as_uri(), 1.0)


@pytest.fixture
def other(tmp_path: Path) -> str:
    return saved((tmp_path / "other").as_uri(), 2.0)


def to(url: str, out: str, most: int = EACH, **settings: Any) -> None:
    dos.export_checkpoint(url, out, max_shard_size_bytes=most, progress=False, **settings)


def numbers_in(out: str) -> set[float]:
    """Of which checkpoints the exported weights are."""
    state = dos.read_state_dict(out, progress=False)
    assert len(state) == 3
    return {value for tensor in state.values() for value in tensor.flatten().tolist()}


def names_in(out: str) -> set[str]:
    return {meta.key for meta in open_store(out).list()}


WRITE = export._Export._write


def at_file(
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    call: Callable[[], object],
    *,
    is_written: bool = False,
) -> None:
    """Call something before the file of this number, from 1, is written, or after that."""
    names = list[str]()

    def write(self: Any, file: Any) -> Any:
        names.append(file.name)
        is_it = len(names) == number
        if is_it and not is_written:
            call()
        size_bytes = WRITE(self, file)
        if is_it and is_written:
            call()
        return size_bytes

    monkeypatch.setattr(export._Export, "_write", write)


def interrupt() -> None:
    raise KeyboardInterrupt


def new_folder(where: str, tmp_path: Path) -> str:
    return (tmp_path / "hf").as_uri() if where == "file" else memory_url()


@pytest.mark.parametrize("where", ["file", "memory"])
@pytest.mark.parametrize("most", [EACH, TWO, ONE])
@pytest.mark.parametrize("before", cases([1, 2, 3], default=[3]))
def test_an_export_that_ends_meanwhile_stays_whole_and_the_slower_one_fails(
    mine, other, tmp_path, monkeypatch, *, where, most, before
):
    out = new_folder(where, tmp_path)
    # In a bucket it replaces what the slower one has written so far.
    at_file(monkeypatch, before, lambda: to(other, out, most, overwrite=True))
    with pytest.raises(LostRaceError, match="another export"):
        to(mine, out)
    assert numbers_in(out) == {2.0}
    left = names_in(out)
    assert len(left) == {EACH: 4, TWO: 3, ONE: 1}[most]
    to(mine, out, overwrite=True)
    assert numbers_in(out) == {1.0}


@pytest.mark.parametrize("where", ["file", "memory"])
def test_of_two_that_replace_an_earlier_export_the_first_to_end_stays(
    mine, other, tmp_path, monkeypatch, where
):
    out = new_folder(where, tmp_path)
    to(other, out)
    at_file(monkeypatch, 2, lambda: to(other, out, overwrite=True))
    with pytest.raises(LostRaceError):
        to(mine, out, overwrite=True)
    assert numbers_in(out) == {2.0}
    assert len(names_in(out)) == 4


def test_an_export_that_began_among_the_shards_of_another_spoils_none_of_them(
    mine, other, monkeypatch
):
    out = memory_url()
    reached, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def export_slowly() -> None:
        with pytest.raises(LostRaceError, match="another export"):
            to(other, out, overwrite=True)
        ended.set()

    def wait_at_the_last(self: Any, file: Any) -> Any:
        if threading.current_thread() is not main and file.name == INDEX:
            reached.set()
            assert go_on.wait(120)
        elif threading.current_thread() is main and file.name == SHARDS[2]:
            spawn(export_slowly, "slow")
            assert reached.wait(120)
        return WRITE(self, file)

    main = threading.current_thread()
    monkeypatch.setattr(export._Export, "_write", wait_at_the_last)
    to(mine, out)
    assert numbers_in(out) == {1.0}
    go_on.set()
    assert ended.wait(120)
    assert numbers_in(out) == {1.0}
    assert names_in(out) == {*SHARDS, INDEX}


def test_shards_without_an_index_are_of_an_export_that_runs_or_died(mine):
    out = memory_url()
    open_store(out).put("model-00001-of-00002.safetensors", b"")
    with pytest.raises(InputError, match="overwrite"):
        to(mine, out)
    to(mine, out, overwrite=True)
    assert (len(names_in(out)), numbers_in(out)) == (4, {1.0})


@pytest.mark.backends("seaweed", "moto", "gcs", "azure")
def test_files_of_several_parts_are_known_to_be_the_exports_own(bucket):
    options = bucket.storage_options
    state = {"large": torch.ones(12 * MIB, dtype=torch.uint8), "small": torch.ones(1)}
    dos.save(state, bucket.at("step-1"), storage_options=options, progress=False)
    settings = {"config": dos.TransferConfig(part_size_bytes=5 * MIB), "storage_options": options}
    to(bucket.at("step-1"), bucket.at("hf"), 12 * MIB, **settings)
    assert len(bucket.keys("hf")) == 3


def lose_a_race(rank: int, world: int, url: str, out: str, options: Mapping[str, Any]) -> str:
    write = export._Export._write

    def then_another(self: Any, file: Any) -> Any:
        size_bytes = write(self, file)
        if rank == 1:
            open_store(out, options).put(SHARDS[1], b"of another export")
        return size_bytes

    export._Export._write = then_another  # type: ignore[method-assign]
    try:
        with pytest.raises(LostRaceError, match="another export") as caught:
            to(url, out, storage_options=options, process_group=dist.group.WORLD)
    finally:
        export._Export._write = write  # type: ignore[method-assign]
    return str(caught.value)


@pytest.mark.backends("seaweed", "moto", "gcs", "azure")
def test_all_ranks_lose_a_race_together(bucket):
    options = bucket.storage_options
    url = saved(bucket.at("step-1"), 1.0, storage_options=options)
    first, second = run_ranks(2, lose_a_race, url, bucket.at("hf"), options)
    assert first == second
    assert SHARDS[1] in first
    assert bucket.keys("hf") == [SHARDS[1]]
    assert bucket.get(f"hf/{SHARDS[1]}") == b"of another export"


@pytest.mark.parametrize("most", [EACH, ONE])
@pytest.mark.parametrize("where", ["file", "memory"])
def test_what_makes_an_export_count_is_written_last_and_what_was_there_goes_after_it(
    mine, tmp_path, requests, where, most
):
    out, last = new_folder(where, tmp_path), INDEX if most == EACH else "model.safetensors"
    (tmp_path / "zz.json").write_text("{}")
    for earlier in (EACH, ONE):
        to(mine, out, earlier, overwrite=True)
        requests.clear()
        to(mine, out, most, copied_files=tmp_path / "zz.json", overwrite=True)
        changed = [one for one in requests if one.verb in ("put", "put_stream", "delete")]
        keys = [one.key for one in changed if one.verb != "delete"]
        assert keys[-2:] == ["zz.json", last]
        assert all(one.verb == "delete" for one in changed[len(keys) :])
        assert names_in(out) == set(keys)


@pytest.mark.parametrize("most", [EACH, ONE])
@pytest.mark.parametrize("where", ["file", "memory"])
def test_an_overwrite_that_fails_leaves_the_earlier_export_as_it_was(
    mine, other, tmp_path, monkeypatch, *, where, most
):
    """Whichever file it fails at, before it is written and after."""
    out, config = new_folder(where, tmp_path), tmp_path / "config.json"
    config.write_text("earlier")
    to(other, out, TWO, copied_files=config)
    before = {name: open_store(out).get(name, max_size_bytes=MIB)[0] for name in names_in(out)}
    config.write_text("new")
    for number in range(1, 6 if most == EACH else 3):
        for is_written in (False, True):
            at_file(monkeypatch, number, interrupt, is_written=is_written)
            with pytest.raises(KeyboardInterrupt):
                to(mine, out, most, copied_files=config, overwrite=True)
            assert names_in(out) == set(before), (number, is_written)
            for name, body in before.items():
                assert open_store(out).get(name, max_size_bytes=MIB)[0] == body, (name, number)
    monkeypatch.setattr(export._Export, "_write", WRITE)
    to(mine, out, most, copied_files=config, overwrite=True)
    assert numbers_in(out) == {1.0}


def test_a_large_file_that_was_replaced_stays_if_the_export_fails(mine, other, monkeypatch):
    """It is too large to be kept in memory and put back, but the folder has one of the two."""
    monkeypatch.setattr(export, "_KEPT_MOST_BYTES", 0)
    out = memory_url()
    to(other, out, ONE)
    at_file(monkeypatch, 1, interrupt, is_written=True)
    with pytest.raises(KeyboardInterrupt):
        to(mine, out, ONE, overwrite=True)
    assert names_in(out) == {"model.safetensors"}
    assert numbers_in(out) == {1.0}
