"""`dos.save`, `dos.async_save`, `dos.load`: one line on every rank, one error on every rank."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import dcp_objstore as dos
from dcp_objstore.dcp import async_api
from tests.support.ranks import run_ranks, try_ranks
from tests.support.servers import Bucket

Options = Mapping[str, object]


def memory_url() -> str:
    return f"memory://api/{time.monotonic_ns()}"


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


def test_a_model_and_optimizer_saved_on_4_ranks_train_on_alike_on_2_and_in_one_process(
    bucket: Bucket,
) -> None:
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


def fails_on_one(rank: int, world: int, url: str, options: Options, how: str) -> None:
    state: dict[str, Any] = {"w": torch.ones(4), "own": {f"r{rank}": torch.ones(rank + 1)}}
    if how == "optimizer" and rank == 1:
        state["optimizer"] = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    if how == "value" and rank == 1:
        state["bad"] = threading.Lock()  # does not pickle
    dos.save(state, url, storage_options=options)


@pytest.mark.parametrize("how", ["optimizer", "value"])
@pytest.mark.backends("seaweed")
def test_what_fails_on_one_rank_is_raised_on_every_rank_with_rank_and_key(
    bucket: Bucket, how: str
) -> None:
    outcomes = try_ranks(3, fails_on_one, bucket.at("step-1"), bucket.storage_options, how)
    kind = {"optimizer": dos.StateMismatchError, "value": dos.RankFailedError}[how]
    for outcome in outcomes:
        assert type(outcome.error) is kind, outcome
        assert outcome.error.rank == 1
        assert outcome.error.key == {"optimizer": "optimizer", "value": "bad"}[how]
        assert outcome.error.url == bucket.at("step-1")
    assert "_COMMIT" not in bucket.keys("step-1")
    assert bucket.uploads() == []


class DiesWhenRead:
    """A Stateful whose rank is gone in the middle of a save."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __reduce__(self) -> Any:
        if self.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return DiesWhenRead, (self.rank,)


def one_rank_dies(rank: int, world: int, url: str, options: Options) -> None:
    state = {"w": torch.ones(4), f"value-{rank}": DiesWhenRead(rank)}
    dos.save(state, url, storage_options=options)


@pytest.mark.backends("seaweed")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_when_a_rank_dies_the_others_raise_a_typed_error_and_nothing_is_visible(
    bucket: Bucket,
) -> None:
    outcomes = try_ranks(3, one_rank_dies, bucket.at("step-1"), bucket.storage_options)
    assert outcomes[1].exit_signal == signal.SIGKILL
    for outcome in (outcomes[0], outcomes[2]):
        assert isinstance(outcome.error, dos.RankFailedError), outcome
    assert "_COMMIT" not in bucket.keys("step-1")
    with pytest.raises(dos.CheckpointNotFoundError):
        dos.load({"w": torch.zeros(4)}, bucket.at("step-1"), storage_options=bucket.storage_options)


def load_wrong(rank: int, world: int, url: str, options: Options) -> None:
    key = "w" if rank != 2 else "weigth"
    dos.load({key: torch.zeros(4)}, url, storage_options=options)


@pytest.mark.backends("seaweed")
def test_a_missing_key_on_one_rank_is_named_on_all_with_the_nearest_names(bucket: Bucket) -> None:
    url, options = bucket.at("step-1"), bucket.storage_options
    dos.save({"w": torch.ones(4), "weight": torch.ones(2)}, url, storage_options=options)
    for outcome in try_ranks(3, load_wrong, url, options):
        assert type(outcome.error) is dos.StateMismatchError, outcome
        assert outcome.error.rank == 2
        assert "weigth: not in the checkpoint (nearest: weight" in str(outcome.error)


def test_wrong_shapes_and_kinds_are_all_listed_and_nothing_is_changed() -> None:
    url = memory_url()
    dos.save({"a": torch.ones(4), "b": torch.ones(2, 2), "n": 1}, url)
    state = {"a": torch.zeros(3), "b": 5, "n": torch.zeros(1)}
    with pytest.raises(dos.StateMismatchError) as caught:
        dos.load(state, url)
    text = str(caught.value)
    assert "a: saved with shape (4,), the state has (3,)" in text
    assert "b: saved as a tensor" in text
    assert "n: saved as a plain value" in text
    assert torch.equal(state["a"], torch.zeros(3))


