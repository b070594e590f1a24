"""The work of one process of the demo: train as a rank, load alone, or load with stock torch."""

from __future__ import annotations

import datetime
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as stock_load
from torch.distributed.fsdp import fully_shard
from tqdm import tqdm

import dcp_objstore as dos
from dcp_objstore.cli.demo.digests import digest_state
from dcp_objstore.cli.demo.fault import hold_uploads
from dcp_objstore.cli.demo.messages import (
    Job,
    LoadWithStock,
    RankEvent,
    RankFailed,
    Ready,
    State,
    StepLoaded,
    Stepped,
    StepSaved,
    Train,
)
from dcp_objstore.cli.demo.model import (
    ByteTransformer,
    fixed_batch,
    next_byte_loss,
    read_text,
    training_batch,
)
from dcp_objstore.errors import DcpObjstoreError

Report = Callable[[RankEvent], None]
_LEARNING_RATE = 1e-3
# Collectives of a group with a dead rank end after this, if its closed connections do not end them.
_GROUP_TIMEOUT = datetime.timedelta(seconds=60)
_SAVE_TIMEOUT_SECONDS = 90.0


def run(job: Job, rank: int, ranks: int, rendezvous: str, report: Report) -> bool:
    """Do the job and report events; report an error, too.

    Returns:
        Whether the job was done without an error.
    """
    torch.set_num_threads(1)
    # tqdm's own lock holds a named semaphore, which a killed process leaves behind.
    tqdm.set_lock(threading.RLock())
    try:
        if ranks:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{rendezvous}",
                rank=rank,
                world_size=ranks,
                timeout=_GROUP_TIMEOUT,
            )
        if isinstance(job, Train):
            _Trainer(job, rank, ranks, report).run()
        elif isinstance(job, LoadWithStock):
            _load_with_stock(job, report)
        else:
            report(_Training(seed=3).load(job.url, job.storage_options))
    except Exception as error:  # noqa: BLE001  every error is reported to the launcher
        traceback.print_exc()
        ours = error if isinstance(error, DcpObjstoreError) else None
        report(RankFailed(error=ours, text=f"{type(error).__name__}: {error}"))
        return False
    return True


class _Training:
    """A model, its optimizer and their progress."""

    def __init__(self, seed: int, *, sharded: bool = False) -> None:
        torch.manual_seed(seed)
        self.model = ByteTransformer()
        self.parameters = sum(one.numel() for one in self.model.parameters())
        if sharded:
            for block in self.model.blocks:
                fully_shard(block)
            fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=_LEARNING_RATE)
        self.progress: dict[str, Any] = {"step": 0, "loss": 0.0}
        self.text = read_text()

    @property
    def values(self) -> dict[str, Any]:
        """The state that is saved and loaded."""
        return {"model": self.model, "optimizer": self.optimizer, "progress": self.progress}

    def tensors(self) -> dict[str, Any]:
        """Return the state as nested dicts of tensors and plain values."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "progress": self.progress}

    def step(self, sequences: int, rank: int, ranks: int) -> float:
        """Do one step of training and return its loss, the mean over all ranks."""
        batch = training_batch(self.text, self.progress["step"], sequences)
        loss = next_byte_loss(self.model, batch[rank::ranks])
        loss.backward()  # type: ignore[no-untyped-call]  # torch's
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.progress["step"] += 1
        mean = loss.detach() / ranks
        dist.all_reduce(mean)
        return mean.item()

    @torch.no_grad()
    def fixed_loss(self) -> float:
        """Return the loss on the batch that never changes; each rank computes its share."""
        batch = fixed_batch(self.text)
        rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        share = batch[rank::ranks]
        total = next_byte_loss(self.model, share).double() * len(share)
        if ranks > 1:
            dist.all_reduce(total)
        return total.item() / len(batch)

    def snapshot(self) -> State:
        """Describe the state as it is now, for a comparison elsewhere. A collective in a group."""
        return State(
            step=self.progress["step"],
            recorded_loss=self.progress["loss"],
            fixed_loss=self.fixed_loss(),
            digests=digest_state(self.tensors()),
        )

    def load(self, url: str, storage_options: Any) -> StepLoaded:
        """Load in place and describe the result."""
        values = self.values
        report = dos.load(values, url, storage_options=storage_options, progress=False)
        self.progress = values["progress"]
        return StepLoaded(
            state=self.snapshot(), total_bytes=report.total_bytes, seconds=report.seconds
        )


class _Trainer:
    """One rank of a training run."""

    def __init__(self, job: Train, rank: int, ranks: int, report: Report) -> None:
        self.job, self.rank, self.ranks = job, rank, ranks
        self._report = report
        # Another seed than that of the resumed run: its values must come from the checkpoint.
        self.training = _Training(1 if job.resume_url is None else 2, sharded=True)

    def run(self) -> None:
        """Train from save to save; each upload runs during the steps that follow."""
        self._tell(Ready(parameters=self.training.parameters, text_bytes=len(self.training.text)))
        if self.job.resume_url is not None:
            self._report(self.training.load(self.job.resume_url, self.job.storage_options))
        under_way: _Save | None = None
        while self.training.progress["step"] < self.job.save_steps[-1]:
            loss = self.training.step(self.job.sequences_per_step, self.rank, self.ranks)
            step = self.training.progress["step"]
            self._tell(Stepped(step=step, loss=loss))
            if step in self.job.save_steps:
                self._finish(under_way)
                under_way = self._begin_save(step)
        self._finish(under_way)

    def _tell(self, event: RankEvent) -> None:
        if self.rank == 0:
            self._report(event)

    def _begin_save(self, step: int) -> _Save:
        self.training.progress["loss"] = self.training.fixed_loss()
        state = self.training.snapshot()
        if step == self.job.doomed_step and self.rank == self.ranks - 1:
            hold_uploads(self._report)
        handle = dos.async_save(
            self.training.values,
            f"{self.job.run_url}/step-{step}",
            storage_options=self.job.storage_options,
            progress=False,
            user_metadata={"step": step, "loss": round(state.recorded_loss, 4)},
        )
        handle.staged()
        return _Save(handle, state)

    def _finish(self, save: _Save | None) -> None:
        if save is None:
            return
        report = save.handle.result(timeout_seconds=_SAVE_TIMEOUT_SECONDS)
        self._tell(
            StepSaved(
                state=save.state,
                total_bytes=report.total_bytes,
                seconds=report.seconds,
                objects=report.objects,
                steps_meanwhile=self.training.progress["step"] - save.state.step,
            )
        )


class _Save:
    """A save under way, and the state that it saves."""

    def __init__(self, handle: Any, state: State) -> None:
        self.handle, self.state = handle, state


def _load_with_stock(job: LoadWithStock, report: Report) -> None:
    """Load the checkpoint in both ways that torch has to read one without a process group."""
    training = _Training(seed=4)
    state = training.tensors()
    began = time.monotonic()
    stock_load(state, storage_reader=FileSystemReader(job.directory), no_dist=True)
    report(_stock(state, "FileSystemReader", began))
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "checkpoint.pt"
        began = time.monotonic()
        dcp_to_torch_save(job.directory, file)
        state = torch.load(file, weights_only=True)
        report(_stock(state, "dcp_to_torch_save", began))


def _stock(state: dict[str, Any], reader: str, began: float) -> StepLoaded:
    progress = state["progress"]
    return StepLoaded(
        state=State(
            step=progress["step"],
            recorded_loss=progress["loss"],
            fixed_loss=None,
            digests=digest_state(state),
        ),
        total_bytes=0,
        seconds=time.monotonic() - began,
        reader=reader,
    )
