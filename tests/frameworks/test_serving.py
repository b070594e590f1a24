"""What an export leaves in a bucket is read by the libraries with which servers read."""

from __future__ import annotations

import os
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
import torch.distributed as dist

import dcp_objstore as dos
from tests.support.command_line import environment, run_here
from tests.support.ranks import run_ranks
from tests.support.servers import Bucket
from tests.support.states import same_bits, seeded

pytestmark = [pytest.mark.backends("seaweed"), pytest.mark.filterwarnings("ignore")]
RANKS = 3


def environment_of(bucket: Bucket) -> dict[str, str]:
    """The variables that docs/serving.md names."""
    return {
        **environment(bucket.storage_options),
        "AWS_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": "0",
    }


def export_here(rank: int, world: int, url: str, out: str, settings: dict[str, Any]) -> None:
    dos.export_checkpoint(url, out, process_group=dist.group.WORLD, progress=False, **settings)


def test_the_streamer_of_vllm_and_sglang_reads_the_bucket(bucket, tmp_path, monkeypatch):
    streamer = pytest.importorskip("runai_model_streamer")
    pytest.importorskip("runai_model_streamer_s3")
    state = {f"w{number}": seeded(f"w{number}", (50, 10)).bfloat16() for number in range(7)}
    options = {"storage_options": bucket.storage_options}
    dos.save(state, bucket.at("step-1"), progress=False, **options)
    (tmp_path / "config.json").write_text("{}")
    files = {"copied_files": [str(tmp_path / "*.json")], "max_shard_size_bytes": 2500}
    run_ranks(RANKS, export_here, bucket.at("step-1"), bucket.at("model"), {**options, **files})
    for name, value in environment_of(bucket).items():
        monkeypatch.setenv(name, value)
    # As vLLM and SGLang do: the small files first, then the tensors of all shards.
    with streamer.ObjectStorageModel(bucket.at("model"), str(tmp_path / "cache")) as small:
        small.pull_files(allow_pattern=["*.json"])
    assert {path.name for path in (tmp_path / "cache").iterdir()} >= {
        "config.json",
        "model.safetensors.index.json",
    }
    shards = streamer.list_safetensors(bucket.at("model"))
    assert len(shards) == 4
    with streamer.SafetensorsStreamer() as reading:
        reading.stream_files(shards)
        found = {name: tensor.clone() for name, tensor in reading.get_tensors()}
    assert found.keys() == state.keys()
    assert all(same_bits(found[name], value) for name, value in state.items())


def test_a_folder_from_the_bucket_is_a_model_with_its_tokenizer(bucket, tmp_path):
    """By the commands of docs/serving.md, then by from_pretrained: the same tokens and logits."""
    transformers = pytest.importorskip("transformers")
    model, tokenizer = tiny_model(transformers)
    model.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    for parameter in model.parameters():  # a model that was trained since
        torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(1))
    options = {"storage_options": bucket.storage_options}
    dos.save({"model": model}, bucket.at("step-1"), progress=False, **options)
    copy = ["--keys", "model.*", "--rename", "^model[.]=", "--files", str(tmp_path / "base")]
    access = environment_of(bucket)
    done = run_here("export", bucket.at("step-1"), bucket.at("model"), *copy, **access)
    assert done.returncode == 0, done.stderr
    for name in bucket.keys("model"):  # aws s3 sync
        (tmp_path / "local").mkdir(exist_ok=True)
        (tmp_path / "local" / name).write_bytes(bucket.get(f"model/{name}"))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "local")
    words = transformers.AutoTokenizer.from_pretrained(tmp_path / "local")
    chat = [{"role": "user", "content": "a b"}]
    tokens = words.apply_chat_template(chat, return_tensors="pt", return_dict=True)["input_ids"]
    assert tokens.tolist() == [[1, 2, 3]]
    model.eval()
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, model(tokens).logits)
    assert loaded.generation_config.max_new_tokens == 5


def tiny_model(transformers: Any) -> tuple[Any, Any]:
    """A Llama of a few kilobytes with four words and a chat template."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    config = transformers.LlamaConfig(
        vocab_size=8,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    model = transformers.LlamaForCausalLM(config)
    model.generation_config.max_new_tokens = 5
    words = Tokenizer(WordLevel({"?": 0, "user": 1, "a": 2, "b": 3}, unk_token="?"))
    words.pre_tokenizer = WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?")
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }} {{ m.content }}{% endfor %}"
    return model, tokenizer
