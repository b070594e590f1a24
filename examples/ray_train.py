"""Train under Ray Train, which starts the workers again when one dies, with as many as there are.

    python examples/ray_train.py s3://bucket/run 1000 2 4  # steps, fewest and most workers

`file:///tmp/run` works as well, on one machine.
"""

import sys
from typing import Any

import ray.train
import torch
from ray.train.torch import TorchTrainer, get_device
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dcp_objstore as dos


def train(config: dict[str, Any]) -> None:
    """Train on one worker."""
    device, workers = get_device(), ray.train.get_context().get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256)).to(device)
    fully_shard(model, mesh=init_device_mesh(device.type, (workers,)))
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer}

    # Ray calls this function in a thread, which gets no signals.
    with dos.CheckpointManager(
        config["url"], keep=dos.KeepLatest(3), save_every=10, preemption=dos.Preemption(signals=())
    ) as run:
        start = run.load(state) or 0  # the newest committed step, with any number of workers
        if ray.train.get_context().get_world_rank() == 0:
            print(f"{workers} workers start from step {start}")
        for step in range(start + 1, config["steps"] + 1):
            loss = model(torch.randn(8, 256, device=device)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.step(step, state, metrics={"loss": loss.item()})
            if step % 10 == 0:  # without checkpoint=: Ray has nothing to upload, keep or delete
                ray.train.report({"loss": loss.item(), "step": step, "url": run.url})


if __name__ == "__main__":
    url, steps, fewest, most = sys.argv[1], *map(int, sys.argv[2:5])
    trainer = TorchTrainer(
        train,
        train_loop_config={"url": url, "steps": steps},
        scaling_config=ray.train.ScalingConfig(
            num_workers=(fewest, most), use_gpu=torch.cuda.is_available()
        ),
        run_config=ray.train.RunConfig(failure_config=ray.train.FailureConfig(max_failures=3)),
    )
    trainer.fit()
    print("trained to", dos.steps(url)[-1].url)
