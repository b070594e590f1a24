"""Ranks that train on a GPU: saved in the background while training goes on, and resumed."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

pytestmark = pytest.mark.gpu

_TRAINING = """
import sys
import torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
import dcp_objstore as dos

backend, rank, ranks, folder = sys.argv[1:]
url = f"file://{folder}/run/step-3"
torch.cuda.set_device(0)
meeting = f"file://{folder}/meeting"
dist.init_process_group(backend, meeting, rank=int(rank), world_size=int(ranks))
mesh = dist.init_device_mesh("cuda", (dist.get_world_size(),))

def build(seed):
    torch.manual_seed(seed)
    layers = torch.nn.Linear(64, 4097), torch.nn.ReLU(), torch.nn.Linear(4097, 64)
    model = torch.nn.Sequential(*layers, torch.nn.LayerNorm(64)).cuda()
    if backend != "gloo":
        fully_shard(model, mesh=mesh)
    else:  # on one GPU, NCCL has no two ranks
        for module in model:
            for name, p in list(module.named_parameters(recurse=False)):
                own = torch.distributed.tensor.Shard(0)
                own = torch.distributed.tensor.distribute_tensor(p, mesh, [own], src_data_rank=None)
                module.register_parameter(name, torch.nn.Parameter(own))
    return model, torch.optim.AdamW(model.parameters(), fused=True)

def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor

def train(model, optimizer, first, count):
    for number in range(first, first + count):
        torch.manual_seed(number)
        if backend != "gloo":
            model(torch.randn(32, 64, device="cuda")).square().mean().backward()
        else:
            for p in model.parameters():
                p.grad = torch.distributed.tensor.DTensor.from_local(
                    torch.randn_like(local(p)), mesh, p.placements, shape=p.shape, stride=p.stride()
                )
        optimizer.step()
        optimizer.zero_grad()

def contents(model, optimizer):
    found = {n: local(p).detach().clone() for n, p in model.named_parameters()}
    for n, p in model.named_parameters():
        for key, value in optimizer.state[p].items():
            found[n, key] = local(value).detach().clone()
    return found

def check(expected, actual):
    assert expected.keys() == actual.keys(), (expected.keys(), actual.keys())
    for key in expected:
        assert expected[key].device == actual[key].device, key
        assert torch.equal(expected[key], actual[key]), key

model, optimizer = build(0)
train(model, optimizer, 0, 3)
saved = contents(model, optimizer)
handle = dos.async_save({"model": model, "optimizer": optimizer}, url)
handle.staged()
train(model, optimizer, 3, 20)  # overwrites what was saved while it is uploaded
handle.result()
later = contents(model, optimizer)

for warm in (0, 2):
    model, optimizer = build(1)
    train(model, optimizer, 100, warm)
    dos.load({"model": model, "optimizer": optimizer}, url)
    check(saved, contents(model, optimizer))
    train(model, optimizer, 3, 20)
    check(later, contents(model, optimizer))
print("right")
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("backend", "ranks"), [("nccl", 1), ("cpu:gloo,cuda:nccl", 1), ("gloo", 2)]
)
def test_sharded_training_on_a_gpu_goes_on_bit_for_bit(backend, ranks, tmp_path):
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU: torch.cuda.is_available() is False")
    started = [
        subprocess.Popen(
            [sys.executable, "-c", _TRAINING, backend, str(rank), str(ranks), str(tmp_path)],
            env=os.environ | {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    for process in started:
        said, _ = process.communicate(timeout=200)
        assert process.returncode == 0, said
        assert said.rstrip().endswith("right"), said
