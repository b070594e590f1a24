"""Fill a model under FSDP2 with the weights of a Hugging Face model that lie in a bucket.

    torchrun --nproc-per-node 2 examples/hf_weights.py llama s3://bucket/llama

`llama` is a local folder with config.json, `s3://bucket/llama` one with the safetensors, as
`aws s3 sync` of a model of the hub leaves it. Each rank reads the ranges of its own shards.
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

import dcp_objstore as dos

config_folder, url = sys.argv[1:]
device = "cuda" if torch.cuda.is_available() else "cpu"
dist.init_process_group()
if device == "cuda":
    torch.cuda.set_device(dist.get_node_local_rank())

with torch.device("meta"):  # shapes without memory
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(config_folder))
for block in model.model.layers:
    fully_shard(block)
fully_shard(model)
model.to_empty(device=device)  # memory for the shards of this rank
model.init_weights()  # fills buffers that no file has, such as the frequencies of rotary embeddings

report = dos.load({"model": model}, url, rename=[("^", "model.")])
print(f"rank {dist.get_rank()} read {report.fetched_bytes} bytes and needed {report.needed_bytes}")

total = sum(weight.full_tensor().double().sum().item() for weight in model.parameters())
if dist.get_rank() == 0:
    print(f"the weights sum up to {total:.3f}")
dist.destroy_process_group()
