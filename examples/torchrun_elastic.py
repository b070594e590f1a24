"""Train under torchrun, which restarts the job when a rank dies or when machines come and go.

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # each restart has a store without old addresses
    torchrun --nproc-per-node 2 --max-restarts 3 examples/torchrun_elastic.py s3://bucket/run 100
    torchrun --nnodes 1:4 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \
        --rdzv-id run --max-restarts 100 examples/torchrun_elastic.py s3://bucket/run 10000
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import dcp_objstore as dos

url, steps = sys.argv[1], int(sys.argv[2])
device = torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256)).to(device)
fully_shard(model, mesh=dist.init_device_mesh(device.type, (ranks,)))
optimizer = torch.optim.AdamW(model.parameters())
state = {"model": model, "optimizer": optimizer}

with dos.CheckpointManager(url, keep=dos.KeepLatest(3), save_every=10) as run:
    start = run.load(state) or 0  # the newest committed step, with any number of ranks
    if rank == 0:
        print(f"{ranks} ranks start from step {start}", flush=True)
    for step in range(start + 1, steps + 1):
        loss = model(torch.randn(8, 256, device=device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.step(step, state, metrics={"loss": loss.item()})
        if run.preempted():  # torchrun stops ranks with SIGTERM when machines come or go
            break
dist.destroy_process_group()
