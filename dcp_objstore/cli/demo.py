"""The demo: train, kill a rank in mid-save, resume on other ranks, and prove what is promised.

Ranks are processes, forked from one that has imported this module. Each says over a pipe what it
does; this process prints that, and proves it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import multiprocessing
import os
import secrets
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from io import TextIOWrapper
from multiprocessing import connection as pipes, forkserver
from multiprocessing.connection import Connection
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
from dcp_objstore.checkpoint.names import MARKER_KEY, parse_data_key
from dcp_objstore.checkpoint.probe import require_fencing
from dcp_objstore.cli.exits import fail
from dcp_objstore.cli.seaweedfs import SeaweedServer, find_weed
from dcp_objstore.cli.serve import print_exports, wait_for_ctrl_c
from dcp_objstore.cli.terminal import aligned, coloured, columns, say, wrapped
from dcp_objstore.config import MIB, TransferConfig
from dcp_objstore.errors import (
    CheckpointNotFoundError,
    DcpObjstoreError,
    InputError,
    UnsupportedError,
)
from dcp_objstore.observe.report import counted, first_few, size_text
from dcp_objstore.stores import ObjectStore, StoreSpec
from dcp_objstore.write import upload_items

if TYPE_CHECKING:
    from typing_extensions import Buffer

_STEPS = (4, 8, 12)
_COMMITTED, _DOOMED = _STEPS[1], _STEPS[2]
_SEQUENCES_PER_STEP, _FIXED_SEQUENCES = 16, 32
VOCABULARY, CONTEXT, WIDTH, HEADS, LAYERS = 256, 64, 256, 4, 3
# Ranks add the same float32 numbers in another order; a wrong weight would change far more.
_LOSS_TOLERANCE = 1e-4
# The tolerance for the losses of several steps, over which such differences grow.
_PATH_TOLERANCE = 1e-2
# A limit for slow machines: no job takes more than half a minute on two cores.
_JOB_SECONDS = 300.0
# Collectives of a group with a dead rank end after this, if its closed connections do not end them.
_GROUP_SECONDS = 60.0
# Two states take some 70 MiB. With a bound, it does not matter how full the file system is.
_LOCAL_BYTES = 1 << 30
_WIDEST = 100
_HEAD = ("phase", "ranks", "step", "MiB", "s")  # too small for rates to say anything
# Before any rank starts, a store that does not answer is an error to report at once.
_IMPATIENT = TransferConfig(
    connect_timeout_seconds=5, request_timeout_seconds=15, max_retries=2, retry_timeout_seconds=10
)
# Apple's frameworks do not survive a fork after torch was imported.
_METHOD = "spawn" if sys.platform == "darwin" else "forkserver"
# What every rank would otherwise import at first use.
_PRELOAD = [__name__, "torch._dynamo", "dcp_objstore.write.async_save", "obstore.store"]


class DemoFailedError(Exception):
    """A process of the demo did not do its job, or what was to be proved does not hold."""


def run_demo(*, ranks: int, resume_ranks: int, url: str | None, keep: bool) -> None:
    """Run the demo and print it; exit with status 1 if a proof does not hold."""
    began = time.monotonic()
    if importlib.util.find_spec("pydoc_data") is None:
        raise UnsupportedError("this Python has no pydoc_data, the text that the demo trains on")
    tell("dcp-objstore demo: train, kill a rank in mid-save, resume, prove", "")
    say("")
    server = None
    with ExitStack() as stack:
        if url is None:
            find_weed()  # if it is missing, says how to install it, before anything starts
            server = stack.enter_context(SeaweedServer())
            run = StoreSpec(f"{server.create_bucket('demo')}/run", server.storage_options)
            tell(f"saving to a SeaweedFS server at {server.endpoint_url}")
        else:
            run = stack.enter_context(in_bucket(url, keep=keep))
            tell(f"saving to {run.url}")
        node = stack.enter_context(tempfile.TemporaryDirectory(prefix="dcp-objstore-demo-"))
        demo = Demo(run, ranks, resume_ranks, node)
        with failure_told():
            demo.run()
        demo.print_table()
        _title(f"All {demo.proofs} proofs hold, in {time.monotonic() - began:.0f} s.")
        if keep and server is not None:
            tell("the server runs until Ctrl-C; to look around, in another terminal:")
            print_exports(server)
            say(f"dcp-objstore ls {run.url}")
            sys.stdout.flush()
            wait_for_ctrl_c()
        elif keep:
            tell(f"kept: {run.url}")


def tell(text: str, lead: str = "  ", colour: str | None = None) -> None:
    """Print text after a lead, wrapped under the text, at once."""
    width = max(20, min(columns(), _WIDEST)) if sys.stdout.isatty() else _WIDEST
    first, *rest = wrapped(lead + text, width, " " * len(lead))
    say(first.removeprefix(lead), *rest, lead=coloured(lead, colour) if lead.strip() else lead)
    sys.stdout.flush()


def _title(text: str) -> None:
    say("")
    tell(text, "")


def _sign(character: str, word: str) -> str:
    """Return the character, or the word if standard output cannot show the character."""
    try:
        character.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        if isinstance(sys.stdout, TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")
        return word
    return character


@contextmanager
def failure_told() -> Iterator[None]:
    """Print why the demo failed in the block, and exit with status 1."""
    try:
        yield
    except DemoFailedError as error:
        tell(str(error), f"  {_sign('✗', 'FAILED')} ", "red")
        for log in getattr(error, "__notes__", ()):
            print(f"the end of that process's output:\n{log}", file=sys.stderr)
        fail(f"the demo failed: {error}")


@contextmanager
def in_bucket(url: str, *, keep: bool) -> Iterator[StoreSpec]:
    """Choose a new run below the user's URL, with credentials from the environment.

    The bucket must allow to list, put conditionally and delete; this checks it. At the end the
    run is removed, unless `keep`.

    Raises:
        InputError: the store refused: no such bucket, no credentials, no permission, ….
        StoreUnavailableError: the store does not answer.
    """
    spec = StoreSpec(url)
    if spec.parsed.scheme == "memory":
        raise InputError("memory:// exists in one process only; the demo has many", url=url)
    run = spec.child(f"dcp-objstore-demo-{secrets.token_hex(4)}")
    store = replace(run, config=_IMPATIENT).open()
    next(iter(store.list()), None)  # first, because the probe waits longer for a store that is away
    require_fencing(store, replaces=True, allow_unfenced=False)
    try:
        yield run
    finally:
        if not keep:
            try:
                store = run.open()  # patient: after a minute's work, a busy store is worth a wait
                for meta in list(store.list()):
                    store.delete(meta.key)
            except BaseException:
                print(f"dcp-objstore: left behind: {run.url}", file=sys.stderr)
                raise


# --- the processes


class Ranks:
    """Processes that train as the ranks of a group; a context manager that kills what is left.

    Args:
        count: number of processes.
        args: what `train` is called with.

    Attributes:
        ended: how each rank has ended, by its number: with an error or an exit status.
    """

    def __init__(self, count: int, *args: object) -> None:
        self.ended: dict[int, DcpObjstoreError | str | int] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="dcp-objstore-demo-")
        context: Any = multiprocessing.get_context(_METHOD)
        self._processes: list[Any] = []
        self._pipes: dict[Any, int] = {}
        for rank in range(count):
            ours, theirs = context.Pipe(duplex=False)
            call = (theirs, self._folder.name, rank, count, args)
            self._processes.append(context.Process(target=_run_rank, args=call))
            self._processes[-1].start()
            theirs.close()
            self._pipes[ours] = rank

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()  # all at once, before any is waited for
        for process in self._processes:
            process.join()
        self._folder.cleanup()

    def messages(self, within_seconds: float = _JOB_SECONDS) -> Iterator[tuple[Any, ...]]:
        """Yield what the ranks say, as it arrives, until all have ended.

        Raises:
            DemoFailedError: they do not end.
        """
        deadline = time.monotonic() + within_seconds
        while self._pipes:
            ready = pipes.wait(list(self._pipes), max(0.0, deadline - time.monotonic()))
            if not ready:
                raise DemoFailedError(f"ranks {sorted(self._pipes.values())} did not end in time")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                try:
                    message = pipe.recv()
                except (EOFError, OSError):  # it has ended, or died while it was sending
                    rank = self._pipes.pop(pipe)
                    self._processes[rank].join()
                    self.ended.setdefault(rank, self._processes[rank].exitcode)
                    continue
                if message[0] == "ended":
                    self.ended[self._pipes[pipe]] = message[1]
                else:
                    yield message

    def successful(self) -> Iterator[tuple[Any, ...]]:
        """Yield as `messages` does; raise if a rank fails."""
        for message in self.messages():
            self._check()
            yield message
        self._check()

    def _check(self) -> None:
        for rank, how in self.ended.items():
            if how is None or how == 0:
                continue
            if isinstance(how, DcpObjstoreError):
                raise how.at(rank=rank)
            error = DemoFailedError(f"rank {rank} ended with {how!r}")
            error.add_note(
                Path(self._folder.name, f"{rank}.log").read_text(errors="replace")[-2000:]
            )
            raise error

    def kill(self, rank: int) -> list[DcpObjstoreError | str | int]:
        """Kill a rank by SIGKILL, and return how each has ended."""
        self._processes[rank].kill()
        for _ in self.messages(_GROUP_SECONDS + 15):
            pass
        return [self.ended[rank] for rank in range(len(self._processes))]


def _run_rank(pipe: Connection, folder: str, rank: int, count: int, args: tuple[Any, ...]) -> None:
    # Ctrl-C in a terminal goes to a process group; the launching process ends its ranks itself.
    os.setpgid(0, 0)
    threading.Thread(target=_end_with_launcher, daemon=True).start()
    output = Path(folder, f"{rank}.log").open("w", buffering=1)  # noqa: SIM115  until it ends
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    try:
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/meeting",
            rank=rank,
            world_size=count,
            timeout=timedelta(seconds=_GROUP_SECONDS),
        )
        dist.barrier()  # a rank that ends at once would leave while others still connect to it
        train(lambda *said: pipe.send(said), *args)
        dist.destroy_process_group()
    except BaseException as error:  # noqa: BLE001  everything is reported
        traceback.print_exc()
        pipe.send(("ended", error if isinstance(error, DcpObjstoreError) else repr(error)))
        # Without closing the group, which can wait for a dead rank. The others see it closed.
        sys.stderr.flush()
        os._exit(1)


def _end_with_launcher() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    pipes.wait([parent.sentinel])
    os._exit(1)


# --- what the ranks do


@dataclass(frozen=True)
class State:
    """The content of a state when it was saved, or after it was loaded.

    Attributes:
        step: number of training steps done.
        recorded_loss: loss on the fixed batch, as recorded in the state.
        fixed_loss: the same loss, computed now from the weights; None if there is no model.
        digests: SHA-256 of every whole tensor and value, by key.
    """

    step: int
    recorded_loss: float
    fixed_loss: float | None
    digests: Mapping[str, str]


Loaded = tuple[State, dos.reports.LoadReport]


def train(
    report: Callable[..., None],
    run: tuple[str, Any],
    local: dos.Local,
    resume_from: int | None,
    save_steps: tuple[int, ...],
    doomed_step: int | None,
) -> None:
    """Train to the last step as one rank; each save goes on during the steps that follow it.

    Args:
        report: sends a message to the process that has started this one.
        run: URL and `storage_options` of the run.
        local: where copies of the newest step are kept on this node.
        resume_from: the step to load first; None to begin at step 0.
        save_steps: the steps to save, ascending; training ends at the last one.
        doomed_step: the step in whose save the last rank's upload is held until it is killed.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    first = rank == 0
    # Another seed than that of the resumed run, whose values must come from the checkpoint.
    training = Training(1 if resume_from is None else 2, sharded=True)
    if resume_from is not None:
        report("loaded", *training.load(*_at(run, resume_from), local))
    elif first:
        report("ready", sum(one.numel() for one in training.model.parameters()), len(training.text))
    save: tuple[dos.AsyncSaveHandle, State] | None = None
    while training.step < save_steps[-1]:
        loss = training.train(rank, ranks)
        if first:
            report("step", training.step, loss)
        if training.step not in save_steps:
            continue
        if save is not None:
            _finish(save, report, training.step)
        training.progress["loss"] = training.fixed_loss()
        state = describe(training.tensors(), training.fixed_loss())
        if training.step == doomed_step and rank == ranks - 1:
            hold_uploads(report)
        url, options = _at(run, training.step)
        handle = dos.async_save(
            training.values,
            url,
            storage_options=options,
            local=local,
            progress=False,
            user_metadata={"step": training.step, "loss": round(state.recorded_loss, 4)},
        )
        handle.staged()
        save = handle, state
    if save is not None:
        _finish(save, report, training.step)


