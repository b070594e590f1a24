"""Hugging Face: accelerate's `Accelerator` as a state, and a Trainer whose run is on a bucket.

Models and optimizers are saved as tensors, each rank its shards, under keys that do not depend on
how they were wrapped. The other files of a Hugging Face checkpoint (schedulers, random states,
samplers, the scaler, `trainer_state.json`, ...) are small. Each rank lets the framework write them
to a temporary folder, and they become one value of the same checkpoint: `files.<rank>`, a tuple
with a dict of relative paths to bytes. A load puts the files of all ranks into a temporary folder
for the framework to read.

Neither `accelerate` nor `transformers` is imported before one of their objects is passed.
"""

from __future__ import annotations

import inspect
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import torch

from dcp_objstore.compat.values import check_safe, check_vetted, unpickled
from dcp_objstore.contexts import contextmanager
from dcp_objstore.distributed.ranks import rank_and_world_size
from dcp_objstore.errors import (
    CheckpointCorruptError,
    CheckpointExistsError,
    ConfigError,
    StateMismatchError,
    UnsupportedError,
)
from dcp_objstore.integrations.peft import is_peft, peft_state
from dcp_objstore.observe.report import logger
from dcp_objstore.read.api import load
from dcp_objstore.run.manager import CheckpointManager
from dcp_objstore.run.preemption import BY_SIGTERM, Preemption
from dcp_objstore.run.retention import KeepLatest, RetentionPolicy, StepFacts
from dcp_objstore.run.saves import Busy
from dcp_objstore.run.steps import step_number, step_url
from dcp_objstore.state.per_rank import PerRank, own_name
from dcp_objstore.stores import StoreSpec
from dcp_objstore.write.async_save import AsyncSaveHandle

T = TypeVar("T")

_TRAINER_STATE = "trainer_state.json"
_SCHEDULER = "scheduler.pt"
# Arguments of `CheckpointManager` by which it would save; here only the Trainer does.
_REFUSED_OPTIONS = ("save_every", "save_last")
# The names of files that accelerate and the Trainer unpickle, by `torch.load(weights_only=True)`.
_UNPICKLED = re.compile(
    r"(random_states|rng_state|scheduler|sampler|dl_state_dict|scaler)[^/]*\.(pt|pth|bin|pkl)"
)
_WITH_OWN_CHECKPOINTS = ("DEEPSPEED", "MEGATRON_LM", "XLA")


