"""accelerate and Hugging Face's Trainer: each checkpoint is one commit, for any number of ranks."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import re
import runpy
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)

import dcp_objstore as dos
from dcp_objstore.checkpoint.names import MARKER_KEY
from tests.support.checkpoints import Options, memory_url
from tests.support.command_line import environment
from tests.support.programs import run_example
from tests.support.ranks import run_ranks
from tests.support.servers import Bucket

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

from accelerate import Accelerator, DataLoaderConfiguration, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType, ProjectConfiguration
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from dcp_objstore.integrations.hf import accelerator_state, with_object_store
from dcp_objstore.integrations.peft import peft_state
from dcp_objstore.run.saves import RunSaves

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "hf_trainer.py"
PAGE = ROOT / "docs" / "frameworks" / "hugging-face.md"
ADAPTERS = ROOT / "docs" / "adapters.md"
pytestmark = [pytest.mark.backends("seaweed"), pytest.mark.filterwarnings("ignore")]


@contextlib.contextmanager
def a_machine(folder: str, kind: str = "single", rank: int = 0, world: int = 1) -> Iterator[None]:
    """A job's own folder and environment; afterwards there is no folder `s3:` in it.

    accelerate does FSDP on accelerators alone, so its question which one there is gets an answer.
    """
    before, environment = Path.cwd(), dict(os.environ)
    prepare_backend = PartialState._prepare_backend
    place = Path(folder, f"{kind}-{rank}-of-{world}")
    place.mkdir(parents=True)
    os.chdir(place)
    try:
        if kind != "single":
            ranks = {"RANK": rank, "LOCAL_RANK": rank}
            worlds = {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
            os.environ |= {name: str(value) for name, value in {**ranks, **worlds}.items()}
            os.environ["MASTER_ADDR"] = "127.0.0.1"
        if kind.startswith("fsdp"):
            os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
            PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_GPU)
        yield
        assert not list(Path().glob("*:"))
    finally:
        PartialState._prepare_backend = prepare_backend
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        dos.uninstall()
        os.chdir(before)
        os.environ.clear()
        os.environ.update(environment)
        shutil.rmtree(place)  # what the next job finds is on the bucket


def snapshot(model: Any, optimizer: Any) -> dict[str, Any]:
    """The whole model and optimizer, under the names that they have unwrapped."""
    options = StateDictOptions(full_state_dict=True)
    states = get_optimizer_state_dict(model, optimizer, options=options)["state"]
    found = {
        f"{name}.{kind}": value for name, state in states.items() for kind, value in state.items()
    }
    found |= get_model_state_dict(model, options=options)
    return {name: value.detach().clone() for name, value in found.items()}


def assert_same(first: dict[str, Any], second: dict[str, Any]) -> None:
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def assert_only_commits(bucket: Bucket, *names: str) -> None:
    """Each has a marker and all its bytes; there is no other object, and no orphaned upload."""
    found = {key.partition("/")[0] for key in bucket.keys("")}
    assert found - {"_CLAIM"} == set(names)
    for name in names:
        assert MARKER_KEY in bucket.keys(name)
        opened = dos.open(bucket.at(name), storage_options=bucket.storage_options)
        assert opened.verify(deep=True).ok
    assert bucket.uploads() == []


# --- accelerate


class Counter:
    """A custom object, whose keys are not known before it is loaded."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def state_dict(self) -> dict[str, int]:
        return self.counts

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.counts = dict(state)


def accelerated(kind: str, **options: Any) -> dict[str, Any]:
    torch.manual_seed(7)
    if kind.startswith("fsdp"):
        options["fsdp_plugin"] = FullyShardedDataParallelPlugin(
            fsdp_version=int(kind[-1]),
            state_dict_type="SHARDED_STATE_DICT",
            auto_wrap_policy="NO_WRAP",
            cpu_ram_efficient_loading=False,
            use_orig_params=True,
        )
    else:
        options["cpu"] = True
    accelerator = Accelerator(**options)
    model = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.ReLU(), torch.nn.Linear(10, 3))
    if kind == "fsdp1":
        model = accelerator.prepare(model)
        optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=0.1))
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        model, optimizer = accelerator.prepare(model, optimizer)
    scheduler = accelerator.prepare(torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 1, 0.5))
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    return {
        "accelerator": accelerator,
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "counter": counter,
    }


