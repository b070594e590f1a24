"""Train with torchtitan's own parts, and keep the run in a bucket. Stop it, go on with other ranks.

    torchrun --nproc-per-node 4 examples/torchtitan_train.py s3://bucket/run 30
    torchrun --nproc-per-node 2 examples/torchtitan_train.py s3://bucket/run 60

torchtitan's Trainer needs GPUs; before its `torchtitan.train.main()`, the same call is enough.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw

from dcp_objstore.integrations import torchtitan


class TrainState:
    """What torchtitan's Trainer saves of itself."""

    step = 0

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"step": torch.tensor(self.step)}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.step = int(state["step"])


def main(url: str, steps: int) -> None:
    torchtitan.install()  # once, before the CheckpointManager is used
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).to(device)
    fully_shard(model, mesh=dist.init_device_mesh(device, (dist.get_world_size(),)))
    optimizers = default_adamw(lr=1e-3, fused=device == "cuda").build(model_parts=[model])
    schedulers = LRSchedulersContainer.Config(warmup_steps=10)
    schedulers = schedulers.build(optimizers=optimizers, training_steps=1000)
    train = TrainState()
    config = CheckpointManager.Config(
        enable=True,
        folder=url,
        interval=10,
        keep_latest_k=2,
        async_mode="async",
        last_save_model_only=False,  # so that a longer run can go on from the last step
    )
    checkpointer = config.build(
        dataloader=None,
        model_parts=[model],
        optimizers=optimizers,
        lr_schedulers=schedulers,
        states={"train_state": train},
        sd_adapter=None,
    )
    checkpointer.load()
    start = train.step
    while train.step < steps:
        train.step += 1
        model(torch.randn(8, 64, device=device)).square().mean().backward()
        optimizers.step()
        optimizers.zero_grad()
        schedulers.step()
        checkpointer.save(train.step, last_step=train.step == steps)
    checkpointer.close()
    if dist.get_rank() == 0:
        print(f"{'resumed from' if start else 'started at'} step {start}, trained to step {steps}")
    dist.destroy_process_group()


if __name__ == "__main__":  # the child that saves with async_with_pinned_mem imports this file
    main(sys.argv[1], int(sys.argv[2]))
