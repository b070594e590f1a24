"""Megatron-Core's own functions keep its checkpoints in a bucket: what they save, load and delete.

It runs by itself (`.ci/run second`): Megatron-Core tells torch of types that may be unpickled,
which tests of other files would notice. The ranks are processes of one crew, forked from a server
that has imported it. What it only does on a GPU is done on the CPU (`OnCpu`).
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import os
import shutil
import signal
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

import dcp_objstore as dos
from dcp_objstore.checkpoint.names import MARKER_KEY
from dcp_objstore.stores import StoreSpec
from tests.support.checkpoints import Options
from tests.support.command_line import environment, run_here
from tests.support.launcher import Outcome, Ranks
from tests.support.ranks import RanksFailedError, start_workers
from tests.support.servers import Bucket
from tests.support.wrapped_stores import RecordingStore

if importlib.util.find_spec("megatron") is None:
    pytest.skip("megatron-core is not installed", allow_module_level=True)

pytestmark = [pytest.mark.backends("seaweed"), pytest.mark.timeout(300)]
PRELOAD = (
    "megatron.core.dist_checkpointing",
    "megatron.core.models.gpt",
    "megatron.training.checkpointing",
)
FIXTURES = Path(__file__).parents[1] / "fixtures" / "megatron"
HAS_NVRX = importlib.util.find_spec("nvidia_resiliency_ext") is not None


@pytest.fixture(scope="module")
def crew() -> Iterator[Ranks]:
    with start_workers(preload=PRELOAD) as crew:
        yield crew


def run(crew: Ranks, world: int, work: Callable[..., Any], bucket: Bucket, *args: Any) -> list[Any]:
    """Call `work(url, *args)` on each rank, with Megatron on the CPU and nothing left behind."""
    outcomes = attempt(crew, world, work, bucket, *args)
    if any(outcome.failed for outcome in outcomes):
        raise RanksFailedError(outcomes)
    return [outcome.value for outcome in outcomes]


def attempt(crew: Ranks, world: int, work: Any, bucket: Bucket, *args: Any) -> list[Outcome]:
    """As `run`, but failures are outcomes."""
    return crew.start(world, on_cpu, work, bucket.url, bucket.storage_options, args).end()


class OnCpu(TorchFunctionMode):
    """Makes what Megatron makes on a GPU on the CPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        name = getattr(func, "__name__", "")
        if name == "cuda":
            return args[0]
        value = func(*args, **kwargs)
        # The optimizer looks at the names of types.
        return f"torch.cuda{value[5:]}" if name == "type" and isinstance(value, str) else value


def on_cpu(_rank: int, _world: int, work: Any, url: str, options: Options, args: Any) -> Any:
    from megatron.core import parallel_state

    from dcp_objstore.integrations import megatron

    with (
        mock.patch("torch.cuda.current_device", lambda: "cpu"),
        mock.patch("torch.cuda.synchronize", lambda *_: None),
        mock.patch("torch.cuda.get_rng_state", torch.get_rng_state),
        mock.patch("os.fork", side_effect=AssertionError("a save forked")),
        OnCpu(),
    ):
        parallel_state.destroy_model_parallel()
        schemes = ("s3", "file")
        install = functools.partial(megatron.install, storage_options=options, schemes=schemes)
        try:
            return work(url, install, *args)
        finally:
            dos.uninstall()
            assert not Path("s3:").exists()
            assert not Path("file:").exists()


# --- what is saved


