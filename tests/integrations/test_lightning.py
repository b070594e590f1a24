"""What the hooks for Lightning do on a store; `tests/frameworks` has Lightning itself."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import dcp_objstore as dos
from dcp_objstore.checkpoint import commit as commits
from dcp_objstore.checkpoint.names import is_index_key
from dcp_objstore.errors import (
    CheckpointNotFoundError,
    ConfigError,
    StateMismatchError,
    UnsupportedError,
    UntrustedPickleError,
)
from dcp_objstore.integrations import lightning
from dcp_objstore.integrations.lightning import _ObjectStore, _url, with_object_store
from dcp_objstore.run.housekeeping import Deletions

INDEX = "index.0123456789abcdef.msgpack"


class Fabrics:
    """A strategy of Fabric, as the hooks see it. Its own methods note their arguments."""

    is_global_zero = True

    def __init__(self, **attributes: Any) -> None:
        self.model, self.optimizers = model_and_optimizer()
        self.calls: list[Any] = []
        vars(self).update(attributes)

    def broadcast(self, path: Any) -> Any:
        return path

    def save_checkpoint(self, *args: Any) -> None:
        self.calls.append(args)

    def load_checkpoint(self, *args: Any, **options: Any) -> Any:
        self.calls.append((*args, options))
        return {"its": "own"}


class Trainers(Fabrics):
    """A strategy of a Trainer."""

    def setup(self, trainer: Any) -> None:
        self.calls.append(trainer)

    def remove_checkpoint(self, path: Any) -> None:
        self.calls.append(path)

    def teardown(self) -> None:
        self.calls.append("teardown")


class ModelParallelStrategy(Trainers): ...


class FSDPStrategy(Trainers): ...


class FabricStrategy(Fabrics): ...


FabricStrategy.__name__ = "ModelParallelStrategy"


class ModelCheckpoint:
    def __init__(self, dirpath: Any) -> None:
        self.dirpath = dirpath

    def file_exists(self, filepath: Any, trainer: Any) -> bool:
        return True

    def _find_last_checkpoints(self, trainer: Any) -> set[str]:
        return {"its own"}

    def _should_remove_checkpoint(self, trainer: Any, previous: str, current: str) -> bool:
        return previous != current


@dataclass
class Width:
    """A hyperparameter that torch does not load unasked."""

    number: int


def model_and_optimizer() -> tuple[torch.nn.Module, list[torch.optim.Optimizer]]:
    model = torch.nn.Linear(2, 1)
    return model, [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)]


def trainer_with(strategy: Any, *callbacks: Any, fn: str = "fit", **settings: Any) -> Any:
    trainer = SimpleNamespace(
        strategy=strategy,
        checkpoint_callbacks=[*callbacks],
        state=SimpleNamespace(fn=fn),
        loggers=[],
        ckpt_path=None,
    )
    strategy.lightning_module = SimpleNamespace(trainer=trainer, strict_loading=True)
    return with_object_store(trainer, **settings)


def checkpoint_of(strategy: Any, **others: Any) -> dict[str, Any]:
    """What Lightning hands to a strategy to save, after one step."""
    (optimizer,) = strategy.optimizers
    strategy.model(torch.ones(2)).sum().backward()
    optimizer.step()
    return {
        "state_dict": strategy.model.state_dict(),
        "optimizer_states": [get_optimizer_state_dict(strategy.model, optimizer)],
        **others,
    }


@pytest.mark.parametrize(
    ("path", "url"),
    [
        ("s3://bucket/run/a.ckpt/", "s3://bucket/run/a.ckpt"),
        (Path("/home/s3:/bucket/run"), "s3://bucket/run"),
        ("s3://bucket/a.ckpt/_COMMIT", "s3://bucket/a.ckpt"),
        (f"s3://bucket/a.ckpt/{INDEX}", "s3://bucket/a.ckpt"),
        ("/home/run", None),
        (None, None),
    ],
)
def test_a_path_stands_for_the_url_of_its_checkpoint(path, url):
    assert _url(path) == url


@pytest.mark.parametrize(
    ("target", "settings", "error", "said"),
    [
        (object(), {}, ConfigError, "Trainer or Fabric"),
        (SimpleNamespace(strategy=Trainers()), {}, UnsupportedError, "Trainers saves no sharded"),
        (SimpleNamespace(strategy=FSDPStrategy(_state_dict_type="full")), {}, ConfigError, "full"),
        (
            SimpleNamespace(strategy=FabricStrategy(_save_distributed_checkpoint=False)),
            {},
            ConfigError,
            "full",
        ),
        (SimpleNamespace(strategy=FSDPStrategy()), {"config": 3}, ConfigError, "TransferConfig"),
        (SimpleNamespace(strategy=FSDPStrategy()), {"local": "s3://b"}, ConfigError, "local"),
        (SimpleNamespace(strategy=FSDPStrategy()), {"grace_seconds": -1}, ConfigError, "grace"),
    ],
)
def test_what_cannot_keep_its_checkpoints_on_a_store_is_refused(target, settings, error, said):
    with pytest.raises(error, match=said):
        with_object_store(target, **settings)


@pytest.mark.parametrize(
    ("kind", "key"), [(ModelParallelStrategy, "state_dict"), (FSDPStrategy, "model")]
)
def test_a_trainers_checkpoint_has_lightnings_keys_and_a_fit_loads_all(bucket, kind, key):
    url, access = bucket.at("a.ckpt"), {"storage_options": bucket.storage_options}
    saving, events = kind(), []
    trainer_with(saving, on_event=events.append, **access)
    others = {"epoch": 3, "global_step": 7, "loops": {"n": 1}}
    saving.save_checkpoint(checkpoint_of(saving, **others), url)
    saved = dos.open(url, **access)
    assert saved.user_metadata == {"epoch": 3, "global_step": 7}
    assert {"meta.pt", f"{key}.weight", "optimizer_0.state.weight.momentum_buffer"} <= {*saved}
    for fn, is_stepped in (("validate", False), ("fit", True)):
        loading = kind()
        trainer_with(loading, fn=fn, on_event=events.append, **access)
        assert loading.load_checkpoint(url) == others
        assert torch.equal(loading.model.weight, saving.model.weight)
        assert bool(loading.optimizers[0].state) is is_stepped
    assert saving.calls == loading.calls == []
    assert {"Saved", "Loaded"} <= {type(event).__name__ for event in events}


def test_a_trainer_finds_the_last_checkpoint_that_it_can_resume_from(bucket):
    access: Any = {"storage_options": bucket.storage_options}
    strategy, callback = ModelParallelStrategy(), ModelCheckpoint(bucket.at("checkpoints"))
    trainer = trainer_with(strategy, callback, sweep=False, **access)
    assert callback._find_last_checkpoints(trainer) == set()
    strategy.save_checkpoint(checkpoint_of(strategy), bucket.at("checkpoints/all.ckpt"))
    weights = {"state_dict": strategy.model.state_dict(), "epoch": 1}
    strategy.save_checkpoint(weights, bucket.at("checkpoints/weights.ckpt"))
    newest = dos.open(bucket.at("checkpoints/weights.ckpt"), **access)
    assert newest.user_metadata == {"epoch": 1, "weights_only": True}
    trainer.default_root_dir = bucket.url
    for dirpath, loggers, is_ours in [
        (callback.dirpath, [], True),
        (callback.dirpath, ["a logger"], True),
        (None, [], True),
        (None, ["a logger"], False),
        ("/home/run", [], False),
    ]:
        callback.dirpath, trainer.loggers = dirpath, loggers
        (found,) = callback._find_last_checkpoints(trainer)
        assert found != "its own" if is_ours else found == "its own"
        assert not is_ours or _url(found) == bucket.at("checkpoints/all.ckpt")
    for name, exists in (("all.ckpt", True), ("none.ckpt", False)):
        assert callback.file_exists(bucket.at(f"checkpoints/{name}"), trainer) is exists


def test_local_paths_and_what_lightning_refuses_go_to_its_own_methods(tmp_path):
    strategy, callback = ModelParallelStrategy(), ModelCheckpoint(tmp_path)
    trainer, path, url = trainer_with(strategy), tmp_path / "a.ckpt", f"{tmp_path.as_uri()}/a.ckpt"
    trainer.checkpoint_callbacks.append(callback)
    strategy.setup(trainer)
    strategy.save_checkpoint({"a": 1}, path)
    strategy.save_checkpoint({"a": 1}, url, {"anon": True})
    assert strategy.load_checkpoint(path, weights_only=True) == {"its": "own"}
    strategy.remove_checkpoint(path)
    assert strategy.calls == [
        trainer,
        ({"a": 1}, path, None),
        ({"a": 1}, url, {"anon": True}),
        (path, {"weights_only": True}),
        path,
    ]
    assert callback.file_exists(path, trainer)
    assert not callback.file_exists(url, trainer), "the callback was hooked by setup"
    fabric = FabricStrategy()
    with_object_store(SimpleNamespace(strategy=fabric))
    fabric.save_checkpoint(path, {"a": 1})
    fabric.save_checkpoint(url, {"a": 1}, {"anon": True})
    fabric.save_checkpoint(url, {"a": 1}, filter={"a": bool})
    assert fabric.load_checkpoint(path, {"a": 1}, strict=False, weights_only=True)
    assert fabric.calls == [
        (path, {"a": 1}, None, None),
        (url, {"a": 1}, {"anon": True}, None),
        (url, {"a": 1}, None, {"a": bool}),
        (path, {"a": 1}, False, {"weights_only": True}),
    ]


def test_a_checkpoint_is_kept_that_is_pinned_or_that_the_job_resumed_from(bucket, caplog):
    caplog.set_level(logging.INFO, "dcp_objstore")
    strategy, callback = ModelParallelStrategy(), ModelCheckpoint(bucket.url)
    access: Any = {"storage_options": bucket.storage_options}
    trainer = trainer_with(strategy, callback, sweep=False, **access)
    urls = {name: bucket.at(f"{name}.ckpt") for name in ("first", "pinned", "newest")}
    for url in urls.values():
        strategy.save_checkpoint(checkpoint_of(strategy), url)
    dos.pin(urls["pinned"], "paper", **access)

    def remove(*names: str) -> set[str]:
        for name in names:
            strategy.remove_checkpoint(bucket.at(f"{name}.ckpt"))
        return {name for name, url in urls.items() if callback.file_exists(url, trainer)}

    strategy.is_global_zero = False
    assert remove(*urls) == set(urls)
    strategy.is_global_zero = True
    assert remove("first", "pinned", "newest", "none") == {"pinned"}
    assert "pinned" in caplog.text
    assert not [record for record in caplog.records if record.levelno > logging.INFO]
    strategy.remove_checkpoint("s4://bucket/run")
    strategy.teardown()
    assert "s4://bucket/run was not deleted" in caplog.text
    for resumed, is_removed in ((None, True), (urls["first"], False), (urls["newest"], True)):
        trainer.ckpt_path = resumed
        assert callback._should_remove_checkpoint(trainer, urls["first"], "other") is is_removed
    assert not callback._should_remove_checkpoint(trainer, "/home/a", "/home/a")


def test_a_run_is_swept_by_rank_0_if_it_is_the_folder_of_a_callback(tmp_path, monkeypatch):
    swept: list[Any] = []
    monkeypatch.setattr(lightning, "Retainer", lambda run: SimpleNamespace(sweep=[run.url]))
    monkeypatch.setattr(lightning, "after_commit", lambda *args: swept.append(args))
    url = f"{tmp_path.as_uri()}/a.ckpt"
    for dirpath, settings, rank, is_swept in [
        (tmp_path.as_uri(), {}, 0, True),
        (tmp_path.as_uri(), {"sweep": False}, 0, False),
        (f"{tmp_path.as_uri()}/other", {}, 0, False),
        (tmp_path.as_uri(), {}, 1, False),
    ]:
        monkeypatch.setattr(lightning, "current_rank", lambda rank=rank: rank)
        strategy = ModelParallelStrategy()
        trainer_with(strategy, ModelCheckpoint(dirpath), object(), **settings)
        for _ in range(2):
            strategy.save_checkpoint(checkpoint_of(strategy), url)
        assert swept == [(None, [tmp_path.as_uri()])] * 2 * is_swept
        assert not is_swept or swept[0][1] is swept[1][1], "an hour passes between two sweeps"
        swept.clear()
    strategy.lightning_module.strict_loading = False
    with pytest.raises(StateMismatchError, match="Lightning did not save"):  # rank 1 alone did
        strategy.load_checkpoint(url)


def test_the_error_of_a_save_in_the_background_is_raised_when_it_is_waited_for(monkeypatch):
    class Lost:
        def result(self) -> None:
            raise CheckpointNotFoundError("lost")

    monkeypatch.setattr(lightning, "async_save", lambda *_, **__: Lost())
    strategy = ModelParallelStrategy()
    trainer_with(strategy, background=True)
    for wait in (strategy.teardown, lambda: strategy.load_checkpoint("memory://run/a.ckpt")):
        strategy.save_checkpoint(checkpoint_of(strategy), "memory://run/a.ckpt")
        with pytest.raises(CheckpointNotFoundError, match="lost"):
            wait()
    strategy.teardown()
    assert strategy.calls == ["teardown"] * 2, "Lightning's own has run after the error, too"


def test_calls_wait_for_deletions_under_way(monkeypatch, tmp_path):
    joined: list[int] = []
    deletion = SimpleNamespace(join=lambda: joined.append(1))
    monkeypatch.setattr(lightning, "after_commit", lambda *_: deletion)
    url, strategy, callback = tmp_path.as_uri(), ModelParallelStrategy(), ModelCheckpoint(None)
    trainer = trainer_with(strategy, callback)
    calls = [
        lambda: strategy.save_checkpoint(checkpoint_of(strategy), url),
        lambda: strategy.load_checkpoint(url),
        lambda: callback.file_exists(url, trainer),
        strategy.teardown,
    ]
    for call in calls:
        strategy.remove_checkpoint(url)
        strategy.remove_checkpoint(url)
        call()
        assert joined == [1, 1]
        joined.clear()


@pytest.mark.filterwarnings("ignore:a load of")
@pytest.mark.parametrize(
    ("settings", "weights_only", "loads"),
    [({}, None, False), ({}, True, False), ({}, False, True), ({"trust_pickle": True}, None, True)],
)
def test_a_hyperparameter_that_runs_code_needs_trust(tmp_path, settings, weights_only, loads):
    url, others = f"{tmp_path.as_uri()}/a.ckpt", {"hyper_parameters": Width(3)}
    strategy = ModelParallelStrategy()
    trainer_with(strategy, **settings)
    if loads:
        strategy.optimizers[0].param_groups[0]["width"] = Width(2)
    strategy.save_checkpoint(checkpoint_of(strategy, **others), url)
    if loads:
        assert strategy.load_checkpoint(url, weights_only=weights_only) == others
    else:
        with pytest.raises(UntrustedPickleError, match=r"meta\.pt"):
            strategy.load_checkpoint(url, weights_only=weights_only)


def test_fabric_loads_what_its_state_asks_for_and_returns_the_rest(tmp_path):
    url, fabric = f"{tmp_path.as_uri()}/a.ckpt", FabricStrategy()
    target = SimpleNamespace(strategy=fabric)
    assert with_object_store(target) is target

    def state(step: int) -> dict[str, Any]:
        model, (optimizer,) = model_and_optimizer()
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step)
        return {"net": model, "optimizer": optimizer, "schedule": schedule, "step": step}

    saved, loaded = state(5), state(6)
    fabric.save_checkpoint(url, {**saved, "note": {1: "one"}})
    schedule = loaded["schedule"]
    assert fabric.load_checkpoint(url, loaded) == {"note": {1: "one"}}
    assert torch.equal(loaded["net"].weight, saved["net"].weight)
    assert (loaded["schedule"], schedule.step_size, loaded["step"]) == (schedule, 5, 5)
    with pytest.raises(StateMismatchError, match="does not have a, b, which"):
        fabric.load_checkpoint(url, {"net": loaded["net"], "b": 1, "a": 2})
    asking = {"net": loaded["net"], "b": 1, "step": 0}
    rest = fabric.load_checkpoint(url, asking, strict=False)
    assert (asking["b"], asking["step"], sorted(rest)) == (1, 5, ["note", "schedule"])
    for no_state in (None, loaded["net"]):
        with pytest.raises(ConfigError, match="into a state"):
            fabric.load_checkpoint(url, no_state)
    with pytest.raises(CheckpointNotFoundError):
        fabric.load_checkpoint(f"{tmp_path.as_uri()}/none.ckpt", loaded)
    assert fabric.calls == []


def test_last_is_what_was_committed_last_whatever_the_clocks_of_the_hosts(
    tmp_path, monkeypatch, requests
):
    run, first, second = tmp_path.as_uri(), "z-step=100.ckpt", "a-step=200.ckpt"
    dos.save({"w": torch.zeros(1)}, f"{run}/{first}", progress=False)

    class Behind(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return datetime.now(tz) - timedelta(minutes=10)

    monkeypatch.setattr(commits, "datetime", Behind)
    dos.save({"w": torch.ones(1)}, f"{run}/{second}", progress=False)
    dos.pin(f"{run}/{first}", "paper")  # which writes its marker later than the other's
    store = _ObjectStore(
        background=False,
        deletions=Deletions(0),
        sweep=False,
        trust_pickle=False,
        access={"storage_options": None, "config": None},
        on_event=None,
    )
    requests.clear()
    last = store.newest(run)
    assert [one.verb for one in requests].count("list") == 1
    assert _url(last) == f"{run}/{second}"
    # Lightning compares the times of such objects where several callbacks have a last one.
    assert is_index_key(last.rpartition("/")[2])
    assert store.newest(f"{run}/nothing") is None
