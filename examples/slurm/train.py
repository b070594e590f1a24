"""Train under Slurm: saved when the job must end, resumed when it comes back.

    sbatch train.sbatch s3://bucket/run 100000 /mnt/nvme
    torchrun --nproc-per-node 2 examples/slurm/train.py s3://bucket/run 100

The last argument is a folder on each node for copies, which a job that starts again there reads
instead of the bucket; leave it out if there is none.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import dcp_objstore as dos

url, steps, local = sys.argv[1], int(sys.argv[2]), (*sys.argv[3:], None)[0]
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

with dos.CheckpointManager(url, keep=dos.KeepLatest(3), save_every=100, local=local) as run:
    start = run.load(state) or 0  # the newest committed step, with any number of ranks
    if rank == 0:
        attempt = os.environ.get("SLURM_RESTART_COUNT", "0")
        print(f"attempt {attempt}: {ranks} ranks start from step {start}", flush=True)
    for step in range(start + 1, steps + 1):
        loss = model(torch.randn(8, 256, device=device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.step(step, state, metrics={"loss": loss.item()})
        if run.preempted():  # SIGTERM on any rank: this step is saved on all, and committed
            break
    else:
        run.finish()  # all steps are done
dist.destroy_process_group()