def accelerate_job(
    rank: int, world: int, kind: str, folder: str, url: str, step: int, options: Options
) -> dict[str, Any]:
    """Resume, and return what was found; train a step, save it, and return what was saved."""
    with a_machine(folder, kind, rank, world):
        job = accelerated(kind)
        accelerator, model, optimizer = job["accelerator"], job["model"], job["optimizer"]
        assert kind in ("single", "ddp") or accelerator.distributed_type == DistributedType.FSDP
        random.seed(rank)

        def look() -> dict[str, Any]:
            tensors = snapshot(model, optimizer.optimizer)
            return {
                "tensors": tensors,
                "rate": optimizer.param_groups[0]["lr"],
                "counts": dict(job["counter"].counts),
                "step": accelerator.step,
                "draws": (random.random(), torch.rand(1).item()),
            }

        state = accelerator_state(accelerator)
        found = None
        if step:
            dos.load(state, f"{url}/step-{step - 1}", storage_options=options)
            found = look()
        accelerator.step += 1
        torch.manual_seed(step)
        model(torch.randn(4, 6)).sum().backward()
        optimizer.step()
        job["scheduler"].step()
        optimizer.zero_grad()
        job["counter"].counts[f"of {kind}"] = step
        torch.manual_seed(1000 * step + rank)
        dos.save(state, f"{url}/step-{step}", storage_options=options)
        return {"found": found, "saved": look()}


def test_an_accelerator_goes_on_with_other_ranks_and_another_wrapper(bucket, tmp_path):
    jobs = [("fsdp2", 2), ("single", 1), ("fsdp1", 2), ("ddp", 2), ("fsdp2", 3)]
    before: list[dict[str, Any]] = []
    for step, (kind, world) in enumerate(jobs):
        rest = kind, str(tmp_path), bucket.url, step, bucket.storage_options
        if kind == "single":
            ranks = [accelerate_job(0, 1, *rest)]
        else:
            ranks = run_ranks(world, accelerate_job, *rest)
        for rank, one in enumerate(ranks if step else []):
            saved = before[min(rank, len(before) - 1)]["saved"]
            assert_same(one["found"]["tensors"], saved["tensors"])
            for name in ("rate", "counts", "step"):
                assert one["found"][name] == saved[name], name
            if rank < len(before):  # others keep their random state
                assert one["found"]["draws"] == saved["draws"]
        before = ranks
    assert len(before[0]["saved"]["counts"]) == 4
    assert_only_commits(bucket, *(f"step-{step}" for step in range(len(jobs))))


def test_an_accelerators_run_keeps_its_dataloader_hooks_and_naming(bucket, tmp_path):
    def begin() -> tuple[Any, Any]:
        job = accelerated(
            "single",
            dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True),
            project_config=ProjectConfiguration("project", automatic_checkpoint_naming=True),
        )
        loader = job["accelerator"].prepare_data_loader(
            torch.utils.data.DataLoader(list(range(32)), batch_size=4)
        )
        return job["accelerator"], loader

    def note(models: list[Any], weights: list[Any], folder: str) -> None:
        assert models == weights == []
        Path(folder, "own").mkdir()
        Path(folder, "own", "note.txt").write_text("kept")

    read: list[str] = []
    with a_machine(str(tmp_path)):
        accelerator, loader = begin()
        accelerator.register_save_state_pre_hook(note)
        batches = iter(loader)
        for _ in range(3):
            next(batches)
        run = dos.CheckpointManager(bucket.url, storage_options=bucket.storage_options)
        with run:
            run.async_save(3, accelerator_state(accelerator))
        rest = [batch.tolist() for batch in batches]
        assert accelerator._models  # as before
        assert accelerator.project_configuration.automatic_checkpoint_naming
        assert not Path("project").exists()
    with a_machine(str(tmp_path)):
        accelerator, loader = begin()
        accelerator.register_load_state_pre_hook(
            lambda _, folder: read.append(Path(folder, "own", "note.txt").read_text())
        )
        with dos.CheckpointManager(bucket.url, storage_options=bucket.storage_options) as run:
            assert run.load(accelerator_state(accelerator)) == 3
        assert [batch.tolist() for batch in loader] == rest
    assert len(rest) == 5
    assert read == ["kept"]
    assert_only_commits(bucket, "step-3")


class Harmful:
    def __reduce__(self) -> Any:
        return os.symlink, (".", "harm")


