"""Train under torchft: replica groups heal each other, and checkpoints outlive all of them.

    torchft_lighthouse --min_replicas 1 &  # on one machine, HOST
    export TORCHFT_LIGHTHOUSE=http://HOST:29510 TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    torchrun --max-restarts 9 examples/torchft_train.py group-0 s3://bucket/run 1000
    torchrun --max-restarts 9 examples/torchft_train.py group-1 s3://bucket/run 1000

Start one more group, or stop one, at any time. `file:///tmp/run` works as well.
"""

import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torchft
from torch import nn

import dcp_objstore as dos

group, url, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
on_gpu = torch.cuda.is_available()
device = torch.device("cuda" if on_gpu else "cpu")
dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")  # of this replica group alone

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256)).to(device)
optimizer = torch.optim.AdamW(model.parameters())


def heal(received: dict[str, Any]) -> None:
    """Take over the state of another replica group."""
    model.load_state_dict(received["model"])
    optimizer.load_state_dict(received["optimizer"])
    print(f"{group} was healed by another", flush=True)


replicas = torchft.Manager(
    pg=(torchft.ProcessGroupNCCL if on_gpu else torchft.ProcessGroupGloo)(timedelta(seconds=30)),
    load_state_dict=heal,
    state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
    min_replica_size=1,
    replica_id=group,
)
replicated = torchft.DistributedDataParallel(replicas, model)
agreed = torchft.Optimizer(replicas, optimizer)
state = {"model": model, "optimizer": optimizer, "torchft": replicas}

# claim_run=False: any replica group may have to save the next step.
with dos.CheckpointManager(url, keep=dos.KeepLatest(3), claim_run=False) as run:
    start = run.load(state) or 0  # for a group that joins others, only until they heal it
    print(f"{group} starts from step {start}", flush=True)
    while (before := replicas.current_step()) < steps:
        agreed.zero_grad()  # finds out which groups there are
        loss = replicated(torch.randn(8, 256, device=device)).square().mean()
        loss.backward()
        agreed.step()  # does nothing if a group was lost in this step
        step = replicas.current_step()
        if step > before and step % 10 == 0 and replicas.participating_rank() == 0:
            run.async_save(step, state, metrics={"loss": loss.item()})
replicas.shutdown()
dist.destroy_process_group()
