"""Save DDP training to a bucket, and resume it with any number of ranks.

    torchrun --nproc-per-node 2 examples/ddp.py s3://bucket/run
    torchrun --nproc-per-node 1 examples/ddp.py s3://bucket/run

The second command goes on where the first ended. `file:///tmp/run` works as well.

Most pages save on rank 0 alone:

    if dist.get_rank() == 0:
        torch.save({"model": model.state_dict(), "step": step}, "checkpoint.pt")
    dist.barrier()

- The file is on the disk of one machine. A job that starts on another one does not find it, and
  `torch.save` cannot write to "s3://...".
- A job that is killed during the save leaves a torn file where the last good checkpoint was.
- The other ranks wait at the barrier. If rank 0 fails, or takes longer than the time-out of the
  process group, they fail there, and their errors do not say why.
- The keys begin with "module.", so a model that is not wrapped in DDP cannot load them.
- Without `map_location`, all ranks load the tensors onto the GPU of rank 0.
"""

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dcp_objstore as dos


def main(url: str) -> None:
    """Train ten more steps, and save after every fifth."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device("cuda")
    dist.init_process_group()

    network = nn.Sequential(nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 1))
    model = DistributedDataParallel(network)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "step": 0}
    try:
        dos.load(state, url)  # into the model and the optimizer, on their devices
    except dos.errors.CheckpointNotFoundError:
        pass  # a new run
    start = state["step"]  # values such as this one are replaced in the dict

    for step in range(start + 1, start + 11):
        x = torch.randn(32, 16)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 5 == 0:
            # On every rank: each uploads its share, and all see an error of any of them. The
            # checkpoint before is there until this one is committed, which is one request.
            state["step"] = step
            dos.save(state, url, overwrite=True)

    if dist.get_rank() == 0:
        began = "resumed from" if start else "started at"
        print(f"{began} step {start}, saved step {step}, loss {loss:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
