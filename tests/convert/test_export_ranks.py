"""Exports by all ranks: the files of one process, or on every rank an error and nothing whole."""

from __future__ import annotations

import itertools
import json
import os
import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load, load_file

import dcp_objstore as dos
from dcp_objstore.convert import export_folder, files
from dcp_objstore.convert.files import PlannedFile, shards, share_out
from dcp_objstore.convert.sources import TensorInfo
from dcp_objstore.errors import CheckpointCorruptError, ConfigError, InputError, RankFailedError
from dcp_objstore.transfer.upload import upload_object
from tests.support.campaign import cases
from tests.support.launcher import say
from tests.support.ranks import run_ranks, start_workers, try_ranks, wait_for
from tests.support.states import same_bits, seeded

RANKS = 4
INDEX = "model.safetensors.index.json"
# A shard for each tensor.
EACH = {"max_shard_size_bytes": 400}


def state() -> dict[str, torch.Tensor]:
    return {f"w{number}": seeded(f"w{number}", (10, 10)) for number in range(6)}


@pytest.fixture
def url(tmp_path: Path) -> str:
    place = (tmp_path / "run" / "step-7").as_uri()
    dos.save(state(), place, progress=False)
    return place


def export_here(rank: int, world: int, url: str, out: str, settings: Mapping[str, Any]) -> Any:
    return dos.export_checkpoint(
        url, out, process_group=dist.group.WORLD, progress=False, **settings
    )


def of_ranks(url: str, out: object, **settings: Any) -> list[Any]:
    return [outcome.value or outcome.error for outcome in try_outcomes(url, out, settings)]


def try_outcomes(url: str, out: object, settings: Mapping[str, Any]) -> list[Any]:
    return try_ranks(RANKS, export_here, url, str(out), settings)


def test_a_folder_by_all_ranks_holds_what_one_process_writes(bucket):
    options = bucket.storage_options
    dos.save(state(), bucket.at("step-1"), storage_options=options, progress=False)
    settings = {"storage_options": options, **EACH}
    bucket.put("config.json", b"{}")
    settings["copied_files"] = [bucket.at("config.json")]
    reports = of_ranks(bucket.at("step-1"), bucket.at("hf"), **settings)
    names = [f"model-{number:05d}-of-00006.safetensors" for number in range(1, 7)]
    names = ["config.json", *names, INDEX]
    for report in reports:
        assert report.files == tuple(bucket.at(f"hf/{name}") for name in names)
        assert report.tensors == 6
        assert report.total_bytes == sum(len(bucket.get(f"hf/{name}")) for name in names)
    assert sorted(bucket.keys("hf")) == sorted(names)
    dos.export_checkpoint(bucket.at("step-1"), bucket.at("one"), progress=False, **settings)
    assert all(bucket.get(f"hf/{name}") == bucket.get(f"one/{name}") for name in names)
    weight_map = json.loads(bucket.get(f"hf/{INDEX}"))["weight_map"]
    for key, value in state().items():
        assert same_bits(load(bucket.get(f"hf/{weight_map[key]}"))[key], value)


def count_files(rank: int, world: int, url: str, out: str, settings: Mapping[str, Any]) -> Any:
    events: list[Any] = []
    export_here(rank, world, url, out, {**settings, "on_event": events.append})
    return [event.object_key for event in events if type(event).__name__ == "ObjectUploaded"]


def test_every_rank_writes_files_and_the_first_writes_the_index_last(url, tmp_path):
    written = run_ranks(RANKS, count_files, url, str(tmp_path / "hf"), EACH)
    assert [len(names) for names in written] == [3, 2, 1, 1]
    assert written[0][-1] == INDEX
    names = sorted(name for names in written for name in names)
    assert len(set(names)) == 7
    assert sorted(path.name for path in (tmp_path / "hf").iterdir()) == names
    # A single file is the first rank's.
    one = run_ranks(RANKS, count_files, url, str(tmp_path / "m.pt"), {})
    assert one == [["m.pt"], [], [], []]
    assert same_bits(torch.load(tmp_path / "m.pt")["w0"], state()["w0"])


