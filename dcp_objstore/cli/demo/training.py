"""What the processes of the demo do: train and save as a rank, load alone or with stock torch."""

from __future__ import annotations

import hashlib
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as stock_load
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional

import dcp_objstore as dos
from dcp_objstore.cli.demo.ranks import FinishedLoad, State
from dcp_objstore.write import upload_items

if TYPE_CHECKING:
    from typing_extensions import Buffer

Options = Mapping[str, object] | None
Say = Callable[..., None]

VOCABULARY = 256
CONTEXT = 64
WIDTH = 256
HEADS = 4
LAYERS = 3
FIXED_SEQUENCES = 32
_LEARNING_RATE = 1e-3
_SAVE_TIMEOUT_SECONDS = 90.0


def train(
    say: Say,
    run_url: str,
    storage_options: Options,
    local: dos.Local,
    resume_url: str | None,
    sequences_per_step: int,
    save_steps: tuple[int, ...],
    doomed_step: int | None,
) -> None:
    """Train to the last step as one rank; each save goes on during the steps that follow it.

    Args:
        say: sends a message to the process that has started this one.
        run_url: URL of the run; steps are saved at `{run_url}/step-{n}`.
        storage_options: options of the store.
        local: where copies of the newest step are kept on this node.
        resume_url: the checkpoint to load first; None to begin at step 0.
        sequences_per_step: number of sequences of all ranks together; at least one per rank.
        save_steps: the steps to save, ascending; training ends at the last one.
        doomed_step: the step in whose save the last rank's upload is held until it is killed.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    first = rank == 0
    # Another seed than that of the resumed run, whose values must come from the checkpoint.
    training = Training(1 if resume_url is None else 2, sharded=True)
    if resume_url is not None:
        say("loaded", training.load(resume_url, storage_options, local))
    elif first:
        say("ready", sum(one.numel() for one in training.model.parameters()), len(training.text))
    save: tuple[dos.AsyncSaveHandle, State] | None = None

    def finish_save() -> None:
        if save is not None:
            handle, state = save
            report = handle.result(timeout=_SAVE_TIMEOUT_SECONDS)
            if first:
                say("saved", state, report, training.step - state.step)

    while training.step < save_steps[-1]:
        loss = training.train(sequences_per_step, rank, ranks)
        if first:
            say("step", training.step, loss)
        if training.step not in save_steps:
            continue
        finish_save()
        training.progress["loss"] = training.fixed_loss()
        state = training.snapshot()
        if training.step == doomed_step and rank == ranks - 1:
            hold_uploads(say)
        handle = dos.async_save(
            training.values,
            f"{run_url}/step-{training.step}",
            storage_options=storage_options,
            local=local,
            progress=False,
            user_metadata={"step": training.step, "loss": round(state.recorded_loss, 4)},
        )
        handle.staged()
        save = handle, state
    finish_save()


def load(_: Say, url: str, storage_options: Options) -> FinishedLoad:
    """Load a checkpoint in one process without a process group."""
    return Training(seed=3).load(url, storage_options)


def load_with_stock(_: Say, directory: str) -> dict[str, FinishedLoad]:
    """Load a downloaded checkpoint in both ways that torch has without a process group."""
    state = Training(seed=4).tensors()
    began = time.monotonic()
    stock_load(state, storage_reader=FileSystemReader(directory), no_dist=True)
    read = FinishedLoad(describe(state), time.monotonic() - began)
    with tempfile.TemporaryDirectory() as converted:
        file = Path(converted) / "checkpoint.pt"
        began = time.monotonic()
        dcp_to_torch_save(directory, file)
        whole = torch.load(file, weights_only=True)
        whole["optimizer"].pop("groups", None)  # of several ranks, beside the numbered ones
        saved = FinishedLoad(describe(whole), time.monotonic() - began)
    return {"FileSystemReader": read, "dcp_to_torch_save": saved}


class Training:
    """A small language model, its optimizer and their progress."""

    def __init__(self, seed: int, *, sharded: bool = False) -> None:
        torch.manual_seed(seed)
        self.model = ByteTransformer()
        if sharded:
            for block in self.model.blocks:
                fully_shard(block)
            fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=_LEARNING_RATE)
        self.progress: dict[str, Any] = {"step": 0, "loss": 0.0}
        self.text = read_text()

    @property
    def step(self) -> int:
        """The number of training steps done."""
        return int(self.progress["step"])

    @property
    def values(self) -> dict[str, Any]:
        """The state that is saved and loaded."""
        return {"model": self.model, "optimizer": self.optimizer, "progress": self.progress}

    def tensors(self) -> dict[str, Any]:
        """Return the state as nested dicts of tensors and plain values."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "progress": self.progress}

    def train(self, sequences: int, rank: int, ranks: int) -> float:
        """Do one step of training and return its loss, the mean over all ranks."""
        batch = choose_batch(self.text, self.step, sequences)
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
        """Return the loss on a batch that is always the same; each rank computes its share."""
        batch = choose_batch(self.text, -1, FIXED_SEQUENCES)
        rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        share = batch[rank::ranks]
        total = next_byte_loss(self.model, share).double() * len(share)
        if ranks > 1:
            dist.all_reduce(total)
        return total.item() / len(batch)

    def snapshot(self) -> State:
        """Describe the state as it is now. All ranks of a group must call this together."""
        return describe(self.tensors(), self.fixed_loss())

    def load(
        self, url: str, storage_options: Options, local: dos.Local | None = None
    ) -> FinishedLoad:
        """Load in place and describe the result."""
        values = self.values
        report = dos.load(values, url, storage_options=storage_options, local=local, progress=False)
        self.progress = values["progress"]
        return FinishedLoad(self.snapshot(), report.seconds, report.total_bytes, report.local_bytes)


