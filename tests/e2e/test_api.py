"""`dos.save`, `dos.async_save`, `dos.load`: one line on every rank, one error on every rank."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import dcp_objstore as dos
from dcp_objstore.observe.events import PartUploaded, RangeRead
from dcp_objstore.write import async_save as async_api
from tests.support.checkpoints import memory_url
from tests.support.ranks import run_ranks

Options = Mapping[str, object]


def training(*, sharded: bool) -> dict[str, Any]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(24, 40), nn.Linear(40, 8))
    if sharded:
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return {"model": model, "optimizer": optimizer, "progress": {"step": 0}}


def advance(state: dict[str, Any]) -> float:
    loss = state["model"](torch.linspace(-1, 1, 48).view(2, 24)).square().mean()
    loss.backward()
    state["optimizer"].step()
    state["optimizer"].zero_grad()
    state["progress"]["step"] += 1
    return float(loss)


def save_trained(rank: int, world: int, url: str, options: Options) -> tuple[Any, list[float]]:
    state = training(sharded=True)
    for _ in range(3):
        advance(state)
    report = dos.save(state, url, storage_options=options)
    return report, [advance(state) for _ in range(3)]


def resume(rank: int, world: int, url: str, options: Options) -> tuple[Any, int, list[float]]:
    state = training(sharded=world > 0)
    report = dos.load(state, url, storage_options=options)
    return report, state["progress"]["step"], [advance(state) for _ in range(3)]


def test_a_save_of_4_ranks_trains_on_alike_on_2_and_in_one_process(bucket):
    url, options = bucket.at("step-3"), bucket.storage_options
    saved = run_ranks(4, save_trained, url, options)
    reports = [report for report, _ in saved]
    assert all(report == reports[0] for report in reports)
    assert reports[0].commit_id
    assert reports[0].objects == 4
    expected = saved[0][1]
    for report, step, losses in [*run_ranks(2, resume, url, options), resume(0, 0, url, options)]:
        assert report.commit_id == reports[0].commit_id
        assert step == 3
        assert losses == pytest.approx(expected, rel=1e-5)


class BreaksOnLoad:
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def state_dict(self) -> dict[str, int]:
        return {"a": 1}

    def load_state_dict(self, state: Any) -> None:
        if self.rank == 2:
            raise KeyError("not mine")


def fail_on_one(rank: int, world: int, root: str) -> list[tuple[str, int | None]]:
    """Calls that are wrong on the third rank: what each raises, and whose error it is."""
    url, own = f"{root}/step-1", {"own": BreaksOnLoad(rank)}
    for place in (url, f"{root}/step-0"):
        dos.save({"w": torch.ones(4), "weight": torch.ones(2), **own}, place)
    said: list[tuple[str, int | None]] = []
    for call, state, place in (
        (dos.load, {"weigth" if rank == 2 else "w": torch.zeros(4)}, url),
        (dos.load, own, url),
        (dos.load, {"w": torch.zeros(4)}, f"{root}/step-{rank // 2}"),
        (dos.save, {f"w{rank}": torch.ones(4)}, f"{root}/new-{rank // 2}"),
        (dos.save, {"in": {"it": torch.ones(3 + rank // 2)}}, f"{root}/new"),
    ):
        with pytest.raises((dos.errors.StateMismatchError, dos.errors.InvalidUrlError)) as caught:
            call(state, place)
        said.append((str(caught.value), caught.value.rank))
    return said


def test_what_is_wrong_on_one_rank_is_an_error_of_all_and_nothing_is_saved(tmp_path):
    root = tmp_path.as_uri()
    for missing, refused, loaded, saved, unlike in run_ranks(3, fail_on_one, root):
        assert "weigth: not in the checkpoint (nearest: weight" in missing[0]
        assert "KeyError" in refused[0]
        assert missing[1] == refused[1] == 2
        assert f"rank 0 has {root}/step-0 and rank 2 {root}/step-1" in loaded[0]
        assert f"rank 0 has {root}/new-0 and rank 2 {root}/new-1" in saved[0]
        assert "rank 0 has a" in unlike[0] and "key in.it" in unlike[0]
    assert not list(tmp_path.glob("new*/*.distcp"))


def in_a_subgroup(rank: int, world: int, url: str, options: Options) -> Any:
    group = dist.new_group([1, 2])
    if rank == 0:
        return None
    report = dos.save(
        {f"w{rank}": torch.ones(2)}, url, storage_options=options, process_group=group
    )
    assert dos.load({f"w{rank}": torch.zeros(2)}, url, process_group=group, storage_options=options)
    handle = dos.async_save(
        {f"w{rank}": torch.ones(2)}, url + "b", storage_options=options, process_group=group
    )
    assert handle.result(60).objects == 2
    state = {"w": torch.ones(2), f"value{rank}": threading.Lock() if rank == 2 else 1}
    try:
        dos.save(state, url + "c", storage_options=options, process_group=group)
    except dos.errors.UnsupportedError as error:
        return report.objects, error.rank
    return None


@pytest.mark.backends("seaweed")
def test_some_of_the_ranks_can_save_alone_and_errors_name_them_as_the_user_does(bucket):
    outcomes = run_ranks(3, in_a_subgroup, bucket.at("step"), bucket.storage_options)
    assert outcomes == [None, (2, 2), (2, 2)]


def test_torch_does_not_warn_of_a_missing_process_group(recwarn):
    url = memory_url()
    dos.save({"a": torch.ones(1)}, url)
    dos.load({"a": torch.zeros(1)}, url)
    assert [str(warning.message) for warning in recwarn] == []


def in_background(state: dict[str, Any], url: str, **settings: Any) -> None:
    dos.async_save(state, url, overwrite=True, **settings).result()


@pytest.mark.parametrize("call", [in_background, dos.load])
def test_a_filter_of_warnings_that_is_set_during_a_call_stays(call):
    """Set by another thread: a save or load may run in another thread of the program."""
    url = memory_url()
    dos.save({"a": torch.ones(1)}, url)

    def meanwhile(event: object) -> None:
        if isinstance(event, PartUploaded | RangeRead):
            warnings.filterwarnings("error", message="set meanwhile")

    with warnings.catch_warnings():
        call({"a": torch.ones(1)}, url, on_event=meanwhile)
        with pytest.raises(UserWarning, match="set meanwhile"):
            warnings.warn("set meanwhile", UserWarning, stacklevel=1)


# async_save -----------------------------------------------------------------------------------


def errors_seen_on_rank_0_only(rank: int, world: int, url: str, options: Options) -> list[str]:
    state = {"w": torch.ones(2)}
    dos.save(state, url, storage_options=options)
    failed = dos.async_save(state, url, storage_options=options)
    if rank == 0:
        assert isinstance(failed.exception(60), dos.errors.CheckpointExistsError)
    seen = []
    try:
        dos.async_save(state, url + "b", storage_options=options)
    except dos.errors.CheckpointExistsError:
        seen.append("told")
    seen.append(dos.async_save(state, url + "c", storage_options=options).result(60).url[-1])
    return seen


@pytest.mark.backends("seaweed")
def test_an_error_that_some_ranks_have_not_seen_is_raised_by_the_next_save_on_all(bucket):
    results = run_ranks(3, errors_seen_on_rank_0_only, bucket.at("s"), bucket.storage_options)
    assert results == [["told", "c"]] * 3


def busy_on_one(rank: int, world: int, url: str, options: Options) -> str:
    gate, run_save = threading.Event(), async_api.run_save

    def held(*args: Any) -> Any:
        report = run_save(*args)
        assert rank == 0 or gate.wait(30)
        return report

    state = {"w": torch.ones(2)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(async_api, "run_save", held)
        first = dos.async_save(state, url, storage_options=options)
        if rank == 0:
            first.result(30)
        dist.barrier()  # ended on rank 0, not on the others
        with pytest.raises(dos.errors.SaveInProgressError):
            dos.async_save(state, url + "b", storage_options=options, on_busy="raise")
        gate.set()
        first.result(30)
        dist.barrier()
        second = dos.async_save(state, url + "b", storage_options=options, on_busy="raise")
        return second.result(30).url


@pytest.mark.backends("seaweed")
def test_a_save_is_refused_on_all_ranks_while_any_rank_is_busy(bucket):
    results = run_ranks(2, busy_on_one, bucket.at("s"), bucket.storage_options)
    assert results == [bucket.at("sb")] * 2


def background_beside_training(rank: int, world: int, url: str, options: Options) -> list[float]:
    state = training(sharded=True)
    handles = []
    sums = []
    for step in range(3):
        advance(state)
        handles.append(dos.async_save(state, f"{url}/step-{step}", storage_options=options))
        total = torch.ones(1) * rank
        dist.all_reduce(total)  # in the default group, while the save's collectives run
        sums.append(float(total))
    assert len({handle.result(60).commit_id for handle in handles}) == 3
    return sums


@pytest.mark.backends("seaweed")
def test_background_saves_keep_out_of_the_way_of_the_trainings_collectives(bucket):
    results = run_ranks(2, background_beside_training, bucket.at("run"), bucket.storage_options)
    assert results == [[1.0] * 3] * 2
    for step in range(3):
        state = training(sharded=False)
        dos.load(state, bucket.at(f"run/step-{step}"), storage_options=bucket.storage_options)
        assert state["progress"]["step"] == step + 1
