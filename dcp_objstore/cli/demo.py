"""The demo: train, kill a rank in mid-save, resume on fewer, be preempted; prove what is promised.

`demo_crew` runs the ranks. The first starter proves and prints; under a launcher the others only
run their ranks.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import re
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional

import dcp_objstore as dos
from dcp_objstore.checkpoint.names import MARKER_KEY, parse_data_key
from dcp_objstore.checkpoint.probe import require_fencing
from dcp_objstore.cli.demo_crew import Crew, DemoFailedError, Ended
from dcp_objstore.cli.exits import fail
from dcp_objstore.cli.seaweedfs import SeaweedServer
from dcp_objstore.cli.terminal import coloured, say
from dcp_objstore.config import processors
from dcp_objstore.distributed.failures import capture
from dcp_objstore.doctor.access import versions
from dcp_objstore.doctor.runner import CONFIG
from dcp_objstore.doctor.scratch import Scratch
from dcp_objstore.errors import CheckpointNotFoundError, DcpObjstoreError, InputError
from dcp_objstore.observe.report import GIB, counted, first_few, size_text
from dcp_objstore.stores import StoreSpec
from dcp_objstore.write import upload_items

# Every fourth step is saved. In the save of step 12 a rank is killed, so step 8 is the newest that
# is committed. At step 14 of the second job SIGTERM comes. No job gets as far as step 10,000.
_EVERY, _COMMITTED, _DOOMED, _WARNED, _NEVER = 4, 8, 12, 14, 10_000
# Bytes of text from which the next one is predicted, and the least number of them in a step.
_CONTEXT, _SEQUENCES = 64, 32
# Ranks add the same float32 numbers in another order; a wrong weight would change far more.
_LOSS_TOLERANCE = 1e-2
_BENCH_SECONDS, _BENCH_BYTES = 15.0, 64 << 20


def run_demo(
    *,
    ranks: int | None,
    resume_ranks: int | None,
    url: str | None,
    device: str = "cpu",
    report: str | None = None,
) -> None:
    """Run the demo and print it; exit with status 1 if a proof does not hold."""
    began = time.monotonic()
    with ExitStack() as stack:
        crew = Crew(ranks, device)
        if url is not None:
            spec = StoreSpec(url)
        elif crew.launcher:
            raise InputError(f"under {crew.launcher} the demo needs a store: --url s3://bucket/x")
        else:
            server = stack.enter_context(SeaweedServer())
            spec = StoreSpec(server.create_bucket("demo"), server.storage_options)
        demo = Demo(stack.enter_context(a_run(spec, crew)), crew, resume_ranks)
        if crew.is_first:
            tell("dcp-objstore demo: train, kill a rank in mid-save, resume, prove", "")
            tell(f"saving to {'a SeaweedFS server' if url is None else demo.spec.url}")
            try:
                demo.run()
            except DemoFailedError as error:
                fail(f"the demo failed: {error}", notes=getattr(error, "__notes__", ()))
        else:  # this process only starts its rank of both jobs
            demo.job(demo.ranks, torn=True)
            demo.job(demo.resume_ranks, torn=False)
        speeds = [] if report is None else demo.measure()
        # All starters end together, because the first one may have the TCPStore of all of them.
        crew.share("end", None)
    if not crew.is_first:
        return
    seconds = time.monotonic() - began
    _title(f"All {demo.proofs} proofs hold, in {seconds:.0f} s.")
    if report is not None:
        store = "SeaweedFS on loopback" if url is None else _store_of(demo.spec)
        Path(report).write_text(report_text(demo, speeds, seconds, store))
        tell(f"report: {report}")


def tell(text: str, lead: str = "  ") -> None:
    """Print a line after a lead, and let nothing delay it."""
    say(text, lead=lead)
    sys.stdout.flush()


def _title(text: str) -> None:
    say("")
    tell(text, "")


@contextmanager
def a_run(spec: StoreSpec, crew: Crew) -> Iterator[StoreSpec]:
    """Choose a new run below a URL, the same for all starters, and remove it at the end.

    The first starter checks before that the bucket can list, put conditionally and delete.

    Raises:
        InputError: the store refused: no such bucket, no credentials, no permission, ….
        StoreUnavailableError: the store does not answer.
    """
    if spec.parsed.scheme == "memory":
        raise InputError("memory:// exists in one process only; the demo has many", url=spec.url)
    if not crew.is_first:
        yield spec.child(crew.share("run", "")[0])  # the name that the first starter shares
        return
    scratch = Scratch(spec, "dcp-objstore-demo")
    # Before any rank starts, a store that does not answer is an error to report at once.
    store = replace(scratch.spec, config=CONFIG).open()
    next(iter(store.list()), None)  # first, because the probe waits longer for a store that is away
    require_fencing(store, replaces=True, allow_unfenced=False)
    crew.share("run", scratch.spec.url.rpartition("/")[2])
    try:
        yield scratch.spec
    finally:
        unremoved = scratch.remove()
        if unremoved.keys or not unremoved.listed:
            fail(f"left behind: {scratch.spec.url} ({unremoved.why})")


# --- what the ranks do


def train(
    device: torch.device, notes: dict[str, Any], run: StoreSpec, sequences: int, torn: bool
) -> None:
    """Train as one rank, with a manager, from the newest step of the run on.

    Args:
        device: where the model is.
        notes: where losses and digests are noted for the proofs.
        run: the run.
        sequences: the number of sequences of a step, of which each rank has an equal share.
        torn: whether this job ends with a save in whose midst the last rank is killed. Otherwise
            the last rank gets SIGTERM two steps later.
    """
    rank, is_last = dist.get_rank(), dist.get_rank() == dist.get_world_size() - 1
    training = Training(seed=1 if torn else 2, device=device, sequences=sequences)
    with dos.CheckpointManager(
        run.url, save_every=_EVERY, storage_options=run.storage_options
    ) as manager:
        start = manager.load(training.values) or 0
        if start:
            notes[f"loaded-{start}"] = digests(training.state())
        for step in range(start + 1, (_DOOMED if torn else _NEVER) + 1):
            notes[f"loss-{step}"] = loss = training.train(step)
            if rank == 0 and step % 2 == 0:
                tell(f"step {step:>2}  loss {loss:.3f}")
            if step == _COMMITTED:
                notes[f"saved-{step}"] = digests(training.state())
            if step == _DOOMED and torn and is_last:
                die_in_the_next_upload(run.child(f"step-{step}"), others=rank)
            if step == _WARNED and is_last:
                os.kill(os.getpid(), signal.SIGTERM)
            manager.step(step, training.values, metrics={"loss": loss})
            if manager.preempted():
                notes |= {"last": step, f"saved-{step}": digests(training.state())}
                break


def die_in_the_next_upload(doomed: StoreSpec, others: int) -> None:
    """Have this process killed where it uploads, once so many other ranks have written."""

    def die(*_: object, **__: object) -> None:
        for _attempt in range(1200):
            if len(_ranks_that_wrote(meta.key for meta in doomed.open().list())) >= others:
                break
            time.sleep(0.1)
        # After two minutes this process is killed all the same, and then `prove_torn` fails.
        os.kill(os.getpid(), signal.SIGKILL)

    # A save calls `upload_object` for each object. `die` ends this process, so it stays in place.
    upload_items.upload_object = die  # type: ignore[assignment,attr-defined]


class Training:
    """A small language model that reads torch's own source, and its optimizer.

    Args:
        seed: a resumed job has another one, so that its values must come from the checkpoint.
        device: where the model is.
        sequences: the number of sequences of a step, of all ranks together.
    """

    def __init__(self, seed: int, device: torch.device, sequences: int) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(
            nn.Embedding(256, 64),
            nn.Flatten(),
            nn.Linear(64 * _CONTEXT, 192),
            nn.GELU(),
            nn.Linear(192, 256),
        ).to(device)
        fully_shard(self.model, mesh=init_device_mesh(device.type, (dist.get_world_size(),)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.values = {"model": self.model, "optimizer": self.optimizer}
        self._text = torch.frombuffer(
            bytearray(Path(functional.__file__).read_bytes()), dtype=torch.uint8
        )
        self._sequences, self._device = sequences, device

    def state(self) -> dict[str, Any]:
        """Return the state as nested dicts of tensors and plain values."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def train(self, step: int) -> float:
        """Do one step, whose sequences depend on its number alone; return the mean loss of all."""
        generator = torch.Generator().manual_seed(step)
        last = len(self._text) - _CONTEXT - 1
        starts = torch.randint(last, (self._sequences,), generator=generator, device="cpu")
        own_starts = starts.tolist()[dist.get_rank() :: dist.get_world_size()]
        batch = torch.stack([self._text[start : start + _CONTEXT + 1] for start in own_starts])
        batch = batch.long().to(self._device)
        loss = functional.cross_entropy(self.model(batch[:, :-1]), batch[:, -1])
        loss.backward()  # type: ignore[no-untyped-call]  # torch's
        self.optimizer.step()
        self.optimizer.zero_grad()
        mean_loss = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean_loss)  # the sum of all ranks' shares in it
        return mean_loss.item()