def describe(state: Mapping[str, Any], fixed_loss: float | None = None) -> State:
    """Return the SHA-256 of every tensor (type, shape and bytes) and every other value, by key.

    Sharded tensors are gathered, so all ranks of their group must call this together.

    Args:
        state: nested dicts and lists of tensors and plain values.
        fixed_loss: the loss on the fixed batch; None if there is no model.
    """
    digests = {key: _digest(leaf) for key, leaf in _leaves("", state)}
    progress = state["progress"]
    return State(progress["step"], progress["loss"], fixed_loss, digests)


def _leaves(key: str, value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping):
        pairs: list[tuple[object, object]] = sorted(value.items())
    elif isinstance(value, (list, tuple)):
        pairs = list(enumerate(value))
    else:
        yield key, value
        return
    for name, inner in pairs:
        yield from _leaves(f"{key}.{name}" if key else str(name), inner)


def _digest(leaf: object) -> str:
    if isinstance(leaf, DTensor):
        leaf = leaf.full_tensor()
    if not isinstance(leaf, Tensor):
        return hashlib.sha256(repr(leaf).encode()).hexdigest()
    plain = leaf.detach().cpu().contiguous()
    digest = hashlib.sha256(f"{plain.dtype} {tuple(plain.shape)} ".encode())
    digest.update(plain.reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


class ByteTransformer(nn.Module):
    """Predicts the next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        layers = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, **layers)  # type: ignore[arg-type]
            for _ in range(LAYERS)
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        nn.init.normal_(self.positions.weight, std=0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits (batch, time, 256) for tokens (batch, time)."""
        time = tokens.shape[1]
        causal = nn.Transformer.generate_square_subsequent_mask(time, device=tokens.device)
        x = self.bytes(tokens) + self.positions(torch.arange(time, device=tokens.device))
        for block in self.blocks:
            x = block(x, src_mask=causal, is_causal=True)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def next_byte_loss(model: nn.Module, sequences: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats per byte over sequences (batch, CONTEXT + 1)."""
    logits = model(sequences[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1), sequences[:, 1:].flatten())


def read_text() -> Tensor:
    """Return Python's language reference, part of every installation, as a tensor of bytes."""
    from pydoc_data.topics import topics

    text = "\n".join(topics[name] for name in sorted(topics))
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()


def choose_batch(text: Tensor, number: int, count: int) -> Tensor:
    """Return `count` sequences of the text, the same ones whenever the number is the same."""
    generator = torch.Generator().manual_seed(1_000_003 + number)
    last = len(text) - CONTEXT - 1
    starts = torch.randint(last, (count,), generator=generator, device="cpu")
    return torch.stack([text[start : start + CONTEXT + 1] for start in starts])


def hold_uploads(say: Say) -> None:
    """Report each upload of this process from now on, and hold it until the process is killed."""

    def hold(_store: object, key: str, buffers: Iterable[Buffer], *_: object, **__: object) -> None:
        say("uploading", key, sum(memoryview(buffer).nbytes for buffer in buffers))
        threading.Event().wait()

    upload_items.upload_object = hold  # type: ignore[assignment,attr-defined]