def _read_files(folder: Path) -> dict[str, bytes]:
    """Return all files of a folder, by their relative paths."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def _write_files(
    folder: Path, of_ranks: Sequence[Mapping[str, bytes]], *, trust_pickle: bool
) -> None:
    """Write the files of all ranks. If two have one name, this rank's counts, then rank 0's.

    Raises:
        StateMismatchError: the values are not files.
        CheckpointCorruptError: a name leads out of the folder.
        UntrustedPickleError: a file that torch is to unpickle is not what `torch.save` writes.
    """
    rank, _ = rank_and_world_size()
    # What is written last counts. A rank that the save did not have writes no files of its own.
    for files in (*reversed(of_ranks), *of_ranks[rank : rank + 1]):
        # A value that is not a dict has no files, and must fail the check below.
        contents = files.values() if isinstance(files, Mapping) else [None]
        if not all(isinstance(content, bytes) for content in contents):
            raise StateMismatchError(
                "the checkpoint has no files of accelerate or a Trainer here; dcp_objstore.load"
                ' takes its tensors alone, as {"model": model}',
                key="files",
            )
        for name, body in files.items():
            path = folder / name
            if ".." in path.parts or not path.is_relative_to(folder):
                raise CheckpointCorruptError(f"{name!r} is no name of a file here", key="files")
            if _UNPICKLED.fullmatch(path.name) and not trust_pickle:
                check_vetted(body, f"files, {name}")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(body)


# --- accelerate


def accelerator_state(accelerator: Any, *, trust_pickle: bool = False) -> dict[str, Any]:
    """Return what `Accelerator.save_state` saves as a state for `save`, `load` and runs.

        dos.save(accelerator_state(accelerator), "s3://bucket/run/step-10")
        dos.load(accelerator_state(accelerator), "s3://bucket/run/step-10")

    It has the prepared models and optimizers (`model`, `model_1`, ..., `optimizer`,
    `optimizer_1`, ...), which are saved sharded whatever the plugin's `state_dict_type` is, and
    under `files` everything else: schedulers, dataloaders, the scaler, objects of
    `register_for_checkpointing`, and the random states of each rank. A load takes checkpoints of
    any number of ranks and of any way to wrap the model; a rank that did not exist keeps its random
    state. Make it after `prepare`. It is read when it is saved, so one can be used for a whole run.

    Functions of `register_save_state_pre_hook` and `register_load_state_pre_hook` are called
    without models, with a temporary folder. Their files there are saved, too.

    Args:
        accelerator: the accelerator, with DDP, FSDP1, FSDP2 or a single process.
        trust_pickle: let accelerate unpickle the state of an object of `register_for_checkpointing`
            even if that may run code that the checkpoint's author chose. Default False.

    Raises:
        UnsupportedError: DeepSpeed, Megatron-LM or XLA, which have their own checkpoints.
    """
    kind = accelerator.distributed_type.value
    if kind in _WITH_OWN_CHECKPOINTS:
        raise UnsupportedError(
            f"an Accelerator under {kind} keeps its own checkpoints; use DDP, FSDP1 or FSDP2"
        )
    optimizers = [wrapped.optimizer for wrapped in accelerator._optimizers]
    return {
        **{
            f"model_{number}" if number else "model": model
            for number, model in enumerate(accelerator._models)
        },
        **{
            f"optimizer_{number}" if number else "optimizer": optimizer
            for number, optimizer in enumerate(optimizers)
        },
        "files": _AcceleratorFiles(accelerator, trust_pickle=trust_pickle),
    }


class _AcceleratorFiles(PerRank):
    """The files that `Accelerator.save_state` writes when it has no models and no optimizers."""

    def __init__(self, accelerator: Any, *, trust_pickle: bool) -> None:
        super().__init__(accelerator, choice="list")
        self._trust_pickle = trust_pickle

    def to_save(self) -> dict[str, Any]:
        """Return this rank's files, as accelerate writes them now."""
        with self._without_tensors() as folder:
            self.value.save_state(str(folder))
            return {own_name(): (_read_files(folder),)}

    def fill(self, loaded: Mapping[str, tuple[Any, ...]]) -> None:
        """Let accelerate load the files of all ranks."""
        from accelerate.utils import load as load_file

        super().fill(loaded)
        if not self.values:
            return
        with self._without_tensors() as folder:
            _write_files(folder, self.values, trust_pickle=self._trust_pickle)
            # accelerate loads all other files with weights_only=True.
            for path in folder.glob("custom_checkpoint_*"):
                check_safe(
                    path.read_bytes(), f"files, {path.name}", trust_pickle=self._trust_pickle
                )
            self.value.load_state(str(folder))
            # accelerate takes the step from the rank's own random state. A rank that the save did
            # not have would get no step, which gradient accumulation needs.
            self.value.step = load_file(folder / "random_states_0.pkl")["step"]

    @contextmanager
    def _without_tensors(self) -> Iterator[Path]:
        """Take models and optimizers from the Accelerator for a block; yield a new folder."""
        accelerator, project = self.value, self.value.project_configuration
        models, optimizers = accelerator._models, accelerator._optimizers
        is_automatic = project.automatic_checkpoint_naming
        accelerator._models, accelerator._optimizers = [], []
        project.automatic_checkpoint_naming = False  # it would write to another folder
        try:
            with tempfile.TemporaryDirectory(prefix="dcp-objstore-") as folder:
                yield Path(folder)
        finally:
            accelerator._models, accelerator._optimizers = models, optimizers
            project.automatic_checkpoint_naming = is_automatic


# --- Trainer


