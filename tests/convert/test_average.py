"""Averages of checkpoints: the bits of the plain loop, or an error that names the key."""

from __future__ import annotations

import itertools
import math
import os
import random
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import dcp_objstore as dos
from dcp_objstore.config import MIB
from dcp_objstore.convert import average, sums
from dcp_objstore.errors import (
    CheckpointCorruptError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    ConfigError,
    DcpObjstoreError,
    RankFailedError,
    StateMismatchError,
    StoreUnavailableError,
    UnsupportedError,
)
from dcp_objstore.inspect.selection import whole
from dcp_objstore.inspect.slabs import Slab
from dcp_objstore.read.stored_checkpoint import open_stored_checkpoint
from dcp_objstore.stores import StoreSpec
from dcp_objstore.transfer.progress import Progress
from dcp_objstore.transfer.ranges import RangeRequest
from tests.support.campaign import cases
from tests.support.checkpoints import assert_nothing_visible, memory_url
from tests.support.command_line import environment, run_here
from tests.support.launcher import say
from tests.support.ranks import run_alone, run_ranks, start_workers, wait_for
from tests.support.servers import Bucket
from tests.support.states import same_bits

Options = Mapping[str, object]
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
WEIGHTS = [0.4, 1.0, -0.3, 2.5]
# Slots, slabs and stretches of few bytes, so that small states need many of each.
SMALL = dos.TransferConfig(memory_budget_bytes=8 * MIB, request_size_bytes=4 * MIB)


