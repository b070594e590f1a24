"""Save Hugging Face's Trainer to a bucket, and resume it on another machine with other ranks.

    torchrun --nproc-per-node 2 examples/hf_trainer.py s3://bucket/run 20
    python examples/hf_trainer.py s3://bucket/run 40

The second command goes on where the first ended. `file:///tmp/run` works as well.
"""

import sys

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from dcp_objstore.integrations.hf import with_object_store


def main(url: str, steps: int) -> None:
    """Train up to a step, and save every fifth."""
    args = TrainingArguments(
        "local",  # a folder for logs and the like; no checkpoint is written there
        max_steps=steps,
        save_steps=5,
        save_total_limit=2,
        per_device_train_batch_size=4,
        lr_scheduler_type="constant",
        report_to="none",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        # fsdp=True shards the model on GPUs; accelerate has no FSDP for CPUs.
    )
    trainer = Trainer(tiny_model(), args, train_dataset=rows())
    trainer = with_object_store(trainer, url)
    trainer.train(resume_from_checkpoint=True)

    if trainer.is_world_process_zero():
        start = trainer.run.last_resume.step or 0
        began = "resumed from" if start else "started at"
        print(f"{began} step {start}, trained to step {trainer.state.global_step}")
    if dist.is_initialized():
        dist.destroy_process_group()


def tiny_model() -> GPT2LMHeadModel:
    """Return a GPT-2 of 30,000 parameters."""
    torch.manual_seed(0)
    shape = {"vocab_size": 64, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=0, eos_token_id=0))


def rows() -> list[dict[str, torch.Tensor]]:
    """Return 256 rows of random tokens."""
    tokens = torch.randint(0, 64, (256, 16), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in tokens]


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