def test_a_custom_object_runs_no_code_unless_it_is_trusted(bucket, tmp_path):
    with a_machine(str(tmp_path)):
        job = accelerated("single")
        job["counter"].counts = {"harm": Harmful()}
        dos.save(
            accelerator_state(job["accelerator"]),
            bucket.url,
            storage_options=bucket.storage_options,
        )
        access: Any = {"storage_options": bucket.storage_options}
        with pytest.raises(dos.errors.UntrustedPickleError, match="custom_checkpoint_0"):
            dos.load(accelerator_state(job["accelerator"]), bucket.url, **access)
        assert not Path("harm").exists()
        trusting = accelerator_state(job["accelerator"], trust_pickle=True)
        dos.load(trusting, bucket.url, **access)
        assert Path("harm").exists()


# --- the Trainer


def gpt2() -> Any:
    set_seed(3)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=32,
            n_positions=8,
            n_embd=16,
            n_layer=2,
            n_head=2,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


@functools.cache
def data() -> list[dict[str, Any]]:
    rows = torch.randint(0, 32, (96, 8), generator=torch.Generator().manual_seed(5))
    return [{"input_ids": row, "labels": row} for row in rows]


class At(TrainerCallback):
    """Does something when a step ends; step 0 is the beginning."""

    def __init__(self, step: int, act: Any) -> None:
        self.step, self.act = step, act

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.step == 0:
            self.act(control)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            self.act(control)


def stop(control: Any) -> None:
    control.should_save = control.should_training_stop = True


def make_trainer(*callbacks: Any, model: Any = None, **arguments: Any) -> Any:
    settings: dict[str, Any] = {
        "output_dir": "out",
        "max_steps": 12,
        "save_strategy": "no",
        "logging_steps": 1,
        "per_device_train_batch_size": 2,
        "learning_rate": 0.01,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
    }
    arguments = TrainingArguments(**{**settings, **arguments})  # type: ignore[assignment]
    return Trainer(
        model or gpt2(),
        arguments,  # type: ignore[arg-type]
        train_dataset=data(),
        eval_dataset=data()[:4],
        callbacks=list(callbacks),
    )


def trainer_job(
    rank: int,
    world: int,
    kind: str,
    folder: str,
    url: str,
    last: int,
    options: Options,
    make_model: Any = None,
) -> dict[str, Any]:
    """Resume, train to a step, save it; what was found, and what was saved."""
    with a_machine(folder, kind, rank, world):
        seen: dict[str, Any] = {}
        sharded: dict[str, Any] = {}
        if kind.startswith("fsdp"):
            config = {"version": int(kind[-1]), "cpu_ram_efficient_loading": False}
            config["sync_module_states"] = False  # it wants an accelerator
            sharded = {"fsdp": "full_shard auto_wrap", "fsdp_config": config}

        def look(name: str) -> None:
            seen[name] = snapshot(trainer.model, trainer.optimizer.optimizer)
            seen[name + "_at"] = (
                trainer.state.global_step,
                trainer.lr_scheduler.state_dict()["last_epoch"],
                trainer.lr_scheduler.get_last_lr(),
            )

        trainer = make_trainer(
            At(0, lambda _: look("found")),
            At(last, stop),
            At(last, lambda _: look("saved")),
            model=make_model and make_model(),
            **sharded,
        )
        with_object_store(trainer, url, storage_options=options)
        assert trainer.is_fsdp_enabled == kind.startswith("fsdp")
        trainer.train(resume_from_checkpoint=True)
        assert not list(Path("out").glob("checkpoint*"))
        return seen


def test_a_trainer_goes_on_with_other_ranks_and_another_wrapper(bucket, tmp_path):
    """Each job on a machine of its own: all it finds is the bucket."""
    jobs = [("single", 1), ("ddp", 2), ("fsdp2", 3), ("fsdp1", 2), ("fsdp2", 2), ("single", 1)]
    before: dict[str, Any] = {}
    for number, (kind, world) in enumerate(jobs):
        rest = kind, str(tmp_path), bucket.url, 2 * number + 2, bucket.storage_options
        if kind == "single":
            ranks = [trainer_job(0, 1, *rest)]
        else:
            ranks = run_ranks(world, trainer_job, *rest)
        for one in ranks if number else []:
            assert_same(one["found"], before["saved"])
            assert one["found_at"] == before["saved_at"]
        before = ranks[0]
    assert before["saved_at"][0] == 12
    assert_only_commits(bucket, *(f"step-{2 * number + 2}" for number in range(len(jobs))))
    ckpt = dos.open(bucket.at("step-6"), storage_options=bucket.storage_options)
    assert [key for key in ckpt if key.startswith("files")] == ["files.0", "files.1", "files.2"]
    assert ckpt["model.transformer.wte.weight"].shape == (32, 16)
    assert "loss" in ckpt.user_metadata["metrics"]


