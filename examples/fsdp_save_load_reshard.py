"""Save an FSDP model; load it on another number of ranks, or in one process without FSDP.

    torchrun --nproc-per-node 2 examples/fsdp_save_load_reshard.py save s3://bucket/step-1
    torchrun --nproc-per-node 3 examples/fsdp_save_load_reshard.py load s3://bucket/step-1
    python examples/fsdp_save_load_reshard.py export s3://bucket/step-1

`file:///tmp/step-1` works as well. This is PyTorch's recipe "Getting Started with Distributed
Checkpoint (DCP)" in a bucket. What changes:

- `dos.save` and `dos.load` take modules and optimizers, so no class `AppState` is needed. If you
  have one, keep it: `dcp.save({"app": AppState(model, optimizer)},
  storage_writer=dos.ObjectStoreWriter(url))`, and `dcp.load` with `storage_reader=` likewise.
- `export` is one process without ranks. It reads the weights from the bucket, and nothing else.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import dcp_objstore as dos


def make_model() -> nn.Module:
    """Return the model as any program would make it."""
    return nn.Sequential(nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 8))


def save_or_load(action: str, url: str) -> None:
    """Train a step and save, or load; each rank transfers the shards that it holds."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device("cuda")
    dist.init_process_group()

    with torch.device("meta" if action == "load" else torch.get_default_device()):
        model = make_model()
    fully_shard(model)
    if action == "load":  # a tensor on the meta device has a shape, and no memory
        model.to_empty(device=torch.get_default_device())  # memory for the shards of this rank
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    state = {"model": model, "optimizer": optimizer}

    if action == "load":
        dos.load(state, url)
    else:
        model(torch.rand(8, 16)).sum().backward()
        optimizer.step()
        dos.save(state, url)

    # The sum of all weights is the same on every number of ranks.
    total = sum(weight.full_tensor().sum().item() for weight in model.parameters())
    if dist.get_rank() == 0:
        print(f"{action} on {dist.get_world_size()} ranks: the weights sum up to {total:.3f}")
    dist.destroy_process_group()


def export(url: str) -> None:
    """Load the weights into a plain model, and write a file that `torch.load` reads."""
    weights = dos.read_state_dict(url, "model.*")["model"]
    model = make_model()
    model.load_state_dict(weights)
    torch.save(weights, "model.pt")
    total = sum(weight.sum().item() for weight in model.parameters())
    print(f"export: the weights sum up to {total:.3f}, and are in model.pt")


if __name__ == "__main__":
    action, url = sys.argv[1:]
    export(url) if action == "export" else save_or_load(action, url)
