"""Save in the background: how long does each way of saving hold the training loop?

    torchrun --nproc-per-node 2 examples/async_save.py s3://bucket/run

The stages of PyTorch's tutorial "Asynchronous Saving with Distributed Checkpoint (DCP)":

0. `dcp.save` holds the loop until the checkpoint is committed.
1. `dcp.async_save` holds it until the state is copied to the memory of the host.
2. The same again is faster, because the memory of the copy was kept. With a GPU it is pinned.
3. `dos.async_save` with `wait_for_staging=False` returns before the state is copied. The copy is
   made during the next forward and backward pass; `staged()` waits for the rest of it.
"""

import os
import sys
import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard

import dcp_objstore as dos


def main(url: str) -> None:
    """Train with a save of each kind."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device("cuda")
    dist.init_process_group()
    model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(4)])
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    backward(model)
    optimizer.step()

    # `dcp.async_save` makes collectives in a thread. In a group that FSDP uses too, the ranks would
    # mix them up, and the job would hang or die.
    group = dist.new_group(backend="gloo")
    writer = dos.ObjectStoreWriter()
    for stage, save in enumerate([dcp.save, dcp.async_save, dcp.async_save]):
        step_url, began = f"{url}/step-{stage}", time.perf_counter()
        state = dict(zip(["model", "optimizer"], get_state_dict(model, optimizer), strict=True))
        future = save(state, checkpoint_id=step_url, storage_writer=writer, process_group=group)
        show(stage, time.perf_counter() - began)
        backward(model)
        optimizer.step()  # the save has a copy
        if save is dcp.async_save:
            future.result()  # before the next save, and before the process group is destroyed

    state, began = {"model": model, "optimizer": optimizer}, time.perf_counter()
    handle = dos.async_save(state, f"{url}/step-3", wait_for_staging=False)
    held = time.perf_counter() - began
    backward(model)
    began = time.perf_counter() - held
    handle.staged()  # from here on the weights may change
    show(3, time.perf_counter() - began)
    optimizer.step()
    handle.result()
    dist.destroy_process_group()


def backward(model: nn.Module) -> None:
    """Compute gradients."""
    model(torch.randn(64, 1024)).square().mean().backward()


def show(stage: int, seconds: float) -> None:
    """Print how long a save held the loop of rank 0."""
    if dist.get_rank() == 0:
        print(f"stage {stage} held the loop for {seconds:.3f} s")


if __name__ == "__main__":
    main(sys.argv[1])