@pytest.mark.parametrize("background", [False, True])
def test_an_interrupted_training_ends_as_one_that_was_not(bucket, tmp_path, background):
    """Bit for bit: the order of the data, dropout, the schedule, and the optimizer."""

    def train(last: int, url: str, resume: bool) -> dict[str, Any]:
        with a_machine(str(tmp_path)):
            trainer = make_trainer(At(last, stop), save_strategy="steps", save_steps=2, max_steps=6)
            with_object_store(
                trainer, url, background=background, storage_options=bucket.storage_options
            )
            trainer.train(resume_from_checkpoint=resume)
            return snapshot(trainer.model, trainer.optimizer.optimizer)

    whole = train(6, bucket.at("whole"), False)
    train(3, bucket.at("parts"), False)
    assert_same(train(6, bucket.at("parts"), True), whole)
    steps = dos.steps(bucket.at("parts"), storage_options=bucket.storage_options)
    assert [step.name for step in steps] == ["step-2", "step-3", "step-4", "step-6"]
    assert bucket.uploads() == []


def test_save_total_limit_deletes_on_the_bucket_and_spares_the_best_and_the_pinned(
    bucket, tmp_path
):
    losses = {1: 5.0, 2: 1.0, 3: 4.0, 4: 3.0, 5: 2.0, 6: 1.0, 7: 6.0}
    loads: list[str] = []

    def train(last: int, resume: bool) -> Any:
        with a_machine(str(tmp_path)):
            trainer = make_trainer(
                At(last, stop),
                save_strategy="steps",
                eval_strategy="steps",
                save_steps=1,
                eval_steps=1,
                save_total_limit=2,
                load_best_model_at_end=True,
                metric_for_best_model="eval_quality",
                greater_is_better=False,
            )
            evaluate = trainer.evaluate

            def known(*args: Any, **kwargs: Any) -> Any:
                metrics = {**evaluate(*args, **kwargs)}
                metrics["eval_quality"] = losses[trainer.state.global_step]
                trainer.log({"eval_quality": metrics["eval_quality"]})
                return metrics

            trainer.evaluate = known
            with_object_store(trainer, bucket.url, background=True, sweep=False, **access)
            trainer.train(resume_from_checkpoint=resume)
            loads.append(trainer.state.best_model_checkpoint)
            return get_model_state_dict(trainer.model)

    def names() -> list[str]:
        return [step.name for step in dos.steps(bucket.url, **access)]

    access: Any = {"storage_options": bucket.storage_options}
    train(1, False)
    dos.pin(bucket.at("step-1"), "paper", **access)
    best = train(5, True)
    assert loads[-1] == bucket.at("step-2")
    assert_same(best, dos.read_state_dict(bucket.at("step-2"), "model.*", **access)["model"])
    assert names() == ["step-1", "step-2", "step-5"]
    train(7, True)  # step 6 is no better than step 2, which is still the best
    assert loads[-1] == bucket.at("step-2")
    assert names() == ["step-1", "step-2", "step-5", "step-7"]  # it resumed from step 5
    markers = dos.steps(bucket.url, **access)
    assert [step.user_metadata["metrics"]["eval_quality"] for step in markers] == [5, 1, 2, 6]
    assert bucket.uploads() == []