def test_a_state_may_ask_for_less_than_was_saved() -> None:
    url = memory_url()
    dos.save({"model": {"a": torch.ones(4), "b": torch.ones(2)}, "step": 3}, url)
    state = {"model": {"b": torch.zeros(2)}}
    report = dos.load(state, url)
    assert torch.equal(state["model"]["b"], torch.ones(2))
    assert report.needed_bytes == 8


def test_the_checkpoint_is_named_by_a_str_not_by_a_path() -> None:
    for wrong in (Path("s3://bucket/x"), None, 5):
        with pytest.raises(dos.DcpObjstoreError):
            dos.save({"a": torch.ones(1)}, wrong)  # type: ignore[arg-type]


def test_torch_does_not_warn_of_a_missing_process_group(recwarn: pytest.WarningsRecorder) -> None:
    url = memory_url()
    dos.save({"a": torch.ones(1)}, url)
    dos.load({"a": torch.zeros(1)}, url)
    assert [str(warning.message) for warning in recwarn] == []


# async_save -----------------------------------------------------------------------------------


def test_the_background_save_holds_the_state_as_it_was_when_it_was_called() -> None:
    url = memory_url()
    state = {"t": torch.ones(1000), "n": [1]}
    handle = dos.async_save(state, url)
    handle.staged()
    state["t"].zero_()
    state["n"][0] = 2
    report = handle.result(30)
    assert handle.done()
    assert handle.exception() is None
    assert report.url == url
    loaded = {"t": torch.zeros(1000), "n": [0]}
    dos.load(loaded, url)
    assert torch.equal(loaded["t"], torch.ones(1000))
    assert loaded["n"] == [1]


class Gate:
    """Holds the saves of this process before they begin."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        run_save = async_api.run_save

        def held(*args: Any) -> Any:
            assert self.open.wait(30)
            return run_save(*args)

        monkeypatch.setattr(async_api, "run_save", held)


def test_a_second_save_waits_or_is_refused_and_never_mixes_with_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate = Gate(monkeypatch)
    first_url, second_url = memory_url(), memory_url()
    state = {"t": torch.ones(1000)}
    first = dos.async_save(state, first_url)
    with pytest.raises(dos.SaveInProgressError, match="still being saved"):
        dos.async_save(state, second_url, on_busy="refuse")
    state["t"].fill_(2)
    threading.Timer(0.2, gate.open.set).start()
    second = dos.async_save(state, second_url)  # waits for the gate
    assert first.done()
    second.result(30)
    for url, value in ((first_url, 1.0), (second_url, 2.0)):
        loaded = {"t": torch.zeros(1000)}
        dos.load(loaded, url)
        assert loaded["t"].unique().tolist() == [value]


def test_an_unseen_error_of_a_background_save_is_raised_by_the_next_one_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    url = memory_url()
    dos.save({"t": torch.ones(1)}, url)
    handle = dos.async_save({"t": torch.ones(1)}, url)
    assert handle._ended.wait(10)  # without asking for its outcome
    assert "failed" in caplog.text
    with pytest.raises(dos.CheckpointExistsError):
        dos.async_save({"t": torch.ones(1)}, memory_url())
    dos.async_save({"t": torch.ones(1)}, memory_url()).result(30)
    with pytest.raises(dos.CheckpointExistsError):
        handle.result()


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
def test_background_saves_keep_out_of_the_way_of_the_trainings_collectives(bucket: Bucket) -> None:
    results = run_ranks(4, background_beside_training, bucket.at("run"), bucket.storage_options)
    assert results == [[6.0] * 3] * 4
    for step in range(3):
        state = training(sharded=False)
        dos.load(state, bucket.at(f"run/step-{step}"), storage_options=bucket.storage_options)
        assert state["progress"]["step"] == step + 1


def test_the_interpreter_waits_for_the_last_background_save(tmp_path: Path) -> None:
    program = (
        "import torch, dcp_objstore as dos\n"
        f"dos.async_save({{'t': torch.ones(1 << 20)}}, 'file://{tmp_path}/ck')\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
    loaded = {"t": torch.zeros(1 << 20)}
    dos.load(loaded, f"file://{tmp_path}/ck")
    assert loaded["t"].sum() == 1 << 20
