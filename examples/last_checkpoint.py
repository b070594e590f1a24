"""Why is my last checkpoint missing? A loop that loses it, and one that does not.

    torchrun --nproc-per-node 2 examples/last_checkpoint.py naive s3://bucket/naive
    torchrun --nproc-per-node 2 examples/last_checkpoint.py killed s3://bucket/run
    torchrun --nproc-per-node 1 examples/last_checkpoint.py resumed s3://bucket/run

- `naive` saves steps 10 and 20 in the background and ends. Nobody waits for step 20, so it is
  missing. The writer prints why; stock torch says nothing. The exit status can be 0.
- `killed` is a job with a manager. Its rank 1 is killed while it uploads step 20.
- `resumed` is the next job, on one rank. It goes on from step 10, the newest step that is whole,
  and ends with step 25. It saves that one too, although it is no multiple of 10.
"""

import os
import signal
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dcp_objstore as dos


def naive(url: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Save as in PyTorch's tutorial of `async_save`: wait for the save before, not for the last."""
    future, group = None, dist.new_group(backend="gloo")
    for step in range(1, 21):
        train(model, optimizer)
        if step % 10 == 0:
            if future is not None:
                future.result()
            writer = dos.ObjectStoreWriter(f"{url}/step-{step}")
            future = dcp.async_save(model.state_dict(), storage_writer=writer, process_group=group)
    if dist.get_rank() == 0:
        print(f"future.result() is missing here. Is step 20 there? dcp-objstore ls {url}")


def managed(url: str, model: nn.Module, optimizer: torch.optim.Optimizer, action: str) -> None:
    """Save with a manager: leaving its block saves the last step, and waits until it is whole."""
    on_event = die if action == "killed" and dist.get_rank() == 1 else None
    state = {"model": model, "optimizer": optimizer}
    with dos.CheckpointManager(url, save_every=10, on_event=on_event) as run:
        start = run.load(state) or 0
        for step in range(start + 1, 26):
            train(model, optimizer)
            run.step(step, state)
    if dist.get_rank() == 0:
        print(f"resumed from step {start}, saved:", *[step.name for step in dos.steps(url)])


def die(event: dos.observe.events.Event) -> None:
    """Kill this rank when it has uploaded its first part of step 20."""
    if isinstance(event, dos.observe.events.PartUploaded) and event.url.endswith("/step-20"):
        os.kill(os.getpid(), signal.SIGKILL)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Train one step."""
    model(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


if __name__ == "__main__":
    action, url = sys.argv[1:]
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device("cuda")
    dist.init_process_group()
    model = DistributedDataParallel(nn.Linear(64, 64))
    optimizer = torch.optim.AdamW(model.parameters())
    if action == "naive":
        naive(url, model, optimizer)
    else:
        managed(url, model, optimizer, action)
    dist.destroy_process_group()