def with_object_store(trainer: T, url: str, *, background: bool = False, **options: Any) -> T:
    """Make a `transformers.Trainer` keep its checkpoints as a run on an object store.

        trainer = with_object_store(Trainer(model, args, ...), "s3://bucket/run")
        trainer.train(resume_from_checkpoint=True)

    When the Trainer would save, it saves the step `url/step-N`, in one commit: `model` (for a PEFT
    model, its adapters alone, as `peft_state` describes), `optimizer`, and under `files` everything
    else. A `CheckpointManager` manages the run while `train` runs:

    - `resume_from_checkpoint=True` goes on with the newest committed step, on any machine, with any
      number of ranks, and under another wrapper (single process, DDP, FSDP1, FSDP2). In an empty
      run it starts training, with a warning. A URL goes on with that step, or starts from a step of
      another run. Without it, a run that has steps is refused.
    - `save_total_limit` deletes old steps after a newer one is committed, never one that is
      pinned, the newest, the best (as the Trainer has it), or the one that the job resumed from.
      At the end of `train` the newest step stays, too, if it is not the best.
    - On SIGTERM the ranks agree on a step, save it and stop training.
    - The metrics that were logged at a step stand in its marker, and `dcp-objstore ls` shows them.

    `output_dir` stays a local folder: for logs, and for what `save_model`, `save_state` and
    `save_metrics` write.

    Args:
        trainer: a Trainer or an object of a subclass. It is changed in place.
        url: URL of the run.
        background: return from a save as soon as the state was copied to host memory, and upload
            and commit it while training goes on. `on_save` of callbacks is then called before the
            commit. The next save and the end of `train` wait for it and raise its error. Default
            False: a save returns when it is committed.
        options: arguments of `CheckpointManager`, such as `storage_options`, `config`,
            `grace_seconds`, `on_event`, `local` or `preemption` (whose `save` is ignored). `keep`
            counts instead of `save_total_limit`. `on_busy` is for saves in the background; the last
            step and the best one always wait for the save before. What says when to save
            (`save_every`, ...) is refused: the Trainer does.

    Returns:
        The same trainer. Its `run` is the `CheckpointManager` of the current or last `train`.

    Raises:
        ConfigError: it is not a Trainer, its `output_dir` is a URL, it pushes checkpoints to the
            Hub, or an option is wrong or the Trainer's own.
        InvalidUrlError: `url` is wrong.
        UnsupportedError: the Trainer uses DeepSpeed or XLA.

    `train` raises:
        CheckpointExistsError: the run has steps, and `resume_from_checkpoint` was not passed.
        CorruptDataError: the step to resume from is damaged. Pass the URL of an earlier one.
        StateMismatchError: it has other keys or shapes, or was saved with `save_only_model`.
        SupersededError: another job claimed the run.
        DcpObjstoreError: a save or the load failed.
    """
    for name, method in vars(_ObjectStoreTrainer).items():
        # If it were gone from a later version, what overrides it here would never be called.
        if inspect.isfunction(method) and not hasattr(trainer, name):
            raise ConfigError(
                "with_object_store takes a Trainer of transformers 5 (tested with 5.23);"
                f" {type(trainer).__name__} has no {name!r}"
            )
    if isinstance(trainer, _ObjectStoreTrainer):
        raise ConfigError("this Trainer has a run already", url=url)
    changed: Any = trainer  # the same object: mypy does not know its attributes
    args = changed.args
    if "://" in args.output_dir:
        raise ConfigError(
            f"output_dir must be a local folder, got {args.output_dir!r}; the URL is only for"
            " with_object_store"
        )
    if args.push_to_hub and args.hub_strategy.value != "end":
        raise ConfigError(
            "checkpoints on an object store cannot be pushed to the Hub; pass hub_strategy='end'"
        )
    if changed.is_deepspeed_enabled or changed.is_fsdp_xla_enabled:
        raise UnsupportedError("DeepSpeed and XLA keep their own checkpoints; use DDP or FSDP")
    changed._object_store = _TrainerRun(trainer, url, background, options)
    changed.add_callback(_stop_when_preempted(changed._object_store))
    kind = type(trainer)
    changed.__class__ = type(kind.__name__, (_ObjectStoreTrainer, kind), {})
    return trainer