def digests(value: object, key: str = "") -> dict[str, str]:
    """Return the SHA-256 of every tensor (type, shape and bytes) and every other value, by key.

    Sharded tensors are gathered, so all ranks of their group must call this together.
    """
    if isinstance(value, (Mapping, list, tuple)):
        digest_of_key: dict[str, str] = {}
        for name, inner in value.items() if isinstance(value, Mapping) else enumerate(value):
            digest_of_key |= digests(inner, f"{key}.{name}" if key else str(name))
        return digest_of_key
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if not isinstance(value, Tensor):
        return {key: hashlib.sha256(repr(value).encode()).hexdigest()}
    tensor = value.detach().cpu().contiguous()
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)} ".encode())
    digest.update(tensor.reshape(-1).view(torch.uint8).numpy())
    return {key: digest.hexdigest()}


# --- the story and its proofs


class Demo:
    """One run of the demo.

    Args:
        run: the run.
        crew: the processes that start ranks.
        resume_ranks: number of ranks that resume. Default: half of them.

    Attributes:
        spec: the run.
        phases: of each phase its title and what it has proved.
        proofs: the number of statements that were proved.
    """

    def __init__(self, run: StoreSpec, crew: Crew, resume_ranks: int | None) -> None:
        self.spec, self.crew, self.ranks = run, crew, crew.ranks
        self.resume_ranks = resume_ranks or self.ranks // 2
        if self.resume_ranks > self.ranks:
            raise InputError(f"--resume-ranks {self.resume_ranks}: at most --ranks {self.ranks}")
        # The ranks of both jobs have equal shares.
        multiple = math.lcm(self.ranks, self.resume_ranks)
        self._sequences = multiple * -(-_SEQUENCES // multiple)
        self.phases: list[tuple[str, list[str]]] = []
        self.proofs = 0

    def run(self) -> None:
        """Run the whole demo; raise if a statement does not hold or a process fails."""
        _title(f"Train on {counted(self.ranks, 'rank')} (FSDP2, {self.crew.device}), and save")
        torn = self.job(self.ranks, torn=True)
        self._begin("1. Committed")
        for step in (_EVERY, _COMMITTED):
            self.prove_committed(step, self.ranks)
        self._begin(
            f"2. Rank {self.ranks - 1} was killed in the middle of the save of step-{_DOOMED}"
        )
        self.prove_ended_cleanly(torn)
        doomed = self.spec.child(f"step-{_DOOMED}")
        self.prove_torn([meta.key for meta in doomed.open().list()])
        self.prove_invisible(doomed)
        self._begin(f"3. Resume on {counted(self.resume_ranks, 'rank')}")
        resumed = self.job(self.resume_ranks, torn=False)
        self.prove_resumed(torn[0], resumed)
        self.prove_committed(_DOOMED, self.resume_ranks)
        self._begin("4. Its last rank got SIGTERM")
        self.prove_preempted(resumed)

    def job(self, ranks: int, *, torn: bool) -> list[Ended]:
        """Run a job of the demo; return how its ranks have ended. All starters call it alike.

        Raises:
            DemoFailedError: a rank has failed otherwise than by the kill of another.
        """
        ended = self.crew.run(ranks, train, self.spec, self._sequences, torn)
        for rank, end in enumerate(ended):
            # A torn job may end in any way but with a text, which is an error that is not of this
            # library; the proofs say more. All ranks of another job must succeed.
            is_allowed = not isinstance(end.outcome, str) if torn else end.outcome is None
            if not is_allowed:
                error = DemoFailedError(f"rank {rank} ended with {end.outcome!r}")
                error.add_note(end.log)
                raise error
        return ended

    def _begin(self, title: str) -> None:
        _title(title)
        self.phases.append((title, []))

    def prove(self, holds: bool, statement: str) -> None:
        """Print a statement if it holds; otherwise raise."""
        if not holds:
            raise DemoFailedError(f"this does not hold: {statement}")
        self.proofs += 1
        self.phases[-1][1].append(statement)
        tell(statement, coloured("  ok ", "green"))

    def _steps(self) -> dict[int, dos.reports.ListedCheckpoint]:
        steps = dos.steps(self.spec.url, storage_options=self.spec.storage_options)
        return {step.step: step for step in steps if step.step is not None}

    def prove_committed(self, step: int, ranks: int) -> None:
        """Prove that a step counts, and was saved by so many ranks."""
        listed = self._steps().get(step)
        size = size_text(listed.total_bytes) if listed else "nothing"
        self.prove(
            listed is not None and listed.world_size == ranks,
            f"step-{step} is committed: {size} of {counted(ranks, 'rank')}",
        )

    def prove_ended_cleanly(self, ended: Sequence[Ended]) -> None:
        """Prove that the last rank was killed, and every other raised a `DcpObjstoreError`."""
        *survivors, killed = [end.outcome for end in ended]
        typed = [error for error in survivors if isinstance(error, DcpObjstoreError)]
        kinds = ", ".join(sorted({type(outcome).__name__ for outcome in survivors}))
        self.prove(
            killed == -signal.SIGKILL and typed == survivors,
            f"typed error ({kinds}) on {len(typed)} of {len(survivors)} surviving ranks",
        )

    def prove_torn(self, keys: Collection[str]) -> None:
        """Prove that the objects of all ranks but the killed one are there, and no marker."""
        wrote = _ranks_that_wrote(keys)
        self.prove(
            wrote == set(range(self.ranks - 1)) and MARKER_KEY not in keys,
            f"the torn save left objects of {counted(len(wrote), 'rank')}, no {MARKER_KEY} marker",
        )

    def prove_invisible(self, doomed: StoreSpec) -> None:
        """Prove that a load of the torn checkpoint finds none, and that it is not a step."""
        load = partial(dos.read_state_dict, doomed.url, storage_options=doomed.storage_options)
        _, error = capture(load)
        self.prove(
            isinstance(error, CheckpointNotFoundError) and max(self._steps()) == _COMMITTED,
            f"so it does not exist: a load raises {type(error).__name__}, and the newest step is"
            f" {_COMMITTED}",
        )

    def prove_resumed(self, torn: Ended, resumed: Sequence[Ended]) -> None:
        """Prove that all ranks have loaded what was saved, and went on as the killed job did."""
        loaded = [end.notes.get(f"loaded-{_COMMITTED}") for end in resumed]
        self.prove_identical(f"step-{_COMMITTED}", torn.notes[f"saved-{_COMMITTED}"], loaded)
        names = [f"loss-{step}" for step in range(_COMMITTED + 1, _DOOMED + 1)]
        gap = max(abs(torn.notes[name] - resumed[0].notes[name]) for name in names)
        self.prove(
            gap <= _LOSS_TOLERANCE,
            f"steps {_COMMITTED + 1} to {_DOOMED} have the losses that they had before the kill,"
            f" within {gap:.0e}",
        )

    def prove_identical(
        self, what: str, saved: Mapping[str, str], loaded: Sequence[Mapping[str, str] | None]
    ) -> None:
        """Prove that every tensor and value is the same, bit for bit.

        Args:
            what: the state, in words.
            saved: its digests when it was saved.
            loaded: those of each rank that should have loaded it; None of one that has not.
        """
        differ: set[str] = set()
        for state in loaded:
            differ |= {key for key, _ in (state or {}).items() ^ saved.items()}
        agree = f"{first_few(sorted(differ), 3)} differ" if differ else "agree"
        text = f"{what}: state bit-identical: all {len(saved)} SHA-256 digests {agree}"
        self.prove(bool(saved) and not differ, text)

    def prove_preempted(self, resumed: Sequence[Ended]) -> None:
        """Prove that all ranks ended at the newest step, and that others can read what they had."""
        newest = max(self._steps())
        # SIGTERM came at step `_WARNED`, so the ranks have saved that step or a later one.
        self.prove(
            {end.notes.get("last") for end in resumed} == {newest} and newest >= _WARNED,
            f"all ranks ended after step {newest}, saved it, and it is the newest committed step",
        )
        step = self.spec.child(f"step-{newest}")
        saved = resumed[0].notes[f"saved-{newest}"]
        state = dos.read_state_dict(step.url, storage_options=step.storage_options)
        self._prove_plain("one process, without a group", saved, state)
        with tempfile.TemporaryDirectory(prefix="dcp-objstore-demo-") as folder:
            store = step.open()
            for meta in store.list():
                body, _ = store.get(meta.key, max_size_bytes=meta.size_bytes)
                Path(folder, meta.key).write_bytes(body)
            dcp_to_torch_save(folder, file := f"{folder}/checkpoint.pt")
            state = torch.load(file, weights_only=True)
        self._prove_plain("stock torch, dcp_to_torch_save", saved, state)

    def _prove_plain(self, reader: str, saved: Mapping[str, str], state: dict[str, Any]) -> None:
        state["optimizer"].pop("groups", None)  # of several ranks, beside the numbered ones
        self.prove_identical(reader, saved, [digests(state)])

    def measure(self) -> list[dos.measure.BenchReport]:
        """Measure saves, loads and plain requests, in all starters together."""
        options: dict[str, Any] = {"storage_options": self.spec.storage_options}
        options |= {"seconds": _BENCH_SECONDS, "size_bytes": _BENCH_BYTES, "progress": False}
        return self.crew.share("speeds", dos.measure.bench(self.spec.url, **options))


def _ranks_that_wrote(keys: Iterable[str]) -> set[int]:
    return {name.rank for key in keys if (name := parse_data_key(key)) is not None}


# --- the report, whose sections are the fields of .github/ISSUE_TEMPLATE/benchmark-results.yml


def report_text(
    demo: Demo, speeds: Sequence[dos.measure.BenchReport], seconds: float, store: str
) -> str:
    """Return a report as Markdown, which names no bucket.

    Args:
        demo: a demo that has run.
        speeds: what `bench` has measured in each process that started ranks.
        seconds: the duration of all of it.
        store: the store, in words.
    """
    crew = demo.crew
    together = {
        way: round(sum(getattr(speed, way).gib_per_second.median for speed in speeds), 3)
        for way in ("save", "plain_puts", "load", "plain_gets")
    }
    results = {
        "versions": {**versions().details, "system": platform.platform()},
        "ranks": demo.ranks,
        "resume_ranks": demo.resume_ranks,
        "launcher": crew.launcher,
        "device": crew.device,
        "seconds": round(seconds, 1),
        "gib_per_second": together,
        "processes": len(speeds),
    }
    started = f"started by {crew.launcher}" if crew.launcher else "on one machine"
    gpu = f", {torch.cuda.get_device_name()}" if crew.device == "cuda" else ""
    memory = round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB)
    words = [re.sub("://.*", "://...", word) for word in sys.argv[1:]]
    proved = (  # "1. Committed" and its proofs become a heading, without the number, and a list
        f"**{title.lstrip('1234. ')}**\n\n" + "\n".join(f"- {proof}" for proof in proofs)
        for title, proofs in demo.phases
    )
    lines = [
        "### Machine",
        f"{demo.ranks} ranks {started}; each machine: {processors()} processors, {memory} GiB of"
        f" memory{gpu}. Was anything else running?",
        "### Store",
        store,
        "### Command",
        shlex.join(["dcp-objstore", *words]),
        "### results.json",
        f"```json\n{json.dumps(results, indent=1)}\n```",
        "### What should readers know?",
        *proved,
        f"**Speed**\n\n{size_text(speeds[0].size_bytes)} in each of"
        f" {counted(len(speeds), 'process')}: saves {together['save']} GiB/s, where plain PUTs"
        f" without digests reach {together['plain_puts']}; loads {together['load']} GiB/s, plain"
        f" GETs {together['plain_gets']}. All objects were removed: a listing shows none.",
    ]
    return "\n\n".join(lines) + "\n"


def _store_of(spec: StoreSpec) -> str:
    has_own_endpoint = spec.open().endpoint_url is not None
    where = "an endpoint of its own" if has_own_endpoint else "the provider's endpoint"
    return f"{spec.parsed.scheme}:// at {where}. Which provider, storage class and region?"