def model_of(tp: int, pp: int, **config: Any) -> Any:
    """A GPTModel of four layers, this rank's part."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    parallel_state.initialize_model_parallel(
        tp, pp, expert_model_parallel_size=config.get("expert_model_parallel_size", 1)
    )
    settings = TransformerConfig(
        num_layers=4,
        hidden_size=32,
        num_attention_heads=4,
        use_cpu_initialization=True,
        pipeline_dtype=torch.float32,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        **config,
    )
    return GPTModel(
        settings,
        get_gpt_layer_local_spec(num_experts=config.get("num_moe_experts")),
        vocab_size=64,
        max_sequence_length=16,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )


def shards(state: Any) -> list[Any]:
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    return [value for value in nested_values(state) if isinstance(value, ShardedTensor)]


def expected(shard: Any, step: int) -> torch.Tensor:
    """The elements of a shard after a step; they tell the step, the tensor and the place."""
    seed = sum(shard.key.encode()) + 1000 * step
    whole = torch.rand(shard.global_shape, generator=torch.Generator().manual_seed(seed))
    for dim, (start, size) in enumerate(
        zip(
            shard.global_offset,
            (1,) * shard.prepend_axis_num + tuple(shard.local_shape),
            strict=True,
        )
    ):
        whole = whole.narrow(dim, start, size)
    return whole.reshape(shard.local_shape)


def train(state: Any, step: int) -> None:
    with torch.no_grad():
        for shard in shards(state):
            shard.data.copy_(expected(shard, step))


def state_of(model: Any) -> dict[str, Any]:
    from megatron.core.dist_checkpointing import ShardedObject

    rank, world = dist.get_rank(), dist.get_world_size()
    return {
        "model": model.sharded_state_dict(),
        "rank": ShardedObject("rank", {"rank": rank, 5: (1,)}, (world,), (rank,)),
    }


def save_in_background(
    url: str, install: Any, strategy: str, tp: int, pp: int, **config: Any
) -> None:
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import torch as strategies

    model = model_of(tp, pp, **config)
    queue = strategies.get_async_strategy(strategy, "AsyncCallsQueue")[1](persistent=False)
    with install():
        for step in (10, 20):
            state = state_of(model)
            train(state, step)
            request = dist_checkpointing.save(
                {**state, "args": {"lr": 0.1}, "iteration": step},
                f"{url}/iter_{step:07d}",
                async_sharded_save=True,
                async_strategy=strategy,
                content_metadata={"version": 3},
            )
            queue.schedule_async_request(request)
            train(state_of(model), step + 1)  # the copy is not touched
        queue.maybe_finalize_async_calls(blocking=True)
        assert queue.get_num_unfinalized_calls() == 0
    dist.barrier()


def load(url: str, install: Any, step: int, tp: int, pp: int, **config: Any) -> None:
    """Load into another layout; every element is that of the step."""
    from megatron.core import dist_checkpointing

    model = model_of(tp, pp, **config)
    state = {"model": model.sharded_state_dict()}
    train(state, 0)
    at = f"{url}/iter_{step:07d}"
    with install():
        loaded = dist_checkpointing.load(state, at)
        metadata = dist_checkpointing.load_tensors_metadata(at)
    assert (loaded["iteration"], loaded["args"]) == (step, {"lr": 0.1})
    assert loaded["content_metadata"] == {"version": 3}
    model.load_state_dict(loaded["model"])
    again = shards(model.sharded_state_dict())
    assert again
    for shard in again:
        assert torch.equal(shard.data, expected(shard, step)), shard.key
        assert metadata[shard.key].global_shape == tuple(shard.global_shape)


STRATEGIES = [
    "mcore",
    pytest.param("nvrx", marks=pytest.mark.skipif(not HAS_NVRX, reason="no nvidia-resiliency-ext")),
]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_tp2_pp2_saves_in_the_background_loads_in_other_layouts_bit_for_bit(
    crew, bucket, strategy
):
    run(crew, 4, save_in_background, bucket, strategy, 2, 2)
    markers = [key for key in bucket.sizes() if key.endswith(MARKER_KEY)]
    assert markers == [f"iter_{step:07d}/{MARKER_KEY}" for step in (10, 20)]
    # Nothing that could be torn beside the commits: no tracker, no common.pt, no metadata.json.
    names = {key.rpartition("/")[2] for key in bucket.sizes()}
    ours = {MARKER_KEY, ".metadata", "_CLAIM"}
    assert {name for name in names if not name.endswith((".distcp", ".msgpack"))} == ours
    for world, tp, step in ((2, 1, 20), (8, 4, 10)) if strategy == "mcore" else ((4, 2, 20),):
        run(crew, world, load, bucket, step, tp, 2)


@pytest.mark.backends("file")
def test_experts_saved_on_two_ranks_each_load_on_one_and_beside_tensor_parallelism(crew, bucket):
    def spread(work: Any, ranks: int) -> Any:
        experts: dict[str, Any] = {"num_moe_experts": 4, "add_bias_linear": False}
        return functools.partial(work, expert_model_parallel_size=ranks, **experts)

    run(crew, 4, spread(save_in_background, 2), bucket, "mcore", 1, 1)
    run(crew, 2, spread(load, 1), bucket, 20, 1, 1)
    run(crew, 4, spread(load, 2), bucket, 20, 2, 1)


def cost_of_saves(url: str, install: Any) -> list[tuple[int, int, int, int]]:
    """Of two saves of one structure: requests; objects sent to ranks; their bytes; plans sent."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
    from torch.distributed import distributed_c10d

    from dcp_objstore.write.planner import AgreeingSavePlanner

    requests: list[Any] = []
    sent: list[int] = []
    plans: list[Any] = []
    opened, pickled = StoreSpec.open, distributed_c10d._object_to_tensor
    planned = AgreeingSavePlanner.create_local_plan

    def noted_plan(planner: Any) -> Any:
        plan: Any = planned(planner)
        plans.extend([] if plan.storage_data.plan is None else [plan])
        return plan

    def noted(*args: Any) -> Any:
        tensor, size = pickled(*args)
        sent.append(int(size))
        return tensor, size

    model, queue, costs = model_of(2, 2), AsyncCallsQueue(), []
    with (
        install(),
        mock.patch.object(StoreSpec, "open", lambda at: RecordingStore(opened(at), requests)),
        mock.patch.object(distributed_c10d, "_object_to_tensor", noted),
        mock.patch.object(AgreeingSavePlanner, "create_local_plan", noted_plan),
    ):
        for step in (10, 20):
            request = dist_checkpointing.save(
                {**state_of(model), "iteration": step},
                f"{url}/iter_{step:07d}",
                validate_access_integrity=step
                == 10,  # as `--ckpt-assume-constant-structure` has it
                async_sharded_save=True,
                async_strategy="mcore",
            )
            queue.schedule_async_request(request)
            queue.maybe_finalize_async_calls(blocking=True)
            dist.barrier()
            costs.append((len(requests), len(sent), sum(sent), len(plans)))
            for noted_of_save in (requests, sent, plans):
                noted_of_save.clear()
    return costs