@dataclass(frozen=True)
class _SaveTotalLimit(RetentionPolicy):
    """Keeps `limit` steps: the best, as the newest step has it in its metrics, and the newest."""

    limit: int

    def keeps(self, steps: Sequence[StepFacts]) -> frozenset[int]:
        """Return the newest steps; if the best is not among them, it takes the place of one.

        With a limit of 1, the newest step stays beside the best.
        """
        latest = KeepLatest(self.limit).keeps(steps)
        best = max(steps, key=lambda facts: facts.step).metric("best_step")
        if best is None or int(best) in latest:
            return latest
        return KeepLatest(max(1, self.limit - 1)).keeps(steps) | {int(best)}


class _TrainerRun:
    """The run of a Trainer. It is one attribute of the Trainer, so that none of its names clashes.

    Attributes:
        manager: the manager of the current or last `train`.
        scratch: folder of this rank for what the Trainer takes for its checkpoints; None if `train`
            does not run.
        resumed_url: URL of the step to load tensors from; None if training starts, or goes on from
            a local folder.
    """

    def __init__(
        self, trainer: Any, url: str, background: bool, options: Mapping[str, Any]
    ) -> None:
        """Refuse the options that are the Trainer's own, and make the first manager."""
        refused = [name for name in _REFUSED_OPTIONS if options.get(name) is not None]
        if refused:
            raise ConfigError(
                f"with_object_store takes no {' and no '.join(refused)}: the Trainer says when to"
                " save. Pass save_strategy and save_steps to TrainingArguments.",
                url=url,
            )
        limit = trainer.args.save_total_limit
        preemption = options.get("preemption", BY_SIGTERM)
        if isinstance(preemption, Preemption):  # otherwise the manager refuses it
            # The Trainer saves. The manager only says when the job must end.
            preemption = replace(preemption, save=False)
        self._trainer = trainer
        self._background = background
        self._options = {
            "keep": _SaveTotalLimit(limit) if limit and limit > 0 else None,
            **options,
            "preemption": preemption,
            "save_last": False,
        }
        self.manager = CheckpointManager(url, **self._options)  # refuses wrong arguments now
        self.scratch: Path | None = None
        self.resumed_url: str | None = None
        self._last_step: int | None = None  # the one that was saved or resumed from last
        self._best: str | None = None  # `best_model_checkpoint` of the step that is resumed from
        self._pending: AsyncSaveHandle | None = None  # the last save in the background
        # The state of a PEFT model, and the model and names of adapters of which it was made.
        self._adapters: dict[str, Any] = {}
        self._adapters_of: tuple[Any, ...] = ()

    @contextmanager
    def training(self, wanted: str | bool | None) -> Iterator[str | None]:
        """Manage the run while `Trainer.train` runs.

        Args:
            wanted: `resume_from_checkpoint`.

        Yields:
            A local folder for the Trainer to resume from; None to start training.
        """
        self.resumed_url = self._last_step = self._best = self._pending = None
        with (
            tempfile.TemporaryDirectory(prefix="dcp-objstore-") as scratch,
            CheckpointManager(self.manager.url, **self._options) as self.manager,
        ):
            self.scratch = Path(scratch)
            try:
                yield self._prepare_resume(wanted)
            finally:
                self.scratch = None

    def _prepare_resume(self, wanted: str | bool | None) -> str | None:
        """Write the Trainer's files of the step to resume from into a local folder; return that.

        Return None, or the local folder that was asked for, if no step is resumed from.
        """
        run, files = self.manager, PerRank(None, choice="list")
        if wanted is True:
            step = run.load({"files": files})
            if step is None:
                logger.warning("%s has no step to resume from; training starts", run.url)
                return None
            self.resumed_url = step_url(run.url, step)
        elif isinstance(wanted, str) and "://" in wanted:
            parent, name = StoreSpec(wanted).parent()
            step = step_number(name)
            if parent is not None and parent.url == run.url and step is not None:
                run.load({"files": files}, step)  # then later steps of the run stop counting
            else:
                self._load({"files": files}, wanted)
            self.resumed_url = wanted
        else:
            newest = run.latest()
            if newest is not None:
                raise CheckpointExistsError(
                    f"the run has step {newest} already; pass resume_from_checkpoint=True to go on"
                    " from there, or choose another url",
                    url=run.url,
                )
            return wanted or None
        assert self.scratch is not None
        assert files.values is not None
        folder = self.scratch / "resumed"
        trust_pickle = bool(self._options.get("trust_pickle"))
        _write_files(folder, files.values, trust_pickle=trust_pickle)
        if not {_TRAINER_STATE, _SCHEDULER} <= files.values[0].keys():
            raise StateMismatchError(
                "training cannot go on from this checkpoint: no Trainer saved it, or one with"
                " save_only_model. To start from its weights, load them by"
                ' dcp_objstore.load({"model": model}, url)',
                url=self.resumed_url,
            )
        state = json.loads((folder / _TRAINER_STATE).read_text())
        self._last_step = state["global_step"]
        # The Trainer would look for a local folder.
        self._best, state["best_model_checkpoint"] = state["best_model_checkpoint"], None
        (folder / _TRAINER_STATE).write_text(json.dumps(state))
        return str(folder)

    def load_tensors(self) -> None:
        """Load the model and the optimizer, once they are wrapped."""
        assert self.resumed_url is not None
        state = {"model": self._model()["model"], "optimizer": self._optimizer()}
        self._load(state, self.resumed_url)
        self._trainer.state.best_model_checkpoint = self._best

    def load_model(self, url: str) -> None:
        """Load the model alone from a step, which may be the one that is being saved."""
        if self._pending is not None:
            self._pending.result()
        self._load({"model": self._model()["model"]}, url)

    def _load(self, state: dict[str, Any], url: str) -> None:
        """Load a step, which may be of another run, with the run's options for loads."""
        names = ("storage_options", "config", "verify", "trust_pickle", "on_event", "local")
        options = {name: self._options[name] for name in names if name in self._options}
        load(state, url, progress=False, **options)

    def _model(self) -> dict[str, Any]:
        """Return the state of the model; of a PEFT model, of the adapters alone."""
        model = self._trainer.model
        if not is_peft(model):
            return {"model": model}
        adapters_of = model, tuple(model.peft_config)
        if self._adapters_of != adapters_of:  # for each description, PEFT may ask the Hub
            self._adapters_of, self._adapters = adapters_of, peft_state(model)
        return self._adapters

    def _optimizer(self) -> Any:
        optimizer = self._trainer.optimizer
        return getattr(optimizer, "optimizer", optimizer)  # accelerate wraps it

    def save(self, write: Callable[[], None]) -> None:
        """Save the current step, unless it is saved or was resumed from.

        Args:
            write: lets the Trainer write its other files to its folder of the step.
        """
        trainer = self._trainer
        step = trainer.state.global_step
        if step == self._last_step:
            return
        assert self.scratch is not None
        write()
        folder = self.scratch / f"checkpoint-{step}"
        # If this step is the best, the Trainer has noted this folder as its place, also in the file
        # of its state. Both get the URL instead.
        if trainer.state.best_global_step == step:
            trainer.state.best_model_checkpoint = step_url(self.manager.url, step)
            if trainer.args.should_save:
                trainer.state.save_to_json(str(folder / _TRAINER_STATE))
        state = {"files": PerRank(_read_files(folder)), **self._model()}
        shutil.rmtree(folder, ignore_errors=True)
        if not trainer.args.save_only_model:
            state["optimizer"] = self._optimizer()
        metrics = self._metrics(step)
        if self._background:
            is_best = trainer.state.best_global_step == step
            # These two must not be skipped if the save before is still under way.
            needed = is_best or trainer.control.should_training_stop
            on_busy: Busy | None = "wait" if needed else None
            handle = self.manager.async_save(step, state, metrics=metrics, on_busy=on_busy)
            if handle is None:
                return  # it was skipped, so `_last_step` stays
            self._pending = handle
        else:
            self.manager.save(step, state, metrics=metrics)
        self._last_step = step

    def _metrics(self, step: int) -> dict[str, float]:
        """Return what was logged at this step, and which saved step is the best."""
        state = self._trainer.state
        metrics: dict[str, float] = {}
        for entry in state.log_history:
            if entry.get("step") == step:
                metrics |= {
                    name: value for name, value in entry.items() if isinstance(value, int | float)
                }
        metrics.pop("step", None)
        run, _, name = (state.best_model_checkpoint or "").rpartition("/")
        best = step_number(name) if run == self.manager.url else None
        return metrics if best is None else {**metrics, "best_step": best}