def test_a_url_resumes_a_step_of_this_run_or_starts_from_one_of_another(bucket, tmp_path):
    access: Any = {"storage_options": bucket.storage_options}

    def train(run: str, last: int, resume: str | bool | None, **arguments: Any) -> Any:
        with a_machine(str(tmp_path)):
            saves = {"save_strategy": "steps", "save_steps": 1}
            trainer = make_trainer(At(last, stop), **{**saves, **arguments})
            with_object_store(trainer, bucket.at(run), **access)
            trainer.train(resume_from_checkpoint=resume)
            return get_model_state_dict(trainer.model)

    def names(run: str) -> list[str]:
        return [step.name for step in dos.steps(bucket.at(run), **access)]

    first = train("a", 3, None)
    assert_same(train("b", 3, bucket.at("a/step-2")), first)
    assert names("b") == ["step-3"]
    with pytest.raises(dos.errors.CheckpointExistsError, match="step 3 already"):
        train("a", 3, None)
    train("a", 2, bucket.at("a/step-1"))
    assert names("a") == ["step-1", "step-2"]  # step 3 stopped counting
    with pytest.raises(dos.errors.CheckpointNotFoundError):
        train("a", 3, bucket.at("a/step-9"))
    # At the end of an epoch the Trainer saves one step twice.
    train("twice", 2, None, save_strategy="epoch", per_device_train_batch_size=48)
    assert names("twice") == ["step-2"]
    train("weights", 1, None, save_only_model=True)
    opened = dos.open(bucket.at("weights/step-1"), **access)
    assert not [key for key in opened if key.startswith("optimizer")]
    with pytest.raises(dos.errors.StateMismatchError, match="save_only_model"):
        train("weights", 2, True)


def test_from_pretrained_loads_an_exported_step(bucket, tmp_path):
    options = bucket.storage_options
    with a_machine(str(tmp_path / "machine")):
        trainer = make_trainer(At(2, stop))
        with_object_store(trainer, bucket.url, storage_options=options).train()
        trained = {key: value.clone() for key, value in trainer.model.state_dict().items()}
    folder = tmp_path / "hub"
    dos.export_checkpoint(
        bucket.at("step-2"),
        folder,
        "model.*",
        rename=[(r"^model\.", "")],
        max_shard_size_bytes=8000,
        storage_options=options,
    )
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    # Those that the Trainer has saved, and nothing else of it.
    small = {path.name for path in folder.iterdir() if path.suffix != ".safetensors"}
    assert small == {"config.json", "generation_config.json", "model.safetensors.index.json"}
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert isinstance(loaded, GPT2LMHeadModel)
    assert_same(loaded.state_dict(), trained)


