"""What the hooks for Hugging Face do on a store; `tests/frameworks` has the libraries."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import dcp_objstore as dos
from dcp_objstore.errors import (
    CheckpointCorruptError,
    CheckpointExistsError,
    ConfigError,
    InvalidUrlError,
    StateMismatchError,
    UnsupportedError,
    UntrustedPickleError,
)
from dcp_objstore.integrations import hf
from dcp_objstore.integrations.hf import _TrainerRun, accelerator_state, with_object_store


@dataclass
class Counter:
    """An object that torch does not load unasked."""

    count: int


# --- files


def test_of_files_with_one_name_a_rank_reads_its_own_or_that_of_rank_0(tmp_path, monkeypatch):
    for rank, expected in enumerate([b"0", b"1", b"0"]):
        monkeypatch.setattr(hf, "rank_and_world_size", lambda rank=rank: (rank, 3))
        files: Any = [{"a/one": b"0"}, {"a/one": b"1", "a/two": b"2"}]
        hf._write_files(tmp_path, files, trust_pickle=False)
        assert hf._read_files(tmp_path) == {"a/one": expected, "a/two": b"2"}


def test_a_file_that_leads_out_of_the_folder_is_refused(tmp_path):
    for name in ("../harm", "a/../../harm", str(tmp_path / "harm")):
        with pytest.raises(CheckpointCorruptError, match="harm"):
            hf._write_files(tmp_path / "here", [{name: b"harm"}], trust_pickle=True)
        assert not [*tmp_path.rglob("harm")]


@pytest.mark.parametrize("values", [{"a": b"1", "b": 1}, [b"1"], 1])
def test_values_that_are_no_files_are_named_as_such(tmp_path, values):
    with pytest.raises(StateMismatchError, match="no files of accelerate"):
        hf._write_files(tmp_path, [values], trust_pickle=True)


@pytest.mark.parametrize(
    ("name", "is_unpickled"),
    [
        *[(name, True) for name in ("random_states_0.pkl", "rng_state_1.pth", "scheduler.pt")],
        *[(name, True) for name in ("sampler_1.bin", "dl_state_dict.bin", "scaler.pt")],
        *[(name, False) for name in ("scheduler.json", "my_scheduler.pt", "custom_0.pkl")],
    ],
)
def test_a_file_that_torch_will_unpickle_is_examined_unless_it_is_trusted(
    tmp_path, name, is_unpickled
):
    files = [{f"below/{name}": b"not a pickle of torch"}]
    hf._write_files(tmp_path, files, trust_pickle=True)
    if is_unpickled:
        with pytest.raises(UntrustedPickleError, match=f"files, below/{name}"):
            hf._write_files(tmp_path, files, trust_pickle=False)
    else:
        hf._write_files(tmp_path, files, trust_pickle=False)


# --- accelerate


class Accelerator:
    """One that saves a random state and an object of `register_for_checkpointing`."""

    def __init__(self, kind: str = "NO", custom: object = 1) -> None:
        self.distributed_type = SimpleNamespace(value=kind)
        models = [torch.nn.Linear(2, 1), torch.nn.Linear(1, 1)]
        self._models = models
        optimizers = [torch.optim.SGD(model.parameters(), 0.1, 0.9) for model in models]
        self._optimizers = [SimpleNamespace(optimizer=optimizer) for optimizer in optimizers]
        self.project_configuration = SimpleNamespace(automatic_checkpoint_naming=True)
        self.step, self.custom = 7, custom

    def save_state(self, folder: str) -> None:
        self.assert_bare()
        torch.save({"step": self.step}, Path(folder, "random_states_0.pkl"))
        torch.save(self.custom, Path(folder, "custom_checkpoint_0.pkl"))

    def load_state(self, folder: str) -> None:
        self.assert_bare()
        self.custom = torch.load(Path(folder, "custom_checkpoint_0.pkl"), weights_only=False)

    def assert_bare(self) -> None:
        assert self._models == self._optimizers == []
        assert not self.project_configuration.automatic_checkpoint_naming


@pytest.fixture
def accelerate(monkeypatch: pytest.MonkeyPatch) -> None:
    utils: Any = ModuleType("accelerate.utils")
    utils.load = torch.load
    monkeypatch.setitem(sys.modules, "accelerate", ModuleType("accelerate"))
    monkeypatch.setitem(sys.modules, "accelerate.utils", utils)


@pytest.mark.usefixtures("accelerate")
def test_an_accelerator_is_saved_as_tensors_and_files_and_loaded_again(tmp_path):
    url, saved, loaded = tmp_path.as_uri(), Accelerator(custom={"a": 1}), Accelerator()
    models, loaded.step = saved._models, 0
    state = accelerator_state(saved)
    assert [*state] == ["model", "model_1", "optimizer", "optimizer_1", "files"]
    assert state["optimizer_1"] is saved._optimizers[1].optimizer
    dos.save(state, url, progress=False)
    assert (saved._models, len(saved._optimizers)) == (models, 2)
    assert saved.project_configuration.automatic_checkpoint_naming
    dos.load(accelerator_state(loaded), url, progress=False)
    assert torch.equal(loaded._models[1].weight, models[1].weight)
    assert (loaded.step, loaded.custom) == (7, {"a": 1})
    without = {name: value for name, value in state.items() if name != "files"}
    dos.save(without, url, overwrite=True, progress=False)
    loaded.step = 3
    dos.load(accelerator_state(loaded), url, strict=False, progress=False)
    assert loaded.step == 3, "there was nothing for accelerate to load"


@pytest.mark.usefixtures("accelerate")
@pytest.mark.parametrize("trusts", [False, True])
def test_a_custom_object_runs_no_code_unless_it_is_trusted(tmp_path, trusts):
    saved, loaded = Accelerator(custom=Counter(2)), Accelerator()
    dos.save(accelerator_state(saved), tmp_path.as_uri(), progress=False)
    state = accelerator_state(loaded, trust_pickle=trusts)
    if trusts:
        dos.load(state, tmp_path.as_uri(), progress=False)
        assert loaded.custom == Counter(2)
    else:
        with pytest.raises(UntrustedPickleError, match="files, custom_checkpoint_0"):
            dos.load(state, tmp_path.as_uri(), progress=False)


@pytest.mark.parametrize("kind", ["DEEPSPEED", "MEGATRON_LM", "XLA"])
def test_an_accelerator_that_saves_in_its_own_way_is_refused(kind):
    with pytest.raises(UnsupportedError, match=kind):
        accelerator_state(Accelerator(kind))


# --- the Trainer


@pytest.mark.parametrize(
    ("limit", "best", "kept"),
    [
        (1, None, {4}),
        (1, 2, {2, 4}),
        (2, None, {3, 4}),
        (2, 3, {3, 4}),
        (2, 1, {1, 4}),
        (3, 1, {1, 3, 4}),
    ],
)
def test_the_limit_counts_the_best_step_and_always_keeps_the_newest(limit, best, kept):
    metrics = {} if best is None else {"best_step": best}
    steps = [dos.StepFacts(step=number, metrics={"best_step": 2}) for number in (1, 2, 3)]
    steps.insert(1, dos.StepFacts(step=4, metrics=metrics))
    assert hf._SaveTotalLimit(limit).keeps(steps) == kept


class State(SimpleNamespace):
    def save_to_json(self, path: str) -> None:
        Path(path).write_text(json.dumps(vars(self)))


class Trainer:
    """What the hooks override and use of a Trainer. It saves after each step of `train`."""

    is_deepspeed_enabled = is_fsdp_xla_enabled = False
    processing_class = None

    def __init__(self, last: int = 0, **args: Any) -> None:
        self.args = SimpleNamespace(
            output_dir="out",
            push_to_hub=False,
            hub_strategy=SimpleNamespace(value="every_save"),
            save_total_limit=None,
            should_save=True,
            save_only_model=False,
        )
        vars(self.args).update(args)
        self.last, self.calls = last, []
        self.callbacks: list[Any] = []
        self.model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.optimizer = SimpleNamespace(optimizer=optimizer)  # as accelerate wraps it
        self.lr_scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        self.control = SimpleNamespace(should_save=False, should_training_stop=False)
        self.state = State(
            global_step=0, best_global_step=None, best_model_checkpoint=None, log_history=[]
        )

    def add_callback(self, callback: Any) -> None:
        self.callbacks.append(callback)

    def train(
        self, resume_from_checkpoint: Any = None, trial: Any = None, ignore_keys_for_eval: Any = ()
    ) -> Any:
        if resume_from_checkpoint is not None:
            self._load_from_checkpoint(resume_from_checkpoint)
            folder = Path(resume_from_checkpoint)
            if (folder / "trainer_state.json").exists():
                vars(self.state).update(json.loads((folder / "trainer_state.json").read_text()))
            self._load_optimizer_and_scheduler(resume_from_checkpoint)
        while self.state.global_step < self.last and not self.control.should_training_stop:
            self.model(torch.ones(2)).sum().backward()
            self.optimizer.optimizer.step()
            self.lr_scheduler.step()
            self.state.global_step += 1
            entry = {"loss": 1.5, "text": "a"}
            self.state.log_history.append({"step": self.state.global_step, **entry})
            for callback in self.callbacks:
                callback.on_step_end(self.args, self.state, self.control)
            self._save_checkpoint(self.model, trial)
        return resume_from_checkpoint, ignore_keys_for_eval

    def _get_output_dir(self, trial: Any) -> str:
        return str(self.args.output_dir)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        folder = Path(self._get_output_dir(trial), f"checkpoint-{self.state.global_step}")
        self.save_model(str(folder), _internal_call=True)
        if not self.args.save_only_model:
            self._save_optimizer_and_scheduler(str(folder))
        self.state.save_to_json(str(folder / "trainer_state.json"))

    def save_model(self, output_dir: Any = None, _internal_call: bool = False) -> None:
        self.calls.append(("save_model", output_dir, _internal_call))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        raise NotImplementedError

    def _load_from_checkpoint(self, folder: str, model: Any = None) -> None:
        self.calls.append(("load", folder))

    def _load_optimizer_and_scheduler(self, folder: Any) -> None:
        self.calls.append(("load optimizer", folder))

    def _load_best_model(self) -> None:
        self.calls.append("load best")


@pytest.fixture(autouse=True)
def transformers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder in which the trainers work, where no checkpoint may be left."""
    module: Any = ModuleType("transformers")
    module.TrainerCallback = object
    monkeypatch.setitem(sys.modules, "transformers", module)
    monkeypatch.delitem(sys.modules, "peft", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def momentum(trainer: Any) -> list[Any]:
    return [state["momentum_buffer"] for state in trainer.optimizer.optimizer.state.values()]


def test_a_trainer_goes_on_where_the_run_ended(tmp_path):
    url, first, second = f"{tmp_path.as_uri()}/run", Trainer(last=3), Trainer(last=3)
    assert with_object_store(first, url).train(ignore_keys_for_eval=["a"]) == (None, ["a"])
    assert [step.name for step in dos.steps(url)] == ["step-1", "step-2", "step-3"]
    (step,) = [step for step in dos.steps(url) if step.name == "step-3"]
    assert step.user_metadata["metrics"] == {"loss": 1.5}
    assert {"model.weight", "files.0"} <= {*dos.open(f"{url}/step-3")}
    resumed, _ = with_object_store(second, url).train(resume_from_checkpoint=True)
    assert not Path(resumed).exists()
    assert second.run.last_resume.step == 3
    assert second.calls == []
    assert torch.equal(second.model.weight, first.model.weight)
    assert all(map(torch.equal, momentum(second), momentum(first)))
    assert second.lr_scheduler.last_epoch == 3
    assert not Path("out").exists()
    with pytest.raises(CheckpointExistsError, match="step 3 already"):
        with_object_store(Trainer(last=1), url).train()
    with pytest.raises(UnsupportedError, match="trials"):
        first.train(trial={})


def test_a_url_resumes_this_run_or_starts_from_another(tmp_path):
    one, other = (f"{tmp_path.as_uri()}/{name}" for name in ("one", "other"))
    with_object_store(Trainer(last=3), one).train()
    with_object_store(Trainer(last=3), other).train(resume_from_checkpoint=f"{one}/step-2")
    assert [step.name for step in dos.steps(other)] == ["step-3"]
    with_object_store(Trainer(last=2), one).train(resume_from_checkpoint=f"{one}/step-1")
    assert [step.name for step in dos.steps(one)] == ["step-1", "step-2"]  # 3 stopped counting
    weights = with_object_store(Trainer(last=1, save_only_model=True), f"{one}-weights")
    weights.train()
    assert not [key for key in dos.open(f"{one}-weights/step-1") if "optimizer" in key]
    with pytest.raises(StateMismatchError, match="save_only_model") as caught:
        weights.train(resume_from_checkpoint=True)
    assert caught.value.url == f"{one}-weights/step-1"


def test_a_local_folder_is_resumed_by_the_trainer_itself(tmp_path, caplog):
    url, trainer = f"{tmp_path.as_uri()}/run", Trainer()
    with_object_store(trainer, url)
    assert trainer.train(resume_from_checkpoint=True) == (None, None)
    assert "no step to resume from" in caplog.text
    assert trainer.train(resume_from_checkpoint="here") == ("here", None)
    trainer.save_model("model")
    assert trainer._get_output_dir(None) == "out"
    trainer.state.best_model_checkpoint = "here"
    trainer._load_best_model()
    assert trainer.calls == [
        ("load", "here"),
        ("load optimizer", "here"),
        ("save_model", "model", False),
        "load best",
    ]


def test_the_best_step_is_named_in_the_run_and_loaded_at_the_end(tmp_path):
    class Best(Trainer):
        def _save_checkpoint(self, model: Any, trial: Any) -> None:
            if self.state.global_step == 2:
                self.state.best_global_step = 2
            super()._save_checkpoint(model, trial)

    url, trainer = f"{tmp_path.as_uri()}/run", Best(last=2)
    with_object_store(trainer, url).train()
    best = trainer.model.weight.detach().clone()
    trainer.last = 4
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.best_model_checkpoint == f"{url}/step-2"
    found = {step.name: step.user_metadata["metrics"].get("best_step") for step in dos.steps(url)}
    assert found == {"step-1": None, "step-2": 2, "step-3": 2, "step-4": 2}
    assert not torch.equal(trainer.model.weight, best)
    trainer._load_best_model()
    assert torch.equal(trainer.model.weight, best)


def test_the_last_step_and_the_best_wait_for_the_save_under_way(tmp_path, monkeypatch):
    on_busy: list[Any] = []
    save = dos.CheckpointManager.async_save

    def noted(self: Any, *args: Any, **settings: Any) -> Any:
        on_busy.append(settings["on_busy"])
        return save(self, *args, **settings)

    class Stopped(Trainer):
        def _save_checkpoint(self, model: Any, trial: Any) -> None:
            self.state.best_global_step = 2
            self.control.should_training_stop = self.state.global_step == 3
            super()._save_checkpoint(model, trial)

    monkeypatch.setattr(dos.CheckpointManager, "async_save", noted)
    trainer = with_object_store(Stopped(last=9), f"{tmp_path.as_uri()}/run", background=True)
    trainer.train()
    assert on_busy == [None, "wait", "wait"]
    assert len(dos.steps(f"{tmp_path.as_uri()}/run")) == 3


@pytest.mark.parametrize("preempted", [False, True])
def test_a_preemption_saves_and_stops_after_the_step(tmp_path, preempted):
    trainer = with_object_store(Trainer(last=3), tmp_path.joinpath("run").as_uri())
    trainer.control.should_save = False
    run = trainer._object_store
    run.manager = SimpleNamespace(step=lambda *_: None, preempted=lambda: preempted)
    (callback,) = trainer.callbacks
    callback.on_step_end(trainer.args, trainer.state, trainer.control)
    control = trainer.control
    assert (control.should_save, control.should_training_stop) == (preempted, preempted)


@pytest.mark.parametrize(
    ("limit", "options", "keep"),
    [
        (None, {}, None),
        (0, {}, None),
        (-1, {}, None),
        (1, {}, hf._SaveTotalLimit(1)),
        (3, {"keep": dos.KeepLatest(2)}, dos.KeepLatest(2)),
    ],
)
def test_the_trainer_says_when_to_save_and_how_many_steps_to_keep(tmp_path, limit, options, keep):
    run = _TrainerRun(Trainer(save_total_limit=limit), tmp_path.as_uri(), False, options)
    assert run._options["keep"] == keep
    assert run._options["preemption"].save is False
    assert run._options["save_last"] is False
    with pytest.raises(ConfigError, match="no save_every and no save_last"):
        _TrainerRun(Trainer(), tmp_path.as_uri(), False, {"save_every": 1, "save_last": True})


@pytest.mark.parametrize(
    ("trainer", "url", "error", "said"),
    [
        (Trainer(), "s4://bucket/run", InvalidUrlError, "s4"),
        (object(), "memory://run", ConfigError, "has no 'train'"),
        (Trainer(output_dir="s3://bucket/run"), "memory://run", ConfigError, "local folder"),
        (Trainer(push_to_hub=True), "memory://run", ConfigError, "hub_strategy"),
    ],
)
def test_a_trainer_that_cannot_keep_its_run_on_a_store_is_refused(trainer, url, error, said):
    with pytest.raises(error, match=said):
        with_object_store(trainer, url)


def test_trainers_of_other_libraries_and_a_second_run_are_refused():
    for name in ("is_deepspeed_enabled", "is_fsdp_xla_enabled"):
        trainer: Any = Trainer()
        setattr(trainer, name, True)
        with pytest.raises(UnsupportedError, match="DeepSpeed"):
            with_object_store(trainer, "memory://run")
    hub = SimpleNamespace(value="end")
    trainer = with_object_store(Trainer(push_to_hub=True, hub_strategy=hub), "memory://run")
    assert type(trainer).__name__ == "Trainer"
    with pytest.raises(ConfigError, match="already"):
        with_object_store(trainer, "memory://run")
