"""`dos.save`, `dos.async_save`, `dos.load`: one line on every rank, one error on every rank."""

from __future__ import annotations

import os
import signal
import threading
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict_loader as dcp_loader
import torch.distributed.checkpoint.state_dict_saver as dcp_saver
import torch.distributed.checkpoint.storage as dcp_storage
from torch import nn
from torch.distributed.checkpoint import metadata as described
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.fsdp import fully_shard

import dcp_objstore as dos
from dcp_objstore.checkpoint.index import ObjectEntry
from dcp_objstore.observe.events import PartUploaded, RangeRead
from dcp_objstore.state.stored import StoredItem, StoredObject
from dcp_objstore.write import async_save as async_api
from dcp_objstore.write.results import WriteResults, build_index, planned_index
from tests.support.checkpoints import cause, memory_url
from tests.support.ranks import run_ranks, try_ranks

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


def resume_from_meta(rank: int, world: int, url: str, options: Options) -> list[float]:
    """As FSDP2 is made without memory for the whole model, with what the error says to do."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(24, 40), nn.Linear(40, 8))
    fully_shard(model)
    with pytest.raises(dos.errors.UnsupportedError, match="to_empty"):
        dos.load({"model": model}, url, storage_options=options)
    model.to_empty(device="cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    state = {"model": model, "optimizer": optimizer, "progress": {"step": 0}}
    dos.load(state, url, storage_options=options)
    return [advance(state) for _ in range(3)]


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


@pytest.mark.backends("seaweed")
def test_a_sharded_model_on_the_meta_device_is_refused_and_loads_once_it_has_memory(bucket):
    url, options = bucket.at("step-3"), bucket.storage_options
    _, expected = run_ranks(2, save_trained, url, options)[0]
    for losses in run_ranks(2, resume_from_meta, url, options):
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
def test_what_fails_on_one_rank_is_raised_on_every_rank_with_rank_and_key(bucket, how):
    outcomes = try_ranks(3, fails_on_one, bucket.at("step-1"), bucket.storage_options, how)
    kind = {"optimizer": dos.errors.StateMismatchError, "value": dos.errors.UnsupportedError}[how]
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
def test_when_a_rank_dies_the_others_raise_a_typed_error_and_nothing_is_visible(bucket):
    outcomes = try_ranks(3, one_rank_dies, bucket.at("step-1"), bucket.storage_options)
    assert outcomes[1].exit_signal == signal.SIGKILL
    for outcome in (outcomes[0], outcomes[2]):
        assert isinstance(outcome.error, dos.errors.RankFailedError), outcome
    assert "_COMMIT" not in bucket.keys("step-1")
    with pytest.raises(dos.errors.CheckpointNotFoundError):
        dos.load({"w": torch.zeros(4)}, bucket.at("step-1"), storage_options=bucket.storage_options)


class BreaksOnLoad:
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def state_dict(self) -> dict[str, int]:
        return {"a": 1}

    def load_state_dict(self, state: Any) -> None:
        if self.rank == 1:
            raise KeyError("not mine")


def load_breaks_on_one(rank: int, world: int, url: str, options: Options) -> None:
    dos.load({"own": BreaksOnLoad(rank)}, url, storage_options=options)


@pytest.mark.backends("seaweed")
def test_an_object_that_refuses_its_state_on_one_rank_fails_the_load_on_all(bucket):
    url, options = bucket.at("step-1"), bucket.storage_options
    dos.save({"own": BreaksOnLoad(0)}, url, storage_options=options)
    for outcome in try_ranks(3, load_breaks_on_one, url, options):
        assert type(outcome.error) is dos.errors.StateMismatchError, outcome
        assert outcome.error.rank == 1
        assert "KeyError" in str(outcome.error)


def save_to_own_url(rank: int, world: int, url: str, options: Options) -> None:
    dos.save({f"w{rank}": torch.ones(4)}, f"{url}-{rank // 2}", storage_options=options)


def load_own_url(rank: int, world: int, url: str, options: Options) -> None:
    dos.load({"w": torch.zeros(1)}, f"{url}-{rank // 2}", storage_options=options)


@pytest.mark.backends("seaweed")
def test_ranks_with_different_urls_are_refused_before_a_byte_moves(bucket):
    url, options = bucket.at("step"), bucket.storage_options
    for outcome in try_ranks(3, save_to_own_url, url, options):
        assert type(outcome.error) is dos.errors.InvalidUrlError, outcome
        assert f"rank 0 has {url}-0 and rank 2 {url}-1" in str(outcome.error)
    assert bucket.keys("step-0") == bucket.keys("step-1") == []
    for number in range(2):
        dos.save({"w": torch.ones(1)}, f"{url}-{number}", storage_options=options)
    for outcome in try_ranks(3, load_own_url, url, options):
        assert type(outcome.error) is dos.errors.InvalidUrlError, outcome


def dcp_save_to_own_url(rank: int, world: int, url: str) -> None:
    writer = dos.ObjectStoreWriter(f"{url}-{rank}", progress=False)
    dcp_saver.save({f"w{rank}": torch.ones(4)}, storage_writer=writer)


def test_writers_with_different_urls_commit_nothing_and_say_so(tmp_path):
    url = f"file://{tmp_path}/step"
    for outcome in try_ranks(2, dcp_save_to_own_url, url):
        assert isinstance(outcome.error, CheckpointException), outcome
        (refused,) = (failure[0] for failure in outcome.error.failures.values())
        assert type(refused) is dos.errors.InvalidUrlError
        assert f"rank 0 has {url}-0 and rank 1 {url}-1" in str(refused)
    assert not list(tmp_path.glob("*/_COMMIT"))


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


def load_wrong(rank: int, world: int, url: str, options: Options) -> None:
    key = "w" if rank != 2 else "weigth"
    dos.load({key: torch.zeros(4)}, url, storage_options=options)


@pytest.mark.backends("seaweed")
def test_a_missing_key_on_one_rank_is_named_on_all_with_the_nearest_names(bucket):
    url, options = bucket.at("step-1"), bucket.storage_options
    dos.save({"w": torch.ones(4), "weight": torch.ones(2)}, url, storage_options=options)
    for outcome in try_ranks(3, load_wrong, url, options):
        assert type(outcome.error) is dos.errors.StateMismatchError, outcome
        assert outcome.error.rank == 2
        assert "weigth: not in the checkpoint (nearest: weight" in str(outcome.error)


def test_wrong_shapes_and_kinds_are_all_listed_and_nothing_is_changed():
    url = memory_url()
    dos.save({"a": torch.ones(4), "b": torch.ones(2, 2), "n": 1}, url)
    state = {"a": torch.zeros(3), "b": 5, "n": torch.zeros(1)}
    with pytest.raises(dos.errors.StateMismatchError) as caught:
        dos.load(state, url)
    text = str(caught.value)
    assert "a: saved with shape (4,), the state has (3,)" in text
    assert "b: saved as a tensor" in text
    assert "n: saved as a plain value" in text
    assert torch.equal(state["a"], torch.zeros(3))


def test_a_key_that_was_saved_as_several_is_answered_with_those():
    url = memory_url()
    dos.save({"log": [{"loss": 1.0}]}, url)
    with pytest.raises(
        dos.errors.StateMismatchError, match=r"1 key:\n  log: .*nearest: log\.0\.loss"
    ):
        dos.load({"log": []}, url)


def partly_trained(steps: int) -> dict[str, Any]:
    torch.manual_seed(steps)
    unused = nn.Sequential(*(nn.Linear(3, 3) for _ in range(3)))
    model = nn.ModuleDict({"used": nn.Linear(3, 3), "unused": unused})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(steps):
        model["used"](torch.ones(1, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"train": {"model": model, "optimizers": [optimizer]}}


@pytest.mark.parametrize("steps", [0, 2])
def test_a_parameter_without_a_gradient_does_not_prevent_a_load(caplog, steps):
    url = memory_url()
    dos.save(partly_trained(5), url)
    state = partly_trained(steps)
    dos.load(state, url)
    counts = [float(s["step"]) for s in state["train"]["optimizers"][0].state.values()]
    assert counts == [5.0, 5.0]
    assert "no optimizer state for 6 parameters" in caplog.text
    first = "unused.0.bias, unused.0.weight, unused.1.bias, unused.1.weight, unused.2.bias"
    assert f"({first} and 1 more)" in caplog.text


def test_optimizer_state_is_not_left_out_for_a_parameter_that_the_checkpoint_lacks():
    url = memory_url()
    saved = partly_trained(2)
    saved["train"]["model"] = nn.ModuleDict({"other": saved["train"]["model"]})
    dos.save(saved, url)
    with pytest.raises(dos.errors.StateMismatchError, match=r"train\.model\.used\.weight"):
        dos.load(partly_trained(0), url)


def test_a_load_that_fails_leaves_a_fresh_optimizer_fresh():
    state = partly_trained(0)
    with pytest.raises(dos.errors.CheckpointNotFoundError):
        dos.load(state, memory_url())
    assert not state["train"]["optimizers"][0].state


def test_a_state_may_ask_for_less_than_was_saved():
    url = memory_url()
    dos.save({"model": {"a": torch.ones(4), "b": torch.ones(2)}, "step": 3}, url)
    state = {"model": {"b": torch.zeros(2)}}
    report = dos.load(state, url)
    assert torch.equal(state["model"]["b"], torch.ones(2))
    assert report.needed_bytes == 8


def test_the_checkpoint_is_named_by_a_str_not_by_a_path():
    for wrong in (Path("s3://bucket/x"), 5):
        with pytest.raises(dos.errors.InvalidUrlError, match="must be a str"):
            dos.save({"a": torch.ones(1)}, wrong)  # type: ignore[arg-type]


def test_torch_does_not_warn_of_a_missing_process_group(recwarn):
    url = memory_url()
    dos.save({"a": torch.ones(1)}, url)
    dos.load({"a": torch.zeros(1)}, url)
    assert [str(warning.message) for warning in recwarn] == []


def in_background(state: dict[str, Any], url: str, **settings: Any) -> None:
    dos.async_save(state, url, overwrite=True, **settings).result()


@pytest.mark.parametrize("call", [dos.save, in_background, dos.load])
def test_a_filter_of_warnings_that_is_set_during_a_call_stays(call):
    """Set by another thread: a save or load may run in another thread of the program."""
    url = memory_url()
    if call is not dos.save:
        dos.save({"a": torch.ones(1)}, url)

    def meanwhile(event: object) -> None:
        if isinstance(event, PartUploaded | RangeRead):
            warnings.filterwarnings("error", message="set meanwhile")

    with warnings.catch_warnings():
        call({"a": torch.ones(1)}, url, on_event=meanwhile)
        with pytest.raises(UserWarning, match="set meanwhile"):
            warnings.warn("set meanwhile", UserWarning, stacklevel=1)


# async_save -----------------------------------------------------------------------------------


def test_the_background_save_holds_the_state_as_it_was_when_it_was_called():
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


def test_a_second_save_waits_or_is_refused_and_never_mixes_with_the_first(monkeypatch):
    gate = Gate(monkeypatch)
    first_url, second_url = memory_url(), memory_url()
    state = {"t": torch.ones(1000)}
    first = dos.async_save(state, first_url)
    with pytest.raises(dos.errors.SaveInProgressError, match="still being saved"):
        dos.async_save(state, second_url, on_busy="raise")
    state["t"].fill_(2)
    threading.Timer(0.2, gate.open.set).start()
    second = dos.async_save(state, second_url)  # waits for the gate
    assert first.done()
    second.result(30)
    for url, value in ((first_url, 1.0), (second_url, 2.0)):
        loaded = {"t": torch.zeros(1000)}
        dos.load(loaded, url)
        assert loaded["t"].unique().tolist() == [value]


def test_an_unseen_error_of_a_background_save_is_raised_by_the_next_one_once(caplog):
    url = memory_url()
    dos.save({"t": torch.ones(1)}, url)
    handle = dos.async_save({"t": torch.ones(1)}, url)
    assert handle._ended.wait(10)  # without asking for its outcome
    assert "failed" in caplog.text
    with pytest.raises(dos.errors.CheckpointExistsError):
        dos.async_save({"t": torch.ones(1)}, memory_url())
    dos.async_save({"t": torch.ones(1)}, memory_url()).result(30)
    with pytest.raises(dos.errors.CheckpointExistsError):
        handle.result()


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
    gate = threading.Event()
    run_save = async_api.run_save

    def held(*args: Any) -> Any:
        report = run_save(*args)
        assert rank == 0 or gate.wait(30)
        return report

    async_api.run_save = held
    try:
        state = {"w": torch.ones(2)}
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
    finally:
        gate.set()
        async_api.run_save = run_save


@pytest.mark.backends("seaweed")
def test_a_save_is_refused_on_all_ranks_while_any_rank_is_busy(bucket):
    results = run_ranks(3, busy_on_one, bucket.at("s"), bucket.storage_options)
    assert results == [bucket.at("sb")] * 3


def late_peer(rank: int, world: int, url: str, options: Options) -> None:
    config = dos.TransferConfig(peer_timeout_seconds=2)
    state = {"w": torch.ones(2)}
    dist.barrier()  # or one that is late at the first save is given up there
    dos.async_save(state, url, storage_options=options, config=config).result(30)
    try:
        if rank == 0:
            dos.async_save(state, url + "b", storage_options=options, config=config)
    finally:
        dist.barrier()  # rank 1 stays away until rank 0 has given up


@pytest.mark.backends("seaweed")
def test_the_wait_for_a_rank_that_does_not_come_is_bounded_by_the_config(bucket):
    outcomes = try_ranks(2, late_peer, bucket.at("s"), bucket.storage_options)
    assert type(outcomes[0].error) is dos.errors.RankFailedError, outcomes[0]
    assert not outcomes[1].failed


def test_a_wrong_word_for_a_busy_writer_is_refused():
    with pytest.raises(dos.errors.ConfigError, match="on_busy"):
        dos.async_save({"t": torch.ones(1)}, memory_url(), on_busy="skip")  # type: ignore[arg-type]


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
    results = run_ranks(4, background_beside_training, bucket.at("run"), bucket.storage_options)
    assert results == [[6.0] * 3] * 4
    for step in range(3):
        state = training(sharded=False)
        dos.load(state, bucket.at(f"run/step-{step}"), storage_options=bucket.storage_options)
        assert state["progress"]["step"] == step + 1


def test_settings_and_metadata_of_the_wrong_kind_are_refused_before_anything_is_sent():
    url = memory_url()
    with pytest.raises(dos.errors.ConfigError, match="must be a TransferConfig, got dict"):
        dos.ObjectStoreWriter(url, config={"max_retries": 2})  # type: ignore[arg-type]
    with pytest.raises(dos.errors.ConfigError):
        dos.ObjectStoreWriter(url, user_metadata={"x": object()})


@pytest.mark.parametrize("count", [10, 100_000])
def test_a_tensor_whose_memory_was_freed_is_neither_saved_nor_loaded_into(count):
    url = memory_url()
    freed = torch.ones(count)
    dos.save({"w": freed}, url)
    freed.untyped_storage().resize_(0)
    for call in (lambda: dos.save({"w": freed}, url + "-2"), lambda: dos.load({"w": freed}, url)):
        with pytest.raises(dos.errors.UnsupportedError, match="freed"):
            call()
    with pytest.raises(dos.errors.CheckpointNotFoundError):
        dos.load({"w": torch.zeros(count)}, url + "-2")


def opens_another_commit(rank: int, world: int, api: str, url: str, options: Options) -> None:
    """Rank 1 opens the checkpoint only when it has been replaced."""
    read_metadata = dos.ObjectStoreReader.read_metadata

    def late(reader: dos.ObjectStoreReader, *args: Any, **kwargs: Any) -> Any:
        if rank == 0:
            opened = read_metadata(reader, *args, **kwargs)
            dist.barrier()
            return opened
        dist.barrier()  # rank 0 has opened the old one
        writer = dos.ObjectStoreWriter(url, storage_options=options, overwrite=True)
        dcp_saver.save({"w": torch.full((2,), 2.0)}, storage_writer=writer, no_dist=True)
        return read_metadata(reader, *args, **kwargs)

    dos.ObjectStoreReader.read_metadata = late  # type: ignore[method-assign]
    state = {"w": torch.zeros(2)}
    try:
        if api == "dos":  # each rank opens it, as with dcp.load
            dos.load(state, url, storage_options=options, read_once=False)
        else:
            reader = dos.ObjectStoreReader(url, storage_options=options)
            dcp_loader.load(state, storage_reader=reader)
    finally:
        dos.ObjectStoreReader.read_metadata = read_metadata  # type: ignore[method-assign]
        assert state["w"].tolist() == [0.0, 0.0]


@pytest.mark.backends("seaweed")
@pytest.mark.parametrize("api", ["dos", "dcp"])
def test_ranks_never_load_one_half_of_each_of_two_checkpoints(bucket, api):
    url, options = bucket.at("step-1"), bucket.storage_options
    dos.save({"w": torch.ones(2)}, url, storage_options=options)
    for outcome in try_ranks(2, opens_another_commit, api, url, options):
        error = outcome.error if api == "dos" else cause(outcome.error)
        assert type(error) is dos.errors.CheckpointGoneError, outcome


@pytest.mark.parametrize(
    ("dtypes", "error", "says"),
    [
        (["float32"], dos.errors.StateMismatchError, "only 4 of this tensor's 8 elements"),
        (["float16", "bfloat16"], dos.errors.UnsupportedError, "bfloat16, float16"),
    ],
)
def test_a_tensor_saved_in_part_or_in_parts_of_different_dtypes_is_refused(dtypes, error, says):
    stored = StoredObject(ObjectEntry("o", 100, None, b"d" * 16), 1, "memory://o")
    places = [4 * number for number in range(len(dtypes))]
    chunks = [described.ChunkStorageMetadata(torch.Size([at]), torch.Size([4])) for at in places]
    whole = described.TensorStorageMetadata(
        described.TensorProperties(), torch.Size([8]), chunks=chunks
    )
    results = [
        dcp_storage.WriteResult(
            described.MetadataIndex("g", (at,)),
            8,
            StoredItem(stored, 0, 8, 0, 8, b"d" * 16, False, dtype),
        )
        for at, dtype in zip(places, dtypes, strict=True)
    ]
    with pytest.raises(error, match=says):
        sent = [WriteResults(results).columns()]
        meta = described.StorageMeta()
        build_index(planned_index(described.Metadata({"g": whole})), sent, meta)