def test_a_second_save_of_a_structure_exchanges_no_plan_and_asks_less(crew, bucket):
    costs = run(crew, 4, cost_of_saves, bucket)
    print("requests, objects, bytes, plans of two saves, rank by rank:", costs)
    assert sum(second[0] for _, second in costs) < sum(first[0] for first, _ in costs)
    for (_, objects, size, plans), (_, fewer, smaller, none) in costs:
        assert (plans, none) == (1, 0)
        assert fewer < objects
        assert smaller < size


# --- a rank that dies


def die_in_mid_save(url: str, install: Any) -> None:
    from megatron.core import dist_checkpointing

    from dcp_objstore.write.writer import ObjectStoreWriter

    def die(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with install():
        state = {**small_state(1), "iteration": 10}
        dist_checkpointing.save(state, f"{url}/iter_0000010")
        if dist.get_rank() == 1:
            mock.patch.object(ObjectStoreWriter, "write_data", die).start()
        state = {**small_state(2), "iteration": 20}
        request = dist_checkpointing.save(
            state, f"{url}/iter_0000020", async_sharded_save=True, async_strategy="mcore"
        )
        # Alone: a queue asks all ranks by a collective, which would end first.
        with pytest.raises(dos.errors.RankFailedError):
            request.async_fn()
            request.finalize_fns[0]()


def small_state(value: float) -> dict[str, Any]:
    """A row of each rank, and what all have."""
    from megatron.core.dist_checkpointing import ShardedTensor

    rank, world = dist.get_rank(), dist.get_world_size()
    row = torch.full((2, 3), float(value + rank))
    return {
        "rows": ShardedTensor.from_rank_offsets("rows", row, (0, rank, world)),
        "same": ShardedTensor.from_rank_offsets(
            "same", torch.full((5,), float(value)), replica_id=rank
        ),
    }


def newest(url: str, install: Any) -> tuple[str, float]:
    """What the tracker says, and what was saved there."""
    from megatron.core import dist_checkpointing
    from megatron.training import checkpointing

    with install():
        tracker = checkpointing.get_checkpoint_tracker_filename(url)
        assert checkpointing.checkpoint_exists(url)
        iteration, release = checkpointing.read_metadata(tracker)
        assert not release
        name = checkpointing.get_checkpoint_name(url, iteration, return_base_dir=True)
        loaded = dist_checkpointing.load(small_state(0), name)
        assert checkpointing.find_checkpoint_rank_0(url, iteration) == name
    assert loaded["iteration"] == iteration
    assert torch.equal(
        loaded["rows"], torch.full((2, 3), float(loaded["same"][0]) + dist.get_rank())
    )
    return iteration, float(loaded["same"][0])


def test_an_iteration_during_which_a_rank_dies_is_never_seen(crew, bucket):
    survivor, killed = attempt(crew, 2, die_in_mid_save, bucket)
    assert killed.exit_signal == signal.SIGKILL
    assert not survivor.failed, survivor
    assert f"iter_0000020/{MARKER_KEY}" not in bucket.sizes()
    assert run(crew, 2, newest, bucket) == [(10, 1.0)] * 2


# --- a run


def save_steps(
    url: str, install: Any, steps: tuple[int, ...], resume: int | None = None, **settings: Any
) -> None:
    from megatron.core import dist_checkpointing

    with install(**settings):
        if resume is not None:
            dist_checkpointing.load(small_state(0), f"{url}/iter_{resume:07d}")
        for step in steps:
            state = {**small_state(step), "iteration": step}
            dist_checkpointing.save(state, f"{url}/iter_{step:07d}")
        for work in retentions():
            work.join()


def retentions() -> list[Any]:
    """The deletions that follow the saves of this job."""
    from dcp_objstore.integrations.megatron import _Installed

    saves = [run._saves for run in _Installed.runs.values()]
    return [one._retention for one in saves if one is not None and one._retention is not None]


def kept(bucket: Bucket) -> list[str]:
    return sorted(
        key.split("/")[0] for key in bucket.sizes() if key.endswith(".distcp") and "__0_" in key
    )


@pytest.mark.backends("file")
def test_policies_keep_iterations_by_their_own_names(crew, bucket):
    run(crew, 2, functools.partial(save_steps, steps=(1, 2, 3, 10), keep=dos.KeepLatest(2)), bucket)
    assert kept(bucket) == ["iter_0000003", "iter_0000010"]


def save_other_name(url: str, install: Any) -> None:
    from megatron.core import dist_checkpointing

    with install(claim_run=False):  # no iteration's name, so it is no step
        dist_checkpointing.save({**small_state(7), "iteration": 7}, f"{url}/iter_00000003")
        dist_checkpointing.save({**small_state(7), "iteration": 7}, f"{url}/release")


def test_each_iteration_has_one_name_so_that_retention_deletes_what_it_means(crew, bucket):
    run(crew, 1, save_other_name, bucket)
    keep = functools.partial(save_steps, keep=dos.KeepLatest(1))
    run(crew, 1, functools.partial(keep, steps=(3, 4)), bucket)
    assert kept(bucket) == ["iter_00000003", "iter_0000004", "release"]


@pytest.mark.backends("file")
def test_a_job_that_goes_back_leaves_the_later_iterations(crew, bucket):
    run(crew, 2, functools.partial(save_steps, steps=(10, 20, 30)), bucket)
    run(crew, 2, functools.partial(save_steps, resume=10, steps=(15,)), bucket)
    assert run(crew, 2, newest, bucket) == [(15, 15.0)] * 2


def test_a_job_that_has_loaded_nothing_does_not_save_below_later_iterations(crew, bucket):
    run(crew, 1, functools.partial(save_steps, steps=(30,)), bucket)
    with pytest.raises(RanksFailedError, match="has loaded no step") as failed:
        run(crew, 1, functools.partial(save_steps, steps=(10,)), bucket)
    assert isinstance(failed.value.outcomes[0].error, dos.errors.CheckpointExistsError)
    assert kept(bucket) == ["iter_0000030"]


def be_superseded(url: str, install: Any) -> None:
    from megatron.core import dist_checkpointing

    options = install.keywords["storage_options"]
    with install():
        dist_checkpointing.save({**small_state(1), "iteration": 10}, f"{url}/iter_0000010")
        assert dos.claim_run(url, storage_options=options).number == 2  # that of another job
        with pytest.raises(dos.errors.SupersededError):
            dist_checkpointing.save({**small_state(2), "iteration": 20}, f"{url}/iter_0000020")


def test_a_job_whose_run_was_claimed_adds_nothing(crew, bucket):
    run(crew, 2, be_superseded, bucket)
    assert run(crew, 2, newest, bucket) == [(10, 1.0)] * 2


@pytest.mark.backends("file")
def test_the_commands_work_on_a_run(crew, bucket):
    run(crew, 2, functools.partial(save_steps, steps=(10, 20)), bucket)
    access, last = environment(bucket.storage_options), bucket.at("iter_0000020")
    assert "iter_0000010" in run_here("ls", bucket.url, **access).stdout
    assert "rows [4, 3]" in run_here("inspect", last, **access).stdout
    verified = run_here("verify", "--deep", last, **access)
    assert (verified.returncode, verified.stderr) == (0, ""), verified


# --- megatron.training


class FusedAdam(torch.optim.Optimizer):
    """Has the state of Apex's; Megatron loads no other into its distributed optimizer."""

    def __init__(self, params: Any, lr: float, **_: Any) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                state = self.state[parameter]
                for name, gradient in (("exp_avg", 1), ("exp_avg_sq", 2)):
                    moment = state.setdefault(name, torch.zeros_like(parameter))
                    moment.lerp_(parameter.grad**gradient, 0.1)
                parameter.sub_(state["exp_avg"], alpha=group["lr"])


def set_arguments(url: str, tp: int, pp: int, flags: str) -> None:
    """Set what Megatron-LM's command line would set."""
    from megatron.core import num_microbatches_calculator as microbatches
    from megatron.training import async_utils, global_vars
    from megatron.training.arguments import parse_args

    argv = (
        "pretrain_gpt.py --num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16"
        " --max-position-embeddings 16 --micro-batch-size 1 --save-interval 10 --no-save-rng"
        f" --no-load-rng --save {url} --load {url} --async-save"
        f" --async-strategy mcore --tensor-model-parallel-size {tp} --ckpt-format torch_dist"
        f" --pipeline-model-parallel-size {pp} --ckpt-assume-constant-structure {flags}"
    )
    with mock.patch.object(sys, "argv", argv.split()):
        args = parse_args()
    args.rank, args.world_size = dist.get_rank(), dist.get_world_size()
    args.data_parallel_size = args.world_size // (tp * pp)
    args.padded_vocab_size, args.use_dist_ckpt = 64, True
    args.consumed_train_samples = args.consumed_valid_samples = args.skipped_train_samples = 0
    global_vars._GLOBAL_ARGS = None
    global_vars.set_args(args)
    async_utils._async_calls_queue = None
    microbatches.destroy_num_microbatches_calculator()
    microbatches.init_num_microbatches_calculator(args.rank, None, 8, 1, 1)


def training(url: str, tp: int, pp: int, flags: str) -> tuple[list[Any], Any]:
    """Set up Megatron-LM's arguments; a GPTModel and its distributed optimizer."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    model = model_of(tp, pp)
    sharded = DistributedDataParallelConfig(use_distributed_optimizer=True)
    wrapped = [DistributedDataParallel(model.config, sharded, model)]
    settings = OptimizerConfig(use_distributed_optimizer=True, lr=0.1)
    apex = dict.fromkeys(("HAVE_APEX_OR_TE", "USING_APEX_OPTIMIZER"), True)
    mock.patch.multiple("megatron.core.optimizer.distrib_optimizer", **apex).start()
    ours: dict[str, Any] = {"Adam": FusedAdam, "USING_PYTORCH_OPTIMIZER": False}
    with mock.patch.multiple("megatron.core.optimizer", **ours):
        optimizer = get_megatron_optimizer(settings, wrapped)
    set_arguments(url, tp, pp, f"--use-distributed-optimizer {flags}")
    return wrapped, optimizer


def fully_sharded(url: str) -> tuple[list[Any], Any, Any]:
    """As `training`, with torch's FSDP2 (`--use-torch-fsdp2`)."""
    from megatron.core.distributed import (
        DistributedDataParallelConfig,
        TorchFullyShardedDataParallel,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from torch.distributed import DeviceMesh

    model = model_of(1, 1, transformer_impl="local")
    on_gpus = DeviceMesh.from_group
    on_cpus = mock.patch.object(
        DeviceMesh, "from_group", lambda group, _device: on_gpus(group, "cpu")
    )
    with on_cpus:
        wrapped = [
            TorchFullyShardedDataParallel(model.config, DistributedDataParallelConfig(), model)
        ]
    ours: dict[str, Any] = {"Adam": torch.optim.AdamW, "USING_PYTORCH_OPTIMIZER": True}
    with mock.patch.multiple("megatron.core.optimizer", **ours):
        optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.1), wrapped)
    scheduler = OptimizerParamScheduler(
        optimizer, 0.1, 0.1, 0.1, 0, 100, "constant", 0.1, 0.1, 100, "constant"
    )
    set_arguments(url, 1, 1, "--use-torch-fsdp2")
    return wrapped, optimizer, scheduler