def _finish(
    save: tuple[dos.AsyncSaveHandle, State], report: Callable[..., None], step: int
) -> None:
    handle, state = save
    saved = handle.result(timeout=90)
    if dist.get_rank() == 0:
        report("saved", state, saved, step - state.step)


def _at(run: tuple[str, Any], step: int) -> tuple[str, Any]:
    url, options = run
    return f"{url}/step-{step}", options


def hold_uploads(report: Callable[..., None]) -> None:
    """Report each upload of this process from now on, and hold it until the process is killed."""

    def hold(_store: object, key: str, buffers: Iterable[Buffer], *_: object, **__: object) -> None:
        report("uploading", key, sum(memoryview(buffer).nbytes for buffer in buffers))
        threading.Event().wait()

    upload_items.upload_object = hold  # type: ignore[assignment,attr-defined]


class Training:
    """A small language model, its optimizer and their progress."""

    def __init__(self, seed: int, *, sharded: bool = False) -> None:
        torch.manual_seed(seed)
        self.model = ByteTransformer()
        if sharded:
            for block in self.model.encoder.layers:
                fully_shard(block)
            fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
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

    def train(self, rank: int, ranks: int) -> float:
        """Do one step of training and return its loss, the mean over all ranks."""
        batch = choose_batch(self.text, self.step, _SEQUENCES_PER_STEP)
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
        batch = choose_batch(self.text, -1, _FIXED_SEQUENCES)
        rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        share = batch[rank::ranks]
        total = next_byte_loss(self.model, share).double() * len(share)
        if ranks > 1:
            dist.all_reduce(total)
        return total.item() / len(batch)

    def load(self, url: str, storage_options: Any, local: dos.Local | None = None) -> Loaded:
        """Load in place and describe the result."""
        values = self.values
        report = dos.load(values, url, storage_options=storage_options, local=local, progress=False)
        self.progress = values["progress"]
        return describe(self.tensors(), self.fixed_loss()), report


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
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        nn.init.normal_(self.positions.weight, std=0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits (batch, time, 256) for tokens (batch, time)."""
        time = tokens.shape[1]
        causal = nn.Transformer.generate_square_subsequent_mask(time, device=tokens.device)
        x = self.bytes(tokens) + self.positions(torch.arange(time, device=tokens.device))
        x = self.encoder(x, mask=causal, is_causal=True)
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


# --- the story and its proofs


class Demo:
    """One run of the demo.

    Args:
        spec: the run.
        ranks: number of ranks that train first.
        resume_ranks: number of ranks that resume.
        node: the folder for copies on this node.

    Attributes:
        proofs: the number of proofs that hold so far.
    """

    def __init__(self, spec: StoreSpec, ranks: int, resume_ranks: int, node: str) -> None:
        self._local = dos.Local(node, max_bytes=_LOCAL_BYTES)
        self.spec, self.ranks, self.resume_ranks = spec, ranks, resume_ranks
        self._run = spec.url, spec.storage_options  # a spec pickles no secrets
        self._rows: list[tuple[str, ...]] = []
        self.proofs = 0
        self._saved: dict[int, State] = {}

    def run(self) -> None:
        """Run the whole demo; raise if a statement does not hold or a process fails."""
        if _METHOD == "forkserver":
            multiprocessing.get_context(_METHOD).set_forkserver_preload(_PRELOAD)
            forkserver.ensure_running()
        losses = self._train_and_kill()
        self._resume(losses)
        _title("4. Load in one plain process, without a process group")
        loaded = Training(seed=3).load(*_at(self._run, _DOOMED))
        self._check_loads("load", _DOOMED, self.resume_ranks, [loaded])
        self._load_with_stock()

    def prove(self, holds: bool, statement: str) -> None:
        """Print a statement if it holds; otherwise raise."""
        if not holds:
            raise DemoFailedError(f"this does not hold: {statement}")
        self.proofs += 1
        tell(statement, f"  {_sign('✓', 'ok')} ", "green")

    def _train_and_kill(self) -> dict[int, float]:
        """Train until the last save, and kill a rank there; return the losses by step."""
        _title(f"1. Train on {counted(self.ranks, 'rank')} (FSDP2, gloo), save on the way")
        losses: dict[int, float] = {}
        held: list[Any] = []
        with Ranks(self.ranks, self._run, self._local, None, _STEPS, _DOOMED) as job:
            for message in self._shown(job, self.ranks, losses):
                if message[0] == "uploading":
                    _, *held = message
                # Each rank has its own pipe, so the report of this upload may arrive first.
                if held and _COMMITTED in self._saved:
                    self._kill_in_mid_save(job, *held)
                    break
            else:
                raise DemoFailedError("the ranks ended before the last save began")
        try:
            Training(seed=3).load(*_at(self._run, _DOOMED))
        except DcpObjstoreError as error:
            self.prove_invisible(error)
        else:
            self.prove_invisible(None)
        return losses

    def _kill_in_mid_save(self, job: Ranks, held_key: str, held_bytes: int) -> None:
        """Kill the held rank when all others have written."""
        victim = self.ranks - 1
        _title(f"2. SIGKILL rank {victim} in the middle of the save of step-{_DOOMED}")
        store = self.spec.child(f"step-{_DOOMED}").open()
        self._wait_for_the_others(store, held_key)
        tell(
            f"{counted(victim, 'rank')} wrote; rank {victim} is held in its upload of"
            f" {held_bytes / MIB:.1f} MiB: kill"
        )
        began = time.monotonic()
        self.prove_ended_cleanly(job.kill(victim), time.monotonic() - began)
        self.prove_torn([meta.key for meta in store.list()], held_key)
        self.add_row("save, killed", self.ranks, _DOOMED)

    def _wait_for_the_others(self, store: ObjectStore, held_key: str) -> None:
        """Wait until the others have written, or until it is too late, which the proof detects."""
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            keys = [meta.key for meta in store.list()]
            others = len(_ranks_that_wrote(keys))
            if others == self.ranks - 1 or held_key in keys or MARKER_KEY in keys:
                return
            time.sleep(0.1)
        raise DemoFailedError("the objects of the other ranks did not appear on the store")

    def _resume(self, losses_before: dict[int, float]) -> None:
        """Load the newest committed step on another number of ranks, and train on."""
        ranks, step = self.resume_ranks, max(self._committed())
        _title(f"3. Resume on {counted(ranks, 'rank')} from the newest committed step")
        if step != _COMMITTED:
            raise DemoFailedError(f"step {step} is the newest committed one, not {_COMMITTED}")
        losses: dict[int, float] = {}
        loads: list[Loaded] = []
        with Ranks(ranks, self._run, self._local, step, (_DOOMED,), None) as job:
            for message in self._shown(job, ranks, losses):
                if message[0] == "loaded":
                    loads.append((message[1], message[2]))
                    if len(loads) == ranks:
                        self._check_loads("resume", step, self.ranks, loads)
                        self.prove_from_the_node([report for _, report in loads])
        self.prove_falling(self._saved[step], self._saved[_DOOMED])
        if all(_SEQUENCES_PER_STEP % number == 0 for number in (ranks, self.ranks)):
            # Otherwise ranks have unequal shares, and the mean over ranks is not that of the batch.
            self.prove_same_path(losses_before, losses)

    def _load_with_stock(self) -> None:
        """Download everything, as `aws s3 sync` would, and read that without this library."""
        _title("5. Read it with stock torch.distributed.checkpoint")
        with tempfile.TemporaryDirectory(prefix="dcp-objstore-demo-") as directory:
            store = self.spec.child(f"step-{_DOOMED}").open()
            objects = list(store.list())
            for meta in objects:
                body, _ = store.get(meta.key, max_size_bytes=meta.size_bytes)
                Path(directory, meta.key).write_bytes(body)
            size = sum(meta.size_bytes for meta in objects) / MIB
            tell(
                f"downloaded as they are: {len(objects)} objects, {size:.1f} MiB, torn save"
                " included"
            )
            state = Training(seed=4).tensors()
            began = time.monotonic()
            stock_load(state, storage_reader=FileSystemReader(directory), no_dist=True)
            self._check_stock("FileSystemReader", state, began)
            began = time.monotonic()
            dcp_to_torch_save(directory, file := f"{directory}/checkpoint.pt")
            state = torch.load(file, weights_only=True)
            state["optimizer"].pop("groups", None)  # of several ranks, beside the numbered ones
            self._check_stock("dcp_to_torch_save", state, began)

    def _check_stock(self, reader: str, state: Mapping[str, Any], began: float) -> None:
        self.prove_identical(reader, self._saved[_DOOMED], [describe(state)])
        self.add_row(reader, 1, _DOOMED, seconds=time.monotonic() - began)

    def _shown(self, job: Ranks, ranks: int, losses: dict[int, float]) -> Iterator[tuple[Any, ...]]:
        """Yield what training ranks say; print progress and saves, and keep the losses."""
        for message in job.successful():
            match message:
                case ("ready", parameters, text_bytes):
                    tell(
                        f"a transformer of {parameters / 1e6:.1f} M parameters reads"
                        f" {text_bytes:,} bytes: Python's own reference"
                    )
                case ("step", step, loss):
                    losses[step] = loss
                    if step == 1 or step % 2 == 0:
                        tell(f"step {step:3}  loss {loss:.3f}")
                case ("saved", state, report, steps_meanwhile):
                    self._check_save(state, report, steps_meanwhile, ranks)
            yield message

    def _committed(self) -> dict[int, tuple[int | None, Any]]:
        """Return the world size and the noted step of each committed step, by its number."""
        url, options = self._run
        return {
            int(step.name.removeprefix("step-")): (step.world_size, step.user_metadata.get("step"))
            for step in dos.steps(url, storage_options=options)
        }

    def _check_save(
        self, state: State, report: dos.reports.SaveReport, steps_meanwhile: int, ranks: int
    ) -> None:
        self._saved[state.step] = state
        meanwhile = f", while {steps_meanwhile} more steps were trained" if steps_meanwhile else ""
        self.prove(
            self._committed().get(state.step) == (ranks, state.step),
            f"step-{state.step} committed: {report.total_bytes / MIB:.1f} MiB in"
            f" {counted(report.objects, 'object')}, {report.seconds:.1f} s{meanwhile}",
        )
        self.add_row("save", ranks, state.step, report.total_bytes, report.seconds)

    def _check_loads(self, phase: str, step: int, saved_by: int, loads: list[Loaded]) -> None:
        """Prove that each rank has loaded what was saved."""
        saved, states = self._saved[step], [state for state, _ in loads]
        self.prove_identical(f"step-{step}, saved by {counted(saved_by, 'rank')}", saved, states)
        self.prove_same_loss(saved, states)
        total_bytes = sum(report.total_bytes for _, report in loads)
        seconds = max(report.seconds for _, report in loads)
        self.add_row(phase, len(loads), step, total_bytes, seconds)

    def prove_identical(self, what: str, saved: State, loaded: Sequence[State]) -> None:
        """Prove that every tensor and value of states is the same, bit for bit."""
        expected = saved.digests.items()
        differ = sorted({key for state in loaded for key, _ in state.digests.items() ^ expected})
        agree = f"{first_few(differ, 3)} differ" if differ else "agree"
        text = f"{what}: state bit-identical: all {len(expected)} SHA-256 digests {agree}"
        self.prove(bool(expected) and not differ, text)

    def prove_same_loss(self, saved: State, loaded: Sequence[State]) -> None:
        """Prove that the loss on the fixed batch, computed again, is the one that was recorded."""
        before, now = saved.recorded_loss, [state.fixed_loss or 0.0 for state in loaded]
        self.prove(
            all(abs(before - loss) <= _LOSS_TOLERANCE for loss in now),
            f"loss on the same batch: {before:.4f} when it was saved, {now[0]:.4f} after the load",
        )

    def prove_from_the_node(self, reports: Sequence[dos.reports.LoadReport]) -> None:
        """Prove that ranks that have started again on their node read nothing from the bucket."""
        local_bytes = sum(report.local_bytes for report in reports)
        fetched_bytes = sum(report.fetched_bytes for report in reports)
        self.prove(
            local_bytes > 0 and not fetched_bytes,
            f"the job that starts again reads its bytes from this node: {size_text(local_bytes)}"
            f" from its copies, {size_text(fetched_bytes)} from the bucket",
        )

    def prove_falling(self, before: State, after: State) -> None:
        """Prove that training went on from where it was."""
        self.prove(
            after.recorded_loss < before.recorded_loss,
            f"loss goes on falling: {before.recorded_loss:.4f} at step {before.step},"
            f" {after.recorded_loss:.4f} at step {after.step}",
        )

    def prove_same_path(self, killed: Mapping[int, float], resumed: Mapping[int, float]) -> None:
        """Prove that the resumed run had the losses of the killed run, step by step."""
        steps = sorted(killed.keys() & resumed.keys()) or [0]
        gap = max((abs(killed[step] - resumed[step]) for step in steps if step), default=9.0)
        self.prove(
            gap <= _PATH_TOLERANCE,
            f"steps {steps[0]} to {steps[-1]} have the losses that they had before the kill, within"
            f" {gap:.0e}",
        )

    def prove_torn(self, keys: Collection[str], held_key: str) -> None:
        """Prove that the objects of all ranks but one are there, and no marker."""
        count = sum(parse_data_key(key) is not None for key in keys)
        wrote = len(_ranks_that_wrote(keys))
        self.prove(
            wrote >= self.ranks - 1 and not {MARKER_KEY, held_key} & {*keys},
            f"the torn save left {counted(count, 'data object')} and no {MARKER_KEY} marker",
        )

    def prove_ended_cleanly(self, ended: Sequence[object], seconds: float) -> None:
        """Prove that the last rank was killed, and every other raised a `DcpObjstoreError`."""
        *survivors, killed = ended
        typed = [how for how in survivors if isinstance(how, DcpObjstoreError)]
        kinds = ", ".join(sorted({type(how).__name__ for how in survivors}))
        self.prove(
            killed == -signal.SIGKILL and typed == survivors,
            f"typed error ({kinds}) on {len(typed)} of {len(survivors)} surviving ranks in"
            f" {seconds:.1f} s",
        )

    def prove_invisible(self, error: DcpObjstoreError | None) -> None:
        """Prove that the load of the torn checkpoint has found none."""
        text = f"so it does not exist: dos.load raises {type(error).__name__}"
        self.prove(isinstance(error, CheckpointNotFoundError), text)

    def add_row(
        self, phase: str, ranks: int, step: int, total_bytes: int = 0, seconds: float = 0.0
    ) -> None:
        """Add a line to the table; `total_bytes` are those of all ranks together."""
        size = f"{total_bytes / MIB:.1f}" if total_bytes else "-"
        duration = f"{seconds:.2f}" if seconds else "-"
        self._rows.append((phase, str(ranks), str(step), size, duration))

    def print_table(self) -> None:
        """Print what was saved and loaded."""
        say("")
        for line in aligned([_HEAD, *self._rows], _HEAD[1:]):
            tell(line, "")


def _ranks_that_wrote(keys: Collection[str]) -> set[int]:
    return {name.rank for key in keys if (name := parse_data_key(key)) is not None}