class _ObjectStoreTrainer:
    """The methods that `with_object_store` puts before those of the Trainer."""

    _object_store: _TrainerRun

    @property
    def run(self) -> CheckpointManager:
        """The manager of the current or last `train`."""
        return self._object_store.manager

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        """Train as `Trainer.train` does, with the checkpoints of the run."""
        if trial is not None:
            raise UnsupportedError("the trials of a search cannot share a run", url=self.run.url)
        with self._object_store.training(resume_from_checkpoint) as folder:
            return super().train(  # type: ignore[misc]
                resume_from_checkpoint=folder, ignore_keys_for_eval=ignore_keys_for_eval
            )

    def _get_output_dir(self, trial: Any) -> str:
        """Return the folder below which the Trainer writes its checkpoints."""
        if self._object_store.scratch is None:
            return super()._get_output_dir(trial)  # type: ignore[misc, no-any-return]
        return str(self._object_store.scratch)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self._object_store.save(partial(super()._save_checkpoint, model, trial))  # type: ignore[misc]

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model to a local folder, as `Trainer.save_model` does.

        For a checkpoint, write only the small files beside the weights.
        """
        scratch, trainer = self._object_store.scratch, cast(Any, self)
        if scratch is None or not Path(output_dir or ".").is_relative_to(scratch):
            super().save_model(output_dir, _internal_call)  # type: ignore[misc]
        elif trainer.args.should_save:
            Path(output_dir or "").mkdir(parents=True, exist_ok=True)
            # Of a PEFT model only the adapters are saved, which `peft_state` describes.
            names = () if is_peft(trainer.model) else ("config", "generation_config")
            configs = [getattr(trainer.model, name, None) for name in names]
            for writes_itself in (*configs, trainer.processing_class):
                if hasattr(writes_itself, "save_pretrained"):
                    writes_itself.save_pretrained(output_dir)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Write the scheduler alone; the optimizer is saved as tensors."""
        trainer = cast(Any, self)
        if trainer.args.should_save:
            torch.save(trainer.lr_scheduler.state_dict(), Path(output_dir, _SCHEDULER))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load nothing for a step of a run: `load_tensors` does, when the model is wrapped."""
        if self._object_store.resumed_url is None:
            super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load the tensors of a step, and its scheduler."""
        if self._object_store.resumed_url is None or checkpoint is None:
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
            return
        self._object_store.load_tensors()
        scheduler = unpickled(Path(checkpoint, _SCHEDULER), weights_only=True)
        cast(Any, self).lr_scheduler.load_state_dict(scheduler)

    def _load_best_model(self) -> None:
        """Load the best step's model at the end of `train`."""
        best = cast(Any, self).state.best_model_checkpoint
        if "://" in best:
            self._object_store.load_model(best)
        else:  # training went on from a local folder, which has the best step
            super()._load_best_model()  # type: ignore[misc]


def _stop_when_preempted(run: _TrainerRun) -> Any:
    """Return a callback that lets the ranks agree on the last step."""
    from transformers import TrainerCallback

    class StopWhenPreempted(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
            # The manager saves nothing here. It lets the ranks agree on the step at which to end.
            run.manager.step(state.global_step, {})
            if run.manager.preempted():
                control.should_save = control.should_training_stop = True

    return StopWhenPreempted()