def elements(wrapped: list[Any], optimizer: Any) -> dict[str, float]:
    """The sum of each parameter of this rank, and between what the optimizer's moments lie."""
    sums = {name: float(of.double().sum()) for name, of in wrapped[0].named_parameters()}
    states = [of for part in optimizer.chained_optimizers for of in part.optimizer.state.values()]
    moments = torch.cat([torch.zeros(0), *(of["exp_avg"] for of in states)])
    if not moments.numel():  # before the first step
        return sums
    return sums | {"least": float(moments.min()), "most": float(moments.max())}


def step_by(wrapped: list[Any], optimizer: Any, gradient: float) -> None:
    for parameter in wrapped[0].parameters():
        parameter.main_grad.fill_(gradient)
    optimizer.step()


def pretrain(
    url: str, install: Any, tp: int, pp: int, flags: str, until: int
) -> tuple[int, dict[str, float], dict[str, float]]:
    """Resume, train and save as Megatron-LM does; what was loaded, and what was saved last."""
    from megatron.training import async_utils, checkpointing

    wrapped, optimizer = training(url, tp, pp, flags)
    context: dict[str, Any] = {}
    with install(keep=dos.KeepLatest(2)):
        with torch.no_grad():  # Megatron copies into parameters of float32
            iteration, _ = checkpointing.load_checkpoint(
                wrapped, optimizer, None, checkpointing_context=context
            )
        loaded = elements(wrapped, optimizer)
        for step in range(iteration + 10, until + 1, 10):
            step_by(wrapped, optimizer, step / 7)
            checkpointing.save_checkpoint(
                step, wrapped, optimizer, None, 0, checkpointing_context=context
            )
            saved = elements(wrapped, optimizer)
            async_utils.maybe_finalize_async_save(blocking=False)
        async_utils.maybe_finalize_async_save(blocking=True, terminate=True)
        for work in retentions():
            work.join()
    return iteration, loaded, saved if until > iteration else loaded