def test_a_failure_on_one_rank_is_one_on_all_and_leaves_nothing(bucket, tmp_path):
    options = bucket.storage_options
    for place, access in (((tmp_path / "run").as_uri(), None), (bucket.at("step-1"), options)):
        dos.save(state(), place, storage_options=access, progress=False)
    (data,) = (tmp_path / "run").glob("__0_0*")
    body = bytearray(data.read_bytes())
    at = body.index(state()["w3"].numpy().tobytes())
    body[at] ^= 1
    data.write_bytes(body)
    (key,) = (key for key in bucket.keys("step-1") if key.endswith(".distcp"))
    bucket.flip_byte(
        f"step-1/{key}", bucket.get(f"step-1/{key}").index(body[at + 1 : at + 300]) - 1
    )
    for place, out, settings in (
        ((tmp_path / "run").as_uri(), tmp_path / "new" / "hf", EACH),
        (bucket.at("step-1"), bucket.at("hf"), {**EACH, "storage_options": options}),
    ):
        errors = of_ranks(place, out, **settings)
        assert {type(error) for error in errors} == {CheckpointCorruptError}
        assert {(error.key, error.rank) for error in errors} == {("w3", errors[0].rank)}
    assert not (tmp_path / "new").exists()
    assert bucket.keys("hf") == []
    assert bucket.uploads() == []


def die_in_the_middle(
    rank: int, world: int, url: str, out: str, options: Any, last: int, after: str = ""
) -> Any:
    def hang(store: Any, name: str, *args: Any, **settings: Any) -> Any:
        uploaded = upload_object(store, name, *args, **settings)
        if rank == last and after in name:
            say("written", name)
            threading.Event().wait()
        return uploaded

    export_folder.upload_object = hang
    settings = {**EACH, "storage_options": options, "overwrite": True}
    return export_here(rank, world, url, out, settings)


@pytest.mark.parametrize(
    ("last", "earlier"),
    cases(itertools.product(range(RANKS), [False, True]), default=[(0, False), (2, True)]),
)
def test_a_killed_rank_leaves_no_new_index_and_the_others_raise(bucket, last, earlier):
    options = bucket.storage_options
    dos.save(state(), bucket.at("step-1"), storage_options=options, progress=False)
    if earlier:
        settings = {**EACH, "storage_options": options}
        dos.export_checkpoint(bucket.at("step-1"), bucket.at("hf"), progress=False, **settings)
    before = bucket.keys("hf")
    with start_workers(reuse=False) as crew:
        job = crew.start(
            RANKS, die_in_the_middle, bucket.at("step-1"), bucket.at("hf"), options, last
        )
        (said,) = wait_for(job, "written")
        os.kill(job.pids[last], signal.SIGKILL)
        outcomes = job.end()
    for outcome in outcomes:
        assert outcome.failed
        if outcome.rank != last:
            assert isinstance(outcome.error, RankFailedError), str(outcome)
    # The first rank removes what a dead one has written; nobody does it for the first.
    written = [] if last else [said.message[1]]
    if not last and not earlier:
        written.append("model.safetensors.claim")
    assert bucket.keys("hf") == sorted([*before, *written])


def test_if_the_first_rank_is_killed_after_the_index_the_files_of_all_stay(bucket):
    options = bucket.storage_options
    dos.save(state(), url := bucket.at("step-1"), storage_options=options, progress=False)
    with start_workers(reuse=False) as crew:
        job = crew.start(RANKS, die_in_the_middle, url, bucket.at("hf"), options, 0, "index.json")
        wait_for(job, "written")
        os.kill(job.pids[0], signal.SIGKILL)
        outcomes = job.end()
    assert all(isinstance(one.error, RankFailedError) for one in outcomes if one.rank)
    exported = dos.read_state_dict(bucket.at("hf"), storage_options=options, progress=False)
    assert exported.keys() == state().keys()