def model(step: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """The same tensors in each step of a seed: shapes and dtypes are drawn, and so are values.

    Those of a seed but 0 have tensors of several blocks.
    """
    draw = random.Random(seed)
    values = torch.Generator().manual_seed(1000 * seed + step)
    tensors = {}
    for number in range(8):
        shape = [draw.choice([1, 3, 8, 257]) for _ in range(draw.randrange(4))]
        tensors[f"w{number}"] = (shape, draw.choice(FLOATS))
    wide, long = ([1031, 1237], 2 * MIB) if seed else ([103, 129], 5000)
    tensors["wide"] = (wide, draw.choice(FLOATS))  # whose rows end within a block
    tensors["long"] = ([long + draw.randrange(9)], draw.choice(FLOATS))
    tensors["none"] = ([0, 4], torch.float32)
    return {
        name: torch.randn(shape, generator=values).to(dtype)
        for name, (shape, dtype) in tensors.items()
    }


def state(step: int, seed: int = 0) -> dict[str, Any]:
    norm = {"scale": torch.ones(3) * step, "num_batches_tracked": torch.tensor(10 * step)}
    optimizer = {"moment": torch.ones(5), "lr": 0.1 * step}
    tensors = {**model(step, seed), "norm": norm}
    return {"model": tensors, "optimizer": optimizer, "step": step, "data": {7: [step]}}


def loop(tensors: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """The oracle: the plain loop in memory."""
    dtype = torch.float64 if torch.float64 in {t.dtype for t in tensors} else torch.float32
    shares = [weight / math.fsum(weights) for weight in weights]
    total = shares[0] * tensors[0].to(dtype)
    for share, tensor in zip(shares[1:], tensors[1:], strict=True):
        total = total + share * tensor.to(dtype)
    return total.to(tensors[-1].dtype)


def assert_average(url: str, options: Options, seed: int = 0, steps: int = 4) -> None:
    opened = dos.open(url, storage_options=options)
    found = opened.read("model.*", progress=False)
    inputs = [model(step, seed) for step in range(steps)]
    for name in inputs[0]:
        wanted = loop([tensors[name] for tensors in inputs], WEIGHTS[:steps])
        assert same_bits(found[f"model.{name}"], wanted), name
    assert opened.verify(deep=True, progress=False).ok


def save_whole(step: int, url: str, options: Options, seed: int = 0) -> None:
    dos.save(state(step, seed), url, storage_options=options, progress=False)


def save_sharded(rank: int, world: int, step: int, url: str, options: Options, dim: int) -> None:
    mesh = init_device_mesh("cpu", (world,))
    whole = state(step)
    for name, tensor in whole["model"].items():
        if isinstance(tensor, torch.Tensor) and tensor.dim() > dim:
            whole["model"][name] = distribute_tensor(tensor, mesh, [Shard(dim)])
    dos.save(whole, url, storage_options=options, progress=False)


def average_here(rank: int, world: int, urls: list[str], out: str, options: Options) -> Any:
    group = None if world == 1 else dist.group.WORLD
    return dos.average(
        urls, out, WEIGHTS, storage_options=options, progress=False, process_group=group
    )


@pytest.fixture
def run(bucket: Bucket) -> list[str]:
    """Four steps of a run, the newest last."""
    urls = [bucket.at(f"run/step-{step}") for step in range(4)]
    for step, url in enumerate(urls):
        save_whole(step, url, bucket.storage_options)
    return urls


def data_key(bucket: Bucket, name: str) -> str:
    (key,) = (key for key in bucket.keys(name) if key.endswith(".distcp"))
    return f"{name}/{key}"


def assert_nothing_at(bucket: Bucket, name: str) -> None:
    """No marker, no upload that is left open, and no object."""
    assert_nothing_visible(bucket, name)
    assert bucket.keys(name) == []


@pytest.mark.parametrize("ranks", cases([1, 2, 3], default=[2]))
def test_it_has_the_bits_of_the_plain_loop_however_many_make_it(
    run: list[str], bucket: Bucket, ranks: int
) -> None:
    options = bucket.storage_options
    reports = run_ranks(ranks, average_here, run, bucket.at("average"), options)
    assert len({(report.commit_id, report.total_bytes) for report in reports}) == 1
    assert_average(bucket.at("average"), options)
    opened = dos.open(bucket.at("average"), storage_options=options)
    assert opened.world_size == ranks
    written_bytes = [
        len(bucket.get(f"average/{key}")) for key in bucket.keys("average") if "distcp" in key
    ]
    assert len(written_bytes) == ranks
    assert max(written_bytes) * ranks < 1.5 * sum(written_bytes), "equal stretches"
    assert opened.keys() == {
        *(f"model.{name}" for name in model(0)),
        *("model.norm.scale", "model.norm.num_batches_tracked"),
        *("optimizer.lr", "step", "data.7"),
    }


@pytest.mark.parametrize("seed", cases(range(1, 7), default=[1, 4]))
def test_random_states_have_the_bits_of_the_plain_loop_in_little_memory(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sums, "SUM_BYTES", 700_000)
    monkeypatch.setattr(average, "SUM_BYTES", 700_000)
    monkeypatch.setattr(sums, "_PLANNED_BYTES", 4 * MIB)
    urls = [f"file://{tmp_path}/step-{step}" for step in range(4)]
    for step, url in enumerate(urls):
        save_whole(step, url, {}, seed)
    dos.average(urls, f"file://{tmp_path}/average", WEIGHTS, config=SMALL, progress=False)
    assert_average(f"file://{tmp_path}/average", {}, seed)


def test_inputs_may_have_been_sharded_in_different_ways(tmp_path: Path) -> None:
    urls = [f"file://{tmp_path}/step-{step}" for step in range(4)]
    for step, (ranks, dim) in enumerate([(1, 0), (3, 1), (2, 0), (3, 0)]):
        run_ranks(ranks, save_sharded, step, urls[step], {}, dim)
    dos.average(urls, f"file://{tmp_path}/average", WEIGHTS, config=SMALL, progress=False)
    assert_average(f"file://{tmp_path}/average", {})
    chunks = dos.open(f"file://{tmp_path}/average")["model.wide"].chunks
    assert chunks == dos.open(urls[-1])["model.wide"].chunks


def test_dtypes_that_changed_are_summed_in_the_widest_and_stored_in_the_newest(
    tmp_path: Path,
) -> None:
    urls = [f"file://{tmp_path}/step-{step}" for step in range(4)]
    inputs = [torch.randn(1000).to(FLOATS[step]) for step in (0, 3, 2, 1)]
    for url, tensor in zip(urls, inputs, strict=True):
        dos.save({"model": {"w": tensor}}, url, progress=False)
    dos.average(urls, f"file://{tmp_path}/average", WEIGHTS, progress=False)
    found = dos.open(f"file://{tmp_path}/average")["model.w"].read()
    assert found.dtype == torch.bfloat16
    assert same_bits(found, loop(inputs, WEIGHTS))


def test_training_resumes_from_it_with_the_counters_of_the_newest(
    run: list[str], bucket: Bucket, tmp_path: Path
) -> None:
    options = bucket.storage_options
    dos.average(run, bucket.at("average"), WEIGHTS, storage_options=options, progress=False)
    fresh = state(9)
    wanted = {name: fresh[name] for name in ("model", "step", "data")}
    dos.load(wanted, bucket.at("average"), storage_options=options, progress=False)
    assert (wanted["step"], wanted["data"]) == (3, {7: [3]})
    assert wanted["model"]["norm"]["num_batches_tracked"] == 30
    scales = [torch.ones(3) * step for step in range(4)]
    assert same_bits(wanted["model"]["norm"]["scale"], loop(scales, WEIGHTS))
    out = tmp_path / "model.safetensors"
    dos.export_checkpoint(
        bucket.at("average"), out, "model.*", storage_options=options, progress=False
    )
    assert same_bits(load_file(out)["model.wide"], wanted["model"]["wide"])


def test_it_says_what_it_is_made_of(run: list[str], bucket: Bucket) -> None:
    options = bucket.storage_options
    dos.save(
        state(3),
        run[3],
        overwrite=True,
        user_metadata={"loss": 0.5},
        storage_options=options,
        progress=False,
    )
    dos.average(run, bucket.at("average"), "linear", storage_options=options, progress=False)
    noted = dos.open(bucket.at("average"), storage_options=options).user_metadata
    commits = [dos.open(url, storage_options=options).commit_id for url in run]
    assert noted == {
        "loss": 0.5,
        "average": {
            "of": [
                {"url": url, "commit_id": commit, "weight": weight}
                for url, commit, weight in zip(run, commits, [0.1, 0.2, 0.3, 0.4], strict=True)
            ],
            "keys": ["model.*"],
        },
    }


@pytest.mark.parametrize(
    ("keys", "averaged"),
    [("a.*", {"a.v", "a.w"}), (["a.w", "b"], {"a.w", "b"}), (None, {"a.v", "a.w", "b"})],
)
def test_it_has_the_tensors_of_the_keys(keys: Any, averaged: set[str]) -> None:
    urls = [memory_url(), memory_url()]
    for url in urls:
        tensors = {"a": {"v": torch.ones(2), "w": torch.ones(2)}, "b": torch.ones(2)}
        dos.save(tensors, url, progress=False)
    opened = dos.open(dos.average(urls, memory_url(), keys=keys, progress=False).url)
    assert opened.keys() == averaged
    wanted = [keys] if isinstance(keys, str) else keys
    assert opened.user_metadata["average"]["keys"] == wanted


def shares_of(weights: Any, count: int) -> list[float]:
    """Return the weights that an average of so many checkpoints says that it has."""
    urls = [memory_url() for _ in range(count)]
    for url in urls:
        dos.save({"model": {"w": torch.ones(1)}}, url, progress=False)
    report = dos.average(urls, memory_url(), weights, progress=False)
    noted = dos.open(report.url).user_metadata
    return [one["weight"] for one in noted["average"]["of"]]


def test_named_weights_sum_to_one_and_stand_for_their_decay() -> None:
    assert shares_of(None, 4) == shares_of("uniform", 4) == [0.25] * 4
    assert shares_of("linear", 3) == [1 / 6, 2 / 6, 3 / 6]
    assert shares_of([np.float32(1), 3], 2) == [0.25, 0.75]
    shares = shares_of("1-sqrt", 9)
    assert math.isclose(sum(shares), 1)
    # What the updates before input i count in the end is what is left of the learning rate there.
    for number in range(9):
        assert math.isclose(sum(shares[number:]), 1 - math.sqrt(number / 9))


PACKED = torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)


def changed(tensors: Mapping[str, Any], **others: Any) -> dict[str, Any]:
    return {name: value for name, value in {**tensors, **others}.items() if value is not None}


@pytest.mark.parametrize(
    ("older", "newest", "key", "word"),
    [
        ({"w": torch.ones(3)}, {}, "model.w", "shape"),
        ({"w": None}, {}, "model.w", "no such tensor"),
        ({"more": torch.ones(3)}, {}, "model.more", "no such tensor"),
        ({"w": 5}, {}, "model.w", "no such tensor"),
        ({}, {"w": torch.arange(4)}, "model.w", "int64"),
        ({"w": torch.arange(4)}, {}, "model.w", "int64"),
        ({}, {"w": torch.ones(4, dtype=torch.complex64)}, "model.w", "complex64"),
        ({}, {"w": torch.ones(4, dtype=torch.bool)}, "model.w", "bool"),
        ({"w": torch.tensor(1j)}, {"w": torch.tensor(1j)}, "model.w", "leave it out"),
        ({"w": PACKED}, {"w": PACKED}, "model.w", "leave it out"),
    ],
)
def test_what_does_not_fit_is_refused_by_its_key_before_anything_is_written(
    tmp_path: Path, older: dict[str, Any], newest: dict[str, Any], key: str, word: str
) -> None:
    tensors = {"w": torch.ones(4), "v": torch.zeros(2)}
    urls = [f"file://{tmp_path}/step-{step}" for step in range(3)]
    for url, others in zip(urls, ({}, older, newest), strict=True):
        dos.save({"model": changed(tensors, **others)}, url, progress=False)
    with pytest.raises(StateMismatchError, match=word) as caught:
        dos.average(urls, f"file://{tmp_path}/average", progress=False)
    assert caught.value.key == key
    assert caught.value.url in urls
    assert not (tmp_path / "average").exists()
    dos.average(urls, f"file://{tmp_path}/rest", keys="model.v", progress=False)


@pytest.mark.parametrize(
    ("weights", "word"),
    [
        ([1.0, 2.0], "3 inputs and 2 weights"),
        ([1.0, -2.0, 1.0], "sum to 0"),
        ([0.1, 0.2, -0.3], "sum to"),
        ([0.0, 0.0, 0.0], "sum to 0"),
        ([1.0, math.nan, 1.0], "finite"),
        ([1.0, math.inf, 1.0], "finite"),
        ([1.0, math.inf, -math.inf], "finite"),
        ([1e308, 1e308, 1e308], "finite"),
        ([10**400, 1, 1], "finite"),
        (["1", "2", "3"], "finite"),
        ("sqrt", "1-sqrt"),
    ],
)
def test_weights_without_an_average_are_refused(tmp_path: Path, weights: Any, word: str) -> None:
    urls = [f"file://{tmp_path}/step-{step}" for step in range(3)]
    with pytest.raises(ConfigError, match=word):
        dos.average(urls, f"file://{tmp_path}/average", weights)


def test_wrong_lists_of_inputs_are_refused(run: list[str], bucket: Bucket) -> None:
    out, options = bucket.at("average"), bucket.storage_options
    wrong: list[tuple[Any, type[DcpObjstoreError], str]] = [
        ([], ConfigError, "two or more"),
        (run[:1], ConfigError, "two or more"),
        (run[0], ConfigError, "two or more"),
        ([run[0], run[1], f"{run[0]}/"], ConfigError, "twice"),
        ([run[0], bucket.at("run/step-77")], CheckpointNotFoundError, "step-77"),
    ]
    for urls, kind, word in wrong:
        with pytest.raises(kind, match=word):
            dos.average(urls, out, storage_options=options, progress=False)
    with pytest.raises(StateMismatchError, match=r"no key matches 'modl\.\*'"):
        dos.average(run, out, keys="modl.*", storage_options=options, progress=False)
    assert_nothing_at(bucket, "average")


@pytest.mark.parametrize("keys", [[], "model.n"])
def test_an_average_of_no_tensor_is_refused(tmp_path: Path, keys: Any) -> None:
    urls = [f"file://{tmp_path}/step-{step}" for step in range(2)]
    for url in urls:
        dos.save({"model": {"n": torch.tensor(3)}}, url, progress=False)
    with pytest.raises(StateMismatchError, match="no tensor"):
        dos.average(urls, f"file://{tmp_path}/average", keys=keys, progress=False)
    assert not (tmp_path / "average").exists()


def test_requests_get_memory_in_the_order_of_the_plan_and_only_once_it_is_free() -> None:
    """What waits for an earlier input would otherwise hold the memory that this one needs."""
    slots = sums._Slots(dos.TransferConfig(memory_budget_bytes=8 * MIB, request_size_bytes=8 * MIB))
    first, second, third = (RangeRequest[Any](0, at, at + 8, []) for at in (0, 8, 16))
    slots.plan([first, second], 0)
    slots.plan([third], 1)
    assert [slots.may_begin(one) for one in (first, second, third)] == [True, False, False]
    held = slots.admit(first, Progress(60))
    assert not slots.may_begin(second), "its memory is lent"
    (stopped := Progress(60)).stop(StoreUnavailableError("stopped"))
    with pytest.raises(StoreUnavailableError, match="stopped"):
        slots.admit(second, stopped)
    del held
    assert slots.may_begin(second)
    slots.admit(second, Progress(60))
    assert not slots.may_begin(third), "its window is too far ahead"
    slots.allow(1)
    assert slots.may_begin(third)


def test_a_checkpoint_without_digests_is_refused(tmp_path: Path) -> None:
    urls = [f"file://{tmp_path}/step-{step}" for step in range(2)]
    dos.save({"model": {"w": torch.ones(2)}}, urls[0], progress=False)
    torch.distributed.checkpoint.save(
        {"model": {"w": torch.ones(2)}}, checkpoint_id=f"{tmp_path}/step-1", no_dist=True
    )
    with pytest.raises(UnsupportedError, match="import") as caught:
        dos.average(urls, f"file://{tmp_path}/average", progress=False)
    assert caught.value.url == urls[1]


def test_a_checkpoint_that_exists_is_replaced_only_on_demand(
    run: list[str], bucket: Bucket
) -> None:
    options = bucket.storage_options
    before = bucket.get("run/step-3/_COMMIT")
    with pytest.raises(CheckpointExistsError):
        dos.average(run, run[3], WEIGHTS, storage_options=options, progress=False)
    assert bucket.get("run/step-3/_COMMIT") == before
    dos.average(run, run[3], WEIGHTS, overwrite=True, storage_options=options, progress=False)
    assert_average(run[3], options)


def test_damage_in_an_input_is_found_and_nothing_is_committed(
    run: list[str], bucket: Bucket
) -> None:
    key = data_key(bucket, "run/step-2")
    body = bytearray(bucket.get(key))
    options = bucket.storage_options
    long = model(2)["long"].view(torch.uint8).numpy().tobytes()
    body[body.index(long) + len(long) - 1] ^= 1
    bucket.put(key, bytes(body))
    with pytest.raises(CheckpointCorruptError) as caught:
        dos.average(run, bucket.at("average"), storage_options=options, progress=False)
    assert (caught.value.key, caught.value.url) == ("model.long", run[2])
    assert_nothing_at(bucket, "average")


def test_an_input_that_is_gone_is_named(run: list[str], bucket: Bucket) -> None:
    bucket.delete(data_key(bucket, "run/step-1"))
    with pytest.raises(CheckpointCorruptError) as caught:
        dos.average(
            run, bucket.at("average"), storage_options=bucket.storage_options, progress=False
        )
    assert caught.value.url == run[1]
    assert_nothing_at(bucket, "average")


def hold(begun: Callable[[], None], patched: pytest.MonkeyPatch, number: int = 2) -> None:
    """Let reading stop for ever at the range of this number, once `begun` was called."""
    taken = itertools.count()

    def consume(request: Any, body: Any) -> None:
        if next(taken) == number:
            begun()
            threading.Event().wait()
        consumed(request, body)

    consumed = sums.consume
    patched.setattr(sums, "consume", consume)


@pytest.mark.usefixtures("usual_signals")
def test_ctrl_c_leaves_no_marker_and_no_upload(
    run: list[str], bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold(lambda: signal.raise_signal(signal.SIGINT), monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        dos.average(
            run, bucket.at("average"), storage_options=bucket.storage_options, progress=False
        )
    assert_nothing_visible(bucket, "average")
    assert [key[:6] for key in bucket.keys("average")] == [".save-"]  # for a sweep


def hang_in_the_middle(rank: int, world: int, urls: list[str], out: str, options: Options) -> Any:
    if rank == 1:
        hold(lambda: say("begun"), pytest.MonkeyPatch(), 0)
    return average_here(rank, world, urls, out, options)


def test_a_killed_rank_leaves_no_marker_and_the_others_raise(
    run: list[str], bucket: Bucket
) -> None:
    options = bucket.storage_options
    with start_workers(reuse=False) as crew:
        job = crew.start(2, hang_in_the_middle, run, bucket.at("average"), options)
        wait_for(job, "begun")
        os.kill(job.pids[1], signal.SIGKILL)
        outcomes = job.end()
    other = outcomes[0]
    assert isinstance(other.error, RankFailedError), str(other)
    assert_nothing_visible(bucket, "average", uploads=True)


def of_one_rank_each(rank: int, world: int, urls: list[str], out: str) -> list[str]:
    said = []
    for settings in (
        {"weights": WEIGHTS if rank else None},
        {"keys": f"model.w{rank}"},
        {"weights": [1.0] if rank else WEIGHTS},
    ):
        with pytest.raises(ConfigError) as caught:
            dos.average(urls, out, progress=False, process_group=dist.group.WORLD, **settings)
        said.append(str(caught.value))
    return said


def test_arguments_that_differ_between_ranks_are_refused_on_all(tmp_path: Path) -> None:
    urls = [f"file://{tmp_path}/step-{step}" for step in range(4)]
    first, second = run_ranks(2, of_one_rank_each, urls, f"file://{tmp_path}/average")
    assert first == second
    for text, word in zip(first, ("weights", "keys", "4 inputs and 1 weights"), strict=True):
        assert word in text
    assert not (tmp_path / "average").exists()


def peak_growth_mib(root: str, count: int) -> int:
    """Average checkpoints below a root; return by how much this took more memory than before."""

    def status_mib(name: str) -> int:
        found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
        assert found is not None
        return int(found[1]) // 1024

    dos.average([f"{root}/few-{number}" for number in range(2)], f"{root}/warm", progress=False)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins again
    before = status_mib("VmRSS")
    config = dos.TransferConfig(memory_budget_bytes=64 * MIB)
    urls = [f"{root}/step-{number}" for number in range(count)]
    dos.average(urls, f"{root}/out", config=config, progress=False)
    return status_mib("VmHWM") - before


def test_memory_is_bounded_whatever_the_size(tmp_path: Path) -> None:
    """Less than two of the three inputs have."""
    whole = {f"w{n}": torch.full((4 * MIB,), 1.0 * n) for n in range(7)}
    dos.save({"model": whole}, f"file://{tmp_path}/step-0", progress=False)
    for number in (1, 2):
        shutil.copytree(tmp_path / "step-0", tmp_path / f"step-{number}", copy_function=os.link)
    for number in range(2):
        few = {"w": torch.ones(10)}
        dos.save({"model": few}, f"file://{tmp_path}/few-{number}", progress=False)
    assert run_alone(peak_growth_mib, f"file://{tmp_path}", 3) < 200


def test_reading_waits_for_the_upload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sums, "SUM_BYTES", MIB)
    read: list[int] = []
    consume = sums.consume

    def counted(request: Any, body: Any) -> None:
        read.append(len(body))
        consume(request, body)

    monkeypatch.setattr(sums, "consume", counted)
    inputs = []
    for step in range(3):
        spec = StoreSpec(f"file://{tmp_path}/step-{step}")
        dos.save({f"w{n}": torch.ones(MIB // 4) for n in range(20)}, spec.url, progress=False)
        inputs.append(sums.Input(spec, open_stored_checkpoint(spec), 1 / 3))
    slabs = [
        sums.SummedSlab(Slab(f"w{n}", whole((MIB // 4,)), MIB), torch.float32, torch.float32)
        for n in range(20)
    ]
    made = sums.weighted_sums(inputs, slabs, SMALL, lambda: None)
    next(made)
    time.sleep(0.5)
    # The first window, and two beyond it, of three inputs.
    assert sum(read) <= 9 * MIB
    assert len(list(made)) == 19
    assert sum(read) == 60 * MIB


def test_the_command_averages_the_newest_steps_and_says_so_once(
    run: list[str], bucket: Bucket
) -> None:
    variables = environment(bucket.storage_options)
    root = bucket.at("run")
    words = ("average", root, "--last", "3", bucket.at("average"), "--weights", "1-sqrt")
    shown = run_here(*words, **variables)
    assert shown.returncode == 0, shown.stderr
    opened = dos.open(bucket.at("average"), storage_options=bucket.storage_options)
    made_of = opened.user_metadata["average"]["of"]
    assert [one["url"] for one in made_of] == run[1:]
    assert [one["weight"] for one in made_of] == shares_of("1-sqrt", 3)
    assert opened["step"].read() == 3
    assert shown.stdout.count(bucket.at("average")) == shown.stdout.count("KiB in") == 1
    short = run_here("average", root, bucket.at("five"), "--last", "5", **variables)
    assert short.returncode == 2
    assert "4 committed steps" in short.stderr
    assert_nothing_at(bucket, "five")