@pytest.mark.parametrize(
    "flags", ["", "--dist-ckpt-optim-fully-reshardable", "--ckpt-fully-parallel-save"]
)
def test_megatron_lm_saves_and_resumes_with_its_distributed_optimizer(crew, bucket, flags):
    first = run(crew, 4, pretrain, bucket, 1, 2, flags, 30)
    assert [iteration for iteration, _, _ in first] == [0] * 4
    assert kept(bucket) == ["iter_0000020", "iter_0000030"]
    assert not [key for key in bucket.sizes() if key.endswith(".txt")]
    second = run(crew, 4, pretrain, bucket, 1, 2, flags, 30)
    for (_, _, saved), (iteration, loaded, _) in zip(first, second, strict=True):
        assert (iteration, loaded) == (30, saved)


def test_the_reshardable_optimizer_loads_in_another_layout(crew, bucket):
    flags = "--dist-ckpt-optim-fully-reshardable"
    first = run(crew, 4, pretrain, bucket, 1, 2, flags, 10)
    (moments,) = {(saved["least"], saved["most"]) for _, _, saved in first}  # all gradients equal
    assert moments[0] == moments[1] > 0
    other = run(crew, 2, pretrain, bucket, 2, 1, flags, 10)
    assert [iteration for iteration, _, _ in other] == [10, 10]
    assert {(loaded["least"], loaded["most"]) for _, loaded, _ in other} == {moments}