def differ(rank: int, world: int, url: str, root: str) -> list[str]:
    said = []
    for settings in (
        {"overwrite": rank == 1},
        {"rename": [("^w", "v")] if rank == 2 else []},
        {"max_shard_size_bytes": 400 + rank},
        {"dtype": torch.int8 if rank == 3 else None},
        {"copied_files": [f"{root}/none.json"] if rank == 0 else []},
    ):
        with pytest.raises((ConfigError, InputError)) as caught:
            export_here(rank, world, url, f"{root}/hf", settings)
        said.append(str(caught.value))
    return said


def test_arguments_that_differ_between_ranks_are_refused_on_all(url, tmp_path):
    first, *others = run_ranks(RANKS, differ, url, str(tmp_path))
    assert others == [first] * (RANKS - 1)
    words = ("overwrite=", "rename=", "max_shard_size_bytes", "rank 3", "nothing to copy")
    for text, word in zip(first, words, strict=True):
        assert word in text
    assert not (tmp_path / "hf").exists()


def in_memory_of_its_own(rank: int, world: int, url: str) -> None:
    with pytest.raises(InputError, match="does not see it"):
        export_here(rank, world, url, "memory://apart/hf", EACH)


def test_ranks_without_a_common_store_are_refused(url):
    run_ranks(2, in_memory_of_its_own, url)


def test_a_process_of_a_job_exports_alone_without_a_group(url, tmp_path):
    run_ranks(2, export_alone, url, str(tmp_path))
    assert same_bits(load_file(tmp_path / "hf" / "model.safetensors")["w5"], state()["w5"])


def export_alone(rank: int, world: int, url: str, root: str) -> None:
    if rank == 0:
        dos.export_checkpoint(url, f"{root}/hf", progress=False)


# --- which rank writes what


def planned(*sizes: int) -> list[PlannedFile]:
    return [PlannedFile(str(size), size, lambda _: iter(())) for size in sizes]


def test_files_are_shared_out_by_size():
    def shared(sizes: list[int], ranks: int) -> list[int]:
        return [
            sum(file.size_bytes for file in share) for share in share_out(planned(*sizes), ranks)
        ]

    assert shared([1, 1, 1, 1], 4) == [1, 1, 1, 1]
    assert shared([5, 1, 1, 1, 1, 1], 2) == [5, 5]
    assert shared([7], 3) == [7, 0, 0]
    assert shared([], 2) == [0, 0]


def sizes_of_shards(sizes: list[int], most: int, ranks: int) -> list[int]:
    tensors = {f"t{n:03d}": TensorInfo((size,), torch.uint8) for n, size in enumerate(sizes)}
    made, last = shards(tensors, {key: key for key in tensors}, most, "model", ranks)
    return [sum(tensors[key].shape[0] for key in file.keys) for file in made or [last]]


def test_shards_are_equal_and_enough_for_all_ranks(monkeypatch):
    ten = [10] * 10
    assert sizes_of_shards(ten, 1000, 1) == [100]
    assert sizes_of_shards(ten, 40, 1) == [40, 40, 20]
    # Too small for more shards.
    assert sizes_of_shards(ten, 1000, 4) == [100]
    assert sizes_of_shards(ten, 40, 2) == [40, 40, 20]
    monkeypatch.setattr(files, "_LEAST_SHARD_BYTES", 20)
    assert sizes_of_shards(ten, 1000, 4) == [30, 30, 30, 10]
    assert sizes_of_shards(ten, 1000, 5) == [20] * 5
    assert sizes_of_shards(ten, 40, 2) == [30, 30, 30, 10]
    # No more than 5 of 20 bytes, though there are 64 ranks.
    assert sizes_of_shards(ten, 1000, 64) == [20] * 5
    # A tensor is never cut, and no shard of several is larger than was asked for.
    assert sizes_of_shards([90, 5, 5], 50, 2) == [90, 10]
    assert sizes_of_shards([90, 5, 5], 1000, 3) == [90, 5, 5]
    assert sizes_of_shards([], 1000, 3) == [0]
