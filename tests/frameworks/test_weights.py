"""Models of transformers are filled from a bucket as `from_pretrained` fills them from a folder."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import dcp_objstore as dos
from dcp_objstore.stores import open_store
from tests.support.command_line import environment
from tests.support.programs import run_in_forks
from tests.support.ranks import run_ranks
from tests.support.servers import Bucket
from tests.support.states import same_bits

pytest.importorskip("transformers")

from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    GPT2Config,
    LlamaConfig,
    T5Config,
)

ROOT = Path(__file__).parents[2]
MODEL = [("^", "model.")]
# Tied to their embeddings are the heads of all but the last.
FAMILIES: dict[str, tuple[Any, Any]] = {
    "gpt2": (AutoModelForCausalLM, GPT2Config(vocab_size=71, n_embd=24, n_layer=2, n_head=2)),
    "t5": (
        AutoModelForSeq2SeqLM,
        T5Config(vocab_size=71, d_model=24, d_kv=12, d_ff=48, num_layers=2, num_heads=2),
    ),
    "tied llama": (
        AutoModelForCausalLM,
        LlamaConfig(
            vocab_size=71,
            hidden_size=24,
            intermediate_size=52,
            num_hidden_layers=2,
            num_attention_heads=2,
            tie_word_embeddings=True,
        ),
    ),
    "llama": (
        AutoModelForCausalLM,
        LlamaConfig(
            vocab_size=71,
            hidden_size=24,
            intermediate_size=52,
            num_hidden_layers=2,
            num_attention_heads=2,
        ),
    ),
}


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def save_pretrained(name: str, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    kind, config = FAMILIES[name]
    torch.manual_seed(3)
    kind.from_config(config).to(dtype).save_pretrained(folder, max_shard_size="20KB")


def upload(folder: Path, bucket: Bucket) -> str:
    url = bucket.at("hub")
    store = open_store(url, bucket.storage_options)
    for path in folder.iterdir():
        store.put(path.name, path.read_bytes())
    return url


def as_from_pretrained(
    rank: int, world_size: int, name: str, folder: str, url: str, options: Mapping[str, object]
) -> None:
    """Under FSDP2: memory for the shards only."""
    kind, config = FAMILIES[name]
    with torch.device("meta"):
        model = kind.from_config(config, dtype=torch.bfloat16)
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    model.to_empty(device="cpu")
    model.init_weights()
    report = dos.load(
        {"model": model},
        url,
        rename=MODEL,
        storage_options=options,
        on_dtype="error",
        progress=False,
    )
    assert report.missing == ()
    theirs = kind.from_pretrained(folder, dtype=torch.bfloat16)
    buffers = dict(theirs.named_buffers())
    for key, buffer in model.named_buffers():
        assert torch.equal(buffer, buffers[key]), key
    loaded, expected = model.state_dict(), theirs.state_dict()
    assert loaded.keys() == expected.keys()
    for key, value in loaded.items():
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        assert same_bits(whole, expected[key]), key


@pytest.mark.backends("seaweed")
def test_a_model_under_fsdp2_is_as_from_pretrained_makes_it(bucket, tmp_path, family):
    save_pretrained(family, tmp_path)
    assert (tmp_path / "model.safetensors.index.json").exists()
    url = upload(tmp_path, bucket)
    run_ranks(2, as_from_pretrained, family, str(tmp_path), url, bucket.storage_options)


def test_a_plain_model_is_as_from_pretrained_makes_it(tmp_path, family):
    save_pretrained(family, tmp_path)
    kind, config = FAMILIES[family]
    model = kind.from_config(config, dtype=torch.bfloat16)
    dos.load({"model": model}, tmp_path.as_uri(), rename=MODEL, progress=False)
    expected = kind.from_pretrained(tmp_path, dtype=torch.bfloat16).state_dict()
    assert all(same_bits(value, expected[key]) for key, value in model.state_dict().items())


@pytest.mark.backends("seaweed")
def test_the_program_of_the_page_runs(bucket, tmp_path):
    save_pretrained("llama", tmp_path / "llama", torch.float32)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    url = upload(tmp_path / "llama", bucket)
    env = {**environment(bucket.storage_options), "OMP_NUM_THREADS": "1"}
    words = ["torchrun", "--nproc-per-node", "2", "examples/hf_weights.py", "llama", url]
    printed = run_in_forks(words, tmp_path, env, succeeds=True)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "llama", dtype=torch.float32)
    total = sum(weight.double().sum().item() for weight in model.parameters())
    assert f"the weights sum up to {total:.3f}" in printed
    read = [(int(one), int(two)) for one, two in re.findall(r"read (\d+) .* needed (\d+)", printed)]
    assert sum(needed for _, needed in read) == sum(w.nbytes for w in model.parameters())

    page = (ROOT / "docs" / "weights.md").read_text()
    program = (ROOT / "examples" / "hf_weights.py").read_text()
    (block,) = re.findall(r"^```py\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert block in program