def train_fully_sharded(
    url: str, install: Any, until: int
) -> tuple[int, dict[str, Any], dict[str, Any]]:
    """Resume, train and save with FSDP2; what was loaded, and what was saved last."""
    from megatron.training import async_utils, checkpointing
    from torch.distributed.tensor import DTensor

    def elements_of() -> dict[str, torch.Tensor]:
        """The parameters and their state, each as one tensor; Megatron loads plain local ones."""
        adam, values = optimizer.chained_optimizers[0].optimizer, {}
        for name, parameter in wrapped[0].named_parameters():
            at = parameter.device_mesh, parameter.placements
            for part, value in {"weight": parameter, **adam.state.get(parameter, {})}.items():
                is_local = part != "step" and not isinstance(value, DTensor)
                sharded = DTensor.from_local(value, *at) if is_local else value
                whole = sharded if part == "step" else sharded.full_tensor()
                values[f"{name} {part}"] = whole.detach().clone()
        return values

    # In torch 2.13, `to_local` of a parameter is another tensor each time; Megatron looks for it.
    local = mock.patch(
        "megatron.core.dist_checkpointing.optimizer.to_local_if_dtensor",
        lambda tensor: getattr(tensor, "_local_tensor", tensor),
    )
    wrapped, optimizer, scheduler = fully_sharded(url)
    context: dict[str, Any] = {}
    with install(), local, torch.no_grad():
        iteration, _ = checkpointing.load_checkpoint(
            wrapped, optimizer, scheduler, checkpointing_context=context
        )
        loaded = elements_of()
        for step in range(iteration + 10, until + 1, 10):
            for parameter in wrapped[0].parameters():
                parameter.grad = torch.full_like(parameter, step / 7)
            optimizer.step()
            checkpointing.save_checkpoint(
                step, wrapped, optimizer, scheduler, 0, checkpointing_context=context
            )
            async_utils.maybe_finalize_async_save(blocking=True)
    return iteration, loaded, elements_of()


