"""Lightning's Trainer with FSDP2, saving to a bucket, where any number of ranks resumes.

    torchrun --nproc-per-node 2 examples/lightning_fsdp.py s3://bucket/run 20
    torchrun --nproc-per-node 3 examples/lightning_fsdp.py s3://bucket/run 40

It runs on CPUs and on GPUs. Lightning itself looks at the folder with s3fs, so that is needed.
"""

from __future__ import annotations

import os
import sys
import warnings
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from dcp_objstore.integrations.lightning import with_object_store


class Classifier(lightning.LightningModule):
    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.Sequential(nn.Linear(32, width), nn.ReLU(), nn.Linear(width, 4))

    def configure_model(self) -> None:  # also without a mesh, for `load_from_checkpoint`
        if self.device_mesh is not None and not isinstance(self.layers, FSDPModule):
            fully_shard(self.layers, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        inputs, labels = batch
        loss = nn.functional.cross_entropy(self.layers(inputs), labels)
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def main(url: str, steps: int) -> None:
    warnings.filterwarnings("ignore", module="lightning")
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    strategy = ModelParallelStrategy(data_parallel_size=world_size, tensor_parallel_size=1)
    keep = ModelCheckpoint(url, every_n_train_steps=5, monitor="loss", save_top_k=2)
    trainer = lightning.Trainer(
        strategy=strategy,
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")),
        max_steps=steps,
        callbacks=[keep],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with_object_store(trainer)
    inputs = torch.randn(512, 32, generator=torch.Generator().manual_seed(0))
    data = torch.utils.data.TensorDataset(inputs, inputs[:, :4].argmax(1))
    loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
    trainer.fit(Classifier(), loader, ckpt_path="last")  # nothing there: from the start
    if trainer.is_global_zero:
        resumed = trainer.ckpt_path or "nothing"
        print(f"resumed from {resumed}, trained to step {trainer.global_step}")
        print(f"best: {keep.best_model_path}")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
