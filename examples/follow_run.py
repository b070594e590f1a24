"""How does another job evaluate the checkpoints of a run while it trains?

    torchrun --nproc-per-node 2 examples/follow_run.py train s3://bucket/run
    python examples/follow_run.py evaluate s3://bucket/run

Start both, in any order and on any machines: only the bucket connects them.

- `train` saves every step, keeps the newest two, and says at the end that the run is finished.
- `evaluate` is slower. It takes the newest step each time, and pins it, so that `train` does not
  delete it under its hands. It ends when the run is finished.
"""

import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dcp_objstore as dos


def train(url: str) -> None:
    """Train, and save each step with its loss."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device("cuda")
    dist.init_process_group()
    model = DistributedDataParallel(nn.Linear(64, 64))
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer}
    with dos.CheckpointManager(url, keep=dos.KeepLatest(2), save_every=1) as run:
        start = run.load(state) or 0
        for step in range(start + 1, 13):
            loss_of(model, torch.randn(8, 64)).backward()
            optimizer.step()
            optimizer.zero_grad()
            run.step(step, state, metrics={"loss": loss_of(model, held_out())})
            if run.preempted():
                break
        else:
            run.finish()  # those who follow the run need not wait for more
    dist.destroy_process_group()


def evaluate(url: str) -> None:
    """Evaluate the newest step, again and again. It needs no process group."""
    model = nn.Linear(64, 64)
    # It looks every 30 s by default. It also ends if nothing has come for an hour.
    for step in dos.follow(
        url, skip_to_newest=True, pin="evaluator", poll_seconds=1, timeout_seconds=3600
    ):
        dos.load({"model": model}, step.url, progress=False)
        time.sleep(0.5)  # a real evaluation takes longer than a step
        loss, told = float(loss_of(model, held_out())), step.user_metadata["metrics"]["loss"]
        print(f"{step.name}: loss {loss:.6f}, {told:.6f} when it was saved")


def loss_of(model: nn.Module, batch: torch.Tensor) -> Any:
    """Return how far the outputs are from 0."""
    return model(batch).square().mean()


def held_out() -> torch.Tensor:
    """Return a batch that is never trained on."""
    return torch.linspace(-1, 1, 64).repeat(2, 1)


if __name__ == "__main__":
    action, url = sys.argv[1:]
    train(url) if action == "train" else evaluate(url)