# Not `--ckpt-format torch_dcp`: 0.19 asks `ChainedOptimizer.state_dict` for what it does not take.
def test_a_fully_sharded_model_resumes_on_other_ranks_bit_for_bit(crew, bucket):
    first = run(crew, 4, train_fully_sharded, bucket, 20)
    assert kept(bucket) == ["iter_0000010", "iter_0000020"]
    for iteration, loaded, _ in run(crew, 2, train_fully_sharded, bucket, 20):
        assert iteration == 20
        assert loaded.keys() == first[0][2].keys()
        for name, value in loaded.items():
            assert torch.equal(value, first[0][2][name]), name


def formats(url: str, install: Any) -> list[str]:
    """What Megatron takes a checkpoint for: one of each of its ways to save."""
    from megatron.core import dist_checkpointing
    from megatron.training.checkpointing import _get_checkpoint_format
    from torch.distributed import checkpoint as dcp

    with install():
        dist_checkpointing.save(small_state(1), f"{url}/iter_0000001")
        writer = dcp.FileSystemWriter(f"{url}/other/one")  # as `--ckpt-format torch_dcp` does it
        dcp.save({"weight": torch.ones(2)}, storage_writer=writer)
        places = [f"{url}/{name}" for name in ("iter_0000001", "other/one")]
        return [_get_checkpoint_format(at, types.SimpleNamespace()) for at in places]


def test_a_checkpoint_is_of_the_format_in_which_it_was_saved(crew, bucket):
    assert run(crew, 1, formats, bucket) == [["torch_dist", "torch_dcp"]]


# --- what Megatron has written, and paths that stay its own


def older_checkpoint(at: Path, version: str) -> None:
    """A folder as that release wrote it, with its `common.pt` and `metadata.json`."""
    shutil.unpack_archive(FIXTURES / f"megatron-core-{version}.zip", at)
    torch.save({"iteration": 100, "content_metadata": {"version": 3}}, at / "common.pt")
    config = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    common = {"common_backend": "torch", "common_backend_version": 1}
    (at / "metadata.json").write_text(json.dumps(config | common))