class Plain(torch.nn.Module):
    """A model that is not one of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(32, 4)

    def forward(self, input_ids: Any, labels: Any) -> dict[str, Any]:
        return {"loss": self.table(input_ids).square().mean() + 0 * labels.sum()}


def test_a_plain_module_is_trained_on(bucket, tmp_path):
    for last in (1, 2):
        with a_machine(str(tmp_path)):
            trainer = make_trainer(At(last, stop), model=Plain())
            with_object_store(trainer, bucket.url, storage_options=bucket.storage_options)
            trainer.train(resume_from_checkpoint=True)
            assert (trainer.run.last_resume.step or 0) == last - 1
    assert_only_commits(bucket, "step-1", "step-2")


@pytest.mark.parametrize(
    ("on_busy", "last", "arguments", "saved"),
    [
        ("skip", 12, {"max_steps": 5}, [2, 5]),  # the end
        ("raise", 3, {}, [2, 3]),  # a preemption, or a callback that ends the training
        ("skip", 12, {"max_steps": 5, "greater_is_better": False}, [2, 4, 5]),
        ("skip", 12, {"max_steps": 5, "greater_is_better": True}, [2, 5]),
    ],
)
def test_the_last_step_and_the_best_one_are_saved_although_a_save_is_under_way(
    bucket, tmp_path, monkeypatch, on_busy, last, arguments, saved
):
    monkeypatch.setattr(RunSaves, "is_idle", lambda saves: saves._pending is None)  # all are slow
    if "greater_is_better" in arguments:  # the loss becomes smaller
        best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss"}
        arguments = {**arguments, **best, "eval_strategy": "steps", "eval_steps": 2}
    with a_machine(str(tmp_path)):
        trainer = make_trainer(At(last, stop), save_strategy="steps", save_steps=2, **arguments)
        with_object_store(
            trainer,
            bucket.url,
            background=True,
            on_busy=on_busy,
            storage_options=bucket.storage_options,
        )
        trainer.train()
        if "greater_is_better" in arguments:
            best_step = 2 if arguments["greater_is_better"] else 5  # which is evaluated, too
            assert trainer.state.best_model_checkpoint == bucket.at(f"step-{best_step}")
    assert_only_commits(bucket, *(f"step-{step}" for step in saved))


def preempted_job(rank: int, world: int, folder: str, url: str, options: Options) -> int:
    with a_machine(folder, "ddp", rank, world):

        def announce(_: Any) -> None:
            if rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)

        class Slow(TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                time.sleep(0.02)

        trainer = make_trainer(At(2, announce), Slow(), max_steps=5000, logging_steps=5000)
        with_object_store(trainer, url, storage_options=options)
        trainer.train()
        return int(trainer.state.global_step)


def test_sigterm_on_one_rank_saves_a_step_of_all_and_stops(bucket, tmp_path):
    steps = run_ranks(2, preempted_job, str(tmp_path), bucket.url, bucket.storage_options)
    assert steps[0] == steps[1] < 5000
    assert_only_commits(bucket, f"step-{steps[0]}")


def test_what_a_trainer_cannot_do_on_a_bucket_is_refused(tmp_path):
    with a_machine(str(tmp_path)):
        trainer = make_trainer()
        with pytest.raises(TypeError, match="keeep"):
            with_object_store(make_trainer(), "s3://bucket/run", keeep=3)
        with_object_store(trainer, "memory://run")
        trainer.save_model("model")  # stays the Trainer's own
        assert Path("model", "model.safetensors").exists()
        hub = make_trainer()
        hub.args.push_to_hub = True
        with pytest.raises(dos.errors.ConfigError, match="hub_strategy"):
            with_object_store(hub, "s3://bucket/run")


# --- PEFT


@pytest.fixture
def peft() -> Any:
    return pytest.importorskip("peft")


def adapted(**settings: Any) -> Any:
    """A model with a frozen base, and adapters that do something from the beginning."""
    import peft

    settings = {"target_modules": ["c_attn"], "modules_to_save": ["ln_f"], **settings}
    return peft.get_peft_model(gpt2(), peft.LoraConfig(init_lora_weights=False, **settings))


def get_peft_state(model: Any) -> dict[str, Any]:
    import peft

    return dict(peft.get_peft_model_state_dict(model))


def saved_by_peft(model: Any, folder: Path) -> dict[str, torch.Tensor]:
    model.save_pretrained(folder)
    tensors: dict[str, torch.Tensor] = load_file(folder / "adapter_model.safetensors")
    return tensors


def test_a_trainer_saves_the_adapters_alone_under_every_wrapper(bucket, tmp_path, peft):
    jobs = [("single", 1), ("fsdp2", 2), ("fsdp1", 2), ("ddp", 2), ("single", 1)]
    before: dict[str, Any] = {}
    for number, (kind, world) in enumerate(jobs, 1):
        rest: Any = kind, str(tmp_path), bucket.url, number, bucket.storage_options, adapted
        alone = kind == "single"
        ranks = [trainer_job(0, 1, *rest)] if alone else run_ranks(world, trainer_job, *rest)
        for one in ranks if before else []:
            assert_same(one["found"], before["saved"])
            assert one["found_at"] == before["saved_at"]
        before = ranks[0]
    assert_only_commits(bucket, *(f"step-{number}" for number in range(1, len(jobs) + 1)))
    trained = {name for name in adapted().state_dict() if re.search(r"lora_|modules_to_save", name)}
    for kind, number in (("single", 1), ("fsdp1", 3)):
        ckpt = dos.open(bucket.at(f"step-{number}"), storage_options=bucket.storage_options)
        keys = {key for key in ckpt if key.startswith("model.")}
        assert keys == {f"model.{name}" for name in trained}, kind
        states = {key.rpartition(".")[0] for key in ckpt if key.startswith("optimizer.state.")}
        assert states == {f"optimizer.state.{name}" for name in trained}
        assert ckpt.user_metadata["left_out"]["model"]["tensors"] > 20
        assert "config.json" not in ckpt["files.0"].read()[0]  # that of the base
        described = json.loads(ckpt["peft"].read())["default"]
        assert {*described["names"].values()} == trained


def test_peft_reads_what_is_exported_of_a_step(bucket, tmp_path, peft):
    options = bucket.storage_options
    with a_machine(str(tmp_path / "machine")):
        trainer = make_trainer(At(2, stop), model=adapted())
        with_object_store(trainer, bucket.url, storage_options=options).train()
        trained = trainer.model.eval()
    expected = saved_by_peft(trained, tmp_path / "peft")
    report = dos.export_checkpoint(bucket.at("step-2"), tmp_path / "ours", storage_options=options)
    weights, config = "adapter_model.safetensors", "adapter_config.json"
    assert {Path(file).name for file in report.files} == {weights, config}
    assert_same(load_file(tmp_path / "ours" / weights), expected)
    ours, theirs = (json.loads((tmp_path / by / config).read_text()) for by in ("ours", "peft"))
    del ours["auto_mapping"], theirs["auto_mapping"]  # the class of the model, only for AutoPeft
    assert ours == theirs
    loaded = peft.PeftModel.from_pretrained(gpt2(), tmp_path / "ours").eval()
    rows = data()[0]["input_ids"][None]
    assert torch.equal(loaded(rows).logits, trained(rows).logits)


@pytest.mark.parametrize(
    "settings",
    [
        {"use_dora": True},
        {"bias": "all", "target_modules": ["wte", "c_attn"], "modules_to_save": None},
        {"trainable_token_indices": [1, 2], "modules_to_save": None},
    ],
    ids=["dora", "biases and an embedding", "tokens"],
)
def test_each_of_several_adapters_is_saved_loaded_and_exported(tmp_path, peft, settings):
    url, model = memory_url(), adapted(**settings)
    tokens = settings.get("trainable_token_indices")
    second = peft.LoraConfig(
        target_modules=["c_proj"], init_lora_weights=False, trainable_token_indices=tokens
    )
    model.add_adapter("second", second)
    optimizer = torch.optim.AdamW(model.parameters())
    dos.save({**peft_state(model), "optimizer": optimizer}, url)
    expected = saved_by_peft(model, tmp_path / "peft")
    dos.export_checkpoint(url, tmp_path / "default")
    assert_same(load_file(tmp_path / "default" / "adapter_model.safetensors"), expected)
    dos.export_checkpoint(url, tmp_path / "second", "model.*.second.*")
    assert_same(
        load_file(tmp_path / "second" / "adapter_model.safetensors"),
        load_file(tmp_path / "peft" / "second" / "adapter_model.safetensors"),
    )
    with pytest.raises(dos.errors.InputError, match="default and second"):
        dos.export_checkpoint(url, tmp_path / "both", "model.*")

    other = adapted(**settings)
    other.add_adapter("second", second)
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            if parameter.requires_grad or ".second." in name:
                parameter.zero_()
    dos.load(peft_state(other), url)
    assert_same(other.state_dict(), model.state_dict())


def test_a_prompt_encoder_resumes_and_is_left_to_peft_to_export(tmp_path, peft):
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    model, other = (peft.get_peft_model(gpt2(), config) for _ in range(2))
    dos.save(peft_state(model), url := memory_url())
    dos.load(peft_state(other), url)
    assert_same(other.state_dict(), model.state_dict())
    with pytest.raises(dos.errors.UnsupportedError, match="save_pretrained"):
        dos.export_checkpoint(url, tmp_path / "prompts")
    assert not (tmp_path / "prompts").exists()


def test_the_best_adapters_are_loaded_at_the_end(bucket, tmp_path, peft):
    options = bucket.storage_options
    with a_machine(str(tmp_path)):
        trainer = make_trainer(
            At(3, stop),
            model=adapted(),
            save_strategy="steps",
            eval_strategy="steps",
            save_steps=1,
            eval_steps=1,
            load_best_model_at_end=True,
            metric_for_best_model="eval_loss",
        )
        evaluate, losses = trainer.evaluate, iter([3.0, 1.0, 2.0])
        trainer.evaluate = lambda *args, **settings: {
            **evaluate(*args, **settings),
            "eval_loss": next(losses),
        }
        with_object_store(trainer, bucket.url, storage_options=options).train()
        assert trainer.state.best_model_checkpoint == bucket.at("step-2")
        best, last = (
            dos.read_state_dict(
                bucket.at(f"step-{step}"), "model.*", nested=False, storage_options=options
            )
            for step in (2, 3)
        )
        found = {f"model.{name}": value for name, value in trainer.model.state_dict().items()}
        assert_same({name: found[name] for name in best}, best)
        assert not all(torch.equal(value, last[name]) for name, value in best.items())


@pytest.mark.usefixtures("credentials")
def test_what_the_page_says_of_peft_runs_with_accelerate_too(bucket, tmp_path, peft):
    (block,) = re.findall(r"^```py\n(.*?)^```", ADAPTERS.read_text(), re.M | re.S)
    model = adapted()
    names = {"optimizer": torch.optim.AdamW(model.parameters()), "base": gpt2()}
    names |= {"dos": dos, "PeftModel": peft.PeftModel, "model": model}
    with a_machine(str(tmp_path)):
        exec(block.replace("s3://bucket/run", bucket.url), names)
        assert_same(get_peft_state(names["model"]), get_peft_state(model))
        accelerator = Accelerator(cpu=True)
        accelerator.prepare(model, names["optimizer"])
        state = {**accelerator_state(accelerator), **peft_state(model)}
        dos.save(state, bucket.at("step-11"))
        dos.load(state, bucket.at("step-11"))
    assert {"peft", "files.0"} <= {*dos.open(bucket.at("step-11"))}


def injected() -> Any:
    """A model with adapters that transformers itself has put into it: no `PeftModel`."""
    import peft

    model = gpt2()
    model.add_adapter(peft.LoraConfig(target_modules=["c_attn"], init_lora_weights=False))
    return model


def test_adapters_that_transformers_has_added_are_saved_alone_as_the_trainer_does(
    bucket, tmp_path, peft, monkeypatch
):
    # transformers 5.24 wants PEFT 0.22 for this; 0.21 does, too.
    monkeypatch.setattr("transformers.integrations.peft.check_peft_version", lambda **_: None)
    options = bucket.storage_options
    rest: Any = "single", str(tmp_path / "machine"), bucket.url
    first = trainer_job(0, 1, *rest, 1, options, injected)
    second = trainer_job(0, 1, *rest, 2, options, injected)
    assert_same(second["found"], first["saved"])
    ckpt = dos.open(bucket.at("step-2"), storage_options=options)
    trained = {f"model.{name}" for name in injected().state_dict() if "lora_" in name}
    assert {key for key in ckpt if key.startswith("model.")} == trained

    dos.export_checkpoint(bucket.at("step-2"), tmp_path / "ours", storage_options=options)
    model = injected()
    dos.load({"model": dos.trainable(model)}, bucket.at("step-2"), storage_options=options)
    expected = saved_by_peft(model.eval(), tmp_path / "theirs")
    assert_same(load_file(tmp_path / "ours" / "adapter_model.safetensors"), expected)
    rows = data()[0]["input_ids"][None]
    loaded = peft.PeftModel.from_pretrained(gpt2(), tmp_path / "ours").eval()
    assert torch.equal(loaded(rows).logits, model(rows).logits)


def test_no_other_model_has_the_state_of_one_of_peft(peft):
    with pytest.raises(dos.errors.ConfigError, match="GPT2LMHeadModel"):
        peft_state(gpt2())


# --- the page and the example


def py_blocks() -> list[str]:
    return re.findall(r"^```py\n(.*?)^```", PAGE.read_text(), re.M | re.S)


@pytest.fixture
def credentials(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment(bucket.storage_options).items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("credentials")
def test_the_example_resumes_on_one_rank(bucket, tmp_path, capsys):
    for line in py_blocks()[0].splitlines():
        assert line in EXAMPLE.read_text()
    assert len(EXAMPLE.read_text().splitlines()) < 80

    printed = run_example(EXAMPLE, 2, bucket.url, "10", bucket=bucket, cwd=tmp_path)
    assert "started at step 0, trained to step 10" in printed
    assert [path.name for path in tmp_path.iterdir()] == ["local"]
    with a_machine(str(tmp_path)):
        runpy.run_path(str(EXAMPLE))["main"](bucket.url, 15)
        assert [path.name for path in Path().iterdir()] == ["local"]
    assert "resumed from step 10, trained to step 15" in capsys.readouterr().out
    assert not list(tmp_path.glob("local/checkpoint*"))
    steps = dos.steps(bucket.url)
    assert [(step.name, step.world_size) for step in steps] == [("step-10", 2), ("step-15", 1)]
    read: dict[str, Any] = {"dos": dos}
    exec(py_blocks()[3].replace("s3://bucket/run", bucket.url), read)
    assert json.loads(read["files"]["config.json"])["n_embd"] == 32


@pytest.mark.usefixtures("credentials")
def test_what_the_page_says_of_accelerate_runs(bucket, tmp_path):
    _, one_step, run, _ = (block.replace("s3://bucket/run", bucket.url) for block in py_blocks())
    job: dict[str, Any] = {}
    with a_machine(str(tmp_path)):
        job |= accelerated("single")
        exec(one_step, job)
        job |= {"steps": 1500, "train_one_step": lambda: None}
        exec(run, job)
    assert job["start"] == 10
    steps = dos.steps(bucket.url, storage_options=bucket.storage_options)
    assert [step.name for step in steps] == ["step-10", "step-500", "step-1000", "step-1500"]