def load_older(url: str, install: Any) -> dict[str, Any]:
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
    from megatron.training import checkpointing

    with install():
        iteration, _ = checkpointing.read_metadata(
            checkpointing.get_checkpoint_tracker_filename(url)
        )
        at = checkpointing.find_checkpoint_rank_0(url, iteration)
        state = {
            "weight": ShardedTensor.from_rank_offsets("weight", torch.zeros(4, 6)),
            "bias": ShardedTensor.from_rank_offsets("bias", torch.zeros(3)),
            "object": ShardedObject("object", None, (1,), (0,)),
        }
        return dist_checkpointing.load(state, at)


@pytest.mark.parametrize("version", ["0.12.0", "0.16.1"])
def test_what_an_older_megatron_wrote_loads_from_a_bucket(crew, bucket, tmp_path, version):
    older_checkpoint(tmp_path / "iter_0000100", version)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("100")
    for file in tmp_path.rglob("*"):
        if file.is_file():
            bucket.put(str(file.relative_to(tmp_path)), file.read_bytes())
    (loaded,) = run(crew, 1, load_older, bucket)
    assert torch.equal(loaded["weight"], torch.arange(24.0).reshape(4, 6))
    assert torch.equal(loaded["bias"], torch.ones(3))
    assert (loaded["object"], loaded["iteration"]) == ({"x": 5}, 100)


def use_local_folder(url: str, install: Any, folder: str) -> None:
    from megatron.core import dist_checkpointing

    with install(schemes=("s3",)):
        dist_checkpointing.save({**small_state(3), "iteration": 3}, folder)
        assert dist_checkpointing.load(small_state(0), folder)["iteration"] == 3


def test_a_local_folder_stays_megatrons(crew, bucket, tmp_path):
    folder = tmp_path / "iter_0000003"
    folder.mkdir()
    run(crew, 1, use_local_folder, bucket, str(folder))
    assert {"metadata.json", ".metadata"} <= {file.name for file in folder.iterdir()}
    assert not bucket.sizes()


# --- what is refused, and its message


def bad_input(url: str, install: Any) -> dict[str, str]:
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    said: dict[str, str] = {}

    @contextlib.contextmanager
    def refused(what: str) -> Iterator[None]:
        with pytest.raises(BaseException) as caught:  # DCP's is no Exception
            yield
        said[what] = f"{type(caught.value).__name__}: {caught.value}"

    at = f"{url}/iter_0000010"
    with install():
        dist_checkpointing.save({**small_state(1), "iteration": 1}, at)
        with refused("another iteration"):
            dist_checkpointing.load(small_state(0), f"{url}/iter_0000011")
        with refused("another bucket"):
            dist_checkpointing.save(small_state(0), "s3://no-such-bucket-here/iter_0000011")
        state = small_state(0)
        state["rows"].key = "columns"
        with refused("another key"):
            dist_checkpointing.load(state, at)
        with refused("another key, strict"):
            dist_checkpointing.load(state, at, strict="raise_all")
        with refused("another shape"):
            whole = ShardedTensor.from_rank_offsets("rows", torch.zeros(9, 3))
            dist_checkpointing.load({"rows": whole}, at, validate_access_integrity=False)
        with refused("an object of another layout"):
            part = ShardedObject("common_state", None, (2,), (0,))
            dist_checkpointing.load({"object": part}, at, validate_access_integrity=False)
        with refused("a writer of files"):
            FileSystemWriterAsync(at)
        _, missing, unexpected = dist_checkpointing.load(state, at, strict="return_all")
        said["returned"] = f"{missing} {unexpected}"
    return said


def test_bad_input_is_named(crew, bucket):
    for said in run(crew, 2, bad_input, bucket):
        expected = {
            "another iteration": "iter_0000011 is not a distributed checkpoint",
            "another bucket": "BucketNotFoundError",
            "another key": "columns from model not in state dict",
            "another key, strict": "columns",
            "another shape": "rows",
            "an object of another layout": "common_state/shard_0_2",
            "a writer of files": "torch_dist",
            "returned": "{'rows'} {'columns'}",
        }
        assert said.keys() == expected.keys()
        for what, word in expected.items():
            assert word in said[what], (what, said[what])
